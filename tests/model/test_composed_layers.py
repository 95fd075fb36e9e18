"""Layers composed from operations: properties for tables that follow a known law."""

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

from model.architectures.published_shapes import preset
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.hardware import composed_layers, profile
from model.hardware.profile import Profile, Source

BANDWIDTH, RATE, LAUNCH = 1e12, 1e14, 3e-6
MS, NS = (1, 2, 4, 8, 16, 64, 512), (512, 1024, 2048, 4096, 8192, 16384, 32768)
SMALL = Shape(4, 2048, 16, 4, 128, 8192, True, 32_000, False)


def roofline(m: float, n: float, k: float) -> float:
    """An ideal device: its peaks after a launch."""
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
    """Attention rows whose time depends only on (heads over kv_heads, batch times kv_heads, context)."""
    return [
        {"heads": many, "kv_heads": few, "head_dim": 128, "context": context, "batch": batch,
         "time_s": time(many // few, batch * few, context)}
        for (many, few), context, batch in product(heads, (0, 15, 127, 1023, 4095), (1, 2, 4, 8))
    ]  # fmt: skip


# --- Products ---


def test_measured_products_are_returned_exactly() -> None:
    rng = np.random.default_rng(0)
    times = {place: 1e-5 * rng.random() + LAUNCH for place in product(MS, NS, NS)}
    products = composed_layers.Products(operations(lambda m, n, k: times[m, n, k]))
    for (m, n, k), time in times.items():
        assert float(products(m, n, k)) == pytest.approx(time, rel=1e-12)


@given(m=st.integers(1, 600), n=st.integers(256, 150_000), k=st.integers(256, 150_000))
def test_products_are_exact_at_uniform_efficiency(m: int, n: int, k: int) -> None:
    """Inside the table and beyond it: the efficiency is interpolated and held, not the time; rows are padded to tiles."""
    share = 0.8
    products = composed_layers.Products(operations(lambda m, n, k: roofline(m, n, k) / share))
    rows = m if m <= 64 else 64 * math.ceil(m / 64)
    # The shortest product stands for a launch, also inside the interpolation.
    assert float(products(m, n, k)) == pytest.approx(roofline(rows, n, k) / share, rel=0.12)
    if min(n, k) >= 4096:
        assert float(products(m, n, k)) == pytest.approx(roofline(rows, n, k) / share, rel=0.03)


def test_rows_beyond_a_tile_are_padded_to_tiles_or_the_next_point() -> None:
    table = operations(roofline)
    rows = [{"part": "gemm", "m": m, "n": 512, "k": 512, "time_s": 1e-6 * m} for m in (1, 64, 65, 100, 512)]
    products = composed_layers.Products(replace(table, table=profile.table_of(rows)))
    for m, same in ((66, 100), (99, 100), (101, 128), (128, 128), (129, 192), (500, 512), (600, 640)):
        assert float(products(m, 512, 512)) == pytest.approx(float(products(same, 512, 512)))
    assert [float(products(m, 512, 512)) for m in (1, 64, 65, 100, 512)] == pytest.approx([1e-6, 64e-6, 65e-6, 100e-6, 512e-6])
    assert float(products(30, 512, 512)) < float(products(31, 512, 512))  # at most one tile: rows are not padded
    assert products.steps(200).tolist() == [1, 64, 65, 100, 128, 129, 192, 193]
    assert products.steps(9999).max() == 512


@given(st.lists(st.floats(0.1, 10), min_size=len(MS), max_size=len(MS)))
def test_steps_in_m_shared_by_all_shapes_are_predicted(steps: list[float]) -> None:
    """time = f(n, k) g(m): neighbouring shapes at the same m predict it exactly for any g."""
    factor = dict(zip(MS, steps, strict=True))
    found = composed_layers.gemm_left_out(operations(lambda m, n, k: factor[m] * (n * k) ** 0.7 * 1e-9))
    assert found.error.size == (len(MS) - 2) * len(NS) ** 2
    assert np.abs(found.error).max() < 1e-9
    assert {*found.at} == {*MS[1:-1]}


def test_the_left_out_time_is_not_used() -> None:
    """One time of a smooth table is doubled: its prediction does not change."""
    odd = (8, 4096, 4096)
    found = composed_layers.gemm_left_out(operations(lambda m, n, k: 1e-6 * m**0.5 * (2 if (m, n, k) == odd else 1)))
    assert found.error.min() == pytest.approx(-0.5)  # the prediction is half of the measured time
    assert found.median() == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 2**32), st.floats(1e-3, 1e3))
def test_no_time_affects_its_own_prediction(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    times = {place: 1e-5 * rng.random() + LAUNCH for place in product(MS, NS, NS)}
    chosen = (MS[rng.integers(1, len(MS) - 1)], NS[rng.integers(len(NS))], NS[rng.integers(len(NS))])
    before = composed_layers.gemm_left_out(operations(lambda *place: times[place]))
    after = composed_layers.gemm_left_out(operations(lambda *place: times[place] * (factor if place == chosen else 1)))
    one = [*product(NS, NS, MS[1:-1])].index((chosen[1], chosen[2], chosen[0]))
    assert after.at[one] == chosen[0]
    # The prediction is the same, so its ratio to the time is divided by the factor.
    assert (1 + after.error[one]) * factor == pytest.approx(1 + before.error[one])


def test_a_step_of_some_shapes_is_predicted_by_the_median() -> None:
    """From n = 4096 on a kernel at m = 8 takes twice as long; shapes below and above are still predicted."""
    made = operations(lambda m, n, k: 1e-6 * (m * n * k) ** 0.5 * (2 if m == 8 and n >= 4096 else 1))
    found = composed_layers.gemm_left_out(made)
    assert np.abs(found.error).max() == pytest.approx(0, abs=1e-12)
    alone = composed_layers.gemm_left_out(made, ())
    assert alone.error.min() == pytest.approx(-0.5)  # at m = 8, halfway between 4 and 16


def test_a_shape_without_neighbours_is_interpolated_in_m() -> None:
    """A table of one shape, and a table whose only other shape lacks this m."""
    whole = operations(lambda m, n, k: 1e-6 * m**0.5 * (3 if m == 8 else 1))
    part, m, n, k = (whole.table[name] for name in ("part", "m", "n", "k"))
    single = replace(whole, table=whole.table.filter((part == "gemm") & (n == 512) & (k == 512)))
    assert composed_layers.gemm_left_out(single).error == pytest.approx(composed_layers.gemm_left_out(single, ()).error)
    two = replace(whole, table=whole.table.filter((n == 512) & (k <= 1024) & ((k == 512) | (m != 8))))
    found = composed_layers.gemm_left_out(two)
    assert found.at.tolist() == [2, 4, 8, 16, 64, 2, 4, 16, 64]
    assert found.error == pytest.approx([0, 0, -2 / 3, 0, 0, 0, 0, 0, 0], abs=1e-12)


def test_leave_one_out_errors_are_relative_to_measured_times() -> None:
    found = composed_layers.LeaveOneOutErrors(np.array([1.0, 2.0, 40.0]), np.array([0.1, -0.3, 0.5]))
    assert found.median() == 0.3
    assert found.median(high=2) == pytest.approx(0.2)
    assert np.isnan(found.median(low=50))
    assert found.percentile(100) == 0.5


def test_stated_errors_are_those_of_a_lookup_between_points() -> None:
    """Neighbouring shapes predict shared steps, but a lookup at an m or context without measurements has no neighbours."""
    factor = dict(zip(MS, (1, 3, 1, 3, 1, 3, 1), strict=True))
    later = {0: 1, 15: 2, 127: 1, 1023: 2, 4095: 1}
    attention = decoded(lambda group, read, context: 1e-6 * later[context] * read)
    made = composed_layers.with_errors(operations(lambda m, n, k: 1e-6 * factor[m] * (n * k) ** 0.5, attention))
    assert composed_layers.gemm_left_out(made).median() == pytest.approx(0, abs=1e-12)
    assert composed_layers.attention_left_out(made).median() == pytest.approx(0, abs=1e-12)
    # Of the inner times three are predicted as a third, two as three times their value; of attention two as half.
    assert made.errors == {"gemm": round(2 / 3, 4), "decode": 0.5}


# --- Attention ---


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_steps_in_context_by_bytes_read_are_predicted(steps: list[float]) -> None:
    factor = dict(zip((0, 15, 127, 1023, 4095), steps, strict=True))
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * factor[context] * read))
    found = composed_layers.attention_left_out(made)
    # Only 4 and 64 heads times sequences have no other shape with equal bytes.
    alone = {4: 1, 64: 2}
    assert found.error.size == 3 * 12
    assert (np.abs(found.error) < 1e-9).sum() >= 3 * (12 - alone[4])


def test_measured_heads_use_their_own_times() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * group * read * (context + 2)))
    attention = composed_layers.AttentionTimes(made, 32, 8, 128)
    assert attention.measured
    assert float(attention(127, 4)) == pytest.approx(1e-6 * 4 * 32 * 129)


def test_other_heads_use_the_group_at_equal_bytes() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6 * group * read * (context + 2)))
    attention = composed_layers.AttentionTimes(made, 64, 16, 128)
    assert not attention.measured
    for batch in (1, 2, 4):
        assert float(attention(1023, batch)) == pytest.approx(1e-6 * 4 * 16 * batch * 1025)
    assert attention.near(1023, 4)
    assert not attention.near(1023, 8)
    assert not attention.near(1000, 1)


def test_attention_from_the_cache_is_limited_by_memory() -> None:
    made = operations(roofline, decoded(lambda group, read, context: 1e-6))
    attention = composed_layers.AttentionTimes(made, 32, 8, 128)
    assert float(attention(4095, 8)) == 1e-6
    assert float(attention.cold(4095, 8)) == pytest.approx(2 * 8 * 8 * 4096 * 128 * 2 / BANDWIDTH)


# --- Layers ---


def times(made: Profile, part: str, tensor_parallel: int = 1) -> np.ndarray[Any, Any]:
    return made.rows(part, tensor_parallel)["time_s"].to_numpy()


def test_a_layer_is_its_products_and_elementwise_kernels() -> None:
    table = operations(roofline)
    made = composed_layers.layer(table, SMALL, model="small")
    tokens = made.rows("dense")["tokens"].to_numpy()
    assert tokens.tolist() == [1, 2, 4, 8, 16, 64, 65, 128, 129, 192, 193, 256, 257, 320, 321, 384, 385, 448, 449, 512]
    products = [(2048 + 2 * 512, 2048), (2048, 2048), (2 * 8192, 2048), (2048, 8192)]
    filled = [m if m <= 64 else 64 * math.ceil(m / 64) for m in tokens.tolist()]
    expected = sum(np.array([roofline(m, n, k) for m in filled]) for n, k in products)
    # Two norms that read and write two states, rotation of queries and keys, gate and up read and one written; four launches. A
    # block processes one token: few tokens take as long as one.
    row = 2 * (8 * 2048 + 2 * (2048 + 512) + 3 * 8192)
    shortest = roofline(1, 512, 512)
    moved = np.maximum(tokens * row / (composed_layers.SMALL_SHARE * BANDWIDTH), row / composed_layers.SMALL_LANE)
    expected = expected + moved + 4 * shortest
    assert times(made, "dense") == pytest.approx(expected, rel=0.02)
    assert (made.kind, made.provenance, made.model) == ("model", "composed", "small")
    assert any(note.startswith("assumed: norms") for note in made.notes)


def test_attention_with_rotary_embedding_saves_a_kernel() -> None:
    table = operations(roofline)
    fused = replace(table, facts={"decode_includes": [composed_layers.ROPE]})
    less = times(composed_layers.layer(table, SMALL), "dense") - times(composed_layers.layer(fused, SMALL), "dense")
    row, tokens = 2 * 2 * (2048 + 512), composed_layers.layer(table, SMALL).rows("dense")["tokens"].to_numpy()
    moved = np.maximum(tokens * row / (composed_layers.SMALL_SHARE * BANDWIDTH), row / composed_layers.SMALL_LANE)
    assert less == pytest.approx(moved + roofline(1, 512, 512))


def test_models_without_gate_rotation_or_second_norm_take_less() -> None:
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
def test_a_split_layer_is_the_layer_of_its_shard(tensor_parallel: int) -> None:
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


def test_reductions_are_included_for_the_given_tensor_parallel_sizes() -> None:
    rows = [{"part": "gemm", "m": 1, "n": 512, "k": 512, "time_s": 1e-5}]
    rows += [
        {"part": "all_reduce", "size": 1024, "tensor_parallel": tensor_parallel, "time_s": 1e-6 * tensor_parallel}
        for tensor_parallel in (2, 4, 8)
    ]
    table = replace(operations(roofline), table=profile.table_of(rows))
    made = composed_layers.layer(table, SMALL, [1, 4])
    assert times(made, "all_reduce", 4).tolist() == [4e-6]
    assert not times(made, "all_reduce", 2).size


def test_weights_from_the_cache_are_limited_by_memory() -> None:
    """Products measured with their weights in the cache do not make a layer faster than reading its weights from memory."""
    warm = composed_layers.layer(operations(lambda m, n, k: 1e-7 * m**0.1), SMALL)
    assert times(warm, "dense")[0] >= SMALL.layer_weight_bytes / BANDWIDTH
    assert times(warm, "head")[0] >= SMALL.head_weights * 2 / BANDWIDTH


def test_bad_input_of_composition_is_refused() -> None:
    table = operations(roofline, decoded(lambda group, read, context: 1e-6))
    with pytest.raises(ParameterError, match="encoder_layers must be 0, got 6"):
        composed_layers.layer(table, preset("t5-small"))
    with pytest.raises(ParameterError, match="tensor_parallel must divide heads=16, got 3"):
        composed_layers.layer(table, SMALL, 3)
    with pytest.raises(ParameterError, match=r"head_dim must be one of 128, .* for which profile made-up has attention, got 64"):
        composed_layers.layer(table, replace(SMALL, head_dim=64))
    model = composed_layers.layer(table, SMALL, name="m")
    for refused in (composed_layers.Products, composed_layers.gemm_left_out, composed_layers.attention_left_out):
        with pytest.raises(ParameterError, match="profile m must be of kind operations to compose a layer, got kind model"):
            refused(model)
    with pytest.raises(ParameterError, match="profile made-up has no rows of part decode"):
        composed_layers.attention_left_out(operations(roofline))


def test_differences_are_relative_to_measured_times() -> None:
    table = operations(roofline)
    made = composed_layers.layer(table, SMALL)
    slower = replace(made, table=made.table.with_columns(time_s=made.table["time_s"] * 2, high_s=made.table["high_s"] * 2))
    found = composed_layers.differences(made, slower, most=16)
    assert found.at.tolist() == [1, 2, 4, 8, 16]
    assert found.error == pytest.approx(np.full(5, -0.5))
