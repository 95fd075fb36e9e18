"""Sparse experts, latent attention, windows and quantised weights: limits, laws, and passes computed by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.layer_parts import (
    FORMATS,
    DraftInput,
    Experts,
    LatentAttention,
    QuantisedWeights,
    SlidingWindow,
    experts_read,
    quantised,
)
from model.architectures.published_shapes import PRESETS, preset
from model.architectures.transformer import Shape, described, restored
from model.base.checks import ParameterError
from model.hardware import composed_layers, profile_files
from model.hardware.cost_models import memory
from model.hardware.profile_costs import PEAKS
from model.hardware.roofline import SMALL_LAUNCH, Efficiency, Roofline
from model.interpret.account import Totals, Work, flops_and_bytes

TINY = Shape(3, 8, 4, 2, 2, 12, True, 100, False)
SPARSE = replace(TINY, experts=Experts(6, 2))
LATENT = replace(TINY, kv_heads=4, latent=LatentAttention(5, 6, 2, 3))
WIDTHS, CONTEXTS, BATCHES = st.integers(1, 6), st.integers(0, 30), st.integers(1, 9)
EXPERTS = st.integers(1, 12).flatmap(lambda count: st.builds(
    Experts, st.just(count), st.integers(1, count), shared=st.integers(0, 9), correlation=st.floats(0, 1)
))  # fmt: skip


# --- Sparse experts ---


@pytest.mark.parametrize(("count", "active", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 2), (5, 3, 2), (3, 3, 2)])
def test_experts_read_equal_the_mean_over_all_selections(count: int, active: int, tokens: int) -> None:
    """By enumeration: the mean size of the union of all equally likely selections."""
    each = [*combinations(range(count), active)]
    unions = [len(set().union(*chosen)) for chosen in product(each, repeat=tokens)]
    assert len(unions) == comb(count, active) ** tokens
    assert experts_read(count, active, tokens) == pytest.approx(sum(unions) / len(unions), rel=1e-12)


@given(EXPERTS, WIDTHS, BATCHES)
def test_experts_read_grow_from_one_selection_to_all(made: Experts, width: int, batch: int) -> None:
    found = float(made.read(width, batch))
    assert made.active * (1 - 1e-12) <= found <= made.count * (1 + 1e-12)
    assert made.read(1, 1) == made.active
    assert made.read(width + 1, batch) >= found * (1 - 1e-12)
    assert made.read(width, batch + 1) >= found * (1 - 1e-12)
    assert made.read(10**4, 10**4) == pytest.approx(made.count)
    # Correlated tokens read no more, and never fewer than one token of each sequence.
    alone, together = replace(made, correlation=0.0), replace(made, correlation=1.0)
    assert together.read(width, batch) == together.read(1, batch) <= found * (1 + 1e-12)
    assert found <= alone.read(width, batch) * (1 + 1e-12)


@given(st.integers(1, 9), st.booleans())
def test_all_experts_active_equal_one_dense_layer(count: int, gated: bool) -> None:
    """A layer of k = E experts multiplies each token with as many weights as a dense one of E times the width, and the router."""
    sparse = replace(TINY, gated=gated, experts=Experts(count, count))
    dense = replace(TINY, gated=gated, ffn=count * TINY.ffn)
    router = TINY.hidden * count
    assert sparse.layer_weights == sparse.active_layer_weights == dense.layer_weights + router
    assert sparse.layer_flops(3, 7, 2) == dense.layer_flops(3, 7, 2) + 2 * 3 * 2 * router
    assert sparse.layer_read_bytes(3, 2) == sparse.layer_weight_bytes == dense.layer_weight_bytes + 2 * router


@given(EXPERTS, WIDTHS, BATCHES, st.sampled_from([None, *FORMATS]))
def test_a_pass_reads_no_more_than_all_weights(made: Experts, width: int, batch: int, stored: str | None) -> None:
    shape = replace(TINY, experts=made, weights=None if stored is None else FORMATS[stored])
    found, more = float(shape.layer_read_bytes(width, batch)), float(shape.layer_read_bytes(width + 1, batch))
    assert shape.layer_read_bytes(1) * (1 - 1e-12) <= found <= shape.layer_weight_bytes * (1 + 1e-12)
    assert found <= more * (1 + 1e-12)


def test_one_sparse_pass_by_hand() -> None:
    """Three tokens of one sequence, six experts of which two are active: 6 (1 - (2/3)^3) = 38/9 are read."""
    attention, router, each = 8 * 8 + 2 * 8 * 4 + 8 * 8, 8 * 6, 3 * 8 * 12
    assert SPARSE.layer_weights == attention + router + 6 * each
    assert SPARSE.active_layer_weights == attention + router + 2 * each
    assert SPARSE.layer_read_bytes(3) == pytest.approx(2 * (attention + router + 38 / 9 * each))
    attended = 5 + 6 + 7 + 3  # three tokens after 5 positions, themselves included: 6, 7 and 8
    assert SPARSE.layer_flops(3, 5) == 2 * 3 * (attention + router + 2 * each) + 4 * 4 * 2 * attended
    assert SPARSE.operations(3, 5, heads=1) == 3 * SPARSE.layer_flops(3, 5) + 2 * 800
    bound = Roofline(SPARSE, 1e6, 1e30, PEAKS)
    activations = 3 * (8 + 16 + 8 + 8 + 8 + 6) + 3 * 2 * (8 + 24 + 12 + 8)
    assert float(bound.gemms(3)) == pytest.approx((SPARSE.layer_read_bytes(3) + 2 * activations) / 1e6)
    slow = Roofline(SPARSE, 1e30, 1e6, PEAKS)
    assert float(slow.gemms(3)) == pytest.approx(2 * 3 * (attention + router + 2 * each) / 1e6)
    kernels = float(Roofline(SPARSE, 1e30, 1e30, Efficiency(attention_launch=0)).gemms(3))
    assert kernels == pytest.approx(5 * 6.6e-6 + 6 * SMALL_LAUNCH)  # five products; two norms, four others


def test_correlation_saves_only_what_tokens_of_one_sequence_share() -> None:
    likely = replace(SPARSE, experts=replace(SPARSE.experts, correlation=0.75))
    times = {name: Roofline(made, 1e9, 1e15) for name, made in (("apart", SPARSE), ("alike", likely))}
    assert times["alike"].layer(1, 10, 5).seconds == times["apart"].layer(1, 10, 5).seconds
    assert times["alike"].layer(5, 10, 1).seconds < times["apart"].layer(5, 10, 1).seconds
    assert times["alike"].layer(5, 10, 1).seconds > times["apart"].layer(1, 10, 1).seconds
    assert likely.layer_read_bytes(5) == pytest.approx(SPARSE.layer_read_bytes(2))  # 1 + 4 / 4 independent tokens


def test_first_dense_layers_and_shared_experts() -> None:
    made = replace(TINY, experts=Experts(6, 2, shared=10, dense_layers=1, dense_ffn=30))
    (one, dense), (two, sparse) = made.kinds
    assert (one, two, dense.experts, dense.ffn) == (1, 2, None, 30)
    own = 6 * 3 * 8 * 12 + 3 * 8 * 10 + 8 * 6
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    assert (dense.layer_weights, sparse.layer_weights) == (attention + 3 * 8 * 30, attention + own)
    assert made.layer_weights * 3 == dense.layer_weights + 2 * sparse.layer_weights
    assert made.parameters == 3 * 2 * 8 + 8 + 1600 + dense.layer_weights + 2 * sparse.layer_weights
    for ask in (lambda shape: shape.layer_flops(3, 7, 2), lambda shape: shape.layer_read_bytes(3, 2)):
        assert 3 * ask(made) == pytest.approx(ask(dense) + 2 * ask(sparse))
    seconds = [float(Roofline(shape, 1e9, 1e12).layer(3, 7, 2).seconds) for shape in (made, dense, sparse)]
    assert 3 * seconds[0] == pytest.approx(seconds[1] + 2 * seconds[2])


# --- Latent attention ---


def test_one_latent_pass_by_hand() -> None:
    """Four heads with values of width 2 and keys of 3 + 2, from a cached vector of 6 + 2, queries from one of 5."""
    products = [8 * 5, 5 * 4 * 5, 8 * 8, 4 * 3 * 6, 4 * 6 * 2, 4 * 2 * 8]
    ffn = 3 * 8 * 12
    assert LATENT.layer_weights == LATENT.active_layer_weights == sum(products) + ffn
    assert LATENT.layer_parameters == LATENT.layer_weights + 2 * 8 + 5 + 6
    assert LATENT.cache_bytes(1) == 2 * (6 + 2)
    assert LATENT.layer_flops(2, 5) == 2 * 2 * LATENT.layer_weights + 2 * 4 * (6 + 2 + 6) * (6 + 7)
    assert LATENT.layer_kv_bytes(2, 5) == (5 + 2 + 2) * 16


def test_a_prompt_computes_the_keys_of_all_heads() -> None:
    """Scores of width 3 + 2 and values of width 2, instead of 6 + 2 and 6."""
    computed = Roofline(LATENT, 1e30, 1e6, PEAKS)
    seen = sum(range(1, 8))
    assert float(computed.attention(7, 0, 3)) == pytest.approx(3 * seen * 2 * 4 * (3 + 2 + 2) / 1e6)
    assert float(computed.attention(7, 1, 3)) == pytest.approx(3 * (seen + 7) * LATENT.attended_flops / 1e6)
    assert float(computed.attention(1, 0, 3)) == pytest.approx(3 * LATENT.attended_flops / 1e6)


def test_latent_attention_of_whole_width_equals_one_shared_key() -> None:
    """Without a rotated part and with a rank of a head's width: attention of many queries over one vector, half the cache."""
    latent = replace(TINY, kv_heads=4, latent=LatentAttention(0, 2, 0, 2))
    shared = replace(TINY, kv_heads=1)
    assert latent.attended_flops == shared.attended_flops
    assert 2 * latent.cache_bytes() == shared.cache_bytes()
    assert latent.layer_flops(3, 9) - latent.layer_flops(3, 8) == shared.layer_flops(3, 9) - shared.layer_flops(3, 8)


def test_each_device_has_the_whole_latent_cache() -> None:
    whole, part = preset("deepseek-v3"), preset("deepseek-v3").shard(8)
    assert part.cache_bytes() == whole.cache_bytes() == 61 * 576 * 2
    assert 8 * part.attended_flops == whole.attended_flops
    # Every device has the projections to the cached vectors and to queries' vector, and the router; all else is divided.
    everywhere = 61 * 7168 * (1536 + 576) + 58 * 7168 * 256
    assert 8 * sum(count * kind.layer_weights for count, kind in part.kinds) == (
        sum(count * kind.layer_weights for count, kind in whole.kinds) + 7 * everywhere
    )


# --- Sliding windows ---


@given(WIDTHS, CONTEXTS, BATCHES, st.integers(1, 40))
def test_a_window_limits_what_is_attended_to(width: int, context: int, batch: int, size: int) -> None:
    """Counted token by token; a window beyond the context changes nothing."""
    made = replace(TINY, window=SlidingWindow(size, 3))
    seen = sum(min(context + place + 1, size) for place in range(width))
    weights = 2 * width * TINY.layer_weights
    assert made.layer_flops(width, context, batch) == batch * (weights + TINY.attended_flops * seen)
    assert made.operations(width, context) == 3 * made.layer_flops(width, context)
    kept = min(context, size - 1)
    assert made.layer_kv_bytes(width, context, batch) == batch * (kept + 2 * width) * TINY.cache_bytes(1)
    assert made.cache_bytes_at(context) == min(context, size) * TINY.cache_bytes()
    assert memory(made, 1e9, context=context, batch=batch).cache == batch * made.cache_bytes_at(context)
    computed = Roofline(made, 1e30, 1e6, PEAKS).attention(width, context, batch)
    assert float(computed) == pytest.approx(batch * TINY.attended_flops * seen / 1e6)
    ours, theirs = (Roofline(shape, 1e9, 1e12).layer(width, context, batch) for shape in (made, TINY))
    assert ours.seconds <= theirs.seconds * (1 + 1e-12)
    if size >= context + width:
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-12)
        assert made.layer_flops(width, context) == TINY.layer_flops(width, context)


def test_windows_in_some_layers() -> None:
    made = replace(TINY, window=SlidingWindow(4, 2))
    windowed, full = replace(TINY, window=SlidingWindow(4, 3)), TINY
    for ask in (
        lambda shape: shape.layer_flops(2, 20, 3), lambda shape: shape.layer_kv_bytes(2, 20, 3),
        lambda shape: Roofline(shape, 1e9, 1e12).layer(2, 20, 3).seconds, lambda shape: shape.cache_bytes_at(20),
    ):  # fmt: skip
        assert 3 * ask(made) == pytest.approx(2 * ask(windowed) + ask(full))
    assert preset("gemma-3-27b").window == SlidingWindow(1024, 52)
    assert preset("gpt-oss-120b").window == SlidingWindow(128, 18)


# --- Quantised weights ---


def test_memory_of_a_quantised_llama() -> None:
    """Llama-3.1-70B: layers in 4 bits with a 16-bit scale for each 128 weights, embedding, head and norms in 16 bits."""
    made = replace(preset("llama-3.1-70b"), weights=FORMATS["int4"])
    layers = 80 * (8192 * 128 * (64 + 2 * 8 + 64) + 3 * 8192 * 28_672)
    rest = 2 * 128_256 * 8192 + (2 * 80 + 1) * 8192
    assert layers + rest == made.parameters == 70_553_706_496
    assert made.weight_bytes == layers * (4 + 16 / 128) / 8 + 2 * rest
    assert made.weight_bytes / 1e9 == pytest.approx(39.5, abs=0.01)
    assert memory(made, 80e9, context=1000, batch=2).weights == made.weight_bytes
    # Keys and values stay in 16 bits unless they have a type of their own.
    assert made.cache_bytes() == preset("llama-3.1-70b").cache_bytes() == 2 * replace(made, cache_dtype="float8").cache_bytes()


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_checkpoints_of_gpt_oss_have_their_published_size(name: str, gib: float) -> None:
    """Sizes of the model card (arXiv:2508.10925, Table 1): experts in mxfp4, 4.25 bits per weight."""
    assert round(preset(name).weight_bytes / 2**30, 1) == gib


@given(st.sampled_from([*FORMATS]), st.booleans(), BATCHES)
def test_weight_only_formats_change_bytes_not_operations(name: str, experts_only: bool, batch: int) -> None:
    stored = replace(FORMATS[name], experts_only=experts_only)
    for bare in (TINY, SPARSE):
        made = replace(bare, weights=stored)
        assert made.layer_flops(3, 5, batch) == bare.layer_flops(3, 5, batch)
        share = stored.bits / 16
        stored_so = {"experts"} if experts_only else {"experts", "layer"}
        changed = sum(each.weights for each in bare.products if each.part in stored_so)
        assert bare.layer_weight_bytes - made.layer_weight_bytes == pytest.approx(2 * changed * (1 - share))
        assert bare.weight_bytes - made.weight_bytes == pytest.approx(3 * 2 * changed * (1 - share))


def test_only_products_of_quantised_weights_use_their_rate() -> None:
    made = replace(TINY, weights=FORMATS["float8"])
    slow, fast = (Roofline(made, 1e30, 1e9, PEAKS, product_rate=rate) for rate in (None, 2e9))
    assert float(slow.gemms(64)) == pytest.approx(2 * float(fast.gemms(64)))
    assert slow.attention(3, 5, 2) == fast.attention(3, 5, 2)
    assert slow.head(3) == fast.head(3)
    # Memory-bound, times are proportional to the bytes.
    read = Roofline(made, 1e9, 1e30, PEAKS)
    activations = 2 * (8 + 16 + 8 + 8 + 8 + 24 + 12 + 8)
    assert float(read.gemms(1)) == pytest.approx((made.layer_weight_bytes + activations) / 1e9)


def test_formats_by_name() -> None:
    assert quantised("int4-g64") == QuantisedWeights("int4", 64)
    assert [FORMATS[name].bits for name in ("int4", "int8", "mxfp4", "nvfp4")] == [4.125, 8, 4.25, 4.5]
    assert FORMATS["float8"].bits == 8 + 32 / 128**2
    for wrong, meant in (("fp8", "float8"), ("awq", "int4"), ("bfloat16", "none"), ("INT4", "int4"), ("None", "none")):
        with pytest.raises(ParameterError, match=f"^unknown weights '{wrong}'; did you mean {meant}[?] known: "):
            quantised(wrong)
    for wrong in ("int4-g²", "int8-g٣٢", "int4-gx", "int5", "float8-g64", "int4-", "int4-g1000000"):
        with pytest.raises(ParameterError, match=f"^unknown weights '{wrong}'"):
            quantised(wrong)
    assert quantised("int4") == quantised("int4-g128")
    for group in (*range(8), 12, 100, 2**15):  # kernels read whole groups of a power of two
        with pytest.raises(
            ParameterError, match=f"^draft_weights must have groups of a power of two .* int8-g64, got int8-g{group}$"
        ):
            quantised(f"int8-g{group}", key="draft_weights")
    for name in (*FORMATS, "int4-g32", "int8-g16"):
        assert quantised(quantised(name).name) == quantised(name)


# --- Together ---


def test_a_bill_counts_what_the_passes_need() -> None:
    """Passes of one width at one context: the sums over passes, exactly."""
    made = replace(SPARSE, window=SlidingWindow(4, 1), weights=FORMATS["int4"])
    passes, width, context = 5, 3, 20
    layers, seen = 3 * passes, sum(context + place + 1 for place in range(width))
    totals = Totals(passes, layers, layers * width, layers * seen, layers * (context + width), head_runs=passes, heads=passes)
    found = flops_and_bytes(Work({"target": totals}), {"target": made})
    assert found.weight_bytes == pytest.approx(layers * float(made.layer_read_bytes(width)) + passes * 2 * made.head_weights)
    # The window of one of three layers applies to mean positions: a token sees 4, a pass reads 4.
    assert found.kv_read_bytes == pytest.approx(passes * made.cache_bytes(1) * (2 * (context + width) + 4))
    attended = passes * (2 * seen + width * 4)
    assert found.flops == pytest.approx(
        2 * layers * width * made.active_layer_weights + made.attended_flops * attended + 2 * passes * made.head_weights
    )


@pytest.mark.parametrize("name", [name for name, made in PRESETS.items() if made.special])
def test_layers_of_an_unmeasured_kind_are_not_composed(name: str) -> None:
    operations = profile_files.load("h100-operations")
    with pytest.raises(ParameterError, match=f"^profile h100-operations has no times of {preset(name).special}; .*kind 'roofline'"):
        composed_layers.layer(operations, preset(name))
    with pytest.raises(ParameterError, match="has no times of quantised weights"):
        composed_layers.layer(operations, replace(preset("llama-68m"), weights=FORMATS["int4"]))


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_survive_a_file(name: str) -> None:
    table = described(preset(name))
    assert all(isinstance(value, int | str | tuple | dict) for value in table.values())
    assert Shape(**restored(table)) == preset(name)


def test_a_dense_shape_is_described_by_the_same_fields_as_before() -> None:
    assert [*described(TINY)] == [
        "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocabulary", "tied_head", "encoder_layers", "dtype",
        "norm", "norms", "biases", "positions", "buckets", "qk_norms",
    ]  # fmt: skip


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Experts(4, 5), "experts.active must be between 1 and experts.count=4, got 5"),
    (lambda: Experts(4, 2, dense_layers=1), "experts.dense_layers and experts.dense_ffn must both be 0 or both above 0, got 1 and"),
    (lambda: Experts(4, 2, correlation=1.5), "experts.correlation must be between 0 and 1, got 1.5"),
    (lambda: LatentAttention(0, 0, 2, 2), "latent.rank must be at least 1, got 0"),
    (lambda: SlidingWindow(0, 2), "window.size must be at least 1, got 0"),
    (lambda: QuantisedWeights("int3"), "unknown weights.dtype 'int3'"),
    (lambda: DraftInput("eagle9"), "unknown draft.kind 'eagle9'"),
    (lambda: replace(TINY, window=SlidingWindow(4, 4)), "window.layers must be at most layers=3, got 4"),
    (lambda: replace(TINY, experts=Experts(4, 2, 0, 1, 8), window=SlidingWindow(4, 2)), "window.layers must be layers=3 after"),
    (lambda: replace(TINY, experts=4), "experts must be none or Experts"),  # type: ignore[arg-type]
    (lambda: replace(preset("t5-small"), experts=Experts(4, 2)), "encoder_layers must be 0 with experts"),
    (lambda: replace(TINY, cache_dtype="int4"), "unknown cache_dtype 'int4'"),
    (lambda: replace(TINY, experts=Experts(4, 2, shared=9)).shard(2), "tensor_parallel must divide experts.shared=9, got 2"),
    (lambda: SPARSE.matrices, "sparse experts has products of several matrices"),
    (lambda: restored({"layers": {"a": 1}}), "layers must be a number, a word or a list of words, got a table"),
    (lambda: restored({"experts": {"count": 1}}), "experts.active is required"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_parts_name_the_value_and_its_bound(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()


@given(WIDTHS, BATCHES, st.sampled_from(["qwen3-235b-a22b", "deepseek-v3", "gpt-oss-20b", "gemma-3-4b", "mixtral-8x7b"]))
def test_more_tokens_never_take_less_time(width: int, batch: int, name: str) -> None:
    made = Roofline(preset(name), 4.8e12, 989e12)
    grid = made.layer(np.arange(width, width + 3)[:, None], 700, np.arange(batch, batch + 3)).seconds
    for axis in (0, 1):
        assert np.all(np.diff(grid, axis=axis) >= -1e-15)
