"""[outcomes] of a scenario: the laws for each kind of outcome, and the laws of one point."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.base.table_records import build, refuse_unknown
from model.methods.method_parameters import MethodParameters
from model.outcomes.outcome_kinds import KINDS, kind_of
from sim.scenarios.outcomes.outcome_records import LawRecord, Outcome, VariedOutcomes


class _LawsOfOutcomes(Mapping[str, Mapping[str, type[LawRecord]]]):
    """Records of laws by their `kind`, for each kind of outcome (`model.outcomes.outcome_kinds`).

    Modules are imported where their kind of outcome is asked for: together they would be a third of a short run's own imports.
    """

    def __init__(self, names: Mapping[str, tuple[str, str]]) -> None:
        self._names = names
        """Module in `sim.scenarios.outcomes`, and its name of the laws, by kind of outcome."""

    def __getitem__(self, outcome: str) -> Mapping[str, type[LawRecord]]:
        module, name = self._names[outcome]
        found: Mapping[str, type[LawRecord]] = getattr(importlib.import_module(f"sim.scenarios.outcomes.{module}"), name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


LAWS = _LawsOfOutcomes({
    "match": ("match_outcomes", "KINDS"), "accept": ("acceptance_outcomes", "KINDS"),
    "medium_accept": ("acceptance_outcomes", "BY_POSITION"), "confidence": ("acceptance_outcomes", "CONFIDENCE"),
    "decision": ("decision_outcomes", "KINDS"), "lookup": ("lookup_outcomes", "KINDS"), "rank": ("rank_outcomes", "KINDS"),
    "position_rank": ("position_rank_outcomes", "KINDS"), "exit": ("exit_outcomes", "KINDS"),
})  # fmt: skip


@cache
def rates() -> frozenset[str]:
    """Keys of these records that are rates; overriding one of them removes its `trials` and `source`."""
    return frozenset(name for kinds in LAWS.values() for record in kinds.values() for name in record.RATES)


def kinds(parameters: type[MethodParameters], outcome: str) -> list[str]:
    """Kinds of laws of an outcome that a method accepts.

    >>> from model.methods.pearl.algorithm import Parameters
    >>> kinds(Parameters, "accept")
    ['by-position', 'engine-log', 'iid', 'markov', 'published', 'replay', 'reported']
    """
    return sorted(kind for kind, law in LAWS[outcome].items() if parameters.TESTS_WHOLE_DRAFTS or not law.BY_DRAFT_POSITION)


def resolve(table: Any, where: str, method: str, parameters: MethodParameters, tokens: int) -> dict[str, Outcome]:
    """Return the laws of the outcomes that a method uses, by kind; error messages call the table `where`."""
    wanted = parameters.outcomes
    for outcome in wanted:
        checks.one_of(f"outcome that method {method} asks for,", outcome, KINDS)
    if table is None:
        if wanted:
            raise ParameterError(
                f"method {method} needs [outcomes] ({', '.join(wanted)}), and the scenario has none; `sim ls outcomes` lists"
                " their kinds"
            )
        return {}
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {table!r}")
    one = "kind" in table
    if not one and not {*table} & {*LAWS} and not any(isinstance(value, Mapping) for value in table.values()):
        raise ParameterError(f"{where}.kind is required: one of {', '.join(kinds(type(parameters), (*wanted, 'match')[0]))}")
    unknown = [] if one else [key for key in table if key not in LAWS]
    if unknown:
        raise ParameterError(f"unknown key {where}.{unknown[0]}; {checks.nearest(unknown[0], LAWS)}")
    missing = [key for key in wanted if not one and key not in table]
    if missing or (one and len(wanted) > 1):
        tables_ = " and ".join(f"[{where}.{key}]" for key in wanted)
        raise ParameterError(f"method {method} needs {tables_}" + (f", and [{where}.{missing[0]}] is missing" if missing else ""))
    if one and not wanted:
        # Not used by this method, but the kind must exist.
        checks.one_of(f"{where}.kind", table["kind"], {kind for laws in LAWS.values() for kind in laws})
        return {}
    return {key: _law(table if one else table[key], where if one else f"{where}.{key}", key, parameters, tokens) for key in wanted}


def varied(
    table: Mapping[str, Any], where: str, found: Mapping[str, Outcome], rates: Mapping[tuple[str, str], NDArray[np.float64]],
    parameters: MethodParameters,
) -> dict[str, VariedOutcomes] | None:  # fmt: skip
    """Outcomes of tables that differ from this one in single rates only, by kind of outcome; None: each table is resolved alone.

    `found` has the outcomes of this table. `rates` has values by kind of outcome (empty: of a table of one law) and key, which are
    in [0, 1]; each has shape (outcomes,), or (outcomes, length) of lists.
    """
    one = "kind" in table
    if any((name == "") != one for name, _ in rates):
        return None
    several = {}
    for name, outcome in found.items():
        own = {key: values for (of, key), values in rates.items() if of in ("", name)}
        if not own:
            continue
        law = table if one else table[name]
        keys = {key: value for key, value in law.items() if key != "kind"}
        record: LawRecord = build(LAWS[name][law["kind"]], keys, where)
        known = all(key in record.RATES and (values.ndim == 2) == (key in record.LISTED) for key, values in own.items())
        each = record.varied(own, outcome, parameters) if known else None
        if each is None:
            return None
        several[name] = each
    return several or None


def uses(table: Any, outcomes: Collection[str]) -> frozenset[str]:
    """What the laws of an [outcomes] table for these outcomes depend on: `parameters` of the method, and `tokens`."""
    if not isinstance(table, Mapping):
        return frozenset(LawRecord.USES)
    if "kind" in table:
        return frozenset().union(*(LAWS[name][table["kind"]].USES for name in outcomes if table["kind"] in LAWS[name]))
    known = (uses(each, (name,)) if name in LAWS and isinstance(each, Mapping) else LawRecord.USES for name, each in table.items())
    return frozenset().union(*known)


def _law(table: Any, where: str, outcome: str, parameters: MethodParameters, tokens: int) -> Outcome:
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {checks.shown(table)}")
    laws = LAWS[outcome]
    if "kind" not in table:
        raise ParameterError(f"{where}.kind is required: one of {', '.join(kinds(type(parameters), outcome))}")
    checks.one_of(f"{where}.kind", table["kind"], laws)
    own = {key: value for key, value in table.items() if key != "kind"}
    refuse_unknown(laws[table["kind"]], own, where, f" (of {where}.kind {table['kind']!r}, for {kind_of(outcome).rate})")
    record: LawRecord = build(laws[table["kind"]], own, where)
    found = record.outcome(parameters, tokens)
    parameters.check_law(outcome, found.law)
    return replace(found, kind=table["kind"])
