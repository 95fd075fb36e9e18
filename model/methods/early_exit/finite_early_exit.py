"""Early exit over whole decodings: time of a batch step by its exit depth, exact moments, and many replications at once.

A column is one step of a batch: one token of each of its sequences. The depth of each token is one independent random draw, so
columns are independent; a batch goes as deep as the deepest of its sequences. `backfill` depends on the depths of earlier
positions: its mean is a sum over layers, and its variance is not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import Totals, Work
from model.methods.batching import columns_of
from model.methods.early_exit.algorithm import Parameters
from model.methods.prediction import DecodingPoints, pair_blocks
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Depth = NDArray[np.uint16]
_PART = 2**20
"""Cells (columns x depths) that are priced together: about 8 MB per array."""
_PASSES = 6
"""Passes that are priced for a step at most, and one of plain decoding, where layers are alike."""
_CELLS = 2**15
"""Cells (points x columns x depths) that are evaluated together, so that they stay in the cache of a processor."""


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

    @classmethod
    def each(cls, pmfs: Floats, sequences: int = 1) -> list[Depths]:
        """A law for each of these distributions, which are valid; shape (laws, layers).

        >>> [law.pmf.tolist() for law in Depths.each(np.array([[0.5, 0.5], [0.0, 1.0]]))]
        [[0.5, 0.5], [0.0, 1.0]]
        """
        laws = [object.__new__(cls) for _ in pmfs]
        for law, pmf in zip(laws, pmfs, strict=True):
            law.pmf, law.sequences = pmf, sequences
        return laws

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

    @staticmethod
    def cdf_of(laws: Sequence[Depths], positions: int) -> Floats:
        """`cdf` of several laws, either all by position or none; shape (laws, positions or 1, layers)."""
        if laws[0].by_position:
            return np.stack([law.cdf(positions) for law in laws])
        rising = np.cumsum([law.pmf for law in laws], axis=-1)
        rising[:, -1] = 1.0
        return np.asarray(rising[:, None])

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
    `at` of the steps (a single number for `uniform` costs); an axis of several costs is the first. Times are in the cost's unit.

    >>> from model.costs.layer_times import UnitCost
    >>> column_times(Parameters(4, first_check=2), UnitCost(4, early_head=1.0, final_head=1.0, propagation=0.25), 1).tolist()
    [nan, 3.5, 3.5, 5.25, 7.0]
    """
    times = times_by_depth(parameters, cost, width, at)
    return np.concatenate([np.full((*times.shape[:-1], 1), np.nan), times], axis=-1)


def times_by_depth(parameters: Parameters, cost: StepCosts, width: ArrayLike, at: ArrayLike = 0) -> Floats:
    """`column_times` for the depths 1, 2, ..., layers; a single number for all of them where tokens leave after a fixed layer."""
    known: dict[PassShape, Floats] = {}

    def price(shape: PassShape) -> Floats:
        if np.ndim(width):
            return cost.times(shape, at)
        shape = cost.alike(shape)
        if shape not in known:
            known[shape] = cost.times(shape, at)
        return known[shape]

    if parameters.exit_layer is not None:
        alike = price(_fixed_pass(parameters, width))[..., None]
        return np.broadcast_to(alike, (*alike.shape[:-1], parameters.layers))
    by_depth: list[Floats] = []
    run = np.zeros(())
    for onward, exiting in _passes_by_depth(parameters, width):
        run = time = run + price(onward)
        for shape in exiting:
            time = time + price(shape)
        by_depth.append(time)
    return np.stack([*by_depth[:1] * (parameters.first_check - 1), *by_depth], axis=-1)


def _fixed_pass(parameters: Parameters, width: ArrayLike) -> PassShape:
    """The pass of a step whose tokens all leave after the same layer."""
    return PassShape(LayerSpan(0, parameters.exit_layer or parameters.layers), sequences=width, heads=1)


def _passes_by_depth(parameters: Parameters, width: ArrayLike) -> Iterator[tuple[PassShape, list[PassShape]]]:
    """For each depth from `first_check` on the pass that reaches it, and further passes of a step that leaves there."""
    layers, softmax, start = parameters.layers, parameters.measure == "softmax", 0
    for depth in range(parameters.first_check, layers + 1):
        asked = depth < layers
        onward = PassShape(
            LayerSpan(start, depth), sequences=width, heads=int(softmax or not asked), compared=asked and not softmax
        )
        exiting = [PassShape(LayerSpan(depth, depth), sequences=width, heads=1)] if asked and not softmax else []
        if asked and parameters.fill == "propagate":
            exiting.append(PassShape(LayerSpan(depth, layers, kv_only=True), sequences=width))
        yield onward, exiting
        start = depth


class DepthPasses(NamedTuple):
    """Passes of a step as multiples of few that are priced: `counts[k, e - 1]` of `shapes[k]`, if it leaves after layer e."""

    shapes: list[PassShape]
    counts: Floats

    @staticmethod
    def of(parameters: Parameters, cost: StepCosts, width: int) -> DepthPasses:
        """Passes of a step over `width` sequences.

        >>> from model.costs.pass_seconds import PassSeconds
        >>> found = DepthPasses.of(Parameters(4, measure="state"), PassSeconds({}), 1)
        >>> for shape, counts in zip(found.shapes, found.counts.astype(int).tolist(), strict=True):
        ...     print(shape.layers[:2], counts)
        (0, 1) [1, 1, 1, 1]
        (1, 1) [1, 1, 1, 0]
        (1, 2) [3, 2, 1, 0]
        (1, 2) [0, 1, 2, 2]
        (1, 2) [0, 0, 0, 1]
        """
        if parameters.exit_layer is not None:
            return DepthPasses([cost.alike(_fixed_pass(parameters, width))], np.ones((1, parameters.layers)))
        found: dict[PassShape, Floats] = {}

        def add(shape: PassShape, depths: slice) -> None:
            own, count = cost.as_repeated(shape)
            found.setdefault(own, np.zeros(parameters.layers))[depths] += count

        first = parameters.first_check - 1
        for index, (onward, exiting) in enumerate(_passes_by_depth(parameters, width), first):
            here = slice(index if index > first else 0, index + 1)  # shallower depths than the first check run until there
            add(onward, slice(here.start, None))
            for shape in exiting:
                add(shape, here)
        return DepthPasses([*found], np.stack([*found.values()]))

    def moments(self, chance: Floats) -> StepMoments:
        """Moments of these counts from the probabilities of depths, shape (laws, steps or 1, depths)."""
        mean = chance @ self.counts.T
        # Probabilities are differences of sums, so that one of 0 may be less by a rounding.
        deviation = np.sqrt(np.maximum(chance, 0.0))[..., None] * (self.counts.T - mean[..., None, :])
        return StepMoments(mean, np.asarray(np.linalg.qr(deviation, mode="r")))


class StepMoments(NamedTuple):
    """Moments of the time of steps as functions of the times of passes, with axes of laws and of steps (1: all alike) first.

    The mean is `mean @ times`, the variance the sum of the squares of `spread @ times`: the covariance of counts itself would lose
    digits where times differ little between depths.
    """

    mean: Floats
    spread: Floats

    def by_law(self, times: Floats) -> Floats:
        """Means under all laws, then variances, of steps that are all alike; `times` has the shape (passes, n)."""
        spread = self.spread[:, 0]
        size = max(_CELLS // (spread.shape[1] * times.shape[1]), 1)
        variances = [np.square(spread[at : at + size] @ times).sum(axis=1) for at in range(0, len(spread), size)]
        return np.concatenate([self.mean[:, 0] @ times, *variances])

    def at(self, law: NDArray[np.intp], times: Floats) -> tuple[Floats, Floats]:
        """Means and variances of steps under one law each, shape (pairs, steps); `times` has the shape (pairs, steps, passes)."""
        mean, spread = self.mean[law], self.spread[law]
        alike = mean.shape[1] == 1
        deviation = times @ spread[:, 0].swapaxes(1, 2) if alike else np.einsum("psjk,psk->psj", spread, times)
        return np.einsum("psk,psk->ps", np.broadcast_to(mean, times.shape), times), np.square(deviation).sum(axis=-1)


def filling_times(parameters: Parameters, cost: StepCosts, position: int, most: int) -> Floats:
    """Time of one pass that fills the rows of the last 0, 1, ..., `most` positions before this one in a layer.

    It is the same for every layer.

    >>> from model.costs.layer_times import UnitCost
    >>> filling_times(Parameters(4), UnitCost(4, propagation=0.5, verify_cost=((1, 1.0), (3, 2.0))), 9, 3).tolist()
    [0.0, 0.5, 0.75, 1.0]
    """
    rows = np.arange(1, most + 1)
    times = cost.times(_filling_pass(parameters, rows), position - rows)
    return np.concatenate([np.zeros((*times.shape[:-1], 1)), times], axis=-1)


def _filling_pass(parameters: Parameters, rows: Any) -> PassShape:
    """The pass that fills a number of rows in a layer, or each of several numbers."""
    return PassShape(LayerSpan(parameters.layers - 1, parameters.layers, kv_only=True), width=rows, joins=True)


def prices_of_each(parameters: Parameters) -> int:
    """Prices of a step at a cost: by depth, unless all tokens leave after the same layer."""
    return parameters.layers + 1 if parameters.exit_layer is None else 1


def prices_by_position(parameters: Parameters, several: bool) -> int:
    """Prices of a step at a cost and a position, at points of `several` lengths or one (`DepthPasses`)."""
    return _PASSES if several else 1


class Columns(NamedTuple):
    """Batch steps: `counts[i]` steps over `widths[i]` sequences at `positions[i]` take `times[..., i, :]`, by depth from 1 on."""

    positions: Integers
    widths: Integers
    counts: Integers
    times: Floats


def priced_columns(
    parameters: Parameters, tokens: int, cost: StepCosts, *, separately: bool = True, costs: int = 1
) -> Iterator[Columns]:
    """Yield all batch steps in parts; for `uniform` costs steps of equal width are combined unless `separately`.

    `costs` is the number of costs, if these are several (`model.costs.many_costs`).
    """
    separately = separately or not cost.uniform
    positions, widths, counts = _steps(parameters, tokens, separately=separately)
    known, which = np.unique(widths, return_inverse=True)
    prices = times_by_depth(parameters, cost, known) if cost.uniform else None
    size = max(_PART // (costs * prices_of_each(parameters)), 1)
    for start in range(0, len(counts), size):
        part = slice(start, start + size)
        at, width = positions[part], widths[part]
        if prices is not None:
            times = prices[..., which[part], :]
        else:  # a single width as a number is faster
            times = times_by_depth(parameters, cost, int(known[0]) if len(known) == 1 else width, at)
        yield Columns(at, width, counts[part], times)


def _steps(parameters: Parameters, tokens: int, *, separately: bool) -> tuple[Integers, Integers, Integers]:
    """Positions (0 unless `separately`), widths and numbers of the steps of all batches."""
    return _steps_of(tuple([tuple(batch.values()) for batch in parameters.batches(tokens)]), separately)


@lru_cache(maxsize=8)
def _steps_of(batches: tuple[tuple[int, ...], ...], separately: bool) -> tuple[Integers, Integers, Integers]:
    positions, widths = columns_of(batches)
    if len(batches) == 1 == len(batches[0]):  # one sequence: every position once
        one = np.ones_like(positions)
        return (positions, one, one) if separately else (positions[:1], one[:1], np.array([positions.size]))
    (positions, widths), counts = np.unique([positions * separately, widths], axis=1, return_counts=True)
    return positions, widths, counts


def moments_of_points(points: DecodingPoints[Parameters]) -> tuple[Floats, Floats]:
    """Exact mean and variance of the total time of all batches at each point; the variance of `backfill` is nan.

    Steps are priced once for all laws, and their depths evaluated once for all costs. Points of several lengths have laws with
    the same rates at all positions, and no `backfill`.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.costs.many_costs import joined
    >>> choice, law, one = Parameters(3, fill="backfill"), Depths([0.5, 0.25, 0.25]), np.zeros(2, dtype=np.intp)
    >>> costs = joined([UnitCost(3, propagation=1.0), UnitCost(3)])
    >>> mean, _ = moments_of_points(DecodingPoints(choice, 10, [law], costs, one, np.arange(2)))
    >>> float(mean[0] - mean[1])
    3.9375
    """
    laws = [_deepest(points.parameters) if law is None else law for law in points.laws]
    for law in laws:
        _same_depth(points.parameters, law)
    points = replace(points, laws=laws)
    if points.lengths is not None and not points.cost.uniform:
        return _moments_of_lengths(points)
    if points.lengths is not None:  # of a single sequence, whose steps are independent and alike
        mean, variance = moments_of_points(replace(points, tokens=1, lengths=None))
        return mean * points.lengths, variance * points.lengths
    found = np.empty((2, points.law.size))
    by_position = np.array([law.by_position for law in laws], dtype=np.bool_)[points.law]
    for own in (by_position, ~by_position):
        if own.any():
            index = np.flatnonzero(own)
            found[:, index] = _moments_in_blocks(points.at(index))
    return found[0], found[1]


def _moments_in_blocks(points: DecodingPoints[Parameters]) -> Floats:
    """Moments at points whose laws are either all by position or none; a limited number of laws is evaluated together."""
    parameters, tokens = points.parameters, points.tokens
    separately = points.laws[0].by_position or not points.cost.uniform
    steps = len(_steps(parameters, tokens, separately=separately)[2]) * prices_of_each(parameters)
    size = max(_PART // max(steps, tokens**2 if parameters.fill == "backfill" else 1), 1)
    found = np.empty((2, points.law.size))
    for start in range(0, len(points.laws), size):
        index = np.flatnonzero((points.law >= start) & (points.law < start + size))
        found[:, index] = _moments_of_laws(points.at(index))
    return found


def _moments_of_laws(points: DecodingPoints[Parameters]) -> tuple[Floats, Floats]:
    """Moments at points whose laws are either all by position or none."""
    rising = Depths.cdf_of(points.laws, points.tokens)
    mean, variance = _moments_alike(points, rising) if points.cost.uniform else _moments_by_position(points, rising)
    if points.parameters.fill == "backfill":
        return mean + _filling_time(points, rising), np.full(points.law.size, np.nan)
    return mean, variance


def _moments_alike(points: DecodingPoints[Parameters], rising: Floats) -> tuple[Floats, Floats]:
    """Moments without backfill, where times are the same at all positions; `rising` has the laws' `Depths.cdf_of`."""
    parameters, tokens, cost = points.parameters, points.tokens, points.cost
    mean, variance = np.zeros((2, points.law.size))
    separately, costs = points.laws[0].by_position, int(points.price.max()) + 1
    for part in priced_columns(parameters, tokens, cost, separately=separately, costs=costs):
        chance = _chances(rising, part.positions, part.widths)
        reached = np.flatnonzero(chance.any(axis=(0, 1)))  # one depth, if all tokens leave after the same layer
        chance, times = chance[..., reached], part.times[..., reached]
        size = max(_CELLS // (len(part.counts) * reached.size), 1)
        for start in range(0, points.law.size, size):
            some = slice(start, start + size)
            first, spread = _moments_of_steps(chance[points.law[some]], times[points.price[some]])
            mean[some] += first @ part.counts
            variance[some] += spread @ part.counts
    return mean, variance


def _moments_by_position(points: DecodingPoints[Parameters], rising: Floats) -> tuple[Floats, Floats]:
    """`_moments_alike`, where times depend on the position: of few passes, whose times are summed over the positions."""
    parameters, tokens, cost = points.parameters, points.tokens, points.cost
    mean, variance = np.zeros((2, points.law.size))
    positions, widths, counts = _steps(parameters, tokens, separately=True)
    for width in np.unique(widths).tolist():
        at, number = positions[widths == width], counts[widths == width]
        passes = DepthPasses.of(parameters, cost, width)
        chance = np.diff((rising if rising.shape[1] == 1 else rising[:, at]) ** width, prepend=0.0, axis=-1)
        moments = passes.moments(chance)
        if chance.shape[1] == 1 and points.many_pairs:
            weights = np.bincount(at, weights=number, minlength=tokens).astype(np.float64)
            found = cost.summed_values(passes.shapes, moments.by_law, weights)
            mean += found[points.price, points.law]
            variance += found[points.price, len(points.laws) + points.law]
            continue
        times = np.stack([cost.times(shape, at) for shape in passes.shapes], axis=-1)
        size = max(_CELLS // times[0].size, 1)
        for start in range(0, points.law.size, size):
            some = slice(start, start + size)
            first, spread = moments.at(points.law[some], times[points.price[some]])
            mean[some] += first @ number
            variance[some] += spread @ number
    return mean, variance


def _moments_of_lengths(points: DecodingPoints[Parameters]) -> tuple[Floats, Floats]:
    """Moments of a single sequence at points of several lengths, under laws that are the same at all positions.

    Steps are independent, so moments are sums over the positions, one for each pair of a law and a cost.
    """
    assert points.lengths is not None
    passes = DepthPasses.of(points.parameters, points.cost, 1)
    moments = passes.moments(np.diff(Depths.cdf_of(points.laws, 1), prepend=0.0, axis=-1))
    times = np.stack([points.cost.times(shape, np.arange(points.tokens)) for shape in passes.shapes], axis=-1)
    found = np.empty((2, points.law.size))
    for block in pair_blocks(points.law, points.price, max(_CELLS // times[0].size, 1)):
        until = np.cumsum(moments.at(block.law, times[block.price]), axis=-1)
        found[:, block.points] = until[:, block.pair, points.lengths[block.points] - 1]
    return found[0], found[1]


def _moments_of_steps(chance: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of the time of each step; shape (points, steps). Overwrites `times`, shape (points, steps, depths)."""
    mean = np.einsum("pcd,pcd->pc", chance, times)
    times -= mean[..., None]
    np.square(times, out=times)
    return mean, np.einsum("pcd,pcd->pc", chance, times)


def _chances(rising: Floats, positions: Integers, widths: Integers) -> Floats:
    """Probabilities of the depth of batch steps, that of the deepest sequence; shape (laws, steps, layers).

    Shape (laws, 1, layers), if all steps are alike.
    """
    known, which = np.unique(widths, return_inverse=True)
    if rising.shape[1] == 1:  # steps of equal width are alike
        alike = np.diff(rising ** known[:, None], prepend=0.0, axis=-1)
        return np.asarray(alike[:, which] if len(known) > 1 else alike)
    return np.asarray(np.diff(rising[:, positions] ** widths[:, None], prepend=0.0, axis=-1))


def _filling_time(points: DecodingPoints[Parameters], rising: Floats) -> Floats:
    """Expected time of backfill passes at each point: of as many rows, at each first position."""
    tokens = points.tokens
    counts = np.stack([_filling_counts(points.parameters, tokens, each) for each in rising], axis=-1)
    passes = []
    for rows in range(tokens - 1, 0, -1):  # an error about a width names the largest
        by_position = np.zeros((tokens, len(rising)))
        by_position[: tokens - rows] = counts[rows:, rows]
        passes.append((_filling_pass(points.parameters, rows), by_position))
    return points.time_of(passes) if passes else np.zeros(points.law.size)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> float:
    """Upper bound of the time: every step at its slowest exit, and every layer with the most expensive backfill."""
    parts = priced_columns(parameters, tokens, cost, separately=False)
    time = sum(float(part.counts @ part.times.max(axis=1)) for part in parts)
    if parameters.fill == "backfill":
        most = np.array([filling_times(parameters, cost, position, position).max() for position in range(tokens)])
        time += parameters.layers * float(most[parameters.columns(tokens)[0]].sum())
    return time


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[Depths | None]) -> Work:
    """Expected work of the passes of all batches under each of several laws, as arrays of shape (laws,).

    >>> found = work_of_laws(Parameters(4, first_check=2), 100, [Depths([0.2, 0.2, 0.3, 0.3])]).at(0).by_model["target"]
    >>> round(found.layer_passes), round(found.filled), round(found.heads)  # heads after layers 2 and 3 (checks) and the last
    (290, 110, 190)
    """
    known = [_deepest(parameters) if law is None else law for law in laws]
    for law in known:
        _same_depth(parameters, law)
    found = np.empty((len(Totals._fields), len(known)))
    by_position = np.array([law.by_position for law in known], dtype=np.bool_)
    for own in (by_position, ~by_position):
        index = np.flatnonzero(own)
        size = max(_PART // (parameters.layers * (tokens if own is by_position else 1)), 1)
        for start in range(0, index.size, size):
            part = index[start : start + size]
            found[:, part] = _totals(parameters, tokens, Depths.cdf_of([known[each] for each in part.tolist()], tokens))
    return Work({"target": Totals(*found)})


def work_of_lengths(parameters: Parameters, lengths: Integers, laws: Sequence[Depths | None]) -> Work | None:
    """`work_of_laws` of a single sequence of several lengths; shape (laws, lengths). None: not all positions are alike.

    >>> found = work_of_lengths(Parameters(4, first_check=2), np.array([1, 100]), [Depths([0.2, 0.2, 0.3, 0.3])])
    >>> found.by_model["target"].layer_passes.round(3).tolist()
    [[2.9, 290.0]]
    """
    if parameters.fill == "backfill" or any(law is not None and law.by_position for law in laws):
        return None
    one = work_of_laws(parameters, 1, laws).by_model["target"]
    attended: Any = np.outer(one.attended, lengths * (lengths + 1) / 2)
    each: list[Any] = [np.outer(total, lengths) for total in one]
    return Work({"target": Totals(*each)._replace(attended=attended, rows_read=attended)})


def _totals(parameters: Parameters, tokens: int, rising: Floats) -> Floats:
    """Rows of `Totals` under laws that are either all by position or none."""
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
    positions, widths, counts = _steps(parameters, tokens, separately=True)
    if rising.shape[1] == 1:  # steps of equal width are alike
        known, which = np.unique(widths, return_inverse=True)
        seen, counts = (np.bincount(which, weights=values) for values in ((positions + 1) * counts, counts))
        means = _chances(rising, known, known) @ each.T
        widths = known
    else:
        seen = (positions + 1) * counts
        means = _chances(rising, positions, widths) @ each.T
    runs, deep, heads, filled = np.moveaxis(means, -1, 0)  # (laws, steps)
    attended = deep @ (widths * seen)
    total = [
        runs @ counts, deep @ counts, deep @ (widths * counts), attended, attended, filled @ counts, filled @ (widths * counts),
        heads @ counts, heads @ (widths * counts),
    ]  # fmt: skip
    if parameters.fill == "backfill":
        by_rows = np.stack([_filling_counts(parameters, tokens, law).sum(axis=0) for law in rising])
        runs, rows = by_rows[:, 1:].sum(axis=1), by_rows @ np.arange(float(tokens))
        total[0], total[5], total[6] = total[0] + runs, runs, rows
    return np.array(total)


def _filling_counts(parameters: Parameters, tokens: int, rising: Floats) -> Floats:
    """Expected backfill passes by the position before which they fill rows, and the number of rows; shape (tokens, tokens).

    A pass fills the rows that a layer lacks directly before a position. `rising` has one row, if positions are alike.
    """
    left = np.concatenate([np.zeros_like(rising[:, :1]), rising[:, :-1]], axis=1)  # probability of an exit before layer j + 1
    left[:, : parameters.first_check] = 0.0
    columns = np.bincount(parameters.columns(tokens)[0], minlength=tokens)
    found = np.zeros((tokens, tokens))
    if len(left) == 1:
        lacking = left ** np.arange(1, tokens)[:, None]  # at least 1, 2, ... missing rows
        exactly, least = lacking @ (1 - left[0]) ** 2, lacking @ (1 - left[0])
        for place in range(1, tokens):
            found[place, 1 : place + 1] = columns[place] * np.append(exactly[: place - 1], least[place - 1])
        return found
    for place in range(1, tokens):
        lacking = np.cumprod(left[place - 1 :: -1], axis=0)
        exactly = lacking - np.concatenate([lacking[1:], np.zeros_like(lacking[:1])])
        found[place, 1 : place + 1] = columns[place] * (exactly @ (1 - left[place]))
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
                time += prices[0 if cost.uniform else place, len(live)][np.maximum.reduce(live) - 1]
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
