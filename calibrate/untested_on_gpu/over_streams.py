"""The interpreter over streams of one GPU: Predictive Pipelined Decoding with concurrent passes on one device.

The main process's passes run on the current stream, those of the sub-process on unit i on the i-th other stream. One thread
launches all passes without waiting; events order them on the device.

    lanes = Lanes(decoder, units=2)
    run = Streams(lanes)
    work = run.run(ppd.decode(ppd.Parameters(12, 6, 1), prompt, 64), 64)

Units of one device share its compute units and its memory; only a measurement can tell how much they slow each other down. Passes
overlap only if they take longer than their launch, because one thread launches them in turn. Nothing waits for a stopped pass, but
its launched part runs to the end and occupies the device.

Two rules ensure correct results. Data: work on a stream runs after the work that made its inputs. Memory: memory that was allocated
on a stream is reused by later work on that stream once Python releases it; so work on another stream that may still read it is
either waited for, or keeps it allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import PassOutput, ProcessState, RandomDraws, Real, RunTimes, Sampling
from calibrate.untested_on_gpu.cuda_graphs import mode_of
from model.base import checks
from model.base.checks import ParameterError
from model.interpret.interpreter import CountedWork, Task
from model.interpret.simulated_answers import Answers
from model.logs.recorded_decoding import AnsweredRead
from model.logs.spans import Span
from model.steps import CacheError, Commit, Fork, Forward, Join, Read, Steps

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

__all__ = ["Lanes", "Streams"]
ROLE = "target"
MOST = 32
"""Largest number of streams that torch makes on a device; beyond, it returns the same ones again."""


class Lanes:
    """Streams for the units of a decoder's GPU, made once and kept: memory of one stream can be reused only by that stream.

    Parameters
    ----------
    decoder
        The model of all units, which share its weights.
    units
        Number of streams. The current stream is the first.
    cuda
        Module that makes streams and events: `torch.cuda`, or a stand-in.
    """

    def __init__(self, decoder: Decoder, units: int, cuda: Any = None) -> None:
        checks.whole("units", units, 1, MOST + 1)
        import torch

        if mode_of(decoder) != "eager":  # a graph runs where its replay is launched, on buffers that all streams would share
            raise ParameterError(f"mode must be eager for runs over streams, got {mode_of(decoder)}")
        if cuda is None:
            if decoder.device.type != "cuda":
                what = f"device must be cuda for a run over streams, got {checks.shown(str(decoder.device))}"
                raise ParameterError(f"{what}; take --device cuda, or processes on cpu")
            cuda = torch.cuda
        self.decoder, self.units, self.cuda = decoder, units, cuda
        self.others: list[Any] = [cuda.Stream(device=decoder.device) for _ in range(units - 1)]
        # To copy a token from the host would wait for all work of the stream.
        decoder.numbers = torch.arange(decoder.vocabulary, device=decoder.device)


class Mark(NamedTuple):
    """Position in a stream's work: all earlier launches are done when the event is."""

    lane: int
    serial: int
    event: Any


class _HeldTensors(NamedTuple):
    """Tensors of other streams that work before a mark may read."""

    until: Mark
    tensors: Sequence[Any]


class _Lane:
    """A stream in one run, the marks that it waited for, and the tensors that it keeps."""

    def __init__(self, number: int, stream: Any, cuda: Any, timed: bool) -> None:
        self.number, self.stream, self.cuda, self.timed = number, stream, cuda, timed
        self.serial = 0
        self.waited_marks: dict[int, int] = {}
        """Last mark of each other stream that this one has waited for."""
        self.last_positions: Any = None
        """Positions of its last pass and their encoding, made on this stream and for it alone."""
        self.kept: list[_HeldTensors] = []
        self.owner: _StreamProcess | None = None

    def current(self) -> AbstractContextManager[Any]:
        """Launch on this stream within the block; the main process's stream is current already."""
        found: AbstractContextManager[Any] = self.cuda.stream(self.stream) if self.number else contextlib.nullcontext()
        return found

    def mark(self) -> Mark:
        """Record and return a mark of the work launched so far."""
        event = self.cuda.Event(enable_timing=self.timed)
        event.record(self.stream)
        self.serial += 1
        return Mark(self.number, self.serial, event)

    def is_after(self, mark: Mark) -> bool:
        """Whether later launches run after a mark."""
        return mark.lane == self.number or self.waited_marks.get(mark.lane, 0) >= mark.serial

    def wait(self, mark: Mark) -> None:
        """Make later launches run after a mark."""
        if not self.is_after(mark):
            self.stream.wait_event(mark.event)
            self.waited_marks[mark.lane] = mark.serial

    def keep(self, until: Mark, tensors: Sequence[Any]) -> None:
        """Keep tensors that work before a mark may read until it is done; release those of finished work."""
        self.kept = [each for each in self.kept if not each.until.event.query()]
        self.kept.append(_HeldTensors(until, tensors))


Marks = list[dict[int, Mark]]
"""Marks by layer after which all its rows exist: one for each stream that made some."""


@dataclass(eq=False)
class _StreamProcess:
    """A process of the algorithm."""

    number: int
    lane: _Lane | None = None
    """Its stream, once it has started."""
    unit: int | None = None
    forked_at: Mark | None = None
    """Mark of its parent's stream at the fork."""
    layers_followed: int = 0
    """Layers below which forked sub-processes may need rows of the next pass."""
    started: list[Task] = field(default_factory=list)
    used: bool = False
    """Whether any of its results was used."""


class _StreamState(ProcessState):
    """Cache of a process, and the work that made it."""

    def __init__(self, decoders: Mapping[str, Decoder], process: _StreamProcess) -> None:
        super().__init__(decoders)
        self.process = process
        self.marks: Marks = [{} for _ in range(decoders[ROLE].layers)]
        self.last_mark: Mark | None = None
        """Mark after the last pass."""
        self.borrowed_layers: set[int] = set()
        """Layers whose rows are in the parent's buffers; before a write they move to buffers of the own stream."""

    @property
    def lane(self) -> _Lane:
        """Stream of the process."""
        assert self.process.lane is not None
        return self.process.lane

    def copy(self) -> _StreamState:
        """Return the cache with which a sub-process starts; its process is set when it starts."""
        other = _StreamState.__new__(_StreamState)
        vars(other).update(vars(super().copy()))
        other.process, other.last_mark = self.process, None
        other.marks = [each.copy() for each in self.marks]
        other.borrowed_layers = {*range(len(self.marks))}
        return other


class _StreamOutput(PassOutput):
    """Output of a pass, with its stream and the mark after it."""

    __slots__ = ("lane", "mark")

    def __init__(self, output: PassOutput, lane: _Lane, mark: Mark) -> None:
        super().__init__(output.step, output.decoder, output.states, output.before)
        self.lane, self.mark = lane, mark

    def alone(self, hypothesis: int) -> _StreamOutput:
        """See `PassOutput`."""
        return _StreamOutput(super().alone(hypothesis), self.lane, self.mark)


class _MarkedSpan(NamedTuple):
    """A span between two marks, with its process."""

    unit: int
    what: str
    begin: Mark
    end: Mark
    process: _StreamProcess
    step: Forward | None


class Streams(Real):
    """Interprets an algorithm with each sub-process on a separate stream.

    Parameters
    ----------
    lanes
        The streams. Each live process has one; a sub-process without a requested unit takes the first free one.
    sampling, random_draws, log, answers, times
        See `Real`; passes are only launched, and their times are those of the launch.
    record
        Whether to record `spans`: events on the device's clock. Timed events take time.

    After a run, `seconds` is its length to the last token, without waiting for stopped passes. Spans begin at `run_start`, which is
    0.
    """

    def __init__(
        self, lanes: Lanes, *, sampling: Sampling | None = None, random_draws: RandomDraws | None = None,
        log: list[AnsweredRead] | None = None,
        answers: Answers | None = None, times: RunTimes | None = None, record: bool = False,
    ) -> None:  # fmt: skip
        super().__init__({ROLE: lanes.decoder}, sampling=sampling, random_draws=random_draws, log=log, answers=answers, times=times)
        cuda = lanes.cuda
        self.recording = record
        streams = [cuda.current_stream(lanes.decoder.device), *lanes.others]
        self.lanes = [_Lane(number, stream, cuda, record) for number, stream in enumerate(streams)]
        self.main = _StreamProcess(0, self.lanes[0], used=True)
        self.lanes[0].owner = self.main
        self.processes = 1
        self.not_started: dict[Task, _StreamProcess] = {}
        """Forked sub-processes that have not started yet."""
        self.rows: list[_MarkedSpan] = []
        self.origin: Mark | None = None
        self.run_start = self.seconds = 0.0

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """See `Interpreter`."""
        import time

        main = self.lanes[0]
        self.origin = main.mark()
        begun = time.perf_counter()
        try:
            work = super().run(self._tapped(steps, self.main), tokens)
            self.seconds = time.perf_counter() - begun  # the last token was read, so all its work is done
        finally:
            # Later work on the current stream runs after the stopped passes, which still read its memory.
            for lane in self.lanes[1:]:
                main.wait(lane.mark())
            for lane in self.lanes:
                lane.kept.clear()
        return work

    # --- steps ---

    def _tapped(self, steps: Steps, process: _StreamProcess) -> Steps:
        """Run a process, and order its stream's work at its steps."""
        answer: Any = None
        try:
            while True:
                try:
                    step: Any = steps.send(answer)
                except StopIteration as end:
                    return end.value
                match step:
                    case Fork():
                        answer = yield from self._forked(step, process)
                    case Join():
                        answer = yield step
                        self._joined(step.tasks, process)
                    case Commit():
                        process.used = True
                        answer = yield step
                    case _:
                        answer = yield step
        finally:
            steps.close()

    def _forked(self, step: Fork, process: _StreamProcess) -> Steps:
        """Record the parent's mark: sub-processes run after its work so far, and after no more than they read."""
        if any(old is not None for old in step.heirs_of):
            raise ParameterError("a run over streams has no sub-processes with the cache of an ended one, as beam search needs")
        for unit in step.units:
            if unit is not None and not 0 < unit < len(self.lanes):
                raise self._too_few(f"at least {unit + 1}, as the algorithm starts a process on unit {unit}")
        assert process.lane is not None
        since = process.lane.mark()
        subs = [_StreamProcess(self.processes + place, None, unit, since) for place, unit in enumerate(step.units)]
        self.processes += len(subs)
        bodies = [
            body if isinstance(body, Forward) else self._tapped(body, sub) for body, sub in zip(step.bodies, subs, strict=True)
        ]
        process.layers_followed = max((body.layers.last for body in bodies if isinstance(body, Forward)), default=0)
        for old in process.started:
            if old.ended:
                old.cache = old.value = old.answer = None  # frees its copy of the rows; the task itself is kept to the end
        tasks = yield step._replace(bodies=tuple(bodies))
        process.started = [task for task in process.started if not task.ended] + [*tasks]
        self.not_started.update(zip(tasks, subs, strict=True))
        return tasks

    def _too_few(self, bound: str) -> ParameterError:
        return ParameterError(f"units must be {bound}, got {len(self.lanes)} streams; make more of them")

    def _joined(self, tasks: Sequence[Any], process: _StreamProcess) -> None:
        """Make a process's stream wait for the streams of the joined tasks."""
        assert process.lane is not None
        with self._span(process.lane, "wait", process):
            for task in tasks:
                if task.cache is not None and task.cache.last_mark is not None:
                    process.lane.wait(task.cache.last_mark)

    def _bear_all(self) -> None:
        births, self.unborn = self.unborn, []
        for task in births:
            process = self.not_started.pop(task)
            if task.ended:
                continue
            parent: Any = task.parent
            lane = self._lane_for(process)
            process.lane, lane.owner = lane, process
            parent.cache.process.layers_followed = 0
            task.cache = parent.cache.copy()
            task.cache.process = process
            assert process.forked_at is not None
            # After all that its parent had launched at the fork: rows of earlier passes, and the parent's reads of outputs of this
            # stream, whose memory is about to be reused.
            lane.wait(process.forked_at)
            self._drive(task)

    def _lane_for(self, process: _StreamProcess) -> _Lane:
        """Return the stream of its unit, or the first free one."""
        if process.unit is not None:
            return self.lanes[process.unit]
        found = next((lane for lane in self.lanes if lane.owner is None), None)
        if found is None:
            raise self._too_few("more, as the algorithm has more processes at once")
        return found

    def _return(self, task: Task, value: Any) -> None:
        self._vacate(task)
        super()._return(task, value)

    def _cancel(self, task: Task) -> None:
        self._vacate(task)
        super()._cancel(task)

    def _vacate(self, task: Task) -> None:
        """Free a task's stream. Its remaining work runs before that of the next task, as streams are in order."""
        if task.cache is not None and task.cache.lane.owner is task.cache.process:
            task.cache.lane.owner = None

    # --- passes ---

    def new_cache(self) -> _StreamState:
        """Return an empty cache."""
        return _StreamState(self.decoders, self.main)

    def _make_pass(self, cache: Any, step: Forward) -> PassOutput:
        self._refuse(step)
        lane, process = cache.lane, cache.process
        decoder = self.decoders[ROLE]
        read = self._borrowed(lane, step)
        unmade = self._unmade(cache, lane, step)
        first, last = step.layers.first, step.layers.last
        rows = cache.rows[ROLE].layers
        for layer in cache.borrowed_layers & {*range(first, last)}:
            read += [each for each in (rows[layer].keys, rows[layer].values) if each is not None]
            cache.borrowed_layers.discard(layer)
        followed = process.layers_followed > first
        made: dict[int, Mark] = {}

        def between(layer: int) -> None:
            if followed and layer > first:
                made[layer - 1] = lane.mark()  # a pass that follows this one waits only for the layers that it reads
            for mark in unmade.get(layer, ()):
                lane.wait(mark)

        with lane.current(), self._span(lane, "forward", process, step if first < last else None):
            self.between = between if followed or unmade else None
            decoder._last_positions = lane.last_positions  # those of another stream would be read before they exist
            try:
                output = super()._make_pass(cache, step)
            finally:
                lane.last_positions, decoder._last_positions, self.between = decoder._last_positions, None, None
        tip = cache.last_mark = lane.mark()
        for layer in range(first, last):
            cache.marks[layer][lane.number] = made.get(layer, tip)
        if read:
            lane.keep(tip, read)
        return _StreamOutput(output, lane, tip)

    def _refuse(self, step: Forward) -> None:
        """Refuse passes that this interpreter does not support."""
        if step.role != ROLE:
            raise ParameterError(f"a run over streams supports only the target, and the algorithm uses the {step.role} model")
        # Only a single-pass sub-process may verify several hypotheses: no pass continues from all of them.
        layers = step.layers
        tree = bool(step.tree) and not (layers.first == 0 and not step.heads and {*step.tree} == {-1})
        other = step.batch is not None or layers.gaps or layers.kv_only or step.compared or step.context_budget is not None
        if tree or other or step.unit is not None:
            raise ParameterError("a run over streams supports only plain passes of one sequence; the algorithm uses others")

    def _borrowed(self, lane: _Lane, step: Forward) -> list[Any]:
        """Return states of other streams that a pass resumes. The join or fork that passed them on was waited for."""
        outputs = step.state if isinstance(step.state, tuple) else (step.state,)
        return [each.states for each in outputs if step.layers.first and each.lane is not lane and each.states is not None]

    def _unmade(self, cache: _StreamState, lane: _Lane, step: Forward) -> dict[int, list[Mark]]:
        """Return the marks for which each layer has to wait, because other streams make its rows."""
        found = {}
        first, last = step.layers.first, step.layers.last
        for layer, made in enumerate(cache.marks[first:last], first):
            marks = [mark for mark in made.values() if not lane.is_after(mark)]
            if marks:
                found[layer] = marks
        return found

    def adopt(self, cache: Any, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """Adopt rows and states after the work that made them; the other stream then continues after the copy."""
        lane, theirs, made = cache.lane, task.cache, task.value
        if not isinstance(made, _StreamOutput):
            raise CacheError("only a single pass can be adopted, before its parent forks others")
        with self._span(lane, "wait", cache.process):
            lane.wait(made.mark)
        with lane.current(), self._span(lane, "promotion", theirs.process):
            super().adopt(cache, task, at, layers, hypothesis)
            made.states = None if made.states is None else made.states.clone()
        mark = lane.mark()
        # The copy read memory of the sub-process's stream, which reuses it once it is released.
        made.lane.wait(mark)
        made.lane, made.mark = lane, mark  # later forks run after it: layers need no marks of it
        theirs.process.used = True

    def read(self, step: Read) -> Any:
        """Read an output on the stream that made it; the answer is ready when the stream has reached it."""
        lane: _Lane = step.output.lane
        if step.against is not None:
            lane.wait(step.against.mark)  # its head is computed here too
        with lane.current(), self._span(lane, "head", lane.owner or self.main):
            return super().read(step)

    # --- records ---

    @contextlib.contextmanager
    def _span(self, lane: _Lane, what: str, process: _StreamProcess, step: Forward | None = None) -> Iterator[None]:
        if not self.recording or (what == "forward" and step is None):
            yield
            return
        begin = lane.mark()
        yield
        unit = -1 if what == "promotion" else lane.number
        self.rows.append(_MarkedSpan(unit, what, begin, lane.mark(), process, step))

    @property
    def spans(self) -> list[Span]:
        """Events since the beginning of the run; call it once the device is idle."""
        found = []
        for unit, what, begin, end, process, step in self.rows:
            start, stop = (self._at(mark) for mark in (begin, end))
            if step is None:
                found.append(Span(unit, start, stop, what, process.number, -1, 0, 0, "kept"))
            else:
                fate = "kept" if process.used else "discarded"
                depth = step.end - step.at if step.tree else 0
                more = process.number, step.end - 1, step.layers.first, step.layers.last, fate, step.role, len(step.tokens), depth
                found.append(Span(unit, start, stop, what, *more))
        return found

    def _at(self, mark: Mark) -> float:
        assert self.origin is not None
        return float(self.origin.event.elapsed_time(mark.event)) / 1e3
