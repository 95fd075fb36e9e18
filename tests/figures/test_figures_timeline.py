"""Timelines of lossy methods and batches: rejected passes, skipped layers, labels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from figures.of_runs import timeline
from model.logs.spans import Span
from sim.commands.sim_app import app
from sim.engine.events import Run
from sim.runs.trace import chrome_trace, record
from tests.figures.test_figures import bars
from tests.figures.test_figures_speculative import inside


def frame(run: Run) -> tuple[pl.DataFrame, pl.DataFrame]:
    rows = pl.DataFrame([row._asdict() for row in run.intervals], infer_schema_length=None)
    return rows, pl.DataFrame(run.commits, schema=["time", "kind", "tokens"], orient="row")


def drawn(run: Run) -> Figure:
    return timeline.draw(*frame(run))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def ticks(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def legend(figure: Figure) -> str:
    return " ".join(text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts())


SCENARIO: dict[str, Any] = {
    "scenario": {"name": "one", "tokens": 40, "replications": 8},
    "method": [{"name": "bild", "layers": 24, "draft_layers": 6}],
    "outcomes": {"kind": "rates", "fallback_rate": 0.15, "rollback_rate": 0.1},
    "cost": {"cost_ratio": 0.25},
}
CODE, APART = {"method.variant": "code"}, {"method.placement": "separate"}


# --- Big Little Decoder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, CODE, APART, CODE | APART | {"cost.link": 1.0}])
def test_rejected_passes_are_those_that_the_engine_counted(change: dict[str, Any]) -> None:
    seen: Counter[str] = Counter()
    for replication in range(6):
        run = record(SCENARIO, replication=replication, set=change)
        figure = drawn(run)
        found = Counter(label for label, *_ in bars(figure))
        accepted = sum(kept * count for (kept, _), count in run.rounds.items())
        drafted = sum(length * count for (_, length), count in run.rounds.items())
        assert found["draft"] == accepted
        assert found["rolled back"] == drafted - accepted
        assert found["unsure"] == run.passes_of["draft"] - drafted
        assert found["again"] == sum(kind == "again" for _, kind, _ in run.commits)
        assert found["kept"] + found["again"] == run.passes_of["target"]
        dashed = [float(np.asarray(line.get_xdata())[0]) for line in figure.axes[0].lines if line.get_linestyle() == "--"]
        assert dashed == [time for time, kind, _ in run.commits if kind == "rollback"]
        seen += found
    assert min(seen[kind] for kind in ("draft", "rolled back", "unsure", "kept")) > 0
    assert (seen["again"] > 0) == ("method.variant" in change)


def test_a_repeated_pass_follows_a_rollback() -> None:
    run = record(SCENARIO, replication=1, set=CODE)
    again = [(start, end) for label, start, end, _ in bars(drawn(run)) if label == "again"]
    ends = {time: kind for time, kind, _ in run.commits}
    assert again
    assert all(ends[start] == "rollback" and ends[end] == "again" for start, end in again)


def test_small_and_large_model_have_separate_rows() -> None:
    run = record(SCENARIO, tokens=18)
    figure = drawn(run)
    assert ticks(figure) == ["unit 0\nlarge model", "unit 0\ndraft model"]
    for label, _, _, row in bars(figure):
        assert row == pytest.approx(0 if label in ("kept", "again") else 1)
    assert ticks(drawn(record(SCENARIO, tokens=18, set=APART)))[:2] == ["unit 0 (main)", "unit 1\ndraft model"]


def test_kinds_differ_by_face_and_hatch_and_are_named() -> None:
    figure = drawn(record(SCENARIO, replication=1, set=CODE))
    kinds = {str(each.get_label()): each for each in figure.axes[0].collections}
    assert set(kinds) == {"kept", "draft", "unsure", "rolled back", "again"}
    faces = {tuple(np.ravel(np.asarray(each.get_facecolor()))) for each in kinds.values()}
    hatches = {each.get_hatch() for name, each in kinds.items() if name not in ("kept", "draft")}
    assert len(faces) == 5
    assert len(hatches) == 3
    assert None not in hatches
    for words in ("unsure: falls back", "its token rolled back", "one more pass after a rollback"):
        assert words in legend(figure)
    assert "or rollback)" in figure.legends[0].get_title().get_text()
    assert any(text.partition(": ")[2] in ("fallback", "rollback", "again", "cap") for text in texts(figure))
    assert inside(figure)


def test_with_an_exit_layer_the_first_layers_are_the_small_model() -> None:
    exits = SCENARIO | {"method": [{"name": "bild", "layers": 24, "exit_layer": 6}], "cost": {}}
    seen: Counter[str] = Counter()
    for replication in range(6):
        run = record(exits, replication=replication)
        small = [row for row in run.intervals if row.last == 6]
        found = Counter(label for label, *_ in bars(drawn(run)))
        assert found["kept"] == len(run.intervals) - len(small) == sum(run.rounds.values())
        taken = sum((length - kept) * count for (kept, length), count in run.rounds.items())
        # The last rolled-back token may also have had a pass, for the layers after the exit.
        rollbacks = sum(kind == "rollback" for _, kind, _ in run.commits)
        assert taken <= found["rolled back"] <= taken + rollbacks
        assert found["unsure"] == sum(kind == "fallback" for _, kind, _ in run.commits)
        seen += found
    assert min(seen[kind] for kind in ("draft", "rolled back", "unsure")) > 0


def test_without_commits_or_in_other_methods_no_pass_is_marked_rejected() -> None:
    run = record(SCENARIO, replication=1)
    rows, _ = frame(run)
    assert {label for label, *_ in bars(timeline.draw(rows))} == {"kept", "draft"}
    speculative = SCENARIO | {
        "method": [{"name": "speculative", "layers": 24, "draft_length": 4}], "outcomes": {"kind": "iid", "acceptance_rate": 0.5},
    }  # fmt: skip
    assert {label for label, *_ in bars(drawn(record(speculative)))} == {"kept", "draft"}


# --- Skipped layers, and batches ------------------------------------------------------------------------------


def test_a_batch_names_its_number_of_tokens_and_its_layers() -> None:
    run = record("skipdecode", point=4, tokens=2)
    passes = run.intervals
    assert {(row.width, row.depth) for row in passes} == {(4, 1)}
    assert passes[0].layers_run == [(0, 1), (9, 24)]
    assert passes[0].earliest == passes[0].position == 0
    figure = drawn(run)
    assert "token 0, 4 in all\nlayers 0–1, 9–24" in texts(figure) or "0 ×4\n0–1, 9–24" in texts(figure)
    assert "×: number of tokens, of\nsequences" in figure.legends[0].get_title().get_text()
    [first, *_] = [event["name"] for event in chrome_trace(passes, run.commits, "")["traceEvents"] if event["ph"] == "X"]
    assert first == "token 0 (4 in all) · layers 0–1, 9–24"


def test_simultaneous_commits_of_a_batch_share_a_label() -> None:
    """Each commit has a line, and the last of simultaneous commits is labelled with the number of tokens."""
    batch = SCENARIO | {
        "method": [{"name": "speculative", "layers": 24, "draft_length": 2, "sequences": 3, "batching": "static"}],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.5},
    }  # fmt: skip
    run = record(batch, tokens=4)
    total, at = 0, dict[float, int]()
    for time, _, tokens in run.commits:
        total += tokens
        at[time] = total
    assert len(at) < len(run.commits)
    said = [text for text in texts(drawn(run)) if text.endswith(": round")]
    assert said == [f"{each}: round" for each in at.values()]
    assert any(row.depth > 1 and row.width > row.depth for row in run.intervals)


def test_kv_rows_of_skipped_layers_are_not_drawn_as_layers() -> None:
    run = record("early-exit", point=1, tokens=4)
    rows = [row for row in run.intervals if row.kv_only]
    assert rows
    figure = drawn(run)
    found = sorted((start, end) for label, start, end, _ in bars(figure) if label == "rows")
    assert found == [(row.start, row.end) for row in rows]
    assert "KV cache rows of skipped layers" in legend(figure)
    names = [event["name"] for event in chrome_trace(run.intervals, run.commits, "")["traceEvents"] if event["ph"] == "X"]
    assert f"token {rows[0].position} · keys and values of layers {rows[0].first}–24" in names
    alone = [row for row in run.intervals if row.first == row.last]
    assert alone  # the projection after which the token exits
    assert f"token {alone[0].position} · head" in names
    assert any(text.endswith("head") for text in texts(drawn(record("early-exit", point=2, tokens=4))))


def test_layers_run_exclude_gaps() -> None:
    row = Span(0, 0.0, 1.0, "forward", 0, 3, 2, 20, "kept")
    assert row.layers_run == [(2, 20)]
    assert row._replace(gaps=((2, 4), (9, 12), (18, 20))).layers_run == [(4, 9), (12, 18)]
    assert row._replace(first=20).layers_run == []


def test_trace_command_writes_timelines(tmp_path: Path) -> None:
    for name, point in (("bild", 5), ("skipdecode", 4), ("early-exit", 3)):
        done = CliRunner().invoke(app, ["trace", name, "--point", str(point), "-o", str(tmp_path / f"{name}.svg")])
        assert done.exit_code == 0, done.output
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
