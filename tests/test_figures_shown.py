"""What every figure shows, read off its artists: its words exactly, how many marks, error bars, bars and areas of each kind, and
where all of it stands on the page.

The words are kept in `data/figures_shown.json`, numbers in them as `#`: which numbers stand there, and where the marks stand, is
asserted figure by figure from the rows that are drawn. Sizes, limits, places, strokes and where data reach are kept in
`data/figures_layout.json`. `python -m tests.test_figures_shown` writes both files anew, to be read (and the figures looked at)
before they are kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
import pytest
from matplotlib.figure import Figure

from figures import (
    acceptance_by_position,
    accepted,
    accepted_lengths,
    adaptive,
    agreement,
    bild,
    bild_operations,
    bild_rates,
    deck,
    devices_held,
    distribution,
    draft_length,
    early_exit,
    early_exit_batch,
    error_by_method,
    exit_schedule,
    formula_limits,
    gantt_pair,
    hierarchical,
    largest_batch,
    layer_map,
    layer_time,
    match_rate,
    methods,
    predicted_measured,
    roofline,
    speedup,
    speedup_by_batch,
    speedup_by_device,
    table_3,
    time_parts,
    timeline,
    tradeoff,
    verify_cost,
    verify_cost_hardware,
    work,
    written_by,
)
from figures.exit_schedule import Schedule
from figures.style import headed
from model import profile
from model.device import DEVICES
from model.measured import Measured
from model.published import deck_report
from sim.trace import record
from tests import (
    test_figures,
    test_figures_batches,
    test_figures_bild,
    test_figures_comparison,
    test_figures_hardware,
    test_figures_real,
    test_figures_speculative,
    test_figures_timeline,
    test_figures_tradeoff,
)
from tests.figure_checks import Layout, Panel, clipped, formula, misnamed, misplaced, shown, unexplained, words

KEPT = Path(__file__).parent / "data" / "figures_shown.json"
LAYOUT = KEPT.with_name("figures_layout.json")


@cache
def profiles() -> list[profile.Profile]:
    return [profile.load("h100-llama-2-7b")]


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
    """More latencies than a bar each can show."""
    count = 3 * distribution.MOST_BARS
    shares = [2 * (place + 1) / count / (count + 1) for place in range(count)]
    latencies = [100.0 + place for place in range(count)]
    return pl.DataFrame({"point": 0, "view": "paths", "latency_layers": latencies, "probability": shares})


def of_schedules(rows: pl.DataFrame) -> Figure:
    found = exit_schedule.of_run(rows)
    assert found is not None
    return exit_schedule.draw(found[0], **found[1])


BUILT: dict[str, Callable[[], Figure]] = {
    "tradeoff_units": lambda: tradeoff.draw(test_figures_tradeoff.paper()),
    "tradeoff_compute": lambda: tradeoff.draw(test_figures_tradeoff.paper(), "compute_per_token"),
    "tradeoff_devices": lambda: tradeoff.draw(devices("ppd-against-tensor-parallel").filter(method="ppd", ways=1)),
    "timeline": lambda: timeline.draw(test_figures.INTERVALS, test_figures.COMMITS),
    "timeline_ms": lambda: headed(timeline.draw(test_figures.INTERVALS, title="PPD", time_unit="ms"), "mine"),
    "distribution": lambda: distribution.draw(test_figures.histogram(2)),
    "distribution_ms": lambda: distribution.draw(
        test_figures.histogram().with_columns(latency_ms=2 * pl.col("latency_layers"), name=pl.lit("PPD, k = 3"))
    ),
    **{f"speedup_{x}": lambda x=x: speedup.draw(test_figures_speculative.simulated(), x) for x in speedup.AXES},  # type: ignore[misc]
    "speedup_batches": lambda: speedup.draw(of_batches(), "draft_length"),
    "speedup_by_batch": lambda: speedup_by_batch.draw(test_figures_batches.rows()),
    "accepted": lambda: accepted.draw(test_figures_speculative.histogram(), "all of it"),
    "methods": lambda: methods.draw(formula("compare")),
    "methods_settings": lambda: methods.draw(formula("speculative-adaptive")),
    "methods_lossy": lambda: methods.draw(formula("skipdecode")),
    "choices": lambda: work.draw(formula("early-exit")),
    "bild_rates": lambda: bild_rates.draw(bild_rates.of_run(formula("bild"))),
    "bild": lambda: bild.draw(test_figures_bild.made()),
    "bild_operations": lambda: bild_operations.draw(
        bild_operations.factors(0.15, [0.0, 0.1], operations_ratio=0.25, memory_ratio=0.3, maximum_draft=10, cost_ratio=0.2),
        source="assumed",
    ),
    "deck": lambda: deck.draw(deck_report.rows()),
    "draft_length": lambda: draft_length.draw(),
    "devices_held": lambda: devices_held.draw(devices("ppd-against-tensor-parallel")),
    "speedup_by_device": lambda: speedup_by_device.draw(devices("hardware-compare")),
    "verify_cost": lambda: verify_cost.draw(*verify_cost.example()[:2], [0.6, 0.8], context=1024, source="assumed"),
    "early_exit_batch": lambda: early_exit_batch.draw(
        {"even": [0.1] * 7 + [1.0]}, batches=(1, 4), head=0.5, check=0.1, propagation=0.1, source="assumed"
    ),
    "early_exit": lambda: early_exit.draw([0.5, 0.9], [0, 2, 8], longest=64, source="assumed"),
    "hierarchical": lambda: hierarchical.draw(hierarchical.example()),
    "adaptive": lambda: adaptive.draw(adaptive.trajectories([0.8] * 40, 0.1, text="steady", replications=20)),
    "exit_schedule": lambda: exit_schedule.draw([Schedule("mine", 4, 8)], layers=12, prompt=10, sequence=30, source="assumed"),
    "layer_map": lambda: layer_map.draw([Schedule("mine", 4, 8)], layers=12, prompt=10, sequence=30, warm_up=1, source="assumed"),
    "predicted_measured": lambda: predicted_measured.draw(test_figures_comparison.rows(disturbed=[True, False, True, False])),
    "error_by_method": lambda: error_by_method.draw(test_figures_comparison.rows()),
    "time_parts": lambda: time_parts.draw(
        test_figures_comparison.times({"target": 0.2, "draft": 0.1, "rest": 0.05}, {"target": 0.45, "draft": 0.05, "rest": 0.05})
    ),
    "match_rate": lambda: match_rate.draw(test_figures_real.log(), [1, 3]),
    "match_rate_by_position": lambda: match_rate.draw_by_position(test_figures_real.log(), [1]),
    "acceptance_by_position": lambda: acceptance_by_position.draw(test_figures_real.lengths(), 3, "mine"),
    "accepted_lengths": lambda: accepted_lengths.draw(test_figures_real.lengths(), [1, 3], "mine"),
    "agreement": lambda: agreement.draw(test_figures_real.quality()),
    "log_likelihood": lambda: agreement.draw(test_figures_real.quality(), quality="log_likelihood"),
    "table_3": lambda: table_3.draw(formula("ppd-table-3")),
    "roofline": lambda: roofline.draw(profiles()),
    "layer_time": lambda: layer_time.draw(profiles(), batches=(1, 8), longest=1024),
    "choices_bild": lambda: work.draw(formula("bild").filter(pl.col("point").rank("dense") <= 16)),
    "choices_skipdecode": lambda: work.draw(formula("skipdecode")),
    "largest_batch": lambda: largest_batch.draw(
        {"H100": Measured(profiles()[0])}, {"H100": test_figures_hardware.DRAFT}, acceptance_rate=0.8, draft_length=3,
        source="assumed", contexts=(128, 1024), most=64, memories={"H100": DEVICES["h100"].memory_bytes},
    ),
    "written_by": lambda: written_by.draw(*test_figures_real.decoded(), prompt=["a", " b"], title="mine"),
    "gantt_pair": lambda: gantt_pair.draw(*[
        test_figures.INTERVALS.with_columns(pl.col("start", "end") * stretch) for stretch in (1.25, 1.0)
    ]),
    "formula_limits": lambda: formula_limits.draw(pl.DataFrame({
        "claim": "ppd", "series": ["k=1", "k=1", "k=3", "k=3"], "x": [2.0, 3.0] * 2, "formula": [1.2, 1.4, 1.3, 1.5],
        "simulated": [1.1, 1.2, 1.2, 1.3], "measured": [1.0, 1.2, 1.1, 1.2], "noise": 0.02, "x_name": "exit layer",
        "y_name": "speed-up", "about": "given the match rate",
    })),
    "bild_records": lambda: bild.draw(test_figures_bild.two()),
    "bild_of_run": lambda: bild.draw(bild.of_run(formula("bild-thresholds"))),
    "distribution_ranges": lambda: distribution.draw(ranges()),
    "exit_schedule_of_run": lambda: of_schedules(formula("skipdecode")),
    "timeline_bild": lambda: test_figures_timeline.drawn(record(test_figures_timeline.SCENARIO, replication=1)),
    "tradeoff_forms": lambda: tradeoff.draw(formula("ppd-forms")),
    "verify_cost_hardware": lambda: verify_cost_hardware.draw({"H100": Measured(profiles()[0])}, batches=(1, 8), widest=6),
}


@cache
def built(name: str) -> Figure:
    """The figure as it is drawn for a reader whose own settings are others: they change nothing."""
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "axes.titleweight": "bold"}):
        return BUILT[name]()


def plain(text: str) -> str:
    """Words without the numbers in them."""
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
        "texts": sorted({plain(text) for text in panel.texts}),
        "ticks": [sorted({*map(plain, each)} - {""}) for each in panel.ticks],
    }  # fmt: skip


def document(name: str) -> dict[str, Any]:
    found = shown(built(name))
    return {
        "texts": [plain(text) for text in found.texts],
        "legends": [[plain(title), [plain(entry) for entry in entries]] for title, entries in found.legends],
        "panels": [of_panel(panel) for panel in found.panels],
    }


def layout(name: str) -> dict[str, Any]:
    """Where all of a figure stands. Numbers of words are `#`: where the end of a word is depends on its digits."""
    found = Layout.of(built(name))._asdict()
    return found | {"words": [" ".join([plain(text), *map(str, at)]) for text, *at in found["words"]],
                    "boxes": [" ".join(map(str, each)) for each in found["boxes"]],
                    "limits": [" ".join(map(str, each)) for each in found["limits"]],
                    "legends": [" ".join(map(str, each)) for each in found["legends"]],
                    "size": " ".join(map(str, found["size"]))}  # fmt: skip


def near(got: dict[str, Any], want: dict[str, Any]) -> bool:
    """The same layout; words, and what follows from their size, may be 0.3 hundredths off: their widths vary."""
    return [*got] == [*want] and all(
        got[part] == want[part] if part in ("size", "limits", "strokes") else
        len(got[part]) == len(want[part]) and all(map(_close, got[part], want[part])) for part in want
    )  # fmt: skip


def _close(one: str, other: str) -> bool:
    """The same words up to numbers, and those nearly the same."""
    ours, theirs = (re.findall(r"-?\d+\.\d+", each) for each in (one, other))
    same = re.sub(r"-?\d+\.\d+", "", one) == re.sub(r"-?\d+\.\d+", "", other)
    return same and all(abs(float(a) - float(b)) <= 0.3 for a, b in zip(ours, theirs, strict=True))


@cache
def kept(where: Path = KEPT) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    return found


def test_every_figure_is_here() -> None:
    assert [*kept()] == [*kept(LAYOUT)] == [*BUILT]


@pytest.mark.parametrize("name", BUILT)
def test_a_figure_shows_what_it_is_meant_to(name: str) -> None:
    """One test asks all of a figure, which is drawn once: a search for what a fault breaks knows which test drew it."""
    figure = built(name)
    assert document(name) == kept()[name]
    got, want = layout(name), kept(LAYOUT)[name]
    assert near(got, want), [(part, got[part], want[part]) for part in got if not near({part: got[part]}, {part: want[part]})]
    assert not misplaced(figure)
    assert not unexplained(figure), "legends are of what is drawn"
    assert not clipped(figure), "marks are cut off"
    assert not misnamed(figure)
    assert max(text.get_fontsize() for text, _ in words(figure)) < 16, "a reader's own settings change it"
    assert name == "written_by" or any(panel.x or panel.y for panel in shown(figure).panels), "axes say what they are of"


if __name__ == "__main__":
    for where, of in ((KEPT, document), (LAYOUT, layout)):
        where.write_text(json.dumps({name: of(name) for name in BUILT}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for each in BUILT:
        print(each, misplaced(built(each)))
