"""A unit of a parallel run: a model replica, its cache rows in shared memory, and the loop of a worker process.

Every row has the number of the pass that wrote it, in shared memory. The command of a pass lists the rows that the unit lacks and
where they are. The unit copies them, and then compares the numbers of all rows that the pass sees with the algorithm's.

Commands go through shared memory too: the worker polls a counter for a while without sleeping, and then waits for a byte in a pipe.
Measured round trips of an empty pass, 3 ms apart (median and quartiles [us], two Xeon cores with one more busy process): a pipe of
objects 348 (233 to 695), of bytes 254 (160 to 443), of raw bytes 220 (120 to 584), a semaphore 207 (101 to 1807); half a
millisecond apart gloo's send and recv 192 (165 to 297), a counter polled for 200 us and then a pipe 63 (54 to 146), one that is
always polled 3.3 (2.5 to 108). So it is polled for `calibrate.workers.worker_pool.SPIN` after a pass; an idle worker sleeps.
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
"""Commands that a worker can have at a time: the current one, and those after stopped ones."""
BOX = 1 << 16
"""Largest command [bytes]."""
POSTED, DONE, ASLEEP, LISTENING = range(4)
"""Shared words of a unit: commands posted, commands done, whether it sleeps, and, of unit 0, whether it waits for a byte."""
STOPPED, STATUS, LENGTH = range(3)
"""Shared words of a slot: whether its pass is stopped, its outcome, and the length of the command."""
MADE, GAVE_UP = 1, 2
STARTED, READY, ENDED = range(3)
"""Times of a slot: when the command was read, when its missing rows were copied, and when its pass ended."""
NAP = 0.1  # seconds after which a sleeper polls again, in case a byte was lost


class MissingRows(NamedTuple):
    """Rows [start, stop) of layers [low, high) that a unit lacks and that `source` has or will have.

    `since` holds, for each layer, the pass of the source that completes them; empty if they are complete.
    """

    source: int
    low: int
    high: int
    start: int
    stop: int
    since: tuple[int, ...] = ()


class Command(NamedTuple):
    """A pass that a unit shall make."""

    serial: int
    tokens: tuple[int, ...]
    at: int
    first: int
    last: int
    heads: int
    state: Any
    """If `first` is above 0: the number of this unit's pass to resume, or in the main process the hidden states."""
    pieces: tuple[MissingRows, ...]
    tags_checksum: int
    """Checksum of the passes that made the rows that it sees: `tags_checksum`."""
    announces_layers: bool = True
    """Whether other units may wait for its rows, layer by layer."""
    tree: tuple[int, ...] = ()
    """Parents of several hypotheses, as in `model.steps.Forward`. Their rows are adjacent, from position `at` on."""


class Board:
    """Shared memory that does not depend on the model: counters, commands and times of each unit."""

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
    """Shared memory of a model's state; the rows of a unit are on the unit's device.

    `rows`: per unit, shape (layers, 2, 1, key-value heads, capacity, head_dim), keys and then values. `states`: hidden states after
    the last layer of a unit's last pass, on the device of unit 0, shape (units, capacity, hidden). `logits`: (units, vocabulary),
    on the host, so that a read of another unit's logits does not wait for unit 0. `tags`: (units, layers, capacity), the pass that
    made each row. `stamps`: (units, layers), the unit's last pass that completed this layer. `marks`: on a GPU, the event of that
    completion.
    """

    def __init__(self, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        import torch

        self.tensors = rows, tensors
        self.rows = rows
        self.states, self.logits, tags, stamps, marks = tensors
        self.bits: list[NDArray[Any]] = []
        """The rows as whole numbers if they are in host memory: a few rows are copied five times as fast this way."""
        if rows[0].device.type == "cpu":
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows[0].element_size()]
            self.bits = [each.view(whole).numpy() for each in rows]
        self.tags: NDArray[np.int64] = tags.numpy()
        self.stamps: NDArray[np.int64] = stamps.numpy()
        self.marks: NDArray[np.int64] = marks.numpy()
        self.capacity = self.tags.shape[2]

    @classmethod
    def allocate(cls, decoder: Decoder, units: int, capacity: int, devices: Sequence[str] = ()) -> SharedState:
        """Allocate the state of `units` units and `capacity` positions, with each unit's rows on its device."""
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
        """Copy rows of these layers and positions from one unit to another; on GPUs the copy is only launched."""
        if self.bits:
            self.bits[to][layers, ..., into, :] = self.bits[source][layers, ..., of, :]
        else:
            self.rows[to][layers, ..., into, :].copy_(self.rows[source][layers, ..., of, :], non_blocking=True)


def _shared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros in anonymous shared memory, which disappears with its last process."""
    import torch

    found: Any = torch.zeros(shape, dtype=dtype, device=device)
    result: Tensor = found.share_memory_()
    return result


def shape_of_rows(decoder: Decoder) -> tuple[int, int]:
    """Return the number and the size of key-value heads, from a trial pass."""
    rows = decoder.rows()
    decoder.run((0,), 0, LayerSpan(0, decoder.layers), rows)
    shapes = {each.shape for layer in rows.layers for each in (layer.keys, layer.values) if each is not None}
    if len({(heads, size) for _, heads, _, size in shapes}) != 1:
        raise CacheError(f"{decoder.name}: layers hold keys and values of unequal shapes, which cannot lie in one buffer")
    _, heads, _, size = shapes.pop()
    return heads, size


def tags_checksum(tags: bytes) -> int:
    """Return one number for the passes that made rows: the checksum of their tags' bytes, shape (layers, positions).

    >>> one, other = np.array([[3, 4], [3, 4]]), np.array([[3, 4], [4, 3]])
    >>> tags_checksum(one.tobytes()) == tags_checksum(one.copy().tobytes()) != tags_checksum(other.tobytes())
    True
    """
    return zlib.crc32(tags)


class SharedRows(LayerRows):
    """One layer's rows in the unit's buffer, which never grows."""

    def _move(self, like: Tensor, end: int, initialized: bool = False) -> None:
        raise CacheError(f"rows up to position {end} do not fit the shared buffer")


class Unit:
    """A replica that works on the rows of its unit; in the main process unit 0."""

    def __init__(self, number: int, decoder: Decoder, memory: SharedState, order: Order | None = None) -> None:
        self.number, self.decoder, self.memory = number, decoder, memory
        self.order = Order() if order is None else order
        self.rows = KvRows(0)
        self.tags, self.stamps = memory.tags[number], memory.stamps[number]
        self.fence, self.parent = threading.Lock(), os.getppid()
        self.last_pass = 0
        self.states: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """Begin a new sequence with empty rows in the unit's buffer."""
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
        """Make a pass; return the states after its last layer, shape (width, hidden). On a GPU the pass is only launched: see
        `finish`.

        Between layers it checks `stopped` and calls `meanwhile`. `ready` is called when the rows that exist at the beginning are
        copied.
        """
        serial, tokens, at, first, last, _, state, pieces, checksum, followed, tree = command
        end = at + len(tokens)
        later = self._fetch(pieces)
        if ready is not None:
            ready()
        for rows in self.rows.layers[first:last]:
            rows.length = at
        tags, stamps = self.tags, self.stamps
        tags[first:last, at:end] = 0  # made by no pass, until they are written

        def between(layer: int) -> None:
            if stopped is not None and stopped():
                raise gpu_ordering.PassStopped
            if layer > first:
                self.order.mark(layer - 1, layer)
                self.order.limit_ahead(stopped, meanwhile)
            if followed and layer > first:
                tags[layer - 1, at:end] = serial
                with self.fence:  # a barrier: rows and tags are written before the stamp
                    stamps[layer - 1] = serial
            if meanwhile is not None:
                meanwhile()
            for piece in later:
                if piece.low <= layer < piece.high:
                    self._follow(piece, layer, stopped, meanwhile)

        states = self.states if isinstance(state, int) else state
        if first and (states is None or (isinstance(state, int) and state != self.last_pass)):
            raise CacheError(f"unit {self.number} is to go on from pass {state}, but made {self.last_pass} last")
        watched = between if followed or later or stopped is not None or meanwhile is not None else None
        before = states if first else None
        try:
            states = self.decoder.run(tokens, at, LayerSpan(first, last), self.rows, before, between=watched, tree=tree)
        finally:
            self.rows.at, self.rows.attended = None, []  # the next pass finds its rows by position again
        self.order.mark(first, last)
        tags[first:last, at:end] = serial
        with self.fence:
            stamps[first:last] = serial
        self._check(command, checksum)
        self.states, self.last_pass = states, serial
        return states

    def finish(self, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all launched work is done, unless it is stopped."""
        self.order.finish(stopped, meanwhile)

    def _fetch(self, pieces: Sequence[MissingRows]) -> list[MissingRows]:
        """Copy the rows that exist; return those to wait for."""
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
        self.order.wait_for(source, low, high)
        memory.copy(self.number, source, slice(low, high), span, span)
        self.tags[low:high, start:stop] = memory.tags[source, low:high, start:stop]

    def _follow(
        self, piece: MissingRows, layer: int, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None
    ) -> None:
        """Copy one layer's rows as soon as they exist."""
        stamp = memoryview(self.memory.stamps[piece.source])
        until = piece.since[layer - piece.low]
        while stamp[layer] < until:
            if os.getppid() != self.parent or (stopped is not None and stopped()):
                raise gpu_ordering.PassStopped  # also if the process that writes them is gone
            if meanwhile is not None:
                meanwhile()
        self._copy(piece.source, layer, layer + 1, piece.start, piece.stop)

    def _check(self, command: Command, checksum: int) -> None:
        """Raise `CacheError` if the pass saw other rows than the algorithm expects, or if the rows now have another length."""
        serial, tokens, at, first, last, *_ = command
        end = at + len(tokens)
        if tags_checksum(self.tags[first:last, :at].tobytes()) != checksum:
            raise CacheError(f"unit {self.number}: pass {serial} at position {at} saw other rows than it should have")
        for layer in range(first, last):
            held = self.rows.layers[layer].length
            if held != end:
                raise CacheError(f"unit {self.number}: layer {layer} should hold {end} positions, it holds {held}")


def weights_of(decoder: Decoder) -> list[tuple[Any, Any]]:
    """Return all weights of a model, trained heads included, each as (container, name in it)."""
    return [*[(parameter, "data") for parameter in decoder.full.parameters()], *[(decoder.heads, layer) for layer in decoder.heads]]


def share_weights(decoder: Decoder, tensors: Tensor | None = None) -> Tensor:
    """Make a model use weights in shared memory: in `tensors`, which must hold the same weights, or else in new memory.

    Shape (bytes,). Processes on one CPU then share the weights in its cache.
    """
    import torch

    with torch.inference_mode(False):
        containers = weights_of(decoder)
        found = [where.data if name == "data" else where[name] for where, name in containers]
        ends = np.cumsum([-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in found])
        flat = _shared((int(ends[-1]),), torch.uint8, decoder.device) if tensors is None else tensors
        if len(flat) != ends[-1]:
            raise ValueError("the replica has weights of another size")
        for (where, name), tensor, end in zip(containers, found, ends.tolist(), strict=True):
            size = tensor.numel() * tensor.element_size()
            start = end - -(-size // 64) * 64
            own = flat[start : start + size].view(tensor.dtype).view(tensor.shape)
            if tensors is None:
                own.copy_(tensor)
            elif not own.equal(tensor):
                raise ValueError("the replica has other weights")
            if name == "data":
                where.data = own
            else:
                where[name] = own
        return flat


def fingerprint(decoder: Decoder) -> tuple[Any, ...]:
    """Return what equal replicas have in common: sizes, and the first and last number of every tensor."""
    import torch

    with torch.inference_mode():
        some = [parameter.flatten()[[0, -1]].double().tolist() for parameter in decoder.full.parameters()]
        heads = [(layer, head.flatten()[[0, -1]].double().tolist()) for layer, head in decoder.heads.items()]
    return decoder.layers, decoder.vocabulary, some, heads


class Orders(NamedTuple):
    """Settings of a worker."""

    number: int
    units: int
    core: int | None
    spin: float
    device: str = "cpu"


def work(connection: Connection, orders: Orders) -> None:
    """Load models and make passes as the parent requests, until it ends or sends "end": the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    gc.freeze()  # libraries are shared with the fork server: a collection would copy their memory
    if sys.platform == "linux":
        _end_with_parent()
    try:
        import torch

        with torch.inference_mode():
            _Worker(connection, orders).serve()
    except (EOFError, BrokenPipeError, ConnectionError):
        os._exit(1)  # the parent is gone
    except BaseException as error:
        message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        with contextlib.suppress(OSError):
            connection.send(("failed", message))
        os._exit(1)
    os._exit(0)  # nothing is left to do, and torch's shutdown is slow


def _end_with_parent() -> None:
    """Make the system kill this process when its parent ends, even if it is suspended then.

    The parent is the fork server, which ends when the last process closes the pipe to it: this process must not keep it open.
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
        """Process messages and commands in their order."""
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
            with threading.Lock():  # a barrier: the flag is written before the counter is read
                pass
            heard = words[POSTED] > self.taken or not self.connection.poll(NAP) or self._hear()
            words[ASLEEP] = 0
            if not heard:
                return

    def _hear(self) -> bool:
        """Process one message of the pipe; return False for "end"."""
        message = self.connection.recv_bytes()
        if message == b".":  # a wake-up
            return True
        what, *rest = pickle.loads(message)
        match what:
            case "board":
                self.board, self.rings = Board(self.orders.units, rest[0]), gpu_ordering.open_events(rest[1])
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
        gc.freeze()  # no pass shall wait for a collection of long-lived objects

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
        except gpu_ordering.PassStopped:
            self.unit.finish()  # launched work ends first: others that wait for this unit's GPU wait for it
        except CacheError:
            if not slot[STOPPED]:  # a stopped pass may copy rows that were overwritten since
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
