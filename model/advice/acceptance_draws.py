"""What is known of the acceptance of a draft, as draws of its conditional rates by draft position.

A number, a range, rates by position, an acceptance record of an engine's log, or the rate that a step law has fitted: all become a
table of rates, from which follow the mean acceptance lengths of any draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from model.base import checks
from model.base.checks import ParameterError
from model.engines.cells import Floats
from model.engines.step_law import StepLaw
from model.logs.acceptance_record import AcceptanceRecord
from model.methods.speculative.theory import reported_acceptance
from model.outcomes import random_streams

DRAWS = 256
"""Draws of every kind; step laws have as many."""
MOST_POSITIONS = 64
"""Draft positions of rates that hold at any position."""


@dataclass(frozen=True, eq=False)
class AcceptanceDraws:
    """Conditional acceptance rates by draft position.

    Parameters
    ----------
    point
        Rates that are most likely; shape (positions,).
    draws
        Draws of what is known of them; shape (draws, positions).
    kind
        `measured`, `published` or `assumed`.
    source, text
        Where the rates come from, and the rates as printed text.
    limit
        Largest draft length that the rates are known for; None: any.
    """

    point: Floats
    draws: Floats
    kind: str
    source: str
    text: str
    limit: int | None = None

    def lengths(self, draft_lengths: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean acceptance lengths, bonus token counted: those most likely, of shape (lengths,), and draws, of shape (draws,
        lengths).

        >>> print(constant(0.8).lengths([0, 1, 4])[0].round(4))
        [1.     1.8    3.3616]
        """
        longest = max(draft_lengths, default=0)
        if longest > self.point.size:
            raise ParameterError(
                f"draft_length must be at most {self.point.size}, for which {self.source} has acceptance, got {longest}"
            )
        return self._lengths(self.point[None], draft_lengths)[0], self._lengths(self.draws, draft_lengths)

    @staticmethod
    def _lengths(rates: Floats, draft_lengths: Sequence[int]) -> Floats:
        emitted = np.concatenate([np.ones((len(rates), 1)), 1 + np.cumsum(np.cumprod(rates, axis=1), axis=1)], axis=1)
        return np.asarray(emitted[:, list(draft_lengths)])

    def scaled_to(self, rate: float) -> AcceptanceDraws:
        """These rates with the first one moved to `rate`, and the others by as much in their logits; without uncertainty."""
        logits = special.logit(np.clip(self.point, 1e-9, 1 - 1e-9))
        moved = special.expit(logits - logits[0] + special.logit(np.clip(rate, 1e-9, 1 - 1e-9)))
        return replace(self, point=moved, draws=moved[None])


def constant(low: float, high: float | None = None, *, seed: int = 0) -> AcceptanceDraws:
    """One rate at every position; with `high`, a uniform distribution between both."""
    for rate in (low, high):
        if rate is not None:
            checks.number("acceptance", rate, 0, 1)
    top = low if high is None else high
    if top < low:
        raise ParameterError(f"acceptance must be a range LOW..HIGH, got {low:g}..{top:g}; write {top:g}..{low:g}")
    spread = _shuffled(low + (top - low) * (np.arange(DRAWS) + 0.5) / DRAWS, seed)
    text = f"{low:g}" if top == low else f"{low:g} to {top:g}"
    return AcceptanceDraws(_at_all((low + top) / 2)[0], _at_all(spread), "assumed", "--acceptance", text)


def match_rates(low: float, high: float | None = None, *, seed: int = 0) -> Floats:
    """Draws of a match rate, independent of those of an acceptance: one value, or with `high` a uniform distribution between both.

    >>> match_rates(0.5).tolist(), bool(abs(match_rates(0.4, 0.6).mean() - 0.5) < 1e-9)
    ([0.5], True)
    """
    for rate in (low, high):
        if rate is not None:
            checks.number("match_rate", rate, 0, 1)
    if high is None or high == low:
        return np.array([float(low)])
    if high < low:
        raise ParameterError(f"match_rate must be a range LOW..HIGH, got {low:g}..{high:g}; write {high:g}..{low:g}")
    values = low + (high - low) * (np.arange(DRAWS) + 0.5) / DRAWS
    return np.asarray(random_streams.stream(seed, "match rate", 0).permutation(values))


def by_position(rates: Sequence[float]) -> AcceptanceDraws:
    """Given conditional rates by draft position."""
    found = checks.array("acceptance_by_position", rates, 0, 1)
    if not found.size or found.size > MOST_POSITIONS:
        raise ParameterError(f"acceptance_by_position must have 1 to {MOST_POSITIONS} rates, got {found.size}")
    return AcceptanceDraws(found, found[None], "assumed", "--acceptance-by-position", _listed(found), found.size)


def of_record(record: AcceptanceRecord, name: str, *, seed: int = 0) -> AcceptanceDraws:
    """Rates of an engine's log: by draft position where it prints them, else the constant rate of its mean length.

    Draws are of the rates' sampling errors where the number of drafts is known (a beta distribution for each position).
    """
    rates = np.array(record.known_rates)
    random = np.random.Generator(np.random.Philox(seed))
    if rates.size:
        draws = rates[None] + np.zeros((DRAWS, 1))
        if record.drafts and record.survival is not None:
            tested = record.drafts * np.array([1.0, *record.survival[: rates.size - 1]])
            draws = random.beta(rates * tested + 0.5, (1 - rates) * tested + 0.5, size=(DRAWS, rates.size))
        return AcceptanceDraws(rates, draws, "measured", name, _listed(rates), rates.size)
    if not record.draft_length or record.mean_acceptance_length is None:
        raise ParameterError(
            f"{name} has neither acceptance by draft position nor a mean length at one draft length; give --acceptance"
        )
    length, most = record.mean_acceptance_length, record.draft_length
    lengths = np.full(DRAWS, length)
    if record.drafts:
        # The accepted tokens of a draft lie between 0 and K: their standard deviation is at most K / 2.
        lengths = length + random.standard_normal(DRAWS) * most / 2 / np.sqrt(record.drafts)
    inside = np.clip(np.concatenate([[length], lengths]), 1 + 1e-6, most + 1 - 1e-6)
    found = np.asarray(reported_acceptance("vllm", most, length=inside))
    text = f"{found[0]:.3g} at every position, assumed: gives the measured {length:.3g} tokens per step at draft length {most}"
    return AcceptanceDraws(_at_all(found[0])[0], _at_all(found[1:]), "measured", name, text)


def of_law(law: StepLaw) -> AcceptanceDraws | None:
    """Rates that a law was given, or that were fitted with it; None if it has none."""
    name = f"step law {law.name}"
    if law.acceptance:
        found = np.array(law.acceptance)
        return AcceptanceDraws(found, found[None], "measured", name, _listed(found), found.size)
    if "acceptance_rate" not in law.coefficients:
        return None
    if law.cells is None:
        return None  # a prior says nothing of this model's draft
    at = np.arange(MOST_POSITIONS)

    def rates(rate: Floats, trend: Floats) -> Floats:
        return np.asarray(special.expit(special.logit(rate)[:, None] + trend[:, None] * at))

    point = rates(*(np.array([law.coefficients.get(name, 0.0)]) for name in ("acceptance_rate", "acceptance_trend")))[0]
    draws = rates(law.draws["acceptance_rate"], law.draws.get("acceptance_trend", np.zeros(len(law.draws["acceptance_rate"]))))
    longest = int(law.cells.draft_length.max())
    return AcceptanceDraws(point, draws, "measured", name, f"fitted with the law: {_listed(point[: max(longest, 1)])}")


def _at_all(rates: float | Floats) -> Floats:
    """A rate, or draws of it, at every position; shape (draws, positions)."""
    return np.repeat(np.atleast_1d(np.asarray(rates, dtype=np.float64))[:, None], MOST_POSITIONS, axis=1)


def _shuffled(values: Floats, seed: int) -> Floats:
    """Values in random order, so that they are independent of the draws of a law."""
    return np.asarray(np.random.Generator(np.random.Philox(seed)).permutation(values))


def _listed(rates: Floats) -> str:
    shown = ", ".join(f"{each:.3g}" for each in rates[:8])
    return shown + (", ..." if rates.size > 8 else "") + (" by draft position" if rates.size > 1 else "")
