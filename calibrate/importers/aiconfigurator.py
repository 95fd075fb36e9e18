"""Importer of AIConfigurator's tables: matrix products, attention of one new token, and reductions between GPUs.

Latencies are in milliseconds, for kernels replayed as CUDA graphs, by engine and version.

* `step` is the number of cached positions before the new token, like `context` here.
* `message_size` is in elements of two bytes (half precision); here sizes are in bytes.
* Rows of other types, of sliding windows and of beams are left out, and so are rows without a time or with zero rows to multiply;
  the notes give their number.
* TensorRT-LLM's attention includes the rotary embedding and the cache write; vLLM's does not include the rotary embedding.

Some attention tables are physically impossible. The collector for TensorRT-LLM 1.0 and 1.2 allocates a cache of keys only, so that
half the bytes are read: the times would imply up to 1.7 times the bandwidth of an A100. They are refused; use another engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.importers import imported_tables
from calibrate.importers.imported_tables import ImportedTable
from model.base.checks import ParameterError
from model.hardware import composed_layers, devices, physical_limits
from model.hardware.profile import Profile, Source

if TYPE_CHECKING:
    import polars as pl

REPOSITORY, LICENCE = "ai-dynamo/aiconfigurator", "Apache-2.0"
NO_ATTENTION = "none"
ROTATES = ("trtllm",)
"""Engines whose attention includes the rotary embedding."""


def read(
    folder: str | Path,
    *,
    gpu: str,
    engine: str = "",
    attention: str = "",
    name: str = "",
    unit: str = "ms",
    commit: str = "",
) -> Profile:
    """Read a profile of operations from the folder of one GPU, which holds `gemm/ENGINE/VERSION/gemm_perf.parquet` and others.

    Parameters
    ----------
    folder
        Folder of one GPU with `gemm`, and optionally `attention` and `comm`.
    gpu
        The device that was measured, a name of `model.hardware.devices`.
    engine
        ENGINE/VERSION; required if there are several.
    attention
        ENGINE/VERSION of the attention table, if it differs; `none` leaves attention out.
    name
        Name of the profile; default: GPU-operations.
    unit
        Unit of the times in the files.
    commit
        Commit of the repository that the files come from.
    """
    root, device = Path(folder), devices.device(gpu)
    chosen = _engine(root, "gemm", engine)
    products = root / "gemm" / chosen / "gemm_perf.parquet"
    gemm, rows, notes = _products(products, root, device, unit)
    sources = [imported_tables.source(gemm, root, REPOSITORY, LICENCE, commit, ("gemm",))]
    facts: dict[str, Any] = {"device": str(gemm.frame["device"][0])} if "device" in gemm.frame.columns else {}
    if attention != NO_ATTENTION:
        other = _engine(root, "attention", attention or chosen)
        path = root / "attention" / other / "generation_attention_perf.parquet"
        decode, more_rows, more_notes = _decode(path, root, device, unit)
        rows, notes = rows + more_rows, notes + more_notes
        sources.append(imported_tables.source(decode, root, REPOSITORY, LICENCE, commit, ("decode",)))
        facts["decode_includes"] = ["cache write", *([composed_layers.ROPE] if other.split("/")[0] in ROTATES else [])]
        facts["decode_engine"] = other
    reduced = root / "comm" / chosen / "custom_allreduce_perf.parquet"
    if reduced.is_file():
        table, more_rows, more_notes = _reductions(reduced, root, unit)
        rows, notes = rows + more_rows, notes + more_notes
        sources.append(imported_tables.source(table, root, REPOSITORY, LICENCE, commit, ("all_reduce",)))
    made = imported_tables.profile_of(
        device, rows, sources, notes, name=name or f"{device.name}-operations", model="", facts=facts,
        engine=f"{chosen} (collected by AIConfigurator)", mode="cuda-graph", kind="operations",
    )  # fmt: skip
    return composed_layers.with_errors(made)


def reductions(
    folder: str | Path, libraries: Sequence[str], *, unit: str = "ms"
) -> tuple[list[dict[str, Any]], tuple[Source, ...], str]:
    """Return rows of the part all_reduce, their sources and a note: geometric means over libraries, at sizes that all of them have.

    Low and high are the quartiles over the libraries, which differ by more than their repeats. Each library switches its algorithm
    at a different size, which changes its time up to fourfold; the mean is smoother than any single library.

    Parameters
    ----------
    folder
        Folder of one GPU with `comm/LIBRARY/VERSION`.
    libraries
        LIBRARY/VERSION of each.
    """
    root = Path(folder)
    found: list[dict[tuple[int, int], float]] = []
    sources = []
    for library in libraries:
        name = "nccl_perf" if library.startswith("nccl/") else "custom_allreduce_perf"
        table, rows, _ = _reductions(root / "comm" / library / f"{name}.parquet", root, unit)
        found.append({(row["tensor_parallel"], row["size"]): row["time_s"] for row in rows})
        sources.append(imported_tables.source(table, root, REPOSITORY, LICENCE, "", ("all_reduce",)))
    made = []
    for tensor_parallel, size in sorted(set.intersection(*(set(each) for each in found))):
        each = np.array([times[tensor_parallel, size] for times in found])
        middle, (low, high) = float(np.exp(np.log(each).mean())), np.percentile(each, [25, 75])
        times = {"time_s": middle, "low_s": min(middle, float(low)), "high_s": max(middle, float(high))}
        made.append({"part": "all_reduce", "tensor_parallel": tensor_parallel, "size": size, "repeats": len(found), **times})
    note = "all_reduce: replayed as graphs, geometric mean and quartiles over the libraries " + ", ".join(libraries)
    return made, tuple(sources), note


def _engine(root: Path, operation: str, wanted: str) -> str:
    """Return the wanted ENGINE/VERSION, or the only one in the folder."""
    folder = root / operation
    engines = sorted(f"{each.parent.name}/{each.name}" for each in folder.glob("*/*") if each.is_dir())
    if not engines:
        raise ParameterError(f"{operation}: there is no such folder with ENGINE/VERSION in it; give the folder of one GPU")
    if not wanted and len(engines) == 1:
        return engines[0]
    if wanted not in engines:
        got = f"got {wanted}" if wanted else "and none was named"
        also = f", or {NO_ATTENTION}" if operation == "attention" else ""
        raise ParameterError(f"engine of {operation} must be one of {', '.join(engines)}{also}, {got}")
    return wanted


def _is(column: pl.Series, value: str | int) -> pl.Series:
    """Return a mask of the rows that have a value, for a column of any type."""
    import polars as pl

    try:
        return (column.cast(pl.String if isinstance(value, str) else pl.Float64, strict=False) == value).fill_null(False)
    except pl.exceptions.PolarsError:  # the type cannot be cast to a string, or a number
        return pl.Series([False] * column.len())


def _timed(table: ImportedTable, where: dict[str, Any], positive: str = "") -> tuple[ImportedTable, list[str]]:
    """Return the rows of the wanted kind that have a time, and a note with the number of rows without one."""
    import polars as pl

    chosen = table
    for column, value in where.items():
        if column in chosen.frame.columns:
            kept = _is(chosen.frame[column], value)
            if not kept.any():
                listed = ", ".join(sorted(map(str, chosen.frame[column].unique())))
                raise ParameterError(f"{table.shown}: column {column}: no row of {value}; there are {listed}")
            chosen = chosen.where(kept)
    times = chosen.frame["latency"].cast(pl.Float64, strict=False)
    empty = times.is_null() | (times == 0)
    if positive:
        empty = empty | _is(chosen.frame[positive], 0)
    timed = chosen.where(~empty)
    if not timed.height:
        raise ParameterError(f"{table.shown}: column latency: no row has a time; the format of the file has changed")
    notes = [f"{table.shown}: {empty.sum()} rows without a time or without work left out"] if empty.any() else []
    return timed, notes


def _products(path: Path, root: Path, device: devices.Device, unit: str) -> tuple[ImportedTable, list[dict[str, Any]], list[str]]:
    """Rows of the part gemm."""
    whole = imported_tables.read(path, ["gemm_dtype", "m", "n", "k", "latency"], root=root)
    table, notes = _timed(whole, {"gemm_dtype": imported_tables.DTYPE}, "m")
    m, n, k = (table.whole(name, least=1) for name in ("m", "n", "k"))
    seconds = table.seconds("latency", unit)
    imported_tables.check_reached(
        table, "latency", seconds, device, moved=n * k * imported_tables.BYTES_EACH, operations=2 * m * n * k
    )
    found = imported_tables.rows("gemm", {"m": m, "n": n, "k": k}, {"time_s": seconds})
    warm = (seconds * device.bandwidth < n * k * imported_tables.BYTES_EACH) & (m == 1)
    if warm.any():
        most = (n * k * imported_tables.BYTES_EACH)[warm].max() / 1e6
        notes.append(
            f"gemm: {warm.sum()} products of one row found their weights (up to {most:.0f} MB) or a part of them in the cache of "
            f"{device.cache_bytes / 1e6:.0f} MB: faster than a layer whose weights come from memory"
        )
    return table, found, notes


def _decode(path: Path, root: Path, device: devices.Device, unit: str) -> tuple[ImportedTable, list[dict[str, Any]], list[str]]:
    """Rows of the part decode."""
    columns = ["batch_size", "num_heads", "num_key_value_heads", "head_dim", "step", "attn_dtype", "kv_cache_dtype", "latency"]
    whole = imported_tables.read(path, columns, root=root)
    wanted = {"attn_dtype": imported_tables.DTYPE, "kv_cache_dtype": imported_tables.DTYPE, "window_size": 0, "beam_width": 1}
    table, notes = _timed(whole, wanted)
    names = {"heads": "num_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "batch": "batch_size"}
    axes = {axis: table.whole(name, least=1) for axis, name in names.items()} | {"context": table.whole("step", least=0)}
    seconds = table.seconds("latency", unit)
    moved = 2 * axes["batch"] * (axes["context"] + 1) * axes["kv_heads"] * axes["head_dim"] * imported_tables.BYTES_EACH
    most = physical_limits.tiled(axes, imported_tables.BYTES_EACH)
    imported_tables.check_reached(
        table, "latency", seconds, device, moved=moved, launches=physical_limits.LAUNCHES["decode"], most=most
    )
    return table, imported_tables.rows("decode", axes, {"time_s": seconds}), notes


def _reductions(path: Path, root: Path, unit: str) -> tuple[ImportedTable, list[dict[str, Any]], list[str]]:
    """Rows of the part all_reduce."""
    nccl = path.stem == "nccl_perf"
    dtype = "nccl_dtype" if nccl else "allreduce_dtype"
    whole = imported_tables.read(path, [dtype, "num_gpus", "message_size", "latency", *(["op_name"] if nccl else [])], root=root)
    kind = {"nccl_dtype": "half", "op_name": "all_reduce"} if nccl else {dtype: imported_tables.DTYPE, "backend": "vllm_graph"}
    table, notes = _timed(whole, kind)
    gpus, size = table.whole("num_gpus", least=2), table.whole("message_size", least=1) * imported_tables.BYTES_EACH
    seconds = table.seconds("latency", unit)
    return table, imported_tables.rows("all_reduce", {"tensor_parallel": gpus, "size": size}, {"time_s": seconds}), notes
