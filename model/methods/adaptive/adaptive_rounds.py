"""Rounds of adaptive draft lengths: their expected numbers by start position and drafted tokens, under many laws at once.

Forward recursions over the position at which a round starts and the policy's state. A round starts after one of three endings of
the round before: a rejection (or the beginning), or a completely accepted draft, after which the target's own token has a wrong or
a right outcome (which matters if outcomes are dependent).

Counts of rounds have the shape (2, starts, drafted tokens, laws): index 1 of the first axis is for rounds that follow a completely
accepted draft, as in `RoundPrices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.adaptive.draft_length_policies import RISE
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.rounds.round_laws import Rounds
from model.outcomes.outcome_laws import Chain, TwoClass

Floats = NDArray[np.float64]

REJECTED, WRONG, RIGHT = range(3)
"""Endings of the round before: a rejection; a completely accepted draft, with a wrong or a right outcome of the token after it."""
_AFTER_FULL_DRAFT = np.array([0, 1, 1])
"""Index of the first axis of counts and prices, by ending of the round before."""


class AcceptanceRates(NamedTuple):
    """Acceptance probabilities of drafts of at most `longest` tokens, by law.

    Parameters
    ----------
    first
        Of the first token of a draft that starts at each position after a wrong outcome; shape (tokens, laws).
    each
        Of each token of a draft after a right outcome, and of the token after it: shape (positions, longest + 1, laws).
    """

    first: Floats
    each: Floats
    alike: bool
    """True if the outcome before a draft does not matter."""

    @classmethod
    def of(cls, laws: Sequence[Chain | Rounds], tokens: int, longest: int) -> AcceptanceRates:
        """Rates of these laws."""
        low, high = zip(*(law.draft_probabilities(tokens, longest) for law in laws), strict=True)
        first, each = np.stack([rates[:, 0] for rates in low], axis=-1), np.stack(high, axis=-1)
        return cls(first, each, np.array_equal(first, each[:, 0]))

    def at(self, start: int, drafted: int) -> tuple[Floats, Floats]:
        """Acceptance of each of the drafted tokens from a position on, after a wrong and a right outcome; shape (drafted, laws)."""
        places = np.arange(drafted)
        right = self.each[start + places, places]
        wrong = right.copy()
        wrong[:1] = self.first[start]
        return wrong, right

    def after(self, start: int, drafted: NDArray[np.int64]) -> Floats:
        """Acceptance of the token after each number of drafted tokens, shape (numbers, laws)."""
        return self.each[start + drafted, drafted]

    def at_laws(self, law: NDArray[np.intp]) -> AcceptanceRates:
        """Rates under these of the laws."""
        return AcceptanceRates(self.first[:, law], self.each[:, :, law], self.alike)


# --- Heuristic --------------------------------------------------------------------------------------------------------


class HeuristicStates:
    """A quantity of decodings by the heuristic of transformers, by the state in which their rounds start, position after position.

    The quantity is a probability, or the mean of something over the decodings that are in a state. It starts from 0; what `here`
    has after the caller's changes moves on to the states in which the next rounds start.

    Parameters
    ----------
    longest, tokens
        Longest draft, and tokens to generate.
    rates
        Acceptance rates of each of several laws.

    >>> from model.outcomes.outcome_laws import Iid
    >>> states = HeuristicStates(3, 4, AcceptanceRates.of([Iid(1.0)], 4, 3))
    >>> states.here(0)[0, REJECTED] = 1.0  # a draft of one token, then as many as remain
    >>> states.advance(0, states.drafted(0))
    >>> np.argwhere(states.here(2)).tolist(), states.drafted(2).tolist()
    ([[2, 2, 0]], [1, 1, 1])
    """

    def __init__(self, longest: int, tokens: int, rates: AcceptanceRates) -> None:
        self.longest, self.tokens, self.rates = longest, tokens, rates
        outcomes, laws = 1 if rates.alike else 2, rates.first.shape[-1]
        self._accepted = np.zeros((longest + 2, longest, 3, laws))  # rounds after a completely accepted draft, by position
        # Of rounds that started at the last positions: the quantity by draft length, as far as tokens may still be rejected; and
        # the probability that each token is the first rejected one. By the outcome before, if it matters.
        self._started = np.zeros((outcomes, longest, longest, laws))
        self._rejecting = np.zeros((outcomes, longest, longest, laws))

    def drafted(self, start: int) -> NDArray[np.int64]:
        """Drafted tokens of a round that starts here, by draft length 1, 2, ..."""
        return np.minimum(np.arange(1, self.longest + 1), self.tokens - 1 - start)

    def here(self, start: int) -> Floats:
        """The quantity where a round starts at this position, by draft length, ending of the round before, and law; a view."""
        return np.asarray(self._accepted[start % len(self._accepted)])

    def advance(self, start: int, drafted: NDArray[np.int64]) -> None:
        """Move on from this position to the next."""
        here, most = self.here(start), int(drafted[-1])
        if most:
            self._go_on(start, drafted, most, here)
        here[:] = 0.0
        if most:
            self._reject(start + 1)

    def _go_on(self, start: int, drafted: NDArray[np.int64], most: int, here: Floats) -> None:
        """Note the rounds that start here, and move on those whose draft is completely accepted."""
        before = [here[:, REJECTED] + here[:, WRONG], here[:, RIGHT]]  # after a wrong and a right outcome
        if self.rates.alike:
            before = [before[0] + before[1]]
        # Drafts after which the decoding has not ended: each has a length of its own, and so a place of its own.
        full, whole, slot = drafted[drafted < self.tokens - 1 - start], 0.0, start % self.longest
        for index, (of, rates) in enumerate(zip(before, self.rates.at(start, most), strict=False)):
            survival = np.concatenate([np.ones((1, rates.shape[1])), np.cumprod(rates, axis=0)])
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


def heuristic_counts(first: int, longest: int, tokens: int, rates: AcceptanceRates) -> Floats:
    """Expected rounds from the draft length `first` on.

    >>> from model.outcomes.outcome_laws import Iid
    >>> counts = heuristic_counts(1, 3, 4, AcceptanceRates.of([Iid(1.0)], 4, 3))
    >>> np.argwhere(counts > 0).tolist()  # rounds of 1 and 3 drafts, the second cut to 1
    [[0, 0, 1, 0], [1, 2, 1, 0]]
    """
    found = np.zeros((2, tokens, longest + 1, rates.first.shape[-1]))
    states = HeuristicStates(longest, tokens, rates)
    states.here(0)[first - 1, REJECTED] = 1.0
    for start in range(tokens):
        drafted, mass = states.drafted(start), states.here(start)
        most = int(drafted[-1])
        for kind in (0, 1):
            own = mass[:, kind == _AFTER_FULL_DRAFT].sum(axis=1)
            found[kind, start, 1:most] = own[: max(most - 1, 0)]
            found[kind, start, most] = own[max(most - 1, 0) :].sum(axis=0)
        states.advance(start, drafted)
    return found


def heuristic_squares(
    first: int, longest: int, tokens: int, rates: AcceptanceRates, prices: RoundPrices, law: NDArray[np.intp],
    price: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """Mean square of a decoding's time, of pairs of laws and of prices at several costs; shape (pairs,)."""
    if prices.uniform and rates.first.shape[-1] * (longest + 1) < law.size:
        numbers = heuristic_products(first, longest, tokens, rates)[law]
        return np.asarray(np.einsum("nde,nd,ne->n", numbers, prices.time[price], prices.time[price], optimize=True))
    found = np.zeros(law.size)
    size = max(_CELLS // (longest * (longest + 1)), 1)
    for part in (slice(at, at + size) for at in range(0, law.size, size)):
        laws, which = np.unique(law[part], return_inverse=True)
        masses = HeuristicStates(longest, tokens, rates.at_laws(laws))
        untils = HeuristicStates(longest, tokens, rates.at_laws(law[part]))  # time so far x probability
        masses.here(0)[first - 1, REJECTED] = 1.0
        for start in range(tokens):
            drafted, mass, until = masses.drafted(start), masses.here(start)[..., which], untils.here(start)
            here = prices.time[:, None, drafted] if prices.uniform else prices.time[:, :, start, drafted]
            kinds = np.zeros(3, dtype=np.intp) if prices.uniform else _AFTER_FULL_DRAFT
            time = here[price[part]].transpose(2, 1, 0)[:, kinds]  # (lengths, endings, pairs)
            spent = time * mass
            found[part] += np.einsum("leb,leb->b", time, 2 * until + spent)
            until += spent
            for states in (masses, untils):
                states.advance(start, drafted)
    return found


def heuristic_products(first: int, longest: int, tokens: int, rates: AcceptanceRates) -> Floats:
    """Mean products of the numbers of rounds with each two numbers of drafted tokens; shape (laws, longest + 1, longest + 1).

    >>> from model.outcomes.outcome_laws import Iid
    >>> heuristic_products(1, 2, 6, AcceptanceRates.of([Iid(1.0)], 6, 2)).tolist()  # rounds of 1, 2 and 0 drafts
    [[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]
    """
    laws, each = np.arange(rates.first.shape[-1]), np.arange(longest + 1)
    found = np.zeros((laws.size, longest + 1, longest + 1))
    masses = HeuristicStates(longest, tokens, rates)
    untils = HeuristicStates(longest, tokens, rates.at_laws(np.repeat(laws, each.size)))  # rounds so far of each kind x probability
    masses.here(0)[first - 1, REJECTED] = 1.0
    for start in range(tokens):
        drafted, mass = masses.drafted(start), masses.here(start)
        until = untils.here(start).reshape(*mass.shape, each.size)
        for length, number in enumerate(drafted.tolist()):
            so_far = until[length].sum(axis=0)  # (laws, kinds of rounds)
            found[:, number] += so_far
            found[:, :, number] += so_far
            found[:, number, number] += mass[length].sum(axis=0)
            until[length, :, :, number] += mass[length]
        for states in (masses, untils):
            states.advance(start, drafted)
    return found


_CELLS = 400_000
"""Numbers in the states of pairs that are computed together: 3 MB."""


# --- Confidence -------------------------------------------------------------------------------------------------------


def confidence_counts(longest: int, tokens: int, rates: AcceptanceRates, doubts: Sequence[TwoClass]) -> Floats:
    """Expected rounds of drafts that end where the draft model is unsure, with the doubts of each law.

    A draft ends after an accepted token with probability `low_if_accepted`. After a token that will be rejected it continues until
    the draft model is unsure, with probability `low_if_rejected` per token, or until `longest` tokens.

    >>> from model.outcomes.outcome_laws import Iid
    >>> rates = AcceptanceRates.of([Iid(1.0)], 9, 3)
    >>> float(confidence_counts(3, 9, rates, [TwoClass(1, 0)]).sum())  # one drafted token per round
    5.0
    """
    of_accepted, of_rejected = (
        np.array([getattr(doubt, name) for doubt in doubts]) for name in ("low_if_accepted", "low_if_rejected")
    )
    found = np.zeros((2, tokens, longest + 1, len(doubts)))
    rejections = np.zeros((2, tokens, longest, len(doubts)))  # first rejected tokens, by their place in the draft
    ahead = np.zeros((longest + 2, 3, len(doubts)))  # by distance of the next start, and ending of the round before
    ahead[0, REJECTED] = 1.0
    longest_here = np.minimum(longest, np.arange(tokens)[::-1])
    for start, most in enumerate(longest_here.tolist()):
        here = ahead[0]
        if not most:
            found[:, start, 0] = _by_kind(here)
        else:
            places = np.arange(most)
            ends = np.where((places < most - 1)[:, None], of_accepted, 1.0)
            following = rates.after(start, places + 1)
            wrong, right = rates.at(start, most)
            accepted = np.stack([wrong, wrong, right])  # by ending of the round before
            reached = np.empty_like(accepted)
            reached[:, 0] = here
            reached[:, 1:] = here[:, None] * np.cumprod(accepted[:, :-1] * (1 - of_accepted), axis=1)
            kept = reached * accepted
            rejected, whole = reached - kept, kept * ends
            found[:, start, 1 : most + 1] = _by_kind(whole)
            rejections[:, start, :most] = _by_kind(rejected)
            whole = whole.sum(axis=0)
            ahead[1 : 1 + most, REJECTED] += rejected.sum(axis=0)
            # After the target's bonus token, whose position has an outcome before the next round's first.
            ahead[2 : 2 + most, WRONG] += whole * (1 - following)
            ahead[2 : 2 + most, RIGHT] += whole * following
        ahead[:-1], ahead[-1] = ahead[1:].copy(), 0.0
    found[:, :, 1:] += _until_unsure(rejections, of_rejected, longest_here)
    return found


def _by_kind(of_endings: Floats) -> Floats:
    """Sums over endings of the round before (first axis) of one kind: a rejection, or a completely accepted draft."""
    return np.stack([of_endings[REJECTED], of_endings[WRONG] + of_endings[RIGHT]])


def _until_unsure(rejected: Floats, unsure: Floats, longest: NDArray[np.int64]) -> Floats:
    """Probability that a draft with a rejected token ends after 1, 2, ... tokens, from that of its first rejected token there.

    Probabilities have the shape (..., drafts, tokens, laws); `longest` is the largest number of tokens of each draft, at which it
    ends.

    >>> _until_unsure(np.array([[[0.5], [0.0], [0.25]]]), np.array([0.5]), np.array([3])).tolist()
    [[[0.25], [0.125], [0.375]]]
    """
    found, going_on = np.empty_like(rejected), np.zeros_like(rejected[..., 0, :])
    for place in range(rejected.shape[-2]):
        going_on = going_on + rejected[..., place, :]
        found[..., place, :] = going_on * np.where((longest == place + 1)[:, None], 1.0, unsure)
        going_on = going_on - found[..., place, :]
    return found


# --- Rounds of a policy -----------------------------------------------------------------------------------------------


class PolicyRounds:
    """Expected rounds of a policy, kept for the laws and the number of tokens that were asked for last.

    Parameters
    ----------
    first
        Draft length of the first round, for the heuristic; None for drafts that end at a doubt.
    longest
        Longest draft.
    """

    def __init__(self, first: int | None, longest: int) -> None:
        self.first, self.longest = first, longest
        self._of: tuple[int, list[Any]] | None = None
        self._found: tuple[AcceptanceRates, Floats] | None = None

    def counted(self, tokens: int, laws: Sequence[Chain | Rounds], doubts: Sequence[TwoClass]) -> tuple[AcceptanceRates, Floats]:
        """Acceptance rates and expected rounds under each law; `doubts` are used without a first length only."""
        each = [*laws, *doubts]
        known = self._of is not None and self._of[0] == tokens and len(self._of[1]) == len(each)
        if not (known and self._of and all(one is other for one, other in zip(self._of[1], each, strict=True))):
            rates = AcceptanceRates.of(laws, tokens, self.longest)
            if self.first is None:
                counts = confidence_counts(self.longest, tokens, rates, doubts)
            else:
                counts = heuristic_counts(self.first, self.longest, tokens, rates)
            self._of, self._found = (tokens, each), (rates, counts)
        assert self._found is not None
        return self._found
