"""Cost models of hardware: laws that hold for each, and the operating point at which methods run on them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import hardware
from model.checks import ParameterError
from model.hardware import Uniform, memory, pass_time, prompt_time, step_time
from model.measured import PEAKS, Measured
from model.operating_point import operating_point
from model.profile import Profile, Source, table_of
from model.roofline import Efficiency, Roofline
from model.transformer import preset

SHAPE = preset("llama-2-13b")
A100 = Roofline(SHAPE, 2.039e12, 312e12)
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
    *({"part": "dense", "tokens": n, "ways": ways, "time_s": 1e-4 / ways + 1e-6 * n} for n in (1, 2, 4, 64) for ways in (1, 2)),
    *(
        {"part": "attention", "width": 1, "context": c, "batch": b, "time_s": 1e-5 + 1e-9 * c * b}
        for c in (128, 1024)
        for b in (1, 4)
    ),
    *({"part": "head", "positions": n, "time_s": 3e-4 + 1e-6 * n} for n in (1, 8)),
    *({"part": "embedding", "tokens": n, "time_s": 5e-6} for n in (1, 8)),
    {"part": "step", "batch": 1, "time_s": 1e-3},
    *({"part": "all_reduce", "size": n, "ways": 2, "time_s": 1e-5 + n * 1e-11} for n in (1024, 2**20)),
    *({"part": "send", "size": n, "ways": 1, "time_s": 1e-5 + n * 1e-11} for n in (1024, 2**20)),
]  # fmt: skip


# --- roofline ---


@given(WIDTHS, CONTEXTS, BATCHES, st.sampled_from(["width", "context", "batch"]), st.integers(1, 50))
def test_more_work_takes_no_less_time(width, context, batch, axis, more):
    at = {"width": width, "context": context, "batch": batch}
    less, greater = A100.layer(**at), A100.layer(**at | {axis: at[axis] + more})
    assert float(greater.seconds) >= float(less.seconds)


@given(WIDTHS, CONTEXTS, BATCHES)
def test_no_time_beats_the_peaks_of_the_device(width, context, batch):
    bound = Roofline(SHAPE, A100.bandwidth, A100.rate, PEAKS)
    assert float(A100.layer(width, context, batch).seconds) > float(bound.layer(width, context, batch).seconds)
    # The bound itself is reading the weights and cache, or computing, each in full.
    size = SHAPE.layer_weights * 2 + 4 * SHAPE.kv_heads * SHAPE.head_dim * batch * (context + width)
    work = 2 * SHAPE.layer_weights * width * batch
    least = max(size / A100.bandwidth, work / A100.rate)
    assert float(bound.layer(width, context, batch).seconds) >= least * (1 - 1e-12)


@given(WIDTHS, CONTEXTS, BATCHES, st.floats(0.1, 10))
def test_a_device_of_so_many_times_the_peaks_is_so_many_times_as_fast_but_for_launching(width, context, batch, factor):
    without = Efficiency(launch=0.0, attention_launch=0.0)
    one = Roofline(SHAPE, 1e12, 1e14, without)
    other = replace(one, bandwidth=1e12 * factor, rate=1e14 * factor)
    ratio = float(one.layer(width, context, batch).seconds) / float(other.layer(width, context, batch).seconds)
    assert ratio == pytest.approx(factor, rel=1e-9)


def test_far_from_the_ridge_only_one_peak_matters():
    slow = replace(A100, bandwidth=A100.bandwidth / 2)
    narrow = float(slow.products(1)) / float(A100.products(1))
    assert 1.5 < narrow < 2  # launching is left
    wide = float(slow.products(200_000)) / float(A100.products(200_000))
    assert 1 <= wide < 1.1
    weak = replace(A100, rate=A100.rate / 2)
    assert float(weak.products(1)) == pytest.approx(float(A100.products(1)), rel=1e-3)
    assert 1.8 < float(weak.products(200_000)) / float(A100.products(200_000)) <= 2


@given(st.sampled_from([2, 4, 8]), WIDTHS, CONTEXTS)
def test_devices_that_share_a_layer_do_no_less_together(ways, width, context):
    split = replace(A100, ways=ways)
    whole, part = float(A100.layer(width, context).seconds), float(split.layer(width, context).seconds)
    assert part * ways > whole  # launching and reductions are not shared
    joining = 2 * float(split.all_reduce(width * SHAPE.hidden * 2))
    assert part > joining


def test_a_roofline_refuses_what_is_none():
    for more, message in (
        ({"bandwidth": 0}, "bandwidth must be at least 1, got 0"),
        ({"ways": 0}, "ways must be at least 1, got 0"),
        ({"latency": -1.0}, "latency must be at least 0, got -1.0"),
    ):
        with pytest.raises(ParameterError, match=message):
            replace(A100, **more)
    with pytest.raises(ParameterError, match=r"memory must be above 0, got 0\.0"):
        Efficiency(memory=0.0)
    with pytest.raises(ParameterError, match="launch must be between 0 and 10, got -1"):
        Efficiency(launch=-1)


# --- a profile ---


def test_a_pass_is_the_sum_of_what_was_measured():
    cost = Measured(profile(SPLIT))
    layers = cost.shape.layers
    found = pass_time(cost, 1, 1024, 4)
    want = layers * ((1e-4 + 4e-6) + (1e-5 + 1e-9 * 4096)) + (3e-4 + 4e-6) + 5e-6 + 1e-3
    # Embedding and head lie between measured points; the embedding takes the same time everywhere.
    assert float(found.seconds) == pytest.approx(want, rel=2e-3)
    assert float(cost.layer(1, 1024, 4).seconds) == (1e-4 + 4e-6) + (1e-5 + 1e-9 * 4096)
    assert cost.missing == ()
    assert cost.provenance == "measured (by hand)"


def test_layers_split_over_devices_have_their_own_times_and_two_reductions():
    one, two = Measured(profile(SPLIT)), Measured(profile(SPLIT), ways=2)
    size = 4 * one.shape.hidden * 2
    reduction = float(two.surface("all_reduce")(size).seconds)
    # Half of the cache for each: what a batch of half as many takes.
    attention = float(one.attention(1, 128, 4 / 2).seconds)
    assert float(two.layer(1, 128, 4).seconds) == pytest.approx(1e-4 / 2 + 4e-6 + attention + 2 * reduction)
    assert float(two.head(8).seconds) == pytest.approx(float(one.head(8).seconds) / 2)
    with pytest.raises(ParameterError, match="ways must be one of 1, 2, what profile tiny has, got 4"):
        Measured(profile(SPLIT), ways=4)


def test_whole_layers_are_looked_up_by_how_busy_the_host_is():
    rows = [
        {"part": "layer", "width": w, "context": 64, "batch": 1, "busy": busy, "time_s": 1e-4 * w * (1 + 0.2 * busy)}
        for w in (1, 2)
        for busy in (0, 1)
    ]
    cost = Measured(profile(rows))
    assert float(cost.layer(2, 64, busy=1).seconds) == 1e-4 * 2 * 1.2
    with pytest.raises(ParameterError, match="busy must be one of 0, 1, what profile tiny has, got 2; measure it"):
        cost.layer(1, 64, busy=2)
    with pytest.raises(ParameterError, match="busy must be 0, what profile tiny has, got 1"):
        Measured(profile(SPLIT)).layer(1, 128, busy=1)
    assert cost.missing == ("head", "embedding", "step", "send")
    assert float(cost.head(3).seconds) == float(cost.transfer(100).seconds) == 0


@given(WIDTHS, CONTEXTS, BATCHES)
def test_no_time_of_a_profile_is_below_what_it_was_measured_at_by_efficiency(width, context, batch):
    cost = Measured(profile(SPLIT))
    found = cost.layer(width, context, batch)
    assert float(found.seconds) > 0
    assert float(found.error) >= 0
    more = cost.layer(width + 64, context + 8192, batch + 64)
    assert float(more.seconds) > float(found.seconds)
    assert float(more.error) > 0  # beyond what was measured


def test_a_profile_of_something_else_is_no_cost_of_a_pass():
    rows = [{"part": "gemm", "m": 1, "n": 8, "k": 8, "time_s": 1e-5}]
    with pytest.raises(ParameterError, match="profile tiny is one of operations; a pass needs one of a model"):
        Measured(profile(rows, kind="operations"))


# --- passes ---


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


def test_the_largest_batch_is_the_last_at_which_width_is_nearly_free():
    most = hardware.largest_batch(A100, 512, 8)
    wide, one = (np.array([float(pass_time(A100, w, 512, b).seconds) for b in (most, most + 1)]) for w in (8, 1))
    assert wide[0] <= 2 * one[0]
    assert wide[1] > 2 * one[1]
    assert hardware.largest_batch(Uniform(SHAPE, 1e-3), 512, 8, most=16) == 16
    assert hardware.largest_batch(A100, 0, 4096) == 0


@given(st.sampled_from(["llama-2-7b", "llama-2-70b", "llama-3.1-8b"]), st.integers(0, 4096), st.integers(1, 32))
def test_memory_is_weights_and_cache(name, context, batch):
    shape = preset(name)
    found = memory(shape, 80e9, context=context, batch=batch)
    assert found.weights == shape.parameters * 2
    assert found.cache == 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * context * batch
    split = memory(shape, 80e9, context=context, batch=batch, ways=8)
    assert split.needed < found.needed
    beside = memory(shape, 80e9, context=context, batch=batch, also=(preset("llama-68m"),))
    assert beside.weights - found.weights == preset("llama-68m").parameters * 2
    assert found.share == pytest.approx(found.needed / 80e9)
    if found.share > 1:
        with pytest.raises(ParameterError, match=r"weights \(.* GB\) and cache \(.* GB\) must be at most the 80\.0 GB of a100"):
            hardware.refuse_too_large(found, "a100")
    else:
        hardware.refuse_too_large(found, "a100")


# --- the operating point ---


@given(st.integers(0, 4096), st.integers(1, 512), st.integers(1, 16), st.integers(1, 40))
def test_layer_times_and_seconds_are_passes_again(prompt, tokens, batch, widest):
    draft = Roofline(preset("llama-68m"), A100.bandwidth, A100.rate)
    at = operating_point(A100, prompt=prompt, tokens=tokens, batch=batch, draft=draft, widest=widest, handed_over=20)
    cost, context = at.cost, prompt + tokens // 2
    step = float(step_time(A100, context, batch).seconds)
    assert cost.target_pass * at.seconds_per_layer == pytest.approx(step, rel=1e-12)
    for width in {1, widest}:
        wide = float(pass_time(A100, width, context, batch).seconds)
        assert cost.target_pass * cost.slowdown(width) * at.seconds_per_layer == pytest.approx(wide, rel=1e-9)
    drafted = float(step_time(draft, context, batch).seconds)
    assert cost.required("draft") * at.seconds_per_layer == pytest.approx(drafted, rel=1e-12)
    assert cost.promotion > cost.link > 0
    # What may be wrong makes everything but the target's single step slower, or faster.
    assert at.slow.cost_ratio > cost.cost_ratio > at.fast.cost_ratio
    assert at.slow.slowdown(widest) >= cost.slowdown(widest) >= at.fast.slowdown(widest)
    assert at.slow.target_pass == cost.target_pass == at.fast.target_pass
    first, last = (float(step_time(A100, each, batch).seconds) for each in (prompt, prompt + tokens))
    assert at.drift == pytest.approx((last - first) / step)
    # The middle of the text stands for all of it: off by far less than the growth.
    every = sum(float(step_time(A100, prompt + index, batch).seconds) for index in range(tokens))
    assert every / (tokens * step) == pytest.approx(1, abs=at.drift / 4 + 1e-9)


def test_widths_may_be_texts_of_a_batch():
    at = operating_point(A100, prompt=100, tokens=50, widest=8, texts=True)
    wide = float(pass_time(A100, 1, 125, 8).seconds)
    assert at.cost.target_pass * at.cost.slowdown(8) * at.seconds_per_layer == pytest.approx(wide, rel=1e-9)


def test_what_a_pass_takes_once_stands_before_its_first_layer():
    cost = Measured(profile(SPLIT))
    at = operating_point(cost, prompt=128, tokens=2)
    before = float(cost.step().seconds + cost.embedding(1).seconds) / at.seconds_per_layer
    assert at.cost.layer_times == (1 + before, 1.0)
    assert at.cost.final_head == at.cost.early_head == pytest.approx(float(cost.head(1).seconds) / at.seconds_per_layer)


def test_overheads_are_added_to_what_the_hardware_takes():
    without = operating_point(A100, prompt=128, tokens=2).cost
    found = operating_point(A100, prompt=128, tokens=2, more={"link": 0.5, "promotion": 0.25, "dispatch": 2.0}).cost
    assert found.link == without.link + 0.5
    assert found.promotion == without.promotion + 0.25
    assert (found.dispatch, without.dispatch) == (2.0, 0.0)


def test_curves_of_wide_methods_are_exact_up_to_64_and_reach_the_widest():
    at = operating_point(A100, prompt=128, tokens=2, widest=1000)
    widths = [width for width, _ in at.cost.verify_cost]
    assert widths[:64] == list(range(1, 65))
    assert widths[-1] == 1000
    assert all(after <= before * 1.1 + 1 for before, after in pairwise(widths[63:]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": -1}, "prompt must be at least 0, got -1"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_an_operating_point_is_one_of_some_text(more, message):
    with pytest.raises(ParameterError, match=message):
        operating_point(A100, **{"prompt": 1, "tokens": 1} | more)


def test_layers_that_take_no_time_are_refused():
    with pytest.raises(ParameterError, match="a layer must take time, got 0 s at context 2 and batch 1"):
        operating_point(Uniform(SHAPE, 0.0), prompt=1, tokens=2)
