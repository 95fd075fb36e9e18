"""Cost model of a profile: measured points as they are, interpolation between them, constant efficiency beyond them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape, restored
from model.base import checks
from model.base.checks import ParameterError
from model.base.table_records import build
from model.hardware.interpolation import NONE, Bound, Estimate, Surface
from model.hardware.profile import AXES, Profile
from model.hardware.roofline import Efficiency, Roofline

PEAKS = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""A device at its full peaks: a lower bound of all times."""


def shape_of(profile: Profile) -> Shape:
    """Shape of the profiled model."""
    found: Shape = build(Shape, restored(profile.shape), f"profile {profile.name}.shape", "it is written with the profile")
    return found


class ProfileCosts:
    """Cost model of a profile.

    A layer is looked up as a whole, or as dense part plus attention, with two reductions under tensor parallelism. Other parts that
    a profile lacks (overhead per step, transfers) are assumed to take 0 s and are listed in `missing`.

    Parameters
    ----------
    profile
        A profile of kind `model`.
    tensor_parallel
        Number of devices that each layer is split over; the profile must have it.
    """

    def __init__(self, profile: Profile, *, tensor_parallel: int = 1) -> None:
        if profile.kind != "model":
            raise ParameterError(f"profile {profile.name} must be of kind model, got {profile.kind}; compose one from operations")
        checks.whole("tensor_parallel", tensor_parallel, 1)
        if tensor_parallel not in profile.tensor_parallel:
            has = ", ".join(map(str, profile.tensor_parallel))
            raise ParameterError(f"tensor_parallel must be one of {has} in profile {profile.name}, got {tensor_parallel}")
        self.profile, self.tensor_parallel = profile, tensor_parallel
        self.shape = shape_of(profile)
        self._surfaces: dict[tuple[str, int, int], Surface | None] = {}

    @property
    def provenance(self) -> str:
        """`measured` or `composed`, with the repositories of its sources."""
        repositories = "; ".join(dict.fromkeys(source.repository for source in self.profile.sources))
        return f"{self.profile.provenance} ({repositories})"

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Parts of a pass that were not measured: they are assumed to take 0 s."""
        wanted = ["head", "embedding", "step", "send"] + ["all_reduce"] * (self.tensor_parallel > 1) + ["attention"] * self._split
        return tuple(part for part in wanted if part not in self.profile.parts)

    @property
    def _split(self) -> bool:
        """True if layers are stored as dense part and attention."""
        return "layer" not in self.profile.parts

    def surface(self, part: str, *, tensor_parallel: int | None = None, busy: int = 0) -> Surface | None:
        """Interpolated times of a part; None if the profile lacks it."""
        key = part, self.tensor_parallel if tensor_parallel is None else tensor_parallel, busy
        if key not in self._surfaces:
            rows = self.profile.rows(*key)
            self._surfaces[key] = None if not rows.height else Surface(
                {axis: rows[axis].to_numpy() for axis in AXES[part]}, rows["time_s"].to_numpy(),
                spread=((rows["high_s"] - rows["low_s"]) / 2 / rows["time_s"].clip(1e-12)).to_numpy(),
                error=self.profile.errors.get(part), bound=self._bound(part, key[1]),
            )  # fmt: skip
        return self._surfaces[key]

    def _bound(self, part: str, tensor_parallel: int) -> Bound | None:
        peak = Roofline(self.shape, self.profile.bandwidth, self.profile.rate, PEAKS, tensor_parallel)
        bounds: dict[str, Bound] = {
            "layer": lambda width, context, batch: peak.layer(width, context, batch).seconds,
            "dense": peak.gemms,
            "attention": peak.attention,
            "head": lambda positions: peak.head(positions).seconds,
            "embedding": lambda tokens: peak.embedding(tokens).seconds,
            "all_reduce": lambda size: np.asarray(size) / self.profile.bandwidth,
            "send": lambda size: np.asarray(size) / self.profile.bandwidth,
        }
        return bounds.get(part)

    def part(self, part: str, *point: ArrayLike) -> Estimate | None:
        """Time of a part by name [s]; None if the profile lacks it."""
        surface = self.surface(part)
        return None if surface is None else surface(*point)

    def _or_none(self, part: str, *point: ArrayLike) -> Estimate:
        surface = self.surface(part)
        if surface is None:
            surface = self.surface(part, tensor_parallel=1)
        return NONE if surface is None else surface(*point)

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """One decoder layer [s]."""
        if not self._split:
            surface = self.surface("layer", busy=busy)
            if surface is None:
                known = sorted(int(each) for each in self.profile.table["busy"].unique())
                raise ParameterError(
                    f"busy must be one of {', '.join(map(str, known))} in profile {self.profile.name}, got {busy}; measure it"
                )
            return surface(width, context, batch)
        if busy:
            raise ParameterError(
                f"busy must be 0 in profile {self.profile.name}, got {busy}; separate devices do not slow each other down"
            )
        tokens = np.asarray(width) * np.asarray(batch)
        products = self.surface("dense")
        assert products is not None  # every size in `tensor_parallel` has it
        total = products(tokens) + self.attention(width, context, batch)
        if self.tensor_parallel > 1:
            total = total + self._or_none("all_reduce", tokens * self.shape.hidden * self.shape.bytes_each).repeated(2)
        return total

    def attention(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Estimate:
        """Attention of one layer [s]. Without times at this tensor parallel size, an unsplit layer at a smaller batch is used."""
        surface = self.surface("attention")
        if surface is not None:
            return surface(width, context, batch)
        whole = self.surface("attention", tensor_parallel=1)
        if whole is None:
            return NONE
        if self.shape.latent is not None:
            raise ParameterError(
                f"profile {self.profile.name} must have attention at tensor_parallel {self.tensor_parallel}: the cache of latent"
                " attention is on every device, so that a smaller batch does not stand in"
            )
        share = np.asarray(batch) * self.shape.shard(self.tensor_parallel).kv_heads / self.shape.kv_heads
        return whole(width, context, share)

    def head(self, positions: ArrayLike) -> Estimate:
        """Projection of `positions` positions [s]; each of several devices has its part of the vocabulary."""
        surface = self.surface("head")
        if surface is not None:
            return surface(positions)
        whole = self.surface("head", tensor_parallel=1)
        return NONE if whole is None else whole(positions).repeated(1 / self.tensor_parallel)

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Embedding of `tokens` tokens [s]."""
        return self._or_none("embedding", tokens)

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Overhead per pass, as measured: of launching every pass, also of one within another's engine step [s]."""
        return self._or_none("step", batch)

    def transfer(self, size: ArrayLike) -> Estimate:
        """Sending `size` bytes to another device or process [s]."""
        return self._or_none("send", size)
