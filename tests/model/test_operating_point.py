"""The operating point: seconds of a pass on hardware are layer-times times the seconds of a layer, whatever is asked."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.transformer import Shape, preset
from model.base.checks import ParameterError
from model.costs.operating_point import operating_point
from model.hardware.cost_models import UniformLayers, bytes_of_state, pass_time
from model.hardware.interpolation import Estimate

LLAMA, SMALL = preset("llama-2-13b"), preset("llama-68m")


@dataclass(frozen=True)
class Made:
    """Hardware on which every argument shows in the time, and every part has an error of its own."""

    shape: Shape
    scale: float = 1.0
    dip: int = 0
    """A width at which a pass takes less than over one token fewer."""
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

    def step(self, batch=1):
        return Estimate(self.scale * 0.07 * np.asarray(batch), np.asarray(0.0))

    def transfer(self, size):
        return Estimate(self.scale * (0.01 + 1e-6 * np.asarray(size)), np.asarray(0.0))


def near(value):
    return pytest.approx(value, rel=1e-12)


@given(
    st.integers(0, 900), st.integers(1, 300), st.integers(1, 9), st.integers(1, 200), st.booleans(), st.integers(0, 3),
    st.integers(0, 40), st.floats(1e-6, 1e3), st.integers(0, 9),
)  # fmt: skip
def test_every_cost_is_the_seconds_of_its_pass(prompt, tokens, batch, widest, texts, busy, handed_over, scale, dip):
    target, draft, medium = Made(LLAMA, scale, dip), Made(SMALL, scale), Made(LLAMA, scale * 0.3, off=0.02)
    at = operating_point(
        target, prompt=prompt, tokens=tokens, batch=batch, draft=draft, medium=medium, widest=widest, texts=texts, busy=busy,
        handed_over=handed_over,
    )  # fmt: skip
    cost, context = at.cost, prompt + tokens // 2
    assert at.seconds_per_layer == near(float(target.layer(1, context, batch, busy=busy).seconds))
    step = pass_time(target, 1, context, batch, busy=busy)
    assert cost.target_pass * at.seconds_per_layer == near(float(step.seconds))
    assert at.error == near(float(step.error))
    assert cost.early_head * at.seconds_per_layer == near(float(target.head(batch).seconds))
    assert (cost.layer_times[0] - 1) * at.seconds_per_layer == pytest.approx(float(target.embedding(batch).seconds))
    assert cost.step * at.seconds_per_layer == near(float(target.step(batch).seconds))
    assert cost.layer_times[1:] == (1.0,) * 39
    assert cost.link * at.seconds_per_layer == near(float(target.transfer(64).seconds))
    assert cost.promotion * at.seconds_per_layer == near(float(target.transfer(bytes_of_state(LLAMA, handed_over)).seconds))
    # A skipped layer's keys and values are made by their share of its weights.
    assert cost.propagation == near(2 * 5120 * 40 * 128 / LLAMA.layer_weights)
    run = max(batch, widest) if texts else batch  # the sequences of the batch that is run
    context = prompt + tokens // 2
    first, middle, last = (float(pass_time(target, 1, each, run, busy=busy).seconds) for each in (prompt, context, prompt + tokens))
    assert at.drift == pytest.approx((last - first) / middle)
    for role, name in ((draft, "cost_ratio"), (medium, "medium_cost_ratio")):
        found = pass_time(role, 1, context, batch, busy=busy)
        ratio, wrong = getattr(cost, name), float(found.error) + float(step.error)
        assert ratio * float(step.seconds) == near(float(found.seconds))
        assert getattr(at.slow, name) == near(ratio * (1 + wrong))
        assert getattr(at.fast, name) == near(ratio * (1 - wrong))
    assert cost.medium_operations_ratio == 1
    assert cost.operations_ratio == SMALL.operations(1, context, heads=1) / LLAMA.operations(1, context, heads=1)
    if widest == 1:
        assert cost.verify_cost is at.slow.verify_cost is at.fast.verify_cost is None
        return
    curves = [dict(each.verify_cost) for each in (cost, at.slow, at.fast)]
    assert [*curves[0]] == [*curves[1]] == [*curves[2]]
    for width in curves[0]:
        wide, first = (
            pass_time(target, 1 if texts else many, context, many if texts else batch, busy=busy) for many in (width, 1)
        )
        relative, wrong = float(wide.seconds / first.seconds), float(wide.error) if width > 1 else 0.0
        assert curves[0][width] == near(relative)
        assert curves[1][width] == near(relative * (1 + wrong))
        assert curves[2][width] == near(max(relative * (1 - wrong), 1e-9))


def test_passes_over_one_token_alone_have_no_widths():
    assert operating_point(Made(LLAMA), prompt=0, tokens=1, widest=1).cost.verify_cost is None


@pytest.mark.parametrize("widest", [2, 63, 64, 65, 70, 71, 72, 500])
def test_widths_are_all_up_to_64_and_a_tenth_apart_from_there(widest):
    found = operating_point(Made(LLAMA), prompt=0, tokens=1, widest=widest).cost.verify_cost
    widths = [width for width, _ in found]
    assert widths[:64] == [*range(1, min(widest, 64) + 1)]
    assert widths[-1] == widest
    for before, after in pairwise(widths[63:-1]):
        assert 1.1 * before < after <= 1.1 * before + 1
    if widest > 64:
        assert widths[-2] < widest <= 1.1 * widths[-2] + 1


def test_nothing_is_certain_to_take_less_than_nothing():
    wild = Made(LLAMA, off=2.0)
    at = operating_point(wild, prompt=9, tokens=4, draft=Made(SMALL, off=2.0), widest=3)
    assert at.fast.cost_ratio == 0
    assert at.fast.verify_cost == ((1, 1.0), (2, 1e-9), (3, 1e-9))
    assert at.slow.cost_ratio > 3 * at.cost.cost_ratio > 0


def test_what_is_left_out_is_one_text_alone_that_hands_nothing_over():
    target = Made(LLAMA)
    meant = {"batch": 1, "widest": 1, "texts": False, "handed_over": 0, "busy": 0}
    assert operating_point(target, prompt=5, tokens=7) == operating_point(target, prompt=5, tokens=7, **meant)
    said = operating_point(target, prompt=5, tokens=7, batch=3, widest=4)
    assert said == operating_point(target, prompt=5, tokens=7, batch=3, widest=4, texts=False)
    assert operating_point(target, prompt=0, tokens=1).cost.cost_ratio is None
    # What takes nothing besides its layers has layers of one time each.
    assert operating_point(UniformLayers(LLAMA, 0.5), prompt=0, tokens=1).cost.layer_times is None


def test_further_costs_are_added_or_stand():
    target, more = Made(LLAMA), {"link": 0.5, "promotion": 0.25, "dispatch": 2.0}
    without, found = (operating_point(target, prompt=8, tokens=2, more=each).cost for each in (None, more))
    assert found == replace(without, link=without.link + 0.5, promotion=without.promotion + 0.25, dispatch=2.0)
    assert more == {"link": 0.5, "promotion": 0.25, "dispatch": 2.0}


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        (Made(LLAMA), {"prompt": -1}, "prompt must be at least 0, got -1"),
        (Made(LLAMA), {"tokens": 0}, "tokens must be at least 1, got 0"),
        (Made(LLAMA), {"batch": 0}, "batch must be at least 1, got 0"),
        (Made(LLAMA), {"batch": 1.5}, "batch must be a whole number, got 1.5"),
        (UniformLayers(LLAMA, 0.0), {"batch": 4, "tokens": 6}, "a layer must take time, got 0 s at context 4 and batch 4"),
    ],
)
def test_an_operating_point_says_what_it_refuses(target, more, message):
    with pytest.raises(ParameterError) as caught:
        operating_point(target, **{"prompt": 1, "tokens": 1} | more)
    assert str(caught.value) == message
