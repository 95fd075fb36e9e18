"""Axes of numbers of costs on hardware: whole axes of prompts and of times are checked, and their costs resolved, at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.table_records import build
from model.costs import watched_costs
from model.costs.many_seconds import VariedSeconds, errors_of
from model.costs.pass_seconds import TOKEN_BYTES, PassSeconds
from model.costs.step_costs import RATIOS
from model.hardware import cost_models
from model.hardware.cost_models import WithEngineOverhead
from model.methods.method_parameters import MethodParameters
from sim.scenarios import hardware_cost
from sim.scenarios.cases import Case
from sim.scenarios.hardware_cost import MAX_SECONDS, HardwareCost
from sim.scenarios.part_columns import HardwareGroup
from sim.scenarios.scenario_file import Tables, method_tables

_TIMES = {f"{name}_s": name for name in ("dispatch", "dispatch_per_process", "link", "promotion", "state_check")}
"""Numbers of [cost] in seconds, with their names in `PassSeconds`."""
_STEPS = {"step_s": ("target",), "draft_step_s": hardware_cost.ROLES[1:]}
"""Overheads of engine steps, with the roles that pay them."""
VARIED = ("prompt", *_TIMES, *_STEPS)
"""Numbers of [cost] on hardware of which a whole axis is resolved at once."""


def varied(
    first: Case, tables: Tables, index: int, numbers: Mapping[str, NDArray[Any]], make: Callable[[int], Case]
) -> tuple[HardwareGroup, NDArray[np.bool_]] | None:
    """Cases with these numbers of their costs, and the mask of valid ones; None if they must be resolved one by one.

    `first` is a case with other values of the numbers, `tables` are its tables and `index` is its method's. `make` resolves one of
    the cases. What tests a time for 0 only is the same for all cases: others than with `first` count as invalid here.
    """
    record = _record(first, tables, index)
    cost = first.cost
    if record is None or not isinstance(cost, PassSeconds) or not {*numbers} <= {*VARIED}:
        return None
    if numbers.get("prompt", np.zeros(0, dtype=np.int64)).dtype.kind != "i":
        return None
    valid = np.ones(next(iter(numbers.values())).size, dtype=np.bool_)
    for name, values in numbers.items():
        if name == "prompt":
            valid &= (values >= 0) & (values <= checks.MAX_TOKENS)
        else:
            valid &= (values >= 0) & (values <= MAX_SECONDS) & ((values > 0) == (getattr(record, name) > 0))
    shares = None
    if "prompt" in numbers and valid.any():
        shares = _memory_shares(record, first, numbers["prompt"], valid)
        valid &= ~(shares > 1)  # nan: not known
    own = {name: values[valid] for name, values in numbers.items()}
    costs = _costs(record, cost, first.parameters, own, int(valid.sum()))
    plain = np.concatenate([each.joined().plain_times() for each in _blocks(costs)]) if len(costs) else np.empty(0)
    if not (plain > 0).all():
        return None
    return HardwareGroup(first, costs, _columns(first, costs, own, shares, valid), _members(make, valid)), valid


def _record(first: Case, tables: Tables, index: int) -> HardwareCost | None:
    """The record of its costs, if nothing but these depends on their numbers; else None."""
    kind, table = type(first.parameters), tables.get("cost", {})
    decides = kind.with_costs is not MethodParameters.with_costs or first.parameters.context_budgets
    if first.hardware is None or decides or first.hardware.tensor_parallel > 1:
        return None
    own = {_TIMES.get(name, name): True for name in VARIED if name not in _STEPS}
    if watched_costs.tested_alone(first.cost, own, lambda cost: first.parameters.demand(cost, first.settings.tokens)) is None:
        return None
    if method_tables(tables)[index].get("cost") is not None or not isinstance(table, Mapping):
        return None
    found: HardwareCost = build(HardwareCost, table, "cost")
    return found


def _costs(
    record: HardwareCost, cost: PassSeconds, parameters: MethodParameters, numbers: Mapping[str, NDArray[Any]], size: int
) -> VariedSeconds:
    """Costs with these numbers; links and promotions are added to the transfer times of the hardware."""
    target = cost.hardware("target")
    moving = {"link": TOKEN_BYTES, "promotion": cost_models.bytes_of_state(target.shape, parameters.handover_layer)}
    own: dict[str, NDArray[Any]] = {name: values for name, values in numbers.items() if name == "prompt"}
    for name, key in _TIMES.items():
        if name in numbers:
            own[key] = numbers[name] + (float(target.transfer(moving[key]).seconds) if key in moving else 0.0)
    steps = {role: np.asarray(numbers[name], float) for name, roles in _STEPS.items() if name in numbers for role in roles}
    steps = {role: values for role, values in steps.items() if isinstance(cost.hardware_models.get(role), WithEngineOverhead)}
    return VariedSeconds(cost, size, own, steps)


def _blocks(costs: VariedSeconds) -> list[VariedSeconds]:
    return [costs[start : start + 10_000] for start in range(0, len(costs), 10_000)]


def _columns(
    first: Case, costs: VariedSeconds, numbers: Mapping[str, NDArray[Any]], shares: NDArray[np.float64] | None,
    valid: NDArray[np.bool_],
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Columns of the costs that differ (`sim.views.point_columns`)."""
    if not len(costs):
        return {}
    batch, prompt = first.parameters.full_batch, numbers.get("prompt", np.asarray(costs.first.prompt))
    found = {"seconds_error": errors_of(costs, first.settings.tokens)}
    joined = costs.joined()
    if "prompt" in numbers:
        found["prompt_tokens"] = prompt
    reading = cost_models.prompt_time(joined.target_model, np.maximum(prompt, 1), batch).seconds
    found["prompt_s"] = np.broadcast_to(reading, len(costs))
    found |= {RATIOS[role]: joined.ratio(role) for role in first.parameters.roles}
    if shares is not None and first.hardware is not None and first.hardware.memory is not None:
        found["memory_share"] = shares[valid]
    return found


def _memory_shares(
    record: HardwareCost, first: Case, prompts: NDArray[Any], valid: NDArray[np.bool_]
) -> NDArray[np.float64]:  # fmt: skip
    """Share of the device's memory that is needed with each of these prompts; nan where it is not known."""
    assert isinstance(first.cost, PassSeconds)
    found = np.full(prompts.size, np.nan)
    shares = hardware_cost.memory_shares(record, first.cost, first.parameters, prompts[valid] + first.settings.tokens)
    if shares is not None:
        found[valid] = shares
    return found


def _members(make: Callable[[int], Case], valid: NDArray[np.bool_]) -> Callable[[int], Case]:
    places = np.flatnonzero(valid)
    return lambda place: make(int(places[place]))
