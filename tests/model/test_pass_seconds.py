"""Costs in seconds: every pass takes the time of its hardware model at its width, context and batch."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import PassShape
from model.hardware.cost_models import pass_time
from model.hardware.interpolation import Estimate
from model.steps import Batch, Forward, LayerSpan

LLAMA, SMALL = preset("llama-2-13b"), preset("llama-68m")


@dataclass(frozen=True)
class Made:
    """Hardware whose times depend on every argument, with a separate error for every part."""

    shape: Shape
    scale: float = 1.0
    dip: int = 0
    """A width at which a pass is faster than at the next smaller width."""
    off: float = 0.01
    tensor_parallel: int = 1
    provenance: str = "assumed"

    def layer(self, width, context, batch=1, *, busy=0):
        wide, many = np.asarray(width), np.asarray(batch)
        seconds = self.scale * (1 + 0.1 * wide + 0.3 * many * wide + 1e-3 * np.asarray(context) * many) * (1 + busy)
        seconds = np.where((wide == self.dip) | (many == self.dip), seconds / 2, seconds)
        return Estimate(seconds, np.broadcast_to(self.off * (wide + many), seconds.shape))

    def head(self, positions):
        return Estimate(self.scale * (0.5 + 0.25 * np.asarray(positions)), np.asarray(0.0))

    def embedding(self, tokens):
        return Estimate(self.scale * 0.05 * np.asarray(tokens), np.asarray(0.0))

    def step(self, batch=1, *, within=False):
        return Estimate(self.scale * (0.02 if within else 0.07) * np.asarray(batch), np.asarray(0.0))

    def transfer(self, size):
        return Estimate(self.scale * (0.01 + 1e-6 * np.asarray(size)), np.asarray(0.0))


def near(value):
    return pytest.approx(value, rel=1e-12)


@given(
    st.integers(0, 900), st.integers(0, 300), st.integers(1, 9), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3),
    st.floats(1e-6, 1e3), st.integers(0, 9),
)  # fmt: skip
def test_pass_takes_the_time_of_its_hardware(prompt, at, batch, width, sequences, busy, scale, dip):
    target, draft, medium = Made(LLAMA, scale, dip), Made(SMALL, scale), Made(LLAMA, scale * 0.3, off=0.02)
    cost = PassSeconds({"target": target, "draft": draft, "medium": medium}, prompt=prompt, batch=batch, busy=busy, middle=at)
    many, context = batch * sequences, prompt + at
    step = pass_time(target, 1, context, many, busy=busy)
    assert float(cost.plain_times(at, sequences)) == near(float(step.seconds))
    wide = pass_time(target, width, context, many, busy=busy)
    assert float(cost.verify_times(width, at, sequences)) == near(float(wide.seconds))
    slow, fast = cost.uncertainty_ends()
    off = float(wide.error) if width > 1 or sequences > 1 else 0.0
    assert float(slow.verify_times(width, at, sequences)) == near(float(wide.seconds) * (1 + off))
    assert float(fast.verify_times(width, at, sequences)) == near(float(wide.seconds) * max(1 - off, 0.0))
    for role, model in (("draft", draft), ("medium", medium)):
        small = pass_time(model, width, context, many, heads=1, busy=busy)
        assert float(cost.draft_times(at, role=role, width=width, sequences=sequences)) == near(float(small.seconds))
        off = float(small.error + pass_time(target, 1, context, batch, busy=busy).error)
        assert float(slow.draft_times(at, role=role, width=width, sequences=sequences)) == near(float(small.seconds) * (1 + off))
    one = pass_time(target, 1, context, batch, busy=busy)
    assert cost.ratio("draft") == near(float(pass_time(draft, 1, context, batch, busy=busy).seconds / one.seconds))
    assert cost.ratio("mine") is None
    assert cost.operations("medium") == 1
    assert cost.operations("draft") == SMALL.operations(1, context, heads=1) / LLAMA.operations(1, context, heads=1)
    assert float(cost.plain_error(at)) == near(float(one.error))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2), st.integers(1, 5), st.integers(0, 90))
def test_partial_pass_pays_step_and_embedding_only_at_layer_0(first, last, heads, width, at):
    """Step and embedding occur at layer 0 only; an empty span is a head; keys and values take their share of the layers."""
    first, last, target = min(first, last), max(first, last), Made(LLAMA)
    cost = PassSeconds({"target": target}, prompt=7)
    shape = PassShape(LayerSpan(first, last), width=width, heads=heads)
    layer, head = (float(each.seconds) for each in (target.layer(width, 7 + at), target.head(heads)))
    begins = float(target.embedding(width).seconds + target.step().seconds) if first == 0 < last else 0.0
    assert float(cost.times(shape, at)) == near((last - first) * layer + begins + (head if heads else 0.0))
    joined = float(cost.times(shape._replace(joins=True), at)) - float(cost.times(shape, at))
    assert joined == pytest.approx(0.07 if 0 < first < last else 0.0)
    if first < last:
        rows = PassShape(LayerSpan(first, last, kv_only=True), width=width)
        share = 2 * 5120 * 40 * 128 / LLAMA.layer_weights
        assert float(cost.times(rows, at)) == near((last - first) * layer * share)
        checked = replace(cost, state_check=0.25)
        assert float(checked.times(shape._replace(compared=True), at)) == near(float(cost.times(shape, at)) + 0.25)
        gap = PassShape(LayerSpan(first, last, ((first, last - 1),)), width=width, heads=heads)
        assert float(cost.times(gap, at)) == near(layer + begins + (head if heads else 0.0))
        step = Forward("target", (0,) * width, at, LayerSpan(first, last), heads=min(heads, width))
        assert sum(cost.layer_times_of(step)) == near(cost.forward(step))


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_broadcast_times_equal_those_of_single_passes(width, sequences, positions):
    """Integer widths come from growing tables, arrays are computed: both equal the times of single passes."""
    cost = PassSeconds({"target": Made(LLAMA), "draft": Made(SMALL)}, prompt=3)
    one_by_one = [float(cost.verify_times(width, at, sequences)) for at in positions]
    assert cost.verify_times(width, np.array(positions), sequences).tolist() == one_by_one
    table = cost.verify_times(np.arange(1, width + 1), np.array(positions)[:, None], np.arange(1, sequences + 1)[:, None, None])
    assert table.shape == (sequences, len(positions), width)
    assert table[-1, :, -1] == pytest.approx(one_by_one, rel=1e-12)
    assert cost.draft_times(np.array(positions)).shape == (len(positions),)


def test_continuous_batch_reads_the_mean_context():
    cost = PassSeconds({"target": Made(LLAMA)}, prompt=100, batch=4, others_position=16.0)
    assert cost.context([0, 16, 32]).tolist() == [112, 116, 120]
    assert float(cost.plain_times(32)) == near(float(pass_time(Made(LLAMA), 1, 120, 4).seconds))
    assert replace(cost, others_position=None).context([0, 16, 32]).tolist() == [100, 116, 132]


def test_ragged_pass_is_padded_to_its_longest_and_widest():
    cost = PassSeconds({"target": Made(LLAMA)}, prompt=5)
    step = Forward("target", (0,) * 4, 2, LayerSpan(0, 40), heads=3, batch=Batch((0, 1), (9, 2), (1, 3), (1, 2)))
    layers, head = Made(LLAMA).layer(3, 14, 2), Made(LLAMA).head(4)
    want = 40 * float(layers.seconds) + float(head.seconds + Made(LLAMA).embedding(6).seconds + Made(LLAMA).step(2).seconds)
    assert cost.forward(step) == near(want)


def test_times_are_never_negative():
    slow, fast = PassSeconds({"target": Made(LLAMA, off=2.0), "draft": Made(SMALL, off=2.0)}).uncertainty_ends()
    assert float(fast.draft_times()) == float(fast.verify_times(3)) == 0
    assert float(slow.verify_times(3)) > float(slow.plain_times()) == float(fast.plain_times()) > 0


def test_dispatch_time_is_linear_or_logarithmic():
    linear = PassSeconds({"target": Made(LLAMA)}, dispatch=0.5, dispatch_per_process=0.25)
    assert linear.dispatching(3) == 1.25
    assert replace(linear, dispatch_law="tree").dispatching(3) == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": -1}, "prompt must be at least 0, got -1"), ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": 1.5}, "batch must be a whole number, got 1.5"),
        ({"dispatch_law": "flat"}, "unknown dispatch_law 'flat'"),
    ],
)  # fmt: skip
def test_invalid_costs_are_refused(more, message):
    with pytest.raises(ParameterError, match=message):
        PassSeconds({"target": Made(LLAMA)}, **more)


def test_passes_of_models_without_hardware_are_refused():
    cost = PassSeconds({"target": Made(LLAMA)})
    with pytest.raises(ParameterError, match=r"cost_ratio is required: the time of a pass of the draft model"):
        cost.draft_times()
    with pytest.raises(ParameterError, match="layers of the target must be 40, as in its profile, got at least 41"):
        cost.times(PassShape(LayerSpan(0, 41)))
