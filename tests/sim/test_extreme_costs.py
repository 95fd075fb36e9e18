"""Extreme values: every method with costs and rates at their bounds gives finite numbers or an error."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import sim
from model.base.checks import ParameterError
from model.methods import registry
from sim.scenarios import cases

METHODS: dict[str, dict[str, Any]] = {
    "ppd": {"exit_layer": 4, "candidates": 2}, "speculative": {"draft_length": 3}, "beam": {"draft_length": 3, "beams": 2},
    "hierarchical": {"draft_length": 2}, "adaptive": {"policy": "heuristic"}, "bild": {}, "early_exit": {"threshold": 0.9},
    "skipdecode": {"min_layers": 2, "max_layers": 8, "prompt": 1, "sequence_length": 400}, "autoregressive": {},
}  # fmt: skip
TIMES = (
    "early_head", "final_head", "dispatch", "dispatch_per_process", "link", "promotion", "propagation", "state_check", "cost_ratio",
    "medium_cost_ratio", "seconds_per_layer", "operations_ratio", "medium_operations_ratio",
)  # fmt: skip
legal = st.sampled_from([0, cases.MIN_TIME, 1e-9, 1e-3, 1, 1e3, cases.MAX_TIME])
extreme = st.one_of(legal, st.sampled_from([5e-324, 1e-200, 1e-13, 2e9, 1e200]))
rates = st.sampled_from([0, 5e-324, 1e-9, 0.5, 1 - 2**-53, 1])


@st.composite
def scenarios(draw: st.DrawFn, times: st.SearchStrategy[float]) -> dict[str, Any]:
    """A scenario of one method with the costs that it uses."""
    name = draw(st.sampled_from([*METHODS]))
    table = METHODS[name]
    [used] = cases.used_costs([{"name": name, "layers": 8, **table}])
    keys = draw(st.lists(st.sampled_from([each for each in TIMES if each in used or each in ("final_head", "seconds_per_layer")]),
                         max_size=4, unique=True))  # fmt: skip
    cost: dict[str, Any] = {key: draw(times) for key in keys}
    rate = draw(rates)
    if {"cost_ratio", "medium_cost_ratio"} & used:
        cost.setdefault("cost_ratio", 0.1)
    if "medium_cost_ratio" in used:
        cost.setdefault("medium_cost_ratio", 0.3)
    if "verify_cost" in used and draw(st.booleans()):
        cost["verify_cost"] = [[1, draw(times)], [64, draw(times)]]
    if draw(st.booleans()):
        cost["layer_times"] = draw(st.lists(times, min_size=8, max_size=8))
    laws = {
        "match": {"kind": "iid", "match_rate": rate}, "accept": {"kind": "iid", "acceptance_rate": rate},
        "medium_accept": {"kind": "iid", "acceptance_rate": draw(rates)},
        "decision": {"kind": "iid", "fallback_rate": rate, "rollback_rate": draw(rates)},
        "exit": {"kind": "hazards", "hazards": [rate] * 8},
    }  # fmt: skip
    kind = registry.algorithm(name).Parameters
    asked = kind.outcomes_for({"layers": 8, **table})
    found = {"scenario": {"name": "x", "tokens": draw(st.sampled_from([1, 2, 12, 300])), "replications": 3},
             "method": [{"name": name, "layers": 8, **table}], "cost": cost}  # fmt: skip
    return found | ({"outcomes": {each: laws[each] for each in asked}} if asked else {})


def looked_at(scenario: dict[str, Any]) -> bool:
    """Run a scenario and check that all numbers are finite and no arithmetic has overflowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        try:
            table = sim.run(scenario)
        except ParameterError:
            return False
    for name in table.columns:
        if table[name].dtype.is_float():
            values = table[name].drop_nulls().to_list()
            assert all(map(math.isfinite, values)), (name, values)
    return True


LOOSE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@given(scenario=scenarios(legal))
@settings(max_examples=12, deadline=None, suppress_health_check=LOOSE)
def test_valid_extremes_give_finite_numbers(scenario: dict[str, Any]) -> None:
    assume(looked_at(scenario))


@pytest.mark.slow
@given(scenario=st.one_of(scenarios(legal), scenarios(extreme)))
@settings(max_examples=500, deadline=None, suppress_health_check=LOOSE)
def test_extremes_give_numbers_or_an_error(scenario: dict[str, Any]) -> None:
    looked_at(scenario)


@pytest.mark.parametrize("first", [1e-200, 5e-324, 0])
def test_plain_pass_without_time_is_refused(first: float) -> None:
    found = {
        "scenario": {"name": "x", "tokens": 12, "replications": 3},
        "method": [{"name": "speculative", "layers": 8, "draft_length": 3}],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.5}, "cost": {"cost_ratio": 0.1, "verify_cost": [[1, first], [4, 1.1]]},
    }  # fmt: skip
    with pytest.raises(ParameterError, match=r"verify_cost.*(times above 0|at least 1e-12)"):
        sim.run(found)
