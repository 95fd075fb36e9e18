"""Where the formulas of the papers stop being true: each beside the simulation with the profile, and beside the measurement.

A formula gets what its paper gives it: rates, counted in these very runs, and costs as one constant or as a share of layers. The
simulation has the same outcomes and the time of every single pass. Claims that the runs have nothing on are left out, and so is a
choice without plain decoding of the same prompts beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.replayed_seconds import ReplayedSeconds
from model.hardware.profile import Profile
from model.hardware.profile_costs import ProfileCosts
from model.logs.decoding import Decoding, drafting
from model.logs.decoding import together as pooled
from model.logs.measured_runs import MeasuredRuns
from model.logs.replay import told
from model.logs.spans import Span, of_main
from model.logs.spans import beside as at_once
from model.methods import registry
from model.methods.bild import theory as bild
from model.methods.bild.algorithm import UNSURE
from model.methods.ppd import theory as ppd
from model.methods.speculative import theory as speculative
from model.steps import Forward, LayerSpan
from sim.comparison.predict import over_processes, predict, profiles_of, spent_by_main

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("claim", "series", "x", "formula", "simulated", "measured", "noise", "x_name", "y_name", "about")
"""Of what claim; which line of it; where; and the three values, with the noise of the measured one relative to it [-]."""
_SPEED, _TIME = "speed-up over plain decoding", "time over plain decoding"  # of a token behind the first commit


@dataclass(frozen=True)
class Compared:
    """A decoding, and what `compare` said of it [s]."""

    decoding: Decoding
    row: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Those behind the first commit, which the times are of."""
        return len(self.decoding.tokens) - len(self.decoding.commits[0].tokens)


def limits(runs: MeasuredRuns, table: pl.DataFrame, profiles: Mapping[str, Profile]) -> pl.DataFrame:
    """The rows of all claims that these runs say anything about (`COLUMNS`); none is a frame without rows.

    Parameters
    ----------
    table
        What `sim.comparison.predict.compare` made of the runs with the same profiles.
    profiles
        Of each model by its role.
    """
    import polars as pl

    cost = ReplayedSeconds({role: ProfileCosts(each) for role, each in profiles.items()})
    timed = [Compared(runs.timed[row["decoding"]].decoding, row) for row in table.iter_rows(named=True)]
    timed = [each for each in timed if len(each.decoding.commits) > 1 and each.tokens > 0]
    plain = [each for each in timed if each.decoding.method == registry.PLAIN]
    claims: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
        "verify": _verify, "ppd": _ppd, "skipdecode": _skipdecode, "bild": _bild, "bus": partial(_bus, runs),
    }  # fmt: skip
    other = "; a profile of ANOTHER machine, model or dtype" if any(table["mismatch"]) else ""
    rows = [
        {"claim": claim, **row, "about": row["about"] + other}
        for claim, rows_of in claims.items()
        for row in rows_of(timed, plain, cost)
    ]
    text = dict.fromkeys(("claim", "series", "x_name", "y_name", "about"), pl.String)
    return pl.DataFrame(rows, schema={name: text.get(name, pl.Float64) for name in COLUMNS})


def of_file(path: Path, table: pl.DataFrame, profiles: Sequence[str] = ()) -> pl.DataFrame:
    """The same of a file of runs, by what `sim.comparison.predict.of_file` made of it."""
    from model.logs import measured_runs as files

    found = files.load(path)
    return limits(found, table, profiles_of(profiles, found, path.parent))


def together(names: Sequence[str], found: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The rows of several files; where there are several, each line has the name of its own."""
    import polars as pl

    if len(found) > 1:
        named = pl.concat_str(pl.lit("{}"), pl.col("series"), separator=" ")
        found = [rows.with_columns(named.str.replace("{}", name, literal=True).str.strip_chars().alias("series"))
                 for name, rows in zip(names, found, strict=True)]  # fmt: skip
    return pl.concat(found)


# --- The claims ---------------------------------------------------------------------------------------------------------


def _verify(timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """Theorem 3.8 of [Leviathan2023], in which a pass over gamma + 1 tokens takes as long as over one."""
    own = [each for each in timed if each.decoding.method == "speculative" and each.decoding.settings.get("sequences", 1) == 1]
    for (series, length), group, beside in _groups(own, plain, "draft_length"):
        found = drafting(pooled(each.decoding for each in group)[0])
        if not found.tested:
            continue
        ratio = _pass(cost, "draft", group) / _pass(cost, "target", group)
        yield {
            "series": series, "x": float(length), "formula": float(speculative.speedup(found.acceptance_rate, length, ratio)),
            **_speeds(group, beside), "x_name": "draft length γ", "y_name": _SPEED,
            "about": "Theorem 3.8, with the accepted share of tested tokens counted at each length (measured)"
            f" and c = {ratio:.2f}, single passes over one token (measured, of the profiles)",
        }  # fmt: skip


def _ppd(timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """Theorem 4.1 of [Yang2024], in which early predictions, dispatch and promotion take no time: of runs on several processes."""
    for each in timed:
        decoding = each.decoding
        if each.row["method"] != "ppd-processes":
            continue
        layers, early = decoding.settings["layers"], decoding.settings["exit_layer"]
        if decoding.settings["form"] != "nested" and 2 * early < layers:
            continue  # which the theorem is not about
        beside = [other for other in plain if other.row["prompt"] == each.row["prompt"]]
        if not beside:
            continue
        # The last token's match shortens nothing; the first token is not looked at.
        matches = [commit.kind == "match" for commit in decoding.commits[:-1]]
        tokens, rate = len(matches) + 1, float(np.mean(matches))
        whole, first = (ppd.expected_latency(layers, early, count, rate) for count in (tokens, 1))
        yield {
            "series": _other(decoding, ()), "x": rate, "formula": float(layers * (tokens - 1) / (whole - first)),
            **_speeds([each], beside), "x_name": "match rate p of the decoding (measured)", "y_name": _SPEED,
            "about": "Theorem 4.1, with the matches of each decoding (measured)",
        }  # fmt: skip


def _skipdecode(timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """A token that goes through half of the layers takes half of the time."""
    own = [each for each in timed if each.decoding.method == "skipdecode" and each.decoding.settings.get("sequences", 1) == 1]
    for (series, least), group, beside in _groups(own, plain, "min_layers"):
        layers = sum(_layers(each.decoding, cost) for each in group) / sum(each.tokens for each in group)
        speeds = _speeds(group, beside)
        times = {name: 1 / speeds[name] for name in ("simulated", "measured")}
        yield {
            "series": series, "x": float(least), "formula": layers / group[0].decoding.settings["layers"],
            **speeds, **times, "x_name": "least layers of a token", "y_name": _TIME,
            "about": "the formula: layers of a token over all layers (counted)",
        }  # fmt: skip


def _bild(timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds) -> Iterator[dict[str, Any]]:
    """Big Little Decoder, where a pass of the small model costs its share of layers, as [Kim2023] compares models."""
    own = [each for each in timed if each.decoding.method == "bild" and each.decoding.settings["exit_layer"] is None]
    by_threshold = any(each.decoding.settings["fallback_threshold"] is not None for each in own)
    x_name = "fallback threshold" if by_threshold else "fallback rate (measured)"
    for (series, threshold), group, beside in _groups(own, plain, "fallback_threshold", "fallback_rate"):
        fallback, rollback = rates(each.decoding for each in group)
        if np.isnan(fallback) or by_threshold != (threshold is not None):
            continue
        settings = group[0].decoding.settings
        ratio = settings["draft_layers"] / settings["layers"]
        speed = bild.speedup(fallback, rollback, settings["max_draft_length"], ratio, variant=settings["variant"])
        yield {
            "series": series, "x": float(threshold) if by_threshold else fallback, "formula": float(speed),
            **_speeds(group, beside), "x_name": x_name, "y_name": _SPEED,
            "about": f"the formula: rates counted at each choice (measured), c = {settings['draft_layers']}/{settings['layers']}, "
            "the ratio of layers",
        }  # fmt: skip


def _bus(
    runs: MeasuredRuns, timed: Sequence[Compared], plain: Sequence[Compared], cost: ReplayedSeconds
) -> Iterator[dict[str, Any]]:
    """Processes with a core each, as if each had a memory of its own: what the main one's passes take while others are at work."""
    of = {role: each for role, each in cost.of.items() if isinstance(each, ProfileCosts)}
    for each in timed:
        own = runs.timed[each.row["decoding"]]
        spans = own.spans(own.middle)
        if own.units < 2 or own.unit_kind != "processes" or not spans:
            continue
        slowed, free = (
            predict(each.decoding, over_processes(of, own, contention=held), own.units, record=True) for held in (True, False)
        )
        alone = beside = whole = 0.0
        cost.begin()
        for span in spans:
            if span.unit == 0 and span.what == "forward" and span.fate != "cancelled":
                alone += cost.made(_pass_of(span)).total
                beside += at_once(spans, span)
                whole += span.seconds
        made = [span for span in spans if span.what != "forward" or span.fate != "cancelled"]
        nested = whole - of_main(made)["forward"]  # in which processes were started, between two of its layers
        yield {
            "series": _other(each.decoding, ()), "x": beside / whole, "formula": 1.0,
            "simulated": spent_by_main(slowed)["forward"] / spent_by_main(free)["forward"], "measured": (whole - nested) / alone,
            "noise": each.row["noise"], "x_name": "share of the main process's passes with another one at work (measured)",
            "y_name": "time of its passes over that of passes alone",
            "about": f"{own.units} processes, each with a core of its own; passes alone by the profile (measured)",
        }  # fmt: skip


def _pass_of(span: Span) -> Forward:
    """The pass that a span was of; of its tokens only the number matters."""
    return Forward(span.role, (0,) * span.width, span.position - span.width + 1, LayerSpan(span.first, span.last))


# --- What they are made of ----------------------------------------------------------------------------------------------


def rates(decodings: Iterable[Decoding]) -> tuple[float, float]:
    """How often a small model was unsure, of the times that it was asked, and how often a token was taken back of those judged.

    Counted from what was read, over all of these decodings of Big Little Decoder; nan, or 0, where nothing was asked.
    """
    asked: Counter[str] = Counter()
    unsure = back = 0
    for each in decodings:
        threshold = each.settings["fallback_threshold"]
        low = UNSURE if threshold is None else threshold
        asked.update(read.question.kind for read in each.reads)
        unsure += sum(read.answer < low for read in each.reads if read.question.kind == "confidence")
        back += sum(commit.kind == "rollback" for commit in each.commits)
    fallback = unsure / asked["confidence"] if asked["confidence"] else float("nan")
    return fallback, back / asked["distance"] if asked["distance"] else 0.0


Group = tuple[tuple[str, Any], list[Compared], list[Compared]]


def _groups(timed: Sequence[Compared], plain: Sequence[Compared], along: str, rate: str = "") -> Iterator[Group]:
    """Decodings of the same choice, with those of plain decoding on the same prompts; a prompt without one is left out.

    What they are called says neither the parameter that they are swept `along`, nor the `rate` that forced outcomes are.
    """
    found: dict[tuple[str, Any, Any], list[Compared]] = {}
    for each in timed:
        value = each.decoding.settings[along]
        found.setdefault((_other(each.decoding, (along,)), value, each.row["forced"]), []).append(each)
    for (series, value, forced), group in found.items():
        prompts = {each.row["prompt"] for each in plain}
        group = [each for each in group if each.row["prompt"] in prompts]
        beside = [each for each in plain if each.row["prompt"] in {own.row["prompt"] for own in group}]
        if group:
            words = [word for word in f"{series}, {forced}".split(", ") if word and word.partition("=")[0] != rate]
            yield (", ".join(words), value), group, beside


def _other(decoding: Decoding, known: Sequence[str]) -> str:
    """What tells this choice from others, but for these parameters."""
    return ", ".join(word for word in told(decoding).split(", ") if word.partition("=")[0] not in known)


def _speeds(group: Sequence[Compared], plain: Sequence[Compared]) -> dict[str, float]:
    """Speed over plain decoding, predicted and measured, each as time of a token, and how noisy the measured one is."""
    found = {}
    for name, column in (("simulated", "predicted_s"), ("measured", "measured_s")):
        found[name] = _pace(plain, column) / _pace(group, column)
    own, other = (float(np.median([each.row["noise"] for each in part])) for part in (group, plain))
    return found | {"noise": hypot(own, other)}


def _pace(timed: Sequence[Compared], column: str) -> float:
    """Time of a token, over all of these decodings [s]; each prompt counts as often as it was decoded."""
    return float(sum(each.row[column] for each in timed) / sum(each.tokens for each in timed))


def _pass(cost: ReplayedSeconds, role: str, group: Sequence[Compared]) -> float:
    """A whole pass over one token in the middle of these texts, with its head [s]."""
    middle = int(np.median([len(each.decoding.prompt) + len(each.decoding.tokens) // 2 for each in group]))
    return cost.forward(Forward(role, (0,), middle, LayerSpan(0, cost.hardware(role).shape.layers), heads=1))


def _layers(decoding: Decoding, cost: ReplayedSeconds) -> int:
    """Layers that were run for the tokens behind the first commit, once for each token of a pass."""
    played = predict(decoding, cost, record=True)
    return sum(
        (high - low) * each.width
        for each in played.run.intervals
        if each.what == "forward" and each.start >= played.first
        for low, high in each.layers_run
    )
