"""What a pass takes by the arithmetic of a transformer and the peaks of a device: no measurement, or a few to fit it to.

A product of matrices reads its weights once and takes as long as the slower of reading and computing, attention likewise, and
launching adds to both [Williams2009].

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
"""What launching a norm, an activation or a rotation takes [s]: assumed."""


@dataclass(frozen=True)
class Efficiency:
    """What of a device's peaks is reached, and what does not shrink with the work.

    Parameters
    ----------
    memory, compute
        Share of the peak bandwidth and of the peak rate that products of matrices reach [-].
    elementwise, cache
        Share of the peak bandwidth that elementwise operations reach, and attention on keys and values [-]; caches may carry them
        beyond it.
    launch, attention_launch
        What each product of a layer, and its attention, take however little there is to do [s].
    error, compute_error
        Relative error of the products' time where reading the weights takes it, and where arithmetic does, as fitting found it [-].
    attention_error
        Of attention's, and of what is sent between devices [-].

    The values that stand where they are left out were fitted to measured layers of five models on A100, A40, H100 and RTX 4090, and
    to six tables of attention on A100, H100 and L40S: `calibrate fit roofline` fits them again. The errors of products are the
    largest medians on a GPU that the fit has not seen, up to 64 tokens and beyond 256; one measured layer of a GPU brings them down
    (`calibrate fit roofline --layer`). Attention is off by 10 to 50 % from table to table (`calibrate/VALIDATION.md`), which .25
    stands for.
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
    """A model on a device, from its shape and the device's peaks.

    Parameters
    ----------
    shape, tensor_parallel
        The model, and over how many devices its layers are split.
    bandwidth, rate
        Peaks of each device [bytes/s], [operations/s].
    link, latency
        Bandwidth to another device [bytes/s], and what a transfer takes besides [s].
    efficiency
        What of the peaks is reached.
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
        self.part  # noqa: B018  whether the model can be split so is found where it is made, and refused in its words

    @cached_property
    def part(self) -> Shape:
        """What each of the devices holds of the model."""
        return self.shape.shard(self.tensor_parallel)

    def _slower(self, size: ArrayLike, work: ArrayLike, share: float) -> Floats:
        """Reading and computing overlap; where both take about as long they are in each other's way."""
        reading = np.asarray(size) / (self.bandwidth * share)
        computing = np.asarray(work) / (self.rate * self.efficiency.compute)
        return np.asarray(np.cbrt(reading**3 + computing**3)) if self.efficiency.launch else np.maximum(reading, computing)

    def product(self, rows: ArrayLike, outputs: float, inputs: float) -> Floats:
        """One product of a matrix of so many rows and inputs, and one of inputs by outputs, on one device [s]."""
        got = np.asarray(rows, dtype=np.float64)
        size = (inputs * outputs + got * (inputs + outputs)) * self.shape.bytes_each
        return self._slower(size, 2.0 * inputs * outputs * got, self.efficiency.memory) + self.efficiency.launch

    def products(self, tokens: ArrayLike) -> Floats:
        """A layer but for its attention, over so many tokens: products of matrices, and what is done element by element [s]."""
        part, got = self.part, np.asarray(tokens, dtype=np.float64)
        total = np.zeros(got.shape)
        for inputs, outputs in part.matrices:
            total = total + self.product(got, outputs, inputs)
        if not self.efficiency.launch:  # a bound: nothing but reading the weights and computing
            return total
        # A norm with the addition before it reads and writes two states, an activation what it makes one of, a rotation all heads.
        turned = 2 * (part.heads + part.kv_heads) * part.head_dim
        moved = got * (4 * part.norms * part.hidden + (3 if part.gated else 2) * part.ffn + turned) * part.bytes_each
        small = (part.norms + 2) * SMALL_LAUNCH
        return np.asarray(total + moved / (self.bandwidth * self.efficiency.elementwise) + small)

    def arithmetic(self, tokens: ArrayLike, weights: float) -> Floats:
        """How far arithmetic, not reading the weights, takes the time of so many tokens: from 0 to 1 [-]."""
        computing = 2.0 * weights * np.asarray(tokens, dtype=np.float64) / (self.rate * self.efficiency.compute)
        reading = weights * self.shape.bytes_each / (self.bandwidth * self.efficiency.memory)
        return np.asarray(computing**3 / (reading**3 + computing**3))

    def attention(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike) -> Floats:
        """A layer's attention over what is cached [s]."""
        part = self.part
        new, before, texts = (np.asarray(each, dtype=np.float64) for each in (width, context, batch))
        size = texts * (before + new) * part.cache_bytes(1)
        work = 4.0 * part.heads * part.head_dim * texts * new * (before + (new + 1) / 2)
        return self._slower(size, work, self.efficiency.cache) + self.efficiency.attention_launch

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """One decoder layer [s]; how busy the host is makes no difference to a device of its own."""
        tokens = np.asarray(width) * np.asarray(batch)
        total = self._said(self.products(tokens), self.arithmetic(tokens, self.part.layer_weights))
        total = total + self._guessed(self.attention(width, context, batch))
        if self.tensor_parallel > 1:
            total = total + self._guessed(2 * self.all_reduce(tokens * self.shape.hidden * self.shape.bytes_each))
        return total

    def all_reduce(self, size: ArrayLike) -> Floats:
        """Adding up the parts of a state that `tensor_parallel` devices hold, around a ring [s]."""
        around = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return np.asarray(np.asarray(size) * around / self.link + self.latency)

    def head(self, positions: ArrayLike) -> Estimate:
        """Projection of so many positions [s]."""
        many = np.asarray(positions, dtype=np.float64)
        weights = self.part.head_weights
        seconds = self._slower(weights * self.shape.bytes_each, 2 * weights * many, self.efficiency.memory)
        return self._said(seconds, self.arithmetic(many, weights))

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Reading a row for each token [s]."""
        return self._said(np.asarray(tokens) * self.shape.hidden * self.shape.bytes_each / self.bandwidth)

    def step(self, batch: ArrayLike = 1) -> Estimate:
        """Nothing is known of it."""
        return self._said(np.zeros(np.shape(batch)))

    def transfer(self, size: ArrayLike) -> Estimate:
        """Bytes over the link, behind its latency [s]."""
        return self._guessed(np.asarray(size) / self.link + self.latency)

    def _said(self, seconds: ArrayLike, arithmetic: ArrayLike = 0.0) -> Estimate:
        found, got = np.asarray(seconds, dtype=np.float64), self.efficiency
        error = got.error + (got.compute_error - got.error) * np.asarray(arithmetic)
        return Estimate(found, np.broadcast_to(error, found.shape))

    def _guessed(self, seconds: ArrayLike) -> Estimate:
        found = np.asarray(seconds, dtype=np.float64)
        return Estimate(found, np.full(found.shape, self.efficiency.attention_error))
