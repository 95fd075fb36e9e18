"""The interpreter over operating system processes: Predictive Pipelined Decoding as [Yang2024] built it.

The main process drives all generators of steps and makes its own passes. Each pass of a sub-process is made by the worker process
of its unit, which has a replica of the model, one thread, and a separate core or GPU (`calibrate.untested_on_gpu.gpu_ordering`).
Cache rows, states and commands are in shared memory (`calibrate.workers.worker_loop`); `started` starts the processes
(`calibrate.workers.worker_pool`):

    with started(Replica("family:target"), units=2, capacity=256) as pool:
        run = Parallel(pool)
        work = run.run(ppd.decode(ppd.Parameters(12, 6, 1), prompt, 64), 64)

The first process runs on unit 0, the main process itself. A sub-process without a requested unit takes the first free one, and
keeps it until it ends. A sub-process may follow its parent: it then waits, layer by layer, for rows that are being written.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for Exact
LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import PassOutput, RandomDraws, Real, RunTimes, Sampling
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers.worker_loop import DONE, MADE, STATUS, STOPPED, Command, MissingRows, tags_checksum
from calibrate.workers.worker_pool import Flight, Pool, ProcessError, started
from model.base.checks import ParameterError
from model.interpret.interpreter import Cache, CountedWork, Task
from model.interpret.simulated_answers import Answers
from model.logs.recorded_decoding import AnsweredRead
from model.logs.spans import Span
from model.steps import Adopt, CacheError, Commit, DraftLimit, Fork, Forward, Join, Lookup, Read, Steps, Stop, require_ended

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

__all__ = ["Parallel", "Pool", "ProcessError", "started"]
ROLE = "target"
UNKNOWN_ROWS: Final = -1
"""Tag of rows whose content is unknown."""


class _UnitOutput(PassOutput):
    """Output of a pass, with the unit and the number of the pass."""

    __slots__ = ("serial", "unit")

    def __init__(self, step: Forward, decoder: Decoder, states: Tensor | None, unit: int, serial: int) -> None:
        super().__init__(step, decoder, states, None)
        self.unit, self.serial = unit, serial

    def alone(self, hypothesis: int) -> _UnitOutput:
        """See `PassOutput`."""
        one = super().alone(hypothesis)
        return _UnitOutput(one.step, self.decoder, one.states, self.unit, self.serial)


class _UnitProcess(Task):
    """A process of the algorithm."""

    def __init__(self, body: Steps | Forward, parent: _UnitProcess | None, unit: int | None) -> None:
        super().__init__(body, parent)
        self.single = body if isinstance(body, Forward) else None
        self.unit = -1 if unit is None else unit
        self.number = 0
        self.expected_rows = Cache()
        self.tags: NDArray[np.int64] | None = None
        self.since: Callable[[], bool] | None = None
        """Condition that it waits for, if it waits."""
        self.serial = 0
        """Number of its last pass."""
        self.used = False

    @property
    def leads(self) -> bool:
        """Whether all its ancestors have ended, so that its tokens are final."""
        parent: Any = self.parent
        return parent is None or (parent.ended and parent.leads)


class Parallel(Real):
    """Interprets an algorithm with its sub-processes in worker processes.

    Parameters
    ----------
    pool
        The processes: see `started`.
    sampling, random_draws, log, answers, times
        See `Real`; `times` has no passes, because they run concurrently: see `spans`.
    record
        Whether to keep `spans`: the recorded events. It takes 1 % of the time of the family's target.

    After a run, `spans` are the events, `run_start` is its start, and `seconds` its length to the last token. The workers'
    remaining passes are stopped after that, and their ends awaited.
    """

    def __init__(
        self, pool: Pool, *, sampling: Sampling | None = None, random_draws: RandomDraws | None = None,
        log: list[AnsweredRead] | None = None,
        answers: Answers | None = None, times: RunTimes | None = None, record: bool = False,
    ) -> None:  # fmt: skip
        super().__init__({ROLE: pool.decoder}, sampling=sampling, random_draws=random_draws, log=log, answers=answers, times=times)
        self.pool = pool
        self.recording = record
        self.rows: list[tuple[Span, _UnitProcess | None]] = []
        self.run_start = self.seconds = 0.0
        self.processes = 0
        self.ready: deque[_UnitProcess] = deque()
        self.forked: list[_UnitProcess] = []
        self.blocked: list[_UnitProcess] = []
        self.not_started: deque[_UnitProcess] = deque()
        self.local: tuple[_UnitProcess, Forward, Command] | None = None
        self.running_here: tuple[_UnitProcess, Forward, Command] | None = None
        self.free = [False, *[True] * (pool.units - 1)]

    @property
    def spans(self) -> list[Span]:
        """Recorded events, in the order of their ends; unused passes of sub-processes are marked as discarded."""
        return [
            row._replace(fate="discarded") if process is not None and not process.used and row.fate == "kept" else row
            for row, process in self.rows
        ]

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """See `Interpreter`. An error leaves the processes broken."""
        import torch

        pool = self.pool
        pool.refuse_closed()
        self.wanted = tokens
        try:
            with torch.inference_mode():
                self._run(steps)
        except BaseException:
            pool.broken = True
            raise
        return self.work

    def _run(self, steps: Steps) -> None:
        pool = self.pool
        main = _UnitProcess(steps, None, 0)
        main.tags = np.zeros(pool.tags.shape[1:], np.int64)
        main.used = True
        self._number(main)
        self.run_start = time.perf_counter()
        self.ready.append(main)
        while not self._over():
            if self.ready:
                self._advance(self.ready.popleft())
            elif self.local is not None:
                self._make()
            elif any(post.flights for post in pool.posts.values()):
                start = time.perf_counter()
                pool.wait(start)
                self._note(0, start, "wait", None)
                self._collect()
            elif self.blocked or self.not_started:
                raise CacheError("the algorithm came to a halt before it had generated all its tokens")
            else:
                break  # the algorithm has ended
        self.seconds = time.perf_counter() - self.run_start
        self._give_up()

    def _over(self) -> bool:
        return len(self.work.tokens) >= self.wanted

    def _give_up(self) -> None:
        """Stop running passes and wait for their ends, so that the next run has all cores."""
        pool = self.pool
        for post in pool.posts.values():
            for flight in post.flights:
                self._stop_flight(flight)
        start = time.perf_counter()
        while any(post.flights for post in pool.posts.values()):
            pool.wait(start)
            self._collect()

    # --- processes ---

    def _number(self, process: _UnitProcess) -> None:
        process.number = self.processes
        self.processes += 1

    def _advance(self, task: _UnitProcess) -> None:
        """Send answers and carry out steps until the task has to wait."""
        body = task.body
        while not task.ended and not self._over():
            if task.unit < 0 and not self._settle(task):
                return
            try:
                step = body.send(task.answer)
            except StopIteration as end:
                task.value = end.value
                self._start_forked()
                self._end(task)
                return
            task.answer = None
            if self._answered(task, step):
                continue
            return

    def _answered(self, task: _UnitProcess, step: Any) -> bool:
        """Carry out a step; return whether the task can continue."""
        match step:
            case Read():
                start = time.perf_counter()
                task.answer = self.read(step)
                self._note(0, start, "head", task)
            case DraftLimit():
                task.answer = step.longest
            case Lookup():
                task.answer = self.look_up(step)
            case Fork():
                self._fork(task, step)
            case Forward():
                self._refuse(step)
                return self._forward(task, step)
            case Commit():
                if not task.leads:
                    return self._block(task, lambda: self._committed(task, step))
                self._committed(task, step)
            case Join():
                self._start_forked()
                return self._block(task, lambda: self._joined(task, step.tasks))
            case Stop():
                self._start_forked()
                self._collect()
                for sub in step.tasks:
                    self._stop(sub)
                task.started = [sub for sub in task.started if not sub.ended]
            case Adopt():
                self._start_forked()
                self._promote(task, step)
        return True

    def _committed(self, task: _UnitProcess, step: Commit) -> bool:
        if not task.leads:
            return False
        task.used = True
        self.commit(step)
        return True

    def _joined(self, task: _UnitProcess, subs: Sequence[Any]) -> bool:
        if not all(sub.ended for sub in subs):
            return False
        task.answer = tuple(sub.value for sub in subs)
        return True

    def _block(self, task: _UnitProcess, since: Callable[[], bool]) -> bool:
        """Make a task wait for a condition, unless it holds already; return whether it does."""
        if since():
            return True
        task.since = since
        self.blocked.append(task)
        return False

    def _release(self) -> None:
        """Resume tasks whose condition holds."""
        waiting, self.blocked = self.blocked, []
        for task in waiting:
            if task.ended:
                continue
            assert task.since is not None
            if task.since():
                task.since = None
                self.ready.append(task)
            else:
                self.blocked.append(task)

    def _end(self, task: _UnitProcess) -> None:
        task.ended = True
        if task.single is None:
            self._vacate(task)
        self._release()

    def _stop(self, task: _UnitProcess) -> None:
        """End a task and all its sub-processes."""
        if task.ended:
            return
        task.ended = task.stopped = True
        task.body.close()
        for post in self.pool.posts.values():
            for flight in post.flights:
                if flight.task is task:
                    self._stop_flight(flight)
        for own in (self.local, self.running_here):  # the pass ends before unit 0 makes another
            if own is not None and own[0] is task:
                self._forget(0, own[2])
        if self.local is not None and self.local[0] is task:
            self.local = None
        started: list[Any] = task.started
        for sub in started:
            self._stop(sub)
        if task.single is None:
            self._vacate(task)
        self._release()

    def _stop_flight(self, flight: Flight) -> None:
        """Stop a worker's pass; the content of the rows that it was to change is unknown from now on."""
        if flight.stopped:
            return
        flight.stopped = True
        unit = flight.task.unit
        self.pool.board.slots[unit][flight.place][STOPPED] = 1
        self._forget(unit, flight.command)

    def _forget(self, unit: int, command: Command) -> None:
        """Mark the rows that a stopped pass was to copy or make as unknown."""
        low = min((piece.start for piece in command.pieces), default=command.at)
        self.pool.tags[unit, command.first : command.last, low : command.at + len(command.tokens)] = UNKNOWN_ROWS

    def _settle(self, task: _UnitProcess) -> bool:
        """Assign a free unit to a process without one; return whether there was one."""
        if True not in self.free:
            self.not_started.append(task)
            return False
        task.unit = self.free.index(True)
        self.free[task.unit] = False
        return True

    def _vacate(self, task: _UnitProcess) -> None:
        if task.unit < 0:
            return
        self.free[task.unit] = True
        while self.not_started:
            waiting = self.not_started.popleft()
            if not waiting.ended:
                self.ready.append(waiting)
                return

    # --- sub-processes ---

    def _fork(self, task: _UnitProcess, step: Fork) -> None:
        if any(old is not None for old in step.heirs_of):
            raise ParameterError("a run over processes has no sub-processes with the cache of an ended one, as beam search needs")
        found = []
        for body, unit in zip(step.bodies, step.units, strict=True):
            if unit is not None and not 0 < unit < self.pool.units:
                bound = f"at least {unit + 1}, as the algorithm starts a process on unit {unit}"
                raise ParameterError(f"units must be {bound}, got {self.pool.units}; start more processes")
            found.append(_UnitProcess(body, task, unit))
            self._number(found[-1])
        task.answer = tuple(found)
        task.started.extend(found)
        self.forked.extend(found)
        self.work.forks += len(found)

    def _start_forked(self) -> None:
        """Start the forked sub-processes; they can follow a pass that their parent has posted since the fork."""
        forked, self.forked = self.forked, []
        if not forked:
            return
        start = time.perf_counter()
        parent: Any = forked[0].parent
        for sub in forked:
            if sub.ended:
                continue
            parent = sub.parent
            if sub.single is not None:
                step = sub.single
                self._refuse(step, single=True)
                parent.expected_rows.require(step)
                if sub.unit < 0 and not self._settle(sub):
                    raise CacheError("a single pass without a requested unit found no free unit")
                self._begin(sub, step)
            else:
                sub.expected_rows = parent.expected_rows.copy()
                sub.tags = parent.tags.copy()
                self._advance(sub)
        self._note(parent.unit, start, "dispatch", parent)

    def _refuse(self, step: Forward, *, single: bool = False) -> None:
        """Refuse passes that this interpreter does not support."""
        if step.role != ROLE:
            raise ParameterError(f"a run over processes supports only the target, and the algorithm uses the {step.role} model")
        # Only a single-pass sub-process may verify several hypotheses: no pass continues from all of them.
        layers = step.layers
        tree = bool(step.tree) and not (single and layers.first == 0 and not step.heads and {*step.tree} == {-1})
        other = step.batch is not None or layers.gaps or layers.kv_only or step.compared or step.context_budget is not None
        if tree or other or step.unit is not None:
            raise ParameterError("a run over processes supports only plain passes of one sequence; the algorithm uses others")
        if layers.last > self.pool.decoder.layers:
            bound = f"{self.pool.decoder.layers}, as {self.pool.decoder.name} has"
            raise ParameterError(f"layers of the {ROLE} must be {bound}, got at least {layers.last}")
        if step.at + len(step.tokens) > self.pool.capacity:
            bound = f"prompt and tokens must fit the capacity={self.pool.capacity}"
            raise ParameterError(
                f"{bound}, got at least {step.at + len(step.tokens)} positions; start the processes with a larger one"
            )

    # --- passes ---

    def _forward(self, task: _UnitProcess, step: Forward) -> bool:
        """Post a pass of a process with a cache; return whether it is done already, having no layers."""
        task.expected_rows.write(step)
        if step.layers.first == step.layers.last:
            self._start_forked()
            self._begin(task, step)
            return True
        self._begin(task, step)
        self._start_forked()
        return False

    def _begin(self, task: _UnitProcess, step: Forward) -> None:
        """Post a pass to the task's unit."""
        self.work.account.add(step)
        task.last = step
        first, last = step.layers.first, step.layers.last
        if first == last:
            states = step.state.states[-len(step.tokens) :] if first else None
            self._passed(task, _UnitOutput(step, self.pool.decoder, states, task.unit, task.serial))
            return
        self.pool.serial += 1
        task.serial = self.pool.serial
        own: Any = task if task.tags is not None else task.parent
        tags = own.tags
        if task.tags is not None:
            self._protect(task.unit, step)
        if task.unit == 0:
            self.local = task, step, self._command(task, step, tags)
            tags[first:last, step.at : step.end] = task.serial
            return
        post = self.pool.posts[task.unit]
        if any(not flight.stopped for flight in post.flights):
            raise CacheError(f"unit {task.unit} is to make a pass while it makes another one")
        command = self._command(task, step, tags)
        if task.tags is not None:
            tags[first:last, step.at : step.end] = task.serial
        posted = time.perf_counter()
        post.flights.append(Flight(task, step, command, self.pool.post(task.unit, command), posted))

    def _protect(self, unit: int, step: Forward) -> None:
        """Refuse to overwrite rows that another unit has yet to copy from this one."""
        first, last = step.layers.first, step.layers.last
        for post in self.pool.posts.values():
            for flight in post.flights:
                for piece in () if flight.stopped else flight.command.pieces:
                    if piece.source == unit and piece.stop > step.at and piece.low < last and first < piece.high:
                        raise CacheError(f"{step.role}: a pass at position {step.at} replaces rows that a sub-process is copying")

    def _command(self, task: _UnitProcess, step: Forward, tags: NDArray[np.int64]) -> Command:
        """Return a unit's command with the rows that it lacks, and record the rows that it will have afterwards."""
        pool, unit, serial = self.pool, task.unit, task.serial
        tokens, at, state = step.tokens, step.at, step.state
        first, last, end = step.layers.first, step.layers.last, step.at + len(step.tokens)
        if self.answers is not None:
            tokens = self.to_vocabulary(ROLE, tokens)
        want, have = tags[first:last, :at], pool.tags[unit, first:last]
        wanted = want.tobytes()
        pieces: tuple[MissingRows, ...] = ()
        if wanted != have[:, :at].tobytes():
            low = int((want != have[:, :at]).any(axis=0).argmax())
            pieces = self._pieces(task, unit, (first, last), (low, at), want[:, low:])
            have[:, low:at] = want[:, low:]
            pool.since[unit, first:last, low:at] = serial
        have[:, at:end] = serial
        pool.since[unit, first:last, at:end] = serial
        resumed: Any = None
        if first:
            if state.unit != unit:
                raise CacheError(f"{step.role}: unit {unit} cannot continue the pass of unit {state.unit}")
            resumed = state.states if unit == 0 else state.serial
        # Only processes with a cache fork others, which may follow their passes; unit 0 checks whether any does.
        more = resumed, pieces, tags_checksum(wanted), task.single is None, step.tree
        return Command(serial, tokens, at, first, last, step.heads, *more)

    def _pieces(
        self, task: _UnitProcess, unit: int, layers: tuple[int, int], span: tuple[int, int], want: NDArray[np.int64]
    ) -> tuple[MissingRows, ...]:
        """Return where the missing rows of a unit are: most often all on the parent's unit."""
        pool = self.pool
        (first, last), (low, at) = layers, span
        starter = task.parent.unit if isinstance(task.parent, _UnitProcess) else 0
        order = [starter, *[each for each in range(pool.units) if each not in (starter, unit)]]
        for source in order:
            if source >= 0 and source != unit and (pool.tags[source, first:last, low:at] == want).all():
                return (self._piece(source, first, last, low, at),)
        found = []
        for layer in range(first, last):
            for position in range(low, at):
                tag = want[layer - first, position - low]
                if pool.tags[unit, layer, position] == tag:
                    continue
                source = next((each for each in order if each != unit and pool.tags[each, layer, position] == tag), -1)
                if source < 0:
                    raise CacheError(f"rows of layer {layer} at position {position}, missing on unit {unit}, are on no unit")
                found.append(self._piece(source, layer, layer + 1, position, position + 1))
        return tuple(found)

    def _piece(self, source: int, low: int, high: int, start: int, stop: int) -> MissingRows:
        pool = self.pool
        since = pool.since[source, low:high, start:stop].max(axis=1)
        later = (since > pool.memory.stamps[source, low:high]).any()
        return MissingRows(source, low, high, start, stop, tuple(since.tolist()) if later else ())

    def _make(self) -> None:
        """Make the main process's own pass, and drive the other processes between its layers."""
        assert self.local is not None
        task, step, command = self.running_here = self.local
        self.local = None
        flights = [flight for post in self.pool.posts.values() for flight in post.flights]
        several = any(flight.task.single is None for flight in flights)
        followed = several or any(piece.since for flight in flights for piece in flight.command.pieces)
        start = time.perf_counter()

        def stopped() -> bool:
            return task.ended

        def meanwhile() -> None:
            self._meanwhile(start)

        try:
            if several or command.pieces:
                states = self.pool.unit.make(command, stopped, meanwhile)
                self.pool.unit.finish(stopped, meanwhile)
            else:
                states = self.pool.unit.make(command._replace(announces_layers=followed))
                self.pool.unit.finish()
        except gpu_ordering.PassStopped:
            self.pool.unit.finish()
            self._note(0, start, "forward", task, step, "cancelled")
            return
        finally:
            self.running_here = None
        self._note(0, start, "forward", task, step)
        self._passed(task, _UnitOutput(step, self.pool.decoder, states, 0, command.serial))

    def _meanwhile(self, start: float) -> None:
        """Between layers: collect outputs of workers, and advance processes that can continue."""
        self._collect()
        while self.ready and not self._over():
            self._advance(self.ready.popleft())
        if time.perf_counter() - start > self.pool.patience:
            self.pool.check_workers(self.pool.posts.values())
            raise ProcessError(f"rows did not arrive within {self.pool.patience:g} s; the run is over")

    def _collect(self) -> None:
        """Collect the passes that workers have ended."""
        pool = self.pool
        for number, post in pool.posts.items():
            done = pool.board.words[number][DONE]
            while post.flights and post.count - len(post.flights) < done:
                self._landed(number, post.flights.popleft())

    def _landed(self, number: int, flight: Flight) -> None:
        pool, task, step, place = self.pool, flight.task, flight.step, flight.place
        board = pool.board
        made = board.slots[number][place][STATUS] == MADE
        if self.recording:
            _, ready, ended, _ = board.times[number][place]
            fate = "cancelled" if task.ended or flight.stopped else "kept"
            self._row(-1, flight.posted, ready, "link", task, None, fate)
            self._row(number, ready, ended, "forward", task, step, fate)
        if task.ended or flight.stopped:
            return
        if not made:
            raise ProcessError(f"the process of unit {number} gave up a pass that was not stopped; the run is over")
        memory = pool.memory
        output = _UnitOutput(step, pool.decoder, memory.states[number, : len(step.tokens)], number, flight.command.serial)
        if step.heads:
            output._logits = memory.logits[number : number + 1].clone()
        self._passed(task, output)

    def _passed(self, task: _UnitProcess, output: _UnitOutput) -> None:
        task.answer = output
        if task.single is not None:
            task.value = output
            self.free[task.unit] = True
            self._end(task)
        elif output.step.layers.first < output.step.layers.last:
            self.ready.append(task)

    def _promote(self, task: _UnitProcess, step: Adopt) -> None:
        """Promote a sub-process: adopt its rows of layers [0, layers) at one position, and its state."""
        start = time.perf_counter()
        pool, (sub, at, layers, hypothesis) = self.pool, step
        if task.unit != 0 or task.tags is None:
            raise CacheError("only the main process can adopt the pass of a sub-process")
        require_ended(sub)
        task.expected_rows.adopt(sub.last, at, layers, hypothesis)
        unit, memory, place = sub.unit, pool.memory, at + (hypothesis or 0)
        if layers:
            for tags in (pool.tags, memory.tags):
                if (tags[unit, :layers, place] != sub.serial).any():
                    raise CacheError(f"rows at position {at} of unit {unit} are no longer those of the adopted process")
            memory.copy(0, unit, slice(0, layers), slice(at, at + 1), slice(place, place + 1))
            for tags in (pool.tags[0], memory.tags[0], task.tags):
                tags[:layers, at] = sub.serial
            pool.since[0, :layers, at] = 0
        made = sub.value
        if hypothesis is not None:
            # The pass made one row per hypothesis; which of them the unit keeps for this position is unknown.
            pool.tags[unit, :layers, at : at + len(sub.last.tokens)] = UNKNOWN_ROWS
            made = made.alone(hypothesis)
        states = None if made.states is None else made.states.clone()
        pool.unit.finish()  # the unit that made them may overwrite them next
        task.answer = _UnitOutput(made.step, pool.decoder, states, 0, made.serial)
        task.answer._logits = made._logits
        sub.used = True
        self.work.account.adoptions += 1
        self.work.account.adopted_rows += layers
        self._note(-1, start, "promotion", sub)

    # --- records ---

    def _note(
        self, unit: int, start: float, what: str, task: _UnitProcess | None, step: Forward | None = None, fate: str = "kept"
    ) -> None:
        if self.recording:
            self._row(unit, start, time.perf_counter(), what, task, step, fate)

    def _row(
        self,
        unit: int,
        start: float,
        end: float,
        what: str,
        task: _UnitProcess | None,
        step: Forward | None = None,
        fate: str = "kept",
    ) -> None:
        number = 0 if task is None else task.number
        if step is None:
            row = Span(unit, start, end, what, number, -1, 0, 0, fate)
            self.rows.append((row, None))
        else:
            depth = step.end - step.at if step.tree else 0
            more = step.layers.first, step.layers.last, fate, step.role, len(step.tokens), depth
            row = Span(unit, start, end, what, number, step.end - 1, *more)
            self.rows.append((row, task))
