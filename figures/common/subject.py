"""Subject of a run's figures: its scenario, and the models, devices, batch and context of its costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.base import bounded_files

_MODELS = {"shape": "{}", "draft_shape": "draft {}", "medium_shape": "medium {}"}
_DEVICES = {"device": "{}", "profile": "profile {}", "law": "step law {}"}
_MORE = {
    "dtype": "{}", "tensor_parallel": "TP {}", "prompt": "prompt of {} tokens", "context": "context of {} tokens",
    "cost_ratio": "c = {:.3g}",
}  # fmt: skip
_METHOD = {"sequences": "batch of {}", "batch": "batch of {}", "batching": "{} batching"}


def of_run(folder: str | Path) -> str:
    """Describe a run's directory in one line, from its metadata; empty where there are none.

    Swept settings are left out: the figures show them for each point.
    """
    try:
        return of_scenario(bounded_files.json_of(bounded_files.read_text(Path(folder) / "metadata.json"))["scenario"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not written by this program
        return ""


def of_scenario(tables: Mapping[str, Any]) -> str:
    """Describe a scenario's tables in one line.

    >>> tables = {"scenario": {"name": "mine"}, "cost": {"kind": "roofline", "device": "h100", "shape": "llama-3.1-8b"}}
    >>> of_scenario(tables | {"sweep": {"cost.prompt": [512, 4096]}})
    'mine: llama-3.1-8b, h100'
    >>> of_scenario({"scenario": {"name": "mine"}, "cost": {"kind": "engine", "law": "fitted/own.json", "shape": "llama-3.1-8b"}})
    'mine: llama-3.1-8b, step law own'
    >>> method = {"name": "speculative", "sequences": 8}
    >>> of_scenario({"scenario": {"name": "mine"}, "cost": {"cost_ratio": 0.1}, "method": [method]})
    'mine: c = 0.1, batch of 8'
    """
    cost, sweep = tables.get("cost", {}), {path.rpartition(".")[2] for path in tables.get("sweep", {})}
    methods = tables.get("method", [])
    methods = [methods] if isinstance(methods, Mapping) else methods
    costs = [cost | each.get("cost", {}) for each in methods] or [cost]
    said = []
    for name, text in (_MODELS | _DEVICES | _MORE).items():
        values = [each[name] for each in costs if each.get(name) is not None]
        if name == "law":
            values = [Path(each).name.removesuffix(".json") for each in values]
        if name not in sweep and values and values.count(values[0]) == len(values):
            said.append(text.format(values[0]))
    for name, text in _METHOD.items():
        values = [each.get(name) for each in methods]
        if name not in sweep and values and values[0] is not None and values.count(values[0]) == len(values):
            said.append(text.format(values[0]))
    name = tables.get("scenario", {}).get("name", "")
    return f"{name}: {', '.join(said)}" if name and said else name or ", ".join(said)
