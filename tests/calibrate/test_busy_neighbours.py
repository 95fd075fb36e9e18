"""Processes that keep the host busy while a pass is timed."""

from __future__ import annotations

import multiprocessing
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.timing import busy_neighbours, single_pass
from calibrate.timing.busy_neighbours import Companions, Spec
from tests.support.workers import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


# --- companions ---


class Thread(threading.Thread):
    """A thread instead of a process."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        super().__init__(target=target, args=args, daemon=daemon)
        self.terminated = False

    def terminate(self) -> None:
        self.terminated = True


def kept_open(ends: Any) -> Any:
    """In one process the other end of the pipe stays open."""
    ours, theirs = ends
    return ours, SimpleNamespace(send=theirs.send, recv=theirs.recv, poll=theirs.poll, close=lambda: None)


def test_companions_repeat_a_pass_until_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun = list[Any](), list[Any]()

    class Work:
        def __init__(self) -> None:
            self.done = [0, 0]

        def run(self) -> None:
            assert torch.is_inference_mode_enabled()
            self.done[0] += 1

        def roll_back(self) -> None:
            self.done[1] += 1

    def prepared(model: Any, *what: Any) -> Work:
        if what[0] == 9:
            raise RuntimeError("no room\nfor it")
        asked.append((model, *what))
        begun.append(Work())
        return begun[-1]  # type: ignore[no-any-return]

    from calibrate.loading import architectures
    from calibrate.timing import library_pass

    monkeypatch.setattr(single_pass, "prepare", prepared)
    monkeypatch.setattr(architectures, "architecture", lambda name: f"built {name}")
    monkeypatch.setattr(library_pass, "LibraryModel", lambda *what: what)
    monkeypatch.setattr(busy_neighbours, "exit_with_starter", lambda: asked.append("ends"))
    monkeypatch.setattr(busy_neighbours.signal, "signal", lambda *what: asked.append(what))
    context = SimpleNamespace(Pipe=lambda: kept_open(multiprocessing.Pipe()), Process=Thread)
    monkeypatch.setattr(busy_neighbours.multiprocessing, "get_context", {"spawn": context}.__getitem__)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = Companions(2, Spec("some", "cpu", "float32", 7, 3))
    model = ("built some", "cpu", "float32", 7)
    assert threads == [3, 3]
    with found.at(2, 8, 4, "eager") as passed:
        assert passed == []
    assert sorted(map(str, asked)) == sorted(map(str, [
        (busy_neighbours.signal.SIGINT, busy_neighbours.signal.SIG_IGN), "ends", (model, 2, 8, 4, "eager")] * 2))  # fmt: skip
    assert sorted(passed) == sorted(each.done[0] for each in begun)
    assert all(each.done[0] == each.done[1] >= 1 for each in begun)
    with pytest.raises(KeyError), found.at(1, 8, 1, "eager") as passed:
        raise KeyError  # they stop even if the timed work fails
    assert len(passed) == 2
    with pytest.raises(RuntimeError, match=r"a companion process failed: RuntimeError: no room$"), found.at(9, 8, 1, "eager"):
        pass
    found.close()
    for process in found.processes:
        assert not process.is_alive()
        assert not process.terminated
    found = Companions(1, Spec("some", "cpu", "float32", 7, 3))
    monkeypatch.setattr(busy_neighbours, "_PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="a companion process did not answer within 0 s"):
        found._answer(found.ends[0])
    found.ends[0].send("stop")  # belongs to a pass that could not begin
    found.ends[0].send(None)
    found.processes[0].join(PATIENCE)
    assert not found.processes[0].is_alive()
    found.processes = [SimpleNamespace(is_alive=lambda: True, join=asked.append, terminate=lambda: asked.append("end"))]  # type: ignore[list-item]
    found.close()
    assert asked[-2:] == [5, "end"]
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match="a companion process ended, perhaps out of memory"):
        found._answer(ours)
