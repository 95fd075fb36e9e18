"""Other methods, and other uses of the same devices, in the units of the advice: TPOT, and tokens per second and GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.advice.draft_choice import DraftChoice, ratio_interval
from model.architectures import draft_heads
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.costs.steady_prices import SteadyPrices
from model.engines import law_costs, step_law
from model.engines.cells import Floats
from model.engines.step_law import StepLaw
from model.hardware import devices, memory_limit
from model.methods import registry
from model.methods.method_parameters import MethodParameters
from model.methods.prediction import MethodChoice, PredictionPoints, by_outcome
from model.methods.proposals import PROPOSED_TOKENS, Known, Proposal
from sim.advice.situation import Situation
from sim.scenarios import cases, outcomes_section
from sim.scenarios.cases import Case

DRAWS = 64
"""Draws of the uncertain inputs that an interval of another method is computed from: the first ones of those of draft lengths."""
NO_SPREAD = "no input that differs from plain decoding's has a spread"
"""Why a row has no interval."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Rows of other methods, those that were left out with the reason, and what was assumed."""

    rows: tuple[Mapping[str, Any], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """A use of all devices at one load: running sequences over all of them, in the replicas that they make up."""

    option: str
    running: int
    replicas: int
    gpus_per_replica: int
    sequences_per_replica: int
    draft_length: int | None
    tpot_ms: float
    tokens_per_s_per_gpu: float
    asked: bool
    """True for the use that the advice is about."""


@dataclass(frozen=True, eq=False)
class MethodSpeed:
    """A method at one number of running sequences and one context, with the fastest of its settings.

    Parameters
    ----------
    row
        Row of the table of advice.
    context
        Cached positions per sequence; None: unknown.
    draws
        Speed-ups with each draw of the uncertain inputs, without errors of measurement; shape (draws,). Draw i of all methods has
        the same acceptance and the same step law.
    beyond
        Doublings beyond the fitted cells of the step law.
    """

    row: Mapping[str, Any]
    context: int | None
    draws: Floats
    beyond: float

    @property
    def label(self) -> str:
        """Short name, for tables and figures."""
        return registry.label(self.row["method"], short=True)


class MethodSpeeds(NamedTuple):
    """Speeds of all methods that could be evaluated, the others with the reason, and what was assumed."""

    found: tuple[MethodSpeed, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def evaluate(said: Situation) -> Evaluated:
    """Evaluate the proposals of all methods in closed form on the step law, at the batches and the context of the situation."""
    if said.shape is None:
        return Evaluated(left_out=(("others", "the model's layers are not known: --model"),))
    speeds = evaluate_cells(said, {said.context: said.batches})
    return Evaluated(tuple(each.row for each in speeds.found), speeds.left_out, speeds.notes)


def evaluate_cells(said: Situation, batches: Mapping[int | None, Sequence[int]]) -> MethodSpeeds:
    """Evaluate the proposals of all methods in closed form on the step law, at these running sequences by context.

    Methods with a time per token in the long run have it for all draws and cells together, at the context; the others decode
    `PROPOSED_TOKENS` tokens after it in lockstep batches.
    """
    if said.shape is None:
        raise ParameterError("--model is required to compare all methods: the layers of this step law's model are not known")
    known = _known(said)
    draws = tuple(_drawn(said, known))
    cells = [_Cell(batch, context) for context, some in batches.items() for batch in some]
    where = [said.at(each.context).context_of_law for each in cells]
    place = [each.batch for each in cells], [np.nan if each is None else each for each in where]
    steady = _Steady(
        cells, law_costs.steady_prices(said.law, *place), law_costs.steady_prices(said.law, *place, draws=DRAWS), draws
    )
    found: list[MethodSpeed] = []
    left_out, notes = [], []
    for name in registry.names():
        made, missing = registry.parameters(name).proposals(known)
        if missing:
            left_out.append((name, missing))
        if not made:
            continue
        try:
            if registry.method(name).steady_state is not None:
                mine = _in_the_long_run(said, name, made, steady)
            else:
                mine = [
                    each for context, some in batches.items() if some
                    for each in _run(replace(said.at(context), batches=tuple(some)), name, made, draws)
                ]
        except ParameterError as error:
            left_out.append((name, str(error)))
            continue
        found += mine
        left_out += [] if mine else [(name, "no proposal has a time here")]
        notes += [f"{registry.label(name, short=True)}: {made[0].assumed}"] if made[0].assumed else []
    return MethodSpeeds(tuple(found), tuple(left_out), tuple(notes))


class _Cell(NamedTuple):
    """Running sequences of a replica, and cached positions of each; None: unknown."""

    batch: int
    context: int | None


class _Draw(NamedTuple):
    """One draw of everything that is uncertain: what would be known, and the step law, if it were right."""

    known: Known
    law: StepLaw


class _Steady(NamedTuple):
    """Prices of all cells, most likely ones and draws; and the draws of everything."""

    cells: Sequence[_Cell]
    likely: SteadyPrices
    drawn: SteadyPrices
    draws: Sequence[_Draw]


def _known(said: Situation) -> Known:
    """What is known of the situation, with the most likely rates."""
    assert said.shape is not None
    drafted = memory_limit.draft_shape(said.draft)
    rates = said.cases[0].point[: max(said.draft_lengths)]
    matches = None if said.match_rates is None else float(said.match_rates.mean())
    return Known(
        said.shape.layers, said.gpus // said.tensor_parallel, said.draft_lengths, tuple(rates.tolist()), matches, said.said.lossy,
        drafted is not None and drafted.draft is None, draft_heads.is_parallel(said.draft),
        None if said.ranks is None else said.ranks.point, said.block_rates,
    )  # fmt: skip


def _drawn(said: Situation, known: Known) -> Iterator[_Draw]:
    """Draws of acceptance, ranks, match rate and step law, in pairs as `DraftChoice` pairs them."""
    rates, matches = said.cases[0].draws[:, : len(known.rates)], said.match_rates
    for at in range(DRAWS):
        match_rate = None if matches is None else float(matches[at % matches.size])
        ranks = None if said.ranks is None else said.ranks.draws[at % len(said.ranks.draws)]
        drawn = replace(known, rates=tuple(rates[at % len(rates)].tolist()), match_rate=match_rate, rank_rates=ranks)
        yield _Draw(drawn, said.law.drawn(at))


def _in_the_long_run(said: Situation, name: str, made: Sequence[Proposal], steady: _Steady) -> list[MethodSpeed]:
    """Speeds of a method with a time per token in the long run: in each cell the fastest proposal of each variant."""
    method = registry.method(name)
    assert method.steady_state is not None
    parameters = [method.kind(**each.parameters) for each in made]
    times = []
    for each, own in zip(made, parameters, strict=True):
        times.append(method.steady_state(own, [_law(name, own, each.outcomes)], steady.likely)[0])
    plain = (steady.likely.verify(1) + steady.likely.waiting)[0]
    found: dict[tuple[str, int], MethodSpeed] = {}
    for variant in dict.fromkeys(each.variant for each in made):
        mine = [index for index, each in enumerate(made) if each.variant == variant]
        ranked = np.stack([np.where(np.isnan(times[index]), np.inf, times[index]) for index in mine])
        best = np.array(mine)[ranked.argmin(axis=0)]
        for chosen in dict.fromkeys(best.tolist()):
            at = np.flatnonzero((best == chosen) & np.isfinite(ranked.min(axis=0)))
            drawn = _drawn_speedups(name, parameters[chosen], chosen, steady, at)
            for column, cell in enumerate(at.tolist()):
                batch, context = steady.cells[cell]
                seconds = float(times[chosen][cell])
                found[variant, cell] = _speed(
                    said, name, made[chosen], parameters[chosen], batch, context, float(plain[cell]) / seconds, 1e3 * seconds,
                    drawn[:, column],
                )  # fmt: skip
    return [found[key] for key in sorted(found, key=lambda each: each[1])]


def _drawn_speedups(name: str, parameters: MethodParameters, chosen: int, steady: _Steady, at: NDArray[np.intp]) -> Floats:
    """Speed-ups of the proposal of this number with each draw, shape (draws, cells)."""
    method = registry.method(name)
    assert method.steady_state is not None
    laws, known = [], {}
    for each in steady.draws:
        outcomes = method.kind.proposals(each.known).made[chosen].outcomes
        key = repr(outcomes)
        if key not in known:
            known[key] = _law(name, parameters, outcomes)
        laws.append(known[key])
    prices = steady.drawn.at(at)
    return np.asarray((prices.verify(1) + prices.waiting) / method.steady_state(parameters, laws, prices))


def _law(name: str, parameters: MethodParameters, outcomes: Mapping[str, Any]) -> Any:
    """Law, or laws by outcome, of a proposal's outcomes."""
    found = outcomes_section.resolve(dict(outcomes) or None, "method.outcomes", name, parameters, PROPOSED_TOKENS)
    return by_outcome({kind: outcome.law for kind, outcome in found.items()})


def _run(said: Situation, name: str, made: tuple[Proposal, ...], draws: Sequence[_Draw]) -> list[MethodSpeed]:
    """Speeds of a method in decodings of a number of tokens: by batch the fastest of its proposals."""
    import sim

    with tempfile.TemporaryDirectory() as folder:
        law = step_law.write(said.law, Path(folder) / "law.json")
        cost: dict[str, Any] = {"kind": "engine", "law": str(law), "prompt": said.context or 0}
        cost |= {"tensor_parallel": said.tensor_parallel} | ({} if said.name is None else {"shape": said.name})
        methods = [
            {"name": name, "batching": "lockstep", **each.parameters} | ({"outcomes": dict(each.outcomes)} if each.outcomes else {})
            for each in made
        ]
        tables = {"scenario": {"name": "advice", "tokens": PROPOSED_TOKENS}, "method": methods, "cost": cost}
        found = sim.run({**tables, "sweep": {"method.sequences": [*said.batches]}}, views=["formula"]).to_dicts()
        best: dict[int, dict[str, Any]] = {}
        for row in found:
            if row["speedup"] is not None and row["speedup"] > best.get(row["sequences"], row | {"speedup": 0})["speedup"]:
                best[row["sequences"]] = row
        speeds = []
        for batch, row in best.items():
            chosen = row["point"] // len(said.batches)
            case = cases.resolve({**tables, "method": [methods[chosen] | {"sequences": batch}]})
            values = speedups_of_draws(case, chosen, draws)
            speeds.append(_speed(
                said, name, made[chosen], case.parameters, batch, said.context, row["speedup"], row["tpot_ms"], values
            ))  # fmt: skip
    return speeds


def speedups_of_draws(case: Case, chosen: int, draws: Sequence[_Draw]) -> Floats:
    """Speed-ups of the method's proposal of this number, in closed form, with each draw of the inputs; shape (draws,) [-]."""
    assert isinstance(case.cost, PassSeconds)
    choices, laws = [], []
    for each in draws:
        outcomes = registry.parameters(case.method).proposals(each.known).made[chosen].outcomes
        laws.append(_law(case.method, case.parameters, outcomes))
        choices.append(MethodChoice(case.parameters, PROPOSED_TOKENS, law_costs.with_law(case.cost, each.law)))
    index = np.arange(len(draws))
    found = registry.method(case.method).predict_points(PredictionPoints(choices, laws, index, index))
    return np.asarray(found.plain_latency / found.latency)


def _speed(
    said: Situation, name: str, proposal: Proposal, parameters: MethodParameters, batch: int, context: int | None, speedup: float,
    tpot_ms: float, draws: Floats,
) -> MethodSpeed:  # fmt: skip
    """Speed of a proposal, with the bounds of its speed-up as those of draft lengths: none if nothing that it rests on has a
    spread."""
    length = proposal.parameters.get("draft_length")
    beyond = float(np.max(said.law.beyond(float(batch), [0, length or parameters.longest_draft])))
    low, high = (float(each) for each in ratio_interval(draws, noise_of(said.law), beyond))
    spread = high > low * (1 + 1e-9)
    gpus = parameters.devices(parameters.units, said.tensor_parallel)
    row = {
        "method": proposal.variant or name, "setting": proposal.setting, "acceptance": said.cases[0].text,
        "batch": batch, "draft_length": length, "speedup": speedup, "speedup_low": min(low, speedup) if spread else None,
        "speedup_high": max(high, speedup) if spread else None, "tpot_ms": tpot_ms,
        "tokens_per_s_per_gpu": batch * 1e3 / tpot_ms / gpus, "gpus": gpus, "exact": bool(parameters.exact),
        "best": False, "tie": False, "advised": False,
    }  # fmt: skip
    return MethodSpeed(row, context, draws, beyond)


def gpu_ms_per_token(row: Mapping[str, Any]) -> float:
    """GPU-time of an output token: all GPUs that the method reserves, for the time that it takes, over its sequences [ms]."""
    return float(row["gpus"] * row["tpot_ms"] / row["batch"])


def noise_of(law: StepLaw) -> Floats:
    """Relative error of a measurement in each draw; shape (draws,)."""
    return np.asarray(law.draws["noise"][np.arange(DRAWS) % law.draws["noise"].size])


def alternatives(said: Situation, choice: DraftChoice, others: Evaluated) -> list[Alternative]:
    """Uses of all devices, for each load of the table; without further devices there are none."""
    if said.gpus < 2:
        return []
    found: list[Alternative] = []
    splits = [said.tensor_parallel]
    if said.law.kernels is not None:
        powers = (2**power for power in range(int(np.log2(said.gpus)) + 1))
        splits += [each for each in powers if each != said.tensor_parallel and said.gpus % each == 0]
    for split in splits:
        found += _of_split(said, choice, split)
    replicas = said.gpus // said.tensor_parallel
    for row in others.rows:
        groups = said.gpus // int(row["gpus"])
        running = row["batch"] * groups
        if row["gpus"] > 1 and row["exact"] and groups and running in {batch * replicas for batch in said.batches}:
            label = registry.label(row["method"], short=True)
            found.append(Alternative(
                f"{label} on groups of {row['gpus']} GPUs", running, groups, row["gpus"], row["batch"], row["draft_length"],
                row["tpot_ms"], row["batch"] * groups * 1e3 / row["tpot_ms"] / said.gpus, False,
            ))  # fmt: skip
    return sorted(found, key=lambda each: (each.running, -each.tokens_per_s_per_gpu))


def _of_split(said: Situation, choice: DraftChoice, split: int) -> list[Alternative]:
    """Replicas over `split` devices each: plain, and with the best draft length."""
    replicas = said.gpus // split
    law = said.law
    if law.kernels is not None and split != said.tensor_parallel:
        law = replace(law, kernels=replace(law.kernels, tensor_parallel=split))
    loads = [batch * (said.gpus // said.tensor_parallel) for batch in said.batches]
    kept = [(load, load // replicas) for load in loads if load % replicas == 0 and load >= replicas]
    if said.shape is not None and said.gpu is not None:
        context = said.context or 0
        drafted = memory_limit.draft_shape(said.draft, None if law.kernels is None else law.kernels.dtype)
        most = memory_limit.largest_batch(
            said.shape, devices.device(said.gpu), context=context, tensor_parallel=split, draft=drafted,
            draft_budget=said.said.draft_context_budget,
        )  # fmt: skip
        kept = [(load, each) for load, each in kept if each <= most]
    if not kept:
        return []
    try:
        at = replace(choice, law=law, batches=tuple(float(each) for _, each in kept))
        tpot = 1e3 * at.tpot_seconds
    except ParameterError:
        return []  # the model cannot be split so, or no profile covers it
    found = []
    name = f"{replicas} replica{'s' if replicas > 1 else ''} of {split} GPU{'s' if split > 1 else ''}"
    for row, (load, each) in enumerate(kept):
        for column in dict.fromkeys((0, int(at.best[row]))):
            length = at.draft_lengths[column]
            found.append(Alternative(
                f"{name}, {f'K = {length}' if length else 'plain'}", load, replicas, split, each, length, float(tpot[row, column]),
                load * 1e3 / float(tpot[row, column]) / said.gpus, bool(split == said.tensor_parallel and column == at.best[row]),
            ))  # fmt: skip
    return found
