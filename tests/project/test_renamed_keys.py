"""What had another name: the old one is known nowhere, and what refuses it names the new one."""

import itertools
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import figures
import sim
from calibrate.commands.calibrate_app import app as calibrate_app
from calibrate.measured_runs import run_plan
from calibrate.measured_runs.interleaved_profiles import Passes
from model.base import renamed_keys
from model.base.checks import ParameterError, nearest
from model.hardware import profile, profile_files
from model.logs import measured_runs, position_log, read_log
from model.methods import draft_model, registry
from sim.scenarios.hardware_cost import HardwareCost
from sim.views import metrics

MEASUREMENTS = Path(sim.__file__).parents[1] / "calibrate" / "measurements" / "cpu-processes"
KNOWN: dict[str, set[str]] = {
    "[cost]": {field.name for field in fields(HardwareCost)},
    **{name: {field.name for field in fields(registry.parameters(name))} for name in registry.names()},
    "placement": {*draft_model.PLACEMENTS},
    "[profile] of plans": {field.name for field in fields(Passes)},
    "[[method]] of plans": {field.name for field in fields(run_plan.MethodSetting)},
    "results": {*metrics.columns(), "reserved_units", "reserved_layers", "reserved_s"},
    "profiles": {*profile.UNITS},
    "parts": {*profile.AXES},
    "measured runs": {*measured_runs.UNITS},
    "read logs": {*read_log.UNITS, *read_log._KEYS, "max_tokens"},
    "position logs": {*position_log.TARGET, *position_log._KEYS},
}
RENAMED = [(old, new) for old, names in renamed_keys.RENAMED.items() for new in names]


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_an_old_name_is_known_nowhere_and_the_new_one_somewhere(old: str, new: str) -> None:
    where = [kind for kind, known in KNOWN.items() if new in known]
    assert where or (old, new) == ("texts", "sequences")  # of the JSON of commands
    several = {("row", "sequence"), ("text", "sequence")}  # keys of commits and of reads
    for kind in where:
        assert old not in KNOWN[kind] or (old, new) in several, kind
        assert nearest(old, KNOWN[kind]) in {f"it is now {each}" for each in renamed_keys.RENAMED[old]} & {
            f"it is now {each}" for each in KNOWN[kind]
        }


@pytest.mark.parametrize("known", KNOWN)
def test_a_name_that_is_known_is_none_of_the_old_ones(known: str) -> None:
    assert [name for name in KNOWN[known] if renamed_keys.current_name(name, KNOWN[known]) is not None] == []


@pytest.mark.parametrize(("name", "key", "value", "new"), [
    ("hardware-compare", "cost.ways", 2, "tensor_parallel"), ("skipdecode", "method.sequence", 30, "sequence_length"),
    ("bild", "method.maximum_draft", 3, "max_draft_length"), ("speculative-deck", "method.placement", "apart", "separate"),
    ("speculative-deck", "method.placement", "together", "colocated"),
])  # fmt: skip
@pytest.mark.parametrize("way", ["set", "sweep"])
def test_a_scenario_with_an_old_name_is_refused_by_the_new_one(name: str, key: str, value: Any, new: str, way: str) -> None:
    given: Any = {key: value} if way == "set" else {key: [value]}
    with pytest.raises(ParameterError, match=rf"; it is now {new}$"):
        sim.run(name, views=["formula"], **{way: given})


def test_a_plan_with_an_old_name_is_refused_by_the_new_one() -> None:
    method = {"name": "ppd", "exit_layer": 6, "candidates": 1}
    for plan, message in (
        ({"method": [method | {"apart": "processes"}]}, "unknown key method.apart; it is now unit_kind"),
        ({"method": [method], "profile": {"together": [1]}}, "unknown key profile.together; it is now batched_widths"),
    ):
        with pytest.raises(ParameterError, match=f"^{message}$"):
            run_plan.from_tables(plan)


@pytest.mark.parametrize(("words", "old"), [
    (["import", "aiconfigurator", "folder", "--gpu", "h100", "-o", "out", "--ways", "1,2"], "--ways"),
    (["import", "aiconfigurator", "folder", "--gpu", "h100", "-o", "out", "--ways=1,2"], "--ways"),
    (["run", "ppd", "--apart", "processes", "-o", "runs.json"], "--apart"),
])  # fmt: skip
def test_a_command_with_an_old_option_is_refused_by_the_new_one(words: list[str], old: str) -> None:
    done = CliRunner().invoke(calibrate_app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: no such option {old}; it is now {renamed_keys.OPTIONS[old]}\n"


def test_an_old_option_is_unknown_to_commands_that_never_had_it() -> None:
    done = CliRunner().invoke(calibrate_app, ["rates", "--ways", "1"])
    assert done.exit_code == 2
    assert "it is now" not in done.stderr


@pytest.mark.parametrize(("name", "load"), [
    ("cpu-processes", measured_runs.load), ("cpu-processes.reads", read_log.load),
    ("cpu-family-target-interpreter", profile_files.load),
    ("family", position_log.load),
])  # fmt: skip
def test_files_of_the_version_before_say_so_and_what_to_do(name: str, load: Any, tmp_path: Path) -> None:
    folder = MEASUREMENTS if name != "family" else Path(position_log.__file__).parent
    for ending in ("json", "parquet"):
        shutil.copy(folder / f"{name}.{ending}", tmp_path)
    path = tmp_path / f"{name}.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"schema_version": said["schema_version"] - 1}))
    with pytest.raises(ParameterError) as found:
        load(path)
    assert re.search(r"must be \d, got \d, of an earlier version of decodesim, .*; (import|measure|decode|log) .*",
     str(found.value))
    path.write_text(json.dumps(said | {"schema_version": said["schema_version"] + 1}))
    with pytest.raises(ParameterError) as found:
        load(path)
    assert "earlier" not in str(found.value)


@pytest.mark.parametrize("old", renamed_keys.RESULTS)
def test_figures_of_a_run_of_an_earlier_version_are_refused(old: str, tmp_path: Path) -> None:
    rows = pl.DataFrame({"point": [0], "view": ["formula"], "method": ["ppd"], "speedup": [1.0], old: [1.0]})
    rows.write_parquet(tmp_path / "results.parquet")
    (new,) = renamed_keys.RENAMED[old]
    with pytest.raises(ParameterError, match=rf"results\.parquet: column {old} is now {new}: .*; run the scenario again"):
        figures.of_run(tmp_path)


def test_no_bundled_file_has_an_old_name() -> None:
    """Neither a column nor a key of a scenario."""
    for path in itertools.chain(Path(sim.__file__).parent.glob("scenarios/bundled/*.toml"),
     MEASUREMENTS.parents[1].glob("experiments/*.toml")):
        keys = re.findall(r"(?m)^([a-z_]+) = ", path.read_text(encoding="utf-8"))
        assert not {"ways", "apart", "together", "maximum_draft", "sequence"} & {*keys}, path.name
    for name in profile_files.names():
        assert "ways" not in profile_files.load(name).table.columns
