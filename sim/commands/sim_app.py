"""The `sim` command. Each command imports its modules when it runs, so that `sim --help` is fast."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from model.base import strict_json
from model.base.command_help import SETTINGS, DocumentedCommand, DocumentedGroup, run_program, version_option
from sim.commands import advise_command, explain_command, serve_command, sim_report

app = typer.Typer(
    cls=DocumentedGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=SETTINGS,
    callback=version_option,
    help="Does an accelerated decoding method pay for your model: how much faster is it, and how much extra compute does it take?",
    epilog="Start with: sim run    (the paper's figures)    or: sim run ppd-overheads --set method.candidates=2",
)  # fmt: skip

Scenario = Annotated[
    str | None,
    typer.Argument(help="A TOML file or the name of a bundled scenario (`sim ls scenarios`). Default: ppd-figures-3-and-4."),
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a key: --set outcomes.match_rate=0.4")]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="PATH=VALUES", help="Sweep a key: --sweep method.candidates=1,3,5 or PATH=from:to:count"),
]
View = Annotated[
    str | None,
    typer.Option(
        "--view", help="formula (closed form), paths (Monte Carlo) or events (discrete-event), or several: --view formula,events"
    ),
]
Replications = Annotated[int | None, typer.Option(help="Simulated decodings of each grid point, in the views paths and events.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws; the same seed gives the same tables.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods", metavar="MODULE", help="Dotted path of a module with a method of your own; it is imported, so its code runs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


_SCHEMAS = {
    "scenarios": ("sim.scenarios.json_schema", "of_scenarios"), "advise": ("sim.advice.advice_schema", "schema"),
    "map": ("sim.maps.map_schema", "schema"),
    "audit": ("sim.commands.audit_command", "schema"), "explain": ("sim.advice.explained_speedup", "json_schema"),
    "load": ("sim.serving.serving_schema", "of_scenarios"), "serve": ("sim.serving.serving_schema", "of_output"),
}  # fmt: skip
"""Module and function of each JSON schema."""
_SHOWN = 6  # default number of tokens in the picture of a decoding


def main() -> None:
    """Entry point of the `sim` command.

    Its matrix products are small: threads of OpenBLAS would take more time to wait for each other than they save, on all cores.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run_program(app)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's error into one line and an exit code: 2 for invalid input, 1 for a run that could not finish.

    Modules named by `--methods` are registered while the command runs.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        from model.base import user_errors, user_warnings
        from model.methods.registry import allow_modules

        with user_errors.exit_on_user_errors(), user_warnings.print_warnings(), allow_modules(kwargs.get("methods") or ()):
            command(*args, **kwargs)

    return inner


@app.command(cls=DocumentedCommand)
@guarded
def run(
    scenario: Scenario = None,
    set_: Set = None,
    sweep: Sweep = None,
    view: View = None,
    replications: Replications = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Output directory. Default: runs/NAME-HASH.")] = None,
    jobs: Annotated[
        str | None,
        typer.Option("-j", "--jobs", metavar="NUMBER|dask", help="Worker processes, or dask: a local cluster. Default: automatic."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="Compute on the workers of this dask scheduler. Needs the extra dask."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in the output directory.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the size of the run and an estimate of its time; write nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm a grid of more than 10 million points.")] = False,
    figures: Annotated[bool, typer.Option(help="Draw the figures.")] = True,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Columns to print, separated by commas, or all. Default: the main ones.")
    ] = None,
    methods: Methods = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress.")] = False,
) -> None:
    """Run a scenario and write its results table and figures.

    A scenario with a table [load] simulates a server under load.

    sim run

    sim run mine.toml --set outcomes.match_rate=0.4 --sweep method.candidates=1,3,5 --view events --replications 500 --seed 7 -j 2

    sim run ppd-overheads -o results/overheads --resume

    sim run serving-azure --sweep server.max_num_seqs=64,256 -j 2

    sim run mine.toml --scheduler tcp://10.0.0.1:8786
    """
    from sim.runs import executor
    from sim.runs import sweep as sweeps

    overrides = _overrides(set_, sweep, view, replications, seed)
    processes = executor.check_jobs(jobs, scheduler)
    from sim.serving import served_files

    if served_files.holds_load(scenario):
        unused = {"--view": view, "--columns": columns, "--methods": methods}
        _refuse_of_servers([name for name, value in unused.items() if value])
        with _guarded_run(), _progress(quiet, "runs") as progress:
            serve_command.run_scenario(
                scenario, overrides, out, processes, scheduler, resume=resume, dry_run=dry_run, as_json=as_json, draw=figures,
                progress=progress,
            )  # fmt: skip
        return
    if columns is not None:
        from sim.runs.run_report import check_columns

        check_columns(columns)
    if dry_run:
        _dry_run(scenario, overrides, as_json)
        return
    with _guarded_run(), _progress(quiet) as progress:
        report = sweeps.run(
            scenario, out=out, jobs=processes, scheduler=scheduler, resume=resume, yes=yes, progress=progress, **overrides
        )
    import figures as drawing
    from sim.runs import run_report as reports

    frame = report.frame(reports.MOST_LISTED)
    assert report.out is not None
    try:
        whole = frame if frame.height == report.rows else None  # of a larger table, figures read the points that they draw
        drawn = drawing.of_run(report.out, whole) if figures else []
        found = reports.findings(report)
        summary = reports.summarise(report, frame, drawn, found)
    except OSError as error:
        remedy = f"the tables in {report.out} are complete; draw the figures with `sim plot {report.out}`"
        print(f"error: {error.strerror or error} ({error.filename or report.out}); {remedy}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(summary.document)
    elif columns is None and reports.prints_like_a_file():
        print(summary.text, end="")
    else:
        reports.show(report, frame, drawn, asked=columns, found=found)
    if report.failed or report.disagreements:
        raise typer.Exit(1)


@contextlib.contextmanager
def _guarded_run() -> Iterator[None]:
    """Say in a line what is kept of a run that was interrupted (exit code 130) or could not finish (1)."""
    from sim.runs.executor import RunError

    try:
        yield
    except KeyboardInterrupt as stop:
        print(f"interrupted; {str(stop) or 'nothing was run yet'}", file=sys.stderr)
        raise typer.Exit(130) from None
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _refuse_of_servers(given: list[str]) -> None:
    """Refuse options that scenarios of servers do not have."""
    from model.base.checks import ParameterError

    if given:
        raise ParameterError(f"{given[0]} is not for a scenario with [load], which simulates a server; leave it out")


def _overrides(
    set_: list[str] | None, sweep: list[str] | None, view: str | None, replications: int | None, seed: int | None
) -> dict[str, Any]:
    views = None if view is None else [name.strip() for name in view.split(",")]
    return {"set": set_ or [], "sweep": sweep or [], "views": views, "replications": replications, "seed": seed}


def _dry_run(scenario: str | None, overrides: dict[str, Any], as_json: bool) -> None:
    from sim.runs import run_time
    from sim.runs import sweep as sweeps
    from sim.runs.shard_plan import ShardPlan
    from sim.scenarios.grid import Grid

    grid = Grid(sweeps.resolve(scenario, **overrides))
    plan = ShardPlan(grid)
    decodings = {view: grid.points * plan.replications[view] for view in plan.views if view != "formula"}
    facts = {
        "points": grid.points, "axes": {axis.path: len(axis.values) for axis in grid.axes}, "views": list(plan.views),
        "decodings": decodings, "shards": plan.count(), "seconds_on_one_core": round(run_time.estimate(plan), 1),
    }  # fmt: skip
    if as_json:
        print(strict_json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        text = ", ".join(f"{key} {each:,}" for key, each in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):20} {', '.join(text) if isinstance(text, list) else text}")
    print("nothing was run, nothing was written")


class _ProgressReport(Protocol):
    """Tell the progress: units done (a part of one counts), in total, and what else is known, in words."""

    def __call__(self, done: float, total: int, about: str = "") -> None: ...


@contextlib.contextmanager
def _progress(quiet: bool, what: str = "shards") -> Iterator[_ProgressReport | None]:
    """Progress on stderr: a bar in a terminal, else a line now and then."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _progress_lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[about]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, about="")

        def update(done: float, total: int, about: str = "") -> None:
            bar.update(task, completed=done, total=total, about=about)

        yield update


_SECONDS_BETWEEN_LINES = 10.0


def _progress_lines(what: str = "shards", seconds: float = _SECONDS_BETWEEN_LINES) -> _ProgressReport:
    """Print a line of progress after each `seconds`, for logs; short runs print none."""
    begun = last = time.monotonic()

    def report(done: float, total: int, about: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds and 0 < done < total:
            last = now
            left = (now - begun) * (total - done) / done
            within = f" ({about})" if about else ""
            print(f"{int(done)} of {total} {what}{within}, about {left:.0f} s left", file=sys.stderr, flush=True)

    return report


@app.command(cls=DocumentedCommand)
@guarded
def plot(
    directory: Annotated[Path | None, typer.Argument(help="Directory of a run.")] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option("--profile", metavar="NAME", help="A hardware profile (`sim ls profiles`) or a .json file; up to three."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Directory, with --profile. Default: runs/profiles.")] = None,
    as_json: Json = False,
) -> None:
    """Draw the figures of a run or of hardware profiles.

    The figures of a run are drawn again from its results table; those of a profile show its roofline, the time of multi-token
    passes, and the parts of a layer.

    sim plot runs/ppd-figures-3-and-4-0123abcd

    sim plot --profile h100-llama-2-7b --profile a100-llama-2-7b -o pictures
    """
    import figures

    if (directory is None) == (profiles is None):
        got = "neither" if directory is None else "both"
        raise _mistake(f"plot takes the directory of a run or --profile NAME, got {got}; name one of the two")
    if directory is not None and out is not None:
        raise _mistake(f"--out is used with --profile alone, got {out}; a run's figures are drawn into its directory")
    if directory is not None:
        served = (directory / figures.SERVED).is_file()
        paths = figures.of_served_run(directory) if served else figures.of_run(directory)
    else:
        paths = figures.of_profiles(profiles or [], out or Path("runs", "profiles"))
    print(strict_json.dumps([str(path) for path in paths]) if as_json else "\n".join(map(str, paths)))


@app.command(cls=DocumentedCommand)
@guarded
def trace(
    scenario: Scenario = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Output file: .json.gz or .json (for ui.perfetto.dev), .png or .svg.")
    ] = Path("timeline.json.gz"),
    point: Annotated[int, typer.Option(min=0, help="Grid point (column `point`).")] = 0,
    replication: Annotated[int, typer.Option(min=0, help="Replication of that point.")] = 0,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to decode at most. Default: all; six in a picture.")] = None,
    set_: Set = None,
    sweep: Sweep = None,
    seed: Seed = None,
    methods: Methods = None,
) -> None:
    """Record the timeline of one simulated decoding.

    It has the passes on each unit, transfers, and the tokens generated. Of a scenario with [load] it has the steps of the server
    and the requests, at the first load of a point.

    sim trace -o timeline.json.gz

    sim trace ppd-overheads --point 4 -o timeline.png
    """
    from figures.common import point_names
    from sim.runs import trace as traces
    from sim.serving import served_files

    if served_files.holds_load(scenario):
        _refuse_of_servers([name for name, value in {"--tokens": tokens, "--replication": replication}.items() if value])
        print(serve_command.trace_scenario(scenario, _overrides(set_, sweep, None, None, seed), out, point))
        return
    picture = out.suffix in (".png", ".svg")
    wanted = tokens if tokens is not None or not picture else _SHOWN
    overrides = _overrides(set_, sweep, None, None, seed)
    options: dict[str, Any] = {"point": point, "replication": replication, "tokens": wanted}
    result, about, unit = traces.described(scenario, **options, **overrides)
    choice = ", ".join([point_names.method(about), *point_names.words(about, point_names.COMMON[:-2])])
    name, where = f"{choice}: {len(result.tokens)} tokens", f"{about['scenario']}, point {point}, decoding {replication}"
    if picture:
        import polars as pl

        import figures
        from figures.common import style
        from figures.of_runs import timeline

        rows = pl.DataFrame([row._asdict() for row in result.intervals], infer_schema_length=None)
        commits = pl.DataFrame(result.commits, schema=["time", "kind", "tokens"], orient="row")
        figure = style.with_subject_line(timeline.draw(rows, commits, title=name, time_unit=unit), where)
        figures.save(figure, out.with_suffix(""), formats=(out.suffix.removeprefix("."),))
    else:
        traces.write(out, result, name=f"{where}: {name}", time_unit=unit)
    print(out)


@app.command(cls=DocumentedCommand)
@guarded
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Measured runs: NAME.json files written by `calibrate run`.")],
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile", metavar="ROLE=NAME", help="Profile of each model. Default: those of the runs' measurement session."
        ),
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(
            "--law", metavar="NAME", help="Step law instead of profiles, for runs on one unit: a name (`sim ls laws`) or a .json."
        ),
    ] = None,
    allow_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-mismatch",
            help="Accept a profile of another machine, model, dtype or mode, or a law of another model; each row notes it.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Table with one row per run: FILE.csv or FILE.parquet.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Directory for figures and a comparison.json, of which `sim report` makes a report.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page whose comparison section is updated.")] = None,
    check: Annotated[bool, typer.Option("--check", help="With --page: write nothing; exit 1 if the page is out of date.")] = False,
    methods: Methods = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and report the error.

    sim compare runs/cpu.json --figures pictures

    sim compare runs/spec.json --profile target=profiles/cpu-big.json --profile draft=profiles/cpu-small.json -o errors.csv

    sim compare runs/engine.json --law fitted/mine.json

    Recorded model answers are replayed, and the times of passes come from the profile, or from a step law that `calibrate engine
    fit` wrote. Measured times of the runs are used only to compute the error, which is printed next to the measurement noise. A law
    has no times of several units, nor of a medium model: such runs are left out, and counted.
    """
    from rich.console import Console

    from model.base import bounded_files
    from model.engines import step_law
    from sim.comparison import comparison_report
    from sim.comparison import run_comparison as comparing

    if check and page is None:
        raise _mistake("--check is used with --page alone; add that, or leave it out")
    if law is not None and profile:
        raise _mistake(f"times must be from --law or from --profile, got both ({law} and {', '.join(profile)}); leave one out")
    chosen, steps = profile or [], None if law is None else step_law.load(law)
    named = [comparing.of_file(path, chosen, allow_mismatch=allow_mismatch, law=steps) for path in runs]
    if page is not None:
        written = comparison_report.page_with_section(page, named)
        if check:
            stale = bounded_files.read_page(page) != written
            print(f"{page.name} is {'out of date; update it without --check' if stale else 'up to date'}")
            if stale:
                raise typer.Exit(1)
            return
        from model.base.whole_files import write_text

        write_text(page, written)
    table = comparing.concatenate(named)
    if out is not None:
        comparing.write(table, out)
    drawn: list[Path] = []
    if figures is not None:
        import figures as drawing
        from sim.comparison import formula_validity

        found = [formula_validity.of_file(path, own, chosen, law=steps) for path, (_, own, _) in zip(runs, named, strict=True)]
        pair = None if steps else next(filter(None, (comparing.pair_of_file(path, chosen) for path in runs)), None)
        drawn = drawing.of_comparison(table, figures, formula_validity.concatenate([name for name, *_ in named], found), pair)
        drawn.append(comparison_report.write_document(named, figures))
    if as_json:
        print(comparison_report.document(named))
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=148, highlight=False)
    for _, own, about in named:
        comparison_report.show(own, about, console)
    for path in (*([out] if out else []), *([page] if page else []), *drawn):
        print(path)


app.command("explain", cls=DocumentedCommand)(guarded(explain_command.explain))


@app.command(cls=DocumentedCommand)
@guarded
def audit(
    claims: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLAIMS.csv]",
            help="Claims, one a row: columns speedup, method, and any of model, gpu, draft, acceptance_rate (alpha),"
            " mean_acceptance_length (AL), draft_length (K), cost_ratio (c), batch, draft_acceptance_rate, draft_passes,"
            " plain_tpot_ms, context, tensor_parallel, dtype, match_rate, layers, exit_layer, mean_layers, fallback_rate,"
            " rollback_rate, engine, source. Default: bundled claims of papers.",
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Columns to print, separated by commas, or all. Default: the main ones.")
    ] = None,
    methods: Methods = None,
    as_json: Json = False,
) -> None:
    """Check claims of speed-ups against what is possible.

    sim audit

    sim audit claims.csv --json

    sim audit claims.csv --columns row,speedup,bound,needed_acceptance,needed_cost_ratio,verdict

    A claim is impossible, contradictory, plausible, or needs a number to be better than stated: acceptance, cost of drafting, or a
    slower baseline. Each row shows the bound that decides: the method's theory with free drafts, with the draft's bytes at full
    bandwidth, or with the stated batch verified at the GPU's peaks. Fields that are not known stay empty; names that are not known
    here are not used.
    """
    from model.audit.claims import EXAMPLES
    from sim.commands import audit_command

    audit_command.check_columns(columns)
    found = audit_command.of_file(EXAMPLES if claims is None else claims, _progress_lines("claims", 2.0))
    if as_json:
        print(strict_json.dumps(audit_command.document(found), indent=2))
    else:
        audit_command.show(found, columns)


@app.command(cls=DocumentedCommand)
@guarded
def check(
    method: Annotated[str | None, typer.Option(help="Method to check, or serving: a server under load. Default: all.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples per theorem.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the examples.")] = 0,
    theorem: Annotated[list[str] | None, typer.Option("--theorem", help="Theorem number, such as 21a; may be repeated.")] = None,
    example: Annotated[str | None, typer.Option(help="Check a single example, as JSON; needs one --theorem.")] = None,
    as_json: Json = False,
) -> None:
    """Check the theorems on random examples.

    A failure is reduced to a small example and printed with the command that reproduces it.

    sim check --method ppd --examples 1000 --seed 0

    sim check --method ppd --theorem 21a --examples 5000

    Exit code 1 if a theorem fails. Some statements must have a counterexample: without one among 200 or more examples they count
    as failed; among fewer they are open, which the last line reports and which is not an error.
    """
    from sim import theorems

    if example is not None:
        if theorem is None or len(theorem) != 1:
            raise _mistake("--example needs one --theorem, the one that it belongs to")
        verdicts = iter([theorems.replay(theorem[0], _json(example), method)])
    else:
        verdicts = theorems.check(method, examples, seed, theorem)
    found = []
    for verdict in verdicts:
        found.append(verdict)
        if not as_json:
            print(verdict, flush=True)
    documents = [verdict.document() for verdict in found]
    print(strict_json.dumps(documents, indent=2) if as_json else theorems.summary(found))
    if any(verdict.expected is False for verdict in found):
        raise typer.Exit(1)


def _mistake(message: str) -> Exception:
    from model.base.checks import ParameterError

    return ParameterError(message)


def _json(text: str) -> Any:
    from model.base.checks import ParameterError

    try:
        return json.loads(text)
    except ValueError as error:
        raise ParameterError(f"--example must be JSON, got {text!r}: {error}") from None


@app.command(cls=DocumentedCommand)
@guarded
def lint(
    scenario: Annotated[str, typer.Argument(help="A TOML file or the name of a bundled scenario.")], methods: Methods = None
) -> None:
    """Check a scenario without running it.

    sim lint mine.toml
    """
    from model.base.checks import ParameterError
    from sim.runs import sweep as sweeps
    from sim.runs.shard_plan import ShardPlan
    from sim.scenarios.grid import Grid
    from sim.serving import served_files

    if served_files.holds_load(scenario):
        from sim.serving import load_scenario, study

        made = [study.plan(inputs) for _, inputs in load_scenario.points(load_scenario.resolve(scenario))]
        print(f"{scenario}: {len(made)} points, {sum(len(each.runs) for each in made)} runs of a server")
        return
    grid = Grid(sweeps.resolve(scenario))
    plan = ShardPlan(grid)
    wrong = 0
    for point in range(min(grid.points, 512)):
        try:
            case = grid.case(point)
        except ParameterError as error:
            wrong += 1
            print(f"point {point} {grid.values(point)} would fail: {error}")
            continue
        if case.contended and set(plan.views) - {"events"} and point == 0:
            print(f"warning: formula and paths have no value where passes may wait for a unit or link; {case.contention}")
    about = f"{grid.points} points in {', '.join(plan.views)}; about {plan.estimate():.0f} s on one core"
    print(f"{scenario}: {about}" if not wrong else f"{scenario}: {wrong} points would fail; {about}")
    if wrong:
        raise typer.Exit(1)


app.command("report", cls=DocumentedCommand)(guarded(sim_report.report))


@app.command("ls", cls=DocumentedCommand)
@guarded
def list_(
    what: Annotated[
        str, typer.Argument(help="methods, outcomes, costs, shapes, devices, profiles, laws, scenarios or published.")
    ] = "scenarios",
    name: Annotated[
        str | None,
        typer.Argument(help="Entry to describe, or a file: a profile's or law's .json, a model's config.json, a device's .toml."),
    ] = None,
    methods: Methods = None,
    as_json: Json = False,
) -> None:
    """List methods, costs, devices and more, or describe one.

    sim ls methods

    sim ls methods bild

    sim ls outcomes thresholds

    sim ls profiles profiles/cpu-llama-68m.json

    sim ls scenarios bild > mine.toml

    sim ls devices h100 > my-gpu.toml
    """
    from sim.commands import listing

    rows = listing.lines(what) if name is None else listing.details(what, name)
    if as_json:
        print(strict_json.dumps(rows, indent=2))
    elif name is not None:
        print("\n\n".join(rows.values()))
    else:
        width = max(map(len, rows))
        print("\n".join(f"{name:{width}}  {about}" for name, about in rows.items()))


app.command("advise", cls=DocumentedCommand)(guarded(advise_command.advise))
app.command("serve", cls=DocumentedCommand)(guarded(serve_command.serve))


@app.command(cls=DocumentedCommand)
@guarded
def schema(
    what: Annotated[
        str,
        typer.Argument(help="scenarios, load (those with [load]), or a --json: advise, map, audit, explain or serve."),
    ] = "scenarios",
    methods: Methods = None,
) -> None:
    """Print the JSON schema of scenario files, or of the output of a command.

    sim schema > scenario.schema.json

    sim schema advise > advise.schema.json
    """
    from model.base import checks

    checks.one_of("schema", what, _SCHEMAS)
    module, function = _SCHEMAS[what]
    print(strict_json.dumps(getattr(importlib.import_module(module), function)(), indent=2))


@app.command(cls=DocumentedCommand)
@guarded
def env(as_json: Json = False) -> None:
    """Print versions and platform, for a bug report.

    sim env --json
    """
    import os
    import platform

    from sim.runs.environment import versions

    facts = versions() | {"platform": platform.platform(), "cores": str(os.cpu_count())}
    print(strict_json.dumps(facts, indent=2) if as_json else "\n".join(f"{name:12} {value}" for name, value in facts.items()))
