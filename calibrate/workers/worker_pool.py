"""Worker processes with replicas of a model, and what becomes of them.

They come of a server that has one thread and the libraries, or are started afresh: a process that has run torch is never forked, as
its threads would not live on. A failure, a hang or the end of any of them ends the run with one error, and they end with this
process, however it ends.
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
"""Seconds for which a process watches a counter before it sleeps: about a pass."""
PATIENCE = 60.0
"""Seconds in which a worker must have made a pass."""
STARTING = 300.0
"""Seconds in which a worker must have loaded its model."""
LIBRARIES = (
    "torch.multiprocessing", "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "transformers.masking_utils",
    "transformers.modeling_layers", "transformers.generation.utils", "calibrate.family.model_directory",
    "calibrate.workers.worker_loop",
)  # fmt: skip
"""What the server of processes loads, once for all of them."""
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"


class ProcessError(ParameterError):
    """A process of a parallel run failed, hung or was killed: the run is over. The message is complete."""


@contextlib.contextmanager
def started(
    replica: Replica, units: int, capacity: int | None = None, *, source: Sequence[int] = (), pin: bool = True, spin: float = SPIN,
    patience: float = PATIENCE, share: bool = True, devices: Sequence[str] = (),
) -> Iterator[Pool]:
    """Worker processes for `units` units, this process being one of them; they end with the block, however it is left.

    Parameters
    ----------
    replica
        The model of all units.
    capacity
        The most positions of a text, prompt included. Default: as many as the model knows, at most 2048.
    source
        What the encoder of an encoder-decoder reads.
    pin
        Whether each process keeps to one core, where the system lets it, this one included.
    spin
        Seconds for which a process that waits watches a counter before it sleeps.
    patience
        Seconds in which a pass must be made; a worker that takes longer is taken to hang.
    share
        Whether all replicas on one device read their weights in the same memory; else each has its own. Two replicas of the
        family's target want twice the cache: k=1 at layer 6 was 1.06 to 1.07 times as fast as plain decoding with weights in
        common, and 1.02 times without.
    devices
        Of a replica on a GPU: the GPU of each unit, the first that of the replica (`calibrate.untested_on_gpu.gpu_ordering`).
        Default: one each. Processes that share one take turns on it; streams do not (`calibrate.untested_on_gpu.over_streams`).
    """
    checks.whole("units", units, 1, checks.MAX_UNITS)
    checks.number("spin", spin, 0)
    checks.number("patience", patience, 0.001)
    named = gpu_ordering.of_units(replica.device, units, devices)
    if replica.device != "cpu":
        gpu_ordering.check(named)
    with _one_thread():
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_setaffinity") else []
        pool = Pool(named, cores, spin, patience, share)
        try:
            pool.load(replica, capacity, source)
            if cores:  # not before: who is started later begins with the cores of whoever starts him
                os.sched_setaffinity(0, {cores[0]})
            yield pool
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
            pool.close()


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
    """How processes are started: from a server that has loaded the libraries once and has a single thread, or afresh."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES])
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # a thread of the server would not live on in the processes
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
    """A pass that a worker has been told to make."""

    task: Any
    step: Forward
    command: Command
    place: int
    posted: float
    stopped: bool = False


@dataclass
class Post:
    """What the main process knows of a worker."""

    process: Any
    end: connection.Connection
    flights: deque[Flight] = field(default_factory=deque)
    count: int = 0
    """Commands given."""


class Pool:
    """Units with replicas of a model, the first in this process. See `started`."""

    def __init__(self, devices: Sequence[str], cores: Sequence[int], spin: float, patience: float, share: bool) -> None:
        import torch.multiprocessing  # noqa: F401  it teaches pipes to carry tensors in shared memory

        self.devices, self.units = devices, len(devices)
        self.spin, self.patience, self.share = spin, patience, share
        units = self.units
        self.broken = self.closed = False
        self.posts: dict[int, Post] = {}
        self.board = Board(units)
        self.serial = 0
        self.rings: list[list[Any]] = []
        """Events of units on GPUs: as long as others know them they must be there."""
        try:
            if devices[0] != "cpu":
                self.rings = gpu_ordering.made(devices)
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
        """Have all units load a model, in the place of the one that they have."""
        import torch

        self.refuse_closed()
        decoder: Any = replace(replica, device=self.devices[0]).load()
        encodes = bool(decoder.config.is_encoder_decoder)
        if encodes != bool(source):
            what = "has an encoder, and source is empty" if encodes else "has no encoder, and source is given"
            raise ParameterError(f"model {decoder.name} {what}; {'give what it reads' if encodes else 'leave it out'}")
        if source:
            decoder.read_source(tuple(source))
        most = decoder.longest
        if capacity is None:
            capacity = min(most or 2048, 2048)
        checks.whole("capacity", capacity, 1, most, f"positions of model {decoder.name}")
        order = None
        with torch.inference_mode(False):
            memory = SharedState.of(decoder, self.units, capacity, self.devices)
            weights = share_weights(decoder) if self.share else None
        if self.rings:
            order = gpu_ordering.Events(0, self.devices[0], self.rings, memory.marks)
            decoder.numbers = torch.arange(
                decoder.vocabulary, device=decoder.device
            )  # as in `calibrate.untested_on_gpu.over_streams`
            gpu_ordering.settle(self.devices)  # what others are handed is there
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
            """What each unit's rows will be when it has done all that it was told to."""
            self.since = np.zeros(shape, np.int64)
            """The pass of the unit with which it has the row."""
            ours = fingerprint(decoder)
            for number, post in self.posts.items():
                if self._answer(post, "load") != ours:
                    raise ProcessError(f"the model of unit {number} is not that of unit 0, though both were asked for alike")

    def read_source(self, tokens: Sequence[int]) -> None:
        """Have the encoders of all units read a text."""
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
        """Whatever goes wrong in here leaves workers of which nothing is known."""
        try:
            yield
        except BaseException as error:
            self.broken = True
            if isinstance(error, BrokenPipeError | ConnectionError | EOFError):
                self.look(self.posts.values())
                raise ProcessError("a worker process is gone") from None
            raise

    @property
    def pids(self) -> list[int]:
        """The worker processes, as the system numbers them."""
        return [post.process.pid for post in self.posts.values()]

    def refuse_closed(self) -> None:
        if self.closed or self.broken:
            why = "are closed" if self.closed else "are broken by an earlier error"
            raise ProcessError(f"the processes {why}; start them anew")

    # --- workers ---

    def _answer(self, post: Post, what: str) -> Any:
        """What a worker says to a message, not to a pass."""
        until = time.monotonic() + STARTING
        while not post.end.poll(0.1):
            # Only whether it is alive: `look` would read an answer that has come since, and take it for a failure.
            if not post.process.is_alive() and not post.end.poll():
                raise self._gone(post)
            if time.monotonic() > until:
                raise ProcessError(f"the process of {post.process.name} did not start within {STARTING:.0f} s")
        said: Any = b"."
        try:
            while isinstance(said, bytes):
                said = post.end.recv_bytes()
                said = said if said == b"." else pickle.loads(said)
        except (EOFError, OSError):
            raise self._gone(post) from None
        if said[0] == "failed":
            raise ProcessError(f"the process of {post.process.name} failed: {said[1]}")
        assert said[0] == what, said
        return said[1]

    def _gone(self, post: Post) -> ProcessError:
        post.process.join(1)
        code = post.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = "ended" if code is None else f"ended with code {code}"
        return ProcessError(f"the process of {post.process.name} {how}, perhaps for want of memory; the run is over")

    def look(self, posts: Any) -> None:
        """Raise what is the matter with workers that have ended or failed."""
        for post in posts:
            try:
                while post.end.poll():
                    said = post.end.recv_bytes()
                    if said != b".":
                        said = pickle.loads(said)
                        raise ProcessError(f"the process of {post.process.name} failed: {said[1]}")
            except (EOFError, OSError):
                raise self._gone(post) from None
            if not post.process.is_alive():
                raise self._gone(post)

    def post(self, number: int, command: Command) -> int:
        """Give a worker a pass to make; the slot that it has."""
        post, board = self.posts[number], self.board
        words = board.words[number]
        place = post.count % SLOTS
        start = time.perf_counter()
        while post.count - words[DONE] >= SLOTS:  # all of them stopped, and the worker has not come to look
            self.look([post])
            self._refuse_silence([post], start)
            time.sleep(self.spin / 10)
        said = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(said) > BOX:
            raise CacheError(f"a pass of {len(command.tokens)} tokens is too wide for a worker process")
        slot = board.slots[number][place]
        board.boxes[number][place][: len(said)] = said
        slot[STOPPED] = slot[STATUS] = 0
        slot[LENGTH] = len(said)
        post.count += 1
        with self.unit.fence:
            words[POSTED] = post.count
        with self.unit.fence:  # a barrier: the counter is out before it is asked whether anybody sleeps
            asleep = words[ASLEEP]
        if asleep:
            try:
                post.end.send_bytes(b".")
            except OSError:
                raise self._gone(post) from None
        return place

    def wait(self, since: float) -> None:
        """Wait until some worker has ended a pass; `since` when the main process has been waiting."""
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
            self.look(posts)
            self._refuse_silence(posts, since)

    def _refuse_silence(self, posts: Sequence[Post], since: float) -> None:
        if time.perf_counter() - since > self.patience:
            names = ", ".join(post.process.name for post in posts)
            raise ProcessError(f"the process of {names} did not answer within {self.patience:g} s; the run is over")

    def close(self) -> None:
        """End all workers: at their word if they are idle, else at once."""
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
            if process.pid is None:  # it was never started
                continue
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()  # also one that the system holds
            process.join()
            post.end.close()
            process.close()
        self.posts = {}
