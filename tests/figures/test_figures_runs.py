"""Figures of runs of lossy methods: which figures a run has, and that drawn values are those of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

import sim
from figures import of_run, save
from figures.of_runs import (
    bild_rates,
    bild_thresholds,
    latency_distribution,
    method_comparison,
    operations_and_bytes,
    tradeoff,
)
from figures.of_runs.accepted_tokens import draw as draw_accepted
from figures.of_theory import skipdecode_schedule
from figures.of_theory.skipdecode_layers import draw as draw_layers
from model import published
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.methods import registry
from model.methods.bild.threshold_decisions import synthetic
from model.methods.skipdecode import theory as skipdecode
from model.published import skipdecode_analysis
from model.steps import Batch, Forward, LayerSpan
from sim.runs import run_report, trace
from sim.runs.sweep import resolve
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import coordinates, lines
from tests.support.album import Album
from tests.support.figure_checks import boxes, formula
from tests.support.threshold_points import points


class Seen:
    """Records the rows that drawing functions receive, and the figures that they return."""

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


FEW: dict[str, Any] = {"replications": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all methods."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    sim.run("compare-lossy", **FEW, out=folder)
    return folder


@pytest.fixture(scope="module")
def compared(run: Path) -> pl.DataFrame:
    return pl.read_parquet(run / "results.parquet")


# --- All methods together -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unrendered")
def test_lossy_methods_are_in_the_comparison_but_not_in_the_trade_off(
    run: Path, compared: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, rows = Seen(monkeypatch, tradeoff, method_comparison), compared
    found = names(of_run(run))
    assert {"methods", "tradeoff_mean_busy_units", "tradeoff_compute_per_token", "speedup_acceptance_rate"} <= found
    assert [set(own["method"]) for own, _ in seen.of["tradeoff"]] == 2 * [{"autoregressive", "ppd"}]
    ((_, figure),) = seen.of["method_comparison"]
    last = rows.unique("point", keep="last", maintain_order=True)
    for axes, x in zip(figure.axes, method_comparison.AXES, strict=True):
        drawn = lines(axes)
        for name in set(rows["method"]) - {"autoregressive"}:
            series = [line for label, line in drawn.items() if label.startswith(registry.label(name))]
            found = set().union(*(coordinates([line]) for line in series))
            assert found == set(last.filter(method=name).select(x, "speedup").rows())


def test_marks_of_lossy_methods_are_hollow_and_the_legend_says_so() -> None:
    rows = formula("compare-lossy")
    figure = method_comparison.draw(rows)
    exact = dict(rows.select("method", "exact").unique().rows())
    assert set(exact.values()) == {True, False}
    for name, each in exact.items():
        if name != "autoregressive":
            series = [line for label, line in lines(figure.axes[0]).items() if label.startswith(registry.label(name))]
            assert {line.get_markerfacecolor() == "#ffffff" for line in series} == {not each}
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    marked = {text.partition(",")[0].removesuffix(" (lossy)") for text in entries if text.endswith("(lossy)")}
    assert marked == {"Big Little Decoder", "SkipDecode", "early exit"}
    assert any("hollow: lossy" in text.get_text() for text in figure.texts)
    assert inside(figure)
    only = method_comparison.draw(rows.filter(pl.col("exact")))
    assert not any("lossy" in text.get_text() for text in [*only.texts, *only.legends[0].get_texts()])


@pytest.mark.usefixtures("album")
def test_a_run_without_drafts_has_a_comparison_and_no_trade_off(tmp_path: Path) -> None:
    sim.run("skipdecode", **FEW, out=tmp_path / "run")
    found = names(of_run(tmp_path / "run"))
    assert "methods" in found
    assert not [name for name in found if name.startswith(("tradeoff", "speedup", "distribution"))]  # constant times
    sim.run("early-exit", **FEW, out=tmp_path / "exit")
    assert not [name for name in names(of_run(tmp_path / "exit")) if name.startswith(("tradeoff", "speedup", "methods"))]


# --- Names and distributions of points -------------------------------------------------------------------------------------


def test_panels_of_accepted_lengths_name_their_choices(tmp_path: Path, album: Album) -> None:
    short: dict[str, Any] = {"views": ["events"], "replications": 2, "set": {"scenario.tokens": 24}}
    sim.run("bild", **short, out=tmp_path / "rates")
    sim.run("bild-thresholds", **short, out=tmp_path / "thresholds")
    figures = []
    for folder in ("rates", "thresholds"):
        of_run(tmp_path / folder)
        _, arguments, options, _ = album.drawn["accepted"]
        figures.append(draw_accepted(*arguments, **options))
    rates, thresholds = figures
    assert [axes.get_title(loc="left") for axes in rates.axes[:2]] == ["f = 0, r = 0", "f = 0, r = 0.01"]
    assert thresholds.axes[1].get_title(loc="left") == "fallback below 0.2, rollback above 1"
    assert len({axes.get_title(loc="left") for axes in rates.axes}) == len(rates.axes)


def test_many_latencies_are_drawn_in_ranges_without_loss() -> None:
    rng = np.random.default_rng(0)
    values = np.sort(rng.normal(100.0, 10.0, 1000))
    spread = pl.DataFrame({"point": 0, "view": "paths", "latency_layers": values, "probability": 1e-3})
    axes = latency_distribution.draw(spread).axes[0]
    bars = [(left + width / 2, height) for left, _, width, height in boxes(axes)]
    assert len(bars) <= latency_distribution.MOST_BARS
    edges = np.linspace(values[0], values[-1], latency_distribution.MOST_BARS + 1)
    counts, _ = np.histogram(values, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    expected = [(middle, count / 1000) for middle, count in zip(middles, counts, strict=True) if count]
    assert np.array(sorted(bars)) == pytest.approx(np.array(expected))
    # The last latency is in the last range, not after it.
    whole = pl.DataFrame({"point": 0, "view": "paths", "latency_layers": np.arange(2.0 * latency_distribution.MOST_BARS + 1)})
    even = latency_distribution.draw(whole.with_columns(probability=pl.lit(1.0) / whole.height)).axes[0]
    heights = [height * whole.height for *_, height in boxes(even)]
    assert heights == pytest.approx([2.0] * (latency_distribution.MOST_BARS - 1) + [3.0])
    few = spread.head(latency_distribution.MOST_BARS)  # one bar each
    assert len(boxes(latency_distribution.draw(few).axes[0])) == latency_distribution.MOST_BARS
    with_theory = pl.concat([spread, spread.with_columns(view=pl.lit("formula"))])
    assert len(boxes(latency_distribution.draw(with_theory).axes[0])) == 1000


# --- Big Little Decoder -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rates() -> pl.DataFrame:
    return sim.run("bild", **FEW)


@pytest.fixture(scope="module")
def thresholds() -> pl.DataFrame:
    return formula("bild-thresholds")


def test_rates_have_one_line_per_rollback_rate_and_choice(rates: pl.DataFrame) -> None:
    figure = bild_rates.draw(bild_rates.of_run(rates.sample(fraction=1, shuffle=True, seed=1)))
    choices = [("variant paper", pl.col("variant") == "paper"), ("variant code", pl.col("variant") == "code")]
    choices = [(name, each & pl.col("exit_layer").is_null()) for name, each in choices]
    choices.append(("exit layer 6", pl.col("exit_layer") == 6))
    panels = np.array(figure.axes).reshape(4, 3)
    for column, title in zip(panels, operations_and_bytes.WORDS.values(), strict=True):
        assert column[0].get_title(loc="left") == title
        assert len({axes.get_ylim() for axes in column}) == 1
    drawn_work = {
        "speedup": pl.col("speedup"), "flops": pl.col("flops_per_token") / pl.col("plain_flops_per_token"),
        "weights": pl.col("weight_bytes_per_token") / pl.col("plain_weight_bytes_per_token"),
        "intensity": pl.col("arithmetic_intensity") / pl.col("plain_arithmetic_intensity"),
    }  # fmt: skip
    for axes, (name, _) in zip(panels[0], choices, strict=True):
        assert any(text.get_text().startswith(name) for text in axes.texts)
    for column, value in zip(panels, drawn_work.values(), strict=True):
        for axes, (_, which) in zip(column, choices, strict=True):
            own = rates.filter(which).with_columns(drawn=value).drop_nulls("drawn")
            for rate in (0.0, 0.01, 0.05):
                part = own.filter(rollback_rate=rate).sort("fallback_rate")
                first = "formula" if "formula" in part["view"] else "events"
                curve = np.column_stack([np.asarray(each) for each in lines(axes)[f"rollback {rate:g}"].get_data()])
                expected = part.filter(view=first).select("fallback_rate", "drawn").to_numpy()
                assert curve == pytest.approx(expected)
                for view in part["view"].unique():
                    marks = coordinates([lines(axes)[f"{view} {rate:g}"]])
                    assert marks == set(part.filter(view=view).select("fallback_rate", "drawn").rows())
                assert axes.get_ylim()[1] > part["drawn"].max()  # type: ignore[operator]
    assert "rates assumed" in " ".join(text.get_text() for text in figure.texts)
    assert "128 tokens" in " ".join(text.get_text() for text in figure.texts)
    assert len({line.get_color() for label, line in lines(figure.axes[0]).items() if label.startswith("rollback")}) == 3
    assert inside(figure)


def test_without_shapes_only_the_speed_up_is_drawn(rates: pl.DataFrame) -> None:
    bare = rates.drop([name for name in rates.columns if name.startswith("plain_")])
    figure = bild_rates.draw(bare)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["speed-up", "", ""]
    assert inside(figure)


def test_rates_are_drawn_only_if_swept_and_without_thresholds(rates: pl.DataFrame, thresholds: pl.DataFrame) -> None:
    assert bild_rates.fits(bild_rates.of_run(rates))
    assert not bild_rates.fits(bild_rates.of_run(thresholds))
    assert not bild_rates.fits(bild_rates.of_run(rates.filter(fallback_rate=0.3)))
    assert not bild_rates.of_run(rates.with_columns(method=pl.lit("skipdecode"))).height
    assert not bild_rates.fits(rates.with_columns(max_draft_length=pl.col("point") % 7))
    assert not bild_rates.of_run(rates.drop("fallback_rate")).height


def test_a_run_on_thresholds_has_the_points_of_the_record(thresholds: pl.DataFrame) -> None:
    """For a long sequence the run's points equal those of the closed forms for the same record."""
    found = bild_thresholds.of_run(thresholds)
    assert found.filter(policy=bild_thresholds.LARGE).select("latency", "agreement").rows() == [(1.0, 1.0)]
    whole = found.filter(pl.col("policy") != bild_thresholds.LARGE)
    assert whole.select("latency", "agreement", "fallback_threshold", "rollback_threshold").rows() == thresholds.select(
        "relative_latency", "agreement", "fallback_threshold", "rollback_threshold"
    ).rows()
    degenerate = {row["policy"]: row for row in whole.iter_rows(named=True)}
    assert set(degenerate) == {bild_thresholds.BOTH, bild_thresholds.NO_ROLLBACK, bild_thresholds.NO_FALLBACK}
    assert set(whole.filter(policy=bild_thresholds.NO_ROLLBACK)["rollback_threshold"]) == {float("inf")}
    assert set(whole.filter(policy=bild_thresholds.NO_FALLBACK)["fallback_threshold"]) == {0.0}
    assert set(whole.filter(policy=bild_thresholds.BOTH)["fallback_threshold"]) == {0.2, 0.4, 0.6, 0.8, 0.9, 1.0}
    sweep = {"method.rollback_threshold": [2.0], "method.fallback_threshold": [0.6]}
    long = sim.run("bild-thresholds", views=["formula"], set={"scenario.tokens": 1024}, sweep=sweep)
    record = synthetic(100_000, np.random.default_rng(0).random((3, 100_000)), sureness=3.0)
    closed = points(record, [0.6], [2.0], cost_ratio=0.25, cost_source="assumed")
    one = bild_thresholds.of_run(long).filter(fallback_threshold=0.6, rollback_threshold=2.0)
    expected = closed.filter(policy=bild_thresholds.BOTH)
    assert one["latency"][0] == pytest.approx(expected["latency"][0], rel=0.01)  # two draws from one law
    assert one["agreement"][0] == pytest.approx(expected["agreement"][0], abs=0.005)


def test_curves_of_a_run_and_their_provenance(thresholds: pl.DataFrame) -> None:
    figure = bild_thresholds.draw(bild_thresholds.of_run(thresholds))
    for value in (1.0, 2.0, 5.0, float("inf")):
        own = thresholds.filter(rollback_threshold=value).sort("fallback_threshold")
        curve = np.column_stack(xy(lines(figure.axes[0])[f"rollback {value:g}"]))
        assert curve.tolist() == own.select("relative_latency", "agreement").to_numpy().tolist()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["1", "2", "5", "never"]
    subtitle = " ".join(text.get_text() for text in figure.texts)
    assert "(assumed: a small model that knows how often it is right); c = 0.25 (see [cost])" in subtitle
    assert "formula, 128 tokens" in subtitle
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["large model alone", "both policies", "no rollback", "no fallback: windows of 10"]
    assert inside(figure)


def test_each_choice_is_a_separate_record(thresholds: pl.DataFrame) -> None:
    other = thresholds.with_columns(variant=pl.lit("code"), point=pl.col("point") + 100)
    found = bild_thresholds.of_run(pl.concat([thresholds, other]))
    assert found["name"].unique(maintain_order=True).to_list() == ["variant paper", "variant code"]
    assert bild_thresholds.fits(found)
    assert len(bild_thresholds.draw(found).axes) == 4
    many = [
        thresholds.with_columns(max_draft_length=pl.lit(n, dtype=pl.Int64), point=pl.col("point") + 100 * n) for n in range(1, 5)
    ]
    assert not bild_thresholds.fits(bild_thresholds.of_run(pl.concat(many)))
    assert not bild_thresholds.fits(bild_thresholds.of_run(thresholds.drop("agreement")))
    assert not bild_thresholds.fits(bild_thresholds.of_run(thresholds.with_columns(agreement=pl.lit(None, dtype=pl.Float64))))


# --- Speed-up and work of choices -----------------------------------------------------------------------------------------


def test_every_choice_has_bars(compared: pl.DataFrame) -> None:
    figure = operations_and_bytes.draw(compared.sample(fraction=1, shuffle=True, seed=2))
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(operations_and_bytes.WORDS.values())
    first, last = (compared.unique("point", keep=keep, maintain_order=True) for keep in ("first", "last"))
    ratios = {
        "speedup": pl.col("speedup"), "flops": pl.col("flops_per_token") / pl.col("plain_flops_per_token"),
        "weights": pl.col("weight_bytes_per_token") / pl.col("plain_weight_bytes_per_token"),
        "intensity": pl.col("arithmetic_intensity") / pl.col("plain_arithmetic_intensity"),
    }  # fmt: skip
    assert list(ratios) == list(operations_and_bytes.WORDS)
    for axes, ratio in zip(figure.axes, ratios.values(), strict=True):
        known = compared.with_columns(drawn=ratio).drop_nulls("drawn").unique("point", keep="first", maintain_order=True)
        bars = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
        assert bars == pytest.approx(known.sort("point")["drawn"].to_list())
        crosses = coordinates([lines(axes)["last"]])
        assert crosses == {(value, float(index)) for index, value in enumerate(last.with_columns(drawn=ratio)["drawn"])}
        assert [bool(bar.get_hatch()) for bar in axes.patches] == [not each for each in first["exact"]]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "plain decoding"
    assert labels[3] == "Big Little Decoder, f = 0.11, r = 0.01"
    assert "rates assumed; times and shapes: see [cost]; 64 tokens" in [text.get_text() for text in figure.texts]
    assert inside(figure)


def test_choices_of_one_method_are_named_by_their_differences() -> None:
    rows = sim.run("early-exit", views=["formula"])
    figure = operations_and_bytes.draw(rows)
    labels = [label.get_text().partition(", 9.2")[0] for label in figure.axes[0].get_yticklabels()]
    assert labels == ["softmax, propagate", "state, propagate", "state, backfill", "state, propagate, batch of 8"]
    assert any(text.get_text().startswith("early exit; ") for text in figure.texts)
    assert not any("crosses" in text.get_text() for text in figure.legends[0].get_texts())
    assert inside(figure)
    batch = formula("skipdecode")
    assert "SkipDecode, batch of 4, 66% occupied, 16 layers at first, 8 at last" in [
        label.get_text() for label in operations_and_bytes.draw(batch).axes[0].get_yticklabels()
    ]


def test_work_of_plain_decoding_is_the_sum_of_its_passes(compared: pl.DataFrame) -> None:
    plain = compared.filter(method="autoregressive", view="events").row(0, named=True)
    for name in ("flops_per_token", "weight_bytes_per_token", "arithmetic_intensity"):
        assert compared[f"plain_{name}"].to_list() == pytest.approx([plain[name]] * compared.height)
    # A batch: each pass covers all unfinished sequences.
    rows = formula("skipdecode")
    account = Account()
    for start in (0, 4):
        lengths = [34, 12, 20, 27, 34, 5, 30, 18][start : start + 4]
        for position in range(max(lengths)):
            sequences = tuple(index for index, length in enumerate(lengths) if length > position)
            account.add(
                Forward(
                    "target",
                    (0,) * len(sequences),
                    position,
                    LayerSpan(0, 24),
                    heads=len(sequences),
                    batch=Batch.uniform(sequences, position, heads=1),
                )
            )
    expected = account.flops_and_bytes({"target": preset("opt-1.3b")})
    found = rows.filter(sequences=4).row(0, named=True)
    assert found["plain_flops_per_token"] == pytest.approx(expected.flops / 180)
    assert found["plain_weight_bytes_per_token"] == pytest.approx(expected.weight_bytes / 180)
    assert found["plain_arithmetic_intensity"] == pytest.approx(expected.intensity)
    assert "plain_flops_per_token" not in formula("bild-thresholds").columns


@pytest.mark.usefixtures("album")
def test_runs_draw_the_figures_of_their_lossy_methods(tmp_path: Path) -> None:
    found = {}
    for name in ("bild", "bild-thresholds", "skipdecode", "early-exit", "compare-lossy"):
        own = {"choices", "bild_rates", "bild_thresholds", "skipdecode_layers"}
        found[name] = own & names(of_run(tmp_path, formula(name)))
    assert found == {
        "bild": {"bild_rates"}, "bild-thresholds": {"bild_thresholds"}, "skipdecode": {"choices", "skipdecode_layers"},
        "early-exit": {"choices"}, "compare-lossy": {"choices", "skipdecode_layers"},
    }  # fmt: skip


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(rates: pl.DataFrame, compared: pl.DataFrame, tmp_path: Path) -> None:
    for draw, rows in ((bild_rates.draw, rates), (operations_and_bytes.draw, compared)):
        one, two = (save(draw(rows), tmp_path / name, formats=("svg",))[0].read_bytes() for name in ("one", "two"))
        assert one == two


def test_rows_that_cannot_be_drawn_are_refused(rates: pl.DataFrame, compared: pl.DataFrame) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: bild_rates.draw(rates.clear()), "the figure of rates needs at least one row"),
        (lambda: bild_rates.draw(rates.drop("rollback_rate")), "got none called rollback_rate"),
        (lambda: bild_rates.draw(rates.with_columns(max_draft_length=pl.col("point") % 5)), "at most 4 choices, got"),
        (lambda: bild_rates.draw(rates.with_columns(rollback_rate=pl.col("point") / 9)), "at most 6 rollback rates, got 36"),
        (lambda: operations_and_bytes.draw(rates), "room for at most 16 points, got 36"),
        (lambda: operations_and_bytes.draw(compared.clear()), "the figure of choices needs at least one row"),
        (lambda: operations_and_bytes.draw(compared.drop("speedup")), "got none called speedup"),
        (lambda: operations_and_bytes.draw(compared.with_columns(view=pl.lit("path"))), "unknown view 'path'"),
    ]
    for call, message in cases:
        with pytest.raises(ParameterError, match=message):
            call()


# --- SkipDecode ---------------------------------------------------------------------------------------------------------


def test_the_scenario_has_the_settings_of_the_published_table() -> None:
    rows = formula("skipdecode").filter(method="skipdecode")
    table = [row for row in published.table("skipdecode-table-2").rows if row["model"] == "opt-1.3b"]
    assert set(rows.select("min_layers", "max_layers").rows()) == {(row["min_layers"], row["max_layers"]) for row in table}


def test_each_schedule_of_a_run_is_drawn_once(tmp_path: Path, album: Album) -> None:
    table = formula("skipdecode")
    schedules, bounds = skipdecode_schedule.of_run(table) or ([], {})
    assert [each[1:] for each in schedules] == [(8, 16, 1.0), (6, 10, 1.0), (5, 7, 1.0), (4, 6, 1.0)]
    assert bounds == {"layers": 24, "prompt": 60, "sequence_length": 160, "warm_up": 1, "source": "settings published (Table 2)"}
    (tmp_path / "run").mkdir()
    of_run(tmp_path / "run", table)
    assert album.drawn["skipdecode_layers"][:3] == ("skipdecode_layers", (schedules,), bounds)
    budget = skipdecode.mean_layers(8, 16, 60, 160, 100, "half-up")
    assert draw_layers(schedules, **bounds).axes[0].get_title(loc="left").startswith(f"16 to 8 layers: {budget:.2f} layers")


def test_other_schedules_are_not_called_published() -> None:
    table = formula("skipdecode")
    other = table.with_columns(min_layers=pl.when(min_layers=5).then(pl.lit(4)).otherwise("min_layers"))
    changes = [{"power": pl.lit(2.0)}, {"warm_up": pl.lit(2)}, {"layers": pl.lit(32)}]
    for changed in (other, *(table.with_columns(**change) for change in changes)):
        found = skipdecode_schedule.of_run(changed)
        assert found is not None
        assert found[1]["source"] == "settings assumed"
    assert skipdecode_schedule.of_run(table.with_columns(rounding=pl.lit("down"))) is None
    assert skipdecode_schedule.of_run(table.drop("sequence_length")) is None
    assert skipdecode_schedule.of_run(table.filter(method="early_exit")) is None


def test_each_sequence_of_a_traced_batch_is_shortened() -> None:
    run = trace.record("skipdecode", point=4, tokens=6)
    whole = [34, 12, 20, 27, 34, 5, 30, 18]
    assert len(run.tokens) == sum(min(length, 6) for length in whole)


def notes(name: str, **overrides: Any) -> str:
    table = sim.run(name, views=["formula"], **overrides)
    return " ".join(run_report.notes(table.lazy(), resolve(name, views=["formula"], **overrides)))


def test_runs_of_published_settings_quote_the_published_tables() -> None:
    text = notes("skipdecode")
    assert all(sentence in text for sentence in skipdecode_analysis.sentences_on("e2e", "opt-1.3b"))
    for other in ("compare-lossy", "early-exit"):
        assert "Table 2" not in notes(other)
