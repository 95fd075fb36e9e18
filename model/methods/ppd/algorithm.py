"""Predictive Pipelined Decoding: early candidates decoded ahead on other units.

Algorithms 1 and 2 of [Yang2024], and three forms that the paper leaves open.

* `literal`: Algorithm 2 (Algorithm 1 is the case exit_layer = layers/2), with its barrier: main process and sub-processes wait
  for each other before the match is looked at. Needs exit_layer >= layers/2.
* `eager`: sub-processes run on towards their own exit layer and nobody waits for them; the wrong ones are stopped when the main
  process knows. Needs exit_layer >= layers/2. Without overheads it takes the time of `literal`, to the last bit.
* `flat`: Algorithm 2 for any exit layer on k+1 units: a promoted process that is already past the exit layer predicts where it is.
* `nested`: for any exit layer, sub-processes predict too: a tree of processes; stopping one stops what it started.

In all but the nested form the candidates of a round may be `batched`: one pass over k hypotheses on one other unit, in place of k
passes on k. They share the weights of its layers, so where reading these is what takes time it takes the time of one candidate.

In all of them the last token's sub-processes are started and counted, as the paper counts them.

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
from model.methods.formula_check import FormulaCheck
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand
from model.steps import GREEDY, SAMPLED, Adopt, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop

HEAD = 1  # a pass projects one position; the steps' fields go unnamed here because naming them costs the simulator 2 %
FORMS = ("literal", "eager", "nested", "flat")


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """A choice of Predictive Pipelined Decoding: d = `layers`, d-bar = `exit_layer`, k = `candidates`, and the form.

    `sampled` draws the final token in place of taking the likeliest (Appendix B); the candidates are the likeliest all the same.
    `batched` has one unit read all candidates in one pass.
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
    FORMULA_CHECK = FormulaCheck("ppd", rate="match_rate", over_processes=True)

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
        """Compute units that it reserves: k+1, where candidates are batched 2, and in the nested form as many as are busy at once
        where layers alone take time.
        """
        if self.form != "nested":
            return 2 if self.batched else self.candidates + 1
        generations = -(-self.layers // self.exit_layer)
        # The sum of candidates**i over the generations, in one step: with thousands of them it has thousands of digits.
        return generations if self.candidates == 1 else (self.candidates**generations - 1) // (self.candidates - 1)

    @property
    def widest(self) -> int:
        """Tokens of its widest pass behind the prompt."""
        return self.candidates if self.batched else 1

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Of COSTS those that it looks at with these parameters: without batched candidates no pass is wide."""
        return cls.COSTS if table.get("batched", False) is not False else cls.COSTS[:-1]

    @property
    def handover_layer(self) -> int:
        """Layer whose state other passes start from, or an early head reads."""
        return self.exit_layer

    @property
    def reads_early(self) -> bool:
        """Whether tokens are read from layers below the last."""
        return True

    @property
    def match_candidates(self) -> int:
        """Candidates of which one may match."""
        return self.candidates

    @property
    def counts_layers(self) -> bool:
        """Whether its operations are those of the layers that it runs, and not its unit-time."""
        return self.batched

    @property
    def bounded(self) -> bool:
        """Whether it never wants more units than these, whatever anything costs; heads and links make nested trees grow."""
        return self.form != "nested"

    @property
    def sub_processes(self) -> int:
        """Processes that a round starts: one for each candidate, or one for all."""
        return 1 if self.batched else self.candidates

    def sub_process(self, layers: int) -> PassShape:
        """The pass of a sub-process through so many layers from the first on, behind one position more than the main process."""
        tree = self.batched and self.candidates > 1
        return PassShape(LayerSpan(0, layers), width=self.candidates if tree else 1, tree=tree)

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """What it may want at once: heads, links and dispatches change who is at work beside whom, and let nested trees grow.

        Where passes take other times at other positions it is the most that is wanted at any of them.
        """
        at = np.arange(1 if cost.uniform else tokens)
        if self.form == "nested":
            return self._demand_of_tree(cost, at, tokens)
        if self.form == "eager":
            return self._eager_demand(cost, at, tokens)
        later, units = at if cost.uniform else at[1:], 1  # behind a match
        gaps = [(self.exit_layer, at), (max(self.exit_layer, self.layers - self.exit_layer), later)]
        for gap, where in gaps[: min(tokens, 2)]:
            rest = cost.times(main_process(gap, self.layers), where)
            run = cost.times(self.sub_process(self.layers - gap), where + 1)
            units = max(units, int((np.where(run > 0, self.sub_processes, 1) + (cost.link < rest)).max()))
        return Demand(units, self.sub_processes if cost.link else 1)

    def _eager_demand(self, cost: StepCosts, at: NDArray[np.intp], tokens: int) -> Demand:
        exit_layer, subs = self.exit_layer, self.sub_processes
        rest, whole = cost.times(main_process(exit_layer, self.layers), at), cost.times(self.sub_process(exit_layer), at + 1)
        run = rest - cost.link  # for so long a sub-process has been at work when it is stopped
        transfers = subs if cost.link else 1
        # Where it is none they arrive when it is known which one is right.
        units = 1 + int(np.where(run > 0, np.where(whole > 0, subs, 1), 0).max())
        if tokens == 1:
            return Demand(units, transfers)
        but_last = slice(None) if cost.uniform else slice(-1)  # behind the last token comes nothing
        at, rest, whole, run = at[but_last], rest[but_last], whole[but_last], run[but_last]
        if np.any(cost.link > cost.times(main_process(0, exit_layer), at + 1) + cost.dispatching(subs) + rest):
            transfers = max(transfers, 2)  # the next round's are sent while these are under way, wanted or not
        marks = (cost.times(self.sub_process(layers), at + 1) for layers in range(exit_layer + 1))
        return Demand(units, transfers, _within(run, whole, [(0 * whole, whole, marks)]))

    def _demand_of_tree(self, cost: StepCosts, starts: NDArray[np.intp], tokens: int) -> Demand:
        """That of the nested form, whose processes send out their own after `before`."""
        k, exit_layer, layers = self.candidates, self.exit_layer, self.layers
        dispatching = cost.dispatching(k)

        @cache
        def before(generation: int) -> NDArray[np.float64]:
            return np.asarray(cost.times(main_process(0, exit_layer), starts + generation) + dispatching)

        life = before(0) + cost.times(main_process(exit_layer, layers), starts)
        until = life * (1 - _ROUNDING)
        births, units = [before(0) + cost.link], 1  # by generation, from the birth of the first process on
        if np.any(births[0] * checks.MAX_UNITS <= life):
            units = checks.MAX_UNITS + 1
        while units <= checks.MAX_UNITS and np.any(births[-1] < until):
            units = 1 + k * units
            births.append(births[-1] + before(0 if cost.uniform else len(births)) + cost.link)
        births = births[:-1] if units <= checks.MAX_UNITS else births[:1]
        transfers = k if cost.link else 1
        if tokens == 1:
            return Demand(units, transfers)
        but_last = slice(None) if cost.uniform else slice(-1)  # behind the last token comes nothing
        born, life, until = np.reshape(births, (-1, starts.size))[:, but_last], life[but_last], until[but_last]
        at = starts[but_last] + (0 if cost.uniform else 1 + np.arange(len(births))[:, None])
        below = cost.times(main_process(0, exit_layer), at)
        second = below + dispatching
        end = second + cost.times(main_process(exit_layer, layers), at)
        if cost.link:
            # What is under way when the first process has ended and begins anew may still be when that sends.
            sent = np.maximum(before(0)[but_last], np.where(born + second < until, born + second, 0.0).max(axis=0, initial=0.0))
            anew = life + before(0 if cost.uniform else 1)[but_last]
            transfers += k == 1 and bool(np.any(sent + cost.link > anew * (1 + _ROUNDING)))
        to_exit = (cost.times(PassShape(LayerSpan(0, layer)), at) for layer in range(exit_layer + 1))
        behind = (second + cost.times(PassShape(LayerSpan(exit_layer, layer)), at) for layer in range(exit_layer, layers + 1))
        stretches: list[_Stretch] = [(0 * end, below, to_exit), (below, second, ()), (second, end, behind)]
        return Demand(units, transfers, _within(np.where(born < until, life - born, 0.0), end, stretches))


def main_process(first: int, last: int) -> PassShape:
    """A pass of the main process, whose state is projected at its end."""
    return PassShape(LayerSpan(first, last), heads=HEAD)


_ROUNDING = 1e-9
_Stretch = tuple[NDArray[np.float64], NDArray[np.float64], Iterable[NDArray[np.float64]]]


def _within(age: NDArray[np.float64], life: NDArray[np.float64], stretches: Iterable[_Stretch]) -> str | None:
    """Where processes of these ages are, in the stretches for which they hold a unit: each a start, an end, and all between layers.

    None where all are at the end of a stretch, or beyond the last.
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
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends sequences, of `stop`."""
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    form = {"literal": _barrier, "flat": _barrier, "eager": _eager, "nested": _nested}[parameters.form]
    yield from form(parameters, prompt[-1], len(prompt) - 1, len(prompt) - 1 + tokens, stop)


def _barrier(parameters: Parameters, token: int, at: int, end: int, stop: Collection[int]) -> Steps:
    """Algorithm 2. The main process is at depth `depth` of `token`, whose early prediction is made at layer `gap`."""
    layers, exit_layer, candidates, places, says = _fields(parameters)
    span = cache(LayerSpan)  # few differ, and every round has some
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
    """As Algorithm 2, but sub-processes run to their exit layer, and only the right one is ever waited for."""
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
    """A process that decodes what follows `token` and starts the like for each candidate. On a match the right one goes on."""
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
    """The passes of a round's sub-processes: one for each candidate, or on a single unit one for all, none following another."""
    if len(places) < len(early):
        return (Forward("target", tuple(early), at, layers, tree=(-1,) * len(early)),)
    return tuple([Forward("target", (guess,), at, layers) for guess in early])


def _promoted(subs: Sequence[Any], right: int, at: int, depth: int, candidates: int) -> Adopt:
    """Take over the right candidate: its process, or what is its own of the one that read them all."""
    return Adopt(subs[right], at, depth) if len(subs) == candidates else Adopt(subs[0], at, depth, right)


def _fields(parameters: Parameters) -> tuple[int, int, int, tuple[int, ...], Literal["next", "sample"]]:
    places = (1,) if parameters.batched else tuple(range(1, parameters.candidates + 1))
    return parameters.layers, parameters.exit_layer, parameters.candidates, places, SAMPLED if parameters.sampled else GREEDY
