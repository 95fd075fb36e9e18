"""Exact moments of decodings in rounds: counts of rounds where their times are alike, else a recursion over positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.prediction import DecodingPoints, Prediction, PredictionPoints, linear, predict_by_decoding
from model.methods.rounds.prices_of_rounds import ReadingTimes, RoundCells, RoundPrices
from model.methods.rounds.round_laws import AcceptanceLaw, MixedRounds, ReplayRounds, Rounds
from model.methods.rounds.round_starts import RoundDecoding, RoundSteps, StartTimes, survival_of
from model.methods.rounds.round_walks import Tally, fixed
from model.methods.rounds.timed_starts import KnownStarts, RoundStarts
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Chain, Floats, Iid, RecordedProbabilities, Replay
from model.outcomes.round_counts import PricesOfRounds


class Moments(NamedTuple):
    """Mean and variance of the time; means of unit-time, arithmetic, rounds and drafted tokens; of one decoding or arrays."""

    time: Any
    variance: Any
    busy: Any
    operations: Any
    rounds: Any
    drafted: Any


class RoundChoice(NamedTuple):
    """Arguments of `moments` for one decoding."""

    draft_length: int
    tokens: int
    law: AcceptanceLaw
    prices: RoundPrices
    cut: bool = True
    """True if the last drafts are cut to the remaining tokens."""
    reading: ReadingTimes | None = None


def moments(draft_length: int, tokens: int, law: AcceptanceLaw, prices: RoundPrices, *, cut: bool = True) -> Moments:
    """Exact moments of `fixed`, by a forward recursion over (start position of a round, outcome before it).

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> round(moments(3, 128, Iid(0.79), RoundPrices(flat, flat, flat)).rounds, 3)  # 128 / 2.907 is 44.030
    44.446
    """
    return moments_of_many([RoundChoice(draft_length, tokens, law, prices, cut)])[0]


def moments_of_many(choices: Sequence[RoundChoice]) -> list[Moments]:
    """Moments of many decodings, computed together (`moments_of_points`)."""
    found = [RoundDecoding(each.draft_length, each.tokens, each.law, each.cut) for each in choices]
    keys = [(each.draft_length, each.tokens, id(each.law), each.cut) for each in choices]
    decodings, prices = dict(zip(keys, found, strict=True)), {(id(each.prices), id(each.reading)): each for each in choices}
    of_decodings, of_prices = ({key: index for index, key in enumerate(each)} for each in (decodings, prices))
    joined = moments_of_points(
        [*decodings.values()], [(each.prices, each.reading) for each in prices.values()],
        np.array([of_decodings[key] for key in keys], dtype=np.intp),
        np.array([of_prices[id(each.prices), id(each.reading)] for each in choices], dtype=np.intp),
    )  # fmt: skip
    return [Moments(*values) for values in zip(*(each.tolist() for each in joined), strict=True)]


def moments_of_points(
    decodings: Sequence[RoundDecoding], prices: Sequence[tuple[RoundPrices, ReadingTimes | None]],
    decoding: NDArray[np.intp], price: NDArray[np.intp],
) -> Moments:  # fmt: skip
    """Moments of pairs of decodings and prices, as arrays of shape (pairs,).

    Where rounds are independent and their times do not depend on the position, rounds are counted once for all prices
    (`model.outcomes.round_counts`).

    Parameters
    ----------
    decodings, prices
        Distinct decodings, and distinct prices with what they add for reading accepted tokens.
    decoding, price
        Index of each pair's decoding and prices.
    """
    found = np.empty((len(Moments._fields), decoding.size))
    shapes = [(each.draft_length, each.tokens, each.cut) for each in decodings]
    kinds = [(each.time.shape, reading is None) for each, reading in prices]
    for shape, kind in itertools.product(dict.fromkeys(shapes), dict.fromkeys(kinds)):
        own, mine = (np.array([each == one for each in of]) for of, one in ((shapes, shape), (kinds, kind)))
        index = np.flatnonzero(own[decoding] & mine[price])
        if not index.size:
            continue
        laws = [decodings[each].law for each in np.flatnonzero(own).tolist()]
        each_price, each_reading = zip(*(prices[each] for each in np.flatnonzero(mine).tolist()), strict=True)
        joined = RoundPrices(*(np.stack(column) for column in zip(*each_price, strict=True)))
        reading = None if kind[1] else ReadingTimes(*(np.stack(column) for column in zip(*each_reading, strict=True)))
        law, which = (np.cumsum(some) - 1 for some in (own, mine))
        longest, tokens, cut = shape
        own_law, own_price = law[decoding[index]], which[price[index]]
        found[:, index] = moments_of_pairs(longest, tokens, cut, laws, joined, reading, own_law, own_price)
    return Moments(*found)


def moments_of_pairs(
    longest: int, tokens: ArrayLike, cut: bool, laws: Sequence[AcceptanceLaw], prices: RoundPrices, reading: ReadingTimes | None,
    law: NDArray[np.intp], price: NDArray[np.intp], means: NDArray[np.bool_] | None = None,
    length: NDArray[np.intp] | None = None, known_starts: KnownStarts | None = None,
) -> Moments:  # fmt: skip
    """Moments of pairs of laws and prices, the latter those of several costs; arrays of shape (pairs,).

    Of pairs of which only `means` are asked, the variance may be nan. `tokens` may be several numbers, which rise, with the index
    of each pair's in `length`. Then prices do not depend on the position, or they are by cell of these lengths (`RoundCells`) and
    rounds are independent, at least those of each level of a mixture. `known_starts` are those of other lengths.
    """
    lengths = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
    length = np.zeros_like(law) if length is None else length
    means = np.zeros(law.size, dtype=np.bool_) if means is None else means
    found = np.empty((len(Moments._fields), law.size))
    alike, mixture = (np.array([isinstance(each, kind) for each in laws], dtype=np.bool_) for kind in (Iid | Rounds, MixedRounds))
    for number in np.unique(law[mixture[law]]).tolist():  # the levels of each as laws
        mine, of = np.flatnonzero(law == number), laws[number]
        assert isinstance(of, MixedRounds)
        level, each = np.repeat(np.arange(len(of.levels)), mine.size), np.tile(mine, len(of.levels))
        pairs = of.levels, prices, reading, level, price[each], means[each], length[each]
        parts = np.array(moments_of_pairs(longest, lengths, cut, *pairs, known_starts)).reshape(len(found), -1, mine.size)
        found[:, mine] = mixed([Moments(*values) for values in parts.swapaxes(0, 1)], of.weights)
    other, index = np.flatnonzero(~(alike | mixture)[law]), np.flatnonzero(alike[law])
    if other.size:
        choices = []
        for one, which, count in zip(law[other].tolist(), price[other].tolist(), lengths[length[other]].tolist(), strict=True):
            read = None if reading is None else reading.of(which)
            choices.append(RoundChoice(longest, count, laws[one], prices.of(which), cut, read))
        found[:, other] = np.array(_moments_by_position(choices)).T
    if index.size:
        survival = survival_of([each for each, known in zip(laws, alike, strict=True) if known], longest)
        assert survival is not None
        own = (np.cumsum(alike) - 1)[law[index]], price[index], lengths, length[index]
        if prices.uniform and reading is None:
            found[:, index] = _of_counts(survival, prices, longest, cut, *own)
        else:
            found[:, index] = _of_times(survival, prices, reading, longest, cut, *own, means[index], known_starts)
    return Moments(*found)


PricesOf = Callable[[Any, NDArray[np.int64], StepCosts], tuple[RoundPrices, ReadingTimes | None]]
"""Prices of rounds with parameters and numbers of tokens, distinct and rising, at a cost or at each of several."""


def predict_rounds(
    points: PredictionPoints[Any], prices_of: PricesOf, ratio_of: Callable[[DecodingPoints[Any]], Floats],
    kinds: Callable[[Any], int] = lambda parameters: 2,
) -> Prediction:  # fmt: skip
    """Prediction at points of methods whose rounds draft `draft_length` tokens and verify them, computed together.

    The units' ratio is 1 where busy time equals time, else nan. `ratio_of` gives the operations of drafting a token relative to
    those of verifying it, at each point: a round with k drafted tokens has 1 + k (1 + ratio). `kinds` gives the number of kinds of
    rounds before a round by which its time differs.
    """

    known_starts = KnownStarts()

    def predict(of: DecodingPoints[Any]) -> Prediction:
        longest, cut, (lengths, length) = of.parameters.draft_length, of.parameters.cut, of.of_lengths()
        if of.lengths is not None and not of.cost.uniform:
            apart = np.array([not isinstance(each, Iid | Rounds | MixedRounds) for each in of.laws])[of.law]
            if apart.any():
                return of.one_length_each(predict, apart)
        prices, reading = prices_of(of.parameters, lengths, of.cost)
        found = moments_of_pairs(longest, lengths, cut, of.laws, prices, reading, of.law, of.price, of.means, length, known_starts)
        drafting = np.where(found.drafted > 0, found.drafted * ratio_of(of), 0.0)  # the ratio may be unknown where none is drafted
        found = found._replace(operations=found.rounds + found.drafted + drafting)
        alike = units_alike(prices)
        if of.lengths is not None and not of.cost.uniform:
            alike = _units_alike_by_length(prices, RoundCells.of(longest, lengths, cut))
        return prediction_of(of, found, alike)

    return predict_by_decoding(predict, points, kinds, together="always", last=lambda parameters: parameters.draft_length)


class _Times(Protocol):
    """Prices of rounds at several costs, the leading axis."""

    @property
    def time(self) -> Floats:
        """Time of a round."""

    @property
    def busy(self) -> Floats:
        """Its unit-time."""


def units_alike(prices: _Times) -> NDArray[np.bool_]:
    """True where unit-time equals time, by cost."""
    if prices.busy is prices.time:
        return np.ones(len(prices.time), dtype=np.bool_)
    return np.asarray((prices.time == prices.busy).reshape(len(prices.time), -1).all(axis=1))


def _units_alike_by_length(prices: RoundPrices, cells: RoundCells) -> NDArray[np.bool_]:
    """`units_alike` by cost and length, of prices by cell; shape (costs, lengths)."""
    same = (prices.time == prices.busy).all(axis=1)  # (costs, cells)
    first = np.cumsum(~same[:, : cells.whole], axis=1)
    other = np.concatenate([np.zeros((len(same), 1), dtype=np.int64), first], axis=1)[:, cells.until]
    return np.asarray((other == 0) & (cells.of_last(same) | (cells.last_starts < 0)).all(axis=1))


def prediction_of(points: DecodingPoints[Any], found: Moments, alike: NDArray[np.bool_]) -> Prediction:
    """Prediction at points from the moments of their decodings; `alike` as of `units_alike`, or by cost and length."""
    units = np.full(points.law.size, float(points.parameters.units))
    ratio = np.where(alike, 1.0, np.nan)[points.price if alike.ndim == 1 else (points.price, points.of_lengths()[1])]
    times = found.time, found.variance, found.busy, ratio, units, points.plain_times()
    return Prediction(*times, found.rounds, found.drafted, found.operations)


def _of_counts(
    survival: Floats, prices: RoundPrices, longest: int, cut: bool, law: NDArray[np.intp], price: NDArray[np.intp],
    lengths: NDArray[np.int64], length: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that do not depend on the position: rounds are counted once for all prices."""
    taken = np.arange(longest + 1) if cut else np.full(longest + 1, longest)  # drafted tokens that are paid for
    by_drafted = PricesOfRounds(prices.time[:, taken], prices.busy[:, taken], prices.operations[:, taken], taken)
    return round_counts.moments_of_pairs(lengths, round_counts.cut_ends(longest, survival), by_drafted, law, length, price)


def _of_times(
    survival: Floats, prices: RoundPrices, reading: ReadingTimes | None, longest: int, cut: bool,
    law: NDArray[np.intp], price: NDArray[np.intp], lengths: NDArray[np.int64], length: NDArray[np.intp],
    means: NDArray[np.bool_], known_starts: KnownStarts | None,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that depend on the position, or on the tokens that were accepted before."""
    starts = RoundStarts.of(longest, lengths, survival, cut=cut, by_accepted=reading is not None, known=known_starts)
    own = prices.by_start(starts.cells.drafted)
    time = starts.times(own.time, None if reading is None else reading.time)
    mean = busy = starts.mean(time, law, price, length)
    if own.busy is not own.time:
        busy = starts.mean(starts.times(own.busy, None if reading is None else reading.busy), law, price, length)
    variance = np.full(law.size, np.nan)
    asked = np.flatnonzero(~means)
    if asked.size:
        square = starts.square(time, law[asked], price[asked], length[asked])
        variance[asked] = np.maximum(square - mean[asked] ** 2, 0.0)
    rounds, which = starts.counts(law, length)
    operations = linear(rounds, prices.operations, which, price)
    number = (np.arange(longest + 1)[:, None] * rounds).sum(axis=0)
    return np.stack([mean, variance, busy, operations, rounds.sum(axis=0)[which], number[which]])


def _moments_by_position(choices: Sequence[RoundChoice]) -> list[Moments]:
    """Moments of decodings whose rounds are not independent and alike, position by position; chains are computed together."""
    found: dict[int, Moments] = {}
    chains: list[int] = []
    for index, choice in enumerate(choices):
        law = choice.law
        if isinstance(law, Replay | ReplayRounds):
            found[index] = _of_records(choice, law)
        elif isinstance(law, RecordedProbabilities):
            found[index] = mixed(moments_of_many([choice._replace(law=each) for each in law.chains]))
        elif isinstance(law, Chain):
            chains.append(index)
        else:
            raise checks.ParameterError("this law of outcomes has no closed form for drafts; ask for views = ['paths']")
    # Sorted, so that decodings of similar size are padded together.
    chains.sort(key=lambda index: (choices[index].tokens, choices[index].draft_length))
    while chains:
        last = choices[chains[-1]]
        size = max(_MOST_CELLS // (last.tokens * (last.draft_length + 1)), 1)
        chains, part = chains[:-size], chains[-size:]
        found |= zip(part, _moments_of_chains([choices[index] for index in part]), strict=True)
    return [found[index] for index in range(len(choices))]


_MOST_CELLS = 150_000
"""Largest number of cells (positions x draft positions x decodings) that are computed together: about 1 MB per array."""


def _moments_of_chains(choices: Sequence[RoundChoice]) -> list[Moments]:
    steps = RoundSteps([(each.draft_length, each.tokens, each.law) for each in choices])  # type: ignore[misc]
    lengths, cut = np.array([each.draft_length for each in choices]), np.array([each.cut for each in choices])
    drafted = np.where(cut, steps.count, lengths)
    uniform = all(each.prices.uniform for each in choices)
    shape = drafted.shape if uniform else (2, *drafted.shape)
    time, busy, operations = np.zeros(shape), np.zeros(shape), np.zeros(drafted.shape)
    longest, read = int(lengths.max()), any(each.reading is not None for each in choices)
    reading = np.zeros((2, steps.tokens, longest + 1, len(choices))) if read else None
    for index, each in enumerate(choices):
        if reading is not None and each.reading is not None:
            reading[:, : each.tokens, : each.draft_length + 1, index] = each.reading
        own = drafted[: each.tokens, index]
        price = RoundPrices(*(values[own] for values in each.prices)) if uniform else each.prices.by_start(own)
        time[..., : each.tokens, index], busy[..., : each.tokens, index] = price.time, price.busy
        operations[: each.tokens, index] = each.prices.operations[own]
    onward = None if reading is None else steps.onward(reading[0])
    visits = steps.forward(time, onward)
    mean, square = steps.sums(time, visits), _squares(steps, time, visits)
    spent = steps.sums(busy, visits)
    if reading is not None and onward is not None:
        mass, first = (steps.ended(each) for each in visits)
        mean = mean + (mass * onward).sum(axis=(0, 1))
        spent = spent + (mass * steps.onward(reading[1])).sum(axis=(0, 1))
        square = square + (onward * (2 * first + onward * mass)).sum(axis=(0, 1)) + _crossed(steps, time, onward, visits)
    rest = (spent, *(steps.sums(each, visits) for each in (operations, np.ones(drafted.shape), drafted)))
    totals = mean, np.maximum(square - mean**2, 0.0), *rest
    return [Moments(*values) for values in zip(*(each.tolist() for each in totals), strict=True)]


def _squares(steps: RoundSteps, time: Floats, visits: StartTimes) -> Floats:
    """Mean square of a decoding's time."""
    mass, first = visits.mass.sum(axis=1), visits.first.sum(axis=1)
    if time.ndim == 2:
        return np.asarray((time * (2 * first + time * mass)).sum(axis=0))
    usual, more = time[0], steps.after_whole(time[1] - time[0])
    whole, until = ((each * steps.whole).sum(axis=1) for each in visits)
    return np.asarray((usual * (2 * first + usual * mass) + more * (2 * until + (2 * usual + more) * whole)).sum(axis=0))


def _crossed(steps: RoundSteps, time: Floats, onward: Floats, visits: StartTimes) -> Floats:
    """Twice the mean product of a round's time and what is added for the tokens that it accepts; summed over rounds."""
    if time.ndim != 2:  # additional time by the accepted tokens and after a completely accepted draft exclude each other
        time = time[0]
    return np.asarray(2 * (time[:, None] * onward * steps.ended(visits.mass)).sum(axis=(0, 1)))


def _of_records(choice: RoundChoice, law: Replay | ReplayRounds) -> Moments:
    draws = draws_of_records(law, choice.tokens)
    outcomes, count = law.drafts(iter([draws])), draws.shape[1]
    return mean_of(
        fixed(choice.draft_length, choice.tokens, outcomes, choice.prices, count, cut=choice.cut, reading=choice.reading)
    )


def draws_of_records(law: Replay | ReplayRounds, tokens: int) -> Floats:
    """Random draws that select each record of a law once; shape (tokens - 1 or 1, records)."""
    count = law.count if isinstance(law, ReplayRounds) else len(law.records)
    return np.broadcast_to((np.arange(count) + 0.5) / count, (max(tokens - 1, 1), count))


def mixed(parts: Sequence[Moments], weights: Sequence[float] | None = None) -> Moments:
    """Moments of a mixture of decodings, or of arrays of them, by default equally likely; `weights` sum to 1.

    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)])[:2]
    (2.0, 4.0)
    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)], (0.75, 0.25))[:2]
    (1.5, 3.25)
    """
    by = np.full(len(parts), 1 / len(parts)) if weights is None else np.asarray(weights)
    time, variance, *rest = np.moveaxis(np.array(parts), 1, 0)

    def mean_of_parts(values: Floats) -> Any:
        return np.einsum("p,p...->...", by, values)

    mean = mean_of_parts(time)
    found = mean, mean_of_parts(variance) + mean_of_parts((time - mean) ** 2), *map(mean_of_parts, rest)
    return Moments(*(each if np.ndim(each) else float(each) for each in found))


def mean_of(tally: Tally) -> Moments:
    """Moments over equally likely decodings."""
    means = tally.busy, tally.operations, tally.rounds, tally.drafted
    return Moments(float(tally.time.mean()), float(tally.time.var()), *(float(values.mean()) for values in means))
