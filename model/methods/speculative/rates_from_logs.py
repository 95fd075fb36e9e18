"""Acceptance rates from logs of rounds: estimates with confidence intervals, and tests of the i.i.d. assumption.

A log has, for each output position of each request, the number of tokens of a round whose draft starts there (including the
target's own, so at least 1), as in `model.methods.speculative.dependent_acceptance.tokens_of_rounds`. A replay with drafts of gamma
tokens gives rounds: one that starts at s drafts min(gamma, l - 1 - s) tokens, accepts n of them, and tests n + 1, or all of them if
all are accepted. The *first-token outcome* of a position is 1 if the first token of a draft that starts there is accepted, else 0.

[Leviathan2023] assumes i.i.d. outcomes with rate alpha (Section 3.1). Three tests check parts of this: `lag_correlation` tests the
correlation of neighbours around the mean of all requests, so it also detects easy and hard requests; `runs_test` tests the order
within each request, at any rate; `geometric_test` tests the distribution of accepted lengths. `dependence` gives the effect on the
speed-up.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Wald1940] A. Wald, J. Wolfowitz. On a Test Whether Two Samples are from the Same Population. Ann. Math. Statist. 11(2), 1940.
[Cochran1977] W. G. Cochran. Sampling Techniques, 3rd edition. Wiley, 1977.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.methods.speculative.theory import draft_runs, target_runs, tokens_pmf
from model.outcomes.intervals import LEVEL, half_width, wilson

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEWEST = 5
"""Smallest expected number of rounds in a cell of the chi-square test (the usual rule)."""


class EstimatedRates(NamedTuple):
    """Rates with Wilson's 95 % interval for independent trials; arrays of one shape, nan without trials."""

    rate: Floats
    low: Floats
    high: Floats
    trials: Integers


def rates(successes: ArrayLike, trials: ArrayLike) -> EstimatedRates:
    """Rates and intervals from counts, element by element.

    >>> found = rates([37, 0], [50, 0])
    >>> found.rate.tolist(), [round(float(end[0]), 4) for end in (found.low, found.high)]
    ([0.74, nan], [0.6045, 0.8413])
    """
    tried = checks.whole_array("trials", trials, 0)
    kept = checks.whole_array("successes", successes, 0)
    if np.any(kept > tried):
        given = f"{checks.shown(successes)} of {checks.shown(trials)}"
        raise checks.ParameterError(f"successes must be at most the trials, got {given}")
    rate = np.where(tried > 0, kept / np.maximum(tried, 1), np.nan)
    low, high = (np.asarray(end) for end in wilson(rate, np.maximum(tried, 1)))
    return EstimatedRates(rate, low, high, tried.astype(np.int64))


def ratio_interval(successes: ArrayLike, trials: ArrayLike) -> tuple[float, float]:
    """95 % interval of sum(successes) / sum(trials) if only requests are independent; both of shape (requests,).

    Ratio estimator, Eq. 2.46 of [Cochran1977] without its correction for finite populations. Trials of one request are dependent,
    so Wilson's interval is too narrow. nan for fewer than two requests, or without trials.

    >>> [round(end, 3) for end in ratio_interval([9, 8, 2, 1], [10, 10, 10, 10])]  # of 20 in 40, Wilson's is .352 to .648
    [0.0, 1.0]
    """
    kept, tried = checks.whole_array("successes", successes, 0), checks.whole_array("trials", trials, 0)
    if kept.ndim != 1 or kept.shape != tried.shape or np.any(kept > tried):
        raise checks.ParameterError(
            "successes and trials must be lists of the same length, a number for each request, and successes at most trials"
        )
    if kept.size < 2 or not tried.any():
        return float("nan"), float("nan")
    rate = kept.sum() / tried.sum()
    deviation = np.sqrt(np.square(kept - rate * tried).sum() / (kept.size - 1)) / tried.mean()
    half = float(half_width(deviation, kept.size))
    return max(float(rate) - half, 0.0), min(float(rate) + half, 1.0)


# --- Rounds ---------------------------------------------------------------------------------------------------------


class ReplayedRounds(NamedTuple):
    """Replayed rounds of all requests, one after another; arrays of shape (rounds,)."""

    draft_length: int
    request: Integers
    start: Integers
    drafted: Integers
    accepted: Integers

    @property
    def tested(self) -> Integers:
        """Tested tokens of each round: the accepted tokens and the first rejected one."""
        return np.minimum(self.accepted + 1, self.drafted)

    def of_requests(self) -> tuple[Integers, Integers]:
        """Accepted and tested tokens of each request, for `ratio_interval`; shape (requests,)."""
        accepted, tested = (np.bincount(self.request, weights=each) for each in (self.accepted, self.tested))
        return accepted.astype(np.int64), tested.astype(np.int64)


def replay(logs: Sequence[ArrayLike], draft_length: int) -> ReplayedRounds:
    """Replay the logs with drafts of this length, each from its first to its last position.

    >>> played = replay([[3, 9, 9, 1, 4, 9]], 3)
    >>> played.start.tolist(), played.accepted.tolist(), played.drafted.tolist()
    ([0, 3, 4], [2, 0, 1], [3, 2, 1])
    """
    checks.whole("draft_length", draft_length, 1)
    rounds: list[tuple[int, int, int, int]] = []
    for request, log in enumerate(_checked(logs)):
        lengths, at = log.tolist(), 0
        while at < len(lengths):
            drafted = min(draft_length, len(lengths) - 1 - at)
            accepted = min(lengths[at] - 1, drafted)
            rounds.append((request, at, drafted, accepted))
            at += accepted + 1
    return ReplayedRounds(draft_length, *np.array(rounds, dtype=np.int64).T)


def accepted_of_tested(replayed: ReplayedRounds) -> EstimatedRates:
    """Accepted over tested tokens of all rounds: the maximum likelihood estimate of alpha for i.i.d. outcomes.

    For i.i.d. outcomes accepted - alpha tested has mean zero for any rule that ends rounds and sequences, because earlier outcomes
    alone decide which tokens are tested.

    >>> float(accepted_of_tested(replay([[3, 9, 9, 1, 4, 9]], 3)).rate)  # 3 of 5
    0.6
    """
    return rates(replayed.accepted.sum(), replayed.tested.sum())


def accepted_of_drafted(replayed: ReplayedRounds) -> EstimatedRates:
    """Accepted over drafted tokens, printed by engines as acceptance rate; at most alpha for i.i.d. outcomes.

    Equals (alpha + ... + alpha^gamma) / gamma for whole drafts, from Eq. 1 of [Leviathan2023]. Wilson's interval treats tokens
    after a rejection as trials, although they are not tested.

    >>> float(accepted_of_drafted(replay([[3, 9, 9, 1, 4, 9]], 3)).rate)
    0.5
    """
    return rates(replayed.accepted.sum(), replayed.drafted.sum())


class Means(NamedTuple):
    """Mean tokens per round, over rounds and over sequences, each with its 95 % interval (sequences are independent)."""

    draft_length: int
    over_rounds: float
    """Equal weight of all rounds: total tokens over total rounds."""
    rounds_low: float
    rounds_high: float
    over_sequences: float
    """Equal weight of all sequences: mean over sequences of tokens per round."""
    sequences_low: float
    sequences_high: float
    rounds: int
    sequences: int
    sequences_with_half: int
    """Smallest number of sequences that have half of all rounds."""

    @property
    def few_dominate(self) -> bool:
        """True if few sequences dominate: a quarter of them, or less, has half of the rounds."""
        return self.sequences_with_half <= self.sequences / 4


def means(replayed: ReplayedRounds) -> Means:
    """Mean acceptance lengths of replayed rounds, including the target's own token.

    Both means are equal if all sequences are equal. The interval over rounds is that of a ratio, as in `ratio_interval`.

    >>> found = means(replay([[4, 3, 2, 1] * 9, [1, 1]], 3))  # 9 rounds of four tokens, and two of one
    >>> round(found.over_rounds, 3), found.over_sequences, found.sequences_with_half
    (3.455, 2.5, 1)
    """
    rounds = np.bincount(replayed.request)
    tokens = np.bincount(replayed.request, weights=replayed.accepted + 1).astype(np.int64)
    least, most = ratio_interval(rounds, tokens)
    each = tokens / rounds
    half = float(half_width(each.std(ddof=1), each.size)) if each.size > 1 else float("nan")
    mean = float(each.mean())
    largest = np.cumsum(np.sort(rounds)[::-1])
    return Means(
        replayed.draft_length, float(tokens.sum() / rounds.sum()), 1 / most, 1 / least if least > 0 else float("nan"),
        mean, mean - half, mean + half, int(rounds.sum()), rounds.size, int(np.searchsorted(largest, largest[-1] / 2)) + 1,
    )  # fmt: skip


def accepted_of_positions(logs: Sequence[ArrayLike]) -> EstimatedRates:
    """Share of positions at which the first token of a draft that starts there is accepted: the mean of `first_token_outcomes`.

    For i.i.d. outcomes it estimates the same alpha as `accepted_of_tested`, from more trials. A draft head that reads the target's
    features is best directly after a pass of the target; for it this share is above the acceptance rate of its rounds.

    >>> float(accepted_of_positions([[3, 9, 9, 1, 4, 9]]).rate)
    0.8
    """
    held = first_token_outcomes(logs)
    return rates(sum(int(each.sum()) for each in held), sum(each.size for each in held))


def by_draft_position(replayed: ReplayedRounds) -> EstimatedRates:
    """Acceptance rate of the first, second, ... tested token of a draft; shape (gamma,). Theory: all alpha.

    >>> by_draft_position(replay([[3, 9, 9, 1, 4, 9]], 3)).rate.tolist()
    [0.6666666666666666, 1.0, 0.0]
    """
    place = np.arange(replayed.draft_length)[:, None]
    return rates((replayed.accepted > place).sum(axis=1), (replayed.tested > place).sum(axis=1))


def by_output_position(replayed: ReplayedRounds, edges: Sequence[int]) -> EstimatedRates:
    """Acceptance rate of tested tokens by output position, in bins [edge, next edge); shape (edges - 1,). Theory: all alpha.

    >>> by_output_position(replay([[3, 9, 9, 1, 4, 9]], 3), [0, 2, 6]).trials.tolist()
    [2, 3]
    """
    limits = checks.whole_array("edges", edges, 0)
    if limits.ndim != 1 or limits.size < 2 or np.any(np.diff(limits) <= 0):
        raise checks.ParameterError(f"edges must be at least two increasing whole numbers, got {checks.shown(edges)}")
    place = np.arange(replayed.draft_length)[:, None]
    position = replayed.start + place
    tested, accepted = replayed.tested > place, replayed.accepted > place
    counts = (np.histogram(position[mask], limits)[0] for mask in (accepted, tested))
    # numpy's last bin includes its upper edge; this one does not.
    last = (int(np.count_nonzero(position[mask] == limits[-1])) for mask in (accepted, tested))
    kept, tried = (np.append(count[:-1], count[-1] - extra) for count, extra in zip(counts, last, strict=True))
    return rates(kept, tried)


# --- Are they independent? ------------------------------------------------------------------------------------------


def first_token_outcomes(logs: Sequence[ArrayLike]) -> list[Bools]:
    """First-token outcomes of each request at all positions but the last, which is never drafted; shapes (positions - 1,).

    >>> first_token_outcomes([[3, 1, 2, 2]])
    [array([ True, False,  True])]
    """
    return [log[:-1] > 1 for log in _checked(logs)]


class Correlation(NamedTuple):
    """Correlation between outcomes, its standard error under independence, and the two-sided p-value."""

    correlation: float
    standard_error: float
    pairs: int
    p_value: float


def lag_correlation(sequences: Sequence[ArrayLike], lag: int = 1) -> Correlation:
    """Correlation of outcomes `lag` positions apart in one request, around the mean of all requests.

    The standard error is 1 / sqrt(pairs). It is exact for independent outcomes of a known rate, because products of different pairs
    are uncorrelated; estimating the mean shifts the correlation by about 1 / outcomes. nan if all outcomes are equal or there are
    no pairs.

    >>> found = lag_correlation([[1, 0] * 50])
    >>> round(found.correlation, 3), round(found.standard_error, 4)
    (-1.0, 0.1005)
    """
    checks.whole("lag", lag, 1)
    held = _sequences(sequences)
    mean = np.concatenate(held).mean()
    pairs = sum(max(each.size - lag, 0) for each in held)
    spread = mean * (1 - mean)
    if not pairs or not spread:
        return Correlation(float("nan"), float("nan"), pairs, float("nan"))
    product = sum(float(((each[:-lag] - mean) * (each[lag:] - mean)).sum()) for each in held if each.size > lag)
    found, error = float(product / pairs / spread), float(1 / np.sqrt(pairs))
    return Correlation(found, error, pairs, _two_sided(found / error))


class RunsTest(NamedTuple):
    """Number of runs of equal outcomes, its expectation and standard deviation in random order, z and two-sided p-value."""

    runs: int
    expected: float
    deviation: float
    z: float
    p_value: float


def runs_test(sequences: Sequence[ArrayLike]) -> RunsTest:
    """Wald-Wolfowitz runs test of the order of outcomes, given the counts of 0 and 1 in each request; total over all requests.

    If all orders of n = a + b outcomes are equally likely, the number of runs has mean 1 + 2ab/n and variance
    2ab (2ab - n) / (n^2 (n - 1)) [Wald1940]. Requests are independent, so both are summed, and the sum is taken as normal. Fewer
    runs than expected: equal outcomes cluster. nan if no request has both kinds.

    >>> found = runs_test([[letter == "M" for letter in "MMMFFFMMMMFFMMMFFFFFFFMMFMM"]])  # the example of the APA's dictionary
    >>> found.runs, round(found.expected, 3), round(found.z, 3)  # 14 M and 13 F
    (9, 14.481, -2.155)
    """
    found = 0
    expected = variance = 0.0
    for each in _sequences(sequences):
        n, both = each.size, 2.0 * each.sum() * (each.size - each.sum())
        found += 1 + int(np.count_nonzero(np.diff(each)))
        expected += 1 + both / n
        variance += both * (both - n) / (n * n * (n - 1)) if both else 0.0
    deviation = float(np.sqrt(variance))
    z = (found - expected) / deviation if deviation else float("nan")
    return RunsTest(found, float(expected), deviation, float(z), _two_sided(z))


class Geometric(NamedTuple):
    """Observed and expected rounds by accepted length 0, 1, ...; the last cell holds its length and all longer ones."""

    counts: Integers
    expected: Floats
    acceptance_rate: float
    statistic: float
    degrees: int
    p_value: float


def geometric_test(replayed: ReplayedRounds) -> Geometric:
    """Pearson's chi-square test of accepted lengths against the truncated geometric distribution, Section 3.1 of [Leviathan2023].

    Uses rounds that the end of the sequence does not cut. Lengths are truncated at the largest m <= gamma at which every cell
    expects `FEWEST` rounds. alpha is accepted over tested tokens of the truncated rounds, the maximum likelihood estimate for these
    cells, so m + 1 cells leave m - 1 degrees of freedom. nan if none is left.

    >>> found = geometric_test(replay([[1] * 20 + [2, 9] * 10 + [3, 9, 9] * 11], 2))
    >>> found.counts.tolist(), found.degrees
    ([20, 10, 11], 1)
    """
    whole = replayed.accepted[replayed.drafted == replayed.draft_length]
    for longest in range(replayed.draft_length, 0, -1):
        cut = np.minimum(whole, longest)
        tested = np.minimum(cut + 1, longest).sum()
        alpha = float(cut.sum() / tested) if tested else float("nan")
        counts = np.bincount(cut, minlength=longest + 1)
        expected = whole.size * tokens_pmf(alpha, longest) if tested else np.zeros(longest + 1)
        if expected.min() >= FEWEST:
            break
    degrees = longest - 1
    if not degrees or expected.min() < FEWEST:
        return Geometric(counts, expected, alpha, float("nan"), 0, float("nan"))
    from scipy.special import chdtrc

    statistic = float((np.square(counts - expected) / expected).sum())
    return Geometric(counts, expected, alpha, statistic, degrees, float(chdtrc(degrees, statistic)))


def _two_sided(z: float) -> float:
    from scipy.special import ndtr

    return float(2 * ndtr(-abs(z)))


# --- Effect on the speed-up -----------------------------------------------------------------------------------------


class Dependence(NamedTuple):
    """Prediction under independence for drafts of one length, and observation in the logs."""

    draft_length: int
    acceptance_rate: float
    expected_tokens: float
    """Tokens per round for i.i.d. outcomes of this rate."""
    observed_tokens: float
    error: float
    """Relative error of the i.i.d. prediction, expected / observed - 1."""
    low: float
    """95 % interval of `error`."""
    high: float
    expected_speedup: float
    observed_speedup: float


def dependence(
    logs: Sequence[ArrayLike], draft_lengths: Sequence[int], cost_ratio: float, replications: int, rng: np.random.Generator
) -> list[Dependence]:
    """Relative error of the i.i.d. prediction that uses `accepted_of_positions` as alpha, by draft length.

    The prediction is the number of rounds of requests of the same lengths (`model.methods.speculative.theory.target_runs`), and the
    speed-up with draft passes of `cost_ratio`; the observation is that of `replay`. The interval is a percentile bootstrap over
    requests: alpha, prediction and observation are computed anew from each resample. nan for a single request.

    >>> (row,) = dependence([[2, 1] * 500], [1], 0.1, 10, np.random.default_rng(1))  # every second outcome is 1, and tested
    >>> round(row.acceptance_rate, 2), round(row.expected_tokens, 2), row.observed_tokens, round(row.observed_speedup, 3)
    (0.5, 1.5, 2.0, 1.818)
    """
    checks.number("cost_ratio", cost_ratio, 0)
    checks.whole("replications", replications, 1)
    if not len(draft_lengths):
        raise checks.ParameterError("draft_lengths must have at least one length, got none")
    held = _checked(logs)
    positions = np.array([log.size for log in held])
    lengths, kind = np.unique(positions, return_inverse=True)
    accepted, tossed = (np.array([count(each) for each in first_token_outcomes(logs)]) for count in (np.sum, np.size))
    # Multiplicity of each request in each resample; the first row is the original sample.
    drawn = rng.multinomial(len(held), np.full(len(held), 1 / len(held)), size=replications)
    weights = np.vstack([np.ones(len(held)), drawn])
    of_length = np.stack([weights[:, kind == each].sum(axis=1) for each in range(lengths.size)], axis=1)
    alpha = weights @ accepted / np.maximum(weights @ tossed, 1)
    tokens = weights @ positions
    rows = []
    for gamma in draft_lengths:
        played = replay(held, gamma)
        rounds, drafts = (
            weights @ np.bincount(played.request, weights=each) for each in (np.ones(played.start.size), played.drafted)
        )
        predicted = (of_length * target_runs(lengths, alpha[:, None], gamma)).sum(axis=1)
        passes = (of_length[0] * draft_runs(lengths, alpha[0], gamma)).sum()
        errors = rounds / predicted - 1
        ends = np.quantile(errors[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(held) > 1 else np.full(2, np.nan)
        speeds = (
            tokens[0] / (runs[0] + cost_ratio * drafted) for runs, drafted in ((predicted, passes), (rounds, drafts[0]))
        )
        values = (alpha[0], tokens[0] / predicted[0], tokens[0] / rounds[0], errors[0], *ends, *speeds)
        rows.append(Dependence(gamma, *map(float, values)))
    return rows


def _checked(logs: Sequence[ArrayLike]) -> list[Integers]:
    form = "logs must be lists of whole numbers of at least 1, one for each request, with a number for each output position"
    if not len(logs):
        raise checks.ParameterError(f"{form}, got {checks.shown(logs)}")
    held = [checks.whole_array(f"logs[{index}]", log, 1) for index, log in enumerate(logs)]
    for index, log in enumerate(held):
        if log.ndim != 1 or not log.size:
            raise checks.ParameterError(f"{form}; logs[{index}] is {checks.shown(logs[index])}")
    return [log.astype(np.int64) for log in held]


def _sequences(sequences: Sequence[ArrayLike]) -> list[Floats]:
    held = [checks.array(f"sequences[{index}]", each, 0, 1) for index, each in enumerate(sequences)]
    for index, each in enumerate(held):
        if each.ndim != 1 or np.any((each != 0) & (each != 1)):
            given = checks.shown(sequences[index])
            raise checks.ParameterError(f"sequences[{index}] must be a list of outcomes, each 0 or 1, got {given}")
    held = [each for each in held if each.size]
    if not held:
        raise checks.ParameterError("sequences must have at least one outcome, got none; take longer requests")
    return held
