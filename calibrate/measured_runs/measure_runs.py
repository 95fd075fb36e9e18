"""Timed decodings by real models: each repeat runs all settings once in random order, so that drift affects all settings equally.

This is the Python interface of `calibrate run`. Each decoding first runs once untimed with a log of its reads, which also warms up
the machine; the timed repeats follow, without a log. Rows are saved as they are measured, so an interrupted run can be resumed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

import numpy as np

from calibrate.decode import real_decoding
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.devices import machine
from calibrate.interpreters.in_one_process import RandomDraws, RunTimes
from calibrate.untested_on_gpu import cuda_graphs
from calibrate.workers.model_processes import ModelProcesses
from model.architectures import transformer
from model.base import bounded_files, checks, strict_json, typed_values
from model.base.checks import ParameterError
from model.logs import forced_outcomes, measured_runs
from model.logs.measured_runs import MeasuredRuns
from model.logs.read_log import ReadLog, plain
from model.logs.recorded_decoding import Decoding
from model.logs.spans import STORED_FIELDS
from model.methods import registry
from model.methods.method_parameters import MethodParameters

if TYPE_CHECKING:
    from calibrate.untested_on_gpu.over_streams import Lanes
    from calibrate.workers.worker_pool import Pool

Report = Callable[[int, int, str], None]
Starting: TypeAlias = "Callable[[], AbstractContextManager[Pool | ModelProcesses]]"
"""Starts the processes of runs over processes, which end with the block."""


class Interleaved(Protocol):
    """Measurements of the same session, made in small pieces before each run, so that drift affects them like the runs."""

    def begin(self, turn: int) -> None:
        """Begin a repeat of all runs; their processes have not been started yet."""

    def between(self, share: float, pool: Pool | ModelProcesses | None = None) -> None:
        """Measure up to this share of the repeat; `pool` has the processes of the runs, if any."""

    def end(self) -> None:
        """End the repeat."""


@dataclass(frozen=True)
class PlannedDecoding:
    """A decoding that is to be timed.

    Parameters
    ----------
    method, settings
        A method and its parameters, without the depths of the models.
    prompt, name
        Tokens and name of the prompt. With forced outcomes only the number of tokens matters.
    rates
        Rates of forced outcomes (`model.logs.forced_outcomes`); None if the models' outputs decide.
    replication
        Index of the random stream.
    units
        Number of units that execute its passes; with 1 this process executes all of them in turn.
    unit_kind
        Kind of several units: `processes` of the operating system, or `streams` of the GPU.
    """

    method: str
    settings: Mapping[str, Any]
    prompt: tuple[int, ...]
    name: str
    rates: Mapping[str, float] | None = None
    replication: int = 0
    units: int = 1
    unit_kind: str = measured_runs.UNIT_KINDS[0]

    def __post_init__(self) -> None:
        checks.whole("units", self.units, 1, checks.MAX_UNITS)
        checks.one_of("unit_kind", self.unit_kind, measured_runs.UNIT_KINDS)

    def __str__(self) -> str:
        """Name of the decoding in messages."""
        options = ", ".join(f"{key}={value}" for key, value in (dict(self.settings) | dict(self.rates or {})).items())
        over = f" over {self.units} {self.unit_kind}" if self.units > 1 else ""
        return f"{self.method}{f' ({options})' if options else ''}{over}, {self.name}"


@dataclass(frozen=True)
class MeasurementPlan:
    """Decodings, their length, and the number of timed repeats."""

    decodings: Sequence[PlannedDecoding]
    tokens: int = 48
    repeats: int = 7
    warm_ups: int = 1
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts of the runs: `prompts`, their origin; `profiles` of the same measurement session, files by role; `devices` of
    the units of runs over processes."""

    def __post_init__(self) -> None:
        checks.whole("tokens", self.tokens, 2, checks.MAX_TOKENS)
        checks.whole("repeats", self.repeats, 1, 10_000)
        checks.whole("warm_ups", self.warm_ups, 0, 100)
        checks.whole("seed", self.seed, 0)
        if not self.decodings:
            raise ParameterError("methods must be at least one with one prompt, got none")

    def order(self, turn: int) -> list[int]:
        """Return the random order of the decodings in repeat `turn`."""
        key = np.random.SeedSequence(self.seed, spawn_key=(turn,))
        return [int(each) for each in np.random.Generator(np.random.Philox(key)).permutation(len(self.decodings))]


def check(plan: MeasurementPlan, models: Mapping[str, Decoder]) -> None:
    """Refuse a plan with a decoding that is impossible, before any is made."""
    for each in plan.decodings:
        used = _of(each, models, plan.tokens)
        prompt = (0,) * len(each.prompt) if each.rates is not None else each.prompt
        real_decoding.check_prompt(used, prompt, plan.tokens)
        parameters = _parameters(each, used, plan.tokens)
        real_decoding.check_room(used, parameters, len(each.prompt), plan.tokens)
        if each.rates is not None:
            forced_outcomes.check(each.method, parameters, each.rates)
        parameters.check_tokens(plan.tokens)
        if each.units > 1 and cuda_graphs.mode_of(models["target"]) != measured_runs.MODES[0]:
            raise ParameterError(
                f"mode must be {measured_runs.MODES[0]} for runs over {each.unit_kind}, got {cuda_graphs.mode_of(models['target'])}"
            )
        if each.units > 1 and len(used) > 1 and each.unit_kind != measured_runs.UNIT_KINDS[0]:
            has = f"{each.method} has {', '.join(used)}"
            raise ParameterError(f"{each.unit_kind} are for methods with one model, and {has}; leave them out")
        if each.units > 1 and parameters.reads_states:
            what = f"{each.unit_kind} are not for draft heads, which read the target's states in its process"
            raise ParameterError(f"{what}, and {each.method} has them; leave unit_kind out")
        wanted = processes_of(parameters, used)
        if each.units > 1 and each.units != wanted:
            what = f"units must be {wanted}, which {each.method} reserves with these parameters"
            raise ParameterError(f"{what}, got {each.units} {each.unit_kind}")


def processes_of(parameters: MethodParameters, models: Iterable[str]) -> int:
    """Number of units of runs over processes, from the roles of a method's models.

    With one model they are those that the method reserves. With several each model has a process, and each further replica of the
    target one more (`calibrate.workers.model_processes`).
    """
    roles = len([*models])
    return parameters.units if roles == 1 else roles - 1 + parameters.target_replicas


def _of(each: PlannedDecoding, models: Mapping[str, Decoder], tokens: int) -> dict[str, Decoder]:
    settings = real_decoding.scheduled(each.method, each.settings, len(each.prompt), tokens)
    return {role: models[role] for role in real_decoding.roles(each.method, settings) if role in models}


def _parameters(each: PlannedDecoding, used: Mapping[str, Decoder], tokens: int) -> MethodParameters:
    settings = real_decoding.scheduled(each.method, each.settings, len(each.prompt), tokens)
    return real_decoding.parameters_of(each.method, used, settings, batches=each.rates is not None)


def decode(
    each: PlannedDecoding, models: Mapping[str, Decoder], tokens: int, seed: int, pool: Pool | ModelProcesses | None = None,
    lanes: Lanes | None = None, **more: Any,
) -> Decoding:
    """Run a decoding; `more` are further arguments of `calibrate.decode.real_decoding.decode`."""
    used, prompt = _of(each, models, tokens), each.prompt
    if each.units > 1 and each.unit_kind == "streams":
        more = more | {"lanes": lanes}
    elif each.units > 1 and pool is not None:
        more = more | {"pool": pool}
        if not isinstance(pool, ModelProcesses):
            used = {"target": pool.decoder}
    if each.rates is not None:
        prompt = tuple(range(len(prompt)))
        parameters = _parameters(each, used, tokens)
        world = forced_outcomes.world(parameters, len(prompt), tokens, each.rates, seed=seed, replication=each.replication)
        more["answers"] = world
    draws = RandomDraws(seed, each.replication)
    return real_decoding.decode(each.method, used, prompt, tokens, each.settings, random_draws=draws, **more)


def timed(
    each: PlannedDecoding, models: Mapping[str, Decoder], tokens: int, seed: int, pool: Pool | ModelProcesses | None = None,
    lanes: Lanes | None = None,
) -> dict[str, Any]:
    """Time one decoding and return its part of a row."""
    times, spans = RunTimes(), list[dict[str, Any]]()
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    worked = time.thread_time()
    try:
        made = decode(each, models, tokens, seed, pool, lanes, times=times, spans=spans)
    finally:
        if was:
            gc.enable()
    worked = time.thread_time() - worked
    assert made.seconds is not None
    # A wait for a process of the same run is not a disturbance, so waits count only in runs of a single process.
    cpu = each.units == 1 and all(decoder.device.type == "cpu" for decoder in models.values())
    return {
        "units": each.units, "seconds": made.seconds, "commit_s": times.commits,
        "pass_s": [times.passes[role] for role in measured_runs.ROLES],
        "read_s": times.reads, "waited": max(1 - worked / made.seconds, 0.0) if cpu else 0.0, "load": _load(),
        "spans": spans,
    }  # fmt: skip


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None  # null in JSON


def measure(
    out: Path, plan: MeasurementPlan, models: Mapping[str, Decoder], *, resume: bool = False, report: Report | None = None,
    session: Interleaved | None = None, pool: Starting | None = None, lanes: Lanes | None = None,
) -> MeasuredRuns:
    """Time a plan and write the runs to `out`, NAME.json.

    `session` is measured next to the runs, spread over all runs. `pool` starts the processes of runs over processes, anew for
    each repeat; `lanes` are the streams of runs over streams. Rows are kept in NAME.jsonl until all are complete. With `resume`
    only missing repeats are run; surplus repeats are kept.
    """
    measured_runs.json_of(out)
    if out.exists():
        raise ParameterError(f"out must be a new file, and {out.name} exists; give another, or remove it")
    check(plan, models)
    kept = _PartialRuns(out.with_suffix(".jsonl"), _asked(plan, models), resume)
    total = len(plan.decodings) * (plan.repeats + 1)
    decodings = []
    for number, each in enumerate(plan.decodings):
        if report is not None:
            report(number, total, str(each))
        try:
            decodings.append(decode(each, models, plan.tokens, plan.seed, log=True))
        except ParameterError:
            if not kept.rows:
                kept.path.unlink()  # there is nothing to resume
            raise
    with _quick_collections():
        _repeat(plan, models, kept, report, session, pool, lanes)
    found = MeasuredRuns(_log(plan, models, decodings), _table(kept.rows), _about(plan, models))
    measured_runs.save(found, out)
    kept.path.unlink()
    return found


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Exclude the current objects from garbage collections, which would take longer than most runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _repeat(
    plan: MeasurementPlan, models: Mapping[str, Decoder], kept: _PartialRuns, report: Report | None, session: Interleaved | None,
    pool: Starting | None, lanes: Lanes | None,
) -> None:
    """Run all repeats that are not saved yet."""
    total = len(plan.decodings) * (plan.repeats + 1)
    for turn in range(plan.repeats):
        left = [number for number in plan.order(turn) if (number, turn) not in kept.done]
        if not left:
            continue
        if session is not None:
            session.begin(turn)
        with contextlib.nullcontext() if pool is None else pool() as processes:
            for _ in range(plan.warm_ups):
                for number in _first_of_each(plan, left):
                    decode(plan.decodings[number], models, plan.tokens, plan.seed, processes, lanes)
            for index, number in enumerate(left):
                if report is not None:
                    report((turn + 2) * len(plan.decodings) - len(left) + index, total, str(plan.decodings[number]))
                if session is not None:
                    session.between(index / len(left), processes)
                row = {"decoding": number, "repeat": turn, "run_order": turn * len(plan.decodings) + index}
                kept.add(row | _timed_alone(plan, number, models, processes, lanes))
            if session is not None:
                session.between(1.0, processes)
                session.end()


def _timed_alone(
    plan: MeasurementPlan, number: int, models: Mapping[str, Decoder], pool: Pool | ModelProcesses | None, lanes: Lanes | None
) -> dict[str, Any]:
    """Time a decoding; repeat it if a CUDA graph was captured meanwhile.

    The untimed decoding has captured its graphs, but a near tie may be resolved differently and need a pass of another shape.
    """
    while True:
        before = cuda_graphs.captured(models.values())
        found = timed(plan.decodings[number], models, plan.tokens, plan.seed, pool, lanes)
        if cuda_graphs.captured(models.values()) == before:
            return found


def _first_of_each(plan: MeasurementPlan, numbers: Sequence[int]) -> list[int]:
    """Return the first of these decodings for each number and kind of units; it warms them up for the others."""
    found = {(plan.decodings[number].units, plan.decodings[number].unit_kind): number for number in reversed(numbers)}
    return [*found.values()]


class _RunRow(TypedDict):
    decoding: int
    repeat: int
    run_order: int
    units: int
    seconds: float
    commit_s: list[float]
    pass_s: list[float]
    read_s: float
    waited: float
    load: float | None
    spans: list[dict[str, Any]]


class _PartialRuns:
    """Rows of an unfinished measurement, next to its plan, in a file. The number of repeats may change on resuming."""

    def __init__(self, path: Path, asked: Mapping[str, Any], resume: bool) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        plan = json.loads(strict_json.dumps(asked))
        if path.exists() and not resume:
            raise ParameterError(f"{path.name} holds unfinished runs; continue them with --resume, or remove it")
        if path.exists():
            self.rows = [*self._read(plan)]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [strict_json.dumps({"asked": plan}), *map(strict_json.dumps, self.rows)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _read(self, plan: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            lines = bounded_files.read_text(self.path).splitlines()
            earlier = bounded_files.json_of(lines[0])["asked"]
        except (IndexError, ValueError, KeyError, TypeError):
            raise ParameterError(f"{self.path.name} holds no unfinished runs; remove it") from None
        if not isinstance(earlier, dict):
            raise ParameterError(f"{self.path.name} holds no unfinished runs; remove it")
        earlier.pop("repeats", None)  # older files have it
        if earlier != plan:
            what = f"{self.path.name} holds runs of another plan"
            raise ParameterError(f"{what}: {checks.differing_key(plan, earlier)} differs; remove it, or use the same plan")
        for number, line in enumerate(lines[1:], 2):
            try:
                row = bounded_files.json_of(line)
                typed_values.check(row, _RunRow, "row")
            except ValueError:
                if number < len(lines):
                    raise ParameterError(f"{self.path.name}, line {number}: it cannot be read; remove the file") from None
                return  # the interrupted run was writing this line
            yield row

    @property
    def done(self) -> set[tuple[int, int]]:
        return {(row["decoding"], row["repeat"]) for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(row) + "\n")


def _asked(plan: MeasurementPlan, models: Mapping[str, Decoder]) -> dict[str, Any]:
    planned = [asdict(each) | {"settings": plain(each.settings)} for each in plan.decodings]
    same = {name: getattr(plan, name) for name in ("tokens", "warm_ups", "seed")}
    mode = {"mode": cuda_graphs.mode_of(models["target"])}
    return {"wanted": planned, **same, "models": _models(models), "machine": _facts(models), **_devices(plan), **mode}


def _devices(plan: MeasurementPlan) -> dict[str, list[str]]:
    return {"devices": list(plan.facts.get("devices", ()))}


def _models(models: Mapping[str, Decoder]) -> dict[str, dict[str, Any]]:
    return {role: {"name": each.name, "checksum": each.checksum, "layers": each.layers} for role, each in models.items()}


def _facts(models: Mapping[str, Decoder]) -> dict[str, Any]:
    facts = machine.facts(str(models["target"].device))
    for name in ("date", *machine.CLOCK_FACTS):
        facts.pop(name, None)
    return facts


def _log(plan: MeasurementPlan, models: Mapping[str, Decoder], decodings: Sequence[Decoding]) -> ReadLog:
    facts = machine.facts(str(models["target"].device))
    versions = {name: str(facts[name]) for name in ("python", "torch", "transformers")}
    unforced = all(each.rates is None for each in plan.decodings)
    source = "measured: what the models said" if unforced else "assumed: outcomes were forced"
    return ReadLog(
        tuple(decodings), tuple(each.name for each in plan.decodings), _models(models), None, plan.seed, str(facts["date"]),
        versions, source,
    )  # fmt: skip


def _about(plan: MeasurementPlan, models: Mapping[str, Decoder]) -> dict[str, Any]:
    target = models["target"]
    facts = machine.facts(str(target.device))
    shapes = {}
    for role, each in models.items():
        try:
            shape = each.shape(str(each.dtype).removeprefix("torch."))
        except ParameterError:
            continue  # the operations of this architecture are not modelled
        shapes[role] = json.loads(strict_json.dumps(transformer.described(shape)))
    rates = [None if each.rates is None else dict(each.rates) for each in plan.decodings]
    forced_by = None if all(each is None for each in rates) else rates
    versions = {name: str(facts[name]) for name in ("python", "torch", "transformers")}
    return {
        "device": str(target.device), "dtype": str(target.dtype).removeprefix("torch."), "threads": facts.get("threads"),
        "machine": {key: value for key, value in facts.items() if key not in ("date", *versions)}, "shapes": shapes,
        "prompts": plan.facts.get("prompts", ""), "warm_ups": plan.warm_ups, "forced": forced_by,
        "unit_kind": [each.unit_kind for each in plan.decodings], **_devices(plan), "mode": cuda_graphs.mode_of(target),
        "roles": [*measured_runs.ROLES], "profiles": dict(plan.facts.get("profiles", {})), "date": facts["date"],
        "versions": versions,
    } | ({"room": target.room} if isinstance(target, cuda_graphs.Graphs) else {})  # fmt: skip


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import polars as pl

    integer, numbers = pl.Int64, pl.List(pl.Float64)
    schema: dict[str, Any] = dict.fromkeys(("decoding", "repeat", "run_order", "units"), integer)
    schema |= dict.fromkeys(("seconds", "read_s", "waited", "load"), pl.Float64) | {"commit_s": numbers, "pass_s": numbers}
    strings, times = ("what", "fate", "role"), ("start", "end")
    kinds = {name: pl.String if name in strings else pl.Float32 if name in times else integer for name in STORED_FIELDS}
    schema["spans"] = pl.List(pl.Struct(kinds))
    load = pl.col("load").fill_null(float("nan"))  # not every system has it
    try:
        found = pl.DataFrame([{name: row[name] for name in schema} for row in rows], schema=schema)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:  # in rows from a file
        line = str(error).partition("\n")[0]
        raise ParameterError(f"saved rows do not form one table: {line}; remove their file, and run again") from None
    return found.with_columns(load).sort("decoding", "repeat")


def by_graphs(
    planned: Sequence[PlannedDecoding], models: Mapping[str, Decoder], tokens: int, room: int = 0, sequences: int = 1
) -> dict[str, Decoder]:
    """Return the models with passes as CUDA graphs, with room for all decodings, at least `room` KV rows per sequence."""
    room = max(room, *[len(each.prompt) + tokens for each in planned])
    for each in planned:
        sequences = max(sequences, _parameters(each, _of(each, models, tokens), tokens).decoded_sequences)
    return {role: cuda_graphs.Graphs(each, cuda_graphs.rounded(room), sequences) for role, each in models.items()}


# --- Plans --------------------------------------------------------------------------------------------------------------


def choices(method: str, settings: Mapping[str, Any], swept: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of swept and fixed values, with renamed keys under their present names."""
    from calibrate.decode.output_quality import settings_of
    from model.base import table_records

    kind = registry.parameters(method)
    found = settings_of(table_records.renamed(kind, settings), table_records.renamed(kind, swept))
    table_records.refuse_unknown(kind, found[0], "method")
    return found
