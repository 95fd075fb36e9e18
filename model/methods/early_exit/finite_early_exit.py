"""Early exit over whole decodings: what a column of a batch takes by the depth at which it leaves, its moments, and many at once.

How deep a token must go is told by one coin for each text and place, so columns are independent of each other: a batch goes as deep
as the deepest of its texts. What is filled in later depends on the depths before: there the mean is a sum over layers, and there is
no variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.interpret.account import Totals, Work
from model.methods.early_exit.algorithm import Parameters

Floats = NDArray[np.float64]
Depth = NDArray[np.uint16]


class Depths:
    """A law of depths: `pmf[..., e - 1]` is the chance to leave behind layer e, for every place or one row for each.

    Coins are laid out place by place, for each those of all `texts`.

    >>> [tile.tolist() for tile in Depths([0.2, 0.3, 0.5]).sample(iter([np.array([[0.1], [0.2], [0.9]])]))]
    [[[1], [2], [3]]]
    """

    def __init__(self, pmf: ArrayLike, texts: int = 1) -> None:
        self.pmf = checks.array("pmf", pmf, 0, 1)
        if not self.pmf.size or self.pmf.ndim > 2 or not np.allclose(self.pmf.sum(axis=-1), 1, rtol=0, atol=1e-9):
            given = checks.shown(self.pmf.tolist())
            raise checks.ParameterError(f"pmf must be chances of the layers that add up to 1, got {given}")
        self.texts = texts

    @property
    def layers(self) -> int:
        """The deepest that a token may go."""
        return int(self.pmf.shape[-1])

    def cdf(self, places: int) -> Floats:
        """The chances to need at most 1, 2, ... layers, for each place; shape (places, layers)."""
        if self.pmf.ndim == 2 and len(self.pmf) < places:
            raise checks.ParameterError(f"pmf must have a row for each of {places} places, got {len(self.pmf)}")
        rising = np.cumsum(self.pmf[:places] if self.pmf.ndim == 2 else self.pmf, axis=-1)
        rising[..., -1] = 1.0
        return np.asarray(np.broadcast_to(rising, (places, self.layers)))

    def mean(self, places: int) -> float:
        """Mean depth of a text's tokens."""
        return float((1 - self.cdf(places)[:, :-1]).sum() / places) + 1

    def sample(self, coins: Iterator[Floats]) -> Iterator[Depth]:
        """Tiles of depths from tiles of coins."""
        row = 0
        for tile in coins:
            rising = self.cdf((row + len(tile) - 1) // self.texts + 1)
            found = np.empty(tile.shape, dtype=np.uint16)
            for index, luck in enumerate(tile):
                found[index] = np.searchsorted(rising[(row + index) // self.texts], luck, side="right") + 1
            row += len(tile)
            yield found


def column_times(parameters: Parameters, cost: UnitCost, width: int) -> Floats:
    """Time of a column of so many texts, by the depth that is needed: index 0 is not used [layer-times].

    Layers from `first_check` on are checked, but for the last; what `propagate` owes is paid at once.

    >>> column_times(Parameters(4, first_check=2), UnitCost(4, early_head=1.0, final_head=1.0, propagation=0.25), 1).tolist()
    [nan, 3.5, 3.5, 5.25, 7.0]
    """
    layers = parameters.layers
    times = np.full(layers + 1, np.nan)
    if parameters.exit_layer is not None:
        times[1:] = cost.depths[parameters.exit_layer] + cost.head(parameters.exit_layer)
        return cost.step + (times - cost.step) * cost.layers_slowdown(width)
    for needed in range(1, layers + 1):
        depth = max(needed, parameters.first_check)
        checked = min(depth, layers - 1) - parameters.first_check + 1
        time = cost.depths[depth] + checked * (cost.early_head if parameters.measure == "softmax" else cost.state_check)
        if depth == layers:
            time += cost.final_head
        elif parameters.measure == "state":
            time += cost.early_head
        if parameters.fill == "propagate":
            time += cost.propagation * (layers - depth)
        times[needed] = time
    return cost.step + (times - cost.step) * cost.layers_slowdown(width)


def moments(parameters: Parameters, tokens: int, law: Depths | None, cost: UnitCost) -> tuple[float, float]:
    """Mean and variance of the time of all batches, exactly; the variance of `backfill` is nan.

    >>> choice, law = Parameters(3, fill="backfill"), Depths([0.5, 0.25, 0.25])
    >>> moments(choice, 10, law, UnitCost(3, propagation=1.0))[0] - moments(choice, 10, law, UnitCost(3))[0]
    3.9375
    """
    law = _deepest(parameters) if law is None else law
    _same_depth(parameters, law)
    mean = variance = 0.0
    rising = law.cdf(tokens)
    for place, width in parameters.columns(tokens):
        reached = rising[place] ** width
        chance = np.diff(reached, prepend=0.0)
        times = column_times(parameters, cost, width)[1:]
        first = float(chance @ times)
        mean += first
        variance += float(chance @ (times - first) ** 2)
    if parameters.fill == "backfill":
        lengths = [length for batch in parameters.batches(tokens) for length in batch.values()]
        filling = sum(_fillings(parameters, rising[:length], cost.layers_slowdown) for length in lengths)
        return mean + cost.propagation * filling, float("nan")
    return mean, variance


def work(parameters: Parameters, tokens: int, law: Depths | None) -> Work:
    """What the passes of all batches come to, in the mean.

    >>> found = work(Parameters(4, first_check=2), 100, Depths([0.2, 0.2, 0.3, 0.3])).of["target"]
    >>> round(found.layer_passes), round(found.filled), round(found.heads)  # layers 2 and 3 are checked, the last projects too
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
        lengths = [length for batch in parameters.batches(tokens) for length in batch.values()]
        runs, rows = (sum(_fillings(parameters, rising[:length], price) for length in lengths) for price in (_once, _each))
        found = found._replace(passes=found.passes + runs, filled_runs=runs, filled=rows)
    return Work({"target": found})


def _once(width: int) -> float:
    return 1.0


def _each(width: int) -> float:
    return float(width)


def _fillings(parameters: Parameters, rising: Floats, price: Callable[[int], float]) -> float:
    """Expected passes that fill in rows over a text, by width: at place t a layer lacks the w rows before it, and not one more."""
    left = np.concatenate([np.zeros_like(rising[:, :1]), rising[:, :-1]], axis=1)  # the chance to have left above layer j + 1
    left[:, : parameters.first_check] = 0.0
    found = 0.0
    for place in range(1, len(left)):
        lacking = np.cumprod(left[place - 1 :: -1], axis=0)  # at least so many rows
        exactly = lacking - np.concatenate([lacking[1:], np.zeros_like(lacking[:1])])
        prices = np.array([price(width) for width in range(1, place + 1)])
        found += float((1 - left[place]) @ (prices @ exactly))
    return found


def decodings(parameters: Parameters, tokens: int, depths: Iterator[Depth], cost: UnitCost, replications: int) -> Floats:
    """Times of many replications at once, from tiles of the depths of all texts at each place."""
    batches = parameters.batches(tokens)
    texts = sum(map(len, batches))
    widths = {width for _, width in parameters.columns(tokens)}
    prices = {width: column_times(parameters, cost, width) for width in widths}
    time = np.zeros(replications)
    owed = np.zeros((texts, parameters.layers, replications), dtype=np.int64) if parameters.fill == "backfill" else None
    rows = _rows(depths) if parameters.exit_layer is None else repeat(np.ones(replications, dtype=np.uint16))
    for place in range(tokens):
        here = [next(rows) for _ in range(texts)]
        for batch in batches:
            live = [here[text] for text, length in batch.items() if length > place]
            if live:
                time += prices[len(live)][np.maximum.reduce(live)]
        if owed is not None:
            for (text, length), depth in zip((each for batch in batches for each in batch.items()), here, strict=True):
                if length > place:
                    time += cost.propagation * _filled(owed[text], np.maximum(depth, parameters.first_check), cost)
    return time


def _filled(owed: NDArray[np.int64], depth: Depth, cost: UnitCost) -> Floats:
    """The passes that fill in what a token needs, each by its width; and what it leaves behind."""
    reached = np.arange(len(owed))[:, None] < depth
    if cost.curve is None:
        found = np.asarray((reached & (owed > 0)).sum(axis=0), dtype=np.float64)
    else:
        slowdown = np.array([0.0, *(cost.layers_slowdown(width) for width in range(1, int(owed.max()) + 1))])
        found = np.asarray((slowdown[owed] * reached).sum(axis=0))
    owed += 1
    owed[reached] = 0
    return found


def _rows(tiles: Iterator[Depth]) -> Iterator[Depth]:
    for tile in tiles:
        yield from tile


def _deepest(parameters: Parameters) -> Depths:
    """The law of a choice in which nothing is left to luck."""
    pmf = np.zeros(parameters.layers)
    pmf[-1 if parameters.exit_layer is None else parameters.exit_layer - 1] = 1.0
    return Depths(pmf)


def _same_depth(parameters: Parameters, law: Any) -> None:
    if law.layers != parameters.layers:
        raise checks.ParameterError(f"outcomes must be known for each of layers={parameters.layers}, got {law.layers}")
