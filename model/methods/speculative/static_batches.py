"""Speculative decoding of static batches over whole decodings: how many texts are left at each round, and what their rounds take.

Texts have independent luck, so a text is at its r-th round with the chance that it has alone, and of texts of one length the number
that are is binomial. A round of a batch takes as long as its texts and the longest of their drafts say; the next batch begins when
all have ended. Rounds of a batch are not independent of each other: the variance of its time is nan.
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
from model.methods.rounds import AcceptanceLaw, Moments, RoundPrices, Rounds, Tally, moments, round_prices
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Chain, Outcomes

Floats = NDArray[np.float64]


class BatchPrices(NamedTuple):
    """What a round takes, by how many sequences are left and how many tokens it drafts of each.

    Shapes (sequences + 1, longest + 1). Where passes take other times elsewhere, `time` and `busy` have the shape
    (2, sequences + 1, positions, longest + 1): first by whether the draft of any sequence was kept as a whole in the round before,
    so that the first draft pass reads two tokens of each, and third by the position of the longest, to which others are padded.
    """

    time: Floats
    busy: Floats
    operations: Floats

    def taken(
        self, reread: NDArray[np.bool_], count: NDArray[Any], longest: NDArray[Any], drafted: NDArray[Any]
    ) -> tuple[Floats, Floats, Floats]:
        """Time, unit-time and arithmetic of rounds."""
        where: Any = (count, drafted) if self.time.ndim == 2 else (reread.astype(np.intp), count, longest, drafted)
        return self.time[where], self.busy[where], self.operations[count, drafted]


@lru_cache(maxsize=8)  # the same for all laws
def prices(cost: StepCosts, longest: int, sequences: int, *, tokens: int = 1, separate: bool = False) -> BatchPrices:
    """`model.methods.rounds.round_prices` for each number of sequences; without sequences nothing is done.

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
        wide = cost.draft_times(np.maximum(start - 1, 0), width=2, sequences=counts) - each[:, :tokens]
        drafts = np.stack([usual, usual + np.where(drafted > 0, wide[..., None], 0.0)])
    time, busy = (drafts * share + verify for share in (1.0, cost.draft_devices))
    operations = counts * (1.0 + drafted + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0))
    none = ((1, 0), (0, 0)) if cost.uniform else ((0, 0), (1, 0), (0, 0), (0, 0))
    return BatchPrices(np.pad(time + link, none), np.pad(busy, none), np.pad(operations, ((1, 0), (0, 0))))


@lru_cache(maxsize=64)  # choices of one law differ in batches and prices
def going(law: Chain | Rounds, draft_length: int, tokens: int) -> Floats:
    """The chance that a text of so many tokens has an r-th round and can use so many drafted tokens in it; shape (rounds, room).

    >>> from model.outcomes.outcome_laws import Iid
    >>> going(Iid(0.5), 1, 3).tolist()  # its second round has two tokens left, or one
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
    """Chances of a round that starts at a position, by the outcome before it, to give 1, 2, ... tokens and end with an outcome.

    Shape (positions, 2, draft_length + 1, 2).
    """
    low, high = law.draft_chances(tokens, draft_length)
    found = np.zeros((tokens, 2, draft_length + 1, 2))
    for start in range(tokens):
        count = min(draft_length, tokens - 1 - start)
        for before in (0, 1):
            rates = high[start + np.arange(count), np.arange(count)].copy()
            if count and not before:
                rates[0] = low[start, 0]
            survival = np.concatenate([[1.0], np.cumprod(rates)])
            found[start, before, :count, 0] = survival[:-1] * (1 - rates)
            behind = high[start + count, count]  # without a draft there is no round behind it that would ask
            found[start, before, count] = survival[-1] * np.array([1 - behind, behind])
    return found


def left(texts: Iterable[Floats]) -> Floats:
    """The chance that so many of these texts (`going`) have an r-th round, and can use at most so many drafted tokens in it.

    Shape (rounds, texts + 1, room), the sum over texts taken one by one.
    """
    found: Floats | None = None
    for text in texts:
        ends, goes = 1 - text.sum(axis=1), np.cumsum(text, axis=1)
        if found is None:
            found = np.ones((len(text), 1, text.shape[1]))
        more = np.zeros((len(text), found.shape[1] + 1, text.shape[1]))
        more[:, :-1] = found * np.maximum(ends, 0.0)[:, None, None]
        more[:, 1:] += found * goes[:, None, :]
        found = more
    assert found is not None
    return found


def rounds_of(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Iterator[Floats]:
    """Of each batch the expected rounds over so many texts, each drafting so many tokens for all; shape (texts + 1, room)."""
    known = _with_closed_form(law)
    for batch in parameters.batches(tokens):
        yield _rounds_of_batch(known, parameters.draft_length, tuple(batch.values()))


@lru_cache(maxsize=64)  # whatever passes cost
def _rounds_of_batch(law: Chain | Rounds, draft_length: int, lengths: tuple[int, ...]) -> Floats:
    rounds = max(lengths)
    known = {length: np.pad(going(law, draft_length, length), ((0, rounds - length), (0, 0))) for length in {*lengths}}
    chance = np.diff(left([known[length] for length in lengths]), axis=2, prepend=0.0)
    chance[:, 0] = 0.0
    return np.asarray(chance.sum(axis=0))


class _Places(NamedTuple):
    """Where a sequence stands that has an r-th round: chances, shape (2, rounds, positions), first by whether its draft was kept as
    a whole in the round before.
    """

    chance: Floats
    length: int

    @property
    def ended(self) -> Floats:
        """The chance that it has ended, by round."""
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
    """The expected rounds of a batch, by what `BatchPrices` with positions are by; shape (2, sequences + 1, positions, room).

    Sequences are independent: the chance that m are left, none beyond a position and none with more room than so many tokens, is a
    product over them. Differences of such chances are those of the longest position and of the most room.
    """
    tokens = max(lengths)
    low = max(min(lengths) - 1 - draft_length, 0)  # below it a sequence can use all that is drafted
    groups = [(_places(law, draft_length, length), size) for length, count in Counter(lengths).items() for size in _parts(count)]
    each = [_left_of(places, count, tokens, draft_length, low) for places, count in groups]
    by_chance = [np.einsum("r,frk->fk", weight, power) for weight, power in each[0]] if len(each) == 1 else _of_groups(each)
    # By whether any draft was kept as a whole, sequences, and positions alone or with less room.
    both = np.stack(by_chance, axis=1)
    chances = np.zeros((2, len(by_chance), tokens, draft_length + 1))
    chances[..., draft_length] = both[..., :tokens]
    chances[:, :, low:, :draft_length] = both[..., tokens:].reshape(2, len(by_chance), tokens - low, draft_length)
    chances[:, 0] = 0.0
    chances = np.diff(np.diff(chances, axis=2, prepend=0.0), axis=3, prepend=0.0)
    chances[1] -= chances[0]
    return chances


_few_rounds_by_place = lru_cache(maxsize=128)(_rounds_by_place)
"""The same of batches of few sequences, whatever passes cost."""
_FEW = 64
_MOST_ALIKE = 500
"""Sequences of which binomial coefficients can be computed."""


def _parts(count: int) -> list[int]:
    """So many sequences in groups of at most `_MOST_ALIKE`."""
    return [_MOST_ALIKE] * (count // _MOST_ALIKE) + [count % _MOST_ALIKE] * (count % _MOST_ALIKE > 0)


def _left_of(each: _Places, count: int, tokens: int, draft_length: int, low: int) -> Iterator[tuple[Floats, Floats]]:
    """For each number of `count` alike sequences two factors of the chance that so many are left, none of them beyond a position,
    and then none with more room than so many tokens either: by round, and of the shape (2, rounds, positions, then positions and
    room), first with no draft kept as a whole, then with any.
    """
    chance = np.zeros((2, tokens, tokens))
    chance[:, : each.length, : each.length] = each.chance
    chance[1] += chance[0]
    until = np.cumsum(chance, axis=2)
    before = np.concatenate([np.zeros((2, tokens, 1)), until], axis=2)
    first = np.maximum(each.length - 1 - np.arange(draft_length), 0)  # the first position with no more than so much room
    within = np.maximum(until[:, :, low:, None] - before[:, :, None, first], 0.0)
    alone = np.concatenate([until, within.reshape(2, tokens, -1)], axis=2)
    ended = np.ones(tokens)
    ended[: each.length] = each.ended
    power = np.ones_like(alone)
    for number in range(count + 1):
        yield math.comb(count, number) * ended ** (count - number), power
        power = power * alone


def _of_groups(groups: Sequence[Iterable[tuple[Floats, Floats]]]) -> list[Floats]:
    """Sums over rounds of the chances of the number of sequences of several groups together."""
    found: list[Any] = [1.0]
    for group in groups:
        more = [weight[:, None] * power for weight, power in group]
        sums: list[Any] = [0.0] * (len(found) + len(more) - 1)
        for (i, here), (j, there) in itertools.product(enumerate(found), enumerate(more)):
            sums[i + j] = sums[i + j] + here * there
        found = sums
    return [np.asarray(each.sum(axis=1)) for each in found]


def expected(parameters: Parameters, tokens: int, law: AcceptanceLaw, cost: StepCosts) -> Moments:
    """The moments of all batches together; the variance is nan where there is a batch of several texts.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost = UnitCost(40, cost_ratio=0.1)
    >>> static = Parameters(40, 3, sequences=8, batching="static")
    >>> round(expected(static, 128, Iid(0.79), cost).time / (128 * 40), 4)  # 0.4514 alone
    0.4917
    """
    separate = parameters.placement == "separate"
    alone = round_prices(cost, parameters.draft_length, tokens=tokens, separate=separate)
    lengths = _lengths(parameters, tokens)
    if parameters.concurrent_sequences == 1:
        known = {length: moments(parameters.draft_length, length, law, alone) for length in {*lengths}}
        return Moments(*(float(sum(values)) for values in zip(*(known[length] for length in lengths), strict=True)))
    each = [_rounds_and_drafted(law, parameters.draft_length, length) for length in lengths]
    price = prices(cost, parameters.draft_length, parameters.concurrent_sequences, tokens=tokens, separate=separate)
    time = busy = operations = 0.0
    for batch, rounds in zip(parameters.batches(tokens), _expected_rounds(parameters, tokens, law, cost), strict=True):
        where = (slice(len(batch) + 1),) if cost.uniform else (slice(None), slice(len(batch) + 1), slice(max(batch.values())))
        time += float((rounds * price.time[where]).sum())
        busy += float((rounds * price.busy[where]).sum())
        operations += float(((rounds if cost.uniform else rounds.sum(axis=(0, 2))) * price.operations[: len(batch) + 1]).sum())
    return Moments(time, float("nan"), busy, operations, *(sum(values) for values in zip(*each, strict=True)))


def _expected_rounds(parameters: Parameters, tokens: int, law: AcceptanceLaw, cost: StepCosts) -> Iterator[Floats]:
    """The expected rounds of each batch, by what their prices are by."""
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


@lru_cache(maxsize=64)
def _rounds_and_drafted(law: AcceptanceLaw, draft_length: int, tokens: int) -> tuple[float, float]:
    """Expected rounds and drafted tokens of one sequence, whatever they cost."""
    free = np.zeros(draft_length + 1)
    found = moments(draft_length, tokens, law, RoundPrices(free, free, free))
    return found.rounds, found.drafted


def straggler_loss(parameters: Parameters, cost: StepCosts, rounds: float, time: float, tokens: int) -> float:
    """Share of a static batch's time that is lost by waiting for its slowest sequence, given the rounds of all and its time.

    What is compared with is a batch of as many sequences that is kept full, in which each round takes what one of the full batch
    does, in the mean over positions: of equal lengths the speed-up is that of continuous batching, less this share. Below zero
    where cutting the last drafts short saves more than waiting costs.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost, static = UnitCost(40, cost_ratio=0.1), Parameters(40, 3, sequences=8, batching="static")
    >>> found = expected(static, 128, Iid(0.79), cost)
    >>> round(straggler_loss(static, cost, found.rounds, found.time, 128), 3)
    0.082
    """
    count, most = parameters.concurrent_sequences, parameters.draft_length
    full = round_prices(cost, most, tokens=tokens, separate=parameters.placement == "separate", sequences=count).time
    mean = full[most] if cost.uniform else full[0, :, most].mean()
    return 1 - rounds * float(mean) / (count * time)


def _lengths(parameters: Parameters, tokens: int) -> list[int]:
    return [length for batch in parameters.batches(tokens) for length in batch.values()]


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work | None:
    """What the passes of both models come to, in the mean, but for where they stand: that is nan; None under laws of records."""
    if not isinstance(law, Chain | Rounds):
        return None
    passes = verified = drafts = drafted = 0.0
    for rounds in rounds_of(parameters, tokens, law):
        texts, room = (np.arange(float(size)) for size in rounds.shape)
        passes += float(rounds.sum())
        verified += float(texts @ rounds @ (room + 1))
        drafts += float(rounds.sum(axis=0) @ room)
        drafted += float(texts @ rounds @ room)
    nan, layers, deep = float("nan"), parameters.layers, parameters.draft_layers
    target = Totals(passes, layers * passes, layers * verified, nan, nan, head_runs=passes, heads=verified)
    # A draft pass reads two tokens of every text where one of them was kept as a whole: how often is not said.
    draft = Totals(drafts, deep * drafts, nan, nan, nan, head_runs=drafts, heads=drafted)
    return Work({"target": target, "draft": draft} if drafts else {"target": target})


def decodings(
    parameters: Parameters, tokens: int, outcomes: Iterable[Iterator[Outcomes]], cost: StepCosts, replications: int
) -> Tally:
    """Many replications at once, from the outcomes of each text at its first positions.

    """
    gamma, texts = parameters.draft_length, iter(outcomes)
    separate = parameters.placement == "separate"
    price = prices(cost, gamma, parameters.concurrent_sequences, tokens=tokens, separate=separate)
    time, busy, operations, rounds, drafted = np.zeros((5, replications))
    accepted = np.zeros(gamma + 1, dtype=np.int64)
    for batch in parameters.batches(tokens):
        kept = RoundsKept.empty(max(batch.values()), replications)
        for length in batch.values():
            accepted += _enter(gamma, length, next(texts), kept, drafted)
        for here, drafts, longest, reread in zip(*kept, strict=True):
            if not here.any():
                break
            for total, more in zip((time, busy, operations), price.taken(reread, here, longest, drafts), strict=True):
                total += more
            rounds += here
    return Tally(time, busy, operations, rounds, drafted, accepted)


class RoundsKept(NamedTuple):
    """What is kept of each round of a batch, in each replication; shape (rounds, replications)."""

    left: NDArray[np.uint16]
    """Sequences that are left."""
    most: NDArray[np.uint8]
    """Tokens that it drafts: as many as the sequence that can use the most."""
    longest: NDArray[np.int32]
    """Position of the longest sequence."""
    reread: NDArray[np.bool_]
    """Whether the draft of any sequence was kept as a whole in the round before."""

    @staticmethod
    def empty(rounds: int, replications: int) -> RoundsKept:
        """Of a batch without sequences."""
        kinds: tuple[Any, ...] = (np.uint16, np.uint8, np.int32, np.bool_)
        return RoundsKept(*(np.zeros((rounds, replications), dtype=kind) for kind in kinds))


def _enter(
    gamma: int, tokens: int, outcomes: Iterator[Outcomes], kept: RoundsKept, drafted: Floats
) -> NDArray[np.int64]:
    """Enter the rounds of one text; how many of them accepted 0, 1, 2, ... tokens, in all replications together."""
    place, number = np.zeros(drafted.size, dtype=np.uint8), np.zeros(drafted.size, dtype=np.intp)
    reached, whole = np.zeros(gamma + 1, dtype=np.int64), np.zeros(drafted.size, dtype=np.bool_)
    for position in range(tokens):
        reached += np.bincount(place, minlength=gamma + 1)
        starting = np.flatnonzero(place == 0)
        which, room = number[starting], min(gamma, tokens - 1 - position)
        kept.left[which, starting] += 1
        kept.most[which, starting] = np.maximum(kept.most[which, starting], room)
        kept.longest[which, starting] = np.maximum(kept.longest[which, starting], position)
        kept.reread[which, starting] |= whole[starting]
        drafted[starting] += room
        if position < tokens - 1:
            going_on = (place < gamma) & next(outcomes)(place)
            whole = (place == gamma) & (gamma > 0)
            number += ~going_on
            place = (place + 1) * going_on.view(np.uint8)
    return np.asarray(reached - np.append(reached[1:], 0))
