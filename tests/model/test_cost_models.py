"""Cost models of hardware: laws that hold for all of them, and derived quantities."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.hardware import cost_models
from model.hardware.cost_models import DeviceMemory, UniformLayers, memory, pass_time, prompt_time, step_time
from model.hardware.interpolation import NONE, Estimate
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_costs import PEAKS, ProfileCosts
from model.hardware.roofline import Efficiency, Roofline

SHAPE = preset("llama-2-13b")
A100 = Roofline(SHAPE, 2.039e12, 312e12)
BOUND = Roofline(SHAPE, 2e12, 3e14, PEAKS)
WIDTHS, CONTEXTS, BATCHES = st.integers(1, 64), st.integers(0, 8192), st.integers(1, 64)


def profile(rows, **more):
    """A profile of the small Llama, of these rows."""
    shape = preset("llama-68m")
    said: dict[str, Any] = {
        "name": "tiny", "device": "here", "model": "llama-68m", "dtype": "bfloat16", "engine": "none", "mode": "eager",
        "kind": "model", "provenance": "measured", "date": "2026-11-21", "bandwidth": 1e11, "rate": 1e13, "cache_bytes": 1e6,
        "table": table_of(rows), "sources": (Source("by hand", "rows"),), "shape": vars(shape),
    }  # fmt: skip
    return Profile(**said | more)


SPLIT = [
    *({"part": "dense", "tokens": n, "tensor_parallel": tensor_parallel, "time_s": 1e-4 / tensor_parallel + 1e-6 * n} for n in (1,
      2, 4, 64) for tensor_parallel in (1, 2)),
    *(
        {"part": "attention", "width": 1, "context": c, "batch": b, "time_s": 1e-5 + 1e-9 * c * b}
        for c in (128, 1024)
        for b in (1, 4)
    ),
    *({"part": "head", "positions": n, "time_s": 3e-4 + 1e-6 * n} for n in (1, 8)),
    *({"part": "embedding", "tokens": n, "time_s": 5e-6} for n in (1, 8)),
    {"part": "step", "batch": 1, "time_s": 1e-3},
    *({"part": "all_reduce", "size": n, "tensor_parallel": 2, "time_s": 1e-5 + n * 1e-11} for n in (1024, 2**20)),
    *({"part": "send", "size": n, "tensor_parallel": 1, "time_s": 1e-5 + n * 1e-11} for n in (1024, 2**20)),
]  # fmt: skip


# --- Roofline ---


@given(WIDTHS, CONTEXTS, BATCHES, st.sampled_from(["width", "context", "batch"]), st.integers(1, 50))
def test_more_work_never_takes_less_time(width, context, batch, axis, more):
    at = {"width": width, "context": context, "batch": batch}
    less, greater = A100.layer(**at), A100.layer(**at | {axis: at[axis] + more})
    assert float(greater.seconds) >= float(less.seconds)


@given(WIDTHS, CONTEXTS, BATCHES)
def test_no_time_beats_the_peaks_of_the_device(width, context, batch):
    bound = Roofline(SHAPE, A100.bandwidth, A100.rate, PEAKS)
    assert float(A100.layer(width, context, batch).seconds) > float(bound.layer(width, context, batch).seconds)
    # The bound is the longer of reading all weights and cache, and computing.
    size = SHAPE.layer_weights * 2 + 4 * SHAPE.kv_heads * SHAPE.head_dim * batch * (context + width)
    work = 2 * SHAPE.layer_weights * width * batch
    least = max(size / A100.bandwidth, work / A100.rate)
    assert float(bound.layer(width, context, batch).seconds) >= least * (1 - 1e-12)


@given(WIDTHS, CONTEXTS, BATCHES, st.floats(0.1, 10))
def test_times_scale_with_the_peaks_except_launches(width, context, batch, factor):
    without = Efficiency(launch=0.0, attention_launch=0.0)
    one = Roofline(SHAPE, 1e12, 1e14, without)
    other = replace(one, bandwidth=1e12 * factor, rate=1e14 * factor)
    ratio = float(one.layer(width, context, batch).seconds) / float(other.layer(width, context, batch).seconds)
    assert ratio == pytest.approx(factor, rel=1e-9)


def test_far_from_the_ridge_only_one_peak_matters():
    slow = replace(A100, bandwidth=A100.bandwidth / 2)
    narrow = float(slow.gemms(1)) / float(A100.gemms(1))
    assert 1.5 < narrow < 2  # only the launch remains
    wide = float(slow.gemms(200_000)) / float(A100.gemms(200_000))
    assert 1 <= wide < 1.1
    weak = replace(A100, rate=A100.rate / 2)
    assert float(weak.gemms(1)) == pytest.approx(float(A100.gemms(1)), rel=1e-3)
    assert 1.8 < float(weak.gemms(200_000)) / float(A100.gemms(200_000)) <= 2


@given(st.sampled_from([2, 4, 8]), WIDTHS, CONTEXTS)
def test_tensor_parallel_devices_do_at_least_the_same_work(tensor_parallel, width, context):
    split = replace(A100, tensor_parallel=tensor_parallel)
    whole, part = float(A100.layer(width, context).seconds), float(split.layer(width, context).seconds)
    assert part * tensor_parallel > whole  # launches and reductions are not divided
    joining = 2 * float(split.all_reduce(width * SHAPE.hidden * 2))
    assert part > joining


@given(WIDTHS, CONTEXTS, BATCHES, st.sampled_from([1, 2, 4]), st.sampled_from(["llama-2-13b", "llama-2-70b", "opt-1.3b"]))
def test_the_bound_of_a_layer_is_reading_operands_or_computing(width, context, batch, tensor_parallel, name):
    bound = Roofline(preset(name), 2e12, 3e14, PEAKS, tensor_parallel)
    part, tokens = preset(name).shard(tensor_parallel), width * batch
    products = 0.0
    for inputs, outputs in part.matrices:
        read = 2 * (inputs * outputs + tokens * (inputs + outputs))  # weights, and states in and out
        products += max(read / 2e12, 2 * inputs * outputs * tokens / 3e14)
    assert float(bound.gemms(tokens)) == pytest.approx(products, rel=1e-12)
    # Keys and values are read once per sequence; each new token attends to those before it and itself, in two products.
    met = sum(context + place for place in range(1, width + 1))
    read = 2 * 2 * part.kv_heads * part.head_dim * batch * (context + width)
    attention = max(read / 2e12, 2 * 2 * part.heads * part.head_dim * batch * met / 3e14)
    assert float(bound.attention(width, context, batch)) == pytest.approx(attention, rel=1e-12)
    joining = 0 if tensor_parallel == 1 else 2 * float(bound.all_reduce(2 * tokens * part.hidden))
    assert float(bound.layer(width, context, batch).seconds) == pytest.approx(products + attention + joining, rel=1e-12)


def test_the_default_batch_of_a_layer_is_one():
    for cost in (BOUND, A100):
        assert float(cost.layer(3, 100).seconds) == float(cost.layer(3, 100, 1).seconds)
        assert cost.step().seconds.shape == cost.step(1).seconds.shape == ()


@given(st.integers(1, 300), CONTEXTS, BATCHES)
def test_efficiencies_lengthen_times_in_proportion(tokens, context, batch):
    """Reading and computing are combined as the root of the sum of cubes; launches and elementwise operations are added."""
    shares = {"memory": 0.5, "compute": 0.25, "elementwise": 0.125, "cache": 0.0625}
    got = Efficiency(**shares, launch=1e-3, attention_launch=1e-2, error=0.3, attention_error=0.4, compute_error=0.3)
    cost = Roofline(SHAPE, 2e12, 3e14, got)

    def both(read, operations, share):
        return ((read / (2e12 * share)) ** 3 + (operations / (3e14 * 0.25)) ** 3) ** (1 / 3)

    products = sum(
        both(2 * (inputs * outputs + tokens * (inputs + outputs)), 2 * inputs * outputs * tokens, 0.5) + 1e-3
        for inputs, outputs in SHAPE.matrices
    )
    # Two norms with their additions read and write two states each, the activation makes one of two, a rotation covers the
    # heads of queries and keys: four kernels of 3 us.
    moved = 2 * tokens * (2 * 4 * SHAPE.hidden + 3 * SHAPE.ffn + 2 * 2 * SHAPE.hidden)
    assert float(cost.gemms(tokens)) == pytest.approx(products + moved / (2e12 * 0.125) + 4 * 3e-6, rel=1e-12)
    read = 4 * SHAPE.kv_heads * SHAPE.head_dim * batch * (context + 1)
    attention = both(read, 4 * SHAPE.heads * SHAPE.head_dim * batch * (context + 1), 0.0625) + 1e-2
    assert float(cost.attention(1, context, batch)) == pytest.approx(attention, rel=1e-12)
    head = both(2 * SHAPE.head_weights, 2 * SHAPE.head_weights * tokens, 0.5)
    assert float(cost.head(tokens).seconds) == pytest.approx(head, rel=1e-12)
    errors = [float(found.error) for found in (cost.head(tokens), cost.embedding(tokens), cost.step(batch), cost.transfer(1))]
    assert errors == [0.3, 0.3, 0.3, 0.4]
    layer, products = cost.layer(1, context, batch), float(cost.gemms(batch))
    mixed = (0.3 * products + 0.4 * attention) / (products + attention)  # each error is weighted by its part of the time
    assert float(layer.error) == pytest.approx(mixed)


def test_the_error_is_that_of_the_limiting_resource():
    """Memory-bound for few tokens, compute-bound for many, and halfway at the ridge."""
    cost = Roofline(SHAPE, 2e12, 2e14, Efficiency(memory=0.5, compute=0.5, error=0.1, compute_error=0.5))
    ridge = 2 * 2e14 / 2e12 / 2  # tokens at which 2 operations per weight take as long as its 2 bytes
    for found in (cost.head, lambda tokens: cost._estimate(1.0, cost.arithmetic(tokens, 1.0))):
        errors = [float(found(tokens).error) for tokens in (1, ridge, 100 * ridge)]
        assert errors == pytest.approx([0.1, 0.3, 0.5], abs=1e-3)


def test_a_gate_adds_a_state_that_the_activation_reads():
    """The products are made equal, so that the state is the only difference."""
    plain = preset("opt-1.3b")
    got = Efficiency(memory=0.5, compute=0.25, elementwise=0.125, launch=1e-9)
    for shape, states in ((plain, 2), (replace(plain, gated=True), 3)):
        cost = Roofline(shape, 2e12, 3e14, got)
        products = 0.0
        for inputs, outputs in shape.matrices:
            read, work = 2 * (inputs * outputs + 7 * (inputs + outputs)) / 1e12, 2 * inputs * outputs * 7 / 0.75e14
            products += (read**3 + work**3) ** (1 / 3) + 1e-9
        turned = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        moved = 2 * 7 * (4 * shape.norms * shape.hidden + states * shape.ffn + turned) / (2e12 * 0.125)
        launches = (shape.norms + 2) * 3e-6
        assert float(cost.gemms(7)) == pytest.approx(products + moved + launches, rel=1e-12)


def test_transfers_reductions_head_and_embedding_by_hand():
    cost = replace(A100, link=1e9, latency=0.5, tensor_parallel=4)
    assert float(cost.transfer(2e9).seconds) == 2.5
    # In a ring of four each device sends and receives three quarters, twice.
    assert float(cost.all_reduce(2e9)) == pytest.approx(2e9 * 2 * 3 / 4 / 1e9 + 0.5)
    assert float(cost.embedding(3).seconds) == pytest.approx(3 * SHAPE.hidden * 2 / A100.bandwidth)
    assert cost.step(np.array([1, 2])).seconds.tolist() == [0, 0]
    # Each of four devices has a quarter of the vocabulary.
    assert float(cost.head(1).seconds) == pytest.approx(float(A100.head(1).seconds) / 4)


def test_counts_may_have_any_integer_type():
    """Bytes and operations would overflow small integers."""
    small = np.array([1, 100_000], dtype=np.int32)
    for cost in (A100, BOUND):
        assert cost.gemms(small).tolist() == cost.gemms(small.astype(float)).tolist()
        assert cost.attention(small, small, small).tolist() == cost.attention(*[small.astype(float)] * 3).tolist()
        assert cost.head(small).seconds.tolist() == cost.head(small.astype(float)).seconds.tolist()


def test_default_efficiencies_are_plausible():
    """Shares of peaks are at most one, launches take microseconds; the link has 50 GB/s and 10 us."""
    got = A100.efficiency
    for name in ("memory", "compute", "elementwise", "cache"):
        assert 0.3 < getattr(got, name) < 1, name
    for name in ("launch", "attention_launch"):
        assert 1e-6 < getattr(got, name) < 20e-6, name
    assert 0 < got.error < got.attention_error < 0.5
    assert (A100.link, A100.latency, A100.tensor_parallel) == (50e9, 10e-6, 1)
    assert A100.provenance == "assumed efficiencies of published peaks"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be at least 1, got 0"),
        ({"rate": 0.5}, "rate must be at least 1, got 0.5"),
        ({"link": 0}, "link must be at least 1, got 0"),
        ({"latency": -0.5}, "latency must be at least 0, got -0.5"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide heads=40, got 3"),
    ],
)
def test_bad_input_of_a_roofline_is_refused(more, message):
    with pytest.raises(ParameterError) as caught:
        replace(A100, **more)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["memory", "compute", "elementwise", "cache", "launch", "attention_launch", "error"])
def test_bad_efficiencies_are_refused(name):
    for value, message in ((-0.5, "between 0 and 10, got -0.5"), (10.5, "between 0 and 10, got 10.5")):
        with pytest.raises(ParameterError) as caught:
            Efficiency(**{name: value})
        assert str(caught.value) == f"{name} must be {message}"
    if name in ("memory", "compute", "elementwise", "cache"):
        with pytest.raises(ParameterError) as caught:
            Efficiency(**{name: 0.0})
        assert str(caught.value) == f"{name} must be above 0, got 0.0; it is a share of the device's peak"
    else:
        Efficiency(**{name: 0.0})


# --- Profiles ---


def test_a_pass_is_the_sum_of_its_measured_parts():
    cost = ProfileCosts(profile(SPLIT))
    layers = cost.shape.layers
    found = pass_time(cost, 1, 1024, 4)
    want = layers * ((1e-4 + 4e-6) + (1e-5 + 1e-9 * 4096)) + (3e-4 + 4e-6) + 5e-6 + 1e-3
    # Embedding and head are interpolated; the embedding takes the same time everywhere.
    assert float(found.seconds) == pytest.approx(want, rel=2e-3)
    assert float(cost.layer(1, 1024, 4).seconds) == (1e-4 + 4e-6) + (1e-5 + 1e-9 * 4096)
    assert cost.missing == ()
    assert cost.provenance == "measured (by hand)"


def test_split_layers_have_separate_times_and_two_reductions():
    one, two = ProfileCosts(profile(SPLIT)), ProfileCosts(profile(SPLIT), tensor_parallel=2)
    size = 4 * one.shape.hidden * 2
    reduction = float(two.surface("all_reduce")(size).seconds)
    # Each device has half of the cache: the time of half the batch.
    attention = float(one.attention(1, 128, 4 / 2).seconds)
    assert float(two.layer(1, 128, 4).seconds) == pytest.approx(1e-4 / 2 + 4e-6 + attention + 2 * reduction)
    assert float(two.head(8).seconds) == pytest.approx(float(one.head(8).seconds) / 2)
    with pytest.raises(ParameterError, match="tensor_parallel must be one of 1, 2 in profile tiny, got 4"):
        ProfileCosts(profile(SPLIT), tensor_parallel=4)


def test_whole_layers_are_looked_up_by_busy_units():
    rows = [
        {"part": "layer", "width": w, "context": 64, "batch": 1, "busy": busy, "time_s": 1e-4 * w * (1 + 0.2 * busy)}
        for w in (1, 2)
        for busy in (0, 1)
    ]
    cost = ProfileCosts(profile(rows))
    assert float(cost.layer(2, 64, busy=1).seconds) == 1e-4 * 2 * 1.2
    with pytest.raises(ParameterError, match="busy must be one of 0, 1 in profile tiny, got 2; measure it"):
        cost.layer(1, 64, busy=2)
    with pytest.raises(ParameterError, match="busy must be 0 in profile tiny, got 1"):
        ProfileCosts(profile(SPLIT)).layer(1, 128, busy=1)
    assert cost.missing == ("head", "embedding", "step", "send")
    assert float(cost.head(3).seconds) == float(cost.transfer(100).seconds) == 0


@given(WIDTHS, CONTEXTS, BATCHES)
def test_times_and_errors_grow_beyond_the_profile(width, context, batch):
    cost = ProfileCosts(profile(SPLIT))
    found = cost.layer(width, context, batch)
    assert float(found.seconds) > 0
    assert float(found.error) >= 0
    more = cost.layer(width + 64, context + 8192, batch + 64)
    assert float(more.seconds) > float(found.seconds)
    assert float(more.error) > 0  # beyond the measured points


def test_a_profile_of_operations_is_not_a_cost_model():
    rows = [{"part": "gemm", "m": 1, "n": 8, "k": 8, "time_s": 1e-5}]
    with pytest.raises(ParameterError, match="profile tiny must be of kind model, got operations; compose one"):
        ProfileCosts(profile(rows, kind="operations"))


# --- Passes ---


def test_prompts_and_steps():
    assert float(step_time(A100, 512, 3).seconds) == float(pass_time(A100, 1, 512, 3).seconds)
    assert float(prompt_time(A100, 512).seconds) == float(pass_time(A100, 512, 0, heads=1).seconds)
    none = pass_time(A100, 4, 512, heads=0)
    assert float((none + A100.head(4)).seconds) == pytest.approx(float(pass_time(A100, 4, 512).seconds))
    half = pass_time(A100, 1, 512, layers=20, heads=0).seconds - A100.embedding(1).seconds
    whole = pass_time(A100, 1, 512, heads=0).seconds - A100.embedding(1).seconds
    assert float(whole) == pytest.approx(2 * float(half))
    reader = Roofline(preset("t5-large"), 2.039e12, 312e12)
    assert float(prompt_time(reader, 1, source=512).seconds) > float(prompt_time(reader, 1).seconds)
    assert float(prompt_time(A100, 1, source=512).seconds) == float(prompt_time(A100, 1).seconds)
    with pytest.raises(ParameterError, match="layers must be between 0 and 40, got 41"):
        pass_time(A100, 1, 512, layers=41)


def test_uniform_layers_have_only_layer_times():
    cost = UniformLayers(SHAPE, 0.001)
    for found in (cost.head(3), cost.embedding(3), cost.step(3), cost.transfer(3)):
        assert found is NONE
    found = cost.layer(np.array([1, 9]), np.array([[0], [7], [8]]), 5)
    assert found.seconds.tolist() == [[0.001] * 2] * 3
    assert found.error.tolist() == [[0] * 2] * 3
    assert cost.layer(1, 0).seconds.shape == ()
    assert (cost.tensor_parallel, cost.provenance) == (1, "assumed")
    with pytest.raises(ParameterError, match=r"^seconds_per_layer must be at least 0, got -0\.5$"):
        UniformLayers(SHAPE, -0.5)


class Counted(UniformLayers):
    """Cost model that counts the lookups: a part for each kind of work, and a layer per busy unit."""

    def layer(self, width, context, batch=1, *, busy=0):
        return Estimate(np.asarray(width) * batch * (1 + np.asarray(context)) * (1.0 + busy), np.asarray(0.1))

    def head(self, positions):
        return Estimate(np.asarray(positions) * 1e6 + 1e5, np.asarray(0.2))

    def embedding(self, tokens):
        return Estimate(np.asarray(tokens) * 1e9, np.asarray(0.4))

    def step(self, batch=1, *, within=False):
        return Estimate(np.asarray(batch) * 1e12, np.asarray(0.0))


COUNTED = Counted(SHAPE, 0.0)


@given(WIDTHS, CONTEXTS, BATCHES, st.integers(0, 3))
def test_a_pass_sums_layers_embedding_head_and_step(width, context, batch, busy):
    def whole(layers, heads):
        parts = layers * width * batch * (1 + context) * (1 + busy), width * batch * 1e9, batch * 1e12
        return sum(parts) + (batch * heads * 1e6 + 1e5 if heads else 0)

    found = pass_time(COUNTED, width, context, batch, busy=busy)
    assert float(found.seconds) == whole(40, width)
    assert float(found.seconds * found.error) == pytest.approx(
        0.1 * 40 * width * batch * (1 + context) * (1 + busy) + 0.4 * width * batch * 1e9 + 0.2 * (width * batch * 1e6 + 1e5)
    )
    for layers in (0, 1, 40):
        for heads in (0, 1, width):
            cut = pass_time(COUNTED, width, context, batch, layers=layers, heads=heads, busy=busy)
            assert float(cut.seconds) == whole(layers, heads)
    for more, meant in (({}, {"batch": 1, "busy": 0}), ({"heads": [0, 2]}, {"heads": np.array([0, 2])})):
        assert (pass_time(COUNTED, width, context, **more).seconds == pass_time(COUNTED, width, context, **meant).seconds).all()
    assert float(pass_time(COUNTED, width, context, heads=[0, 2]).seconds[1]) == float(
        pass_time(COUNTED, width, context, heads=2).seconds
    )
    assert float(step_time(COUNTED, context).seconds) == float(pass_time(COUNTED, 1, context, 1).seconds)
    assert float(prompt_time(COUNTED, width).seconds) == float(pass_time(COUNTED, width, 0, 1, heads=1).seconds)


def test_an_encoder_reads_its_source_before_the_prompt():
    shape = preset("t5-large")
    reader = Roofline(shape, 2.039e12, 312e12)
    for batch in (1, 3):
        share = shape.encoder_layer_weights / shape.layer_weights
        first = shape.encoder_layers * float(reader.layer(512, 0, batch).seconds) * share
        alone = prompt_time(reader, 7, batch)
        assert float(prompt_time(reader, 7, batch, source=512).seconds) == pytest.approx(first + float(alone.seconds))
    assert float(prompt_time(reader, 7).seconds) == float(prompt_time(reader, 7, 1).seconds)


@pytest.mark.parametrize(("layers", "got"), [(-1, "-1"), (41, "41"), (1.5, "1.5")])
def test_a_pass_has_at_most_all_layers(layers, got):
    bound = "a whole number" if layers == 1.5 else "between 0 and 40"
    with pytest.raises(ParameterError) as caught:
        pass_time(A100, 1, 512, layers=layers)
    assert str(caught.value) == f"layers must be {bound}, got {got}"


class Twice(UniformLayers):
    """Cost model in which a pass over several tokens takes twice as long up to a batch of 5, and slightly longer beyond."""

    def layer(self, width, context, batch=1, *, busy=0):
        return Estimate(
            np.where(np.asarray(width) > 1, np.where(np.asarray(batch) > self.tensor_parallel, 2.001, 2.0), 1.0), np.asarray(0.0)
        )


@pytest.mark.parametrize("last", [0, 1, 5, 1023, 1024, 2000])
def test_largest_batch_includes_exactly_twice_the_time(last):
    found = Twice(SHAPE, 0.0, tensor_parallel=last)
    assert cost_models.largest_batch(found, 512, 8) == min(last, 1024)
    assert cost_models.largest_batch(found, 512, 8, most=3) == min(last, 3)


def test_sent_bytes_are_a_state_and_the_kv_rows_of_its_layers():
    for layers in (0, 20):
        rows = 2 * layers * SHAPE.kv_heads * SHAPE.head_dim * 2
        assert cost_models.bytes_of_state(SHAPE, layers) == rows + SHAPE.hidden * 2


def test_a_model_that_fits_exactly_is_accepted():
    cost_models.refuse_too_large(DeviceMemory(6e9, 4e9, 10e9), "a100")
    with pytest.raises(ParameterError) as caught:
        cost_models.refuse_too_large(DeviceMemory(6e9, 4.1e9, 10e9), "a100")
    assert str(caught.value) == (
        "weights (6.0 GB) and cache (4.1 GB) must be at most the 10.0 GB of a100, got 10.1 GB;"
        " take a smaller batch, context or model, a larger tensor_parallel, weights in fewer bits (weights), or another device"
    )
    assert DeviceMemory(6e9, 4e9, 0).share == float("inf")
    assert memory(SHAPE, 80e9, context=9).cache == SHAPE.cache_bytes() * 9
    assert memory(SHAPE, 80e9, context=9) == memory(SHAPE, 80e9, context=9, batch=1, tensor_parallel=1)


def test_largest_batch_is_the_last_with_at_most_twice_the_time():
    most = cost_models.largest_batch(A100, 512, 8)
    wide, one = (np.array([float(pass_time(A100, w, 512, b).seconds) for b in (most, most + 1)]) for w in (8, 1))
    assert wide[0] <= 2 * one[0]
    assert wide[1] > 2 * one[1]
    assert cost_models.largest_batch(UniformLayers(SHAPE, 1e-3), 512, 8, most=16) == 16
    assert cost_models.largest_batch(A100, 0, 4096) == 0


@given(st.sampled_from(["llama-2-7b", "llama-2-70b", "llama-3.1-8b"]), st.integers(0, 4096), st.integers(1, 32))
def test_memory_is_weights_and_cache(name, context, batch):
    shape = preset(name)
    found = memory(shape, 80e9, context=context, batch=batch)
    assert found.weights == shape.parameters * 2
    assert found.cache == 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * context * batch
    split = memory(shape, 80e9, context=context, batch=batch, tensor_parallel=8)
    assert split.required < found.required
    beside = memory(shape, 80e9, context=context, batch=batch, also=(preset("llama-68m"),))
    assert beside.weights - found.weights == preset("llama-68m").parameters * 2
    assert found.share == pytest.approx(found.required / 80e9)
    if found.share > 1:
        with pytest.raises(ParameterError, match=r"weights \(.* GB\) and cache \(.* GB\) must be at most the 80\.0 GB of a100"):
            cost_models.refuse_too_large(found, "a100")
    else:
        cost_models.refuse_too_large(found, "a100")
