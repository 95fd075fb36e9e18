"""Inputs and results of every method's `predict` and `predict_points`."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from model.costs import many_costs, watched_costs
from model.costs.many_costs import Varied
from model.costs.step_costs import PassShape, StepCosts
from model.methods.method_parameters import MethodParameters

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Chosen = TypeVar("Chosen", bound=MethodParameters, covariant=True)


class MethodChoice(NamedTuple, Generic[Chosen]):
    """Arguments of a prediction except the law of outcomes."""

    parameters: Chosen
    tokens: int
    cost: StepCosts


class ChoiceGroup(NamedTuple, Generic[Chosen]):
    """Choices that differ in their costs, or in their number of tokens, only."""

    parameters: Chosen
    tokens: int | Integers
    """Of all choices, or of each; shape (choices,)."""
    costs: Sequence[StepCosts]

    @property
    def lengths(self) -> Integers:
        """Tokens of each choice, shape (choices,)."""
        return np.broadcast_to(np.asarray(self.tokens, dtype=np.int64), len(self.costs))

    def check_tokens(self) -> None:
        """Raise ParameterError if a number of tokens contradicts the parameters."""
        if self.parameters.allows_any_tokens:
            return
        for tokens in [self.tokens] if isinstance(self.tokens, int) else np.unique(self.tokens).tolist():
            self.parameters.check_tokens(tokens)

    def choice(self, place: int) -> MethodChoice[Chosen]:
        """One of the choices."""
        return MethodChoice(self.parameters, int(self.lengths[place]), self.costs[place])


class GroupedChoices(Sequence[MethodChoice[Chosen]]):
    """Choices of several groups, one after another; a single choice is made when it is asked for."""

    def __init__(self, groups: Sequence[ChoiceGroup[Chosen]]) -> None:
        self.groups = groups
        self.starts = np.cumsum([0, *(len(group.costs) for group in groups)])
        """Index of the first choice of each group, and the number of choices."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    @overload
    def __getitem__(self, index: int) -> MethodChoice[Chosen]: ...

    @overload
    def __getitem__(self, index: slice) -> list[MethodChoice[Chosen]]: ...

    def __getitem__(self, index: int | slice) -> MethodChoice[Chosen] | list[MethodChoice[Chosen]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.groups[number].choice(index - int(self.starts[number]))

    @property
    def lengths(self) -> Integers:
        """Tokens of each choice."""
        return np.concatenate([group.lengths for group in self.groups])

    def values(self, value: Callable[[MethodChoice[Chosen]], float]) -> Floats:
        """Value of each choice; evaluated once for choices that differ in nothing that it reads."""
        return np.concatenate([_values(value, group) for group in self.groups])


def _values(value: Callable[[MethodChoice[Any]], float], group: ChoiceGroup[Any]) -> Floats:
    """Value of each choice of a group."""
    if isinstance(group.tokens, int):
        return _values_of_costs(value, group.parameters, group.tokens, group.costs)
    found = np.empty(len(group.costs))

    def of_length(tokens: int, places: NDArray[np.intp]) -> Floats:
        return _values_of_costs(value, group.parameters, tokens, _costs_at(group.costs, places))

    for values, places in watched_costs.of_numbers(group.tokens, of_length):
        found[places] = values
    return found


def _values_of_costs(
    value: Callable[[MethodChoice[Any]], float], parameters: Any, tokens: int, costs: Sequence[StepCosts]
) -> Floats:  # fmt: skip
    """Value of choices with each of these costs."""
    if isinstance(costs, Varied):
        each = costs.distinct(lambda cost: value(MethodChoice(parameters, tokens, cost)))
        if each is not None:
            return np.asarray(np.array(each[0], dtype=np.float64)[each[1]])
    single, which = _distinct(costs) if not isinstance(costs, Varied) else (costs, np.arange(len(costs)))
    return np.array([value(MethodChoice(parameters, tokens, cost)) for cost in single], dtype=np.float64)[which]


@dataclass(frozen=True)
class PredictionPoints(Generic[Chosen]):
    """Many points to predict together: each combines one of `choices` with one of `laws`.

    Parameters
    ----------
    choices, laws
        Distinct values; choices in groups (`GroupedChoices`) are evaluated by group where a method can. A law has the form that
        `predict` takes; with several kinds of outcomes, laws by outcome name.
    choice, law
        Index into `choices` and `laws` of each point; shape (points,).
    means
        Points of which only means are asked: their variances may be nan. None: no point.
    """

    choices: Sequence[MethodChoice[Chosen]]
    laws: Sequence[Any]
    choice: NDArray[np.intp]
    law: NDArray[np.intp]
    means: NDArray[np.bool_] | None = None

    def at(self, index: NDArray[np.intp]) -> PredictionPoints[Chosen]:
        """Subset of the points, in this order."""
        means = None if self.means is None else self.means[index]
        return PredictionPoints(self.choices, self.laws, self.choice[index], self.law[index], means)

    def of_choices(self, value: Callable[[MethodChoice[Chosen]], float]) -> Floats:
        """Value of each point's choice; shape (points,)."""
        if isinstance(self.choices, GroupedChoices):
            return self.choices.values(value)[self.choice]
        return np.array([value(each) for each in self.choices], dtype=np.float64)[self.choice]

    def groups(self) -> GroupedChoices[Chosen]:
        """The choices in groups; each alone, if they were given singly."""
        if isinstance(self.choices, GroupedChoices):
            return self.choices
        return GroupedChoices([ChoiceGroup(each.parameters, each.tokens, [each.cost]) for each in self.choices])

    def of_laws(self, value: Callable[[Any], float]) -> Floats:
        """Value of each point's law; shape (points,)."""
        return np.array([value(each) for each in self.laws], dtype=np.float64)[self.law]

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Choice and law index of each distinct pair, and the index of each point's pair."""
        return distinct_pairs(self.choice, self.law)


@dataclass(frozen=True)
class DecodingPoints(Generic[Chosen]):
    """Points of one method's parameters and tokens that differ in their laws and costs only.

    Parameters
    ----------
    parameters, tokens
        Of all points; with `lengths` the largest number of tokens.
    laws
        Distinct laws.
    cost
        Distinct costs as one (`model.costs.many_costs.joined`): times have a leading axis of costs.
    law, price
        Index of each point's law and cost; shape (points,).
    means
        As of `PredictionPoints`.
    lengths
        Tokens of each point if they differ, shape (points,). Then `predicts_lengths_together` of the parameters is true.
    """

    parameters: Chosen
    tokens: int
    laws: Sequence[Any]
    cost: StepCosts
    law: NDArray[np.intp]
    price: NDArray[np.intp]
    means: NDArray[np.bool_] | None = None
    lengths: Integers | None = None

    def at(self, index: NDArray[np.intp]) -> DecodingPoints[Chosen]:
        """Subset of the points, in this order, with the laws that they use."""
        used, law = np.unique(self.law[index], return_inverse=True)
        means, lengths = None if self.means is None else self.means[index], None if self.lengths is None else self.lengths[index]
        laws = [self.laws[each] for each in used.tolist()]
        return replace(self, laws=laws, law=law, price=self.price[index], means=means, lengths=lengths)

    def plain_times(self) -> Floats:
        """Time of plain decoding at each point."""
        if self.lengths is None:
            return np.asarray(self.parameters.plain_time(self.tokens, self.cost)[self.price])
        if self.cost.uniform:
            return np.asarray(self.lengths * self.parameters.plain_time(1, self.cost)[self.price])
        times = self.parameters.plain_step_times(np.arange(self.tokens), self.cost)
        return np.asarray(np.cumsum(times, axis=-1)[self.price, self.lengths - 1])

    def operations(self, role: str) -> Floats:
        """Operations per token in a pass of this model relative to the target, at each point [-]."""
        if self.lengths is None:
            return np.asarray(self.cost.operations(role))[self.price]
        return np.asarray(self.cost.operations_at(role, self.price, self.lengths // 2))

    def one_length_each(self, predict: Callable[[DecodingPoints[Chosen]], Prediction], which: NDArray[np.bool_]) -> Prediction:
        """Predict the points in `which` apart by their length, and all others together, with a function of points."""
        lengths, index = self.of_lengths()
        alone = [np.flatnonzero(which & (index == number)) for number in np.unique(index[which]).tolist()]
        points = []
        for mine in alone:
            tokens = int(lengths[index[mine[0]]])
            points.append(replace(self.at(mine), tokens=tokens, lengths=None, cost=self.cost.with_middle(tokens // 2)))
        together = np.flatnonzero(~which)
        if together.size:
            alone, points = [*alone, together], [*points, self.at(together)]
        return Prediction.joined([predict(each) for each in points]).at(np.argsort(np.concatenate(alone)))

    def of_lengths(self) -> tuple[Integers, NDArray[np.intp]]:
        """Distinct numbers of tokens, rising, and the index of each point's."""
        if self.lengths is None:
            return np.array([self.tokens]), np.zeros(self.law.size, dtype=np.intp)
        return np.unique(self.lengths, return_inverse=True)

    def linear(self, counts: Floats, prices: Floats) -> Floats:
        """Sum over events of count x price at each point; counts have shape (events, laws), prices (costs, events).

        Unknown prices (nan) only matter for events that occur.
        """
        return linear(counts, prices, self.law, self.price)

    @property
    def many_pairs(self) -> bool:
        """True if the points have a large part of all pairs of a law and a cost, so that all of these may be evaluated."""
        return len(self.laws) * (int(self.price.max(initial=0)) + 1) <= _LARGEST_PRODUCT * self.law.size

    def time_of(self, passes: Sequence[tuple[PassShape, Floats]]) -> Floats:
        """Expected time of some passes at each point: shapes, with their numbers by position and law, (positions, laws).

        Where times do not depend on the position, counts may have a single one.
        """
        cost, law, price = self.cost, self.law, self.price
        if cost.uniform:
            each = np.stack([cost.times(shape) for shape, _ in passes], axis=-1)
            return linear(np.stack([counts.sum(axis=0) for _, counts in passes]), each, law, price)
        if self.many_pairs:
            found = cost.summed_times(*passes[0])
            for one in passes[1:]:
                found = found + cost.summed_times(*one)
            return np.asarray(found[price, law])
        total = np.zeros(law.size)
        for shape, counts in passes:
            total += linear(counts, cost.times(shape, np.arange(len(counts))), law, price)
        return total


def linear(counts: Floats, prices: Floats, law: NDArray[np.intp], price: NDArray[np.intp]) -> Floats:
    """`DecodingPoints.linear` of pairs of laws and prices.

    With one law or one cost without a threaded library, whose threads would wait longer for each other than they compute.
    """
    unknown = np.isnan(prices)
    if unknown.any():
        known = linear(counts, np.where(unknown, 0.0, prices), law, price)
        occur = linear((counts != 0).astype(float), unknown.astype(float), law, price) > 0
        return np.where(occur, np.nan, known)
    if counts.shape[1] == 1:
        return np.asarray(np.einsum("pk,k->p", prices, counts[:, 0])[price])
    if len(prices) == 1:
        return np.asarray(np.einsum("k,kl->l", prices[0], counts)[law])
    if counts.shape[1] * len(prices) <= _LARGEST_PRODUCT * law.size:
        return np.asarray((prices @ counts)[price, law])
    size = max(_CELLS // len(counts), 1)
    parts = [slice(at, at + size) for at in range(0, law.size, size)]
    return np.concatenate([np.einsum("pk,kp->p", prices[price[part]], counts[:, law[part]]) for part in parts])


def linear_until(
    counts: Floats, prices: Floats, law: NDArray[np.intp], price: NDArray[np.intp], tokens: Integers
) -> Floats:  # fmt: skip
    """`linear` of the events at the first `tokens` positions of each pair.

    Counts have shape (events, positions, laws), prices (costs, events, positions); an event at a position counts for all decodings
    that reach it.

    >>> one = np.zeros(3, dtype=np.intp)
    >>> linear_until(np.ones((1, 4, 1)), np.array([[[1.0, 2.0, 4.0, 8.0]]]), one, one, np.array([0, 1, 3])).tolist()
    [0.0, 1.0, 7.0]
    """
    found, of_laws = np.empty(law.size), np.ascontiguousarray(np.moveaxis(counts, -1, 0))
    for block in pair_blocks(law, price, max(_CELLS // prices[0].size, 1)):
        each = np.einsum("pek,pek->pk", prices[block.price], of_laws[block.law])
        until = np.concatenate([np.zeros((len(each), 1)), np.cumsum(each, axis=1)], axis=1)
        found[block.points] = until[block.pair, tokens[block.points]]
    return found


class PairBlock(NamedTuple):
    """Some distinct pairs of a law and a cost, and the points that have them."""

    law: NDArray[np.intp]
    price: NDArray[np.intp]
    points: NDArray[np.intp]
    """Indices of the points."""
    pair: NDArray[np.intp]
    """Index of each point's pair."""


def pair_blocks(law: NDArray[np.intp], price: NDArray[np.intp], size: int) -> Iterator[PairBlock]:
    """Distinct pairs of the points' laws and costs, at most `size` together.

    >>> blocks = pair_blocks(np.array([0, 1, 0, 1]), np.array([2, 0, 2, 1]), 2)
    >>> [tuple(each.tolist() for each in block) for block in blocks]
    [([0, 1], [2, 0], [0, 2, 1], [0, 0, 1]), ([1], [1], [3], [0])]
    >>> [*pair_blocks(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp), 2)]
    []
    """
    laws, costs, pair = distinct_pairs(law, price)
    if not laws.size:
        return
    if laws.size <= size:
        yield PairBlock(laws, costs, np.arange(pair.size), pair)
        return
    order = np.argsort(pair, kind="stable")
    starts = range(0, laws.size, size)
    ends = np.searchsorted(pair[order], starts[1:])
    for start, points in zip(starts, np.split(order, ends), strict=True):
        yield PairBlock(laws[start : start + size], costs[start : start + size], points, pair[points] - start)


def distinct_pairs(
    one: NDArray[np.intp], other: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:  # fmt: skip
    """Distinct pairs of two indices, in rising order, and the index of each pair among them.

    >>> [each.tolist() for each in distinct_pairs(np.array([1, 0, 1]), np.array([2, 3, 2]))]
    [[0, 1], [3, 2], [1, 0, 1]]
    """
    size = int(other.max(initial=0)) + 1
    pairs, index = np.unique(one * size + other, return_inverse=True)
    return pairs // size, pairs % size, index


_LARGEST_PRODUCT = 4
"""Largest number of pairs of laws and costs that are evaluated for each point that is asked for."""
_CELLS = 200_000
"""Numbers in arrays of prices and of counts: 1.6 MB, which a processor keeps near."""


def predict_by_decoding(
    predict: Callable[[DecodingPoints[Any]], Prediction], points: PredictionPoints[Any], prices: Callable[[Any], int],
    *, together: Literal["never", "uniform", "always"] = "never", last: Callable[[Any], int] = lambda parameters: 0,
    by_position: Callable[[Any, bool], int] | None = None, means_apart: bool = False,
) -> Prediction:  # fmt: skip
    """Predict with a function of all points that share parameters and tokens; costs are joined, in blocks of limited size.

    `prices` gives the prices that the method needs of each cost, and of each position if they depend on it. `together` says where
    the function takes points of several lengths (`DecodingPoints.lengths`): where times do not depend on the position (`uniform`),
    or also where they do; then at the `last` positions of each length there are prices for this length only. `by_position` gives
    the prices of a cost at a position of points of several lengths (True) or of one, if it is not `prices`: 1 if only sums over
    positions are asked of costs, such as `DecodingPoints.time_of`. With `means_apart` points of one length of which only means are
    asked, at costs whose times depend on the position, are given apart from others, and need such sums only.
    """
    number: dict[Any, int] = {}
    seen: dict[Any, int] = {}  # by identity, which is faster than by value
    kinds, costs_of, separable, groups = [], [], [], points.groups()
    for group, begin in zip(groups.groups, groups.starts.tolist(), strict=False):
        one = group.costs.first if isinstance(group.costs, Varied) else group.costs[0]
        of_any = together == "always" or (together == "uniform" and one.uniform)
        apart, which = _lengths_apart(group, together=of_any and group.parameters.predicts_lengths_together)
        several = apart == [0] and not one.uniform and not isinstance(group.tokens, int)
        costs_of.append(begin + (_distinct(group.costs)[1] if several else np.arange(len(group.costs))))
        separable.append(means_apart and not one.uniform and isinstance(group.tokens, int))
        of_lengths = []
        for tokens in apart:
            key = id(group.parameters), tokens, type(one), one.uniform
            if key not in seen:
                seen[key] = number.setdefault((group.parameters, *key[1:]), len(number))
            of_lengths.append(seen[key])
        kinds.append(np.array(of_lengths, dtype=np.intp)[which])
    tokens_of = groups.lengths
    group_of = np.repeat(np.arange(len(groups.groups)), np.diff(groups.starts))
    # Choices of one kind follow each other in `by_kind`, those of several lengths by their costs, and so do the points of each
    # choice in `order`.
    kind, cost_of = np.concatenate(kinds), np.concatenate(costs_of)
    only_means = np.repeat(separable, np.diff(groups.starts))
    only_means[points.choice if points.means is None else points.choice[~points.means]] = False
    kind = 2 * kind + only_means
    by_kind = np.lexsort((cost_of, kind))
    rank = np.empty(len(kind), dtype=np.intp)
    rank[by_kind] = np.arange(len(kind))
    order = np.argsort(rank[points.choice], kind="stable")
    used, price = np.unique(rank[points.choice[order]], return_inverse=True)
    chosen, starts = by_kind[used], np.searchsorted(price, np.arange(used.size + 1))
    found = []
    known: dict[Any, Any] = {}
    for ((parameters, _, _, uniform), index), means_only in itertools.product(number.items(), (False, True)):
        mine = np.flatnonzero(kind[chosen] == 2 * index + means_only)
        if not mine.size:
            continue
        of_each = np.unique(tokens_of[chosen[mine]])
        block = np.cumsum(np.diff(cost_of[chosen[mine]], prepend=-1) != 0) - 1
        each = prices(parameters)
        if not uniform and by_position is not None:
            each = by_position(parameters, of_each.size > 1)
        elif not uniform and means_only:
            each = 1
        room = _CELLS // each
        if not uniform:
            more = last(parameters) if of_each.size > 1 else 0
            room = _costs_in(room, int(of_each[-1]), of_each.size, int(np.bincount(block).max()), more)
        size = max(room, 1)
        for start, stop in _blocks(block // size, int(mine[0])):
            here = order[starts[start] : starts[stop]]
            law = points.law[here]
            laws, law = np.unique(law, return_inverse=True) if (law != law[0]).any() else (law[:1], np.zeros_like(law))
            of = [points.laws[each] for each in laws.tolist()]
            part, lengths = price[starts[start] : starts[stop]] - start, tokens_of[chosen[start:stop]]
            several = bool((lengths != lengths[0]).any())
            cost, which = _joined_costs(groups, chosen[start:stop], group_of[chosen[start:stop]], known, distinct=several)
            own = lengths[part] if several else None
            part = part if which is None else which[part]
            means = None if points.means is None else points.means[here]
            found.append(predict(DecodingPoints(parameters, int(lengths.max()), of, cost, law, part, means, own)))
    return Prediction.joined(found).at(np.argsort(order))


def _costs_in(room: int, positions: int, lengths: int, lengths_of_each: int, last: int) -> int:
    """Number of costs of which `room` times are kept: at these positions, and at the `last` ones of each length.

    A cost is that of at most `lengths_of_each` of the `lengths`, so that few costs have few of them.

    >>> _costs_in(1000, 40, 10, 10, 2), _costs_in(1000, 40, 10, 1, 2), _costs_in(1000, 40, 1, 1, 0)
    (16, 16, 25)
    >>> _costs_in(1000, 40, 100, 100, 2), _costs_in(1000, 40, 100, 1, 2)  # 14 costs have 14 lengths: 14 * (40 + 2 * 14) <= 1000
    (4, 14)
    """
    of_all, more = room // (positions + last * lengths), last * lengths_of_each
    if not more:
        return of_all
    return max(of_all, int((math.sqrt(positions**2 + 4 * more * room) - positions) / (2 * more)))


def _blocks(number: NDArray[np.intp], begin: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of stretches of equal numbers, counted from `begin`."""
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), number.size]
    return ((begin + start, begin + stop) for start, stop in itertools.pairwise(bounds))


def _lengths_apart(group: ChoiceGroup[Any], *, together: bool) -> tuple[list[int], Any]:
    """Lengths that are predicted apart, and the index of each choice's; 0 for all if they are predicted `together`."""
    if together or isinstance(group.tokens, int):
        return [0 if together else int(group.tokens)], np.zeros(len(group.costs), dtype=np.intp)
    lengths, which = np.unique(group.tokens, return_inverse=True)
    return lengths.tolist(), which


def _joined_costs(
    groups: GroupedChoices[Any], choices: NDArray[np.intp], group: NDArray[np.intp], known: dict[Any, Any],
    *, distinct: bool = False,
) -> tuple[StepCosts, NDArray[np.intp] | None]:  # fmt: skip
    """Costs of these choices as one, and the index of each choice's; None if each choice has its own.

    `group` has the group of each choice. `known` has the joined costs of other choices with their parts: parameters that differ may
    have the same costs. Equal costs of a group are one where `distinct`.
    """
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), group.size]
    parts: list[Sequence[StepCosts]] = []
    index, begin = [], 0
    for start, stop in itertools.pairwise(bounds):
        number = int(group[start])
        costs, places = groups.groups[number].costs, choices[start:stop] - groups.starts[number]
        part = _costs_at(costs, places)
        if distinct:
            part, which = _distinct(part)
            index.append(begin + which)
            begin += len(part)
        parts.append(part)
    which_of = np.concatenate(index) if distinct else None
    key = tuple([each for costs in parts for each in ([id(costs)] if isinstance(costs, Varied) else map(id, costs))])
    if key not in known:
        if any(isinstance(costs, Varied) for costs in parts):
            known.clear()  # parts of these may be made anew for each block: the last ones are held only
        known[key] = parts, many_costs.joined_groups(parts)
    return known[key][1], which_of


def _costs_at(costs: Sequence[StepCosts], places: NDArray[np.intp]) -> Sequence[StepCosts]:
    return costs.at(places) if isinstance(costs, Varied) else [costs[place] for place in places.tolist()]


def _distinct(costs: Sequence[StepCosts]) -> tuple[Sequence[StepCosts], NDArray[np.intp]]:
    """Distinct ones of several costs, and the index of each."""
    if isinstance(costs, Varied):
        return costs.unique()
    if costs and all(map(operator.is_, costs, itertools.repeat(costs[0]))):
        return costs[:1], np.zeros(len(costs), dtype=np.intp)
    number: dict[int, int] = {}
    which = np.array([number.setdefault(id(cost), len(number)) for cost in costs], dtype=np.intp)
    first = np.unique(which, return_index=True)[1]
    return [costs[place] for place in first.tolist()], which


@dataclass(frozen=True)
class Prediction:
    """Expectations over the law of outcomes, arrays of the points' shape; nan where the theory has no value.

    Times are in the cost model's unit; `busy` is that time summed over busy compute units.
    """

    latency: Floats
    latency_variance: Floats
    busy: Floats
    units_ratio: Floats
    """E[busy / latency] [-]; not the ratio of the two expectations."""
    units: Floats
    """Reserved compute units."""
    plain_latency: Floats
    """Latency of plain decoding of the same tokens."""
    rounds: Floats | None = None
    """Draft-and-verify rounds; None for methods without them."""
    drafted: Floats | None = None
    """Drafted tokens."""
    operations: Floats | None = None
    """Arithmetic, in units of one token in a pass of the target."""

    def at(self, index: NDArray[np.intp]) -> Prediction:
        """Prediction at a subset of the points, in this order."""
        values: list[Any] = [None if values is None else np.asarray(values)[index] for values in self._values()]
        return Prediction(*values)

    def single(self) -> Prediction:
        """Prediction of the only point, as arrays without an axis."""
        values: list[Any] = [None if values is None else np.asarray(values)[0] for values in self._values()]
        return Prediction(*(None if value is None else np.asarray(value) for value in values))  # type: ignore[arg-type]

    def _values(self) -> list[Floats | None]:
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def joined(parts: Sequence[Prediction]) -> Prediction:
        """Concatenate predictions of several arrays of points; a value that only some of them have is nan for the others."""
        unknown = [np.full(np.shape(part.latency), np.nan) for part in parts]
        values: list[Any] = []
        for each in zip(*(part._values() for part in parts), strict=True):
            known = [none if value is None else value for value, none in zip(each, unknown, strict=True)]
            values.append(None if all(value is None for value in each) else np.concatenate(known))
        return Prediction(*values)

    @staticmethod
    def stacked(predictions: Sequence[Prediction]) -> Prediction:
        """Stack predictions of single points."""
        columns = zip(*(one._values() for one in predictions), strict=True)
        return Prediction(*(_column(values) for values in columns))


def _column(values: Sequence[Floats | None]) -> Any:
    known = [float("nan") if value is None else float(value) for value in values]
    return None if all(value is None for value in values) else np.array(known)


def by_outcome(of: Mapping[str, Any]) -> Any:
    """Argument form of `predict` and `walk`: the only value if there is one kind of outcome, the mapping if there are several."""
    return of if len(of) > 1 else next(iter(of.values()), None)


def predict_separately(predict: Callable[..., Prediction], points: PredictionPoints[Any]) -> Prediction:
    """Predict all points with a function of a single point; equal points are computed once."""
    chosen, laws, index = points.pairs()
    each = []
    for choice, same in itertools.groupby(zip(chosen.tolist(), laws.tolist(), strict=True), key=lambda pair: pair[0]):
        parameters, tokens, cost = points.choices[choice]  # once, since its cost keeps the times of passes
        each += [predict(parameters, tokens, points.laws[law], cost) for _, law in same]
    return Prediction.stacked(each).at(index)
