"""The three views of a point: what the theorem says, what the vectorised paths give, what happens on units and links.

Each view yields plain rows: `formula` finished ones, the other two sums over a stretch of replications of one point, so that a
point can be shared out, and is put together in `sim.runs.results_table`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.base import strict_json
from model.base.checks import ParameterError
from model.costs.layer_times import RATIOS, UnitCost
from model.interpret.account import Account, bill
from model.interpret.world import World
from model.methods import registry
from model.methods.prediction import Prediction
from model.methods.rounds import Tally
from model.methods.worlds import world_of
from model.outcomes import outcome_laws, random_streams
from model.outcomes.intervals import wilson
from model.outcomes.outcome_kinds import KINDS
from model.outcomes.outcome_laws import Outcomes
from model.steps import CacheError
from sim.scenarios import cases, scenario_file
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.views import metrics
from sim.views.metrics import Sums

Floats = NDArray[np.float64]
Row = dict[str, Any]

EXPECTED = (ParameterError, CacheError)
"""What may be wrong at one point of a grid and not at the others."""
ARRAY_AXES = ("scenario.tokens", "outcomes.match_rate", "method.layers", "method.exit_layer", "method.candidates")
"""Axes that closed forms take as arrays, where outcomes are independent and nothing takes time but layers."""


# --- formula -----------------------------------------------------------------------------------------------------------


def takes_arrays(grid: Grid) -> bool:
    """Whether the closed forms can be evaluated over all points of the grid at once."""
    first = scenario_file.method_tables(grid.base)[0]
    return (
        grid.methods == 1
        and not grid.base.get("cost")
        and not {*first} & {*scenario_file.OWN}
        and not {"batched", "sequences", "batching"} & {*first}
        and grid.base.get("outcomes", {}).get("kind") == "iid"
        and registry.method(first["name"]).takes_arrays
        and bool(grid.axes)
        and all(axis.path in ARRAY_AXES and axis.numeric for axis in grid.axes)
    )


def formula_of(case: Case) -> tuple[dict[str, Floats], dict[str, Floats] | None, Prediction]:
    """The estimates of one point, their least and greatest over the interval of the match rate, and the prediction itself."""
    predict = registry.method(case.method).predict

    def estimate(end: str, cost: UnitCost) -> tuple[dict[str, Floats], Prediction]:
        laws = {name: getattr(outcome, end) or outcome.law for name, outcome in case.outcomes.items()}
        prediction = predict(case.parameters, case.settings.tokens, _one_or_all(laws), cost)
        prediction = on_devices(case, prediction)
        return metrics.of_prediction(prediction, case.steps, case.ways), prediction

    estimates, prediction = estimate("law", case.cost)
    if case.priced is None and not any(outcome.low is not None for outcome in case.outcomes.values()):
        return estimates, None, prediction
    # All rates at their low ends together, with all costs at their high ones, and the other way round.
    slow, fast = (case.cost, case.cost) if case.priced is None else (case.priced.point.slow, case.priced.point.fast)
    return estimates, _between(estimate("low", slow)[0], estimate("high", fast)[0]), prediction


def on_devices(case: Case, prediction: Prediction) -> Prediction:
    """A prediction in units, in devices: where layers are split a unit is several, of plain decoding too."""
    if case.ways == 1:
        return prediction
    in_devices = {name: getattr(prediction, name) * case.ways for name in ("busy", "units_ratio")}
    return replace(prediction, **in_devices, units=np.asarray(float(case.devices(int(prediction.units)))))


def over_one_device(case: Case, row: Row) -> Row:
    """The speed-up over plain decoding on one device, from that over the same devices; nothing where those are one.

    What a step takes on one device is another measurement than what it takes on several: its error, and theirs, widen the bounds
    from inputs. Without a value where the model is not known to fit one device.
    """
    if case.ways == 1 or case.priced is None:
        return {}
    name, alone = metrics.ONE_DEVICE, case.plain_time_on_one_device
    if alone is None or case.priced.one_device is None:
        return {name: float("nan")}
    factor, ours, theirs = alone / case.plain_time, case.priced.point.error, case.priced.one_device.error
    wrong = {"input_low": (1 - min(theirs, 1.0)) / (1 + ours), "input_high": (1 + theirs) / (1 - ours) if ours < 1 else None}
    found = {name: row["speedup"] * factor}
    for bound in metrics.BOUNDS:
        value, more = row.get(f"speedup_{bound}"), wrong.get(bound, 1.0)
        found |= {} if value is None or more is None else {f"{name}_{bound}": value * factor * more}
    return found


def _one_or_all(of: dict[str, Any]) -> Any:
    """What a method with one kind of outcome is given is that outcome's; one with several is given all, by name."""
    return of if len(of) > 1 else next(iter(of.values()), None)


def _between(one: dict[str, Floats], other: dict[str, Floats]) -> dict[str, Floats]:
    bounds = {}
    for name in metrics.ESTIMATES:
        bounds[f"{name}_input_low"] = np.fmin(one[name], other[name])
        bounds[f"{name}_input_high"] = np.fmax(one[name], other[name])
    return bounds


def formula_row(case: Case) -> Row:
    """The theory's estimates of one point."""
    estimates, bounds, prediction = formula_of(case)
    row: Row = {name: float(value) for name, value in (estimates | (bounds or {})).items()}
    row |= over_one_device(case, row)
    if prediction.rounds is None:
        row |= operations_of(case, row["compute_per_token"])
    else:
        found = metrics.per_round(case.outputs, prediction.rounds, prediction.drafted, prediction.operations)
        row |= {name: float(value) for name, value in found.items()}
        row |= straggling(case, float(prediction.rounds), row["latency_layers"])
    row |= work_of(case)
    held = float(case.devices(case.held))
    return row | {"latency_sd_layers": float(prediction.latency_variance) ** 0.5, "held_units": held}


def straggling(case: Case, rounds: float, latency: float) -> Row:
    """What static batches lose by waiting, where the method's theory says it, from the means of rounds and latency."""
    known = registry.method(case.method).straggler_loss
    loss = None if known is None else known(case.parameters, case.cost, rounds, latency)
    return {} if loss is None else {"straggler_loss": loss}


def work_of(case: Case) -> Row:
    """Operations and bytes per token by the theory, where shapes are known and it says them."""
    closed = registry.method(case.method).work
    if not case.shapes or closed is None:
        return {}
    found = closed(case.parameters, case.settings.tokens, _one_or_all({key: each.law for key, each in case.outcomes.items()}))
    return {} if found is None else metrics.worked(bill(found, case.shapes), case.outputs, case.full_batch)


def _layers_worked(case: Case) -> float | None:
    """Layers run, once for each token, by a method that leaves some out or reads several at once; None where it is not known."""
    law = next((outcome.law for outcome in case.outcomes.values()), None)
    work = registry.method(case.method).work
    found = None if work is None else work(case.parameters, case.settings.tokens, law)
    return None if found is None else float(found.of["target"].layer_passes)


def plain_work_of(case: Case) -> Row:
    """The same of plain decoding of the same tokens, in the same batches."""
    if not case.shapes:
        return {}
    plain = case.parameters.plain_work(case.settings.tokens)
    worked = metrics.worked(bill(plain, case.shapes), case.outputs, case.full_batch)
    return {f"plain_{name}": worked[name] for name in metrics.PLAIN_WORK}


def operations_of(case: Case, compute_per_token: float, *, sampled: bool = False) -> Row:
    """Operations of a method that does not draft: by its theory's account of layers, or where they are its unit-time by that.

    Of what is sampled unit-time goes first where every pass is over one token: it is of the same decodings.
    """
    known = not case.parameters.roles and case.parameters.decoded_sequences == 1 and case.cost.only_layers
    if case.parameters.counts_layers and not (sampled and known and case.parameters.widest == 1):
        worked = _layers_worked(case)
        return {} if worked is None else {"operations_per_token": worked / case.parameters.layers / case.outputs}
    return {"operations_per_token": compute_per_token} if known else {}


def formula_columns(grid: Grid, start: int, stop: int) -> dict[str, Any]:
    """The theory's columns of points [start, stop) at once, with those of the axes; see `takes_arrays`."""
    where = np.unravel_index(np.arange(start, stop), grid.shape)[1:]
    on = {axis.path: _gather(axis.values, index) for axis, index in zip(grid.axes, where, strict=True)}
    table = dict(scenario_file.method_tables(grid.base)[0])
    name = table.pop("name")
    method = registry.method(name)
    table |= {path.partition(".")[2]: values for path, values in on.items() if path.startswith("method.")}
    known = fields(method.kind)
    defaults = {field.name: field.default for field in known if field.name not in table}
    parameters: Any = SimpleNamespace(**defaults, **table)
    tokens = on.get("scenario.tokens", grid.base["scenario"].get("tokens"))
    outcome = {"trials": None, "source": "assumed", **grid.base["outcomes"]}
    rate = on.get("outcomes.match_rate", outcome.get("match_rate"))
    predict = method.predict
    plain = UnitCost(1)

    def estimate(rate: Any) -> tuple[dict[str, Floats], Prediction]:
        prediction = predict(parameters, tokens, outcome_laws.Iid(rate), plain)
        return metrics.of_prediction(prediction, tokens), prediction

    estimates, prediction = estimate(rate)
    size = stop - start
    columns: dict[str, Any] = {"point": np.arange(start, stop), "view": "formula", "method": name}
    columns |= {field.name: getattr(parameters, field.name) for field in known}
    columns |= {"tokens": tokens, "outcomes": "iid", "data_set": None, "head": None, "match_rate": np.asarray(rate, np.float64)}
    low, high = (None, None) if outcome["trials"] is None else wilson(np.asarray(rate), outcome["trials"])
    columns |= {"match_rate_low": low, "match_rate_high": high, "match_rate_trials": outcome["trials"]}
    columns |= {"outcomes_source": outcome["source"]}
    units = np.asarray(prediction.units).astype(np.int64)
    machine = cases.Machine(**grid.base.get("cluster", {}))
    there = units if machine.units is None else np.asarray(machine.units)
    held, because = np.minimum(units, there), _contentions(method.kind, parameters, tokens, machine, size)
    if low is not None:
        estimates |= _between(estimate(low)[0], estimate(high)[0])
    estimates |= {"operations_per_token": estimates["compute_per_token"], "latency_sd_layers": np.sqrt(prediction.latency_variance)}
    columns |= {"units": there, "contended": False, "exact": method.kind.EXACT}
    if because is not None:
        contended = because != ""
        estimates = {name: np.where(contended, np.nan, value) for name, value in estimates.items()}
        columns |= {"contended": contended, "no_value_because": np.where(contended, because, np.array(None, dtype=object))}
    columns |= estimates | {"held_units": held.astype(np.float64)}
    return {key: np.broadcast_to(value, size) if isinstance(value, np.ndarray | np.generic) else value
            for key, value in columns.items()}  # fmt: skip


def _contentions(kind: Any, parameters: Any, tokens: Any, machine: cases.Machine, size: int) -> NDArray[np.object_] | None:
    """Why something may wait at each of so many points, or an empty text; None where it never does."""
    if machine == cases.Machine():
        return None
    names = [field.name for field in fields(kind)]
    # Of the number of tokens it matters only whether there is a second.
    given = {name: getattr(parameters, name) for name in names} | {"tokens": np.minimum(tokens, 2)}
    table = pl.DataFrame({name: np.broadcast_to(value, size) for name, value in given.items()})
    # Each choice of parameters is looked at once.
    found = []
    for choice in table.unique().to_dicts():
        own = kind(**{name: choice[name] for name in names})
        because = cases.contention(own.demand(UnitCost(own.layers), choice["tokens"]), machine.cluster(own.units))
        found.append(choice | {"because": because or ""})
    if not any(choice["because"] for choice in found):
        return None
    keys = [*given]
    joined = table.join(pl.DataFrame(found), on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined["because"].to_numpy().astype(object)


def _gather(values: Any, index: Any) -> Any:
    return values.array(index) if hasattr(values, "array") else np.asarray(list(values))[index]


def described(grid: Grid, point: int, case: Case) -> Row:
    """The columns that say what a point is."""
    row: Row = {"point": point, "method": case.method}
    row |= {name: _cell(value) for name, value in case.parameters.table().items()}
    row["tokens"] = case.settings.tokens
    own = scenario_file.method_tables(grid.base)[grid.indices(point)[0]].get("outcomes")
    table = (grid.base.get("outcomes", {}) if own is None else own) | {
        path.partition(".")[2]: value for path, value in grid.values(point).items() if path.startswith("outcomes.")
    }
    kinds = ", ".join(dict.fromkeys(outcome.kind for outcome in case.outcomes.values())) or None
    row |= {"outcomes": kinds, "data_set": table.get("data_set"), "head": table.get("head")}
    for name, outcome in case.outcomes.items():
        rate = KINDS[name].rate
        row |= {
            rate: float(outcome.rate), f"{rate}_low": outcome.rate_low, f"{rate}_high": outcome.rate_high,
            f"{rate}_trials": outcome.trials, **outcome.also,
        }  # fmt: skip
        if outcome.published_speedup is not None:
            row["published_speedup"] = outcome.published_speedup
    if case.outcomes:
        row["outcomes_source"] = "; ".join(dict.fromkeys(outcome.source for outcome in case.outcomes.values()))
    said = dict.fromkeys(outcome.note for outcome in case.outcomes.values() if outcome.note is not None)
    row |= {"outcomes_note": "; ".join(said)} if said else {}
    row |= {RATIOS[role]: getattr(case.cost, RATIOS[role]) for role in case.parameters.roles}
    row |= {"units": case.devices(case.cluster.units), "contended": case.contended, "exact": case.parameters.exact}
    row |= {"no_value_because": case.contention} if case.contended else {}
    if not case.parameters.exact:
        known = next((outcome for outcome in case.outcomes.values() if outcome.agreement is not None), None)
        row |= {"agreement": None, "agreement_source": "unknown"} if known is None else {
            "agreement": known.agreement, "agreement_source": known.agreement_source
        }  # fmt: skip
    if case.parameters.counts_layers and case.parameters.static_batches:
        row["occupancy"] = case.outputs * case.full_batch / (case.steps * case.parameters.sequences)
    row |= plain_work_of(case)
    row |= {} if case.seconds_per_layer is None else {"seconds_per_layer": case.seconds_per_layer}
    if case.priced is not None:
        at = case.priced.point
        row |= {"seconds_error": at.error, "context_drift": at.drift, "ways": case.ways}
        row |= {"prompt_s": case.priced.prompt_s, "cost_source": case.priced.provenance}
        row |= {"cost_missing": ", ".join(case.priced.missing) or None}
        row |= {} if case.priced.memory is None else {"memory_share": case.priced.memory.share}
    row |= {} if case.fitted_on is None else {"fitted_on": case.fitted_on}
    # An axis that none of these columns shows has its own, under its path.
    own = {f"cost.{field.name}" for field in fields(case.parameters)}  # of that name the column is the method's
    rest = {path: value for path, value in grid.values(point).items() if path in own or not _shown(row, path, value)}
    row |= {path: _cell(value) for path, value in rest.items()}
    return row


def without_value(grid: Grid, point: int, case: Case) -> Row:
    """The row of a view that cannot see waiting, of a point at which something may wait: it says why it has no estimates."""
    return described(grid, point, case) | {"held_units": float(case.devices(case.held))}


def _cell(value: Any) -> Any:
    """A list is written out: no column of a CSV could hold it."""
    return strict_json.dumps(value) if isinstance(value, list | tuple) else value


def _shown(row: Row, path: str, value: Any) -> bool:
    """Whether a column says what a point has on an axis."""
    last = path.rpartition(".")[2]
    return path.partition(".")[2] in row or (last in row and row[last] == value)


# --- paths -------------------------------------------------------------------------------------------------------------


def outcome_tiles(case: Case, block: int, positions: int, name: str = "match") -> Iterator[NDArray[np.bool_]]:
    """The outcomes of a block of replications by position, on the coins that all views share."""
    if name not in case.outcomes or not positions:
        return iter(())
    found: Iterator[NDArray[np.bool_]] = case.outcomes[name].law.sample(
        random_streams.tiles(case.settings.seed, name, block, positions)
    )
    return found


def drafts_of(case: Case, block: int, positions: int, name: str = "accept", text: int = 0) -> Iterator[Outcomes]:
    """The same of drafted tokens, given their places in their drafts."""
    luck = random_streams.tiles(case.settings.seed, random_streams.of_text(name, text), block, positions)
    return iter(case.outcomes[name].law.drafts(luck) if positions else ())


def survivors_of(
    case: Case, block: int, positions: int, name: str = "accept", text: int = 0, own: slice = slice(None)
) -> NDArray[np.int64]:
    """How many drafted tokens survive if a draft starts at each position; shape (positions, replications of the block's `own`)."""
    law, longest = case.outcomes[name].law, case.parameters.longest_draft
    luck = (tile[:, own] for tile in random_streams.tiles(case.settings.seed, random_streams.of_text(name, text), block, positions))
    return np.asarray(law.survivors(luck, longest))


def walk(case: Case, block: int) -> tuple[Floats, Floats] | Tally:
    """Time and unit-time of a block of replications by the method's vectorised twin, and what else it tells."""
    method = registry.method(case.method)
    positions = case.settings.tokens - (0 if method.last_matters else 1)
    texts = case.parameters.decoded_sequences

    def play(name: str) -> Any:
        if not KINDS[name].drafted:
            return outcome_tiles(case, block, positions * texts, name)
        each = (drafts_of(case, block, positions, name, text) for text in range(texts))
        return each if texts > 1 else next(each)

    played = {name: play(name) for name in case.outcomes}
    given: Any = _one_or_all(played) if played else iter(())
    found: tuple[Floats, Floats] | Tally = method.walk(case.parameters, case.settings.tokens, case.cost, given)
    if case.ways == 1:
        return found
    return found._replace(busy=found.busy * case.ways) if isinstance(found, Tally) else (found[0], found[1] * case.ways)


def paths_row(case: Case, start: int, stop: int) -> Row:
    """Sums over replications [start, stop), which lie in one block."""
    block = start // random_streams.BLOCK
    own = slice(start - block * random_streams.BLOCK, stop - block * random_streams.BLOCK)
    found = walk(case, block)
    latency, busy = found[0][own], found[1][own]
    row = asdict(Sums.of(latency, busy)) | _frequencies(latency)
    if isinstance(found, Tally):
        row |= {name: float(getattr(found, name)[own].sum()) for name in ("rounds", "drafted", "operations")}
        row |= {f"{name}_square": float((getattr(found, name)[own] ** 2).sum()) for name in ("rounds", "drafted")}
        if stop - start == random_streams.BLOCK:  # they are counted for a block as a whole
            row["accepted_lengths"] = found.accepted.tolist()
    return row


def _frequencies(latency: Floats) -> Row:
    values, counts = np.unique(latency, return_counts=True)
    return {"values": values.tolist(), "counts": counts.tolist()}


# --- events ------------------------------------------------------------------------------------------------------------


def matches_of(case: Case, start: int, stop: int) -> list[list[int]]:
    """The outcomes of replications [start, stop), which lie in one block, each a list by position: the right candidate, or 0.

    Which candidate is right is assumed to be any of them with equal chances, by coins of its own.
    """
    block = start // random_streams.BLOCK
    own = slice(start - block * random_streams.BLOCK, stop - block * random_streams.BLOCK)
    positions = case.settings.tokens
    rows = [tile[:, own].astype(np.int64) for tile in outcome_tiles(case, block, positions)]
    if not rows:
        return [[0] * positions] * (stop - start)
    matches = np.concatenate(rows)
    if case.contended:  # otherwise it makes no difference
        which = np.concatenate([tile[:, own].copy() for tile in random_streams.tiles(case.settings.seed, "rank", block, positions)])
        matches *= 1 + (which * case.parameters.match_candidates).astype(np.int64)
    found: list[list[int]] = matches.T.tolist()
    return found


def worlds(case: Case, start: int, stop: int) -> Iterator[World]:
    """What models would say in replications [start, stop), which lie in one block."""
    drawn = {name: _drawn(case, name, start, stop) for name in case.outcomes}
    for index in range(stop - start):
        yield world_of(case.parameters, 1, {name: outcomes[index] for name, outcomes in drawn.items()})


def _drawn(case: Case, name: str, start: int, stop: int) -> list[Any]:
    """The outcomes of one kind in each replication, as `world_of` takes them."""
    if name == "match":
        return matches_of(case, start, stop)
    kind, block, sequences = KINDS[name], start // random_streams.BLOCK, case.parameters.decoded_sequences
    own = slice(start - block * random_streams.BLOCK, stop - block * random_streams.BLOCK)
    if kind.drafted:
        survivors = (survivors_of(case, block, case.settings.tokens, name, text, own) for text in range(sequences))
        return [*zip(*(each.T.tolist() for each in survivors), strict=True)]
    positions = kind.positions(case.settings.tokens, sequences)
    rows = [tile[:, own].copy() for tile in outcome_tiles(case, block, positions, name)]
    found = np.concatenate(rows).T if rows else np.empty((stop - start, 0))
    return [each.reshape(-1, sequences).T.tolist() if kind.of_sequences else each.tolist() for each in found]


def simulate(case: Case, world: World, *, record: bool = False) -> Any:
    """One decoding on units and links; a `sim.engine.events.Run`."""
    from sim.engine import events

    steps = registry.method(case.method).decode(case.parameters, [0], case.settings.tokens)
    return events.simulate(steps, case.outputs, case.cluster, case.cost, world, record=record)


def events_row(case: Case, start: int, stop: int) -> Row:
    """Sums over replications [start, stop), which lie in one block, and how far the vectorised paths are from them."""
    runs = [simulate(case, world) for world in worlds(case, start, stop)]
    latency, busy = np.array([run.latency for run in runs]), np.array([run.busy for run in runs]) * case.ways
    peak = case.devices(max(run.peak_units for run in runs))
    row = asdict(Sums.of(latency, busy)) | _frequencies(latency) | {"peak_units": peak, "paths_difference": None}
    account = Account()
    for run in runs:
        account.include(run.account)
    rounds: Counter[tuple[int, int]] = sum((run.rounds for run in runs), Counter())
    counted = registry.method(case.method).operations
    if case.shapes:
        row |= account.bill(case.shapes)._asdict()
    if rounds or counted:
        row["operations"] = counted(case.parameters, case.cost, rounds, account) if counted else float("nan")
    if rounds:
        each = {"rounds": _each(runs, lambda _: 1), "drafted": _each(runs, lambda drafted: drafted)}
        row |= {name: float(values.sum()) for name, values in each.items()}
        row |= {f"{name}_square": float((values**2).sum()) for name, values in each.items()}
        row |= {"accepted_lengths": _lengths(rounds)}
    if not case.contended:
        try:
            found = walk(case, start // random_streams.BLOCK)
        except ParameterError:
            return row  # a form without a vectorised twin
        own = slice(start % random_streams.BLOCK, start % random_streams.BLOCK + stop - start)
        ours = {"latency_layers": latency, "busy_layers": busy} | (each if rounds else {})
        theirs = {"latency_layers": found[0], "busy_layers": found[1]} | (found._asdict() if isinstance(found, Tally) else {})
        row |= _differences(ours, {name: values[own] for name, values in theirs.items() if name in ours}, start)
    return row


def _each(runs: Sequence[Any], of: Callable[[int], int]) -> Floats:
    """A sum over the rounds of each run, by how many tokens they drafted."""
    return np.array([float(sum(of(drafted) * count for (_, drafted), count in run.rounds.items())) for run in runs])


def _differences(ours: dict[str, Floats], theirs: dict[str, Floats], start: int) -> Row:
    """How far paths are from the same decodings by the events: in layer-times, and the worst of all relative to its own size."""
    apart = {name: np.abs(ours[name] - theirs[name]) for name in theirs}
    relative = {name: far / np.maximum(np.abs(theirs[name]), 1.0 if name == "drafted" else 1e-300) for name, far in apart.items()}
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
    """How many rounds accepted 0, 1, 2, ... tokens."""
    counts = [0] * (max(accepted for accepted, _ in rounds) + 1)
    for (accepted, _), count in rounds.items():
        counts[accepted] += count
    return counts


# --- shards ------------------------------------------------------------------------------------------------------------


def evaluate(grid: Grid, view: str, pieces: list[tuple[int, int, int]]) -> tuple[list[Row], list[Row]]:
    """Rows and failures of pieces (point, first replication, last replication); the formula takes no replications."""
    rows: list[Row] = []
    failures: list[Row] = []
    for point, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        try:
            case = grid.case(point)
            for _, start, stop in group:
                if view != "events" and case.contended:
                    row = without_value(grid, point, case) if view == "formula" else {}
                elif view == "formula":
                    row = described(grid, point, case) | formula_row(case)
                elif view == "paths":
                    row = paths_row(case, start, stop)
                else:
                    row = events_row(case, start, stop)
                rows.append({"point": point, "view": view, **row})
        except EXPECTED as error:
            failures.append({"point": point, "view": view, "error": str(error)})
    return rows, failures
