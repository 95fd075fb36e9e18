"""Acceptance by draft position from mean acceptance lengths at several draft lengths (a *curve*), and how well such a law fits.

If the i-th drafted token is accepted in the share s_i of all steps, at every draft length, then the mean acceptance length is

    AL(K) = 1 + s_1 + ... + s_K,    1 >= s_1 >= s_2 >= ... >= 0.

So AL never falls with K, and its increments never rise. Measured curves do both: an engine drafts differently for another draft
length, and samples are finite. The best law is the one whose largest relative error is the smallest: a linear programme. A constant
acceptance rate, s_i = rate^i, has one number for all positions and follows a curve far less well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from model.base import checks
from model.base.checks import ParameterError
from model.engines import step_terms
from model.engines.cells import MOST_DRAFT, Floats

MOST_POSITIONS = 128
"""Longest draft of a curve: the linear programme grows with its square."""
_SLACK = 1e-9
"""Accuracy of the linear programmes: slack of the smallest largest error in the second, and survival that counts as 0 [-]."""


@dataclass(frozen=True, eq=False)
class AcceptanceCurveFit:
    """Acceptance by draft position, fitted to a curve.

    Parameters
    ----------
    survival
        Shares of steps in which the drafted token at each position is accepted; shape (longest draft,) [-].
    draft_lengths, lengths
        The curve: draft lengths, and measured mean acceptance lengths (bonus token included) [-].
    """

    survival: Floats
    draft_lengths: Floats
    lengths: Floats

    @property
    def conditional_rates(self) -> Floats:
        """Acceptance rates of a token all before which are accepted; 0 after a position that is never reached [-]."""
        before = np.concatenate([[1.0], self.survival[:-1]])
        return np.where(before > 0, self.survival / np.where(before > 0, before, 1.0), 0.0)

    @property
    def predicted(self) -> Floats:
        """Mean acceptance lengths of the law at the draft lengths of the curve [-]."""
        return np.asarray(1 + np.cumsum(self.survival)[self.draft_lengths.astype(int) - 1])

    @property
    def errors(self) -> Floats:
        """Residuals: predicted over measured, minus 1, at the draft lengths of the curve [-]."""
        return self.predicted / self.lengths - 1


def fit(draft_lengths: ArrayLike, lengths: ArrayLike) -> AcceptanceCurveFit:
    """Fit acceptance by draft position to a curve, so that its largest relative error is the smallest possible.

    Of all such laws the one with the smallest sum of errors is taken, and of positions between two draft lengths, which the curve
    says only together, the smoothest.

    Parameters
    ----------
    draft_lengths, lengths
        Draft lengths, each once, and measured mean acceptance lengths (bonus token included).

    DeepSeek-V4 (SemiAnalysisAI/InferenceX at 843c6254, golden_al_distribution): rates fall by position, and no law follows all of
    the curve.

    >>> law = fit([1, 2, 3, 4, 5, 6, 7, 8], [1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.54, 2.58])
    >>> print(law.conditional_rates[:3].round(2), f"{abs(law.errors).max():.2%}")
    [0.79 0.61 0.46] 0.59%
    """
    drafted, measured = _curve(draft_lengths, lengths)
    count, positions = drafted.size, int(drafted[-1])
    sums = (np.arange(1, positions + 1)[None] <= drafted[:, None]) / measured[:, None]
    # Unknowns: survival, and the bounds of the errors. error = sums @ survival + 1 / measured - 1, between -bound and bound.
    offset = 1 / measured - 1
    falling = np.eye(positions, k=1)[:-1] - np.eye(positions)[:-1]
    each = np.concatenate([np.zeros(positions), [1.0]])
    among = np.vstack([
        np.hstack([sums, -np.ones((count, 1))]), np.hstack([-sums, -np.ones((count, 1))]),
        np.hstack([falling, np.zeros((positions - 1, 1))]),
    ])  # fmt: skip
    below = np.concatenate([-offset, offset, np.zeros(positions - 1)])
    bounds = [(0.0, 1.0)] * positions + [(0.0, None)]
    least = float(_solved(each, among, below, bounds)[-1])

    # Second programme: one bound per cell and one per bend of the survival.
    bends = np.diff(np.eye(positions), n=2, axis=0) if positions > 2 else np.zeros((0, positions))
    curved = len(bends)
    wanted = np.concatenate([np.zeros(positions), np.ones(count), np.full(curved, 1e-4)])
    among = np.vstack([
        np.hstack([sums, -np.eye(count), np.zeros((count, curved))]), np.hstack([-sums, -np.eye(count), np.zeros((count, curved))]),
        np.hstack([falling, np.zeros((positions - 1, count + curved))]),
        np.hstack([bends, np.zeros((curved, count)), -np.eye(curved)]),
        np.hstack([-bends, np.zeros((curved, count)), -np.eye(curved)]),
    ])  # fmt: skip
    below = np.concatenate([-offset, offset, np.zeros(positions - 1 + 2 * curved)])
    bounds = [(0.0, 1.0)] * positions + [(0.0, least + _SLACK)] * count + [(0.0, None)] * curved
    survival = np.minimum.accumulate(np.clip(_solved(wanted, among, below, bounds)[:positions], 0.0, 1.0))
    return AcceptanceCurveFit(np.where(survival < _SLACK, 0.0, survival), drafted, measured)


def falls(draft_lengths: ArrayLike, lengths: ArrayLike) -> tuple[tuple[int, int], ...]:
    """Pairs of neighbouring draft lengths between which a curve falls, which no acceptance by draft position can follow.

    >>> falls([5, 6, 7, 8], [2.55, 2.55, 2.54, 2.58])
    ((6, 7),)
    """
    drafted, measured = _curve(draft_lengths, lengths)
    return tuple((int(drafted[i]), int(drafted[i + 1])) for i in np.flatnonzero(np.diff(measured) < 0))


def constant_rate(draft_length: int, length: float) -> float:
    """Acceptance rate that, the same at all positions, gives this mean acceptance length at this draft length [-].

    >>> round(constant_rate(1, 1.79), 4), round(constant_rate(3, 2.49), 4)
    (0.79, 0.6888)
    """
    checks.whole("draft_length", draft_length, 1, MOST_DRAFT)
    checks.number("mean_acceptance_length", length, 1, draft_length + 1)
    from scipy import optimize  # half a second, which most commands need not wait for

    return float(optimize.brentq(lambda rate: sum(rate**i for i in range(draft_length + 1)) - length, 0.0, 1.0, xtol=1e-14))


def constant_lengths(rate: float, draft_lengths: ArrayLike) -> Floats:
    """Mean acceptance lengths of a constant acceptance rate, below 1, at these draft lengths [-]."""
    return step_terms.acceptance_length(rate, 0.0, draft_lengths)


def _curve(draft_lengths: ArrayLike, lengths: ArrayLike) -> tuple[Floats, Floats]:
    """Draft lengths in increasing order, and their mean acceptance lengths, checked."""
    drafted = checks.whole_array("draft_length", draft_lengths, 1)
    measured = checks.array("mean_acceptance_length", lengths, 1, MOST_DRAFT + 1)
    if drafted.ndim != 1 or drafted.shape != measured.shape or not drafted.size:
        raise ParameterError(
            f"draft_length and mean_acceptance_length must be lists of the same length, got shapes {drafted.shape} and"
            f" {measured.shape}"
        )
    if drafted.max() > MOST_POSITIONS:
        raise ParameterError(f"draft_length must be at most {MOST_POSITIONS}, got {drafted.max():g}")
    order = np.argsort(drafted)
    drafted, measured = drafted[order].astype(np.float64), measured[order]
    if np.any(np.diff(drafted) == 0):
        again = drafted[:-1][np.diff(drafted) == 0][0]
        raise ParameterError(f"draft_length must be given once each, got {again:g} twice")
    over = measured > drafted + 1
    if over.any():
        row = int(np.argmax(over))
        raise ParameterError(
            f"mean_acceptance_length must be at most draft_length + 1 = {drafted[row] + 1:g} (the bonus token counted), got"
            f" {measured[row]:g}"
        )
    return drafted, measured


def _solved(wanted: Floats, among: Floats, below: Floats, bounds: Sequence[tuple[float, float | None]]) -> Floats:
    from scipy import optimize

    found = optimize.linprog(wanted, A_ub=among, b_ub=below, bounds=bounds, method="highs")
    if not found.success:  # never: survival 0 satisfies every constraint of the first programme, its optimum those of the second
        raise RuntimeError(f"linear programme: {found.message}")
    return np.asarray(found.x)
