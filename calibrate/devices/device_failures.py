"""Classification of device errors: out of memory, which a smaller pass avoids, or a lost device."""

from __future__ import annotations

from typing import NamedTuple

_NO_MEMORY, _LOST = ("can't allocate memory", "CUDA error: out of memory"), "CUDA error"


class Failure(NamedTuple):
    """A device error: its message in one line, whether memory ran out, and whether the device is lost."""

    line: str
    memory: bool
    lost: bool


def failure_of(error: BaseException) -> Failure:
    """Classify an error of torch or of Python.

    This is the only place that reads a library's error text. For GPU memory torch has an error class, and from version 2.8 on
    another for other errors of the driver; for host memory it has none.

    >>> failure_of(MemoryError("9 GB"))
    Failure(line='out of memory: 9 GB', memory=True, lost=False)
    """
    import torch

    line = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in line for words in _NO_MEMORY):
        return Failure(f"out of memory: {line}", memory=True, lost=False)
    lost = isinstance(error, getattr(torch, "AcceleratorError", ())) or _LOST in line
    return Failure(f"{type(error).__name__}: {line}", memory=False, lost=lost)
