"""Parts of the time of a decoding: drafting, verifying, overheads, and waiting for the slowest sequence of a static batch.

They are defined where passes follow one another (`MethodParameters.serial`), so that the time is a sum. Closed forms and paths take
them from a second evaluation with `StepCosts.passes_only`, whose time is that of all passes and whose unit-time is that of the
target's; the simulator adds up the passes that it runs. Both are compared decoding by decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods import registry
from sim.scenarios.cases import Case
from sim.views.metrics import TIME_PARTS

Floats = NDArray[np.float64]
_ROUNDING = 1e-12
"""Relative error of sums over passes [-]."""


class TimeBreakdown(NamedTuple):
    """Time of passes of smaller models, of passes of the target, and of overheads; arrays of one value per decoding."""

    draft_time: Floats
    target_time: Floats
    overhead_time: Floats


SUMS = TimeBreakdown._fields
"""Columns of sums over replications."""


def missing_because(case: Case) -> str | None:
    """Reason why the time of a case has no parts; None if it has."""
    parameters = case.parameters
    if case.contended:
        return case.contention
    if not parameters.serial:
        return "passes run at the same time, so the time is not the sum of theirs"
    if parameters.concurrent_sequences > 1 and registry.method(case.method).straggler_loss is None:
        return f"waiting in static batches of method {case.method} is not separated from its passes"
    return None


def several_parts(case: Case) -> bool:
    """True if not all time goes to passes of the target, so that a second evaluation separates the parts."""
    return bool(case.parameters.roles) or case.cost.has_overheads(case.parameters.units)


def passes_only(case: Case) -> StepCosts | None:
    """Costs whose evaluation separates the parts; None if all time goes to passes of the target."""
    return case.cost.passes_only() if several_parts(case) else None


def passes_alone(case: Case) -> bool:
    """True if all time goes to passes, on devices that count alike: busy time then equals the time."""
    return case.cost.draft_devices == 1 and not case.cost.has_overheads(case.parameters.units)


def of_target_only(time: Floats) -> TimeBreakdown:
    """Parts of decodings that only run passes of the target."""
    return TimeBreakdown(np.zeros_like(time), time, np.zeros_like(time))


def of_passes(time: Floats, passes: Floats, target: Floats) -> TimeBreakdown:
    """Parts from the whole time, the time of all passes and that of the target's; an overhead as of `of_runs`."""
    return TimeBreakdown(passes - target, target, _overhead(time, time - passes))


def of_runs(time: Floats, draft: Floats, target: Floats) -> TimeBreakdown:
    """Parts of simulated decodings; what is not a pass is overhead, exactly 0 if only rounding is left."""
    return TimeBreakdown(draft, target, _overhead(time, time - draft - target))


def _overhead(time: Floats, rest: Floats) -> Floats:
    return np.where(np.abs(rest) < _ROUNDING * time, 0.0, rest)


def sums(parts: TimeBreakdown | None, own: slice) -> dict[str, float]:
    """Sums over some replications; empty without parts."""
    return {} if parts is None else {name: float(values[own].sum()) for name, values in parts._asdict().items()}


def per_token(parts: TimeBreakdown, time: Any, steps: Any, loss: Any) -> dict[str, Floats]:
    """Parts of the time per output token, which add up to `time / steps`, in the unit of the costs.

    `parts` and `time` are means per decoding. `loss` is the straggler loss of a static batch (0 otherwise): that share of the time
    is waiting, and the other parts are less in proportion.
    """
    each = [np.asarray(mean) / steps * (1 - loss) for mean in parts] + [np.asarray(time) / steps * loss]
    return dict(zip(TIME_PARTS, each, strict=True))
