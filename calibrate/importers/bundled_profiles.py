"""Bundled profiles, derived from their source files.

Measured times are kept, except that no time may fall with more work (`model.hardware.isotonic`). Parts that a source lacks are
composed from tables of operations, with a note. Tables are thinned to the points that passes of a few hundred sequences need.
Nothing is entered by hand: sources, errors and times follow from the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.importers import aiconfigurator, imported_tables, llmservingsim, vidur
from model.architectures import transformer
from model.architectures.transformer import BYTES, Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.hardware import composed_layers, isotonic, profile, profile_files
from model.hardware.composed_layers import LeaveOneOutErrors
from model.hardware.profile import AXES, TIMES, Profile, Source

if TYPE_CHECKING:
    import polars as pl

ENGINES = {
    "h100": ("h100_sxm", "trtllm/1.3.0rc20", "trtllm/1.3.0rc20"),
    "a100": ("a100_sxm", "trtllm/1.0.0", "vllm/0.14.0"),
    "l40s": ("l40s", "trtllm/1.0.0", "trtllm/1.3.0rc20"),
}
"""Folder, engine of products and engine of attention. TensorRT-LLM's attention on the A100 is physically impossible; newer products
of the L40S read up to 200 MB of weights from its cache."""
REDUCTIONS = {
    "h100": ("trtllm/1.3.0rc20", "vllm/0.19.0", "nccl/2.27.3"),
    "a100": ("trtllm/1.0.0", "vllm/0.14.0", "nccl/2.27.3"),
    "l40s": ("trtllm/1.0.0", "vllm/0.14.0", "nccl/2.27.3"),
}
"""Libraries of the reductions: one version of each that was measured on the GPU. Vidur's reductions are not used: below 4 MB three
repeats of one size differ sixfold, because the processes arrive at different times."""
VIDUR = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "codellama-34b": "codellama/CodeLlama-34b-Instruct-hf",
}
NETWORKS = {"a100": "a100_dgx", "h100": "h100_dgx", "a40": "a40_pairwise_nvlink"}
ATTENTION = {
    ("a100", "llama-2-7b"): "gpu/frontier/compute/a800/meta-llama/Llama-2-7b-hf/attention.csv",
    ("a100", "llama-2-70b"): "gpu/vidur_hist/a100/attention.csv",
}
"""Files of measured attention; the A800 computes like the A100."""
OVERHEADS = "gpu/vidur_hist/a100/cpu_overheads.csv"
COMPOSED = {"llama-2-13b": ("h100", "a100", "l40s"), "llama-3.1-8b": ("h100", "a100", "l40s")}
RTX_4090 = "gpu/llmservingsim/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"
TENSOR_PARALLEL = (1, 2, 4, 8)
BATCHES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 256)
WIDTHS = (1, *(2**power for power in range(4, 13)))
LONGEST, MOST_TOKENS = 8192, 4096
MOST_READ = 4096
"""Largest number of KV heads of a batch: batch times kv_heads. 64 sequences of Llama-2-13B have 2,560, between powers of two."""
RANGES = (64, 256, 1024, 4096)
"""Upper ends of the ranges of tokens for which an error of composed layers is stated."""
SIZES_PER_DECADE = 8
DIGITS = 6
IMPORTED = "2026-11-21"
"""Date of the import of tables that do not state the date of their measurement."""


def profiles(data: str | Path) -> Iterator[Profile]:
    """Yield every bundled profile, from a folder that holds `gpu` and `SOURCES.md`."""
    root = Path(data)
    known = origins(root)
    full = {gpu: operations(root, gpu) for gpu in ENGINES}
    networks = {gpu: vidur.links(root / "gpu/vidur/network" / folder) for gpu, folder in NETWORKS.items()}
    measured = {(gpu, model): _measured(root, gpu, model) for gpu in NETWORKS for model in VIDUR}
    off = {gpu: layer_errors(full[gpu], [one for (where, _), one in measured.items() if where == gpu]) for gpu in full}
    off["l40s"] = [[*first[:2], max(first[2], other[2])] for first, other in zip(off["h100"], off["a100"], strict=True)]
    full = {gpu: replace(table, facts={**table.facts, composed_layers.LAYER_ERRORS: off[gpu]}) for gpu, table in full.items()}
    for gpu, table in full.items():
        yield _finished(trimmed(table), root, known)
        for model, gpus in COMPOSED.items():
            if gpu not in gpus:
                continue
            made = composed_layers.layer(table, transformer.preset(model), TENSOR_PARALLEL, model=model)
            made = _with_links(made, root, gpu, networks)
            whole = [f"{error:.1%} up to {most} tokens" for tensor_parallel, most, error in off[gpu] if tensor_parallel == 1]
            where = "" if gpu in NETWORKS else " on two other GPUs"
            notes = (
                f"dense: composed layers of other models have errors of {', '.join(whole)}: the largest of their medians{where}",
                *made.notes,
            )
            yield _finished(
                replace(made, notes=notes),
                root,
                known,
            )
    moved = {
        "attention": attention_transfer_error(full["a100"], full["h100"]),
        "head": float(
            np.median([product_transfer_error(full["a100"], measured["a100", model], measured["a40", model]) for model in VIDUR])
        ),
    }
    for (gpu, _), one in measured.items():
        yield _finished(completed(one, full["a100" if gpu == "a40" else gpu], moved), root, known)
    yield _finished(llmservingsim.read(root / RTX_4090, model="llama-3.1-8b", gpu="rtx-4090"), root, known)


def write(data: str | Path, folder: str | Path) -> list[Path]:
    """Derive all profiles, then write them; return their paths."""
    made = [*profiles(data)]
    return [profile_files.save(each, folder) for each in made]


# --- Sources ---


def operations(root: Path, gpu: str) -> Profile:
    """Return the full profile of the operations of a GPU."""
    folder, engine, attention = ENGINES[gpu]
    made = aiconfigurator.read(root / "gpu/aiconfigurator" / folder, gpu=gpu, engine=engine, attention=attention)
    return with_reductions(made, *aiconfigurator.reductions(root / "gpu/aiconfigurator" / folder, REDUCTIONS[gpu]))


def with_reductions(made: Profile, rows: list[dict[str, Any]], sources: tuple[Source, ...], note: str) -> Profile:
    """Return the profile with its reductions replaced by `rows`, and with their error between sizes."""
    table = made.table.filter(made.table["part"] != "all_reduce")
    return replace(
        made, table=profile.added(table, rows), notes=(*made.notes, note),
        errors={**made.errors, **imported_tables.errors(rows)},
        sources=(*(each for each in made.sources if each.parts != ("all_reduce",)), *sources),
    )  # fmt: skip


def _measured(root: Path, gpu: str, model: str) -> Profile:
    attention = ATTENTION.get((gpu, model))
    made = vidur.read(
        root / "gpu/vidur/compute" / gpu / VIDUR[model], model=model, gpu=gpu, attention=root / attention if attention else None,
        overheads=root / OVERHEADS if gpu == "a100" else None, network=root / "gpu/vidur/network" / NETWORKS[gpu],
    )  # fmt: skip
    if gpu not in REDUCTIONS:
        return made
    made = replace(made, notes=tuple(each.replace("send, all_reduce:", "send:") for each in made.notes))
    return with_reductions(made, *aiconfigurator.reductions(root / "gpu/aiconfigurator" / ENGINES[gpu][0], REDUCTIONS[gpu]))


def layer_errors(
    table: Profile, measured: Iterable[Profile], tensor_parallel: Sequence[int] = TENSOR_PARALLEL
) -> list[list[float]]:
    """Errors of layers composed from a table against measured ones of the same GPU; empty without measured layers.

    A row is (tensor_parallel, largest number of tokens, error); its range begins after the tokens of the row before. The error is
    the largest of the models' medians, because a user's model may behave like the worst of those that were measured.
    """
    of_models = [*measured]
    rows: list[list[float]] = []
    for size in tensor_parallel if of_models else ():
        errors = [differences(table, one, (size,), most=RANGES[-1]) for one in of_models]
        for less, most in pairwise((0, *RANGES)):
            rows.append([size, most, round(float(np.nanmax([one.median(less + 1, most) for one in errors])), 4)])
    return rows


def differences(table: Profile, measured: Profile, tensor_parallel: tuple[int, ...] = (1,), most: int = 64) -> LeaveOneOutErrors:
    """Relative errors of composed layers, including the rotary embedding, against measured ones."""
    facts = {name: value for name, value in table.facts.items() if name != "decode_includes"}  # Vidur's dense part rotates
    bare = replace(table, facts=facts, table=table.table.filter(table.table["part"] == "gemm"))
    made = composed_layers.layer(bare, transformer.preset(measured.model), tensor_parallel, model=measured.model)
    each = [composed_layers.differences(made, measured, tensor_parallel=many, most=most) for many in tensor_parallel]
    return LeaveOneOutErrors(np.concatenate([one.at for one in each]), np.concatenate([one.error for one in each]))


def folder_of(data: str | Path) -> Path:
    """Return the data folder as a path; refuse a folder without `gpu`."""
    root = Path(data)
    if not (root / "gpu").is_dir():
        raise ParameterError(
            f"the data folder must hold gpu and SOURCES.md, got {root.name or root}; name it, or set DECODESIM_DATA to it"
        )
    return root


def origins(root: Path) -> dict[str, Source]:
    """Parse SOURCES.md: for each file its repository, licence, commit, path there and the beginning of its checksum."""
    try:
        lines = bounded_files.read_text(root / "SOURCES.md").splitlines()
    except OSError:
        raise ParameterError("SOURCES.md: there is no such file; give the folder that holds it and gpu") from None
    except UnicodeDecodeError as error:
        raise ParameterError(f"SOURCES.md: it is not UTF-8 (byte {error.start + 1}); restore it") from None
    found, repository, licence = {}, "", ""
    for number, line in enumerate(lines, 1):
        if line.startswith("## "):
            repository, dot, licence = (each.strip() for each in line.removeprefix("## ").partition("·"))
            if not dot:
                raise ParameterError(f"SOURCES.md, line {number}: it must be ## repository · licence, got {checks.shown(line)}")
        cells = [each.strip() for each in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"[0-9a-f]{16}", cells[3]):
            found[cells[0]] = Source(repository, cells[2], cells[1], licence, cells[3])
    return found


def _sourced(one: Profile, root: Path, known: Mapping[str, Source]) -> tuple[Source, ...]:
    """Sources of a profile as listed in SOURCES.md, found by their checksums."""
    by_sum = {source.sha256: source for source in known.values()}
    found: dict[str, Source] = {}
    for source in one.sources:
        origin = by_sum.get(source.sha256[:16])
        if origin is None:
            raise ParameterError(
                f"{source.file}: its sha256 {source.sha256[:16]} is not in SOURCES.md; restore the file, or say where it is from"
            )
        parts = (*found[source.sha256].parts, *source.parts) if source.sha256 in found else source.parts
        found[source.sha256] = replace(origin, sha256=source.sha256, parts=tuple(dict.fromkeys(parts)))
    return tuple(found.values())


# --- Missing parts ---


def completed(measured: Profile, table: Profile, moved: Mapping[str, float]) -> Profile:
    """Return a measured profile with missing attention and head composed from the operations of its GPU.

    If the table belongs to another GPU, its efficiency is transferred: the time over the bytes divided by the bandwidth, plus a
    launch. `moved` is the error of such a transfer by part, between two GPUs that were both measured.
    """
    other = table.device != measured.device
    errors = {"attention": table.errors["decode"], "head": table.errors["gemm"]}
    if other:
        errors = {name: round(max(error, moved[name]), 4) for name, error in errors.items()}
    rows, stood_in = _composed(measured, table, errors)
    tensor_parallel = ", ".join(
        str(each) for each in sorted({row["tensor_parallel"] for row in rows if row["part"] == "attention"})
    )
    whose = f"at the efficiency of {table.device}: assumed" if other else "of operations"
    notes = [
        "dense: measured",
        f"head: composed {whose}",
        f"attention at tensor_parallel {tensor_parallel}: composed {whose} ({table.facts['decode_engine']})",
    ]
    if composed_layers.ROPE in table.facts["decode_includes"]:
        notes.append("attention: composed times include the rotary embedding, as dense does: about 2 us are counted twice")
    if stood_in:
        split = ", ".join(map(str, stood_in))
        notes.append(
            f"attention at tensor_parallel {split}: these heads were not measured; the nearest group size at equal bytes is used"
        )
    if other:
        off = f"{moved['attention']:.1%} for attention (from a100 to h100), {moved['head']:.1%} for products (from a100 to a40)"
        notes.append(f"an efficiency transferred between GPUs has a median error of {off}, where both were measured")
    composed = {"gemm": ("head",), "decode": ("attention",)}
    added = [replace(each, parts=parts) for each in table.sources for part, parts in composed.items() if part in each.parts]
    return replace(
        measured, table=profile.added(measured.table, rows), provenance="composed", notes=(*notes, *measured.notes),
        errors={**measured.errors, **{name: max(error, measured.errors.get(name, 0.0)) for name, error in errors.items()}},
        sources=(*measured.sources, *added),
    )  # fmt: skip


def _composed(measured: Profile, table: Profile, errors: Mapping[str, float]) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows of the parts head and attention, and the tensor parallel sizes whose heads were not measured."""
    shape, other = transformer.preset(measured.model), table.device != measured.device
    products = composed_layers.Products(table)
    tokens = products.steps(MOST_TOKENS)
    have = {*zip(measured.table["part"], measured.table["tensor_parallel"], strict=True)}
    rows: list[dict[str, Any]] = []
    stood_in = []
    for tensor_parallel in measured.tensor_parallel:
        part = shape.shard(tensor_parallel)
        head = composed_layers.head_rows(table, products, part, tokens, tensor_parallel)
        off = np.maximum(composed_layers.layer_error(table, tokens, tensor_parallel, None), errors["head"])
        attention = composed_layers.AttentionTimes(table, part.heads, part.kv_heads, part.head_dim)
        fresh = [] if ("attention", tensor_parallel) in have else composed_layers.attention_rows(attention, tensor_parallel)
        if fresh and not attention.measured:
            stood_in.append(tensor_parallel)
        if other:
            head = [_transferred(row, _head_bytes(row, part), table, measured, products.launch) for row in head]
            fresh = [_transferred(row, _attention_bytes(row, part), table, measured, products.launch) for row in fresh]
        as_measured = attention.measured and not other
        rows += composed_layers.with_quartiles(head, off)
        rows += fresh if as_measured else composed_layers.with_quartiles(fresh, errors["attention"])
    return rows, stood_in


def _head_bytes(row: Mapping[str, Any], part: Shape) -> float:
    return float(part.head_weights * BYTES[part.dtype])


def _attention_bytes(row: Mapping[str, Any], part: Shape) -> float:
    return float(row["batch"] * (row["context"] + 1) * part.cache_bytes(1))


def _transferred(row: dict[str, Any], moved: float, table: Profile, to: Profile, launch: float) -> dict[str, Any]:
    """Return the row with its time on another device, at the efficiency that it has on the table's."""
    least = {each.device: moved / each.bandwidth + launch for each in (table, to)}
    return row | {"time_s": row["time_s"] * least[to.device] / least[table.device]}


def attention_transfer_error(table: Profile, other: Profile) -> float:
    """Median relative error of attention times transferred from one GPU to another, for Llama-2-7B and 70B [-]."""
    errors: list[float] = []
    launch = composed_layers.Products(table).launch
    for model in ("llama-2-7b", "llama-2-70b"):
        part = transformer.preset(model)
        ours, theirs = (composed_layers.AttentionTimes(each, part.heads, part.kv_heads, part.head_dim) for each in (table, other))
        for row in composed_layers.attention_rows(ours):
            if theirs.near(row["context"], row["batch"]):
                guess = _transferred(row, _attention_bytes(row, part), table, other, launch)["time_s"]
                errors.append(abs(guess / float(theirs.cold(row["context"], row["batch"])) - 1))
    return float(np.median(errors))


def product_transfer_error(table: Profile, measured: Profile, other: Profile, most: int = 64) -> float:
    """Median relative error of layer times transferred from one GPU to another, up to `most` tokens [-]."""
    shape = transformer.preset(measured.model)
    launch = composed_layers.Products(table).launch * 4
    moved = float(shape.layer_weight_bytes)
    ours, theirs = (each.rows("dense") for each in (measured, other))
    both = ours.join(theirs, on="tokens", suffix="_other")
    rows = [row for row in both.to_dicts() if row["tokens"] <= most]
    guess = [_transferred(row, moved, measured, other, launch)["time_s"] / row["time_s_other"] - 1 for row in rows]
    return float(np.median(np.abs(guess)))


def _with_links(made: Profile, root: Path, gpu: str, networks: Mapping[str, Any]) -> Profile:
    """Return a composed profile with measured transfers between devices of a node, if there are any."""
    if gpu not in networks:
        return replace(made, notes=(*made.notes, "send: not measured"))
    rows, tables_, _ = networks[gpu]
    sends = [row for row in rows if row["part"] == "send"]
    source = imported_tables.source(tables_["send"], root, vidur.REPOSITORY, vidur.LICENCE, "", ("send",))
    table = profile.added(made.table, sends)
    return replace(made, table=table, sources=(*made.sources, source), notes=(*made.notes, "send: between two devices of one node"))


# --- Thinning ---


def trimmed(table: Profile) -> Profile:
    """Return the operations that layers of models with at least a billion weights need, in single precision."""
    import polars as pl

    rows, part = table.table, pl.col("part")
    gemm = (part == "gemm") & (pl.col("m") <= MOST_TOKENS) & (pl.col("n") >= 512) & (pl.col("k") >= 512)
    decode = (
        (part == "decode")
        & pl.col("head_dim").is_in([64, 128])
        & (pl.col("context") < LONGEST)
        & (pl.col("batch") * pl.col("kv_heads") <= MOST_READ)
    )
    kept = rows.filter(gemm | decode | (part == "all_reduce")).with_columns(pl.col(name).cast(pl.Float32) for name in TIMES)
    note = f"kept: products of up to {MOST_TOKENS} rows, n and k from 512; contexts below {LONGEST}, head_dim 64 and 128"
    facts = {**table.facts, composed_layers.SHORTEST: composed_layers.Products(table).launch}
    found = composed_layers.with_errors(replace(table, table=kept, notes=(*table.notes, note), facts=facts))
    return replace(found, errors={**table.errors, **found.errors})


def _finished(one: Profile, root: Path, known: Mapping[str, Source]) -> Profile:
    """Return the profile with its sources and a date, thinned and rounded."""
    one = isotonic.isotonic_profile(one) if one.kind == "model" else one
    table, sources = _rounded(_thinned(one.table)), _sourced(one, root, known)
    return replace(one, table=table, sources=sources, date=one.date or IMPORTED)


def _thinned(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table with fewer batches, widths and transfer sizes, and without passes larger than simulated ones."""
    import polars as pl

    kept = pl.Series([True] * table.height)
    for column, allowed in (("batch", BATCHES), ("width", WIDTHS)):
        if column in table.columns:
            kept &= (table["part"] != "attention") | table[column].is_in([*allowed])
    for column, most in (("tokens", MOST_TOKENS), ("positions", MOST_TOKENS)):
        if column in table.columns:
            kept &= (table[column] <= most).fill_null(True)
    if "context" in table.columns:
        kept &= (table["part"] != "attention") | (table["context"] <= LONGEST)
    for part in ("send", "all_reduce") if "size" in table.columns else ():
        sizes = table.filter(table["part"] == part)["size"].to_numpy()
        steps = np.unique(np.round(np.log10(sizes) * SIZES_PER_DECADE))
        near = sizes[np.abs(np.log10(sizes) * SIZES_PER_DECADE - steps[:, None]).argmin(axis=1)] if sizes.size else sizes
        kept &= (table["part"] != part) | table["size"].is_in([*map(int, near)])
    return table.filter(kept)


def _rounded(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table with times rounded to `DIGITS` digits and rows sorted by their points."""
    import polars as pl

    order = [
        name
        for name in ("part", "tensor_parallel", *dict.fromkeys(axis for axes in AXES.values() for axis in axes))
        if name in table.columns
    ]
    held = table.schema["time_s"]
    return table.with_columns(pl.col(name).cast(pl.Float64).round_sig_figs(DIGITS).cast(held) for name in TIMES).sort(order)
