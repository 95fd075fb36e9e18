"""Facts of a device, and its ceilings: the highest rates that it was measured to reach."""

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
CLOCK_FACTS = ("sm_mhz", "memory_mhz")
"""Facts that change over time: the clocks of a GPU, which rise with its load."""
SMALL_SIDE = 128
"""Side of the small products that are tried first, to find the fast kernels."""
QUICK_SIZES = {"cpu": (512, 2**27), "cuda": (2048, 2**27)}
"""Sizes of quick tries: side of products, and bytes that are read and copied."""
_TRIES = 7
_SHARE = 0.02
"""Largest share of the measurement's time that tries in between may take [-]."""
_SHAPES = ((1, 1, 1, 1), (1, 4, 1, 0.25), (1, 0.25, 1, 4), (1, 0, 4, 4), (4, 0.5, 0.5, 0.5))
"""Products: their number, and rows, inner length and columns in multiples of the side; square, tall, wide, with a vector, and as in
attention.
"""
_LAYOUTS = ((False, True), (False, False), (True, False), (True, True))
"""Whether the columns of the left and of the right operand are contiguous; the first is `x @ w.T`, as layers hold weights."""
_OTHERS = {"pcie", "nvl", "laptop", "mig"}  # variants of the same name that are slower


def import_libraries() -> None:
    """Import the libraries that timing needs, before anything is written; a command reports how to install a missing one."""
    for name in ("torch", "transformers"):
        importlib.import_module(name)


def choose_device(name: str | None) -> str:
    """Return the device to time: the requested one, or by default a GPU if there is one."""
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
    """Make this GPU torch's default; `cuda` without a number already is."""
    import torch

    if ":" in name:  # torch refuses a device without a number
        torch.cuda.set_device(name)


def versions() -> dict[str, str]:
    """Versions of the libraries that run the passes."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def facts(name: str) -> dict[str, Any]:
    """Return the facts of a device and of its software, without host names or paths."""
    import torch

    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "python": platform.python_version()}
    found |= versions()
    if not name.startswith("cuda"):
        threads = {"threads": torch.get_num_threads(), "cores": os.cpu_count()}
        return found | {"name": _processor(), "cache_bytes": _last_cache()} | threads | {"memory_bytes": memory("cpu")}
    properties = torch.cuda.get_device_properties(name)
    found |= {"name": properties.name, "cache_bytes": properties.L2_cache_size, "memory_bytes": properties.total_memory}
    found |= {"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}
    return found | _nvml(properties)


def _nvml(properties: Any) -> dict[str, Any]:
    """Return driver, clocks and power limit, if the vendor's library can be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID: with hidden GPUs the library numbers them differently from torch.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        clocks = {"sm_mhz": pynvml.NVML_CLOCK_SM, "memory_mhz": pynvml.NVML_CLOCK_MEM}
        found = {name: pynvml.nvmlDeviceGetClockInfo(handle, which) for name, which in clocks.items()}
        found |= {f"{name}_highest": pynvml.nvmlDeviceGetMaxClockInfo(handle, which) for name, which in clocks.items()}
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        return found | {"power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000}
    except Exception as error:  # a missing library, an old driver or a sandbox
        return {"nvml": f"not read: {type(error).__name__}"}


def _processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _last_cache() -> int:
    """Return the size of the processor's largest cache [bytes]; 0 if unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=0)


def memory(name: str) -> int:
    """Return the memory of a device [bytes]; 0 if unknown."""
    import torch

    if name.startswith("cuda"):
        return int(torch.cuda.mem_get_info(name)[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def free(name: str) -> int:
    """Return the free memory of a device [bytes], including what torch keeps for reuse; of the CPU all memory."""
    import torch

    if not name.startswith("cuda"):
        return memory(name)
    kept = torch.cuda.memory_reserved(name) - torch.cuda.memory_allocated(name)
    return int(torch.cuda.mem_get_info(name)[0]) + kept


class Ceilings:
    """Highest rates that a device reaches on random data, from tries that are spread over a measurement.

    Libraries have fast kernels for some layouts, shapes and types and slow ones for others, depending on the device. Products are
    therefore tried in every layout of their operands, square, tall, wide, batched and with a vector, in the type itself and in
    float32; the fastest is the ceiling. `best` holds the rates: `copy_bytes_per_s`, bytes that a copy reads and writes;
    `read_bytes_per_s`, of a product of a large matrix with a vector, as in decoding one token; `flop_per_s`, of large products.

    Parameters
    ----------
    name, dtype
        Device, and type of the passes.
    quick
        Use smaller matrices. Their rate may be that of a cache instead of memory.
    """

    def __init__(self, name: str, dtype: str, quick: bool = False) -> None:
        self.name, self.dtypes, self.quick = name, tuple(dict.fromkeys((dtype, "float32"))), quick
        self.best: dict[str, float] = {}
        self.started_at, self.measured_seconds = time.monotonic(), 0.0
        kinds = [(name, each) for each in self.dtypes]
        products = [partial(_product, *kind, shape, layout) for kind in kinds for shape in _SHAPES for layout in _LAYOUTS]
        reads = [partial(_read, *kind, layout) for kind in kinds for layout in range(3)]
        # On large data a slow kernel may take a thousand times as long as a fast one, so the fast ones are found on small data.
        small = {each: _fastest(each(SMALL_SIDE), name, tries=2) for each in products}
        self.best["flop_per_s"] = max(small.values())
        little = {each: _fastest(each(2**20), name, tries=2) for each in reads}  # fits a cache, so no bandwidth
        self.makers = {
            "flop_per_s": sorted(small, key=lambda each: -small[each])[:3],
            "read_bytes_per_s": sorted(little, key=lambda each: -little[each])[:2],
            "copy_bytes_per_s": [partial(_copy, name, dtype)],
        }  # fmt: skip
        self.measure()

    def measure(self) -> None:
        """Measure the fastest kernels once more, and keep the higher rates."""
        begun = time.monotonic()
        side, size = _sizes(self.name, self.quick)
        for ceiling, makers in self.makers.items():
            for make in makers:
                rate = _fastest(make(side if ceiling == "flop_per_s" else size), self.name)
                self.best[ceiling] = max(rate, self.best.get(ceiling, 0.0))
        self.measured_seconds += time.monotonic() - begun

    def measure_if_due(self) -> None:
        """Measure once more if tries took a small share of the time so far; ignore errors, such as too little memory next to the
        model.
        """
        if self.measured_seconds < _SHARE * (time.monotonic() - self.started_at):
            with contextlib.suppress(RuntimeError, MemoryError):  # a lost device fails at the next pass too
                self.measure()


def _sizes(name: str, quick: bool) -> tuple[int, int]:
    """Return the side of large products, and the bytes that are read and copied: twice the last cache or, if quick, less."""
    if quick:
        return QUICK_SIZES[name.partition(":")[0]]
    if name.startswith("cuda"):
        return 8192, 2**31
    return 2048, min(max(2 * _last_cache(), 2**28), max(memory(name) // 12, 2**26))


class _Kernel(NamedTuple):
    """Work on random data, and its amount in operations or bytes."""

    work: Callable[[], object]
    amount: float


def _product(name: str, dtype: str, shape: tuple[float, ...], layout: tuple[bool, bool], side: int) -> _Kernel:
    """Return a product of matrices whose sizes are multiples of `side`; `layout` as in `_LAYOUTS`."""
    batch, m, k, n = shape[0], *(max(round(each * side), 1) for each in shape[1:])
    many = (int(batch),) if batch > 1 else ()

    def operand(rows: int, columns: int, turned: bool) -> torch.Tensor:
        made = _random(name, dtype, *many, *((columns, rows) if turned else (rows, columns)))
        return made.transpose(-2, -1) if turned else made

    left, right = operand(m, k, layout[0]), operand(k, n, layout[1])
    return _Kernel(lambda: left @ right, 2 * batch * m * k * n)


def _read(name: str, dtype: str, layout: int, size: int) -> _Kernel:
    """Return a product that reads a matrix of `size` bytes: with a column, of a row with its transpose, or of a row with it."""
    matrix = _matrix(name, dtype, size)
    column = _random(name, dtype, matrix.shape[1 if layout < 2 else 0])
    works: Sequence[Callable[[], object]] = (
        lambda: matrix @ column[:, None], lambda: column[None] @ matrix.T, lambda: column[None] @ matrix
    )  # fmt: skip
    return _Kernel(works[layout], matrix.numel() * matrix.itemsize)


def _copy(name: str, dtype: str, size: int) -> _Kernel:
    """Return a copy of `size` bytes, which reads and writes them."""
    import torch

    matrix = _matrix(name, dtype, size)
    target = torch.empty_like(matrix)
    return _Kernel(lambda: target.copy_(matrix), 2 * matrix.numel() * matrix.itemsize)


def _matrix(name: str, dtype: str, size: int) -> torch.Tensor:
    """Return about `size` bytes of random numbers: a repeated tile, because they take long to draw."""
    tile = _random(name, dtype, 64, 4096)
    return tile.repeat(max(size // (tile.numel() * tile.itemsize), 1), 1)


def _random(name: str, dtype: str, *shape: int) -> torch.Tensor:
    """Return random numbers of a separate generator, so that the draws of other timed work do not depend on the number of tries."""
    import torch

    generator = torch.Generator(name).manual_seed(0)
    return torch.randn(*shape, device=name, dtype=getattr(torch, dtype), generator=generator)


def _fastest(kernel: _Kernel, name: str, tries: int = _TRIES) -> float:
    """Return the best rate of a few tries after an untimed one."""
    clock = clock_of(name)
    kernel.work()
    best = 0.0
    for _ in range(tries):
        clock.start()
        kernel.work()
        best = max(best, kernel.amount / max(clock.stop(), 1e-9))
    return best


def published_device(name: str, memory_bytes: float) -> devices.Device | None:
    """Return the device of `model.hardware.devices` with this name and memory; None if none matches or several do.

    >>> cards = ("NVIDIA H100 80GB HBM3", 85e9), ("NVIDIA H100 PCIe", 85e9), ("T4", 9e9)
    >>> [getattr(published_device(*each), "name", None) for each in cards]
    ['h100', None, None]
    """
    words = set(name.lower().replace("-", " ").split())
    if words & _OTHERS:
        return None
    found = [each for each in devices.DEVICES if set(each.split("-")) <= words]
    fitting = [devices.device(each) for each in found if abs(memory_bytes / devices.device(each).memory_bytes - 1) < 0.1]
    return fitting[0] if len(fitting) == 1 else None
