"""The interpreter over processes with one model each: passes of different models run concurrently.

The main process drives all generators of steps, in the order of a run in one process (`model.interpret.interpreter`), so that a
decoding is bitwise the same. Every model is in a worker process with one thread and a separate core. The main process requests a
pass without waiting; only a read of its output waits. Sub-processes that are joined later therefore run concurrently, as PEARL
drafts while it verifies:

    with started({"target": Replica("family:target"), "draft": Replica("family:draft")}) as models:
        run = OverModels(models, record=True)
        work = run.run(pearl.decode(pearl.Parameters(12, 3, draft_layers=2), prompt, 64), 64)

A stop takes effect as in one process: when the same number of layers has run elsewhere, not by the clock. So drafts of PEARL that a
rejection stops (`draft_stop = "rejection"`) make the same passes here as there, and the tokens are the same; times are those of a
stop by the clock only if a layer takes the same time in both models.

A worker keeps the cache rows of one chain of processes: each pass must continue from the rows of the previous one. Rows are never
copied between processes, and several sub-processes of one model, as in beam search, are refused. The sequences of a batch continue
the rows of the chain at the first batched pass of a sub-process, as SSD drafts after several outcomes of a verification; a worker
keeps those of the sub-process that began last.
`calibrate.workers.over_processes` runs one model on several units, and copies rows between them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibrate.interpreters.in_one_process import PassOutput, ProcessState, RandomDraws, Real, RunTimes, Sampling
from calibrate.loading.replicas import Replica
from calibrate.workers.worker_pool import PATIENCE, STARTING, ProcessError, context_of_workers
from model.base import checks
from model.base.checks import ParameterError
from model.interpret.interpreter import Cache, CountedWork, Task
from model.interpret.simulated_answers import Answers
from model.logs.recorded_decoding import AnsweredRead
from model.logs.spans import Span
from model.steps import Batch, CacheError, Forward, LayerSpan, Steps

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

    Tensor = torch.Tensor

__all__ = ["ModelProcesses", "OverModels", "ProcessError", "started"]


class DistantModel:
    """State that the main process keeps of a worker process and its model."""

    def __init__(self, role: str, unit: int, process: Any, end: Connection, patience: float) -> None:
        self.role, self.unit, self.process, self.end, self.patience = role, unit, process, end, patience
        self.name, self.layers, self.vocabulary = "", 0, 0
        self.row_passes: list[int] = []
        """Number of the pass that made the row of each position."""
        self.batches = 0
        """Number of the pass that began the batch whose rows the worker keeps; 0: none."""
        self.pending: deque[_DistantOutput | None] = deque()
        """Outputs that wait for an answer, in the order of their requests; None for an answer that is not needed."""

    def ask(self, *what: Any) -> None:
        """Send a request to the worker."""
        try:
            self.end.send(what)
        except OSError:
            raise self._gone() from None

    def answer(self, patience: float) -> Any:
        """Return the worker's next answer."""
        try:
            if not self.end.poll(patience):
                raise ProcessError(f"the process of the {self.role} model did not answer within {patience:g} s; the run is over")
            what, answer = self.end.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if what == "failed":
            raise ProcessError(f"the process of the {self.role} model failed: {answer}")
        return answer

    def take(self) -> _DistantOutput | None:
        """Receive the answer to the oldest request; return its output."""
        output = self.pending.popleft()
        answer = self.answer(self.patience)
        if output is not None:
            output.receive(*answer)
        return output

    def _gone(self) -> ProcessError:
        return ProcessError(f"the process of the {self.role} model is gone, perhaps out of memory; the run is over")


class _DistantOutput(PassOutput):
    """Output of a pass in another process: its logits, once they have arrived."""

    __slots__ = ("model", "span")

    def __init__(self, step: Forward, model: DistantModel) -> None:
        super().__init__(step, model, None, None)  # type: ignore[arg-type]
        self.model = model
        self.span: tuple[float, float] | None = None

    def receive(self, logits: Any, begun: float, ended: float) -> None:
        """Store the worker's answer."""
        import torch

        self.span = begun, ended
        if logits is not None:
            self._logits = torch.from_numpy(logits)

    @property
    def logits(self) -> Tensor:
        """See `PassOutput`; waits for the pass."""
        if not self.step.heads:
            raise CacheError(f"{self.step.role}: a pass at position {self.step.at} is read, but projects no position")
        while self.span is None:
            self.model.take()
        assert self._logits is not None
        return self._logits


class _Rows:
    """Rows that the models hold according to a process: the number of positions, and the pass that made each."""

    def __init__(self) -> None:
        self.expected_rows = Cache()
        self.made: dict[str, list[int]] = {}
        self.batches: dict[str, int] = {}
        """Number of the first batched pass of each model."""

    def copy(self) -> _Rows:
        """Return the rows with which a sub-process starts."""
        other = _Rows()
        other.expected_rows, other.made = self.expected_rows.copy(), {role: held[:] for role, held in self.made.items()}
        other.batches = dict(self.batches)
        return other


class ModelProcesses:
    """Worker processes with one model each. See `started`."""

    def __init__(self, replicas: Mapping[str, Replica], *, pin: bool, patience: float) -> None:
        self.models: dict[str, DistantModel] = {}
        self.broken = self.closed = False
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
        context = context_of_workers()
        try:
            for unit, (role, replica) in enumerate(replicas.items()):
                ours, theirs = context.Pipe()
                core = cores[unit % len(cores)] if cores else None
                process = context.Process(target=work, args=(theirs, replica, core), daemon=True, name=f"{role} model")
                self.models[role] = DistantModel(role, unit, process, ours, patience)
                process.start()
                theirs.close()
            for model in self.models.values():
                model.name, model.layers, model.vocabulary = model.answer(STARTING)
        except BaseException:
            self.broken = True
            self.close()
            raise

    @property
    def units(self) -> int:
        """Number of models, each on a separate unit."""
        return len(self.models)

    def renew(self) -> None:
        """Make all models begin a new sequence."""
        if self.closed or self.broken:
            why = "are closed" if self.closed else "are broken by an earlier error"
            raise ProcessError(f"the processes {why}; start them again")
        for model in self.models.values():
            model.ask("new")
            model.pending.append(None)
            while model.pending:
                model.take()
            model.row_passes, model.batches = [], 0

    def close(self) -> None:
        """End all workers: idle ones by request, others at once."""
        if self.closed:
            return
        self.closed = True
        for model in self.models.values():
            with contextlib.suppress(OSError, ProcessError):
                if not self.broken:
                    model.ask("end")
        for model in self.models.values():
            if model.process.pid is None:
                continue
            model.process.join(0 if self.broken else 2)
            if model.process.is_alive():
                model.process.kill()
            model.process.join()
            model.end.close()


@contextlib.contextmanager
def started(replicas: Mapping[str, Replica], *, pin: bool = True, patience: float = PATIENCE) -> Iterator[ModelProcesses]:
    """Start a worker process for each model, by role; they end with the block, however it is left.

    Parameters
    ----------
    replicas
        The models. Their device must be the CPU: these processes have never run on a GPU.
    pin
        Whether to pin each process to one core, if the system allows it.
    patience
        Longest time of a pass [s]; a worker that takes longer counts as hung.
    """
    checks.number("patience", patience, 0.001)
    for role, replica in replicas.items():
        if replica.device != "cpu":
            wanted = f"device of the {role} model must be 'cpu' over processes with a model each"
            raise ParameterError(f"{wanted}, got {replica.device!r}")
    models = ModelProcesses(replicas, pin=pin, patience=patience)
    try:
        yield models
    finally:
        models.close()


class OverModels(Real):
    """Interprets an algorithm with each model in a separate process.

    Parameters
    ----------
    models
        The processes: see `started`.
    sampling, random_draws, log, answers, times
        See `Real`; the times of passes are those of the workers.
    record
        Whether to keep `spans`: the recorded passes, in the order of their ends.

    After a run, `run_start` is its start, and `seconds` its length to the last token.
    """

    def __init__(
        self, models: ModelProcesses, *, sampling: Sampling | None = None, random_draws: RandomDraws | None = None,
        log: list[AnsweredRead] | None = None, answers: Answers | None = None, times: RunTimes | None = None, record: bool = False,
    ) -> None:  # fmt: skip
        distant: Any = models.models  # `Real` makes no pass here, and reads only the sizes of its decoders
        super().__init__(distant, sampling=sampling, random_draws=random_draws, log=log, answers=answers, times=times)
        self.models, self.recording = models, record
        self.outputs: list[_DistantOutput] = []
        self.run_start = self.seconds = 0.0
        self.serial = 0

    @property
    def spans(self) -> list[Span]:
        """Recorded passes, in the order of their ends."""
        found = []
        for output in self.outputs:
            assert output.span is not None
            step, unit = output.step, output.model.unit
            (begun, ended), more = output.span, (step.layers.first, step.layers.last, "kept", step.role, len(step.tokens))
            found.append(Span(unit, begun, ended, "forward", unit, step.end - 1, *more))
        return sorted(found, key=lambda span: span.end)

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """See `Interpreter`. An error leaves the processes broken."""
        models = self.models
        models.renew()
        self.run_start = time.perf_counter()
        try:
            work = super().run(steps, tokens)
            self.seconds = time.perf_counter() - self.run_start
            for model in models.models.values():  # the next run shall have all cores
                while model.pending:
                    model.take()
        except BaseException:
            models.broken = True
            raise
        if self.times is not None:
            for output in self.outputs:
                assert output.span is not None
                self.times.passes[output.step.role] += output.span[1] - output.span[0]
        return work

    def new_cache(self) -> Any:
        """Return an empty cache."""
        return _Rows()

    def forward(self, cache: Any, step: Forward) -> PassOutput:
        """Request a pass."""
        model = self.models.models.get(step.role)
        if model is None:
            has = ", ".join(self.models.models)
            raise ParameterError(f"models must have one of role {step.role}, which the algorithm uses, got {has}")
        self._refuse(step, model)
        rows: _Rows = cache
        rows.expected_rows.write(step)
        mine = rows.made.setdefault(step.role, [])
        begins = step.batch is not None and step.role not in rows.batches
        if step.batch is None or begins:
            needed = step.at if step.batch is None else max(step.batch.positions)
            agree = mine[:needed] == model.row_passes[:needed]
        else:
            agree = rows.batches[step.role] == model.batches
        if not agree:
            raise ParameterError(
                "a run over processes with a model each keeps the rows of one chain of processes, and two processes continue those"
                f" of the {step.role} model; run this method in one process"
            )
        self.serial += 1
        if step.batch is None:
            for held in (mine, model.row_passes):
                held[step.at :] = [self.serial] * len(step.tokens)
        elif begins:
            rows.batches[step.role] = model.batches = self.serial
        tokens = step.tokens if self.answers is None else self.to_vocabulary(step.role, step.tokens)
        output = _DistantOutput(step, model)
        model.ask("pass", tokens, step.at, step.heads, step.batch, begins)
        model.pending.append(output)
        if self.recording or self.times is not None:
            self.outputs.append(output)
        return output

    def adopt(self, cache: Any, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """Raise `ParameterError`: rows stay in their process."""
        raise ParameterError("a run over processes with a model each copies no rows between processes; run it in one process")

    def _refuse(self, step: Forward, model: DistantModel) -> None:
        """Refuse passes that workers do not support."""
        if step.layers.last != model.layers or step.layers.first:
            bound = f"{model.layers}, as {model.name} has, each pass through all of them"
            raise ParameterError(f"layers of the {step.role} must be {bound}, got [{step.layers.first}, {step.layers.last})")
        batch = step.batch
        partly = batch is not None and batch.heads != batch.widths
        if step.tree or partly or step.layers.gaps or step.layers.kv_only or step.compared:
            raise ParameterError(
                "a run over processes with a model each supports only plain passes of one sequence, or of a batch that projects all"
                " of its tokens; the algorithm uses others"
            )


def work(connection: Connection, replica: Replica, core: int | None) -> None:
    """Load a model and make passes as the parent requests, until it ends or sends "end": the main function of a worker process."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    try:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(0, {core})
        with torch.inference_mode(False):
            decoder = replica.load()
        if decoder.config.is_encoder_decoder:
            raise ParameterError(f"model {decoder.name} has an encoder, which runs over processes with a model each do not support")
        decoder.warm()
        connection.send(("up", (decoder.name, decoder.layers, decoder.vocabulary)))
        with torch.inference_mode():
            _serve(connection, decoder)
    except (EOFError, BrokenPipeError, ConnectionError):
        pass  # the parent is gone
    except BaseException as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        with contextlib.suppress(OSError):
            connection.send(("failed", message))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and torch's shutdown is slow


_MODEL = "model"
"""Role of the only model of a worker."""


def _serve(connection: Connection, decoder: Any) -> None:
    state = ProcessState({_MODEL: decoder})
    while True:
        what, *rest = connection.recv()
        if what == "end":
            return
        if what == "new":
            state = ProcessState({_MODEL: decoder})
            connection.send(("new", None))
            continue
        begun = time.perf_counter()
        logits = _made(decoder, state, *rest)
        connection.send(("made", (logits, begun, time.perf_counter())))


def _made(
    decoder: Any, state: ProcessState, tokens: Sequence[int], at: int, heads: int, batch: Batch | None, begins: bool
) -> Any:
    """Make a pass, which rolls back rows from position `at` on; return the logits of its last positions, shape (heads, vocabulary),
    or None.

    A batch that `begins` continues the rows of the process; the sequences of an earlier batch are dropped.
    """
    if begins:
        state.sequences.clear()
    rows = state.rows_of(_MODEL, () if batch is None else batch.sequences)
    states = decoder.run(tuple(tokens), at, LayerSpan(0, decoder.layers), rows, batch=batch)
    held, end = {layer.length for layer in rows.layers}, at + len(tokens) if batch is None else batch.end
    if held != {end}:
        raise CacheError(f"layers should hold {end} positions, they hold {sorted(held)}")
    if not heads:
        return None
    logits = decoder.logits(states[-heads:], decoder.layers)
    return (logits.float() if logits.element_size() < 4 else logits).numpy()  # numpy has no bfloat16
