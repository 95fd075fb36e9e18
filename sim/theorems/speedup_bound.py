"""Theorem 33 on the baseline of speed-ups: no speed-up exceeds the tokens per round, in layer-times and on hardware.

An example is a point of a scenario: tables `method`, `cost` and `outcomes`, and the number of `tokens`.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from model.architectures.published_shapes import PRESETS
from model.methods.method_parameters import CONTINUOUS, LOCKSTEP
from model.methods.rounds.round_walks import Tally
from sim.scenarios import cases
from sim.scenarios.cases import Case
from sim.theorems.pipelined_examples import CLOSE, integers, rates
from sim.theorems.theorem import Example, Theorem, at_most, drawn, st
from sim.views import evaluation, formula_view

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_CURVES = ([[1, 1.0], [8, 1.0]], [[1, 1.0], [8, 3.0]], [[1, 1.0], [2, 1.5], [8, 1.5]])
_FALLING = [[1, 1.0], [2, 0.25], [8, 0.25]]


def speedup_is_at_most_tokens_per_round(x: Example) -> None:
    """Check the mean of the formula and all paths: a round takes at least a whole pass of the target."""
    case = _case(x)
    if not _cost_rises_with_width(case):
        return
    growth = _growth(case)
    for speedup, tokens_per_round in _pairs(case):
        at_most("speed-up", speedup, tokens_per_round * growth, CLOSE)


def bound_for_any_width_costs(x: Example) -> None:
    for speedup, tokens_per_round in _pairs(_case(x)):
        at_most("speed-up", speedup, tokens_per_round, CLOSE)


def bound_over_one_device(x: Example) -> None:
    case = _case(x)
    if (alone := case.plain_time_on_one_device) is None:
        return
    for speedup, tokens_per_round in _pairs(case):
        tokens_per_round *= _growth(case)
        at_most("speed-up over one device", speedup * alone / case.plain_time, tokens_per_round, CLOSE)


# --- Cases of examples ---


def _case(x: Example) -> Case:
    tables = {"scenario": {"name": "baseline", "tokens": x["tokens"], "replications": 1}, "method": [x["method"]]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that passes over more tokens take less time
        return cases.resolve(tables | {"cost": x["cost"], "outcomes": x["outcomes"]})


def _pairs(case: Case) -> list[tuple[float, float]]:
    """Return pairs of speed-up and tokens per round: of the means, and of the path with the largest difference."""
    row = formula_view.formula_row(case) if case.method in ("speculative", "hierarchical") else {}
    means = [(row["speedup"], row["tokens_per_round"])] if row else []
    tally = evaluation.walk(case, 0)
    assert isinstance(tally, Tally)
    rounds, speedups = case.outputs / tally.rounds, case.plain_time / tally.time
    worst = int(np.argmax(speedups - rounds))
    return [*means, (float(speedups[worst]), float(rounds[worst]))]


def _cost_rises_with_width(case: Case) -> bool:
    widths, at = np.arange(1, case.parameters.largest_pass + 1), np.arange(case.settings.tokens)[:, None]
    return bool((np.diff(case.cost.verify_times(widths, at), axis=1) >= 0).all())


def _growth(case: Case) -> float:
    """Return the largest ratio of times of plain decoding steps at different positions."""
    steps = case.cost.plain_times(np.arange(case.settings.tokens))
    return float(steps.max() / steps.min())


# --- Examples ---


@drawn
def _points(draw: DrawFn, name: str, kinds: tuple[str, ...] = ("layer-times", "hardware")) -> Example:
    method: dict[str, Any] = {"name": name}
    length = draw(integers(1, 4))
    if name == "adaptive":
        method |= {"policy": draw(st.sampled_from(("gradient", "optimum", "heuristic"))), "max_draft_length": length}
    else:
        method["draft_length"] = length
    if name == "hierarchical":
        method["reading"] = draw(st.sampled_from(("literal", "reuse", "bonus")))
    acceptance = {outcome: draw(rates()) for outcome in (("accept", "medium_accept") if name == "hierarchical" else ("accept",))}
    kind = draw(st.sampled_from(kinds))
    medium = name == "hierarchical"
    cost = draw(_layer_times(kind, medium=medium) if kind in ("layer-times", "falling") else _on_hardware(kind, medium=medium))
    if "sequences" in cost:
        batchings = (CONTINUOUS, LOCKSTEP) if name == "speculative" else (LOCKSTEP,)
        method |= {"sequences": cost["sequences"], "batching": draw(st.sampled_from(batchings))}
        cost = {key: value for key, value in cost.items() if key != "sequences"}
    method["layers"] = PRESETS[cost["shape"]].layers if "shape" in cost else 1
    laws = {outcome: {"kind": "iid", "acceptance_rate": rate} for outcome, rate in acceptance.items()}
    return {"method": method, "cost": cost, "outcomes": laws, "tokens": draw(integers(1, 24))}


def _layer_times(kind: str, *, medium: bool) -> SearchStrategy[Example]:
    """Draw costs in layer-times; of kind `falling`, passes over several tokens cost less."""
    quarters = integers(0, 4).map(lambda number: number / 4)
    given = {"cost_ratio": quarters, "verify_cost": st.just(_FALLING) if kind == "falling" else st.sampled_from(_CURVES)}
    return st.fixed_dictionaries(given | ({"medium_cost_ratio": quarters} if medium else {}))


def _on_hardware(kind: str, *, medium: bool) -> SearchStrategy[Example]:
    """Draw costs of GPUs from peaks or measured tables; of kind `split`, tensor parallel over several devices."""
    shapes = {"draft_shape": "llama-68m"} | ({"medium_shape": "llama-2-7b"} if medium else {})
    sources = (
        {"kind": "roofline", "device": "a100", "shape": "llama-2-7b"}, {"kind": "profile", "profile": "h100-llama-2-13b",
         "shape": "llama-2-13b"},
    )  # fmt: skip
    tensor_parallel, sequences = st.sampled_from((2, 4) if kind == "split" else (1, 2, 4)), st.sampled_from((1, 8))
    parts = st.tuples(st.sampled_from(sources), tensor_parallel, sequences)
    return parts.map(lambda drawn: drawn[0] | shapes | {"tensor_parallel": drawn[1], "sequences": drawn[2]})


def _theorem(method: str, number: str = "33") -> Theorem:
    return Theorem(
        number,
        "A speed-up over plain decoding on the same devices is at most the tokens per round times the largest ratio of plain step"
        " times between positions, in the mean and on every path, if a pass over more tokens takes no less time.",
        source="each round takes at least a whole pass of the target", method=method, given=partial(_points, method),
        holds=speedup_is_at_most_tokens_per_round,
    )  # fmt: skip


THEOREMS = (
    _theorem("speculative", "33a"),
    Theorem(
        "33b", "Theorem 33a holds for any cost of wider passes.", source="false: a round may take less than a plain decoding step",
        method="speculative", given=partial(_points, "speculative", ("falling",)), holds=bound_for_any_width_costs, expect="fails",
    ),
    Theorem(
        "33c", "Theorem 33a holds over plain decoding on one device, for a model split over several.",
        source="false: tokens per round do not include the gain of more devices", method="speculative",
        given=partial(_points, "speculative", ("split",)), holds=bound_over_one_device, expect="fails",
    ),
    _theorem("adaptive"),
    _theorem("hierarchical"),
)  # fmt: skip
