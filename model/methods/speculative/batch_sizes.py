"""Static batches that differ in their number of sequences only: what they have in common is computed once.

The price of a round depends on the sequences that are left, not on those that the batch began with. The number that is left is
binomial, and the powers that give its distribution are those of a batch of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.batching import MOST_ALIKE
from model.methods.prediction import ChoiceGroup, PredictionPoints
from model.methods.rounds.prices_of_rounds import sums_before
from model.methods.rounds.rounds_of_batches import ExpectedRounds, by_place_of_sizes, cells_of, laws_in_blocks
from model.methods.rounds.rounds_of_lengths import PricesByLength, totals_of_lengths
from model.methods.rounds.starts_by_round import RoundsLaw
from model.methods.speculative.algorithm import Parameters

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_TOGETHER = 3_000_000
"""Numbers in an array of rounds of all sizes: 24 MB."""
_MOST_KEPT = 8_000_000
"""Numbers in the rounds, and in the prices, that are kept: 64 MB."""
_PRICES_OF_A_SIZE = 8
"""Prices and lengths for each size up to which all sizes together take less than each alone."""
_PRICED = 4_000_000
"""Numbers in the prices of costs that are predicted together: those of one block are kept until all sizes have used them."""


class CellPrices:
    """Prices of the rounds of batches whose times depend on the position, at some cells: positions and drafted tokens.

    Parameters
    ----------
    cost
        Several costs as one (`model.costs.many_costs`).
    longest
        Largest number of drafted tokens.
    cells
        Positions and drafted tokens, shape (2, cells), as of `model.methods.rounds.rounds_of_batches.cells_of`.
    separate
        Whether the draft has a unit of its own.
    most
        Largest number of sequences.
    """

    def __init__(self, cost: StepCosts, longest: int, cells: Integers, *, separate: bool, most: int) -> None:
        self._cost, self._longest, self._separate, self._priced = cost, longest, separate, 0
        (self._position, self._drafted), self._start = cells, np.arange(int(cells[0].max()) + 1)
        self._by_drafted = {count: np.flatnonzero(self._drafted == count) for count in np.unique(self._drafted).tolist()}
        self._time = np.zeros((np.size(cost.link), 2, most + 1, self._position.size))
        self._share = np.asarray(cost.draft_devices)[:, None, None]
        self._busy = np.zeros_like(self._time) if separate or (self._share != 1).any() else self._time

    @property
    def size(self) -> int:
        """Numbers that are kept."""
        return self._time.size * (1 if self._busy is self._time else 2)

    def up_to(self, sequences: int) -> tuple[Floats, Floats]:
        """Time and unit-time of rounds with 0 to this number of sequences left; shape (costs, 2, sequences + 1, cells).

        Index 1 of the second axis is for rounds in which the first draft pass reads two tokens of each sequence. Both are one array
        if unit-time equals time.
        """
        while self._priced < sequences:
            self._priced += 1
            self._price(self._priced)
        time = self._time[:, :, : sequences + 1]
        return time, time if self._busy is self._time else self._busy[:, :, : sequences + 1]

    def _price(self, left: int) -> None:
        """Price rounds with this number of sequences left."""
        cost, position, drafted, start, time = self._cost, self._position, self._drafted, self._start, self._time
        verify = time[:, 0, left]
        for count, own in self._by_drafted.items():
            verify[:, own] = cost.verify_times(count + 1, position[own], left)
        single = cost.draft_times(np.arange(start.size + self._longest), sequences=left)
        wide = cost.draft_times(np.maximum(start - 1, 0), width=2, sequences=left)
        until = sums_before(single)
        usual = until.take(position + drafted, axis=-1) - until.take(position, axis=-1)
        more = (wide - single[:, : start.size]).take(position, axis=-1) * (drafted > 0)
        drafts = np.stack([usual, usual + more], axis=1)
        if self._busy is not time:
            self._busy[:, :, left] = drafts * self._share + verify[:, None]
        time[:, 1, left] = verify
        time[:, :, left] += drafts
        if self._separate:
            time[:, :, left] += (2 * np.asarray(cost.link)[:, None] * (drafted > 0))[:, None]


class BatchFamily:
    """Batches of equal sequences that differ in their number only, with what is computed for several of these sizes.

    All have the same drafts, and the same placement of the draft.

    Parameters
    ----------
    sizes
        Numbers of sequences, which rise; none if batches have nothing in common.
    same_lengths
        Whether there are batches of each size with each number of tokens.
    """

    def __init__(self, sizes: tuple[int, ...] = (), *, same_lengths: bool = False) -> None:
        self._sizes, self._kept, self._same_lengths = sizes, 0, same_lengths
        self._totals: dict[tuple[tuple[RoundsLaw, ...], bytes, Hashable], Floats] = {}
        self._rounds: dict[tuple[tuple[RoundsLaw, ...], int], dict[int, ExpectedRounds]] = {}
        self._prices: dict[tuple[Hashable, bytes], CellPrices] = {}

    def prices_of_each(self, parameters: Parameters, lengths: bool) -> int:
        """Prices of a cost at a position, which limit how many costs are predicted together.

        The same for all sizes, so that their costs come in the same blocks. With one number of tokens these are the blocks of
        `families`, which are not split further; `lengths` is True for several numbers of tokens.
        """
        if not self._sizes:
            return 3 * (parameters.concurrent_sequences + 1)
        return self._sizes[-1] + 1 if lengths else 1

    def prices(self, cost: StepCosts, longest: int, sequences: int, cells: Integers, *, separate: bool) -> tuple[Floats, Floats]:
        """Time and unit-time of rounds of batches of this size: see `CellPrices`."""
        if not self._sizes:
            return CellPrices(cost, longest, cells, separate=separate, most=sequences).up_to(sequences)
        key = cost.content(), cells.tobytes()
        if key not in self._prices:
            found = CellPrices(cost, longest, cells, separate=separate, most=self._sizes[-1])
            while self._prices and sum(each.size for each in self._prices.values()) + found.size > _MOST_KEPT:
                del self._prices[next(iter(self._prices))]
            self._prices[key] = found
        return self._prices[key].up_to(sequences)

    def rounds(
        self, laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]
    ) -> Iterator[tuple[slice, ExpectedRounds]]:  # fmt: skip
        """`model.methods.rounds.rounds_of_batches.by_place` of a few laws after another, with their places among all laws."""
        sizes, size = self._sizes, len(lengths)
        if not sizes:
            yield from laws_in_blocks(laws, draft_length, lengths, placed=True)
            return
        cells = 2 * cells_of(draft_length, lengths[:1]).shape[1]
        step = max(_TOGETHER // (cells * (sizes[-1] + 1) * len(sizes)), 1)
        for at in range(0, len(laws), step):
            some = tuple(laws[at : at + step])
            key = some, lengths[0]
            if key not in self._rounds:
                more = len(some) * cells * sum(each + 1 for each in sizes)
                if self._kept + more > _MOST_KEPT:
                    for part, rounds in laws_in_blocks(some, draft_length, lengths, placed=True):
                        yield slice(at + part.start, at + min(part.stop, len(some))), rounds
                    continue
                self._kept += more
                self._rounds[key] = dict(zip(sizes, by_place_of_sizes(some, draft_length, sizes, lengths[0]), strict=True))
            yield slice(at, at + len(some)), self._rounds[key][size]


    def has_totals(self, lengths: Integers, prices: int) -> bool:
        """True if `totals` takes less than the rounds of each size apart, with this number of prices of a round."""
        return self._same_lengths and lengths.size * prices <= _PRICES_OF_A_SIZE * len(self._sizes)

    def totals(
        self, laws: Sequence[RoundsLaw], draft_length: int, lengths: Integers, sequences: int, cost: StepCosts,
        prices: Callable[[int], PricesByLength],
    ) -> Floats:  # fmt: skip
        """`model.methods.rounds.rounds_of_lengths.totals_of_lengths` of this size; shape (laws, lengths, prices).

        `prices` gives those of rounds in which at most a number of sequences is left, at these costs.
        """
        key = tuple(laws), lengths.tobytes(), cost.content()
        if key not in self._totals:
            found = totals_of_lengths(laws, draft_length, self._sizes, lengths, prices(self._sizes[-1]))
            while self._totals and sum(each.size for each in self._totals.values()) + found.size > _MOST_KEPT:
                del self._totals[next(iter(self._totals))]
            self._totals[key] = found
        return np.asarray(self._totals[key][self._sizes.index(sequences)])


def families(points: PredictionPoints[Parameters]) -> Iterator[tuple[NDArray[np.intp], BatchFamily]]:
    """Points of static batches by family: their indices, and the family; those that are in none have one without sizes.

    A family with many costs comes in blocks of some costs of each of its batches.
    """
    groups, number, sizes = points.groups(), dict[Parameters | None, int](), list[dict[int, set[int]]]()
    of_group = np.empty(len(groups.groups), dtype=np.intp)
    for index, group in enumerate(groups.groups):
        own, alike = group.parameters, group.parameters.lengths is None and group.parameters.sequences <= MOST_ALIKE
        of_group[index] = number.setdefault(replace(own, sequences=2) if alike else None, len(number))
        if of_group[index] == len(sizes):
            sizes.append({})
        if alike:
            sizes[of_group[index]].setdefault(own.sequences, set()).update(np.unique(group.tokens).tolist())
    several = np.array([len(each) > 1 for each in sizes])
    group_of = np.searchsorted(groups.starts, points.choice, side="right") - 1
    family = np.where(several[of_group], of_group, -1)[group_of]
    for each in np.unique(family).tolist():
        mine = np.flatnonzero(family == each)
        if each < 0:
            yield mine, BatchFamily()
            continue
        lengths = [*sizes[each].values()]
        found = BatchFamily(tuple(sorted(sizes[each])), same_lengths=all(own == lengths[0] for own in lengths))
        costs = _costs_together([groups.groups[index] for index in np.flatnonzero(of_group == each).tolist()], sizes[each])
        block = (points.choice[mine] - groups.starts[group_of[mine]]) // costs
        for part in np.unique(block).tolist():
            yield mine[block == part], found


def _costs_together(groups: Sequence[ChoiceGroup[Parameters]], sizes: Collection[int]) -> int:
    """Costs of each group that are predicted together, of which the prices are kept."""
    rooms, positions = groups[0].parameters.draft_length + 1, max(int(np.max(group.tokens)) for group in groups)
    return max(_PRICED * len(sizes) // (4 * (max(sizes) + 1) * (positions + rooms**2) * len(groups)), 1)
