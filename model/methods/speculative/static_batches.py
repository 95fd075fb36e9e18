"""Speculative decoding of static batches: distribution of the sequences left in each round, and the prices of rounds.

Sequences have independent random outcomes, so the number of sequences of equal length that have an r-th round is binomial. The time
of a round depends on the number of sequences and on the longest of their drafts; the next batch begins when all sequences have
ended. Successive rounds are dependent, so the variance of the time is not computed (nan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs import many_costs
from model.costs.step_costs import StepCosts
from model.interpret.account import Work, of_passes
from model.methods.prediction import DecodingPoints, Prediction, linear
from model.methods.rounds.prices_of_rounds import prices_by_start, sums_from
from model.methods.rounds.round_laws import AcceptanceLaw, Rounds
from model.methods.rounds.round_moments import Moments, moments_of_pairs, prediction_of, units_alike
from model.methods.rounds.round_walks import Tally
from model.methods.rounds.rounds_of_batches import cells_of, laws_in_blocks, work_of
from model.methods.rounds.rounds_of_lengths import PricesByLength, RoundsByLength, rounds_of_lengths
from model.methods.speculative.algorithm import Parameters
from model.methods.speculative.batch_sizes import BatchFamily
from model.methods.speculative.drafter_prices import prices_of
from model.outcomes.outcome_laws import Chain, Outcomes

Floats = NDArray[np.float64]


class BatchPrices(NamedTuple):
    """Price of a round, by the number of sequences left and the tokens drafted per sequence.

    Shapes (sequences + 1, longest + 1). If times depend on the position, `time` and `busy` have shape (2, sequences + 1, positions,
    longest + 1): index 1 of the first axis is for a round after one in which any sequence accepted its whole draft, so that the
    first draft pass reads two tokens of each sequence; the third axis is the position of the longest sequence, to which the others
    are padded.
    """

    time: Floats
    busy: Floats
    operations: Floats

    def of_rounds(
        self, reread: NDArray[np.bool_], count: NDArray[Any], longest: NDArray[Any], drafted: NDArray[Any]
    ) -> tuple[Floats, Floats, Floats]:
        """Time, unit-time and arithmetic of rounds."""
        where: Any = (count, drafted) if self.time.ndim == 2 else (reread.astype(np.intp), count, longest, drafted)
        return self.time[where], self.busy[where], self.operations[count, drafted]


def _prices(cost: StepCosts, longest: int, sequences: int, *, tokens: int = 1, separate: bool = False) -> BatchPrices:
    """`model.methods.rounds.prices_of_rounds.round_prices` for each number of sequences; 0 without sequences.

    Of several costs (`model.costs.many_costs`) the arrays have a leading axis of costs.

    >>> from model.costs.layer_times import UnitCost
    >>> found = prices(UnitCost(40, cost_ratio=0.1, verify_cost=((1, 1.0), (4, 2.5))), 1, 2)
    >>> found.time.tolist()  # two sequences: 1.5 for a token of each, 2.5 for two; 1.5 for the draft
    [[0.0, 0.0], [40.0, 64.0], [60.0, 106.0]]
    """
    counts, drafted = np.arange(1, sequences + 1)[:, None], np.arange(longest + 1.0)
    axes = (..., *(None,) * (2 if cost.uniform else 4))  # of one number for each of several costs
    link = np.where(drafted > 0, 2 * np.asarray(cost.link)[axes] * separate, 0.0)
    widths = np.arange(1, longest + 2)
    if cost.uniform:
        drafts, verify = drafted * cost.draft_times(sequences=counts), cost.verify_times(widths, sequences=counts)
    else:
        start = np.arange(tokens)
        verify = cost.verify_times(widths, start[:, None], counts[:, None])[..., None, :, :, :]
        each = cost.draft_times(np.arange(tokens + longest), sequences=counts)
        usual = sums_from(each, longest, tokens)
        wide = cost.draft_times(np.maximum(start - 1, 0), width=2, sequences=counts)
        drafts = np.stack([usual, usual + np.where(drafted > 0, (wide - each[..., :tokens])[..., None], 0.0)], axis=-4)
    time, busy = drafts + verify + link, drafts * np.asarray(cost.draft_devices)[axes] + verify
    place = -2 if cost.uniform else -3
    return BatchPrices(_and_none(time, place), _and_none(busy, place), _operations(cost, longest, sequences))


def _operations(cost: StepCosts, longest: int, sequences: int) -> Floats:
    """Arithmetic of rounds by the sequences left and the drafted tokens."""
    counts, drafted, ratio = np.arange(sequences + 1)[:, None], np.arange(longest + 1.0), np.asarray(cost.operations("draft"))
    return np.asarray(counts * (1.0 + drafted + np.where(drafted > 0, drafted * ratio[..., None, None], 0.0)))


def _and_none(values: Floats, axis: int) -> Floats:
    """Insert a 0 at the beginning of an axis, for no sequences."""
    return np.pad(values, [(int(number == values.ndim + axis), 0) for number in range(values.ndim)])


prices = lru_cache(maxsize=8)(_prices)
"""The same for all laws."""


def _prices_of_cells(
    cost: StepCosts, longest: int, sequences: int, at: NDArray[np.int64], family: BatchFamily, *, separate: bool
) -> BatchPrices:
    """Prices of the rounds of a batch whose times depend on the position, at some cells only: see `CellPrices`."""
    time, busy = family.prices(cost, longest, sequences, at, separate=separate)
    return BatchPrices(time, busy, _operations(cost, longest, sequences))


def expected_of_points(points: DecodingPoints[Parameters], family: BatchFamily) -> tuple[Moments, NDArray[np.bool_]]:
    """Moments of the total over all batches of several sequences; the variance is nan. Arrays of shape (points,).

    Also whether unit-time equals time, by cost.
    """
    for law in points.laws:
        if not isinstance(law, Chain | Rounds):
            raise checks.ParameterError(
                "this law of outcomes has no closed form for static batches; ask for views = ['paths'], or for batching ="
                " 'continuous'"
            )
    if points.lengths is not None:
        return _expected_of_lengths(points, family)
    parameters, tokens, longest, uniform = points.parameters, points.tokens, points.parameters.draft_length, points.cost.uniform
    cost, separate = parameters.draft_costs(points.cost), parameters.placement == "separate"
    found, price = np.zeros((len(Moments._fields), points.law.size)), None
    for lengths, batches in Counter(tuple(sorted(batch.values())) for batch in parameters.batches(tokens)).items():
        if uniform:
            price = _prices(cost, longest, len(lengths), separate=separate)
        else:
            price = _prices_of_cells(cost, longest, len(lengths), cells_of(longest, lengths), family, separate=separate)
        time, busy, operations = (each.reshape(len(each), -1) for each in price)
        if uniform:
            parts = laws_in_blocks(points.laws, longest, lengths, placed=False)
        else:
            parts = family.rounds(points.laws, longest, lengths)
        for part, rounds in parts:
            index = np.flatnonzero((points.law >= part.start) & (points.law < part.stop))
            law, mine, size = points.law[index] - part.start, points.price[index], len(rounds.sequences)
            of_room = rounds.counts if uniform else _by_drafted(rounds.counts, longest, lengths)
            counts = rounds.counts.reshape(size, -1).T
            mean = linear(counts, time, law, mine)
            found[0, index] += batches * mean
            found[2, index] += batches * (mean if price.busy is price.time else linear(counts, busy, law, mine))
            found[3, index] += batches * linear(of_room.reshape(size, -1).T, operations, law, mine)
            found[4, index] += batches * rounds.sequences[law]
            found[5, index] += batches * rounds.drafted[law]
    found[1] = np.nan
    assert price is not None
    return Moments(*found), units_alike(price)  # the same for all batches, whose prices include those of whole drafts


def _expected_of_lengths(points: DecodingPoints[Parameters], family: BatchFamily) -> tuple[Moments, NDArray[np.bool_]]:
    """`expected_of_points` of batches of equal sequences of several numbers of tokens."""
    parameters, (lengths, length) = points.parameters, points.of_lengths()
    longest, sequences, uniform = parameters.draft_length, parameters.concurrent_sequences, points.cost.uniform
    cost, separate = parameters.draft_costs(points.cost), parameters.placement == "separate"
    of_lengths = _PricesOfLengths(cost, longest, lengths, family, separate=separate)
    price = of_lengths.up_to(sequences)
    same, totals = price.busy is price.time, None
    if not uniform and family.has_totals(lengths, len(price.time) * (1 if same else 2)):
        totals = family.totals(points.laws, longest, lengths, sequences, cost, of_lengths.by_length)
    times = of_lengths.times(price)
    found, drafting = np.zeros((len(Moments._fields), points.law.size)), np.zeros(points.law.size)
    left, drafted = np.arange(sequences + 1.0), np.arange(longest + 1.0)
    for part in rounds_of_lengths(points.laws, longest, sequences, lengths, placed=not uniform and totals is None):
        index = np.flatnonzero(_inside(points.law, part.laws) & _inside(length, part.lengths))
        law, mine = points.law[index] - part.laws.start, length[index] - part.lengths.start
        decoding, own_price = law * part.sequences.shape[1] + mine, points.price[index]
        if totals is not None:
            found[0, index] = totals[points.law[index], length[index], own_price]
            found[2, index] = found[0, index] if same else totals[points.law[index], length[index], len(price.time) + own_price]
        else:
            of_each = [_time_of(part, each, of_lengths.places[part.lengths], decoding, mine, own_price) for each in times]
            found[0, index], found[2, index] = of_each[0], of_each[-1]
        by_room = part.by_room.reshape(-1, left.size, drafted.size)
        drafting[index] = np.einsum("dnk,n,k->d", by_room, left, drafted)[decoding]
        found[3, index] = (by_room.sum(axis=2) @ left)[decoding] + drafting[index]
        found[4, index], found[5, index] = part.sequences[law, mine], part.drafted[law, mine]
    ratio = replace(points, cost=cost).operations("draft")
    found[3] += np.where(drafting > 0, drafting * ratio, 0.0)  # the ratio may be unknown where none is drafted
    found[1] = np.nan
    return Moments(*found), units_alike(price)


def _inside(places: NDArray[np.intp], part: slice) -> NDArray[np.bool_]:
    return np.asarray((part.start <= places) & (places < part.stop))


class _TimesOfRounds(NamedTuple):
    """Times, or unit-times, of rounds by cost.

    Parameters
    ----------
    whole
        Of whole drafts by position, shape (costs, 2, sequences + 1, positions); None where times do not depend on the position.
    any_length
        Of drafts of each length at some positions, shape (costs, 2, sequences + 1, places, draft_length + 1), or (costs, sequences
        + 1, draft_length + 1).
    """

    whole: Floats | None
    any_length: Floats


class _PricesOfLengths:
    """Prices of rounds of batches of several numbers of tokens, at several costs.

    Where times depend on the position, they are those of whole drafts at all positions, and of drafts of any length at the last
    positions of each length.
    """

    def __init__(
        self, cost: StepCosts, longest: int, lengths: NDArray[np.int64], family: BatchFamily, *, separate: bool
    ) -> None:  # fmt: skip
        self._cost, self._longest, self._family, self._separate = cost, longest, family, separate
        positions, rooms = np.arange(int(lengths[-1])), np.arange(longest + 1)
        last, self.places = np.unique(np.maximum(lengths[:, None] - 1 - longest + rooms, 0), return_inverse=True)
        """Index of each length's last positions among those of all."""
        self._shape = last.size, rooms.size
        drafts = np.append(np.full(positions.size, longest), np.tile(rooms, last.size))
        self._cells = np.stack([np.append(positions, np.repeat(last, rooms.size)), drafts])

    def up_to(self, sequences: int) -> BatchPrices:
        """Prices with at most this number of sequences left."""
        if self._cost.uniform:
            return _prices(self._cost, self._longest, sequences, separate=self._separate)
        return _prices_of_cells(self._cost, self._longest, sequences, self._cells, self._family, separate=self._separate)

    def times(self, price: BatchPrices) -> list[_TimesOfRounds]:
        """Times and unit-times, or only one if they are the same."""
        each = [price.time] if price.busy is price.time else [price.time, price.busy]
        if self._cost.uniform:
            return [_TimesOfRounds(None, one) for one in each]
        whole = self._cells.shape[1] - self._shape[0] * self._shape[1]
        parts = (np.split(one, [whole], axis=-1) for one in each)
        return [_TimesOfRounds(early, late.reshape(*late.shape[:-1], *self._shape)) for early, late in parts]

    def by_length(self, sequences: int) -> PricesByLength:
        """Times, and unit-times after those, with at most this number of sequences left; of costs that depend on the position."""
        each = self.times(self.up_to(sequences))
        last = np.concatenate([one.any_length[..., self.places, :] for one in each])
        return PricesByLength(np.concatenate([one.whole for one in each if one.whole is not None]), last)


def _time_of(
    rounds: RoundsByLength, times: _TimesOfRounds, places: NDArray[np.intp], decoding: NDArray[np.intp], length: NDArray[np.intp],
    price: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """Expected time of batches of several lengths.

    `places` has the indices of each length's last positions in `times.any_length`, by length and place. The others are
    indices by batch: `decoding` of its law and length together, `length` of its length, `price` of its cost.
    """
    costs, late = len(times.any_length), rounds.late.reshape(rounds.sequences.size, -1).T
    if rounds.early is None or times.whole is None:
        return linear(late, times.any_length.reshape(costs, -1), decoding, price)
    early, positions = rounds.early.reshape(rounds.sequences.size, -1).T, rounds.early.shape[-1]
    found = linear(early, times.whole[..., :positions].reshape(costs, -1), decoding, price)
    by_length = np.moveaxis(times.any_length[..., places, :], 3, 1)  # (costs, lengths, 2, sequences + 1, places, draft_length + 1)
    return np.asarray(found + linear(late, by_length.reshape(costs * len(places), -1), decoding, price * len(places) + length))


def _by_drafted(counts: Floats, longest: int, lengths: Sequence[int]) -> Floats:
    """Sum over the positions of cells; shape (laws, sequences + 1, draft_length + 1)."""
    drafted = cells_of(longest, lengths)[1]
    both = counts.sum(axis=1)
    return np.stack([both[..., drafted == room].sum(axis=-1) for room in range(longest + 1)], axis=-1)


def one_after_another(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of sequences that are decoded one after another: the total over them."""
    return prediction_of(points, *_sum_of_each(points))


def _sum_of_each(points: DecodingPoints[Parameters]) -> tuple[Moments, NDArray[np.bool_]]:
    """Moments of the total over sequences that are decoded one after another, at points; arrays of shape (points,).

    Also whether unit-time equals time, by cost.
    """
    parameters, total = points.parameters, np.zeros((len(Moments._fields), points.law.size))
    alike = np.ones(1, dtype=np.bool_)
    for length, count in Counter(_lengths(parameters, points.tokens)).items():
        prices, reading = prices_of(parameters, length, points.cost)
        shape = parameters.draft_length, length, parameters.cut
        total += count * np.array(moments_of_pairs(*shape, points.laws, prices, reading, points.law, points.price))
        alike = alike & units_alike(prices)
    return Moments(*total), alike


def predict_decodings(points: DecodingPoints[Parameters], family: BatchFamily) -> Prediction:
    """Prediction at points of static batches that share parameters and tokens; `family` has batches of other sizes."""
    return prediction_of(points, *expected_of_points(points, family))


def prices_of_each(parameters: Parameters) -> int:
    """Prices of a cost."""
    return 3 * (parameters.concurrent_sequences + 1)


def expected(parameters: Parameters, tokens: int, law: AcceptanceLaw, cost: StepCosts) -> Moments:
    """`expected_of_points` at one point.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost = UnitCost(40, cost_ratio=0.1)
    >>> static = Parameters(40, 3, sequences=8, batching="static")
    >>> round(expected(static, 128, Iid(0.79), cost).time / (128 * 40), 4)  # 0.4514 alone
    0.4917
    """
    one = np.zeros(1, dtype=np.intp)
    points = DecodingPoints(parameters, tokens, [law], many_costs.joined([cost]), one, one)
    if parameters.concurrent_sequences == 1:
        found, _ = _sum_of_each(points)
    else:
        found, _ = expected_of_points(points, BatchFamily())
    return Moments(*(float(each[0]) for each in found))


def straggler_loss(
    parameters: Parameters, cost: StepCosts, rounds: Any, time: Any, tokens: Any, price: NDArray[np.intp] | None = None
) -> Any:  # fmt: skip
    """Share of a static batch's time that is lost by waiting for its slowest sequence [-].

    `rounds` is the total over all sequences, `time` that of all batches: numbers, or one for each of several costs. With several
    numbers of tokens, `price` is the index of each batch's cost where costs depend on the position. The reference
    is continuous batching of the same number of sequences, in which every round costs as much as a full-batch round (mean over
    positions). For equal lengths the speed-up is that of continuous batching times (1 - share). Negative if cutting the last drafts
    saves more time than waiting costs; 0 if only rounding is left.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost, static = UnitCost(40, cost_ratio=0.1), Parameters(40, 3, sequences=8, batching="static")
    >>> found = expected(static, 128, Iid(0.79), cost)
    >>> round(float(straggler_loss(static, cost, found.rounds, found.time, 128)), 3)
    0.082
    """
    count, most = parameters.concurrent_sequences, parameters.draft_length
    cost, separate = parameters.draft_costs(cost), parameters.placement == "separate"
    full = prices_by_start(cost, most, tokens=np.max(tokens), cut=False, separate=separate, sequences=count).time
    if cost.uniform:
        mean = full[..., most]
    elif price is None:
        mean = full[..., 0, :].mean(axis=-1)
    else:
        mean = np.cumsum(full[..., 0, :], axis=-1)[price, tokens - 1] / tokens
    loss = 1 - rounds * mean / (count * time)
    return np.where(np.abs(loss) < _ROUNDING, 0.0, loss)[()]


_ROUNDING = 1e-12
"""Relative error of sums over rounds [-]."""


def _lengths(parameters: Parameters, tokens: int) -> list[int]:
    return [length for batch in parameters.batches(tokens) for length in batch.values()]


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[AcceptanceLaw]) -> Work | None:
    """`work_of_laws` of equal sequences of several numbers of tokens, which rise, as arrays of shape (laws, lengths)."""
    known = [law for law in laws if isinstance(law, Chain | Rounds)]
    if len(known) < len(laws):
        return None
    longest, sequences = parameters.draft_length, parameters.concurrent_sequences
    found = np.zeros((4, len(laws), lengths.size))
    drafted, left = np.arange(longest + 1.0), np.arange(sequences + 1.0)[:, None]
    of_round = np.stack([_in_round(each, left, drafted) for each in (1.0, drafted, left * (drafted + 1), left * drafted)])
    for part in rounds_of_lengths(known, longest, sequences, lengths, placed=False):
        found[:, part.laws, part.lengths] = np.einsum("wnk,adnk->wad", of_round, part.late)
    return _work(parameters, *found)


def _in_round(value: Any, left: Floats, drafted: Floats) -> Floats:
    return np.asarray(np.broadcast_to(value, np.broadcast_shapes(left.shape, drafted.shape)))


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[AcceptanceLaw]) -> Work | None:
    """Expected work of the passes of both models under each of several laws, as arrays of shape (laws,).

    None if one of them is of records. Totals that depend on positions are nan.
    """
    known = [law for law in laws if isinstance(law, Chain | Rounds)]
    if len(known) < len(laws):
        return None
    passes: Any
    verified: Any
    drafts: Any
    drafted: Any
    passes, drafts, verified, drafted = np.zeros((4, len(laws)))
    for lengths, batches in Counter(tuple(sorted(batch.values())) for batch in parameters.batches(tokens)).items():
        work = work_of(known, parameters.draft_length, lengths)
        for total, more in zip((passes, drafts, verified, drafted), work, strict=True):
            total += batches * more
    return _work(parameters, passes, drafts, verified, drafted)


def _work(parameters: Parameters, passes: Any, drafts: Any, verified: Any, drafted: Any) -> Work:
    """Work of passes of the target, which verify `verified` tokens, and of the draft, which drafts `drafted` tokens."""
    target = of_passes(parameters.layers, passes, verified, heads=verified)
    # A draft pass reads two tokens per sequence after any completely accepted draft; how often is not computed.
    draft = of_passes(parameters.draft_layers, drafts, heads=drafted)
    return Work({"target": target, "draft": draft} if drafts.any() else {"target": target})


def decodings(
    parameters: Parameters, tokens: int, outcomes: Iterable[Iterator[Outcomes]], cost: StepCosts, replications: int
) -> Tally:
    """Simulate static batches in many replications at once, from the outcomes of each sequence."""
    gamma, sequences = parameters.draft_length, iter(outcomes)
    separate, several = parameters.placement == "separate", parameters.concurrent_sequences
    price = prices(parameters.draft_costs(cost), gamma, several, tokens=tokens, separate=separate)
    time, busy, operations, rounds, drafted = np.zeros((5, replications))
    accepted = np.zeros(gamma + 1, dtype=np.int64)
    for batch in parameters.batches(tokens):
        kept = BatchRounds.empty(max(batch.values()), replications)
        for length in batch.values():
            accepted += _enter(gamma, length, next(sequences), kept, drafted)
        for here, drafts, longest, reread in zip(*kept, strict=True):
            if not here.any():
                break
            for total, more in zip((time, busy, operations), price.of_rounds(reread, here, longest, drafts), strict=True):
                total += more
            rounds += here
    return Tally(time, busy, operations, rounds, drafted, accepted)


class BatchRounds(NamedTuple):
    """Properties of each round of a batch in each replication that determine its price; shape (rounds, replications)."""

    remaining: NDArray[np.uint16]
    """Sequences left."""
    drafted: NDArray[np.uint8]
    """Drafted tokens per sequence: the largest number that a sequence can use."""
    longest: NDArray[np.int32]
    """Position of the longest sequence."""
    reread: NDArray[np.bool_]
    """True if a sequence accepted its whole draft in the round before."""

    @staticmethod
    def empty(rounds: int, replications: int) -> BatchRounds:
        """Rounds of a batch without sequences."""
        kinds: tuple[Any, ...] = (np.uint16, np.uint8, np.int32, np.bool_)
        return BatchRounds(*(np.zeros((rounds, replications), dtype=kind) for kind in kinds))


def _enter(
    gamma: int, tokens: int, outcomes: Iterator[Outcomes], kept: BatchRounds, drafted: Floats
) -> NDArray[np.int64]:
    """Add the rounds of one sequence to `kept`; return the number of rounds, over all replications, by accepted length."""
    place, number = np.zeros(drafted.size, dtype=np.uint8), np.zeros(drafted.size, dtype=np.intp)
    reached, whole = np.zeros(gamma + 1, dtype=np.int64), np.zeros(drafted.size, dtype=np.bool_)
    for position in range(tokens):
        reached += np.bincount(place, minlength=gamma + 1)
        starting = np.flatnonzero(place == 0)
        which, room = number[starting], min(gamma, tokens - 1 - position)
        kept.remaining[which, starting] += 1
        kept.drafted[which, starting] = np.maximum(kept.drafted[which, starting], room)
        kept.longest[which, starting] = np.maximum(kept.longest[which, starting], position)
        kept.reread[which, starting] |= whole[starting]
        drafted[starting] += room
        if position < tokens - 1:
            going_on = (place < gamma) & next(outcomes)(place)
            whole = (place == gamma) & (gamma > 0)
            number += ~going_on
            place = (place + 1) * going_on.view(np.uint8)
    return np.asarray(reached - np.append(reached[1:], 0))
