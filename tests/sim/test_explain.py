"""`sim explain`: its output, its figures, its Python twin, and one line for each mistake."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner

import sim
from figures.of_comparisons import speedup_terms
from model.base.checks import ParameterError
from model.engines import law_fit, step_law
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.logs import acceptance_record
from model.logs.acceptance_record import AcceptanceRecord, LogSource, MeasuredCell
from model.logs.engine_logs import engine_log
from model.speedups import claim_shares, explanation
from model.speedups.claim_shares import Setting, Share
from model.speedups.explanation import MeasuredSpeedup, TermsOfSpeedup
from sim.advice import explained_speedup, explanation_text, speedup_inputs
from sim.advice.explained_speedup import Explanation
from sim.commands.sim_app import app
from tests.support.tiers import examples

MINE: dict[str, Any] = {
    "plain_tpot": "8ms", "tpot": "6.2ms", "mean_acceptance_length": 2.4, "draft_length": 3, "batch": 8, "model": "llama-3.1-8b",
    "gpu": "h100",
}  # fmt: skip
LONG: dict[str, Any] = {
    "draft": "llama-3.2-1b", "context": 32_000, "plain_tpot": "14ms", "tpot": "9ms", "mean_acceptance_length": 2.6,
}  # fmt: skip
"""Changes to `MINE`: a long context, and a draft model."""
VALUES = (
    "1", "0", "-1", "7", "1e9", "nan", "inf", "", "0.5", "True", "llama-2-7b", "a100", "vllm", "eagle3:llama-3.1-8b", "float8", "\n"
)  # fmt: skip
CLAIM = "speedup=4.4,acceptance=0.85,draft_length=7,model=llama-2-13b,gpu=a100,batch=1,engine=vllm"


@pytest.fixture(scope="module")
def found() -> Explanation:
    return sim.explain(**MINE)


@pytest.fixture(scope="module")
def compared() -> Explanation:
    return sim.explain(**MINE, claim=CLAIM)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    made = AcceptanceRecord(
        "vllm", ("v1",), (LogSource("server.log", 9),), draft_length=3, drafts=1000, drafted=3000, accepted=1400,
        mean_acceptance_length=2.4, survival=(0.7, 0.45, 0.25),
        cells=(MeasuredCell(8, 0, None, tpot_ms=8.0), MeasuredCell(8, 3, 2.4, tpot_ms=6.2), MeasuredCell(64, 3, 2.4, tpot_ms=11.0)),
    )  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(acceptance_record.dumps(acceptance_record.with_intervals(made)), encoding="utf-8")
    return path


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["explain", *map(str, words)])


def words_of(inputs: dict[str, Any]) -> list[str]:
    return [word for name, value in inputs.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def error_of(*words: str | Path) -> str:
    done = run(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


# --- Context budget of drafts ---


@pytest.mark.parametrize("budget", [32_000, 100_000])
def test_budget_of_the_whole_context_changes_nothing(budget: int) -> None:
    whole, limited = sim.explain(**MINE | LONG), sim.explain(**MINE | LONG, draft_context_budget=budget)
    assert limited.terms == whole.terms
    assert limited.budget is not None
    assert limited.budget.whole_speedup == pytest.approx(whole.terms.measured.speedup, rel=1e-12)
    assert [note for note in limited.notes if note not in whole.notes] == [
        "the draft context budget covers the context of 32,000 positions: it changes nothing"
    ]


def test_budget_saves_drafting_time_and_memory() -> None:
    found = [sim.explain(**MINE | LONG, draft_context_budget=budget).document() for budget in (256, 4096, 16_384)]
    schema = explained_speedup.json_schema()
    for document in found:
        jsonschema.validate(document, schema)
        of = document["draft_context_budget"]
        # All other terms stay: a step without the budget is longer by what its drafts take more.
        steps = document["acceptance_length"] / of["speedup_without"]
        assert steps - of["drafting_without"] == pytest.approx(document["step_in_plain_steps"] - of["drafting"], rel=1e-12)
        assert of["drafting_without"] / of["drafting"] == pytest.approx(of["draft_pass_ms_without"] / of["draft_pass_ms"])
        assert of["speedup_without"] < document["speedup"]
        assert of["most_sequences"] >= of["most_sequences_without"] > 0
    each = [document["draft_context_budget"] for document in found]
    # Times are fitted to the measured step, so that only their ratios follow the budget.
    longer = [of["draft_pass_ms_without"] / of["draft_pass_ms"] for of in each]
    assert longer == sorted(longer, reverse=True)
    assert [of["most_sequences"] for of in each] == sorted((of["most_sequences"] for of in each), reverse=True)
    assert sim.explain(**MINE | LONG).document()["draft_context_budget"] is None


def test_budget_is_printed_with_its_effects_and_its_source() -> None:
    text = run(*words_of(MINE | LONG), "--draft-context-budget", "512").stdout
    assert "512 positions of each sequence; a pass of the draft for 8 running takes" in text
    for words in ("saves drafting time", "sequences fit if the draft keeps", "acceptance falls with the budget"):
        assert f"note: {words}" in text or words in text


def test_budgets_of_both_sides_have_a_share() -> None:
    claim = "speedup=2,acceptance=0.8,draft_length=3,draft_context_budget=16000"
    found = sim.explain(**MINE | LONG, draft_context_budget=512, claim=claim)
    (share,) = [each for each in found.shares if each.setting == "draft"]
    assert share.share > 0  # mine reads less, and is faster by it
    assert (share.mine, share.claimed) == ("llama-3.2-1b, 512 positions read", "llama-3.2-1b, 16,000 positions read")


# --- Output ---


def test_text_has_the_verdict_the_terms_and_their_sources(found: Explanation) -> None:
    done = run(*words_of(MINE))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{found}\n"
    first = done.stdout.splitlines()[0]
    assert first.startswith("Speed-up 1.29 over plain decoding: a step emits 2.40 of at most 4 tokens and takes 1.86 plain steps.")
    assert "The largest extra time is drafting" in first
    for words in (
        "speed-up = 2.400 tokens / 1.860 plain steps = 1.290",
        "stragglers",
        "prior of the time per draft pass",
        "80 % interval",
    ):
        assert words in done.stdout
    assert "these inputs do not tell verification, drafting, overhead apart" in done.stdout


def test_json_follows_its_schema(found: Explanation, compared: Explanation) -> None:
    schema = explained_speedup.json_schema()
    for each, words in ((found, []), (compared, ["--claim", CLAIM])):
        document = json.loads(run(*words_of(MINE), *words, "--json").stdout)
        jsonschema.validate(document, schema)
        assert document.pop("command")[:2] == ["sim", "explain"]
        assert "decodesim" in document.pop("versions")
        assert document == each.document()
        jsonschema.validate(document, schema)
        assert sum(row["value"] for row in document["terms"]) == pytest.approx(document["step_in_plain_steps"], rel=1e-9)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | {"more": 1}, schema)
    assert json.loads(CliRunner().invoke(app, ["schema", "explain"]).stdout) == schema


def test_a_claim_is_divided_into_factors(compared: Explanation) -> None:
    table = compared.shares_table
    assert float(np.prod(table["factor"].to_numpy())) == pytest.approx(8 / 6.2 / 4.4, rel=1e-9)
    assert table["setting"].to_list()[-1] == "rest"
    assert {"model", "GPU", "batch", "acceptance", "draft length", "engine"} < {*table["setting"]}
    text = run(*words_of(MINE), "--claim", CLAIM).stdout
    assert text.startswith("Measured 1.29x, claimed 4.40x: a factor of 0.29.")
    assert "the claim does not say context" in text
    assert "averages over all orders" in text


def test_a_claim_of_the_same_settings_and_speed_has_no_factors() -> None:
    same = {"speedup": 8 / 6.2, "acceptance_length": 2.4}
    found = sim.explain(**MINE, claim=same)
    (rest,) = found.shares
    assert rest.share == pytest.approx(0, abs=1e-12)
    assert "The two sides have the same settings" in found.verdict


def test_terms_that_may_be_larger_are_named() -> None:
    found = sim.explain(**MINE | {"plain_tpot": "7.2ms", "tpot": "2ms", "mean_acceptance_length": 3.9, "batch": 1})
    assert "; by their intervals " in found.verdict
    assert found.document()["may_be_larger"] == [term.name for term in found.terms.rivals]
    for name in found.document()["may_be_larger"]:
        assert {"verify": "verification", "overhead": "engine overhead", "rest": "the rest", "draft": "drafting"}[
            name
        ] in found.verdict


def test_slower_than_plain_decoding_is_said() -> None:
    found = sim.explain(**MINE | {"tpot": "9.5ms"})
    assert found.verdict.startswith("Speed-up 0.84 over plain decoding (slower)")


def test_tables_have_a_row_for_each_term(found: Explanation) -> None:
    assert found.table["term"].to_list() == ["verify", "draft", "overhead", "stragglers", "rest"]
    assert {*found.table["kind"]} <= {*explained_speedup.KINDS}
    assert {row.kind for row in found.rests_on} <= {*explained_speedup.KINDS}
    assert found.shares_table.height == 0


# --- Inputs ---


def test_a_record_gives_acceptance_draft_length_and_times(record: Path, found: Explanation) -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "h100", "--batch", "8"]
    of = json.loads(run("--log", record, *words, "--engine", "any", "--json").stdout)
    assert of["terms"] == found.document()["terms"]
    own = json.loads(run("--log", record, *words, "--json").stdout)  # the log's engine, unless another is asked for
    assert own["terms"] == sim.explain(**MINE, engine="vllm").document()["terms"]
    other = json.loads(run("--log", record, *words, "--engine", "sglang", "--json").stdout)
    assert "the log is of vllm, but --engine says sglang" in " ".join(other["notes"])
    assert [row["source"] for row in of["rests_on"][:3]] == ["--log", "--log", "vllm log server.log"]
    assert [row["kind"] for row in of["rests_on"] if row["input"] == "context"] == ["assumed"]
    other = json.loads(run("--log", record, *words, "--plain-tpot", "9ms", "--json").stdout)
    assert other["plain_tpot_ms"] == pytest.approx(9)
    assert other["tpot_ms"] == pytest.approx(6.2)


def test_logs_of_two_runs_give_everything_but_the_draft_length(tmp_path: Path) -> None:
    bench = "Backend: sglang\nMax request concurrency: {}\nMean TPOT (ms): {}\n"
    plain, drafts, other = (tmp_path / f"{name}.txt" for name in ("plain", "drafts", "other"))
    plain.write_text(bench.format(4, 8.0), encoding="utf-8")
    drafts.write_text(bench.format(4, 5.0) + "Accept length: 2.5\n", encoding="utf-8")
    other.write_text(bench.format(16, 9.0), encoding="utf-8")
    words = ["--draft-length", "3", "--model", "llama-3.1-8b", "--gpu", "h100"]
    found = json.loads(run("--log", plain, "--log", drafts, "--log", other, *words, "--json").stdout)
    assert (found["plain_tpot_ms"], found["tpot_ms"], found["acceptance_length"]) == pytest.approx((8, 5, 2.5))
    assert [row["value"] for row in found["rests_on"] if row["input"] == "batch"] == ["4"]
    assert "logs must be of one run with drafts" in error_of("--log", drafts, "--log", _copy(drafts), *words)
    assert "give --plain-tpot" in error_of("--log", drafts, *words)


def _copy(path: Path) -> Path:
    return Path(path.with_name("copy.txt").write_bytes(path.read_bytes()) and path.with_name("copy.txt"))


@pytest.mark.parametrize(
    ("option", "value", "of"),
    [
        ("--context", "8000", {"context": 8000}), ("--draft", "eagle3", {"draft": "eagle3:llama-3.1-8b"}),
        ("--draft", "p-eagle", {"draft": "p-eagle:llama-3.1-8b", "draft_passes": 1}),
        ("--draft-passes", "1", {"draft_passes": 1}), ("--tensor-parallel", "2", {"tensor_parallel": 2}),
        ("--dtype", "float8", {"dtype": "float8"}), ("--weights", "int4", {"weights": "int4"}),
        ("--engine", "sglang", {"engine": "sglang"}), ("--seed", "3", {"seed": 3}),
        ("--draft", "llama-3.2-1b --draft-context-budget 512", {"draft": "llama-3.2-1b", "draft_context_budget": 512}),
    ],
)  # fmt: skip
def test_options_reach_the_fit(option: str, value: str, of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def fitted(measured: MeasuredSpeedup, kernels: KernelSource, engine: str, seed: int) -> StepLaw:
        calls.append(vars(measured) | vars(kernels) | {"engine": engine, "seed": seed})
        return law_fit.fit(None, "priors", unit="step_ms", kernels=kernels, engine=engine)

    monkeypatch.setattr(explanation, "fitted", fitted)
    assert run(*words_of(MINE)).exit_code == 0
    assert run(*words_of(MINE), option, *value.split()).exit_code == 0
    before, after = calls
    assert {name: each for name, each in after.items() if before[name] != each} == of


def test_an_acceptance_rate_gives_the_length() -> None:  # --acceptance instead of --mean-acceptance-length
    rate = {name: value for name, value in MINE.items() if name != "mean_acceptance_length"} | {"acceptance": 0.6}
    assert sim.explain(**rate).document()["acceptance_length"] == pytest.approx(1 + 0.6 + 0.36 + 0.216)


def test_static_batches_have_stragglers(found: Explanation) -> None:  # --static-tokens
    static = sim.explain(**MINE, static_tokens=200).terms
    assert static.term("stragglers").value > 0.05
    assert sum(term.value for term in static.terms) == pytest.approx(found.terms.measured.steps)
    assert static.term("draft").value < found.terms.term("draft").value


def test_a_step_law_of_cells_replaces_the_priors(tmp_path: Path) -> None:
    name = "vllm-llama-3.1-8b-eagle3-h100"
    law = step_law.load(name)
    inputs = {key: value for key, value in MINE.items() if key not in ("model", "gpu")}
    found = sim.explain(**inputs, engine_law=name)
    assert found.terms.term("draft").value == pytest.approx(3 * float(law.draws["draft_pass"].mean()) / 8e-3)
    assert name in found.terms.term("verify").source
    assert {term.kind for term in found.terms.terms} == {"measured", "assumed"}
    # A law without cells gives kernels and priors, as --model and --gpu do.
    prior = law_fit.fit(None, "guess", unit="step_ms", kernels=KernelSource("llama-3.1-8b", "h100"), engine="any")
    path = step_law.write(prior, tmp_path / "guess.json")
    done = json.loads(run(*words_of(inputs), "--engine-law", path, "--json").stdout)
    assert done["terms"] == sim.explain(**MINE).document()["terms"]
    assert "--model must be llama-3.1-8b, that of law guess" in error_of(
        *words_of(inputs), "--engine-law", path, "--model", "llama-2-13b"
    )


@pytest.mark.parametrize(("text", "value"), [("7.5 ms", 7.5), ("7.5ms", 7.5), ("0.0075s", 7.5), (7.5, 7.5)])
def test_times_are_read_with_their_unit(text: str | float, value: float) -> None:
    assert speedup_inputs.milliseconds("tpot", text) == pytest.approx(value)


# --- Measured drafting ---

LLAMA_CPP = (
    "slot print_timing: id  1 | task 0 | draft acceptance = 0.74074 (  200 accepted /   270 generated), mean acceptance length ="
    "  3.00, acceptance rate per position = (0.800, 0.670, 0.530)\n"
    "statistics draft-eagle3: #calls(b,g,a) = 1 {calls} 100, #gen drafts = 100, #acc drafts = 80, #gen tokens = 270,"
    " #acc tokens = 200, #mean acc len = 3.00, #acc rate/pos = (0.800, 0.670, 0.530), dur(b,g,a) = 0.005, {ms:.3f}, 0.114 ms\n"
)


def drafted_log(folder: Path, ms: float, calls: int = 100) -> Path:
    path = folder / "server.log"
    path.write_text(LLAMA_CPP.format(ms=ms, calls=calls), encoding="utf-8")
    return path


@pytest.mark.parametrize(("batch", "calls", "ms"), [(1, 100, 300.0), (2, 50, 150.0), (1, 100, 0.0)])
def test_the_time_of_drafting_in_a_log_is_the_term(batch: int, calls: int, ms: float, tmp_path: Path) -> None:
    """100 drafts in `calls` calls: a step of `batch` sequences has one call, of ms / calls."""
    words = ["--model", "llama-3.1-8b", "--gpu", "h100", "--plain-tpot", "8ms", "--tpot", "5ms", "--batch", str(batch)]
    log = drafted_log(tmp_path, ms, calls)
    found = json.loads(run("--log", log, *words, "--json").stdout)
    draft = next(row for row in found["terms"] if row["term"] == "draft")
    assert draft["value"] == pytest.approx(ms / calls / 8, abs=1e-9)
    assert (draft["kind"], draft["source"]) == ("measured", "time of drafting in the log of this run")
    (said,) = [row for row in found["rests_on"] if row["input"] == "time of drafting"]
    assert (said["kind"], said["source"]) == ("measured", "llama.cpp log server.log")
    assert f"2.7 of them per sequence, batch {batch}" in said["value"]
    assert any("drafts have 2.70 of at most 3 tokens on average" in note for note in found["notes"])
    # The same by a record of the log, and with a law of other runs.
    path = tmp_path / "mine.json"
    path.write_text(acceptance_record.dumps(engine_log.read([log])), encoding="utf-8")
    law = ["--engine-law", "vllm-llama-3.1-8b-eagle3-h100"]
    for changed in ([path, *words], [log, *words, *law]):
        again = json.loads(run("--log", *changed, *(["--draft-length", "3"] if changed[0] == log else []), "--json").stdout)
        assert next(row for row in again["terms"] if row["term"] == "draft")["value"] == pytest.approx(draft["value"])


def test_drafting_that_leaves_no_time_for_the_step_is_refused(tmp_path: Path) -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "h100", "--plain-tpot", "8ms", "--tpot", "5ms"]
    assert "the measured drafting of a step must take less than the step, 15 ms" in error_of(
        "--log", drafted_log(tmp_path, 1600.0), *words
    )
    assert "a step with drafts less its measured drafting of 12 ms must take at least" in error_of(
        "--log", drafted_log(tmp_path, 1200.0), *words
    )
    assert "must take less than the step, 15 ms (time per output token x acceptance length), got 24 ms; check batch" in error_of(
        "--log", drafted_log(tmp_path, 300.0), *words, "--batch", "8"
    )
    close = run("--log", drafted_log(tmp_path, 900.0), *words).stdout
    assert "note: contradiction: drafting as measured leaves 6 ms of a step for verification and overhead, which take" in close
    mixed = tmp_path / "mixed.log"  # drafts of 16 tokens besides
    mixed.write_text(
        drafted_log(tmp_path, 300.0).read_text(encoding="utf-8")
        + "statistics ngram-simple: #calls(b,g,a) = 1 99 20, #gen drafts = 20, #acc drafts = 20, #gen tokens = 320,"
        " #acc tokens = 81, dur(b,g,a) = 0.000, 0.872, 0.000 ms\n", encoding="utf-8",
    )  # fmt: skip
    assert "--draft-length must be at least 4.92, the mean length of the log's drafts, got 3" in error_of(
        "--log", mixed, *words, "--draft-length", "3"
    )


# --- Laws of other runs ---


@pytest.mark.parametrize(
    ("law", "change", "message"),
    [
        ("vllm-llama-3.1-8b-eagle3-h100", {"model": "llama-2-13b"}, "--model must be llama-3.1-8b, that of law"),
        ("vllm-llama-3.1-8b-eagle3-h100", {"gpu": "a100"}, "--gpu must be h100, that of law"),
        ("vllm-llama-3.1-8b-eagle3-h100", {"engine": "sglang"}, "--engine must be vllm, that of law"),
        ("vllm-llama-3.1-8b-eagle3-h100", {"tensor_parallel": 2}, "--tensor-parallel must be 1, that of law"),
        ("vllm-llama-3.1-8b-eagle3-h100", {"draft": "llama-3.2-1b"}, "--draft must be that of the engine law (EAGLE-3"),
        ("sglang-deepseek-r1-fp8-b300", {"model": "llama-3.1-8b"}, "--model must be deepseek-r1, that of law"),
        ("sglang-deepseek-r1-fp8-b300", {"gpu": "b200"}, "--gpu must be b300, that of law"),
        ("sglang-qwen3.8-27b-bf16-gb300", {"gpu": "h100"}, "--gpu must be gb300, that of law"),
        ("sglang-glm-4.7-fp8", {"model": "llama-3.1-8b"}, "--model must be that of law sglang-glm-4.7-fp8 (GLM-4.7"),
    ],
)
def test_a_law_of_other_runs_is_refused(law: str, change: dict[str, Any], message: str) -> None:
    inputs = {name: value for name, value in MINE.items() if name not in ("model", "gpu")} | {"engine_law": law} | change
    assert message in error_of(*words_of(inputs))


def test_what_a_law_does_not_name_is_said_and_listed() -> None:
    inputs = {name: value for name, value in MINE.items() if name not in ("model", "gpu")}
    named = sim.explain(**inputs, engine_law="vllm-llama-3.1-8b-eagle3-h100")
    assert not [row for row in named.rests_on if row.input.endswith("of the law")]
    assert not [note for note in named.notes if "does not name" in note]
    other = sim.explain(**inputs, engine_law="sglang-glm-4.7-fp8", gpu="h100")
    unnamed = {row.input: row for row in other.rests_on if row.input.endswith("of the law")}
    assert [*unnamed] == ["model of the law", "GPU of the law", "tensor parallel size of the law"]
    assert {row.kind for row in unnamed.values()} == {"assumed"}
    assert "taken to be h100" in unnamed["GPU of the law"].value
    (note,) = [note for note in other.notes if "the law does not name its" in note]
    assert "model, GPU and tensor parallel size, or in words only" in note
    assert any("plain step is 8 ms, shorter than law sglang-glm-4.7-fp8 gives (16.3 ms)" in note for note in other.notes)
    # A plain step that the law does not have makes its terms doubtful, first of all.
    assert other.advice[0].startswith("To change it: doubt these terms first: law sglang-glm-4.7-fp8 has a plain step of")


# --- What to change ---


@pytest.mark.parametrize(
    ("claim", "setting", "words"),
    [
        ("speedup=1.7,acceptance=0.9", "acceptance", "use a draft that is trained for these requests, or measure the claim's"),
        ("speedup=1.6,acceptance_length=2.4,draft_passes=1", "draft", "use a draft as the claim's"),
        ("speedup=2,acceptance_length=2.4,model=llama-3.1-70b,tensor_parallel=4", "model", "the claim is about llama-3.1-70b"),
        ("speedup=2.2,acceptance_length=2.4", "rest", "look for what the settings given do not say"),
        ("speedup=3,acceptance=0.1", "rest", "do not aim at the claim, which contradicts itself"),
    ],
)
def test_what_to_change_follows_the_largest_loss(claim: str, setting: str, words: str) -> None:
    found = sim.explain(**MINE, claim=claim)
    lost = min(found.shares, key=lambda share: share.share)
    assert lost.setting == setting
    assert found.advice[0].startswith("To change it: ")
    assert words in found.advice[0]
    assert found.advice[1].startswith("Of the step's time, drafting grows most: ")


def test_a_share_that_goes_the_other_way_is_said() -> None:
    gain = sim.explain(**MINE, claim="speedup=2,acceptance=0.5,gpu=a100").verdict
    assert "acceptance (0.665 instead of 0.5): a factor of 1.28" in gain
    assert "It goes the other way; of those that go this way the largest is GPU (h100 instead of a100): a factor of 0.8" in gain
    assert "other way" not in sim.explain(**MINE, claim="speedup=2,acceptance=0.9,gpu=a100").verdict


def test_a_claim_below_the_measurement_loses_nothing() -> None:
    found = sim.explain(**MINE, claim="speedup=1.1,acceptance_length=2.4")
    assert found.advice[0] == "Nothing is lost against the claim: the measured speed-up is as high."
    assert found.advice[1] == sim.explain(**MINE).advice[0]


def test_every_setting_has_what_to_change() -> None:
    joined = "model, GPU, tensor parallel, draft"
    for setting in (*claim_shares.GROUPS, joined):
        shares = (Share(setting, "mine", "theirs", -0.5, -0.6, -0.4), Share("rest", "", "", 0.1, -0.1, 0.3))
        said = explanation_text.advice(
            explanation.explain(MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3), law_of_priors()), [(3, 1.3)], law_of_priors(), shares,
            fitted_here=True,
        )  # fmt: skip
        assert said[0].startswith("To change it: ")
        assert "{" not in said[0]
        assert setting == "acceptance" or "theirs" in said[0] or "mine" in said[0]


@pytest.mark.parametrize(
    ("rest", "words"), [((-0.1, -0.3, 0.1), "at 8"), ((-0.6, -1.3, 0.1), "at 8"), ((-0.6, -0.7, -0.5), "look for what the")]
)  # fmt: skip
def test_the_largest_of_several_losses_is_first(rest: tuple[float, float, float], words: str) -> None:
    """A rest that may be 0 is not the loss to make up for, even with a large mean; a gain is none."""
    terms = explanation.explain(MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3), law_of_priors())
    shares = (
        Share("acceptance", "0.9", "0.8", 0.4, 0.4, 0.4), Share("batch", "8", "1", -0.4, -0.5, -0.3),
        Share("GPU", "h100", "a100", -0.2, -0.3, -0.1), Share("rest", "", "", *rest),
    )  # fmt: skip
    said = explanation_text.advice(terms, [(3, 1.3)], law_of_priors(), shares, fitted_here=True)
    assert words in said[0]


def test_fewer_tokens_are_advised_only_where_they_are_faster() -> None:
    for sequences, name in ((1.0, "draft"), (512.0, "verify")):
        measured = MeasuredSpeedup(8e-3, 6.2e-3, 2.4, 3, sequences=sequences)
        terms = explanation.explain(measured, law_of_priors())
        largest = tuple(replace(term, extra=1.0 if term.name == name else 0.0) for term in terms.terms)
        named = TermsOfSpeedup(measured, largest, ())
        for speedups, shorter in (([(2, 1.5), (3, 1.3)], True), ([(3, 1.3), (4, 1.5)], False), ([(2, 1.31), (3, 1.3)], False)):
            said = explanation_text.advice(named, speedups, law_of_priors(), (), fitted_here=True)
            assert ("draft fewer tokens" in said[0]) == shorter, (name, said)


@pytest.mark.parametrize(
    ("mine", "claim", "passes"),
    [
        ({"draft": "p-eagle:llama-3.1-8b", "draft_passes": 1}, "draft=eagle3", None),
        ({"draft": "p-eagle:llama-3.1-8b", "draft_passes": 1}, "batch=2", 1),
        ({}, "draft=p-eagle", 1), ({}, "draft_passes=7", None), ({}, "draft_passes=2", 2), ({"draft_passes": 1}, "batch=2", 1),
    ],
)  # fmt: skip
def test_a_claim_has_the_passes_of_its_draft(mine: dict[str, Any], claim: str, passes: int | None) -> None:
    side, _, _ = speedup_inputs.claimed(
        f"speedup=3,acceptance=0.8,draft_length=7,{claim}", Setting("llama-3.1-8b", "h100", 3, (0.6,), **mine)
    )
    assert side.draft_passes == passes


def test_as_many_passes_as_tokens_are_one_per_token() -> None:
    """K passes at the measured K are 7 at a claim's K = 7, and K at every length that is predicted."""
    assert speedup_inputs.passes_of(None, 3, 3) is None
    assert speedup_inputs.passes_of(None, 2, 3) == 2
    assert sim.explain(**MINE, draft_passes=3).document() == sim.explain(**MINE).document()


def test_kernels_without_measurements_are_assumed() -> None:
    kinds = {
        gpu: sim.explain(**MINE | {"gpu": gpu, "plain_tpot": "25ms", "tpot": "20ms"}).terms.term("verify").kind
        for gpu in ("h100", "mi300x")
    }
    assert kinds == {"h100": "measured", "mi300x": "assumed"}


def law_of_priors() -> StepLaw:
    return law_fit.fit(None, "priors", unit="step_ms", kernels=KernelSource("llama-3.1-8b", "h100"), engine="any")


def test_acceptance_comes_first_where_it_costs_more_than_the_step() -> None:
    found = sim.explain(**MINE | {"mean_acceptance_length": 1.4, "tpot": "7ms"})
    assert found.advice[0].startswith("To change it: acceptance costs more than the time of the step")
    assert sim.explain(**MINE).advice[0].startswith("To change it: use a smaller draft")


def test_the_rest_is_explained_by_what_the_law_is_of(tmp_path: Path) -> None:
    inputs = {name: value for name, value in MINE.items() if name not in ("model", "gpu", "batch")}
    law = "vllm-llama-3.1-8b-eagle3-h100"
    slow = inputs | {"tpot": "12ms", "plain_tpot": "6.6ms"}
    near = sim.explain(**slow, engine_law=law)
    assert near.terms.largest.name == "rest"
    assert f"law {law} has cells at this batch and draft length" in near.advice[-2]
    far = sim.explain(**slow, engine_law=law, batch=8)
    assert f"law {law} has no cell at this batch and draft length (7 cells of tpot_ms, 1 at once" in far.advice[-2]
    assert "differences to the law's runs" in far.verdict
    own = sim.explain(drafted_log(tmp_path, 300.0), plain_tpot="8s", tpot="4s", model="llama-3.1-8b", gpu="h100")
    assert own.terms.largest.name == "rest"
    assert "kernels and priors do not explain these two runs" in " ".join(own.advice)
    assert "law" not in own.verdict


# --- Figures ---


def test_waterfall_has_the_extra_time_of_each_term(found: Explanation, tmp_path: Path) -> None:
    (axes,) = found.figure().axes
    bars = {bar.get_label(): bar for bar in axes.containers}
    heights = [container.patches[0] for container in axes.containers]
    assert heights[0].get_height() == pytest.approx(1)
    assert heights[-1].get_height() == pytest.approx(found.terms.measured.steps)
    for term in found.terms.terms:
        if term.name in bars:
            patch = bars[term.name].patches[0]
            assert patch.get_height() == pytest.approx(abs(term.extra))
    assert {"verify", "draft", "overhead"} < {*bars}
    assert "stragglers" not in bars  # there are none
    done = run(*words_of(MINE), "--out", tmp_path / "why")
    assert done.stdout.splitlines()[-2:] == [str(tmp_path / "why.json"), str(tmp_path / "why.svg")]
    assert (tmp_path / "why.svg").stat().st_size > 1000
    assert json.loads((tmp_path / "why.json").read_text())["kind"] == "explanation"


def test_waterfall_of_a_claim_ends_at_the_measured_speedup(compared: Explanation) -> None:
    figure = compared.figure()
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    patches = [container.patches[0] for container in axes.containers]
    assert len(patches) == 2 + len(compared.shares)
    tops = [patch.get_y() + patch.get_height() for patch in patches]
    assert (tops[0], tops[-1]) == (pytest.approx(4.4), pytest.approx(8 / 6.2))
    rest = patches[-2]
    assert min(rest.get_y(), rest.get_y() + rest.get_height()) == pytest.approx(8 / 6.2)
    for share, patch in zip(compared.shares, patches[1:-1], strict=True):
        ratio = (patch.get_y() + patch.get_height()) / patch.get_y()
        assert math.log(ratio) == pytest.approx(abs(share.share), abs=1e-9)


def test_figures_refuse_tables_of_something_else(found: Explanation) -> None:
    with pytest.raises(ParameterError, match="setting"):
        speedup_terms.draw_shares(found.table, 2.0, 1.0)


# --- Mistakes ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict.fromkeys(MINE), "acceptance is never assumed: give --log"),
        ({"model": None}, "give --model, or --engine-law"),
        ({"model": None, "gpu": None}, "give --model and --gpu, or --engine-law"),
        ({"gpu": "h1000"}, "unknown device 'h1000'"),
        ({"model": "llama-9"}, "llama-9"),
        ({"mean_acceptance_length": None}, "acceptance is never assumed: give --log"),
        ({"acceptance": 0.5}, "acceptance must be given once"),
        ({"draft_length": None}, "give --draft-length"),
        ({"draft_length": 0}, "draft_length must be between 1"),
        ({"mean_acceptance_length": 4.2}, "acceptance_length must be at most draft_length + 1 = 4"),
        ({"tpot": "1.5ms"}, "speedup must be at most draft_length + 1 = 4"),
        ({"tpot": None}, "give --tpot, such as --tpot 7.5ms"),
        ({"plain_tpot": "fast"}, "--plain-tpot must be a time above 0 with its unit, such as 20ms, got 'fast'"),
        ({"tpot": "1e999ms"}, "--tpot must be a time"),
        ({"plain_tpot": "0.8ms", "tpot": "0.5ms"}, "a plain step must take at least"),
        ({"plain_tpot": "5ms", "tpot": "1.6ms", "mean_acceptance_length": 1.3}, "must be at most the 1.3 tokens that a step emits"),
        ({"batch": 0}, "batch must be between"),
        ({"draft_passes": 4}, "draft_passes must be between 0 and draft_length=3, got 4; leave it out for one pass"),
        ({"draft_passes": -1}, "draft_passes must be between 0 and draft_length=3, got -1"),
        ({"draft": "p-eagle", "draft_passes": 3}, "draft_passes must be 1 with p-eagle:llama-3.1-8b, which drafts all"),
        ({"draft": "mine"}, "--draft must be a head"),
        ({"model": "llama-3.1-405b"}, "must be at most the 85.9 GB of h100"),
        ({"engine_law": "nothing.json"}, "step law 'nothing.json' cannot be read: No such file"),
        ({"claim": "speedup=3,acceptance=.8,draft_length=7,draft_passes=8"}, "claim draft_passes must be between 0 and"),
        ({"claim": "speedup=3,acceptance=.8,batch=0"}, "claim: batch must be between"),
        ({"claim": "speedup=3,acceptance=.8,model=llama-3.1-70b"}, "claim: weights (141.1 GB)"),
        ({"claim": "speedup=3;acceptance=.8"}, "--claim must be KEY=VALUE,KEY=VALUE"),
        ({"engine": "mine"}, "unknown engine 'mine'"),
        ({"engine_law": "nothing"}, "engine law"),
        ({"static_tokens": 100, "batch": 1}, "--batch must be a whole number of at least 2"),
        ({"claim": "acceptance=0.8"}, "--claim must have speedup"),
        ({"claim": "speedup=3"}, "acceptance is never assumed"),
        ({"claim": "speedup=3,acceptance=0.8,acceptance_length=2"}, "got both"),
        ({"claim": "speedup=9,acceptance=0.8,draft_length=7"}, "claim speedup must be at most draft_length + 1 = 8"),
        ({"claim": "speedup=4.4,acceptance=0.8"}, "the claim has no draft_length, so that of the measured run was taken"),
        ({"claim": "speedup=3,acceptance=0.8,gpus=4"}, "unknown key 'gpus' of --claim"),
        ({"claim": "speedup=3,acceptance=often"}, "claim acceptance must be a number"),
        ({"claim": "speedup=3,acceptance=.8,gpu=b9"}, "b9"),
        ({"claim": "speedup"}, "--claim must be KEY=VALUE"),
        ({"draft_context_budget": 512}, "--draft is required with draft_context_budget=512"),
        ({"draft_context_budget": 512, "draft": "eagle3"}, "draft_context_budget must be left out with draft eagle3:llama-3.1-8b"),
        ({**LONG, "draft_context_budget": 0}, "draft_context_budget must be between 1 and"),
        ({**LONG, "draft_context_budget": 200_000}, "draft_context_budget must be at most 131072, the context of"),
        ({"draft_context_budget": 512, "engine_law": "vllm-llama-3.1-8b-eagle3-h100"}, "draft_context_budget must be left out"),
        ({"claim": "speedup=3,acceptance=.8,draft_context_budget=9"}, "claim: --draft is required with draft_context_budget=9"),
        ({**LONG, "claim": "speedup=3,acceptance=.8,draft_context_budget=0"}, "claim: draft_context_budget must be between 1"),
        ({"claim": "speedup=3,speedup=4,acceptance=0.8"}, "speedup twice"),
    ],
)
def test_mistakes_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    inputs = {name: value for name, value in (MINE | change).items() if value is not None}
    assert message in error_of(*words_of(inputs))


@given(
    claim=st.one_of(
        st.text(max_size=60),
        st.lists(st.tuples(st.sampled_from([*speedup_inputs.CLAIM_KEYS, "x"]), st.sampled_from(VALUES)), max_size=5).map(
            lambda pairs: ",".join(["speedup=3", "acceptance=0.8", *(f"{key}={value}" for key, value in pairs)])
        ),
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_any_claim_is_read_or_refused_in_one_line(claim: str) -> None:
    mine = Setting("llama-3.1-8b", "h100", 3, (0.6,))
    try:
        other, speedup, _ = speedup_inputs.claimed(claim, mine)
        found = claim_shares.shares(mine, 1.3, other, speedup)
    except ParameterError as error:
        message = str(error)
    else:
        message = "read"
        assert sum(share.share for share in found) == pytest.approx(math.log(1.3 / speedup), abs=1e-9)
    assert len(message.splitlines()) == 1


def test_a_log_of_another_run_is_refused(record: Path, tmp_path: Path) -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "h100"]
    assert "--draft-length must be 3, that of the log, got 5" in error_of("--log", record, *words, "--draft-length", "5")
    assert "the log has no cell of plain decoding at batch 128" in error_of("--log", record, *words, "--batch", "128")
    log = tmp_path / "vllm.log"
    log.write_text("SpecDecoding metrics: Mean acceptance length: 2.40\n", encoding="utf-8")
    assert "it has no acceptance" in error_of("--log", log, *words)
    assert "No such file" in error_of("--log", tmp_path / "none.json", *words)


def test_time_and_acceptance_length_are_of_the_same_steps() -> None:
    """A log of two loads: the step at one of them has its own acceptance length, not that of the whole log."""
    cells = (MeasuredCell(1, 3, 1.95, tpot_ms=5.6), MeasuredCell(18, 3, 2.4, tpot_ms=9.0))
    runs = speedup_inputs.LoggedRuns(None, cells)
    assert runs.acceptance_length(3, 1.0) == 1.95
    assert runs.acceptance_length(3, 18.0) == 2.4
    assert runs.acceptance_length(3, 100.0) is None
    with pytest.raises(ParameterError, match="its run at several numbers of running sequences: give --batch, one of 1, 18"):
        speedup_inputs.batch_of(runs, None, 3, timed=True)
    assert speedup_inputs.batch_of(runs, None, 3)[0] == 1.0
    only = speedup_inputs.LoggedRuns(None, cells[1:])
    assert speedup_inputs.batch_of(only, None, 3, timed=True)[0] == 18.0
