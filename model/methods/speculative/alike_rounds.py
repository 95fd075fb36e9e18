"""Speculative decoding whose rounds are independent and take the same time at every position: all laws and costs together.

Rounds are counted once for all costs (`model.outcomes.round_counts`), and priced once for all laws. It is the case of
`model.methods.rounds` that grids of rates and cost ratios consist of, without objects for each law and each cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.prediction import DecodingPoints, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative.algorithm import Parameters
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Iid
from model.outcomes.round_counts import RoundCounts

Floats = NDArray[np.float64]
_PAIRS = 20_000
"""Pairs of laws and costs that are priced together."""


def covers(points: PredictionPoints[Parameters]) -> bool:
    """True if several points have such rounds, of one sequence at a time and drafted by single passes.

    A single point is left to `model.methods.rounds`, so that the two ways are compared wherever a grid is compared with its points.
    """
    if points.law.size < 2:
        return False
    groups = points.groups().groups
    single = all(
        group.parameters.decoded_sequences == 1 and not group.parameters.drafts_in_one_pass and group.costs[0].uniform
        for group in groups
    )
    return single and all(isinstance(law, Iid | Rounds) for law in points.laws)


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """Prediction at points that `covers` accepts."""
    return predict_by_decoding(_predict_together, points, lambda parameters: 3 * (parameters.draft_length + 1))


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    parameters, tokens, longest = points.parameters, points.tokens, points.parameters.draft_length
    time, busy, operations = prices(parameters, points.cost)
    counts = round_counts.counts_of(longest, tokens, survival(points.laws, longest))
    taken = np.arange(longest + 1) if parameters.cut else np.full(longest + 1, longest)  # drafted tokens that are paid for
    found = np.empty((4, points.law.size))
    for at in range(0, points.law.size, _PAIRS):
        part = slice(at, at + _PAIRS)
        own, mine = RoundCounts(*(each[points.law[part]] for each in counts)), points.price[part]
        mean, variance = round_counts.priced(own, time[mine][:, taken])
        found[:, part] = mean, variance, *(np.einsum("pk,pk->p", own.mean, each[mine][:, taken]) for each in (busy, operations))
    ratio = np.where((time == busy).all(axis=1), 1.0, np.nan)[points.price]
    units = np.full(points.law.size, float(parameters.units))
    plain = parameters.plain_time(tokens, points.cost)[points.price]
    rounds, drafted = counts.mean.sum(axis=1)[points.law], (counts.mean @ taken)[points.law]
    return Prediction(found[0], found[1], found[2], ratio, units, plain, rounds, drafted, found[3])


def survival(laws: Sequence[Any], longest: int) -> Floats:
    """Probability that at least 1, 2, ..., `longest` drafted tokens are accepted, by law; shape (laws, longest).

    >>> survival([Iid(0.5), Rounds([0.75, 0.25])], 2).tolist()
    [[0.5, 0.25], [0.75, 0.25]]
    """
    if all(type(law) is Iid for law in laws):
        return np.array([[float(law.rate)] for law in laws]) ** np.arange(1, longest + 1)
    each = [law.first(longest) if isinstance(law, Rounds) else float(law.rate) ** np.arange(1, longest + 1) for law in laws]
    return np.stack(each)


def prices(parameters: Parameters, cost: StepCosts) -> tuple[Floats, Floats, Floats]:
    """Time, unit-time and arithmetic of a round by its drafted tokens; of several costs (`model.costs.many_costs`).

    Each has shape (costs, draft_length + 1), as `model.methods.rounds.round_prices` of each cost.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.costs.many_costs import joined
    >>> costs = joined([UnitCost(40, cost_ratio=0.1, operations_ratio=0.5), UnitCost(40, cost_ratio=0.2)])
    >>> [each.tolist() for each in prices(Parameters(40, draft_length=1), costs)]
    [[[40.0, 44.0], [40.0, 48.0]], [[40.0, 44.0], [40.0, 48.0]], [[1.0, 2.5], [1.0, nan]]]
    """
    drafted = np.arange(parameters.draft_length + 1.0)
    separate = parameters.placement == "separate" and not parameters.reads_states
    some = np.asarray(cost.operations("draft"), dtype=np.float64).reshape(-1, 1)
    operations = 1.0 + drafted + np.where(drafted > 0, drafted * some, 0.0)
    link = np.where(drafted > 0, 2 * np.asarray(cost.link).reshape(-1, 1) * separate, 0.0)
    drafts = drafted * cost.draft_times()[:, None]
    verify = cost.verify_times(np.arange(1, parameters.draft_length + 2))
    devices = np.asarray(cost.draft_devices).reshape(-1, 1)
    return drafts + verify + link, drafts * devices + verify, np.broadcast_to(operations, (len(verify), drafted.size))
