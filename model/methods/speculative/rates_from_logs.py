"""Acceptance rates from logs of rounds: estimates with their intervals, and whether acceptances are the theory's coins.

A log has, for each output position of each request, how many tokens a round gives if its draft starts there (the target's own
included, so at least 1), as in `model.methods.speculative.dependent_acceptance.tokens_of_rounds`. Played with drafts of gamma
tokens it gives rounds: one that starts at s drafts min(gamma, l - 1 - s) tokens, accepts n of them, and tests n + 1, or all of them
where all are accepted. The
*coin* of a position says whether the first token of a draft that starts there is accepted.

[Leviathan2023] says (Section 3.1): independent coins of one rate alpha. Three tests ask three things of that: `lag_correlation`
whether neighbours go together, by one mean for all requests, so that it also finds easy and hard requests; `runs_test` only the
order within each request, whatever its own rate; `geometric_test` the law of accepted lengths. `dependence` says what it does to
a speed-up.

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
Whole = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEWEST = 5
"""Expected rounds in a cell of the chi-square test, at least: the usual rule."""


class EstimatedRates(NamedTuple):
    """Shares of trials, with Wilson's interval of 95 % for independent trials; arrays of one shape, nan where nothing was tried."""

    rate: Floats
    low: Floats
    high: Floats
    trials: Whole


def rates(successes: ArrayLike, trials: ArrayLike) -> EstimatedRates:
    """Of counts, element by element.

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
    """The interval of 95 % of sum(successes) / sum(trials) where only the requests are independent; both of shape (requests,).

    A ratio estimator's, Eq. 2.46 of [Cochran1977] without its correction for finite populations. Trials of one text depend on each
    other; Wilson's interval does not know that and is too narrow. nan for fewer than two requests, or without a trial.

    >>> [round(end, 3) for end in ratio_interval([9, 8, 2, 1], [10, 10, 10, 10])]  # of 20 in 40, Wilson's is .352 to .648
    [0.0, 1.0]
    """
    kept, tried = checks.whole_array("successes", successes, 0), checks.whole_array("trials", trials, 0)
    if kept.ndim != 1 or kept.shape != tried.shape or np.any(kept > tried):
        raise checks.ParameterError("successes and trials must be lists of one length, a number for each request, the former fewer")
    if kept.size < 2 or not tried.any():
        return float("nan"), float("nan")
    rate = kept.sum() / tried.sum()
    deviation = np.sqrt(np.square(kept - rate * tried).sum() / (kept.size - 1)) / tried.mean()
    half = float(half_width(deviation, kept.size))
    return max(float(rate) - half, 0.0), min(float(rate) + half, 1.0)


# --- Rounds ---------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """The rounds of all requests, one behind the other; arrays of shape (rounds,)."""

    draft_length: int
    request: Whole
    start: Whole
    drafted: Whole
    accepted: Whole

    @property
    def tested(self) -> Whole:
        """The tokens of each round that were judged: those behind a rejected one are not."""
        return np.minimum(self.accepted + 1, self.drafted)

    def of_requests(self) -> tuple[Whole, Whole]:
        """Accepted and tested tokens of each request, for `ratio_interval`; shape (requests,)."""
        accepted, tested = (np.bincount(self.request, weights=each) for each in (self.accepted, self.tested))
        return accepted.astype(np.int64), tested.astype(np.int64)


def play(logs: Sequence[ArrayLike], draft_length: int) -> Played:
    """The rounds that drafts of this length take over the logs, each from its first position to its last.

    >>> played = play([[3, 9, 9, 1, 4, 9]], 3)
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
    return Played(draft_length, *np.array(rounds, dtype=np.int64).T)


def accepted_of_tested(played: Played) -> EstimatedRates:
    """Accepted over tested tokens, of all rounds together: an estimate of alpha, and the likeliest if the theory holds.

    For independent coins accepted - alpha tested has mean zero, whatever ends a round or a text: whether a coin is tossed depends
    only on those before it.

    >>> float(accepted_of_tested(play([[3, 9, 9, 1, 4, 9]], 3)).rate)  # 3 of 5
    0.6
    """
    return rates(played.accepted.sum(), played.tested.sum())


def accepted_of_drafted(played: Played) -> EstimatedRates:
    """Accepted over drafted tokens, which engines print as acceptance rate: for independent coins at most alpha.

    In whole drafts (alpha + ... + alpha^gamma) / gamma, from Eq. 1 of [Leviathan2023]. Drafted tokens behind a rejected one are no
    trials: Wilson's interval is that of the printed figure, as if they were.

    >>> float(accepted_of_drafted(play([[3, 9, 9, 1, 4, 9]], 3)).rate)
    0.5
    """
    return rates(played.accepted.sum(), played.drafted.sum())


class Means(NamedTuple):
    """Tokens a round in the mean over rounds and in that over sequences, each with its interval of 95 % between sequences."""

    draft_length: int
    over_rounds: float
    """Every round weighs alike: the tokens of all sequences over all their rounds."""
    rounds_low: float
    rounds_high: float
    over_sequences: float
    """Every sequence weighs alike, whatever its length: the mean of each one's tokens over its rounds."""
    sequences_low: float
    sequences_high: float
    rounds: int
    sequences: int
    half: int
    """The fewest sequences that have half of the rounds between them."""

    @property
    def few(self) -> bool:
        """Whether few sequences weigh most: a quarter of them, or less, has half of the rounds."""
        return self.half <= self.sequences / 4


def means(played: Played) -> Means:
    """Mean acceptance lengths of played rounds, the target's own token counted.

    Of equal sequences both means are one. The interval over rounds is that of a ratio, as in `ratio_interval`.

    >>> found = means(play([[4, 3, 2, 1] * 9, [1, 1]], 3))  # 9 rounds of four tokens, and two of one
    >>> round(found.over_rounds, 3), found.over_sequences, found.half
    (3.455, 2.5, 1)
    """
    rounds = np.bincount(played.request)
    tokens = np.bincount(played.request, weights=played.accepted + 1).astype(np.int64)
    least, most = ratio_interval(rounds, tokens)
    each = tokens / rounds
    half = float(half_width(each.std(ddof=1), each.size)) if each.size > 1 else float("nan")
    mean = float(each.mean())
    largest = np.cumsum(np.sort(rounds)[::-1])
    return Means(
        played.draft_length, float(tokens.sum() / rounds.sum()), 1 / most, 1 / least if least > 0 else float("nan"),
        mean, mean - half, mean + half, int(rounds.sum()), rounds.size, int(np.searchsorted(largest, largest[-1] / 2)) + 1,
    )  # fmt: skip


def accepted_of_positions(logs: Sequence[ArrayLike]) -> EstimatedRates:
    """The share of positions whose own draft's first token is accepted: the mean of the `coins`, each once, whoever tests it.

    For independent coins it estimates the same alpha as `accepted_of_tested`, from more of them. A draft that reads the target's
    features is best right behind a pass of it: there this is above what its rounds accept.

    >>> float(accepted_of_positions([[3, 9, 9, 1, 4, 9]]).rate)
    0.8
    """
    held = coins(logs)
    return rates(sum(int(each.sum()) for each in held), sum(each.size for each in held))


def by_place(played: Played) -> EstimatedRates:
    """Of the first, second, ... token of a draft, where it is tested; shape (gamma,). Theory: all alpha.

    >>> by_place(play([[3, 9, 9, 1, 4, 9]], 3)).rate.tolist()
    [0.6666666666666666, 1.0, 0.0]
    """
    place = np.arange(played.draft_length)[:, None]
    return rates((played.accepted > place).sum(axis=1), (played.tested > place).sum(axis=1))


def by_output_position(played: Played, edges: Sequence[int]) -> EstimatedRates:
    """Of tested tokens, by where in the output they are: from each edge to below the next; shape (edges - 1,). Theory: all alpha.

    >>> by_output_position(play([[3, 9, 9, 1, 4, 9]], 3), [0, 2, 6]).trials.tolist()
    [2, 3]
    """
    limits = checks.whole_array("edges", edges, 0)
    if limits.ndim != 1 or limits.size < 2 or np.any(np.diff(limits) <= 0):
        raise checks.ParameterError(f"edges must be at least two whole numbers that rise, got {checks.shown(edges)}")
    place = np.arange(played.draft_length)[:, None]
    position = played.start + place
    tested, accepted = played.tested > place, played.accepted > place
    counts = (np.histogram(position[mask], limits)[0] for mask in (accepted, tested))
    # A histogram's last bin has its upper edge in it; ours has not.
    last = (int(np.count_nonzero(position[mask] == limits[-1])) for mask in (accepted, tested))
    kept, tried = (np.append(count[:-1], count[-1] - extra) for count, extra in zip(counts, last, strict=True))
    return rates(kept, tried)


# --- Are they independent? ------------------------------------------------------------------------------------------


def coins(logs: Sequence[ArrayLike]) -> list[Bools]:
    """Of each request, the coin of each position but the last, which no round drafts; shapes (positions - 1,).

    >>> coins([[3, 1, 2, 2]])
    [array([ True, False,  True])]
    """
    return [log[:-1] > 1 for log in _checked(logs)]


class Correlation(NamedTuple):
    """A correlation between coins, its standard error if they are independent, and the two-sided chance of one as large."""

    correlation: float
    standard_error: float
    pairs: int
    p_value: float


def lag_correlation(sequences: Sequence[ArrayLike], lag: int = 1) -> Correlation:
    """The correlation of coins that stand `lag` separate in one request, about the mean of all.

    The standard error is 1 / sqrt(pairs): for independent coins of one known rate it is exact, as products of different pairs are
    uncorrelated; that the mean is estimated shifts it by about 1 / coins. nan where all coins are equal or none has a neighbour.

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
    """How many runs of equal coins there are, how many chance alone gives, and the two-sided chance of so many more or fewer."""

    runs: int
    expected: float
    deviation: float
    z: float
    p_value: float


def runs_test(sequences: Sequence[ArrayLike]) -> RunsTest:
    """Wald and Wolfowitz's test of the order of coins, given how many of each kind a request has, over all requests together.

    Of n = a + b coins, all orders equally likely, the runs have mean 1 + 2ab/n and variance 2ab (2ab - n) / (n^2 (n - 1)), of
    [Wald1940]. Requests are independent, so both add up, and their sum is taken for normal. Fewer runs than expected: coins follow
    each other. nan where no request has both kinds.

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
    """Rounds by their accepted tokens against the theory's: 0, 1, ..., and in the last cell so many or more."""

    counts: Whole
    expected: Floats
    acceptance_rate: float
    statistic: float
    degrees: int
    p_value: float


def geometric_test(played: Played) -> Geometric:
    """Pearson's chi-square test of accepted lengths against the cut geometric law, Section 3.1 of [Leviathan2023].

    Of rounds that the end of the text does not cut. Lengths are cut at the largest m <= gamma at which every cell expects `FEWEST`
    rounds; alpha is accepted over tested tokens of rounds so cut, the likeliest for these very cells, so that m + 1 cells leave
    m - 1 degrees of freedom. nan where they leave none.

    >>> found = geometric_test(play([[1] * 20 + [2, 9] * 10 + [3, 9, 9] * 11], 2))
    >>> found.counts.tolist(), found.degrees
    ([20, 10, 11], 1)
    """
    whole = played.accepted[played.drafted == played.draft_length]
    for longest in range(played.draft_length, 0, -1):
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


# --- What it does to a speed-up -------------------------------------------------------------------------------------


class Dependence(NamedTuple):
    """What independent coins predict for drafts of one length, and what the logs give."""

    draft_length: int
    acceptance_rate: float
    expected_tokens: float
    """A round, if acceptances are independent coins of this rate."""
    observed_tokens: float
    error: float
    """The error of independence, expected / observed - 1: 0.1 is 10 % too many. With its interval of 95 %."""
    low: float
    high: float
    expected_speedup: float
    observed_speedup: float


def dependence(
    logs: Sequence[ArrayLike], draft_lengths: Sequence[int], cost_ratio: float, replications: int, rng: np.random.Generator
) -> list[Dependence]:
    """How far off one is, by draft length, who takes `accepted_of_positions` for alpha and acceptances for independent.

    Predicted are the rounds of each request as long as it is (`model.methods.speculative.theory.target_runs`), and the speed-up
    with draft passes of `cost_ratio`; observed, the rounds of `play`. The interval is of percentiles, over requests drawn again
    with replacement: alpha, prediction and observation are all taken anew from each draw. nan for a single request.

    >>> (row,) = dependence([[2, 1] * 500], [1], 0.1, 10, np.random.default_rng(1))  # every second coin, and always the tested one
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
    accepted, tossed = (np.array([count(each) for each in coins(logs)]) for count in (np.sum, np.size))
    # How often each request is in a draw; the first row is the logs themselves.
    drawn = rng.multinomial(len(held), np.full(len(held), 1 / len(held)), size=replications)
    weights = np.vstack([np.ones(len(held)), drawn])
    of_length = np.stack([weights[:, kind == each].sum(axis=1) for each in range(lengths.size)], axis=1)
    alpha = weights @ accepted / np.maximum(weights @ tossed, 1)
    tokens = weights @ positions
    rows = []
    for gamma in draft_lengths:
        played = play(held, gamma)
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


def _checked(logs: Sequence[ArrayLike]) -> list[Whole]:
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
            raise checks.ParameterError(f"sequences[{index}] must be a list of coins, each 0 or 1, got {given}")
    held = [each for each in held if each.size]
    if not held:
        raise checks.ParameterError("sequences must have at least one coin, got none; take longer requests")
    return held
