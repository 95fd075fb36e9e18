"""`calibrate run`: time real decodings, repeat by repeat, for `sim compare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.loading.load_models import LoadedModel
    from calibrate.measured_runs.measure_runs import PlannedDecoding
    from calibrate.measured_runs.run_plan import WrittenPlan
    from calibrate.workers.model_processes import ModelProcesses
    from calibrate.workers.worker_pool import Pool
    from model.logs.measured_runs import MeasuredRuns


@options.guarded
def run(
    out: Annotated[Path, typer.Option("-o", "--out", help="NAME.json of the measured runs; tables go to NAME.parquet.")],
    method: Annotated[str | None, typer.Argument(help="A method, if there is no --plan.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A TOML file of methods, settings and prompts.")] = None,
    model: Annotated[str | None, typer.Option(help="Target: a directory, OWNER/NAME, family, or a shape with --forced.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="The draft model, for methods that have one; or a file of draft heads: see calibrate heads.")
    ] = None,
    medium: Annotated[str | None, typer.Option(help="The medium model of hierarchical drafting.")] = None,
    heads: Annotated[str | None, typer.Option(help="Trained exit heads, or none. Default: those in the target's folder.")] = None,
    set_: options.Set = None,
    sweep: options.Sweep = None,
    forced: Annotated[
        list[str] | None,
        typer.Option(
            "--forced", metavar="RATE=VALUES",
            help="Force outcomes, drawn at a rate: match_rate=0.3,0.7. none: for methods without random outcomes.",
        ),
    ] = None,
    unit_kind: Annotated[
        str | None, typer.Option(help="Run units (or models) concurrently: as processes, or streams of one GPU. Default: in turn.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="A file of prompts. Default: the family's held-out code.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts. Default: 3; 1 with --forced.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Prompt length [tokens]. Default: 24.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to generate per prompt. Default: 48.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Repeats of each decoding. Default: 7.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts, order and forced outcomes. Default: 0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16.")] = None,
    mode: Annotated[str | None, typer.Option(help="Execution of a pass: eager or cuda-graph. Default: eager.")] = None,
    device: options.Device = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of --unit-kind processes, one per unit: cuda:0,cuda:1. Default: from --device on.")
    ] = None,
    threads: options.Threads = None,
    resume: options.Resume = False,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", metavar="MODULE", help="Dotted path of an outside method that the plan names."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Time real decodings. Each repeat runs all settings once, in random order, so that drift affects them equally.

    calibrate run speculative --model family --sweep draft_length=1,2,4 --threads 1 -o runs/speculative.json

    calibrate run --plan cpu-family.toml --threads 1 -o runs/cpu.json

    calibrate run pearl --model family --sweep draft_length=2,4 --unit-kind processes -o runs/pearl.json

    calibrate run ppd --model llama-68m --set exit_layer=1 --set candidates=1 --forced match_rate=0.3,0.7 -o runs/forced.json

    A plan can also time profiles in the same measurement session. Compare the simulator with the measured times by
    sim compare runs/cpu.json --profile target=...
    """
    from calibrate.measured_runs import run_plan
    from model.base.checks import ParameterError

    if (method is None) == (plan is None):
        both = "got both" if plan is not None else "got neither"
        raise ParameterError(f"either METHOD or --plan must be given, {both}")
    given = {
        "model": model, "draft": draft, "medium": medium, "heads": heads, "tokens": tokens, "repeats": repeats, "seed": seed,
        "file": prompts, "prompts": limit, "prompt_tokens": prompt_tokens, "dtype": dtype, "mode": mode,
    }  # fmt: skip
    changed: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if plan is not None:
        for name, value in (("set", set_), ("sweep", sweep), ("forced", forced), ("unit-kind", unit_kind)):
            if value:
                raise ParameterError(f"--{name} is used only with METHOD; set it in [[method]] of the plan")
        written = run_plan.read(plan)
        written = replace(written, run=replace(written.run, **changed))
    else:
        written = run_plan.from_tables({"run": changed, "method": [_table(str(method), set_, sweep, forced, unit_kind)]})
    warnings: list[str] = []
    kept = f"timed repeats are kept next to {out.name}; resume with the same command and --resume"
    with options.progress(quiet, "runs", kept) as bar:
        found = measure_plan(
            written, out, options.prepare_device(device, threads), gpus=_listed(gpus), resume=resume, report=bar,
            warn=warnings.append,
        )
    if as_json:
        said = {"runs": _rows(found), "file": str(out), "warnings": [*found.warnings, *warnings], "about": dict(found.about)}
        print(strict_json.dumps(said, indent=2))
        return
    print("\n".join(_lines(found)))
    for warning in (*found.warnings, *warnings):
        print(f"warning: {warning}", file=sys.stderr)
    print(out)


def _table(
    method: str, set_: Sequence[str] | None, sweep: Sequence[str] | None, forced: Sequence[str] | None, unit_kind: str | None
) -> dict[str, Any]:
    own = {key: value[0] for key, value in options.assignments("set", set_)}
    found: dict[str, Any] = {"name": method, **own} | ({} if unit_kind is None else {"unit_kind": unit_kind})
    rates = {"forced": {} if forced == ["none"] else dict(options.assignments("forced", forced))} if forced else {}
    return found | {"sweep": dict(options.assignments("sweep", sweep))} | rates


def _listed(gpus: str | None) -> list[str]:
    return [] if gpus is None else [each.strip() for each in gpus.split(",")]


def measure_plan(
    written: WrittenPlan, out: Path, device: str, *, gpus: Sequence[str] = (), resume: bool = False,
    report: Callable[[int, int, str], None] | None = None, warn: Callable[[str], None] | None = None,
) -> MeasuredRuns:  # fmt: skip
    """Run a plan on a device, and write the measured runs to `out`.

    Profiles of the same measurement session go into the folder of `out`; `warn` receives their warnings. `gpus` are the devices of
    the units of runs over processes (`calibrate.untested_on_gpu.gpu_ordering.unit_devices`).
    """
    from calibrate.measured_runs import measure_runs
    from calibrate.untested_on_gpu import cuda_graphs
    from calibrate.untested_on_gpu import gpu_ordering as at_gpus
    from model.base.checks import ParameterError
    from model.logs import measured_runs as files

    files.json_of(out)
    settings = written.run
    if settings.mode != files.MODES[0]:
        cuda_graphs.cuda_of(device)
    models, opened = _models(written, device)
    planned = [*_wanted(written, models, opened)]
    most = {kind: max((each.units for each in planned if each.unit_kind == kind), default=1) for kind in files.UNIT_KINDS}
    if gpus and most["processes"] == 1:
        remedy = "leave them out, or set unit_kind = processes"
        raise ParameterError(f"gpus are for methods that run over processes, and none does; {remedy}")
    copies = _copies(written, planned, device)
    devices = at_gpus.unit_devices(device, most["processes"], gpus)
    if most["processes"] > 1 and device != "cpu":
        at_gpus.check(devices)
    about: dict[str, Any] = {"prompts": _source(written), "profiles": _profiles(written, models, device)}
    if most["processes"] > 1:
        about["devices"] = devices
    plan = measure_runs.MeasurementPlan(planned, settings.tokens, settings.repeats, settings.warm_ups, settings.seed, about)
    measure_runs.check(plan, models)
    if settings.mode != files.MODES[0]:
        also = (0, 1) if written.profile is None else (written.profile.room, max(written.profile.batches))
        models = measure_runs.by_graphs(planned, models, settings.tokens, *also)
        measure_runs.check(plan, models)
    pool: Callable[[], AbstractContextManager[Pool | ModelProcesses]] | None = None
    if most["processes"] > 1:
        pool = _pool(written, models, devices) if copies is None else _model_processes(written, models, copies)
    lanes = None
    if most["streams"] > 1:
        from calibrate.untested_on_gpu.over_streams import Lanes

        lanes = Lanes(models["target"], most["streams"])
    session = None
    if written.profile is not None:
        from calibrate.measured_runs.interleaved_profiles import MeasurementSession

        names = _timed_names(written, models)
        session = MeasurementSession(
            models, names, written.profile, out.parent, device=device, dtype=settings.dtype, seed=settings.seed,
            processes=pool is not None and copies is None, lanes=lanes,
        )  # fmt: skip
    found = measure_runs.measure(out, plan, models, resume=resume, report=report, session=session, pool=pool, lanes=lanes)
    if session is not None and warn is not None:
        for role, lines in session.warnings.items():
            for line in lines:
                warn(f"profile of the {role}: {line}")
    for role, reason in {} if session is None else session.refused.items():
        raise ParameterError(f"{out.name} is written, but there is no profile of the {role}: {reason}; raw rows are kept")
    return found


def _pool(
    written: WrittenPlan, models: Mapping[str, Decoder], devices: Sequence[str]
) -> Callable[[], AbstractContextManager[Pool]]:
    """Return a function that starts one process per device, each with a replica of the target."""
    from calibrate.loading import load_models
    from calibrate.loading.replicas import Replica
    from calibrate.workers.worker_pool import started

    settings, name = written.run, _named(written)["target"]
    heads = None
    if models["target"].heads:
        heads = str(load_models.heads_path(settings.model) if settings.heads is None else Path(settings.heads))
    random = None if models["target"].checksum else settings.seed
    replica = Replica(name, devices[0], settings.dtype, random, heads=heads)
    others = [] if devices[0] == "cpu" else devices
    return lambda: started(replica, len(devices), settings.prompt_tokens + settings.tokens + 8, devices=others)


def _copies(written: WrittenPlan, planned: Sequence[PlannedDecoding], device: str) -> dict[str, int] | None:
    """Number of processes of each model, by role, in a plan whose processes have a model each; None in other plans."""
    from calibrate.decode import real_decoding
    from calibrate.workers import model_processes, worker_pool
    from model.base.checks import ParameterError

    over = [each for each in planned if each.unit_kind == "processes" and each.units > 1]
    roles = [real_decoding.roles(each.method, each.settings) for each in over]
    several = [len(each) > 1 for each in roles]
    if not any(several):
        if over and device == "cpu":
            units = max(each.units for each in over)
            worker_pool.check_processes(units, f"one for each of {units} units")
        return None
    if not all(several):
        one, more = over[several.index(False)].method, over[several.index(True)].method
        what = f"got {one}, whose processes have replicas of one model, and {more}, whose processes have a model each"
        raise ParameterError(f"methods over processes must be of one kind in a plan, {what}; make two plans")
    if device != "cpu":
        what = f"device must be cpu for {over[0].method} over processes, which have a model each, got {device!r}"
        raise ParameterError(f"{what}; leave unit_kind out, so that one process makes all passes")
    copies = max(each.units - len(names) + 1 for each, names in zip(over, roles, strict=True))
    counts = {role: copies if role == "target" else 1 for role in dict.fromkeys(name for names in roles for name in names)}
    model_processes.check_counts(counts)
    return counts


def _model_processes(
    written: WrittenPlan, models: Mapping[str, Decoder], copies: Mapping[str, int]
) -> Callable[[], AbstractContextManager[ModelProcesses]]:
    """Return a function that starts a process for each model."""
    from calibrate.loading.replicas import Replica
    from calibrate.workers.model_processes import started

    settings, names = written.run, _named(written)
    random = None if models["target"].checksum else settings.seed
    replicas = {role: Replica(names[role], "cpu", settings.dtype, random) for role in copies}
    return lambda: started(replicas, copies=copies)


def _models(written: WrittenPlan, device: str) -> tuple[dict[str, Decoder], dict[str, LoadedModel]]:
    """Return the models by role: loaded ones, or ones with random weights if all outcomes are forced."""
    from calibrate.loading import load_models
    from model.architectures import published_shapes
    from model.base.checks import ParameterError

    settings, names = written.run, _named(written)
    free = [role for role, name in names.items() if name in published_shapes.PRESETS or name.endswith("config.json")]
    if not free:
        opened = load_models.models(names, device, settings.dtype)
        load_models.use_heads_of(opened["target"], settings.model, settings.heads)
        return {role: each.decoder for role, each in opened.items()}, opened
    if any(each.rates is None for each in written.choices):
        what = f"{free[0]} {names[free[0]]} is a shape without weights"
        remedy = "force the outcomes of all methods (none for those without random outcomes), or give a model"
        raise ParameterError(f"{what}: {remedy}")
    from calibrate.loading.architectures import architecture
    from calibrate.timing import library_pass

    made = {
        role: library_pass.LibraryModel(architecture(name), device, settings.dtype, settings.prompt_tokens)
        for role, name in names.items()
    }
    for each in made.values():
        each.read_source()
    return {role: each.decoder for role, each in made.items()}, {}


def _wanted(written: WrittenPlan, models: Mapping[str, Decoder], opened: Mapping[str, LoadedModel]) -> Iterator[PlannedDecoding]:
    from calibrate.commands import log_command
    from calibrate.decode import real_decoding
    from calibrate.measured_runs import measure_runs
    from model.base.checks import ParameterError
    from model.logs import measured_runs as files

    settings = written.run
    real = any(each.rates is None for each in written.choices)
    prompts: list[tuple[str, list[int]]] = []
    if real:
        prompts = log_command.tokenized_prompts(
            settings.file, None, settings.prompts, settings.prompt_tokens, settings.seed, opened["target"]
        )
    # With an encoder, the prompt is the encoder's and the decoder begins with one token, as in `load_models.tokenize`.
    length = settings.prompt_tokens if models["target"].source is None else 1
    lengths = {len(tokens) for _, tokens in prompts} or {length}
    for each in written.choices:
        units, unit_kind = 1, each.unit_kind or files.UNIT_KINDS[0]
        if each.unit_kind is not None:
            table = real_decoding.scheduled(each.method, each.settings, max(lengths), settings.tokens)
            used = {role: models[role] for role in real_decoding.roles(each.method, table)}
            units = measure_runs.processes_of(real_decoding.parameters_of(each.method, used, table), used)
            if units == 1:
                held = f"and {each.method} uses one with these parameters"
                raise ParameterError(f"unit_kind is for methods that use several units, {held}; leave it out")
        if each.rates is None:
            for name, tokens in prompts:
                yield measure_runs.PlannedDecoding(
                    each.method, each.settings, tuple(tokens), name, units=units, unit_kind=unit_kind
                )
        else:
            for number in range(1 if not real else settings.prompts):
                prompt = tuple(range(length))
                name = f"forced {number}"
                yield measure_runs.PlannedDecoding(each.method, each.settings, prompt, name, each.rates, number, units, unit_kind)


def _source(written: WrittenPlan) -> str:
    settings = written.run
    if all(each.rates is not None for each in written.choices):
        return f"none: outcomes were forced after {settings.prompt_tokens} positions"
    prompts = "held-out standard library" if settings.file is None else Path(settings.file).name
    return f"{prompts}, {settings.prompt_tokens} tokens each"


def _named(written: WrittenPlan) -> dict[str, str]:
    """Return the names of the models, by role."""
    from calibrate.decode import real_decoding
    from calibrate.loading import load_models

    settings = written.run
    roles: dict[str, None] = {"target": None}
    for each in written.choices:
        roles |= dict.fromkeys(real_decoding.roles(each.method, each.settings))
    models = {"target": settings.model, "draft": settings.draft, "medium": settings.medium}
    return load_models.named(models, tuple(roles), "of the plan")


def _timed_names(written: WrittenPlan, models: Mapping[str, Decoder]) -> dict[str, str]:
    """Return the names under which the models are timed: an EAGLE head is `eagle:TARGET`; Medusa's heads cannot be timed alone."""
    from calibrate.decoders.eagle_and_medusa import DraftHead
    from model.base.checks import ParameterError

    names = _named(written)
    for role, each in models.items():
        if isinstance(each, DraftHead):
            if each.drafts_in_one_pass:
                raise ParameterError(f"[profile] must be left out with {each.name}, whose passes are not timed layer by layer")
            names[role] = f"{each.kind}:{names['target']}"
    return names


def _profiles(written: WrittenPlan, models: Mapping[str, Decoder], device: str) -> dict[str, str]:
    """Return the profile files of this measurement session, by role."""
    from calibrate.timing import profile_from_timings

    if written.profile is None:
        return {}
    names = _timed_names(written, models)
    stems = {role: profile_from_timings.stem_of(name, device, written.run.mode) for role, name in names.items()}
    return {role: f"{profile_from_timings.profile_name(stem, 'interpreter')}.json" for role, stem in stems.items()}


def _rows(found: MeasuredRuns) -> list[dict[str, Any]]:
    from model.logs.read_log import plain

    return [
        {
            "method": each.decoding.method, "settings": plain(each.decoding.settings), "prompt": found.log.names[number],
            "tokens": len(each.decoding.tokens), "repeats": each.repeats, "seconds": each.median(prompt=True),
            "seconds_behind_first_commit": each.median(), "noise": each.noise(), "disturbed": each.disturbed, "source": "measured",
        }
        for number, each in found.timed.items()
    ]  # fmt: skip


def _lines(found: MeasuredRuns) -> Iterator[str]:
    from calibrate.decode.titled_table import RateTable
    from model.logs.replay import changed_settings

    said = found.about
    mode = "" if found.mode == "eager" else f", {found.mode}"
    where = f"{said['machine'].get('name', said['device'])}, {said['dtype']}{mode}"
    title = f"{where}: medians of repeats (measured); noise: median relative deviation"
    rows = []
    for number, each in found.timed.items():
        per_token = each.median() / max(len(each.decoding.tokens) - len(each.decoding.commits[0].tokens), 1)
        rows.append((
            each.decoding.method, changed_settings(each.decoding), found.log.names[number][:24], len(each.decoding.tokens),
            each.repeats,
            f"{each.median(prompt=True) * 1e3:.1f}", f"{per_token * 1e3:.3f}", f"{each.noise():.1%}",
            "yes" if each.disturbed else "",
        ))  # fmt: skip
    columns = ("method", "settings", "prompt", "tokens", "repeats", "time [ms]", "ms per token", "noise", "disturbed")
    yield from RateTable(title, columns, tuple(rows)).lines()
