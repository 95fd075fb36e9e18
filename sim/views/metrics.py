"""What is reported of a decoding, for every method and view alike: the columns of a table of results.

Times are in layer-times (`_layers`), `busy_layers` and `reserved_layers` in layer-times summed over compute units. Where costs are
in seconds (kinds `profile` and `roofline`) these columns are null, and the same are in `latency_s`, `tpot_ms`, `busy_s` and
`reserved_s`, with their bounds; where seconds_per_layer is given, they are in both.

=========================  ========================================================================================
`latency_layers`          time until the last token
`tpot_layers`             time per output token
`speedup`                 time of plain decoding on the same devices (one unit: as many devices as layers are split over, in the
                          same batch) over that time; `relative_latency` is its inverse
`speedup_over_one_device` the same of plain decoding on one device: where layers of some points are split over several
                          (`tensor_parallel`); null where the model, with the cache of its batch, is not known to fit one
`busy_layers`             unit-time busy: Theorem 4.1's compute
`compute_per_token`       the same per token, over that of plain decoding on the same devices: device-time over device-time
`mean_busy_units`         mean busy_layers over mean latency_layers (Eq. 5 in the limit)
`mean_busy_units_per_run` mean of busy_layers over latency_layers of each decoding: not the same, and larger
`reserved_units`          units reserved throughout; `reserved_layers` is their unit-time
`tokens_per_round`        of methods that draft: output tokens over rounds (of each text of a batch), the target's own included
`draft_acceptance_rate`   accepted over drafted tokens: not the acceptance rate, which is accepted over tested ones
`operations_per_token`    operations per token, in those of a plain token: without a unit, 1 of plain decoding (Theorem 3.11 of
                          Leviathan et al.); each layer that is run on a token counts alike. Of methods that do not draft,
                          compute_per_token where units are busy with layers alone
`no_value_because`        why formula and paths have no estimates: they know of no waiting, and at a point that is `contended`
                          something may wait for units or links, or hold a unit after it was stopped; events have estimates there
`agreement`               of lossy methods: share of tokens that the target would have put out; `agreement_source` says who knows
`straggler_loss`          of static batches that draft: share of their time that is lost by waiting for the slowest sequence. A
                          batch of as many that is kept full (`batching` continuous) takes so much less for each
`occupancy`               of batches that go column by column: tokens over places in all steps; the rest is waiting for longer texts
`flops_per_token`         FLOPs per token, with heads, attention over the context, and keys and values of skipped layers: more than
                          operations_per_token knows of; and `weight_bytes`, `kv_read_bytes`, `kv_written_bytes`, `head_passes`,
                          `transferred_bytes`: where the shapes of the models are given, as `model.interpret.account` counts them;
                          weights are read once for all sequences of a pass
`arithmetic_intensity`    operations for each byte of weights and cache that is read or written
`plain_flops_per_token`   and `plain_weight_bytes_per_token`, `plain_arithmetic_intensity`: plain decoding's, of the same tokens in
                          the same batches
`seconds_error`           of costs on hardware: relative error of the time of plain decoding; `*_s_input_low` and `_high` have it
`seconds_per_layer`       what a layer-time is, where it is given
`memory_share`            weights and cache over what a device has; `tensor_parallel` is over how many of them a layer is split
`prompt_s`                reading the prompt, before the first token is decoded: it is in no other column
`cost_source`             whose times these are: measured, composed of operations, or assumed
`cost_missing`            parts of a pass that were not measured (`step`: launching, preparing, sampling): assumed to take 0
=========================  ========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.interpret.account import Bill
from model.methods.prediction import Prediction
from model.outcomes.intervals import half_width

Floats = NDArray[np.float64]

ESTIMATES = (
    "latency_layers", "tpot_layers", "speedup", "relative_latency", "busy_layers", "compute_per_token", "mean_busy_units",
    "mean_busy_units_per_run",
)  # fmt: skip
ONE_DEVICE = "speedup_over_one_device"
PER_ROUND = ("tokens_per_round", "draft_acceptance_rate", "operations_per_token")
WORK = tuple(f"{name}_per_token" for name in Bill._fields)
PLAIN_WORK = ("flops_per_token", "weight_bytes_per_token", "arithmetic_intensity")
"""What is said of plain decoding's work too, in columns `plain_*`."""
BOUNDS = ("low", "high", "input_low", "input_high")


def columns() -> list[str]:
    """The columns of estimates and of their bounds, in their order."""
    return [f"{name}{bound}" for name in (*ESTIMATES, ONE_DEVICE) for bound in ("", *(f"_{each}" for each in BOUNDS))]


def estimates(latency: Any, busy: Any, ratio: Any, plain: Any, tokens: Any, tensor_parallel: Any = 1) -> dict[str, Floats]:
    """All estimates from the means of latency, unit-time and their ratio; arrays of one value per point.

    Plain decoding takes `plain` on a unit of `tensor_parallel` devices; unit-time is in devices.
    """
    latency, busy, ratio, plain = (np.asarray(value, dtype=np.float64) for value in (latency, busy, ratio, plain))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (
            latency, latency / tokens, plain / latency, latency / plain, busy, busy / (plain * tensor_parallel), busy / latency,
            ratio,
        )  # fmt: skip
    return dict(zip(ESTIMATES, values, strict=True))


def per_round(tokens: Any, rounds: Any, drafted: Any, operations: Any) -> dict[str, Floats]:
    """What is said of rounds, from how many of them, drafted tokens and operations there are in one decoding, in the mean.

    Every round puts out one token that was not drafted.
    """
    rounds, drafted, operations = (np.asarray(value) for value in (rounds, drafted, operations))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = tokens / rounds, (tokens - rounds) / drafted, operations / tokens
    return dict(zip(PER_ROUND, values, strict=True))


def of_prediction(prediction: Prediction, tokens: Any, tensor_parallel: Any = 1) -> dict[str, Floats]:
    """The estimates that the theory gives."""
    return estimates(prediction.latency, prediction.busy, prediction.units_ratio, prediction.plain_latency, tokens, tensor_parallel)


def worked(bill: Bill, tokens: float, sequences: int = 1) -> dict[str, float]:
    """Operations and bytes per output token, and their ratio; where so many `sequences` share each reading of the weights."""
    bill = bill._replace(weight_bytes=bill.weight_bytes / sequences)
    each = {name: float(value) / tokens for name, value in zip(WORK, bill, strict=True)}
    return each | {"arithmetic_intensity": bill.intensity}


@dataclass(frozen=True)
class Sums:
    """Sums over replications of latency T, unit-time C, their squares and product, and C/T and its square."""

    count: int
    latency: float
    busy: float
    latency_square: float
    busy_square: float
    product: float
    ratio: float
    ratio_square: float

    @staticmethod
    def of(latency: Floats, busy: Floats) -> Sums:
        """The sums of a block of replications."""
        ratio = busy / np.where(latency > 0, latency, 1.0)
        return Sums(
            len(latency), float(latency.sum()), float(busy.sum()), float(latency @ latency), float(busy @ busy),
            float(latency @ busy), float(ratio.sum()), float(ratio @ ratio),
        )  # fmt: skip

    def sampled(self, plain: float, tokens: int, tensor_parallel: int = 1) -> tuple[dict[str, float], dict[str, float], float]:
        """Estimates, the half-widths of their sampling intervals (of the speed-up: in its inverse), and the latency's deviation."""
        n = self.count
        latency, busy, ratio = self.latency / n, self.busy / n, self.ratio / n

        def deviation(square_sum: float, mean: float) -> float:
            return spread_of(square_sum / n - mean * mean, mean)

        def spread_of(variance: float, mean: float) -> float:
            # Rounding may leave a constant with a variance of a few ulp of its square; that is a constant all the same.
            return (variance * n / (n - 1)) ** 0.5 if n > 1 and variance > 1e-13 * mean * mean else 0.0

        spread = deviation(self.latency_square, latency)
        units = busy / latency if latency else float("nan")
        residual = self.busy_square - 2 * units * self.product + units * units * self.latency_square
        wide = {
            "latency_layers": float(half_width(spread, n)),
            "busy_layers": float(half_width(deviation(self.busy_square, busy), n)),
            "mean_busy_units": float(half_width(spread_of(residual / n, busy), n)) / latency if latency else 0.0,
            "mean_busy_units_per_run": float(half_width(deviation(self.ratio_square, ratio), n)),
        }
        wide["tpot_layers"] = wide["latency_layers"] / tokens
        wide["relative_latency"] = wide["latency_layers"] / plain if plain else float("nan")
        wide["compute_per_token"] = wide["busy_layers"] / (plain * tensor_parallel) if plain else float("nan")
        values = {name: float(value) for name, value in estimates(latency, busy, ratio, plain, tokens, tensor_parallel).items()}
        return values, wide, spread
