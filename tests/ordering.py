"""A device that runs nothing and remembers all: streams and events in the place of CUDA's, and who has to have waited for whom.

What is launched on one stream is in order; of two streams only what events say is. Every operation of torch is noted with the
elements that it reads and writes, and held against those of other streams: a read must come behind the write that made it, a write
behind all reads and writes of what it replaces, and whoever may be handed memory that was let go of behind all that used it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 32
"""Streams."""
EMPTY = ("aten::new_empty", "aten::empty", "aten::empty_like")
WITHOUT_ACCESS = ("aten::detach_", "aten::lift_fresh")


class Stream:
    """Work in order. `clock` says up to where it comes behind each stream, itself included."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, np.zeros(MOST, np.int64)

    def wait_event(self, event: Event) -> None:
        np.maximum(self.clock, event.clock, out=self.clock)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.clock = np.zeros(MOST, np.int64)
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()
        self.at = self.device.now()

    def query(self) -> bool:
        """Whether it is done: if the device says so, all that is launched from now on comes behind it."""
        done = self.device.done()
        if done:
            np.maximum(self.device.seen, self.clock, out=self.device.seen)
        return done

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Block:
    """Memory: who wrote each element last, and who has read it since."""

    def __init__(self, storage: Any, stream: Stream, size: int) -> None:
        self.ref, self.owner = StorageWeakRef(storage), stream.number
        self.size = size
        self.writer = np.full(size, -1)
        self.written = np.zeros(size, np.int64)
        self.reads = np.zeros((MOST, size), np.int64)

    @property
    def used(self) -> Any:
        """The last use on each stream, shape (streams,)."""
        found = self.reads.max(axis=1, initial=0)
        for stream in {*self.writer.tolist()} - {-1}:
            found[stream] = max(found[stream], self.written[self.writer == stream].max())
        return found


class Device(TorchDispatchMode):
    """In the place of `torch.cuda`; as a context it watches operations. What is wrong is in `races`."""

    def __init__(self, done: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.streams = [Stream(0)]
        self.current = self.streams[0]
        self.done = done
        self.seen = np.zeros(MOST, np.int64)
        """What the processor knows to be done."""
        self.blocks: dict[int, Block] = {}
        self.races: list[str] = []
        self.places: dict[Any, Any] = {}
        self.doing = ""

    # --- what torch.cuda has ---

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
        """Milliseconds: an operation takes one wherever it is."""
        return float(max(stream.clock[stream.number] for stream in self.streams))

    # --- what it sees ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        inputs = [*_tensors(given)]
        written = [
            each for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write for each in _tensors([value])
        ]  # fmt: skip
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in WITHOUT_ACCESS:
            return made
        before = {each.untyped_storage()._cdata for each in inputs}
        new = [each for each in _tensors([made]) if each.untyped_storage()._cdata not in before]
        if not new and not written:
            return made if not _asks(name) else self._seen(name, inputs, made)
        stream = self._launch()
        for each in inputs:
            if not any(each is other for other in written):
                self._read(name, each, stream)
        for each in written:
            self._write(name, each, stream)
        for each in new:
            storage = each.untyped_storage()
            self.blocks[storage._cdata] = Block(storage, stream, storage.nbytes() // each.element_size())
            if name not in EMPTY:
                self._write(name, each, stream)
        return made

    def _seen(self, name: str, inputs: list[Any], made: Any) -> Any:
        stream = self._launch()
        for each in inputs:
            self._read(name, each, stream)
        return made

    def excused(self) -> set[int]:
        """Streams whose work is for nothing from here on: what they read may change under them."""
        return set()

    def _launch(self) -> Stream:
        stream = self.current
        np.maximum(stream.clock, self.seen, out=stream.clock)
        stream.clock[stream.number] += 1
        self.freed(stream)
        return stream

    def freed(self, stream: Stream) -> None:
        """What this stream is launched next may be handed memory of its own that nobody holds any more."""
        for key in [key for key, block in self.blocks.items() if block.ref.expired()]:
            block = self.blocks[key]
            if block.owner == stream.number:
                late = np.flatnonzero(block.used > stream.clock)
                if late.size:
                    self.races.append(f"{self.doing}: stream {stream.number} uses memory again that {late.tolist()} still use")
                del self.blocks[key]

    def _elements(self, tensor: Any) -> Any:
        key = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        if key not in self.places:
            found = np.full((1,) * len(key[0]), key[2])
            for axis, (size, stride) in enumerate(zip(*key[:2], strict=True)):
                found = found + stride * np.arange(size).reshape([-1 if axis == each else 1 for each in range(len(key[0]))])
            self.places[key] = found.ravel()
        return self.places[key]

    def _read(self, name: str, tensor: Any, stream: Stream) -> None:
        block = self.blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return  # there before: weights
        places = self._elements(tensor)
        writer = block.writer[places]
        if (writer < 0).any():
            self.races.append(f"{self.doing}: {name} on stream {stream.number} reads what nobody has written")
        late = {*writer[block.written[places] > stream.clock[writer]].tolist()}
        if late:
            self.races.append(f"{self.doing}: {name} on stream {stream.number} reads what {late} may have yet to write")
        block.reads[stream.number, places] = stream.clock[stream.number]

    def _write(self, name: str, tensor: Any, stream: Stream) -> None:
        block = self.blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return
        places = self._elements(tensor)
        writer = block.writer[places]
        late = {*writer[(writer >= 0) & (block.written[places] > stream.clock[writer])].tolist()}
        late |= {*np.flatnonzero((block.reads[:, places] > stream.clock[:, None]).any(axis=1)).tolist()} - self.excused()
        if late:
            self.races.append(f"{self.doing}: {name} on stream {stream.number} replaces what {late} may still use")
        block.writer[places], block.written[places] = stream.number, stream.clock[stream.number]
        block.reads[:, places] = 0


def _asks(name: str) -> bool:
    return name in ("aten::_local_scalar_dense", "aten::item", "aten::equal")


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
