"""Speculative decoding when acceptances are not i.i.d.: expected tokens per round for different kinds of dependence.

In [Leviathan2023] every tested token is accepted with the same probability alpha (Section 3.1, after Definition 3.1). Real drafts
deviate in different ways. Two similar ones change the mean in opposite directions: a rate shared by all tokens of a round, and
correlation between successive outcomes. So each function is named for its mechanism. The draft length is gamma; expectations are
per round [tokens] and include the bonus token.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.methods.speculative.theory import sum_of_powers
from model.outcomes.outcome_laws import Markov

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def expected_tokens_by_draft_position(acceptance_rates: ArrayLike) -> Floats:
    """E[N] = 1 + sum over j of alpha_1 ... alpha_j, where the j-th drafted token, if tested, is accepted with probability alpha_j.

    The last axis of `acceptance_rates` is the position in the draft. At equal mean, falling rates give more tokens than constant
    rates, and rising rates give fewer: the first drafted token is tested most often.

    >>> [round(float(expected_tokens_by_draft_position(rates)), 3) for rates in ([0.9, 0.7], [0.8, 0.8], [0.7, 0.9])]
    [2.53, 2.44, 2.33]
    """
    rates = checks.array("acceptance_rates", acceptance_rates, 0, 1)
    if not rates.shape:
        raise checks.ParameterError(f"acceptance_rates must be a list with a rate for each draft position, got {rates:g}")
    return np.asarray(1 + np.cumprod(rates, axis=-1).sum(axis=-1))


def beta_moments(a: ArrayLike, b: ArrayLike, draft_length: int) -> Floats:
    """Moments E[B], ..., E[B^gamma] of a Beta(a, b) distribution, along a new last axis: products of (a + i) / (a + b + i).

    >>> beta_moments(1, 1, 3).round(4).tolist()
    [0.5, 0.3333, 0.25]
    """
    first, second = checks.array("a", a, 0), checks.array("b", b, 0)
    for name, values in (("a", first), ("b", second)):
        if np.any(values == 0):
            raise checks.ParameterError(f"{name} must be above 0, got 0.0; a constant rate has no Beta distribution")
    checks.whole("draft_length", draft_length, 0)
    step = np.arange(float(draft_length))
    return np.asarray(np.cumprod((first[..., None] + step) / ((first + second)[..., None] + step), axis=-1))


def expected_tokens_shared_rate(moments: ArrayLike) -> Floats:
    """E[N] = 1 + E[B] + ... + E[B^gamma], where all tokens of a round share one random rate with these moments.

    Models easy and hard rounds; never below the i.i.d. value at rate E[B] (Jensen). `beta_moments` gives the moments of a Beta
    distribution; for a sample of rates they are the means of its powers.

    >>> round(float(expected_tokens_shared_rate(beta_moments(8, 2, 5))), 3)  # expected_tokens(0.8, 5) is 3.689
    3.857
    """
    values = checks.array("moments", moments, 0, 1)
    if not values.shape:
        raise checks.ParameterError(f"moments must be a list, E[B], E[B^2] and so on, got {values:g}")
    if np.any(np.diff(values, axis=-1) > 1e-12):
        raise checks.ParameterError(f"moments must not increase, got {checks.shown(moments)}; give E[B], E[B^2], ... in this order")
    power = np.arange(1.0, values.shape[-1] + 1)
    if np.any(values < values[..., :1] ** power - 1e-9):
        raise checks.ParameterError(f"moments must be at least E[B]^j, got {checks.shown(moments)}; no distribution has these")
    return np.asarray(1 + values.sum(axis=-1))


def expected_tokens_markov(
    acceptance_rate: ArrayLike,
    correlation: ArrayLike,
    draft_length: ArrayLike,
    chain: Literal["output", "tested"] = "output",
) -> Floats:
    """E[N] if acceptances form a stationary Markov chain: rate p, correlation rho between neighbours.

    The chain is `model.outcomes.outcome_laws.Markov`. chain="output": one outcome per output position, also for corrected and bonus
    tokens, which are not tested. chain="tested": one outcome per tested token; a bonus token does not advance the chain.
    With a = p + rho (1 - p) after an acceptance, b = p (1 - rho) after a rejection, and w the share of rounds that start after an
    acceptance, E[N] = w (1 + a + ... + a^gamma) + (1 - w) (1 + b (1 + a + ... + a^(gamma-1))). A round that starts after an
    acceptance ends in one with probability a^m, any other with b a^(m-1), for m = gamma + 1 outcomes (output) or gamma (tested), so
    w = p a^(m-1) / ((1 - p) (1 + a + ... + a^(m-1)) + p a^(m-1)).
    A positive correlation lowers the mean, because rounds usually start after a rejection: the opposite effect of a shared rate.

    >>> [round(float(expected_tokens_markov(0.8, 0.4, 4, chain)), 4) for chain in ("output", "tested")]
    [3.1065, 3.2013]
    """
    checks.one_of("chain", chain, ("output", "tested"))
    p = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    law = Markov(p, correlation, name="acceptance_rate")
    a, b = law.after_success, law.after_failure
    gamma = checks.whole_array("draft_length", draft_length, 0)
    outcomes = gamma + 1 if chain == "output" else np.maximum(gamma, 1.0)
    kept = p * a ** (outcomes - 1)
    # Both transition probabilities share the factor 1 - rho, which is cancelled; rho = 1 is the limit.
    start = kept / ((1 - p) * sum_of_powers(a, outcomes) + kept)
    return np.asarray(start * sum_of_powers(a, gamma + 1) + (1 - start) * (1 + b * sum_of_powers(a, gamma)))


def expected_tokens_random_length(acceptance_rate: ArrayLike, length_pmf: ArrayLike) -> Floats:
    """E[N] = (1 - alpha E[alpha^D]) / (1 - alpha), where a round drafts D tokens, independent of their acceptances.

    `length_pmf` has the probabilities of D = 0, 1, ... along its last axis. Never above Eq. 1 of [Leviathan2023] at a whole E[D],
    because E[N] is concave in the draft length. Not for drafts that stop at unsure tokens: their lengths depend on the acceptances,
    and they do better.

    >>> float(expected_tokens_random_length(0.5, [0, 0.5, 0, 0.5]))  # expected_tokens(0.5, 2) is 1.75
    1.6875
    """
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    mass = checks.distributions("length_pmf", length_pmf)
    return np.asarray((mass * sum_of_powers(rate[..., None], np.arange(1.0, mass.shape[-1] + 1))).sum(axis=-1))


# --- Rounds replayed from a log -------------------------------------------------------------------------------------
#
# For a draft head that reads the target's features (EAGLE, MTP) acceptance is not a property of the output position: it depends on
# where the draft started. So its log records, for each start position, the number of tokens of a round.


def tokens_of_rounds(lengths: ArrayLike, draft_length: int, tokens: int | None = None) -> tuple[int, float]:
    """Rounds and tokens per round of a replayed log; the round after one that starts at s starts at s + min(lengths[s], gamma + 1).

    `lengths` has, for each output position, the tokens of a round that starts there (including the bonus token, so at least 1). The
    first round starts at the first position; the last is cut at the end of the log, or at `tokens`.

    >>> tokens_of_rounds([3, 9, 9, 1, 4, 9], 3)
    (3, 2.0)
    """
    log = _log(lengths)
    checks.whole("draft_length", draft_length, 0)
    if tokens is not None:
        checks.whole("tokens", tokens, 1, log.size, "the length of the log")
        log = log[:tokens]
    rounds = _starts(log, draft_length).size
    return rounds, log.size / rounds


def _log(lengths: ArrayLike) -> Integers:
    log = checks.whole_array("lengths", lengths, 1)
    if log.ndim != 1 or not log.size:
        raise checks.ParameterError(f"lengths must be a list, a number for each output position, got {checks.shown(lengths)}")
    return log.astype(np.int64)


def _starts(log: Integers, draft_length: int) -> Integers:
    """Start positions of the rounds."""
    step = np.minimum(log, draft_length + 1).tolist()
    starts, at = [], 0
    while at < len(step):
        starts.append(at)
        at += step[at]
    return np.array(starts, dtype=np.int64)
