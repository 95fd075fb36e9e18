"""[cost] on real hardware, in seconds: kinds `profile`, `roofline` and `engine`.

The time of each pass depends on its own position (`model.costs.pass_seconds.PassSeconds`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.architectures import draft_heads, layer_parts, published_shapes
from model.architectures.transformer import Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.base.table_records import TableRecord
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import TOKEN_BYTES, PassSeconds
from model.costs.step_costs import ALL_LAYERS, PassShape
from model.hardware import cost_models, devices, physical_limits, profile, profile_files
from model.hardware.cost_models import DeviceMemory, Hardware, WithEngineOverhead, bytes_of_state
from model.hardware.profile_costs import ProfileCosts, shape_of
from model.hardware.roofline import Efficiency, Roofline
from model.methods.method_parameters import CONTINUOUS, ContextBudget, MethodParameters
from sim.scenarios import cost_kinds

if TYPE_CHECKING:
    from model.costs.many_seconds import VariedSeconds
    from model.engines.step_law import StepLaw

ROLES = ("target", "draft", "medium")
_SECONDS = ("dispatch_s", "dispatch_per_process_s", "link_s", "promotion_s", "state_check_s")
"""Costs of kind `unit`, given here in seconds."""
_EFFICIENCIES = {
    "memory_efficiency": "memory", "compute_efficiency": "compute", "elementwise_efficiency": "elementwise", "launch_s": "launch",
    "memory_error": "error", "compute_error": "compute_error",
}  # fmt: skip
"""Keys of kind `roofline`, with their fields of `Efficiency`."""
_TYPES = ("dtype", "weights", "draft_weights", "cache_dtype")
_OVERHEADS = ("step_s", "draft_step_s")
_KEYS = {
    "profile": (
        "profile", "draft_profile", "medium_profile", "busy", "medium_shape", "dtype", "draft_tensor_parallel", *_OVERHEADS,
    ),
    "roofline": (
        "device", "medium_shape", *_TYPES, "expert_correlation", "draft_tensor_parallel", *_OVERHEADS, *_EFFICIENCIES,
    ),
    "engine": ("law",),
}  # fmt: skip
"""Keys that not all kinds have."""
_REQUIRED = {"profile": ("profile",), "roofline": ("device", "shape"), "engine": ("law",)}
_NAMES = ("profile", "draft_profile", "medium_profile", "law", "device", "shape", "draft_shape", "medium_shape", *_TYPES)
MAX_SECONDS = 1e6
PEAK_TOLERANCE = 0.1
"""Tolerance by which times of a user's profile may be below the limit of the peaks [-]: clocks vary, peaks are measured roughly."""
UNIT_MISTAKE_FACTOR = 100.0
"""Factor above its measured peaks from which a user's profile is refused as a mistake of units [-]."""


def keys_of(kind: str) -> tuple[str, ...]:
    """Keys of [cost] that a kind of costs on hardware has.

    >>> "law" in keys_of("engine"), "device" in keys_of("engine"), "prompt" in keys_of("engine")
    (True, False, True)
    """
    others = {key for keys in _KEYS.values() for key in keys} - {*_KEYS[kind]}
    return tuple(field.name for field in fields(HardwareCost) if field.name not in others)


@dataclass(frozen=True)
class HardwareCost(TableRecord):
    """[cost] with kind `profile`, `roofline` or `engine`.

    Parameters
    ----------
    kind
        `profile`: measured tables. `roofline`: the arithmetic of a shape over a device's published peaks. `engine`: a step law,
        fitted to measured steps of a serving engine (`calibrate engine fit`), with everything that the engine adds to its kernels.
    profile, draft_profile, medium_profile
        Names of bundled profiles (`sim ls profiles`), or paths of .json files, one for each model of the method. From a profile of
        operations the times of the model in `shape` are composed. A shape without a profile is estimated by kind `roofline` on the
        same device.
    law
        Kind `engine`: name of a bundled law (`sim ls laws`), or path of a law's .json. Its steps are those of a batch that is
        always full; a draft's pass takes the law's time at any shape of the draft.
    device
        Kind `roofline`: a name (`sim ls devices`), or the path of a .toml file such as the output of `sim ls devices h100`.
    shape, draft_shape, medium_shape
        Shapes of the models (`sim ls shapes`): names, or paths of a config.json. For kind `roofline`, profiles of operations,
        and laws that name no model; a law's draft without a shape has one layer. Draft heads are named by kind and target, such as
        eagle3:llama-3.1-8b or mtp:deepseek-v3.
    dtype
        Data type of activations and cache, and of weights unless they are quantised. With kind `roofline` the default is the
        shape's; it must be the data type of a profile.
    weights, draft_weights
        Kind `roofline`: format of the quantised weights of the large model's layers, and of the smaller models': int4 (the same as
        int4-g128), int8 (a scale per row), float8, mxfp4, nvfp4, int4-gN or int8-gN with a 16-bit scale for each N weights (a power
        of two), or none. The default is that in which the model is published: float8 for DeepSeek and its MTP module, mxfp4 experts
        for gpt-oss, none for most. Products of int4, int8 and mxfp4 weights are computed in `dtype`; of float8 and nvfp4 in their
        type where the device has a rate for it, else in `dtype`.
    cache_dtype
        Kind `roofline`: data type of the KV cache. Default: `dtype`.
    expert_correlation
        Kind `roofline`, a large model with sparse experts: correlation of the experts of successive tokens of a sequence, 0
        (independent, the default, assumed) to 1 (the same).
    prompt
        Positions in the KV cache when the first token is decoded. The time of each pass depends on its own position and on the
        batch (`sequences`). In a lockstep batch all sequences are at the same position; in a continuous batch a pass reads the mean
        context of the decoded sequence and of others that are half-way through.
    tensor_parallel
        Tensor parallel size: devices over which each layer of the large model is split; with kind `engine` that of the law, where
        it says one. A unit then has this number of devices.
    draft_tensor_parallel
        Devices over which each layer of the draft is split: 1 or `tensor_parallel`. Default: `tensor_parallel` for draft heads and
        MTP modules on the large model's devices, as vLLM and SGLang run them, unless their profile lacks it; else 1. With
        `placement` separate the draft's unit is one device.
    busy
        Number of other units of the same host that are busy at the same time, if the profile has measured their effect.
    step_s
        Engine overhead per step of the target model [s], for scheduling, launching and sampling, independent of the tokens per
        sequence. A step is a pass that begins at the first layer or continues several others: a token of plain decoding (so the
        baseline of speed-ups pays it too), a verification, a token of early exit, the pass of each process of PPD. Drafts by the
        model's own layers are part of the verification's step. It is added to a part `step` that the profile has measured.
    draft_step_s
        Engine overhead per pass of the draft model, and of the medium model of a hierarchy [s].
    dispatch_s, dispatch_per_process_s, dispatch_law
        Time to start sub-processes, as `dispatch` of kind `unit`, in seconds.
    link_s, promotion_s, state_check_s
        As `link`, `promotion` and `state_check` of kind `unit`, in seconds; the first two are added to the times of the hardware.
    memory_efficiency, compute_efficiency, elementwise_efficiency, launch_s
        Kind `roofline`: shares of the peak bandwidth and arithmetic that matrix products reach, share of the bandwidth that
        elementwise operations reach, and launch time of a product [s]. The defaults are fitted to other devices. With efficiencies
        of 1 and no launch time the result is a lower bound.
    memory_error, compute_error
        Relative errors where memory bandwidth limits a pass, and where arithmetic does. The defaults are those of a device without
        measurements; `calibrate fit roofline --layer` gives these keys for a device with one or two measured layers.
    """

    kind: str
    profile: str | None = None
    draft_profile: str | None = None
    medium_profile: str | None = None
    law: str | None = None
    device: str | None = None
    shape: str | None = None
    draft_shape: str | None = None
    medium_shape: str | None = None
    dtype: str | None = None
    weights: str | None = None
    draft_weights: str | None = None
    cache_dtype: str | None = None
    expert_correlation: float = 0.0
    prompt: int = 512
    tensor_parallel: int = 1
    draft_tensor_parallel: int | None = None
    busy: int = 0
    step_s: float = 0.0
    draft_step_s: float = 0.0
    dispatch_s: float = 0.0
    dispatch_per_process_s: float = 0.0
    dispatch_law: str = "linear"
    link_s: float = 0.0
    promotion_s: float = 0.0
    state_check_s: float = 0.0
    memory_efficiency: float | None = None
    compute_efficiency: float | None = None
    elementwise_efficiency: float | None = None
    launch_s: float | None = None
    memory_error: float | None = None
    compute_error: float | None = None

    REMOVED_KEYS = cost_kinds.REMOVED_KEYS

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, cost_kinds.ON_HARDWARE)
        for name in {name for kind, names in _KEYS.items() if kind != self.kind for name in names} - {*_KEYS[self.kind]}:
            if getattr(self, name):
                raise ParameterError(f"{name} is not used by kind {self.kind!r}; leave it out")
        for name in _REQUIRED[self.kind]:
            if getattr(self, name) is None:
                raise ParameterError(f"{name} is required by kind {self.kind!r} and has no default; `sim ls {name}s` lists them")
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ParameterError(f"{name} must be a name in quotes, got {checks.shown(value)}")
        published_shapes.check_dtype(self.dtype)
        for name in ("shape", "draft_shape", "medium_shape"):
            if getattr(self, name) is not None:
                find = published_shapes.whole_model if name == "shape" else published_shapes.named_shape
                made = find(getattr(self, name), self.dtype, key=name)
                if self.kind == "roofline":
                    self._stored(made, "target" if name == "shape" else "draft")
        if self.device is not None:
            devices.device(self.device)
        checks.whole("prompt", self.prompt, 0, checks.MAX_TOKENS)
        checks.whole("tensor_parallel", self.tensor_parallel, 1, 1024)
        if self.draft_tensor_parallel is not None:
            checks.whole("draft_tensor_parallel", self.draft_tensor_parallel, 1, 1024)
            if self.draft_tensor_parallel not in (1, self.tensor_parallel):
                either = "1" if self.tensor_parallel == 1 else f"1 or tensor_parallel={self.tensor_parallel}"
                raise ParameterError(f"draft_tensor_parallel must be {either}, got {self.draft_tensor_parallel}")
        checks.whole("busy", self.busy, 0, 1024)
        for name in ("step_s", "draft_step_s", *_SECONDS):
            checks.number(name, getattr(self, name), 0, MAX_SECONDS)
        UnitCost(1, dispatch_law=self.dispatch_law)
        self._efficiency()
        target, *smaller = (self.of(role) for role in ROLES)
        if target is not None:
            for role, draft in zip(ROLES[1:], smaller, strict=True):
                self._check_head(role, target, draft)

    def _check_head(self, role: str, target: Hardware, draft: Hardware | None) -> None:
        """Refuse a draft head of another model than the target."""
        if draft is None:
            return
        key = next((f"{role}_{each}" for each in ("shape", "profile") if getattr(self, f"{role}_{each}") is not None), "law")
        known = target.profile.model if isinstance(target, ProfileCosts) else ""
        law = _law_of(target)
        if law is not None and law.kernels is not None:
            known = law.kernels.model
        published_shapes.check_head(
            str(getattr(self, key)), draft.shape, target.shape, self.shape or known or "the target", key=key
        )

    def tensor_parallel_of(self, role: str, *, separate: bool = False) -> int:
        """Number of devices that a layer of a role's model is split over; `separate`: the draft has a unit of its own."""
        if role == "target":
            return self.split
        if role != "draft":
            return 1
        if self.kind == "engine":  # the law's time of a pass holds at any split; the memory does not
            made = None if separate else self.of("draft")
            return self.split if made is not None and made.shape.draft is not None else 1
        if self.draft_tensor_parallel is not None:
            if separate and self.draft_tensor_parallel > 1:
                raise ParameterError(
                    f"draft_tensor_parallel must be 1 with placement separate, whose unit of the draft is one device, got"
                    f" {self.draft_tensor_parallel}"
                )
            try:
                self.of("draft", self.draft_tensor_parallel)
            except ParameterError as error:
                raise ParameterError(f"draft_tensor_parallel: {error}") from None
            return self.draft_tensor_parallel
        draft = None if separate or self.tensor_parallel == 1 else self.of("draft")
        if draft is None or draft.shape.draft is None:
            return 1
        try:
            self.of("draft", self.tensor_parallel)
        except ParameterError:
            return 1  # its profile has only times of one device
        return self.tensor_parallel

    def _stored(self, made: Shape, role: str) -> Shape:
        """Shape of a model whose weights and cache have the types that the scenario gives."""
        key = "weights" if role == "target" else "draft_weights"
        name = getattr(self, key)
        if name is not None:
            made = replace(made, weights=None if name == "none" else layer_parts.quantised(name, key=key))
        if self.cache_dtype is not None:
            made = replace(made, cache_dtype=self.cache_dtype)
        if role == "target" and self.expert_correlation:
            if made.experts is None:
                raise ParameterError(f"expert_correlation is used only by a shape with sparse experts, got {self.shape}; omit it")
            checks.number("expert_correlation", self.expert_correlation, 0, 1)
            made = replace(made, experts=replace(made.experts, correlation=float(self.expert_correlation)))
        return made

    def _efficiency(self) -> Efficiency:
        given = {field: getattr(self, name) for name, field in _EFFICIENCIES.items()}
        return Efficiency(**{field: value for field, value in given.items() if value is not None})

    @cached_property
    def found(self) -> dict[MethodNeeds, PointCosts]:
        """Costs that have been made of this record."""
        return {}

    def step_of(self, role: str) -> float:
        """Engine overhead of a pass of a role [s]."""
        return self.step_s if role == "target" else self.draft_step_s

    @property
    def split(self) -> int:
        """Devices that the large model is split over: those of the step law, where it says them, or `tensor_parallel`."""
        of = _law(str(self.law)).devices if self.kind == "engine" else None
        return self.tensor_parallel if of is None else of

    def of(self, role: str, tensor_parallel: int = 1) -> Hardware | None:
        """Return the hardware model of a role, or None if the scenario gives none."""
        where = "" if role == "target" else f"{role}_"
        shape = getattr(self, f"{where}shape")
        if self.kind == "engine":
            return self._of_law(role, tensor_parallel)
        if self.kind == "roofline":
            if shape is None:
                return None
            made = self._stored(published_shapes.named_shape(shape, self.dtype), role)
            return _roofline(devices.device(str(self.device)), made, self._efficiency(), tensor_parallel)
        name = getattr(self, f"{where}profile")
        if name is None:
            # Not measured: estimate it by a roofline of the same device.
            at = None if shape is None else self.of("target")
            if not isinstance(at, ProfileCosts) or at.profile.device not in devices.DEVICES:
                return None
            of = devices.device(at.profile.device)
            return _roofline(of, published_shapes.named_shape(str(shape), at.profile.dtype), Efficiency(), tensor_parallel)
        try:
            return _measured(name, shape, self.dtype, tensor_parallel)
        except ParameterError as error:
            raise ParameterError(f"{where}profile: {error}") from None


    def _of_law(self, role: str, tensor_parallel: int) -> Hardware | None:
        """Hardware model of a role by the step law."""
        from model.engines.law_costs import LawDraft, LawTarget

        law = _law(str(self.law))
        if role == "medium":
            return None  # no engine runs a hierarchy
        if self.tensor_parallel not in (1, self.split):
            known = f"{self.split}, that of law {law.name}"
            raise ParameterError(f"tensor_parallel must be {known}, got {self.tensor_parallel}; leave it out")
        model, dtype = law.shape_name, None if law.kernels is None else law.kernels.dtype
        if self.shape is None and model is None:
            raise ParameterError(f"shape is required with law {law.name}, which names no model; `sim ls shapes` lists them")
        shape = published_shapes.named_shape(str(self.shape or model), dtype)
        if model is not None and shape != published_shapes.named_shape(model, dtype):
            raise ParameterError(f"shape must be {model}, the model of law {law.name}, got {self.shape}; leave it out")
        if law.experts is not None:
            has = "none" if shape.experts is None else f"{shape.experts.active} of {shape.experts.count}"
            if has != (wanted := f"{law.experts.active} of {law.experts.number}"):
                raise ParameterError(f"shape must be of a model with {wanted} experts, as law {law.name}; {self.shape} has {has}")
        if role == "target":
            stored = shape if law.kernels is None else replace(shape, weights=law.kernels.target.weights)
            return LawTarget(law, stored, tensor_parallel)
        draft = self.draft_shape or (None if law.kernels is None else law.kernels.draft)
        one_layer = replace(shape, layers=1, experts=None, window=None)
        return LawDraft(law, one_layer if draft is None else published_shapes.named_shape(draft))


@functools.lru_cache(maxsize=256)
def _roofline(of: devices.Device, made: Shape, efficiency: Efficiency, tensor_parallel: int) -> Roofline:
    return Roofline.on_device(made, of, efficiency, tensor_parallel)


_Stamp = tuple[int, int] | None
"""`model.base.bounded_files.stamp`: a changed profile is read again."""


def _measured(name: str, shape: str | None, dtype: str | None, tensor_parallel: int) -> ProfileCosts:
    path = Path(name)
    changed = bounded_files.stamp(path) if path.suffix == ".json" else None
    return _looked_up(name, shape, None if shape is None else published_shapes.named_shape(shape), dtype, tensor_parallel, changed)


@functools.lru_cache(maxsize=64)
def _looked_up(
    name: str, shape: str | None, made: Shape | None, dtype: str | None, tensor_parallel: int, changed: _Stamp
) -> ProfileCosts:
    found = _loaded(name, changed)
    if dtype is not None and dtype != found.dtype:
        raise ParameterError(f"dtype must be {found.dtype}, that of {found.name}, got {checks.shown(dtype)}; {_covers(found)}")
    if found.kind == "operations":
        from model.hardware import composed_layers

        if shape is None or made is None:
            raise ParameterError(f"{found.name} is a profile of operations: name the shape to compose from it (`sim ls shapes`)")
        found = composed_layers.layer(
            found, replace(made, dtype=found.dtype), model=published_shapes.label(shape), tensor_parallel=tensor_parallel
        )
    elif made is not None and replace(made, dtype=shape_of(found).dtype, weights=shape_of(found).weights) != shape_of(found):
        raise ParameterError(
            f"{found.name} is of {found.model}, not of {shape}; leave shape out, or use a profile of operations, for any shape;"
            f" {_covers(found)}"
        )
    return ProfileCosts(found, tensor_parallel=tensor_parallel)


def _covers(found: profile.Profile) -> str:
    return f"it covers {found.model or 'operations'} in {found.dtype} on {found.device}: {found.coverage()}"


@functools.lru_cache(maxsize=64)
def _loaded(name: str, _: _Stamp) -> profile.Profile:
    found = profile_files.load(name)
    if name.endswith(".json") and found.kind == "model":  # a user's profile; tests check the bundled ones
        shape = shape_of(found)
        across = found.facts.get("source", 0) if shape.encoder_layers else 0
        try:
            checks.whole("source in facts", across, 0)
            limits = {"tolerance": PEAK_TOLERANCE, "most": UNIT_MISTAKE_FACTOR}
            for line in physical_limits.check(found, shape, source=across, in_sequence=False, **limits):
                warnings.warn(f"{Path(name).name}: {line}", stacklevel=2)
        except ParameterError as error:
            raise ParameterError(f"{Path(name).name}: {error}") from None
    return found


def position_of_others(tokens: Any) -> Any:
    """Mean position of the other sequences of a continuous batch: half-way through, in the mean. `tokens` may be an array.

    >>> position_of_others(5)
    2.5
    """
    return tokens / 2


class MethodNeeds(NamedTuple):
    """What the costs of a point depend on besides their record: methods and parameters with the same needs share their costs."""

    name: str
    where: str
    """Table of the costs, for messages."""
    tokens: int
    apart: bool
    """Smaller models have units of their own."""
    roles: tuple[str, ...]
    depths: tuple[int | None, ...]
    """Layers of the target and of each of `roles`; None where the parameters do not define them."""
    sequences: int
    full_batch: int
    others_position: float | None
    """`position_of_others` in a continuous batch; else None."""
    several_units: bool
    separate_units: bool
    handover_layer: int
    context_budgets: tuple[ContextBudget, ...]
    draft_budgets: tuple[tuple[str, int], ...]

    @staticmethod
    def of(parameters: MethodParameters, tokens: int, units: int, where: str, name: str) -> MethodNeeds:
        """Needs of a method with these parameters, for `tokens` tokens on a cluster of `units` units."""
        roles, batch, separate = parameters.roles, parameters.full_batch, parameters.separate_units
        others = position_of_others(tokens) if parameters.batching == CONTINUOUS and batch > 1 else None
        return MethodNeeds(
            name, where, tokens, 0 < separate < units, roles, tuple(map(parameters.depth, ("target", *roles))),
            parameters.sequences, batch, others, parameters.units > 1, separate > 0, parameters.handover_layer,
            parameters.context_budgets, tuple(parameters.draft_budgets.items()),
        )  # fmt: skip


@dataclass(frozen=True)
class PointCosts:
    """Costs of a point on hardware."""

    needs: MethodNeeds
    cost: PassSeconds
    error: float
    """Relative error of the time of plain decoding [-]."""
    shapes: Mapping[str, Shape]
    tensor_parallel: int
    draft_tensor_parallel: int
    one_device: PassSeconds | None
    """Costs of plain decoding on one device, if a unit has several and the model fits one; else None."""
    one_device_error: float
    memory: DeviceMemory | None
    """None if the memory of the device is not known."""
    provenance: str
    prompt_s: float
    """Time to process the prompt, before the first token is decoded [s]."""
    missing: tuple[str, ...] = ()
    """Parts of a pass that the method or its devices have but that are not measured; assumed to take 0."""

    @cached_property
    def ends(self) -> tuple[PassSeconds, PassSeconds]:
        """Costs at the upper and at the lower end of the times' uncertainty."""
        return self.cost.uncertainty_ends()


def _check_drafting(shape: str, parameters: MethodParameters, where: str, name: str) -> None:
    """Raise an error for a draft head that cannot draft as the method does."""
    draft = f"{where}.draft_shape {shape}"
    if draft_heads.is_parallel(shape) and not parameters.drafts_in_one_pass:
        raise ParameterError(
            f"{draft} drafts all its tokens in one pass, and method {name} makes a pass for each; name another draft, such as"
            " eagle3:TARGET, or use method speculative with drafter = 'parallel'"
        )
    if draft_heads.is_head(shape) and not draft_heads.is_parallel(shape) and parameters.drafts_in_one_pass:
        raise ParameterError(
            f"{draft} drafts one token in a pass, and method {name} drafts all in one pass; name another draft, such as"
            " p-eagle:TARGET, or set drafter = 'heads'"
        )
    most = draft_heads.most_drafted(shape)
    if most is not None and parameters.longest_draft > most:
        raise ParameterError(
            f"draft_length must be at most {most} with {draft}, a head for each drafted token, got {parameters.longest_draft}"
        )


def point_costs(cost: HardwareCost, parameters: MethodParameters, tokens: int, units: int, where: str, name: str) -> PointCosts:
    """Costs of a method with these parameters, for `tokens` tokens on a cluster of `units` units.

    Of a record they are made once for all parameters with the same needs.
    """
    parameters.check_context(cost.prompt + tokens)
    if "draft" in parameters.roles and cost.draft_shape is not None:
        _check_drafting(cost.draft_shape, parameters, where, name)
    needs = MethodNeeds.of(parameters, tokens, units, where, name)
    if needs not in cost.found:
        if len(cost.found) >= _MOST_KEPT:
            cost.found.pop(next(iter(cost.found)))
        cost.found[needs] = _point_costs(cost, needs)
    return cost.found[needs]


_MOST_KEPT = 256
"""Costs that are kept of one record."""


def _point_costs(cost: HardwareCost, needs: MethodNeeds) -> PointCosts:
    models: dict[str, Hardware] = {}
    where, name, tokens, split = needs.where, needs.name, needs.tokens, 1
    for role, depth in zip(("target", *needs.roles), needs.depths, strict=True):
        try:
            over = cost.tensor_parallel_of(role, separate=needs.apart)
            found, split = cost.of(role, over), over if role == "draft" else split
        except ParameterError as error:
            raise ParameterError(f"{where}: {error}") from None
        if found is None and cost.kind == "engine":
            raise ParameterError(f"{where}.kind 'engine' has no times of a {role} model, which method {name} has; use another kind")
        if found is None:
            key = ("" if role == "target" else f"{role}_") + ("profile" if cost.kind == "profile" else "shape")
            raise ParameterError(f"{where}.{key} is required by method {name}, for the times of its {role} model")
        models[role] = found
        layers = "layers" if role == "target" else f"{role}_layers"
        if depth not in (None, found.shape.layers):
            or_not = "" if role == "target" else ", or leave it out"
            raise ParameterError(f"method.{layers} must be {found.shape.layers}, as in {where}, got {depth}; set it{or_not}")
    extra = tuple((name, getattr(cost, f"{name}_s")) for name in ("dispatch", "dispatch_per_process", "state_check"))
    served: tuple[tuple[str, Hardware], ...] = tuple(
        (role, WithEngineOverhead(hardware, cost.step_of(role))) for role, hardware in models.items()
    )
    extra += (("dispatch_law", cost.dispatch_law),)
    target = models["target"]
    extra += (("verification", 0.0 if (law := _law_of(target)) is None else law.coefficients.get("round", 0.0)),)
    # With as few units as the target needs, the draft shares them.
    draft_devices = 1 / cost.split if cost.split > 1 and needs.apart else 1.0
    seconds = _prices(
        served, needs.full_batch, needs.others_position, tokens // 2, needs.handover_layer, cost.prompt, cost.busy, cost.link_s,
        cost.promotion_s, extra, draft_devices,
    )  # fmt: skip
    _refuse_no_time(seconds)
    _refuse_idle_budget(seconds, needs)
    alone = _one_device(cost, needs)
    shapes = {role: each.shape for role, each in models.items()}
    room = _memory(cost, models, needs, split)
    source = "; ".join(dict.fromkeys(each.provenance for each in models.values()))
    reading = float(cost_models.prompt_time(served[0][1], max(cost.prompt, 1), needs.full_batch).seconds)
    missing = _missing(cost, models, needs)
    off, other = _error_of(seconds, tokens), 0.0 if alone is None else _error_of(alone, tokens)
    return PointCosts(needs, seconds, off, shapes, cost.split, split, alone, other, room, source, reading, missing)


@functools.lru_cache(maxsize=64)  # points that differ only in drafts or outcomes share the times of passes
def _prices(
    served: tuple[tuple[str, Hardware], ...], batch: int, others_position: float | None, middle: int, handed_over: int, prompt: int,
    busy: int, link: float, promotion: float, extra: tuple[tuple[str, Any], ...], draft_devices: float,
) -> PassSeconds:  # fmt: skip
    """Costs of passes of these models; `link` and `promotion` are added to the transfer times of the hardware."""
    target = served[0][1]
    moving = [float(target.transfer(size).seconds) for size in (TOKEN_BYTES, bytes_of_state(target.shape, handed_over))]
    cost = PassSeconds(
        dict(served), prompt=prompt, batch=batch, others_position=others_position, middle=middle, busy=busy, link=moving[0] + link,
        promotion=moving[1] + promotion, draft_devices=draft_devices, **dict(extra),
    )  # fmt: skip
    kernels = tuple((role, each.kernels) for role, each in served if isinstance(each, WithEngineOverhead))
    tables = (_shared_tables(kernels, batch, others_position, each, busy) for each in (prompt, None))
    cost.share_times(*tables)
    return cost


@functools.lru_cache(maxsize=64)
def _shared_tables(*_: Any) -> dict[Any, Any]:
    """Times with these kernels, which costs that differ in overheads only share; without a prompt, those of all prompts."""
    return {}


def _error_of(cost: PassSeconds, tokens: int) -> float:
    """Relative error of the time of plain decoding: the mean error of its steps, weighted by their times."""
    at = np.arange(tokens)
    return float(np.average(np.broadcast_to(cost.plain_error(at), at.shape), weights=cost.plain_times(at)))


def _refuse_no_time(cost: PassSeconds) -> None:
    if not cost.plain_times() > 0:
        raise ParameterError(f"a step of plain decoding must take time, got {float(cost.plain_times()):g} s after the prompt")


def _refuse_idle_budget(cost: PassSeconds, needs: MethodNeeds) -> None:
    """Raise an error for a budget that does not change the time of a draft pass although it hides a part of the context."""
    for budget in needs.context_budgets:
        time, idle = _at_the_end(budget, cost.prompt + needs.tokens, lambda shape: cost.times(shape, needs.tokens))
        if idle:
            name, role, positions = budget
            raise ParameterError(
                f"{name} must make a pass of the {role} shorter than {float(time):.4g} s, got {positions} with {needs.where}, whose"
                " passes take the same time with any context; leave it out, or take costs that know the context"
            )


def budgets_apply(costs: VariedSeconds, needs: MethodNeeds, contexts: NDArray[np.int64], tokens: Any) -> NDArray[np.bool_]:
    """Mask of costs with which the context budgets are accepted: none is beyond the context, and none has no effect.

    `contexts` are the positions of prompt and output together, shape (costs,), and `tokens` those of the output, () or (costs,).
    """
    found, joined = np.ones(len(costs), dtype=np.bool_), costs.joined()
    for budget in needs.context_budgets:
        _, idle = _at_the_end(budget, contexts, lambda shape: joined.times_at_each(shape, tokens))
        found &= (budget.positions <= contexts) & ~idle  # the former as `MethodParameters.check_context`
    return found


def _at_the_end(budget: ContextBudget, contexts: Any, times: Callable[[PassShape], Any]) -> tuple[Any, Any]:
    """Time of a pass after all of the context [s], and whether the budget leaves it as it is although it hides positions.

    `times` gives the time of a pass there; for several costs all are arrays of shape (costs,).
    """
    whole = PassShape(ALL_LAYERS, budget.role, heads=1)
    time = times(whole)
    return time, (budget.positions < contexts) & (time == times(whole._replace(context_budget=budget.positions)))


def _one_device(cost: HardwareCost, needs: MethodNeeds) -> PassSeconds | None:
    """Costs of plain decoding on one device instead of `tensor_parallel`; None if model and cache are not known to fit it."""
    found = on_one_device(cost, needs, cost.prompt + needs.tokens)
    return None if found is None or found[1] > 1 else found[0]


def on_one_device(cost: HardwareCost, needs: MethodNeeds, contexts: Any) -> tuple[PassSeconds, Any] | None:
    """Costs of plain decoding on one device instead of `tensor_parallel`, and the share of its memory that is needed [-].

    The share is of sequences of `contexts` positions (a number or an array). None if the times or the memory are not known.
    """
    if cost.split == 1 or cost.kind == "engine":
        return None
    try:
        single = cost.of("target", 1)
    except ParameterError:
        return None  # the profile has only split layers
    of = _device(cost, single)
    if single is None or of is None:
        return None
    room = cost_models.memory(single.shape, of.memory_bytes, context=contexts, batch=needs.sequences)
    alone = PassSeconds(
        {"target": WithEngineOverhead(single, cost.step_s)}, prompt=cost.prompt, batch=needs.full_batch,
        others_position=needs.others_position, middle=needs.tokens // 2, busy=cost.busy,
    )  # fmt: skip
    return alone, room.share


def _missing(cost: HardwareCost, models: Mapping[str, Hardware], needs: MethodNeeds) -> tuple[str, ...]:
    """Parts of the target's passes, and steps of the smaller models, that are not measured."""
    unheard = set() if needs.several_units else {"send"}  # one unit sends nothing
    found = [*_parts_missing(models["target"])]
    found += ["draft_step"] * any("step" in _parts_missing(of) for role, of in models.items() if role != "target")
    unheard |= {name for name in ("step", "draft_step") if getattr(cost, f"{name}_s")}
    return tuple(part for part in found if part not in unheard)


def _parts_missing(of: Hardware) -> tuple[str, ...]:
    if isinstance(of, ProfileCosts):
        return of.missing
    return () if _law_of(of) is not None else ("step",)


def _law_of(hardware: Hardware | None) -> StepLaw | None:
    """The step law of a cost model of the target or of a draft; None for others."""
    from model.engines.law_costs import LawDraft, LawTarget

    return hardware.law if isinstance(hardware, LawTarget | LawDraft) else None


def _law(name: str) -> StepLaw:
    from model.engines import step_law

    return step_law.load(name)


def _memory(
    cost: HardwareCost, models: Mapping[str, Hardware], needs: MethodNeeds, draft_split: int
) -> DeviceMemory | None:  # fmt: skip
    """Memory for weights and cache on a device, an error if it is too large; None if the device's memory is not known."""
    found, of = _room(cost, models, cost.prompt + needs.tokens, needs, draft_split), _device(cost, models["target"])
    if found is not None and of is not None:
        cost_models.refuse_too_large(found, of.name)
    return found


def _room(
    cost: HardwareCost, models: Mapping[str, Hardware], context: Any, needs: MethodNeeds, draft_split: int
) -> DeviceMemory | None:
    """`_memory` for sequences of `context` positions (a number or an array), of any size."""
    target = models["target"]
    of = _device(cost, target)
    if of is None:
        return None
    others = () if needs.separate_units else tuple(role for role in models if role != "target")
    also = tuple(models[role].shape.shard(draft_split if role == "draft" else 1) for role in others)
    return cost_models.memory(
        target.shape, of.memory_bytes, context=context, batch=needs.sequences, tensor_parallel=cost.split, also=also,
        draft_budget=tuple(map(dict(needs.draft_budgets).get, others)),
    )  # fmt: skip


def memory_shares(cost: HardwareCost, priced: PointCosts, contexts: NDArray[np.int64]) -> Any:
    """Share of the memory of a device that is needed with sequences of each number of positions [-].

    None if the memory is not known; `priced` are the costs of any prompt.
    """
    served = priced.cost.hardware_models.items()
    models = {role: each.kernels if isinstance(each, WithEngineOverhead) else each for role, each in served}
    found = _room(cost, models, contexts, priced.needs, priced.draft_tensor_parallel)
    return None if found is None else found.share


def _device(cost: HardwareCost, target: Hardware | None) -> devices.Device | None:
    """Device that the target runs on, if its memory is known."""
    if cost.kind == "roofline":
        return devices.device(str(cost.device))
    if (law := _law_of(target)) is not None:
        return None if law.kernels is None else devices.device(law.kernels.gpu)
    return devices.DEVICES.get(target.profile.device) if isinstance(target, ProfileCosts) else None
