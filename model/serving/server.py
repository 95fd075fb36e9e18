"""A server: the scheduler, a policy of draft length and the decodings of its requests, step by step, without a clock.

`Server.begin` starts an engine step and returns its seconds; `Server.end` ends it, and commits its tokens. Its callers have the
clock: SimPy in `sim.engine.serving`, a plain loop in `model.serving.fast_server`. What the requests' tokens are is up to
`Decodings`: the generators of the algorithms themselves, or arrays of outcomes drawn from their law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model.serving.draft_policies import DraftPolicy, StepView
from model.serving.scheduler import CACHED, DONE, REQUEST, ROW, WANTED, Plan, Scheduler, ServerSettings
from model.serving.step_prices import LayerShare, RaggedPass, StepPrices

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class ServerRequest(NamedTuple):
    """A request: its number, the time at which it arrives, and tokens of its prompt and its output."""

    number: int
    arrival: float
    prompt: int
    output: int


class StepDrafts(NamedTuple):
    """StepDrafts of the decoding sequences in a step, before they are verified; arrays of shape (sequences,)."""

    drafted: Integers
    drafts: list[int]
    """Sequences of each pass of the draft."""
    own_layers: float = 0.0
    """Share of the target's own layers that each of these passes runs; 0: they are of another model."""
    shares: tuple[LayerShare, ...] = ()
    """Parts of the target's layers that not all sequences run in its pass."""
    separate: bool = False
    """True if these passes are on a device of the draft's own."""
    concurrent: bool = False
    """True if these passes are made during that of the target, which verifies tokens drafted in the step before."""
    context_budget: int | None = None
    """Largest number of cached positions of each sequence that these passes read; None: all."""


class Sequences(NamedTuple):
    """Running sequences; arrays of shape (sequences,)."""

    requests: Integers
    rows: Integers
    """A number below `max_num_seqs` for each, which it keeps while it runs."""
    done: Integers
    """Tokens generated."""
    left: Integers
    """Tokens still wanted."""


class Decodings(Protocol):
    """The decodings of a server's requests."""

    def start(self, request: ServerRequest, row: int) -> None:
        """A request is admitted for the first time, or again after a preemption, as number `row` of the running sequences."""

    def first_tokens(self, each: Sequences) -> None:
        """The prompts of these sequences end in this step: each gives one token."""

    def draft(self, each: Sequences, limits: Integers) -> StepDrafts:
        """Draft at most `limits` tokens of each."""

    def verify(self, each: Sequences, drafted: Integers) -> Integers:
        """Tokens that each emits, at most those that it still wants."""

    def ahead(self, each: Sequences, longest: int) -> Integers:
        """Tokens of a draft of `longest` tokens that would be accepted, for each sequence."""

    def finish(self, request: int) -> None:
        """A request is finished."""


class StepRecord(NamedTuple):
    """What a step did, for the results."""

    seconds: float
    sequences: int
    """Sequences that decoded."""
    running: int
    waiting: int
    drafted: int
    emitted: int
    """Tokens generated, those that follow a prompt included."""
    prompt_tokens: int
    blocks: int
    """Blocks in use."""
    target_seconds: float
    """Seconds in which the target's devices compute."""
    draft_seconds: float
    """Seconds in which a device of the draft's own computes; 0 where it has none."""


class Server:
    """One server: requests go in, steps come out.

    Parameters
    ----------
    settings, policy, prices, decodings
        The scheduler's settings, the policy of draft length, the prices of passes, and the requests' decodings.
    request
        The request of a number.
    """

    def __init__(
        self, settings: ServerSettings, policy: DraftPolicy, prices: StepPrices, decodings: Decodings,
        request: Callable[[int], ServerRequest],
    ) -> None:  # fmt: skip
        self.settings, self.policy, self.prices, self.decodings, self.request = settings, policy, prices, decodings, request
        self.scheduler = Scheduler(settings)
        self._plan: Plan | None = None
        self._each = Sequences(*np.zeros((4, 0), dtype=np.int64))
        self._one_token = False
        """True if a prompt of one token has been submitted: its first token is one of a round."""
        self._drafted: Integers = np.zeros(0, dtype=np.int64)
        self._emitted: Integers = self._drafted
        self._seconds, self._tokens = 0.0, 0
        self._busy = 0.0, 0.0
        """Seconds of the target's devices, and of a device of the draft's own, in the step that runs."""
        self.first: list[int] = []
        """Requests whose first token the step that ended has given."""
        self.continued: Integers = self._drafted
        """Requests to which the step that ended has added tokens, after their first."""
        self.admitted: list[int] = []
        """Requests that the step that has begun admitted."""

    def submit(self, number: int) -> None:
        """Let a request wait."""
        request = self.request(number)
        self.settings.check_request(request.prompt, request.output, self.policy.longest)
        self._one_token |= request.prompt == 1
        self.scheduler.enqueue(number, request.prompt, request.output)

    @property
    def load(self) -> int:
        """Running and waiting requests, which a router compares."""
        return self.scheduler.running + len(self.scheduler.waiting)

    def begin(self) -> float | None:
        """Start a step; return its seconds, or None if there is nothing to do [s]."""
        scheduler, table = self.scheduler, self.scheduler.table
        if not scheduler.running and not scheduler.waiting:
            return None
        self.admitted = []
        while True:
            plan = scheduler.plan(self._limits(scheduler.decoding))
            self.admitted += plan.admitted
            for number in plan.admitted:
                column = int(np.flatnonzero(table[REQUEST, : scheduler.running] == number)[0])
                self.decodings.start(self.request(number), int(table[ROW, column]))
                self.policy.forget(int(table[ROW, column]))
            if plan.decoding.size or plan.chunks:
                break
            # Only prompts of one token were admitted: they decode in this step.
        self._plan = plan
        decoding = plan.decoding
        self._each = each = self._sequences(decoding)
        rounds = self.decodings.draft(each, plan.limits)
        self._drafted = rounds.drafted
        cached = table[CACHED, : scheduler.running] if decoding.size == scheduler.running else table[CACHED, decoding]
        total, most = int(cached.sum()), rounds.context_budget
        visible = total if most is None or not rounds.drafts else int(np.minimum(cached, most).sum())
        seconds = sum((self._drafting(each, total, visible, decoding.size, rounds.own_layers) for each in rounds.drafts), 0.0)
        tokens, prompts = decoding.size + int(rounds.drafted.sum()), plan.chunks
        read = sum(each.tokens for each in prompts)
        before = sum(each.tokens * each.before for each in prompts) // read if read else 0
        self._tokens, drafted = tokens, tokens > decoding.size
        over = RaggedPass(decoding.size, tokens, total, drafted, len(prompts), read, before, rounds.shares)
        verifying = self.prices.target(over)
        if rounds.separate and rounds.drafts:
            self._busy = verifying, seconds
            drafting = seconds + 2 * self.prices.link
            self._seconds = max(drafting, verifying) if rounds.concurrent else drafting + verifying
        else:
            self._seconds = seconds + verifying
            self._busy = self._seconds, 0.0
        return self._seconds

    def _drafting(self, sequences: int, total: int, visible: int, of: int, share: float) -> float:
        """Seconds of a draft pass for `sequences` of the `of` sequences that decode, with their part of the cached positions, and
        of those that draft passes read [s]."""
        read = visible * sequences // of
        if share:
            return self.prices.own_layers(share, sequences, read)
        return self.prices.draft(sequences, total * sequences // of, read)

    def _limits(self, decoding: Integers) -> int | Integers:
        """Tokens to draft, by the policy."""
        if not decoding.size:
            return 0
        if self.policy.BLIND:
            return self.policy.longest
        each, positions = self._sequences(decoding), int(self.scheduler.table[CACHED, decoding].sum())
        ahead = self.decodings.ahead(each, self.policy.longest) if self.policy.KNOWS else None
        return self.policy.limits(StepView(decoding.size, len(self.scheduler.waiting), positions, each.rows, ahead))

    def _sequences(self, columns: Integers) -> Sequences:
        table, running = self.scheduler.table, self.scheduler.running
        if columns.size == running:  # all of them: views
            done = table[DONE, :running]
            return Sequences(table[REQUEST, :running], table[ROW, :running], done, table[WANTED, :running] - done)
        done = table[DONE, columns]
        return Sequences(table[REQUEST, columns], table[ROW, columns], done, table[WANTED, columns] - done)

    def end(self) -> tuple[StepRecord, list[int]]:
        """End the step that has begun; return what it did, and the requests that are finished."""
        plan, scheduler, table = self._plan, self.scheduler, self.scheduler.table
        assert plan is not None
        decoding, decodings, each = plan.decoding, self.decodings, self._each
        emitted = decodings.verify(each, self._drafted)
        # What was accepted but is not wanted any more is not seen.
        self.policy.learn(each.rows, self._drafted, emitted - 1)
        ended = [chunk.column for chunk in plan.chunks if chunk.last]
        self.first, self.continued = [], each.requests.copy()  # a view, of which finished requests are removed below
        if self._one_token:
            new = each.done == 0
            self.first, self.continued = each.requests[new].tolist(), each.requests[~new]
        if ended:
            read = self._sequences(np.array(ended))
            decodings.first_tokens(read)
            self.first += read.requests[read.done == 0].tolist()
            if read.done.any():  # prompts read again, after a preemption
                self.continued = np.concatenate([self.continued, read.requests[read.done > 0]])
        record = StepRecord(
            self._seconds, decoding.size, scheduler.running, len(scheduler.waiting), self._tokens - decoding.size,
            int(emitted.sum()) + len(ended), sum(chunk.tokens for chunk in plan.chunks), scheduler.held, *self._busy,
        )  # fmt: skip
        finished = scheduler.complete(plan, emitted)
        numbers: list[int] = []
        if finished.size:
            numbers = table[REQUEST, finished].tolist()
            for number in numbers:
                decodings.finish(number)
            scheduler.remove(finished)
        self._plan = None
        return record, numbers
