"""Figures of early exit: thresholds over the position, and the effect of a batch."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from figures import save
from figures.of_theory import early_exit_batch, early_exit_thresholds
from figures.of_theory.early_exit_batch import deepest
from model.base import checks
from model.base.checks import ParameterError
from model.methods.early_exit.theory import MEASURES, decayed_threshold, exit_pmf, expected_layers, expected_time
from tests.figures.test_figures_speculative import apart, inside, xy
from tests.figures.test_figures_tradeoff import lines, words
from tests.support.figure_checks import odd_dashes, shown

LAMBDAS, TAUS, LONGEST = [0.6, 0.9, 1.0], [0.0, 2.0, 8.0], 64
PROFILES = {"even": [0.2] * 11 + [1.0], "early": [0.0, 0.0, 0.6, 0.6] + [0.1] * 7 + [1.0], "never": [0.0] * 11 + [1.0]}
SIZES = [1, 2, 8, 32]
PRICES: dict[str, Any] = {"head": 2.0, "check": 0.05, "propagation": 0.1}


# --- Thresholds -------------------------------------------------------------------------------------------------------


def thresholds() -> Any:
    return early_exit_thresholds.draw(LAMBDAS, TAUS, longest=LONGEST, source="assumed")


def test_both_forms_are_drawn_for_every_threshold_and_temperature() -> None:
    figure = thresholds()
    for level, axes in zip(LAMBDAS, figure.axes, strict=True):
        assert axes.get_title(loc="left") == f"λ = {level:g}"
        for form, tau in itertools.product(("paper", "code"), TAUS):
            positions, values = xy(lines(axes)[f"{form} {tau:g}"])
            assert (positions[0], positions[-1]) == (0, LONGEST)
            assert values.tolist() == decayed_threshold(level, positions, LONGEST, tau, form=form).tolist()
            assert np.all(np.diff(values) <= 0)
    assert "λ and τ assumed" in words(figure)
    assert f"N = {LONGEST}" in words(figure)


def test_both_forms_start_at_their_values_and_coincide_at_lambda_1() -> None:
    """The code's form starts at lambda, the paper's above it by a tenth of 1 - lambda; so they coincide only for lambda = 1."""
    for level, axes in zip(LAMBDAS, thresholds().axes, strict=True):
        for tau in TAUS:
            paper, code = (xy(lines(axes)[f"{form} {tau:g}"])[1] for form in ("paper", "code"))
            assert code[0] == pytest.approx(level)
            assert paper[0] == pytest.approx(level + 0.1 * (1 - level))
            if level == 1:
                assert paper == pytest.approx(code)
            else:
                assert np.all(paper > code)
        assert set(xy(lines(axes)["threshold"])[1]) == {level}


def test_forms_differ_by_line_and_temperatures_by_colour() -> None:
    figure = thresholds()
    drawn = lines(figure.axes[0])
    assert len({drawn[f"paper {tau:g}"].get_color() for tau in TAUS}) == len(TAUS)
    for tau in TAUS:
        paper, code = drawn[f"paper {tau:g}"], drawn[f"code {tau:g}"]
        # The narrower line is on top of the broader one, so both are visible where they coincide.
        assert code.get_linewidth() < paper.get_linewidth()
        assert figure.axes[0].lines.index(code) > figure.axes[0].lines.index(paper)
        assert code.get_color() != paper.get_color()
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert labels[:2] == ["paper:  0.9 λ + 0.1 exp(−τ t / N), at most 1", "code:  λ (0.9 + 0.1 exp(−τ t / N))"]
    assert labels[-3:] == ["τ = 0", "τ = 2", "τ = 8"]
    for label, handle in zip(labels[-3:], figure.legends[1].legend_handles, strict=True):
        assert handle.get_color() == drawn[f"code {label.removeprefix('τ = ')}"].get_color()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_labels_on_thresholds_stay_on_the_page(count: int) -> None:
    assert inside(early_exit_thresholds.draw([0.5, 0.7, 0.9, 1.0][:count], [0, 1, 2, 4, 8], longest=1024, source="published"))


# --- Batches ----------------------------------------------------------------------------------------------------------


def batch(profiles: dict[str, list[float]] = PROFILES, **more: Any) -> Any:
    return early_exit_batch.draw(profiles, **{"batches": SIZES, **PRICES, "source": "assumed", **more})


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), st.integers(1, 4))
def test_deepest_token_of_a_batch_by_enumeration(hazards: list[float], size: int) -> None:
    probabilities = np.zeros(len(hazards))
    own = exit_pmf(hazards)
    for layers in itertools.product(range(len(hazards)), repeat=size):
        probabilities[max(layers)] += np.prod([own[layer] for layer in layers])
    assert exit_pmf(deepest(hazards, size)) == pytest.approx(probabilities, abs=1e-9)
    assert float(expected_layers(deepest(hazards, size))) == pytest.approx(float(expected_layers(hazards, size)), abs=1e-9)


def test_layers_and_times_of_every_batch_are_drawn() -> None:
    left, right = batch().axes
    for name, hazards in PROFILES.items():
        sizes, depths = xy(lines(left)[name])
        assert sizes.tolist() == SIZES
        assert depths == pytest.approx([float(expected_layers(hazards, size)) for size in SIZES])
        # For one token the time is the theory's; for a batch, layers, checks and projections are those of its deepest token.
        for measure in MEASURES:
            sizes, times = xy(lines(right)[f"{measure} {name}"])
            assert times[0] == pytest.approx(float(expected_time(hazards, measure=measure, **PRICES)))
            assert sizes.tolist() == SIZES
            assert np.all(np.diff(times) >= -1e-9)
        state = xy(lines(right)[f"state {name}"])[1]
        checks = np.array([sum(1 - (1 - np.append(1, np.cumprod(1 - np.array(hazards[:-1]))))[:-1] ** size) for size in SIZES])
        expected = depths + PRICES["head"] + PRICES["check"] * checks + PRICES["propagation"] * (12 - depths)
        assert state == pytest.approx(expected)
    assert set(xy(lines(left)["all layers"])[1]) == {12.0}
    assert set(xy(lines(right)["whole model"])[1]) == {12.0 + PRICES["head"]}


def test_a_batch_goes_deeper_up_to_all_layers_and_never_beyond() -> None:
    left = batch(batches=[1, 4, 64, 100_000]).axes[0]
    for name in PROFILES:
        depths = xy(lines(left)[name])[1]
        assert np.all(np.diff(depths) >= 0)
        assert depths[-1] <= 12 + 1e-9
    assert xy(lines(left)["even"])[1][-1] == pytest.approx(12, abs=0.01)
    assert set(xy(lines(left)["never"])[1]) == {12.0}
    # Without exits a token costs the whole model, and its state checks.
    right = batch({"never": PROFILES["never"]}, check=0.0).axes[1]
    assert xy(lines(right)["state never"])[1] == pytest.approx([14.0] * len(SIZES))


def named(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_curves_are_named_and_labels_do_not_overlap() -> None:
    figure = batch({**PROFILES, "later, and then": [0.05] * 8 + [0.3] * 3 + [1.0]})
    left, right = figure.axes
    assert f"even: {float(expected_layers(PROFILES['even'], 32)):.1f}" in named(left)
    assert "all 12 layers" in named(left)
    assert len(named(right)) == 2 * 4 + 1
    assert inside(figure)
    assert all(apart(axes) for axes in figure.axes)
    assert "exit probabilities assumed" in words(figure)
    assert "head 2, state check 0.05, KV cache of a skipped layer 0.1 layer-times" in words(figure)


def test_batches_are_sorted_and_drawn_once() -> None:
    assert xy(lines(batch(batches=[8, 1, 8, 2]).axes[0])["even"])[0].tolist() == [1, 2, 8]


def test_layers_before_the_first_check_have_no_check() -> None:
    late = {"early": PROFILES["early"]}
    first, third = (batch(late, first=first).axes[1] for first in (1, 3))
    gap = xy(lines(first)["softmax early"])[1] - xy(lines(third)["softmax early"])[1]
    assert gap == pytest.approx([2 * PRICES["head"]] * len(SIZES))


# --- Both -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for make in (thresholds, batch):
        first, second = (save(make(), tmp_path / name, formats=("svg",))[0].read_bytes() for name in ("one", "two"))
        assert first == second


BAD: list[tuple[dict[str, Any], str]] = [
    ({"profiles": {}}, "profiles must be 1 to 4, got 0"),
    ({"profiles": {str(index): [1.0] for index in range(5)}}, "profiles must be 1 to 4, got 5"),
    ({"profiles": {"one": [1.0], "two": [0.5, 1.0]}}, "profiles must have the same number of layers, got one 1, two 2"),
    ({"profiles": {"one": [1.5]}}, r"hazards\[0\] must be between 0 and 1, got 1\.5"),
    ({"batches": []}, "batches must have at least one size, got none"),
    ({"batches": [0, 1]}, "batch must be at least 1, got 0"),
    ({"head": -1.0}, r"head must be at least 0, got -1\.0"),
    ({"first": 4}, "hazards must be 0 at the layers before first=4"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_batches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        batch(**change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1], 8), "thresholds must be 1 to 4, got 0"),
        (([0.5] * 5, [1], 8), "thresholds must be 1 to 4, got 5"),
        (([0.5], [1] * 6, 8), "temperatures must be 1 to 5, got 6"),
        (([1.5], [1], 8), r"threshold must be between 0 and 1, got 1\.5"),
        (([0.5], [-1], 8), r"temperature must be at least 0, got -1\.0"),
        (([0.5], [1], 0), "longest must be between 1 and 1000000, got 0"),
    ],
)
def test_bad_thresholds_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        early_exit_thresholds.draw(arguments[0], arguments[1], longest=arguments[2], source="assumed")


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_decaying_thresholds_by_hand() -> None:
    figure = early_exit_thresholds.draw([0.5, 1.0], [0.0, 4.0], longest=100, source="mine")
    drawn = shown(figure)
    assert drawn.texts == [
        "Confidence that a token needs for early exit",
        "CALM's decaying threshold; λ and τ mine; sequences of at most N = 100 tokens",
    ]  # fmt: skip
    assert drawn.legends == [
        ("", ["paper:  0.9 λ + 0.1 exp(−τ t / N), at most 1", "code:  λ (0.9 + 0.1 exp(−τ t / N))", "λ"]),
        ("", ["τ = 0", "τ = 4"]),
    ]  # fmt: skip
    assert [(panel.title, panel.x, panel.y) for panel in drawn.panels] == [
        ("λ = 0.5", "position t  [tokens]", "confidence required to exit"), ("λ = 1", "position t  [tokens]", ""),
    ]  # fmt: skip
    width, height = figure.get_size_inches()
    assert (width, height) == pytest.approx((0.3 + 7.6, 0.6 + 2.9 + 1.5))
    for index, (axes, level, panel) in enumerate(zip(figure.axes, (0.5, 1.0), drawn.panels, strict=True)):
        box = axes.get_position()
        inches = (box.x0 * width, box.y0 * height, box.width * width, box.height * height)
        assert inches == pytest.approx((0.3 + 3.8 * index + 0.45, 0.6, 3.8 - 0.65, 2.9))
        labels = [f"{form} {tau}" for form in ("paper", "code") for tau in (0, 4)]
        assert [label for label, _ in panel.lines] == [*labels, "threshold"]
        for form, tau in itertools.product(("paper", "code"), (0, 4)):
            at = np.linspace(0, 100, 201)
            decay = 0.1 * np.exp(-tau * at / 100)
            values = np.minimum(0.9 * level + decay, 1) if form == "paper" else level * (0.9 + decay)
            assert np.array(panel.line(f"{form} {tau}")) == pytest.approx(np.stack([at, values], axis=1))
        assert axes.get_xlim() == (0, 100)
        assert len(axes.get_xticks()) <= 6
        assert all(at == round(at) for at in axes.get_xticks())
        assert panel.grid == "xy"
    # The paper's lines are halfway to white, and broader.
    first = {label: colour for label, _, _, colour in drawn.panels[0].marks}
    for tau in (0, 4):
        whole, pale = (np.array([int(first[f"{form} {tau}"][at : at + 2], 16) for at in (1, 3, 5)]) for form in ("code", "paper"))
        assert pale.tolist() == ((whole + 255) // 2).tolist()
    assert not odd_dashes(figure)
    assert [each.get_linewidth() for each in figure.legends[0].legend_handles] == [2.6, 1.5, 0.8]  # type: ignore[union-attr]
    wide = early_exit_thresholds.draw([0.5, 0.6, 0.7], [1.0], longest=1, source="")
    assert wide.get_figwidth() == pytest.approx(0.3 + 3 * 3.1)
    assert early_exit_thresholds.draw([0.5], [1, 2, 3, 4, 5], longest=checks.MAX_TOKENS, source="").get_figwidth() == pytest.approx(
        7.9
    )


def test_early_exit_in_batches_by_hand() -> None:
    """Two layers: each token exits after the first with probability .5, so a batch of R continues with 1 - .5^R."""
    leaving = {"a": [0.5, 1.0], "b": [0.0, 1.0]}
    figure = early_exit_batch.draw(leaving, batches=(4, 1, 2), head=3, check=0.5, propagation=0.25, source="mine")
    drawn = shown(figure)
    assert drawn.texts == [
        "How much of early exit's gain remains in a batch?",
        "2 layers, tokens independent; exit probabilities mine; head 3, state check 0.5,"
        " KV cache of a skipped layer 0.25 layer-times",
    ]  # fmt: skip
    assert drawn.legends == [("", [
        "softmax: a projection onto the vocabulary per check", "state: a comparison of two hidden states per check",
    ])]  # fmt: skip
    left, right = drawn.panels
    assert (left.title, left.y) == ("The batch continues until its last token exits", "mean layers per token")
    assert (right.title, right.y) == ("With checks and projection", "time per token  [layer-times]")
    assert left.x == right.x == "batch size [tokens]"
    sizes = [1, 2, 4]
    on = [1 - 0.5**size for size in sizes]
    assert left.line("a") == [*zip(sizes, [1 + each for each in on], strict=True)]
    assert left.line("b") == [(size, 2) for size in sizes]
    state = [(1 + each) + 3 + 0.5 + 0.25 * (1 - each) for each in on]
    assert right.line("state a") == [(size, pytest.approx(value)) for size, value in zip(sizes, state, strict=True)]
    for name in "ab":
        found = [float(expected_time(deepest(leaving[name], size), measure="softmax", head=3, check=0.5,
                                     propagation=0.25, first=1)) for size in sizes]  # fmt: skip
        assert [y for _, y in right.line(f"softmax {name}")] == pytest.approx(found)
    assert [label for label, _ in left.lines] == ["a", "b", "all layers"]
    assert [label for label, _ in right.lines] == ["softmax a", "state a", "softmax b", "state b", "whole model"]
    assert ({y for _, y in left.line("all layers")}, {y for _, y in right.line("whole model")}) == ({2}, {5})
    assert sorted(left.texts) == ["a: 1.9", "all 2 layers", "b: 2.0"]
    assert "whole model: 5.0" in right.texts
    assert f"a, state: {state[-1]:.1f}" in right.texts
    for axes, panel in zip(figure.axes, drawn.panels, strict=True):
        assert axes.get_xlim() == pytest.approx((1 / 1.15, 4 * 1.15))
        assert axes.get_ylim()[0] == 0
        assert panel.ticks[0] == ["1", "2", "4"]
        assert panel.scales == ("log", "linear")
        assert not axes.xaxis.get_minorticklocs().size
        assert panel.grid == "xy"
    assert not odd_dashes(figure)
    # Up to nine sizes have a tick each; more have ticks at powers of two.
    one = {"profiles": {"a": [1.0]}, "head": 0.0, "source": ""}
    for count, each in ((9, True), (10, False)):
        ticks = early_exit_batch.draw(**one, batches=[*range(1, count + 1)]).axes[0].get_xticks().tolist()  # type: ignore[arg-type]
        assert (ticks == [*range(1, count + 1)]) == each
    assert shown(early_exit_batch.draw(**one, batches=[1])).texts[1].endswith(  # type: ignore[arg-type]
        "head 0, state check 0, KV cache of a skipped layer 0 layer-times"
    )
    assert len(early_exit_batch.draw(**one | {"profiles": {str(each): [1.0] for each in range(4)}}, batches=[1]).axes[0].lines) == 5  # type: ignore[arg-type]
