"""Which figures a run of lossy methods has, and what is in them: the values on the axes are the rows'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

import sim
from figures import accepted, distribution, methods, of_run, tradeoff
from model import published
from sim import trace
from tests.test_figures_speculative import inside
from tests.test_figures_tradeoff import coordinates, lines


class Seen:
    """What drawing functions were given, and what they drew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.of: dict[str, list[tuple[pl.DataFrame, Figure]]] = {}
        for module in modules:
            self._watch(monkeypatch, module, module.draw)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, module: Any, draw: Any) -> None:
        found = self.of.setdefault(module.__name__.rpartition(".")[2], [])

        def watched(rows: Any, *more: Any, **options: Any) -> Figure:
            figure: Figure = draw(rows, *more, **options)
            found.append((rows, figure))
            return figure

        monkeypatch.setattr(module, "draw", watched)


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


FEW: dict[str, Any] = {"replications": 8}


# --- All methods together -----------------------------------------------------------------------------------------------


def test_lossy_methods_have_no_place_in_the_trade_off_and_one_in_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch, tradeoff, methods)
    rows = sim.run("compare-lossy", **FEW, out=tmp_path / "run")
    found = names(of_run(tmp_path / "run"))
    assert {"methods", "tradeoff_mean_units", "tradeoff_compute_per_token", "speedup_acceptance_rate"} <= found
    assert [set(given["method"]) for given, _ in seen.of["tradeoff"]] == 2 * [{"autoregressive", "ppd"}]
    ((_, figure),) = seen.of["methods"]
    last = rows.unique("point", keep="last", maintain_order=True)
    for axes, x in zip(figure.axes, methods.AXES, strict=True):
        drawn = lines(axes)
        for name in set(rows["method"]) - {"autoregressive"}:
            assert coordinates([drawn[name]]) == set(last.filter(method=name).select(x, "speedup").rows())


def test_marks_of_lossy_methods_are_hollow_and_the_legend_says_so() -> None:
    rows = sim.run("compare-lossy", views=["formula"])
    figure = methods.draw(rows)
    exact = dict(rows.select("method", "exact").unique().rows())
    assert set(exact.values()) == {True, False}
    for name, each in exact.items():
        if name != "autoregressive":
            assert (lines(figure.axes[0])[name].get_markerfacecolor() == "#ffffff") is not each
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    marked = {text.removesuffix(" (lossy)") for text in told if text.endswith("(lossy)")}
    assert marked == {"Big Little Decoder", "SkipDecode", "early exit"}
    assert any("hollow: another text" in text.get_text() for text in figure.texts)
    assert inside(figure)
    only = methods.draw(rows.filter(pl.col("exact")))
    assert not any("lossy" in text.get_text() for text in [*only.texts, *only.legends[0].get_texts()])


def test_a_run_without_a_method_that_drafts_has_a_comparison_and_no_trade_off(tmp_path: Path) -> None:
    sim.run("skipdecode", **FEW, out=tmp_path / "run")
    found = names(of_run(tmp_path / "run"))
    assert "methods" in found
    assert not [name for name in found if name.startswith(("tradeoff", "speedup", "distribution"))]  # every decoding takes as long
    sim.run("early-exit", **FEW, out=tmp_path / "exit")
    assert not [name for name in names(of_run(tmp_path / "exit")) if name.startswith(("tradeoff", "speedup", "methods"))]


# --- What a run tells of its points -------------------------------------------------------------------------------------


def test_accepted_lengths_say_which_choice_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch, accepted)
    sim.run("bild", **FEW, out=tmp_path / "rates")
    sim.run("bild-thresholds", **FEW, out=tmp_path / "thresholds")
    for folder in ("rates", "thresholds"):
        of_run(tmp_path / folder)
    (_, rates), (_, thresholds) = seen.of["accepted"]
    assert [axes.get_title(loc="left") for axes in rates.axes[:2]] == ["paper, f = 0, r = 0", "paper, f = 0, r = 0.01"]
    assert thresholds.axes[1].get_title(loc="left") == "fallback below 0.2, rollback above 1"
    assert len({axes.get_title(loc="left") for axes in rates.axes}) == len(rates.axes)


def test_many_latencies_stand_in_ranges_that_lose_none() -> None:
    rng = np.random.default_rng(0)
    values = np.sort(rng.normal(100.0, 10.0, 1000))
    spread = pl.DataFrame({"point": 0, "view": "paths", "latency_layers": values, "probability": 1e-3})
    axes = distribution.draw(spread).axes[0]
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert len(bars) <= distribution.MOST_BARS
    edges = np.linspace(values[0], values[-1], distribution.MOST_BARS + 1)
    counts, _ = np.histogram(values, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    expected = [(middle, count / 1000) for middle, count in zip(middles, counts, strict=True) if count]
    assert np.array(sorted(bars)) == pytest.approx(np.array(expected))
    few = spread.head(distribution.MOST_BARS)  # each for itself
    assert len(distribution.draw(few).axes[0].patches) == distribution.MOST_BARS
    with_theory = pl.concat([spread, spread.with_columns(view=pl.lit("formula"))])
    assert len(distribution.draw(with_theory).axes[0].patches) == 1000


# --- SkipDecode ---------------------------------------------------------------------------------------------------------


def test_the_scenario_has_the_settings_of_the_published_table() -> None:
    rows = sim.run("skipdecode", views=["formula"]).filter(method="skipdecode")
    table = [row for row in published.table("skipdecode-table-2").rows if row["model"] == "opt-1.3b"]
    assert set(rows.select("min_layers", "max_layers").rows()) == {(row["min_layers"], row["max_layers"]) for row in table}


def test_a_traced_batch_of_unequal_texts_is_shortened_text_by_text() -> None:
    run = trace.record("skipdecode", point=4, tokens=6)
    whole = [34, 12, 20, 27, 34, 5, 30, 18]
    assert len(run.tokens) == sum(min(length, 6) for length in whole)
