"""Parts of the time per token: they add up in every view, follow from the costs, and are null with a reason elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import sim
from model.engines import law_fit, step_law
from model.engines.cells import Cells
from sim.engine import events
from sim.scenarios.grid import Grid
from sim.views import evaluation, formula_view

LAYERS = [f"time_{part}_layers" for part in ("draft", "verify", "overhead", "waiting")]
SECONDS = [f"time_{part}_s" for part in ("draft", "verify", "overhead", "waiting")]
SPECULATIVE = {"name": "speculative", "layers": 32, "draft_length": 3}
BEAMS = {"name": "beam", "layers": 32, "beams": 2, "draft_length": 2, "rule": "per-beam"}
RATIO = {"cost_ratio": 0.1}
SKIPPING = {"name": "skipdecode", "layers": 8, "min_layers": 2, "max_layers": 4, "prompt": 0, "sequence_length": 24}
STATIC = SPECULATIVE | {"sequences": 4, "batching": "static"}
ROOFLINE = {
    "kind": "roofline", "device": "h100", "shape": "llama-3.1-8b", "draft_shape": "llama-3.2-1b", "prompt": 100,
    "step_s": 2e-3, "draft_step_s": 5e-4,
}  # fmt: skip
IN_LAYERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (SPECULATIVE, RATIO, {}),
    (SPECULATIVE | {"placement": "separate"}, RATIO | {"link": 2.0}, {}),
    (STATIC, RATIO | {"verify_cost": [[1, 1.0], [16, 1.6]]}, {}),
    ({"name": "adaptive", "layers": 32, "policy": "heuristic", "max_draft_length": 6}, RATIO, {}),
    ({"name": "autoregressive", "layers": 32}, {}, {}),
    (SKIPPING, {}, {}),
    ({"name": "beam", "layers": 32, "beams": 2, "draft_length": 2}, RATIO, {}),
    (BEAMS | {"arrangement": "sequential"}, RATIO | {"dispatch": 1.0}, {}),
]  # fmt: skip


def scenario(method: dict[str, Any], cost: dict[str, Any], outcomes: dict[str, Any] | None = None) -> dict[str, Any]:
    accept = (
        {}
        if method["name"] in ("autoregressive", "skipdecode")
        else {"outcomes": outcomes or {"kind": "iid", "acceptance_rate": 0.7}}
    )
    settings = {"name": "parts", "tokens": 24, "replications": 512, "event_replications": 8}
    views = {"views": ["formula", "paths", "events"]}
    return {"scenario": settings | views, "method": [method], "cost": cost} | accept


def rows(method: dict[str, Any], cost: dict[str, Any], **more: Any) -> dict[str, dict[str, Any]]:
    table = sim.run(scenario(method, cost, more.get("outcomes")))
    return {row["view"]: row for row in table.iter_rows(named=True)}


def law(folder: Any) -> str:
    number, drafted = np.array([1.0, 8, 64, 1, 8, 64]), np.array([0.0, 0, 0, 3, 3, 3])
    seconds = 0.01 + 5e-5 * number * (drafted + 1) + 4e-4 * drafted
    cells = Cells.of("step_ms", number, drafted, 1e3 * seconds)
    return str(step_law.write(law_fit.fit(cells, "mine"), folder / "mine.json"))


@pytest.mark.parametrize(("method", "cost", "outcomes"), IN_LAYERS, ids=[str(index) for index in range(len(IN_LAYERS))])
def test_parts_add_up_in_every_view(method: dict[str, Any], cost: dict[str, Any], outcomes: dict[str, Any]) -> None:
    found = rows(method, cost, outcomes=outcomes)
    for view, row in found.items():
        assert sum(row[name] for name in LAYERS) == pytest.approx(row["tpot_layers"], rel=1e-12), view
    # The views differ by sampling alone: five deviations of the time bound those of its parts, which are at most as variable
    # where draft and target passes rise together; events and paths agree on each decoding.
    assert found["events"]["paths_difference"] == pytest.approx(0, abs=1e-9)
    paths, formula = found["paths"], found["formula"]
    for name in LAYERS:
        most = 5 * paths["latency_sd_layers"] / 24 / 512**0.5 + 0.05 * paths["time_waiting_layers"]
        assert paths[name] == pytest.approx(formula[name], abs=most + 1e-9), name


@pytest.mark.parametrize("method", [SPECULATIVE, SPECULATIVE | {"sequences": 8}, STATIC, {"name": "autoregressive"}])
def test_parts_add_up_in_seconds(method: dict[str, Any]) -> None:
    cost = ROOFLINE if method["name"] == "speculative" else {k: v for k, v in ROOFLINE.items() if not k.startswith("draft")}
    method = {name: value for name, value in method.items() if name != "layers"}
    found = rows(method, cost)
    for view, row in found.items():
        assert 1e3 * sum(row[name] for name in SECONDS) == pytest.approx(row["tpot_ms"], rel=1e-12), view
        assert row["time_overhead_s"] > 0
        assert row["time_draft_layers"] is None
    assert found["events"]["paths_difference"] < 1e-12


def test_overheads_are_those_of_the_passes() -> None:
    # K = 3, all accepted: 6 rounds of 4 tokens in 24 tokens, each with 3 draft passes and a verification, but none cut short.
    found = rows({"name": "speculative", "draft_length": 3}, ROOFLINE, outcomes={"kind": "iid", "acceptance_rate": 1.0})
    for view, row in found.items():
        assert row["time_overhead_s"] * 24 == pytest.approx(6 * (2e-3 + 3 * 5e-4), rel=1e-9), view


def test_costs_move_only_their_own_part() -> None:
    base, dear = (rows(SPECULATIVE | {"placement": "separate"}, {"cost_ratio": ratio, "link": 2.0}) for ratio in (0.1, 0.2))
    more = rows(SPECULATIVE | {"placement": "separate"}, RATIO | {"link": 4.0})
    for view in ("formula", "paths", "events"):
        assert dear[view]["time_draft_layers"] == pytest.approx(2 * base[view]["time_draft_layers"], rel=1e-12)
        assert more[view]["time_overhead_layers"] == pytest.approx(2 * base[view]["time_overhead_layers"], rel=1e-12)
        for name in ("time_verify_layers", "time_waiting_layers"):
            assert dear[view][name] == more[view][name] == base[view][name]
        assert more[view]["time_draft_layers"] == pytest.approx(base[view]["time_draft_layers"], rel=1e-12)


def test_a_step_law_has_its_overheads_apart(tmp_path: Any) -> None:
    where = law(tmp_path)
    found = rows({"name": "speculative", "draft_length": 3}, {"kind": "engine", "law": where, "shape": "llama-3.1-8b"})
    of = step_law.load(where).coefficients
    per_round = of["step"] + of["sequence"] + of["round"]
    for view, row in found.items():
        rounds = 24 / row["tokens_per_round"]
        # The last round may draft nothing, and then verifies nothing: at most one `round` less.
        assert 0 <= rounds * per_round - row["time_overhead_s"] * 24 <= of["round"] * (1 + 1e-9) + 1e-12, view
        assert row["time_draft_s"] * 24 <= rounds * 3 * of["draft_pass"] * (1 + 1e-9)
        assert 1e3 * sum(row[name] for name in SECONDS) == pytest.approx(row["tpot_ms"], rel=1e-12), view


def test_waiting_is_the_straggler_loss() -> None:
    for row in rows(STATIC, RATIO).values():
        assert row["time_waiting_layers"] == pytest.approx(row["straggler_loss"] * row["tpot_layers"], rel=1e-12)
        assert row["time_waiting_layers"] > 0
    for row in rows(SPECULATIVE | {"sequences": 4}, RATIO).values():
        assert row["time_waiting_layers"] == 0


@pytest.mark.parametrize(
    ("method", "cost", "outcomes", "why"),
    [
        ({"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}, {}, {"kind": "iid", "match_rate": 0.6}, "same time"),
        ({"name": "pearl", "layers": 32, "draft_length": 3}, RATIO, {"kind": "iid", "acceptance_rate": 0.6}, "same time"),
        (BEAMS | {"arrangement": "parallel"}, RATIO, {}, "same time"),
        (SKIPPING | {"sequences": 2, "batching": "static"}, {}, None, "static batches"),
    ],
)  # fmt: skip
def test_parts_that_are_not_defined_are_null_with_a_reason(
    method: dict[str, Any], cost: dict[str, Any], outcomes: dict[str, Any] | None, why: str
) -> None:
    for row in sim.run(scenario(method, cost, outcomes)).iter_rows(named=True):
        assert why in row["no_time_parts_because"]
        assert [row[name] for name in LAYERS] == [None] * 4


def test_a_wrong_part_in_one_view_is_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fault: the simulator counts half of the draft passes' time as the target's.
    original = events.simulate

    def wrong(*args: Any, **options: Any) -> Any:
        run = original(*args, **options)
        return dataclasses.replace(run, draft_time=run.draft_time / 2, target_time=run.target_time + run.draft_time / 2)

    monkeypatch.setattr(events, "simulate", wrong)
    row = evaluation.events_row(Grid(scenario(SPECULATIVE, RATIO)).case(0), 0, 4)
    assert row["paths_relative"] > 0.01
    with pytest.warns(UserWarning, match=r"draft_time|target_time"):
        sim.run(scenario(SPECULATIVE, RATIO) | {"outcomes": {"kind": "iid", "acceptance_rate": 0.7}})


def test_large_blocks_have_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = {"method.draft_length": [0, 2, 5], "outcomes.acceptance_rate": [0.3, 0.8]}
    few = sim.run(scenario(SPECULATIVE, RATIO), sweep=sweep, views=["formula"])
    monkeypatch.setattr(formula_view, "MANY_POINTS", 1)
    assert_frame_equal(sim.run(scenario(SPECULATIVE, RATIO), sweep=sweep, views=["formula"]), few, check_exact=True)


def test_parts_of_a_sweep_do_not_depend_on_other_points() -> None:
    sweep = {"method.draft_length": [0, 2, 5]}
    together = sim.run(scenario(SPECULATIVE, RATIO), sweep=sweep, views=["formula"])
    for length in sweep["method.draft_length"]:
        alone = sim.run(scenario(SPECULATIVE | {"draft_length": length}, RATIO), views=["formula"])
        both = together.filter(pl.col("draft_length") == length)
        assert both.select(LAYERS).row(0) == pytest.approx(alone.select(LAYERS).row(0), rel=1e-12)
