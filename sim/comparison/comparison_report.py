"""Report of `sim compare`: errors by method next to the noise, the worst runs, and the parts of the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from model.base import bounded_files, strict_json, whole_files
from model.base.checks import ParameterError
from model.logs import prediction_error
from model.logs.measured_runs import ROLES
from model.logs.prediction_error import PARTS

if TYPE_CHECKING:
    import polars as pl

WORST = 5
NOTE_ON_ERRORS = (
    "bias: median error with its sign; noise: median deviation of a repeat from the median repeat; bound of median: the larger of"
    f" {prediction_error.BAND:.0%} and {prediction_error.NOISES:g} times the noise; within bounds: the median is at most its bound,"
    " and the 90th percentile at most twice that bound"
)
NOTE_ON_PARTS = (
    f"{', '.join(ROLES)}: passes of that model; reads: heads, and reading their outputs; transfers: starting and adopting"
    " processes; waiting: for other processes; rest: all else"
)
NOTE_ON_LAW = "passes predicted by a step law include heads, reads and the rest; those over the prompt are extrapolated"
NOTE_ON_SLOWDOWN = "mutual slowdown: part of the predicted total, lost because processes on one machine slow each other"


def show(table: pl.DataFrame, about: dict[str, Any], console: Console) -> None:
    """Print the comparison of one file of runs."""
    where = f"{setup_of(about)}, {about['date']}"
    by = f"by step law {about['step_law']['name']}" if "step_law" in about else "from profiles"
    console.print(f"Predicted {by}, against measured wall times from the first generated token to the last: {where}", markup=False)
    for note in _of_law(about):
        console.print(note, markup=False)
    for line in warnings(table, about):
        console.print(f"warning: {line}", style="yellow", markup=False)
    console.print(_methods(table))
    console.print(NOTE_ON_ERRORS)
    console.print(_worst(table))
    console.print(_parts(table))
    law, slower = "step_law" in about, any(table["contention_s"])
    console.print("; ".join([NOTE_ON_PARTS, *([NOTE_ON_LAW] if law else []), *([NOTE_ON_SLOWDOWN] if slower else [])]))
    pairs, right = prediction_error.ranking(table)
    if pairs:
        share = f"{right} of {pairs} pairs of settings ({right / pairs:.1%})"
        console.print(f"ranking: {share} that differ by more than twice the noise are ranked correctly")


def warnings(table: pl.DataFrame, about: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the measurements, on times of another machine or model, and on parts of passes without a time."""
    yield from sorted({*table["warnings"]} - {""})
    yield from (f"on every row: {mismatch}" for mismatch in sorted({*table["mismatch"]} - {""}))
    yield from _lacking(table, about)


def remarks(table: pl.DataFrame, about: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the source of the predicted times, and on columns of the tables."""
    yield from _of_law(about)
    law, slower = "step_law" in about, any(table["contention_s"])
    yield from (NOTE_ON_PARTS, *([NOTE_ON_LAW] if law else []), *([NOTE_ON_SLOWDOWN] if slower else []))


def setup_of(about: Mapping[str, Any]) -> str:
    """Machine, dtype, mode and GPUs of the runs; eager mode and processes on CPU cores are not mentioned."""
    mode, gpus = about.get("mode", "eager"), [each for each in about.get("devices", ()) if each != "cpu"]
    more = [*([] if mode == "eager" else [mode]), *([f"processes on {' '.join(gpus)}"] if gpus else [])]
    return ", ".join([about["machine"].get("name", about["device"]), about["dtype"], *more])


def _of_law(about: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on the step law that predicted these runs, runs that it cannot price, and its extrapolations; none for profiles."""
    if "step_law" in about:
        yield f"times: {about['step_law']['provenance']}"
        yield from (f"note: {note}" for note in about["step_law"]["notes"])


def _lacking(table: pl.DataFrame, about: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on parts that are not measured, with the methods concerned."""
    what = "not in the step law" if "step_law" in about else "not measured in the profile"
    for lacking in dict.fromkeys(table["missing"]):
        if lacking:
            methods = ", ".join(dict.fromkeys(table.filter(table["missing"] == lacking)["method"]))
            yield f"{what}, assumed 0: {lacking} ({methods})"


def _methods(table: pl.DataFrame) -> Table:
    columns = ("method", "settings", "runs", "median", "90th percentile", "worst", "bias", "noise")
    found = _table("Errors by method (|predicted / measured - 1|)", *columns, "bound of median", "within bounds")
    for row in prediction_error.by_method(table):
        found.add_row(
            row["method"], str(row["settings"]), str(row["runs"]), *[_percent(row[name]) for name in _ERRORS],
            _percent(row["bound"]), "yes" if row["held"] else "NO",
        )  # fmt: skip
    return found


_ERRORS = ("median_error", "p90_error", "worst_error", "bias", "noise")


def _worst(table: pl.DataFrame) -> Table:
    found = _table("Largest errors", "method", "settings", "prompt", "predicted", "measured", "error", "noise")
    for row in table.sort(table["error"].abs(), descending=True).head(WORST).iter_rows(named=True):
        found.add_row(
            row["method"], row["settings"] or "-", str(row["prompt"])[:24], _ms(row["predicted_s"]), _ms(row["measured_s"]),
            _percent(row["error"]), _percent(row["noise"]),
        )  # fmt: skip
    return found


def _parts(table: pl.DataFrame) -> Table:
    found = _table("Parts of the time in ms per run (mean), predicted / measured", "method", *PARTS, "total", "mutual slowdown")
    for method in dict.fromkeys(table["method"]):
        own = table.filter(table["method"] == method)
        cells = []
        for name in (*PARTS, "total"):
            pair = [_mean(own, f"{whose}_{name}_s") * 1e3 for whose in ("predicted", "measured")]
            cells.append("-" if max(map(abs, pair)) < 1e-6 else f"{pair[0]:.1f} / {pair[1]:.1f}")
        slower = _mean(own, "contention_s") * 1e3
        found.add_row(method, *cells, f"{slower:.1f}" if slower else "-")
    return found


def _mean(table: pl.DataFrame, name: str) -> float:
    return float(table[name].to_numpy().mean())


def _table(title: str, *columns: str) -> Table:
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(columns):
        found.add_column(name, justify="left" if number < 1 or name in ("settings", "prompt") else "right")
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def document(named: Sequence[tuple[str, pl.DataFrame, dict[str, Any]]]) -> str:
    """Return the report as JSON."""
    files = []
    for name, table, about in named:
        pairs, right = prediction_error.ranking(table)
        files.append({
            "name": name, "about": about, "methods": prediction_error.by_method(table), "ranking": {"pairs": pairs, "right": right},
            "runs": table.to_dicts(),
        })  # fmt: skip
    return strict_json.dumps({"kind": "comparison", "files": files}, indent=2)


DOCUMENT = "comparison.json"


def write_document(named: Sequence[tuple[str, pl.DataFrame, dict[str, Any]]], folder: Path) -> Path:
    """Write the report as JSON into the folder of its figures, for `sim report`."""
    return whole_files.write_text(folder / DOCUMENT, document(named) + "\n")


def markdown(named: Sequence[tuple[str, pl.DataFrame, dict[str, Any]]]) -> Iterator[str]:
    """Lines of a section of the page of errors, the worst method first."""
    for name, table, about in named:
        pairs, right = prediction_error.ranking(table)
        yield f"### {name}: {setup_of(about)}"
        yield ""
        fewest = min(table["repeats"])
        yield (
            f"{table.height} decodings of {prediction_error.choices(table)} settings, each timed at least {fewest} times;"
            f" prompts: {about['prompts']}. Of {pairs} pairs of settings that differ by more than twice the noise"
            f" {right / max(pairs, 1):.1%} are ranked correctly."
        )
        yield ""
        for line in (*_of_law(about), *_lacking(table, about)):
            yield f"{line[0].upper()}{line[1:]}."
            yield ""
        yield "| method | settings | runs | median | 90th percentile | worst | bias | noise | bound of the median | within bounds |"
        yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
        for row in sorted(prediction_error.by_method(table), key=lambda each: -each["median_error"]):
            errors = " | ".join(_percent(row[each]) for each in _ERRORS)
            held = "yes" if row["held"] else "**no**"
            yield f"| {row['method']} | {row['settings']} | {row['runs']} | {errors} | {_percent(row['bound'])} | {held} |"
        yield ""


MARK = "<!-- predicted against measured: sim compare -->"
"""First line of the section on a page with other content; the section continues to the end of the page."""


def page_with_section(page: Path, named: Sequence[tuple[str, pl.DataFrame, dict[str, Any]]]) -> str:
    """Return the page with its comparison section replaced or added."""
    try:
        before = bounded_files.read_page(page).partition(MARK)[0]
    except OSError as error:
        raise ParameterError(f"{page.name} cannot be read: {error}") from None
    head = [before.rstrip("\n"), ""] if before else []
    by_law = [about for _, _, about in named if "step_law" in about]
    source = "step law that each section names" if by_law else "profile of that machine"
    return "\n".join([*head, MARK, INTRODUCTION.format(source=source), *markdown(named)]).rstrip("\n") + "\n"


INTRODUCTION = """## Predicted against measured

Each decoding was measured on real models, with repeats. The simulator replays the models' recorded answers with times from the
{source} only. Times are from the first generated token to the last, medians of repeats. *Noise*: median deviation of
a repeat from the median repeat. *Bound of the median*: the larger of 5 % and 1.5 times the noise. *Within bounds*: the median error
is at most its bound, and the 90th percentile at most twice that bound.
`sim compare RUNS --page FILE` writes this section.
"""
