"""Neighbour processes that keep the host busy: passes take longer while other processes run the same work."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from model.base.parent_process import exit_with_starter

_PATIENCE = 300.0  # seconds in which a companion must have built its model, or filled its cache


@dataclass(frozen=True)
class Spec:
    """Arguments from which a neighbour process builds the same model."""

    model: str
    device: str
    dtype: str
    source: int
    threads: int


class Companions:
    """`count` processes, each with the model, idle until they get a pass to repeat.

    They are spawned, not forked: torch's threads do not survive a fork.
    """

    def __init__(self, count: int, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.ends = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, spec), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(ours)
        for end in self.ends:
            self._answer(end)

    @contextlib.contextmanager
    def at(self, width: int, context: int, batch: int, mode: str) -> Iterator[list[int]]:
        """Run this pass in every process during the block; afterwards the list holds the number of passes of each process."""
        passes: list[int] = []
        for end in self.ends:
            end.send((width, context, batch, mode))
        for end in self.ends:
            self._answer(end)
        try:
            yield passes
        finally:
            for end in self.ends:
                with contextlib.suppress(OSError):
                    end.send("stop")
            passes.extend(self._answer(end) for end in self.ends)

    def _answer(self, end: Connection) -> Any:
        """Return the next answer of a companion.

        Raises
        ------
        RuntimeError
            If it fails, ends or does not answer in time.
        """
        try:
            if not end.poll(_PATIENCE):
                raise RuntimeError(f"a companion process did not answer within {_PATIENCE:.0f} s")
            answer = end.recv()
        except (EOFError, OSError):
            raise RuntimeError("a companion process ended, perhaps out of memory") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a companion process failed: {answer}")
        return answer

    def close(self) -> None:
        """End the processes."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()


def _work(connection: Connection, spec: Spec) -> None:
    """Build the model, then repeat each requested pass until the next message: the main function of a companion."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    exit_with_starter()
    import torch

    from calibrate.loading.architectures import architecture
    from calibrate.timing import library_pass

    torch.set_num_threads(spec.threads)
    try:
        model = library_pass.LibraryModel(architecture(spec.model), spec.device, spec.dtype, spec.source)
        connection.send(0)
        while (asked := connection.recv()) is not None:
            if asked == "stop":  # belongs to a pass that could not begin
                continue
            connection.send(_run(connection, model, asked))
    except EOFError:
        pass  # the parent is gone
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _run(connection: Connection, model: Any, asked: tuple[int, int, int, str]) -> int:
    """Repeat a pass until a message arrives; return the number of passes."""
    import torch

    from calibrate.timing.single_pass import prepare

    done = 0
    with torch.inference_mode():
        work = prepare(model, *asked)
        while not connection.poll():
            work.run()
            work.roll_back()
            done += 1
            if done == 1:
                connection.send(0)
    connection.recv()
    return done
