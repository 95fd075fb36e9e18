"""Speculative decoding of static batches: distribution of the sequences left in each round, and the prices of rounds.

Sequences have independent random outcomes, so the number of sequences of equal length that have an r-th round is binomial. The time
of a round depends on the number of sequences and on the longest of their drafts; the next batch begins when all sequences have
ended. Successive rounds are dependent, so the variance of the time is not computed (nan).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import Totals, Work
from model.methods.rounds.prices_of_rounds import RoundPrices, round_prices
from model.methods.rounds.round_laws import AcceptanceLaw, Rounds
from model.methods.rounds.round_moments import Moments, moments
from model.methods.rounds.round_walks import Tally
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Chain, Outcomes

Floats = NDArray[np.float64]


class BatchPrices(NamedTuple):
    """Price of a round, by the number of sequences left and the tokens drafted per sequence.

    Shapes (sequences + 1, longest + 1). If times depend on the position, `time` and `busy` have shape (2, sequences + 1, positions,
    longest + 1): index 1 of the first axis is for a round after one in which any sequence accepted its whole draft, so that the
    first draft pass reads two tokens of each sequence; the third axis is the position of the longest sequence, to which the others
    are padded.
    """

    time: Floats
    busy: Floats
    operations: Floats

    def of_rounds(
        self, reread: NDArray[np.bool_], count: NDArray[Any], longest: NDArray[Any], drafted: NDArray[Any]
    ) -> tuple[Floats, Floats, Floats]:
        """Time, unit-time and arithmetic of rounds."""
        where: Any = (count, drafted) if self.time.ndim == 2 else (reread.astype(np.intp), count, longest, drafted)
        return self.time[where], self.busy[where], self.operations[count, drafted]


@lru_cache(maxsize=8)  # the same for all laws
def prices(
    cost: StepCosts, longest: int, sequences: int, *, tokens: int = 1, separate: bool = False
) -> BatchPrices:
    """`model.methods.rounds.prices_of_rounds.round_prices` for each number of sequences; 0 without sequences.

    >>> from model.costs.layer_times import UnitCost
    >>> found = prices(UnitCost(40, cost_ratio=0.1, verify_cost=((1, 1.0), (4, 2.5))), 1, 2)
    >>> found.time.tolist()  # two sequences: 1.5 for a token of each, 2.5 for two; 1.5 for the draft
    [[0.0, 0.0], [40.0, 64.0], [60.0, 106.0]]
    """
    counts, drafted = np.arange(1, sequences + 1)[:, None], np.arange(longest + 1.0)
    widths, link = np.arange(1, longest + 2), np.where(drafted > 0, 2 * cost.link * separate, 0.0)
    if cost.uniform:
        drafts, verify = drafted * cost.draft_times(sequences=counts), cost.verify_times(widths, sequences=counts)
    else:
        start = np.arange(tokens)
        verify = cost.verify_times(widths, start[:, None], counts[:, None])
        each = cost.draft_times(np.arange(tokens + longest), sequences=counts)
        until = np.concatenate([np.zeros((sequences, 1)), np.cumsum(each, axis=1)], axis=1)
        usual = until[:, start[:, None] + np.arange(longest + 1)] - until[:, start, None]
        wide = cost.draft_times(np.maximum(start - 1, 0), width=2, sequences=counts)
        drafts = np.stack([usual, usual + np.where(drafted > 0, (wide - each[:, :tokens])[..., None], 0.0)])
    time, busy = (drafts * share + verify for share in (1.0, cost.draft_devices))
    operations = counts * (1.0 + drafted + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0))
    none = ((1, 0), (0, 0)) if cost.uniform else ((0, 0), (1, 0), (0, 0), (0, 0))
    return BatchPrices(np.pad(time + link, none), np.pad(busy, none), np.pad(operations, ((1, 0), (0, 0))))


@lru_cache(maxsize=64)  # choices of one law differ in batches and prices
def round_probabilities(law: Chain | Rounds, draft_length: int, tokens: int) -> Floats:
    """Probability that a sequence has an r-th round and can use m drafted tokens in it; shape (rounds, draft_length + 1).

    >>> from model.outcomes.outcome_laws import Iid
    >>> round_probabilities(Iid(0.5), 1, 3).tolist()  # its second round has two tokens left, or one
    [[0.0, 1.0], [0.5, 0.5], [0.25, 0.0]]
    """
    steps = _steps(law, draft_length, tokens)
    state, found = np.zeros((tokens, 2)), np.zeros((tokens, draft_length + 1))
    state[0, 0] = 1.0
    room = np.minimum(draft_length, tokens - 1 - np.arange(tokens))
    for number in range(tokens):
        found[number] = np.bincount(room, state.sum(axis=1), draft_length + 1)
        after = np.zeros_like(state)
        for more in range(1, min(draft_length + 1, tokens - 1) + 1):
            after[more:] += np.einsum("sb,sbo->so", state[:-more], steps[:-more, :, more - 1])
        state = after
        if not state.any():
            break
    return found


def _steps(law: Chain | Rounds, draft_length: int, tokens: int) -> Floats:
    """Probabilities that a round gives 1, 2, ... tokens and ends with an outcome, by its start and the outcome before it.

    Shape (positions, 2, draft_length + 1, 2).
    """
    low, high = law.draft_probabilities(tokens, draft_length)
    found = np.zeros((tokens, 2, draft_length + 1, 2))
    for start in range(tokens):
        count = min(draft_length, tokens - 1 - start)
        for before in (0, 1):
            rates = high[start + np.arange(count), np.arange(count)].copy()
            if count and not before:
                rates[0] = low[start, 0]
            survival = np.concatenate([[1.0], np.cumprod(rates)])
            found[start, before, :count, 0] = survival[:-1] * (1 - rates)
            following = high[start + count, count]  # has no effect without a draft
            found[start, before, count] = survival[-1] * np.array([1 - following, following])
    return found


def remaining_probabilities(sequences: Iterable[Floats]) -> Floats:
    """Probability that n sequences have an r-th round, and none of them can use more than m drafted tokens in it.

    `each` has the arrays of `round_probabilities`, one per sequence. Shape (rounds, sequences + 1, draft_length + 1).
    """
    found: Floats | None = None
    for sequence in sequences:
        ends, goes = 1 - sequence.sum(axis=1), np.cumsum(sequence, axis=1)
        if found is None:
            found = np.ones((len(sequence), 1, sequence.shape[1]))
        more = np.zeros((len(sequence), found.shape[1] + 1, sequence.shape[1]))
        more[:, :-1] = found * np.maximum(ends, 0.0)[:, None, None]
        more[:, 1:] += found * goes[:, None, :]
        found = more
    assert found is not None
    return found


def rounds_of(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Iterator[Floats]:
    """Expected rounds of each batch, by remaining sequences and drafted tokens; shape (sequences + 1, draft_length + 1)."""
    known = _with_closed_form(law)
    for batch in parameters.batches(tokens):
        yield _rounds_of_batch(known, parameters.draft_length, tuple(batch.values()))


@lru_cache(maxsize=4096)  # independent of costs, and small
def _rounds_of_batch(law: Chain | Rounds, draft_length: int, lengths: tuple[int, ...]) -> Floats:
    rounds = max(lengths)
    known = {
        length: np.pad(round_probabilities(law, draft_length, length), ((0, rounds - length), (0, 0))) for length in {*lengths}
    }
    chance = np.diff(remaining_probabilities([known[length] for length in lengths]), axis=2, prepend=0.0)
    chance[:, 0] = 0.0
    return np.asarray(chance.sum(axis=0))


class _Places(NamedTuple):
    """Distribution of a sequence's position at its r-th round.

    `chance` has shape (2, rounds, positions); index 1 of the first axis is after a completely accepted draft.
    """

    chance: Floats
    length: int

    @property
    def ended(self) -> Floats:
        """Probability that the sequence has ended, by round."""
        return np.asarray(np.maximum(1 - self.chance.sum(axis=(0, 2)), 0.0))


@lru_cache(maxsize=64)
def _places(law: Chain | Rounds, draft_length: int, tokens: int) -> _Places:
    steps = _steps(law, draft_length, tokens)
    found = np.zeros((2, tokens, tokens))
    state = np.zeros((2, tokens, 2))
    state[0, 0, 0] = 1.0
    for number in range(tokens):
        found[:, number] = state.sum(axis=2)
        after = np.zeros_like(state)
        each = state.sum(axis=0)
        for more in range(1, min(draft_length + 1, tokens - 1) + 1):
            whole = int(more == draft_length + 1 and draft_length > 0)
            after[whole, more:] += np.einsum("sb,sbo->so", each[:-more], steps[:-more, :, more - 1])
        state = after
        if not state.any():
            break
    return _Places(found, tokens)


def _rounds_by_place(law: Chain | Rounds, draft_length: int, lengths: tuple[int, ...]) -> Floats:
    """Expected rounds of a batch with the axes of position-dependent `BatchPrices`.

    Shape (2, sequences + 1, positions, draft_length + 1). Sequences are independent: the probability that n are left, none beyond a
    position and none with room for more than m drafted tokens, is a product over sequences. Its differences are the probabilities
    of the longest position and of the largest room.
    """
    tokens = max(lengths)
    low = max(min(lengths) - 1 - draft_length, 0)  # below this position every sequence can use a whole draft
    groups = [(_places(law, draft_length, length), size) for length, count in Counter(lengths).items() for size in _parts(count)]
    each = [_left_of(places, count, tokens, draft_length, low) for places, count in groups]
    by_chance = [np.einsum("r,frk->fk", weight, power) for weight, power in each[0]] if len(each) == 1 else _of_groups(each)
    # Axes: any completely accepted draft, sequences, positions (alone, then with limited room).
    both = np.stack(by_chance, axis=1)
    chances = np.zeros((2, len(by_chance), tokens, draft_length + 1))
    chances[..., draft_length] = both[..., :tokens]
    chances[:, :, low:, :draft_length] = both[..., tokens:].reshape(2, len(by_chance), tokens - low, draft_length)
    chances[:, 0] = 0.0
    chances = np.diff(np.diff(chances, axis=2, prepend=0.0), axis=3, prepend=0.0)
    chances[1] -= chances[0]
    return chances


_few_rounds_by_place = lru_cache(maxsize=128)(_rounds_by_place)
"""Cached for small batches; independent of costs."""
_FEW = 64
_MOST_ALIKE = 500
"""Largest group of equal sequences; larger ones overflow binomial coefficients."""


def _parts(count: int) -> list[int]:
    """Split `count` sequences into groups of at most `_MOST_ALIKE`."""
    return [_MOST_ALIKE] * (count // _MOST_ALIKE) + [count % _MOST_ALIKE] * (count % _MOST_ALIKE > 0)


def _left_of(each: _Places, count: int, tokens: int, draft_length: int, low: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield, for each number n of `count` equal sequences, two factors whose product is the probability that n are left.

    The first factor has shape (rounds,). The second has shape (2, rounds, cells): the cells are "none beyond a position", then
    "none beyond a position and none with more than this room"; index 0 of the first axis is without completely accepted drafts,
    index 1 with any drafts.
    """
    chance = np.zeros((2, tokens, tokens))
    chance[:, : each.length, : each.length] = each.chance
    chance[1] += chance[0]
    until = np.cumsum(chance, axis=2)
    before = np.concatenate([np.zeros((2, tokens, 1)), until], axis=2)
    first = np.maximum(each.length - 1 - np.arange(draft_length), 0)  # first position with room for at most 0, 1, ... tokens
    within = np.maximum(until[:, :, low:, None] - before[:, :, None, first], 0.0)
    alone = np.concatenate([until, within.reshape(2, tokens, -1)], axis=2)
    ended = np.ones(tokens)
    ended[: each.length] = each.ended
    power = np.ones_like(alone)
    for number in range(count + 1):
        yield math.comb(count, number) * ended ** (count - number), power
        power = power * alone


def _of_groups(groups: Sequence[Iterable[tuple[Floats, Floats]]]) -> list[Floats]:
    """Combine groups: expected rounds by the total number of remaining sequences, summed over rounds."""
    found: list[Any] = [1.0]
    for group in groups:
        more = [weight[:, None] * power for weight, power in group]
        sums: list[Any] = [0.0] * (len(found) + len(more) - 1)
        for (i, here), (j, there) in itertools.product(enumerate(found), enumerate(more)):
            sums[i + j] = sums[i + j] + here * there
        found = sums
    return [np.asarray(each.sum(axis=1)) for each in found]


def expected(parameters: Parameters, tokens: int, law: AcceptanceLaw, cost: StepCosts) -> Moments:
    """Moments of the total over all batches; the variance is nan if a batch has several sequences.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost = UnitCost(40, cost_ratio=0.1)
    >>> static = Parameters(40, 3, sequences=8, batching="static")
    >>> round(expected(static, 128, Iid(0.79), cost).time / (128 * 40), 4)  # 0.4514 alone
    0.4917
    """
    cost, separate = parameters.draft_costs(cost), parameters.placement == "separate"
    alone = round_prices(cost, parameters.draft_length, tokens=tokens, separate=separate)
    lengths = _lengths(parameters, tokens)
    if parameters.concurrent_sequences == 1:
        known = {length: moments(parameters.draft_length, length, law, alone) for length in {*lengths}}
        return Moments(*(float(sum(values)) for values in zip(*(known[length] for length in lengths), strict=True)))
    each = [_rounds_and_drafted(law, parameters.draft_length, length) for length in lengths]
    several = parameters.concurrent_sequences
    price = prices(cost, parameters.draft_length, several, tokens=tokens, separate=separate)
    time = busy = operations = 0.0
    for batch, rounds in zip(parameters.batches(tokens), _expected_rounds(parameters, tokens, law, cost), strict=True):
        where = (slice(len(batch) + 1),) if cost.uniform else (slice(None), slice(len(batch) + 1), slice(max(batch.values())))
        time += float((rounds * price.time[where]).sum())
        busy += float((rounds * price.busy[where]).sum())
        operations += float(((rounds if cost.uniform else rounds.sum(axis=(0, 2))) * price.operations[: len(batch) + 1]).sum())
    return Moments(time, float("nan"), busy, operations, *(sum(values) for values in zip(*each, strict=True)))


def _expected_rounds(parameters: Parameters, tokens: int, law: AcceptanceLaw, cost: StepCosts) -> Iterator[Floats]:
    """Expected rounds of each batch, with the axes of their prices."""
    if cost.uniform:
        yield from rounds_of(parameters, tokens, law)
        return
    known = _with_closed_form(law)
    for batch in parameters.batches(tokens):
        lengths = tuple(sorted(batch.values()))
        yield (_few_rounds_by_place if len(lengths) <= _FEW else _rounds_by_place)(known, parameters.draft_length, lengths)


def _with_closed_form(law: AcceptanceLaw) -> Chain | Rounds:
    if not isinstance(law, Chain | Rounds):
        remedy = "ask for views = ['paths'], or for batching = 'continuous'"
        raise checks.ParameterError(f"this law of outcomes has no closed form for static batches; {remedy}")
    return law


@lru_cache(maxsize=65_536)  # two numbers of each law, asked for with each price
def _rounds_and_drafted(law: AcceptanceLaw, draft_length: int, tokens: int) -> tuple[float, float]:
    """Expected rounds and drafted tokens of one sequence."""
    free = np.zeros(draft_length + 1)
    found = moments(draft_length, tokens, law, RoundPrices(free, free, free))
    return found.rounds, found.drafted


def straggler_loss(parameters: Parameters, cost: StepCosts, rounds: float, time: float, tokens: int) -> float:
    """Share of a static batch's time that is lost by waiting for its slowest sequence [-].

    `rounds` is the total over all sequences, `time` that of all batches. The reference is continuous batching of the same number of
    sequences, in which every round costs as much as a full-batch round (mean over positions). For equal lengths the speed-up is
    that of continuous batching times (1 - share). Negative if cutting the last drafts saves more time than waiting costs.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost, static = UnitCost(40, cost_ratio=0.1), Parameters(40, 3, sequences=8, batching="static")
    >>> found = expected(static, 128, Iid(0.79), cost)
    >>> round(straggler_loss(static, cost, found.rounds, found.time, 128), 3)
    0.082
    """
    count, most = parameters.concurrent_sequences, parameters.draft_length
    cost, separate = parameters.draft_costs(cost), parameters.placement == "separate"
    full = round_prices(cost, most, tokens=tokens, separate=separate, sequences=count).time
    mean = full[most] if cost.uniform else full[0, :, most].mean()
    return 1 - rounds * float(mean) / (count * time)


def _lengths(parameters: Parameters, tokens: int) -> list[int]:
    return [length for batch in parameters.batches(tokens) for length in batch.values()]


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work | None:
    """Expected work of the passes of both models; None for laws of records. Totals that depend on positions are nan."""
    if not isinstance(law, Chain | Rounds):
        return None
    passes = verified = drafts = drafted = 0.0
    for rounds in rounds_of(parameters, tokens, law):
        sequences, room = (np.arange(float(size)) for size in rounds.shape)
        passes += float(rounds.sum())
        verified += float(sequences @ rounds @ (room + 1))
        drafts += float(rounds.sum(axis=0) @ room)
        drafted += float(sequences @ rounds @ room)
    nan, layers, deep = float("nan"), parameters.layers, parameters.draft_layers
    target = Totals(passes, layers * passes, layers * verified, nan, nan, head_runs=passes, heads=verified)
    # A draft pass reads two tokens per sequence after any completely accepted draft; how often is not computed, so it is nan.
    draft = Totals(drafts, deep * drafts, nan, nan, nan, head_runs=drafts, heads=drafted)
    return Work({"target": target, "draft": draft} if drafts else {"target": target})


def decodings(
    parameters: Parameters, tokens: int, outcomes: Iterable[Iterator[Outcomes]], cost: StepCosts, replications: int
) -> Tally:
    """Simulate static batches in many replications at once, from the outcomes of each sequence."""
    gamma, sequences = parameters.draft_length, iter(outcomes)
    separate, several = parameters.placement == "separate", parameters.concurrent_sequences
    price = prices(parameters.draft_costs(cost), gamma, several, tokens=tokens, separate=separate)
    time, busy, operations, rounds, drafted = np.zeros((5, replications))
    accepted = np.zeros(gamma + 1, dtype=np.int64)
    for batch in parameters.batches(tokens):
        kept = BatchRounds.empty(max(batch.values()), replications)
        for length in batch.values():
            accepted += _enter(gamma, length, next(sequences), kept, drafted)
        for here, drafts, longest, reread in zip(*kept, strict=True):
            if not here.any():
                break
            for total, more in zip((time, busy, operations), price.of_rounds(reread, here, longest, drafts), strict=True):
                total += more
            rounds += here
    return Tally(time, busy, operations, rounds, drafted, accepted)


class BatchRounds(NamedTuple):
    """Properties of each round of a batch in each replication that determine its price; shape (rounds, replications)."""

    remaining: NDArray[np.uint16]
    """Sequences left."""
    drafted: NDArray[np.uint8]
    """Drafted tokens per sequence: the largest number that a sequence can use."""
    longest: NDArray[np.int32]
    """Position of the longest sequence."""
    reread: NDArray[np.bool_]
    """True if a sequence accepted its whole draft in the round before."""

    @staticmethod
    def empty(rounds: int, replications: int) -> BatchRounds:
        """Rounds of a batch without sequences."""
        kinds: tuple[Any, ...] = (np.uint16, np.uint8, np.int32, np.bool_)
        return BatchRounds(*(np.zeros((rounds, replications), dtype=kind) for kind in kinds))


def _enter(
    gamma: int, tokens: int, outcomes: Iterator[Outcomes], kept: BatchRounds, drafted: Floats
) -> NDArray[np.int64]:
    """Add the rounds of one sequence to `kept`; return the number of rounds, over all replications, by accepted length."""
    place, number = np.zeros(drafted.size, dtype=np.uint8), np.zeros(drafted.size, dtype=np.intp)
    reached, whole = np.zeros(gamma + 1, dtype=np.int64), np.zeros(drafted.size, dtype=np.bool_)
    for position in range(tokens):
        reached += np.bincount(place, minlength=gamma + 1)
        starting = np.flatnonzero(place == 0)
        which, room = number[starting], min(gamma, tokens - 1 - position)
        kept.remaining[which, starting] += 1
        kept.drafted[which, starting] = np.maximum(kept.drafted[which, starting], room)
        kept.longest[which, starting] = np.maximum(kept.longest[which, starting], position)
        kept.reread[which, starting] |= whole[starting]
        drafted[starting] += room
        if position < tokens - 1:
            going_on = (place < gamma) & next(outcomes)(place)
            whole = (place == gamma) & (gamma > 0)
            number += ~going_on
            place = (place + 1) * going_on.view(np.uint8)
    return np.asarray(reached - np.append(reached[1:], 0))
