"""The paper's measurements as a scenario: overheads fitted on one data set and simulated on the other, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model import published
from model.base.checks import ParameterError
from model.published import ppd_table_3_fit
from sim.commands.sim_app import app
from sim.runs import sweep
from sim.runs.run_report import notes
from sim.scenarios.grid import Grid
from sim.scenarios.scenario_file import cost_source, load
from tests.project.test_bad_input import SCENARIO, one_line, refused

QUICK = {"scenario.replications": 4096, "scenario.event_replications": 64}


@pytest.fixture(scope="module")
def table() -> pl.DataFrame:
    return sim.run("ppd-table-3", set=QUICK)


def test_every_measured_time_has_a_row(table: pl.DataFrame) -> None:
    formula = table.filter(view="formula")
    assert sorted(formula.select("data_set", "candidates").rows()) == [
        (run.data_set, run.candidates) for run in ppd_table_3_fit.runs()
    ]
    for row in formula.to_dicts():
        # Fitted on the other data set, never on the same.
        assert {row["data_set"], row["fitted_on"]} == {*ppd_table_3_fit.data_sets()}
        found = published.table("ppd-table-3")
        measured = found.lookup(data_set=row["data_set"], method="ppd", candidates=row["candidates"])["latency_s"]
        plain = found.lookup(data_set=row["data_set"], method="greedy")["latency_s"]
        assert row["published_speedup"] == pytest.approx(plain / measured)
        assert row["latency_s"] * row["speedup"] == pytest.approx(plain)  # plain decoding takes the measured time
        assert row["latency_s"] == pytest.approx(measured, rel=0.012)


def test_views_agree_with_the_fit(table: pl.DataFrame) -> None:
    said = {(row["data_set"], row["candidates"]): row["predicted_s"] for row in ppd_table_3_fit.rows()}
    for row in table.to_dicts():
        expected = said[row["data_set"], row["candidates"]]
        if row["view"] == "formula":
            assert row["latency_s"] == pytest.approx(expected)
        else:
            error = row["latency_sd_layers"] * row["seconds_per_layer"] / row["replications"] ** 0.5
            assert abs(row["latency_s"] - expected) < 4 * error
    events = table.filter(view="events")
    assert events["paths_difference"].max() < 1e-9  # type: ignore[operator]
    assert not events["contended"].any()


def scenario(**cost: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "own", "tokens": 128, "replications": 64, "views": ("formula",), "notes": ["ppd-table-3"]},
        "method": [{"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}],
        "outcomes": {"kind": "published", "table": "ppd-table-3", "data_set": "squad"},
        "cost": {"kind": "published", "data_set": "squad", **cost},
    }


def test_without_a_fit_times_follow_the_theorem() -> None:
    row = sim.run(scenario()).row(0, named=True)
    run = ppd_table_3_fit.runs("squad")[1]
    assert row["latency_s"] == pytest.approx(run.plain_s * (1 - run.match_rate / 2 * 127 / 128))
    assert "fitted_on" not in row
    headed = sim.run(scenario(early_head=0.5, final_head=0.5)).row(0, named=True)
    assert headed["latency_s"] * headed["speedup"] == pytest.approx(run.plain_s)  # with a head, layers are shorter


@pytest.mark.parametrize("on", ["cnn_dm", "squad", "both"])
def test_overhead_of_the_scenario_is_the_fitted_one(on: str) -> None:
    for law, k in (("linear", 3), ("tree", 3), ("linear", 7), ("tree", 7)):
        tables = scenario(fitted_on=on, dispatch_law=law)
        tables["method"][0]["candidates"] = k
        tables["outcomes"] = {"kind": "iid", "match_rate": 0.4724}
        case = Grid(tables).case(0)
        assert case.seconds_per_layer is not None
        found = case.cost.dispatching(k) * case.seconds_per_layer
        assert found == pytest.approx(ppd_table_3_fit.per_token_s(k, law, on))
        assert found == pytest.approx(ppd_table_3_fit.fitted_seconds(on, law) * ((k + 1) if law == "linear" else {3: 2, 7: 3}[k]))
    assert case.fitted_on == on


def test_seven_candidates_distinguish_linear_from_tree_dispatch() -> None:
    """At any match rate: with the same random draws, the difference of the two equals that of the theory."""
    tables = scenario(fitted_on="both") | {"outcomes": {"kind": "iid", "match_rate": 0.6}}
    axes = {"method.candidates": [1, 3, 7], "cost.dispatch_law": ["linear", "tree"]}
    for view in ("formula", "events"):
        found = sim.run(tables, views=[view], sweep=axes, set={"scenario.event_replications": 4})
        apart = [found.filter(candidates=k)["tpot_ms"].to_list() for k in (1, 3, 7)]
        gaps = [line - tree for line, tree in apart]
        assert gaps[:2] == pytest.approx([0, 0], abs=1e-9)
        assert gaps[2] == pytest.approx(1e3 * (ppd_table_3_fit.per_token_s(7) - ppd_table_3_fit.per_token_s(7, "tree")))


def test_run_prints_measured_and_predicted_speed_ups(table: pl.DataFrame) -> None:
    text = "\n".join(notes(table.lazy(), load("ppd-table-3")))
    for row in ppd_table_3_fit.rows():
        [line] = [line for line in text.splitlines() if line.startswith(f"{row['source']}: ")]
        assert f"measured {row['latency_s']:.3f} s" in line
        assert f"fitted on {row['fitted_on']}: formula {row['predicted_s']:.3f} s ({100 * row['error']:+.1f} %)" in line
        assert f"without overheads {row['ideal_s']:.3f} s ({100 * row['ideal_error']:+.1f} %)" in line
        own = table.filter(data_set=row["data_set"], candidates=row["candidates"])
        for view in ("paths", "events"):
            each = own.filter(view=view).row(0, named=True)
            half = (each["latency_layers_high"] - each["latency_layers_low"]) / 2 * each["seconds_per_layer"]
            assert f"{view} {each['latency_s']:.3f} ±{half:.3f} s" in line
    for words in ("four points calibrate it and do not prove it", "exit layer 20 assumed", "7 would: 35.2 ms a token", "26.4 ms"):
        assert words in text
    assert "times: published: time of plain decoding, PPD Table 3; fitted to published times" in text


@pytest.mark.parametrize(
    "change",
    [
        {"scenario.tokens": 64}, {"method.exit_layer": 30}, {"cluster.units": 2}, {"outcomes.data_set": "cnn_dm"},
    ],
    ids=str,
)  # fmt: skip
def test_other_runs_are_not_compared_with_the_table(change: dict[str, Any]) -> None:
    tables = scenario(fitted_on="cnn_dm")
    assert any("measured 13.712 s" in line for line in notes(sim.run(tables).lazy(), tables))
    assert not any("measured" in line for line in notes(sim.run(tables, set=change).lazy(), tables))


def test_source_of_times_names_published_fitted_and_assumed() -> None:
    assert cost_source(scenario()) == (
        "published: time of plain decoding, PPD Table 3; assumed: every layer of the target takes one layer-time;"
        " nothing else takes time"
    )
    fitted = cost_source(scenario(fitted_on="squad"))
    assert fitted == cost_source(load("ppd-table-3"))
    assert "fitted to published times" in fitted
    assert "assumed: equal layers, and the exit layer" in fitted
    assert fitted in cost_source(scenario() | {"sweep": {"cost.fitted_on": ["squad", "both"]}})
    assert "; final_head as set in [cost]; " in cost_source(scenario(final_head=1.0))


def test_fitted_on_can_be_swept() -> None:
    found = sim.run(scenario(), sweep={"cost.fitted_on": ["cnn_dm", "squad", "both"]})
    assert found["fitted_on"].to_list() == ["cnn_dm", "squad", "both"]
    least, *_, most = sorted(found["latency_s"])
    assert found.filter(fitted_on="squad")["latency_s"].item() == least
    assert found.filter(fitted_on="cnn_dm")["latency_s"].item() == most


METHOD = '[[method]]\nname = "ppd"\nlayers = 40\nexit_layer = 20\ncandidates = 1\n[outcomes]\nkind = "iid"\nmatch_rate = 0.5\n'
OTHER = '[[method]]\nname = "autoregressive"\nlayers = 40\n'
DRAFTING = '[[method]]\nname = "speculative"\nlayers = 40\ndraft_length = 3\n[outcomes]\nkind = "iid"\nacceptance_rate = 0.5\n'
PUBLISHED = '[cost]\nkind = "published"\n'
SQUAD = PUBLISHED + 'data_set = "squad"\n'
BAD = {
    METHOD + PUBLISHED: ["one of task and data_set", "kind 'published'", "got none"],
    DRAFTING + PUBLISHED + 'task = "ende"\ndata_set = "squad"\n': ["one of task and data_set", "task='ende' and data_set='squad'"],
    METHOD + '[cost]\ndata_set = "squad"\n': ["one of task and data_set", "none with 'unit'", "data_set='squad'"],
    METHOD + PUBLISHED + 'data_set = "wmt"\n': ["unknown data_set 'wmt'", "cnn_dm, squad"],
    METHOD + PUBLISHED + "data_set = 3\n": ["unknown data_set 3", "cnn_dm, squad"],
    METHOD + SQUAD + 'fitted_on = "wmt"\n': ["unknown fitted_on 'wmt'", "both, cnn_dm, squad"],
    METHOD + SQUAD + "fitted_on = true\n": ["unknown fitted_on True", "both"],
    METHOD + '[cost]\nfitted_on = "squad"\n': ["fitted_on must be given with kind 'published' and data_set", "leave it out"],
    METHOD + SQUAD + "seconds_per_layer = 0.003\n": ["seconds_per_layer comes from the table", "leave it out"],
    METHOD + SQUAD + 'fitted_on = "both"\ndispatch = 1\n': ["dispatch must be left out with fitted_on", "got 1"],
    METHOD + SQUAD + 'fitted_on = "both"\nlink = 0.5\n': ["link must be left out with fitted_on", "got 0.5"],
    METHOD + SQUAD + 'fitted_on = "both"\nlayer_times = [1, 2]\n': ["layer_times must be left out with fitted_on", "got [1, 2]"],
    METHOD + SQUAD + 'fitted_onn = "both"\n': ["unknown key cost.fitted_onn", "did you mean fitted_on?"],
    METHOD.replace("40", "32") + SQUAD: ["method.layers must be 40", "cost.data_set", "LLaMA-2-13B", "got 32", "seconds_per_layer"],
    OTHER + SQUAD + 'fitted_on = "both"\n': ["cost.fitted_on is used by no method", "leave it out"],
}


@pytest.mark.parametrize("text", BAD)
def test_values_not_in_the_table_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml"], {"s.toml": SCENARIO + text}))
    for words in BAD[text]:
        assert words in message


def test_plain_decoding_takes_the_published_time() -> None:
    tables = {"scenario": {"name": "plain", "tokens": 128, "replications": 1}, "method": [{"name": "autoregressive", "layers": 40}],
              "cost": {"kind": "published", "data_set": "cnn_dm"}}  # fmt: skip
    for seconds in sim.run(tables)["latency_s"]:
        assert seconds == pytest.approx(18.171)


def test_costs_are_listed() -> None:
    done = CliRunner().invoke(app, ["ls", "costs"])
    assert "fitted_on " in done.stdout
    assert "Table 3 of Predictive Pipelined Decoding" in done.stdout
    assert "fitted_on" in CliRunner().invoke(app, ["ls", "methods", "ppd"]).stdout


def test_law_of_another_table_has_no_published_speed_up() -> None:
    tables = scenario()
    other = tables | {"outcomes": {"kind": "published", "data_set": "squad", "head": "trained"}}
    assert "published_speedup" in sim.run(tables).columns
    assert "published_speedup" not in sim.run(other).columns
    with pytest.raises(ParameterError, match="candidates of ppd-table-3"):
        sweep.run(sweep.resolve(tables, set={"method.candidates": 5}))
