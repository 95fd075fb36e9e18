"""Decoding as a Markov walk over stages: a token's cost depends on the matches before it only through a small state.

Gives a method with stages its time and unit-time, in expectation under any law of matches and for many replications at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.prediction import PairBlock, linear, linear_until, pair_blocks
from model.outcomes.outcome_laws import Chain, Law, RecordedProbabilities, Replay

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Stage(NamedTuple):
    """Cost of one token, from the verification of the token before to its own verification.

    The first token and every token after a miss are decoded in stage 0; after a match in a stage the next token is in its
    `on_match`. `time` is that of the main process, `busy` the unit-time of all processes. If times depend on the position, both are
    arrays of shape (tokens,); of several costs (`model.costs.many_costs`) with a leading axis of costs.
    """

    time: float | Floats
    busy: float | Floats
    on_match: int


def by_position(steps: tuple[Stage, ...]) -> bool:
    """Return True if times depend on the position."""
    return any(np.ndim(value) for stage in steps for value in stage[:2])


def moments(steps: tuple[Stage, ...], n: int, law: Law) -> tuple[float, float, float, float]:
    """`moments_of_pairs` of one law at one cost."""
    one = np.zeros(1, dtype=np.intp)
    alone = tuple(Stage(np.asarray(time)[None], np.asarray(busy)[None], on_match) for time, busy, on_match in steps)
    mean, variance, spent, ratio = moments_of_pairs(alone, n, [law], one, one)[:, 0].tolist()
    return mean, variance, spent, ratio


def moments_of_pairs(
    steps: tuple[Stage, ...], tokens: int | Integers, laws: Sequence[Law], law: NDArray[np.intp], price: NDArray[np.intp],
    means: NDArray[np.bool_] | None = None,
) -> Floats:  # fmt: skip
    """Mean and variance of the time, mean unit-time, and mean ratio unit-time / time, of decoding `tokens`; shape (4, pairs).

    The ratio is nan if the number of matches does not determine the time (three stages, or times by position), unless the law is a
    record: the sum would have a term for each possible sequence of matches. Of pairs of which only `means` are asked, the variance
    may be nan, too.

    Parameters
    ----------
    steps
        Stages at several costs; times by position are those of the longest decoding.
    tokens
        Tokens of all pairs, or of each.
    laws, law, price
        Distinct laws, and the index of each pair's law and cost.
    """
    uniform = np.ndim(steps[0].time) == 1
    if uniform and len(steps) == 2:
        miss, match = (np.stack(stage[:2])[:, price] for stage in steps)
        return moments_of_counts(miss, match, tokens, laws, law)
    found = np.empty((4, law.size))
    lengths = np.broadcast_to(np.asarray(tokens, dtype=np.int64), law.shape)
    replayed = np.array([isinstance(each, Replay) for each in laws], dtype=np.bool_)[law]
    for at in np.flatnonzero(replayed).tolist():
        record: Any = laws[law[at]]
        n = int(lengths[at])
        until: Any = (price[at], ...) if uniform else (price[at], slice(n))
        own = tuple(Stage(stage.time[until], stage.busy[until], stage.on_match) for stage in steps)  # type: ignore[index]
        time, busy = sums(own, [record.first(n - 1).T], n, len(record.records))
        found[:, at] = time.mean(), time.var(), busy.mean(), (busy / time).mean()
    other, only = np.flatnonzero(~replayed), np.zeros(law.size, dtype=np.bool_) if means is None else means
    for part in _by_laws(law[other], int(lengths.max(initial=1))):
        some = other[part]
        own_tokens = tokens if isinstance(tokens, int) else tokens[some]
        found[:3, some] = _forward_moments(steps, own_tokens, laws, law[some], price[some], only[some])
    found[3, other] = np.nan
    return found


def _by_laws(law: NDArray[np.intp], n: int) -> Iterator[NDArray[np.intp]]:
    """Pairs in parts with a limited number of laws."""
    used, index = np.unique(law, return_inverse=True)
    size = max(_CHANCES // n, 1)
    for start in range(0, used.size, size):
        yield np.flatnonzero((index >= start) & (index < start + size))


_CHANCES = 1_000_000
"""Laws x tokens whose chances are held at once: 16 MB."""
_CELLS = 60_000
"""Numbers of matches x points of a block that stays in the cache of a processor."""


def moments_of_counts(
    miss: Floats, match: Floats, tokens: int | Integers, laws: Sequence[Law], law: NDArray[np.intp]
) -> Floats:  # fmt: skip
    """`moments` of many decodings with two stages at uniform costs, from the distribution of the number of matches.

    Parameters
    ----------
    miss, match
        Time and unit-time of a token in stage 0, and after a match; shape (2, points).
    tokens
        Tokens of all decodings, or of each.
    laws, law
        Distinct laws, and the index of each point's law.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = moments_of_counts(np.array([[4.0], [4.0]]), np.array([[2.0], [4.0]]), 2, [Iid(0.5)], np.zeros(1, dtype=np.intp))
    >>> found.T.round(6).tolist()  # one match or none: a time of 6 or 8, and a unit-time of 8
    [[7.0, 1.0, 8.0, 1.166667]]
    """
    found = np.empty((4, law.size))
    for part in _by_laws(law, int(np.max(tokens))):
        own = tokens if isinstance(tokens, int) else tokens[part]
        pmfs = _pmfs(own, laws, law[part])
        for length, points in _by_length(own, part.size):
            some = part[points]
            found[:, some] = _moments_of_counts(miss[:, some], match[:, some], length, pmfs, law[some])
    return found


def _pmfs(tokens: int | Integers, laws: Sequence[Law], law: NDArray[np.intp]) -> dict[int, Iterator[Floats]]:
    """By law, the distributions of the number of matches for its numbers of tokens, which rise."""
    size = int(np.max(tokens)) + 1
    used, length = np.divmod(np.unique(law * size + tokens), size)
    first = np.unique(used, return_index=True)[1]
    each = zip(used[first].tolist(), np.split(length - 1, first[1:]), strict=True)
    return {number: laws[number].pmfs(positions.tolist()) for number, positions in each}


def _by_length(tokens: int | Integers, points: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each number of tokens, with the indices of its points."""
    if isinstance(tokens, int):
        yield tokens, np.arange(points)
        return
    lengths, starts = np.unique(np.sort(tokens), return_index=True)
    yield from zip(lengths.tolist(), np.split(np.argsort(tokens, kind="stable"), starts[1:]), strict=True)


def _moments_of_counts(
    miss: Floats, match: Floats, tokens: int, pmfs: Mapping[int, Iterator[Floats]], law: NDArray[np.intp]
) -> Floats:  # fmt: skip
    used, law = np.unique(law, return_inverse=True)
    mass, count = np.stack([next(pmfs[each]) for each in used.tolist()]), np.arange(tokens)
    matches = mass @ count
    spread = (mass * (count - matches[:, None]) ** 2).sum(axis=1)
    start, saved = tokens * miss, match - miss
    time, busy = start + saved * matches[law]
    ratio = np.empty(law.size)
    size = max(_CELLS // tokens, 1)
    for at in range(0, law.size, size):
        part = slice(at, at + size)
        each_time, each_busy = start[:, part, None] + saved[:, part, None] * count
        ratio[part] = np.einsum("pc,pc->p", mass[law[part]], np.divide(each_busy, each_time, out=each_busy))
    return np.stack([time, spread[law] * saved[0] ** 2, busy, ratio])


def _forward_moments(
    steps: tuple[Stage, ...], tokens: int | Integers, laws: Sequence[Law], law: NDArray[np.intp], price: NDArray[np.intp],
    means: NDArray[np.bool_],
) -> Floats:  # fmt: skip
    """Mean and variance of the time and mean unit-time of `tokens` at several costs, shape (3, pairs).

    Forward recursions over the states (stage, last outcome), for each chain of a mixture. Means are sums of probability x time.
    What a token takes does not depend on the tokens after it, so one recursion serves all numbers of tokens.
    """
    used, law = np.unique(law, return_inverse=True)
    lengths = np.broadcast_to(np.asarray(tokens, dtype=np.int64), law.shape)
    chains = [_chains(laws[each]) for each in used.tolist()]
    sizes, longest = np.array([len(each) for each in chains]), np.zeros(used.size, dtype=np.int64)
    np.maximum.at(longest, law, lengths)
    # The last token's match has no effect, so its chance stays 0, as in the sampler. Shape (token, last outcome, chain).
    n = int(longest.max(initial=1))
    chances = np.zeros((n, 2, sizes.sum()))
    ends = np.repeat(longest, sizes).tolist()
    for number, (chain, end) in enumerate(zip((each for of in chains for each in of), ends, strict=True)):
        chances[: end - 1, :, number] = np.transpose(chain.probabilities(end - 1))
    # A column is a pair with one of its chains.
    first, count = np.cumsum([0, *sizes])[law], sizes[law]
    of = np.repeat(np.arange(law.size), count)
    chain_of, own_price = np.arange(of.size) - np.repeat(np.cumsum(count) - count - first, count), price[of]
    states = _States.of(tuple(stage.on_match for stage in steps))
    mass = states.masses(chances)
    extent = (np.shape(steps[0].time)[0], n)

    def total(counts: Floats, prices: Floats) -> Floats:
        """Sums of count x price by column; shapes (events, tokens, chains) and (costs, events, tokens)."""
        if isinstance(tokens, int):
            return linear(counts.reshape(-1, counts.shape[-1]), prices.reshape(len(prices), -1), chain_of, own_price)
        return linear_until(counts, prices, chain_of, own_price, lengths[of])

    times, busies = (
        np.stack([np.broadcast_to(np.reshape(stage[field], (extent[0], -1))[:, :n], extent) for stage in steps]) for field in (0, 1)
    )  # shape (stage, cost, token)
    counts = np.zeros((len(steps), n, mass.shape[-1]))
    np.add.at(counts, states.stage, mass)
    mean, busy = (total(counts, np.moveaxis(each, 1, 0)) for each in (times, busies))
    if states.independent(chances):  # the time is a sum of independent numbers
        saved = times[states.stage[1]] - times[0]
        variance = total((mass[0] * mass[1])[None], saved[:, None] ** 2)
    else:
        variance, asked = np.full(of.size, np.nan), np.flatnonzero(~means[of])
        variance[asked] = states.variances(times, chances, mass, own_price[asked], chain_of[asked], lengths[of[asked]])
    weight = 1 / count
    whole = weight * np.bincount(of, mean)
    spread = weight * np.bincount(of, variance + (mean - whole[of]) ** 2)
    return np.stack([whole, spread, weight * np.bincount(of, busy)])


_COLUMNS = 2000
"""Columns whose arrays of a token stay in the cache of a processor."""


class _States(NamedTuple):
    """States of a decoding: the first token or a miss before it, and a match before it in each stage that follows one."""

    stage: NDArray[np.intp]
    """Stage of each state; the first state is after a miss."""
    following: NDArray[np.intp]
    """State after a match in each state."""

    @staticmethod
    def of(on_match: tuple[int, ...]) -> _States:
        """States of stages with these numbers of the stages that follow a match."""
        after = [*dict.fromkeys(on_match)]
        stage = np.array([0, *after])
        return _States(stage, np.array([1 + after.index(on_match[each]) for each in stage.tolist()]))

    def independent(self, chances: Floats) -> bool:
        """True if the states of tokens are independent: there are two, after a miss and after a match, which are independent."""
        return self.stage.size == 2 and np.array_equal(chances[:, 0], chances[:, 1])

    def masses(self, chances: Floats) -> Floats:
        """Probability of each state at each token; shape (states, tokens, chains)."""
        found = np.zeros((self.stage.size, chances.shape[0], chances.shape[2]))
        if self.independent(chances):
            found[1, 1:] = chances[:-1, 0]
            found[0] = 1 - found[1]
            return found
        here = found[:, 0].copy()
        here[0] = 1.0
        for token, chance in enumerate(chances):
            found[:, token] = here
            here = self._next(here, chance)
        return found

    def variances(
        self, times: Floats, chances: Floats, mass: Floats, price: NDArray[np.intp], chain: NDArray[np.intp], tokens: Integers
    ) -> Floats:
        """Variance of the time of the first `tokens` of columns; `times` has shape (stages, costs, tokens)."""
        found = np.empty(price.size)
        for block in pair_blocks(chain, price, _COLUMNS):
            lengths = tokens[block.points]
            ends = dict(_by_length(lengths, lengths.size))
            so_far = self._variances(times, chances[: lengths.max()], mass, block)
            for token, variance in enumerate(so_far, start=1):
                if token in ends:
                    own = ends[token]
                    found[block.points[own]] = variance[block.pair[own]]
        return np.maximum(found, 0.0)

    def _variances(self, times: Floats, chances: Floats, mass: Floats, columns: PairBlock) -> Iterator[Floats]:
        """Variance of the time of the first 1, 2, ... tokens of columns; the same array every time.

        Sums deviations from each token's mean time, which avoids the cancellation of large squares. The first central moment of the
        time so far is kept by state.
        """
        found, first = np.zeros(columns.law.size), np.zeros((self.stage.size, columns.law.size))
        for token, chance in enumerate(chances):
            likely, time = mass[:, token].take(columns.law, axis=1), times[:, :, token].take(columns.price, axis=1)[self.stage]
            above = time - (likely * time).sum(axis=0)
            more = above * likely
            found += (above * (2 * first + more)).sum(axis=0)
            yield found
            first = self._next(first + more, chance.take(columns.law, axis=1))

    def _next(self, values: Floats, chance: Floats) -> Floats:
        """Values by state at the next token; `chance` is that of a match after a miss and after a match."""
        hit = values * chance[np.minimum(np.arange(self.stage.size), 1)]
        found = np.zeros_like(values)
        found[0] = (values - hit).sum(axis=0)
        for state, following in enumerate(self.following.tolist()):
            found[following] += hit[state]
        return found


def _chains(law: Law) -> Sequence[Chain]:
    """Equally likely chains that form the law."""
    if isinstance(law, Chain):
        return (law,)
    if isinstance(law, RecordedProbabilities):
        return law.chains
    raise checks.ParameterError("these stages need a law of single positions; ask for views = ['paths']")


def sums(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], tokens: int, replications: int
) -> tuple[Floats, Floats]:
    """Time and unit-time of many decodings at once, from their matches.

    `matches` yields tiles of shape (positions, replications) that cover the first tokens - 1 positions.

    >>> miss, match = Stage(time=40.0, busy=100.0, on_match=1), Stage(time=20.0, busy=80.0, on_match=1)
    >>> time, busy = sums((miss, match), [np.array([[True, False]])], tokens=2, replications=2)
    >>> time.tolist(), busy.tolist()
    ([60.0, 80.0], [180.0, 200.0])
    """
    if by_position(steps):
        return _sums_by_position(steps, matches, tokens, replications)
    if len(steps) == 2:
        count = np.zeros(replications)
        for tile in matches:
            # Adding bytes is much faster than adding wider integers, and a byte can count the rows of a tile.
            count += np.add.reduce(tile.view(np.uint8), axis=0, dtype=np.uint8 if len(tile) < 256 else np.int64)
        miss, match = steps
        time, busy = tokens * miss.time + count * (match.time - miss.time), tokens * miss.busy + count * (match.busy - miss.busy)
        return np.asarray(time), np.asarray(busy)
    visits = np.zeros((len(steps), replications))
    for stage in _walked(steps, matches, replications):
        for index in range(1, len(steps)):
            visits[index] += stage == index
    visits[0] = tokens - visits[1:].sum(axis=0)
    return (
        np.asarray(np.array([stage.time for stage in steps]) @ visits),
        np.asarray(np.array([stage.busy for stage in steps]) @ visits),
    )


def _sums_by_position(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], tokens: int, replications: int
) -> tuple[Floats, Floats]:
    # Shape (time and unit-time, stage, token).
    spent = np.array([[np.broadcast_to(stage[field], tokens) for stage in steps] for field in (0, 1)])
    found, at = np.zeros((2, replications)), 0
    if len(steps) == 2:
        saved = spent[:, 1] - spent[:, 0]
        for tile in matches:
            found += saved[:, at + 1 : at + 1 + len(tile)] @ tile.astype(np.float64)
            at += len(tile)
        found += spent[:, 0].sum(axis=1, keepdims=True)
    else:
        found += spent[:, 0, :1]
        for at, stage in enumerate(_walked(steps, matches, replications), start=1):
            found += spent[:, :, at].take(stage, axis=1, mode="clip")
    time, busy = found
    return time, busy


def _walked(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], replications: int
) -> Iterable[NDArray[np.uint8]]:
    """Stage of each token after the first, shape (replications,) each."""
    on_match = np.array([stage.on_match for stage in steps], dtype=np.uint8)
    stage = np.zeros(replications, dtype=np.uint8)
    for tile in matches:
        for row in tile:
            stage = on_match.take(stage, mode="clip") * row  # "clip" skips the index check
            yield stage
