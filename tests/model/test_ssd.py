"""SSD: worked decodings, its speed-up for many tokens, fan-outs, bounds, and proposals for advice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.steady_prices import SteadyPrices
from model.interpret.simulated_answers import RankedPositions
from model.methods.proposals import Known
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Parameters as Speculative
from model.methods.ssd import fan_out
from model.methods.ssd import theory as ssd
from model.methods.ssd.algorithm import BACKUPS, DRAFT, NONE, Parameters, decode
from model.methods.tree import theory as tree
from model.methods.tree.algorithm import Parameters as TreeParameters
from model.outcomes.outcome_laws import Iid
from model.outcomes.position_ranks import PositionRankRates, RecordedPositionRanks
from model.outcomes.rank_laws import RankRates
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate

RATES = st.integers(0, 19).map(lambda twentieths: twentieths / 20)
RATIOS = st.integers(0, 12).map(lambda eighths: eighths / 8)


def simulated(parameters: Parameters, ranks: list[int], cost: UnitCost) -> Run:
    world = RankedPositions(1, parameters.layers, ranks)
    return simulate(decode(parameters, [0], len(ranks)), len(ranks), Cluster(parameters.units), cost, world, record=True)


def test_worked_decoding() -> None:
    """Nine tokens, K = 2, fan-out 1; a pass takes 8, a draft pass 1, the link 1. The first round hits, the second misses.

    Link, two tokens, link: they arrive at 4. The target verifies until 12 and accepts both; its own token has rank 1, for which a
    draft is there: the preparation took a link, three draft passes and a link, until 9. The second round ends at 20 with a
    rejection of rank 3, for which none is prepared. The draft model drafts two tokens just in time, until 24. Both are accepted by
    32, and the token after them is prepared, with the one token for which there is room. It is accepted by 40, with nothing to
    prepare during this pass.
    """
    parameters, cost = Parameters(8, 2, 1, draft_layers=1), UnitCost(8, cost_ratio=0.125, link=1.0, draft_devices=0.5)
    run = simulated(parameters, [1, 1, 1, 3, 1, 1, 1, 1, 0], cost)
    assert run.tokens == [*range(1, 10)]
    assert [(time, count) for time, _, count in run.commits] == [(12, 3), (20, 1), (32, 3), (40, 2)]
    made = [(row.start, row.width) for row in run.intervals if row.unit == 1]
    assert made == [(1, 1), (2, 1), (5, 3), (6, 3), (7, 3), (13, 3), (14, 3), (15, 3), (21, 1), (22, 1), (25, 3), (26, 3), (27, 2)]
    assert run.busy == 4 * 8 + 0.5 * len(made)


def test_every_outcome_prepared_and_none() -> None:
    """The two limits: hits only take a pass per round; without hits and with short preparations rounds are those in turn."""
    length, c, link = 4, 0.125, 0.0625
    assert float(ssd.round_time(1.0, length, c, link)) == 1.0
    assert float(ssd.round_time(0.0, length, c, link)) == 1 + length * c + 2 * link
    everything = PositionRankRates([0.6, 0.4])
    assert fan_out.hit_probability(everything, (1,) * 4 + (2,)) == pytest.approx(1.0)
    want = float(ssd.expected_tokens(0.6, length))
    assert ssd.speedup(Parameters(1, length, (1,) * 4 + (2,)), everything, c, link) == pytest.approx(want)


def test_the_probability_of_all_outcomes_is_not_above_one_by_rounding() -> None:
    """Rates of which a sum of all outcomes is 1 + 2e-16, so that a speed-up was refused."""
    law, fans = PositionRankRates([0.4, 0.4, 0.2, 0.0]), (2, 2, 2, 3)
    assert fan_out.hit_probability(law, fans) == 1.0
    tokens = float(ssd.expected_tokens(0.4, 3))
    assert ssd.speedup(Parameters(1, 3, fans), law, 0.0) == pytest.approx(tokens)


@given(rate=RATES, exponent=st.floats(0.1, 3), length=st.integers(1, 5), ratio=RATIOS, count=st.integers(1, 4),
       link=st.sampled_from([0.0, 0.25]), backup=st.sampled_from(BACKUPS))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_long_decodings_come_to_the_speedup(
    rate: float, exponent: float, length: int, ratio: float, count: int, link: float, backup: str
) -> None:
    """S = E / (max(1, (K + 1) c + 2 L) + (1 - p) (K c + 2 L)), as the slope of the prediction for a number of tokens."""
    law, parameters = PositionRankRates.power_law(rate, exponent, count + 1), Parameters(8, length, count, backup)
    cost = UnitCost(8, cost_ratio=ratio, link=8 * link)
    first, last = (float(ssd.predict(parameters, tokens, law, cost).latency) for tokens in (150, 300))
    found = ssd.speedup(parameters, law, ratio, link)
    assert 8 * 150 / (last - first) == pytest.approx(found, rel=1e-6)
    if backup == DRAFT:
        hit = fan_out.hit_probability(law, parameters.fan_outs)
        time = max(1.0, (length + 1) * ratio + 2 * link) + (1 - hit) * (length * ratio + 2 * link)
        assert found == pytest.approx(float(speculative.expected_tokens(rate, length)) / time)


@given(rate=RATES, count=st.integers(1, 4), length=st.integers(1, 5), ratio=RATIOS)
@settings(max_examples=40, deadline=None)
def test_the_gain_over_drafting_in_turn_is_below_two(rate: float, count: int, length: int, ratio: float) -> None:
    law = PositionRankRates.power_law(rate, 0.7, count + 1)
    turn = float(speculative.speedup(rate, length, ratio))
    gain = ssd.speedup(Parameters(1, length, count), law, ratio) / turn
    assert gain <= ssd.largest_gain(length) * (1 + 1e-12) < 2


@pytest.mark.parametrize("length", [1, 3])
def test_equal_ranks_at_every_depth_make_the_rounds_of_a_tree_with_one_candidate(length: int) -> None:
    """Ranks by output position, and ranks by depth of a draft that starts there, have the same law of rounds."""
    rates, cost = [0.6, 0.2], UnitCost(8, cost_ratio=0.1)
    chain = TreeParameters(8, "chain", length)
    by_depth = tree.predict(chain, 30, RankRates([[rates] * length]), cost)
    found = ssd.predict(Parameters(8, length, 1), 30, PositionRankRates(rates), cost)
    assert by_depth.rounds is not None
    assert found.rounds is not None
    assert float(found.rounds) == pytest.approx(float(by_depth.rounds))


# --- In the long run -------------------------------------------------------------------------------------------------


def prices_of(*ratios: float, wide: float = 1.0) -> SteadyPrices:
    draft = 8 * np.array([ratios])
    return SteadyPrices(lambda width: np.full(draft.shape, 8.0 * (1 if width == 1 else wide)), draft, waiting=0.5)


@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize("ratio", [0.05, 0.13, 0.31, 1.2])
def test_time_per_token_in_the_long_run(ratio: float, backup: str) -> None:
    parameters = Parameters(8, 3, (2, 1, 3, 2), backup)
    laws = [PositionRankRates.power_law(rate, 0.6, 4) for rate in (0.0, 0.4, 0.9, 1.0)]
    found = ssd.steady_state(parameters, laws, prices_of(0.3, ratio))
    assert found.shape == (4, 2)
    for row, law in zip(found, laws, strict=True):
        assert row[1] - 0.5 == pytest.approx(8 / ssd.speedup(parameters, law, ratio))


def test_passes_over_more_tokens_take_longer_only_where_there_are_drafts() -> None:
    """Nothing is ever prepared that occurs: without drafts just in time every pass is over one token, else over K + 1."""
    law, prices = PositionRankRates([0.0, 0.0, 0.0, 1.0]), prices_of(0.05, wide=1.5)
    none, draft = (ssd.steady_state(Parameters(8, 3, 2, backup), [law], prices)[0, 0] for backup in (NONE, DRAFT))
    assert (none, draft) == pytest.approx((8 + 0.5, 12 + 3 * 0.4 + 0.5))


def test_branches_and_running_sequences_have_prices() -> None:
    """Passes over all branches take longer, and a round drafts just in time if any of its sequences missed."""
    law, parameters = PositionRankRates([0.5, 0.25, 0.1]), Parameters(8, 2, (2, 1, 2))
    hit = fan_out.hit_probability(law, parameters.fan_outs)
    draft, sequences = np.full((1, 2), 2.0), np.array([1.0, 3.0])
    target = np.full((1, 2), 8.0)
    prices = SteadyPrices(lambda width: target, draft, branches=lambda count: draft * (1 + count), sequences=sequences)
    found = ssd.steady_state(parameters, [law], prices)[0]
    tokens, preparation = 1 + 0.5 + 0.25, 2 + 2 * 2 * (1 + 5)
    assert found == pytest.approx((preparation + (1 - hit**sequences) * 2 * 2) / tokens)
    none = ssd.steady_state(Parameters(8, 2, (2, 1, 2), NONE), [law], prices)[0]
    assert none[0] == none[1]  # sequences that missed wait for no others
    assert ssd.steady_state(parameters, [law], prices.at([1]))[0] == pytest.approx(found[1:])


def test_records_have_no_time_in_the_long_run() -> None:
    with pytest.raises(ParameterError, match="predict a number of tokens instead"):
        ssd.steady_state(Parameters(8, 3, 1), [RecordedPositionRanks([[1, 2]])], prices_of(0.1))


# --- Advice ----------------------------------------------------------------------------------------------------------


def test_proposals_name_what_is_missing() -> None:
    known = Known(8, 2, (1, 3), (0.7, 0.6))
    assert "further device" in Parameters.proposals(Known(8, 1, (1, 3), (0.7,))).missing
    assert "a draft model" in Parameters.proposals(Known(8, 2, (1, 3), (0.7,), independent_draft=False)).missing
    made = Parameters.proposals(known).made
    assert [(each.parameters["draft_length"], each.parameters["backup"]) for each in made] == [
        (length, backup) for length in (1, 3) for backup in BACKUPS
    ]  # fmt: skip
    assert {each.parameters["fan_out"] for each in made} == {1}
    assert all("count as misses" in each.assumed for each in made)


def test_proposals_with_known_ranks_have_larger_fan_outs() -> None:
    """Only fan-outs whose ranks are known; their number and order do not depend on the rates."""
    many = [Parameters.proposals(Known(8, 2, (3,), (rate,), rank_rates=((rate, 0.1, 0.05),))).made for rate in (0.2, 0.7)]
    assert [[each.parameters["fan_out"] for each in made] for made in many] == [[1, 1, 2, 2]] * 2
    for each in many[1]:
        parameters = Parameters(**each.parameters)
        assert len(each.outcomes["rank_rates"]) >= parameters.largest_rank


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "message"), [
    ({"fan_out": 0}, "fan_out must be"), ({"fan_out": (1, 1)}, "fan_out must have draft_length . 1 = 3 numbers"),
    ({"fan_out": (1, 0, 1)}, r"fan_out\[1\] must be"), ({"fan_out": 1000}, "fan_out must be"),
    ({"fan_out": 1.5}, "fan_out must be"),
    ({"fan_out": 1, "backup": "wait"}, "unknown backup 'wait'"), ({"fan_out": 1, "placement": "colocated"}, "placement must be"),
    ({"fan_out": 1, "draft_length": 0}, "draft_length must be"),
])  # fmt: skip
def test_bad_parameters_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Parameters(**{"layers": 8, "draft_length": 2, **values})  # type: ignore[arg-type]


def test_acceptances_are_no_ranks() -> None:
    with pytest.raises(ParameterError, match="law of ranks by output position"):
        ssd.predict(Parameters(8, 2, 1), 10, Iid(0.5), UnitCost(8, cost_ratio=0.1))


def test_ssd_with_full_hits_is_speculative_decoding_with_free_drafts() -> None:
    """With every outcome prepared within a pass only the first draft takes time."""
    law, cost = PositionRankRates([0.6, 0.4]), UnitCost(8, cost_ratio=0.125)
    found = ssd.predict(Parameters(8, 2, (1, 1, 2)), 40, law, cost)
    free = speculative.predict(Speculative(8, 2), 40, Iid(0.6), UnitCost(8, cost_ratio=0.0))
    assert float(found.latency) == pytest.approx(float(free.latency) + 2)
    assert float(found.latency_variance) == pytest.approx(float(free.latency_variance))
