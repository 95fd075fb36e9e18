"""Figures of speculative decoding: curves are the theory's, and simulated points have the values of the rows."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

import sim
from figures import of_run, save
from figures.common import label_placement, subject
from figures.common.style import INK, canvas
from figures.of_runs import accepted_tokens, method_comparison, speedup, tradeoff
from figures.of_theory import best_draft_length, verify_cost
from model.base.checks import ParameterError
from model.costs.width_curve import PassTimes
from model.methods.speculative import theory as speculative
from model.methods.speculative.batch_break_even import batched_speedup, largest_batch
from tests.figures.test_figures_tradeoff import coordinates, lines, words
from tests.support.album import Album
from tests.support.figure_checks import laid_out, odd_dashes, shown

RATES, LENGTHS, RATIOS, TOKENS = (0.3, 0.8), (1, 4), (0.05, 0.4), (16, 100)


def simulated(views: tuple[str, ...] = ("formula", "paths", "events")) -> pl.DataFrame:
    """Synthetic simulation: the theory, slightly shifted, with intervals."""
    rows = []
    for point, (rate, length, ratio, tokens) in enumerate(itertools.product(RATES, LENGTHS, RATIOS, TOKENS)):
        speed = float(speculative.finite_speedup(tokens, rate, length, ratio))
        for view in views:
            moved = speed * (1.0 if view == "formula" else 1.01)
            rows.append({
                "point": point, "view": view, "method": "speculative", "outcomes": "iid", "acceptance_rate": rate,
                "draft_length": length, "cost_ratio": ratio, "tokens": tokens, "speedup": moved,
                "speedup_low": None if view == "formula" else 0.98 * moved,
                "speedup_high": None if view == "formula" else 1.03 * moved,
            })  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def only(**values: Any) -> pl.DataFrame:
    return simulated().filter(**values)


def xy(line: Line2D) -> tuple[Any, Any]:
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


# --- Speed-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", speedup.AXES)
@pytest.mark.parametrize("view", ["formula", "paths", "events"])
def test_rows_are_drawn_at_their_coordinates(x: str, view: str) -> None:
    figure = speedup.draw(simulated(), x)
    drawn = [line for axes in figure.axes for label, line in lines(axes).items() if label.startswith(view)]
    assert coordinates(drawn) == set(simulated().filter(view=view).select(x, "speedup").rows())


@pytest.mark.parametrize("x", speedup.AXES)
def test_curves_pass_through_the_points_of_the_formula(x: str) -> None:
    """The curve is computed along x, the rows one by one."""
    for axes in speedup.draw(simulated(("formula",)), x).axes:
        drawn = lines(axes)
        names = [label.removeprefix("curve ") for label in drawn if label.startswith("curve ")]
        assert names
        for name in names:
            xs, ys = xy(drawn[f"curve {name}"])
            at, speeds = xy(drawn[f"formula {name}"])
            assert np.interp(at, xs, ys) == pytest.approx(speeds, rel=2e-4)


def test_without_tokens_the_curves_are_theorem_3_8() -> None:
    figure = speedup.draw(speedup.grid(draft_length=[2, 5], cost_ratio=[0.1, 0.3]))
    for axes, ratio in zip(figure.axes, (0.1, 0.3), strict=True):
        for length in (2, 5):
            rate, speed = xy(lines(axes)[f"curve γ = {length}"])
            inside = rate < 1
            theorem = (1 - rate[inside] ** (length + 1)) / ((1 - rate[inside]) * (length * ratio + 1))
            assert speed[inside] == pytest.approx(theorem)
            assert speed[-1] == pytest.approx((length + 1) / (length * ratio + 1))
    assert "Theorem 3.8" in words(figure)


@pytest.mark.parametrize("x", ["acceptance_rate", "cost_ratio"])
def test_no_curve_exceeds_the_bound_or_gains_beyond_break_even(x: str) -> None:
    name, others = ("cost_ratio", (0.05, 0.4)) if x == "acceptance_rate" else ("acceptance_rate", (0.3, 0.8))
    figure = speedup.draw(speedup.grid(draft_length=[1, 3, 9], **{name: others}), x)
    for axes, other in zip(figure.axes, others, strict=True):
        drawn = lines(axes)
        even = float(xy(drawn["break-even"])[0][0])
        assert even == other
        curves = [line for label, line in drawn.items() if label.startswith("curve")]
        assert len(curves) == 3
        for line in curves:
            at, speed = xy(line)
            assert np.all(speed <= np.interp(at, *xy(drawn["oracle bound"])) * (1 + 1e-3))
            beyond = at <= even if x == "acceptance_rate" else at >= even
            assert beyond.any()
            assert np.all(speed[beyond] <= 1 + 1e-12)
        (shade,) = (patch.get_extents() for patch in axes.patches)
        shaded = axes.transData.inverted().transform([(shade.x0, shade.y0), (shade.x1, shade.y1)])[:, 0]
        assert shaded == pytest.approx((0, even) if x == "acceptance_rate" else (even, axes.get_xlim()[1]), abs=1e-9)
        at, speed = xy(drawn["curve γ = 1"])
        pays = at > even if x == "acceptance_rate" else at < even
        assert np.all(speed[pays] > 1)


def test_the_star_is_the_best_draft_length() -> None:
    rates, ratio = [0.2, 0.6, 0.85], 0.1
    drawn = lines(speedup.draw(speedup.grid(acceptance_rate=rates, cost_ratio=[ratio]), "draft_length").axes[0])
    for rate in rates:
        (best,), (speed,) = xy(drawn[f"best α = {rate}"])
        assert best == speculative.optimal_draft_length(rate, ratio)
        assert speed == pytest.approx(float(speculative.speedup(rate, int(best), ratio)))


def test_many_tokens_approach_the_dotted_line() -> None:
    figure = speedup.draw(speedup.grid(acceptance_rate=[0.5, 0.9], draft_length=[3, 7], cost_ratio=[0.1]), "tokens")
    drawn = lines(figure.axes[0])
    curves = {label.removeprefix("curve "): line for label, line in drawn.items() if label.startswith("curve ")}
    assert len(curves) == 4
    for name, line in curves.items():
        at, speed = xy(line)
        many = float(xy(drawn[f"many tokens {name}"])[1][0])
        assert at[0] == 1
        assert speed[0] == 1  # a single token is never drafted
        assert abs(speed[-1] - many) < 0.05 * abs(1 - many)


def test_intervals_reach_from_low_to_high() -> None:
    rows = only(view="paths", cost_ratio=0.05, tokens=16)
    (axes,) = speedup.draw(rows).axes
    bars = [bar for bar in axes.collections if isinstance(bar, LineCollection) and bar.get_label() == "interval"]
    drawn = {tuple(np.asarray(segment)[:, 1].tolist()) for bar in bars for segment in bar.get_segments()}
    assert drawn == set(rows.select("speedup_low", "speedup_high").rows())


def test_curves_are_drawn_only_where_the_theory_holds() -> None:
    rows = only(cost_ratio=0.05, tokens=16)
    drawn = lines(speedup.draw(rows.with_columns(outcomes=pl.lit(None))).axes[0])
    assert sum(label.startswith("curve") for label in drawn) == 2  # the formula agrees, so `outcomes` is not needed
    for other in (
        rows.with_columns(method=pl.lit("adaptive")),
        rows.with_columns(speedup=0.999 * pl.col("speedup")),  # as with overheads
        rows.filter(pl.col("view") != "formula").with_columns(outcomes=pl.lit("markov")),
    ):
        drawn = lines(speedup.draw(other).axes[0])
        assert not any(label.startswith("curve") for label in drawn)
        assert any(label.startswith("paths") for label in drawn)


def test_an_axis_is_swept_if_all_else_is_equal() -> None:
    assert speedup.swept(simulated()) == list(speedup.AXES)
    pairs = [(0.3, 1), (0.8, 4)]  # two choices that differ in two things
    some = pl.concat([only(acceptance_rate=rate, draft_length=length) for rate, length in pairs])
    assert speedup.swept(some) == ["cost_ratio", "tokens"]
    read = pl.when(pl.col("acceptance_rate") < 0.5).then(pl.lit("stated")).otherwise(pl.lit("drafted"))
    assert "acceptance_rate" in speedup.swept(simulated().with_columns(read.alias("outcomes.reading")))
    link = pl.Series("cost.link", [0.0, 1.0] * 24)
    assert any("link = 1" in label for label in lines(speedup.draw(simulated().with_columns(link)).axes[0]))


def test_settings_of_prepared_drafts_are_series_and_the_bound_is_of_drafting_in_turn() -> None:
    """SSD may exceed the bound: it drafts while the target verifies. Its acceptance rate puts it next to the other methods."""
    rows = sim.run("ssd", views=["formula"])
    figure = speedup.draw(rows, "cost_ratio")
    assert len(figure.axes) == 1
    assert "bound of drafting in turn" in words(figure)
    for fan_out in ("1", "4", "[6, 4, 3, 3, 4]", "4, backup none"):
        assert f"speculative speculative decoding, fan-out {fan_out}" in words(figure)
    assert "bound on any draft length" in words(speedup.draw(rows.filter(method="speculative"), "cost_ratio"))


def test_curves_cover_the_rows_and_the_break_even() -> None:
    """Rates from 0 to 1; costs to the break-even; draft lengths two beyond the last; 512 tokens, each of the first 128."""
    def ends(x: str, **values: Any) -> tuple[float, float, int]:
        table = pl.DataFrame({"acceptance_rate": [0.3], "cost_ratio": None, "draft_length": None, "tokens": None}
                             | {name: [each] for name, each in values.items()})  # fmt: skip
        where = speedup._range(table, x)
        assert np.all(np.diff(where) > 0)
        return float(where[0]), float(where[-1]), len(where)

    assert ends("acceptance_rate") == (0, 1, 401)
    assert ends("cost_ratio") == (0, 0.5, 401)
    assert ends("cost_ratio", acceptance_rate=0.9, cost_ratio=0.5) == (0, pytest.approx(0.99), 401)
    assert ends("cost_ratio", acceptance_rate=0.5, cost_ratio=0.8) == (0, pytest.approx(0.88), 401)
    assert ends("draft_length") == (0, 14, 15)
    assert ends("draft_length", draft_length=2) == (0, 5, 6)
    assert ends("draft_length", draft_length=4) == (0, 6, 7)
    assert ends("tokens", tokens=100)[:2] == ends("tokens")[:2] == (1, 512)
    assert ends("tokens", tokens=1000)[:2] == (1, 1000)
    where = speedup._range(pl.DataFrame({"tokens": [4096]}), "tokens")
    assert where[:128].tolist() == list(range(1, 129))
    assert len(where) == 128 + 79


def inside(figure: Figure) -> bool:
    """Return whether all words are on the page, except ticks beyond the axes' limits."""
    laid_out(figure)
    parts: list[Any] = [*figure.texts, *figure.legends]
    for axes in figure.axes:
        parts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes.title]
    boxes = [part.get_window_extent() for part in parts if not isinstance(part, Text) or part.get_text()]
    page = figure.bbox
    return all(box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1 for box in boxes)


def apart(axes: Axes) -> bool:
    """Return whether no labels on or next to the axes overlap; their leader lines may."""
    assert isinstance(axes.figure, Figure)
    laid_out(axes.figure)
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    return not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("x", speedup.AXES)
def test_labels_neither_overlap_nor_leave_the_page(x: str) -> None:
    """One panel; `test_figures_shown` tests several."""
    figure = speedup.draw(only(cost_ratio=0.4, acceptance_rate=0.3), x)
    assert inside(figure)
    assert all(apart(axes) for axes in figure.axes)


@pytest.mark.parametrize("height", [0.0, 0.5, 1.0])
def test_crowded_names_stay_next_to_the_axes(height: float) -> None:
    _, axes = canvas(5, 4, (0.1, 0.1, 0.6, 0.8))
    assert label_placement.label_at_right(axes, [(height, f"curve {index}", INK) for index in range(9)]) == 0
    assert len(axes.texts) == 9
    assert apart(axes)
    frame = axes.get_window_extent()
    middles = [(box.y0 + box.y1) / 2 for box in (Text.get_window_extent(text) for text in axes.texts)]
    assert frame.y0 - 3 <= min(middles)
    assert max(middles) <= frame.y1 + 3


# --- The map of draft lengths -------------------------------------------------------------------------------------------


def test_the_map_has_the_best_draft_length_everywhere() -> None:
    axes = best_draft_length.draw().axes[0]
    (mesh,) = (each for each in axes.collections if isinstance(each, QuadMesh))
    drawn = np.asarray(mesh.get_array())
    corners = np.asarray(mesh.get_coordinates())
    rates, ratios = (corners[0, :-1, 0] + corners[0, 1:, 0]) / 2, np.sqrt(corners[:-1, 0, 1] * corners[1:, 0, 1])
    for row, column in itertools.product(range(5, 500, 62), repeat=2):
        rate, ratio = rates[column], ratios[row]
        speeds = speculative.speedup(rate, np.arange(200), ratio)  # by enumeration
        assert speeds[drawn[row, column]] == pytest.approx(speeds.max(), rel=1e-4)
    clear = np.abs(rates / ratios[:, None] - 1) > 0.01  # half a cell, because the mesh stores only corners
    assert np.array_equal((drawn == 0)[clear], (rates < ratios[:, None])[clear])


def test_contour_lines_of_the_map_have_their_speed_ups() -> None:
    axes = best_draft_length.draw().axes[0]
    contours = [each for each in axes.collections if type(each).__name__ == "QuadContourSet"][-1]
    assert len(contours.get_paths()) == len(best_draft_length.SPEEDS)
    for path, speed in zip(contours.get_paths(), best_draft_length.SPEEDS, strict=True):
        at = np.asarray(path.vertices)
        at = at[at[:, 0] < 0.98]
        best = speculative.speedup(at[:, 0], speculative.optimal_draft_length(at[:, 0], at[:, 1]), at[:, 1])
        assert len(at) > 20
        assert best == pytest.approx(speed, rel=0.01)


def test_points_are_marked_on_the_map_and_named() -> None:
    rows = pl.DataFrame({"acceptance_rate": [0.79, 0.48], "cost_ratio": [0.117, 0.0555], "name": ["EnDe", "CNN/DM"]})
    figure = best_draft_length.draw(rows)
    assert coordinates([lines(figure.axes[0])["points"]]) == {(0.79, 0.117), (0.48, 0.0555)}
    assert {"EnDe", "CNN/DM"} <= {text.get_text() for text in figure.axes[0].texts}
    assert inside(figure)
    assert apart(figure.axes[0])


# --- Accepted tokens ----------------------------------------------------------------------------------------------------


def walked(rate: float, gamma: int, tokens: int) -> Any:
    """Expected rounds by accepted tokens: all rounds of all decodings, by recursion over the remaining tokens."""
    counts = np.zeros((tokens + 1, gamma + 1))
    for left in range(1, tokens + 1):
        drafted = min(gamma, left - 1)
        for n in range(drafted + 1):
            probability = rate**n * (1 - rate if n < drafted else 1)
            counts[left] += probability * counts[left - n - 1]
            counts[left, n] += probability
    return counts[tokens] / counts[tokens].sum()


@given(st.floats(0, 1), st.integers(0, 6), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_law_counts_every_round_of_a_decoding(rate: float, gamma: int, tokens: int) -> None:
    assert accepted_tokens.law(rate, gamma, tokens) == pytest.approx(walked(rate, gamma, tokens), abs=1e-12)


def histogram() -> pl.DataFrame:
    rows = []
    for point, (rate, gamma, tokens) in enumerate([(0.5, 3, 20), (0.9, 6, 40)]):
        for view, rounds in (("paths", 4000), ("events", 300)):
            for n, share in enumerate(walked(rate, gamma, tokens)):
                rows.append((point, view, n, round(rounds * share), rate, gamma, tokens))
    names = ["point", "view", "accepted", "rounds", "acceptance_rate", "draft_length", "tokens"]
    return pl.DataFrame(rows, schema=names, orient="row")


def test_shares_of_rounds_and_both_laws_have_their_values() -> None:
    figure = accepted_tokens.draw(histogram())
    for axes, (rate, gamma, tokens), point in zip(figure.axes, [(0.5, 3, 20), (0.9, 6, 40)], (0, 1), strict=True):
        drawn = lines(axes)
        assert xy(drawn["distribution of Eq. 1: whole drafts"])[1] == pytest.approx(speculative.tokens_pmf(rate, gamma))
        assert xy(drawn["exact distribution: last drafts cut short"])[1] == pytest.approx(walked(rate, gamma, tokens))
        for view, heights in (
            ("paths", [bar.get_height() for bar in axes.patches]),  # type: ignore[attr-defined]
            ("events", xy(drawn["simulated: events"])[1]),
        ):
            rounds = histogram().filter(view=view, point=point)["rounds"].to_numpy()
            assert heights == pytest.approx(rounds / rounds.sum())
    assert inside(figure)


def test_without_a_law_only_bars_are_drawn() -> None:
    rows = histogram().select("point", "view", "accepted", "rounds")
    axes = accepted_tokens.draw(rows).axes[0]
    assert set(lines(axes)) == {"simulated: events"}
    assert len(axes.patches) == 4
    alone = accepted_tokens.draw(rows.filter(view="events", point=0)).axes[0]
    rounds = rows.filter(view="events", point=0)["rounds"].to_numpy()
    assert [bar.get_height() for bar in alone.patches] == pytest.approx(rounds / rounds.sum())  # type: ignore[attr-defined]
    assert not alone.lines


# --- Batches ------------------------------------------------------------------------------------------------------------


def test_speed_ups_over_batch_and_draft_length_are_the_models() -> None:
    target, draft, source = verify_cost.example()
    rates = (0.5, 0.7, 0.9)
    figure = verify_cost.draw(target, draft, rates, context=1024, source=source)
    left, right = (lines(axes) for axes in figure.axes)
    for batch in (1, 32, 256):
        at, speed = xy(left[f"batch {batch}"])
        assert speed == pytest.approx(batched_speedup(0.9, at.astype(int), target, draft, batch, 1024))
        assert xy(left[f"best {batch}"])[1] == pytest.approx([speed.max()])
    for rate in rates:
        batches, speeds = xy(right[f"rate {rate:g}"])
        every = [
            max(float(batched_speedup(rate, g, target, draft, int(batch), 1024)) for g in range(16)) for batch in batches
        ]
        assert speeds == pytest.approx(every)
        largest = largest_batch(rate, target, draft, 1024).largest
        (ringed,), (speed,) = xy(right[f"largest {rate:g}"])
        assert (ringed, speed) == (largest, speeds[list(batches).index(largest)])
        assert 1 < largest < 256  # the example has both sides
    assert "assumed" in words(figure)
    assert inside(figure)


def test_drafting_that_never_pays_is_labelled_never() -> None:
    target = PassTimes([1, 2], [1, 2], [0], [[[1.0], [2.0]], [[1.0], [2.0]]])
    figure = verify_cost.draw(target, PassTimes([1, 2], [1], [0], [[[0.5]], [[0.5]]]), [0.4], context=0, source="assumed")
    assert "never" in words(figure)
    assert not any(label.startswith("largest") for label in lines(figure.axes[1]))
    with pytest.raises(ParameterError, match="must be 1 to 6 rates, got 0"):
        verify_cost.draw(target, target, [], context=0, source="assumed")


def test_the_map_by_hand() -> None:
    """Regions and contour lines are named in place; a point with a name has its label next to it."""
    rows = pl.DataFrame({"acceptance_rate": [0.3, 0.9], "cost_ratio": [0.5, 0.2], "name": [None, "mine"]})
    figure = best_draft_length.draw(rows)
    drawn = shown(figure)
    assert drawn.texts == [
        "Best draft length, and its speed-up",
        "colours: best draft length γ; lines: speed-up over plain decoding (Theorem 3.8, many tokens)",
    ]  # fmt: skip
    [panel] = drawn.panels
    assert (panel.x, panel.y) == ("acceptance rate α per tested token", "cost ratio c (draft pass / target pass)")
    assert panel.scales == ("linear", "log")
    axes = figure.axes[0]
    assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((0, 1, 0.005, 1))
    assert panel.ticks[1] == ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]
    regions = {"γ = 1": (1, 1), "2": (2, 2), "3": (3, 3), "4": (4, 4), "5–6": (5, 6), "7–9": (7, 9), "10–14": (10, 14),
               "15–24": (15, 24), "25 +": (25, 10**9)}  # fmt: skip
    named = {text.get_text(): text for text in axes.texts}
    speeds = [f"{speed}×" for speed in ("1.1", "1.5", "2", "3", "5", "10")]
    assert [*named] == ["plain decoding is fastest: α ≤ c", *regions, *reversed(speeds), "mine"]
    for name, (low, high) in regions.items():
        rate, ratio = named[name].get_position()
        assert low <= int(speculative.optimal_draft_length(rate, ratio)) <= high
        assert 0.0075 < ratio < 0.3
    for name, speed in zip(speeds, best_draft_length.SPEEDS, strict=True):
        at = named[name].xy[1]  # type: ignore[attr-defined]
        ratio = 0.005 ** (1 - at)  # position on a log axis from .005 to 1
        best = speculative.speedup(0.998, speculative.optimal_draft_length(0.998, ratio), ratio)
        assert float(best) == pytest.approx(speed, rel=0.02)
    rate, ratio = named["plain decoding is fastest: α ≤ c"].get_position()
    assert rate < ratio
    assert named["mine"].xy == (0.9, 0.2)  # type: ignore[attr-defined]
    assert named["mine"].get_path_effects()
    even = panel.line("break-even")
    assert all(x == y for x, y in even)
    assert (even[0][0], even[-1][0]) == pytest.approx((0.005, 1))
    assert panel.line("points") == [(0.3, 0.5), (0.9, 0.2)]
    (mesh,) = (each for each in axes.collections if isinstance(each, QuadMesh))
    colours = {length: to_hex(mesh.cmap(mesh.norm(length))) for length in (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 14, 15, 24, 25, 500)}
    assert colours[0] == "#ececec"
    assert colours[5] == colours[6] != colours[7] == colours[9] != colours[10] == colours[14] != colours[15] == colours[24]
    assert colours[25] == colours[500] == to_hex(colormaps["cividis"](0.98 - 0.68))
    assert colours[1] == to_hex(colormaps["cividis"](0.98))
    assert len({*colours.values()}) == 10
    corners = np.asarray(mesh.get_coordinates())
    assert np.asarray(mesh.get_array()).shape == (500, 500)
    middles = (corners[0, :-1, 0] + corners[0, 1:, 0]) / 2
    assert (middles[0], middles[-1]) == pytest.approx((0.002, 0.998))
    contours = [each for each in axes.collections if type(each).__name__ == "QuadContourSet"]
    assert [to_hex(each.get_edgecolor()[0]) for each in contours] == ["#ffffff", "#000000"]
    assert [text.get_text() for text in best_draft_length.draw(rows.drop("name")).axes[0].texts] == [*named][:-1]


def test_batches_of_pass_times_by_hand() -> None:
    """For batches of 1 and 2 two tokens take as long as one, for batches of 4 as long as two passes."""
    batches = [1, 2, 4]
    wide = [[[1.0], [1.0]], [[1.0], [1.0]], [[1.0], [2.0]]]
    target, draft = PassTimes(batches, [1, 2], [16], wide), PassTimes(batches, [1], [16], [[[0.25]]] * 3)
    figure = verify_cost.draw(target, draft, [0.5, 0.2], context=16, source="mine")
    drawn = shown(figure)
    assert drawn.texts == ["Up to which batch size does drafting pay?", "mine; context 16"]
    left, right = drawn.panels
    assert (left.title, left.x) == ("α = 0.5   (star: best draft length)", "draft length γ  [tokens]")
    assert left.y == "speed-up over plain decoding of the same batch"
    assert right.title == "ring: largest batch that pays;  numbers: best γ at α = 0.5"
    assert (right.x, right.y) == ("sequences per batch", "speed-up at the best draft length")
    gain = 1.5 / 1.25  # 1.5 tokens per draft pass (a quarter) and target pass (one)
    assert left.line("batch 1") == left.line("batch 2") == [(0, 1), (1, pytest.approx(gain))]
    assert left.line("batch 4") == [(0, 1), (1, pytest.approx(1.5 / 2.25))]
    assert left.line("best 1") == left.line("best 2") == [(1, pytest.approx(gain))]
    assert left.line("best 4") == [(0, 1)]
    assert right.line("rate 0.5") == [(1, pytest.approx(gain)), (2, pytest.approx(gain)), (4, 1)]
    assert right.line("rate 0.2") == [(1, 1), (2, 1), (4, 1)]  # 1.2 tokens in a time of 1.25
    assert right.line("largest 0.5") == [(2, pytest.approx(gain))]
    assert [label for label, _ in right.lines] == ["rate 0.2", "rate 0.5", "largest 0.5", "plain"]
    assert right.texts == ["1", "1", "0", *(text for text in right.texts[3:])]
    assert sorted(right.texts[3:]) == ["α = 0.2: never", "α = 0.5: to 2"]
    assert [text.xy for text in figure.axes[1].texts[:3]] == [  # type: ignore[attr-defined]
        (1, pytest.approx(gain)), (2, pytest.approx(gain)), (4, 1),
    ]  # fmt: skip
    assert sorted(left.texts) == ["batch 1", "batch 2", "batch 4"]
    for axes, panel in zip(figure.axes, (left, right), strict=True):
        assert {y for _, y in panel.line("plain")} == {1}
        assert axes.get_ylim()[0] == 0
        assert axes.yaxis.get_major_formatter()(1.5, 0) == "1.5×"
        assert panel.grid == "xy"
    assert figure.axes[0].get_xlim() == (0, 1)
    assert all(at == round(at) for at in figure.axes[0].get_xticks())
    assert figure.axes[1].get_xlim() == pytest.approx((1 / 1.3, 4 * 1.3))
    assert figure.axes[1].get_ylim()[1] > 1.1 * gain
    assert right.ticks[0] == ["1", "2", "4"]
    assert not figure.axes[1].xaxis.get_minorticklocs().size
    assert not odd_dashes(figure)
    # Too many batches are thinned evenly, including the first and the last; draft length 0 alone still has an axis.
    target, draft, source = verify_cost.example()
    drawn = shown(verify_cost.draw(target, draft, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], context=1024, source=source))
    assert [label for label, _ in drawn.panels[0].lines if label.startswith("batch")] == [
        f"batch {each}" for each in (1, 4, 8, 32, 64, 256)
    ]
    assert source == (
        "times assumed: max of reading (10 ms + 0.05 ms per sequence) and arithmetic (0.1 ms per token); draft 1/12 of it"
    )
    assert target.batches.tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert target.widths.tolist() == [*range(1, 17)]
    for batch in target.batches.tolist():
        assert float(draft(int(batch), 1, 1024)) == pytest.approx(max(10 + 0.05 * batch, 0.1 * batch) / 12)
        for width in (1, 5, 16):
            assert float(target(int(batch), width, 1024)) == pytest.approx(max(10 + 0.05 * batch, 0.1 * batch * width))
    single = PassTimes([1], [1], [0], [[[1.0]]])
    assert verify_cost.draw(single, single, [0.5], context=0, source="").axes[0].get_xlim() == (0, 1)
    with pytest.raises(ParameterError, match="acceptance_rates must be 1 to 6 rates, got 7"):
        verify_cost.draw(single, single, [0.1] * 7, context=0, source="")


# --- Methods, and the figures of a run ----------------------------------------------------------------------------------


def several(**scenario: Any) -> dict[str, Any]:
    accept = {"accept": {"kind": "iid", "acceptance_rate": 0.8}}
    return {
        "scenario": {"name": "several", "tokens": 24, "replications": 20, "seed": 3, **scenario},
        "method": [
            {"name": "autoregressive", "layers": 12},
            {"name": "speculative", "layers": 12, "draft_length": 3, "outcomes": accept, "cost": {"cost_ratio": 0.1}},
            {"name": "ppd", "layers": 12, "exit_layer": 6, "candidates": 2,
             "outcomes": {"match": {"kind": "iid", "match_rate": 0.6}}},
        ],
    }  # fmt: skip


NAMES = {
    "speculative": "speculative decoding, γ = 3, α = 0.8",
    "ppd": "Predictive Pipelined Decoding, k = 2, exit layer 6, p = 0.6",
}


def test_every_method_is_drawn_at_its_price() -> None:
    rows = sim.run(several())
    figure = method_comparison.draw(rows)
    last = rows.filter(view="events")
    for axes, x in zip(figure.axes, method_comparison.AXES, strict=True):
        drawn = lines(axes)
        for method in ("speculative", "ppd"):
            assert coordinates([drawn[NAMES[method]]]) == set(last.filter(method=method).select(x, "speedup").rows())
        assert coordinates([drawn["plain decoding"]]) == {(1, 1)}
    markers = {(line.get_marker(), line.get_color()) for line in figure.axes[0].lines if line.get_label() in NAMES.values()}
    assert len({marker for marker, _ in markers}) == len({colour for _, colour in markers}) == 2
    assert inside(figure)


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


@pytest.mark.usefixtures("album")
def test_a_run_draws_the_figures_of_its_swept_axes(tmp_path: Path) -> None:
    scenario = several()
    scenario["method"] = scenario["method"][1]
    out = tmp_path / "run"
    sim.run(scenario, sweep={"method.outcomes.accept.acceptance_rate": [0.5, 0.8], "scenario.tokens": [8, 24]}, out=out)
    assert names(of_run(out)) == {"speedup_acceptance_rate", "speedup_tokens", "accepted", "distribution_point_0"}


def test_law_of_accepted_tokens_is_drawn_only_for_iid_acceptances(tmp_path: Path, album: Album) -> None:
    drawn: list[pl.DataFrame] = []
    scenario = several()
    scenario["method"] = scenario["method"][1]
    for kind, more in (("iid", {}), ("markov", {"correlation": 0.5})):
        scenario["method"]["outcomes"] = {"accept": {"kind": kind, "acceptance_rate": 0.8, **more}}
        sim.run(scenario, out=tmp_path / kind)
        of_run(tmp_path / kind)
        drawn.append(album.drawn["accepted"][1][0])
    independent, correlated = drawn
    assert independent["acceptance_rate"].unique().to_list() == [0.8]
    assert correlated["acceptance_rate"].null_count() == correlated.height


def test_trade_off_of_several_methods_excludes_those_that_draft(tmp_path: Path, album: Album) -> None:
    rows = sim.run(several(), out=tmp_path / "run")
    assert {"methods", "speedup_acceptance_rate"} <= names(of_run(tmp_path / "run"))
    for x in tradeoff.AXES:
        module, arguments, options, about = album.drawn[f"tradeoff_{x}"]
        assert (module, options) == ("tradeoff", {"x": x})
        drawn = arguments[0]  # without the columns that no figure reads
        assert {"method", "speedup", x} <= {*drawn.columns}
        assert drawn.equals(rows.filter(pl.col("draft_length").is_null()).select(drawn.columns))
        assert about == subject.of_run(tmp_path / "run")


def test_trade_off_excludes_adaptive_drafts(tmp_path: Path, album: Album) -> None:
    sim.run("compare", replications=8, out=tmp_path / "run")
    assert "methods" in names(of_run(tmp_path / "run"))
    drawn = [arguments[0] for module, arguments, _, _ in album.drawn.values() if module == "tradeoff"]
    assert [set(rows["method"]) for rows in drawn] == 2 * [{"autoregressive", "ppd"}]


@pytest.mark.usefixtures("album")
def test_a_run_of_ppd_has_only_its_figures(tmp_path: Path) -> None:
    scenario = several()
    scenario["method"] = [scenario["method"][0], scenario["method"][2]]
    sim.run(scenario, out=tmp_path / "run")
    assert names(of_run(tmp_path / "run")) == {"tradeoff_mean_busy_units", "tradeoff_compute_per_token", "distribution_point_1"}


# --- All of them --------------------------------------------------------------------------------------------------------


def every() -> dict[str, Figure]:
    target, draft, source = verify_cost.example()
    return {
        "s": speedup.draw(simulated()), "t": speedup.draw(simulated(), "tokens"), "g": best_draft_length.draw(),
        "a": accepted_tokens.draw(histogram()), "v": verify_cost.draw(target, draft, [0.8], context=1024, source=source),
        "m": method_comparison.draw(sim.run(several())),
    }  # fmt: skip


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name, figure in every().items():
        save(figure, tmp_path / f"{name}.a")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):  # user settings change nothing
        for name, figure in every().items():
            for again in save(figure, tmp_path / f"{name}.b"):
                assert again.read_bytes() == (tmp_path / again.name.replace(".b.", ".a.")).read_bytes()


def test_rows_that_cannot_be_drawn_are_refused() -> None:
    table = sim.run(several(), views=["formula"])
    for draw, rows, needed in (
        (speedup.draw, simulated(), "draft_length"),
        (accepted_tokens.draw, histogram(), "rounds"),
        (best_draft_length.draw, simulated(), "cost_ratio"),
        (method_comparison.draw, table, "reserved_units"),
    ):
        with pytest.raises(ParameterError, match="needs at least one row"):
            draw(rows.clear())
        with pytest.raises(ParameterError, match="none called"):
            draw(rows.drop(needed))
    for draw, rows in ((speedup.draw, simulated()), (accepted_tokens.draw, histogram()), (method_comparison.draw, table)):
        with pytest.raises(ParameterError, match="unknown view 'path'; did you mean paths"):
            draw(rows.with_columns(view=pl.lit("path")))
    with pytest.raises(ParameterError, match="unknown x 'gamma'"):
        speedup.draw(simulated(), "gamma")
    many = pl.concat([histogram().filter(point=0).with_columns(point=pl.lit(n, dtype=pl.Int64)) for n in range(13)])
    with pytest.raises(ParameterError, match="at most 12 points, got 13"):
        accepted_tokens.draw(many)
