"""Links between processes, host and GPUs: transfers, repeats that count, and profiles."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.devices import machine
from calibrate.timing import timing_grid, transfers
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.hardware.profile_files import load
from tests.support import workers
from tests.support.commands import call
from tests.support.fake_clocks import SteppedClock

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


# --- links ---


@pytest.mark.slow  # tests below with both ends in this process are fast
def test_links_between_processes_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE", 3600.0)  # processes start slowly on a busy machine
    said = call("links", "--quick", "-o", str(tmp_path), "--link", "shared-memory,gloo").stdout
    for link in ("shared-memory", "gloo"):
        found = profile_files.load(tmp_path / f"links-{link}.json")
        assert (found.kind, found.parts) == ("links", ("send",))
        assert found.rows("send")["size"].to_list() == [1024, 65_536, 1_048_576]
        assert (found.rows("send")["time_s"] > 0).all()
        assert str(tmp_path / f"links-{link}.json") in said
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = call("links", "--quick", "-o", str(tmp_path), "--link", "gloo", code=2)
    assert "links-gloo.json is there already; give another --name or folder, or remove it" in again.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_failed_link_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(link: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
        if link == "gloo":
            raise RuntimeError("no such interface")
        times = [1.0, 2.0, 3.0]
        return [{"kind": "link", "link": link, "size": size, "repeats": repeats, "time_us": times} for size in sizes]

    monkeypatch.setattr(transfers, "_timed", timed)
    done = call("links", "--quick", "-o", str(tmp_path), "--link", "gloo,shared-memory", code=1)
    assert "failed: gloo: RuntimeError: no such interface" in done.stderr
    assert (tmp_path / "links-shared-memory.json").exists()
    assert not (tmp_path / "links-gloo.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--link", "carrier-pigeon"), "unknown link 'carrier-pigeon'"),
        (("--sizes", "0"), "size must be between 1 and 17179869184, got 0"),
        (("--sizes", "8,8"), "sizes must be different numbers"),
        (("--sizes", "x"), "sizes must be comma-separated whole numbers"),
        (("--repeats", "0"), "repeats must be between 1"),
        (("--name", "a/b"), "name must be letters"),
    ],
)
def test_wrong_link_options_are_refused(more: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = call("links", "-o", str(tmp_path / "out"), *more, code=2)
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_link_to_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    done = call("links", "-o", str(tmp_path), "--link", "host-to-device", code=2)
    assert "link host-to-device is not available; this machine has shared-memory" in done.stderr


# --- links ---


def test_sizes_are_powers_of_four_from_1_kib_to_64_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def timed(link: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
        asked.append((link, sizes, repeats))
        return [{"kind": "link", "link": link, "size": size, "repeats": repeats, "time_us": [size / 4, size / 2, size]}
                for size in sizes]  # fmt: skip

    monkeypatch.setattr(transfers, "_timed", timed)
    monkeypatch.setattr(transfers, "available_links", lambda: ("shared-memory", "gloo"))
    told: list[Any] = []
    out = tmp_path / "new" / "deeper"  # made with its parents
    found = transfers.time_links(out, repeats=6, name="some", progress=lambda *said: told.append(said))
    assert asked == [(link, tuple(1024 * 4**power for power in range(9)), 6) for link in ("shared-memory", "gloo")]
    assert asked[0][1][-1] == 64 * 2**20
    assert told == [(0, 2, "shared-memory"), (1, 2, "gloo"), (2, 2, "")]
    assert found.failed == {}
    made = load(found.profiles["gloo"])
    assert (made.name, made.kind, made.provenance, made.engine.rpartition(", ")[2]) == ("some-gloo", "links", "measured", "gloo")
    assert made.bandwidth == pytest.approx(2e6)
    row = made.table.filter(size=4096).row(0, named=True)
    assert [row[name] for name in ("low_s", "time_s", "high_s", "repeats")] == pytest.approx([1024e-6, 2048e-6, 4096e-6, 6])
    [source] = made.sources
    assert (source.file, source.parts) == ("some-gloo.jsonl", ("send",))
    kinds = [row["kind"] for row in timing_grid.read(out / "some-gloo.jsonl")[1]]
    assert kinds == ["link"] * 9
    with pytest.raises(ParameterError, match=r"some-gloo.json is there already"):
        transfers.time_links(out, links=("gloo",), name="some")


def test_profile_of_a_link_records_machine_and_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole profile, from made-up facts; a transfer of zero time does not count for the bandwidth."""
    facts = {"name": "a made-up host", "torch": "9.9", "date": "2026-01-02", "cache_bytes": 4096}
    asked = list[str]()
    monkeypatch.setattr(machine, "facts", lambda device: asked.append(device) or dict(facts))
    took = {8: [0.0, 0.0, 1.0], 64: [3.0, 4.0, 5.0], 128: [9.0, 10.0, 11.0]}
    rows = [{"kind": "link", "size": size, "repeats": 7, "time_us": times} for size, times in took.items()]
    monkeypatch.setattr(transfers, "_timed", lambda *_: rows)
    monkeypatch.setattr(transfers, "available_links", lambda: transfers.LINKS)
    found = transfers.time_links(tmp_path, sizes=(8, 64, 128))
    assert asked == ["cpu", "cpu", "cuda", "cuda", "cuda", "cuda"]
    for link, path in found.profiles.items():
        made = load(path)
        assert (made.name, made.device, made.model, made.dtype) == (f"links-{link}", "a made-up host", "", "")
        assert (made.engine, made.mode, made.kind, made.date) == (f"torch 9.9, {link}", "eager", "links", "2026-01-02")
        assert (made.bandwidth, made.rate, made.cache_bytes) == (pytest.approx(16e6), 1.0, 4096.0)
        assert made.notes == ("bandwidth is the best that any size reached; rate says nothing, for nothing is computed",)
        assert made.facts == facts | {"peaks": "measured"}
        [source] = made.sources
        raw = tmp_path / source.file
        assert (source.repository, source.licence, source.file) == ("decodesim", "MIT", f"links-{link}.jsonl")
        assert source.sha256 == hashlib.sha256(raw.read_bytes()).hexdigest()
        header, kept = timing_grid.read(raw)
        assert (header, kept) == ({"kind": "machine", "link": link} | facts, rows)
        table = made.table.select("part", "size", "low_s", "time_s", "high_s", "repeats").rows()
        assert table == [("send", size, *(pytest.approx(each / 1e6) for each in times), 7) for size, times in took.items()]


def test_failed_link_is_reported_and_the_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(link: str, *_: Any) -> list[dict[str, Any]]:
        if link == "gloo":
            raise RuntimeError("no answer\nat all")
        return [{"kind": "link", "link": link, "size": 8, "repeats": 1, "time_us": [1.0, 2.0, 3.0]}]

    monkeypatch.setattr(transfers, "_timed", timed)
    monkeypatch.setattr(transfers, "available_links", lambda: ("gloo", "shared-memory"))
    found = transfers.time_links(tmp_path, sizes=(8,))
    assert found.failed == {"gloo": "RuntimeError: no answer"}
    assert [*found.profiles] == ["shared-memory"]
    for wrong, said in (({"sizes": ()}, "sizes must have at least one number, got none"), ({"sizes": (8, 8)}, "different numbers"),
                        ({"sizes": (0,)}, "size must be"), ({"repeats": 0}, "repeats must be"), ({"name": "a b"}, "name must be"),
                        ({"links": ("nccl",)}, "nccl is not available"), ({"links": ("tin",)}, "unknown link 'tin'")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            transfers.time_links(tmp_path / "none", **wrong)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_message_time_is_half_a_round_trip_after_warm_up(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = SteppedClock(), list[str]()
    monkeypatch.setattr(transfers, "time", clock)

    def step(name: str, seconds: float) -> None:
        done.append(name)
        clock.now += seconds if len(done) > 6 else 50

    found = transfers._there_and_back(rank, 4, lambda: step("give", 3.0), lambda: step("take", 5.0))
    assert found == pytest.approx([4.0] * 4)
    assert done == [["give", "take"], ["take", "give"]][rank] * 7


def test_shared_memory_transfers_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are threads of this process; the first alone reports times."""
    monkeypatch.setattr(transfers, "exit_with_starter", lambda: None)
    ends, (report, other) = multiprocessing.Pipe(), multiprocessing.Pipe()
    room = multiprocessing.RawArray("b", 64)
    sizes = (8, 64)
    threads = [threading.Thread(target=transfers._share, args=(rank, other, sizes, 3, room, ends[rank])) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(workers.PATIENCE)
        assert not thread.is_alive()
    found = report.recv()
    assert [len(times) for times in found] == [3, 3]
    assert not report.poll()
    assert bytes(room) == b"\1" * 64


class Bytes:
    """A tensor of a missing device."""

    def __init__(self, size: int, at: Any) -> None:
        self.size, self.device, self.is_cuda = size, at, str(at).startswith("cuda")


@pytest.mark.parametrize(("link", "ends"), [
    ("host-to-device", ("cpu", "cuda:0")), ("device-to-host", ("cuda:0", "cpu")), ("device-to-device", ("cuda:0", "cuda:1")),
])  # fmt: skip
def test_copy_goes_between_its_ends_after_warm_up(
    link: str, ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    copied, turns, clocks = list[Any](), itertools.count(), list[str]()

    class Copied(Bytes):
        def copy_(self, source: Any, non_blocking: bool) -> None:
            copied.append((source.device, self.device, source.size, self.size, source.pinned, self.pinned, non_blocking))

    def empty(size: int, *, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert dtype == torch.uint8
        made: Any = Copied(size, device)
        made.pinned = pin_memory
        return made

    monkeypatch.setattr(torch, "empty", empty)
    clock = SimpleNamespace(start=lambda: None, stop=lambda: float(next(turns)))
    monkeypatch.setattr(transfers, "clock_of", lambda at: clocks.append(at) or clock)
    found = transfers._timed(link, (8, 64), 5)
    copies = [(*ends, size, size, *(end == "cpu" for end in ends), True) for size in (8, 64)]
    assert copied == [copies[0]] * 8 + [copies[1]] * 8
    assert clocks == ["cuda:0"]
    # The first three of eight turns are warm-up; the quartiles of 3 to 7 s are 4, 5 and 6.
    assert found == [
        {"kind": "link", "link": link, "size": 8, "repeats": 5, "time_us": pytest.approx([4e6, 5e6, 6e6])},
        {"kind": "link", "link": link, "size": 64, "repeats": 5, "time_us": pytest.approx([12e6, 13e6, 14e6])},
    ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ends_exchange_messages(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch at each end, in order; no message is sent."""
    import torch

    monkeypatch.setattr(transfers, "exit_with_starter", lambda: None)
    monkeypatch.setattr(transfers.os.path, "exists", lambda path: path == "/sys/class/net/lo")
    done = list[Any]()
    for rank in (0, 1):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        done.clear()
        for name in ("init_process_group", "send", "recv", "destroy_process_group"):
            monkeypatch.setattr(torch.distributed, name, lambda *args, name=name, **more: done.append((name, *args, more)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda at: done.append(("synchronize", at)))
        monkeypatch.setattr(torch, "set_num_threads", lambda count: done.append(("threads", count)))
        monkeypatch.setattr(torch, "ones", lambda size, *, dtype, device: (dtype, Bytes(size, device))[1])
        report, other = multiprocessing.Pipe()
        transfers._talk(rank, other, (8,), 2, backend, "file://there")
        where = f"cuda:{rank}" if backend == "nccl" else "cpu"
        begun = ("init_process_group", backend, {"init_method": "file://there", "rank": rank, "world_size": 2})
        assert done[:2] == [("threads", 1), begun]
        assert done[-1] == ("destroy_process_group", {})
        waits = ["synchronize"] * (backend == "nccl")
        turn = [("send", *["recv", *waits]), (*["recv", *waits], "send")][rank]
        assert [each[0] for each in done[2:-1]] == [*turn] * 5
        for name, *more in done[2:-1]:
            if name == "synchronize":
                assert more == [where]
            else:
                own, peer, _ = more
                assert (own.size, own.device, peer) == (8, where, 1 - rank)
        assert transfers.os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if backend == "gloo" else None)
        assert report.poll() == (rank == 0)
        if rank == 0:
            assert [len(times) for times in report.recv()] == [2]


@pytest.mark.parametrize("link", ["shared-memory", "gloo", "nccl"])
def test_link_between_processes_is_timed_or_reports_its_error(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes are the ends; one that ends or does not answer ends the wait."""
    clock, ends = SteppedClock(), list[Any]()
    monkeypatch.setattr(transfers, "time", clock)

    class End:
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self.target, self.args, self.daemon, self.said = target, args, daemon, list[str]()
            self.exitcode = exitcodes[len(ends)]
            ends.append(self)

        def start(self) -> None:
            self.said.append("start")

        def join(self, seconds: float) -> None:
            self.said.append(f"join {seconds}")

        def is_alive(self) -> bool:
            return self.exitcode is None

        def terminate(self) -> None:
            self.said.append("terminate")

    class Ours:
        """Receives after 3 polls, if at all."""

        polled = 0

        def poll(self, seconds: float) -> bool:
            clock.now += seconds
            self.polled += 1
            return heard is not None and self.polled > 3

        def recv(self) -> Any:
            if isinstance(heard, Exception):
                raise heard
            return heard

    closed = list[str]()
    theirs: Any = SimpleNamespace(close=lambda: closed.append("theirs"))
    pipes = iter(())

    heard: Any = None
    exitcodes: list[int | None] = []

    def context_of(kind: str) -> Any:
        assert kind == "spawn"
        return SimpleNamespace(Pipe=lambda: next(pipes), RawArray=lambda code, size: (code, size), Process=End)

    monkeypatch.setattr(transfers.multiprocessing, "get_context", context_of)
    cases: list[tuple[Any, list[int | None], Any]] = [
        ([[1e-6, 3e-6, 5e-6], [2e-6, 4e-6, 6e-6]], [0, None], None),
        ("OSError: no room", [0, 0], "^OSError: no room$"), (EOFError(), [0, 0], f"^one end of {link} ended early$"),
        (None, [0, 3], f"^one end of {link} ended early, exit code 3$"), (None, [None, 0], f"^{link} took too long$"),
    ]  # fmt: skip
    for heard, exitcodes, error in cases:  # noqa: B007  the ends look at them
        ends.clear()
        closed.clear()
        begun = clock.now
        pipes = iter([(Ours(), theirs), ("first", "second")])
        if error is None:
            assert transfers._timed(link, (8, 64), 3) == [
                {"kind": "link", "link": link, "size": 8, "repeats": 3, "time_us": pytest.approx([2, 3, 4])},
                {"kind": "link", "link": link, "size": 64, "repeats": 3, "time_us": pytest.approx([3, 4, 5])},
            ]
        else:
            with pytest.raises(RuntimeError, match=error):
                transfers._timed(link, (8, 64), 3)
        assert closed == ["theirs"]
        late = 120.0 if error and "too long" in error else 0.0
        assert late <= clock.now - begun < late + 1
        for rank, end in enumerate(ends):
            assert end.daemon is True
            assert end.said == ["start", "join 5", *["terminate"] * (exitcodes[rank] is None)]
            assert end.args[:4] == (rank, theirs, (8, 64), 3)
            if link == "shared-memory":
                assert (end.target, end.args[4:]) == (transfers._share, (("b", 64), ("first", "second")[rank]))
            else:
                assert (end.target, end.args[4]) == (transfers._talk, link)
                assert str(end.args[5]).startswith("file:///")
        assert len({end.args[-1] for end in ends}) == (2 if link == "shared-memory" else 1)
        assert len(ends) == 2


def test_available_links_follow_from_gpus_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def has(gpus: int, distributed: bool = True, gloo: bool = True, nccl: bool = True, cuda: bool = True) -> tuple[str, ...]:
        answers = {"is_available": distributed, "is_gloo_available": gloo, "is_nccl_available": nccl}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return transfers.available_links()

    host, copies = ("shared-memory", "gloo"), ("host-to-device", "device-to-host")
    assert has(0) == has(2, cuda=False) == host
    assert has(0, gloo=False) == has(0, distributed=False) == host[:1]
    assert has(1) == host + copies
    assert has(2) == has(3) == (*host, *copies, "device-to-device", "nccl")
    assert has(2, nccl=False) == (*host, *copies, "device-to-device")


def test_failed_end_reports_its_error() -> None:
    report, other = multiprocessing.Pipe()
    with transfers._reported(other):
        raise ValueError("no room\nin here")
    assert report.recv() == "ValueError: no room"
    report.close()
    with transfers._reported(other):  # the other end is closed
        raise ValueError("no room")
