"""What measures: how minutes are shared, which tries count, what is kept of links, how worker processes end.

None of it by a real clock.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import multiprocessing
import pickle
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.decode import log_positions as logging
from calibrate.devices import machine
from calibrate.timing import single_pass, timing_grid, transfers
from calibrate.timing.single_pass import Effort
from calibrate.timing.timing_grid import Grid, Point
from calibrate.workers import worker_pool as pool_of
from calibrate.workers.worker_loop import ASLEEP, DONE, LISTENING, SLOTS, STOPPED, Board
from calibrate.workers.worker_pool import Pool, Post, ProcessError, started
from model.base import whole_files
from model.base.checks import ParameterError
from model.hardware.profile import load
from tests.support import real_models, workers


class Clock:
    """A clock that stands still but for what is done."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step, self.asked = 1000.0, step, 0

    def tell(self) -> float:
        self.asked += 1
        self.now += self.step
        return self.now

    perf_counter = monotonic = tell

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# --- sharing the minutes out ---


def gone_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, takes: Any, minutes: float = 1.0
) -> tuple[timing_grid.Outcome, list[float], list[Any]]:
    """A grid of four points, each of which takes `takes(share)` or raises it: what came of it, the shares, what was told."""
    clock, shares, told = Clock(), list[float](), list[Any]()
    monkeypatch.setattr(timing_grid, "time", clock)

    def measure(model: Any, point: Point, effort: Effort, until: float) -> dict[str, Any]:
        shares.append(until - clock.now)
        took = takes(shares[-1])
        if isinstance(took, BaseException):
            raise took
        clock.now += took
        return {"kind": "point", **vars(point)}

    monkeypatch.setattr(timing_grid, "measure", measure)
    rows = timing_grid.Rows(tmp_path / "raw.jsonl", {"kind": "machine"}, resume=False)
    spec: Any = None
    outcome = timing_grid.go_over(
        SimpleNamespace(device="cpu"), Grid((1, 2), (4, 8)), rows, spec, effort=Effort(), minutes=minutes,  # type: ignore[arg-type]
        progress=lambda *said: told.append(said), between=lambda: told.append("between"),
    )  # fmt: skip
    return outcome, shares, told


def test_minutes_are_shared_among_the_points_that_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four points of a minute: 15 s each; what one leaves is the others'."""
    outcome, shares, told = gone_over(monkeypatch, tmp_path, lambda share: share if share < 16 else 3.0)
    assert shares == pytest.approx([15, 15, 15, 15])
    assert (len(outcome.rows), outcome.failed) == (4, [])
    assert [each for each in told if each == "between"] == ["between"] * 4
    assert [each[:2] for each in told if each != "between"] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[0][2] == "eager width 1 context 4 batch 1"
    (tmp_path / "raw.jsonl").unlink()
    _, shares, _ = gone_over(monkeypatch, tmp_path, lambda _: 6.0)
    assert shares == pytest.approx([60 / 4, 54 / 3, 48 / 2, 42])


def test_points_that_fail_are_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = iter([RuntimeError("can't allocate memory: 9 GB"), ParameterError("no such width"), 40.0, 1.0])
    outcome, shares, told = gone_over(monkeypatch, tmp_path, lambda _: next(errors))
    assert shares == pytest.approx([15, 20, 30, 20])
    assert [reason for _, reason in outcome.failed] == ["out of memory: can't allocate memory: 9 GB", "no such width"]
    assert [point.width for point, _ in outcome.failed] == [1, 2]
    assert [row["kind"] for row in outcome.rows] == ["failed", "failed", "point", "point"]
    assert outcome.rows[0]["error"] == outcome.failed[0][1]
    assert told.count("between") == 2


def test_behind_a_lost_device_and_behind_the_minutes_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome, shares, _ = gone_over(monkeypatch, tmp_path, lambda _: RuntimeError("CUDA error: gone\nand more"))
    assert len(shares) == 1
    first, *others = [reason for _, reason in outcome.failed]
    assert first == "RuntimeError: CUDA error: gone"
    assert others == [f"the device was lost before it: {first}"] * 3
    (tmp_path / "raw.jsonl").unlink()
    outcome, shares, _ = gone_over(monkeypatch, tmp_path, lambda share: 4 * share)
    assert len(shares) == 1
    assert [reason for _, reason in outcome.failed] == ["the minutes were spent before it; --resume with more of them"] * 3


# --- one point ---


class Stub:
    """A pass that takes nothing, whose parts a clock of ours has timed."""

    def __init__(self, spans: dict[tuple[str, int], float]) -> None:
        self.spans, self.parts, self.done = spans, [*spans], list[str]()

    def run(self) -> None:
        self.done.append("run")

    def run_watched(self, mark: Any) -> None:
        self.done.append("watched")

    def back(self) -> None:
        self.done.append("back")

    def check(self) -> None:
        self.done.append("check")


def pointed(
    monkeypatch: pytest.MonkeyPatch,
    spans: dict[tuple[str, int], float],
    mode: str,
    wholes: list[float],
    marked: float,
    disturbed: list[bool] | None = None,
    layers: int = 4,
    **effort: Any,
) -> tuple[dict[str, Any], Stub]:
    work, stops = Stub(spans), iter([each for whole in wholes for each in (whole * 1e-6, marked * 1e-6)])
    unquiet = iter([each for was in disturbed or [False] * len(wholes) for each in (was, False)])
    clock = SimpleNamespace(
        start=lambda: None, stop=lambda: next(stops), disturbed=lambda: next(unquiet), mark=None,
        span=lambda name, index: 1e-6 * spans[name, index],
    )  # fmt: skip
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: clock)
    monkeypatch.setattr(single_pass, "prepared", lambda *_: work)
    model: Any = SimpleNamespace(device="cpu", decoder=SimpleNamespace(layers=layers))
    row = single_pass.measure(model, Point(mode, 2, 8, 1, 0, 3), Effort(**{"target": 0.0, "warmups": 2} | effort), float("inf"))
    return row, work


LAYERS_US = {("layer", 0): 10.0, ("layer", 1): 12.0, ("layer", 2): 14.0, ("layer", 3): 16.0}


def test_a_row_is_what_its_repeats_took(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("norm", 0): 2.0, ("head", 0): 30.0}
    row, work = pointed(monkeypatch, spans, "eager", [100, 104, 112, 180], 130, least=4, most=4)
    assert work.done == ["run", "back"] * 2 + ["watched", "back"] + ["run", "back", "watched", "back"] * 4 + ["check"]
    assert (row["kind"], row["mode"], row["width"], row["context"], row["round"]) == ("point", "eager", 2, 8, 3)
    assert row["whole_us"] == [103.0, 108.0, 129.0]  # the median between the quartiles
    assert row["marked_us"] == [130.0] * 3
    assert row["layers_us"] == [[each] * 3 for each in LAYERS_US.values()]
    assert (row["head_us"], row["embedding_us"]) == ([32.0] * 3, [5.0] * 3)  # the norm goes with the head
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (4, 0, 0)
    assert row["spread"] == round(26 / 108 / 2, 5)
    assert "sum_us" not in row


def test_a_row_of_the_interpreter_tells_its_call_and_its_look_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """52 us of layers and 5 us of embedding in a call of 70 us leave 13 us; the look is what is behind call and head."""
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0, ("call", 0): 70.0}
    row, _ = pointed(monkeypatch, spans, "interpreter", [100, 104, 112, 180], 130, least=4, most=4)
    assert row["whole_us"] == [103.0, 124.0, 129.0]  # the mean between them
    assert (row["sum_us"], row["rest_us"], row["look_us"]) == ([52.0] * 3, [13.0] * 3, [30.0] * 3)
    # Of a graph there is one stretch: 60 us of all four layers and 48 us of the first of them, each with what a replay takes.
    spans = {("embedding", 0): 0.0, ("layer", 0): 60.0, ("head", 0): 30.0, ("call", 0): 70.0, ("short", 1): 48.0}
    spans |= {("aside", 0): 20.0}
    row, _ = pointed(monkeypatch, spans, "interpreter", [100] * 4, 130, least=4, most=4)
    assert (row["sum_us"], row["rest_us"], row["look_us"]) == ([16.0] * 3, [54.0] * 3, [10.0] * 3)


def test_repeats_that_were_disturbed_count_only_for_want_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    row, _ = pointed(monkeypatch, spans, "eager", [100, 500, 104, 400, 300], 130, [False, True, False, True, True], least=3, most=5)
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (3, 2, 1)
    assert row["whole_us"] == [102.0, 104.0, 202.0]  # of 100, 104 and 300 us, the shortest of those disturbed


# --- what a machine can reach ---


@pytest.mark.parametrize(
    ("cache", "memory", "size"),
    [(2**20, 2**40, 2**28), (2**28, 2**40, 2**29), (2**28, 12 * 2**27, 2**27), (2**28, 2**20, 2**26), (0, 0, 2**26)],
)
def test_what_is_copied_lies_in_no_cache_and_leaves_memory_to_others(
    cache: int, memory: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the last cache and 256 MiB at least, a twelfth of the memory at most, but 64 MiB."""
    monkeypatch.setattr(machine, "_last_cache", lambda: cache)
    monkeypatch.setattr(machine, "memory", lambda _: memory)
    monkeypatch.setattr(machine, "_SHAPES", machine._SHAPES[:1])
    monkeypatch.setattr(machine, "_LAYOUTS", machine._LAYOUTS[:1])
    sizes: list[int] = []
    monkeypatch.setattr(machine, "_copy", lambda name, dtype, size: sizes.append(size))
    monkeypatch.setattr(machine, "_product", lambda *_: None)
    monkeypatch.setattr(machine, "_read", lambda *_: None)
    monkeypatch.setattr(machine, "_fastest", lambda *_, **__: 1.0)
    machine.Ceilings("cpu", "float32")
    assert sizes == [size]
    assert machine.Ceilings("cpu", "float32", quick=True).best.keys() == {"flop_per_s", "read_bytes_per_s", "copy_bytes_per_s"}
    assert sizes[1] < 2**28


def test_products_are_tried_in_every_layout_and_in_that_of_layers_first() -> None:
    assert machine._LAYOUTS[0] == (False, True)
    assert sorted(machine._LAYOUTS) == sorted(itertools.product((False, True), repeat=2))


def test_work_and_bytes_of_a_ceiling_are_those_of_its_matrices() -> None:
    side = 8
    for shape in machine._SHAPES:
        batch, m, k, n = shape[0], *(max(round(each * side), 1) for each in shape[1:])
        for layout in machine._LAYOUTS:
            made = machine._product("cpu", "float32", shape, layout, side)
            assert made.amount == 2 * batch * m * k * n
            result: Any = made.work()
            assert result.shape[-2:] == (m, n)
            assert result.numel() == batch * m * n
    for size in (1, 2**22):
        matrix = machine._matrix("cpu", "float32", size)
        whole = matrix.numel() * 4
        assert whole == max(size, 2**20)
        assert machine._copy("cpu", "float32", size).amount == 2 * whole  # read and written
        for layout in range(3):
            made = machine._read("cpu", "float32", layout, size)
            assert made.amount == whole
            result = made.work()
            assert result.numel() == matrix.shape[1 if layout == 2 else 0]


def test_the_best_try_counts_and_the_first_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    times, worked = iter([4.0, 2.0, 8.0]), []
    monkeypatch.setattr(machine, "clock_of", lambda _: SimpleNamespace(start=lambda: None, stop=lambda: next(times)))
    assert machine._fastest(machine._Kernel(lambda: worked.append(1), 8.0), "cpu", tries=3) == 4.0
    assert len(worked) == 4


def test_a_file_is_written_whole_or_not_at_all_with_all_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "file"
    with whole_files.whole(path) as part:
        part.write_text("some")
        assert part.parent == path.parent
        assert not path.exists()
    assert path.read_text() == "some"

    def broken_off() -> None:
        with whole_files.whole(path) as part:
            part.write_text("other")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [each.read_text() for each in path.parent.iterdir()] == ["some"]


# --- links ---


def test_links_are_timed_from_1_kib_to_64_mib_by_fours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def timed(link: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
        asked.append((link, sizes, repeats))
        return [{"kind": "link", "link": link, "size": size, "repeats": repeats, "time_us": [size / 4, size / 2, size]}
                for size in sizes]  # fmt: skip

    monkeypatch.setattr(transfers, "_timed", timed)
    monkeypatch.setattr(transfers, "there", lambda: ("shared-memory", "gloo"))
    told: list[Any] = []
    out = tmp_path / "new" / "deeper"  # made with all above it
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


def test_a_profile_of_a_link_says_where_and_how_it_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, from facts that are made up; a transfer that took no time says nothing of the bandwidth."""
    facts = {"name": "a made-up host", "torch": "9.9", "date": "2026-01-02", "cache_bytes": 4096}
    asked = list[str]()
    monkeypatch.setattr(machine, "facts", lambda device: asked.append(device) or dict(facts))
    took = {8: [0.0, 0.0, 1.0], 64: [3.0, 4.0, 5.0], 128: [9.0, 10.0, 11.0]}
    rows = [{"kind": "link", "size": size, "repeats": 7, "time_us": times} for size, times in took.items()]
    monkeypatch.setattr(transfers, "_timed", lambda *_: rows)
    monkeypatch.setattr(transfers, "there", lambda: transfers.LINKS)
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


def test_a_link_that_fails_is_named_and_the_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(link: str, *_: Any) -> list[dict[str, Any]]:
        if link == "gloo":
            raise RuntimeError("nobody answers\nat all")
        return [{"kind": "link", "link": link, "size": 8, "repeats": 1, "time_us": [1.0, 2.0, 3.0]}]

    monkeypatch.setattr(transfers, "_timed", timed)
    monkeypatch.setattr(transfers, "there", lambda: ("gloo", "shared-memory"))
    found = transfers.time_links(tmp_path, sizes=(8,))
    assert found.failed == {"gloo": "RuntimeError: nobody answers"}
    assert [*found.profiles] == ["shared-memory"]
    for wrong, said in (({"sizes": ()}, "sizes must be at least one number, got none"), ({"sizes": (8, 8)}, "different numbers"),
                        ({"sizes": (0,)}, "size must be"), ({"repeats": 0}, "repeats must be"), ({"name": "a b"}, "name must be"),
                        ({"links": ("nccl",)}, "link nccl is not there"), ({"links": ("tin",)}, "unknown link 'tin'")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            transfers.time_links(tmp_path / "none", **wrong)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_takes_half_of_there_and_back_and_the_first_ones_do_not_count(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = Clock(), list[str]()
    monkeypatch.setattr(transfers, "time", clock)

    def step(name: str, seconds: float) -> None:
        done.append(name)
        clock.now += seconds if len(done) > 6 else 50

    found = transfers._there_and_back(rank, 4, lambda: step("give", 3.0), lambda: step("take", 5.0))
    assert found == pytest.approx([4.0] * 4)
    assert done == [["give", "take"], ["take", "give"]][rank] * 7


def test_bytes_through_shared_memory_are_those_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends, as threads of this process; times come from the first alone."""
    monkeypatch.setattr(transfers, "end_with_starter", lambda: None)
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
    """A tensor of a device that is not there."""

    def __init__(self, size: int, at: Any) -> None:
        self.size, self.device, self.is_cuda = size, at, str(at).startswith("cuda")


@pytest.mark.parametrize(("link", "ends"), [
    ("host-to-device", ("cpu", "cuda:0")), ("device-to-host", ("cuda:0", "cpu")), ("device-to-device", ("cuda:0", "cuda:1")),
])  # fmt: skip
def test_a_copy_goes_from_end_to_end_and_the_first_ones_do_not_count(
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
    # Of eight turns the first three are left out: of 3 to 7 s the quartiles are 4, 5 and 6.
    assert found == [
        {"kind": "link", "link": link, "size": 8, "repeats": 5, "time_us": pytest.approx([4e6, 5e6, 6e6])},
        {"kind": "link", "link": link, "size": 64, "repeats": 5, "time_us": pytest.approx([12e6, 13e6, 14e6])},
    ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ends_send_each_other_what_they_got(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each end does of torch, in order; the messages themselves are not sent."""
    import torch

    monkeypatch.setattr(transfers, "end_with_starter", lambda: None)
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
def test_a_link_between_processes_is_timed_or_says_why_it_is_not(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ends are started beside this process; one that ends, or that nobody hears of, ends the wait."""
    clock, ends = Clock(), list[Any]()
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
        """Hears after 3 polls, if at all."""

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


def test_the_links_of_a_machine_are_those_of_its_gpus_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def has(gpus: int, distributed: bool = True, gloo: bool = True, nccl: bool = True, cuda: bool = True) -> tuple[str, ...]:
        answers = {"is_available": distributed, "is_gloo_available": gloo, "is_nccl_available": nccl}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return transfers.there()

    host, copies = ("shared-memory", "gloo"), ("host-to-device", "device-to-host")
    assert has(0) == has(2, cuda=False) == host
    assert has(0, gloo=False) == has(0, distributed=False) == host[:1]
    assert has(1) == host + copies
    assert has(2) == has(3) == (*host, *copies, "device-to-device", "nccl")
    assert has(2, nccl=False) == (*host, *copies, "device-to-device")


def test_an_end_that_fails_says_why() -> None:
    report, other = multiprocessing.Pipe()
    with transfers._reported(other):
        raise ValueError("no room\nin here")
    assert report.recv() == "ValueError: no room"
    report.close()
    with transfers._reported(other):  # nobody listens any more
        raise ValueError("no room")


# --- worker processes: what this one says to them, and how they end ---


class Worker:
    """A process and the end of its pipe: `obeys` it ends at its word, `hears` it can be told."""

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


def test_idle_workers_end_at_their_word_and_none_that_can_hang_is_waited_for() -> None:
    good, deaf, stubborn = Worker(), Worker(hears=False), Worker(obeys=False)
    pool = pooled(good, deaf, stubborn)
    words = [pool.board.slots[number] for number in range(1, 4)]
    pool.close()
    assert (good.said, stubborn.said) == ([("end",)], [("end",)])
    assert [each.killed for each in (good, deaf, stubborn)] == [False, True, True]
    assert all(1 < each.waited[0] <= 2 for each in (good, deaf, stubborn))
    assert all(slot[STOPPED] == 1 for slots in words for slot in slots)  # what they make is given up
    assert all(each.closed == ["closed"] * 2 for each in (good, deaf, stubborn))  # the pipe and the process
    pool.close()
    assert good.said == [("end",)]
    with pytest.raises(ProcessError, match="the processes are closed; start them anew"):
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
    assert (never.killed, never.waited, never.closed) == (False, [], [])  # it was never started


def test_whoever_has_an_answer_is_looked_at_before_anybody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pooled(Worker(), Worker())
    for post in pool.posts.values():
        post.flights, post.count = deque([object()]), 1  # type: ignore[list-item]
    slept: list[Any] = []

    def sleep(ends: Any, seconds: float) -> None:
        assert pool.board.words[0][LISTENING] == 1  # whoever answers now sends a byte
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


def test_a_worker_is_woken_only_where_it_sleeps() -> None:
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
    pool.board.slots[1][2][STOPPED] = 1  # of an earlier pass there
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
def test_what_processes_cannot_be_started_with_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said), started(workers.tiny("llama"), **wrong):
        pass


# --- the time of a log ---


def test_the_parts_of_a_logs_time_are_within_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is asked: a part takes a second for each stretch of it."""
    clock = Clock(step=1.0)
    monkeypatch.setattr(logging, "time", clock)
    decoders = real_models.decoders("llama", "draft")
    spent = logging.Spent()
    for groups in itertools.count(1):
        before = clock.now
        logging.logged(decoders["target"], {0: [3, 4, 5]}, 3, draft=decoders["draft"], spent=spent)
        passed = clock.now - 1000
        assert (spent.writing, spent.heads, spent.draft) == (groups, groups * real_models.DEPTHS["target"], groups)
        assert spent.trained_heads == 0
        assert spent.total == spent.writing + spent.heads + spent.draft <= passed
        assert clock.now > before
        if groups == 2:
            break


# --- what is left of a point ---


def test_a_pass_is_timed_while_no_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards collected or not as it was before."""
    seen: list[bool] = []
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    begin = Stub.run
    monkeypatch.setattr(Stub, "run", lambda self: (seen.append(gc.isenabled()), begin(self))[1])
    for was in (True, False):
        (gc.enable if was else gc.disable)()
        try:
            pointed(monkeypatch, spans, "eager", [100] * 2, 130, least=2, most=2)
            assert gc.isenabled() is was
        finally:
            gc.enable()
    assert seen == [False] * 8


@pytest.mark.parametrize(("now", "least", "most", "target", "spread_of", "repeats"), [
    (0.0, 2, 9, 0.0, 0.0, 9),  # a spread must be below the target
    (0.0, 2, 9, 1e-9, 0.0, 2), (0.0, 3, 9, 1e-9, 0.0, 3), (0.0, 4, 4, 0.0, 1.0, 4), (5.0, 3, 9, 0.0, 1.0, 3),
    (4.9, 3, 9, 0.0, 1.0, 9),
])  # fmt: skip
def test_a_point_ends_when_it_is_known_or_when_its_time_is_over(
    now: float, least: int, most: int, target: float, spread_of: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time ends at 5 s."""
    monkeypatch.setattr(single_pass, "time", SimpleNamespace(monotonic=lambda: now))
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    work, wholes = Stub(spans), itertools.cycle([1.0, 1.0, 1 + spread_of, 1 + spread_of])
    clock = SimpleNamespace(start=lambda: None, stop=lambda: next(wholes), disturbed=lambda: False, mark=None, span=lambda *_: 1.0)
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: clock)
    monkeypatch.setattr(single_pass, "prepared", lambda *_: work)
    model: Any = SimpleNamespace(device="cpu", decoder=SimpleNamespace(layers=4))
    row = single_pass.measure(model, Point("eager", 1, 0, 1, 0), Effort(target, least, most, warmups=0), 5.0)
    assert row["repeats"] == repeats
    assert work.done == ["watched", "back"] + ["run", "back", "watched", "back"] * repeats + ["check"]


def test_a_point_is_prepared_as_its_mode_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model cannot hold is refused before; the load of the machine is told where that is known."""
    from calibrate.timing import interpreter_pass, library_pass

    asked: list[Any] = []
    for module, name in ((library_pass, "EagerPass"), (library_pass, "GraphPass"), (interpreter_pass, "InterpretedPass")):
        monkeypatch.setattr(module, name, lambda *given, name=name: (name, *given))
    model: Any = SimpleNamespace(architecture=SimpleNamespace(longest=lambda *given: asked.append(given)))
    modes = {"eager": "EagerPass", "cuda-graph": "GraphPass", "interpreter": "InterpretedPass"}
    assert [*modes] == [*single_pass.MODES]
    for mode, name in modes.items():
        assert single_pass.prepared(model, 3, 8, 2, mode) == (name, model, 3, 8, 2)  # type: ignore[comparison-overlap]
        assert asked.pop() == (3, 8)
    assert single_pass.prepared(model, 3, 8, 2)[0] == "EagerPass"  # type: ignore[index]
    monkeypatch.setattr(single_pass.os, "getloadavg", lambda: (0.126, 9.0, 9.0))
    assert single_pass._load() == 0.13
    for error in (OSError, AttributeError):
        monkeypatch.setattr(single_pass.os, "getloadavg", lambda error=error: (_ for _ in ()).throw(error))
        assert single_pass._load() is None
    assert [str(Point("eager", 1, 2, 3, busy)) for busy in (0, 4)] == [
        "eager width 1 context 2 batch 3", "eager width 1 context 2 batch 3 busy 4",
    ]  # fmt: skip
    assert (Effort().target, Effort().least, Effort().most, Effort().warmups) == (0.005, 10, 1000, 5)
    for wrong, said in (({"target": -1.0}, "target must be at least 0"), ({"least": 0}, "least must be at least 1"),
                        ({"least": 5, "most": 4}, "most must be at least 5"), ({"warmups": -1}, "warmups must be")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            Effort(**wrong)
    Effort(0.0, 1, 1, 0)


# --- what is left of a grid ---


def test_a_grid_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    most = 1_000_000
    Grid((1, most), (0, most), (1, most), (0, most), rounds=1000)
    for wrong, said in (
        ({"widths": 4}, "widths must be a list of whole numbers, got 4"), ({"widths": ()}, "widths must be at least one number"),
        ({"widths": (0,)}, "widths must be between 1 and 1000000, got 0"), ({"widths": (most + 1,)}, "widths must be between"),
        ({"contexts": (-1,)}, "contexts must be between 0 and"), ({"batches": (0,)}, "batches must be between 1 and"),
        ({"busy": (-1,)}, "busy must be between 0 and"), ({"busy": (1, 1)}, "busy must be different numbers"),
        ({"rounds": 1001}, "rounds must be between 1 and 1000, got 1001"), ({"modes": ()}, "mode must be at least one, got none"),
        ({"modes": ("quick",)}, "unknown mode 'quick'"),
        ({"widths": tuple(range(1, 1002)), "contexts": tuple(range(100))}, "at most 100000 points, got 100100"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            Grid(**{"widths": (1,), "contexts": (0,)} | wrong)
    assert len(Grid(tuple(range(1, 1001)), tuple(range(100))).points()) == 100_000
    assert [*Grid((1, 2), (0,), (1, 3), (0, 2), ("eager", "interpreter"), 2).points()] == [
        Point(mode, width, 0, batch, busy, turn)
        for turn in range(2) for mode in ("eager", "interpreter") for busy in (0, 2) for batch in (1, 3) for width in (1, 2)
    ]  # fmt: skip
    with pytest.raises(ParameterError, match=r"gone\.jsonl cannot be read: "):
        timing_grid.read(tmp_path / "gone.jsonl")


def test_errors_are_told_in_a_line_and_a_device_may_be_lost_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    said = {
        MemoryError("9 GB\nmore"): ("out of memory: 9 GB", False), RuntimeError("x: can't allocate memory"): (
            "out of memory: x: can't allocate memory", False), RuntimeError(""): ("RuntimeError: ", False),
        torch.OutOfMemoryError("CUDA error"): ("out of memory: CUDA error", False),
        RuntimeError("CUDA error: gone"): ("RuntimeError: CUDA error: gone", True),
        ValueError("y" * 300): (f"ValueError: {'y' * 200}", False),
        torch.AcceleratorError("gone"): ("AcceleratorError: gone", True),
    }  # fmt: skip
    for error, expected in said.items():
        assert timing_grid.told(error) == expected
    emptied: list[int] = []

    def empty() -> None:
        emptied.append(1)
        raise RuntimeError("it is gone")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    timing_grid.release("cpu")
    assert emptied == []
    timing_grid.release("cuda:1")
    assert emptied == [1]


def test_as_many_companions_are_there_as_a_point_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept while points ask for as many, and ended when they do not, or when one has failed, and in the end."""
    from calibrate.timing import busy_neighbours

    said: list[Any] = []
    fails: list[Any] = []

    class Those:
        def __init__(self, count: int, spec: Any) -> None:
            self.count = count
            said.append(("began", count, spec))

        @contextlib.contextmanager
        def at(self, *what: Any) -> Any:
            passed: list[int] = []
            yield passed
            passed += [7] * self.count
            said.append(what)

        def close(self) -> None:
            said.append(("ended", self.count))

    def measure(*given: Any) -> dict[str, Any]:
        if fails:
            raise fails.pop()
        return {"given": given}

    monkeypatch.setattr(busy_neighbours, "Companions", Those)
    monkeypatch.setattr(timing_grid, "measure", measure)
    spec: Any = "a spec"
    model: Any = "a model"
    effort = Effort()

    def timed(busy: int) -> Any:
        return crowd.measure(model, Point("eager", 1, 8, 2, busy), effort, 3.0)

    with timing_grid._Crowd(spec) as crowd:
        assert timed(0) == {"given": (model, Point("eager", 1, 8, 2, 0), effort, 3.0)}
        assert said == []
        assert timed(2) == {"given": (model, Point("eager", 1, 8, 2, 2), effort, 3.0), "companion_passes": [7, 7]}
        timed(2)
        assert timed(1)["companion_passes"] == [7]
        what = (1, 8, 2, "eager")
        assert said == [("began", 2, spec), what, what, ("ended", 2), ("began", 1, spec), what]
        said.clear()
        fails.append(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            timed(1)
        assert said == [("ended", 1)]
        timed(1)
        assert said[1:] == [("began", 1, spec), what]
    assert said[-1] == ("ended", 1)
    assert (crowd.count, crowd.companions) == (0, None)


def test_weights_of_a_kind_that_is_not_timed_are_refused_before_anything_is_built() -> None:
    from calibrate.timing import library_pass

    model: Any = None
    with pytest.raises(ParameterError, match=r"unknown dtype 'float64'; .*known: bfloat16, float16, float32"):
        library_pass.Model(model, "cpu", "float64")
    nine: Any = SimpleNamespace(name="some", shape=SimpleNamespace(layers=9))
    decoder = real_models.decoders("llama")["target"]
    with pytest.raises(RuntimeError, match="some has 5 layers, 9 expected"):
        library_pass.Model(nine, "cpu", "float32", decoder=decoder)


# --- a pass as decoding makes it ---


def interpreted(width: int, context: int, batch: int, unequal: bool = False, kind: str = "llama") -> tuple[Any, list[Any]]:
    """Of a tiny model whose random tokens are 3, 4, 5, ... ; and what it was asked to run, with what came before."""
    import torch

    from calibrate.timing import interpreter_pass

    decoder = real_models.decoders(kind)["target"]
    asked: list[Any] = []
    run = decoder.run

    def noted(tokens: tuple[int, ...], at: int, first: int, last: int, *more: Any, **how: Any) -> Any:
        asked.append((tokens, at, first, last, how["batch"], how["places"]))
        return run(tokens, at, first, last, *more, **how)

    decoder.run = noted
    model: Any = SimpleNamespace(
        architecture=SimpleNamespace(crossing=kind == "t5", name=kind), decoder=decoder, unequal=unequal,
        read_source=lambda: asked.append("source"),
        tokens=lambda batch, count: torch.arange(3, 3 + batch * count).view(batch, count),
    )  # fmt: skip
    return interpreter_pass.InterpretedPass(model, width, context, batch), asked


def test_a_pass_of_the_interpreter_is_at_another_place_every_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind rows that are made some at a time; every layer, the embedding, the head and the call are marked, and nothing after."""
    from calibrate.timing import interpreter_pass

    monkeypatch.setattr(interpreter_pass, "CHUNK", 4)
    work, asked = interpreted(2, 6, 1)
    depth = real_models.DEPTHS["target"]
    filling = [((3, 4, 5, 6), 0, 0, depth, 1, ()), ((3, 4), 4, 0, depth, 1, ())]
    passes = [((3, 4), at, 0, depth, 1, ()) for at in (6, 7)]
    assert asked == ["source", *filling, *passes]
    marks: list[Any] = []
    work.run_watched(lambda *mark: marks.append(mark))
    work.run()
    work.back()
    assert asked[5:] == passes
    layers = [("layer", index) for index in range(depth)]
    assert work.parts == [("embedding", 0), *layers, ("head", 0), ("call", 0)]
    inner = [(*part, edge) for part in [("embedding", 0), *layers] for edge in (0, 1)]
    assert marks == [("call", 0, 0), *inner, ("call", 0, 1), ("head", 0, 0), ("head", 0, 1)]
    assert (work.replayed, work.short) == (False, 0)
    assert work.real.work.tokens == work.real.work.committed == work.real.work.commits == []
    work.check()
    for length in (7, 10):
        work.task.cache.rows["target"].layers[0].length = length
        with pytest.raises(RuntimeError, match="layers should hold 8 positions or one more, they hold"):
            work.check()


def test_texts_of_a_batch_are_at_places_of_their_own_where_drafts_are_made_or_verified() -> None:
    depth = real_models.DEPTHS["target"]
    for width, context, unequal, places in ((1, 6, False, ()), (2, 6, False, (6, 5, 6)), (1, 6, True, (6, 5, 6)), (2, 0, True, ())):
        work, asked = interpreted(width, context, 3, unequal)
        tokens = tuple(range(3, 3 + 3 * width))
        first, second = asked[-2:]
        assert first == (tokens, min(places, default=context), 0, depth, 3, places)
        assert second == (tokens, min(places, default=context) + 1, 0, depth, 3, tuple(each + 1 for each in places))
        assert work.texts == (0, 1, 2)
        if context:
            assert asked[1] == (tuple(range(3, 3 + 18)), 0, 0, depth, 3, ())
    with pytest.raises(ParameterError, match="batch must be 1 with an encoder-decoder such as t5, got 2"):
        interpreted(1, 0, 2, kind="t5")
    assert interpreted(1, 0, 1, unequal=True)[0].unequal is False
