"""Fit of the elementwise kernels of a layer (norms, rotations, activations, additions) to Vidur's times.

Two numbers hold for all GPUs and models: the share of the bandwidth over many tokens, and the throughput of a block, which
processes one token (`model.hardware.composed_layers.elementwise_kernel`). They are fitted to two models and tested on two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from calibrate.fits import roofline_fit
from calibrate.importers import bundled_profiles, imported_tables, vidur
from model.architectures import transformer
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.hardware import composed_layers
from model.hardware.interpolation import Floats
from model.hardware.profile import Profile

KERNELS = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
FITTED, HELD_OUT = ("llama-2-7b", "phi-2"), ("llama-2-70b", "codellama-34b")
"""Fitted models, and held-out models."""
LAUNCH = 2.5e-6
"""Launch time: that of the shortest product in the tables of operations [s]."""
START, LOW, HIGH, UNITS = (0.6, 12.0), (0.1, 1.0), (1.5, 200.0), (1.0, 1e9)
"""Start, bounds and units of the search, for the share [-] and the throughput of a block [GB/s]."""


@dataclass(frozen=True, eq=False)
class ElementwiseKernels:
    """Elementwise kernels of a device's part of a layer: tokens and seconds, both of shape (passes,)."""

    profile: Profile
    shard: Shape
    tensor_parallel: int
    tokens: Floats
    seconds: Floats

    def predicted(self, share: float = composed_layers.SMALL_SHARE, lane: float = composed_layers.SMALL_LANE) -> Floats:
        """Predicted seconds with these two numbers [s]."""
        return composed_layers.elementwise_kernels(self.profile, self.shard, self.tokens, LAUNCH, share=share, lane=lane)


def measured(data: str | Path, models: Sequence[str]) -> list[ElementwiseKernels]:
    """Read the elementwise kernels of these models on Vidur's GPUs, from a folder that holds `gpu`."""
    root = bundled_profiles.folder_of(data) / "gpu/vidur/compute"
    found = []
    for gpu in roofline_fit.GPUS:
        for model in models:
            folder, shape = root / gpu / roofline_fit.MODELS[model], transformer.preset(model)
            of = vidur.read(folder, model=model, gpu=gpu)
            names = [f"time_stats.{each}.median" for each in KERNELS if each != vidur.SECOND_NORM or shape.norms > 1]
            table = imported_tables.read(folder / "mlp.csv", [*names, "num_tokens", "num_tensor_parallel_workers"], root=folder)
            tokens, split = table.whole("num_tokens", least=1), table.whole("num_tensor_parallel_workers", least=1)
            seconds = np.sum([table.seconds(name, "ms") for name in names], axis=0)
            for tensor_parallel in of.tensor_parallel:
                rows = split == tensor_parallel
                points, times, _ = imported_tables.merged({"tokens": tokens[rows]}, {"time_s": seconds[rows]})
                part, at = shape.shard(tensor_parallel), points["tokens"].astype(np.float64)
                found.append(ElementwiseKernels(of, part, tensor_parallel, at, times["time_s"]))
    return found


def fit(seen: Sequence[ElementwiseKernels]) -> tuple[float, float]:
    """Fit the share of the bandwidth [-] and the throughput of a block [bytes/s] by least squares on logarithms.

    The weight of a time is its spacing on the logarithmic axis of tokens; a robust loss limits the influence of outliers.
    """
    from scipy.optimize import least_squares

    if not seen:
        raise ParameterError("elementwise kernels must be of at least one model on one GPU, got none")
    weights = [np.sqrt(np.gradient(np.log(each.tokens))) for each in seen]

    def missed(values: ArrayLike) -> Floats:
        share, lane = np.asarray(values) * UNITS
        return np.concatenate(
            [weight * np.log(each.predicted(share, lane) / each.seconds) for each, weight in zip(seen, weights, strict=True)]
        )

    found = least_squares(missed, START, bounds=(LOW, HIGH), loss="soft_l1", f_scale=roofline_fit.SOFT, xtol=1e-10)
    share, lane = (float(each) for each in found.x * UNITS)
    return share, lane
