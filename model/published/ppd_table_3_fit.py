"""Fit of the overhead of Predictive Pipelined Decoding to Table 3 of [Yang2024], which Theorem 4.1 leaves out.

Table 3 has measured times of 128 tokens of LLaMA-2-13B, with plain decoding and with 1 and 3 candidates, on two data sets. With the
time per layer of plain decoding the theorem predicts times that are 7 to 16 % too short. The missing time grows with the number of
processes. It is modelled by one number, an overhead per token and process (the main process included), fitted on one data set and
tested on the other.

Times are in seconds, or in layer-times for options of `model.costs.layer_times.UnitCost`; predicted times are those of
`model.methods.ppd.theory`. The paper does not give the exit layer of these runs: `EXIT_LAYER` is assumed. The time per layer
includes a share of the head's time, because it is derived from the time of a whole token.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model import published
from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import DISPATCH_LAWS

TABLE = "ppd-table-3"
MODEL, LAYERS = "LLaMA-2-13B", 40
TOKENS = 128
"""Tokens of every measured decoding, according to the table's caption."""
EXIT_LAYER = 20
"""Assumed exit layer: the paper does not state it for these runs; its theory predicts at the middle layer."""
BOTH = "both"
"""Used instead of a data set for all four rows."""
SEPARATING = 7
"""Candidates at which costs that grow with k + 1 and with log2(k + 1) differ; at 1 and 3 the ratio is 2 for both."""


@dataclass(frozen=True)
class PublishedRun:
    """A measured decoding with early predictions, and the time of plain decoding for the same tokens [s]."""

    data_set: str
    candidates: int
    match_rate: float
    latency_s: float
    plain_s: float
    source: str

    @property
    def seconds_per_layer(self) -> float:
        """Time of a layer in plain decoding, assuming equal layers [s]."""
        return self.plain_s / (TOKENS * LAYERS)

    def predicted_s(self, cost: UnitCost, exit_layer: int = EXIT_LAYER) -> float:
        """Predicted time of this run with these costs, which are in layer-times of this run [s] (`model.methods.ppd.theory`)."""
        from model.methods.ppd import theory as ppd
        from model.methods.ppd.algorithm import Parameters
        from model.outcomes.outcome_laws import Iid

        parameters = Parameters(LAYERS, exit_layer, self.candidates)
        return float(ppd.predict(parameters, TOKENS, Iid(self.match_rate), cost).latency) * self.seconds_per_layer

    def error(self, cost: UnitCost, exit_layer: int = EXIT_LAYER) -> float:
        """Relative error: predicted time / measured time - 1 [-].

        >>> [round(100 * run.error(UnitCost(LAYERS)), 1) for run in runs()]
        [-6.9, -13.8, -7.4, -16.3]
        """
        return self.predicted_s(cost, exit_layer) / self.latency_s - 1


@dataclass(frozen=True)
class Overhead:
    """Overhead per token that the theorem lacks: unknown times, and the options of `UnitCost` that each of them sets.

    With `relative` the unknowns are fractions of the time of a plain token, otherwise they are in seconds.
    """

    name: str
    formula: str
    unknowns: tuple[tuple[str, ...], ...] = ()
    law: str = "linear"
    relative: bool = False

    def costs(self, values: Sequence[float], seconds_per_layer: float) -> dict[str, Any]:
        """Options of `UnitCost` for these values of the unknowns [layer-times]."""
        if len(values) != len(self.unknowns):
            raise checks.ParameterError(f"values of overhead {self.name!r} must be {len(self.unknowns)}, got {len(values)}")
        layers = [value * LAYERS if self.relative else value / seconds_per_layer for value in values]
        return {field: value for fields, value in zip(self.unknowns, layers, strict=True) for field in fields}

    def cost(self, values: Sequence[float], seconds_per_layer: float) -> UnitCost:
        """Cost model for these values of the unknowns."""
        return UnitCost(LAYERS, dispatch_law=self.law, **self.costs(values, seconds_per_layer))


PER_PROCESS = {
    "linear": Overhead("linear", "b (k + 1)", (("dispatch", "dispatch_per_process"),)),
    "tree": Overhead("tree", "b log2(k + 1)", (("dispatch_per_process",),), law="tree"),
}
"""Absolute cost per process and token, for processes started one after another (`linear`) or in a tree (`tree`)."""


@functools.cache
def runs(data_set: str = BOTH) -> tuple[PublishedRun, ...]:
    """Measured runs of a data set, or of both, in the table's order.

    >>> [(run.data_set, run.candidates, run.match_rate, run.latency_s) for run in runs("squad")]
    [('squad', 1, 0.3097, 13.711), ('squad', 3, 0.4724, 13.712)]
    """
    checks.one_of("data_set", data_set, (*data_sets(), BOTH))
    table, found = published.table(TABLE), []
    for row in table.rows:
        if row["method"] == "ppd" and data_set in (row["data_set"], BOTH):
            rate = published.match_rate(TABLE, data_set=row["data_set"], candidates=row["candidates"]).rate
            plain = table.lookup(data_set=row["data_set"], method="greedy")["latency_s"]
            found.append(PublishedRun(row["data_set"], row["candidates"], rate, row["latency_s"], plain, table.cite(row)))
    return tuple(found)


def data_sets() -> tuple[str, ...]:
    """Data sets of the table; each serves for fits and for tests of the fit on the other.

    >>> data_sets()
    ('cnn_dm', 'squad')
    """
    return tuple(dict.fromkeys(row["data_set"] for row in published.table(TABLE).rows))


def seconds_per_layer(data_set: str) -> float:
    """Time of a layer in plain decoding on a data set [s].

    >>> [round(1e3 * seconds_per_layer(data_set), 2) for data_set in data_sets()]
    [3.55, 2.93]
    """
    checks.one_of("data_set", data_set, data_sets())
    return runs(data_set)[0].seconds_per_layer


@functools.cache
def fitted_seconds(fitted_on: str = BOTH, law: str = "linear", exit_layer: int = EXIT_LAYER) -> float:
    """Cost per process and token [s] fitted to the measured times of a data set by least squares; at least 0.

    Times are linear in it, so that two predictions determine the solution. `calibrate.fits.ppd_overheads` finds the same solution
    by a search, and fits other overheads.

    >>> [round(1e3 * fitted_seconds(on), 2) for on in ("cnn_dm", "squad", "both")]
    [4.5, 4.28, 4.39]
    """
    checks.one_of("dispatch_law", law, DISPATCH_LAWS)
    unit = 1e-3
    missing, slopes = [], []
    for run in runs(fitted_on):
        ideal = run.predicted_s(UnitCost(LAYERS), exit_layer)
        missing.append(run.latency_s - ideal)
        with_unit = run.predicted_s(PER_PROCESS[law].cost((unit,), run.seconds_per_layer), exit_layer)
        slopes.append((with_unit - ideal) / unit)
    best = sum(slope * gap for slope, gap in zip(slopes, missing, strict=True)) / sum(slope**2 for slope in slopes)
    return max(best, 0.0)


def costs(data_set: str, fitted_on: str, law: str = "linear") -> dict[str, Any]:
    """Options of `UnitCost` for the fitted overhead, in the layer-times of a data set [layer-times].

    >>> {name: round(value, 3) for name, value in costs("squad", fitted_on="cnn_dm").items()}
    {'dispatch': 1.538, 'dispatch_per_process': 1.538}
    """
    return PER_PROCESS[law].costs((fitted_seconds(fitted_on, law),), seconds_per_layer(data_set))


def per_token_s(candidates: int, law: str = "linear", fitted_on: str = BOTH) -> float:
    """Fitted overhead per token [s].

    >>> [round(1e3 * per_token_s(SEPARATING, law), 1) for law in PER_PROCESS]
    [35.2, 26.4]
    >>> [[round(1e3 * per_token_s(k, law), 2) for k in (1, 3)] for law in PER_PROCESS]
    [[8.79, 17.58], [8.79, 17.58]]
    """
    checks.whole("candidates", candidates, 1, checks.MAX_CANDIDATES)
    return PER_PROCESS[law].cost((fitted_seconds(fitted_on, law),), 1.0).dispatching(candidates)


def rows() -> list[dict[str, Any]]:
    """Measured runs with predictions of the theorem, without overheads and with the overhead fitted on the other data set.

    ideal_s, ideal_error: without overheads; fitted_on, per_process_s: the fit; predicted_s, error: with the fit; missing_s: time
    per token that the theorem leaves out. Errors are predicted / measured - 1.

    >>> for row in rows():
    ...     print(row["data_set"], row["candidates"], *(round(100 * row[name], 1) for name in ("ideal_error", "error")))
    cnn_dm 1 -6.9 -0.4
    cnn_dm 3 -13.8 -0.6
    squad 1 -7.4 1.0
    squad 3 -16.3 0.5
    """
    found = []
    for run in runs():
        fitted_on = next(name for name in data_sets() if name != run.data_set)
        plain, with_overhead = UnitCost(LAYERS), UnitCost(LAYERS, **costs(run.data_set, fitted_on))
        ideal = run.predicted_s(plain)
        found.append(vars(run) | {
            "ideal_s": ideal, "ideal_error": run.error(plain), "missing_s": (run.latency_s - ideal) / TOKENS,
            "fitted_on": fitted_on, "per_process_s": fitted_seconds(fitted_on), "predicted_s": run.predicted_s(with_overhead),
            "error": run.error(with_overhead),
        })  # fmt: skip
    return found


def run_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`sentences` about those points of a run that replay measured times; empty if there are none."""
    points = replayed(rows)
    return sentences(points) if points else []


def replayed(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Points of a results table that replay runs of Table 3, with their data and `latency_s` by view.

    Such points have the tokens, layers, candidates, match rates and time per layer of the measured run, and the assumed exit layer,
    and do not wait for units. `latency_s` is a mean [s] and the half width of its interval, or None; `fitted_on` is None without
    overheads.

    >>> point = {"point": 0, "view": "formula", "method": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3, "tokens": 128}
    >>> point |= {"data_set": "squad", "outcomes_source": "published: PPD Table 3, squad, ppd, k=3", "fitted_on": "cnn_dm"}
    >>> point |= {"seconds_per_layer": seconds_per_layer("squad"), "contended": False, "latency_s": 13.786}
    >>> [found["latency_s"] for found in replayed([point, point | {"point": 1, "tokens": 64}])]
    [{'formula': (13.786, None)}]
    """
    found: dict[int, dict[str, Any]] = {}
    for row in points:
        run = _measured(row)
        if run is None:
            continue
        low, high = row.get("latency_layers_low"), row.get("latency_layers_high")
        half = None if low is None or high is None else (high - low) / 2 * run.seconds_per_layer
        point = found.setdefault(row["point"], {"run": run, "fitted_on": row.get("fitted_on"), "latency_s": {}})
        point["latency_s"][row["view"]] = (row["latency_s"], half)
    return list(found.values())


def _measured(row: Mapping[str, Any]) -> PublishedRun | None:
    """Measured run that a row of results replays; None if there is none."""
    wanted = {"method": "ppd", "layers": LAYERS, "exit_layer": EXIT_LAYER, "tokens": TOKENS, "contended": False}
    if any(row.get(key) != value for key, value in wanted.items()) or row.get("latency_s") is None:
        return None
    same = [run for run in runs() if row.get("outcomes_source") == f"published: {run.source}"]
    return same[0] if same and math.isclose(row.get("seconds_per_layer") or 0.0, same[0].seconds_per_layer) else None


def sentences(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Comparison of measured and simulated times in sentences, for points from `replayed`, and limits of the fit.

    >>> point = {"run": runs("squad")[1], "fitted_on": "cnn_dm", "latency_s": {"formula": (13.786, None)}}
    >>> for line in sentences([point]):
    ...     print(line)
    PPD Table 3, squad, ppd, k=3: measured 13.712 s; fitted on cnn_dm: formula 13.786 s (+0.5 %); without overheads 11.480 s ...
    the fitted cost per process and token is 4.50 ms on cnn_dm, exit layer 20 assumed; four points calibrate it and do not prove it
    1 and 3 candidates cannot show how this cost grows with k; 7 would: 35.2 ms a token as b (k + 1) or 26.4 ms a token as ...
    """
    lines = [_line(**point) for point in points]
    used = [name for name in dict.fromkeys(point["fitted_on"] for point in points) if name is not None]
    if used:
        words = [f"{1e3 * fitted_seconds(name):.2f} ms on {'both data sets' if name == BOTH else name}" for name in used]
        lines.append(
            f"the fitted cost per process and token is {', '.join(words)}, exit layer {EXIT_LAYER} assumed; four points"
            " calibrate it and do not prove it"
        )
    laws = [f"{1e3 * per_token_s(SEPARATING, law):.1f} ms a token as {each.formula}" for law, each in PER_PROCESS.items()]
    probed = " and ".join(dict.fromkeys(str(run.candidates) for run in runs()))
    lines.append(f"{probed} candidates cannot show how this cost grows with k; {SEPARATING} would: {' or '.join(laws)}")
    return lines


def _line(run: PublishedRun, fitted_on: str | None, latency_s: Mapping[str, tuple[float, float | None]]) -> str:
    views = []
    for view, (mean, half) in latency_s.items():
        spread = "" if half is None else f" ±{half:.3f}"
        views.append(f"{view} {mean:.3f}{spread} s ({100 * (mean / run.latency_s - 1):+.1f} %)")
    measured = f"{run.source}: measured {run.latency_s:.3f} s; "
    if fitted_on is None:
        return measured + ", ".join(views)
    ideal, on = UnitCost(LAYERS), "both data sets" if fitted_on == BOTH else fitted_on
    without = f"{run.predicted_s(ideal):.3f} s ({100 * run.error(ideal):+.1f} %)"
    return f"{measured}fitted on {on}: {', '.join(views)}; without overheads {without}"
