"""SSD with costs that depend on the position: formula, paths and events price each pass at its position."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.many_seconds import VariedSeconds
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import UniformLayers, WithEngineOverhead
from model.interpret.simulated_answers import RankedPositions
from model.methods import prediction
from model.methods.prediction import ChoiceGroup, GroupedChoices, MethodChoice, PredictionPoints, predict_separately
from model.methods.ssd import finite_ssd, paths, theory
from model.methods.ssd.algorithm import BACKUPS, DRAFT, NONE, Parameters, decode
from model.outcomes.position_ranks import PositionRankRates, PositionRanks, RecordedPositionRanks
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 4
LAWS: dict[str, PositionRanks] = {
    "rates": PositionRankRates([0.5, 0.2, 0.15]), "certain": PositionRankRates([0.7, 0.3, 0.0]),
    "records": RecordedPositionRanks([[1, 2, 1, 0, 3, 1], [1, 1, 1, 1, 2, 3]]),
}  # fmt: skip
SHAPES = st.sampled_from([(1, (1, 1)), (1, (2, 1)), (2, (2, 1, 2)), (3, (2, 2, 1, 1)), (3, (1, 1, 2, 2))])


def simulated(parameters: Parameters, tokens: int, cost: PassSeconds, ranks: tuple[int, ...]) -> Run:
    world = RankedPositions(1, LAYERS, ranks)
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world)


def chance_of(law: PositionRanks, path: tuple[int, ...]) -> float:
    tables = law.tables(max(len(path), 1))
    every = [np.column_stack([1 - table.sum(axis=1), table]) for table in tables]
    return float(np.mean([math.prod(float(each[place, rank]) for place, rank in enumerate(path)) for each in every]))


costs = st.builds(
    lambda draft, prompt, link, devices: growing(LAYERS, draft=draft, prompt=prompt, link=link, draft_devices=devices),
    st.floats(0.02, 5), st.integers(0, 30), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
)  # fmt: skip


@given(costs, st.integers(1, 6), SHAPES, st.sampled_from([*LAWS]), st.sampled_from(BACKUPS), BUDGETS)
@settings(max_examples=examples(30), deadline=None)
def test_all_views_price_each_pass_at_its_position(
    cost: PassSeconds, tokens: int, shape: tuple[int, tuple[int, ...]], kind: str, backup: str, budget: int | None
) -> None:
    """Paths agree with the simulator on every path; the formula gives the mean and variance over all of them."""
    parameters, law = Parameters(LAYERS, *shape, backup, sampled=tokens % 2 == 0, context_budget=budget), LAWS[kind]
    every = [path for path in itertools.product(range(4), repeat=tokens - 1) if chance_of(law, path) > 0]
    runs = [simulated(parameters, tokens, cost, (*each, 0)) for each in every]
    times, held = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    block = np.zeros((tokens - 1, BLOCK), dtype=np.uint16)
    block[:, : len(every)] = np.array(every, dtype=np.uint16).reshape(len(every), tokens - 1).T
    tally = paths.walk(parameters, tokens, cost, iter([block]))
    np.testing.assert_allclose(tally.time[: len(every)], times, rtol=1e-12)
    np.testing.assert_allclose(tally.busy[: len(every)], held, rtol=1e-12)
    work = np.array([theory.operations(parameters, cost, run.rounds, run.account) for run in runs])
    np.testing.assert_allclose(tally.operations[: len(every)], work, rtol=1e-12)
    chance = np.array([chance_of(law, each) for each in every])
    found = theory.predict(parameters, tokens, law, cost)
    assert float(found.latency) == pytest.approx(float(chance @ times), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert found.operations is not None
    assert float(found.operations) == pytest.approx(float(chance @ work), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chance @ times**2 - (chance @ times) ** 2), abs=1e-9)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    assert times.max() <= slowest * (1 + 1e-12)
    assert held.max() <= busiest * (1 + 1e-12)


@pytest.mark.parametrize("backup", BACKUPS)
def test_paths_agree_with_simulator_on_long_decoding(backup: str) -> None:
    """The preparation is longer than the target's pass in some rounds, shorter in others."""
    cost, tokens = growing(LAYERS, draft=0.3, link=0.2, draft_devices=0.25), 60
    parameters, rng = Parameters(LAYERS, 3, (3, 1, 2, 2), backup), np.random.default_rng(1)
    block = rng.integers(0, 5, (tokens - 1, BLOCK)).astype(np.uint16)
    block[rng.random(block.shape) < np.linspace(0, 1, BLOCK)] = 1
    tally = paths.walk(parameters, tokens, cost, iter([block]))
    for index in range(0, BLOCK, BLOCK // 5):
        run = simulated(parameters, tokens, cost, (*block[:, index].tolist(), 0))
        assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)


def test_predict_points_equals_single_predictions() -> None:
    """Uniform and position-dependent costs, several lengths and fan-outs."""
    laws = [*LAWS.values()]
    prices = (growing(LAYERS, draft=0.4, link=0.3), growing(LAYERS, draft=1.2, prompt=9), UnitCost(LAYERS, cost_ratio=0.25))
    choices = [
        MethodChoice(Parameters(LAYERS, gamma, fan_out, backup), tokens, cost)
        for gamma, fan_out, backup in ((1, 1, DRAFT), (3, (2, 1, 1, 2), DRAFT), (3, 2, NONE)) for tokens in (1, 4, 6)
        for cost in prices
    ]  # fmt: skip
    choice, law = (each.reshape(-1) for each in np.indices((len(choices), len(laws))))
    together = theory.predict_points(PredictionPoints(choices, laws, choice, law))
    alone = predict_separately(theory.predict, PredictionPoints(choices, laws, choice, law))
    for name in ("latency", "latency_variance", "busy", "units_ratio", "plain_latency", "rounds", "drafted", "operations"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-12, abs=1e-9, nan_ok=True), name


def test_constant_costs_in_seconds_equal_layer_times() -> None:
    """Times in seconds equal layer-times multiplied by the seconds of a layer."""
    target, draft = (UniformLayers(growing(depth).hardware_models["target"].shape, 0.002) for depth in (LAYERS, 1))
    seconds = PassSeconds({"target": target, "draft": draft}, prompt=7, link=0.003, draft_devices=0.5)
    layers, law = UnitCost(LAYERS, cost_ratio=1 / LAYERS, link=1.5, draft_devices=0.5), LAWS["rates"]
    for gamma in (1, 2, 5):
        one, other = (theory.predict(Parameters(LAYERS, gamma, 2), 50, law, cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=1e-15)


# --- Points together ---------------------------------------------------------------------------------------------------


def one_table(parameters: Parameters, tokens: int, rates: np.ndarray, cost: StepCosts) -> np.ndarray:
    """Means of a decoding, pass by pass at one cost: time, its square, unit-time, operations, rounds, drafted tokens; then passes,
    tokens, positions attended to and positions read of the target and of the draft model."""
    drafts, held, ratio = parameters.draft_costs(cost), parameters.context_budget or math.inf, cost.operations("draft")
    target, fan_outs = tokens - 1, parameters.fan_outs

    def preparation(start: int, drafted: int) -> list[tuple[float, float, float, float]]:
        plan, width = parameters.branch_plan(drafted, tokens - start), drafted + 1
        if not any(length for _, length in plan):
            return []
        seen = sum(min(start, held) + place + 1 for place in range(width))
        passes = [(float(drafts.draft_times(start, width=width, heads=width)), width, seen, min(start, held) + width)]
        for depth in range(1, 1 + max(length for _, length in plan)):
            grown = [(accepted, number) for accepted, (number, length) in enumerate(plan) if length >= depth]
            count, at = sum(number for _, number in grown), start + grown[-1][0] + depth
            seen = sum(number * (min(start + accepted + depth, held) + 1) for accepted, number in grown)
            passes.append((float(drafts.draft_times(at, sequences=count)), count, seen, count * (min(at, held) + 1)))
        return passes

    def drafting(passes: list[tuple[float, float, float, float]]) -> np.ndarray:
        """Operations and numbers of passes, as a row of the result without times."""
        count, read = len(passes), sum(each[1] for each in passes)
        row = np.zeros(14)
        row[3] = read * ratio if read else 0.0
        row[10:] = count, read, sum(each[2] for each in passes), sum(each[3] for each in passes)
        return row

    @functools.cache
    def backup(start: int) -> np.ndarray:
        """What a miss adds before the round that starts here."""
        count = min(parameters.draft_length, target - start) if parameters.backup == DRAFT else 0
        single = [(float(drafts.draft_times(at)), 1, min(at, held) + 1, min(at, held) + 1) for at in range(start, start + count)]
        row, spent = drafting(single), sum(each[0] for each in single)
        row[[0, 2]] = spent + (2 * cost.link if count else 0.0), spent * cost.draft_devices
        return row

    @functools.cache
    def left(start: int, none: bool) -> np.ndarray:
        """All from a round that starts here on, and that verifies none or as many tokens as there is room for."""
        if start == tokens:
            return np.zeros(14)
        drafted = 0 if none else min(parameters.draft_length, target - start)
        passes, verify = preparation(start, drafted), float(cost.verify_times(drafted + 1, start))
        began, stop = np.cumsum([0.0, *(each[0] for each in passes)]), max(verify - cost.link, 0.0)
        total, reached = np.zeros(14), 1.0
        for accepted in range(drafted + 1):
            own, following = rates[start + accepted], start + accepted + 1
            whole = accepted == drafted
            ending = 1.0 if whole else 1 - own[0]
            ready = own[: fan_outs[-1]].sum() if whole else own[1 : 1 + fan_outs[accepted]].sum()
            if following >= target:
                ready = ending
            made = [each for each, at in zip(passes, began, strict=False) if following < tokens or at < stop * (1 - 1e-9)]
            row, width = drafting(made), drafted + 1
            working = began[-1] if following < tokens else min(began[-1], stop)
            row[0] = max(verify, working + 2 * cost.link) if passes and following < tokens else verify
            row[2], row[4:6] = verify + working * cost.draft_devices, (1, drafted)
            row[3] += width
            row[6:10] = 1, width, start * width + width * (width + 1) / 2, start + width
            for missed, chance in enumerate((ready, ending - ready)):
                if chance > 1e-12:
                    more = row + backup(following) if missed else row
                    later = left(following, bool(missed) and parameters.backup == NONE)
                    total += reached * chance * (more + later)
                    total[1] += reached * chance * (more[0] ** 2 + 2 * more[0] * later[0])
            reached *= own[0]
        return total

    first, rest = backup(0), left(0, parameters.backup == NONE)
    found = first + rest
    found[1] = first[0] ** 2 + 2 * first[0] * rest[0] + rest[1]
    return found


def one_point(parameters: Parameters, tokens: int, law: PositionRanks, cost: StepCosts) -> np.ndarray:
    return np.asarray(np.mean([one_table(parameters, tokens, table, cost) for table in law.tables(tokens)], axis=0))


def assert_predicted(found: prediction.Prediction, index: int, want: np.ndarray) -> None:
    means = [found.latency, found.busy, found.operations, found.rounds, found.drafted]
    values = [float(each[index]) for each in means if each is not None]
    assert values == pytest.approx(want[[0, 2, 3, 4, 5]], rel=1e-11, nan_ok=True)
    assert float(found.latency_variance[index]) == pytest.approx(want[1] - want[0] ** 2, abs=1e-12 * want[0] ** 2)


def assert_worked(by_model: Any, parameters: Parameters, want: np.ndarray) -> None:
    for role, layers, (passes, tokens, attended, read) in (
        ("target", parameters.layers, want[6:10]), ("draft", parameters.draft_layers, want[10:]),
    ):  # fmt: skip
        totals = by_model[role] if role in by_model or passes else np.zeros(5)
        expected = [passes, layers * passes, layers * tokens, layers * attended, layers * read]
        assert [*totals[:5]] == pytest.approx(expected, rel=1e-11), role


LONGEST = 11
MANY_LAWS: list[PositionRanks] = [
    PositionRankRates([0.5, 0.2, 0.15]), PositionRankRates([0.7, 0.3, 0.0]), PositionRankRates.power_law(0.8, 0.6, 4),
    RecordedPositionRanks(np.random.default_rng(5).choice([0, 1, 1, 1, 2, 3], (3, LONGEST))), PositionRankRates([0.0, 0.1, 0.0]),
    RecordedPositionRanks(np.random.default_rng(6).choice([1, 1, 2], (2, LONGEST))),
]  # fmt: skip


def several_costs(kind: str) -> Sequence[StepCosts]:
    numbers = [(0.1, 0.0, 1.0, 3), (0.4, 0.25, 0.5, 0), (2.0, 1.0, 1.0, 900), (0.03, 5.0, 0.25, 3)]
    if kind == "layer-times":
        curve = ((1, 1.0), (3, 1.2), (40, 4.0))
        return [UnitCost(LAYERS, cost_ratio=draft, link=link, draft_devices=devices, verify_cost=curve, operations_ratio=draft / 2)
                for draft, link, devices, _ in numbers]  # fmt: skip
    if kind == "seconds":
        return [growing(LAYERS, draft=draft, link=link, draft_devices=devices, prompt=prompt)
                for draft, link, devices, prompt in numbers]  # fmt: skip
    first = growing(LAYERS, draft=0.3, smaller_layers=2)
    models = {role: WithEngineOverhead(model, 0.0) for role, model in first.hardware_models.items()}
    _, link, devices, prompt = (np.array(column) for column in zip(*numbers, strict=True))
    steps = {"target": np.array([0.0, 0.0, 4.0, 1.0]), "draft": np.array([0.0, 3.0, 0.0, 1.0])}
    changed = {"prompt": prompt.astype(np.int64), "link": link, "draft_devices": devices}
    return VariedSeconds(PassSeconds(models), link.size, changed, steps)


PARAMETERS = st.builds(
    lambda shape, backup, budget: Parameters(LAYERS, *shape, backup, context_budget=budget, draft_layers=2),
    SHAPES, st.sampled_from(BACKUPS), st.sampled_from([None, 1, 2, 5, 30]),
)  # fmt: skip


@given(
    kind=st.sampled_from(["layer-times", "seconds", "varied"]), parameters=st.lists(PARAMETERS, min_size=1, max_size=2),
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=2, unique=True),
    chosen=st.lists(st.integers(0, len(MANY_LAWS) - 1), min_size=1, max_size=4, unique=True), few=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(30), deadline=None)
def test_points_together_are_each_alone(
    kind: str, parameters: list[Parameters], lengths: list[int], chosen: list[int], few: bool, seed: int
) -> None:
    """Costs, laws, numbers of tokens and parameters, in any order and with gaps; also in blocks of one law, pair and cost."""
    costs, laws = several_costs(kind), [MANY_LAWS[which] for which in chosen]
    groups = [ChoiceGroup(own, tokens, costs) for own in parameters for tokens in lengths]
    choices, rng = GroupedChoices(groups), np.random.default_rng(seed)
    choice, law = rng.integers(0, len(choices), 12), rng.integers(0, len(laws), 12)
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(finite_ssd, "_MOST_CELLS", 1)
            patch.setattr(prediction, "_CELLS", 1)
        found = theory.predict_points(PredictionPoints(choices, laws, choice, law))
    for index, (own, which) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        one = choices[own]
        assert_predicted(found, index, one_point(one.parameters, one.tokens, laws[which], one.cost))
        plain = one.cost.plain_time(one.tokens)
        assert (found.plain_latency[index], found.units[index]) == (pytest.approx(plain, rel=1e-12), 2)
        assert np.isnan(found.units_ratio[index]) == (one.tokens > 1)


@given(
    kind=st.sampled_from(["layer-times", "seconds", "varied"]), parameters=PARAMETERS, tokens=st.integers(1, LONGEST),
    chosen=st.lists(st.integers(0, len(MANY_LAWS) - 1), min_size=1, max_size=4, unique=True), few=st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(30), deadline=None)
def test_work_at_costs_together_is_that_at_each(
    kind: str, parameters: Parameters, tokens: int, chosen: list[int], few: bool
) -> None:
    """Of several costs and laws, and of one cost that is not joined with others."""
    costs, laws = several_costs(kind), [MANY_LAWS[which] for which in chosen]
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(finite_ssd, "_MOST_CELLS", 1)
        found = theory.timed_work_of_costs(parameters, tokens, laws, many_costs.joined(costs))
    for number, cost in enumerate(costs):
        single = theory.timed_work(parameters, tokens, laws, cost)
        for which, law in enumerate(laws):
            want = one_point(parameters, tokens, law, cost)
            assert_worked(found.at((number, which)).by_model, parameters, want)
            assert_worked(single.at(which).by_model, parameters, want)


@given(kind=st.sampled_from(["layer-times", "seconds", "varied"]), parameters=PARAMETERS, tokens=st.integers(1, LONGEST))
@settings(max_examples=examples(30), deadline=None)
def test_rounds_at_costs_together_are_those_at_each(kind: str, parameters: Parameters, tokens: int) -> None:
    """Tables of rounds, with an axis of costs after that of the ends, or as the first one of misses."""
    costs = several_costs(kind)
    together = finite_ssd.round_tables(parameters, tokens, many_costs.joined(costs))
    for number, cost in enumerate(costs):
        alone = finite_ssd.round_tables(parameters, tokens, cost)
        assert alone.time.shape == alone.busy.shape == alone.operations.shape == (2, 2, tokens)
        for name in ("time", "busy", "operations"):
            np.testing.assert_allclose(getattr(together, name)[:, number], getattr(alone, name), rtol=1e-12, err_msg=name)
        for name in ("missed_time", "missed_busy", "missed_operations"):
            np.testing.assert_allclose(getattr(together, name)[number], getattr(alone, name), rtol=1e-12, atol=1e-12, err_msg=name)
        assert (together.backup_drafts, together.drafted.tolist()) == (alone.backup_drafts, alone.drafted.tolist())


def test_the_budget_decides_which_passes_begin() -> None:
    """After a long prompt the draft model's passes are short with a budget, so that more begin before the sequence ends."""
    law, costs, begun = MANY_LAWS[0], [growing(LAYERS, draft=1.5, prompt=prompt) for prompt in (900, 700)], []
    for budget in (1, None):
        parameters = Parameters(LAYERS, 3, 2, draft_layers=2, context_budget=budget)
        found = theory.timed_work_of_costs(parameters, LONGEST, [law], many_costs.joined(costs))
        for number, cost in enumerate(costs):
            assert_worked(found.at((number, 0)).by_model, parameters, one_point(parameters, LONGEST, law, cost))
        begun.append(found.by_model["draft"].passes)
    assert (begun[0] > begun[1]).all()


def test_nothing_is_missed_where_nothing_is_left_to_draft() -> None:
    """The ends of a round have the probabilities of its outcomes; the next to last position and the last one are never missed."""
    parameters, rates = Parameters(LAYERS, 2, (1, 2, 1)), [np.array([[0.5, 0.25, 0.1]] * 6), np.array([[0.7, 0.1, 0.0]] * 6)]
    drafted = np.array([2, 2, 2, 2, 1, 0])
    ends = finite_ssd.round_ends(parameters, rates, drafted)
    assert ends.shape == (6, 3, 2, 2)
    for start, accepted in np.ndindex(6, 3):
        for law, (first, second, third) in enumerate(table[0] for table in rates):
            whole = accepted == drafted[start]
            reached = first**accepted if accepted <= drafted[start] else 0.0
            hit = first if whole else second + third * (accepted == 1)
            if start + accepted >= 4:
                hit = 1.0 if whole else 1 - first
            want = reached * hit, reached * ((1.0 if whole else 1 - first) - hit)
            assert ends[start, accepted, :, law].tolist() == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("backup", BACKUPS)
def test_one_record_has_no_variance(backup: str) -> None:
    """Exactly none, at any cost: nothing is random. Two records have that of their times."""
    parameters, one = Parameters(LAYERS, 3, (2, 1, 1, 2), backup), np.zeros(4, dtype=np.intp)
    costs, records = [*several_costs("seconds")], np.random.default_rng(7).choice([0, 1, 1, 2], (2, 40))
    laws = [RecordedPositionRanks(records[:1]), RecordedPositionRanks(records[1:]), RecordedPositionRanks(records)]
    choices = [MethodChoice(parameters, 40, cost) for cost in costs]
    single, other, both = (
        theory.predict_points(PredictionPoints(choices, laws, np.arange(4), one + which)) for which in range(3)
    )
    assert not single.latency_variance.any()
    assert not other.latency_variance.any()
    np.testing.assert_allclose(both.latency, (single.latency + other.latency) / 2, rtol=1e-12)
    np.testing.assert_allclose(both.latency_variance, (single.latency - other.latency) ** 2 / 4, rtol=1e-9)
