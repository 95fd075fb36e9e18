"""Simulated servers against measured ones: the views that must agree, the reader of recorded runs, and the claims on the data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.validation import engine_tables, served_loads
from calibrate.validation import validation_page as page
from calibrate.validation.validated_claims import Claim
from model.base.checks import ParameterError
from model.engines import engine_priors, step_terms
from model.engines.cells import Cells
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.serving.closed_form import ClosedForm, Workload
from model.serving.loads import RequestLengths, TracedLoad, TracedRequests
from model.serving.scheduler import ServerSettings
from model.serving.step_prices import LawPrices

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "engine").is_dir() or not (DATA / "gpu").is_dir(),
    reason="the tables of engines and the recorded run are absent: DECODESIM_DATA names their folder",
)
SECONDS = {"weights": 8e-3, "step": 1e-3, "sequence": 2e-5, "token": 4e-5, "draft_pass": 5e-4, "round": 3e-4, "prompt": 1e-5}
SEVERAL = {"ridge_tokens": 250.0, "acceptance_rate": 0.7, "acceptance_trend": -0.1}


def law_of(unit: str = "tpot_ms", **changed: float) -> StepLaw:
    coefficients = SECONDS | SEVERAL | changed
    draws = {name: np.array([value]) for name, value in coefficients.items()} | {"noise": np.array([0.01])}
    return StepLaw("made up", unit, coefficients, draws)


def grid(unit: str = "tpot_ms") -> Cells:
    points = np.array([(clients, length) for clients in (1, 4, 16) for length in (0, 1, 3)])
    return Cells.of(unit, points[:, 0], points[:, 1])


# --- Simulated cells against closed forms ---


@pytest.mark.parametrize("unit", ["tpot_ms", "output_tokens_per_s"])
def test_without_prompts_clients_take_what_the_law_says(unit: str) -> None:
    """Plain decoding exactly; drafts up to the random acceptance."""
    cells, law = grid(unit), law_of(unit, prompt=0.0)
    apart = served_loads.simulated(cells, law, RequestLengths(1, 400)) / law.predict(cells).values - 1
    plain = cells.draft_length == 0
    assert np.abs(apart[plain]).max() < (1e-9 if unit == "tpot_ms" else 2e-3)
    assert 0 < np.abs(apart[~plain]).max() < 0.02


def test_prompts_are_read_in_passes_and_not_by_the_laws_term() -> None:
    """The closed form of servers agrees, and the law's own term of prompts changes nothing."""
    cells = grid()
    law, lengths = law_of(), RequestLengths(200, 300)
    found = served_loads.simulated(cells, law, lengths)
    assert found == pytest.approx(served_loads.simulated(cells, law_of(prompt=1.0), lengths), rel=1e-12)
    prices = LawPrices(law)
    for value, clients, length in zip(found, map(int, cells.sequences), map(int, cells.draft_length), strict=True):
        tokens = float(step_terms.acceptance_length(0.7, -0.1, length))
        form = ClosedForm(prices, tokens, length, length, Workload(200, 300)).at_concurrency(clients)
        assert value == pytest.approx(1e3 * form.tpot_s, rel=0.03), (clients, length)


def test_acceptance_rates_have_the_laws_acceptance_length() -> None:
    for length in (0, 1, 4):
        rates = served_loads.acceptance_rates(law_of(), length)
        expected = step_terms.acceptance_length(0.7, -0.1, length)
        assert rates.size == length
        assert 1 + np.cumprod(rates).sum() == pytest.approx(float(expected), rel=1e-12)


def test_parts_of_a_law_are_what_it_loses_without_each_term() -> None:
    cells, law = grid(), law_of()
    parts = served_loads.law_parts(law, cells)
    whole = law.predict(cells).values
    assert np.sum([*parts.values()], axis=0) == pytest.approx(whole, rel=1e-12)
    assert {*parts} == {*SECONDS} - {"weights"} | {"pass"}
    for name in SECONDS:
        if name != "weights":
            assert parts[name] == pytest.approx(whole - law_of(**{name: 0.0}).predict(cells).values, abs=1e-9), name
    doubled = served_loads.law_parts(law, replace(cells, sequences=2 * cells.sequences))
    for name in set(served_loads.LINEAR) - {"prompt"}:
        assert doubled[name] == pytest.approx(2 * parts[name])
    # A sequence's own prompt is not in its time per token: proportional to the others.
    assert doubled["prompt"] == pytest.approx(parts["prompt"] * (2 * cells.sequences - 1) / np.maximum(cells.sequences - 1, 1)
                                              + (cells.sequences == 1) * doubled["prompt"])  # fmt: skip


def test_signs_are_shown_but_for_zero() -> None:
    assert served_loads.signed(np.array([0.1, -0.025, 0.0001, -0.0001, -0.2005])) == "+10.0 %, -2.5 %, 0.0 %, 0.0 %, -20.1 %"


# --- Recorded runs ---

SETTINGS = ServerSettings(max_num_seqs=6, max_num_batched_tokens=96, block_size=16, num_blocks=40)
PLAIN = law_of("step_ms")


def trace() -> TracedRequests:
    random = np.random.Generator(np.random.Philox(5))
    arrivals = np.concatenate([[0.0], np.cumsum(random.exponential(0.2, 23))])
    outputs = random.integers(2, 120, 24)
    outputs[7] = 1  # has no time per token
    return TracedRequests(arrivals, random.integers(2, 300, 24), outputs)


def document() -> dict[str, Any]:
    return {
        "engine_kwargs": {"max_num_seqs": SETTINGS.max_num_seqs, "max_num_batched_tokens": SETTINGS.max_num_batched_tokens},
        "kv_cache": {"block_size": SETTINGS.block_size, "num_gpu_blocks": SETTINGS.num_blocks},
    }


def rows(start: float = 4096.0) -> list[dict[str, float]]:
    """Requests of a simulated server, as LLMServingSim records them: on another clock, and in another order."""
    requests = trace()
    recorder = served_loads.served(TracedLoad(requests), SETTINGS, LawPrices(PLAIN))
    assert recorder.totals.prompt_tokens > requests.prompts.sum()  # some are preempted and read again
    listed = [
        {"queued_ts": start + arrival, "first_token_ts": start + first, "last_token_ts": start + last, "input_toks": int(prompt),
         "output_toks": int(output)}
        for arrival, first, last, prompt, output in zip(
            requests.arrivals, recorder.first, recorder.end, requests.prompts, requests.outputs, strict=True
        )
    ]  # fmt: skip
    return [listed[index] for index in np.random.Generator(np.random.Philox(1)).permutation(len(listed))]


def written(folder: Path, requests: list[dict[str, float]], meta: dict[str, Any]) -> Path:
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(each) for each in requests), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def scheduler(settings: dict[str, object]) -> dict[str, Any]:
    return {"resolved_config": {"scheduler_config": settings}}


def test_a_run_of_the_server_itself_is_replayed_without_error(tmp_path: Path) -> None:
    """Each setting matters: with another value the replay is another run."""
    run = served_loads.read_run(written(tmp_path, rows(), document()))
    assert run.settings == SETTINGS
    assert run.trace.arrivals == pytest.approx(trace().arrivals, abs=1e-9)
    claim = served_loads.recorded_run(run, {"same": PLAIN, "slower": law_of("step_ms", step=2.5e-3)}, "measured: here")
    for kind, count in (("TPOT", 23), ("TTFT", 24)):
        same = claim.case(f"{kind}, same")
        assert same.errors.size == count
        assert same.largest < 1e-6
        assert claim.case(f"{kind}, slower").median > 0.1
    assert claim.case("TPOT, same").met
    assert {*claim.case("TPOT, same").columns.values()} == {"0.0 %"}
    assert not claim.case("TPOT, slower").met
    assert "Missed: TPOT, slower." in claim.description
    assert claim.sources == "measured: here"
    for group, key, value in (
        ("engine_kwargs", "max_num_seqs", 3), ("engine_kwargs", "max_num_batched_tokens", 48), ("kv_cache", "num_gpu_blocks", 30),
        ("kv_cache", "num_gpu_blocks", None), ("kv_cache", "block_size", 32),
    ):  # fmt: skip
        other = document()
        other[group][key] = value
        changed = served_loads.read_run(written(tmp_path, rows(), other))
        assert served_loads.recorded_run(changed, {"same": PLAIN}).case("TTFT, same").largest > 0.01, key
    by_chunk = served_loads.read_run(written(tmp_path, rows(), document() | scheduler({served_loads.RESERVE: False})))
    assert served_loads.recorded_run(by_chunk, {"same": PLAIN}).case("TTFT, same").largest > 0.01


def test_figures_of_a_run_are_those_of_its_times(tmp_path: Path) -> None:
    listed = [
        {"queued_ts": 12.0, "first_token_ts": 13.0, "last_token_ts": 17.0, "input_toks": 10, "output_toks": 5},
        {"queued_ts": 10.0, "first_token_ts": 10.5, "last_token_ts": 10.5, "input_toks": 20, "output_toks": 1},
    ]
    run = served_loads.read_run(written(tmp_path, listed, document()))
    assert run.trace.arrivals.tolist() == [0.0, 2.0]
    assert run.trace.prompts.tolist() == [20, 10]
    assert (run.ttft.tolist(), run.tpot.tolist(), run.latency.tolist()) == ([0.5, 1.0], [1.0], [0.5, 5.0])
    late = replace(run, first=run.first + np.array([0.0, 0.5]), last=run.last + np.array([0.0, 2.5]))
    claim = served_loads.recorded_run(replace(run, settings=SETTINGS), {"any": PLAIN})
    assert claim.case("TTFT, any").where in ("request 1", "request 2")
    assert claim.case("TPOT, any").where == "request 2"
    found = served_loads._overall(late, run)
    assert [*found.values()] == pytest.approx([1.0 / 0.75 - 1, 1.0 / 0.75 - 1, 1.5 - 1, 8.0 / 5.5 - 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda listed, meta: listed[0].pop("queued_ts"), "queued_ts"),
        (lambda listed, meta: listed[0].update(queued_ts="soon"), "queued_ts must be"),
        (lambda listed, meta: listed[0].update(first_token_ts=0.0), "times of a request must not fall"),
        (lambda listed, meta: listed[0].update(last_token_ts=0.0), "times of a request must not fall"),
        (lambda listed, meta: listed[0].update(output_toks=0), "output_toks must be whole numbers from 1"),
        (lambda listed, meta: listed[0].update(input_toks=1.5), "input_toks must be whole numbers from 1"),
        (lambda listed, meta: [each.update(output_toks=1) for each in listed], "one must have two tokens"),
        (lambda listed, meta: listed.clear(), "one must have two tokens"),
        (lambda listed, meta: meta.pop("kv_cache"), "kv_cache"),
        (lambda listed, meta: meta.update(kv_cache=[]), "kv_cache"),
        (lambda listed, meta: meta["engine_kwargs"].update(max_num_seqs=0), "max_num_seqs must be between 1"),
        (lambda listed, meta: meta.update(scheduler({"async_scheduling": 1})), "async_scheduling must be true or false"),
        (lambda listed, meta: meta.update(scheduler({"scheduler_reserve_full_isl": "no"})), f"{served_loads.RESERVE} must be true"),
        (lambda listed, meta: meta.update(resolved_config=[]), "has no attribute"),
    ],
)  # fmt: skip
def test_malformed_runs_are_refused(
    tmp_path: Path, change: Callable[[list[dict[str, float]], dict[str, Any]], object], said: str
) -> None:
    listed, meta = rows(), document()
    change(listed, meta)
    with pytest.raises(ParameterError) as caught:
        served_loads.read_run(written(tmp_path, listed, meta))
    assert said in str(caught.value)
    assert str(caught.value).endswith("give the folder of a whole run")
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ParameterError, match=r"meta\.json must have engine_kwargs"):
        served_loads.read_run(tmp_path)


def test_a_law_without_the_runs_own_estimate() -> None:
    """One estimate of the time per sequence is from the recorded run; the held-out law has the mean of the others."""
    own = [each for each in engine_priors.estimates("vllm", "sequence") if served_loads.OWN_SOURCE in each.source]
    assert len(own) == 1
    assert not [each for term in ("step", "draft_pass") for each in engine_priors.estimates("vllm", term)
                if served_loads.OWN_SOURCE in each.source]  # fmt: skip
    alone, prior, without = served_loads.engine_laws(KernelSource("llama-3.1-8b", "rtx-4090")).values()
    assert {*alone.coefficients} == {"kernels", "draft_pass"}
    changed = {name for name, value in prior.coefficients.items() if without.coefficients[name] != value}
    assert changed == {"sequence"}
    every = np.log([each.seconds for each in engine_priors.estimates("vllm", "sequence")])
    others = every.sum() - np.log(own[0].seconds)
    assert np.log(without.coefficients["sequence"]) == pytest.approx(others / (every.size - 1))
    assert np.log(prior.coefficients["sequence"]) == pytest.approx(every.mean(), abs=1e-3)


# --- The claims on the data ---


@pytest.fixture(scope="module")
def claims() -> tuple[Claim, ...]:
    return served_loads.claims(DATA)


@needs_data
@pytest.mark.slow
def test_sections_of_the_page_agree_with_the_servers(claims: tuple[Claim, ...]) -> None:
    assert page.stale_sections(claims, page.default_path()) == ""


@needs_data
@pytest.mark.slow
def test_extrapolation_in_the_concurrency_misses_its_targets(claims: tuple[Claim, ...]) -> None:
    """Targets are 5 % in the median and 10 % at worst, for every assumed draft length: the law misses both, ever more."""
    claim = claims[0]
    assert len(claim.cases) == 6
    for case in claim.cases:
        assert (case.target, case.target_worst, case.errors.size) == (0.05, 0.1, 3)
        assert not case.met
    for length in (1, 2, 3):
        errors = claim.case(f"law, assumed K = {length}").errors
        assert 0 < errors[0] < errors[1] < errors[2] < 0.3
        assert errors[0] < 0.06
    # Its smaller errors are no merit: it misses the fitted cells, which the law does not.
    server, law = (claim.case(f"{name}, assumed K = 3").columns[served_loads.FITTED] for name in ("simulated server", "law"))
    assert float(server.split()[0]) > 2 * float(law.split()[0])


@needs_data
@pytest.mark.slow
def test_the_law_in_closed_form_is_nearer_than_any_guess_of_prompts(claims: tuple[Claim, ...]) -> None:
    law, *servers = claims[1].cases
    first = engine_tables.throughput(engine_tables.qwen_cells(DATA)).case("K = 1, 4 at batch 1, 8, 64")
    assert law.errors == pytest.approx(first.errors)
    assert law.met
    assert len(servers) == 3
    for case in servers:
        assert case.errors.size == 36
        assert not case.met
        assert case.median > law.median
    # Where the guessed prompts are short the chosen draft lengths lose no more than the law's, and long ones lose more.
    lost = {case.name.removeprefix("simulated server, "): [each.value for each in case.targets] for case in servers}
    assert lost["no prompts"] == lost["prompts of 256 tokens"] == [each.value for each in law.targets]
    assert all(each.met for each in law.targets)
    assert all(more > few for more, few in zip(lost["prompts of 1,024 tokens"], lost["no prompts"], strict=True))


@needs_data
def test_the_run_is_predicted_within_its_targets_if_the_engines_work_overlaps_as_configured() -> None:
    run = served_loads.read_run(DATA / served_loads.RUN)
    assert (run.trace.arrivals.size, run.settings.num_blocks) == (300, 2588)
    assert (run.async_scheduling, run.settings.scheduler_reserve_full_isl) == (True, True)
    claim = served_loads.recorded_run(run, served_loads.engine_laws(KernelSource("llama-3.1-8b", "rtx-4090")))
    prior, in_turn = "kernels and the prior of vLLM", served_loads.IN_TURN
    met = {case.name: case.met for case in claim.cases if case.name.startswith("TPOT")}
    assert met == {
        "TPOT, kernels alone": True, f"TPOT, {prior}": True, f"TPOT, {prior}, {in_turn}": False,
        f"TPOT, {prior} without this run": True, f"TPOT, {prior} without this run, {in_turn}": False,
    }  # fmt: skip
    alone, overlapped, after = (claim.case(f"TPOT, {name}") for name in ("kernels alone", prior, f"{prior}, {in_turn}"))
    assert alone.median < overlapped.median < after.median
    assert alone.median < 0.06
    assert 0.1 < after.median < 0.15
    # The server's rule of admission matters: by the first chunk alone, more requests are preempted.
    chunks = replace(run, settings=replace(run.settings, scheduler_reserve_full_isl=False))
    law = served_loads.engine_laws(KernelSource("llama-3.1-8b", "rtx-4090"))["kernels alone"]
    assert chunks.replayed(law).last.max() > run.replayed(law).last.max()
    # LLMServingSim's errors of the same statistics are smaller, as the claim says.
    for name, error in served_loads.PUBLISHED_OF_RUN.items():
        assert abs(error) < 0.01 * abs(float(alone.columns[name].split()[0]))
