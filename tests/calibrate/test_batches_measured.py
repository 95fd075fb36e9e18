"""Measured runs of batches with drafts: forced outcomes, files and predictions."""

from pathlib import Path
from typing import Any

import pytest

from calibrate.commands import run_command
from calibrate.decode import real_decoding
from calibrate.loading.architectures import Architecture
from calibrate.measured_runs import measure_runs, run_plan
from calibrate.measured_runs.interleaved_profiles import Passes
from calibrate.measured_runs.measure_runs import MeasurementPlan
from calibrate.timing import interpreter_pass, library_pass
from calibrate.timing.single_pass import prepare
from model.base.checks import ParameterError
from model.costs.replayed_seconds import ReplayedSeconds
from model.hardware.profile_costs import ProfileCosts
from model.interpret.account import Account
from model.interpret.interpreter import count
from model.logs import forced_outcomes, measured_runs
from model.logs.replay import Replayed, changed_settings, steps_of
from model.methods.speculative import algorithm as speculative
from model.steps import Batch, Forward, LayerSpan
from sim.comparison import formula_validity, run_comparison
from tests.calibrate.test_measure_runs import models_of, wanted
from tests.calibrate.test_run_comparison import profile_of
from tests.support import real_models
from tests.support.fake_clocks import few_parts

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = {"acceptance_rate": 0.6}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("batch", "lengths"), [(1, None), (4, None), (3, (9, 2, 5, 9, 1)), (1, (9, 4))])
def test_forced_outcomes_give_the_passes_of_the_simulation(kind: str, batch: int, lengths: Any) -> None:
    table = {"draft_length": 3, "sequences": batch, "batching": "static"} | ({} if lengths is None else {"lengths": lengths})
    models, choice = models_of("speculative", table, kind), wanted("speculative", table, RATES)
    measure_runs.check(MeasurementPlan([choice], 9), models)
    found = measure_runs.decode(choice, models, 9, 1, log=True)
    parameters = speculative.Parameters(**found.settings)
    world = forced_outcomes.world(parameters, 4, 9, RATES, seed=1)
    work = count(speculative.decode(parameters, tuple(range(4)), 9), world, parameters.total_tokens(9))
    assert tuple(work.committed) == found.commits
    assert work.account.passes_by_kind == found.account.passes_by_kind
    for number, tokens in work.sequences.items():
        assert tokens == [*range(4, 4 + (lengths or (9,) * batch)[number])]
    # The replayed log gives the same commits.
    again = Replayed(found.reads)
    played = count(steps_of(found), again, len(found.tokens))  # type: ignore[arg-type]
    assert tuple(played.committed) == found.commits
    assert again.remaining == 0


def test_files_keep_the_sequence_of_each_commit(tmp_path: Path) -> None:
    """Only for batches; files of other runs do not have the key."""
    tables = [{"draft_length": 2, "sequences": 3, "batching": "static", "lengths": (6, 3, 6, 2)}, {"draft_length": 2}]
    plan = MeasurementPlan([wanted("speculative", table, RATES) for table in tables], 6, repeats=1)
    made = measure_runs.measure(tmp_path / "runs.json", plan, models_of("speculative", tables[0]))
    kept = measured_runs.load(tmp_path / "runs.json")
    for before, after in zip(made.log.decodings, kept.log.decodings, strict=True):
        assert before.commits == after.commits
        assert before.settings == after.settings
    assert {each.sequence for each in kept.log.decodings[0].commits} == {0, 1, 2, 3}
    assert {each.sequence for each in kept.log.decodings[1].commits} == {None}
    assert '"sequence": null' not in (tmp_path / "runs.reads.json").read_text()
    assert changed_settings(kept.log.decodings[0]) == "sequences=3, batching=static, lengths=(6, 3, 6, 2), draft_length=2"


def test_batches_are_predicted_with_profiles_of_their_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_parts(monkeypatch)
    written = run_plan.from_tables({
        "run": {"model": "family:medium", "draft": "family:draft", "tokens": 4, "repeats": 1, "prompts": 1},
        "method": [
            {"name": "autoregressive", "forced": {}},
            {"name": "speculative", "draft_length": 2, "sequences": 3, "batching": "static", "forced": {"acceptance_rate": 0.7}},
        ],
        "profile": {
            "widths": [1, 2, 3], "contexts": [0, 24], "batches": [1, 3], "batched_widths": [1, 2, 3], "rounds": 1, "repeats": 2,
        },
    })  # fmt: skip
    found = run_command.measure_plan(written, tmp_path / "runs.json", "cpu")
    assert len(found.timed) == 2
    _, table, about = run_comparison.of_file(tmp_path / "runs.json")
    assert table["missing"].to_list() == ["", ""]
    assert table["tokens"].to_list() == [4, 12]
    claims = formula_validity.of_file(tmp_path / "runs.json", table)["claim"].to_list()
    assert "verify" not in claims  # the theorem is about a single sequence
    for name in about["profiles"]:
        rows = run_comparison.profiles_of([], found, tmp_path)
        assert name
    for role in ("target", "draft"):
        points = {(row["width"], row["batch"]) for row in rows[role].rows("layer").to_dicts()}
        assert points == {(width, batch) for width in (1, 2, 3) for batch in (1, 3)}


# --- pass times ---


def test_a_batched_pass_costs_the_context_of_its_longest_sequence() -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target"))})
    def at(*positions: int) -> Forward:
        batch = Batch.uniform((0, 1, 2), positions, 2, heads=2)
        return Forward("target", (7,) * 6, min(positions), LayerSpan(0, 5), heads=6, batch=batch)

    step = at(5, 20, 9)
    assert cost.forward(step) == cost.forward(at(20, 20, 20))
    assert cost.forward(step) > cost.forward(at(5, 5, 5))
    assert cost.in_run(step).layers == 5 * float(cost.hardware_models["target"].layer(2, 20, 3).seconds)


def test_timed_points_are_those_that_methods_use() -> None:
    alone = Passes(widths=(1, 2, 9), contexts=(0,), batches=(1, 4))
    assert [(each.width, each.batch) for each in alone.points] == [(1, 1), (2, 1), (9, 1), (1, 4)]
    wide = Passes(widths=(1, 2, 9), contexts=(0,), batches=(1, 4), batched_widths=(1, 2))
    assert [(each.width, each.batch) for each in wide.points] == [(1, 1), (2, 1), (9, 1), (1, 4), (2, 4)]
    for given, message in (
        ({"batched_widths": (1, 3)}, r"batched_widths must be some of widths=\[1, 2, 9\], got \[1, 3\]"),
        ({"batched_widths": (2,)}, "batched_widths must include 1"),
        ({"batched_widths": (1, 2), "batches": (1,)}, "left out without batches"),
    ):
        with pytest.raises(ParameterError, match=message):
            Passes(**{"widths": (1, 2, 9), "contexts": (0,), "batches": (1, 4), **given})


def model_of(unequal: bool = False) -> library_pass.LibraryModel:
    decoder = real_models.decoders("llama")["target"]
    from model.architectures.transformer import from_config

    shape = from_config(decoder.config.to_dict(), "float32")
    made = library_pass.LibraryModel(Architecture("tiny", decoder.config, shape), "cpu", "float32", decoder=decoder)
    made.unequal = unequal
    return made


@pytest.mark.parametrize(("width", "context", "batch", "unequal", "apart"), [
    (1, 8, 4, False, False), (3, 8, 4, False, True), (1, 8, 4, True, True), (3, 0, 4, True, False), (3, 8, 1, True, False),
    (2, 700, 3, False, True),
])  # fmt: skip
def test_timed_passes_have_the_positions_of_a_decoding(
    width: int, context: int, batch: int, unequal: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch that drafts, positions differ, here by one; without a cached context they are equal."""
    seen: list[Forward] = []
    whole = interpreter_pass.Real.forward
    monkeypatch.setattr(interpreter_pass.Real, "forward", lambda self, held, step: seen.append(step) or whole(self, held, step))
    monkeypatch.setattr(real_models.decoders("llama")["target"].__class__, "_max_positions", lambda self: None)
    work = prepare(model_of(unequal), width, context, batch, "interpreter")
    work.run()
    timed = [each for each in seen if each.heads]
    assert {len(each.tokens) for each in timed} == {width * batch}
    assert {each.end - width for each in timed} == {context, context + 1}
    assert {each.batch is not None and not each.batch.aligned for each in timed} == {apart}
    assert all({*each.batch.positions} == {each.at, each.at + 1} for each in timed if apart and each.batch)
    filling = [each for each in seen if not each.heads]
    assert sum(each.width for each in filling) == context
    assert all(len(each.tokens) <= interpreter_pass.CHUNK for each in filling)
    account = Account()
    for each in timed:
        account.add(each)
    assert account.totals().by_model["target"].heads == len(timed) * width * batch


# --- what is refused ---


def test_a_batch_needs_positions_for_its_longest_drafts() -> None:
    """The longest sequence may draft as many tokens beyond its end as another sequence can use."""
    table = {"draft_length": 5, "sequences": 2, "batching": "static"}
    models, prompt = models_of("speculative", table), 96 - 9 + 1
    own = {"prompt": tuple(range(prompt - 5)), "method": "speculative", "settings": table, "name": "long", "rates": RATES}
    measure_runs.check(MeasurementPlan([measure_runs.PlannedDecoding(**own)], 9), models)
    assert len(measure_runs.decode(measure_runs.PlannedDecoding(**own), models, 9, 0).tokens) == 18
    longer = measure_runs.PlannedDecoding(**own | {"prompt": tuple(range(prompt - 4))})
    for made in (
        lambda: measure_runs.check(MeasurementPlan([longer], 9), models),
        lambda: measure_runs.decode(longer, models, 9, 0),
    ):
        with pytest.raises(ParameterError, match=r"prompt, tokens and draft_length must fit the 96 positions .* got 84, 9 and 5"):
            made()
    for alone in ({"draft_length": 5}, {"draft_length": 5, "lengths": (9, 3), "batching": "static"}):
        measure_runs.check(
            MeasurementPlan([measure_runs.PlannedDecoding(**own | {"prompt": tuple(range(prompt)), "settings": alone})], 9), models
        )


def test_real_models_decode_one_sequence_at_a_time() -> None:
    table = {"draft_length": 2, "sequences": 2, "batching": "static"}
    with pytest.raises(ParameterError, match="sequences must be 1, as real models decode one at a time, got 2 sequences"):
        real_decoding.decode("speculative", models_of("speculative", table), (1, 2), 8, table)
