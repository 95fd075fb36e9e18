"""Runs on a dask cluster of two processes: files equal to those of local runs, also if a worker or the scheduler dies or the run is
interrupted; and everything that is refused."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from sim.commands.sim_app import app
from sim.runs import dask_cluster, environment, sweep
from sim.runs.shard_plan import Shard
from sim.serving import serving_run
from tests.sim.test_serving_scenario import tables as serving_tables
from tests.sim.test_sweep import contents, reference, scenario, shards, small_shards  # noqa: F401  fixtures

compute = sweep.compute
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    with dask_cluster._quiet(), dask_cluster.local_cluster(2) as started:
        yield started


def everything(folder: Path) -> dict[str, bytes]:
    """Tables, and the shards with their names, which have hashes of the contents."""
    return contents(folder) | {path.name: path.read_bytes() for path in shards(folder)}


def refused(*arguments: object) -> str:
    """The line of a refused command."""
    done = CliRunner().invoke(app, ["run", "ppd-forms", *map(str, arguments), "--no-figures"])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_results_are_equal_to_those_of_local_processes(
    cluster: distributed.LocalCluster, reference: Path, tmp_path: Path  # noqa: F811
) -> None:
    """To the byte, with two workers, with one, and by the command."""
    seen: list[tuple[int, int]] = []
    address = cluster.scheduler_address
    made = sweep.run(scenario(), out=tmp_path / "two", scheduler=address, progress=lambda *each: seen.append(each))
    assert (made.computed, made.resumed, seen) == (5, 0, [(done, 5) for done in range(1, 6)])
    assert everything(tmp_path / "two") == everything(reference)
    with dask_cluster.local_cluster(1) as one:
        sweep.run(scenario(), out=tmp_path / "one", scheduler=one.scheduler_address)
    assert everything(tmp_path / "one") == everything(reference)
    words = ["run", "ppd-forms", "--no-figures", "--view", "formula,paths"]
    for name, more in {"there": ["--scheduler", address], "here": ["-j", "1"]}.items():
        done = CliRunner().invoke(app, [*words, *more, "-o", str(tmp_path / name)])
        assert (done.exit_code, done.stderr) == (0, "")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert sim.run(scenario(), scheduler=address).equals(made.frame())


def test_a_local_cluster_has_a_process_for_each_core(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with dask_cluster.opened("dask", None) as workers:
        assert isinstance(workers, dask_cluster.DaskWorkers)
        assert [*workers.client.nthreads().values()] == [1, 1, 1]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    sweep.run(scenario(), out=tmp_path / "run", jobs="dask")
    assert everything(tmp_path / "run") == everything(reference)


def test_runs_of_servers_are_equal_to_those_of_local_processes(cluster: distributed.LocalCluster, tmp_path: Path) -> None:
    serving_run.run(serving_tables(), out=tmp_path / "there", scheduler=cluster.scheduler_address)
    serving_run.run(serving_tables(), out=tmp_path / "here", jobs=1)
    files = {name: [path for path in (tmp_path / name).rglob("*") if path.is_file()] for name in ("there", "here")}
    there, here = ({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths} for name, paths in files.items())
    assert {*there} == {*here}
    assert [name for name in here if here[name] != there[name]] == ["serving.json"]  # it names the directory


def noted(folder: Path, shard: Shard, **more: Any) -> bytes:
    """Note which process starts which shard; the first to start one of the last two waits for its end."""
    started = folder / f"{shard.view}-{shard.first}-{os.getpid()}"
    started.touch()
    if shard.view == "events" and shard.first:
        try:
            (folder / "victim").touch(exist_ok=False)
        except FileExistsError:
            return compute(shard, **more)
        (folder / "victim").write_text(str(os.getpid()))
        time.sleep(60)
    return compute(shard, **more)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_shards_of_a_worker_that_dies_are_sent_again(
    cluster: distributed.LocalCluster, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    killed: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 60
        while not ((notes / "victim").is_file() and (notes / "victim").read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        killed.append(int((notes / "victim").read_text()))
        os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(sweep, "compute", functools.partial(noted, notes))
    killer = threading.Thread(target=kill)
    killer.start()
    made = sweep.run(scenario(), out=tmp_path / "run", scheduler=cluster.scheduler_address)
    killer.join()
    starts = [path.name.rpartition("-")[::2] for path in notes.iterdir() if path.name != "victim"]
    theirs = {shard for shard, pid in starts if int(pid) == killed[0]}
    assert any(int(pid) != killed[0] and shard in theirs for shard, pid in starts)  # another worker has started it anew
    assert made.computed == 5
    assert everything(tmp_path / "run") == everything(reference)


def dying(shard: Shard, **more: Any) -> bytes:
    if shard.view == "paths":
        os._exit(1)
    return compute(shard, **more)


def test_a_shard_whose_workers_keep_dying_ends_the_run(
    cluster: distributed.LocalCluster, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 1)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "compute", dying)
        with pytest.raises(sweep.RunError, match=rf"2 workers died of a task \(out of memory\?\); .*kept in {folder}; .*--resume$"):
            sweep.run(scenario(), out=folder, scheduler=cluster.scheduler_address)
    kept = len(shards(folder))
    made = sweep.run(scenario(), out=folder, scheduler=cluster.scheduler_address, resume=True)
    assert (made.resumed, made.computed) == (kept, 5 - kept)
    assert everything(folder) == everything(reference)


def failing(error: type[Exception], shard: Shard, **_: Any) -> bytes:
    raise error("no such file")


def test_errors_of_workers_are_those_of_local_runs(
    cluster: distributed.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, expected in {OSError: sweep.RunError, ParameterError: ParameterError, ImportError: ParameterError}.items():
        monkeypatch.setattr(sweep, "compute", functools.partial(failing, error))
        with pytest.raises(expected, match="no such file"):
            sweep.run(scenario(), out=tmp_path / error.__name__, scheduler=cluster.scheduler_address)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_is_resumed(
    cluster: distributed.LocalCluster, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """With other workers, too; and the cluster is left without tasks."""
    write = dask_cluster.write_content

    def interrupted(path: Path, content: bytes) -> Path:
        written = write(path, content)
        signal.raise_signal(signal.SIGINT)
        return written

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(dask_cluster, "write_content", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"finished shards are kept in .*; resume with the same command and --resume"):
            sweep.run(scenario(), out=folder, scheduler=cluster.scheduler_address)
    assert len(shards(folder)) == 1
    end = time.monotonic() + 20
    while cluster.scheduler.tasks and time.monotonic() < end:
        time.sleep(0.01)
    assert not cluster.scheduler.tasks
    made = sweep.run(scenario(), out=folder, jobs=1, resume=True)
    assert (made.resumed, made.computed) == (1, 4)
    assert everything(folder) == everything(reference)


def test_a_lost_scheduler_ends_the_run(reference: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "run"
    with dask_cluster._quiet(), dask_cluster.local_cluster(1) as other:

        def lose(done: int, _: int) -> None:
            if done == 1:
                other.close()

        with pytest.raises(sweep.RunError, match=rf"scheduler cannot be reached any more.*kept in {folder}; .*--resume$"):
            sweep.run(scenario(), out=folder, scheduler=other.scheduler_address, progress=lose)
    assert sweep.run(scenario(), out=folder, jobs=1, resume=True).resumed == len(shards(folder)) - 4 >= 1
    assert everything(folder) == everything(reference)


def test_a_run_waits_for_workers_and_says_so(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(dask_cluster, "COUNT_S", 0.1)
    monkeypatch.setattr(dask_cluster, "ALONE_S", 0.3)
    warned: list[str] = []
    with dask_cluster._quiet(), dask_cluster.local_cluster(0) as empty, warnings.catch_warnings():

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            warned.append(str(message))
            if len(warned) == 1:
                empty.scale(1)

        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        sweep.run(scenario(), out=tmp_path / "run", scheduler=empty.scheduler_address)
    assert {*warned} == {"the dask scheduler has no worker; the run goes on when one joins (Ctrl-C ends it)"}
    assert everything(tmp_path / "run") == everything(reference)


def test_workers_with_threads_are_noted(tmp_path: Path) -> None:
    with (
        dask_cluster._quiet(), distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as other,
        pytest.warns(UserWarning, match="in one thread at a time; start workers with --nthreads 1"),
    ):  # fmt: skip
        sweep.run(scenario(views=["formula"]), out=tmp_path / "run", scheduler=other.scheduler_address)


@pytest.mark.parametrize("name", [*environment.SAME, "program"])
def test_other_versions_are_refused(
    name: str, cluster: distributed.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here this process is made to have another version than the workers; the scheduler runs in this process, too."""
    own = environment.of_results()[name]
    if name == "decodesim":
        monkeypatch.setattr(sim, "__version__", "0.0.7")
    elif name == "program":
        monkeypatch.setattr(environment, "_program", lambda: "0.0.7")
    else:
        others = {**environment.versions(), name: "0.0.7"}
        monkeypatch.setattr(environment, "_versions", lambda: others)
    line = refused("--scheduler", cluster.scheduler_address, "-o", tmp_path / "run")
    what = f"has another copy of decodesim (its files differ: {own})" if name == "program" else f"has {name} {own}"
    assert line.startswith("error: worker tcp://127.0.0.1:")
    assert line.endswith(f"{what}, but this process has 0.0.7; install the same on all machines\n")
    assert not (tmp_path / "run").exists()


def test_a_worker_that_joins_later_is_checked_too(cluster: distributed.LocalCluster) -> None:
    with distributed.Client(cluster, set_as_default=False) as client:
        other = {**environment.of_results(), "numpy": "0.0.7"}
        task = client.submit(dask_cluster._on_worker, other, len, "task")
        with pytest.raises(ParameterError, match=r"worker tcp://.* has numpy .*, but this process has 0\.0\.7; install the same"):
            dask_cluster._result(task)
        assert client.submit(dask_cluster._on_worker, environment.of_results(), len, "task").result() == 4


def test_a_worker_without_the_program_is_refused(tmp_path: Path) -> None:
    """Its folder has another package `sim`, which it imports instead."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text('raise ImportError("not that one")\n', encoding="utf-8")
    with dask_cluster._quiet(), dask_cluster.local_cluster(0) as empty:
        words = ["-m", "distributed.cli.dask_worker", empty.scheduler_address, "--no-nanny", "--no-dashboard", "--nthreads", "1"]
        worker = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
        try:
            with distributed.Client(empty, set_as_default=False) as client:
                client.wait_for_workers(1, timeout=60)
            line = refused("--scheduler", empty.scheduler_address, "-o", tmp_path / "run")
        finally:
            worker.kill()
            worker.wait()
    assert "has no decodesim of this version" in line
    assert "not that one" in line
    assert not (tmp_path / "run").exists()


def test_other_files_of_a_worker_are_refused() -> None:
    """What a scenario names must be there, with the content that the main process found."""
    with pytest.raises(ParameterError, match=r"a worker finds other files .* name them by absolute paths in a folder that"):
        sweep.compute(Shard("formula", 0, 1), sweep.resolve("ppd-forms"), "fingerprint of other files")


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:8786", "tcp://10.0.0.1", "tcp://10.0.0.1:0", "tcp://10.0.0.1:99999", "tcp://:8786", "http://10.0.0.1:8786",
     "tcp://10.0.0.1:8786/path", "tcp://me@10.0.0.1:8786", "tcp://[::1", "tcp://10.0.0.1:port", "", "tcp://"],
)  # fmt: skip
def test_malformed_addresses_are_refused(address: str, tmp_path: Path) -> None:
    line = refused("--scheduler", address, "-o", tmp_path / "run")
    assert f"--scheduler must be tcp://HOST:PORT, got {address!r}; for example --scheduler tcp://10.0.0.1:8786" in line
    assert not (tmp_path / "run").exists()


def test_addresses_with_a_host_and_a_port_are_taken() -> None:
    for address in ("tcp://10.0.0.1:8786", "tcp://scheduler.example:1", "tcp://[::1]:65535", "tls://10.0.0.1:8786"):
        assert dask_cluster._address(address) == address


def answered(server: socket.socket, answer: bytes) -> None:
    """Answer the first connection, and leave it open until the peer ends it."""
    peer, _ = server.accept()
    with peer:
        peer.sendall(answer)
        while peer.recv(4096):
            pass


@pytest.mark.parametrize("answer", [None, b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_an_address_without_a_scheduler_is_refused(answer: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens there, or a server of another protocol."""
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            server.listen()
            threading.Thread(target=answered, args=(server, answer), daemon=True).start()
        line = refused("--scheduler", address, "-o", tmp_path / "run")
    assert line.startswith(f"error: no dask scheduler answers at {address} (")
    assert line.endswith("; start one by `dask scheduler`, and check host and port\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", [("-j", "dask"), ("--scheduler", "tcp://10.0.0.1:8786")])
def test_a_missing_extra_is_named(option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    name = " ".join(option) if option[0] == "-j" else option[0]
    expected = f"error: {name} needs the package distributed, which is not installed; install it: pip install 'decodesim[dask]'\n"
    assert refused(*option, "-o", tmp_path / "run") == expected
    assert not (tmp_path / "run").exists()


def test_local_runs_do_not_import_dask(tmp_path: Path) -> None:
    words = ["run", "ppd-forms", "--view", "formula", "--no-figures", "-q", "-j", "1", "-o", str(tmp_path / "run")]
    script = f"""
import sys
from sim.commands.sim_app import app
app({words!r}, standalone_mode=False)
assert not {{"dask", "distributed", "joblib", "asyncio"}} & {{*sys.modules}}, "imported"
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
