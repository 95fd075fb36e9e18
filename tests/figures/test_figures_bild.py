"""Figure of Big Little Decoder's thresholds: its artists, and its points, checked segment by segment."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from figures import save
from figures.of_runs import bild_thresholds
from figures.of_runs.bild_thresholds import BOTH, LARGE, NO_FALLBACK, NO_ROLLBACK, SMALL
from model.base.checks import ParameterError
from model.methods.bild.threshold_decisions import Decisions, synthetic
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import lines, words
from tests.support.figure_checks import laid_out
from tests.support.threshold_points import points

FALLBACK, ROLLBACK, C = [0.2, 0.4, 0.6, 0.8], [1.0, 2.0, 4.0], 0.25
DRAWS = np.random.default_rng(5).random((3, 3000))
RECORD = synthetic(3000, DRAWS)


def made(record: Decisions = RECORD, low: Any = FALLBACK, high: Any = ROLLBACK, **more: Any) -> pl.DataFrame:
    return points(record, low, high, **{"cost_ratio": C, "cost_source": "assumed", **more})


def coordinates(rows: pl.DataFrame) -> list[list[float]]:
    return [list(row) for row in rows.select("latency", "agreement").rows()]


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    return made()


# --- Points -----------------------------------------------------------------------------------------------------------


def by_segments(record: Decisions, low: float, high: float, most: int, c: float, variant: str) -> tuple[float, float]:
    """Time per token and agreement, summed over all lengths of a draft and positions of the first rejected token."""
    written = record.confidence >= low
    back = written & (record.distance > high) & ((variant == "paper") | ~record.agrees)
    fallback = 1 - written.mean()
    rollback = back.sum() / written.sum() if written.any() else 0.0
    stays = written & ~back
    right = record.agrees[stays].mean() if stays.any() else 0.0
    tokens = time = agreeing = 0.0
    for n in range(most + 1):
        length = (1 - fallback) ** n * (fallback if n < most else 1)
        for kept in range(n + 1):
            chance = length * (1 - rollback) ** kept * (rollback if kept < n else 1)
            own = 2 if variant == "code" and kept < n else 1  # the large model's tokens: after a rollback it writes one more
            tokens += chance * (kept + own)
            agreeing += chance * (kept * right + own)
            time += chance * (min(n + 1, most) * c + own)
    return time / tokens, agreeing / tokens


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_points_equal_a_sum_over_segments(variant: str) -> None:
    found = made(variant=variant, windows=[2, 5])
    never = float(RECORD.distance.max())
    counts = {BOTH: 12, NO_ROLLBACK: 4, NO_FALLBACK: 6, LARGE: 1, SMALL: 1}
    assert dict(found["policy"].value_counts().rows()) == counts
    for row in found.filter(pl.col("policy").is_in([BOTH, NO_ROLLBACK, NO_FALLBACK])).iter_rows(named=True):
        low = 0.0 if row["fallback_threshold"] is None else row["fallback_threshold"]
        high = never if row["rollback_threshold"] is None else row["rollback_threshold"]
        expected = by_segments(RECORD, low, high, row["max_draft_length"], C, variant)
        assert (row["latency"], row["agreement"]) == pytest.approx(expected)
    assert set(found.filter(policy=NO_FALLBACK)["fallback_rate"]) == {0.0}
    assert set(found.filter(policy=NO_ROLLBACK)["rollback_rate"]) == {0.0}
    assert set(found.filter(policy=NO_FALLBACK)["max_draft_length"]) == {2, 5}
    assert set(found.filter(policy=BOTH)["max_draft_length"]) == {10}


def test_the_models_alone(rows: pl.DataFrame) -> None:
    assert coordinates(rows.filter(policy=LARGE)) == [[1.0, 1.0]]
    assert coordinates(rows.filter(policy=SMALL)) == [[C, RECORD.agrees.mean()]]


def test_where_everything_falls_back_the_small_model_only_costs() -> None:
    found = made(low=[1.5], high=[1.0]).filter(pl.col("fallback_threshold").is_not_null())
    assert coordinates(found) == [[1 + C, 1.0]] * 2


def test_more_rollbacks_are_slower_and_agree_more(rows: pl.DataFrame) -> None:
    """Exact for time: a rollback only loses tokens. For agreement it holds for this record, whose distance predicts errors."""
    for (_,), part in rows.filter(policy=BOTH).group_by(["fallback_threshold"]):
        ordered = part.sort("rollback_threshold")
        assert np.all(np.diff(ordered["latency"]) < 0)
        assert np.all(np.diff(ordered["agreement"]) < 0)
    # No rollback at all is the limit.
    least = rows.filter(policy=NO_ROLLBACK).sort("fallback_threshold")
    last = rows.filter(policy=BOTH, rollback_threshold=max(ROLLBACK)).sort("fallback_threshold")
    assert np.all(least["latency"].to_numpy() < last["latency"].to_numpy())


def test_without_rollback_more_fallbacks_are_slower_and_agree_more(rows: pl.DataFrame) -> None:
    ordered = rows.filter(policy=NO_ROLLBACK).sort("fallback_threshold")
    assert np.all(np.diff(ordered["latency"]) > 0)
    assert np.all(np.diff(ordered["agreement"]) > 0)


def test_too_few_fallbacks_hurt_time_and_agreement(rows: pl.DataFrame) -> None:
    """Section 7.3.3: tokens that should fall back are rolled back later, with all tokens after them."""
    low, high = (rows.filter(policy=BOTH, rollback_threshold=1.0, fallback_threshold=x).to_dicts()[0] for x in (0.2, 0.6))
    assert low["latency"] > high["latency"]
    assert low["agreement"] < high["agreement"]


def test_costly_verification_takes_longer(rows: pl.DataFrame) -> None:
    expensive = made(verify_cost=[(1, 1.0), (11, 1.5)])
    alone = pl.col("policy").is_in([LARGE, SMALL])
    assert np.all(expensive.filter(~alone)["latency"].to_numpy() > rows.filter(~alone)["latency"].to_numpy())
    assert expensive.filter(alone).equals(rows.filter(alone))
    assert expensive["agreement"].equals(rows["agreement"])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_frontier_is_pareto_optimal(pairs: list[tuple[int, int]]) -> None:
    table = pl.DataFrame(pairs, schema=["latency", "agreement"], orient="row")
    best = {(x, y) for x, y in pairs if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in pairs)}
    assert bild_thresholds.frontier(table).rows() == sorted(best)


# --- The figure -------------------------------------------------------------------------------------------------------


def test_one_curve_per_rollback_threshold(rows: pl.DataFrame) -> None:
    left = bild_thresholds.draw(rows.sample(fraction=1, shuffle=True, seed=1)).axes[0]
    marks = {str(each.get_label()): each for each in left.collections if isinstance(each, PathCollection)}
    for value in ROLLBACK:
        own = rows.filter(policy=BOTH, rollback_threshold=value).sort("fallback_threshold")
        curve = np.column_stack(xy(lines(left)[f"rollback {value:g}"]))
        assert curve.tolist() == coordinates(own)
        assert np.asarray(marks[f"fallback {value:g}"].get_offsets()).tolist() == curve.tolist()
        assert np.all(np.diff(marks[f"fallback {value:g}"].get_sizes()) > 0)
    assert [text.get_text() for text in left.get_legend().get_texts()] == [f"{value:g}" for value in ROLLBACK]
    assert "0.2 to 0.8" in left.get_title(loc="left")


def test_the_models_alone_are_marked_on_both_sides(rows: pl.DataFrame) -> None:
    figure = bild_thresholds.draw(rows)
    for axes in figure.axes:
        for policy in (LARGE, SMALL):
            assert np.column_stack(xy(lines(axes)[policy])).tolist() == coordinates(rows.filter(policy=policy))
            low, high = axes.get_xlim()
            assert low < xy(lines(axes)[policy])[0][0] < high


def test_pareto_front_and_all_points_of_each_policy(rows: pl.DataFrame) -> None:
    right = bild_thresholds.draw(rows).axes[1]
    for policy in (BOTH, NO_ROLLBACK, NO_FALLBACK):
        own = rows.filter(policy=policy)
        assert np.column_stack(xy(lines(right)[policy])).tolist() == coordinates(bild_thresholds.frontier(own))
        assert len(xy(lines(right)[f"all {policy}"])[0]) == own.height
    looks = {(lines(right)[policy].get_color(), lines(right)[policy].get_marker()) for policy in (BOTH, NO_ROLLBACK, NO_FALLBACK)}
    assert len(looks) == 3


def test_provenance_is_printed_in_the_figure(rows: pl.DataFrame) -> None:
    text = words(bild_thresholds.draw(rows))
    assert "(assumed: a small model that knows how often it is right)" in text
    assert "c = 0.25 (assumed)" in text
    assert "drafts of at most 10, variant paper" in text
    record = Decisions(RECORD.confidence, RECORD.distance, RECORD.agrees, "measured: T5 on XSum")
    told = words(bild_thresholds.draw(made(record, cost_source="measured", variant="code", max_draft_length=7)))
    assert "(measured: T5 on XSum); c = 0.25 (measured); drafts of at most 7, variant code" in told
    assert "a small model that knows" not in told


def two() -> pl.DataFrame:
    aligned = synthetic(3000, DRAWS, sureness=6.0)
    return pl.concat([made(name="unaligned"), made(aligned, name="aligned")])


def test_each_record_has_its_row_and_the_front_of_the_other() -> None:
    figure = bild_thresholds.draw(two())
    assert len(figure.axes) == 4
    for axes, name, other in ((figure.axes[1], "unaligned", "aligned"), (figure.axes[3], "aligned", "unaligned")):
        best = {each: coordinates(bild_thresholds.frontier(two().filter(name=each, policy=BOTH))) for each in (name, other)}
        assert np.column_stack(xy(lines(axes)[BOTH])).tolist() == best[name]
        assert np.column_stack(xy(lines(axes)[f"other {other}"])).tolist() == best[other]
        assert f"other {name}" not in lines(axes)
    assert len({axes.get_xlim() for axes in figure.axes}) == len({axes.get_ylim() for axes in figure.axes}) == 1
    assert inside(figure)


def apart(figure: Figure) -> bool:
    laid_out(figure)
    texts = [*figure.texts, *(axes.title for axes in figure.axes), *(axes.xaxis.label for axes in figure.axes)]
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in texts if text.get_text()]
    boxes += [legend.get_window_extent() for legend in (*figure.legends, *(axes.get_legend() for axes in figure.axes[::2]))]
    return not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_labels_do_not_overlap_and_stay_on_the_page(rows: pl.DataFrame) -> None:
    many = made(high=np.linspace(0.5, 6, 8), cost_ratio=0.4, variant="code")
    for table in (rows, two(), many):
        figure = bild_thresholds.draw(table)
        assert inside(figure)
        assert apart(figure)
    assert (
        len({line.get_color() for label, line in lines(bild_thresholds.draw(many).axes[0]).items() if label.startswith("rollback")})
        == 8
    )


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(rows: pl.DataFrame, tmp_path: Path) -> None:
    first, second = (save(bild_thresholds.draw(rows), tmp_path / name, formats=("svg",))[0].read_bytes() for name in ("one", "two"))
    assert first == second


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: made(cost_ratio=-1.0), "cost_ratio must be at least 0, got -1"),
    (lambda: made(max_draft_length=0), "max_draft_length must be at least 1, got 0"),
    (lambda: made(windows=[0]), r"windows\[0\] must be at least 1, got 0"),
    (lambda: made(variant="papers"), "unknown variant 'papers'"),
    (lambda: made(low=[-0.5]), r"fallback_thresholds\[0\] must be at least 0, got -0\.5"),
    (lambda: made(high=[-1.0]), r"rollback_thresholds\[0\] must be at least 0, got -1\.0"),
    (lambda: bild_thresholds.draw(made().clear()), "the figure of thresholds needs at least one row, got none"),
    (
        lambda: bild_thresholds.draw(made().drop("agreement")),
        "the figure of thresholds needs the columns .*, got none called agreement",
    ),
    (
        lambda: bild_thresholds.draw(pl.concat([made(name=str(index)) for index in range(4)])),
        "rows must be of at most 3 records, got 4",
    ),
    (lambda: bild_thresholds.draw(made().filter(policy=LARGE)), "rows must have 1 to 8 rollback thresholds, got 0"),
    (lambda: bild_thresholds.draw(made(high=range(9))), "rows must have 1 to 8 rollback .*, got 9"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
