"""Sentences of an explanation: what takes longest or is lost against a claim, and what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from model.engines import engine_priors, law_report
from model.engines.step_law import StepLaw
from model.speedups import claim_shares, explanation
from model.speedups.budget_effect import BudgetOfStep
from model.speedups.claim_shares import Share
from model.speedups.explanation import MeasuredSpeedup, TermsOfSpeedup

CLOSE = 0.02
"""Relative difference of speed-ups below which draft lengths count as equally fast."""
MISFIT = 0.25
"""Share of a measured plain step by which a law of other runs may miss it, before its terms are doubted."""
_NAMES = {
    "verify": "verification", "draft": "drafting", "overhead": "engine overhead", "stragglers": "waiting for the slowest sequence",
}  # fmt: skip
_CHANGES = {
    "overhead": "look at the engine: CUDA graphs for draft and verification, overlapped scheduling, sampling on the GPU",
    "stragglers": "use continuous batching, which replaces sequences that have ended",
}
_ACCEPTANCE = "each step emits few of the tokens that it verifies: use a draft that is trained for these requests"
_OF_SHARES = {
    "model": "the claim is about {claimed}: look for one about {mine}, or use a draft that is smaller relative to it",
    "GPU": "a plain step on {claimed} takes another time, relative to which drafts and overhead differ: look for a claim"
    " about {mine}",
    "tensor parallel": "split the model over {claimed} devices as the claim does, where the latency is worth it",
    "draft": "use a draft as the claim's ({claimed}; here: {mine}) if there is one for this model",
    "draft length": "draft {claimed} tokens per step, as the claim does",
    "acceptance": "use a draft that is trained for these requests, or measure the claim's prompts: each step emits fewer of the"
    " tokens that it verifies than in the claim",
    "batch": "a claim about {claimed} running sequences does not hold at {mine}: draft fewer tokens at this load, or switch drafts"
    " off above it",
    "context": "compare at the claim's context, {claimed} positions: reading the cache takes another share of the step at {mine}",
    "engine": "look at the engine's time per step and per draft pass: those of {claimed} are lower relative to a plain step",
}  # fmt: skip
_OF_REST = (
    "look for what the settings given do not say: the claim's plain decoding (a slow baseline), a tree of drafts, its prompts, or"
    " another version of the engine"
)


_IMPOSSIBLE = "do not aim at the claim, which contradicts itself: its acceptance does not allow its speed-up (`sim audit`)"


def name_of(term: str, *, fitted_here: bool) -> str:
    """Name of a term in a sentence."""
    if term != "rest":
        return _NAMES[term]
    also = "" if fitted_here else ", differences to the law's runs"
    return f"the rest (errors of measurement, prompts, waiting{also})"


def verdict(terms: TermsOfSpeedup, *, fitted_here: bool) -> str:
    """The speed-up, its step, and the largest extra time with those that may be larger."""
    measured, largest = terms.measured, terms.largest
    slower = "" if measured.speedup >= 1 else " (slower)"
    opening = (
        f"Speed-up {measured.speedup:.2f} over plain decoding{slower}: a step emits {measured.mean_acceptance_length:.2f} of at"
        f" most {measured.draft_length + 1} tokens and takes {measured.steps:.2f} plain steps."
    )
    if largest.extra <= 0:
        return f"{opening} No term takes longer than in a plain step."
    rivals = " or ".join(name_of(term.name, fitted_here=fitted_here) for term in terms.rivals)
    return (
        f"{opening} The largest extra time is {name_of(largest.name, fitted_here=fitted_here)}: {largest.extra:.2f} plain"
        f" steps (80 % interval {largest.extra_low:.2f} to {largest.extra_high:.2f}) of {measured.steps - 1:.2f}"
        f"{f'; by their intervals {rivals} may be larger' if rivals else ''}."
    )


def claim_verdict(mine: float, claimed: float, shares: Sequence[Share]) -> str:
    """The ratio of both speed-ups, and the setting that has most of it, in its direction."""
    opening = f"Measured {mine:.2f}x, claimed {claimed:.2f}x: a factor of {mine / claimed:.2f}."
    settings, rest = [share for share in shares if share.setting != claim_shares.REST], shares[-1]
    if not settings:
        return f"{opening} The two sides have the same settings: nothing that was given explains a difference."
    top = settings[0]
    said = f"{opening} The setting with the largest share is {_factor(top)}."
    against = [share for share in settings if share.share * math.log(mine / claimed) > 0]
    if against and against[0] is not top:
        said += f" It goes the other way; of those that go this way the largest is {_factor(against[0])}."
    if rest.low <= 0 <= rest.high:
        return f"{said} What is left, a factor of {math.exp(rest.share):.2f}, is within the uncertainty."
    if abs(rest.share) > abs(top.share):
        return f"{said} More than that, a factor of {math.exp(rest.share):.2f}, is not explained by the settings given."
    return f"{said} A factor of {math.exp(rest.share):.2f} is not explained by the settings given."


def _factor(share: Share) -> str:
    return (
        f"{share.setting} ({share.mine} instead of {share.claimed}): a factor of {math.exp(share.share):.2f} (80 % interval"
        f" {math.exp(share.low):.2f} to {math.exp(share.high):.2f})"
    )


def advice(
    terms: TermsOfSpeedup, by_length: Sequence[tuple[int, float]], law: StepLaw, shares: Sequence[Share], *, fitted_here: bool,
    possible: bool = True,
) -> tuple[str, ...]:  # fmt: skip
    """What to change, the largest loss first: against the claim if there is one, else acceptance or a term of the step.

    `possible` says that the claim's acceptance allows its speed-up.
    """
    found, measured, largest = [], terms.measured, terms.largest
    best, fastest = max(by_length, key=lambda each: each[1])
    own = dict(by_length)[measured.draft_length]
    shorter = best < measured.draft_length and fastest > own * (1 + CLOSE)
    misfit = terms.term("rest").plain
    if not fitted_here and abs(misfit) > MISFIT:
        given, plain = 1e3 * measured.plain_tpot_s * (1 - misfit), 1e3 * measured.plain_tpot_s
        found.append(
            f"doubt these terms first: law {law.name} has a plain step of {given:.3g} ms, the measured one takes {plain:.3g} ms;"
            " take a law of this model, GPU and engine, or give --model and --gpu without --engine-law."
        )
    lost = bool(shares) and sum(share.share for share in shares) < 0
    if lost:
        found.append(_against_claim(shares, possible=possible))
    if math.log((measured.draft_length + 1) / measured.mean_acceptance_length) > math.log(max(measured.steps, 1.0)):
        found.append(f"acceptance costs more than the time of the step: {_ACCEPTANCE}.")
    if largest.extra > 0:
        change = _change(largest.name, measured, law, shorter=shorter, fitted_here=fitted_here)
        found.append(f"of the step's time, {_label(largest.name)} grows most: {change}." if found else f"{change}.")
    said = [] if lost or not shares else ["Nothing is lost against the claim: the measured speed-up is as high."]
    said += [f"To change it: {found[0]}", *(f"{each[0].upper()}{each[1:]}" for each in found[1:])] if found else []
    if fastest < 1:
        said.append(f"By these terms plain decoding is fastest here; the best draft length, {best}, gives {fastest:.2f}x.")
    elif fastest > own * (1 + CLOSE):
        said.append(f"By these terms a draft length of {best} is fastest: {fastest:.2f}x instead of {own:.2f}x.")
    else:
        said.append(f"By these terms no draft length is faster than {measured.draft_length} by more than {100 * CLOSE:.0f} %.")
    return tuple(said)


def of_budget(budget: BudgetOfStep) -> list[str]:
    """Remarks on a context budget: what it changes in time and memory, and that acceptance is not that of whole contexts."""
    effect = budget.effect
    if effect.positions >= effect.context:
        return [f"the draft context budget covers the context of {effect.context:,.0f} positions: it changes nothing"]
    said = [
        f"the draft context budget saves drafting time: {budget.drafting:.3f} plain steps instead of {budget.whole_drafting:.3f};"
        f" with drafts of the whole context the speed-up would be {budget.whole_speedup:.2f} instead of {budget.speedup:.2f}, if as"
        " many tokens were accepted"
    ]
    most, whole = effect.most_sequences, effect.whole_most_sequences
    if most is not None and whole is not None:
        said.append(f"memory: {most:,} sequences fit if the draft keeps the positions of its budget, {whole:,} if it keeps all")
    said.append(
        "acceptance falls with the budget: the measured one is of drafts within it, and how much higher it would be without is not"
        " known; measure it with another budget"
    )
    return said


def _label(term: str) -> str:
    return _NAMES.get(term, "the rest")


def _against_claim(shares: Sequence[Share], *, possible: bool) -> str:
    """What to change for the largest loss against a claim; the rest counts where its interval leaves out 0."""
    lost = [share for share in shares if share.share < 0 and (share.setting != claim_shares.REST or share.high < 0)]
    most = min(lost, key=lambda share: share.share, default=None)
    if most is None or most.setting == claim_shares.REST:
        none = "" if most else "no setting that was given lowers the speed-up; "
        return f"{none}{_OF_REST if possible else _IMPOSSIBLE}."
    if most.setting == "engine" and engine_priors.ANY in (most.mine, most.claimed):
        side = "--engine of the measured run" if most.mine == engine_priors.ANY else "engine in --claim"
        return f"give {side}: priors of all engines are compared with those of one."
    several = "run the claim's model and devices, or look for a claim about these ({mine})"
    return _OF_SHARES.get(most.setting, several).format(mine=most.mine, claimed=most.claimed) + "."


def _change(term: str, measured: MeasuredSpeedup, law: StepLaw, *, shorter: bool, fitted_here: bool) -> str:
    """What to change for a term; `shorter` says that a shorter draft is faster."""
    if term == "verify":
        many = "" if measured.sequences == 1 else "s"
        wide = f"a pass over {measured.draft_length + 1} tokens of {measured.sequences:g} sequence{many}"
        remedy = "draft fewer tokens at this batch" if shorter else "a draft that is accepted more often makes up for it"
        return f"{wide} takes longer than one over a token of each: {remedy}"
    if term == "draft":
        several = "use a smaller draft, or one that drafts several tokens in a pass"
        smaller = {0: "use drafts that are looked up in less time", 1: "use a smaller draft"}.get(measured.passes, several)
        return f"{smaller}, or draft fewer tokens" if shorter else smaller
    return _of_rest(measured, law, fitted_here=fitted_here) if term == "rest" else _CHANGES[term]


def _of_rest(measured: MeasuredSpeedup, law: StepLaw, *, fitted_here: bool) -> str:
    """What to do about time that the step law does not explain, by what the law is of."""
    if fitted_here:
        return (
            "kernels and priors do not explain these two runs: check that model, GPU, batch and prompts are those of both, and"
            " measure the time of steps without prompts"
        )
    if explanation.has_cells_of(law, measured):
        return (
            f"law {law.name} has cells at this batch and draft length, which these runs differ from: check the engine's version,"
            " its settings and the prompts, or fit the law to these runs too (`calibrate engine fit`)"
        )
    return (
        f"law {law.name} has no cell at this batch and draft length ({law_report.extent(law).partition(';')[0]}): fit a law to"
        " cells of this engine (`calibrate engine fit`), or give --model and --gpu without --engine-law"
    )
