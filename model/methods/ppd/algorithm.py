"""Predictive Pipelined Decoding: an early exit layer predicts the next token, and other units start to decode it in advance.

Algorithms 1 and 2 of [Yang2024], and three forms that the paper leaves open. The main process decodes a token; at the exit layer a
head predicts k candidates for it, and k sub-processes start the pass of the next token with one candidate each. If a candidate
matches the final token, its sub-process becomes the main process and saves its layers; the others are stopped.

* `literal`: Algorithm 2 (Algorithm 1 is the case exit_layer = layers/2), with its barrier: main process and sub-processes wait
  for each other before the match is tested. Needs exit_layer >= layers/2.
* `eager`: no barrier. Sub-processes run on towards their own exit layer; the wrong ones are stopped when the final token is known.
  Needs exit_layer >= layers/2. Without overheads its time equals that of `literal`, to the last bit.
* `flat`: Algorithm 2 for any exit layer on k+1 units: a promoted process that is already past the exit layer predicts from its
  current layer.
* `nested`: any exit layer; sub-processes predict too, which gives a tree of processes. Stopping a process stops its descendants.

In all forms except `nested` the candidates of a round may be `batched`: one pass over k hypotheses on one other unit instead of k
passes on k units. They share the weights of the layers, so a memory-bound pass takes as long as for one candidate.

In all forms the last token's sub-processes are started and counted, as in the paper.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.methods.claim_bounds import ClaimRule
from model.methods.formula_check import FormulaCheck
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand
from model.methods.proposals import Known, Proposal, Proposals
from model.steps import GREEDY, SAMPLED, Adopt, Commit, EarlyRounds, Fork, Forward, Join, LayerSpan, Read, Steps, Stop

HEAD = 1  # logits for one position; steps have positional arguments here, because keywords slow the simulator by 2 %
FORMS = ("literal", "eager", "nested", "flat")


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """Parameters of Predictive Pipelined Decoding.

    Parameters
    ----------
    layers
        Layers of the model (d).
    exit_layer
        Layer after which the early head predicts (d-bar).
    candidates
        Number of candidates, the most likely tokens of the early head, that are decoded in advance (k).
    form
        `literal`, `eager`, `flat` or `nested`.
    sampled
        Sample the final token instead of greedy decoding (Appendix B); the candidates are the most likely tokens in both cases.
    batched
        One unit decodes all candidates in one pass.
    sequences
        Sequences of a full batch.
    batching
        `lockstep` with several sequences.
    """

    layers: int
    exit_layer: int
    candidates: int
    form: str = "literal"
    sampled: bool = False
    batched: bool = False

    LABEL = "Predictive Pipelined Decoding"
    SHORT_LABEL = "PPD"
    OUTCOMES = ("match",)
    COSTS = (
        "early_head", "dispatch", "dispatch_per_process", "dispatch_law", "link", "promotion", "fitted_on", "verify_cost",
    )  # fmt: skip
    EXACT = True
    CLAIMS = ClaimRule(
        terms=("match_rate", "layers", "exit_layer"), needs=(("match_rate",), ("exit_layer",)),
        source="Theorem 4.1 of Yang et al., TMLR 2024, arXiv:2307.05908",
    )
    FORMULA_CHECK = FormulaCheck("ppd", rate="match_rate", over_processes=True)

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """As many candidates as there are further units, read from the middle layer."""
        if known.units < 2:
            return Proposals(missing="two replicas or more: --gpus")
        if known.match_rate is None:
            return Proposals(missing="--match-rate, the probability that an early candidate is the final token")
        middle = (known.layers + 1) // 2  # the literal form needs at least half of the layers
        table = {"layers": known.layers, "exit_layer": middle, "candidates": known.units - 1}
        setting = f"{known.units - 1} candidate{'s' if known.units > 2 else ''} after layer {middle}"
        assumed = f"the match rate is that of {setting}"
        return Proposals((Proposal(table, {"kind": "iid", "match_rate": known.match_rate}, assumed, setting),))

    def __post_init__(self) -> None:
        self.check_batching()
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("exit_layer", self.exit_layer, 1, self.layers, "layers")
        checks.whole("candidates", self.candidates, 1, checks.MAX_CANDIDATES)
        checks.one_of("form", self.form, FORMS)
        checks.flag("sampled", self.sampled)
        checks.flag("batched", self.batched)
        if self.batched and self.form == "nested":
            raise checks.ParameterError(
                "batched must be false in the nested form, whose sub-processes predict too, got true; choose form='flat'"
            )
        if self.form in ("literal", "eager") and 2 * self.exit_layer < self.layers:
            raise checks.ParameterError(
                f"exit_layer must be at least layers/2={self.layers / 2:g} in the {self.form} form, got {self.exit_layer};"
                " below it choose form='nested' (sub-processes predict too) or form='flat' (k+1 units)"
            )
        if self.units > checks.MAX_UNITS:
            raise checks.ParameterError(
                f"nested needs {checks.shown(self.units)} units for candidates={self.candidates} and"
                f" exit_layer={self.exit_layer} of layers={self.layers}, more than {checks.MAX_UNITS}; take fewer candidates"
                " or a later exit_layer"
            )

    @property
    def units(self) -> int:
        """Compute units that are reserved.

        k+1; with batched candidates 2; in the nested form the peak number of busy units without overheads.
        """
        if self.form != "nested":
            return 2 if self.batched else self.candidates + 1
        generations = -(-self.layers // self.exit_layer)
        # The closed form of the sum of candidates**i over generations; a loop would be slow for thousands of generations.
        return generations if self.candidates == 1 else (self.candidates**generations - 1) // (self.candidates - 1)

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass after the prompt."""
        return self.candidates if self.batched else 1

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; `verify_cost` only for batched candidates."""
        return cls.COSTS if table.get("batched", False) is not False else cls.COSTS[:-1]

    @property
    def handover_layer(self) -> int:
        """Layer whose hidden state the early head reads and sub-processes start from."""
        return self.exit_layer

    @property
    def reads_early(self) -> bool:
        """True: tokens are predicted from layers below the last."""
        return True

    @property
    def match_candidates(self) -> int:
        """Number of candidates, one of which may match."""
        return self.candidates

    @property
    def counts_layers(self) -> bool:
        """True if operations are counted by the layers that run instead of by unit-time."""
        return self.batched

    @property
    def bounded(self) -> bool:
        """True if the method never needs more than `units` units; nested trees grow with the times of heads and links."""
        return self.form != "nested"

    @property
    def sub_processes(self) -> int:
        """Processes that a round starts: one per candidate, or one for all."""
        return 1 if self.batched else self.candidates

    def sub_process(self, layers: int) -> PassShape:
        """Pass of a sub-process through the first `layers` layers, one position after that of the main process."""
        tree = self.batched and self.candidates > 1
        return PassShape(LayerSpan(0, layers), width=self.candidates if tree else 1, tree=tree)

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand: heads, links and dispatches change which processes overlap, and let nested trees grow.

        If times depend on the position, the maximum over positions.
        """
        at = np.arange(1 if cost.uniform else tokens)
        if self.form == "nested":
            return self._demand_of_tree(cost, at, tokens)
        if self.form == "eager":
            return self._eager_demand(cost, at, tokens)
        units, transfers = self._barrier_demand(cost, at, tokens)
        return Demand(int(units), int(transfers))

    def demands(self, cost: StepCosts, tokens: int) -> Demand | None:
        """See `MethodParameters`; of the forms with a barrier."""
        if self.form in ("nested", "eager") or cost.uniform:
            return None
        units, transfers = self._barrier_demand(cost, np.arange(tokens), tokens)
        return Demand(units, transfers)

    def _barrier_demand(self, cost: StepCosts, at: NDArray[np.intp], tokens: int) -> tuple[Any, Any]:
        """Units and transfers at a cost, or at each of several."""
        link, units = np.asarray(cost.link)[..., None], np.ones((), dtype=np.intp)
        gaps = [(self.exit_layer, at)]
        if 2 * self.exit_layer < self.layers and tokens > 1:  # else predictions after a match are at the same layer
            gaps.append((self.layers - self.exit_layer, at if cost.uniform else at[1:]))
        for gap, where in gaps:
            run = cost.times(self.sub_process(self.layers - gap), where + 1)
            alone = (link == 0) & (cost.times(PassShape(LayerSpan(gap, self.layers)), where) > 0).all(axis=-1, keepdims=True)
            sent = alone | (link < cost.times(main_process(gap, self.layers), where))  # before the main process ends
            units = np.maximum(units, (np.where(run > 0, self.sub_processes, 1) + sent).max(axis=-1))
        return units, np.where(np.asarray(cost.link) > 0, self.sub_processes, 1)

    def _eager_demand(self, cost: StepCosts, at: NDArray[np.intp], tokens: int) -> Demand:
        exit_layer, subs = self.exit_layer, self.sub_processes
        rest, whole = cost.times(main_process(exit_layer, self.layers), at), cost.times(self.sub_process(exit_layer), at + 1)
        run = rest - cost.link  # working time of a sub-process until it is stopped
        transfers = subs if cost.link else 1
        # Without working time sub-processes arrive when the final token is already known.
        units = 1 + int(np.where(run > 0, np.where(whole > 0, subs, 1), 0).max())
        if tokens == 1:
            return Demand(units, transfers)
        but_last = slice(None) if cost.uniform else slice(-1)  # no round follows the last token
        at, rest, whole, run = at[but_last], rest[but_last], whole[but_last], run[but_last]
        if np.any(cost.link > cost.times(main_process(0, exit_layer), at + 1) + cost.dispatching(subs) + rest):
            transfers = max(transfers, 2)  # transfers of the next round overlap with these
        marks = (cost.times(self.sub_process(layers), at + 1) for layers in range(exit_layer + 1))
        return Demand(units, transfers, _within(run, whole, [(0 * whole, whole, marks)]))

    def _demand_of_tree(self, cost: StepCosts, starts: NDArray[np.intp], tokens: int) -> Demand:
        """Peak demand of the nested form; a process starts its sub-processes after the time `before`."""
        k, exit_layer, layers = self.candidates, self.exit_layer, self.layers
        dispatching = cost.dispatching(k)

        @cache
        def before(generation: int) -> NDArray[np.float64]:
            return np.asarray(cost.times(main_process(0, exit_layer), starts + generation) + dispatching)

        life = before(0) + cost.times(main_process(exit_layer, layers), starts)
        until = life * (1 - _ROUNDING)
        births, units = [before(0) + cost.link], 1  # start times by generation, since the start of the first process
        if np.any(births[0] * checks.MAX_UNITS <= life):
            units = checks.MAX_UNITS + 1
        while units <= checks.MAX_UNITS and np.any(births[-1] < until):
            units = 1 + k * units
            births.append(births[-1] + before(0 if cost.uniform else len(births)) + cost.link)
        births = births[:-1] if units <= checks.MAX_UNITS else births[:1]
        transfers = k if cost.link else 1
        if tokens == 1:
            return Demand(units, transfers)
        but_last = slice(None) if cost.uniform else slice(-1)  # no round follows the last token
        born, life, until = np.reshape(births, (-1, starts.size))[:, but_last], life[but_last], until[but_last]
        at = starts[but_last] + (0 if cost.uniform else 1 + np.arange(len(births))[:, None])
        below = cost.times(main_process(0, exit_layer), at)
        second = below + dispatching
        end = second + cost.times(main_process(exit_layer, layers), at)
        if cost.link:
            # Transfers that are in flight at the end of the first process may overlap with those of its successor.
            sent = np.maximum(before(0)[but_last], np.where(born + second < until, born + second, 0.0).max(axis=0, initial=0.0))
            anew = life + before(0 if cost.uniform else 1)[but_last]
            transfers += k == 1 and bool(np.any(sent + cost.link > anew * (1 + _ROUNDING)))
        to_exit = (cost.times(PassShape(LayerSpan(0, layer)), at) for layer in range(exit_layer + 1))
        to_end = (second + cost.times(PassShape(LayerSpan(exit_layer, layer)), at) for layer in range(exit_layer, layers + 1))
        stretches: list[_Stretch] = [(0 * end, below, to_exit), (below, second, ()), (second, end, to_end)]
        return Demand(units, transfers, _within(np.where(born < until, life - born, 0.0), end, stretches))


def main_process(first: int, last: int) -> PassShape:
    """Pass of the main process through layers [first, last), with a head at its end."""
    return PassShape(LayerSpan(first, last), heads=HEAD)


_ROUNDING = 1e-9
_Stretch = tuple[NDArray[np.float64], NDArray[np.float64], Iterable[NDArray[np.float64]]]


def _within(age: NDArray[np.float64], life: NDArray[np.float64], stretches: Iterable[_Stretch]) -> str | None:
    """Points at which processes of these ages are stopped: "layers" if all are between layers, else "anywhere".

    A stretch is an interval during which a process holds a unit: start, end, and the times of layer boundaries. None if all
    processes are at the end of a stretch or after the last.
    """
    near, found = _ROUNDING * life, False
    for start, end, marks in stretches:
        inside = (start + near < age) & (age < end - near)
        if not inside.any():
            continue
        found = True
        for mark in marks:
            inside &= abs(age - mark) > near
        if inside.any():
            return "anywhere"
    return "layers" if found else None


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    form = {"literal": _barrier, "flat": _barrier, "eager": _eager, "nested": _nested}[parameters.form]
    token, at = prompt[-1], len(prompt) - 1
    if form is not _nested and not stop:
        layers, exit_layer, candidates, places, _ = _fields(parameters)
        first = Forward("target", (token,), at, LayerSpan(0, exit_layer), None, HEAD)
        if (yield EarlyRounds(first, layers, candidates, places, tokens, form is _barrier, ("match", "miss"))) is not None:
            return
    yield from form(parameters, token, at, at + tokens, stop)


def _barrier(parameters: Parameters, token: int, at: int, end: int, stop: Collection[int]) -> Steps:
    """Algorithm 2. The main process has run `depth` layers of `token` and predicts early at layer `gap`."""
    layers, exit_layer, candidates, places, says = _fields(parameters)
    span = cache(LayerSpan)  # every round needs some of few different spans
    depth, gap, out = 0, exit_layer, None
    while True:
        out = yield Forward("target", (token,), at, span(depth, gap), out, HEAD)
        early = yield Read("top", out, -1, candidates)
        subs = yield Fork(_ahead(early, at + 1, span(0, layers - gap), places), places)
        out = yield Forward("target", (token,), at, span(gap, layers), out, HEAD)
        yield Join(subs)
        token, at = (yield Read(says, out)), at + 1
        match, done = token in early, at == end or token in stop
        yield Commit("match" if match else "miss", (token,))
        if done:
            return
        if match:
            depth = layers - gap
            gap = max(exit_layer, depth)
            out = yield _promoted(subs, early.index(token), at, depth, candidates)
        else:
            depth, gap, out = 0, exit_layer, None


def _eager(parameters: Parameters, token: int, at: int, end: int, stop: Collection[int]) -> Steps:
    """Algorithm 2 without its barrier: sub-processes run to their exit layer; the main process waits only for the right one."""
    layers, exit_layer, candidates, places, says = _fields(parameters)
    below, head_alone, above = LayerSpan(0, exit_layer), LayerSpan(exit_layer, exit_layer), LayerSpan(exit_layer, layers)
    first, out = below, None
    while True:
        out = yield Forward("target", (token,), at, first, out, HEAD)
        early = yield Read("top", out, -1, candidates)
        subs = yield Fork(_ahead(early, at + 1, below, places), places)
        out = yield Forward("target", (token,), at, above, out, HEAD)
        token, at = (yield Read(says, out)), at + 1
        match, done = token in early, at == end or token in stop
        right = early.index(token) if match and not done else None
        wanted = None if right is None else subs[right if len(subs) == candidates else 0]
        yield Stop(tuple([sub for sub in subs if sub is not wanted]))
        yield Commit("match" if match else "miss", (token,))
        if done:
            return
        first, out = below, None
        if right is not None:
            first = head_alone
            yield Join((wanted,))
            out = yield _promoted(subs, right, at, exit_layer, candidates)


def _nested(parameters: Parameters, token: int, at: int, end: int, stop: Collection[int]) -> Steps:
    """Decode the token after `token` and start a process of the same kind for each candidate; on a match that one continues."""
    layers, exit_layer, candidates, _, says = _fields(parameters)
    below, above = LayerSpan(0, exit_layer), LayerSpan(exit_layer, layers)
    anywhere = (None,) * candidates
    while True:
        out = yield Forward("target", (token,), at, below, None, HEAD)
        early = yield Read("top", out, -1, candidates)
        subs = yield Fork(tuple(_nested(parameters, guess, at + 1, end, stop) for guess in early), anywhere)
        out = yield Forward("target", (token,), at, above, out, HEAD)
        token, at = (yield Read(says, out)), at + 1
        match, done = token in early, at == end or token in stop
        yield Stop(tuple(sub for guess, sub in zip(early, subs, strict=True) if guess != token or done))
        yield Commit("match" if match else "miss", (token,))
        if done:
            return
        if match:
            return


def _ahead(early: Sequence[int], at: int, layers: LayerSpan, places: Sequence[int]) -> tuple[Forward, ...]:
    """Passes of a round's sub-processes: one per candidate, or a single pass over independent candidates."""
    if len(places) < len(early):
        return (Forward("target", tuple(early), at, layers, tree=(-1,) * len(early)),)
    return tuple([Forward("target", (guess,), at, layers) for guess in early])


def _promoted(subs: Sequence[Any], right: int, at: int, depth: int, candidates: int) -> Adopt:
    """Continue from the right candidate: adopt its process, or its row of the process of all candidates."""
    return Adopt(subs[right], at, depth) if len(subs) == candidates else Adopt(subs[0], at, depth, right)


def _fields(parameters: Parameters) -> tuple[int, int, int, tuple[int, ...], Literal["next", "sample"]]:
    places = (1,) if parameters.batched else tuple(range(1, parameters.candidates + 1))
    return parameters.layers, parameters.exit_layer, parameters.candidates, places, SAMPLED if parameters.sampled else GREEDY
