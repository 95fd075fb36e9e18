"""Adaptive draft lengths: three implementations on the same outcomes, exact enumeration, the upper bound, and errors."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.many_costs import VariedCosts
from model.interpret.interpreter import CountedWork, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.adaptive import draft_length_policies
from model.methods.adaptive import theory as adaptive
from model.methods.adaptive.algorithm import OPTIONS, Parameters, decode
from model.methods.adaptive.draft_length_policies import (
    Constant,
    Heuristic,
    Policy,
    gradient,
)
from model.methods.prediction import ChoiceGroup, GroupedChoices, PredictionPoints, predict_separately
from model.methods.rounds.prices_of_rounds import RoundPrices, round_prices
from model.methods.rounds.round_laws import ReplayRounds, Rounds
from model.methods.rounds.round_moments import moments
from model.methods.rounds.round_walks import Tally, varying
from model.methods.speculative.theory import optimal_draft_length, oracle_speedup, speedup
from model.outcomes import random_streams
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Markov, RecordedProbabilities, Replay, TwoClass
from model.steps import Forward, LayerSpan, Read
from sim.scenarios import cases
from sim.views import evaluation
from tests.support.adaptive_lengths import ONLINE_POLICIES, POLICIES, Bools, Whole, outcomes_of_rows, parameters_of, round_speed


def reference(parameters: Parameters, tokens: int, accept: list[bool], doubts: list[int] | None) -> list[tuple[int, int]]:
    """Rounds (accepted, drafted) of one decoding, as a plain loop."""
    rounds: list[tuple[int, int]] = []
    length: float = parameters.first
    good, tried = 1.0, 2.0
    out = 0
    while out < tokens:
        whole = math.floor(length)
        if parameters.policy == "gradient" and rounds:
            speeds = [round_speed(good / tried, whole + more) for more in (0, 1)]
            whole += length > whole and speeds[1] > speeds[0]
        drafted = min(whole, tokens - out - 1)
        kept = 0
        while kept < drafted and accept[out + kept]:
            kept += 1
        if doubts is not None:
            for place in range(drafted):
                if doubts[out + place] & (2 if place < kept else 1):
                    drafted = place + 1
                    kept = min(kept, drafted)
                    break
        rounds.append((kept, drafted))
        out += kept + 1
        good, tried = good + kept, tried + (drafted if parameters.estimator == "drafted" else min(kept + 1, drafted))
        if parameters.policy == "heuristic":
            length = min(length + 2, parameters.longest_draft) if kept == drafted else max(length - 1, 1)
        elif parameters.policy == "optimum":
            length = max(int(optimal_draft_length(good / tried, 0.2, longest=parameters.longest_draft)), 1)
        elif parameters.policy == "gradient":
            length = min(max(length + 10 * float(gradient(good / tried, length, 0.2)), 1), parameters.longest_draft)
    return rounds


def counted(parameters: Parameters, tokens: int, accept: list[bool], doubts: list[int]) -> CountedWork:
    """Steps of the algorithm with these outcomes."""
    survivors = [next((k for k, good in enumerate(accept[place:]) if not good), len(accept) - place) for place in range(tokens)]
    world = World(1, parameters.layers, drafts={"draft": DraftOutcomes("target", survivors)}, doubts=doubts)
    return count(decode(parameters, [0], tokens), world, tokens)


# --- One sequence of outcomes, three implementations --------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_algorithm_walk_and_reference_agree(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 40))
    policy = data.draw(st.sampled_from(POLICIES))
    own = {"estimator": data.draw(st.sampled_from(draft_length_policies.ESTIMATORS))} if policy in ONLINE_POLICIES else {}
    first = {} if policy == "confidence" else {"draft_length": data.draw(st.integers(1, 6))}
    parameters = parameters_of(policy, sampled=data.draw(st.booleans()), **own, **first)
    accept = data.draw(st.lists(st.sampled_from([True, True, False]), min_size=tokens, max_size=tokens))
    doubts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=tokens, max_size=tokens))
    told = reference(parameters, tokens, accept, doubts if policy == "confidence" else None)
    work = counted(parameters, tokens, accept, doubts)
    assert sorted(work.rounds.elements()) == sorted(told)
    assert (work.passes_of["target"], work.passes_of["draft"]) == (len(told), sum(drafted for _, drafted in told))
    # After completely accepted drafts the draft model reads one token more.
    behind = sum(before[0] == before[1] and after[1] > 0 for before, after in itertools.pairwise(told))
    widths = [(drafted + 1, drafted) for _, drafted in told]
    assert work.layer_passes == 4 * sum(wide for wide, _ in widths) + sum(drafted for _, drafted in widths) + behind
    tally = twin(parameters, tokens, np.array([accept]).T, np.array([doubts]).T)
    assert (tally.rounds.tolist(), tally.drafted.tolist()) == ([len(told)], [sum(drafted for _, drafted in told)])
    assert tally.accepted.tolist() == [sum(kept == n for kept, _ in told) for n in range(7)]
    assert tally.time.tolist() == [sum(1 + 0.25 * drafted for _, drafted in told)] == tally.busy.tolist()


def twin(parameters: Parameters, tokens: int, accept: Bools, doubts: Whole | None = None) -> Tally:
    """The vectorised walk, at a cost ratio of 1/4."""
    prices = round_prices(UnitCost(1, cost_ratio=0.25), parameters.longest_draft)
    unsure = doubts[: tokens - 1].astype(np.uint8) if doubts is not None and parameters.policy == "confidence" else None
    return varying(parameters.initial_policy(accept.shape[1]), tokens, outcomes_of_rows(accept), prices, unsure)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decoding_ends_at_a_stop_token_or_at_its_length(policy: str) -> None:
    """The prompt has three tokens, and the true text continues with 3, 4, 5 and so on."""
    for stop, tokens, last in ((None, 7, 9), (6, 7, 6), (2, 3, 5), (9, 7, 9), (10, 7, 9)):
        for accepted in ([0] * 12, [9] * 12, [1] * 12):
            world = World(3, 4, drafts={"draft": DraftOutcomes("target", accepted)}, doubts=[0] * 12)
            work = count(decode(parameters_of(policy), [0, 1, 2], tokens, () if stop is None else (stop,)), world, 99)
            assert work.tokens == [*range(3, last + 1)]
            assert work.layer_passes >= 2 * 4 + 2 + 4 * len(work.commits)  # both models read two tokens of the prompt first


@settings(max_examples=25)
@given(st.data())
def test_events_equal_paths(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    numbers = st.floats(0, 2).map(lambda time: time if time >= cases.MIN_TIME else 0.0)
    method = {"name": "adaptive", "layers": data.draw(st.integers(1, 5)), "policy": policy, "max_draft_length": 5,
              "placement": data.draw(st.sampled_from(["colocated", "separate"])), "sampled": data.draw(st.booleans())}  # fmt: skip
    if policy in ONLINE_POLICIES:
        method |= {
            "estimator": data.draw(st.sampled_from(draft_length_policies.ESTIMATORS)),
            "min_draft_length": data.draw(st.integers(0, 1)),
        }
    laws = [
        {"kind": "iid", "acceptance_rate": data.draw(st.floats(0, 1))},
        {"kind": "markov", "acceptance_rate": 0.7, "correlation": 0.4},
        {"kind": "by-draft-position", "acceptance_rates": [0.9, 0.8, 0.5, 0.7, 0.6]},
    ]
    outcomes: dict[str, Any] = {"accept": data.draw(st.sampled_from(laws))}
    if policy == "confidence":
        doubts = {"low_if_accepted": data.draw(st.floats(0, 1)), "low_if_rejected": data.draw(st.floats(0, 1))}
        outcomes["confidence"] = {"kind": "two-class", **doubts}
    cost: dict[str, Any] = {"cost_ratio": data.draw(numbers), "link": data.draw(numbers), "final_head": data.draw(numbers)}
    if method.get("placement", "colocated") == "colocated":
        del cost["link"]
    if data.draw(st.booleans()):
        cost["verify_cost"] = [[1, 1.0], [2, 1.0 + data.draw(numbers)], [8, 4.0]]
    tokens = data.draw(st.integers(1, 40))
    settings_ = {"name": "x", "tokens": tokens, "seed": data.draw(st.integers(0, 9))}
    case = cases.resolve({"scenario": settings_, "method": [method], "outcomes": outcomes, "cost": cost})
    row = evaluation.events_row(case, 0, 4)
    assert row["paths_difference"] <= 1e-14 * tokens * row["latency"]
    quarters = {"cost_ratio": 0.5, "operations_ratio": 0.25}
    exact = cases.resolve({"scenario": settings_, "method": [method], "outcomes": outcomes, "cost": quarters})
    row, twin_row = evaluation.events_row(exact, 0, 4), evaluation.paths_row(exact, 0, 4)
    assert row["paths_difference"] == 0
    for name in ("rounds", "drafted", "operations"):
        assert row[name] == twin_row[name]
    assert row["operations"] == row["rounds"] + 1.25 * row["drafted"]


@settings(max_examples=40)
@given(st.data())
def test_one_decoding_and_many_decide_identically(data: st.DataObject) -> None:
    """To the last bit, and from drafted and accepted tokens alone."""
    policy = data.draw(st.sampled_from(POLICIES))
    options = {"step": data.draw(st.floats(0, 50))} if policy == "gradient" else {}
    parameters = parameters_of(policy, max_draft_length=30, **options)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    many, single = parameters.initial_policy(17), [parameters.initial_policy(1) for _ in range(17)]
    for _ in range(15):
        which = np.flatnonzero(rng.random(17) < 0.7)
        drafted = many.length[which]
        accepted = rng.integers(0, drafted + 1)
        many.learn(which, accepted, drafted)
        for index, good, all_ in zip(which, accepted, drafted, strict=True):
            single[index].learn(np.array([0]), np.array([good]), np.array([all_]))
        assert many.length.tolist() == [int(each.length[0]) for each in single]


# --- Formula: enumeration of all outcomes -------------------------------------------------------------------------------

CHAINS = [Iid(0.7), Iid(0.0), Iid(1.0), ByPosition([0.9, 0.2, 0.6, 0.8, 0.5, 0.3, 0.7]), Markov(0.6, 0.5), Markov(0.6, -0.4)]


def sequences(law: Chain, positions: int) -> tuple[Bools, NDArray[np.float64]]:
    """All sequences of outcomes, shape (positions, sequences), and their probabilities."""
    rows = np.array(list(itertools.product((False, True), repeat=positions)), dtype=np.bool_).reshape(2**positions, positions).T
    low, high = law.probabilities(positions)
    chance = np.ones(rows.shape[1])
    for place, row in enumerate(rows):
        success = np.where(rows[place - 1], high[place], low[place]) if place else np.full(len(chance), low[0])
        chance = chance * np.where(row, success, 1 - success)
    return rows, chance


def means(tally: Tally, chance: NDArray[np.float64]) -> list[float]:
    """Mean and variance of the time, means of the others."""
    mean = float(tally.time @ chance)
    others = (float(values @ chance) for values in (tally.busy, tally.operations, tally.rounds, tally.drafted))
    return [mean, float(((tally.time - mean) ** 2) @ chance), *others]


def uneven(longest: int) -> RoundPrices:
    """Arbitrary prices by drafted tokens."""
    prices = [[1.0, 1.5, 1.7, 2.9, 3.1, 3.3], [1.0, 1.1, 2.5, 2.6, 4.0, 4.1], [1.0, 8.0, 3.0, 4.5, 9.0, 2.0]]
    return RoundPrices(*np.array(prices)[:, : longest + 1])


@pytest.mark.parametrize("law", CHAINS)
@pytest.mark.parametrize(("first", "longest"), [(1, 1), (1, 2), (2, 4), (3, 3), (4, 5)])
def test_moments_of_the_heuristic_equal_enumeration(law: Chain, first: int, longest: int) -> None:
    for tokens in (1, 2, 4, 7):
        rows, chance = sequences(law, tokens)
        tally = varying(Heuristic(first, longest, len(chance)), tokens, outcomes_of_rows(rows), uneven(longest))
        found = adaptive.heuristic_moments(first, longest, tokens, law, uneven(longest))
        assert list(found) == pytest.approx(means(tally, chance), abs=1e-12)


@pytest.mark.parametrize("law", CHAINS)
@pytest.mark.parametrize("doubt", [(0.2, 0.7), (0.7, 0.2), (0.3, 0.3), (0, 0), (1, 1), (0, 1), (1, 0)])
@pytest.mark.parametrize("longest", [1, 2, 4])
def test_means_with_confidence_stops_equal_enumeration(law: Chain, doubt: tuple[float, float], longest: int) -> None:
    low, high = min(doubt), max(doubt)
    both = 1 if doubt[1] > doubt[0] else 2  # meaning of the draws between the two probabilities
    codes = {0: 1 - high, both: high - low, 3: low}
    for tokens in (1, 2, 5):
        rows, chance = sequences(law, tokens - 1)
        stops = list(itertools.product(codes, repeat=tokens - 1))
        doubts = np.array(stops, dtype=np.uint8).reshape(len(stops), tokens - 1).T
        together = np.kron(chance, [math.prod(codes[code] for code in stop) for stop in stops]).astype(np.float64)
        accept = np.repeat(rows, len(stops), axis=1)
        unsure = np.tile(doubts, (1, len(chance)))
        tally = varying(Constant(longest, len(together)), tokens, outcomes_of_rows(accept), uneven(longest), unsure)
        found = adaptive.confidence_moments(longest, tokens, law, TwoClass(*doubt), uneven(longest))
        expected = means(tally, together)
        assert [found.time, *found[2:]] == pytest.approx([expected[0], *expected[2:]], abs=1e-12)
        assert math.isnan(found.variance)


@pytest.mark.parametrize("law", [*CHAINS, Rounds([0.9, 0.5, 0.4])])
@pytest.mark.parametrize("tokens", [1, 2, 6, 7])
def test_policies_without_choice_have_the_moments_of_fixed_drafts(law: Any, tokens: int) -> None:
    one = adaptive.heuristic_moments(1, 1, tokens, law, uneven(1))
    assert list(one) == pytest.approx(list(moments(1, tokens, law, uneven(1))), abs=1e-12)
    if tokens < 7:
        whole, sure = moments(3, tokens, law, uneven(3)), adaptive.confidence_moments(3, tokens, law, TwoClass(0, 0), uneven(3))
        assert [sure.time, *sure[2:]] == pytest.approx([whole.time, *whole[2:]], abs=1e-12)


def test_independent_rounds() -> None:
    """One draw per round, at its first position, decides how many tokens are accepted."""
    law = Rounds([0.8, 0.5, 0.3])
    grid = (np.arange(10) + 0.5) / 10
    choices = np.array(list(itertools.product(grid, repeat=4))).T
    tally = varying(Heuristic(1, 3, choices.shape[1]), 5, law.drafts(iter([choices])), uneven(3))
    found = adaptive.heuristic_moments(1, 3, 5, law, uneven(3))
    assert list(found) == pytest.approx(means(tally, np.full(choices.shape[1], 1e-4)), abs=1e-11)


def test_recorded_outcomes_are_averaged() -> None:
    rows = np.random.default_rng(1).random((7, 20)) < 0.6
    law = Replay(rows)
    tally = varying(Heuristic(2, 5, 7), 18, outcomes_of_rows(rows.T), uneven(5))
    found = adaptive.heuristic_moments(2, 5, 18, law, uneven(5))
    assert list(found) == pytest.approx(means(tally, np.full(7, 1 / 7)))
    whole = adaptive.heuristic_moments(2, 5, 6, ReplayRounds([[2, 0, 1, 2, 0, 1]]), uneven(5))
    assert whole.rounds == 2  # 2 of 2, then both of the next draft, which is cut from 4 to 2
    unknown: Any = object()
    with pytest.raises(ParameterError, match="no closed form"):
        adaptive.heuristic_moments(2, 5, 6, unknown, uneven(5))


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_recorded_probabilities_are_averaged_over_records_and_draws(tokens: int) -> None:
    law = RecordedProbabilities([[0.9, 0.2, 1.0, 0.5, 0.3, 0.8, 0.6, 0.7], [0.4, 0.0, 0.6, 0.9, 0.7, 1.0, 0.1, 0.5]])
    ways = [sequences(chain, tokens) for chain in law.chains]
    rows, chance = np.concatenate([rows for rows, _ in ways], axis=1), np.concatenate([chance for _, chance in ways]) / 2
    for first, longest in ((1, 4), (3, 3)):
        tally = varying(Heuristic(first, longest, len(chance)), tokens, outcomes_of_rows(rows), uneven(longest))
        found = adaptive.heuristic_moments(first, longest, tokens, law, uneven(longest))
        assert list(found) == pytest.approx(means(tally, chance), abs=1e-12)
        still = varying(Constant(longest, len(chance)), tokens, outcomes_of_rows(rows), uneven(longest))
        assert list(moments(longest, tokens, law, uneven(longest))) == pytest.approx(means(still, chance), abs=1e-12)


def test_prediction_equals_the_mean_of_the_walk() -> None:
    cost = UnitCost(4, cost_ratio=0.3, link=0.5, operations_ratio=0.2, verify_cost=((1, 1.0), (9, 1.5)))
    rows, chance = sequences(Iid(0.6), 8)
    for placement, units in (("colocated", 1), ("separate", 2)):
        parameters = parameters_of("heuristic", placement=placement, draft_length=2)
        prices = round_prices(cost, 6, separate=units == 2)
        tally = varying(parameters.initial_policy(len(chance)), 8, outcomes_of_rows(rows), prices)
        found = adaptive.predict(parameters, 8, Iid(0.6), cost)
        values = [found.latency, found.latency_variance, found.busy, found.operations, found.rounds, found.drafted]
        assert [float(np.asarray(value)) for value in values] == pytest.approx(means(tally, chance))
        assert (float(found.units), float(found.plain_latency)) == (units, 32)
        assert float(found.units_ratio) == 1 if units == 1 else math.isnan(found.units_ratio)


def test_variance_is_zero_for_certain_outcomes_and_never_negative() -> None:
    prices = round_prices(UnitCost(7, cost_ratio=0.1), 9)
    for rate, tokens, longest in itertools.product((0.0, 1.0), (50, 111, 223), (1, 4, 9)):
        assert 0 <= adaptive.heuristic_moments(1, longest, tokens, Iid(rate), prices).variance < 1e-6
    found = adaptive.predict(parameters_of("heuristic"), 1, Iid(0.5), UnitCost(4, cost_ratio=0.25))
    assert {value.dtype for value in (found.latency, found.units, found.plain_latency)} == {np.dtype(np.float64)}


def test_unknown_values_of_the_theory_are_nan() -> None:
    cost = UnitCost(4, cost_ratio=0.3)
    laws: dict[str, Any] = {"accept": Replay([[True] * 9]), "confidence": TwoClass(0.1, 0.5)}
    for found in (*(adaptive.predict(parameters_of(policy), 8, Iid(0.6), cost) for policy in ONLINE_POLICIES),
                  adaptive.predict(parameters_of("confidence"), 8, laws, cost)):  # fmt: skip
        for value in (found.latency, found.latency_variance, found.busy, found.units_ratio):
            assert math.isnan(value)
        assert found.operations is None
        assert (found.rounds, found.drafted, float(found.plain_latency), float(found.units)) == (None, None, 32, 1)
    known = adaptive.predict(parameters_of("confidence"), 8, {**laws, "accept": Iid(0.5)}, cost)
    assert np.isfinite([known.latency, known.busy, known.latency_variance]).tolist() == [True, True, False]
    with pytest.raises(ParameterError, match="tokens must be"):
        adaptive.predict(parameters_of("heuristic"), 0, Iid(0.6), cost)


# --- The bound ----------------------------------------------------------------------------------------------------------


class Arbitrary(Policy):
    """Draft lengths that follow from the history in an arbitrary way."""

    def __init__(self, seed: int, longest: int, count: int) -> None:
        super().__init__(seed % (longest + 1), count)
        self.seed, self.longest = seed, longest
        self.past = np.full(count, seed, dtype=np.int64)

    def learn(self, which: Any, accepted: Whole, drafted: Whole) -> None:
        self.past[which] = (self.past[which] * 31 + 7 * accepted + drafted + self.seed) % 1009
        self.length[which] = self.past[which] * 17 % (self.longest + 1)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 9), st.integers(0, 10**6))
def test_no_policy_exceeds_the_oracle_bound(rate: float, ratio: float, tokens: int, seed: int) -> None:
    """Exactly, over all sequences: the mean time is at least (1 - alpha + c alpha) per token."""
    rows, chance = sequences(Iid(rate), tokens)
    bound = tokens * (1 - rate + ratio * rate)
    assert bound == pytest.approx(tokens / float(oracle_speedup(rate, ratio)) if bound else 0)
    prices = round_prices(UnitCost(1, cost_ratio=ratio), 6)
    for policy in [*(parameters_of(name).initial_policy(len(chance)) for name in POLICIES), Arbitrary(seed, 6, len(chance))]:
        tally = varying(policy, tokens, outcomes_of_rows(rows), prices)
        assert float(tally.time @ chance) >= bound * (1 - 1e-12) - 1e-12


@given(st.floats(0, 0.999), st.floats(0.01, 1))
def test_no_mixture_of_lengths_exceeds_the_oracle_bound(rate: float, ratio: float) -> None:
    bound = float(oracle_speedup(rate, ratio)) * (1 + 1e-12)
    for shares in (adaptive.heuristic_lengths(rate, 30), adaptive.biased_lengths(rate, ratio, 30)):
        speed = float(adaptive.speedup_of_lengths(rate, shares, ratio))
        assert speed <= bound
        assert speed <= float(speedup(rate, optimal_draft_length(rate, ratio, longest=30), ratio)) * (1 + 1e-12)


def test_largest_gain_of_the_oracle() -> None:
    """The maximum over alpha is 1.565 at c = .05, and e/(e - 1) as c approaches 0."""
    gains = adaptive.oracle_gain(np.linspace(0, 0.999, 1000), 0.05)
    assert (round(float(gains.max()), 3), round(float(np.linspace(0, 0.999, 1000)[gains.argmax()]), 2)) == (1.565, 0.96)
    assert float(gains.min()) >= 1
    peaks = [float(adaptive.oracle_gain(1 - ratio * np.linspace(0.1, 3, 200), ratio).max()) for ratio in (0.05, 1e-2, 1e-3, 1e-4)]
    assert peaks == sorted(peaks)
    assert 1.58 < peaks[-1] < math.e / (math.e - 1)


def test_a_higher_acceptance_rate_may_take_longer() -> None:
    """Unlike fixed drafts, an adaptive policy may be led to draft too much, so monotonicity must not be asserted."""
    rows = np.array(list(itertools.product((False, True), repeat=7))).T
    for policy in ("heuristic", "optimum", "gradient"):
        own = {} if policy == "heuristic" else {"believed_cost_ratio": 0.25}
        time = dict(zip(map(tuple, rows.T.tolist()), twin(parameters_of(policy, draft_length=1, **own), 8, rows).time, strict=True))
        raised = [(outcome, (*outcome[:i], True, *outcome[i + 1 :])) for outcome in time for i in range(7) if not outcome[i]]
        assert any(time[better] > time[worse] for worse, better in raised)


# --- Exact output -------------------------------------------------------------------------------------------------------

WORDS = 2


def target(text: tuple[int, ...]) -> tuple[float, ...]:
    """Distribution of the next token in the target."""
    first = (0.2, 0.7, 0.45, 0.9)[hash(text) % 4]
    return first, 1 - first


def drafts(text: tuple[int, ...]) -> tuple[float, ...]:
    """Distribution of the next token in the draft model."""
    first = (0.6, 0.35, 0.8)[hash(text) % 3]
    return first, 1 - first


class Fate:
    """One run through a tree of random choices: follows a list, takes the first branch after it, and multiplies probabilities."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.open, self.chance, self.at = script, list[int](), 1.0, 0

    def pick(self, odds: tuple[float, ...]) -> int:
        """A branch; those of probability 0 are left out."""
        live = [index for index, odd in enumerate(odds) if odd > 0]
        which = self.script[self.at] if self.at < len(self.script) else 0
        self.script[self.at :] = [which] if self.at == len(self.script) else self.script[self.at :]
        self.open[self.at :] = [len(live)]
        self.at += 1
        self.chance *= odds[live[which]]
        return live[which]


class Below:
    """A uniform number from [0, 1) that only answers whether it is below another."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    def __lt__(self, bound: float) -> bool:
        inside = min(bound, 1.0)
        return self.fate.pick((inside, 1 - inside)) == 0


def written(parameters: Parameters, tokens: int, fate: Fate) -> tuple[int, ...]:
    """Output of one run."""
    texts: dict[str, list[int]] = {"target": [], "draft": []}
    out: list[int] = []
    steps = decode(parameters, [0], tokens)
    answer: Any = None
    while len(out) < tokens:
        step: Any = steps.send(answer)
        answer = None
        if isinstance(step, Forward):
            held = texts[step.role]
            held[step.at :] = step.tokens
            answer = step.role, tuple(held), len(step.tokens)
        elif isinstance(step, Read):
            answer = _answer(step, fate)
        else:
            out += step.tokens
    return tuple(out)


def _law(output: Any, offset: int) -> tuple[float, ...]:
    role, held, _ = output
    text = held[: len(held) + offset + 1]
    return target(text) if role == "target" else drafts(text)


def _answer(step: Read, fate: Fate) -> Any:
    law = _law(step.output, step.offset)
    if step.kind == "uniform":
        return Below(fate)
    if step.kind in ("probability", "confidence"):
        assert step.token is not None
        return law[step.token]
    if step.kind == "residual":
        rest = [max(p - q, 0.0) for p, q in zip(law, _law(step.against, -1), strict=True)]
        law = tuple(each / sum(rest) for each in rest)
    return fate.pick(law)


def output_law(parameters: Parameters, tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every output, by enumeration of all runs."""
    found: dict[tuple[int, ...], float] = {}
    script: list[int] = []
    while True:
        fate = Fate(script)
        out = written(parameters, tokens, fate)
        found[out] = found.get(out, 0.0) + fate.chance
        while script and script[-1] + 1 == fate.open[len(script) - 1]:
            script.pop()
        if not script:
            return found
        script[-1] += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_output_has_the_targets_distribution(policy: str) -> None:
    own = {"confidence_threshold": 0.5} if policy == "confidence" else {"draft_length": 2}
    found = output_law(parameters_of(policy, max_draft_length=3, sampled=True, **own), 4)
    assert len(found) == WORDS**4
    for text in found:
        expected = math.prod(target((0, *text[:place]))[token] for place, token in enumerate(text))
        assert found[text] == pytest.approx(expected, abs=1e-14)


# --- Parameters and scenarios -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"policy": "gradiant"}, "unknown policy 'gradiant'; did you mean gradient"),
        ({"max_draft_length": 0}, "max_draft_length must be between 1 and 250, got 0"),
        ({"max_draft_length": 251}, "max_draft_length must be between 1 and 250, got 251"),
        ({"policy": "heuristic", "step": 1.0}, "step is not used by policy 'heuristic'; leave it out, or choose one of gradient"),
        ({"policy": "optimum", "step": 1.0}, "step is not used by policy 'optimum'"),
        ({"policy": "heuristic", "estimator": "tested"}, "choose one of gradient, optimum"),
        ({"policy": "heuristic", "min_draft_length": 1}, "min_draft_length is not used"),
        ({"policy": "confidence", "draft_length": 3}, "choose one of gradient, optimum, heuristic"),
        ({"policy": "confidence", "believed_cost_ratio": 0.3}, "believed_cost_ratio is not used"),
        ({"confidence_threshold": 0.3}, "confidence_threshold is not used by policy 'gradient'"),
        ({"policy": "confidence", "confidence_threshold": 0.0}, "confidence_threshold must be above 0 and at most 1, got 0"),
        ({"policy": "confidence", "confidence_threshold": 1.1}, "confidence_threshold must be between 0 and 1, got 1.1"),
        ({"estimator": "all"}, "unknown estimator 'all'"),
        ({"draft_length": 21}, "draft_length must be between 1 and max_draft_length=20, got 21"),
        ({"draft_length": 0}, "draft_length must be between 1 and max_draft_length=20, got 0"),
        ({"policy": "heuristic", "draft_length": 0}, "draft_length must be between 1 and max_draft_length=20, got 0"),
        ({"min_draft_length": 21}, "min_draft_length must be between 0 and max_draft_length=20, got 21"),
        ({"min_draft_length": -1}, "min_draft_length must be between 0 and max_draft_length=20, got -1"),
        ({"prior_tested": 0.0, "prior_accepted": 0.0}, "prior_tested must be above 0 and at least prior_accepted=0, got 0"),
        ({"prior_tested": 0.5}, "prior_tested must be above 0 and at least prior_accepted=1, got 0.5"),
        ({"prior_accepted": -1.0}, "prior_accepted must be at least 0, got -1"),
        ({"step": -1.0}, "step must be"),
        ({"believed_cost_ratio": -0.1}, "believed_cost_ratio must be"),
        ({"sampled": 1}, "sampled must be true or false, got 1"),
        ({"placement": "here"}, "unknown placement 'here'"),
    ],
)
def test_invalid_parameters_are_refused(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as found:
        Parameters(**{"layers": 4, "policy": "gradient", **own})
    assert message in str(found.value)


def test_defaults_are_as_documented() -> None:
    plain = {policy: Parameters(4, policy) for policy in POLICIES}
    assert [plain[policy].first for policy in POLICIES] == [5, 5, 5, 20]
    assert [OPTIONS[policy].get("draft_length") for policy in POLICIES] == [5, 5, 5, None]
    assert (plain["confidence"].option("confidence_threshold"), plain["gradient"].option("step")) == (0.4, 10)
    names = "min_draft_length", "estimator", "prior_accepted", "prior_tested"
    assert [plain["optimum"].option(name) for name in names] == [1, "tested", 1, 2]
    assert Parameters(4, "heuristic", 3).first == 3
    assert Parameters(4, "optimum", min_draft_length=7).first == 7
    assert Parameters(4, "optimum", min_draft_length=0, draft_length=0, believed_cost_ratio=0.5).first == 0
    assert (Parameters(4, "optimum").units, Parameters(4, "optimum", placement="separate").units) == (1, 2)
    assert (plain["optimum"].longest_draft, plain["optimum"].largest_pass) == (20, 21)
    told = Parameters(4, "gradient", believed_cost_ratio=0.3)
    cost = UnitCost(4, cost_ratio=0.1)
    assert told.with_costs(cost) is told
    assert plain["gradient"].with_costs(cost).believed_cost_ratio == 0.1
    assert plain["heuristic"].with_costs(cost) is plain["heuristic"]
    for policy in ONLINE_POLICIES:
        with pytest.raises(ParameterError, match=f"believed_cost_ratio is required by policy '{policy}'"):
            plain[policy].initial_policy(1)


def test_the_estimate_stays_without_drafts() -> None:
    parameters = parameters_of("optimum", min_draft_length=0, believed_cost_ratio=0.9)
    work = counted(parameters, 9, [True] * 9, [0] * 9)
    # The first draft of five is accepted: (1 + 5)/(2 + 5) is below .9, so drafting stops.
    assert work.rounds == {(5, 5): 1, (0, 0): 3}


def tables(policy: str, **outcomes: Any) -> dict[str, Any]:
    """A scenario with one method."""
    method = {"name": "adaptive", "layers": 4, "policy": policy}
    laws = {"accept": {"kind": "iid", "acceptance_rate": 0.7}, **outcomes}
    return {"scenario": {"name": "x", "tokens": 8}, "method": [method], "outcomes": laws, "cost": {"cost_ratio": 0.25}}


DOUBT = {"kind": "two-class", "low_if_accepted": 0.1, "low_if_rejected": 0.7}


def test_only_the_policy_confidence_needs_confidence_outcomes() -> None:
    with pytest.raises(ParameterError, match=r"\[outcomes.confidence\] is missing"):
        cases.resolve(tables("confidence"))
    with pytest.raises(ParameterError, match=r"\[outcomes.confidence\] is used by no method"):
        cases.resolve(tables("gradient", confidence=DOUBT))
    with pytest.raises(ParameterError, match=r"low_if_rejected must be between 0 and 1, got 1\.5"):
        cases.resolve(tables("confidence", confidence={**DOUBT, "low_if_rejected": 1.5}))
    with pytest.raises(ParameterError, match="low_if_accepted must be between 0 and 1, got -1"):
        cases.resolve(tables("confidence", confidence={**DOUBT, "low_if_accepted": -1}))
    assert cases.resolve(tables("gradient")).parameters.believed_cost_ratio == 0.25
    case = cases.resolve(tables("confidence", confidence=DOUBT))
    assert case.outcomes["confidence"].further_values == {"low_if_rejected": 0.7}


def test_simulated_doubts_follow_the_draws() -> None:
    case = cases.resolve(tables("confidence", confidence=DOUBT))
    random_draws = np.concatenate([tile[:, :3].copy() for tile in random_streams.tiles(0, "confidence", 0, 8)])
    for world, coin in zip(evaluation.worlds_of(case, 0, 3), random_draws.T, strict=True):
        assert [code & 1 for code in world.doubts] == (coin < 0.7).astype(int).tolist()
        assert [code >> 1 for code in world.doubts] == (coin < 0.1).astype(int).tolist()
    world = World(1, 4, doubts=[0, 1, 2, 3])
    for place, (wrong, right) in enumerate([(1, 1), (0, 1), (1, 0), (0, 0)]):
        output = Forward("draft", (place,), place, LayerSpan(0, 1))
        answers = [world.read(Read("confidence", output, token=token)) for token in (-9, place + 1)]
        assert answers == [wrong, right]


def test_properties_of_default_parameters() -> None:
    assert parameters_of("heuristic").sampled is False
    assert all(parameters_of(policy).exact is True for policy in POLICIES)


@pytest.mark.parametrize(("confidence", "drafts"), [(0.3, 1), (0.4, 3), (0.5, 3)])
def test_a_draft_stops_below_the_threshold_and_not_at_it(confidence: float, drafts: int) -> None:
    steps = decode(parameters_of("confidence", confidence_threshold=0.4, max_draft_length=3), [0], 9)
    passes, answer = 0, None
    while True:
        step = steps.send(answer)
        if isinstance(step, Forward) and step.role == "target":
            break
        passes += isinstance(step, Forward)
        answer = confidence if isinstance(step, Read) and step.kind == "confidence" else -1
    assert passes == drafts


def test_costs_of_choices_are_made_once_for_all_laws() -> None:
    """Points that are predicted one by one come in any order."""
    made: list[Any] = []

    class Noted(VariedCosts):
        def __getitem__(self, index: Any) -> Any:
            made.append(index)
            return super().__getitem__(index)

    costs = Noted(UnitCost(6, cost_ratio=0.2), {"cost_ratio": np.array([0.25, 0.5])})
    groups = GroupedChoices([ChoiceGroup(Parameters(6, "heuristic"), 8, costs)])
    laws = [Iid(0.25), Iid(0.5)]
    found = predict_separately(adaptive.predict, PredictionPoints(groups, laws, np.array([1, 0, 0, 1]), np.array([0, 0, 1, 1])))
    assert made == [0, 1]
    pairs = (1, 0), (0, 0), (0, 1), (1, 1)
    alone = [adaptive.predict(Parameters(6, "heuristic"), 8, laws[law], costs[cost]) for cost, law in pairs]
    assert found.latency.tolist() == [float(each.latency) for each in alone]
