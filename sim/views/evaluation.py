"""Simulated views of a point: `paths` (vectorised Monte Carlo) and `events` (discrete-event simulation on units and links).

Each returns sums over consecutive replications of a point, so that a point can be split among workers; `sim.runs.results_table`
merges them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import strict_json
from model.base.checks import ParameterError
from model.costs.step_costs import StepCosts
from model.interpret.account import Account
from model.interpret.simulated_answers import World
from model.methods import registry
from model.methods.prediction import by_outcome
from model.methods.rounds.round_walks import Tally
from model.methods.worlds import worlds
from model.outcomes import random_streams
from model.outcomes.outcome_kinds import KINDS
from model.outcomes.outcome_laws import Outcomes
from model.steps import CacheError
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.views import time_breakdown
from sim.views.metrics import Sums

Floats = NDArray[np.float64]
Row = dict[str, Any]

EXPECTED = (ParameterError, CacheError)
"""Errors that may occur at one point of a grid and not at others."""


# --- paths -------------------------------------------------------------------------------------------------------------


def outcome_tiles(case: Case, block: int, positions: int, name: str = "match") -> Iterator[NDArray[np.bool_]]:
    """Outcomes of a block of replications by position, from the random draws that all views share."""
    if name not in case.outcomes or not positions:
        return iter(())
    found: Iterator[NDArray[np.bool_]] = case.outcomes[name].law.sample(
        random_streams.recent_tiles(case.settings.seed, name, block, positions)
    )
    return found


def drafts_of(case: Case, block: int, positions: int, name: str = "accept", sequence: int = 0) -> Iterator[Outcomes]:
    """Outcomes of drafted tokens of one sequence, as functions of the position in the draft."""
    draws = random_streams.recent_tiles(case.settings.seed, random_streams.sequence_purpose(name, sequence), block, positions)
    return iter(case.outcomes[name].law.drafts(draws) if positions else ())


Walked = tuple[Floats, Floats] | Tally
"""Time and busy time by replication; a `Tally` also counts rounds."""


def walk(case: Case, block: int) -> Walked:
    """Time and busy time of a block of replications by the method's vectorised paths; a `Tally` also counts rounds."""
    return _on_devices(case, _walk(case, case.cost, block))


def walk_with_parts(case: Case, block: int) -> tuple[Walked, time_breakdown.TimeBreakdown | None]:
    """Same as `walk`, with the parts of the time; None where they are not defined."""
    if time_breakdown.missing_because(case) is not None:
        return walk(case, block), None
    reduced = time_breakdown.passes_only(case)
    if reduced is None:
        found = _walk(case, case.cost, block)
        return _on_devices(case, found), time_breakdown.of_target_only(found[0])
    passes = _walk(case, reduced, block)
    if time_breakdown.passes_alone(case):
        # Nothing but passes, on devices that count alike: the time is that of the passes, and busy time equals it.
        found = passes._replace(busy=passes.time) if isinstance(passes, Tally) else (passes[0], passes[0])
    else:
        found = _walk(case, case.cost, block)
    return _on_devices(case, found), time_breakdown.of_passes(found[0], passes[0], passes[1])


def _on_devices(case: Case, found: Walked) -> Walked:
    """Busy time summed over the devices of a unit."""
    if case.tensor_parallel == 1:
        return found
    if isinstance(found, Tally):
        return found._replace(busy=found.busy * case.tensor_parallel)
    return found[0], found[1] * case.tensor_parallel


def _walk(case: Case, cost: StepCosts, block: int) -> Walked:
    method = registry.method(case.method)
    positions = case.settings.tokens - (0 if method.last_matters else 1)
    sequences = case.parameters.decoded_sequences

    def play(name: str) -> Any:
        if not KINDS[name].drafted:
            return outcome_tiles(case, block, positions * sequences, name)
        each = (drafts_of(case, block, positions, name, sequence) for sequence in range(sequences))
        return each if sequences > 1 else next(each)

    played = {name: play(name) for name in case.outcomes}
    given: Any = by_outcome(played) if played else iter(())
    found: Walked = method.walk(case.parameters, case.settings.tokens, cost, given)
    return found


def paths_row(case: Case, start: int, stop: int) -> Row:
    """Sums over replications [start, stop), which lie in one block."""
    block = start // random_streams.BLOCK
    own = slice(start - block * random_streams.BLOCK, stop - block * random_streams.BLOCK)
    found, parts = walk_with_parts(case, block)
    latency, busy = found[0][own], found[1][own]
    row = asdict(Sums.of(latency, busy)) | _frequencies(latency) | time_breakdown.sums(parts, own)
    if isinstance(found, Tally):
        row |= {name: float(getattr(found, name)[own].sum()) for name in ("rounds", "drafted", "operations")}
        row |= {f"{name}_square": float((getattr(found, name)[own] ** 2).sum()) for name in ("rounds", "drafted")}
        if stop - start == random_streams.BLOCK:  # counted for whole blocks only
            row["accepted_lengths"] = found.accepted.tolist()
    return row


def _frequencies(latency: Floats) -> Row:
    values, counts = np.unique(latency, return_counts=True)
    return {"values": values.tolist(), "counts": counts.tolist()}


# --- events ------------------------------------------------------------------------------------------------------------


def worlds_of(case: Case, start: int, stop: int) -> Iterator[World]:
    """Simulated model answers of replications [start, stop), which lie in one block."""
    laws = {name: outcome.law for name, outcome in case.outcomes.items()}
    tokens, seed = case.settings.tokens, case.settings.seed
    # The rank of the correct candidate matters only where processes may wait.
    return worlds(case.parameters, 1, tokens, laws, seed, range(start, stop), ranked=case.contended)


def simulate(case: Case, world: World, *, record: bool = False) -> Any:
    """Simulate one decoding on units and links; returns a `sim.engine.events.Run`."""
    from sim.engine import events

    steps = registry.method(case.method).decode(case.parameters, [0], case.settings.tokens)
    return events.simulate(steps, case.outputs, case.cluster, case.cost, world, record=record)


def events_row(case: Case, start: int, stop: int) -> Row:
    """Sums over replications [start, stop), which lie in one block, and their differences to the vectorised paths."""
    runs = [simulate(case, world) for world in worlds_of(case, start, stop)]
    latency, busy = np.array([run.latency for run in runs]), np.array([run.busy for run in runs]) * case.tensor_parallel
    peak = case.devices(max(run.peak_units for run in runs))
    row = asdict(Sums.of(latency, busy)) | _frequencies(latency) | {"peak_units": peak, "paths_difference": None}
    parts = None
    if time_breakdown.missing_because(case) is None:
        passes = (np.array([getattr(run, name) for run in runs]) for name in time_breakdown.SUMS[:2])
        parts = time_breakdown.of_runs(latency, *passes)
    row |= time_breakdown.sums(parts, slice(None))
    account = Account()
    for run in runs:
        account.include(run.account)
    rounds: Counter[tuple[int, int]] = sum((run.rounds for run in runs), Counter())
    counted = registry.method(case.method).operations
    if case.shapes:
        row |= account.flops_and_bytes(case.shapes)._asdict()
    if rounds or counted:
        row["operations"] = counted(case.parameters, case.cost, rounds, account) if counted else float("nan")
    if rounds:
        each = {"rounds": _each(runs, lambda _: 1), "drafted": _each(runs, lambda drafted: drafted)}
        row |= {name: float(values.sum()) for name, values in each.items()}
        row |= {f"{name}_square": float((values**2).sum()) for name, values in each.items()}
        row |= {"accepted_lengths": _lengths(rounds)}
    if not case.contended:
        try:
            found, theirs_by_part = walk_with_parts(case, start // random_streams.BLOCK)
        except ParameterError:
            return row  # a form without vectorised paths
        own = slice(start % random_streams.BLOCK, start % random_streams.BLOCK + stop - start)
        ours = {"latency_layers": latency, "busy_layers": busy} | (each if rounds else {})
        theirs = {"latency_layers": found[0], "busy_layers": found[1]} | (found._asdict() if isinstance(found, Tally) else {})
        if parts is not None and theirs_by_part is not None:
            ours, theirs = ours | parts._asdict(), theirs | theirs_by_part._asdict()
        row |= _differences(ours, {name: values[own] for name, values in theirs.items() if name in ours}, start)
    return row


def _each(runs: Sequence[Any], of: Callable[[int], int]) -> Floats:
    """Sum of a function of the drafted tokens over the rounds of each run."""
    return np.array([float(sum(of(drafted) * count for (_, drafted), count in run.rounds.items())) for run in runs])


def _differences(ours: dict[str, Floats], theirs: dict[str, Floats], start: int) -> Row:
    """Differences between paths and events on the same decodings: the largest absolute one, and the largest relative one."""
    apart = {name: np.abs(ours[name] - theirs[name]) for name in theirs}
    # A part of the time may be 0: its difference is relative to the whole.
    scale = theirs | dict.fromkeys(time_breakdown.SUMS, theirs["latency_layers"])
    if "drafted" in theirs:
        scale["drafted"] = np.maximum(theirs["drafted"], 1.0)
    relative = {name: far / np.maximum(np.abs(scale[name]), 1e-300) for name, far in apart.items()}
    name = max(relative, key=lambda each: float(relative[each].max()))
    at = int(relative[name].argmax())
    worst = {
        "quantity": name, "replication": start + at, "events": float(ours[name][at]), "paths": float(theirs[name][at]),
    }  # fmt: skip
    return {
        "paths_difference": float(max(apart[each].max() for each in ("latency_layers", "busy_layers"))),
        "paths_relative": float(relative[name][at]), "paths_worst": strict_json.dumps(worst),
    }  # fmt: skip


def _lengths(rounds: Counter[tuple[int, int]]) -> list[int]:
    """Number of rounds that accepted 0, 1, 2, ... tokens."""
    counts = [0] * (max(accepted for accepted, _ in rounds) + 1)
    for (accepted, _), count in rounds.items():
        counts[accepted] += count
    return counts


# --- shards ------------------------------------------------------------------------------------------------------------


def evaluate(grid: Grid, view: str, pieces: list[tuple[int, int, int]]) -> tuple[list[Row], list[Row]]:
    """Evaluate pieces (point, first replication, the one after the last) of a simulated view; return rows and failures."""
    rows: list[Row] = []
    failures: list[Row] = []
    for point, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        try:
            case = grid.case(point)
            for _, start, stop in group:
                waits = view != "events" and case.contended
                row = {} if waits else paths_row(case, start, stop) if view == "paths" else events_row(case, start, stop)
                rows.append({"point": point, "view": view, **row})
        except EXPECTED as error:
            failures.append({"point": point, "view": view, "error": str(error)})
    return rows, failures
