"""Costs in seconds that depend on all their arguments: width, context, batch, layer and role."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from model.architectures.published_shapes import preset
from model.architectures.transformer import Shape
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import Floats, PassShape, StepCosts
from model.hardware.interpolation import Estimate
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import theory as early_exit_theory
from model.methods.early_exit.finite_early_exit import Depths
from model.steps import Forward

BUDGETS = st.none() | st.integers(1, 36)
"""Context budgets of drafts, for costs with up to 30 cached positions and a few tokens."""


def estimate(seconds: ArrayLike, error: float = 0.0) -> Estimate:
    """An estimate with the same error for all seconds."""
    found = np.asarray(seconds, dtype=np.float64)
    return Estimate(found, np.full(found.shape, error))


@dataclass(frozen=True)
class GrowingContext:
    """A model whose passes grow with cached positions, tokens per sequence and sequences, each by a different law."""

    shape: Shape
    scale: float = 1.0
    error: float = 0.0
    provenance: str = "assumed"
    tensor_parallel: int = 1

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        width, batch = np.asarray(width, dtype=np.float64), np.asarray(batch, dtype=np.float64)
        reading = np.sqrt(1 + 0.37 * np.asarray(context, dtype=np.float64)) * batch**0.8
        return estimate(self.scale * (1 + 0.05 * (width * batch) ** 1.3 + 0.11 * reading), self.error)

    def head(self, positions: ArrayLike) -> Estimate:
        return estimate(self.scale * (0.7 + 0.013 * np.asarray(positions)), self.error)

    def embedding(self, tokens: ArrayLike) -> Estimate:
        return estimate(self.scale * 0.003 * np.asarray(tokens), self.error)

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        return estimate(self.scale * ((0.08 if within else 0.21) + 0.001 * np.asarray(batch)), self.error)

    def transfer(self, size: ArrayLike) -> Estimate:
        return estimate(1e-9 * np.asarray(size), self.error)


def growing(
    layers: int, *, draft: float | None = None, medium: float | None = None, error: float = 0.0, smaller_layers: int = 1,
    **more: Any,
) -> PassSeconds:  # fmt: skip
    """Costs of a target with `layers` layers, and of smaller models whose layers take these shares of its times.

    >>> cost = growing(4, draft=0.1)
    >>> float(cost.plain_times(9)) > float(cost.plain_times(0)), cost.uniform
    (True, False)
    """
    shape = preset("llama-2-13b")
    of = {"target": GrowingContext(_deep(shape, layers), error=error)}
    shares = {"draft": draft, "medium": medium}
    of |= {role: GrowingContext(_deep(shape, smaller_layers), share, error) for role, share in shares.items() if share is not None}
    return PassSeconds(of, **more)


def _deep(shape: Shape, layers: int) -> Shape:
    return replace(shape, layers=layers)


@dataclass
class RandomCosts(StepCosts):
    """Random times for every shape of a pass, at each of the first positions, so that costs of a wrong pass are detected.

    >>> from model.steps import LayerSpan
    >>> cost, shape = RandomCosts(4), PassShape(LayerSpan(0, 4), heads=1)
    >>> cost.times(shape, [0, 1]).tolist() == [float(cost.times(shape, at)) for at in (0, 1)], len({*cost.times(shape, range(9))})
    (True, 9)
    """

    layers: int
    seed: int = 0
    link: float = 0.0
    promotion: float = 0.0
    dispatch: float = 0.0
    draft_devices: float = 1.0
    positions: int = 64
    _drawn: dict[PassShape, Floats] = field(default_factory=dict, init=False, repr=False)

    uniform = False

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        if shape not in self._drawn:
            empty = shape.layers.first == shape.layers.last and not shape.heads
            rng = np.random.default_rng([self.seed, zlib.crc32(repr(shape).encode())])
            self._drawn[shape] = rng.uniform(0.5, 4.0, self.positions) * (not empty)
        return np.asarray(self._drawn[shape][np.asarray(at)])

    def layer_times_of(self, step: Forward) -> list[float]:
        size = step.layers.size
        return [self.forward(step) / size] * size

    def dispatching(self, processes: int) -> float:
        return self.dispatch * processes

    def has_model(self, role: str) -> bool:
        return True

    def operations(self, role: str) -> float:
        return 1.0 if role == "target" else 0.25


def early_exit_moments(parameters: early_exit.Parameters, tokens: int, law: Depths | None, cost: StepCosts) -> tuple[float, float]:
    """Mean and variance of the time by the theory of early exit."""
    found = early_exit_theory.predict(parameters, tokens, law, cost)
    return float(found.latency), float(found.latency_variance)
