"""One-sentence verdict of a run: the fastest choice, its speed-up over plain decoding, and the uncertainty.

Points of a grid differ by choices or by conditions. The method, its parameters and its number of devices are choices. The load,
lengths, acceptance, models and hardware are conditions: the verdict names the fastest choice for each combination of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from model.methods import registry
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid

MOST_POINTS = 200_000
"""Points up to which a verdict is made: the table is read into memory."""
MOST_NAMED = 4
"""Conditions, choices or ties listed in a sentence."""
DEVICES = ("tensor_parallel", "units")
"""Keys of [cost] and [cluster] that are choices; the other keys are conditions."""
LOAD = {"batching": "continuous", "sequences": 1, "lengths": None}
"""Keys that describe the batch, with their defaults."""
CONDITIONS = (*LOAD, "layers", "draft_layers", "medium_layers", "prompt", "sequence_length", "beams", "sampled")
"""Method parameters that describe the load, the models or the task: conditions, not choices."""
COSTS = ("device", "profile", "law", "shape", "prompt", "dtype", "busy")
"""Keys of a method's own [cost] that are conditions; its draft and medium models are part of the choice."""
DATA = ("task", "data_set")
PLAIN = "plain decoding"
BASELINE, FASTEST_BASELINE = "plain decoding on the same devices", "the fastest plain decoding"
VIEWS = ("formula", "paths", "events")
KERNELS_ONLY = "kernels only: the engine's overhead is not included"


@dataclass(frozen=True)
class Choice:
    """One choice under one condition: its speed-up over plain decoding [-] and the bounds of the speed-up."""

    label: str
    speedup: float
    low: float
    high: float
    exact: bool = True
    agreement: float | None = None
    interval: str = ""
    """Source of the bounds: `sampling` or `inputs`; empty where there are none."""
    point: int | None = None
    """Grid point with this speed-up."""

    def sentence(self) -> str:
        """Return the speed-up and its interval in words."""
        forms = (".2f", ".3f", ".4f") if self.speedup >= 0.1 else (".2g", ".4g")
        form = next((form for form in forms if f"{self.low:{form}}" != f"{self.high:{form}}"), forms[0])
        bounds = f"{self.low:{form}} to {self.high:{form}}"
        named = {"": "", "sampling": f" (95 % interval {bounds})", "inputs": f" (input uncertainty {bounds})"}
        return f"{self.speedup:{form}}x{named[self.interval]}"


@dataclass(frozen=True)
class Answer:
    """The verdict under one condition."""

    at: Mapping[str, Any]
    """The condition: the value of each varying key."""
    plain: str
    """Plain decoding, with its number of devices where that varies."""
    best: Choice | None
    """The fastest choice other than plain decoding, which may still be slower than it; None if only plain decoding was run."""
    ties: tuple[Choice, ...] = ()
    """Other choices whose intervals overlap the fastest's."""
    exact: Choice | None = None
    """The fastest exact choice, where the fastest choice is not exact."""

    @property
    def wins(self) -> str:
        """Name of the fastest: the choice, plain decoding, or both if the interval contains 1."""
        if self.best is None or self.best.high < 1:
            return self.plain
        return self.best.label if self.best.low > 1 else f"{self.best.label} or {self.plain}"

    def document(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        best, ahead = self.best, self.best is not None and self.best.high >= 1
        found: dict[str, Any] = {"at": dict(self.at), "best": self.wins if best is None or not ahead else best.label}
        found |= {"speedup": best.speedup if best and ahead else 1.0}
        found |= {name: getattr(best, name) if best and ahead and best.interval else None for name in ("low", "high")}
        found |= {"tied_with_plain": bool(best and best.low <= 1 <= best.high), "ties": [each.label for each in self.ties]}
        found |= {"exact": best.exact if best and ahead else True}
        found |= {"next": None if ahead or best is None else {"best": best.label, "speedup": best.speedup}}
        return found


@dataclass(frozen=True)
class Verdict:
    """The verdict as a sentence and as data.

    Parameters
    ----------
    text
        One line.
    answers
        The verdict under each condition.
    kernels_only
        True where the engine's overhead per step is not included; None where costs are not in seconds of hardware.
    """

    text: str
    answers: tuple[Answer, ...] = field(default=())
    kernels_only: bool | None = None

    def document(self) -> dict[str, Any]:
        """Return a JSON object: the best choice, if all conditions have the same, and the verdict under each condition."""
        each = [answer.document() for answer in self.answers]
        wins = {answer.wins for answer in self.answers}
        one = each[0] if len(each) == 1 else {}
        best = one.get("best") if one else next(iter(wins)) if len(wins) == 1 else None
        found = {"text": self.text, "best": best, **{name: one.get(name) for name in ("speedup", "low", "high")}}
        return found | {"over": _over(self.answers) if each else None, "kernels_only": self.kernels_only, "conditions": each[:100]}


def of(table: pl.LazyFrame | pl.DataFrame, tables: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a table of results; `tables` is the scenario, whose grid has the table's points."""
    silent: list[str] = []
    rows = _rows(table.lazy(), silent)
    if rows is None:
        return Verdict(f"No verdict: there are more than {MOST_POINTS:,} points; sweep fewer")
    if not rows:
        return Verdict("No verdict: no view has a speed-up; use --view events")
    placed = _placed(rows, dict(tables))
    kernels = _kernels_only(rows)
    unit = "device" if kernels is not None else "unit"
    several = unit if len({row["held"] for row in rows}) > 1 else ""
    answers = []
    for _, own in itertools.groupby(sorted(placed, key=lambda point: point.key), key=lambda point: point.key):
        answers.append(_answer([*own], several))
    text = _of_one(answers[0]) + _load(tables) if len(answers) == 1 else _of_several(answers)
    text += _left_out(silent) + _closing(rows, answers, kernels)
    return Verdict(text[0].upper() + text[1:], tuple(answers), kernels)


# --- rows ---------------------------------------------------------------------------------------------------------------


def _left_out(silent: Sequence[str]) -> str:
    """Closing words on methods that are in the tables without a value."""
    return f"; some points have no value in these views and are not compared: {', '.join(dict.fromkeys(silent))}" if silent else ""


def _rows(table: pl.LazyFrame, silent: list[str] | None = None) -> list[dict[str, Any]] | None:
    """One row per point, from the first view that has a value and models waiting where there is any; None for too many points.

    Methods of points without a value are appended to `silent`.
    """
    if table.select(pl.col("point").n_unique()).collect(engine="streaming").item() > MOST_POINTS:
        return None
    names = table.collect_schema().names()
    wanted = {
        "point", "view", "method", "speedup", *(f"speedup_{end}" for end in ("low", "high", "input_low", "input_high")), "tpot_ms",
        "tpot_layers", "exact", "agreement", "reserved_units", "tensor_parallel", "contended", "cost_missing", "cost_source",
    }  # fmt: skip
    chosen = table.select([name for name in names if name in wanted]).collect()
    found: dict[int, dict[str, Any]] = {}
    rows = sorted(chosen.to_dicts(), key=lambda row: (row["point"], VIEWS.index(row["view"])))
    for row in rows:
        blind = row.get("contended") and row["view"] != "events"
        if row["point"] not in found and not blind and _number(row.get("speedup")) and row["speedup"] > 0:
            found[row["point"]] = row
    if silent is not None:
        silent += [row["method"] for row in rows if row["point"] not in found]
    timed = [name for name in ("tpot_ms", "tpot_layers") if all(_number(row.get(name)) for row in found.values())]
    for row in found.values():
        row["time"] = row[timed[0]] if timed else 1 / row["speedup"]
        row["tensor_parallel"] = int(row.get("tensor_parallel") or 1)
        row["held"] = int(row.get("reserved_units") or row["tensor_parallel"])
    return [*found.values()]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class _Point(NamedTuple):
    """A row with its condition (as a sort key, and by name), the label of its choice, and the number of its method."""

    key: tuple[int, ...]
    at: Mapping[str, Any]
    label: str
    method: int
    row: Mapping[str, Any]


def _placed(rows: Sequence[dict[str, Any]], tables: dict[str, Any]) -> list[_Point]:
    """Assign each row its condition and choice, from the axes of the grid and the tables of its methods."""
    grid = Grid(tables, check=False)
    own = scenario_file.method_tables(grid.base)
    names = {table.get("name") for table in own}
    axes = [(axis, axis.path.rpartition(".")[2], _chosen(axis.path, names)) for axis in grid.axes]
    signed = [_conditions(tables, table) for table in own]
    swept = {last for _, last, _ in axes}
    shared = [key for key in signed[0] if key not in swept and all(key in each for each in signed)]
    varying = [key for key in shared if len({repr(each[key]) for each in signed}) > 1]
    for spare in ("batching", "lengths"):  # a key that follows from the other keys is not named
        rest = [other for other in varying if other != spare]
        if len(_signatures(signed, rest)) == len(_signatures(signed, varying)):
            varying = rest
    signatures = [*_signatures(signed, varying)]
    where = np.array(np.unravel_index([row["point"] for row in rows], grid.shape)).T.tolist()
    found = []
    for row, (index, *values) in zip(rows, where, strict=True):
        table, at = dict(own[index]), {key: signed[index][key] for key in varying}
        key = [signatures.index(_signature(signed[index], varying))]
        for (axis, last, chosen), value in zip(axes, values, strict=True):
            if chosen:
                meant = axis.path.split(".")[1]  # a method by its name, or a parameter of all
                table |= {last: axis.values[value]} if meant not in names or meant == table.get("name") else {}
            elif len(axis.values) > 1:
                key.append(value)
                at[last if last not in at else axis.path] = axis.values[value]
        found.append(_Point(tuple(key), at, _label(table), index, row))
    # Methods that differ only in their own outcomes or costs have the same label: their number distinguishes them.
    using: dict[tuple[Any, str], set[int]] = {}
    for point in found:
        using.setdefault((point.key, point.label), set()).add(point.method)
    return [
        point if len(using[point.key, point.label]) == 1 else point._replace(label=f"{point.label} (method {point.method + 1})")
        for point in found
    ]


def _signature(conditions: Mapping[str, Any], keys: Iterable[str]) -> str:
    return repr([conditions[key] for key in keys])


def _signatures(each: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, None]:
    """Distinct combinations of the keys' values, in order of appearance."""
    return dict.fromkeys(_signature(conditions, keys) for conditions in each)


def _chosen(path: str, names: Collection[Any]) -> bool:
    """Return whether an axis consists of choices, not conditions."""
    section, *rest = path.split(".")
    if section == "method" and len(rest) > 1 and rest[0] in names:
        rest = rest[1:]
    if section in ("cost", "cluster") or (section == "method" and rest[0] in scenario_file.OVERRIDABLE):
        return rest[-1] in DEVICES
    return section == "method" and rest[-1] not in CONDITIONS


def _conditions(tables: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions in a method's own tables."""
    cost = scenario_file.cost_of(tables, table)
    cost = cost if isinstance(cost, Mapping) else {}
    laws = table.get("outcomes", tables.get("outcomes"))
    laws = laws if isinstance(laws, Mapping) else {}
    inner = [laws, *(each for each in laws.values() if isinstance(each, Mapping)), cost]
    found = {key: table.get(key, value) for key, value in LOAD.items()}
    found |= {"batching": LOAD["batching"]} if found["sequences"] == 1 else {}  # batching makes no difference for one sequence
    found |= {key: table[key] for key in ("layers", "beams", "sampled") if key in table}
    found |= {key: cost.get(key) for key in COSTS}
    return found | {key: value for each in inner for key, value in each.items() if key in DATA}


def _label(table: Mapping[str, Any]) -> str:
    """Name of a method with its chosen parameters."""
    aliases = registry.parameters(table["name"]).ALIASES
    others = "name", "units", *scenario_file.OVERRIDABLE
    given = {aliases.get(key, key): value for key, value in table.items() if key not in others}
    keys = [key for key in given if key not in CONDITIONS and key not in DEVICES]
    return ", ".join([str(table["name"]), *(f"{key} {_plain(given[key])}" for key in keys)])


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- one condition ------------------------------------------------------------------------------------------------------


def _answer(group: Sequence[_Point], unit: str) -> Answer:
    """Return the fastest choice under a condition, by time: the time of plain decoding depends on the number of devices.

    `unit` names what a choice reserves, "device" or "unit"; empty where all choices reserve the same number.
    """
    at, alike = group[0].at, True
    plain: dict[int, float] = {}
    for row in (point.row for point in group):
        time = plain.setdefault(row["tensor_parallel"], row["time"] * row["speedup"])
        alike &= math.isclose(time, row["time"] * row["speedup"], rel_tol=1e-6)
    if not alike:  # methods have separate costs in different units of time: only speed-ups can be compared
        plain = {1: 1.0}
    quickest = min(plain, key=lambda tensor_parallel: (plain[tensor_parallel], tensor_parallel))
    name = PLAIN + (f" on {_count(quickest, 'device')}" if len(plain) > 1 else "")
    choices: dict[str, Choice] = {}
    for _, _, label, _, row in group:
        if row["method"] == registry.PLAIN:
            continue
        where = f" on {_count(row['held'], unit)}" if unit else ""
        made = _choice(label + where, row, plain[quickest] / plain[row["tensor_parallel"]] if alike else 1.0)
        if made.label not in choices or made.speedup > choices[made.label].speedup:
            choices[made.label] = made
    ordered = sorted(choices.values(), key=lambda each: (-each.speedup, each.label))
    if not ordered:
        return Answer(at, name, None)
    best = ordered[0]
    near = [each for each in ordered[1:] if each.speedup >= best.low * (1 - 1e-9) and best.speedup <= each.high * (1 + 1e-9)]
    exact = None if best.exact else next((each for each in ordered if each.exact), None)
    return Answer(at, name, best, tuple(near), exact)


def _choice(label: str, row: Mapping[str, Any], factor: float) -> Choice:
    """Return the choice of a row, with its speed-up and bounds multiplied by `factor`.

    `factor` is the time of the fastest plain decoding over that of plain decoding on the row's devices.
    """
    known = {kind: [row.get(f"speedup_{end}") for end in ends] for kind, ends in _BOUNDS.items()}
    if row["view"] == "formula":
        known.pop("sampling")
    found = {kind: [each for each in ends if _number(each)] for kind, ends in known.items()}
    kind = next((kind for kind in ("inputs", "sampling") if found.get(kind)), "")
    every = [row["speedup"], *(each for ends in found.values() for each in ends)]
    agreement = row.get("agreement")
    return Choice(
        label, row["speedup"] * factor, min(every) * factor, max(every) * factor, row.get("exact") is not False, agreement, kind,
        row.get("point"),
    )  # fmt: skip


_BOUNDS = {"sampling": ("low", "high"), "inputs": ("input_low", "input_high")}


def _count(count: int, unit: str) -> str:
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _of_one(answer: Answer) -> str:
    """Sentence for a single condition."""
    best = answer.best
    if best is None:
        return f"only {answer.plain} was run: there is nothing to compare"
    over = BASELINE if answer.plain == PLAIN else answer.plain
    if best.high < 1:
        return f"{answer.plain} is fastest: best other choice {best.label}: {best.sentence()}{_lossy(answer)}"
    if best.low <= 1:
        return f"about as fast as {over}: {best.label}: {best.sentence()}{_lossy(answer)}"
    tied = _listed([f"{each.label} ({each.speedup:.2f}x)" for each in answer.ties])
    more = f"; tied with it within the uncertainty: {tied}" if tied else ""
    return f"fastest: {best.label}: {best.sentence()} over {over}{more}{_lossy(answer)}"


def _lossy(answer: Answer) -> str:
    best, exact = answer.best, answer.exact
    if best is None or best.exact:
        return ""
    agreement = "token agreement is not measured" if best.agreement is None else f"{best.agreement:.1%} of the tokens are equal"
    other = f"; fastest exact method: {exact.label} ({exact.speedup:.2f}x)" if exact else ""
    return f"; not exact, its output differs from the target's ({agreement}){other}"


def _listed(words: Sequence[str]) -> str:
    more = [f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return ", ".join([*words[:MOST_NAMED], *more])


def _over(answers: Iterable[Answer]) -> str:
    """Baseline of the speed-ups: where choices differ in their devices, plain decoding on the fastest number of them."""
    return BASELINE if all(answer.plain == PLAIN for answer in answers) else FASTEST_BASELINE


# --- several conditions -------------------------------------------------------------------------------------------------


def _of_several(answers: Sequence[Answer]) -> str:
    """Sentence for several conditions: listed in runs with the same winner, or the winners counted."""
    axes = [*dict.fromkeys(key for answer in answers for key in answer.at)]
    if len(axes) == 1:
        runs = _runs(answers, axes[0])
        if len(runs) <= MOST_NAMED:
            winners = "; ".join(f"{where}: {_won(own)}" for where, own in runs)
            return f"fastest by {axes[0]}, over {_over(answers)}: {winners}{_some_lossy(answers)}"
    counted = Counter(answer.wins for answer in answers)
    where = f"conditions ({' x '.join(axes)}), over {_over(answers)}"
    if len(counted) == 1:
        return f"fastest in all {len(answers)} {where}: {_won(answers)}{_some_lossy(answers)}"
    winners = _listed([f"{_won([a for a in answers if a.wins == wins])} in {count}" for wins, count in counted.most_common()])
    return f"fastest in {len(answers)} {where}: {winners}{_some_lossy(answers)}"


def _runs(answers: Sequence[Answer], axis: str) -> list[tuple[str, list[Answer]]]:
    """Group conditions by their fastest choice: neighbouring values of a numeric axis, any values of a named one."""
    values = [answer.at.get(axis) for answer in answers]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        won: dict[str, list[Answer]] = {}
        for answer in answers:
            won.setdefault(answer.wins, []).append(answer)
        return [(", ".join(_plain(each.at.get(axis)) for each in own), own) for own in won.values()]
    ordered = sorted(answers, key=lambda answer: float(answer.at[axis]))
    runs = [[*own] for _, own in itertools.groupby(ordered, key=lambda answer: answer.wins)]
    return [(" to ".join(dict.fromkeys(_plain(each.at[axis]) for each in (own[0], own[-1]))), own) for own in runs]


def _won(own: Sequence[Answer]) -> str:
    """Name of the fastest under these conditions, with the range of its speed-up."""
    speeds = [answer.best.speedup for answer in own if answer.best is not None]
    if not speeds:
        return own[0].wins
    ends = " to ".join(dict.fromkeys(f"{speed:.2f}x" for speed in (min(speeds), max(speeds))))
    beaten = all(answer.best is not None and answer.best.high < 1 for answer in own)
    return f"{own[0].wins} (best other choice {ends})" if beaten else f"{own[0].wins} ({ends})"


def _some_lossy(answers: Iterable[Answer]) -> str:
    lossy = sorted({answer.best.label.partition(",")[0] for answer in answers if answer.best is not None and not answer.best.exact})
    return f"; not exact, output differs from the target's: {', '.join(lossy)}" if lossy else ""


# --- closing ------------------------------------------------------------------------------------------------------------


def _kernels_only(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    real = [row for row in rows if row.get("cost_source") is not None]
    return any("step" in (row.get("cost_missing") or "").split(", ") for row in real) if real else None


def _load(tables: Mapping[str, Any]) -> str:
    """Sequences of the batch, if all points have the same number above 1."""
    swept = {path.rpartition(".")[2]: values for path, values in tables.get("sweep", {}).items()}
    known = {key: value for table in scenario_file.method_tables(tables) for key, value in _conditions(tables, table).items()}
    known |= {key: values[0] for key, values in swept.items() if isinstance(values, list) and len(values) == 1}
    return f"; sequences = {known['sequences']}" if known["sequences"] != 1 else ""


def _closing(rows: Sequence[Mapping[str, Any]], answers: Sequence[Answer], kernels: bool | None) -> str:
    """Closing words on the costs: layer-times, or what a measured time does not include."""
    if all(answer.best is None for answer in answers):
        return ""
    if kernels:
        return f"; {KERNELS_ONLY}"
    if kernels is None:
        return "; costs are in layer-times"
    drafts = any("draft_step" in (row.get("cost_missing") or "").split(", ") for row in rows)
    return "; the engine's overhead of draft passes is not included" if drafts else ""
