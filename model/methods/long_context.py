"""Speed-up of drafts in large batches at long contexts, for passes whose time is affine in tokens and in cached positions.

A round of gamma drafted tokens takes gamma draft passes and one pass over gamma + 1 tokens (Eq. 1 of MagicDec [Sadhukhan2025]),
each F + B (w a + c k): F a fixed time (reading the weights, launching), B sequences, w tokens of each, each token a time a, and c
cached positions of each sequence, each read in a time k. A draft with a context budget reads min(c, budget) of them. The speed-up
is then a ratio of two affine functions of B, and of c: monotone in each, with a limit. Arithmetic and reading do not overlap here.

[Sadhukhan2025] R. Sadhukhan et al. MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative
Decoding. ICLR 2025, arXiv:2408.11049.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AffinePass:
    """Time of a pass: `fixed`, and for each sequence `token` per token and `position` per cached position that is read [s].

    >>> float(AffinePass(0.01, 1e-5, 1e-8).seconds(1, 32, 32_000))  # 10 ms, 0.3 ms for 32 tokens, 10.2 ms for the cache
    0.02056
    """

    fixed: float
    token: float
    position: float

    def __post_init__(self) -> None:
        for name in ("fixed", "token", "position"):
            checks.number(name, getattr(self, name), 0)

    def seconds(self, width: ArrayLike, sequences: ArrayLike, context: ArrayLike) -> Floats:
        """Time of a pass over `width` tokens of each of `sequences` sequences, which reads `context` positions of each [s]."""
        return np.asarray(self.fixed + np.asarray(sequences) * self.of_sequence(width, context))

    def of_sequence(self, width: ArrayLike, context: ArrayLike) -> Floats:
        """Part of the time that each sequence adds [s]."""
        return np.asarray(np.asarray(width) * self.token + np.asarray(context) * self.position)


@dataclass(frozen=True)
class LongContextRounds:
    """Rounds of `draft_length` drafted tokens at a context of `context` cached positions.

    Parameters
    ----------
    target, draft
        Times of passes of both; the same for a model that drafts for itself.
    draft_length
        Drafted tokens per round.
    tokens_per_round
        Mean tokens per round [tokens], between 1 and draft_length + 1.
    context
        Cached positions of each sequence.
    context_budget
        Largest number of them that a draft reads; None: all.
    """

    target: AffinePass
    draft: AffinePass
    draft_length: int
    tokens_per_round: float
    context: int
    context_budget: int | None = None

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 1)
        checks.number("tokens_per_round", self.tokens_per_round, 1, self.draft_length + 1)
        checks.whole("context", self.context, 0)
        if self.context_budget is not None:
            checks.whole("context_budget", self.context_budget, 1, self.context, "context")

    @property
    def read_by_draft(self) -> int:
        """Cached positions of each sequence that a draft reads."""
        return self.context if self.context_budget is None else self.context_budget

    def speedup(self, sequences: ArrayLike) -> Floats:
        """Speed-up over plain decoding of the same batch [-]."""
        plain = self.target.seconds(1, sequences, self.context)
        drafts = self.draft_length * self.draft.seconds(1, sequences, self.read_by_draft)
        verify = self.target.seconds(self.draft_length + 1, sequences, self.context)
        return np.asarray(self.tokens_per_round * plain / (drafts + verify))

    @property
    def limit(self) -> float:
        """Speed-up to which ever larger batches tend [-]: that of what each sequence adds to the passes."""
        plain = self.target.of_sequence(1, self.context)
        drafts = self.draft_length * self.draft.of_sequence(1, self.read_by_draft)
        return float(self.tokens_per_round * plain / (drafts + self.target.of_sequence(self.draft_length + 1, self.context)))

    @property
    def rises_with_batch(self) -> bool:
        """True if a larger batch has a larger speed-up: exactly if what a sequence adds to a draft and a token is cheap enough.

        The condition is F_d (a + c k) > F (a_d + b k_d + a): drafts have a larger share of the fixed time of a pass than drafting
        and verifying one token has of what a sequence adds. If a model drafts for itself, it is k (c - b) > a: reading the hidden
        part of a sequence takes longer than computing a token. Neither depends on the draft length, nor on the acceptance.

        >>> own = AffinePass(0.01, 1e-5, 1e-8)
        >>> [LongContextRounds(own, own, 3, 2.9, context, 512).rises_with_batch for context in (1500, 1600)]
        [False, True]
        """
        plain = float(self.target.of_sequence(1, self.context))
        added = float(self.draft.of_sequence(1, self.read_by_draft)) + self.target.token
        return self.draft.fixed * plain > self.target.fixed * added
