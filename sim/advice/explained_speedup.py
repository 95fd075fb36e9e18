"""Explanation of a speed-up from a user's inputs: terms, shares of the differences to a claim, a sentence, and what to change.

The Python twin of `sim explain`; the arithmetic is in `model.speedups.explanation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.base import checks
from model.base.checks import ParameterError
from model.engines import engine_priors, step_law
from model.engines.kernel_times import USUAL_CONTEXT
from model.engines.step_law import StepLaw
from model.hardware import devices
from model.logs.acceptance_record import AcceptanceRecord
from model.speedups import budget_effect, claim_shares, explanation
from model.speedups.budget_effect import BudgetOfStep
from model.speedups.claim_shares import Setting, Share
from model.speedups.explanation import MeasuredSpeedup, StepTerm, TermsOfSpeedup
from sim.advice import explanation_text, law_agreement, situation, speedup_inputs
from sim.advice.situation import Evidence

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
MOST_LENGTH = 8
"""Longest draft whose speed-up is predicted for advice, unless the measured one is longer."""
UNEXPLAINED = 0.1
"""Share of a step's time from which on it is said that the step law does not explain it."""
FULL = 0.95
"""Share of K from which on the mean number of drafted tokens counts as K."""


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
    budget
        What the context budget of the drafts changes; None: they read the whole context.
    """

    terms: TermsOfSpeedup
    verdict: str
    advice: tuple[str, ...]
    by_length: tuple[tuple[int, float], ...]
    shares: tuple[Share, ...]
    claimed_speedup: float | None
    rests_on: tuple[Evidence, ...]
    notes: tuple[str, ...]
    budget: BudgetOfStep | None = None

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
        from figures.of_comparisons import speedup_terms

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
            "may_be_larger": [term.name for term in self.terms.rivals],
            "terms": [_row(term) for term in self.terms.terms], "not_told_apart": [list(group) for group in self.terms.indistinct],
            "speedup_by_draft_length": [{"draft_length": length, "speedup": value} for length, value in self.by_length],
            "claimed_speedup": self.claimed_speedup, "shares": [_share_row(share) for share in self.shares],
            "draft_context_budget": None if self.budget is None else self.budget.document(),
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
        lines += [
            "",
            *_aligned(("rests on", "value", "kind", "source"), [(e.input, e.value, e.kind, e.source) for e in self.rests_on]),
        ]
        return [*lines, *(f"note: {note}" for note in self.notes)]


def _aligned(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]


def _label(name: str) -> str:
    return "verification" if name == "verify" else "drafting" if name == "draft" else name


def _row(term: StepTerm) -> dict[str, Any]:
    return {"term": term.name} | {field.name: getattr(term, field.name) for field in fields(StepTerm) if field.name != "name"}


_SHARE_TYPES: dict[str, Any] = {
    "setting": str,
    "claimed": str,
    "mine": str,
    "share": float,
    "low": float,
    "high": float,
    "factor": float,
}


def _share_row(share: Share) -> dict[str, Any]:
    return {name: getattr(share, name) for name in _SHARE_TYPES if name != "factor"} | {"factor": math.exp(share.share)}


# --- From inputs to an explanation ---------------------------------------------------------------------------------------


def explain(
    log: str | Path | Sequence[str | Path] = (), *, plain_tpot: float | str | None = None, tpot: float | str | None = None,
    model: str | None = None, gpu: str | None = None, tensor_parallel: int | None = None, dtype: str | None = None,
    weights: str | None = None, draft: str | None = None, draft_length: int | None = None, draft_passes: int | None = None,
    draft_context_budget: int | None = None, mean_acceptance_length: float | None = None, acceptance: float | None = None,
    batch: float | None = None, context: float | None = None,
    engine: str | None = None, engine_law: str | Path | None = None, static_tokens: int | None = None,
    claim: str | Mapping[str, Any] | None = None, seed: int = 0, progress: Callable[[str], None] = lambda what: None,
) -> Explanation:  # fmt: skip
    """Explain a measured speed-up over plain decoding, and its difference to a claim.

    Parameters
    ----------
    log
        Log or benchmark output of the run with drafts, or its acceptance record (`calibrate import engine-log`); several files for
        several runs, such as one without drafts. Or `mean_acceptance_length`, or `acceptance` (a rate).
    plain_tpot, tpot
        Time per output token without and with drafts, as a number [ms] or with a unit (`7.5ms`, `0.0075s`); left out, those of the
        log's cells.
    model, gpu, tensor_parallel, dtype, weights, draft
        What was run, as names of `sim ls shapes` and `sim ls devices`, or files; not needed with `engine_law`, except to compare
        with a claim.
    draft_length, draft_passes
        Drafted tokens per step, and passes of the draft: 0 to `draft_length` (default: one per drafted token).
    draft_context_budget
        Largest number of cached positions of each sequence that a pass of the draft read; None: all.
    batch, context
        Running sequences, and cached positions of each. Default: 1 sequence and 1000 positions, assumed.
    engine
        Engine whose published overheads are the prior (`vllm`, `sglang`, ...). Default: the log's, or all engines.
    engine_law
        Step law of the engine instead of priors: a name or a file.
    static_tokens
        Tokens that each sequence generated, if the batch was static. Default: continuous batching.
    claim
        Claim to compare with the measurement: `speedup=4.4,acceptance=0.85,draft_length=7,...` or a mapping (keys: `CLAIM_KEYS`).
    seed
        Seed of the draws.
    progress
        Called with a few words before each part of the work.
    """
    runs = speedup_inputs.runs_of(log)
    found = runs.record
    if found is None and mean_acceptance_length is None and acceptance is None:
        raise ParameterError(speedup_inputs.NO_ACCEPTANCE)
    length = speedup_inputs.draft_length_of(found, draft_length)
    mean, rates, accepted = speedup_inputs.acceptance_of(found, length, mean_acceptance_length, acceptance)
    sequences, batch_said = speedup_inputs.batch_of(runs, batch, length, timed=tpot is None)
    of_cells = runs.acceptance_length(length, sequences) if tpot is None else None
    if of_cells is not None:
        # Length and time are of the same steps; the whole log may hold others.
        mean, rates = of_cells, speedup_inputs.rates_of_length(rates, of_cells, length)
        accepted = replace(accepted, value=f"{mean:.4g}")
    positions = float(USUAL_CONTEXT) if context is None else speedup_inputs.number("context", context, 0, checks.MAX_TOKENS)
    plain_s = speedup_inputs.seconds_of("plain-tpot", plain_tpot, runs, 0, sequences)
    tpot_s = speedup_inputs.seconds_of("tpot", tpot, runs, length, sequences)
    waiting = 0.0 if static_tokens is None else speedup_inputs.waiting_of(length, rates, sequences, static_tokens)
    law_given = None if engine_law is None else step_law.load(engine_law)
    named = situation.draft_of(draft, law_given, model)
    situation.check_budget(draft_context_budget, model or (None if law_given is None else law_given.shape_name), named, law_given)
    passes = speedup_inputs.passes_of(named, draft_passes, length)
    drafting_s, drafting_said = speedup_inputs.drafting_of(found, length, sequences)
    measured = MeasuredSpeedup(plain_s, tpot_s, mean, length, passes, sequences, positions, waiting, drafting_s)
    explanation.check_emitted(measured.speedup, mean)
    setting = None
    if model is not None and gpu is not None:
        own = speedup_inputs.rates_of_length(rates, mean, length)
        setting = Setting(
            model, gpu, length, own, 1 if tensor_parallel is None else tensor_parallel, dtype, weights, named,
            engine or situation.engine_of(found), sequences, positions, passes, draft_context_budget,
        )  # fmt: skip
    other = None
    if claim is not None:
        if setting is None:
            raise ParameterError("a claim is compared by model and GPU: give --model and --gpu of the measured run")
        other = speedup_inputs.claimed(claim, setting)
    described = {"model": model, "gpu": gpu, "tensor_parallel": tensor_parallel, "dtype": dtype, "weights": weights}
    described |= {"engine": engine, "draft_context_budget": draft_context_budget}
    progress("fitting a step law to the two runs")
    law, fitted_here, unnamed = speedup_inputs.law_of(law_given, setting, measured, described, seed)
    terms = explanation.explain(measured, law, fitted_here=fitted_here, seed=seed)
    budget = budget_effect.of_step(terms, law, *_sequences_that_fit(setting))
    by_length = tuple(explanation.speedups_by_length(law, measured, rates, max(MOST_LENGTH, length)))
    shares: tuple[Share, ...] = ()
    claimed_speedup, possible, notes = None, True, [*_notes(law, found, terms, fitted_here=fitted_here)]
    notes += [] if budget is None else explanation_text.of_budget(budget)
    if unnamed:
        notes.append(law_agreement.note(law, unnamed))
    if engine is not None and found is not None and situation.engine_of(found) not in (engine_priors.ANY, engine):
        notes.append(f"the log is of {found.engine}, but --engine says {engine}: the latter's priors are used")
    if setting is not None and other is not None:
        claimed_setting, claimed_speedup, missing = other
        progress(f"predicting mixtures of two sides with {len(claim_shares.differences(setting, claimed_setting))} differences")
        shares = claim_shares.shares(setting, measured.speedup, claimed_setting, claimed_speedup)
        emitted = explanation.acceptance_length(claimed_setting.acceptance, claimed_setting.draft_length)
        possible = claimed_speedup <= emitted
        if not possible:
            notes.append(
                f"the claim contradicts itself: its acceptance gives {emitted:.3g} tokens per step, it claims {claimed_speedup:g}x"
                " (`sim audit` checks claims)"
            )
        if missing:
            notes.append(f"the claim does not say {', '.join(missing)}: taken to be the measured run's")
        notes.append("factors are Shapley values of the speed-up's logarithm: averages over all orders of changing the settings")
    inputs = (
        _input("plain TPOT", f"{1e3 * plain_s:.4g} ms", "--log" if plain_tpot is None else "--plain-tpot"),
        _input("TPOT", f"{1e3 * tpot_s:.4g} ms", "--log" if tpot is None else "--tpot"),
        accepted,
        batch_said,
        _input("context", f"{positions:g}", "not given" if context is None else "--context"),
        *drafting_said,
        *(() if budget is None else (_input("draft context budget", budget.text, "--draft-context-budget"),)),
        *unnamed,
        *(Evidence(_label(term.name), f"{term.value:.3f} plain steps", term.source, term.kind) for term in terms.terms),
    )
    verdict = explanation_text.verdict(terms, fitted_here=fitted_here)
    if claimed_speedup is not None:
        verdict = explanation_text.claim_verdict(measured.speedup, claimed_speedup, shares)
    advice = explanation_text.advice(terms, by_length, law, shares, fitted_here=fitted_here, possible=possible)
    return Explanation(terms, verdict, advice, by_length, shares, claimed_speedup, inputs, tuple(notes), budget)


def _sequences_that_fit(setting: Setting | None) -> tuple[int | None, int | None]:
    """Sequences that fit the memory with drafts within their budget, and with drafts of the whole context; None: not known."""
    if setting is None or setting.draft_context_budget is None:
        return None, None
    kernels = setting.kernels
    of = kernels.target, devices.device(kernels.gpu), int(setting.context), kernels.tensor_parallel, kernels.draft, kernels.dtype
    return situation.sequences_that_fit(*of, setting.draft_context_budget), situation.sequences_that_fit(*of, None)


def _input(name: str, value: str, source: str) -> Evidence:
    return Evidence(name, value, source, "assumed" if source == "not given" else "measured")


def _notes(law: StepLaw, record: AcceptanceRecord | None, terms: TermsOfSpeedup, *, fitted_here: bool) -> list[str]:
    measured, notes = terms.measured, []
    for group in terms.indistinct:
        names = " and ".join(_label(name) for name in group) if len(group) == 2 else ", ".join(map(_label, group))
        notes.append(f"these inputs do not tell {names} apart: their sum is known much better than each")
    beyond = float(law.beyond(measured.sequences, measured.draft_length))
    if beyond > 0:
        notes.append(f"law {law.name} has no cell near: {beyond:.1f} doublings of batch or draft length beyond its cells")
    rest = terms.term("rest")
    of = "the model of its time" if fitted_here else f"law {law.name}"
    if abs(rest.plain) > UNEXPLAINED:
        longer = "longer" if rest.plain > 0 else "shorter"
        notes.append(
            f"the measured plain step is {1e3 * measured.plain_tpot_s:.3g} ms, {longer} than {of} gives"
            f" ({1e3 * measured.plain_tpot_s * (1 - rest.plain):.3g} ms): its inputs may not be those of the runs"
        )
    elif measured.draft_s is not None and rest.value < -UNEXPLAINED * measured.steps:
        needed = 1e3 * measured.plain_tpot_s * (terms.term("verify").value + terms.term("overhead").value)
        notes.append(
            f"contradiction: drafting as measured leaves {1e3 * (measured.busy_s - measured.draft_s):.3g} ms of a step for"
            f" verification and overhead, which take {needed:.3g} ms by {of}: batch, draft length or model may be others"
        )
    elif abs(rest.value) > UNEXPLAINED * measured.steps:
        notes.append(f"more than a tenth of the step is not explained by {of}: its inputs may not be those of the runs")
    if record is not None and record.drafts and record.drafted and record.drafted < FULL * record.drafts * measured.draft_length:
        notes.append(
            f"drafts have {record.drafted / record.drafts:.2f} of at most {measured.draft_length} tokens on average: verification"
            f" is taken to be over {measured.draft_length + 1} tokens of each sequence"
        )
    return notes


# --- JSON --------------------------------------------------------------------------------------------------------------


_BUDGET: dict[str, Any] = {
    "positions": {"type": "integer"}, "context": {"type": "number"}, "draft_pass_ms": {"type": "number"},
    "draft_pass_ms_without": {"type": "number"}, "drafting": {"type": "number"}, "drafting_without": {"type": "number"},
    "speedup_without": {"type": "number"}, "most_sequences": {"type": ["integer", "null"]},
    "most_sequences_without": {"type": ["integer", "null"]},
}  # fmt: skip


def json_schema() -> dict[str, Any]:
    """JSON schema of `Explanation.document`."""
    number, text = {"type": "number"}, {"type": "string"}

    def table(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "array", "items": _object(columns)}

    terms = {"term": {"enum": list(explanation.TERMS)}} | {
        field.name: text if field.name == "source" else number for field in fields(StepTerm) if field.name not in ("name", "kind")
    }
    found = _object({
        "kind": {"const": "explanation"}, "schema_version": {"const": SCHEMA_VERSION}, "verdict": text,
        "advice": {"type": "array", "items": text}, "speedup": number, "acceptance_length": number,
        "draft_length": {"type": "integer"}, "plain_tpot_ms": number, "tpot_ms": number, "step_in_plain_steps": number,
        "largest": {"enum": list(explanation.TERMS)},
        "may_be_larger": {"type": "array", "items": {"enum": list(explanation.TERMS)}},
        "terms": table(terms | {"kind": {"enum": list(KINDS)}}),
        "not_told_apart": {"type": "array", "items": {"type": "array", "items": {"enum": list(explanation.TERMS)}}},
        "speedup_by_draft_length": table({"draft_length": {"type": "integer"}, "speedup": number}),
        "claimed_speedup": {"type": ["number", "null"]},
        "shares": table({name: text if kind is str else number for name, kind in _SHARE_TYPES.items()}),
        "draft_context_budget": {"anyOf": [{"type": "null"}, _object(_BUDGET)]},
        "rests_on": table({"input": text, "value": text, "source": text, "kind": {"enum": list(KINDS)}}),
        "notes": {"type": "array", "items": text}, "command": {"type": "array", "items": text},
        "versions": {"type": "object", "additionalProperties": text},
    }, optional=("command", "versions"))  # fmt: skip
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sim explain --json"} | found


KINDS = ("measured", "published", "assumed", "prior")


def _object(properties: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}
