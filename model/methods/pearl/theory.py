"""PEARL in closed form: drafting and verifying at the same time, on units of their own [Liu2024]. A law only: it is not simulated.

Rounds go in lock-step, each as long as the slower of a draft of gamma tokens and a pass of the target. While the first token of a
new draft is verified, the rest of it is drafted (pre-verify); if that token stays, whole drafts are verified while the next ones
are drafted (post-verify), until one token is rejected. Acceptances are independent with one rate.

[Liu2024] T. Liu et al. PEARL: Parallel Speculative Decoding with Adaptive Draft Length. arXiv:2408.11850.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.methods.speculative.theory import sum_of_powers

Floats = NDArray[np.float64]


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Tokens of a round in the long run: (1 - alpha^gamma) / ((1 - alpha) (1 + alpha - alpha^gamma)) [tokens].

    A round that verifies a first token gives one; one that verifies a whole draft gives 1 + alpha + ... + alpha^(gamma-1). Of
    those rounds there are alpha to every 1 - alpha^gamma of the first kind. gamma at alpha = 1, 1 at alpha = 0.

    >>> float(expected_tokens(1, 5)), float(expected_tokens(0, 5)), round(float(expected_tokens(0.8, 5)), 3)
    (5.0, 1.0, 2.284)
    """
    rate, gamma = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("draft_length", draft_length, 1)
    return np.asarray(sum_of_powers(rate, gamma) / (1 + rate - rate**gamma))


def speedup(acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """Speed over plain decoding, for many tokens: `expected_tokens` / max(gamma c, 1); gamma / max(gamma c, 1) at alpha = 1.

    >>> float(speedup(1, 5, 0.2)), float(speedup(1, 5, 0.4)), round(float(speedup(0.8, 5, 0.1)), 3)
    (5.0, 2.5, 2.284)
    """
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    gamma = checks.whole_array("draft_length", draft_length, 1)
    return np.asarray(expected_tokens(acceptance_rate, gamma) / np.maximum(gamma * ratio, 1.0))
