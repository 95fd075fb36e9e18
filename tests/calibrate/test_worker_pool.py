"""The pool of worker processes: its messages, and how workers end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections import deque
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.loading.replicas import Replica
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import worker_loop
from calibrate.workers import worker_pool as pool_of
from calibrate.workers.over_processes import UNKNOWN_ROWS
from calibrate.workers.worker_loop import (
    ASLEEP,
    DONE,
    LENGTH,
    LISTENING,
    SLOTS,
    STOPPED,
    Board,
    Command,
    Orders,
)
from calibrate.workers.worker_pool import Flight, Pool, Post, ProcessError, started
from model.base.checks import ParameterError
from model.steps import CacheError, Forward, LayerSpan
from tests.support import real_models, workers
from tests.support.workers import tiny_replica

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = real_models.DEPTHS["target"]


# --- worker processes: messages and ends ---


class Worker:
    """A process and its end of the pipe: with `obeys` it ends by request, with `hears` it can be written to."""

    def __init__(self, *, obeys: bool = True, hears: bool = True) -> None:
        self.obeys, self.hears, self.alive, self.killed = obeys, hears, True, False
        self.pid, self.name, self.exitcode = 1, "unit 1", None
        self.said: list[Any] = []
        self.closed: list[str] = []
        self.waited: list[float] = []

    def send(self, message: Any) -> None:
        if not self.hears:
            raise BrokenPipeError
        self.said.append(message)
        self.alive = self.alive and not self.obeys

    def send_bytes(self, message: bytes) -> None:
        self.said.append(message)

    def poll(self, *_: Any) -> bool:
        return False

    def is_alive(self) -> bool:
        return self.alive

    def join(self, seconds: float | None = None) -> None:
        self.waited += [] if seconds is None else [seconds]
        assert seconds is not None or not self.alive, "it would be waited for without end"

    def kill(self) -> None:
        self.alive, self.killed = False, True

    def close(self) -> None:
        self.closed.append("closed")


def pooled(*of: Worker) -> Pool:
    pool = Pool(["cpu"], [], 0.0, 1.0, True)
    pool.board = Board(1 + len(of))
    pool.posts = {number: Post(each, each) for number, each in enumerate(of, 1)}  # type: ignore[arg-type]
    return pool


def test_idle_workers_end_by_request_and_hung_ones_are_killed() -> None:
    good, deaf, stubborn = Worker(), Worker(hears=False), Worker(obeys=False)
    pool = pooled(good, deaf, stubborn)
    words = [pool.board.slots[number] for number in range(1, 4)]
    pool.close()
    assert (good.said, stubborn.said) == ([("end",)], [("end",)])
    assert [each.killed for each in (good, deaf, stubborn)] == [False, True, True]
    assert all(1 < each.waited[0] <= 2 for each in (good, deaf, stubborn))
    assert all(slot[STOPPED] == 1 for slots in words for slot in slots)  # their passes are stopped
    assert all(each.closed == ["closed"] * 2 for each in (good, deaf, stubborn))  # the pipe and the process
    pool.close()
    assert good.said == [("end",)]
    with pytest.raises(ProcessError, match="the processes are closed; start them again"):
        pool.refuse_closed()
    assert pool.pids == []


def test_workers_of_a_broken_run_are_killed_at_once() -> None:
    worker, never = Worker(), Worker()
    never.pid = None  # type: ignore[assignment]
    pool = pooled(worker, never)
    pool.broken = True
    with pytest.raises(ProcessError, match="the processes are broken by an earlier error"):
        pool.refuse_closed()
    pool.close()
    assert (worker.said, worker.killed, worker.waited) == ([], True, [0.0])
    assert (never.killed, never.waited, never.closed) == (False, [], [])  # never started


def test_answers_are_checked_before_the_main_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pooled(Worker(), Worker())
    for post in pool.posts.values():
        post.flights, post.count = deque([object()]), 1  # type: ignore[list-item]
    slept: list[Any] = []

    def sleep(ends: Any, seconds: float) -> None:
        assert pool.board.words[0][LISTENING] == 1  # an answer now comes with a byte
        slept.append(len(ends))
        pool.board.words[2][DONE] = 1

    monkeypatch.setattr(pool_of.connection, "wait", sleep)
    pool.unit = SimpleNamespace(fence=threading.Lock())  # type: ignore[assignment]
    pool.board.words[1][DONE] = 1
    pool.wait(pool_of.time.perf_counter())
    assert slept == []
    pool.board.words[1][DONE] = 0
    pool.spin = 0.0
    pool.wait(pool_of.time.perf_counter())
    assert slept == [2]
    assert pool.board.words[0][LISTENING] == 0
    pool.board.words[2][DONE] = 0
    monkeypatch.setattr(pool_of.connection, "wait", lambda *_: None)
    with pytest.raises(ProcessError, match="the process of unit 1, unit 1 did not answer within 1 s; the run is over"):
        pool.wait(pool_of.time.perf_counter() - 2)


def test_only_sleeping_workers_are_woken() -> None:
    from calibrate.workers.worker_loop import LENGTH, POSTED, Command

    worker = Worker()
    pool = pooled(worker)
    pool.unit = SimpleNamespace(fence=threading.Lock())  # type: ignore[assignment]
    command = Command(7, (3, 4), 0, 0, 2, 1, None, (), 0)
    words = pool.board.words[1]
    assert [pool.post(1, command) for _ in range(2)] == [0, 1]
    assert (worker.said, words[POSTED]) == ([], 2)
    words[ASLEEP] = 1
    words[DONE] = 2
    pool.board.slots[1][2][STOPPED] = 1  # left by an earlier pass in this slot
    assert pool.post(1, command) == 2
    assert worker.said == [b"."]
    assert pool.board.slots[1][2][STOPPED] == 0
    assert pool.post(1, command) == 3 == SLOTS - 1
    assert pool.post(1, command) == 0  # around
    length = pool.board.slots[1][0][LENGTH]
    assert pickle.loads(bytes(pool.board.boxes[1][0][:length])) == command


@pytest.mark.parametrize(("wrong", "said"), [
    ({"units": 0}, "units must be"), ({"units": 10**6}, "units must be"), ({"units": 2, "spin": -1.0}, "spin must be"),
    ({"units": 2, "patience": 0.0}, "patience must be"), ({"units": 1, "capacity": 0}, "capacity must be"),
    ({"units": 1, "capacity": 97}, "capacity must be"), ({"units": 1, "source": (3,)}, "has no encoder, and source is given"),
])  # fmt: skip
def test_wrong_options_of_processes_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said), started(workers.tiny_replica("llama"), **wrong):
        pass


# --- the pool ---


class Ended:
    """A worker that has ended, and its end of the pipe, with messages that may still be read."""

    def __init__(self, code: int | None, *said: Any, alive: bool = False) -> None:
        self.exitcode, self.name, self.alive = code, "unit 1", alive
        self.said = deque(each if isinstance(each, bytes) else pickle.dumps(each) for each in said)
        self.waited: list[float] = []

    def poll(self, *_: Any) -> bool:
        return bool(self.said)

    def recv_bytes(self) -> bytes:
        if self.said[0] == b"!":
            raise EOFError
        return self.said.popleft()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, seconds: float) -> None:
        self.waited.append(seconds)

    def send_bytes(self, _: bytes) -> None:
        raise BrokenPipeError


def post_of(worker: Ended) -> Post:
    return Post(worker, worker)  # type: ignore[arg-type]


@pytest.mark.parametrize(("worker", "said"), [
    (Ended(None), "the process of unit 1 ended, perhaps out of memory; the run is over"),
    (Ended(3), "the process of unit 1 ended with code 3, perhaps"), (Ended(0), "the process of unit 1 ended with code 0, perhaps"),
    (Ended(-9), "the process of unit 1 was killed by SIGKILL, perhaps"), (Ended(-15), "was killed by SIGTERM"),
    (Ended(1, b".", ("failed", "why")), "the process of unit 1 failed: why"),
    (Ended(1, b"!"), "the process of unit 1 ended with code 1"), (Ended(1, b".", b"!"), "ended with code 1"),
])  # fmt: skip
def test_end_of_a_worker_is_reported(worker: Ended, said: str) -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    before = deque(worker.said)
    for check in (lambda: pool.check_workers([post_of(worker)]), lambda: pool._answer(post_of(worker), "load")):
        worker.said = deque(before)
        with pytest.raises(ProcessError, match=said):
            check()
    assert {*worker.waited} <= {1}


def test_live_workers_are_awaited_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    pool.check_workers([post_of(Ended(None, b".", alive=True))])
    assert pool._answer(post_of(Ended(None, b".", ("load", 5))), "load") == 5
    with pytest.raises(AssertionError):
        pool._answer(post_of(Ended(None, ("up", 5))), "load")
    now = iter([0.0, *range(200, 400, 50)])
    monkeypatch.setattr(pool_of.time, "monotonic", lambda: float(next(now)))
    with pytest.raises(ProcessError, match="the process of unit 1 did not start within 300 s"):
        pool._answer(post_of(Ended(None, alive=True)), "load")


def test_commands_that_cannot_be_posted_are_refused() -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    pool.board = Board(2)
    worker = Ended(-9, alive=True)
    pool.posts = {1: post_of(worker)}
    pool.unit = SimpleNamespace(fence=threading.Lock())  # type: ignore[assignment]
    with pytest.raises(CacheError, match="a pass of 40000 tokens is too wide for a worker process"):
        pool.post(1, Command(1, tuple(range(40000)), 0, 0, 1, 0, None, (), 0))
    assert pool.posts[1].count == 0
    pool.board.words[1][worker_loop.ASLEEP] = 1
    with pytest.raises(ProcessError, match="was killed by SIGKILL"):
        pool.post(1, Command(1, (3,), 0, 0, 1, 0, None, (), 0))
    with pool._guarded():
        assert not pool.broken
    with pytest.raises(KeyError), pool._guarded():
        raise KeyError
    assert pool.broken
    worker.alive = False
    for error in (BrokenPipeError, ConnectionResetError, EOFError):
        with pytest.raises(ProcessError, match="was killed by SIGKILL"), pool._guarded():
            raise error
    worker.alive = True
    with pytest.raises(ProcessError, match="a worker process is gone"), pool._guarded():
        raise EOFError
    assert (
        Flight(None, Forward("target", (3, 4), 0, LayerSpan(0, LAYERS)), Command(1, (3,), 0, 0, 1, 0, None, (), 0), 0, 0.0).stopped
        is False
    )
    assert (LENGTH, UNKNOWN_ROWS) == (2, -1)


def test_processes_come_from_a_fork_server_or_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the variables for numbers of threads are as before, or absent."""
    seen: list[Any] = []
    context = SimpleNamespace(set_forkserver_preload=seen.append)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: seen.append(kind) or context)
    names = pool_of.THREADS
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.append([os.environ[name] for name in names]))
    monkeypatch.setenv(names[0], "7")
    for name in names[1:]:
        monkeypatch.delenv(name, raising=False)
    assert pool_of.context_of_workers() is context
    assert seen == ["forkserver", [*pool_of.LIBRARIES], ["1"] * len(names)]
    assert [os.environ.get(name) for name in names] == ["7"] + [None] * (len(names) - 1)
    seen.clear()
    monkeypatch.setattr(pool_of.sys, "platform", "darwin")
    assert pool_of.context_of_workers() is context
    assert seen == ["spawn"]

def test_processes_start_are_pinned_and_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process is pinned after the others start, and released at the end; it has one thread meanwhile."""
    done: list[Any] = []
    threads = [4]

    class Made:
        def __init__(self, *how: Any) -> None:
            done.append(("made", *how, threads[-1]))

        def load(self, *what: Any) -> None:
            done.append(("load", *what))
            if what[1] == 13:
                raise ParameterError("capacity")

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(pool_of, "Pool", Made)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    affinity = {0: {5, 3, 9}}
    monkeypatch.setattr(pool_of.os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(pool_of.os, "sched_setaffinity", lambda *what: done.append(what))
    monkeypatch.setattr(gpu_ordering, "check", lambda named: done.append(("there", named)))
    replica = tiny_replica("llama")
    with pool_of.started(replica, 2, 12, source=(4,)):
        done.append("within")
    cores = [3, 5, 9]
    made = ("made", ["cpu", "cpu"], cores, 0.005, 60.0, True, 1)
    assert done == [made, ("load", replica, 12, (4,)), (0, {3}), "within", (0, cores), "closed"]
    assert threads == [4, 1, 4]
    done.clear()
    on = Replica("family:target", "cuda:1")
    with pool_of.started(on, 2, pin=False, spin=0.5, patience=2.0, share=False):
        pass
    two = ["cuda:1", "cuda:2"]
    assert done == [("there", two), ("made", two, [], 0.5, 2.0, False, 1), ("load", on, None, ()), "closed"]
    done.clear()
    with pytest.raises(ParameterError, match="capacity"), pool_of.started(replica, 1, 13):
        pass
    assert done[2:] == [(0, cores), "closed"]
    assert threads == [4, 1, 4, 1, 4, 1, 4]


class Told:
    """A worker that answers all messages, with a fingerprint."""

    def __init__(self, given: tuple[Any, Orders], name: str, answers: list[Any]) -> None:
        self.given, self.name, self.answers, self.pid, self.exitcode = given, name, answers, 1, 0
        self.said: list[Any] = []

    def send(self, what: Any) -> None:
        self.said.append(what)

    def poll(self, *_: Any) -> bool:
        return bool(self.answers)

    def recv_bytes(self) -> bytes:
        return pickle.dumps(self.answers.pop(0))

    def is_alive(self) -> bool:
        return True

    def start(self) -> None:
        self.said.append("started")

    def join(self, *_: Any) -> None:
        self.is_alive = lambda: False  # type: ignore[method-assign]

    close = start


def test_workers_load_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units take the cores in turn; the board is sent once, weights and rows with each model."""
    workers: list[Told] = []
    replica = tiny_replica("llama")
    same = worker_loop.fingerprint(replica.load())

    class Context:
        def Pipe(self) -> Any:  # noqa: N802
            ours: Any = SimpleNamespace(close=lambda: None)
            return ours, SimpleNamespace(close=lambda: workers[-1].said.append("closed there"))

        def Process(self, target: Any, args: Any, daemon: bool, name: str) -> Told:  # noqa: N802
            assert (target, daemon) == (worker_loop.work, True)
            workers.append(Told(args, name, [("up", 9), ("load", same)]))
            return workers[-1]

    monkeypatch.setattr(pool_of, "context_of_workers", Context)
    pool = pool_of.Pool(["cpu"] * 4, [7, 8], 0.25, 5.0, True)
    assert [each.given[1] for each in workers] == [
        Orders(1, 4, 8, 0.25), Orders(2, 4, 7, 0.25), Orders(3, 4, 8, 0.25),
    ]  # fmt: skip
    assert [each.name for each in workers] == ["unit 1", "unit 2", "unit 3"]
    assert {str(each.said) for each in workers} == {"['started', 'closed there']"}
    assert (pool.units, pool.broken, pool.closed, pool.serial) == (4, False, False, 0)
    assert pool.pids == [1, 1, 1]
    for number, each in enumerate(workers, 1):
        each.said.clear()
        pool.posts[number].end = each  # type: ignore[assignment]
    pool.load(replica)
    assert (pool.capacity, pool.tags.shape, pool.replica) == (96, (4, LAYERS, 96), replica)  # as many as the model supports
    for each in workers:
        board, load = each.said
        assert board == ("board", pool.board.tensors, [])
        assert load[:2] == ("load", replica)
        assert load[2] == pool.memory.tensors
        assert load[3] == ()
        assert len(load[4]) > 0  # the weights of this process
    workers[1].answers.append(("load", same))
    workers[0].answers.append(("load", same))
    workers[2].answers.append(("load", "others"))
    pool.share = False
    with pytest.raises(ProcessError, match="the model of unit 3 differs from that of unit 0, though both loaded one replica"):
        pool.load(replica, 20)
    assert pool.capacity == 20
    assert pool.broken
    [_, _, again] = workers[0].said
    assert again[4] is None
    pool.broken = False
    with pytest.raises(ParameterError, match="has no encoder, and source is given; leave it out"):
        pool.read_source((3,))
    encoding: Any = tiny_replica("t5")
    same = worker_loop.fingerprint(encoding.load())
    for each in workers:
        each.answers += [("load", same), ("source", None)]
        each.said.clear()
    pool.load(encoding, 8, (5, 6))
    assert pool.decoder.source.shape[1] == 2
    rows = pool.unit.rows
    pool.read_source([7, 8, 9])
    assert pool.decoder.source.shape[1] == 3
    assert pool.unit.rows is not rows
    assert [each.said[0][3] for each in workers] == [(5, 6)] * 3
    assert [each.said[1] for each in workers] == [("source", (7, 8, 9))] * 3
    with pytest.raises(ParameterError, match="has an encoder, and source is empty; give what it reads"):
        pool.load(encoding, 8)
