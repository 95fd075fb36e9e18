"""Devices: published data agree with a public configurator, and are consistent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from model.base.checks import ParameterError
from model.hardware.devices import DEVICES, REPORTED, device

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data"))
GEFORCE = ("rtx-3090", "rtx-4090", "rtx-5090")
NAMES = {"a100_sxm": "a100", "h100_sxm": "h100", "l40s": "l40s"}


def numbers(path: Path) -> dict[str, float]:
    """Read the lines `key: number` of a file; keys must be unique."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("#")[0].partition(":")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            continue  # a heading, or a word
    return found


@pytest.mark.parametrize("system", NAMES)
def test_devices_agree_with_a_public_configurator(system: str) -> None:
    path = DATA / "gpu" / "aiconfigurator" / f"{system}.yaml"
    if not path.exists():
        pytest.skip("the folder of public measurements is absent: DECODESIM_DATA names it")
    said, ours = numbers(path), device(NAMES[system])
    assert ours.bandwidth == said["mem_bw"]
    for dtype, key in (("bfloat16", "bfloat16"), ("int8", "int8"), ("float8", "fp8")):
        rate = said.get(f"{key}_tc_flops")
        assert (rate is None) == (dtype not in ours.rates)
        if rate is not None:
            # The configurator rounds to whole TFLOP/s; a sparse rate would differ by a factor of two.
            assert ours.rate(dtype) == pytest.approx(rate, rel=1e-3)
    assert (ours.link, ours.host_link) == (said["intra_node_bw"], said["pcie_bw"])
    if system == "l40s":
        # Error correction takes one byte in sixteen of GDDR6, and the driver some more; HBM has separate memory for it.
        assert 0.999 * ours.memory_bytes * 15 / 16 < said["mem_capacity"] < ours.memory_bytes
    else:
        assert ours.memory_bytes == said["mem_capacity"]


def test_rates_double_for_types_of_half_the_size() -> None:
    """Operations of tensor cores per cycle are inversely proportional to the bytes per number."""
    for each in DEVICES.values():
        half = each.rates.get("float16")
        if half is None:
            continue
        assert each.rates.get("bfloat16", half) == half
        if "int8" in each.rates:
            # GeForce boards accumulate 16-bit products in 32 bits at half the rate of others, 8-bit products at the full rate.
            factor = 4 if each.name in GEFORCE else 2
            assert each.rate("int8") == pytest.approx(factor * half, rel=0.02)
        if "float8" in each.rates:
            assert each.rate("float8") == pytest.approx(2 * half, rel=0.02)
        if "float4" in each.rates:
            # Those of GeForce boards accumulate in 32 bits at the full rate; the B300 has further units for 4 bits.
            factor = 8 if each.name in GEFORCE else 6 if each.name == "b300" else 4
            assert each.rate("float4") == pytest.approx(factor * half, rel=0.02)
        assert each.rate("float32") < half


@pytest.mark.parametrize(
    ("name", "cores", "clock"),
    [("t4", 2560, 1590e6), ("titan-xp", 3840, 1582e6), ("v100", 5120, 1530e6), ("a40", 10_752, 1740e6), ("a100", 6912, 1410e6),
     ("rtx-3090", 10_496, 1695e6), ("rtx-4090", 16_384, 2520e6), ("l40s", 18_176, 2520e6), ("l4", 7424, 2040e6),
     ("rtx-6000-ada", 18_176, 2505e6), ("rtx-5090", 21_760, 2407e6), ("rtx-pro-6000", 24_064, 2617e6), ("mi300x", 38_912, 2100e6),
     ("mi325x", 38_912, 2100e6), ("mi355x", 32_768, 2400e6)],
)  # fmt: skip
def test_float32_rate_is_two_operations_per_core_and_cycle(name: str, cores: int, clock: float) -> None:
    """The vendor's cores and boost clocks give its rates, within the printed digits."""
    assert device(name).rate("float32") == pytest.approx(2 * cores * clock, rel=6e-3)


@pytest.mark.parametrize(
    ("name", "bits", "gigabits"),
    [("t4", 256, 10), ("titan-xp", 384, 11.41), ("v100", 4096, 1.752), ("a40", 384, 14.5), ("a100", 5120, 3.186),
     ("a100-40gb", 5120, 2.43), ("l40s", 384, 18), ("rtx-3090", 384, 19.5), ("rtx-4090", 384, 21), ("h100", 5120, 5.238),
     ("h200", 6144, 6.25), ("b200", 7680, 7.992), ("rtx-6000-ada", 384, 20), ("rtx-5090", 512, 28), ("rtx-pro-6000", 512, 28),
     ("a10g", 384, 12.5), ("mi300x", 8192, 5.2)],
)  # fmt: skip
def test_bandwidth_is_bus_width_times_data_rate(name: str, bits: int, gigabits: float) -> None:
    """Within the printed digits; and a device reads all of its memory in some hundredths of a second."""
    assert device(name).bandwidth == pytest.approx(bits / 8 * gigabits * 1e9, rel=4e-3)
    made = device(name)
    assert 0.015 < made.memory_bytes / made.bandwidth < 0.08
    assert 1e-4 < made.cache_bytes / made.memory_bytes < 4e-3
    assert made.memory_bytes % 2**30 == made.cache_bytes % 2**20 == 0
    assert 1e10 < made.host_link <= made.link < made.bandwidth / 3


def test_at_the_ridge_arithmetic_and_memory_take_equally_long() -> None:
    for each in DEVICES.values():
        for dtype, rate in each.rates.items():
            assert math.isclose(each.ridge(dtype) * each.bandwidth, rate)
    assert device("h200").ridge("bfloat16") < device("h100").ridge("bfloat16")  # the same chip with faster memory


def test_devices_without_a_data_sheet_are_not_called_published() -> None:
    for each in DEVICES.values():
        assert each.published == (each.name not in REPORTED) == ("no data sheet" not in each.source)
        assert replace(each, memory_bytes=each.memory_bytes + 1).origin == "given"
    assert REPORTED == ("h20",)


def test_names_are_keys_and_sources_are_named() -> None:
    assert [each.name for each in DEVICES.values()] == [*DEVICES]
    assert all(("AMD" if each.name.startswith("mi") else "NVIDIA") in each.source for each in DEVICES.values())
    assert len({*DEVICES.values()}) == len(DEVICES)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: device("h10"), "unknown device 'h10'; did you mean h100"),
    (lambda: device("H100"), "unknown device 'H100'; did you mean h100"),  # not v100, as near but for the case
    (lambda: device("titan-xp").rate("float16"), "titan-xp has no published rate for dtype 'float16'; known: float32"),
    (lambda: device("v100").ridge("bfloat16"), "v100 has no published rate for dtype 'bfloat16'; known: float16, float32"),
    *[(lambda name=name: replace(device("t4"), **{name: 0.0}), f"{name} must be between 1")  # type: ignore[misc]
      for name in ("memory_bytes", "bandwidth", "link", "host_link", "cache_bytes")],
    (lambda: replace(device("t4"), bandwidth=math.inf), "bandwidth must be between 1e\\+08 and 1e\\+17, got inf"),
    (lambda: replace(device("t4"), rates={}), r"rates must be a table of rates by dtype \(bfloat16"),
    (lambda: replace(device("t4"), rates={"half": 1.0}), "unknown dtype 'half'"),
    (lambda: replace(device("t4"), rates={"float16": 0.0}), r"rates\[float16\] must be between 1e\+08 and 1e\+20, got 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
