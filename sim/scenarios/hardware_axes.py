"""Axes of numbers of costs on hardware, and of tokens: whole axes are checked, and their costs resolved, at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs import watched_costs
from model.costs.many_seconds import VariedSeconds, errors_of
from model.costs.pass_seconds import TOKEN_BYTES, PassSeconds
from model.costs.step_costs import RATIOS
from model.hardware import cost_models
from model.hardware.cost_models import WithEngineOverhead
from sim.scenarios import hardware_cost
from sim.scenarios.cases import Case
from sim.scenarios.hardware_cost import MAX_SECONDS, HardwareCost, MethodNeeds, PointCosts
from sim.scenarios.part_columns import HardwareGroup
from sim.scenarios.scenario_file import Tables, method_tables

_TIMES = {f"{name}_s": name for name in ("dispatch", "dispatch_per_process", "link", "promotion", "state_check")}
"""Numbers of [cost] in seconds, with their names in `PassSeconds`."""
_STEPS = {"step_s": ("target",), "draft_step_s": hardware_cost.ROLES[1:]}
"""Overheads of engine steps, with the roles that pay them."""
VARIED = ("prompt", *_TIMES, *_STEPS)
"""Numbers of [cost] on hardware of which a whole axis is resolved at once."""

Numbers = Mapping[str, NDArray[Any]]


class _Axes(NamedTuple):
    """Numbers in which some cases differ."""

    numbers: Numbers
    """Numbers of [cost] by key, each of shape (cases,)."""
    lengths: NDArray[np.int64] | None
    """Tokens of each case; None if all have the same."""
    size: int

    def at(self, places: NDArray[Any]) -> _Axes:
        """A subset of the cases: their indices, or a mask."""
        lengths = None if self.lengths is None else self.lengths[places]
        size = int(np.count_nonzero(places)) if places.dtype == np.bool_ else places.size
        return _Axes({name: values[places] for name, values in self.numbers.items()}, lengths, size)

    def tokens(self, needs: MethodNeeds) -> Any:
        """Tokens of each case, or of all."""
        return needs.tokens if self.lengths is None else self.lengths

    def contexts(self, prompt: int, needs: MethodNeeds) -> NDArray[np.int64]:
        """Positions of prompt and output together, by case."""
        return np.broadcast_to(np.asarray(self.numbers.get("prompt", prompt) + self.tokens(needs)), self.size)


class _Found(NamedTuple):
    """What groups of cases have in common whose costs differ in the same numbers; all but promotions are the same."""

    first: PointCosts
    """Costs of the first of these groups."""
    costs: VariedSeconds
    """Costs with the numbers, of the first of these groups."""
    axes: _Axes
    """Valid values of the numbers."""
    alone: VariedSeconds | None
    """Of plain decoding on one device (`PointCosts.one_device`)."""
    columns: Numbers
    valid: NDArray[np.bool_]


def varied(
    first: Case, tables: Tables, index: int, numbers: Numbers, lengths: NDArray[np.int64] | None, size: int,
    make: Callable[[int], Case], build: Callable[..., Any], shared: dict[Any, Any],
) -> tuple[HardwareGroup, NDArray[np.bool_]] | None:  # fmt: skip
    """`size` cases with these numbers of their costs, and the mask of valid ones; None if they must be resolved one by one.

    `first` is a case with other values of the numbers, `tables` are its tables and `index` is its method's. `lengths` are valid
    tokens of each case, if they differ. `make` resolves one of the cases, and `build` makes the record of a section. What tests a
    time for 0 only is the same for all cases, and so is the peak demand with the same tokens: others than with `first` count as
    invalid here. `shared` holds what other groups with the same costs have found.
    """
    record = _record(first, tables, index, build)
    if record is None or first.hardware is None or not {*numbers} <= {*VARIED}:
        return None
    needs = first.hardware.needs._replace(handover_layer=0)
    given = {**numbers} if lengths is None else {**numbers, "tokens": lengths}
    if lengths is not None:
        needs = needs._replace(tokens=0, others_position=None if needs.others_position is None else 0.0)
    key = id(record), needs, *((name, values.dtype, values.tobytes()) for name, values in given.items())
    if key not in shared:
        shared[key] = record, _found(record, first.hardware, _Axes(numbers, lengths, size))
    found: _Found | None = shared[key][1]
    if found is None:
        return None
    costs, own = found.costs, found.axes
    if first.hardware is not found.first:
        costs = _costs(first.hardware.cost, first.hardware, own)
    places = np.flatnonzero(found.valid)
    group = HardwareGroup(
        first, costs, found.columns, lambda place: make(int(places[place])), tokens=own.lengths, alone=found.alone
    )  # fmt: skip
    alike = _alike(first, costs, own)
    if alike is None:
        return None
    if alike.all():
        return group, found.valid
    valid = np.zeros_like(found.valid)
    valid[places[alike]] = True
    return group.at(np.flatnonzero(alike)), valid


def _alike(first: Case, costs: VariedSeconds, axes: _Axes) -> NDArray[np.bool_] | None:
    """Which costs have the same peak demand as a case of as many tokens; None if this is not known without making their cases."""
    if axes.lengths is None:
        return _alike_at(first, costs, first.settings.tokens)
    found = np.zeros(len(costs), dtype=np.bool_)

    def of_length(tokens: Any, places: NDArray[np.intp]) -> NDArray[np.bool_] | None:
        return _alike_at(first, costs.at(places), tokens)

    for alike, places in watched_costs.of_numbers(axes.lengths, of_length):
        if alike is None:
            return None
        found[places] = alike
    return found


def _alike_at(first: Case, costs: VariedSeconds, tokens: Any) -> NDArray[np.bool_] | None:
    """`_alike` of costs with this number of tokens."""
    parameters = first.parameters
    own = {_TIMES.get(name, name): True for name in VARIED if name not in _STEPS}
    own |= {name: True for name in ("middle", "others_position") if name in costs.numbers}
    if watched_costs.tested_alone(first.cost, own, lambda cost: parameters.demand(cost, tokens)) is not None:
        return np.ones(len(costs), dtype=np.bool_)
    found = [parameters.demands(each.joined(), tokens) for each in _blocks(costs)]
    if not found or None in found:
        return None
    wanted = parameters.demand(first.cost, tokens)
    return np.concatenate([(each.units == wanted.units) & (each.transfers == wanted.transfers) for each in found if each])


def _record(first: Case, tables: Tables, index: int, build: Callable[..., Any]) -> HardwareCost | None:
    """The record of its costs, if nothing but these depends on their numbers; else None."""
    table = tables.get("cost", {})
    if first.hardware is None or first.parameters.decides_by_costs:
        return None
    if method_tables(tables)[index].get("cost") is not None or not isinstance(table, Mapping):
        return None
    found: HardwareCost = build(HardwareCost, table, "cost")
    return found


def _found(record: HardwareCost, first: PointCosts, axes: _Axes) -> _Found | None:
    """Costs with these numbers, `first` those with others."""
    numbers = axes.numbers
    if numbers.get("prompt", np.zeros(0, dtype=np.int64)).dtype.kind != "i":
        return None
    valid = np.ones(axes.size, dtype=np.bool_)
    for name, values in numbers.items():
        if name == "prompt":
            valid &= (values >= 0) & (values <= checks.MAX_TOKENS)
        else:
            valid &= (values >= 0) & (values <= MAX_SECONDS) & ((values > 0) == (getattr(record, name) > 0))
    shares = None
    if ("prompt" in numbers or axes.lengths is not None) and valid.any():
        shares = np.full(axes.size, np.nan)  # nan: not known
        known = hardware_cost.memory_shares(record, first, axes.at(valid).contexts(record.prompt, first.needs))
        if known is not None:
            shares[valid] = known
        valid &= ~(shares > 1)
    if first.needs.context_budgets and valid.any():
        own = axes.at(valid)
        contexts = own.contexts(record.prompt, first.needs)
        valid[valid] = hardware_cost.budgets_apply(_costs(first.cost, first, own), first.needs, contexts, own.tokens(first.needs))
    own = axes.at(valid)
    costs = _costs(first.cost, first, own)
    plain = [each.joined().plain_times() for each in _blocks(costs.unique()[0])] if len(costs) else []
    if not all((each > 0).all() for each in plain):
        return None
    columns = _columns(first, costs, own, None if shares is None else shares[valid])
    alone = None
    if len(costs) and first.tensor_parallel > 1:
        alone, columns["one_device_error"] = _on_one_device(record, first, own)
    return _Found(first, costs, own, alone, columns, valid)


def _costs(cost: PassSeconds, of: PointCosts, axes: _Axes) -> VariedSeconds:
    """Costs with these numbers; links and promotions are added to the transfer times of the hardware."""
    target, numbers = cost.hardware("target"), axes.numbers
    moving = {"link": TOKEN_BYTES, "promotion": cost_models.bytes_of_state(target.shape, of.needs.handover_layer)}
    own: dict[str, NDArray[Any]] = {name: values for name, values in numbers.items() if name == "prompt"}
    if axes.lengths is not None:
        own["middle"] = axes.lengths // 2
        if of.needs.others_position is not None:
            own["others_position"] = hardware_cost.position_of_others(axes.lengths)
    for name, key in _TIMES.items():
        if name in numbers:
            own[key] = numbers[name] + (float(target.transfer(moving[key]).seconds) if key in moving else 0.0)
    steps = {role: np.asarray(numbers[name], float) for name, roles in _STEPS.items() if name in numbers for role in roles}
    steps = {role: values for role, values in steps.items() if isinstance(cost.hardware_models.get(role), WithEngineOverhead)}
    return VariedSeconds(cost, axes.size, own, steps)


def _blocks(costs: VariedSeconds) -> list[VariedSeconds]:
    return [costs[start : start + 10_000] for start in range(0, len(costs), 10_000)]


def _columns(
    first: PointCosts, costs: VariedSeconds, axes: _Axes, shares: NDArray[np.float64] | None
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Columns of the costs that differ (`sim.views.point_columns`)."""
    if not len(costs):
        return {}
    needs, (distinct, which) = first.needs, costs.unique()
    found = {"seconds_error": errors_of(costs, axes.tokens(needs))}
    if "prompt" in axes.numbers:
        found["prompt_tokens"] = axes.numbers["prompt"]
    prompts = np.maximum(distinct.numbers.get("prompt", np.asarray(costs.first.prompt)), 1)
    reading = cost_models.prompt_time(distinct.joined().target_model, prompts, needs.full_batch).seconds
    found["prompt_s"] = np.broadcast_to(reading, len(distinct))[which]
    drafting = costs.joined().within_budgets(dict(needs.draft_budgets))
    found |= {RATIOS[role]: drafting.ratio(role) for role in needs.roles}
    if shares is not None and first.memory is not None:
        found["memory_share"] = shares
    return found


def _on_one_device(
    record: HardwareCost, first: PointCosts, axes: _Axes
) -> tuple[VariedSeconds | None, NDArray[np.float64]]:  # fmt: skip
    """Costs of plain decoding on one device, and the error of its time; nan where the model is not known to fit one."""
    errors = np.full(axes.size, np.nan)
    found = hardware_cost.on_one_device(record, first.needs, axes.contexts(record.prompt, first.needs))
    if found is None or (found[1] > 1).all():
        return None, errors
    costs = _costs(found[0], first, axes)
    fits = np.flatnonzero(found[1] <= 1)
    errors[fits] = errors_of(costs.at(fits), axes.at(fits).tokens(first.needs))
    return costs, errors
