"""SkipDecode and early exit as processes, by path and in the mean: against direct references, and by enumeration."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Totals
from model.interpret.interpreter import count
from model.interpret.simulated_answers import Lossy
from model.methods import batching
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import paths as exit_paths
from model.methods.early_exit import theory as leaving
from model.methods.early_exit.finite_early_exit import Depths, column_times, decodings
from model.methods.early_exit.theory import work
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.skipdecode import paths as skip_paths
from model.methods.skipdecode import theory as skipping
from model.steps import Commit, Forward, LayerSpan, Read, Steps, declining
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.exact import near
from tests.support.position_costs import early_exit_moments

COST = UnitCost(4, early_head=0.5, final_head=1.0, propagation=0.25, state_check=0.125)
CURVE = ((1, 4.0), (2, 5.0), (3, 6.0), (4, 8.0), (8, 8.0))
WIDE = UnitCost(4, early_head=0.5, final_head=1.0, propagation=0.25, state_check=0.125, verify_cost=CURVE)


def goes_on_from_where_it_has_come(step: Forward) -> None:
    """Each token of a pass starts from its state after the previous layer; rows of a token that has exited may be made later."""
    if not step.layers.first:
        assert step.state is None
        return
    states = (step.state,) if isinstance(step.state, Forward) else step.state
    assert len(states) == len(step.tokens)
    for index, state in enumerate(states):
        assert (state.tokens, state.at) == (step.tokens[index : index + 1], step.at + index)
        assert state.layers.first < state.layers.last == step.layers.first or (
            step.layers.kv_only and state.layers.last < step.layers.first
        )


def passes(steps: Steps, world: Lossy) -> list[tuple[Any, ...]]:
    """Position, first and last layer, heads and other fields of every pass."""
    found: list[tuple[Any, ...]] = []
    answer: Any = None
    steps = declining(steps)
    while True:
        try:
            step: Any = steps.send(answer)
        except StopIteration:
            return found
        answer = None
        if isinstance(step, Forward):
            assert step.role == "target"
            goes_on_from_where_it_has_come(step)
            more = (
                [f"gaps {step.layers.gaps}"] * bool(step.layers.gaps)
                + ["rows"] * step.layers.kv_only
                + [f"compared {step.compared}"] * bool(step.compared)
                + [f"sequences {step.batch.sequences}" for _ in [0] if step.batch]
            )
            found.append((step.at, step.layers.first, step.layers.last, step.heads, *more))
            answer = step
        elif isinstance(step, Read):
            measured = step.kind == ("saturation" if step.output.compared else "confidence")
            assert step.kind == "next" or (measured and step.output.layers.last < world.layers)
            answer = world.read(step)
        else:
            assert (type(step), step.kind) == (Commit, "column")


# --- Batches ---


def static(sequences: int, lengths: Any = None) -> batching.StaticBatching:
    return batching.StaticBatching(layers=3, sequences=sequences, batching="static", lengths=lengths)


def test_batches_are_filled_in_order() -> None:
    assert static(2).batches(3) == [{0: 3, 1: 3}]
    queue = static(2, (3, 1, 2, 2, 1))
    assert queue.batches(3) == [{0: 3, 1: 1}, {2: 2, 3: 2}, {4: 1}]
    assert np.transpose(queue.columns(3)).tolist() == [[0, 2], [1, 1], [2, 1], [0, 2], [1, 2], [0, 1]]
    assert (queue.plain_steps(3), queue.total_tokens(3)) == (6, 9)
    assert queue.plain_time(3, WIDE) == 5 * (3 + 3 * 1.25)


@pytest.mark.parametrize(
    ("batch", "lengths", "message"),
    [
        (0, None, "sequences must be between 1 and 100000, got 0"), (4097, None, "sequences must be between 1 and 4096, got 4097"),
        (1, (), r"lengths must be a list of at least one length of a sequence, got \[\]"), (1, 3, "lengths must be a list"),
        (1, (2, 0), r"lengths\[1\] must be between 1 and"), (1, (2.5,), r"lengths\[0\] must be a whole number"),
    ],
)  # fmt: skip
def test_invalid_batches_are_refused(batch: int, lengths: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        static(batch, lengths).check_batching()


def test_longest_sequence_has_the_requested_tokens() -> None:
    static(1, (2, 5)).check_tokens(5)
    static(1).check_tokens(5)
    for tokens in (4, 6):
        with pytest.raises(ParameterError, match=f"the largest of lengths must equal tokens={tokens}, got 5"):
            static(1, (2, 5)).check_tokens(tokens)


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_prompt_is_processed_except_its_last_token(prompt: int) -> None:
    """In one pass through all layers; the last token starts the decoding."""
    choices = skip(), leave(), leave(fill="backfill"), leave(exit_layer=2)
    for algorithm, choice in zip((skipdecode, early_exit, early_exit, early_exit), choices, strict=True):
        steps = declining(algorithm.decode(choice, [*range(prompt)], 2))
        first = next(steps)
        assert isinstance(first, Forward)
        if prompt > 1:
            assert first == Forward("target", (*range(prompt - 1),), 0, LayerSpan(0, 4))
            first = next(steps)
        assert isinstance(first, Forward)
        assert (first.role, first.tokens, first.at, first.layers.first) == ("target", (prompt - 1,), prompt - 1, 0)
        made = count(algorithm.decode(choice, [*range(prompt)], 2), Lossy(prompt, 4, depths=[[1, 2]]), 2)
        assert made.tokens == [prompt, prompt + 1]


# --- SkipDecode ---


def skip(**more: Any) -> skipdecode.Parameters:
    return skipdecode.Parameters(**{"layers": 4, "min_layers": 2, "max_layers": 4, "prompt": 3, "sequence_length": 7} | more)


def test_decoding_by_hand() -> None:
    """Layers 4, 3.5, 3, 2.5, with halves rounded up: 4, 4, 3, 3; the first layer and the topmost ones."""
    want = [(0, 0, 4, 1), (1, 0, 4, 1), (2, 0, 4, 1, "gaps ((1, 2),)"), (3, 0, 4, 1, "gaps ((1, 2),)")]
    assert passes(skipdecode.decode(skip(), [0], 4), Lossy(1, 4)) == want
    floor = passes(skipdecode.decode(skip(rounding="floor", warm_up=0), [0], 4), Lossy(1, 4))
    assert [row[4:] for row in floor] == [(), ("gaps ((0, 1),)",), ("gaps ((0, 1),)",), ("gaps ((0, 2),)",)]
    prompted = passes(skipdecode.decode(skip(), [0, 1, 2], 2), Lossy(3, 4))
    assert prompted == [(0, 0, 4, 0), (2, 0, 4, 1), (3, 0, 4, 1)]
    low = passes(skipdecode.decode(skip(min_layers=1, max_layers=1), [0], 1), Lossy(1, 4))
    assert low == [(0, 0, 4, 1, "gaps ((1, 4),)")]  # only the warm-up layer, and the head


@given(st.data())
def test_pass_runs_the_scheduled_layers(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 12))
    most = data.draw(st.integers(1, layers))
    least = data.draw(st.integers(1, most))
    warm_up = data.draw(st.integers(0, least))
    parameters = skip(
        layers=layers, min_layers=least, max_layers=most, warm_up=warm_up, sequence_length=3 + data.draw(st.integers(1, 9))
    )
    for budget in range(least, most + 1):
        step = Forward("target", (0,), 0, LayerSpan(0, layers, gaps=skipdecode.skipped(parameters, budget)))
        assert tuple(step.layers.ranges) == skipping.spans(budget, warm_up, layers)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([*skipping.ROUNDINGS]),
    st.sampled_from((0.5, 1.0, 2.0)), st.sampled_from((COST, WIDE)),
)  # fmt: skip
def test_batches_take_the_time_of_their_steps(
    lengths: list[int], batch: int, rounding: str, power: float, cost: UnitCost
) -> None:
    tokens = max(lengths)
    parameters = skip(sequence_length=8, sequences=batch, batching="static", lengths=tuple(lengths), rounding=rounding, power=power)
    steps = skipdecode.decode(parameters, [0], tokens)
    run = simulate(steps, sum(lengths), Cluster(1), cost, Lossy(1, 4), record=True)
    time, budgets = 0.0, skipping.exit_layers(2, 4, 3, 8, tokens, rounding=rounding, power=power)
    sizes: list[int] = []
    for start in range(0, len(lengths), batch):
        group = lengths[start : start + batch]
        for column in range(max(group)):
            width = sum(length > column for length in group)
            sizes.append(width)
            time += (float(budgets[column]) + 1.0) * cost.slowdown(width)
    assert [size for *_, size in run.commits] == sizes == [row.width for row in run.intervals]
    assert run.latency == pytest.approx(time, rel=1e-12)
    assert len(run.tokens) == sum(lengths) == parameters.total_tokens(tokens)
    prediction = skipping.predict(parameters, tokens, None, cost)
    assert near([prediction.latency, prediction.busy, skip_paths.walk(parameters, tokens, cost, iter(()))[0][7]], time)
    assert near(prediction.plain_latency, sum(5.0 * cost.slowdown(width) for width in sizes))
    assert (float(prediction.latency_variance), float(prediction.units_ratio), float(prediction.units)) == (0, 1, 1)
    assert {value.dtype for value in vars(prediction).values() if value is not None} == {np.dtype(np.float64)}
    totals = count(skipdecode.decode(parameters, [0], tokens), Lossy(1, 4), sum(lengths)).account.totals().by_model["target"]
    assert near(totals, skipping.work(parameters, tokens, None).by_model["target"])
    operations = skipping.operations(parameters, cost, {}, run.account)
    assert operations == totals.layer_passes / 4
    assert parameters.plain_steps(tokens) == len(sizes)
    assert parameters.decoded_sequences == len(lengths)


def test_sequences_of_a_batch_read_their_own_rows() -> None:
    """A sequence is generated in order; the next batch starts again after the prompt."""
    parameters = skip(sequences=2, batching="static", lengths=(3, 1, 2))
    found = count(skipdecode.decode(parameters, [0], 3), Lossy(1, 4), 6)
    assert found.tokens == [1, 1, 2, 3, 1, 2]
    alone = count(skipdecode.decode(skip(lengths=(3, 1, 2), batching="static"), [0], 3), Lossy(1, 4), 6)
    assert alone.tokens == [1, 2, 3, 1, 1, 2]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"layers": 0}, "^layers must be between 1 and"), ({"max_layers": 5}, "max_layers must be between 1 and layers=4, got 5"),
        ({"min_layers": 4, "max_layers": 3}, "min_layers must be between 1 and max_layers=3, got 4"),
        ({"min_layers": 0}, "min_layers must be between 1 and"),
        ({"warm_up": 3}, "warm_up must be between 0 and min_layers=2, got 3"),
        ({"warm_up": -1}, "warm_up must be between 0 and"), ({"prompt": 7},
         "prompt must be between 0 and sequence_length-1=6, got 7"),
        ({"prompt": -1}, "prompt must be between 0 and"), ({"sequence_length": 0}, "sequence_length must be between 1 and"),
        ({"rounding": "up"}, "unknown rounding 'up'"), ({"power": -1}, "power must be at least 0, got -1"),
        ({"sequences": 0}, "^sequences must be between 1 and 100000, got 0"),
        ({"sequences": 2}, "^batching must be 'static' or 'lockstep' with sequences=2, got 'continuous': all sequences of its"),
    ],
)  # fmt: skip
def test_invalid_schedules_are_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        skip(**given_)


def test_schedule_covers_all_tokens() -> None:
    with pytest.raises(ParameterError, match="the largest of lengths must equal tokens=3"):
        skip(lengths=(2,), batching="static").check_tokens(3)
    message = "tokens must be at most sequence_length-prompt=4, the positions of the schedule, got 5"
    for refused in (lambda: skip().check_tokens(5), lambda: next(skipdecode.decode(skip(), [0], 5)),
                    lambda: skipping.predict(skip(), 5, None, COST)):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            refused()
    three = skip(sequences=3, batching="static")
    assert (skip().units, three.largest_pass, skip().warm_up, skip().rounding, skip().power) == (1, 3, 1, "half-up", 1.0)
    assert (skip().sequences, three.decoded_sequences, skip().EXACT) == (1, 3, False)
    assert (skip().OUTCOMES, skip().COSTS) == ((), ("verify_cost",))


# --- Early exit ---


def leave(**more: Any) -> early_exit.Parameters:
    return early_exit.Parameters(**{"layers": 4} | more)


def test_passes_by_hand() -> None:
    """The first token is confident after layer 2, the second only after the last layer, the third after the first."""
    world = Lossy(1, 4, depths=[[2, 4, 1]])
    softmax = passes(early_exit.decode(leave(), [0], 3), world)
    assert softmax == [
        (0, 0, 1, 1), (0, 1, 2, 1), (0, 2, 4, 0, "rows"),
        (1, 0, 1, 1), (1, 1, 2, 1), (1, 2, 3, 1), (1, 3, 4, 1),
        (2, 0, 1, 1), (2, 1, 4, 0, "rows"),
    ]  # fmt: skip
    state = passes(early_exit.decode(leave(measure="state", first_check=2), [0], 3), world)
    assert state == [
        (0, 0, 2, 0, "compared 1"), (0, 2, 2, 1), (0, 2, 4, 0, "rows"),
        (1, 0, 2, 0, "compared 1"), (1, 2, 3, 0, "compared 1"), (1, 3, 4, 1),
        (2, 0, 2, 0, "compared 1"), (2, 2, 2, 1), (2, 2, 4, 0, "rows"),
    ]  # fmt: skip
    later = passes(early_exit.decode(leave(fill="backfill"), [0, 1], 3), Lossy(2, 4, depths=[[2, 1, 4]]))
    assert later == [
        (0, 0, 4, 0),  # the prompt but for its last token
        (1, 0, 1, 1), (1, 1, 2, 1),
        (2, 0, 1, 1),
        (3, 0, 1, 1), (2, 1, 2, 0, "rows"), (3, 1, 2, 1), (1, 2, 3, 0, "rows"), (3, 2, 3, 1), (1, 3, 4, 0, "rows"), (3, 3, 4, 1),
    ]  # fmt: skip
    fixed = passes(early_exit.decode(leave(exit_layer=3), [0], 2), Lossy(1, 4))
    assert fixed == [(0, 0, 3, 1), (1, 0, 3, 1)]


def test_backfill_covers_all_missing_rows() -> None:
    """Two tokens have exited after layer 1: layers 2 to 4 lack both rows, and one pass per layer makes them."""
    made = count(early_exit.decode(leave(fill="backfill"), [0], 3), Lossy(1, 4, depths=[[1, 1, 4]]), 3)
    found = made.account.totals().by_model["target"]
    assert (found.filled_runs, found.filled, found.layer_passes) == (3, 6, 1 + 1 + 4)
    last = passes(early_exit.decode(leave(fill="backfill"), [0], 3), Lossy(1, 4, depths=[[1, 1, 4]]))[2:]
    assert last == [(2, 0, 1, 1), *[row for n in (1, 2, 3) for row in ((0, n, n + 1, 0, "rows"), (2, n, n + 1, 1))]]


def reference(depths: list[list[int]], parameters: early_exit.Parameters, cost: UnitCost) -> float:
    """Time of all batches, computed directly, sequence by sequence."""
    lengths = [*parameters.lengths] if parameters.lengths else [len(depths[0])] * parameters.sequences
    layers, total = parameters.layers, 0.0
    for start in range(0, len(lengths), parameters.sequences):
        members = [*range(start, min(start + parameters.sequences, len(lengths)))]
        lacking = [0] * layers
        for place in range(max(lengths[text] for text in members)):
            live = [text for text in members if lengths[text] > place]
            factor = cost.slowdown(len(live))
            depth = max(parameters.first_check, *(depths[text][place] for text in live))
            total += depth * factor
            checks = min(depth, layers - 1) + 1 - parameters.first_check
            total += checks * factor * (cost.early_head if parameters.measure == "softmax" else cost.state_check)
            if depth == layers:
                total += factor * cost.final_head
            elif parameters.measure == "state":
                total += factor * cost.early_head
            if parameters.fill == "propagate":
                total += factor * cost.propagation * (layers - depth)
                continue
            for layer in range(depth):
                total += cost.propagation * cost.slowdown(lacking[layer]) if lacking[layer] else 0.0
                lacking[layer] = 0
            for layer in range(depth, layers):
                lacking[layer] += 1
    return total


@st.composite
def exits(draw: st.DrawFn) -> tuple[early_exit.Parameters, list[list[int]]]:
    layers, tokens, fill = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.sampled_from(early_exit.FILLS))
    lengths = draw(st.none() | st.lists(st.integers(1, tokens), max_size=4).map(lambda more: (tokens, *more)))
    batch = 1 if fill == "backfill" else draw(st.integers(1, 3))
    choice = early_exit.Parameters(
        layers, draw(st.sampled_from(leaving.MEASURES)), draw(st.integers(1, layers)), fill=fill, sequences=batch,
        batching="static", lengths=lengths,
    )
    depth = st.integers(1, layers)
    count = choice.decoded_sequences
    rows = draw(st.lists(st.lists(depth, min_size=tokens, max_size=tokens), min_size=count, max_size=count))
    return choice, rows


def play(choice: early_exit.Parameters, depths: list[list[int]], cost: UnitCost, **more: Any) -> Run:
    tokens = len(depths[0])
    world = Lossy(1, choice.layers, depths=depths)
    return simulate(early_exit.decode(choice, [0], tokens), choice.total_tokens(tokens), Cluster(1), cost, world, **more)


def tiles(depths: list[list[int]], rows: int = 3) -> Iterator[Any]:
    column = np.array(depths, dtype=np.uint16).T.reshape(-1, 1)
    return (column[start : start + rows] for start in range(0, len(column), rows))


@given(exits(), st.booleans())
def test_simulated_time_equals_the_reference(drawn: tuple[early_exit.Parameters, list[list[int]]], wide: bool) -> None:
    choice, depths = drawn
    curve = tuple((width, 4.0 + width) for width in range(1, 9)) if wide else None
    cost = UnitCost(choice.layers, early_head=0.5, final_head=1.0, propagation=0.25, state_check=0.125, verify_cost=curve)
    want = reference(depths, choice, cost)
    run = play(choice, depths, cost)
    assert run.latency == run.busy == pytest.approx(want, rel=1e-12)
    assert play(choice, depths, cost, per_layer=True).latency == pytest.approx(want, rel=1e-12)
    assert near(decodings(choice, len(depths[0]), tiles(depths), cost, 1), want)
    lengths = choice.lengths or (len(depths[0]),) * choice.sequences
    assert sorted(run.tokens) == sorted(place + 1 for length in lengths for place in range(length))


def test_replications_are_independent() -> None:
    random_draws = np.random.default_rng(3)
    for fill, cost in itertools.product(early_exit.FILLS, (COST, UnitCost(4, propagation=0.25, verify_cost=CURVE))):
        choice = leave(fill=fill, measure="state", lengths=(6, 2), sequences=1, batching="static")
        each = random_draws.integers(1, 5, size=(5, 2, 6))
        table = np.stack([rows.T.reshape(-1) for rows in each], axis=1).astype(np.uint16)
        times = decodings(choice, 6, iter([table[:5], table[5:]]), cost, 5)
        assert near(times, [reference(rows.tolist(), choice, cost) for rows in each])


def test_fixed_exit_layer_has_no_randomness() -> None:
    choice = leave(exit_layer=3, sequences=2, batching="static")
    want = 5 * 1.25 * (3 + 0.5)
    assert leave(exit_layer=4).outcomes_for({"exit_layer": 4}) == ()
    assert leave().outcomes_for({}) == ("exit",)
    world = Lossy(1, 4)
    assert simulate(early_exit.decode(choice, [0], 5), 10, Cluster(1), WIDE, world).latency == want
    assert early_exit_moments(choice, 5, None, WIDE) == (want, 0.0)
    time, busy = exit_paths.walk(choice, 5, WIDE, iter(()))
    assert set(time) == set(busy) == {want}
    times = column_times(leave(exit_layer=4), WIDE, 1)
    assert times[1:].tolist() == [5.0] * 4
    assert np.isnan([times[0], column_times(leave(), WIDE, 1)[0]]).all()  # depth 0 does not occur


@given(st.lists(st.integers(0, 4), min_size=2, max_size=2), st.integers(1, 3), exits())
def test_means_equal_enumeration_of_all_outcomes(
    weights: list[int], tokens: int, drawn: tuple[early_exit.Parameters, list[list[int]]]
) -> None:
    """Three layers; batches of at most two sequences, of at most three tokens."""
    measure, first, fill = drawn[0].measure, min(drawn[0].first_check, 3), drawn[0].fill
    batch = 1 if fill == "backfill" else 1 + (tokens < 3)
    choice = early_exit.Parameters(3, measure, first, fill=fill, sequences=batch, batching="static")
    law = Depths(np.array([*weights, 5]) / (sum(weights) + 5), batch)
    cost = UnitCost(3, early_head=0.5, final_head=1.0, propagation=0.25, state_check=0.125, verify_cost=((1, 3.0), (4, 4.5)))
    mean = square = 0.0
    for random_draws in itertools.product(range(1, 4), repeat=tokens * batch):
        chance = math.prod(float(law.pmf[depth - 1]) for depth in random_draws)
        time = reference([list(random_draws[text::batch]) for text in range(batch)], choice, cost) if chance else 0.0
        mean, square = mean + chance * time, square + chance * time * time
    found = early_exit_moments(choice, tokens, law, cost)
    assert near(found[0], mean)
    if fill == "propagate":
        assert near(found[1] + mean**2, square, 1e-12)
    else:
        assert math.isnan(found[1])
    prediction = leaving.predict(choice, tokens, law, cost)
    assert near([prediction.latency, prediction.busy, prediction.units_ratio, prediction.units], [found[0], found[0], 1, 1])
    assert near(prediction.plain_latency, tokens * 4 * cost.slowdown(batch))
    assert {value.dtype for value in vars(prediction).values() if value is not None} == {np.dtype(np.float64)}


@given(exits())
def test_work_equals_the_counter(drawn: tuple[early_exit.Parameters, list[list[int]]]) -> None:
    choice, rows = drawn
    depths, tokens = [rows[0]] * choice.decoded_sequences, len(rows[0])  # the same draws for all sequences
    law = Depths(np.eye(choice.layers)[[depth - 1 for depth in rows[0]]])
    world = Lossy(1, choice.layers, depths=depths)
    found = count(early_exit.decode(choice, [0], tokens), world, choice.total_tokens(tokens)).account
    want = work(choice, tokens, law)
    assert near(found.totals().by_model["target"], want.by_model["target"])
    assert leaving.operations(choice, COST, {}, found) == found.layer_passes / choice.layers


def test_work_by_hand() -> None:
    """One token, three layers of four, two sequences: a head after each layer, and one row that was not run."""
    law = Depths([0, 0, 1, 0])
    assert work(leave(sequences=2, batching="static"), 1, law).by_model["target"] == Totals(4, 3, 6, 6, 6, 1, 2, 3, 6)
    by_state = leave(sequences=2, batching="static", measure="state")
    assert work(by_state, 1, law).by_model["target"] == Totals(5, 3, 6, 6, 6, 1, 2, 1, 2)
    assert work(leave(exit_layer=2), 2, None).by_model["target"] == Totals(2, 4, 4, 2 * (1 + 2), 2 * (1 + 2), 0, 0, 2, 2)
    assert work(leave(first_check=4), 1, Depths([0, 0, 0, 1])).by_model["target"] == Totals(1, 4, 4, 4, 4, 0, 0, 1, 1)


def test_without_outcomes_all_tokens_run_all_layers() -> None:
    """Four layers, three of them checked, and the last with its head; or a fixed exit layer."""
    assert early_exit_moments(leave(), 5, None, COST) == (5 * (4 + 3 * 0.5 + 1), 0)
    assert work(leave(), 1, None).by_model["target"] == Totals(4, 4, 4, 4, 4, 0, 0, 4, 4)
    for layer in range(1, 5):
        found = work(leave(exit_layer=layer), 2, None).by_model["target"]
        assert found == Totals(2, 2 * layer, 2 * layer, 3 * layer, 3 * layer, 0, 0, 2, 2)


def test_curve_need_only_reach_the_width_of_backfill() -> None:
    """Four tokens exit after layer 1: the fifth backfills four rows of each other layer, the widest pass."""
    cost = UnitCost(4, propagation=0.25, verify_cost=((1, 4.0), (2, 5.0), (4, 6.0)))
    depths = [[1, 1, 1, 1, 4]]
    assert decodings(leave(fill="backfill"), 5, tiles(depths), cost, 1) == [8 + 3 * 0.25 * 1.5]
    with pytest.raises(ParameterError, match="width"):
        cost.slowdown(5)


# --- How deep ---


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_exit_layers_follow_their_law(weights: list[int]) -> None:
    law = Depths(np.array(weights) / sum(weights))
    coins = (np.arange(1000) + 0.5)[None] / 1000
    (tile,) = law.sample(iter([coins]))
    assert near(np.bincount(tile[0], minlength=len(weights) + 1)[1:] / 1000, law.pmf, rtol=0, atol=2e-3)
    assert near(law.mean(7), law.pmf @ np.arange(1, len(weights) + 1))
    assert law.layers == len(weights)
    (edges,) = Depths([0.0, 0.5, 0.5]).sample(iter([np.array([[0.0, 0.5]])]))
    assert edges.tolist() == [[2, 3]]  # values of probability 0 do not occur
    top = next(iter(law.sample(iter([np.array([[1 - 2**-53]])]))))
    assert top[0, 0] <= len(weights)


def test_laws_may_differ_by_position() -> None:
    law = Depths(np.eye(3)[[0, 2, 1]], sequences=2)
    first, second = law.sample(iter([np.full((3, 1), 0.5), np.full((3, 1), 0.5)]))
    assert [*first[:, 0], *second[:, 0]] == [1, 1, 3, 3, 2, 2]
    assert near(law.mean(2), 2.0)
    (alone,) = Depths(np.eye(3)[[0, 2, 1]]).sample(iter([np.full((3, 1), 0.5)]))
    assert alone[:, 0].tolist() == [1, 3, 2]
    with pytest.raises(ParameterError, match="pmf must have a row for each of 4 positions, got 3"):
        law.cdf(4)
    for index, worse in enumerate(([-0.5, 0.5, 1.0], [0.0, 1.5])):
        with pytest.raises(ParameterError, match=rf"^pmf\[{index}\] must be between 0 and 1, got {worse[index]}"):
            Depths(worse)
    assert Depths([0.5, 0.5 + 5e-10]).layers == 2  # differences by rounding are accepted
    for bad in ([], [[[1.0]]], [0.5, 0.4], [0.5, 0.5 + 5e-9], [[1.0], [0.5]]):
        with pytest.raises(ParameterError, match="pmf must be probabilities of the layers with sum 1"):
            Depths(bad)
    with pytest.raises(ParameterError, match="outcomes must be known for each of layers=4, got 3"):
        early_exit_moments(leave(), 2, law, COST)
    with pytest.raises(ParameterError, match="outcomes must be known for each of layers=4, got 3"):
        work(leave(), 2, law)


# --- What is asked for ---


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"layers": 0}, "^layers must be between 1 and"), ({"measure": "mood"}, "unknown measure 'mood'"),
        ({"first_check": 0}, "first_check must be between 1 and layers=4, got 0"), ({"first_check": 5}, "first_check"),
        ({"fill": "never"}, "unknown fill 'never'"), ({"sequences": 0}, "^sequences must be between 1 and 100000, got 0"),
        ({"sequences": 2, "batching": "static", "fill": "backfill"}, "must be 1 with fill='backfill' and batching='static', got 2"),
        ({"exit_layer": 5}, "exit_layer must be between 1 and layers=4, got 5"), ({"exit_layer": 0}, "exit_layer"),
        ({"exit_layer": 2, "measure": "state"}, "measure has no effect with an exit_layer"),
        ({"exit_layer": 2, "first_check": 2}, "first_check has no effect with an exit_layer"),
        ({"exit_layer": 2, "threshold": 0.5}, "threshold has no effect with an exit_layer"),
        ({"exit_layer": 2, "fill": "backfill"}, "fill has no effect with an exit_layer"),
        ({"threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"temperature": 4.0, "decay": "code", "longest": 9}, "threshold is required with temperature"),
        ({"threshold": 0.5, "temperature": 4.0, "longest": 9}, "decay is required with temperature"),
        ({"threshold": 0.5, "decay": "code"}, "temperature is required with decay"),
        ({"threshold": 0.5, "longest": 9}, "temperature is required with longest"),
        ({"threshold": 0.5, "temperature": -1.0, "decay": "code", "longest": 9}, "temperature must be at least 0, got -1"),
        ({"threshold": 0.5, "temperature": 1.0, "decay": "slow", "longest": 9}, "unknown decay 'slow'"),
        ({"threshold": 0.5, "temperature": 1.0, "decay": "code", "longest": 0}, "longest must be between 1 and"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        leave(**given_)


def test_threshold_falls_over_all_tokens() -> None:
    falling = leave(threshold=0.8, temperature=4.0, decay="code", longest=10)
    assert near(falling.exit_threshold(5), leaving.decayed_threshold(0.8, 5, 10, 4.0, form="code"))
    assert (leave(threshold=0.7).exit_threshold(5), leave().exit_threshold(5)) == (0.7, 0.5)
    falling.check_tokens(10)
    with pytest.raises(ParameterError, match="longest must be at least tokens=11, over which the threshold decays, got 10"):
        falling.check_tokens(11)
    with pytest.raises(ParameterError, match="the largest of lengths must equal tokens=3"):
        leave(lengths=(2,), batching="static").check_tokens(3)
    for refused in (lambda: leaving.predict(falling, 11, Depths([0, 0, 0, 1]), COST),
                    lambda: next(early_exit.decode(falling, [0], 11))):  # fmt: skip
        with pytest.raises(ParameterError, match="longest must be at least tokens=11"):
            refused()
    three, two = leave(sequences=3, batching="static"), leave(lengths=(1, 2), batching="static")
    assert (leave().units, three.largest_pass, three.decoded_sequences, two.decoded_sequences) == (1, 3, 3, 2)
    assert (leave().measure, leave().first_check, leave().fill, leave().sequences) == ("softmax", 1, "propagate", 1)
    assert leave(sequences=2, batching="static", lengths=(3, 1, 2)).plain_steps(3) == 3 + 2
    assert not leave().EXACT
    assert (leave().OUTCOMES, leave().COSTS) == (("exit",), ("early_head", "propagation", "state_check", "verify_cost"))


@pytest.mark.parametrize(("sure", "depth"), [(0.5, 1), (0.49, 4)])
def test_numeric_confidence_is_compared_with_the_threshold(sure: float, depth: int) -> None:
    class Told(Lossy):
        def read(self, step: Any) -> Any:
            return sure if step.kind in ("confidence", "saturation") else super().read(step)

    for measure in leaving.MEASURES:
        choice = leave(threshold=0.5, measure=measure)
        found = count(early_exit.decode(choice, [0], 2), Told(1, 4, depths=[[4, 4]]), 2)
        assert found.layer_passes == 2 * depth


@pytest.mark.parametrize(("measure", "kind"), [("softmax", "confidence"), ("state", "saturation")])
def test_measures_are_read_by_name(measure: str, kind: str) -> None:
    asked = set()

    class Told(Lossy):
        def read(self, step: Any) -> Any:
            asked.add(step.kind)
            return super().read(step)

    count(early_exit.decode(leave(measure=measure), [0], 2), Told(1, 4, depths=[[4, 2]]), 2)
    assert asked == {kind, "next"}
