"""Least times of passes: the bytes that a pass must read at the full bandwidth, or its arithmetic at the peak rate.

Only published numbers enter: the shape of a model and the peaks of a device. A pass reads all weights once (of sparse experts those
of one token), and keys and values of each sequence; the last-level cache may hold as many bytes as its capacity. It multiplies each
token with all weights that a token uses. Reading and computing overlap fully, several devices share both without communication,
and launches, activations and attention's arithmetic take no time: no kernel can be faster [Williams2009].

[Williams2009] S. Williams, A. Waterman, D. Patterson. Roofline: an insightful visual performance model for multicore architectures.
CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from model.architectures.transformer import Shape
from model.hardware.devices import Device
from model.hardware.physical_limits import least_bytes, used_weights


def bytes_read(shape: Shape, width: float = 1, batch: int = 1, context: int = 0) -> float:
    """Bytes of weights, keys and values that a pass over `width` tokens of each of `batch` sequences reads at least [bytes].

    Of a model with sliding windows, keys and values of the context are left out.

    >>> from model.architectures.published_shapes import preset
    >>> round(bytes_read(preset("t5-small")) / bytes_read(preset("t5-large")), 3)
    0.1
    """
    weights = shape.layers * least_bytes(shape) + float(shape.head_bytes(1))
    positions = context + width if shape.window is None else width
    return weights + batch * positions * shape.layers * shape.cache_bytes(1)


@dataclass(frozen=True)
class PeakTimes:
    """Least times of the passes of a model at the peaks of its devices.

    Parameters
    ----------
    shape, device
        The model, and the device; `tensor_parallel` of them share every pass.
    batch, context
        Sequences of a pass, and cached positions of each.

    >>> from model.architectures.published_shapes import preset
    >>> from model.hardware.devices import device
    >>> times = PeakTimes(preset("llama-3.1-8b"), device("h100"))
    >>> round(1e3 * times.seconds(1), 2), round(1e3 * PeakTimes(preset("llama-3.1-8b"), device("h100"), batch=256).seconds(6), 1)
    (4.46, 23.3)
    """

    shape: Shape
    device: Device
    batch: int = 1
    context: int = 0
    tensor_parallel: int = 1

    @cached_property
    def rate(self) -> float:
        """Largest published rate for the type of the activations or of the weights, else for any type [operations/s]."""
        weights = self.shape.weights
        types = {self.shape.dtype, *([] if weights is None or weights.arithmetic is None else [weights.arithmetic])}
        known = [self.device.rates[each] for each in types if each in self.device.rates]
        return max(known or self.device.rates.values())

    def moved(self, width: float) -> float:
        """Bytes that a pass over `width` tokens of each sequence must read from memory [bytes]."""
        read = self._first + (width - 1) * self._more
        return max(read - self.device.cache_bytes * self.tensor_parallel, 0.0)

    @cached_property
    def _first(self) -> float:
        """Bytes of a pass over one token of each sequence [bytes]."""
        return bytes_read(self.shape, 1, self.batch, self.context)

    @cached_property
    def _more(self) -> float:
        """Bytes of each further token of all sequences [bytes]."""
        return bytes_read(self.shape, 2, self.batch, self.context) - self._first

    def operations(self, width: float) -> float:
        """Operations of the matrix products of a pass over `width` tokens of each sequence."""
        return self.batch * width * self._each

    @cached_property
    def _each(self) -> float:
        """Operations of one token."""
        return 2.0 * self.shape.layers * used_weights(self.shape) + float(self.shape.head_flops(1))

    def reading(self, width: float) -> float:
        """Seconds of reading at the full bandwidth [s]."""
        return self.moved(width) / (self.device.bandwidth * self.tensor_parallel)

    def seconds(self, width: float) -> float:
        """Least seconds of a pass over `width` tokens of each sequence, which need not be whole [s]; convex in the width."""
        return max(self.reading(width), self.operations(width) / (self.rate * self.tensor_parallel))
