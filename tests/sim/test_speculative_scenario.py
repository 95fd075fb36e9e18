"""Speculative decoding in scenarios: every law in three views, laws and costs by method, and figures of engines."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import dependent_acceptance
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from model.published import deck_analysis
from sim.commands.sim_app import app
from sim.runs import run_report as reports
from sim.runs import sweep
from sim.runs.sweep import resolve
from sim.scenarios.grid import Grid

TOKENS = 24
METHOD = {"name": "speculative", "layers": 8, "draft_length": 3}
RECORDS = [[(7 * i + 3 * j) % 5 for j in range(TOKENS + i)] for i in range(6)]

LAWS: list[dict[str, Any]] = [
    {"kind": "iid", "acceptance_rate": 0.7},
    {"kind": "iid", "acceptance_rate": 0.0},
    {"kind": "iid", "acceptance_rate": 1.0},
    {"kind": "markov", "acceptance_rate": 0.7, "correlation": 0.4},
    {"kind": "by-position", "acceptance_rates": np.linspace(0.2, 0.9, TOKENS).tolist()},
    {"kind": "by-draft-position", "acceptance_rates": [0.9, 0.6, 0.3]},
    {"kind": "shared-rate", "acceptance_rate": 0.7, "concentration": 4},
    {"kind": "shared-rate", "acceptance_rate": 0.7, "concentration": 0},
    {"kind": "replay", "records": [[length > 1 for length in record[:TOKENS]] for record in RECORDS]},
    {"kind": "rounds", "lengths": [[length + 1 for length in record] for record in RECORDS]},
    {"kind": "reported", "engine": "vllm", "draft_length": 5, "rate": 0.6},
]


def tables(**sections: Any) -> dict[str, Any]:
    """A small scenario, with sections replaced."""
    base: dict[str, Any] = {
        "scenario": {"name": "small", "tokens": TOKENS, "replications": 4096, "event_replications": 60},
        "method": [METHOD], "outcomes": LAWS[0], "cost": {"cost_ratio": 0.125},
    }  # fmt: skip
    return {**base, **sections}


def view(table: Any, name: str) -> dict[str, Any]:
    """The row of one view of a table with one point."""
    [row] = [row for row in table.to_dicts() if row["view"] == name]
    return dict(row)


@lru_cache(maxsize=len(LAWS))
def spread_of(index: int) -> dict[str, float]:
    """Deviations of a decoding's rounds and operations under a law, by the theory: of times that are just these.

    Where drafts cost nothing the time is rounds; where each token of a pass costs what a pass does, and a draft pass a quarter of
    that, it is operations.
    """
    flat, counted = ({"cost_ratio": 0.0}, {"cost_ratio": 0.25, "verify_cost": [[1, 1.0], [4, 4.0]]})
    rows = [sim.run(tables(outcomes=LAWS[index], cost=cost), views=["formula"]).row(0, named=True) for cost in (flat, counted)]
    return {name: row["latency_sd_layers"] / METHOD["layers"] for name, row in zip(("rounds", "operations"), rows, strict=True)}


@pytest.mark.parametrize("index", range(len(LAWS)), ids=[f"{law['kind']}-{index}" for index, law in enumerate(LAWS)])
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_three_views_of_every_law(index: int, placement: str) -> None:
    """Events equal paths on every decoding; the paths' means are within 5 standard errors (one in 1.7 million)."""
    method = {**METHOD, "placement": placement}
    cost = {"cost_ratio": 0.125, "verify_cost": [[1, 1.0], [2, 1.25], [4, 1.5]], "operations_ratio": 0.25}
    cost |= {"link": 0.5} if placement == "separate" else {}
    table = sim.run(tables(outcomes=LAWS[index], method=[method], cost=cost))
    formula, paths, events = (view(table, name) for name in ("formula", "paths", "events"))
    assert events["paths_difference"] == 0.0
    error = paths["latency_sd_layers"] / 4096**0.5
    assert paths["latency_layers"] == pytest.approx(formula["latency_layers"], abs=5 * error + 1e-9)
    assert paths["busy_layers"] == pytest.approx(formula["busy_layers"], abs=5 * error + 1e-9)
    errors = {name: 5 * spread / 4096**0.5 + 1e-9 for name, spread in spread_of(index).items()}
    rounds, expected = (TOKENS / row["tokens_per_round"] for row in (paths, formula))
    assert rounds == pytest.approx(expected, abs=errors["rounds"])
    done, expected = (TOKENS * row["operations_per_token"] for row in (paths, formula))
    assert done == pytest.approx(expected, abs=errors["operations"])
    assert (formula["reserved_units"], events["peak_units"]) == (2, 1) if placement == "separate" else (1, 1)


@pytest.mark.parametrize("draft_length", [0, 1, 3, TOKENS - 1, TOKENS, 40])
def test_formula_is_for_the_exact_number_of_tokens(draft_length: int) -> None:
    table = sim.run(tables(method=[{**METHOD, "draft_length": draft_length}], cost={"cost_ratio": 0.3}), views=["formula"])
    row = view(table, "formula")
    assert row["speedup"] == pytest.approx(float(speculative.finite_speedup(TOKENS, 0.7, draft_length, 0.3)), rel=1e-12)
    assert TOKENS / row["tokens_per_round"] == pytest.approx(float(speculative.target_runs(TOKENS, 0.7, draft_length)), rel=1e-12)


def test_a_verify_cost_slows_the_passes_of_its_width() -> None:
    flat = sim.run(tables(), views=["formula", "events"])
    curve = {"cost_ratio": 0.125, "verify_cost": [[1, 2.0], [4, 2.0]]}
    assert sim.run(tables(cost=curve), views=["formula", "events"])["latency_layers"].equals(flat["latency_layers"])
    steep = sim.run(tables(cost={**curve, "verify_cost": [[1, 1.0], [4, 4.0]]}), views=["formula", "events"])
    assert (steep["latency_layers"] > flat["latency_layers"]).all()


def test_mixed_with_predictive_pipelined_and_plain_decoding() -> None:
    """Each method with its outcomes: one law per kind in [outcomes], or [method.outcomes]."""
    ppd = {"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 2}
    plain = {"name": "autoregressive", "layers": 8}
    match = {"kind": "iid", "match_rate": 0.5}
    by_name = sim.run(tables(method=[plain, ppd, METHOD], outcomes={"match": match, "accept": LAWS[0]}))
    own = sim.run(tables(method=[plain, {**ppd, "outcomes": match}, {**METHOD, "outcomes": LAWS[0]}]))
    shared = [name for name in by_name.columns if name not in ("outcomes",)]
    assert by_name.select(shared).equals(own.select(shared))
    assert by_name["method"].unique(maintain_order=True).to_list() == ["autoregressive", "ppd", "speculative"]
    alone = sim.run(tables())
    mixed = by_name.filter(by_name["method"] == "speculative")
    for name in ("latency_layers", "busy_layers", "speedup", "mean_busy_units", "tokens_per_round", "acceptance_rate"):
        assert mixed[name].to_list() == alone[name].to_list()  # the same draws, with or without other methods
    assert mixed["match_rate"].null_count() == 3


@pytest.mark.parametrize(("form", "exit_layer"), [("nested", 2), ("flat", 2), ("literal", 4), ("eager", 4)])
def test_draft_costs_do_not_affect_other_methods(form: str, exit_layer: int) -> None:
    ppd = {"name": "ppd", "layers": 8, "exit_layer": exit_layer, "candidates": 2, "form": form}
    match = {"kind": "iid", "match_rate": 0.5}
    cost = {"cost_ratio": 0.125, "verify_cost": [[1, 1.0], [4, 2.0]]}
    mixed = sim.run(tables(method=[ppd, METHOD], outcomes={"match": match, "accept": LAWS[0]}, cost=cost))
    alone = sim.run(tables(method=[ppd], outcomes=match, cost={}))
    names = ["view", "latency_layers", "busy_layers", "mean_busy_units_per_run", "reserved_units", "contended", "paths_difference"]
    assert mixed.filter(mixed["method"] == "ppd").select(names).equals(alone.select(names))
    assert alone["view"].to_list() == ["formula", "paths", "events"]


def test_method_may_have_separate_costs() -> None:
    methods = [{**METHOD, "cost": {"cost_ratio": ratio}} for ratio in (0.05, 0.2)]
    table = sim.run({key: value for key, value in tables(method=methods).items() if key != "cost"}, views=["formula"])
    assert table["cost_ratio"].to_list() == [0.05, 0.2]
    assert table["speedup"].to_list() == pytest.approx([float(speculative.finite_speedup(TOKENS, 0.7, 3, c)) for c in (0.05, 0.2)])


def test_paths_into_tables_of_methods() -> None:
    given = tables(method=[{**METHOD, "outcomes": LAWS[0]}, {**METHOD, "draft_length": 5, "outcomes": LAWS[1]}])
    del given["outcomes"]
    # Without a shared table a path sets the key in the tables that have it; with one, in the shared table.
    both = resolve(given, set={"outcomes.acceptance_rate": 0.5})["method"]
    assert [each["outcomes"]["acceptance_rate"] for each in both] == [0.5, 0.5]
    swept = sim.run(given, sweep={"outcomes.acceptance_rate": [0.2, 0.4], "cost.cost_ratio": [0.1]}, views=["formula"])
    assert swept["acceptance_rate"].to_list() == [0.2, 0.4, 0.2, 0.4]
    with pytest.raises(ParameterError, match=r"no \[method.outcomes\] has correlation"):
        resolve(given, set={"outcomes.correlation": 0.5})
    by_name = tables(outcomes={"accept": LAWS[0]})
    assert resolve(by_name, set={"outcomes.accept.acceptance_rate": 0.5})["outcomes"]["accept"]["acceptance_rate"] == 0.5
    assert resolve(given, set={"method.outcomes.trials": 10})["method"][1]["outcomes"]["trials"] == 10


def test_path_may_name_a_method() -> None:
    mixed = resolve("compare", set={"method.speculative.draft_length": 2, "method.ppd.candidates": 1})
    assert [table.get("draft_length") for table in mixed["method"]] == [None, None, 2, None, 4, 4]
    assert [table.get("candidates") for table in mixed["method"]] == [None, 1, None, None, None, None]
    own = resolve("compare", set={"method.speculative.cost.cost_ratio": 0.2, "method.speculative.cost.operations_ratio": 0.1})
    assert [table.get("cost", {}).get("cost_ratio") for table in own["method"][:4]] == [None, None, 0.2, None]
    swept = sim.run("compare", sweep={"method.speculative.draft_length": [1, 2]}, views=["formula"])
    assert swept.filter(swept["method"] == "speculative")["draft_length"].to_list() == [1, 2]
    with pytest.raises(ParameterError, match="method autoregressive takes no draft_length"):
        resolve("compare", set={"method.draft_length": 2})


def test_overridden_rate_loses_trials_and_source() -> None:
    law = {**LAWS[0], "trials": 1000, "source": "measured"}
    own = [{**METHOD, "outcomes": law}]
    for given in (tables(outcomes=law), tables(outcomes={"accept": law}), tables(method=own, outcomes=law)):
        inner = "outcomes.accept" if "accept" in given["outcomes"] else "outcomes"
        path = f"method.{inner}" if "outcomes" in given["method"][0] else inner
        table = sim.run(given, set={f"{path}.acceptance_rate": 0.5}, views=["formula"])
        assert table["outcomes_source"].to_list() == ["assumed"]
        assert table["acceptance_rate_trials"].to_list() == [None]


def test_trials_give_an_input_interval() -> None:
    row = view(sim.run(tables(outcomes={**LAWS[0], "trials": 400}), views=["formula"]), "formula")
    low, high = row["acceptance_rate_low"], row["acceptance_rate_high"]
    assert low < 0.7 < high
    ends = [float(speculative.finite_speedup(TOKENS, rate, 3, 0.125)) for rate in (low, high)]
    assert [row["speedup_input_low"], row["speedup_input_high"]] == pytest.approx(ends)


def test_the_other_name_of_a_draft_length() -> None:
    engine = {"name": "speculative", "layers": 8, "num_speculative_tokens": 3}
    assert Grid(tables(method=[engine])).case(0).parameters == Grid(tables()).case(0).parameters
    swept = resolve(tables(method=[engine]), sweep={"method.draft_length": [1, 2]})
    assert [Grid(swept).case(point).parameters.draft_length for point in range(2)] == [1, 2]
    assert Grid(resolve(tables(), set={"method.num_speculative_tokens": 5})).case(0).parameters.draft_length == 5
    with pytest.raises(ParameterError, match="num_speculative_tokens is another name of draft_length"):
        Grid(tables(method=[{**METHOD, "num_speculative_tokens": 3}]))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "transformers", "llama.cpp"])
def test_engine_figures_convert_back_to_the_acceptance_rate(engine: str) -> None:
    """The rate and length of a simulated run, as each engine prints them, give the law of the run."""
    run = sim.run(tables(scenario={"name": "long", "tokens": 4000, "replications": 4096}), views=["paths"])
    row = view(run, "paths")
    named = {"field": "drafts"} if engine == "sglang" else {}
    rate, length = {"rate": row["draft_acceptance_rate"], **named}, {"length": row["tokens_per_round"]}
    for each in (rate, length):
        law = {"kind": "reported", "engine": engine, "draft_length": 3, **each}
        outcome = Grid(tables(outcomes=law)).case(0).outcome
        assert outcome is not None
        assert outcome.rate == pytest.approx(0.7, abs=1e-3)
        assert outcome.source == f"measured: converted from the output of {engine}"
        assert outcome.note is not None
        assert outcome.note.endswith(f"drafts of 3 -> acceptance_rate {outcome.rate:.4f}")


def test_output_names_the_converted_figures(tmp_path: Path) -> None:
    """The printed figures, and the column with the converted rate."""
    law = {"kind": "reported", "engine": "vllm", "draft_length": 5, "rate": 0.62, "length": 4.1}
    report = sweep.run(tables(outcomes=law, scenario={"name": "said", "tokens": 8, "views": ["formula"]}), out=tmp_path / "run")
    [row] = report.table().collect().to_dicts()
    assert sum(row["acceptance_rate"] ** j for j in range(6)) == pytest.approx(4.1)
    [said] = [line for line in reports.notes(report.table(), report.tables) if "->" in line]
    assert said == row["outcomes_note"]
    assert said.startswith("vllm draft acceptance rate 0.62 and mean acceptance length 4.1, drafts of 5 -> acceptance_rate")
    assert float(said.split()[-1]) == round(row["acceptance_rate"], 4)


def test_rounds_from_files(tmp_path: Path) -> None:
    lengths = [[length + 1 for length in record] for record in RECORDS]
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    lines = [json.dumps({"id": str(index), "acc_head": {"acc_len": record}}) for index, record in enumerate(lengths)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    given = sim.run(tables(outcomes={"kind": "rounds", "lengths": lengths}))
    for law in ({"file": "lengths.json"}, {"file": "log.jsonl", "drafter": "head"}):
        entries = "\n".join(f'{key} = "{value}"' for key, value in law.items())
        (tmp_path / "s.toml").write_text(
            f'[scenario]\nname = "small"\ntokens = {TOKENS}\nreplications = 4096\nevent_replications = 60\n'
            '[[method]]\nname = "speculative"\nlayers = 8\ndraft_length = 3\n[method.outcomes]\n'
            f'kind = "rounds"\n{entries}\n[cost]\ncost_ratio = 0.125\n'
        )
        table = sim.run(tmp_path / "s.toml")
        assert table["latency_layers"].equals(given["latency_layers"])
    assert given["outcomes_source"][0] == "measured: 6 of 6 records"
    settings = {"name": "long", "tokens": TOKENS + 2, "replications": 10}
    longer = sim.run(tables(scenario=settings, outcomes={"kind": "rounds", "lengths": lengths}))
    assert longer["outcomes_source"][0] == "measured: 4 of 6 records"


UNEQUAL = [[(5 * i + 3 * j) % 4 + 1 for j in range(4 + 3 * i)] for i in range(5)]
"""Tokens of rounds of five sequences of 4 to 16 tokens."""


@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_log_is_replayed_in_full(draft_length: int, placement: str) -> None:
    """Over all tokens of the log every view takes the log's rounds, in any order of the sequences."""
    total = sum(map(len, UNEQUAL))
    method = {**METHOD, "draft_length": draft_length, "placement": placement}
    settings = {"name": "log", "tokens": total, "replications": 50, "event_replications": 6}
    table = sim.run(tables(
        outcomes={"kind": "rounds", "lengths": UNEQUAL, "play": "log"}, method=[method], scenario=settings
    ))  # fmt: skip
    rounds = sum(dependent_acceptance.tokens_of_rounds(each, draft_length)[0] for each in UNEQUAL)
    assert table["tokens_per_round"].to_list() == pytest.approx([total / rounds] * 3, rel=1e-12)
    note = table["outcomes_note"][0]
    assert f"; mean of the log: {total / rounds:.4f} tokens per round in drafts of {draft_length}" in note
    assert note.endswith(f"over {total} tokens, all replayed")
    settings["tokens"] = total + 1
    with pytest.raises(ParameterError, match=f"tokens must be at most {total} with play = 'log', those of the log, got"):
        sim.run(tables(outcomes={"kind": "rounds", "lengths": UNEQUAL, "play": "log"}, scenario=settings))


def test_note_names_the_mean_of_replayed_rounds() -> None:
    """The beginnings of the sequences that are long enough: their mean over rounds, the log's mean, and the difference."""
    law = {"kind": "rounds", "lengths": UNEQUAL}
    settings = {"name": "log", "tokens": 10, "replications": 8}
    row = view(sim.run(tables(outcomes=law, scenario=settings), views=["formula"]), "formula")

    def mean(records: list[list[int]]) -> float:
        return sum(map(len, records)) / sum(dependent_acceptance.tokens_of_rounds(each, 3)[0] for each in records)

    long = [each for each in UNEQUAL if len(each) >= 10]
    begun = mean([each[:10] for each in long])
    assert row["tokens_per_round"] == pytest.approx(begun, rel=1e-12)
    alone = np.mean([mean([each]) for each in UNEQUAL])
    assert row["outcomes_note"] == (
        f"rounds: the first 10 tokens of {len(long)} of 5 recorded sequences, with equal weights: {begun:.4f} tokens per round in"
        f" drafts of 3; the log's mean is {mean(UNEQUAL):.4f} over rounds and {alone:.4f} over sequences;"
        f" {mean(long) / mean(UNEQUAL) - 1:+.1%} because shorter sequences are left out, {begun / mean(long) - 1:+.1%} because the"
        f" others end after 10 tokens; play = 'log' with tokens = {sum(map(len, UNEQUAL))} gives the log's mean"
    )
    with pytest.raises(ParameterError, match="unknown play 'logs'; did you mean log"):
        sim.run(tables(outcomes=law | {"play": "logs"}))
    with pytest.raises(ParameterError, match=r"no record covers 17 output positions, .*, or play = 'log'"):
        sim.run(tables(outcomes=law, scenario=settings | {"tokens": 17}))


def test_published_slides_are_replayed_with_their_cost_ratio() -> None:
    table = sim.run("speculative-deck", views=["formula"])
    rows = [row for row in deck_analysis.rows() if row["draft_length"] is not None]
    assert len(rows) == 4
    for row in rows:
        same = row["draft_length"], row["speedup"]
        own = [each for each in table.to_dicts() if (each["draft_length"], each["published_speedup"]) == same]
        rates = {each["method.outcomes.reading"]: each["acceptance_rate"] for each in own}
        assert rates == pytest.approx({"stated": row["acceptance_rate"], "drafted": row["reread_rate"]})
        for each in own:
            wanted = speculative.finite_speedup(128, each["acceptance_rate"], row["draft_length"], row["cost_ratio"])
            assert each["speedup"] == pytest.approx(float(wanted))
            assert each["outcomes_source"].startswith("published: Deck Table 2")


def test_results_do_not_depend_on_workers(tmp_path: Path) -> None:
    """More replications than a block of random draws has, and events in several shards."""
    some = {"name": "s", "tokens": TOKENS, "replications": 4200, "event_replications": 2100}
    for jobs in (1, 2):
        sim.run(tables(scenario=some), out=tmp_path / str(jobs), jobs=jobs)
    for name in ("results.parquet", "accepted.parquet", "distribution.parquet"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_accepted_lengths_are_counted(tmp_path: Path) -> None:
    import polars as pl

    sim.run(tables(), out=tmp_path / "run")
    counts = pl.read_parquet(tmp_path / "run" / "accepted.parquet")
    table = pl.read_parquet(tmp_path / "run" / "results.parquet")
    for name, replications in (("paths", 4096), ("events", 60)):
        own, row = counts.filter(pl.col("view") == name), view(table, name)
        rounds = own["rounds"].sum()
        assert rounds == pytest.approx(TOKENS * replications / row["tokens_per_round"])
        assert (own["accepted"] * own["rounds"]).sum() + rounds == TOKENS * replications  # accepted tokens and the target's token


def test_report_names_methods_with_their_parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "compare", "--replications", "5", "--no-figures", "--sweep", "scenario.tokens=4,8"])
    assert done.exit_code == 0
    names = (" auto", " ppd", " spec", " adapt")
    rows = [line.split("  ")[0].strip() for line in done.stdout.splitlines() if line.startswith(names)]
    labels = ["autoregressive", "ppd, exit_layer 20, candidates 3", "speculative, draft_length 4", "adaptive, policy optimum"]
    assert rows[:8] == [label for label in labels for _ in range(2)]
    assert "…" not in done.stdout


@pytest.mark.parametrize("width", [148, 100, 60])
def test_numbers_of_a_table_are_not_cut(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Methods with long names: words wrap, and on a narrow terminal lines are wider than it."""
    report = sweep.run("speculative-hierarchy", replications=4, out=tmp_path / "run")
    text = io.StringIO()
    reports.show(report, report.frame(), [], Console(file=text, width=width, highlight=False))
    assert "…" not in text.getvalue()
    row = report.frame().filter(pl.col("view") == "paths").row(-1, named=True)
    half, digits = (row["speedup_high"] - row["speedup_low"]) / 2, 4 if width >= 100 else 3
    assert f"{row['speedup']:.{digits}f} ±{half:.{digits}f}" in text.getvalue()


def test_run_without_values_is_explained(tmp_path: Path) -> None:
    """Policies that depend on the decoded sequence have no closed form."""
    method = {"name": "adaptive", "layers": 8, "policy": "optimum"}
    for view, silent in (("formula", True), ("paths", False)):
        report = sweep.run(tables(method=[method]), views=[view], replications=20, out=tmp_path / view)
        text = io.StringIO()
        reports.show(report, report.frame(), [], Console(file=text, width=148))
        assert (reports.NO_CLOSED_FORM in text.getvalue()) == silent


def test_law_of_rounds_follows_from_survival() -> None:
    law = Grid(tables(outcomes=LAWS[5])).case(0).outcome
    assert law is not None
    assert isinstance(law.law, Rounds)
    assert law.law.survival.tolist() == pytest.approx([0.9, 0.54, 0.162])
    assert isinstance(Grid(tables()).case(0).outcomes["accept"].law, Iid)
