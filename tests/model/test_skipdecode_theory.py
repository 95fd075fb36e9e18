"""SkipDecode in closed form: the schedule in exact fractions, its properties, the paper's tables, and errors."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.skipdecode import theory as skipdecode

ROWS = {  # [DelCorro2023] Table 2 (min, max, target average), and Table 4's mean layers of E2E
    "1.3B": [(8, 16, 12, 14.7), (6, 10, 8, 9.4), (5, 7, 6, 6.8), (4, 6, 5, 5.8)],
    "6.7B": [(11, 22, 16, 20.3), (8, 14, 11, 13), (6, 10, 8, 9.4), (5, 8, 6.5, 7.6)],
}
PROMPT, SEQUENCE = 60, 160


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    least = draw(st.integers(1, 20))
    prompt = draw(st.integers(0, 50))
    span = draw(st.integers(1, 60))
    return least, least + draw(st.integers(0, 20)), prompt, prompt + span, draw(st.integers(1, span))


def exactly(least: int, most: int, prompt: int, sequence: int, generated: int) -> list[Fraction]:
    """token_idx of Section 2.3, verbatim, for the positions after the prompt."""
    parts = (Fraction(position - prompt, sequence - prompt) for position in range(prompt, prompt + generated))
    return [(1 - t) * most + t * least for t in parts]


ROUNDED: dict[str, Callable[[Fraction], int]] = {
    "half-up": lambda value: math.floor(value + Fraction(1, 2)),
    "half-even": round,
    "floor": math.floor,
    "ceil": math.ceil,
}


@given(schedules())
def test_the_schedule_as_printed(choice: tuple[int, int, int, int, int]) -> None:
    exact = exactly(*choice)
    assert skipdecode.exit_layers(*choice).tolist() == pytest.approx([float(value) for value in exact], rel=1e-14)
    for name, rounding in ROUNDED.items():
        assert skipdecode.exit_layers(*choice, rounding=name).tolist() == [rounding(value) for value in exact]
        mean = sum(map(rounding, exact)) / len(exact)
        assert skipdecode.mean_layers(*choice, name) == pytest.approx(mean, rel=1e-14)
    assert skipdecode.mean_layers(*choice) == pytest.approx(float(sum(exact) / len(exact)), rel=1e-13)


@given(schedules(), st.floats(0, 5))
def test_the_schedule_never_rises_and_stays_within_its_bounds(choice: tuple[int, int, int, int, int], power: float) -> None:
    """Property 30: no layer that a later token needs was skipped, for any power and rounding."""
    for rounding in (None, *ROUNDED):
        layers = skipdecode.exit_layers(*choice, rounding=rounding, power=power)
        assert np.all(np.diff(layers) <= 1e-12)
        assert np.all((layers >= choice[0] - 1e-12) & (layers <= choice[1] + 1e-12))
        assert layers[0] == choice[1]


@given(schedules())
def test_a_higher_power_falls_sooner(choice: tuple[int, int, int, int, int]) -> None:
    means = [skipdecode.mean_layers(*choice, power=power) for power in (0.0, 0.5, 1.0, 2.0, 8.0)]
    assert means[0] == choice[1]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(means))
    assert means[2] == pytest.approx(skipdecode.mean_layers(*choice), rel=1e-14)


@given(schedules(), st.integers(0, 4))
def test_whole_powers_in_fractions(choice: tuple[int, int, int, int, int], power: int) -> None:
    least, most, *_ = choice
    exact = [least + (most - least) * Fraction(value - least, most - least) ** power if most > least else Fraction(least)
             for value in exactly(*choice)]  # fmt: skip
    assert skipdecode.exit_layers(*choice, power=power).tolist() == pytest.approx([float(value) for value in exact], rel=1e-14)
    assert skipdecode.mean_layers(*choice, power=power) == pytest.approx(float(sum(exact) / len(exact)), rel=1e-13)


def test_halves_are_recognised_to_nine_digits() -> None:
    """Of two layers, after half of the schedule: 1 + 2^-power layers, which approaches 1.5 from below as the power approaches 1."""
    for below, layers in ((0.0, 2), (1e-12, 2), (4e-10, 2), (6e-10, 1), (1e-8, 1)):
        found = skipdecode.exit_layers(1, 2, 0, 2, 2, rounding="half-up", power=-math.log2(0.5 - below))
        assert found.tolist() == [2, layers]


@given(schedules())
def test_the_whole_schedule(choice: tuple[int, int, int, int, int]) -> None:
    least, most, prompt, sequence, _ = choice
    span = sequence - prompt
    whole = skipdecode.mean_layers(least, most, prompt, sequence, span)
    assert whole == pytest.approx((most + least) / 2 + (most - least) / (2 * span), rel=1e-13)
    # The minimum is reached only by rounding, and only if a step is less than a half.
    last = skipdecode.exit_layers(least, most, prompt, sequence, span)[-1]
    assert last == pytest.approx(least + (most - least) / span, rel=1e-13)
    reached = skipdecode.exit_layers(least, most, prompt, sequence, span, rounding="half-up")[-1] == least
    assert reached == (Fraction(most - least, span) < Fraction(1, 2))


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_layers_are_the_first_and_the_topmost_and_nested(one: int, two: int, three: int) -> None:
    warm_up, budget, layers = sorted((one, two, three))
    found = skipdecode.spans(budget, warm_up, layers)
    assert all(first < last for first, last in found)  # no empty or adjacent ranges
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))

    def used(budget: int) -> list[int]:
        return [layer for first, last in skipdecode.spans(budget, warm_up, layers) for layer in range(first, last)]

    assert len(used(budget)) == budget
    assert used(budget) == sorted([*range(warm_up), *range(layers - budget + warm_up, layers)])
    if budget < layers:
        assert set(used(budget)) < set(used(budget + 1))
    assert used(layers) == list(range(layers))


# --- Published numbers --------------------------------------------------------------------------------------------------


def test_targets_are_the_midpoints_of_seven_rows_out_of_eight() -> None:
    wrong = [(least, most, target) for rows in ROWS.values() for least, most, target, _ in rows if (least + most) / 2 != target]
    assert wrong == [(11, 22, 16)]


def lengths(model: str, rounding: str | None) -> list[set[int]]:
    return [
        set(skipdecode.generated_of_mean(mean, least, most, PROMPT, SEQUENCE, rounding=rounding))
        for least, most, _, mean in ROWS[model]
    ]


@given(schedules(), st.sampled_from([None, *ROUNDED]), st.integers(10, 400), st.integers(1, 5))
@example((1, 2, 0, 40, 1), None, 15, 5)  # 37 tokens have a mean of 1.55, which differs in floats by more than .05 from 1.5
@example((8, 16, 60, 160, 1), "half-up", 160, 0)  # exactly the lengths before the layers fall
def test_response_lengths_of_a_printed_mean(
    choice: tuple[int, int, int, int, int], rounding: str | None, mean: int, within: int
) -> None:
    """In exact fractions, bounds included: a mean halfway between two printed ones may have been printed as either."""
    least, most, prompt, sequence, _ = choice
    layers = exactly(least, most, prompt, sequence, sequence - prompt)
    whole = [layer if rounding is None else Fraction(ROUNDED[rounding](layer)) for layer in layers]
    means = [total / n for n, total in enumerate(itertools.accumulate(whole), 1)]
    exact = tuple(n for n, value in enumerate(means, 1) if abs(value - Fraction(mean, 10)) <= Fraction(within, 100))
    found = skipdecode.generated_of_mean(mean / 10, least, most, prompt, sequence, rounding=rounding, within=within / 100)
    assert found == exact


def test_one_response_length_explains_the_small_model_with_half_up_rounding() -> None:
    assert set.intersection(*lengths("1.3B", "half-up")) == {34}
    for rounding in ("half-even", "floor", "ceil", None):
        assert not set.intersection(*lengths("1.3B", rounding))
    assert lengths("1.3B", "half-even")[2] == {30, 31, 32, 33}
    for least, most, _, mean in ROWS["1.3B"]:
        assert round(skipdecode.mean_layers(least, most, PROMPT, SEQUENCE, 34, "half-up"), 1) == mean


def test_no_response_length_explains_the_rows_of_the_large_model() -> None:
    found = lengths("6.7B", "half-up")
    assert [(min(each), max(each)) for each in found] == [(32, 32), (34, 36), (29, 37), (27, 30)]
    for rounding in (*ROUNDED, None):
        assert not set.intersection(*lengths("6.7B", rounding))


def test_rows_labelled_2x_skip_less_than_half_of_the_layers() -> None:
    """Table 4's means at the label 2x: E2E, Reddit, CNN-DM; relative to its bases of 24 and 30 layers."""
    means = [(24, 14.7), (24, 15.6), (24, 15.6), (30, 20.3), (30, 19.8), (30, 21.3)]
    found = [float(skipdecode.layer_speedup(base, mean)) for base, mean in means]
    assert (round(min(found), 2), round(max(found), 2)) == (1.41, 1.63)


# --- Errors ---------------------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {"min_layers": 8, "max_layers": 16, "prompt": 60, "sequence_length": 160, "generated": 30}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_layers": 17}, "min_layers must be between 1 and max_layers=16, got 17"),
    ({"min_layers": 0}, "min_layers must be between 1 and max_layers=16, got 0"),
    ({"max_layers": 0}, "max_layers must be between 1 and 10000, got 0"),
    ({"max_layers": 16.5}, r"max_layers must be a whole number, got 16\.5"),
    ({"prompt": 160}, "prompt must be between 0 and sequence_length-1=159, got 160"),
    ({"prompt": -1}, "prompt must be between 0 and sequence_length-1=159, got -1"),
    ({"sequence_length": 0}, "sequence_length must be between 1 and 1000000, got 0"),
    ({"generated": 101}, "generated must be between 1 and sequence_length-prompt=100, got 101"),
    ({"generated": 0}, "generated must be between 1 and sequence_length-prompt=100, got 0"),
    ({"rounding": "up"}, "unknown rounding 'up'; .*half-up"),
    ({"power": -1.0}, "power must be at least 0, got -1"),
    ({"power": math.nan}, "power must be .*got nan"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_invalid_schedules_are_refused(change: dict[str, Any], message: str) -> None:
    for function in (skipdecode.exit_layers, skipdecode.mean_layers):
        with pytest.raises(ParameterError, match=f"^{message}"):
            function(**{**GOOD, **change})  # type: ignore[operator]


OTHERS: list[tuple[Callable[[], object], str]] = [
    (lambda: skipdecode.spans(25, 1, 24), "budget must be between 1 and layers=24, got 25"),
    (lambda: skipdecode.spans(0, 0, 24), "budget must be between 1 and layers=24, got 0"),
    (lambda: skipdecode.spans(4, 5, 24), "warm_up must be between 0 and budget=4, got 5"),
    (lambda: skipdecode.spans(4, -1, 24), "warm_up must be between 0 and budget=4, got -1"),
    (lambda: skipdecode.spans(1, 1, 0), "layers must be between 1 and 10000, got 0"),
    (lambda: skipdecode.layer_speedup(24, 0), "mean must be above 0"),
    (lambda: skipdecode.layer_speedup(24, [3, 0]), "mean must be above 0"),
    (lambda: skipdecode.layer_speedup(24, -0.5), r"mean must be at least 0, got -0\.5"),
    (lambda: skipdecode.layer_speedup(-1, 3), "layers must be at least 0, got -1"),
    (lambda: skipdecode.generated_of_mean(-1, 8, 16, 60, 160), "mean must be at least 0, got -1"),
    (lambda: skipdecode.generated_of_mean(12, 8, 16, 60, 160, within=-0.1), r"within must be at least 0, got -0\.1"),
]


@pytest.mark.parametrize(("call", "message"), OTHERS)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
