"""Run the benchmarks: print a table, or with --json a document."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from statistics import median

import numpy
import simpy
from rich.console import Console
from rich.table import Table

from model.base import checks
from tests.bench import (
    cli,
    events,
    formula,
    grids,
    history,
    lossy,
    ngram,
    paths,
    peers,
    profiles,
    real,
    serving,
    speculative,
    steps,
    trees,
)
from tests.bench.measure import Benchmark, Result, compare

THEMES = (events, steps, paths, formula, grids, speculative, ngram, trees, peers, serving, lossy, profiles, real, cli)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print. A missed target is not an error: on a busy machine it can be noise."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="a benchmark, or the common prefix of several; repeatable")
    parser.add_argument("--repeats", metavar="N", type=int, default=7, help="measurements per benchmark (default: 7)")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=3.0,
        help="time of one benchmark, after which it has 3 repeats only (default: 3)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_argument("--record", action="store_true", help="also write the results into tests/bench/history.csv")
    parser.add_argument("--history", action="store_true", help="measure nothing; print the results of all recorded versions")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check only that everything runs")
    options = parser.parse_args(arguments)
    try:
        checks.whole("repeats", options.repeats, 1)
        checks.number("seconds", options.seconds, 0)
        if options.record and options.tiny:
            raise checks.ParameterError("--record is not used with --tiny, whose sizes are those of no benchmark; leave one out")
        if options.history:
            known = history.read()
            print(history.text(history.selected(known, *options.only) if options.only else known))
            return
        chosen = select([benchmark for theme in THEMES for benchmark in theme.benchmarks(options.tiny)], options.only)
    except checks.ParameterError as error:
        parser.error(str(error))
    results = compare(chosen, options.repeats, options.seconds)
    if options.record:
        history.record(results)
    if options.json:
        print(json.dumps(document(results, options.repeats), indent=2))
    else:
        # A file or a pipe has no width.
        Console(width=None if sys.stdout.isatty() else 150).print(table(results))


def select(benchmarks: Sequence[Benchmark], names: Sequence[str] | None) -> list[Benchmark]:
    """Return the benchmarks with these names or prefixes; all if none is given."""
    if not names:
        return list(benchmarks)
    for name in names:
        if not any(_begins(benchmark.name, name) for benchmark in benchmarks):
            raise checks.unknown("benchmark", name, (benchmark.name for benchmark in benchmarks))
    return [benchmark for benchmark in benchmarks if any(_begins(benchmark.name, name) for name in names)]


def table(results: Sequence[Result]) -> Table:
    """Table with one row per benchmark."""
    out = Table(caption="ratio: ours / limit, median and quartiles over the repeats; lower is better where the target is ≤")
    out.add_column("benchmark", no_wrap=True)
    out.add_column("limit is")
    for heading in ("unit", "ours", "limit", "ratio", "25 %", "75 %", "target", "met"):
        out.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        benchmark, ratios = result.benchmark, result.ratios
        target = "-" if benchmark.target is None else f"{'≤' if benchmark.at_most else '≥'} {benchmark.target:g}"
        met = {True: "yes", False: "[bold]NO", None: "-"}[result.met]
        if ratios:
            figures = [f"{value:,.4g}" for value in (median(result.ours), median(result.limit))]
            figures += [f"{value:.3g}" for value in (median(ratios), *result.quartiles)]
            out.add_row(benchmark.name, benchmark.against, benchmark.unit, *figures, target, met)
        else:
            out.add_row(benchmark.name, benchmark.missing, benchmark.unit, *["-"] * 5, target, "-")
    return out


def document(results: Sequence[Result], repeats: int) -> dict[str, object]:
    """Document with all repeats, and the versions of Python and of the libraries."""
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "simpy": getattr(simpy, "__version__", None),
        "processor": platform.processor() or platform.machine(),
        "repeats": repeats,
        "benchmarks": [
            {
                "name": result.benchmark.name,
                "limit_is": result.benchmark.against,
                "unit": result.benchmark.unit,
                "ours": list(result.ours),
                "limit": list(result.limit),
                "ratio": _spread(result),
                "target": {"at_most" if result.benchmark.at_most else "at_least": result.benchmark.target},
                "met": result.met,
                "missing": result.benchmark.missing or None,
            }
            for result in results
        ],
    }


def _spread(result: Result) -> dict[str, float] | None:
    ratios = result.ratios
    if not ratios:
        return None
    lower, upper = result.quartiles
    return {"median": median(ratios), "lower_quartile": lower, "upper_quartile": upper, "min": min(ratios), "max": max(ratios)}


def _begins(name: str, words: str) -> bool:
    return name == words or name.startswith(f"{words}-")


if __name__ == "__main__":
    main()
