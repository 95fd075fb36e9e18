"""Roofline cost model: seconds of a pass from the operations of a transformer and the peaks of a device.

It needs no measurement; a few fit its efficiencies. A matrix product reads its weights once and takes about as long as the slower
of reading and computing; so does attention; launches are added [Williams2009].

[Williams2009] S. Williams, A. Waterman, D. Patterson. Roofline: an insightful visual performance model for multicore architectures.
CACM 52(4), 2009.

Sparse experts are two grouped products that read the experts selected by some token of the pass, in expectation. Latent attention
is in its absorbed form, but for prompts. A layer of a model whose layers differ is their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.layer_parts import FORMATS, MatrixProduct, experts_read
from model.architectures.transformer import Shape, kept, windowed
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.devices import Device
from model.hardware.interpolation import Estimate, Floats

SMALL_LAUNCH = 3e-6
"""Launch time of a norm, an activation or a rotary embedding [s]: assumed."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peaks that kernels reach, and fixed times.

    Parameters
    ----------
    memory, compute
        Share of the peak bandwidth and of the peak rate that matrix products reach [-].
    elementwise, cache
        Share of the peak bandwidth that elementwise operations reach, and that attention reaches on keys and values [-]; may exceed
        1 because of caches.
    launch, attention_launch
        Fixed time of each matrix product of a layer, and of its attention [s].
    error, compute_error
        Relative error of the time of products that are memory-bound, and compute-bound, from the fit [-].
    attention_error
        Relative error of attention, and of transfers between devices [-].

    The default values were fitted to measured layers of five models on A100, A40, H100 and RTX 4090, and to six tables of attention
    on A100, H100 and L40S (`calibrate fit roofline` repeats the fit). The errors of products are the largest medians on a held-out
    GPU, up to 64 tokens and beyond 256; one measured layer of a GPU reduces them (`calibrate fit roofline --layer`). The error of
    attention ranges from 10 to 50 % between tables (`calibrate/VALIDATION.md`); .25 represents it.
    """

    memory: float = 0.806
    compute: float = 0.729
    elementwise: float = 0.385
    cache: float = 0.81
    launch: float = 6.6e-6
    attention_launch: float = 11.2e-6
    error: float = 0.2
    attention_error: float = 0.25
    compute_error: float = 0.45

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.number(field.name, getattr(self, field.name), 0, 10)
        for name in ("memory", "compute", "elementwise", "cache"):
            if getattr(self, name) == 0:
                raise checks.ParameterError(f"{name} must be above 0, got 0.0; it is a share of the device's peak")


@dataclass(frozen=True)
class Roofline:
    """Cost model of a model on a device, from the model's shape and the device's peaks.

    Parameters
    ----------
    shape, tensor_parallel
        The model, and the number of devices that its layers are split over.
    bandwidth, rate
        Peaks of each device [bytes/s], [operations/s].
    product_rate
        Rate of products with quantised weights [operations/s]; None for `rate`, if they are computed in the activations' type.
    link, latency
        Bandwidth to another device [bytes/s], and latency of a transfer [s].
    efficiency
        Shares of the peaks that are reached.
    """

    shape: Shape
    bandwidth: float
    rate: float
    efficiency: Efficiency = Efficiency()
    tensor_parallel: int = 1
    link: float = 50e9
    latency: float = 10e-6
    provenance: str = "assumed efficiencies of published peaks"
    product_rate: float | None = None

    @classmethod
    def on_device(cls, shape: Shape, device: Device, efficiency: Efficiency | None = None, tensor_parallel: int = 1) -> Roofline:
        """Return the cost model of a model on a device, with the rates that the device has for its types.

        Products of quantised weights are computed in their arithmetic type where the device has a rate for it, else in the type of
        activations, which is stated: engines do so too [vLLM]. A device without a rate for activations is refused.

        [vLLM] vLLM 0.32 documentation, FP8 W8A8: computed in FP8 from compute capability 8.9 (Ada Lovelace), with weights only in
        FP8 (W8A16) from 7.5 (Turing).

        >>> from model.architectures.published_shapes import preset
        >>> from model.hardware.devices import device
        >>> Roofline.on_device(preset("deepseek-v3"), device("a100")).provenance
        'assumed efficiencies of the published peaks of a100; float8 weights are computed in bfloat16'
        """
        if shape.dtype not in device.rates:
            known = f"{', '.join(device.rates)}, {device.origin} for {device.name}"
            remedy = "use weights for the weights alone" if shape.dtype in FORMATS else "set dtype"
            raise ParameterError(f"dtype must be one of {known}, got {checks.shown(shape.dtype)}; {remedy}")
        peaks = "peaks given" if device.origin == "given" else f"{device.origin} peaks"
        source = f"assumed efficiencies of the {peaks} of {device.name}"
        arithmetic = None if shape.weights is None else shape.weights.arithmetic
        if arithmetic is not None and arithmetic not in device.rates:
            source += f"; {arithmetic} weights are computed in {shape.dtype}"
        return cls(
            shape, device.bandwidth, device.rates[shape.dtype], Efficiency() if efficiency is None else efficiency, tensor_parallel,
            device.link or device.host_link, provenance=source,
            product_rate=None if arithmetic is None else device.rates.get(arithmetic),
        )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("bandwidth", "rate", "link", *(["product_rate"] if self.product_rate is not None else [])):
            checks.number(name, getattr(self, name), 1)
        checks.number("latency", self.latency, 0)
        self.shard  # noqa: B018  raises if the model cannot be split over this many devices

    @cached_property
    def shard(self) -> Shape:
        """Shape of the part of the model on each device."""
        return self.shape.shard(self.tensor_parallel)

    def _slower(self, size: ArrayLike, work: ArrayLike, share: float, rate: float | None = None) -> Floats:
        """Seconds of reading `size` bytes and computing `work` operations, at `rate` (default: the device's) [s].

        Both overlap, but not fully if they take about as long. A bound (no launch time) assumes full overlap.
        """
        reading = np.asarray(size) / (self.bandwidth * share)
        computing = np.asarray(work) / ((self.rate if rate is None else rate) * self.efficiency.compute)
        return np.asarray(np.cbrt(reading**3 + computing**3)) if self.efficiency.launch else np.maximum(reading, computing)

    def product(self, rows: ArrayLike, outputs: float, inputs: float) -> Floats:
        """Seconds of a product of a (rows, inputs) and an (inputs, outputs) matrix on one device [s]."""
        m = np.asarray(rows, dtype=np.float64)
        size = (inputs * outputs + m * (inputs + outputs)) * self.shape.bytes_each
        return self._slower(size, 2.0 * inputs * outputs * m, self.efficiency.memory) + self.efficiency.launch

    def gemms(self, tokens: ArrayLike, independent: ArrayLike | None = None) -> Floats:
        """Seconds of a layer without its attention, over `tokens` tokens: matrix products and elementwise operations [s].

        Sparse experts are read as by `independent` independent tokens (`Experts.independent`; default: `tokens`).
        """
        count = np.asarray(tokens, dtype=np.float64)
        apart = count if independent is None else np.asarray(independent, dtype=np.float64)
        return self._mean(lambda kind: self._products(kind, count, apart))

    def _mean(self, quantity: Callable[[Shape], Floats]) -> Floats:
        """Mean of a quantity of a layer over the layers on one device."""
        kinds = self.shard.kinds
        if len(kinds) == 1:
            return quantity(kinds[0][1])
        return np.asarray(sum(count * quantity(kind) for count, kind in kinds) / self.shard.layers)

    def _products(self, part: Shape, count: Floats, apart: Floats) -> Floats:
        total = np.zeros(count.shape)
        for each in part.products:
            activations = each.used * count * (each.inputs + each.outputs) * part.bytes_each
            size = part.copies * product_bytes(part, each, apart) + activations
            rate = self.product_rate if part.quantises(each) else None
            work = 2.0 * each.used_weights * count
            total = total + (self._slower(size, work, self.efficiency.memory, rate) + self.efficiency.launch)
        if not self.efficiency.launch:  # a bound: only reading the weights and computing
            return total
        moved = count * moved_numbers(part) * part.bytes_each
        # Experts add kernels that score, sort and sum up: as many as without them are assumed.
        small = (part.layer_norms + (2 if part.experts is None else 4)) * SMALL_LAUNCH
        return np.asarray(total + moved / (self.bandwidth * self.efficiency.elementwise) + small)

    def arithmetic(self, tokens: ArrayLike, weights: float, size: ArrayLike | None = None) -> Floats:
        """Degree to which products over `tokens` tokens are compute-bound: 0 (memory-bound) to 1 [-].

        A token uses `weights` weights; a pass reads `size` bytes, by default one time these weights.
        """
        computing = 2.0 * weights * np.asarray(tokens, dtype=np.float64) / (self.rate * self.efficiency.compute)
        read = weights * self.shape.bytes_each if size is None else np.asarray(size)
        reading = read / (self.bandwidth * self.efficiency.memory)
        return np.asarray(computing**3 / (reading**3 + computing**3))

    def attention(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike) -> Floats:
        """Seconds of a layer's attention over the KV cache [s]."""
        new, before, sequences = (np.asarray(each, dtype=np.float64) for each in (width, context, batch))
        return self._mean(lambda kind: self._attention(kind, new, before, sequences))

    def _attention(self, part: Shape, new: Floats, before: Floats, sequences: Floats) -> Floats:
        if not part.attends:
            return np.zeros(np.broadcast_shapes(new.shape, before.shape, sequences.shape))
        each = np.where((before == 0) & (new > 1), float(part.prompt_attended_flops), float(part.attended_flops))
        if part.window is None:
            size = sequences * (before + new) * part.cache_bytes(1)
            work = each * sequences * new * (before + (new + 1) / 2)
        else:
            size = sequences * (kept(part, before) + new) * part.cache_bytes(1)
            work = each * sequences * windowed(part, new, before)
        return self._slower(size, work, self.efficiency.cache) + self.efficiency.attention_launch

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """Seconds of one decoder layer [s]; `busy` has no effect, because other units are separate devices."""
        tokens, part = np.asarray(width) * np.asarray(batch), self.shard
        if part.experts is None and part.weights is None:
            size = part.copies * part.layer_weights * part.bytes_each
            total = self._estimate(self.gemms(tokens), self.arithmetic(tokens, part.layer_weights, size))
        else:
            independent = None if part.experts is None else part.experts.independent(width, batch)
            apart = np.asarray(tokens if independent is None else independent, dtype=np.float64)
            read = part.expected_read_bytes(apart)
            total = self._estimate(self.gemms(tokens, apart), self.arithmetic(tokens, part.active_layer_weights, read))
        total = total + self._assumed(self.attention(width, context, batch))
        if self.tensor_parallel > 1:
            total = total + self._assumed(2 * self.all_reduce(tokens * self.shape.hidden * self.shape.bytes_each))
        return total

    def all_reduce(self, size: ArrayLike) -> Floats:
        """Seconds of a ring all-reduce of `size` bytes over `tensor_parallel` devices [s]."""
        around = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return np.asarray(np.asarray(size) * around / self.link + self.latency)

    def head(self, positions: ArrayLike) -> Estimate:
        """Seconds of the projection of `positions` positions onto the vocabulary [s]."""
        count = np.asarray(positions, dtype=np.float64)
        weights, size = self.shard.head_weights, float(self.shard.head_bytes(1))
        seconds = self._slower(size, 2 * weights * count, self.efficiency.memory)
        return self._estimate(seconds, self.arithmetic(count, weights, size))

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Seconds of reading an embedding row per token [s]."""
        return self._estimate(np.asarray(tokens) * self.shape.hidden * self.shape.bytes_each / self.bandwidth)

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Zero seconds: the shape and the peaks do not determine the overhead per pass [s]."""
        return self._estimate(np.zeros(np.shape(batch)))

    def transfer(self, size: ArrayLike) -> Estimate:
        """Seconds of a transfer: latency plus bytes over the link's bandwidth [s]."""
        return self._assumed(np.asarray(size) / self.link + self.latency)

    def _estimate(self, seconds: ArrayLike, arithmetic: ArrayLike = 0.0) -> Estimate:
        """Seconds with the error of products, between memory-bound (`arithmetic` 0) and compute-bound (1)."""
        times, efficiency = np.asarray(seconds, dtype=np.float64), self.efficiency
        error = efficiency.error + (efficiency.compute_error - efficiency.error) * np.asarray(arithmetic)
        return Estimate(times, np.broadcast_to(error, times.shape))

    def _assumed(self, seconds: ArrayLike) -> Estimate:
        """Seconds with the error of attention and transfers."""
        times = np.asarray(seconds, dtype=np.float64)
        return Estimate(times, np.full(times.shape, self.efficiency.attention_error))


def product_bytes(part: Shape, product: MatrixProduct, independent: ArrayLike) -> Floats:
    """Weights of a product that a pass reads [bytes]; of sparse experts those that `independent` tokens select, in expectation."""
    size = product.weights * part.product_bytes_each(product)
    if not product.sparse:
        return np.asarray(size, dtype=np.float64)
    return np.asarray(size * experts_read(product.blocks, product.used, independent) / product.blocks)


def moved_numbers(part: Shape) -> int:
    """Numbers that the elementwise operations of a layer read and write per token.

    A norm fused with an addition reads and writes two states; an activation its inputs and output; a rotation all rotated heads.
    """
    if not part.attends:
        return 2 * part.hidden
    gates, inner = 3 if part.gated else 2, part.ffn
    if part.experts is not None:
        inner = part.experts.active * part.ffn + part.experts.shared
    rotated = 2 * (part.heads + part.kv_heads) * part.head_dim
    if part.latent is not None:
        rotated = 2 * (part.heads + 1) * part.latent.rope
    return 4 * part.layer_norms * part.hidden + gates * inner + rotated
