"""Explanation of a speed-up from a user's inputs: terms, shares of the differences to a claim, a sentence, and what to change.

The Python twin of `sim explain`; the arithmetic is in `model.engines.explanation`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import engine_priors, explanation, step_law
from model.engines.explanation import MeasuredSpeedup, Setting, Share, Term, TermsOfSpeedup
from model.engines.kernel_times import USUAL_CONTEXT
from model.engines.step_law import StepLaw
from model.logs import acceptance_record
from model.logs.acceptance_record import AcceptanceRecord

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
MOST_LENGTH = 8
"""Longest draft whose speed-up is predicted for advice, unless the measured one is longer."""
CLOSE = 0.02
"""Relative difference of speed-ups below which draft lengths count as equally fast."""
SAME_BATCH = 1.1
"""Factor within which the batch of a measured cell counts as the one asked for."""
CLAIM_KEYS = (
    "speedup", "acceptance", "acceptance_length", "draft_length", "model", "gpu", "tensor_parallel", "dtype", "draft", "draft_passes",
    "engine", "batch", "context",
)  # fmt: skip
_NAMES = {
    "verify": "verification", "draft": "drafting", "overhead": "engine overhead", "stragglers": "waiting for the slowest sequence",
    "rest": "the rest (errors of measurement, prompts, waiting)",
}  # fmt: skip
_CHANGES = {
    "verify": "a pass over {tokens} tokens of {batch:g} sequences takes longer than one over a token of each: draft fewer tokens at"
    " this batch",
    "draft": "use a smaller draft, or one that drafts several tokens in a pass, or draft fewer tokens",
    "overhead": "look at the engine: CUDA graphs for draft and verification, overlapped scheduling, sampling on the GPU",
    "stragglers": "use continuous batching, which replaces sequences that have ended",
    "rest": "measure the time of steps without prompts (`calibrate engine next` names the cells that help most)",
}
_ACCEPTANCE = "each step emits few of the tokens that it verifies: use a draft that is trained for these requests"
NO_ACCEPTANCE = (
    "acceptance is never assumed: give a record of `calibrate import engine-log`, or --mean-acceptance-length, or --acceptance-rate"
)


@dataclass(frozen=True)
class Input:
    """An input, its value as text, its source, and its kind (measured, published, assumed or prior)."""

    input: str
    value: str
    source: str
    kind: str


@dataclass(frozen=True)
class Explanation:
    """Explanation of a speed-up; prints as text.

    Parameters
    ----------
    terms
        Terms of the measured speed-up.
    verdict, advice
        A sentence with the largest term, and sentences on what to change.
    by_length
        Predicted speed-up by draft length.
    shares
        Shares of the differences to a claim; empty without a claim.
    claim
        Setting and speed-up of the claim, or None.
    rests_on
        Inputs with their sources.
    notes
        Remarks, such as terms that these inputs do not tell apart.
    """

    terms: TermsOfSpeedup
    verdict: str
    advice: tuple[str, ...]
    by_length: tuple[tuple[int, float], ...]
    shares: tuple[Share, ...]
    claimed_speedup: float | None
    rests_on: tuple[Input, ...]
    notes: tuple[str, ...]

    @property
    def table(self) -> pl.DataFrame:
        """Terms as a table, in units of a plain step."""
        import polars as pl

        return pl.DataFrame([_row(term) for term in self.terms.terms])

    @property
    def shares_table(self) -> pl.DataFrame:
        """Shares of the differences as a table."""
        import polars as pl

        return pl.DataFrame([_share_row(share) for share in self.shares], schema=_SHARE_TYPES)

    def figure(self) -> Figure:
        """Waterfall of the terms, or of the shares where there is a claim."""
        from figures.of_runs import speedup_terms

        if self.claimed_speedup is not None:
            return speedup_terms.draw_shares(self.shares_table, self.claimed_speedup, self.terms.measured.speedup)
        measured = self.terms.measured
        return speedup_terms.draw(self.table, measured.mean_acceptance_length, measured.speedup)

    def document(self) -> dict[str, Any]:
        """The explanation as a JSON document (`json_schema`)."""
        measured = self.terms.measured
        return {
            "kind": "explanation", "schema_version": SCHEMA_VERSION, "verdict": self.verdict, "advice": list(self.advice),
            "speedup": measured.speedup, "acceptance_length": measured.mean_acceptance_length,
            "draft_length": measured.draft_length, "plain_tpot_ms": 1e3 * measured.plain_tpot_s, "tpot_ms": 1e3 * measured.tpot_s,
            "step_in_plain_steps": measured.steps, "largest": self.terms.largest.name,
            "terms": [_row(term) for term in self.terms.terms], "not_told_apart": [list(group) for group in self.terms.indistinct],
            "speedup_by_draft_length": [{"draft_length": length, "speedup": value} for length, value in self.by_length],
            "claimed_speedup": self.claimed_speedup, "shares": [_share_row(share) for share in self.shares],
            "rests_on": [vars(each) for each in self.rests_on], "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.advice, "", *self._lines()])

    def _lines(self) -> list[str]:
        """Tables of terms and shares, and notes, as lines of text."""
        rows = [(
            _label(term.name), f"{term.value:.3f}", f"{term.low:.3f} to {term.high:.3f}", f"{term.plain:.3f}", f"{term.extra:+.3f}",
            term.kind,
        ) for term in self.terms.terms]  # fmt: skip
        total = self.terms.measured.steps
        rows.append(("step", f"{total:.3f}", "", "1.000", f"{total - 1:+.3f}", "measured"))
        lines = _aligned(("term [plain steps]", "value", "80 % interval", "plain step", "extra", "source"), rows)
        measured = self.terms.measured
        lines += ["", f"speed-up = {measured.mean_acceptance_length:.3f} tokens / {total:.3f} plain steps = {measured.speedup:.3f}"]
        if self.claimed_speedup is not None:
            of = [(
                share.setting, share.claimed, share.mine, f"{math.exp(share.share):.3f}",
                f"{math.exp(share.low):.3f} to {math.exp(share.high):.3f}",
            ) for share in self.shares]  # fmt: skip
            of.append(("together", "", "", f"{measured.speedup / self.claimed_speedup:.3f}", ""))
            lines += ["", *_aligned(("difference", "claimed", "measured", "factor", "80 % interval"), of)]
        lines += ["", *_aligned(("rests on", "value", "kind", "source"), [(e.input, e.value, e.kind, e.source) for e in self.rests_on])]
        return [*lines, *(f"note: {note}" for note in self.notes)]


def _aligned(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def _label(name: str) -> str:
    return "verification" if name == "verify" else "drafting" if name == "draft" else name


def _row(term: Term) -> dict[str, Any]:
    return {"term": term.name} | {field.name: getattr(term, field.name) for field in fields(Term) if field.name != "name"}


_SHARE_TYPES: dict[str, Any] = {"setting": str, "claimed": str, "mine": str, "share": float, "low": float, "high": float, "factor": float}


def _share_row(share: Share) -> dict[str, Any]:
    return {name: getattr(share, name) for name in _SHARE_TYPES if name != "factor"} | {"factor": math.exp(share.share)}


# --- From inputs to an explanation ---------------------------------------------------------------------------------------


def explain(
    record: str | Path | None = None, *, plain_tpot: float | str | None = None, tpot: float | str | None = None,
    model: str | None = None, gpu: str | None = None, tensor_parallel: int = 1, dtype: str | None = None, draft: str | None = None,
    draft_length: int | None = None, draft_passes: int | None = None, mean_acceptance_length: float | None = None,
    acceptance_rate: float | None = None, batch: float | None = None, context: float | None = None,
    engine: str = engine_priors.ANY, engine_law: str | Path | None = None, static_tokens: int | None = None,
    claim: str | Mapping[str, Any] | None = None, seed: int = 0,
) -> Explanation:  # fmt: skip
    """Explain a measured speed-up over plain decoding, and its difference to a claim.

    Parameters
    ----------
    record
        Acceptance record of the run (`calibrate import engine-log`); or `mean_acceptance_length` or `acceptance_rate`.
    plain_tpot, tpot
        Time per output token without and with drafts, as a number [ms] or with a unit (`7.5ms`, `0.0075s`); left out, those of the
        record's cells.
    model, gpu, tensor_parallel, dtype, draft
        What was run, as names of `sim ls shapes` and `sim ls devices`, or files; not needed with `engine_law`, except to compare
        with a claim.
    draft_length, draft_passes
        Drafted tokens per step, and passes of the draft (default: one per drafted token).
    batch, context
        Running sequences, and cached positions of each. Default: 1 sequence and 1000 positions, assumed.
    engine
        Engine whose published overheads are the prior.
    engine_law
        Step law of the engine instead of priors: a name or a file.
    static_tokens
        The batch was static, and every sequence generated so many tokens. Default: continuous batching.
    claim
        Claim beside the measurement: `speedup=4.4,acceptance=0.85,draft_length=7,...` or a mapping (keys: `CLAIM_KEYS`).
    seed
        Seed of the draws.
    """
    found = None if record is None else acceptance_record.load(record)
    length = _draft_length(found, draft_length)
    given, rates, acceptance_input = _acceptance(found, length, mean_acceptance_length, acceptance_rate)
    batch_input = Input("batch", "1", "not given", "assumed") if batch is None else Input("batch", f"{batch:g}", "given", "measured")
    sequences = 1.0 if batch is None else checks.number("batch", batch, 1e-3, cell_tables.MOST_SEQUENCES) or float(batch)
    positions = float(USUAL_CONTEXT) if context is None else checks.number("context", context, 0, checks.MAX_TOKENS) or float(context)
    times = [
        _seconds(option, value, found, asked, sequences)
        for option, value, asked in (("plain-tpot", plain_tpot, 0), ("tpot", tpot, length))
    ]
    measured = MeasuredSpeedup(
        times[0], times[1], given, length, draft_passes=draft_passes, sequences=sequences, context=positions,
        waiting_share=0.0 if static_tokens is None else _waiting(length, rates, sequences, static_tokens),
    )  # fmt: skip
    setting = None
    if model is not None and gpu is not None:
        setting = Setting(
            model, gpu, length, _rates_of_length(rates, given, length), tensor_parallel, dtype, draft, engine, sequences, positions,
            draft_passes,
        )  # fmt: skip
    law = _law(engine_law, model, gpu, setting, measured, engine, seed)
    terms = explanation.explain(measured, law, fitted_here=engine_law is None)
    most = max(MOST_LENGTH, length)
    by_length = tuple(explanation.speedups_by_length(law, measured, rates, most))
    shares: tuple[Share, ...] = ()
    claimed_speedup, notes = None, [*_notes(law, measured, found, terms)]
    if claim is not None:
        if setting is None:
            raise ParameterError("a claim is compared by model and GPU: give --model and --gpu of the measured run")
        other, claimed_speedup, missing = _claimed(claim, setting)
        shares = explanation.shares(setting, measured.speedup, other, claimed_speedup)
        if missing:
            notes.append(f"the claim does not say {', '.join(missing)}: taken to be the measured run's")
        notes.append("factors are averaged over all orders of changing the settings (Shapley values of the logarithm of the speed-up)")
    inputs = (
        Input("plain TPOT", f"{1e3 * times[0]:.4g} ms", "given" if plain_tpot is not None else "record", "measured"),
        Input("TPOT", f"{1e3 * times[1]:.4g} ms", "given" if tpot is not None else "record", "measured"),
        acceptance_input, batch_input,
        Input("context", f"{positions:g}", "not given" if context is None else "given", "assumed" if context is None else "measured"),
        *(Input(_label(term.name), f"{term.value:.3f} plain steps", term.source, term.kind) for term in terms.terms),
    )  # fmt: skip
    verdict = _verdict(terms) if claimed_speedup is None else _claim_verdict(terms, shares, claimed_speedup)
    return Explanation(terms, verdict, _advice(terms, by_length), by_length, shares, claimed_speedup, inputs, tuple(notes))


def _draft_length(record: AcceptanceRecord | None, asked: int | None) -> int:
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


def _acceptance(
    record: AcceptanceRecord | None, length: int, mean: float | None, rate: float | None
) -> tuple[float, tuple[float, ...], Input]:
    """Acceptance length, conditional rates by draft position, and the input that gives them."""
    given = [value for value in (record, mean, rate) if value is not None]
    if not given:
        raise ParameterError(NO_ACCEPTANCE)
    if len(given) > 1:
        raise ParameterError("acceptance must be given once: a record, --mean-acceptance-length or --acceptance-rate; leave others out")
    if rate is not None:
        checks.number("acceptance_rate", rate, 0, 1)
        value = explanation.acceptance_length((rate,), length)
        return value, (rate,), Input("acceptance rate", f"{rate:g}", "given", "measured")
    if mean is not None:
        explanation.check_length(mean, length)
        value = min(float(mean), length + 1.0)
        rates = (explanation.constant_rate(value, length),)
        return value, rates, Input("acceptance length", f"{value:.4g}", "given", "measured")
    assert record is not None
    if record.mean_acceptance_length is None:
        raise ParameterError("the record has no acceptance length; give --mean-acceptance-length instead")
    explanation.check_length(record.mean_acceptance_length, length)
    value = min(record.mean_acceptance_length, length + 1.0)
    named = ", ".join(source.file for source in record.sources[:3]) or "record"
    rates = record.known_rates[:length]
    if not rates or abs(explanation.acceptance_length(rates, length) / value - 1) > CLOSE:
        rates = (explanation.constant_rate(value, length),)
    return value, rates, Input("acceptance length", f"{value:.4g}", f"{record.engine} log {named}", "measured")


def _rates_of_length(rates: tuple[float, ...], mean: float, length: int) -> tuple[float, ...]:
    """Rates by position, or the constant rate of exactly this length where they give a little more or less."""
    same = math.isclose(explanation.acceptance_length(rates, length), mean, rel_tol=1e-6)
    return rates if same else (explanation.constant_rate(mean, length),)


def _waiting(length: int, rates: tuple[float, ...], sequences: float, tokens: int) -> float:
    checks.whole("static_tokens", tokens, 1, checks.MAX_TOKENS)
    if sequences != int(sequences) or sequences < 2:
        raise ParameterError(f"--batch must be a whole number of at least 2 with --static-tokens, got {sequences:g}; set it")
    rate = explanation.constant_rate(explanation.acceptance_length(rates, length), length)
    return explanation.waiting_share(length, rate, int(sequences), tokens)


def _seconds(option: str, value: float | str | None, record: AcceptanceRecord | None, length: int, batch: float) -> float:
    """Seconds per output token: as given, or of the record's cells of this draft length and batch."""
    if value is not None:
        return milliseconds(option, value) / 1e3
    found = []
    for cell in () if record is None else record.cells:
        near = SAME_BATCH ** -1 <= cell.sequences / batch <= SAME_BATCH
        accepted = 1.0 if not length else cell.mean_acceptance_length
        if cell.draft_length == length and near and accepted is not None:
            unit = next(name for name in cell_tables.UNITS if getattr(cell, name) is not None)
            seconds = cell_tables.from_unit(unit, getattr(cell, unit), cell.sequences, accepted)
            found.append(float(seconds) / accepted)
    if not found:
        which = "plain decoding" if not length else f"draft length {length}"
        also = "" if record is None or not record.cells else f"; the record has no cell of {which} at batch {batch:g}"
        raise ParameterError(f"the time per output token of {which} is not known: give --{option}, such as --{option} 7.5ms{also}")
    return float(np.median(found))


def milliseconds(option: str, value: float | str) -> float:
    """Milliseconds of a number [ms], or of a text with a unit.

    >>> milliseconds("tpot", "7.5ms"), milliseconds("tpot", "0.0075 s"), milliseconds("tpot", 7.5)
    (7.5, 7.5, 7.5)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(us|ms|s)?\s*", value)
        try:
            number = float(match[1]) if match else math.nan
        except ValueError:
            number = math.nan
        if not match or not math.isfinite(number):
            raise ParameterError(f"--{option} must be a time, such as 7.5ms, got {checks.shown(value)}")
        value = number * {"us": 1e-3, "ms": 1.0, "s": 1e3, None: 1.0}[match[2]]
    checks.number(option, value, 1e-6, 1e9)
    return float(value)


def _law(
    name: str | Path | None, model: str | None, gpu: str | None, setting: Setting | None, measured: MeasuredSpeedup, engine: str,
    seed: int,
) -> StepLaw:  # fmt: skip
    if name is not None:
        law = step_law.load(name)
        for option, value in (("model", model), ("gpu", gpu)):
            own = None if law.kernels is None else getattr(law.kernels, option)
            if value is not None and own is not None and own != value:
                raise ParameterError(f"--{option} must be {own}, that of law {law.name}, got {value}; leave it out or take another law")
        return law
    if setting is None:
        missing = " and ".join(f"--{option}" for option, value in (("model", model), ("gpu", gpu)) if value is None)
        raise ParameterError(f"what a step takes follows from the model and its GPU: give {missing}, or --engine-law")
    return explanation.fitted(measured, setting.kernels, engine, seed)


def _notes(
    law: StepLaw, measured: MeasuredSpeedup, record: AcceptanceRecord | None, terms: TermsOfSpeedup
) -> list[str]:
    notes = []
    for group in terms.indistinct:
        names = " and ".join(_label(name) for name in group) if len(group) == 2 else ", ".join(map(_label, group))
        notes.append(f"these inputs do not tell {names} apart: their sum is known much better than each")
    beyond = float(law.beyond(measured.sequences, measured.draft_length))
    if beyond > 0:
        notes.append(f"law {law.name} has no cell near: {beyond:.1f} doublings of batch or draft length beyond its cells")
    if abs(terms.term("rest").value) > 0.1 * measured.steps:
        notes.append("more than a tenth of the step is not explained by the model of its time: its inputs may not be those of the runs")
    if record is not None and record.draft_ms_per_token is not None:
        passes = measured.draft_length if measured.draft_passes is None else measured.draft_passes
        share = record.draft_ms_per_token * passes / (1e3 * measured.plain_tpot_s)
        notes.append(f"the log itself times drafting: {record.draft_ms_per_token:.3g} ms a token, {share:.3f} plain steps")
    return notes


def _claimed(claim: str | Mapping[str, Any], mine: Setting) -> tuple[Setting, float, list[str]]:
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
    explanation.check_speedup(speedup, length, "claim speedup")
    if given[0] == "acceptance":
        checks.number("claim acceptance", said["acceptance"], 0, 1)
        rate = float(said["acceptance"])
    else:
        rate = explanation.constant_rate(said["acceptance_length"], length)
    names = {name: said[name] for name in explanation.setting_names() if name in said and name != "acceptance"}
    for name in ("model", "gpu", "dtype", "draft", "engine"):
        if name in names and names[name] is not None and not isinstance(names[name], str):
            raise ParameterError(f"claim {name} must be a name, got {checks.shown(names[name])}")
    if "engine" in names:
        names["engine"] = engine_priors.named(names["engine"]) or names["engine"]
    numbers = {name: float(names[name]) for name in ("batch", "context") if isinstance(names.get(name), int | float)}
    whole = replace(mine, **{**names, **numbers, "draft_length": length, "acceptance": (rate,)})
    missing = [name for name in explanation.setting_names() if name not in said and name != "acceptance" and _matters(name, mine)]
    return whole, float(speedup), missing


def _matters(name: str, mine: Setting) -> bool:
    return name not in ("dtype", "draft_passes", "draft", "tensor_parallel") or getattr(mine, name) not in (None, 1)


def _parsed(claim: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in claim.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if not sign or not key or not value:
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


# --- Sentences ---------------------------------------------------------------------------------------------------------


def _verdict(terms: TermsOfSpeedup) -> str:
    measured, largest = terms.measured, terms.largest
    slower = "" if measured.speedup >= 1 else " (slower)"
    opening = (
        f"Speed-up {measured.speedup:.2f} over plain decoding{slower}: a step emits {measured.mean_acceptance_length:.2f} of at most"
        f" {measured.draft_length + 1} tokens and takes {measured.steps:.2f} plain steps."
    )
    if largest.extra <= 0:
        return f"{opening} No term takes longer than in a plain step."
    return (
        f"{opening} The largest extra time is {_NAMES[largest.name]}: {largest.extra:.2f} plain steps (80 % interval"
        f" {largest.extra_low:.2f} to {largest.extra_high:.2f}) of {measured.steps - 1:.2f}."
    )


def _claim_verdict(terms: TermsOfSpeedup, shares: tuple[Share, ...], claimed: float) -> str:
    mine = terms.measured.speedup
    opening = f"Measured {mine:.2f}x, claimed {claimed:.2f}x: a factor of {mine / claimed:.2f}."
    settings, rest = [share for share in shares if share.setting != explanation.REST], shares[-1]
    if not settings:
        return f"{opening} The two sides have the same settings: nothing that was given explains a difference."
    top = settings[0]
    said = (
        f"{opening} The setting with the largest share is {top.setting} ({top.mine} instead of {top.claimed}): a factor of"
        f" {math.exp(top.share):.2f} (80 % interval {math.exp(top.low):.2f} to {math.exp(top.high):.2f})."
    )
    if abs(rest.share) > abs(top.share):
        return f"{said} More than that, a factor of {math.exp(rest.share):.2f}, is not explained by the settings given."
    return f"{said} A factor of {math.exp(rest.share):.2f} is not explained by the settings given."


def _advice(terms: TermsOfSpeedup, by_length: tuple[tuple[int, float], ...]) -> tuple[str, ...]:
    measured, largest = terms.measured, terms.largest
    advice = []
    most = measured.draft_length + 1
    if largest.extra > 0:
        advice.append(
            "To change it: " + _CHANGES[largest.name].format(tokens=most, batch=measured.sequences) + "."
        )
    if math.log(most / measured.mean_acceptance_length) > math.log(max(measured.steps, 1.0)):
        advice.append(f"Acceptance costs more than the time of the step: {_ACCEPTANCE}.")
    best, fastest = max(by_length, key=lambda each: each[1])
    own = dict(by_length)[measured.draft_length]
    if fastest < 1:
        advice.append(f"By these terms plain decoding is fastest here; the best draft length, {best}, gives {fastest:.2f}x.")
    elif fastest > own * (1 + CLOSE):
        advice.append(f"By these terms a draft length of {best} is fastest: {fastest:.2f}x instead of {own:.2f}x.")
    else:
        advice.append(f"By these terms no draft length is faster than {measured.draft_length} by more than {CLOSE:.0%}.")
    return tuple(advice)


# --- JSON --------------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """JSON schema of `Explanation.document`."""
    number, text = {"type": "number"}, {"type": "string"}

    def table(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "array", "items": _object(columns)}

    terms = {"term": {"enum": list(explanation.TERMS)}} | {
        field.name: text if field.name == "source" else number for field in fields(Term) if field.name not in ("name", "kind")
    }
    return _object({
        "kind": {"const": "explanation"}, "schema_version": {"const": SCHEMA_VERSION}, "verdict": text,
        "advice": {"type": "array", "items": text}, "speedup": number, "acceptance_length": number,
        "draft_length": {"type": "integer"}, "plain_tpot_ms": number, "tpot_ms": number, "step_in_plain_steps": number,
        "largest": {"enum": list(explanation.TERMS)}, "terms": table(terms | {"kind": {"enum": list(KINDS)}}),
        "not_told_apart": {"type": "array", "items": {"type": "array", "items": {"enum": list(explanation.TERMS)}}},
        "speedup_by_draft_length": table({"draft_length": {"type": "integer"}, "speedup": number}),
        "claimed_speedup": {"type": ["number", "null"]},
        "shares": table({name: text if kind is str else number for name, kind in _SHARE_TYPES.items()}),
        "rests_on": table({"input": text, "value": text, "source": text, "kind": {"enum": list(KINDS)}}),
        "notes": {"type": "array", "items": text},
    }) | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sim explain --json"}  # fmt: skip


KINDS = ("measured", "published", "assumed", "prior")


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties), "additionalProperties": False}
