"""Importer of LLMServingSim's profiles of one model on one GPU, run by vLLM: `dense.csv`, `attention.csv`, `per_sequence.csv`.

Times are in the unit at the end of the column's name.

* A layer is norm, query-key-value, rotation, output, norm, gate and up, activation, down: `layernorm` runs twice, as in the
  profiler's sequence. `embedding` and `final_layernorm` run once per pass; the latter counts as part of the head.
* `kv_decode` and `kv_prefill` are the numbers of positions before those of the pass, like `context` here.
* Passes that mix prompts and new tokens are left out; the notes give their number.

[Cho2024] J. Cho et al. LLMServingSim: a HW/SW co-simulation infrastructure for LLM inference serving at scale. IISWC 2024.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.importers import imported_tables
from model.architectures import transformer
from model.architectures.transformer import Shape
from model.base import bounded_files
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.interpolation import Floats
from model.hardware.physical_limits import LAUNCHES
from model.hardware.profile import Profile

REPOSITORY, LICENCE = "casys-kaist/LLMServingSim", "MIT"
LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1}
"""Number of runs of each operation per layer."""
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Matrix products, in the order of `imported_tables.products`."""
PASS = ("embedding", "final_layernorm")
HEAD = ("lm_head", "sampler")


def read(folder: str | Path, *, model: str, gpu: str, name: str = "", commit: str = "") -> Profile:
    """Read a profile of a model from the folder of one tensor parallel size, as `tp1`.

    Parameters
    ----------
    folder
        Folder with `dense.csv`, `attention.csv` and `per_sequence.csv`; its name ends in the tensor parallel size.
    model, gpu
        The model and the device that were measured: names of `model.architectures.transformer` and `model.hardware.devices`, or
        files.
    name
        Name of the profile; default: GPU-MODEL.
    commit
        Commit of the repository that the files come from.
    """
    root = Path(folder)
    shape, device = transformer.named_shape(model, imported_tables.DTYPE, key="model"), devices.device(gpu)
    model = transformer.label(model)
    split = re.fullmatch(r"tp(\d+)", root.resolve().name)
    tensor_parallel = int(split[1]) if split else 1
    if tensor_parallel < 1 or shape.heads % tensor_parallel:
        raise ParameterError(
            f"tensor_parallel must divide heads={shape.heads}, got {tensor_parallel} by the name of the folder {root.name}"
        )
    dense, rows, final, notes = _dense(root, shape, device, tensor_parallel)
    sequence, more_rows, more_notes = _per_sequence(root, shape, device, tensor_parallel, final)
    rows, notes = rows + more_rows, notes + more_notes
    attention, more_rows, more_notes = _attention(root, shape, device, tensor_parallel)
    rows, notes = rows + more_rows, notes + more_notes
    tables = {
        "dense": (dense, ("dense", "embedding")),
        "sequence": (sequence, ("head", "step")),
        "attention": (attention, ("attention",)),
    }
    sources = tuple(imported_tables.source(table, root, REPOSITORY, LICENCE, commit, parts) for table, parts in tables.values())
    facts = _facts(root.parent / "meta.yaml", device)
    return imported_tables.profile_of(
        device, rows, sources, notes, name=name or f"{device.name}-{model}", model=model, shape=asdict(shape),
        engine=f"vLLM {facts.get('vllm_version', '')}".strip() + " (profiled by LLMServingSim)", mode="kernel-only", kind="model",
        date=facts.get("profiled_at", "")[:10], errors=imported_tables.errors(rows), facts=facts,
    )  # fmt: skip


def _facts(path: Path, device: devices.Device) -> dict[str, str]:
    """Read the profiler's facts of the run from `meta.yaml`, its plain lines only; empty without such a file.

    If the file names another known GPU than `device`, the times are refused.
    """
    if not path.is_file():
        return {}
    wanted = ("vllm_version", "cuda_version", "gpu", "profiled_at")
    try:
        text = bounded_files.read_text(path)
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name}: it cannot be read: {error}") from None
    lines = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {key: value.strip().strip("'") for key, value in lines if key in wanted}
    if not found:
        raise ParameterError(f"{path.name}: it has none of {', '.join(wanted)}; restore it, or leave it out")
    words = {*found.get("gpu", "").lower().replace("-", " ").split()}
    named = [name for name in devices.DEVICES if {*name.split("-")} <= words]
    if device.published and named and device.name not in named:
        raise ParameterError(f"{path.name}: gpu must be {device.name}, as asked for, got {found['gpu']}; name the GPU it ran on")
    return found


def _by_name(table: imported_tables.ImportedTable, names: tuple[str, ...], axis: str) -> dict[str, tuple[Floats, Floats]]:
    """Coordinates and times of each named operation; all must have the same coordinates."""
    column, unit = imported_tables.time_column(table, "time")
    words = table.words("layer", names)
    found: dict[str, tuple[Floats, Floats]] = {}
    for name in names:
        chosen = table.where(words == name)
        if not chosen.height:
            raise ParameterError(f"{table.shown}: column layer: no row of {name}; a layer needs it")
        points, times, _ = imported_tables.merged({axis: chosen.whole(axis, least=1)}, {"time_s": chosen.seconds(column, unit)})
        found[name] = points[axis], times["time_s"]
        first = found[names[0]][0]
        if not np.array_equal(points[axis], first):
            at = np.setxor1d(points[axis], first)[0]
            raise ParameterError(f"{table.shown}: column {axis}: {names[0]} and {name} do not both have {at:g}; a layer needs both")
    return found


def _dense(
    root: Path, shape: Shape, device: devices.Device, tensor_parallel: int
) -> tuple[imported_tables.ImportedTable, list[dict[str, Any]], tuple[Floats, Floats], list[str]]:
    """Rows of the parts dense and embedding, and the final norm by tokens."""
    table = imported_tables.read(root / "dense.csv", ["layer", "tokens"], root=root)
    each = _by_name(table, (*LAYER, *PASS), "tokens")
    column, unit = imported_tables.time_column(table, "time")
    for operation, (inputs, outputs) in zip(PRODUCTS, imported_tables.products(shape), strict=True):
        chosen, size = table.where(table.frame["layer"] == operation), inputs * outputs / tensor_parallel
        moved, work = np.full(chosen.height, size), 2 * size * chosen.column("tokens")
        imported_tables.check_reached(
            chosen, column, chosen.seconds(column, unit), device, moved=moved * imported_tables.BYTES_EACH, operations=work
        )
    tokens = each["layernorm"][0]
    total: Floats = np.sum([times * each[name][1] for name, times in LAYER.items()], axis=0)
    rows = imported_tables.rows("dense", {"tokens": tokens, "tensor_parallel": tensor_parallel}, {"time_s": total})
    rows += imported_tables.rows(
        "embedding", {"tokens": tokens, "tensor_parallel": tensor_parallel}, {"time_s": each["embedding"][1]}
    )
    notes = ["dense: sum of a layer's operations, its norm twice", *imported_tables.dips(rows, "dense", "tokens")]
    return table, rows, each["final_layernorm"], notes


def _per_sequence(
    root: Path, shape: Shape, device: devices.Device, tensor_parallel: int, final: tuple[Floats, Floats]
) -> tuple[imported_tables.ImportedTable, list[dict[str, Any]], list[str]]:
    """Rows of the parts head and step."""
    table = imported_tables.read(root / "per_sequence.csv", ["layer", "sequences"], root=root)
    each = _by_name(table, HEAD, "sequences")
    column, unit = imported_tables.time_column(table, "time")
    heads = table.where(table.frame["layer"] == "lm_head")
    size = shape.hidden * shape.vocabulary / tensor_parallel
    moved, work = np.full(heads.height, size * imported_tables.BYTES_EACH), 2 * size * heads.column("sequences")
    imported_tables.check_reached(heads, column, heads.seconds(column, unit), device, moved=moved, operations=work)
    positions, times = each["lm_head"]
    normed = times + np.interp(positions, *final)
    rows = imported_tables.rows("head", {"positions": positions, "tensor_parallel": tensor_parallel}, {"time_s": normed})
    rows += imported_tables.rows(
        "step", {"batch": each["sampler"][0], "tensor_parallel": tensor_parallel}, {"time_s": each["sampler"][1]}
    )
    return table, rows, ["head: lm_head and the final norm", "step: the sampler alone; launching and preparing were not measured"]


def _attention(
    root: Path, shape: Shape, device: devices.Device, tensor_parallel: int
) -> tuple[imported_tables.ImportedTable, list[dict[str, Any]], list[str]]:
    """Rows of the part attention: passes of one token per sequence, and of several tokens of one sequence."""
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    table = imported_tables.read(root / "attention.csv", names, root=root)
    column, unit = imported_tables.time_column(table, "time")
    chunk, before, sequences, cached = (table.whole(name, least=0) for name in names)
    seconds = table.seconds(column, unit)
    empty = (chunk == 0) & (sequences == 0)
    if empty.any():
        raise table.refuse(int(np.argmax(empty)), "n_decode", "a pass needs a prompt or new tokens, got neither")
    mixed = (chunk > 0) & (sequences > 0)
    width, context, batch = np.where(chunk > 0, chunk, 1), np.where(chunk > 0, before, cached), np.maximum(sequences, 1)
    alone = table.where(~mixed)
    width, context, batch, times = (each[~mixed] for each in (width, context, batch, seconds))
    each = max(1, shape.kv_heads // tensor_parallel) * shape.head_dim
    moved = 2 * batch * (context + width) * each * imported_tables.BYTES_EACH
    work = 4 * shape.heads * shape.head_dim / tensor_parallel * batch * width * (context + (width + 1) / 2)
    imported_tables.check_reached(alone, column, times, device, moved=moved, operations=work, launches=LAUNCHES["attention"])
    rows = imported_tables.rows(
        "attention", {"tensor_parallel": tensor_parallel, "width": width, "context": context, "batch": batch}, {"time_s": times}
    )
    return table, rows, [f"attention: {mixed.sum()} passes that mix a prompt and new tokens left out"]
