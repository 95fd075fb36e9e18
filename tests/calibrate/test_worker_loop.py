"""A worker process: its passes, its messages, and its end."""

from __future__ import annotations

import itertools
import os
import pickle
from collections import deque
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.loading.replicas import Replica
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import worker_loop
from calibrate.workers.worker_loop import (
    DONE,
    LENGTH,
    MADE,
    SLOTS,
    STATUS,
    STOPPED,
    Board,
    Command,
    Orders,
    SharedState,
)
from model.steps import CacheError, LayerSpan
from tests.support import real_models
from tests.support.workers import tiny_replica

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = real_models.DEPTHS["target"]


def test_shared_weights_are_aligned_to_64_bytes() -> None:
    decoder = tiny_replica("llama").load()
    decoder.heads[2] = torch.arange(29 * 16, dtype=torch.float64).view(29, 16)
    decoder.heads[3] = torch.ones(29 * 8, 16, dtype=torch.float64)
    before = [where.data.clone() if name == "data" else where[name].clone() for where, name in worker_loop.weights_of(decoder)]
    flat = worker_loop.share_weights(decoder)
    now = [where.data if name == "data" else where[name] for where, name in worker_loop.weights_of(decoder)]
    start = flat.data_ptr()
    assert all(one.equal(other) for one, other in zip(before, now, strict=True))
    assert all((each.data_ptr() - start) % 64 == 0 for each in now)
    ends = list(itertools.accumulate(-(-each.numel() * 8 // 64) * 64 for each in now))
    assert [each.data_ptr() - start for each in now] == [0, *ends[:-1]]
    assert (len(flat), flat.dtype) == (ends[-1], torch.uint8)
    assert worker_loop.fingerprint(decoder)[:2] == (LAYERS, 29)
    assert worker_loop.fingerprint(decoder)[3] == [(2, [0.0, 29.0 * 16 - 1]), (3, [1.0, 1.0])]
    assert len(worker_loop.fingerprint(decoder)[2]) == len(now) - 2
    rows: Any = decoder.rows()
    decoder.run((0,), 0, LayerSpan(0, LAYERS), rows)
    rows.layers[0].keys = rows.layers[0].keys[..., :2]
    decoder.rows, decoder.run = lambda: rows, lambda *_: None  # type: ignore[method-assign,assignment]
    with pytest.raises(CacheError, match="layers hold keys and values of unequal shapes, which cannot lie in one buffer"):
        worker_loop.shape_of_rows(decoder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_every_dtype_are_copied_exactly(dtype: torch.dtype) -> None:
    """As whole numbers of their size, for all units and positions."""
    shape = (2, 2, 1, 3, 8, 4)
    rows = [torch.randn(shape).to(dtype), torch.zeros(shape, dtype=dtype)]
    counts = [torch.zeros(2, 2, 8, dtype=torch.int64), *(torch.zeros(2, 2, dtype=torch.int64) for _ in range(2))]
    memory = SharedState(rows, [torch.zeros(1), torch.zeros(1), *counts])
    assert memory.capacity == 8
    memory.copy(1, 0, slice(1, 2), slice(2, 4), slice(5, 7))
    assert rows[1][1, ..., 2:4, :].equal(rows[0][1, ..., 5:7, :])
    assert rows[1].count_nonzero() == rows[1][1, ..., 2:4, :].count_nonzero() > 0
    decoder = real_models.decoders("llama", dtype="float32")["target"]
    found = SharedState.allocate(decoder, 3, 10)
    assert [tuple(each.shape) for each in found.rows] == [(LAYERS, 2, 1, 2, 10, 4)] * 3
    assert [tuple(each.shape) for each in found.tensors[1]] == [(3, 10, 16), (3, 29), (3, LAYERS, 10), (3, LAYERS), (3, LAYERS)]
    assert {each.dtype for each in (*found.rows, *found.tensors[1][:2])} == {torch.float32}
    assert all(each.is_shared() for each in (*found.rows, *found.tensors[1]))


class Left(BaseException):
    """Stands in for the end of a process."""


@pytest.mark.parametrize(("happens", "code", "said"), [
    (None, 0, None), (EOFError(), 1, None), (BrokenPipeError(), 1, None), (ConnectionResetError(), 1, None),
    (ValueError("too\nmany"), 1, ("failed", "ValueError: too")), (KeyError(), 1, ("failed", "KeyError: ")),
])  # fmt: skip
def test_worker_reports_why_it_ends(happens: BaseException | None, code: int, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Worker:
        def __init__(self, *given: Any) -> None:
            done.append(given)

        def serve(self) -> None:
            assert torch.is_inference_mode_enabled()
            if happens is not None:
                raise happens

    def leave(code: int) -> None:
        done.append(code)
        raise Left

    monkeypatch.setattr(worker_loop, "_Worker", Worker)
    monkeypatch.setattr(worker_loop.signal, "signal", lambda *what: done.append(what))
    monkeypatch.setattr(worker_loop.gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(worker_loop, "_end_with_parent", lambda: done.append("ends"))
    monkeypatch.setattr(worker_loop.os, "_exit", leave)
    end: Any = SimpleNamespace(send=done.append)
    orders = Orders(1, 2, None, 0.0)
    with pytest.raises(Left):
        worker_loop.work(end, orders)
    expected = [(worker_loop.signal.SIGINT, worker_loop.signal.SIG_IGN), "frozen", "ends", (end, orders)]
    assert done == [*expected, *([] if said is None else [said]), code]


def test_worker_ends_with_its_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system kills it when the server ends, and it does not keep the server alive."""
    import ctypes

    closed, asked = list[int](), list[Any]()
    monkeypatch.setattr(worker_loop.os, "close", closed.append)
    monkeypatch.setattr(forkserver, "_forkserver", server := SimpleNamespace(_forkserver_alive_fd=77))
    system = SimpleNamespace(prctl=lambda *what: asked.append(what))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: system)
    worker_loop._end_with_parent()
    assert (closed, server._forkserver_alive_fd) == ([77], None)
    worker_loop._end_with_parent()
    assert closed == [77]
    assert asked == [(1, 9, 0, 0, 0)] * 2

class Pipe:
    """The worker's end of a pipe, with its incoming and outgoing messages."""

    def __init__(self, *told: Any) -> None:
        self.told = deque(each if isinstance(each, bytes) else pickle.dumps(each) for each in told)
        self.said: list[Any] = []
        self.send = self.send_bytes = self.said.append
        self.naps: list[float] = []

    def recv_bytes(self) -> bytes:
        return self.told.popleft()

    def poll(self, nap: float) -> bool:
        self.naps.append(nap)
        return bool(self.told)


def working(monkeypatch: pytest.MonkeyPatch, kind: str = "llama", **orders: Any) -> tuple[Any, Any, Any, SharedState]:
    """Return a worker with a board and a model, its pipe, the board, and the main process's memory."""
    monkeypatch.setattr(Replica, "load", lambda self: real_models.decoders(self.model)["target"])
    monkeypatch.setattr(worker_loop.gc, "freeze", lambda: None)
    end: Any = Pipe()
    worker = worker_loop._Worker(end, Orders(1, 2, None, 0.0, **orders))
    assert end.said.pop() == ("up", os.getpid())
    board, memory = Board(2), SharedState.allocate(real_models.decoders(kind)["target"], 2, 16)
    whole_ = pickle.loads

    def found(said: bytes) -> Any:
        what = whole_(said)
        return HANDED[what] if isinstance(what, int) else what

    monkeypatch.setattr(pickle, "loads", found)
    source = (5, 6) if kind == "t5" else ()
    HANDED.update({0: ("board", board.tensors, []), 1: ("load", Replica(kind), memory.tensors, source, None)})
    end.told += [pickle.dumps(0), pickle.dumps(1)]
    assert worker._hear()
    assert end.said == []
    assert worker._hear()
    assert end.said.pop() == ("load", worker_loop.fingerprint(worker.unit.decoder))
    return worker, end, board, memory


HANDED: dict[int, Any] = {}
"""Objects that go through the pipes of this process, unpickled."""


def told(board: Board, place: int, count: int, command: Command, stopped: int = 0) -> None:
    """Post a pass as the main process does."""
    said = pickle.dumps(command)
    slot = board.slots[1][place]
    board.boxes[1][place][: len(said)] = said
    slot[STOPPED], slot[STATUS], slot[LENGTH] = stopped, 0, len(said)
    board.words[1][worker_loop.POSTED] = count


def test_worker_makes_posted_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, end, board, memory = working(monkeypatch)
    decoder = real_models.decoders("llama")["target"]
    states = decoder.run((3, 4), 0, LayerSpan(0, LAYERS), decoder.rows())
    now = iter(range(10, 100))
    monkeypatch.setattr(worker_loop, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    believed = worker_loop.tags_checksum(b"")
    with torch.inference_mode():
        for heads, place in ((1, 0), (0, 1)):
            told(board, place, place + 1, Command(7 + place, (3, 4), 0, 0, LAYERS, heads, None, (), believed))
            worker._pass()
            assert (board.slots[1][place][STATUS], board.words[1][DONE], worker.taken) == (MADE, place + 1, place + 1)
        assert memory.states[1, :2].equal(states)
        assert memory.logits[1].equal(decoder.logits(states[-1:], LAYERS)[0])
        memory.logits[1] = 0
        # Started, ready once its rows exist, and ended.
        assert [tuple(board.times[1][place])[:3] for place in (0, 1)] == [(10.0, 11.0, 12.0), (13.0, 14.0, 15.0)]
        assert end.said == []
        board.words[0][worker_loop.LISTENING] = 1
        finished: list[Any] = []
        monkeypatch.setattr(worker.unit, "finish", lambda *how: finished.append(how))
        told(board, 2, 3, Command(9, (3, 4), 0, 0, LAYERS, 0, None, (), believed), stopped=1)
        worker._pass()  # the pass is stopped
        assert (board.slots[1][2][STATUS], board.words[1][DONE], finished) == (worker_loop.GAVE_UP, 3, [])
        assert end.said == [b"."]
        # Stopped in the middle, or after rows that were overwritten meanwhile: launched work is finished.
        for happens in (gpu_ordering.PassStopped(), CacheError("rows are others")):

            def making(command: Command, stopped: Any, meanwhile: Any, ready: Any, happens: Any = happens) -> None:
                assert not stopped()
                assert meanwhile is None
                ready()
                board.slots[1][worker.taken % SLOTS][STOPPED] = 1
                assert stopped()
                raise happens

            monkeypatch.setattr(worker.unit, "make", making)
            told(board, worker.taken % SLOTS, worker.taken + 1, Command(9, (3,), 0, 0, LAYERS, 0, None, (), believed))
            worker._pass()
            assert finished.pop() == ()
            assert board.slots[1][(worker.taken - 1) % SLOTS][STATUS] == worker_loop.GAVE_UP
        assert worker.taken == board.words[1][DONE] == 5

        def defect(*_: Any) -> None:
            raise CacheError("of ours")

        monkeypatch.setattr(worker.unit, "make", defect)
        told(board, 5 % SLOTS, 6, Command(9, (3,), 0, 0, LAYERS, 0, None, (), believed))
        with pytest.raises(CacheError, match="of ours"):
            worker._pass()


def test_idle_worker_sleeps_and_ends_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, end, board, _ = working(monkeypatch)
    made: list[int] = []

    def pass_() -> None:
        made.append(worker.taken)
        worker.taken += 1

    monkeypatch.setattr(worker, "_pass", pass_)
    board.words[1][worker_loop.POSTED] = 2
    waited = end.poll

    def poll(nap: float) -> bool:
        assert board.words[1][worker_loop.ASLEEP] == 1
        if len(end.naps) == 1:
            end.told.append(b".")  # a posted pass wakes it
            board.words[1][worker_loop.POSTED] = 3
        if len(end.naps) == 2:
            end.told.append(pickle.dumps(("end",)))
        return bool(waited(nap))

    end.poll = poll
    worker.serve()
    assert made == [0, 1, 2]
    assert end.naps == [worker_loop.NAP] * 3
    assert (board.words[1][worker_loop.ASLEEP], end.said) == (0, [])
    fresh: Any = Pipe(("end",))
    again = worker_loop._Worker(fresh, Orders(2, 3, None, 0.0))
    again.serve()  # it has no board yet
    assert fresh.said == [("up", os.getpid())]


def test_worker_reads_its_source_and_uses_its_core_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, other = worker_loop.share_weights(tiny_replica("llama").load()), tiny_replica("llama", 1).load()
    set_: list[Any] = []
    monkeypatch.setattr(worker_loop.os, "sched_setaffinity", lambda *what: set_.append(what))
    monkeypatch.setattr(gpu_ordering, "cuda", lambda: SimpleNamespace(set_device=set_.append))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: set_.append(f"{count} thread"))
    worker_loop._Worker(Pipe(), Orders(1, 2, 5, 0.0, "cuda:1"))  # type: ignore[arg-type]
    assert set_ == ["1 thread", (0, {5}), "cuda:1"]
    worker, end, _, _ = working(monkeypatch, "t5")
    before = worker.unit.decoder.source
    assert before.shape[1] == 2
    end.told.append(pickle.dumps(("source", (7, 8, 9))))
    rows = worker.unit.rows
    assert worker._hear()
    assert worker.unit.decoder.source.shape[1] == 3
    assert worker.unit.rows is not rows  # rows of a new sequence
    assert end.said.pop() == ("source", worker_loop.fingerprint(worker.unit.decoder))
    HANDED[2] = ("load", Replica("t5"), (), (), flat)
    monkeypatch.setattr(Replica, "load", lambda _: other)
    end.told.append(pickle.dumps(2))
    with pytest.raises(ValueError, match="the replica has other weights"):
        worker._hear()
    assert worker.unit is None
