"""Seconds of forward passes on hardware: the interface of cost models, and quantities that follow from it.

Three cost models share one interface (`Hardware`): `UniformLayers`, the papers' assumption, in seconds;
`model.hardware.roofline.Roofline`, from the operations of a transformer and the peaks of a device;
`model.hardware.profile_costs.ProfileCosts`, from a profile. Each estimates its own error. `WithEngineOverhead` adds the
overhead of an engine per step to any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.base import checks
from model.hardware.interpolation import NONE, Estimate


class Hardware(Protocol):
    """Cost model of one model on one device, or on `tensor_parallel` devices (tensor parallelism)."""

    @property
    def shape(self) -> Shape:
        """Shape of the model."""

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that a layer is split over."""

    @property
    def provenance(self) -> str:
        """`measured`, `composed`, `published` or `assumed`, with the source, as printed text."""

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """Seconds of one decoder layer: `width` new tokens per sequence after `context` cached positions, `batch` sequences [s].

        Meanwhile `busy` other units of the same host are working.
        """

    def head(self, positions: ArrayLike) -> Estimate:
        """Seconds of the projection of `positions` positions onto the vocabulary [s]."""

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Seconds of the embedding of `tokens` tokens [s]."""

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Overhead per pass: launching, preparing, sampling [s].

        With `within` the pass is part of another pass's engine step, and the engine's own overhead is left out.
        """

    def transfer(self, size: ArrayLike) -> Estimate:
        """Seconds of sending `size` bytes to another device or process [s]."""


@dataclass(frozen=True)
class UniformLayers:
    """Cost model in which every layer takes the same time at any width, context and batch: the papers' assumption.

    >>> from model.architectures.published_shapes import preset
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
        """Seconds of a layer, a constant [s]."""
        seconds = np.full(np.broadcast_shapes(np.shape(width), np.shape(context), np.shape(batch)), self.seconds_per_layer)
        return Estimate(seconds, np.zeros_like(seconds))

    def head(self, positions: ArrayLike) -> Estimate:
        """Zero seconds: only layers take time."""
        return NONE

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Zero seconds: only layers take time."""
        return NONE

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Zero seconds: only layers take time."""
        return NONE

    def transfer(self, size: ArrayLike) -> Estimate:
        """Zero seconds: only layers take time."""
        return NONE


@dataclass(frozen=True)
class WithEngineOverhead:
    """Cost model with an engine's overhead: each pass takes `step_s` more, independent of width, context and batch.

    >>> from model.architectures.published_shapes import preset
    >>> kernels = UniformLayers(preset("llama-2-13b"), 0.001)
    >>> float(pass_time(WithEngineOverhead(kernels, 0.002), 4, 500, 8).seconds)
    0.042
    """

    kernels: Hardware
    step_s: float

    def __post_init__(self) -> None:
        checks.number("step_s", self.step_s, 0)

    @property
    def shape(self) -> Shape:
        """Shape of the model."""
        return self.kernels.shape

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that a layer is split over."""
        return self.kernels.tensor_parallel

    @property
    def provenance(self) -> str:
        """Provenance of the kernel times; the engine's overhead is an input."""
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

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Overhead per pass, of the kernels and, once per engine step, of the engine [s]."""
        return self.kernels.step(batch, within=within) + Estimate(np.asarray(0.0 if within else self.step_s), np.asarray(0.0))

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
    """Seconds of a pass over `width` new tokens per sequence, for `batch` sequences, through `layers` layers (default: all) [s].

    `heads` positions per sequence are projected onto the vocabulary; by default all new ones, as in verification.
    """
    depth = hardware.shape.layers if layers is None else layers
    checks.whole("layers", depth, 0, hardware.shape.layers)
    tokens, sequences = np.asarray(width), np.asarray(batch)
    projected = np.asarray(tokens if heads is None else heads)
    total = hardware.layer(width, context, batch, busy=busy).repeated(depth)
    total = total + hardware.embedding(tokens * sequences) + hardware.step(batch)
    return total if heads is not None and not np.any(projected) else total + hardware.head(projected * sequences)


def prompt_time(hardware: Hardware, tokens: ArrayLike, batch: ArrayLike = 1, *, source: int = 0) -> Estimate:
    """Seconds of a prefill: `tokens` prompt tokens in one pass that projects the last position [s].

    In an encoder-decoder the encoder first reads `source` tokens. Assumed: an encoder layer takes the time of a decoder layer over
    as many new tokens, in proportion to its weights.
    """
    total = pass_time(hardware, tokens, 0, batch, heads=1)
    shape = hardware.shape
    if not shape.encoder_layers or not source:
        return total
    share = shape.encoder_layer_weights / shape.layer_weights
    return hardware.layer(source, 0, batch).repeated(shape.encoder_layers * share) + total


def step_time(hardware: Hardware, context: ArrayLike, batch: ArrayLike = 1) -> Estimate:
    """Seconds of a step of plain decoding: a pass over one new token per sequence [s]."""
    return pass_time(hardware, 1, context, batch)


def largest_batch(hardware: Hardware, context: int, width: int, *, most: int = 1024) -> int:
    """Return the largest batch at which a pass over `width` tokens per sequence takes at most twice one over one token; 0 for none.

    In larger batches even a perfect draft loses more than half of its gain to verification.
    """
    batches = np.arange(1, most + 1)
    multiple = pass_time(hardware, width, context, batches).seconds
    single = pass_time(hardware, 1, context, batches).seconds
    cheap = multiple <= 2 * single
    return int(most if cheap.all() else np.argmin(cheap))


def bytes_of_state(shape: Shape, layers: int) -> int:
    """Bytes that a process sends with a token: its hidden state, and its keys and values of `layers` layers [bytes].

    >>> from model.architectures.published_shapes import preset
    >>> bytes_of_state(preset("llama-2-13b"), 20) / 1e6  # 0.41 MB and 10 kB
    0.41984
    """
    return shape.cache_bytes(layers) + shape.hidden * shape.bytes_each


# --- memory ---


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that a method needs on each device, and the memory available [bytes]."""

    weights: float
    cache: Any
    """A number, or an array with one entry for each context."""
    available: float

    @property
    def required(self) -> Any:
        """Weights plus cache [bytes]."""
        return self.weights + self.cache

    @property
    def share(self) -> Any:
        """Needed over available memory [-]."""
        return self.required / self.available if self.available else math.inf


def memory(
    shape: Shape, available: float, *, context: Any, batch: int = 1, tensor_parallel: int = 1, also: tuple[Shape, ...] = (),
    draft_budget: int | Sequence[int | None] | None = None,
) -> DeviceMemory:  # fmt: skip
    """Memory of one device that holds a replica of the model, or one of `tensor_parallel` parts, and models `also` (a draft).

    Those are whole: of a draft that is split as well, `also` has the part on one device (`Shape.shard`). A method on several units
    keeps a replica on each, so their number does not change the memory per unit. A draft head shares the embedding, and perhaps the
    head, of the target. A draft whose passes read at most `draft_budget` cached positions of a sequence keeps no others; a model
    that drafts for itself keeps all, because it verifies with them. The budget is one for all of `also`, or one for each.

    >>> from model.architectures.published_shapes import preset
    >>> device = memory(preset("llama-2-13b"), 80e9, context=4096, batch=8)
    >>> round(device.weights / 1e9, 1), round(device.cache / 1e9, 1), device.share < 1
    (26.0, 26.8, True)
    """
    parts = [shape.shard(tensor_parallel), *also]
    weights = float(sum(each.weight_bytes for each in parts))
    budgets = draft_budget if isinstance(draft_budget, Sequence) else [draft_budget] * len(also)
    kept = [context if budget is None else _at_most(context, budget) for budget in (None, *budgets)]
    cache = sum(each.cache_bytes_at(held) * batch for each, held in zip(parts, kept, strict=True))
    return DeviceMemory(weights, cache * 1.0, available)


def _at_most(context: Any, budget: int) -> Any:
    return np.minimum(context, budget) if np.ndim(context) else min(context, budget)


def refuse_too_large(what: DeviceMemory, device: str) -> None:
    """Raise ParameterError if weights and cache exceed the memory of a device."""
    if what.share > 1:
        raise checks.ParameterError(
            f"weights ({what.weights / 1e9:.1f} GB) and cache ({what.cache / 1e9:.1f} GB) must be at most the"
            f" {what.available / 1e9:.1f} GB of {device}, got {what.required / 1e9:.1f} GB; take a smaller batch, context or model,"
            " a larger tensor_parallel, weights in fewer bits (weights), or another device"
        )
