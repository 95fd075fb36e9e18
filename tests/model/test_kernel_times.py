"""Kernels of step laws: types of their weights, the devices that drafts are split over, and the memory of a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.engines import kernel_times, law_fit, step_law
from model.engines.kernel_times import KernelSource
from model.hardware import cost_models, devices
from model.hardware.roofline import Roofline

PROFILED = KernelSource("llama-3.1-8b", "h100")


def test_quantised_weights_are_read_and_computed_in_their_types() -> None:
    """Kernels of the law are those of the roofline: fewer bytes, and products in float8 where the device has a rate for it."""
    plain = replace(PROFILED, source="roofline")
    seconds = {}
    for weights in (None, "none", "int4", "int4-g32", "float8"):
        source = replace(plain, weights=weights)
        target, _ = kernel_times.hardware(source)
        assert target == Roofline.on_device(source.target, devices.device("h100"))
        for sequences in (1, 4096):
            seconds[weights, sequences] = float(cost_models.pass_time(target, 1, 100, sequences).seconds)
    for sequences in (1, 4096):
        assert seconds[None, sequences] == seconds["none", sequences]
    assert seconds["int4", 1] < seconds["int4-g32", 1] < seconds["float8", 1] < seconds["none", 1]
    assert seconds["float8", 4096] < 0.7 * seconds["int4", 4096]  # int4 is computed in 16 bits
    assert isinstance(kernel_times.hardware(replace(PROFILED, weights="int4"))[0], Roofline)  # its profile was measured in 16 bits
    assert not isinstance(kernel_times.hardware(replace(PROFILED, weights="none"))[0], Roofline)


def test_heads_are_split_over_the_devices_of_their_target() -> None:
    for draft, over in (("eagle3:llama-3.1-70b", 4), ("llama-3.2-1b", 1)):
        source = KernelSource("llama-3.1-70b", "h100", 4, draft=draft, source="roofline")
        made = kernel_times.hardware(source)[1]
        assert made is not None
        assert made.tensor_parallel == over
        kernel_times.refuse_too_large(source)


@given(
    st.sampled_from(["llama-3.1-70b", "deepseek-r1", "gpt-oss-120b"]),
    st.sampled_from([None, "none", "int4"]),
    st.sampled_from([1, 8]),
)
def test_models_that_exceed_the_memory_are_refused(model: str, weights: str | None, over: int) -> None:
    """As weights, and the cache of a sequence, exceed 80 GiB."""
    source = KernelSource(model, "h100", over, weights=weights)
    part = source.target.shard(over)
    needed = part.weight_bytes + part.cache_bytes_at(kernel_times.USUAL_CONTEXT)
    if needed <= 80 * 2**30:
        kernel_times.refuse_too_large(source)
        return
    with pytest.raises(ParameterError, match=f"^weights .* of h100, got {needed / 1e9:.1f} GB; .*tensor_parallel, .*weights"):
        kernel_times.refuse_too_large(source)


@pytest.mark.parametrize("weights", [None, "int4-g64"])
def test_weights_of_kernels_are_kept_and_absent_in_older_files(weights: str | None, tmp_path: Path) -> None:
    law = replace(law_fit.fit(None, "none", unit="tpot_ms", kernels=PROFILED), kernels=replace(PROFILED, weights=weights))
    path = step_law.write(law, tmp_path / "law.json")
    assert ("weights" in json.loads(path.read_text())["kernels"]) == (weights is not None)
    assert step_law.load(path).kernels == law.kernels


def test_memory_counts_the_draft() -> None:
    source = KernelSource("llama-3.1-8b", "h100")
    kernel_times.refuse_too_large(source)
    with pytest.raises(ParameterError, match=r"^weights \(157.2 GB\)"):
        kernel_times.refuse_too_large(replace(source, draft="llama-3.1-70b"))
