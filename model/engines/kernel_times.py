"""Seconds of an engine's kernels from what is known of its model and GPU: a profile, a profile of operations, or a roofline."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from model.architectures import transformer
from model.base import checks
from model.base.checks import ParameterError
from model.engines.cells import Floats
from model.engines.step_terms import StepShape
from model.hardware import devices, profile_files
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
    """

    model: str
    gpu: str
    tensor_parallel: int = 1
    dtype: str | None = None
    draft: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        for name in ("model", "gpu", "draft", "dtype", "source"):
            value = getattr(self, name)
            if not (value is None and name not in ("model", "gpu")) and not (isinstance(value, str) and value):
                raise ParameterError(f"{name} must be a name, got {checks.shown(value)}")
        checks.whole("tensor_parallel", self.tensor_parallel, 1, 1024)
        if self.source is not None:
            checks.one_of("source", self.source, SOURCES)


@functools.lru_cache(maxsize=64)
def hardware(source: KernelSource) -> tuple[Hardware, Hardware | None]:
    """Cost models of the target and of the draft (None: no draft is named)."""
    shape = transformer.named_shape(source.model, source.dtype)
    device = devices.device(source.gpu)
    target = _covering(source, source.model, shape, device, source.tensor_parallel)
    if source.draft is None:
        return target, None
    return target, _covering(source, source.draft, transformer.named_shape(source.draft, source.dtype), device, 1)


def _covering(
    source: KernelSource, name: str, shape: transformer.Shape, device: devices.Device, tensor_parallel: int
) -> Hardware:  # fmt: skip
    """The first kind of cost model that covers this shape on this device, or the kind that is asked for."""
    wanted, refused = SOURCES if source.source is None else (source.source,), ""
    for kind in wanted:
        try:
            if kind == "roofline":
                return _roofline(shape, device, tensor_parallel)
            return _of_profile(kind, name, shape, device.name, source.dtype, tensor_parallel)
        except ParameterError as error:
            refused = str(error)
    raise ParameterError(refused)


def _of_profile(kind: str, name: str, shape: transformer.Shape, gpu: str, dtype: str | None, tensor_parallel: int) -> ProfileCosts:
    path = f"{gpu}-{transformer.label(name) if kind == 'profile' else 'operations'}"
    if path not in profile_files.names():
        raise ParameterError(f"no profile {path} is bundled; use source 'roofline'")
    found = profile_files.load(path)
    if dtype is not None and found.dtype != dtype:
        raise ParameterError(f"dtype must be {found.dtype}, that of {path}, got {dtype}; use source 'roofline'")
    if kind == "operations":
        from model.hardware import composed_layers

        found = composed_layers.layer(
            found, replace(shape, dtype=found.dtype), model=transformer.label(name), tensor_parallel=tensor_parallel
        )
    elif replace(shape, dtype=found.dtype) != shape_of(found):
        raise ParameterError(f"{path} is of another shape than {name}; use source 'operations' or 'roofline'")
    return ProfileCosts(found, tensor_parallel=tensor_parallel)


def _roofline(shape: transformer.Shape, device: devices.Device, tensor_parallel: int) -> Roofline:
    of = f"assumed efficiencies of the {'published peaks' if device.published else 'peaks given'} of {device.name}"
    return Roofline(
        shape,
        device.bandwidth,
        device.rate(shape.dtype),
        Efficiency(),
        tensor_parallel,
        device.link or device.host_link,
        provenance=of,
    )


def step_shape(
    source: KernelSource | None, sequences: Floats, draft_length: Floats, draft_passes: Floats, context: Floats
) -> StepShape:
    """Shape of steps, with the kernels' seconds and the bound of the memory where a source names the kernels.

    Unknown contexts (nan) are taken as `USUAL_CONTEXT`.
    """
    known = np.where(np.isnan(context), USUAL_CONTEXT, context)
    if source is None:
        return StepShape(sequences, draft_length, draft_passes, known)
    target, draft = hardware(source)
    batch, where = np.maximum(np.rint(sequences), 1).astype(int), np.rint(known).astype(int)
    seconds = pass_time(target, (draft_length + 1).astype(int), where, batch).seconds
    drafting = None if draft is None else pass_time(draft, 1, where, batch).seconds
    return StepShape(sequences, draft_length, draft_passes, known, seconds, drafting, _bound(source, batch, where, draft_length))


def _bound(source: KernelSource, batch: Floats, context: Floats, draft_length: Floats) -> Floats:
    """Seconds of a pass at the peaks of the device: nothing is faster [s]."""
    ideal = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    found = hardware(source)[0]
    roofline = _roofline(found.shape, devices.device(source.gpu), source.tensor_parallel)
    peak = replace(roofline, efficiency=ideal, latency=0.0)
    return pass_time(peak, (draft_length + 1).astype(int), 0 * context, batch).seconds


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
