"""Scenarios of draft heads and parallel drafts: bundled ones, laws of levels and curves, and what is refused."""

from typing import Any

import pytest

import sim
from model.base.checks import ParameterError

LEVELS = {"kind": "levels", "acceptance_rates": [[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]], "weights": [1, 3]}
CURVE = {"kind": "curve", "mean_acceptance_lengths": [1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58]}


def scenario(outcomes: dict[str, Any], cost: dict[str, Any] | None = None, **method: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "heads", "tokens": 40, "replications": 2048, "event_replications": 8},
        "method": [{"name": "speculative", "layers": 32, "draft_length": 3, "drafter": "heads"} | method],
        "outcomes": outcomes, "cost": cost or {"cost_ratio": 0.1},
    }  # fmt: skip


@pytest.mark.parametrize("drafter", ["heads", "parallel"])
def test_views_agree_on_levels(drafter: str) -> None:
    rows = sim.run(scenario(LEVELS, drafter=drafter)).rows(named=True)
    formula, paths, _ = sorted(rows, key=lambda row: ("formula", "paths", "events").index(row["view"]))
    assert formula["acceptance_rate"] == pytest.approx(0.6)
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], rel=0.03)
    assert paths["latency_sd_layers"] == pytest.approx(formula["latency_sd_layers"], rel=0.05)


def test_curve_says_its_residual() -> None:
    """DeepSeek-V4's curve falls between 6 and 7 drafted tokens, which no acceptance by draft position can follow."""
    [row] = sim.run(scenario(CURVE, draft_length=8), views=["formula"]).rows(named=True)
    assert row["curve_residual"] == pytest.approx(0.0059, abs=1e-4)
    assert "fitted to 8 mean acceptance lengths with residuals of at most 0.59%" in row["outcomes_note"]
    long = sim.run({**scenario(CURVE), "scenario": {"name": "long", "tokens": 4000, "views": ["formula"]}})
    assert long["tokens_per_round"][0] == pytest.approx(2.49, rel=0.0065)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (LEVELS | {"weights": [1]}, "one share for each of 2 levels"),
        (LEVELS | {"weights": [0, 0]}, "not all 0"),
        (LEVELS | {"acceptance_rates": [[0.9] * 3]}, "at least two levels"),
        (LEVELS | {"acceptance_rates": [[0.9] * 3, [1.5] * 3]}, r"acceptance_rates\[1\]\[0\] must be between 0 and 1"),
        (LEVELS | {"acceptance_rates": [[0.9], [0.5]]}, "draft_length must be at most 1, the positions whose acceptance is given"),
        (CURVE | {"mean_acceptance_lengths": [2.5]}, r"at most draft_length \+ 1 = 2"),
        (CURVE | {"mean_acceptance_lengths": []}, "a list of at least one number"),
        (CURVE | {"mean_acceptance_lengths": [1.5, 1.6]}, "draft_length must be at most 2"),
        (CURVE | {"draft_lengths": [1, 2]}, "lists of the same length"),
    ],
)
def test_impossible_acceptance_is_refused(outcomes: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        sim.run(scenario(outcomes))


def roofline(draft: str) -> dict[str, Any]:
    return {"kind": "roofline", "device": "h100", "shape": "llama-3.1-8b", "draft_shape": draft}


def test_heads_must_draft_as_they_can() -> None:
    for drafter, draft, said in (
        ("model", "p-eagle:llama-3.1-8b", "makes a pass for each; .* drafter = 'parallel'"),
        ("heads", "p-eagle:llama-3.1-8b", "makes a pass for each"),
        ("parallel", "eagle3:llama-3.1-8b", "drafts one token in a pass, .* drafter = 'heads'"),
        ("heads", "medusa:llama-3.1-8b", "drafts all its tokens in one pass, .* drafter = 'parallel'"),
        ("heads", "eagle3:llama-2-13b", "must be a head of llama-3.1-8b"),
    ):
        with pytest.raises(ParameterError, match=said):
            sim.run(scenario(LEVELS, roofline(draft), drafter=drafter))


@pytest.mark.parametrize(
    ("drafter", "draft", "depth"),
    [
        ("heads", "eagle3:llama-3.1-8b", 1), ("heads", "mtp:llama-3.1-8b", 1), ("parallel", "p-eagle:llama-3.1-8b", 4),
        ("parallel", "medusa:llama-3.1-8b", 1),
    ],
)
def test_prices_of_heads_agree_in_all_views(drafter: str, draft: str, depth: int) -> None:
    rows = sim.run(scenario(LEVELS, roofline(draft), drafter=drafter, draft_layers=depth)).rows(named=True)
    formula, paths, _ = sorted(rows, key=lambda row: ("formula", "paths", "events").index(row["view"]))
    assert paths["speedup"] == pytest.approx(formula["speedup"], rel=0.03)


def test_best_draft_lengths_of_published_acceptance() -> None:
    """P-EAGLE's best draft length is 7 where EAGLE-3's is 3, as published, at the assumed overheads of a step."""
    table = sim.run("speculative-parallel", views=["formula"])
    for drafter, best in (("heads", 3), ("parallel", 7)):
        own = table.filter(drafter=drafter, sequences=1).sort("speedup")
        assert own["draft_length"][-1] == best


def test_medusa_heads_are_one_pass_of_all_of_them() -> None:
    """One draft takes as long as five, but for the work of further positions: a pass reads all heads, and there are no more."""

    def seconds(length: int) -> float:
        rejected = {"kind": "iid", "acceptance_rate": 0.0}
        whole = scenario(rejected, roofline("medusa:llama-3.1-8b"), drafter="parallel", draft_length=length)
        return float(sim.run(whole, views=["formula"])["latency_s"][0])

    assert 1 < seconds(5) / seconds(1) < 1.02
    with pytest.raises(ParameterError, match=r"draft_length must be at most 5 with .*medusa:llama-3\.1-8b, a head for each"):
        seconds(6)
