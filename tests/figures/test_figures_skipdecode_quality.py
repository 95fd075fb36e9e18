"""Figure 4 of SkipDecode redrawn: all 30 published points twice, at their labels and at the layers that ran."""

from __future__ import annotations

import pytest

from figures.of_papers import skipdecode_quality
from model import published


def test_all_published_points_are_drawn_at_both_speed_ups() -> None:
    rows = published.table("skipdecode-table-4").rows
    figure = skipdecode_quality.draw()
    drawn: dict[str, set[tuple[float, float]]] = {"label": set(), "layers": set()}
    for axes in figure.axes:
        for line in axes.lines:
            kind = "label" if "label" in str(line.get_label()) else "layers"
            drawn[kind] |= {(round(float(x), 6), float(y)) for x, y in line.get_xydata()}
    base = {"opt-1.3b": 24, "opt-6.7b": 30}
    assert drawn["label"] == {(row["target_speedup"], row["rouge_l"]) for row in rows}
    assert drawn["layers"] == {(round(base[row["model"]] / row["mean_layers"], 6), row["rouge_l"]) for row in rows}


def test_rows_labelled_two_times_run_half_again_fewer_layers() -> None:
    """The note on Table 4: 1.41 to 1.63 times fewer layers where the label says 2."""
    found = [
        ratio for data_set in ("e2e", "reddit", "cnn_dm") for model in ("opt-1.3b", "opt-6.7b")
        for label, ratio, _ in skipdecode_quality.points(data_set, model) if label == 2
    ]
    assert (min(found), max(found)) == pytest.approx((1.41, 1.63), abs=0.005)
