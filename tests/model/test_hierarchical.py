"""Hierarchical decoding: three views on the same outcomes, closed forms by enumeration, published numbers, and exactness."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.interpreter import count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.hierarchical import finite_hierarchical
from model.methods.hierarchical import theory as hierarchical
from model.methods.hierarchical.algorithm import READINGS, Parameters, decode
from model.methods.hierarchical.finite_hierarchical import moments_of_pairs, prices
from model.methods.hierarchical.paths import walk
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.rounds.round_laws import ReplayRounds, Rounds
from model.methods.rounds.round_moments import Moments
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay
from model.outcomes.random_streams import BLOCK
from model.steps import Commit, Forward, Read, declining
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.position_costs import growing

DECK_SMALL = 0.75 / 6.39
"""The slides' times of T5-small and T5-large."""
ONE_PASS = ("literal", "reuse", "bonus")
CURVE = ((1, 2.0), (2, 2.5), (3, 2.75), (4, 3.5), (12, 4.0))


def chosen(reading: str, gamma: int, inner: int = 1, **more: Any) -> Parameters:
    return Parameters(4, gamma, reading, inner if reading == "recursive" else None, **more)


def moments(choice: Parameters, tokens: int, accept: Any, medium_accept: Any, cost: UnitCost) -> Moments:
    laws, one = [{"accept": accept, "medium_accept": medium_accept}], np.zeros(1, dtype=np.intp)
    price = prices(choice, many_costs.joined([cost]), tokens)
    return Moments(*(float(each[0]) for each in moments_of_pairs(choice, tokens, laws, price, one, one)))


# --- A round by hand --------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    small: int
    medium: int
    moves: int
    offered: int
    accepted: int


def run_length(keeps: list[bool]) -> int:
    return next((index for index, keep in enumerate(keeps) if not keep), len(keeps))


def offer(reading: str, gamma: int, inner: int, room: int, keeps: list[bool]) -> tuple[int, int, int, int]:
    """Passes of the small and of the medium model, moves between units, offered tokens; `keeps` from the first token on."""
    wanted = min(gamma, room)
    if wanted == 0:
        return 0, 0, 0, 0
    if reading == "recursive":
        visited, small, medium, have = ["large"], 0, 0, 0
        while have < wanted:
            length = min(inner, wanted - have - 1)
            visited += ["small"] * length + ["medium"]
            small, medium = small + length, medium + 1
            have += run_length(keeps[have : have + length]) + 1
        visited.append("large")
        return small, medium, sum(one != other for one, other in itertools.pairwise(visited)), wanted
    n = run_length(keeps[:wanted])
    if reading == "literal":
        return wanted, 1 + (wanted - n), 3, wanted
    if n < wanted:  # its parallel pass gives one of the missing tokens
        return wanted, 1 + (wanted - n - 1), 3, wanted
    return wanted, 1, 3, wanted + (reading == "bonus" and room > wanted)


def by_hand(choice: Parameters, tokens: int, survive: list[int], keeps: list[bool]) -> list[Round]:
    """Rounds of a decoding: `survive[s]` tokens of a draft from s are accepted; `keeps[t]`: the medium model accepts token t."""
    start, found = 0, []
    while start < tokens:
        work = offer(choice.reading, choice.draft_length, choice.inner_draft_length or 0, tokens - 1 - start, keeps[start:])
        accepted = min(survive[start], work[3]) if work[3] else 0
        found.append(Round(*work, accepted))
        start += accepted + 1
    return found


def times(choice: Parameters, rounds: list[Round], cost: UnitCost) -> tuple[float, float]:
    small, medium, curve = cost.cost_ratio, cost.medium_cost_ratio, cost.verify_cost
    assert small is not None
    assert medium is not None
    widths = [1.0] * 300 if curve is None else np.interp(np.arange(1, 300), *zip(*curve, strict=True)) / curve[0][1]
    busy = sum(cost.layers * (each.small * small + each.medium * medium + widths[each.offered]) for each in rounds)
    moves = sum(each.moves for each in rounds) if choice.placement == "separate" else 0
    return busy + moves * cost.link, busy


def arithmetic(rounds: list[Round], cost: UnitCost) -> float:
    """Tokens in all passes, in units of the large model: a medium pass reads its drafted tokens and one more."""
    large, small = sum(each.offered + 1 for each in rounds), sum(each.small for each in rounds)
    medium = small + sum(each.medium for each in rounds)
    return large + (cost.operations_ratio or 0) * small + (cost.medium_operations_ratio or 0) * medium


def runs(keeps: list[bool]) -> list[int]:
    return [run_length(keeps[start:]) for start in range(len(keeps))]


# --- Three views on the same outcomes ---------------------------------------------------------------------------------


@st.composite
def decodings(draw: st.DrawFn) -> tuple[Parameters, int, UnitCost, int, float, float]:
    choice = chosen(
        draw(st.sampled_from(READINGS)), draw(st.integers(1, 5)), draw(st.integers(0, 4)), sampled=draw(st.booleans()),
        placement=draw(st.sampled_from(["colocated", "separate"])), draft_layers=draw(st.integers(1, 3)),
        medium_layers=draw(st.integers(1, 3)),
    )  # fmt: skip
    ratio = st.sampled_from([0.0, 0.25, 0.5, 1.5])
    cost = UnitCost(
        4, cost_ratio=draw(ratio), medium_cost_ratio=draw(ratio), link=draw(st.sampled_from([0.0, 0.5])),
        operations_ratio=draw(ratio), medium_operations_ratio=draw(ratio), verify_cost=draw(st.sampled_from([None, CURVE])),
    )  # fmt: skip
    rate = st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0])
    return choice, draw(st.integers(1, 14)), cost, draw(st.integers(0, 10**6)), draw(rate), draw(rate)


@given(decodings())
def test_events_paths_and_counter_agree_with_the_definition(
    drawn: tuple[Parameters, int, UnitCost, int, float, float],
) -> None:
    choice, tokens, cost, seed, large, medium = drawn
    rng = np.random.default_rng(seed)
    accept, kept = (rng.random((tokens, BLOCK)) < rate for rate in (large, medium))
    played: Any = {name: (lambda _, row=row: row for row in rows) for name, rows in (("accept", accept), ("medium_accept", kept))}
    tally = walk(choice, tokens, cost, played)
    for lane in range(3):
        a, b = accept[:, lane].tolist(), kept[:, lane].tolist()
        rounds = by_hand(choice, tokens, runs(a), b)
        time, busy = times(choice, rounds, cost)
        drafts = {"medium": DraftOutcomes("target", runs(a)), "draft": DraftOutcomes("medium", runs(b))}
        run = simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, World(1, 4, drafts=drafts))
        assert (run.latency, run.busy) == (pytest.approx(time, rel=1e-12), pytest.approx(busy, rel=1e-12))
        assert (tally.time[lane], tally.busy[lane]) == (pytest.approx(time, rel=1e-12), pytest.approx(busy, rel=1e-12))
        assert (tally.rounds[lane], tally.drafted[lane]) == (len(rounds), sum(each.offered for each in rounds))
        assert run.tokens == list(range(1, tokens + 1))  # the large model's own, for any outcomes of the others
        histogram = Counter((each.accepted, each.offered) for each in rounds)
        assert run.rounds == histogram
        work = count(decode(choice, [0], tokens), World(1, 4, drafts=drafts), tokens)
        assert work.rounds == histogram
        small, medium_ = (sum(each[field] for each in rounds) for field in (0, 1))
        passes = {"target": len(rounds), "draft": small, "medium": medium_}
        assert work.passes_of == {role: number for role, number in passes.items() if number}
        assert (run.passes, run.passes_of) == (work.passes, work.passes_of)
        computed = arithmetic(rounds, cost)
        assert tally.operations[lane] == pytest.approx(computed, rel=1e-12)
        assert hierarchical.operations(choice, cost, run.rounds, run.account) == pytest.approx(computed, rel=1e-12)
    assert (np.arange(choice.longest_draft + 1) + 1) @ tally.accepted == tokens * BLOCK  # accepted tokens and one more


def test_accepted_lengths_of_the_paths_equal_those_of_the_rounds() -> None:
    choice, tokens = chosen("bonus", 3), 11
    rng = np.random.default_rng(5)
    accept, kept = (rng.random((tokens, BLOCK)) < rate for rate in (0.8, 0.7))
    played: Any = {name: (lambda _, row=row: row for row in rows) for name, rows in (("accept", accept), ("medium_accept", kept))}
    tally = walk(choice, tokens, UnitCost(4, cost_ratio=0.1, medium_cost_ratio=0.5), played)
    lengths: Counter[int] = Counter()
    for lane in range(BLOCK):
        lengths.update(each.accepted for each in by_hand(choice, tokens, runs(accept[:, lane].tolist()), kept[:, lane].tolist()))
    assert tally.accepted.tolist() == [lengths[number] for number in range(5)]
    assert lengths[4] > 0


@pytest.mark.parametrize("reading", READINGS)
def test_a_longer_prompt_is_read_once_by_each_model(reading: str) -> None:
    choice, prompt = chosen(reading, 3), [0, 0, 0]
    drafts = {"medium": DraftOutcomes("target", [9] * 9), "draft": DraftOutcomes("medium", [9] * 9)}
    steps = decode(choice, [0, 1, 2], 6)
    seen: list[Forward] = []
    world, answer = World(len(prompt), 4, drafts=drafts), None
    written: list[int] = []
    world.written = written
    while len(written) < 6:
        step = steps.send(answer)
        answer = None
        if isinstance(step, Forward):
            seen.append(step)
            answer = step
        elif isinstance(step, Read):
            answer = world.read(step)
        elif isinstance(step, Commit):
            written += step.tokens
    assert [(step.role, step.tokens, step.at) for step in seen[:3]] == [
        ("target", (0, 1), 0), ("draft", (0, 1), 0), ("medium", (0, 1), 0),
    ]  # fmt: skip
    assert [step.heads for step in seen[:3]] == [0, 0, 0]
    assert min(step.at for step in seen[3:]) == 2
    assert written == [3, 4, 5, 6, 7, 8]


def test_three_units_hold_one_model_each() -> None:
    drafts = {"medium": DraftOutcomes("target", [9] * 9), "draft": DraftOutcomes("medium", [0] * 9)}
    cost = UnitCost(4, cost_ratio=0.25, medium_cost_ratio=0.5)
    for reading in READINGS:
        steps = decode(chosen(reading, 2, placement="separate"), [0], 5)
        run = simulate(steps, 5, Cluster(3), cost, World(1, 4, drafts=drafts), record=True)
        assert {(each.unit, each.last, each.end - each.start) for each in run.intervals} == {(0, 4, 4.0), (1, 1, 2.0), (2, 1, 1.0)}
        assert run.peak_units == 1


def test_recursive_without_inner_drafts_is_speculative_decoding() -> None:
    choice, cost = chosen("recursive", 3, 0), UnitCost(4, cost_ratio=0.25, medium_cost_ratio=0.5)
    found = moments(choice, 20, Iid(0.7), Iid(0.4), cost)
    alone = speculative.predict(speculative.Parameters(4, 3), 20, Iid(0.7), UnitCost(4, cost_ratio=0.5))
    assert found.time == pytest.approx(float(alone.latency), rel=1e-12)


# --- A given number of tokens: enumeration of all outcomes -------------------------------------------------------------


def medium_paths(law: Any, positions: int) -> Iterator[tuple[list[bool], float]]:
    if isinstance(law, Replay):
        yield from ((record[:positions].tolist(), 1 / len(law.records)) for record in law.records)
        return
    low, high = law.probabilities(positions)
    for keeps in itertools.product((False, True), repeat=positions):
        chance = 1.0
        for index, keep in enumerate(keeps):
            rate = high[index] if index and keeps[index - 1] else low[index]
            chance *= rate if keep else 1 - rate
        yield list(keeps), chance


def survivor_paths(law: Any, positions: int, longest: int) -> Iterator[tuple[list[int], float]]:
    if isinstance(law, ReplayRounds):
        yield from ((record[:positions].tolist(), 1 / len(law.records)) for record in law.records)
    elif isinstance(law, Rounds):
        bounds = [1.0, *law.survival[:longest], 0.0]
        chances = [one - other for one, other in itertools.pairwise(bounds)]
        for lengths in itertools.product(range(longest + 1), repeat=positions):
            yield list(lengths), math.prod(chances[length] for length in lengths)
    else:
        yield from ((runs(keeps), chance) for keeps, chance in medium_paths(law, positions))


RATES = [0.9, 0.2, 0.7, 1.0, 0.4, 0.8, 0.5]
LARGE = [
    Iid(0.6), Iid(0.0), Iid(1.0), Markov(0.6, 0.5), Markov(0.5, -0.4), ByPosition(RATES),
    Replay([[True, False, True, True, True, True], [False] * 6, [True] * 6]),
    ReplayRounds([[2, 0, 1, 3, 0, 1], [4, 1, 2, 0, 0, 0]]),
]  # fmt: skip
MEDIUM = [Iid(0.7), Iid(1.0), Iid(0.0), Markov(0.6, 0.6), Markov(0.5, -0.5), ByPosition(RATES[::-1]),
          Replay([[True, True, False, True, True, True], [True] * 6])]  # fmt: skip


def enumerated(choice: Parameters, tokens: int, large: Any, medium: Any, cost: UnitCost) -> list[float]:
    total = np.zeros(7)
    others = list(medium_paths(medium, tokens - 1))
    for survive, chance in survivor_paths(large, tokens - 1, choice.longest_draft):
        for keeps, other in others:
            rounds = by_hand(choice, tokens, [*survive, 0], [*keeps, False])
            time, busy = times(choice, rounds, cost)
            offered = sum(each.offered for each in rounds)
            total += chance * other * np.array([1, time, time**2, busy, arithmetic(rounds, cost), len(rounds), offered])
    assert total[0] == pytest.approx(1, abs=1e-12)
    return [float(value) for value in total[1:]]


def check_moments(choice: Parameters, tokens: int, large: Any, medium: Any) -> None:
    ratios = {"cost_ratio": 0.3, "medium_cost_ratio": 0.7, "operations_ratio": 0.2, "medium_operations_ratio": 0.45}
    cost = UnitCost(4, link=0.25, verify_cost=CURVE, **ratios)
    mean, square, *others = enumerated(choice, tokens, large, medium, cost)
    found = moments(choice, tokens, large, medium, cost)
    assert (found.time, *found[2:]) == pytest.approx((mean, *others), rel=1e-12)
    if choice.reading == "recursive":
        assert math.isnan(found.variance)
    else:
        assert found.variance == pytest.approx(square - mean**2, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("medium", MEDIUM, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("large", LARGE, ids=lambda law: type(law).__name__)
def test_formula_is_the_mean_over_all_outcomes(reading: str, large: Any, medium: Any) -> None:
    check_moments(chosen(reading, 2, 1, placement="separate"), 6, large, medium)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("gamma", [1, 3, 4, 9])
def test_formula_with_other_draft_lengths(reading: str, gamma: int) -> None:
    for tokens in (1, 2, 5, 6):
        check_moments(chosen(reading, gamma, 2), tokens, Iid(0.7), Iid(0.8))
    check_moments(chosen(reading, gamma, 2, placement="separate"), 6, Markov(0.6, 0.3), Markov(0.6, 0.3))


@pytest.mark.parametrize("reading", READINGS)
def test_formula_with_laws_of_rounds(reading: str) -> None:
    check_moments(chosen(reading, 2), 5, Rounds.by_draft_position([0.9, 0.5, 0.3]), Iid(0.6))


def test_predict_equals_the_moments() -> None:
    cost = UnitCost(40, cost_ratio=0.1, medium_cost_ratio=0.4, link=2.0)
    laws = {"accept": Iid(0.7), "medium_accept": Iid(0.9)}
    for choice, units in ((chosen("reuse", 3), 1), (chosen("reuse", 3, placement="separate"), 3)):
        found, expected = hierarchical.predict(choice, 30, laws, cost), moments(choice, 30, Iid(0.7), Iid(0.9), cost)
        assert (float(found.latency), float(found.latency_variance)) == (expected.time, expected.variance)
        assert (float(found.busy), found.rounds, found.drafted) == (expected.busy, expected.rounds, expected.drafted)
        assert np.isnan(expected.operations)  # the operations of the smaller models are unknown
        assert (float(found.units), float(found.plain_latency)) == (units, 30 * 40)
        assert float(found.units_ratio) == 1.0 if units == 1 else np.isnan(found.units_ratio)
    free = UnitCost(40, cost_ratio=0.1, medium_cost_ratio=0.4)
    assert float(hierarchical.predict(chosen("bonus", 3, placement="separate"), 30, laws, free).units_ratio) == 1.0


def test_variance_is_zero_for_certain_outcomes_and_never_negative() -> None:
    cost = UnitCost(7, cost_ratio=0.1, medium_cost_ratio=0.3)
    for reading, large, medium, tokens in itertools.product(ONE_PASS, (0.0, 1.0), (0.0, 1.0), (50, 111, 223)):
        variance = moments(chosen(reading, 3), tokens, Iid(large), Iid(medium), cost).variance
        assert 0 <= variance < 1e-6


def test_the_medium_models_law_cannot_be_a_law_of_rounds() -> None:
    for law in (Rounds.by_draft_position([0.9, 0.5]), ReplayRounds([[2, 0, 1]])):
        with pytest.raises(ParameterError, match=r"^this law of the medium model's outcomes has no closed form; .*'paths'"):
            moments(chosen("reuse", 2), 3, Iid(0.5), law, UnitCost(4, cost_ratio=0.1, medium_cost_ratio=0.3))  # type: ignore[arg-type]


@pytest.mark.parametrize("reading", READINGS)
def test_too_few_rates_are_named_in_the_error(reading: str) -> None:
    few = ByPosition([0.5] * 4, name="medium rates")
    with pytest.raises(ParameterError, match=r"^medium rates must have one rate for each of \d+ output positions, got \d; "):
        moments(chosen(reading, 3), 8, Iid(0.5), few, UnitCost(4, cost_ratio=0.1, medium_cost_ratio=0.3))


@pytest.mark.parametrize("reading", READINGS)
def test_operations_count_the_tokens_of_all_passes_except_reread_ones(reading: str) -> None:
    """Tokens that a model reads late, with its next pass, are left out, as in Theorem 3.11."""
    rng = np.random.default_rng(8)
    for gamma, inner, rate in itertools.product((1, 3, 4), (1, 2), (0.0, 0.6, 1.0)):
        choice, tokens = chosen(reading, gamma, inner), 25
        kept = [runs((rng.random(40) < rate).tolist()) for _ in range(2)]
        drafts = {"medium": DraftOutcomes("target", kept[0]), "draft": DraftOutcomes("medium", kept[1])}
        widths: Counter[str] = Counter()
        steps, world, written, answer = declining(decode(choice, [0], tokens)), World(1, 4, drafts=drafts), list[int](), None
        world.written = written
        rounds: Counter[tuple[int, int]] = Counter()
        while len(written) < tokens:
            step = steps.send(answer)
            answer = world.read(step) if isinstance(step, Read) else step
            if isinstance(step, Forward):
                widths[step.role] += len(step.tokens)
            elif isinstance(step, Commit):
                written += step.tokens
                rounds[len(step.tokens) - 1, step.drafted or 0] += 1
                answer = None
        account = count(decode(choice, [0], tokens), World(1, 4, drafts=drafts), tokens).account

        def operations(small: float, medium: float) -> float:
            cost = UnitCost(4, operations_ratio=small, medium_operations_ratio=medium)
            return hierarchical.operations(choice, cost, rounds, account)  # noqa: B023

        large = operations(0, 0)
        assert large == widths["target"]
        for role, counted in (("draft", operations(1, 0) - large), ("medium", operations(0, 1) - large)):
            assert counted <= widths[role] <= counted + tokens


def test_many_tokens_approach_the_closed_form_despite_reused_outcomes() -> None:
    """Earlier outcomes decide whether a round starts at a position, so later ones are independent of it."""
    cost = UnitCost(1, cost_ratio=0.1, medium_cost_ratio=0.4)
    for reading in READINGS:
        choice = chosen(reading, 2, 1)
        first, second = (moments(choice, tokens, Iid(0.7), Iid(0.8), cost) for tokens in (300, 600))
        speed = hierarchical.speedup(0.7, 0.8, 2, 0.1, 0.4, reading=reading, inner_draft_length=choice.inner_draft_length)
        assert second.time - first.time == pytest.approx(300 / float(speed), rel=1e-9)
        tokens = hierarchical.tokens_per_round(0.7, 0.8, 2, reading=reading)
        assert second.rounds - first.rounds == pytest.approx(300 / float(tokens), rel=1e-9)


# --- One round with independent outcomes: property 16 ------------------------------------------------------------------


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize(("large", "medium"), [(0.6, 0.7), (0.0, 0.3), (1.0, 0.5), (0.5, 1.0), (0.3, 0.0), (1.0, 1.0)])
def test_a_round_by_enumeration(reading: str, gamma: int, large: float, medium: float) -> None:
    for inner in (0, 1, 2, 5) if reading == "recursive" else (None,):
        total = np.zeros(6)
        for keeps, chance in medium_paths(Iid(medium), gamma):
            small, passes, _, offered = offer(reading, gamma, inner or 0, gamma + 1, keeps)
            for accepts, other in medium_paths(Iid(large), gamma + 1):
                tokens = run_length(accepts[:offered]) + 1
                verify = float(np.interp(offered + 1, *zip(*CURVE, strict=True))) / 2.0
                cost, curved = (one + 0.3 * small + 0.7 * passes for one in (1, verify))
                total += chance * other * np.array([tokens, small, passes, cost, curved, 1])
        more: dict[str, Any] = {"reading": reading, "inner_draft_length": inner}
        expected = [
            hierarchical.tokens_per_round(large, medium, gamma, reading=reading),
            hierarchical.small_passes(medium, gamma, **more), hierarchical.medium_passes(medium, gamma, **more),
            hierarchical.cost_per_round(medium, gamma, 0.3, 0.7, **more),
            hierarchical.cost_per_round(medium, gamma, 0.3, 0.7, **more, verify_cost=CURVE), 1.0,
        ]  # fmt: skip
        assert [float(value) for value in expected] == pytest.approx(total.tolist(), rel=1e-12, abs=1e-12)
        for curve, cost in ((None, total[3]), (CURVE, total[4])):
            speed = float(hierarchical.speedup(large, medium, gamma, 0.3, 0.7, **more, verify_cost=curve))
            assert speed == pytest.approx(total[0] / cost, rel=1e-12)


def test_costs_of_the_readings_as_written() -> None:
    """1 + gamma c + m (1 + gamma - E[n]), minus m (1 - a1^gamma) if the parallel pass gives a token."""
    for gamma, rate in itertools.product((1, 3, 7), (0.0, 0.4, 0.9, 1.0)):
        kept = sum(rate**j for j in range(1, gamma + 1))
        literal = 1 + gamma * 0.1 + 0.4 * (1 + gamma - kept)
        assert float(hierarchical.cost_per_round(rate, gamma, 0.1, 0.4)) == pytest.approx(literal, rel=1e-12)
        reuse = float(hierarchical.cost_per_round(rate, gamma, 0.1, 0.4, reading="reuse"))
        assert reuse == pytest.approx(literal - 0.4 * (1 - rate**gamma), rel=1e-12)
        assert float(hierarchical.cost_per_round(rate, gamma, 0.1, 0.4, reading="bonus")) == reuse


def test_limits_of_a_perfect_and_free_small_model() -> None:
    for gamma, medium in itertools.product(range(1, 9), (0.2, 0.5)):
        for reading in ONE_PASS:
            assert float(hierarchical.cost_per_round(1.0, gamma, 0.0, medium, reading=reading)) == 1 + medium
        for inner in range(6):
            cost = hierarchical.cost_per_round(1.0, gamma, 0.0, medium, reading="recursive", inner_draft_length=inner)
            assert float(cost) == pytest.approx(1 + medium * math.ceil(gamma / (inner + 1)), rel=1e-12)
    # A small model that is never right: the medium model decodes alone; in `literal` its first pass is wasted.
    assert float(hierarchical.cost_per_round(0.0, 4, 0.0, 0.5)) == 1 + 0.5 * 5
    assert float(hierarchical.cost_per_round(0.0, 4, 0.0, 0.5, reading="reuse")) == 1 + 0.5 * 4


def test_closed_forms_of_hierarchical_decoding_broadcast() -> None:
    rates, lengths = np.array([[0.2], [0.9]]), np.array([1, 2, 5])
    for reading in READINGS:
        more: dict[str, Any] = {"reading": reading, "inner_draft_length": 2 if reading == "recursive" else None}
        grid = hierarchical.speedup(0.7, rates, lengths, 0.1, 0.5, **more)
        assert grid.tolist() == [
            [float(hierarchical.speedup(0.7, rate, int(length), 0.1, 0.5, **more)) for length in lengths] for rate in (0.2, 0.9)
        ]
        assert hierarchical.tokens_per_round(0.7, rates, lengths, reading=reading).shape == (2, 3)
        assert hierarchical.small_passes(rates, lengths, **more).shape == (2, 3)


def test_colocated_models_stay_on_one_unit() -> None:
    choice = Parameters(4, 3)
    cost = UnitCost(4, cost_ratio=0.25, medium_cost_ratio=0.5, link=1.0)

    def play(units: int) -> tuple[float, int]:
        world = World(1, 4, drafts={"medium": DraftOutcomes("target", [1] * 9), "draft": DraftOutcomes("medium", [1] * 9)})
        run = simulate(decode(choice, [0], 9), 9, Cluster(units), cost, world)
        return run.latency, run.peak_units

    assert play(1) == play(5)


def test_types_of_a_prediction_and_its_smallest_size() -> None:
    cost, laws = UnitCost(4, cost_ratio=0.25, medium_cost_ratio=0.5), {"accept": Iid(0.5), "medium_accept": Iid(0.5)}
    found = hierarchical.predict(Parameters(4, 3), 1, laws, cost)
    assert {value.dtype for value in (found.latency, found.units, found.plain_latency)} == {np.dtype(np.float64)}
    assert float(found.latency) == 4.0
    with pytest.raises(ValueError, match=r"^tokens must be between 1 and 1000000, got 0$"):
        hierarchical.predict(Parameters(4, 3), 0, laws, cost)


# --- Points together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("in_seconds", [False, True])
@pytest.mark.parametrize("together", [1, 3, 64])
def test_costs_and_laws_together_are_those_of_each(
    reading: str, in_seconds: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of records, which are mixtures, of several numbers of tokens, and with few pairs at a time."""
    numbers = [(0.25, 0.5, 0.0, 1.0), (0.1, 0.4, 0.5, 0.5), (0.9, 0.9, 0.0, 1.0)]
    costs: list[StepCosts] = [
        growing(4, draft=draft, medium=medium, smaller_layers=2, link=link, prompt=int(9 * link), draft_devices=devices)
        if in_seconds else UnitCost(4, cost_ratio=draft, medium_cost_ratio=medium, link=link, draft_devices=devices)
        for draft, medium, link, devices in numbers
    ]  # fmt: skip
    records = Replay(np.random.default_rng(3).random((3, 7)) < 0.7)
    by_place = Rounds.by_draft_position([0.9] * 4)
    pairs = [(Iid(0.3), Iid(0.8)), (Markov(0.6, 0.3), records), (records, Iid(1.0)), (by_place, Iid(0.4))]
    laws = [{"accept": accept, "medium_accept": medium} for accept, medium in pairs]
    choice = chosen(reading, 3, 2, placement="separate")
    choices = [MethodChoice(choice, tokens, cost) for tokens in (1, 5, 7) for cost in costs]
    index, law = (each.ravel() for each in np.indices((len(choices), len(laws))))
    points = [*zip(index.tolist(), law.tolist(), strict=True)]
    alone = [hierarchical.predict(choice, choices[at].tokens, laws[which], choices[at].cost) for at, which in points]
    works = [hierarchical.work(choice, 7, law) for law in laws]
    monkeypatch.setattr(finite_hierarchical, "_PAIRS", together)
    found = hierarchical.predict_points(PredictionPoints(choices, laws, index, law))
    for place, one in enumerate(alone):
        for name, values in vars(one).items():
            least = 1e-13 * float(one.latency) ** 2 if name == "latency_variance" else 0.0
            np.testing.assert_allclose(getattr(found, name)[place], values, rtol=1e-12, atol=least, err_msg=name)
    several = hierarchical.work_of_laws(choice, 7, laws)
    for place, work in enumerate(works):
        for role, totals in work.by_model.items():
            np.testing.assert_allclose(several.at(place).by_model[role], totals, rtol=1e-12)
