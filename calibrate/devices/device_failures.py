"""What an error of a device means: too little memory, which a smaller pass does without, or a device that is lost."""

from __future__ import annotations

from typing import NamedTuple

_NO_MEMORY, _LOST = ("can't allocate memory", "CUDA error: out of memory"), "CUDA error"


class Failure(NamedTuple):
    """An error in a line, whether memory was lacking, and whether the device is gone with it."""

    line: str
    memory: bool
    lost: bool


def failure_of(error: BaseException) -> Failure:
    """What an error of torch, or of Python, says of the device.

    This is the one place where a library's text is read: torch has a class of errors for the memory that its own allocator lacks
    on a GPU, and from version 2.8 on one for whatever the driver refuses, but none for the memory of the processor.

    >>> failure_of(MemoryError("9 GB"))
    Failure(line='out of memory: 9 GB', memory=True, lost=False)
    """
    import torch

    line = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in line for words in _NO_MEMORY):
        return Failure(f"out of memory: {line}", memory=True, lost=False)
    lost = isinstance(error, getattr(torch, "AcceleratorError", ())) or _LOST in line
    return Failure(f"{type(error).__name__}: {line}", memory=False, lost=lost)
