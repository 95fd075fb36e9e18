"""Laws of rounds, the vectorised walk and its moments, compared with a plain Python loop over single decodings."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.account import Account
from model.methods import registry
from model.methods.rounds import round_moments, rounds_of_batches, timed_starts
from model.methods.rounds.prices_of_rounds import (
    ReadingTimes,
    RoundCells,
    RoundPrices,
    drafted_by_start,
    operations_of,
    prices_by_start,
    round_prices,
)
from model.methods.rounds.round_laws import MixedRounds, ReplayRounds, Rounds
from model.methods.rounds.round_moments import RoundChoice, moments, moments_of_many, moments_of_points
from model.methods.rounds.round_starts import RoundDecoding, starts, starts_of_laws
from model.methods.rounds.round_walks import Tally, fixed
from model.methods.rounds.timed_starts import KnownStarts, RoundStarts
from model.methods.speculative import batch_sizes, static_batches
from model.outcomes import round_counts
from model.outcomes.outcome_laws import ByPosition, Iid, Law, Markov, Replay
from tests.support.position_costs import growing

FLAT = RoundPrices(*np.ones((3, 9)))
EASY, HARD = Rounds([0.9, 0.8, 0.7, 0.7]), Rounds([0.9, 0.3, 0.2, 0.0])
Floats = NDArray[np.float64]


def walked(gamma: int, tokens: int, survivors: list[int]) -> list[tuple[int, int]]:
    """Accepted and drafted tokens of each round, given the accepted tokens of a draft from each position."""
    found, at = [], 0
    while at < tokens:
        length = min(gamma, tokens - 1 - at)
        found.append((min(survivors[at], length) if length else 0, length))
        at += found[-1][0] + 1
    return found


def tiles(draws: Floats, rows: int = 3) -> Iterator[Floats]:
    """Yield random draws by position in tiles that reuse one buffer, as the random streams do."""
    buffer = np.empty((rows, draws.shape[1]))
    for start in range(0, len(draws), rows):
        tile = buffer[: len(draws) - start]
        tile[:] = draws[start : start + rows]
        yield tile


def random_draws(positions: int, replications: int = 7) -> Floats:
    return np.random.default_rng(positions).random((positions, replications))


def refused(message: str) -> Any:
    return pytest.raises(ParameterError, match=f"^{message}")


# --- Laws of rounds ---


def test_survival_is_the_cumulative_product_of_rates() -> None:
    assert Rounds.by_draft_position([0.5, 0.5, 0.0, 1.0]).survival.tolist() == [0.5, 0.25, 0.0, 0.0]
    assert Rounds([1.0, 1.0]).survival.tolist() == [1.0, 1.0]
    assert Rounds([]).survival.tolist() == []


@pytest.mark.parametrize(
    ("survival", "message"),
    [
        ([0.5, 0.6], r"survival must be a list of non-increasing probabilities, got \[0.5, 0.6\]"),
        ([[0.5]], r"survival must be a list of non-increasing probabilities, got \[\[0.5\]\]"),
        ([1.1], r"survival\[0\] must be between 0 and 1, got 1.1"),
        ([0.5, -0.1], r"survival\[1\] must be between 0 and 1, got -0.1"),
    ],
)
def test_increasing_or_impossible_survival_is_refused(survival: Any, message: str) -> None:
    with refused(message):
        Rounds(survival)
    with refused(r"acceptance_rates\[1\] must be between 0 and 1, got 1.5"):
        Rounds.by_draft_position([0.1, 1.5])
    with refused(r"acceptance_rates\[0\] must be between 0 and 1, got -0.5"):
        Rounds.by_draft_position([-0.5])


def test_shared_rate_has_the_moments_of_its_beta_distribution() -> None:
    for rate, concentration in ((Fraction(4, 5), 10), (Fraction(1, 2), 1), (Fraction(1, 4), 40)):
        a, b, want, moment = rate * concentration, (1 - rate) * concentration, [], Fraction(1)
        for i in range(4):
            moment *= (a + i) / (a + b + i)
            want.append(float(moment))
        assert Rounds.shared_rate(float(rate), concentration, 4).survival == pytest.approx(want, rel=1e-14)
    assert Rounds.shared_rate(0.3, 0, 3).survival.tolist() == [0.3, 0.3, 0.3]
    assert Rounds.shared_rate(0.0, 1, 2).survival.tolist() == [0.0, 0.0]
    assert Rounds.shared_rate(1.0, 1, 2).survival.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((-0.1, 1), "acceptance_rate must be between 0 and 1, got -0.1"),
        ((1.1, 1), "acceptance_rate must be between 0 and 1, got 1.1"),
        ((0.5, -1), "concentration must be finite and at least 0, got -1|concentration must be at least 0, got -1"),
    ],
)
def test_impossible_shared_rates_are_refused(given_: tuple[float, float], message: str) -> None:
    with refused(message):
        Rounds.shared_rate(*given_, 3)


def test_accepted_tokens_are_the_survival_probabilities_above_the_draw() -> None:
    law, draws = Rounds([0.9, 0.5, 0.5, 0.1]), random_draws(7)
    draws[0, :4] = 0.9, 0.5, 0.1, 0.0
    for longest in (0, 1, 3, 4, 6):
        want = (law.survival[:longest] > draws[..., None]).sum(axis=-1)
        assert law.survivors(tiles(draws), longest).tolist() == want.tolist()


def test_the_draw_at_the_first_position_decides_the_whole_round() -> None:
    law, draws = Rounds([0.9, 0.6, 0.3]), random_draws(5, 4)
    first = (law.survival > draws[0, :, None]).sum(axis=-1)
    second = (law.survival > draws[2, :, None]).sum(axis=-1)
    outcomes = law.drafts(tiles(draws))
    place = np.zeros(4, dtype=np.uint8)
    assert next(outcomes)(place).tolist() == (first > 0).tolist()
    assert next(outcomes)(place + 1).tolist() == (first > 1).tolist()
    mixed = np.array([0, 2, 0, 2], dtype=np.uint8)  # two of the four start a new round
    now = np.where(mixed == 0, second, first)
    assert next(outcomes)(mixed).tolist() == (mixed < now).tolist()
    assert next(outcomes)(np.where(mixed == 0, 1, 3).astype(np.uint8)).tolist() == (np.where(mixed == 0, 1, 3) < now).tolist()


def test_draft_chances_multiply_to_survival() -> None:
    for survival in ([0.9, 0.45, 0.45], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]):
        low, high = Rounds(survival).draft_probabilities(4, 3)
        assert low.shape == high.shape == (4, 4)
        for rates in (*low, *high):
            assert np.cumprod(rates[:3]) == pytest.approx(survival, abs=1e-15)
            assert rates[3] == 0
    assert Rounds([0.9, 0.45]).draft_probabilities(1, 1)[0].tolist() == [[0.9, 0.0]]
    with refused("acceptance must be known for each of draft_length=3 positions in a draft, got 2"):
        Rounds([0.9, 0.45]).draft_probabilities(1, 3)


# --- Recorded rounds ---


def test_a_replication_replays_one_record() -> None:
    records = [[2, 0, 1, 5], [3, 2, 1, 0], [0, 0, 0, 1]]
    first = [0.0, 0.33, 0.34, 0.66, 0.67, 0.99]
    draws = np.tile(first, (4, 1))
    draws[1:] = 0.5  # only the first draw chooses the record
    law, which = ReplayRounds(records), [0, 0, 1, 1, 2, 2]
    for longest in (0, 2, 9):
        want = [[min(records[record][position], longest) for record in which] for position in range(4)]
        assert law.survivors(tiles(draws, 2), longest).tolist() == want
    outcome = next(law.drafts(tiles(draws, 2)))
    assert outcome(np.zeros(6, dtype=np.uint8)).tolist() == [records[record][0] > 0 for record in which]
    with refused("records must cover more than 4 output positions; take fewer tokens"):
        law.survivors(tiles(np.tile(first, (5, 1)), 2), 2)


@pytest.mark.parametrize("records", [[], [[]], [1, 2], [[[1]]]])
def test_records_of_wrong_shape_are_refused(records: Any) -> None:
    with refused("records must be lists of accepted lengths, all of one length of at least 1"):
        ReplayRounds(records)


@pytest.mark.parametrize(("records", "message"), [([[1, -1]], r"records\[0, 1\] must be at least 0"), ([[0.5]], "records")])
def test_records_that_are_no_lengths_are_refused(records: Any, message: str) -> None:
    with refused(message):
        ReplayRounds(records)
    assert ReplayRounds([[0]]).records.tolist() == [[0]]


# --- The walk ---


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    gamma, tokens = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 3, 5, 8, 31, 32, 33, 40, 64, 65, 100]))
    seed, count = draw(st.integers(0, 2**32)), draw(st.integers(1, 3))
    most = draw(st.sampled_from([1, 3, 8]))
    return gamma, tokens, np.random.default_rng(seed).integers(0, most + 1, (count, tokens)).tolist()


@given(walks())
def test_walk_equals_a_loop_over_single_decodings(walk: tuple[int, int, list[list[int]]]) -> None:
    gamma, tokens, records = walk
    rng = np.random.default_rng(tokens)
    prices = RoundPrices(*rng.integers(1, 50, (3, gamma + 1)).astype(np.float64))
    count = len(records)
    draws = np.tile((np.arange(count) + 0.5) / count, (tokens, 1))
    tally = fixed(gamma, tokens, ReplayRounds(records).drafts(tiles(draws)), prices, count)
    runs = [walked(gamma, tokens, record) for record in records]
    assert tally.rounds.tolist() == [len(run) for run in runs]
    assert tally.drafted.tolist() == [sum(length for _, length in run) for run in runs]
    for found, price in zip(tally, prices, strict=False):
        assert found.tolist() == [sum(price[length] for _, length in run) for run in runs]
    assert [operations_of(Counter(run), prices) for run in runs] == tally.operations.tolist()
    kept = [accepted for run in runs for accepted, _ in run]
    assert tally.accepted.tolist() == [kept.count(accepted) for accepted in range(gamma + 1)]
    assert sum(kept) + len(kept) == tokens * count


def test_walk_reads_an_outcome_at_every_position_but_the_last() -> None:
    places: list[list[int]] = []

    def outcome(place: NDArray[np.uint8]) -> NDArray[np.bool_]:
        places.append(place.tolist())
        return np.array([True, False])

    tally = fixed(2, 6, iter([outcome] * 5), FLAT, 2)
    assert places == [[0, 0], [1, 0], [2, 0], [0, 0], [1, 0]]
    assert tally.rounds.tolist() == [2.0, 6.0]


def test_drafts_of_250_tokens_are_counted() -> None:
    prices = RoundPrices(np.arange(251.0), np.ones(251), np.full(251, 3.0))
    tally = fixed(250, 300, iter([lambda place: np.ones(1, dtype=np.bool_)] * 299), prices, 1)
    assert [values.tolist() for values in tally[:5]] == [[250.0 + 48], [2.0], [6.0], [2.0], [250.0 + 48]]
    assert tally.accepted[[48, 250]].tolist() == [1, 1]


# --- Prices ---


def test_round_prices_by_hand() -> None:
    cost = UnitCost(10, final_head=2.0, cost_ratio=0.25, link=5.0, verify_cost=((1, 2.0), (2, 3.0), (3, 7.0)))
    time, busy, operations = round_prices(cost, 2)
    assert time.tolist() == busy.tolist() == [12.0, 3.0 + 18.0, 6.0 + 42.0]
    time, busy, _ = round_prices(cost, 2, separate=True)
    assert busy.tolist() == [12.0, 21.0, 48.0]
    assert time.tolist() == [12.0, 31.0, 58.0]
    assert operations[0] == 1  # without drafts no ratio is needed
    assert np.isnan(operations[1:]).all()
    assert round_prices(replace(cost, operations_ratio=0.25), 2).operations.tolist() == [1.0, 2.25, 3.5]
    assert [len(prices) for prices in round_prices(UnitCost(1, cost_ratio=0.0), 0)] == [1, 1, 1]
    with refused("cost_ratio is required: the time of a pass of the draft model relative to the target"):
        round_prices(UnitCost(10), 1)


# --- Moments ---


def likely(law: Any, positions: int) -> Iterator[tuple[float, list[int]]]:
    """All possible outcomes of a law, as (probability, accepted tokens by start position)."""
    if isinstance(law, Rounds):
        ends = np.append(law.survival, 0.0)
        mass = np.append(1.0, ends[:-1]) - ends
        for lengths in itertools.product(range(len(mass)), repeat=positions):
            yield math.prod(mass[list(lengths)].tolist()), list(lengths)
        return
    low, high = law.probabilities(positions)
    for bits in itertools.product((0, 1), repeat=positions):
        chance, last = 1.0, 0
        for position, bit in enumerate(bits):
            success = (high if last else low)[position]
            chance, last = chance * (success if bit else 1 - success), bit
        run = [len(list(itertools.takewhile(bool, bits[position:]))) for position in range(positions)]
        yield chance, run


LAWS: list[Any] = [
    Iid(0.7), Iid(0.0), Iid(1.0), Markov(0.6, 0.5), Markov(0.5, -0.8), ByPosition([0.1, 0.9, 0.4, 0.7, 0.2, 0.8]),
    Rounds([0.8, 0.8, 0.1]), Rounds([0.5, 0.0, 0.0]),
]  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_moments_equal_enumeration_of_all_outcomes(law: Any, tokens: int, gamma: int) -> None:
    time, busy, operations = np.array([[1.0, 1.75, 4.0, 3.5], [1.0, 1.5, 2.25, 3.0], [1.0, 7.0, 5.0, 8.5]])[:, : gamma + 1]
    ways = [(chance, walked(gamma, tokens, [*run, 0])) for chance, run in likely(law, tokens - 1)]

    def mean(of: Any) -> float:
        return math.fsum(chance * of(run) for chance, run in ways)

    found = moments(gamma, tokens, law, RoundPrices(time, busy, operations))
    want = mean(lambda run: sum(time[length] for _, length in run))
    variance = mean(lambda run: (sum(time[length] for _, length in run) - want) ** 2)
    assert found.time == pytest.approx(want, rel=1e-13)
    assert found.variance == pytest.approx(variance, rel=1e-10, abs=1e-12)
    assert found.busy == pytest.approx(mean(lambda run: sum(busy[length] for _, length in run)), rel=1e-13)
    assert found.operations == pytest.approx(mean(lambda run: sum(operations[length] for _, length in run)), rel=1e-13)
    assert found.rounds == pytest.approx(mean(len), rel=1e-13)
    assert found.drafted == pytest.approx(mean(lambda run: sum(length for _, length in run)), rel=1e-13, abs=1e-13)


@given(st.floats(0, 1), st.integers(0, 6), st.integers(1, 60))
def test_variance_is_never_negative(rate: float, gamma: int, tokens: int) -> None:
    prices = RoundPrices(*np.full((3, gamma + 1), 0.1))
    assert moments(gamma, tokens, Iid(rate), prices).variance >= 0


@pytest.mark.parametrize(
    ("law", "survivors"),
    [
        (Replay([[True, True, False, True], [False, True, True, True]]), [[2, 1, 0, 1, 0], [0, 3, 2, 1, 0]]),
        (ReplayRounds([[2, 0, 1, 1, 0], [1, 2, 1, 0, 2]]), [[2, 0, 1, 1, 0], [1, 2, 1, 0, 2]]),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_moments_of_records_are_averages_over_records(law: Any, survivors: list[list[int]], tokens: int) -> None:
    time, busy, operations = np.array([[1.0, 1.75, 4.0], [1.0, 1.5, 2.25], [1.0, 7.0, 5.0]])
    runs = [walked(2, tokens, run) for run in survivors]
    times = [sum(time[length] for _, length in run) for run in runs]
    found = moments(2, tokens, law, RoundPrices(time, busy, operations))
    want = (
        np.mean(times), np.var(times), np.mean([sum(busy[length] for _, length in run) for run in runs]),
        np.mean([sum(operations[length] for _, length in run) for run in runs]),
        np.mean([len(run) for run in runs]), np.mean([sum(length for _, length in run) for run in runs]),
    )  # fmt: skip
    assert tuple(found) == pytest.approx(want, rel=1e-14)


def test_moments_refuse_an_unknown_law() -> None:
    class Other(Law):
        mean = variance = pmf = sample = None  # type: ignore[assignment]

    with refused(r"this law of outcomes has no closed form for drafts; ask for views = \['paths'\]"):
        moments(1, 2, Other(), FLAT)


def test_tally_fields() -> None:
    assert Tally._fields == ("time", "busy", "operations", "rounds", "drafted", "accepted")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(0, 5), st.booleans()), min_size=2, max_size=6))
def test_moments_of_many_equal_moments_of_each(asked: list[tuple[int, int, int, bool]]) -> None:
    laws = [Iid(0.3), Iid(1.0), Markov(0.6, 0.3), Rounds.by_draft_position([0.9, 0.4, 0.4, 0.1]), ByPosition([0.5] * 6 + [0.9] * 6),
            Replay([[True, False, True, True] * 3])]  # fmt: skip
    choices = [
        RoundChoice(length, tokens, laws[law], RoundPrices(*(np.arange(3.0)[:, None] + np.arange(1.0, length + 2))), cut)
        for length, tokens, law, cut in asked
    ]
    for together, choice in zip(moments_of_many(choices), choices, strict=True):
        alone = moments(choice.draft_length, choice.tokens, choice.law, choice.prices, cut=choice.cut)
        assert list(together) == pytest.approx(list(alone), rel=1e-12, abs=1e-12)


@given(
    st.integers(0, 5), st.integers(1, 14), st.lists(st.floats(0, 1), min_size=1, max_size=3), st.booleans(),
    st.lists(st.lists(st.floats(0.1, 9), min_size=6, max_size=6), min_size=1, max_size=3),
)  # fmt: skip
def test_counted_rounds_have_the_moments_of_rounds_position_by_position(
    length: int, tokens: int, rates: list[float], cut: bool, times: list[list[float]]
) -> None:
    """One rate at every position: rounds are counted once for all prices. The same rates by position: each price alone."""
    prices = [RoundPrices(*(np.array(each[: length + 1]) * factor for factor in (1.0, 2.0, 3.0))) for each in times]
    decoding, price = (each.reshape(-1) for each in np.meshgrid(range(len(rates)), range(len(times)), indexing="ij"))
    found = moments_of_points(
        [RoundDecoding(length, tokens, Iid(rate), cut) for rate in rates], [(each, None) for each in prices], decoding, price
    )
    for at, (own, mine) in enumerate(zip(decoding.tolist(), price.tolist(), strict=True)):
        alone = moments(length, tokens, ByPosition([rates[own]] * tokens), prices[mine], cut=cut)
        assert [float(each[at]) for each in found] == pytest.approx(list(alone), rel=1e-9, abs=1e-9)


@given(st.integers(1, 4), st.integers(1, 9), st.floats(0, 1))
def test_counts_of_rounds_are_those_of_all_outcomes(length: int, tokens: int, rate: float) -> None:
    """By enumeration of the accepted tokens of a draft at each position."""
    mean, square = np.zeros(length + 1), np.zeros((length + 1, length + 1))

    def visit(at: int, chance: float, counts: Floats) -> None:
        if at == tokens:
            mean[:] += chance * counts
            square[:] += chance * np.outer(counts, counts)
            return
        drafted = min(length, tokens - 1 - at)
        for accepted in range(drafted + 1):
            own = rate**accepted * (1 - rate if accepted < drafted else 1)
            if own:
                visit(at + accepted + 1, chance * own, counts + np.eye(length + 1)[drafted])

    visit(0, 1.0, np.zeros(length + 1))
    found = round_counts.counts_of(length, tokens, rate ** np.arange(1.0, length + 1)[None])
    assert found.mean[0] == pytest.approx(mean, abs=1e-12)
    assert found.square[0] == pytest.approx(square, abs=1e-11)


@given(st.integers(0, 4), st.integers(1, 9), st.lists(st.floats(0, 1), min_size=1, max_size=3), st.booleans(), st.booleans(),
       st.integers(0, 2**32))  # fmt: skip
def test_times_by_position_have_the_moments_of_a_chain(
    length: int, tokens: int, rates: list[float], cut: bool, read: bool, seed: int
) -> None:
    """With one rate at every position only the start positions are tracked; a chain of the same rates tracks outcomes too."""
    random = np.random.default_rng(seed)
    drafts = (np.minimum(length, tokens - 1 - np.arange(tokens)) if cut else np.full(tokens, length)) > 0
    prices = []
    for _ in range(2):
        times = random.uniform(0.5, 2, (2, 2, tokens, length + 1))
        if read:  # what is added for accepted tokens is not added after a complete draft once more
            times[:, 1] = times[:, 0]
        more = random.uniform(0, 1, (2, tokens, length + 1)) * (np.arange(length + 1) > 0) * drafts[:, None]
        prices.append((RoundPrices(*times, np.arange(1.0, length + 2)), ReadingTimes(*more) if read else None))
    decoding, price = (each.reshape(-1) for each in np.meshgrid(range(len(rates)), range(2), indexing="ij"))
    found, chains = (
        moments_of_points([RoundDecoding(length, tokens, law, cut) for law in laws], prices, decoding, price)
        for laws in ([Iid(rate) for rate in rates], [ByPosition([rate] * tokens) for rate in rates])
    )
    for one, other in zip(found, chains, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@given(
    st.integers(0, 4), st.integers(1, 9), st.lists(st.floats(0, 1), min_size=1, max_size=3), st.booleans(), st.integers(0, 2**32)
)
def test_means_alone_are_those_with_variances(length: int, tokens: int, rates: list[float], alike: bool, seed: int) -> None:
    """Of pairs in any order; without a variance where only means are asked."""
    random = np.random.default_rng(seed)
    time = random.uniform(0.5, 2, (3, 2, tokens, length + 1))
    prices = RoundPrices(time, time if alike else 2 * time, random.uniform(1, 2, (3, length + 1)))
    laws = [Iid(rate) for rate in rates]
    law, price = random.integers(0, len(laws), 8), random.integers(0, 3, 8)
    means = random.uniform(size=8) < 0.5
    whole, some = (
        round_moments.moments_of_pairs(length, tokens, True, laws, prices, None, law, price, asked) for asked in (None, means)
    )
    for name, one, other in zip(whole._fields, whole, some, strict=True):
        if name == "variance":
            assert (np.isnan(other) == means).all()
            one, other = one[~means], other[~means]
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)  # variances are differences of mean squares


COSTS = st.builds(
    lambda prompt, link, devices: growing(3, draft=0.3, prompt=prompt, link=link, draft_devices=devices),
    st.integers(0, 20), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
)  # fmt: skip


@given(
    COSTS | st.just(UnitCost(3, cost_ratio=0.25, link=0.5, verify_cost=((1, 1.0), (18, 3.0)))), st.integers(0, 5),
    st.integers(1, 9), st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_prices_by_start_are_those_of_the_drafted_tokens(
    cost: StepCosts, longest: int, tokens: int, cut: bool, separate: bool, sequences: int
) -> None:
    every = round_prices(cost, longest, tokens=tokens, separate=separate, sequences=sequences)
    found = prices_by_start(cost, longest, tokens=tokens, cut=cut, separate=separate, sequences=sequences)
    drafted = drafted_by_start(longest, tokens, cut)
    assert drafted.tolist() == [min(longest, tokens - 1 - start) if cut else longest for start in range(tokens)]
    expected = every if cost.uniform else every.by_start(drafted)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)
    joint = many_costs.joined([cost, cost])
    several = prices_by_start(joint, longest, tokens=tokens, cut=cut, separate=separate, sequences=sequences)
    for one, other in zip(several, found, strict=True):
        np.testing.assert_allclose(one, [other] * 2, rtol=1e-13)
    if not cost.uniform:
        assert found.by_start(drafted) is found
        for after, start in itertools.product((0, 1), range(tokens)):
            assert expected.time[after, start] == every.time[after, start, drafted[start]]


def test_unit_time_of_equal_devices_is_time_next_to_costs_of_others() -> None:
    """Equal to the last bit, so that the ratio of both is known: of rounds by start and of static batches."""
    costs = [growing(3, draft=0.3, prompt=7, draft_devices=devices) for devices in (1.0, 0.0, 0.5)]
    joint = many_costs.joined(costs)
    cells = rounds_of_batches.cells_of(3, (40, 30))
    batch = static_batches._prices_of_cells(joint, 3, 2, cells, batch_sizes.BatchFamily(), separate=False)
    for prices in prices_by_start(joint, 3, tokens=40), batch:
        assert round_moments.units_alike(prices).tolist() == [True, False, False]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.sampled_from([[0.5], [0.25], [0.5, 0.25]])), max_size=9))
def test_known_starts_are_those_of_each_number_of_positions(asked: list[tuple[int, int, list[float]]]) -> None:
    """In any order of lengths, laws and numbers of positions, to the last bit."""
    known = KnownStarts()
    for longest, tokens, rates in asked:
        survival = np.array(rates)[:, None] ** np.arange(1, longest + 1)
        expected = round_counts.start_masses(round_counts.chain_ends(longest, tokens, survival))
        np.testing.assert_array_equal(known.masses(longest, tokens, survival), expected)


@pytest.mark.parametrize("by_accepted", [False, True])
@given(st.integers(0, 3), st.integers(1, 7), st.lists(st.floats(0, 1), min_size=1, max_size=2), st.integers(0, 2**32))
def test_timed_starts_are_those_of_all_paths(by_accepted: bool, longest: int, tokens: int, rates: list[float], seed: int) -> None:
    """Times that depend on the start, and on whether, or on how many, tokens were accepted just before."""
    random = np.random.default_rng(seed)
    survival = np.cumprod(random.uniform(0, 1, (len(rates), longest)) * np.array(rates)[:, None], axis=1)
    prices = random.uniform(0.5, 2, (2, 2, tokens))
    reading = random.uniform(0, 1, (2, tokens, longest + 1)) if by_accepted else None
    timed = RoundStarts.of(longest, tokens, survival, by_accepted=by_accepted)
    times = timed.times(prices, reading)

    def time_of(price: int, start: int, before: int | None) -> float:
        found = float(prices[price, int(before == longest and longest > 0), start])
        return found if reading is None else found + float(reading[price, start, before or 0])

    def paths(law: int, price: int, start: int, before: int | None) -> Iterator[tuple[float, float]]:
        """Probability and time of each way to go on from a round."""
        if start >= tokens:
            yield 1.0, 0.0
            return
        drafted = min(longest, tokens - 1 - start)
        reached = [1.0, *survival[law, :drafted].tolist(), 0.0]
        for accepted in range(drafted + 1):
            for chance, rest in paths(law, price, start + 1 + accepted, accepted):
                yield (reached[accepted] - reached[accepted + 1]) * chance, time_of(price, start, before) + rest

    for law, price in itertools.product(range(len(rates)), range(2)):
        chance, time = np.array([*paths(law, price, 0, None)]).T
        pair = np.array([law] * 2), np.array([price] * 2)
        assert timed.mean(times, *pair) == pytest.approx([chance @ time] * 2, rel=1e-12)
        assert timed.square(times, *pair) == pytest.approx([chance @ time**2] * 2, rel=1e-12)
    law, price = random.integers(0, len(rates), 5), random.integers(0, 2, 5)
    one = [timed.square(times, law[at : at + 1], price[at : at + 1])[0] for at in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_starts, "_TOGETHER", 2)
        assert timed.square(times, law, price) == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("by_accepted", [False, True])
@given(
    st.integers(0, 4), st.sets(st.integers(1, 12), min_size=1, max_size=5), st.booleans(), st.sampled_from([1, 2, 500]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_timed_starts_of_lengths_are_those_of_each(
    by_accepted: bool, longest: int, tokens: set[int], cut: bool, block: int, seed: int
) -> None:
    """Also in blocks of pairs and of points."""
    random, lengths = np.random.default_rng(seed), np.array(sorted(tokens))
    survival = np.cumprod(random.uniform(0, 1, (3, longest)), axis=1)
    prices = random.uniform(0.5, 2, (2, 2, lengths[-1], longest + 1))  # by start and drafted tokens
    more = random.uniform(0, 1, (2, lengths[-1], longest + 1, longest + 1))
    law, price, length = (random.integers(0, size, 20) for size in (3, 2, lengths.size))

    def figures(of: Any, law: Any, price: Any, length: Any) -> list[Any]:
        timed = RoundStarts.of(longest, of, survival, cut=cut, by_accepted=by_accepted)
        cells = timed.cells
        reading = more[:, cells.start, cells.drafted] if by_accepted else None
        times = timed.times(prices[..., cells.start, cells.drafted], reading)
        counts, which = timed.counts(law, length)
        return [timed.mean(times, law, price, length), timed.square(times, law, price, length), *counts[:, which]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_starts, "_TOGETHER", block)
        patch.setattr(timed_starts, "_POINTS", block)
        together = np.array(figures(lengths, law, price, length))
    for number, each in ((number, int(lengths[number])) for number in np.unique(length)):
        mine = length == number
        alone = figures(each, law[mine], price[mine], np.zeros_like(law[mine]))
        np.testing.assert_allclose(together[:, mine], alone, rtol=1e-11, atol=1e-13)


@given(st.integers(0, 4), st.sets(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32))
def test_moments_of_lengths_by_cell_are_those_of_each(longest: int, tokens: set[int], cut: bool, seed: int) -> None:
    """With prices by cell; without a variance where only means are asked."""
    random, lengths = np.random.default_rng(seed), np.array(sorted(tokens))
    time, busy = random.uniform(0.5, 2, (2, 3, 2, lengths[-1], longest + 1))
    operations, laws = random.uniform(1, 2, (3, longest + 1)), [Iid(0.6), MixedRounds([EASY, HARD], [1, 2]), HARD]
    law, price, length = (random.integers(0, size, 12) for size in (3, 3, lengths.size))
    means = random.uniform(size=12) < 0.5

    def found(of: Any, mine: Any, own: Any) -> Any:
        cells = RoundCells.of(longest, of, cut)
        prices = RoundPrices(*(each[..., cells.start, cells.drafted] for each in (time, busy)), operations)
        pairs = law[mine], price[mine], means[mine], own
        return round_moments.moments_of_pairs(longest, of, cut, laws, prices, None, *pairs)

    whole = np.array(found(lengths, np.arange(12), length))
    assert (np.isnan(whole[1]) == means).all()
    for number, each in ((number, int(lengths[number])) for number in np.unique(length)):
        mine = np.flatnonzero(length == number)
        np.testing.assert_allclose(whole[:, mine], np.array(found(each, mine, None)), rtol=1e-11, atol=1e-11)


@given(st.integers(0, 4), st.integers(1, 12), st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_starts_of_laws_are_those_of_chains(longest: int, tokens: int, rates: list[float]) -> None:
    """With one rate at every position, also those after a completely accepted draft."""
    found = starts_of_laws(longest, tokens, [Iid(rate) for rate in rates])
    for index, rate in enumerate(rates):
        alone = starts(longest, tokens, ByPosition([rate] * tokens))
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one[:, index], other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("method", "table", "expected"),
    [("speculative", {}, 3.5 + 3.5 + 1), ("self_speculative", {"exit_layer": 4}, 3 + 3 + 1),
     ("self_speculative", {"exit_layer": 4, "reuse": False}, 4 + 4 + 1)],
)  # fmt: skip
def test_predicted_operations_are_those_of_the_rounds(method: str, table: dict[str, Any], expected: float) -> None:
    """Drafts of two tokens are all accepted: of 7 tokens, two rounds draft two and one drafts none."""
    parameters = registry.parameters(method)(layers=8, draft_length=2, **table)
    cost = UnitCost(8, cost_ratio=0.1, operations_ratio=0.25)
    assert float(registry.method(method).predict(parameters, 7, Iid(1.0), cost).operations) == pytest.approx(expected)
    counted = registry.method(method).operations
    assert counted is not None
    assert counted(parameters, cost, {(2, 2): 2, (0, 0): 1}, Account()) == pytest.approx(expected)


def test_operations_of_an_unknown_draft_matter_where_it_drafts() -> None:
    parameters, cost = registry.parameters("speculative")(layers=8, draft_length=2), UnitCost(8, cost_ratio=0.1)
    predict = registry.method("speculative").predict
    assert float(predict(parameters, 1, Iid(0.5), cost).operations) == 1
    assert np.isnan(predict(parameters, 2, Iid(0.5), cost).operations)
