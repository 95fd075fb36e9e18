"""Figure of Big Little Decoder's operations and memory traffic: its artists, and its factors, checked segment by segment."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import save
from figures.of_theory import bild_operations
from figures.of_theory.bild_operations import PANELS, fallback_of_intensity
from model import published
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.methods.bild import theory as bild
from model.published.bild_tables import FIGURE_8
from tests.figures.test_figures_speculative import inside
from tests.figures.test_figures_tradeoff import lines, words
from tests.support.figure_checks import laid_out, odd_dashes, shown

RATES = [0.0, 0.01, 0.05, 0.2]
SETTING: dict[str, Any] = {"max_draft_length": 6, "cost_ratio": 0.3, "operations_ratio": 0.07, "memory_ratio": 0.05}


def made(fallback: float = 0.15, rates: list[float] = RATES, **more: Any) -> pl.DataFrame:
    return bild_operations.factors(fallback, rates, **{**SETTING, **more})


def drawn(rows: pl.DataFrame, **more: Any) -> Figure:
    return bild_operations.draw(rows, **{"source": "assumed", **more})


def by_segments(fallback: float, rollback: float, variant: str) -> dict[str, float]:
    """Totals over all lengths of a draft and positions of the first rejected token; a pass reads its weights once."""
    most, totals = SETTING["max_draft_length"], dict.fromkeys(("tokens", "operations", "memory", "time"), 0.0)
    for n in range(most + 1):
        length = (1 - fallback) ** n * (fallback if n < most else 1)
        for kept in range(n + 1):
            chance = length * (1 - rollback) ** kept * (rollback if kept < n else 1)
            again = variant == "code" and kept < n  # one more pass over the kept tokens, the corrected one and the next
            small, large = min(n + 1, most), 1 + again
            totals["tokens"] += chance * (kept + large)
            totals["operations"] += chance * (n + 1 + again * (kept + 2) + SETTING["operations_ratio"] * small)
            totals["memory"] += chance * (large + SETTING["memory_ratio"] * small)
            totals["time"] += chance * (large + SETTING["cost_ratio"] * small)
    tokens = totals["tokens"]
    return {
        "operations_factor": totals["operations"] / tokens, "memory_factor": totals["memory"] / tokens,
        "intensity_factor": totals["operations"] / totals["memory"], "speedup": tokens / totals["time"],
    }  # fmt: skip


def test_factors_equal_a_sum_over_segments() -> None:
    found = made()
    assert found.select("rollback_rate", "variant").rows() == list(itertools.product(RATES, bild.VARIANTS))
    for row in found.iter_rows(named=True):
        expected = by_segments(row["fallback_rate"], row["rollback_rate"], row["variant"])
        assert {name: row[name] for name in PANELS} == pytest.approx(expected)


def test_bars_have_the_factors_of_their_rate_and_variant() -> None:
    rows = made()
    figure = drawn(rows.sample(fraction=1, shuffle=True, seed=2))
    for axes, (name, title) in zip(figure.axes, PANELS.items(), strict=True):
        assert axes.get_title(loc="left") == title
        for container in axes.containers:
            variant = str(container.get_label()).split(" ")[0]
            bars = [bar for bar in container.get_children() if isinstance(bar, Rectangle)]
            own = rows.filter(variant=variant)
            assert [bar.get_height() for bar in bars] == own[name].to_list()
            # The paper's bar is at the left of its rate's tick, the code's at the right, and they touch.
            ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
            positions = np.arange(len(RATES))
            assert np.array(ends)[:, 1 if variant == "paper" else 0] == pytest.approx(positions)
        assert len(axes.containers) == 2
        assert [tick.get_text() for tick in ticks(axes)] == ["0", "1", "5", "20"]
        assert [text.get_text() for text in axes.texts] == [
            f"{value:#.3g}" for variant in bild.VARIANTS for value in rows.filter(variant=variant)[name]
        ]
    assert inside(figure)


def ticks(axes: Any) -> Any:
    laid_out(axes.figure)
    return axes.get_xticklabels()


def heights(figure: Any, panel: int, variant: str) -> list[float]:
    (container,) = (each for each in figure.axes[panel].containers if str(each.get_label()).startswith(variant))
    return [bar.get_height() for bar in container.get_children()]


def test_rollbacks_change_all_factors_but_the_papers_intensity() -> None:
    figure = drawn(made())
    for variant in bild.VARIANTS:
        assert np.all(np.diff(heights(figure, 0, variant)) > 0)
        assert np.all(np.diff(heights(figure, 1, variant)) > 0)
        assert np.all(np.diff(heights(figure, 3, variant)) < 0)
    assert heights(figure, 2, "paper") == pytest.approx([heights(figure, 2, "paper")[0]] * len(RATES))
    # Without rollbacks there is no additional pass.
    for panel in range(4):
        one, other = (heights(figure, panel, variant) for variant in bild.VARIANTS)
        assert one[0] == pytest.approx(other[0])
        assert all(a != pytest.approx(b) for a, b in zip(one[1:], other[1:], strict=True))


def test_figure_8_is_consistent_except_for_the_speed() -> None:
    """T5: the fallback rate follows from 5 times the intensity; then memory is near 1/5, and operations are slightly higher."""
    small, large = preset("t5-small"), preset("t5-large")
    ratio = small.layers * small.layer_weights / (large.layers * large.layer_weights)
    rate = fallback_of_intensity(FIGURE_8["intensity_factor"], 10, ratio, ratio)
    rows = made(rate, [0.0, 0.01], max_draft_length=10, cost_ratio=6 / 24, operations_ratio=ratio, memory_ratio=ratio)
    for row in rows.filter(variant="paper").iter_rows(named=True):
        assert row["intensity_factor"] == pytest.approx(FIGURE_8["intensity_factor"])
        assert row["memory_factor"] == pytest.approx(FIGURE_8["memory_factor"], rel=0.11)
        assert 1 < row["operations_factor"] < 1.15
        assert row["speedup"] > 1.3 * FIGURE_8["speedup"]
    printed = published.table("bild-table-1").lookup(data_set="cnn_dm", alignment="aligned", loss="none")
    assert printed["speedup"] == FIGURE_8["speedup"]


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.99])
def test_fallback_of_intensity_inverts_the_intensity(rate: float) -> None:
    wanted = float(bild.intensity_factor(rate, 0.4, 7, 0.1, 0.2))
    assert fallback_of_intensity(wanted, 7, 0.1, 0.2) == pytest.approx(rate)


def test_published_values_are_lines_across_their_panels() -> None:
    figure = drawn(made(), stated=FIGURE_8)
    for axes, name in zip(figure.axes, PANELS, strict=True):
        found = lines(axes)
        assert set(np.asarray(found["large model alone"].get_ydata())) == {1.0}
        if name in FIGURE_8:
            assert set(np.asarray(found["stated"].get_ydata())) == {FIGURE_8[name]}
            assert FIGURE_8[name] < axes.get_ylim()[1]
        else:
            assert "stated" not in found
    assert "published" in words(figure)
    assert "published" not in words(drawn(made()))
    high = drawn(made(), stated={"speedup": 50.0})
    assert high.axes[3].get_ylim()[1] > 50


def test_provenance_is_printed_in_the_figure() -> None:
    labels = words(bild_operations.draw(made(), source="rates assumed, weights published"))
    assert "rates assumed, weights published; falls back after 15 % of its tokens, drafts of at most 6;" in labels
    assert "takes 0.07 of the operations, 0.05 of the weights, 0.3 of the time" in labels


@pytest.mark.parametrize("count", [1, 3, 8])
def test_labels_stay_on_the_page(count: int) -> None:
    rates = [0.123, 0.0, 0.9, 0.4, 0.3, 0.2, 0.1, 0.05][:count]
    assert inside(bild_operations.draw(made(1.0, rates), source="rates assumed, weights published", stated=FIGURE_8))


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        save(bild_operations.draw(made(), source=""), tmp_path / name, formats=("svg",))[0].read_bytes() for name in ("one", "two")
    )
    assert first == second


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: made(1.5), r"fallback_rate must be between 0 and 1, got 1\.5"),
    (lambda: made(rates=[-0.1]), r"rollback_rate must be between 0 and 1, got -0\.1"),
    (lambda: made(memory_ratio=-1.0), r"memory_ratio must be at least 0, got -1\.0"),
    (lambda: fallback_of_intensity(20.0, 10, 0.0625, 0.0625), r"intensity must be between 1 and .*, got 20\.0"),
    (lambda: drawn(made().clear()), "the figure of operations needs at least one row"),
    (lambda: drawn(made().drop("speedup")), "the figure of operations needs the columns .* called speedup"),
    (lambda: drawn(made(), stated={"flops": 1.0}), "unknown stated factor 'flops'"),
    (lambda: drawn(made(rates=np.linspace(0, 1, 9).tolist())), "rows must have at most 8 rollback rates, got 9"),
    (lambda: drawn(pl.concat([made(), made(0.2)])), "rows must be of one fallback rate, .*, got 2"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()


# --- By hand ---------------------------------------------------------------------------------------------------------------


def test_operations_by_hand() -> None:
    rows = pl.DataFrame([
        {"variant": variant, "rollback_rate": rate, "fallback_rate": 0.125, "max_draft_length": 7, "cost_ratio": 0.3333,
         "operations_ratio": 0.0625, "memory_ratio": 0.05, "operations_factor": 1.5 + rate, "memory_factor": 0.25, "speedup": 0.5,
         "intensity_factor": 4.0 if variant == "paper" else 5.0}
        for rate in (0.2, 0.0) for variant in ("code", "paper")
    ])  # fmt: skip
    figure = drawn(rows, source="mine", stated={"memory_factor": 0.2, "speedup": 2.0})
    found = shown(figure)
    assert found.texts == [
        "Does Big Little Decoder save operations or memory traffic?",
        "mine; falls back after 12.5 % of its tokens, drafts of at most 7; the small model takes 0.0625 of the operations,"
        " 0.05 of the weights, 0.333 of the time",
    ]  # fmt: skip
    variants = ["variant paper", "variant code: one more pass of the large model after a rollback"]
    assert found.legends == [("", [*variants, "large model alone", "published"])]
    assert shown(drawn(rows)).legends == [("", [*variants, "large model alone"])]
    titles = ["operations per token", "weights read", "arithmetic intensity", "speed"]
    assert [panel.title for panel in found.panels] == titles
    assert [panel.y for panel in found.panels] == ["relative to the large model alone", "", "", ""]
    for index, (axes, panel, high) in enumerate(zip(figure.axes, found.panels, (1.7, 1.0, 5.0, 2.0), strict=True)):
        assert axes.get_position().bounds == pytest.approx((0.06 + 0.241 * index, 0.12, 0.195, 0.58))
        assert panel.x == "rollback rate  [% of drafted tokens]"
        assert panel.ticks[0] == ["0", "20"]
        assert axes.get_ylim() == pytest.approx((0, 1.18 * high))
        assert panel.grid == "y"
    bars = dict(found.panels[0].bars)
    assert bars["paper operations_factor"] == [(pytest.approx(-0.4), 0, 0.4, 1.5), (pytest.approx(0.6), 0, 0.4, 1.7)]
    assert np.array(bars["code operations_factor"]) == pytest.approx(np.array([(0, 0, 0.4, 1.5), (1, 0, 0.4, 1.7)]))
    assert found.panels[2].texts == ["4.00", "4.00", "5.00", "5.00"]
    assert [text.xy for text in figure.axes[0].texts] == [  # type: ignore[attr-defined]
        (place + side, value) for side in (-0.2, 0.2) for place, value in ((0, 1.5), (1, 1.7))
    ]  # fmt: skip
    assert not odd_dashes(figure)
    rate = fallback_of_intensity(2.5, 6, 0.07, 0.05)
    assert float(bild.intensity_factor(rate, 0.0, 6, 0.07, 0.05)) == pytest.approx(2.5, rel=1e-12)
