"""Plans of measured runs as TOML files: which models, prompts and methods, each with the values that it is swept over.

    [run]
    model = "family"            # or a directory, OWNER/NAME; draft and medium likewise
    tokens = 48
    repeats = 7
    prompts = 3                 # of held-out code, or `file = "texts.txt"`
    prompt_tokens = 24
    mode = "eager"              # or passes as CUDA graphs: "cuda-graph"

    [profile]                   # measured in the same sitting, between the runs; leave it out to time no passes
    widths = [1, 2, 4, 8]
    contexts = [0, 32, 64]

    [[method]]
    name = "speculative"
    sweep = { draft_length = [1, 2, 4] }

    [[method]]
    name = "ppd"
    exit_layer = 6
    sweep = { candidates = [1, 3] }
    forced = { match_rate = [0.3, 0.7] }    # outcomes are forced: weights say nothing; {} where nothing is left to chance
    apart = "processes"         # sub-processes are processes of the system, each with a model of its own; or streams of one GPU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.measured_runs.interleaved_profiles import Passes
from calibrate.measured_runs.measure_runs import choices
from model.base import bounded_files, checks, table_records
from model.base.checks import ParameterError
from model.logs.measured_runs import APART, MODES


@dataclass(frozen=True)
class RunSettings:
    """[run]: what holds for all methods."""

    model: str = "family"
    draft: str | None = None
    medium: str | None = None
    heads: str | None = None
    tokens: int = 48
    repeats: int = 7
    warm_ups: int = 1
    prompts: int = 3
    file: str | None = None
    prompt_tokens: int = 24
    seed: int = 0
    dtype: str = "float32"
    mode: str = MODES[0]

    def __post_init__(self) -> None:
        for name in ("tokens", "repeats", "prompts", "prompt_tokens"):
            checks.whole(name, getattr(self, name), 1, checks.MAX_TOKENS)
        for name in ("warm_ups", "seed"):
            checks.whole(name, getattr(self, name), 0)
        checks.one_of("mode", self.mode, MODES)


@dataclass(frozen=True)
class MethodSetting:
    """One setting of a method, and the rates that its outcomes are forced by, if they are."""

    method: str
    settings: Mapping[str, Any]
    rates: Mapping[str, float] | None = None
    apart: str | None = None
    """What its sub-processes are: processes of the system, or streams of one GPU. None: they are run one after another."""


@dataclass(frozen=True)
class WrittenPlan:
    """A plan as it was written."""

    run: RunSettings
    choices: Sequence[MethodSetting]
    profile: Passes | None = None


def read(path: Path) -> WrittenPlan:
    """A plan from a file."""
    try:
        said = bounded_files.toml_of(bounded_files.read_text(path, bounded_files.MOST_TOML))
    except FileNotFoundError:
        raise ParameterError(f"plan must be a TOML file, and there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read as TOML: {str(error).splitlines()[0]}") from None
    try:
        return of(said)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def of(said: Mapping[str, Any]) -> WrittenPlan:
    """A plan from its tables.

    >>> found = of({"method": [{"name": "speculative", "sweep": {"draft_length": [1, 2]}}]})
    >>> [each.settings for each in found.choices]
    [{'draft_length': 1}, {'draft_length': 2}]
    """
    for key in said:
        if key not in ("run", "profile", "method"):
            raise checks.unknown("table", key, ("run", "profile", "method"))
    settings = table_records.build(RunSettings, said.get("run", {}), "run")
    passes = table_records.build(Passes, said["profile"], "profile") if "profile" in said else None
    listed = said.get("method", [])
    if not isinstance(listed, list) or not listed:
        raise ParameterError("[[method]] must be there at least once: what is to be timed")
    found = [each for table in listed for each in _choices(table)]
    return WrittenPlan(settings, found, passes)


def _choices(table: Any) -> list[MethodSetting]:
    if not isinstance(table, Mapping) or "name" not in table:
        raise ParameterError("method.name is required in each [[method]]; `sim ls methods` lists them")
    own = {key: value for key, value in table.items() if key not in ("name", "sweep", "forced", "apart")}
    apart = table.get("apart")
    if apart is not None:
        checks.one_of("apart", apart, APART)
    swept = {key: _values(key, value) for key, value in dict(table.get("sweep", {})).items()}
    rates = {key: _values(key, value) for key, value in dict(table.get("forced", {})).items()}
    found = []
    for settings in choices(table["name"], table_records.frozen_values(own), swept):
        for forced in _combined(rates) if "forced" in table else [None]:
            found.append(MethodSetting(table["name"], settings, forced, apart))
    return found


def _values(key: str, value: Any) -> list[Any]:
    return [table_records.frozen(each) for each in value] if isinstance(value, list) else [value]


def _combined(rates: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    from calibrate.decode.output_quality import settings_of

    return settings_of({}, rates)
