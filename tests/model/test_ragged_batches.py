"""Ragged batches: a pass over sequences of unequal positions and widths equals the union of single-sequence passes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from model.architectures.transformer import preset
from model.costs.layer_times import UnitCost
from model.costs.replayed_seconds import ReplayedSeconds
from model.costs.step_costs import Floats, PassShape, StepCosts
from model.hardware.cost_models import UniformLayers
from model.hardware.interpolation import Estimate
from model.interpret.account import Account, kind_of
from model.interpret.interpreter import Cache, count
from model.interpret.simulated_answers import BatchWorld, DraftOutcomes, World
from model.steps import Batch, CacheError, Commit, Forward, LayerSpan, Read, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.tiers import examples

LAYERS = 4
WHOLE = LayerSpan(0, LAYERS)
SPANS = (WHOLE, LayerSpan(0, 2), LayerSpan(0, LAYERS, ((1, 3),)), LayerSpan(0, LAYERS, kv_only=True))


@dataclass
class ByBatch(StepCosts):
    """Costs that distinguish sequences from tokens: 10 per sequence plus 1 per token of the widest."""

    layers: int = LAYERS

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        return np.asarray(10.0 * np.asarray(shape.sequences) + shape.width + 0.0 * np.asarray(at))

    def layer_times_of(self, step: Forward) -> list[float]:
        return [self.forward(step) / step.layers.size] * step.layers.size


BY_BATCH = ByBatch()


def step_of(batch: Batch, layers: LayerSpan = WHOLE, role: str = "target", **more: Any) -> Forward:
    tokens = tuple(range(7, 7 + sum(batch.widths)))
    return Forward(role, tokens, min(batch.positions), layers, heads=sum(batch.heads), batch=batch, **more)


@st.composite
def batches(draw: st.DrawFn, furthest: int = 6) -> Batch:
    numbers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    each = [st.integers(0, furthest), st.integers(1, 4)]
    positions, widths = (tuple(draw(st.tuples(*[one] * len(numbers)))) for one in each)
    heads = tuple(draw(st.tuples(*[st.integers(0, width) for width in widths])))
    return Batch(tuple(numbers), positions, widths, heads)


def parts(step: Forward) -> list[Forward]:
    return [step.part(index) for index in range(step.batch_size)]


def accepted(cache: Cache, step: Forward) -> bool:
    try:
        cache.write(step)
    except CacheError:
        return False
    return True


@given(batches(), st.sampled_from(SPANS), st.booleans())
@settings(max_examples=examples(60))
def test_parts_of_a_batched_pass_concatenate_to_it(batch: Batch, layers: LayerSpan, compared: bool) -> None:
    step = step_of(batch, layers, compared=compared * sum(batch.widths))
    own = parts(step)
    assert step.tokens == tuple(token for each in own for token in each.tokens)
    assert [*step.positions] == [at for each in own for at in each.positions]
    assert step.end == max(each.end for each in own)
    assert step.width == max(len(each.tokens) for each in own)
    assert (step.heads, step.compared) == (sum(each.heads for each in own), sum(each.compared for each in own))
    assert {(each.batch, each.layers, each.role) for each in own} == {(None, layers, step.role)}
    numbers = [number for number, each in zip(batch.sequences, own, strict=True) for _ in each.tokens]
    assert [step.sequence_of(offset) for offset in range(len(numbers))] == numbers
    assert [step.sequence_of(offset - len(numbers)) for offset in range(len(numbers))] == numbers


@given(st.lists(st.tuples(batches(), st.sampled_from(SPANS[:3]), st.booleans()), min_size=1, max_size=4), st.integers(0, 6))
@settings(max_examples=examples(80))
def test_batched_cache_equals_caches_of_single_sequences(steps_given: list[tuple[Batch, LayerSpan, bool]], read: int) -> None:
    """A batched pass is refused as a whole if any of its parts is; the rows of the other sequences then stay unchanged."""
    prompt = Forward("target", (0,) * read, 0, WHOLE)
    together = Cache()
    together.write(prompt)
    alone: dict[int, Cache] = {}
    for batch, layers, kv_only in steps_given:
        step = step_of(batch, layers._replace(kv_only=kv_only))
        for number in batch.sequences:
            if number not in alone:
                alone[number] = Cache()
                alone[number].write(prompt)
        copies = {number: alone[number].copy() for number in batch.sequences}
        fits = [accepted(copies[number], one) for number, one in zip(batch.sequences, parts(step), strict=True)]
        assert accepted(together, step) == all(fits)
        if all(fits):
            alone |= copies
    for number, cache in together.sequences.items():
        assert cache.rows == alone[number].rows
    assert together.rows == {"target": [read] * LAYERS}


@given(st.lists(st.tuples(batches(), st.sampled_from(SPANS)), min_size=1, max_size=4))
@settings(max_examples=examples(60))
def test_batched_account_differs_only_in_weights_and_padding(steps_given: list[tuple[Batch, LayerSpan]]) -> None:
    together, alone = Account(), Account()
    runs = padded = 0
    for batch, layers in steps_given:
        step = step_of(batch, layers)
        together.add(step)
        for one in parts(step):
            alone.add(one)
            padded += (step.end - one.end) * (0 if layers.kv_only else layers.size)
        runs += 0 if layers.kv_only else layers.size
    found, each = together.totals().by_model["target"], alone.totals().by_model["target"]
    assert (found.layer_passes, found.attended, found.filled, found.heads) == (
        each.layer_passes, each.attended, each.filled, each.heads
    )  # fmt: skip
    assert found.rows_read == each.rows_read + padded
    assert (found.passes, found.layer_runs) == (len(steps_given), runs)  # weights are read once per batched pass


@given(batches(), st.lists(st.integers(0, 3), min_size=30, max_size=30))
@settings(max_examples=examples(60))
def test_reads_of_a_sequence_do_not_depend_on_the_batch(batch: Batch, survivors: list[int]) -> None:
    def world(number: int) -> World:
        return World(1, LAYERS, drafts={"draft": DraftOutcomes("target", np.roll(survivors, number).tolist())})

    several = BatchWorld([world(number) for number in range(10)])
    several.generated = {number: [0] * (number % 3) for number in range(10)}
    for role, layers in (("target", WHOLE), ("draft", LayerSpan(0, 1))):
        step = step_of(batch, layers, role)
        right = tuple(position * (-1 if index % 5 == 4 else 1) for index, position in enumerate(step.positions))
        step = step._replace(tokens=right)
        offset = 0
        for number, one in zip(batch.sequences, parts(step), strict=True):
            alone = world(number)
            alone.written = several.generated[number]
            for index in range(len(one.tokens)):
                want = alone.read(Read("next", one, index - len(one.tokens)))
                assert several.read(Read("next", step, offset)) == want
                assert several.read(Read("next", step, offset - len(step.tokens))) == want
                offset += 1


# --- Times ---


@given(batches())
@settings(max_examples=examples(40))
def test_layer_times_of_a_pass_depend_on_its_tokens_or_its_padded_shape(batch: Batch) -> None:
    """By the total number of tokens with a width curve; by sequences and widest sequence with other costs."""
    step, size = step_of(batch), len(batch.sequences)
    curve = UnitCost(LAYERS, final_head=0.25, verify_cost=tuple((width, 1 + width / 8) for width in range(1, 21)))
    flat = Forward("target", step.tokens, 0, WHOLE, heads=step.heads)
    assert curve.forward(step) == curve.forward(flat)
    assert sum(curve.layer_times_of(step)) == pytest.approx(curve.forward(step))
    padded = Batch.uniform(batch.sequences, step.at, step.width)
    assert BY_BATCH.forward(step._replace(heads=0)) == BY_BATCH.forward(step_of(padded)) == 10 * size + step.width


@given(batches(furthest=40))
@settings(max_examples=examples(40))
def test_seconds_of_a_pass_are_those_of_the_padded_batch(batch: Batch) -> None:
    seen: list[tuple[int, int]] = []

    class Noting(UniformLayers):
        def layer(self, width: Any, context: Any, batch: Any = 1, *, busy: Any = 0) -> Any:
            seen.append((width, batch))
            return Estimate(width + 100 * batch + 1e4 * np.asarray(context), np.asarray(0.0))

    cost = ReplayedSeconds({"target": Noting(preset("llama-2-13b"), 0.001)})
    width, at, count = max(batch.widths), max(batch.positions), len(batch.sequences)
    assert cost.forward(step_of(batch)) == LAYERS * (width + 100 * count + 1e4 * at)
    assert seen == [(width, count)]


def ragged(widths: list[tuple[int, ...]]) -> Steps:
    """Sequences that pass the given numbers of tokens and commit one token per pass."""
    held = [0] * max(map(len, widths))
    for each in widths:
        batch = Batch(tuple(range(len(each))), tuple(held[: len(each)]), each, (1,) * len(each))
        tokens = tuple(at + index for at, width in zip(held, each, strict=False) for index in range(width))
        out = yield Forward("target", tokens, min(batch.positions), WHOLE, heads=len(each), batch=batch)
        for index, width in enumerate(each):
            held[index] += width
            place = batch.starts[index] + width - 1
            yield Commit("token", ((yield Read("next", out, place)),), sequence=index)


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4), st.booleans())
@settings(max_examples=examples(40))
def test_simulator_and_counter_make_the_same_passes(widths: list[tuple[int, ...]], per_layer: bool) -> None:
    tokens = sum(map(len, widths))
    def world() -> World:
        return BatchWorld([World(1, LAYERS) for _ in range(4)])

    counted = count(ragged(widths), world(), tokens)
    run = simulate(ragged(widths), tokens, Cluster(1), BY_BATCH, world(), per_layer=per_layer, record=True)
    assert run.latency == pytest.approx(sum(10 * len(each) + max(each) for each in widths))
    assert run.account.passes_by_kind == counted.account.passes_by_kind
    assert run.sequences == counted.sequences
    held = np.zeros(4, dtype=int)
    want: dict[int, list[int]] = {}
    for each in widths:
        held[: len(each)] += each
        for number in range(len(each)):
            want.setdefault(number, []).append(int(held[number]))
    assert counted.sequences == want  # the correct token at a position equals the position
    assert [(row.width, row.depth >= max(each)) for row, each in zip(run.intervals, widths, strict=True)] == [
        (sum(each), True) for each in widths
    ]


def test_passes_of_one_kind_with_different_widths_are_priced_separately() -> None:
    """Equal totals of tokens and sequences: the engine, which caches prices, must not mix them up."""
    one, other = (Batch((0, 1), (0, 0), widths, (0, 0)) for widths in ((2, 2), (3, 1)))
    assert kind_of(step_of(one)) == kind_of(step_of(other))

    def steps() -> Steps:
        yield step_of(one)
        yield step_of(other)
        yield Commit("token", (0,))

    run = simulate(steps(), 1, Cluster(1), BY_BATCH, World(1, LAYERS))
    assert run.latency == (20 + 2) + (20 + 3)
    assert run.account.passes_by_kind[kind_of(step_of(one))][0] == 2
