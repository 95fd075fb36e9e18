"""Largest batch for which speculative decoding is faster than plain decoding.

A pass over one token of each sequence is memory-bound and leaves arithmetic units idle, so verifying more tokens is almost free. A
large batch is compute-bound, and verification takes more time. Times are read from a measured table by batch
(`model.costs.width_curve.PassTimes`). The formulas hold for continuous batching of long sequences; the gain is slightly smaller for
a given number of tokens (`model.methods.speculative.theory.predict`), and a static batch waits for its slowest sequence
(`model.methods.speculative.static_batches`).

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.width_curve import PassTimes
from model.methods.speculative.theory import best_draft_length, expected_tokens

Floats = NDArray[np.float64]


def batched_speedup(
    acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    target: PassTimes,
    draft: PassTimes,
    batch: ArrayLike,
    context: ArrayLike,
) -> Floats:
    """Speed-up over plain decoding of `batch` sequences at once: E[N] t(B, 1) / (gamma t_draft(B, 1) + t(B, gamma + 1)).

    Theorem 3.8 of [Leviathan2023] with measured pass times by batch, tokens per sequence and context, for continuous batching of
    long sequences.

    >>> target = PassTimes([1, 32], [1, 4], [1024], [[[10.0], [10.5]], [[12.0], [30.0]]])
    >>> draft = PassTimes([1, 32], [1], [1024], [[[1.0]], [[1.2]]])
    >>> [round(float(batched_speedup(0.8, 3, target, draft, b, 1024)), 2) for b in (1, 32)]
    [2.19, 1.05]
    """
    gamma = checks.whole_array("draft_length", draft_length, 0)
    time = gamma * draft(batch, 1, context) + target(batch, gamma + 1, context)
    return np.asarray(expected_tokens(acceptance_rate, gamma) * target(batch, 1, context) / time)


@dataclass(frozen=True)
class BatchGain:
    """Best draft length and its speed-up for each batch, and the largest batch up to which drafting is faster (0: none)."""

    batches: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    speedups: tuple[float, ...]
    largest: int


def largest_batch(acceptance_rate: float, target: PassTimes, draft: PassTimes, context: float) -> BatchGain:
    """Find the largest batch up to which speculative decoding is faster, over the batches and widths of the target's table.

    Drafting must be faster than plain decoding, at its best draft length, for all batches of the table up to `largest`.

    >>> target = PassTimes([1, 32, 64], [1, 4], [1024], [[[10.0], [10.5]], [[12.0], [30.0]], [[15.0], [50.0]]])
    >>> draft = PassTimes([1, 64], [1], [1024], [[[1.0]], [[1.5]]])
    >>> largest_batch(0.8, target, draft, 1024).largest
    32
    """
    checks.number("acceptance_rate", acceptance_rate, 0, 1)
    batches = np.asarray(target.batches)
    longest = int(target.widths[-1]) - 1
    lengths, speeds = best_draft_length(lambda g: batched_speedup(acceptance_rate, g, target, draft, batches, context), longest)
    unbroken = int(np.logical_and.accumulate(speeds > 1).sum())
    largest = int(batches[unbroken - 1]) if unbroken else 0
    return BatchGain(tuple(batches.astype(int).tolist()), tuple(lengths.tolist()), tuple(speeds.tolist()), largest)
