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

A model may have several replicas, each in a process, as for distributed speculative inference: `copies` of `started`. Every unit on
which the algorithm makes passes of the model has one of them. A replica that lacks rows, because another replica has made them,
reads their tokens again at the start of its next pass (`OverModels.reread`): the rows are the same up to rounding. A pass that an
algorithm stops is not interrupted: its replica finishes it before the next one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from calibrate.interpreters.in_one_process import PassOutput, ProcessState, RandomDraws, Real, RunTimes, Sampling
from calibrate.loading.replicas import Replica
from calibrate.workers.worker_pool import PATIENCE, STARTING, ProcessError, check_processes, context_of_workers
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
        self.serves: int | None = None
        """Unit of the algorithm whose passes it makes, where the model has several replicas."""
        self.row_passes: list[tuple[int, int]] = []
        """Number of the pass that made the row of each position, and its token."""
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
    """Rows that the models hold according to a process: the number of positions, and the pass and token that made each."""

    def __init__(self) -> None:
        self.expected_rows = Cache()
        self.made: dict[str, list[tuple[int, int]]] = {}
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

    def __init__(
        self, replicas: Mapping[str, Replica], *, pin: bool, patience: float, copies: Mapping[str, int] | None = None
    ) -> None:
        self.replicas: dict[str, list[DistantModel]] = {role: [] for role in replicas}
        """Processes of each model, by role."""
        self.broken = self.closed = False
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
        context = context_of_workers()
        try:
            wanted = [role for role in replicas for _ in range((copies or {}).get(role, 1))]
            for unit, role in enumerate(wanted):
                ours, theirs = context.Pipe()
                core = cores[unit % len(cores)] if cores else None
                process = context.Process(target=work, args=(theirs, replicas[role], core), daemon=True, name=f"{role} model")
                self.replicas[role].append(DistantModel(role, unit, process, ours, patience))
                process.start()
                theirs.close()
            for model in self.processes:
                model.name, model.layers, model.vocabulary = model.answer(STARTING)
        except BaseException:
            self.broken = True
            self.close()
            raise

    @property
    def models(self) -> dict[str, DistantModel]:
        """First process of each model, by role."""
        return {role: held[0] for role, held in self.replicas.items()}

    @property
    def processes(self) -> list[DistantModel]:
        """All processes, in the order of their units."""
        return [model for held in self.replicas.values() for model in held]

    @property
    def units(self) -> int:
        """Number of processes, each on a separate unit."""
        return len(self.processes)

    def replica(self, role: str, unit: int | None) -> DistantModel:
        """Process that makes the passes of a model on this unit of the algorithm; a unit keeps its process."""
        held = self.replicas[role]
        if len(held) == 1 or unit is None:
            return held[0]
        for model in held:
            if model.serves in (None, unit):
                model.serves = unit
                return model
        raise ParameterError(
            f"replicas of the {role} model must be as many as the units of its passes, got {len(held)}; start more processes"
        )

    def renew(self) -> None:
        """Make all models begin a new sequence."""
        if self.closed or self.broken:
            why = "are closed" if self.closed else "are broken by an earlier error"
            raise ProcessError(f"the processes {why}; start them again")
        for model in self.processes:
            model.ask("new")
            model.pending.append(None)
            while model.pending:
                model.take()
            model.row_passes, model.serves, model.batches = [], None, 0

    def close(self) -> None:
        """End all workers: idle ones by request, others at once."""
        if self.closed:
            return
        self.closed = True
        for model in self.processes:
            with contextlib.suppress(OSError, ProcessError):
                if not self.broken:
                    model.ask("end")
        for model in self.processes:
            if model.process.pid is None:
                continue
            model.process.join(0 if self.broken else 2)
            if model.process.is_alive():
                model.process.kill()
            model.process.join()
            model.end.close()


@contextlib.contextmanager
def started(
    replicas: Mapping[str, Replica], *, pin: bool = True, patience: float = PATIENCE, copies: Mapping[str, int] | None = None
) -> Iterator[ModelProcesses]:
    """Start a worker process for each model, by role; they end with the block, however it is left.

    Parameters
    ----------
    replicas
        The models. Their device must be the CPU: these processes have never run on a GPU.
    pin
        Whether to pin each process to one core, if the system allows it.
    patience
        Longest time of a pass [s]; a worker that takes longer counts as hung.
    copies
        Number of processes with a replica of the model, by role; default: one.
    """
    checks.number("patience", patience, 0.001)
    for role, count in (copies or {}).items():
        checks.whole(f"copies of the {role} model", count, 1, checks.MAX_UNITS)
    for role, replica in replicas.items():
        if replica.device != "cpu":
            wanted = f"device of the {role} model must be 'cpu' over processes with a model each"
            raise ParameterError(f"{wanted}, got {replica.device!r}")
    check_counts({role: (copies or {}).get(role, 1) for role in replicas})
    models = ModelProcesses(replicas, pin=pin, patience=patience, copies=copies)
    try:
        yield models
    finally:
        models.close()


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise `ParameterError` for more processes of the models, by role, than the cores of this machine can run."""
    check_processes(sum(counts.values()), " and ".join(f"{count} of the {role} model" for role, count in counts.items()))


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
        self.reread = 0
        """Tokens that replicas have read again, because another replica has made their rows."""

    @property
    def spans(self) -> list[Span]:
        """Recorded passes, in the order of their ends; units are the processes that made passes, from 0."""
        found = []
        used = sorted({output.model.unit for output in self.outputs})
        for output in self.outputs:
            assert output.span is not None
            step, unit = output.step, used.index(output.model.unit)
            (begun, ended), more = output.span, (step.layers.first, step.layers.last, "kept", step.role, len(step.tokens))
            found.append(Span(unit, begun, ended, "forward", unit, step.end - 1, *more))
        return sorted(found, key=lambda span: span.end)

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """See `Interpreter`. An error leaves the processes broken."""
        models = self.models
        models.renew()
        self.run_start = time.perf_counter()
        if self.times is not None:
            self.times.start = self.run_start  # without the renewal of the processes
        try:
            work = super().run(steps, tokens)
            self.seconds = time.perf_counter() - self.run_start
            for model in models.processes:  # the next run shall have all cores
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
        if step.role not in self.models.replicas:
            has = ", ".join(self.models.replicas)
            raise ParameterError(f"models must have one of role {step.role}, which the algorithm uses, got {has}")
        model = self.models.replica(step.role, step.unit)
        self._refuse(step, model)
        rows: _Rows = cache
        rows.expected_rows.write(step)
        first, begins, words = step.at, False, step.tokens
        if step.batch is None:
            mine = rows.made.setdefault(step.role, [])
            first = self._first_unread(step.at, model, mine)
            self.serial += 1
            mine[step.at :] = [(self.serial, token) for token in step.tokens]
            model.row_passes[first:] = mine[first:]
            self.reread += step.at - first
            words = tuple(token for _, token in mine[first:])
        else:
            begins = self._begin_batch(rows, step, step.batch, model)
        tokens = words if self.answers is None else self.to_vocabulary(step.role, words)
        output = _DistantOutput(step, model)
        model.ask("pass", tokens, first, step.heads, step.batch, begins, step.context_budget)
        model.pending.append(output)
        if self.recording or self.times is not None:
            self.outputs.append(output)
        return output

    def _first_unread(self, at: int, model: DistantModel, mine: Sequence[tuple[int, int]]) -> int:
        """Position of the first token that the process must read for a pass at `at`; before `at` if it lacks rows."""
        if mine[:at] == model.row_passes[:at]:
            return at
        if len(self.models.replicas[model.role]) == 1:
            raise _two_chains(model)
        return len([*takewhile(lambda pair: pair[0] == pair[1], zip(mine[:at], model.row_passes, strict=False))])

    def _begin_batch(self, rows: _Rows, step: Forward, batch: Batch, model: DistantModel) -> bool:
        """Return whether a batched pass begins a batch in its process; raise `ParameterError` if the worker lacks its rows."""
        begun = rows.batches.get(step.role)
        if begun is not None:
            if begun != model.batches:
                raise _two_chains(model)
            return False
        needed = max(batch.positions)
        if rows.made.get(step.role, [])[:needed] != model.row_passes[:needed]:
            raise _two_chains(model)
        self.serial += 1
        rows.batches[step.role] = model.batches = self.serial
        return True

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


def _two_chains(model: DistantModel) -> ParameterError:
    return ParameterError(
        "a run over processes with a model each keeps the rows of one chain of processes, and two processes continue those"
        f" of the {model.role} model; run this method in one process, or with a replica for each unit of its passes"
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
    decoder: Any, state: ProcessState, tokens: Sequence[int], at: int, heads: int, batch: Batch | None, begins: bool,
    context_budget: int | None,
) -> Any:  # fmt: skip
    """Make a pass, which rolls back rows from position `at` on; return the logits of its last positions, shape (heads, vocabulary),
    or None.

    A batch that `begins` continues the rows of the process; the sequences of an earlier batch are dropped.
    """
    if begins:
        state.sequences.clear()
    rows = state.rows_of(_MODEL, () if batch is None else batch.sequences)
    states = decoder.run(tuple(tokens), at, LayerSpan(0, decoder.layers), rows, batch=batch, context_budget=context_budget)
    held, end = {layer.length for layer in rows.layers}, at + len(tokens) if batch is None else batch.end
    if held != {end}:
        raise CacheError(f"layers should hold {end} positions, they hold {sorted(held)}")
    if not heads:
        return None
    logits = decoder.logits(states[-heads:], decoder.layers)
    return (logits.float() if logits.element_size() < 4 else logits).numpy()  # numpy has no bfloat16
