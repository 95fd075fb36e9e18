"""Early exit over whole decodings: time of a batch step by its exit depth, exact moments, and many replications at once.

A column is one step of a batch: one token of each of its sequences. The depth of each token is one independent random draw, so
columns are independent; a batch goes as deep as the deepest of its sequences. `backfill` depends on the depths of earlier
positions: its mean is a sum over layers, and its variance is not computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import Totals, Work
from model.methods.early_exit.algorithm import Parameters
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Depth = NDArray[np.uint16]
_PART = 2**20
"""Cells (columns x depths) that are priced together: about 8 MB per array."""


class Depths:
    """A law of depths: `pmf[..., e - 1]` is the probability to leave after layer e, at every position or with one row per position.

    Random draws are ordered by position, then by sequence.

    >>> [tile.tolist() for tile in Depths([0.2, 0.3, 0.5]).sample(iter([np.array([[0.1], [0.2], [0.9]])]))]
    [[[1], [2], [3]]]
    """

    def __init__(self, pmf: ArrayLike, sequences: int = 1) -> None:
        self.pmf = checks.array("pmf", pmf, 0, 1)
        if not self.pmf.size or self.pmf.ndim > 2 or not np.allclose(self.pmf.sum(axis=-1), 1, rtol=0, atol=1e-9):
            given = checks.shown(self.pmf.tolist())
            raise checks.ParameterError(f"pmf must be probabilities of the layers with sum 1, got {given}")
        self.sequences = sequences

    @property
    def layers(self) -> int:
        """Largest depth of a token."""
        return int(self.pmf.shape[-1])

    @property
    def by_position(self) -> bool:
        """True if each position has a separate law."""
        return self.pmf.ndim == 2

    def cdf(self, positions: int) -> Floats:
        """Probabilities to need at most 1, 2, ... layers at each position; shape (positions, layers)."""
        if self.pmf.ndim == 2 and len(self.pmf) < positions:
            raise checks.ParameterError(f"pmf must have a row for each of {positions} positions, got {len(self.pmf)}")
        rising = np.cumsum(self.pmf[:positions] if self.pmf.ndim == 2 else self.pmf, axis=-1)
        rising[..., -1] = 1.0
        return np.asarray(np.broadcast_to(rising, (positions, self.layers)))

    def mean(self, positions: int) -> float:
        """Mean depth of a sequence's tokens."""
        return float((1 - self.cdf(positions)[:, :-1]).sum() / positions) + 1

    def sample(self, draws: Iterator[Floats]) -> Iterator[Depth]:
        """Tiles of depths from tiles of uniform draws."""
        row = 0
        for tile in draws:
            rising = self.cdf((row + len(tile) - 1) // self.sequences + 1)
            found = np.empty(tile.shape, dtype=np.uint16)
            for index, uniform in enumerate(tile):
                found[index] = np.searchsorted(rising[(row + index) // self.sequences], uniform, side="right") + 1
            row += len(tile)
            yield found


def column_times(parameters: Parameters, cost: StepCosts, width: ArrayLike, at: ArrayLike = 0) -> Floats:
    """Time of a batch step over `width` sequences, by the needed depth along the last axis (index 0 is unused).

    Layers from `first_check` on are checked, except the last; `propagate` is included. Broadcasts over `width` and the positions
    `at` of the steps (a single number for `uniform` costs). Times are in the cost's unit.

    >>> from model.costs.layer_times import UnitCost
    >>> column_times(Parameters(4, first_check=2), UnitCost(4, early_head=1.0, final_head=1.0, propagation=0.25), 1).tolist()
    [nan, 3.5, 3.5, 5.25, 7.0]
    """
    layers, softmax, first = parameters.layers, parameters.measure == "softmax", parameters.first_check

    def price(start: int, stop: int, heads: int = 0, *, compared: bool = False, kv_only: bool = False) -> Floats:
        shape = PassShape(LayerSpan(start, stop, kv_only=kv_only), sequences=width, heads=heads, compared=compared)
        return cost.times(shape, at)

    times = np.full((*np.broadcast_shapes(np.shape(width), np.shape(at)), layers + 1), np.nan)
    if parameters.exit_layer is not None:
        times[..., 1:] = price(0, parameters.exit_layer, 1)[..., None]
        return times
    run, start = np.zeros(()), 0
    for depth in range(first, layers + 1):
        asked = depth < layers
        run = run + price(start, depth, int(softmax or not asked), compared=asked and not softmax)
        start, times[..., depth] = depth, run
        if asked and not softmax:
            times[..., depth] += price(depth, depth, 1)
        if asked and parameters.fill == "propagate":
            times[..., depth] += price(depth, layers, kv_only=True)
    times[..., 1:first] = times[..., first, None]
    return times


def filling_times(parameters: Parameters, cost: StepCosts, position: int, most: int) -> Floats:
    """Time of one pass that fills the rows of the last 0, 1, ..., `most` positions before this one in a layer.

    It is the same for every layer.

    >>> from model.costs.layer_times import UnitCost
    >>> filling_times(Parameters(4), UnitCost(4, propagation=0.5, verify_cost=((1, 1.0), (3, 2.0))), 9, 3).tolist()
    [0.0, 0.5, 0.75, 1.0]
    """
    rows = np.arange(1, most + 1)
    layer = LayerSpan(parameters.layers - 1, parameters.layers, kv_only=True)
    return np.asarray(np.concatenate([[0.0], cost.times(PassShape(layer, width=rows, joins=True), position - rows)]))


class Columns(NamedTuple):
    """Batch steps: `counts[i]` steps over `widths[i]` sequences at `positions[i]` take `times[i]`, by depth."""

    positions: Integers
    widths: Integers
    counts: Integers
    times: Floats


def priced_columns(parameters: Parameters, tokens: int, cost: StepCosts, *, separately: bool = True) -> Iterator[Columns]:
    """Yield all batch steps in parts; for `uniform` costs steps of equal width are combined unless `apart`."""
    separately = separately or not cost.uniform
    found = Counter((position if separately else 0, width) for position, width in parameters.columns(tokens))
    positions, widths = np.array([*found]).T
    counts = np.array([*found.values()])
    known, which = np.unique(widths, return_inverse=True)
    prices = column_times(parameters, cost, known) if cost.uniform else None
    size = max(_PART // (parameters.layers + 1), 1)
    for start in range(0, len(counts), size):
        part = slice(start, start + size)
        at, width = positions[part], widths[part]
        if prices is not None:
            times = prices[which[part]]
        else:  # a single width as a number is faster
            times = column_times(parameters, cost, int(known[0]) if len(known) == 1 else width, at)
        yield Columns(at, width, counts[part], times)


def moments(parameters: Parameters, tokens: int, law: Depths | None, cost: StepCosts) -> tuple[float, float]:
    """Exact mean and variance of the total time of all batches; the variance of `backfill` is nan.

    >>> from model.costs.layer_times import UnitCost
    >>> choice, law = Parameters(3, fill="backfill"), Depths([0.5, 0.25, 0.25])
    >>> moments(choice, 10, law, UnitCost(3, propagation=1.0))[0] - moments(choice, 10, law, UnitCost(3))[0]
    3.9375
    """
    law = _deepest(parameters) if law is None else law
    _same_depth(parameters, law)
    mean = variance = 0.0
    rising = law.cdf(tokens)
    for part in priced_columns(parameters, tokens, cost, separately=law.by_position):
        chance = np.diff(rising[part.positions] ** part.widths[:, None], prepend=0.0)
        times = part.times[:, 1:]
        first = (chance * times).sum(axis=1)
        mean += float(part.counts @ first)
        variance += float(part.counts @ (chance * (times - first[:, None]) ** 2).sum(axis=1))
    if parameters.fill == "backfill":
        mean += _filling(parameters, tokens, rising, lambda rows: filling_times(parameters, cost, rows, rows))
        return mean, float("nan")
    return mean, variance


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> float:
    """Upper bound of the time: every step at its slowest exit, and every layer with the most expensive backfill."""
    parts = priced_columns(parameters, tokens, cost, separately=False)
    time = sum(float(part.counts @ part.times[:, 1:].max(axis=1)) for part in parts)
    if parameters.fill == "backfill":
        most = np.array([filling_times(parameters, cost, position, position).max() for position in range(tokens)])
        time += parameters.layers * float(sum(most[position] for position, _ in parameters.columns(tokens)))
    return time


def work(parameters: Parameters, tokens: int, law: Depths | None) -> Work:
    """Expected work of the passes of all batches.

    >>> found = work(Parameters(4, first_check=2), 100, Depths([0.2, 0.2, 0.3, 0.3])).by_model["target"]
    >>> round(found.layer_passes), round(found.filled), round(found.heads)  # heads after layers 2 and 3 (checks) and the last
    (290, 110, 190)
    """
    law = _deepest(parameters) if law is None else law
    _same_depth(parameters, law)
    layers, fixed = parameters.layers, parameters.exit_layer is not None
    first = parameters.exit_layer or parameters.first_check
    depth = np.maximum(np.arange(1.0, layers + 1), first)
    checked = np.zeros(layers) if fixed else np.minimum(depth, layers - 1) - first + 1
    early = depth < layers
    alone = early & (parameters.measure == "state")  # a head without layers
    projected = np.ones(layers) if fixed or parameters.measure == "state" else checked + ~early
    filling = early & (parameters.fill == "propagate") & (not fixed)
    passes = (1.0 if fixed else depth - first + 1) + alone + filling
    each = np.array([passes, depth, projected, filling * (layers - depth)])
    rising, total = law.cdf(tokens), np.zeros(9)
    for place, width in parameters.columns(tokens):
        chance = np.diff(rising[place] ** width, prepend=0.0)
        runs, deep, heads, filled = (float(chance @ row) for row in each)
        attended = deep * width * (place + 1)
        total += [runs, deep, deep * width, attended, attended, filled, filled * width, heads, heads * width]
    found = Totals(*map(float, total))
    if parameters.fill == "backfill":
        runs, rows = (_filling(parameters, tokens, rising, price) for price in (_once, _each))
        found = found._replace(passes=found.passes + runs, filled_runs=runs, filled=rows)
    return Work({"target": found})


def _once(place: int) -> Floats:
    return np.asarray(np.arange(place + 1.0) > 0, dtype=np.float64)


def _each(place: int) -> Floats:
    return np.arange(place + 1.0)


def _filling(parameters: Parameters, tokens: int, rising: Floats, price: Callable[[int], Floats]) -> float:
    """Expected total price of backfill passes; a pass fills the w rows that a layer lacks directly before a position."""
    left = np.concatenate([np.zeros_like(rising[:, :1]), rising[:, :-1]], axis=1)  # probability of an exit before layer j + 1
    left[:, : parameters.first_check] = 0.0
    columns = np.bincount([place for place, _ in parameters.columns(tokens)])
    found = 0.0
    for place in range(1, tokens):
        lacking = np.cumprod(left[place - 1 :: -1], axis=0)  # at least 1, 2, ... missing rows
        exactly = lacking - np.concatenate([lacking[1:], np.zeros_like(lacking[:1])])
        found += int(columns[place]) * float((1 - left[place]) @ (price(place)[1:] @ exactly))
    return found


def decodings(parameters: Parameters, tokens: int, depths: Iterator[Depth], cost: StepCosts, replications: int) -> Floats:
    """Times of many replications at once, from tiles of the depths of all sequences at each position."""
    batches = parameters.batches(tokens)
    sequences = sum(map(len, batches))
    prices = {
        (int(position), int(width)): times
        for part in priced_columns(parameters, tokens, cost, separately=False)
        for position, width, times in zip(part.positions, part.widths, part.times, strict=True)
    }
    time = np.zeros(replications)
    owed = np.zeros((sequences, parameters.layers, replications), dtype=np.int64) if parameters.fill == "backfill" else None
    rows = _rows(depths) if parameters.exit_layer is None else repeat(np.ones(replications, dtype=np.uint16))
    for place in range(tokens):
        here = [next(rows) for _ in range(sequences)]
        for batch in batches:
            live = [here[sequence] for sequence, length in batch.items() if length > place]
            if live:
                time += prices[0 if cost.uniform else place, len(live)][np.maximum.reduce(live)]
        if owed is not None:
            for (sequence, length), depth in zip((each for batch in batches for each in batch.items()), here, strict=True):
                if length > place:
                    lacking = owed[sequence]
                    times = filling_times(parameters, cost, place, int(lacking.max()))
                    time += _filled(lacking, np.maximum(depth, parameters.first_check), times)
    return time


def _filled(owed: NDArray[np.int64], depth: Depth, times: Floats) -> Floats:
    """Time of the backfill passes that a token needs; updates the missing rows `owed`."""
    reached = np.arange(len(owed))[:, None] < depth
    found = np.asarray((times[owed] * reached).sum(axis=0))
    owed += 1
    owed[reached] = 0
    return found


def _rows(tiles: Iterator[Depth]) -> Iterator[Depth]:
    for tile in tiles:
        yield from tile


def _deepest(parameters: Parameters) -> Depths:
    """Deterministic law: the fixed exit layer, or the last layer."""
    pmf = np.zeros(parameters.layers)
    pmf[-1 if parameters.exit_layer is None else parameters.exit_layer - 1] = 1.0
    return Depths(pmf)


def _same_depth(parameters: Parameters, law: Any) -> None:
    if law.layers != parameters.layers:
        raise checks.ParameterError(f"outcomes must be known for each of layers={parameters.layers}, got {law.layers}")
