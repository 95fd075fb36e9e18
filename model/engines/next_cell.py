"""Which draft length is best by batch, how sure that is, and which cell to measure next so that it becomes sure.

The *loss* of a draft length is the share of throughput that it gives away against the best one; it is averaged over the posterior
of the law. A candidate cell is worth what it would lower the expected loss by: each draw is taken in turn for the truth, the cell
is measured in it (with error), the other draws are weighted by how well they explain that, and the best draft lengths are chosen
anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.engines.cells import Cells, Floats
from model.engines.step_law import StepLaw
from model.engines.step_terms import PLAIN, logarithms

MOST_CANDIDATES = 400
SCALINGS = 12
"""Steps of the symmetric scaling to unit sums; the error falls by about half in each."""


class BestLength(NamedTuple):
    """Best draft length at one number of running sequences."""

    sequences: float
    draft_length: int
    probability: float
    """Probability that it is the best one [-]."""
    loss: float
    """Expected share of throughput lost against the best draft length [-]."""
    ties: tuple[int, ...]
    """Draft lengths whose expected loss is at most `TIE` larger."""


TIE = 0.01
"""Largest difference of expected losses of draft lengths that count as equal [-]."""
CLOSE = 0.1
"""Share of the possible reduction of the loss by which candidates may differ and count as equally good [-]."""
RESOLVED = 0.001
"""Difference of expected losses below which candidates count as equally good: the draws do not resolve it [-]."""


@dataclass(frozen=True)
class Candidate:
    """A cell that could be measured."""

    sequences: float
    draft_length: int
    loss: float
    """Expected loss over all numbers of running sequences after measuring it, a mean [-]."""
    spread: float
    """Relative uncertainty (standard deviation) of all predictions after measuring it, a mean [-]."""
    tells: tuple[tuple[str, float], ...]
    """Coefficients that it would determine best, with the share of their uncertainty that it removes [-]."""


@dataclass(frozen=True, eq=False)
class CellAdvice:
    """What is known of the best draft lengths, and candidates for the next cell, the best one first.

    The best cell lowers the expected loss most; of cells that lower it about as much, it leaves the least uncertainty.
    """

    choices: tuple[BestLength, ...]
    candidates: tuple[Candidate, ...]

    spread: float
    """Relative uncertainty (standard deviation) of all predictions now, a mean [-]."""

    @property
    def loss(self) -> float:
        """Expected loss of today's choices, a mean over the numbers of running sequences [-]."""
        return float(np.mean([each.loss for each in self.choices]))


def advise(
    law: StepLaw, sequences: tuple[float, ...], draft_lengths: tuple[int, ...], *, draft_passes: int | None = None
) -> CellAdvice:
    """Return today's choices and the cells worth measuring.

    Parameters
    ----------
    sequences, draft_lengths
        Numbers of running sequences of interest, and draft lengths to choose from (0: plain decoding).
    draft_passes
        Passes per draft: 1 for parallel drafts; default: one per drafted token.
    """
    if not sequences or not draft_lengths or len(sequences) * len(draft_lengths) > MOST_CANDIDATES:
        raise ParameterError(
            f"sequences and draft lengths must be at least one each and at most {MOST_CANDIDATES} pairs, got"
            f" {len(sequences)} x {len(draft_lengths)}"
        )
    grid = np.array([(float(number), length) for number in sequences for length in draft_lengths])
    passes = None if draft_passes is None else np.minimum(grid[:, 1], draft_passes)
    cells = _with_lengths(law, Cells.of(law.unit, grid[:, 0], grid[:, 1], draft_passes=passes))
    rates = _rates(law, cells).reshape(-1, len(sequences), len(draft_lengths))
    losses = 1 - rates / rates.max(axis=2, keepdims=True)
    expected = losses.mean(axis=0)
    best = expected.argmin(axis=1)
    winners = rates.argmax(axis=2)
    choices = tuple(
        BestLength(
            sequences[row], draft_lengths[best[row]], float(np.mean(winners[:, row] == best[row])), float(expected[row, best[row]]),
            tuple(length for column, length in enumerate(draft_lengths) if expected[row, column] <= expected[row, best[row]] + TIE),
        )
        for row in range(len(sequences))
    )  # fmt: skip
    values = np.log(law.draws_of(cells))
    after, spread, tells = _after(law, values, losses)
    order = _best_first(after, spread, float(expected.min(axis=1).mean()))
    found = tuple(Candidate(float(grid[i, 0]), int(grid[i, 1]), float(after[i]), float(spread[i]), tells[i]) for i in order)
    return CellAdvice(choices, found, float(values.std(axis=0).mean()))


def _best_first(losses: Floats, spreads: Floats, now: float) -> NDArray[np.int_]:
    """Order of candidates by the expected loss after measuring them; those about as good as the best are first, by uncertainty.

    Losses of a few hundred draws do not distinguish similar cells: of these, the one that tells most about all others is best.
    """
    close = losses <= losses.min() + max(CLOSE * (now - losses.min()), RESOLVED)
    return np.lexsort((losses, np.where(close, spreads, np.inf)))


def _with_lengths(law: StepLaw, cells: Cells) -> Cells:
    """The cells, with the acceptance lengths of the law's own cells where the law fits no rate."""
    if law.acceptance or "acceptance_rate" in law.coefficients:
        return cells
    missing = sorted({*cells.draft_length} - {0.0})
    if missing:
        raise ParameterError(
            f"{law.name} says no acceptance for draft_length {missing[0]:g}; add a drafted cell with mean_acceptance_length, or"
            " --acceptance"
        )
    return cells


def _rates(law: StepLaw, cells: Cells) -> Floats:
    """Relative throughput by draw and cell: at one number of running sequences only ratios matter."""
    values = law.draws_of(cells)
    if law.unit == "output_tokens_per_s":
        return values
    if law.unit == "tpot_ms":
        return 1 / values
    return law.acceptance_lengths(cells, law.draws) / values


def _after(law: StepLaw, values: Floats, losses: Floats) -> tuple[Floats, Floats, list[tuple[tuple[str, float], ...]]]:
    """Expected loss, and uncertainty of all predictions, after measuring each cell, and the coefficients that it would determine
    best."""
    noise, count = law.draws["noise"], values.shape[0]
    flat = losses.reshape(count, -1)
    names = [name for name in law.coefficients if np.std(law.draws[name]) > 0]
    logs = np.stack([logarithms(law.draws[name]) if name not in PLAIN else law.draws[name] for name in names], axis=1)
    spread = logs.std(axis=0)
    after, spreads, tells = np.empty(values.shape[1]), np.empty(values.shape[1]), []
    # All that is averaged over the draws, side by side: one product of matrices for each cell.
    parts = [flat, centred := values - values.mean(axis=0), centred**2, logs, logs**2]
    averaged, ends = np.hstack(parts), np.cumsum([part.shape[1] for part in parts])[:-1]
    for cell in range(values.shape[1]):
        then, around, around_square, mean, mean_square = np.split(_weights(values[:, cell], noise) @ averaged, ends, axis=1)
        after[cell] = then.reshape(count, *losses.shape[1:]).min(axis=2).mean()
        spreads[cell] = np.sqrt(np.maximum(around_square - around**2, 0.0)).mean()
        left = np.sqrt(np.maximum(mean_square - mean**2, 0.0)).mean(axis=0)
        removed = 1 - left / spread
        tells.append(tuple((names[i], float(removed[i])) for i in np.argsort(-removed)[:3] if removed[i] > 0.05))
    return after, spreads, tells


def _weights(values: Floats, noise: Floats) -> Floats:
    """Weights of all draws after a measurement that comes from each of them; shape (draws, draws), rows and columns sum to 1.

    Doubly stochastic, so that the mean over all measurements is what is known now: measuring never raises an expected loss.
    """
    # The floor keeps few draws from pretending to certainty.
    variance = noise**2 + 0.005**2
    both = variance[:, None] + variance[None, :]
    weights = np.exp(-((values[:, None] - values[None, :]) ** 2) / both) / np.sqrt(both)
    scale = np.ones(len(values))
    for _ in range(SCALINGS):  # of the rows and columns alike: the matrix is symmetric
        scale /= np.sqrt(scale * (weights @ scale))
    return np.asarray(scale[:, None] * weights * scale)


def confounded(law: StepLaw) -> list[tuple[str, str]]:
    """Pairs of coefficients that the cells cannot tell apart: their draws are correlated by more than .8 in size."""
    names = [name for name in law.coefficients if np.std(law.draws[name]) > 0 and name not in PLAIN]
    if len(names) < 2:
        return []
    logs = np.stack([logarithms(law.draws[name]) for name in names])
    matrix = np.asarray(np.corrcoef(logs))
    return [(names[i], names[j]) for i in range(len(names)) for j in range(i) if abs(matrix[i, j]) > 0.8]
