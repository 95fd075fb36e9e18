"""Rounds of drafts by lookups: the walk of many replications at once, and its exact moments.

A round that starts at output position s drafts as many tokens as its lookup finds, at most as many as remain (in a batch that is
kept full, tokens after the end are dropped instead). Its cost depends on this number, which is known before the pass. The next
round starts after the accepted tokens and the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.prediction import linear, pair_blocks
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.rounds.round_moments import Moments, mean_of
from model.methods.rounds.round_walks import Tally
from model.outcomes.lookup_laws import LookupLaw, Lookups, ReplayedLookups, all_alike, chances_of, outcomes_after, same_outcomes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def walk(tokens: int, tiles: Iterator[Integers], prices: RoundPrices, replications: int, *, cut: bool = True) -> Tally:
    """Walk rounds position by position, from tiles of packed outcomes (`model.outcomes.lookup_laws`).

    Drafting takes no unit, so unit-time equals time.

    >>> law = ReplayedLookups([[2, 0, 0, 2, 2]], [[1, 0, 0, 2, 0]])  # one of two is accepted, then nothing is found
    >>> flat = np.array([1.0, 1.1, 1.2])
    >>> tally = walk(5, law.sample(iter([np.zeros((5, 1))])), RoundPrices(flat, flat, 1 + np.arange(3.0)), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([3.0], [3.0], [1, 2, 0], [3.3])
    """
    start, accepted_before = np.zeros(replications, dtype=np.int64), np.zeros(replications, dtype=np.bool_)
    longest = len(prices.operations) - 1
    none = longest + 1  # the number of drafted tokens where no round starts: tables have a 0 there
    worked, each = np.append(prices.operations, 0.0), np.append(np.arange(none), 0)
    time, operations, rounds, drafted_in_all = np.zeros((4, replications))
    counts = np.zeros(none + 1, dtype=np.int64)
    position = 0
    for tile in tiles:
        rows = tile[: tokens - position]
        drafts, kept = np.full((2, *rows.shape), none, dtype=np.int64)
        for place, row in enumerate(rows, position):
            starting, remaining = start == place, tokens - 1 - place
            drafted, accepted = outcomes_after(accepted_before, row)
            if remaining < longest:
                accepted = np.minimum(accepted, remaining)
                drafted = np.minimum(drafted, remaining) if cut else drafted
            np.copyto(drafts[place - position], drafted, where=starting)
            np.copyto(kept[place - position], accepted, where=starting)
            np.copyto(start, accepted + (place + 1), where=starting)
            np.copyto(accepted_before, accepted > 0, where=starting)
        time += _prices_at(prices.time, position, drafts).sum(axis=0)
        operations += worked[drafts].sum(axis=0)
        rounds += (drafts < none).sum(axis=0)
        drafted_in_all += each[drafts].sum(axis=0)
        counts += np.bincount(kept.ravel(), minlength=none + 1)
        position += len(rows)
    return Tally(time, time, operations, rounds, drafted_in_all, counts[:none])


def _prices_at(prices: Floats, position: int, drafts: Integers) -> Floats:
    """Prices of rounds from this position on, by drafted tokens; 0 where the number is beyond the last price."""
    own = prices[None] if prices.ndim == 1 else prices[0, position : position + len(drafts)]
    table = np.concatenate([own, np.zeros((len(own), 1))], axis=1)
    return np.asarray(table[0][drafts] if prices.ndim == 1 else np.take_along_axis(table, drafts, axis=1))


class LookupRounds(NamedTuple):
    """Rounds of a decoding by the tokens that their lookup finds; positions that are priced alike share a row."""

    row: NDArray[np.intp]
    """Row of each start position; shape (positions,)."""
    found: Integers
    """Distinct numbers of tokens that a lookup finds, rising; shape (kinds,)."""
    drafted: Integers
    """Tokens that are drafted and paid for; shape (rows, kinds)."""


def rounds_of(tokens: int, law: Lookups, *, cut: bool = True, by_position: bool = False) -> LookupRounds:
    """Rounds of a decoding of `tokens` tokens, in a row for each position or for all with the same drafted tokens.

    >>> rounds_of(4, Lookups.of_rates(0.5, 0.5, 2)).row.tolist(), rounds_of(4, Lookups.of_rates(0.5, 0.5, 2)).drafted.tolist()
    ([2, 2, 1, 0], [[0, 0], [0, 1], [0, 2]])
    """
    found = np.unique(law.cells.drafted)
    remaining = np.arange(tokens - 1, -1, -1)
    most = np.minimum(remaining, found[-1]) if cut else np.full(tokens, found[-1])
    levels, row = np.unique(most, return_inverse=True)
    if by_position:
        levels, row = most, np.arange(tokens)
    return LookupRounds(row, found, np.minimum(found, levels[:, None]))


class _RoundOutcomes(NamedTuple):
    """Outcomes of a round under several laws, by its kind: the tokens that its lookup finds."""

    alike: bool
    """The outcome of the round before has no effect; else it has accepted tokens or none."""
    longest: int
    """Largest number of accepted tokens."""
    share: Floats
    """Probability of each kind, shape (kinds, outcomes before, laws)."""
    ends: tuple[Floats, ...]
    """For each kind, probabilities that 0, 1, ... tokens are accepted; shape (outcomes before, accepted + 1, laws)."""

    @staticmethod
    def of(found: Integers, laws: Sequence[Lookups]) -> _RoundOutcomes:
        """Outcomes under laws that differ in probabilities only; `found` are the numbers of tokens that a lookup may find."""
        alike = all_alike(laws)
        drafted, accepted, _ = laws[0].cells
        longest, before = int(accepted.max()), 1 if alike else 2
        cells = chances_of(laws, before).transpose(1, 2, 0)  # (outcome before, outcomes, laws)
        chance = np.zeros((found.size, before, longest + 1, len(laws)))
        for kind, count in enumerate(found.tolist()):
            here = drafted == count
            chance[kind][:, accepted[here]] = cells[:, here]
        ends = [each[:, : min(longest, count) + 1] for each, count in zip(chance, found.tolist(), strict=True)]
        return _RoundOutcomes(alike, longest, chance.sum(axis=2), tuple(ends))

    @property
    def before(self) -> int:
        """Number of outcomes of the round before that differ."""
        return 1 if self.alike else 2

    def at(self, which: NDArray[np.intp]) -> _RoundOutcomes:
        """A selection of the laws."""
        return self._replace(share=self.share[..., which], ends=tuple([each[..., which] for each in self.ends]))

    def merged(self) -> _RoundOutcomes:
        """The same with one kind of round in place of all."""
        ends = np.zeros((self.before, self.longest + 1, self.share.shape[-1]))
        for each in self.ends:
            ends[:, : each.shape[1]] += each
        return self._replace(share=self.share.sum(axis=0, keepdims=True), ends=(ends,))

    def beginning(self, tokens: int) -> Floats:
        """Probability that a round starts at the first position and at no other; by outcome before, position and law."""
        state = np.zeros((self.before, tokens + self.longest + 1, self.share.shape[-1]))
        state[0, 0] = 1.0
        return state

    def spread(self, state: Floats, start: int, values: Sequence[Floats]) -> None:
        """Add values of the rounds from a position, by kind, where the next rounds start; axes (outcome before, position, law)."""
        after = state[:, start + 1 : start + 2 + self.longest]
        for end, each in zip(self.ends, values, strict=True):
            spent = (end * each[:, None]).sum(axis=0) if self.before > 1 else end[0] * each[0]
            after[0, : len(spent) if self.alike else 1] += spent[: len(spent) if self.alike else 1]
            after[self.before - 1, 1 : 1 if self.alike else len(spent)] += spent[1 : 1 if self.alike else len(spent)]


class _Starts(NamedTuple):
    """Where rounds of decodings start under several laws with the same outcomes."""

    rounds: LookupRounds
    outcomes: _RoundOutcomes
    reached: Floats
    """Probability that a round starts, by outcome before, position and law."""

    @staticmethod
    def of(rounds: LookupRounds, laws: Sequence[Lookups]) -> _Starts:
        """By a recursion over positions."""
        outcomes, tokens = _RoundOutcomes.of(rounds.found, laws), rounds.row.size
        reached = outcomes.beginning(tokens)
        of_any_kind = outcomes.merged()
        if outcomes.alike:
            backwards, at = np.ascontiguousarray(of_any_kind.ends[0][0, ::-1]), reached[0]
            for start in range(1, tokens):
                before = at[max(start - len(backwards), 0) : start]
                np.einsum("al,al->l", before, backwards[-len(before) :], out=at[start])
        else:
            for start in range(tokens):
                of_any_kind.spread(reached, start, [reached[:, start]])
        return _Starts(rounds, outcomes, reached[:, :tokens])

    def summed(self, values: Floats) -> Floats:
        """Values by outcome before, position and law, weighted by the share of each kind of round; shape (rows, kinds, laws)."""
        row, count = self.rounds.row, len(self.rounds.drafted)
        if not np.array_equal(row, np.arange(count)):  # rounds at several positions are alike
            first = np.searchsorted(-row, np.arange(0, -count - 1, -1), side="right").tolist()
            stretches = [slice(first[number + 1], first[number]) for number in range(count)]
            values = np.stack([values[:, each].sum(axis=1) for each in stretches], axis=1)
        return np.asarray(np.einsum("kbl,brl->rkl", self.outcomes.share, values))

    def pairs(self) -> _StartPairs | None:
        """Sums over pairs of rounds before the first that is cut; None if rounds before that differ."""
        alike, longest = int(np.count_nonzero(self.rounds.row == self.rounds.row[0])), self.outcomes.longest
        worth = self.outcomes.alike and alike > 2 * longest + 2  # else a recursion over positions takes no more
        return _StartPairs.of(self.reached[0, :alike], longest) if worth else None

    def squares(
        self, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp], pairs: _StartPairs | None
    ) -> Floats:  # fmt: skip
        """Mean square of the time of pairs of laws and times, the latter of shape (costs, rows, kinds).

        With the tokens that a round accepts, its time is added to the time until the position that follows: at positions of
        `pairs` by these, and then position by position.
        """
        of, by_row = self.outcomes.at(law), np.ascontiguousarray(np.moveaxis(times, 0, -1))
        first, begin = (0, 0) if pairs is None else (pairs.alike - of.longest - 1, pairs.alike)
        state = np.zeros((of.before, self.rounds.row.size - first + of.longest + 1, law.size))
        found = np.zeros(law.size)
        if pairs is not None:
            time = by_row[self.rounds.row[0]].take(price, axis=1)
            share, spent = of.share[:, 0], np.zeros((of.longest + 1, law.size))
            for end, each in zip(of.ends, time, strict=True):
                spent[: end.shape[1]] += end[0] * each
            found += 2 * (share * time).sum(axis=0) * np.einsum("al,al->l", spent, pairs.sums[:, law])
            found += (share * time**2).sum(axis=0) * pairs.starts[law]
            for place, start in enumerate(range(first, begin)):
                until = np.einsum("al,al->l", spent, pairs.last[place : place + of.longest + 1][::-1][:, law])
                of.spread(state, place, until + self.reached[:, None, start, law] * time[:, None])
        for start, row in enumerate(self.rounds.row[begin:].tolist(), begin):
            reached, before, values = self.reached[:, start].take(law, axis=1), state[:, start - first], []
            for share, each in zip(of.share, by_row[row].take(price, axis=1), strict=True):
                more = reached * each
                found += each * (share * (2 * before + more)).sum(axis=0)
                values.append(before + more)
            of.spread(state, start - first, values)
        return found


class _StartPairs(NamedTuple):
    """Sums over pairs of starts of rounds, at the first positions, where rounds are alike and do not depend on the one before.

    The probability that a round starts at a position j, and that one starts m - j positions after such a start, is summed over j.
    So the time until a position s, if a round starts there, is a sum over accepted tokens a, with m = s - 1 - a.
    """

    alike: int
    """Number of these positions."""
    starts: Floats
    """Expected rounds that start there; shape (laws,)."""
    sums: Floats
    """By accepted tokens a, summed over m up to alike - 2 - a; shape (most accepted + 1, laws)."""
    last: Floats
    """For the last numbers m up to alike - 2; shape (2 * most accepted + 1, laws)."""

    @staticmethod
    def of(reached: Floats, longest: int) -> _StartPairs:
        """From the probability that a round starts at each position, shape (positions, laws); `longest` tokens may be accepted.

        >>> found = _StartPairs.of(np.ones((5, 1)), 1)
        >>> found.last[:, 0].tolist(), found.sums[:, 0].tolist()  # pairs 0 and 1, 0 to 2, 0 to 3; of at most 3, and of at most 2
        ([2.0, 3.0, 4.0], [10.0, 6.0])
        """
        alike, laws = reached.shape
        sums, last = np.zeros((longest + 1, laws)), np.empty((2 * longest + 1, laws))
        for at in range(0, laws, _NEAR):
            part = slice(at, at + _NEAR)
            each = np.ascontiguousarray(reached[:, part])
            for place, most in enumerate(range(alike - 2 - 2 * longest, alike - 1)):
                half, middle = divmod(most + 1, 2)
                np.einsum("sl,sl->l", each[:half], each[most : most - half : -1], out=last[place, part])
                last[place, part] *= 2
                if middle:
                    last[place, part] += each[half] ** 2
            most = alike - 2 - longest
            np.einsum("sl,sl->l", each[: most + 1], np.cumsum(each, axis=0)[most::-1], out=sums[longest, part])
        for accepted in range(longest - 1, -1, -1):
            sums[accepted] = sums[accepted + 1] + last[2 * longest - accepted]
        return _StartPairs(alike, reached.sum(axis=0), sums, last)


class LookupDecodings(NamedTuple):
    """Decodings of several lengths under laws with the same outcomes, whose sums over rounds are made together.

    Where rounds start does not depend on the length. So sums over whole drafts are made once, to the longest decoding, and then
    corrected for the drafts of the last rounds, which are cut.
    """

    starts: _Starts
    """Where rounds with whole drafts start."""
    mass: Floats
    """Probability that a round starts at each position, by the tokens that its lookup finds; shape (positions, kinds, laws)."""
    lengths: Integers
    """Tokens of each decoding; shape (decodings,)."""
    law: NDArray[np.intp]
    """Index of the law of each decoding."""
    last: int
    """Number of last positions whose drafts may be cut."""

    @staticmethod
    def of(lengths: Integers, laws: Sequence[Lookups], law: NDArray[np.intp], *, cut: bool) -> LookupDecodings:
        """Decodings of these lengths, under the laws with an index of `law`."""
        rounds = rounds_of(int(lengths.max()), laws[0], cut=False)
        starts = _Starts.of(rounds, laws)
        mass = np.einsum("kbl,bsl->skl", starts.outcomes.share, starts.reached)
        return LookupDecodings(starts, mass, lengths, law, int(rounds.found[-1]) if cut else 0)

    def mean(self, values: Floats) -> Floats:
        """Mean sum of values of rounds in each decoding; values broadcast to (laws, positions, 1 + most drafted tokens).

        >>> laws, law = [Lookups.of_rates(0.5, 1.0, 2)], np.zeros(2, dtype=np.intp)
        >>> decodings = LookupDecodings.of(np.array([1, 3]), laws, law, cut=True)
        >>> decodings.mean(np.ones((1, 1, 3))).tolist(), decodings.mean(np.arange(3.0)[None, None]).tolist()  # rounds, and drafted
        ([1.0, 1.75], [0.0, 1.25])
        """
        kinds = self.starts.rounds.found
        every = np.broadcast_to(values, (self.mass.shape[2], len(self.mass), values.shape[-1]))
        whole = np.moveaxis(values[..., kinds], 0, -1)  # (positions, kinds, laws), or 1 in place of positions and laws
        found = np.cumsum((self.mass * whole).sum(axis=1), axis=0)[self.lengths - 1, self.law]
        for remaining in range(self.last):
            own = np.flatnonzero(self.lengths > remaining)
            at, law = self.lengths[own] - 1 - remaining, self.law[own]
            each = every[law, at]
            changed = each[:, np.minimum(kinds, remaining)] - each[:, kinds]
            found[own] += (self.mass[at, :, law] * changed).sum(axis=1)
        return np.asarray(found)

    def means(self, values: Floats) -> Floats:
        """`mean` of several values that are the same for all laws; shape (values, decodings).

        Values have shape (values, positions, 1 + most drafted tokens).
        """
        kinds = self.starts.rounds.found
        distinct, which = np.unique(self.lengths, return_inverse=True)
        sums = np.empty((distinct.size, len(values), self.mass.shape[2]))
        for own, begin, end in zip(sums, [0, *distinct[:-1].tolist()], distinct.tolist(), strict=True):
            own[:] = [np.einsum("skl,sk->l", self.mass[begin:end], each[begin:end][:, kinds]) for each in values]
        found = np.cumsum(sums, axis=0)[which, :, self.law].T
        for remaining in range(self.last):
            later = np.flatnonzero(self.lengths > remaining)
            at = self.lengths[later] - 1 - remaining
            changed = values[:, at[:, None], np.minimum(kinds, remaining)] - values[:, at[:, None], kinds]
            found[:, later] += (self.mass[at, :, self.law[later]] * changed).sum(axis=-1)
        return np.asarray(found)

    def square(self, times: Floats, asked: NDArray[np.intp]) -> Floats:
        """Mean square of the time of the decodings that are `asked`; times as the values of `mean`.

        With the tokens that a round accepts, its time is added to the time until the position that follows.
        """
        outcomes, tokens = self.starts.outcomes, len(self.mass)
        every = np.broadcast_to(times, (self.mass.shape[2], tokens, times.shape[-1]))
        time = np.moveaxis(every[..., self.starts.rounds.found], 0, -1)  # (positions, kinds, laws)
        until = np.zeros_like(outcomes.beginning(tokens))
        for kind, ends in enumerate(outcomes.ends):
            spent = self.starts.reached * time[:, kind]
            for accepted in range(ends.shape[1]):
                after = until[outcomes.before - 1 if accepted else 0, accepted + 1 : accepted + 1 + tokens]
                after += (ends[:, accepted, None] * spent).sum(axis=0)
        of_any_kind = outcomes.merged()
        for start in range(tokens):
            of_any_kind.spread(until, start, [until[:, start]])
        first = np.einsum("kbl,bsl->skl", outcomes.share, until[:, :tokens])
        sums = np.zeros((tokens + 1, time.shape[2]))
        np.cumsum((time * (2 * first + time * self.mass)).sum(axis=1), axis=0, out=sums[1:])
        found = sums[np.maximum(self.lengths - self.last, 0), self.law][asked]
        for at in range(0, asked.size if self.last else 0, _PAIRS):
            found[at : at + _PAIRS] += self._last_squares(every, until, asked[at : at + _PAIRS])
        return np.asarray(found)

    def _last_squares(self, times: Floats, until: Floats, part: NDArray[np.intp]) -> Floats:
        """What the last rounds of some decodings add to mean squares; `until` is the time until their starts with whole drafts."""
        kinds, lengths, law = self.starts.rounds.found, self.lengths[part], self.law[part]
        outcomes = self.starts.outcomes.at(law)
        found, less = np.zeros(part.size), np.zeros((outcomes.before, self.last + outcomes.longest + 1, part.size))
        for place, remaining in enumerate(range(self.last - 1, -1, -1)):
            at = np.maximum(lengths - 1 - remaining, 0)
            reached, before = (np.where(lengths > remaining, each[:, at, law], 0.0) for each in (self.starts.reached, until))
            own, values = times[law, at].T, []
            whole, cut = own[kinds], own[np.minimum(kinds, remaining)]
            for share, time, uncut in zip(outcomes.share, cut, whole, strict=True):
                found += time * (share * (2 * (before + less[:, place]) + reached * time)).sum(axis=0)
                values.append(less[:, place] + reached * (time - uncut))
            outcomes.spread(less, place, values)
        return found


_CELLS = 1_000_000
"""Numbers in arrays by position and pair: 8 MB."""
_PAIRS = 4000
"""Pairs whose arrays of a position stay in the cache of a processor."""
_NEAR = 500
"""Laws whose arrays of all positions do."""


def moments_of_pairs(
    tokens: int, laws: Sequence[LookupLaw], prices: RoundPrices, law: NDArray[np.intp], price: NDArray[np.intp],
    *, cut: bool = True, means: NDArray[np.bool_] | None = None, lengths: Integers | None = None,
) -> Moments:  # fmt: skip
    """Moments of `walk` for pairs of laws and prices, the latter those of several costs; arrays of shape (pairs,).

    Over records these are the moments of equally likely ones. Of pairs of which only `means` are asked, the variance may be nan.
    `lengths` are the tokens of each pair if they differ; `tokens` is then the largest.
    """
    found = np.empty((len(Moments._fields), law.size))
    every = np.broadcast_to(np.asarray(tokens if lengths is None else lengths), law.size)
    some = np.broadcast_to(np.asarray(False if means is None else means), law.size)
    groups = same_outcomes(laws)
    recorded = np.ones(len(laws), dtype=np.bool_)
    recorded[np.concatenate([np.zeros(0, dtype=np.intp), *groups])] = False
    for index in np.flatnonzero(recorded[law]).tolist():
        found[:, index] = _of_records(int(every[index]), laws[law[index]], prices.of(int(price[index])), cut=cut)
    size = max(_CELLS // tokens, 1)
    for numbers in groups:
        for at in range(0, numbers.size if lengths is None else 0, size):
            part = numbers[at : at + size]
            mine = np.flatnonzero((law >= part[0]) & (law <= part[-1]) & np.isin(law, part))
            which = np.searchsorted(part, law[mine])
            of: list[Any] = [laws[number] for number in part.tolist()]
            found[:, mine] = _of_lookups(tokens, of, prices, which, price[mine], some[mine], cut=cut)
        if lengths is None:
            continue
        own = np.flatnonzero(np.isin(law, numbers))
        for block in pair_blocks(law[own], price[own], max(size // prices.operations.shape[-1], 1)):
            part, costs = own[block.points], block.price
            of = [laws[each] for each in block.law.tolist()]
            decodings = LookupDecodings.of(lengths[part], of, block.pair, cut=cut)
            time = prices.time[costs, None] if prices.uniform else prices.time[costs, 0, : int(lengths[part].max())]
            found[:, part] = _of_lengths(decodings, time, prices.operations[costs, None], some[part])
    return Moments(*found)


def _of_lookups(
    tokens: int, laws: Sequence[Lookups], prices: RoundPrices, law: NDArray[np.intp], price: NDArray[np.intp],
    means: NDArray[np.bool_], *, cut: bool,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices."""
    rounds = rounds_of(tokens, laws[0], cut=cut, by_position=not prices.uniform)
    starts = _Starts.of(rounds, laws)
    mass = starts.summed(starts.reached)
    time = prices.time[:, rounds.drafted] if prices.uniform else prices.time[:, 0, rounds.row[:, None], rounds.drafted]
    counts = mass.reshape(-1, len(laws))
    mean, worked = (
        linear(counts, each.reshape(len(each), -1), law, price) for each in (time, prices.operations[:, rounds.drafted])
    )
    variance, asked = np.full(law.size, np.nan), np.flatnonzero(~means)
    pairs = starts.pairs() if asked.size else None
    for at in range(0, asked.size, _PAIRS):
        part = asked[at : at + _PAIRS]
        variance[part] = np.maximum(starts.squares(time, law[part], price[part], pairs) - mean[part] ** 2, 0.0)
    number = np.einsum("rkl,rk->l", mass, rounds.drafted)
    return np.stack([mean, variance, mean, worked, mass.sum(axis=(0, 1))[law], number[law]])


def _of_lengths(decodings: LookupDecodings, times: Floats, operations: Floats, means: NDArray[np.bool_]) -> Floats:
    """Rows of `Moments` of decodings, with times and operations of rounds as values of `LookupDecodings.mean`."""
    mean, worked = decodings.mean(times), decodings.mean(operations)
    tokens = np.arange(float(times.shape[-1]))
    rounds, drafted = decodings.means(np.repeat(np.stack([np.ones(tokens.size), tokens])[:, None], len(decodings.mass), axis=1))
    variance, asked = np.full(means.size, np.nan), np.flatnonzero(~means)
    if asked.size:
        variance[asked] = np.maximum(decodings.square(times, asked) - mean[asked] ** 2, 0.0)
    return np.stack([mean, variance, mean, worked, rounds, drafted])


def _of_records(tokens: int, law: LookupLaw, prices: RoundPrices, *, cut: bool) -> Moments:
    if not isinstance(law, ReplayedLookups):
        raise checks.ParameterError("this law of lookups has no closed form; ask for views = ['paths']")
    count = len(law.drafted)
    draws = np.broadcast_to((np.arange(count) + 0.5) / count, (tokens, count))
    return mean_of(walk(tokens, law.sample(iter([draws])), prices, count, cut=cut))


def moments(tokens: int, law: LookupLaw, prices: RoundPrices, *, cut: bool = True) -> Moments:
    """`moments_of_pairs` of one law and one price.

    >>> flat = np.ones(4)
    >>> round(moments(128, Lookups.of_rates(0.5, 0.5, 3), RoundPrices(flat, flat, flat)).rounds, 3)  # 128 / 1.4375 is 89.043
    89.376
    """
    one = np.zeros(1, dtype=np.intp)
    found = moments_of_pairs(tokens, [law], RoundPrices(*(each[None] for each in prices)), one, one, cut=cut)
    return Moments(*(float(each[0]) for each in found))
