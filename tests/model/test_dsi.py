"""DSI: worked decodings, closed forms against a queue and against many tokens, and where formula and paths decline."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.interpreter import CountedWork, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.dsi import finite_dsi, paths
from model.methods.dsi import theory as dsi
from model.methods.dsi.algorithm import MAX_OUTPUT, Parameters, decode
from model.methods.dsi.finite_dsi import speculation_tables
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.proposals import Known
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, RecordedProbabilities, Replay
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import LINKS, STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.scenarios.cases import contention
from tests.support.position_costs import growing

RATES = st.integers(0, 19).map(lambda twentieths: twentieths / 20)


def world(accept: list[bool]) -> World:
    survivors = [next((place for place, kept in enumerate(accept[at:]) if not kept), 0) for at in range(len(accept))]
    return World(1, 4, drafts={"draft": DraftOutcomes("target", survivors)})


def simulated(parameters: Parameters, accept: list[bool], cost: UnitCost, cluster: Cluster | None = None) -> Run:
    on = Cluster(parameters.units) if cluster is None else cluster
    return simulate(decode(parameters, [0], len(accept)), len(accept), on, cost, world(accept), record=True)


def counted(parameters: Parameters, accept: list[bool]) -> CountedWork:
    return count(decode(parameters, [0], len(accept)), world(accept), len(accept))


def test_worked_decoding() -> None:
    """Seven tokens, lookahead 2, two replicas, the fourth drafted token rejected; a pass takes 4, a draft pass 1, the link 1.

    Pass 0 is sent at 0 and back at 6; pass 1, over the tokens drafted by 2, is sent at 2 and back at 8. Both replicas are busy
    until then: pass 2, over the tokens drafted by 4, is sent at 6. The fourth token is rejected by pass 2, at 12. Pass 3 was sent
    at 8, when pass 1 was back and six tokens were drafted. The order to stop arrives at 13, when it has just ended.
    """
    parameters, cost = Parameters(4, 2, 2, draft_layers=2), UnitCost(4, cost_ratio=0.25, link=1.0, draft_devices=0.5)
    run = simulated(parameters, [True, True, True, False, True, True, False], cost)
    assert run.tokens == [*range(1, 8)]
    assert [time for time, *_ in run.commits[:3]] == [6, 8, 12]
    target = [row for row in run.intervals if row.unit > 0]
    made = [(row.unit, row.start, row.end, row.width) for row in target[:4]]
    assert made == [(1, 1, 5, 1), (2, 3, 7, 3), (1, 7, 11, 4), (2, 9, 13, 4)]
    # From there two tokens are drafted by 14; pass 0 of the new speculation is back at 18, pass 1 is sent at 14 and back at 20.
    assert run.latency == 20
    assert run.busy == 6 * 4 + 0.5 * (6 + 2)
    # The replica that found the rejection is the first one's: it verifies first.
    assert [row.unit for row in target[4:]] == [1, 2]
    found = dsi.predict(parameters, 7, ByPosition([1, 1, 1, 0, 1, 1, 0]), cost)
    assert (float(found.latency), float(found.busy)) == (run.latency, run.busy)


def test_replica_that_found_the_rejection_verifies_first() -> None:
    """It has read all tokens but the corrected one."""
    run = simulated(Parameters(4, 2, 3), [True, False, True, True, True, False], UnitCost(4, cost_ratio=0.25))
    target = [row for row in run.intervals if row.unit > 0]
    assert [(row.unit, row.width) for row in target if row.start == run.commits[1][0]] == [(2, 1)]


def test_results_are_decided_in_order() -> None:
    """Drafts are free; passes over ten tokens take five times those over six: the last pass returns before the one before it.

    Passes 0 and 1, over 1 and 6 tokens, take 4; pass 2, over 10, from 4 to 24; pass 3, over the tokens left and those that pass 2
    reads, from 4 to 8.
    """
    cost, parameters = UnitCost(4, cost_ratio=0.0, verify_cost=((1, 1.0), (6, 1.0), (10, 5.0))), Parameters(4, 5, 2)
    run = simulated(parameters, [True] * 11 + [False], cost)
    assert [time for time, *_ in run.commits] == [4, 4, 24, 24]
    assert float(dsi.predict(parameters, 12, Iid(1.0), cost).latency) == 24


def test_lookahead_one_commits_every_token_as_its_pass_returns() -> None:
    """Without links and waiting: an accepted token takes a draft pass, a rejected one and the last a pass of the target."""
    run = simulated(Parameters(4, 1, 5), [True, False, True, True, False], UnitCost(4, cost_ratio=0.25))
    assert [time for time, *_ in run.commits] == [4, 5, 9, 10, 11]
    assert [count for *_, count in run.commits] == [1] * 5


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_every_decoding_generates_its_tokens_in_any_interpreter(tokens: int, lookahead: int, verifiers: int, bits: int) -> None:
    accept, parameters = [bool(bits >> bit & 1) for bit in range(tokens)], Parameters(4, lookahead, verifiers, draft_layers=2)
    work = counted(parameters, accept)
    assert work.tokens == [*range(1, tokens + 1)]
    # A speculation starts with a pass over one token; its rounds are the processed passes.
    assert work.rounds.total() >= 1 + sum(not kept for kept in accept[:-1])
    assert sum(kept * times for (kept, _), times in work.rounds.items()) == tokens - work.rounds.total()


def test_tables_of_speculations_cover_every_length_once() -> None:
    """A speculation of each length is ended by one pass: the first that reads all its tokens but the last."""
    for lookahead, tokens in itertools.product((1, 2, 3, 7), (1, 2, 5, 9)):
        tables = speculation_tables(lookahead, 2, tokens, UnitCost(1, cost_ratio=0.5))
        number, _ = tables.ended_by(0, np.arange(1, tokens + 1))
        assert number.tolist() == [math.ceil((length - 1) / lookahead) for length in range(1, tokens + 1)]
        assert tables.time.shape[1] == number[-1] + 1


@given(RATES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_speed_up_is_that_of_many_tokens(alpha: float, lookahead: int, verifiers: int, eighths: int, quarters: int) -> None:
    """Later tokens of a long decoding take the time per token of the limit."""
    cost, parameters = UnitCost(1, cost_ratio=eighths / 8, link=quarters / 4), Parameters(1, lookahead, verifiers)
    short, long = (float(dsi.predict(parameters, tokens, Iid(alpha), cost).latency) for tokens in (400, 600))
    limit = 200 / float(dsi.speedup(alpha, lookahead, verifiers, eighths / 8, quarters / 4))
    assert long - short == pytest.approx(limit, rel=1e-6)


@given(RATES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.floats(1, 4))
def test_break_even_link_gives_the_wanted_speed_up(
    alpha: float, lookahead: int, verifiers: int, eighths: int, against: float
) -> None:
    ratio = eighths / 8
    link = float(dsi.break_even_link(alpha, lookahead, verifiers, ratio, against))
    free = float(dsi.speedup(alpha, lookahead, verifiers, ratio))
    assert math.isnan(link) == (free < against * (1 - 1e-12)) or abs(free - against) < 1e-9
    if not math.isnan(link):
        assert float(dsi.speedup(alpha, lookahead, verifiers, ratio, link)) == pytest.approx(against, rel=1e-9)


def test_certain_acceptance_is_the_limit_of_rates() -> None:
    for lookahead, verifiers, ratio, link in ((1, 3, 0.1, 0.0), (5, 1, 0.1, 0.2), (2, 9, 0.3, 0.0)):
        near, at = (float(dsi.speedup(rate, lookahead, verifiers, ratio, link)) for rate in (1 - 1e-9, 1))
        assert near == pytest.approx(at, rel=1e-6)


def test_slow_drafts_are_left_to_the_prediction() -> None:
    with pytest.raises(ParameterError, match=r"^cost_ratio must be at most 1 \+ 2 link=1, got 1.5: decisions would wait"):
        dsi.speedup(0.5, 1, 2, 1.5)
    # Every decision waits for the drafted token: one token per draft pass, and the target's own at the end.
    found = dsi.predict(Parameters(4, 1, 2), 5, Iid(1.0), UnitCost(4, cost_ratio=1.5))
    assert float(found.latency) == 4 * 6 + 4


@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from((0.0, 0.25, 0.3, 0.5, 1.0, 1.5)), st.sampled_from((0.0, 0.25, 1.0, 5.0)),
    st.sampled_from(LINKS), st.sampled_from(STOPS), st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_formula_declines_where_the_cluster_causes_waiting(
    lookahead: int, verifiers: int, ratio: float, link: float, links: str, end: str, units: int
) -> None:
    """All paths of five tokens; nothing waits for a unit on as many as are reserved."""
    cost, parameters = UnitCost(4, cost_ratio=ratio, link=link), Parameters(4, lookahead, verifiers)
    differs = False
    for outcomes in itertools.product([True, False], repeat=4):
        cluster = Cluster(units, links, end)
        here, ample = (simulated(parameters, [*outcomes, False], cost, on) for on in (cluster, Cluster(parameters.units)))
        assert ample.waiting_time < 1e-9
        assert ample.peak_units <= parameters.demand(cost, 5).units
        differs |= here.waiting_time > 1e-9 or abs(here.latency - ample.latency) > 1e-9 or abs(here.busy - ample.busy) > 1e-9
    assert not differs or contention(parameters.demand(cost, 5), cluster) is not None


def test_records_are_mixed_with_equal_weights() -> None:
    cost, parameters = UnitCost(4, cost_ratio=0.3, link=0.5), Parameters(4, 2, 2)
    chances = np.array([[0.2, 0.9, 0.5], [0.7, 0.1, 1.0]])
    each = [dsi.predict(parameters, 3, ByPosition(row), cost) for row in chances]
    found = dsi.predict(parameters, 3, RecordedProbabilities(chances), cost)
    assert float(found.latency) == pytest.approx(np.mean([float(one.latency) for one in each]), rel=1e-12)
    records = [[1, 0, 1, 1], [0, 1, 1, 0]]
    times = [float(dsi.predict(parameters, 5, ByPosition([*map(float, record), 0.0]), cost).latency) for record in records]
    replayed = dsi.predict(parameters, 5, Replay([[*record, 0] for record in records]), cost)
    assert float(replayed.latency) == pytest.approx(np.mean(times), rel=1e-12)
    assert float(replayed.latency_variance) == pytest.approx(np.var(times), rel=1e-9)


@pytest.mark.parametrize("error", [0.0, 1e-12, -1e-12])
def test_a_draft_pass_that_begins_at_a_time_within_rounding_is_not_before_it(error: float) -> None:
    """Sums of tenths from different starts on differ by their rounding."""
    tokens = 30
    times = np.random.default_rng(0).integers(1, 4, tokens - 1) / 10
    drafts = finite_dsi._Drafts(np.concatenate([[0.0], np.cumsum(times)]), None)
    for start in range(tokens - 1):
        for passes in range(1, tokens - 1 - start):
            time = np.zeros((1, tokens, 2))
            time[0, start] = sum(times[start : start + passes].tolist()) * (1 + error)
            assert drafts.begun(time)[0, start].tolist() == [passes] * 2
            assert drafts.ending_at(time)[0, start] == pytest.approx(times[start + passes - 1], rel=1e-12)
            time[0, start] *= 1 + 1e-6
            assert drafts.begun(time)[0, start].tolist() == [passes + 1] * 2
            assert not drafts.ending_at(time)[0, start].any()


@pytest.mark.parametrize("parameters", [Parameters(4, 2, 2), Parameters(4, 1, 5), Parameters(4, 5, 1, context_budget=3)])
@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize("in_seconds", [False, True])
@pytest.mark.parametrize("held", [{}, {"_CELLS": 1, "_PAIRS": 1}])
def test_costs_and_laws_together_are_those_of_each(
    parameters: Parameters, tokens: int, in_seconds: bool, held: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of records, which are mixtures, where draft passes end as results arrive, and with few laws and pairs at a time."""
    numbers = [(0.25, 0.0, 1.0), (0.25, 0.125, 0.5), (0.9, 1.0, 1.0), (0.0, 0.5, 0.25), (1.0, 1.0, 0.0)]
    costs: list[StepCosts] = [
        growing(4, draft=draft, smaller_layers=2, link=link, prompt=int(9 * link), draft_devices=devices) if in_seconds
        else UnitCost(4, cost_ratio=draft, link=4 * link, draft_devices=devices, verify_cost=((1, 1.0), (14, 2.0)))
        for draft, link, devices in numbers
    ]  # fmt: skip
    records = Replay(np.random.default_rng(3).random((4, tokens)) < 0.7)
    laws: list[Any] = [Iid(0.3), records, Markov(0.6, 0.3), Iid(1.0), Replay(records.records[:2]), Iid(0.0)]
    choice, law = (each.ravel() for each in np.meshgrid(np.arange(len(costs)), np.arange(len(laws))))
    alone = [dsi.predict(parameters, tokens, laws[which], costs[cost]) for cost, which in zip(choice, law, strict=True)]
    works = [dsi.timed_work(parameters, tokens, [laws[which]], costs[cost]) for cost, which in zip(choice, law, strict=True)]
    for name, value in held.items():
        monkeypatch.setattr(finite_dsi, name, value)
    points = PredictionPoints([MethodChoice(parameters, tokens, cost) for cost in costs], laws, choice, law)
    together, means = dsi.predict_points(points), np.arange(law.size) % 3 == 0
    some = dsi.predict_points(PredictionPoints(points.choices, laws, choice, law, means))
    work = dsi.timed_work_of_costs(parameters, tokens, laws, many_costs.joined(costs))
    for index, (cost, which) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        for name, values in vars(alone[index]).items():
            if values is not None:
                least = 1e-13 * float(alone[index].latency) ** 2 if name == "latency_variance" else 0.0
                np.testing.assert_allclose(getattr(together, name)[index], values, rtol=1e-12, atol=least, err_msg=name)
                if name != "latency_variance" or not means[index]:
                    np.testing.assert_array_equal(getattr(some, name)[index], getattr(together, name)[index])
        for role, totals in work.at((cost, which)).by_model.items():
            expected = works[index].at(0).by_model.get(role, [0.0] * len(totals))
            np.testing.assert_allclose(totals, expected, rtol=1e-12, atol=1e-13)


def test_accepted_tokens_of_paths_are_those_of_the_counter() -> None:
    parameters, accept = Parameters(4, 3, 2), [True, True, True, True, True, False, True, True, False, True, True, False]
    outcomes = iter([lambda _, kept=kept: np.full(BLOCK, kept) for kept in accept[:-1]])
    tally, work = paths.walk(parameters, len(accept), UnitCost(4, cost_ratio=0.25), outcomes), counted(parameters, accept)
    histogram = np.zeros(3, dtype=int)
    for (kept, _), times in work.rounds.items():
        histogram[kept] += times
    assert (tally.accepted == BLOCK * histogram).all()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"lookahead": 0}, "lookahead must be between 1 and 250, got 0"),
        ({"lookahead": 251}, "lookahead must be between 1 and 250, got 251"),
        ({"verifiers": 0}, "verifiers must be between 1 and 99999, got 0"),
        ({"verifiers": 1.5}, "verifiers"),
        ({"placement": "colocated"}, "placement must be 'separate', got 'colocated'"),
        ({"sampled": 1}, "sampled must be true or false"),
        ({"sequences": 4}, "batching must be 'lockstep' with sequences=4"),
    ],
)
def test_bad_parameters_are_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(ParameterError) as error:
        Parameters(**{"layers": 4, "lookahead": 2, "verifiers": 2, **table})  # type: ignore[arg-type]
    assert words in str(error.value)


def test_longer_outputs_than_the_tables_cover_are_refused() -> None:
    with pytest.raises(ParameterError, match=f"must be between 1 and {MAX_OUTPUT}, got {MAX_OUTPUT + 1}"):
        dsi.predict(Parameters(4, 2, 2), MAX_OUTPUT + 1, Iid(0.5), UnitCost(4, cost_ratio=0.1))


def test_proposals_use_all_units() -> None:
    known = Known(layers=32, units=4, draft_lengths=(1, 3), rates=(0.7, 0.6))
    tables = [proposal.parameters for proposal in Parameters.proposals(known).made]
    assert tables == [{"layers": 32, "lookahead": ahead, "verifiers": 3} for ahead in (1, 3)]
    assert "two replicas of the target and a further device" in Parameters.proposals(Known(32, 2, (1,), (0.7,))).missing
    assert "draft model" in Parameters.proposals(Known(32, 4, (1,), (0.7,), independent_draft=False)).missing
