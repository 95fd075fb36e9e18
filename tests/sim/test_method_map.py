"""`sim advise --map`: cells are what advice says, ties are of ratios on common draws, and every bad input is one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner, Result

import sim
from model.advice import rank_draws
from model.base.checks import ParameterError
from model.engines import law_costs
from model.methods import registry
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative.algorithm import Parameters as Speculative
from sim.advice.other_methods import DRAWS, MethodSpeed, gpu_ms_per_token
from sim.commands.sim_app import app
from sim.maps import map_schema
from sim.maps.method_map import MethodCell, MethodMap, ratio_to

PLACE: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "draft": "llama-3.2-1b"}
SAID: dict[str, Any] = {
    **PLACE, "gpus": 3, "match_rate": (0.4, 0.6), "rank_rates": [[0.62, 0.13, 0.06]], "rank_drafts": 500, "lossy": True,
    "block_acceptance": [0.7, 0.72, 0.74], "draft_length": [1, 2, 3, 5],
}  # fmt: skip
BATCHES, CONTEXTS = [1, 16, 256], [1000, 16000]
WORDS = (
    "--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "llama-3.2-1b", "--rank-rates", "0.6,0.2,0.1", "--batch", "1,8", "--map",
    "--draft-length", "1,3",
)  # fmt: skip


def called(*words: str) -> Result:
    return CliRunner().invoke(app, ["advise", *words])


@pytest.fixture(scope="module")
def found() -> MethodMap:
    return sim.method_map(CONTEXTS, **SAID, batch=BATCHES)


# --- Cells ---


def test_cells_are_what_advice_says_there(found: MethodMap) -> None:
    """Every method at every batch and context, by another call for each context."""
    for context in CONTEXTS:
        batches = [each.batch for each in found.cells if each.context == context and each.fits]
        advice = sim.advise(**SAID, batch=batches, context=context)
        for cell in (each for each in found.cells if each.context == context and each.fits):
            mine = {each.row["method"]: each.row for each in cell.speeds}
            theirs = [row for row in advice.rows if row["batch"] == cell.batch]
            assert {*mine} == {row["method"] for row in theirs}
            for method, row in mine.items():
                (same,) = [each for each in theirs if each["method"] == method and each["setting"] == row["setting"]]
                for name in ("speedup", "speedup_low", "speedup_high", "tpot_ms", "gpus", "tokens_per_s_per_gpu"):
                    expected = same[name] if method != "autoregressive" or not name.startswith("speedup_") else None
                    assert row[name] == (None if expected is None else pytest.approx(expected, rel=1e-9)), (method, name)
                assert row["speedup"] == max(each["speedup"] for each in theirs if each["method"] == method)
                assert gpu_ms_per_token(row) == pytest.approx(1e3 / same["tokens_per_s_per_gpu"])


def test_all_methods_that_can_be_proposed_are_there(found: MethodMap) -> None:
    labels = {each.label for each in found.cells[0].speeds}
    assert labels == {
        "plain decoding", "speculative", "AMUSD", "DSI", "PEARL", "PPD", "SSD", "trees", "block verification", "early exit",
        "SkipDecode",
    }  # fmt: skip
    known = {each.row["method"] for each in found.cells[0].speeds} | {name for name, _ in found.left_out} | {"speculative", "tree"}
    assert known - {"block verification"} >= {*registry.names()} - {"beam"}


def test_what_does_not_fit_the_memory_has_no_speed(found: MethodMap) -> None:
    capacity = {context: sim.advise(**PLACE, acceptance=0.7, batch=[1], context=context).situation.capacity for context in CONTEXTS}
    for cell in found.cells:
        most = capacity[cell.context]
        assert most is not None
        assert cell.fits == (cell.batch <= most)
    assert [each.fits for each in found.cells] == [True, True, True, True, True, False]
    empty = [row for row in found.rows if not row["fits"]]
    assert [(row["batch"], row["context"], row["method"]) for row in empty] == [(256, 16000, None)]


def test_gpu_time_is_units_times_time_per_token(found: MethodMap) -> None:
    units = {"PEARL": 2, "AMUSD": 2, "DSI": 3, "PPD": 3, "trees": 1, "speculative": 1, "plain decoding": 1}
    for row in found.rows:
        if row["fits"] and row["label"] in units:
            assert row["gpus"] == units[row["label"]]
            assert row["gpu_ms_per_token"] == pytest.approx(row["gpus"] * row["tpot_ms"] / row["batch"])


def test_a_cell_does_not_depend_on_the_others(found: MethodMap) -> None:
    """Neither on their number nor on their order: a map of one cell, and one whose axes are turned round."""
    turned = sim.method_map(CONTEXTS[::-1], **SAID, batch=BATCHES[::-1])
    assert [(each.batch, each.context) for each in turned.cells] == [(each.batch, each.context) for each in found.cells]
    assert turned.rows == found.rows
    alone = sim.method_map([16000], **SAID, batch=[16])
    cell = next(each for each in found.cells if (each.batch, each.context) == (16, 16000))
    for one, other in zip(alone.cells[0].speeds, cell.speeds, strict=True):
        assert one.row["setting"] == other.row["setting"]
        assert one.draws == pytest.approx(other.draws)


# --- The fastest, and ties ---


def test_the_fastest_is_never_slower_than_plain_decoding(found: MethodMap) -> None:
    for cell in found.cells:
        if cell.fits:
            assert cell.fastest.row["speedup"] >= 1
            assert cell.without("plain decoding").fastest.row["speedup"] <= cell.fastest.row["speedup"]
    poor = sim.method_map([1000], **PLACE, acceptance=0.02, batch=[1, 64])
    assert {cell.fastest.label for cell in poor.cells} == {"plain decoding"}
    assert "plain decoding in 2 of 2 cells (1.00x)" in poor.verdict


@given(st.data())
def test_without_a_method_the_map_is_never_faster(found: MethodMap, data: st.DataObject) -> None:
    cell = data.draw(st.sampled_from(found.fitting))
    before, least = cell.fastest.row["speedup"], gpu_ms_per_token(cell.cheapest.row)
    labels = [each.label for each in cell.speeds]
    for label in data.draw(st.lists(st.sampled_from(labels), unique=True, max_size=len(labels) - 1)):
        cell = cell.without(label)
        assert label not in {each.label for each in cell.speeds}
        assert cell.fastest.row["speedup"] <= before
        assert gpu_ms_per_token(cell.cheapest.row) >= least
        before, least = cell.fastest.row["speedup"], gpu_ms_per_token(cell.cheapest.row)


def speed(label: str, draws: Any) -> MethodSpeed:
    values = np.asarray(draws, dtype=np.float64)
    row = {"method": label, "speedup": float(np.median(values)), "gpus": 1, "tpot_ms": 1.0, "batch": 1}
    return MethodSpeed(row, 1000, values, 0.0)


def test_ties_are_of_ratios_on_common_draws() -> None:
    """What both methods share cancels: 5 % between them is sure although each is known within a factor of 1.5."""
    shared = np.exp(np.random.default_rng(7).normal(0, 0.4, DRAWS))
    quiet = np.zeros(DRAWS)
    best, near = speed("best", 2.1 * shared), speed("near", 2.0 * shared)
    assert MethodCell(1, 1000, (best, near), quiet).tied == ()
    assert ratio_to(near, best, quiet) == pytest.approx((2 / 2.1, 2 / 2.1))
    shuffled = replace(near, draws=np.roll(near.draws, 1))
    assert [each.label for each in MethodCell(1, 1000, (best, shuffled), quiet).tied] == ["near"]
    low, high = ratio_to(shuffled, best, quiet)
    assert low < 1 < high
    # Errors of a measurement of 10 % make 5 % unsure.
    assert [each.label for each in MethodCell(1, 1000, (best, near), np.full(DRAWS, 0.1)).tied] == ["near"]


def test_an_interval_of_the_ratio_holds_the_ratio_as_often_as_it_says() -> None:
    """80 % of further draws of the same kind lie inside, within the error of 64 draws (probability of a false alarm below 1e-3)."""
    random = np.random.default_rng(3)
    one, other = (np.exp(random.normal(0, 0.2, 200_000)) for _ in range(2))
    low, high = ratio_to(speed("a", one[:DRAWS]), speed("b", other[:DRAWS]), np.zeros(DRAWS))
    inside = float(np.mean((one / other > low) & (one / other < high)))
    assert abs(inside - 0.8) < 3.3 * np.sqrt(0.8 * 0.2 / DRAWS)


def test_draws_of_all_methods_are_of_the_same_inputs(found: MethodMap) -> None:
    """Drafts by token are evaluated in advice by other code: with the closed form of the method itself, draw i is the same."""
    said, cell = found.situation, found.cells[1]
    mine = next(each for each in cell.speeds if each.label == "speculative")
    rates = said.cases[0].draws
    laws = [Rounds.by_draft_position(rates[at % len(rates)]) for at in range(DRAWS)]
    prices = law_costs.steady_prices(said.law, [cell.batch], [cell.context], draws=DRAWS)
    of = registry.method("speculative").steady_state
    assert of is not None
    times = of(Speculative(32, mine.row["draft_length"]), laws, prices)
    assert mine.draws == pytest.approx((prices.verify(1) / times)[:, 0])
    tree = next(each for each in cell.speeds if each.label == "trees")
    assert np.corrcoef(np.log(tree.draws), np.log(mine.draws))[0, 1] > 0.5  # also their ranks and acceptances are one draw


# --- Ranks and blocks ---


def test_trees_are_larger_in_smaller_batches_and_never_slower_than_the_chain() -> None:
    """A tree of one candidate at each depth is a chain, whose acceptance is the rate of the first candidates."""
    found = sim.method_map([1000], **PLACE, rank_rates=[[0.6, 0.2, 0.1]], batch=[1, 8, 64])
    nodes = []
    for cell in found.cells:
        by_label = {each.label: each.row for each in cell.speeds}
        nodes.append(int(by_label["trees"]["setting"].split()[0]))
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-1]
    chain = sim.method_map([1000], **PLACE, rank_rates=[[0.6]], batch=[1]).cells[0]
    by_label = {each.label: each.row for each in chain.speeds}
    same = sim.method_map([1000], **PLACE, acceptance=0.6, batch=[1]).cells[0]
    assert by_label["speculative"]["speedup"] == pytest.approx(
        next(each.row["speedup"] for each in same.speeds if each.label == "speculative")
    )


def test_ranks_have_the_sampling_error_of_their_drafts() -> None:
    """Rates of one depth have a Dirichlet distribution, whose first component is a beta distribution."""
    drawn = rank_draws.of_rates([[0.6, 0.2], [0.5, 0.1]], 200)
    first = np.array([table[0][0] for table in drawn.draws])
    assert stats.kstest(first, stats.beta(120.5, 80 + 1.0).cdf).pvalue > 1e-3
    second = np.array([table[1][0] for table in drawn.draws])  # 160 of 200 drafts are right down to it
    assert stats.kstest(second, stats.beta(80.5, 80 + 1.0).cdf).pvalue > 1e-3
    assert all(sum(row) <= 1 for table in drawn.draws for row in table)
    assert rank_draws.of_rates([[0.6, 0.2]]).draws[0][5] == (0.6, 0.2)


def test_acceptance_by_block_below_that_by_token_is_noted() -> None:
    notes = sim.method_map([1000], **PLACE, acceptance=0.8, block_acceptance=[0.7, 0.7], batch=[1]).situation.notes
    assert any("at draft position 1, which no draft has on the same inputs" in each for each in notes)
    above = sim.method_map([1000], **PLACE, acceptance=0.6, block_acceptance=[0.6, 0.65], batch=[1]).situation.notes
    assert not any("by block" in each for each in above)


# --- The command ---


def test_document_fits_its_schema_and_files_hold_the_same(tmp_path: Path) -> None:
    done = called(*WORDS, "--contexts", "1k,8k", "--json", "-o", str(tmp_path / "map"))
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    jsonschema.validate(document, map_schema.schema())
    assert {(row["batch"], row["context"]) for row in document["table"]} == {(b, c) for b in (1, 8) for c in (1024, 8192)}
    assert json.loads((tmp_path / "map.json").read_text()) == document
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")
    assert json.loads(CliRunner().invoke(app, ["schema", "map"]).stdout) == map_schema.schema()
    printed = called(*WORDS, "--contexts", "1k,8k")
    assert document["verdict"].split(";")[0] in " ".join(printed.stdout.split())
    assert max(map(len, printed.stdout.splitlines())) <= 120


def test_contexts_without_a_choice_are_those_that_the_model_knows() -> None:
    contexts = {each.context for each in sim.method_map(**PLACE, acceptance=0.7, batch=[1], draft_length=[2]).cells}
    assert contexts == {1024, 8192, 65536}
    short = sim.method_map(model="llama-2-7b", gpu="h100", draft="llama-68m", acceptance=0.7, batch=[1], draft_length=[2])
    assert {each.context for each in short.cells} == {1024}
    assert sim.method_map([8192], **PLACE, acceptance=0.7, batch=[1]).cells[0].context == 8192


CHANGES: dict[str, tuple[str, ...]] = {
    "--rank-rates": ("--rank-rates", "0.5,0.2/0.4,0.2/0.4,0.2"), "--rank-drafts": ("--rank-drafts", "100"),
    "--block-acceptance": ("--block-acceptance", "0.7,0.8"), "--contexts": ("--contexts", "2k"),
}  # fmt: skip


@pytest.mark.parametrize("option", CHANGES)
def test_every_option_of_the_map_changes_it(option: str) -> None:
    tables = []
    for more in ((), CHANGES[option]):
        words = [*WORDS, "--json"]
        if option == "--rank-rates" and more:
            del words[words.index("--rank-rates") : words.index("--rank-rates") + 2]
        if option != "--contexts" or not more:
            words += ["--contexts", "1k"]
        done = called(*words, *more)
        assert done.exit_code == 0, done.output
        tables.append(json.loads(done.stdout)["table"])
    assert tables[0] != tables[1]
    plain = called(*[each for each in WORDS if each != "--map"], "--json")
    assert json.loads(plain.stdout)["kind"] == "advice"


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--contexts", "8q"), "contexts must be comma-separated whole numbers, such as 1k,8k,64k (k: 1024), got '8q'"),
    (("--contexts", ""), "contexts must be comma-separated"), (("--contexts", "0"), "contexts must be"),
    (("--contexts", "999999999999k"), "contexts must be"), (("--context", "1000"), "--context is not used with --map"),
    (("--rate", "3"), "--rate is not used with --map"), (("--slo-tpot", "20ms"), "--slo-tpot is not used with --map"),
    (("--settings", "vllm"), "--settings are of one method"), (("--rank-drafts", "0"), "rank_drafts must be"),
    (("--acceptance", "0.5,0.6"), "--acceptance must be one value or one range with --map"),
    (("--block-acceptance", "0.5,1.5"), "block_acceptance"), (("--batch", "100000"), "batch must be at most"),
    (("--block-acceptance", "a"), "block_acceptance must be comma-separated"),
    (("--batch", ",".join(map(str, range(1, 202))), "--contexts", "1,2"), "at most 400 cells, got 201 batches x 2 contexts"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    done = called(*WORDS, *words)
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(("rates", "message"), [
    ("0.6,0.5", "rank_rates[0] must sum to at most 1, got 1.1"), ("0.6,-0.1", "rank_rates[0]"), ("nan", "rank_rates[0]"),
    ("0.6,/0.5", "rank_rates must be comma-separated rates by rank"), ("a", "rank_rates must be comma-separated rates by rank"),
    ("/".join(["0.5"] * 65), "rank_rates must have 1 to 64 depths"), (",".join(["0.01"] * 65), "must have 1 to 64 rates"),
])  # fmt: skip
def test_bad_rank_rates_are_one_line(rates: str, message: str) -> None:
    done = called("--model", "llama-3.1-8b", "--gpu", "h100", "--map", "--rank-rates", rates)
    assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
    assert message in done.output


def test_options_of_a_map_need_it_and_ranks_their_rates() -> None:
    for words, message in (
        (("--contexts", "1k"), "--contexts are those of a map; add --map"),
        (("--rank-drafts", "9"), "--rank-drafts is the number of drafts of --rank-rates"),
    ):
        done = called("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", *words)
        assert (done.exit_code, done.output.count("\n")) == (2, 1)
        assert message in done.output
    with pytest.raises(ParameterError, match="--contexts must have at least one"):
        sim.method_map([], **PLACE, acceptance=0.7)
    with pytest.raises(ParameterError, match="acceptance is required"):
        sim.method_map([1000], **PLACE)
    with pytest.raises(ParameterError, match="batch must be at most 4, the sequences whose cache fits"):
        sim.method_map([100_000, 120_000], **PLACE, acceptance=0.7, batch=[64])


def test_a_map_of_36_cells_takes_seconds() -> None:
    start = time.monotonic()
    made = sim.method_map([2**power for power in range(10, 16)], **SAID, batch=[1, 2, 4, 8, 16, 32])
    assert len(made.cells) == 36
    assert time.monotonic() - start < 30  # 3 s on two cores
