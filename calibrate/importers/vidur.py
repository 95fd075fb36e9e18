"""Importer of Vidur's profiles: layer operations by tokens, attention by batch and cache, transfers by size, host work per step.

Kernel times are in milliseconds, rounded to microseconds, of one decoder layer run by the engine Sarathi. Frontier's tables have
the same columns and can be used for attention.

* A layer is summed as Vidur sums it: two norms, four products, rotation, activation, and **one** addition. The other addition of a
  layer is not timed by its profiler; engines fuse both into the norms.
* `kv_cache_size` is the number of positions before those of the pass, like `context` here.
* Host work per step is the sum of the medians of scheduling, preparing inputs, launching the sampler, and processing outputs.
  Messages between Vidur's processes are left out.

[Agrawal2024] A. Agrawal et al. Vidur: a large-scale simulation framework for LLM inference. MLSys 2024, arXiv:2405.05465.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.importers import imported_tables
from calibrate.importers.imported_tables import ImportedTable
from model.architectures import transformer
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.interpolation import Floats
from model.hardware.physical_limits import LAUNCHES
from model.hardware.profile import Profile, Source

REPOSITORY, LICENCE = "microsoft/vidur", "MIT"
LAYER = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj", "mlp_act",
    "mlp_down_proj", "add",
)  # fmt: skip
"""Operations of a layer, each counted once."""
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
"""Matrix products, in the order of `imported_tables.products`."""
SECOND_NORM = "post_attention_layernorm"
"""Operation that models with parallel attention and feed-forward layers lack."""
STEP = ("schedule", "prepare_inputs_e2e", "sampler_launch", "process_model_outputs")
"""Host operations per step."""
QUARTILE = 0.6745
"""Upper quartile of the normal distribution, in standard deviations."""
ROUNDING = 0.5e-6
"""Rounding error of the times: half of their last digit [s]."""
AROUND_ATTENTION = ("attn_input_reshape", "attn_kv_cache_save", "attn_output_reshape")


def read(
    folder: str | Path,
    *,
    model: str,
    gpu: str,
    attention: str | Path | None = None,
    overheads: str | Path | None = None,
    network: str | Path | None = None,
    name: str = "",
    unit: str = "ms",
    commit: str = "",
) -> Profile:
    """Read a profile of a model from a folder with `mlp.csv`.

    Parameters
    ----------
    folder
        Folder with `mlp.csv`, and optionally `attention.csv` and `cpu_overheads.csv`.
    model, gpu
        The model and the device that were measured: names of `model.architectures.transformer` and `model.hardware.devices`, or
        files.
    attention, overheads, network
        Paths of attention and overhead tables in other folders, and the folder of `all_reduce.csv` and `send_recv.csv`.
    name
        Name of the profile; default: GPU-MODEL.
    unit
        Unit of the times in the files.
    commit
        Commit of the repository that the files come from.
    """
    root = Path(folder)
    shape, device = transformer.named_shape(model, imported_tables.DTYPE, key="model"), devices.device(gpu)
    model = transformer.label(model)
    layer = [each for each in LAYER if each != SECOND_NORM or shape.norms > 1]
    mlp = imported_tables.read(
        root / "mlp.csv", [*_columns([*layer, "emb"]), "num_tokens", "num_tensor_parallel_workers"], root=root
    )
    rows, notes = _layer(mlp, layer, shape, device, unit)
    sources = [_source(mlp, root, commit, ("dense", "embedding"))]
    for given, usual, more in ((attention, "attention.csv", _attention), (overheads, "cpu_overheads.csv", _step)):
        path = root / usual if given is None else Path(given)
        if given is None and not path.is_file():
            continue
        more_rows, table, more_notes = more(path, shape, device, unit, model, root)
        rows, notes = rows + more_rows, notes + more_notes
        sources.append(_source(table, root, commit, dict.fromkeys(row["part"] for row in more_rows)))
    if network is not None:
        more_rows, read_, more_notes = links(network, unit=unit)
        rows, notes = rows + more_rows, notes + more_notes
        sources += [_source(table, Path(network), commit, (part,)) for part, table in read_.items()]
    return imported_tables.profile_of(
        device, rows, sources, notes, name=name or f"{device.name}-{model}", model=model, shape=asdict(shape),
        engine="Sarathi (profiled by Vidur)", mode="kernel-only", kind="model", errors=imported_tables.errors(rows),
    )  # fmt: skip


def _source(table: ImportedTable, root: Path, commit: str, parts: Any) -> Source:
    return imported_tables.source(table, root, REPOSITORY, LICENCE, commit, parts)


def _columns(operations: list[str]) -> list[str]:
    return [f"time_stats.{each}.{what}" for each in operations for what in ("median", "std")]


def _times(table: ImportedTable, operations: list[str], unit: str) -> dict[str, Floats]:
    """Sums over operations of the medians, with quartiles from the sums of standard deviations, shape (rows,) [s].

    The minimum and the maximum of a few repeats would show the worst error, not the usual one.
    """
    median, deviation = (
        np.sum([table.seconds(f"time_stats.{each}.{what}", unit) for each in operations], axis=0) for what in ("median", "std")
    )
    half = QUARTILE * deviation
    return {"time_s": median, "low_s": np.maximum(median - half, 0.0), "high_s": median + half}


def _layer(
    table: ImportedTable, layer: list[str], shape: Shape, device: devices.Device, unit: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the parts dense and embedding."""
    _check_model(table, shape, {"n_head": "heads", "n_kv_head": "kv_heads", "n_embd": "hidden", "n_expanded_embd": "ffn"})
    tokens, tensor_parallel = table.whole("num_tokens", least=1), table.whole("num_tensor_parallel_workers", least=1)
    for operation, (inputs, outputs) in zip(PRODUCTS, imported_tables.products(shape), strict=True):
        column = f"time_stats.{operation}.median"
        each = inputs * outputs / tensor_parallel
        moved, work = each * imported_tables.BYTES_EACH, 2 * each * tokens
        imported_tables.check_reached(
            table, column, table.seconds(column, unit), device, moved=moved, operations=work, rounding=ROUNDING
        )
    dense, embedding = _times(table, layer, unit), _times(table, ["emb"], unit)
    imported_tables.check_total(table, "time_stats.*.median", dense["time_s"])
    points = {"tensor_parallel": tensor_parallel, "tokens": tokens}
    rows = imported_tables.rows("dense", points, dense) + imported_tables.rows("embedding", points, embedding)
    notes = [
        "dense: sum of the medians of a layer's operations, as Vidur sums them, with one of two additions (the other is not timed);"
        " low and high are quartiles from the sums of standard deviations",
        "times were rounded to 1 us",
    ]
    return rows, notes + imported_tables.dips(rows, "dense", "tokens")


def _check_model(table: ImportedTable, shape: Shape, columns: dict[str, str]) -> None:
    """Refuse a table of another model."""
    for column, field in columns.items():
        if column not in table.frame.columns:
            continue
        values, wanted = table.column(column), getattr(shape, field)
        if (values != wanted).any():
            where = int(np.argmax(values != wanted))
            raise table.refuse(
                where, column, f"must be {wanted}, the model's {field}, got {values[where]:g}; name the model that was measured"
            )


def _attention(
    path: Path, shape: Shape, device: devices.Device, unit: str, model: str, root: Path
) -> tuple[list[dict[str, Any]], ImportedTable, list[str]]:
    """Rows of the part attention: passes of one token per sequence of a batch, and of several tokens of one sequence."""
    needed = ["attn_input_reshape", "attn_decode", "attn_prefill", "attn_output_reshape"]
    others = [
        "n_q_head",
        "n_kv_head",
        "num_tensor_parallel_workers",
        "batch_size",
        "prefill_chunk_size",
        "kv_cache_size",
        "is_prefill",
    ]
    whole = imported_tables.read(path, _columns(needed) + others, root=root)
    prompts = whole.words("is_prefill", ("true", "false")) == "true"
    _check_model(whole, shape, {"n_q_head": "heads", "n_kv_head": "kv_heads", "n_embd": "hidden"})
    around = [each for each in AROUND_ATTENTION if f"time_stats.{each}.median" in whole.frame.columns]
    imported_tables.require(whole, _columns(around))
    rows: list[dict[str, Any]] = []
    for chosen, operation in ((~prompts, "attn_decode"), (prompts, "attn_prefill")):
        table = whole.where(chosen)
        if not table.height:
            continue
        prefill = operation == "attn_prefill"
        batch, context = table.whole("batch_size", least=1), table.whole("kv_cache_size", least=0)
        width = table.whole("prefill_chunk_size", least=1) if prefill else np.ones(table.height)
        tensor_parallel = table.whole("num_tensor_parallel_workers", least=1)
        column = f"time_stats.{operation}.median"
        each = shape.kv_heads * shape.head_dim / tensor_parallel
        moved = 2 * batch * (context + width) * each * imported_tables.BYTES_EACH
        work = 4 * shape.heads * shape.head_dim / tensor_parallel * batch * width * (context + (width + 1) / 2)
        seconds, often = table.seconds(column, unit), LAUNCHES["attention"]
        imported_tables.check_reached(
            table, column, seconds, device, moved=moved, operations=work, rounding=ROUNDING, launches=often
        )
        times = _times(table, [*around, operation], unit)
        imported_tables.check_total(table, column, times["time_s"])
        single = batch == 1 if prefill else np.ones(table.height, dtype=bool)
        keys = {"tensor_parallel": tensor_parallel, "width": width, "context": context, "batch": batch}
        kept = ({name: values[single] for name, values in each.items()} for each in (keys, times))
        rows += imported_tables.rows("attention", *kept)
    notes = [f"attention: includes {', '.join(around)}; passes of several tokens are prefills of one sequence"]
    if "attn_kv_cache_save" in around:
        notes.append("attention: the measured time of saving keys and values grows with the tokens of a sequence")
    return rows, whole, notes


def _step(
    path: Path, shape: Shape, device: devices.Device, unit: str, model: str, root: Path
) -> tuple[list[dict[str, Any]], ImportedTable, list[str]]:
    """Rows of the part step: sums of the medians of the host's operations."""
    columns = [f"{each}_median" for each in STEP]
    whole = imported_tables.read(path, [*columns, "model_name", "batch_size", "tensor_parallel_degree"], root=root)
    models = whole.frame["model_name"].cast(str).str.to_lowercase()
    table = whole.where(models.str.contains(model.lower(), literal=True).fill_null(False))
    if not table.height:
        listed = ", ".join(sorted({*models.drop_nulls()}))
        hint = "; a model of a config.json is named after its folder"
        raise ParameterError(f"{whole.shown}: column model_name: no row of {model}; there are {listed}{hint}")
    total = np.sum([table.seconds(column, unit) for column in columns], axis=0)
    imported_tables.check_total(table, columns[0], total)
    batch, tensor_parallel = table.whole("batch_size", least=1), table.whole("tensor_parallel_degree", least=1)
    rows = imported_tables.rows("step", {"tensor_parallel": tensor_parallel, "batch": batch}, {"time_s": total})
    listed = ", ".join(STEP)
    return rows, table, [f"step: {listed}, medians, on Vidur's host; batches below {batch.min():g} take as long as {batch.min():g}"]


def links(folder: str | Path, *, unit: str = "ms") -> tuple[list[dict[str, Any]], dict[str, ImportedTable], list[str]]:
    """Rows of the parts send and all_reduce between devices of one node, from `send_recv.csv`, `all_reduce.csv` or both."""
    root = Path(folder)
    rows: list[dict[str, Any]] = []
    found: dict[str, ImportedTable] = {}
    for part, collective in (("send", "send_recv"), ("all_reduce", "all_reduce")):
        path = root / f"{collective}.csv"
        if not path.is_file():
            continue
        columns = [*_columns([collective]), "num_workers", "size", "devices_per_node", "collective"]
        whole = imported_tables.read(path, columns, root=root)
        whole.words("collective", (collective,))
        workers, together = whole.whole("num_workers", least=2), whole.whole("devices_per_node", least=1)
        times = _times(whole, [collective], unit)
        imported_tables.check_total(whole, f"time_stats.{collective}.median", times["time_s"])
        sizes = whole.whole("size", least=1)
        for count in np.unique(workers):
            kept = (workers == count) & (together == count)
            # A transfer is between two devices and does not depend on the tensor parallel size.
            keys = {"size": sizes[kept], "tensor_parallel": 1 if part == "send" else int(count)}
            rows += imported_tables.rows(part, keys, {key: values[kept] for key, values in times.items()})
        found[part] = whole
    if not rows:
        raise ParameterError(
            f"{root.name}: neither send_recv.csv nor all_reduce.csv has times within a node; give the folder of the node's network"
        )
    return rows, found, ["send, all_reduce: between devices of one node; medians of repeats"]
