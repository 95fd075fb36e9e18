"""Explanation of a speed-up: terms add up, known terms are found, and shares are those of a cooperative game."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model.base.checks import ParameterError
from model.engines import law_fit, step_law, step_terms
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.speedups import claim_shares, explanation
from model.speedups.claim_shares import Setting
from model.speedups.explanation import TERMS, MeasuredSpeedup
from tests.support.tiers import examples

KERNELS = KernelSource("llama-3.1-8b", "h100")
MINE = Setting("llama-3.1-8b", "h100", 3, (0.6,), batch=8, engine="vllm")
PAPER = Setting("llama-2-13b", "a100", 5, (0.85,), batch=1, draft="llama-68m")


@cache
def priors(engine: str = "any") -> StepLaw:
    return law_fit.fit(None, "priors", unit="step_ms", kernels=KERNELS, engine=engine)


def engine_like(number: int, batch: float, length: int, **factors: float) -> tuple[MeasuredSpeedup, dict[str, float]]:
    """Two runs of a made-up engine (one draw of the priors, scaled), with errors, and the true extra times of its terms."""
    law, random = priors(), np.random.default_rng(number)
    one = {name: values[[number % values.size]] * factors.get(name, 1.0) for name, values in law.draws.items()}
    plain, drafting = (explanation.step_parts(law, batch, k, k, 1000.0, one) for k in (0, length))
    before, now = (float(each.total[0]) * math.exp(one["noise"][0] * random.standard_t(4)) for each in (plain, drafting))
    mean = 1 + 0.6 * length
    measured = MeasuredSpeedup(before, now / mean, mean, length, sequences=batch)
    extra = {name: float(getattr(drafting, name)[0] - getattr(plain, name)[0]) / before for name in plain._fields}
    return measured, extra


def fitted_terms(measured: MeasuredSpeedup, seed: int = 0) -> explanation.TermsOfSpeedup:
    return explanation.explain(measured, explanation.fitted(measured, KERNELS, "any", seed), fitted_here=True)


# --- Terms ---


@settings(max_examples=examples(40), deadline=None)
@given(
    plain=st.floats(1e-3, 0.1), ratio=st.floats(0.2, 3.9), length=st.integers(1, 8), share=st.floats(0, 1),
    batch=st.integers(1, 64), waiting=st.floats(0, 0.5),
)  # fmt: skip
def test_terms_add_up_to_the_measured_step(
    plain: float, ratio: float, length: int, share: float, batch: int, waiting: float
) -> None:
    speedup = min(ratio, length + 1.0)
    measured = MeasuredSpeedup(plain, plain / speedup, 1 + share * length, length, None, batch, 1000.0, waiting)
    found = explanation.explain(measured, priors())
    assert [term.name for term in found.terms] == [*TERMS]
    assert sum(term.value for term in found.terms) == pytest.approx(measured.steps, rel=1e-9)
    assert sum(term.plain for term in found.terms) == pytest.approx(1, rel=1e-9)
    assert sum(term.extra for term in found.terms) == pytest.approx(measured.steps - 1, rel=1e-9, abs=1e-9)
    assert measured.mean_acceptance_length / sum(term.value for term in found.terms) == pytest.approx(speedup, rel=1e-9)
    assert found.term("stragglers").value == pytest.approx(waiting * measured.steps)
    for term in found.terms:
        assert term.low <= term.high
        assert term.extra == pytest.approx(term.value - term.plain, abs=1e-9 * max(1.0, abs(term.value)))


@pytest.mark.parametrize(
    ("factors", "batch", "largest"),
    [({"draft_pass": 6.0, "round": 0.1}, 1, "draft"), ({"draft_pass": 0.02, "round": 60.0}, 1, "overhead"),
     ({"draft_pass": 0.02, "round": 0.02}, 128, "verify")],
)  # fmt: skip
def test_a_dominating_term_is_named(factors: dict[str, float], batch: float, largest: str) -> None:
    for number in (1, 2):
        measured, extra = engine_like(number, batch, 3, **factors)
        assert max(extra, key=lambda name: extra[name]) == largest
        # A law that knows each coefficient to 5 %.
        law, random = priors(), np.random.default_rng(number)
        known = {
            name: values[number] * factors.get(name, 1.0) * np.exp(0.05 * random.standard_normal(64))
            for name, values in law.draws.items()
        }  # fmt: skip
        found = explanation.explain(measured, replace(law, draws=known))
        assert found.largest.name == largest
    if largest == "draft":  # with priors of all engines, two measured runs are enough to see it
        assert fitted_terms(measured).largest.name == largest


@pytest.mark.slow
def test_intervals_cover_known_terms_at_their_rate() -> None:
    # 60 made-up engines from the priors: an 80 % interval covers 48 +- 3.1 of them; each of three terms has a binomial test at
    # 1e-4.
    covered = dict.fromkeys(("verify", "draft", "overhead"), 0)
    number, surely = 60, []
    for index in range(number):
        measured, extra = engine_like(4 * index, (1.0, 8.0, 32.0)[index % 3], (2, 3, 5)[index // 3 % 3])
        found = fitted_terms(measured, seed=index)
        for name in covered:
            covered[name] += found.term(name).extra_low <= extra[name] <= found.term(name).extra_high
        if not found.rivals:
            surely.append(max(extra, key=lambda name: extra[name]) == found.largest.name)
    for name, count in covered.items():
        assert stats.binomtest(count, number, 0.8).pvalue > 1e-4, (name, count)
    # Without rivals a wrong name needs both intervals to miss: at most 1 in 10 of them.
    assert len(surely) > number / 4
    assert np.mean(surely) > 0.9


def test_parts_of_a_step_are_the_sums_of_their_coefficients() -> None:
    law = replace(priors(), kernels=None, experts=None)
    of = {"weights": 0.01, "ridge_tokens": 1e12, "step": 1e-3, "sequence": 1e-4, "token": 1e-5, "round": 2e-3, "draft_pass": 5e-4}
    parts = explanation.step_parts(law, 8, 3, 2, 1000, {name: np.array([value]) for name, value in of.items()})
    assert [float(each[0]) for each in parts] == pytest.approx([0.01 + 32e-5, 2 * 5e-4, 1e-3 + 8e-4 + 2e-3])
    plain = explanation.step_parts(law, 8, 0, 0, 1000, {name: np.array([value]) for name, value in of.items()})
    assert [float(each[0]) for each in plain] == pytest.approx([0.01 + 8e-5, 0, 1e-3 + 8e-4])


def test_overhead_holds_the_prompts_of_the_tokens_of_a_step() -> None:
    # Steps of 10 ms; with 9 running, each token waits for the prompts of 8 others: 0.8 ms. A step with drafts emits 2 tokens.
    of = {"weights": 0.01, "ridge_tokens": 1e12, "step": 0.0, "sequence": 0.0, "token": 0.0, "round": 0.0, "draft_pass": 0.0}
    draws = {name: np.full(4, value) for name, value in (of | {"prompt": 1e-4, "noise": 1e-9}).items()}
    law = replace(priors(), unit="tpot_ms", kernels=None, coefficients=of | {"prompt": 1e-4}, draws=draws)
    measured = MeasuredSpeedup(10.8e-3, 5.8e-3, 2.0, 3, sequences=9)
    found = explanation.explain(measured, law)
    overhead = found.term("overhead")
    assert (overhead.value, overhead.plain) == pytest.approx((1.6 / 10.8, 0.8 / 10.8))
    assert found.term("rest").value == pytest.approx(0, abs=1e-12)
    assert sum(term.value for term in found.terms) == pytest.approx(measured.steps)


def test_intervals_hold_four_fifths_of_the_draws() -> None:
    low, high = explanation.interval(np.arange(1000.0))
    assert (low, high) == pytest.approx((100, 899), abs=1)


def test_two_runs_leave_what_only_their_sum_determines() -> None:
    measured = MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3, sequences=8)
    found = fitted_terms(measured)
    assert found.indistinct == (("verify", "draft", "overhead"),)
    # A law that knows each coefficient tells them apart.
    law = priors()
    sure = {name: np.full(64, float(np.median(values))) for name, values in law.draws.items()}
    assert explanation.explain(measured, replace(law, draws=sure)).indistinct == ()


def test_terms_that_may_be_larger_are_rivals() -> None:
    clear = fitted_terms(MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3, sequences=8))
    assert (clear.largest.name, clear.rivals) == ("draft", ())
    unclear = fitted_terms(MeasuredSpeedup(7.2e-3, 2.0e-3, 3.9, 3))
    assert unclear.rivals
    for term in unclear.terms:
        assert (term in unclear.rivals) == (term is not unclear.largest and term.extra_high >= unclear.largest.extra_low)


def test_speedups_by_length_contain_the_measured_one() -> None:
    measured, _ = engine_like(8, 8.0, 3)
    for rates in ((explanation.constant_rate(measured.mean_acceptance_length, 3),), (0.8, 0.5, 0.4)):  # the second one is shorter
        found = dict(explanation.speedups_by_length(priors(), measured, rates, 8))
        assert found[3] == pytest.approx(measured.speedup, rel=1e-12)
        assert [*found] == [*range(1, 9)]
    for draft_s in (None, 2e-3):
        static = replace(measured, waiting_share=0.2, draft_s=draft_s)
        found = dict(explanation.speedups_by_length(priors(), static, (0.6,), 8))
        assert found[3] == pytest.approx(static.speedup, rel=1e-12)


def test_a_draft_of_one_pass_costs_the_same_at_every_length() -> None:
    law = priors()
    for passes in (0, 1):
        short, long = (explanation.step_parts(law, 1, length, passes, 1000).draft for length in (2, 6))
        assert np.array_equal(short, long)
    assert np.all(explanation.step_parts(law, 1, 4, 0, 1000).draft == 0)


@given(length=st.integers(1, 16), share=st.floats(0.0, 1.0))
def test_constant_rate_inverts_the_acceptance_length(length: int, share: float) -> None:
    mean = 1 + share * length
    rate = explanation.constant_rate(mean, length)
    assert float(step_terms.acceptance_length(min(max(rate, 1e-12), 1 - 1e-12), 0.0, length)) == pytest.approx(mean, rel=1e-6)


# --- Measured drafting ---


@settings(max_examples=examples(30), deadline=None)
@given(share=st.floats(0.0, 0.9), ratio=st.floats(0.3, 2.0), batch=st.integers(1, 64), waiting=st.floats(0, 0.3))
def test_measured_drafting_is_the_term_and_the_rest_has_the_remainder(
    share: float, ratio: float, batch: int, waiting: float
) -> None:
    plain = MeasuredSpeedup(0.01, 0.01 / ratio, 2.4, 3, None, batch, 1000.0, waiting)
    timed = replace(plain, draft_s=share * plain.busy_s)
    law = priors()
    before, found = explanation.explain(plain, law), explanation.explain(timed, law)
    draft = found.term("draft")
    assert draft.value == pytest.approx(share * plain.busy_s / 0.01, rel=1e-9)
    assert draft.kind == "measured"
    assert sum(term.value for term in found.terms) == pytest.approx(timed.steps, rel=1e-9)
    for name in ("verify", "overhead", "stragglers"):  # of a law that these runs did not change
        assert found.term(name).value == pytest.approx(before.term(name).value, rel=1e-12)
    moved = found.term("rest").value - before.term("rest").value
    assert moved == pytest.approx(before.term("draft").value - draft.value, abs=1e-9)
    # Its interval is that of one measurement, whose relative error the law draws: 1 to 3 %.
    assert draft.high - draft.low <= 0.2 * draft.value
    assert (draft.high > draft.low) == (share > 0)


def test_measured_drafting_narrows_what_two_runs_leave_open() -> None:
    for draft_s in (2e-3, 5e-3):
        measured = MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3, sequences=8)
        open_, known = fitted_terms(measured), fitted_terms(replace(measured, draft_s=draft_s))

        def width(found: explanation.TermsOfSpeedup) -> float:
            return found.term("draft").extra_high - found.term("draft").extra_low

        assert width(known) < 0.5 * width(open_)
        assert known.term("draft").value == pytest.approx(draft_s / 8e-3)
        others = sum(known.term(name).extra for name in ("verify", "overhead", "rest"))
        assert others == pytest.approx(measured.steps - 1 - draft_s / 8e-3, rel=1e-9)
        assert not any("draft" in group for group in known.indistinct)


@pytest.mark.slow
def test_intervals_cover_known_terms_at_their_rate_with_measured_drafting() -> None:
    # As without it: 60 made-up engines, 80 % intervals, a binomial test at 1e-4 for each term.
    covered, number, random = dict.fromkeys(("verify", "draft", "overhead"), 0), 60, np.random.default_rng(5)
    for index in range(number):
        length = (2, 3, 5)[index // 3 % 3]
        measured, extra = engine_like(4 * index, (1.0, 8.0, 32.0)[index % 3], length)
        noise = float(priors().draws["noise"][4 * index % priors().draws["noise"].size])
        true = extra["draft"] * measured.plain_tpot_s
        timed = replace(measured, draft_s=min(true * math.exp(noise * random.standard_normal()), 0.95 * measured.busy_s))
        try:
            found = fitted_terms(timed, seed=index)
        except ParameterError:  # errors of measurement leave less than the device's peaks allow
            number -= 1
            continue
        for name in covered:
            covered[name] += found.term(name).extra_low <= extra[name] <= found.term(name).extra_high
    assert number > 50
    for name, count in covered.items():
        assert stats.binomtest(count, number, 0.8).pvalue > 1e-4, (name, count)


def test_the_cell_without_its_drafting_has_the_errors_of_both_measurements() -> None:
    measured = MeasuredSpeedup(8e-3, 6e-3, 2.0, 3, draft_s=3e-3)
    cells = measured.cells()
    assert cells.values.tolist() == pytest.approx([8, 9])
    assert cells.draft_passes.tolist() == [0, 0]
    assert cells.draft_length.tolist() == [0, 3]
    random = np.random.default_rng(0)
    left = 12 * np.exp(0.01 * random.standard_normal(100_000)) - 3 * np.exp(0.01 * random.standard_normal(100_000))
    assert 0.01 / math.sqrt(cells.weight[1]) == pytest.approx(np.std(np.log(left)), rel=0.02)


def test_speedups_by_length_scale_measured_drafting_with_its_passes() -> None:
    law = priors()
    for passes, ratio in ((None, 2.0), (1, 1.0), (0, 1.0)):
        measured = MeasuredSpeedup(8e-3, 6e-3, 2.4, 3, passes, 8, draft_s=6e-3)
        rate = explanation.constant_rate(2.4, 3)
        found = dict(explanation.speedups_by_length(law, measured, (rate,), 8))
        assert found[3] == pytest.approx(measured.speedup, rel=1e-12)
        # What a step takes at K = 6 grows by the verification of 3 more tokens, and by as many passes.
        point = {name: np.array([value]) for name, value in law.coefficients.items()}
        short, long = (explanation.step_parts(law, 8, length, 0, 1000.0, point) for length in (3, 6))
        target = (measured.busy_s - 6e-3) * float(long.total[0] / short.total[0])
        tokens = explanation.acceptance_length((rate,), 6)
        assert found[6] == pytest.approx(8e-3 * tokens / (target + ratio * 6e-3), rel=1e-9)


def test_parts_of_foreign_laws_are_measured_only_where_cells_determine_them() -> None:
    drafting = explanation.explain(MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3), step_law.load("vllm-llama-3.1-8b-eagle3-h100"))
    assert drafting.term("draft").kind == "measured"
    assert "at this batch and draft length" not in drafting.term("draft").source
    plain = explanation.explain(MeasuredSpeedup(16e-3, 12e-3, 2.4, 3, sequences=4), step_law.load("vllm-minimax-m3-fp8-b200"))
    assert plain.term("draft").kind == "prior"  # its cells are all of plain decoding
    assert "draft_pass, which the cells do not determine" in plain.term("draft").source
    assert plain.term("verify").source.endswith("none of them at this batch and draft length")
    assert {term.kind for term in explanation.explain(MeasuredSpeedup(8e-3, 6e-3, 2, 3), priors()).terms[:3]} == {"prior"}


# --- Shares ---


@given(values=st.lists(st.floats(-5, 5), min_size=16, max_size=16), count=st.integers(0, 4))
def test_shapley_values_are_averages_over_orders(values: list[float], count: int) -> None:
    names = "abcd"[:count]

    def value(chosen: frozenset[str]) -> np.ndarray:
        return np.array(values[sum(1 << "abcd".index(name) for name in chosen)])

    found = claim_shares.shapley(names, value)
    averages = dict.fromkeys(names, 0.0)
    orders = list(itertools.permutations(names))
    for order in orders:
        for place, name in enumerate(order):
            averages[name] += float(value(frozenset(order[: place + 1])) - value(frozenset(order[:place]))) / len(orders)
    for name in names:
        assert float(found[name]) == pytest.approx(averages[name], abs=1e-12)
    total = float(value(frozenset(names)) - value(frozenset()))
    assert sum(map(float, found.values())) == pytest.approx(total, abs=1e-12)


def test_shares_add_up_and_change_sign_with_the_sides() -> None:
    there = claim_shares.shares(MINE, 1.3, PAPER, 3.0)
    back = {share.setting: share for share in claim_shares.shares(PAPER, 3.0, MINE, 1.3)}
    assert {share.setting for share in there} == {
        "model", "GPU", "draft", "draft length", "acceptance", "batch", "engine", "rest"
    }  # fmt: skip
    assert sum(share.share for share in there) == pytest.approx(math.log(1.3 / 3.0), abs=1e-12)
    for share in there:
        other = back[share.setting]
        assert other.share == pytest.approx(-share.share, abs=1e-12)
        assert (other.low, other.high) == pytest.approx((-share.high, -share.low), abs=1e-12)
        assert (other.mine, other.claimed) == (share.claimed, share.mine)
    sizes = [abs(share.share) for share in there[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert there[-1].setting == "rest"


def test_equal_sides_have_no_shares_but_rest() -> None:
    (only,) = claim_shares.shares(MINE, 1.5, MINE, 1.5)
    assert (only.setting, only.share, only.low, only.high) == ("rest", 0.0, 0.0, 0.0)
    (rest,) = claim_shares.shares(MINE, 1.5, MINE, 3.0)
    assert rest.share == pytest.approx(math.log(0.5))


def test_a_single_difference_has_the_whole_predicted_change() -> None:
    other = replace(MINE, batch=64.0)
    batch, rest = claim_shares.shares(MINE, 1.3, other, 1.1)
    law = priors("vllm")
    steps = []
    for side in (MINE, other):
        plain, drafting = (explanation.step_parts(law, side.batch, k, k, 1000.0).total for k in (0, 3))
        steps.append(np.log(drafting / plain))
    change = steps[1] - steps[0]  # more sequences make the step with drafts longer, so that fewer are faster
    assert batch.share == pytest.approx(float(change.mean()), abs=1e-12)
    assert (batch.low, batch.high) == pytest.approx(explanation.interval(change), abs=1e-12)
    assert batch.share > 0
    assert rest.share == pytest.approx(math.log(1.3 / 1.1) - batch.share, abs=1e-12)


def test_acceptance_alone_has_the_share_of_the_acceptance_lengths() -> None:
    other = replace(MINE, acceptance=(0.9,))
    acceptance, rest = claim_shares.shares(MINE, 1.2, other, 1.9)
    ratio = MINE.acceptance_length / other.acceptance_length
    assert acceptance.share == pytest.approx(math.log(ratio), abs=1e-12)
    assert acceptance.low == pytest.approx(acceptance.high, abs=1e-12)  # no cost changes, so nothing is uncertain
    assert rest.share == pytest.approx(math.log(1.2 / 1.9) - math.log(ratio), abs=1e-12)


def test_mixtures_of_sides_draft_at_most_their_tokens_in_passes() -> None:
    assert [replace(MINE, draft_passes=passes).passes for passes in (None, 0, 2, 3, 7)] == [3, 0, 2, 3, 3]
    found = claim_shares.shares(replace(MINE, draft_length=2), 1.3, replace(MINE, draft_length=5, draft_passes=5), 1.5)
    assert sum(share.share for share in found) == pytest.approx(math.log(1.3 / 1.5), abs=1e-12)


def test_sides_whose_mixtures_cannot_exist_have_one_share_of_the_hardware() -> None:
    # 40 heads of Llama-2-13B are not divisible by 16 devices, which Llama-3.1-70B is split over.
    mine = replace(MINE, model="llama-2-13b", tensor_parallel=1)
    other = replace(MINE, model="llama-3.1-70b", gpu="a100", tensor_parallel=16)
    found = claim_shares.shares(mine, 1.3, other, 2.0)
    assert [share.setting for share in found] == ["model, GPU, tensor parallel, draft", "rest"]
    assert sum(share.share for share in found) == pytest.approx(math.log(1.3 / 2.0), abs=1e-12)


# --- Errors ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MeasuredSpeedup(8e-3, 1e-3, 2.0, 3), "speedup must be at most draft_length + 1 = 4"),
        (lambda: MeasuredSpeedup(8e-3, 4e-3, 4.5, 3), "acceptance_length must be at most draft_length + 1 = 4"),
        (lambda: MeasuredSpeedup(8e-3, 4e-3, 0.5, 3), "acceptance_length"),
        (lambda: MeasuredSpeedup(8e-3, 4e-3, 2.0, 3, 4), "draft_passes must be between 0 and draft_length=3, got 4; leave it out"),
        (lambda: MeasuredSpeedup(8e-3, 4e-3, 2.0, 3, draft_s=8e-3), "must take less than the step, 8 ms"),
        (lambda: MeasuredSpeedup(8e-3, 4e-3, 2.0, 3, draft_s=-1e-3), "draft_s must be at least 0"),
        (lambda: fitted_terms(MeasuredSpeedup(8e-3, 4e-3, 2.0, 3, draft_s=6e-3)), "less its measured drafting of 6 ms must"),
        (lambda: replace(MINE, acceptance=()), "acceptance is never assumed"),
        (lambda: replace(MINE, engine="mine"), "unknown engine 'mine'"),
        (lambda: claim_shares.log_speedup(replace(MINE, gpu="h1000")), "h1000"),
        (lambda: claim_shares.shares(MINE, 1.0, PAPER, 9.0), "claimed speedup must be at most draft_length + 1 = 6"),
    ],
)  # fmt: skip
def test_impossible_inputs_are_refused_in_one_line(wrong: object, message: str) -> None:
    assert callable(wrong)
    with pytest.raises(ParameterError) as error:
        wrong()
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
