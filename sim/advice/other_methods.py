"""Other methods, and other uses of the same devices, in the units of the advice: TPOT, and tokens per second and GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.advice.draft_choice import DraftChoice, ratio_interval
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.engines import law_costs, step_law
from model.engines.cells import Floats
from model.engines.step_law import StepLaw
from model.hardware import devices, memory_limit
from model.methods import registry
from model.methods.prediction import MethodChoice, PredictionPoints, by_outcome
from model.methods.proposals import PROPOSED_TOKENS, Known, Proposal
from sim.advice.situation import Situation
from sim.scenarios import cases, outcomes_section
from sim.scenarios.cases import Case

DRAWS = 64
"""Draws of the uncertain inputs that an interval of another method is computed from; each is an evaluation of its closed form."""
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


def evaluate(said: Situation) -> Evaluated:
    """Evaluate the proposals of all methods in closed form on the step law, in lockstep batches."""
    if said.shape is None:
        return Evaluated(left_out=(("others", "the model's layers are not known: --model"),))
    longest = max(said.draft_lengths)
    drafted = memory_limit.draft_shape(said.draft)
    rates = said.cases[0].point[:longest]
    matches = None if said.match_rates is None else float(said.match_rates.mean())
    known = Known(
        said.shape.layers, said.gpus // said.tensor_parallel, said.draft_lengths, tuple(rates.tolist()), matches, said.said.lossy,
        drafted is not None and drafted.draft is None,
    )  # fmt: skip
    draws = tuple(_drawn(said, known))
    rows: list[Mapping[str, Any]] = []
    left_out, notes = [], []
    for name in registry.names():
        made, missing = registry.parameters(name).proposals(known)
        if missing:
            left_out.append((name, missing))
        if not made:
            continue
        try:
            found = _run(said, name, made, draws)
        except ParameterError as error:
            left_out.append((name, str(error)))
            continue
        rows += found
        notes += [f"{registry.label(name, short=True)}: {made[0].assumed}"] if made[0].assumed else []
    return Evaluated(tuple(rows), tuple(left_out), tuple(notes))


class _Draw(NamedTuple):
    """One draw of everything that is uncertain: what would be known, and the step law, if it were right."""

    known: Known
    law: StepLaw


def _drawn(said: Situation, known: Known) -> Iterator[_Draw]:
    """Draws of acceptance, match rate and step law, in pairs as `DraftChoice` pairs them."""
    rates, matches = said.cases[0].draws[:, : len(known.rates)], said.match_rates
    for at in range(DRAWS):
        match_rate = None if matches is None else float(matches[at % matches.size])
        drawn = replace(known, rates=tuple(rates[at % len(rates)].tolist()), match_rate=match_rate)
        yield _Draw(drawn, said.law.drawn(at))


def _run(said: Situation, name: str, made: tuple[Proposal, ...], draws: Sequence[_Draw]) -> list[dict[str, Any]]:
    """Rows of a method: by batch the fastest of its proposals."""
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
        rows = []
        for batch, row in best.items():
            chosen = row["point"] // len(said.batches)
            case = cases.resolve({**tables, "method": [methods[chosen] | {"sequences": batch}]})
            rows.append(_row(row, said, name, _interval(said, case, chosen, row, draws)))
    return rows


def _interval(
    said: Situation, case: Case, chosen: int, row: Mapping[str, Any], draws: Sequence[_Draw]
) -> tuple[float, float] | None:
    """Bounds of the speed-up of a proposal, as those of draft lengths; None if nothing that it rests on has a spread."""
    values = speedups_of_draws(case, chosen, draws)
    batch, length = float(row["sequences"]), row.get("draft_length") or 0
    beyond = float(np.max(said.law.beyond(batch, [0, length])))
    noise = np.concatenate([each.law.draws["noise"] for each in draws])
    low, high = (float(each) for each in ratio_interval(values, noise, beyond))
    return (min(low, row["speedup"]), max(high, row["speedup"])) if high > low * (1 + 1e-9) else None


def speedups_of_draws(case: Case, chosen: int, draws: Sequence[_Draw]) -> Floats:
    """Speed-ups of the method's proposal of this number, in closed form, with each draw of the inputs; shape (draws,) [-]."""
    assert isinstance(case.cost, PassSeconds)
    choices, laws = [], []
    for each in draws:
        outcomes = registry.parameters(case.method).proposals(each.known).made[chosen].outcomes
        laws.append(by_outcome({
            kind: outcome.law for kind, outcome in outcomes_section.resolve(
                dict(outcomes) or None, "method.outcomes", case.method, case.parameters, PROPOSED_TOKENS
            ).items()
        }))  # fmt: skip
        choices.append(MethodChoice(case.parameters, PROPOSED_TOKENS, law_costs.with_law(case.cost, each.law)))
    index = np.arange(len(draws))
    found = registry.method(case.method).predict_points(PredictionPoints(choices, laws, index, index))
    return np.asarray(found.plain_latency / found.latency)


def _row(row: Mapping[str, Any], said: Situation, name: str, interval: tuple[float, float] | None) -> dict[str, Any]:
    gpus, speedup = int(row["reserved_units"]), row["speedup"]
    low, high = (None, None) if interval is None else interval
    return {
        "method": name, "acceptance": said.cases[0].text, "batch": int(row["sequences"]), "draft_length": row.get("draft_length"),
        "speedup": speedup, "speedup_low": low, "speedup_high": high, "tpot_ms": row["tpot_ms"],
        "tokens_per_s_per_gpu": row["sequences"] * 1e3 / row["tpot_ms"] / gpus, "gpus": gpus, "exact": bool(row["exact"]),
        "best": False, "tie": False, "advised": False,
    }  # fmt: skip


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
            said.shape, devices.device(said.gpu), context=context, tensor_parallel=split, draft=drafted
        )
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
