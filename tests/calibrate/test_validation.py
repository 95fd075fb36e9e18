"""Errors of predictions: each bound on bundled data, and on the public measurements if they are present."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from calibrate.commands.calibrate_app import app
from calibrate.fits import cpu_step, engine_run
from calibrate.fits import roofline_fit as fits
from calibrate.importers import bundled_profiles
from calibrate.validation import engine_tables, long_context_drafts, served_loads, validated_claims
from calibrate.validation import validation_page as page
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.hardware import composed_layers, profile, profile_files
from model.hardware.cost_models import step_time
from model.hardware.profile import Profile
from model.hardware.profile_costs import PEAKS, ProfileCosts
from model.hardware.roofline import Efficiency

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "gpu").is_dir(), reason="the folder of public measurements is absent: DECODESIM_DATA names it"
)
pytestmark = pytest.mark.usefixtures("read_once")
KEPT = Path(__file__).parents[1] / "data" / "validation"
OPERATIONS = {"h100": 0.022, "a100": 0.03, "l40s": 0.03}
"""Bound of the median leave-one-out error of products, by GPU."""
WHOLE = [f"{gpu}-{model}" for gpu in ("h100", "a100") for model in bundled_profiles.VIDUR]
LAW = Efficiency(memory=0.7, compute=0.6, elementwise=0.5, cache=0.9, launch=7e-6, attention_launch=13e-6, error=0.12)


# --- Bundled data ---


@pytest.fixture(scope="module")
def operations() -> dict[str, Profile]:
    return {gpu: profile_files.load(f"{gpu}-operations") for gpu in OPERATIONS}


@pytest.fixture(scope="module")
def layers() -> tuple[fits.MeasuredLayers, ...]:
    """Vidur's layers: three models from bundled profiles, phi-2 from the table in tests/data."""
    small = pl.read_csv(KEPT / "phi_2.csv")
    found = [fits.layers_of(profile_files.load(f"{gpu}-{model}")) for gpu in fits.GPUS for model in bundled_profiles.VIDUR]
    for gpu in fits.GPUS:
        rows = small.filter(pl.col("gpu") == gpu)
        found.append(fits.MeasuredLayers(gpu, "phi-2", rows["tokens"].to_numpy().astype(np.float64), rows["time_s"].to_numpy()))
    return (*found, fits.layers_of(profile_files.load("rtx-4090-llama-3.1-8b")))


def kept_run() -> engine_run.EngineRun:
    table = pl.read_csv(KEPT / "engine_run.csv")
    return engine_run.EngineRun(**{name: table[name].to_numpy().astype(np.float64) for name in table.columns})


@pytest.mark.parametrize(("gpu", "bound"), OPERATIONS.items())
def test_leave_one_out_error_of_products_is_within_bound(operations: dict[str, Profile], gpu: str, bound: float) -> None:
    found = composed_layers.gemm_left_out(operations[gpu])
    assert found.median() <= bound
    assert found.percentile(90) <= 0.17
    if validated_claims.is_dense(operations[gpu]):
        assert found.median(high=32) <= 0.01
    assert validated_claims.is_dense(operations[gpu]) == (gpu == "h100")


@pytest.mark.parametrize("gpu", ["a100", "l40s"])
def test_products_without_neighbouring_shapes_miss_the_bound(operations: dict[str, Profile], gpu: str) -> None:
    """The check can fail: interpolation between coarse m misses the bound."""
    assert composed_layers.gemm_left_out(operations[gpu], ()).median() > OPERATIONS[gpu]


@pytest.mark.parametrize("gpu", OPERATIONS)
def test_leave_one_out_error_of_attention_is_within_bound(operations: dict[str, Profile], gpu: str) -> None:
    found = composed_layers.attention_left_out(operations[gpu])
    alone = composed_layers.attention_left_out(operations[gpu], alike=False)
    assert found.median() <= 0.03
    assert found.percentile(90) <= 0.17
    assert alone.median() > 1.5 * found.median()
    if gpu != "a100":
        assert alone.median() > 0.03


def composed(operations: dict[str, Profile]) -> validated_claims.Claim:
    return validated_claims.composed(operations, [profile_files.load(name) for name in WHOLE])


def test_composed_layers_are_within_bounds_of_measured_ones(operations: dict[str, Profile]) -> None:
    claim = composed(operations)
    few = [case for case in claim.cases if "to 64 tokens" in case.name]
    many = [case for case in claim.cases if "held-out models" in case.name]
    assert (len(few), len(many), len(claim.cases)) == (len(WHOLE) * 4, 2 * 4 * 3, len(WHOLE) * 4 + 24)
    for case in claim.cases:
        assert case.met, case.name
    assert max(case.target or 1 for case in few) <= 0.06
    assert max(case.target or 1 for case in many) <= 0.21
    # The stated error holds for models that it was not derived from: most are within it, nearly all within twice the error.
    within, twice = (int(each) for each in re.findall(r"(\d+)% (?:are )?within", claim.weaknesses))
    assert 50 <= within <= 85
    assert twice >= 95


def test_composed_layers_without_elementwise_kernels_miss_the_bound(
    operations: dict[str, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composed_layers, "elementwise_kernels", lambda _, __, tokens, ___: np.zeros(np.shape(tokens)))
    assert sum(case.median > 0.10 for case in composed(operations).cases) > 8


def test_engine_steps_are_within_bounds_of_the_profile() -> None:
    claim = validated_claims.step(kept_run(), profile_files.load("rtx-4090-llama-3.1-8b"))
    every, without = claim.case("all seconds without prompts"), claim.case("of these: without recomputation")
    assert every.errors.size > 100
    assert every.median <= 0.05
    assert without.median <= 0.03
    assert without.largest <= 0.20
    assert claim.case("of these: with recomputation").median > 0.15


@pytest.mark.parametrize("part", ["attention", "dense"])
def test_halving_a_part_of_the_step_misses_the_bound(part: str) -> None:
    made = profile_files.load("rtx-4090-llama-3.1-8b")
    scaled = pl.when(pl.col("part") == part).then(0.5).otherwise(1.0)
    less = replace(made, table=made.table.with_columns(pl.col(name) * scaled for name in profile.TIMES))
    assert validated_claims.step(kept_run(), less).case("of these: without recomputation").median > 0.05


def test_recomputation_explains_slow_seconds_and_adjacent_prompts_do_not() -> None:
    """Nearly all seconds that take a tenth longer than predicted have recomputation."""
    run = kept_run()
    errors = run.errors(ProfileCosts(profile_files.load("rtx-4090-llama-3.1-8b")))
    late = run.decoding & (np.nan_to_num(errors) < -0.1)
    assert (late & run.recomputing).sum() >= 0.85 * late.sum()
    assert run.recomputing[run.decoding].mean() < 0.3
    reading = run.prompts > 0
    adjacent = np.append(False, reading[:-1]) | np.append(reading[1:], False)
    near, far = (np.median(np.abs(errors[run.decoding & each])) for each in (adjacent, ~adjacent))
    assert abs(near - far) < 0.01


def test_roofline_of_an_unseen_model_is_within_12_percent(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    found = fits.unseen_models(layers)
    assert len(found) == 12
    pooled = fits.pooled(found)
    assert {*pooled} == {"a100", "h100", "a40"}
    assert max(pooled.values()) <= 0.12
    assert max(fits.pooled(found, 64).values()) <= 0.12
    # Also phi-2, which has one norm and no gate, unlike the models of its fit (two norms and a gate).
    assert max(float(np.median(np.abs(one.error))) for one in found) <= 0.12
    assert (preset("phi-2").norms, preset("phi-2").gated) == (1, False)
    assert all((preset(model).norms, preset(model).gated) == (2, True) for model in bundled_profiles.VIDUR)


def test_roofline_of_an_unseen_gpu_is_within_the_stated_error(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    found, usual = fits.unseen_gpus(layers), Efficiency()
    assert {each.gpu for each in found} == {"a100", "a40", "h100", "rtx-4090"}
    few, many = fits.pooled(found, fits.MEMORY_BOUND_TOKENS), fits.pooled(found, least=fits.COMPUTE_BOUND_TOKENS + 1)
    assert max(few.values()) == pytest.approx(usual.error, rel=0.05)
    assert max(many.values()) == pytest.approx(usual.compute_error, rel=0.05)
    # Only one GPU has such a large error: the others are far smaller.
    assert sorted(few.values())[-2] < 0.14
    assert sorted(many.values())[-2] < 0.12


def test_one_measured_layer_of_a_gpu_reduces_its_error(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    """Each GPU is held out, and a layer of another model on it is given: large errors fall to a third at most."""
    errors = fits.unseen_gpus(layers), fits.errors_with_one_measured(layers, [1])
    unseen, one = (fits.pooled(found, fits.MEMORY_BOUND_TOKENS) for found in errors)
    assert max(one.values()) <= fits.ADAPTED_ERRORS["error"]
    for gpu in ("h100", "rtx-4090"):
        assert one[gpu] <= unseen[gpu] / 3
    assert all(one[gpu] <= unseen[gpu] for gpu in one)
    # A layer over one token does not depend on the compute rate: a second layer does.
    errors = fits.errors_with_one_measured(layers, [1]), fits.errors_with_one_measured(layers, [1, 512])
    many, two = (fits.pooled(found, least=fits.COMPUTE_BOUND_TOKENS + 1) for found in errors)
    assert many["rtx-4090"] > 0.4
    assert max(two.values()) <= fits.ADAPTED_ERRORS["compute_error"]


def made_cells(gpu: str, law: Efficiency, tokens: tuple[float, ...]) -> list[fits.Cell]:
    line = fits.roofline_on(gpu, preset("llama-2-7b"))
    return [fits.Cell(line, at, float(replace(line, efficiency=law).gemms(at))) for at in tokens]


def test_adapted_efficiencies_lie_between_prior_and_measurement() -> None:
    usual = Efficiency()
    same = fits.adapt_efficiency(made_cells("a100", usual, (1, 512)))
    assert all(getattr(same, name) == pytest.approx(getattr(usual, name), rel=1e-3) for name in fits.OF_LAYERS)
    slow = replace(usual, memory=0.7 * usual.memory)
    found = fits.adapt_efficiency(made_cells("a100", slow, (1,)))
    assert slow.memory < found.memory < usual.memory
    assert found.compute == pytest.approx(usual.compute, rel=0.01)
    assert (found.error, found.compute_error) == (fits.ADAPTED_ERRORS["error"], usual.compute_error)
    more = fits.adapt_efficiency(made_cells("a100", slow, (1, 2, 4, 8)))
    assert slow.memory < more.memory < found.memory  # four times say more than one
    wide = fits.adapt_efficiency(made_cells("a100", replace(usual, compute=0.6 * usual.compute), (4096,)))
    assert wide.compute < 0.8 * usual.compute
    assert (wide.error, wide.compute_error) == (usual.error, fits.ADAPTED_ERRORS["compute_error"])


def test_a_measured_product_reduces_the_error_like_a_layer() -> None:
    _, cell = fits.product_cell("h100,1,4096,4096,15e-6")
    assert cell.predicted(Efficiency()) == pytest.approx((2 * 4096 * 4096 + 4 * 4096) / (3.35e12 * 0.806) + 6.6e-6, rel=1e-3)
    assert fits.adapt_efficiency([cell]).error == fits.ADAPTED_ERRORS["error"]
    assert cell.predicted(fits.adapt_efficiency([cell])) < cell.predicted(Efficiency())


FIT = ["fit", "roofline"]


def test_fit_to_one_layer_prints_scenario_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the data folder: the keys of a scenario's roofline costs, with the smaller error."""
    monkeypatch.delenv("DECODESIM_DATA", raising=False)
    done = CliRunner().invoke(app, [*FIT, "--layer", "h100,llama-2-7b,1,177e-6"])
    assert done.exit_code == 0, done.stderr
    keys = tomllib.loads(done.stdout)
    assert {*keys} == {*fits.KEYS}
    assert keys["memory_error"] == fits.ADAPTED_ERRORS["error"]
    assert 0.82 < keys["memory_efficiency"] < 0.9
    assert "measure a layer at 512 tokens" in done.stdout
    both = CliRunner().invoke(app, [*FIT, "--layer", "h100,llama-2-7b,1,177e-6", "--product", "h100,2048,4096,4096,110e-6"])
    assert tomllib.loads(both.stdout)["compute_error"] == fits.ADAPTED_ERRORS["compute_error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layer", "h100,llama-2-7b,1"], "layer must be GPU,MODEL,TOKENS,SECONDS, got 'h100,llama-2-7b,1'"),
        (["--product", "h100,1,1,1e-5"], "product must be GPU,M,N,K,SECONDS"),
        (["--layer", "h100,llama-2-7b,one,1e-4"], "TOKENS must be a number, got 'one'"),
        (["--layer", "h100,llama-2-7b,1,1e-9"], "seconds must be between 0.00011, what the peaks of the GPU allow"),
        (["--layer", "h100,llama-2-7b,1,0.177"], "got 0.177; give one layer or product, in seconds"),
        (["--layer", "h100,llama-2-7b,1,nan"], "SECONDS must be"),
        (["--layer", "h900,llama-2-7b,1,1e-4"], "unknown device 'h900'; did you mean h"),
        (["--layer", "h100,phi-2,1,2e-4", "--layer", "a100,phi-2,1,3e-4"], "all times must be of one GPU, got h100, a100"),
        ([], "DATA_DIR is required without --layer and --product"),
    ],
)
def test_impossible_measured_times_are_refused(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODESIM_DATA", raising=False)
    done = CliRunner().invoke(app, [*FIT, *arguments])
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert said in line


def test_peaks_without_efficiencies_miss_the_bounds(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    """The checks can fail; the RTX 4090 is left out, because it nearly reaches its bandwidth."""
    bare = [fits.UnseenModelErrors(one.gpu, one.model, one.tokens, one.errors(PEAKS)) for one in layers if one.gpu != "rtx-4090"]
    assert min(fits.pooled(bare).values()) > 0.25
    assert min(fits.pooled(bare, 64).values()) > 0.25


def test_default_efficiencies_are_the_fit_to_bundled_layers(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    found, usual = fits.fit_layers(layers), Efficiency()
    for name in fits.OF_LAYERS:
        assert getattr(usual, name) == pytest.approx(getattr(found, name), rel=0.02), name
    other = fits.fit_layers([one for one in layers if one.gpu == "rtx-4090"])
    assert other.memory != pytest.approx(usual.memory, rel=0.1)


def test_parts_of_a_pass_on_a_cpu_sum_to_its_time() -> None:
    claim = validated_claims.processor({name: cpu_step.rows_of(name) for name in cpu_step.names()})
    unbounded = [case for case in claim.cases if "widths" in case.name and "overhead fitted" not in case.name]
    bounded = [case for case in claim.cases if case not in unbounded]
    assert len(bounded) == 5
    for case in bounded:
        assert case.target == 0.05, case.name
        assert case.median <= 0.05, case.name
    # The check can fail: at widths that were not timed the error is larger, and there is no target.
    assert len(unbounded) == 2
    assert all(case.target is None and case.median > 0.05 for case in unbounded)


def test_cpu_step_prints_the_errors_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    cpu_step.main()
    heading, *lines = capsys.readouterr().out.splitlines()
    [name] = cpu_step.names()
    header, rows = cpu_step.rows_of(name)
    assert heading == f"{name}: {header['name']}, {header['threads']} thread, {header['dtype']}, {header['date']}"
    expected = []
    for case in validated_claims.processor({name: (header, rows)}).cases:
        found = re.fullmatch(rf"{name}: other ([^,]*(?:, overhead fitted)?)(, next to another process)?(.*)", case.name)
        assert found is not None
        what, loaded, _ = found.groups()
        expected.append(f"  other {what}, busy {int(loaded is not None)}: {case.errors.size} passes, median error "
                        f"{case.median:.1%}, worst {case.largest:.1%}")  # fmt: skip
    *whole, before = expected
    assert lines[:6] == whole
    assert lines[6] == f"  before points were timed again, busy 1: {before.partition('passes, ')[2]}"
    # Whole passes by busy and point: the shortest of the rounds, and the median round.
    taken: dict[int, dict[Any, list[float]]] = {0: {}, 1: {}}
    for row in rows:
        if row["kind"] == "point":
            taken[row["busy"]].setdefault((row["width"], row["context"], row["batch"]), []).append(row["whole_us"][1])
    for line, of in ((lines[7], min), (lines[8], np.median)):
        ratios = {point: of(both) / of(taken[0][point]) for point, both in taken[1].items()}
        low, middle, high = np.percentile([*ratios.values()], (25, 50, 75))
        assert f"{middle:.2f}" in line
        assert f"({low:.2f} to {high:.2f})" in line
        if of is min:
            one = np.median([ratio for point, ratio in ratios.items() if point[0] == 1])
            assert line == f"  next to one process: {middle:.2f} times as long ({low:.2f} to {high:.2f}); width 1: {one:.2f}"
    assert lines[8].startswith("  in the median round instead of the shortest: ")
    assert len(lines) == 9


def test_one_fitted_cost_explains_ppd_table_3() -> None:
    claim = validated_claims.theorem()
    assert claim.case("one cost, fitted on the other data set").largest <= 0.012
    assert claim.case("the theorem alone").median > 0.05


# --- Fits to generated times ---


def made_up(gpu: str, model: str, law: Efficiency = LAW, factor: float = 1.0) -> fits.MeasuredLayers:
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], dtype=np.float64)
    line = replace(fits.roofline_on(gpu, preset(model)), efficiency=law)
    return fits.MeasuredLayers(gpu, model, tokens, factor * line.gemms(tokens))


def attention_made_up(operations: Profile, law: Efficiency) -> fits.MeasuredAttention:
    """A table of attention whose times follow a roofline."""
    one = fits.attention_of(operations)
    groups = tuple(
        (line, context, batch, replace(line, efficiency=law).attention(1, context, batch)) for line, context, batch, _ in one.groups
    )
    return one._replace(groups=groups)


def test_fit_recovers_the_efficiencies_of_generated_layers() -> None:
    measured = [made_up(gpu, model) for gpu in ("a100", "h100") for model in ("llama-2-7b", "phi-2", "llama-2-70b")]
    found = fits.fit_layers(measured)
    for name in fits.OF_LAYERS:
        assert getattr(found, name) == pytest.approx(getattr(LAW, name), rel=1e-3), name
    assert max(fits.pooled(fits.unseen_models(measured)).values()) < 1e-3
    assert max(fits.pooled(fits.unseen_gpus(measured)).values()) < 1e-3


LIMITS = {"memory": (0.4, 1.0), "compute": (0.3, 0.95), "elementwise": (0.3, 4.0), "launch": (0.5e-6, 60e-6)}
"""Plausible bounds of efficiencies, as in the module."""


@pytest.mark.parametrize("name", LIMITS)
def test_fitted_efficiencies_stay_within_plausible_bounds(name: str) -> None:
    for bound, beyond in zip(LIMITS[name], (0.6, 1.6), strict=True):
        law = replace(LAW, **{name: beyond * bound})
        found = fits.fit_layers([made_up("a100", "llama-2-7b", law), made_up("a100", "phi-2", law)])
        assert getattr(found, name) == pytest.approx(bound, rel=1e-3)
    inside = replace(LAW, **{name: 0.98 * LIMITS[name][1]})
    found = fits.fit_layers([made_up("a100", "llama-2-7b", inside), made_up("a100", "phi-2", inside)])
    assert getattr(found, name) == pytest.approx(getattr(inside, name), rel=2e-3)


def test_three_widths_are_enough_for_a_fit() -> None:
    assert fits.MeasuredLayers("a100", "phi-2", np.array([1.0, 2.0, 4.0]), np.ones(3)).weights == pytest.approx([np.log(2)] * 3)
    with pytest.raises(ParameterError, match="layers of phi-2 on a100 must be at least 3 with a time each, got 3 tokens and 2"):
        fits.MeasuredLayers("a100", "phi-2", np.array([1.0, 2.0, 4.0]), np.ones(2))


def test_pooled_errors_include_both_bounds() -> None:
    left = [fits.UnseenModelErrors("a", "x", np.array([1.0, 64, 65]), np.array([0.1, -0.3, 0.9])),
            fits.UnseenModelErrors("a", "y", np.array([64.0]), np.array([0.2])),
            fits.UnseenModelErrors("b", "x", np.array([65.0]), np.array([-0.4]))]  # fmt: skip
    assert fits.pooled(left) == {"a": pytest.approx(0.25), "b": pytest.approx(0.4)}
    assert fits.pooled(left[:2], 64) == {"a": pytest.approx(0.2)}
    assert fits.pooled(left, least=65) == {"a": pytest.approx(0.9), "b": pytest.approx(0.4)}
    assert fits.pooled(left[:1], 64, 64) == {"a": pytest.approx(0.3)}


def test_given_layers_are_excluded_from_the_errors() -> None:
    """With two models on a GPU, each is predicted from the other's layers; a single model is predicted from its own."""
    measured = [made_up("a100", "llama-2-7b"), made_up("a40", "llama-2-7b"), made_up("a40", "phi-2")]
    found = fits.errors_with_one_measured(measured, [1, 500])
    assert [(one.gpu, one.model) for one in found] == [("a100", "llama-2-7b"), ("a40", "phi-2"), ("a40", "llama-2-7b")]
    whole = measured[0].tokens
    assert found[0].tokens.tolist() == [each for each in whole if each not in (1, 512)]
    assert all(one.tokens.tolist() == whole.tolist() for one in found[1:])
    assert max(float(np.abs(one.error).max()) for one in found) < 1e-3  # all follow one roofline
    twice = [replace(each, seconds=each.seconds * (2 if each.gpu == "a40" else 1)) for each in measured]
    far, near = (fits.pooled(each)["a40"] for each in (fits.unseen_gpus(twice), fits.errors_with_one_measured(twice, [1, 500])))
    assert far == pytest.approx(0.5, abs=1e-3)
    assert near < 0.25


def test_adapted_efficiencies_maximise_the_posterior() -> None:
    """No step of an efficiency increases the posterior, with standard deviations of 10, 15, 50, 40 and 5 %."""
    usual = Efficiency()
    cells = [cell._replace(seconds=1.2 * cell.seconds) for cell in made_cells("a100", usual, (1, 8, 512))]
    found = fits.adapt_efficiency(cells)
    spread = {"memory": 0.1, "compute": 0.15, "elementwise": 0.5, "launch": 0.4}

    def missed(at: Efficiency) -> float:
        prior = sum((np.log(getattr(at, name) / getattr(usual, name)) / wide) ** 2 for name, wide in spread.items())
        return float(prior + sum((np.log(cell.predicted(at) / cell.seconds) / 0.05) ** 2 for cell in cells))

    least = missed(found)
    assert least < 0.5 * missed(usual)
    for name in spread:
        for factor in (0.99, 1.01):
            assert missed(replace(found, **{name: factor * getattr(found, name)})) > least, name
    one, both = fits.adapt_efficiency(cells[:1]), {name: fits.ADAPTED_ERRORS[name] for name in ("error", "compute_error")}
    assert {name: getattr(found, name) for name in both} == both
    assert (one.error, one.compute_error) == (fits.ADAPTED_ERRORS["error"], usual.compute_error)
    sure = replace(usual, error=0.01)  # a smaller prior error is kept
    assert fits.adapt_efficiency(cells[:1], sure).error == 0.01


@pytest.mark.parametrize("cell", ["h100,llama-2-7b,4,{}", "h100,1,4096,4096,{}"])
def test_times_at_the_bounds_of_a_gpu_are_accepted(cell: str) -> None:
    """Bounds: a tenth below the time at peak (cards run above their clock), and a hundredth of the peaks plus 0.1 ms of launch."""
    make = fits.layer_cell if "llama" in cell else fits.product_cell
    _, made = make(cell.format("1"))
    peaks = made.predicted(PEAKS)
    for bound, inside, outside in ((peaks / 1.1, 1.0001, 0.9999), (100 * peaks + 1e-4, 0.9999, 1.0001)):
        fits.adapt_efficiency([make(cell.format(repr(inside * bound)))[1]])
        limits = f"{peaks / 1.1:.3g}, what the peaks of the GPU allow, and {100 * peaks + 1e-4:.3g}"
        with pytest.raises(ParameterError, match=f"seconds must be between {limits}, got {outside * bound:g}; give one layer or"):
            fits.adapt_efficiency([make(cell.format(repr(outside * bound)))[1]])
    with pytest.raises(ParameterError, match="layers and products must be at least one in all, got none; give a measured time"):
        fits.adapt_efficiency([])


def test_fit_to_measured_times_prints_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODESIM_DATA", raising=False)
    given = ["--layer", "h100, llama-2-7b ,1,177e-6", "--product", "h100,4,4096,4096,15e-6"]
    cells = [fits.layer_cell(given[1])[1], fits.product_cell(given[3])[1]]
    usual, found = Efficiency(), fits.adapt_efficiency(cells)
    keys = {
        "memory_efficiency": "memory", "compute_efficiency": "compute", "elementwise_efficiency": "elementwise",
        "launch_s": "launch", "memory_error": "error", "compute_error": "compute_error",
    }  # fmt: skip
    expected = ["# 2 measured on h100; in brackets the bundled values, fitted to other GPUs"]
    expected += [f"{key} = {getattr(found, name):.4g}  # [{getattr(usual, name):.4g}]" for key, name in keys.items()]
    for cell, tokens in zip(cells, (1, 4), strict=True):
        was, now = (cell.predicted(each) / cell.seconds - 1 for each in (usual, found))
        expected.append(f"# error at {tokens} tokens: {was:+.1%} with the bundled values, {now:+.1%} now")
    expected.append("# no time given is limited by arithmetic: measure a layer at 512 tokens")
    done = CliRunner().invoke(app, [*FIT, *given])
    assert (done.exit_code, done.stderr, done.stdout.splitlines()) == (0, "", expected)
    wide = CliRunner().invoke(app, [*FIT, "--product", "h100,2048,4096,4096,110e-6"])
    assert wide.stdout.splitlines()[-1] == "# no time given is limited by reading the weights: measure a layer at 1 token"


def test_a_held_out_gpu_is_not_used_in_the_fit() -> None:
    """A GPU that takes twice as long as the others' roofline predicts has an error of one half if it is held out."""
    measured = [
        made_up(gpu, model, factor=2.0 if gpu == "a40" else 1.0)
        for gpu in ("a100", "h100", "a40")
        for model in ("llama-2-7b", "llama-2-13b")
    ]
    assert fits.pooled(fits.unseen_gpus(measured))["a40"] == pytest.approx(0.5, abs=1e-3)
    odd = [made_up("a100", "llama-2-7b"), made_up("a100", "llama-2-13b"), made_up("a100", "phi-2", factor=2.0)]
    worst = {one.model: float(np.median(np.abs(one.error))) for one in fits.unseen_models(odd)}
    assert worst["phi-2"] == pytest.approx(0.5, abs=1e-3)


def test_fit_command_prints_errors_on_unseen_models_and_gpus(
    operations: dict[str, Profile], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU takes twice as long over few tokens only: the errors printed for this range show it."""
    measured = [made_up(gpu, model) for gpu in ("a100", "a40") for model in ("llama-2-7b", "llama-2-13b")]
    for index in (2, 3):
        few = measured[index].tokens <= fits.MEMORY_BOUND_TOKENS
        measured[index] = replace(measured[index], seconds=measured[index].seconds * np.where(few, 2, 1))
    monkeypatch.setattr(fits, "layers", lambda _: measured)
    monkeypatch.setattr(fits, "attention", lambda _: [attention_made_up(operations["a100"], LAW)])
    done = CliRunner().invoke(app, [*FIT, str(tmp_path)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    found = dict(re.findall(r"^median errors on an unseen (.*): (.*)$", done.stdout, re.MULTILINE))
    kinds = {
        "model on the same GPU": fits.unseen_models(measured), "GPU": fits.unseen_gpus(measured),
        "GPU with one measured layer of 1 token": fits.errors_with_one_measured(measured, [1]),
    }  # fmt: skip
    expected = {}
    for kind, left in kinds.items():
        for where, inside in (("to 64 tokens", lambda tokens: tokens <= 64), ("beyond 256 tokens", lambda tokens: tokens > 256)):
            errors = {gpu: [abs(one.error[inside(one.tokens)]) for one in left if one.gpu == gpu] for gpu in ("a100", "a40")}
            medians = {gpu: validated_claims.percent(float(np.median(np.concatenate(each)))) for gpu, each in errors.items()}
            expected[f"{kind}, {where}"] = ", ".join(f"{gpu} {error}" for gpu, error in medians.items())
    assert found == expected
    assert found["GPU, to 64 tokens"].endswith(f"a40 {validated_claims.percent(0.5)}")
    law = fits.fit(measured, fits.attention(tmp_path))
    for name in fits.OF_LAYERS:
        scale = 1e6 if name.endswith("launch") else 1
        fitted, usual = (f"{scale * getattr(each, name):.3f}" for each in (law, Efficiency()))
        assert re.search(rf"^  {name} +{fitted}.* bundled: {usual}", done.stdout, re.MULTILINE)
    assert f"fitted to {sum(each.tokens.size for each in measured)} layers and " in done.stdout


def test_fit_recovers_the_efficiencies_of_generated_attention(operations: dict[str, Profile]) -> None:
    found = fits.fit_attention([attention_made_up(operations[gpu], LAW) for gpu in ("a100", "l40s")], LAW)
    for name in fits.OF_ATTENTION:
        assert getattr(found, name) == pytest.approx(getattr(LAW, name), rel=1e-3), name


def test_attention_times_are_at_least_those_of_reading_memory(operations: dict[str, Profile]) -> None:
    for gpu in OPERATIONS:
        one = fits.attention_of(operations[gpu])
        assert (one.errors(PEAKS) <= 1e-12).all()
        assert one.shared.size == one.seconds.size


@pytest.mark.parametrize("bound", fits.BOUNDS)
def test_default_efficiencies_lie_within_the_bounds(bound: str) -> None:
    low, high = fits.BOUNDS[bound]
    assert low < getattr(Efficiency(), bound) < high


# --- A run of an engine ---


def write_run(folder: Path) -> Path:
    """Two sequences: the second waits, starts, is preempted while the first continues, and is resumed.

    The log's first second ends half a second after the first request, which uses another clock.
    """
    rows = [(1, 100, 10, 1, 1, 50), (2, 80, 20, 2, 0, 90), (3, 0, 12, 1, 1, 60), (4, 0, 6, 2, 0, 95), (5, 0, 20, 2, 0, 96)]
    rows += [(6, 0, 10, 1, 0, 60), (7, 0, 5, 0, 0, 0)]
    names = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
    pl.DataFrame(rows, schema=names, orient="row").write_csv(folder / "timeseries.csv")
    requests = [
        {"queued_ts": 100.0, "scheduled_ts": 100.1, "last_token_ts": 106.2},
        {"queued_ts": 100.2, "scheduled_ts": 101.2, "last_token_ts": 105.2},
    ]
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(each) for each in requests), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps({"kv_cache": {"num_kv_tokens": 1000}}), encoding="utf-8")
    return folder


def test_resumed_sequences_are_counted(tmp_path: Path) -> None:
    run = engine_run.read(write_run(tmp_path))
    assert run.returned.tolist() == [0, 0, -1, 1, 0, 0, 0]
    assert run.context.tolist() == [500, 450, 600, 475, 480, 600, 0]
    assert not run.decoding.any()  # too few run


STAMPS = [
    {"input_toks": 100, "output_toks": 41, "first_token_ts": 101.2}, {"input_toks": 60, "output_toks": 11, "first_token_ts": 103.2},
]  # fmt: skip


def without_room(folder: Path, stamps: list[dict[str, Any]], meta: dict[str, Any]) -> Path:
    """The same run without the capacity of the cache."""
    path = folder / "requests.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(json.dumps(one | more) for one, more in zip(lines, stamps, strict=True)), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


@pytest.mark.parametrize("meta", [{}, {"kv_cache": None}, {"kv_cache": {"num_kv_tokens": None, "block_size": 16}}])
def test_lengths_follow_from_time_stamps_without_the_cache_capacity(tmp_path: Path, meta: dict[str, Any]) -> None:
    known = engine_run.read(write_run(tmp_path))
    run = engine_run.read(without_room(tmp_path, STAMPS, meta))
    # Seconds end at 100.7 + n, within .02: the first has 100 + 1 tokens at 101.2 and 140 at 106.2, 8 a second.
    first = [100 + 1 + 8 * (101.7 + at - 101.2) for at in range(5)]
    second = {3: 60 + 1 + 5 * 0.5, 4: 60 + 1 + 5 * 1.5}
    wanted = [0.0, *(np.mean([each, second[at]]) if at in second else each for at, each in enumerate(first, 1)), 0.0]
    assert run.context == pytest.approx(np.array(wanted), abs=0.5)
    for name in ("prompts", "tokens", "running", "waiting", "returned"):
        assert getattr(run, name).tolist() == getattr(known, name).tolist()


def test_requests_without_lengths_need_the_cache_capacity(tmp_path: Path) -> None:
    folder = without_room(write_run(tmp_path), [{}, {}], {})
    with pytest.raises(ParameterError, match=r"kv_cache\.num_kv_tokens or input_toks, output_toks, first_token_ts: KeyError"):
        engine_run.read(folder)
    (folder / "meta.json").write_text('{"kv_cache": {"num_kv_tokens": -5}}', encoding="utf-8")
    with pytest.raises(ParameterError, match="num_kv_tokens must be at least 1, got -5"):
        engine_run.read(folder)


def test_compared_seconds_have_ten_sequences_and_no_prompt() -> None:
    running, written = np.array([9.0, 10, 10, 10, 30]), np.array([90.0, 100, 0, 100, 300])
    prompts, returned = np.array([0.0, 0, 0, 1, 0]), np.array([0.0, 1, 0, -1, 0])
    run = engine_run.EngineRun(prompts, written, running, np.zeros(5), np.full(5, 512.0), returned)
    assert run.decoding.tolist() == [False, True, False, False, True]
    assert run.recomputing.tolist() == [False, True, False, False, False]
    hardware = ProfileCosts(profile_files.load("rtx-4090-llama-3.1-8b"))
    errors = run.errors(hardware)
    assert np.isnan(errors[2])
    # Ten sequences that generate a hundred tokens a second have steps of a tenth of a second.
    for at in (0, 1, 3, 4):
        took = running[at] / written[at]
        assert errors[at] == pytest.approx(float(step_time(hardware, 512.0, running[at]).seconds) / took - 1)
    with pytest.raises(ParameterError, match="columns of a run must have one value for each second, got "):
        engine_run.EngineRun(prompts, written, running, np.zeros(4), np.full(5, 512.0), returned)
    with pytest.raises(ParameterError, match="waiting"):
        engine_run.EngineRun(prompts, written, running, np.array([0.0, 0, -1, 0, 0]), np.full(5, 512.0), returned)


def test_clocks_are_aligned_within_three_seconds_of_the_first_request(tmp_path: Path) -> None:
    """The log begins 2.5 s before the first request, and the values of each second do not change."""
    folder = write_run(tmp_path)
    known = engine_run.read(folder)
    path = folder / "timeseries.csv"
    table = pl.read_csv(path)
    nothing = dict.fromkeys(table.columns, 0)
    early = pl.DataFrame([nothing | {"t": at} for at in range(1, 3)], schema=table.schema)
    pl.concat([early, table.with_columns(pl.col("t") + 2)]).write_csv(path)
    run = engine_run.read(folder)
    assert run.returned.tolist() == [0, 0, *known.returned]
    assert run.context.tolist() == [0, 0, *known.context]
    (folder / "requests.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ParameterError, match=r"requests.jsonl must have at least one request, got none"):
        engine_run.read(folder)


@needs_data
def test_lengths_from_time_stamps_agree_with_the_cache(tmp_path: Path) -> None:
    """On the public run; the cache counts whole blocks and preempted sequences, time stamps do not."""
    for name in ("timeseries.csv", "requests.jsonl"):
        shutil.copyfile(DATA / validated_claims.RUN / name, tmp_path / name)
    (tmp_path / "meta.json").write_text("{}", encoding="utf-8")
    known, stamped = engine_run.read(DATA / validated_claims.RUN), engine_run.read(tmp_path)
    seconds = known.decoding & ~known.recomputing
    assert np.median(np.abs(stamped.context[seconds] / known.context[seconds] - 1)) < 0.03
    hardware = ProfileCosts(profile_files.load("rtx-4090-llama-3.1-8b"))
    errors = [np.median(np.abs(run.errors(hardware)[seconds])) for run in (known, stamped)]
    assert errors[1] < errors[0] + 0.01


@pytest.mark.parametrize("name", ["meta.json", "requests.jsonl", "timeseries.csv"])
def test_an_incomplete_run_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ParameterError, match=name.split(".")[0]):
        engine_run.read(folder)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: fits.fit_layers([]), "layers must be of at least one model"),
        (lambda: fits.fit_attention([]), "attention must be of at least one table"),
        (lambda: fits.MeasuredLayers("a100", "phi-2", np.ones(2), np.ones(2)), "at least 3 with a time each, got 2 tokens"),
        (lambda: validated_claims.PredictionErrors("none", np.empty(0)), "at least one finite number, got 0"),
        (lambda: validated_claims.PredictionErrors("odd", np.array([np.nan])), "at least one finite number"),
        (lambda: validated_claims.theorem().case("other"), "has no case 'other'"),
        (lambda: engine_run.EngineRun(*[np.ones(2)] * 5, np.ones(3)), "one value for each second"),
    ],
)
def test_bad_input_of_fits_and_claims_is_refused(wrong: Callable[[], Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        wrong()


# --- The page ---


def claim(*cases: validated_claims.PredictionErrors) -> validated_claims.Claim:
    return validated_claims.Claim("Something", "What was done.", "Where it fails.", cases, "measured: by hand")


GOOD = validated_claims.PredictionErrors("good", np.array([0.01, -0.02, 0.03]), "m 3", 0.025)
def test_a_table_is_dense_with_every_m_from_1_to_17() -> None:
    made = profile_files.load("h100-operations")
    assert validated_claims.is_dense(made)
    for m in range(1, 19):
        less = replace(made, table=made.table.filter((pl.col("part") != "gemm") | (pl.col("m") != m)))
        assert validated_claims.is_dense(less) == (m == 18), m


def test_a_case_is_kept_up_to_its_target() -> None:
    """Of ten errors, the median lies between the fifth and the sixth, the 90th percentile a tenth above the ninth."""
    errors = np.array([-0.1, 0.2, -0.3, 0.4, -0.5, 0.6, -0.7, 0.8, -0.9, 1.0])
    case = validated_claims.PredictionErrors("ten", errors, "m 3", 0.55, 0.91)
    assert (case.median, case.percentile_90, case.largest) == pytest.approx((0.55, 0.91, 1.0))
    at = {"target": case.median, "target_90": case.percentile_90}
    assert replace(case, **at).met
    for name, bound in at.items():
        assert not replace(case, **at | {name: bound - 1e-9}).met
        assert replace(case, **{"target": None, "target_90": None} | {name: bound}).met
        assert not replace(case, **{"target": None, "target_90": None} | {name: bound - 1e-9}).met
    both = claim(GOOD, case)
    assert [each.name for each in both.by_error] == ["ten", "good"]
    assert both.case("good") is GOOD
    with pytest.raises(ParameterError, match="claim 'Something' has no case 'bad'; there are good, ten"):
        both.case("bad")
    assert validated_claims._missed([case, GOOD]) == "Missed: ten (55.0 %); good (2.0 %)."
    assert validated_claims._missed([]) == "All targets are met."


POOR = validated_claims.PredictionErrors("poor", np.array([-0.2, 0.4, 0.3]), "m 7", 0.25, 0.17)


def test_the_page_begins_with_the_largest_errors() -> None:
    said = page.text([claim(GOOD, POOR)])
    lines = said.splitlines()
    assert lines.index("## Largest errors") < lines.index("## 1. Something")
    assert "* **Something**: poor, median 30.0 %, worst 40.0 %." in lines
    assert "  * target missed: poor, median 30.0 % over 25.0 %, 90th percentile 38.0 % over 17.0 %" in lines
    assert lines.index("| poor | 3 | 30.0 % | 38.0 % | 40.0 % (m 7) | 25.0 % |") + 1 == lines.index(
        "| good | 3 | 2.0 % | 2.8 % | 3.0 % (m 3) | 2.5 % |"
    )
    assert lines[-1] == "Times measured: by hand."
    assert "missed: good" not in said


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments], env={"DECODESIM_DATA": ""})


def test_an_outdated_page_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validated_claims, "claims", lambda _: (claim(GOOD, POOR),))
    monkeypatch.setattr(engine_tables, "claims", lambda _: ())
    monkeypatch.setattr(served_loads, "claims", lambda _: ())
    monkeypatch.setattr(long_context_drafts, "claims", tuple)
    path = tmp_path / "PAGE.md"
    arguments = ("data", "-o", str(path))
    missing = call(*arguments, "--check")
    assert (missing.exit_code, path.exists()) == (1, False)
    assert "PAGE.md does not exist" in missing.stderr
    written = call(*arguments)
    assert written.exit_code == 0
    assert "bound missed: Something: poor, median 30.0 %" in written.stdout
    assert path.read_text(encoding="utf-8") == page.text([claim(GOOD, POOR)])
    assert call(*arguments, "--check").exit_code == 0
    for old in (path.read_text(encoding="utf-8").replace("30.0 %", "29.0 %"), path.read_text(encoding="utf-8") + "\n\n"):
        path.write_text(old, encoding="utf-8")
        stale = call(*arguments, "--check")
        assert stale.exit_code == 1
        assert stale.stderr.startswith("out of date: PAGE.md")
        assert path.read_text(encoding="utf-8") == old
        call(*arguments)


def test_without_the_data_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "PAGE.md"
    path.write_text("as it was", encoding="utf-8")
    for more in ((), ("--check",)):
        done = call(str(tmp_path / "nothing"), "-o", str(path), *more)
        assert done.exit_code == 2
        assert done.stderr.splitlines() == [
            "error: the data folder must hold gpu and SOURCES.md, got nothing; name it, or set DECODESIM_DATA to it"
        ]
        assert path.read_text(encoding="utf-8") == "as it was"
    (tmp_path / "half" / "gpu").mkdir(parents=True)
    half = call(str(tmp_path / "half"), "-o", str(path))
    assert half.exit_code == 2
    assert half.stderr.startswith("error: SOURCES.md: there is no such file")
    fitted = CliRunner().invoke(app, ["fit", "roofline", str(tmp_path / "nothing")])
    assert fitted.exit_code == 2
    assert fitted.stderr.startswith("error: the data folder must hold gpu and SOURCES.md, got nothing; name it")


def test_the_page_exists_without_dates_or_local_paths() -> None:
    content = page.default_path().read_text(encoding="utf-8")
    assert content.startswith("# Validation: errors of predictions")
    assert re.search(r"20\d\d-\d\d", content) is None
    assert str(Path(__file__).parents[2]) not in content


# --- On the public measurements ---


@pytest.fixture(scope="module")
def claims() -> tuple[validated_claims.Claim, ...]:
    return validated_claims.claims(DATA)


@needs_data
def test_the_page_agrees_with_the_data(claims: tuple[validated_claims.Claim, ...]) -> None:
    assert page.stale_sections(claims, page.default_path()) == ""


@needs_data
def test_products_of_every_table_are_within_bounds(claims: tuple[validated_claims.Claim, ...]) -> None:
    cases = {case.name: case for case in claims[0].cases}
    assert len(cases) == 18
    for name, case in cases.items():
        gpu, engine = name.split(",")[0].split()
        if name.endswith("all m"):
            assert case.median <= OPERATIONS[gpu], name
            assert case.percentile_90 <= 0.17, name
        elif engine in ("trtllm/1.2.0rc5", "trtllm/1.3.0rc20", "vllm/0.19.0"):
            assert case.target == 0.01
            assert case.median <= 0.01, name
    assert all(case.met for case in claims[0].cases)
    interpolated = {case.name: case.median for case in claims[1].cases}
    for name, case in cases.items():
        if name.endswith("all m"):
            assert interpolated[name.replace(", all m", ", interpolated m, all m")] > case.median


@needs_data
def test_attention_of_every_possible_table_is_within_bounds(claims: tuple[validated_claims.Claim, ...]) -> None:
    corrected = [case for case in claims[2].cases if case.name.endswith("corrected")]
    assert len(corrected) == 6
    for case in corrected:
        assert case.median <= 0.03, case.name
        assert case.percentile_90 <= 0.17, case.name
    # The L40S file with an error of 3.5 % reads half of its cache, like two other files: refused.
    assert "l40s trtllm/1.0.0" in claims[2].weaknesses


@needs_data
def test_layers_steps_and_rooflines_are_within_their_bounds(claims: tuple[validated_claims.Claim, ...]) -> None:
    by_title = {each.title.split(",")[0]: each for each in claims}
    for case in by_title["Layers composed of operations"].cases:
        assert case.met, case.name
    engine = by_title["Decoding steps of Llama-3.1-8B on an RTX 4090"]
    assert engine.case("all seconds without prompts").median <= 0.05
    rooflines = by_title["Layers by roofline"].cases
    assert sum(case.target is not None for case in rooflines) == 2 * 3 + 2 * 4 + 4 + 2 * 4
    assert all(case.met for case in rooflines)


@needs_data
def test_default_efficiencies_are_the_fit_to_the_data(layers: tuple[fits.MeasuredLayers, ...]) -> None:
    found, usual = fits.fit(fits.layers(DATA), fits.attention(DATA)), Efficiency()
    for name in (*fits.OF_LAYERS, *fits.OF_ATTENTION):
        assert getattr(usual, name) == pytest.approx(getattr(found, name), rel=0.02), name
    again = fits.fit_layers(layers)
    for name in fits.OF_LAYERS:
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=0.01), name  # bundled times never fall


@needs_data
def test_tables_in_tests_data_agree_with_the_data() -> None:
    small = pl.read_csv(KEPT / "phi_2.csv")
    for one in fits.layers(DATA):
        if one.model == "phi-2":
            rows = small.filter(pl.col("gpu") == one.gpu)
            assert rows["tokens"].to_list() == one.tokens.tolist()
            assert rows["time_s"].to_numpy() == pytest.approx(one.seconds, rel=1e-6)
    run, kept = engine_run.read(DATA / validated_claims.RUN), kept_run()
    for name in ("prompts", "tokens", "running", "waiting", "context", "returned"):
        assert getattr(kept, name) == pytest.approx(getattr(run, name), abs=0.06), name


@needs_data
def test_the_engine_counts_recomputed_prompts_once() -> None:
    lines = (DATA / validated_claims.RUN / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    run = engine_run.read(DATA / validated_claims.RUN)
    assert run.prompts.sum() == sum(json.loads(line)["input_toks"] for line in lines)
    assert run.tokens.sum() == sum(json.loads(line)["output_toks"] for line in lines)
    assert run.returned[run.returned > 0].sum() > 90
    assert run.returned.sum() == 0
