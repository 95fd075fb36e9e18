"""The verdict of a run, in a sentence: which choice is fastest, by how much over plain decoding, and how sure that is.

What tells points apart is a choice or a condition. A method, its parameters and how many devices it takes are chosen; the load,
lengths, acceptance, the models and the hardware are given, so under each of these the fastest choice is found anew.
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
"""A verdict is on a table that is read whole."""
MOST_SAID = 4
"""Conditions, choices or ties that a sentence lists."""
DEVICES = ("ways", "tensor_parallel", "units")
"""Of [cost] and [cluster] what is chosen; the rest is given."""
LOAD = {"batching": "continuous", "sequences": 1, "lengths": None}
"""How many sequences are decoded together and how, and what it is where nothing says it."""
GIVEN = (*LOAD, "layers", "draft_layers", "medium_layers", "prompt", "sequence", "beams", "sampled")
"""Parameters of methods that are of the load, the models or what is asked of them: conditions, not choices."""
COSTS = ("device", "profile", "shape", "prompt", "dtype", "busy")
"""Costs that are conditions where methods have their own; their models beside the target are part of the choice."""
DATA = ("task", "data_set")
PLAIN = "plain decoding"
OVER, OVER_ANY = "plain decoding on the same devices", "the fastest plain decoding"
VIEWS = ("formula", "paths", "events")
ADDED = "kernels only: what an engine adds is not included"


@dataclass(frozen=True)
class Choice:
    """One choice under one condition: how much faster than plain decoding it is [-], and between what bounds."""

    label: str
    speedup: float
    low: float
    high: float
    exact: bool = True
    agreement: float | None = None
    interval: str = ""
    """Of what the bounds are; empty where there are none."""

    def said(self) -> str:
        """The speed-up and its interval."""
        forms = (".2f", ".3f", ".4f") if self.speedup >= 0.1 else (".2g", ".4g")
        form = next((form for form in forms if f"{self.low:{form}}" != f"{self.high:{form}}"), forms[0])
        bounds = f"{self.low:{form}} to {self.high:{form}}"
        named = {"": "", "sampling": f" (95 % interval {bounds})", "inputs": f" (input uncertainty {bounds})"}
        return f"{self.speedup:{form}}x{named[self.interval]}"


@dataclass(frozen=True)
class Answer:
    """The verdict under one condition."""

    at: Mapping[str, Any]
    """What the condition is, of all that varies."""
    plain: str
    """Plain decoding, and on how many devices where that varies."""
    best: Choice | None
    """The fastest choice, which plain decoding may beat; None where nothing but plain decoding was run."""
    ties: tuple[Choice, ...] = ()
    """Others that the intervals do not tell from the fastest."""
    exact: Choice | None = None
    """The fastest whose output is the target's, where the fastest's is not."""

    @property
    def wins(self) -> str:
        """What is fastest: the choice, plain decoding, or either."""
        if self.best is None or self.best.high < 1:
            return self.plain
        return self.best.label if self.best.low > 1 else f"{self.best.label} or {self.plain}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
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
    """The sentence, and what it says.

    Parameters
    ----------
    text
        One line.
    answers
        The verdict under each condition.
    kernels_only
        Whether what an engine adds to a step is left out; None of costs that are not in seconds of hardware.
    """

    text: str
    answers: tuple[Answer, ...] = field(default=())
    kernels_only: bool | None = None

    def document(self) -> dict[str, Any]:
        """As JSON: the best choice of all conditions if it is one, and that of each."""
        each = [answer.document() for answer in self.answers]
        wins = {answer.wins for answer in self.answers}
        one = each[0] if len(each) == 1 else {}
        best = one.get("best") if one else next(iter(wins)) if len(wins) == 1 else None
        found = {"text": self.text, "best": best, **{name: one.get(name) for name in ("speedup", "low", "high")}}
        return found | {"over": _over(self.answers) if each else None, "kernels_only": self.kernels_only, "conditions": each[:100]}


def of(table: pl.LazyFrame | pl.DataFrame, tables: Mapping[str, Any]) -> Verdict:
    """The verdict on a table of results, whose points are those of a scenario's grid."""
    rows = _rows(table.lazy())
    if rows is None:
        return Verdict(f"No verdict: there are more than {MOST_POINTS:,} points; sweep fewer")
    if not rows:
        return Verdict("No verdict: no view says how fast anything is; ask for --view events")
    placed = _placed(rows, dict(tables))
    kernels = _kernels_only(rows)
    unit = "device" if kernels is not None else "unit"
    several = unit if len({row["held"] for row in rows}) > 1 else ""
    answers = []
    for _, own in itertools.groupby(sorted(placed, key=lambda point: point.key), key=lambda point: point.key):
        answers.append(_answer([*own], several))
    text = _of_one(answers[0]) + _load(tables) if len(answers) == 1 else _of_several(answers)
    text += _closing(rows, answers, kernels)
    return Verdict(text[0].upper() + text[1:], tuple(answers), kernels)


# --- rows ---------------------------------------------------------------------------------------------------------------


def _rows(table: pl.LazyFrame) -> list[dict[str, Any]] | None:
    """A row for each point, of the first view that has a value and can see all that its time depends on; None of too many."""
    if table.select(pl.col("point").n_unique()).collect(engine="streaming").item() > MOST_POINTS:
        return None
    names = table.collect_schema().names()
    wanted = {
        "point", "view", "method", "speedup", *(f"speedup_{end}" for end in ("low", "high", "input_low", "input_high")), "tpot_ms",
        "tpot_layers", "exact", "agreement", "held_units", "ways", "contended", "cost_missing", "cost_source",
    }  # fmt: skip
    chosen = table.select([name for name in names if name in wanted]).collect()
    found: dict[int, dict[str, Any]] = {}
    for row in sorted(chosen.to_dicts(), key=lambda row: (row["point"], VIEWS.index(row["view"]))):
        blind = row.get("contended") and row["view"] != "events"
        if row["point"] not in found and not blind and _number(row.get("speedup")) and row["speedup"] > 0:
            found[row["point"]] = row
    timed = [name for name in ("tpot_ms", "tpot_layers") if all(_number(row.get(name)) for row in found.values())]
    for row in found.values():
        row["time"] = row[timed[0]] if timed else 1 / row["speedup"]
        row["ways"] = int(row.get("ways") or 1)
        row["held"] = int(row.get("held_units") or row["ways"])
    return [*found.values()]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class _Point(NamedTuple):
    """A row where it stands: its condition as a key that sorts, and in words; its choice in words, and of which method."""

    key: tuple[int, ...]
    at: Mapping[str, Any]
    label: str
    method: int
    row: Mapping[str, Any]


def _placed(rows: Sequence[dict[str, Any]], tables: dict[str, Any]) -> list[_Point]:
    """Rows with their conditions and choices, by the axes of the grid and the tables of its methods."""
    grid = Grid(tables, check=False)
    own = scenario_file.method_tables(grid.base)
    names = {table.get("name") for table in own}
    axes = [(axis, axis.path.rpartition(".")[2], _chosen(axis.path, names)) for axis in grid.axes]
    signed = [_conditions(tables, table) for table in own]
    swept = {last for _, last, _ in axes}
    shared = [key for key in signed[0] if key not in swept and all(key in each for each in signed)]
    varying = [key for key in shared if len({repr(each[key]) for each in signed}) > 1]
    for spare in ("batching", "lengths"):  # what goes with another of these needs no word
        rest = [other for other in varying if other != spare]
        if len(_signatures(signed, rest)) == len(_signatures(signed, varying)):
            varying = rest
    signatures = [*_signatures(signed, varying)]
    where = np.array(np.unravel_index([row["point"] for row in rows], grid.shape)).T.tolist()
    found = []
    for row, (index, *places) in zip(rows, where, strict=True):
        table, at = dict(own[index]), {key: signed[index][key] for key in varying}
        key = [signatures.index(_signature(signed[index], varying))]
        for (axis, last, chosen), place in zip(axes, places, strict=True):
            if chosen:
                meant = axis.path.split(".")[1]  # a method by its name, or a parameter of all
                table |= {last: axis.values[place]} if meant not in names or meant == table.get("name") else {}
            elif len(axis.values) > 1:
                key.append(place)
                at[last if last not in at else axis.path] = axis.values[place]
        found.append(_Point(tuple(key), at, _label(table), index, row))
    # Methods that differ in what no label says, their own outcomes or costs, are told apart by their number.
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
    """The combinations of these that there are, in their order."""
    return dict.fromkeys(_signature(conditions, keys) for conditions in each)


def _chosen(path: str, names: Collection[Any]) -> bool:
    """Whether an axis is one of choices."""
    section, *rest = path.split(".")
    if section == "method" and len(rest) > 1 and rest[0] in names:
        rest = rest[1:]
    if section in ("cost", "cluster") or (section == "method" and rest[0] in scenario_file.OWN):
        return rest[-1] in DEVICES
    return section == "method" and rest[-1] not in GIVEN


def _conditions(tables: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """What a method's own tables say that is not chosen."""
    cost = scenario_file.cost_of(tables, table)
    cost = cost if isinstance(cost, Mapping) else {}
    laws = table.get("outcomes", tables.get("outcomes"))
    laws = laws if isinstance(laws, Mapping) else {}
    inner = [laws, *(each for each in laws.values() if isinstance(each, Mapping)), cost]
    found = {key: table.get(key, value) for key, value in LOAD.items()}
    found |= {"batching": LOAD["batching"]} if found["sequences"] == 1 else {}  # of one there is one way
    found |= {key: table[key] for key in ("layers", "beams", "sampled") if key in table}
    found |= {key: cost.get(key) for key in COSTS}
    return found | {key: value for each in inner for key, value in each.items() if key in DATA}


def _label(table: Mapping[str, Any]) -> str:
    """A method with what was chosen for it."""
    aliases = registry.parameters(table["name"]).ALIASES
    given = {aliases.get(key, key): value for key, value in table.items() if key not in ("name", "units", *scenario_file.OWN)}
    keys = [key for key in given if key not in GIVEN and key not in DEVICES]
    return ", ".join([str(table["name"]), *(f"{key} {_plain(given[key])}" for key in keys)])


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- one condition ------------------------------------------------------------------------------------------------------


def _answer(group: Sequence[_Point], unit: str) -> Answer:
    """The fastest of the choices under a condition, by time: on more devices plain decoding is another, too.

    Where choices differ in how many they take, `unit` is what these are called.
    """
    at, alike = group[0].at, True
    plain: dict[int, float] = {}
    for row in (point.row for point in group):
        time = plain.setdefault(row["ways"], row["time"] * row["speedup"])
        alike &= math.isclose(time, row["time"] * row["speedup"], rel_tol=1e-6)
    if not alike:  # costs of their own, in a unit of their own: only what is over plain decoding compares
        plain = {1: 1.0}
    quickest = min(plain, key=lambda ways: (plain[ways], ways))
    name = PLAIN + (f" on {_count(quickest, 'device')}" if len(plain) > 1 else "")
    choices: dict[str, Choice] = {}
    for _, _, label, _, row in group:
        if row["method"] == registry.PLAIN:
            continue
        where = f" on {_count(row['held'], unit)}" if unit else ""
        made = _choice(label + where, row, plain[quickest] / plain[row["ways"]] if alike else 1.0)
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
    """A row's speed-up over plain decoding, which is `factor` times what its own column compares with."""
    known = {kind: [row.get(f"speedup_{end}") for end in ends] for kind, ends in _BOUNDS.items()}
    if row["view"] == "formula":
        known.pop("sampling")
    found = {kind: [each for each in ends if _number(each)] for kind, ends in known.items()}
    kind = next((kind for kind in ("inputs", "sampling") if found.get(kind)), "")
    every = [row["speedup"], *(each for ends in found.values() for each in ends)]
    agreement = row.get("agreement")
    return Choice(
        label, row["speedup"] * factor, min(every) * factor, max(every) * factor, row.get("exact") is not False, agreement, kind
    )


_BOUNDS = {"sampling": ("low", "high"), "inputs": ("input_low", "input_high")}


def _count(count: int, unit: str) -> str:
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _of_one(answer: Answer) -> str:
    """The sentence on a single condition."""
    best = answer.best
    if best is None:
        return f"only {answer.plain} was run: there is nothing to compare"
    over = OVER if answer.plain == PLAIN else answer.plain
    if best.high < 1:
        return f"{answer.plain} is fastest: best other choice {best.label}: {best.said()}{_lossy(answer)}"
    if best.low <= 1:
        return f"about as fast as {over}: {best.label}: {best.said()}{_lossy(answer)}"
    tied = _listed([f"{each.label} ({each.speedup:.2f}x)" for each in answer.ties])
    more = f"; not told apart from it: {tied}" if tied else ""
    return f"fastest: {best.label}: {best.said()} over {over}{more}{_lossy(answer)}"


def _lossy(answer: Answer) -> str:
    best, exact = answer.best, answer.exact
    if best is None or best.exact:
        return ""
    known = "how much is not known" if best.agreement is None else f"{best.agreement:.1%} of its tokens are"
    other = f"; fastest of those that keep it: {exact.label} ({exact.speedup:.2f}x)" if exact else ""
    return f"; its output is not the target's ({known}){other}"


def _listed(words: Sequence[str]) -> str:
    more = [f"{len(words) - MOST_SAID} more"] if len(words) > MOST_SAID else []
    return ", ".join([*words[:MOST_SAID], *more])


def _over(answers: Iterable[Answer]) -> str:
    """What speed-ups are over: where choices differ in their devices, plain decoding on the fastest of these."""
    return OVER if all(answer.plain == PLAIN for answer in answers) else OVER_ANY


# --- several conditions -------------------------------------------------------------------------------------------------


def _of_several(answers: Sequence[Answer]) -> str:
    """The sentence on several conditions: one after another, in runs of those alike, or counted."""
    axes = [*dict.fromkeys(key for answer in answers for key in answer.at)]
    if len(axes) == 1:
        runs = _runs(answers, axes[0])
        if len(runs) <= MOST_SAID:
            said = "; ".join(f"{where}: {_won(own)}" for where, own in runs)
            return f"fastest by {axes[0]}, over {_over(answers)}: {said}{_some_lossy(answers)}"
    counted = Counter(answer.wins for answer in answers)
    where = f"conditions ({' x '.join(axes)}), over {_over(answers)}"
    if len(counted) == 1:
        return f"fastest in all {len(answers)} {where}: {_won(answers)}{_some_lossy(answers)}"
    said = _listed([f"{_won([a for a in answers if a.wins == wins])} in {count}" for wins, count in counted.most_common()])
    return f"fastest in {len(answers)} {where}: {said}{_some_lossy(answers)}"


def _runs(answers: Sequence[Answer], axis: str) -> list[tuple[str, list[Answer]]]:
    """Conditions of which the same is fastest: neighbours of numbers, all of names."""
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
    """What is fastest under these conditions, and by how much."""
    speeds = [answer.best.speedup for answer in own if answer.best is not None]
    if not speeds:
        return own[0].wins
    ends = " to ".join(dict.fromkeys(f"{speed:.2f}x" for speed in (min(speeds), max(speeds))))
    beaten = all(answer.best is not None and answer.best.high < 1 for answer in own)
    return f"{own[0].wins} (best other choice {ends})" if beaten else f"{own[0].wins} ({ends})"


def _some_lossy(answers: Iterable[Answer]) -> str:
    lossy = sorted({answer.best.label.partition(",")[0] for answer in answers if answer.best is not None and not answer.best.exact})
    return f"; the output of {', '.join(lossy)} is not the target's" if lossy else ""


# --- closing ------------------------------------------------------------------------------------------------------------


def _kernels_only(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    real = [row for row in rows if row.get("cost_source") is not None]
    return any("step" in (row.get("cost_missing") or "").split(", ") for row in real) if real else None


def _load(tables: Mapping[str, Any]) -> str:
    """How many sequences are decoded together, where that is one number and above 1."""
    swept = {path.rpartition(".")[2]: values for path, values in tables.get("sweep", {}).items()}
    known = {key: value for table in scenario_file.method_tables(tables) for key, value in _conditions(tables, table).items()}
    known |= {key: values[0] for key, values in swept.items() if isinstance(values, list) and len(values) == 1}
    return f"; sequences = {known['sequences']}" if known["sequences"] != 1 else ""


def _closing(rows: Sequence[Mapping[str, Any]], answers: Sequence[Answer], kernels: bool | None) -> str:
    """Whose times these are."""
    if all(answer.best is None for answer in answers):
        return ""
    if kernels:
        return f"; {ADDED}"
    if kernels is None:
        return "; costs are in layer-times"
    drafts = any("draft_step" in (row.get("cost_missing") or "").split(", ") for row in rows)
    return "; what an engine adds to a draft pass is not included" if drafts else ""
