"""`sim ls` prints all that is needed to write a scenario of any method, and it is correct."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sim
from model.architectures import draft_heads
from model.architectures.published_shapes import PRESETS
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.hardware.devices import DEVICES, Device
from model.logs import acceptance_record
from model.logs.acceptance_record import AcceptanceRecord
from model.methods import registry
from sim.commands import listing
from sim.commands.sim_app import app
from sim.scenarios import cases, outcomes_section, scenario_file
from sim.scenarios.grid import Grid
from sim.scenarios.hardware_cost import HardwareCost


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["ls", *arguments])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


@pytest.mark.parametrize("what", listing.LISTS)
def test_every_list_has_one_line_per_entry(what: str) -> None:
    rows = listing.lines(what)
    assert rows
    assert all(rows.values())
    assert json.loads(said(what, "--json")) == rows
    for name, line in zip(rows, said(what).splitlines(), strict=True):
        assert line == f"{name:{max(map(len, rows))}}  {rows[name]}"


@pytest.mark.parametrize("what", listing.LISTS)
def test_every_entry_has_details(what: str) -> None:
    first = next(iter(listing.lines(what)))
    for name in listing.lines(what):
        [text] = listing.details(what, name).values()
        assert said(what, name) == f"{text}\n"
        if name == first:  # the format does not depend on the entry
            assert json.loads(said(what, name, "--json")) == {name: text}


@pytest.mark.parametrize("name", registry.names())
def test_method_description_has_all_that_a_scenario_needs(name: str) -> None:
    text = said("methods", name)
    kind = registry.algorithm(name).Parameters
    parameters = text.partition("[[method]]")[2].partition("[outcomes]")[0]
    table = dict(line.split(maxsplit=1) for line in parameters.splitlines() if " " in line)
    for field in fields(kind):
        assert (table[field.name] == "required") == (field.default is MISSING)
    for outcome in kind.OUTCOMES:
        assert f"sim ls outcomes {outcome}" in text
    costs = text.partition("[cost]")[2]
    assert ("cost_ratio  required" in costs) == ("draft" in kind.roles_for({}))
    for key in ("propagation", "state_check"):
        assert (key in costs) == (name == "early_exit")
    for each in scenario_file.names():
        used = name in {table["name"] for table in scenario_file.method_tables(scenario_file.load(each))}
        assert (each in text.rpartition("scenarios: ")[2].partition(" (")[0].split(", ")) == used


TOKENS, LAYERS = 3, 8
METHODS: dict[str, dict[str, Any]] = {
    "adaptive": {"policy": "confidence", "max_draft_length": 3, "confidence_threshold": 0.5}, "autoregressive": {},
    "beam": {"draft_length": 3, "beams": 2}, "bild": {}, "early_exit": {}, "hierarchical": {"draft_length": 3},
    "pearl": {"draft_length": 3}, "dsi": {"lookahead": 2, "verifiers": 2}, "ppd": {"exit_layer": 20, "candidates": 1, "layers": 40},
    "skipdecode": {"min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 20}, "speculative": {"draft_length": 3},
    "self_speculative": {"exit_layer": 3, "draft_length": 3}, "ngram": {"draft_length": 3},
    "tree": {"shape": "full", "draft_depth": 2, "width": 2}, "amusd": {"draft_length": 4},
    "ssd": {"draft_length": 3, "fan_out": 1},
}  # fmt: skip
BY_POSITION: dict[str, dict[str, Any]] = {
    "iid": {"acceptance_rate": 0.5}, "markov": {"acceptance_rate": 0.5, "correlation": 0.1},
    "by-position": {"acceptance_rates": [0.5] * TOKENS}, "replay": {"records": [[True] * TOKENS, [False] * TOKENS]},
}  # fmt: skip
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "accept": BY_POSITION | {
        "by-draft-position": {"acceptance_rates": [0.5] * 5}, "distributions": {"p": [0.5, 0.5], "q": [0.4, 0.6]},
        "shared-rate": {"acceptance_rate": 0.5, "concentration": 2.0},
        "levels": {"acceptance_rates": [[0.9] * 5, [0.5] * 5], "weights": [1, 2]},
        "curve": {"mean_acceptance_lengths": [1.6, 2.0, 2.3], "draft_lengths": [1, 3, 5]},
        "rounds": {"lengths": [[1, 2, 1]]}, "reported": {"engine": "vllm", "draft_length": 5, "rate": 0.6},
        "engine-log": {"file": "engine.json"}, "published": {"task": "ende", "table": "deck-adaptive"},
    },
    "medium_accept": BY_POSITION,
    "match": {
        "iid": {"match_rate": 0.5}, "markov": {"match_rate": 0.5, "correlation": 0.1},
        "by-position": {"match_rates": [0.5] * TOKENS}, "replay": BY_POSITION["replay"],
        "published": {"data_set": "squad", "head": "final"},
    },
    "confidence": {"two-class": {"low_if_accepted": 0.1, "low_if_rejected": 0.5}},
    "decision": {
        "rates": {"fallback_rate": 0.5, "rollback_rate": 0.5},
        "by-position": {"fallback_rates": [0.5] * TOKENS, "rollback_rates": [0.5] * TOKENS},
        "thresholds": {"sureness": 2.0}, "replay": {"file": "decisions.json"},
    },
    "lookup": {
        "iid": {"hit_rate": 0.5, "acceptance_rate": 0.5},
        "markov": {"hit_rate": 0.2, "hit_rate_after_acceptance": 0.8, "acceptance_rate": 0.5},
        "by-match": {"match_lengths": [1, 2], "match_rates": [0.3, 0.2], "acceptance_rates": [0.5, [0.6, 0.7, 0.8]]},
        "replay": {"file": "lookups.json"},
    },
    "rank": {
        "by-depth": {"rank_rates": [0.5, 0.2]}, "classes": {"rank_rates": [[0.5, 0.2], [0.3, 0.3]], "weights": [1, 1]},
        "replay": {"file": "ranks.json"},
    },
    "position_rank": {
        "ranks": {"rank_rates": [0.5, 0.2]}, "power-law": {"acceptance_rate": 0.5, "exponent": 0.7},
        "replay": {"file": "ranks.json"},
    },
    "exit": {"hazards": {"hazards": [0.5] * 7 + [1.0]}, "confidences": {"file": "confidences.json"}},
}  # fmt: skip
"""A table of each kind of outcome."""
ENGINE = acceptance_record.with_intervals(
    AcceptanceRecord("vllm", (), (), draft_length=5, mean_acceptance_length=2.5, survival=(0.5, 0.4, 0.3, 0.2, 0.1))
)
RECORDS = {
    "decisions.json": {"confidence": [[0.1, 0.9]], "distance": [[0.1, 0.1]], "agrees": [[True, True]]},
    "confidences.json": {"confidence": [[0.1] * LAYERS, [0.9] * LAYERS]},
    "lookups.json": [[[1, 2, 1]] * 12],
    "ranks.json": {"ranks": [[[1, 2]] * 12]},
    "engine.json": acceptance_record.document(ENGINE),
}
THRESHOLDS = {
    "decision: thresholds": {"fallback_threshold": 0.5, "rollback_threshold": 1.0}, "exit: confidences": {"threshold": 0.5},
    "decision: replay": {"fallback_threshold": 0.5, "rollback_threshold": 1.0},
}  # fmt: skip
"""Parameters that a kind of outcome requires."""


@pytest.mark.parametrize("name", registry.names())
def test_listed_kinds_of_outcomes_are_those_that_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, record in RECORDS.items():
        Path(file).write_text(json.dumps(record))
    kind, text = registry.algorithm(name).Parameters, said("methods", name)
    costs = {f"{role}_cost_ratio".removeprefix("draft_"): 0.2 for role in kind.roles_for({})}
    assert {*EXAMPLES} == {*outcomes_section.LAWS}
    for outcome in kind.OUTCOMES:
        [listed] = re.findall(rf"^{outcome}: .*; kinds (.*) \(", text, re.MULTILINE)
        assert {*EXAMPLES[outcome]} == {*outcomes_section.LAWS[outcome]}
        for law, table in EXAMPLES[outcome].items():
            method = {"name": name, "layers": LAYERS} | METHODS[name] | THRESHOLDS.get(f"{outcome}: {law}", {})
            others = {other: {"kind": (first := next(iter(EXAMPLES[other])))} | EXAMPLES[other][first] for other in kind.OUTCOMES}
            tables = {
                "scenario": {"name": "kinds", "tokens": TOKENS, "replications": 4, "views": ["paths"]}, "method": [method],
                "outcomes": others | {outcome: {"kind": law} | table}, "cost": costs,
            }  # fmt: skip
            if law in listed.split(", "):
                assert sim.run(tables).height == 1
            else:
                with pytest.raises(ParameterError, match=r"must be by output position with method (pearl|dsi|amusd)"):
                    sim.run(tables)


@pytest.mark.parametrize("name", registry.names())
def test_listed_batching_is_what_several_sequences_get(name: str) -> None:
    """A default that several sequences are refused with is not listed as a default."""
    kind = registry.algorithm(name).Parameters
    table = {"layers": LAYERS, "sequences": 2} | METHODS[name]
    [listed] = re.findall(r"^batching +(default|required with several sequences:) (.*)$", said("methods", name), re.MULTILINE)
    if listed[0] == "default":
        assert repr(kind(**table).batching) == listed[1]
    else:
        with pytest.raises(ParameterError, match=f"batching must be {listed[1]} with sequences=2"):
            kind(**table)


@pytest.mark.parametrize("outcome", ["decision", "exit"])
def test_outcomes_are_named_in_three_ways(outcome: str) -> None:
    of_all = listing.details("outcomes", outcome)
    assert [*of_all] == [f"{outcome}: {kind}" for kind in outcomes_section.LAWS[outcome]]
    for kind, law in outcomes_section.LAWS[outcome].items():
        text = of_all[f"{outcome}: {kind}"]
        assert listing.details("outcomes", f"{outcome}: {kind}") == {f"{outcome}: {kind}": text}
        assert listing.details("outcomes", kind)[f"{outcome}: {kind}"] == text
        assert all(f"\n{field.name} " in text for field in fields(law))


def test_columns_of_records_are_described() -> None:
    for column in ("confidence", "distance", "agrees"):
        assert f"`{column}`" in said("outcomes", "thresholds")
    for column in ("confidence", "agrees"):
        assert f"`{column}`" in said("outcomes", "confidences")


def test_every_cost_is_described() -> None:
    rows = listing.lines("costs")
    assert [*rows] == [*dict.fromkeys(field.name for kind in (cases.Cost, HardwareCost) for field in fields(kind))]
    assert all(rows.values())
    assert rows["state_check"].endswith("[layer-times].")
    assert rows["cost_ratio"] == rows["medium_cost_ratio"]
    assert "sim ls shapes" in rows["draft_shape"]
    assert rows["layer_times"] == "One time per layer, if layers differ [layer-times]."


@pytest.mark.parametrize("kind", ["unit", "published", "profile", "roofline", "engine"])
def test_a_kind_of_costs_lists_its_keys(kind: str) -> None:
    """A key that is listed is one that a scenario of this kind may have, and the others are refused."""
    shown = said("costs", kind).splitlines()
    assert shown[:3] == ["[cost]", f'kind = "{kind}"', ""]
    keys = {line.split(" ")[0] for line in shown[3:]} - {""}
    about = {"law", "device", "prompt", "profile", "cost_ratio"} & keys
    assert about == {
        "unit": {"cost_ratio"}, "published": {"cost_ratio"}, "profile": {"profile", "prompt"}, "roofline": {"device", "prompt"},
        "engine": {"law", "prompt"},
    }[kind]  # fmt: skip


def test_shapes_are_listed() -> None:
    heads = {f"{kind}:SHAPE" for kind in draft_heads.ABOUT}
    assert {*listing.lines("shapes")} == {*PRESETS} | heads
    assert f"layers          {PRESETS['t5-large'].layers}\n" in said("shapes", "t5-large")
    assert "parameters      13015864320\n" in said("shapes", "llama-2-13b")
    for name, line in listing.lines("shapes").items():
        assert name in heads or line.startswith(f"{PRESETS[name].parameters:,} parameters")
    assert "(36,625,603,584 active)" in listing.lines("shapes")["deepseek-v3"]
    assert "experts.count          256\n" in said("shapes", "deepseek-v3")
    assert listing.lines("shapes")["deepseek-r1"].endswith(", with sparse experts and latent attention, layers in float8")
    assert listing.lines("shapes")["gpt-oss-20b"].endswith(", with sparse experts and a sliding window, experts in mxfp4")


@pytest.mark.parametrize(("name", "stored"), [
    ("deepseek-r1", "layers in float8 (8.002 bits per weight); embedding, head, routers and norms in bfloat16; published: "),
    ("mtp:deepseek-v3", "layers in float8 (8.002 bits per weight); embedding, head, routers and norms in bfloat16; published: "),
    ("gpt-oss-120b", "experts in mxfp4 (4.25 bits per weight); all else in bfloat16; published: quantization_config of its "),
    ("eagle3:gpt-oss-120b", "bfloat16 (assumed: 16 bits, as served)\n"),
    ("llama-3.1-8b", "bfloat16 (assumed: 16 bits, as served)\n"),
])  # fmt: skip
def test_shapes_say_the_type_of_their_weights(name: str, stored: str) -> None:
    (line,) = [each for each in said("shapes", name).splitlines() if each.startswith("stored as")]
    assert f"{line.removeprefix('stored as').strip()}\n".startswith(stored)


def test_draft_heads_are_described_by_kind_and_target() -> None:
    text = said("shapes", "eagle3:llama-3.1-8b")
    for line in ("parameters              424689664\n", "memory                  0.85 GB\n"):
        assert line in text
    for name, words in {
        "eagle3:llama-3.1-9b": "eagle3:llama-3.1-9b: unknown target shape 'llama-3.1-9b'; did you mean llama-3.1-8b",
        "eagle4:llama-3.1-8b": "unknown shape 'eagle4:llama-3.1-8b'",
        "medusa:vicuna-7b:3": "medusa:vicuna-7b:3: a vocabulary is not used by draft head medusa",
    }.items():
        with pytest.raises(ParameterError, match=f"^{re.escape(words)}"):
            listing.details("shapes", name)


def test_devices_list_published_values() -> None:
    assert {*listing.lines("devices")} == {*DEVICES}
    for name, each in DEVICES.items():
        text = said("devices", name)
        origin = "reported" if name == "h20" else "published"  # its vendor publishes no data sheet of it
        assert text.startswith(f"# {origin}\n")
        assert Device(**tomllib.loads(text)) == each
        assert f"({origin})" in listing.lines("devices")[name]


def test_printed_scenario_is_a_valid_file() -> None:
    for name in scenario_file.names():
        tables = tomllib.loads(said("scenarios", name))
        assert tables == scenario_file.load(name)
        Grid(tables)


def test_method_description_lists_required_costs() -> None:
    """`cost_ratio` is required, except where early layers of the large model replace the small model."""
    unless = ", except with an exit_layer: the draft is then the large model's first layers"
    lines = {name: said("methods", name).splitlines() for name in ("bild", "speculative", "hierarchical", "autoregressive")}
    assert f"cost_ratio  required{unless}" in lines["bild"]
    required = {"speculative": ["cost_ratio"], "hierarchical": ["medium_cost_ratio", "cost_ratio"], "autoregressive": []}
    for name, keys in required.items():
        assert sorted(line for line in lines[name] if "cost_ratio  " in line) == sorted(f"{key}  required" for key in keys)
    for name, found in lines.items():
        assert "[cost] (`sim ls costs`)" in found
        assert any(line in ("[outcomes]", "[outcomes]: none") for line in found), name


@pytest.mark.parametrize(
    ("what", "name", "message"),
    [
        ("methods", "bidl", "unknown method 'bidl'; did you mean bild?"),
        ("outcomes", "treshold", "unknown outcomes 'treshold'; did you mean thresholds?"),
        ("scenarios", "skip-decode", "unknown scenario 'skip-decode'; did you mean skipdecode?"),
        ("costs", "propagatoin", "unknown cost 'propagatoin'; did you mean propagation?"),
        ("shapes", "t5-larg", "unknown shape 't5-larg'; did you mean t5-large?"),
        ("devices", "a1000", "unknown device 'a1000'; did you mean a100?"),
        ("published", "ppd-table-9", "unknown published 'ppd-table-9'; did you mean ppd-table-"),
        ("method", "bild", "unknown list 'method'; did you mean methods?"),
    ],
)
def test_unknown_entries_are_refused(what: str, name: str, message: str) -> None:
    done = CliRunner().invoke(app, ["ls", what, name])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    with pytest.raises(ParameterError, match=re.escape(message)):
        listing.details(what, name)


def test_own_profile_is_described_by_its_path(tmp_path: Path) -> None:
    own = replace(profile_files.load("cpu-llama-68m"), name="mine", notes=("timed at home",))
    path = profile_files.save(own, tmp_path)
    told = said("profiles", str(path))
    assert "timed at home" in told
    assert own.coverage() in told
    assert said("profiles", "cpu-llama-68m").splitlines()[:8] == told.splitlines()[:8]
    path.with_suffix(".parquet").unlink()
    done = CliRunner().invoke(app, ["ls", "profiles", str(path)])
    assert (done.exit_code, done.stderr) == (2, "error: mine.json: its table mine.parquet is missing from the same folder\n")


def test_help_names_every_list() -> None:
    told = " ".join(CliRunner().invoke(app, ["ls", "--help"]).stdout.split())
    assert all(what in told.split("Options")[0].split("Arguments")[1] for what in listing.LISTS)
