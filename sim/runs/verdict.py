"""One-sentence verdict of a run: the fastest choice, its speed-up over plain decoding, and the uncertainty.

Points of a grid differ by choices or by conditions. The method, its parameters and its number of devices are choices. The load,
lengths, acceptance, models and hardware are conditions: the verdict names the fastest choice for each combination of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from model.methods import registry
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid

MOST_POINTS = 1_000_000
"""Points up to which a verdict is made: the table is read into memory."""
MOST_NAMED = 4
"""Conditions, choices or ties listed in a sentence."""
MOST_DOCUMENTED = 100
"""Conditions in the JSON document of a verdict."""
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


class _Conditions(Sequence[Mapping[str, Any]]):
    """Conditions of points, by name: those in the tables of a point's method, and the values of the axes that are conditions."""

    def __init__(self, methods: Sequence[Mapping[str, Any]], axes: Sequence[tuple[str, Sequence[Any]]], where: np.ndarray) -> None:
        self.methods, self.axes, self.where = methods, axes, where
        self.names = [*methods[0], *(name for name, _ in axes)]

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, index: Any) -> Any:
        method, *values = self.where[index].tolist()
        return {**self.methods[method], **{name: axis[value] for (name, axis), value in zip(self.axes, values, strict=True)}}

    def values(self, name: str) -> list[Any]:
        """Value of one key in each condition."""
        for number, (axis, values) in enumerate(self.axes, 1):
            if axis == name:
                return [values[index] for index in self.where[:, number].tolist()]
        return [self.methods[method].get(name) for method in self.where[:, 0].tolist()]

    def taken(self, indices: np.ndarray) -> _Conditions:
        """The conditions with these indices."""
        return _Conditions(self.methods, self.axes, self.where[indices])


class ConditionAnswers(Sequence[Answer]):
    """The verdict under each condition, made from columns when it is asked for.

    Parameters
    ----------
    columns
        A row per condition: `plain` (name of plain decoding), and the fastest choice's `label`, `speedup`, `low`, `high` and
        `exact`, null where only plain decoding was run; `first` and `last` are the range of its choices in `choices`.
    choices
        Of each condition the fastest choice, those tied with it (`tied`), and the fastest other exact one, in this order of speed.
    at
        The conditions.
    """

    def __init__(self, columns: pl.DataFrame, choices: pl.DataFrame, at: _Conditions) -> None:
        self.columns, self.choices, self.at = columns, choices, at

    def __len__(self) -> int:
        return self.columns.height

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        row = self.columns.row(index, named=True)
        return self._answer(index, row, [] if row["label"] is None else self.choices[row["first"] : row["last"]].to_dicts())

    def __iter__(self) -> Iterator[Answer]:
        choices = self.choices.to_dicts()
        for index, row in enumerate(self.columns.iter_rows(named=True)):
            yield self._answer(index, row, [] if row["label"] is None else choices[row["first"] : row["last"]])

    def _answer(self, index: int, row: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Answer:
        if not own:
            return Answer(self.at[index], row["plain"], None)
        best, others = _choice(own[0]), own[1:]
        ties = tuple(_choice(each) for each in others if each["tied"])
        exact = None if best.exact else next((_choice(each) for each in others if each["exact"]), None)
        return Answer(self.at[index], row["plain"], best, ties, exact)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def wins(self) -> list[str]:
        """Name of the fastest under each condition; see `Answer.wins`."""
        beaten, ahead = pl.col("label").is_null() | (pl.col("high") < 1), pl.col("low") > 1
        tied = pl.format("{} or {}", "label", "plain")
        wins = pl.when(beaten).then("plain").when(ahead).then("label").otherwise(tied)
        return self.columns.select(wins.alias("wins")).to_series().to_list()


_NO_ANSWERS = ConditionAnswers(
    pl.DataFrame(schema={"plain": pl.String, "label": pl.String}), pl.DataFrame(), _Conditions([{}], [], np.empty((0, 1)))
)


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
    answers: ConditionAnswers = field(default_factory=lambda: _NO_ANSWERS)
    kernels_only: bool | None = None

    def document(self) -> dict[str, Any]:
        """Return a JSON object: the best choice, if all conditions have the same, and the verdict under each condition."""
        each = [answer.document() for answer in self.answers[:MOST_DOCUMENTED]]
        wins = {*self.answers.wins} if self.answers else set[str]()
        one = each[0] if len(self.answers) == 1 else {}
        best = one.get("best") if one else next(iter(wins)) if len(wins) == 1 else None
        found = {"text": self.text, "best": best, **{name: one.get(name) for name in ("speedup", "low", "high")}}
        over = _over(self.answers) if self.answers else None
        return found | {"over": over, "kernels_only": self.kernels_only, "conditions": each}


def of(table: pl.LazyFrame | pl.DataFrame, tables: Mapping[str, Any]) -> Verdict:
    """Return the verdict on a table of results; `tables` is the scenario, whose grid has the table's points."""
    compared = _compared(table.lazy())
    if compared is None:
        return Verdict(f"No verdict: there are more than {MOST_POINTS:,} points; sweep fewer")
    points, silent = compared
    if not points.height:
        return Verdict("No verdict: no view has a speed-up; use --view events")
    kernels = _kernels_only(points)
    unit = "device" if kernels is not None else "unit"
    answers = _answers(_placed(points, dict(tables)), unit if points["held"].n_unique() > 1 else "")
    text = _of_one(answers[0]) + _load(tables) if len(answers) == 1 else _of_several(answers)
    text += _left_out(silent) + _closing(points, answers, kernels)
    return Verdict(text[0].upper() + text[1:], answers, kernels)


# --- points -------------------------------------------------------------------------------------------------------------


def _left_out(silent: Sequence[str]) -> str:
    """Closing words on methods that are in the tables without a value."""
    return f"; some points have no value in these views and are not compared: {', '.join(silent)}" if silent else ""


_COLUMNS = {
    "point": pl.Int64, "view": pl.String, "method": pl.String, "speedup": pl.Float64,
    **{f"speedup_{end}": pl.Float64 for end in ("low", "high", "input_low", "input_high")}, "tpot_ms": pl.Float64,
    "tpot_layers": pl.Float64, "exact": pl.Boolean, "agreement": pl.Float64, "reserved_units": pl.Float64,
    "tensor_parallel": pl.Int64, "contended": pl.Boolean, "cost_missing": pl.String, "cost_source": pl.String,
}  # fmt: skip
"""Columns of results that a verdict uses; one that is missing has no values."""


def _compared(table: pl.LazyFrame) -> tuple[pl.DataFrame, list[str]] | None:
    """One row per point, from the first view that has a value and models waiting where there is any; None for too many points.

    Second, the methods of points without a value. Rows have the time per token [-, compared only within a condition], the tensor
    parallel size and the units held.
    """
    height = table.select(pl.len()).collect().item()
    if height > MOST_POINTS * len(VIEWS):  # a point has at most a row per view
        return None
    if height > MOST_POINTS and table.select(pl.col("point").n_unique()).collect(engine="streaming").item() > MOST_POINTS:
        return None
    names = table.collect_schema().names()
    columns = [(pl.col(name) if name in names else pl.lit(None)).cast(kind).alias(name) for name, kind in _COLUMNS.items()]
    order = pl.col("view").replace_strict({view: index for index, view in enumerate(VIEWS)}, return_dtype=pl.Int8)
    rows = table.select(columns).collect().sort("point", order, maintain_order=True)
    blind = pl.col("contended").fill_null(False) & (pl.col("view") != "events")
    valued = pl.col("speedup").is_finite().fill_null(False) & (pl.col("speedup") > 0) & ~blind
    points = rows.filter(valued).unique("point", keep="first", maintain_order=True)
    silent = rows.join(points, "point", how="anti", maintain_order="left")["method"].unique(maintain_order=True).to_list()
    timed = [name for name in ("tpot_ms", "tpot_layers") if points[name].is_finite().fill_null(False).all()]
    tensor_parallel, held = (pl.when(pl.col(name) != 0).then(pl.col(name)) for name in ("tensor_parallel", "reserved_units"))
    points = points.with_columns(tensor_parallel.fill_null(1), time=pl.col(timed[0]) if timed else 1 / pl.col("speedup"))
    return points.with_columns(held=pl.coalesce(held.cast(pl.Int64), "tensor_parallel")), silent


def _placed(points: pl.DataFrame, tables: dict[str, Any]) -> tuple[pl.DataFrame, _Conditions]:
    """Assign each point its condition and choice, from the axes of the grid and the tables of its methods.

    Columns `condition` (a number in the order of the conditions), `label` and `choice` (a number in the order of the labels) are
    added. Second, the conditions of the points.
    """
    grid = Grid(tables, check=False)
    own = scenario_file.method_tables(grid.base)
    names = {table.get("name") for table in own}
    chosen = [_chosen(axis.path, names) for axis in grid.axes]
    signed = [_conditions(tables, table) for table in own]
    swept = {axis.path.rpartition(".")[2] for axis in grid.axes}
    shared = [key for key in signed[0] if key not in swept and all(key in each for each in signed)]
    varying = [key for key in shared if len({repr(each[key]) for each in signed}) > 1]
    for spare in ("batching", "lengths"):  # a key that follows from the other keys is not named
        rest = [other for other in varying if other != spare]
        if len(_signatures(signed, rest)) == len(_signatures(signed, varying)):
            varying = rest
    signatures = [*_signatures(signed, varying)]
    signature = np.array([signatures.index(_signature(each, varying)) for each in signed])
    method, *where = (np.asarray(index) for index in np.unravel_index(points["point"].to_numpy(), grid.shape))
    conditions = [number for number, axis in enumerate(grid.axes) if not chosen[number] and len(axis.values) > 1]
    condition = _numbered([signature[method], *(where[number] for number in conditions)])
    named: dict[str, Sequence[Any]] = {}
    for number in conditions:
        path = grid.axes[number].path
        last = path.rpartition(".")[2]
        named[last if last not in named and last not in varying else path] = grid.axes[number].values
    met = _Conditions(
        [{key: each[key] for key in varying} for each in signed], [*named.items()],
        np.stack([method, *(where[number] for number in conditions)], axis=1),
    )  # fmt: skip
    choices = [number for number in range(len(grid.axes)) if chosen[number]]
    choice = _numbered([method, *(where[number] for number in choices)])
    firsts = np.unique(choice, return_index=True)[1].tolist()
    labels = []
    for index in firsts:  # by the number of the choice
        table = dict(own[method[index]])
        for number in choices:
            meant, last = grid.axes[number].path.split(".")[1], grid.axes[number].path.rpartition(".")[2]
            if meant not in names or meant == table.get("name"):  # a method by its name, or a parameter of all
                table[last] = grid.axes[number].values[int(where[number][index])]
        labels.append(_label(table))
    placed = points.with_columns(condition=pl.Series(condition), method_number=pl.Series(method))
    placed = placed.with_columns(label=pl.Series(labels, dtype=pl.String).gather(pl.Series(choice)))
    # Methods that differ only in their own outcomes or costs have the same label: their number distinguishes them.
    if len(set(zip(labels, method[firsts].tolist(), strict=True))) > len(set(labels)):
        several = pl.col("method_number").n_unique().over("condition", "label") > 1
        numbered = pl.format("{} (method {})", "label", pl.col("method_number") + 1)
        placed = placed.with_columns(label=pl.when(several).then(numbered).otherwise("label"))
    return placed, met


def _numbered(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Number of each combination of whole numbers, in their order: 0, 1, ...

    >>> _numbered([np.array([1, 0, 1]), np.array([7, 3, 2])]).tolist()
    [2, 0, 1]
    """
    found = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:  # renumbered each time, so that products stay small
        values = np.unique(column, return_inverse=True)[1]
        found = np.unique(found * (int(values.max()) + 1) + values, return_inverse=True)[1]
    return found


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


# --- answers ------------------------------------------------------------------------------------------------------------


def _choice(row: Mapping[str, Any]) -> Choice:
    return Choice(*(row[field.name] for field in fields(Choice)))


def _answers(placed: tuple[pl.DataFrame, _Conditions], unit: str) -> ConditionAnswers:
    """Find the fastest choice under each condition, by time: the time of plain decoding depends on the number of devices.

    `unit` names what a choice reserves, "device" or "unit"; empty where all choices reserve the same number.
    """
    points, met = placed
    points = points.with_row_index("row").with_columns(plain_time=pl.col("time") * pl.col("speedup"))
    by = ["condition", "tensor_parallel"]
    plain = points.group_by(by, maintain_order=True).agg(pl.col("row").min(), first=pl.col("plain_time").first())
    points = points.join(plain.drop("row"), on=by, how="left", maintain_order="left")
    apart = (pl.col("plain_time") - pl.col("first")).abs() > 1e-6 * pl.max_horizontal("plain_time", "first")
    # Where times of plain decoding differ on the same devices, methods have separate costs in different units of time: only
    # speed-ups can be compared.
    alike = ~pl.col("condition").is_in(points.filter(apart)["condition"].unique().implode())
    points, plain = points.with_columns(alike=alike), plain.with_columns(alike=alike)
    plain = plain.with_columns(
        tensor_parallel=pl.when("alike").then("tensor_parallel").otherwise(1),
        quickest=pl.when("alike").then("first").otherwise(1.0),
    )
    fastest = (pl.col(name).first() for name in ("quickest", "tensor_parallel", "alike"))
    plain = plain.sort("condition", "quickest", "tensor_parallel")
    at = plain.group_by("condition", maintain_order=True).agg(pl.col("row").min(), *fastest, sizes=pl.len())
    at = at.with_columns(several=pl.col("alike") & (pl.col("sizes") > 1))
    points = points.join(at.select("condition", "quickest"), on="condition", how="left", maintain_order="left")
    names = {count: f"{PLAIN} on {_count(count, 'device')}" for count in at["tensor_parallel"].unique()}
    name = pl.col("tensor_parallel").replace_strict(names, return_dtype=pl.String)
    at = at.with_columns(plain=pl.when("several").then(name).otherwise(pl.lit(PLAIN)))
    choices = _choices(points.filter(pl.col("method") != registry.PLAIN), unit)
    last = choices.group_by("condition", maintain_order=True).agg(
        *(pl.col(name).first() for name in ("label", "speedup", "low", "high", "exact")), last=pl.len()
    )
    last = last.with_columns(pl.col("last").cum_sum(), first=pl.col("last").cum_sum() - pl.col("last"))
    columns = at.select("condition", "row", "plain").join(last, on="condition", how="left", maintain_order="left")
    return ConditionAnswers(columns.drop("row"), choices, met.taken(columns["row"].to_numpy()))


_BOUNDS = {"sampling": ("low", "high"), "inputs": ("input_low", "input_high")}


def _choices(points: pl.DataFrame, unit: str) -> pl.DataFrame:
    """Choices that an answer names, in the columns of `Choice`, by condition and from the fastest on: see `ConditionAnswers`.

    Of several points of a choice the fastest counts. Speed-ups and bounds are multiplied by the time of the fastest plain decoding
    over that of plain decoding on the same devices.
    """
    sampled = pl.col("view") != "formula"  # the sampling interval does not apply to a closed form
    known = {}
    for kind, ends in _BOUNDS.items():
        bounds = [f"speedup_{end}" for end in ends]
        known[kind] = [pl.when(pl.col(name).is_finite() & (sampled | (kind == "inputs"))).then(name) for name in bounds]
    some = {kind: pl.any_horizontal(*(end.is_not_null() for end in ends)) for kind, ends in known.items()}
    every = [pl.col("speedup"), *itertools.chain(*known.values())]
    factor = pl.when("alike").then(pl.col("quickest") / pl.col("first")).otherwise(1.0)
    if unit:
        held = {count: f" on {_count(count, unit)}" for count in points["held"].unique()}
        where = pl.col("held").replace_strict(held, return_dtype=pl.String)
        points = points.with_columns(label=pl.col("label") + where) if points.height else points
    choices = points.select(
        "condition", "label", (pl.col("speedup") * factor).alias("speedup"), low=pl.min_horizontal(every) * factor,
        high=pl.max_horizontal(every) * factor, exact=pl.col("exact").fill_null(True), agreement="agreement",
        interval=pl.when(some["inputs"]).then(pl.lit("inputs")).when(some["sampling"]).then(pl.lit("sampling")).otherwise(pl.lit("")),
        point="point",
    )  # fmt: skip
    ordered = choices.sort("condition", "speedup", "label", descending=[False, True, False], maintain_order=True)
    ordered = ordered.unique(["condition", "label"], keep="first", maintain_order=True)
    # Rows are in the order of conditions: the best of each is its first row.
    begins = (pl.col("condition") != pl.col("condition").shift()).fill_null(True)
    best = {name: pl.when(begins).then(name).forward_fill() for name in ("speedup", "low")}
    tied = (pl.col("speedup") >= best["low"] * (1 - 1e-9)) & (best["speedup"] <= pl.col("high") * (1 + 1e-9))
    ordered = ordered.with_row_index("row").with_columns(begins=begins, tied=tied)
    exact = ordered.filter("exact").unique("condition", keep="first", maintain_order=True)["row"]
    return ordered.filter(pl.col("begins") | "tied" | pl.col("row").is_in(exact.implode())).drop("row", "begins")


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


def _listed(words: Sequence[str], count: int | None = None) -> str:
    """The first words, and the number of the others; `count` is the number of all."""
    count = len(words) if count is None else count
    more = [f"{count - MOST_NAMED} more"] if count > MOST_NAMED else []
    return ", ".join([*words[:MOST_NAMED], *more])


def _over(answers: ConditionAnswers) -> str:
    """Baseline of the speed-ups: where choices differ in their devices, plain decoding on the fastest number of them."""
    return BASELINE if (answers.columns["plain"] == PLAIN).all() else FASTEST_BASELINE


# --- several conditions -------------------------------------------------------------------------------------------------


def _of_several(answers: ConditionAnswers) -> str:
    """Sentence for several conditions: listed in runs with the same winner, or the winners counted."""
    axes = answers.at.names
    if len(axes) == 1:
        runs = _runs(answers, axes[0])
        if len(runs) <= MOST_NAMED:
            winners = "; ".join(f"{where}: {_won(answers, own)}" for where, own in runs)
            return f"fastest by {axes[0]}, over {_over(answers)}: {winners}{_some_lossy(answers)}"
    own = _by_winner(answers)
    where = f"conditions ({' x '.join(axes)}), over {_over(answers)}"
    if len(own) == 1:
        return f"fastest in all {len(answers)} {where}: {_won(answers, *own.values())}{_some_lossy(answers)}"
    counted = sorted(own.values(), key=len, reverse=True)
    winners = _listed([f"{_won(answers, each)} in {len(each)}" for each in counted[:MOST_NAMED]], len(counted))
    return f"fastest in {len(answers)} {where}: {winners}{_some_lossy(answers)}"


def _by_winner(answers: ConditionAnswers) -> dict[str, list[int]]:
    """Conditions by their fastest choice, in order of appearance."""
    own: dict[str, list[int]] = {}
    for index, wins in enumerate(answers.wins):
        own.setdefault(wins, []).append(index)
    return own


def _runs(answers: ConditionAnswers, axis: str) -> list[tuple[str, list[int]]]:
    """Group conditions by their fastest choice: neighbouring values of a numeric axis, any values of a named one."""
    values = answers.at.values(axis)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [(", ".join(_plain(values[index]) for index in own), own) for own in _by_winner(answers).values()]
    ordered = sorted(range(len(values)), key=lambda index: float(values[index]))
    runs = [[*own] for _, own in itertools.groupby(ordered, key=lambda index: answers.wins[index])]
    return [(" to ".join(dict.fromkeys(_plain(values[index]) for index in (own[0], own[-1]))), own) for own in runs]


def _won(answers: ConditionAnswers, own: Sequence[int]) -> str:
    """Name of the fastest under these conditions, with the range of its speed-up."""
    columns, wins = answers.columns[own], answers.wins[own[0]]
    speeds: list[float] = columns["speedup"].drop_nulls().to_list()
    if not speeds:
        return wins
    ends = " to ".join(dict.fromkeys(f"{speed:.2f}x" for speed in (min(speeds), max(speeds))))
    beaten = bool((columns["high"] < 1).fill_null(False).all())
    return f"{wins} (best other choice {ends})" if beaten else f"{wins} ({ends})"


def _some_lossy(answers: ConditionAnswers) -> str:
    lossy = sorted({label.partition(",")[0] for label in answers.columns.filter(~pl.col("exact"))["label"].unique()})
    return f"; not exact, output differs from the target's: {', '.join(lossy)}" if lossy else ""


# --- closing ------------------------------------------------------------------------------------------------------------


def _missing(points: pl.DataFrame) -> set[str]:
    """Costs that are not measured at some of the points."""
    return {part for each in points["cost_missing"].drop_nulls().unique() for part in each.split(", ")}


def _kernels_only(points: pl.DataFrame) -> bool | None:
    real = points.filter(pl.col("cost_source").is_not_null())
    return "step" in _missing(real) if real.height else None


def _load(tables: Mapping[str, Any]) -> str:
    """Sequences of the batch, if all points have the same number above 1."""
    swept = {path.rpartition(".")[2]: values for path, values in tables.get("sweep", {}).items()}
    known = {key: value for table in scenario_file.method_tables(tables) for key, value in _conditions(tables, table).items()}
    known |= {key: values[0] for key, values in swept.items() if isinstance(values, list) and len(values) == 1}
    return f"; sequences = {known['sequences']}" if known["sequences"] != 1 else ""


def _closing(points: pl.DataFrame, answers: ConditionAnswers, kernels: bool | None) -> str:
    """Closing words on the costs: layer-times, or what a measured time does not include."""
    if not answers.columns["label"].count():
        return ""
    if kernels:
        return f"; {KERNELS_ONLY}"
    if kernels is None:
        return "; costs are in layer-times"
    return "; the engine's overhead of draft passes is not included" if "draft_step" in _missing(points) else ""
