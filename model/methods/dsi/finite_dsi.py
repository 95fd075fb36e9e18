"""DSI for a finite number of tokens: costs of each speculation, and exact moments by a forward recursion over restarts.

Several costs, as one (`model.costs.many_costs`), give tables with a leading axis of costs.

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

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import attended_within
from model.methods.concurrent.concurrent_laws import chains_of
from model.methods.concurrent.concurrent_work import ModelPasses
from model.methods.dsi.algorithm import Parameters
from model.methods.prediction import linear
from model.methods.rounds.prices_of_rounds import sums_before
from model.methods.rounds.round_moments import Moments, mixed
from model.outcomes.outcome_laws import Chain, Floats
from model.steps import LayerSpan

INSIDE, AFTER = range(2)
"""Places of the rejected token: among those that the deciding pass reads, or the one after them. The end counts as inside."""
Counts = NDArray[np.int64]
Index = NDArray[np.intp]


class SpeculationTables(NamedTuple):
    """Costs of a speculation by its start, the pass that ends it, and the place of the rejected token in that pass.

    Costs have shape (..., tokens, passes, 2), counts (tokens, passes).
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
        return len(self.waiting)

    def of_several(self) -> SpeculationTables:
        """The same tables of a single cost as those of several."""
        return self._replace(time=self.time[None], busy=self.busy[None], operations=self.operations[None])

    def ended_by(self, start: Any, length: Any) -> tuple[Counts, Counts]:
        """Pass that ends a speculation of `length` tokens, and the place of its last token in that pass.

        >>> from model.costs.layer_times import UnitCost
        >>> tables = speculation_tables(2, 3, 9, UnitCost(1, cost_ratio=0.25))
        >>> [each.tolist() for each in tables.ended_by(0, np.array([1, 2, 3, 4, 9]))]
        [[0, 1, 1, 2, 4], [1, 0, 1, 0, 0]]
        """
        number, _, place = _ended_by(self.lookahead, self.tokens, start, length)
        return number, place


def _ended_by(lookahead: int, tokens: int, start: Any, length: Any) -> tuple[Counts, Any, Counts]:
    """Pass that ends a speculation of `length` tokens, its start, and the place of its last token in that pass."""
    length = np.asarray(length)
    number = -(-(length - 1) // lookahead)
    after = (length == number * lookahead + 1) & (start + length < tokens)
    return number, start, np.where(after, AFTER, INSIDE)


def speculation_tables(lookahead: int, verifiers: int, tokens: int, cost: StepCosts) -> SpeculationTables:
    """Tabulate the speculations of a decoding at these costs.

    Each draft pass reads one token, at its position. A pass of the target is priced at its width and position: one of the first V
    passes after a restart reads all drafted tokens so far and the token before them, a later one those since the pass V before it.

    >>> from model.costs.layer_times import UnitCost
    >>> tables = speculation_tables(2, 1, 6, UnitCost(4, cost_ratio=0.25, link=0.5))
    >>> tables.time[0].tolist()  # rejections of tokens 2 and 3, 4 and 5 are found by passes 1 and 2; one replica makes them in turn
    [[5.0, 5.0], [10.0, 10.0], [15.0, 15.0], [20.0, 20.0]]
    """
    passes = _passes(lookahead, verifiers, tokens, cost)
    per_draft, weight = (np.asarray(each)[..., None, None, None] for each in (cost.operations("draft"), cost.draft_devices))
    exists, time, wide, work = passes.exists, passes.time, np.where(passes.exists, passes.wide, 0), passes.work
    done = np.cumsum(work, axis=-2)[..., None]
    read = np.cumsum(wide, axis=0)[:, :, None].astype(np.float64)
    busy = done + weight * np.minimum(time, passes.drafted)
    operations = np.broadcast_to(read, time.shape).copy()
    for ahead, begun, running in passes.in_flight(verifiers):
        worked = np.clip(time[..., :-ahead, :, :] - np.where(running, begun, np.inf), 0.0, work[..., ahead:, :, None])
        busy[..., :-ahead, :, :] += worked
        operations[..., :-ahead, :, :] += np.where(running, wide[ahead:, :, None], 0)
    begun_drafts = passes.begun_drafts()
    operations += np.where(begun_drafts > 0, begun_drafts * per_draft, 0.0)
    verified = np.where(exists & (np.arange(len(exists))[:, None] > 0), passes.heads - 1, 0)
    by_start = [np.ascontiguousarray(each.swapaxes(-3, -2)) for each in (time, busy, operations)]
    return SpeculationTables(lookahead, by_start[0], by_start[1], by_start[2], verified.T)


class _Drafts(NamedTuple):
    """Times of draft passes from each position on."""

    until: Floats
    """Time of the first 0, 1, ... draft passes of the decoding, shape (..., tokens)."""
    each: Floats | None
    """Time of a pass if it is the same at all positions, shape (..., 1, 1)."""

    @staticmethod
    def of(cost: StepCosts, tokens: int) -> _Drafts:
        """Draft passes of a decoding at these costs."""
        if not cost.uniform:
            return _Drafts(sums_before(cost.draft_times(np.arange(tokens - 1))), None)
        each = np.asarray(cost.draft_times())
        return _Drafts(each[..., None] * np.arange(tokens), each[..., None, None])

    def between(self, start: Counts, count: Counts) -> Floats:
        """Time of `count` passes from each start on; shape (..., *count.shape), which has two axes."""
        if self.each is not None:
            return np.asarray(count * self.each)
        start = np.broadcast_to(start, count.shape)
        return np.asarray(self.until[..., start + count] - self.until[..., start])

    def begun(self, time: Floats) -> Counts:
        """Draft passes that begin before each time after the start, in a speculation that nothing ends.

        `time` has shape (..., passes, starts, 2), as the result.
        """
        start = np.arange(self.until.shape[-1])[:, None]
        return np.asarray(np.maximum(self._before(time, len(start) - 1) - start, 0))

    def ending_at(self, time: Floats) -> Floats:
        """Time that the draft pass takes which ends at each time after the start; 0 where none does. Shapes as of `begun`.

        >>> drafts = _Drafts(np.array([0.0, 2.0, 4.0]), None)
        >>> drafts.ending_at(np.array([[[1.0, 4.0], [2.0, 5.0], [2.0, 2.0]]]))[0].tolist()
        [[0.0, 2.0], [2.0, 0.0], [0.0, 0.0]]
        """
        tokens = self.until.shape[-1]
        start = np.arange(tokens)[:, None]
        index = np.clip(self._before(time, tokens), np.minimum(start + 1, tokens - 1), tokens - 1)
        until = self.until.reshape(-1, tokens)
        of_cost = index.reshape(len(until), -1)
        ends, begins = (np.take_along_axis(until, at, axis=1).reshape(index.shape) for at in (of_cost, np.maximum(of_cost - 1, 0)))
        there = np.abs(ends - self.until[..., None, :, None] - time) <= _ROUNDING * time
        return np.where(there & (start < tokens - 1), ends - begins, 0.0)

    def _before(self, time: Floats, passes: int) -> Counts:
        """How many of the first passes of the decoding begin before each time after the start."""
        asked = self.until[..., None, :, None] + time * (1 - _ROUNDING)
        found = np.empty(asked.shape, dtype=np.int64)
        for cost in np.ndindex(self.until.shape[:-1]):
            found[cost] = np.searchsorted(self.until[cost][:passes], asked[cost], side="left")
        return found


class _SpeculationPasses(NamedTuple):
    """Passes of speculations that nothing ends, by number and start.

    Counts have shape (passes, starts), times (..., passes, starts).
    """

    exists: NDArray[np.bool_]
    first: Counts
    """Tokens that the replica has read since the restart: the first token of the pass, 0 for the one before the drafted ones."""
    wide: Counts
    heads: Counts
    work: Floats
    """Time of the pass; 0 where it does not exist."""
    sent: Floats
    """When its tokens are sent; infinite where it does not exist."""
    time: Floats
    """Time of the rejection that the pass finds, by its place; shape (..., passes, starts, 2)."""
    drafts: _Drafts
    draft_first: NDArray[np.bool_]
    """True where a draft pass ends exactly when the result of the deciding pass arrives, and began before that was sent: the next
    one then begins before the rejection. Shape of `time`."""

    @property
    def drafted(self) -> Floats:
        """Time of all draft passes of a speculation that nothing ends; shape (..., 1, starts, 1)."""
        start = np.arange(self.exists.shape[1])[None]
        return self.drafts.between(start, start[:, ::-1])[..., None]

    def in_flight(self, verifiers: int) -> Iterator[tuple[int, Floats, NDArray[np.bool_]]]:
        """Yield passes that have begun when a speculation ends, by how many passes they are ahead of the one that ends it.

        Each item: the number of passes ahead, when they begin, and whether they have begun when each pass ends a speculation.
        """
        for ahead in range(1, min(verifiers, len(self.exists))):
            begun = self.sent[..., ahead:, :, None]
            running = begun <= self.time[..., :-ahead, :, :] * (1 + _ROUNDING)  # with those that are sent exactly at the rejection
            if not running.any():
                return
            yield ahead, begun, running

    def begun_drafts(self) -> Counts:
        """Draft passes that have begun when a speculation ends; shape of `time`.

        One that would begin exactly at the rejection is not counted, as its process is stopped before it begins, except after
        `draft_first`.
        """
        limit = np.arange(self.exists.shape[1])[::-1, None]
        return np.asarray(np.minimum(self.drafts.begun(self.time) + self.draft_first, limit))


def _passes(lookahead: int, verifiers: int, tokens: int, cost: StepCosts) -> _SpeculationPasses:
    """Times of the passes of speculations that nothing ends."""
    start = np.arange(tokens)
    limit = tokens - 1 - start  # drafted tokens of a speculation that nothing ends
    count = -(-(tokens - 1) // lookahead) + 1
    drafts, link = _Drafts.of(cost, tokens), np.asarray(cost.link)[..., None]
    number = np.arange(count)[:, None]
    last = np.minimum(number * lookahead, limit)  # shape (passes, starts)
    exists = np.concatenate([np.ones_like(last[:1], dtype=np.bool_), last[1:] > last[:-1]])
    first = np.zeros_like(last)
    first[verifiers:] = last[:-verifiers] + 1
    wide = last + 1 - first
    heads = np.where(number > 0, last - np.roll(last, 1, axis=0), 1)
    work = np.where(exists, _pass_times(cost, np.where(exists, wide, 1), np.where(exists, heads, 1), start + first), 0.0)
    drafted, following = drafts.between(start, last), drafts.between(start, np.minimum(last + 1, limit))
    sent, decided, processed, returned = np.zeros((4, *work.shape))
    for index in range(count):
        here = ..., index, slice(None)
        sent[here] = drafted[here]
        if index >= verifiers:
            np.maximum(sent[here], processed[..., index - verifiers, :], out=sent[here])
        decided[here] = returned[here] = sent[here] + link + work[here] + link
        if index:
            np.maximum(decided[here], processed[..., index - 1, :], out=decided[here])
        np.maximum(decided[here], following[here], out=processed[here])
    time = np.stack([decided, processed], axis=-1)  # shape (..., passes, starts, place)
    arrives_then, link = returned[..., None] >= time * (1 - _ROUNDING), link[..., None, None]
    draft_first = arrives_then & (drafts.ending_at(time) > link * (1 + _ROUNDING)) & (link > 0)
    return _SpeculationPasses(exists, first, wide, heads, work, np.where(exists, sent, np.inf), time, drafts, draft_first)


def _pass_times(cost: StepCosts, wide: Counts, heads: Counts, at: Counts) -> Floats:
    """Times of passes of the target by width, logits and position, of equal shapes; of several costs these are the first axis."""
    span, layers = int(heads.max()) + 1, LayerSpan(0, cost.layers)
    kind = (wide * span + heads).ravel()
    kinds = np.flatnonzero(np.bincount(kind))
    shapes = [PassShape(layers, width=each // span, heads=each % span) for each in kinds.tolist()]
    if cost.uniform:
        each = np.stack([np.asarray(cost.times(shape)) for shape in shapes], axis=-1)
        return np.asarray(each[..., np.searchsorted(kinds, kind)].reshape(*each.shape[:-1], *wide.shape))
    positions, order = at.ravel(), np.argsort(kind, kind="stable")
    parts = np.split(order, np.searchsorted(kind[order], kinds[1:]))
    times = [cost.times(shape, positions[part]) for shape, part in zip(shapes, parts, strict=True)]
    found = np.concatenate(times, axis=-1)[..., np.argsort(order)]
    return found.reshape(*found.shape[:-1], *wide.shape)


_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""
_CELLS = 1_000_000
"""Numbers by law, start and length of speculations that are held together: 8 MB."""
_PAIRS = 4096
"""Numbers by pair and length, of which a processor keeps several arrays near."""


def moments(lookahead: int, verifiers: int, tokens: int, law: Any, cost: StepCosts) -> Moments:
    """Return the exact moments of a decoding; `drafted` counts the drafted tokens that passes verify, not those after a rejection.

    A law of records gives the mixture of its records.
    """
    tables, chains = speculation_tables(lookahead, verifiers, tokens, cost).of_several(), chains_of(law, Parameters.SHORT_LABEL)
    found = np.array(moments_of_pairs(tables, chains, np.arange(len(chains)), np.zeros(len(chains), dtype=np.intp)))
    parts = [Moments(*each) for each in found.T.tolist()]
    return parts[0] if len(parts) == 1 else mixed(parts)


def moments_of_pairs(
    tables: SpeculationTables, laws: Sequence[Chain], law: Index, price: Index, spread: NDArray[np.bool_] | None = None
) -> Moments:  # fmt: skip
    """`moments` of pairs of laws and costs, from the tables of several costs; arrays of shape (pairs,).

    The variance is nan where there is no `spread` to be computed; None: it is computed for all.
    """
    found, size = np.full((len(Moments._fields), law.size), np.nan), max(_CELLS // tables.tokens**2, 1)
    passes = np.arange(1.0, tables.waiting.shape[1] + 1)
    verified = np.cumsum(tables.waiting, axis=1, dtype=np.float64)
    time, busy, operations = (each.reshape(len(each), -1) for each in tables[1:4])
    for begin in range(0, len(laws), size):
        mine = np.flatnonzero((law >= begin) & (law < begin + size))
        if not mine.size:
            continue
        of, costs = law[mine] - begin, price[mine]
        restarts = _Restarts.of(laws[begin : begin + size], tables.tokens)
        ended = restarts.ended(tables.lookahead, len(passes))
        by_pass, counts = ended.sum(axis=3), ended.reshape(len(ended), -1).T
        mean = linear(counts, time, of, costs)
        found[0, mine] = mean
        found[2, mine], found[3, mine] = linear(counts, busy, of, costs), linear(counts, operations, of, costs)
        found[4, mine] = (by_pass @ passes).sum(axis=1)[of]
        found[5, mine] = np.einsum("lsp,sp->l", by_pass, verified)[of]
        asked = np.arange(mine.size) if spread is None else np.flatnonzero(spread[mine])
        step = max(_PAIRS // tables.tokens, 1)
        for at in range(0, asked.size, step):
            part = asked[at : at + step]
            square = _squares(tables, restarts, of[part], costs[part])
            found[1, mine[part]] = np.maximum(square - mean[part] ** 2, 0.0)
    return Moments(*found)


def _squares(tables: SpeculationTables, restarts: _Restarts, law: Index, price: Index) -> Floats:
    """Mean squares of the times of pairs: a recursion over restarts, with the mean time until each position, where one starts."""
    tokens = tables.tokens
    square, spent = np.zeros(law.size), np.zeros((law.size, tokens + 1))
    for start in range(tokens):
        ends = restarts.ends[law, start, : tokens - start]
        number, place = tables.ended_by(start, np.arange(1, tokens - start + 1))
        weighted = restarts.chance[law, start, None] * ends * tables.time[:, start, number, place][price]
        gained = spent[:, start, None] * ends
        spent[:, start + 1 :] += gained + weighted
        square += (tables.time[:, start, number, place][price] * (2 * gained + weighted)).sum(axis=1)
    return square


class _Restarts(NamedTuple):
    """Where speculations start under several laws, and how many tokens they decode.

    The token before a restart was rejected, so the chain is after a failure there.
    """

    chance: Floats
    """Probability that one starts at each position, shape (laws, tokens)."""
    ends: Floats
    """Probability that it decodes 1, 2, ... tokens, the last number being the end; 0 beyond. Shape (laws, starts, tokens)."""

    @staticmethod
    def of(laws: Sequence[Chain], tokens: int) -> _Restarts:
        """By a forward recursion over restarts."""
        after_failure, after_success = (np.stack(each) for each in zip(*(law.probabilities(tokens) for law in laws), strict=True))
        chance, ends = np.zeros((len(laws), tokens + 1)), np.zeros((len(laws), tokens, tokens))
        chance[:, 0] = 1.0
        for start in range(tokens):
            kept = after_success[:, start : tokens - 1].astype(np.float64)
            kept[:, :1] = after_failure[:, start : tokens - 1][:, :1]
            own = ends[:, start, : tokens - start]
            own[:, 0] = 1.0
            np.cumprod(kept, axis=1, out=own[:, 1:])
            own[:, :-1] *= 1 - kept
            chance[:, start + 1 :] += chance[:, start, None] * own
        return _Restarts(chance[:, :tokens], ends)

    def ended(self, lookahead: int, passes: int) -> Floats:
        """Probability that a speculation starts somewhere and is ended by each of its passes at each place.

        Shape (laws, starts, passes, 2).
        """
        laws, tokens = self.chance.shape
        start = np.arange(tokens)[:, None]
        number, _, place = _ended_by(lookahead, tokens, start, np.arange(1, tokens + 1))
        where, size = ((start * passes + number) * 2 + place).ravel(), tokens * passes * 2
        weights = (self.chance[..., None] * self.ends).reshape(laws, -1)
        found = np.stack([np.bincount(where, each, minlength=size) for each in weights])
        return np.asarray(found.reshape(laws, tokens, passes, 2), dtype=np.float64)


def work_of_chains(
    parameters: Parameters, tokens: int, cost: StepCosts, laws: Sequence[Chain]
) -> tuple[ModelPasses, ModelPasses]:
    """Return the expected passes of target and draft model under each law, shape (..., laws), at a cost or at several joined ones.

    W(s, i, place) is the probability that a speculation starts after s tokens and is ended by its pass i at this place. Pass i of
    start s is then processed with probability sum of W(s, i', place) over i' >= i, and is stopped with that of the i' < i whose
    rejection is later than `sent_i`. Both count in full, as an interrupted pass does.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> target, draft = work_of_chains(Parameters(1, 2, 3), 200, UnitCost(1, cost_ratio=0.25), [Iid(0.8), Iid(1.0)])
    >>> target.passes.round(3).tolist(), draft.passes.round(3).tolist()  # without rejections nothing is made in vain
    ([208.464, 101.0], [334.484, 199.0])
    """
    ahead, verifiers, start = parameters.lookahead, parameters.verifiers, np.arange(tokens)
    passes = _passes(ahead, verifiers, tokens, parameters.draft_costs(cost))
    at, wide = start + passes.first, passes.wide
    each = np.stack([np.ones_like(wide), wide, at * wide + wide * (wide + 1) / 2, at + wide, passes.heads])
    drafts = passes.begun_drafts()
    # What a speculation counts that is ended by a pass: passes up to this one, and those that are stopped.
    found = np.empty((len(each) + 2, *passes.time.shape))
    for values, counted in zip(each, found, strict=False):
        counted[...] = np.cumsum(values, axis=0)[..., None]
        for number, _, running in passes.in_flight(verifiers):
            counted[..., :-number, :, :] += running * values[number:, :, None]
    found[-2:] = drafts, attended_within(start[None, :, None], drafts, parameters.context_budget)
    by_start = np.ascontiguousarray(found.swapaxes(-3, -2))
    rows, size = by_start.reshape(-1, 2 * wide.size), max(_CELLS // tokens**2, 1)
    blocks = (_Restarts.of(laws[begin : begin + size], tokens) for begin in range(0, len(laws), size))
    sums = [rows @ restarts.ended(ahead, len(wide)).reshape(-1, 2 * wide.size).T for restarts in blocks]
    totals = np.concatenate(sums, axis=1).reshape(*found.shape[:-3], len(laws))
    return ModelPasses(*totals[:5]), ModelPasses.single(*totals[5:])
