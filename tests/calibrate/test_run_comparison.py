"""Comparison of predicted and measured runs: the parts of a prediction, and data that must not enter it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console
from typer.testing import CliRunner

from calibrate.interpreters.in_one_process import Real
from model.architectures.shape_configs import from_config
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.replayed_seconds import ReplayedSeconds
from model.costs.step_costs import position_of
from model.hardware import profile_files
from model.hardware.cost_models import UniformLayers
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_costs import ProfileCosts
from model.logs import measured_runs, prediction_error, read_log
from model.logs.measured_runs import MeasuredRuns
from model.logs.prediction_error import PARTS
from model.logs.recorded_decoding import Decoding
from model.logs.replay import Replayed, parameters_of, steps_of
from model.methods.beam import algorithm as beam
from model.steps import Batch, Forward, LayerSpan, Read
from sim.commands.sim_app import app
from sim.comparison import comparison_report, run_comparison
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.calibrate.test_measure_runs import measured
from tests.calibrate.test_replay import CHOICES, lengths, prompts, record, seeds
from tests.support import real_models
from tests.support.comparisons import example_runs, observed, profiles, record_decoding, synthetic_runs
from tests.support.real_models import DEPTHS

LAYERS = DEPTHS["target"]
SECONDS = 2.0**-10
"""Seconds of a layer, chosen so that layer-times are exact numbers."""
FACTS = {"name": "a processor", "threads": 1, "cores": 2, "python": "3", "torch": "2", "transformers": "5"}


def shape_of(role: str) -> Shape:
    return from_config(real_models.config("llama", DEPTHS[role]).to_dict(), "float32")


# --- Parts of a prediction ---


@given(choice=CHOICES, prompt=prompts, tokens=lengths, seed=seeds)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_uniform_seconds_give_the_unit_cost(
    choice: tuple[str, dict[str, Any]], prompt: list[int], tokens: int, seed: int
) -> None:
    """If all layers of all models take the same time and other parts none, passes cost the unit cost."""
    name, table = choice
    found = record("llama", name, table, prompt, tokens, seed=seed)
    shape = shape_of("target")
    making = 2 * shape.hidden * shape.kv_heads * shape.head_dim / shape.layer_weights
    ratios = {key: DEPTHS[role] / LAYERS for key, role in (("cost_ratio", "draft"), ("medium_cost_ratio", "medium"))}
    units = UnitCost(LAYERS, propagation=making, **ratios)
    seconds = ReplayedSeconds({role: UniformLayers(shape_of(role), SECONDS) for role in DEPTHS})
    count = parameters_of(found).units
    in_layers = simulate(steps_of(found), len(found.tokens), Cluster(count), units, Replayed(found.reads))
    predicted = run_comparison.predict(found, seconds, count)
    assert predicted.total == pytest.approx(in_layers.latency * SECONDS, rel=1e-12)
    commits = [time * SECONDS for time, *_ in in_layers.commits]
    assert [time for time, *_ in predicted.run.commits] == pytest.approx(commits, rel=1e-12)
    assert predicted.run.account.passes_by_kind == in_layers.account.passes_by_kind


TIMES = {
    "head": 3e-4, "embedding": 1e-4, "step": 2e-4, "first_read": 5e-5, "next": 1e-5, "top": 4e-5, "confidence": 7e-5,
    "distance": 6e-5,
    "saturation": 3e-5, "kv_rows": 2e-4,
}  # fmt: skip
AXES = {"head": "positions", "embedding": "tokens", "step": "batch", "first_read": "batch", "kv_rows": "tokens"}


def profile_of(role: str, layer: float = 1e-3, further: Sequence[dict[str, Any]] = (), **more: Any) -> Profile:
    """Profile with a layer time that grows by a tenth per further token and a hundredth per cached position."""
    rows: list[dict[str, Any]] = []
    for width, context in itertools.product(range(1, 13), range(40)):
        seconds = layer * (1 + 0.1 * (width - 1) + 0.01 * context)
        rows.append({"part": "layer", "width": width, "context": context, "batch": 1, "time_s": seconds})
    for (part, seconds), size in itertools.product(TIMES.items(), (1, 64)):
        rows.append({"part": part, AXES.get(part, "positions"): size, "time_s": seconds})
    rows += further
    table = table_of([{"busy": 0, "low_s": row["time_s"], "high_s": row["time_s"], "repeats": 9, **row} for row in rows])
    said = dataclasses.asdict(shape_of(role))
    given = {
        "name": f"made-{role}", "device": "cpu", "model": role, "dtype": "float32", "engine": "made up", "mode": "eager",
        "kind": "model", "provenance": "measured", "date": "2026-01-01", "bandwidth": 1e12, "rate": 1e15, "cache_bytes": 1e9,
        "table": table, "sources": (Source("made up", "here"),), "shape": said, "facts": FACTS,
    } | more  # fmt: skip
    return Profile(**given)


def by_hand(found: Decoding, profiles: dict[str, Profile]) -> float:
    """Time on one unit: the sum of passes and reads in the log."""
    total, looked = 0.0, None
    for each, _ in found.reads:
        new = (each.role, each.at, each.tail, each.layer) != looked
        if each.kind == "next" and new:
            looked = each.role, each.at, each.tail, each.layer
        total += TIMES["first_read" if each.kind == "next" and new else each.kind] if each.kind in TIMES else 0.0
    for (role, width, span, heads, _), (count, attended, _) in found.account.passes_by_kind.items():
        first, last, gaps, kv_only = span
        layers = last - first - sum(stop - start for start, stop in gaps)
        positions = attended / width - (width + 1) / 2 * count  # positions cached before the passes of this kind, summed
        each_layer = 1e-3 * (count * (1 + 0.1 * (width - 1)) + 0.01 * positions) if not kv_only else TIMES["kv_rows"] * count
        assert role in profiles
        if first < last:  # else it is only a head, for existing states
            total += layers * each_layer + count * (TIMES["step"] + (TIMES["embedding"] if not first else 0.0))
        total += count * TIMES["head"] if heads else 0.0
    return total


@pytest.mark.parametrize(("name", "table"), [
    ("autoregressive", {}), ("speculative", {"draft_length": 3}), ("bild", {"fallback_threshold": 0.1, "rollback_threshold": 3.0}),
    ("skipdecode", {"min_layers": 2, "max_layers": 4, "prompt": 1, "sequence_length": 20}), ("early_exit", {"threshold": 0.1}),
    ("early_exit", {"threshold": 0.9, "measure": "state", "fill": "propagate"}),
])  # fmt: skip
def test_a_prediction_is_the_sum_of_its_passes_and_reads(name: str, table: dict[str, Any]) -> None:
    found = record("llama", name, table, [1, 2, 3], 10, seed=2)
    profiles = {role: profile_of(role) for role in ("target", "draft")}
    predicted = run_comparison.predict(found, ReplayedSeconds({role: ProfileCosts(each) for role, each in profiles.items()}))
    assert predicted.total == pytest.approx(by_hand(found, profiles), rel=1e-6)
    assert sum(predicted.parts.values()) == pytest.approx(predicted.total, rel=1e-9)
    assert predicted.passes("target") + predicted.passes("draft") + predicted.reads == pytest.approx(predicted.total, rel=1e-9)


def test_a_pass_in_pieces_has_a_call_per_piece_and_layers_once() -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target"))})
    whole = cost.forward(Forward("target", (7,), 5, LayerSpan(0, 5), heads=1))
    pieces = [cost.forward(Forward("target", (7,), 5, LayerSpan(*span))) for span in ((0, 2), (2, 4))]
    last = cost.forward(Forward("target", (7,), 5, LayerSpan(4, 5), heads=1))
    assert sum(pieces) + last == pytest.approx(whole + 2 * TIMES["step"])


@pytest.mark.parametrize("step", [
    Forward("target", (7,), 5, LayerSpan(0, 5), heads=1), Forward("target", (7, 8), 5, LayerSpan(0, 3)),
    Forward("target", (7,), 5, LayerSpan(2, 5), heads=1),
    Forward("target", (7,), 5, LayerSpan(0, 5, gaps=((1, 3),)), heads=1), Forward("target", (7,), 5, LayerSpan(1, 4, kv_only=True)),
])  # fmt: skip
def test_layer_times_of_a_pass_sum_to_its_time(step: Forward) -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target"))})
    times = cost.layer_times_of(step)
    assert len(times) == step.layers.last - step.layers.first
    assert sum(times) == pytest.approx(cost.in_run(step).total, rel=1e-12)
    assert all(times[layer - step.layers.first] == 0 for start, stop in step.layers.gaps for layer in range(start, stop))


def test_kv_rows_cost_their_share_of_the_layer_weights() -> None:
    """Without a measurement: the share of two of the layer's matrices, by the library's weights."""
    profile = profile_of("target")
    bare = dataclasses.replace(profile, table=profile.table.filter(pl.col("part") != "kv_rows"))
    cost = ReplayedSeconds({"target": ProfileCosts(bare)})
    layer = real_models.model("llama", LAYERS).model.layers[0]
    weights = sum(each.numel() for each in layer.parameters() if each.ndim > 1)
    made = layer.self_attn.k_proj.weight.numel() + layer.self_attn.v_proj.weight.numel()
    whole = cost.in_run(Forward("target", (7,), 5, LayerSpan(0, LAYERS))).layers
    assert cost.in_run(Forward("target", (7,), 5, LayerSpan(0, LAYERS, kv_only=True))).layers == pytest.approx(
        whole * made / weights
    )


def test_time_between_a_read_and_the_next_pass_counts_as_pause() -> None:
    """3 ms of work after a read count like a pause of 3 ms between two passes."""
    whole, spent = Forward("target", (7,), 5, LayerSpan(0, 5)), []
    for turn, pause in ((3e-3, 0.0), (0.0, 3e-3)):
        cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=COOLING))}, scheduling=turn)
        cost.record_pass(whole)
        cost.reading(Read("next", whole))
        cost.elapsed += pause
        spent.append(cost.record_pass(whole).cooling)
    assert spent[0] == pytest.approx(spent[1])
    assert spent[0] > 0


def test_split_of_time_into_passes_and_reads() -> None:
    found = record("llama", "speculative", {"draft_length": 3}, [1, 2, 3], 10, seed=2)
    profiles = {"target": profile_of("target", further=COOLING), "draft": profile_of("draft")}
    cost = ReplayedSeconds({role: ProfileCosts(each) for role, each in profiles.items()})
    predicted = run_comparison.predict(found, cost)
    assert predicted.parts["target cooling"] > 0
    assert predicted.passes("target") + predicted.passes("draft") + predicted.reads == pytest.approx(predicted.total, rel=1e-9)


AGAIN = 5e-5
CALLS = [{"part": "resumed_step", "batch": 1, "time_s": AGAIN}]
TREES = [{"part": "tree", "width": width, "context": context, "time_s": 1e-4 * width} for width in (1, 4) for context in (8, 32)]
COOLING = [{"part": "after_gap", "gap": gap, "time_s": time} for gap, time in ((0, 5e-3), (1000, 6e-3), (4000, 7.5e-3))]
"""Gaps of a model with layers of 1.05 ms at mid-context: a layer takes .2 ms longer after 1 ms, and .5 ms after 4 ms."""


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_rows_of_rejected_hypotheses_stay_in_the_cache(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass by pass as many rows as in real models: a pass attends to all of them, and masks other hypotheses."""
    lying: list[tuple[str, int]] = []
    write = Real._make_pass

    def noted(self: Real, cache: Any, step: Forward) -> Any:
        made = write(self, cache, step)
        lying.append((step.role, cache.rows[step.role].layers[0].length - len(step.tokens)))
        return made

    monkeypatch.setattr(Real, "_make_pass", noted)
    decoders = real_models.decoders("llama", "draft")
    cost, told = ReplayedSeconds({role: UniformLayers(shape_of(role), SECONDS) for role in ("target", "draft")}), []
    priced = cost._before

    def before(step: Forward) -> int | None:
        found = priced(step)
        told.append((step.role, step.at if found is None else found))
        return found

    contexts, steps = list[int](), list[Forward]()
    in_run = cost.in_run

    def priced_at(step: Forward, rows: int | None = None) -> Any:
        contexts.append(position_of(step) if rows is None else rows)
        return in_run(step, rows)

    monkeypatch.setattr(cost, "_before", before)
    monkeypatch.setattr(cost, "in_run", priced_at)
    parameters = beam.Parameters(DEPTHS["target"], 3, beams, draft_layers=DEPTHS["draft"])
    run = Real(decoders)

    def see(step: Any) -> None:
        if isinstance(step, Forward):
            steps.append(step)
            cost.forward(step)

    run.run(observed(beam.decode(parameters, [3, 4, 5, 6], 14), see), 14)
    assert told == lying
    assert [rows for _, rows in told] == contexts  # and each pass is priced at this context
    kept = sum(rows for _, rows in told) == sum(step.at for step in steps)
    assert kept == (beams == 1)


def test_sub_processes_have_separate_rows() -> None:
    cost = ReplayedSeconds({"target": UniformLayers(shape_of("target"), SECONDS)})
    tree = Forward("target", (7, 8), 9, LayerSpan(0, 1), heads=2, tree=(-1, -1))
    assert cost._before(tree._replace(heads=0)) is None  # a sub-process that does nothing else reads it
    assert cost._before(tree._replace(at=8)) == 8
    assert cost._before(tree) == 10
    cost.dispatching(1)
    assert cost._before(tree) is None
    cost.begin()
    assert cost._before(tree) == 9


def passes(cost: ReplayedSeconds, *spans: tuple[int, int], at: int = 5, pause: float = 0.0) -> list[Any]:
    """Seconds of consecutive passes over these layers at one position."""
    made = []
    for span in spans:
        made.append(cost.record_pass(Forward("target", (7,), at, LayerSpan(*span))))
        cost.elapsed += pause
    return made


def test_a_pass_that_continues_at_its_position_takes_less() -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=CALLS))})
    first, second, third = passes(cost, (0, 2), (2, 4), (4, 5))
    assert (first.step, second.step, third.step) == pytest.approx((TIMES["step"], AGAIN, AGAIN))
    assert passes(cost, (2, 4), at=6)[0].step == pytest.approx(TIMES["step"])  # the state belongs to another position
    cost.begin()
    assert passes(cost, (2, 4))[0].step == pytest.approx(TIMES["step"])


EARLY = [{"part": part, "positions": 1, "time_s": seconds} for part, seconds in (
    ("early_head", 1.1e-4), ("early_softmax", 1.3e-5), ("early_state", 1.7e-5),
)]  # fmt: skip


def test_heads_and_reads_between_single_layers_have_separate_times() -> None:
    """After a single layer the head has just been used; after several, or without such rows, it takes its usual time."""
    whole, one = Forward("target", (7,), 5, LayerSpan(0, 2), heads=1), Forward("target", (7,), 5, LayerSpan(2, 3), heads=1)
    kinds = {"confidence": 1.3e-5, "saturation": 1.7e-5}
    warm, usual = (ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=more))}) for more in (EARLY, []))
    assert [warm.in_run(each).head for each in (whole, one)] == pytest.approx([TIMES["head"], 1.1e-4])
    assert warm.in_run(one._replace(heads=0)).head == 0
    assert [usual.in_run(each).head for each in (whole, one)] == pytest.approx([TIMES["head"]] * 2)
    for kind, seconds in kinds.items():
        assert warm.reading(Read(kind, one)) == pytest.approx(seconds)  # type: ignore[arg-type]
        assert warm.reading(Read(kind, whole)) == pytest.approx(TIMES[kind])  # type: ignore[arg-type]
        assert usual.reading(Read(kind, one)) == pytest.approx(TIMES[kind])  # type: ignore[arg-type]
    assert warm.reading(Read("next", one)) == pytest.approx(TIMES["first_read"])


def test_the_first_read_of_a_batch_is_of_all_sequences() -> None:
    first = {"part": "first_read", "batch": 4, "time_s": 9e-5}
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=[first]))})
    alone, together = Forward("target", (7,), 5, LayerSpan(0, 5), heads=1), Forward(
        "target", (7,) * 4, 5, LayerSpan(0, 5), heads=4, batch=Batch.uniform((0, 1, 2, 3), 5, heads=1)
    )
    for step, look in ((alone, TIMES["first_read"]), (together, 9e-5)):
        assert [cost.reading(Read("next", step, -1)) for _ in range(2)] == pytest.approx([look, TIMES["next"]])


def test_sub_processes_within_a_process_cost_their_start() -> None:
    forks = [{"part": "fork", "processes": count, "time_s": seconds} for count, seconds in ((1, 1e-4), (3, 4e-4))]
    profiles = {"target": ProfileCosts(profile_of("target", further=forks))}
    cost = ReplayedSeconds(profiles)
    assert [cost.dispatching(count) for count in (0, 1, 3)] == pytest.approx([0, 1e-4, 4e-4])
    assert ReplayedSeconds(profiles, single_process=False).dispatching(3) == 0
    found = record("llama", "ppd", {"exit_layer": 3, "candidates": 1}, [1, 2, 3], 10, seed=2)
    free = run_comparison.predict(found, ReplayedSeconds({"target": ProfileCosts(profile_of("target"))}))
    forked = run_comparison.predict(found, cost)
    starts = round((forked.total - free.total) / 1e-4)
    assert 8 <= starts <= 10
    assert forked.total - free.total == pytest.approx(starts * 1e-4)


def test_hypotheses_cost_the_measured_extra_time() -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=TREES))})
    plain = Forward("target", (7, 8, 9, 5), 8, LayerSpan(0, 5))
    tree = plain._replace(tree=(-1, -1, 0, 0))
    assert cost.forward(tree) - cost.forward(plain) == pytest.approx(4e-4)


def test_a_pause_makes_the_next_layers_slower() -> None:
    """Consecutive passes take their usual time; after a pause all layers take longer, equally for every width."""
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=COOLING))})
    whole = [each.cooling for each in passes(cost, (0, 5), (0, 5), (0, 5))]
    assert whole[0] == 0
    others = cost.record_pass(Forward("target", (7,), 5, LayerSpan(0, 5)))
    assert others.cooling == pytest.approx(whole[2]) == pytest.approx(whole[1])
    cooled = []
    for pause in (0.0, 1e-3, 3e-3, 1.0):
        cost.begin()
        passes(cost, (0, 5), (0, 5), pause=pause)
        cooled.append(cost.record_pass(Forward("target", (7,), 5, LayerSpan(0, 5))).cooling)
    assert cooled == sorted(cooled)
    assert cooled[0] == pytest.approx(others.cooling)
    assert cooled[0] < cooled[1] < cooled[2]
    assert cooled[3] == pytest.approx(5 * 5e-4)  # gaps of more than 4 ms are not measured
    # A further millisecond makes a layer .2 ms slower, later .1 ms.
    assert 5 * 1e-4 <= cooled[1] - cooled[0] <= 5 * 2e-4
    assert cooled[2] - cooled[1] == pytest.approx(5 * 2e-4)


def test_pauses_before_multi_token_passes_use_their_own_times() -> None:
    """Half as much at 9 tokens here; interpolated in between; constant beyond the largest width."""
    wide = [{"part": "wide_after_gap", "width": 9, "gap": gap, "time_s": time} for gap, time in ((0, 8e-3), (4000, 9.25e-3))]
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=[*COOLING, *wide]))})
    found = []
    for width in (1, 5, 9, 12):
        cost.begin()
        step = Forward("target", (7,) * width, 5, LayerSpan(0, 5))
        cost.record_pass(step)
        cost.elapsed += 1.0
        found.append(cost.record_pass(step).cooling)
    assert found == pytest.approx([2.5e-3, (2.5e-3 + 1.25e-3) / 2, 1.25e-3, 1.25e-3])


def test_layers_repeated_sooner_take_less() -> None:
    sooner = [{"part": "after_gap", "gap": -4000, "time_s": 4e-3}]  # passes of one layer: a layer takes .2 ms less
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=[*COOLING, *sooner]))})
    few = [each.cooling for each in passes(cost, *[(0, 1)] * 20)]
    assert few[0] == 0
    assert -2e-4 <= few[-1] < -1.5e-4
    cost.begin()
    more = [each.cooling for each in passes(cost, *[(0, 3)] * 20)]
    assert 3 * few[-1] < more[-1] < 0
    # The other layers have not been run for long; then all are as before.
    rest = cost.record_pass(Forward("target", (7,), 5, LayerSpan(3, 5))).cooling
    assert rest > 0


def test_a_pass_in_pieces_has_no_extra_pause() -> None:
    cost = ReplayedSeconds({"target": ProfileCosts(profile_of("target", further=[*COOLING, *CALLS]))})
    passes(cost, (0, 5), (0, 5))
    whole = cost.record_pass(Forward("target", (7,), 5, LayerSpan(0, 5))).cooling
    cost.begin()
    pieces: list[Any] = []
    for _ in range(3):
        pieces = passes(cost, (0, 2), (2, 5))
    # The pause of a layer is longer only by the additional call.
    assert 0 <= sum(each.cooling for each in pieces) - whole <= 5 * AGAIN * 0.2 + 1e-9


# --- Data that must not enter a prediction ---


@lru_cache(maxsize=1)
def some_runs() -> tuple[MeasuredRuns, dict[str, Profile]]:
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    about = dict(found.about) | {
        "machine": {name: FACTS[name] for name in ("name", "threads", "cores")}, "dtype": "float32",
        "versions": {name: FACTS[name] for name in ("python", "torch", "transformers")},
        "shapes": {role: json.loads(json.dumps(dataclasses.asdict(shape_of(role)))) for role in ("target", "draft")},
    }  # fmt: skip
    return MeasuredRuns(found.log, found.table, about), {role: profile_of(role) for role in ("target", "draft")}


TIMED = ("seconds", "commit_s", "pass_s", "read_s")


@pytest.mark.parametrize("made", [some_runs, example_runs])
def test_measured_times_do_not_enter_the_prediction(made: Callable[[], tuple[MeasuredRuns, dict[str, Profile]]]) -> None:
    """If each measured row is scaled by a different factor, predictions do not change, but errors do."""
    found, profiles = made()
    before = run_comparison.compare(found, profiles)
    # Shorter, because runs that take too long for their machine are refused.
    factors = np.random.default_rng(3).uniform(0.2, 0.9, (4, found.table.height))
    factors[2:] *= factors[0] / 0.9  # passes and reads are parts of the whole
    factors[1] = factors[0]
    scrambled = found.table.with_columns(pl.col(name) * factor for name, factor in zip(TIMED, factors, strict=True))
    spans = [[span | {"start": 0.0, "end": 1e-3} for span in each] for each in found.table["spans"].to_list()]
    scrambled = scrambled.with_columns(pl.Series("spans", spans, dtype=found.table["spans"].dtype))
    decodings = tuple(dataclasses.replace(each, seconds=9.0) for each in found.log.decodings)
    log = dataclasses.replace(found.log, decodings=decodings)
    after = run_comparison.compare(MeasuredRuns(log, scrambled, found.about), profiles)
    predicted = [name for name in before.columns if name.startswith("predicted")] + ["contention_s"]
    assert len(predicted) == 10
    assert before.select(predicted).equals(after.select(predicted))
    assert not np.isclose(before["error"].to_numpy(), after["error"].to_numpy()).any()


def test_the_profile_and_the_reads_enter_the_prediction() -> None:
    found, profiles = some_runs()
    before = run_comparison.compare(found, profiles)["predicted_s"].to_numpy()
    slower = run_comparison.compare(found, profiles | {"target": profile_of("target", 2e-3)})["predicted_s"].to_numpy()
    assert (slower > before).all()


def test_parts_missing_in_the_profile_are_reported(tmp_path: Path) -> None:
    """A missing part makes the prediction too short, so the report lists it."""
    found, profiles = some_runs()
    before = run_comparison.compare(found, profiles)
    assert set(before["missing"]) == {""}
    target = profiles["target"]
    lacking = dataclasses.replace(target, table=target.table.filter(pl.col("part") != "head"))
    table = run_comparison.compare(found, profiles | {"target": lacking})
    assert set(table["missing"]) == {"head of the target"}
    assert (table["predicted_s"] < before["predicted_s"]).all()
    over = found.table.with_columns(pl.lit(2).alias("units"))
    several = run_comparison.compare(MeasuredRuns(found.log, over, found.about), profiles)
    assert set(several["missing"]) == {"slowdown of concurrent processes, messages between processes"}
    for role in ("target", "draft"):
        profile_files.save(lacking if role == "target" else profiles[role], tmp_path)
    about = dict(found.about) | {"profiles": {role: f"made-{role}.json" for role in ("target", "draft")}}
    path = measured_runs.save(MeasuredRuns(found.log, found.table, about), tmp_path / "own.json")
    assert "not measured in the profile, assumed 0: head of the target (speculative)" in " ".join(invoke(path).output.split())


# --- Mismatches ---


@pytest.mark.parametrize(("more", "said"), [
    ({"facts": FACTS | {"name": "another"}}, "name of the machine must be 'a processor'"),
    ({"facts": FACTS | {"threads": 8}}, "threads of the machine must be 1"),
    ({"facts": FACTS | {"torch": "3"}}, "torch must be 2"),
    ({"dtype": "float64"}, "dtype must be float32"),
    ({"dtype": "bfloat16"}, "dtype must be float32"),
    ({"shape": dataclasses.asdict(shape_of("medium"))}, "layers of the target must be 5"),
])  # fmt: skip
def test_mismatched_profiles_are_refused_or_marked(more: dict[str, Any], said: str) -> None:
    found, profiles = some_runs()
    assert set(run_comparison.compare(found, profiles)["mismatch"]) == {""}
    wrong = profiles | {"target": profile_of("target", **more)}
    with pytest.raises(ParameterError, match=said):
        run_comparison.compare(found, wrong)
    if "shape" in more:
        return  # too few layers to continue
    table = run_comparison.compare(found, wrong, allow_mismatch=True)
    assert all(said in each for each in table["mismatch"])


def test_every_model_needs_its_profile() -> None:
    found, profiles = some_runs()
    with pytest.raises(ParameterError, match="profile of the draft is required"):
        run_comparison.compare(found, {"target": profiles["target"]})
    with pytest.raises(ParameterError, match="given for the medium, which the runs do not have"):
        run_comparison.compare(found, profiles | {"medium": profile_of("medium")})


# --- the command line ---


def written(folder: Path, **more: Any) -> Path:
    """Runs with profiles next to them, as written by `calibrate run --plan`."""
    found, _ = some_runs()
    about = dict(found.about) | {"profiles": {role: f"made-{role}.json" for role in ("target", "draft")}} | more
    for role in ("target", "draft"):
        profile_files.save(profile_of(role), folder)
    return measured_runs.save(MeasuredRuns(found.log, found.table, about), folder / "own.json")


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_command_line_compares_writes_and_keeps_a_page(tmp_path: Path) -> None:
    path, page = written(tmp_path), tmp_path / "PAGE.md"
    page.write_text("# Before\n\nwhat others say\n")
    result = invoke(path, "-o", tmp_path / "errors.csv", "--page", page)
    assert result.exit_code == 0, result.output
    assert "speculative" in result.output
    assert pl.read_csv(tmp_path / "errors.csv").height == 4
    assert result.stdout.splitlines()[-2:] == [str(tmp_path / "errors.csv"), str(page)]
    text = page.read_text()
    assert text.startswith("# Before\n\nwhat others say\n")
    assert "## Predicted against measured" in text
    assert invoke(path, "--page", page, "--check").exit_code == 0
    page.write_text(text.replace("speculative", "speculativ"))
    assert invoke(path, "--page", page, "--check").exit_code == 1
    assert invoke(path, "--page", page).exit_code == 0
    assert page.read_text() == text
    (said,) = json.loads(invoke(path, "--json").stdout)["files"]
    assert [each["method"] for each in said["methods"]] == ["speculative"]
    assert len(said["runs"]) == 4


def test_a_mismatch_is_accepted_on_request(tmp_path: Path) -> None:
    path, out = written(tmp_path, dtype="float64"), tmp_path / "errors.csv"
    assert invoke(path, "-o", out).exit_code == 2
    assert not out.exists()
    result = invoke(path, "-o", out, "--allow-mismatch")
    assert result.exit_code == 0, result.output
    marks = pl.read_csv(out)["mismatch"].to_list()
    assert len(marks) == 4
    assert all("dtype must be float64, as in the runs, got float32 in made-target" in mark for mark in marks)


@pytest.mark.parametrize(("change", "arguments", "said"), [
    ({"profiles": {}}, [], "profile is required"),
    ({"dtype": "float64"}, [], "dtype must be float64"),
    ({}, ["--check"], "--check is used with --page"),
    ({}, ["--profile", "small=x"], "unknown role"),
    ({}, ["--profile", "target=no-such"], "no-such"),
    ({}, ["-o", "errors.txt"], "out must end in"),
])  # fmt: skip
def test_errors_are_one_line(change: dict[str, Any], arguments: list[str], said: str, tmp_path: Path) -> None:
    result = invoke(written(tmp_path, **change), *arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_truncated_runs_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    result = invoke(path)
    assert result.exit_code == 2
    assert "JSON" in result.output


def test_parts_of_time_are_those_of_the_main_process() -> None:
    """With the profile of the machine every part agrees with the prediction; contention is a part of the total."""
    over = {"dispatch": 2e-4, "wake": 4e-3, "promotion": 1e-4, "scheduling": 3e-4}
    clock = profiles(wider=0.2, head=2e-3, step=1e-3, next=1e-4, first_read=2e-4, **over)
    made = [record_decoding("autoregressive", 24, {})]
    made += [record_decoding("ppd", 24, {"match_rate": 0.6}, exit_layer=layer, candidates=1, form=form)
             for form, layer in (("flat", 4), ("literal", 8))]
    found = synthetic_runs(made, clock, units=[1, 2, 2])
    table = run_comparison.compare(found, clock).filter(units=2)
    assert table.height == 2
    for row in table.iter_rows(named=True):
        for part in PARTS:
            # The test's clock has no time between spans: it is included in the reads.
            expected = row[f"measured_{part}_s"] + {"rest": 1, "target": -1}.get(part, 0) * row["predicted_rest_s"]
            assert row[f"predicted_{part}_s"] == pytest.approx(expected, abs=1e-6), part
        assert row["predicted_target_s"] > 0.1
        assert row["predicted_rest_s"] == pytest.approx(3e-4 * 2 * row["tokens"])  # two reads per token
        assert row["contention_s"] == 0  # which the profile lacks
    assert table["predicted_waiting_s"].min() > 1e-3  # type: ignore[operator]  # for those that woke up late
    forks = [each.account.adoptions for each in made[1:]]
    assert all(0.5e-4 * count < transfers for count, transfers in zip(forks, table["predicted_transfers_s"], strict=True))
    measured, simulated = run_comparison.measured_and_simulated_spans(found, clock, table["decoding"][0])
    own = measured.filter(pl.col("what") != "wait").sort("start", "unit", "what")
    assert own["end"].to_list() == pytest.approx(simulated.sort("start", "unit", "what")["end"].to_list(), abs=1e-6)
    over = ", ".join(str(number) for number, each in found.timed.items() if each.units > 1)
    for runs_, there in ((found, over), (synthetic_runs(made[:1], clock, units=[1]), "none of these runs is")):
        with pytest.raises(ParameterError) as refused:
            run_comparison.measured_and_simulated_spans(runs_, clock, 0)
        assert str(refused.value) == f"decoding must be one over several processes ({there}), got 0"


def test_streams_need_no_times_of_dispatch_and_wake() -> None:
    """The same times under another name; streams have no dispatch and wake, so a profile need not have them."""
    clock = profiles(scheduling=3e-4)
    made = [record_decoding("ppd", 24, {"match_rate": 0.6}, exit_layer=8, candidates=1)] * 3
    found = synthetic_runs(made, clock, units=[1, 2, 2])
    found = MeasuredRuns(found.log, found.table, {**found.about, "unit_kind": ["streams", "streams", "processes"]})
    table = run_comparison.compare(found, clock)
    assert table["method"].to_list() == ["ppd", "ppd-streams", "ppd-processes"]
    assert table["predicted_s"][1] == table["predicted_s"][2]
    lacking = [{*each.split(", ")} for each in table["missing"]]
    assert lacking[1] - lacking[0] == {"promotion", "main_alone", "main_concurrent", "subprocess_step"}
    assert lacking[2] - lacking[0] == {"dispatch", "wake", "promotion", "main_alone", "main_concurrent", "subprocess_step"}


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_processes_with_a_model_each_slow_each_other_as_measured_next_to_a_busy_process(slower: float) -> None:
    """Runs by the same clock are predicted without error; a profile without such times leaves the slowdown out, and says so."""
    clock = profiles(wider=0.2, head=2e-3, step=1e-3, next=1e-4, first_read=2e-4)
    made = [record_decoding("pearl", 24, {"acceptance_rate": 0.6}, draft_length=3), record_decoding("autoregressive", 24, {}),
            record_decoding("speculative", 24, {"acceptance_rate": 0.6}, draft_length=3)]  # fmt: skip
    found = synthetic_runs(made, clock, units=[2, 1, 2], slower=slower)
    layers = clock["target"].table.filter(pl.col("part") == "layer")
    slowed = layers.with_columns(pl.lit(1).cast(layers["busy"].dtype).alias("busy"), pl.col("time_s", "low_s", "high_s") * slower)
    busy = dataclasses.replace(clock["target"], table=pl.concat([clock["target"].table, slowed]))
    known = run_comparison.compare(found, clock | {"target": busy})
    assert known["error"].abs().max() == pytest.approx(0, abs=1e-9)
    lacking = [each.partition("draft, ")[2] for each in known["missing"]]
    assert lacking == ["messages between processes", "", "messages between processes"]
    assert (known["contention_s"] > 0).to_list() == [slower > 1, False, False]  # speculative decoding works in turn
    assert known["method"].to_list() == ["pearl-processes", "autoregressive", "speculative-processes"]
    for row in known.filter(units=2).iter_rows(named=True):
        for whose in ("predicted", "measured"):  # the target's process makes passes or waits
            parts = {part: row[f"{whose}_{part}_s"] for part in PARTS}
            assert {part for part, seconds in parts.items() if seconds} == {"target", "waiting"}
            assert sum(parts.values()) == pytest.approx(row[f"{whose}_total_s"])
    alone = run_comparison.compare(found, clock)
    assert alone["missing"][0].partition("draft, ")[2] == "slowdown of concurrent processes, messages between processes"
    assert alone["contention_s"].to_list() == [0, 0, 0]
    assert (alone["error"][0] < -0.01) == (slower > 1)


def test_passes_of_sub_processes_use_their_own_times() -> None:
    """They replace those of a single process; heads, later layers and prompts belong to the main process."""
    clock = {"target": ProfileCosts(profiles(step=5e-4, embedding=1e-4)["target"])}
    own, told = ReplayedSeconds(clock, single_process=False), ReplayedSeconds(clock, single_process=False, subprocess_step=2e-4)
    sub = Forward("target", (7,), 5, LayerSpan(0, 8))
    assert own.forward(sub) == pytest.approx(8e-3 + 6e-4)
    assert told.forward(sub) == pytest.approx(8e-3 + 2e-4)
    assert told.forward(sub._replace(tokens=(7, 8, 9), tree=(-1, -1, -1))) == pytest.approx(8e-3 + 2e-4)
    later = sub._replace(layers=sub.layers._replace(first=4), state=sub)
    for step in (sub._replace(heads=1), later, sub._replace(tokens=(7, 8, 9))):
        assert told.forward(step) == own.forward(step)
    # Timed next to other processes: .6 ms there are .4 ms alone, because layers take 1.5 times as long.
    runs = synthetic_runs([record_decoding("ppd", 24, {"match_rate": 0.6}, exit_layer=8, candidates=1)], profiles(), units=[2])
    timed = profiles(main_concurrent=1.5e-3, subprocess_step=6e-4)
    cost = run_comparison.over_processes({"target": ProfileCosts(timed["target"])}, next(iter(runs.timed.values())))
    assert (cost.subprocess_step, cost.slowdowns) == (pytest.approx(4e-4), (1.0, pytest.approx(1.5)))


def test_reads_that_depend_on_times_are_refused() -> None:
    found = record_decoding("ppd", 12, {"match_rate": 0.6}, exit_layer=4, candidates=2, form="nested")
    cost = ReplayedSeconds(
        {"target": ProfileCosts(profiles(first_read=0.02)["target"])}
    )  # who looks for the next token stops the others later
    with pytest.raises(ParameterError, match=r"ppd \(exit_layer=4, .*form=nested\) do: the log has no further read top"):
        run_comparison.predict(found, cost, 31)


def test_decision_logs_are_not_runs(tmp_path: Path) -> None:
    found = measured(tmp_path)
    read_log.save(found.log, tmp_path / "log.json")
    result = invoke(tmp_path / "log.json")
    assert result.exit_code == 2
    assert "error:" in result.output


def test_measured_and_simulated_units_side_by_side() -> None:
    """The median repeat, measured at half the speed of the profile, next to the prediction."""
    known, clock = profiles(scheduling=3e-4), profiles(layer=2e-3, scheduling=3e-4)
    made = [record_decoding("ppd", 20, {"match_rate": 0.6}, seed=3, exit_layer=6, candidates=1)]
    found = synthetic_runs(made, clock, units=[2])
    measured_, simulated = run_comparison.measured_and_simulated_spans(found, known, 0)
    timed = found.timed[0]
    assert measured_["end"].max() == pytest.approx(max(span.end for span in timed.spans(timed.median_repeat)))
    assert measured_.height == len(timed.spans(timed.median_repeat))
    assert simulated["end"].max() == pytest.approx(run_comparison.compare(found, known)["predicted_total_s"][0])
    assert simulated["end"].max() < 0.7 * measured_["end"].max()


def test_the_printed_tables_agree_with_the_rows() -> None:
    """Three tables: errors by method, the worst runs, and parts of the time in milliseconds; and the ranking."""
    known, clock = profiles(main_alone=1e-3, main_concurrent=1.5e-3), profiles(wider=0.3, scheduling=3e-4)
    choices = [("autoregressive", {}, {}), ("speculative", {"draft_length": 3}, {"acceptance_rate": 0.7}),
               ("speculative", {"draft_length": 6}, {"acceptance_rate": 0.7}),
               ("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.6})]  # fmt: skip
    made = [record_decoding(name, 25, rates, seed=3, **settings) for name, settings, rates in choices]
    found = synthetic_runs(made, clock, ["a prompt with a very long name"] * 4, units=[1, 1, 1, 2], slower=1.5)
    table = run_comparison.compare(found, known)
    text = io.StringIO()
    comparison_report.show(table, dict(found.about), Console(file=text, width=250, highlight=False))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "method settings runs median 90th percentile worst bias noise bound of median within bounds" in lines
    for row in prediction_error.by_method(table):
        errors = " ".join(f"{row[name]:.1%}" for name in ("median_error", "p90_error", "worst_error", "bias", "noise", "bound"))
        assert f"{row['method']} {row['settings']} {row['runs']} {errors} {'yes' if row['held'] else 'NO'}" in lines
    at = lines.index("method settings prompt predicted measured error noise")
    worst = sorted(table.to_dicts(), key=lambda row: -abs(row["error"]))
    assert comparison_report.WORST == 5 > len(worst)
    for row, line in zip(worst, lines[at + 2 :], strict=False):
        times = " ".join(f"{1e3 * row[name]:.1f} ms" for name in ("predicted_s", "measured_s"))
        said = f"{row['method']} {row['settings'] or '-'} a prompt with a very lon {times} {row['error']:.1%} {row['noise']:.1%}"
        assert line == said
    assert " ".join(["method", *PARTS, "total mutual slowdown"]) in lines
    for name in ("bound of median", "within bounds", "mutual slowdown", *PARTS[3:]):
        assert any(f"{name}: " in line for line in lines)
    for method in dict.fromkeys(table["method"]):
        own = table.filter(table["method"] == method)
        cells = []
        for part in (*PARTS, "total"):
            pair = [1e3 * own[f"{whose}_{part}_s"].mean() for whose in ("predicted", "measured")]  # type: ignore[operator]
            cells.append(f"{pair[0]:.1f} / {pair[1]:.1f}" if max(map(abs, pair)) > 1e-6 else "-")
        slower = 1e3 * own["contention_s"].mean()  # type: ignore[operator]
        assert " ".join([method, *cells, f"{slower:.1f}" if slower else "-"]) in lines
    pairs, right = prediction_error.ranking(table)
    assert pairs
    said = f"{right} of {pairs} pairs of settings ({right / pairs:.1%})"
    assert f"ranking: {said} that differ by more than twice the noise are ranked correctly" in lines
    page = [*comparison_report.markdown([("own", table, dict(found.about) | {"mode": "cuda-graph", "devices": ["cuda:0", "cpu"]})])]
    assert page[0] == f"### own: {found.about['machine']['name']}, float32, cuda-graph, processes on cuda:0"
    said = f"Of {pairs} pairs of settings that differ by more than twice the noise {right / pairs:.1%} are ranked correctly."
    assert said in page[2]
    far = pl.when(pl.col("method") == "ppd-processes").then(0.3).otherwise("error")  # an error beyond its bound
    for shown in (table, table.with_columns(error=far)):
        page = [*comparison_report.markdown([("own", shown, dict(found.about))])]
        rows = sorted(prediction_error.by_method(shown), key=lambda row: -row["median_error"])
        wanted = []
        for row in rows:
            numbers = [row[name] for name in ("median_error", "p90_error", "worst_error", "bias", "noise", "bound")]
            cells = [row["method"], row["settings"], row["runs"], *[f"{each:.1%}" for each in numbers]]
            wanted.append(f"| {' | '.join(map(str, cells))} | {'yes' if row['held'] else '**no**'} |")
        assert [line for line in page if line.startswith("| ") and "%" in line] == wanted
        assert shown is table or {row["held"] for row in rows} == {True, False}
