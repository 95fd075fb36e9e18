"""Scenarios with block verification: the published example, measured acceptance by draft position, and refused outcomes."""

from typing import Any

import pytest

import sim
from model.base.checks import ParameterError
from sim.scenarios import outcomes_section

EXAMPLE = {"kind": "distributions", "p": [1 / 3, 2 / 3], "q": [2 / 3, 1 / 3], "source": "published"}


def scenario(outcomes: dict[str, Any], *, tokens: int = 64, **method: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "blocks", "tokens": tokens, "replications": 4096, "event_replications": 4},
        "method": [{"name": "speculative", "layers": 8, "draft_length": 2, "sampled": True, **method}],
        "outcomes": outcomes, "cost": {"cost_ratio": 0.1},
    }  # fmt: skip


@pytest.mark.parametrize(("verification", "accepted"), [("token", 10 / 9), ("block", 11 / 9)])
def test_published_example_in_long_decodings(verification: str, accepted: float) -> None:
    """Rounds of many tokens are whole, so a round gives 1 + 10/9 or 1 + 11/9 tokens."""
    run = sim.run(scenario(EXAMPLE, tokens=4000, verification=verification), views=["formula"])
    assert run["tokens_per_round"][0] == pytest.approx(1 + accepted, rel=1e-3)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("drafter", ["model", "heads", "parallel"])
def test_views_agree(verification: str, drafter: str) -> None:
    run = sim.run(scenario(EXAMPLE, verification=verification, drafter=drafter))
    rows = {row["view"]: row for row in run.rows(named=True)}
    assert rows["paths"]["latency_layers"] == pytest.approx(rows["formula"]["latency_layers"], rel=0.02)
    assert rows["paths"]["latency_sd_layers"] == pytest.approx(rows["formula"]["latency_sd_layers"], rel=0.06)


@pytest.mark.parametrize("batching", ["continuous", "static", "lockstep"])
def test_batches_agree_with_their_formula(batching: str) -> None:
    run = sim.run(scenario(EXAMPLE, verification="block", sequences=3, batching=batching))
    rows = {row["view"]: row for row in run.rows(named=True)}
    assert rows["paths"]["latency_layers"] == pytest.approx(rows["formula"]["latency_layers"], rel=0.02)


def test_token_wise_law_of_distributions_is_independent() -> None:
    """sum min(p, q) = 2/3 for each token: the same as the kind of one rate."""
    by_rate = sim.run(scenario({"kind": "iid", "acceptance_rate": 2 / 3}), views=["formula"])
    by_laws = sim.run(scenario(EXAMPLE), views=["formula"])
    for column in ("latency_layers", "latency_sd_layers", "tokens_per_round", "acceptance_rate"):
        assert by_laws[column][0] == pytest.approx(by_rate[column][0], rel=1e-12)


@pytest.mark.parametrize(
    "outcomes",
    [
        {"kind": "iid", "acceptance_rate": 0.7}, {"kind": "markov", "acceptance_rate": 0.7, "correlation": 0.1},
        {"kind": "reported", "engine": "vllm", "draft_length": 2, "rate": 0.5},
    ],
)  # fmt: skip
def test_rates_of_single_tokens_are_refused(outcomes: dict[str, Any]) -> None:
    assert sim.run(scenario(outcomes), views=["formula"]).height == 1
    with pytest.raises(ParameterError) as error:
        sim.run(scenario(outcomes, verification="block"), views=["formula"])
    assert "the rate at which tokens are accepted one by one does not determine how many are accepted jointly" in str(error.value)


def test_greedy_drafts_are_accepted_if_the_likeliest_tokens_agree() -> None:
    for q, tokens in ((EXAMPLE["q"], 1.0), ([0.4, 0.6], 3.0)):
        run = sim.run(scenario({**EXAMPLE, "q": q}, tokens=3, sampled=False), views=["formula"])
        assert run["tokens_per_round"][0] == pytest.approx(tokens)


def test_distributions_of_other_lengths_are_refused() -> None:
    with pytest.raises(ParameterError, match="p and q must have one shape"):
        sim.run(scenario({**EXAMPLE, "q": [1.0]}), views=["formula"])


def test_pearl_does_not_take_distributions() -> None:
    from model.methods.pearl.algorithm import Parameters

    assert "distributions" not in outcomes_section.kinds(Parameters, "accept")


def test_bundled_scenario_has_the_published_example_and_a_real_pair() -> None:
    run = sim.run("speculative-blocks", views=["formula"])
    rows = {(row["draft_length"], row["verification"]): row for row in run.rows(named=True)}
    for draft_length, gain in ((2, 20 / 19), (4, 1.0555)):  # 1 + 11/9 over 1 + 10/9; the pair's gain in whole drafts, measured
        token, block = (rows[draft_length, each]["tokens_per_round"] for each in ("token", "block"))
        assert block / token == pytest.approx(gain, rel=0.005)  # the last drafts are cut
