"""N-gram drafts in closed form.

A lookup finds a match with probability h (`hit_rate`), and then drafts K tokens, of which A = a + a^2 + ... + a^K are accepted on
average (a: `acceptance_rate`). A round with a match takes the time v of a pass over K + 1 tokens in plain passes, one without
takes 1. For many tokens the speed-up is

    (1 + h A) / (1 + h (v - 1)).

So drafts pay exactly if A > v - 1, no matter how often there is a match, and then more matches make decoding faster. This is not
speculative decoding with drafts of the mean length h K that cost nothing: that would accept more tokens, because the first tokens
of a draft are the likeliest to survive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Totals, Work
from model.methods.claim_bounds import ClaimTerms, Limit, drafting_bound
from model.methods.ngram import lookup_rounds
from model.methods.ngram.algorithm import Parameters
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.prices_of_rounds import RoundPrices, slowest_of, verify_times
from model.methods.rounds.round_moments import prediction_of, units_alike
from model.methods.speculative import theory as speculative
from model.outcomes.lookup_laws import LookupLaw, Lookups

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def round_prices(parameters: Parameters, cost: StepCosts, *, tokens: int = 1) -> RoundPrices:
    """Prices of rounds with 0, 1, ..., `draft_length` drafted tokens: passes of the target alone.

    >>> from model.costs.layer_times import UnitCost
    >>> round_prices(Parameters(8, 2), UnitCost(8, verify_cost=((1, 1.0), (3, 2.0)))).time.tolist()
    [8.0, 12.0, 16.0]
    """
    longest = parameters.draft_length
    verify = verify_times(cost, longest + 1, tokens)
    time: Floats = verify[..., 0, :] if cost.uniform else np.stack([verify, verify], axis=-3)
    costs = verify.shape[:-2]
    return RoundPrices(time, time, np.broadcast_to(np.arange(1.0, longest + 2), (*costs, longest + 1)))


def predict(parameters: Parameters, tokens: ArrayLike, law: LookupLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts; times in the unit of the costs.

    >>> from model.costs.layer_times import UnitCost
    >>> found = predict(Parameters(32, draft_length=4), 512, Lookups.of_rates(0.3, 0.6, 4), UnitCost(32))
    >>> round(float(found.plain_latency / found.latency), 3), round(float(speedup(0.3, 0.6, 4)), 3)
    (1.39, 1.392)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points, which are computed together for all laws and costs."""
    return predict_by_decoding(_predict_together, points, _prices_of_each, together="always")


def _prices_of_each(parameters: Parameters) -> int:
    """Prices of a cost, at each position if they depend on it."""
    return 2 * (parameters.draft_length + 1)


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points that share parameters and tokens."""
    parameters, tokens = points.parameters, points.tokens
    prices = round_prices(parameters, points.cost, tokens=tokens)
    pairs = points.laws, prices, points.law, points.price
    found = lookup_rounds.moments_of_pairs(tokens, *pairs, cut=parameters.cut, means=points.means, lengths=points.lengths)
    return prediction_of(points, found, units_alike(prices))


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round emits a single token."""
    return slowest_of(tokens, round_prices(parameters, cost, tokens=tokens))


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of a run, in units of one token in the target, from its rounds by (accepted, drafted) tokens."""
    return float(sum(count * (1 + drafted) for (_, drafted), count in rounds.items()))


def work(parameters: Parameters, tokens: int, law: LookupLaw) -> Work | None:
    """Expected work of the passes; None for laws of records.

    >>> found = work(Parameters(32, 3), 128, Lookups.of_rates(0.5, 0.5, 3)).by_model["target"]
    >>> round(found.passes, 3), round(found.heads, 3)  # one token more than drafted per pass
    (89.376, 221.353)
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[LookupLaw]) -> Work | None:
    """`work` under each of several laws with the same outcomes, as arrays of shape (laws,); None if there are other laws.

    >>> laws = [Lookups.of_rates(hits, 0.5, 3) for hits in (0.0, 0.5)]
    >>> work_of_laws(Parameters(32, 3), 128, laws).by_model["target"].passes.round(3).tolist()
    [128.0, 89.376]
    """
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[LookupLaw]) -> Work | None:
    """`work_of_laws` of several numbers of tokens, which rise, as arrays of shape (laws, lengths).

    >>> laws = [Lookups.of_rates(hits, 0.5, 3) for hits in (0.0, 0.5)]
    >>> work_of_lengths(Parameters(32, 3), np.array([1, 128]), laws).by_model["target"].passes.round(3).tolist()
    [[1.0, 128.0], [1.0, 89.376]]
    """
    known = [law for law in laws if isinstance(law, Lookups)]
    cells = {(law.cells.drafted.tobytes(), law.cells.accepted.tobytes()) for law in known}
    if len(known) < len(laws) or len(cells) > 1:
        return None
    place, layers = np.arange(lengths[-1])[:, None], parameters.layers
    width = np.arange(1.0, int(known[0].cells.drafted.max()) + 2)
    wide = np.broadcast_to(width, (place.size, width.size))
    of_round = np.stack([np.ones(wide.shape), wide, place * width + width * (width + 1) / 2, place + width])
    sums: Any = np.empty((4, len(known), lengths.size))
    size = max(_CELLS // (place.size * width.size), 1)
    for at in range(0, len(known), size):
        part = known[at : at + size]
        law = np.repeat(np.arange(len(part)), lengths.size)
        decodings = lookup_rounds.LookupDecodings.of(np.tile(lengths, len(part)), part, law, cut=parameters.cut)
        sums[:, at : at + size] = decodings.means(of_round).reshape(4, len(part), -1)
    passes, read, attended, rows = sums
    return Work({"target": Totals(
        passes, layers * passes, layers * read, layers * attended, layers * rows, head_runs=passes, heads=read,
    )})  # fmt: skip


_CELLS = 500_000
"""Rounds by position, kind and law that are counted together: a few MB."""


# --- One round ------------------------------------------------------------------------------------------------------


def accepted_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected accepted tokens of a draft: A = a + a^2 + ... + a^K [tokens].

    >>> float(accepted_tokens(0.5, 3))
    0.875
    """
    return np.asarray(speculative.expected_tokens(acceptance_rate, draft_length) - 1)


def speedup(
    hit_rate: ArrayLike, acceptance_rate: ArrayLike, draft_length: ArrayLike, *, verify_cost: CurveLike | None = None
) -> Floats:
    """Speed-up over plain decoding for many tokens: (1 + h A) / (1 + h (v - 1)) [-].

    >>> round(float(speedup(0.5, 0.5, 3, verify_cost=[(1, 1.0), (4, 1.3)])), 4)  # (1 + 0.4375) / (1 + 0.15)
    1.25
    """
    hits = checks.array("hit_rate", hit_rate, 0, 1)
    more = _time_of_pass(draft_length, verify_cost) - 1
    return np.asarray((1 + hits * accepted_tokens(acceptance_rate, draft_length)) / (1 + hits * more))


def pays(acceptance_rate: ArrayLike, draft_length: ArrayLike, *, verify_cost: CurveLike | None = None) -> NDArray[np.bool_]:
    """True if drafts are faster than plain decoding, at any rate of matches above 0: A > v - 1.

    >>> pays([0.2, 0.3], 3, verify_cost=[(1, 1.0), (4, 1.3)]).tolist()
    [False, True]
    """
    return np.asarray(accepted_tokens(acceptance_rate, draft_length) > _time_of_pass(draft_length, verify_cost) - 1)


def _time_of_pass(draft_length: ArrayLike, verify_cost: CurveLike | None) -> Floats:
    """Time of a pass over a draft and one more token [plain passes]."""
    length = checks.whole_array("draft_length", draft_length, 0)
    return np.asarray(np.ones(np.shape(length)) if verify_cost is None else as_curve(verify_cost).relative(length + 1))


class RoundMeans(NamedTuple):
    """Means over the rounds of a long decoding."""

    tokens: float
    """Tokens of a round, the target's own included."""
    drafted: float
    time: float
    """Time of a round [plain passes]."""
    after_acceptance: float
    """Share of rounds that follow one with accepted tokens."""

    @property
    def speedup(self) -> float:
        """Speed-up over plain decoding [-]."""
        return self.tokens / self.time


def round_means(law: Lookups, *, verify_cost: CurveLike | None = None) -> RoundMeans:
    """Means over the rounds of a long decoding, for lookups that may depend on the round before.

    The share r of rounds after one with accepted tokens is stationary: r = r P(accepted | some before) + (1 - r) P(accepted | none
    before).

    >>> found = round_means(Lookups.of_rates([0.1, 0.9], 0.8, 4))
    >>> round(found.after_acceptance, 4), round(found.speedup, 3), round(round_means(Lookups.of_rates(0.1, 0.8, 4)).speedup, 3)
    (0.2222, 1.656, 1.236)
    """
    drafted, accepted, chance = law.cells
    low, high = (chance * (accepted > 0)).sum(axis=1).tolist()
    share = low / (1 + low - high) if low else 0.0
    mass = np.array([1 - share, share]) @ chance
    times = _time_of_pass(drafted, verify_cost)
    return RoundMeans(float(1 + mass @ accepted), float(mass @ drafted), float(mass @ times), share)


# --- Claims ---------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Bound of drafting in turn (`model.methods.claim_bounds.drafting_bound`) with drafts that take no time.

    It holds for drafts of random length, because a pass takes at least as long on average as one over the mean number of tokens.

    >>> claim_bound(ClaimTerms({"mean_acceptance_length": 1.6}, draft=0.5)).value
    1.6
    """
    return drafting_bound(replace(terms, draft=0.0))
