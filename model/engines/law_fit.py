"""Fit of a step law to measured cells: posterior of its coefficients under wide priors.

Few cells cannot determine all coefficients. With priors they need not: what the cells do not say stays as wide as its prior, and
intervals of predictions say so. The errors of cells are relative (of logarithms) with Student's t distribution, so that throughput
and time, small and large batches count alike, and one bad cell does not decide. Coefficients are positive by construction.

The law's coefficients are at the maximum of the posterior density; draws are from an ensemble sampler [TerBraak2006].

[TerBraak2006] C. J. F. ter Braak. A Markov chain Monte Carlo version of the genetic algorithm differential evolution. Statistics
and Computing 16, 2006.
[Leviathan2023] Y. Leviathan et al. Fast Inference from Transformers via Speculative Decoding. ICML 2023, arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import engine_priors, kernel_times, step_terms
from model.engines.cells import Cells, Floats
from model.engines.kernel_times import KernelSource
from model.engines.step_law import DEGREES, MEDIAN_OF_SD, StepLaw
from model.engines.step_terms import LOGITS, PLAIN, PRIORS, RoutedExperts, StepShape

WALKERS, STEPS, KEEP_EVERY, DRAWS = 64, 1500, 10, 256
"""Size of the ensemble, its steps (the first third is discarded), and draws that a law keeps."""
STARTS = 6
"""Points from which the maximum is searched for."""
MOST_GROUPS = 60
"""Most groups of cells that are left out in turn; up to as many cells, each is left out alone."""
ACCEPTANCE_ERROR = 0.02
"""Relative error of a measured acceptance length, where a rate is fitted to it [-]."""
USUAL_SECONDS = 0.01
"""Reference of ratios, which do not depend on it [s]."""


def fit(
    cells: Cells | None, name: str, *, unit: str | None = None, experts: RoutedExperts | None = None,
    kernels: KernelSource | None = None, acceptance: Sequence[float] = (), over: Cells | None = None,
    facts: Mapping[str, str] | None = None, seed: int = 0, engine: str | None = None, model: str | None = None,
    tensor_parallel: int | None = None,
) -> StepLaw:  # fmt: skip
    """Fit a step law.

    Parameters
    ----------
    cells
        Measured cells; those without a value are left out. None: the law of the priors alone, which needs `kernels` and `unit`.
    experts, kernels
        Experts of the model; source of the kernels' seconds, which then give the shape over batch, width and context.
    acceptance
        Conditional acceptance rates by draft position, for cells without an acceptance length. Where neither is known, one rate
        (and its trend by position) is fitted with the law; a speed-up over plain decoding then rests on priors unless plain cells
        are given.
    over
        Cells that the values are relative to: the values of `cells` are ratios, and the cells of `over` need none.
    seed
        Seed of the sampler.
    engine
        Engine whose priors in seconds are used (`model.engines.engine_priors.ENGINES`), with `kernels`, which give the scale; None:
        those of all engines, relative to a plain step.
    model, tensor_parallel
        Without `kernels`: shape of the model and devices that it is split over, kept with the law.
    """
    if cells is not None:
        kept = cells.measured
        if not kept.any():
            raise ParameterError(f"at least one cell needs a value in column {cells.unit}")
        cells, over = cells[kept], None if over is None else over[kept]
        unit = cells.unit
    if unit is None or (cells is None and kernels is None):
        raise ParameterError("a law without cells needs a unit, and a model and a GPU, whose kernels give its shape; or give cells")
    experts, engine = (experts, None) if kernels is None else (None, engine)
    posterior = _Posterior(unit, cells, over, experts, kernels, tuple(acceptance), engine)
    best = posterior.maximum()
    random = np.random.Generator(np.random.Philox(seed))
    drawn = posterior.sample(best, random) if cells is not None else posterior.of_priors(random)
    chosen = drawn[np.linspace(0, len(drawn) - 1, DRAWS).astype(int)]
    left_out = () if cells is None or not _repeat_groups(cells).any() else tuple(posterior.left_out(best))
    values = posterior.natural(best[None])
    return StepLaw(
        name, posterior.unit, {key: float(each[0]) for key, each in values.items() if key != "noise"}, posterior.natural(chosen),
        posterior.experts, kernels, tuple(acceptance), cells, left_out, dict(facts or {}), posterior.engine,
        *((model, tensor_parallel) if kernels is None else ()),
    )  # fmt: skip


def kernels_only(kernels: KernelSource) -> StepLaw:
    """Law of an engine that adds nothing to its kernels; its draws have the kernels' stated error."""
    one = np.ones(1)
    shape = kernel_times.step_shape(kernels, one, 0 * one, 0 * one, kernel_times.USUAL_CONTEXT * one)
    sd = max(0.01, kernel_times.stated_error(kernels, shape) / MEDIAN_OF_SD)
    normal = special.ndtri((np.arange(DRAWS) + 0.5) / DRAWS)
    draws = {"kernels": np.exp(sd * normal), "draft_pass": np.zeros(DRAWS), "noise": np.full(DRAWS, sd)}
    return StepLaw("kernels only", "step_ms", {"kernels": 1.0, "draft_pass": 0.0}, draws, kernels=kernels)


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Posterior density of the coefficients, in coordinates in which priors are normal.

    A point is a vector: logarithms of seconds relative to the reference, logarithms or logits of other coefficients.
    """

    unit: str
    cells: Cells | None
    over: Cells | None
    experts: RoutedExperts | None
    kernels: KernelSource | None
    acceptance: tuple[float, ...]
    engine: str | None = None

    @cached_property
    def shapes(self) -> tuple[StepShape, ...]:
        """Shapes of the cells, and of those that they are relative to."""
        return tuple(
            kernel_times.step_shape(self.kernels, each.sequences, each.draft_length, each.draft_passes, each.context)
            for each in (self.cells, self.over) if each is not None
        )  # fmt: skip

    @cached_property
    def fits_acceptance(self) -> bool:
        """True if an acceptance rate is fitted: something is drafted, no rates are given, and the values or lengths depend on
        it."""
        if self.acceptance or self.cells is None:
            return not self.acceptance and self.unit != "step_ms"
        drafted = self.cells.draft_length > 0
        return bool(np.any(drafted & ((self.unit != "step_ms") | ~np.isnan(self.cells.mean_acceptance_length))))

    @cached_property
    def measured_lengths(self) -> Floats:
        """Draft lengths of the cells and acceptance lengths measured with them, each pair once; shape (2, pairs)."""
        assert self.cells is not None
        known = ~np.isnan(self.cells.mean_acceptance_length) & (self.cells.draft_length > 0)
        return np.unique(np.stack([self.cells.draft_length[known], self.cells.mean_acceptance_length[known]]), axis=1)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the coordinates."""
        target: tuple[str, ...] = ("kernels",) if self.kernels is not None else ("weights", "ridge_tokens")
        if self.experts is not None:
            target += ("experts", "expert_correlation", "expert_skew")
        context = self.cells is not None and not np.isnan(self.cells.context).any() and self.kernels is None
        added: tuple[str, ...] = ("step", "sequence", "token", *(("kv_position",) if context else ()), "draft_pass", "round")
        added += ("prompt",) if self.unit != "step_ms" else ()
        return (*target, *added, *(("acceptance_rate", "acceptance_trend") if self.fits_acceptance else ()), "noise")

    @cached_property
    def reference(self) -> float:
        """Reference of priors in seconds: the kernels of a plain step of one sequence, or the median step of the cells [s]."""
        if self.kernels is not None:
            return kernel_times.reference_seconds(self.kernels)
        if self.over is not None or self.cells is None:
            return USUAL_SECONDS
        length = step_terms.acceptance_length(PRIORS["acceptance_rate"].median, 0.0, self.cells.draft_length)
        known = np.where(np.isnan(self.cells.mean_acceptance_length), length, self.cells.mean_acceptance_length)
        return float(np.median(self.cells.step_seconds(known)))

    @cached_property
    def normal(self) -> tuple[Floats, Floats]:
        """Means and standard deviations of the priors in these coordinates."""
        means, sds = [], []
        for name in self.names:
            prior = PRIORS[name]
            median = float(step_terms.in_coordinates_of_prior(name, prior.median))
            means.append(median + (np.log(self.reference) if name == "weights" else 0.0))
            sds.append(prior.sd)
        for name, prior in engine_priors.used(self.engine, self.kernels).items():
            means[self.names.index(name)], sds[self.names.index(name)] = np.log(prior.median / self.reference), prior.sd
        if self.kernels is not None and self.shapes:
            # A median error of e means a standard deviation of e / .67.
            sds[self.names.index("kernels")] = max(0.05, kernel_times.stated_error(self.kernels, self.shapes[0]) / MEDIAN_OF_SD)
        return np.array(means), np.array(sds)

    def natural(self, points: Floats) -> dict[str, Floats]:
        """Coefficients by name, each of shape (points,)."""
        found = {}
        base = np.log(self.reference) if self.kernels is not None else points[:, 0]
        for column, name in enumerate(self.names):
            values = points[:, column]
            if name in PLAIN:
                found[name] = values
            elif name in LOGITS:
                found[name] = special.expit(values)
            else:
                found[name] = np.exp(values + (base if PRIORS[name].unit == "s" and name != "weights" else 0.0))
        return found

    def log_density(self, points: Floats, included: Floats | None = None) -> Floats:
        """Logarithm of the posterior density; shape (points,). `included` has 1 for each cell that counts, 0 for one left out."""
        means, sds = self.normal
        total: Floats = np.asarray(-0.5 * np.sum(((points - means) / sds) ** 2, axis=1))
        if self.cells is None:
            return np.asarray(total)
        coefficients = self.natural(points)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            predicted = self._log_predicted(coefficients)
            scale = coefficients["noise"][:, None] / np.sqrt(self.cells.weight)
            error = (np.log(self.cells.values) - predicted) / scale
            each = -(DEGREES + 1) / 2 * np.log1p(error**2 / DEGREES) - np.log(scale)
        total = total + (each if included is None else each * included).sum(axis=1) + self._of_lengths(coefficients)
        return np.where(np.isfinite(total), total, -1e300)

    def _log_predicted(self, coefficients: Mapping[str, Floats]) -> Floats:
        """Logarithms of the predicted values of the cells, or of their ratios; shape (points, cells)."""
        values = self._log_values(coefficients, 0)
        return values if self.over is None else values - self._log_values(coefficients, 1)

    def _log_values(self, coefficients: Mapping[str, Floats], which: int) -> Floats:
        """Logarithms of the predicted values of the cells (0), or of those that they are relative to (1)."""
        cells = self.cells if which == 0 else self.over
        assert cells is not None
        columns = {name: each[:, None] for name, each in coefficients.items()}
        seconds = step_terms.step_seconds(columns, self.shapes[which], self.experts)
        if self.unit == "step_ms":
            return np.log(1e3 * seconds)
        length = np.where(cells.draft_length == 0, 1.0, cells.mean_acceptance_length)
        missing = np.isnan(length)
        if missing.any():
            length = np.where(missing, self._fitted_lengths(coefficients, cells), length)
        seconds = seconds + length * step_terms.prompt_seconds(columns, cell_tables.served(self.unit, cells.sequences))
        return np.log(cell_tables.to_unit(self.unit, seconds, cells.sequences, length))

    def _fitted_lengths(self, coefficients: Mapping[str, Floats], cells: Cells) -> Floats:
        if self.acceptance:
            missing = np.isnan(cells.mean_acceptance_length)
            return step_terms.length_by_position(self.acceptance, np.where(missing, cells.draft_length, 0))
        rate, trend = coefficients["acceptance_rate"][:, None], coefficients["acceptance_trend"][:, None]
        return step_terms.acceptance_length(rate, trend, cells.draft_length)

    def _of_lengths(self, coefficients: Mapping[str, Floats]) -> Floats | float:
        """Density of the measured acceptance lengths, so that the fitted rate holds at draft lengths that were not measured."""
        drafted, measured = self.measured_lengths
        if not self.fits_acceptance or not drafted.size:
            return 0.0
        rate, trend = coefficients["acceptance_rate"][:, None], coefficients["acceptance_trend"][:, None]
        fitted = step_terms.acceptance_length(rate, trend, drafted)
        return np.asarray(-0.5 * np.sum((np.log(measured / fitted) / ACCEPTANCE_ERROR) ** 2, axis=1))

    # --- Maximum and draws ---

    def maximum(self, starts: Floats | None = None, included: Floats | None = None) -> Floats:
        """Point of the largest density; the density may have several maxima, so that several points are started from.

        `starts` has shape (points, coordinates); default: the means of the priors, and fixed points around them.
        """
        means, sds = self.normal
        size, apart = means.size, 1e-5
        shifts = np.concatenate([np.zeros((1, size)), apart * np.eye(size), -apart * np.eye(size)])

        def descent(scaled: Floats) -> tuple[float, Floats]:
            # Value and central differences in one call, over an array of points.
            heights = -self.log_density(means + sds * (scaled + shifts), included)
            return float(heights[0]), (heights[1 : size + 1] - heights[size + 1 :]) / (2 * apart)

        around = np.random.Generator(np.random.Philox(STARTS)).standard_normal((STARTS - 1, size))
        firsts = [np.zeros(size), *around] if starts is None else [np.zeros(size), *((starts - means) / sds)]
        from scipy import optimize  # half a second, which most commands need not wait for

        found = [optimize.minimize(descent, first, jac=True, method="BFGS") for first in firsts]
        return np.asarray(means + sds * min(found, key=lambda each: float(each.fun)).x)

    def left_out(self, best: Floats) -> list[float]:
        """Relative error of each cell by the maximum of the posterior of the others; many cells are left out in groups."""
        assert self.cells is not None
        errors = np.empty(self.cells.size)
        groups = _repeat_groups(self.cells) % MOST_GROUPS
        for group in range(int(groups.max()) + 1):
            out = groups == group
            coefficients = self.natural(self.maximum(best[None], np.where(out, 0.0, 1.0))[None])
            predicted = self._log_predicted(coefficients)
            errors[out] = np.exp(predicted[0, out]) / self.cells.values[out] - 1
        return errors.tolist()

    def of_priors(self, random: np.random.Generator) -> Floats:
        """Draws from the priors alone; shape (draws, coordinates)."""
        means, sds = self.normal
        return np.asarray(means + sds * random.standard_normal((DRAWS, means.size)))

    def sample(self, best: Floats, random: np.random.Generator) -> Floats:
        """Draws from the posterior by differential evolution [TerBraak2006]; shape (draws, coordinates)."""
        means, sds = self.normal
        # The maximum differs between processors in its last digits, and a chain that starts elsewhere takes other draws: it starts
        # from a rounded point. Moves are sums and products, which are alike on all processors.
        near = means + sds * np.round((best - means) / sds, 1)
        walkers = near + 0.1 * sds * random.standard_normal((WALKERS, best.size))
        height, half, kept = self.log_density(walkers), WALKERS // 2, []
        for step in range(STEPS):
            for mine, others in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
                # Each walker moves along the difference of two walkers of the other half; a factor of 1 leads from mode to mode.
                pair = np.argsort(random.random((half, half)), axis=1)[:, :2]
                factor = np.where(random.random(half) < 0.1, 1.0, 2.38 / np.sqrt(2 * best.size))
                along = walkers[others][pair[:, 0]] - walkers[others][pair[:, 1]]
                moved = walkers[mine] + factor[:, None] * along + 1e-4 * sds * random.standard_normal((half, best.size))
                now = self.log_density(moved)
                accepted = np.log(random.random(half)) < now - height[mine]
                walkers[mine] = np.where(accepted[:, None], moved, walkers[mine])
                height[mine] = np.where(accepted, now, height[mine])
            if step >= STEPS // 3 and step % KEEP_EVERY == 0:
                kept.append(walkers.copy())
        return np.concatenate(kept)


def _repeat_groups(cells: Cells) -> NDArray[np.int64]:
    """Numbers of groups of cells that were measured at the same point: repeats are left out together; shape (cells,)."""
    points = np.stack([cells.sequences, cells.draft_length, cells.draft_passes, np.nan_to_num(cells.context)])
    return np.unique(points, axis=1, return_inverse=True)[1].ravel()
