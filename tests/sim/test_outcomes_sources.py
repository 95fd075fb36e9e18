"""Outcomes: names of kinds and rates, sources, and equal draws in forced runs and in the simulator."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest

from model.base.checks import ParameterError
from model.interpret import interpreter
from model.logs import forced_outcomes
from model.methods import registry
from model.methods.bild import algorithm as bild
from model.outcomes.outcome_kinds import KINDS
from sim.runs import sweep
from sim.scenarios import outcomes_section
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes.outcome_records import LawRecord
from sim.views import evaluation

LEAST: dict[str, dict[str, Any]] = {
    "match: iid": {"match_rate": 0.5}, "match: markov": {"match_rate": 0.5, "correlation": 0.1},
    "match: by-position": {"match_rates": (0.5,)}, "match: replay": {"records": ((True, False),)},
    "accept: iid": {"acceptance_rate": 0.5}, "accept: markov": {"acceptance_rate": 0.5, "correlation": 0.1},
    "accept: by-position": {"acceptance_rates": (0.5,)}, "accept: replay": {"records": ((True, False),)},
    "accept: by-draft-position": {"acceptance_rates": (0.5,)},
    "accept: shared-rate": {"acceptance_rate": 0.5, "concentration": 2.0}, "accept: rounds": {"lengths": ((1, 2),)},
    "confidence: two-class": {"low_if_accepted": 0.1, "low_if_rejected": 0.5},
    "decision: rates": {"fallback_rate": 0.5, "rollback_rate": 0.5},
    "decision: by-position": {"fallback_rates": (0.5,), "rollback_rates": (0.5,)}, "exit: hazards": {"hazards": (0.5, 1.0)},
    "lookup: iid": {"hit_rate": 0.5, "acceptance_rate": 0.5},
    "lookup: markov": {"hit_rate": 0.5, "hit_rate_after_acceptance": 0.5, "acceptance_rate": 0.5},
    "lookup: by-match": {
        "match_lengths": (1,), "match_rates": (0.5,), "match_rates_after_acceptance": (0.5,), "acceptance_rates": (0.5,),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_invalid_sources_and_trials_are_refused(name: str) -> None:
    outcome, _, kind = name.partition(": ")
    law: Any = outcomes_section.LAWS[outcome][kind]
    for source in ("assumed", "measured", "published"):
        assert law(**LEAST[name], source=source).source.startswith(source)
    with pytest.raises(ParameterError, match="unknown source 'hearsay'; known: assumed, measured, published"):
        law(**LEAST[name], source="hearsay")
    if "trials" in {field.name for field in fields(law)}:
        assert law(**LEAST[name], trials=1).trials == 1
        with pytest.raises(ParameterError, match="trials must be at least 1, got 0"):
            law(**LEAST[name], trials=0)


@pytest.mark.parametrize("record", sorted({law for laws in outcomes_section.LAWS.values() for law in laws.values()}, key=str))
def test_laws_use_nothing_but_what_they_say(record: type[LawRecord]) -> None:
    """Points that differ in nothing that a law uses share it. Some say more than they use, as a method may refuse them."""
    (outcome,) = ast.parse(textwrap.dedent(inspect.getsource(record.outcome))).body
    names = {each.id for each in ast.walk(outcome) if isinstance(each, ast.Name)}
    assert names & {"parameters", "tokens"} <= {*record.USES}


def test_each_kind_of_outcome_is_listed_once() -> None:
    """Each kind has laws, methods use only existing kinds, and no method has two rates in one column.

    Only the acceptance of a drafted token is a rate of two kinds, so that methods of both are compared in one column.
    """
    assert [*outcomes_section.LAWS] == [*KINDS] == [kind.name for kind in KINDS.values()]
    columns = Counter(rate.column for kind in KINDS.values() for rate in kind.rates)
    assert {name for name, count in columns.items() if count > 1} == {"acceptance_rate"}
    assert {name for name, kind in KINDS.items() if kind.rate == "acceptance_rate"} == {"accept", "position_rank"}
    for name in registry.names():
        parameters = registry.algorithm(name).Parameters
        assert {*parameters.OUTCOMES} <= {*KINDS}, name
        own = [rate.column for kind in parameters.OUTCOMES for rate in KINDS[kind].rates]
        assert len({*own}) == len(own), name
        for of, kind in getattr(parameters, "IMITATES", {}).values():
            assert KINDS[kind].drafted, (name, of)


RATED = [name for name in LEAST if any("rate" in key or "low" in key or key == "hazards" for key in LEAST[name])]


@pytest.mark.parametrize("name", RATED)
def test_rate_has_one_name(name: str) -> None:
    """A rate has the name of its key, in errors and in overrides, which remove the source of the old rate."""
    outcome, _, kind = name.partition(": ")
    record, given = outcomes_section.LAWS[outcome][kind], LEAST[name]
    assert {key for key in given if "rate" in key or "low" in key or key == "hazards"} == {*record.RATES} <= {*given}
    for key in record.RATES:
        several = isinstance(given[key], tuple)
        with pytest.raises(ParameterError) as caught:
            record(**{**given, key: (1.5,) if several else 1.5})
        assert str(caught.value) == f"{key}{'[0]' * several} must be between 0 and 1, got 1.5"
        if several:
            with pytest.raises(ParameterError, match=f"^{key} must be a list .*, got \\[\\]$"):
                record(**{**given, key: ()})
        tables = {"scenario": {}, "method": [], "outcomes": {outcome: {"kind": kind, **given, "source": "measured"}}}
        asked = sweep.resolve(tables, set={f"outcomes.{outcome}.{key}": given[key]})
        assert "source" not in asked["outcomes"][outcome]


@pytest.mark.parametrize("name", [name for name in RATED if name.endswith("by-position")])
def test_too_few_rates_are_named_by_their_key(name: str) -> None:
    outcome, _, kind = name.partition(": ")
    record = outcomes_section.LAWS[outcome][kind]
    with pytest.raises(ParameterError, match=f"^{record.RATES[0]} must have one rate for each of 2 output positions, got 1; give"):
        record(**LEAST[name]).outcome(bild.Parameters(24, 8), 2)


FORCED: list[tuple[dict[str, Any], dict[str, Any], dict[str, float]]] = [
    ({"name": "ppd", "exit_layer": 4, "candidates": 3}, {"kind": "iid", "match_rate": 0.6}, {"match_rate": 0.6}),
    ({"name": "speculative", "draft_length": 3}, {"kind": "iid", "acceptance_rate": 0.7}, {"acceptance_rate": 0.7}),
    ({"name": "hierarchical", "draft_length": 2},
     {"accept": {"kind": "iid", "acceptance_rate": 0.7}, "medium_accept": {"kind": "iid", "acceptance_rate": 0.8}},
     {"acceptance_rate": 0.7, "medium_acceptance_rate": 0.8}),
    ({"name": "bild", "max_draft_length": 4}, {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.2},
     {"fallback_rate": 0.3, "rollback_rate": 0.2}),
    ({"name": "ngram", "draft_length": 4}, {"kind": "iid", "hit_rate": 0.6, "acceptance_rate": 0.7},
     {"hit_rate": 0.6, "acceptance_rate": 0.7}),
    ({"name": "early_exit", "first_check": 3}, {"kind": "hazards", "hazards": [0, 0] + [0.3] * 6}, {"exit_rate": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "outcomes", "rates"), FORCED, ids=[method["name"] for method, _, _ in FORCED])
def test_forced_outcomes_equal_simulated_ones(method: dict[str, Any], outcomes: dict[str, Any], rates: dict[str, float]) -> None:
    """For the same rates, seed and replication the counter makes the same commits and passes."""
    costs = {"hierarchical": {"cost_ratio": 0.1, "medium_cost_ratio": 0.4}, "ppd": {}, "early_exit": {}, "ngram": {}}
    tables = {
        "scenario": {"name": "forced", "tokens": 12, "seed": 7}, "method": [{"layers": 8, **method}], "outcomes": outcomes,
        "cost": costs.get(method["name"], {"cost_ratio": 0.1}),
    }  # fmt: skip
    case = Grid(sweep.resolve(tables)).case(0)
    decode = registry.algorithm(method["name"]).decode
    for replication, answers in enumerate(evaluation.worlds_of(case, 3, 9), 3):
        forced = forced_outcomes.world(case.parameters, 1, 12, rates, seed=7, replication=replication)
        ours, theirs = (interpreter.count(decode(case.parameters, [0], 12), each, 12) for each in (forced, answers))
        assert ours.committed == theirs.committed
        assert ours.account.passes_by_kind == theirs.account.passes_by_kind


@pytest.mark.parametrize(("units", "ranks"), [(None, {1}), (2, {1, 2, 3})])
def test_any_candidate_may_be_right_where_processes_wait(units: int | None, ranks: set[int]) -> None:
    """As with real models, whose processes may always wait."""
    tables = {
        "scenario": {"name": "ranks", "tokens": 40}, "method": [{"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 3}],
        "outcomes": {"kind": "iid", "match_rate": 1.0}, "cluster": {} if units is None else {"units": units},
    }  # fmt: skip
    case = Grid(sweep.resolve(tables)).case(0)
    [world] = evaluation.worlds_of(case, 0, 1)
    assert {*world.matches} == ranks
    assert {*forced_outcomes.world(case.parameters, 1, 40, {"match_rate": 1.0}).matches} == {1, 2, 3}
