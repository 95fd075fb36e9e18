"""Published tables of engines, and the bundled step laws that are fitted to them.

Every bundled law is fitted to a table of cells by `model.engines.law_fit`, with its priors and a fixed seed. `calibrate engine
bundle` writes all of them anew; nothing else may change them.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import law_fit, step_law
from model.engines.cells import Cells
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.engines.step_terms import RoutedExperts

FACTS = ("engine", "version", "model", "gpu", "draft", "source", "date", "note")
"""Facts that every table states, kept with its law."""
LICENCE = "facts only: numbers and their circumstances, in no words of the source"
_OPTIONAL = ("experts", "active_experts", "target", "device", "shape", "tensor_parallel")


@dataclass(frozen=True, eq=False)
class LawTable:
    """Published table of one engine, model, GPU and draft.

    Parameters
    ----------
    cells, facts
        Measured cells, and the facts of `FACTS`, as text.
    experts, kernels
        Experts of the model, or source of its kernels' seconds; None: none.
    shape, tensor_parallel
        Shape of the model (`sim ls shapes`) and devices that it is split over; None: not known, or said by the kernels.
    """

    cells: Cells
    facts: Mapping[str, str]
    experts: RoutedExperts | None = None
    kernels: KernelSource | None = None
    shape: str | None = None
    tensor_parallel: int | None = None


def names() -> tuple[str, ...]:
    """Names of the tables, which are those of the bundled laws."""
    return tuple(_sources())


def table(name: str) -> LawTable:
    """Table by its name.

    >>> table("tensorrt-llm-deepseek-r1-fp8-b200").cells.values.tolist()
    [14.652, 15.09, 17.48, 20.754, 25.579]
    """
    if name not in _sources():
        raise checks.unknown("engine table", name, names())
    said = _sources()[name]
    experts = RoutedExperts(said["experts"], said["active_experts"]) if "experts" in said else None
    kernels = KernelSource(said["target"], said["device"]) if "target" in said else None
    facts = {key: said[key] for key in FACTS} | {"licence": LICENCE, "table": f"model/engines/tables/{name}.csv"}
    cells = cell_tables.read_csv(_folder() / f"{name}.csv").cells
    return LawTable(cells, facts, experts, kernels, said.get("shape"), said.get("tensor_parallel"))


def fitted(name: str) -> StepLaw:
    """Law fitted to the table of this name, under the priors of all engines."""
    of = table(name)
    return law_fit.fit(
        of.cells, name, experts=of.experts, kernels=of.kernels, facts=of.facts, model=of.shape, tensor_parallel=of.tensor_parallel
    )


def write(folder: Path | None = None) -> list[Path]:
    """Fit all laws and write them into a folder; default: that of the bundled laws."""
    folder = _folder().parent / "laws" if folder is None else folder
    return [step_law.write(fitted(name), folder / f"{name}.json") for name in names()]


def _folder() -> Path:
    return Path(str(resources.files("model"))) / "engines" / "tables"


@functools.cache
def _sources() -> Mapping[str, Mapping[str, Any]]:
    found = tomllib.loads(bounded_files.read_text(_folder() / "sources.toml", 2**20))
    for name, said in found.items():
        if missing := {*FACTS} - {*said} or {*said} - {*FACTS, *_OPTIONAL}:
            raise ParameterError(f"sources.toml: {name}: wrong or missing keys {', '.join(sorted(missing))}")
    return dict(sorted(found.items()))
