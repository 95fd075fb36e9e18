"""Columns of the work that a method's theory expects: arithmetic per token, and FLOPs and bytes with the models' shapes.

Work is computed together for all laws, and for all numbers of tokens where a method can, and once for all costs if the passes do
not depend on times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.costs.many_costs import Varied
from model.interpret.account import Work, flops_and_bytes
from model.methods import registry
from model.methods.prediction import by_outcome
from sim.scenarios.cases import Case
from sim.views import metrics
from sim.views.case_facts import busy_counts_operations
from sim.views.point_blocks import PointBlock

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Row = dict[str, Any]

_CELLS = 1_000_000
"""Laws x tokens that are evaluated together: 8 MB for each array of a theory that has a value for every token."""
_LARGEST_PRODUCT = 4
"""Largest number of pairs of laws and lengths that are evaluated for each one that occurs."""


def of_shapes(method: registry.Method, points: PointBlock) -> pl.DataFrame:
    """FLOPs and bytes per token, of the points with shapes for which the theory has the work."""

    def columns(case: Case, work: Work) -> Row:
        return metrics.work_per_token(flops_and_bytes(work, case.shapes), case.outputs, case.full_batch)

    return _of_works(method, points, lambda case: bool(case.shapes), columns)


def of_operations(method: registry.Method, points: PointBlock, compute_per_token: Floats) -> pl.DataFrame:
    """Column of `operations_of`; no column where no point has a value."""
    counted = points.of_decodings(lambda parameters, _: parameters.counts_layers) > 0
    known = points.facts.busy_counts_operations > 0
    column = pl.DataFrame({"operations_per_token": np.broadcast_to(compute_per_token, known.shape)})
    column = column.select(pl.when(pl.Series(known & ~counted)).then(pl.all()))
    if counted.any():
        worked = _of_works(method, points, lambda case: case.parameters.counts_layers, _layers_per_token)
        column = worked.select(pl.all().fill_null(column.to_series())) if worked.width else column
    return pl.DataFrame() if column.to_series().is_null().all() else column


def operations_of(case: Case, compute_per_token: float) -> Row:
    """Operations per token of the simulated decodings of a method that does not draft.

    Equal to the busy time if every pass has one token, since that belongs to the same decodings; otherwise from the theory's count
    of layers.
    """
    known = busy_counts_operations(case)
    if case.parameters.counts_layers and not (known and case.parameters.largest_pass == 1):
        worked = _work(case)
        return {} if worked is None else _layers_per_token(case, worked)
    return {"operations_per_token": compute_per_token} if known else {}


def _layers_per_token(case: Case, work: Work) -> Row:
    """Layers run per token, relative to those of the model, from the work of one decoding or of several."""
    return {"operations_per_token": work.by_model["target"].layer_passes / case.parameters.layers / case.outputs}


def _work(case: Case) -> Work | None:
    laws = by_outcome({name: outcome.law for name, outcome in case.outcomes.items()})
    return registry.method(case.method).expected_work(case.parameters, case.settings.tokens, laws, case.cost)


def _of_works(
    method: registry.Method, points: PointBlock, needed: Callable[[Case], bool], columns: Callable[[Case, Work], Row]
) -> pl.DataFrame:
    """Columns of each point's work; values are null where the work is not needed or not known.

    `columns` makes a row of a work, or arrays if its totals are arrays.
    """
    alike, kind, length = _kinds(method, points)
    lengths, which = np.unique(length, return_inverse=True)
    size = len(points.outcomes)
    keys, index = np.unique((kind * lengths.size + which)[points.choice] * size + points.outcome, return_inverse=True)
    whole: dict[str, Floats] = {}
    has: dict[str, NDArray[np.bool_]] = {}
    for case, kinds, costs in alike:
        if not needed(case):
            continue
        start, stop = np.searchsorted(keys, np.array([kinds.start, kinds.stop]) * lengths.size * size).tolist()
        mine = keys[start:stop]
        if costs is None:
            works = _works(method, case, points, lengths[mine // size % lengths.size], mine % size)
        else:
            works = _works_of_costs(method, case, points, costs, mine // size // lengths.size - kinds.start, mine % size)
        for part, each, work in works:
            for name, values in columns(each, work).items():
                whole.setdefault(name, np.full(keys.size, np.nan))[start + part] = values
                has.setdefault(name, np.zeros(keys.size, dtype=np.bool_))[start + part] = True
    found = {name: pl.select(pl.when(pl.Series(has[name])).then(pl.Series(values))).to_series() for name, values in whole.items()}
    return pl.DataFrame({name: values[index] for name, values in found.items()})


class _Alike(NamedTuple):
    """Choices of points that have their work in common, or that have it at costs of their own."""

    case: Case
    """One of them; others differ from it in their tokens and costs only."""
    kinds: range
    """Numbers of their kinds: one if work does not depend on times, else one for each of the costs."""
    costs: Varied | None
    """Costs of the kinds, if the work is evaluated at several together."""


def _kinds(method: registry.Method, points: PointBlock) -> tuple[list[_Alike], Index, NDArray[np.int64]]:
    """Kinds of choices between which more than tokens and costs differs, and each choice's kind and number of tokens."""
    known: dict[Any, int] = {}
    seen: dict[Any, int] = {}  # by identity, which is faster than by value
    alike: list[_Alike] = []
    count = 0
    kind = np.zeros(len(points.choices), dtype=np.intp)
    length = np.zeros(len(points.choices), dtype=np.int64)
    for group, part, places in points.segments:
        own, first = points.used_choices[0][part], group.first
        length[own] = first.settings.tokens if group.tokens is None else group.tokens[places]
        if method.timed_work is not None and first.parameters.times_change_work:  # each choice has passes of its own
            kinds = range(count, count + own.size)
            kind[own], count = np.array(kinds), kinds.stop
            costs = group.at(places).costs_of("cost")
            if method.timed_work_of_costs is not None and group.tokens is None and isinstance(costs, Varied):
                alike.append(_Alike(first, kinds, costs))
            else:
                alike += [
                    _Alike(group.member(place), range(number, number + 1), None)
                    for number, place in zip(kinds, places.tolist(), strict=True)
                ]
            continue
        key = id(first.parameters), *((role, id(shape)) for role, shape in first.shapes.items())
        if key not in seen:
            seen[key] = known.setdefault((first.parameters, *first.shapes.items()), count)
            if seen[key] == count:
                alike.append(_Alike(first, range(count, count + 1), None))
                count += 1
        kind[own] = seen[key]
    return alike, kind, length


def _works_of_costs(
    method: registry.Method, case: Case, points: PointBlock, costs: Varied, cost: Index, outcomes: Index
) -> Iterator[tuple[Any, Case, Work]]:  # fmt: skip
    """As `_works`, of decodings with these costs and outcomes; `cost` and `outcomes` are their indices, and the former rise."""
    assert method.timed_work_of_costs is not None
    tokens = case.settings.tokens
    size = max(_CELLS // tokens**2, 1)  # tables of starts and positions
    for start in range(0, int(cost.max(initial=-1)) + 1, size):
        part = np.flatnonzero((cost >= start) & (cost < start + size))
        used, law = np.unique(outcomes[part], return_inverse=True)
        own = costs.at(np.arange(start, min(start + size, len(costs))))
        work = method.timed_work_of_costs(case.parameters, tokens, _laws(points, used), own.joined())
        if work is not None:
            yield part, case, work.at((cost[part] - start, law))


def _works(
    method: registry.Method, case: Case, points: PointBlock, lengths: NDArray[np.int64], outcomes: Index
) -> Iterator[tuple[Any, Case, Work]]:
    """Works of decodings with these tokens and outcomes: their indices, their case, and one work or arrays; those that are known.

    `lengths` rise, and so do the outcomes of each.
    """
    distinct, which = np.unique(lengths, return_inverse=True)
    used, law = np.unique(outcomes, return_inverse=True)
    several = distinct.size > 1 and case.parameters.predicts_lengths_together
    if method.work_of_lengths is not None and several and used.size * distinct.size <= _LARGEST_PRODUCT * lengths.size:
        together = [*_of_lengths(method, case, points, (distinct, which), (used, law))]
        if all(work is not None for _, work in together):
            yield from ((part, case.with_tokens(lengths[part]), work) for part, work in together if work is not None)
            return
    bounds = np.searchsorted(which, np.arange(distinct.size + 1)).tolist()
    for tokens, start, stop in zip(distinct.tolist(), bounds[:-1], bounds[1:], strict=True):
        one = case if tokens == case.settings.tokens else case.with_tokens(tokens)
        size = max(_CELLS // tokens, 1)
        for begin in range(start, stop, size):
            part = np.arange(begin, min(begin + size, stop))
            work = method.work_of_all(case.parameters, tokens, _laws(points, outcomes[part]), case.cost)
            if work is not None:
                yield part, one, work
                continue
            for place in part.tolist():
                alone = _work(one.with_outcomes(points.outcomes[int(outcomes[place])]))
                if alone is not None:
                    yield place, one, alone


def _of_lengths(
    method: registry.Method, case: Case, points: PointBlock, lengths: tuple[NDArray[np.int64], Index], laws: tuple[Index, Index]
) -> Iterator[tuple[Index, Work | None]]:
    """Works of several lengths, in blocks of laws; lengths and laws are distinct ones, and the index of each decoding's."""
    assert method.work_of_lengths is not None
    (distinct, which), (used, law) = lengths, laws
    size = max(_CELLS // int(distinct[-1]), 1)
    for start in range(0, used.size, size):
        part = np.flatnonzero((law >= start) & (law < start + size))
        found = method.work_of_lengths(case.parameters, distinct, _laws(points, used[start : start + size]))
        yield part, None if found is None else found.at((law[part] - start, which[part]))


def _laws(points: PointBlock, outcomes: Index) -> list[Any]:
    """Laws of rising indices of outcomes."""
    return [law for group, _, places in points.outcomes.segments(outcomes) for law in group.at(places).laws("law")]
