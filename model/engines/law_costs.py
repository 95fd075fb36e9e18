"""Cost models of `model.hardware.cost_models.Hardware` from a step law: the target's steps, and the draft's passes.

The law is of an engine's steps. A pass over one token per sequence is a step of plain decoding; a pass over more of them is a
verification. What a step takes at any width (the coefficients `step` and `sequence`) is the overhead of a pass; the rest is
spread evenly over the layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.costs.pass_seconds import PassSeconds
from model.costs.steady_prices import SteadyPrices
from model.engines import cells, kernel_times, step_terms
from model.engines.step_law import StepLaw
from model.hardware.cost_models import Hardware, WithEngineOverhead
from model.hardware.interpolation import NONE, Estimate, Floats


@dataclass(frozen=True)
class _LawCosts:
    """What the target's and the draft's cost models share."""

    law: StepLaw
    shape: Shape
    tensor_parallel: int = 1

    @property
    def provenance(self) -> str:
        """Number of cells, engine and source of the law, as printed text."""
        law = self.law
        if law.cells is None:
            return f"assumed: step law {law.name} of priors, without any measured cell"
        of = ", ".join(law.facts[name] for name in ("engine", "model", "gpu") if law.facts.get(name))
        of += "" if law.devices is not None else "; number of devices not stated, tensor_parallel as given"
        of += f"; without {1e6 * law.coefficients['prompt']:.2g} us of prompts per token" if "prompt" in law.coefficients else ""
        return f"measured: step law {law.name} of {law.cells.size} cells ({of or cells.UNITS[law.unit]})"

    def head(self, positions: ArrayLike) -> Estimate:
        """Zero seconds: the law of a step includes it."""
        return NONE

    def embedding(self, tokens: ArrayLike) -> Estimate:
        """Zero seconds: the law of a step includes it."""
        return NONE

    def transfer(self, size: ArrayLike) -> Estimate:
        """Seconds of sending `size` bytes, by the law's kernel model; zero without one [s]."""
        if self.law.kernels is None:
            return NONE
        return kernel_times.hardware(self.law.kernels)[0].transfer(size)


@functools.lru_cache(maxsize=256)  # asked for at every pass
def _plain_error(law: StepLaw, batches: tuple[float, ...]) -> Floats:
    """Relative errors of steps of plain decoding at these numbers of sequences; shape (batches,) [-]."""
    return law.pass_seconds(np.array(batches), 1, kernel_times.USUAL_CONTEXT)[1]


@dataclass(frozen=True)
class LawTarget(_LawCosts):
    """Cost model of the target by a step law."""

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """Seconds of a layer: an equal share of what a step takes beyond its overhead [s]."""
        seconds, error = self.law.pass_seconds(batch, width, context)
        return Estimate(np.maximum(seconds - self._overhead(batch), 0.0) / self.shape.layers, error)

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Seconds of a step at any width: once, and per sequence; zero for a pass within another's step [s]."""
        if within:
            return NONE
        error = _plain_error(self.law, tuple(np.ravel(np.asarray(batch)).tolist()))
        return Estimate(self._overhead(batch), error.reshape(np.shape(batch)))

    def _overhead(self, batch: ArrayLike) -> Floats:
        of = self.law.coefficients
        return np.asarray(of.get("step", 0.0) + of.get("sequence", 0.0) * np.asarray(batch, dtype=np.float64))


@dataclass(frozen=True)
class LawDraft(_LawCosts):
    """Cost model of the draft by a step law: a pass takes the same time at any width."""

    def layer(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, *, busy: int = 0) -> Estimate:
        """Seconds of a layer: an equal share of a pass of the draft [s]."""
        number, where = np.broadcast_arrays(np.asarray(batch), np.asarray(context) + 0 * np.asarray(width))
        seconds, error = self.law.draft_seconds(number, where)
        return Estimate(seconds / self.shape.layers, error)

    def step(self, batch: ArrayLike = 1, *, within: bool = False) -> Estimate:
        """Zero seconds: the law of a draft pass includes it."""
        return NONE


def with_law(cost: PassSeconds, law: StepLaw) -> PassSeconds:
    """Costs with another step law in place of the one that they have, everything else unchanged."""

    def replaced(model: Hardware) -> Hardware:
        if isinstance(model, WithEngineOverhead):
            return replace(model, kernels=replaced(model.kernels))
        return replace(model, law=law) if isinstance(model, LawTarget | LawDraft) else model

    models = {role: replaced(model) for role, model in cost.hardware_models.items()}
    return replace(cost, hardware_models=models, verification=law.coefficients.get("round", 0.0))


def steady_prices(law: StepLaw, sequences: ArrayLike, context: ArrayLike, draws: int = 0) -> SteadyPrices:
    """Prices of passes with these numbers of running sequences and cached positions, by the law [s].

    Parameters
    ----------
    law
        Step law.
    sequences, context
        Running sequences and cached positions of each cell, shape (cells,); nan: unknown (`kernel_times.USUAL_CONTEXT`).
    draws
        Number of draws of the coefficients, the first ones of the law, and again from the first where it has fewer; 0: the most
        likely coefficients, as one draw.

    >>> from model.engines import step_law
    >>> law = step_law.load("vllm-llama-3.1-8b-eagle3-h100")
    >>> steady_prices(law, [1, 8], [1000, 1000], draws=5).verify(2).shape
    (5, 2)
    """
    number, where = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (sequences, context)))
    drawn = {name: law.draws[name] for name in law.coefficients} if draws else {
        name: np.array([value]) for name, value in law.coefficients.items()
    }  # fmt: skip
    columns = {name: each[np.arange(draws or 1) % each.size][:, None] for name, each in drawn.items()}
    shape = (draws or 1, number.size)

    def seconds(width: int) -> Floats:
        step = kernel_times.step_shape(law.kernels, number, 0 * number + (width - 1), 0 * number, where)
        return np.broadcast_to(step_terms.target_seconds(columns, step, law.experts), shape)

    def drafting(drafts: int) -> Floats:
        step = kernel_times.step_shape(law.kernels, drafts * number, 0 * number, 0 * number, where)
        return np.broadcast_to(step_terms.draft_seconds(columns, step), shape)

    overhead = columns.get("step", np.zeros(1)) + columns.get("sequence", np.zeros(1)) * number
    waiting = step_terms.prompt_seconds(columns, cells.served(law.unit, number))
    return SteadyPrices(seconds, drafting(1), overhead, waiting, drafting, number)
