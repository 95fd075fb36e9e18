"""Worker processes with replicas of a model, and the handling of their failures.

They come from a fork server with one thread and the libraries, or are spawned: a process that has run torch is never forked, as its
threads would not survive. If one fails, hangs or ends, the run ends with one error. All end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any

import numpy as np

from calibrate.decoders.transformers_adapter import Decoder
from calibrate.loading.replicas import Replica
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import worker_loop as at_units
from calibrate.workers.worker_loop import (
    ASLEEP,
    BOX,
    DONE,
    LENGTH,
    LISTENING,
    POSTED,
    SLOTS,
    STATUS,
    STOPPED,
    Board,
    Command,
    Orders,
    SharedState,
    Unit,
    fingerprint,
    share_weights,
)
from model.base import checks
from model.base.checks import ParameterError
from model.steps import CacheError, Forward

SPIN = 0.005
"""Time for which a process polls a counter before it sleeps [s]: about a pass."""
PATIENCE = 60.0
"""Longest time of a worker's pass [s]."""
STARTING = 300.0
"""Longest time of loading a worker's model [s]."""
LIBRARIES = (
    "torch.multiprocessing", "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.masking_utils",
    "transformers.modeling_layers", "transformers.generation.utils", "calibrate.family.model_directory",
    "calibrate.workers.worker_loop",
)  # fmt: skip
"""Modules that the fork server loads once for all processes."""
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"


PER_CORE = 4
"""Most processes for each core: those that share a core take turns."""


class ProcessError(ParameterError):
    """A process of a parallel run failed, hung or was killed: the run is over. The message is complete."""


@contextlib.contextmanager
def started(
    replica: Replica, units: int, capacity: int | None = None, *, source: Sequence[int] = (), pin: bool = True, spin: float = SPIN,
    patience: float = PATIENCE, share: bool = True, devices: Sequence[str] = (),
) -> Iterator[Pool]:
    """Start worker processes for `units` units, this process being the first unit; they end with the block, however it is left.

    Parameters
    ----------
    replica
        The model of all units.
    capacity
        Largest number of positions of a sequence, prompt included. Default: as many as the model supports, at most 2048.
    source
        Tokens that the encoder of an encoder-decoder reads.
    pin
        Whether to pin each process, including this one, to one core, if the system allows it.
    spin
        Time for which a waiting process polls a counter before it sleeps [s].
    patience
        Longest time of a pass [s]; a worker that takes longer counts as hung.
    share
        Whether all replicas on one device share the memory of their weights; else each has a copy. Two replicas of the family's
        target need twice the CPU cache: k=1 at layer 6 was 1.06 to 1.07 times as fast as plain decoding with shared weights, and
        1.02 times without.
    devices
        For a replica on a GPU: the GPU of each unit, beginning with that of the replica (`calibrate.untested_on_gpu.gpu_ordering`).
        Default: a separate GPU per unit. Processes that share a GPU take turns on it; streams do not
        (`calibrate.untested_on_gpu.over_streams`).
    """
    checks.whole("units", units, 1, checks.MAX_UNITS)
    checks.number("spin", spin, 0)
    checks.number("patience", patience, 0.001)
    named = gpu_ordering.unit_devices(replica.device, units, devices)
    if replica.device == "cpu":
        check_processes(units, f"one for each of {units} units")
    else:
        gpu_ordering.check(named)
    with _one_thread():
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_setaffinity") else []
        pool = Pool(named, cores, spin, patience, share)
        try:
            pool.load(replica, capacity, source)
            if cores:  # only now: processes that are started later inherit these cores
                os.sched_setaffinity(0, {cores[0]})
            yield pool
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
            pool.close()


def check_processes(processes: int, of: str) -> None:
    """Raise `ParameterError` for more processes than the cores of this machine can run; `of` says what each is for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = PER_CORE * cores
    if processes > most:
        bound = f"processes must be at most {most}, {PER_CORE} for each of {cores} cores, got {processes}: {of}"
        raise ParameterError(f"{bound}; use fewer, or decode in one process")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def context_of_workers() -> Any:
    """Return the way to start processes: from a fork server with the libraries and a single thread, or spawned."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES])
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # a thread of the server would not survive in the forked processes
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


@dataclass
class Flight:
    """A posted pass of a worker."""

    task: Any
    step: Forward
    command: Command
    place: int
    posted: float
    stopped: bool = False


@dataclass
class Post:
    """State that the main process keeps of a worker."""

    process: Any
    end: connection.Connection
    flights: deque[Flight] = field(default_factory=deque)
    count: int = 0
    """Number of commands posted."""


class Pool:
    """Units with replicas of a model, the first in this process. See `started`."""

    def __init__(self, devices: Sequence[str], cores: Sequence[int], spin: float, patience: float, share: bool) -> None:
        import torch.multiprocessing  # noqa: F401  lets pipes carry tensors in shared memory

        self.devices, self.units = devices, len(devices)
        self.spin, self.patience, self.share = spin, patience, share
        units = self.units
        self.broken = self.closed = False
        self.posts: dict[int, Post] = {}
        self.board = Board(units)
        self.serial = 0
        self.rings: list[list[Any]] = []
        """Events of units on GPUs. They must exist as long as other processes use them."""
        try:
            if devices[0] != "cpu":
                self.rings = gpu_ordering.make_events(devices)
            context = context_of_workers()
            for number in range(1, units):
                ours, theirs = context.Pipe()
                core = cores[number % len(cores)] if cores else None
                orders = Orders(number, units, core, spin, devices[number])
                process = context.Process(target=at_units.work, args=(theirs, orders), daemon=True, name=f"unit {number}")
                self.posts[number] = Post(process, ours)
                process.start()
                theirs.close()
        except BaseException:
            self.close()
            raise

    def load(self, replica: Replica, capacity: int | None = None, source: Sequence[int] = ()) -> None:
        """Load a model in all units, instead of the current one."""
        import torch

        self.refuse_closed()
        decoder: Any = replace(replica, device=self.devices[0]).load()
        encodes = bool(decoder.config.is_encoder_decoder)
        if encodes != bool(source):
            what = "has an encoder, and source is empty" if encodes else "has no encoder, and source is given"
            raise ParameterError(f"model {decoder.name} {what}; {'give what it reads' if encodes else 'leave it out'}")
        if source:
            decoder.read_source(tuple(source))
        most = decoder.max_positions
        if capacity is None:
            capacity = min(most or 2048, 2048)
        checks.whole("capacity", capacity, 1, most, f"positions of model {decoder.name}")
        order = None
        with torch.inference_mode(False):
            memory = SharedState.allocate(decoder, self.units, capacity, self.devices)
            weights = share_weights(decoder) if self.share else None
        if self.rings:
            order = gpu_ordering.Events(0, self.devices[0], self.rings, memory.marks)
            decoder.numbers = torch.arange(
                decoder.vocabulary, device=decoder.device
            )  # as in `calibrate.untested_on_gpu.over_streams`
            gpu_ordering.settle(self.devices)  # the tensors that others get are complete
        with self._guarded():
            for number, post in self.posts.items():
                if not hasattr(self, "decoder"):
                    self._answer(post, "up")
                    post.end.send(("board", self.board.tensors, gpu_ordering.handles(self.devices, self.rings)))
                device = self.devices[number]
                theirs = weights if device == self.devices[0] else None
                post.end.send(("load", replace(replica, device=device), memory.tensors, tuple(source), theirs))
            self.decoder: Decoder = decoder
            self.replica, self.memory, self.capacity = replica, memory, capacity
            self.unit = Unit(0, decoder, memory, order)
            shape = memory.tags.shape
            self.tags = np.zeros(shape, np.int64)
            """Rows of each unit after all its posted commands, by the pass that made them."""
            self.since = np.zeros(shape, np.int64)
            """The unit's pass after which it has the row."""
            ours = fingerprint(decoder)
            for number, post in self.posts.items():
                if self._answer(post, "load") != ours:
                    raise ProcessError(f"the model of unit {number} differs from that of unit 0, though both loaded one replica")

    def read_source(self, tokens: Sequence[int]) -> None:
        """Encode a source text in all units."""
        self.refuse_closed()
        decoder: Any = self.decoder
        if not decoder.config.is_encoder_decoder:
            raise ParameterError(f"model {decoder.name} has no encoder, and source is given; leave it out")
        with self._guarded():
            for post in self.posts.values():
                post.end.send(("source", tuple(tokens)))
            decoder.read_source(tuple(tokens))
            self.unit.renew()
            for post in self.posts.values():
                self._answer(post, "source")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Mark the pool as broken on any error within the block: the state of its workers is unknown then."""
        try:
            yield
        except BaseException as error:
            self.broken = True
            if isinstance(error, BrokenPipeError | ConnectionError | EOFError):
                self.check_workers(self.posts.values())
                raise ProcessError("a worker process is gone") from None
            raise

    @property
    def pids(self) -> list[int]:
        """System process numbers of the workers."""
        return [post.process.pid for post in self.posts.values()]

    def refuse_closed(self) -> None:
        if self.closed or self.broken:
            why = "are closed" if self.closed else "are broken by an earlier error"
            raise ProcessError(f"the processes {why}; start them again")

    # --- workers ---

    def _answer(self, post: Post, what: str) -> Any:
        """Return a worker's answer to a message that is no pass."""
        until = time.monotonic() + STARTING
        while not post.end.poll(0.1):
            # Not `check_workers`, which would read an answer that has arrived since, and report it as a failure.
            if not post.process.is_alive() and not post.end.poll():
                raise self._gone(post)
            if time.monotonic() > until:
                raise ProcessError(f"the process of {post.process.name} did not start within {STARTING:.0f} s")
        message: Any = b"."
        try:
            while isinstance(message, bytes):
                message = post.end.recv_bytes()
                message = message if message == b"." else pickle.loads(message)
        except (EOFError, OSError):
            raise self._gone(post) from None
        if message[0] == "failed":
            raise ProcessError(f"the process of {post.process.name} failed: {message[1]}")
        assert message[0] == what, message
        return message[1]

    def _gone(self, post: Post) -> ProcessError:
        post.process.join(1)
        code = post.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = "ended" if code is None else f"ended with code {code}"
        return ProcessError(f"the process of {post.process.name} {how}, perhaps out of memory; the run is over")

    def check_workers(self, posts: Any) -> None:
        """Raise the error of workers that have ended or failed."""
        for post in posts:
            try:
                while post.end.poll():
                    message = post.end.recv_bytes()
                    if message != b".":
                        message = pickle.loads(message)
                        raise ProcessError(f"the process of {post.process.name} failed: {message[1]}")
            except (EOFError, OSError):
                raise self._gone(post) from None
            if not post.process.is_alive():
                raise self._gone(post)

    def post(self, number: int, command: Command) -> int:
        """Put a pass into the next message slot of a worker, once one is free; return the slot."""
        post, board = self.posts[number], self.board
        words = board.words[number]
        place = post.count % SLOTS
        start = time.perf_counter()
        while post.count - words[DONE] >= SLOTS:  # all slots hold stopped passes that the worker has not read yet
            self.check_workers([post])
            self._refuse_silence([post], start)
            time.sleep(self.spin / 10)
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(message) > BOX:
            raise CacheError(f"a pass of {len(command.tokens)} tokens is too wide for a worker process")
        slot = board.slots[number][place]
        board.boxes[number][place][: len(message)] = message
        slot[STOPPED] = slot[STATUS] = 0
        slot[LENGTH] = len(message)
        post.count += 1
        with self.unit.fence:
            words[POSTED] = post.count
        with self.unit.fence:  # a barrier: the counter is written before the sleep flag is read
            asleep = words[ASLEEP]
        if asleep:
            try:
                post.end.send_bytes(b".")
            except OSError:
                raise self._gone(post) from None
        return place

    def wait(self, since: float) -> None:
        """Wait until a worker ends a pass; `since` is when the main process began to wait."""
        clock, words = time.perf_counter, self.board.words
        watched = [(words[number], post.count - len(post.flights)) for number, post in self.posts.items() if post.flights]
        until = clock() + self.spin
        while clock() < until:
            for word, before in watched:
                if word[DONE] > before:
                    return
        posts = [post for post in self.posts.values() if post.flights]
        ends = [post.end for post in posts]
        while True:
            words[0][LISTENING] = 1
            with self.unit.fence:
                pass
            if not any(word[DONE] > before for word, before in watched):
                connection.wait(ends, at_units.NAP)
            words[0][LISTENING] = 0
            if any(word[DONE] > before for word, before in watched):
                return
            self.check_workers(posts)
            self._refuse_silence(posts, since)

    def _refuse_silence(self, posts: Sequence[Post], since: float) -> None:
        if time.perf_counter() - since > self.patience:
            names = ", ".join(post.process.name for post in posts)
            raise ProcessError(f"the process of {names} did not answer within {self.patience:g} s; the run is over")

    def close(self) -> None:
        """Stop all passes and end all worker processes; a second call does nothing.

        Workers are asked to end and have two seconds together; those that still run then are killed. After an error all are killed
        at once.
        """
        if self.closed:
            return
        self.closed = True
        for number, post in self.posts.items():
            for slot in self.board.slots[number]:
                slot[STOPPED] = 1
            with contextlib.suppress(OSError, ValueError):
                if not self.broken:
                    post.end.send(("end",))
        until = time.monotonic() + (0 if self.broken else 2)
        for post in self.posts.values():
            process = post.process
            if process.pid is None:  # never started
                continue
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()  # also a suspended one
            process.join()
            post.end.close()
            process.close()
        self.posts = {}
