"""Priors by engine: what they are made of, that they follow from it, and what they do to laws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from model.base.checks import ParameterError
from model.engines import engine_priors, law_fit, law_report, step_law
from model.engines.cells import Cells
from model.engines.engine_priors import ANY, ENGINES, TERMS, EngineEstimate
from model.engines.kernel_times import KernelSource
from model.engines.step_terms import PRIORS
from model.hardware import profile_files
from model.hardware.cost_models import pass_time, step_time
from model.hardware.profile_costs import ProfileCosts

H100 = KernelSource("llama-3.1-8b", "h100")
RUN = Path(__file__).parents[1] / "data" / "validation" / "engine_run.csv"


def only(engine: str, term: str, words: str) -> float:
    """Seconds of the one estimate whose source has these words."""
    [found] = [each.seconds for each in engine_priors.estimates(engine, term) if words in each.source]
    return found


# --- The file ---


def test_estimates_are_seconds_with_a_source() -> None:
    listed = [each for term in TERMS for each in engine_priors.estimates(ANY, term)]
    assert {each.engine for each in listed} < {*ENGINES}
    sources = [(each.engine, each.term, each.source) for each in listed]
    assert len({*sources}) == len(sources)  # a source counts once
    for each in listed:
        assert {"step": 1e-5, "sequence": 1e-6, "draft_pass": 1e-4}[each.term] < each.seconds < 0.03, each
        assert len(each.source) > 20


def test_laws_are_named_only_for_what_their_cells_determine() -> None:
    listed = [(each.term, each.source) for term in TERMS for each in engine_priors.estimates(ANY, term)]
    named = [(term, source) for term, source in listed if source.startswith("bundled laws ")]
    assert len(named) >= 4
    for term, source in named:
        for name in source.removeprefix("bundled laws ").split(", "):
            [row] = [row for row in law_report.description(step_law.load(name))["coefficients"] if row["term"] == term]
            assert row["from"] == "cells", (name, term)
            assert (name.startswith("vllm"), name.startswith("sglang")) != (False, False)


def test_differences_to_bundled_profiles_are_those_of_the_profiles() -> None:
    """Seconds of the engine's step less those of the kernels, at a few hundred positions as in the prompts of MT-bench."""
    kernels = float(pass_time(ProfileCosts(profile_files.load("h100-llama-3.1-8b")), 1, 300, 1).seconds)
    older = float(pass_time(ProfileCosts(profile_files.load("h100-llama-2-7b")), 1, 300, 1).seconds)
    assert only("vllm", "step", "20780") == pytest.approx(7.07e-3 - kernels, abs=2e-5)
    assert only("vllm", "step", "17202") == pytest.approx(7.5e-3 - kernels, abs=2e-5)
    assert only("sglang", "step", "pull/173") == pytest.approx(1 / 156 - older, abs=2e-5)
    assert kernels > 1 / 158.34  # not positive: half of the error that the profile states
    error = float(pass_time(ProfileCosts(profile_files.load("h100-llama-3.1-8b")), 1, 300, 1).error)
    assert only("sglang", "step", "158.34") == pytest.approx(error * kernels / 2, abs=1e-5)


def test_time_per_sequence_is_the_slope_of_the_recorded_run() -> None:
    table = pl.read_csv(RUN)
    run = {name: table[name].to_numpy().astype(np.float64) for name in table.columns}
    alone = (run["prompts"] == 0) & (run["running"] >= 10) & (run["tokens"] > 0) & (run["returned"] <= 0)
    number, rate, context = (run[name][alone] for name in ("running", "tokens", "context"))
    predicted = step_time(ProfileCosts(profile_files.load("rtx-4090-llama-3.1-8b")), context, number).seconds
    slope = np.polyfit(number, number / rate - predicted, 1)[0]
    assert only("vllm", "sequence", "LLMServingSim") == pytest.approx(slope, rel=0.02)


def test_published_numbers_give_the_seconds_of_a_draft_pass() -> None:
    two, four = 1.89 / 175.49, 2.08 / 165.65  # seconds of a step with 2 and with 4 drafted tokens
    assert only("vllm", "draft_pass", "16035") == pytest.approx((four - two) / 2, rel=0.02)
    assert only("llama.cpp", "draft_pass", "325.555") == pytest.approx(0.325555 / 259, rel=0.01)
    assert only("llama.cpp", "draft_pass", "54825") == pytest.approx(54.825 / 2602, rel=0.01)


def test_entries_of_another_form_are_refused() -> None:
    good = {"engine": "vllm", "term": "step", "seconds": 1e-3, "source": "a page"}
    assert engine_priors._estimate(good).seconds == 1e-3
    for change in ({"seconds": "1"}, {"seconds": 0.0}, {"term": "token"}, {"engine": "any"}, {"laws": ["a"]}, {"more": 1}):
        with pytest.raises(ParameterError):
            engine_priors._estimate(good | change)


# --- The rule ---


def estimates_are(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    monkeypatch.setattr(engine_priors, "_read", lambda: tuple(EngineEstimate("vllm", "step", each, "") for each in seconds))


def test_prior_is_the_mean_of_the_logarithms_and_a_spread_drawn_to_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates_are(monkeypatch, 1e-3, 4e-3)
    found = engine_priors.priors("vllm")["step"]
    assert found.median == pytest.approx(2e-3)
    between = 2 * math.log(2) ** 2  # sum of squares about the mean
    assert found.sd == pytest.approx(math.sqrt((2 * PRIORS["step"].sd ** 2 + between) / 3 * 1.5))
    estimates_are(monkeypatch, 1e-3)
    assert engine_priors.priors("vllm") == {}  # one source says nothing of the spread


def test_spread_follows_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def prior(*seconds: float) -> tuple[float, float]:
        estimates_are(monkeypatch, *seconds)
        found = engine_priors.priors("vllm")["step"]
        return found.median, found.sd

    agreeing, apart, many = prior(1e-3, 1e-3), prior(1e-4, 1e-2), prior(*[1e-3] * 60)
    assert [agreeing[0], apart[0], many[0]] == pytest.approx([1e-3] * 3)
    assert many[1] < agreeing[1] < apart[1]
    assert agreeing[1] > 0.5 * PRIORS["step"].sd  # two that agree by chance are not sure
    assert many[1] < 0.3 * PRIORS["step"].sd
    twice = prior(2e-4, 2e-2)  # other units, other median, the same spread
    assert twice == (pytest.approx(2 * apart[0]), pytest.approx(apart[1]))


def test_engines_have_priors_where_they_have_sources() -> None:
    for engine in ENGINES:
        for term in TERMS:
            many = len(engine_priors.estimates(engine, term)) >= engine_priors.FEWEST
            assert (term in engine_priors.priors(engine)) == many
        for prior in engine_priors.priors(engine).values():
            assert prior.unit == "s"
            assert 0.3 < prior.sd < 3
    assert engine_priors.priors("tensorrt-llm") == {}
    assert {*engine_priors.priors(ANY)} == {*TERMS}
    with pytest.raises(ParameterError, match=r"unknown engine 'vlm'; did you mean vllm"):
        engine_priors.priors("vlm")


# --- Laws ---


def of_priors(engine: str | None, unit: str = "step_ms", kernels: KernelSource = H100, seed: int = 0) -> step_law.StepLaw:
    return law_fit.fit(None, "guess", unit=unit, kernels=kernels, engine=engine, seed=seed)


def test_law_without_cells_has_the_priors_and_says_so() -> None:
    law = of_priors("vllm")
    for name, prior in engine_priors.priors("vllm").items():
        assert law.coefficients[name] == pytest.approx(prior.median, rel=1e-3)
        logs = np.log(law.draws[name])
        error = prior.sd / math.sqrt(logs.size)
        assert abs(logs.mean() - math.log(prior.median)) < 5 * error
        assert logs.std() == pytest.approx(prior.sd, rel=0.25)
    told = law_report.description(law)
    assert {row["from"] for row in told["coefficients"]} == {"prior"}
    words = " ".join([told["about"], *law_report.sentences(law)])
    assert "of priors, without cells" in words
    assert "no cells: intervals are those of the priors" in words
    assert "priors in seconds of vllm: step (3 sources of vllm)" in words
    assert law_report.extent(law) == "no cells, in step_ms: priors only"


def test_engine_is_kept_in_the_file(tmp_path: Path) -> None:
    for engine in (None, "sglang"):
        again = step_law.load(step_law.write(of_priors(engine), tmp_path / "guess.json"))
        assert again.engine == engine
        assert step_law.text(again) == step_law.text(of_priors(engine))


def test_kernels_of_a_draft_replace_the_time_of_its_pass() -> None:
    drafting = KernelSource("llama-3.1-8b", "h100", draft="llama-3.2-1b", source="roofline")
    assert {*engine_priors.used("vllm", drafting)} == {"step", "sequence"}
    assert engine_priors.used("vllm", None) == engine_priors.used(None, H100) == {}
    own, general = (of_priors(engine, kernels=drafting).coefficients["draft_pass"] for engine in ("vllm", None))
    assert own == pytest.approx(general)


def test_engine_without_kernels_changes_nothing() -> None:
    cells = Cells.of("step_ms", [1, 8, 64], [0, 0, 0], [10.0, 11.0, 15.0])
    assert step_law.text(law_fit.fit(cells, "one", engine="vllm")) == step_law.text(law_fit.fit(cells, "one"))


def test_more_sources_of_overhead_mean_slower_steps() -> None:
    """Priors of vLLM say a longer fixed time and draft pass than those of SGLang; predictions keep that order."""
    cells = Cells.of("step_ms", [1, 1], [0, 4])
    vllm, sglang = (of_priors(engine).predict(cells).values for engine in ("vllm", "sglang"))
    assert np.all(vllm > sglang)
    added = [engine_priors.priors(engine)["draft_pass"].median for engine in ("vllm", "sglang")]
    slope = (np.diff(vllm) - np.diff(sglang))[0] / 4e3
    assert slope == pytest.approx(added[0] - added[1], rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_cells_narrow_the_intervals(seed: int) -> None:
    """Cells made by a law drawn from the priors: after them, each of their predictions is surer."""
    before = of_priors("vllm", seed=seed)
    number, length = np.array([1, 1, 32, 32.0]), np.array([0, 4, 0, 4.0])
    asked = Cells.of("step_ms", number, length)
    random = np.random.Generator(np.random.Philox(seed))
    values = before.draws_of(asked)[seed] * np.exp(0.01 * random.standard_normal(4))
    measured = Cells.of("step_ms", number, length, values)
    after = law_fit.fit(measured, "measured", kernels=H100, engine="vllm", seed=seed)
    widths = [np.log(found.high / found.low) for found in (each.predict(asked) for each in (before, after))]
    assert np.all(widths[1] < 0.6 * widths[0])
    assert [row["from"] for row in law_report.description(after)["coefficients"]].count("cells") >= 2
