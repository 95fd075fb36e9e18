"""What a device is and what it reaches: facts as they are read, and the ceilings that no pass can pass, as they are measured."""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibrate.clocks import clock_of
from model import checks, device
from model.checks import ParameterError

DEVICES = ("cpu", "cuda")
MOVING = ("sm_mhz", "memory_mhz")
"""Facts that are others at another moment: clocks of a GPU, which rise with its work."""
_TRIES = 7
_OTHERS = {"pcie", "nvl", "laptop", "mig"}  # of the same name, and slower


def needed() -> None:
    """Import the libraries that timing takes, before anything is written; a command says what to install where one is missing."""
    for name in ("torch", "transformers"):
        importlib.import_module(name)


def chosen(name: str | None) -> str:
    """The device to time: the one asked for, or a GPU where there is one."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    checks.one_of("device", kind, DEVICES)
    if index and (kind != "cuda" or not index.isdecimal()):
        raise ParameterError(f"device must be cpu, cuda or cuda:NUMBER, got {checks.shown(name)}")
    if kind == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if there <= int(index or 0):
            raise ParameterError(f"device must be one of {there} GPUs that torch sees, got {name}; take --device cpu")
    return name


def make_current(name: str) -> None:
    """Have torch work on this GPU where nothing else is said; `cuda` alone is the one that it works on."""
    import torch

    if ":" in name:  # a device without a number is refused
        torch.cuda.set_device(name)


def versions() -> dict[str, str]:
    """Of the libraries that run the passes."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def facts(name: str) -> dict[str, Any]:
    """What there is to know of a device and of the software on it: no name of a host, no path."""
    import torch

    said: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "python": platform.python_version()}
    said |= versions()
    if not name.startswith("cuda"):
        threads = {"threads": torch.get_num_threads(), "cores": os.cpu_count()}
        return said | {"name": _processor(), "cache_bytes": _last_cache()} | threads | {"memory_bytes": memory("cpu")}
    properties = torch.cuda.get_device_properties(name)
    said |= {"name": properties.name, "cache_bytes": properties.L2_cache_size, "memory_bytes": properties.total_memory}
    said |= {"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}
    return said | _nvml(properties)


def _nvml(properties: Any) -> dict[str, Any]:
    """Driver, clocks and power limit, where the vendor's library is there to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # By its identity: the numbers of the library and of torch differ where some GPUs are hidden.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        clocks = {"sm_mhz": pynvml.NVML_CLOCK_SM, "memory_mhz": pynvml.NVML_CLOCK_MEM}
        said = {name: pynvml.nvmlDeviceGetClockInfo(handle, which) for name, which in clocks.items()}
        said |= {f"{name}_highest": pynvml.nvmlDeviceGetMaxClockInfo(handle, which) for name, which in clocks.items()}
        said["driver"] = pynvml.nvmlSystemGetDriverVersion()
        return said | {"power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000}
    except Exception as error:  # a missing library, an old driver, a sandbox: what is not known is said so
        return {"nvml": f"not read: {type(error).__name__}"}


def _processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _last_cache() -> int:
    """Bytes of the processor's largest cache; 0 where it does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=0)


def memory(name: str) -> int:
    """Bytes of memory that the device has; 0 where it does not say."""
    import torch

    if name.startswith("cuda"):
        return int(torch.cuda.mem_get_info(name)[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def free(name: str) -> int:
    """Bytes that are free on a device, what torch keeps for its own use included; of the processor all that there are."""
    import torch

    if not name.startswith("cuda"):
        return memory(name)
    kept = torch.cuda.memory_reserved(name) - torch.cuda.memory_allocated(name)
    return int(torch.cuda.mem_get_info(name)[0]) + kept


def ceilings(name: str, dtype: str, quick: bool = False) -> dict[str, float]:
    """The best that a copy, a reading product and a large product reach on random data [bytes/s], [operations/s].

    A copy counts what it reads and what it writes. A product of a large matrix with a vector is what decoding one token is: it only
    reads. Both go over twice what the last cache holds; quickly over less, which may then lie in it and seem faster.
    """
    import torch

    cuda = name.startswith("cuda")
    kind: torch.dtype = getattr(torch, dtype)
    cache = 0 if cuda else _last_cache()
    size = 2**31 if cuda else min(max(2 * cache, 2**28), max(memory(name) // 12, 2**26))
    side = 8192 if cuda else 2048
    if quick:
        size, side = min(size, 2**27), min(side, 1024)
    rows = size // (4096 * kind.itemsize)
    tile = 4096
    source = torch.randn(tile, 4096, device=name, dtype=kind).repeat(max(rows // tile, 1), 1)  # so much chance takes long to make
    target, vector = torch.empty_like(source), torch.randn(4096, 1, device=name, dtype=kind)
    moved = source.numel() * kind.itemsize
    copy = _best(lambda: target.copy_(source), name)
    read = _best(lambda: source @ vector, name)
    left, right = (torch.randn(side, side, device=name, dtype=kind) for _ in range(2))
    product = _best(lambda: left @ right, name)
    return {"copy_bytes_per_s": 2 * moved / copy, "read_bytes_per_s": moved / read, "flop_per_s": 2 * side**3 / product}


def _best(work: Callable[[], object], name: str) -> float:
    """The shortest of a few times [s]: a ceiling is what was reached once."""
    clock = clock_of(name)
    work()
    times = []
    for _ in range(_TRIES):
        clock.start()
        work()
        times.append(clock.stop())
    return min(times)


def known(name: str, memory_bytes: float) -> device.Device | None:
    """The device of `model.device` that calls itself so and has as much memory; None where none is sure to be it.

    >>> [getattr(known(*each), "name", None) for each in (("NVIDIA H100 80GB HBM3", 85e9), ("NVIDIA H100 PCIe", 85e9), ("T4", 9e9))]
    ['h100', None, None]
    """
    words = set(name.lower().replace("-", " ").split())
    if words & _OTHERS:
        return None
    found = [each for each in device.DEVICES if set(each.split("-")) <= words]
    fitting = [device.device(each) for each in found if abs(memory_bytes / device.device(each).memory_bytes - 1) < 0.1]
    return fitting[0] if len(fitting) == 1 else None
