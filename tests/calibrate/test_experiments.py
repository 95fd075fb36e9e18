"""GPU plans executed on the CPU: models of the same architecture and depth, but narrow, and two tokens.

This shows that every setting of a plan is valid, and that its profiles lack no part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from calibrate.commands import run_command
from calibrate.loading.architectures import architecture
from calibrate.measured_runs import measure_runs, run_plan
from calibrate.timing import profile_from_timings
from model.architectures.transformer import preset
from model.base.checks import ParameterError
from model.hardware import profile_files
from sim.comparison import run_comparison
from tests.support.fake_clocks import few_parts
from tests.support.fake_cuda_graphs import install

FOLDER = Path(str(resources.files("calibrate"))) / "experiments"
GPU = sorted(each.stem for each in FOLDER.glob("gpu-*.toml"))
GRAPHS = ("gpu-opt-6.7b", "cuda-graph")
"""A plan that runs in both modes."""
SMALL: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    "opt": {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "t5": {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
}
"""Keys that make an architecture narrow; its depth is kept, because settings refer to it."""

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


def narrow(name: str, folder: Path) -> str:
    """Write the narrow configuration of a preset to a file."""
    config = architecture(name).config
    said = config.to_dict() | SMALL[config.model_type] | {"vocab_size": 128}
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(said))
    return str(path)


KINDS = (("gpu-t5", "eager"), GRAPHS)
"""Plans that cover all kinds of models, drafts, exits and graphs; the others are in the slow tier. Batches are tested
in `test_batches_measured`, and each method kernel by kernel in `test_gpu_stand_in`."""


def carried_out(written: run_plan.WrittenPlan, folder: Path) -> run_plan.WrittenPlan:
    """Return the plan for the CPU: narrow models, two tokens, one repeat."""
    run = written.run
    draft = None if run.draft is None else narrow(run.draft, folder)
    in_turn = tuple(replace(each, unit_kind=None) for each in written.choices)  # streams and processes need GPUs
    return replace(written, run=replace(run, model=narrow(run.model, folder), draft=draft, tokens=2, repeats=1), choices=in_turn)


def ends(choices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first and the last of the choices with the same setting names."""
    kinds: dict[Any, list[Any]] = {}
    for each in choices:
        kinds.setdefault((each.method, *each.settings, each.unit_kind), []).append(each)
    return tuple(choice for own in kinds.values() for choice in own[:: max(len(own) - 1, 1)])


@pytest.mark.parametrize("name", GPU)
def test_every_setting_of_a_plan_is_legal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of the plan's depth and its number of tokens; checked before any timing."""
    class Checked(Exception):  # noqa: N818
        """Nothing is timed."""

    asked: list[measure_runs.MeasurementPlan] = []

    def measure(_: Path, plan: measure_runs.MeasurementPlan, *more: Any, **others: Any) -> Any:
        asked.append(plan)
        raise Checked

    monkeypatch.setattr(measure_runs, "measure", measure)
    written = run_plan.read(FOLDER / f"{name}.toml")
    plan = carried_out(written, tmp_path)
    plan = replace(plan, run=replace(plan.run, tokens=written.run.tokens, mode="eager"), profile=None)
    with pytest.raises(Checked):
        run_command.measure_plan(plan, tmp_path / "runs.json", "cpu")
    [found] = asked
    assert [(each.method, each.settings, each.rates) for each in found.decodings] == [
        (each.method, each.settings, each.rates) for each in written.choices
    ]


@pytest.mark.parametrize(("name", "mode", "whole"), [
    *((*each, False) for each in KINDS),
    *(pytest.param(each, run_plan.read(FOLDER / f"{each}.toml").run.mode, True, marks=pytest.mark.slow) for each in GPU),
    pytest.param(*GRAPHS, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_setting_of_a_plan_runs_and_is_compared(
    name: str, mode: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_parts(monkeypatch)
    written = run_plan.read(FOLDER / f"{name}.toml")
    written = replace(written, run=replace(written.run, mode=mode))
    if mode != "eager":
        install(monkeypatch)
        monkeypatch.setattr(
            profile_from_timings, "check", lambda _: None
        )  # disturbances may make layer times negative
    assert written.profile is not None
    written = written if whole else replace(written, choices=ends(written.choices))
    run, passes = written.run, written.profile
    widths: tuple[int, ...] = (1, passes.widths[-1])
    batched_widths: tuple[int, ...] = (1,)
    if len(passes.batched_widths) > 1:
        widths = batched_widths = (1, passes.batched_widths[-1])
    batches = passes.batches if whole else passes.batches[:: max(len(passes.batches) - 1, 1)]
    fewer = replace(passes, widths=widths, batched_widths=batched_widths, contexts=passes.contexts[:2], batches=batches, repeats=1)
    plan = replace(carried_out(written, tmp_path), profile=fewer)
    out = tmp_path / "out" / f"{name}.json"
    found = run_command.measure_plan(plan, out, "cpu")
    assert len(found.timed) == len(written.choices)
    assert (found.about["dtype"], found.mode) == (run.dtype, mode)
    _, table, about = run_comparison.of_file(out)
    assert table.height == len(written.choices)
    # Only transfers between devices are not timed, and no run has any.
    assert set(table["missing"]) == {""}
    assert set(about["profiles"]) == ({"target"} if run.draft is None else {"target", "draft"})
    encodes = preset(run.model).encoder_layers > 0
    assert {len(each.decoding.prompt) for each in found.timed.values()} == {1 if encodes else run.prompt_tokens}
    if encodes:
        assert {profile_files.load(out.parent / each).facts["source"] for each in about["profiles"].values()} == {run.prompt_tokens}
    texts = [dict(each.settings).get("sequences", 1) for each in written.choices]
    assert table["tokens"].to_list() == [2 * each for each in texts]


@pytest.mark.parametrize("name", GPU)
def test_plans_fit_a_gpu_and_profiles_cover_their_passes(name: str) -> None:
    written = run_plan.read(FOLDER / f"{name}.toml")
    run, passes = written.run, written.profile
    assert passes is not None
    shapes = [preset(each) for each in (run.model, run.draft) if each is not None]
    assert sum(each.parameters for each in shapes) * 2 < 60e9  # bytes; KV rows and activations need memory, too
    assert len({each.vocabulary for each in shapes}) == 1
    asked: list[Any] = [each.settings for each in written.choices]
    assert {each.get("sequences", 1) for each in asked} <= set(passes.batches)
    widths = {1 + each["draft_length"] for each in asked if "draft_length" in each}
    assert widths <= set(passes.widths)
    drafted = {1 + each["draft_length"] for each in asked if "draft_length" in each and each.get("sequences", 1) > 1}
    assert {*drafted, *([2] if drafted else [])} <= set(passes.batched_widths)  # after an accepted draft two tokens are read
    begins = 1 if shapes[0].encoder_layers else run.prompt_tokens
    assert max(passes.contexts) >= begins + run.tokens
    assert run.repeats >= 3


def test_plans_have_the_intended_settings() -> None:
    asked = {name: run_plan.read(FOLDER / f"{name}.toml").choices for name in GPU}
    pipelined = [(each.unit_kind, bool(each.settings.get("batched"))) for each in asked["gpu-13b"] if each.method == "ppd"]
    assert {*pipelined} == {(None, False), (None, True), ("streams", False), ("streams", True)}
    over = [(each.unit_kind, each.settings.get("candidates")) for each in asked["gpu-processes"] if each.method == "ppd"]
    assert {*over} == {("processes", 1), ("processes", 3)}
    drafted = [each for each in asked["gpu-opt-6.7b"] if each.method == "speculative"]
    assert {each.settings["draft_length"] for each in drafted} == {*range(1, 9)}
    rates = {each.rates["acceptance_rate"] for each in drafted if each.rates}
    assert (min(rates), max(rates)) == (0.3, 0.95)
    whole = [each.settings for each in asked["gpu-llama-3.1-8b"] if each.settings.get("min_layers") == 32]
    assert [each["sequences"] for each in whole] == [1, 2, 4, 8, 16, 32, 64]
    for name in ("gpu-13b", "gpu-llama-3.1-8b"):  # as graphs: all without sub-processes
        assert asked[f"{name}-graphs"] == [each for each in asked[name] if each.method != "ppd"]
    batches = asked["gpu-batches"]
    own = [each for each in batches if each.method == "speculative"]
    drafting = [(each.settings["sequences"], each.settings["draft_length"], each.rates) for each in own]
    rates = [{"acceptance_rate": rate} for rate in (0.5, 0.7, 0.9)]
    assert drafting == [(batch, gamma, rate) for gamma in (1, 3, 5) for batch in (1, 4, 16, 64) for rate in rates]
    assert [each.settings["sequences"] for each in batches if each.method == "skipdecode"] == [1, 4, 16, 64]


def test_methods_without_outcomes_are_forced_with_an_empty_table(tmp_path: Path) -> None:
    """Plain decoding has no outcome; without `forced` a shape without weights is refused."""
    model = narrow("llama-68m", tmp_path)
    for forced, said in (({}, "shape without weights"), ({"forced": {}}, ""), ({"forced": {"match_rate": 0.5}}, "not an outcome")):
        run = {"model": model, "tokens": 2, "repeats": 1}
        written = run_plan.from_tables({"run": run, "method": [{"name": "autoregressive", **forced}]})
        out = tmp_path / f"{len(forced)} {len(said)}" / "runs.json"
        if said:
            with pytest.raises(ParameterError, match=said):
                run_command.measure_plan(written, out, "cpu")
            assert not out.parent.exists()
        else:
            assert run_command.measure_plan(written, out, "cpu").about["forced"] == [{}]
