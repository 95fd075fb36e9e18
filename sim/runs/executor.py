"""Executors of runs: local processes here, and the workers of a dask cluster in `sim.runs.dask_cluster`.

An executor computes the contents of files. A content depends on its task alone, so that the files are the same to the byte for any
executor and any number of workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from model.base import checks
from model.base.checks import ParameterError
from model.base.parent_process import exit_with_parent
from sim.runs.atomic_files import intact, write_content

MAX_JOBS = 1024
TRIES = 3
DASK = "dask"
"""Value of `jobs` for a dask cluster of local processes."""

Task = TypeVar("Task", bound=Hashable)


class RunError(RuntimeError):
    """A run that could not finish."""


class WorkersLostError(RunError):
    """A run whose workers died, or went out of reach; its finished tasks are kept."""


class Executor(Protocol):
    """Computes files, each from a task."""

    def completed(
        self, compute: Callable[[Task], bytes], files: Mapping[Task, Path]
    ) -> Iterator[tuple[Task, Path]]:  # pragma: no cover
        """Compute the content of each task's file; yield tasks with the paths of their files, in the order of completion.

        `compute` and the tasks are pickled where they are sent to other processes. A hash of the content is added to a file's name
        (`sim.runs.atomic_files.write_content`). Tasks of a worker that dies are computed again.

        Raises
        ------
        WorkersLostError
            If workers keep dying.
        """
        ...


@dataclass(frozen=True)
class LocalProcesses:
    """Processes of this machine, which write the files themselves; one worker is this process."""

    workers: int

    def completed(self, compute: Callable[[Task], bytes], files: Mapping[Task, Path]) -> Iterator[tuple[Task, Path]]:
        """See `Executor.completed`."""
        if self.workers == 1:
            for task, path in files.items():
                yield task, write_content(path, compute(task))
            return
        import joblib
        from joblib.externals.loky.process_executor import BrokenProcessPool

        left, tries = dict(files), 0
        while left:
            before = len(left)
            work = joblib.Parallel(n_jobs=self.workers, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
            try:
                for task, path in work(joblib.delayed(_in_worker)(os.getpid(), compute, *each) for each in left.copy().items()):
                    del left[task]
                    yield task, path
            except BrokenProcessPool:
                # A dead worker may have written files that it did not report.
                for task, path in intact(left).items():
                    del left[task]
                    yield task, path
                tries = 0 if len(left) < before else tries + 1
                if tries == TRIES:
                    raise WorkersLostError(f"workers died {TRIES} times without finishing a task (out of memory?)") from None


def _in_worker(parent: int, compute: Callable[[Task], bytes], task: Task, path: Path) -> tuple[Task, Path]:
    """Write a file in a worker process, which ends with its parent; Ctrl-C is ignored here and handled by the parent."""
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return task, write_content(path, compute(task))


def check_jobs(jobs: int | str | None, scheduler: str | None = None) -> int | str | None:
    """Check the number of worker processes, at most `MAX_JOBS`, or `dask`; return it, text of a number as a number.

    >>> check_jobs("2"), check_jobs("dask"), check_jobs(None, "tcp://10.0.0.1:8786")
    (2, 'dask', None)
    >>> check_jobs(2, "tcp://10.0.0.1:8786")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: --jobs is not used with --scheduler, got 2; leave one of the two out
    """
    if isinstance(jobs, str) and jobs != DASK:
        try:
            jobs = int(jobs)
        except ValueError:
            raise ParameterError(f"--jobs must be a whole number or {DASK}, got {checks.shown(jobs)}") from None
    if jobs is not None and jobs != DASK:
        checks.whole("jobs", jobs, 1, MAX_JOBS)
    if scheduler is not None and jobs is not None:
        raise ParameterError(f"--jobs is not used with --scheduler, got {jobs}; leave one of the two out")
    return jobs
