"""Speculative decoding of batches in closed form and by path: against the simulated steps, and by enumeration."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.costs.width_curve import PassTimes
from model.hardware.cost_models import UniformLayers, pass_time
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World, batch_world
from model.methods.rounds import rounds_of_batches, rounds_of_lengths, starts_by_round
from model.methods.rounds.prices_of_rounds import round_prices
from model.methods.rounds.round_laws import Rounds
from model.methods.rounds.round_moments import moments
from model.methods.rounds.round_starts import survival_of
from model.methods.speculative import algorithm, paths, static_batches
from model.methods.speculative.algorithm import Parameters
from model.methods.speculative.batch_break_even import batched_speedup
from model.methods.speculative.theory import operations, predict
from model.methods.speculative.theory import work as closed_work
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid, Markov, Replay
from model.steps import Batch, Commit, Forward, LayerSpan
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.runs.sweep import resolve
from sim.scenarios.grid import Grid
from tests.support.exact import near
from tests.support.position_costs import growing
from tests.support.tiers import examples

LAYERS = 4
CURVE = ((1, 4.0), (2, 5.0), (4, 7.0), (8, 8.0), (32, 32.0))
COST = UnitCost(LAYERS, cost_ratio=0.25, operations_ratio=0.5, final_head=4.0, link=0.25)
WIDE = dataclasses.replace(COST, verify_cost=CURVE)
COSTS: tuple[StepCosts, ...] = COST, WIDE, growing(LAYERS, draft=0.3, link=0.25, prompt=3, draft_devices=0.5)
DEEPER = COST, WIDE, growing(LAYERS, draft=0.3, smaller_layers=2, link=0.25, prompt=3, draft_devices=0.5)


def played(parameters: Parameters, random_draws: Sequence[Sequence[int]], cost: StepCosts, **more: Any) -> Run:
    """The simulator on sequences with these numbers of accepted tokens from each position."""
    tokens = max(parameters.lengths or (len(random_draws[0]),))
    answers = batch_world([World(1, LAYERS, drafts={"draft": DraftOutcomes("target", own)}) for own in random_draws])
    steps = algorithm.decode(parameters, [0], tokens)
    return simulate(steps, parameters.total_tokens(tokens), Cluster(parameters.units), cost, answers, **more)


def survivors(right: Sequence[bool]) -> list[int]:
    """Length of the run of accepted tokens from each position."""
    return [len([*itertools.takewhile(bool, right[place:])]) for place in range(len(right))]


LUCK = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=5)


# --- On every path ---


@settings(deadline=None, max_examples=60)
@given(LUCK, st.integers(0, 5), st.integers(1, 5), st.sampled_from(COSTS), st.booleans())
def test_events_equal_paths(random_draws: list[list[bool]], gamma: int, batch: int, cost: StepCosts, separate: bool) -> None:
    lengths = tuple(map(len, random_draws))
    placement = "separate" if separate else "colocated"
    parameters = Parameters(LAYERS, gamma, sequences=batch, batching="static", lengths=lengths, placement=placement)
    run = played(parameters, [survivors(own) for own in random_draws], cost)

    def outcomes(own: list[bool]) -> Any:
        return ((lambda place, one=one: np.full(place.size, one)) for one in own)

    each = [outcomes(own) for own in random_draws]
    tally = paths.walk(parameters, max(lengths), cost, each if len(random_draws) > 1 else each[0])
    assert len({*tally.time.tolist()}) == len({*tally.busy.tolist()}) == 1
    found, want = [tally.time[0], tally.busy[0], tally.operations[0]], [run.latency, run.busy]
    assert near(found, [*want, operations(parameters, cost, run.rounds, run.account)], 0.0 if cost.uniform else 1e-12)
    assert tally.rounds[0] == run.rounds.total()
    assert tally.drafted[0] == sum(drafted * count for (_, drafted), count in run.rounds.items())
    lengths_of = [0] * (gamma + 1)
    for (accepted, _), count in run.rounds.items():
        lengths_of[accepted] += count
    assert tally.accepted.tolist() == [count * tally.time.size for count in lengths_of]
    layered = played(parameters, [survivors(own) for own in random_draws], cost, per_layer=True)
    assert near(layered.latency, run.latency, 1e-12)


def test_time_of_a_pass_depends_on_sequences_and_tokens_of_each() -> None:
    step = Forward("target", (0,) * 6, 3, LayerSpan(0, LAYERS), heads=6, batch=Batch.uniform((0, 1, 2), 3, 2, 2))
    draft = step._replace(
        role="draft", tokens=(0,) * 3, layers=LayerSpan(0, 1), heads=3, batch=Batch.uniform((0, 1, 2), 3, heads=1)
    )
    assert [cost.forward(step) for cost in (COST, WIDE)] == [8.0, 8.0 * 7.5 / 4]
    assert [cost.forward(draft) for cost in (COST, WIDE)] == [2.0, 2.0 * 6 / 4]
    for cost in COSTS:
        for each in (step, draft):
            assert near(sum(cost.layer_times_of(each)), cost.forward(each))


@pytest.mark.parametrize("per_layer", [False, True])
def test_passes_with_equal_tokens_of_fewer_sequences_differ_in_time(per_layer: bool) -> None:
    whole = LayerSpan(0, LAYERS)
    two, three = (
        Forward(
            "target",
            (0,) * 6,
            0,
            whole,
            heads=6,
            batch=Batch.uniform(tuple(range(first, first + count)), 0, 6 // count, 6 // count),
        )
        for first, count in ((0, 2), (2, 3))
    )
    drafts = [
        Forward("draft", (0, 0), 0, LayerSpan(0, 1), heads=2, batch=Batch.uniform(each, 0, 2 // len(each), 2 // len(each)))
        for each in ((0, 1), (2,))
    ]

    passes = (two, three, two._replace(at=3, batch=Batch.uniform((0, 1), 3, 3, 3)), *drafts)

    def steps() -> Any:
        for step in passes:
            assert (yield step) == step
        yield Commit("token", (0,))

    for cost in COSTS:
        want = sum(cost.forward(step) for step in passes)
        run = simulate(steps(), 1, Cluster(1), cost, World(1, LAYERS), per_layer=per_layer)
        assert near(run.latency, want, 1e-12)
        assert run.account.passes == 5


# --- In the mean ---


LAWS = st.floats(0, 1).map(Iid) | st.tuples(st.floats(0.1, 0.9), st.floats(0, 0.8)).map(lambda each: Markov(*each)) | st.lists(
    st.floats(0, 1), min_size=5, max_size=5
).map(Rounds.by_draft_position)


@given(LAWS, st.integers(0, 5), st.integers(1, 30))
def test_enumerated_rounds_are_all_rounds(law: Any, gamma: int, tokens: int) -> None:
    """Probabilities of each round, by its start: a first one is certain, and later ones start later or not at all."""
    found, want = np.zeros((0, tokens)), moments(gamma, tokens, law, round_prices(COST, gamma))
    for stretch in starts_by_round.stretches([law], gamma, tokens):
        found = np.concatenate([found, stretch.at(range(tokens))[0, 0]])
    assert near(found[:, -1].sum(), want.rounds, 1e-12)
    assert near(found[:, max(tokens - 1 - gamma, 0) : -1].sum(), want.drafted, 1e-12, 1e-300)
    assert (found[0] == 1).all()
    assert (np.diff(found, axis=0) <= 1e-15).all()
    assert (np.diff(found, axis=1) >= -1e-15).all()


@given(LAWS, st.integers(0, 4), st.integers(1, 25), st.integers(1, 30))
def test_starts_of_a_shorter_sequence_are_those_of_a_longer_one(law: Any, gamma: int, tokens: int, more: int) -> None:
    """And rounds after a completely accepted draft start that many tokens after the round before."""
    each = [[*starts_by_round.stretches([law], gamma, length, kinds=2)] for length in (tokens, tokens + more)]
    short, long = [np.concatenate([stretch.at(range(tokens))[0] for stretch in own], axis=1) for own in each]
    rounds = min(short.shape[1], long.shape[1])
    np.testing.assert_allclose(long[:, :rounds], short[:, :rounds], rtol=1e-12, atol=1e-15)
    assert (long[:, rounds:] < 1e-15).all()
    survival = survival_of([law], gamma)
    if survival is not None:
        after = short[1] - short[0]
        assert near(after[0], np.zeros(tokens))
        for place in range(tokens):
            before = short[1, :-1, place - gamma - 1] if place > gamma > 0 else np.zeros(len(after) - 1)
            np.testing.assert_allclose(after[1:, place], before * (survival[0, -1] if gamma else 0.0), rtol=1e-12, atol=1e-14)


@given(LAWS, st.integers(0, 5), st.integers(1, 12), st.sampled_from(COSTS), st.booleans())
def test_batch_of_one_equals_the_closed_form(law: Any, gamma: int, tokens: int, cost: StepCosts, separate: bool) -> None:
    parameters = Parameters(LAYERS, gamma, placement="separate" if separate else "colocated")
    [rounds] = rounds_of_batches.by_room([law], gamma, (tokens,)).counts
    want = moments(gamma, tokens, law, round_prices(cost, gamma, tokens=tokens, separate=separate))
    prices = static_batches.prices(cost, gamma, 1, tokens=tokens, separate=separate)
    [placed] = rounds_of_batches.by_place([law], gamma, (tokens,)).counts
    position, drafted = rounds_of_batches.cells_of(gamma, (tokens,))
    of_room = [placed[..., drafted == room].sum(axis=(0, 2)) for room in range(gamma + 1)]
    assert near(np.stack(of_room, axis=1), rounds, 1e-12, 1e-14)
    assert near((rounds * prices.operations).sum(), want.operations, 1e-12)
    for of, value in ((prices.time, want.time), (prices.busy, want.busy)):
        assert near((rounds * of if cost.uniform else placed * of[:, :, position, drafted]).sum(), value, 1e-12)
    alone = predict(parameters, tokens, law, cost)
    lonely = predict(dataclasses.replace(parameters, batching="static", lengths=(tokens,)), tokens, law, cost)
    for name, value in vars(alone).items():
        assert near(getattr(lonely, name), value, 1e-12) or np.isnan(value), name
    # Sequences one after another: sums of the single ones.
    behind = predict(dataclasses.replace(parameters, batching="static", lengths=(tokens, tokens)), tokens, law, cost)
    for name in ("latency", "latency_variance", "busy", "plain_latency", "rounds", "drafted", "operations"):
        assert near(getattr(behind, name), 2 * getattr(alone, name), 1e-12, 1e-300), name


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(0, 3), st.integers(1, 3), st.integers(0, 20),
    st.sampled_from(DEEPER), st.booleans(),
)  # fmt: skip
def test_mean_equals_enumeration_of_all_outcomes(
    lengths: list[int], gamma: int, batch: int, twentieths: int, cost: StepCosts, separate: bool
) -> None:
    rate, tokens = twentieths / 20, max(lengths)
    parameters = Parameters(
        LAYERS,
        gamma,
        sequences=batch,
        batching="static",
        lengths=tuple(lengths),
        placement="separate" if separate else "colocated",
        draft_layers=2,
    )
    mean = np.zeros(6)
    works: dict[str, Any] = {}
    for acceptances in itertools.product(*(itertools.product((False, True), repeat=length - 1) for length in lengths)):
        flat = [one for own in acceptances for one in own]
        chance = math.prod(rate if one else 1 - rate for one in flat)
        if not chance:
            continue
        random_draws = [survivors([*own, False]) for own in acceptances]
        run = played(parameters, random_draws, cost)
        drafted = sum(count * times for (_, count), times in run.rounds.items())
        arithmetic = operations(parameters, cost, run.rounds, run.account)
        square = run.latency**2
        mean += chance * np.array([run.latency, square, run.busy, run.rounds.total(), drafted, arithmetic])
        for role, totals in run.account.totals().by_model.items():
            works[role] = np.asarray(works.get(role, 0.0)) + chance * np.array(totals)
    found = predict(parameters, tokens, Iid(rate), cost)
    values = found.latency, found.busy, found.rounds, found.drafted, found.operations
    assert near(np.array(values), mean[[0, 2, 3, 4, 5]], 1e-12)
    variance = float(found.latency_variance)
    assert math.isnan(variance) if batch > 1 else near(variance + mean[0] ** 2, mean[1], 1e-11)
    assert float(found.units) == parameters.units
    assert near(found.plain_latency, parameters.plain_time(tokens, cost))
    if cost.uniform:
        assert near(found.plain_latency, sum(float(cost.plain_times(sequences=n)) for n in _columns(lengths, batch)))
    closed = closed_work(parameters, tokens, Iid(rate))
    assert closed is not None
    assert {*closed.by_model} == {*works}
    for role, totals in closed.by_model.items():
        for name, value, want in zip(totals._fields, totals, works[role].tolist(), strict=True):
            assert math.isnan(value) or near(value, want, 1e-12, 1e-300), (role, name)
    said = ("passes", "layer_runs", "head_runs", "heads")
    assert not any(math.isnan(getattr(closed.by_model[role], name)) for role in closed.by_model for name in said)
    assert not math.isnan(closed.by_model["target"].layer_passes)


def _columns(lengths: Sequence[int], batch: int) -> list[int]:
    groups = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return [sum(length > place for length in group) for group in groups for place in range(max(group))]


@pytest.mark.parametrize("lengths", [(7, 7), (40, 40, 40), (9, 6, 9)])
@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_laws_together_are_those_of_each(gamma: int, lengths: tuple[int, ...]) -> None:
    """Also of laws under which rounds never occur that do under others."""
    laws = [Iid(rate) for rate in (1.0, 0.0, 0.5, 0.999, 1e-9)]
    for of in (rounds_of_batches.by_room, rounds_of_batches.by_place):
        together = of(laws, gamma, lengths)
        for number, law in enumerate(laws):
            for several, [one] in zip(together, of([law], gamma, lengths), strict=True):
                np.testing.assert_allclose(several[number], one, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("lengths", [(60, 60), (60,) * 9, (60, 30, 30)])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_rounds_that_never_occur_change_nothing(rate: float, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do numbers of sequences that are never left, nor positions where a round never starts."""
    some = [rounds_of_batches.by_place([Iid(rate)], 3, lengths), rounds_of_batches.by_room([Iid(rate)], 3, lengths)]
    monkeypatch.setattr(rounds_of_batches, "NEVER", 0.0)
    monkeypatch.setattr(starts_by_round, "NEVER", 0.0)
    monkeypatch.setattr(starts_by_round, "_CERTAIN", 2.0)
    for cached in (rounds_of_batches._kept, rounds_of_batches._sequences):
        cached.cache_clear()
    every = [rounds_of_batches.by_place([Iid(rate)], 3, lengths), rounds_of_batches.by_room([Iid(rate)], 3, lengths)]
    for one, other in zip(itertools.chain(*some), itertools.chain(*every), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@given(st.lists(LAWS, min_size=1, max_size=3), st.integers(0, 4), st.lists(st.sampled_from([2, 5, 9]), min_size=1, max_size=5))
def test_work_of_batches_follows_from_the_sequences_left(laws: list[Any], gamma: int, lengths: list[int]) -> None:
    counts = rounds_of_batches.by_room(laws, gamma, lengths).counts
    drafts, sequences = np.arange(gamma + 1.0), np.einsum("n,lnm->lm", np.arange(len(lengths) + 1.0), counts)
    want = counts.sum(axis=(1, 2)), counts.sum(axis=1) @ drafts, sequences @ (drafts + 1), sequences @ drafts
    for found, total in zip(rounds_of_batches.work_of(laws, gamma, lengths), want, strict=True):
        np.testing.assert_allclose(found, total, rtol=1e-12, atol=1e-13)


@given(
    st.lists(LAWS, min_size=1, max_size=3), st.integers(0, 4), st.integers(1, 6),
    st.sets(st.integers(1, 20) | st.sampled_from([60, 90, 91]), min_size=1, max_size=4), st.sampled_from([300, 20_000]),
)  # fmt: skip
@settings(max_examples=examples(40, 500), deadline=None)
def test_rounds_of_lengths_are_those_of_each_batch(
    laws: list[Any], gamma: int, sequences: int, lengths: set[int], together: int
) -> None:
    """Also of rounds long before an end, which all sequences have, and in blocks of laws and lengths."""
    rising = np.array(sorted(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_of_lengths, "_TOGETHER", together)
        for placed, of in ((False, rounds_of_batches.by_room), (True, rounds_of_batches.by_place)):
            found = [*rounds_of_lengths.rounds_of_lengths(laws, gamma, sequences, rising, placed=placed)]
            assert sum(part.sequences.size for part in found) == len(laws) * rising.size
            for part in found:
                for number, tokens in enumerate(rising[part.lengths].tolist()):
                    counts, each, drafted = of(laws[part.laws], gamma, (tokens,) * sequences)
                    ours = part.late[:, number]
                    if part.early is not None:
                        cut = max(tokens - 1 - gamma, 0)
                        late = ours[..., gamma + 1 - (tokens - cut) :, :]
                        assert not part.early[:, number, ..., cut:].any()
                        ours = np.concatenate([part.early[:, number, ..., :cut], late.reshape(*late.shape[:-2], -1)], axis=-1)
                    np.testing.assert_allclose(ours, counts, rtol=1e-11, atol=1e-13)
                    np.testing.assert_allclose(part.sequences[:, number], each, rtol=1e-12)
                    np.testing.assert_allclose(part.drafted[:, number], drafted, rtol=1e-12, atol=1e-13)


def test_records_have_no_closed_form_in_batches() -> None:
    law = Replay([[True, False, True], [False, True, True]])
    parameters = Parameters(LAYERS, 2, sequences=2, batching="static")
    with pytest.raises(ParameterError, match=r"closed form for static batches; ask for views = \['paths'\]"):
        predict(parameters, 4, law, COST)
    assert closed_work(parameters, 4, law) is None
    # Sequences one after another have one.
    behind, alone = (
        predict(Parameters(LAYERS, 2, batching="static", lengths=lengths), 4, law, COST).latency for lengths in ((4, 4), None)
    )
    assert near(behind, 2 * alone)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_long_sequences_approach_the_asymptotic_speed_up(batch: int) -> None:
    """The last sequence of a batch ends later than the mean, by about the square root of its length; never earlier."""
    rate, gamma = 0.7, 3
    cost = UnitCost(LAYERS, cost_ratio=0.1, verify_cost=((1, 4.0), (16, 5.0), (64, 12.0)))
    target = PassTimes([batch], [1, 4], [0], [[[cost.slowdown(width * batch)] for width in (1, 4)]])
    draft = PassTimes([batch], [1], [0], [[[0.1 * cost.slowdown(batch)]]])
    limit = float(batched_speedup(rate, gamma, target, draft, batch, 0))
    gaps = []
    for tokens in (50, 200, 800):
        found = predict(Parameters(LAYERS, gamma, sequences=batch, batching="static"), tokens, Iid(rate), cost)
        gaps.append(1 - float(found.plain_latency / found.latency) / limit)
    assert gaps[0] > gaps[1] > gaps[2] > -1e-9
    assert gaps[2] < (0.003 if batch == 1 else 0.06)
    assert batch == 1 or gaps[1] / gaps[2] == pytest.approx(2, rel=0.25)


@pytest.mark.parametrize(("batch", "lengths"), [(2, (3, 3, 1)), (2, (1, 1, 3)), (1, (4, 1)), (1, (1, 4)), (1, (1, 1))])
def test_units_ratio_is_known_if_nothing_is_drafted(batch: int, lengths: tuple[int, ...]) -> None:
    """Else links, and a draft on a smaller device, make unit-time differ from time."""
    parameters = Parameters(LAYERS, 2, sequences=batch, batching="static", lengths=lengths, placement="separate")
    ratio = float(predict(parameters, max(lengths), Iid(0.5), COSTS[2]).units_ratio)
    assert math.isnan(ratio) if max(lengths) > 1 else ratio == 1


@pytest.mark.parametrize("separate", [False, True])
def test_straggler_loss_is_relative_to_whole_drafts_of_full_batches(separate: bool) -> None:
    """On costs that depend on the position, the mean over positions; of several costs each its own."""
    placement, tokens = "separate" if separate else "colocated", 7
    parameters = Parameters(LAYERS, 3, sequences=4, batching="static", placement=placement)
    costs = [growing(LAYERS, draft=0.3, link=0.25, prompt=prompt) for prompt in (3, 20)]
    alone = []
    for cost in costs:
        full = round_prices(cost, 3, tokens=tokens, separate=separate, sequences=4).time[0, :, 3].mean()
        alone.append(1 - 9.0 * full / (4 * 50.0))
        assert near(static_batches.straggler_loss(parameters, cost, 9.0, 50.0, tokens), alone[-1])
    joint, rounds, time = many_costs.joined(costs), np.array([9.0, 18.0]), np.array([50.0, 100.0])
    assert near(static_batches.straggler_loss(parameters, joint, rounds, time, tokens), np.array(alone))


# --- Scenarios ---


RAGGED: dict[str, Any] = {"sequences": 4, "batching": "static", "lengths": [12, 7, 12, 3, 9, 5]}
BASE: dict[str, Any] = {
    "scenario": {"name": "batches", "tokens": 12, "replications": 4096, "event_replications": 64},
    "method": [{"name": "speculative", "layers": 8, "draft_length": 3, **RAGGED}],
    "outcomes": {"kind": "iid", "acceptance_rate": 0.7}, "cost": {"cost_ratio": 0.125, "operations_ratio": 0.125},
}  # fmt: skip


def test_all_views_of_a_scenario_agree() -> None:
    """The mean of 4096 paths, with a false-alarm probability of 1e-9; the simulator's paths are the sampler's."""
    rows = {row["view"]: row for row in sim.run(BASE).to_dicts()}
    formula, sampled, events = (rows[view] for view in ("formula", "paths", "events"))
    assert events["paths_difference"] == 0
    spread = sampled["latency_sd_layers"] / 4096**0.5
    assert abs(sampled["latency_layers"] - formula["latency_layers"]) < 6.2 * spread
    assert formula["latency_sd_layers"] is None
    for name in ("tokens_per_round", "operations_per_token", "draft_acceptance_rate"):
        assert near(sampled[name], formula[name], 0.02), name
        assert near(events[name], formula[name], 0.1), name
    assert "occupancy" not in formula
    steps = 12 + 9
    assert near(formula["tpot_layers"], formula["latency_layers"] / steps)
    assert near(formula["speedup"], 8.0 * steps / formula["latency_layers"])


def test_plain_decoding_of_one_sequence_is_unchanged() -> None:
    """Exactly equal: a product, not a sum over steps."""
    table = {"name": "speculative", "layers": 8, "draft_length": 3}
    case = Grid(resolve(BASE | {"method": [table], "cost": {"cost_ratio": 0.1, "final_head": 0.1}})).case(0)
    assert case.plain_time == 12 * 8.1 != sum([8.1] * 12)
    assert case.steps == case.outputs == 12


def test_sequence_has_the_same_draws_in_any_batch() -> None:
    """The first sequence of any batch has the draws of a single sequence; a larger batch extends a smaller one."""
    from sim.views import evaluation

    def rounds(**method: Any) -> list[Any]:
        table = BASE["method"][0] | method
        case = Grid(resolve(BASE | {"method": [{key: value for key, value in table.items() if value is not None}]})).case(0)
        found = []
        for answers in evaluation.worlds_of(case, 5, 9):
            steps = algorithm.decode(case.parameters, [0], case.settings.tokens)
            found.append(interpreter.count(steps, answers, case.outputs).committed)
        return found

    alone = rounds(sequences=None, batching=None, lengths=None)
    two, four = rounds(sequences=2, batching="static", lengths=None), rounds(sequences=4, batching="static", lengths=None)
    for one, pair, many in zip(alone, two, four, strict=True):
        assert [each._replace(sequence=0) for each in one] == [each for each in pair if each.sequence == 0]
        assert [each for each in pair if each.sequence == 1] == [each for each in many if each.sequence == 1]
        assert [each._replace(sequence=1) for each in one] != [each for each in pair if each.sequence == 1]
    assert random_streams.sequence_purpose("accept", 0) == "accept"


def test_hardware_costs_depend_on_sequences_and_tokens() -> None:
    """A target pass takes the profile's time for its tokens per sequence and sequences, and a draft pass likewise."""

    class Growing(UniformLayers):
        def layer(self, width: Any, context: Any, batch: Any = 1, *, busy: int = 0) -> Any:
            found = super().layer(width, context, batch, busy=busy)
            factor = 1 + 0.125 * np.asarray(width) * np.asarray(batch) + 0.25 * np.asarray(batch)
            return found._replace(seconds=found.seconds * factor)

    class Unsure(Growing):
        def layer(self, width: Any, context: Any, batch: Any = 1, *, busy: int = 0) -> Any:
            found = super().layer(width, context, batch)
            return found._replace(seconds=found.seconds * (1 + busy * np.asarray(width)), error=0.1 + 0 * found.seconds)

    target, draft = Growing(preset("llama-2-13b"), 0.001), Growing(preset("llama-2-7b"), 0.0002)
    off = PassSeconds({"target": Unsure(preset("llama-2-13b"), 0.001)}, prompt=100, busy=3)
    for sequences, width in ((1, 1), (8, 1), (8, 4)):
        upper, lower = off.uncertainty_ends()
        here = [float(each.verify_times(width, sequences=sequences)) for each in (upper, off, lower)]
        assert near(here, here[1] * np.array([1.0] * 3 if sequences == 1 else [1.1, 1.0, 0.9]))
    cost = PassSeconds({"target": target, "draft": draft}, prompt=100)
    for sequences in (1, 2, 8):
        numbers = tuple(range(sequences))
        for width in (1, 3, 4):
            batch = Batch.uniform(numbers, 9, width, width) if sequences > 1 else None
            step = Forward("target", (0,) * (width * sequences), 9, LayerSpan(0, 40), heads=width * sequences, batch=batch)
            want = float(pass_time(target, width, 109, sequences).seconds)
            assert near(cost.forward(step), want, 1e-12)
            # Nothing is uncertain here.
            assert near([each.forward(step) for each in cost.uncertainty_ends()], cost.forward(step), 1e-12)
        batch = Batch.uniform(numbers, 9, heads=1) if sequences > 1 else None
        step = Forward("draft", (0,) * sequences, 9, LayerSpan(0, 32), heads=sequences, batch=batch)
        assert near(cost.forward(step), float(pass_time(draft, 1, 109, sequences).seconds), 1e-12)


def test_a_scenario_on_hardware_has_its_own_batch() -> None:
    base = BASE | {"cost": {"kind": "roofline", "device": "h100", "shape": "llama-3.1-8b", "draft_shape": "llama-68m"}}
    base["method"] = [BASE["method"][0] | {"layers": 32, "sequences": 9, "batching": "static"}]  # for six sequences
    base["scenario"] = BASE["scenario"] | {"replications": 64, "event_replications": 4}
    rows = sim.run(base)
    assert rows["paths_difference"].drop_nulls().to_list()[0] < 1e-9 * rows["latency_s"].max()
    case = Grid(resolve(base)).case(0)
    assert (case.full_batch, case.cost.uniform) == (1, False)
    with pytest.raises(ParameterError, match=r"unknown key cost\.batch; it is now method\.sequences"):
        sim.run(base | {"cost": base["cost"] | {"batch": 2}})


def test_verify_cost_must_reach_the_tokens_of_all_sequences() -> None:
    short = BASE | {"cost": BASE["cost"] | {"verify_cost": [[1, 1.0], [15, 2.0]]}}
    with pytest.raises(ParameterError, match=r"must reach width 16, .* measure passes of more tokens or draft less or take fewer"):
        sim.run(short)
    assert sim.run(short | {"cost": BASE["cost"] | {"verify_cost": [[1, 1.0], [16, 2.0]]}}).height == 3
    of_batches = ("sequences", "batching", "lengths")
    two = [BASE["method"][0] | {"sequences": 2, "draft_length": 7}]
    with pytest.raises(ParameterError, match=r"must reach width 16, .* draft less or take fewer sequences$"):
        sim.run(short | {"method": two})
    alone = [{key: value for key, value in BASE["method"][0].items() if key not in of_batches} | {"draft_length": 15}]
    with pytest.raises(ParameterError, match=r"must reach width 16, .* measure passes of more tokens or draft less$"):
        sim.run(short | {"method": alone})
