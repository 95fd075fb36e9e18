"""Hierarchical decoding of a given number of tokens, with outcomes by output position: exact expectations.

Two independent outcomes per output position decide whether the large model accepts a token, and whether the medium model accepts
the small model's token there. After a token that the large model rejects, the medium's outcomes at later positions are used a
second time. If they are independent of each other, this changes no mean, not even of the reading `bonus`, whose rounds are longer
after a fully accepted draft: such a round ends after all of these outcomes. It changes the variance, and with dependent outcomes
the mean of `bonus`; so `one_pass` tracks the known outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.methods.hierarchical.algorithm import Parameters
from model.methods.rounds import prices_of_rounds, round_moments, round_starts
from model.methods.rounds.round_laws import AcceptanceLaw, MixedRounds, ReplayRounds, Rounds
from model.methods.rounds.round_moments import Moments
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Law, Markov, Replay

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Index = NDArray[np.intp]
Chances = tuple[Floats, Floats]
"""Probability of a success after a failure, and after a success."""


class PassPrices(NamedTuple):
    """Times of passes of the three models and of a move between units, by position.

    The first axis of arrays is the start position; it has a single entry for uniform costs. Those of several costs have a last axis
    of costs, also the numbers.
    """

    small: Floats
    """0, 1, ... successive passes of the small model; the first reads one token."""
    medium: Floats
    """0, 1, ... successive passes of the medium model."""
    medium_verify: Floats
    """Pass of the medium model over the last token and 0, 1, ... drafted tokens."""
    verify: Floats
    """Pass of the large model over the last token and 0, 1, ... offered tokens."""
    late_small: Floats
    """Additional time of a round if the small model must read 0, 1, ... tokens from before it."""
    late_verify: Floats
    """Additional time of a round if the medium model must read one token from before it; shape (positions,)."""
    link: Any
    draft_operations: Any
    """Arithmetic per token of the small model; `medium_operations` of the medium model."""
    medium_operations: Any
    share: Any
    """Units that a pass of the small or the medium model keeps busy."""

    @property
    def uniform(self) -> bool:
        """True if passes take the same time at every position."""
        return len(self.verify) == 1

    def row(self, position: int) -> int:
        """Index of a position in the arrays."""
        return 0 if self.uniform else position

    def at(self, costs: Any) -> PassPrices:
        """Those of one or several of the costs."""
        return PassPrices(*(each[..., costs] for each in self))

    def of_each(self, numbers: Floats | Counts) -> Any:
        """Numbers, of shape (rounds,), as an array that broadcasts to those of each cost."""
        return numbers.reshape(numbers.shape + (1,) * (self.small.ndim - 2))


def prices(parameters: Parameters, cost: StepCosts, tokens: int) -> PassPrices:
    """Prices of passes and moves between units, at each position below `tokens` if times depend on the position.

    At a cost, or at several joined ones (`model.costs.many_costs`).
    """
    cost, longest, most = parameters.draft_costs(cost), parameters.longest_draft, longest_inner(parameters)
    link = np.asarray(cost.link if parameters.placement == "separate" else 0.0 * np.asarray(cost.link))
    others = link, *(np.asarray(cost.operations(role)) for role in ("draft", "medium")), np.asarray(cost.draft_devices)

    def medium_verify(unread: int) -> Floats:
        widths = np.arange(most + 1) + 1 + unread
        found = prices_of_rounds.times_by_width(
            cost, lambda width: PassShape(ALL_LAYERS, "medium", width=width, heads=width - unread), widths, tokens, before=unread
        )
        return found[..., None, :] if cost.uniform else found

    verify = prices_of_rounds.verify_times(cost, longest + 1, 1 if cost.uniform else tokens)
    if cost.uniform:
        passes = np.arange(longest + 1.0)
        small, medium = (passes * np.asarray(cost.draft_times(role=role))[..., None, None] for role in ("draft", "medium"))
        late = np.zeros(small.shape), np.zeros(small.shape[:-1])
        return _costs_last(PassPrices(small, medium, medium_verify(0), verify, *late, *others))
    small, medium = (prices_of_rounds.draft_times(cost, longest, tokens, role=role) for role in ("draft", "medium"))
    start = np.arange(tokens)
    room = tokens - 1 - start
    count = np.minimum(parameters.draft_length, room)
    drafted = count if parameters.inner_draft_length is None else np.minimum(most, np.maximum(count - 1, 0))
    # A round without passes of a model has no additional time for it.
    late_small = [
        (cost.draft_times(np.maximum(start - unread, 0), width=unread + 1) - small[..., 1]) * (drafted > 0)
        for unread in range(longest + 1)
    ]
    first = medium_verify(0)
    late_verify = (medium_verify(1) - first)[..., start, drafted] * (room > 0)
    return _costs_last(PassPrices(small, medium, first, verify, np.stack(late_small, axis=-1), late_verify, *others))


def _costs_last(price: PassPrices) -> PassPrices:
    """The same with the axis of costs, if there is one, as the last."""
    return PassPrices(*(np.moveaxis(each, 0, -1) for each in price)) if price.link.ndim else price


def longest_inner(parameters: Parameters) -> int:
    """Longest draft for the medium model."""
    inner = parameters.inner_draft_length
    return parameters.draft_length if inner is None else min(inner, parameters.draft_length)


class OuterRounds(NamedTuple):
    """Prices and properties of rounds, by the draft tokens 0, 1, ... that the medium model accepts, or by replication.

    Arrays of equal length; prices at several costs have a last axis of costs.
    """

    time: Floats
    busy: Floats
    operations: Floats
    offered: Counts
    read: Counts
    """Offered positions that the small model has read, counted from the start of the round."""

    def of(self, which: Counts) -> OuterRounds:
        """Select rounds by index."""
        time, busy, operations, offered, read = self
        return OuterRounds(time[which], busy[which], operations[which], offered[which], read[which])


def round_prices(parameters: Parameters, price: PassPrices, start: int, room: int) -> OuterRounds:
    """Rounds that start at a position with `room` + 1 remaining tokens, the last of which the large model emits itself.

    The smaller models have one token to read first; `PassPrices` has the additional time of more tokens.

    >>> from model.costs.layer_times import UnitCost
    >>> choice = Parameters(40, draft_length=2)
    >>> price = prices(choice, UnitCost(40, cost_ratio=0.1, medium_cost_ratio=0.5), tokens=10)
    >>> round_prices(choice, price, 0, 9).time.tolist()  # two, one, and no tokens that the medium model generates alone
    [108.0, 88.0, 68.0]
    """
    count, row = min(parameters.draft_length, room), price.row(start)
    kept = np.arange(count + 1)
    # Tokens from the medium's pass over the draft: the accepted ones and, except in `literal`, its own next token.
    given = kept if parameters.reading == "literal" else np.minimum(kept + 1, count)
    missing = count - given
    offered = np.full(count + 1, count)
    if parameters.reading == "bonus" and room > count:
        offered[-1] += 1
    verify = price.verify[row, offered]
    if not count:
        return OuterRounds(verify, verify, np.ones(verify.shape), offered, kept)
    places = 0 * given if price.uniform else start + given
    smaller = price.small[row, count] + price.medium_verify[row, count] + price.medium[places, missing]
    others = count * price.draft_operations + price.of_each(count + 1 + missing) * price.medium_operations
    moved = 3 * price.link  # to the small model, on to the medium, and back
    read = np.minimum(kept + 1, count)
    arithmetic = price.of_each(offered + 1) + others
    return OuterRounds(smaller + verify + moved, smaller * price.share + verify, arithmetic, offered, read)


def moments_of_pairs(
    parameters: Parameters, tokens: int, laws: Sequence[Mapping[str, Any]], price: PassPrices, law: Index, cost: Index
) -> Moments:  # fmt: skip
    """Moments of time, unit-time, rounds and offered tokens of decodings; the variance is nan in the reading `recursive`.

    There the work of a round depends on all of its outcomes, not only on the first rejection, and outcomes are used again. Of pairs
    of laws of `accept` and `medium_accept` and of costs, whose prices are those of several; arrays of shape (pairs,).

    >>> from model.costs import many_costs
    >>> from model.costs.layer_times import UnitCost
    >>> choice, laws = Parameters(40, draft_length=3), [{"accept": Iid(0.79), "medium_accept": Iid(0.9)}]
    >>> price = prices(choice, many_costs.joined([UnitCost(1, cost_ratio=0.0, medium_cost_ratio=0.0)]), 128)
    >>> one = np.zeros(1, dtype=np.intp)
    >>> moments_of_pairs(choice, 128, laws, price, one, one).time.round(3).tolist()  # passes of the large model
    [44.446]
    """
    longest = parameters.longest_draft
    parts: list[list[tuple[Chances, Chain]]]
    parts = [[*product(_large_chances(each["accept"], tokens, longest), _chains(each["medium_accept"]))] for each in laws]
    sizes = np.array([len(each) for each in parts])
    begins, own = np.cumsum(sizes) - sizes, sizes[law]
    first = np.cumsum(own) - own
    part, of_cost = np.repeat(begins[law], own) + np.arange(own.sum()) - np.repeat(first, own), np.repeat(cost, own)
    every = [each for several in parts for each in several]
    found = np.empty((6, part.size))
    for at in range(0, part.size, _PAIRS):
        here = slice(at, at + _PAIRS)
        pairs, own_price = [every[index] for index in part[here].tolist()], price.at(of_cost[here])
        if parameters.reading == "recursive":
            for index, (accept, medium_accept) in enumerate(pairs):
                found[:, at + index] = recursive(parameters, tokens, accept, medium_accept, own_price.at(index))
            continue
        low, high = (np.stack([large[which] for large, _ in pairs], axis=-1) for which in (0, 1))
        medium = np.array([chain.probabilities(tokens) for _, chain in pairs]).transpose(1, 2, 0)
        found[:, here] = one_pass(parameters, tokens, (low, high), (medium[0], medium[1]), own_price)
    mean, square, *rest = np.add.reduceat(found, first, axis=1) / own
    return Moments(mean, np.maximum(square - mean**2, 0.0), *rest)


_PAIRS = 64
"""Pairs that are followed together."""


def _chains(law: Law) -> list[Chain]:
    """Chains of a law; a recorded sequence is a chain with probabilities 0 and 1."""
    if isinstance(law, Replay):
        return [ByPosition(record) for record in law.records.astype(np.float64)]
    if not isinstance(law, Iid | ByPosition | Markov):
        raise checks.ParameterError("this law of the medium model's outcomes has no closed form; ask for views = ['paths']")
    return [law]


def _large_chances(law: AcceptanceLaw, tokens: int, longest: int) -> list[Chances]:
    """Acceptance probabilities by output position and position in the draft, for each chain of the law."""
    if isinstance(law, ReplayRounds):
        position, place = np.arange(tokens)[:, None], np.arange(longest + 1)
        begun = np.maximum(position - place, 0)
        played = [np.asarray(place < record[begun], dtype=np.float64) for record in law.records]
        return [(chances, chances) for chances in played]
    if isinstance(law, Rounds):
        return [law.draft_probabilities(tokens, longest)]
    if isinstance(law, MixedRounds):
        raise checks.ParameterError("a mixture of levels of difficulty has no closed form here; ask for views = ['paths']")
    return [chain.draft_probabilities(tokens, longest) for chain in _chains(law)]


# --- Readings with one pass of the medium model, and one first failure ------------------------------------------------


def one_pass(parameters: Parameters, tokens: int, large: Chances, medium: Chances, price: PassPrices) -> Floats:
    """Mean and mean square of the time, means of unit-time, arithmetic, rounds and offered tokens; shape (6, pairs).

    Forward recursion over starts of rounds. A round reveals the medium's outcomes up to the first rejection, or to the end of the
    draft. The next round's knowledge of them is the position and value of the last revealed outcome: if it is ahead, all outcomes
    before it are acceptances. The tokens that the smaller models must still read at the next round are known at the end of this
    one, and their time is added there.

    Chances have a last axis of pairs, as the prices have: those of the large model by output position and position in the draft,
    those of the medium model by output position.
    """
    gamma, pairs = parameters.draft_length, medium[0].shape[-1]
    ring = zero = gamma + 2
    # Axes: quantity (probability, first and second moment of the time so far, unit-time, arithmetic, rounds, offered tokens), start
    # of a round, position of the last revealed outcome relative to it, its value, the large model's outcome before, pair.
    state = np.zeros((7, ring, 2 * gamma + 1, 2, 2, pairs))
    state[0, 0, zero - 1, 0, 0] = 1.0
    for start in range(tokens):
        here = state[:, start % ring].copy()
        state[:, start % ring] = 0.0
        room = tokens - 1 - start
        count = min(gamma, room)
        possible = here[0].any(axis=(-2, -1))
        by_kept = np.einsum("xkvbp,kvnp->xnbp", here, _kept_chances(possible, start, count, zero, medium))
        if not start or room <= gamma or not price.uniform:  # else equal to the one before
            rounds = round_prices(parameters, price, start, room)
        ends = {offered: _ends(large, start, offered) for offered in {*rounds.offered.tolist()}}
        for kept, (offered, read) in enumerate(zip(rounds.offered.tolist(), rounds.read.tolist(), strict=True)):
            spent = _spend(by_kept[:, kept], rounds.time[kept], rounds.busy[kept], rounds.operations[kept], 1.0, offered)
            told, says = (start + kept, 0) if kept < count else (start + count - 1, 1)
            for after, before, outcome, chance in ends[offered]:
                ended = spent[:, before]
                if not price.uniform and after < tokens:
                    whole = after - start == offered + 1
                    more = price.late_small[after, max(after - start - read, 0)] + whole * price.late_verify[after]
                    ended = _spend(ended, more, more * price.share) if more.any() else ended
                state[:, after % ring, zero + told - after, says, outcome] += ended * chance
    sums = state[:, tokens % ring].sum(axis=(1, 2, 3))
    assert (abs(sums[0] - 1) < 1e-9).all()
    return np.asarray(sums[1:])


def _spend(sums: Floats, time: Any, busy: Any, operations: Any = 0.0, passes: float = 0.0, offered: float = 0.0) -> Floats:
    mass, first = sums[0], sums[1]
    moments_of_time = time * mass, 2 * time * first + time**2 * mass
    return np.asarray(sums + np.array([0 * mass, *moments_of_time, busy * mass, operations * mass, passes * mass, offered * mass]))


def _kept_chances(possible: NDArray[np.bool_], start: int, count: int, zero: int, chances: Chances) -> Floats:
    """Probabilities that 0, 1, ..., `count` of the small model's tokens are accepted, by the last revealed outcome, where possible.

    Shape (positions of the outcome, its values, count + 1, pairs).
    """
    low, high = chances
    found = np.zeros((*possible.shape, count + 1, low.shape[-1]))
    for index, says in np.argwhere(possible):
        told = int(index) - zero
        if not count:
            found[index, says, 0] = 1.0
        elif told >= 0 and not says:
            found[index, says, told] = 1.0
        else:
            known = max(told + 1, 0)  # known acceptances ahead
            rates = high[start + known : start + count].copy()
            if told < 0:
                chance = np.full(low.shape[-1], float(says))
                for position in range(start + told + 1, start + 1):
                    chance = chance * high[position] + (1 - chance) * low[position]
                rates[0] = chance
            found[index, says, known:] = _first_failure(rates)
    return found


def _first_failure(rates: Floats) -> Floats:
    """Probabilities of 0, 1, ... successes before the first failure, and of no failure, along the first axis."""
    survival = np.concatenate([np.ones((1, *rates.shape[1:])), np.cumprod(rates, axis=0)])
    return np.concatenate([survival[:-1] * (1 - rates), survival[-1:]])


def _ends(large: Chances, start: int, offered: int) -> list[tuple[int, int, int, Any]]:
    """List (start of the next round, outcome before this round, outcome before the next round, probability).

    Probabilities have the shape of the chances without their first two axes.
    """
    low, high = large
    along = start + np.arange(offered), np.arange(offered)
    found = []
    for before in (0, 1):
        rates = high[along].copy()
        if offered and not before:
            rates[0] = low[start, 0]
        *ends, whole = _first_failure(rates)
        found += [(start + 1 + place, before, 0, chance) for place, chance in enumerate(ends)]
        # The token after a fully accepted draft has an outcome too: it precedes the next round.
        following = (high if offered or before else low)[start + offered, offered]
        chances = (0, 1 - following), (1, following)
        found += [(start + 1 + offered, before, outcome, whole * chance) for outcome, chance in chances]
    return found


# --- The reading `recursive`: rounds inside of rounds -----------------------------------------------------------------


def recursive(parameters: Parameters, tokens: int, large: Chances, medium: Chain, price: PassPrices) -> Floats:
    """Means as in `one_pass`, with nan for the mean square: sums over start positions of probability times cost of a round."""
    gamma, inner = parameters.draft_length, longest_inner(parameters)
    medium.probabilities(tokens - 1)  # raises ParameterError for too few rates
    inside, total, offers = _inside(price, inner), np.zeros(6), _Offers(medium, inner)
    # Times and arithmetic of an offer; independent of the start if neither the law nor the prices depend on the position.
    starting = [*_rounds(large, gamma, tokens)]
    alike = price.uniform and isinstance(medium, Iid | Markov)
    kinds = {(0 if alike else start, len(ends) - 1) for start, ends in enumerate(starting)}
    choices = {
        (start, count): round_moments.RoundChoice(inner, count, _from(medium, start, count), _from_position(inside, start, count))
        for start, count in kinds if count
    }  # fmt: skip
    found = dict(zip(choices, round_moments.moments_of_many([*choices.values()]), strict=True))
    for start, ends in enumerate(starting):
        count, chance, row = len(ends) - 1, float(ends.sum()), price.row(start)
        verify, link, share = float(price.verify[row, count]), float(price.link), float(price.share)
        time, busy, operations = verify, verify, count + 1.0
        if count:
            offer = found[0 if alike else start, count]
            moves = 1 if inner and count > 1 else 2  # the way back; without inner drafts also the way there
            time += offer.time + moves * link
            busy += offer.busy
            operations += offer.operations
        total += chance * np.array([time, np.nan, busy, operations, 1.0, count])
        if price.uniform or not count:
            continue
        for accepted, chance in enumerate(ends.tolist()):
            after = start + accepted + 1
            if after < tokens:
                unread = np.clip(accepted + 1 - count + np.array([1, 2]), 0, gamma)
                more = offers.unread(start, count) @ price.late_small[after, unread]
                more = more + price.late_verify[after] * (accepted == count)
                total += chance * np.array([more, np.nan, more * share, 0.0, 0.0, 0.0])
    return total


def _inside(price: PassPrices, inner: int) -> prices_of_rounds.RoundPrices:
    """Prices of the rounds of the small and the medium model."""
    drafted = np.arange(inner + 1)
    small, looks = price.small[:, : inner + 1], price.medium_verify
    operations = drafted * price.draft_operations + (drafted + 1) * price.medium_operations
    moved = np.where(drafted > 0, 2 * price.link, 0.0)
    usual = small + looks
    after_whole = usual + np.where(drafted > 0, price.late_small[:, 1:2], 0.0)
    time = usual[0] if price.uniform else np.stack([usual, after_whole])
    return prices_of_rounds.RoundPrices(time + moved, time * price.share, np.asarray(operations, dtype=np.float64))


def _from_position(inside: prices_of_rounds.RoundPrices, start: int, count: int) -> prices_of_rounds.RoundPrices:
    """Prices of the `count` positions from `start` on."""
    if inside.uniform:
        return inside
    here = slice(start, start + count)
    return inside._replace(time=inside.time[:, here], busy=inside.busy[:, here])


class _Offers:
    """Positions of the medium model's offers that the small model has read."""

    def __init__(self, law: Chain, inner: int) -> None:
        self.law, self.inner = law, inner
        self.known: dict[tuple[int, int], Floats] = {}

    def unread(self, start: int, count: int) -> Floats:
        """Probabilities that the small model has not read the last one of `count` tokens, and the last two.

        The draft of the last inner round is always accepted completely. If that round drafted nothing, the small model has also not
        read the token before, provided that the inner draft before was accepted completely.
        """
        alike = isinstance(self.law, Iid | Markov)
        key = (0 if alike else start), count
        if key not in self.known:
            found = round_starts.starts(self.inner, count, _from(self.law, start, count))
            two = float(found.after_full_draft[-1])
            self.known[key] = np.array([1 - two, two])
        return self.known[key]


def _rounds(large: Chances, gamma: int, tokens: int) -> Iterator[Floats]:
    """Yield, for each position, the probabilities that a round starts there and 0, 1, ... of its tokens are accepted."""
    state = np.zeros((tokens + 1, 2))
    state[0, 0] = 1.0
    for start in range(tokens):
        count = min(gamma, tokens - 1 - start)
        found = np.zeros(count + 1)
        for after, before, outcome, chance in _ends(large, start, count):
            state[after, outcome] += state[start, before] * chance
            found[after - start - 1] += state[start, before] * chance
        yield found


def _from(law: Chain, start: int, count: int) -> Chain:
    """Law of the `count` positions from `start` on."""
    return ByPosition(law.rates[start : start + count]) if isinstance(law, ByPosition) else law
