"""Acceptance record of log files and benchmark outputs: which engine and dialect they are of, and their sums."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from model.base import bounded_files, checks, whole_files
from model.base.checks import ParameterError
from model.logs import acceptance_record, served_settings
from model.logs.acceptance_record import MOST_POSITIONS, TIMES, AcceptanceRecord, LogSource, MeasuredCell, ServedSettings
from model.logs.engine_logs import eagle, llama_cpp, lmdeploy, mlx_lm, sglang, tensorrt_llm, vllm
from model.logs.engine_logs.observations import Observation, ObservationSums
from model.logs.engine_logs.output_forms import OutputForm, Reader
from model.methods.speculative import engine_dialects
from model.outcomes.intervals import half_width

ENGINES: Mapping[str, Sequence[OutputForm]] = {
    "vllm": vllm.DIALECTS, "sglang": sglang.DIALECTS, "trtllm": tensorrt_llm.DIALECTS, "llama.cpp": llama_cpp.DIALECTS,
    "lmdeploy": lmdeploy.DIALECTS, "mlx-lm": mlx_lm.DIALECTS, "eagle": eagle.DIALECTS,
}  # fmt: skip
AUTO = "auto"
MOST_JSON = 2**26
"""Maximum size of a JSON document, or of a line of JSON [bytes]."""
_BEGINS_JSON = re.compile(r'\s*(\{\s*("|$|\})|\[\s*($|[\[{"\]]))')
WRAPPED = ("log", "message", "msg")
"""Keys under which collectors of logs keep a line, in JSON lines."""
PINNED = ("synthetic_acceptance_length", "SGLANG_SIMULATE_ACC_LEN", "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS")
"""Settings by which engines accept a given number of tokens instead of those that agree."""


def read(
    files: Sequence[str | Path], engine: str = AUTO, draft_length: int | Sequence[int] | None = None
) -> AcceptanceRecord:
    """Acceptance record of log files and benchmark outputs of one engine, summed over them.

    Parameters
    ----------
    files
        Text logs, JSON documents or JSON lines; plain and speculative runs may be together, as cells of one record.
    engine
        Name of the engine, or `auto`: it is then found by the content.
    draft_length
        Draft length K [tokens] for output that does not say it, 0 if output without drafts is of plain decoding: one number for all
        files that do not say it, or one for each file. Raises `ParameterError` for a file that says another one than is given for
        it, and for one number if all files say another one.
    """
    if engine != AUTO:
        engine = engine_dialects.ALIASES.get(engine, engine)
        checks.one_of("engine", engine, (*ENGINES, AUTO))
    if not files:
        raise ParameterError("files must be at least one log, got none")
    if len({os.path.realpath(file) for file in files}) < len(files):
        raise ParameterError("files must be different, got one twice: its drafts would count twice")
    lengths = _lengths(files, draft_length)
    among = [*ENGINES] if engine == AUTO else [engine]
    separate = isinstance(draft_length, Sequence) or len(files) == 1
    found = [_File(Path(file), among, longest, separate) for file, longest in zip(files, lengths, strict=True)]
    # A length that only the server's settings say is as good as one that is given.
    found = [_File(each.path, among, each.silent_about, separate) if each.silent_about else each for each in found]
    names = {each.engine for each in found}
    if len(names) > 1:
        each_of = ", ".join(f"{each.path.name}: {each.engine}" for each in found)
        raise ParameterError(f"files of one record must be of one engine, got {each_of}; import them separately")
    wrong = [each.contradiction() for each in found]
    for each in wrong if separate or all(wrong) else ():
        if each:
            raise ParameterError(each)
    totals, dialects = ObservationSums(), dict[str, None]()
    for each_file in found:
        totals.merge(each_file.totals)
        dialects |= dict.fromkeys(each_file.dialects)
    record = totals.record(found[0].engine, [*dialects], [LogSource(each.path.name, each.lines) for each in found])
    silent = [each.path.name for each in found if any(cell.draft_length is None for cell in each.totals.cells)]
    if silent:
        how = "it with --draft-length" if len(found) == 1 else "one number for each file in their order, such as --draft-length 0,3"
        note = f"draft_length of cells of {_listed(silent)} is not in the output: give {how}, or fill in the column"
        record = replace(record, notes=(*record.notes, note))
    units = [name for name in TIMES if any(getattr(cell, name) is not None for cell in record.cells)]
    if len(units) > 1:
        note = f"cells have times of several units, {' and '.join(units)}: a law takes one, so import the files of each separately"
        record = replace(record, notes=(*record.notes, note))
    served, differing = served_settings.together(each for every in found for each in every.served)
    if differing:
        note = f"the servers of these logs differ in {', '.join(differing)}, which are not taken from their settings"
        record = replace(record, notes=(*record.notes, note))
    record = replace(record, served=served)
    if not totals.count and len(same := {cell.draft_length for cell in record.cells}) == 1:
        record = replace(record, draft_length=same.pop())
    return record


def _lengths(files: Sequence[str | Path], draft_length: int | Sequence[int] | None) -> list[int | None]:
    """Draft length that is given for each file; None where none is."""
    given: list[int | None] = [*draft_length] if isinstance(draft_length, Sequence) else [draft_length] * len(files)
    for each in given:
        if each is not None:
            checks.whole("draft_length", each, 0, MOST_POSITIONS)
    if len(given) != len(files):
        both = f"or one for each of the {len(files)} files in their order" if len(files) > 1 else "for one file"
        raise ParameterError(f"draft_length must be one number, {both}, got {len(given)}")
    return given


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


MOST_SOUGHT = 300
"""Characters of the list of forms that an error prints."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colour codes of terminals, which some collectors keep in logs."""


class _File:
    """One file: its engine, dialects, sums and number of lines."""

    def __init__(self, path: Path, among: Sequence[str], draft_length: int | None, separate: bool) -> None:
        self.path, self.lines, self.draft_length = path, 0, draft_length
        self.separate = separate
        self.held: dict[tuple[str, str], ObservationSums] = {}
        self.among = among
        self.pinned: dict[str, None] = {}
        self.served: dict[ServedSettings, None] = {}
        self.filled = False
        """True if drafts have the given length because they say none."""
        forms = [(engine, form) for engine in among for form in ENGINES[engine]]
        self.of_lines = [(engine, form, form.lines(draft_length)) for engine, form in forms if form.lines is not None]
        self.of_documents = [
            (engine, form, form.documents(draft_length)) for engine, form in forms if form.documents is not None
        ]
        by_mark: dict[str, list[int]] = {name: [] for name in (*PINNED, *served_settings.MARKS)}
        for index, (_, form, _) in enumerate(self.of_lines):
            for mark in form.marks:
                by_mark.setdefault(mark, []).append(index)
        self.marks = [*by_mark.items()]
        try:
            self._read()
            self.engine, self.dialects, self.totals = self._chosen()
            self.totals.close()
        except OSError as error:
            raise ParameterError(f"file {str(path)!r} cannot be read: {error.strerror or error}") from None
        except ParameterError as error:
            raise ParameterError(f"file {str(path)!r} cannot be read: {error}") from None
        for name in self.pinned:
            self.totals.note(f"{name} is in the output: acceptance was forced to a number, and is of no text")

    def _read(self) -> None:
        lines = self._counted(bounded_files.text_lines(self.path, longest=MOST_JSON))
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise ParameterError("it is empty; name a log or a benchmark's output of an engine")
        if _BEGINS_JSON.match(first):
            self._documents(itertools.chain([first], lines))
        else:
            for line in itertools.chain([first], lines):
                self._line(line)
        for engine, form, reader in (*self.of_lines, *self.of_documents):
            for seen in reader.end():
                self._kept(engine, form, seen)

    def _counted(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            self.lines += 1
            if "\x1b" in line:
                line = _COLOURS.sub("", line)
            yield from line.split("\r") if "\r" in line else (line,)  # bars of progress are written over one another

    def _kept(self, engine: str, form: OutputForm, seen: Observation | ObservationSums) -> None:
        if isinstance(seen, ObservationSums):
            if self.draft_length:
                seen.draft_lengths = {self.draft_length if each is None else each for each in seen.draft_lengths}
            self.held.setdefault((engine, form.name), ObservationSums()).merge(seen)
            return
        if seen.draft_length is None and self.draft_length and seen.speaks():
            seen.draft_length, self.filled = self.draft_length, True
        if self.draft_length:
            seen.cells = [
                replace(cell, draft_length=self.draft_length) if cell.draft_length is None else cell for cell in seen.cells
            ]
        self.held.setdefault((engine, form.name), ObservationSums()).add(seen)

    @property
    def silent_about(self) -> int | None:
        """Draft length of the server's settings, if no draft of the file says its own; else None."""
        asked = {each.draft_length for each in self.served} - {None}
        silent = self.draft_length is None and self.totals.draft_lengths == {None}
        return asked.pop() if silent and len(asked) == 1 else None

    def contradiction(self) -> str:
        """Message about a given draft length that the file contradicts; empty without one."""
        said = {each for each in self.totals.draft_lengths if each is not None}
        said |= {cell.draft_length for cell in self.totals.cells if cell.draft_length is not None}
        asked = {each.draft_length for each in self.served if each.draft_length is not None}
        said = asked if self.filled and asked else said | asked
        drafts = self.totals.count > 0
        if self.draft_length is None or self.draft_length in said or not (said or drafts):
            return ""
        said = said - {0} or said
        known = " and ".join(map(str, sorted(said)))
        of = "plain decoding" if said == {0} else f"drafts of {known} tokens" if said else "drafts, whose length it does not say"
        remedy = f"give {known} for it" if len(said) == 1 else "give their longest" if said else "give their length"
        return f"draft_length {self.draft_length} contradicts file {str(self.path)!r}, which has {of}; {remedy}"

    # --- Lines and documents ---

    def _line(self, text: str) -> None:
        """Give a line of text to the readers that have a mark in it."""
        if len(text) > bounded_files.MOST_LINE:
            bound = f"at most {bounded_files.MOST_LINE:,} characters"
            raise ParameterError(f"line {self.lines} must have {bound}, got {len(text):,}")
        found = [(mark, indices) for mark, indices in self.marks if mark in text]  # faster than a regular expression
        if not found:
            return
        self.pinned |= dict.fromkeys(mark for mark, _ in found if mark in PINNED)
        if any(mark in served_settings.MARKS for mark, _ in found):
            self.served |= dict.fromkeys(filter(None, [served_settings.of_line(text)]))
        for index in sorted({index for _, indices in found for index in indices}):
            self._take(*self.of_lines[index], text, f"line {self.lines}")

    def _document(self, document: Any, where: str) -> None:
        """Give a JSON document to all readers, and the line of text that it wraps, if it is a record of a log collector."""
        if isinstance(document, dict) and document.get("kind") == acceptance_record.KIND:
            raise ParameterError("it is an acceptance record already; name the engine's log or benchmark")
        for each in self.of_documents:
            self._take(*each, document, where)
        if isinstance(document, dict):
            for text in (document[key] for key in WRAPPED if isinstance(document.get(key), str)):
                for line in text.splitlines():
                    self._line(line)

    def _take(self, engine: str, form: OutputForm, reader: Reader, found: Any, where: str) -> None:
        try:
            for seen in reader.take(found):
                self._kept(engine, form, seen)
        except ParameterError as error:
            raise ParameterError(f"{where}: {error}") from None

    def _documents(self, lines: Iterator[str]) -> None:
        """Read one JSON document per line, or one document of many lines."""
        first = next(lines)
        single = _json(first)
        if isinstance(single, dict | list):
            self._document(single, f"line {self.lines}")
            for line in lines:
                if line.strip():
                    document = _json(line)
                    if not isinstance(document, dict | list):
                        raise ParameterError(f"line {self.lines} must be JSON as the first line is, {document}")
                    self._document(document, f"line {self.lines}")
            return
        size, parts = len(first), [first]
        for line in lines:
            size += len(line) + 1
            if size > MOST_JSON:
                raise ParameterError(f"a JSON document must have at most {MOST_JSON:,} characters; give JSON lines")
            parts.append(line)
        document = _json("\n".join(parts))
        if not isinstance(document, dict | list):
            raise ParameterError(f"it begins as JSON, {document}")
        self._document(document, "its JSON")

    # --- Choice ---

    def _chosen(self) -> tuple[str, list[str], ObservationSums]:
        """Engine, names of dialects and sums of this file; raise `ParameterError` if there is none, or more than one engine."""
        speaking = {key: totals for key, totals in self.held.items() if totals.count}
        timed = {key: totals for key, totals in self.held.items() if totals.cells or any(each[0] for each in totals.timed.values())}
        found = speaking or timed
        of_others = not speaking and self.draft_length and not self.separate
        if of_others and any(cell.draft_length for totals in timed.values() for cell in totals.cells):
            remedy = "give one number for each file in their order, such as --draft-length 0,3"
            raise ParameterError(
                f"it has no figures of speculative decoding, so that {self.draft_length} may not be for it; {remedy}"
            )
        engines = [*dict.fromkeys(engine for engine, _ in found)]
        if not engines:
            remarks = [note for totals in self.held.values() for note in totals.notes]
            every = "; ".join(f"{engine}: {', '.join(each.seeks for each in ENGINES[engine])}" for engine in self.among)
            sought = every if len(every) < MOST_SOUGHT else f"output of {', '.join(self.among)}; --engine NAME says what is sought"
            also = f" ({remarks[0]})" if remarks else ""
            raise ParameterError(f"it has no acceptance figures of a known engine{also}; looked for {sought}")
        if len(engines) > 1:
            remedy = f"choose one with --engine, such as --engine {engines[0]}"
            raise ParameterError(f"it has output of more than one engine, {' and '.join(engines)}; {remedy}")
        engine = engines[0]
        names = [dialect.name for dialect in ENGINES[engine] if (engine, dialect.name) in found]
        totals = found[engine, names[0]]
        for name in names[1:]:
            totals.note(f"the file also has output of {name}, which may be of the same drafts and is left out")
        return engine, names[:1], totals


def _json(text: str) -> Any:
    """Value of a JSON text; a sentence on the error if it is not JSON."""
    try:
        return bounded_files.json_of(text)
    except ParameterError as error:
        return f"and cannot be parsed: {error}"
    except ValueError as error:
        return f"and cannot be parsed: {str(error).splitlines()[0]}"


# --- Printed report ---


def report(record: AcceptanceRecord) -> Iterator[str]:
    """Lines of a printed report: counts and length, survival by draft position, cells, identities that fail, notes."""
    engine = f"{record.engine}: {', '.join(record.dialects)}, {len(record.sources)} file{'s' * (len(record.sources) != 1)}"
    yield f"{engine}, {sum(source.lines for source in record.sources):,} lines (measured)"
    if (server := record.served) is not None:
        drafted = None if server.method is None else f"drafts by {server.method}" + (f" of {server.draft}" if server.draft else "")
        yield f"  its settings: {', '.join(filter(None, (server.model, drafted))) or f'draft length {server.draft_length}'}"
    rows = [("draft length", record.draft_length), ("requests", record.requests), ("drafts", record.drafts),
            ("drafted tokens", record.drafted), ("accepted tokens", record.accepted)]  # fmt: skip
    for name, value in rows:
        yield f"  {name:30}{'unknown' if value is None else format(value, ','):>20}"
    if record.mean_acceptance_length is not None:
        interval = length_interval(record)
        between = "" if interval is None else f"   95 %: {interval[0]:.3f} to {interval[1]:.3f}"
        if record.mean_acceptance_length_rounding is not None:
            between = f"   printed, +- {record.mean_acceptance_length_rounding:.2g}"
        yield f"  {'mean acceptance length':30}{record.mean_acceptance_length:20.4f}{between}"
    if record.draft_acceptance_rate is not None:
        yield f"  {'accepted / drafted':30}{record.draft_acceptance_rate:20.2%}"
    if record.draft_ms_per_token is not None:
        yield f"  {'drafting [ms per token]':30}{record.draft_ms_per_token:20.4f}"
    if record.survival is not None:
        yield "\n  draft position   at least this number accepted     95 %            accepted if those before were"
        for index, rate in enumerate(record.survival):
            low, high = record.survival_low, record.survival_high
            between = "" if low is None or high is None else f"{low[index]:.2%} to {high[index]:.2%}"
            chance = None if record.conditional_rates is None else record.conditional_rates[index]
            yield f"  {index + 1:14}{rate:27.2%}   {between:22}{'' if chance is None else format(chance, '.2%'):>12}"
    if record.cells:
        yield "\n  sequences  draft length  acceptance length  time"
        for cell in record.cells:
            name = next(name for name in TIMES if getattr(cell, name) is not None)
            longest, mean = cell.draft_length, cell.mean_acceptance_length
            known = "?" if longest is None else longest, "?" if mean is None else f"{mean:.3f}"
            yield f"  {cell.sequences:9g}  {known[0]:>12}  {known[1]:>17}  {getattr(cell, name):g} {UNITS[name]}"
    else:
        yield "\n  no cells: no time or throughput with the number of sequences that ran at once"
    failed = [each for each in record.identities if not each.holds]
    holds = len(record.identities) - len(failed)
    if record.identities:
        yield f"\n  {holds} of {len(record.identities)} identities hold"
    for each in failed:
        of = f" ({each.note})" if each.note else ""
        yield f"  FAILS: {each.identity}: {each.difference:.4g}, tolerance {each.tolerance:.2g}{of}"
    for note in record.notes:
        yield f"note: {note}"


UNITS = {"tpot_ms": "ms per token", "step_ms": "ms per step", "output_tokens_per_s": "tokens/s of all sequences"}


def length_interval(record: AcceptanceRecord) -> tuple[float, float] | None:
    """95 % interval of the mean acceptance length, from the variance of the histogram; None without one."""
    if record.histogram is None or not record.drafts or record.drafts < 2 or record.mean_acceptance_length is None:
        return None
    counts = np.asarray(record.histogram, dtype=float)
    lengths = np.arange(len(counts)) + 1.0
    total = counts.sum()
    if total < 2:
        return None
    mean = float(counts @ lengths / total)
    deviation = math.sqrt(float(counts @ (lengths - mean) ** 2) / (total - 1))
    half = float(half_width(deviation, total))
    return max(mean - half, 1.0), mean + half


# --- Writing ---

COLUMNS = ("sequences", "draft_length", "mean_acceptance_length")


def cells_csv(cells: Sequence[MeasuredCell]) -> str:
    """CSV text of cells, with the columns that have values."""
    names = [*COLUMNS, *(name for name in (*TIMES, "context", "weight") if any(getattr(cell, name) is not None for cell in cells))]
    rows = [",".join("" if getattr(cell, name) is None else repr(getattr(cell, name)) for name in names) for cell in cells]
    return "\n".join([",".join(names), *rows]) + "\n"


def targets(name: str | Path, sources: Sequence[str | Path] = ()) -> tuple[Path, Path]:
    """Files that `save` writes, which must be neither folders nor the `sources` of the record."""
    base = Path(str(name).removesuffix(".json"))
    if base.name in ("", ".."):
        raise ParameterError(f"out must name a file, got {checks.shown(str(name))}")
    path, table = base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.cells.csv")
    for each in (path, table):
        if each.is_dir():
            raise ParameterError(f"{each.name} is a folder, and must be a file; choose another NAME")
        if os.path.realpath(each) in {os.path.realpath(source) for source in sources}:
            raise ParameterError(f"{each.name} is one of the files to import, and would be replaced; choose another NAME")
    return path, table


def save(record: AcceptanceRecord, name: str | Path) -> list[Path]:
    """Write NAME.json, and NAME.cells.csv if there are cells, both or neither; return their paths."""
    path, table = targets(name)
    bounded_files.check_replaceable(path, acceptance_record.KIND)
    with whole_files.atomic_path(path) as about:
        about.write_text(acceptance_record.dumps(record), encoding="utf-8")
        if not record.cells:
            return [path]
        whole_files.write_text(table, cells_csv(record.cells))
    return [path, table]
