"""Cost model of a profile: lookups, missing parts, and extrapolation in proportion to the peaks."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.hardware.interpolation import NONE
from model.hardware.profile import AXES, Profile, Source, table_of
from model.hardware.profile_costs import PEAKS, ProfileCosts, shape_of
from model.hardware.roofline import Efficiency, Roofline

SHAPE = preset("llama-68m")
POINTS = {
    "layer": [(1, 0, 1), (1, 64, 1), (8, 0, 1), (8, 64, 1)],
    "dense": [(1,), (4,), (64,)],
    "attention": [*product((1, 8), (0, 1024), (1, 2, 4))],
    "head": [(1,), (8,)],
    "embedding": [(1,), (8,)],
    "step": [(1,), (8,)],
    "all_reduce": [(1024,), (2**20,)],
    "send": [(1024,), (2**20,)],
}
"""Points of each part of the profiles in these tests."""


def profile(*parts: Any, **more: Any) -> Profile:
    """A profile of the small Llama with these parts and tensor parallel sizes; all times differ."""
    rows = []
    for part, tensor_parallel, busy in (((each, 1, 0) if isinstance(each, str) else each) for each in parts):
        for at, point in enumerate(POINTS[part]):
            time = 1e-3 * (1 + [*POINTS].index(part)) * (1 + 0.1 * at) / tensor_parallel**0.5 * (1 + busy)
            rows.append(
                {"part": part, "tensor_parallel": tensor_parallel, "busy": busy, "time_s": time}
                | dict(zip(AXES[part], point, strict=True))
            )
    said: dict[str, Any] = {
        "name": "tiny", "device": "here", "model": "llama-68m", "dtype": "bfloat16", "engine": "none", "mode": "eager",
        "kind": "model", "provenance": "measured", "date": "2026-11-21", "bandwidth": 1e11, "rate": 1e13, "cache_bytes": 1e6,
        "table": table_of(rows), "sources": (Source("by hand", "rows"),), "shape": vars(SHAPE),
    }  # fmt: skip
    return Profile(**said | more)


SPLIT = ("dense", "attention", "head", "embedding", "step", "send")
BOTH = (*SPLIT, ("dense", 2, 0), ("all_reduce", 2, 0))


def seconds(part: str, at: int, tensor_parallel: int = 1, busy: int = 0) -> float:
    return 1e-3 * (1 + [*POINTS].index(part)) * (1 + 0.1 * at) / tensor_parallel**0.5 * (1 + busy)


def test_measured_points_of_every_part_are_returned_exactly() -> None:
    cost = ProfileCosts(profile(*SPLIT))
    asked = {"attention": cost.attention, "head": cost.head, "embedding": cost.embedding, "step": cost.step, "send": cost.transfer}
    for part, ask in asked.items():
        for at, point in enumerate(POINTS[part]):
            assert float(ask(*point).seconds) == seconds(part, at), (part, point)
    assert float(cost.layer(1, 1024, 4).seconds) == seconds("dense", 1) + seconds("attention", 5)
    assert float(cost.layer(8, 0, 1).seconds) == float(cost.surface("dense")(8).seconds) + seconds("attention", 6)  # type: ignore[misc]
    assert float(cost.layer(1, 0).seconds) == seconds("dense", 0) + seconds("attention", 0)
    assert float(cost.attention(1, 0).seconds) == seconds("attention", 0)
    assert (float(cost.step().seconds), float(cost.step().error)) == (seconds("step", 0), 0)
    # A single device has no reductions.
    assert float(ProfileCosts(profile(*SPLIT, "all_reduce")).layer(1, 0).seconds) == float(cost.layer(1, 0).seconds)
    assert (cost.tensor_parallel, cost.shape, cost.missing) == (1, SHAPE, ())


def test_whole_layers_depend_on_busy_units() -> None:
    cost = ProfileCosts(profile("layer", ("layer", 1, 3)))
    for busy in (0, 3):
        for at, point in enumerate(POINTS["layer"]):
            assert float(cost.layer(*point, busy=busy).seconds) == seconds("layer", at, busy=busy)
    assert float(cost.layer(1, 0).seconds) == seconds("layer", 0)
    with pytest.raises(ParameterError) as caught:
        cost.layer(1, 0, busy=1)
    assert str(caught.value) == "busy must be one of 0, 3 in profile tiny, got 1; measure it"
    with pytest.raises(ParameterError) as caught:
        ProfileCosts(profile(*SPLIT)).layer(1, 0, busy=1)
    assert str(caught.value) == "busy must be 0 in profile tiny, got 1; separate devices do not slow each other down"


def test_missing_parts_take_zero_time_and_are_listed() -> None:
    whole = ProfileCosts(profile("layer"))
    assert whole.missing == ("head", "embedding", "step", "send")
    for found in (whole.head(1), whole.embedding(1), whole.step(), whole.transfer(1), whole.attention(1, 0)):
        assert found is NONE
    products = ProfileCosts(profile("dense", ("dense", 2, 0), "step"), tensor_parallel=2)
    assert products.missing == ("head", "embedding", "send", "all_reduce", "attention")
    assert float(products.layer(1, 0).seconds) == seconds("dense", 0, tensor_parallel=2)
    assert products.head(1) is NONE
    assert ProfileCosts(profile("dense", "step")).missing == ("head", "embedding", "send", "attention")


def test_missing_parts_of_a_split_layer_follow_from_a_whole_layer() -> None:
    one, two = ProfileCosts(profile(*BOTH)), ProfileCosts(profile(*BOTH), tensor_parallel=2)
    size = 4 * SHAPE.hidden * SHAPE.bytes_each
    reduction = float(two.surface("all_reduce")(size).seconds)  # type: ignore[misc]
    # Each device has half of the keys and values: the bytes of a whole layer for half as many sequences.
    half = float(one.attention(1, 1024, 2).seconds)
    assert float(two.attention(1, 1024, 4).seconds) == half
    assert float(two.attention(1, 0).seconds) == float(one.attention(1, 0, 0.5).seconds)
    assert float(two.layer(1, 1024, 4).seconds) == pytest.approx(seconds("dense", 1, tensor_parallel=2) + half + 2 * reduction)
    # Each device has half of the vocabulary; embedding, step and transfer do not change.
    assert float(two.head(8).seconds) == seconds("head", 1) / 2
    assert float(two.embedding(8).seconds) == seconds("embedding", 1)
    assert float(two.step(8).seconds) == seconds("step", 1)
    assert float(two.transfer(2**20).seconds) == seconds("send", 1)
    own = ProfileCosts(profile(*BOTH, ("attention", 2, 0), ("head", 2, 0), ("step", 2, 0)), tensor_parallel=2)
    assert float(own.attention(1, 1024, 4).seconds) == seconds("attention", 5, tensor_parallel=2)
    assert float(own.head(8).seconds) == seconds("head", 1, tensor_parallel=2)
    assert float(own.step(8).seconds) == seconds("step", 1, tensor_parallel=2)
    assert own.surface("head", tensor_parallel=1)(8).seconds == seconds("head", 1)  # type: ignore[misc]
    assert one.surface("head", tensor_parallel=2) is None


def test_surfaces_are_made_once() -> None:
    cost = ProfileCosts(profile(*BOTH))
    assert cost.surface("dense") is cost.surface("dense", tensor_parallel=1, busy=0)
    assert cost.surface("dense") is not cost.surface("dense", tensor_parallel=2)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_beyond_the_table_the_share_of_the_peaks_is_constant(tensor_parallel: int) -> None:
    """The bound is that of the peaks plus the shortest time, which stands for a launch."""
    parts = ("layer", "dense", "attention", "head", "embedding", "all_reduce", "send")
    cost = ProfileCosts(profile(*((part, tensor_parallel, 0) for part in parts)), tensor_parallel=tensor_parallel)
    of = SHAPE.shard(tensor_parallel)
    read, rate = 1 / 1e11, 1 / 1e13

    def dense(tokens: float) -> float:
        return sum(
            max((i * o + tokens * (i + o)) * 2 * read, 2 * i * o * tokens * rate) for i, o in of.matrices
        )

    def attention(width: float, context: float, batch: float) -> float:
        met = batch * (width * context + width * (width + 1) / 2)
        return max(4 * of.kv_heads * of.head_dim * batch * (context + width) * read, 4 * of.heads * of.head_dim * met * rate)

    def joining(tokens: float) -> float:
        around = 2 * (tensor_parallel - 1) / tensor_parallel / 50e9
        return 0.0 if tensor_parallel == 1 else 2 * (tokens * SHAPE.hidden * 2 * around + 10e-6)

    bounds: dict[str, Any] = {
        "dense": dense,
        "attention": attention,
        "layer": lambda width, context, batch: dense(width * batch) + attention(width, context, batch) + joining(width * batch),
        "head": lambda many: max(of.head_weights * 2 * read, 2 * of.head_weights * many * rate),
        "embedding": lambda tokens: tokens * SHAPE.hidden * 2 * read,
        "all_reduce": lambda size: size * read,
        "send": lambda size: size * read,
    }
    for part in parts:
        surface, edge = cost.surface(part), POINTS[part][-1]
        beyond = tuple(1000 * each + 7 for each in edge)
        least = [bounds[part](*point) + seconds(part, 0, tensor_parallel) for point in (edge, beyond)]
        assert surface is not None
        want = float(surface(*edge).seconds) * least[1] / least[0]
        assert float(surface(*beyond).seconds) == pytest.approx(want, rel=1e-9), part
        assert least[1] > 1.001 * least[0], part
    # A step has no bound: its time is constant.
    held = ProfileCosts(profile("layer", "step")).step(10**6)
    assert float(held.seconds) == pytest.approx(seconds("step", 1))


def test_peaks_are_the_full_peaks() -> None:
    nothing = dict.fromkeys(("launch", "attention_launch", "error", "attention_error", "compute_error"), 0)
    assert Efficiency(memory=1, compute=1, elementwise=1, cache=1, **nothing) == PEAKS
    bound = Roofline(SHAPE, 1e11, 1e13, PEAKS)
    assert float(bound.layer(1, 0).error) == 0


def test_errors_are_those_of_the_profile_and_of_its_repeats() -> None:
    rows = [
        {"part": "layer", "width": width, "context": 0, "batch": 1, "time_s": 1e-3 * width, "low_s": low, "high_s": high}
        for width, low, high in ((1, 0.9e-3, 1.3e-3), (2, 2e-3, 2e-3), (4, 4e-3, 4e-3))
    ]
    rows += [{"part": "head", "positions": many, "time_s": 0.0, "low_s": 0.0, "high_s": 0.0} for many in (1, 2)]
    cost = ProfileCosts(profile("layer", table=table_of(rows), errors={"layer": 0.07}))
    assert [float(cost.layer(width, 0).error) for width in (1, 2, 3)] == pytest.approx([0.2, 0, 0.07])
    # A time rounded to zero has no spread.
    assert (float(cost.head(1).seconds), float(cost.head(1).error)) == (0, 0)
    rows[-1]["high_s"] = 1e-12
    wide = ProfileCosts(profile("layer", table=table_of(rows)))
    assert float(wide.head(2).error) == pytest.approx(0.5)
    # Without a stated error it is the leave-one-out error.
    assert float(wide.layer(3, 0).error) == pytest.approx(0, abs=1e-12)


def test_provenance_names_each_repository_once() -> None:
    sources = (Source("one", "a"), Source("two", "b"), Source("one", "c"))
    assert ProfileCosts(profile("layer", sources=sources)).provenance == "measured (one; two)"
    assert ProfileCosts(profile("layer", provenance="composed")).provenance == "composed (by hand)"


def test_a_shape_may_come_from_a_file() -> None:
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(SHAPE).items()}
    found = shape_of(profile("layer", shape=lists))
    assert found == SHAPE
    assert hash(found) == hash(SHAPE)
    lacking = {name: value for name, value in vars(SHAPE).items() if name != "hidden"}
    for shape, message in (
        (vars(SHAPE) | {"colour": 3}, "unknown key profile tiny.shape.colour; "),
        (lacking, "profile tiny.shape.hidden is required and has no default; "),
    ):
        with pytest.raises(ParameterError) as caught:
            ProfileCosts(profile("layer", shape=shape))
        assert str(caught.value).startswith(message)


def test_profiles_of_other_kinds_are_refused() -> None:
    operations = profile("send", kind="links")
    for made, tensor_parallel, message in (
        (operations, 1, "profile tiny must be of kind model, got links; compose one from operations"),
        (profile(*BOTH), 3, "tensor_parallel must be one of 1, 2 in profile tiny, got 3"),
        (profile(*BOTH), 0, "tensor_parallel must be at least 1, got 0"),
        (profile(*BOTH), 1.0, "tensor_parallel must be a whole number, got 1.0"),
    ):
        with pytest.raises(ParameterError) as caught:
            ProfileCosts(made, tensor_parallel=tensor_parallel)
        assert str(caught.value) == message


def test_arrays_are_looked_up_point_by_point() -> None:
    cost = ProfileCosts(profile(*BOTH), tensor_parallel=2)
    width, context, batch = np.array([1, 3]), np.array([[0], [99], [5000]]), 3
    found = cost.layer(width, context, batch)
    for row, column in np.ndindex(3, 2):
        one = cost.layer(width[column], context[row, 0], batch)
        assert (float(one.seconds), float(one.error)) == pytest.approx((found.seconds[row, column], found.error[row, column]))
