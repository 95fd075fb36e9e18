"""`sim explain`: its output, its figures, its Python twin, and one line for each mistake."""

from __future__ import annotations

import json
import math
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
from model.speedups import claim_shares, explanation
from model.speedups.claim_shares import Setting
from model.speedups.explanation import MeasuredSpeedup
from sim.advice import explained_speedup, speedup_inputs
from sim.advice.explained_speedup import Explanation
from sim.commands.sim_app import app
from tests.support.tiers import examples

MINE: dict[str, Any] = {
    "plain_tpot": "8ms", "tpot": "6.2ms", "mean_acceptance_length": 2.4, "draft_length": 3, "batch": 8, "model": "llama-3.1-8b",
    "gpu": "h100",
}  # fmt: skip
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
    of = json.loads(run("--log", record, *words, "--json").stdout)
    assert of["terms"] == found.document()["terms"]
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
        ("--draft-passes", "1", {"draft_passes": 1}), ("--tensor-parallel", "2", {"tensor_parallel": 2}),
        ("--dtype", "float8", {"dtype": "float8"}), ("--weights", "int4", {"weights": "int4"}),
        ("--engine", "sglang", {"engine": "sglang"}), ("--seed", "3", {"seed": 3}),
    ],
)  # fmt: skip
def test_options_reach_the_fit(option: str, value: str, of: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def fitted(measured: MeasuredSpeedup, kernels: KernelSource, engine: str, seed: int) -> StepLaw:
        calls.append(vars(measured) | vars(kernels) | {"engine": engine, "seed": seed})
        return law_fit.fit(None, "priors", unit="step_ms", kernels=kernels, engine=engine)

    monkeypatch.setattr(explanation, "fitted", fitted)
    assert run(*words_of(MINE)).exit_code == 0
    assert run(*words_of(MINE), option, value).exit_code == 0
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
