"""Runs that are killed, interrupted, damaged or out of disk space: finished shards are kept, and the tables are byte-identical."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from model.base.checks import ParameterError
from sim.commands.sim_app import app
from sim.runs import executor, shard_plan, sweep
from sim.runs.atomic_files import is_unchanged, locked, write_content, write_hashed
from sim.runs.shard_plan import Shard
from sim.scenarios.cases import Case
from sim.views import evaluation

SHARD_SECONDS = 1 / 15
"""With this value a small run has five shards."""
TABLES = ("results.parquet", "results.csv", "distribution.parquet")


def scenario(rates: int = 6, **settings: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "small", "tokens": 32, "replications": 20, "views": ["formula", "paths", "events"], **settings},
        "method": [{"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}],
        "outcomes": {"kind": "iid", "match_rate": 0.5, "trials": 1000},
        "sweep": {"outcomes.match_rate": [(1 + rate) / (rates + 1) for rate in range(rates)], "method.candidates": [1, 2]},
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shards/*.parquet"))


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_plan, "SHARD_SECONDS", SHARD_SECONDS)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    sweep.run(scenario(), out=folder, jobs=1)
    return folder


SCRIPT = """
import functools
import sys
from pathlib import Path
from sim.runs import shard_plan, sweep
from tests.sim import test_sweep

def said(done, _):
    if done == 3:
        print("three are done", flush=True)

shard_plan.SHARD_SECONDS = test_sweep.SHARD_SECONDS
sweep.compute = functools.partial(test_sweep.waiting, Path(sys.argv[1]).with_name("go"))
sweep.run(test_sweep.scenario(), out=sys.argv[1], jobs=int(sys.argv[2]), progress=said)
"""
compute = sweep.compute


def waiting(permission: Path, shard: Shard, **more: Any) -> bytes:
    """Compute a shard; the last two wait for permission, which is a file."""
    while shard.view == "events" and shard.first and not permission.exists():
        time.sleep(0.01)
    return compute(shard, **more)


def started(folder: Path, jobs: int) -> subprocess.Popen[str]:
    """A run in a separate process that has finished three of its five shards and waits before the others."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(jobs)], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "three are done\n"
    return child


def workers_of(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    return [int(child) for child in children if b"loky" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_run_is_resumed_without_repeating_anything(tmp_path: Path, reference: Path, jobs: int) -> None:
    folder = tmp_path / "run"
    with started(folder, jobs) as child:
        os.killpg(child.pid, signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in shards(folder)}
    report = sweep.run(scenario(), out=folder, jobs=3 - jobs, resume=True)
    assert (report.resumed, report.computed) == (len(before), 2) == (3, 2)
    assert len(shards(folder)) == 5
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert contents(folder) == contents(reference)
    assert not list(folder.rglob("*.tmp"))
    again = sweep.run(scenario(), out=folder, resume=True)
    assert again.computed == 0
    assert contents(folder) == contents(reference)


@pytest.mark.slow  # the quick tier has the same with workers in this process, below
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for workers in /proc")
def test_shards_of_a_dead_worker_are_submitted_again(tmp_path: Path, reference: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, 2) as child:
        victims = [each for each in workers_of(child.pid) if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()]
        os.kill(victims[0], signal.SIGKILL)
        (tmp_path / "go").touch()
        _, errors = child.communicate()
    assert child.returncode == 0, errors
    assert contents(folder) == contents(reference)


@pytest.mark.parametrize(("deaths", "told"), [([2, 2], True), ([3], True), ([2, 3], True), ([2, 1, 2], False)])
def test_workers_that_keep_dying_end_the_run(
    deaths: list[int], told: bool, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times without a shard between; a shard that is finished begins the count anew, also one of which a worker could not
    tell any more."""
    import joblib
    from joblib.externals.loky.process_executor import BrokenProcessPool

    left = list(deaths)

    class Dying:
        """Replacement of worker processes: dies `deaths[0]` times, finishes a shard and dies, and so on; then finishes the rest."""

        def __init__(self, n_jobs: int, **_: Any) -> None:
            assert n_jobs == 2

        def __call__(self, tasks: Iterator[Any]) -> Iterator[Any]:
            for function, (_, work, task, path), _ in tasks:
                assert function is executor._in_worker
                if left and left[0]:
                    left[0] -= 1
                    raise BrokenProcessPool
                made = task, write_content(path, work(task))
                finished.append(task)
                if told or not left:
                    yield made
                if left:
                    del left[0]
                    raise BrokenProcessPool

    finished: list[sweep.Shard] = []
    monkeypatch.setattr(joblib, "Parallel", Dying)
    if max(deaths) < 3:
        assert sweep.run(scenario(), out=tmp_path / "run", jobs=2).computed == 5
        assert len(finished) == len({*finished}) == 5
        assert contents(tmp_path / "run") == contents(reference)
    else:
        with pytest.raises(sweep.RunError, match="workers died 3 times without finishing a task"):
            sweep.run(scenario(), out=tmp_path / "run", jobs=2)
    assert not any(left)


def test_damaged_shards_are_computed_again(tmp_path: Path, reference: Path) -> None:
    folder = shutil.copytree(reference, tmp_path / "run")
    first, second, third, *_ = shards(folder)
    data = bytearray(first.read_bytes())
    data[len(data) // 3] ^= 1  # the footer with the schema is unchanged
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-20])
    third.write_bytes(b"")
    report = sweep.run(scenario(), out=folder, jobs=1, resume=True)
    assert report.computed == 3
    assert contents(folder) == contents(reference)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk_keeps_finished_shards(tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    folder = tmp_path / "run"

    def full(shard: Shard, **more: Any) -> bytes:
        if shard.view == "events" and shard.first > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
        return original(shard, **more)

    original = sweep.compute
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "compute", full)
        with pytest.raises(sweep.RunError, match=rf"No space left.*kept in {folder}.*--resume"):
            sweep.run(scenario(), out=folder, jobs=jobs)
    kept = len(shards(folder))
    report = sweep.run(scenario(), out=folder, jobs=1, resume=True)
    assert report.resumed == kept > 0
    assert contents(folder) == contents(reference)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "sim", "run", *map(str, arguments), "--no-figures"]


@pytest.mark.usefixtures("interruptible")
def test_interrupted_command_explains_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    whole = sweep.compute

    def compute(*given: Any, **more: Any) -> bytes:
        if shards(folder):
            signal.raise_signal(signal.SIGINT)
        return whole(*given, **more)

    monkeypatch.setattr(sweep, "compute", compute)
    done = CliRunner().invoke(app, ["run", *map(str, ("ppd-forms", "-j", 1, "-o", folder)), "--no-figures"])
    assert done.exit_code == 130
    assert done.stdout == ""
    assert done.stderr == f"interrupted; finished shards are kept in {folder}; resume with the same command and --resume\n"
    assert len(shards(folder)) == 1


@pytest.mark.slow  # its progress at the signal depends on timing
@pytest.mark.parametrize("jobs", [1, 2, "dask"])
def test_command_interrupted_by_a_signal_explains_how_to_resume(tmp_path: Path, jobs: int | str) -> None:
    folder = tmp_path / "run"
    child = subprocess.Popen(
        command("ppd-forms", "--set", "scenario.event_replications=1000", "-j", jobs, "-o", folder), start_new_session=True,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it is ignored where tests run in the background
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(shards(folder)) < 3 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    printed, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert printed == ""
    assert errors == f"interrupted; finished shards are kept in {folder}; resume with the same command and --resume\n"
    assert len(shards(folder)) >= 3


def test_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = scenario(rates=1, views=["formula"])
    sweep.run(small, out=folder)
    before = contents(folder)
    with locked(folder) as free:
        assert free
        with pytest.raises(ParameterError, match="another run is at work"):
            sweep.run(small, out=folder)
    assert contents(folder) == before
    assert sweep.run(small, out=folder, resume=True).computed == 0


def test_failed_point_is_listed_separately(tmp_path: Path) -> None:
    tables = scenario(rates=2, views=["formula"])
    tables["sweep"] |= {"method.exit_layer": [20, 30], "method.layers": [25, 40]}
    report = sweep.run(tables, out=tmp_path / "run")
    assert len(report.failed) == 4
    assert all(row["method.exit_layer"] == "30" and row["method.layers"] == "25" for row in report.failed)
    assert not set(report.frame()["point"]) & {row["point"] for row in report.failed}
    assert report.rows == 16 - 4


def test_failed_view_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One point fails only in the view events: its other views, and all of the next point, are in the table."""
    whole = evaluation.events_row

    def events_row(case: Case, start: int, stop: int) -> dict[str, Any]:
        if (case.outcomes["match"].rate, case.parameters.candidates) == (1 / 3, 1):
            raise ParameterError("no events here")
        return whole(case, start, stop)

    monkeypatch.setattr(evaluation, "events_row", events_row)
    report = sweep.run(scenario(rates=2), out=tmp_path / "run", jobs=1)
    assert {(row["point"], row["view"], row["error"]) for row in report.failed} == {(0, "events", "no events here")}
    rows = report.frame().filter(pl.col("point") < 2).select("point", "view").rows()
    assert rows == [(0, "formula"), (0, "paths"), (1, "formula"), (1, "paths"), (1, "events")]


def test_unwritable_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise pl.exceptions.ComputeError("no room left\nand more of that")

    monkeypatch.setattr(pl.DataFrame, "write_csv", broken)
    with pytest.raises(sweep.RunError) as caught:
        sweep.run(scenario(rates=1, views=["formula"]), out=tmp_path / "run", jobs=1)
    line, why = str(caught.value), "cannot be written or read again (disk full?): no room left; "
    assert line.startswith(f"a table in {tmp_path / 'run'} {why}")
    assert "and more" not in line


def test_run_wide_keys_cannot_be_swept(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"scenario\.replications cannot be swept"):
        sweep.run(scenario(), out=tmp_path / "run", sweep={"scenario.replications": [10, 20]})


def test_changed_file_is_detected(tmp_path: Path) -> None:
    path = write_hashed(tmp_path / "a-b.txt", lambda temporary: temporary.write_text("whole", encoding="utf-8"))
    assert is_unchanged(path)
    path.write_text("half", encoding="utf-8")
    assert not is_unchanged(path)
    assert not is_unchanged(tmp_path / "missing-0.txt")


MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def peak_mib(arguments: list[str]) -> float:
    """Peak memory of the largest process of a command [MiB]."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], check=True, capture_output=True, text=True)
    return float(done.stdout)


IID = ("ppd-forms", "--set", "method.form=literal", "--set", "method.exit_layer=20")


@pytest.mark.slow
def test_ten_million_points_in_bounded_memory(tmp_path: Path) -> None:
    axes = ("--sweep", "outcomes.match_rate=0:1:10000", "--sweep", "scenario.tokens=1:1000:1000")
    assert peak_mib(command(*IID, *axes, "--view", "formula", "-o", tmp_path / "run")) < 2500
    table = pl.scan_parquet(tmp_path / "run" / "results.parquet")
    ordered = table.select(pl.len() == 10_000_000, (pl.col("point") == pl.int_range(pl.len())).all().alias("order")).collect()
    assert ordered.row(0) == (True, True)
    assert not (tmp_path / "run" / "results.csv").exists()


@pytest.mark.slow
def test_ten_million_decodings_in_bounded_memory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert peak_mib(command(*IID, "--view", "paths", "--replications", 10_000_000, "-j", 1, "-o", folder)) < 400
    row = pl.read_parquet(folder / "results.parquet").row(0, named=True)
    assert row["replications"] == 10_000_000
    assert pl.read_parquet(folder / "distribution.parquet")["probability"].sum() == pytest.approx(1, abs=1e-12)
