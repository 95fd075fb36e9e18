"""Inputs of an explanation: times, acceptance, step law and claim, from options, records and files, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.architectures import draft_heads
from model.base import checks
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import engine_priors, kernel_times
from model.engines.step_law import StepLaw
from model.hardware import memory_limit
from model.logs.acceptance_record import AcceptanceRecord, MeasuredCell
from model.logs.engine_logs import engine_log
from model.speedups import claim_shares, explanation
from model.speedups.claim_shares import Setting
from model.speedups.explanation import MeasuredSpeedup
from sim.advice import law_agreement, option_values, situation
from sim.advice.situation import Evidence

CLOSE = 0.02
"""Relative difference of acceptance lengths below which rates by position are those of a mean acceptance length."""
SAME_BATCH = 1.1
"""Factor within which the batch of a measured cell counts as the one asked for."""
CLAIM_KEYS = (
    "speedup", "acceptance", "acceptance_length", "draft_length", "model", "gpu", "tensor_parallel", "dtype", "weights",
    "draft", "draft_passes", "draft_context_budget", "engine", "batch", "context",
)  # fmt: skip
NO_ACCEPTANCE = (
    "acceptance is never assumed: give --log (a log, or a record of `calibrate import engine-log`), --mean-acceptance-length or"
    " --acceptance"
)


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number between bounds."""
    checks.number(name, value, low, high)
    return float(value)


def draft_length_of(record: AcceptanceRecord | None, asked: int | None) -> int:
    known = None if record is None else record.draft_length
    if asked is not None:
        checks.whole("draft_length", asked, 1, cell_tables.MOST_DRAFT)
    if known is not None and asked is not None and known != asked:
        raise ParameterError(f"--draft-length must be {known}, that of the log, got {asked}; leave it out, or give that run's log")
    if known == 0:
        raise ParameterError("the log is of plain decoding (draft_length 0); give the log of the run with drafts")
    found = asked if known is None else known
    if found is None:
        raise ParameterError("the draft length is not known: give --draft-length, the drafted tokens per step")
    return found


def acceptance_of(
    record: AcceptanceRecord | None, length: int, mean: float | None, rate: float | None
) -> tuple[float, tuple[float, ...], Evidence]:
    """Acceptance length, conditional rates by draft position, and the input that gives them."""
    given = [value for value in (record, mean, rate) if value is not None]
    if len(given) > 1:
        raise ParameterError(
            "acceptance must be given once: by --log, --mean-acceptance-length or --acceptance; leave others out"
        )
    if rate is not None:
        checks.number("acceptance", rate, 0, 1)
        value = explanation.acceptance_length((rate,), length)
        return value, (rate,), Evidence("acceptance rate", f"{rate:g}", "--acceptance", "measured")
    if mean is not None:
        explanation.check_length(mean, length)
        value = min(float(mean), length + 1.0)
        alpha = explanation.constant_rate(value, length)
        return value, (alpha,), Evidence("acceptance length", f"{value:.4g}", "--mean-acceptance-length", "measured")
    assert record is not None
    if record.mean_acceptance_length is None:
        raise ParameterError("the log has no acceptance length; leave it out and give --mean-acceptance-length instead")
    if record.survival is not None and len(record.survival) > length:
        raise ParameterError(
            f"the log has drafts of up to {len(record.survival)} tokens, got draft_length {length}: leave it out, or give a log of"
            " one draft length"
        )
    explanation.check_length(record.mean_acceptance_length, length)
    value = min(record.mean_acceptance_length, length + 1.0)
    rates = record.known_rates[:length]
    if not rates or abs(explanation.acceptance_length(rates, length) / value - 1) > CLOSE:
        rates = (explanation.constant_rate(value, length),)
    return value, rates, Evidence("acceptance length", f"{value:.4g}", f"{record.engine} log {files_of(record)}", "measured")


def rates_of_length(rates: tuple[float, ...], mean: float, length: int) -> tuple[float, ...]:
    """Rates by position, or the constant rate of exactly this length where they give a little more or less."""
    same = math.isclose(explanation.acceptance_length(rates, length), mean, rel_tol=1e-6)
    return rates if same else (explanation.constant_rate(mean, length),)


def waiting_of(length: int, rates: tuple[float, ...], sequences: float, tokens: int) -> float:
    checks.whole("static_tokens", tokens, 1, checks.MAX_TOKENS)
    if sequences != int(sequences) or sequences < 2:
        raise ParameterError(f"--batch must be a whole number of at least 2 with --static-tokens, got {sequences:g}; set it")
    rate = explanation.constant_rate(explanation.acceptance_length(rates, length), length)
    return explanation.waiting_share(length, rate, int(sequences), tokens)


@dataclass(frozen=True)
class LoggedRuns:
    """Runs of logs: the record of the one with drafts, and the measured cells of all of them."""

    record: AcceptanceRecord | None = None
    cells: tuple[MeasuredCell, ...] = ()

    def seconds(self, length: int) -> list[tuple[float, float]]:
        """Running sequences and seconds per output token of the cells of plain decoding (0), or of a draft length."""
        return [(batch, seconds) for batch, seconds, _ in self._cells_of(length)]

    def acceptance_length(self, length: int, batch: float) -> float | None:
        """Mean acceptance length of the cells of a draft length and batch, whose times are used; None without such cells."""
        found = [accepted for sequences, _, accepted in self._cells_of(length) if _near(sequences, batch)]
        return float(np.median(found)) if found else None

    def _cells_of(self, length: int) -> list[tuple[float, float, float]]:
        """Running sequences, seconds per output token, and acceptance length of cells."""
        found = []
        for cell in self.cells:
            # A cell without a draft length is of plain decoding if it has no acceptance.
            drafts = cell.mean_acceptance_length is not None if cell.draft_length is None else cell.draft_length > 0
            same = cell.draft_length in (None, length) and drafts == (length > 0)
            accepted = cell.mean_acceptance_length if length else 1.0
            if same and accepted is not None and cell.sequences > 0:
                unit = next(name for name in cell_tables.UNITS if getattr(cell, name) is not None)
                seconds = cell_tables.from_unit(unit, getattr(cell, unit), cell.sequences, accepted)
                found.append((cell.sequences, float(seconds) / accepted, accepted))
        return found


def runs_of(log: str | Path | Sequence[str | Path]) -> LoggedRuns:
    """Runs of log files: of one with drafts, and any number without."""
    files = [log] if isinstance(log, str | Path) else [*log]
    records = [_record_of_run(file, several=len(files) > 1) for file in files]
    drafted = [each for each in records if each.mean_acceptance_length is not None]
    if len(drafted) > 1 or (len(records) > 1 and not drafted):
        raise ParameterError(
            f"logs must be of one run with drafts, and of runs without, got {len(drafted)} with acceptance; explain each run alone"
        )
    record = drafted[0] if drafted else records[0] if records else None
    return LoggedRuns(record, tuple(cell for each in records for cell in each.cells))


def _record_of_run(file: str | Path, *, several: bool) -> AcceptanceRecord:
    """Record of one run; among several, a benchmark without acceptance is of plain decoding."""
    try:
        found = situation.record_of((file,))
    except ParameterError:
        if not several:
            raise
        try:
            found = engine_log.read([file], draft_length=0)
        except ParameterError:
            found = None
        if found is None or not found.cells:
            raise
    assert found is not None
    return found


def batch_of(runs: LoggedRuns, asked: float | None, length: int, *, timed: bool = False) -> tuple[float, Evidence]:
    """Running sequences: as given, as in the log if its runs have one number, or 1, assumed.

    `timed`: the time of the run with drafts is the log's, so that several numbers have to be told apart.
    """
    if asked is not None:
        found = number("batch", asked, 1e-3, cell_tables.MOST_SEQUENCES)
        return found, Evidence("batch", f"{found:g}", "--batch", "measured")
    plain, drafted = ([batch for batch, _ in runs.seconds(each)] for each in (0, length))
    common = [batch for batch in drafted if not plain or any(_near(batch, other) for other in plain)]
    if common and all(_near(batch, common[0]) for batch in common):
        return common[0], Evidence("batch", f"{common[0]:g}", "--log", "measured")
    if common and (timed or plain):
        listed = ", ".join(f"{batch:g}" for batch in sorted({*common}))
        both = "both runs" if plain else "its run"
        raise ParameterError(f"the log has {both} at several numbers of running sequences: give --batch, one of {listed}")
    return 1.0, Evidence("batch", "1", "not given", "assumed")


def _near(one: float, other: float) -> bool:
    return SAME_BATCH**-1 <= one / other <= SAME_BATCH


def seconds_of(option: str, value: float | str | None, runs: LoggedRuns, length: int, batch: float) -> float:
    """Seconds per output token: as given, or of the logs' cells of this draft length and batch."""
    if value is not None:
        return milliseconds(option, value) / 1e3
    found = [seconds for sequences, seconds in runs.seconds(length) if _near(sequences, batch)]
    if not found:
        which = "plain decoding" if not length else f"draft length {length}"
        also = f"; the log has no cell of {which} at batch {batch:g}" if runs.cells else ""
        raise ParameterError(f"the time per output token of {which} is not known: give --{option}, such as --{option} 7.5ms{also}")
    return float(np.median(found))


def milliseconds(option: str, value: float | str) -> float:
    """Milliseconds of a number [ms], or of a text with a unit.

    >>> milliseconds("tpot", "7.5ms"), milliseconds("tpot", 7.5)
    (7.5, 7.5)
    """
    if isinstance(value, str):
        found = option_values.milliseconds(f"--{option}", value)
        assert found is not None
        value = found
    checks.number(option, value, 1e-6, 1e9)
    return float(value)


def passes_of(draft: str | None, asked: int | None, length: int, name: str = "draft_passes") -> int | None:
    """Passes of the draft per step; None: one per drafted token. A head that drafts all tokens at once has one."""
    explanation.check_passes(asked, length, name)
    if draft_heads.is_parallel(draft):
        if asked not in (None, 1):
            raise ParameterError(f"{name} must be 1 with {draft}, which drafts all tokens in one pass, got {asked}; leave it out")
        return 1
    return None if asked == length > 1 else asked


def drafting_of(record: AcceptanceRecord | None, length: int, batch: float) -> tuple[float | None, tuple[Evidence, ...]]:
    """Seconds of drafting in a step that the log measured, or None, and the input that gives them.

    Slots draft one after another or together: in either case the time per drafted token, of all slots, times the tokens that all
    of them draft in a step is the step's.
    """
    if record is None or record.draft_ms_per_token is None:
        return None, ()
    tokens = record.drafted / record.drafts if record.drafts and record.drafted else float(length)
    if tokens > length * explanation.TOLERANCE:
        raise ParameterError(
            f"--draft-length must be at least {tokens:.3g}, the mean length of the log's drafts, got {length}; give the longest one"
        )
    seconds = record.draft_ms_per_token / 1e3 * tokens * batch
    each = f"{record.draft_ms_per_token:.4g} ms per drafted token, {tokens:.3g} of them per sequence, batch {batch:g}"
    value = f"{1e3 * seconds:.4g} ms a step: {each}"
    return seconds, (Evidence("time of drafting", value, f"{record.engine} log {files_of(record)}", "measured"),)


def files_of(record: AcceptanceRecord) -> str:
    """Files of a record, the first three of them."""
    return ", ".join(source.file for source in record.sources[:3]) or "record"


def law_of(
    law: StepLaw | None, setting: Setting | None, measured: MeasuredSpeedup, given: Mapping[str, Any], seed: int
) -> tuple[StepLaw, bool, tuple[Evidence, ...]]:
    """Step law, whether it is fitted to the measured runs, and what it does not name.

    It is the law given, or kernels and priors with these runs; a law without cells gives kernels and priors. `given` has the
    options that describe model, GPU and engine, with None for those that were not given.
    """
    if law is None:
        if setting is None:
            missing = " and ".join(f"--{option}" for option in ("model", "gpu") if given[option] is None)
            raise ParameterError(f"what a step takes follows from the model and its GPU: give {missing}, or --engine-law")
        kernel_times.refuse_too_large(setting.kernels)
        return explanation.fitted(measured, setting.kernels, setting.engine, seed), True, ()
    unnamed = law_agreement.check(law, given)
    law = situation.with_budget(law, given["draft_context_budget"])
    if law.cells is None and law.kernels is not None:
        return explanation.fitted(measured, law.kernels, law.engine or engine_priors.ANY, seed), True, ()
    return law, False, unnamed


def claimed(claim: str | Mapping[str, Any], mine: Setting) -> tuple[Setting, float, list[str]]:
    """Setting and speed-up of a claim, and the keys that it does not have."""
    said = _parsed(claim) if isinstance(claim, str) else dict(claim)
    for key in said:
        if key not in CLAIM_KEYS:
            raise ParameterError(f"unknown key {checks.shown(key)} of --claim; {checks.nearest(key, CLAIM_KEYS)}")
    if "speedup" not in said:
        raise ParameterError("--claim must have speedup, such as --claim speedup=4.4,acceptance=0.85,draft_length=7")
    given = [name for name in ("acceptance", "acceptance_length") if name in said]
    if len(given) != 1:
        got = "neither" if not given else "both"
        raise ParameterError(f"--claim must have acceptance (a rate) or acceptance_length, got {got}: acceptance is never assumed")
    speedup, length = said["speedup"], said.get("draft_length", mine.draft_length)
    checks.whole("claim draft_length", length, 1, cell_tables.MOST_DRAFT)
    try:
        explanation.check_speedup(speedup, length, "claim speedup")
    except ParameterError as error:
        known = "draft_length" in said or not isinstance(speedup, int | float) or speedup <= 0
        hint = "" if known else "; the claim has no draft_length, so that of the measured run was taken"
        raise ParameterError(f"{error}{hint}") from None
    if given[0] == "acceptance":
        checks.number("claim acceptance", said["acceptance"], 0, 1)
        rate = float(said["acceptance"])
    else:
        rate = explanation.constant_rate(said["acceptance_length"], length)
    names = {name: said[name] for name in claim_shares.setting_names() if name in said and name != "acceptance"}
    for name in ("model", "gpu", "dtype", "weights", "draft", "engine"):
        if name in names and names[name] is not None and not isinstance(names[name], str):
            raise ParameterError(f"claim {name} must be a name, got {checks.shown(names[name])}")
    if names.get("draft") is not None:
        names["draft"] = memory_limit.of_target(names["draft"], names.get("model", mine.model))
    if "draft" in names or "draft_passes" in names:
        names["draft_passes"] = passes_of(names.get("draft", mine.draft), names.get("draft_passes"), length, "claim draft_passes")
    if "engine" in names:
        names["engine"] = engine_priors.named(names["engine"]) or names["engine"]
    if "draft_context_budget" in names:
        budget, of = names["draft_context_budget"], (names.get("model", mine.model), names.get("draft", mine.draft))
        try:
            situation.check_budget(budget, *of, None)
        except ParameterError as error:
            raise ParameterError(f"claim: {error}") from None
    numbers = {name: float(names[name]) for name in ("batch", "context") if isinstance(names.get(name), int | float)}
    try:
        whole = replace(mine, **{**names, **numbers, "draft_length": length, "acceptance": (rate,)})
        kernel_times.refuse_too_large(whole.kernels)
    except ParameterError as error:
        raise ParameterError(f"claim: {error}") from None
    missing = [name for name in claim_shares.setting_names() if name not in said and name != "acceptance" and _matters(name, mine)]
    return whole, float(speedup), missing


def _matters(name: str, mine: Setting) -> bool:
    usual = "dtype", "weights", "draft_passes", "draft_context_budget", "draft", "tensor_parallel"
    return name not in usual or getattr(mine, name) not in (None, 1)


def _parsed(claim: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in claim.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if not sign or not key or not value or "=" in value:
            raise ParameterError(f"--claim must be KEY=VALUE,KEY=VALUE, got {checks.shown(part)}; keys: {', '.join(CLAIM_KEYS)}")
        if key in found:
            raise ParameterError(f"--claim has {key} twice; give it once")
        found[key] = _value(value)
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
