"""Hierarchical decoding of exactly so many tokens, with its coins by output position: exact expectations.

Whether the large model accepts a token, and whether the medium accepts the small model's token there, are told by two independent
coins for each output position. Behind a token that the large model rejects the small model's coins are used a second time. Where
they are independent of each other that changes no mean, not even of the reading `bonus`, whose rounds are longer where a draft was
kept as a whole: such a round ends behind all of these coins. It changes the variance, and with coins that depend on each other the
mean of `bonus`: `one_pass` carries along what is known of them.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.methods import rounds
from model.methods.hierarchical.algorithm import Parameters
from model.methods.rounds import AcceptanceLaw, ReplayRounds, Rounds
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Law, Markov, Replay

Floats = NDArray[np.float64]
Chances = tuple[Floats, Floats]
"""The chance of a success after a failure, and after a success."""


class PassPrices(NamedTuple):
    """Times of a pass of the small and of the medium model, of the large one by how many tokens it checks, and of a move.

    And the arithmetic of a token in a pass of the small and of the medium model.
    """

    draft: float
    medium: float
    verify: Floats
    link: float
    draft_operations: float
    medium_operations: float
    share: float = 1.0
    """Units that a pass of the small or the medium model keeps busy."""

    def work(self, drafts: Any, mediums: Any, offered: Any) -> tuple[Any, Any, Any]:
        """Time without moves, unit-time and arithmetic of a round, from its passes of the small and the medium model.

        Numbers or arrays. A pass of the medium model reads what was drafted for it, and one token more.
        """
        smaller, verify = drafts * self.draft + mediums * self.medium, self.verify[offered]
        beside = drafts * self.draft_operations + (drafts + mediums) * self.medium_operations
        return smaller + verify, smaller * self.share + verify, offered + 1 + beside


def prices(parameters: Parameters, cost: UnitCost) -> PassPrices:
    """What passes and moves between units take."""
    verify = cost.target_pass * np.array([cost.slowdown(width) for width in range(1, parameters.longest_draft + 2)])
    link = cost.link if parameters.placement == "separate" else 0.0
    operations = cost.operations("draft"), cost.operations("medium")
    return PassPrices(cost.required("draft"), cost.required("medium"), verify, link, *operations, cost.draft_devices)


def moments(parameters: Parameters, tokens: int, accept: AcceptanceLaw, medium_accept: Law, cost: UnitCost) -> rounds.Moments:
    """Moments of time, unit-time, rounds and offered tokens of a decoding; the variance is nan in the reading `recursive`.

    There the work of a round depends on all of its coins, not on the first failure alone, and coins are used again.

    >>> choice = Parameters(40, draft_length=3)
    >>> unit = UnitCost(1, cost_ratio=0.0, medium_cost_ratio=0.0)
    >>> round(moments(choice, 128, Iid(0.79), Iid(0.9), unit).time, 3)  # passes of the large model: as without a small one
    44.446
    """
    price, chains = prices(parameters, cost), _chains(medium_accept)
    each = recursive if parameters.reading == "recursive" else one_pass
    found = [
        each(parameters, tokens, large, chain, price)
        for large, chain in product(_large_chances(accept, tokens, parameters.longest_draft), chains)
    ]
    mean, square, *rest = np.mean(found, axis=0).tolist()
    return rounds.Moments(mean, max(square - mean**2, 0.0) if square == square else square, *rest)


def _chains(law: Law) -> list[Chain]:
    """A recorded sequence is a chain whose chances are 0 and 1."""
    if isinstance(law, Replay):
        return [ByPosition(record) for record in law.records.astype(np.float64)]
    if not isinstance(law, Iid | ByPosition | Markov):
        raise checks.ParameterError("this law of the medium model's outcomes has no closed form; ask for views = ['paths']")
    return [law]


def _large_chances(law: AcceptanceLaw, tokens: int, longest: int) -> list[Chances]:
    """By position and place in the draft."""
    if isinstance(law, ReplayRounds):
        position, place = np.arange(tokens)[:, None], np.arange(longest + 1)
        begun = np.maximum(position - place, 0)
        played = [np.asarray(place < record[begun], dtype=np.float64) for record in law.records]
        return [(chances, chances) for chances in played]
    if isinstance(law, Rounds):
        return [law.draft_chances(tokens, longest)]
    return [chain.draft_chances(tokens, longest) for chain in _chains(law)]


# --- Readings with one pass of the medium model, and one first failure ------------------------------------------------


def one_pass(parameters: Parameters, tokens: int, large: Chances, medium: Chain, price: PassPrices) -> Floats:
    """Mean and mean square of the time, means of unit-time, arithmetic, rounds and offered tokens: forward over starts of rounds.

    A round tells the small model's coins up to their first failure, or to the end of its draft. What the next rounds know of them
    is the last coin told, if all between are successes (it lies ahead), or the last one at all (it lies behind).
    """
    gamma, chances = parameters.draft_length, medium.chances(tokens)
    ring = zero = gamma + 2
    # Mass, first and second moment of the time so far, unit-time, arithmetic, rounds, offered tokens; position a round starts at;
    # where the last coin told is from there, and what it says; the large model's outcome just before.
    state = np.zeros((7, ring, 2 * gamma + 1, 2, 2))
    state[0, 0, zero - 1, 0, 0] = 1.0
    for start in range(tokens):
        here = state[:, start % ring].copy()
        state[:, start % ring] = 0.0
        room = tokens - 1 - start
        count = min(gamma, room)
        by_kept = np.einsum("xkvb,kvn->xnb", here, _kept_chances(here[0].sum(axis=-1), start, count, zero, chances))
        for kept in range(count + 1):
            offered = count + (parameters.reading == "bonus" and kept == count < room)
            spent = _spend(by_kept[:, kept], *round_price(parameters.reading, count, kept, offered, price), offered)
            told, says = (start + kept, 0) if kept < count else (start + count - 1, 1)
            for after, before, outcome, chance in _ends(large, start, offered):
                state[:, after % ring, zero + told - after, says, outcome] += spent[:, before] * chance
    sums = state[:, tokens % ring].sum(axis=(1, 2, 3))
    assert abs(sums[0] - 1) < 1e-9
    return np.asarray(sums[1:])


def round_price(reading: str, count: int, kept: int, offered: int, price: PassPrices) -> tuple[float, float, float]:
    """Time, unit-time and arithmetic of a round whose draft of `count` tokens has `kept` that the medium model keeps."""
    missing = count - kept if reading == "literal" else max(count - kept - 1, 0)
    time, busy, operations = price.work(count, 1 + missing if count else 0, offered)
    moves = 3 if count else 0  # to the small model, on to the medium, and back
    return float(time) + moves * price.link, float(busy), float(operations)


def _spend(sums: Floats, time: float, busy: float, operations: float, offered: int) -> Floats:
    mass, first = sums[0], sums[1]
    spent = [0 * mass, time * mass, 2 * time * first + time**2 * mass, busy * mass, operations * mass, mass, offered * mass]
    return np.asarray(sums + np.array(spent))


def _kept_chances(mass: Floats, start: int, count: int, zero: int, chances: Chances) -> Floats:
    """The chances that 0, 1, ..., `count` of the small model's tokens are kept, by what is known of its coins."""
    low, high = chances
    found = np.zeros((*mass.shape, count + 1))
    for index, says in np.argwhere(mass > 0):
        told = int(index) - zero
        if not count:
            found[index, says, 0] = 1.0
        elif told >= 0 and not says:
            found[index, says, told] = 1.0
        else:
            known = max(told + 1, 0)  # so many successes lie ahead
            rates = high[start + known : start + count].copy()
            if told < 0:
                chance = float(says)
                for position in range(start + told + 1, start + 1):
                    chance = chance * high[position] + (1 - chance) * low[position]
                rates[0] = chance
            found[index, says, known:] = _first_failure(rates)
    return found


def _first_failure(rates: Floats) -> Floats:
    """The chances of 0, 1, ... successes before the first failure, and of no failure."""
    survival = np.concatenate([[1.0], np.cumprod(rates)])
    return np.append(survival[:-1] * (1 - rates), survival[-1])


def _ends(large: Chances, start: int, offered: int) -> list[tuple[int, int, int, float]]:
    """Where the next round starts, the large model's outcome before this and before that round, and the chance."""
    low, high = large
    along = start + np.arange(offered), np.arange(offered)
    found = []
    for before in (0, 1):
        rates = high[along].copy()
        if offered and not before:
            rates[0] = low[start, 0]
        *ends, whole = _first_failure(rates).tolist()
        found += [(start + 1 + place, before, 0, chance) for place, chance in enumerate(ends)]
        # The token behind a whole draft has an outcome too: it is before the next round's first.
        behind = float((high if offered or before else low)[start + offered, offered])
        found += [(start + 1 + offered, before, outcome, whole * chance) for outcome, chance in ((0, 1 - behind), (1, behind))]
    return found


# --- The reading with rounds inside of rounds -------------------------------------------------------------------------


def recursive(parameters: Parameters, tokens: int, large: Chances, medium: Chain, price: PassPrices) -> Floats:
    """The same means, and nan for the mean square: the chance that a round starts somewhere, times what one takes from there."""
    gamma, inner = parameters.draft_length, parameters.inner_draft_length
    assert inner is not None
    drafted = np.arange(inner + 1.0)
    time_of = np.asarray(drafted * price.draft + price.medium)
    operations = np.asarray(drafted * price.draft_operations + (drafted + 1) * price.medium_operations)
    inside = rounds.RoundPrices(time_of + np.where(drafted > 0, 2 * price.link, 0.0), time_of * price.share, operations)

    @cache
    def expected(start: int, count: int) -> tuple[float, float, float]:
        found = rounds.moments(inner, count, _from(medium, start, count), inside)
        moves = 1 if inner and count > 1 else 2  # back; and where nothing is drafted, there
        return found.time + moves * price.link, found.busy, found.operations

    total = np.zeros(6)
    for start, chance in enumerate(_starts(large, gamma, tokens)):
        count = min(gamma, tokens - 1 - start)
        place = 0 if isinstance(medium, Iid | Markov) else start  # the same from everywhere
        time, busy, operations_of = expected(place, count) if count else (0.0, 0.0, 0.0)
        verify = price.verify[count]
        total += chance * np.array([time + verify, np.nan, busy + verify, operations_of + count + 1, 1.0, count])
    return total


def _starts(large: Chances, gamma: int, tokens: int) -> Floats:
    """The chance that a round starts at each position."""
    state = np.zeros((tokens + 1, 2))
    state[0, 0] = 1.0
    for start in range(tokens):
        for after, before, outcome, chance in _ends(large, start, min(gamma, tokens - 1 - start)):
            state[after, outcome] += state[start, before] * chance
    return np.asarray(state[:tokens].sum(axis=1))


def _from(law: Chain, start: int, count: int) -> Chain:
    """The law of the positions from `start` on."""
    return ByPosition(law.rates[start : start + count], name=law.name) if isinstance(law, ByPosition) else law
