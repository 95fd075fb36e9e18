"""Hardware profiles from times of passes: the Python interface of `calibrate layers`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrate.devices import machine
from calibrate.timing.single_pass import Effort
from calibrate.timing.timing_grid import RawTimings, TimedGrid, TimingGrid, shares, time_grid
from model.architectures import transformer
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import physical_limits
from model.hardware.interpolation import Surface
from model.hardware.profile import AXES, TIMES, Profile, Source, table_of
from model.hardware.profile_files import save

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.devices import machine
    from calibrate.timing import library_pass
    from calibrate.timing.busy_neighbours import Spec

TOLERANCE = 0.1
"""Excess over the measured ceilings up to which no warning is given [-]: they are measured to a few percent."""
CEILINGS = ("copy_bytes_per_s", "read_bytes_per_s", "flop_per_s")
_APART = ("head_us", "embedding_us", "whole_us")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class TimedProfiles:
    """Result of timing a model: the profiles that were written, and what is missing from them."""

    profiles: dict[str, Path]
    outcome: TimedGrid
    refused: dict[str, str]
    """Error by mode: profiles that beat the published peaks are not written."""
    ceilings: dict[str, float]
    """Best rates that the device was measured to reach (`machine.Ceilings`)."""


def time_layers(
    model: str,
    grid: TimingGrid,
    out: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    source: int = 512,
    effort: Effort | None = None,
    minutes: float = 8.0,
    quick: bool = False,
    resume: bool = False,
    name: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TimedProfiles:
    """Time every layer of a model over a grid; write one profile per mode, and the raw rows from which they are derived.

    `model` is a preset, a `config.json` or OWNER/NAME of the hub; weights are random. `threads` is the number of torch's threads
    per process. `quick` measures the ceilings roughly.
    """
    machine.import_libraries()
    checks.number("minutes", minutes, 0)
    if threads is not None:
        import torch

        checks.whole("threads", threads, 1, 4096)
        torch.set_num_threads(threads)
    timed = open_model(model, grid, out, device=device, dtype=dtype, source=source, quick=quick, resume=resume, name=name)
    cpu = not timed.spec.device.startswith("cuda")
    if effort is None:
        effort = Effort(warmups=5 if cpu else 20)
    outcome = time_grid(
        timed.built, grid, timed.rows, timed.spec, effort=effort, minutes=minutes, progress=progress,
        between=timed.ceilings.measure_if_due,
    )
    if "interpreter" in grid.modes:
        for turn in range(grid.rounds):
            time_besides_passes(timed, turn)
    written, refused = write(timed, grid.modes, out)
    return TimedProfiles(written, outcome, refused, ceilings_of(timed.rows.header, timed.rows.rows))


class TimedModel(NamedTuple):
    """A model that is being timed: the model, its raw rows, the arguments of its companions, the stem of its profiles' names, and
    the device's ceilings.
    """

    built: library_pass.LibraryModel
    rows: RawTimings
    spec: Spec
    stem: str
    ceilings: machine.Ceilings


def open_model(
    model: str, grid: TimingGrid, out: str | Path, *, device: str | None = None, dtype: str | None = None, source: int = 512,
    quick: bool = False, resume: bool = False, name: str | None = None, decoder: Decoder | None = None,
) -> TimedModel:
    """Begin or resume timing a model; `decoder` makes the passes, if there is one already."""
    machine.import_libraries()
    checks.whole("source", source, 1, 1_000_000)
    import torch

    from calibrate.loading.architectures import architecture
    from calibrate.timing import library_pass
    from calibrate.timing.busy_neighbours import Spec
    from calibrate.untested_on_gpu.cuda_graphs import mode_of

    chosen = machine.choose_device(device)
    cpu = not chosen.startswith("cuda")
    if not cpu:
        machine.make_current(chosen)  # events are recorded on the streams of the current device
    if dtype is None:
        dtype = "float32" if cpu else "bfloat16"
    checks.one_of("dtype", dtype, library_pass.DTYPES)
    if cpu and "cuda-graph" in grid.modes:
        raise ParameterError("mode cuda-graph needs a GPU, and the device is cpu; take --mode eager")
    if not cpu and grid.busy != (0,):
        raise ParameterError(f"busy must be 0 on {chosen}: it counts processes on the cores of one host; take --device cpu")
    known = architecture(model)
    for width in grid.widths:
        for context in grid.contexts:
            known.check_positions(width, context)
    passes_of = "eager" if decoder is None else mode_of(decoder)
    stem = name or stem_of(model, chosen, passes_of)
    if not NAME.fullmatch(stem):
        raise ParameterError(f"name must be letters, digits, dots and dashes, got {checks.shown(stem)}")
    if decoder is not None and decoder.source is not None:
        source = int(decoder.source.shape[1])
    header = {"kind": "machine", "model": known.name, "device": chosen, "dtype": dtype, "source": source}
    header |= {"weights": "random" if decoder is None else "its own"}
    header |= {} if passes_of == "eager" else {"passes": passes_of}
    header |= machine.facts(chosen) | {"shape": asdict(known.shape)}
    raw = Path(out) / f"{stem}.jsonl"
    raw.parent.mkdir(parents=True, exist_ok=True)
    existing = RawTimings(raw, header, resume) if raw.exists() else None  # fails before anything takes time
    ceilings = machine.Ceilings(chosen, dtype, quick)
    header |= ceilings.best
    built = library_pass.LibraryModel(known, chosen, dtype, source, decoder)
    # Written last: a model that does not fit leaves no file.
    rows = RawTimings(raw, header, resume) if existing is None else existing
    spec = Spec(model, chosen, dtype, source, torch.get_num_threads())
    return TimedModel(built, rows, spec, stem, ceilings)


def time_besides_passes(timed: TimedModel, turn: int, kinds: Sequence[str] = ("reads", "after")) -> None:
    """Time the work of decoding besides whole passes, as round `turn`, unless it is timed already."""
    from calibrate.timing import read_times

    timed.built.read_source()
    done = {row["kind"] for row in timed.rows.rows if row.get("round") == turn}
    for kind in kinds:
        if kind not in done:
            made = (
                read_times.time_reads(timed.built.decoder)
                if kind == "reads"
                else read_times.time_after_pauses(timed.built.decoder)
            )
            timed.rows.add({"kind": kind, "round": turn} | ({"busy": 0} if kind == "reads" else {}) | made)


def write(timed: TimedModel, modes: Sequence[str], out: str | Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Write the profiles, one per mode; return their paths and the errors of refused ones, by mode."""
    written, refused = {}, {}
    rows = timed.rows
    rows.add({"kind": "ceilings"} | timed.ceilings.best)
    for mode in modes:
        if not any(row["kind"] == "point" and row["mode"] == mode for row in rows.rows):
            continue
        try:
            profile = profile_of(rows.header, rows.rows, mode, profile_name(timed.stem, mode), rows.path)
            if warnings := check(profile):
                profile = replace(profile, facts={**profile.facts, "warnings": warnings})
        except ParameterError as error:
            refused[mode] = str(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # malformed rows of a file
            refused[mode] = f"its raw rows in {rows.path.name} make no profile ({error!r}); start again with another -o"
        else:
            written[mode] = save(profile, out)
    return written, refused


def stem_of(model: str, device: str, passes: str = "eager") -> str:
    """Return the name of a model's profiles on a device, without their mode; `passes` is how decoding makes its passes."""
    from calibrate.loading.architectures import architecture

    known = None
    if device.startswith("cuda"):
        import torch

        known = machine.published_device(torch.cuda.get_device_name(device), machine.memory(device))
    graphs = "" if passes == "eager" else "-graph"
    return f"{known.name if known else device.partition(':')[0]}-{architecture(model).name}{graphs}"


def profile_name(stem: str, mode: str) -> str:
    """Return the name of a mode's profile: every mode but eager adds a suffix."""
    return stem + {"eager": "", "cuda-graph": "-graph"}.get(mode, f"-{mode}")


def check(profile: Profile) -> list[str]:
    """Return a warning for each time that beats the measured ceilings; refuse a profile that beats the published peaks."""
    tolerance = TOLERANCE if profile.facts["peaks"] == "measured" else 0.0
    return [*physical_limits.check(profile, shape_of(profile), source=source_of(profile), tolerance=tolerance)]


def ceilings_of(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the best rates of all attempts in a raw file."""
    tries = [header, *(row for row in rows if row["kind"] == "ceilings")]
    return {name: max(each[name] for each in tries) for name in CEILINGS}


def shape_of(profile: Profile) -> transformer.Shape:
    """Return the shape of a profile's model."""
    return shape_from_fields(profile.shape)


def shape_from_fields(fields: Mapping[str, Any]) -> transformer.Shape:
    """Return a shape from its fields as files hold them."""
    return transformer.Shape(**{**fields, "biases": tuple(fields["biases"])})


def source_of(profile: Profile) -> int:
    """Return the encoder positions that its layers attended to; 0 for decoder-only models."""
    return int(profile.facts["source"]) if shape_of(profile).encoder_layers else 0


def profile_of(
    header: dict[str, Any], rows: Sequence[dict[str, Any]], mode: str, name: str, raw: Path, folder: str = ""
) -> Profile:
    """Return the profile of a mode, from the machine and the raw rows of its points.

    `folder` is the raw file's folder in the repository, for bundled profiles.
    """

    shape = shape_from_fields(header["shape"])
    table, notes = part_rows(rows, mode, shape.layers)
    notes[0] = f"weights are {header.get('weights', 'random')}; {notes[0]}"
    known = machine.published_device(header["name"], header["memory_bytes"])
    dtype = header["dtype"]
    vendor = known is not None and dtype in known.rates
    best = ceilings_of(header, rows)
    bandwidth = known.bandwidth if known is not None and vendor else max(best["copy_bytes_per_s"], best["read_bytes_per_s"])
    rate = known.rates[dtype] if known is not None and vendor else best["flop_per_s"]
    facts = {key: value for key, value in header.items() if key not in ("kind", "shape", "model", "dtype")} | best
    facts["peaks"] = "published" if vendor else "measured"
    frame = table_of(table)
    device = known.name if known is not None else header["device"].partition(":")[0]
    source = Source(
        "decodesim", f"{folder}{raw.name}", licence="MIT", sha256=hashlib.sha256(raw.read_bytes()).hexdigest(),
        parts=tuple(dict.fromkeys(row["part"] for row in table)),
    )  # fmt: skip
    passes_of = header.get("passes", "eager") if mode == "interpreter" else mode
    profile = Profile(
        name=name, device=device, model=header["model"], dtype=dtype,
        engine=f"{'decodesim on ' if mode == 'interpreter' else ''}transformers {header['transformers']}",
        mode=passes_of, kind="model", provenance="measured", date=header["date"],
        bandwidth=bandwidth, rate=rate, cache_bytes=float(header["cache_bytes"]), table=frame, sources=(source,),
        shape=asdict(shape), notes=tuple(notes), facts=facts,
    )  # fmt: skip
    return replace(profile, errors=errors_of(profile))


def part_rows(rows: Sequence[dict[str, Any]], mode: str, layers: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a profile's table and its notes, from raw rows.

    Of a point's rounds the one with the shortest whole pass is used: other work on the machine only ever adds time. Passes of the
    interpreter use the median over rounds instead, because they are compared with medians of runs from the same measurement
    session.

    A layer's time is the median over layers. The head's time depends on its positions, the embedding's on its tokens, and the
    overhead of a pass on its batch: each is the median over all such points, with quartiles. A layer of the interpreter gets its
    share of the rest of the whole pass: marks take time too, and the parts, which depend on fewer axes than passes, must add up to
    them.
    """
    table: list[dict[str, Any]] = []
    heads: dict[tuple[int, int], list[Any]] = {}
    embeddings: dict[tuple[int, int], list[Any]] = {}
    rest: dict[tuple[int, int], list[float]] = {}
    wholes: list[float] = []
    first_reads: dict[tuple[int, int], list[float]] = {}
    repeats: dict[tuple[int, int], int] = {}
    negative = interrupted = 0
    for (busy, batch, context, width), rounds in shares(rows, mode):
        row = median_of(rounds) if mode == "interpreter" else quietest(rounds)
        interrupted += row.get("taken_anyway", 0) > 0
        count = row["repeats"]
        layer = np.median(row["layers_us"], axis=0) / 1e6 if "sum_us" not in row else np.asarray(row["sum_us"]) / layers / 1e6
        head, embedding, whole = (np.asarray(row[key]) / 1e6 for key in _APART)
        table.append({"part": "layer", "busy": busy, "width": width, "context": context, "batch": batch} | _times(layer, count))
        wholes.append(float(whole[1]))
        heads.setdefault((busy, width * batch), []).append((head, count))
        embeddings.setdefault((busy, width * batch), []).append((embedding, count))
        over = float(whole[1] - layers * layer[1] - head[1] - embedding[1])
        if "rest_us" in row:
            over = row["rest_us"][1] / 1e6
            # From the plain pass: setting a mark takes as long as a read.
            first_read = float(whole[1] - layers * layer[1] - over - embedding[1] - head[1])
            first_reads.setdefault((busy, batch), []).append(max(min(first_read, row["first_read_us"][1] / 1e6), 0.0))
        negative += over < 0
        rest.setdefault((busy, batch), []).append(max(over, 0.0))
        repeats[busy, batch] = repeats.get((busy, batch), 0) + count
    for part, axis, found in (("head", "positions", heads), ("embedding", "tokens", embeddings)):
        for (busy, size), times in sorted(found.items()):
            middle = np.median([time for time, _ in times], axis=0)
            table.append({"part": part, "busy": busy, axis: size} | _times(middle, sum(count for _, count in times)))
    for part, by_batch in (("step", rest), ("first_read", first_reads)):
        for (busy, batch), values in sorted(by_batch.items()):
            middle = np.percentile(values, (25, 50, 75))
            table.append({"part": part, "busy": busy, "batch": batch} | _times(middle, repeats[busy, batch]))
    notes = ["a layer's time is the median over layers of the medians of repeats, with their quartiles"]
    if mode == "interpreter":
        _add_up(table, wholes, layers)
        calls = {busy: float(np.median(values)) for (busy, batch), values in rest.items() if batch == 1}
        table += _besides(rows, table, calls, layers)
        notes = ["times are means over the repeats of a round, because runs add them up, and medians over rounds"]
    elif any(row.get("round") for row in rows):
        notes.append("each point is from the round with the shortest whole pass: other work on the machine only adds time")
    points = sum(map(len, rest.values()))
    if interrupted:
        notes.append(f"at {interrupted} of {points} points too few repeats were uninterrupted, so the shortest others count too")
    if negative:
        notes.append(f"the whole pass took less than the sum of its parts at {negative} of {points} points: overhead set to 0")
    return table, notes


def _besides(
    rows: Sequence[dict[str, Any]], table: Sequence[dict[str, Any]], calls: Mapping[int, float], layers: int
) -> list[dict[str, Any]]:
    """Return rows of the interpreter's profile for the work of decoding besides whole passes; `calls` is the overhead of a pass, by
    number of busy processes [s].
    """
    from calibrate.timing import process_times, read_times

    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("reads", "after", "processes")}
    found = read_times.part_rows(kinds["reads"], dict(calls), layers) + read_times.rows_after_pauses(
        kinds["after"], layers
    )
    [again] = [row["time_s"] for row in found if row["part"] == "resumed_step" and row["busy"] == 0] or [0.0]
    embedding = next((row["time_s"] for row in table if row["part"] == "embedding" and row["tokens"] == 1), 0.0)
    beginning = {"main_alone": calls.get(0, 0.0) + embedding, "main_concurrent": again}
    return found + process_times.process_rows(kinds["processes"], beginning, layers)


def _add_up(table: list[dict[str, Any]], wholes: Sequence[float], layers: int) -> None:
    """Give the layers what the other parts leave of their passes; `wholes` [s] are in the order of the table's first rows."""
    times = {(row["part"], row["busy"], *[row[axis] for axis in AXES[row["part"]]]): row["time_s"] for row in table}
    for row, whole in zip(table, wholes, strict=False):
        busy, batch, tokens = row["busy"], row["batch"], row["width"] * row["batch"]
        others = [("head", busy, tokens), ("embedding", busy, tokens), ("step", busy, batch), ("first_read", busy, batch)]
        more = (whole - sum(times.get(each, 0.0) for each in others)) / layers - row["time_s"]
        row.update({name: max(row[name] + more, 1e-9) for name in TIMES})


def quietest(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the round of a point that other work disturbed least: that with the shortest whole pass."""
    return min(rounds, key=lambda row: float(row["whole_us"][1]))


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rounds of a point as one row: the median of each time, the sum of each count."""
    times = {name: np.median([row[name] for row in rounds], axis=0).tolist() for name in rounds[0] if name.endswith("_us")}
    return rounds[0] | times | {name: sum(row.get(name, 0) for row in rounds) for name in ("repeats", "taken_anyway")}


def _times(times: Any, count: int) -> dict[str, Any]:
    low, middle, high = (float(each) for each in times)
    return {"time_s": middle, "low_s": min(low, middle), "high_s": max(high, middle), "repeats": count}


def errors_of(profile: Profile) -> dict[str, float]:
    """Return the relative leave-one-out error of interpolation, by part; parts of fewer than three points have none."""
    found = {}
    for part, axes in (("layer", ("width", "context", "batch")), ("head", ("positions",))):
        rows = profile.rows(part)
        if rows.height >= 3:
            error = Surface({axis: rows[axis].to_numpy() for axis in axes}, rows["time_s"].to_numpy()).error
            found[part] = round(error, 5)
    return found
