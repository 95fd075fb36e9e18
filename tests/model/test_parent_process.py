"""Worker processes end with their parent, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = (
    "import os, sys, time; from model.base.parent_process import exit_with_parent; exit_with_parent(int(sys.argv[1]), 0.05); "
    "print('there', flush=True); {}"
)
PARENT = """
import os, subprocess, sys, time
found = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(found.pid, flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """True if a process runs; a zombie (ended but not waited for) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("work", ["time.sleep(600)", "[sum(range(1000)) for _ in iter(int, 1)]"], ids=["waiting", "busy"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_worker_ends_with_its_parent(work: str, how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD.format(work)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    lines = sorted(parent.stdout.readline().strip() for _ in range(2))  # process number and message of the worker
    child = int(lines[0])
    assert lines[1] == "there"
    assert alive(child)
    os.kill(parent.pid, how)
    parent.wait()
    try:
        assert gone([child], 60)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("jobs", ["2", "dask"])
def test_workers_of_a_killed_sweep_end_and_leave_nothing(tmp_path: Path, jobs: str) -> None:
    """After a sweep is killed, no process of its group is left, and no semaphore or shared memory of the sweep."""
    command = [sys.executable, "-m", "sim", "run", "-j", jobs, "-q", "--no-figures", "--replications", "200000"]
    main = subprocess.Popen([*command, "-o", str(tmp_path)], cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)

    def group() -> list[int]:
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdecimal() and alive(int(each.name)):
                try:
                    if os.getpgid(int(each.name)) == main.pid:
                        found.append(int(each.name))
                except OSError:
                    continue
        return found

    try:
        end = time.monotonic() + 120
        while not [*tmp_path.glob("shards/*.parquet")] and time.monotonic() < end:
            time.sleep(0.1)
        pids = group()
        assert len(pids) > 2
        os.kill(main.pid, signal.SIGKILL)
        main.wait()
        assert gone(pids, 60)
        left = [each.name for each in Path("/dev/shm").iterdir()]
        assert not [name for name in left if f"-{main.pid}-" in name or f"_{main.pid}_" in name]
    finally:
        for pid in group():
            os.kill(pid, signal.SIGKILL)
