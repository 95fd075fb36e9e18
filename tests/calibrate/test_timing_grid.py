"""The grid of timed passes: shares of the minutes, and points that fail."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.devices.device_failures import failure_of
from calibrate.timing import library_pass, timing_grid
from calibrate.timing.single_pass import Effort, Point
from calibrate.timing.timing_grid import TimingGrid
from model.base.checks import ParameterError
from tests.support import real_models
from tests.support.fake_clocks import SteppedClock

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


def test_each_round_has_every_point_once() -> None:
    grid = TimingGrid((1, 2), (8,), (1, 4), (0, 1), ("eager", "cuda-graph"), rounds=3)
    points = grid.points()
    assert len(points) == len(set(points)) == 2 * 1 * 2 * 2 * 2 * 3
    assert [point.round for point in points] == sorted(point.round for point in points)


# --- shares of the minutes ---


def gone_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, takes: Any, minutes: float = 1.0
) -> tuple[timing_grid.TimedGrid, list[float], list[Any]]:
    """Time a grid of four points that take or raise `takes(share)`; return the outcome, the shares, and the progress reports."""
    clock, shares, told = SteppedClock(), list[float](), list[Any]()
    monkeypatch.setattr(timing_grid, "time", clock)

    def measure(model: Any, point: Point, effort: Effort, until: float) -> dict[str, Any]:
        shares.append(until - clock.now)
        took = takes(shares[-1])
        if isinstance(took, BaseException):
            raise took
        clock.now += took
        return {"kind": "point", **vars(point)}

    monkeypatch.setattr(timing_grid, "measure", measure)
    rows = timing_grid.RawTimings(tmp_path / "raw.jsonl", {"kind": "machine"}, resume=False)
    spec: Any = None
    outcome = timing_grid.time_grid(
        SimpleNamespace(device="cpu"), TimingGrid((1, 2), (4, 8)), rows, spec, effort=Effort(), minutes=minutes,  # type: ignore[arg-type]
        progress=lambda *said: told.append(said), between=lambda: told.append("between"),
    )  # fmt: skip
    return outcome, shares, told


def test_remaining_points_share_the_remaining_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four points in a minute: 15 s each; the rest of a short point is shared by the others."""
    outcome, shares, told = gone_over(monkeypatch, tmp_path, lambda share: share if share < 16 else 3.0)
    assert shares == pytest.approx([15, 15, 15, 15])
    assert (len(outcome.rows), outcome.failed) == (4, [])
    assert [each for each in told if each == "between"] == ["between"] * 4
    assert [each[:2] for each in told if each != "between"] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[0][2] == "eager width 1 context 4 batch 1"
    (tmp_path / "raw.jsonl").unlink()
    _, shares, _ = gone_over(monkeypatch, tmp_path, lambda _: 6.0)
    assert shares == pytest.approx([60 / 4, 54 / 3, 48 / 2, 42])


def test_failed_points_are_reported_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = iter([RuntimeError("can't allocate memory: 9 GB"), ParameterError("no such width"), 40.0, 1.0])
    outcome, shares, told = gone_over(monkeypatch, tmp_path, lambda _: next(errors))
    assert shares == pytest.approx([15, 20, 30, 20])
    assert [reason for _, reason in outcome.failed] == ["out of memory: can't allocate memory: 9 GB", "no such width"]
    assert [point.width for point, _ in outcome.failed] == [1, 2]
    assert [row["kind"] for row in outcome.rows] == ["failed", "failed", "point", "point"]
    assert outcome.rows[0]["error"] == outcome.failed[0][1]
    assert told.count("between") == 2


def test_no_point_is_tried_after_a_lost_device_or_the_last_minute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome, shares, _ = gone_over(monkeypatch, tmp_path, lambda _: RuntimeError("CUDA error: gone\nand more"))
    assert len(shares) == 1
    first, *others = [reason for _, reason in outcome.failed]
    assert first == "RuntimeError: CUDA error: gone"
    assert others == [f"not reached, because the device was lost: {first}"] * 3
    (tmp_path / "raw.jsonl").unlink()
    outcome, shares, _ = gone_over(monkeypatch, tmp_path, lambda share: 4 * share)
    assert len(shares) == 1
    assert [reason for _, reason in outcome.failed] == ["not reached within the minutes; --resume with more --minutes"] * 3


# --- settings, errors and neighbours ---


def test_wrong_grid_settings_are_refused(tmp_path: Path) -> None:
    most = 1_000_000
    TimingGrid((1, most), (0, most), (1, most), (0, most), rounds=1000)
    for wrong, said in (
        ({"widths": 4}, "widths must be a list of whole numbers, got 4"), ({"widths": ()}, "widths must have at least one number"),
        ({"widths": (0,)}, "widths must be between 1 and 1000000, got 0"), ({"widths": (most + 1,)}, "widths must be between"),
        ({"contexts": (-1,)}, "contexts must be between 0 and"), ({"batches": (0,)}, "batches must be between 1 and"),
        ({"busy": (-1,)}, "busy must be between 0 and"), ({"busy": (1, 1)}, "busy must be different numbers"),
        ({"rounds": 1001}, "rounds must be between 1 and 1000, got 1001"), ({"modes": ()}, "mode must be at least one, got none"),
        ({"modes": ("quick",)}, "unknown mode 'quick'"),
        ({"widths": tuple(range(1, 1002)), "contexts": tuple(range(100))}, "at most 100000 points, got 100100"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            TimingGrid(**{"widths": (1,), "contexts": (0,)} | wrong)
    assert len(TimingGrid(tuple(range(1, 1001)), tuple(range(100))).points()) == 100_000
    assert [*TimingGrid((1, 2), (0,), (1, 3), (0, 2), ("eager", "interpreter"), 2).points()] == [
        Point(mode, width, 0, batch, busy, turn)
        for turn in range(2) for mode in ("eager", "interpreter") for busy in (0, 2) for batch in (1, 3) for width in (1, 2)
    ]  # fmt: skip
    with pytest.raises(ParameterError, match=r"gone\.jsonl cannot be read: "):
        timing_grid.read(tmp_path / "gone.jsonl")


def test_device_errors_are_one_line_and_tell_whether_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:

    said = {
        MemoryError("9 GB\nmore"): ("out of memory: 9 GB", False), RuntimeError("x: can't allocate memory"): (
            "out of memory: x: can't allocate memory", False), RuntimeError(""): ("RuntimeError: ", False),
        torch.OutOfMemoryError("CUDA error"): ("out of memory: CUDA error", False),
        RuntimeError("CUDA error: gone"): ("RuntimeError: CUDA error: gone", True),
        torch.AcceleratorError("CUDA error: out of memory"): ("out of memory: CUDA error: out of memory", False),
        ValueError("y" * 300): (f"ValueError: {'y' * 200}", False),
        torch.AcceleratorError("gone"): ("AcceleratorError: gone", True),
    }  # fmt: skip
    for error, expected in said.items():
        assert failure_of(error).memory is expected[0].startswith("out of memory")
        assert (failure_of(error).line, failure_of(error).lost) == expected
    emptied: list[int] = []

    def empty() -> None:
        emptied.append(1)
        raise RuntimeError("it is gone")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    timing_grid.release("cpu")
    assert emptied == []
    timing_grid.release("cuda:1")
    assert emptied == [1]


def test_companions_match_the_busy_processes_of_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept while their number stays, and ended when it changes, after a failure, and at the end."""
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
        return neighbours.measure(model, Point("eager", 1, 8, 2, busy), effort, 3.0)

    with timing_grid._Neighbours(spec) as neighbours:
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
    assert (neighbours.count, neighbours.companions) == (0, None)


def test_unknown_dtypes_and_wrong_depths_are_refused() -> None:

    model: Any = None
    with pytest.raises(ParameterError, match=r"unknown dtype 'float64'; .*known: bfloat16, float16, float32"):
        library_pass.LibraryModel(model, "cpu", "float64")
    nine: Any = SimpleNamespace(name="some", shape=SimpleNamespace(layers=9))
    decoder = real_models.decoders("llama")["target"]
    with pytest.raises(RuntimeError, match="some has 5 layers, 9 expected"):
        library_pass.LibraryModel(nine, "cpu", "float32", decoder=decoder)
