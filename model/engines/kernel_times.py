"""Seconds of an engine's kernels from what is known of its model and GPU: a profile, a profile of operations, or a roofline."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from model.architectures import published_shapes
from model.architectures.layer_parts import quantised
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.engines.cells import Floats
from model.engines.step_terms import StepShape
from model.hardware import cost_models, devices, memory_limit, profile_files
from model.hardware.cost_models import Hardware, pass_time
from model.hardware.profile_costs import ProfileCosts, shape_of
from model.hardware.roofline import Efficiency, Roofline

USUAL_CONTEXT = 1000
"""Cached positions per sequence that are assumed where a table of cells does not say them."""
SOURCES = ("profile", "operations", "roofline")


@dataclass(frozen=True)
class KernelSource:
    """Names that kernels are looked up by.

    Parameters
    ----------
    model, gpu, tensor_parallel, dtype
        As in [cost] of a scenario: shape or path of a config.json, device or path of a device file; dtype None: the profile's, or
        bfloat16.
    draft
        Shape of the draft, whose kernels are then part of the law; None: each draft pass has one fitted time.
    source
        `profile`, `operations` or `roofline`: the first of them that covers the model on the GPU, unless it is given.
    weights
        Format of the quantised weights of the model's layers (`model.architectures.layer_parts.quantised`), or `none`; only a
        roofline has times of them. None: as published (float8 of DeepSeek), else as `dtype`.
    draft_context_budget
        Largest number of cached positions of each sequence that a pass of the draft reads (`model.methods.draft_model`); None: all.

    Draft heads and modules for further tokens are split over the same devices as the model, whose states they read, as engines do;
    other drafts are on one device.
    """

    model: str
    gpu: str
    tensor_parallel: int = 1
    dtype: str | None = None
    draft: str | None = None
    source: str | None = None
    weights: str | None = None
    draft_context_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "gpu", "draft", "dtype", "source", "weights"):
            value = getattr(self, name)
            if not (value is None and name not in ("model", "gpu")) and not (isinstance(value, str) and value):
                raise ParameterError(f"{name} must be a name, got {checks.shown(value)}")
        checks.whole("tensor_parallel", self.tensor_parallel, 1, 1024)
        if self.source is not None:
            checks.one_of("source", self.source, SOURCES)
        published_shapes.check_dtype(self.dtype)
        if self.draft_context_budget is not None:
            checks.whole("draft_context_budget", self.draft_context_budget, 1, checks.MAX_TOKENS)
            if self.draft is None:
                raise ParameterError(f"draft_context_budget is of the passes of a draft, got {self.draft_context_budget}; name it")
        if self.weights not in (None, "none"):
            quantised(str(self.weights))

    @property
    def target(self) -> Shape:
        """Shape of the model, with its weights as they are stored."""
        found = published_shapes.whole_model(self.model, self.dtype, key="model")
        if self.weights is None:
            return found
        return replace(found, weights=None if self.weights == "none" else quantised(self.weights))

    @property
    def drafting(self) -> tuple[Shape, int] | None:
        """Shape of the draft and the number of devices that it is split over; None if no draft is named."""
        if self.draft is None:
            return None
        found = published_shapes.named_shape(self.draft, self.dtype, key="draft")
        published_shapes.check_head(self.draft, found, self.target, self.model, key="draft")
        return found, 1 if found.draft is None else self.tensor_parallel

    def read_by_draft(self, context: ArrayLike) -> Floats:
        """Cached positions of a sequence that a pass of the draft reads.

        >>> source = KernelSource("llama-3.1-8b", "h100", draft="llama-3.2-1b", draft_context_budget=512)
        >>> source.read_by_draft([100, 32_000]).tolist()
        [100, 512]
        """
        most = self.draft_context_budget
        return np.asarray(context) if most is None else np.minimum(context, most)


@functools.lru_cache(maxsize=64)
def hardware(source: KernelSource) -> tuple[Hardware, Hardware | None]:
    """Cost models of the target and of the draft (None: no draft is named)."""
    device, drafting = devices.device(source.gpu), source.drafting
    target = _covering(source, source.model, source.target, device, source.tensor_parallel)
    if source.draft is None or drafting is None:
        return target, None
    return target, _covering(source, source.draft, drafting[0], device, drafting[1])


def _covering(
    source: KernelSource, name: str, shape: Shape, device: devices.Device, tensor_parallel: int
) -> Hardware:  # fmt: skip
    """The first kind of cost model that covers this shape on this device, or the kind that is asked for."""
    wanted, refused = SOURCES if source.source is None else (source.source,), ""
    for kind in wanted:
        try:
            if kind == "roofline":
                return Roofline.on_device(shape, device, tensor_parallel=tensor_parallel)
            return _of_profile(kind, name, shape, device.name, source.dtype, tensor_parallel)
        except ParameterError as error:
            refused = str(error)
    raise ParameterError(refused)


def refuse_too_large(source: KernelSource) -> None:
    """Raise ParameterError if the models and the cache of one sequence exceed the memory of a device."""
    device, drafting = devices.device(source.gpu), source.drafting
    room = memory_limit.memory_of(
        source.target, device, context=USUAL_CONTEXT, sequences=1, tensor_parallel=source.tensor_parallel,
        draft=None if drafting is None else drafting[0], draft_budget=source.draft_context_budget,
    )  # fmt: skip
    cost_models.refuse_too_large(room, device.name)


def _of_profile(kind: str, name: str, shape: Shape, gpu: str, dtype: str | None, tensor_parallel: int) -> ProfileCosts:
    path = f"{gpu}-{published_shapes.label(name) if kind == 'profile' else 'operations'}"
    if path not in profile_files.names():
        raise ParameterError(f"no profile {path} is bundled; use --kernels roofline")
    found = profile_files.load(path)
    if shape.weights is not None:
        raise ParameterError(f"{path} has no times of weights in {shape.weights.name}; use --kernels roofline, or --weights none")
    if dtype is not None and found.dtype != dtype:
        raise ParameterError(f"dtype must be {found.dtype}, that of {path}, got {dtype}; use --kernels roofline")
    if kind == "operations":
        from model.hardware import composed_layers

        found = composed_layers.layer(
            found, replace(shape, dtype=found.dtype), model=published_shapes.label(name), tensor_parallel=tensor_parallel
        )
    elif replace(shape, dtype=found.dtype) != shape_of(found):
        raise ParameterError(f"{path} is of another shape than {name}; use --kernels operations or roofline")
    return ProfileCosts(found, tensor_parallel=tensor_parallel)


def step_shape(
    source: KernelSource | None, sequences: Floats, draft_length: Floats, draft_passes: Floats, context: Floats
) -> StepShape:
    """Shape of steps, with the kernels' seconds and the bound of the memory where a source names the kernels.

    Unknown contexts (nan) are taken as `USUAL_CONTEXT`.
    """
    known = np.where(np.isnan(context), USUAL_CONTEXT, context)
    if source is None:
        return StepShape(sequences, draft_length, draft_passes, known)
    arrays = np.broadcast_arrays(np.maximum(np.rint(sequences), 1), np.rint(known), draft_length + 1)
    found = _kernel_seconds(source, *(tuple(each.ravel().astype(int).tolist()) for each in arrays))
    kernels, drafting, bound = (None if each is None else each.reshape(arrays[0].shape) for each in found)
    return StepShape(sequences, draft_length, draft_passes, known, kernels, drafting, bound)


@functools.lru_cache(maxsize=4096)  # draws of a law differ in coefficients alone: all of them ask for the same kernels
def _kernel_seconds(
    source: KernelSource, batches: tuple[int, ...], contexts: tuple[int, ...], widths: tuple[int, ...]
) -> tuple[Floats, Floats | None, Floats]:
    """Seconds of the target's passes and of the draft's (None: no draft is named), and the bound of the memory; 1-D arrays [s]."""
    target, draft = hardware(source)
    batch, where, width = (np.array(each, dtype=int) for each in (batches, contexts, widths))
    drafting = None if draft is None else _fixed(pass_time(draft, 1, source.read_by_draft(where), batch).seconds, batch.size)
    kernels, bound = pass_time(target, width, where, batch).seconds, _bound(source, batch, where, width - 1)
    return _fixed(kernels, batch.size), drafting, _fixed(bound, batch.size)


@functools.lru_cache(maxsize=65_536)
def mixed_seconds(
    source: KernelSource, sequences: int, width: int, context: int, prompt_tokens: int = 0, prompt_context: int = 0
) -> tuple[float, float]:
    """Seconds of the target's kernels in a pass over `width` tokens of each of `sequences` sequences, after `context` positions,
    and over `prompt_tokens` tokens of prompts, after `prompt_context` positions; and of the draft's pass, 0 if none is named [s].

    The prompts add what a pass takes longer with their tokens in it, and their attention. Alone each part is a pass of its own.

    >>> at = KernelSource("llama-3.1-8b", "h100")
    >>> decoding, prompts, mixed = (mixed_seconds(at, *each)[0] for each in ((64, 1, 1000), (0, 1, 0, 512), (64, 1, 1000, 512)))
    >>> max(decoding, prompts) < mixed < decoding + prompts
    True
    """
    target, draft = hardware(source)
    drafting = 0.0
    if draft is not None and sequences:
        drafting = float(pass_time(draft, 1, source.read_by_draft(context), sequences).seconds)

    def seconds(tokens: int, before: int, batch: int = 1, heads: int | None = None) -> float:
        return float(pass_time(target, tokens, before, batch, heads=heads).seconds)

    if not prompt_tokens:
        return seconds(width, context, sequences), drafting
    if not sequences:
        return seconds(prompt_tokens, prompt_context, heads=1), drafting
    read = sequences * width
    more = seconds(read + prompt_tokens, 0, heads=0) - seconds(read, 0, heads=0)
    if prompt_context:
        more += seconds(prompt_tokens, prompt_context, heads=0) - seconds(prompt_tokens, 0, heads=0)
    return seconds(width, context, sequences) + max(more, 0.0), drafting


def _fixed(values: Floats, size: int) -> Floats:
    """Values as one array of this size that cannot be written to, because callers share it."""
    return np.broadcast_to(values, size)


def _bound(source: KernelSource, batch: Floats, context: Floats, draft_length: Floats) -> Floats:
    """Seconds of a pass at the peaks of the device: nothing is faster [s]."""
    ideal = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    found = hardware(source)[0]
    roofline = Roofline.on_device(found.shape, devices.device(source.gpu), tensor_parallel=source.tensor_parallel)
    peak = replace(roofline, efficiency=ideal, latency=0.0)
    return pass_time(peak, (draft_length + 1).astype(int), 0 * context, batch).seconds


@functools.lru_cache(maxsize=65_536)
def least_seconds(source: KernelSource, tokens: int) -> float:
    """Seconds of a pass over `tokens` tokens at the peaks of the device, without attention to cached positions [s]."""
    return float(_bound(source, np.array([1.0]), np.array([0.0]), np.array([tokens - 1.0]))[0])


def stated_error(source: KernelSource, shape: StepShape) -> float:
    """Median relative error that the kernel model states for these steps [-]."""
    target, _ = hardware(source)
    batch, where = np.maximum(np.rint(shape.sequences), 1).astype(int), np.rint(shape.context).astype(int)
    return float(np.median(pass_time(target, (shape.draft_length + 1).astype(int), where, batch).error))


def reference_seconds(source: KernelSource) -> float:
    """Seconds of the kernels of a plain step of one sequence: what priors in seconds are relative to [s]."""
    return float(pass_time(hardware(source)[0], 1, USUAL_CONTEXT, 1).seconds)


def provenance(source: KernelSource) -> str:
    """Where the kernels' seconds come from, as printed text."""
    return hardware(source)[0].provenance
