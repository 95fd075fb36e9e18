"""Times of transfers between processes, between host and GPU, and between GPUs: the Python interface of `calibrate links`.

Between processes a message goes there and back, and its time is half of that: two processes share no sufficiently precise clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from calibrate.devices import machine
from calibrate.devices.clocks import clock_of
from calibrate.timing.profile_from_timings import NAME
from calibrate.timing.single_pass import quartiles
from model.base import checks, strict_json
from model.base.checks import ParameterError
from model.base.parent_process import exit_with_starter
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_files import save

SIZES = tuple(4**power for power in range(5, 14))
"""Message sizes from 1 KiB to 64 MiB [bytes]."""
LINKS = ("shared-memory", "gloo", "host-to-device", "device-to-host", "device-to-device", "nccl")
_PATIENCE = 120.0
_WARMUPS = 3


@dataclass(frozen=True)
class TimedLinks:
    """Result of timing links: profiles by link, and the links that failed, each with its error."""

    profiles: dict[str, Path]
    failed: dict[str, str]


def available_links() -> tuple[str, ...]:
    """Return the links that this machine has."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = ["shared-memory"]
    found += ["gloo"] if torch.distributed.is_available() and torch.distributed.is_gloo_available() else []
    found += ["host-to-device", "device-to-host"] if gpus else []
    found += ["device-to-device"] if gpus > 1 else []
    found += ["nccl"] if gpus > 1 and torch.distributed.is_nccl_available() else []
    return tuple(found)


def time_links(
    out: str | Path,
    *,
    links: tuple[str, ...] | None = None,
    sizes: tuple[int, ...] = SIZES,
    repeats: int = 50,
    name: str = "links",
    progress: Callable[[int, int, str], None] | None = None,
) -> TimedLinks:
    """Time links by message size [bytes]; write a profile and raw rows for each. Without `links`, all links of this machine."""
    machine.import_libraries()
    checks.whole("repeats", repeats, 1, 1_000_000)
    if not sizes:
        raise ParameterError("sizes must have at least one number, got none")
    for size in sizes:
        checks.whole("size", size, 1, 2**34)
    if len(set(sizes)) != len(sizes):
        raise ParameterError(f"sizes must be different numbers, got {checks.shown(sizes)}")
    if not NAME.fullmatch(name):
        raise ParameterError(f"name must be letters, digits, dots and dashes, got {checks.shown(name)}")
    present = available_links()
    for link in links or ():
        checks.one_of("link", link, LINKS)
        if link not in present:
            raise ParameterError(f"link {link} is not available; this machine has {', '.join(present)}")
    chosen = links or present
    for link in chosen:
        for path in (Path(out) / f"{name}-{link}.{kind}" for kind in ("json", "parquet", "jsonl")):
            if path.exists():
                raise ParameterError(f"{path.name} is there already; give another --name or folder, or remove it")
    written: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for number, link in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), link)
        try:
            rows = _timed(link, sizes, repeats)
        except (RuntimeError, OSError, MemoryError) as error:
            failed[link] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        else:
            written[link] = _written(link, rows, Path(out), f"{name}-{link}")
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    return TimedLinks(written, failed)


def _timed(link: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    if link in ("shared-memory", "gloo", "nccl"):
        return _between_processes(link, sizes, repeats)
    return list(_by_copy(link, sizes, repeats))


def _by_copy(link: str, sizes: tuple[int, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Time copies that one process starts, with pinned host memory."""
    import torch

    ends = {"host-to-device": ("cpu", "cuda:0"), "device-to-host": ("cuda:0", "cpu"), "device-to-device": ("cuda:0", "cuda:1")}
    origin, goal = ends[link]
    clock = clock_of("cuda:0")
    for size in sizes:
        source, target = (torch.empty(size, dtype=torch.uint8, device=at, pin_memory=at == "cpu") for at in (origin, goal))
        times = []
        for turn in range(_WARMUPS + repeats):
            clock.start()
            target.copy_(source, non_blocking=True)
            taken = clock.stop()
            if turn >= _WARMUPS:
                times.append(taken)
        yield {"kind": "link", "link": link, "size": size, "repeats": repeats, "time_us": quartiles(times)}


def _between_processes(link: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Time messages between two new processes, so that the environment variables that they set do not reach this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        work: Any
        more: list[tuple[Any, ...]]
        if link == "shared-memory":
            first, second = context.Pipe()
            buffer = context.RawArray("b", max(sizes))
            work, more = _share, [(buffer, first), (buffer, second)]
        else:
            meeting = f"file://{Path(folder) / 'meeting'}"
            work, more = _talk, [(link, meeting), (link, meeting)]
        processes = [
            context.Process(target=work, args=(rank, theirs, sizes, repeats, *more[rank]), daemon=True) for rank in range(2)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            end = time.monotonic() + _PATIENCE
            while not ours.poll(0.1):
                ended = [process.exitcode for process in processes if process.exitcode]
                if ended or time.monotonic() > end:
                    early = f"one end of {link} ended early, exit code {ended[0]}" if ended else f"{link} took too long"
                    raise RuntimeError(early)
            answer = ours.recv()
        except EOFError:
            raise RuntimeError(f"one end of {link} ended early") from None
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.terminate()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return [
        {"kind": "link", "link": link, "size": size, "repeats": repeats, "time_us": quartiles(times)}
        for size, times in zip(sizes, answer, strict=True)
    ]


def _share(rank: int, report: Connection, sizes: tuple[int, ...], repeats: int, buffer: Any, other: Connection) -> None:
    """Transfer bytes through shared memory, as one of two processes: one copies in, the other copies out."""
    exit_with_starter()
    import numpy as np

    room = np.frombuffer(buffer, dtype=np.uint8)

    def give(own: Any) -> None:
        np.copyto(room[: own.size], own)
        other.send_bytes(b"!")

    def take(own: Any) -> None:
        other.recv_bytes()
        np.copyto(own, room[: own.size])

    with _reported(report):
        results = []
        for size in sizes:
            own = np.ones(size, dtype=np.uint8)
            results.append(_there_and_back(rank, repeats, partial(give, own), partial(take, own)))
        if rank == 0:
            report.send(results)


def _talk(rank: int, report: Connection, sizes: tuple[int, ...], repeats: int, backend: str, meeting: str) -> None:
    """Send messages through torch.distributed, as one of two processes."""
    exit_with_starter()
    # Both ends are on this host. Without this, gloo fails on a host whose name cannot be resolved.
    if backend == "gloo" and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as distributed

    def give(own: Any) -> None:
        distributed.send(own, 1 - rank)

    def take(own: Any) -> None:
        distributed.recv(own, 1 - rank)
        if own.is_cuda:
            torch.cuda.synchronize(own.device)

    with _reported(report):
        torch.set_num_threads(1)
        where = f"cuda:{rank}" if backend == "nccl" else "cpu"
        distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=2)
        results = []
        for size in sizes:
            own = torch.ones(size, dtype=torch.uint8, device=where)

            results.append(_there_and_back(rank, repeats, partial(give, own), partial(take, own)))
        if rank == 0:
            report.send(results)
        distributed.destroy_process_group()


def _there_and_back(rank: int, repeats: int, give: Callable[[], None], take: Callable[[], None]) -> list[float]:
    """Return half the round-trip times of a message [s]; the second process only answers."""
    times = []
    for turn in range(_WARMUPS + repeats):
        begun = time.perf_counter()
        for step in (give, take) if rank == 0 else (take, give):
            step()
        if turn >= _WARMUPS:
            times.append((time.perf_counter() - begun) / 2)
    return times


@contextlib.contextmanager
def _reported(report: Connection) -> Iterator[None]:
    """Send an error to the process that started this one."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            report.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")


def _written(link: str, rows: list[dict[str, Any]], out: Path, name: str) -> Path:
    """Write a link's raw rows and its profile; return the path of the profile."""

    facts = machine.facts("cuda" if "device" in link or link == "nccl" else "cpu")
    raw = out / f"{name}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = [strict_json.dumps(row) for row in ({"kind": "machine", "link": link} | facts, *rows)]
    raw.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    table = []
    for row in rows:
        low, middle, high = (each / 1e6 for each in row["time_us"])
        times = {"time_s": middle, "low_s": low, "high_s": high}
        table.append({"part": "send", "size": row["size"], "repeats": row["repeats"]} | times)
    best = max(row["size"] / row["time_s"] for row in table if row["time_s"] > 0)
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    source = Source("decodesim", raw.name, licence="MIT", sha256=digest, parts=("send",))
    profile = Profile(
        name=name, device=facts["name"], model="", dtype="", engine=f"torch {facts['torch']}, {link}", mode="eager", kind="links",
        provenance="measured", date=facts["date"], bandwidth=best, rate=1.0, cache_bytes=float(facts["cache_bytes"]),
        table=table_of(table), facts=facts | {"peaks": "measured"},
        sources=(source,),
        notes=("bandwidth is the best that any size reached; rate says nothing, for nothing is computed",),
    )  # fmt: skip
    return save(profile, out)
