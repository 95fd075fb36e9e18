"""Self-speculative decoding in closed form: speculative decoding whose draft is some layers of the target itself.

Let s be the share of the drafting layers in the time of a pass (exit_layer / layers where layers take equal times and none is
skipped), and v(w) the time of a pass over w tokens in plain passes. A round with gamma drafted tokens takes gamma s for the
drafts, and

    s + (1 - s) v(gamma + 1)    with states that are reused: the last drafted token goes through the first layers alone,
    v(gamma + 1)                where all layers run again over all tokens,

for the verification. If a pass takes the same time for any number of tokens (v = 1), both are 1 + gamma s: Theorem 3.8 of
[Leviathan2023] with c = s. Reuse then saves no time, only arithmetic; its saving is s (v(gamma + 1) - 1). So an exit after layer e
pays, at some draft length, exactly if the acceptance rate of its head exceeds the share of its layers (Corollary 3.9).

[Elhoushi2024] M. Elhoushi et al. LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding. ACL 2024,
arXiv:2404.16710.
[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Totals, Work, attended_within
from model.methods.claim_bounds import ClaimTerms, Limit, drafting_bound
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints
from model.methods.rounds.prices_of_rounds import (
    RoundCells,
    RoundPrices,
    slowest_of,
    sums_between,
    sums_from,
    times_by_width,
    times_of_cells,
)
from model.methods.rounds.round_laws import AcceptanceLaw, Rounds
from model.methods.rounds.round_moments import predict_rounds
from model.methods.rounds.round_starts import starts_of_laws
from model.methods.self_speculative.algorithm import Parameters
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Chain

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def round_prices(parameters: Parameters, cost: StepCosts, *, tokens: int = 1) -> RoundPrices:
    """Prices of rounds with 0, 1, ..., `draft_length` drafted tokens; a round without drafts is a plain pass.

    Arithmetic is in units of one token in the target: of a draft's pass the share of its layers. The verification pays the overhead
    of the round's engine step.

    >>> from model.costs.layer_times import UnitCost
    >>> cost = UnitCost(8, verify_cost=((1, 1.0), (3, 2.0)))
    >>> [round_prices(Parameters(8, 2, 2, reuse), cost).time.tolist() for reuse in (True, False)]
    [[8.0, 13.0, 18.0], [8.0, 14.0, 20.0]]
    """
    longest = parameters.draft_length
    drafted = np.arange(longest + 1)
    at = np.arange(tokens + longest)
    shape = PassShape(parameters.early, heads=1, within_step=True, context_budget=parameters.context_budget)
    drafting = cost.times(shape, 0 if cost.uniform else at)
    span = parameters.late if parameters.reuse else parameters.whole
    joins = parameters.reuse
    verify = np.zeros(0 if cost.uniform else (tokens, 0))
    if longest:
        verify = times_by_width(
            cost, lambda width: PassShape(span, width=width, heads=width, joins=joins), drafted[1:] + 1, tokens
        )  # fmt: skip
    plain = cost.plain_times() if cost.uniform else cost.plain_times(at[:tokens])
    last = 0 * drafting
    if parameters.reuse:
        last = cost.times(PassShape(parameters.early, within_step=True), 0 if cost.uniform else at)
    if cost.uniform:
        later = drafted[1:] * drafting[..., None] + last[..., None] + verify
        time = np.concatenate([plain[..., None], np.broadcast_to(later, (*plain.shape, longest))], axis=-1)
    else:
        drafts = sums_from(drafting, longest, tokens)[..., 1:]
        ahead = np.minimum(np.arange(tokens)[:, None] + drafted[None, 1:], last.shape[-1] - 1)
        one = np.concatenate([plain[..., None], drafts + last[..., ahead] + verify], axis=-1)
        time = np.stack([one, one], axis=-3)
    costs = drafting.shape if cost.uniform else drafting.shape[:-1]
    return RoundPrices(time, time, np.broadcast_to(_operations(parameters), (*costs, longest + 1)))


def _operations(parameters: Parameters) -> Floats:
    """Arithmetic of rounds with 0, 1, ..., `draft_length` drafted tokens, in units of one token in the target."""
    return 1.0 + np.arange(parameters.draft_length + 1.0) * (1.0 + _drafting_ratio(parameters))


def _drafting_ratio(parameters: Parameters) -> float:
    """Operations of drafting a token that its verification does not spare, relative to a pass of the target."""
    return 0.0 if parameters.reuse else parameters.drafting_layers / parameters.layers


def _prices_by_start(parameters: Parameters, cost: StepCosts, tokens: ArrayLike) -> RoundPrices:
    """`round_prices` by cell only, if times depend on the position; see `RoundCells`."""
    if cost.uniform:
        return round_prices(parameters, cost)
    longest = parameters.draft_length
    cells = RoundCells.of(longest, tokens, parameters.cut)
    start, drafted, at = cells.start, cells.drafted, np.arange(cells.lengths[-1] + longest)
    span = parameters.late if parameters.reuse else parameters.whole
    shape = PassShape(parameters.early, heads=1, within_step=True, context_budget=parameters.context_budget)

    def verify(width: int, at: NDArray[np.int64]) -> Floats:
        whole = PassShape(span, width=width, heads=width, joins=parameters.reuse)
        return cost.plain_times(at) if width == 1 else cost.times(whole, at)

    time = times_of_cells(verify, drafted + 1, start) + sums_between(cost.times(shape, at), start, drafted)
    if parameters.reuse:
        last = cost.times(PassShape(parameters.early, within_step=True), at)
        time = time + np.where(drafted > 0, last[..., start + drafted], 0.0)
    time = np.stack([time] * 2, axis=-2)
    return RoundPrices(time, time, np.broadcast_to(_operations(parameters), (*time.shape[:-2], longest + 1)))


def predict(parameters: Parameters, tokens: ArrayLike, law: AcceptanceLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts and dependent outcomes; times in the unit of the costs.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = predict(Parameters(32, exit_layer=8, draft_length=6), 512, Iid(0.75), UnitCost(32))
    >>> round(float(found.plain_latency / found.latency), 3), round(float(speedup(0.75, 6, 8 / 32)), 3)
    (1.387, 1.386)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points, computed together."""

    def prices(parameters: Parameters, tokens: NDArray[np.int64], cost: StepCosts) -> tuple[RoundPrices, None]:
        return _prices_by_start(parameters, cost, tokens), None

    return predict_rounds(points, prices, lambda of: np.asarray(_drafting_ratio(of.parameters)))


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round emits a single token."""
    return slowest_of(tokens, round_prices(parameters, cost, tokens=tokens))


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of a run, in units of one token in the target, from its rounds by (accepted, drafted) tokens."""
    price = round_prices(parameters, cost).operations
    return float(sum(count * price[drafted] for (_, drafted), count in rounds.items()))


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work | None:
    """Expected work of the passes; None for laws of records.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(32, 8, 3), 128, Iid(0.79)).by_model["target"]
    >>> round(found.layer_passes / 32 / 128, 3)  # layers per generated token, in passes
    1.373
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[AcceptanceLaw]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,); None if one of them is of records."""
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[AcceptanceLaw]) -> Work | None:
    """`work` of several numbers of tokens, which rise, as arrays of shape (laws, lengths).

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work_of_lengths(Parameters(32, 8, 3), np.array([1, 128]), [Iid(0.79)]).by_model["target"]
    >>> (found.layer_passes / 32 / [1, 128]).round(3).tolist()
    [[1.0, 1.373]]
    """
    known = [law for law in laws if isinstance(law, Chain | Rounds)]
    if len(known) < len(laws):
        return None
    cells = RoundCells.of(parameters.draft_length, lengths, parameters.cut)
    place, count = cells.start, cells.drafted
    early, late, layers = parameters.drafting_layers, parameters.layers - parameters.exit_layer, parameters.layers
    drafting, width = count > 0, count + 1
    ahead = place * width + width * (width + 1) / 2  # positions that the tokens of a verification attend to
    seen = attended_within(place, count, parameters.context_budget)
    lower = np.where(drafting & parameters.reuse, width, 0)  # passes of the first layers alone
    lower = np.where(drafting & (not parameters.reuse), count, lower)
    read = np.where(drafting, ahead if parameters.reuse else seen, 0)
    verified = np.where(drafting & parameters.reuse, late, layers)
    runs = lower * early + verified
    of_round = (
        lower + 1, runs, lower * early + verified * width, read * early + verified * ahead,
        read * early + verified * (place + width), count + 1, count + width,
    )  # fmt: skip
    mass = starts_of_laws(parameters.draft_length, int(lengths[-1]), known).mass
    sums: Any = cells.sums(mass, *of_round)
    passes, layer_runs, layer_passes, attended, rows, head_runs, heads = sums
    return Work({"target": Totals(passes, layer_runs, layer_passes, attended, rows, head_runs=head_runs, heads=heads)})


# --- One round, with equal layers -----------------------------------------------------------------------------------


def round_time(
    draft_length: ArrayLike, exit_share: ArrayLike, *, reuse: bool = True, verify_cost: CurveLike | None = None
) -> Floats:
    """Time of a round in plain passes [-]; `exit_share` is the share s of the first layers in the time of a pass.

    >>> wide = [(1, 1.0), (5, 1.4)]
    >>> [round(float(round_time(4, 0.25, reuse=reuse, verify_cost=wide)), 3) for reuse in (True, False)]
    [2.3, 2.4]
    """
    length = checks.array("draft_length", draft_length, 0)
    share = checks.array("exit_share", exit_share, 0, 1)
    wide = np.ones(np.shape(length)) if verify_cost is None else as_curve(verify_cost).relative(length + 1)
    verify = share + (1 - share) * wide if reuse else wide
    return np.asarray(length * share + np.where(length > 0, verify, 1.0))


def speedup(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, exit_share: ArrayLike, *, reuse: bool = True,
    verify_cost: CurveLike | None = None,
) -> Floats:  # fmt: skip
    """Speed-up over plain decoding for many tokens: E[N] over the time of a round [-].

    If passes take the same time for any number of tokens, this is Theorem 3.8 of [Leviathan2023] with c = `exit_share`:

    >>> float(speedup(0.75, 6, 0.25)) == float(speculative.speedup(0.75, 6, 0.25))
    True
    """
    tokens = speculative.expected_tokens(acceptance_rate, draft_length)
    return np.asarray(tokens / round_time(draft_length, exit_share, reuse=reuse, verify_cost=verify_cost))


def ever_pays(acceptance_rate: ArrayLike, exit_share: ArrayLike) -> NDArray[np.bool_]:
    """True if some draft length is faster than plain decoding, where passes take the same time for any number of tokens.

    Corollary 3.9 of [Leviathan2023] with c = s: an exit pays exactly if the acceptance rate of its head exceeds the share of its
    layers.

    >>> ever_pays([0.3, 0.2], 8 / 32).tolist()
    [True, False]
    """
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    return np.asarray(rate > checks.array("exit_share", exit_share, 0, 1))


class BestExit(NamedTuple):
    """The fastest exit layer with its draft length and speed-up; draft length 0: no exit is faster than plain decoding."""

    exit_layer: int
    draft_length: int
    speedup: float


def best_exit(
    acceptance_by_layer: ArrayLike, layers: int, *, longest: int = 20, reuse: bool = True, verify_cost: CurveLike | None = None
) -> BestExit:
    """The fastest exit layer and draft length, for acceptance rates of the heads after layers 1, 2, ..., with layers of equal time.

    >>> best_exit([0.2, 0.3, 0.6, 0.7], 8)._replace(speedup=0)
    BestExit(exit_layer=3, draft_length=1, speedup=0)
    """
    rates = checks.array("acceptance_by_layer", acceptance_by_layer, 0, 1)
    checks.whole("layers", layers, 2, checks.MAX_LAYERS)
    if rates.ndim != 1 or not 1 <= rates.size < layers:
        raise checks.ParameterError(
            f"acceptance_by_layer must have 1 to layers - 1 = {layers - 1} rates, got shape {rates.shape}"
        )
    length = np.arange(longest + 1)
    share = (np.arange(rates.size) + 1) / layers
    speeds = speedup(rates[:, None], length, share[:, None], reuse=reuse, verify_cost=verify_cost)
    layer, best = np.unravel_index(int(np.argmax(speeds)), speeds.shape)
    return BestExit(int(layer) + 1, int(best), float(speeds[layer, best]))


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Bound of drafting in turn (`model.methods.claim_bounds.drafting_bound`) with drafts by the first layers.

    With a stated share s a verification takes at least s + (1 - s) v; without one, the bound is that of s = 0, the largest.

    >>> round(claim_bound(ClaimTerms({"acceptance_rate": 0.75, "layers": 32, "exit_layer": 8})).value, 3)
    2.0
    """
    return drafting_bound(_with_share(terms))


def claim_formula(terms: ClaimTerms) -> Limit:
    """Theorem 3.8 of [Leviathan2023] with c = s, and verifications of s + (1 - s) v."""
    return speculative.claim_formula(_with_share(terms))


def _with_share(terms: ClaimTerms) -> ClaimTerms:
    layers, exit_layer, share = terms.stated("layers"), terms.stated("exit_layer"), terms.stated("cost_ratio")
    if layers is not None and exit_layer is not None:
        # A draft pass runs its layers and a whole head, so that it takes at least the share of its layers.
        share = max(exit_layer / layers, share or 0.0)
    if share is None:
        return replace(terms, draft=0.0)
    known, verify = min(share, 1.0), terms.verify
    found = terms.having(cost_ratio=share)
    return found if terms.flat else replace(found, verify=lambda width: known + (1 - known) * verify(width))
