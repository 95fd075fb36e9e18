"""Roofline cost model: seconds of a pass from the operations of a transformer and the peaks of a device.

It needs no measurement; a few fit its efficiencies. A matrix product reads its weights once and takes about as long as the slower
of reading and computing; so does attention; launches are added [Williams2009].

[Williams2009] S. Williams, A. Waterman, D. Patterson. Roofline: an insightful visual performance model for multicore architectures.
CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.base import checks
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

    def __post_init__(self) -> None:
        for name in ("bandwidth", "rate", "link"):
            checks.number(name, getattr(self, name), 1)
        checks.number("latency", self.latency, 0)
        self.shard  # noqa: B018  raises if the model cannot be split over this many devices

    @cached_property
    def shard(self) -> Shape:
        """Shape of the part of the model on each device."""
        return self.shape.shard(self.tensor_parallel)

    def _slower(self, size: ArrayLike, work: ArrayLike, share: float) -> Floats:
        """Seconds of reading `size` bytes and computing `work` operations [s].

        Both overlap, but not fully if they take about as long. A bound (no launch time) assumes full overlap.
        """
        reading = np.asarray(size) / (self.bandwidth * share)
        computing = np.asarray(work) / (self.rate * self.efficiency.compute)
        return np.asarray(np.cbrt(reading**3 + computing**3)) if self.efficiency.launch else np.maximum(reading, computing)

    def product(self, rows: ArrayLike, outputs: float, inputs: float) -> Floats:
        """Seconds of a product of a (rows, inputs) and an (inputs, outputs) matrix on one device [s]."""
        m = np.asarray(rows, dtype=np.float64)
        size = (inputs * outputs + m * (inputs + outputs)) * self.shape.bytes_each
        return self._slower(size, 2.0 * inputs * outputs * m, self.efficiency.memory) + self.efficiency.launch

    def gemms(self, tokens: ArrayLike) -> Floats:
        """Seconds of a layer without its attention, over `tokens` tokens: matrix products and elementwise operations [s]."""
        part, count = self.shard, np.asarray(tokens, dtype=np.float64)
        total = np.zeros(count.shape)
        for inputs, outputs in part.matrices:
            total = total + self.product(count, outputs, inputs)
        if not self.efficiency.launch:  # a bound: only reading the weights and computing
            return total
        # A norm fused with an addition reads and writes two states; an activation its inputs and output; a rotation all heads.
        rotated = 2 * (part.heads + part.kv_heads) * part.head_dim
        moved = count * (4 * part.norms * part.hidden + (3 if part.gated else 2) * part.ffn + rotated) * part.bytes_each
        small = (part.norms + 2) * SMALL_LAUNCH
        return np.asarray(total + moved / (self.bandwidth * self.efficiency.elementwise) + small)

    def arithmetic(self, tokens: ArrayLike, weights: float) -> Floats:
        """Degree to which products over `tokens` tokens are compute-bound: 0 (memory-bound) to 1 [-]."""
        computing = 2.0 * weights * np.asarray(tokens, dtype=np.float64) / (self.rate * self.efficiency.compute)
        reading = weights * self.shape.bytes_each / (self.bandwidth * self.efficiency.memory)
        return np.asarray(computing**3 / (reading**3 + computing**3))

    def attention(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike) -> Floats:
        """Seconds of a layer's attention over the KV cache [s]."""
        part = self.shard
        new, before, sequences = (np.asarray(each, dtype=np.float64) for each in (width, context, batch))
        size = sequences * (before + new) * part.cache_bytes(1)
        work = 4.0 * part.heads * part.head_dim * sequences * new * (before + (new + 1) / 2)
        return self._slower(size, work, self.efficiency.cache) + self.efficiency.attention_launch

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """Seconds of one decoder layer [s]; `busy` has no effect, because other units are separate devices."""
        tokens = np.asarray(width) * np.asarray(batch)
        total = self._estimate(self.gemms(tokens), self.arithmetic(tokens, self.shard.layer_weights))
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
        weights = self.shard.head_weights
        seconds = self._slower(weights * self.shape.bytes_each, 2 * weights * count, self.efficiency.memory)
        return self._estimate(seconds, self.arithmetic(count, weights))

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Seconds of reading an embedding row per token [s]."""
        return self._estimate(np.asarray(tokens) * self.shape.hidden * self.shape.bytes_each / self.bandwidth)

    def step(self, batch: ArrayLike = 1) -> Estimate:
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
