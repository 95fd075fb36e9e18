"""Step laws: fits to synthetic cells, their intervals, invariances, files, and the choice of the next cell.

Truths of synthetic engines are sums of plain terms that the law does not contain in this form (a knee at the ridge, one number of
experts), with errors of 2 %; seeds are fixed, so that results do not vary from run to run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import conversion, kernel_times, law_fit, law_report, next_cell, step_law, step_terms
from model.engines.cells import Cells, Floats
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.engines.step_terms import PRIORS, RoutedExperts
from tests.support.law_fits import fit_alone

BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 5)
GRID = np.array([(batch, length) for batch in BATCHES for length in LENGTHS], dtype=float).T
NOISE = 0.02
UNITS = ("tpot_ms", "step_ms", "output_tokens_per_s")


def dense(random: np.random.Generator) -> tuple[Callable[[Floats, Floats], Floats], RoutedExperts | None]:
    """Seconds of a dense model: reading or computing, whichever is longer, and an engine."""
    base, ridge = random.uniform(3e-3, 30e-3), random.uniform(120, 420)
    fixed, sequence, drafting, verifying = (
        base * random.uniform(*ends) for ends in ((0.05, 0.5), (0, 0.005), (0.02, 0.12), (0, 0.08))
    )

    def seconds(number: Floats, length: Floats) -> Floats:
        reading = np.maximum(base, base * number * (length + 1) / ridge)
        return reading + fixed + sequence * number + drafting * length + verifying * (length > 0)

    return seconds, None


def mixture(random: np.random.Generator) -> tuple[Callable[[Floats, Floats], Floats], RoutedExperts | None]:
    """Seconds of a mixture of experts whose tokens choose independently."""
    base, number_, active = random.uniform(3e-3, 30e-3), int(random.choice([32, 64, 128, 256])), int(random.choice([4, 6, 8]))
    token, drafting, reading = (base * random.uniform(*ends) for ends in ((0.002, 0.008), (0.02, 0.12), (0.5, 4)))

    def seconds(number: Floats, length: Floats) -> Floats:
        tokens = number * (length + 1)
        return base + token * tokens + drafting * length + reading * (1 - (1 - active / number_) ** tokens)

    return seconds, RoutedExperts(number_, active)


def synthetic(seed: int, *, lengths_known: bool = True) -> tuple[Cells, RoutedExperts | None]:
    """All cells of a synthetic engine, in one of the units."""
    random = np.random.Generator(np.random.Philox(seed))
    seconds, experts = (dense, mixture)[seed % 2](random)
    number, length = GRID
    emitted = step_terms.acceptance_length(random.uniform(0.5, 0.9), 0.0, length)
    unit = UNITS[seed % 3]
    values = cell_tables.to_unit(unit, seconds(number, length), number, emitted) * np.exp(
        NOISE * random.standard_normal(number.size)
    )
    return Cells.of(unit, number, length, values, mean_acceptance_length=emitted if lengths_known else None), experts


def chosen(lengths: tuple[int, ...], batches: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(np.isin(GRID[1], lengths) & np.isin(GRID[0], batches))


SIX, SIXTEEN = chosen((0, 3), (1, 8, 64)), chosen((0, 1, 3, 5), (1, 4, 16, 64))
SEEDS = range(6)


@functools.cache
def fitted(seed: int, known: bool, six: bool, left_out: bool = False) -> tuple[StepLaw, Cells]:
    table, experts = synthetic(seed, lengths_known=known)
    fit = law_fit.fit if left_out else fit_alone
    return fit(table[SIX if six else SIXTEEN], "synthetic", experts=experts), table


def unseen(seed: int, known: bool, six: bool) -> tuple[Floats, Floats, Floats]:
    """Relative errors, coverage and relative half-widths of the intervals of the cells that were not fitted."""
    law, table = fitted(seed, known, six)
    other = table[~(SIX if six else SIXTEEN)]
    found = law.predict(other)
    covered = (found.low <= other.values) & (other.values <= found.high)
    return found.values / other.values - 1, covered, (found.high - found.low) / 2 / found.values


@pytest.mark.parametrize("known", [True, False], ids=["lengths_known", "lengths_fitted"])
@pytest.mark.parametrize(("six", "median", "worst"), [(True, 0.03, 0.16), (False, 0.022, 0.12)], ids=["six_cells", "sixteen_cells"])
def test_unseen_cells_are_predicted_within_stated_intervals(known: bool, six: bool, median: float, worst: float) -> None:
    errors, covered, widths = (np.stack(each) for each in zip(*(unseen(seed, known, six) for seed in SEEDS), strict=True))
    assert np.median(np.abs(errors)) <= median
    assert np.abs(errors).max() <= worst
    assert 0.65 <= covered.mean() <= 0.95
    assert np.median(widths) <= 3 * np.median(np.abs(errors))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), known=st.booleans())
def test_any_synthetic_engine_is_recovered_from_twelve_cells(seed: int, known: bool) -> None:
    table, experts = synthetic(seed, lengths_known=known)
    some = chosen((0, 1, 4), (1, 4, 16, 64))
    law = fit_alone(table[some], "synthetic", experts=experts)
    other = table[~some]
    found = law.predict(other)
    errors = np.abs(found.values / other.values - 1)
    assert np.median(errors) < 0.05
    assert errors.max() < 0.3
    assert np.mean((found.low <= other.values) & (other.values <= found.high)) > 0.2


def test_no_experts_term_is_noticed_in_the_errors() -> None:
    table, _ = synthetic(1)
    without = law_fit.fit(table[SIXTEEN], "plain")
    with_, _ = fitted(1, True, False, left_out=True)
    other = table[~SIXTEEN]
    plain, better = (np.median(np.abs(law.predict(other).values / other.values - 1)) for law in (without, with_))
    assert plain > 1.5 * better
    assert np.median(np.abs(without.left_out)) > np.median(np.abs(with_.left_out))


# --- Invariances ---


def test_same_seed_gives_the_same_law_and_order_of_cells_matters_little() -> None:
    law, table = fitted(0, True, True, left_out=True)
    again = law_fit.fit(table[SIX], "synthetic", experts=law.experts)
    assert step_law.text(again) == step_law.text(law)
    turned = fit_alone(table[np.flatnonzero(SIX)[::-1]], "synthetic", experts=law.experts)
    np.testing.assert_allclose(turned.predict(table).values, law.predict(table).values, rtol=2e-3)


def test_draws_do_not_depend_on_the_last_digits_of_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors round exponentials differently, and so find the maximum with other last digits; draws are from the same chain."""
    law, table = fitted(1, False, True)
    found = law_fit._Posterior.maximum

    def elsewhere(posterior: Any, *given: Any) -> Floats:
        return found(posterior, *given) * (1 + 1e-8)

    monkeypatch.setattr(law_fit._Posterior, "maximum", elsewhere)
    again = fit_alone(table[SIX], "synthetic", experts=law.experts)
    assert again.coefficients != law.coefficients
    for name, draws in law.draws.items():
        assert again.draws[name].tolist() == draws.tolist(), name


def test_time_in_another_scale_gives_the_same_law_in_that_scale() -> None:
    law, table = fitted(3, True, True)
    slower = replace(table, values=table.values * 7)
    found = fit_alone(slower[SIX], "slow", experts=law.experts)
    np.testing.assert_allclose(found.predict(slower).values, 7 * law.predict(table).values, rtol=5e-3)


def test_throughput_and_time_per_token_give_the_same_law() -> None:
    law, table = fitted(0, True, True)
    assert table.unit == "tpot_ms"
    rates = replace(table, unit="output_tokens_per_s", values=1e3 * table.sequences / table.values)
    found = fit_alone(rates[SIX], "rates", experts=law.experts)
    np.testing.assert_allclose(1e3 * table.sequences / found.predict(rates).values, law.predict(table).values, rtol=1e-3)


def test_one_bad_cell_does_not_decide() -> None:
    law, table = fitted(0, True, False)
    values = table.values.copy()
    values[np.flatnonzero(SIXTEEN)[5]] *= 2
    spoiled = law_fit.fit(replace(table, values=values)[SIXTEEN], "spoiled", experts=law.experts)
    assert np.argmax(np.abs(spoiled.left_out)) == 5
    change = spoiled.predict(table).values / law.predict(table).values - 1
    assert np.median(np.abs(change)) < 0.03


def test_a_cell_that_the_law_misses_is_doubted() -> None:
    law, _ = fitted(0, True, True, left_out=True)
    assert law_report.doubts(law) == []
    mixed = Cells.of("tpot_ms", [1, 2, 4], [0, 0, 0], [10.0, 10.0e3, 10.0])
    assert "cell of 2 sequences and draft length 0 by -" in law_report.doubts(law_fit.fit(mixed, "mixed"))[0]


def test_many_cells_are_left_out_in_groups() -> None:
    table, experts = synthetic(0)
    many = table[np.tile(np.arange(table.size), 2)]
    law = law_fit.fit(many, "many", experts=experts)
    assert len(law.left_out) == 2 * table.size > law_fit.MOST_GROUPS
    assert np.median(np.abs(law.left_out)) < 2 * NOISE


def test_repeats_of_a_cell_are_left_out_together() -> None:
    cells = Cells.of("tpot_ms", [1, 1, 16], [0, 0, 0], [9.0, 90.0, 12.0])
    law = law_fit.fit(cells, "repeats")
    alone = float(law_fit.fit(cells[2:], "other").predict(cells[:1]).values[0])
    assert law.left_out[:2] == pytest.approx((alone / 9 - 1, alone / 90 - 1), abs=0.02)
    assert law_fit.fit(cells[:2], "one point").left_out == ()


def test_left_out_error_is_that_of_a_law_without_the_cell() -> None:
    law, table = fitted(3, True, True, left_out=True)
    cells = table[SIX]
    for index in (0, 4):
        rest = np.arange(cells.size) != index
        without = fit_alone(cells[rest], "rest", experts=law.experts)
        error = without.predict(cells[~rest]).values[0] / cells.values[index] - 1
        assert law.left_out[index] == pytest.approx(error, abs=0.02)


def test_weights_say_which_of_two_measurements_counts() -> None:
    cells = Cells.of("step_ms", [1, 1], [0, 0], [10.0, 12.0], weight=[100, 1])
    first, second = (float(law_fit.fit(replace(cells, weight=weight), "two").predict(cells).values[0])
                     for weight in (cells.weight, cells.weight[::-1]))  # fmt: skip
    assert first == pytest.approx(10, rel=0.02)
    assert second == pytest.approx(12, rel=0.02)


def test_acceptance_of_measured_lengths_holds_at_other_draft_lengths() -> None:
    drafted = np.array([0.0, 3, 3])
    emitted = step_terms.acceptance_length(0.45, 0.0, drafted)
    cells = Cells.of("step_ms", [1, 1, 8], drafted, [10.0, 11, 12], mean_acceptance_length=emitted)
    found = law_fit.fit(cells, "steps").acceptance_lengths(Cells.of("step_ms", [1, 1], [1, 6]))[0]
    np.testing.assert_allclose(found, step_terms.acceptance_length(0.45, 0.0, [1, 6]), rtol=0.06)


def test_intervals_hold_the_error_of_a_measurement_and_of_the_distance() -> None:
    law, _ = fitted(1, True, True)
    sure = replace(law, draws={name: np.full(256, law.coefficients.get(name, 0.02)) for name in law.draws})
    near, far = (sure.predict(Cells.of(sure.unit, [number], [3], mean_acceptance_length=[2.5])) for number in (64, 1024))
    quantile = float(stats.t(step_law.DEGREES).ppf(0.9))
    assert np.log(near.high / near.values)[0] == pytest.approx(0.02 * quantile, rel=0.05)
    away = np.hypot(0.02, 4 * step_law.EXTRAPOLATION)
    assert np.log(far.high / far.values)[0] == pytest.approx(away * quantile, rel=0.05)


def test_more_cells_narrow_the_intervals_and_distance_widens_them() -> None:
    few, many = (fitted(1, True, six)[0] for six in (True, False))
    far = Cells.of(few.unit, [16, 1024], [3, 3], mean_acceptance_length=[2.5, 2.5])
    narrow, wide = ((found.high - found.low) / found.values for found in (many.predict(far), few.predict(far)))
    assert narrow[0] < wide[0] < wide[1]
    assert few.predict(far).beyond.tolist() == [0, 4]


# --- Kernels ---

LLAMA = KernelSource("llama-3.1-8b", "h100")


@functools.cache
def prior_law() -> StepLaw:
    return law_fit.fit(None, "none", unit="tpot_ms", kernels=LLAMA)


def test_law_without_cells_is_its_priors() -> None:
    # Tests the sampler: means and standard deviations of 256 draws within five standard errors of the priors'.
    law = prior_law()
    reference = kernel_times.reference_seconds(LLAMA)
    for name in ("step", "sequence", "draft_pass", "noise"):
        drawn = np.log(law.draws[name] / (reference if PRIORS[name].unit == "s" else 1.0))
        prior = PRIORS[name]
        assert abs(drawn.mean() - np.log(prior.median)) < 5 * prior.sd / 16, name
        assert abs(drawn.std() / prior.sd - 1) < 5 / np.sqrt(2 * 256), name
    assert any("priors" in line for line in law_report.sentences(law))
    with pytest.raises(ParameterError, match="a law without cells needs a unit, and a model and a GPU"):
        law_fit.fit(None, "none", unit="tpot_ms")


def test_two_cells_and_kernels_predict_an_engine_around_these_kernels() -> None:
    number, length = GRID
    emitted = step_terms.acceptance_length(0.7, 0.0, length)
    kernels = kernel_times.step_shape(LLAMA, number, length, length, np.full(number.size, np.nan)).kernels
    assert kernels is not None
    seconds = 1.08 * kernels + 1.2e-3 + 2e-5 * number + 4e-4 * length
    table = Cells.of("tpot_ms", number, length, 1e3 * seconds / emitted, mean_acceptance_length=emitted)
    two = chosen((0,), (1,)) | chosen((3,), (64,))
    law = fit_alone(table[two], "two", kernels=LLAMA)
    found = law.predict(table)
    assert np.median(np.abs(found.values / table.values - 1)) < 0.05
    assert np.mean((found.low <= table.values) & (table.values <= found.high)) >= 0.65
    widths = (found.high - found.low) / found.values
    before = prior_law().predict(table)
    assert np.median(widths) < np.median((before.high - before.low) / before.values)


def test_no_prediction_is_faster_than_the_peaks_of_the_device() -> None:
    impossible = Cells.of("step_ms", [1, 8], [0, 0], [0.1, 0.1])  # 16 GB of weights in .1 ms
    law = law_fit.fit(impossible, "fast", kernels=LLAMA)
    shape = kernel_times.step_shape(LLAMA, *(np.array([each]) for each in (1.0, 0.0, 0.0, 1000.0)))
    assert shape.bound is not None
    assert law.predict(impossible).values[0] / 1e3 >= shape.bound[0] >= 15e9 / 3.35e12


# --- Files ---


def test_written_law_predicts_the_same(tmp_path: Path) -> None:
    law, table = fitted(3, False, True, left_out=True)
    found = step_law.load(str(step_law.write(law, tmp_path / "law.json")))
    for one, other in zip(law.predict(table), found.predict(table), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)
    assert step_law.text(found) == step_law.text(law)


def test_a_law_with_zeros_in_its_draws_is_described(tmp_path: Path) -> None:
    """Some draws without noise, or without a term, say that it is not known; all of them, that there is none."""
    law, _ = fitted(3, False, True)
    half, none = np.arange(law.draws["noise"].size) % 2, np.zeros(law.draws["noise"].size)
    for draws, unknown in ((half, True), (none, False)):
        of = replace(law, draws={**law.draws, "noise": law.draws["noise"] * draws, "round": law.draws["round"] * draws})
        found = step_law.load(str(step_law.write(of, tmp_path / "law.json")))
        told = {row["term"]: row for row in law_report.description(found)["coefficients"]}
        assert [told[name]["from"] for name in ("noise", "round")] == ["prior" if unknown else "cells"] * 2
        assert told["noise"]["low"] == 0.0


def _changed(**change: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: document | change


BAD = [
    (lambda document: [], "it is not an engine law"), (_changed(kind="profile"), "it is not an engine law"),
    (_changed(schema_version=9), "schema_version must be 1, got 9"), (_changed(unit="ms"), "unknown unit 'ms'"),
    (_changed(more=1), "unknown key 'more'"), (_changed(draws={}), "draws must have one list for each coefficient"),
    (lambda document: {key: value for key, value in document.items() if key != "cells"}, "cells is missing"),
    (_changed(coefficients={"weight": 1.0}), "draws must have one list"),
    (_changed(experts={"number": 8}), "experts must have the keys"),
    (_changed(kernels={"model": "x"}), "kernels must have the keys"),
    (_changed(experts={"number": 8, "active": 9}), "active_experts must be between 1 and experts=8, got 9"),
    (lambda document: document | {"coefficients": document["coefficients"] | {"step": -1.0}}, "coefficients.step must be between"),
    (lambda document: document | {"draws": {name: [0.0, *drawn[1:]] for name, drawn in document["draws"].items()}},
     "draws.weights[0] must be between 1e-300 and 1e+09, got 0"),
    (_changed(cells=[{"sequences": 1.0}]), "draft_length"), (_changed(facts={"a": 1}), "facts"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_law_is_refused_in_one_line(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    law, _ = fitted(1, True, True)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(change(json.loads(step_law.text(law)))))
    with pytest.raises(ParameterError) as caught:
        step_law.load(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Conversion ---


def test_conversion_to_throughput_and_back_names_prefill() -> None:
    law, table = fitted(0, True, True)
    rates = replace(table, unit="output_tokens_per_s", values=np.full(table.size, np.nan))
    plain = conversion.predict_in_unit(without_prompts(law), rates)
    share = conversion.predict_in_unit(without_prompts(law), rates, 0.1)
    assert "0.0% (assumed) of the time of throughput for prompts" in plain.notes[0]
    assert "10.0% (given) of the time of throughput for prompts" in share.notes[0]
    tpots = without_prompts(law).predict(table).values
    for one, other, tpot, number in zip(plain.rows, share.rows, tpots, table.sequences, strict=True):
        assert one["predicted"] == pytest.approx(1e3 * number / tpot)
        assert other["predicted"] == pytest.approx(0.9 * one["predicted"])
        assert one["low"] <= one["predicted"] <= one["high"]
        assert one["error"] is None


@pytest.mark.parametrize("unit", ["tpot_ms", "output_tokens_per_s"])
@pytest.mark.parametrize("wanted", UNITS)
def test_conversion_counts_the_prompts_that_each_unit_contains(unit: str, wanted: str) -> None:
    # Steps of 10 ms + 1 ms per sequence, which emit 2 tokens with a draft of 3; 50 us of prompts per token.
    law = known_law(unit, prompt=5e-5)
    number, length = np.array([1.0, 8.0, 8.0]), np.array([0.0, 0.0, 3.0])
    asked = Cells.of(wanted, number, length, mean_acceptance_length=[1, 1, 2.0])
    found = conversion.predict_in_unit(law, asked)
    step, emitted = 10e-3 + 1e-3 * number, np.array([1.0, 1.0, 2.0])
    tpot = step / emitted + 5e-5 * (number - 1)
    expected = {"step_ms": 1e3 * step, "tpot_ms": 1e3 * tpot, "output_tokens_per_s": number / (tpot + 5e-5)}[wanted]
    np.testing.assert_allclose([row["predicted"] for row in found.rows], expected, rtol=1e-6)
    assert all(row["low"] <= row["predicted"] <= row["high"] for row in found.rows)
    assert any("(by the law's term `prompt`)" in note for note in found.notes) == (wanted != unit)


# --- Prompts ---


def without_prompts(law: StepLaw) -> StepLaw:
    """The law of an engine that processes no prompts."""
    coefficients, draws = ({name: each for name, each in of.items() if name != "prompt"} for of in (law.coefficients, law.draws))
    return replace(law, coefficients=coefficients, draws=draws)


def known_law(unit: str, **more: float) -> StepLaw:
    """Law of steps of 10 ms, and 1 ms per running sequence, without doubt."""
    of = {"weights": 1e-9, "ridge_tokens": 1e9, "step": 10e-3, "sequence": 1e-3, "token": 0.0, "draft_pass": 0.0, **more}
    return StepLaw("known", unit, of, {name: np.full(8, value) for name, value in {**of, "noise": 1e-3}.items()})


def test_prompts_are_told_from_steps_where_drafts_make_fewer_steps() -> None:
    """Prompts take the same time per token at any draft length, so that cells at several of them tell them from steps."""
    number, length = GRID
    emitted = step_terms.acceptance_length(0.8, 0.0, length)
    step = 10e-3 + 2e-5 * number * (length + 1) + 6e-4 * length

    def error(prompt: float) -> float:
        rates = number / (step / emitted + prompt * number)
        table = Cells.of("output_tokens_per_s", number, length, rates, mean_acceptance_length=emitted)
        found = fit_alone(table[SIXTEEN], "prompts")
        told = float(found.coefficients["prompt"])
        assert told == pytest.approx(prompt, rel=0.35, abs=2e-5)
        return float(np.abs(found.predict(table[~SIXTEEN]).values / rates[~SIXTEEN] - 1).max())

    assert error(0.0) < 0.03
    assert error(3e-4) < 0.03


def test_prompts_pull_every_speedup_towards_one() -> None:
    number = np.array([1.0, 8.0, 64.0])
    speedups = []
    for prompt in (0.0, 1e-4, 1e-3, 1.0):
        law = known_law("output_tokens_per_s", prompt=prompt)
        drafted, plain = (Cells.of(law.unit, number, np.full(3, length), mean_acceptance_length=np.full(3, emitted))
                          for length, emitted in ((3, 2.0), (0, 1.0)))  # fmt: skip
        speedups.append(law.predict(drafted).values / law.predict(plain).values)
    assert speedups[0] == pytest.approx(2)
    assert np.all(np.diff(speedups, axis=0) < 0)
    assert np.abs(speedups[-1] - 1).max() < 0.02


def test_law_without_acceptance_asks_for_it() -> None:
    law = law_fit.fit(Cells.of("step_ms", [1, 8], [0, 3], [10.0, 12.0]), "steps")
    with pytest.raises(ParameterError, match="row 1: mean_acceptance_length is required, because law steps was fitted without"):
        conversion.predict_in_unit(law, Cells.of("tpot_ms", [8], [3]))


# --- The next cell ---


def test_measuring_never_raises_the_expected_loss() -> None:
    law, _ = fitted(1, True, True)
    advice = next_cell.advise(law, BATCHES, LENGTHS)
    assert len(advice.choices) == len(BATCHES)
    assert len(advice.candidates) == len(BATCHES) * len(LENGTHS)
    assert all(each.loss <= advice.loss * (1 + 1e-3) + 1e-9 for each in advice.candidates)
    assert all(each.spread <= advice.spread * (1 + 1e-3) for each in advice.candidates)
    least = min(each.loss for each in advice.candidates)
    slack = max(next_cell.CLOSE * (advice.loss - least), next_cell.RESOLVED)
    close = [each for each in advice.candidates if each.loss <= least + slack]
    first, others = advice.candidates[: len(close)], advice.candidates[len(close) :]
    assert [each.spread for each in first] == sorted(each.spread for each in close)
    assert [each.loss for each in others] == sorted(each.loss for each in others)
    for choice in advice.choices:
        cells = Cells.of(law.unit, np.full(len(LENGTHS), choice.sequences), LENGTHS)
        rates = law.acceptance_lengths(cells, law.draws) / law.draws_of(cells)  # the law is of seconds of a step
        losses = (1 - rates / rates.max(axis=1, keepdims=True)).mean(axis=0)
        assert law.unit == "step_ms"
        assert choice.loss == pytest.approx(losses.min())
        assert choice.draft_length == LENGTHS[int(losses.argmin())]
        assert choice.draft_length in choice.ties
        assert 0 <= choice.loss <= 1
        assert 0 < choice.probability <= 1


def test_choices_do_not_depend_on_the_unit_of_the_law() -> None:
    law, _ = fitted(0, True, True)
    assert law.unit == "tpot_ms"
    by_time, by_rate = (next_cell.advise(replace(without_prompts(law), unit=unit, cells=None), BATCHES, LENGTHS).choices
                        for unit in ("tpot_ms", "output_tokens_per_s"))  # fmt: skip
    for one, other in zip(by_time, by_rate, strict=True):
        assert (one.draft_length, one.ties) == (other.draft_length, other.ties)
        assert one.loss == pytest.approx(other.loss, abs=1e-9)


def test_a_cell_that_was_measured_tells_less_than_one_far_from_all() -> None:
    table, experts = synthetic(1)
    law = fit_alone(table[chosen((0, 3), (1,))], "two", experts=experts)
    spreads = {(each.sequences, each.draft_length): each.spread for each in next_cell.advise(law, BATCHES, LENGTHS).candidates}
    assert max(spreads[64, 3], spreads[16, 3]) < spreads[1, 3] / 1.5


def test_weights_of_draws_are_symmetric_and_conserve_their_mass() -> None:
    rng = np.random.default_rng(3)
    values, noise = rng.normal(0, 0.1, 50), rng.uniform(0.01, 0.03, 50)
    weights = next_cell._weights(values, noise)
    assert (weights >= 0).all()
    assert weights == pytest.approx(weights.T, rel=1e-12)
    error = max(abs(weights.sum(axis=1) - 1).max(), abs(weights.sum(axis=0) - 1).max())
    assert error < 2.0**-next_cell.SCALINGS  # it falls by about half in each step
    # A draw is weighted by how well it explains the measurement: twice as far away, e^3 times less at equal noise.
    even = next_cell._weights(np.array([-0.02, 0.0, 0.02, 0.04]), np.full(4, 0.01))
    scale = np.sqrt(np.diag(even))
    plain = even / scale[:, None] / scale[None, :]
    assert np.log(plain[0, 1] / plain[0, 2]) == pytest.approx((0.04**2 - 0.02**2) / (2 * (0.01**2 + 0.005**2)))


def test_similar_candidates_are_ordered_by_uncertainty_and_others_by_loss() -> None:
    losses, spreads = np.array([0.30, 0.20, 0.21, 0.25, 0.205]), np.array([0.01, 0.05, 0.03, 0.02, 0.04])
    # The loss is 0.30 now: candidates up to 0.20 + 0.1 x (0.30 - 0.20) are about as good as the best.
    assert next_cell._best_first(losses, spreads, 0.30).tolist() == [2, 4, 1, 3, 0]
    assert next_cell._best_first(losses, spreads, 0.20).tolist() == [1, 4, 2, 3, 0]  # nothing to gain: by loss


def test_known_law_has_one_choice_and_no_loss() -> None:
    law, _ = fitted(1, True, True)
    sure = replace(law, draws={name: np.full(256, law.coefficients.get(name, 1e-3)) for name in law.draws})
    advice = next_cell.advise(sure, (1, 16), LENGTHS)
    assert advice.loss == pytest.approx(0, abs=1e-12)
    assert all(each.probability == 1 for each in advice.choices)


def test_too_many_candidates_are_refused() -> None:
    law, _ = fitted(1, True, True)
    with pytest.raises(ParameterError, match="at most 400 pairs, got 50 x 9"):
        next_cell.advise(law, tuple(range(1, 51)), tuple(range(9)))
