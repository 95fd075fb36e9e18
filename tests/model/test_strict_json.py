"""JSON documents of the program contain no NaN and no Infinity, which are not JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from model.base import strict_json
from model.logs.read_log import plain
from sim.commands import sim_app


def strict(text: str) -> Any:
    """Parse standard JSON."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=100)
def test_every_value_is_written_as_json(value: Any) -> None:
    def same(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, dict):
            return ours.keys() == theirs.keys() and all(same(each, theirs[key]) for key, each in ours.items())
        if isinstance(ours, list | tuple):
            return len(ours) == len(theirs) and all(map(same, ours, theirs))
        if isinstance(ours, float) and not math.isfinite(ours):
            return theirs is None if math.isnan(ours) else theirs == str(ours)
        return bool(ours == theirs)

    assert same(value, strict(strict_json.dumps(value)))
    how: dict[str, Any] = {"indent": 2, "sort_keys": True}
    assert strict_json.dumps(value, **how) == strict_json.dumps(strict_json.plain(value), **how)


def test_settings_of_logs_are_written_as_json() -> None:
    assert plain({"rollback_threshold": math.inf, "lengths": (3, 4)}) == {"rollback_threshold": "inf", "lengths": [3, 4]}


RUNS: dict[str, tuple[str, ...]] = {
    "an infinite parameter": ("bild-thresholds", "--set", "scenario.tokens=8", "--replications", "2"),
    "no closed form": ("speculative-adaptive", "--set", "scenario.tokens=8", "--replications", "1"),
    "wide intervals": ("speculative-deck", "--set", "scenario.tokens=6", "--replications", "2"),
}


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_run_writes_standard_json(arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = CliRunner().invoke(sim_app.app, ["run", *arguments, "--no-figures", "--json", "-o", str(tmp_path / "run")])
    assert out.exit_code == 0, out.output
    document = strict(out.stdout)
    for name in ("metadata.json", "summary.json", "failed.json"):
        strict((tmp_path / "run" / name).read_text())
    assert strict((tmp_path / "run" / "summary.json").read_text())["results"] == document["results"]
    rows = pl.read_parquet(tmp_path / "run" / "results.parquet")
    assert rows.select(pl.col(pl.Float64).is_nan().any()).row(0).count(True) == 0
    infinite = [name for name in rows.columns if rows[name].dtype.is_float() and rows[name].is_infinite().any()]
    assert infinite == (["rollback_threshold"] if arguments[0] == "bild-thresholds" else [])
    for name in infinite:
        assert [row[name] == "inf" for row in document["results"]] == rows[name].is_infinite().fill_null(False).to_list()
    held = rows.select((pl.col("reserved_units") * pl.col("latency_layers")).alias("held"), "reserved_layers")
    assert held["held"].equals(held["reserved_layers"])
    if arguments[0] == "speculative-adaptive":
        assert rows.filter(view="formula")["reserved_layers"].null_count() > 0  # no latency, hence no product
        assert rows.filter(view="paths")["latency_layers_low"].null_count() == rows.filter(view="paths").height


def test_interval_that_reaches_zero_has_no_upper_end_for_its_inverse(tmp_path: Path) -> None:
    arguments = ["run", *RUNS["wide intervals"], "--no-figures", "--json", "--view", "paths", "-o", str(tmp_path / "run")]
    rows = strict(CliRunner().invoke(sim_app.app, arguments).stdout)["results"]
    open_ended = [row["latency_layers_low"] <= 0 for row in rows]
    assert any(open_ended)
    assert not all(open_ended)
    for row, is_open in zip(rows, open_ended, strict=True):
        assert (row["speedup_high"] is None) == is_open
        assert row["speedup_low"] <= row["speedup"]
        if not is_open:
            assert row["speedup_high"] == pytest.approx(row["speedup"] * row["latency_layers"] / row["latency_layers_low"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "scenarios"], ["ls", "methods", "bild"], ["env"], ["run", "bild-thresholds", "--dry-run"],
        ["check", "--method", "pearl", "--examples", "20"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_other_commands_write_json_too(arguments: list[str]) -> None:
    out = CliRunner().invoke(sim_app.app, [*arguments, "--json"])
    assert out.exit_code == 0, out.output
    strict(out.stdout)
