"""Happens-before checker for CUDA streams: a fake device with streams and events that records all operations of torch.

Work on one stream is in order; between streams only events impose an order. Each operation is recorded with the elements that it
reads and writes, and compared with those of other streams: a read must come after the write of its value, a write after all reads
and writes of the value that it replaces, and freed memory may be reused only after all its uses.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_STREAMS = 32
"""Most streams."""
UNINITIALISED = ("aten::new_empty", "aten::empty", "aten::empty_like")
WITHOUT_ACCESS = ("aten::detach_", "aten::lift_fresh")
WAITS_FOR_RESULT = ("aten::_local_scalar_dense", "aten::item", "aten::equal")


class Stream:
    """A stream of ordered work; `clock` is a vector clock: the work of each stream that precedes it, including its own."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, np.zeros(MAX_STREAMS, np.int64)

    def wait_event(self, event: Event) -> None:
        np.maximum(self.clock, event.clock, out=self.clock)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.clock = np.zeros(MAX_STREAMS, np.int64)
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()
        self.at = self.device.now()

    def query(self) -> bool:
        """Return whether the event is done; if so, all later launches come after it."""
        done = self.device.done()
        if done:
            np.maximum(self.device.finished, self.clock, out=self.device.finished)
        return done

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Block:
    """A block of memory: the last writer of each element, and its readers since then."""

    def __init__(self, key: int, ref: _Ref, stream: Stream, size: int) -> None:
        self.key, self.ref, self.owner = key, ref, stream.number
        self.size = size
        self.one_stream = True
        """Whether only its owner has used it; the work of one stream is in order."""
        self.fully_written = False
        """Whether all of it has been written at once."""
        self.writer = np.full(size, -1)
        self.written = np.zeros(size, np.int64)
        self.reads: defaultdict[int, Any] = defaultdict(lambda: np.zeros(size, np.int64))

    @property
    def used(self) -> Any:
        """Last use on each stream, shape (streams,)."""
        found = np.zeros(MAX_STREAMS, np.int64)
        for stream, times in self.reads.items():
            found[stream] = times.max(initial=0)
        for stream in {*self.writer.tolist()} - {-1}:
            found[stream] = max(found[stream], self.written[self.writer == stream].max())
        return found


class _Ref(weakref.ref[Any]):
    """Weak reference that remembers the address of freed memory."""

    __slots__ = ("key",)
    key: int


class _Kind(NamedTuple):
    """Effects of an operation on its operands."""

    name: str
    access: bool
    """Whether it reads or writes memory at all."""
    waits: bool
    """Whether the processor waits for the result."""
    initialises: bool
    """Whether the result is initialised."""
    writes: tuple[int, ...]
    """Operands that it writes."""


@cache
def _kind(func: Any) -> _Kind:
    name, arguments = func._schema.name, func._schema.arguments
    writes = tuple(
        index for index, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Kind(name, name not in WITHOUT_ACCESS, name in WAITS_FOR_RESULT, name not in UNINITIALISED, writes)


class Device(TorchDispatchMode):
    """Replacement of `torch.cuda`; as a context it records operations. `races` lists the errors."""

    def __init__(self, done: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.streams = [Stream(0)]
        self.current = self.streams[0]
        self.done = done
        self.finished = np.zeros(MAX_STREAMS, np.int64)
        """Work that the processor knows to be done."""
        self.blocks: dict[int, Block] = {}
        """Blocks by address."""
        self.freed_refs: deque[_Ref] = deque()
        """Freed memory, in order."""
        self.freed_blocks: defaultdict[int, list[Block]] = defaultdict(list)
        """Blocks freed since the last launch on their stream that other streams have used too, by stream."""
        self.races: list[str] = []
        self.operation = ""

    # --- Interface of torch.cuda ---

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def now(self) -> float:
        """Time [ms]: every operation takes one."""
        return float(max(stream.clock[stream.number] for stream in self.streams))

    # --- Recorded operations ---

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch needs no guard for each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [*_tensors(args), *_tensors((kwargs or {}).values())]
        return self.record_dispatch(func, args, kwargs or {}, inputs, [_memory(each) for each in inputs])

    def record_dispatch(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], keys: list[int]) -> Any:
        """Run an operation with the tensors `inputs` in the memory `keys`, and record its reads and writes."""
        kind = _kind(func)
        result = func(*args, **kwargs)
        if not kind.access:
            return result
        new = [(each, key) for each in _tensors((result,)) if (key := _memory(each)) not in keys]
        written = [each for index in kind.writes if index < len(args) for each in _tensors((args[index],))]
        if not (new or written or kind.waits):
            return result
        stream = self._launch()
        for each, key in zip(inputs, keys, strict=True):
            if not any(each is other for other in written):
                self._read(kind.name, each, key, stream)
        for each in written:
            self._write(kind.name, each, _memory(each), stream)
        for each, key in new:
            storage = each.untyped_storage()
            ref = _Ref(storage, self.freed_refs.append)
            ref.key = key
            self.blocks[key] = Block(key, ref, stream, storage.nbytes() // each.element_size())
            if kind.initialises:
                self._write(kind.name, each, key, stream)
        return result

    def ignored_streams(self) -> set[int]:
        """Streams whose results are discarded from here on, so their inputs may change."""
        return set()

    def _launch(self) -> Stream:
        stream = self.current
        np.maximum(stream.clock, self.finished, out=stream.clock)
        stream.clock[stream.number] += 1
        self.check_freed(stream)
        return stream

    def check_freed(self, stream: Stream) -> None:
        """Check the freed memory of this stream, which its next launch may reuse."""
        while self.freed_refs:
            ref = self.freed_refs.popleft()
            block = self.blocks.get(ref.key)
            if block is not None and block.ref is ref:
                del self.blocks[ref.key]
                if not block.one_stream:
                    self.freed_blocks[block.owner].append(block)
        for block in self.freed_blocks.pop(stream.number, ()):
            late = np.flatnonzero(block.used > stream.clock)
            if late.size:
                self.races.append(f"{self.operation}: stream {stream.number} uses memory again that {late.tolist()} still use")

    def _read(self, name: str, tensor: Any, key: int, stream: Stream) -> None:
        block = self.blocks.get(key)
        if block is None:
            return  # allocated before: weights
        elements, number = _elements(tensor), stream.number
        if not block.fully_written and (block.writer[elements] < 0).any():
            self.races.append(f"{self.operation}: {name} on stream {number} reads unwritten memory")
        if not block.one_stream or block.owner != number:
            block.one_stream = False
            writer = block.writer[elements]
            late = {*writer[block.written[elements] > stream.clock[writer]].tolist()}
            if late:
                self.races.append(f"{self.operation}: {name} on stream {number} reads what {late} may have yet to write")
        block.reads[number][elements] = stream.clock[number]

    def _write(self, name: str, tensor: Any, key: int, stream: Stream) -> None:
        block = self.blocks.get(key)
        if block is None:
            return
        elements, number = _elements(tensor), stream.number
        if not block.one_stream or block.owner != number:
            block.one_stream = False
            writer = block.writer[elements]
            late = {*writer[(writer >= 0) & (block.written[elements] > stream.clock[writer])].tolist()}
            readers = {each for each, times in block.reads.items() if (times[elements] > stream.clock[each]).any()}
            late |= readers and readers - self.ignored_streams()
            if late:
                self.races.append(f"{self.operation}: {name} on stream {number} replaces what {late} may still use")
        block.writer[elements], block.written[elements] = number, stream.clock[number]
        block.fully_written = block.fully_written or (isinstance(elements, slice) and elements == slice(0, block.size))
        for times in block.reads.values():
            times[elements] = 0


def _elements(tensor: Any) -> Any:
    """Indices of a tensor's elements in its memory, sorted, or a slice if they are contiguous."""
    if tensor.is_contiguous():
        start = tensor.storage_offset()
        return slice(start, start + tensor.numel())
    return _scattered(tensor.shape, tensor.stride(), tensor.storage_offset())


@lru_cache(maxsize=4096)
def _scattered(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Any:
    found = np.full((1,) * len(shape), offset)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        found = found + step * np.arange(size).reshape([-1 if axis == each else 1 for each in range(len(shape))])
    elements = np.unique(found)
    return slice(int(elements[0]), int(elements[-1]) + 1) if np.ptp(elements) + 1 == elements.size else elements


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
