"""When one pass that drafts all tokens beats a pass for each: closed forms, and the acceptance at which both are equally fast.

A chain of K passes of a draft head takes K c, a parallel draft of any length one pass, c' (both in passes of the target over one
token). A parallel draft does not know its own earlier tokens, so its acceptance rate is lower. Its drafts cost the same at every
length, so its best length is the longest one if a wide verification is free, and never below that of a chain with the same
acceptance.

P-EAGLE [Hui2026] is a parallel draft, EAGLE-3 a chain; their published best lengths are 7 and 3.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Hui2026] vLLM blog, 2026-03-13: P-EAGLE, parallel drafting of GPT-OSS 20B.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.width_curve import CurveLike, as_curve
from model.methods.speculative import theory

Floats = NDArray[np.float64]


def parallel_speedup(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike, *, verify_cost: CurveLike | None = None
) -> Floats:
    """Speed-up of parallel drafts over plain decoding, for many tokens: S = E[N] / (c' + 1), and 1 without drafts.

    E[N] as in Eq. 1 of [Leviathan2023]; `cost_ratio` (c') is the time of the draft's only pass. With `verify_cost` the 1 is
    t(gamma + 1) / t(1).

    >>> round(float(parallel_speedup(0.79, 3, 0.75 / 6.39)), 4), round(float(theory.speedup(0.79, 3, 0.75 / 6.39)), 4)
    (2.6018, 2.1501)
    """
    gamma = checks.whole_array("draft_length", draft_length, 0)
    once = checks.array("cost_ratio", cost_ratio, 0) * (gamma > 0)
    verify = np.asarray(1.0) if verify_cost is None else as_curve(verify_cost).relative(gamma + 1)
    return np.asarray(theory.expected_tokens(acceptance_rate, gamma) / (once + verify))


def best_parallel(
    acceptance_rate: ArrayLike, cost_ratio: ArrayLike, longest: int, *, verify_cost: CurveLike | None = None
) -> tuple[NDArray[np.int64], Floats]:
    """Best draft length up to `longest`, the smaller in a tie, and its `parallel_speedup`.

    >>> length, speed = best_parallel(0.6, 0.2, 7)
    >>> int(length), round(float(speed), 3)
    (7, 2.048)
    """
    checks.whole("longest", longest, 0, checks.MAX_TOKENS)
    return theory.best_draft_length(
        lambda gamma: parallel_speedup(acceptance_rate, gamma, cost_ratio, verify_cost=verify_cost), longest
    )


def best_chain(
    acceptance_rate: ArrayLike, cost_ratio: ArrayLike, longest: int, *, verify_cost: CurveLike | None = None
) -> tuple[NDArray[np.int64], Floats]:
    """Best draft length of a chain up to `longest`, the smaller in a tie, and its speed-up (Theorem 3.8 of [Leviathan2023])."""
    checks.whole("longest", longest, 0, checks.MAX_TOKENS)
    return theory.best_draft_length(
        lambda gamma: theory.speedup(acceptance_rate, gamma, cost_ratio, verify_cost=verify_cost), longest
    )


def break_even_acceptance(
    acceptance_rate: ArrayLike, cost_ratio: ArrayLike, longest: int, *, parallel_cost_ratio: ArrayLike | None = None
) -> Floats:
    """Acceptance rate at which a parallel draft is as fast as a chain with `acceptance_rate`, each at its best length.

    The parallel draft's best length is `longest` (K), so the root solves 1 + b + ... + b^K = (1 + c') S*, with the chain's best
    speed-up S*. Without a bound on K it is b = 1 - 1 / ((1 + c') S*). Where the right side is above K + 1, no parallel draft
    reaches the chain: nan. If the chain does not pay (S* = 1), neither need the parallel draft, whose rate then solves the same
    equation with S* = 1.

    Parameters
    ----------
    acceptance_rate, cost_ratio
        Of the chain: acceptance rate, and time of a pass relative to a pass of the target over one token (a verification of any
        width takes as long).
    longest
        Longest draft of both.
    parallel_cost_ratio
        Time of the parallel draft's pass; by default that of a pass of the chain.

    >>> round(float(break_even_acceptance(0.8, 0.1, 7)), 4)  # a chain of at most 7 passes is as fast as one pass with rate .64
    0.6426
    >>> float(break_even_acceptance(0.8, 0.0, 7)), float(break_even_acceptance(0.95, 0.01, 3, parallel_cost_ratio=0.5))
    (0.8, nan)
    """
    checks.whole("longest", longest, 1, checks.MAX_TOKENS)
    speed = best_chain(acceptance_rate, cost_ratio, longest)[1]
    once = checks.array("parallel_cost_ratio", cost_ratio if parallel_cost_ratio is None else parallel_cost_ratio, 0)
    needed = np.asarray((1 + once) * speed)
    # Rounding may leave a free draft, or one that is always right, just above K + 1.
    reached = needed <= (longest + 1) * (1 + 1e-14)
    rate = theory.acceptance_from_length(np.clip(needed, 1.0, longest + 1.0), longest)
    return np.where(reached, rate, np.nan)
