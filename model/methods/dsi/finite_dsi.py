"""DSI for a finite number of tokens: costs of each speculation, and exact moments by a forward recursion over restarts.

A speculation lasts from a restart to the next rejection, or to the end. Between restarts nothing is random, so its costs depend
only on its start, after s of l tokens, and on the place j of the rejected token among those that it decodes; j = l - s is the end.
With c(n) the time of n draft passes, w_i the time of pass i of the target, b_i = min(i L, l - s - 1) the last drafted token that
it reads, V replicas and link time x, the times since the restart are

    sent_i      = max(c(b_i), processed_(i-V)),
    returned_i  = sent_i + x + w_i + x,
    decided_i   = max(processed_(i-1), returned_i)          for a rejection among the tokens b_(i-1) + 2 to b_i, and the end,
    processed_i = max(decided_i, c(b_i + 1))                for a rejection of token b_i + 1, and if all are accepted,

with processed_i = 0 for i < 0. A pass whose tokens are sent before the rejection works until the order to stop arrives, a link time
after it. With free links, a pass that the deciding token completes begins as well, and is stopped at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.methods.concurrent.concurrent_laws import chains_of
from model.methods.rounds.prices_of_rounds import draft_times
from model.methods.rounds.round_moments import Moments, mixed
from model.outcomes.outcome_laws import Chain, Floats
from model.steps import LayerSpan

INSIDE, AFTER = range(2)
"""Places of the rejected token: among those that the deciding pass reads, or the one after them. The end counts as inside."""
Counts = NDArray[np.int64]


class SpeculationTables(NamedTuple):
    """Costs of a speculation by its start, the pass that ends it, and the place of the rejected token in that pass.

    Costs have shape (tokens, passes, 2), counts (tokens, passes).
    """

    lookahead: int
    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; a stopped pass counts in full."""
    waiting: Counts
    """Drafted tokens that pass i verifies, without the token after them."""

    @property
    def tokens(self) -> int:
        """Number of tokens to decode."""
        return len(self.time)

    def ended_by(self, start: Any, length: Any) -> tuple[Counts, Counts]:
        """Pass that ends a speculation of `length` tokens, and the place of its last token in that pass.

        >>> from model.costs.layer_times import UnitCost
        >>> tables = speculation_tables(2, 3, 9, UnitCost(1, cost_ratio=0.25))
        >>> [each.tolist() for each in tables.ended_by(0, np.array([1, 2, 3, 4, 9]))]
        [[0, 1, 1, 2, 4], [1, 0, 1, 0, 0]]
        """
        length = np.asarray(length)
        number = -(-(length - 1) // self.lookahead)
        after = (length == number * self.lookahead + 1) & (start + length < self.tokens)
        return number, np.where(after, AFTER, INSIDE)


def speculation_tables(lookahead: int, verifiers: int, tokens: int, cost: StepCosts) -> SpeculationTables:
    """Tabulate the speculations of a decoding at these costs.

    Each draft pass reads one token, at its position. A pass of the target is priced at its width and position: one of the first V
    passes after a restart reads all drafted tokens so far and the token before them, a later one those since the pass V before it.

    >>> from model.costs.layer_times import UnitCost
    >>> tables = speculation_tables(2, 1, 6, UnitCost(4, cost_ratio=0.25, link=0.5))
    >>> tables.time[0].tolist()  # rejections of tokens 2 and 3, 4 and 5 are found by passes 1 and 2; one replica makes them in turn
    [[5.0, 5.0], [10.0, 10.0], [15.0, 15.0], [20.0, 20.0]]
    """
    start = np.arange(tokens)
    limit = tokens - 1 - start  # drafted tokens of a speculation that nothing ends
    count = -(-(tokens - 1) // lookahead) + 1
    drafts, link, weight = draft_times(cost, tokens, tokens), cost.link, cost.draft_devices
    per_draft = cost.operations("draft")
    number = np.arange(count)[:, None]
    last = np.minimum(number * lookahead, limit)  # shape (passes, starts)
    exists = np.concatenate([np.ones_like(last[:1], dtype=np.bool_), last[1:] > last[:-1]])
    first = np.zeros_like(last)  # tokens that the replica has read since the restart; 0 is the one before the drafted ones
    first[verifiers:] = last[:-verifiers] + 1
    wide = last + 1 - first
    heads = np.where(number > 0, last - np.roll(last, 1, axis=0), 1)
    work = np.where(exists, _pass_times(cost, np.where(exists, wide, 1), np.where(exists, heads, 1), start + first), 0.0)
    drafted, following = drafts[start, last], drafts[start, np.minimum(last + 1, limit)]
    sent, decided, processed = np.zeros((3, count, tokens))
    for index in range(count):
        sent[index] = drafted[index] if index < verifiers else np.maximum(drafted[index], processed[index - verifiers])
        decided[index] = sent[index] + link + work[index] + link
        if index:
            np.maximum(decided[index], processed[index - 1], out=decided[index])
        processed[index] = np.maximum(decided[index], following[index])
    time = np.stack([decided, processed], axis=2)  # shape (passes, starts, place)
    done = np.cumsum(work, axis=0)[:, :, None]
    read = np.cumsum(np.where(exists, wide, 0), axis=0)[:, :, None].astype(np.float64)
    sent = np.where(exists, sent, np.inf)
    busy = done + weight * np.minimum(time, drafts[start, limit][None, :, None])
    operations = np.broadcast_to(read, time.shape).copy()
    for ahead in range(1, min(verifiers, count)):  # passes in flight when the speculation ends
        begun = sent[ahead:, :, None]
        running = begun <= time[:-ahead] * (1 + _ROUNDING)  # with those that are sent exactly at the rejection
        if not running.any():
            break
        worked = np.clip(time[:-ahead] - np.where(running, begun, np.inf), 0.0, work[ahead:, :, None])
        busy[:-ahead] += worked
        operations[:-ahead] += np.where(running, wide[ahead:, :, None], 0)
    # A draft pass that would begin exactly at the rejection is not counted: its process is stopped before it begins.
    if np.any(limit > 0):
        begun_drafts = np.stack([_begun(drafts[s, : limit[s]], time[:, s]) for s in range(tokens)], axis=1)
        operations += np.where(begun_drafts > 0, begun_drafts * per_draft, 0.0)
    verified = np.where(exists & (number > 0), heads - 1, 0)
    by_start = [np.ascontiguousarray(each.transpose(1, 0, 2)) for each in (time, busy, operations)]
    return SpeculationTables(lookahead, by_start[0], by_start[1], by_start[2], verified.T)


def _begun(begins: Floats, time: Floats) -> Counts:
    """Number of draft passes that begin before each time."""
    return np.searchsorted(begins, time * (1 - _ROUNDING), side="left")


def _pass_times(cost: StepCosts, wide: Counts, heads: Counts, at: Counts) -> Floats:
    """Times of passes of the target by width, logits and position; equal shapes."""
    span, layers = int(heads.max()) + 1, LayerSpan(0, cost.layers)
    kind = (wide * span + heads).ravel()
    kinds = np.flatnonzero(np.bincount(kind))
    shapes = [PassShape(layers, width=each // span, heads=each % span) for each in kinds.tolist()]
    if cost.uniform:
        by_kind = np.zeros(int(kinds[-1]) + 1)
        by_kind[kinds] = [float(cost.times(shape)) for shape in shapes]
        return np.asarray(by_kind[kind].reshape(wide.shape))
    found, positions = np.empty(kind.shape), at.ravel()
    order = np.argsort(kind, kind="stable")
    for shape, part in zip(shapes, np.split(order, np.searchsorted(kind[order], kinds[1:])), strict=True):
        found[part] = cost.times(shape, positions[part])
    return found.reshape(wide.shape)


_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""


def moments(lookahead: int, verifiers: int, tokens: int, law: Any, cost: StepCosts) -> Moments:
    """Return the exact moments of a decoding; `drafted` counts the drafted tokens that passes verify, not those after a rejection.

    A law of records gives the mixture of its records.
    """
    tables = speculation_tables(lookahead, verifiers, tokens, cost)
    parts = [_moments_of_chain(tables, chain) for chain in chains_of(law, "DSI")]
    return parts[0] if len(parts) == 1 else mixed(parts)


def _moments_of_chain(tables: SpeculationTables, law: Chain) -> Moments:
    """Forward recursion over restarts: probability and mean time of a restart at each position, and the law of the next one.

    The token before a restart was rejected, so the chain is after a failure there.
    """
    tokens = tables.tokens
    after_failure, after_success = (np.asarray(each, dtype=np.float64) for each in law.probabilities(tokens))
    mass, spent = np.zeros((2, tokens + 1))
    mass[0], square, busy, operations, rounds, drafted = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    verified = np.cumsum(tables.waiting, axis=1)
    for start in range(tokens):
        chance = mass[start]
        if not chance:
            continue
        left = tokens - start
        kept = np.concatenate([after_failure[start : start + 1], after_success[start + 1 : tokens - 1]])[: left - 1]
        reached = np.concatenate([[1.0], np.cumprod(kept)])
        ends = reached * np.concatenate([1 - kept, [1.0]])  # by the number of tokens, 1 to `left`; the last is the end
        number, place = tables.ended_by(start, np.arange(1, left + 1))
        where = start, number, place
        time = tables.time[where]
        weights, after = chance * ends, slice(start + 1, tokens + 1)
        mass[after] += weights
        gained = spent[start] * ends
        spent[after] += gained + weights * time
        square += float((time * (2 * gained + weights * time)).sum())
        busy += float(weights @ tables.busy[where])
        operations += float(weights @ tables.operations[where])
        rounds += float(weights @ (number + 1.0))
        drafted += float(weights @ verified[start, number])
    mean = float(spent[tokens])
    return Moments(mean, max(square - mean**2, 0.0), busy, operations, rounds, drafted)
