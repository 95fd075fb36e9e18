"""Speculative decoding of static batches over whole decodings: how many texts are left at each round, and what their rounds take.

Texts have independent luck, so a text is at its r-th round with the chance that it has alone, and of texts of one length the number
that are is binomial. A round of a batch takes as long as its texts and the longest of their drafts say; the next batch begins when
all have ended. Rounds of a batch are not independent of each other: the variance of its time is nan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

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
    """What a round takes, by how many texts are left and how many tokens it drafts of each; shapes (texts + 1, longest + 1)."""

    time: Floats
    busy: Floats
    operations: Floats


def prices(cost: StepCosts, longest: int, texts: int, *, separate: bool = False) -> BatchPrices:
    """`model.methods.rounds.round_prices` for each number of texts; without texts nothing is done.

    >>> from model.costs.layer_times import UnitCost
    >>> found = prices(UnitCost(40, cost_ratio=0.1, verify_cost=((1, 1.0), (4, 2.5))), 1, 2)
    >>> found.time.tolist()  # two texts: 1.5 for a token of each, 2.5 for two; 1.5 for the draft
    [[0.0, 0.0], [40.0, 64.0], [60.0, 106.0]]
    """
    counts, drafted = np.arange(1, texts + 1)[:, None], np.arange(longest + 1.0)
    draft, verify = drafted * cost.draft_times(sequences=counts), cost.verify_times(np.arange(1, longest + 2), sequences=counts)
    time, busy = (draft * share + verify for share in (1.0, cost.draft_devices))
    operations = counts * (1.0 + drafted + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0))
    time = time + np.where(drafted > 0, 2 * cost.link * separate, 0.0)
    return BatchPrices(*(np.vstack([np.zeros(longest + 1), rows]) for rows in (time, busy, operations)))


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
    if not isinstance(law, Chain | Rounds):
        remedy = "ask for views = ['paths'], or for batching = 'continuous'"
        raise checks.ParameterError(f"this law of outcomes has no closed form for static batches; {remedy}")
    for batch in parameters.batches(tokens):
        yield _rounds_of_batch(law, parameters.draft_length, tuple(batch.values()))


@lru_cache(maxsize=64)  # whatever passes cost
def _rounds_of_batch(law: Chain | Rounds, draft_length: int, lengths: tuple[int, ...]) -> Floats:
    rounds = max(lengths)
    known = {length: np.pad(going(law, draft_length, length), ((0, rounds - length), (0, 0))) for length in {*lengths}}
    chance = np.diff(left([known[length] for length in lengths]), axis=2, prepend=0.0)
    chance[:, 0] = 0.0
    return np.asarray(chance.sum(axis=0))


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
    alone = round_prices(cost, parameters.draft_length, separate=separate)
    lengths = _lengths(parameters, tokens)
    if parameters.concurrent_sequences == 1:
        known = {length: moments(parameters.draft_length, length, law, alone) for length in {*lengths}}
        return Moments(*(float(sum(values)) for values in zip(*(known[length] for length in lengths), strict=True)))
    each = [_rounds_and_drafted(law, parameters.draft_length, length) for length in lengths]
    price = prices(cost, parameters.draft_length, parameters.concurrent_sequences, separate=separate)
    time = busy = operations = 0.0
    for rounds in rounds_of(parameters, tokens, law):
        time, busy, operations = (
            so_far + float((rounds * of[: len(rounds)]).sum()) for so_far, of in zip((time, busy, operations), price, strict=True)
        )
    return Moments(time, float("nan"), busy, operations, *(sum(values) for values in zip(*each, strict=True)))


@lru_cache(maxsize=64)
def _rounds_and_drafted(law: AcceptanceLaw, draft_length: int, tokens: int) -> tuple[float, float]:
    """Expected rounds and drafted tokens of one sequence, whatever they cost."""
    free = np.zeros(draft_length + 1)
    found = moments(draft_length, tokens, law, RoundPrices(free, free, free))
    return found.rounds, found.drafted


def straggler_loss(parameters: Parameters, cost: StepCosts, rounds: float, time: float) -> float:
    """Share of a static batch's time that is lost by waiting for its slowest sequence, given the rounds of all and its time.

    What is compared with is a batch of as many sequences that is kept full, in which each round takes what one of the full batch
    does: of equal lengths the speed-up is that of continuous batching, less this share. Below zero where cutting the last drafts
    short saves more than waiting costs.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost, static = UnitCost(40, cost_ratio=0.1), Parameters(40, 3, sequences=8, batching="static")
    >>> found = expected(static, 128, Iid(0.79), cost)
    >>> round(straggler_loss(static, cost, found.rounds, found.time), 3)
    0.082
    """
    count, most = parameters.concurrent_sequences, parameters.draft_length
    full = round_prices(cost, most, separate=parameters.placement == "separate", sequences=count).time[most]
    return 1 - rounds * float(full) / (count * time)


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

    What is kept of a batch is how many texts are at their r-th round, and how many tokens that drafts.
    """
    gamma, texts = parameters.draft_length, iter(outcomes)
    price = prices(cost, gamma, parameters.concurrent_sequences, separate=parameters.placement == "separate")
    time, busy, operations, rounds, drafted = np.zeros((5, replications))
    accepted = np.zeros(gamma + 1, dtype=np.int64)
    for batch in parameters.batches(tokens):
        longest = max(batch.values())
        count, most = np.zeros((longest, replications), dtype=np.uint16), np.zeros((longest, replications), dtype=np.uint8)
        for length in batch.values():
            accepted += _enter(gamma, length, next(texts), count, most, drafted)
        for here, drafts in zip(count, most, strict=True):
            if not here.any():
                break
            time += price.time[here, drafts]
            busy += price.busy[here, drafts]
            operations += price.operations[here, drafts]
            rounds += here
    return Tally(time, busy, operations, rounds, drafted, accepted)


def _enter(
    gamma: int, tokens: int, outcomes: Iterator[Outcomes], count: NDArray[np.uint16], most: NDArray[np.uint8], drafted: Floats
) -> NDArray[np.int64]:
    """Enter the rounds of one text; how many of them accepted 0, 1, 2, ... tokens, in all replications together."""
    place, number = np.zeros(drafted.size, dtype=np.uint8), np.zeros(drafted.size, dtype=np.intp)
    reached = np.zeros(gamma + 1, dtype=np.int64)
    for position in range(tokens):
        reached += np.bincount(place, minlength=gamma + 1)
        starting = np.flatnonzero(place == 0)
        which, room = number[starting], min(gamma, tokens - 1 - position)
        count[which, starting] += 1
        most[which, starting] = np.maximum(most[which, starting], room)
        drafted[starting] += room
        if position < tokens - 1:
            going_on = (place < gamma) & next(outcomes)(place)
            number += ~going_on
            place = (place + 1) * going_on.view(np.uint8)
    return np.asarray(reached - np.append(reached[1:], 0))
