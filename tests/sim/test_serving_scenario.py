"""Scenarios of servers: the same study as `sim serve`, kept runs, workers, schemas, and refusals in one line."""

from __future__ import annotations

import gzip
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.serving.step_prices import LayerShare, RaggedPass
from sim.commands.sim_app import app
from sim.reporting import scenario_toml
from sim.runs.sweep import RunError
from sim.serving import (
    draft_schedules,
    load_scenario,
    served_methods,
    server_trace,
    serving_run,
    serving_schema,
    study,
    study_results,
    traces,
)
from sim.serving.study import RunOf

LAW = "sglang-qwen3-235b-a22b"
TABLES: dict[str, Any] = {
    "scenario": {"name": "mine", "replications": 2},
    "system": {"engine_law": LAW},
    "load": {"concurrency": [2, 6], "requests": 40, "prompt": 64.0, "output": 24.0},
    "server": {"policies": ["off", "static:2"]},
}


def tables(**changes: dict[str, Any]) -> dict[str, Any]:
    return {name: TABLES.get(name, {}) | changes.get(name, {}) for name in {**TABLES, **changes}}


def test_rows_are_those_of_the_study(tmp_path: Path) -> None:
    made = serving_run.run(tables(), out=tmp_path / "run", jobs=1)
    found = study.serve(load_scenario.inputs_of(tables()))
    rows = [study_results.plain_values(row) for row in found.rows]
    assert made.table.to_dicts() == rows
    assert pl.read_parquet(tmp_path / "run" / "results.parquet").equals(made.table)
    assert pl.read_csv(tmp_path / "run" / "results.csv").height == 4
    assert str(made.studies[0]) == str(found)


@pytest.mark.parametrize("load", [{"concurrency": [4]}, {"concurrency": [], "rate": [3.0]}])
def test_gain_and_regret_compare_runs_of_the_same_requests(load: dict[str, Any]) -> None:
    given = tables(load=load, server={"policies": ["off", "static:1", "static:4", "oracle:4"]}, scenario={"replications": 3})
    found = study.serve(load_scenario.inputs_of(given))
    name = "output_tokens_per_s" if "rate" not in load else "mean_e2e_ms"
    speed = {each.policy: each.figures[name] if "rate" not in load else 1 / each.figures[name] for each in found.points}
    best = max((policy for policy in speed if not policy.startswith("oracle")), key=lambda policy: speed[policy])
    for row in found.rows:
        policy = row["policy"]
        assert row["gain_over_off"] == pytest.approx(speed[policy] / speed["off"])
        assert row["regret"] == pytest.approx(speed[best] / speed[policy] - 1)
        assert row["gain_over_off_low"] <= row["gain_over_off"] <= row["gain_over_off_high"]
    off, *_, oracle = found.rows
    assert (off["gain_over_off_low"], off["gain_over_off_high"]) == (1, 1)  # in pairs
    assert oracle["regret"] < 0  # no engine can
    alone = study.serve(load_scenario.inputs_of(tables(load=load, server={"policies": ["static:1"]})))
    assert study_results.plain_values(alone.rows[0])["gain_over_off"] is None


def test_axes_are_studies_of_their_own(tmp_path: Path) -> None:
    given = tables(sweep={"server.max_num_seqs": [1, 4], "load.prompt": [32.0, 64.0]})
    made = serving_run.run(given, out=tmp_path / "run", jobs=1)
    assert made.axes == tuple({"server.max_num_seqs": seqs, "load.prompt": each} for seqs in (1, 4) for each in (32.0, 64.0))
    for at, each in zip(made.axes, made.studies, strict=True):
        assert each.settings.max_num_seqs == at["server.max_num_seqs"]
        assert each.workload.prompt == at["load.prompt"]
    one = made.table.filter(pl.col("server.max_num_seqs") == 1)
    assert one["mean_running"].max() <= 1
    assert one.height == 8


def test_workers_give_the_same_files(tmp_path: Path) -> None:
    for jobs in (1, 2):
        serving_run.run(tables(), out=tmp_path / str(jobs), jobs=jobs)
    for name in ("results.parquet", "results.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = serving_run.run(tables(), out=tmp_path / "whole", jobs=1)
    count, right = 0, study.StudyPlan.run

    def stopped(plan: study.StudyPlan, of: study.RunOf, *_: Any) -> study.ServedRun:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return right(plan, of)

    monkeypatch.setattr(study.StudyPlan, "run", stopped)
    with pytest.raises(KeyboardInterrupt, match=r"finished runs are kept in .*resume with the same command and --resume"):
        serving_run.run(tables(), out=tmp_path / "run", jobs=1)
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["complete"] is False
    kept = sorted((tmp_path / "run" / "shards").iterdir())
    assert len(kept) == 5
    kept[0].write_text("{}")  # damaged: made again
    made = serving_run.run(tables(), out=tmp_path / "run", jobs=1, resume=True)
    assert (made.resumed, made.computed) == (4, 8)
    assert made.table.equals(whole.table)
    assert made.studies[0].points[0].series.table() == whole.studies[0].points[0].series.table()
    again = serving_run.run(tables(), out=tmp_path / "run", jobs=1, resume=True)
    assert (again.resumed, again.computed) == (12, 0)
    with pytest.raises(ParameterError, match="holds the run of another scenario"):
        serving_run.run(tables(scenario={"seed": 5}), out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    with pytest.raises(ParameterError, match="not the directory of a run"):
        serving_run.run(tables(), out=tmp_path / "other")


def test_a_full_disk_ends_the_run_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(serving_run, "write_content", full)
    with pytest.raises(RunError, match=r"No space left on device \(somewhere\); finished runs are kept in"):
        serving_run.run(tables(), out=tmp_path / "run", jobs=1)


def test_the_bundled_scenario_shows_where_a_fixed_length_fails() -> None:
    given = load_scenario.resolve("serving-azure", replications=0)
    jsonschema.validate(given, serving_schema.of_scenarios())
    (point,) = load_scenario.points(given)
    assert len(study.plan(point[1]).runs) == 9
    trace = traces.read("azure-2023-conversation")
    assert trace.requests.prompts.size == 2867
    assert trace.requests.arrivals[-1] < 600
    assert trace.requests.prompts.size / 600 == pytest.approx(4.8, abs=0.05)


def test_python_and_the_command_line_give_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f'[scenario]\nname = "mine"\nreplications = 2\n[system]\nengine_law = "{LAW}"\n'
        '[load]\nconcurrency = [2, 6]\nrequests = 40\nprompt = 64.0\noutput = 24.0\n[server]\npolicies = ["off", "static:2"]\n'
    )
    done = CliRunner().invoke(app, ["run", str(file), "-o", str(tmp_path / "run"), "--json", "-q", "--seed", "3", "-j", "1"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    said = json.loads(done.stdout)
    table = sim.run(tables(), seed=3)
    assert said["table"] == table.to_dicts()
    for each in said["points"]:
        jsonschema.validate({key: value for key, value in each.items() if key != "axes"}, serving_schema.of_output())
    found = sim.serve(engine_law=LAW, concurrency=[2, 6], requests=40, prompt=64.0, output=24.0, policies=["off", "static:2"],
                      replications=2, seed=3)  # fmt: skip
    assert [each.figures["output_tokens_per_s"] for each in found.points] == table["output_tokens_per_s"].to_list()
    text = CliRunner().invoke(app, ["run", str(file), "-o", str(tmp_path / "run"), "-q", "--resume", "--seed", "3"]).stdout
    assert found.verdict.split(";")[0] in " ".join(text.split())
    assert "12 of 12 runs were kept from before" in text
    dry = CliRunner().invoke(app, ["run", str(file), "--dry-run", "--json", "--sweep", "server.block_size=8,16"])
    assert json.loads(dry.stdout) == {"points": 2, "runs": 24}
    listed = CliRunner().invoke(app, ["ls", "scenarios", "serving-azure"]).stdout
    assert "azure-2023-conversation" in listed
    assert json.loads(CliRunner().invoke(app, ["schema", "load"]).stdout) == serving_schema.of_scenarios()
    assert json.loads(CliRunner().invoke(app, ["schema", "serve"]).stdout) == serving_schema.of_output()


def test_trace_and_law_are_found_from_the_scenario_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,completion_tokens\n0,5,4\n1,6,3\n2,7,2\n")
    (tmp_path / "mine.toml").write_text(
        f'[scenario]\nname = "mine"\nreplications = 0\n[system]\nengine_law = "{LAW}"\n'
        '[load]\ntrace = "t.csv"\n[server]\npolicies = ["off"]\n'
    )
    given = load_scenario.resolve(tmp_path / "mine.toml")
    assert given["load"]["trace"] == str(tmp_path / "t.csv")
    before = load_scenario.fingerprint(given)
    made = serving_run.run(given, out=tmp_path / "run", jobs=1)
    assert made.table["rate"].to_list() == [1.0]
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,completion_tokens\n0,5,4\n1,6,3\n2,7,3\n")
    assert load_scenario.fingerprint(given) != before  # a changed trace is another run
    with pytest.raises(ParameterError, match="another scenario"):
        serving_run.run(given, out=tmp_path / "run", jobs=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plots": {"x": 1}}, r"unknown section \[plots\]"), ({"load": {"rates": 3}}, "unknown key load.rates; did you mean rate?"),
        ({"load": {"concurrency": "two"}}, "load.concurrency must be a list or a whole number, got 'two'"),
        ({"load": {"concurrency": [2.5]}}, r"load.concurrency\[0\] must be a whole number, got 2.5"),
        ({"server": {"policies": "off"}}, "server.policies must be a list, got 'off'"),
        ({"server": {"slo_tpot": "fast"}}, "slo_tpot must be a time above 0"),
        ({"server": {"policies": ["static:2", "vllm:[[1,3,2],[5,9,0]]"]}}, "must begin at 4, got 5: it leaves a gap"),
        ({"load": {"rate": 2}}, "got both; leave one out"), ({"load": {"concurrency": []}}, "a load is needed"),
        ({"system": {"engine_law": "nothing"}}, "unknown engine law 'nothing'"),
        ({"sweep": {"server.max_seqs": [1]}}, "unknown key server.max_seqs"),
        ({"sweep": {"servers.max_num_seqs": [1]}}, "unknown path 'servers.max_num_seqs'"),
        ({"sweep": {"server.max_num_seqs": 3}}, "must be a list of at least one value, got 3"),
        ({"sweep": {f"server.{key}": [*range(1, 60)] for key in ("max_num_seqs", "block_size")}}, "at most 1,000 combinations"),
        ({"server": {"max_num_batched_tokens": 1, "policies": ["static:3"]}}, "must be at least 4, one verification of policy"),
        ({"scenario": {"replications": -1}}, "replications must be"), ({"load": {"requests": 3}}, "requests must be"),
        ({"load": {"prompt": math.inf}}, "load.prompt must be a finite number"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=said):
        serving_run.run(load_scenario.resolve(tables(**changes)), out=tmp_path / "run", jobs=1)
    assert not (tmp_path / "run" / "shards").exists()


def test_options_of_other_scenarios_are_refused() -> None:
    for words, option in ((["--view", "events"], "--view"), (["--columns", "all"], "--columns")):
        done = CliRunner().invoke(app, ["run", "serving-azure", *words])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"error: {option} is not for a scenario with [load], which simulates a server; leave it out\n"
    with pytest.raises(ParameterError, match="unknown input 'rates'; did you mean rate"):
        sim.serve(rates=3)


def test_drafts_stop_paying_where_the_closed_form_says_with_an_interval() -> None:
    wide = study.serve(load_scenario.inputs_of(tables(server={"max_num_seqs": 1024})))
    off = wide.off_from
    assert off.running is not None
    assert off.running_low is not None
    assert off.running_low <= off.running <= (off.running_high or math.inf)
    assert f"a server without the draft is faster from about {off.running:.0f} running sequences on (80 % " in wide.verdict
    lengths = (0, 1.0), (1, 1.60587738)
    forms = [draft_schedules.ClosedForm(wide_prices(wide), length, each, each, wide.workload) for each, length in lengths]
    plain, one = (form.at_concurrency(off.running).output_tokens_per_s for form in forms)
    assert plain >= one
    plain, one = (form.at_concurrency(off.running - 1).output_tokens_per_s for form in forms)
    assert one > plain
    assert off.rate == pytest.approx(forms[0].at_concurrency(off.running).requests_per_s)
    few = study.serve(load_scenario.inputs_of(tables(server={"max_num_seqs": 8})))
    assert few.off_from.running is None
    assert "drafts pay with up to 8 running sequences" in few.verdict
    assert study.serve(load_scenario.inputs_of(tables(server={"policies": ["off"]}))).off_from == draft_schedules.NOWHERE


def wide_prices(found: study_results.Study) -> Any:
    return study.LawPrices(found.situation.law)


def test_a_run_is_drawn_and_reported(tmp_path: Path) -> None:
    given = tables(sweep={"server.max_num_seqs": [4, 8]})
    (tmp_path / "s.toml").write_text(scenario_toml.text_of(given))
    where = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", str(tmp_path / "s.toml"), "-q", "-j", "1", "-o", str(where)])
    assert done.exit_code == 0, done.output
    names = {f"point_{point}_{name}.svg" for point in (0, 1) for name in ("frontier", "switch_off", "over_time")}
    assert {path.name for path in (where / "figures").glob("*.svg")} == names
    drawn = {path.name: path.read_bytes() for path in (where / "figures").iterdir()}
    assert CliRunner().invoke(app, ["plot", str(where)]).exit_code == 0
    assert {path.name: path.read_bytes() for path in (where / "figures").iterdir()} == drawn
    for name in ("r.md", "r.html"):
        done = CliRunner().invoke(app, ["report", str(where), "-o", str(tmp_path / name)])
        assert (done.exit_code, done.stderr) == (0, "")
    page = (tmp_path / "r.md").read_text()
    stored = json.loads((where / "serving.json").read_text())
    assert stored["points"][1]["verdict"] in page
    for row in stored["table"]:
        assert f"| {row['concurrency']} clients |" in page
        assert f"{row['mean_itl_ms']:.4g}" in page
    assert "= 8: when to switch drafting off" in page
    assert "vllm serve" in page
    assert page.count("![") == 6
    (where / "serving.json").unlink()
    about = json.loads((where / "metadata.json").read_text()) | {"complete": False}
    (where / "metadata.json").write_text(json.dumps(about))
    done = CliRunner().invoke(app, ["report", str(where), "-o", str(tmp_path / "x.md")])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not finished; resume it" in done.stderr


def test_reports_show_goodput_under_objectives_and_no_unknown_device(tmp_path: Path) -> None:
    words = ["--concurrency", "2", "--requests", "40", "--replications", "2", "--slo-tpot", "1s", "--policy", "off"]
    done = CliRunner().invoke(app, ["serve", "--engine-law", LAW, *words, "-o", str(tmp_path / "load")])
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "load.json").read_text())["table"]
    assert CliRunner().invoke(app, ["report", str(tmp_path / "load.json"), "-o", str(tmp_path / "r.md")]).exit_code == 0
    page = (tmp_path / "r.md").read_text()
    assert page.startswith("# Under load: qwen3-235b-a22b\n")  # the law does not name its device
    ends = [row[f"requests_per_s_within_slo{end}"] for end in ("", "_low", "_high")]
    assert f"| {ends[0]:.4g} | {ends[1]:,.4g} to {ends[2]:,.4g} |" in page
    assert "within objectives" in page
    assert "Warning: the queue grows." not in page


def test_a_study_is_written_with_its_figures_and_reported(tmp_path: Path) -> None:
    words = ["serve", "--engine-law", LAW, "--concurrency", "2,4", "--requests", "30", "--output", "16", "--replications", "1"]
    done = CliRunner().invoke(app, [*words, "--policy", "off", "--policy", "schedule", "-o", str(tmp_path / "load"),
                                    "--perfetto", str(tmp_path / "steps.json")])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "steps.json", "load.json", "load_frontier.svg", "load_switch_off.svg", "load_over_time.svg",
    }  # fmt: skip
    assert json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    document = json.loads((tmp_path / "load.json").read_text())
    jsonschema.validate(document, serving_schema.of_output())
    done = CliRunner().invoke(app, ["report", str(tmp_path / "load.json"), "-o", str(tmp_path / "load.md")])
    assert (done.exit_code, done.stderr) == (0, "")
    assert document["verdict"] in (tmp_path / "load.md").read_text()


def test_a_trace_has_each_step_and_request(tmp_path: Path) -> None:
    found = study.plan(load_scenario.inputs_of(tables(load={"concurrency": [3, 5]}, server={"replicas": 2})))
    log = found.recorded(RunOf(0, 1, 0), server_trace.StepLog)
    assert len(log.steps) == log.totals.steps
    events = server_trace.chrome_trace({"a": log})["traceEvents"]
    steps = [each for each in events if each["ph"] == "X"]
    assert len(steps) == log.totals.steps
    assert sum(each["args"]["emitted"] for each in steps) == 40 * 24
    assert sum(each["dur"] for each in steps) / 1e6 == pytest.approx(log.totals.busy, abs=1e-9 * len(steps))
    for track in (1, 2):  # replicas: their steps do not overlap
        own = sorted((each["ts"], each["dur"]) for each in steps if each["tid"] == track)
        assert own
        assert all(start + length <= later + 1e-6 for (start, length), (later, _) in pairwise(own))
    for number in range(40):
        begins, ends = ([each["ts"] for each in events if each["ph"] == kind and each.get("id") == number] for kind in "be")
        assert begins[1:] == ends[:-1]
        assert ends[-1] / 1e6 == pytest.approx(log.end[number], abs=1e-9)
        assert begins[0] / 1e6 == pytest.approx(log.arrival[number], abs=1e-9)
    (tmp_path / "s.toml").write_text(scenario_toml.text_of(tables()))
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "s.toml"), "-o", str(tmp_path / "t.json.gz")])
    assert done.exit_code == 0, done.output
    traced = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert {each["args"]["name"] for each in traced["traceEvents"] if each["name"] == "process_name"} == {
        "2 clients, off", "2 clients, static:2",
    }  # fmt: skip
    for words, message in ((["-o", "t.png"], "got 't.png'"), (["-o", "t.json", "--point", "1"], "point must be")):
        done = CliRunner().invoke(app, ["trace", str(tmp_path / "s.toml"), *words])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr


def test_a_long_trace_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_trace, "MOST_STEPS", 7)
    found = study.plan(load_scenario.inputs_of(tables())).traced()
    assert sum(each["ph"] == "X" for each in found["traceEvents"]) == 14
    assert found["otherData"]["cut"] == "the first 7 steps of 2 clients, off, 2 clients, static:2"


def test_the_schedule_is_a_policy() -> None:
    """It follows the closed form's ranges: as the same ranges given by hand."""
    own = study.serve(load_scenario.inputs_of(tables(server={"policies": ["schedule"]})))
    ranges = json.dumps([[*each] for each in own.ranges])
    by_hand = study.serve(load_scenario.inputs_of(tables(server={"policies": [f"vllm:{ranges}"]})))
    assert own.points[0].figures == by_hand.points[0].figures
    assert max(each.draft_length for each in own.ranges) > 0


def test_a_switch_of_the_schedule_wins_more_than_a_tie() -> None:
    """Hysteresis over running sequences: a length is kept where others are faster by less than 2 %, and only there."""
    found = study.plan(load_scenario.inputs_of(tables(server={"max_num_seqs": 256})))
    forms, last, kept = found.schedules._forms(found.workload), None, 0
    for row in found.rows:
        speeds = [form.at_concurrency(row.running).output_tokens_per_s for form in forms]
        if last is not None:
            gain = max(speeds) / speeds[last] - 1
            assert (row.draft_length != last) == (gain >= 0.02), row
            kept += 0 < gain < 0.02
        last = row.draft_length
    assert kept


def test_more_requests_are_sent_where_more_run() -> None:
    def count(rate: float, **more: Any) -> int:
        load = {"concurrency": [], "rate": [rate], "prompt": 64.0, "output": 24.0, "requests": None}
        found = study.plan(load_scenario.inputs_of(tables(load=load, **more)))
        return found.count(found.loads[0])

    assert count(0.1) == study.REQUESTS
    assert count(1e4) == study.PER_CLIENT * 256
    assert count(1e4, server={"max_num_seqs": 64, "replicas": 2}) == study.PER_CLIENT * 128
    assert study.REQUESTS < count(60.0) < study.PER_CLIENT * 256


def test_a_closed_form_that_leaves_something_out_is_noted() -> None:
    """Requests of one length end together, and their prompts wait for each other; with other lengths less so."""
    load = {"concurrency": [64], "prompt": 512.0, "output": 128.0, "requests": 1000}
    together = study.serve(load_scenario.inputs_of(tables(load=load, scenario={"replications": 0})))
    apart = study.serve(load_scenario.inputs_of(tables(load=load | {"output_cv": 0.7}, scenario={"replications": 0})))
    assert any("of the closed form's tokens per second" in note for note in together.notes)
    assert not any("of the closed form's tokens per second" in note for note in apart.notes)


def test_progress_says_requests_and_simulated_time() -> None:
    said: list[str] = []
    study.serve(load_scenario.inputs_of(tables(load={"requests": 250}, scenario={"replications": 0})), said.append)
    assert any(re.fullmatch(r"2 clients, off \(run 1 of 4\): \d+ of 250 requests, [\d,]+ s simulated", each) for each in said)


def test_progress_of_a_run_counts_requests_and_simulated_time(tmp_path: Path) -> None:
    """Runs in this process tell their part while they are at work; runs that are resumed count from the beginning."""
    said: list[tuple[float, int, str]] = []
    given = tables(load={"requests": 250}, scenario={"replications": 0})
    serving_run.run(given, out=tmp_path / "run", jobs=1, progress=lambda *of: said.append(of))
    done, total, about = zip(*said, strict=True)
    assert list(done) == sorted(done)
    assert {*total} == {4}
    assert any(0 < each < 1 for each in done)
    assert (done[-1], about[-1].split(" requests")[0]) == (4, "1,000 of 1,000")
    assert re.fullmatch(r"[\d,]+ of 1,000 requests, [\d,]+ s simulated", about[0])
    seconds = [int(re.findall(r"([\d,]+) s", each)[0].replace(",", "")) for each in about]
    assert seconds == sorted(seconds)
    again: list[tuple[float, int, str]] = []
    next((tmp_path / "run" / "shards").glob("000003-*")).unlink()
    serving_run.run(given, out=tmp_path / "run", jobs=1, resume=True, progress=lambda *of: again.append(of))
    assert again[-1] == said[-1]
    assert again[0][0] > 3


METHODS = [
    'self-speculative:{"exit_layer":2,"draft_length":3,"acceptance":0.8,"layers":8}',
    'self-speculative:{"exit_layer":8,"draft_length":2,"acceptance":"0.5..0.7","layers":8,"reuse":false,"skipped_layers":4}',
    'ngram:{"draft_length":4,"hit_rate":[0.2,0.6],"acceptance":0.6}', 'early-exit:{"exit_layer":6,"layers":8}',
    'skipdecode:{"min_layers":4,"layers":8}',
]  # fmt: skip
LLAMA = {"system": {"engine_law": None, "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm"}}


def with_methods(*policies: str, **changes: Any) -> study_results.Study:
    own = [each.replace(',"layers":8', "").replace('"exit_layer":8', '"exit_layer":32') for each in policies]
    return study.serve(load_scenario.inputs_of(tables(server={"policies": own}, **LLAMA, **changes)))


def test_methods_are_served_side_by_side() -> None:
    found = with_methods("off", *METHODS)
    off, own, again, ngram, early, skipping = found.at(found.loads[0])
    assert [each.figures["mean_draft_length"] for each in (off, own, again, early, skipping)] == [0, 3, 2, 0, 0]
    assert 0 < ngram.figures["mean_draft_length"] < 4
    assert [row["exact"] for row in found.rows[:6]] == [True] * 4 + [False] * 2
    assert found.best(found.loads[0]) in (off, own, again, ngram)
    assert any(note.startswith("lossy: ") for note in found.notes)
    # A quarter fewer layers save less than a quarter of a token's time: logits and the step's overhead stay.
    saved = 1 - early.figures["mean_tpot_ms"] / off.figures["mean_tpot_ms"]
    exits = with_methods("off", 'early-exit:{"exit_layer":24}')
    quarter = 1 - exits.points[1].figures["mean_tpot_ms"] / exits.points[0].figures["mean_tpot_ms"]
    assert 0.1 < quarter < 0.25
    assert saved > quarter
    text = str(found)
    assert "ngram:4,[0.2,0.6],0.6: ngram:" in text


CHAINS = (
    'ngram:{"draft_length":6,"hit_rate":0.6,"acceptance":0.4',
    'self-speculative:{"exit_layer":4,"draft_length":6,"acceptance":0.6',
)


@pytest.mark.parametrize("chain", CHAINS)
def test_policies_choose_the_draft_lengths_of_any_chain(chain: str) -> None:
    """A schedule of one length is that length, one of none is plain decoding, and a choice is between."""
    chosen = ("vllm:[[1,512,6]]", "vllm:[[1,512,0]]", "goodput", "oracle")
    names = ["off", chain + "}", *(f'{chain},"policy":"{each}"}}' for each in chosen)]
    load = {"concurrency": [128], "requests": 256, "prompt": 64.0, "output": 48.0, "output_cv": 0.5}
    given = tables(server={"policies": names}, load=load, scenario={"replications": 0}, **LLAMA)
    found = study.serve(load_scenario.inputs_of(given))
    off, fixed, same, none, goodput, oracle = (each.figures for each in found.points)
    assert same == fixed
    assert none == off
    assert fixed["mean_draft_length"] > goodput["mean_draft_length"] > 0
    assert goodput["output_tokens_per_s"] > off["output_tokens_per_s"]
    assert oracle["output_tokens_per_s"] >= goodput["output_tokens_per_s"]


def test_a_policy_prices_draft_passes_by_the_layers_that_they_run() -> None:
    """Where draft passes run nearly all layers, drafting does not pay, however cheap the draft of the server is."""
    whole = 'self-speculative:{"exit_layer":31,"draft_length":4,"acceptance":0.9,"reuse":false,"policy":"goodput"}'
    given = tables(server={"policies": [whole]}, load={"concurrency": [4]}, scenario={"replications": 0}, **LLAMA)
    (point,) = study.serve(load_scenario.inputs_of(given)).points
    assert point.figures["mean_draft_length"] == 0


def test_all_layers_are_plain_decoding() -> None:
    whole = with_methods("off", 'early-exit:{"exit_layer":32}', 'skipdecode:{"min_layers":32}')
    off, early, skipping = whole.at(whole.loads[1])
    assert early.figures == off.figures == skipping.figures


def test_a_round_of_self_speculation_takes_its_layers_once() -> None:
    """One sequence, every draft accepted: K + 1 passes of the first layers and one of the others, in one step."""
    found = study.plan(load_scenario.inputs_of(tables(server={"policies": ["off"]}, **LLAMA)))
    prices, share = found.prices, 8 / 32
    tokens = RaggedPass(1, 4, 600, True, shares=(LayerShare(share, 0, 0),))
    taken = 4 * prices.own_layers(share, 1, 600) + prices.target(tokens)
    coefficients = {name: prices.law.coefficients[name] for name in ("step", "sequence", "round", "draft_pass")}
    one, four = (prices.target(RaggedPass(1, each, 600, each > 1)) for each in (1, 4))
    added = coefficients["step"] + coefficients["sequence"]
    body, wide = one - added, four - added - coefficients["round"]
    early = prices.logits + (1 - prices.logits) * share
    late = prices.logits + (1 - prices.logits) * (1 - share)
    assert 0.03 < prices.logits < 0.15  # 128,256 words of 4,096 in 8 billion parameters
    expected = added + coefficients["round"] + 4 * (early * body + coefficients["draft_pass"]) + late * wide
    assert taken == pytest.approx(expected)


@pytest.mark.parametrize(
    ("policy", "message"),
    [("early-exit", "must have its settings as JSON"),
     ('ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6,"policy":"static:3"}',
      "ngram.policy must be vllm:"),
     ('ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6,"policy":"goodput:5"}',
      "at most draft_length=4 tokens, got 'goodput:5'"),
     ('ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6,"policy":"vllm:[[2,3,1]]"}',
      "range 1 of a schedule must begin at 1"),
     ('ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6,"policy":7}',
      "ngram.policy must be vllm:"),
     ('skipdecode:{"min_layers":16,"longest_output":"x"}', "longest_output must be a whole number, got 'x'"),
     ('early-exit:{"exit_layer":8,"layers":0}', "early-exit.layers must be at least 1, got 0"),
     ("early-exit:{}", "early-exit.exit_layer is required"),
     ('early-exit:{"exit_layer":40}', "exit_layer must be between 1 and layers=32, got 40"),
     ('ngram:{"draft_length":4,"hit_rate":[0.1,0.2,0.3],"acceptance":0.6}', "hit_rate must be a number, or two"),
     ('ngram:{"draft_length":4,"hit_rate":0.1}', "ngram.acceptance is required and has no default"),
     ('self-speculative:{"exit_layer":8,"draft_length":0,"acceptance":0.5}', "draft_length must be between 1 and"),
     ('skipdecode:{"min_layers":16,"longest_output":0}', "longest_output must be at least"),
     ('early-exit:{"exit_layer":4,"layers":16}', "early-exit.layers must be 32"),
     ('early-exit:{"exit_layr":4}', "unknown key early-exit.exit_layr")],
)  # fmt: skip
def test_settings_of_methods_are_refused_in_a_line(policy: str, message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)) as error:
        study.plan(load_scenario.inputs_of(tables(server={"policies": [policy]}, **LLAMA)))
    assert len(str(error.value).splitlines()) == 1


def test_a_method_needs_the_depth_of_the_model() -> None:
    own = served_methods.settings_of("early-exit", '{"exit_layer":4}', "")
    with pytest.raises(ParameterError, match="needs the layers of the model"):
        served_methods.served("early-exit", own, None, 8, 0)
    own = served_methods.settings_of("early-exit", '{"exit_layer":4,"layers":6}', "")
    assert served_methods.served("early-exit", own, None, 8, 0).layers[1] == 6  # type: ignore[index]


def test_a_file_on_an_axis_is_part_of_the_scenario(tmp_path: Path) -> None:
    """It is found from the scenario's folder, and results of its old content are not taken for those of the new one."""
    (tmp_path / "a.csv").write_text("arrival_s,prompt_len,output_len\n" + "".join(f"{each},32,8\n" for each in range(20)))
    own = tables(load={"concurrency": [], "requests": None, "prompt": None, "output": None}, sweep={"load.trace": ["a.csv"]})
    own["load"] = {}
    (tmp_path / "s.toml").write_text(scenario_toml.text_of(own))
    where = tmp_path / "run"
    serving_run.run(load_scenario.resolve(tmp_path / "s.toml"), out=where, jobs=1)
    before = load_scenario.fingerprint(load_scenario.resolve(tmp_path / "s.toml"))
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("32,8", "32,9"))
    assert load_scenario.fingerprint(load_scenario.resolve(tmp_path / "s.toml")) != before
    with pytest.raises(ParameterError, match="holds the run of another scenario"):
        serving_run.run(load_scenario.resolve(tmp_path / "s.toml"), out=where, jobs=1, resume=True)


def test_axes_of_lists_and_of_ranges(tmp_path: Path) -> None:
    given = tables(sweep={"server.policies": [["off"], ["static:1", "static:2"]], "load.concurrency": [[1, 2], 3]})
    made = serving_run.run(given, out=tmp_path / "run", jobs=1)
    assert made.table["server.policies"].unique(maintain_order=True).to_list() == ['["off"]', '["static:1", "static:2"]']
    assert made.table["load.concurrency"].unique(maintain_order=True).to_list() == ["[1, 2]", "3"]
    assert made.table.height == 3 + 6
    spaced = load_scenario.resolve(tables(), sweep=[("load.prompt", {"from": 16, "to": 64, "count": 4})])
    assert [at["load.prompt"] for at, _ in load_scenario.points(spaced)] == [16, 32, 48, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"load": {"concurrency": [], "rate": [1.0], "burstiness": -3.0}}, "burstiness must be"),
     ({"server": {"num_blocks": 2}}, "num_blocks must be at least"),
     ({"scenario": {"name": "../evil"}}, "name must be 1 to 64 letters"),
     ({"scenario": {"name": "x" * 300}}, "name must be 1 to 64 letters"), ({"scenario": {"name": ""}}, "name must be 1 to 64")],
)  # fmt: skip
def test_what_a_run_would_refuse_is_refused_by_lint(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "s.toml").write_text(scenario_toml.text_of(tables(**changes)))
    for words in (["lint"], ["run", "--dry-run"]):
        done = CliRunner().invoke(app, [words[0], str(tmp_path / "s.toml"), *words[1:]])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr


def test_lines_name_the_draft_of_the_law() -> None:
    found = study.serve(load_scenario.inputs_of(tables()))
    assert '"method": "draft_model"' not in " ".join(found.lines("vllm"))
    assert "EAGLE" in " ".join(found.lines("sglang"))
