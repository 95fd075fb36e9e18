"""Decodings of a server's requests: the generators of the algorithms, or arrays of outcomes drawn from their law.

`Generators` interprets the algorithms: every running request is a generator, and a step of the engine answers what all of them ask
for. `Arrays` knows of chains and lookups only what their outcomes say, and is hundreds of times as fast. Both give the same tokens,
drafts and passes for the same random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import World
from model.outcomes.lookup_laws import outcomes_after
from model.serving.request_outcomes import LOOKUP, RequestOutcomes
from model.serving.server import Sequences, ServerRequest, StepDrafts
from model.serving.step_prices import LayerShare
from model.steps import Commit, DraftLimit, Fork, Forward, Join, Lookup, Offer, Read, ReadEach, Steps

Integers = NDArray[np.int64]

DecodeRequest = Callable[[ServerRequest, Integers], tuple[Steps, World]]
"""Start the algorithm of a request with its outcomes: its steps, and the simulated model that answers its reads."""


@dataclass(frozen=True)
class Drafter:
    """How a method drafts.

    Parameters
    ----------
    passes
        Draft passes of a step, as a function of the tokens of its longest draft.
    keeps_up
        True if the draft makes a pass also for sequences that draft nothing: a head reads the states of each pass of the target, or
        lacks them later. So drafting that is switched off by a policy is not free.
    run, depth
        Layers of the target that a draft pass runs, of how many; 0: another model drafts.
    continues
        True if the verification goes on after these layers: the last drafted token has a pass through them of its own, and only
        sequences that drafted nothing run them in the verification.
    separate
        True if the draft is on a device of its own.
    concurrent
        True if tokens are drafted during the target's pass, which verifies those drafted in the step before, as in
        `model.methods.pearl`. The draft is then on a device of its own.
    context_budget
        Largest number of cached positions of each sequence that a draft pass reads; None: all.
    """

    passes: Callable[[int], int]
    keeps_up: bool = False
    run: int = 0
    depth: int = 0
    continues: bool = False
    separate: bool = False
    concurrent: bool = False
    context_budget: int | None = None

    def __call__(self, length: int) -> int:
        """Draft passes of a step whose longest draft has `length` tokens.

        >>> [each(0) for each in (MODEL, HEADS, PARALLEL, NONE)], [each(3) for each in (MODEL, HEADS, PARALLEL, NONE)]
        ([0, 1, 1, 0], [3, 3, 1, 0])
        """
        return max(self.passes(length), int(self.keeps_up))


def own_layers(run: int, depth: int, *, continues: bool, context_budget: int | None = None) -> Drafter:
    """Drafts by the target's own layers, or some of them, as in `model.methods.self_speculative`.

    >>> own_layers(8, 32, continues=True)(3), own_layers(20, 32, continues=False)(3)
    (4, 3)
    """
    passes = Drafter(lambda length: length + (continues and length > 0), run=run, depth=depth, continues=continues)
    return replace(passes, context_budget=context_budget)


MODEL, HEADS = Drafter(lambda length: length), Drafter(lambda length: length, keeps_up=True)
PARALLEL, NONE = Drafter(lambda length: min(length, 1), keeps_up=True), Drafter(lambda length: 0)
SEPARATE_MODEL = replace(MODEL, separate=True)
CONCURRENT_MODEL = replace(SEPARATE_MODEL, concurrent=True)
"""A draft model and draft heads, with a pass for each token; a parallel draft, with one for all; drafts that no model makes;
and a draft model on a device of its own, which drafts before the target's pass or during it."""


class Arrays:
    """Decodings as arrays of outcomes.

    Parameters
    ----------
    outcomes
        Outcomes of the requests.
    most
        Largest number of running sequences.
    drafter
        How tokens are drafted.
    layers
        Layers that a pass runs for the token after each number of generated ones, and the depth of the target; None: all layers.
    """

    def __init__(
        self, outcomes: RequestOutcomes, most: int, drafter: Drafter = MODEL, layers: tuple[Integers, int] | None = None
    ) -> None:
        self.outcomes, self.drafter, self.layers = outcomes, drafter, layers
        self.looks_up = outcomes.outcome == LOOKUP
        self._table: Integers = np.zeros((most, 64), dtype=np.int64)
        self._looked_up_at: Integers = np.zeros(most, dtype=np.int64)
        self._kept: Integers = np.zeros(0, dtype=np.int64)
        self._waiting: Integers = np.zeros(most, dtype=np.int64)
        """Drafted tokens that the next pass verifies, if drafts are made during passes of the target."""

    def start(self, request: ServerRequest, row: int) -> None:
        """See `model.serving.server.Decodings`."""
        found = self.outcomes.of(request.number)
        if found.size > self._table.shape[1]:
            wider = np.zeros((len(self._table), max(found.size, 2 * self._table.shape[1])), dtype=np.int64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        self._table[row, : found.size] = found
        self._looked_up_at[row] = self._waiting[row] = 0

    def first_tokens(self, each: Sequences) -> None:
        """See `model.serving.server.Decodings`."""

    def draft(self, each: Sequences, limits: Integers) -> StepDrafts:
        """See `model.serving.server.Decodings`."""
        if not each.rows.size:
            return StepDrafts(limits, [])
        here = self._table[each.rows, each.done]
        if self.looks_up:
            found, right = outcomes_after(each.done > self._looked_up_at[each.rows] + 1, here)
            drafted = np.minimum(found, limits)
            self._kept = np.minimum(right, drafted)
            asked = limits > 0
            self._looked_up_at[each.rows[asked]] = each.done[asked]
            return StepDrafts(drafted, [])
        if self.drafter.concurrent:
            return self._during_verification(each, limits, here)
        self._kept = np.minimum(here, limits)
        longest = int(limits.max())
        if self.layers is not None:
            return StepDrafts(limits, [], shares=self._shares(each.done))
        passes = self.drafter(longest)
        if self.drafter.run:
            return self._by_own_layers(limits, passes)
        if passes and (limits.min() == longest or (passes == 1 and self.drafter.keeps_up)):
            return self._by_the_draft(limits, [limits.size] * passes)
        counts = [int(np.count_nonzero(limits > index)) for index in range(passes)]
        passes_of = [limits.size, *counts[1:]] if self.drafter.keeps_up else counts
        return self._by_the_draft(limits, passes_of)

    def _by_the_draft(self, drafted: Integers, passes: list[int]) -> StepDrafts:
        """Drafted tokens of each sequence, by passes of the draft for these numbers of sequences."""
        return StepDrafts(drafted, passes, separate=self.drafter.separate, context_budget=self.drafter.context_budget)

    def _shares(self, done: Integers) -> tuple[LayerShare, ...]:
        """Parts of the layers that not all tokens run: the sets of layers are nested."""
        assert self.layers is not None
        budgets, depth = self.layers
        own = budgets[done]
        steps = np.unique(own).tolist()
        found = [(depth - steps[-1], 0)] if steps[-1] < depth else []
        for low, high in reversed([*pairwise(steps)]):
            found.append((high - low, int(np.count_nonzero(own >= high))))
        return tuple(LayerShare(layers / depth, count, count) for layers, count in found)

    def _during_verification(self, each: Sequences, limits: Integers, right: Integers) -> StepDrafts:
        """Verify the tokens that wait, and draft after them; the first of the new ones is verified too."""
        waiting = np.minimum(self._waiting[each.rows], limits)
        made = np.minimum(each.left - 1 - waiting, limits)
        self._kept = np.minimum(right, waiting)
        self._waiting[each.rows] = np.where(right > waiting, np.maximum(made - 1, 0), 0)
        counts = [int(np.count_nonzero(made > index)) for index in range(int(made.max()))]
        return self._by_the_draft(waiting, counts)._replace(separate=True, concurrent=True)

    def _by_own_layers(self, limits: Integers, passes: int) -> StepDrafts:
        drafter = self.drafter
        share, budget = drafter.run / drafter.depth, drafter.context_budget
        if not drafter.continues:
            counts = [int(np.count_nonzero(limits > index)) for index in range(passes)]
            return StepDrafts(limits, counts, share, context_budget=budget)
        idle = limits.size - int(np.count_nonzero(limits))
        counts = [int(np.count_nonzero(limits >= max(index, 1))) for index in range(passes)]
        return StepDrafts(limits, counts, share, (LayerShare(share, idle, idle),) if passes else (), context_budget=budget)

    def verify(self, each: Sequences, drafted: Integers) -> Integers:
        """See `model.serving.server.Decodings`."""
        return np.minimum(self._kept + 1, each.left) if each.rows.size else each.rows

    def ahead(self, each: Sequences, longest: int) -> Integers:
        """See `model.serving.server.Decodings`."""
        if self.looks_up:
            found, right = outcomes_after(each.done > self._looked_up_at[each.rows] + 1, self._table[each.rows, each.done])
            return np.minimum(np.minimum(right, found), longest)
        return np.minimum(self._table[each.rows, each.done], longest)

    def finish(self, request: int) -> None:
        """See `model.serving.server.Decodings`."""


class _SubProcess(NamedTuple):
    """A sub-process that has ended: its value and its cache."""

    value: Any
    cache: Cache
    ended: bool = True


class _RunningDecoding:
    """One request as a generator, up to the pass that it asks for next."""

    __slots__ = ("cache", "drafting", "home", "output", "request", "step", "steps", "unit", "world")

    def __init__(self, request: ServerRequest, steps: Steps, world: World) -> None:
        self.request, self.steps, self.world = request, steps, world
        self.drafting = 0
        """Draft passes of sub-processes since the last pass of the target: they are made during the next one."""
        self.unit = self.home = 0
        """Units of the pass that it asks for, and of the target's last one; a process begins on the first."""
        self.output: list[int] = []
        world.written, self.cache = self.output, Cache()
        self.step: Forward | DraftLimit | None
        self.advance(None)
        # Passes over the prompt: nothing is read of them. The server takes their tokens in chunks, with the next pass.
        while isinstance(self.step, Forward) and not self.step.heads:
            self.advance(self.step)

    @property
    def drafts(self) -> bool:
        """True if the pass that it asks for comes before that of the target in its step."""
        return self.asked.role != "target" or self.asked.within_step

    @property
    def apart(self) -> bool:
        """True if the pass that it asks for is on another unit than the target's."""
        return self.unit != self.home

    @property
    def asked(self) -> Forward:
        """The pass that it asks for."""
        assert isinstance(self.step, Forward)
        return self.step

    def advance(self, answer: Any) -> None:
        """Send an answer, and go on up to the next pass, or to the choice of a draft length."""
        send, world = self.steps.send, self.world
        while True:
            try:
                step = send(answer)
            except StopIteration:
                self.step = None
                return
            match step:
                case Read():
                    answer = world.read(step)
                case Commit():
                    self.output += step.tokens
                    answer = None
                case Lookup():
                    answer = world.look_up(step)
                case Forward():
                    self.cache.write(step)
                    self.unit = self.unit if step.unit is None else step.unit
                    if step.role == "target":
                        self.home = self.unit
                    self.step = step
                    return
                case DraftLimit():
                    self.step = step
                    return
                case ReadEach():
                    answer = world.read_each(step)
                case Fork():
                    answer = self._forked(step, self.cache)
                case Join():
                    answer = tuple(each.value for each in step.tasks)
                case _ if isinstance(step, Offer):
                    answer = None
                case _:
                    raise _unserved(f"asks for {type(step).__name__}")

    def _forked(self, step: Fork, parent: Cache) -> tuple[_SubProcess, ...]:
        """Run sub-processes to their ends: they draft during the target's pass, and their round waits for all that they draft."""
        heirs_of = step.heirs_of or (None,) * len(step.bodies)
        return tuple(
            self._to_its_end(body, (parent if of is None else of.cache).copy())
            for body, of in zip(step.bodies, heirs_of, strict=True)
        )

    def _to_its_end(self, body: Steps | Forward, cache: Cache) -> _SubProcess:
        if isinstance(body, Forward):
            raise _unserved("verifies or drafts in sub-processes of a single pass")
        answer: Any = None
        while True:
            try:
                step = body.send(answer)
            except StopIteration as end:
                return _SubProcess(end.value, cache)
            match step:
                case Read():
                    answer = self.world.read(step)
                case _ if isinstance(step, Offer):
                    answer = None
                case Forward() if step.role != "target":
                    cache.write(step)
                    self.drafting += 1
                    answer = step
                case Fork():
                    answer = self._forked(step, cache)
                case Join():
                    answer = tuple(each.value for each in step.tasks)
                case _:
                    raise _unserved(f"asks for {type(step).__name__} in a sub-process")


def _unserved(what: str) -> ParameterError:
    """Refusal of a method whose sub-processes are not those of a step of the engine."""
    return ParameterError(
        f"a server decodes methods whose sub-processes draft during a pass of the target that waits for them, and this one {what}"
    )


def _shares_of(running: Sequence[_RunningDecoding]) -> tuple[LayerShare, ...]:
    """Parts of the layers that not all of these decodings run in the passes that they ask for; fewest sequences first."""
    depth = max((each.world.layers for each in running), default=0)
    counts, tokens = np.zeros((2, depth), dtype=np.int64)
    for each in running:
        for first, last in each.asked.layers.ranges:
            counts[first:last] += 1
            tokens[first:last] += len(each.asked.tokens)
    layers = Counter(zip(counts.tolist(), tokens.tolist(), strict=True))
    partial = sorted(each for each in layers if each[0] < len(running))
    return tuple(LayerShare(layers[each] / depth, *each) for each in partial)


class Generators:
    """Decodings as the algorithms' own generators, whose passes are merged.

    `finished` is called with each request and its tokens when it ends.
    """

    def __init__(
        self, decode: DecodeRequest, outcomes: RequestOutcomes, finished: Callable[[int, list[int]], None] = lambda *_: None
    ) -> None:
        self.decode, self.outcomes, self.finished = decode, outcomes, finished
        self._of: dict[int, _RunningDecoding] = {}
        self._table: dict[int, Integers] = {}

    def start(self, request: ServerRequest, row: int) -> None:
        """See `model.serving.server.Decodings`."""
        if request.number not in self._of:
            steps, world = self.decode(request, self.outcomes.of(request.number))
            self._of[request.number] = _RunningDecoding(request, steps, world)

    def first_tokens(self, each: Sequences) -> None:
        """See `model.serving.server.Decodings`."""
        for number in each.requests.tolist():
            decoding = self._of[number]
            if isinstance(decoding.step, DraftLimit):
                decoding.advance(0)
            while decoding.asked.role != "target":  # a head reads the prompt
                decoding.advance(decoding.step)
            decoding.advance(decoding.step)

    def draft(self, each: Sequences, limits: Integers) -> StepDrafts:
        """See `model.serving.server.Decodings`."""
        running = [self._of[number] for number in each.requests.tolist()]
        for decoding, limit in zip(running, limits.tolist(), strict=True):
            if isinstance(decoding.step, DraftLimit):
                decoding.advance(decoding.step.within(limit))
        passes: list[int] = []
        share, separate, budget = 0.0, False, None
        while waiting := [decoding for decoding in running if decoding.drafts]:
            passes.append(sum(max(each.asked.heads, 1) if each.asked.tree else 1 for each in waiting))
            for decoding in waiting:
                if decoding.asked.role == "target":
                    share = decoding.asked.layers.size / decoding.world.layers
                separate |= decoding.apart
                budget = decoding.asked.context_budget
                decoding.advance(decoding.step)
        drafted = np.array([len(decoding.asked.tokens) - 1 for decoding in running], dtype=np.int64)
        during = [decoding.drafting for decoding in running]
        for decoding in running:
            decoding.drafting = 0
        if any(during):
            passes = [sum(count > index for count in during) for index in range(max(during))]
            return StepDrafts(drafted, passes, separate=True, concurrent=True)
        return StepDrafts(drafted, passes, share, _shares_of(running), separate, context_budget=budget)

    def verify(self, each: Sequences, drafted: Integers) -> Integers:
        """See `model.serving.server.Decodings`."""
        emitted = []
        for number in each.requests.tolist():
            decoding = self._of[number]
            before = len(decoding.output)
            decoding.advance(decoding.step)
            emitted.append(len(decoding.output) - before)
        return np.array(emitted, dtype=np.int64)

    def ahead(self, each: Sequences, longest: int) -> Integers:
        """See `model.serving.server.Decodings`."""
        if self.outcomes.outcome == LOOKUP:
            raise ParameterError("a policy that knows what is accepted needs a drafting model; lookups are known before the pass")
        known = [self.outcomes.of(number)[done] for number, done in zip(each.requests.tolist(), each.done.tolist(), strict=True)]
        return np.minimum(np.array(known, dtype=np.int64), longest)

    def finish(self, request: int) -> None:
        """See `model.serving.server.Decodings`."""
        done = self._of.pop(request)
        self.finished(request, done.output)
