"""Simulation of decoding methods: scenarios, sweeps, and three views (formula, paths, events) that must agree.

>>> import sim
>>> table = sim.run(set={"scenario.tokens": 8}, views=["formula"])  # the bundled default scenario
>>> table["speedup"].max() > table["speedup"].min() > 1
True
>>> sim.trace.record("pearl", tokens=4).latency > 0
True
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars

    from sim.advice.advice import Advice
    from sim.advice.explained_speedup import Explanation
    from sim.advice.situation import Inputs
    from sim.maps.method_map import MethodMap
    from sim.reporting.report_document import ReportDocument
    from sim.serving.study_results import Study

__version__ = "0.1.0"

_MODULES = {
    "trace": "sim.runs.trace", "theorems": "sim.theorems", "grid": "sim.scenarios.grid", "schema": "sim.scenarios.json_schema",
    "comparison": "sim.comparison.run_comparison", "listing": "sim.commands.listing", "environment": "sim.runs.environment",
}  # fmt: skip
"""Modules by the names under which `import sim` offers them; each is imported when it is first used."""

__all__ = [
    "advise", "audit", "comparison", "environment", "explain", "grid", "listing", "method_map", "report", "run", "schema", "serve",
    "theorems", "trace",
]  # fmt: skip


def _refuse_hidden_packages() -> None:
    """Refuse to go on where a file or folder of the user has the name of a package of ours: Python would import that."""
    folder = Path(__file__).resolve().parents[1]
    for name in ("model", "figures"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found != folder / name / "__init__.py":
            what = found or next(iter(spec.submodule_search_locations or ()), "nothing") if spec is not None else "nothing"
            message = (
                f"decodesim needs its own package '{name}', but Python finds {what} instead; rename that, work in another folder,"
                " or start Python with -P (PYTHONSAFEPATH=1), which does not look into the working folder"
            )
            if sys.argv[:1] == ["-m"]:  # python -m sim
                print(f"error: {message}", file=sys.stderr)
                raise SystemExit(2)
            raise ImportError(message)


_refuse_hidden_packages()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sim' has no attribute {name!r}; it has {', '.join(__all__)}")
    return importlib.import_module(_MODULES[name])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def run(
    scenario: str | Path | Mapping[str, Any] | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    views: Sequence[str] | None = None,
    replications: int | None = None,
    seed: int | None = None,
    methods: Sequence[str] = (),
    out: str | Path | None = None,
    jobs: int | str = 1,
    scheduler: str | None = None,
    resume: bool = False,
    yes: bool = False,
) -> polars.DataFrame:
    """Run a scenario and return its results table: one row per grid point and view (columns: `sim.views.metrics`).

    Parameters
    ----------
    scenario
        A path, the name of a bundled scenario, a mapping with the scenario's tables, or None for the default.
    set, sweep
        Values by dotted path (`set`), and lists of values by dotted path (`sweep`): `{"method.candidates": [1, 3, 5]}`.
    views, replications, seed
        Override the keys of [scenario].
    methods
        Dotted paths of modules outside the project that the scenario may name as methods. They are imported, so their code runs.
    out, jobs, scheduler, resume, yes
        As in the command `sim run`: output directory, number of worker processes or `dask`, address of a dask scheduler (which
        replaces `jobs`), resume an interrupted run, accept a very large grid. Without `out` no files are kept. A script that runs
        with `jobs="dask"` must do so under `if __name__ == "__main__":`, because its worker processes import it.

    Warns
    -----
    UserWarning
        If views that must agree differ, which is a bug in the program (`sim.views.agreement`); the command exits with code 1.

    Raises
    ------
    model.base.checks.ParameterError
        If the scenario is invalid; nothing has been run or written.
    """
    import tempfile

    from model.methods.registry import allow_modules
    from sim.runs import sweep as sweeps
    from sim.serving import served_files

    processes = None if scheduler is not None and jobs == 1 else jobs
    if served_files.holds_load(scenario):
        return _serve_scenario(scenario, set or {}, sweep or {}, replications, seed, out, processes, scheduler, resume=resume)
    overrides: dict[str, Any] = {"set": set or {}, "sweep": sweep or {}, "views": views, "replications": replications, "seed": seed}
    with allow_modules(methods):
        if out is not None:
            from sim.runs import run_report as reports

            report = sweeps.run(scenario, out=out, jobs=processes, scheduler=scheduler, resume=resume, yes=yes, **overrides)
            reports.summarise(report, report.frame(reports.MOST_LISTED), [])
            _warn_of(report.disagreements)
            return report.frame()
        with tempfile.TemporaryDirectory() as folder:
            report = sweeps.run(scenario, out=f"{folder}/run", jobs=processes, scheduler=scheduler, yes=yes, **overrides)
            _warn_of(report.disagreements)
            return report.frame()


def _serve_scenario(
    scenario: Any, set: Mapping[str, Any], sweep: Mapping[str, Any], replications: int | None, seed: int | None,
    out: str | Path | None, jobs: int | str | None, scheduler: str | None, *, resume: bool,
) -> polars.DataFrame:  # fmt: skip
    """`run` of a scenario with [load]: a row for each load and policy."""
    import tempfile

    from sim.serving import load_scenario, serving_run

    tables = load_scenario.resolve(scenario, set=[*set.items()], sweep=[*sweep.items()], replications=replications, seed=seed)
    if out is not None:
        return serving_run.run(tables, out=out, jobs=jobs, scheduler=scheduler, resume=resume).table
    with tempfile.TemporaryDirectory() as folder:
        return serving_run.run(tables, out=f"{folder}/run", jobs=jobs, scheduler=scheduler).table


def serve(**inputs: Any) -> Study:
    """Simulate a server under load, with policies of draft length side by side: the command `sim serve`.

    The parameters are those of a scenario with [load] (`sim.serving.load_scenario`), without their sections: `model`, `gpu`,
    `engine_law`, `draft`, `acceptance`, `rate`, `concurrency`, `trace`, `policies`, `max_num_seqs`, `replications` and so on. The
    result prints as text; it has `verdict`, `points`, `schedule`, `lines(engine)` and `document()`.

    >>> found = serve(engine_law="sglang-qwen3-235b-a22b", concurrency=[1, 64], policies=["off", "static:3"], replications=0)
    >>> [found.best(load).policy for load in found.loads]
    ['static:3', 'static:3']

    Raises
    ------
    model.base.checks.ParameterError
        If an input is missing or impossible.
    """
    from sim.serving import load_scenario, study

    return study.serve(load_scenario.inputs_of(load_scenario.sectioned(inputs)))


def explain(log: str | Path | Sequence[str | Path] = (), **inputs: Any) -> Explanation:
    """Explain a measured speed-up over plain decoding, term by term, and why it differs from a claim: the command `sim explain`.

    The parameters are those of `sim.advice.explained_speedup.explain`. The result prints as text; it has `verdict`, `advice`,
    `table`, `shares_table`, `figure()` and `document()`.

    >>> found = explain(
    ...     plain_tpot="8ms", tpot="6.2ms", mean_acceptance_length=2.4, draft_length=3, batch=8, model="llama-3.1-8b", gpu="h100"
    ... )
    >>> round(found.terms.measured.steps, 2), found.terms.largest.name  # a step takes as long as 1.86 plain steps
    (1.86, 'draft')

    Raises
    ------
    model.base.checks.ParameterError
        If an input is missing or impossible, with the option that gives it.
    """
    from sim.advice import explained_speedup

    return explained_speedup.explain(log, **inputs)


def report(
    source: str | Path, out: str | Path | None = None, *, format: str | None = None, methods: Sequence[str] = ()
) -> ReportDocument:
    """Return the report of a run, a comparison or another command's JSON document; with `out`, also write it, as `sim report` does.

    Parameters
    ----------
    source
        Directory of a finished run or of `sim compare --figures`, or a JSON document with a key `kind`.
    out, format
        File of the page, and its format: `html` or `md`, by default that of the file's ending.
    methods
        Dotted paths of modules with methods that the run used. They are imported, so their code runs.

    Raises
    ------
    model.base.checks.ParameterError
        If there is nothing to report on, or the run is unfinished or of another version.
    """
    from model.methods.registry import allow_modules
    from sim.commands import sim_report

    with allow_modules(methods):
        found = sim_report.document(source)
        if out is not None or format is not None:
            path, kind = sim_report.target(None if out is None else Path(out), format)
            sim_report.write(found, path, kind)
        return found


def advise(**said: Any) -> Advice:
    """Advise whether drafting pays on a model, device and engine, with which draft length and up to which load.

    The result prints as `sim advise` does; it has `verdict` (a sentence), `table` (a polars table), `figure()`, `document()` (JSON)
    and `settings(engine)`.

    Parameters
    ----------
    **said
        Keywords of `sim.advice.situation.Inputs`: model, gpu, tensor_parallel, gpus, draft, engine, engine_law, log (paths),
        acceptance (a number, a pair for an uncertain one, a list of cases, or text such as "0.6..0.7"), acceptance_by_position,
        match_rate (a number, a pair, or text), rank_rates (rows of rates by rank, one for each depth), rank_drafts,
        block_acceptance, batch, draft_length, context, slo_tpot_ms, lossy, dtype, weights, kernels, seed.

    Raises
    ------
    model.base.checks.ParameterError
        If something is wrong, or missing and has no default: acceptance above all.

    >>> advice = advise(engine_law="vllm-llama-3.1-8b-eagle3-h100", batch=[1], draft_length=[1, 2, 3])
    >>> advice.verdict.startswith("K = 3 is fastest at 1 running sequence:")
    True
    """
    from sim.advice import advice

    return advice.advise(_inputs(said))


def method_map(contexts: Sequence[int] | None = None, **said: Any) -> MethodMap:
    """Compare all methods at each number of running sequences (`batch`) and each of these contexts, as `sim advise --map` does.

    The result prints as the command does; it has `verdict`, `table` (a polars table), `cells` and `document()` (JSON).

    Parameters
    ----------
    contexts
        Cached positions of a sequence; default: 1024, 8192 and 65536, as far as the model was trained.
    **said
        Keywords of `advise` but context, rate and slo_tpot_ms.

    Raises
    ------
    model.base.checks.ParameterError
        If something is wrong, or missing and has no default.

    >>> found = method_map([1024], model="llama-3.1-8b", gpu="h100", draft="eagle3", rank_rates=[[0.6, 0.2]], batch=[1, 128])
    >>> [cell.fastest.label for cell in found.cells]
    ['trees', 'speculative']
    """
    from sim.maps import method_map as maps

    return maps.method_map(_inputs(said), None if contexts is None else tuple(contexts))


def _inputs(said: dict[str, Any]) -> Inputs:
    """Inputs of advice, from keywords."""
    from dataclasses import fields

    from model.base import checks
    from sim.advice.situation import Inputs

    names = [field.name for field in fields(Inputs)]
    for name in said:
        if name not in names:
            raise checks.unknown("keyword", name, names)
    for name in ("log", "batch", "draft_length", "acceptance_by_position", "rank_rates", "block_acceptance"):
        value = said.get(name)
        if value is not None and not isinstance(value, tuple):
            said[name] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return Inputs(**said)


def audit(claims: str | Path | Sequence[Mapping[str, Any]] | None = None, *, methods: Sequence[str] = ()) -> polars.DataFrame:
    """Check claims of speed-ups against what is possible; one row per claim (columns: `model.audit.verdicts.ClaimVerdict`).

    Parameters
    ----------
    claims
        Path of a CSV file with a header, or mappings with the names of its columns (`model.audit.claims.COLUMNS`); None for the
        bundled claims of papers. Unknown values are left out.
    methods
        Dotted paths of modules outside the project that claims may name as methods. They are imported, so their code runs.

    Raises
    ------
    model.base.checks.ParameterError
        If a field is invalid; the message names file, row and column.

    >>> table = audit([{"method": "speculative", "acceptance_rate": 0.55, "draft_length": 7, "speedup": 2.56}])
    >>> table["verdict"].item(), round(table["needed_acceptance"].item(), 3)
    ('impossible', 0.618)
    """
    from model.audit.claims import EXAMPLES
    from model.methods.registry import allow_modules
    from sim.commands import audit_command

    with allow_modules(methods):
        if claims is None or isinstance(claims, str | Path):
            return audit_command.frame(audit_command.of_file(Path(EXAMPLES if claims is None else claims)))
        return audit_command.frame(audit_command.of_rows(claims))


def _warn_of(disagreements: list[dict[str, Any]]) -> None:
    """Warn about disagreements, for which the command exits with code 1; the table is returned all the same."""
    if disagreements:
        import warnings

        from sim.views import agreement

        more = f"; and {len(disagreements) - 1} more" if len(disagreements) > 1 else ""
        message = f"views disagree, which is a bug in the program: {agreement.describe(disagreements[0])}{more}"
        warnings.warn(message, stacklevel=3)
