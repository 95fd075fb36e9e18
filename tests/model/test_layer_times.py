"""Costs of steps in layer-times."""

from typing import Any

import pytest

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.steps import Forward, LayerSpan

UNEVEN = UnitCost(4, layer_times=(1.0, 2.0, 4.0, 8.0), early_head=0.5, final_head=0.25, dispatch=0.125)


def test_spans_of_uneven_layers_add_up() -> None:
    assert UNEVEN.depths == (0.0, 1.0, 3.0, 7.0, 15.0)
    assert UNEVEN.span(1, 3) == 6.0
    assert UNEVEN.span(2, 2) == 0.0
    assert UNEVEN.span(0, 2) + UNEVEN.span(2, 4) == UNEVEN.span(0, 4) == 15.0
    assert UnitCost(40).span(7, 30) == 23.0


def test_head_at_the_last_layer_is_the_final_head() -> None:
    assert [UNEVEN.head(layer) for layer in range(5)] == [0.5, 0.5, 0.5, 0.5, 0.25]


def test_pass_takes_its_layers_and_head_for_any_width() -> None:
    assert UNEVEN.forward(Forward("target", (1,), 0, LayerSpan(1, 3))) == 6.0
    assert UNEVEN.forward(Forward("target", (1, 2, 3), 0, LayerSpan(1, 3))) == 6.0
    assert UNEVEN.forward(Forward("target", (1,), 0, LayerSpan(1, 3), heads=1)) == 6.5
    for heads in (1, 2):  # the head's weights are read once for all positions
        assert UNEVEN.forward(Forward("target", (1, 2), 0, LayerSpan(1, 4), heads=heads)) == 14.25
    assert UNEVEN.forward(Forward("target", (1,), 0, LayerSpan(2, 2), heads=1)) == 0.5


def test_missing_cost_ratio_is_named() -> None:
    cost = UnitCost(4, cost_ratio=0.25, final_head=1.0)
    assert float(cost.draft_times()) == cost.pass_time("draft") == 1.25
    with pytest.raises(ParameterError, match=r"^medium_cost_ratio is required: the time of a pass of the medium model relative to"):
        cost.draft_times(role="medium")
    with pytest.raises(ParameterError, match=r"^cost_ratio is required: the time of a pass of the draft model"):
        UnitCost(4, medium_cost_ratio=0.25).draft_times()


def test_draft_and_verify_costs_leave_costs_plain() -> None:
    assert UnitCost(4, cost_ratio=0.1, medium_cost_ratio=0.5, verify_cost=((1, 1.0), (4, 2.0))).plain
    assert not UnitCost(4, cost_ratio=0.1, final_head=0.5).plain


@pytest.mark.parametrize(("law", "times"), [("linear", [1.0, 1.25, 1.5, 1.75]), ("tree", [1.0, 1.25, None, 1.5])])
def test_dispatch_time_by_law(law: str, times: list[float | None]) -> None:
    cost = UnitCost(4, dispatch=1.0, dispatch_per_process=0.25, dispatch_law=law)
    for processes, time in enumerate(times):
        if time is not None:
            assert cost.dispatching(processes) == time
    assert UnitCost(4, dispatch=1.0).dispatching(1000) == 1.0
    assert cost.dispatching(1) == 1.25  # the laws agree on none and on one


@pytest.mark.parametrize(
    "extra",
    [{"early_head": 0.5}, {"final_head": 1}, {"dispatch": 1e-9}, {"dispatch_per_process": 1.0}, {"link": 1.0}, {"promotion": 1.0},
     {"layer_times": (1.0, 2.0)}],
)  # fmt: skip
def test_any_overhead_makes_costs_not_plain(extra: dict[str, Any]) -> None:
    assert UnitCost(2).plain
    assert not UnitCost(2, **extra).plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be between 1 and 10000, got 0"),
        ({"layers": 2.0}, "layers must be a whole number, got 2.0"),
        ({"layers": True}, "layers must be a whole number, got True"),
        ({"link": -0.5}, "link must be at least 0, got -0.5"),
        ({"promotion": float("nan")}, "promotion must be finite and at least 0, got nan"),
        ({"early_head": float("inf")}, "early_head must be finite and at least 0, got inf"),
        ({"final_head": "1"}, "final_head must be a number, got '1'"),
        ({"dispatch": True}, "dispatch must be a number, got True"),
        ({"dispatch_per_process": -1}, "dispatch_per_process must be at least 0, got -1"),
        ({"dispatch_law": "trees"}, r"unknown dispatch_law 'trees'; did you mean tree\? known: linear, tree"),
        ({"layer_times": (1.0,)}, "layer_times must have one time for each of layers=2, got 1"),
        ({"layer_times": (1.0, -1.0)}, r"layer_times\[1\] must be at least 0, got -1"),
    ],
)
def test_invalid_costs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        UnitCost(**({"layers": 2} | change))
