"""Columns of the results table, the same for all methods and views.

Times are in layer-times (`_layers`); `busy_layers` and `reserved_layers` are sums over compute units. With costs in seconds (kinds
`profile`, `roofline` and `engine`) these columns are null, and `latency_s`, `tpot_ms`, `busy_s` and `reserved_s` have the values
in seconds, with their bounds. With seconds_per_layer both sets of columns have values.

=========================  ========================================================================================
`latency_layers`          time until the last token
`tpot_layers`             time per output token
`speedup`                 time of plain decoding on the same devices (one unit of `tensor_parallel` devices, in the same batch) over
                          the latency; `relative_latency` is its inverse
`speedup_over_one_device` speed-up over plain decoding on one device, for grids with `tensor_parallel` above 1; null where the
                          model with the KV cache of its batch is not known to fit one device
`busy_layers`             busy time summed over units: the compute of Theorem 4.1
`compute_per_token`       GPU-time per token: busy time of all devices per token, over that of plain decoding on the same devices
`mean_busy_units`         mean busy_layers over mean latency_layers (Eq. 5 in the limit)
`mean_busy_units_per_run` mean over decodings of busy_layers over latency_layers; it is larger than mean_busy_units
`reserved_units`          units reserved for the whole decoding; `reserved_layers` is their number times the latency
`tokens_per_round`        of methods that draft: generated tokens over rounds (per sequence of a batch), with the target's token
`draft_acceptance_rate`   accepted over drafted tokens; the acceptance rate, in contrast, is accepted over tested tokens
`operations_per_token`    arithmetic per token relative to plain decoding (Theorem 3.11 of Leviathan et al.); each layer run on a
                          token counts 1. For methods that do not draft it is compute_per_token if units are busy with layers only
`no_value_because`        reason why formula and paths have no estimates: the point is `contended`, so passes may wait for units or
                          links, or a stopped process keeps its unit, which only the view events models
`agreement`               of lossy methods: share of tokens equal to the target's; `agreement_source` is its source
`straggler_loss`          of static batches that draft: share of time lost by waiting for the slowest sequence. With `batching`
                          continuous, which keeps the batch full, the time per sequence is shorter by this share
`time_draft_layers`       time per output token that goes to passes of models other than the target; `time_verify_layers`: to passes
                          of the target; `time_overhead_layers`: to engine steps (`step_s`, `draft_step_s`; of a step law `step`,
                          `sequence` and `round`), starting processes, and links; `time_waiting_layers`: to waiting for the slowest
                          sequence of a static batch (`straggler_loss`; the other three are then those of a full batch, in
                          proportion). They add up to `tpot_layers`; in seconds `time_draft_s`, `time_verify_s`, ...
`no_time_parts_because`   reason why these four have no value
`occupancy`               of static batches decoded in steps: generated tokens over batch slots in all steps; the other slots are
                          of sequences that have ended
`flops_per_token`         FLOPs per token, with heads, attention over the context, and keys and values of skipped layers, which
                          operations_per_token leaves out; also `weight_bytes`, `kv_read_bytes`, `kv_written_bytes`, `head_passes`,
                          `transferred_bytes`. They need the shapes of the models (counted by `model.interpret.account`); weights
                          are read once for all sequences of a pass
`arithmetic_intensity`    FLOPs per byte of weights and cache that is read or written
`plain_flops_per_token`   and `plain_weight_bytes_per_token`, `plain_arithmetic_intensity`: the same for plain decoding of the same
                          tokens in the same batches
`seconds_error`           of costs on hardware: relative error of the time of plain decoding, included in `*_s_input_low`, `_high`
`seconds_per_layer`       duration of one layer-time [s], if given
`memory_share`            weights and cache over the memory of a device; `tensor_parallel` is the number of devices a layer is on
`prompt_s`                time to process the prompt, before the first token is decoded; not included in any other column
`prompt_tokens`           cached positions of each sequence when its first token is decoded, `prompt` of costs on hardware
`cost_source`             source of the times: measured, composed of operations, or assumed
`cost_missing`            parts of a pass that are not measured (`step`: scheduling, launching, sampling) and assumed to take 0
=========================  ========================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.interpret.account import FlopsAndBytes
from model.methods.prediction import Prediction
from model.outcomes.intervals import half_width

Floats = NDArray[np.float64]

ESTIMATES = (
    "latency_layers", "tpot_layers", "speedup", "relative_latency", "busy_layers", "compute_per_token", "mean_busy_units",
    "mean_busy_units_per_run",
)  # fmt: skip
ONE_DEVICE = "speedup_over_one_device"
PER_ROUND = ("tokens_per_round", "draft_acceptance_rate", "operations_per_token")
TIME_PARTS = ("time_draft_layers", "time_verify_layers", "time_overhead_layers", "time_waiting_layers")
"""Parts of the time per output token; see `sim.views.time_breakdown`."""
TIME_PARTS_S = tuple(name.replace("_layers", "_s") for name in TIME_PARTS)
"""The same in seconds."""
WORK = tuple(f"{name}_per_token" for name in FlopsAndBytes._fields)
PLAIN_WORK = ("flops_per_token", "weight_bytes_per_token", "arithmetic_intensity")
"""Work that is also reported for plain decoding, in columns `plain_*`."""
BOUNDS = ("low", "high", "input_low", "input_high")


def columns() -> list[str]:
    """The columns of estimates and of their bounds, in their order."""
    return [f"{name}{bound}" for name in (*ESTIMATES, ONE_DEVICE) for bound in ("", *(f"_{each}" for each in BOUNDS))]


def estimates(latency: Any, busy: Any, ratio: Any, plain: Any, tokens: Any, tensor_parallel: Any = 1) -> dict[str, Floats]:
    """All estimates from the means of latency, busy time and their ratio; arrays of one value per point.

    Plain decoding takes `plain` on a unit of `tensor_parallel` devices; busy time is summed over devices.
    """
    latency, busy, ratio, plain = (np.asarray(value, dtype=np.float64) for value in (latency, busy, ratio, plain))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = (
            latency, latency / tokens, plain / latency, latency / plain, busy, busy / (plain * tensor_parallel), busy / latency,
            ratio,
        )  # fmt: skip
    return dict(zip(ESTIMATES, values, strict=True))


def per_round(tokens: Any, rounds: Any, drafted: Any, operations: Any) -> dict[str, Floats]:
    """Estimates on rounds, from the mean numbers of rounds, drafted tokens and operations per decoding.

    Every round generates one token that was not drafted. Without drafted tokens their acceptance is nan.

    >>> per_round(45, 45 + 1e-13, 0.0, 45)["draft_acceptance_rate"].tolist()  # numbers of rounds are rounded
    nan
    """
    rounds, drafted, operations = (np.asarray(value) for value in (rounds, drafted, operations))
    with np.errstate(divide="ignore", invalid="ignore"):
        accepted = np.where(drafted == 0, np.nan, (tokens - rounds) / drafted)
        values = tokens / rounds, accepted, operations / tokens
    return dict(zip(PER_ROUND, values, strict=True))


def of_prediction(prediction: Prediction, tokens: Any, tensor_parallel: Any = 1) -> dict[str, Floats]:
    """Estimates of a theoretical prediction."""
    return estimates(prediction.latency, prediction.busy, prediction.units_ratio, prediction.plain_latency, tokens, tensor_parallel)


def work_per_token(total: FlopsAndBytes, tokens: float, sequences: int = 1) -> dict[str, Any]:
    """FLOPs and bytes per output token, and their ratio; `sequences` of a batch share each read of the weights.

    Of arrays, arrays.
    """
    total = total._replace(weight_bytes=total.weight_bytes / sequences)
    each = {name: value / tokens for name, value in zip(WORK, total, strict=True)}
    return each | {"arithmetic_intensity": total.intensity}


@dataclass(frozen=True)
class Sums:
    """Sums over replications of latency T, busy time C, their squares and product, and C/T and its square."""

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
        """Return the sums of a block of replications."""
        ratio = busy / np.where(latency > 0, latency, 1.0)
        return Sums(
            len(latency), float(latency.sum()), float(busy.sum()), float(latency @ latency), float(busy @ busy),
            float(latency @ busy), float(ratio.sum()), float(ratio @ ratio),
        )  # fmt: skip

    def sampled(self, plain: float, tokens: int, tensor_parallel: int = 1) -> tuple[dict[str, float], dict[str, float], float]:
        """Estimates, half-widths of their sampling intervals (none for the speed-up), and standard deviation of the latency."""
        n = self.count
        latency, busy, ratio = self.latency / n, self.busy / n, self.ratio / n

        def deviation(square_sum: float, mean: float) -> float:
            return spread_of(square_sum / n - mean * mean, mean)

        def spread_of(variance: float, mean: float) -> float:
            # Rounding may give a constant a variance of a few ulp of its square; treat it as a constant.
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
