"""Importers on small made-up tables: numbers by hand; errors about missing, malformed or impossible values name file, row and
column."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.importers import aiconfigurator, imported_tables, llmservingsim, vidur
from model.architectures import published_shapes, transformer
from model.base.checks import ParameterError
from model.hardware import devices, profile_files
from model.hardware.profile import TIMES
from tests.support.foreign_tables import (
    ATTENTION,
    DECODE,
    DENSE,
    FIRST,
    GEMM,
    MLP,
    READERS,
    SEQUENCE,
    arguments,
    copy_tables,
    empty_file,
    from_aiconfigurator,
    from_llmservingsim,
    from_vidur,
    header_only,
    invalid_file,
    remove_file,
    swap,
    times,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tables(tmp_path)


PRODUCT = "time_stats.attn_pre_proj.median"


# --- Reading ---


def test_vidur_layers_are_sums_of_their_operations(folder: Path) -> None:
    made = from_vidur(folder)
    # Norms, four products, rotation, activation, one addition; not the embedding. Two tokens were measured twice: their median.
    assert times(made, "dense") == {(1,): 266.0, (2,): 269.0, (8,): 239.0, (64,): 315.0}
    assert times(made, "dense", tensor_parallel=2) == {(1,): 148.0}
    assert times(made, "embedding") == {(1,): 4.0, (2,): 4.0, (8,): 5.0, (64,): 5.0}
    row = made.table.filter((pl.col("part") == "dense") & (pl.col("tokens") == 2))
    assert row["repeats"].item() == 2
    # Quartiles of a normal distribution with the sum of nine deviations of 1.5 us.
    half = 9 * 1.5 * 0.6745
    assert (row["low_s"].item() * 1e6, row["high_s"].item() * 1e6) == pytest.approx((269 - half, 269 + half))
    assert (made.kind, made.provenance, made.mode) == ("model", "measured", "kernel-only")


def test_vidur_attention_includes_cache_operations_and_prefills(folder: Path) -> None:
    found = times(from_vidur(folder), "attention")
    assert found == {(1, 32, 1): 14.0, (1, 1024, 1): 30.0, (1, 1024, 4): 85.0, (64, 0, 1): 56.0, (64, 1024, 1): 85.0}


def test_vidur_steps_are_of_the_model_without_messages(folder: Path) -> None:
    assert times(from_vidur(folder), "step") == {(8,): 1100.0, (16,): 1300.0}


def test_vidur_transfers_are_medians_within_a_node(folder: Path) -> None:
    made = from_vidur(folder)
    assert times(made, "all_reduce", tensor_parallel=2) == {(8192,): 12.0}
    assert times(made, "all_reduce", tensor_parallel=4) == {(8192,): 14.0}
    # Between two devices, independent of tensor_parallel.
    assert times(made, "send") == {(8192,): 6.0, (1048576,): 10.0}
    row = made.table.filter((pl.col("part") == "all_reduce") & (pl.col("tensor_parallel") == 2))
    # Median of the repeats' quartiles: 10 us, 12 us and 20 us, with deviations of 2, 3 and 9.5.
    low, high = ([each - sign * 0.6745 * wide for each, wide in ((10, 2), (12, 3), (20, 9.5))] for sign in (1, -1))
    middle = sorted(low)[1] * 1e-6, sorted(high)[1] * 1e-6, 3
    assert (row["low_s"].item(), row["high_s"].item(), row["repeats"].item()) == pytest.approx(middle)


def test_zero_times_and_dips_are_kept_and_noted(folder: Path) -> None:
    made = from_vidur(folder)
    assert times(made, "dense", tensor_parallel=2) == {(1,): 148.0}  # its activation was rounded to zero
    assert any("dense: at 1 of 5 points the time falls by more than 5%, by 11% at tokens 8" in note for note in made.notes)


def test_frontier_attention_can_be_used_with_vidur(folder: Path) -> None:
    (folder / "vidur" / "attention.csv").rename(folder / "elsewhere.csv")
    without = vidur.read(folder / "vidur", model="llama-2-7b", gpu="a100")
    assert without.parts == ("dense", "embedding", "step")
    assert times(from_vidur(folder, attention=str(folder / "elsewhere.csv")), "attention")[1, 32, 1] == 14.0


def test_aiconfigurator_rows_of_other_types_or_without_times_are_left_out(folder: Path) -> None:
    made = from_aiconfigurator(folder)
    assert times(made, "gemm")[1, 4096, 4096] == 15.0
    assert made.rows("gemm").height == 9
    assert any("2 rows without a time or without work left out" in note for note in made.notes)
    # `step` is the number of cached positions before the new token; windows and other types are left out.
    assert times(made, "decode")[32, 8, 128, 1023, 4] == 16.0
    assert times(made, "decode")[32, 8, 128, 127, 1] == 10.0
    assert made.rows("decode").height == 9
    # Elements of two bytes; replayed graphs, not eager runs.
    assert times(made, "all_reduce", tensor_parallel=2) == {(8192,): 6.0, (2097152,): 20.0}
    assert made.kind == "operations"
    assert "rope" not in made.facts["decode_includes"]


def test_reductions_are_geometric_means_over_libraries(folder: Path) -> None:
    """The mean of 3, 6 and 12 us is 6; NCCL's other operations and types, and sizes missing in a library, are left out."""
    comm = folder / "aiconfigurator" / "comm"
    for library, latencies in (("trtllm/9.9", (0.003, 0.044, 0.9)), ("nccl/1", (0.012, 0.025, 0.7))):
        kind = "nccl_dtype" if library.startswith("nccl") else "allreduce_dtype"
        name = "nccl_perf" if library.startswith("nccl") else "custom_allreduce_perf"
        points = zip((4096, 2**20, 2**28), latencies, strict=True)
        rows = [{"num_gpus": 2, "message_size": size, "latency": each} for size, each in points]
        rows = [row | {kind: "half" if "nccl" in kind else "bfloat16", "op_name": "all_reduce"} for row in rows]
        rows += [rows[0] | {"op_name": "all_gather", "latency": 7.0}] if "nccl" in kind else []
        rows += [rows[0] | {kind: "int8", "latency": 7.0}]
        (comm / library).mkdir(parents=True)
        pl.DataFrame(rows).write_parquet(comm / library / f"{name}.parquet")
    libraries = ("trtllm/9.9", "vllm/1.0", "nccl/1")
    rows, sources, note = aiconfigurator.reductions(folder / "aiconfigurator", libraries)
    found = [[row["tensor_parallel"], row["size"], *(round(row[name] * 1e6, 3) for name in TIMES), row["repeats"]] for row in rows]
    assert found == [[2, 8192, 6.0, 4.5, 9.0, 3], [2, 2097152, 28.02, 22.5, 34.5, 3]]
    assert [source.parts for source in sources] == [("all_reduce",)] * 3
    said = "all_reduce: replayed as graphs, geometric mean and quartiles over the libraries trtllm/9.9, vllm/1.0, nccl/1"
    assert note == said


def test_aiconfigurator_attention_is_optional(folder: Path) -> None:
    assert "decode" not in from_aiconfigurator(folder, attention="none").parts


def test_llmservingsim_layers_have_two_norms(folder: Path) -> None:
    made = from_llmservingsim(folder)
    assert times(made, "dense") == {(1,): 2 * 1.9 + 55 + 2.2 + 38 + 247 + 2.6 + 127, (8,): 488.7}
    assert times(made, "embedding") == {(1,): 2.8, (8,): 4.3}
    assert times(made, "head") == {(1,): 1098.9, (8,): 1116.5}  # with the final norm
    assert times(made, "step") == {(1,): 25.0, (8,): 29.0}
    assert times(made, "attention") == {
        (1, 16, 1): 9.3,
        (1, 1024, 1): 14.2,
        (1, 1024, 8): 45.0,
        (16, 0, 1): 12.0,
        (16, 1024, 1): 20.0,
    }
    assert any("1 passes that mix" in note for note in made.notes)
    assert (made.date, made.facts["gpu"]) == ("2026-01-02", "a made-up GPU")
    with (folder / ATTENTION).open("a") as file:  # a prompt of one token is also a prefill
        file.write("1,512,0,0,11.0\n1,64,1,128,31.0\n")
    again = from_llmservingsim(folder)
    assert times(again, "attention") == times(made, "attention") | {(1, 512, 1): 11.0}
    assert again.notes[-1] == "attention: 2 passes that mix a prompt and new tokens left out"


@pytest.mark.parametrize("source", READERS)
def test_imported_profiles_are_saved_and_loaded_with_sources(source: str, folder: Path, tmp_path: Path) -> None:
    made = READERS[source](folder)
    again = profile_files.load(profile_files.save(made, tmp_path))
    assert again.table.equals(made.table)
    assert again.sources == made.sources
    assert {part for each in made.sources for part in each.parts} == {*made.parts}
    assert all(each.repository and each.licence and len(each.sha256) == 64 for each in made.sources)


WHOLE: dict[str, dict[str, Any]] = {
    "vidur": {
        "name": "a100-llama-2-7b", "model": "llama-2-7b", "device": "a100", "kind": "model", "mode": "kernel-only", "date": "",
        "engine": "Sarathi (profiled by Vidur)", "provenance": "measured", "dtype": "bfloat16", "facts": {},
        "errors": {"dense": 0.0612, "embedding": 0.0506, "attention": 0.0, "step": 0.0, "send": 0.0, "all_reduce": 0.0},
        "notes": (
            "dense: sum of the medians of a layer's operations, as Vidur sums them, with one of two additions (the other is not "
            "timed); low and high are quartiles from the sums of standard deviations",
            "times were rounded to 1 us",
            "dense: at 1 of 5 points the time falls by more than 5%, by 11% at tokens 8",
            "attention: includes attn_input_reshape, attn_kv_cache_save, attn_output_reshape; passes of several tokens are "
            "prefills of one sequence",
            "attention: the measured time of saving keys and values grows with the tokens of a sequence",
            "step: schedule, prepare_inputs_e2e, sampler_launch, process_model_outputs, medians, on Vidur's host; batches below 8 "
            "take as long as 8",
            "send, all_reduce: between devices of one node; medians of repeats",
        ),
        "sources": [
            ("microsoft/vidur", "mlp.csv", "MIT", ("dense", "embedding")),
            ("microsoft/vidur", "attention.csv", "MIT", ("attention",)),
            ("microsoft/vidur", "cpu_overheads.csv", "MIT", ("step",)), ("microsoft/vidur", "send_recv.csv", "MIT", ("send",)),
            ("microsoft/vidur", "all_reduce.csv", "MIT", ("all_reduce",)),
        ],
        "covers": "dense (tokens 1 to 64, tensor_parallel 1/2); attention (width 1 to 64, context 0 to 1024, batch 1 to 4); "
        "embedding (tokens 1 to 64, tensor_parallel 1/2); step (batch 8 to 16); all_reduce (size 8192, tensor_parallel 2/4); "
        "send (size 8192 to 1.04858e+06)",
        "off": "dense 6.1%, embedding 5.1%, attention 0.0%, step 0.0%, send 0.0%, all_reduce 0.0%",
    },
    "aiconfigurator": {
        "name": "h100-operations", "model": "", "device": "h100", "kind": "operations", "mode": "cuda-graph", "date": "",
        "engine": "vllm/1.0 (collected by AIConfigurator)", "provenance": "measured", "dtype": "bfloat16",
        "facts": {"device": "a made-up GPU", "decode_includes": ["cache write"], "decode_engine": "vllm/1.0"},
        "notes": ("gemm/vllm/1.0/gemm_perf.parquet: 2 rows without a time or without work left out",),
        "sources": [
            ("ai-dynamo/aiconfigurator", "gemm/vllm/1.0/gemm_perf.parquet", "Apache-2.0", ("gemm",)),
            ("ai-dynamo/aiconfigurator", "attention/vllm/1.0/generation_attention_perf.parquet", "Apache-2.0", ("decode",)),
            ("ai-dynamo/aiconfigurator", "comm/vllm/1.0/custom_allreduce_perf.parquet", "Apache-2.0", ("all_reduce",)),
        ],
        "covers": "all_reduce (size 8192 to 2.09715e+06, tensor_parallel 2/4); gemm (m 1 to 4, n 4096 to 8192, k 4096 to 8192); "
        "decode (heads 8 to 32, kv_heads 8, head_dim 128, context 127 to 4095, batch 1 to 4)",
        "off": "gemm 0.2%, decode 49.2%",
    },
    "llmservingsim": {
        "name": "rtx-4090-llama-3.1-8b", "model": "llama-3.1-8b", "device": "rtx-4090", "kind": "model", "mode": "kernel-only",
        "engine": "vLLM 0.0.1 (profiled by LLMServingSim)", "provenance": "measured", "dtype": "bfloat16", "date": "2026-01-02",
        "facts": {"vllm_version": "0.0.1", "gpu": "a made-up GPU", "profiled_at": "2026-01-02T03:04:05+00:00"},
        "errors": {"dense": 0.0, "embedding": 0.0, "head": 0.0, "step": 0.0, "attention": 0.0},
        "notes": (
            "dense: sum of a layer's operations, its norm twice", "head: lm_head and the final norm",
            "step: the sampler alone; launching and preparing were not measured",
            "attention: 1 passes that mix a prompt and new tokens left out",
        ),
        "sources": [
            ("casys-kaist/LLMServingSim", "dense.csv", "MIT", ("dense", "embedding")),
            ("casys-kaist/LLMServingSim", "per_sequence.csv", "MIT", ("head", "step")),
            ("casys-kaist/LLMServingSim", "attention.csv", "MIT", ("attention",)),
        ],
        "covers": "dense (tokens 1 to 8); attention (width 1 to 16, context 0 to 1024, batch 1 to 8); head (positions 1 to 8); "
        "embedding (tokens 1 to 8); step (batch 1 to 8)",
        "off": "dense 0.0%, embedding 0.0%, head 0.0%, step 0.0%, attention 0.0%",
    },
}  # fmt: skip
"""Metadata of the imported profiles, and the output of the command."""


@pytest.mark.parametrize("source", READERS)
def test_metadata_of_imported_profiles_and_command_output(source: str, folder: Path, tmp_path: Path) -> None:
    made, wanted = READERS[source](folder), dict(WHOLE[source])
    said = {name: getattr(made, name) for name in wanted if name not in ("sources", "covers", "off")}
    assert said == {name: value for name, value in wanted.items() if name in said}
    assert [(each.repository, each.file, each.licence, each.parts) for each in made.sources] == wanted["sources"]
    assert {each.commit for each in made.sources} == {""}
    gpu = devices.device(wanted["device"])
    assert (made.bandwidth, made.rate, made.cache_bytes) == (gpu.bandwidth, gpu.rate("bfloat16"), gpu.cache_bytes)
    assert made.shape == (transformer.described(published_shapes.preset(wanted["model"])) if wanted["model"] else {})
    more = ["--network", str(folder / "vidur/network")] if source == "vidur" else []
    done = CliRunner().invoke(app, [*arguments(folder)[source], *more, "-o", str(tmp_path)])
    assert done.stdout.splitlines() == [
        f"{tmp_path / wanted['name']}.json: measured", f"covers {wanted['covers']}", f"median errors {wanted['off']}",
        *(f"note: {each}" for each in wanted["notes"]),
    ]  # fmt: skip
    # A source without a date of measurement: the date of the import.
    assert profile_files.load(tmp_path / f"{wanted['name']}.json").date == (wanted["date"] or datetime.date.today().isoformat())


def test_errors_are_leave_one_out_errors_of_inner_points(folder: Path) -> None:
    """Of 1, 2, 8 and 64 tokens the second and third are left out in turn, and interpolated in logarithms."""
    between = 266 ** (2 / 3) * 239 ** (1 / 3) / 269 - 1, 269 ** (3 / 5) * 315 ** (2 / 5) / 239 - 1
    assert from_vidur(folder).errors["dense"] == pytest.approx(np.median([np.median(np.abs(between)), 0.0]), abs=1e-4)
BAD = [
    # A missing or changed file.
    (MLP, remove_file, "mlp.csv: there is no such file"),
    (GEMM, remove_file, "gemm_perf.parquet: there is no such file"),
    (DECODE, remove_file, "generation_attention_perf.parquet: there is no such file"),
    (DENSE, remove_file, "dense.csv: there is no such file"),
    (MLP, empty_file, "mlp.csv: the file is empty"),
    (MLP, header_only, "mlp.csv: the table is empty"),
    (GEMM, header_only, "gemm/vllm/1.0/gemm_perf.parquet: the table is empty"),
    (DENSE, header_only, "dense.csv: the table is empty"),
    (MLP, invalid_file, "mlp.csv: it cannot be read as CSV"),
    (MLP, lambda path: path.write_text(path.read_text().replace("\n", ",7\n").replace(",7\n", "\n", 1)),
     "mlp.csv: it cannot be read as CSV: row 1 must have 27 fields, as the header has, got 28"),
    (GEMM, invalid_file, "gemm_perf.parquet: it cannot be read as Parquet"),
    # A header that changed.
    (MLP, swap("time_stats.add.median", "time_stats.add.p50"), "column time_stats.add.median is missing; the nearest of its 27"),
    ("vidur/attention.csv", swap("kv_cache_size", "context"), "attention.csv: column kv_cache_size is missing"),
    ("vidur/attention.csv", swap("attn_kv_cache_save.std", "x"), "column time_stats.attn_kv_cache_save.std is missing"),
    ("vidur/cpu_overheads.csv", swap("schedule_median", "schedule"), "cpu_overheads.csv: column schedule_median is missing"),
    ("vidur/network/all_reduce.csv", swap("num_workers", "workers"), "all_reduce.csv: column num_workers is missing"),
    (GEMM, swap("gemm_dtype", "dtype"), "column gemm_dtype is missing; the nearest of its 6 columns is dtype"),
    (GEMM, lambda path: pl.DataFrame().write_parquet(path), "gemm_perf.parquet: column gemm_dtype is missing; it has no columns"),
    (DECODE, swap("step", "context"), "column step is missing"),
    (ATTENTION, swap("kv_decode", "kv"), "attention.csv: column kv_decode is missing"),
    # Units.
    (DENSE, swap("time_us", "time_ticks"), "dense.csv: column time_ticks: unknown unit 'ticks'; known: ms, s, us"),
    (SEQUENCE, swap("time_us", "latency"), "per_sequence.csv: column time_us is missing"),
    # Values that are not numbers, or out of bounds.
    (MLP, swap("True,1,1", "True,one,1"), "mlp.csv: row 1, column num_tokens: must be a number of at least 1, got 'one'"),
    (MLP, swap("True,64,1", "True,0,1"), "mlp.csv: row 5, column num_tokens: must be a number of at least 1, got 0"),
    (MLP, swap(FIRST, FIRST.replace("0.060", "")), f"mlp.csv: row 1, column {PRODUCT}: must be a number of at least 0"),
    (MLP, swap(FIRST, FIRST.replace("0.060", "nan")), f"mlp.csv: row 1, column {PRODUCT}: must be a number"),
    (DENSE, swap("qkv_proj,8,56", "qkv_proj,8,-56"), "dense.csv: row 4, column time_us: must be a number of at least 0, got -56.0"),
    (GEMM, swap("2,4096,4096,0.016", "2,4096,4096,-0.016"), "row 3, column latency: must be a number of at least 0, got -0.016"),
    (DECODE, swap("1,32,8,128,127", "1,32,0,128,127"), "row 1, column num_key_value_heads: must be a number of at least 1, got 0"),
    ("vidur/attention.csv", swap("False", "no"), "attention.csv: row 1, column is_prefill: unknown value 'no'"),
    ("vidur/network/send_recv.csv", swap("send_recv,2", "broadcast,2"), "row 1, column collective: unknown value 'broadcast'"),
    # Counts are whole numbers.
    (MLP, swap("True,8,1", "True,8.5,1"), "mlp.csv: row 4, column num_tokens: must be a whole number, got 8.5"),
    (GEMM, swap("2,4096,4096,0.016", "2.5,4096,4096,0.016"), "row 3, column m: must be a whole number, got 2.5"),
    (DENSE, swap("qkv_proj,8,56", "qkv_proj,7.5,56"), "dense.csv: row 4, column tokens: must be a whole number, got 7.5"),
    (ATTENTION, swap("0,0,8,1024,45.0", "0,0,8,1023.5,45.0"), "attention.csv: row 3, column kv_decode: must be a whole number"),
    # Another model, or a missing operation.
    (MLP, swap("11008,True,2", "14336,True,2"), "row 2, column n_expanded_embd: must be 11008, the model's ffn, got 14336"),
    ("vidur/cpu_overheads.csv", swap("Llama-2-7b", "Llama-9", 2), "column model_name: no row of llama-2-7b; there are"),
    (DENSE, swap("rotary_emb", "rope", 2), "dense.csv: row 5, column layer: unknown value 'rope'; known: act_fn"),
    (DENSE, swap("o_proj,8,41\n", ""), "dense.csv: column tokens: layernorm and o_proj do not both have 8"),
    (SEQUENCE, swap("sampler,1,25\nsampler,8,29\n", ""), "per_sequence.csv: column layer: no row of sampler"),
    (ATTENTION, swap("0,0,1,16", "0,0,0,16"), "attention.csv: row 1, column n_decode: a pass needs a prompt or new tokens"),
    (GEMM, swap("bfloat16", "int4", 99), "column gemm_dtype: no row of bfloat16; there are fp8, int4"),
    # Impossible times: 135 MB of weights in 5 us; arithmetic; keys and values; a layer with a time of zero.
    (MLP, swap("0.0015,0.110", "0.0015,0.005"), "row 1, column time_stats.mlp_up_proj.median: 5e-06 s would be"),
    (GEMM, swap("1,8192,4096,0.029", "1,8192,4096,0.001"), "row 6, column latency: 1e-06 s would be 6.71e+13 bytes/s, above"),
    (DECODE, swap("4,32,8,128,4095", "64,32,8,128,4095"), "row 6, column latency: 4e-05 s would be 2.68e+13 bytes/s"),
    (DENSE, swap("gate_up_proj,8,252", "gate_up_proj,8,25.2"), "row 10, column time_us: 2.52e-05 s would be 9.32e+12 bytes/s"),
    (SEQUENCE, swap("lm_head,8,1114", "lm_head,8,111.4"), "per_sequence.csv: row 2, column time_us"),
    (SEQUENCE, swap("lm_head,8,1114", "lm_head,8,0"), "per_sequence.csv: row 2, column time_us: 0 s would be zero time"),
    (ATTENTION, swap("0,0,8,1024,45.0", "0,0,800,1024,45.0"), "attention.csv: row 3, column time_us"),
    (ATTENTION, swap("16,0,0,0,12.0", "4096,0,0,0,12.0"), "operations/s of the arithmetic of rtx-4090"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "spoil", "message"), BAD, ids=[f"{file}: {message[:50]}" for file, _, message in BAD])
def test_a_bad_table_is_refused_with_file_row_and_column(
    file: str, spoil: Callable[[Path], None], message: str, folder: Path
) -> None:
    spoil(folder / file)
    with pytest.raises(ParameterError) as caught:
        READERS[file.split("/")[0]](folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def held(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Arguments of the checks of each column of times, in the order of calls: bytes, operations, rounding and launches."""
    found: dict[str, list[dict[str, Any]]] = {}
    check = imported_tables.check_reached

    def recorded(table: imported_tables.ImportedTable, column: str, seconds: Any, on: Any, **more: Any) -> None:
        found.setdefault(f"{table.shown} {column}", []).append({"device": on.name, "seconds": [*seconds], **more})
        check(table, column, seconds, on, **more)

    monkeypatch.setattr(imported_tables, "check_reached", recorded)
    READERS[source](folder)
    return found


def test_bounds_of_products_and_attention_by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes and two operations per weight, divided over devices; two bytes per number of keys and values."""
    found = held("vidur", folder, monkeypatch)
    tokens, tensor_parallel = np.array([1, 2, 2, 8, 64, 1]), np.array([1, 1, 1, 1, 1, 2])
    up = 4096 * 11008
    sizes = {"attn_pre_proj": 3 * 4096**2, "attn_post_proj": 4096**2, "mlp_up_proj": 2 * up, "mlp_down_proj": up}
    for name, size in sizes.items():
        [own] = found[f"mlp.csv time_stats.{name}.median"]
        assert (own["device"], own["rounding"], "launches" in own) == ("a100", 0.5e-6, False)
        assert [*own["moved"]] == [*(2 * size / tensor_parallel)]
        assert [*own["operations"]] == [*(2 * size * tokens / tensor_parallel)]
    for name, chosen in (("attn_decode", [(1, 1, 32), (1, 1, 1024), (4, 1, 1024)]), ("attn_prefill", [(1, 64, 0), (1, 64, 1024)])):
        [own] = found[f"attention.csv time_stats.{name}.median"]
        assert (own["rounding"], own["launches"]) == (0.5e-6, 20)
        assert [*own["moved"]] == [2 * 2 * 4096 * batch * (context + width) for batch, width, context in chosen]
        pairs = [batch * sum(context + place for place in range(1, width + 1)) for batch, width, context in chosen]
        assert [*own["operations"]] == [2 * 2 * 4096 * each for each in pairs]
    # On two devices it is half of each.
    for name, before, row in (("attn_decode", "1,1,0,1024", 1), ("attn_prefill", "1,1,64,1024", 1)):
        whole = found[f"attention.csv time_stats.{name}.median"][0]
        swap(f"4096,32,32,{before}", f"4096,32,32,2{before[1:]}")(folder / "vidur/attention.csv")
        [own] = held("vidur", folder, monkeypatch)[f"attention.csv time_stats.{name}.median"]
        for what in ("moved", "operations"):
            assert [*own[what]] == [each / 2 if place == row else each for place, each in enumerate(whole[what])]
    assert times(from_vidur(folder), "attention", 2) == {(1, 1024, 1): 30.0, (64, 1024, 1): 85.0}
    found = held("llmservingsim", folder, monkeypatch)
    sizes = {"qkv_proj": 4096 * (4096 + 2048), "o_proj": 4096**2, "gate_up_proj": 2 * 4096 * 14336, "down_proj": 4096 * 14336}
    for own, size in zip(found["dense.csv time_us"], sizes.values(), strict=True):
        assert ([*own["moved"]], [*own["operations"]]) == ([2 * size] * 2, [2 * size, 2 * size * 8])
    [own] = found["per_sequence.csv time_us"]
    size = 4096 * 128_256
    assert ([*own["moved"]], [*own["operations"]], own["seconds"]) == (
        [2 * size] * 2, [2 * size, 16 * size], pytest.approx([1097e-6, 1114e-6])
    )
    [own] = found["attention.csv time_us"]
    chosen = [(1, 1, 16), (1, 1, 1024), (8, 1, 1024), (1, 16, 0), (1, 16, 1024)]
    assert own["launches"] == 20
    assert [*own["moved"]] == [2 * 2 * 8 * 128 * batch * (context + width) for batch, width, context in chosen]
    pairs = [batch * sum(context + place for place in range(1, width + 1)) for batch, width, context in chosen]
    assert [*own["operations"]] == [2 * 2 * 4096 * each for each in pairs]
    shutil.copytree(folder / "llmservingsim/tp1", folder / "llmservingsim/tp2")
    whole = {column: [*each] for column, each in found.items()}
    llmservingsim.read(folder / "llmservingsim/tp2", model="llama-3.1-8b", gpu="rtx-4090")
    for column, before in whole.items():
        for own, other in zip(found[column][len(before) :], before, strict=True):
            assert all([2 * each for each in own[what]] == [*other[what]] for what in ("moved", "operations"))
    # Of eight KV heads each of sixteen devices has one, with two bytes per number.
    shutil.copytree(folder / "llmservingsim/tp1", folder / "llmservingsim/tp16")
    llmservingsim.read(folder / "llmservingsim/tp16", model="llama-3.1-8b", gpu="rtx-4090")
    moved = found["attention.csv time_us"][-1]["moved"]
    assert [*moved] == [2 * 2 * 128 * batch * (context + width) for batch, width, context in chosen]
    found = held("aiconfigurator", folder, monkeypatch)
    [own] = found["gemm/vllm/1.0/gemm_perf.parquet latency"]
    shapes = [(m, n, k) for n, k in ((4096, 4096), (8192, 4096), (4096, 8192)) for m in (1, 2, 4)]
    assert [*own["moved"]] == [2 * n * k for _, n, k in shapes]
    assert [*own["operations"]] == [2 * m * n * k for m, n, k in shapes]
    [own] = found["attention/vllm/1.0/generation_attention_perf.parquet latency"]
    batches = [(batch, context) for batch in (1, 4, 4) for context in (127, 1023, 4095)]
    assert [*own["moved"]] == [2 * 2 * 8 * 128 * batch * (context + 1) for batch, context in batches]
    assert own["launches"] == 20


def test_values_at_their_bounds_are_accepted(folder: Path) -> None:
    table = imported_tables.read(folder / "vidur/network/send_recv.csv", ["size"], root=folder / "vidur")
    assert table.shown == "network/send_recv.csv"
    assert imported_tables.read(folder / "vidur/mlp.csv", [], root=folder / "vidur/network").shown == "mlp.csv"  # not below it

    def of(*values: Any) -> imported_tables.ImportedTable:
        return imported_tables.ImportedTable(
            Path("t"), "t", pl.DataFrame({"x": [*values]}, strict=False), np.arange(1, len(values) + 1)
        )

    assert [*of(0, 5).whole("x", least=0)] == [0, 5]
    assert [*of(10**12).whole("x", least=1)] == [1e12]
    for wrong, said in (((1, 10**12 + 1), r"row 2, column x: must be at most 1,000,000,000,000, got 1000000000001\.0"),
                        ((1, 2.5), "row 2, column x: must be a whole number, got 2.5"),
                        ((3, 0), "row 2, column x: must be a number of at least 1, got 0")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            of(*wrong).whole("x", least=1)
    with pytest.raises(ParameterError, match=r"row 1, column x: must be a number, got 'a'"):
        of("a").column("x")
    assert [*of(0.0, 1000.0).seconds("x", "s")] == [0, 1000]
    assert [*of(1e6).seconds("x", "ms")] == [1000]
    assert [*of(7.0).seconds("x", "us")] == [pytest.approx(7e-6)]
    with pytest.raises(ParameterError, match=r"row 2, column x: must be at most 1000 s, got 1e[+]06 s; check the unit"):
        of(1001.0, 1e6).seconds("x", "s")
    assert [*of("A", "b", "a").words("x", ("a", "b"))] == ["a", "b", "a"]
    with pytest.raises(ParameterError, match="row 2, column x: unknown value ''; known: a, b"):
        of("a", None).words("x", ("a", "b"))


LEAST = {
    MLP: {"num_tokens": 1, "num_tensor_parallel_workers": 1},
    "vidur/attention.csv": {"num_tensor_parallel_workers": 1, "batch_size": 1, "kv_cache_size": 0},
    "vidur/cpu_overheads.csv": {"batch_size": 1, "tensor_parallel_degree": 1},
    "vidur/network/send_recv.csv": {"num_workers": 2, "devices_per_node": 1, "size": 1},
    GEMM: {"n": 1, "k": 1}, DECODE: {"batch_size": 1, "num_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "step": 0},
    "aiconfigurator/comm/vllm/1.0/custom_allreduce_perf.parquet": {"num_gpus": 2, "message_size": 1},
    DENSE: {"tokens": 1}, SEQUENCE: {"sequences": 1},
    ATTENTION: {"prefill_chunk": 0, "kv_prefill": 0, "n_decode": 0, "kv_decode": 0},
}  # fmt: skip
"""The minimum of each column of counts."""


@pytest.mark.parametrize("file", LEAST)
def test_counts_at_their_minimum_are_accepted(file: str, folder: Path) -> None:
    """Below the minimum the error names the column; at the minimum it does not, although other columns may be wrong."""
    path = folder / file
    table = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
    for column, least in LEAST[file].items():
        for value in (least, least - 1):
            spoiled = table.with_columns(pl.lit(value, pl.Int64).alias(column))
            spoiled.write_csv(path) if path.suffix == ".csv" else spoiled.write_parquet(path)
            try:
                READERS[file.split("/")[0]](folder)
            except ParameterError as error:
                said = str(error)
            else:
                said = ""
            wanted = f"column {column}: must be a number of at least {least}, got {value}"
            assert (wanted in said) == (value < least), said
            assert value < least or f"column {column}: must be" not in said, said


def test_a_gated_layer_reads_two_up_matrices(folder: Path) -> None:
    """60 us for 11008 x 4096 x 2 weights in bf16 is faster than an A100's memory; for half of them it is not."""
    swap("0.0015,0.110", "0.0015,0.060")(folder / MLP)
    with pytest.raises(ParameterError, match=r"row 1, column time_stats.mlp_up_proj.median: 6e-05 s would be 3.01e\+12 bytes/s"):
        from_vidur(folder)


def test_tensor_parallel_that_does_not_divide_heads_is_refused(folder: Path) -> None:
    for name, tensor_parallel in (("tp3", 3), ("tp0", 0)):
        where = folder / "llmservingsim" / name
        shutil.copytree(folder / "llmservingsim" / "tp1", where)
        with pytest.raises(
            ParameterError, match=f"tensor_parallel must divide heads=32, got {tensor_parallel} by the name of the folder {name}"
        ):
            llmservingsim.read(where, model="llama-3.1-8b", gpu="rtx-4090")


@pytest.mark.parametrize(("name", "tensor_parallel"), [("tp2", 2), ("tp8", 8), ("profile", 1), ("tp", 1)])
def test_the_folder_name_gives_tensor_parallel_of_all_parts(
    folder: Path, name: str, tensor_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = from_llmservingsim(folder)
    where = folder / "llmservingsim" / name
    shutil.copytree(folder / "llmservingsim" / "tp1", where)
    made = llmservingsim.read(where, model="llama-3.1-8b", gpu="rtx-4090")
    assert {*whole.table["tensor_parallel"]} == {1}
    assert {*made.table.select("part", "tensor_parallel").rows()} == {(part, tensor_parallel) for part in whole.parts}
    for part in whole.parts:
        assert times(made, part, tensor_parallel) == times(whole, part)
    monkeypatch.chdir(where)  # wherever one stands
    assert llmservingsim.read(".", model="llama-3.1-8b", gpu="rtx-4090").table.equals(made.table)


@pytest.mark.parametrize(("file", "row", "weights"), [
    ("dense", "qkv_proj,1,55", 4096 * (4096 + 2 * 1024)), ("per_sequence", "lm_head,1,1097", 4096 * 128_256),
])  # fmt: skip
def test_the_upper_bound_of_a_product_has_one_launch(folder: Path, file: str, row: str, weights: int) -> None:
    """The bound is the time at a hundredth of the peaks, added up, plus 0.1 ms; larger times are refused."""
    gpu, path = devices.device("rtx-4090"), folder / "llmservingsim" / "tp1" / f"{file}.csv"
    most = 1e6 * (100 * (2 * weights / gpu.bandwidth + 2 * weights / gpu.rate("bfloat16")) + 1e-4)
    before = path.read_text()
    for share, refused in ((0.999, False), (1.001, True)):
        path.write_text(before.replace(row, f"{row.rpartition(',')[0]},{share * most}"))
        if refused:
            with pytest.raises(ParameterError, match="is too long"):
                from_llmservingsim(folder)
        else:
            assert from_llmservingsim(folder).table.height


def test_operations_with_missing_or_zero_times_are_left_out(folder: Path) -> None:
    swap("2,4096,4096,0.016", "2,4096,4096,0.0")(folder / GEMM)
    made = from_aiconfigurator(folder)
    assert (2, 4096, 4096) not in times(made, "gemm")
    assert made.rows("gemm").height == 8
    assert any("3 rows without a time or without work left out" in note for note in made.notes)


META = "llmservingsim/meta.yaml"


def test_times_of_another_gpu_than_in_meta_yaml_are_refused(folder: Path) -> None:
    path = folder / META
    said = path.read_text()
    path.write_text(said.replace("a made-up GPU", "NVIDIA GeForce RTX 3090"))
    with pytest.raises(ParameterError, match=r"^meta.yaml: gpu must be rtx-4090, as asked for, got NVIDIA GeForce RTX 3090; name"):
        from_llmservingsim(folder)
    path.write_text(said.replace("a made-up GPU", "NVIDIA GeForce RTX 4090"))
    assert from_llmservingsim(folder).facts["gpu"] == "NVIDIA GeForce RTX 4090"
    for damaged in (b": : {", b"", b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(ParameterError, match=r"^meta.yaml: it (has none of vllm_version, |cannot be read)"):
            from_llmservingsim(folder)
    path.unlink()
    assert "gpu" not in from_llmservingsim(folder).facts


@pytest.mark.parametrize(("file", "column"), [
    ("mlp", "time_stats.*.median"), ("attention", "time_stats.attn_decode.median"), ("cpu_overheads", "schedule_median"),
])  # fmt: skip
def test_parts_with_a_total_time_of_zero_are_refused(folder: Path, file: str, column: str) -> None:
    """In the second row of a model that fits the cache; single operations may have been rounded to zero."""
    small, path = published_shapes.preset("gpt2"), folder / "vidur" / f"{file}.csv"
    known = {"n_head": small.heads, "n_kv_head": small.kv_heads, "n_embd": small.hidden, "n_expanded_embd": small.ffn}
    for each in (folder / "vidur").glob("*.csv"):
        table = pl.read_csv(each).head(2)
        said = known | {"n_q_head": small.heads, "model_name": "gpt2"}
        table = table.with_columns(pl.lit(value).alias(name) for name, value in said.items() if name in table.columns)
        if each == path:
            stands = [name for name in table.columns if name.endswith("median")]
            table = table.with_columns(pl.when(pl.int_range(pl.len()) == 1).then(0.0).otherwise(pl.col(stands)).name.keep())
        table.write_csv(each)
    message = f"{file}.csv: row 2, column {column}: the total time of the pass must be above 0 s, got 0"
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$"):
        vidur.read(folder / "vidur", model="gpt2", gpu="a100")


def test_transfers_with_a_time_of_zero_are_refused(folder: Path) -> None:
    path = folder / "vidur" / "network" / "send_recv.csv"
    swap("0.0010,0.006", "0.0010,0.000")(path)
    with pytest.raises(ParameterError, match=r"send_recv.csv: row 1, column .*: the total time of the pass must be above 0 s"):
        from_vidur(folder)


def test_an_unknown_unit_is_refused(folder: Path) -> None:
    with pytest.raises(ParameterError, match="unknown unit 'minutes'; known: ms, s, us"):
        from_vidur(folder, unit="minutes")
    # In seconds the same numbers would be a thousand times as long, in microseconds faster than the memory.
    with pytest.raises(ParameterError, match="is too long"):
        from_vidur(folder, unit="s")
    with pytest.raises(ParameterError, match=r"above the 2.04e\+12 bytes/s of the memory of a100"):
        from_vidur(folder, unit="us")


def test_the_unit_applies_to_all_tables(folder: Path) -> None:
    """The same times in microseconds give the same profile."""
    before = from_vidur(folder), from_aiconfigurator(folder)
    reduced = aiconfigurator.reductions(folder / "aiconfigurator", ["vllm/1.0"])[0]
    for path in (*folder.rglob("*.csv"), *folder.rglob("*.parquet")):
        table = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
        times = [name for name in table.columns if name.startswith("time_stats.") or name.endswith("_median") or name == "latency"]
        table = table.with_columns(pl.col(times).cast(pl.Float64) * 1000)
        table.write_csv(path) if path.suffix == ".csv" else table.write_parquet(path)
    for made, was in zip((from_vidur(folder, unit="us"), from_aiconfigurator(folder, unit="us")), before, strict=True):
        assert made.table.drop(TIMES).equals(was.table.drop(TIMES))
        for name in TIMES:
            assert made.table[name].to_numpy() == pytest.approx(was.table[name].to_numpy(), rel=1e-9)
    again = aiconfigurator.reductions(folder / "aiconfigurator", ["vllm/1.0"], unit="us")[0]
    assert [row["time_s"] for row in again] == pytest.approx([row["time_s"] for row in reduced], rel=1e-9)


def test_the_model_name_is_matched_literally(folder: Path) -> None:
    """In lower case; a config.json has the name of its folder. Rows without a name are ignored."""
    shape = published_shapes.preset("llama-2-7b")
    said = {"model_type": "llama", "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary,
            "intermediate_size": shape.ffn, "num_attention_heads": shape.heads}  # fmt: skip
    mine, path = folder / "Mine-1.5", folder / "vidur/cpu_overheads.csv"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(said))
    table = pl.read_csv(path)
    for names, there in ((["a/Mine-1x5", None, "b"], False), (["a/Mine-1x5", None, "Org/MINE-1.5-chat"], True)):
        table.with_columns(pl.Series("model_name", names)).write_csv(path)
        if there:
            assert times(vidur.read(folder / "vidur", model=str(mine), gpu="a100"), "step") == {(8,): 39600.0}
            continue
        listed = "no row of Mine-1.5; there are a/mine-1x5, b; a model of a config.json is named after its folder"
        with pytest.raises(ParameterError, match=f"^{re.escape(f'cpu_overheads.csv: column model_name: {listed}')}$"):
            vidur.read(folder / "vidur", model=str(mine), gpu="a100")


def test_several_engines_require_a_choice(folder: Path) -> None:
    with pytest.raises(ParameterError, match=r"engine of gemm must be one of trtllm/9.9, vllm/1.0, and none was named"):
        from_aiconfigurator(folder, engine="")
    with pytest.raises(ParameterError, match=r"engine of attention must be one of vllm/1.0, or none, got trtllm/9.9"):
        from_aiconfigurator(folder, engine="trtllm/9.9")
    assert from_aiconfigurator(folder, engine="trtllm/9.9", attention="none").parts == ("gemm",)


def test_weights_read_from_the_cache_are_noted(folder: Path) -> None:
    swap("1,4096,4096,0.015", "1,4096,4096,0.005")(folder / GEMM)
    made = from_aiconfigurator(folder)
    assert times(made, "gemm")[1, 4096, 4096] == 5.0
    note = "gemm: 1 products of one row found their weights (up to 34 MB) or a part of them in the cache of 52 MB: faster than"
    assert made.notes[-1] == f"{note} a layer whose weights come from memory"
    # Products of several rows do not count; products of one row are counted, and the largest is named.
    swap("1,8192,4096,0.029", "1,8192,4096,0.0199")(folder / GEMM)
    swap("2,4096,8192,0.031", "2,4096,8192,0.0199")(folder / GEMM)
    assert from_aiconfigurator(folder).notes[-1].startswith("gemm: 2 products of one row found their weights (up to 67 MB)")


def test_attention_that_includes_rotary_embedding_is_marked(folder: Path) -> None:
    """The only engine is chosen by default; rows of other beams, windows and types are left out."""
    (folder / "aiconfigurator/attention/vllm").rename(folder / "aiconfigurator/attention/trtllm")
    made = from_aiconfigurator(folder, attention="trtllm/1.0")
    assert made.facts["decode_includes"] == ["cache write", "rope"]
    assert made.facts["decode_engine"] == "trtllm/1.0"
    assert made.sources[1].file == "attention/trtllm/1.0/generation_attention_perf.parquet"
    for name in ("gemm/trtllm", "comm"):
        shutil.rmtree(folder / "aiconfigurator" / name)
    path = folder / "aiconfigurator/attention/trtllm/1.0/generation_attention_perf.parquet"
    table = pl.read_parquet(path)
    beam = table.head(1).with_columns(beam_width=pl.lit(2, pl.Int64), latency=0.001)
    unknown = beam.with_columns(beam_width=pl.lit(None, pl.Int64))
    pl.concat([beam, unknown, table]).write_parquet(path)
    alone = from_aiconfigurator(folder, engine="", attention="trtllm/1.0")
    assert alone.engine == "vllm/1.0 (collected by AIConfigurator)"
    assert alone.parts == ("gemm", "decode")
    assert alone.rows("decode").equals(made.rows("decode"))
    table.with_columns(window_size=pl.lit("wide")).write_parquet(path)
    with pytest.raises(ParameterError, match="column window_size: no row of 0; there are wide"):
        from_aiconfigurator(folder, attention="trtllm/1.0")
    table.with_columns(window_size=pl.concat_list(pl.lit(0))).write_parquet(path)  # lists are not numbers
    with pytest.raises(ParameterError, match="column window_size: no row of 0; there are "):
        from_aiconfigurator(folder, attention="trtllm/1.0")
    table.with_columns(latency=pl.lit(0.0)).write_parquet(path)
    with pytest.raises(ParameterError, match="column latency: no row has a time; the format of the file has changed"):
        from_aiconfigurator(folder, attention="trtllm/1.0")
    shutil.rmtree(folder / "aiconfigurator/attention")
    with pytest.raises(ParameterError, match="attention: there is no such folder with ENGINE/VERSION in it; give the folder of"):
        from_aiconfigurator(folder, attention="trtllm/1.0")


def test_parts_of_a_vidur_folder_are_optional(folder: Path) -> None:
    """Only decode or only prefill attention; a network with reductions only; a layer without a second norm."""
    where = folder / "vidur"
    whole = from_vidur(folder)
    lines = (where / "attention.csv").read_text().splitlines(keepends=True)
    for kept, width in ((lines[:4], 1), (lines[:1] + lines[4:], 64)):
        (where / "attention.csv").write_text("".join(kept))
        found = from_vidur(folder).table.filter(part="attention")
        assert found.equals(whole.table.filter(part="attention").filter(pl.col("width") == width))
    (where / "network/send_recv.csv").unlink()
    (where / "cpu_overheads.csv").unlink()
    made = from_vidur(folder)
    assert made.parts == ("dense", "attention", "embedding", "all_reduce")
    assert made.table.filter(part="all_reduce").equals(whole.table.filter(part="all_reduce"))
    swap("time_stats.attn_kv_cache_save.median", "x")(where / "attention.csv")
    without = from_vidur(folder)
    assert "attention: includes attn_input_reshape, attn_output_reshape; passes of several" in "".join(without.notes)
    assert not any("saving keys and values" in note for note in without.notes)
    small = published_shapes.preset("phi-2")
    table = pl.read_csv(where / "mlp.csv").head(1).with_columns(
        pl.lit(value).alias(name) for name, value in (("n_head", small.heads), ("n_kv_head", small.kv_heads),
                                                      ("n_embd", small.hidden), ("n_expanded_embd", small.ffn))
    )  # fmt: skip
    table.write_csv(where / "mlp.csv")
    shutil.rmtree(where / "network")
    (where / "attention.csv").unlink()
    made = vidur.read(where, model="phi-2", gpu="a100")
    assert times(made, "dense") == {(1,): 261.0}  # 5 us less than with two norms
    # Without a gate the 52 MB of the up matrix are read once; of twice as many, 65 MB would come from memory in 30 us.
    table.with_columns(pl.lit(0.010).alias("time_stats.mlp_up_proj.median")).write_csv(where / "mlp.csv")
    assert times(vidur.read(where, model="phi-2", gpu="a100"), "dense") == {(1,): 161.0}
    swap("gate_up_proj,1,247", "gate_up_proj,1,10")(folder / DENSE)
    made = llmservingsim.read(folder / "llmservingsim/tp1", model="phi-2", gpu="rtx-4090")
    assert times(made, "dense") == {(1,): 2 * 1.9 + 55 + 2.2 + 38 + 10 + 2.6 + 127, (8,): 488.7}
    for name, field in (("n_head", "heads"), ("n_kv_head", "kv_heads"), ("n_embd", "hidden")):
        table.with_columns(pl.col(name) + 1).write_csv(where / "mlp.csv")
        with pytest.raises(ParameterError, match=f"row 1, column {name}: must be .*, the model's {field}, got .*; name the model"):
            vidur.read(where, model="phi-2", gpu="a100")
