"""`calibrate layers`: time the layers of a real model, and write a hardware profile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    from calibrate.timing.profile_from_timings import TimedProfiles
    from calibrate.timing.single_pass import Effort
    from calibrate.timing.timing_grid import TimingGrid
    from model.hardware.profile import Profile

_WIDTHS, _CONTEXTS = "1,2,3,4,5,6,7,8,9,12,16,17,24,32", "128,512,1024,2048"
_QUICK_WIDTHS, _QUICK_CONTEXTS, _QUICK_MINUTES = "1,4,9", "128,512", 1.0


@options.guarded
def layers(
    model: Annotated[str, typer.Option(help="A preset such as llama-2-13b, a config.json, or OWNER/NAME of the hub.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the profile and of the raw rows.")],
    device: options.Device = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32. Default: bfloat16, on cpu float32.")] = None,
    mode: Annotated[str, typer.Option(help="eager, cuda-graph, interpreter (passes as in decoding), comma-separated.")] = "eager",
    widths: Annotated[str | None, typer.Option(help=f"New tokens per sequence. Default: {_WIDTHS}")] = None,
    contexts: Annotated[str | None, typer.Option(help=f"Cached positions before them. Default: {_CONTEXTS}")] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes [sequences].")] = "1",
    busy: Annotated[str, typer.Option(help="Other processes that run the same passes, on cpu: --busy 0,1")] = "0",
    rounds: Annotated[int, typer.Option(help="Repeats of the whole grid, for shared machines.")] = 1,
    source: Annotated[int, typer.Option(help="Encoder positions of an encoder-decoder.")] = 512,
    minutes: Annotated[float | None, typer.Option(help="Time limit for all points. Default: 8; 1 with --quick.")] = None,
    target: Annotated[float, typer.Option(help="Stop a point at this relative error of its median.")] = 0.005,
    threads: Annotated[int | None, typer.Option(help="PyTorch threads of each process, on cpu.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trial: a small grid, few repeats.")] = False,
    resume: options.ResumeFolder = False,
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: DEVICE-MODEL.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a model's layers, head and embedding on this machine, with random weights, and write a profile.

    calibrate layers --model llama-2-13b --mode eager,cuda-graph --minutes 20 -o profiles

    calibrate layers --model llama-68m --device cpu --threads 1 --busy 0,1 --contexts 128,512 -o profiles
    """
    from calibrate.timing import profile_from_timings as timed

    grid, effort = _wanted(quick, widths, contexts, batches, busy, mode, rounds, target)
    limit = minutes if minutes is not None else _QUICK_MINUTES if quick else 8.0
    with options.progress(quiet, "points", f"timed points are kept in {out}; resume with the same command and --resume") as bar:
        result = timed.time_layers(
            model, grid, out, device=device, dtype=dtype, threads=threads, source=source, effort=effort, minutes=limit,
            quick=quick, resume=resume, name=name, progress=bar,
        )  # fmt: skip
    if as_json:
        print(strict_json.dumps(_document(result), indent=2))
    else:
        print("\n".join(_lines(result)))
    for point, reason in result.outcome.failed:
        print(f"failed: {point}: {reason}", file=sys.stderr)
    for which, found in _warnings(result).items():
        for line in found:
            print(f"warning: mode {which}: {line}", file=sys.stderr)
    for which, reason in result.refused.items():
        print(f"error: no profile of mode {which} was written: {reason}", file=sys.stderr)
    if result.outcome.failed or result.refused or not result.profiles:
        raise typer.Exit(1)


def _wanted(
    quick: bool, widths: str | None, contexts: str | None, batches: str, busy: str, mode: str, rounds: int, target: float
) -> tuple[TimingGrid, Effort | None]:
    from calibrate.timing.single_pass import Effort
    from calibrate.timing.timing_grid import TimingGrid

    grid = TimingGrid(
        options.numbers("widths", widths if widths is not None else _QUICK_WIDTHS if quick else _WIDTHS),
        options.numbers("contexts", contexts if contexts is not None else _QUICK_CONTEXTS if quick else _CONTEXTS),
        options.numbers("batches", batches), options.numbers("busy", busy), tuple(each.strip() for each in mode.split(",")), rounds,
    )  # fmt: skip
    effort = Effort(target=target)
    return grid, Effort(target=max(target, 0.05), least=3, most=20, warmups=2) if quick else effort


def _lines(result: TimedProfiles) -> Iterator[str]:
    """Lines of the result: machine, measured ceilings, rates of each layer relative to the peaks, other parts, and files."""
    from model.hardware import physical_limits
    from model.hardware.profile_files import load

    header = result.outcome.header
    libraries = f"torch {header['torch']}, transformers {header['transformers']}"
    yield f"{header['model']} in {header['dtype']} on {header['name']}, {libraries}"
    best = result.ceilings
    yield (
        f"measured ceilings: {best['read_bytes_per_s'] / 1e9:.1f} GB/s read, {best['copy_bytes_per_s'] / 1e9:.1f} GB/s copied,"
        f" {best['flop_per_s'] / 1e12:.3f} TFLOP/s"
    )
    from calibrate.timing import profile_from_timings as timed

    for mode, path in result.profiles.items():
        profile = load(path)
        shape, source = timed.shape_of(profile), timed.source_of(profile)
        yield ""
        peaks = f"peaks ({profile.facts['peaks']}): {profile.bandwidth / 1e9:.0f} GB/s, {profile.rate / 1e12:.2f} TFLOP/s"
        yield f"{mode}, {peaks}; limits: {physical_limits.limit(profile, shape, source=source)}"
        yield f"{'measured':44}{'time':>12}{'GB/s':>9}{'of peak':>9}{'TFLOP/s':>10}{'of peak':>9}"
        for each in physical_limits.implied_rates(profile, shape, source=source):
            for row, seconds in enumerate(each.seconds):
                speed, rate = each.bandwidth()[row], each.rate()[row]
                yield (
                    f"{each.row_name(row):44}{seconds * 1e6:9.1f} us{speed / 1e9:9.1f}{speed / profile.bandwidth:9.0%}"
                    f"{rate / 1e12:10.3f}{rate / profile.rate:9.0%}"
                )
        yield from _others(profile)
        yield from (f"note: {each}" for each in profile.notes)
        yield f"{path}"
    yield f"{result.outcome.path}"


def _others(profile: Profile) -> Iterator[str]:
    for part, axis in (("embedding", "tokens"), ("step", "batch")):
        for busy in sorted(set(profile.table["busy"])):
            for row in profile.rows(part, busy=busy).iter_rows(named=True):
                among = f", busy {busy}" if busy else ""
                yield f"{f'{part} at {axis} {row[axis]}{among}':44}{row['time_s'] * 1e6:9.1f} us"


def _warnings(result: TimedProfiles) -> dict[str, list[str]]:
    """Return the warnings of each profile: rates above the measured ceilings."""
    from model.hardware.profile_files import load

    return {mode: load(path).facts.get("warnings", []) for mode, path in result.profiles.items()}


def _document(result: TimedProfiles) -> dict[str, Any]:
    return {
        "profiles": {mode: str(path) for mode, path in result.profiles.items()}, "rows": str(result.outcome.path),
        "machine": result.outcome.header, "points": sum(row["kind"] == "point" for row in result.outcome.rows),
        "failed": [{"point": str(point), "error": error} for point, error in result.outcome.failed], "refused": result.refused,
        "ceilings": result.ceilings, "warnings": _warnings(result),
    }  # fmt: skip
