"""Cases: the checked objects of one grid point, built from a scenario's tables.

Unknown keys, and keys that no method uses, are errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model import published
from model.architectures import published_shapes
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.base.table_records import TableRecord, build, key_names, renamed
from model.costs.layer_times import TIMES, LayerTimeCosts, UnitCost
from model.costs.step_costs import OPERATIONS, RATIOS, StepCosts
from model.costs.width_curve import WidthCurve
from model.methods import method_parameters, registry
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand
from model.published import ppd_table_3_fit
from model.published.paper_notes import NOTES
from sim.engine.cluster import Cluster
from sim.scenarios import cost_kinds, outcomes_section
from sim.scenarios.outcomes.outcome_records import Outcome
from sim.scenarios.scenario_file import OVERRIDABLE, SECTIONS, Tables, cost_of, method_tables

if TYPE_CHECKING:
    from sim.scenarios.hardware_cost import HardwareCost, PointCosts

VIEWS = ("formula", "paths", "events")
SHAPES_OF = {"target": "shape", "draft": "draft_shape", "medium": "medium_shape"}
"""Key of a model's shape, by its role."""
MAX_REPLICATIONS = 1_000_000_000
MAX_TIME = 1e9
"""Upper bound on a time [layer-times, or seconds]; larger times would overflow when squared and summed."""


MIN_TIME = 1e-12
"""Smallest positive time [layer-times, or seconds]. Ratios of the two bounds can be squared."""


def _check_time(name: str, value: Any, *, positive: bool = False) -> None:
    """Check that a time is 0 (unless `positive`) or between MIN_TIME and MAX_TIME."""
    checks.number(name, value, 0, MAX_TIME)
    if value < MIN_TIME and (value > 0 or positive):
        nothing = "" if positive else "0 or "
        raise ParameterError(f"{name} must be {nothing}at least {MIN_TIME:g}, got {checks.shown(value)}")


_FITTED = ("layer_times", "early_head", "final_head", "dispatch", "dispatch_per_process", "link", "promotion")
"""Costs that a fitted overhead replaces."""


@dataclass(frozen=True)
class Settings:
    """[scenario]: number of tokens, replications and views. `event_replications` defaults to `replications`.

    `notes` name analyses of published tables, which the report adds if the run has the points of the table.
    """

    name: str
    tokens: int
    replications: int = 1000
    event_replications: int | None = None
    seed: int = 0
    views: tuple[str, ...] = VIEWS
    description: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "description"):
            if not isinstance(getattr(self, name), str):
                raise ParameterError(f"{name} must be a string in quotes, got {checks.shown(getattr(self, name))}")
        if not self.name.isprintable() or len(self.name) > 100 or "/" in self.name or self.name.startswith(".") or not self.name:
            known = "1 to 100 characters, no slash, no leading dot"
            raise ParameterError(f"name must be usable as the name of a folder ({known}), got {checks.shown(self.name)}")
        checks.whole("tokens", self.tokens, 1, checks.MAX_TOKENS)
        checks.whole("replications", self.replications, 1, MAX_REPLICATIONS)
        if self.event_replications is not None:
            checks.whole("event_replications", self.event_replications, 1, MAX_REPLICATIONS)
        checks.whole("seed", self.seed, 0, 2**63 - 1)
        _check_views(self.views)
        if not isinstance(self.notes, tuple):
            raise ParameterError(f"notes must be a list of some of {', '.join(NOTES)}, got {checks.shown(self.notes)}")
        for note in self.notes:
            checks.one_of("note", note, NOTES)


def _check_views(views: Any) -> None:
    if not isinstance(views, tuple) or not views:
        raise ParameterError(f"views must be a list of at least one of {', '.join(VIEWS)}, got {checks.shown(views)}")
    for view in views:
        checks.one_of("view", view, VIEWS)
    if len(set(views)) < len(views):
        raise ParameterError(f"views must name each view once, got {checks.shown(views)}")


@dataclass(frozen=True, kw_only=True)
class Cost(LayerTimeCosts, TableRecord):
    """[cost] in layer-times: times of steps, and the models' shapes.

    Parameters
    ----------
    kind, task
        `unit` (default), or `published`: the cost ratio comes from the base timings of a task in the speculative-decoding slides.
    data_set
        With `published`, instead of task: seconds_per_layer is derived from the measured time of plain decoding with LLaMA-2-13B
        on this data set (cnn_dm or squad), Table 3 of Predictive Pipelined Decoding.
    fitted_on
        With data_set: dispatch and dispatch_per_process are set to one number, the seconds per process and token that best fit the
        measured times of the table on this data set, or on `both`. It stands for all overheads that the theorem leaves out.
    allow_slow_medium
        Allow the medium model of a hierarchy to be slower than the large one.
    shape, draft_shape, medium_shape
        Shapes of the models, by name (`sim ls shapes`) or config.json, to count operations and bytes. Give those of all models of
        the method, or none.
    seconds_per_layer
        Duration of one layer-time [s]; with it the results have times in seconds too.
    """

    kind: str = "unit"
    task: str | None = None
    data_set: str | None = None
    fitted_on: str | None = None
    allow_slow_medium: bool = False
    shape: str | None = None
    draft_shape: str | None = None
    medium_shape: str | None = None
    seconds_per_layer: float | None = None

    REMOVED_KEYS = cost_kinds.REMOVED_KEYS

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, (*cost_kinds.IN_LAYER_TIMES, *cost_kinds.ON_HARDWARE))
        self._check_published()
        for name in (*RATIOS.values(), *OPERATIONS.values()):
            if getattr(self, name) is not None:
                _check_time(name, getattr(self, name))
        for name in SHAPES_OF.values():
            if getattr(self, name) is not None:
                published_shapes.named_shape(getattr(self, name), key=name)
        checks.flag("allow_slow_medium", self.allow_slow_medium)
        if not self.allow_slow_medium and self.medium_cost_ratio is not None and self.medium_cost_ratio > 1:
            raise ParameterError(
                f"medium_cost_ratio must be at most 1, a medium model no slower than the large one, got {self.medium_cost_ratio:g};"
                " if it is intended, set allow_slow_medium = true"
            )
        if self.seconds_per_layer is not None:
            _check_time("seconds_per_layer", self.seconds_per_layer)
        for name in TIMES:
            _check_time(name, getattr(self, name))
        if self.layer_times is not None and not isinstance(self.layer_times, tuple):
            raise ParameterError(f"layer_times must be a list with a time for each layer, got {checks.shown(self.layer_times)}")
        if self.layer_times == ():
            raise ParameterError("layer_times must have one time for each layer, got an empty list; leave it out for equal layers")
        for index, time in enumerate(self.layer_times or ()):
            _check_time(f"layer_times[{index}]", time)
        if self.layer_times and not any(self.layer_times):
            raise ParameterError(f"layer_times must have a time above 0, got {checks.shown(self.layer_times)}")
        self.model(1 if self.layer_times is None else len(self.layer_times))
        if self.verify_cost is not None:
            # Checked here so that the error names verify_cost.
            for index, time in enumerate(WidthCurve(self.verify_cost).times.tolist()):
                _check_time(f"verify_cost[{index}][1]", time, positive=True)

    def allowed(self, name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Which values of a number are valid with the other values of this record; see `VARIED`.

        >>> Cost().allowed("medium_cost_ratio", np.array([0.5, 1.5, 1e-13])).tolist()
        [True, False, False]
        """
        most = 1.0 if name == "medium_cost_ratio" and not self.allow_slow_medium else MAX_TIME
        return np.asarray((values == 0) | ((values >= MIN_TIME) & (values <= most)))

    def _check_published(self) -> None:
        given = [name for name in ("task", "data_set") if getattr(self, name) is not None]
        if len(given) != (self.kind == "published"):
            values = " and ".join(f"{name}={checks.shown(getattr(self, name))}" for name in given) or "none"
            raise ParameterError(f"one of task and data_set must be given with kind 'published', none with 'unit', got {values}")
        if self.task is not None:
            checks.one_of("task", self.task, {str(row["task"]) for row in published.table("deck-table-1").rows})
            if self.cost_ratio is not None:
                raise ParameterError("cost_ratio comes from the table with kind 'published'; leave it out, or drop kind and task")
        if self.data_set is not None:
            checks.one_of("data_set", self.data_set, ppd_table_3_fit.data_sets())
            if self.seconds_per_layer is not None:
                raise ParameterError(
                    "seconds_per_layer comes from the table with data_set; leave it out, or leave out kind and data_set"
                )
        if self.fitted_on is None:
            return
        if self.data_set is None:
            raise ParameterError(
                f"fitted_on must be given with kind 'published' and data_set, got {checks.shown(self.fitted_on)};"
                " add them, or leave it out"
            )
        checks.one_of("fitted_on", self.fitted_on, (*ppd_table_3_fit.data_sets(), ppd_table_3_fit.BOTH))
        for name in _FITTED:
            if getattr(self, name) not in (None, 0):
                raise ParameterError(
                    f"{name} must be left out with fitted_on, whose fitted cost stands for all overheads that the theorem leaves"
                    f" out, got {checks.shown(getattr(self, name))}"
                )

    def seconds(self, layers: int) -> float | None:
        """Duration of one layer-time [s]: as given, or such that plain decoding takes the published time."""
        if self.data_set is None:
            return self.seconds_per_layer
        return ppd_table_3_fit.seconds_per_layer(self.data_set) * ppd_table_3_fit.LAYERS / self.model(layers).target_pass

    def model(self, layers: int) -> UnitCost:
        """Cost model of a network with `layers` layers, made once."""
        if layers not in self._models:
            self._models[layers] = self._model(layers)
        return self._models[layers]

    @cached_property
    def _models(self) -> dict[int, UnitCost]:
        return {}

    def _model(self, layers: int) -> UnitCost:
        own: dict[str, Any] = {}
        if self.data_set is not None and self.fitted_on is not None:
            own |= ppd_table_3_fit.costs(self.data_set, self.fitted_on, self.dispatch_law)
        if self.task is not None:
            from model.published import deck_analysis

            own["cost_ratio"] = deck_analysis.cost_ratio(self.task)
        return replace(self.of(layers), **own) if own else self.of(layers)


VARIED = (*TIMES, *RATIOS.values(), *OPERATIONS.values())
"""Numbers of [cost] of kind `unit` that become numbers of `UnitCost` as they are: a whole axis of one is checked at once."""


@dataclass(frozen=True)
class Machine:
    """[cluster]: keys of `sim.engine.cluster.Cluster`; `units` defaults to the number that the method reserves."""

    units: int | None = None
    links: str = "point-to-point"
    stop: str = "now"

    def __post_init__(self) -> None:
        self.cluster(1)

    def cluster(self, reserved: int) -> Cluster:
        """Cluster for a method that reserves this number of units."""
        return Cluster(reserved if self.units is None else self.units, self.links, self.stop)


class OneDevice(NamedTuple):
    """Plain decoding on one device instead of all devices of a unit; numbers, or arrays of several cases."""

    time: Any
    """Time of all tokens; nan if the model is not known to fit one device."""
    error: Any
    """Relative error of the time on the devices of a unit [-]."""
    own_error: Any
    """Relative error of the time on one device [-]."""


@dataclass(frozen=True)
class Case:
    """One point of the grid, checked."""

    method: str
    parameters: MethodParameters
    settings: Settings
    outcomes: Mapping[str, Outcome]
    """By the kind of outcome: `match`, `accept` and so on."""
    cost: StepCosts
    """In layer-times, or in seconds on hardware."""
    seconds_per_layer: float | None
    """Duration of one layer-time [s], if given and times are in layer-times."""
    cluster: Cluster
    shapes: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    """Shapes of all its models, by role, or of none."""
    hardware: PointCosts | None = None
    """Costs on hardware, with kind `profile`, `roofline` or `engine`."""
    fitted_on: str | None = None
    """Data set of the published times that its overhead is fitted to."""

    def with_outcomes(self, outcomes: Mapping[str, Outcome]) -> Case:
        """Return a copy with these outcomes; cached properties are kept."""
        case = object.__new__(Case)
        vars(case).update(vars(self), outcomes=outcomes)
        return case

    def with_cost(self, cost: StepCosts) -> Case:
        """Return a copy with these costs, which are valid; nothing else depends on their differences."""
        case = object.__new__(Case)
        inner = vars(case)
        inner.update(vars(self))
        for name in _CACHED:
            inner.pop(name, None)
        inner["cost"] = cost
        return case

    def with_tokens(self, tokens: Any) -> Case:
        """Return a copy with this number of tokens, which is valid and changes no parameter and no cost."""
        case, settings = object.__new__(Case), object.__new__(Settings)
        vars(settings).update(vars(self.settings), tokens=tokens)
        inner = vars(case)
        inner.update(vars(self), settings=settings)
        for name in _CACHED:
            inner.pop(name, None)
        return case

    @property
    def tokens_vary(self) -> bool:
        """True if another number of tokens changes no parameter, and its costs only as `sim.scenarios.hardware_axes` knows."""
        if not self.parameters.predicts_lengths_together:
            return False
        if self.hardware is not None:
            return True
        by_tokens = type(self.parameters).largest_pass_of is not MethodParameters.largest_pass_of
        return not (by_tokens and isinstance(self.cost, UnitCost) and self.cost.verify_cost is not None)

    def varies_with(
        self, tables: Tables, index: int, names: Collection[str], build: Callable[..., Any] = build
    ) -> Cost | None:
        """The record of its costs, if only these numbers of its costs change with them; else None. `build` makes the record."""
        method, table = method_tables(tables)[index], tables.get("cost", {})
        if type(self.cost) is not UnitCost or method.get("cost") is not None or not isinstance(table, Mapping):
            return None
        if self.parameters.decides_by_costs:
            return None
        scaled = self.parameters.full_batch > 1 and self.cost.verify_cost is not None  # `UnitCost.of_batch`
        if scaled or not {*names} <= {*VARIED}:
            return None
        record: Cost = build(Cost, table, "cost")
        return record if record.kind == "unit" else None

    def cost_at(self, which: str) -> StepCosts:
        """Its costs (`cost`), those without overheads (`passes`), or at an end of their uncertainty (`slow`, `fast`)."""
        if which == "passes":
            return self.cost.passes_only()
        return self.cost if which == "cost" or self.hardware is None else self.hardware.ends[which == "fast"]

    @property
    def outcome(self) -> Outcome | None:
        """The first outcome; most methods have only one."""
        return next(iter(self.outcomes.values()), None)

    @property
    def outputs(self) -> int:
        """Number of generated tokens, of all decoded sequences."""
        return self.parameters.total_tokens(self.settings.tokens)

    @property
    def steps(self) -> int:
        """Number of output positions decoded one after another; for methods that decode whole batches, their steps."""
        return self.parameters.plain_steps(self.settings.tokens)

    @property
    def full_batch(self) -> int:
        """Batch size that every pass is priced with; 1 where all sequences of a batch are simulated."""
        return self.parameters.full_batch

    @property
    def plain_time(self) -> float:
        """Time of plain decoding of the same tokens in the same batches, on one unit of `tensor_parallel` devices."""
        time: float = self.parameters.plain_time(self.settings.tokens, self.cost)
        return time

    @property
    def plain_time_on_one_device(self) -> float | None:
        """Time of plain decoding on one device, if a unit has several devices and the model fits one; else None."""
        alone = None if self.hardware is None else self.hardware.one_device
        return None if alone is None else self.parameters.plain_time(self.settings.tokens, alone)

    @property
    def on_one_device(self) -> OneDevice:
        """Plain decoding on one device, for a unit of several."""
        time, of = self.plain_time_on_one_device, self.hardware
        errors = (0.0, 0.0) if of is None else (of.error, of.one_device_error)
        return OneDevice(float("nan") if time is None else time, *errors)

    @property
    def seconds(self) -> float | None:
        """Duration of one unit of the costs [s]; None if not known."""
        return self.seconds_per_layer if self.hardware is None else 1.0

    @property
    def tensor_parallel(self) -> int:
        """Number of devices in a unit, over which each layer is split."""
        return 1 if self.hardware is None else self.hardware.tensor_parallel

    def devices(self, units: int) -> int:
        """Number of devices in `units`: `tensor_parallel` per unit of the target, one per separate unit of a smaller model."""
        return self.parameters.devices(units, self.tensor_parallel)

    @cached_property
    def contention(self) -> str | None:
        """Reason why passes may wait, so that formula and paths have no values; None if nothing waits."""
        return contention(self.peak_demand, self.cluster)

    @property
    def contended(self) -> bool:
        """True if processes may wait for units or links, or keep units after a stop, which only the view `events` models."""
        return self.contention is not None

    @cached_property
    def peak_demand(self) -> Demand:
        """Largest number of units and transfers that the method may need at once."""
        return self.parameters.demand(self.cost, self.settings.tokens)

    @property
    def reserved_units(self) -> int:
        """Units reserved for the whole decoding: as many as the method needs, at most those of the cluster."""
        if self.contended and not self.parameters.bounded:
            return self.cluster.units
        return min(max(self.parameters.units, self.peak_demand.units), self.cluster.units)


_CACHED = tuple(name for name, value in vars(Case).items() if isinstance(value, cached_property))


def contention(wanted: Demand, cluster: Cluster) -> str | None:
    """Reason why processes may wait on this cluster; None if nothing ever waits.

    >>> contention(Demand(4), Cluster(2))
    'units: 2 of the 4 that the method may need at once'
    """
    if cluster.units < wanted.units:
        return f"units: {cluster.units} of the {wanted.units} that the method may need at once"
    if cluster.links == "shared" and wanted.transfers > 1:
        return "links: several transfers may need the shared link at once"
    if (wanted.stopped == "anywhere" and cluster.stop != "now") or (wanted.stopped == "layers" and cluster.stop == "pass"):
        return f"stop: a stopped process keeps its unit until the end of its {cluster.stop}"
    return None


def resolve(tables: Tables, index: int = 0, used: Sequence[frozenset[str]] = ()) -> Case:
    """Return the checked objects of one point: these tables, without their sweep, and the method of this index.

    `used` has the costs that each method uses anywhere on the grid, if these are more than at this point.
    """
    case = resolve_but_outcomes(tables, index, used)
    return case.with_outcomes(resolve_outcomes(tables, index, case))


def resolve_outcomes(tables: Tables, index: int, case: Case) -> dict[str, Outcome]:
    """Outcomes of one point; `case` has its other objects."""
    own = method_tables(tables)[index].get("outcomes")
    laws, where = (tables.get("outcomes"), "outcomes") if own is None else (own, "method.outcomes")
    return outcomes_section.resolve(laws, where, case.method, case.parameters, case.settings.tokens)


def resolve_but_outcomes(
    tables: Tables, index: int = 0, used: Sequence[frozenset[str]] = (), build: Callable[..., Any] = build
) -> Case:
    """Return the checked objects of one point without its outcomes; many points may share them.

    `build` makes the record of a section, as `model.base.table_records.build` does; a grid keeps those of sections that are alike.
    """
    for key in tables:
        if key not in SECTIONS:
            raise ParameterError(f"unknown section [{key}]; {checks.nearest(key, SECTIONS)}")
    settings = build(Settings, tables.get("scenario", {}), "scenario")
    chosen = method_tables(tables)
    if not chosen:
        raise ParameterError("a scenario needs at least one [[method]] table; `sim ls methods` lists the methods")
    table = dict(chosen[index])
    name = table.pop("name", None)
    if name is None:
        raise ParameterError(f"method.name is required; known: {', '.join(registry.names())}")
    kind = registry.parameters(name)
    registry.check_complete(name)
    own = {section: table.pop(section, None) for section in OVERRIDABLE}
    where = {section: f"method.{section}" if own[section] is not None else section for section in OVERRIDABLE}
    cost_table = cost_of(tables, chosen[index])
    real = isinstance(cost_table, Mapping) and cost_table.get("kind") in cost_kinds.ON_HARDWARE
    _refuse_of_other_kinds(cost_table, where["cost"], real)
    _refuse_unused(tables, chosen, used or used_costs(chosen))
    cost_record = _on_hardware() if real else Cost
    table = renamed(kind, table)
    if "layers" not in table and "layers" in kind.names():
        depth = _depth(build(cost_record, cost_table, where["cost"]), "target")
        table |= {} if depth is None else {"layers": depth}
    parameters = build(kind, table, "method", _LAYERS if "layers" not in table else "")
    parameters.check_tokens(settings.tokens)
    cost = build(cost_record, cost_table, where["cost"])
    depths = _depths(cost, parameters, table)
    parameters = replace(parameters, **depths) if depths else parameters
    cluster = build(Machine, tables.get("cluster", {}), "cluster").cluster(parameters.units)
    hardware = None
    if not isinstance(cost, Cost):
        from sim.scenarios import hardware_cost

        hardware = hardware_cost.point_costs(cost, parameters, settings.tokens, cluster.units, where["cost"], name)
    if isinstance(cost, Cost) and cost.data_set is not None and parameters.layers != ppd_table_3_fit.LAYERS:
        raise ParameterError(
            f"method.layers must be {ppd_table_3_fit.LAYERS} with {where['cost']}.data_set, whose times are of "
            f"{ppd_table_3_fit.MODEL}, got {parameters.layers}; set it, or give seconds_per_layer instead"
        )
    if hardware is not None:
        parameters = parameters.with_costs(hardware.cost)
        return Case(name, parameters, settings, {}, hardware.cost, None, cluster, hardware.shapes, hardware)
    assert isinstance(cost, Cost)
    for budget in parameters.context_budgets:
        raise ParameterError(
            f"method.{budget.name} needs costs that know the context, got {budget.positions} with {where['cost']}.kind"
            f" {cost.kind!r}, in which a pass takes the same time at every context; set kind to one of"
            f" {', '.join(cost_kinds.ON_HARDWARE)}, or leave it out and set {where['cost']}.cost_ratio to the time of such a pass"
        )
    model = cost.model(parameters.layers)
    for role in parameters.roles:
        if not model.has_model(role):
            raise ParameterError(
                f"{where['cost']}.{RATIOS[role]} is required by method {name} and has no default: the time of a forward pass of the"
                f" {role} model relative to the target's"
            )
    counted = {OPERATIONS[role]: getattr(model, OPERATIONS[role]) for role in parameters.roles}
    unknown = [ratio for ratio, value in counted.items() if value is None]
    if 0 < len(unknown) < len(counted):
        raise ParameterError(
            f"{where['cost']}.{unknown[0]} is required by method {name} together with the other: the arithmetic of a token in that"
            " model relative to the target's; or leave out both, and operations are not counted"
        )
    widest = parameters.largest_pass_of(settings.tokens)
    _refuse_narrow(model, widest, parameters, where["cost"], name)
    model = model.of_batch(parameters.full_batch, widest)
    parameters = parameters.with_costs(model)
    shapes = _shapes(cost, parameters, name, where["cost"])
    seconds = cost.seconds(parameters.layers)
    return Case(name, parameters, settings, {}, model, seconds, cluster, shapes, fitted_on=cost.fitted_on)


def _depths(cost: Cost | HardwareCost, parameters: MethodParameters, table: Tables) -> dict[str, Any]:
    """Layers of smaller models that the scenario leaves out, taken from a shape or a profile."""
    found: dict[str, Any] = {}
    for role in parameters.roles:
        name = f"{role}_layers"
        if name in table or parameters.depth(role) is None:
            continue
        depth = _depth(cost, role)
        found |= {} if depth is None else {name: depth}
    return found


_LAYERS = "add it under [[method]], or give [cost] a shape or a profile, which know it"


def _depth(cost: Cost | HardwareCost, role: str) -> int | None:
    """Layers of a model, where a shape or a profile knows them."""
    if isinstance(cost, Cost):
        given = getattr(cost, SHAPES_OF[role])
        return None if given is None else published_shapes.named_shape(given).layers
    hardware = cost.of(role)
    return None if hardware is None else hardware.shape.layers


def _refuse_narrow(model: UnitCost, widest: int, parameters: MethodParameters, where: str, name: str) -> None:
    """Raise an error if `verify_cost` ends below the widest pass, counted over all sequences of a batch."""
    batch = parameters.full_batch
    wide = batch * widest
    if model.curve is None or model.curve.last >= wide:
        return
    several = batch * parameters.concurrent_sequences > 1
    less = "draft less" if parameters.roles else "" if several else "decode fewer tokens"
    fewer = "take fewer sequences" if several else ""
    raise ParameterError(
        f"{where}.verify_cost must reach width {wide}, the widest pass of method {name}, got {model.curve.last}; measure passes of"
        f" more tokens or {' or '.join(filter(None, (less, fewer)))}"
    )


def _on_hardware() -> type[HardwareCost]:
    """Record of costs on hardware; a scenario without them does not import its module, nor those of devices and profiles."""
    from sim.scenarios.hardware_cost import HardwareCost

    return HardwareCost


def _refuse_of_other_kinds(table: Any, where: str, real: bool) -> None:
    """Raise an error for a key that belongs to the other kinds of costs, and name these."""
    own = _on_hardware() if real else Cost
    strange = [key for key in table if key not in key_names(own)] if isinstance(table, Mapping) else []
    for key in strange:
        if key in key_names(Cost if real else _on_hardware()):
            instead = f"use {key}_s instead" if f"{key}_s" in key_names(own) else "leave it out"
            of = "costs in layer-times" if real else "kinds profile, roofline and engine"
            given = checks.shown(table.get("kind", "unit"))
            raise ParameterError(f"{where}.{key} belongs to {of}, got it with kind {given}; {instead}")


def _shapes(cost: Cost, parameters: MethodParameters, name: str, where: str) -> dict[str, Shape]:
    """Shapes of a method's models: of all of them, or of none."""
    others = {role: parameters.depth(role) or 1 for role in parameters.roles}
    depths = {"target": parameters.layers} | others
    found: dict[str, Shape] = {}
    for role, depth in depths.items():
        key = SHAPES_OF[role]
        given = getattr(cost, key)
        if given is None:
            continue
        found[role] = published_shapes.named_shape(given)
        layers = "layers" if role == "target" else f"{role}_layers"
        if found[role].layers != depth:
            raise ParameterError(
                f"method.{layers} must be {found[role].layers}, as {where}.{key} {given!r} has, got {depth}; set it, or leave out"
                " shapes"
            )
        if "target" in found:
            published_shapes.check_head(given, found[role], found["target"], str(cost.shape), key=f"{where}.{key}")
    missing = [SHAPES_OF[role] for role in depths if role not in found]
    if found and missing:
        raise ParameterError(
            f"{where}.{missing[0]} is required by method {name} together with {where}.{SHAPES_OF[next(iter(found))]}; name all"
            " shapes, or none"
        )
    return found


def _refuse_unused(tables: Tables, chosen: list[Tables], used: Sequence[frozenset[str]]) -> None:
    """Raise an error for tables and keys that no method of the scenario uses, since their author expects an effect."""
    kinds = [registry.parameters(table.get("name")) for table in chosen]
    shared = [(kind, table) for kind, table in zip(kinds, chosen, strict=True) if "outcomes" not in table]
    table = tables.get("outcomes")
    if isinstance(table, Mapping) and "kind" not in table:
        wanted = {name for kind, own in shared for name in kind.outcomes_for(own)}
        for name in table:
            if name in outcomes_section.LAWS and name not in wanted:
                taken = f", which takes {', '.join(sorted(wanted))}" if wanted else ""
                raise ParameterError(f"[outcomes.{name}] is used by no method of this scenario{taken}; leave it out")
    asking = [table for kind, table in zip(kinds, chosen, strict=True) if kind.outcomes_for(table)]
    if table is not None and not asking:
        raise ParameterError("[outcomes] is used by no method of this scenario; leave it out")
    for each in chosen:
        if each.get("outcomes") is not None and each not in asking:
            raise ParameterError(f"[method.outcomes] is not used by method {each['name']}, which takes none; leave it out")
    # A method that overrides single keys of the shared costs also uses the other keys.
    pairs = [*zip(kinds, used, chosen, strict=True)]
    sharing = [(kind, own) for kind, own, table in pairs if cost_of(tables, table) is not table.get("cost")]
    _refuse_unused_cost("cost", tables.get("cost"), sharing)
    for kind, own, table in pairs:
        _refuse_unused_cost("method.cost", table.get("cost"), [(kind, own)])


def used_costs(chosen: Sequence[Tables]) -> list[frozenset[str]]:
    """Costs that each method uses with its parameters, among those that not all methods use."""
    return [registry.parameters(table.get("name")).all_costs_for(table) for table in chosen]


def _refuse_unused_cost(where: str, table: Any, of: Sequence[tuple[type[MethodParameters], frozenset[str]]]) -> None:
    if not isinstance(table, Mapping):
        return
    for key in table:
        name = key.removesuffix("_s") if isinstance(key, str) else key
        if name not in optional_costs() or any(name in used for _, used in of):
            continue
        elsewhere = any(name in kind.COSTS for kind, _ in of)
        also = ", or choose parameters with which it has an effect (`sim ls methods NAME`)" if elsewhere else ""
        raise ParameterError(f"{where}.{key} is used by no method that it is given for; leave it out{also}")


def optional_costs() -> frozenset[str]:
    """Costs that not every method uses, without the suffix _s of those in seconds."""
    return frozenset(method_parameters.COSTS).union(*method_parameters.COSTS_OF.values())
