"""What a device is and what it reaches: facts as they are read, and the ceilings that no pass can pass, as they are measured."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.devices.clocks import clock_of
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import devices

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")
MOVING = ("sm_mhz", "memory_mhz")
"""Facts that are others at another moment: clocks of a GPU, which rise with its work."""
LITTLE = 128
"""Side of the products that are tried first, to see which kernels are fast."""
QUICK = {"cpu": (512, 2**27), "cuda": (2048, 2**27)}
"""Of quick tries: side of products, and what is read and copied [bytes]."""
_TRIES = 7
_SHARE = 0.02
"""Of the time of what is timed, what tries between it may take [-]."""
_SHAPES = ((1, 1, 1, 1), (1, 4, 1, 0.25), (1, 0.25, 1, 4), (1, 0, 4, 4), (4, 0.5, 0.5, 0.5))
"""Products: how many, and rows, inner length and columns of each in sides; square, tall, wide, a vector's, and as attention's."""
_LAYOUTS = ((False, True), (False, False), (True, False), (True, True))
"""Whether the columns of the left and of the right operand are contiguous; the first is `x @ w.T`, as layers hold weights."""
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


class Ceilings:
    """Best rates that a device was seen to reach on random data, from tries that are spread over what is timed on it.

    Libraries have fast kernels for some layouts, shapes and types and slow ones for others, and which these are depends on the
    device. Products are therefore tried in every layout of their operands, square, tall, wide, batched and with a vector, in the
    type itself and in float32. The fastest is the ceiling. Rates are `best`: `copy_bytes_per_s`, of what a copy reads and writes;
    `read_bytes_per_s`, of a product of a large matrix with a vector, as in decoding a token; `flop_per_s`, of large products.

    Parameters
    ----------
    name, dtype
        Device, and type of the passes.
    quick
        Smaller matrices; what a cache holds may then seem to come from memory.
    """

    def __init__(self, name: str, dtype: str, quick: bool = False) -> None:
        self.name, self.dtypes, self.quick = name, tuple(dict.fromkeys((dtype, "float32"))), quick
        self.best: dict[str, float] = {}
        self.opened, self.spent = time.monotonic(), 0.0
        kinds = [(name, each) for each in self.dtypes]
        products = [partial(_product, *kind, shape, layout) for kind in kinds for shape in _SHAPES for layout in _LAYOUTS]
        reads = [partial(_read, *kind, layout) for kind in kinds for layout in range(3)]
        # On much data a slow kernel may take a thousand times as long as a fast one: which are fast is found out on little.
        small = {each: _fastest(each(LITTLE), name, tries=2) for each in products}
        self.best["flop_per_s"] = max(small.values())
        little = {each: _fastest(each(2**20), name, tries=2) for each in reads}  # which a cache holds: that is no bandwidth
        self.makers = {
            "flop_per_s": sorted(small, key=lambda each: -small[each])[:3],
            "read_bytes_per_s": sorted(little, key=lambda each: -little[each])[:2],
            "copy_bytes_per_s": [partial(_copy, name, dtype)],
        }  # fmt: skip
        self.again()

    def again(self) -> None:
        """Make another try; the better one counts."""
        begun = time.monotonic()
        side, size = _sizes(self.name, self.quick)
        for ceiling, makers in self.makers.items():
            for make in makers:
                rate = _fastest(make(side if ceiling == "flop_per_s" else size), self.name)
                self.best[ceiling] = max(rate, self.best.get(ceiling, 0.0))
        self.spent += time.monotonic() - begun

    def between(self) -> None:
        """Make another try if tries took a small share of the time so far, and if there is room for one beside the model."""
        if self.spent < _SHARE * (time.monotonic() - self.opened):
            with contextlib.suppress(RuntimeError, MemoryError):  # a device that is lost fails at the next pass too
                self.again()


def _sizes(name: str, quick: bool) -> tuple[int, int]:
    """The side of large products, and what is read and copied [bytes]: twice what the last cache holds or, quickly, less."""
    if quick:
        return QUICK[name.partition(":")[0]]
    if name.startswith("cuda"):
        return 8192, 2**31
    return 2048, min(max(2 * _last_cache(), 2**28), max(memory(name) // 12, 2**26))


class _Kernel(NamedTuple):
    """Work on random data, and how many operations or bytes it takes."""

    work: Callable[[], object]
    amount: float


def _product(name: str, dtype: str, shape: tuple[float, ...], layout: tuple[bool, bool], side: int) -> _Kernel:
    """A product of matrices of so many times `side`; of each operand `layout` says whether its columns are contiguous."""
    batch, m, k, n = shape[0], *(max(round(each * side), 1) for each in shape[1:])
    many = (int(batch),) if batch > 1 else ()

    def operand(rows: int, columns: int, turned: bool) -> torch.Tensor:
        made = _random(name, dtype, *many, *((columns, rows) if turned else (rows, columns)))
        return made.transpose(-2, -1) if turned else made

    left, right = operand(m, k, layout[0]), operand(k, n, layout[1])
    return _Kernel(lambda: left @ right, 2 * batch * m * k * n)


def _read(name: str, dtype: str, layout: int, size: int) -> _Kernel:
    """A product that reads a matrix of so many bytes: times a column, a row times its transpose, or a row times it."""
    matrix = _matrix(name, dtype, size)
    column = _random(name, dtype, matrix.shape[1 if layout < 2 else 0])
    works: Sequence[Callable[[], object]] = (
        lambda: matrix @ column[:, None], lambda: column[None] @ matrix.T, lambda: column[None] @ matrix
    )  # fmt: skip
    return _Kernel(works[layout], matrix.numel() * matrix.itemsize)


def _copy(name: str, dtype: str, size: int) -> _Kernel:
    """A copy of so many bytes: it reads them and writes them."""
    import torch

    matrix = _matrix(name, dtype, size)
    target = torch.empty_like(matrix)
    return _Kernel(lambda: target.copy_(matrix), 2 * matrix.numel() * matrix.itemsize)


def _matrix(name: str, dtype: str, size: int) -> torch.Tensor:
    """About so many bytes of random numbers: as these take long to make, a tile of them is repeated."""
    tile = _random(name, dtype, 64, 4096)
    return tile.repeat(max(size // (tile.numel() * tile.itemsize), 1), 1)


def _random(name: str, dtype: str, *shape: int) -> torch.Tensor:
    """Random numbers of a generator of their own: what is timed besides draws the same ones however many tries there are."""
    import torch

    generator = torch.Generator(name).manual_seed(0)
    return torch.randn(*shape, device=name, dtype=getattr(torch, dtype), generator=generator)


def _fastest(kernel: _Kernel, name: str, tries: int = _TRIES) -> float:
    """The best rate of a few tries, after one that is not timed: a ceiling is what was reached once."""
    clock = clock_of(name)
    kernel.work()
    best = 0.0
    for _ in range(tries):
        clock.start()
        kernel.work()
        best = max(best, kernel.amount / max(clock.stop(), 1e-9))
    return best


def known(name: str, memory_bytes: float) -> devices.Device | None:
    """The device of `model.hardware.devices` that calls itself so and has as much memory; None where none is sure to be it.

    >>> [getattr(known(*each), "name", None) for each in (("NVIDIA H100 80GB HBM3", 85e9), ("NVIDIA H100 PCIe", 85e9), ("T4", 9e9))]
    ['h100', None, None]
    """
    words = set(name.lower().replace("-", " ").split())
    if words & _OTHERS:
        return None
    found = [each for each in devices.DEVICES if set(each.split("-")) <= words]
    fitting = [devices.device(each) for each in found if abs(memory_bytes / devices.device(each).memory_bytes - 1) < 0.1]
    return fitting[0] if len(fitting) == 1 else None
