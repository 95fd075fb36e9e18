"""Validity of the papers' formulas: each formula next to the simulation with the profile and the measurement.

A formula gets the inputs of its paper: rates, counted in the same runs, and costs as one constant or as a share of layers. The
simulation has the same outcomes and the time of each pass. Claims for which there are no runs are left out, and so are settings
without plain decoding of the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.replayed_seconds import ReplayedSeconds
from model.engines.law_costs import LawTarget
from model.engines.step_law import StepLaw
from model.hardware.profile_costs import ProfileCosts
from model.logs.measured_runs import MeasuredRuns
from model.logs.recorded_decoding import Decoding, drafting
from model.logs.recorded_decoding import rounds_and_passes as pooled
from model.logs.replay import changed_settings
from model.logs.spans import Span, main_process_seconds
from model.logs.spans import overlap_with_other_units as at_once
from model.methods import registry
from model.methods.formula_check import ComparedRuns
from model.steps import Forward, LayerSpan
from sim.comparison.run_comparison import Times, over_processes, predict, profiles_of, replayed_seconds, spent_by_main

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("claim", "series", "x", "formula", "simulated", "measured", "noise", "x_name", "y_name", "about")
"""Claim, its line, x, and the three values, with the relative noise of the measured value [-]; then the axes and a remark."""
_SPEED, _TIME = "speed-up over plain decoding", "time over plain decoding"  # per token after the first commit


@dataclass(frozen=True)
class Compared:
    """A decoding with its row of `compare` [s]."""

    decoding: Decoding
    row: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Number of tokens after the first commit; the times are of these."""
        return len(self.decoding.tokens) - len(self.decoding.commits[0].tokens)


def limits(runs: MeasuredRuns, table: pl.DataFrame, times: Times) -> pl.DataFrame:
    """Rows of all claims that these runs can test (`COLUMNS`); a table without rows if there is none.

    With times by a step law, the column `step_law` has its name.

    Parameters
    ----------
    table
        Result of `sim.comparison.run_comparison.compare` for the runs with the same times.
    times
        Profile of each model, by its role, or the step law of an engine.
    """
    import polars as pl

    cost = replayed_seconds(runs, times)
    timed = [Compared(runs.timed[row["decoding"]].decoding, row) for row in table.iter_rows(named=True)]
    timed = [each for each in timed if len(each.decoding.commits) > 1 and each.tokens > 0]
    plain = [each for each in timed if each.decoding.method == registry.PLAIN]
    other = "; a profile of ANOTHER machine, model or dtype" if any(table["mismatch"]) else ""
    other = f"; times by step law {times.name}" if isinstance(times, StepLaw) else other
    rows = [
        {**row, "about": row["about"] + other}
        for row in (*_of_methods(timed, plain, cost), *_bus(runs, timed, cost))
    ]
    text = dict.fromkeys(("claim", "series", "x_name", "y_name", "about"), pl.String)
    found = pl.DataFrame(rows, schema={name: text.get(name, pl.Float64) for name in COLUMNS})
    return found.with_columns(pl.lit(times.name).alias("step_law")) if isinstance(times, StepLaw) else found


def of_file(path: Path, table: pl.DataFrame, profiles: Sequence[str] = (), *, law: StepLaw | None = None) -> pl.DataFrame:
    """Return `limits` of a file of runs, whose `table` is from `sim.comparison.run_comparison.of_file`."""
    from model.logs import measured_runs as files

    found = files.load(path)
    return limits(found, table, profiles_of(profiles, found, path.parent) if law is None else law)


def concatenate(names: Sequence[str], found: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate the rows of several files; the name of the file is added to each line if there is more than one."""
    import polars as pl

    if len(found) > 1:
        named = pl.concat_str(pl.lit("{}"), pl.col("series"), separator=" ")
        found = [rows.with_columns(named.str.replace("{}", name, literal=True).str.strip_chars().alias("series"))
                 for name, rows in zip(names, found, strict=True)]  # fmt: skip
    return pl.concat(found)


# --- The claims ---------------------------------------------------------------------------------------------------------


def _of_methods(timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """Rows of the papers' formulas for the methods that have a `FORMULA_CHECK`; each claim along one axis."""
    for name in dict.fromkeys(each.decoding.method for each in timed):
        check = registry.parameters(name).FORMULA_CHECK
        formula = registry.method(name).paper_formula if check is not None else None
        if check is None or formula is None:
            continue
        own = [each for each in timed if each.decoding.method == name and each.decoding.settings.get("sequences", 1) == 1]
        if check.over_processes:
            own = [each for each in own if each.row["method"] == f"{name}-processes"]
        found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for (series, value), group, beside in _groups(own, plain, check.swept, check.rate):
            point = formula(_counted(group, cost))
            if point is not None:
                speeds = _speeds(group, beside)
                times = {name: 1 / speeds[name] for name in ("simulated", "measured")} if check.of_time else {}
                found[value is not None].append({
                    "claim": check.claim, "series": series, "x": float(point.x), "formula": point.value, **speeds, **times,
                    "x_name": point.x_name, "y_name": _TIME if check.of_time else _SPEED, "about": point.about,
                })  # fmt: skip
        yield from found[True] or found[False]  # settings without the swept parameter are a separate line


def _counted(group: Sequence[Compared], cost: ReplayedSeconds) -> ComparedRuns:
    decodings = [each.decoding for each in group]

    def layers() -> float:
        return sum(_layers(each, cost) for each in decodings) / sum(each.tokens for each in group)

    def ratio(role: str) -> float:
        return _pass(cost, role, group) / _pass(cost, "target", group)

    found = ComparedRuns(decodings, drafting(pooled(decodings)[0]), ratio, layers)
    return replace(found, times="of the step law") if isinstance(cost.hardware("target"), LawTarget) else found


def _bus(runs: MeasuredRuns, timed: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """Rows on the memory bus: slowdown of the main process's passes while other processes, each on its own core, are busy."""
    of = {role: each for role, each in cost.hardware_models.items() if isinstance(each, ProfileCosts)}
    for each in timed:
        own = runs.timed[each.row["decoding"]]
        spans = own.spans(own.median_repeat)
        if own.units < 2 or own.unit_kind != "processes" or not spans:
            continue
        slowed, free = (
            predict(each.decoding, over_processes(of, own, contention=held), own.units, record=True) for held in (True, False)
        )
        alone = beside = whole = 0.0
        cost.begin()
        for span in spans:
            if span.unit == 0 and span.what == "forward" and span.fate != "cancelled":
                alone += cost.record_pass(_pass_of(span)).total
                beside += at_once(spans, span)
                whole += span.seconds
        made = [span for span in spans if span.what != "forward" or span.fate != "cancelled"]
        nested = whole - main_process_seconds(made)["forward"]  # in which processes were started, between two of its layers
        yield {
            "claim": "bus", "series": _other(each.decoding, ()), "x": beside / whole, "formula": 1.0,
            "simulated": spent_by_main(slowed)["forward"] / spent_by_main(free)["forward"], "measured": (whole - nested) / alone,
            "noise": each.row["noise"], "x_name": "share of the main process's passes concurrent with another process (measured)",
            "y_name": "time of its passes relative to passes alone",
            "about": f"{own.units} processes, each on its own core; passes alone from the profile (measured)",
        }  # fmt: skip


def _pass_of(span: Span) -> Forward:
    """Reconstruct the pass of a span; only the number of its tokens matters."""
    return Forward(span.role, (0,) * span.width, span.position - span.width + 1, LayerSpan(span.first, span.last))


# --- What they are made of ----------------------------------------------------------------------------------------------


Group = tuple[tuple[str, Any], list[Compared], list[Compared]]


def _groups(timed: Sequence[Compared], plain: Sequence[Compared], along: str, rate: str = "") -> Iterator[Group]:
    """Group decodings of the same settings, with plain decodings of the same prompts; prompts without one are left out.

    The name of a group leaves out the parameter swept `along` and the forced `rate`. Without a parameter each decoding is a group.
    """
    found: dict[tuple[str, Any, Any, int], list[Compared]] = {}
    for number, each in enumerate(timed):
        value = each.decoding.settings[along] if along else None
        found.setdefault((_other(each.decoding, (along,)), value, each.row["forced"], 0 if along else number), []).append(each)
    for (series, value, forced, _), group in found.items():
        prompts = {each.row["prompt"] for each in plain}
        group = [each for each in group if each.row["prompt"] in prompts]
        beside = [each for each in plain if each.row["prompt"] in {own.row["prompt"] for own in group}]
        if group:
            words = [word for word in f"{series}, {forced}".split(", ") if word and word.partition("=")[0] != rate]
            yield (", ".join(words), value), group, beside


def _other(decoding: Decoding, known: Sequence[str]) -> str:
    """Settings of a decoding in words, without these parameters."""
    return ", ".join(word for word in changed_settings(decoding).split(", ") if word.partition("=")[0] not in known)


def _speeds(group: Sequence[Compared], plain: Sequence[Compared]) -> dict[str, float]:
    """Speed-up over plain decoding, by time per token, simulated and measured, with the noise of the measured one."""
    found = {}
    for name, column in (("simulated", "predicted_s"), ("measured", "measured_s")):
        found[name] = _pace(plain, column) / _pace(group, column)
    own, other = (float(np.median([each.row["noise"] for each in part])) for part in (group, plain))
    return found | {"noise": hypot(own, other)}


def _pace(timed: Sequence[Compared], column: str) -> float:
    """Mean time per token over these decodings [s]."""
    return float(sum(each.row[column] for each in timed) / sum(each.tokens for each in timed))


def _pass(cost: ReplayedSeconds, role: str, group: Sequence[Compared]) -> float:
    """Time of a full pass over one token at the middle position of these decodings, with its head [s]."""
    middle = int(np.median([len(each.decoding.prompt) + len(each.decoding.tokens) // 2 for each in group]))
    return cost.forward(Forward(role, (0,), middle, LayerSpan(0, cost.hardware(role).shape.layers), heads=1))


def _layers(decoding: Decoding, cost: ReplayedSeconds) -> int:
    """Number of layers run after the first commit, counted once per token of a pass."""
    played = predict(decoding, cost, record=True)
    return sum(
        (high - low) * each.width
        for each in played.run.intervals
        if each.what == "forward" and each.start >= played.first
        for low, high in each.layers_run
    )
