"""Policies of draft length under load: how many tokens each running sequence drafts in the next step.

A policy sees what an engine sees: how many sequences decode, which of their drafted tokens were accepted so far, and (where the
engine measures them) the times of its steps. It is asked before each step, and told afterwards.

[SmartSpec] X. Liu et al. Optimizing Speculative Decoding for Serving Large Language Models Using Goodput. arXiv:2406.14066, 2024.
[DSpark] Algorithm 1: drafted tokens of all sequences are admitted in the order of their survival while tokens per second rise.
[vLLM] `num_speculative_tokens_per_batch_size` of the speculative config: ranges [first, last, K] of running sequences.
[SGLang] `--speculative-adaptive`: the draft length follows a moving average of accepted tokens among the candidates of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.methods.draft_model import MAX_DRAFT
from model.serving.step_prices import RaggedPass, StepPrices, drafting_seconds

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class StepView(NamedTuple):
    """What a policy sees before a step."""

    sequences: int
    """Sequences that decode."""
    waiting: int
    positions: int
    """Cached positions of the decoding sequences altogether."""
    rows: Integers
    """A number below `max_num_seqs` for each of them, which it keeps."""
    ahead: Integers | None = None
    """Tokens of a draft of each that would be accepted, for the policy that knows the future; None: not known."""


class DraftPolicy(ABC):
    """Draft lengths of the next step."""

    longest: int
    """Largest draft length that it may ask for."""
    BLIND: ClassVar[bool] = False
    """True if it always drafts `longest` tokens and needs no view."""
    KNOWS: ClassVar[bool] = False
    """True if it must be told which drafted tokens would be accepted."""

    @abstractmethod
    def limits(self, view: StepView) -> int | Integers:
        """Tokens to draft: one number for all decoding sequences, or one for each."""

    def learn(self, rows: Integers, drafted: Integers, accepted: Integers) -> None:  # noqa: B027  most policies need not
        """Take note of a step: drafted and accepted tokens of each sequence."""

    def forget(self, row: int) -> None:  # noqa: B027
        """A new sequence has this number."""


class Static(DraftPolicy):
    """The same draft length at every load; 0 is plain decoding.

    >>> Static(3).limits(StepView(8, 0, 8000, np.arange(8)))
    3
    """

    BLIND = True

    def __init__(self, draft_length: int) -> None:
        checks.whole("draft_length", draft_length, 0, MAX_DRAFT)
        self.longest = draft_length

    def limits(self, view: StepView) -> int:
        return self.longest


class BatchSchedule(DraftPolicy):
    """Draft length by the number of decoding sequences, as in [vLLM].

    >>> policy = BatchSchedule([(1, 64, 3), (65, 512, 0)])
    >>> [policy.limits(StepView(count, 0, 0, np.arange(count))) for count in (1, 64, 65)]
    [3, 3, 0]
    """

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        self.ranges = _checked_ranges(ranges)
        self.longest = max(length for _, _, length in self.ranges)
        self._starts = [first for first, _, _ in self.ranges]

    def limits(self, view: StepView) -> int:
        place = int(np.searchsorted(self._starts, view.sequences, side="right")) - 1
        return self.ranges[max(place, 0)][2]


def _checked_ranges(ranges: Any) -> list[tuple[int, int, int]]:
    """Ranges [first, last, K] without gaps or overlaps, from 1 on; above the last one its K holds."""
    found: list[tuple[int, int, int]] = []
    if not isinstance(ranges, Sequence) or isinstance(ranges, str) or not ranges:
        raise ParameterError(
            f"a schedule must be a list of ranges [first, last, K], such as [[1,64,3],[65,512,0]], got {checks.shown(ranges)}"
        )
    for index, each in enumerate(ranges):
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 3:
            raise ParameterError(f"range {index + 1} of a schedule must be [first, last, K], got {checks.shown(each)}")
        first, last, length = each
        checks.whole(f"first of range {index + 1}", first, 1)
        checks.whole(f"last of range {index + 1}", last, first)
        checks.whole(f"K of range {index + 1}", length, 0, MAX_DRAFT)
        expected = found[-1][1] + 1 if found else 1
        if first != expected:
            what = "leaves a gap" if first > expected else "overlaps the range before it"
            remedy = f"begin it at {expected}; ranges follow each other in order"
            raise ParameterError(f"range {index + 1} of a schedule must begin at {expected}, got {first}: it {what}; {remedy}")
        found.append((first, last, length))
    return found


class Adaptive(DraftPolicy):
    """[SGLang]'s rule: the draft length is one of the candidates of the batch's slot, and moves among them by one.

    The mean accepted tokens of a batch (without the target's own) are averaged exponentially. Every `update_interval` batches,
    after `warmup_batches`, the length falls to the candidate below if the average is at most that candidate - 0.5 +
    `down_hysteresis`, and rises to the one above if it exceeds the present length - 0.5 + `up_hysteresis`. After a length of 0,
    which shows nothing, the smallest candidate above is tried at the next update.

    >>> policy = Adaptive({1: [1, 3, 5]})
    >>> view = StepView(1, 0, 0, np.array([0]))
    >>> for _ in range(40):
    ...     length = policy.limits(view)
    ...     policy.learn(view.rows, np.array([length]), np.array([length]))
    >>> policy.limits(view)
    5
    """

    WEIGHT, INTERVAL, WARM_UP, DOWN, UP = 0.2, 5, 10, -0.25, 0.0
    DEFAULT: Mapping[int, tuple[int, ...]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
    """Candidates by the least batch of a slot, as the engine ships them."""

    def __init__(self, slots: Mapping[int, Sequence[int]] | None = None) -> None:
        chosen = self.DEFAULT if slots is None else slots
        if not chosen:
            raise ParameterError("an adaptive policy must have candidates for at least one batch, got none")
        self.slots: dict[int, list[int]] = {}
        for batch, candidates in sorted(chosen.items()):
            checks.whole("batch of a slot", batch, 1)
            if not candidates:
                raise ParameterError(f"slot {batch} must have candidates, got none")
            for length in candidates:
                checks.whole(f"candidate of slot {batch}", length, 0, MAX_DRAFT)
            if list(candidates) != sorted({*candidates}):
                raise ParameterError(f"candidates of slot {batch} must increase, got {list(candidates)}")
            self.slots[batch] = [*candidates]
        self.longest = max(max(each) for each in self.slots.values())
        self._starts = [*self.slots]
        self._at = {batch: (len(each) - 1) // 2 for batch, each in self.slots.items()}
        self._mean: dict[int, float] = {}
        self._seen = dict.fromkeys(self.slots, 0)

    def limits(self, view: StepView) -> int:
        slot = self._slot(view.sequences)
        return self.slots[slot][self._at[slot]]

    def _slot(self, sequences: int) -> int:
        return self._starts[max(int(np.searchsorted(self._starts, sequences, side="right")) - 1, 0)]

    def learn(self, rows: Integers, drafted: Integers, accepted: Integers) -> None:
        if not rows.size:
            return
        slot = self._slot(rows.size)
        self._seen[slot] += 1
        if drafted.any():
            now = float(accepted.mean())
            old = self._mean.get(slot)
            self._mean[slot] = now if old is None else old + self.WEIGHT * (now - old)
        if self._seen[slot] > self.WARM_UP and self._seen[slot] % self.INTERVAL == 0:
            self._move(slot)

    def _move(self, slot: int) -> None:
        candidates, at = self.slots[slot], self._at[slot]
        length, mean = candidates[at], self._mean.get(slot, 0.0)
        if not length:
            self._at[slot] = min(at + 1, len(candidates) - 1)
        elif at and mean <= candidates[at - 1] - 0.5 + self.DOWN:
            self._at[slot] = at - 1
        elif mean > length - 0.5 + self.UP:
            self._at[slot] = min(at + 1, len(candidates) - 1)


class Goodput(DraftPolicy):
    """The draft length with the largest expected tokens per second [SmartSpec].

    Acceptance is estimated from all tested tokens so far, with less weight of old ones; times are those that the engine has
    measured before, here the prices. Ties go to the shorter draft.
    """

    FORGET = 0.995
    """Weight of the counts of the step before in those of a step."""

    def __init__(
        self, longest: int, prices: StepPrices, draft_passes: Callable[[int], int], prior: tuple[float, float] = (0.7, 1.0)
    ) -> None:
        checks.whole("longest draft", longest, 0, MAX_DRAFT)
        self.longest = longest
        self.prices, self.draft_passes = prices, draft_passes
        self.accepted, self.tested = prior
        self._idle = 0

    @property
    def rate(self) -> float:
        """Estimated acceptance rate."""
        return min(self.accepted / self.tested, 1.0)

    def limits(self, view: StepView) -> int:
        best, chosen, tokens, power = 0.0, 0, 1.0, 1.0
        for length in range(self.longest + 1):
            speed = view.sequences * tokens / step_seconds(self.prices, view.sequences, view.positions, length, self.draft_passes)
            if speed > best * (1 + 1e-12):
                best, chosen = speed, length
            power *= self.rate
            tokens += power
        return chosen

    def learn(self, rows: Integers, drafted: Integers, accepted: Integers) -> None:
        tested = int(np.minimum(accepted + 1, drafted).sum())
        if tested:
            self.accepted = self.FORGET * self.accepted + float(accepted.sum())
            self.tested = self.FORGET * self.tested + tested


class AdmittedBySurvival(DraftPolicy):
    """Each sequence drafts as many tokens as pay in its step: [DSpark]'s admission of drafted tokens by their survival.

    The survival of a drafted token is the product of the acceptance rates up to it. An engine reads them from its draft's
    confidences. Here they are the law's rates by draft position, moved in proportion to what the sequence's own tokens show. The
    draft makes all its passes; then tokens of all sequences are admitted to the verification in the order of their survival while
    expected tokens per second rise, and admission stops with the first that does not raise them. Nothing is drafted where that is
    slower than plain decoding.
    """

    PRIOR = 8.0
    """Tested tokens that the law's rates count as, for each sequence."""

    def __init__(
        self, rates: ArrayLike, prices: StepPrices, draft_passes: Callable[[int], int], most: int
    ) -> None:
        self.rates: Floats = np.asarray(rates, dtype=np.float64)
        self.longest = self.rates.size
        checks.whole("longest draft", self.longest, 0, MAX_DRAFT)
        self.prices, self.draft_passes = prices, draft_passes
        self.counts: Floats = np.zeros((2, most))
        self.mean = float(self.rates.mean()) if self.longest else 0.0

    def limits(self, view: StepView) -> Integers:
        count = view.sequences
        if not count or not self.mean:
            return np.zeros(count, dtype=np.int64)
        own = (self.counts[0, view.rows] + self.PRIOR * self.mean) / (self.counts[1, view.rows] + self.PRIOR)
        survival = np.cumprod(np.minimum(np.multiply.outer(own / self.mean, self.rates), 1.0), axis=1)
        order = np.argsort(-survival, axis=None, kind="stable")
        drafting = drafting_seconds(self.prices, self.draft_passes(self.longest), count, view.positions)
        tokens, best = float(count), count / (self.prices.target(RaggedPass(count, count, view.positions, True)) + drafting)
        admitted = np.zeros(count, dtype=np.int64)
        for number, slot in enumerate(order.tolist(), 1):
            row, place = divmod(slot, self.longest)
            tokens += float(survival[row, place])
            speed = tokens / (self.prices.target(RaggedPass(count, count + number, view.positions, True)) + drafting)
            if speed <= best:
                break
            best = speed
            admitted[row] += 1
        plain = count / step_seconds(self.prices, count, view.positions, 0, self.draft_passes)
        return admitted if best > plain else np.zeros(count, dtype=np.int64)

    def learn(self, rows: Integers, drafted: Integers, accepted: Integers) -> None:
        tested = np.minimum(accepted + 1, drafted)
        self.counts[0, rows] += accepted
        self.counts[1, rows] += tested

    def forget(self, row: int) -> None:
        """A new sequence has this number."""
        self.counts[:, row] = 0.0


class Oracle(DraftPolicy):
    """Knows which drafted tokens would be accepted, and drafts no others: as many of them as are fastest in this step.

    No engine can do that. It shows what better policies could win at most, step by step.
    """

    KNOWS = True

    def __init__(self, longest: int, prices: StepPrices, draft_passes: Callable[[int], int]) -> None:
        checks.whole("longest draft", longest, 0, MAX_DRAFT)
        self.longest = longest
        self.prices, self.draft_passes = prices, draft_passes

    def limits(self, view: StepView) -> Integers:
        assert view.ahead is not None
        best, chosen = -1.0, np.zeros(view.sequences, dtype=np.int64)
        for most in range(self.longest + 1):
            lengths = np.minimum(view.ahead, most)
            drafted = int(lengths.sum())
            tokens = view.sequences + drafted
            seconds = self.prices.target(RaggedPass(view.sequences, tokens, view.positions, drafted > 0))
            deepest = int(lengths.max(initial=0))
            seconds += drafting_seconds(self.prices, self.draft_passes(deepest), view.sequences, view.positions)
            if tokens / seconds > best:
                best, chosen = tokens / seconds, lengths
        return chosen


def step_seconds(
    prices: StepPrices, sequences: int, positions: int, length: int, draft_passes: Callable[[int], int]
) -> float:
    """Seconds of a step in which each sequence drafts `length` tokens [s]."""
    if not sequences:
        return prices.target(RaggedPass(1, 1, 0))
    seconds = prices.target(RaggedPass(sequences, sequences * (length + 1), positions, length > 0))
    return seconds + drafting_seconds(prices, draft_passes(length), sequences, positions)
