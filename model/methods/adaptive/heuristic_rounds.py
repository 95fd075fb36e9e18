"""Rounds of the heuristic of transformers: their expected numbers, and the mean square of a decoding's time, under many laws.

A decoding is followed from position to position by the state in which its rounds start: the draft length, and the ending of the
round before. Decodings of several lengths have their first positions in common. At the last `longest` positions of each, where
drafts are cut to the remaining tokens, each decoding is followed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.adaptive.common_positions import CountedDecodings, DecodingsByLength, placed
from model.methods.adaptive.draft_acceptance import AFTER_FULL_DRAFT, REJECTED, RIGHT, WRONG, AcceptanceRates
from model.methods.adaptive.draft_length_policies import RISE
from model.methods.prediction import distinct_pairs, pair_blocks
from model.methods.rounds.prices_of_rounds import RoundPrices

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]

CELLS = 400_000
"""Numbers in the states of decodings that are computed together: 3 MB."""


class HeuristicRest(NamedTuple):
    """What the states of some decodings have at a position and will need later; see `HeuristicStates`."""

    accepted: Floats
    started: Floats
    rejecting: Floats


class HeuristicStates:
    """A quantity of decodings by the heuristic of transformers, by the state in which their rounds start, position after position.

    The quantity is a probability, or the mean of something over the decodings that are in a state. It starts from 0, or from what
    `rests` of decodings have; what `here` has after the caller's changes moves on to the states in which the next rounds start.

    Parameters
    ----------
    longest, tokens
        Longest draft, and tokens to generate.
    rates
        Acceptance rates of each of several laws.

    >>> from model.outcomes.outcome_laws import Iid
    >>> states = HeuristicStates(3, 4, AcceptanceRates.of([Iid(1.0)], 4, 3))
    >>> states.here(0)[0, REJECTED] = 1.0  # a draft of one token, then as many as remain
    >>> states.advance(0)
    >>> np.argwhere(states.here(2)).tolist(), states.drafted(2).tolist()
    ([[2, 2, 0]], [1, 1, 1])
    """

    def __init__(self, longest: int, tokens: int, rates: AcceptanceRates, rests: Sequence[HeuristicRest] = ()) -> None:
        self.longest, self.tokens, self.rates = longest, tokens, rates
        outcomes, laws = 1 if rates.alike else 2, rates.first.shape[-1]
        # Rounds after a completely accepted draft, by position. Of rounds that started at the last positions: the quantity by draft
        # length, as far as tokens may still be rejected; and the probability that each token is the first rejected one. By the
        # outcome before, if it matters.
        shapes = (longest + 2, longest, 3), (outcomes, longest, longest), (outcomes, longest, longest)
        if rests:
            parts = [np.concatenate(each, axis=-1) for each in zip(*rests, strict=True)]
        else:
            parts = [np.zeros((*of, laws)) for of in shapes]
        self._accepted, self._started, self._rejecting = parts

    def drafted(self, start: int) -> Integers:
        """Drafted tokens of a round that starts here, by draft length 1, 2, ..."""
        return np.minimum(np.arange(1, self.longest + 1), self.tokens - 1 - start)

    def here(self, start: int) -> Floats:
        """The quantity where a round starts at this position, by draft length, ending of the round before, and law; a view."""
        return np.asarray(self._accepted[start % len(self._accepted)])

    def rest(self, begin: int, columns: Indices) -> HeuristicRest:
        """What these laws have where a round starts at the next position, which is `begin`; positions then count from there.

        At the first position, `begin` may also be below 0: no round starts before.
        """
        later, slots = ((begin + np.arange(size)) % size for size in (self.longest + 2, self.longest))
        accepted, started, rejecting = self._accepted[later], self._started[:, slots], self._rejecting[:, slots]
        return HeuristicRest(accepted[..., columns], started[..., columns], rejecting[..., columns])

    def advance(self, start: int) -> None:
        """Move on from this position to the next."""
        drafted = self.drafted(start)
        here, most = self.here(start), int(drafted[-1])
        if most:
            self._go_on(start, drafted, most, here)
        here[:] = 0.0
        if most:
            self._reject(start + 1)

    def _go_on(self, start: int, drafted: Integers, most: int, here: Floats) -> None:
        """Note the rounds that start here, and move on those whose draft is completely accepted."""
        before = [here[:, REJECTED] + here[:, WRONG], here[:, RIGHT]]  # after a wrong and a right outcome
        if self.rates.alike:
            before = [before[0] + before[1]]
        each = self.rates.at(start, most)[-len(before) :]
        # Drafts after which the decoding has not ended: each has a length of its own, and so a place of its own.
        full, slot = drafted[drafted < self.tokens - 1 - start], start % self.longest
        whole = np.zeros((full.size, here.shape[-1]))
        for index, (of, rates) in enumerate(zip(before, each, strict=True)):
            survival = np.ones((most + 1, rates.shape[1]))
            np.cumprod(rates, axis=0, out=survival[1:])
            self._started[index, slot], self._rejecting[index, slot, :most] = of, survival[:-1] * (1 - rates)
            whole = whole + of[full - 1] * survival[full]
        right = self.rates.after(start, full)
        risen, then = np.minimum(full + RISE, self.longest) - 1, (start + 1 + full) % len(self._accepted)
        self._accepted[then, risen, WRONG] += whole * (1 - right)
        self._accepted[then, risen, RIGHT] += whole * right

    def _reject(self, at: int) -> None:
        """Move to this position the rounds whose token before it is the first rejected one."""
        slots = np.arange(self.longest)
        place = (at - 1 - slots) % self.longest  # of that token in the drafts of the rounds that started at each of the positions
        chance = self._rejecting[:, slots, place]
        rejected = np.einsum("oslb,osb->lb", self._started, chance)
        self._started[:, slots, place] = 0.0  # drafts of this length end here
        here = self.here(at)[:, REJECTED]
        here[0] += rejected[0]
        here[:-1] += rejected[1:]


# --- Expected rounds --------------------------------------------------------------------------------------------------


class _RoundCounter:
    """Expected rounds by the kind of round before, start position, drafted tokens and law; see `Followed`."""

    def __init__(self, states: HeuristicStates, positions: int) -> None:
        self.states = states
        self.counts = np.zeros((2, positions, states.longest + 1, states.rates.first.shape[-1]))

    def step(self, start: int) -> None:
        """Count the rounds that start at a position, and move on to the next."""
        drafted, mass = self.states.drafted(start), self.states.here(start)
        most = int(drafted[-1])
        for kind, own in enumerate((mass[:, REJECTED], mass[:, WRONG] + mass[:, RIGHT])):
            self.counts[kind, start, 1:most] = own[: max(most - 1, 0)]
            self.counts[kind, start, most] = own[max(most - 1, 0) :].sum(axis=0)
        self.states.advance(start)

    def rest(self, begin: int, columns: Indices) -> HeuristicRest:
        """What is needed to go on from the next position; see `HeuristicStates.rest`."""
        return self.states.rest(begin, columns)


def heuristic_counts(first: int, rates: AcceptanceRates, decodings: DecodingsByLength) -> CountedDecodings:
    """Expected rounds from the draft length `first` on.

    >>> from model.outcomes.outcome_laws import Iid
    >>> of = DecodingsByLength(np.array([0]), np.array([4]), 3)
    >>> counts = heuristic_counts(1, AcceptanceRates.of([Iid(1.0)], 4, 3), of).at(slice(1))
    >>> np.argwhere(counts > 0).tolist()  # rounds of 1 and 3 drafts, the second cut to 1
    [[0, 0, 1, 0], [1, 2, 1, 0]]
    """
    longest, positions = decodings.longest, decodings.last
    common = _RoundCounter(HeuristicStates(longest, int(decodings.tokens[-1]), rates), decodings.common)
    common.states.here(0)[first - 1, REJECTED] = 1.0
    rests = [*decodings.rests(common)]
    if not rests:
        return CountedDecodings(decodings, common.counts, common.counts[:, :0, :, decodings.law])
    own = HeuristicStates(longest, positions, rates.last(decodings.law, decodings.begin, positions), rests)
    last = _RoundCounter(own, positions)
    for start in range(positions):
        last.step(start)
    return CountedDecodings(decodings, common.counts, last.counts)


# --- Squared times ----------------------------------------------------------------------------------------------------


def heuristic_squares(
    first: int, longest: int, rates: AcceptanceRates, prices: RoundPrices, law: Indices, price: Indices, lengths: Integers,
    length: Indices,
) -> Floats:  # fmt: skip
    """Mean square of the time of decodings, each of one of several laws, costs and lengths, which rise; shape (decodings,)."""
    laws, of_laws, decoding = distinct_pairs(law, length)
    if prices.uniform and laws.size * (longest + 1) < law.size:
        products, time = heuristic_products(first, longest, rates, laws, lengths[of_laws]), prices.time[price]
        return np.asarray(np.einsum("nde,nd,ne->n", products[decoding], time, time, optimize=True))
    found = np.empty(law.size)
    laws, costs, pair = distinct_pairs(law, price)
    for block in pair_blocks(pair, length, max(CELLS // (longest * (longest + 1)), 1)):
        pairs, own = np.unique(block.law, return_inverse=True)
        order, place = placed(tokens := lengths[block.price])
        of = DecodingsByLength(own[order], tokens[order], longest)
        squares = _squares_of(first, rates, prices, laws[pairs], costs[pairs], of)
        found[block.points] = squares[place[block.pair]]
    return found


def _squares_of(
    first: int, rates: AcceptanceRates, prices: RoundPrices, law: Indices, price: Indices, of: DecodingsByLength
) -> Floats:
    """Mean squares of decodings whose `law` is one of these pairs of laws and costs."""
    laws, which = np.unique(law, return_inverse=True)
    states = HeuristicStates(of.longest, int(of.tokens[-1]), rates.at_laws(np.concatenate([laws, law])))
    states.here(0)[first - 1, REJECTED, : laws.size] = 1.0
    common = _SquaredTimes(states, prices, which, price, None, np.zeros(law.size))
    rests, begin = [*of.rests(common)], of.begin
    if not rests:
        return common.total[of.law]
    states, total = _at_last_positions(of, rests, rates, np.tile(law[of.law], 2), np.tile(begin, 2))
    last = _SquaredTimes(states, prices, np.arange(begin.size), price[of.law], begin, total)
    for start in range(of.last):
        last.step(start)
    return last.total


class _SumRest(NamedTuple):
    """What sums over rounds need later: probabilities, quantities so far x probability, and the sums so far."""

    masses: HeuristicRest
    untils: HeuristicRest
    total: Floats


def _at_last_positions(
    of: DecodingsByLength, rests: Sequence[_SumRest], rates: AcceptanceRates, law: Indices, begin: Integers
) -> tuple[HeuristicStates, Floats]:
    """States of decodings at their last positions, probabilities first, and their sums so far; law and begin are of all states."""
    states = [*(rest.masses for rest in rests), *(rest.untils for rest in rests)]
    total = np.concatenate([rest.total for rest in rests])
    return HeuristicStates(of.longest, of.last, rates.last(law, begin, of.last), states), total


class _SquaredTimes:
    """Sums over rounds whose total is the mean square of a decoding's time; see `Followed`.

    Parameters
    ----------
    states
        Probabilities under each law, followed by time so far x probability of each decoding.
    law, price, begin
        Law, cost, and position that counts as the first, of each decoding; None: 0 of all.
    total
        The sums so far.
    """

    def __init__(
        self, states: HeuristicStates, prices: RoundPrices, law: Indices, price: Indices, begin: Integers | None, total: Floats
    ) -> None:
        self.states, self.prices, self.laws = states, prices, states.rates.first.shape[-1] - law.size
        self.law, self.price, self.begin, self.total = law, price, begin, total

    def step(self, start: int) -> None:
        """Count the rounds that start at a position, and move on to the next."""
        here = self.states.here(start)
        time, mass, until = self._times(start), here[..., self.law], here[..., self.laws :]
        spent = time * mass
        self.total += np.einsum("leb,leb->b", np.broadcast_to(time, mass.shape), 2 * until + spent)
        until += spent
        self.states.advance(start)

    def _times(self, start: int) -> Floats:
        """Times of rounds that start here, by draft length, ending of the round before, and decoding."""
        drafted, each = self.states.drafted(start), self.prices.time
        if self.prices.uniform:
            return np.asarray(each[:, drafted][self.price].T[:, None])
        if self.begin is None:
            return np.asarray(each[:, :, start, drafted][self.price].transpose(2, 1, 0)[:, AFTER_FULL_DRAFT])
        at = np.maximum(self.begin + start, 0)[:, None]
        return np.asarray(each[self.price[:, None], :, at, drafted].transpose(1, 2, 0)[:, AFTER_FULL_DRAFT])

    def rest(self, begin: int, columns: Indices) -> _SumRest:
        """What is needed to go on from the next position; see `HeuristicStates.rest`."""
        masses, untils = (self.states.rest(begin, each) for each in (self.law[columns], self.laws + columns))
        return _SumRest(masses, untils, self.total[columns])


# --- Products of numbers of rounds ------------------------------------------------------------------------------------


def heuristic_products(first: int, longest: int, rates: AcceptanceRates, law: Indices, tokens: Integers) -> Floats:
    """Mean products of the numbers of rounds with each two numbers of drafted tokens; shape (decodings, longest + 1, longest + 1).

    >>> from model.outcomes.outcome_laws import Iid
    >>> rates = AcceptanceRates.of([Iid(1.0)], 6, 2)
    >>> heuristic_products(1, 2, rates, np.array([0]), np.array([6])).tolist()  # rounds of 1, 2 and 0 drafts
    [[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]
    """
    found = np.empty((law.size, longest + 1, longest + 1))
    for block in pair_blocks(law, tokens, max(CELLS // (longest * (longest + 1) ** 2), 1)):
        laws, own = np.unique(block.law, return_inverse=True)
        order, place = placed(block.price)
        of = DecodingsByLength(own[order], block.price[order], longest)
        found[block.points] = _products_of(first, rates.at_laws(laws), of)[place[block.pair]]
    return found


def _products_of(first: int, rates: AcceptanceRates, of: DecodingsByLength) -> Floats:
    laws, kinds = np.arange(rates.first.shape[-1]), of.longest + 1
    of_states = np.concatenate([laws, np.repeat(laws, kinds)])
    states = HeuristicStates(of.longest, int(of.tokens[-1]), rates.at_laws(of_states))
    states.here(0)[first - 1, REJECTED, : laws.size] = 1.0
    rests = [*of.rests(common := _RoundProducts(states, np.zeros((laws.size, kinds, kinds))))]
    if not rests:
        return common.total[of.law]
    of_states = np.concatenate([each := np.arange(of.law.size), np.repeat(each, kinds)])
    last = _RoundProducts(*_at_last_positions(of, rests, rates, of.law[of_states], of.begin[of_states]))
    for start in range(of.last):
        last.step(start)
    return last.total


class _RoundProducts:
    """Mean products of numbers of rounds by their drafted tokens; see `Followed`.

    `states` has probabilities of each decoding, followed by the number so far of each kind of rounds x probability, by decoding and
    kind; `total` the products so far, of shape (decodings, kinds, kinds).
    """

    def __init__(self, states: HeuristicStates, total: Floats) -> None:
        self.states, self.total = states, total
        self._kinds = np.arange(states.longest + 1)

    def step(self, start: int) -> None:
        """Count the rounds that start at a position, and move on to the next."""
        here, size = self.states.here(start), len(self.total)
        mass, until = here[..., :size], here[..., size:].reshape(*here.shape[:-1], size, self._kinds.size)  # views
        for length, number in enumerate(self.states.drafted(start).tolist()):
            so_far = until[length].sum(axis=0)  # (decodings, kinds of rounds)
            self.total[:, number] += so_far
            self.total[:, :, number] += so_far
            self.total[:, number, number] += mass[length].sum(axis=0)
            until[length, :, :, number] += mass[length]
        self.states.advance(start)

    def rest(self, begin: int, columns: Indices) -> _SumRest:
        """What is needed to go on from the next position; see `HeuristicStates.rest`."""
        of_kinds = len(self.total) + (columns[:, None] * self._kinds.size + self._kinds).ravel()
        return _SumRest(self.states.rest(begin, columns), self.states.rest(begin, of_kinds), self.total[columns])
