"""Bounds of claimed speed-ups of methods that draft and verify concurrently, on separate units."""

from __future__ import annotations

import numpy as np

from model.methods.claim_bounds import ClaimTerms, Limit


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up for any dependence between acceptances: min(gamma, 1/(1 - alpha), 1/c), at least 1.

    Each rejection takes a pass of the target, a pass verifies at most gamma tokens, and each token replaces or confirms a drafted
    one, which took a draft pass on the other unit.

    >>> claim_bound(ClaimTerms({"acceptance_rate": 1, "draft_length": 5, "cost_ratio": 0.4})).value
    2.5
    """
    rate, gamma, ratio = terms.best("acceptance_rate"), terms.best("draft_length"), terms.cost_ratio
    limits = (max(gamma, 1.0), np.inf if rate == 1 else 1 / (1 - rate), 1 / ratio if ratio else np.inf)
    value = float(max(min(limits), 1.0))
    numbers = ", ".join(f"{each:.4g}" for each in limits)
    return Limit(value, f"speed-up <= min(K, 1 / (1 - a), 1 / c) = min({numbers}) = {value:.4g}")
