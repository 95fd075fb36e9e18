"""Verdicts on claims: impossible, contradictory, possible under a condition, plausible, or not decidable.

A claim is compared with

* itself: stated numbers that contradict each other (`model.audit.contradictions`) make it contradictory;
* the largest speed-up of its method (`claim_bound`): above it the claim is impossible, for any engine;
* the formula of the method's paper (`claim_formula`) with the stated terms, the others at their most favourable values: above it
  the claim needs a term to be better than stated;
* the same with the draft's bytes over the target's, if both models are stated: above it the claim needs a smaller cost ratio;
* the same for a baseline at the peaks of the device, if model and GPU are stated: the draft's bytes are read at the full bandwidth,
  and the tokens of a verification of the whole batch take at least their arithmetic at the peak rate. A slower baseline allows a
  larger speed-up, so a claim above this bound needs a plain time per token of at least the value that is given.

The bound that decides is the first that the claim exceeds, or the smallest of those that it does not exceed. A claim without a
method, or of one that is not known here, is compared with what holds for all methods whose drafts a pass of the target verifies. No
efficiency of kernels or engines enters. With `plain_tpot_ms` stated, the last comparison is exact and part of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from model.audit import contradictions
from model.audit.claims import SpeedupClaim
from model.audit.peak_times import PeakTimes, bytes_read
from model.hardware.devices import Device
from model.methods import registry
from model.methods.claim_bounds import ANY_DRAFTING, DRAFTING, NO_DRAFT, TERMS, WHOLE, ClaimRule, ClaimTerms, Limit, drafting_bound

IMPOSSIBLE, CONTRADICTORY, NEEDS, PLAUSIBLE, NOT_DECIDABLE = KINDS = (
    "impossible", "contradictory", "needs", "plausible", "not decidable",
)  # fmt: skip
TOLERANCE = (
    "printed numbers may be off by one unit of their last digit (whole numbers count as printed to one decimal, rates to two),"
    " in favour of the claim"
)
ROUNDING = 1e-9
"""Relative excess over a bound that is numerical [-]."""
PLAIN_TPOT = "plain_tpot_ms"
_LABELS = {PLAIN_TPOT: "plain TPOT"} | {name: term.label for name, term in TERMS.items()}
_SLOWEST = 1e6
"""Largest ratio of a baseline's time to its least time that is tried [-]."""
SEE_METHODS = "`sim ls methods` lists those that are known"
_NO_BOUND = "none: nothing stated limits it"
_Bound = Callable[[ClaimTerms], Limit]


@dataclass(frozen=True)
class ClaimVerdict:
    """Verdict on a claim, with the numbers that it rests on; None where a number has no value.

    Parameters
    ----------
    verdict
        `impossible`, `contradictory`, `plausible`, `needs NAME >= x`, `needs NAME <= x` or `not decidable: NAME missing`.
    kind
        Its first word or words (`KINDS`).
    needs, needed
        The term that the claim needs, and its least (or largest) value.
    missing
        What the claim does not state, if it is not decidable.
    decided_by, deciding_bound
        The bound that decides, in words, and its value, with numbers at the favourable ends of their rounding: a speed-up, unless
        the words say otherwise. No value if nothing that is stated limits the speed-up.
    bound_free
        Formula with free drafting and verification at the price of a plain pass.
    bound_draft
        Formula with the stated cost ratio, or with the draft's bytes over the target's, both at the full bandwidth.
    bound_batch
        Formula with the draft's bytes and the verification of the stated batch at the device's peaks, over plain decoding at them.
    bound
        Largest possible speed-up, with numbers at the favourable ends of their rounding.
    needed_acceptance, needed_cost_ratio, needed_plain_tpot_ms
        Values at which the formula equals the claimed speed-up: the other terms as stated, or most favourable.
    plain_tpot_limit_ms
        Least time of a plain pass at the peaks of the device [ms].
    inequality, sentence
        The inequality that decides, with its numbers; and the verdict in a sentence.
    sources
        Sources of the formula, the shape and the peaks.
    """

    row: int
    method: str | None
    model: str | None
    gpu: str | None
    draft: str | None
    engine: str | None
    source: str | None
    batch: int | None
    context: int | None
    tensor_parallel: int | None
    terms: Mapping[str, float]
    speedup: float | None
    verdict: str
    kind: str
    needs: str | None
    needed: float | None
    missing: str | None
    decided_by: str | None
    deciding_bound: float | None
    bound_free: float | None
    bound_draft: float | None
    bound_batch: float | None
    bound: float | None
    needed_acceptance: float | None
    needed_cost_ratio: float | None
    needed_plain_tpot_ms: float | None
    plain_tpot_limit_ms: float | None
    inequality: str
    sentence: str
    sources: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        return asdict(self)


def audit(claims: Iterable[SpeedupClaim]) -> list[ClaimVerdict]:
    """Verdict on each claim.

    >>> from model.audit.claims import of_rows
    >>> rows = [{"method": "speculative", "alpha": "0.55", "gamma": 7, "speedup": "2.56"}, {"method": "medusa", "speedup": "2.2x"}]
    >>> [found.verdict for found in audit(of_rows(rows))]
    ['impossible', 'needs acceptance >= 0.545']
    """
    return [_verdict(each) for each in claims]


def _verdict(claim: SpeedupClaim) -> ClaimVerdict:
    if claim.method is None and not {*DRAFTING} & {*claim.numbers}:
        if "method" not in claim.words:
            return _not_decidable(claim, "method")
        return _not_decidable(claim, "acceptance or draft length", "; ".join(("", *claim.unknown, SEE_METHODS)))
    rule, bound, formula = _rule(claim)
    if rule is None or bound is None:
        return _not_decidable(claim, f"a bound of method {claim.method}")
    found = contradictions.of_lengths(claim, rule, bound)
    if found is None and "speedup" not in claim.numbers:
        return _not_decidable(claim, "speedup")
    for name in rule.required:
        if name not in claim.numbers:
            return _not_decidable(claim, name)
    return _Audit(claim, rule, bound, formula or bound).verdict(found)


def _rule(claim: SpeedupClaim) -> tuple[ClaimRule | None, _Bound | None, _Bound | None]:
    """Terms, bound and formula of the method of a claim; those of all drafting if it is not stated, or not known here."""
    if claim.method is None:
        return ANY_DRAFTING, drafting_bound, None
    registry.check_complete(claim.method)
    method = registry.method(claim.method)
    return registry.parameters(claim.method).CLAIMS, method.claim_bound, method.claim_formula


class _Comparison(NamedTuple):
    """A speed-up that the claim is compared with: its name, its value, and its inequality."""

    name: str
    value: float
    inequality: str


class _Audit:
    """The comparisons of one claim, whose method has a bound."""

    def __init__(
        self, claim: SpeedupClaim, rule: ClaimRule, bound: _Bound, formula: _Bound
    ) -> None:
        self.claim, self.rule, self._bound, self._formula = claim, rule, bound, formula
        self.speedup, self.least = claim.number("speedup") or 1.0, max(claim.number("speedup", -1) or 1.0, 1e-9)
        self.printed, self.lenient = ({
            name: min(max(claim.numbers[name].at(better * TERMS[name].better), TERMS[name].low), TERMS[name].high)
            for name in rule.terms if name in claim.numbers
        } for better in (0, 1))  # fmt: skip
        sizes = claim.count("batch", 1), claim.count("context", 0), claim.count("tensor_parallel", 1)
        self.target = self.drafter = None
        if claim.shape is not None and claim.device is not None:
            self.target = PeakTimes(claim.shape, claim.device, *sizes)
            if claim.draft_shape is not None and "cost_ratio" in rule.terms:
                # A draft model may attend to a part of its cache: keys and values of its context are left out.
                self.drafter = PeakTimes(claim.draft_shape, claim.device, sizes[0], 0, sizes[2])

    # --- Bounds ---

    def terms(self, values: Mapping[str, float], plain_s: float | None) -> ClaimTerms:
        """Terms with the least times of passes over a baseline that takes `plain_s` per token; None: its time is not known."""
        target = self.target
        if plain_s is None or target is None:
            return ClaimTerms(values)
        draft = 0.0 if self.drafter is None else self.drafter.seconds(1) / plain_s
        return ClaimTerms(values, lambda width: max(1.0, target.seconds(width) / plain_s), draft)

    def plain_s(self, better: int = 0) -> float | None:
        """Stated time per token of plain decoding [s]."""
        stated = self.claim.number(PLAIN_TPOT, better)
        return None if stated is None else max(stated, 1e-9) / 1e3

    def bound(self, terms: ClaimTerms) -> Limit:
        """Largest possible speed-up."""
        return self._bound(terms)

    def formula(self, terms: ClaimTerms) -> Limit:
        """Speed-up of the paper's formula."""
        return self._formula(terms)

    def value(self, values: Mapping[str, float], plain_s: float | None = None) -> float:
        """Speed-up of the formula with these terms."""
        return self.formula(self.terms(values, plain_s)).value

    @property
    def free(self) -> Limit:
        """Formula with free drafting, and verification at the price of a plain pass."""
        return self.formula(ClaimTerms(self.printed).free())

    @property
    def draft_bound(self) -> float | None:
        """Formula with the stated cost ratio, else with the bytes of draft and target at the full bandwidth."""
        if "cost_ratio" in self.printed:
            return self.formula(ClaimTerms(self.printed)).value
        return None if self.bytes_ratio is None else self.formula(ClaimTerms(self.printed, draft=self.bytes_ratio)).value

    @cached_property
    def bytes_ratio(self) -> float | None:
        """Bytes of a draft pass over those of a plain pass, both read at the full bandwidth; None if a model is not known [-]."""
        claim = self.claim
        if claim.shape is None or claim.draft_shape is None or "cost_ratio" not in self.rule.terms:
            return None
        if self.target is not None and self.drafter is not None:
            return self.drafter.reading(1) / self.target.reading(1)
        batch, context = claim.count("batch", 1), claim.count("context", 0)
        return bytes_read(claim.draft_shape, 1, batch) / bytes_read(claim.shape, 1, batch, context)

    @property
    def batch_bound(self) -> float | None:
        """Formula over a baseline at the device's peaks, at the stated batch."""
        if self.target is None or "batch" not in self.claim.numbers:
            return None
        return self.value(self.printed, self.target.seconds(1))

    # --- What the claim needs ---

    def solve(self, name: str, values: Mapping[str, float], plain_s: float | None) -> float | None:
        """Value of a term at which the formula equals the speed-up; None if its best value is not enough."""
        group: Sequence[str] = next((each for each in self.rule.needs if name in each), (name,))
        others = {key: value for key, value in values.items() if key not in group}
        best, worst = TERMS[name].best, TERMS[name].worst

        def enough(value: float) -> bool:
            return self.value({**others, name: value}, plain_s) >= self.speedup * (1 - ROUNDING)

        return _edge(enough, best, worst)

    def needed(self, name: str) -> float | None:
        """`solve` with the stated terms, for the field of the verdict."""
        if name not in self.rule.terms or "speedup" not in self.claim.numbers:
            return None
        return self.solve(name, self.printed, self.plain_s())

    def needed_plain_s(self) -> float | None:
        """Least time of the baseline at which the formula reaches the speed-up [s].

        None if a baseline at the device's peaks is slow enough, or no baseline is.
        """
        if self.target is None:
            return None
        limit = self.target.seconds(1)
        for values, speed in ((self.printed, self.speedup), (self.lenient, self.least)):
            found = _edge(lambda log, v=values, s=speed: self.value(v, limit * math.exp(log)) >= s * (1 - ROUNDING),  # type: ignore[misc]
                          math.log(_SLOWEST), 0.0)  # fmt: skip
            if found is not None:
                return limit * math.exp(found) if found > 0 else None
        return None

    # --- The verdict ---

    def verdict(self, contradiction: contradictions.Contradiction | None) -> ClaimVerdict:
        """Compare the claim with itself, with bound and formula, with the draft's bytes, and with the peaks of the device."""
        limit = self._largest()
        if contradiction is not None:
            by = _Comparison(*contradiction)
            return self._made(CONTRADICTORY, limit, by, f"the claim contradicts itself: {contradiction.inequality}")
        if (baseline := self._baseline_below_peaks()) is not None:
            return self._made(IMPOSSIBLE, limit, baseline, baseline.inequality)
        if self._exceeds(limit):
            return self._made(IMPOSSIBLE, limit, limit, f"{self._above(limit)}: {limit.inequality}{self._reading()}")
        formula = self._formula_of_stated()
        if self._exceeds(formula):
            return self._above_formula(limit, formula)
        by_bytes, at_peaks = self._of_bytes(), self._at_peaks()
        if by_bytes is not None and self._exceeds(by_bytes):
            value = self.solve("cost_ratio", self.printed, None)
            return self._needing("cost_ratio", TERMS["cost_ratio"].best if value is None else value, limit, by_bytes)
        if at_peaks is not None and self._exceeds(at_peaks) and (seconds := self.needed_plain_s()) is not None:
            return self._needing(PLAIN_TPOT, 1e3 * seconds, limit, at_peaks)
        by = min((each for each in (formula, by_bytes, at_peaks) if each is not None), key=lambda each: each.value)
        for group in self.rule.needs:
            if not {*group} & {*self.printed} and not self._cost_is_known(group):
                value = self.solve(group[0], self.printed, self.plain_s())
                worst = 1.0 if group[0] == "cost_ratio" else TERMS[group[0]].worst
                if self.value({**self.printed, group[0]: worst}, self.plain_s()) < self.least:
                    return self._needing(group[0], TERMS[group[0]].best if value is None else value, limit, by)
        if math.isinf(by.value):
            by = by._replace(name=_NO_BOUND)
            return self._made(PLAUSIBLE, limit, by, f"{self._said} has no bound: {by.inequality}{self._note()}")
        if self.speedup > by.value * (1 + ROUNDING):
            by = by._replace(name=f"{by.name} (by rounding alone)")
        sentence = f"{self._said} is within {by.value:.4g}, the {by.name}: {by.inequality}{self._note()}"
        return self._made(PLAUSIBLE, limit, by, sentence)

    def _exceeds(self, bound: _Comparison) -> bool:
        return self.least > bound.value * (1 + ROUNDING)

    def _largest(self) -> _Comparison:
        found = self.bound(self.terms(self.lenient, self.plain_s(1)))
        return _Comparison(f"largest possible{self._assuming()}", *found)

    def _formula_of_stated(self) -> _Comparison:
        found = self.formula(self.terms(self.lenient, self.plain_s(1)))
        name = "largest possible" if self._formula is self._bound else "formula"
        return _Comparison(f"{name}{self._assuming()}", *found)

    def _assuming(self) -> str:
        """What bound and formula of the stated terms assume of times."""
        if self.target is not None and self.plain_s() is not None:
            return " over stated plain TPOT"
        if "cost_ratio" in self.printed:
            return " with stated cost ratio"
        return " with free drafts" if {*DRAFTING} & {*self.rule.terms} or "cost_ratio" in self.rule.terms else ""

    def _of_bytes(self) -> _Comparison | None:
        """Formula with the draft's bytes over the target's; None if a ratio or a GPU says more, or a model is not stated."""
        if self.bytes_ratio is None or self.target is not None or "cost_ratio" in self.printed:
            return None
        found = self.formula(ClaimTerms(self.lenient, draft=self.bytes_ratio))
        return _Comparison("formula with draft's bytes at full bandwidth", *found)

    def _at_peaks(self) -> _Comparison | None:
        """Formula over a baseline at the device's peaks; None if the baseline's time is stated, or model or GPU are not."""
        if self.target is None or self.plain_s() is not None:
            return None
        found = self.formula(self.terms(self.lenient, self.target.seconds(1)))
        return _Comparison(f"formula at GPU's peaks, batch {self.claim.count('batch', 1)}", *found)

    @property
    def _said(self) -> str:
        return f"a speed-up of {self.speedup:g} (at least {self.least:.6g} before rounding)"

    def _above(self, bound: _Comparison) -> str:
        return f"{self._said} is more than {bound.value:.4g}, the {bound.name}"

    def _cost_is_known(self, group: Sequence[str]) -> bool:
        """True for the cost ratio of a claim whose draft needs no model, or is compared by its bytes."""
        return "cost_ratio" in group and (self.claim.draft == NO_DRAFT or self.bytes_ratio is not None)

    def _baseline_below_peaks(self) -> _Comparison | None:
        """The largest speed-up over the stated baseline, if that is faster than the device can be; None if it is not."""
        if self.target is None or (plain := self.plain_s(1)) is None or plain >= self.target.seconds(1) * (1 - ROUNDING):
            return None
        least = 1e3 * self.target.seconds(1)
        stated = self.claim.numbers[PLAIN_TPOT].value
        return _Comparison("least plain TPOT at GPU's peaks [ms]", least, (
            f"plain TPOT {stated:g} ms is impossible: {least:.4g} ms is the least plain TPOT at GPU's peaks [ms]"
        ))  # fmt: skip

    def _above_formula(self, limit: _Comparison, formula: _Comparison) -> ClaimVerdict:
        """Verdict on a claim that is possible, but not by the formula with its stated terms."""
        for group in self.rule.needs:
            for name in group:
                if name in self.printed and (value := self.solve(name, self.printed, self.plain_s())) is not None:
                    return self._needing(name, value, limit, formula)
        length = self.printed.get("draft_length", 0.0)
        if not length:  # the speed-up is between the best of the draft lengths that were tried, and the bound of all
            return self._needing(self.rule.needs[0][0], TERMS[self.rule.needs[0][0]].best, limit, formula)
        speeds = {float(each): self.value({**self.printed, "draft_length": each}, self.plain_s()) for each in range(int(length))}
        enough = [each for each, value in speeds.items() if value >= self.least] or [max(speeds, key=lambda each: speeds[each])]
        return self._needing("draft_length", max(enough), limit, formula)

    def _needing(self, name: str, value: float, limit: _Comparison, by: _Comparison) -> ClaimVerdict:
        """Verdict `needs`, with the formula at the needed value of a term, or of the baseline's time."""
        if name in WHOLE:
            value = float(math.floor(value + ROUNDING * value))
        group: Sequence[str] = next((each for each in self.rule.needs if name in each), (name,))
        values = {key: each for key, each in self.printed.items() if key not in group}
        if name == PLAIN_TPOT:
            formula = self.formula(self.terms(self.printed, value / 1e3))
        else:
            formula = self.formula(self.terms({**values, name: value}, self.plain_s()))
        better = 1 if name == PLAIN_TPOT else -1 if name == "draft_length" else TERMS[name].better
        sign = ">=" if better > 0 else "<="
        shown = f"{value:g}" if name in WHOLE else _rounded(value, better)
        text = f"needs {_LABELS[name]} {sign} {shown}{' ms' if name == PLAIN_TPOT else ''}"
        if self._exceeds(by):
            because = self._above(by)
        else:
            bounded = math.isfinite(by.value)
            best = "free drafts" if name == "cost_ratio" else f"{_LABELS[name]} {TERMS[name].best:g}"
            by = by._replace(name=_NO_BOUND if not bounded else by.name if best in by.name else f"{by.name}, {best}")
            bound = f"is within {by.value:.4g}, the {by.name}" if bounded else "has no bound by what is stated"
            because = f"{self._said} {bound}"
        sentence = f"{because}; it {text}{self._than(name, value)}: {formula.inequality}{self._note()}"
        return self._made(NEEDS, limit, by, sentence, formula.inequality, needs=name, needed=value, text=text)

    def _than(self, name: str, value: float) -> str:
        """What the claim, its models or its device say of a needed number instead."""
        if name == PLAIN_TPOT and self.target is not None:
            least = 1e3 * self.target.seconds(1)
            return f", {value / least:.3g} times the {least:.4g} ms of the GPU's peaks"
        if name in self.printed:
            return f", and states {self.printed[name]:g}"
        if name == "cost_ratio" and self.bytes_ratio is not None:
            return f", and the bytes of draft and target give {self.bytes_ratio:.3g}"
        return "" if name == "draft_length" else " (not stated)"

    def _note(self) -> str:
        """Notes on the meaning of the stated rates, for the end of a sentence."""
        return f"{self._reading()}{contradictions.of_dependence(self.claim, self.rule)}"

    def _reading(self) -> str:
        """Sentence on a term that the report may have confused with another, if that would make the claim possible."""
        for name, meant in self.rule.readings.items():
            if name not in self.lenient:
                continue
            values = {key: value for key, value in self.lenient.items() if key != name} | {meant: self.lenient[name]}
            before = self.value(self.lenient, self.plain_s(1))
            if before < self.least <= self.value(values, self.plain_s(1)):
                return f"; possible if {self.printed[name]:g} is the {_LABELS[meant]}, {TERMS[meant].about}"
        return ""

    def _made(
        self, kind: str, limit: _Comparison, by: _Comparison, sentence: str, inequality: str | None = None, *,
        needs: str | None = None, needed: float | None = None, text: str | None = None,
    ) -> ClaimVerdict:  # fmt: skip
        seconds = self.needed_plain_s() if self.plain_s() is None and "speedup" in self.claim.numbers else None
        sentence += self._unknown()
        return ClaimVerdict(
            **_stated(self.claim), verdict=kind if text is None else text, kind=kind, needs=needs, needed=_finite(needed),
            missing=None, decided_by=by.name, deciding_bound=_finite(by.value),
            bound_free=_finite(self.free.value), bound_draft=_finite(self.draft_bound),
            bound_batch=_finite(self.batch_bound), bound=_finite(limit.value),
            needed_acceptance=_finite(self.needed("acceptance_rate")), needed_cost_ratio=_finite(self.needed("cost_ratio")),
            needed_plain_tpot_ms=None if seconds is None else 1e3 * seconds,
            plain_tpot_limit_ms=None if self.target is None else 1e3 * self.target.seconds(1),
            inequality=by.inequality if inequality is None else inequality, sentence=sentence,
            sources=(self.rule.source, *_sources(self.claim)),
        )  # fmt: skip

    def _unknown(self) -> str:
        """What the claim says that is not known here and so not used, for the end of a sentence."""
        notes = list(self.claim.unknown)
        if self.claim.method is None:
            used = {*self.rule.terms, "speedup", "batch", "context", "tensor_parallel", PLAIN_TPOT}
            unused = [_LABELS[name] for name in self.claim.numbers if name not in used]
            notes += [f"{', '.join(unused)} not used"] if unused else []
            notes.append("without a known method, drafts that a pass of the target verifies are assumed")
        return "".join(f"; {each}" for each in notes)


def _edge(enough: Callable[[float], bool], best: float, worst: float) -> float | None:
    """Value between `best` and `worst` where `enough` begins to fail, by bisection; None if it fails at `best` too."""
    if not enough(best):
        return None
    if enough(worst):
        return worst
    for _ in range(50):
        middle = (best + worst) / 2
        best, worst = (middle, worst) if enough(middle) else (best, middle)
    return best


def _not_decidable(claim: SpeedupClaim, missing: str, because: str = "") -> ClaimVerdict:
    text = f"{NOT_DECIDABLE}: {missing} missing"
    nothing: dict[str, Any] = dict.fromkeys((
        "needs", "needed", "decided_by", "deciding_bound", "bound_free", "bound_draft", "bound_batch", "bound",
        "needed_acceptance", "needed_cost_ratio", "needed_plain_tpot_ms", "plain_tpot_limit_ms",
    ))  # fmt: skip
    about = f"without {missing} there is nothing to compare the claim with{because}"
    return ClaimVerdict(
        **_stated(claim), verdict=text, kind=NOT_DECIDABLE, missing=missing, inequality="", sentence=about, sources=(), **nothing
    )


def _stated(claim: SpeedupClaim) -> dict[str, Any]:
    counts = {name: int(claim.numbers[name].value) if name in claim.numbers else None
              for name in ("batch", "context", "tensor_parallel")}  # fmt: skip
    words = {name: claim.words.get(name) for name in ("model", "gpu", "engine", "source")}
    terms = {name: stated.value for name, stated in claim.numbers.items() if name in TERMS or name == PLAIN_TPOT}
    return {
        "row": claim.row, "method": claim.words.get("method"), "draft": claim.words.get("draft", claim.draft), **words, **counts,
        "terms": terms, "speedup": claim.number("speedup"),
    }  # fmt: skip


def _sources(claim: SpeedupClaim) -> Iterable[str]:
    if claim.shape is not None:
        own = "" if "dtype" in claim.words else ", assumed"
        types = claim.shape.dtype if claim.shape.weights is None else f"weights in {claim.shape.weights.dtype}"
        yield f"shape of {claim.words['model']}: its published configuration ({types}{own})"
    if isinstance(claim.device, Device):
        yield f"peaks of {claim.device.name}: {claim.device.source}"


def _rounded(value: float, better: int) -> str:
    """Three digits after the point of small numbers, rounded so that the condition is not stricter than needed."""
    digits = 3 if value < 10 else 1
    scaled = value * 10**digits
    whole = math.floor(scaled + 1e-6) if better > 0 else math.ceil(scaled - 1e-6)
    return f"{whole / 10**digits:.{digits}f}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
