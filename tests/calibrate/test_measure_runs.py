"""Timed runs: forced outcomes, interleaved repeats, files, and warnings about doubtful times."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import real_decoding
from calibrate.devices import machine
from calibrate.interpreters.in_one_process import RunTimes
from calibrate.measured_runs import measure_runs, run_plan
from calibrate.measured_runs.interleaved_profiles import Passes
from calibrate.measured_runs.measure_runs import MeasurementPlan, PlannedDecoding
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.interpret.interpreter import count
from model.logs import forced_outcomes, measured_runs
from model.logs.measured_runs import MeasuredRuns
from model.logs.recorded_decoding import Decoding
from model.logs.replay import changed_settings
from model.methods import registry
from tests.support import real_models
from tests.support.fake_clocks import install_fake_time
from tests.support.real_models import DEPTHS

LAYERS = DEPTHS["target"]
DRAFTED = {"draft_layers": DEPTHS["draft"]}
CHOICES: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("autoregressive", {}, {}),
    ("ppd", {"exit_layer": 3, "candidates": 2}, {"match_rate": 0.6}),
    ("ppd", {"exit_layer": 2, "candidates": 1, "form": "flat"}, {"match_rate": 0.5}),
    ("speculative", {"draft_length": 3}, {"acceptance_rate": 0.7}),
    ("adaptive", {"policy": "heuristic"}, {"acceptance_rate": 0.7}),
    ("hierarchical", {"draft_length": 2}, {"acceptance_rate": 0.7, "medium_acceptance_rate": 0.5}),
    ("beam", {"draft_length": 2, "beams": 2}, {"acceptance_rate": 0.7}),
    ("bild", {}, {"fallback_rate": 0.3, "rollback_rate": 0.2}),
    ("skipdecode", {"min_layers": 2, "max_layers": 4}, {}),
    ("early_exit", {"first_check": 2}, {"exit_rate": 0.4}),
    ("early_exit", {"exit_layer": 3}, {}),
]
NAMES = [f"{name} {' '.join(map(str, table.values()))}".strip() for name, table, _ in CHOICES]


def wanted(name: str, table: dict[str, Any], rates: dict[str, float], **more: Any) -> PlannedDecoding:
    return PlannedDecoding(name, table, tuple(range(4)), "four tokens", rates, **more)


def models_of(name: str, table: dict[str, Any], kind: str = "llama") -> dict[str, Any]:
    return real_models.decoders(kind, *real_decoding.roles(name, table)[1:])


pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


# --- Forced outcomes ---


@pytest.mark.parametrize(("name", "table", "rates"), CHOICES, ids=NAMES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_forced_decodings_make_the_passes_of_the_simulation(
    name: str, table: dict[str, Any], rates: dict[str, float], kind: str
) -> None:
    """The simulation with the same outcomes, without tensors, makes the same commits and passes."""
    models, each = models_of(name, table, kind), wanted(name, table, rates, replication=3)
    found = measure_runs.decode(each, models, 9, 1, log=True)
    parameters = real_decoding.parameters_of(name, models, real_decoding.scheduled(name, table, 4, 9))
    world = forced_outcomes.world(parameters, 4, 9, rates, seed=1, replication=3)
    work = count(registry.algorithm(name).decode(parameters, tuple(range(4)), 9), world, 9)
    assert tuple(work.committed) == found.commits
    assert work.account.passes_by_kind == found.account.passes_by_kind


@pytest.mark.parametrize(("name", "table", "rate", "kind"), [
    ("ppd", {"exit_layer": 3, "candidates": 2}, "match_rate", "match"),
    ("speculative", {"draft_length": 3}, "acceptance_rate", "round"),
])  # fmt: skip
def test_rates_of_one_and_zero_are_deterministic(name: str, table: dict[str, Any], rate: str, kind: str) -> None:
    models = models_of(name, table)
    for value in (0.0, 1.0):
        found = measure_runs.decode(wanted(name, table, {rate: value}), models, 8, 0)
        if name == "ppd":
            assert {each.kind for each in found.commits} == {"match" if value else "miss"}
        else:
            assert {len(each.tokens) for each in found.commits} == ({4} if value else {1})


@given(rate=st.floats(0, 1), seed=st.integers(0, 3), replication=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_higher_rate_never_loses_a_match(rate: float, seed: int, replication: int) -> None:
    """All rates use the same random draws."""
    parameters = registry.algorithm("ppd").Parameters(layers=4, exit_layer=2, candidates=1)
    low, high = (
        forced_outcomes.world(parameters, 1, 40, {"match_rate": each}, seed=seed, replication=replication).matches
        for each in (rate, min(1.0, rate + 0.1))
    )
    assert all(not one or other for one, other in zip(low, high, strict=True))


@pytest.mark.parametrize(("name", "table", "rates", "said"), [
    ("autoregressive", {}, {"match_rate": 0.5}, "match_rate is not an outcome of method autoregressive"),
    ("speculative", {"draft_length": 2}, {}, "acceptance_rate is required"),
    ("speculative", {"draft_length": 2}, {"acceptance_rate": 1.2}, "acceptance_rate must be"),
    ("bild", {}, {"fallback_rate": 0.2}, "rollback_rate is required"),
    ("early_exit", {"exit_layer": 3}, {"exit_rate": 0.2}, "it has no random outcomes"),
    ("adaptive", {"policy": "confidence", "confidence_threshold": 0.5}, {"acceptance_rate": 0.5}, "confidence cannot be forced"),
])  # fmt: skip
def test_rates_of_outcomes_unknown_to_the_method_are_refused(
    name: str, table: dict[str, Any], rates: dict[str, float], said: str
) -> None:
    with pytest.raises(ParameterError, match=said):
        measure_runs.check(MeasurementPlan([wanted(name, table, rates)], 8), models_of(name, table))


@pytest.mark.parametrize(("name", "table", "rates"), [
    ("skipdecode", {"min_layers": LAYERS, "max_layers": LAYERS}, {}),
    ("skipdecode", {"min_layers": 2, "max_layers": 4}, {}),
    ("early_exit", {"first_check": 2}, {"exit_rate": 0.4}),
])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_forced_batch_makes_the_passes_of_the_simulation(
    name: str, table: dict[str, Any], rates: dict[str, float], batch: int
) -> None:
    models, said = models_of(name, table), table | {"sequences": batch, "batching": "static"}
    measure_runs.check(MeasurementPlan([wanted(name, said, rates)], 9), models)
    found = measure_runs.decode(wanted(name, said, rates), models, 9, 1, log=True)
    parameters = registry.algorithm(name).Parameters(**found.settings)
    world = forced_outcomes.world(parameters, 4, 9, rates, seed=1)
    work = count(registry.algorithm(name).decode(parameters, tuple(range(4)), 9), world, 9 * batch)
    assert tuple(work.committed) == found.commits
    assert work.account.passes_by_kind == found.account.passes_by_kind
    # All sequences generate the same tokens, each position `batch` times.
    assert found.tokens == tuple(token for token in range(4, 13) for _ in range(batch))


def test_real_models_decode_one_sequence_at_a_time() -> None:
    table = {"min_layers": 2, "max_layers": 4, "sequences": 2, "batching": "static"}
    models = models_of("skipdecode", table)
    with pytest.raises(ParameterError, match="sequences must be 1"):
        measure_runs.check(MeasurementPlan([PlannedDecoding("skipdecode", table, (1, 2), "two tokens")], 8), models)
    with pytest.raises(ParameterError, match="sequences must be 1"):
        real_decoding.decode("skipdecode", models, (1, 2), 8, table)


# --- Times ---


def test_times_sum_to_the_total() -> None:
    times, models = RunTimes(), models_of("speculative", {"draft_length": 2})
    found = real_decoding.decode("speculative", models, [1, 2, 3], 8, {"draft_length": 2}, times=times)
    assert found.seconds is not None
    assert len(times.commits) == len(found.commits)
    assert times.commits == sorted(times.commits)
    assert times.commits[-1] <= found.seconds
    assert set(times.passes) == {"target", "draft"}
    assert min(*times.passes.values(), times.reads) > 0
    assert sum(times.passes.values()) + times.reads <= found.seconds


# --- Plans ---


def test_no_garbage_collection_during_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (made, models) = [], plan(1)
    decode = measure_runs.decode
    monkeypatch.setattr(measure_runs, "decode", lambda *given, **more: (seen.append(gc.isenabled()), decode(*given, **more))[1])
    measure_runs.timed(made.decodings[0], models, made.tokens, made.seed)
    assert (seen, gc.isenabled()) == ([False], True)


def test_runs_of_another_seed_are_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, models = plan(2)
    keep, timed = iter([True, True]), measure_runs.timed

    def once(*given: Any, **more: Any) -> Any:
        if next(keep, None) is None:
            raise KeyboardInterrupt
        return timed(*given, **more)

    monkeypatch.setattr(measure_runs, "timed", once)
    with pytest.raises(KeyboardInterrupt):
        measure_runs.measure(tmp_path / "runs.json", made, models)
    monkeypatch.setattr(measure_runs, "timed", timed)
    with pytest.raises(ParameterError, match="seed"):
        measure_runs.measure(tmp_path / "runs.json", dataclasses.replace(made, seed=made.seed + 1), models, resume=True)


def plan(repeats: int = 3, **more: Any) -> tuple[MeasurementPlan, dict[str, Any]]:
    prompts = [("one", (1, 2, 3)), ("two", (4, 5, 6, 7))]
    each = [PlannedDecoding("speculative", {"draft_length": gamma}, prompt, name) for gamma in (1, 3) for name, prompt in prompts]
    return MeasurementPlan(each, 5, repeats, **more), models_of("speculative", {"draft_length": 1})


def measured(folder: Path, **more: Any) -> MeasuredRuns:
    """Time the plan into a folder."""
    wanted_, models = plan(**more)
    return measure_runs.measure(folder / "runs.json", wanted_, models)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MeasuredRuns]:
    """Three repeats of the plan, run once: their folder, and the runs."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        install_fake_time(patch)
        return folder, measured(folder)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with seven rows of the plan, interrupted after them."""
    folder, (wanted_, models) = tmp_path_factory.mktemp("interrupted"), plan()
    timed, left = measure_runs.timed, iter(range(7))

    def broken(*given_: Any) -> dict[str, Any]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return timed(*given_)

    with pytest.MonkeyPatch.context() as patch:
        install_fake_time(patch)
        patch.setattr(measure_runs, "timed", broken)
        with pytest.raises(KeyboardInterrupt):
            measure_runs.measure(folder / "runs.json", wanted_, models)
    return folder


@pytest.fixture
def there(interrupted: Path, tmp_path: Path) -> Path:
    """Copy the interrupted run."""
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_repeats_are_interleaved_and_complete(finished: tuple[Path, MeasuredRuns]) -> None:
    _, found = finished
    assert sorted(found.table.select("decoding", "repeat").rows()) == [(each, turn) for each in range(4) for turn in range(3)]
    orders = [found.table.sort("run_order").filter(pl.col("repeat") == turn)["decoding"].to_list() for turn in range(3)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert sorted(found.table["run_order"]) == [*range(12)]


def test_saved_runs_are_loaded_unchanged(finished: tuple[Path, MeasuredRuns]) -> None:
    folder, found = finished
    again = measured_runs.load(folder / "runs.json")
    assert again.table.equals(found.table.select(*measured_runs.UNITS))
    assert [each.tokens for each in again.log.decodings] == [each.tokens for each in found.log.decodings]
    assert [changed_settings(each) for each in again.log.decodings] == ["draft_length=1"] * 2 + ["draft_length=3"] * 2
    assert json.loads(json.dumps(dict(again.about))) == json.loads(json.dumps(dict(found.about)))
    names = sorted(each.name for each in folder.iterdir())
    assert names == ["runs.json", "runs.parquet", "runs.reads.json", "runs.reads.parquet"]


@pytest.mark.parametrize(("repeats", "made", "rows"), [(1, 0, 7), (2, 1, 8), (3, 5, 12), (4, 9, 16)])
def test_resuming_with_fewer_or_more_repeats(
    repeats: int, made: int, rows: int, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven rows of three repeats of four decodings exist: they are always kept, and missing ones are run."""
    asked, models = plan()
    timed, calls = measure_runs.timed, [0]

    def counted(*given_: Any) -> dict[str, Any]:
        calls[0] += 1
        return timed(*given_)

    monkeypatch.setattr(measure_runs, "timed", counted)
    before = [json.loads(line)["seconds"] for line in (there / "runs.jsonl").read_text().splitlines()[1:]]
    assert len(before) == 7
    found = measure_runs.measure(there / "runs.json", dataclasses.replace(asked, repeats=repeats), models, resume=True)
    assert calls[0] == made
    assert found.table.height == rows
    assert {*before} <= {*found.table["seconds"]}
    assert measured_runs.load(there / "runs.json").table.height == rows
    assert min(each.repeats for each in found.timed.values()) == repeats


def test_an_interrupted_run_is_resumed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path, (asked, models) = there, plan()
    timed, left = measure_runs.timed, [0]

    def broken(*given_: Any) -> dict[str, Any]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return timed(*given_)

    monkeypatch.setattr(measure_runs, "timed", broken)
    kept = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(kept) == 8
    (tmp_path / "runs.jsonl").write_text("\n".join(kept)[:-5])  # truncated within a row, which is then timed again
    with pytest.raises(ParameterError, match="continue them with --resume"):
        measure_runs.measure(tmp_path / "runs.json", asked, models)
    other, _ = plan(seed=4)
    with pytest.raises(ParameterError, match="of another plan: seed differs"):
        measure_runs.measure(tmp_path / "runs.json", other, models, resume=True)
    left[0] = 6
    told: list[tuple[int, int]] = []
    found = measure_runs.measure(
        tmp_path / "runs.json", asked, models, resume=True, report=lambda place, total, _: told.append((place, total))
    )
    assert found.table.height == 12
    assert left[0] == 0
    # Of 4 untimed decodings and 3 repeats of each, 6 rows existed.
    assert told == [(place, 16) for place in (0, 1, 2, 3, *range(10, 16))]
    before = [json.loads(line)["seconds"] for line in kept[1:-1]]
    assert {*before} <= {*found.table["seconds"]}


def test_damaged_files_are_refused(finished: tuple[Path, MeasuredRuns], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs.json"
    whole = {each: each.read_bytes() for each in tmp_path.iterdir()}

    def restored() -> None:
        for each, content in whole.items():
            each.write_bytes(content)

    for name, said in (("runs.parquet", "sha256"), ("runs.reads.json", "read log"), ("runs.json", "JSON")):
        (tmp_path / name).write_bytes(whole[tmp_path / name][:-40])
        with pytest.raises(ParameterError, match=said):
            measured_runs.load(path)
        restored()
    missing = "is missing from the same folder"
    for name, said in (("runs.reads.json", missing), ("runs.reads.parquet", missing), ("runs.json", "no such")):
        (tmp_path / name).unlink()
        with pytest.raises(ParameterError, match=said):
            measured_runs.load(path)
        restored()
    held = json.loads(path.read_text())
    for change, said in (
        ({"schema_version": 9}, f"schema_version must be {measured_runs.VERSION}"),
        ({"more": 1}, "unknown key more"),
    ):
        path.write_text(json.dumps(held | change))
        with pytest.raises(ParameterError, match=said):
            measured_runs.load(path)
    path.write_text(json.dumps(held | {"about": {key: value for key, value in held["about"].items() if key != "dtype"}}))
    with pytest.raises(ParameterError, match=r"about\.dtype is missing"):
        measured_runs.load(path)


@pytest.mark.parametrize(("column", "values", "said"), [
    ("waited", [0.5] * 12, "heavy load"), ("waited", [0.0] * 12, ""),
])  # fmt: skip
def test_doubtful_times_have_warnings(finished: tuple[Path, MeasuredRuns], column: str, values: list[float], said: str) -> None:
    _, found = finished
    changed = MeasuredRuns(found.log, found.table.with_columns(pl.Series(column, values)), found.about)
    assert any(said in each for each in changed.warnings) if said else not changed.warnings
    few = MeasuredRuns(found.log, changed.table.filter(pl.col("repeat") < 2), found.about | {"warm_ups": 0})
    assert [each for each in few.warnings if "2 repeats" in each]
    assert [each for each in few.warnings if "no warm-up" in each]


def test_repeats_that_waited_are_excluded_if_enough_remain(tmp_path: Path) -> None:
    found = measured(tmp_path, repeats=5)
    table = found.table.with_columns(
        pl.when(pl.col("repeat") < 2).then(100.0).otherwise(pl.col("seconds")).alias("seconds"),
        pl.when(pl.col("repeat") < 2).then(0.9).otherwise(0.0).alias("waited"),
    )
    timed = MeasuredRuns(found.log, table, found.about).timed[0]
    assert timed.used_repeats.tolist() == [False, False, True, True, True]
    assert timed.median(prompt=True) < 100
    assert not timed.disturbed
    all_waited = MeasuredRuns(found.log, table.with_columns(pl.lit(0.9).alias("waited")), found.about).timed[0]
    assert all_waited.used_repeats.all()
    assert all_waited.disturbed


# --- Command line ---


def test_a_plan_has_all_combinations(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        '[[method]]\nname = "ppd"\nexit_layer = 6\nsweep = { candidates = [1, 3] }\nforced = { match_rate = [0.3, 0.7] }\n'
        '[[method]]\nname = "speculative"\nsweep = { num_speculative_tokens = [1, 2] }\n'
    )
    found = run_plan.read(tmp_path / "plan.toml").choices
    assert [(each.settings["candidates"], each.rates) for each in found[:4]] == [
        (k, {"match_rate": rate}) for k in (1, 3) for rate in (0.3, 0.7)
    ]
    assert [each.settings for each in found[4:]] == [{"draft_length": 1}, {"draft_length": 2}]


@pytest.mark.parametrize("unit_kind", [None, *measured_runs.UNIT_KINDS])
def test_a_plan_names_the_kind_of_units(unit_kind: str | None) -> None:
    table: dict[str, Any] = {"name": "ppd", "exit_layer": 6, "candidates": 1} | (
        {} if unit_kind is None else {"unit_kind": unit_kind}
    )
    [found] = run_plan.from_tables({"method": [table]}).choices
    assert found.unit_kind == unit_kind
    assert found.settings == {"exit_layer": 6, "candidates": 1}


@pytest.mark.parametrize(("more", "said"), [
    ({"processes": True}, "unknown key method.processes; known: .*candidates, exit_layer"),
    ({"unit_kind": "threads"}, "unknown unit_kind 'threads'; .*known: processes, streams"),
    ({"unit_kind": True}, "unknown unit_kind True; known: processes, streams"),
])  # fmt: skip
def test_a_plan_with_unknown_names_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        run_plan.from_tables({"method": [{"name": "ppd", "exit_layer": 6, "candidates": 1} | more]})


def test_the_default_unit_kind_of_files_is_processes(finished: tuple[Path, MeasuredRuns]) -> None:
    _, found = finished
    assert found.about["unit_kind"] == ["processes"] * 4
    old = {key: value for key, value in found.about.items() if key != "unit_kind"}
    for about, expected in ((old, "processes"), (old | {"unit_kind": ["streams"] * 4}, "streams")):
        assert {each.unit_kind for each in MeasuredRuns(found.log, found.table, about).timed.values()} == {expected}
    with pytest.raises(ParameterError, match="unit_kind must have one for each of 4 decodings, got 1"):
        MeasuredRuns(found.log, found.table, old | {"unit_kind": ["streams"]})
    with pytest.raises(ParameterError, match="unknown unit_kind 'cores'"):
        MeasuredRuns(found.log, found.table, old | {"unit_kind": ["cores"] * 4})


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def test_the_command_line_times_a_method(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    result = invoke("speculative", "--model", "family", "--sweep", "draft_length=1,2", "--limit", 1, "--tokens", 3, "--repeats", 2,
                    "--threads", 1, "--device", "cpu", "-o", out, "--json", "-q")  # fmt: skip
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [each["settings"]["draft_length"] for each in said["runs"]] == [1, 2]
    assert all(each["source"] == "measured" for each in said["runs"])
    assert measured_runs.load(out).table.height == 4


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "METHOD or --plan"),
    (["speculative", "--plan", "x.toml"], "got both"),
    (["--plan", "missing.toml"], "there is no missing.toml"),
    (["--plan", "missing.toml", "--set", "a=1"], "--set is used only with METHOD"),
    (["speculative", "--model", "llama-68m", "--draft", "llama-68m", "--set", "draft_length=2"], "a shape without weights"),
    (["ppd", "--set", "exit_layer=1", "--set", "candidates=1", "--model", "llama-68m", "--forced", "acceptance_rate=0.5"],
     "acceptance_rate is not an outcome"),
    (["speculative", "--set", "draft_length=2", "--draft", "no-such-model"], "no-such-model"),
    (["ppd", "--set", "exit_layer=99", "--set", "candidates=1"], "exit_layer must be"),
    (["autoregressive", "--repeats", "0"], "repeats must be"),
    (["ppd", "--set", "exit_layer=6", "--set", "candidates=1", "--unit-kind", "streams"],
     "device must be cuda for a run over streams, got 'cpu'"),
    (["ppd", "--set", "exit_layer=6", "--set", "candidates=1", "--unit-kind", "threads"], "unknown unit_kind 'threads'"),
    (["pearl", "--set", "draft_length=2", "--unit-kind", "streams"], "are for methods with one model, and pearl has target"),
    (["autoregressive", "--unit-kind", "processes"],
     "unit_kind is for methods that use several units, and autoregressive uses one"),
    (["--plan", "missing.toml", "--unit-kind", "streams"], "--unit-kind is used only with METHOD"),
    (["autoregressive", "--limit", "1", "--tokens", "100000"], "positions"),
])  # fmt: skip
def test_errors_are_one_line_and_leave_no_files(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = invoke(*arguments, "--device", "cpu", "--threads", "1", "-o", tmp_path / "runs.json")
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), ["--dtype", "bfloat16"]])
def test_a_shape_without_weights_is_decoded_with_forced_outcomes(more: list[str], tmp_path: Path) -> None:
    given_ = ["autoregressive", "--model", "llama-68m", "--tokens", 2, "--repeats", 1, "--threads", 1, "--device", "cpu"]
    result = invoke(*given_, "--forced", "none", *more, "-o", tmp_path / "runs.json", "-q")
    assert result.exit_code == 0, result.output
    assert measured_runs.load(tmp_path / "runs.json").about["forced"] == [{}]


def test_the_output_file_needs_a_name(tmp_path: Path) -> None:
    assert "NAME.json" in invoke("autoregressive", "-o", tmp_path / "runs.txt").output


# --- Content of files ---

FACTS = {"date": "2026-01-02", "python": "3.x", "torch": "2.x", "transformers": "4.x", "name": "a chip", "threads": 1, "sm_mhz": 9}


def test_a_row_has_the_times_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of time lost to other work is known for runs of a single process on the CPU."""
    told_: list[Any] = []

    def decode(*given_: Any, times: Any, spans: list[Any]) -> Any:
        told_.append(given_)
        times.commits += [0.5, 1.5]
        times.passes |= {"draft": 0.25, "target": 0.75}
        times.reads = 0.125
        spans.append({"unit": 1})
        clock.now += 1.0
        return dataclasses.replace(made, seconds=seconds)

    def asked(device: str, **more: Any) -> dict[str, Any]:
        models: Any = {"target": SimpleNamespace(device=torch.device(device)), "draft": SimpleNamespace(device=torch.device("cpu"))}
        row = measure_runs.timed(dataclasses.replace(of, **more), models, 5, 3, "pool", "lanes")  # type: ignore[arg-type]
        assert told_.pop() == (dataclasses.replace(of, **more), models, 5, 3, "pool", "lanes")
        return row

    clock = SimpleNamespace(now=0.0, thread_time=lambda: clock.now)
    made = Decoding("ppd", {}, (1,), 5, (), Account())
    of, seconds = PlannedDecoding("ppd", {}, (1,), "one"), 1.25
    monkeypatch.setattr(measure_runs, "time", clock)
    monkeypatch.setattr(measure_runs, "decode", decode)
    monkeypatch.setattr(measure_runs.os, "getloadavg", lambda: (1.234, 9.0, 9.0))
    row = {"units": 1, "seconds": 1.25, "commit_s": [0.5, 1.5], "pass_s": [0.75, 0.25, 0.0], "read_s": 0.125,
           "waited": pytest.approx(0.2), "load": 1.23, "spans": [{"unit": 1}]}  # fmt: skip
    assert asked("cpu") == row
    assert asked("cuda") == row | {"waited": 0.0}
    assert asked("cpu", units=2) == row | {"units": 2, "waited": 0.0}
    seconds = 0.5
    assert asked("cpu")["waited"] == 0.0  # clocks are less exact
    for error in (OSError, AttributeError):
        monkeypatch.setattr(measure_runs.os, "getloadavg", lambda error=error: (_ for _ in ()).throw(error))
        assert asked("cpu")["load"] is None
    gc.disable()
    try:
        asked("cpu")
        assert not gc.isenabled()  # unchanged
    finally:
        gc.enable()


class Noted:
    """Measurements in the same session, recorded."""

    def __init__(self, said: list[Any]) -> None:
        self.begin = lambda turn: said.append(("begin", turn))
        self.between = lambda share, pool=None: said.append(("between", share, pool))
        self.end = lambda: said.append("end")


def test_order_of_measurements_and_content_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoding once with a log; in each repeat first the session's measurements, then warm-ups per number of units, then
    each decoding once."""
    said: list[Any] = []
    monkeypatch.setattr(machine, "facts", lambda device: FACTS | {"of": device})
    whole, models = real_decoding.decode, real_models.decoders("llama", "draft", dtype="float32")

    def decode(method: str, own: Any, prompt: Any, tokens: int, settings_: Any, **more: Any) -> Any:
        said.append((prompt, "log" in more, "times" in more, more["random_draws"].key, "answers" in more))
        assert more.get("pool") is None
        return whole(method, own, prompt, tokens, settings_, **more)

    monkeypatch.setattr(real_decoding, "decode", decode)
    rates = {"acceptance_rate": 0.7}
    three = [
        PlannedDecoding("speculative", {"draft_length": 1}, (1, 2, 3), "one"),
        PlannedDecoding("speculative", {"draft_length": 2}, (7, 8), "two", rates, 4),
        PlannedDecoding("autoregressive", {}, (4,), "three"),
    ]
    about = {"prompts": "some", "profiles": {"target": "a.json"}, "devices": ["cpu"]}
    made = MeasurementPlan(three, 3, 2, 1, 5, about)
    found = measure_runs.measure(
        tmp_path / "runs.json", made, models, session=Noted(said), report=lambda *what: said.append(what),  # type: ignore[arg-type]
        pool=lambda: contextlib.nullcontext(),
    )  # fmt: skip
    made_of = {0: ((1, 2, 3), (5, 0), False), 1: ((0, 1), (5, 4), True), 2: ((4,), (5, 0), False)}
    names = {0: "speculative (draft_length=1), one", 1: "speculative (draft_length=2, acceptance_rate=0.7), two",
             2: "autoregressive, three"}  # fmt: skip

    def run(number: int, log: bool = False, times: bool = False) -> tuple[Any, ...]:
        prompt, random_draws, forced_ = made_of[number]
        return prompt, log, times, random_draws, forced_

    expected: list[Any] = []
    for number in range(3):
        expected += [(number, 9, names[number]), run(number, log=True)]
    for turn in range(2):
        order = made.order(turn)
        expected += [("begin", turn), run(order[0])]
        for place, number in enumerate(order):
            expected += [(3 + 3 * turn + place, 9, names[number]), ("between", place / 3, None), run(number, times=True)]
        expected += [("between", 1.0, None), "end"]
    assert said == expected
    assert found.table["run_order"].to_list() == [
        turn * 3 + made.order(turn).index(number) for number in range(3) for turn in range(2)
    ]
    sizes = {"target": LAYERS, "draft": DEPTHS["draft"]}
    versions = {"python": "3.x", "torch": "2.x", "transformers": "4.x"}
    shapes = {role: found.about["shapes"][role]["layers"] for role in found.about["shapes"]}
    assert shapes == sizes
    assert {key: value for key, value in found.about.items() if key != "shapes"} == {
        "device": "cpu", "dtype": "float32", "threads": 1, "machine": {"name": "a chip", "threads": 1, "sm_mhz": 9, "of": "cpu"},
        "prompts": "some", "warm_ups": 1, "forced": [None, rates, None], "unit_kind": ["processes"] * 3, "devices": ["cpu"],
        "mode": "eager", "roles": ["target", "draft", "medium"], "profiles": {"target": "a.json"}, "date": "2026-01-02",
        "versions": versions,
    }  # fmt: skip
    log = found.log
    assert (log.names, log.seed, log.date, log.versions, log.sampling) == (("one", "two", "three"), 5, "2026-01-02", versions, None)
    assert log.models == {role: {"name": f"llama {role}", "checksum": "", "layers": size} for role, size in sizes.items()}
    assert log.source == "assumed: outcomes were forced"
    assert all(each.reads for each in log.decodings)
    own = measure_runs._about(dataclasses.replace(made, decodings=three[:1]), models)
    assert (own["forced"], own["unit_kind"]) == (None, ["processes"])
    one = dataclasses.replace(made, decodings=three[:1])
    assert measure_runs._log(one, models, log.decodings[:1]).source.startswith("measured: ")


def test_names_of_decodings_in_messages() -> None:
    assert str(PlannedDecoding("ppd", {"exit_layer": 3}, (1,), "one", {"match_rate": 0.5}, units=2, unit_kind="streams")) == (
        "ppd (exit_layer=3, match_rate=0.5) over 2 streams, one"
    )  # fmt: skip
    assert str(PlannedDecoding("ppd", {}, (1,), "one")) == "ppd, one"
    for wrong, said in (({"units": 0}, "units must be"), ({"unit_kind": "threads"}, "unknown unit_kind 'threads'")):
        with pytest.raises(ParameterError, match=said):
            PlannedDecoding("ppd", {}, (1,), "one", **wrong)  # type: ignore[arg-type]
    one = [PlannedDecoding("autoregressive", {}, (1,), "one")]
    for given_, said in (
        (([], 5), "methods must be at least one with one prompt, got none"), ((one, 1), "tokens must be between 2 and"),
        ((one, 2, 0), "repeats must be between 1 and 10000, got 0"), ((one, 2, 10_001), "repeats must be between 1 and 10000"),
        ((one, 2, 1, -1), "warm_ups must be between 0 and 100, got -1"), ((one, 2, 1, 101), "warm_ups must be between 0 and 100"),
        ((one, 2, 1, 0, -1), "seed must be at least 0"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            MeasurementPlan(*given_)  # type: ignore[arg-type]
    made = MeasurementPlan(one, 2, 10_000, 100)
    assert made.order(0) == [0]
    assert (
        MeasurementPlan(one).tokens,
        MeasurementPlan(one).repeats,
        MeasurementPlan(one).warm_ups,
        MeasurementPlan(one).seed,
    ) == (48, 7, 1, 0)
    units = [PlannedDecoding("ppd", {}, (1,), "one", units=count, unit_kind=unit_kind) for count, unit_kind in
             ((2, "processes"), (1, "processes"), (2, "processes"), (2, "streams"), (1, "processes"))]  # fmt: skip
    assert sorted(measure_runs._first_of_each(MeasurementPlan(units), [4, 2, 0, 3, 1])) == [2, 3, 4]


def test_runs_with_wrong_units_are_refused() -> None:
    models = models_of("speculative", {"draft_length": 1})
    for name, table, units, said in (
        ("speculative", {"draft_length": 1}, 2, "streams are for methods with one model, and speculative has target, draft; leave"),
        ("ppd", {"exit_layer": 3, "candidates": 2}, 2, "units must be 3, which ppd reserves with these parameters, got 2 streams"),
    ):
        planned = PlannedDecoding(name, table, (1, 2), "one", units=units, unit_kind="streams")
        with pytest.raises(ParameterError, match=said):
            measure_runs.check(MeasurementPlan([planned]), models)
    planned = PlannedDecoding("ppd", {"exit_layer": 3, "candidates": 2}, (1, 2), "one", units=3)
    measure_runs.check(MeasurementPlan([planned]), models)
    for tokens, fits in ((93, True), (94, False)):  # of 96 positions, the last of which is generated but not read
        made = MeasurementPlan([PlannedDecoding("autoregressive", {}, (1,) * 4, "one")], tokens)
        if fits:
            measure_runs.check(made, models)
        else:
            with pytest.raises(ParameterError, match="must fit the 96 positions"):
                measure_runs.check(made, models)


@pytest.mark.parametrize(("lines", "said"), [
    (lambda kept: [], "runs.jsonl holds no unfinished runs; remove it"),
    (lambda kept: ["{}"], "runs.jsonl holds no unfinished runs; remove it"),
    (lambda kept: ['{"asked": 5}'], "runs.jsonl holds no unfinished runs; remove it"),
    (lambda kept: [kept[0].replace('"tokens": 5', '"tokens": 6')], "of another plan: tokens differs; remove it, or use the same"),
    (lambda kept: [kept[0].replace('"tokens": 5', '"tokens": 5, "x": null')], "of another plan: x differs; remove it"),
    (lambda kept: [kept[0], "{", kept[1]], "runs.jsonl, line 2: it cannot be read; remove the file"),
    (lambda kept: [kept[0], '{"decoding": 1}', kept[1]], "runs.jsonl, line 2: it cannot be read; remove the file"),
])  # fmt: skip
def test_bad_saved_rows_are_refused(lines: Any, said: str, there: Path) -> None:
    path, (asked, models) = there / "runs.jsonl", plan()
    kept = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines(kept)))
    with pytest.raises(ParameterError, match=re.escape(said)):
        measure_runs.measure(there / "runs.json", asked, models, resume=True)
    (there / "runs.json").write_text("{}")
    with pytest.raises(ParameterError, match=r"out must be a new file, and runs\.json exists; give another, or remove it"):
        measure_runs.measure(there / "runs.json", asked, models, resume=True)


def test_saved_rows_form_a_table_or_are_refused() -> None:
    row = {"decoding": 1, "repeat": 0, "run_order": 2, "units": 1, "seconds": 2.0, "read_s": 0.5, "waited": 0.0, "load": None,
           "commit_s": [1.0], "pass_s": [0.0] * 3, "spans": []}  # fmt: skip
    found = measure_runs._table([row | {"decoding": 2}, row | {"repeat": 1}, row | {"load": 0.5}])
    assert found.select("decoding", "repeat").rows() == [(1, 0), (1, 1), (2, 0)]
    assert [str(each) for each in found["load"].to_list()] == ["0.5", "nan", "nan"]
    with pytest.raises(ParameterError, match=r"saved rows do not form one table: .*; remove their file, and run again"):
        measure_runs._table([row | {"run_order": "two"}])


def test_plans_are_read_with_defaults_and_refused_by_name(tmp_path: Path) -> None:
    """Defaults are the documented ones; errors begin with the name of the file."""
    said = run_plan.from_tables({"method": [{"name": "autoregressive"}]})
    assert said == run_plan.WrittenPlan(run_plan.RunSettings(), [run_plan.MethodSetting("autoregressive", {})], None)
    own = said.run
    assert (own.model, own.tokens, own.repeats, own.warm_ups, own.prompts, own.prompt_tokens, own.seed, own.dtype, own.mode) == (
        "family", 48, 7, 1, 3, 24, 0, "float32", "eager",
    )  # fmt: skip
    whole = run_plan.from_tables({
        "run": {"tokens": 1, "warm_ups": 0}, "profile": {"widths": [1], "contexts": [0]},
        "method": [{"name": "ppd", "exit_layer": 6, "candidates": 1, "forced": {}},
                   {"name": "ppd", "exit_layer": 6, "sweep": {"candidates": 2}, "forced": {"match_rate": 0.5},
                    "unit_kind": "streams"}],
    })  # fmt: skip
    assert whole.profile == Passes((1,), (0,))
    assert whole.choices == [
        run_plan.MethodSetting("ppd", {"exit_layer": 6, "candidates": 1}, {}),
        run_plan.MethodSetting("ppd", {"exit_layer": 6, "candidates": 2}, {"match_rate": 0.5}, "streams"),
    ]
    method = [{"name": "autoregressive"}]
    path = tmp_path / "plan.toml"
    for written, words in (
        ({"runs": {}, "method": method}, "unknown table 'runs'; did you mean run. known: method, profile, run"),
        ({}, r"\[\[method\]\] is required at least once: the decodings to time"),
        ({"method": []}, r"\[\[method\]\] is required"), ({"method": {"name": "ppd"}}, r"\[\[method\]\] is required"),
        ({"method": [{}]}, r"method\.name is required in each \[\[method\]\]; `sim ls methods` lists them"),
        ({"method": ["ppd"]}, r"method\.name is required"),
        *(({"method": method, "run": {name: least - 1}}, f"{name} must be") for name, least in
          (("repeats", 1), ("tokens", 1), ("prompts", 1), ("prompt_tokens", 1), ("seed", 0), ("warm_ups", 0))),
        ({"method": method, "run": {"mode": "fast"}}, "unknown mode 'fast'"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            run_plan.from_tables(written)
    for text, words in (("[run", "plan.toml cannot be read as TOML: "), ("[run]\ntokens = 0\n", "^plan.toml: ")):
        path.write_text(text)
        with pytest.raises(ParameterError, match=words):
            run_plan.read(path)
