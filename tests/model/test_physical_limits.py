"""Physical limits of times: bytes over the bandwidth, operations over the peak rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.architectures import transformer
from model.base.checks import ParameterError
from model.hardware import physical_limits, profile

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


# --- Physical limits ---


def of_layer(seconds: float, **more: Any) -> profile.Profile:
    """A profile with one layer of Llama-2-7B, 404.75 MB in 16 bits, on a device of 1 TB/s and 100 TFLOP/s."""
    row = {"part": "layer", "width": 1, "context": 0, "batch": 1, "time_s": seconds} | more.pop("row", {})
    source = profile.Source("someone", "rows.csv")
    said = {"kind": "model", "provenance": "measured", "date": "2026-11-21", "bandwidth": 1e12, "rate": 1e14, "cache_bytes": 0.0}
    made = {"name": "x", "device": "d", "model": "m", "dtype": "bfloat16", "engine": "e", "mode": "eager"}
    return profile.Profile(**made | said | {"table": profile.table_of([row]), "sources": (source,)} | more)


SEVEN = transformer.preset("llama-2-7b")


def test_weights_are_not_read_faster_than_memory_allows() -> None:
    least = float(SEVEN.layer_weight_bytes + SEVEN.layer_kv_bytes(1, 0)) / 1e12
    physical_limits.check(of_layer(least * 1.001), SEVEN)
    with pytest.raises(ParameterError, match=r"layer at width 1, context 0, batch 1: .*\(memory\)"):
        physical_limits.check(of_layer(least * 0.999), SEVEN)
    physical_limits.check(of_layer(least * 0.999), SEVEN, tolerance=0.01)
    physical_limits.check(of_layer(least / 4, row={"tensor_parallel": 4}), replace(SEVEN))  # four devices read it together
    with pytest.raises(ParameterError, match="memory"):
        physical_limits.check(of_layer(least / 4.1, row={"tensor_parallel": 4}), SEVEN)


def test_a_cache_saves_at_most_its_capacity() -> None:
    moved = float(SEVEN.layer_weight_bytes + SEVEN.layer_kv_bytes(1, 0))
    half = of_layer(moved / 2 / 1e12 * 1.001, cache_bytes=moved / 2)
    physical_limits.check(half, SEVEN, in_sequence=False)
    # In sequence 32 layers share the cache: the median layer has at most a sixteenth of it.
    with pytest.raises(ParameterError, match="beyond what its cache"):
        physical_limits.check(half, SEVEN)
    physical_limits.check(of_layer((moved - moved / 32) / 1e12 * 1.001, cache_bytes=moved / 2), SEVEN)
    whole = of_layer(1e-5, cache_bytes=16 * moved)
    physical_limits.check(whole, SEVEN)
    assert physical_limits.limit(whole, SEVEN).startswith("arithmetic only")
    assert physical_limits.limit(half, SEVEN).startswith("memory and arithmetic")


def test_arithmetic_is_not_faster_than_the_peak() -> None:
    width = {"width": 4096}
    least = float(SEVEN.layer_flops(4096, 0)) / 1e14
    physical_limits.check(of_layer(least * 1.001, row=width), SEVEN)
    with pytest.raises(ParameterError, match=r"\(arithmetic\)"):
        physical_limits.check(of_layer(least * 0.999, row=width), SEVEN)


def test_limits_apply_to_dense_parts_and_heads() -> None:
    dense = {"part": "dense", "tokens": 1}
    physical_limits.check(of_layer(405e-6, row=dense), SEVEN)
    with pytest.raises(ParameterError, match=r"dense at tokens 1: .*memory"):
        physical_limits.check(of_layer(404e-6, row=dense), SEVEN)
    rows = [{"part": "layer", "width": 1, "context": 0, "batch": 1, "time_s": 1.0}]
    head = {"part": "head", "positions": 1, "time_s": float(SEVEN.head_bytes(1)) / 1e12 * 0.99}
    with pytest.raises(ParameterError, match=r"head at positions 1: .*memory"):
        physical_limits.check(of_layer(1.0, table=profile.table_of([*rows, head])), SEVEN)
