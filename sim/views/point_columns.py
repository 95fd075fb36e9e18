"""Columns that describe a grid point: its method, outcomes, costs and cluster, and why it may have no estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import strict_json
from model.costs.step_costs import RATIOS
from model.interpret.account import flops_and_bytes
from model.outcomes.outcome_kinds import KINDS
from sim.scenarios import scenario_file
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes.outcome_records import VariedOutcomes
from sim.views import metrics, time_breakdown

Floats = NDArray[np.float64]
Row = dict[str, Any]


def described(grid: Grid, point: int, case: Case) -> Row:
    """Return all columns that describe a point."""
    row = {"point": point} | of_choice(case) | of_outcomes(case, outcomes_table(grid, point)) | of_costs(case)
    # An axis that no other column shows has a separate column, named by its path.
    own = axes_of_costs(case)
    rest = {path: value for path, value in grid.values(point).items() if path in own or not _shown(row, path, value)}
    return row | {path: cell(value) for path, value in rest.items()}


def of_choice(case: Case) -> Row:
    """Method, parameters and tokens of a point."""
    row: Row = {"method": case.method} | {name: cell(value) for name, value in case.parameters.table().items()}
    return row | {"tokens": case.settings.tokens}


def outcomes_table(grid: Grid, point: int) -> Mapping[str, Any]:
    """Table [outcomes] of a point, as written in the scenario."""
    own = scenario_file.method_tables(grid.base)[grid.indices(point)[0]].get("outcomes")
    swept = {path.partition(".")[2]: value for path, value in grid.values(point).items() if path.startswith("outcomes.")}
    table: Mapping[str, Any] = grid.base.get("outcomes", {}) if own is None else own
    return {**table, **swept}


def of_outcomes(case: Case, table: Mapping[str, Any]) -> Row:
    """Kinds, rates and sources of a point's outcomes, and the agreement of a lossy method's output."""
    kinds = ", ".join(dict.fromkeys(outcome.kind for outcome in case.outcomes.values())) or None
    row: Row = {"outcomes": kinds, "data_set": table.get("data_set"), "head": table.get("head")}
    for name, outcome in case.outcomes.items():
        rate = KINDS[name].rate
        row |= {
            rate: float(outcome.rate), f"{rate}_low": outcome.rate_low, f"{rate}_high": outcome.rate_high,
            f"{rate}_trials": outcome.trials, **outcome.further_values,
        }  # fmt: skip
        if outcome.published_speedup is not None:
            row["published_speedup"] = outcome.published_speedup
    if case.outcomes:
        row["outcomes_source"] = "; ".join(dict.fromkeys(outcome.source for outcome in case.outcomes.values()))
    notes = dict.fromkeys(outcome.note for outcome in case.outcomes.values() if outcome.note is not None)
    row |= {"outcomes_note": "; ".join(notes)} if notes else {}
    if case.parameters.exact:
        return row
    known = next((outcome for outcome in case.outcomes.values() if outcome.agreement is not None), None)
    agreement = (None, "unknown") if known is None else (known.agreement, known.agreement_source)
    return row | dict(zip(("agreement", "agreement_source"), agreement, strict=True))


def varied_rates(outcomes: Mapping[str, VariedOutcomes]) -> dict[str, Floats]:
    """Columns of `of_outcomes` that differ between these outcomes, by kind of outcome."""
    found: dict[str, Floats] = {}
    for name, each in outcomes.items():
        rate = KINDS[name].rate
        found |= {f"{rate}{field.removeprefix('rate')}": values for field, values in each.numbers.items()}
        found |= each.further_numbers
    return found


def of_costs(case: Case) -> Row:
    """Costs of a point, units of its cluster, and the reason if it has no estimates."""
    return ratios(case) | plain_work(case) | of_costs_but_numbers(case)


def ratios(case: Case) -> Row:
    """Costs of the smaller models relative to the target, by the names of these numbers in the costs."""
    return {RATIOS[role]: case.parameters.draft_costs(case.cost).ratio(role) for role in case.parameters.roles}


def of_costs_but_numbers(case: Case) -> Row:
    """`of_costs` without `ratios` and `plain_work`."""
    row: Row = {"units": case.devices(case.cluster.units), "contended": case.contended, "exact": case.parameters.exact}
    row |= {"no_value_because": case.contention} if case.contended else {}
    if (why := time_breakdown.missing_because(case)) is not None:
        row["no_time_parts_because"] = why
    if case.parameters.counts_layers and case.parameters.static_batches:
        row["occupancy"] = _occupancy(case)
    row |= {} if case.seconds_per_layer is None else {"seconds_per_layer": case.seconds_per_layer}
    if case.hardware is not None:
        row |= {"in_seconds": True, "seconds_error": case.hardware.error, "tensor_parallel": case.tensor_parallel}
        row |= {"prompt_s": case.hardware.prompt_s, "cost_source": case.hardware.provenance}
        row |= {"cost_missing": ", ".join(case.hardware.missing) or None}
        row |= {"prompt_tokens": case.hardware.cost.prompt}
        row |= {} if case.hardware.memory is None else {"memory_share": case.hardware.memory.share}
    return row | ({} if case.fitted_on is None else {"fitted_on": case.fitted_on})


def _occupancy(case: Case) -> float:
    """Mean share of the sequences of a batch that are not at their end."""
    each_step = 1.0 if case.parameters.decoded_sequences == 1 else case.outputs / case.steps
    return each_step * case.full_batch / case.parameters.sequences


def plain_work(case: Case) -> Row:
    """Work per token of plain decoding the same tokens in the same batches; arrays for an array of tokens."""
    if not case.shapes:
        return {}
    plain = case.parameters.plain_work(case.settings.tokens)
    worked = metrics.work_per_token(flops_and_bytes(plain, case.shapes), case.outputs, case.full_batch)
    return {f"plain_{name}": worked[name] for name in metrics.PLAIN_WORK}


ON_HARDWARE = ("seconds_error", "prompt_s", "prompt_tokens", "memory_share")
"""Columns of `of_costs_but_numbers` that may differ between cases on hardware that are resolved together."""


def axes_of_costs(case: Case) -> set[str]:
    """Axes of costs with the name of a method parameter: the column of that name is the parameter's."""
    return {f"cost.{name}" for name in case.parameters.names()}


def without_value(grid: Grid, point: int, case: Case) -> Row:
    """Row of a contended point in a view that does not model waiting: no estimates, but the reason."""
    return described(grid, point, case) | {"reserved_units": float(case.devices(case.reserved_units))}


def cell(value: Any) -> Any:
    """Value for a table cell; lists are written as JSON, since CSV has no lists."""
    return strict_json.dumps(value) if isinstance(value, list | tuple) else value


def _shown(row: Row, path: str, value: Any) -> bool:
    """Return whether a column shows the point's value on an axis."""
    last = path.rpartition(".")[2]
    return path.partition(".")[2] in row or (last in row and row[last] == value)
