"""Runs on the workers of a dask cluster: one of this machine's processes, or one whose scheduler is named by its address.

Contents of files come back as bytes and are written here, so that workers need no folder in common with this process. Tasks are
futures of dask.distributed, not calls of joblib's dask backend: with futures only a few tasks for each worker are sent at a time, a
task whose workers died is told from one that failed, and tasks that are not needed any more are cancelled after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from model.base import checks
from model.base.checks import ParameterError
from sim.runs import environment
from sim.runs.atomic_files import write_content
from sim.runs.executor import DASK, Executor, Task, WorkersLostError

if TYPE_CHECKING:
    from distributed import Client, Future, LocalCluster

EXAMPLE = "tcp://10.0.0.1:8786"
PROTOCOLS = ("tcp", "tls")
CONNECT_S = 10.0
"""Seconds in which a scheduler must answer."""
TASKS_PER_THREAD = 3
"""Tasks sent at a time for each thread of the workers: the next ones are there when one ends, and memory is bounded."""
COUNT_S = 2.0
"""Seconds between counts of the workers, which may come and go."""
ALONE_S = 15.0
"""Seconds without a worker after which a warning says so."""


@dataclass
class DaskWorkers:
    """Workers of a dask cluster, as an executor; see `sim.runs.executor.Executor`."""

    client: Client
    counted: float = field(default=float("-inf"), init=False)
    threads: int = field(default=0, init=False)

    def completed(self, compute: Callable[[Task], bytes], files: Mapping[Task, Path]) -> Iterator[tuple[Task, Path]]:
        """See `Executor.completed`. Dask sends the tasks of a worker that dies to other workers, up to its `allowed-failures`."""
        todo, finished = iter(files.items()), queue.SimpleQueue["Future[bytes]"]()
        running: dict[Future[bytes], tuple[Task, Path]] = {}
        versions, heard = environment.of_results(), time.monotonic()
        while True:
            while len(running) < max(TASKS_PER_THREAD * self._threads(), 1) and (following := next(todo, None)) is not None:
                future = self.client.submit(_on_worker, versions, compute, following[0], pure=False)
                running[future] = following
                future.add_done_callback(finished.put)
            if not running:
                return
            try:
                future = finished.get(timeout=COUNT_S)
            except queue.Empty:
                heard = self._warn_if_alone(heard)
                continue
            heard = time.monotonic()
            task, path = running.pop(future)
            yield task, write_content(path, _result(future))

    def _threads(self) -> int:
        """Threads of all workers, counted now and then."""
        if time.monotonic() - self.counted > COUNT_S:
            self.threads, self.counted = sum(_ask(self.client.nthreads).values()), time.monotonic()
        return self.threads

    def _warn_if_alone(self, heard: float) -> float:
        """Warn if no worker is there for long; return the time of the last sign of one."""
        if self._threads():
            return time.monotonic()
        if time.monotonic() - heard > ALONE_S:
            warnings.warn("the dask scheduler has no worker; the run goes on when one joins (Ctrl-C ends it)", stacklevel=2)
        return heard


def _ask(call: Callable[[], Any]) -> Any:
    """Answer of the scheduler. Raises WorkersLostError."""
    try:
        return call()
    except Exception as error:  # dask raises many kinds, some of them RuntimeError
        raise WorkersLostError(f"the dask scheduler cannot be reached any more ({_first_line(error)})") from None


def _result(future: Future[bytes]) -> bytes:
    """Result of a future that is done; raises what the worker raised."""
    from asyncio import CancelledError as Cancelled

    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        deaths = error.allowed_failures + 1
        raise WorkersLostError(f"{deaths} workers died of a task (out of memory?)") from None
    except (CancelledError, Cancelled):
        raise WorkersLostError("the dask scheduler cannot be reached any more") from None
    except ImportError as error:  # of a worker that joined later
        raise ParameterError(_lacks("a worker", error)) from None


_one_task = threading.Lock()
"""Held by the task of a worker: caches of the program are those of one thread."""


def _on_worker(versions: dict[str, str], compute: Callable[[Task], bytes], task: Task) -> bytes:
    """Compute a task on a worker, which may have joined after the start of the run."""
    from distributed import get_worker

    check_versions(f"worker {get_worker().address}", environment.of_results(), versions)
    with _one_task:
        return compute(task)


def check_versions(where: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse versions that differ from those of the process that started the run.

    >>> check_versions("worker tcp://10.0.0.2:40001", {"numpy": "2.3.0"}, {"numpy": "2.4.6"})
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: worker tcp://10.0.0.2:40001 has numpy 2.3.0, but this process has 2.4.6; install the same ...
    """
    for name, own in ours.items():
        other = theirs.get(name, "none")
        if other != own:
            what = "another copy of decodesim (its files differ:" if name == "program" else name
            end = ")" if name == "program" else ""
            raise ParameterError(f"{where} has {what} {other}{end}, but this process has {own}; install the same on all machines")


def opened(jobs: int | str | None, scheduler: str | None) -> contextlib.AbstractContextManager[Executor | None]:
    """Context with the executor that a user named; None for local processes, whose number depends on the work.

    Raises
    ------
    ParameterError
        If dask.distributed is not installed, the address is malformed, no scheduler answers there, or its workers have other
        versions.
    """
    if jobs != DASK and scheduler is None:
        return contextlib.nullcontext()
    return connected(scheduler)


@contextlib.contextmanager
def connected(scheduler: str | None) -> Iterator[DaskWorkers]:
    """Connect to a scheduler, or without its address to a cluster of local processes, one for each core.

    Raises
    ------
    ParameterError
        If dask.distributed is not installed, the address is malformed, no scheduler answers there, or its workers have other
        versions.
    """
    address = None if scheduler is None else _address(scheduler)
    try:
        import distributed  # noqa: F401  the package is there
    except ImportError as error:
        option = "-j dask" if scheduler is None else "--scheduler"
        missing = f"{option} needs the package {error.name}, which is not installed"
        raise ParameterError(f"{missing}; install it: pip install 'decodesim[dask]'") from None
    with _quiet(), contextlib.ExitStack() as stack:
        if address is None:
            address = stack.enter_context(local_cluster(os.cpu_count() or 1)).scheduler_address
        client = stack.enter_context(_client(address))
        _check_machines(client)
        yield DaskWorkers(client)


@contextlib.contextmanager
def local_cluster(processes: int) -> Iterator[LocalCluster]:
    """Start a cluster of processes of this machine, which end with this one and leave Ctrl-C to it."""
    from distributed import LocalCluster
    from distributed.utils import LoopRunner

    # The thread of the event loop starts with SIGINT blocked. So do the processes that it starts, also in place of those that died.
    # To start the resource tracker of multiprocessing unblocks it, so that is done before.
    resource_tracker.ensure_running()
    runner, blocks = LoopRunner(), hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if blocks else set()
    try:
        runner.start()
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        with LocalCluster(
            n_workers=processes, threads_per_worker=1, memory_limit=None, dashboard_address=None, silence_logs=logging.CRITICAL,
            loop=runner.loop,
        ) as cluster:  # fmt: skip
            yield cluster
    finally:
        runner.stop()


def _client(address: str) -> Client:
    """Client of the scheduler at an address. Raises ParameterError."""
    import distributed

    answers: queue.SimpleQueue[Client | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            answers.put(distributed.Client(address, timeout=CONNECT_S, set_as_default=False))
        except Exception as error:  # dask raises many kinds
            answers.put(error)

    # In a thread, because dask waits without end for a server that answers in another protocol, such as HTTP.
    threading.Thread(target=connect, name="connects to dask", daemon=True).start()
    try:
        found = answers.get(timeout=CONNECT_S + 2)
    except queue.Empty:
        found = TimeoutError("what answers there is no dask scheduler")
    if isinstance(found, Exception):
        remedy = "start one by `dask scheduler`, and check host and port"
        raise ParameterError(f"no dask scheduler answers at {address} ({_first_line(found)}); {remedy}")
    return found


def _address(scheduler: str) -> str:
    """Address of a scheduler, checked."""
    try:
        parts = urlsplit(scheduler)
        right = parts.scheme in PROTOCOLS and parts.hostname and parts.port and parts.netloc.rpartition("@")[0] == ""
        if right and scheduler == f"{parts.scheme}://{parts.netloc}":
            return scheduler
    except ValueError:  # a port that is no number, or an unclosed bracket
        pass
    raise ParameterError(f"--scheduler must be tcp://HOST:PORT, got {checks.shown(scheduler)}; for example --scheduler {EXAMPLE}")


def _check_machines(client: Client) -> None:
    """Refuse a scheduler and workers with other versions; workers that join later are checked by each task."""
    ours = environment.of_results()
    try:
        # The scheduler reads the names of functions, too.
        check_versions("the scheduler", client.run_on_scheduler(environment.of_results), ours)
    except ParameterError:
        raise
    except Exception as error:
        raise ParameterError(_lacks("the scheduler", error)) from None
    for worker, theirs in sorted(client.run(environment.of_results, on_error="return").items()):
        if isinstance(theirs, dict):
            check_versions(f"worker {worker}", theirs, ours)
        elif not isinstance(theirs, OSError):  # which means that the worker went away
            raise ParameterError(_lacks(f"worker {worker}", theirs))
    if any(threads > 1 for threads in client.nthreads().values()):
        warnings.warn("a dask worker computes in one thread at a time; start workers with --nthreads 1", stacklevel=2)


def _lacks(where: str, error: Exception) -> str:
    return f"{where} has no decodesim of this version ({_first_line(error)}); install the same on all machines"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log and the warnings of dask on the standard error: errors are raised."""
    held = {name: logging.getLogger(name) for name in ("distributed", "distributed.client", "tornado", "tornado.application")}
    levels = {name: logger.level for name, logger in held.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"distributed(\.|$)")
        try:
            for logger in held.values():
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for name, logger in held.items():
                logger.setLevel(levels[name])
