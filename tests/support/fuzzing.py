"""Mutations of valid files, and the requirements for every command on any of them: an end, exit code 0 or 2, one line of error."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from model.base.checks import ParameterError

SECONDS = 60.0
"""Limit of processor time per example [s]; a valid file takes a few seconds at most."""
MEMORY = 3 * 2**30
"""Limit of the growth of the process's memory per example [bytes]."""
fuzz_settings = settings(max_examples=500, deadline=None, suppress_health_check=[*HealthCheck])

READERS = {
    "public_acceptance_logs._rows": "public_logs_of_rounds", "align_draft.saved_sequences": "sequences_of_an_interrupted_alignment",
    "architectures._from_file": "architectures",
    "claims.read_claims": "claims_of_speedups",
    "cells._read": "cells_of_engines", "engine_command._read": "cells_of_engines", "step_law._loaded": "step_laws",
    "bundled_profiles.origins": "lists_of_sources", "comparison_report.page_with_section": "pages", "corpus._read": "training_text",
    "load_scenario.load": "scenarios_of_servers", "served_files.holds_load": "scenarios_of_servers",
    "served_files.text_of": "scenarios_of_servers", "load_scenario.named_files": "scenarios_of_servers",
    "serving_run._prepare": "served_runs_that_were_broken_off", "serving_run._read": "served_runs_that_were_broken_off",
    "traces._lines": "traces_of_requests", "traces._json_rows": "traces_of_requests", "served_loads.read_run": "requests_of_runs",
    "acceptance_record.load": "acceptance_records", "engine_log._read": "engine_logs",
    "situation._is_record": "logs_for_advice", "devices._of_file": "devices", "engine_run.read": "runs_of_engines",
    "figures.of_served_run": "results_of_servers",
    "figures._stored": "results", "timing_grid.read": "raw_rows", "head_files.about": "heads", "head_files.tensors": "heads",
    "decoded_rounds.record_of": "logs_of_decisions",
    "llmservingsim._facts": "tables_of_other_projects", "outcome_files.text_of": "recorded_outcomes",
    "json_and_parquet.load": "measured_runs",
    "prompts._of_file": "prompts", "output_quality._kept": "work_that_was_broken_off", "validation_page._after_claims": "pages",
    "validation_page.stale": "pages", "validation_page.stale_sections": "pages",
    "run_plan.read": "plans", "measure_runs._read": "work_that_was_broken_off", "measured_runs.load": "logs_of_decisions",
    "scenario_file._digest": "recorded_outcomes", "scenario_file.load": "scenarios", "sim_app.compare": "pages",
    "model_directory._header": "models",
    "model_directory.sha256_of": "models", "model_directory.load": "models", "model_directory.table": "models",
    "subject.of_run": "what_a_run_says_of_itself", "drawn_points.grid_shape": "what_a_run_says_of_itself",
    "sweep._prepare": "what_a_run_says_of_itself", "imported_tables.read": "tables_of_other_projects",
    "imported_tables.source": "tables_of_other_projects", "training._restore": "trainings_that_were_broken_off",
    "shape_configs.read": "configurations",
    "run_document.finished_run": "results", "run_document._metadata": "what_a_run_says_of_itself",
    "run_document._stored_list": "what_a_run_says_of_itself", "sim_report._listed": "what_a_run_says_of_itself",
    "sim_report.document": "documents_of_commands", "embedded_svg.load": "drawn_figures",
}  # fmt: skip
"""Functions that read files from other sources, with the test that corrupts such files."""
TRUSTED_READERS = {
    # tables written by the same run
    "atomic_files._digest", "sweep.table", "sweep._describe", "shard_merge._write_table", "shard_merge.__init__", "sweep._run",
    "shard_merge.scanned",
    # files just written, for their checksum
    "profile_from_timings.profile_of", "transfers._written", "json_and_parquet.save", "measured_runs.save",
    # not files of the user
    "engine_priors._read", "law_tables._sources", "law_tables.table",
    "published._read", "scenario_file.text_of", "corpus.standard_library", "machine._last_cache", "machine._processor",
    "atomic_files.locked",  # a directory
    "environment._program",  # the program itself
    "environment._version",  # installed libraries
}  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**5, 10**9, 2**63, 10**400, -0.5, 0.5, 1e-320, 1e-200, 1e12, 1e300, "", "x", "nan", "inf",
    "\x00", "ä" * 300, [], {}, [None], [[]], [1, "x"], {"kind": "iid"}, {"x": {"x": {}}}, [0.5] * 50,
)  # fmt: skip
"""Values that may replace an expected value."""


def run_command(app: Any, *arguments: str | Path, failing: bool = False) -> int:
    """Run a command, check the requirements, and return its exit code; with `failing`, exit code 1 is allowed (failed points)."""
    start, memory = time.process_time(), _resident_memory()
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if not isinstance(done.exception, SystemExit | None):
        raise AssertionError(f"{arguments} ended by {done.exception!r}") from done.exception
    assert done.exit_code in ((0, 1, 2) if failing else (0, 2)), (done.exit_code, done.output)
    assert "views disagree" not in done.output
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) <= 1 if done.exit_code == 1 else len(errors) == (done.exit_code == 2), done.stderr
    assert all(line.startswith("error: ") and len(line) < 4000 for line in errors), errors
    assert time.process_time() - start < SECONDS
    assert _resident_memory() - memory < MEMORY
    return done.exit_code


def call_reader(function: Any, *arguments: Any) -> None:
    """Check the requirements for a reading function: it returns, or raises a ParameterError of one line."""
    start, memory = time.process_time(), _resident_memory()
    message = ""
    try:
        function(*arguments)
    except ParameterError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1, message
    assert time.process_time() - start < SECONDS
    assert _resident_memory() - memory < MEMORY


def _resident_memory() -> int:
    """Resident memory of this process [bytes]."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Create a new folder for each example."""
    with tempfile.TemporaryDirectory() as created:
        yield Path(created)


# --- Mutations ---


@st.composite
def bytes_of(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw bytes that are flipped, cut, dropped, repeated or inserted."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not found:
            break
        at = draw(st.integers(0, len(found) - 1))
        size = draw(st.integers(1, 64))
        kind = draw(st.sampled_from(("flip", "cut", "drop", "twice", "put")))
        if kind == "flip":
            found[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del found[at:]
        elif kind == "drop":
            del found[at : at + size]
        elif kind == "twice":
            found[at:at] = found[at : at + size]
        else:
            found[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(found)


@st.composite
def json_of(draw: st.DrawFn, document: Any) -> Any:
    """Draw a document with keys dropped, inserted or renamed, and values of other types and sizes."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        positions = _positions(found)
        if not positions:
            return _value(draw)
        holder, key = draw(st.sampled_from(positions))
        kind = draw(st.sampled_from(("set", "set", "drop", "scale", "put")))
        if kind == "drop":
            del holder[key]
        elif kind == "put" and isinstance(holder, dict):
            holder[draw(st.sampled_from(("x", "kind", "rows", f"{key}_")))] = _value(draw)
        elif kind == "scale" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            with contextlib.suppress(OverflowError):  # for integers beyond the range of floats
                holder[key] *= draw(st.sampled_from((-1, 0, 2, 1000, 1e-3, 10**9)))
        else:
            holder[key] = _value(draw)
    return found


def _value(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(VALUES)))  # it may be mutated again


def _positions(found: Any, most: int = 400) -> list[tuple[Any, Any]]:
    """Positions of the values in a document; only the first few of long lists."""
    positions: list[tuple[Any, Any]] = []
    level = [found]
    while level and len(positions) < most:
        inner = []
        for holder in level:
            keys = list(holder) if isinstance(holder, dict) else list(range(min(len(holder), 6)))
            positions += [(holder, key) for key in keys]
            inner += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
        level = inner
    return positions


def to_json(document: Any) -> str:
    """Write as JSON, including nan and inf."""
    return json.dumps(document)


@st.composite
def lines_of(draw: st.DrawFn, text: str, mark: str = "=") -> str:
    """Draw settings or cells with lines dropped, repeated or exchanged, and values of other types and sizes."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        if not lines:
            break
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("set", "set", "set", "drop", "twice", "swap", "name")))
        if kind == "drop":
            del lines[at]
        elif kind == "twice":
            lines.insert(at, lines[at])
        elif kind == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif mark in lines[at]:
            parts = lines[at].split(mark)
            at_part = draw(st.integers(0, len(parts) - 1)) if mark == "," else kind != "name"
            parts[int(at_part)] = draw(st.sampled_from(_WORDS if mark == "=" else _CELLS))
            lines[at] = mark.join(parts)
    return "\n".join(lines) + "\n"


_WORDS = (
    '""', '"x"', '"no.such.module"', "true", "[]", "{}", "[[]]", "0", "-1", "1", "2", "0.5", "1e-320", "1e300", "nan", "inf",
    "10000", "1" + "0" * 30, "[0.5, 0.5]", '["x"]', "{ from = 0, to = 1, count = 3 }", '{ kind = "iid" }', '"' + "x" * 300 + '"',
    "1979-05-27", '"../x"', '"a/b.json"', "[[1, 1e-200], [4, 1.1]]", "5e-324", "'''x\n'''", "=",
)  # fmt: skip
_CELLS = ("", "x", "nan", "inf", "-1", "0", "0.5", "1e-320", "1e12", "1e300", "9" * 400, '"', "true", " ", "\x00", "1;2", "ä" * 300)


@st.composite
def rows_of(draw: st.DrawFn, lines: list[str]) -> bytes:
    """Draw lines of JSON with one mutated, dropped, repeated or cut; or with mutated bytes."""
    found, at = list(lines), draw(st.integers(0, min(len(lines), 8) - 1))
    kind = draw(st.sampled_from(("said", "said", "said", "drop", "twice", "cut", "bytes", "none")))
    if kind == "bytes":
        return draw(bytes_of("\n".join(found).encode()))
    if kind == "said":
        found[at] = to_json(draw(json_of(json.loads(found[at]))))
    elif kind == "drop":
        del found[at]
    elif kind == "twice":
        found.insert(at, found[at])
    elif kind == "cut":
        found = [*found[:at], found[at][: draw(st.integers(0, len(found[at])))]]
    else:
        found = []
    return "\n".join(found).encode()


@st.composite
def tensors_of(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a safetensors file with a mutated header, or with mutated bytes, mostly of the header."""
    size = int.from_bytes(content[:8], "little")
    document, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    kind = draw(st.sampled_from(("header", "header", "inner", "bytes", "end")))
    if kind == "bytes":
        return draw(bytes_of(content[: 8 + size])) + data
    if kind == "end":
        return content[: 8 + size] + draw(bytes_of(data))
    about = document.get("__metadata__", {})
    inner = [name for name, text in about.items() if text.startswith(("{", "["))]
    if kind == "inner" and inner:
        name = draw(st.sampled_from(inner))
        document["__metadata__"] = about | {name: to_json(draw(json_of(json.loads(about[name]))))}
    else:
        document = draw(json_of(document))
    header = to_json(document).encode()
    return len(header).to_bytes(8, "little") + header + data


@st.composite
def table_of(draw: st.DrawFn, table: pl.DataFrame) -> pl.DataFrame:
    """Draw a table with columns dropped, renamed or of other types, rows dropped or repeated, and cells of other values."""
    for _ in range(draw(st.integers(1, 2))):
        if not table.width:
            break
        name = draw(st.sampled_from(table.columns))
        kind = draw(st.sampled_from(("drop", "name", "type", "null", "cell", "cell", "cell", "rows", "none", "twice", "more")))
        if kind == "drop":
            table = table.drop(name)
        elif kind == "name":
            table = table.rename({name: f"{name}_"})
        elif kind == "type":
            as_other = draw(st.sampled_from((pl.String, pl.Float32, pl.Int8, pl.UInt64, pl.Boolean, pl.Date, pl.Binary, pl.Null)))
            table = table.with_columns(_cast(table[name], as_other))
        elif kind == "null":
            table = table.with_columns(pl.lit(None).cast(table[name].dtype).alias(name))
        elif kind == "rows":
            table = table.head(draw(st.integers(0, 3)))
        elif kind == "none":
            table = table.clear()
        elif kind == "twice":
            table = pl.concat([table, table])
        elif kind == "more":
            table = table.with_columns(pl.lit(draw(st.sampled_from(("x", 1, -1.5)))).alias("more"))
        elif table.height:
            table = table.with_columns(_with_cell(draw, table[name]))
    return table


def _cast(column: pl.Series, to: Any) -> pl.Series:
    try:
        return column.cast(to, strict=False)
    except pl.exceptions.PolarsError:
        return pl.Series(column.name, [None] * column.len(), dtype=to)


def _with_cell(draw: st.DrawFn, column: pl.Series) -> pl.Series:
    row = draw(st.integers(0, min(column.len(), 50) - 1))
    known = (None, 0, -1, 1, 10**9, 2**62, 0.5, math.nan, math.inf, 1e300, 1e-320, "x", "", [], [1], [None], True)
    value = draw(st.sampled_from(known))
    values = column.to_list()
    values[row] = value
    try:
        return pl.Series(column.name, values, dtype=column.dtype, strict=False)
    except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError):
        return column


def write_mutated_pair(data: st.DataObject, files: dict[str, bytes], name: str, table: pl.DataFrame, here: Path) -> None:
    """Write all files, with the pair NAME.json and NAME.parquet mutated; checksums match unless bytes were mutated."""
    for other, content in files.items():
        (here / other).write_bytes(content)
    document = json.loads(files[f"{name}.json"])
    kind = data.draw(st.sampled_from(("said", "said", "table", "table", "bytes of the table", "bytes")))
    content = files[f"{name}.parquet"]
    if kind == "said":
        document = data.draw(json_of(document))
    elif kind == "table":
        frame = data.draw(table_of(table))
        frame.write_parquet(here / "made")
        content = (here / "made").read_bytes()
        document["rows"] = frame.height
    elif kind == "bytes of the table":
        content = data.draw(bytes_of(content))
    if isinstance(document, dict) and kind != "bytes":
        document["sha256"] = hashlib.sha256(content).hexdigest()
    text = data.draw(bytes_of(files[f"{name}.json"])) if kind == "bytes" else to_json(document).encode()
    (here / f"{name}.json").write_bytes(text)
    (here / f"{name}.parquet").write_bytes(content)
