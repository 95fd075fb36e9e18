"""Verdicts on claims: impossible, possible under a condition, plausible, or not decidable.

A claim is compared with

* the largest speed-up of its method (`claim_bound`): above it the claim is impossible, for any engine;
* the formula of the method's paper (`claim_formula`) with the stated terms, the others at their most favourable values: above it
  the claim needs a term to be better than stated;
* the same for a baseline at the peaks of the device, if model and GPU are stated: the draft's bytes are read at the full bandwidth,
  and the tokens of a verification of the whole batch take at least their arithmetic at the peak rate. A slower baseline allows a
  larger speed-up, so a claim above this bound needs a plain time per token of at least the value that is given.

No efficiency of kernels or engines enters. With `plain_tpot_ms` stated, the last comparison is exact and part of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.audit.claims import SpeedupClaim
from model.audit.peak_times import PeakTimes, bytes_read
from model.hardware.devices import Device
from model.methods import registry
from model.methods.claim_bounds import NO_DRAFT, TERMS, WHOLE, ClaimRule, ClaimTerms, Limit

IMPOSSIBLE, NEEDS, PLAUSIBLE, NOT_DECIDABLE = KINDS = ("impossible", "needs", "plausible", "not decidable")
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


@dataclass(frozen=True)
class ClaimVerdict:
    """Verdict on a claim, with the numbers that it rests on; None where a number has no value.

    Parameters
    ----------
    verdict
        `impossible`, `plausible`, `needs NAME >= x`, `needs NAME <= x` or `not decidable: NAME missing`.
    kind
        Its first word or words (`KINDS`).
    needs, needed
        The term that the claim needs, and its least (or largest) value.
    missing
        What the claim does not state, if it is not decidable.
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
    for name, stated in (("speedup", claim.numbers), ("method", claim.words)):
        if name not in stated:
            return _not_decidable(claim, name)
    assert claim.method is not None
    rule = registry.parameters(claim.method).CLAIMS
    registry.check_complete(claim.method)
    bound = registry.method(claim.method).claim_bound
    if rule is None or bound is None:
        return _not_decidable(claim, f"a bound of method {claim.method}")
    for name in rule.required:
        if name not in claim.numbers:
            return _not_decidable(claim, name)
    return _Audit(claim, rule, bound, registry.method(claim.method).claim_formula or bound).verdict()


class _Audit:
    """The comparisons of one claim, whose method has a bound."""

    def __init__(
        self, claim: SpeedupClaim, rule: ClaimRule, bound: Callable[[ClaimTerms], Limit], formula: Callable[[ClaimTerms], Limit]
    ) -> None:
        self.claim, self.rule, self._bound, self._formula = claim, rule, bound, formula
        self.speedup, self.least = _known(claim.number("speedup")), max(_known(claim.number("speedup", -1)), 1e-9)
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
        claim = self.claim
        if claim.shape is None or claim.draft_shape is None or "cost_ratio" not in self.rule.terms:
            return None
        if self.target is not None and self.drafter is not None:
            ratio = self.drafter.reading(1) / self.target.reading(1)
        else:
            batch, context = claim.count("batch", 1), claim.count("context", 0)
            ratio = bytes_read(claim.draft_shape, 1, batch) / bytes_read(claim.shape, 1, batch, context)
        return self.formula(ClaimTerms(self.printed, draft=ratio)).value

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
        return self.solve(name, self.printed, self.plain_s()) if name in self.rule.terms else None

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

    def verdict(self) -> ClaimVerdict:
        """Compare the claim with bound, formula, and the peaks of the device."""
        limit = self.bound(self.terms(self.lenient, self.plain_s(1)))
        if (found := self._contradiction()) is not None:
            return self._made(IMPOSSIBLE, limit, found, "the claim contradicts itself")
        if self.least > limit.value * (1 + ROUNDING):
            because = f"{self._said} is more than the {limit.value:.4g} that is possible"
            return self._made(IMPOSSIBLE, limit, limit.inequality, because)
        formula = self.formula(self.terms(self.lenient, self.plain_s(1)))
        if self.least > formula.value * (1 + ROUNDING):
            return self._above_formula(limit)
        if self.target is not None and self.plain_s() is None:
            at_peaks = self.formula(self.terms(self.lenient, self.target.seconds(1)))
            if self.least > at_peaks.value * (1 + ROUNDING):
                seconds = self.needed_plain_s()
                if seconds is not None:
                    return self._needing(PLAIN_TPOT, 1e3 * seconds, limit)
        for group in self.rule.needs:
            if not {*group} & {*self.printed} and not self._cost_is_known(group):
                value = self.solve(group[0], self.printed, self.plain_s())
                worst = 1.0 if group[0] == "cost_ratio" else TERMS[group[0]].worst
                if self.value({**self.printed, group[0]: worst}, self.plain_s()) < self.least:
                    return self._needing(group[0], TERMS[group[0]].best if value is None else value, limit)
        return self._made(PLAUSIBLE, limit, formula.inequality, f"{self._said} is within the bound of {formula.value:.4g}")

    @property
    def _said(self) -> str:
        return f"a speed-up of {self.speedup:g} (at least {self.least:.6g} before rounding)"

    def _cost_is_known(self, group: Sequence[str]) -> bool:
        """True for the cost ratio of a claim whose draft needs no model, or is compared by its bytes."""
        return "cost_ratio" in group and (self.claim.draft == NO_DRAFT or self.drafter is not None)

    def _contradiction(self) -> str | None:
        """Inequality that two stated numbers of the claim violate; None if they agree."""
        for name in self.rule.attained:
            if name in self.printed:
                low = self.claim.numbers[name].at(-TERMS[name].better)
                others = {key: value for key, value in self.lenient.items() if key != name}
                limit = self.bound(ClaimTerms(others).free())
                if low > limit.value * (1 + ROUNDING):
                    return f"{_LABELS[name]} {self.printed[name]:g} exceeds what the other terms allow: {limit.inequality}"
        if self.target is not None and (plain := self.plain_s(1)) is not None and plain < self.target.seconds(1) * (1 - ROUNDING):
            least = 1e3 * self.target.seconds(1)
            return f"plain TPOT {1e3 * plain:.4g} ms < {least:.4g} ms, the least time of a plain pass at the device's peaks"
        return None

    def _above_formula(self, limit: Limit) -> ClaimVerdict:
        """Verdict on a claim that is possible, but not by the formula with its stated terms."""
        for group in self.rule.needs:
            for name in group:
                if name in self.printed and (value := self.solve(name, self.printed, self.plain_s())) is not None:
                    return self._needing(name, value, limit)
        length = self.printed.get("draft_length", 0.0)
        if not length:  # the speed-up is between the best of the draft lengths that were tried, and the bound of all
            return self._needing(self.rule.needs[0][0], TERMS[self.rule.needs[0][0]].best, limit)
        speeds = {float(each): self.value({**self.printed, "draft_length": each}, self.plain_s()) for each in range(int(length))}
        enough = [each for each, value in speeds.items() if value >= self.least] or [max(speeds, key=lambda each: speeds[each])]
        return self._needing("draft_length", max(enough), limit)

    def _needing(self, name: str, value: float, limit: Limit) -> ClaimVerdict:
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
        text = f"needs {_LABELS[name]} {sign} {shown}"
        if name == PLAIN_TPOT and self.target is not None:
            text += " ms"
            least = 1e3 * self.target.seconds(1)
            at_peaks = self.value(self.lenient, self.target.seconds(1))
            more = f", {value / least:.3g} times the {least:.4g} ms of the device's peaks (over these the bound is {at_peaks:.4g})"
        else:
            more = f", and states {self.printed[name]:g}" if name in self.printed else ""
        return self._made(NEEDS, limit, formula.inequality, f"{self._said} {text}{more}", needs=name, needed=value, text=text)

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
        self, kind: str, limit: Limit, inequality: str, because: str, *, needs: str | None = None, needed: float | None = None,
        text: str | None = None,
    ) -> ClaimVerdict:  # fmt: skip
        seconds = self.needed_plain_s() if self.plain_s() is None else None
        return ClaimVerdict(
            **_stated(self.claim), verdict=kind if text is None else text, kind=kind, needs=needs, needed=_finite(needed),
            missing=None, bound_free=_finite(self.free.value), bound_draft=_finite(self.draft_bound),
            bound_batch=_finite(self.batch_bound), bound=_finite(limit.value),
            needed_acceptance=_finite(self.needed("acceptance_rate")), needed_cost_ratio=_finite(self.needed("cost_ratio")),
            needed_plain_tpot_ms=None if seconds is None else 1e3 * seconds,
            plain_tpot_limit_ms=None if self.target is None else 1e3 * self.target.seconds(1),
            inequality=inequality, sentence=f"{because}: {inequality}{self._reading()}",
            sources=(self.rule.source, *_sources(self.claim)),
        )  # fmt: skip


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


def _not_decidable(claim: SpeedupClaim, missing: str) -> ClaimVerdict:
    text = f"{NOT_DECIDABLE}: {missing} missing"
    nothing: dict[str, Any] = dict.fromkeys((
        "needs", "needed", "bound_free", "bound_draft", "bound_batch", "bound", "needed_acceptance", "needed_cost_ratio",
        "needed_plain_tpot_ms", "plain_tpot_limit_ms",
    ))  # fmt: skip
    about = f"without {missing} there is nothing to compare the claim with"
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


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
