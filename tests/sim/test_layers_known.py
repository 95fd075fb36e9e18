"""The depth of the target need not be given where a shape or a profile knows it."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from model.base.checks import ParameterError

SPECULATIVE = {"name": "speculative", "draft_length": 2}
HARDWARE = {"kind": "roofline", "device": "a100", "shape": "opt-1.3b", "draft_shape": "opt-125m"}


def run(method: dict[str, Any], cost: dict[str, Any]) -> Any:
    settings = {"name": "depth", "tokens": 8, "views": ["formula"]}
    return sim.run({"scenario": settings, "method": [method], "outcomes": {"kind": "iid", "acceptance_rate": 0.7}, "cost": cost})


@pytest.mark.parametrize("cost", [HARDWARE, {"shape": "opt-1.3b", "draft_shape": "opt-125m", "cost_ratio": 0.1}])
def test_layers_come_from_the_shape(cost: dict[str, Any]) -> None:
    left_out, given = run(SPECULATIVE, cost), run(SPECULATIVE | {"layers": 24}, cost)
    assert left_out["layers"].to_list() == [24]
    assert left_out.equals(given)


def test_layers_are_required_without_a_shape() -> None:
    with pytest.raises(ParameterError, match=r"^method.layers is required and has no default; add it under"):
        run(SPECULATIVE, {"cost_ratio": 0.1})
