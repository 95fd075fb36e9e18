"""PEARL in closed form: drafting and verifying at the same time, on units of their own [Liu2024].

Rounds go in lock-step, each as long as the slower of a draft of gamma tokens and a pass of the target. While the first token of a
new draft is verified, the rest of it is drafted (pre-verify); if that token stays, whole drafts are verified while the next ones
are drafted (post-verify), until one token is rejected. With `draft_stop` "rejection" a round that rejects does not wait for its
draft: it takes the target's pass, or the first draft pass where that token decides and comes later. `predict` is exact for a
number of tokens, under any law of single positions (`model.methods.pearl.finite_pearl`); the equations are its limit for many
tokens, where acceptances are independent with one rate.

[Liu2024] T. Liu et al. PEARL: Parallel Speculative Decoding with Adaptive Draft Length. arXiv:2408.11850.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Totals, Work
from model.methods.pearl.algorithm import DRAFT_STOPS, ROUND, Parameters
from model.methods.pearl.finite_pearl import FiniteChoice, RoundTables, moments_of_many, round_starts, round_tables
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints
from model.methods.rounds import Moments
from model.methods.speculative.theory import sum_of_powers
from model.outcomes.outcome_laws import Chain

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Exactly `tokens` tokens, the cut drafts at their end and the law's memory included; times in the unit of the costs.

    A round takes the longer of the target's pass and the drafts with the link there and back; unit-time is of both. If rejections
    stop drafts, a round takes the target's pass alone where it rejects a token that waited, and the longer of that and the first
    draft pass with its links where it rejects the first drafted one; the draft model works for as long, or until all is drafted.
    `drafted` are the tokens on offer: those that the target's passes read and verified, not those that were dropped unread. Rounds
    of many tokens are `expected_tokens` long.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = [predict(Parameters(40, 4), 200, Iid(rate), UnitCost(40, cost_ratio=0.2)) for rate in (0.5, 0.8, 1.0)]
    >>> [round(float(each.plain_latency / each.latency), 3) for each in found]
    [1.301, 2.104, 3.922]
    >>> [round(float(speedup(rate, 4, 0.2)), 3) for rate in (0.5, 0.8, 1.0)]
    [1.304, 2.123, 4.0]
    >>> slow, law = UnitCost(40, cost_ratio=0.5), Iid(0.5)  # four draft passes take two of the target
    >>> lockstep, stopped = (predict(Parameters(40, 4, draft_stop=when), 200, law, slow) for when in ("round", "rejection"))
    >>> round(float(lockstep.latency / 40), 3), round(float(stopped.latency / 40), 3)
    (304.041, 206.358)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints) -> Prediction:
    """`predict` at many points, computed together."""
    chosen, laws, index = points.pairs()
    asked = []
    for choice, law in zip(chosen.tolist(), laws.tolist(), strict=True):
        parameters, tokens, cost = points.choices[choice]
        asked.append(FiniteChoice(parameters.draft_length, tokens, points.laws[law], cost, parameters.lockstep))
    found = Moments(*(np.array(column)[index] for column in zip(*moments_of_many(asked), strict=True)))

    def ratio(choice: MethodChoice) -> float:
        tables = _tables(choice.parameters, choice.tokens, choice.cost)
        return 1.0 if np.array_equal(tables.time, tables.busy) else np.nan

    units = points.of_choices(lambda each: each.parameters.units)
    plain = points.of_choices(lambda each: each.parameters.plain_time(each.tokens, each.cost))
    times = found.time, found.variance, found.busy, points.of_choices(ratio), units, plain
    return Prediction(*times, found.rounds, found.drafted, found.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Time and unit-time that no decoding exceeds: a round puts out one token."""
    tables = _tables(parameters, tokens, cost)
    return tokens * float(tables.time.max()), tokens * float(tables.busy.max())


def _tables(parameters: Parameters, tokens: int, cost: StepCosts) -> RoundTables:
    return round_tables(parameters.draft_length, tokens, cost, lockstep=parameters.lockstep)


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """The arithmetic of all tokens that either model has read, in tokens of the target: each has a projection."""
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def work(parameters: Parameters, tokens: int, law: Any) -> Work | None:
    """What the passes of both models come to, in the mean; None under laws of records, and where rejections stop drafts: how many
    passes these make then depends on what they take.

    The target reads the text's last token and what waits behind it, the draft model one token in each of its passes.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(40, 4, draft_layers=2), 200, Iid(0.8)).of
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3)
    (95.061, 372.284)
    """
    if not isinstance(law, Chain) or not parameters.lockstep:
        return None
    tables = round_tables(parameters.draft_length, tokens, UnitCost(1, cost_ratio=0.0))
    mass, place = round_starts(tables, law), np.arange(tokens)
    width, drafted, behind = tables.waiting + 1, tables.drafted, place + tables.waiting
    seen, read = place * width + width * (width + 1) / 2, place + width
    target = _totals(parameters.layers, *(float((mass * each).sum()) for each in (np.ones_like(mass), width, seen, read)))
    passes = float((mass * drafted).sum())
    reading = float((mass * (drafted * behind + drafted * (drafted + 1) / 2)).sum())
    draft = _totals(parameters.draft_layers, passes, passes, reading, reading)
    return Work({"target": target, "draft": draft} if passes else {"target": target})


def _totals(layers: int, passes: float, tokens: float, attended: float, read: float) -> Totals:
    """Passes over so many tokens together, all of which are projected."""
    sums = passes, layers * passes, layers * tokens, layers * attended, layers * read
    return Totals(*sums, head_runs=passes, heads=tokens)


# --- Rounds in the long run -----------------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Tokens of a round in the long run: (1 - alpha^gamma) / ((1 - alpha) (1 + alpha - alpha^gamma)) [tokens].

    A round that verifies a first token gives one; one that verifies a whole draft gives 1 + alpha + ... + alpha^(gamma-1). Of
    those rounds there are alpha to every 1 - alpha^gamma of the first kind. gamma at alpha = 1, 1 at alpha = 0.

    >>> float(expected_tokens(1, 5)), float(expected_tokens(0, 5)), round(float(expected_tokens(0.8, 5)), 3)
    (5.0, 1.0, 2.284)
    """
    rate, gamma = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("draft_length", draft_length, 1)
    return np.asarray(sum_of_powers(rate, gamma) / (1 + rate - rate**gamma))


def speedup(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike, draft_stop: str = ROUND
) -> Floats:
    """Speed over plain decoding, for many tokens: `expected_tokens` / max(gamma c, 1); gamma / max(gamma c, 1) at alpha = 1.

    Where rejections stop drafts, those over the mean time of a round in passes: with b = alpha^(gamma-1), in pre-verify
    (1 - alpha) max(c, 1) + alpha max(gamma c, 1), in post-verify 1 - b + b ((1 - alpha) max(c, 1) + alpha max(gamma c, 1)).

    >>> float(speedup(1, 5, 0.2)), float(speedup(1, 5, 0.4)), round(float(speedup(0.8, 5, 0.1)), 3)
    (5.0, 2.5, 2.284)
    >>> [round(float(speedup(0.5, 4, 0.5, when)), 3) for when in ("round", "rejection")]
    [0.652, 0.968]
    """
    checks.one_of("draft_stop", draft_stop, DRAFT_STOPS)
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    gamma = checks.whole_array("draft_length", draft_length, 1)
    tokens, whole = expected_tokens(acceptance_rate, gamma), np.maximum(gamma * ratio, 1.0)
    if draft_stop == ROUND:
        return np.asarray(tokens / whole)
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    decided_first = (1 - rate) * np.maximum(ratio, 1.0) + rate * whole  # a round that comes to the first drafted token
    to_it, post = rate ** (gamma - 1), rate / (1 + rate - rate**gamma)
    return np.asarray(tokens / ((1 - post) * decided_first + post * (1 - to_it + to_it * decided_first)))
