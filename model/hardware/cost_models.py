"""Seconds of passes on hardware: what a cost model of a device answers, and what follows from it.

Three cost models answer alike (`Hardware`): `UniformLayers`, the papers' assumption in seconds; `model.hardware.roofline.Roofline`,
from the arithmetic of a transformer and the peaks of a device; `model.hardware.profile_costs.ProfileCosts`, from a profile. Each
says how far off it may be. `Served` adds to any of them what an engine takes for a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.base import checks
from model.hardware.interpolation import NONE, Estimate


class Hardware(Protocol):
    """One model on one device, or on `tensor_parallel` devices that share each of its layers (tensor parallelism)."""

    @property
    def shape(self) -> Shape:
        """The model."""

    @property
    def tensor_parallel(self) -> int:
        """Devices that a layer is split over."""

    @property
    def provenance(self) -> str:
        """`measured`, `composed`, `published` or `assumed`, and of what: for readers."""

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """One decoder layer over `width` new tokens of each of `batch` texts behind `context` cached positions [s].

        `busy` other units of the same host are at work meanwhile.
        """

    def head(self, positions: ArrayLike) -> Estimate:
        """Projecting so many positions onto the vocabulary [s]."""

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Embedding so many tokens [s]."""

    def step(self, batch: ArrayLike = 1) -> Estimate:
        """What a pass takes once: launching, preparing, sampling [s]."""

    def transfer(self, size: ArrayLike) -> Estimate:
        """Handing so many bytes to another device or process [s]."""


@dataclass(frozen=True)
class UniformLayers:
    """Every layer takes the same time whatever it is run on: the papers' assumption, in seconds.

    >>> from model.architectures.transformer import preset
    >>> float(pass_time(UniformLayers(preset("llama-2-13b"), 0.001), 1, 500).seconds)
    0.04
    """

    shape: Shape
    seconds_per_layer: float
    provenance: str = "assumed"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        checks.number("seconds_per_layer", self.seconds_per_layer, 0)

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """One time for all."""
        seconds = np.full(np.broadcast_shapes(np.shape(width), np.shape(context), np.shape(batch)), self.seconds_per_layer)
        return Estimate(seconds, np.zeros_like(seconds))

    def head(self, positions: ArrayLike) -> Estimate:
        """Nothing."""
        return NONE

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Nothing."""
        return NONE

    def step(self, batch: ArrayLike = 1) -> Estimate:
        """Nothing."""
        return NONE

    def transfer(self, size: ArrayLike) -> Estimate:
        """Nothing."""
        return NONE


@dataclass(frozen=True)
class Served:
    """A model on hardware as an engine runs it: each pass takes `step_s` more, whatever its width, context and batch.

    >>> from model.architectures.transformer import preset
    >>> kernels = UniformLayers(preset("llama-2-13b"), 0.001)
    >>> float(pass_time(Served(kernels, 0.002), 4, 500, 8).seconds)
    0.042
    """

    kernels: Hardware
    step_s: float

    def __post_init__(self) -> None:
        checks.number("step_s", self.step_s, 0)

    @property
    def shape(self) -> Shape:
        """The model."""
        return self.kernels.shape

    @property
    def tensor_parallel(self) -> int:
        """Devices that a layer is split over."""
        return self.kernels.tensor_parallel

    @property
    def provenance(self) -> str:
        """That of the kernels; what the engine adds is given."""
        return self.kernels.provenance

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """See `Hardware`."""
        return self.kernels.layer(width, context, batch, busy=busy)

    def head(self, positions: ArrayLike) -> Estimate:
        """See `Hardware`."""
        return self.kernels.head(positions)

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """See `Hardware`."""
        return self.kernels.embedding(tokens)

    def step(self, batch: ArrayLike = 1) -> Estimate:
        """What a pass takes once: of the kernels, and of the engine [s]."""
        return self.kernels.step(batch) + Estimate(np.asarray(self.step_s), np.asarray(0.0))

    def transfer(self, size: ArrayLike) -> Estimate:
        """See `Hardware`."""
        return self.kernels.transfer(size)


def pass_time(
    hardware: Hardware,
    width: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike = 1,
    *,
    layers: int | None = None,
    heads: ArrayLike | None = None,
    busy: int = 0,
) -> Estimate:
    """A pass over `width` new tokens of each of `batch` texts, through so many layers or all [s].

    `heads` positions of each text are projected: all of them where it is left out, as verifying does.
    """
    depth = hardware.shape.layers if layers is None else layers
    checks.whole("layers", depth, 0, hardware.shape.layers)
    wide, many = np.asarray(width), np.asarray(batch)
    projected = np.asarray(wide if heads is None else heads)
    total = hardware.layer(width, context, batch, busy=busy).repeated(depth)
    total = total + hardware.embedding(wide * many) + hardware.step(batch)
    return total if heads is not None and not np.any(projected) else total + hardware.head(projected * many)


def prompt_time(hardware: Hardware, tokens: ArrayLike, batch: ArrayLike = 1, *, source: int = 0) -> Estimate:
    """Reading a prompt of so many tokens in one pass, its last position projected [s].

    Of an encoder-decoder the encoder reads `source` tokens first, each of its layers in the time of a decoder layer over as many
    new tokens, in proportion to its weights: assumed.
    """
    total = pass_time(hardware, tokens, 0, batch, heads=1)
    shape = hardware.shape
    if not shape.encoder_layers or not source:
        return total
    share = shape.encoder_layer_weights / shape.layer_weights
    return hardware.layer(source, 0, batch).repeated(shape.encoder_layers * share) + total


def step_time(hardware: Hardware, context: ArrayLike, batch: ArrayLike = 1) -> Estimate:
    """One step of plain decoding: a pass over one new token of each text [s]."""
    return pass_time(hardware, 1, context, batch)


def largest_batch(hardware: Hardware, context: int, width: int, *, most: int = 1024) -> int:
    """The largest batch at which a pass over `width` tokens of each text still takes at most twice one over one; 0 for none.

    Beyond it even a perfect draft of that length gains less than it would with a free verification, by more than half.
    """
    batches = np.arange(1, most + 1)
    wide = pass_time(hardware, width, context, batches).seconds
    single = pass_time(hardware, 1, context, batches).seconds
    good = wide <= 2 * single
    return int(most if good.all() else np.argmin(good))


def bytes_of_state(shape: Shape, layers: int) -> int:
    """What a process hands over with a token: its hidden state, and its keys and values of so many layers [bytes].

    >>> from model.architectures.transformer import preset
    >>> bytes_of_state(preset("llama-2-13b"), 20) / 1e6  # 0.41 MB and 10 kB
    0.41984
    """
    return shape.cache_bytes(layers) + shape.hidden * shape.bytes_each


# --- memory ---


@dataclass(frozen=True)
class DeviceMemory:
    """What a method keeps on each device, and what there is [bytes]."""

    weights: float
    cache: float
    available: float

    @property
    def needed(self) -> float:
        """Weights and cache together."""
        return self.weights + self.cache

    @property
    def share(self) -> float:
        """What is needed over what there is."""
        return self.needed / self.available if self.available else math.inf


def memory(
    shape: Shape, available: float, *, context: int, batch: int = 1, tensor_parallel: int = 1, also: tuple[Shape, ...] = ()
) -> DeviceMemory:
    """Memory of one device that holds a replica of the model, or one of `tensor_parallel` parts, and others as a whole (a draft).

    A method that runs on several units keeps a replica on each: their number does not change what each of them holds.

    >>> from model.architectures.transformer import preset
    >>> found = memory(preset("llama-2-13b"), 80e9, context=4096, batch=8)
    >>> round(found.weights / 1e9, 1), round(found.cache / 1e9, 1), found.share < 1
    (26.0, 26.8, True)
    """
    parts = [shape.shard(tensor_parallel), *also]
    weights = float(sum(each.parameters * each.bytes_each for each in parts))
    cache = float(sum(each.cache_bytes() * context * batch for each in parts))
    return DeviceMemory(weights, cache, available)


def refuse_too_large(what: DeviceMemory, device: str) -> None:
    """An error where weights and cache exceed what a device has."""
    if what.share > 1:
        raise checks.ParameterError(
            f"weights ({what.weights / 1e9:.1f} GB) and cache ({what.cache / 1e9:.1f} GB) must be at most the"
            f" {what.available / 1e9:.1f} GB of {device}, got {what.needed / 1e9:.1f} GB; take a smaller batch, context or model,"
            " a larger tensor_parallel, or another device"
        )
