"""Worker processes as threads on fake GPUs: `tests.support.happens_before` checks every operation of each.

Each thread has a separate stream, like each process on its GPU. Tensors sent through pipes are passed as they are, so all threads
share the memory, and a read that is not ordered after another stream's write is detected.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.loading.replicas import Replica
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import worker_loop, worker_pool
from tests.support import happens_before

SENT_OBJECTS: dict[int, Any] = {}
"""Objects on their way through a pipe."""


class Cuda(happens_before.Device):
    """Replacement of `torch.cuda`: several GPUs, with a separate stream for each thread."""

    def __init__(self, done: Any) -> None:
        self.local = threading.local()
        super().__init__(done)
        self.lock = threading.RLock()
        self.stream_of_thread: dict[str, Any] = {}
        """Stream of each thread, by name."""
        self.device_of_thread: dict[str, str] = {}
        """GPU of each thread, by name."""
        self.board: Any = None
        self.host: set[int] = set()
        """Memory of the processor; operations on it wait."""
        self.events: dict[bytes, Any] = {}
        cuda = self

        class Event(happens_before.Event):
            def __init__(self, interprocess: bool = False) -> None:
                assert interprocess
                super().__init__(cuda)
                self.gpu = cuda.local.device

            def ipc_handle(self) -> bytes:
                name = str(id(self)).encode()
                cuda.events[name] = self
                return name

            def record(self, stream: Any) -> None:
                with cuda.lock:
                    super().record(stream)

            def query(self) -> bool:
                time.sleep(0)  # let other threads run
                with cuda.lock:
                    return super().query()

            @staticmethod
            def from_ipc_handle(device: torch.device, name: bytes) -> happens_before.Event:
                assert str(device) == cuda.events[name].gpu
                return cuda.events[name]

        self.Event: Any = Event

    @property
    def current(self) -> Any:
        if not hasattr(self.local, "stream"):
            with self.lock:
                self.local.stream = Stream(len(self.streams), self)
                self.streams.append(self.local.stream)
                self.stream_of_thread[threading.current_thread().name] = self.local.stream
        return self.local.stream

    @current.setter
    def current(self, stream: Any) -> None:
        """Ignore the initial stream of `happens_before.Device`."""

    def record_dispatch(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], keys: list[int]) -> Any:
        """See `happens_before.Device`."""
        on_host = [key in self.host for key in keys]
        if on_host and all(on_host):
            result = func(*args, **kwargs)
            self.host.update(map(happens_before._memory, happens_before._tensors((result,))))
            return result
        result = super().record_dispatch(func, args, kwargs, inputs, keys)
        if self.host:
            self.host -= {happens_before._memory(each) for each in happens_before._tensors((result,))} - {*keys}
        if any(on_host):
            self.current.synchronize()
        return result

    def mark_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor as lying in the processor's memory."""
        key = tensor.untyped_storage()._cdata
        self.host.add(key)
        self.blocks.pop(key, None)
        return tensor

    def ignored_streams(self) -> set[int]:
        """Streams of stopped passes that are still running: their results are not used."""
        found = set()
        for name, stream in self.stream_of_thread.items():
            if name.startswith("unit "):
                unit = int(name[5:])
                done = self.board.words[unit][worker_loop.DONE]
                running = self.board.words[unit][worker_loop.POSTED] > done
                if running and self.board.slots[unit][done % worker_loop.SLOTS][worker_loop.STOPPED]:
                    found.add(stream.number)
        return found

    @contextlib.contextmanager
    def device(self, device: str) -> Iterator[None]:
        self.local.device = device
        yield

    def set_device(self, device: str) -> None:
        self.device_of_thread[threading.current_thread().name] = device

    def device_count(self) -> int:
        return 2

    def synchronize(self, device: str) -> None:
        self.current.synchronize()


class Stream(happens_before.Stream):
    """A stream that a process can wait for."""

    def __init__(self, number: int, cuda: Cuda) -> None:
        super().__init__(number)
        self.cuda = cuda

    def wait_event(self, event: Any) -> None:
        with self.cuda.lock:
            super().wait_event(event)

    def synchronize(self) -> None:
        with self.cuda.lock:
            np.maximum(self.cuda.finished, self.clock, out=self.cuda.finished)


class SharedDispatchMode(TorchDispatchMode):
    """Dispatch mode of one thread for a device that all threads share."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.cuda.lock:
            return self.cuda.__torch_dispatch__(func, types, args, kwargs)


class PipeEnd:
    """One end of a pipe."""

    def __init__(self, lock: Any) -> None:
        self.other: PipeEnd
        self.lock = lock
        self.arrived = threading.Condition()
        self.messages: deque[bytes] = deque()
        self.closed = False

    def send(self, what: Any) -> None:
        with self.lock:
            what = detached(what)
        SENT_OBJECTS[id(what)] = what
        self.send_bytes(pickle.dumps(ObjectKey(id(what))))

    def send_bytes(self, message: bytes) -> None:
        if self.other.closed:
            raise BrokenPipeError
        with self.other.arrived:
            self.other.messages.append(message)
            self.other.arrived.notify()

    def poll(self, timeout: float = 0.0) -> bool:
        with self.arrived:
            if not self.messages and timeout:
                self.arrived.wait(timeout)
            return bool(self.messages)

    def recv_bytes(self) -> bytes:
        with self.arrived:
            while not self.messages:
                self.arrived.wait(1)
            return self.messages.popleft()

    def close(self) -> None:
        self.closed = True


class ObjectKey:
    """Key of an object; unpickling returns the object itself."""

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> Any:
        return object_of_key, (self.key,)


def detached(what: Any) -> Any:
    """Copy the tensor objects, but not their memory: threads must not share a tensor object."""
    if isinstance(what, torch.Tensor):
        return what.detach()
    return type(what)(detached(each) for each in what) if type(what) in (list, tuple) else what


def object_of_key(key: int) -> Any:
    """Return the object that was sent."""
    return SENT_OBJECTS[key]


class Worker(worker_loop._Worker):
    """A worker that receives messages under a lock, because torch's first use of an operation is not thread-safe."""

    def __init__(self, connection: Any, orders: Any, cuda: Cuda) -> None:
        self.cuda = cuda
        super().__init__(connection, orders)

    def _hear(self) -> bool:
        while not self.connection.poll(1):
            pass
        with self.cuda.lock:
            return super()._hear()


class Thread(threading.Thread):
    """Replacement of a process."""

    pid, exitcode = 1, None
    failed: BaseException | None = None

    def __init__(self, target: Any, args: Any, daemon: bool, name: str, cuda: Cuda) -> None:
        super().__init__(daemon=True, name=name)
        self.arguments, self.cuda = args, cuda

    def run(self) -> None:
        try:
            with SharedDispatchMode(self.cuda), torch.inference_mode():
                Worker(*self.arguments, self.cuda).serve()
        except BaseException as error:  # reported by the main thread
            self.arguments[0].send(("failed", f"{type(error).__name__}: {error}"))

    def kill(self) -> None:
        """A thread cannot be killed, so it receives the message `end`."""
        with contextlib.suppress(BrokenPipeError):
            self.arguments[0].other.send(("end",))
        self.join(10)
        assert not self.is_alive(), f"{self.name} hangs"

    def close(self) -> None:
        pass


class Context:
    """Replacement of the context of `multiprocessing`."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def Pipe(self) -> tuple[PipeEnd, PipeEnd]:  # noqa: N802
        near, far = PipeEnd(self.cuda.lock), PipeEnd(self.cuda.lock)
        near.other, far.other = far, near
        return near, without_close(far)

    def Process(self, **arguments: Any) -> Thread:  # noqa: N802
        return Thread(**arguments, cuda=self.cuda)


def without_close(end: PipeEnd) -> PipeEnd:
    """Keep an end open that the main process would close after the other process has received it."""
    end.close = lambda: None  # type: ignore[method-assign]
    return end


class DeviceOnlyState(worker_loop.SharedState):
    """Shared state that the processor cannot access."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bits = []


@contextlib.contextmanager
def workers_as_threads(patch: Any, done: Any = lambda: True) -> Iterator[Cuda]:
    """Run workers on GPUs as threads; `patch` is pytest's monkeypatch."""
    cuda = Cuda(done)
    load = Replica.load

    def wait(ends: Any, timeout: float) -> None:
        until = time.monotonic() + timeout
        while time.monotonic() < until and not any(end.poll() for end in ends):
            time.sleep(1e-4)

    patch.setattr(gpu_ordering, "cuda", lambda: cuda)
    patch.setattr(worker_pool, "context_of_workers", lambda: Context(cuda))
    patch.setattr(worker_pool, "connection", type("Waits", (), {"wait": staticmethod(wait), "Connection": PipeEnd}))

    def shared(shape: Any, dtype: Any, device: Any = "cpu") -> torch.Tensor:
        result = torch.zeros(shape, dtype=dtype)
        return cuda.mark_on_host(result) if isinstance(device, str) and device == "cpu" else result

    patch.setattr(worker_loop, "_shared", shared)
    patch.setattr(worker_loop, "SharedState", DeviceOnlyState)
    patch.setattr(worker_pool, "SharedState", DeviceOnlyState)

    def loaded(self: Replica) -> Any:
        with cuda.lock:  # random weights come from one generator for all threads
            return load(replace(self, device="cpu"))

    class Board(worker_loop.Board):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            cuda.board = self

    patch.setattr(worker_pool, "Board", Board)
    patch.setattr(Replica, "load", loaded)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads that poll a counter let others run
    try:
        with SharedDispatchMode(cuda):
            yield cuda
    finally:
        sys.setswitchinterval(before)
        SENT_OBJECTS.clear()
