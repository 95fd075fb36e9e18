"""Exact moments of decodings in rounds: counts of rounds where their times are alike, else a recursion over positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.prediction import PredictionPoints
from model.methods.rounds.prices_of_rounds import ReadingTimes, RoundPrices
from model.methods.rounds.round_laws import AcceptanceLaw, MixedRounds, ReplayRounds
from model.methods.rounds.round_starts import RoundDecoding, RoundSteps, StartTimes
from model.methods.rounds.round_walks import Tally, fixed
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Chain, Floats, RecordedProbabilities, Replay
from model.outcomes.round_counts import RoundCounts, RoundTimes


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
    reached = [each.survival for each in decodings]
    alike = np.array([each is not None for each in reached], dtype=np.bool_)[decoding]
    uniform = np.array([each.uniform and reading is None for each, reading in prices], dtype=np.bool_)[price]
    other = np.flatnonzero(~alike)
    if other.size:
        pairs = zip(decoding[other].tolist(), price[other].tolist(), strict=True)
        choices = [_choice(decodings[one], *prices[which]) for one, which in pairs]
        found[:, other] = np.array(_moments_by_position(choices)).T
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for number in np.unique(decoding[alike]).tolist():
        each = decodings[number]
        groups.setdefault((each.draft_length, each.tokens, each.cut), []).append(number)
    place = np.full(len(decodings), -1)
    for shape, numbers in groups.items():
        place[:] = -1
        place[numbers] = np.arange(len(numbers))
        survival = np.stack([known for known in (reached[number] for number in numbers) if known is not None])
        here = alike & (place[decoding] >= 0)
        for index, moments_of in ((np.flatnonzero(here & uniform), _of_counts), (np.flatnonzero(here & ~uniform), _of_times)):
            if index.size:
                used, which = np.unique(price[index], return_inverse=True)
                mine = [prices[each] for each in used.tolist()]
                found[:, index] = moments_of(survival, mine, place[decoding[index]], which, *shape)
    return Moments(*found)


def moments_of_prediction(
    points: PredictionPoints[Any], prices: Sequence[tuple[RoundPrices, ReadingTimes | None]]
) -> Moments:
    """Moments at points, with the prices of each choice; decodings that differ in their prices only are evaluated together."""
    kinds = [(each.parameters.draft_length, each.tokens, each.parameters.cut) for each in points.choices]
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    kind = np.array([distinct[each] for each in kinds], dtype=np.intp)
    choice, law, index = points.pairs()
    keys, decoding = np.unique(kind[choice] * len(points.laws) + law, return_inverse=True)
    listed = [*distinct]
    decodings = []
    for key in keys.tolist():
        (length, tokens, cut), of = listed[key // len(points.laws)], points.laws[key % len(points.laws)]
        decodings.append(RoundDecoding(length, tokens, of, cut))
    return Moments(*(each[index] for each in moments_of_points(decodings, prices, decoding, choice)))


def _choice(decoding: RoundDecoding, prices: RoundPrices, reading: ReadingTimes | None) -> RoundChoice:
    return RoundChoice(decoding.draft_length, decoding.tokens, decoding.law, prices, decoding.cut, reading)


_PAIRS = 20_000
"""Pairs that are priced together."""


def _of_counts(
    survival: Floats, prices: Sequence[tuple[RoundPrices, ReadingTimes | None]], law: NDArray[np.intp], price: NDArray[np.intp],
    longest: int, tokens: int, cut: bool,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that do not depend on the position: rounds are counted once for all prices."""
    counts = round_counts.counts_of(longest, tokens, survival)
    taken = np.arange(longest + 1) if cut else np.full(longest + 1, longest)  # drafted tokens that are paid for
    time, busy, operations = (
        np.stack([getattr(each, name)[taken] for each, _ in prices]) for name in ("time", "busy", "operations")
    )
    found = np.empty((len(Moments._fields), law.size))
    for at in range(0, law.size, _PAIRS):
        part = slice(at, at + _PAIRS)
        own, mine = RoundCounts(*(each[law[part]] for each in counts)), price[part]
        mean, variance = round_counts.priced(own, time[mine])
        spent = (np.einsum("pk,pk->p", own.mean, each[mine]) for each in (busy, operations))
        found[:, part] = mean, variance, *spent, own.mean.sum(axis=1), own.mean @ taken
    return found


def _of_times(
    survival: Floats, prices: Sequence[tuple[RoundPrices, ReadingTimes | None]], law: NDArray[np.intp], price: NDArray[np.intp],
    longest: int, tokens: int, cut: bool,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that depend on the position, or on the tokens that were accepted before."""
    start = np.arange(tokens)
    drafted = np.minimum(longest, tokens - 1 - start) if cut else np.full(tokens, longest)
    each = [_times_by_accepted(*of, drafted) for of in prices]
    ends = round_counts.chain_ends(longest, tokens, survival)
    times = RoundTimes(*(
        [by_start[: len(end.accepted)] for by_start, end in zip(np.stack(column, axis=-1), ends, strict=True)]
        for column in zip(*each, strict=True)
    ))  # fmt: skip
    mass = round_counts.start_masses(ends)
    operations = np.stack([of.operations[drafted] for of, _ in prices]) @ mass
    mean, variance, busy = round_counts.timed(ends, times, law, price)
    return np.stack([mean, variance, busy, operations[price, law], mass.sum(axis=0)[law], (drafted @ mass)[law]])


def _times_by_accepted(prices: RoundPrices, reading: ReadingTimes | None, drafted: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Time and unit-time of a round from each position, by accepted tokens, with what these add to the round that follows."""
    tokens, longest = drafted.size, len(prices.operations) - 1
    start, accepted = np.arange(tokens)[:, None], np.arange(longest + 1)
    following = start + 1 + accepted
    follows, after = following < tokens, np.minimum(following, tokens - 1)
    whole = follows & (accepted == np.minimum(longest, tokens - 1 - start)) & (accepted > 0)
    found = []
    for name in ("time", "busy"):
        values = getattr(prices, name)
        usual, late = (values[drafted],) * 2 if prices.uniform else values[:, np.arange(tokens), drafted]
        times = usual[:, None] + np.where(whole, (late - usual)[after], 0.0)
        if reading is not None:
            times = times + np.where(follows, getattr(reading, name)[after, accepted], 0.0)
        found.append(np.broadcast_to(times, (tokens, longest + 1)))
    return found[0], found[1]


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
        elif isinstance(law, MixedRounds):
            found[index] = mixed(moments_of_many([choice._replace(law=each) for each in law.levels]), law.weights)
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
        where: Any = own if each.prices.uniform else (slice(None), np.arange(each.tokens), own)
        time[..., : each.tokens, index], busy[..., : each.tokens, index] = each.prices.time[where], each.prices.busy[where]
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
    """Moments of a mixture of decodings, by default equally likely; `weights` sum to 1.

    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)])[:2]
    (2.0, 4.0)
    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)], (0.75, 0.25))[:2]
    (1.5, 3.25)
    """
    time, variance, *rest = np.array(parts).T
    if weights is None:
        return Moments(float(time.mean()), float(variance.mean() + time.var()), *(float(values.mean()) for values in rest))
    by = np.asarray(weights)
    mean = float(by @ time)
    return Moments(mean, float(by @ variance + by @ (time - mean) ** 2), *(float(by @ values) for values in rest))


def mean_of(tally: Tally) -> Moments:
    """Moments over equally likely decodings."""
    means = tally.busy, tally.operations, tally.rounds, tally.drafted
    return Moments(float(tally.time.mean()), float(tally.time.var()), *(float(values.mean()) for values in means))
