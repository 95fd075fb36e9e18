"""What norms, rotations, activations and sums of a layer reach (`model.hardware.composed_layers.passed_over`), fitted to those that
Vidur timed.

Two numbers for all GPUs and models: the share of the bandwidth over many tokens, and what one block moves, which has a token to
itself. Fitted to two models and held against two that had no say.
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
FITTED, HELD = ("llama-2-7b", "phi-2"), ("llama-2-70b", "codellama-34b")
"""Models that the fit sees, and that it does not."""
LAUNCH = 2.5e-6
"""What the shortest product takes on the GPUs whose products are tabulated, which stands for a launch [s]."""
START, LOW, HIGH, UNITS = (0.6, 12.0), (0.1, 1.0), (1.5, 200.0), (1.0, 1e9)
"""Of the search: the share, and GB/s of a block."""


@dataclass(frozen=True, eq=False)
class Between:
    """The small kernels of a device's part of a layer: tokens and seconds, both of shape (passes,)."""

    of: Profile
    part: Shape
    tensor_parallel: int
    tokens: Floats
    seconds: Floats

    def predicted(self, share: float = composed_layers.SMALL_SHARE, lane: float = composed_layers.SMALL_LANE) -> Floats:
        """Seconds by these two numbers."""
        return composed_layers.between(self.of, self.part, self.tokens, LAUNCH, share=share, lane=lane)


def measured(data: str | Path, models: Sequence[str]) -> list[Between]:
    """The small kernels of these models on Vidur's GPUs, from a folder that holds `gpu`."""
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
                own = split == tensor_parallel
                points, times, _ = imported_tables.merged({"tokens": tokens[own]}, {"time_s": seconds[own]})
                found.append(
                    Between(of, shape.shard(tensor_parallel), tensor_parallel, points["tokens"].astype(np.float64), times["time_s"])
                )
    return found


def fit(seen: Sequence[Between]) -> tuple[float, float]:
    """The share of the bandwidth [-] and what a block moves [bytes/s] that fit best, by least squares on logarithms.

    A time weighs what it stands for on the logarithmic axis of tokens; what lies far off counts less than its square.
    """
    from scipy.optimize import least_squares

    if not seen:
        raise ParameterError("small kernels must be of at least one model on one GPU, got none")
    weights = [np.sqrt(np.gradient(np.log(each.tokens))) for each in seen]

    def missed(values: ArrayLike) -> Floats:
        share, lane = np.asarray(values) * UNITS
        return np.concatenate(
            [weight * np.log(each.predicted(share, lane) / each.seconds) for each, weight in zip(seen, weights, strict=True)]
        )

    found = least_squares(missed, START, bounds=(LOW, HIGH), loss="soft_l1", f_scale=roofline_fit.SOFT, xtol=1e-10)
    share, lane = (float(each) for each in found.x * UNITS)
    return share, lane
