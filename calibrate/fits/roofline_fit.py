"""Fit of the efficiencies of `model.hardware.roofline` to measured layers, with the errors on held-out models and GPUs.

Products and elementwise kernels of a layer are fitted to Vidur's layers of four models on three GPUs, and to those of one model on
a fourth; attention is fitted to AIConfigurator's tables of one new token per sequence. Both fits are least squares on logarithms: a
layer over one token has the same weight as one over a thousand, and a robust loss limits outliers (`SOFT`). Passes of many tokens
are measured more densely than others, so the weight of a time is its spacing on the logarithmic axis of tokens. Each efficiency
stays within `BOUNDS`, which are plausible for GPUs.

Attention times are those of a pass, whose keys and values come from memory: a repeated measurement that found them in the cache is
replaced by the time of reading them from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from calibrate.importers import aiconfigurator, bundled_profiles, llmservingsim, vidur
from model.architectures import published_shapes
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.interpolation import Floats
from model.hardware.profile import Profile
from model.hardware.profile_costs import PEAKS
from model.hardware.roofline import Efficiency, Roofline

MODELS = {**bundled_profiles.VIDUR, "phi-2": "microsoft/phi-2"}
"""Models with measured layers, and their folders."""
GPUS = tuple(bundled_profiles.NETWORKS)
"""GPUs of these measurements."""
MEMORY_BOUND_TOKENS, COMPUTE_BOUND_TOKENS = 64, 256
"""Layers are memory-bound up to the first number of tokens, and compute-bound beyond the second, on all of these GPUs."""
SPREAD = {"memory": 0.1, "compute": 0.15, "elementwise": 0.5, "launch": 0.4}
"""Standard deviations of the logarithms of efficiencies between fits to single GPUs [-]."""
NOISE = 0.05
"""Standard deviation of the logarithms of layer times of one model around the fit to its GPU [-]."""
CLOCKS = 1.1
"""Largest ratio by which a time may beat the peaks: cards run above their rated clock [-]."""
SLOWEST, SLOW_LAUNCH = 0.01, 1e-4
"""Smallest plausible share of the peaks [-], and largest plausible launch time [s]: slower times are in another unit."""
ADAPTED_ERRORS = {"error": 0.05, "compute_error": 0.11}
"""Relative errors after one memory-bound, and one compute-bound, layer of a GPU was measured [-]: at least as large as on any
held-out GPU (`errors_with_one_measured`)."""
TABLES = (
    ("h100", "h100_sxm", "trtllm/1.3.0rc20"), ("h100", "h100_sxm", "vllm/0.14.0"), ("h100", "h100_sxm", "vllm/0.19.0"),
    ("a100", "a100_sxm", "vllm/0.14.0"), ("l40s", "l40s", "trtllm/1.3.0rc20"), ("l40s", "l40s", "vllm/0.14.0"),
)  # fmt: skip
"""GPU, folder and engine of the tables of attention, without three impossible ones (`calibrate.importers.aiconfigurator`)."""
BOUNDS = {
    "memory": (0.4, 1.0), "compute": (0.3, 0.95), "elementwise": (0.3, 4.0), "launch": (0.5e-6, 60e-6),
    "cache": (0.3, 4.0), "attention_launch": (0.5e-6, 60e-6),
}  # fmt: skip
"""Bounds of each efficiency."""
START = {"memory": 0.8, "compute": 0.7, "elementwise": 0.8, "launch": 5e-6, "cache": 0.8, "attention_launch": 8e-6}
OF_LAYERS, OF_ATTENTION = ("memory", "compute", "elementwise", "launch"), ("cache", "attention_launch")
SOFT = 0.05
"""Scale of the robust loss: larger errors have less weight than in least squares [-]."""
UNITS = dict.fromkeys(BOUNDS, 1.0) | {"launch": 1e-6, "attention_launch": 1e-6}
"""Units that make each efficiency about 1 in the search."""


@dataclass(frozen=True, eq=False)
class MeasuredLayers:
    """Measured layers of a model on a GPU, without attention: tokens of the pass and seconds, both of shape (passes,)."""

    gpu: str
    model: str
    tokens: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        if self.tokens.shape != self.seconds.shape or self.tokens.size < 3:
            raise ParameterError(
                f"layers of {self.model} on {self.gpu} must be at least 3 with a time each, got {self.tokens.size} tokens and"
                f" {self.seconds.size} times; measure more widths"
            )

    @cached_property
    def roofline(self) -> Roofline:
        """Roofline of the model on the GPU."""
        return roofline_on(self.gpu, replace(published_shapes.preset(self.model), weights=None))  # measured in the profile's type

    @cached_property
    def weights(self) -> Floats:
        """Spacing of the passes on the logarithmic axis of tokens, shape (passes,)."""
        return np.asarray(np.gradient(np.log(self.tokens)))

    def predicted(self, efficiency: Efficiency) -> Floats:
        """Predicted times with these efficiencies [s]."""
        return replace(self.roofline, efficiency=efficiency).gemms(self.tokens)

    def errors(self, efficiency: Efficiency) -> Floats:
        """Relative errors of the predicted times [-]."""
        return self.predicted(efficiency) / self.seconds - 1


class MeasuredAttention(NamedTuple):
    """A table of attention of one new token per sequence, with rows grouped by heads."""

    gpu: str
    engine: str
    groups: tuple[tuple[Roofline, Floats, Floats, Floats], ...]
    """Per group a roofline with its heads, and contexts, batches and times [s]."""

    def predicted(self, efficiency: Efficiency) -> Floats:
        """Predicted times with these efficiencies, group by group [s]."""
        times = [replace(line, efficiency=efficiency).attention(1, context, batch) for line, context, batch, _ in self.groups]
        return np.concatenate(times)

    @property
    def shared(self) -> Floats:
        """Heads per KV head, group by group."""
        each = [np.full(group[3].size, group[0].shape.heads / group[0].shape.kv_heads) for group in self.groups]
        return np.concatenate(each)

    @property
    def seconds(self) -> Floats:
        """Measured times, group by group [s]."""
        return np.concatenate([group[3] for group in self.groups])

    def errors(self, efficiency: Efficiency) -> Floats:
        """Relative errors of the predicted times [-]."""
        return self.predicted(efficiency) / self.seconds - 1


def roofline_on(gpu: str, shape: Shape) -> Roofline:
    """Roofline of a model on a GPU, from the vendor's peaks."""
    return Roofline.on_device(shape, devices.device(gpu))


# --- Measurements ---


def layers_of(made: Profile) -> MeasuredLayers:
    """Layers of a profile of a whole model."""
    rows = made.rows("dense")
    return MeasuredLayers(made.device, made.model, rows["tokens"].to_numpy().astype(np.float64), rows["time_s"].to_numpy())


def layers(data: str | Path) -> tuple[MeasuredLayers, ...]:
    """Read the measured layers of all GPUs, from a folder that holds `gpu`."""
    root = bundled_profiles.folder_of(data)
    tables = root / "gpu/vidur/compute"
    found = [vidur.read(tables / gpu / path, model=name, gpu=gpu) for gpu in GPUS for name, path in MODELS.items()]
    found.append(llmservingsim.read(root / bundled_profiles.RTX_4090, model="llama-3.1-8b", gpu="rtx-4090"))
    return tuple(layers_of(each) for each in found)


def attention_of(operations: Profile) -> MeasuredAttention:
    """Attention of a profile of operations, at the points that models need (`bundled_profiles.trimmed`)."""
    rows = bundled_profiles.trimmed(operations).rows("decode")
    groups = []
    for (heads, kv_heads, head_dim), each in rows.group_by("heads", "kv_heads", "head_dim", maintain_order=True):
        shape = Shape(1, int(heads) * int(head_dim), int(heads), int(kv_heads), int(head_dim), 1, False, 1, True)
        context, batch, seconds = (each[name].to_numpy().astype(np.float64) for name in ("context", "batch", "time_s"))
        line = roofline_on(operations.device, shape)
        least = replace(line, efficiency=PEAKS).attention(1, context, batch)
        groups.append((line, context, batch, np.asarray(np.maximum(seconds, least))))
    return MeasuredAttention(operations.device, operations.facts["decode_engine"], tuple(groups))


def attention(data: str | Path) -> tuple[MeasuredAttention, ...]:
    """Read AIConfigurator's attention tables, from a folder that holds `gpu`."""
    root = bundled_profiles.folder_of(data) / "gpu/aiconfigurator"
    return tuple(attention_of(aiconfigurator.read(root / folder, gpu=gpu, engine=engine)) for gpu, folder, engine in TABLES)


# --- Fits ---


def fit_layers(measured: Sequence[MeasuredLayers], start: Efficiency | None = None) -> Efficiency:
    """Fit the efficiencies of products and elementwise kernels to measured layers."""
    if not measured:
        raise ParameterError("layers must be of at least one model on one GPU, got none")
    logs = [np.log(each.seconds) for each in measured]
    shares = [np.sqrt(each.weights) for each in measured]

    def missed(efficiency: Efficiency) -> Floats:
        predicted = [np.log(each.predicted(efficiency)) for each in measured]
        return np.concatenate([share * (one - log) for one, log, share in zip(predicted, logs, shares, strict=True)])

    return _search(OF_LAYERS, missed, start or Efficiency())


def fit_attention(measured: Sequence[MeasuredAttention], start: Efficiency | None = None) -> Efficiency:
    """Fit the efficiencies of attention to its tables; the efficiency of arithmetic is that of `start`."""
    if not measured:
        raise ParameterError("attention must be of at least one table, got none")
    logs = [np.log(each.seconds) for each in measured]

    def missed(efficiency: Efficiency) -> Floats:
        return np.concatenate([np.log(each.predicted(efficiency)) - log for each, log in zip(measured, logs, strict=True)])

    return _search(OF_ATTENTION, missed, start or Efficiency())


def _search(names: Sequence[str], missed: Callable[[Efficiency], Floats], start: Efficiency) -> Efficiency:
    """Search the efficiencies of these names, within their bounds, for the least error."""
    from scipy.optimize import least_squares

    units = np.array([UNITS[name] for name in names])

    def of(values: ArrayLike) -> Efficiency:
        return replace(start, **dict(zip(names, map(float, np.asarray(values) * units), strict=True)))

    low, high = (np.array([BOUNDS[name][side] for name in names]) / units for side in (0, 1))
    begin = np.array([START[name] for name in names]) / units

    def residuals(values: ArrayLike) -> Floats:
        return missed(of(values))

    found = least_squares(residuals, begin, bounds=(low, high), loss="soft_l1", f_scale=SOFT, xtol=1e-10)
    return of(found.x)


class UnseenModelErrors(NamedTuple):
    """Relative errors of layers of a held-out model or GPU [-], and their tokens, both of shape (passes,)."""

    gpu: str
    model: str
    tokens: Floats
    error: Floats


def unseen_models(measured: Sequence[MeasuredLayers]) -> list[UnseenModelErrors]:
    """Errors of each model on each GPU, predicted from a fit to the other models on the same GPU."""
    return _left_out(measured, lambda one, other: one.gpu == other.gpu and one.model != other.model)


def unseen_gpus(measured: Sequence[MeasuredLayers]) -> list[UnseenModelErrors]:
    """Errors of each model on each GPU, predicted from a fit to all models on the other GPUs."""
    return _left_out(measured, lambda one, other: one.gpu != other.gpu)


def _left_out(
    measured: Sequence[MeasuredLayers], seen: Callable[[MeasuredLayers, MeasuredLayers], bool]
) -> list[UnseenModelErrors]:
    fits: dict[tuple[int, ...], Efficiency] = {}
    found = []
    for one in measured:
        kept = tuple(index for index, other in enumerate(measured) if seen(one, other))
        if not kept:  # the only model on its GPU
            continue
        if kept not in fits:
            fits[kept] = fit_layers([measured[index] for index in kept])
        found.append(UnseenModelErrors(one.gpu, one.model, one.tokens, one.errors(fits[kept])))
    return found


def pooled(left_out: Iterable[UnseenModelErrors], most: float = np.inf, least: float = 0) -> dict[str, float]:
    """Median absolute error on each GPU over all its models, for `least` to `most` tokens [-]."""
    by_gpu: dict[str, list[Floats]] = {}
    for each in left_out:
        by_gpu.setdefault(each.gpu, []).append(np.abs(each.error[(each.tokens >= least) & (each.tokens <= most)]))
    return {gpu: float(np.median(np.concatenate(errors))) for gpu, errors in by_gpu.items()}


def fit(measured: Sequence[MeasuredLayers], tables: Sequence[MeasuredAttention]) -> Efficiency:
    """Fit all efficiencies. Their errors are the largest over held-out GPUs, all models pooled, up to
    `MEMORY_BOUND_TOKENS` and beyond `COMPUTE_BOUND_TOKENS`."""
    of_layers = fit_layers(measured)
    errors = {"error": of_layers.error, "compute_error": of_layers.compute_error}
    if len({each.gpu for each in measured}) > 1:
        unseen = unseen_gpus(measured)
        few, many = pooled(unseen, MEMORY_BOUND_TOKENS), pooled(unseen, least=COMPUTE_BOUND_TOKENS + 1)
        errors = {"error": max(few.values()), "compute_error": max(many.values())}
    return replace(fit_attention(tables, of_layers), **errors)


# --- A few measured times of a new GPU ---


class Cell(NamedTuple):
    """One measured time of a GPU [s]: a layer over `tokens` tokens without its attention, or a product with as many rows."""

    line: Roofline
    tokens: float
    seconds: float
    product: tuple[int, int] | None = None
    """Outputs n and inputs k of a product; None for a layer."""

    def predicted(self, efficiency: Efficiency) -> float:
        """Predicted time with these efficiencies [s]."""
        line = replace(self.line, efficiency=efficiency)
        return float(line.gemms(self.tokens) if self.product is None else line.product(self.tokens, *self.product))

    def limit(self, efficiency: Efficiency) -> str:
        """Return the error that this time reduces: `error` if it is memory-bound, `compute_error` if it is compute-bound."""
        line = replace(self.line, efficiency=efficiency)
        return "error" if line.arithmetic(self.tokens, 1.0) < 0.5 else "compute_error"


KEYS = {
    "memory_efficiency": "memory", "compute_efficiency": "compute", "elementwise_efficiency": "elementwise", "launch_s": "launch",
    "memory_error": "error", "compute_error": "compute_error",
}  # fmt: skip
"""Keys of a scenario's costs of kind `roofline`, with the field of `Efficiency` of each."""


def layer_cell(text: str) -> tuple[str, Cell]:
    """Parse a GPU and a measured layer: GPU,MODEL,TOKENS,SECONDS."""
    gpu, model, tokens, seconds = _parts(text, "layer", ("GPU", "MODEL", "TOKENS", "SECONDS"))
    return gpu, Cell(roofline_on(gpu, published_shapes.preset(model)), _number("TOKENS", tokens, 1), _number("SECONDS", seconds, 0))


def product_cell(text: str) -> tuple[str, Cell]:
    """Parse a GPU and a measured product of 16-bit matrices: GPU,M,N,K,SECONDS."""
    gpu, *sizes, seconds = _parts(text, "product", ("GPU", "M", "N", "K", "SECONDS"))
    m, n, k = (_number(name, each, 1) for name, each in zip("MNK", sizes, strict=True))
    shape = Shape(1, int(k), 1, 1, 1, 1, False, 1, True)
    return gpu, Cell(roofline_on(gpu, shape), m, _number("SECONDS", seconds, 0), (int(n), int(k)))


def _parts(text: str, what: str, names: Sequence[str]) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if len(found) != len(names):
        raise ParameterError(f"{what} must be {','.join(names)}, got {checks.shown(text)}")
    return found


def _number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ParameterError(f"{name} must be a number, got {checks.shown(text)}") from None
    checks.number(name, value, least)
    return value


def adapt_efficiency(cells: Sequence[Cell], prior: Efficiency | None = None) -> Efficiency:
    """Maximum a posteriori efficiencies of a GPU, from a `prior` of other GPUs and a few measured times.

    Logarithms of efficiencies are distributed around the prior like fits to single GPUs (`SPREAD`), logarithms of times around
    their prediction (`NOISE`); least squares. Efficiencies that no measured time depends on stay near the prior, with its error.
    """
    from scipy.optimize import least_squares

    usual = prior or Efficiency()
    if not cells:
        raise ParameterError("layers and products must be at least one in all, got none; give a measured time of the GPU")
    for cell in cells:
        least = cell.predicted(PEAKS)
        if not least / CLOCKS <= cell.seconds <= least / SLOWEST + SLOW_LAUNCH:
            raise ParameterError(
                f"seconds must be between {least / CLOCKS:.3g}, what the peaks of the GPU allow, and"
                f" {least / SLOWEST + SLOW_LAUNCH:.3g}, got {cell.seconds:g}; give one layer or product, in seconds"
            )
    names, widths = list(SPREAD), np.array(list(SPREAD.values()))

    def of(values: ArrayLike) -> Efficiency:
        steps = zip(names, np.asarray(values) * widths, strict=True)
        return replace(usual, **{name: getattr(usual, name) * float(np.exp(step)) for name, step in steps})

    def missed(values: ArrayLike) -> Floats:
        trial = of(values)
        return np.concatenate([np.asarray(values), [np.log(cell.predicted(trial) / cell.seconds) / NOISE for cell in cells]])

    found = of(least_squares(missed, np.zeros(len(names))).x)
    limits = {cell.limit(found) for cell in cells}
    return replace(found, **{each: min(ADAPTED_ERRORS[each], getattr(usual, each)) for each in limits})


def errors_with_one_measured(measured: Sequence[MeasuredLayers], tokens: Sequence[float]) -> list[UnseenModelErrors]:
    """Errors of each model on each GPU, predicted from the other GPUs and from layers of one other model on the same GPU.

    The layers are those nearest to `tokens`. If a GPU has only one model, they are its own and are left out of the errors.
    """
    found = []
    for gpu in dict.fromkeys(each.gpu for each in measured):
        prior = fit_layers([each for each in measured if each.gpu != gpu])
        models = [each for each in measured if each.gpu == gpu]
        for source in models:
            indices = [int(np.argmin(np.abs(source.tokens - each))) for each in tokens]
            cells = [Cell(source.roofline, float(source.tokens[at]), float(source.seconds[at])) for at in indices]
            efficiency = adapt_efficiency(cells, prior)
            for one in models:
                kept = np.ones(one.tokens.size, dtype=bool)
                if one is source:
                    if len(models) > 1:
                        continue
                    kept[indices] = False
                found.append(UnseenModelErrors(gpu, one.model, one.tokens[kept], one.errors(efficiency)[kept]))
    return found
