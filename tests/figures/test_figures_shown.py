"""Snapshots of all figures: words, numbers of marks, error bars, bars and areas of each kind, and their layout.


Words are stored in `data/figures_shown.json`, with numbers replaced by `#`. Sizes, limits, positions, strokes, and all numbers of
artists and words are stored in `data/figures_layout.json`; other tests compare them with the rows. `python -m
tests.figures.test_figures_shown` rewrites both files; read the changes, and look at the figures, before you commit them.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from figures.common.style import with_subject_line
from figures.of_comparisons import error_by_method, formula_limits, gantt_pair, predicted_measured, time_parts
from figures.of_hardware import engine_predictions, layer_time, pass_cost, reached_peaks
from figures.of_logs import acceptance_by_position, accepted_lengths, agreement_over_cost, match_rates, tokens_by_source
from figures.of_papers import ppd_table_3_times, slides_speedups
from figures.of_runs import (
    accepted_tokens,
    bild_rates,
    bild_thresholds,
    latency_distribution,
    method_comparison,
    operations_and_bytes,
    reserved_devices,
    speedup,
    speedup_by_batch,
    speedup_by_device,
    timeline,
    tradeoff,
)
from figures.of_theory import (
    adaptive_draft_lengths,
    best_draft_length,
    bild_operations,
    early_exit_batch,
    early_exit_thresholds,
    hierarchical_regions,
    largest_batch,
    skipdecode_layers,
    skipdecode_schedule,
    verify_cost,
)
from figures.of_theory.skipdecode_schedule import Schedule
from model.hardware import profile, profile_files
from model.hardware.devices import DEVICES
from model.hardware.profile_costs import ProfileCosts
from model.methods.ppd.algorithm import Parameters
from model.published import deck_analysis
from sim.runs.trace import record
from tests.figures import (
    test_figures,
    test_figures_batches,
    test_figures_bild,
    test_figures_comparison,
    test_figures_engine,
    test_figures_hardware,
    test_figures_load,
    test_figures_real,
    test_figures_speculative,
    test_figures_timeline,
    test_figures_tradeoff,
)
from tests.support.figure_checks import (
    Layout,
    Panel,
    clipped,
    formula,
    misplaced,
    shown,
    unmatched_legend_signs,
    untied_names,
    words,
)

KEPT = Path(__file__).parents[1] / "data" / "figures_shown.json"
LAYOUT = KEPT.with_name("figures_layout.json")


@cache
def profiles() -> list[profile.Profile]:
    return [profile_files.load("h100-llama-2-7b")]


def of_batches() -> pl.DataFrame:
    rows = test_figures_batches.rows()
    return rows.with_columns(
        point=pl.struct("sequences", "draft_length", "acceptance_rate").rank("dense"), method=pl.lit("speculative"), cost_ratio=0.1,
        tokens=64,
    )  # fmt: skip


def devices(name: str) -> pl.DataFrame:
    rows = formula(name)
    [column] = [each for each in rows.columns if each in ("cost.device", "cost.profile")]
    return rows.filter(pl.col(column).is_in(rows[column].unique(maintain_order=True).head(2).to_list()))


def ranges() -> pl.DataFrame:
    """More latencies than single bars can show."""
    count = 3 * latency_distribution.MOST_BARS
    shares = [2 * (index + 1) / count / (count + 1) for index in range(count)]
    latencies = [100.0 + index for index in range(count)]
    return pl.DataFrame({"point": 0, "view": "paths", "latency_layers": latencies, "probability": shares})


def of_schedules(rows: pl.DataFrame) -> Figure:
    found = skipdecode_schedule.of_run(rows)
    assert found is not None
    return skipdecode_schedule.draw(found[0], **found[1])


def viewed(rows: pl.DataFrame, *names: str, skip: Collection[int] = ()) -> pl.DataFrame:
    """Rows of formulas with synthetic simulations of them (slightly slower, with intervals), except for some points."""
    known = rows.with_columns(pl.lit(None, pl.Float64).alias(f"{name}_{end}") for name in names for end in ("low", "high"))
    views = [known]
    for index, view in enumerate(("paths", "events"), 1):
        ends = [(factor * pl.col(name)).alias(f"{name}_{end}") for name in names for end, factor in (("low", 0.97), ("high", 1.02))]
        moved = known.with_columns(pl.col(names) * (1 - 0.02 * index), view=pl.lit(view)).with_columns(ends)
        views.append(moved.filter(~pl.col("point").is_in([*skip])) if "point" in rows.columns else moved)
    return pl.concat(views)


def of_other_theories() -> pl.DataFrame:
    """Speed-ups for i.i.d. and other acceptances, another method, a link, a missing cost ratio, and an infinite bound."""
    own = test_figures_speculative.simulated().filter(tokens=16, acceptance_rate=0.8)
    markov = own.filter(pl.col("view") != "formula", cost_ratio=0.05)
    markov = markov.with_columns(outcomes=pl.lit("markov"), placement=pl.lit("separate"))
    length = pl.col("draft_length")
    other = own.filter(cost_ratio=0.4).with_columns(method=pl.lit("hierarchical"), speedup=1 + length / 10, cost_ratio=None)
    endless = pl.when(draft_length=4).then(float("inf")).otherwise("speedup_high").alias("speedup_high")
    far = own.filter(cost_ratio=0.4).with_columns(pl.lit(2.0).alias("cost.link"), pl.col("speedup") * 0.9)
    near = own.filter(cost_ratio=0.4).with_columns(pl.lit(1.0).alias("cost.link"), pl.col("speedup") * 0.95)
    tables = [own.filter(cost_ratio=0.05), markov.with_columns(endless, pl.col("speedup") * 0.7), far, near, other]
    return pl.concat(tables, how="diagonal_relaxed").with_columns(sequences=1, batching=pl.lit("static")).reverse()


def of_many_forms() -> pl.DataFrame:
    """Points of more choices of Predictive Pipelined Decoding than the legend names, some without a curve."""
    parts: list[dict[str, Any]] = []
    for form, exit_layer, more in (
        ("literal", 20, {}), ("flat", 10, {}), ("nested", 10, {}), ("eager", 30, {}), ("literal", 20, {"batched": True}),
        ("literal", 30, {}), ("literal", 25, {}),
    ):  # fmt: skip
        for k in (1, 3):
            parts.append(test_figures_tradeoff.point(len(parts), Parameters(40, exit_layer, k, form=form, **more), 16, 0.7))
    lost = {**parts[-1], "point": len(parts), "tokens": None, "exit_layer": 15, "form": "eager"}
    rows = pl.DataFrame([*parts, lost, {**lost, "mean_busy_units": None}], infer_schema_length=None)
    latency = pl.col("relative_latency")
    return rows.with_columns(relative_latency_input_low=0.9 * latency, relative_latency_input_high=1.1 * latency)


def of_another_method() -> pl.DataFrame:
    """Points of three choices in all views, too many to name, some waiting for units; and one point of another method."""
    choices = [(k, rate, length) for k in (1, 2) for rate in np.linspace(0, 1, 7) for length in (16, 20)]
    rows = []
    for index, (k, rate, length) in enumerate(choices):
        choice = Parameters(40, 20, k, batched=length > 16 and k > 1)
        rows.append(test_figures_tradeoff.point(index, choice, length, rate, units=2 + index % 2, contended=not index))
    other = {"point": 99, "view": "events", "method": "other", "relative_latency": 0.8, "compute_per_token": 1.5, "tokens": 16}
    simulated = viewed(pl.DataFrame(rows), "compute_per_token", skip=range(9))
    return pl.concat([simulated, pl.DataFrame([other])], how="diagonal_relaxed")


def of_choices() -> pl.DataFrame:
    """Choices of methods in formulas and simulations: some without work, some without a simulation."""
    rows = viewed(formula("compare-lossy"), "speedup", skip=[3]).reverse()
    some = pl.col("method") == "early_exit"
    batch = rows.filter(some).with_columns(
        point=pl.lit(9, pl.Int64), sequences=pl.lit(4, pl.Int64), batching=pl.lit("static"), occupancy=0.75,
    )
    return pl.concat([rows, batch], how="diagonal_relaxed").with_columns(
        pl.when(~some).then(name).alias(name) for name in ("flops_per_token", "arithmetic_intensity")
    )


def of_sequences() -> pl.DataFrame:
    """Draft lengths of two sequences: four rates with all artists, and more rates without a name or a fixed length."""
    rows = []
    for text, ratio, rates, policies in (
        ("four rates", 0.1, (0.9, 0.9, 0.4, 0.4, 0.6, 0.3),
         ("heuristic", "gradient", "gradient, biased", "optimum, biased", "best fixed", "bound")),
        ("", 0.25, (0.1, 0.3, 0.5, 0.7, 0.7, 0.95), ("optimum", "heuristic")),
    ):  # fmt: skip
        for index, policy in enumerate(policies):
            speed = {"bound": 3.6, "best fixed": 2.6}.get(policy, 2.7 - index / 50)
            for at, rate in enumerate(rates):
                lengths = [None] * 3 if policy == "bound" else [1.0 + index, 2.0 + index + at % 3, 5.0 + index + at % 3]
                rows.append((text, policy, at, rate, ratio, *lengths, speed))
    names = ["text", "policy", "position", "acceptance_rate", "cost_ratio", "low", "median", "high", "speedup"]
    return pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)


def of_rounds() -> pl.DataFrame:
    """Accepted tokens at points with both views, with one, without a law, without tokens, and with long drafts."""
    first, second = (test_figures_speculative.histogram().filter(point=point) for point in (0, 1))
    parts = [
        second, first.filter(view="events").with_columns(name=pl.lit("events alone")),
        first.with_columns(pl.lit(None, pl.Float64).alias("acceptance_rate"), name=pl.lit("no law")),
        first.with_columns(pl.lit(None, pl.Int64).alias("tokens")),
        first.with_columns(draft_length=pl.lit(40, pl.Int64), rounds=pl.when(view="events").then(0).otherwise("rounds")),
    ]  # fmt: skip
    return pl.concat([part.with_columns(point=index) for index, part in enumerate(parts)], how="diagonal")


def short(rows: pl.DataFrame) -> pl.DataFrame:
    """Shorten times so that few whole units remain: ticks of layer-times are whole, those of milliseconds are not."""
    return rows.with_columns(pl.col("^start|end|time$") / 12)


def of_batch() -> Figure:
    """The timeline of a batch of three sequences, some of which commit simultaneously."""
    batch = test_figures_timeline.SCENARIO | {
        "method": [{"name": "speculative", "layers": 24, "draft_length": 2, "sequences": 3, "batching": "static"}],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.5},
    }  # fmt: skip
    return test_figures_timeline.drawn(record(batch, tokens=4))


def of_units() -> Figure:
    """More units than are named, all kinds except passes, and bars and gaps between commits that grow until labels fit."""
    rows = [(unit, 0.0, 0.5 + unit / 20, "forward", 0, unit, 3 * (unit % 2), 20, "kept") for unit in range(45)]
    rows += [(0, 8.0, 9.0, "wait", 0, -1, -1, -1, "kept"), (1, 9.0, 10.5, "head", 1, -1, -1, -1, "kept"),
             (2, 9.0, 10.0, "read", 1, -1, -1, -1, "kept"), (3, 9.0, 9.0, "forward", 1, 7, 0, 20, "cancelled"),
             (4, 9.0, 19.0, "forward", 1, 8, 0, 20, "cancelled")]  # fmt: skip
    for start, kind in ((7.0, "link"), (6.0, "promotion"), (9.0, "link")):
        rows.append((-1, start, start + 2.5, kind, 1, -1, 0, 0, "kept"))
    times = [3.0, 3.0, *np.cumsum([3.0] + [0.5 + 0.09 * index for index in range(14)]).tolist()]
    kinds = ["match", "miss", "rollback", "match"]
    commits = [(time, kinds[index % 4], 1 + index % 3) for index, time in enumerate(times)]
    intervals = pl.DataFrame(rows, schema=test_figures.SCHEMA, orient="row")
    return timeline.draw(intervals, pl.DataFrame(commits, schema=["time", "kind", "tokens"], orient="row"))


def of_devices_each() -> pl.DataFrame:
    """Methods on several devices and on split layers, where the model may not fit one device."""
    rows = devices("ppd-against-tensor-parallel").filter(pl.col("match_rate").is_null() | (pl.col("candidates") == 1))
    return rows.with_columns(pl.lit(None, pl.Float64).alias("speedup_over_one_device"))


BUILT: dict[str, Callable[[], Figure]] = {
    "tradeoff_units": lambda: tradeoff.draw(test_figures_tradeoff.paper()),
    "tradeoff_compute": lambda: tradeoff.draw(test_figures_tradeoff.paper(), "compute_per_token"),
    "tradeoff_devices": lambda: tradeoff.draw(devices("ppd-against-tensor-parallel").filter(method="ppd", tensor_parallel=1)),
    "timeline": lambda: timeline.draw(*(short(each) for each in (test_figures.INTERVALS, test_figures.COMMITS))),
    "timeline_ms": lambda: with_subject_line(timeline.draw(short(test_figures.INTERVALS), title="PPD", time_unit="ms"), "mine"),
    "distribution": lambda: latency_distribution.draw(test_figures.histogram(2)),
    "distribution_ms": lambda: latency_distribution.draw(
        test_figures.histogram().with_columns(latency_ms=2 * pl.col("latency_layers"), name=pl.lit("PPD, k = 3"))
    ),
    **{f"speedup_{x}": lambda x=x: speedup.draw(test_figures_speculative.simulated(), x) for x in speedup.AXES},  # type: ignore[misc]
    "speedup_batches": lambda: speedup.draw(of_batches(), "draft_length"),
    "speedup_by_batch": lambda: speedup_by_batch.draw(test_figures_batches.rows()),
    "accepted": lambda: accepted_tokens.draw(test_figures_speculative.histogram(), "all of it"),
    "methods": lambda: method_comparison.draw(formula("compare")),
    "methods_settings": lambda: method_comparison.draw(formula("speculative-adaptive")),
    "methods_lossy": lambda: method_comparison.draw(formula("skipdecode")),
    "choices": lambda: operations_and_bytes.draw(formula("early-exit")),
    "bild_rates": lambda: bild_rates.draw(bild_rates.of_run(formula("bild"))),
    "bild": lambda: bild_thresholds.draw(test_figures_bild.made()),
    "bild_operations": lambda: bild_operations.draw(
        bild_operations.factors(0.15, [0.0, 0.1], operations_ratio=0.25, memory_ratio=0.3, max_draft_length=10, cost_ratio=0.2),
        source="assumed",
    ),
    "deck": lambda: slides_speedups.draw(deck_analysis.rows()),
    "draft_length": lambda: best_draft_length.draw(),
    "devices_held": lambda: reserved_devices.draw(devices("ppd-against-tensor-parallel")),
    "speedup_by_device": lambda: speedup_by_device.draw(devices("hardware-compare")),
    "verify_cost": lambda: verify_cost.draw(*verify_cost.example()[:2], [0.6, 0.8], context=1024, source="assumed"),
    "early_exit_batch": lambda: early_exit_batch.draw(
        {"even": [0.1] * 7 + [1.0]}, batches=(1, 4), head=0.5, check=0.1, propagation=0.1, source="assumed"
    ),
    "early_exit": lambda: early_exit_thresholds.draw([0.5, 0.9], [0, 2, 8], longest=64, source="assumed"),
    "hierarchical": lambda: hierarchical_regions.draw(hierarchical_regions.example()),
    "adaptive": lambda: adaptive_draft_lengths.draw(
        adaptive_draft_lengths.trajectories([0.8] * 40, 0.1, text="steady", replications=20)
    ),
    "skipdecode_schedule": lambda: skipdecode_schedule.draw(
        [Schedule("mine", 4, 8)], layers=12, prompt=10, sequence_length=30, source="assumed"
    ),
    "skipdecode_layers": lambda: skipdecode_layers.draw(
        [Schedule("mine", 4, 8)], layers=12, prompt=10, sequence_length=30, warm_up=1, source="assumed"
    ),
    "predicted_measured": lambda: predicted_measured.draw(test_figures_comparison.rows(disturbed=[True, False, True, False])),
    "error_by_method": lambda: error_by_method.draw(test_figures_comparison.rows()),
    "time_parts": lambda: time_parts.draw(
        test_figures_comparison.times({"target": 0.2, "draft": 0.1, "rest": 0.05}, {"target": 0.45, "draft": 0.05, "rest": 0.05})
    ),
    "match_rate": lambda: match_rates.draw(test_figures_real.log(), [1, 3]),
    "match_rate_by_position": lambda: match_rates.draw_by_position(test_figures_real.log(), [1]),
    "acceptance_by_position": lambda: acceptance_by_position.draw(test_figures_real.lengths(), 3, "mine"),
    "accepted_lengths": lambda: accepted_lengths.draw(test_figures_real.lengths(), [1, 3], "mine"),
    "agreement": lambda: agreement_over_cost.draw(test_figures_real.quality()),
    "log_likelihood": lambda: agreement_over_cost.draw(test_figures_real.quality(), quality="log_likelihood"),
    "table_3": lambda: ppd_table_3_times.draw(formula("ppd-table-3")),
    "roofline": lambda: reached_peaks.draw(profiles()),
    "layer_time": lambda: layer_time.draw(profiles(), batches=(1, 8), longest=1024),
    "choices_bild": lambda: operations_and_bytes.draw(formula("bild").filter(pl.col("point").rank("dense") <= 16)),
    "choices_skipdecode": lambda: operations_and_bytes.draw(formula("skipdecode")),
    "largest_batch": lambda: largest_batch.draw(
        {"H100": ProfileCosts(profiles()[0])},
        {"H100": test_figures_hardware.DRAFT},
        acceptance_rate=0.8,
        draft_length=3,
        source="assumed",
        contexts=(128, 1024),
        most=64,
        memories={"H100": DEVICES["h100"].memory_bytes},
    ),
    "tokens_by_source": lambda: tokens_by_source.draw(*test_figures_real.decoded(), prompt=["a", " b"], title="mine"),
    "gantt_pair": lambda: gantt_pair.draw(
        *[test_figures.INTERVALS.with_columns(pl.col("start", "end") * stretch) for stretch in (1.25, 1.0)]
    ),
    "formula_limits": lambda: formula_limits.draw(
        pl.DataFrame(
            {
                "claim": "ppd",
                "series": ["k=1", "k=1", "k=3", "k=3"],
                "x": [2.0, 3.0] * 2,
                "formula": [1.2, 1.4, 1.3, 1.5],
                "simulated": [1.1, 1.2, 1.2, 1.3],
                "measured": [1.0, 1.2, 1.1, 1.2],
                "noise": 0.02,
                "x_name": "exit layer",
                "y_name": "speed-up",
                "about": "given the match rate",
            }
        )
    ),
    "bild_records": lambda: bild_thresholds.draw(test_figures_bild.two()),
    "bild_of_run": lambda: bild_thresholds.draw(bild_thresholds.of_run(formula("bild-thresholds"))),
    "distribution_ranges": lambda: latency_distribution.draw(ranges()),
    "skipdecode_schedule_of_run": lambda: of_schedules(formula("skipdecode")),
    "timeline_bild": lambda: test_figures_timeline.drawn(record(test_figures_timeline.SCENARIO, replication=1)),
    "tradeoff_forms": lambda: tradeoff.draw(formula("ppd-forms")),
    "speedup_theory": lambda: speedup.draw(
        speedup.grid(draft_length=range(1, 14), cost_ratio=[0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.05])
    ),
    "speedup_expensive": lambda: speedup.draw(speedup.grid(draft_length=[1, 2], cost_ratio=[1.2, 0.0])),
    "speedup_other_theories": lambda: speedup.draw(of_other_theories(), "draft_length"),
    "speedup_other_tokens": lambda: speedup.draw(of_other_theories().filter(pl.col("cost_ratio") > 0), "tokens"),
    "speedup_batches_alone": lambda: speedup.draw(of_batches().filter(draft_length=3).drop("tokens")),
    "tradeoff_many_forms": lambda: tradeoff.draw(of_many_forms()),
    "tradeoff_many_compute": lambda: tradeoff.draw(of_another_method(), "compute_per_token"),
    "methods_same_devices": lambda: method_comparison.draw(viewed(of_devices_each(), "speedup", "mean_busy_units")),
    "choices_simulated": lambda: operations_and_bytes.draw(of_choices()),
    "table_3_simulated": lambda: ppd_table_3_times.draw(
        viewed(formula("ppd-table-3"), "latency_s", "latency_layers", skip=[1]).with_columns(
            fitted_on=pl.when(point=0).then(pl.lit("both")).when(point=2).then(pl.lit(None)).otherwise("data_set")
        )
    ),
    "match_rate_alone": lambda: match_rates.draw(test_figures_real.log(trained=False, sampling={"top_k": 4}), [5, 1, 2, 3]),
    "match_rate_panels": lambda: match_rates.draw_by_position(test_figures_real.log(), [3, 1], head="common", bins=3),
    "agreement_alone": lambda: agreement_over_cost.draw(
        test_figures_real.quality()
        .filter(method="bild", fallback_threshold=0.5)
        .drop("target_name")
        .with_columns(
            pl.lit(float("nan")).alias("agreement_low"),
            layer_passes_over_plain=pl.col("agreement") - 0.2,
            sequences=3,
        ),
        "layer_passes_over_plain",
    ),
    "accepted_points": lambda: accepted_tokens.draw(of_rounds()),
    "bild_rates_simulated": lambda: bild_rates.draw(
        bild_rates.of_run(viewed(formula("bild").filter(pl.col("exit_layer").is_null(), variant="paper"), "speedup", skip=[1]))
        .reverse()
        .drop("plain_flops_per_token")
    ),
    "accepted_alone": lambda: accepted_tokens.draw(of_rounds().filter(point=3).drop("name")),
    "tradeoff_bare": lambda: tradeoff.draw(
        pl.DataFrame({"view": ["events", "paths"], "mean_busy_units": [2.0, 1.5], "relative_latency": [0.5, 0.75]})
    ),
    "adaptive_sequences": lambda: adaptive_draft_lengths.draw(of_sequences()),
    "timeline_again": lambda: test_figures_timeline.drawn(
        record(test_figures_timeline.SCENARIO, replication=1, set=test_figures_timeline.CODE | test_figures_timeline.APART)
    ),
    "timeline_batch": of_batch,
    "timeline_skipped": lambda: test_figures_timeline.drawn(record("skipdecode", point=4, tokens=3)),
    "timeline_rows": lambda: test_figures_timeline.drawn(record("early-exit", point=1, tokens=4)),
    "timeline_units": of_units,
    "verify_cost_hardware": lambda: pass_cost.draw({"H100": ProfileCosts(profiles()[0])}, batches=(1, 8), widest=6),
    "engine_predictions": lambda: engine_predictions.draw(test_figures_engine.LAW, test_figures_engine.CELLS),
    "server_frontier": test_figures_load.frontier, "server_switch_off": test_figures_load.off_map,
    "server_over_time": test_figures_load.over_time,
}


@cache
def built(name: str) -> Figure:
    """Draw a figure under changed matplotlib settings, which must have no effect."""
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "axes.titleweight": "bold"}):
        return BUILT[name]()


def plain(text: str) -> str:
    """Replace the numbers in a text by `#`."""
    return re.sub(r"[−±+-]?\d[\d,]*(\.\d+)?", "#", text)


def of_panel(panel: Panel) -> dict[str, Any]:
    counts = {
        "lines": len(panel.lines), "points": sum(len(points) for _, points in panel.lines),
        "error bars": sum(len(pairs) for _, pairs in panel.segments), "bars": sum(len(boxes) for _, boxes in panel.bars),
        "areas": len(panel.bands),
    }  # fmt: skip
    looks = Counter(f"{marker} {'-' if style not in ('None', '') else 'none'} {colour}" for _, marker, style, colour in panel.marks)
    labels = {label for label, _ in [*panel.lines, *panel.segments, *panel.bars, *panel.bands] if not label.startswith("_")}
    return {
        "title": plain(panel.title), "x": panel.x, "y": panel.y, "scales": [*panel.scales], "counts": counts,
        "looks": dict(sorted(looks.items())), "labels": sorted({plain(label) for label in labels}), "grid": panel.grid,
        "words": sorted({plain(text) for text in panel.texts}),
        "ticks": [sorted({*map(plain, each)} - {""}) for each in panel.ticks],
    }  # fmt: skip


def document(name: str) -> dict[str, Any]:
    found = shown(built(name))
    return {
        "words": [plain(text) for text in found.texts],
        "legends": [[plain(title), [plain(entry) for entry in entries]] for title, entries in found.legends],
        "panels": [of_panel(panel) for panel in found.panels],
    }


def layout(name: str) -> dict[str, Any]:
    """Positions, styles and numbers of all artists of a figure."""
    found = Layout.of(built(name))._asdict()
    placed = [[text, look, " ".join(map(str, at))] for text, look, *at in found["words"]]
    return found | {"words": [AT.join([" ".join(filter(None, [text, look])), at]) for text, look, at in placed],
                    "boxes": [AT.join([" ".join(map(str, each[4:])), " ".join(map(str, each[:4]))]) for each in found["boxes"]],
                    "limits": [" ".join(map(str, each)) for each in found["limits"]],
                    "legends": [" ".join(map(str, each)) for each in found["legends"]],
                    "size": " ".join(map(str, found["size"]))}  # fmt: skip


AT = "  @ "
"""Separator of words and their positions."""


def near(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """Compare layouts and numbers: positions of words may differ by 0.3 hundredths, because fonts vary; numbers of artists may
    differ in the last of four digits."""
    return [*got] == [*want] and all(_same(part, got[part], want[part]) for part in want)


def _same(part: str, got: list[Any], want: list[Any]) -> bool:
    if part in ("size", "limits"):
        return got == want
    if part == "strokes":
        got, want = ([[f"panel {index}", *each] for index, each in enumerate(of)] for of in (got, want))
        got, want = [*itertools.chain(*got)], [*itertools.chain(*want)]
    return len(got) == len(want) and all(map(_alike if part == "strokes" else _close, got, want))


def _close(one: str, other: str) -> bool:
    """Compare words with their positions, which may differ slightly."""
    (text, _, here), (other_text, _, there) = one.rpartition(AT), other.rpartition(AT)
    return text == other_text and all(abs(float(a) - float(b)) <= 0.3 for a, b in zip(here.split(), there.split(), strict=True))


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def _alike(one: str, other: str) -> bool:
    """Compare two strings, except for the last digit of their numbers."""
    if one == other:
        return True
    ours, theirs = (NUMBER.findall(each) for each in (one, other))
    return NUMBER.sub("", one) == NUMBER.sub("", other) and all(
        math.isclose(float(a), float(b), rel_tol=1.1e-3, abs_tol=1e-9) for a, b in zip(ours, theirs, strict=True))


@cache
def kept(where: Path = KEPT) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    return found


def test_snapshots_and_figures_have_the_same_names() -> None:
    assert [*kept()] == [*kept(LAYOUT)] == [*BUILT]


@pytest.mark.parametrize("name", BUILT)
def test_a_figure_equals_its_snapshot(name: str) -> None:
    """One test checks all of a figure, which is drawn once, so that the coverage map finds the test that draws it."""
    figure = built(name)
    assert document(name) == kept()[name]
    got, want = layout(name), kept(LAYOUT)[name]
    assert near(got, want), [(part, got[part], want[part]) for part in got if not near({part: got[part]}, {part: want[part]})]
    assert not misplaced(figure)
    assert not unmatched_legend_signs(figure), "the legend does not match the artists"
    assert not clipped(figure), "marks are cut off"
    assert not untied_names(figure)
    assert max(text.get_fontsize() for text, _ in words(figure)) < 16, "user settings change the figure"
    assert name == "tokens_by_source" or any(panel.x or panel.y for panel in shown(figure).panels), "the axes have no labels"


if __name__ == "__main__":
    for where, of in ((KEPT, document), (LAYOUT, layout)):
        where.write_text(json.dumps({name: of(name) for name in BUILT}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for each in BUILT:
        print(each, misplaced(built(each)))
