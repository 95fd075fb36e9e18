"""Limits of the figures: the largest number is drawn, one more is refused, and runs beyond the limit have no figure."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest

import figures
from figures.common import label_placement
from figures.of_logs import agreement_over_cost, match_rates
from figures.of_papers import ppd_table_3_times
from figures.of_runs import (
    accepted_tokens,
    bild_rates,
    bild_thresholds,
    method_comparison,
    operations_and_bytes,
    speedup,
    timeline,
    tradeoff,
)
from figures.of_theory import adaptive_draft_lengths, hierarchical_regions
from model.base.checks import ParameterError
from model.logs.position_log import PositionLog
from model.methods.ppd.algorithm import Parameters
from tests.figures import test_figures, test_figures_bild, test_figures_real, test_figures_tradeoff
from tests.support.figure_checks import formula


class PassedError(Exception):
    """The input was not refused: drawing would begin."""


@contextlib.contextmanager
def _unopened() -> Iterator[None]:
    raise PassedError
    yield


@cache
def record() -> PositionLog:
    return test_figures_real.log()


def several(rows: pl.DataFrame, count: int, name: str, value: Callable[[int], Any]) -> pl.DataFrame:
    """Copy rows `count` times, each with another value of a column and separate points."""
    more = [rows.with_columns(pl.lit(value(each)).alias(name)) for each in range(count)]
    if "point" in rows.columns and name != "point":
        most = int(rows["point"].max()) + 1  # type: ignore[arg-type]
        more = [each.with_columns(pl.col("point") + most * index) for index, each in enumerate(more)]
    return pl.concat(more, how="vertical_relaxed")


def one_method(choices: int = 1, settings: int = 1) -> pl.DataFrame:
    """Plain decoding, and a method with `choices` draft lengths at `settings` acceptance rates."""
    plain = {"point": 0, "view": "formula", "method": "autoregressive", "speedup": 1.0, "reserved_units": 1.0,
     "mean_busy_units": 1.0,
             "compute_per_token": 1.0, "draft_length": None, "acceptance_rate": None}  # fmt: skip
    rows = [plain]
    for length in range(choices):
        for rate in range(settings):
            own = {"point": len(rows), "method": "speculative", "draft_length": length + 1, "acceptance_rate": 0.5 + rate / 100}
            rows.append({**plain, **own, "speedup": 1.5, "compute_per_token": 1.2})
    return pl.DataFrame(rows, infer_schema_length=None)


def thresholds(count: int) -> pl.DataFrame:
    """Points with `count` rollback thresholds."""
    return several(
        _bild().filter(policy=bild_thresholds.BOTH, rollback_threshold=1.0), count, "rollback_threshold", lambda each: 1.0 + each
    )


@cache
def _bild() -> pl.DataFrame:
    return test_figures_bild.made()


def rates() -> pl.DataFrame:
    """Big Little Decoder at two fallback rates."""
    rows = {"method": "bild", "view": "formula", "fallback_rate": [0.1, 0.2], "rollback_rate": 0.0, "speedup": [1.5, 1.2],
            "max_draft_length": 4}  # fmt: skip
    return pl.DataFrame(rows)


SEQUENCES = pl.DataFrame({
    "text": "one", "policy": "heuristic", "position": [0, 1], "acceptance_rate": 0.5, "cost_ratio": 0.1, "low": 1.0, "median": 2.0,
    "high": 3.0, "speedup": 1.5,
})  # fmt: skip
COSTS = pl.DataFrame({"cost_ratio": [0.02], "medium_cost_ratio": [0.2], "draft_length": [3]})
LINE = test_figures_real.quality().head(1)
LENGTHS = pl.DataFrame({"point": [0], "view": ["paths"], "accepted": [1], "rounds": [2]})
CHOICE = one_method().filter(method="speculative")
FULL: dict[str, tuple[Any, Callable[[int], object], int, str]] = {
    "adaptive": (adaptive_draft_lengths, lambda n: adaptive_draft_lengths.draw(several(SEQUENCES, n, "text", str)), 3,
        "at most 3 sequences, got 4"),
    "agreement": (agreement_over_cost, lambda n: agreement_over_cost.draw(several(LINE, n, "rollback_threshold", float)), 8,
        "at most 8 lines, got 9"),
    "accepted": (accepted_tokens, lambda n: accepted_tokens.draw(several(LENGTHS, n, "point", int)), 12,
        "at most 12 points, got 13"),
    "bild": (bild_thresholds, lambda n: bild_thresholds.draw(several(_bild(), n, "name", str)), 3, "at most 3 records, got 4"),
    "bild curves": (bild_thresholds, lambda n: bild_thresholds.draw(thresholds(n)), 8, "1 to 8 rollback thresholds, got 9"),
    "bild rates": (bild_rates, lambda n: bild_rates.draw(several(rates(), n, "rollback_rate", lambda each: each / 9)), 6,
                   "at most 6 rollback rates, got 7"),
    "bild choices": (bild_rates, lambda n: bild_rates.draw(several(rates(), n, "max_draft_length", int)), 4,
                     "at most 4 choices, got 5"),
    "hierarchical": (hierarchical_regions,
        lambda n: hierarchical_regions.draw(several(COSTS, n, "draft_length", lambda each: each + 1)), 3,
                     "at most 3 choices of costs, got 4"),
    "match rate": (match_rates, lambda n: match_rates.draw(record(), range(1, n + 1)), 4, "at most 4 .*, got 5"),
    "match rate panels": (match_rates, lambda n: match_rates.draw_by_position(record(), range(1, n + 1)), 4,
                          "1 to 4 .*, got 5"),
    "match rate layers": (match_rates, lambda n: match_rates.draw_by_position(record(), [1], [1] * n), 5,
                          "1 to 5, got 6"),
    "methods": (method_comparison, lambda n: method_comparison.draw(one_method(n)), 12, "must be between 1 and 12, got 13"),
    "settings": (method_comparison, lambda n: method_comparison.draw(one_method(2, n)), 6, "must be between 1 and 6, got 7"),
    "choices": (operations_and_bytes, lambda n: operations_and_bytes.draw(several(CHOICE, n, "draft_length", int)), 16,
        "at most 16 points, got 17"),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_the_limit_is_drawn_and_one_more_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, draw, most, message = FULL[name]
    monkeypatch.setattr(module, "styled", _unopened)
    for count in (1, most):
        with pytest.raises(PassedError):
            draw(count)
    with pytest.raises(ParameterError, match=message):
        draw(most + 1)


def test_empty_input_is_refused() -> None:
    for call, message in (
        (lambda: match_rates.draw_by_position(record(), []), "candidates must be 1 to 4 different ones, got 0"),
        (lambda: match_rates.draw_by_position(record(), [1], []), "layers must be 1 to 5, got 0"),
        (lambda: match_rates.by_layer(record(), [0]), "candidates must be at least 1, got 0"),
        (lambda: match_rates.by_position(record(), [1], [1], "common", 0), "bins must be at least 1, got 0"),
        (lambda: timeline.draw(test_figures.INTERVALS, test_figures.COMMITS.clear()), "commits needs at least one row"),
        (lambda: timeline.draw(test_figures.INTERVALS, test_figures.COMMITS.drop("kind")), "none called kind"),
        (lambda: method_comparison.draw(one_method().filter(method="autoregressive")),
            "values of speedup.* needs at least one row"),
        (lambda: operations_and_bytes.draw(CHOICE.with_columns(speedup=pl.lit(None, pl.Float64))),
            "values of speedup.* needs at least one row"),
        (lambda: tradeoff.draw(CHOICE.with_columns(relative_latency=pl.lit(None, pl.Float64)), "compute_per_token"),
         "values of compute_per_token and relative_latency"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            call()


def test_a_timeline_fits_two_hundred_units() -> None:
    last = pl.DataFrame([(199, 0.0, 1.0, "forward", 0, 0, 0, 40, "kept")], schema=test_figures.SCHEMA, orient="row")
    rows, names = timeline.prepared(last)
    assert names == [f"unit {unit}" for unit in range(200)]
    assert rows.select("unit", "kind", "role", "width", "depth", "kv_only", "lane", "lanes").rows() == [
        (199, "kept", "target", 1, 0, False, 0, 1)
    ]
    with pytest.raises(ParameterError, match="room for at most 200 units, got 201; draw fewer, or export a trace"):
        timeline.prepared(last.with_columns(unit=pl.lit(200, pl.Int64)))
    for column, value, message in (("fate", "lost", "unknown fate 'lost'"), ("what", "look", "unknown interval 'look'")):
        with pytest.raises(ParameterError, match=message):
            timeline.prepared(last.with_columns(pl.lit(value).alias(column)))


def test_runs_draw_the_figures_that_fit() -> None:
    quality = several(LINE, 8, "rollback_threshold", float)
    replayed = formula("ppd-table-3")
    both = _bild().filter(policy=bild_thresholds.BOTH, rollback_threshold=1.0)
    for fits, rows, answer in (
        (method_comparison.fits, one_method(12), True), (method_comparison.fits, one_method(13), False),
        (method_comparison.fits, one_method(2, 6), True),
        (method_comparison.fits, one_method(2, 7), False), (method_comparison.fits, one_method().drop("mean_busy_units"), False),
        (method_comparison.fits, CHOICE, False),
        (method_comparison.fits, one_method().with_columns(speedup=pl.lit(None, pl.Float64)), False),
        (method_comparison.fits, one_method(), True),
        (agreement_over_cost.fits, quality, True), (agreement_over_cost.fits, quality.clear(), False),
        (agreement_over_cost.fits, several(LINE, 9, "rollback_threshold", float), False),
        (ppd_table_3_times.fits, several(replayed, 4, "copy", int), True),
        (ppd_table_3_times.fits, several(replayed, 5, "copy", int).head(17), False),
        (ppd_table_3_times.fits, replayed.head(1), True), (ppd_table_3_times.fits, replayed.with_columns(tokens=1), False),
        (ppd_table_3_times.fits, replayed.drop("latency_s"), False),
        (bild_thresholds.fits, thresholds(8), True), (bild_thresholds.fits, thresholds(9), False),
        (bild_thresholds.fits, several(_bild(), 3, "name", str), True),
        (bild_thresholds.fits, several(_bild(), 4, "name", str), False), (bild_thresholds.fits, pl.DataFrame(), False),
        (bild_thresholds.fits, both.head(2), True),
        (bild_thresholds.fits, both.head(1), False),
        (bild_thresholds.fits, pl.concat([both.head(1), both.head(1).with_columns(policy=pl.lit(bild_thresholds.LARGE))]), False),
        (bild_rates.fits, rates(), True), (bild_rates.fits, rates().head(1), False), (bild_rates.fits, rates().clear(), False),
        (bild_rates.fits, several(rates(), 6, "rollback_rate", float), True),
        (bild_rates.fits, several(rates(), 7, "rollback_rate", float), False),
        (bild_rates.fits, several(rates(), 4, "max_draft_length", int), True),
        (bild_rates.fits, several(rates(), 5, "max_draft_length", int), False),
    ):  # fmt: skip
        assert fits(rows) is answer, (fits.__module__, rows)


def test_many_marks_are_thinned_and_wide_ranges_use_a_log_axis() -> None:
    base = {"point": 0, "view": "paths", "method": "adaptive", "acceptance_rate": 0.5, "draft_length": 2, "cost_ratio": 0.1}
    for count, high, every, scale in ((24, 4.0, 1, "linear"), (25, 4.5, 2, "log"), (49, 1.0, 3, "linear")):
        rows = pl.DataFrame([base | {"tokens": 2 + each, "speedup": 1.0 if each else high} for each in range(count)])
        [axes] = speedup.draw(rows, "tokens").axes
        [marks] = [line for line in axes.lines if str(line.get_label()).startswith("paths")]
        assert (marks.get_markevery(), axes.get_yscale()) == (every, scale)
        low, top = axes.get_ylim()
        expected = (1 / 1.1, 1.2 * high) if scale == "log" else (0.82, 4.36) if high > 1 else (0.9, 1.2)
        assert (low, top) == pytest.approx(expected)
        assert axes.get_xlim() == (1, 512)


def test_sixty_labels_are_drawn_but_sixty_one_are_not() -> None:
    for count in (60, 61):
        rows = [test_figures_tradeoff.point(at, Parameters(40, 20, 1), 16, at / 70) for at in range(count)]
        axes = tradeoff.draw(pl.DataFrame(rows)).axes[0]
        assert any(text.get_text().startswith("p = 0.") for text in axes.texts) == (count == 60)


def test_bound_has_no_lengths_and_costly_drafts_have_fixed_length_0() -> None:
    rows = adaptive_draft_lengths.trajectories([0.5, 0.9, 0.0], 2.0, text="costly", longest=2, replications=3, seed=1)
    assert rows["policy"].unique(maintain_order=True).to_list() == [
        *adaptive_draft_lengths.CHOICES,
        adaptive_draft_lengths.FIXED,
        adaptive_draft_lengths.BOUND,
    ]
    bound = rows.filter(policy=adaptive_draft_lengths.BOUND).select("low", "median", "high", "speedup")
    assert bound.unique().rows() == [(None, None, None, 1.0)]
    assert rows.filter(policy=adaptive_draft_lengths.FIXED).select("median", "speedup").unique().rows() == [
        (0.0, 1.0)
    ]  # drafts only cost
    assert rows.select("text", "cost_ratio").unique().rows() == [("costly", 2.0)]
    assert rows.filter(policy="heuristic").select("position", "acceptance_rate").rows() == [(0, 0.5), (1, 0.9), (2, 0.0)]
    assert rows["speedup"].max() == 1.0


def test_defaults_are_as_documented() -> None:
    def usual(function: Any) -> dict[str, Any]:
        every = inspect.signature(function).parameters.items()
        return {name: each.default for name, each in every if each.default is not inspect.Parameter.empty}

    for function, expected in (
        (match_rates.draw, {"candidates": (1, 3, 5)}), (match_rates.by_position, {"bins": 8}),
        (match_rates.draw_by_position, {"candidates": (1, 3), "layers": None, "head": None, "bins": 8}),
        (agreement_over_cost.draw, {"cost": None, "quality": "agreement"}), (accepted_tokens.draw, {"about": ""}),
        (accepted_tokens.law, {"tokens": None}),
        (adaptive_draft_lengths.trajectories, {"text": "", "longest": 20, "replications": 1000, "seed": 0}),
        (adaptive_draft_lengths.example, {"replications": 1000}), (tradeoff.draw, {"x": "mean_busy_units"}),
        (speedup.draw, {"x": "acceptance_rate"}),
        (timeline.draw, {"commits": None, "title": "Timeline of units", "time_unit": "layer-times"}),
        (timeline.prepared, {"commits": None}),
        (label_placement.label_points, {"size": 8.5}), (label_placement.label_at_right, {"size": 8.5}),
        (bild_thresholds.of_run, {"cost_source": "see [cost]"}),
        (figures.save, {"formats": ("png", "svg")}), (figures.of_run, {"table": None, "target": None}),
        (figures.of_comparison, {"limits": None, "pair": None}),
    ):  # fmt: skip
        assert usual(function) == expected, function


def test_example_of_adaptive_lengths_has_a_steady_and_a_changing_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    played = adaptive_draft_lengths.trajectories

    def heard(rates: Any, cost_ratio: float, **options: Any) -> pl.DataFrame:
        asked.append((np.asarray(rates).tolist(), cost_ratio, options))
        return played(rates[:2], cost_ratio, **options | {"longest": 1})

    monkeypatch.setattr(adaptive_draft_lengths, "trajectories", heard)
    rows = adaptive_draft_lengths.example(7)
    assert asked == [
        ([0.85] * 399, 0.1, {"text": "steady text", "replications": 7}),
        ([0.85] * 200 + [0.45] * 199, 0.1, {"text": "text that becomes harder", "replications": 7}),
    ]
    assert rows["text"].unique(maintain_order=True).to_list() == ["steady text", "text that becomes harder"]
