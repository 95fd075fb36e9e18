"""Fits of overheads that Theorem 4.1 leaves out to Table 3 of [Yang2024]: eight candidates, tested on held-out rows.

The table has four measured times, besides those of plain decoding: 128 tokens of LLaMA-2-13B, two data sets, 1 and 3 candidates.
Fits have one or two unknowns, so that four rows calibrate them but do not prove them; the errors on held-out rows decide. Predicted
times are those of `model.methods.ppd.theory` with a `UnitCost`; unknowns are in seconds, or in shares of the time of a plain token.

>>> for row in report():
...     print(f"{row['name']:22}", *(f"{100 * row[name]:5.2f}" for name in ("rms", "held_out", "leave_one_out")))
none                   11.80 16.28 11.80
linear                  0.43  0.96  0.52
tree                    0.43  0.96  0.52
fixed and linear        0.38  1.06  0.75
candidates              1.49  2.32  1.76
candidates and match    0.74  2.37  1.48
relative                0.91  2.40  1.44
constant                3.94  5.19  5.26

The result depends on the layer at which the runs predicted, which the paper does not state. A later layer leaves less to explain;
at layer 24, b k explains the table better than b (k + 1).

>>> for row in report(exit_layer=24)[1:5]:
...     print(f"{row['name']:22}", *(f"{100 * row[name]:5.2f}" for name in ("rms", "held_out", "leave_one_out")))
linear                  0.71  1.44  0.85
tree                    0.71  1.44  0.85
fixed and linear        0.34  1.04  0.67
candidates              0.57  1.11  0.66

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.base import checks
from model.costs.layer_times import UnitCost
from model.published import ppd_table_3_fit
from model.published.ppd_table_3_fit import EXIT_LAYER, PER_PROCESS, Overhead, PublishedRun

OVERHEADS = {
    each.name: each
    for each in (
        Overhead("none", "0: the theorem itself"),
        *PER_PROCESS.values(),
        Overhead("fixed and linear", "a + b k", (("dispatch",), ("dispatch_per_process",))),
        Overhead("candidates", "b k", (("dispatch_per_process",),)),
        Overhead("candidates and match", "b k, and mu at each match", (("dispatch_per_process",), ("promotion",))),
        Overhead("relative", "b (k + 1) plain tokens", (("dispatch", "dispatch_per_process"),), relative=True),
        Overhead("constant", "a", (("dispatch",),)),
    )
}
"""Candidate overheads per token beyond the theorem: in seconds, or with `relative` in shares of the time of a plain token."""


@dataclass(frozen=True)
class Fit:
    """An overhead with the values of its unknowns that fit `runs` best [s], or [-] as shares of the time of a plain token."""

    overhead: Overhead
    values: tuple[float, ...]
    runs: tuple[PublishedRun, ...]
    exit_layer: int = EXIT_LAYER

    def cost(self, run: PublishedRun) -> UnitCost:
        """Cost model of a run, in its layer-times."""
        return self.overhead.cost(self.values, run.seconds_per_layer)

    def errors(self, runs: Sequence[PublishedRun]) -> tuple[float, ...]:
        """Relative errors of the predicted times [-]."""
        return tuple(run.error(self.cost(run), self.exit_layer) for run in runs)

    @property
    def rms(self) -> float:
        """Root mean square of the errors on the fitted runs [-]."""
        return _rms(self.errors(self.runs))


def fit(overhead: Overhead, runs: Sequence[PublishedRun], exit_layer: int = EXIT_LAYER) -> Fit:
    """Fit an overhead to measured times by least squares, with unknowns of at least 0.

    >>> found = fit(OVERHEADS["fixed and linear"], ppd_table_3_fit.runs())
    >>> [round(1e3 * value, 2) for value in found.values], round(100 * found.rms, 2)
    ([3.97, 4.58], 0.38)
    >>> fit(OVERHEADS["fixed and linear"], ppd_table_3_fit.runs()[::2])
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: runs must tell the 2 unknowns of overhead 'fixed and linear' (a + b k) apart, ...
    """
    used = tuple(runs)
    if not used:
        raise checks.ParameterError(
            "runs must be at least one measured run, got none; take them from model.published.ppd_table_3_fit"
        )
    if not overhead.unknowns:
        return Fit(overhead, (), used, exit_layer)
    import numpy as np
    from scipy.optimize import least_squares

    # In units that make an unknown about 1: milliseconds, or thousandths of a plain token.
    def residuals(values: Any) -> list[float]:
        return [run.predicted_s(overhead.cost(values / 1e3, run.seconds_per_layer), exit_layer) - run.latency_s for run in used]

    found = least_squares(residuals, np.ones(len(overhead.unknowns)), bounds=(0, np.inf), xtol=1e-12, ftol=1e-12, gtol=1e-12)
    if np.linalg.matrix_rank(np.asarray(found.jac), tol=1e-6) < len(overhead.unknowns):
        given = ", ".join(str(run.candidates) for run in used)
        raise checks.ParameterError(
            f"runs must tell the {len(overhead.unknowns)} unknowns of overhead {overhead.name!r} ({overhead.formula}) apart, got"
            f" k = {given}; add runs with other candidates, or fit an overhead with fewer unknowns"
        )
    return Fit(overhead, tuple(float(value) / 1e3 for value in found.x), used, exit_layer)


def held_out(overhead: Overhead, exit_layer: int = EXIT_LAYER) -> dict[str, tuple[float, ...]]:
    """Relative errors on the other data set, by the fitted data set.

    >>> for on, errors in held_out(OVERHEADS["linear"]).items():
    ...     print(on, [round(100 * error, 2) for error in errors])
    cnn_dm [0.96, 0.54]
    squad [-0.41, -0.63]
    """
    found = {}
    for name in ppd_table_3_fit.data_sets():
        others = [run for run in ppd_table_3_fit.runs() if run.data_set != name]
        found[name] = fit(overhead, ppd_table_3_fit.runs(name), exit_layer).errors(others)
    return found


def leave_one_out(overhead: Overhead, exit_layer: int = EXIT_LAYER) -> float:
    """Root mean square of the leave-one-out errors: each run is predicted from a fit to the three others.

    >>> round(100 * leave_one_out(OVERHEADS["linear"]), 2)
    0.52
    """
    every = ppd_table_3_fit.runs()
    return _rms([
        fit(overhead, every[:index] + every[index + 1 :], exit_layer).errors([run])[0] for index, run in enumerate(every)
    ])  # fmt: skip


def report(exit_layer: int = EXIT_LAYER) -> list[dict[str, Any]]:
    """Rows of all overheads: the values that fit all four runs, and the errors [-].

    `rms`: root mean square on the four fitted runs; `held_out`: the largest error on a data set after a fit to the other;
    `leave_one_out`: root mean square of the leave-one-out errors. The exit layer is assumed.
    """
    found = []
    for name, overhead in OVERHEADS.items():
        best = fit(overhead, ppd_table_3_fit.runs(), exit_layer)
        unseen = [abs(error) for errors in held_out(overhead, exit_layer).values() for error in errors]
        found.append({
            "name": name, "says": overhead.formula, "values": best.values, "rms": best.rms, "held_out": max(unseen),
            "leave_one_out": leave_one_out(overhead, exit_layer),
        })  # fmt: skip
    return found


def _rms(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))
