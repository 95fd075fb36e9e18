"""Physical limits of measured times: lower bounds from memory bandwidth and arithmetic rate, and an upper bound.

The weights of a small model may stay in the device's last-level cache and are then read faster than from memory. The cache saves at
most as many bytes as it holds; the memory bound counts the others. If the cache can hold everything, only the arithmetic bound
remains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.architectures.transformer import BYTES, Shape, restored
from model.base.checks import ParameterError
from model.hardware.profile import AXES, Profile, rows_by_part

if TYPE_CHECKING:
    from model.logs.recorded_decoding import Decoding

Floats = NDArray[np.float64]
PARTS = ("layer", "dense", "head")
"""Parts whose arithmetic and bytes follow from a model's shape."""


class ImpliedRates(NamedTuple):
    """Bandwidth and arithmetic rate that the rows of one part imply; arrays of shape (rows,)."""

    part: str
    tensor_parallel: int
    busy: int
    axes: dict[str, Floats]
    seconds: Floats
    moved: Floats
    """Bytes of weights, keys and values that the row needs, from the cache or from memory."""
    operations: Floats
    from_memory: Floats
    """Bytes of `moved` beyond the capacity of the cache."""

    def bandwidth(self) -> Floats:
        """Bandwidth [bytes/s]."""
        return self.moved / self.seconds

    def rate(self) -> Floats:
        """Arithmetic rate [operations/s]."""
        return self.operations / self.seconds

    def row_name(self, row: int) -> str:
        """Return the name of a row for error messages."""
        split = [f"tensor_parallel {self.tensor_parallel}"] * (self.tensor_parallel > 1) + [f"busy {self.busy}"] * (self.busy > 0)
        return f"{self.part} at {', '.join([f'{axis} {values[row]:g}' for axis, values in self.axes.items()] + split)}"


def implied_rates(profile: Profile, shape: Shape, *, source: int = 0, in_sequence: bool = True) -> Iterator[ImpliedRates]:
    """Yield the bandwidth and rate that each row implies, part by part, for a model of this shape.

    Parameters
    ----------
    source
        Encoder positions that each decoder layer attends to, for encoder-decoders.
    in_sequence
        True if all layers were timed one after another, so that their weights share the cache; False if a single layer was timed
        repeatedly and has the whole cache.
    """
    shape = replace(shape, dtype=profile.dtype)
    # A layer's time is the median over layers: half of them take no longer, and in the best case these share the cache.
    sharing = math.ceil(shape.layers / 2) if in_sequence else 1
    table = profile.table
    for part in PARTS:
        for tensor_parallel, busy in sorted(set(table.filter(table["part"] == part).select("tensor_parallel", "busy").iter_rows())):
            rows = profile.rows(part, tensor_parallel, busy)
            axes = {axis: rows[axis].to_numpy().astype(np.float64) for axis in AXES[part]}
            seconds = np.maximum(rows["time_s"].to_numpy(), 1e-12)
            moved, operations = _needed(shape, part, axes, tensor_parallel, source)
            users = 1 if part == "head" else sharing
            from_memory = np.maximum(moved - profile.cache_bytes * tensor_parallel / users, 0.0)
            yield ImpliedRates(part, int(tensor_parallel), int(busy), axes, seconds, moved, operations, from_memory)


def check(
    profile: Profile, shape: Shape, *, source: int = 0, in_sequence: bool = True, tolerance: float = 0.0, most: float = math.inf
) -> tuple[str, ...]:
    """Refuse a profile with a time that is too short for its device; the error names the row and the limit.

    Peaks measured with the profile (`peaks` in its facts) are those of some kernels, and other kernels may be faster. Times that
    beat measured peaks are returned, one line per part and limit, and refused only beyond `most` times the peak.

    Parameters
    ----------
    tolerance
        Relative excess over the peaks that is accepted [-]: clocks rise, and peaks are measured to a few percent.
    most
        Ratio to measured peaks beyond which a time is an error, not a better kernel [-].
    """
    beaten = []
    measured = profile.facts.get("peaks") == "measured"
    for each in implied_rates(profile, shape, source=source, in_sequence=in_sequence):
        limits = (
            ("arithmetic", each.operations, profile.rate * each.tensor_parallel, "FLOP/s"),
            ("memory", each.from_memory, profile.bandwidth * each.tensor_parallel, "B/s"),
        )
        for limit, amount, peak, unit in limits:
            ratio = amount / each.seconds / (peak * (1 + tolerance))
            worst = int(np.argmax(ratio))
            if ratio[worst] <= 1:
                continue
            implied = f"{amount[worst] / each.seconds[worst]:.3g} {unit}"
            cached = f" beyond what its cache of {profile.cache_bytes / 1e6:.0f} MB can hold" if limit == "memory" else ""
            where = f"{each.row_name(worst)}: time_s={each.seconds[worst]:.3g} would be {implied}{cached}, and {profile.device}"
            known = f"{where} was measured to reach {peak:.3g} ({limit})"
            remedy = "check the clock, the shape and the dtype"
            if not measured:
                raise ParameterError(f"{where} reaches {peak:.3g} at most ({limit}); {remedy}")
            if ratio[worst] > most:
                raise ParameterError(f"{known}: more than {most:g} times that is a mistake; {remedy}")
            beaten.append(f"{known}: either its peak was measured too low or this time is too short")
    return tuple(beaten)


# --- Upper bounds ---

SLOWEST = 100.0
"""Largest accepted ratio of a time to its bound at the device's peaks [-]: beyond it the clock or the unit is wrong."""
LAUNCH_S = 1e-4
"""Upper bound of the launch time of a kernel [s]; real launches, which dominate small models, take at most a tenth of it."""
LAUNCHES = {"layer": 50, "dense": 50, "attention": 20, "head": 10, "gemm": 1, "decode": 20}
"""Upper bound of the kernels of each part. That of attention is high because its kernels may use few of a device's cores."""


TILE = 128
"""Smallest number of positions that attention kernels process together."""


def longest_time(moved: Floats | float, operations: Floats | float, bandwidth: float, rate: float, launches: float = 1) -> Floats:
    """Upper bound of the time of a pass on a device with these peaks [s].

    It moves its bytes, then computes, at a hundredth of each peak, and launches each kernel in a tenth of a millisecond. Times in
    milliseconds that are read as seconds are far beyond it.

    >>> print(longest_time(2 * 4096**2, 2 * 4096**2, 2e12, 312e12))  # a product of a model of 7 billion weights on an A100: 20 us
    0.0018
    """
    return np.asarray(SLOWEST * (moved / bandwidth + operations / rate) + launches * LAUNCH_S, dtype=np.float64)


def refuse_slow(profile: Profile) -> None:
    """Refuse a profile with a time that is far too long for its device; the error names the row."""
    if profile.dtype not in BYTES:
        return
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in profile.shape.items()}
    try:
        shape = replace(Shape(**restored(values)), dtype=profile.dtype)
    except (TypeError, ParameterError):  # `model.hardware.profile_costs.shape_of` raises it where the shape is needed
        shape = None
    rows_of = rows_by_part(profile.table)
    for part, launches in LAUNCHES.items():
        if part not in rows_of:
            continue
        rows = profile.table[rows_of[part]]
        axes = {axis: rows[axis].to_numpy().astype(np.float64) for axis in AXES[part]}
        tensor_parallel, busy, seconds = (rows[name].to_numpy() for name in ("tensor_parallel", "busy", "time_s"))
        moved, operations = _work_of(profile, shape, part, axes)
        # Other busy units share the same memory.
        bound = longest_time(moved, operations, profile.bandwidth, profile.rate, launches) * (1 + busy)
        if (seconds > bound).any():
            row = int(np.argmax(seconds / bound))
            at = ", ".join(f"{axis} {values[row]:g}" for axis, values in (axes | {"tensor_parallel": tensor_parallel}).items())
            raise ParameterError(
                f"{part} at {at}: time_s={seconds[row]:.3g} is too long: {profile.device} at a hundredth of its peaks takes at most"
                f" {bound[row]:.3g} s; check the unit of the times, the shape and the dtype"
            )


def _work_of(profile: Profile, shape: Shape | None, part: str, axes: dict[str, Floats]) -> tuple[Floats, Floats]:
    """Bytes and operations of the rows of a profile, of a model or of operations; without bound where the shape is not known."""
    if part == "gemm":
        m, n, k = (axes[name] for name in ("m", "n", "k"))
        return (m * k + n * k + m * n) * BYTES[profile.dtype], 2 * m * n * k
    if part == "decode":
        return tiled(axes, BYTES[profile.dtype])
    if shape is None:
        return np.full(axes[AXES[part][0]].shape, np.inf), np.zeros(axes[AXES[part][0]].shape)
    if part == "attention":
        width, context, batch = axes["width"], np.maximum(axes["context"], TILE), axes["batch"]
        return shape.layer_kv_bytes(width, context, batch), shape.layer_flops(width, context, batch)
    source = profile.facts.get("source", 0) if shape.encoder_layers else 0
    return _needed(shape, part, axes, 1, source if isinstance(source, int) and source > 0 else 0)


def tiled(axes: Mapping[str, Floats], bytes_each: int) -> tuple[Floats, Floats]:
    """Bytes and operations of attention of one new token per sequence, in at least one whole tile of positions."""
    positions = axes["batch"] * np.maximum(axes["context"] + 1, TILE)
    return 2 * positions * axes["kv_heads"] * axes["head_dim"] * bytes_each, 4 * positions * axes["heads"] * axes["head_dim"]


def longest_run(decoding: Decoding, profiles: Mapping[str, Profile], shapes: Mapping[str, Shape]) -> float:
    """Upper bound of the time of a decoding on the machine of these profiles: the sum over its passes [s]."""
    total = LAUNCH_S * (1 + 10 * len(decoding.reads))
    for kind, (passes, attended, read) in decoding.account.passes_by_kind.items():
        if kind.role not in profiles:
            return math.inf
        profile, shape, heads = profiles[kind.role], shapes[kind.role], kind.heads
        layers = max(kind.layers.size, 0)
        kept = shape.cache_bytes(1)
        moved = passes * (layers * shape.layer_weight_bytes + float(shape.head_bytes(min(heads, 1)))) + layers * read * kept
        each = 2.0 * used_weights(shape) * kind.width
        work = passes * (layers * each + float(shape.head_flops(heads)))
        work += layers * attended * shape.attended_flops
        count = passes * (layers * LAUNCHES["layer"] + LAUNCHES["head"] + LAUNCHES["layer"])
        total += float(longest_time(moved, work, profile.bandwidth, profile.rate, count))
    return total


def limit(profile: Profile, shape: Shape, *, source: int = 0, in_sequence: bool = True) -> str:
    """Return a sentence that names the limits that apply to a profile's layers."""
    parts = [each for each in implied_rates(profile, shape, source=source, in_sequence=in_sequence) if each.part != "head"]
    cached = all((each.from_memory == 0).all() for each in parts)
    if cached:
        return "arithmetic only: the cache can hold the weights and may deliver them faster than memory"
    return "memory and arithmetic: the cache cannot hold the weights"


def _needed(shape: Shape, part: str, axes: dict[str, Floats], tensor_parallel: int, source: int) -> tuple[Floats, Floats]:
    """Bytes and operations of the rows of a part, summed over its devices."""
    if part == "head":
        positions = axes["positions"]
        return _full(shape.head_bytes(positions), positions), _full(shape.head_flops(positions), positions)
    if part == "dense":
        tokens = axes["tokens"]
        return _full(least_bytes(shape), tokens), _full(2.0 * used_weights(shape) * tokens, tokens)
    width, context, batch = axes["width"], axes["context"], axes["batch"]
    moved = least_bytes(shape) + shape.layer_kv_bytes(width, context, batch, source)
    return _full(moved, width), _full(shape.layer_flops(width, context, batch, source), width)


def least_bytes(shape: Shape) -> float:
    """Weights of a layer that every pass reads at least: of sparse experts, those of one token [bytes]."""
    return shape.layer_weight_bytes if shape.experts is None else float(shape.expected_read_bytes(1))


def used_weights(shape: Shape) -> float:
    """Weights of a layer that each token is multiplied with: without those of the encoder's keys and values."""
    if shape.weights is None and shape.experts is None:
        return shape.layer_weight_bytes / shape.bytes_each / shape.copies
    return shape.active_layer_weights


def _full(values: object, like: Floats) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), like.shape)
