"""Expected work of methods that draft and verify concurrently: against their operations, mixtures of records, and laws together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Work
from model.methods import registry
from model.outcomes.outcome_laws import Iid, Replay
from model.outcomes.position_ranks import PositionRankRates, RecordedPositionRanks

LAYERS, DRAFT_LAYERS, RATIO = 12, 3, 0.125
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "amusd": ("amusd", {"draft_length": 4}),
    "amusd, stopped": ("amusd", {"draft_length": 3, "min_waiting": 0, "draft_stop": "rejection"}),
    "dsi": ("dsi", {"lookahead": 2, "verifiers": 3}),
    "dsi, one replica": ("dsi", {"lookahead": 1, "verifiers": 1}),
    "pearl": ("pearl", {"draft_length": 3}),
    "pearl, stopped": ("pearl", {"draft_length": 3, "draft_stop": "rejection"}),
    "ssd": ("ssd", {"draft_length": 3, "fan_out": 2}),
    "ssd, no backup": ("ssd", {"draft_length": 2, "fan_out": (3, 2, 1), "backup": "none"}),
}


def law_of(name: str, rate: float) -> Any:
    return PositionRankRates([rate, (1 - rate) / 2]) if name == "ssd" else Iid(rate)


def work(name: str, tokens: int, laws: list[Any], cost: UnitCost, **more: Any) -> Work:
    method = registry.method(TABLES[name][0])
    table = {"layers": LAYERS, "draft_layers": DRAFT_LAYERS, **TABLES[name][1], **more}
    found = method.work_of_all(method.kind(**table), tokens, laws, cost)
    assert found is not None
    return found


COSTS = st.builds(
    lambda ratio, link: UnitCost(LAYERS, cost_ratio=ratio / 16, link=float(link), operations_ratio=RATIO),
    st.integers(1, 24), st.integers(0, 9),
)  # fmt: skip


@given(st.sampled_from([*TABLES]), st.integers(1, 24), st.integers(0, 8), COSTS)
def test_layers_run_are_the_operations(name: str, tokens: int, eighths: int, cost: UnitCost) -> None:
    method, table = registry.method(TABLES[name][0]), TABLES[name][1]
    law = law_of(TABLES[name][0], eighths / 8)
    predicted = method.predict(method.kind(layers=LAYERS, draft_layers=DRAFT_LAYERS, **table), tokens, law, cost)
    by_model = work(name, tokens, [law], cost).at(0).by_model
    target, draft = by_model["target"], by_model.get("draft")
    drafted = 0.0 if draft is None else draft.layer_passes / DRAFT_LAYERS
    assert predicted.operations is not None
    assert target.layer_passes / LAYERS + RATIO * drafted == pytest.approx(float(predicted.operations), rel=1e-12)
    assert target.passes >= float(predicted.rounds) * (1 - 1e-12)  # type: ignore[arg-type]
    assert target.heads <= target.layer_passes / LAYERS * (1 + 1e-12)
    assert target.attended >= target.layer_passes
    assert target.rows_read <= target.attended * (1 + 1e-12)


@given(st.sampled_from([*TABLES]), st.integers(1, 24), COSTS)
def test_laws_together_are_laws_alone(name: str, tokens: int, cost: UnitCost) -> None:
    laws = [law_of(TABLES[name][0], rate) for rate in (0.0, 0.4, 1.0)]
    together = work(name, tokens, laws, cost)
    for index, law in enumerate(laws):
        alone = work(name, tokens, [law], cost).at(0)
        for role, totals in alone.by_model.items():
            assert [*together.at(index).by_model[role]] == pytest.approx([*totals], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", TABLES)
def test_work_of_records_is_their_mean(name: str) -> None:
    cost = UnitCost(LAYERS, cost_ratio=0.3, link=1.0)
    records = [[1, 0, 1, 1, 1, 0, 1, 1], [0, 0, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
    ranked = TABLES[name][0] == "ssd"
    kind: Any = RecordedPositionRanks if ranked else lambda rows: Replay(np.array(rows, dtype=bool))
    each = [work(name, 8, [kind([record])], cost).at(0).by_model for record in records]
    mixed = work(name, 8, [kind(records)], cost).at(0).by_model
    for role in ("target", "draft"):
        assert [*mixed[role]] == pytest.approx(np.mean([totals[role] for totals in each], axis=0).tolist(), rel=1e-12)


@pytest.mark.parametrize("name", TABLES)
def test_budget_limits_the_positions_of_the_draft_alone(name: str) -> None:
    cost, law = UnitCost(LAYERS, cost_ratio=0.3), law_of(TABLES[name][0], 0.75)
    whole, limited = (work(name, 30, [law], cost, context_budget=budget).at(0).by_model for budget in (None, 4))
    assert limited["target"] == whole["target"]
    assert limited["draft"].attended < whole["draft"].attended
    assert limited["draft"].rows_read < whole["draft"].rows_read
    assert limited["draft"].layer_passes == whole["draft"].layer_passes


def test_one_token_is_one_pass_of_the_target() -> None:
    for name in TABLES:
        [totals] = work(name, 1, [law_of(TABLES[name][0], 0.5)], UnitCost(LAYERS, cost_ratio=0.3)).at(0).by_model.values()
        assert totals[:5] == (1, LAYERS, LAYERS, LAYERS, LAYERS)


def test_no_work_where_a_draft_pass_matters_beyond_the_next_draft() -> None:
    method = registry.method("amusd")
    choice = method.kind(layers=LAYERS, draft_length=4, min_waiting=0)  # type: ignore[call-arg]
    cost = UnitCost(LAYERS, cost_ratio=0.3)
    assert method.expected_work(choice, 9, Iid(0.5), cost) is None
    assert np.isnan(float(method.predict(choice, 9, Iid(0.5), cost).latency))


def test_laws_of_another_kind_are_refused() -> None:
    method = registry.method("ssd")
    with pytest.raises(ParameterError, match="law of ranks"):
        method.expected_work(method.kind(layers=4, draft_length=2, fan_out=1), 9, Iid(0.5), UnitCost(4, cost_ratio=0.3))  # type: ignore[call-arg]
