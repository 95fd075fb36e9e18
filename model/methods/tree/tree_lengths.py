"""Tree drafts in decodings of several lengths, whose sums over rounds are made together.

Where rounds with whole trees start does not depend on the length. So sums over such rounds are made once, to the longest decoding.
The last rounds of a decoding draft smaller trees, unless its batch is kept full: as many levels as tokens remain after their first.
These rounds are followed apart, for all decodings at once, by what they add to the starts of rounds with whole trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.prediction import DecodingPoints, distinct_pairs, pair_blocks
from model.methods.rounds.round_moments import Moments
from model.methods.tree import tree_rounds
from model.methods.tree.algorithm import Parameters
from model.methods.tree.tree_rounds import RoundTimes, TreePrices
from model.outcomes.rank_laws import RankRates
from model.outcomes.round_counts import RoundEnds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class TreeDecodings(NamedTuple):
    """Decodings of several lengths under laws with as many classes each.

    The last rounds are in the order of their levels, from the most on that a cut tree has. Arrays by unread tokens have an axis of
    size 1 + most unread.
    """

    levels: tuple[int, ...]
    """Levels of rounds, rising: those of whole trees are last, and without cut trees alone."""
    ends: tuple[tuple[RoundEnds, Integers], ...]
    """Endings of rounds by their levels, and the tokens that the draft has not read there."""
    mass: Floats
    """Probability that a round with a whole tree starts at each position; shape (positions, unread, laws)."""
    lengths: Integers
    """Tokens of each decoding; shape (decodings,)."""
    law: NDArray[np.intp]
    """Index of the law of each decoding."""
    last: Floats
    """Probability that one of the last rounds starts; shape (rounds, unread, decodings)."""

    @staticmethod
    def of(
        parameters: Parameters, lengths: Integers, laws: Sequence[RankRates], law: NDArray[np.intp], weights: Floats | None = None
    ) -> TreeDecodings:
        """Decodings under the laws with an index of `law`; `weights` as of `tree_rounds.ends_of_levels`."""
        levels = _levels_of(parameters)
        ends = tuple(tree_rounds.ends_of_levels(parameters, laws, levels, weights).values())
        longest = int(lengths.max())
        if (lengths == longest).all():  # its last rounds are known
            mass = tree_rounds.starts_of_laws(parameters, longest, laws, weights)
            at = longest - 1 - np.arange(len(levels) - 2, -1, -1)
            last = np.where(at[:, None, None] >= 0, mass[np.maximum(at, 0)], 0.0)
            return TreeDecodings(levels, ends, mass, lengths, law, last[..., law])
        mass = tree_rounds.starts_of_laws(parameters, longest + parameters.levels, laws, weights)[:longest]
        found = TreeDecodings(levels, ends, mass, lengths, law, np.zeros(0))
        return found._replace(last=found.carried(mass, mass.sum(axis=1), law))

    def at(self, index: NDArray[np.intp]) -> TreeDecodings:
        """A subset of the decodings, in this order."""
        return self._replace(lengths=self.lengths[index], law=self.law[index], last=self.last[..., index])

    @property
    def cut(self) -> range:
        """Levels of the last rounds, in their order."""
        return range(len(self.levels) - 2, -1, -1)

    def carried(self, whole: Floats, passed: Floats, which: NDArray[np.intp], added: Floats | None = None) -> Floats:
        """Values that rounds take over from those before, at the starts of the last rounds; shape (rounds, unread, decodings).

        Parameters
        ----------
        whole
            The values at each position where all trees are whole; shape (positions, unread, values).
        passed
            What a round with a whole tree passes on from each position; shape (positions, values).
        which
            Index of each decoding's values.
        added
            What each of the last rounds adds to its value before it passes it on; shape (rounds, decodings).
        """
        longest = len(self.ends) - 1
        more = np.zeros((2 * longest + 1, whole.shape[1], which.size))  # than if all trees were whole
        found = np.empty((longest, *more.shape[1:]))
        for place, levels in enumerate(self.cut):
            at, known = np.maximum(self.lengths - 1 - levels, 0), self.lengths > levels
            found[place] = np.where(known, whole[at, :, which].T, 0.0) + more[place]
            own = found[place].sum(axis=0) + (0.0 if added is None else added[place])
            for (ends, unread), value in ((self.ends[levels], own), (self.ends[-1], -np.where(known, passed[at, which], 0.0))):
                more[place + 1 + ends.accepted, unread] += ends.chance.take(self.law, axis=1) * value
        return found

    def rounds(self) -> Floats:
        """Mean number of rounds by levels; shape (levels, decodings), without cut trees of whole ones only."""
        return np.concatenate([self.last.sum(axis=1)[::-1], self._until_last(self.mass.sum(axis=1), self.law)[None]])

    def mean(self, whole: Floats, last: Floats, price: NDArray[np.intp]) -> Floats:
        """Mean sum of values of rounds in each decoding.

        `whole` are those of whole trees, of shape (prices, positions, 1 or unread), and `price` their index for each decoding;
        `last` those of the last rounds, which broadcast to (rounds, unread, decodings).
        """
        laws, prices, which = distinct_pairs(self.law, price)
        each = np.einsum("sul,lsu->sl", self.mass[..., laws], np.broadcast_to(whole[prices], (laws.size, *self.mass.shape[:2])))
        return np.asarray(self._until_last(each, which) + (self.last * last).sum(axis=(0, 1)))

    def means(self, whole: Floats, last: Floats) -> Floats:
        """`mean` of several values that are the same for all laws, of which each has the same lengths, the first law's first.

        `whole` has shape (values, unread, positions), `last` (values, rounds, unread, lengths); the means (values, laws, lengths).
        """
        laws, lengths = self.mass.shape[2], last.shape[-1]
        sums: Any = sum(whole[:, unread, :, None] * self.mass[:, unread] for unread in range(whole.shape[1]))
        each = self._until_last(sums, self.law).reshape(len(whole), laws, lengths)
        return np.asarray(each + np.einsum("ruln,vrun->vln", self.last.reshape(*self.last.shape[:2], laws, lengths), last))

    def square(self, whole: Floats, last: Floats, price: NDArray[np.intp]) -> Floats:
        """Mean square of the time, with times of rounds as the values of `mean`.

        With the tokens that a round accepts, its time is added to the time until the position that follows.
        """
        laws, prices, which = distinct_pairs(self.law, price)
        time, (ends, unread) = np.moveaxis(whole[prices], 0, -1), self.ends[-1]
        chance, spent = ends.chance[:, laws], self.mass[..., laws] * time
        passed = _followed(spent.sum(axis=1), ends.accepted, chance)
        until = np.zeros_like(spent)
        for accepted, left, likely in zip(ends.accepted.tolist(), unread.tolist(), chance, strict=True):
            until[accepted + 1 :, left] += likely * passed[: max(len(passed) - accepted - 1, 0)]
        until_last = self.carried(until, passed, which, (self.last * last).sum(axis=1))
        found = self._until_last((time * (2 * until + spent)).sum(axis=1), which)
        return np.asarray(found + (last * (2 * until_last + self.last * last)).sum(axis=(0, 1)))

    def _until_last(self, values: Floats, which: NDArray[np.intp]) -> Floats:
        """Sums of values by position, shape (..., positions, values), over those before the last rounds of each decoding."""
        count = np.maximum(self.lengths - len(self.cut), 0)
        return np.asarray(np.where(count > 0, np.cumsum(values, axis=-2)[..., np.maximum(count - 1, 0), which], 0.0))


def _levels_of(parameters: Parameters) -> tuple[int, ...]:
    """Levels of rounds, rising."""
    return tuple(range(0 if parameters.cut else parameters.levels, parameters.levels + 1))


def _followed(values: Floats, accepted: Integers, chance: Floats) -> Floats:
    """Values of rounds by their start, with those of the rounds before that lead there; arrays of shapes (..., columns).

    See `model.outcomes.round_counts.followed`, which has one law for all columns.

    >>> _followed(np.array([[1.0], [0.0], [0.0]]), np.array([0, 1]), np.array([[0.5], [0.25]])).tolist()
    [[1.0], [0.5], [0.5]]
    """
    most = int(accepted.max())
    backwards = np.zeros((most + 1, chance.shape[1]))
    np.add.at(backwards, most - accepted, chance)
    found = np.concatenate([np.zeros((most + 1, chance.shape[1])), values])
    for start in range(len(values)):
        found[start + most + 1] += np.einsum("ap,ap->p", backwards, found[start : start + most + 1])
    return found[most + 1 :]


def moments(points: DecodingPoints[Parameters], price: TreePrices) -> Moments:
    """Moments of `tree_rounds.walk` at points whose lengths differ, under laws with as many classes each.

    `price` has the prices of the longest decoding, of which those of whole trees matter.
    """
    parameters, found = points.parameters, np.empty((len(Moments._fields), points.law.size))
    distinct, length = points.of_lengths()
    rounds, levels = RoundTimes(parameters, points.cost), _levels_of(parameters)
    drafted = np.array([tree_rounds.passes_of(parameters, each).drafted for each in levels])
    read = np.array([tree_rounds.read_of(parameters, each) for each in levels])
    last = np.empty((len(levels) - 1, 2, price.time.shape[-1], len(price.time), distinct.size))
    for each, (time, busy) in zip(levels[-2::-1], last, strict=True):
        rounds.put(np.full(distinct.size, each), np.maximum(distinct - 1 - each, 0), time, time if rounds.alike else busy)
    whole = [tree_rounds.by_position(each, price.row) for each in (price.time, price.busy)]
    means = np.zeros(length.size, dtype=np.bool_) if points.means is None else points.means
    ratio = points.operations("draft")
    size = max(min(_CELLS // (whole[0].shape[-1] * points.tokens), _DECODINGS // distinct.size), 1)
    for part in (block.points for block in pair_blocks(points.law, points.price, size)):
        law, cost = points.law[part], points.price[part]
        decodings = TreeDecodings.of(parameters, distinct[length[part]], points.laws, law)
        counts, of_last = decodings.rounds(), last[..., cost, length[part]].swapaxes(0, 1)
        if rounds.alike:
            of_last[1] = of_last[0]
        own = [each[:, : len(decodings.mass)] for each in whole]
        mean, busy = (decodings.mean(*each, cost) for each in zip(own, of_last, strict=True))
        variance, asked = np.full(part.size, np.nan), np.flatnonzero(~means[part])
        if asked.size:
            square = decodings.at(asked).square(own[0], of_last[0][..., asked], cost[asked])
            variance[asked] = np.maximum(square - mean[asked] ** 2, 0.0)
        reads = read @ counts
        worked = counts.sum(axis=0) + drafted @ counts + np.where(reads > 0, reads * ratio[part], 0.0)
        found[:, part] = mean, variance, busy, worked, counts.sum(axis=0), drafted @ counts
    return Moments(*found)


_CELLS = 500_000
"""Numbers in arrays by position, unread tokens and pair: a few MB."""
_DECODINGS = 10_000
"""Decodings whose last rounds are followed together."""
