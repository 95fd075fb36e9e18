"""Explanation of a measured speed-up: what a step of speculative decoding takes, term by term, and why it differs from a claim.

A step emits AL tokens per sequence (the acceptance length, bonus token counted). With times in units of a step of plain decoding,

    speed-up = AL / (verify + draft + overhead + stragglers + rest),

where `verify` is the target's pass over K + 1 tokens per sequence, `draft` the passes of the draft, `overhead` what the engine adds
to a step (the coefficients `step`, `sequence` and `round` of `model.engines.step_terms`, and `prompt` in a law whose unit contains
prompts), `stragglers` the time lost by waiting for the slowest sequence of a static batch, and `rest` what a step law does not
account for: errors of measurement, prompts that it does not contain, waiting.
The sum of the terms equals the measured time exactly, and so does that of their extra times over a plain step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.engines import cells, engine_priors, kernel_times, law_fit, law_report, step_terms
from model.engines.cells import MOST_DRAFT, Cells, Floats
from model.engines.kernel_times import USUAL_CONTEXT, KernelSource
from model.engines.step_law import SHARE, StepLaw
from model.methods.speculative import static_batches
from model.methods.speculative.algorithm import Parameters
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid

TERMS = ("verify", "draft", "overhead", "stragglers", "rest")
TOLERANCE = 1.001
"""Factor by which a printed acceptance length or speed-up may exceed its bound, because both are rounded."""
FASTEST = 1.1
"""Factor by which a measured speed-up may exceed the tokens per step: noise of two measurements [-]."""
FASTER_THAN_PEAK = 1.05
"""Factor by which a measured step may be shorter than its pass at the published peaks of a device: errors of measurement."""
_PARTS = ("verify", "draft", "overhead")
INDISTINCT = 0.5
"""Terms are not told apart if the standard deviation of their sum is below this share of the sum of their standard deviations
(equal independent terms: 0.71 for two of them, 0.58 for three)."""
UNCERTAIN = 0.02
"""Half of the interval of a term [plain steps] below which it counts as determined."""
NEAR = 1.1
"""Factor within which the batch of a law's cell counts as that of the measured runs."""


# --- Inputs ---------------------------------------------------------------------------------------------------------------


def constant_rate(mean_acceptance_length: float, draft_length: int) -> float:
    """Acceptance rate alpha whose acceptance length (1 - alpha^(K + 1)) / (1 - alpha) is the one given [-].

    >>> round(constant_rate(3.3616, 4), 6)
    0.8
    """
    checks.whole("draft_length", draft_length, 1, MOST_DRAFT)
    check_length(mean_acceptance_length, draft_length)
    if mean_acceptance_length >= draft_length + 1:
        return 1.0

    def beyond(rate: float) -> float:
        return float(step_terms.length_by_position([rate] * draft_length, [draft_length])[0]) - mean_acceptance_length

    from scipy import optimize  # half a second, which most commands need not wait for

    return float(optimize.brentq(beyond, 0.0, 1.0))


def check_length(mean_acceptance_length: float, draft_length: int) -> None:
    """Raise ParameterError unless 1 <= AL <= K + 1."""
    checks.number("acceptance_length", mean_acceptance_length, 1)
    if mean_acceptance_length > (draft_length + 1) * TOLERANCE:
        raise ParameterError(
            f"acceptance_length must be at most draft_length + 1 = {draft_length + 1} (bonus token counted), got"
            f" {mean_acceptance_length:g}; give the draft length of that run, or the length of that log"
        )


def check_passes(draft_passes: int | None, draft_length: int, name: str = "draft_passes") -> None:
    """Raise ParameterError unless 0 <= passes <= K; None is one pass per drafted token.

    >>> check_passes(None, 3), check_passes(3, 3)
    (None, None)
    """
    if draft_passes is None:
        return
    try:
        checks.whole(name, draft_passes, 0, draft_length, "draft_length")
    except ParameterError as error:
        remedy = "leave it out for one pass per drafted token, or give 1 if one pass drafts all tokens, 0 for n-grams"
        raise ParameterError(f"{error}; {remedy}") from None


def acceptance_length(rates: Sequence[float], draft_length: int) -> float:
    """Tokens per step of drafts of this length, whose positions beyond the rates have the last one.

    >>> acceptance_length([0.5, 0.5], 1), acceptance_length([0.5], 2)
    (1.5, 1.75)
    """
    extended = [*rates, *[rates[-1]] * max(draft_length - len(rates), 0)]
    return float(step_terms.length_by_position(extended, [draft_length])[0])


@dataclass(frozen=True)
class MeasuredSpeedup:
    """Two measured runs of one engine: plain decoding, and speculative decoding at one draft length.

    Parameters
    ----------
    plain_tpot_s, tpot_s
        Seconds per output token and sequence, without and with drafts.
    mean_acceptance_length
        Tokens per step and sequence of the second run, bonus token counted.
    draft_length, draft_passes, sequences, context
        As in `model.engines.cells.Cells`.
    waiting_share
        Share of the second run's time that is lost by waiting for the slowest sequence of a static batch; 0 in continuous batching.
    draft_s
        Measured seconds of drafting in a step, of all running sequences; None: not measured.
    """

    plain_tpot_s: float
    tpot_s: float
    mean_acceptance_length: float
    draft_length: int
    draft_passes: int | None = None
    sequences: float = 1.0
    context: float = float(USUAL_CONTEXT)
    waiting_share: float = 0.0
    draft_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("plain_tpot_s", "tpot_s"):
            checks.number(name, getattr(self, name), 1e-9, 1e6)
        checks.whole("draft_length", self.draft_length, 1, MOST_DRAFT)
        check_length(self.mean_acceptance_length, self.draft_length)
        checks.number("waiting_share", self.waiting_share, -1, 1)
        check_passes(self.draft_passes, self.draft_length)
        check_speedup(self.speedup, self.draft_length)
        if self.draft_s is not None:
            checks.number("draft_s", self.draft_s, 0)
            if self.draft_s >= self.busy_s:
                raise ParameterError(
                    f"the measured drafting of a step must take less than the step, {1e3 * self.busy_s:.4g} ms (time per output"
                    f" token x acceptance length), got {1e3 * self.draft_s:.4g} ms; check batch and draft length, and that both"
                    " times are of one run"
                )

    @property
    def passes(self) -> int:
        """Passes of the draft per step."""
        return self.passes_at(self.draft_length)

    def passes_at(self, draft_length: int) -> int:
        """Passes of this draft for another draft length: one per drafted token, or as many as here if they are fewer."""
        if self.draft_passes is None or self.draft_passes == self.draft_length > 1:
            return draft_length
        return min(self.draft_passes, draft_length)

    @property
    def speedup(self) -> float:
        """Time per token of plain decoding over that of the second run [-]."""
        return self.plain_tpot_s / self.tpot_s

    @property
    def steps(self) -> float:
        """Time of a step of the second run, in plain steps [-]."""
        return self.mean_acceptance_length * self.tpot_s / self.plain_tpot_s

    @property
    def busy_s(self) -> float:
        """Seconds of a step of the second run without waiting."""
        return self.tpot_s * (1 - self.waiting_share) * self.mean_acceptance_length

    def cells(self) -> Cells:
        """Two cells to fit a law to: seconds of a plain step, and of a speculative step without waiting and measured drafting.

        Both the step and its drafting have the error of a measurement, relative to each. That of their difference is larger
        relative to it, so that its cell has a lower weight.
        """
        drafting = 0.0 if self.draft_s is None else self.draft_s
        left = self.busy_s - drafting
        weight = max(left**2 / (self.busy_s**2 + drafting**2), 1e-6)
        return Cells.of(
            "step_ms", [self.sequences] * 2, [0, self.draft_length], [1e3 * self.plain_tpot_s, 1e3 * left],
            draft_passes=[0, self.passes if self.draft_s is None else 0], context=[self.context] * 2, weight=[1, weight],
        )  # fmt: skip


def check_speedup(speedup: float, draft_length: int, name: str = "speedup") -> None:
    """Raise ParameterError for a speed-up that no step of K + 1 tokens can have."""
    checks.number(name, speedup, 1e-6)
    if speedup > (draft_length + 1) * TOLERANCE:
        raise ParameterError(
            f"{name} must be at most draft_length + 1 = {draft_length + 1}, the tokens that a step can emit, got {speedup:.4g};"
            " check the draft length, and that both times are per output token"
        )


def check_emitted(speedup: float, mean_acceptance_length: float) -> None:
    """Raise ParameterError for a speed-up above the tokens per step: a step with drafts is not faster than a plain one."""
    if speedup > mean_acceptance_length * FASTEST:
        raise ParameterError(
            f"speed-up must be at most the {mean_acceptance_length:.3g} tokens that a step emits, got {speedup:.3g}: check that"
            " both times are per output token, of the same load, and that the acceptance is of the second run"
        )


def waiting_share(draft_length: int, rate: float, sequences: int, tokens: int, cost_ratio: float = 0.0) -> float:
    """Share of a static batch's time that is lost by waiting for its slowest sequence, at one constant acceptance rate [-].

    >>> round(waiting_share(3, 0.79, 8, 128, 0.1), 3)
    0.082
    """
    parameters, cost = Parameters(layers=1, draft_length=draft_length, sequences=sequences, batching="static"), UnitCost(
        1, cost_ratio=cost_ratio
    )
    found = static_batches.expected(parameters, tokens, Iid(rate), cost)
    return float(static_batches.straggler_loss(parameters, cost, found.rounds, found.time, tokens))


# --- Terms of a measured speed-up -----------------------------------------------------------------------------------------


class StepParts(NamedTuple):
    """Seconds of a step by part; arrays of shape (draws,)."""

    verify: Floats
    draft: Floats
    overhead: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the step."""
        return self.verify + self.draft + self.overhead


def step_parts(
    law: StepLaw, sequences: float, draft_length: int, passes: float, context: float, draws: Mapping[str, Floats] | None = None
) -> StepParts:
    """Seconds of a step by part, for draws of the law's coefficients (default: the law's own) [s]."""
    each = {name: values[:, None] for name, values in (law.draws if draws is None else draws).items()}
    one = np.ones(1)
    shape = kernel_times.step_shape(law.kernels, sequences * one, draft_length * one, passes * one, context * one)
    overhead = each["step"] + each["sequence"] * sequences + each["round"] * (draft_length > 0)
    target = step_terms.target_seconds(each, shape, law.experts)
    draft = passes * step_terms.draft_seconds(each, shape)
    count = overhead.shape[0]
    return StepParts(*(np.broadcast_to(values, (count, 1))[:, 0] for values in (target - overhead, draft, overhead)))


@dataclass(frozen=True)
class StepTerm:
    """A term of a step, in units of a plain step: mean, and 80 % interval.

    `plain` is the same part of a plain step, and `extra` the difference; their sums over terms are 1 and the rest of the step.
    """

    name: str
    value: float
    low: float
    high: float
    plain: float
    extra: float
    extra_low: float
    extra_high: float
    kind: str
    source: str


@dataclass(frozen=True)
class TermsOfSpeedup:
    """Terms of a measured speed-up; `indistinct` are groups of terms of which only the sum is known."""

    measured: MeasuredSpeedup
    terms: tuple[StepTerm, ...]
    indistinct: tuple[tuple[str, ...], ...]

    @property
    def largest(self) -> StepTerm:
        """Term with the largest extra time over a plain step."""
        return max(self.terms, key=lambda term: term.extra)

    @property
    def rivals(self) -> tuple[StepTerm, ...]:
        """Other terms whose extra time may be as large as the largest, by their intervals."""
        largest = self.largest
        return tuple(term for term in self.terms if term is not largest and term.extra_high >= largest.extra_low)

    def term(self, name: str) -> StepTerm:
        """The term of this name."""
        return next(term for term in self.terms if term.name == name)


@lru_cache(maxsize=32)
def fitted(measured: MeasuredSpeedup, kernels: KernelSource, engine: str, seed: int = 0) -> StepLaw:
    """Step law of the two measured runs: kernels, priors of the engine, and two cells.

    Raises ParameterError if a step is shorter than its pass at the peaks of the device.
    """
    cells = measured.cells()
    shape = kernel_times.step_shape(kernels, cells.sequences, cells.draft_length, cells.draft_passes, cells.context)
    assert shape.bound is not None
    less = "" if measured.draft_s is None else f" less its measured drafting of {1e3 * measured.draft_s:.3g} ms"
    for name, seconds, bound in zip(("plain step", f"step with drafts{less}"), cells.values / 1e3, shape.bound, strict=True):
        if seconds * FASTER_THAN_PEAK < bound:
            also = ", batch and draft length" if name.endswith(" ms") else ""
            raise ParameterError(
                f"a {name} must take at least {1e3 * bound:.3g} ms, a pass of {kernels.model} at the peaks of {kernels.gpu}, got"
                f" {1e3 * seconds:.3g} ms; check the unit of the times, the model, its dtype and tensor parallel size{also}"
            )
    return law_fit.fit(measured.cells(), "these two runs", kernels=kernels, engine=engine, seed=seed)


def explain(measured: MeasuredSpeedup, law: StepLaw, *, fitted_here: bool = False, seed: int = 0) -> TermsOfSpeedup:
    """Divide the time of a measured step into terms by a step law; `fitted_here` says that the law is `fitted` to these runs.

    Drafting is as measured where it was, with the error that the law has for a measured cell. The seed is that of these errors.
    """
    plain = step_parts(law, measured.sequences, 0, 0, measured.context)
    drafting = step_parts(law, measured.sequences, measured.draft_length, measured.passes, measured.context)
    if measured.draft_s is not None:
        random = random_streams.stream(seed, "error of measured drafting", 0)
        error = np.exp(law.draws["noise"] * random.standard_normal(law.draws["noise"].size))
        drafting = drafting._replace(draft=measured.draft_s * error / error.mean())
    unit, total, share = measured.plain_tpot_s, measured.steps, measured.waiting_share
    none = np.zeros_like(plain.verify)
    prompts = law.prompt_seconds(measured.sequences)[1]
    plain = plain._replace(overhead=plain.overhead + prompts)
    drafting = drafting._replace(overhead=drafting.overhead + measured.mean_acceptance_length * prompts)
    now: dict[str, Floats] = {name: each / unit for name, each in drafting._asdict().items()}
    now |= {"stragglers": none + share * total, "rest": total * (1 - share) - drafting.total / unit}
    before = {name: each / unit for name, each in plain._asdict().items()} | {"stragglers": none, "rest": 1 - plain.total / unit}
    sources = _sources(law, measured, fitted_here)
    found = [_term(name, now[name], before[name], *sources[name]) for name in TERMS]
    extras = {name: now[name] - before[name] for name in TERMS}
    return TermsOfSpeedup(measured, tuple(found), _indistinct(extras))


def _term(name: str, now: Floats, before: Floats, kind: str, source: str) -> StepTerm:
    extra = now - before
    low, high = interval(now)
    extra_low, extra_high = interval(extra)
    return StepTerm(
        name, float(now.mean()), low, high, float(before.mean()), float(extra.mean()), extra_low, extra_high, kind, source
    )


def interval(values: Floats) -> tuple[float, float]:
    """Interval of probability `SHARE` of draws."""
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2], method="hazen")
    return float(low), float(high)


def has_cells_of(law: StepLaw, measured: MeasuredSpeedup) -> bool:
    """True if the law was fitted to cells of this batch, both of plain decoding and of this draft length."""
    if law.cells is None:
        return False
    ratio = law.cells.sequences / measured.sequences
    near = law.cells.draft_length[(ratio <= NEAR) & (ratio >= 1 / NEAR)]
    return bool(np.any(near == 0) and np.any(near == measured.draft_length))


def _sources(law: StepLaw, measured: MeasuredSpeedup, fitted_here: bool) -> dict[str, tuple[str, str]]:
    """Kind (measured, published, assumed, prior) and source of each term."""
    waiting = ("published", "formula of static batches with a constant acceptance rate")
    found = {"stragglers": waiting if measured.waiting_share else ("assumed", "continuous batching: no sequence waits for another")}
    found["rest"] = ("measured", "the measured time less the other terms")
    if fitted_here and law.kernels is not None:
        kernels = kernel_times.provenance(law.kernels)
        engine = f"prior of {law.engine or engine_priors.ANY} engines, with these two runs"
        found["verify"] = (_kind_of(kernels), f"{kernels}, with these two runs")
        drafts = "prior of the time per draft pass, with these two runs"
        found["draft"] = ("prior", f"kernels of {law.kernels.draft}, and {drafts}" if law.kernels.draft else drafts)
        found["overhead"] = ("prior", engine)
    else:
        found |= _sources_of_law(law, measured)
    if measured.draft_s is not None:
        found["draft"] = ("measured", "time of drafting in the log of this run")
    return found


def _kind_of(provenance: str) -> str:
    return "assumed" if provenance.startswith("assumed") else "measured"


def _sources_of_law(law: StepLaw, measured: MeasuredSpeedup) -> dict[str, tuple[str, str]]:
    """Kind and source of the parts of a step by a law that was not fitted to these runs.

    A part is measured if the law's cells determine its largest coefficient.
    """
    if law.cells is None:
        return dict.fromkeys(_PARTS, ("prior", f"step law {law.name} of priors"))
    name = f"step law {law.name} of {law.cells.size} cells"
    name += "" if has_cells_of(law, measured) else ", none of them at this batch and draft length"
    unknown, found = law_report.of_priors(law), {}
    for part, sizes in _seconds_by_coefficient(law, measured).items():
        largest = max(sizes, key=lambda coefficient: sizes[coefficient])
        if largest not in unknown:
            found[part] = ("measured", name)
        elif largest == "kernels" and law.kernels is not None:
            kernels = kernel_times.provenance(law.kernels)
            found[part] = (_kind_of(kernels), f"{kernels}, in {name}")
        else:
            found[part] = ("prior", f"prior of {largest}, which the cells do not determine, in {name}")
    return found


def _seconds_by_coefficient(law: StepLaw, measured: MeasuredSpeedup) -> dict[str, dict[str, float]]:
    """Seconds of a step with drafts by part and coefficient, as far as they are sums: which one is the largest [s]."""
    one, of = np.ones(1), {name: float(value) for name, value in law.coefficients.items()}
    sequences, length = measured.sequences * one, measured.draft_length * one
    shape = kernel_times.step_shape(law.kernels, sequences, length, measured.passes * one, measured.context * one)
    amounts = {"weights": one, "token": shape.tokens, "kv_position": shape.sequences * shape.context}
    if law.experts is not None:
        dependence = of["expert_correlation"], of["expert_skew"]
        amounts["experts"] = step_terms.expert_share_read(law.experts, sequences, length, *dependence)
    if shape.kernels is not None:
        amounts["kernels"] = shape.kernels
    drafting = {"draft_pass": one} | ({} if shape.draft_kernels is None else {"kernels": shape.draft_kernels})
    prompts = measured.mean_acceptance_length * cells.served(law.unit, sequences)
    overhead = {"step": one, "sequence": sequences, "round": one, "prompt": prompts}
    return {
        part: {name: of[name] * float(amount[0]) for name, amount in each.items() if name in of}
        for part, each in zip(_PARTS, (amounts, drafting, overhead), strict=True)
    }


def _half_width(values: Floats) -> float:
    low, high = interval(values)
    return (high - low) / 2


def _indistinct(extras: Mapping[str, Floats]) -> tuple[tuple[str, ...], ...]:
    """Groups of terms that the draws know better as a sum than each: errors of one are made up for by the others."""
    uncertain = [name for name in _PARTS if _half_width(extras[name]) > UNCERTAIN]
    groups: list[set[str]] = []
    for size in range(2, len(uncertain) + 1):
        for names in itertools.combinations(uncertain, size):
            together = float(np.std(sum(extras[name] for name in names)))
            if together < INDISTINCT * sum(float(np.std(extras[name])) for name in names):
                joined = [group for group in groups if group & {*names}]
                groups = [group for group in groups if group not in joined] + [set(names).union(*joined)]
    return tuple(tuple(name for name in TERMS if name in group) for group in groups)


def speedups_by_length(law: StepLaw, measured: MeasuredSpeedup, rates: Sequence[float], most: int) -> list[tuple[int, float]]:
    """Predicted speed-up at draft lengths 1..most: measured plain step, and the law's steps with the measured rest.

    Measured drafting takes the same time per pass at each length; the law gives the remainder.
    """
    point = {name: np.array([value]) for name, value in law.coefficients.items()}

    def target_and_draft(length: int) -> tuple[float, float]:
        passes = measured.passes_at(length)
        parts = step_parts(law, measured.sequences, length, passes, measured.context, point)
        if measured.draft_s is None:
            return float(parts.total[0]), 0.0
        return float(parts.total[0] - parts.draft[0]), measured.draft_s * (passes / measured.passes if measured.passes else 1.0)

    target, draft = target_and_draft(measured.draft_length)
    factor = (measured.busy_s - draft) / target
    given, found = acceptance_length(rates, measured.draft_length), []
    for length in range(1, most + 1):
        tokens = acceptance_length(rates, length) * measured.mean_acceptance_length / given
        target, draft = target_and_draft(length)
        busy = (factor * target + draft) / (1 - measured.waiting_share)
        found.append((length, measured.plain_tpot_s * tokens / busy))
    return found
