"""Choice of the draft length by the number of running sequences: speed-ups with intervals, ties, and what would overturn them.

A step law says the seconds T(R, K) of a step with R running sequences and K drafted tokens each, the acceptance the tokens AL(K)
that a sequence gets from it. The time per token is T(R, K) / AL(K) + P(R), where P is the time that goes to prompts of the requests
(0 in laws of steps); the speed-up is that of plain decoding on the same devices over it. All are known as draws, so that an
interval of a ratio holds what both sides share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

from model.advice.acceptance_draws import AcceptanceDraws
from model.base import checks
from model.base.checks import ParameterError
from model.engines.cells import Cells, Floats
from model.engines.step_law import DEGREES, EXTRAPOLATION, SHARE, StepLaw

MOST_CHOICES = 4096
TIE = 0.01
"""Largest loss of throughput of a draft length that counts as equal to the best one, with all that is known [-]."""
POINTS_PER_DOUBLING = 4
"""Resolution of the search for the number of running sequences from which plain decoding is fastest."""
_NODES = special.stdtrit(DEGREES, (np.arange(20) + 0.5) / 20)
_ENDS = (1 - SHARE) / 2, (1 + SHARE) / 2


@dataclass(frozen=True, eq=False)
class DraftChoice:
    """Speed-ups of all draft lengths at some numbers of running sequences.

    Parameters
    ----------
    law, acceptance
        Seconds of steps, and acceptance of the draft.
    batches, draft_lengths
        Numbers of running sequences; draft lengths, of which the first is 0 (plain decoding).
    context
        Cached positions per sequence; None: unknown (laws with kernels assume `kernel_times.USUAL_CONTEXT`).
    draft_passes
        Passes per draft: 1 for parallel drafts; None: one for each drafted token.

    Arrays have shape (batches, draft lengths).
    """

    law: StepLaw
    acceptance: AcceptanceDraws
    batches: tuple[float, ...]
    draft_lengths: tuple[int, ...]
    context: float | None = None
    draft_passes: int | None = None

    def __post_init__(self) -> None:
        if not self.batches or len(self.draft_lengths) < 2 or self.draft_lengths[0] != 0:
            raise ParameterError("at least one number of sequences and one draft length above 0 are needed")
        if len(self.batches) * len(self.draft_lengths) > MOST_CHOICES:
            raise ParameterError(
                f"at most {MOST_CHOICES} choices are allowed, got {len(self.batches)} batches x {len(self.draft_lengths)} lengths"
            )
        for each in self.batches:
            checks.number("batch", each, 1, 1e6)

    @cached_property
    def cells(self) -> Cells:
        """All choices as cells, batch by batch."""
        number = np.repeat(self.batches, len(self.draft_lengths))
        length = np.tile(self.draft_lengths, len(self.batches))
        passes = None if self.draft_passes is None else np.minimum(length, self.draft_passes)
        return Cells.of(self.law.unit, number, length, draft_passes=passes, context=self.context)

    @cached_property
    def lengths(self) -> tuple[Floats, Floats]:
        """Mean acceptance lengths, of shape (lengths,), and their draws."""
        return self.acceptance.lengths(self.draft_lengths)

    @cached_property
    def steps(self) -> tuple[Floats, Floats]:
        """Seconds of a step, of shape (batches, lengths), and their draws, of shape (draws, batches, lengths) [s]."""
        point, draws = self.law.step_seconds(self.cells)
        shape = len(self.batches), len(self.draft_lengths)
        return point.reshape(shape), draws.reshape(-1, *shape)

    @cached_property
    def prompts(self) -> tuple[Floats, Floats]:
        """Seconds that go to prompts per output token of a sequence, of shape (batches, 1), and their draws [s]."""
        return self.law.prompt_seconds(np.array(self.batches)[:, None])

    @property
    def tpot_seconds(self) -> Floats:
        """Time per output token of a sequence [s]."""
        return self.steps[0] / self.lengths[0] + self.prompts[0]

    @cached_property
    def _tpot_draws(self) -> Floats:
        """Draws of the time per output token, without errors of measurement; shape (draws, batches, lengths) [s]."""
        stepping = self._paired(self.steps[1]) / self._paired(self.lengths[1])[:, None, :]
        return np.asarray(stepping + self._paired(self.prompts[1]))

    @property
    def throughput(self) -> Floats:
        """Output tokens per second of all sequences together [tokens/s]."""
        return np.asarray(self.batches)[:, None] / self.tpot_seconds

    @cached_property
    def speedups(self) -> Floats:
        """Speed-ups over plain decoding on the same devices [-]."""
        tpot = self.tpot_seconds
        return tpot[:, :1] / tpot

    @cached_property
    def draws(self) -> Floats:
        """Draws of the speed-ups, without errors of measurement; shape (draws, batches, lengths)."""
        return np.asarray(self._tpot_draws[:, :, :1] / self._tpot_draws)

    def _paired(self, draws: Floats) -> Floats:
        """Draws repeated to the larger of both numbers of draws."""
        count = max(len(self.steps[1]), len(self.lengths[1]))
        return np.asarray(draws[np.arange(count) % len(draws)])

    @cached_property
    def _beyond(self) -> Floats:
        found = self.law.beyond(self.cells.sequences, self.cells.draft_length)
        return found.reshape(len(self.batches), len(self.draft_lengths))

    def _interval(self, values: Floats, beyond: Floats) -> tuple[Floats, Floats]:
        """`ratio_interval` of `values`, of shape (draws, ...)."""
        return ratio_interval(values, self._paired(self.law.draws["noise"]), beyond)

    @cached_property
    def interval(self) -> tuple[Floats, Floats]:
        """Bounds of the speed-ups, of probability `SHARE`, the error of a measurement included; 1 for plain decoding."""
        low, high = self._interval(self.draws, np.maximum(self._beyond, self._beyond[:, :1]))
        low, high = np.minimum(low, self.speedups), np.maximum(high, self.speedups)
        low[:, 0] = high[:, 0] = 1.0
        return low, high

    def tpot_interval(self) -> tuple[Floats, Floats]:
        """Bounds of the time per output token, of probability `SHARE` [s]."""
        low, high = self._interval(self._tpot_draws, self._beyond)
        return np.minimum(low, self.tpot_seconds), np.maximum(high, self.tpot_seconds)

    # --- Choices ---

    @cached_property
    def losses(self) -> Floats:
        """Expected share of throughput that a draft length gives away against the best one [-]."""
        return np.asarray((1 - self.draws / self.draws.max(axis=2, keepdims=True)).mean(axis=0))

    @cached_property
    def best(self) -> NDArray[np.int_]:
        """Index of the best draft length: that of the least expected loss; shape (batches,)."""
        return np.asarray(self.losses.argmin(axis=1))

    @cached_property
    def ties(self) -> NDArray[np.bool_]:
        """Mask of draft lengths that may be as good as the best one: the interval of their ratio to it includes 1, or they lose at
        most `TIE` more; the best ones are not marked."""
        rows = np.arange(len(self.batches))
        ratio = self.draws / self.draws[:, rows, self.best][:, :, None]
        _, high = self._interval(ratio, np.maximum(self._beyond, self._beyond[rows, self.best][:, None]))
        found = (high >= 1) | (self.losses <= self.losses[rows, self.best][:, None] + TIE)
        found[rows, self.best] = False
        return np.asarray(found)

    @cached_property
    def probabilities(self) -> Floats:
        """Probability that a draft length is the best one [-]."""
        winners = self.draws.argmax(axis=2)
        return np.stack([(winners == length).mean(axis=0) for length in range(len(self.draft_lengths))], axis=1)


def ratio_interval(values: Floats, noise: Floats, beyond: Floats | float) -> tuple[Floats, Floats]:
    """Bounds of probability `SHARE` of ratios that a measurement would have.

    Parameters
    ----------
    values
        Draws of the ratios, without errors of measurement; shape (draws, ...).
    noise
        Relative error of a measurement in each draw (Student's t of `DEGREES`); shape (draws,).
    beyond
        Doublings beyond the fitted cells, broadcast over all but the draws.

    >>> [round(float(each), 3) for each in ratio_interval(np.array([2.0, 2.0]), np.array([0.01, 0.01]), 0.0)]
    [1.97, 2.031]
    """
    width = np.sqrt(noise.reshape(-1, *(1,) * (values.ndim - 1)) ** 2 + (EXTRAPOLATION * beyond) ** 2)
    spread = np.log(values)[:, None] + width[:, None] * _NODES.reshape(1, -1, *(1,) * (values.ndim - 1))
    low, high = np.quantile(spread.reshape(-1, *values.shape[1:]), _ENDS, axis=0, method="hazen")
    return np.exp(low), np.exp(high)


@dataclass(frozen=True)
class SwitchOff:
    """Number of running sequences from which plain decoding is fastest at all larger numbers.

    Parameters
    ----------
    batch
        That number; None: drafting pays up to `limit`. 1: it never pays.
    low, high
        Bounds of probability `SHARE`; `high` None: beyond the limit.
    pays_until, costs_from
        Numbers up to which the interval of the best speed-up is above 1, and from which it is below 1; between both it makes no
        difference that is known. None: nowhere.
    limit
        Largest number that was looked at.
    """

    batch: float | None
    low: float | None
    high: float | None
    pays_until: float | None
    costs_from: float | None
    limit: float


def switch_off(choice: DraftChoice, limit: float) -> SwitchOff:
    """Find the number of running sequences from which drafting never pays, up to `limit`."""
    steps = max(2, int(np.ceil(np.log2(max(limit, 2)) * POINTS_PER_DOUBLING)) + 1)
    numbers = np.geomspace(1, max(limit, 2), steps)
    fine = replace(choice, batches=tuple(numbers))
    point = np.log(fine.speedups[:, 1:].max(axis=1))
    # Each draw keeps the draft length that is best for it: the choice itself is part of what is not known.
    drawn = np.log(fine.draws[:, :, 1:].max(axis=2))
    roots = np.array([_last_root(numbers, each) for each in drawn])
    low, high = (float(each) for each in np.quantile(roots, _ENDS, method="nearest"))
    lows, highs = (each[np.arange(steps), 1 + fine.losses[:, 1:].argmin(axis=1)] for each in fine.interval)
    pays, costs = lows > 1, highs < 1
    until = float(numbers[np.argmin(pays) - 1]) if pays[0] and not pays.all() else (float(numbers[-1]) if pays.all() else None)
    start = steps - int(np.argmin(costs[::-1])) if not costs.all() else 0
    return SwitchOff(
        _finite(_last_root(numbers, point)), _finite(low), _finite(high), until, float(numbers[start]) if start < steps else None,
        float(numbers[-1]),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return None if np.isinf(value) else value


def _last_root(numbers: Floats, values: Floats) -> float:
    """Number from which a curve of logarithms stays at or below 0; 1 if everywhere, inf if it ends above 0."""
    above = np.flatnonzero(values > 0)
    if not above.size:
        return float(numbers[0])
    last = int(above[-1])
    if last == numbers.size - 1:
        return np.inf
    share = values[last] / (values[last] - values[last + 1])
    return float(np.exp(np.log(numbers[last]) + share * np.log(numbers[last + 1] / numbers[last])))


# --- What would overturn the choice ---


@dataclass(frozen=True)
class BreakEven:
    """What would make drafting and plain decoding equally fast at one number of running sequences.

    Parameters
    ----------
    batch
        Number of running sequences.
    acceptance
        Acceptance rate of the first drafted token (the others move with it) at which the best draft length just pays; None: it
        pays at no acceptance below 1. 0: at any.
    draft_pass_seconds, cost_ratio
        Time of a pass of the draft at which it just pays, and the same over a plain step; None: not even a free draft pays.
    now_acceptance, now_draft_pass_seconds
        The values that the choice rests on.
    """

    batch: float
    acceptance: float | None
    draft_pass_seconds: float | None
    cost_ratio: float | None
    now_acceptance: float
    now_draft_pass_seconds: float


def break_even(choice: DraftChoice, batch: float) -> BreakEven:
    """Acceptance and draft cost at which the best draft length is as fast as plain decoding, the other one unchanged."""
    at = replace(choice, batches=(batch,))
    steps, emitted, prompts = at.steps[0][0], at.lengths[0], float(at.prompts[0][0, 0])
    plain = float(steps[0]) + prompts
    context = at.cells.context[:1]
    known = np.where(np.isnan(context), 0.0, context)
    passed = float(choice.law.draft_seconds(np.array([batch]), known)[0][0])
    passes = at.cells.draft_passes[1:]

    def of_acceptance(rate: float) -> float:
        moved = choice.acceptance.scaled_to(rate).lengths(choice.draft_lengths)[0]
        return float(np.max(np.log(plain / (steps[1:] / moved[1:] + prompts))))

    def of_draft(seconds: float) -> float:
        return float(np.max(np.log(plain / ((steps[1:] + passes * (seconds - passed)) / emitted[1:] + prompts))))

    free = of_draft(0.0)
    cost = None if free < 0 else _root(of_draft, 0.0, plain * float(emitted.max() + 1) + passed)
    return BreakEven(
        batch, _root(of_acceptance, 1e-6, 1 - 1e-6), cost, None if cost is None else cost / float(steps[0]),
        float(choice.acceptance.point[0]), passed,
    )  # fmt: skip


def _root(function: Callable[[float], float], low: float, high: float) -> float | None:
    """Root of a monotone function; an end where it is 0 or crosses before, None if it stays below 0."""
    first, last = function(low), function(high)
    if first <= 0 <= last or last <= 0 <= first:
        from scipy import optimize  # half a second, which most commands need not wait for

        return float(optimize.brentq(function, low, high, xtol=1e-9))
    return None if max(first, last) < 0 else (0.0 if last > first else high)


@dataclass(frozen=True)
class Influence:
    """How far an input moves the best speed-up at one number of running sequences, within what is known of it."""

    name: str
    low: float
    """Speed-up with the input at the lower end of its interval of probability `SHARE`."""
    high: float
    """Speed-up with the input at the upper end."""

    @property
    def size(self) -> float:
        """Size of the change, as a logarithm."""
        return abs(float(np.log(self.high / self.low)))


def influences(choice: DraftChoice, batch: float) -> list[Influence]:
    """Inputs by how far each, alone, moves the speed-up of today's best draft length; the largest first."""
    at = replace(choice, batches=(batch,))
    column = 1 + int(at.losses[0, 1:].argmin())
    length = (0, at.draft_lengths[column])
    found = []

    def speedup(law: StepLaw, acceptance: AcceptanceDraws) -> float:
        return float(replace(at, law=law, acceptance=acceptance, draft_lengths=length).speedups[0, 1])

    for name in choice.law.coefficients:
        if name in ("acceptance_rate", "acceptance_trend"):
            continue  # those of the choice's own acceptance count
        low, high = np.quantile(choice.law.draws[name], _ENDS)
        if low == high:
            continue
        ends = (speedup(replace(choice.law, coefficients={**choice.law.coefficients, name: float(each)}), choice.acceptance)
                for each in (low, high))  # fmt: skip
        found.append(Influence(name, *ends))
    emitted = choice.acceptance.lengths(length)[1][:, 1]
    if np.ptp(emitted) > 0:
        step, prompts = float(at.steps[0][0, column]), float(at.prompts[0][0, 0])
        plain = float(at.tpot_seconds[0, 0])
        ends = (plain / (step / float(each) + prompts) for each in np.quantile(emitted, _ENDS))
        found.append(Influence("acceptance", *ends))
    return sorted(found, key=lambda each: -each.size)


