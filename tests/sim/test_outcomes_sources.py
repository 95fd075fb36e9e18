"""Where outcomes come from: a source that is none, and trials that are no number of trials, are refused by every law."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from model.base.checks import ParameterError
from model.methods import registry
from model.outcomes.outcome_kinds import KINDS
from sim.scenarios import outcomes_section

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
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_a_source_that_is_none_and_trials_that_are_none_are_refused(name: str) -> None:
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


def test_kinds_of_outcomes_are_listed_once() -> None:
    """Each has laws, a column of its own, and whoever asks for one asks for one that there is."""
    assert [*outcomes_section.LAWS] == [*KINDS] == [kind.name for kind in KINDS.values()]
    columns = [rate.column for kind in KINDS.values() for rate in kind.rates]
    assert len({*columns}) == len(columns)
    for name in registry.names():
        parameters = registry.algorithm(name).Parameters
        assert {*parameters.OUTCOMES} <= {*KINDS}, name
        for of, kind in getattr(parameters, "IMITATES", {}).values():
            assert KINDS[kind].drafted, (name, of)
