"""Law of the accepted length under block verification, for given distributions of the target (p) and the draft model (q).

Block verification (`accept_block` of the algorithm) accepts at least i drafted tokens with probability
w_i = min(w_(i-1) p(x_i) / q(x_i), 1), given the first i drafted tokens. Token-wise verification does so with the product of
min(p(x_j) / q(x_j), 1), which is never larger. So the accepted length depends on how the ratios p / q of a draft vary, and no
acceptance rate determines it.

[Sun2024] Z. Sun et al. Block Verification Accelerates Speculative Decoding. ICLR 2025, arXiv:2403.10444.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.methods.draft_model import MAX_DRAFT
from model.methods.speculative.algorithm import BLOCK, TOKEN, VERIFICATIONS

Floats = NDArray[np.float64]

MOST_DRAFTS = 2_000_000
"""Most different drafts, up to equal weights, that are enumerated at one position."""
_DIGITS = 14
"""Weights that agree to this many decimals are the same weight: they differ by rounding."""


def weights(ratios: ArrayLike, verification: str = BLOCK) -> Floats:
    """Probabilities that at least 1, 2, ... tokens of given drafts are accepted, from p / q of the drafted tokens.

    The last axis is the position in the draft. Section 4 of [Sun2024] for `block`, Algorithm 1 of the same for `token`. Over drafts
    that the draft model samples, their means are the probabilities of these accepted lengths.

    >>> weights([0.5, 2.0, 2.0]).tolist(), weights([0.5, 2.0, 2.0], "token").tolist()
    ([0.5, 1.0, 1.0], [0.5, 0.5, 0.5])
    """
    checks.one_of("verification", verification, VERIFICATIONS)
    found = checks.array("ratios", ratios, 0).astype(np.float64)
    if not found.shape:
        raise checks.ParameterError(f"ratios must be a list with p / q of each drafted token, got {found:g}")
    if verification == TOKEN:
        return np.asarray(np.cumprod(np.minimum(found, 1.0), axis=-1))
    before: Floats | float = 1.0
    for position in range(found.shape[-1]):
        before = found[..., position] = np.minimum(before * found[..., position], 1.0)
    return found


def survival(
    p: ArrayLike, q: ArrayLike, draft_length: int, verification: str = BLOCK, *, start: ArrayLike | None = None
) -> Floats:
    """Probability that a round accepts at least 1, 2, ... `draft_length` tokens, by enumeration of all drafts; shape (gamma,).

    Parameters
    ----------
    p, q
        Distributions of the next token of the target and of the draft model, shape (vocabulary,) if they do not depend on the
        tokens before, or (vocabulary, vocabulary) with a row for each last token.
    verification
        `block` or `token`.
    start
        Distribution of the last token before the round, for distributions by last token.

    Raises
    ------
    ParameterError
        For drafts of more than `MOST_DRAFTS` different weights.

    The example of Section 2 of [Sun2024]: 10/9 accepted tokens with token-wise verification and 11/9 with block verification.

    >>> p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    >>> [round(9 * float(survival(p, q, 2, how).sum()), 9) for how in ("token", "block")]
    [10.0, 11.0]
    """
    checks.one_of("verification", verification, VERIFICATIONS)
    checks.whole("draft_length", draft_length, 0, MAX_DRAFT)
    target, draft = checks.distributions("p", p), checks.distributions("q", q)
    size = target.shape[-1]
    if target.shape != draft.shape or target.shape not in ((size,), (size, size)):
        raise checks.ParameterError(
            f"p and q must have one shape, (vocabulary,) or (vocabulary, vocabulary), got {target.shape} and {draft.shape}"
        )
    by_last = target.ndim == 2
    if by_last == (start is None):
        need = "be given for distributions by last token" if by_last else "be left out for distributions without a last token"
        raise checks.ParameterError(f"start must {need}")
    first = np.ones(1) if start is None else checks.distributions("start", start)
    target, draft = np.atleast_2d(target), np.atleast_2d(draft)
    if first.shape != target.shape[:1]:
        raise checks.ParameterError(f"start must have {len(target)} probabilities, one for each last token, got {first.shape}")
    ratios = np.divide(target, draft, out=np.zeros_like(target), where=draft > 0)
    last = np.flatnonzero(first)
    chance, weight = first[last], np.ones(last.size)
    found = np.zeros(draft_length)
    for position in range(draft_length):
        if last.size * size > MOST_DRAFTS:
            raise checks.ParameterError(
                f"draft_length must be at most {position} for distributions of {size} tokens, whose drafts are enumerated, got"
                f" {draft_length}; take fewer tokens, or average `weights` over sampled drafts"
            )
        more = np.minimum(ratios[last], 1.0) if verification == TOKEN else ratios[last]
        weight = np.minimum(weight[:, None] * more, 1.0).ravel()
        chance = (chance[:, None] * draft[last]).ravel()
        last = np.tile(np.arange(size) if by_last else np.zeros(size, dtype=np.intp), last.size)
        found[position] = chance @ weight
        # A draft of weight 0 stays at 0, and drafts with the same last token and weight have the same future.
        kept = (chance > 0) & (weight > 0)
        pairs, groups = np.unique(np.stack([last[kept], weight[kept].round(_DIGITS)]), axis=1, return_inverse=True)
        chance = np.bincount(groups.ravel(), weights=chance[kept], minlength=pairs.shape[1]).astype(np.float64)
        last, weight = pairs[0].astype(np.intp), pairs[1]
    return found


def survival_bounds(acceptance_rate: ArrayLike, draft_length: int) -> tuple[Floats, Floats]:
    """Bounds of the probabilities that block verification accepts at least 1, 2, ... tokens, along a new last axis.

    All that a token-wise `acceptance_rate` (alpha), the same in all contexts, tells: at least alpha^i, which a draft that always
    proposes the same token reaches, and at most alpha, because w_i is at most min(p(x_i) / q(x_i), 1).

    >>> [bound.tolist() for bound in survival_bounds(0.5, 3)]
    [[0.5, 0.25, 0.125], [0.5, 0.5, 0.5]]
    """
    checks.whole("draft_length", draft_length, 0, MAX_DRAFT)
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)[..., None]
    low = np.asarray(rate ** np.arange(1.0, draft_length + 1))
    return low, np.broadcast_to(rate, low.shape).copy()
