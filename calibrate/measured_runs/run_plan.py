"""Plans of measured runs as TOML files: models, prompts, and methods with swept parameters.

    [run]
    model = "family"            # or a directory, or OWNER/NAME; draft and medium likewise
    tokens = 48
    repeats = 7
    prompts = 3                 # of held-out code, or `file = "prompts.txt"`
    prompt_tokens = 24
    mode = "eager"              # or passes as CUDA graphs: "cuda-graph"

    [profile]                   # measured in the same session, between the runs; without it no passes are timed
    widths = [1, 2, 4, 8]
    contexts = [0, 32, 64]

    [[method]]
    name = "speculative"
    sweep = { draft_length = [1, 2, 4] }

    [[method]]
    name = "ppd"
    exit_layer = 6
    sweep = { candidates = [1, 3] }
    forced = { match_rate = [0.3, 0.7] }    # outcomes are drawn with these rates, weights are ignored; {} for no random outcome
    unit_kind = "processes"     # sub-processes are system processes, each with a replica of the model; or streams of one GPU

    [[method]]
    name = "pearl"
    draft_length = 3
    unit_kind = "processes"     # a method with several models: a process for each model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.measured_runs.interleaved_profiles import Passes
from calibrate.measured_runs.measure_runs import choices
from model.base import bounded_files, checks, renamed_keys, table_records
from model.base.checks import ParameterError
from model.logs.measured_runs import MODES, UNIT_KINDS


@dataclass(frozen=True)
class RunSettings:
    """The table [run]: settings of all methods."""

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
    """One setting of a method, with the rates of forced outcomes, if any."""

    method: str
    settings: Mapping[str, Any]
    rates: Mapping[str, float] | None = None
    unit_kind: str | None = None
    """Kind of its units: system processes (of sub-processes, or of models), or streams of one GPU. None: all passes run in turn."""


@dataclass(frozen=True)
class WrittenPlan:
    """The content of a plan file."""

    run: RunSettings
    choices: Sequence[MethodSetting]
    profile: Passes | None = None


def read(path: Path) -> WrittenPlan:
    """Read a plan from a file."""
    try:
        tables = bounded_files.toml_of(bounded_files.read_text(path, bounded_files.MOST_TOML))
    except FileNotFoundError:
        raise ParameterError(f"plan must be a TOML file, and there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read as TOML: {str(error).splitlines()[0]}") from None
    try:
        return from_tables(tables)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def from_tables(tables: Mapping[str, Any]) -> WrittenPlan:
    """Build a plan from its tables.

    >>> found = from_tables({"method": [{"name": "speculative", "sweep": {"draft_length": [1, 2]}}]})
    >>> [each.settings for each in found.choices]
    [{'draft_length': 1}, {'draft_length': 2}]
    """
    for key in tables:
        if key not in ("run", "profile", "method"):
            raise checks.unknown("table", key, ("run", "profile", "method"))
    settings = table_records.build(RunSettings, tables.get("run", {}), "run")
    passes = table_records.build(Passes, tables["profile"], "profile") if "profile" in tables else None
    listed = tables.get("method", [])
    if not isinstance(listed, list) or not listed:
        raise ParameterError("[[method]] is required at least once: the decodings to time")
    found = [each for table in listed for each in _choices(table)]
    return WrittenPlan(settings, found, passes)


def _choices(table: Any) -> list[MethodSetting]:
    if not isinstance(table, Mapping) or "name" not in table:
        raise ParameterError("method.name is required in each [[method]]; `sim ls methods` lists them")
    for old in table:
        if (new := renamed_keys.current_name(old, ("unit_kind",))) is not None:
            raise ParameterError(f"unknown key method.{old}; it is now {new}")
    fixed = {key: value for key, value in table.items() if key not in ("name", "sweep", "forced", "unit_kind")}
    unit_kind = table.get("unit_kind")
    if unit_kind is not None:
        checks.one_of("unit_kind", unit_kind, UNIT_KINDS)
    swept = {key: _values(key, value) for key, value in dict(table.get("sweep", {})).items()}
    rates = {key: _values(key, value) for key, value in dict(table.get("forced", {})).items()}
    found = []
    for settings in choices(table["name"], table_records.frozen_values(fixed), swept):
        for forced in _combined(rates) if "forced" in table else [None]:
            found.append(MethodSetting(table["name"], settings, forced, unit_kind))
    return found


def _values(key: str, value: Any) -> list[Any]:
    return [table_records.frozen(each) for each in value] if isinstance(value, list) else [value]


def _combined(rates: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    from calibrate.decode.output_quality import settings_of

    return settings_of({}, rates)
