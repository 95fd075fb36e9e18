"""The efficiencies of `model.hardware.roofline`, fitted to measured layers, and how well they foretell models and GPUs left out of
the fit.

A layer's products and small kernels are fitted to Vidur's layers of four models on three GPUs, and to those of one on a fourth;
attention to AIConfigurator's tables of one new token a text. Both by least squares on logarithms: a layer of one token counts as
much as one of a thousand, and what lies far off counts less than its square (`SOFT`). Passes of many tokens are measured far more
densely than others, so a time weighs what it stands for on the logarithmic axis of tokens. Each efficiency is held within `BOUNDS`:
what a GPU may plausibly reach.

Attention counts as in a pass, in which keys and values come from memory: a repeated measurement that found them in the cache is
taken for the time that reading them takes.
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
from model.architectures import transformer
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.interpolation import Floats
from model.hardware.profile import Profile
from model.hardware.profile_costs import PEAKS
from model.hardware.roofline import Efficiency, Roofline

MODELS = {**bundled_profiles.VIDUR, "phi-2": "microsoft/phi-2"}
"""Models whose layers were measured, with their folders."""
GPUS = tuple(bundled_profiles.NETWORKS)
"""The GPUs that they were measured on."""
FEW, MANY = 64, 256
"""Up to how many tokens reading the weights takes a layer's time, and beyond how many arithmetic does, on all of these GPUs."""
SPREAD = {"memory": 0.1, "compute": 0.15, "elementwise": 0.5, "launch": 0.4}
"""By how much fits to single GPUs differ: standard deviations of logarithms [-]."""
NOISE = 0.05
"""By how much layers of one model differ from what fits its GPU, the same."""
CLOCKS = 1.1
"""By how much a time may seem to beat the peaks: cards run above their rated clock."""
SLOWEST, SLOW_LAUNCH = 0.01, 1e-4
"""What a layer or product reaches of the peaks at least, behind launches of so long at most [s]: slower is another unit."""
ADAPTED = {"error": 0.05, "compute_error": 0.11}
"""Errors once a layer was measured that reading takes the time of, and one that arithmetic does: no less than on any GPU that was
left out (`one_measured`)."""
TABLES = (
    ("h100", "h100_sxm", "trtllm/1.3.0rc20"), ("h100", "h100_sxm", "vllm/0.14.0"), ("h100", "h100_sxm", "vllm/0.19.0"),
    ("a100", "a100_sxm", "vllm/0.14.0"), ("l40s", "l40s", "trtllm/1.3.0rc20"), ("l40s", "l40s", "vllm/0.14.0"),
)  # fmt: skip
"""GPU, folder and engine of the tables of attention: all but three, which are impossible (`calibrate.importers.aiconfigurator`)."""
BOUNDS = {
    "memory": (0.4, 1.0), "compute": (0.3, 0.95), "elementwise": (0.3, 4.0), "launch": (0.5e-6, 60e-6),
    "cache": (0.3, 4.0), "attention_launch": (0.5e-6, 60e-6),
}  # fmt: skip
"""Between what each efficiency may lie."""
START = {"memory": 0.8, "compute": 0.7, "elementwise": 0.8, "launch": 5e-6, "cache": 0.8, "attention_launch": 8e-6}
OF_LAYERS, OF_ATTENTION = ("memory", "compute", "elementwise", "launch"), ("cache", "attention_launch")
SOFT = 0.05
"""Errors beyond it count less than their squares [-]."""
UNITS = dict.fromkeys(BOUNDS, 1.0) | {"launch": 1e-6, "attention_launch": 1e-6}
"""In which each is about 1, as a search wants it."""


@dataclass(frozen=True, eq=False)
class MeasuredLayers:
    """Measured layers of a model, but for their attention, on a GPU: tokens of the pass and seconds, both of shape (passes,)."""

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
        """The model on the GPU."""
        return on(self.gpu, transformer.preset(self.model))

    @cached_property
    def weights(self) -> Floats:
        """What each pass stands for on the logarithmic axis of tokens, shape (passes,)."""
        return np.asarray(np.gradient(np.log(self.tokens)))

    def predicted(self, efficiency: Efficiency) -> Floats:
        """What these efficiencies say [s]."""
        return replace(self.roofline, efficiency=efficiency).products(self.tokens)

    def errors(self, efficiency: Efficiency) -> Floats:
        """Predicted over measured times, less 1 [-]."""
        return self.predicted(efficiency) / self.seconds - 1


class MeasuredAttention(NamedTuple):
    """A table of the attention of one new token for each text: rows that have the same heads go together."""

    gpu: str
    engine: str
    groups: tuple[tuple[Roofline, Floats, Floats, Floats], ...]
    """A roofline with their heads, and their context, batch and time [s]."""

    def predicted(self, efficiency: Efficiency) -> Floats:
        """What these efficiencies say, group by group [s]."""
        said = [replace(line, efficiency=efficiency).attention(1, context, batch) for line, context, batch, _ in self.groups]
        return np.concatenate(said)

    @property
    def shared(self) -> Floats:
        """How many heads share one of keys and values, group by group."""
        each = [np.full(group[3].size, group[0].shape.heads / group[0].shape.kv_heads) for group in self.groups]
        return np.concatenate(each)

    @property
    def seconds(self) -> Floats:
        """What was measured, group by group [s]."""
        return np.concatenate([group[3] for group in self.groups])

    def errors(self, efficiency: Efficiency) -> Floats:
        """Predicted over measured times, less 1 [-]."""
        return self.predicted(efficiency) / self.seconds - 1


def on(gpu: str, shape: Shape) -> Roofline:
    """A model on a GPU, by its vendor's peaks."""
    peaks = devices.device(gpu)
    return Roofline(shape, peaks.bandwidth, peaks.rate(shape.dtype))


# --- what is fitted to ---


def layers_of(made: Profile) -> MeasuredLayers:
    """The layers of a profile of a whole model."""
    rows = made.rows("dense")
    return MeasuredLayers(made.device, made.model, rows["tokens"].to_numpy().astype(np.float64), rows["time_s"].to_numpy())


def layers(data: str | Path) -> tuple[MeasuredLayers, ...]:
    """Measured layers of all GPUs, from a folder that holds `gpu`."""
    root = bundled_profiles.folder_of(data)
    tables = root / "gpu/vidur/compute"
    found = [vidur.read(tables / gpu / path, model=name, gpu=gpu) for gpu in GPUS for name, path in MODELS.items()]
    found.append(llmservingsim.read(root / bundled_profiles.RTX_4090, model="llama-3.1-8b", gpu="rtx-4090"))
    return tuple(layers_of(each) for each in found)


def attention_of(operations: Profile) -> MeasuredAttention:
    """The attention of a profile of operations: that of models, `bundle.trimmed`."""
    rows = bundled_profiles.trimmed(operations).rows("decode")
    groups = []
    for (heads, kv_heads, head_dim), each in rows.group_by("heads", "kv_heads", "head_dim", maintain_order=True):
        shape = Shape(1, int(heads) * int(head_dim), int(heads), int(kv_heads), int(head_dim), 1, False, 1, True)
        context, batch, seconds = (each[name].to_numpy().astype(np.float64) for name in ("context", "batch", "time_s"))
        line = on(operations.device, shape)
        least = replace(line, efficiency=PEAKS).attention(1, context, batch)
        groups.append((line, context, batch, np.asarray(np.maximum(seconds, least))))
    return MeasuredAttention(operations.device, operations.facts["decode_engine"], tuple(groups))


def attention(data: str | Path) -> tuple[MeasuredAttention, ...]:
    """AIConfigurator's attention, from a folder that holds `gpu`."""
    root = bundled_profiles.folder_of(data) / "gpu/aiconfigurator"
    return tuple(attention_of(aiconfigurator.read(root / folder, gpu=gpu, engine=engine)) for gpu, folder, engine in TABLES)


# --- fits ---


def fit_layers(measured: Sequence[MeasuredLayers], start: Efficiency | None = None) -> Efficiency:
    """The efficiencies of products and small kernels that fit measured layers best."""
    if not measured:
        raise ParameterError("layers must be of at least one model on one GPU, got none")
    logs = [np.log(each.seconds) for each in measured]
    shares = [np.sqrt(each.weights) for each in measured]

    def missed(efficiency: Efficiency) -> Floats:
        said = [np.log(each.predicted(efficiency)) for each in measured]
        return np.concatenate([share * (one - log) for one, log, share in zip(said, logs, shares, strict=True)])

    return _search(OF_LAYERS, missed, start or Efficiency())


def fit_attention(measured: Sequence[MeasuredAttention], start: Efficiency | None = None) -> Efficiency:
    """The efficiencies of attention that fit tables of it best; that of arithmetic stays what `start` says."""
    if not measured:
        raise ParameterError("attention must be of at least one table, got none")
    logs = [np.log(each.seconds) for each in measured]

    def missed(efficiency: Efficiency) -> Floats:
        return np.concatenate([np.log(each.predicted(efficiency)) - log for each, log in zip(measured, logs, strict=True)])

    return _search(OF_ATTENTION, missed, start or Efficiency())


def _search(names: Sequence[str], missed: Callable[[Efficiency], Floats], start: Efficiency) -> Efficiency:
    """The efficiencies of these names, within their bounds, at which the least is missed."""
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
    """A model on a GPU that the fit has not seen: relative errors of its layers [-], and the tokens of each, shape (passes,)."""

    gpu: str
    model: str
    tokens: Floats
    error: Floats


def unseen_models(measured: Sequence[MeasuredLayers]) -> list[UnseenModelErrors]:
    """Each model on each GPU, by a fit to the others on the same GPU."""
    return _left_out(measured, lambda one, other: one.gpu == other.gpu and one.model != other.model)


def unseen_gpus(measured: Sequence[MeasuredLayers]) -> list[UnseenModelErrors]:
    """Each model on each GPU, by a fit to all models on the other GPUs."""
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
    """The median size of the errors on each GPU, its models together, from so many tokens to so many [-]."""
    by_gpu: dict[str, list[Floats]] = {}
    for each in left_out:
        by_gpu.setdefault(each.gpu, []).append(np.abs(each.error[(each.tokens >= least) & (each.tokens <= most)]))
    return {gpu: float(np.median(np.concatenate(errors))) for gpu, errors in by_gpu.items()}


def fit(measured: Sequence[MeasuredLayers], tables: Sequence[MeasuredAttention]) -> Efficiency:
    """All efficiencies; their errors are the largest that a GPU left out of the fit showed, its models together, up to `FEW`
    tokens and beyond `MANY`."""
    of_layers = fit_layers(measured)
    errors = {"error": of_layers.error, "compute_error": of_layers.compute_error}
    if len({each.gpu for each in measured}) > 1:
        unseen = unseen_gpus(measured)
        errors = {"error": max(pooled(unseen, FEW).values()), "compute_error": max(pooled(unseen, least=MANY + 1).values())}
    return replace(fit_attention(tables, of_layers), **errors)


# --- a few measured times of a GPU that no fit has seen ---


class Cell(NamedTuple):
    """One measured time of a GPU [s]: a layer over so many tokens, but for its attention, or one product of so many rows."""

    line: Roofline
    tokens: float
    seconds: float
    product: tuple[int, int] | None = None
    """Outputs and inputs, n and k, where it is of a product."""

    def predicted(self, efficiency: Efficiency) -> float:
        """What these efficiencies say [s]."""
        line = replace(self.line, efficiency=efficiency)
        return float(line.products(self.tokens) if self.product is None else line.product(self.tokens, *self.product))

    def limit(self, efficiency: Efficiency) -> str:
        """Which error it brings down: that of what most of its time goes into."""
        line = replace(self.line, efficiency=efficiency)
        return "error" if line.arithmetic(self.tokens, 1.0) < 0.5 else "compute_error"


KEYS = {
    "memory_efficiency": "memory", "compute_efficiency": "compute", "elementwise_efficiency": "elementwise", "launch_s": "launch",
    "memory_error": "error", "compute_error": "compute_error",
}  # fmt: skip
"""Keys of a scenario's costs of kind `roofline`, and what each is of `Efficiency`."""


def layer_cell(text: str) -> tuple[str, Cell]:
    """A GPU and a measured layer of it: GPU,MODEL,TOKENS,SECONDS."""
    gpu, model, tokens, seconds = _parts(text, "layer", ("GPU", "MODEL", "TOKENS", "SECONDS"))
    return gpu, Cell(on(gpu, transformer.preset(model)), _number("TOKENS", tokens, 1), _number("SECONDS", seconds, 0))


def product_cell(text: str) -> tuple[str, Cell]:
    """A GPU and a measured product of it, of numbers of 16 bits: GPU,M,N,K,SECONDS."""
    gpu, *sizes, seconds = _parts(text, "product", ("GPU", "M", "N", "K", "SECONDS"))
    m, n, k = (_number(name, each, 1) for name, each in zip("MNK", sizes, strict=True))
    shape = Shape(1, int(k), 1, 1, 1, 1, False, 1, True)
    return gpu, Cell(on(gpu, shape), m, _number("SECONDS", seconds, 0), (int(n), int(k)))


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


def adapted(cells: Sequence[Cell], prior: Efficiency | None = None) -> Efficiency:
    """Efficiencies of a GPU of which a few times were measured: the likeliest, from those of others (`prior`) and these times.

    Logarithms of efficiencies lie about the prior's, as fits to single GPUs do (`SPREAD`); times lie about what they say (`NOISE`):
    least squares. Of what no measured time is limited by, little is learned, and the error stays.
    """
    from scipy.optimize import least_squares

    usual = prior or Efficiency()
    if not cells:
        raise ParameterError("layers and products must be at least one in number, got none; give a measured time of the GPU")
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
        got = of(values)
        return np.concatenate([np.asarray(values), [np.log(cell.predicted(got) / cell.seconds) / NOISE for cell in cells]])

    found = of(least_squares(missed, np.zeros(len(names))).x)
    return replace(found, **{each: min(ADAPTED[each], getattr(usual, each)) for each in {cell.limit(found) for cell in cells}})


def one_measured(measured: Sequence[MeasuredLayers], tokens: Sequence[float]) -> list[UnseenModelErrors]:
    """Each model on each GPU, by a fit to the other GPUs and one other model's layers on its own, over so many tokens each.

    Where a GPU has one model only, the layers are its own, and left out of the errors.
    """
    found = []
    for gpu in dict.fromkeys(each.gpu for each in measured):
        prior = fit_layers([each for each in measured if each.gpu != gpu])
        own = [each for each in measured if each.gpu == gpu]
        for given in own:
            places = [int(np.argmin(np.abs(given.tokens - each))) for each in tokens]
            got = adapted([Cell(given.roofline, float(given.tokens[at]), float(given.seconds[at])) for at in places], prior)
            for one in own:
                kept = np.ones(one.tokens.size, dtype=bool)
                if one is given:
                    if len(own) > 1:
                        continue
                    kept[places] = False
                found.append(UnseenModelErrors(gpu, one.model, one.tokens[kept], one.errors(got)[kept]))
    return found
