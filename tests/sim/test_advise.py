"""`sim advise`: as a user calls it, on the command line and from Python; what is missing or wrong is one line."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import sim
from figures.of_runs import advised_drafts
from model.advice.draft_choice import ratio_interval
from model.base.checks import ParameterError
from model.engines import law_costs, law_fit, step_law, step_terms
from model.engines.cells import Cells
from model.logs.acceptance_record import AcceptanceRecord, dumps, with_intervals
from sim.advice import advice_schema, engine_settings, other_methods
from sim.advice.advice import Advice
from sim.advice.engine_settings import MOST_SEQUENCES, Range, schedule
from sim.advice.option_values import acceptance_of
from sim.commands.sim_app import app

LAW = "sglang-qwen3-235b-a22b"
KEYS = {"verdict", "best", "switch_off_batch", "table", "rests_on", "break_even", "kernels_only"}
ROW = {
    "method", "batch", "draft_length", "speedup", "speedup_low", "speedup_high", "tpot_ms", "tokens_per_s_per_gpu", "best", "tie"
}  # fmt: skip


def called(*words: str) -> Result:
    return CliRunner().invoke(app, ["advise", *words])


@pytest.fixture(scope="module")
def found() -> Advice:
    return sim.advise(engine_law=LAW, batch=[1, 8, 32, 128], draft_length=[1, 2, 3, 4])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Law of an engine whose drafts stop paying: a slow draft and a small arithmetic rate."""
    number, drafted = (each.ravel() for each in np.meshgrid([1.0, 8, 32, 128], [0.0, 1, 3, 5]))
    coefficients = {"weights": 0.01, "ridge_tokens": 120.0, "step": 1e-3, "sequence": 2e-5, "token": 2e-5, "draft_pass": 1.2e-3}
    shape = step_terms.StepShape(number, drafted, drafted, 0 * number)
    seconds = step_terms.step_seconds({name: np.array(each) for name, each in coefficients.items()}, shape, None)
    cells = Cells.of("step_ms", number, drafted, 1e3 * seconds)
    law = law_fit.fit(cells, "dense", model="llama-3.1-8b", tensor_parallel=1)
    return step_law.write(law, tmp_path_factory.mktemp("law") / "dense.json")


# --- The answer ---


def test_json_has_the_keys_and_fits_its_schema() -> None:
    done = called("--engine-law", LAW, "--batch", "1,8", "--draft-length", "1,3", "--json", "--slo-tpot", "20ms")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {*document} >= KEYS
    assert all({*row} >= ROW for row in document["table"])
    jsonschema.validate(document, advice_schema.schema())
    assert document["best"].keys() == {"1", "8"}
    for row in document["table"]:
        assert row["best"] == (document["best"][str(row["batch"])] == row["draft_length"])
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["meets_slo"] == (row["tpot_ms"] <= 20)
    assert {row["kind"] for row in document["rests_on"]} <= {"measured", "published", "assumed", "prior"}


def test_table_agrees_with_the_law(found: Advice) -> None:
    law = step_law.load(LAW)
    for row in found.rows:
        length = [row["draft_length"]]
        cells = Cells.of(law.unit, [row["batch"]], length)
        expected = float(law.predict(cells).values[0])
        assert row["batch"] / row["tpot_ms"] * 1e3 == pytest.approx(expected, rel=1e-6)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(expected, rel=1e-6)
    assert found.table.height == 4 * 5


def test_verdict_says_where_it_pays_and_where_to_switch_off(dense: Path) -> None:
    made = sim.advise(engine_law=dense, acceptance=0.6)
    (case,) = made.cases
    assert case.off.batch is not None
    assert 8 < case.off.batch < 512
    assert re.search(
        r"K = \d is fastest( or tied)? up to \d+ running sequences: \d\.\d\dx at 1, \d\.\d\dx \(80 % interval",
        made.verdict,
    )
    assert re.search(r"it makes no known difference \(break-even at \d+\); above \d+, switch it off", made.verdict)
    low = sim.advise(engine_law=dense, acceptance=0.05)
    assert low.verdict.startswith(
        ("From 1 to 128 running sequences plain decoding is fastest", "From 1 to 128 running sequences it")
    )
    assert set(low.cases[0].best.values()) == {0}
    assert low.cases[0].off.batch == 1
    assert all("without speculative decoding" in low.settings(engine)[-1] for engine in engine_settings.NAMES)


def test_range_is_one_answer_and_a_list_is_cases(dense: Path) -> None:
    ranged = sim.advise(engine_law=dense, acceptance=(0.5, 0.7), batch=[4])
    low, high = (sim.advise(engine_law=dense, acceptance=rate, batch=[4]) for rate in (0.5, 0.7))
    at = {name: {row["draft_length"]: row for row in each.rows} for name, each in (("r", ranged), ("l", low), ("h", high))}
    for length in (1, 3, 5):
        assert at["r"][length]["speedup_low"] < at["l"][length]["speedup"] * 1.1
        assert at["r"][length]["speedup_high"] > at["h"][length]["speedup"] * 0.9
        width = [at[name][length]["speedup_high"] / at[name][length]["speedup_low"] for name in "rl"]
        assert width[0] > width[1]
    both = sim.advise(engine_law=dense, acceptance="0.5,0.7", batch=[4])
    assert [case.acceptance.text for case in both.cases] == ["0.5", "0.7"]
    document = both.document()
    assert [case["acceptance"] for case in document["cases"]] == ["0.5", "0.7"]
    assert both.rows[:9] == low.rows
    jsonschema.validate(document, advice_schema.schema())


def test_what_is_assumed_is_said_and_what_was_given_is_not_called_measured(found: Advice) -> None:
    by_input = {each.input: each for each in found.situation.rests_on}
    assert by_input["acceptance"].kind == "measured"
    assert by_input["round"].kind == "prior"
    assert by_input["draft_pass"].kind == "measured"
    assert by_input["context"].kind == "assumed"
    assert any("no cell of the law is of plain decoding" in note for note in found.situation.notes)
    given = sim.advise(engine_law=LAW, acceptance=0.7, batch=[1])
    assert {each.kind for each in given.situation.rests_on if each.input == "acceptance"} == {"assumed"}


def test_it_prints_on_a_terminal_and_in_a_notebook(found: Advice) -> None:
    printed = str(found)
    assert found.verdict.split(";")[0] in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 120
    for words in ("* best on average, ~ tied", "break-even", "rests on", "measure"):
        assert words in printed
    html = found._repr_html_()
    assert "<strong>" in html
    assert "&lt;" not in found.verdict
    assert found.figure().axes[0].get_ylabel() == "speed-up over plain decoding"


def test_files_are_written_and_hold_the_same(tmp_path: Path) -> None:
    done = called("--engine-law", LAW, "--batch", "1,8", "--json", "-o", str(tmp_path / "advice"))
    assert json.loads((tmp_path / "advice.json").read_text()) == json.loads(done.stdout)
    assert (tmp_path / "advice.svg").read_text().lstrip().startswith("<?xml")


def test_figure_has_the_draft_lengths_of_the_verdict() -> None:
    """K = 4 and K = 2 are each best somewhere, and the verdict names K = 3, which is tied with both."""
    row = {"method": "speculative", "acceptance": "0.7", "speedup": 1.5, "speedup_low": 1.2, "speedup_high": 1.8}
    rows = [{**row, "batch": batch, "draft_length": length, "best": length == best, "advised": length == 3}
            for batch, best in ((1, 4), (8, 2)) for length in (2, 3, 4)]  # fmt: skip

    def shown(of: list[dict[str, Any]]) -> set[str]:
        return {each.get_text() for each in advised_drafts.of_table(of, title="t").axes[0].texts} & {"K = 2", "K = 3", "K = 4"}

    assert shown(rows) == {"K = 3"}
    assert shown([{name: value for name, value in each.items() if name != "advised"} for each in rows]) == {"K = 2", "K = 4"}
    assert shown([each | {"advised": False} for each in rows]) == {"K = 2"}


# --- Kernels, logs, and other uses of the devices ---


@pytest.fixture(scope="module")
def two() -> Advice:
    return sim.advise(
        model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7, engine="vllm", gpus=2, match_rate=0.5, lossy=True,
        batch=[1, 2, 16], draft_length=[1, 3, 5],
    )  # fmt: skip


def test_other_methods_and_uses_are_in_the_same_units(two: Advice) -> None:
    rows = {(row["method"], row["batch"]): row for row in two.others.rows}
    assert {method for method, _ in rows} == {"amusd", "early_exit", "pearl", "ppd", "skipdecode", "ssd"}
    assert {row["exact"] for row in two.others.rows if row["method"] in ("pearl", "ppd")} == {True}
    plain = next(row for row in two.rows if row["method"] == "autoregressive" and row["batch"] == 1)
    for row in rows.values():
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["batch"] * 1e3 / row["tpot_ms"] / row["gpus"])
        if row["batch"] == 1:
            assert row["speedup"] * row["tpot_ms"] == pytest.approx(plain["tpot_ms"], rel=0.03)  # its context grows over the output
    options = {each.option for each in two.alternatives}
    assert {"2 replicas of 1 GPU, plain", "1 replica of 2 GPUs, plain", "PEARL on groups of 2 GPUs"} <= options
    asked = [each for each in two.alternatives if each.asked]
    for each in asked:
        row = next(row for row in two.rows if row["batch"] == each.sequences_per_replica and row["best"])
        assert (each.tpot_ms, each.tokens_per_s_per_gpu) == pytest.approx((row["tpot_ms"], row["tokens_per_s_per_gpu"]))
    assert "not exact" in str(two)
    assert {row["gpus"] for row in two.others.rows if row["method"] in ("pearl", "ppd")} == {2}


PLACE: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpu": "h100", "draft": "llama-3.2-1b", "gpus": 2, "batch": [2], "draft_length": [3]
}  # fmt: skip


def others_of(**more: Any) -> dict[str, dict[str, Any]]:
    return {row["method"]: dict(row) for row in sim.advise(**{"acceptance": 0.7, **PLACE, **more}).others.rows}


def test_several_verifiers_are_proposed_on_all_devices() -> None:
    """DSI needs two replicas of the target and a device for the draft; each further device is one more replica."""
    assert "two replicas of the target" in dict(sim.advise(**{"acceptance": 0.7, **PLACE}).others.left_out)["dsi"]
    three, four = (others_of(gpus=gpus, batch=[1])["dsi"] for gpus in (3, 4))
    assert (three["gpus"], four["gpus"], three["exact"]) == (3, 4, True)
    assert 1 < three["speedup"] <= four["speedup"] * 1.05
    assert four["tokens_per_s_per_gpu"] < three["tokens_per_s_per_gpu"]


def test_drafts_for_several_outcomes_are_priced_as_running_sequences(two: Advice) -> None:
    """A pass of the draft model over all branches of SSD takes as long as one over as many sequences."""
    batches, contexts = np.array([1.0, 16, 64]), np.array([1000.0, 1000, 4000])
    prices = law_costs.steady_prices(two.situation.law, batches, contexts)
    for drafts in (1, 6, 40):
        assert prices.branched(drafts)[0] == pytest.approx(two.situation.law.draft_seconds(drafts * batches, contexts)[0])
    assert (prices.branched(40)[0] > 1.2 * prices.draft[0]).all()
    assert prices.at([2]).branched(6)[0, 0] == prices.branched(6)[0, 2]


def test_a_draw_that_is_the_estimate_gives_the_row(two: Advice) -> None:
    """Draws and rows are evaluated by different code: the closed form of a case with another law, and a run of a scenario."""
    said = two.situation
    exact = replace(said.law, draws={name: np.array([said.law.coefficients.get(name, 0.0)]) for name in said.law.draws})
    for row in other_methods.evaluate(replace(said, law=exact, match_rates=np.array([0.5]))).rows:
        assert row["speedup_low"] is row["speedup_high"] is None  # the draws have neither a spread nor noise
    noisy = replace(exact, draws={**exact.draws, "noise": np.array([0.05])})
    for row in other_methods.evaluate(replace(said, law=noisy)).rows:
        low, high = ratio_interval(np.array([row["speedup"]]), np.array([0.05]), 0.0)
        assert (row["speedup_low"], row["speedup_high"]) == pytest.approx((float(low), float(high)), rel=1e-6)
    assert "no interval: no input" in str(replace(two, others=other_methods.evaluate(replace(said, law=exact))))


@pytest.mark.parametrize(("name", "moves"), [
    ("draft_pass", {"amusd", "pearl", "ssd"}), ("step", {"amusd", "ppd", "early_exit", "skipdecode", "ssd"}),
])
def test_an_uncertain_term_of_the_law_widens_what_it_is_part_of(name: str, moves: set[str], two: Advice) -> None:
    """A pass of the draft is part of PEARL, AMUSD and SSD alone. Layers left out save nothing of an engine's overhead, which also
    changes how far AMUSD drafts during a pass of the target, and what share of its time SSD drafts after a miss."""
    said = two.situation
    draws = {each: np.array([said.law.coefficients.get(each, 0.0)] * 2) for each in said.law.draws}
    draws[name] = draws[name] * [0.5, 4.0]
    rows = other_methods.evaluate(replace(said, law=replace(said.law, draws=draws), batches=(1,), match_rates=np.array([0.5]))).rows
    wide = {row["method"] for row in rows if row["speedup_low"] is not None and row["speedup_high"] > 1.005 * row["speedup_low"]}
    assert wide == moves


@pytest.mark.parametrize(("method", "name", "ends"), [("ppd", "match_rate", (0.3, 0.8)), ("pearl", "acceptance", (0.5, 0.9))])
def test_uncertain_rates_widen_the_intervals_of_the_methods_that_read_them(
    method: str, name: str, ends: tuple[float, float]
) -> None:
    base = {"match_rate": 0.55, "acceptance": 0.7}
    known, ranged = others_of(**base), others_of(**base | {name: ends})
    at_ends = [others_of(**base | {name: each})[method]["speedup"] for each in ends]
    assert at_ends[0] < known[method]["speedup"] < at_ends[1]

    def width(row: dict[str, Any]) -> float:
        return float(row["speedup_high"] / row["speedup_low"])

    assert width(ranged[method]) > 1.1 * width(known[method])
    # 80 % of a uniform rate: a tenth of the range is left out at each end, so that the bounds are near the values at the ends.
    assert ranged[method]["speedup_low"] == pytest.approx(at_ends[0], rel=0.12)
    assert ranged[method]["speedup_high"] == pytest.approx(at_ends[1], rel=0.12)
    (other,) = {"ppd", "pearl"} - {method}
    assert width(ranged[other]) == pytest.approx(width(known[other]), rel=0.01)


def test_match_rate_in_every_form() -> None:
    given = [others_of(match_rate=each)["ppd"]["speedup_low"] for each in ((0.4, 0.6), "0.4..0.6")]
    assert given[0] == given[1]
    wrong = (("0.6..0.4", "write 0.4..0.6"), ("a", "must be a number, or a range"), (1.5, "between 0 and 1"), (True, "must be"))
    for bad, message in wrong:
        with pytest.raises(ParameterError, match=message):
            others_of(match_rate=bad)


def test_four_devices_hold_two_groups_of_two() -> None:
    made = sim.advise(
        model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7, gpus=4, batch=[1, 2, 4], draft_length=[3]
    )
    rows = {row["batch"]: row for row in made.others.rows if row["method"] == "pearl"}
    found = [each for each in made.alternatives if each.option.startswith("PEARL")]
    assert {each.running for each in found} == {4, 8}
    for each in found:
        assert (each.replicas, each.gpus_per_replica) == (2, 2)
        assert each.running == 2 * each.sequences_per_replica
        assert each.tpot_ms == rows[each.sequences_per_replica]["tpot_ms"]
    for each in made.alternatives:
        assert each.tokens_per_s_per_gpu == pytest.approx(each.running * 1e3 / each.tpot_ms / 4)
        assert each.replicas * each.gpus_per_replica == 4


def test_heads_do_not_draft_while_the_target_verifies() -> None:
    made = sim.advise(model="llama-3.1-8b", gpu="h100", draft="EAGLE-3", acceptance=0.7, gpus=2, batch=[1], draft_length=[3])
    assert made.situation.draft == "eagle3:llama-3.1-8b"
    assert "a head needs the target's states" in dict(made.others.left_out)["pearl"]


def test_objective_that_no_choice_keeps_is_said(dense: Path) -> None:
    made = sim.advise(engine_law=dense, acceptance=0.6, batch=[8])
    shortest = min(row["tpot_ms"] for row in made.rows)
    said = sim.advise(engine_law=dense, acceptance=0.6, batch=[8], slo_tpot_ms=0.999 * shortest).verdict
    assert f"no choice keeps TPOT at or below {0.999 * shortest:g} ms: the shortest is {shortest:.3g} ms, of K = " in said


def test_draft_of_a_law_is_kept_and_another_is_refused() -> None:
    made = sim.advise(engine_law="vllm-llama-3.1-8b-eagle3-h100", batch=[1], draft_length=[1, 3])
    assert '"method": "eagle3"' in made.settings("vllm")[-1]
    with pytest.raises(ParameterError, match="--draft must be that of the engine law"):
        sim.advise(engine_law="vllm-llama-3.1-8b-eagle3-h100", draft="llama-3.2-1b")
    sim.advise(engine_law="vllm-llama-3.1-8b-eagle3-h100", draft="EAGLE-3", batch=[1], draft_length=[1])


def test_verdict_names_a_draft_only_where_one_is_best() -> None:
    made = sim.advise(engine_law=LAW, batch=[1, 8, 32, 128], acceptance_by_position=[0.19] * 4)
    (case,) = made.cases
    for length, rows in case.runs:
        assert all((case.choice.best[row] > 0) == (length > 0) for row in rows)


def test_throughput_is_for_each_of_the_devices_of_a_replica() -> None:
    made = sim.advise(engine_law="sglang-deepseek-r1-fp8-b300", batch=[4], draft_length=[2])
    assert {row["gpus"] for row in made.rows} == {8}
    for row in made.rows:
        assert row["tokens_per_s_per_gpu"] == pytest.approx(4 * 1e3 / row["tpot_ms"] / 8)


def test_objective_within_the_uncertainty_is_not_refused(dense: Path) -> None:
    made = sim.advise(engine_law=dense, acceptance=0.6, batch=[1])
    shortest = min(row["tpot_ms"] for row in made.rows)
    low = float(made.cases[0].choice.tpot_interval()[0].min()) * 1e3
    assert low < 0.999 * shortest
    assert sim.advise(engine_law=dense, acceptance=0.6, batch=[1], slo_tpot_ms=0.999 * shortest).situation.slo is not None
    with pytest.raises(ParameterError, match="slo_tpot must be at least"):
        sim.advise(engine_law=dense, acceptance=0.6, batch=[1], slo_tpot_ms=0.99 * low)


def test_lossy_methods_and_missing_inputs_are_named() -> None:
    made = sim.advise(engine_law="vllm-llama-3.1-8b-eagle3-h100", batch=[1])
    assert made.others.rows == ()
    left_out = dict(made.others.left_out)
    assert "--lossy" in left_out["skipdecode"]
    assert "--gpus" in left_out["ppd"]
    assert made.alternatives == ()


def test_kernels_only_is_said() -> None:
    made = sim.advise(model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7, engine="none", batch=[1, 8])
    assert made.document()["kernels_only"] is True
    assert "kernels only" in made.verdict
    with_engine = sim.advise(model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7, batch=[1, 8])
    assert with_engine.document()["kernels_only"] is False
    assert "intervals are those of priors" in with_engine.verdict


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = AcceptanceRecord("vllm", ("v1",), (), draft_length=3, drafts=4000, survival=(0.8, 0.6, 0.4))
    path = tmp_path_factory.mktemp("record") / "vllm.json"
    path.write_text(dumps(with_intervals(made)))
    return path


def test_record_of_a_log_gives_acceptance_up_to_its_draft_length(record: Path) -> None:
    made = sim.advise(model="llama-3.1-8b", gpu="h100", draft="eagle3", log=record, batch=[1])
    assert made.situation.draft_lengths == (1, 2, 3)
    assert made.cases[0].acceptance.kind == "measured"
    assert made.cases[0].choice.lengths[0].tolist() == pytest.approx([1, 1.8, 2.4, 2.8])
    assert made.situation.law.engine == "vllm"
    assert any("longer drafts are left out" in note for note in made.situation.notes)
    own = sim.advise(model="llama-3.1-8b", gpu="h100", draft="eagle3", log=record, acceptance=0.5, batch=[1])
    assert own.cases[0].acceptance.text == "0.5"


VLLM_START = (
    "Initializing a V1 LLM engine with config: model='meta-llama/Llama-3.1-8B-Instruct', speculative_config="
    "SpeculativeConfig(method='{}', model='{}', num_spec_tokens=3), seed=0\n"
)
VLLM_LINE = (
    "SpecDecoding metrics: Mean acceptance length: 2.80, Accepted: 1800 tokens, Drafted: 3000 tokens, Per-position acceptance rate:"
    " 0.800, 0.600, 0.400, Avg Draft acceptance rate: 60.0%\n"
)
HEAD, SMALL = ("eagle3", "yuhuili/EAGLE3-head"), ("draft_model", "meta-llama/Llama-3.2-1B-Instruct")
AT: dict[str, Any] = {"gpu": "h100", "batch": [1]}


def log_of(folder: Path, draft: tuple[str, str]) -> Path:
    path = folder / f"{draft[0]}.log"
    path.write_text(VLLM_START.format(*draft) + VLLM_LINE)
    return path


@pytest.mark.parametrize(("draft", "name"), [(HEAD, "eagle3:llama-3.1-8b"), (SMALL, "llama-3.2-1b")])
def test_model_and_draft_of_a_log_s_server_are_used_and_named(draft: tuple[str, str], name: str, tmp_path: Path) -> None:
    path = log_of(tmp_path, draft)
    made, said = sim.advise(log=path, **AT), sim.advise(log=path, model="llama-3.1-8b", draft=name.partition(":")[0], **AT)
    assert (made.situation.name, made.situation.draft) == ("llama-3.1-8b", name)
    assert made.rows == said.rows
    of_server = {each.input: each.value for each in made.situation.rests_on if each.source == "--log, settings of its server"}
    assert of_server == {
        "model": "llama-3.1-8b (meta-llama/Llama-3.1-8B-Instruct)", "draft": f"{name} ({' '.join(draft)})",
        "draft length of the log": "3",
    }  # fmt: skip
    for engine in engine_settings.NAMES:
        lines = made.settings(engine)
        assert lines[0] == "# names of checkpoints are those that the server of the log printed"
        assert all(any(each in line for line in lines) for each in ("meta-llama/Llama-3.1-8B-Instruct", draft[1]))
        assert not re.search(r"\b(MODEL|DRAFT)\b", " ".join(lines))


def test_what_contradicts_a_log_s_server_is_refused(tmp_path: Path) -> None:
    head, small = (log_of(tmp_path, each) for each in (HEAD, SMALL))
    for path, more, message in (
        (head, {"draft": "llama-3.2-1b"}, r"--draft must be eagle3, that of --log \(eagle3 yuhuili/EAGLE3-head\)"),
        (head, {"draft": "eagle"}, "--draft must be eagle3"),
        (small, {"draft": "llama-3.2-3b"}, "--draft must be llama-3.2-1b"),
        (small, {"draft": "mtp"}, "--draft must be llama-3.2-1b"),
        (head, {"model": "llama-3-8b"}, "--model must be llama-3.1-8b"),
        (head, {"log_draft_length": 4}, "draft_length 4 contradicts"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            sim.advise(log=path, **AT, **more)
    law = "vllm-llama-3.1-8b-eagle3-h100"
    for path, of_law, message in ((small, law, "draft of --engine-law, eagle3"), (head, LAW, "model of --engine-law, qwen3")):
        with pytest.raises(ParameterError, match=f"--log must be of the {message}"):
            sim.advise(log=path, engine_law=of_law, batch=[1])
    sim.advise(log=head, engine_law=law, batch=[1])
    for path, draft in ((head, "p-eagle"), (head, "eagle3:llama-3.1-8b"), (small, "llama-3.2-1b")):
        sim.advise(log=path, draft=draft, **AT)


def test_acceptance_instead_of_a_log_s_own_is_used_and_said(tmp_path: Path, record: Path) -> None:
    """0.8, 0.75 and 0.667 by position are 1 + 0.8 + 0.6 + 0.4 tokens per step; a rate of 0.5 gives 1.88."""
    for log in (log_of(tmp_path, HEAD), record):
        made = sim.advise(log=log, model="llama-3.1-8b", acceptance=0.5, **AT)
        assert made.cases[0].acceptance.point[0] == 0.5
        own = {each.input: each for each in made.situation.rests_on if each.input.startswith("acceptance")}
        assert {name: (each.source, each.kind) for name, each in own.items()} == {
            "acceptance": ("--acceptance", "assumed"), "acceptance (not used)": ("--log", "measured")
        }  # fmt: skip
        (note,) = (each for each in made.situation.notes if each.startswith("acceptance 0.5"))
        assert note.endswith("1.88 tokens per step at K = 3 in place of 2.80")
    law = sim.advise(engine_law=LAW, acceptance=0.5, batch=[1])
    assert any(each.input == "acceptance (not used)" and each.source == f"step law {LAW}" for each in law.situation.rests_on)
    alone = sim.advise(log=record, model="llama-3.1-8b", **AT)
    assert not any("not used" in each.input for each in alone.situation.rests_on)


def test_log_without_a_number_of_drafts_is_refused_with_the_output_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "spec.log").write_text("n_draft = 8\nn_predict = 200\nn_drafted = 240\nn_accept = 150\naccept = 62.500%\n")
    with pytest.raises(ParameterError, match=r"--log has no tokens per step.* llama-server prints it .*or --acceptance$"):
        sim.advise(log=tmp_path / "spec.log", model="llama-3.1-8b", **AT)


def test_drafts_that_have_no_shape_are_said(tmp_path: Path) -> None:
    made = sim.advise(log=log_of(tmp_path, ("ngram", "ngram")), **AT)
    assert made.situation.draft is None
    assert any("the draft of --log (ngram) is none of `sim ls shapes`" in note for note in made.situation.notes)


def test_names_in_settings_are_the_user_s_or_placeholders(dense: Path, tmp_path: Path) -> None:
    given = sim.advise(model="llama-3.1-8b", draft="llama-3.2-1b", acceptance=0.7, **AT).settings("vllm")
    assert [line.partition(":")[0] for line in given[:2]] == [
        "# llama-3.1-8b is a name of `sim ls shapes`", "# llama-3.2-1b is a name of `sim ls shapes`"
    ]  # fmt: skip
    assert "vllm serve llama-3.1-8b " in given[-1]
    head = sim.advise(model="llama-3.1-8b", draft="eagle3", acceptance=0.7, **AT).settings("sglang")
    assert head[0] == "# DRAFT stands for the name of your checkpoint"
    folder = tmp_path / "my models"
    folder.mkdir()
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 128_256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    own = sim.advise(model=str(folder / "config.json"), draft="mtp", acceptance=0.7, **AT).settings("vllm")
    assert shlex.split(own[-1])[2] == str(folder)
    assert len(own) == 1
    for name in ("a b", "1", "x: y", 'q"'):
        lines = engine_settings.lines("tensorrt-llm", "m", "llama-3.2-1b", [Range(1, 8, 2)], checkpoint=name)
        assert f"  speculative_model: {json.dumps(name)}" in lines


def test_context_beyond_the_model_s_is_said() -> None:
    said = {"model": "llama-2-7b", "gpu": "h100", "acceptance": 0.6, "batch": [1], "draft_length": [2]}
    at_most, beyond, drafted = (
        " ".join(sim.advise(**said, **more).situation.notes)
        for more in ({"context": 4096}, {"context": 4097}, {"context": 4096, "draft": "llama-68m"})
    )
    assert "beyond" not in at_most
    assert "4,097 positions is beyond the 4,096 that llama-2-7b was trained for" in beyond
    assert "beyond the 2,048 that the draft llama-68m was trained for" in drafted
    assert "that llama-2-7b was" not in drafted
    with pytest.raises(ParameterError, match=r"--context must be at most 2,048, those of the table of positions of opt-1\.3b"):
        sim.advise(**said | {"model": "opt-1.3b", "context": 2049})


def test_small_devices_are_filled_and_not_more() -> None:
    made = sim.advise(model="llama-3.1-8b", gpu="rtx-4090", draft="eagle3", acceptance=0.7)
    assert made.situation.capacity is not None
    assert max(made.situation.batches) <= made.situation.capacity < 128
    assert any("fit the memory" in note for note in made.situation.notes)
    split = sim.advise(model="llama-3.1-70b", gpu="h100", gpus=4, draft="eagle3", acceptance=0.7, batch=[1])
    assert split.situation.tensor_parallel == 2


def test_arrivals_run_as_many_as_little_s_law_says() -> None:
    made = sim.advise(engine_law=LAW, rate=8.0, prompt=1000, output=200)
    jsonschema.validate(made.document(), advice_schema.schema())
    found = made.arrivals
    assert found is not None
    assert found.best is not None
    assert found.best.draft_length > 0
    for row in found.rows:
        if row.running is not None:
            assert row.running == pytest.approx(8.0 * row.e2e_ms / 1e3)
            assert row.running_low <= row.running <= row.running_high
            assert row.most_requests_per_s > 8
    assert made.situation.batches == found.running
    assert "8 requests/s" in made.verdict
    assert "requests/s, in closed form" in str(made)
    assert any(each.input == "requests" for each in made.situation.rests_on)
    two = sim.advise(engine_law=LAW, rate=8.0, prompt=1000, output=200, tensor_parallel=2, gpus=4).arrivals
    assert two.replicas == 2
    assert two.best.running < found.best.running / 2  # half the requests each, which also end sooner


def test_a_rate_beyond_the_server_is_said() -> None:
    made = sim.advise(engine_law=LAW, rate=1000.0)
    assert made.arrivals.best is None
    assert "no draft length keeps up: at most" in made.verdict
    jsonschema.validate(made.document(), advice_schema.schema())


BAD = [
    ((), "--model is required"),
    (("--model", "llama-3.1-8b"), "--gpu is required"),
    (("--model", "llama-3.1-8b", "--gpu", "h100"), "acceptance is required and has no default"),
    (("--model", "llama-3.1-8b", "--gpu", "h101", "--acceptance", "0.7"), "h100"),
    (("--model", "llama-3.1-9b", "--gpu", "h100", "--acceptance", "0.7"), "did you mean llama-3.1-8b"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "high"), "acceptance must be a number, a range such as 0.6..0.7"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "70"), "acceptance must be between 0 and 1"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--engine", "none"), "--draft is required"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--engine", "vlm"), "did you mean vllm"),
    (("--model", "llama-3.1-70b", "--gpu", "h100", "--acceptance", "0.7"), "give more --gpus or --tensor-parallel"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--draft", "medusa", "--draft-length", "6"),
     "draft_length must be at most 5 with medusa:llama-3.1-8b, a head for each drafted token, got 6"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--draft", "eagle4"), "a head (eagle, eagle3, medusa"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--batch", "100000"), "batch must be at most"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--slo-tpot", "0.1ms"), "slo_tpot must be at least"),
    (("--engine-law", LAW, "--slo-tpot", "20"), "slo_tpot must be a time above 0 with its unit"),
    (("--engine-law", LAW, "--tensor-parallel", "0"), "tensor_parallel must be"),
    (("--engine-law", "sglang-deepseek-r1-fp8-b300", "--tensor-parallel", "4"), "--tensor-parallel must be 8, that of the"),
    (("--engine-law", LAW, "--model", "llama-3.1-8b"), "--model must be qwen3-235b-a22b"),
    (("--engine-law", LAW, "--batch", "one"), "batch must be comma-separated whole numbers"),
    (("--engine-law", LAW, "--rate", "0"), "rate must be between"), (("--engine-law", LAW, "--rate", "-2"), "rate must be between"),
    (("--engine-law", LAW, "--prompt", "100"), "--prompt is used only with --rate"),
    (("--engine-law", LAW, "--rate", "2", "--output", "0"), "output must be"),
    (("--engine-law", LAW, "--rate", "2", "--acceptance", "0.5,0.6"), "one value or one range with --rate"),
    (("--engine-law", LAW, "--draft-length", "0"), "draft_length must be"),
    (("--engine-law", LAW, "--gpus", "0"), "gpus must be"),
    (("--engine-law", LAW, "--seed", "-1"), "seed must be"),
    (("--engine-law", "sglang-deepseek-r1-fp8-b300", "--gpus", "4"), "--gpus must be at least 8, the devices of one replica"),
    (("--engine-law", LAW, "--settings", "trt"), "settings"),
    (("--engine-law", "nothing"), "unknown engine law 'nothing'"),
    (("--engine-law", LAW, "--acceptance", "0.6", "--acceptance-by-position", "0.5,0.4"), "one acceptance is needed"),
    (("--engine-law", LAW, "--log", "nowhere.log"), "nowhere.log"),
    (("--model", "llama-3.1-8b", "--gpu", "h100", "--log", "{}", "--draft-length", "5"), "draft_length must be at most 3, up to"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line(words: tuple[str, ...], message: str, record: Path) -> None:
    done = called(*(word.format(record) for word in words))
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.count("\n") == 1


def test_python_names_unknown_keywords() -> None:
    with pytest.raises(ParameterError, match="did you mean draft_length"):
        sim.advise(draft_lenght=3)


BASE = {
    "--model": "llama-3.1-8b", "--gpu": "h100", "--draft": "eagle3", "--acceptance": "0.7", "--batch": "2", "--draft-length": "2,3"
}  # fmt: skip
ROOFLINE = {"--kernels": "roofline"}
CHANGES: list[tuple[str, dict[str, str], dict[str, str | None]]] = [
    ("--model", {}, {"--model": "qwen3-8b"}), ("--gpu", {}, {"--gpu": "a100"}),
    ("--tensor-parallel", {}, {"--tensor-parallel": "2"}),
    ("--gpus", {}, {"--gpus": "2"}), ("--draft", {}, {"--draft": "llama-3.2-1b"}), ("--engine", {}, {"--engine": "sglang"}),
    ("--engine-law", {}, {"--engine-law": LAW, "--model": None, "--gpu": None, "--draft": None}),
    ("--acceptance", {}, {"--acceptance": "0.6"}),
    ("--acceptance-by-position", {}, {"--acceptance-by-position": "0.7,0.6,0.5", "--acceptance": None}),
    ("--match-rate", {"--gpus": "2"}, {"--match-rate": "0.5"}), ("--batch", {}, {"--batch": "4"}),
    ("--rate", {"--batch": None}, {"--rate": "9"}), ("--prompt", {"--rate": "9", "--batch": None}, {"--prompt": "200"}),
    ("--output", {"--rate": "9", "--batch": None}, {"--output": "90"}),
    ("--draft-length", {}, {"--draft-length": "2"}), ("--context", {}, {"--context": "4000"}),
    ("--slo-tpot", {}, {"--slo-tpot": "0.02s"}), ("--dtype", ROOFLINE, {"--dtype": "float8"}),
    ("--weights", ROOFLINE, {"--weights": "int4"}), ("--kernels", {}, ROOFLINE), ("--seed", {}, {"--seed": "1"}),
    ("--lossy", {}, {"--lossy": ""}), ("--log", {}, {"--log": "RECORD", "--acceptance": None}),
]  # fmt: skip


@pytest.mark.parametrize(("needs", "change"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES])
def test_every_option_changes_the_answer(needs: dict[str, str], change: dict[str, str | None], record: Path) -> None:
    answers = []
    for options in (BASE | needs, BASE | needs | change):
        words = [word for name, each in options.items() if each is not None for word in (name, each) if word]
        done = called(*(str(record) if word == "RECORD" else word for word in words), "--json")
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        answers.append([document[name] for name in ("table", "alternatives", "not_evaluated")])
    assert answers[0] != answers[1]


def test_draft_length_of_a_log_that_does_not_say_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(dumps(AcceptanceRecord("sglang", ("decode",), (), drafts=1000, mean_acceptance_length=2.5)))
    words = ("--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3", "--batch", "1", "--log", str(path))
    done = called(*words)
    assert done.exit_code == 2
    assert "give --log-draft-length" in done.output
    assert called(*words, "--log-draft-length", "3", "--json").exit_code == 0


def test_figures_that_an_engine_prints_are_converted() -> None:
    """Five drafted tokens, 62 % of them accepted: 4.1 tokens per step, the constant rate of which is .845."""
    words = ("--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "llama-3.2-1b", "--batch", "1", "--engine", "vllm", "--json")
    answers = []
    for figures in (("--printed-rate", "0.62"), ("--printed-length", "4.1"), ("--printed-rate", "0.62", "--printed-length", "4.1")):
        done = called(*words, *figures, "--log-draft-length", "5")
        assert done.exit_code == 0, done.output
        answers.append(json.loads(done.stdout)["break_even"]["now_acceptance"])
    assert answers == pytest.approx([0.8447] * 3, abs=1e-4)
    for figures, message in (
        (("--printed-rate", "0.62"), "--log-draft-length is required"),
        (("--printed-length", "7", "--log-draft-length", "5"), "printed_length must be"),
        (("--printed-rate", "0.62", "--acceptance", "0.7"), "one acceptance is needed"),
        (("--printed-rate", "0.62", "--engine", "any"), "--engine is required"),
    ):
        done = called(*words, *figures)
        assert (done.exit_code, message in done.output) == (2, True), done.output


# --- Acceptance as text, schedules, settings ---


def test_acceptance_in_every_form() -> None:
    assert [each.text for each in acceptance_of(0.6)] == ["0.6"]
    assert [each.text for each in acceptance_of([0.6, (0.7, 0.8)])] == ["0.6", "0.7 to 0.8"]
    for bad in ("0.6..", "a", "0.6...0.7", ""):
        with pytest.raises(ParameterError, match="acceptance must be"):
            acceptance_of(bad)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 300) | st.none())
def test_schedule_covers_every_batch_once(lengths: list[int], off: int | None) -> None:
    batches = [2**power for power in range(len(lengths))]
    found = schedule(batches, lengths, off_from=off)
    assert found[0].first == 1
    assert found[-1].last == MOST_SEQUENCES
    for one, other in itertools.pairwise(found):
        assert other.first == one.last + 1
        assert one.draft_length != other.draft_length
    for batch, length in zip(batches, lengths, strict=True):
        (held,) = [each for each in found if each.first <= batch <= each.last]
        assert held.draft_length == (0 if off is not None and batch >= off else length)


RANGES = [Range(1, 15, 5), Range(16, 63, 2), Range(64, MOST_SEQUENCES, 0)]


def test_settings_of_engines_hold_the_schedule() -> None:
    (note, command) = engine_settings.lines("vllm", "m", "eagle3:llama-3.1-8b", RANGES, tensor_parallel=2)
    assert note.startswith("#")
    words = shlex.split(command)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 15, 5], [16, 63, 2], [64, MOST_SEQUENCES, 0]]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    (table, command) = engine_settings.lines("sglang", "m", "eagle3:llama-3.1-8b", RANGES)
    slots = json.loads(shlex.split(table)[1])
    assert {key: slot["candidate_steps"] for key, slot in slots.items()} == {"1": [5], "16": [2], "64": [0]}
    assert shlex.split(command)[-5:-3] == ["--speculative-num-draft-tokens", "6"]
    lines = engine_settings.lines("tensorrt-llm", "m", "mtp:deepseek-r1", RANGES)
    assert "  num_nextn_predict_layers: 5" in lines
    assert "  max_concurrency: 63" in lines
    assert "speculative_model" not in "".join(lines)


def test_settings_are_printed_alone(dense: Path) -> None:
    done = called("--engine-law", str(dense), "--acceptance", "0.7", "--draft", "eagle3", "--settings", "vllm")
    assert done.exit_code == 0, done.output
    config: dict[str, Any] = json.loads(shlex.split(done.stdout.splitlines()[-1])[-1])
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert ranges[-1][2] == 0
    assert config["method"] == "eagle3"
