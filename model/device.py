"""Devices that models run on: what their vendor prints of memory, bandwidth, arithmetic and links. Published, not measured.

Rates are those of dense matrices, accumulated in 32 bits: vendors print twice that for matrices half of whose numbers are zero.
They are peaks, which no kernel reaches. That of float32 is of ordinary cores: TF32 is faster, but rounds what it multiplies to 10
bits. A GB of memory capacity is 2^30 bytes, as memory chips are made; of a rate it is 10^9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from model import checks
from model.checks import ParameterError
from model.transformer import BYTES


@dataclass(frozen=True)
class Device:
    """One accelerator, by its vendor's documents.

    Parameters
    ----------
    name
        What it is called.
    memory_bytes, bandwidth
        Its memory [bytes], and how fast that is read [bytes/s].
    rates
        Dense arithmetic by the type of the numbers, on tensor cores where there are any for it [operations/s].
    link, host_link
        To another such device, and to the host, in one direction [bytes/s]; without a link of their own devices go over the host's.
    cache_bytes
        Last cache before the memory [bytes].
    source
        The documents that say so.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    rates: Mapping[str, float] = field(hash=False)
    link: float
    host_link: float
    cache_bytes: float
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth", "link", "host_link", "cache_bytes"):
            _positive(name, getattr(self, name))
        if not self.rates:
            raise ParameterError(f"rates must have one for some of {', '.join(BYTES)}, got none")
        for dtype, rate in self.rates.items():
            checks.one_of("dtype", dtype, BYTES)
            _positive(f"rates[{dtype}]", rate)

    def rate(self, dtype: str) -> float:
        """Dense arithmetic on numbers of this type [operations/s].

        >>> device("t4").rate("bfloat16")
        Traceback (most recent call last):
            ...
        model.checks.ParameterError: t4 has no published rate for dtype 'bfloat16'; known: float16, float32, int8
        """
        if dtype not in self.rates:
            known = ", ".join(sorted(self.rates))
            raise ParameterError(f"{self.name} has no published rate for dtype {checks.shown(dtype)}; known: {known}")
        return self.rates[dtype]

    def ridge(self, dtype: str) -> float:
        """The arithmetic intensity from which on arithmetic, not memory, takes the time [operations/byte].

        S. Williams, A. Waterman and D. Patterson. Roofline. Communications of the ACM 52(4), 2009.

        >>> round(device("a100").ridge("bfloat16")), round(device("h100").ridge("bfloat16"))
        (153, 295)
        """
        return self.rate(dtype) / self.bandwidth


def _positive(name: str, value: float) -> None:
    checks.number(name, value, 0)
    if value == 0:
        raise ParameterError(f"{name} must be above 0, got 0")


_MB, _GB = 2**20, 2**30
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "int8": 624e12}
_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12, "float8": 1978.9e12, "int8": 1978.9e12}
_GEN3, _GEN4, _GEN5 = 16e9, 32e9, 64e9
"""PCI Express of 16 lanes in one direction, by its generation, as vendors print it [bytes/s]."""

DEVICES = {
    each.name: each
    for each in (
        Device("t4", 16 * _GB, 320e9, {"float16": 65e12, "float32": 8.1e12, "int8": 130e12}, _GEN3, _GEN3, 4 * _MB,
               "NVIDIA T4 datasheet; cache: NVIDIA Turing GPU Architecture whitepaper (TU104)"),
        Device("titan-xp", 12 * _GB, 547.7e9, {"float32": 12.15e12}, _GEN3, _GEN3, 3 * _MB,
               "NVIDIA TITAN Xp specifications (3840 cores at 1582 MHz; no tensor cores, no fast half precision); cache: GP102"),
        Device("v100", 32 * _GB, 900e9, {"float16": 125e12, "float32": 15.7e12}, 150e9, _GEN3, 6 * _MB,
               "NVIDIA V100 datasheet, SXM2; cache: NVIDIA Tesla V100 GPU Architecture whitepaper"),
        Device("a40", 48 * _GB, 696e9, {"bfloat16": 149.7e12, "float16": 149.7e12, "float32": 37.4e12, "int8": 299.3e12},
               56.25e9, _GEN4, 6 * _MB,
               "NVIDIA A40 datasheet (NVLink 112.5 GB/s both ways); cache: NVIDIA Ampere GA102 GPU Architecture whitepaper"),
        Device("a100", 80 * _GB, 2039e9, _AMPERE, 300e9, _GEN4, 40 * _MB,
               "NVIDIA A100 datasheet, 80 GB SXM; cache: NVIDIA A100 Tensor Core GPU Architecture whitepaper"),
        Device("a100-40gb", 40 * _GB, 1555e9, _AMPERE, 300e9, _GEN4, 40 * _MB,
               "NVIDIA A100 datasheet, 40 GB SXM; cache: NVIDIA A100 Tensor Core GPU Architecture whitepaper"),
        Device("l40s", 48 * _GB, 864e9,
               {"bfloat16": 362.05e12, "float16": 362.05e12, "float32": 91.6e12, "float8": 733e12, "int8": 733e12},
               _GEN4, _GEN4, 96 * _MB,
               "NVIDIA L40S datasheet; cache: NVIDIA Ada GPU Architecture whitepaper, of the whole chip AD102"),
        Device("rtx-3090", 24 * _GB, 936e9, {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12, "int8": 284e12},
               56.25e9, _GEN4, 6 * _MB, "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
        Device("rtx-4090", 24 * _GB, 1008e9,
               {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12, "float8": 330.3e12, "int8": 660.6e12},
               _GEN4, _GEN4, 72 * _MB, "NVIDIA Ada GPU Architecture whitepaper"),
        Device("h100", 80 * _GB, 3350e9, _HOPPER, 450e9, _GEN5, 50 * _MB,
               "NVIDIA H100 datasheet, SXM; rates and cache: NVIDIA H100 Tensor Core GPU Architecture whitepaper"),
        Device("h200", 141 * _GB, 4800e9, _HOPPER, 450e9, _GEN5, 50 * _MB,
               "NVIDIA H200 datasheet, SXM; rates and cache as H100, whose chip it has"),
    )
}  # fmt: skip
"""Devices that the papers and the measurements at hand ran on, by their name."""


def device(name: str) -> Device:
    """The device of this name.

    >>> device("h100").bandwidth / 1e12
    3.35
    """
    checks.one_of("device", name, DEVICES)
    return DEVICES[name]
