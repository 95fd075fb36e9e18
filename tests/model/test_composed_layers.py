"""Layers out of operations: what follows for tables that obey a law, whatever the law is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.transformer import Shape, preset
from model.base.checks import ParameterError
from model.hardware import composed_layers, profile
from model.hardware.profile import Profile, Source

BANDWIDTH, RATE, LAUNCH = 1e12, 1e14, 3e-6
MS, NS = (1, 2, 4, 8, 16, 64, 512), (512, 1024, 2048, 4096, 8192, 16384, 32768)
SMALL = Shape(4, 2048, 16, 4, 128, 8192, True, 32_000, False)


def roofline(m: float, n: float, k: float) -> float:
    """A device without kernels: its peaks behind a launch."""
    return max(2 * (n * k + m * (n + k)) / BANDWIDTH, 2 * m * n * k / RATE) + LAUNCH


def operations(gemm: Callable[[int, int, int], float], decode: Iterable[dict[str, Any]] = (), **more: Any) -> Profile:
    rows = [{"part": "gemm", "m": m, "n": n, "k": k, "time_s": gemm(m, n, k)} for m, n, k in product(MS, NS, NS)]
    rows += [{"part": "decode", **row} for row in decode]
    return Profile(
        name="made-up", device="made-up", model="", dtype="bfloat16", engine="", mode="cuda-graph", kind="operations",
        provenance="measured", date="", bandwidth=BANDWIDTH, rate=RATE, cache_bytes=0.0, table=profile.table_of(rows),
        sources=(Source("a test", "none"),), **more,
    )  # fmt: skip


def decoded(
    time: Callable[[int, int, int], float], heads: Iterable[tuple[int, int]] = ((16, 4), (32, 8), (8, 8))
) -> list[dict[str, Any]]:
    """Attention that goes by what is read, (heads over kv_heads, batch times kv_heads, context), alone."""
    return [
        {"heads": many, "kv_heads": few, "head_dim": 128, "context": context, "batch": batch,
         "time_s": time(many // few, batch * few, context)}
        for (many, few), context, batch in product(heads, (0, 15, 127, 1023, 4095), (1, 2, 4, 8))
    ]  # fmt: skip


# --- products ---


def test_a_measured_product_is_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    times = {place: 1e-5 * rng.random() + LAUNCH for place in product(MS, NS, NS)}
    products = composed_layers.Products(operations(lambda m, n, k: times[m, n, k]))
    for (m, n, k), time in times.items():
        assert float(products(m, n, k)) == pytest.approx(time, rel=1e-12)


@given(m=st.integers(1, 600), n=st.integers(256, 150_000), k=st.integers(256, 150_000))
def test_on_a_device_of_even_efficiency_every_product_comes_out_right(m: int, n: int, k: int) -> None:
    """Inside the table and beyond it: efficiency is what is interpolated and held, not time; rows fill their last tile."""
    share = 0.8
    products = composed_layers.Products(operations(lambda m, n, k: roofline(m, n, k) / share))
    rows = m if m <= 64 else 64 * math.ceil(m / 64)
    # The shortest product, not the launch alone, is what stands for a launch: it is in what is interpolated, too.
    assert float(products(m, n, k)) == pytest.approx(roofline(rows, n, k) / share, rel=0.12)
    if min(n, k) >= 4096:
        assert float(products(m, n, k)) == pytest.approx(roofline(rows, n, k) / share, rel=0.03)


def test_rows_beyond_a_tile_take_what_whole_tiles_do_and_no_more_than_the_next_that_were_measured() -> None:
    table = operations(roofline)
    rows = [{"part": "gemm", "m": m, "n": 512, "k": 512, "time_s": 1e-6 * m} for m in (1, 64, 65, 100, 512)]
    products = composed_layers.Products(replace(table, table=profile.table_of(rows)))
    for m, same in ((66, 100), (99, 100), (101, 128), (128, 128), (129, 192), (500, 512), (600, 640)):
        assert float(products(m, 512, 512)) == pytest.approx(float(products(same, 512, 512)))
    assert [float(products(m, 512, 512)) for m in (1, 64, 65, 100, 512)] == pytest.approx([1e-6, 64e-6, 65e-6, 100e-6, 512e-6])
    assert float(products(30, 512, 512)) < float(products(31, 512, 512))  # one tile at most: between its rows nothing is filled
    assert products.steps(200).tolist() == [1, 64, 65, 100, 128, 129, 192, 193]
    assert products.steps(9999).max() == 512


@given(st.lists(st.floats(0.1, 10), min_size=len(MS), max_size=len(MS)))
def test_steps_in_m_that_all_shapes_share_are_found_again(steps: list[float]) -> None:
    """time = f(n, k) g(m): what shapes beside it take at this m goes with it, whatever g is, and nothing is left."""
    factor = dict(zip(MS, steps, strict=True))
    found = composed_layers.gemm_left_out(operations(lambda m, n, k: factor[m] * (n * k) ** 0.7 * 1e-9))
    assert found.error.size == (len(MS) - 2) * len(NS) ** 2
    assert np.abs(found.error).max() < 1e-9
    assert {*found.at} == {*MS[1:-1]}


def test_what_is_left_out_is_not_looked_at() -> None:
    """One time of a smooth table is doubled: its own prediction does not know of it."""
    odd = (8, 4096, 4096)
    found = composed_layers.gemm_left_out(operations(lambda m, n, k: 1e-6 * m**0.5 * (2 if (m, n, k) == odd else 1)))
    assert found.error.min() == pytest.approx(-0.5)  # predicted half of what was measured
    assert found.median() == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3))
def test_no_time_has_a_say_in_its_own_prediction(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    times = {place: 1e-5 * rng.random() + LAUNCH for place in product(MS, NS, NS)}
    chosen = (MS[rng.integers(1, len(MS) - 1)], NS[rng.integers(len(NS))], NS[rng.integers(len(NS))])
    before = composed_layers.gemm_left_out(operations(lambda *place: times[place]))
    after = composed_layers.gemm_left_out(operations(lambda *place: times[place] * (factor if place == chosen else 1)))
    one = [*product(NS, NS, MS[1:-1])].index((chosen[1], chosen[2], chosen[0]))
    assert after.at[one] == chosen[0]
    # What was predicted is the same, so what it is of the time goes with one over the factor.
    assert (1 + after.error[one]) * factor == pytest.approx(1 + before.error[one])


def test_a_step_that_only_some_shapes_take_is_told_by_most() -> None:
    """From n = 4096 on a kernel runs at m = 8 that takes twice as long: shapes on either side of that do not mislead each other."""
    made = operations(lambda m, n, k: 1e-6 * (m * n * k) ** 0.5 * (2 if m == 8 and n >= 4096 else 1))
    found = composed_layers.gemm_left_out(made)
    assert np.abs(found.error).max() == pytest.approx(0, abs=1e-12)
    alone = composed_layers.gemm_left_out(made, ())
    assert alone.error.min() == pytest.approx(-0.5)  # at m = 8, halfway between 4 and 16


def test_a_shape_without_others_beside_it_is_interpolated() -> None:
    """A table of one shape, and one whose only other shape lacks this m."""
    whole = operations(lambda m, n, k: 1e-6 * m**0.5 * (3 if m == 8 else 1))
    part, m, n, k = (whole.table[name] for name in ("part", "m", "n", "k"))
    single = replace(whole, table=whole.table.filter((part == "gemm") & (n == 512) & (k == 512)))
    assert composed_layers.gemm_left_out(single).error == pytest.approx(composed_layers.gemm_left_out(single, ()).error)
    two = replace(whole, table=whole.table.filter((n == 512) & (k <= 1024) & ((k == 512) | (m != 8))))
    found = composed_layers.gemm_left_out(two)
    assert found.at.tolist() == [2, 4, 8, 16, 64, 2, 4, 16, 64]
    assert found.error == pytest.approx([0, 0, -2 / 3, 0, 0, 0, 0, 0, 0], abs=1e-12)


def test_left_out_errors_are_relative_to_what_was_measured() -> None:
    found = composed_layers.LeaveOneOutErrors(np.array([1.0, 2.0, 40.0]), np.array([0.1, -0.3, 0.5]))
    assert found.median() == 0.3
    assert found.median(high=2) == pytest.approx(0.2)
    assert np.isnan(found.median(low=50))
    assert found.percentile(100) == 0.5


def test_what_a_table_says_of_its_errors_is_what_a_lookup_between_its_points_misses() -> None:
    """Steps that all shapes share are found again beside others, but an m or a context that nobody was timed at has no others."""
    factor = dict(zip(MS, (1, 3, 1, 3, 1, 3, 1), strict=True))
    later = {0: 1, 15: 2, 127: 1, 1023: 2, 4095: 1}
    attention = decoded(lambda group, read, context: 1e-6 * later[context] * read)
    made = composed_layers.with_errors(operations(lambda m, n, k: 1e-6 * factor[m] * (n * k) ** 0.5, attention))
    assert composed_layers.gemm_left_out(made).median() == pytest.approx(0, abs=1e-12)
    assert composed_layers.attention_left_out(made).median() == pytest.approx(0, abs=1e-12)
    # Of the inner times three are told as a third of what they are, two as three times that; of attention two as half.
    assert made.errors == {"gemm": round(2 / 3, 4), "decode": 0.5}


# --- attention ---


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_steps_in_context_that_go_by_bytes_are_found_again(steps: list[float]) -> None:
    factor = dict(zip((0, 15, 127, 1023, 4095), steps, strict=True))
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * factor[context] * read))
    found = composed_layers.attention_left_out(made)
    # Alone in reading as many bytes are those of 4 and 64 heads times texts; all others have company.
    alone = {4: 1, 64: 2}
    assert found.error.size == 3 * 12
    assert (np.abs(found.error) < 1e-9).sum() >= 3 * (12 - alone[4])


def test_heads_that_were_measured_are_taken_as_they_are() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * group * read * (context + 2)))
    attention = composed_layers.AttentionTimes(made, 32, 8, 128)
    assert attention.measured
    assert float(attention(127, 4)) == pytest.approx(1e-6 * 4 * 32 * 129)


def test_heads_that_were_not_are_those_of_their_group_that_read_as_much() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * group * read * (context + 2)))
    attention = composed_layers.AttentionTimes(made, 64, 16, 128)
    assert not attention.measured
    for batch in (1, 2, 4):
        assert float(attention(1023, batch)) == pytest.approx(1e-6 * 4 * 16 * batch * 1025)
    assert attention.near(1023, 4)
    assert not attention.near(1023, 8)
    assert not attention.near(1000, 1)


def test_attention_out_of_the_cache_is_held_to_the_memory() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6))
    attention = composed_layers.AttentionTimes(made, 32, 8, 128)
    assert float(attention(4095, 8)) == 1e-6
    assert float(attention.cold(4095, 8)) == pytest.approx(2 * 8 * 8 * 4096 * 128 * 2 / BANDWIDTH)


# --- layers ---


def times(made: Profile, part: str, tensor_parallel: int = 1) -> np.ndarray[Any, Any]:
    return made.rows(part, tensor_parallel)["time_s"].to_numpy()


def test_a_layer_is_its_products_and_what_lies_between() -> None:
    table = operations(roofline)
    made = composed_layers.layer(table, SMALL, model="small")
    tokens = made.rows("dense")["tokens"].to_numpy()
    assert tokens.tolist() == [1, 2, 4, 8, 16, 64, 65, 128, 129, 192, 193, 256, 257, 320, 321, 384, 385, 448, 449, 512]
    products = [(2048 + 2 * 512, 2048), (2048, 2048), (2 * 8192, 2048), (2048, 8192)]
    filled = [m if m <= 64 else 64 * math.ceil(m / 64) for m in tokens.tolist()]
    expected = sum(np.array([roofline(m, n, k) for m in filled]) for n, k in products)
    # Two norms of two states read and two written, queries and keys rotated, gate and up read and one written; four launches. A
    # block has a token to itself: few tokens take as long as one.
    row = 2 * (8 * 2048 + 2 * (2048 + 512) + 3 * 8192)
    shortest = roofline(1, 512, 512)
    moved = np.maximum(tokens * row / (composed_layers.SMALL_SHARE * BANDWIDTH), row / composed_layers.SMALL_LANE)
    expected = expected + moved + 4 * shortest
    assert times(made, "dense") == pytest.approx(expected, rel=0.02)
    assert (made.kind, made.provenance, made.model) == ("model", "composed", "small")
    assert any(note.startswith("assumed: norms") for note in made.notes)


def test_attention_that_rotates_saves_the_layer_a_kernel() -> None:
    table = operations(roofline)
    fused = replace(table, facts={"decode_includes": [composed_layers.ROPE]})
    less = times(composed_layers.layer(table, SMALL), "dense") - times(composed_layers.layer(fused, SMALL), "dense")
    row, tokens = 2 * 2 * (2048 + 512), composed_layers.layer(table, SMALL).rows("dense")["tokens"].to_numpy()
    moved = np.maximum(tokens * row / (composed_layers.SMALL_SHARE * BANDWIDTH), row / composed_layers.SMALL_LANE)
    assert less == pytest.approx(moved + roofline(1, 512, 512))


def test_models_without_gate_rotation_or_second_norm_have_less_to_do() -> None:
    table = operations(roofline)
    plain = composed_layers.layer(table, replace(SMALL, gated=False))
    assert (times(plain, "dense") < times(composed_layers.layer(table, SMALL), "dense")).all()
    launches = roofline(1, 512, 512)
    for change, states in (({"positions": 2048}, 2 * (2048 + 512)), ({"norms": 1}, 4 * 2048)):
        less = times(composed_layers.layer(table, SMALL), "dense") - times(
            composed_layers.layer(table, replace(SMALL, **change)), "dense"
        )
        assert less[0] == pytest.approx(launches + 2 * states / composed_layers.SMALL_LANE, rel=1e-6)


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_a_split_layer_is_the_layer_of_what_each_device_holds(tensor_parallel: int) -> None:
    table = operations(roofline, decoded(lambda group, read, context: 1e-7 * group * read * (context + 2)))
    split, one = (
        composed_layers.layer(table, SMALL, [1, tensor_parallel]),
        composed_layers.layer(table, SMALL.shard(tensor_parallel)),
    )
    for part in ("dense", "head", "attention"):
        assert times(split, part, tensor_parallel) == pytest.approx(times(one, part))
    for part in ("dense", "head"):
        assert (times(split, part, tensor_parallel) < times(split, part)).all()
    assert split.tensor_parallel == (1, tensor_parallel)


def test_reductions_come_along_for_the_ways_that_are_asked_for() -> None:
    rows = [{"part": "gemm", "m": 1, "n": 512, "k": 512, "time_s": 1e-5}]
    rows += [
        {"part": "all_reduce", "size": 1024, "tensor_parallel": tensor_parallel, "time_s": 1e-6 * tensor_parallel}
        for tensor_parallel in (2, 4, 8)
    ]
    table = replace(operations(roofline), table=profile.table_of(rows))
    made = composed_layers.layer(table, SMALL, [1, 4])
    assert times(made, "all_reduce", 4).tolist() == [4e-6]
    assert not times(made, "all_reduce", 2).size


def test_weights_out_of_the_cache_are_held_to_the_memory() -> None:
    """Products that were measured with their weights in the cache do not make a layer faster than its weights are read."""
    warm = composed_layers.layer(operations(lambda m, n, k: 1e-7 * m**0.1), SMALL)
    assert times(warm, "dense")[0] >= SMALL.layer_weight_bytes / BANDWIDTH
    assert times(warm, "head")[0] >= SMALL.head_weights * 2 / BANDWIDTH


def test_what_cannot_be_composed_is_refused() -> None:
    table = operations(roofline, decoded(lambda group, read, context: 1e-6))
    with pytest.raises(ParameterError, match="encoder_layers must be 0, got 6"):
        composed_layers.layer(table, preset("t5-small"))
    with pytest.raises(ParameterError, match="tensor_parallel must divide heads=16, got 3"):
        composed_layers.layer(table, SMALL, 3)
    with pytest.raises(ParameterError, match="head_dim must be one of 128, .* for which profile made-up has attention, got 64"):
        composed_layers.layer(table, replace(SMALL, head_dim=64))
    model = composed_layers.layer(table, SMALL, name="m")
    for refused in (composed_layers.Products, composed_layers.gemm_left_out, composed_layers.attention_left_out):
        with pytest.raises(ParameterError, match="profile m must be of kind operations to compose a layer, got kind model"):
            refused(model)
    with pytest.raises(ParameterError, match="profile made-up has no rows of part decode"):
        composed_layers.attention_left_out(operations(roofline))


def test_differences_are_relative_to_what_was_measured() -> None:
    table = operations(roofline)
    made = composed_layers.layer(table, SMALL)
    slower = replace(made, table=made.table.with_columns(time_s=made.table["time_s"] * 2, high_s=made.table["high_s"] * 2))
    found = composed_layers.differences(made, slower, most=16)
    assert found.at.tolist() == [1, 2, 4, 8, 16]
    assert found.error == pytest.approx(np.full(5, -0.5))
