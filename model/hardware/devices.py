"""Devices that models run on: memory, bandwidth, arithmetic rates and links as published by the vendor, or by others (`REPORTED`).

They are not measured.

Rates hold for dense matrices, accumulated in 32 bits; vendors print twice as much for matrices with 50 % structured sparsity. They
are peaks that no kernel reaches. The rate of float32 is that of ordinary cores: TF32 is faster, but rounds factors to 10 bits. A GB
of memory capacity is 2^30 bytes, a GB of a rate is 10^9 bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from model.architectures.transformer import BYTES
from model.base import bounded_files, checks
from model.base.checks import ParameterError

ARITHMETIC = (*BYTES, "float4")
"""Types of numbers that devices have rates for; weights, not activations, may be in float4."""
BETWEEN = {
    "memory_bytes": (1e6, 1e16), "bandwidth": (1e8, 1e17), "link": (1e5, 1e17), "host_link": (1e5, 1e17),
    "cache_bytes": (1e2, 1e13), "rates": (1e8, 1e20),
}  # fmt: skip
"""Smallest and largest values accepted [bytes], [bytes/s], [operations/s]: values far outside are in another unit."""


@dataclass(frozen=True)
class Device:
    """Data of one accelerator, from its vendor's documents.

    Parameters
    ----------
    name
        Name of the device.
    memory_bytes, bandwidth
        Memory capacity [bytes], and memory bandwidth [bytes/s].
    rates
        Dense arithmetic rate by type of the numbers (`ARITHMETIC`), on tensor cores where they support the type [operations/s].
    link, host_link
        Bandwidth in one direction to another such device, and to the host [bytes/s]. Devices without a direct link use the host's.
    cache_bytes
        Capacity of the last-level cache [bytes].
    source
        The documents with these numbers.
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
        for name in ("name", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
                raise ParameterError(f"{name} must be a line of text, got {checks.shown(value)}")
        if not self.name or len(self.name) > 100 or self.name.startswith(".") or {*self.name} & {*"/\\:"}:
            raise ParameterError(f"name must be usable in the name of a file (no slash), got {checks.shown(self.name)}")
        for name in ("memory_bytes", "bandwidth", "link", "host_link", "cache_bytes"):
            checks.number(name, getattr(self, name), *BETWEEN[name])
        rates: Any = self.rates
        if not isinstance(rates, Mapping) or not rates:
            known = ", ".join(ARITHMETIC)
            raise ParameterError(f"rates must be a table of rates by dtype ({known}), got {checks.shown(self.rates)}")
        for dtype, rate in self.rates.items():
            checks.one_of("dtype", dtype, ARITHMETIC)
            checks.number(f"rates[{dtype}]", rate, *BETWEEN["rates"])

    @property
    def published(self) -> bool:
        """True for a device of `DEVICES` whose vendor publishes its data; False for one of `REPORTED` or from a file."""
        return self.origin == "published"

    @property
    def origin(self) -> str:
        """`published` by the vendor, `reported` by others (`REPORTED`), or `given` in a file."""
        if DEVICES.get(self.name) != self:
            return "given"
        return "reported" if self.name in REPORTED else "published"

    def rate(self, dtype: str) -> float:
        """Dense arithmetic rate for numbers of type `dtype` [operations/s].

        >>> device("t4").rate("bfloat16")
        Traceback (most recent call last):
            ...
        model.base.checks.ParameterError: t4 has no published rate for dtype 'bfloat16'; known: float16, float32, int8
        """
        if dtype not in self.rates:
            known = ", ".join(sorted(self.rates))
            raise ParameterError(f"{self.name} has no published rate for dtype {checks.shown(dtype)}; known: {known}")
        return self.rates[dtype]

    def ridge(self, dtype: str) -> float:
        """Ridge point: the arithmetic intensity beyond which a kernel is compute-bound [operations/byte].

        S. Williams, A. Waterman and D. Patterson. Roofline. Communications of the ACM 52(4), 2009.

        >>> round(device("a100").ridge("bfloat16")), round(device("h100").ridge("bfloat16"))
        (153, 295)
        """
        return self.rate(dtype) / self.bandwidth


_MB, _GB = 2**20, 2**30
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "int8": 624e12}
_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12, "float8": 1978.9e12, "int8": 1978.9e12}
_BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float32": 80e12, "float8": 4500e12}
_CDNA3 = {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12, "float8": 2614.9e12, "int8": 2614.9e12}
_GEN3, _GEN4, _GEN5 = 16e9, 32e9, 64e9
"""PCI Express with 16 lanes in one direction, by generation, as vendors print it [bytes/s]."""

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
        Device("h20", 96 * _GB, 4000e9,
               {"bfloat16": 148e12, "float16": 148e12, "float32": 44e12, "float8": 296e12, "int8": 296e12}, 450e9, _GEN5, 60 * _MB,
               "NVIDIA publishes no data sheet of the H20: rates, memory and bandwidth as its sellers print them; bandwidth, link"
               " and rates also in NVIDIA's ai-dynamo/aiconfigurator @16417930, systems/h20_sxm.yaml (8 bits: 294 TFLOP/s); cache:"
               " the whole chip GH100"),
        Device("b200", 180 * _GB, 7700e9, _BLACKWELL | {"float4": 9000e12, "int8": 4500e12}, 900e9, _GEN5, 126 * _MB,
               "NVIDIA HGX B200 data sheet (eight GPUs: 1,440 GB at 62 TB/s); rates: NVIDIA Blackwell Architecture Technical Brief;"
               " cache: as its driver says (pytorch/ao, pull request 4002)"),
        Device("gb200", 186 * _GB, 8000e9,
               {"bfloat16": 2500e12, "float16": 2500e12, "float32": 80e12, "float8": 5000e12, "float4": 10_000e12, "int8": 5000e12},
               900e9, 450e9, 126 * _MB,
               "NVIDIA GB200 NVL72 data sheet, half of a superchip; host: NVLink-C2C; cache as B200"),
        Device("b300", 270 * _GB, 7700e9, _BLACKWELL | {"float32": 75e12, "float4": 13_500e12}, 900e9, _GEN5, 126 * _MB,
               "NVIDIA HGX B300 data sheet (eight GPUs: 2.1 TB at 62 TB/s, 108 PFLOP/s of dense FP4); cache as B200"),
        Device("l4", 24 * _GB, 300e9,
               {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12, "float8": 242.5e12, "int8": 242.5e12},
               _GEN4, _GEN4, 48 * _MB,
               "NVIDIA L4 datasheet; cache: NVIDIA Ada GPU Architecture whitepaper, of the whole chip AD104"),
        Device("a10g", 24 * _GB, 600e9, {"bfloat16": 70e12, "float16": 70e12, "float32": 35e12, "int8": 140e12},
               _GEN4, _GEN4, 6 * _MB,
               "NVIDIA A10G data sheet of 2022-02-17 for Amazon EC2 G5 (d1.awsstatic.com; twice the rates with sparsity; the A10 is"
               " another board); cache: NVIDIA Ampere GA102 GPU Architecture whitepaper"),
        Device("rtx-6000-ada", 48 * _GB, 960e9,
               {"bfloat16": 364.2e12, "float16": 364.2e12, "float32": 91.1e12, "float8": 728.5e12, "int8": 728.5e12},
               _GEN4, _GEN4, 96 * _MB, "NVIDIA Ada GPU Architecture whitepaper, RTX 6000 Ada Generation"),
        Device("rtx-5090", 32 * _GB, 1792e9,
               {"bfloat16": 209.5e12, "float16": 209.5e12, "float32": 104.8e12, "float8": 419e12, "float4": 1676e12,
                "int8": 838e12},
               _GEN5, _GEN5, 96 * _MB, "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
        Device("rtx-pro-6000", 96 * _GB, 1792e9,
               {"bfloat16": 503.8e12, "float16": 503.8e12, "float32": 126e12, "float8": 1007.6e12, "float4": 2015.2e12,
                "int8": 1007.6e12},
               _GEN5, _GEN5, 128 * _MB, "NVIDIA RTX Blackwell PRO GPU Architecture whitepaper, RTX PRO 6000 Workstation Edition"),
        Device("mi300x", 192 * _GB, 5325e9, _CDNA3, 64e9, _GEN5, 256 * _MB,
               "AMD Instinct MI300X data sheet; link: one of seven, each to another device; cache: Infinity Cache"),
        Device("mi325x", 256 * _GB, 6000e9, _CDNA3, 64e9, _GEN5, 256 * _MB,
               "AMD Instinct MI325X data sheet (bandwidth: 6 TB/s, rounded); memory and cache also ROCm documentation, GPU"
               " specifications; link: one of seven, each to another device; cache: Infinity Cache"),
        Device("mi355x", 288 * _GB, 8000e9,
               {"bfloat16": 2516.6e12, "float16": 2516.6e12, "float32": 157.3e12, "float8": 5033.2e12, "float4": 10_066.3e12,
                "int8": 5033.2e12},
               76.8e9, _GEN5, 256 * _MB,
               "AMD Instinct MI355X data sheet; link: one of seven, each to another device; cache: Infinity Cache"),
    )
}  # fmt: skip
"""Devices of the papers, of the bundled measurements, and others in use, by name."""
REPORTED = ("h20",)
"""Devices whose vendor publishes no data: their numbers are those that several others report."""


def device(name: str) -> Device:
    """Return a published device by name, or a device from a TOML file (`toml_text` makes its text).

    >>> device("h100").bandwidth / 1e12
    3.35
    """
    if name in DEVICES:
        return DEVICES[name]
    if not is_path(name):
        raise ParameterError(f"{checks.unknown('device', name, DEVICES)}; or give the path of a device's .toml")
    return _of_file(name, bounded_files.stamp(name))


def is_path(name: str) -> bool:
    """Return True if a device's name is the path of a file, which need not exist."""
    return name not in DEVICES and (name.endswith(".toml") or "/" in name or os.sep in name)


@functools.lru_cache(maxsize=64)
def _of_file(name: str, _: object) -> Device:
    """Read and check the file of a device; without a `name` key the device is named after the file."""
    path = Path(name)
    try:
        keys = bounded_files.toml_of(bounded_files.read_text(path, bounded_files.MOST_TOML))
    except OSError as error:
        raise ParameterError(f"cannot read the device {path}: {error.strerror}; `sim ls devices h100` prints such a file") from None
    except ValueError as error:
        raise ParameterError(f"the device {path} must be TOML: {(str(error).splitlines() or ['damaged'])[0]}") from None
    known = [each.name for each in fields(Device)]
    for key in keys:
        if key not in known:
            raise ParameterError(f"{path}: {checks.unknown('key', key, known)}")
    values: dict[str, Any] = {"name": path.stem, "source": f"given in {path.name}"} | keys
    missing = [key for key in known if key not in values]
    if missing:
        raise ParameterError(f"{path}: {missing[0]} is missing; a device has {', '.join(known)} (`sim ls devices h100` prints one)")
    try:
        return Device(**values)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


def toml_text(of: Device) -> str:
    """Return the TOML text of a device, with units as comments.

    >>> print(toml_text(device("titan-xp")).splitlines()[2])
    bandwidth = 5.477e+11  # bytes/s
    """
    units = {"memory_bytes": "bytes", "bandwidth": "bytes/s", "link": "bytes/s in one direction, to another such device",
             "host_link": "bytes/s in one direction, to the host", "cache_bytes": "bytes, last-level cache"}  # fmt: skip
    lines = [f'name = "{of.name}"', *(f"{key} = {_number(getattr(of, key))}  # {unit}" for key, unit in units.items())]
    lines += [f"source = {_quoted(of.source)}", "", "[rates]  # dense operations/s"]
    lines += [f"{dtype} = {_number(rate)}  # ridge {of.ridge(dtype):.1f} operations/byte" for dtype, rate in of.rates.items()]
    return "\n".join(lines)


def _number(value: float) -> str:
    short = f"{float(value):.12g}"
    return short if "." in short or "e" in short else f"{short}.0"


def _quoted(text: str) -> str:
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'
