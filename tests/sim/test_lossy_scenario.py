"""Lossy methods in scenarios: kinds of outcomes, agreement, work, batches and traces."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from sim.commands.sim_app import app
from sim.engine import events as engine
from sim.runs import run_report as reports
from sim.runs import sweep, trace
from sim.runs.sweep import resolve
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes import outcome_files
from tests.sim.test_sim_app import fits, schema_of_scenarios

TOKENS = 12
BILD = {"name": "bild", "layers": 8, "max_draft_length": 3}
SKIP = {"name": "skipdecode", "layers": 8, "min_layers": 3, "max_layers": 6, "prompt": 4, "sequence_length": 30}
RAGGED: dict[str, Any] = {"sequences": 3, "batching": "static", "lengths": [12, 4, 7, 2]}
EXIT = {"name": "early_exit", "layers": 4}
RATES = {"kind": "rates", "fallback_rate": 0.25, "rollback_rate": 0.125}
HAZARDS = {"kind": "hazards", "hazards": [0.25, 0.5, 0.0, 1.0]}
OWN = {"bild": (BILD, RATES, {"cost_ratio": 0.25}), "skipdecode": (SKIP, None, {}), "early_exit": (EXIT, HAZARDS, {})}

RECORD: dict[str, list[Any]] = {
    "confidence": [0.9, 0.4, 0.8, 0.7, 0.5, 0.6], "distance": [0.1, 3.0, 2.5, 1.0, 2.0, 4.0],
    "agrees": [True, False, False, False, True, True],
}  # fmt: skip
AT = {"fallback_threshold": 0.5, "rollback_threshold": 2.0}
"""One of the six is below the fallback threshold (.4), and two of the other five are beyond distance 2; .5 and 2 are within."""


def tables(name: str, **sections: Any) -> dict[str, Any]:
    """A small scenario of one lossy method, with sections replaced."""
    method, outcomes, cost = OWN[name]
    base: dict[str, Any] = {
        "scenario": {"name": "small", "tokens": TOKENS, "replications": 4096, "event_replications": 40},
        "method": [method], "cost": cost,
    }  # fmt: skip
    return {**base, **({} if outcomes is None else {"outcomes": outcomes}), **sections}


def view(table: pl.DataFrame, name: str) -> dict[str, Any]:
    """The row of one view of a table with one point."""
    [row] = [row for row in table.to_dicts() if row["view"] == name]
    return dict(row)


def toml(value: Any) -> str:
    """Tables as in a scenario file."""
    lines = []
    for section, table in value.items():
        for each in table if isinstance(table, list) else [table]:
            inner = {key: own for key, own in each.items() if isinstance(own, dict)}
            lines.append(f"[[{section}]]" if isinstance(table, list) else f"[{section}]")
            lines += [f"{json.dumps(key)} = {json.dumps(own)}" for key, own in each.items() if key not in inner]
            for key, own in inner.items():
                lines += [f"[{section}.{key}]", *(f"{json.dumps(name)} = {json.dumps(cell)}" for name, cell in own.items())]
    return "\n".join(lines) + "\n"


@pytest.fixture
def record(tmp_path: Path) -> str:
    """The decision record as a file."""
    path = tmp_path / "decisions.json"
    path.write_text(json.dumps(RECORD))
    return str(path)


# --- Who knows the agreement ---------------------------------------------------------------------------------------------


def test_lossy_methods_have_unknown_agreement() -> None:
    table = sim.run("compare-lossy", replications=2)
    exact = {"autoregressive", "ppd", "speculative"}
    assert set(table["method"]) == {*exact, "bild", "skipdecode", "early_exit"}
    for row in table.to_dicts():
        assert row["exact"] == (row["method"] in exact)
        assert row["agreement"] is None
        assert row["agreement_source"] == (None if row["exact"] else "unknown")


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("name_of_view", ["formula", "paths", "events"])
def test_every_view_marks_inexact_methods(name: str, name_of_view: str) -> None:
    row = view(sim.run(tables(name), replications=4), name_of_view)
    assert (row["exact"], row["agreement"], row["agreement_source"]) == (False, None, "unknown")


def test_agreement_column_is_absent_for_exact_methods() -> None:
    table = sim.run("speculative-deck", views=["formula"])
    assert table["exact"].all()
    assert not {"agreement", "agreement_source"} & {*table.columns}


def judged(row: int, variant: str) -> str:
    """Decision on the token of a row of the record, at the thresholds above."""
    if RECORD["confidence"][row] < AT["fallback_threshold"]:
        return "unsure"
    far = RECORD["distance"][row] > AT["rollback_threshold"]
    return "back" if far and (variant == "paper" or not RECORD["agrees"][row]) else "stays"


def counted(variant: str, length: int) -> tuple[float, float, float]:
    """Fallback rate, rollback rate and agreement of an infinite decoding with tokens drawn from the record, draft by draft."""
    fates = [judged(row, variant) for row in range(6)]
    sure = [fate for fate in fates if fate != "unsure"]
    tokens = foreign = 0
    for draft in itertools.product(range(6), repeat=length):  # all drafts are equally likely
        kept = list(itertools.takewhile(lambda row: fates[row] == "stays", draft))
        ended = fates[draft[len(kept)]] if len(kept) < length else "whole"
        tokens += len(kept) + 1 + (ended == "back" and variant == "code")
        foreign += sum(not RECORD["agrees"][row] for row in kept)
    return fates.count("unsure") / 6, sure.count("back") / len(sure), 1 - foreign / tokens


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_agreement_comes_from_the_record(variant: str, length: int, record: str) -> None:
    method = {**BILD, **AT, "variant": variant, "max_draft_length": length}
    table = sim.run(tables("bild", method=[method], outcomes={"kind": "thresholds", "file": record}), replications=4)
    fallback, rollback, agreement = counted(variant, length)
    assert rollback == (2 / 5 if variant == "paper" else 1 / 5)  # one of the two distant tokens is the large model's own
    for row in table.to_dicts():
        assert (row["fallback_rate"], row["rollback_rate"]) == pytest.approx((fallback, rollback))
        assert row["agreement"] == pytest.approx(agreement, rel=1e-12)
        assert row["agreement_source"].startswith(f"measured: {record}: share of tokens")
        assert row["outcomes_source"] == f"measured: {record}"


def test_thresholds_at_their_bounds(record: str) -> None:
    method = {**BILD, **AT}
    ends = {"method.fallback_threshold": [0.0, 1.0], "method.rollback_threshold": [0.0, math.inf]}
    table = sim.run(tables("bild", method=[method], outcomes={"kind": "thresholds", "file": record}), sweep=ends, views=["formula"])
    found = {(row["fallback_threshold"], row["rollback_threshold"]): row for row in table.to_dicts()}
    assert found[0.0, math.inf]["rollback_rate"] == 0
    assert found[0.0, 0.0]["rollback_rate"] == 1
    # The small model generates three of four tokens, half of them equal to the large model's.
    assert found[0.0, math.inf]["agreement"] == pytest.approx((1 + 3 * 0.5) / 4)
    for high in (0.0, math.inf):  # plain decoding: no drafts, no difference
        assert (found[1.0, high]["fallback_rate"], found[1.0, high]["agreement"]) == (1, 1)
        assert found[1.0, high]["tokens_per_round"] == 1


def test_assumed_record_is_marked_and_has_no_interval() -> None:
    law = {"kind": "thresholds", "sureness": 3.0}
    row = view(sim.run(tables("bild", method=[{**BILD, **AT}], outcomes=law), views=["formula"]), "formula")
    # The confidence is Beta(3, 1): below one half with probability 1/8.
    # Of 100,000 tokens: within five standard errors of .00105, a false alarm in 1.7 million seeds.
    assert row["fallback_rate"] == pytest.approx(1 / 8, abs=5 * (1 / 8 * 7 / 8 / 100_000) ** 0.5)
    assert row["agreement_source"].startswith("assumed: a small model that knows how often it is right: share")
    assert row["outcomes_source"].startswith("assumed")
    assert row["fallback_rate_trials"] is None
    assert row.get("speedup_input_low") is None


# --- Kinds of outcomes ---------------------------------------------------------------------------------------------------


def rounds(
    length: int, fallback: Sequence[float], rollback: Sequence[float], tokens: int, at: int = 0
) -> tuple[float, float]:
    """Mean and mean square of the large model's passes from a position on, by the rates of each position."""
    if at >= tokens:
        return 0.0, 0.0
    mean, square, stays = 1.0, 1.0, 1.0
    drafted = min(length, tokens - 1 - at)
    for place in range(at, at + drafted + 1):
        ends = fallback[place] + (1 - fallback[place]) * rollback[place] if place < at + drafted else 1.0
        after, after_square = rounds(length, fallback, rollback, tokens, place + 1)
        mean, square = mean + stays * ends * after, square + stays * ends * (2 * after + after_square)
        stays *= 1 - ends
    return mean, square


LAWS: list[tuple[dict[str, Any], list[float], list[float]]] = [
    (RATES, [0.25] * TOKENS, [0.125] * TOKENS),
    ({"kind": "rates", "fallback_rate": 0.0, "rollback_rate": 0.0}, [0.0] * TOKENS, [0.0] * TOKENS),
    ({"kind": "rates", "fallback_rate": 0.0, "rollback_rate": 1.0}, [0.0] * TOKENS, [1.0] * TOKENS),
    ({"kind": "rates", "fallback_rate": 1.0, "rollback_rate": 0.5}, [1.0] * TOKENS, [0.5] * TOKENS),
    (
        {
            "kind": "by-position", "fallback_rates": np.linspace(0, 0.6, TOKENS).tolist(),
            "rollback_rates": np.linspace(0.5, 0.1, TOKENS).tolist(),
        },
        np.linspace(0, 0.6, TOKENS).tolist(), np.linspace(0.5, 0.1, TOKENS).tolist(),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("law", "fallback", "rollback"), LAWS, ids=range(len(LAWS)))
def test_given_rates(law: dict[str, Any], fallback: list[float], rollback: list[float]) -> None:
    """Rounds by a separate recursion; events equal paths, whose mean time is within 5 standard errors of the formula's."""
    table = sim.run(tables("bild", outcomes=law))
    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    assert formula["fallback_rate"] == pytest.approx(np.mean(fallback))
    assert formula["rollback_rate"] == pytest.approx(np.mean(rollback))
    mean, square = rounds(3, fallback, rollback, TOKENS)
    assert TOKENS / formula["tokens_per_round"] == pytest.approx(mean, rel=1e-12)
    assert TOKENS / paths["tokens_per_round"] == pytest.approx(mean, abs=5 * (max(square - mean**2, 0.0) / 4096) ** 0.5 + 1e-9)
    assert events["paths_difference"] == 0
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error + 1e-9)


def test_csv_and_json_records_are_equal(tmp_path: Path, record: str) -> None:
    other = tmp_path / "decisions.csv"
    with other.open("w", newline="") as file:
        csv.writer(file).writerows([RECORD.keys(), *zip(*RECORD.values(), strict=True)])
    found = [
        sim.run(tables("bild", method=[{**BILD, **AT}], outcomes={"kind": "thresholds", "file": str(name)}), views=["formula"])
        for name in (record, other)
    ]
    named = ("outcomes_source", "agreement_source")
    assert found[0].drop(named).equals(found[1].drop(named))
    assert [table["outcomes_source"][0] for table in found] == [f"measured: {record}", f"measured: {other}"]


def test_a_record_may_be_published_or_assumed(record: str) -> None:
    for source in ("published", "assumed"):
        law = {"kind": "thresholds", "file": record, "source": source}
        row = view(sim.run(tables("bild", method=[{**BILD, **AT}], outcomes=law), views=["formula"]), "formula")
        assert (row["outcomes_source"], row["agreement_source"].partition(":")[0]) == (f"{source}: {record}", source)


TEXTS = [[0, 1, 2, 3, 4, 5, 0, 3, 2, 4, 1, 0], [4, 3, 0, 3, 0, 4, 2, 1, 3, 3, 5], [1, 2] * 8]
"""Three sequences of 12, 11 and 16 tokens, as rows of the record."""


def played(text: Sequence[int], variant: str) -> tuple[int, int]:
    """Rounds and foreign tokens of a recorded sequence, decoded token by token."""
    out, runs, foreign = 0, 0, 0
    while out < TOKENS:
        runs += 1
        drafted = 0
        while True:
            if drafted == min(3, TOKENS - 1 - out) or judged(text[out + drafted], variant) == "unsure":
                break
            drafted += 1
        kept = list(itertools.takewhile(lambda row: judged(row, variant) == "stays", text[out : out + drafted]))
        foreign += sum(not RECORD["agrees"][row] for row in kept)
        out += len(kept) + 1
        if len(kept) < drafted and variant == "code" and out < TOKENS:
            out, runs = out + 1, runs + 1
    return runs, foreign


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_replayed_sequences(variant: str, tmp_path: Path) -> None:
    columns = {name: [[values[row] for row in text] for text in TEXTS] for name, values in RECORD.items()}
    (tmp_path / "sequences.json").write_text(json.dumps(columns))
    law = {"kind": "replay", "file": str(tmp_path / "sequences.json")}
    table = sim.run(tables("bild", method=[{**BILD, **AT, "variant": variant}], outcomes=law))
    found = [played(text, variant) for text in TEXTS]
    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    mean = sum(runs for runs, _ in found) / 3
    assert TOKENS / formula["tokens_per_round"] == pytest.approx(mean)
    # Five standard errors over decodings that replay one of the sequences: a false alarm in 1.7 million seeds.
    spread = float(np.std([runs for runs, _ in found]))
    assert TOKENS / paths["tokens_per_round"] == pytest.approx(mean, abs=5 * spread / 4096**0.5 + 1e-9)
    for row in (formula, paths, events):
        assert row["agreement"] == pytest.approx(1 - sum(foreign for _, foreign in found) / 3 / TOKENS)
        assert row["agreement_source"].startswith("measured: share of tokens equal to those of the large model")
    assert events["paths_difference"] == 0
    rows = [row for text in TEXTS for row in text]
    fates = [judged(row, variant) for row in rows]
    assert formula["fallback_rate"] == pytest.approx(fates.count("unsure") / len(rows))
    assert formula["rollback_rate"] == pytest.approx(fates.count("back") / (len(rows) - fates.count("unsure")))
    assert formula["fallback_rate_trials"] == len(rows) == 39


def test_sequence_in_full_agreement_has_agreement_1(tmp_path: Path) -> None:
    columns = {"confidence": [[0.9] * 12], "distance": [[0.1] * 12], "agrees": [[True] * 12]}
    (tmp_path / "sequences.json").write_text(json.dumps(columns))
    law = {"kind": "replay", "file": str(tmp_path / "sequences.json")}
    table = sim.run(tables("bild", method=[{**BILD, **AT}], outcomes=law), replications=4)
    assert table["agreement"].to_list() == [1.0] * 3
    assert table["tokens_per_round"].to_list() == [4.0] * 3


@pytest.mark.parametrize("first_check", [1, 2])
@pytest.mark.parametrize("measure", ["softmax", "state"])
def test_hazards(first_check: int, measure: str) -> None:
    hazards = [0.25 if first_check == 1 else 0.0, 0.5, 0.0, 1.0]
    method = {**EXIT, "measure": measure, "first_check": first_check}
    cost = {"early_head": 0.5, "final_head": 0.75, "propagation": 0.125}
    cost |= {"state_check": 0.25} if measure == "state" else {}
    table = sim.run(tables("early_exit", method=[method], outcomes={"kind": "hazards", "hazards": hazards}, cost=cost))
    chance = {1: hazards[0], 2: (1 - hazards[0]) * 0.5, 4: (1 - hazards[0]) * 0.5}

    def time(depth: int) -> float:
        looked = len([layer for layer in range(first_check, 4) if layer <= depth])
        check = looked * (0.5 if measure == "softmax" else 0.25)
        head = 0.75 if depth == 4 else 0.5 if measure == "state" else 0.0
        return depth + check + head + 0.125 * (4 - depth)

    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    assert formula["mean_exit_layer"] == pytest.approx(sum(depth * each for depth, each in chance.items()))
    assert formula["latency_layers"] == pytest.approx(TOKENS * sum(time(depth) * each for depth, each in chance.items()))
    assert formula["speedup"] == pytest.approx(TOKENS * 4.75 / formula["latency_layers"])
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error)
    assert events["paths_difference"] == pytest.approx(0, abs=1e-9)


SURE = [[0.5, 0.875, 0.95, 1.0], [0.95, 0.1, 0.2, 0.4], [0.1, 0.2, 0.6, 0.3], [0.85, 0.91, 0.99, 1.0], [0.9, 0.9, 0.9, 0.9]]
RIGHT = [[False, False, True, True], [True, True, False, True], [False, False, True, True], [False, True, True, True], [False] * 3]
RIGHT[4].append(True)
FALLS: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda place: 0.875),
    ({"decay": "paper", "temperature": 4, "longest": 20}, lambda place: 0.9 * 0.875 + 0.1 * math.exp(-4 * place / 20)),
    ({"decay": "code", "temperature": 4, "longest": 20}, lambda place: 0.875 * (0.9 + 0.1 * math.exp(-4 * place / 20))),
    ({"decay": "code", "temperature": 0, "longest": 12}, lambda place: 0.875),
]  # fmt: skip


@pytest.mark.parametrize(("decay", "needed"), FALLS, ids=["fixed", "paper", "code", "flat"])
@pytest.mark.parametrize("first_check", [1, 2])
def test_confidences(decay: dict[str, Any], needed: Any, first_check: int, tmp_path: Path) -> None:
    """Exit layer and agreement of every recorded token at every position; the law draws one token per position."""
    (tmp_path / "c.json").write_text(json.dumps({"confidence": SURE, "agrees": RIGHT}))
    method = {**EXIT, "threshold": 0.875, "first_check": first_check, **decay}
    law = {"kind": "confidences", "file": str(tmp_path / "c.json")}
    table = sim.run(tables("early_exit", method=[method], outcomes=law))

    def depth(token: int, place: int) -> int:
        return next((layer for layer in range(first_check, 4) if SURE[token][layer - 1] >= needed(place)), 4)

    depths = [(token, depth(token, place)) for place in range(TOKENS) for token in range(5)]
    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    assert formula["mean_exit_layer"] == pytest.approx(np.mean([layers for _, layers in depths]), rel=1e-12)
    assert formula["agreement"] == pytest.approx(np.mean([RIGHT[token][layers - 1] for token, layers in depths]), rel=1e-12)
    assert formula["agreement_source"].startswith(f"measured: {tmp_path / 'c.json'}: share of tokens equal to")
    assert formula["latency_layers"] == pytest.approx(TOKENS * formula["mean_exit_layer"])
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error)
    assert events["paths_difference"] == pytest.approx(0, abs=1e-9)
    assert formula["mean_exit_layer_trials"] == 5


def test_forms_of_decay_differ(tmp_path: Path) -> None:
    """The test above needs tokens whose exit layer depends on the form of decay."""
    (tmp_path / "c.json").write_text(json.dumps({"confidence": SURE}))
    law = {"kind": "confidences", "file": str(tmp_path / "c.json")}
    given = [tables("early_exit", method=[{**EXIT, "threshold": 0.875, **decay}], outcomes=law) for decay, _ in FALLS]
    found = [view(sim.run(each, views=["formula"]), "formula") for each in given]
    fixed, paper, code, flat = (row["mean_exit_layer"] for row in found)
    assert len({fixed, paper, code}) == 3
    assert flat == fixed
    assert all((row["agreement"], row["agreement_source"]) == (None, "unknown") for row in found)  # which the record does not say


def test_agreement_of_a_batch_is_unknown(tmp_path: Path) -> None:
    """In a batch a sequence continues until the others are confident, which the record does not contain."""
    (tmp_path / "c.json").write_text(json.dumps({"confidence": SURE, "agrees": RIGHT}))
    method = {**EXIT, "threshold": 0.875, "sequences": 2, "batching": "static"}
    law = {"kind": "confidences", "file": str(tmp_path / "c.json")}
    row = view(sim.run(tables("early_exit", method=[method], outcomes=law), views=["formula"]), "formula")
    assert (row["agreement"], row["agreement_source"]) == (None, "unknown")
    depths = [next((layer for layer in range(1, 4) if token[layer - 1] >= 0.875), 4) for token in SURE]
    assert row["latency_layers"] == pytest.approx(TOKENS * np.mean([max(pair) for pair in itertools.product(depths, repeat=2)]))


# --- Intervals -----------------------------------------------------------------------------------------------------------


def test_trials_give_an_input_interval() -> None:
    """At the ends of an interval the observed rate is 1.96 standard deviations away; rollbacks are counted over written tokens."""
    trials = 400
    row = view(sim.run(tables("bild", outcomes={**RATES, "trials": trials}), views=["formula"]), "formula")

    def ends(rate: float, count: float) -> list[float]:
        z2 = 1.959963984540054**2
        return sorted(np.roots([1 + z2 / count, -(2 * rate + z2 / count), rate**2]).real)

    fallback, rollback = ends(0.25, trials), ends(0.125, trials * 0.75)
    assert [row["fallback_rate_low"], row["fallback_rate_high"]] == pytest.approx(fallback)
    assert row["fallback_rate_trials"] == trials
    speeds = []
    for low, back in zip(fallback, rollback, strict=True):
        law = {"kind": "rates", "fallback_rate": float(low), "rollback_rate": float(back)}
        speeds.append(view(sim.run(tables("bild", outcomes=law), views=["formula"]), "formula")["speedup"])
    assert [row["speedup_input_low"], row["speedup_input_high"]] == pytest.approx(sorted(speeds))
    assert row["speedup_input_low"] < row["speedup"] < row["speedup_input_high"]


def test_more_trials_narrow_the_interval(record: str, tmp_path: Path) -> None:
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps({name: values * 50 for name, values in RECORD.items()}))
    widths = []
    for file in (record, str(longer)):
        law = {"kind": "thresholds", "file": file}
        row = view(sim.run(tables("bild", method=[{**BILD, **AT}], outcomes=law), views=["formula"]), "formula")
        widths.append(row["speedup_input_high"] - row["speedup_input_low"])
        assert row["fallback_rate_trials"] == (6 if file == record else 300)
    assert 0 < widths[1] < widths[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [("fallback_rate", 0.5), ("rollback_rate", 0.5), ("fallback_rates", [0.5] * TOKENS), ("hazards", [0.5, 0.5, 0.5, 1.0])],
)
def test_overridden_rate_loses_trials_and_source(path: str, value: Any) -> None:
    law = {
        "hazards": {**HAZARDS, "source": "measured"},
        "fallback_rates": {**LAWS[-1][0], "source": "measured"},
    }.get(path, {**RATES, "trials": 100, "source": "measured"})
    name = "early_exit" if path == "hazards" else "bild"
    before = sim.run(tables(name, outcomes=law), views=["formula"])
    after = sim.run(tables(name, outcomes=law), set={f"outcomes.{path}": value}, views=["formula"])
    kept = sim.run(tables(name, outcomes=law), set={f"outcomes.{path}": value, "outcomes.source": "measured"}, views=["formula"])
    assert [table["outcomes_source"][0] for table in (before, after, kept)] == ["measured", "assumed", "measured"]
    if "trials" in law:
        assert [table["fallback_rate_trials"][0] for table in (before, after)] == [100, None]


# --- Work ----------------------------------------------------------------------------------------------------------------

WORK = (
    "flops_per_token", "weight_bytes_per_token", "kv_read_bytes_per_token", "kv_written_bytes_per_token", "head_passes_per_token",
)  # fmt: skip
DEEP = {"kind": "hazards", "hazards": [0.1] * 23 + [1.0]}
SHAPED: dict[str, dict[str, Any]] = {
    "bild": {
        "method": [{**BILD, "layers": 24, "draft_layers": 6}],
        "cost": {"cost_ratio": 0.25, "shape": "t5-large", "draft_shape": "t5-small"},
    },
    "bild-code": {
        "method": [{**BILD, "layers": 24, "draft_layers": 6, "variant": "code"}],
        "cost": {"cost_ratio": 0.25, "shape": "t5-large", "draft_shape": "t5-small"},
    },
    "bild-exit": {"method": [{**BILD, "layers": 24, "exit_layer": 6}], "cost": {"shape": "t5-large"}},
    "skipdecode": {"method": [{**SKIP, "layers": 24}], "cost": {"shape": "opt-1.3b"}},
    "skipdecode-batch": {"method": [{**SKIP, "layers": 24, **RAGGED}], "cost": {"shape": "opt-1.3b"}},
    "early_exit": {"method": [{**EXIT, "layers": 24}], "outcomes": DEEP, "cost": {"shape": "opt-1.3b"}},
    "early_exit-state": {"method": [{**EXIT, "layers": 24, "measure": "state"}], "outcomes": DEEP, "cost": {"shape": "opt-1.3b"}},
    "early_exit-backfill": {
        "method": [{**EXIT, "layers": 24, "fill": "backfill"}], "outcomes": DEEP, "cost": {"shape": "opt-1.3b"},
    },
    "early_exit-batch": {
        "method": [{**EXIT, "layers": 24, **RAGGED}], "outcomes": DEEP, "cost": {"shape": "opt-1.3b"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_work_in_formula_and_events(name: str) -> None:
    """The engine's counts per pass against the closed form of the mean, with an error from batches of replications."""
    given = tables(name.partition("-")[0], **SHAPED[name])
    formula = view(sim.run(given, views=["formula"]), "formula")
    runs = [view(sim.run(given, views=["events"], replications=12, seed=seed), "events") for seed in range(8)]
    assert {*WORK, "transferred_bytes_per_token", "arithmetic_intensity"} <= {*formula} & {*runs[0]}
    for column in WORK:
        found = [run[column] for run in runs]
        error = np.std(found, ddof=1) / 8**0.5
        # Student's t with 7 degrees of freedom is beyond 10 once in 50 000.
        assert formula[column] == pytest.approx(np.mean(found), abs=10 * error + 1e-9 * formula[column]), column
        assert formula[column] > 0
    if name.startswith("skipdecode"):
        assert all(runs[0][column] == pytest.approx(formula[column], rel=1e-12) for column in (*WORK, "arithmetic_intensity"))
    for row in (formula, *runs):
        moved = row["weight_bytes_per_token"] + row["kv_read_bytes_per_token"] + row["kv_written_bytes_per_token"]
        assert row["arithmetic_intensity"] == pytest.approx(row["flops_per_token"] / moved)


@pytest.mark.parametrize("name", ["bild", "skipdecode", "early_exit"])
def test_without_shapes_there_is_no_work(name: str) -> None:
    table = sim.run(tables(name), replications=4)
    assert not {*WORK, "arithmetic_intensity"} & {*table.columns}
    shaped = sim.run(tables(name, **SHAPED[name]), replications=4)
    assert view(shaped, "paths")["flops_per_token"] is None  # paths do not count


# --- Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["skipdecode", "early_exit"])
@pytest.mark.parametrize(
    ("batch", "lengths", "occupancy"),
    [
        (1, None, 1.0), (4, None, 1.0), (2, [12, 6], 18 / 24), (1, [12, 6], 1.0), (3, [12, 6], 18 / 36),
        (2, [6, 12, 3, 3, 8], 32 / (2 * (12 + 3 + 8))),
    ],
)  # fmt: skip
def test_occupancy_is_tokens_over_batch_slots(name: str, batch: int, lengths: list[int] | None, occupancy: float) -> None:
    method = {**OWN[name][0], "sequences": batch, "batching": "static", **({} if lengths is None else {"lengths": lengths})}
    table = sim.run(tables(name, method=[method]), replications=20)
    assert table["occupancy"].to_list() == pytest.approx([occupancy] * 3)
    assert view(table, "events")["paths_difference"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("fill", ["propagate", "backfill"])
def test_consecutive_sequences_have_independent_draws(fill: str) -> None:
    """For six sequences decoded alone the events use the exit layers of all six, not six times those of the first."""
    method = {**EXIT, "fill": fill, "batching": "static", "lengths": [3, 12, 1, 1, 7, 12]}
    given = tables("early_exit", method=[method], cost={"propagation": 0.125})
    table = sim.run(given)
    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    assert events["paths_difference"] == pytest.approx(0, abs=1e-9)
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error)


def test_batch_runs_as_deep_as_its_deepest_sequence() -> None:
    methods = [{**EXIT, "sequences": batch, "batching": "static"} for batch in (1, 2, 8)]
    rows = [view(sim.run(tables("early_exit", method=[each]), views=["formula"]), "formula") for each in methods]
    reached = np.cumsum([0.25, 0.375, 0.0, 0.375])  # probabilities to need at most 1, 2, 3, 4 layers
    for batch, row in zip((1, 2, 8), rows, strict=True):
        assert row["latency_layers"] == pytest.approx(TOKENS * (4 - (reached[:3] ** batch).sum()))
        assert row["speedup"] == pytest.approx(TOKENS * 4 / row["latency_layers"])


# --- Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_results_do_not_depend_on_workers_or_resuming(name: str, tmp_path: Path) -> None:
    given = tables(name, scenario={"name": "s", "tokens": TOKENS, "replications": 9000, "event_replications": 8})
    for jobs in (1, 2):
        sim.run(given, out=tmp_path / str(jobs), jobs=jobs)
    for file in ("results.parquet", "distribution.parquet"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
    [lost, *_] = sorted((tmp_path / "1" / "shards").glob("*.parquet"))
    before = (tmp_path / "1" / "results.parquet").read_bytes()
    lost.unlink()
    report = sweep.run(given, out=tmp_path / "1", resume=True)
    assert (report.computed, report.resumed > 0) == (1, True)
    assert (tmp_path / "1" / "results.parquet").read_bytes() == before


def test_changed_record_is_another_run(tmp_path: Path, record: str) -> None:
    given = tables("bild", method=[{**BILD, **AT}], outcomes={"kind": "thresholds", "file": record})
    sim.run(given, out=tmp_path / "run", views=["formula"])
    sim.run(given, out=tmp_path / "run", views=["formula"], resume=True)
    Path(record).write_text(json.dumps({**RECORD, "distance": [0.0] * 6}))
    with pytest.raises(ParameterError, match="holds the run of another scenario"):
        sim.run(given, out=tmp_path / "run", views=["formula"], resume=True)
    assert sim.run(given, views=["formula"])["rollback_rate"].to_list() == [0.0]  # and the cached record is read again


def test_a_record_is_read_once_for_all_points(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def text_of(file: str, *more: str) -> Any:
        read.append(file)
        return whole(file, *more)

    whole = outcome_files.text_of
    monkeypatch.setattr(outcome_files, "text_of", text_of)
    given = tables("bild", method=[{**BILD, **AT}], outcomes={"kind": "thresholds", "file": record})
    sim.run(given, sweep={"method.fallback_threshold": [0.1, 0.5, 0.9]}, replications=4)
    assert read == [record]


@pytest.mark.parametrize("kind", ["thresholds", "replay", "confidences"])
def test_record_path_is_relative_to_the_scenario(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any working directory; in [outcomes], in its sub-tables, in [method.outcomes], and on an axis."""
    place = tmp_path / "mine" / "records"
    place.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    columns: dict[str, Any] = {name: [values * 2] for name, values in RECORD.items()} if kind == "replay" else RECORD
    (place / "r.json").write_text(json.dumps({"confidence": SURE} if kind == "confidences" else columns))
    name = "early_exit" if kind == "confidences" else "bild"
    method = {**OWN[name][0], **({"threshold": 0.9} if kind == "confidences" else AT)}
    law = {"kind": kind, "file": "records/r.json"}
    asked = "exit" if kind == "confidences" else "decision"
    settings = {"name": "s", "tokens": TOKENS, "replications": 4}
    cost = {} if kind == "confidences" else {"cost": {"cost_ratio": 0.25}}
    forms: list[dict[str, Any]] = [
        {"scenario": settings, "method": [method], "outcomes": law, **cost},
        {"scenario": settings, "method": [method], "outcomes": {asked: law}, **cost},
        {"scenario": settings, "method": [{**method, "outcomes": law}], **cost},
        {"scenario": settings, "method": [method], "outcomes": law, **cost, "sweep": {"outcomes.file": ["records/r.json"]}},
    ]
    found = []
    for form in forms:
        (tmp_path / "mine" / "s.toml").write_text(toml(form))
        done = CliRunner().invoke(app, ["run", "../mine/s.toml", "--no-figures", "--json", "--view", "formula"])
        assert done.exit_code == 0, done.stderr
        found.append(json.loads(done.stdout)["results"][0]["speedup"])
    assert len({*found}) == 1


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("spoil", "message"), [
    ("method", "laayers"), ("outcomes", "rollback"), ("cost", "propagatoin"), ("kind", "unknown .*'hazard'"),
])  # fmt: skip
def test_schema_refuses_unknown_keys(name: str, spoil: str, message: str) -> None:
    schema, given = schema_of_scenarios(), tables(name, views=None)
    del given["views"]
    given = json.loads(json.dumps(given))
    assert fits(given, schema)
    if spoil == "method":
        given["method"][0]["laayers"] = 3
    elif spoil == "cost":
        given["cost"]["propagatoin"] = 1
    elif spoil == "outcomes":
        given["outcomes"] = {**given.get("outcomes", RATES), "rollback": 0.1}
    else:
        given["outcomes"] = {**given.get("outcomes", RATES), "kind": "hazard"}
    assert not fits(given, schema)
    with pytest.raises(ParameterError, match=f"{message}|outcomes. is used by no method"):
        Grid(given)


@pytest.mark.parametrize("name", ["bild", "bild-thresholds", "skipdecode", "early-exit", "compare-lossy"])
def test_bundled_scenarios_run_and_mark_inexact_methods(name: str, tmp_path: Path) -> None:
    assert fits(scenario_file.load(name), schema_of_scenarios())
    short = {"scenario.tokens": 24} if name.startswith("bild") else {}  # has many points; the others have given lengths
    report = sweep.run(name, replications=2, set=short, out=tmp_path / "run")
    assert report.failed == []
    table = report.frame()
    assert set(table["view"]) == {"formula", "paths", "events"}
    lines = reports.notes(report.table(), report.tables)
    lossy = [line for line in lines if line.startswith("not exact")]
    methods = set(table.filter(~pl.col("exact"))["method"])
    assert lossy
    assert all(any(method in line for line in lossy) for method in methods)
    assert not any(method in line for line in lossy for method in ("autoregressive", "ppd", "speculative"))


# --- Notes ---------------------------------------------------------------------------------------------------------------


def notes(given: Any, folder: Path, **more: Any) -> list[str]:
    report = sweep.run(given, out=folder / "run", **{"replications": 4, **more})
    return reports.notes(report.table(), report.tables)


def test_notes_of_given_rates(tmp_path: Path) -> None:
    lines = notes(tables("bild"), tmp_path)
    assert "fallback and rollback rates: assumed" in lines
    assert "not exact, output differs from the target's: bild; token agreement is not measured" in lines
    assert any(line.startswith("times: assumed: ") and "; cost_ratio as set in [cost]; " in line for line in lines)
    assert any("equal to the last bit on all 4 decodings" in line for line in lines)


def test_notes_of_a_record(tmp_path: Path, record: str) -> None:
    law = {"kind": "thresholds", "file": record}
    lines = notes(tables("bild", method=[{**BILD, **AT}, SKIP], outcomes=law), tmp_path, views=["formula"])
    assert "fallback and rollback rates: measured" in lines
    source = f"token agreement is measured: {record}: share of tokens equal to those of the large model"
    assert f"not exact, output differs from the target's: bild; {source}" in lines
    assert "not exact, output differs from the target's: skipdecode; token agreement is not measured" in lines
    assert any(line.startswith("input uncertainty: the rates (95 % intervals) change a speed-up by at most") for line in lines)


def test_notes_of_several_methods(tmp_path: Path) -> None:
    lines = notes("compare-lossy", tmp_path)
    assert "match, acceptance, fallback, rollback and exit rates: assumed" in lines
    unknown = "token agreement is not measured"
    assert f"not exact, output differs from the target's: bild, skipdecode, early_exit; {unknown}" in lines


def test_directory_does_not_hide_a_bundled_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory as left by `sim run early-exit -o early-exit`; a file of that name has precedence."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        arguments = ["run", "early-exit", "-o", "early-exit", "--replications", "1", "--view", "formula", "--no-figures"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.stderr
    (tmp_path / "skipdecode").write_text(toml(tables("skipdecode")))
    assert resolve("skipdecode")["scenario"]["name"] == "small"


# --- Traces --------------------------------------------------------------------------------------------------------------

TRACED = {
    "bild": BILD,
    "bild-code": {**BILD, "variant": "code"},
    "bild-exit": {**BILD, "exit_layer": 2},
    "bild-apart": {**BILD, "placement": "separate"},
    "skipdecode": SKIP,
    "skipdecode-batch": {**SKIP, "sequences": 2, "batching": "static", "lengths": [12, 3, 5]},
    "early_exit": EXIT,
    "early_exit-state": {**EXIT, "measure": "state"},
    "early_exit-backfill": {**EXIT, "fill": "backfill"},
    "early_exit-batch": {**EXIT, "sequences": 2, "batching": "static", "lengths": [5, 12, 7]},
    "early_exit-fixed": {**EXIT, "exit_layer": 2},
}


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("tokens", [None, 4, 1, 50])
def test_trace_has_the_requested_tokens(name: str, tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens, or the first of every sequence; with one event per layer the time is the same."""
    method = TRACED[name]
    given = tables(name.partition("-")[0], method=[method])
    if "exit_layer" in method:
        given = {**given, "cost": {}}
        if method["name"] == "early_exit":
            del given["outcomes"]
    run = trace.record(given, tokens=tokens, seed=3)
    lengths = method.get("lengths", [TOKENS])
    assert len(run.tokens) == sum(min(length, tokens or TOKENS) for length in lengths)
    assert sum(tokens for _, _, tokens in run.commits) == len(run.tokens)
    monkeypatch.setattr(engine, "simulate", partial(engine.simulate, per_layer=True))
    assert trace.record(given, tokens=tokens, seed=3).latency == pytest.approx(run.latency)
    document = trace.chrome_trace(run.intervals, run.commits, name)
    assert max(event["ts"] for event in document["traceEvents"] if event["ph"] == "i") == pytest.approx(run.latency * 1000)


def test_shortened_trace_begins_like_the_full_one() -> None:
    given = tables("early_exit", method=[{**EXIT, "sequences": 2, "batching": "static", "lengths": [5, 12]}])
    whole, some = trace.record(given), trace.record(given, tokens=4)
    assert some.commits == whole.commits[:4]


@pytest.mark.parametrize("name", ["bild", "skipdecode-batch", "early_exit-batch"])
@pytest.mark.parametrize("suffix", ["json.gz", "png"])
def test_command_draws_a_trace(name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture shows six tokens per sequence by default, for any lengths of the other sequences."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(toml(tables(name.partition("-")[0], method=[TRACED[name]])))
    done = CliRunner().invoke(app, ["trace", "s.toml", "-o", f"t.{suffix}"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert (tmp_path / f"t.{suffix}").stat().st_size > 100
    checked = CliRunner().invoke(app, ["lint", "s.toml"])
    assert (checked.exit_code, "would fail" in checked.stdout) == (0, False)
