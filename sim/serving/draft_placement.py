"""Where a server's draft runs: on the target's devices, or on a device of its own, with a link between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from model.architectures import draft_heads
from model.base import checks
from model.base.checks import ParameterError
from model.engines.kernel_times import KernelSource
from model.hardware import devices, memory_limit
from model.methods.draft_model import COLOCATED, PLACEMENTS, SEPARATE
from model.serving.step_prices import DraftDevice
from sim.advice import engine_settings
from sim.advice.situation import Evidence, Situation

_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_LINK = 1.0
"""Longest time of a transfer [s]."""


@dataclass(frozen=True)
class DraftPlacement:
    """Where the draft runs, as the user said it.

    Parameters
    ----------
    placement
        `colocated`: on the target's devices. `separate`: on one device of its own.
    link
        Time of a transfer between the two with its unit, such as "20us"; a step that drafts has two. Needed with `separate`.
    gpu
        Device of a separate draft: a name of `sim ls devices`, or its .toml. Default: the target's.

    >>> DraftPlacement("separate", "20us").seconds
    2e-05
    """

    placement: str = COLOCATED
    link: str | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, PLACEMENTS)
        if self.separate:
            if self.link is None:
                raise ParameterError(
                    "--link is required with placement separate: the time of a transfer between the devices, such as 20us; it is"
                    " never taken as free"
                )
            checks.number("link", self.seconds, 0, MOST_LINK)
            return
        for option, value in (("--link", self.link), ("--draft-gpu", self.gpu)):
            if value is not None:
                raise ParameterError(f"{option} is of a draft on a device of its own, got {value}; add --placement separate")

    @property
    def separate(self) -> bool:
        """True if the draft has a device of its own."""
        return self.placement == SEPARATE

    @property
    def seconds(self) -> float:
        """Time of a transfer [s]."""
        found = _TIME.fullmatch(self.link or "")
        if found is None:
            raise ParameterError(f"link must be a time of at least 0 with its unit, such as 20us, got {checks.shown(self.link)}")
        return float(found[1]) * _UNITS[found[2]]

    def device(self, of: Situation) -> DraftDevice | None:
        """The draft's own device; None if it has none. Raises ParameterError for a draft that must be with the target."""
        if not self.separate:
            return None
        draft = of.draft or engine_settings.draft_of(of.law.facts.get("draft", ""))
        if draft is None:
            raise ParameterError(
                "--draft is required with placement separate: a model of `sim ls shapes`, whose passes and memory leave the target"
            )
        if draft.partition(":")[0] in draft_heads.ABOUT:
            raise ParameterError(
                f"placement must be '{COLOCATED}' with draft {draft}, which reads the target's states, got '{SEPARATE}'; leave"
                " placement out, or take a draft model"
            )
        kernels = of.law.kernels
        if self.gpu is None or (kernels is not None and kernels.draft is not None and self.gpu == kernels.gpu):
            return DraftDevice(self.seconds)
        devices.device(self.gpu)  # refused by its name
        if kernels is None or kernels.draft is None:
            raise ParameterError(
                f"--draft-gpu must be left out with this engine law, whose draft passes have a fitted time, got {self.gpu}: their"
                " time on another device is not known; give --model, --gpu and --draft without the law"
            )
        return DraftDevice(self.seconds, KernelSource(draft, self.gpu, dtype=kernels.dtype))

    def blocks(self, of: Situation, share: float, positions: int, block_size: int) -> int | None:
        """Blocks of the draft's own cache that this share of its device's memory holds; None: not known.

        `positions` are those over which the bytes of a position are averaged.
        """
        name, shape = self.gpu or of.gpu, memory_limit.draft_shape(of.draft, of.said.dtype)
        if name is None or shape is None:
            return None
        device = devices.device(name)
        room = memory_limit.memory_of(shape, device, context=positions, sequences=1, tensor_parallel=1)
        found = int((share * room.available - room.weights) / (room.cache / positions * block_size))
        if found < 1:
            raise ParameterError(
                f"--draft-gpu must hold the draft's weights ({room.weights / 1e9:.1f} GB) and a cache in {share:g} of its memory,"
                f" got {device.name} with {room.available / 1e9:.1f} GB; take a larger device, or a smaller draft"
            )
        return found

    def evidence(self, of: Situation) -> Iterator[Evidence]:
        """What the study rests on for a draft on a device of its own."""
        if self.separate:
            where = self.gpu or of.gpu or "the same device"
            yield Evidence("draft device", f"1 x {where} for each replica", "--placement", "assumed")
            yield Evidence("link", f"{1e6 * self.seconds:g} us for each transfer, two in a step that drafts", "--link", "assumed")


ON_THE_TARGET = DraftPlacement()
