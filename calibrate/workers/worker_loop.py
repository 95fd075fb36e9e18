"""A unit of a parallel run: a model replica, its rows in memory that all processes reach, and the loop of a worker process.

Every row carries the number of the pass that wrote it, in shared memory beside it. A unit that makes a pass is told what it lacks
and where that lies, copies it, and then compares the numbers of all rows that the pass sees with what the algorithm believes.

Commands go through shared memory too: the worker looks at a counter, for a while without sleeping, and then waits for a byte in a
pipe. Measured round trips of an empty pass, 3 ms apart (median and quartiles [us], two Xeon cores, one more process on them):
a pipe of objects 348 (233 to 695), of bytes 254 (160 to 443), of raw bytes 220 (120 to 584), a semaphore 207 (101 to 1807);
half a millisecond apart gloo's send and recv 192 (165 to 297), a counter watched for 200 us and then a pipe 63 (54 to 146), one
that is watched all the while 3.3 (2.5 to 108). So it is watched for `calibrate.workers.worker_pool.SPIN`, which an idle worker does
not do again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.decoders.kv_rows import KvRows, LayerRows
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.loading.replicas import Replica
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.untested_on_gpu.gpu_ordering import Order
from model.steps import CacheError, LayerSpan

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

SLOTS = 4
"""Commands that a worker can have before it: one that it makes, and those behind stopped ones."""
BOX = 1 << 16
"""Bytes of a command."""
POSTED, DONE, ASLEEP, LISTENING = range(4)
"""What the words of a unit count or say: commands given, commands ended, that it sleeps, and of unit 0 that it waits for a byte."""
STOPPED, STATUS, LENGTH = range(3)
"""The words of a slot: that its pass is stopped, what became of it, and how long the command is."""
MADE, GAVE_UP = 1, 2
STARTED, READY, ENDED = range(3)
"""The times of a slot: when the command was taken up, when its rows were there, and when its pass was over."""
NAP = 0.1  # seconds after which a sleeper looks for itself, should a byte have gone astray


class MissingRows(NamedTuple):
    """Rows [start, stop) of layers [low, high) that a unit lacks and `source` has, or will have.

    `since` are the passes, one for each layer, with which the source has them; without any it has them.
    """

    source: int
    low: int
    high: int
    start: int
    stop: int
    since: tuple[int, ...] = ()


class Command(NamedTuple):
    """A pass, as a unit is told to make it."""

    serial: int
    tokens: tuple[int, ...]
    at: int
    first: int
    last: int
    heads: int
    state: Any
    """Where `first` is above 0: the number of the pass of this very unit to go on from, or in the main process its states."""
    pieces: tuple[MissingRows, ...]
    believed: int
    """Of all rows that it sees: `believed_of`."""
    followed: bool = True
    """Whether others may be waiting for its rows, layer by layer."""
    tree: tuple[int, ...] = ()
    """Of a pass over several hypotheses: `model.steps.Forward`. Their rows lie one behind the other, from position `at` on."""


class Board:
    """What all processes share whatever the model: counters, commands and times of each unit, as views of shared memory."""

    def __init__(self, units: int, tensors: Sequence[Tensor] | None = None) -> None:
        import torch

        kinds: Any
        if tensors is None:
            sizes = (units, 8), (units, SLOTS, 4), (units, SLOTS, 4), (units, SLOTS, BOX)
            kinds = torch.int64, torch.int64, torch.float64, torch.uint8
            tensors = [_shared(size, kind) for size, kind in zip(sizes, kinds, strict=True)]
        self.tensors = tensors
        views: list[Any] = [tensor.numpy() for tensor in tensors]
        words, slots, times, boxes = views
        self.words: list[Any] = [memoryview(words[unit]) for unit in range(units)]
        self.slots: list[Any]
        self.times: list[Any]
        self.boxes: list[Any]
        self.slots, self.times, self.boxes = (
            [[memoryview(view[unit, slot]) for slot in range(SLOTS)] for unit in range(units)] for view in (slots, times, boxes)
        )


class SharedState:
    """What all processes share of a model's state, a unit's rows where the unit is.

    `rows`: of each unit, shape (layers, 2, 1, key-value heads, capacity, head_dim), keys and then values. `states`: behind the last
    layer of a unit's last pass, where unit 0 is, shape (units, capacity, hidden). `logits`: on the processor, (units, vocabulary),
    so that who looks at another unit's waits for nothing of unit 0. `tags`: (units, layers, capacity), the pass that made each row.
    `stamps`: (units, layers), the last pass of the unit that is through this layer; on a GPU its `marks` say where in its work.
    """

    def __init__(self, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        import torch

        self.tensors = rows, tensors
        self.rows = rows
        self.states, self.logits, tags, stamps, marks = tensors
        self.bits: list[NDArray[Any]] = []
        """The rows as whole numbers, where the processor reaches them: to copy a few this way takes a fifth of the time."""
        if rows[0].device.type == "cpu":
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows[0].element_size()]
            self.bits = [each.view(whole).numpy() for each in rows]
        self.tags: NDArray[np.int64] = tags.numpy()
        self.stamps: NDArray[np.int64] = stamps.numpy()
        self.marks: NDArray[np.int64] = marks.numpy()
        self.capacity = self.tags.shape[2]

    @classmethod
    def of(cls, decoder: Decoder, units: int, capacity: int, devices: Sequence[str] = ()) -> SharedState:
        """Room for so many units and positions of this model, whose devices are those of their rows."""
        import torch

        heads, size = shape_of_rows(decoder)
        state = decoder.run((0,), 0, LayerSpan(0, 1), decoder.rows())
        shape = decoder.layers, 2, 1, heads, capacity, size
        rows = [_shared(shape, decoder.dtype, device) for device in devices or [str(decoder.device)] * units]
        states = _shared((units, capacity, state.shape[1]), decoder.dtype, rows[0].device)
        logits = _shared((units, decoder.vocabulary), decoder.dtype)
        tags = _shared((units, decoder.layers, capacity), torch.int64)
        return cls(rows, [states, logits, tags, *(_shared((units, decoder.layers), torch.int64) for _ in range(2))])

    def copy(self, to: int, source: int, layers: slice, into: slice, of: slice) -> None:
        """Copy rows from one unit to another, of these layers and positions; on GPUs it is only launched."""
        if self.bits:
            self.bits[to][layers, ..., into, :] = self.bits[source][layers, ..., of, :]
        else:
            self.rows[to][layers, ..., into, :].copy_(self.rows[source][layers, ..., of, :], non_blocking=True)


def _shared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Zeros in memory that other processes can be handed; it has no name, so nothing is left of it when they have ended."""
    import torch

    found: Any = torch.zeros(shape, dtype=dtype, device=device)
    result: Tensor = found.share_memory_()
    return result


def shape_of_rows(decoder: Decoder) -> tuple[int, int]:
    """How many heads keys and values have, and of what size, found by making some."""
    rows = decoder.rows()
    decoder.run((0,), 0, LayerSpan(0, decoder.layers), rows)
    shapes = {each.shape for layer in rows.layers for each in (layer.keys, layer.values) if each is not None}
    if len({(heads, size) for _, heads, _, size in shapes}) != 1:
        raise CacheError(f"{decoder.name}: layers hold keys and values of unequal shapes, which cannot lie in one buffer")
    _, heads, _, size = shapes.pop()
    return heads, size


def believed_of(tags: bytes) -> int:
    """One number for the passes that made rows, as the bytes of their tags, shape (layers, positions): their checksum.

    >>> one, other = np.array([[3, 4], [3, 4]]), np.array([[3, 4], [4, 3]])
    >>> believed_of(one.tobytes()) == believed_of(one.copy().tobytes()) != believed_of(other.tobytes())
    True
    """
    return zlib.crc32(tags)


class SharedRows(LayerRows):
    """One layer's rows in the unit's buffer, which never grows."""

    def _move(self, like: Tensor, end: int, whole: bool = False) -> None:
        raise CacheError(f"rows up to position {end} do not fit the shared buffer")


class Unit:
    """A replica at work on the rows of its unit; in the main process unit 0."""

    def __init__(self, number: int, decoder: Decoder, memory: SharedState, order: Order | None = None) -> None:
        self.number, self.decoder, self.memory = number, decoder, memory
        self.order = Order() if order is None else order
        self.rows = KvRows(0)
        self.tags, self.stamps = memory.tags[number], memory.stamps[number]
        self.fence, self.parent = threading.Lock(), os.getppid()
        self.made = 0
        self.states: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """Rows of a new text, of which nothing but the buffer is known."""
        self.rows = self.decoder.rows()
        own: Any = self.memory.rows[self.number]
        self.rows.layers = []
        for layer in range(self.decoder.layers):
            rows = SharedRows()
            rows.keys, rows.values = own[layer, 0], own[layer, 1]
            self.rows.layers.append(rows)

    def make(
        self, command: Command, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Tensor:
        """Make a pass; the states behind its last layer, shape (width, hidden). On a GPU it is launched: `finish` waits for it.

        Between layers it looks whether it is `stopped`, and lets something happen `meanwhile`; `ready` is told when all rows that
        are there at the beginning are copied.
        """
        serial, tokens, at, first, last, _, state, pieces, believed, followed, tree = command
        end = at + len(tokens)
        later = self._fetch(pieces)
        if ready is not None:
            ready()
        for rows in self.rows.layers[first:last]:
            rows.length = at
        tags, stamps = self.tags, self.stamps
        tags[first:last, at:end] = 0  # of no pass, until they are written

        def between(layer: int) -> None:
            if stopped is not None and stopped():
                raise gpu_ordering.GaveUp
            if layer > first:
                self.order.mark(layer - 1, layer)
                self.order.keep_up(stopped, meanwhile)
            if followed and layer > first:
                tags[layer - 1, at:end] = serial
                with self.fence:  # on processors that write out of order, first the rows and their tags
                    stamps[layer - 1] = serial
            if meanwhile is not None:
                meanwhile()
            for piece in later:
                if piece.low <= layer < piece.high:
                    self._follow(piece, layer, stopped, meanwhile)

        states = self.states if isinstance(state, int) else state
        if first and (states is None or (isinstance(state, int) and state != self.made)):
            raise CacheError(f"unit {self.number} is to go on from pass {state}, but made {self.made} last")
        watched = between if followed or later or stopped is not None or meanwhile is not None else None
        before = states if first else None
        try:
            states = self.decoder.run(tokens, at, LayerSpan(first, last), self.rows, before, between=watched, tree=tree)
        finally:
            self.rows.at, self.rows.sees = None, []  # the next pass finds its rows by position again
        self.order.mark(first, last)
        tags[first:last, at:end] = serial
        with self.fence:
            stamps[first:last] = serial
        self._check(command, believed)
        self.states, self.made = states, serial
        return states

    def finish(self, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all that was launched is done, unless it is stopped."""
        self.order.finish(stopped, meanwhile)

    def _fetch(self, pieces: Sequence[MissingRows]) -> list[MissingRows]:
        """Copy what is there; what has to be waited for."""
        later: list[MissingRows] = []
        for piece in pieces:
            source, low, high, start, stop, since = piece
            if since and (self.memory.stamps[source, low:high] < since).any():
                later.append(piece)
            else:
                self._copy(source, low, high, start, stop)
        return later

    def _copy(self, source: int, low: int, high: int, start: int, stop: int) -> None:
        with self.fence:
            pass
        memory, span = self.memory, slice(start, stop)
        self.order.come_behind(source, low, high)
        memory.copy(self.number, source, slice(low, high), span, span)
        self.tags[low:high, start:stop] = memory.tags[source, low:high, start:stop]

    def _follow(
        self, piece: MissingRows, layer: int, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None
    ) -> None:
        """Copy one layer's rows as soon as they are there."""
        stamp = memoryview(self.memory.stamps[piece.source])
        until = piece.since[layer - piece.low]
        while stamp[layer] < until:
            if os.getppid() != self.parent or (stopped is not None and stopped()):
                raise gpu_ordering.GaveUp  # also where nobody is left to write them
            if meanwhile is not None:
                meanwhile()
        self._copy(piece.source, layer, layer + 1, piece.start, piece.stop)

    def _check(self, command: Command, believed: int) -> None:
        """Refuse to go on if the pass saw other rows than the algorithm believes, or left other ones behind."""
        serial, tokens, at, first, last, *_ = command
        end = at + len(tokens)
        if believed_of(self.tags[first:last, :at].tobytes()) != believed:
            raise CacheError(f"unit {self.number}: pass {serial} at position {at} saw other rows than it should have")
        for layer in range(first, last):
            held = self.rows.layers[layer].length
            if held != end:
                raise CacheError(f"unit {self.number}: layer {layer} should hold {end} positions, it holds {held}")


def weights_of(decoder: Decoder) -> list[tuple[Any, Any]]:
    """All weights of a model, trained heads included, each as (where it is, its name there)."""
    return [*[(parameter, "data") for parameter in decoder.full.parameters()], *[(decoder.heads, layer) for layer in decoder.heads]]


def share_weights(decoder: Decoder, given: Tensor | None = None) -> Tensor:
    """Have a model read its weights where other processes do too: in what was given, where they must be the same, or in new memory.

    Shape (bytes,). Of processes on one processor each then finds in its cache what the others have read.
    """
    import torch

    with torch.inference_mode(False):
        places = weights_of(decoder)
        found = [where.data if name == "data" else where[name] for where, name in places]
        ends = np.cumsum([-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in found])
        flat = _shared((int(ends[-1]),), torch.uint8, decoder.device) if given is None else given
        if len(flat) != ends[-1]:
            raise ValueError("the replica has weights of another size")
        for (where, name), tensor, end in zip(places, found, ends.tolist(), strict=True):
            size = tensor.numel() * tensor.element_size()
            start = end - -(-size // 64) * 64
            own = flat[start : start + size].view(tensor.dtype).view(tensor.shape)
            if given is None:
                own.copy_(tensor)
            elif not own.equal(tensor):
                raise ValueError("the replica has other weights")
            if name == "data":
                where.data = own
            else:
                where[name] = own
        return flat


def fingerprint(decoder: Decoder) -> tuple[Any, ...]:
    """What two replicas must have in common: sizes, and numbers of every tensor's beginning and end."""
    import torch

    with torch.inference_mode():
        some = [parameter.flatten()[[0, -1]].double().tolist() for parameter in decoder.full.parameters()]
        heads = [(layer, head.flatten()[[0, -1]].double().tolist()) for layer, head in decoder.heads.items()]
    return decoder.layers, decoder.vocabulary, some, heads


class Orders(NamedTuple):
    """How a worker is to be."""

    number: int
    units: int
    core: int | None
    spin: float
    device: str = "cpu"


def work(connection: Connection, orders: Orders) -> None:
    """A worker process: load what it is told to, and make passes until the parent has had enough of it, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    gc.freeze()  # libraries are shared with the server: a collection that looks through them would copy their memory
    if sys.platform == "linux":
        _end_with_parent()
    try:
        import torch

        with torch.inference_mode():
            _Worker(connection, orders).serve()
    except (EOFError, BrokenPipeError, ConnectionError):
        os._exit(1)  # the parent is gone
    except BaseException as error:
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        with contextlib.suppress(OSError):
            connection.send(("failed", said))
        os._exit(1)
    os._exit(0)  # nothing is left to be done, and torch takes its time


def _end_with_parent() -> None:
    """Have the system end this process when the one that it was started by ends, even if it is held just then.

    That is the server of processes, which ends when nobody holds the pipe to it any more: this process must not.
    """
    import ctypes
    from multiprocessing import forkserver

    server: Any = getattr(forkserver, "_forkserver", None)
    held = getattr(server, "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


class _Worker:
    """The loop of a worker process."""

    def __init__(self, connection: Connection, orders: Orders) -> None:
        import torch

        torch.set_num_threads(1)
        if orders.core is not None:
            os.sched_setaffinity(0, {orders.core})
        if orders.device != "cpu":
            gpu_ordering.cuda().set_device(orders.device)
        self.connection, self.orders = connection, orders
        self.unit: Unit | None = None
        self.board: Board | None = None
        self.rings: list[list[Any]] = []
        self.taken = 0
        connection.send(("up", os.getpid()))

    def serve(self) -> None:
        """Do what comes, in its order."""
        clock, spin, number = time.perf_counter, self.orders.spin, self.orders.number
        until = 0.0
        while True:
            if self.board is None:
                if not self._hear():
                    return
                continue
            words = self.board.words[number]
            while words[POSTED] <= self.taken and clock() < until:
                pass
            if words[POSTED] > self.taken:
                self._pass()
                until = clock() + spin
                continue
            words[ASLEEP] = 1
            with threading.Lock():  # a barrier: the flag is out before the counter is looked at
                pass
            heard = words[POSTED] > self.taken or not self.connection.poll(NAP) or self._hear()
            words[ASLEEP] = 0
            if not heard:
                return

    def _hear(self) -> bool:
        """Read what is in the pipe; false where it says that it is over."""
        said = self.connection.recv_bytes()
        if said == b".":  # only to be woken
            return True
        what, *rest = pickle.loads(said)
        match what:
            case "board":
                self.board, self.rings = Board(self.orders.units, rest[0]), gpu_ordering.opened(rest[1])
                return True
            case "load":
                self._load(*rest)
            case "source":
                assert self.unit is not None
                decoder: Any = self.unit.decoder
                decoder.read_source(rest[0])
                self.unit.renew()
            case "end":
                return False
        self.connection.send((what, None if self.unit is None else fingerprint(self.unit.decoder)))
        return True

    def _load(
        self, replica: Replica, tensors: tuple[Sequence[Tensor], Sequence[Tensor]], source: tuple[int, ...], weights: Tensor | None
    ) -> None:
        import torch

        self.unit = None
        with torch.inference_mode(False):
            decoder: Any = replica.load()
        if weights is not None:
            share_weights(decoder, weights)
        if source:
            decoder.read_source(source)
        decoder.warm()
        memory, order = SharedState(*tensors), None
        if self.rings:
            order = gpu_ordering.Events(self.orders.number, self.orders.device, self.rings, memory.marks)
            decoder.numbers = torch.arange(
                decoder.vocabulary, device=decoder.device
            )  # as in `calibrate.untested_on_gpu.over_streams`
        self.unit = Unit(self.orders.number, decoder, memory, order)
        gc.collect()
        gc.freeze()  # what is there stays: no pass waits for a look through it

    def _pass(self) -> None:
        """Make the next pass."""
        assert self.board is not None
        assert self.unit is not None
        clock, number, place = time.perf_counter, self.orders.number, self.taken % SLOTS
        slot, times = self.board.slots[number][place], self.board.times[number][place]
        times[STARTED] = times[READY] = clock()
        command: Command = pickle.loads(self.board.boxes[number][place][: slot[LENGTH]])

        def stopped() -> bool:
            return bool(slot[STOPPED])

        def ready() -> None:
            times[READY] = clock()

        slot[STATUS] = GAVE_UP
        try:
            if not slot[STOPPED]:
                states = self.unit.make(command, stopped, None, ready)
                memory = self.unit.memory
                memory.states[number, : len(states)] = states
                if command.heads:
                    memory.logits[number] = self.unit.decoder.logits(states[-1:], command.last)[0]
                self.unit.finish(stopped)
                slot[STATUS] = MADE
        except gpu_ordering.GaveUp:
            self.unit.finish()  # what was launched is done first: who waits for this unit's GPU waits for that
        except CacheError:
            if not slot[STOPPED]:  # else what it was copying may have been written over: it is nobody's any more
                raise
            self.unit.finish()
        times[ENDED] = clock()
        self.taken += 1
        with self.unit.fence:
            self.board.words[number][DONE] = self.taken
        with self.unit.fence:
            listening = self.board.words[0][LISTENING]
        if listening:
            self.connection.send_bytes(b".")
