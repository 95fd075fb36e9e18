"""Hardware profiles: what passes take on a device, and where each number comes from (`model.hardware.profile_files` has the files).

The table is long: a row is one measured time of one part of a pass.

===============  ==========================  ==================================================================
part             axes                        what takes the time
===============  ==========================  ==================================================================
layer            width, context, batch       a decoder layer as a whole
dense            tokens                      a decoder layer but for its attention
attention        width, context, batch       attention of one layer over what is cached
head             positions                   projection onto the vocabulary, with the norm before it
embedding        tokens                      embedding
step             batch                       what a pass takes once besides: launching, preparing, sampling
resumed_step     batch                       the same of a call that goes on at the place of the last one
first_read       batch                       the first look at what a pass has made, behind its head, and putting it out
kv_rows          tokens                      keys and values alone of a layer that is skipped
next             positions                   a further look at the likeliest token, once the pass has been looked at
top              positions                   a read of the likeliest tokens
sample           positions                   a drawn token
probability      positions                   a token's probability
uniform          positions                   a random number
residual         positions                   a token drawn from what the draft lacks
confidence       positions                   how sure a pass is
saturation       positions                   how little its state has changed
distance         positions                   how far it is from a token
beams            positions                   continuations of hypotheses
early_head       positions                   the head between the layers of a token, run one by one: it has just been used
early_softmax    positions                   how sure a pass over one layer is, behind that
early_state      positions                   how little its state has changed
fork             processes                   starting so many sub-processes within one process of the system, and ending them
after_gap        gap                         a pass over one token so many microseconds after the last one of its model; below 0 its
                                             layers are run again that much sooner than passes one after the other do
wide_after_gap   width, gap                  the same of a pass over several tokens
tree             width, context              what a pass over several hypotheses takes beyond one over as many tokens
dispatch         processes                   starting so many sub-processes on other units
wake             processes                   from there until they have what they need to begin
promotion        processes                   taking over the state and the rows of one of so many
scheduling       processes                   what the main process does between a look and what follows it
main_alone       processes                   a layer of the main process of several, on a token, while the others wait
main_concurrent  processes                   the same while the others are at work
subprocess_step  processes                   what the pass of a sub-process takes once besides its layers, among the others
all_reduce       size                        joining the parts of a layer that is split over devices, by bytes
send             size                        handing bytes from one device or process to another
gemm             m, n, k                     a product of m by k and k by n (profiles of operations)
decode           heads, kv_heads, head_dim,  attention of one new token for each text (profiles of operations)
                 context, batch
===============  ==========================  ==================================================================

`tensor_parallel` says over how many devices a layer is split, `busy` how many other units of the host are at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.steps import Read

if TYPE_CHECKING:
    import polars as pl

PROCESS_TEXT = 24
"""Tokens of the prompts of texts that parts by `processes` are timed on. Twice as many are put out, for `fork` as many."""
READS: tuple[str, ...] = get_args(get_type_hints(Read)["kind"])
EARLY = {"confidence": "early_softmax", "saturation": "early_state"}
"""Reads that ask, behind a single layer, whether a token may leave: the parts that they are then."""
AXES: dict[str, tuple[str, ...]] = {
    "layer": ("width", "context", "batch"),
    "dense": ("tokens",),
    "attention": ("width", "context", "batch"),
    "head": ("positions",),
    "embedding": ("tokens",),
    "step": ("batch",),
    "resumed_step": ("batch",),
    "first_read": ("batch",),
    "kv_rows": ("tokens",),
    **dict.fromkeys((*READS, "early_head", *EARLY.values()), ("positions",)),
    "after_gap": ("gap",),
    "wide_after_gap": ("width", "gap"),
    "tree": ("width", "context"),
    **dict.fromkeys(
        ("fork", "dispatch", "wake", "promotion", "scheduling", "main_alone", "main_concurrent", "subprocess_step"), ("processes",)
    ),
    "all_reduce": ("size",),
    "send": ("size",),
    "gemm": ("m", "n", "k"),
    "decode": ("heads", "kv_heads", "head_dim", "context", "batch"),
}
"""Coordinates of each part's times."""
COUNTED = ("tensor_parallel", "busy", *dict.fromkeys(axis for axes in AXES.values() for axis in axes))
TIMES = ("time_s", "low_s", "high_s")
"""Median, and lower and upper quartile or whatever the source has for them."""
UNITS = dict.fromkeys(COUNTED, "1") | {"size": "bytes", "gap": "us"} | dict.fromkeys(TIMES, "s") | {"repeats": "1", "part": "name"}
KINDS = {"model": ("layer", "dense"), "operations": ("gemm",), "links": ("send", "all_reduce")}
"""Kinds of profiles, with the parts of which each needs one."""
TAKING_TIME = ("layer", "dense", "gemm")
"""Parts of which no time is nothing: a single operation may be rounded to nothing, a layer is not."""
MODES = ("eager", "cuda-graph", "kernel-only")
PROVENANCE = ("measured", "composed")


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file of a repository, or a run of this project's own timing."""

    repository: str
    file: str
    commit: str = ""
    licence: str = ""
    sha256: str = ""
    parts: tuple[str, ...] = ()
    """What it gave."""


@dataclass(frozen=True, eq=False)
class Profile:
    """A table of times with all that is known of them.

    Parameters
    ----------
    name, device, model, dtype
        What is profiled: a device of `model.hardware.devices` or any other name; a model of `model.architectures.transformer` or
        any other, empty in profiles of operations and links.
    engine, mode
        What ran it, and whether kernels were launched one by one (`eager`), replayed as a graph, or summed without what lies
        between.
    provenance
        `measured`, or `composed` of times measured for its operations.
    date
        When it was measured; where the source does not say, when it was imported.
    bandwidth, rate, cache_bytes
        Peak of the device [bytes/s], [operations/s] and its last cache [bytes]: what no time may beat.
    shape
        Fields of the model's shape.
    errors
        Relative error between measured points, by part [-].
    facts
        Of the device and the software, as they were read: driver, clocks, versions.
    """

    name: str
    device: str
    model: str
    dtype: str
    engine: str
    mode: str
    kind: str
    provenance: str
    date: str
    bandwidth: float
    rate: float
    cache_bytes: float
    table: pl.DataFrame
    sources: tuple[Source, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("name", "device", "model", "dtype", "engine", "date"):
            if not isinstance(getattr(self, name), str):
                raise ParameterError(f"{name} must be a text, got {checks.shown(getattr(self, name))}")
        checks.one_of("kind", self.kind, KINDS)
        checks.one_of("mode", self.mode, MODES)
        checks.one_of("provenance", self.provenance, PROVENANCE)
        for name in ("bandwidth", "rate"):
            checks.number(name, getattr(self, name), 1)
        checks.number("cache_bytes", self.cache_bytes, 0)
        if not self.sources:
            raise ParameterError("sources must name where the rows come from, got none")
        check_table(self.table, self.kind)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts that it has times of."""
        present = set(self.table["part"].unique())
        return tuple(part for part in AXES if part in present)

    @cached_property
    def tensor_parallel(self) -> tuple[int, ...]:
        """The numbers of devices over which layers were split."""
        needed = self.table.filter(self.table["part"].is_in(list(KINDS[self.kind])))
        return tuple(sorted(int(each) for each in needed["tensor_parallel"].unique()))

    def rows(self, part: str, tensor_parallel: int = 1, busy: int = 0) -> pl.DataFrame:
        """The rows of a part, without the columns that are not its; none where the profile has nothing of it."""
        import polars as pl

        table = self.table
        if not {*AXES[part]} <= {*table.columns}:
            return pl.DataFrame(schema=dict.fromkeys(AXES[part], pl.Int64) | dict.fromkeys(TIMES, pl.Float64))
        chosen = table.filter((table["part"] == part) & (table["tensor_parallel"] == tensor_parallel) & (table["busy"] == busy))
        return chosen.select(*(axis for axis in AXES[part] if axis in table.columns), *TIMES)

    def coverage(self) -> str:
        """What it covers, in a line: the ranges of each part's axes."""
        said = []
        for part in self.parts:
            rows = self.table.filter(self.table["part"] == part)
            ranges = ", ".join(f"{axis} {_range(rows[axis].to_numpy())}" for axis in AXES[part])
            more = "".join(
                f", {axis} {_listed(rows[axis].to_numpy())}" for axis in ("tensor_parallel", "busy") if rows[axis].n_unique() > 1
            )
            said.append(f"{part} ({ranges}{more})")
        return "; ".join(said)


def _range(values: NDArray[Any]) -> str:
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _listed(values: NDArray[Any]) -> str:
    return "/".join(f"{each:g}" for each in np.unique(values))


def check_table(table: pl.DataFrame, kind: str) -> None:
    """Refuse a table that lacks a column, has an unknown one or an impossible value; the message names the row, counted from 1."""
    import polars as pl

    for name in ("part", "tensor_parallel", "busy", *TIMES, "repeats"):
        if name not in table.columns:
            raise ParameterError(
                f"column {name} is missing; a profile has part, tensor_parallel, busy, axes and {', '.join(TIMES)}"
            )
    for name, held in table.schema.items():
        if name not in UNITS:
            raise checks.unknown("column", name, UNITS)
        if (name == "part") != (held == pl.String) or (name != "part" and not held.is_numeric()):
            raise ParameterError(f"column {name} must hold {'names' if name == 'part' else 'numbers'}, got {held}")
    if not table.height:
        raise ParameterError("the table is empty; a profile has at least one row")
    parts = table["part"]
    present = parts.unique(maintain_order=True).to_list()
    for part in present:
        if part not in AXES:
            raise ParameterError(f"row {_rows_of(parts, part)[0] + 1}: {checks.unknown('part', part, AXES)}")
    if not {*present} & {*KINDS[kind]}:
        needed = " or ".join(KINDS[kind])
        raise ParameterError(f"a profile of kind {kind} must have rows of {needed}, got {', '.join(sorted(present))}")
    columns = {name: table[name].cast(pl.Float64).to_numpy() for name in table.columns if name != "part"}  # what is null is nan
    for part in present:
        rows = _rows_of(parts, part)
        own = [name for name in ("tensor_parallel", "busy", *AXES[part], *TIMES) if name in columns]
        _check_part(part, rows, {name: columns[name][rows] for name in own})


def _rows_of(parts: pl.Series, part: str | None) -> NDArray[np.int64]:
    """The indices of the rows of a part."""
    return np.flatnonzero(parts.eq_missing(part).to_numpy())


def _repeated(points: NDArray[np.float64]) -> bool:
    """Whether a point, a column of these, may be there twice: False where one sort of one whole number for each rules it out.

    That is much faster than sorting points of many axes; where such numbers would not be exact none are made.
    """
    low = points.min(axis=1)
    spans = points.max(axis=1) - low + 1
    if np.prod(spans) > 2**53 or (points != np.floor(points)).any():
        return True
    keys = np.sort(np.append(np.cumprod(spans[:0:-1])[::-1], 1.0) @ (points - low[:, None]))
    return bool((keys[1:] == keys[:-1]).any())


def _check_part(part: str, rows: NDArray[np.int64], columns: Mapping[str, NDArray[np.float64]]) -> None:
    """Refuse impossible values among the rows of one part, and points that are there twice."""
    for axis in ("tensor_parallel", "busy", *AXES[part], *TIMES):
        if axis not in columns:
            raise ParameterError(f"column {axis} is missing; part {part} goes by {', '.join(AXES[part])}")
        values = columns[axis]
        least = -(10**9) if axis == "gap" else 0 if axis in ("busy", "context") or axis in TIMES else 1
        bad = ~(np.isfinite(values) & (values >= least))
        bound = f"a number of at least {least}"
        if axis == "time_s" and part in TAKING_TIME and not bad.any():
            bad, bound = values == 0, "above 0"
        if bad.any():
            where = int(np.argmax(bad))
            raise ParameterError(f"row {rows[where] + 1}, column {axis}: must be {bound}, got {checks.shown(float(values[where]))}")
    time, low, high = (columns[name] for name in TIMES)
    disordered = (low > time) | (time > high)
    if disordered.any():
        where = int(np.argmax(disordered))
        bound = f"between low_s={low[where]:g} and high_s={high[where]:g}"
        raise ParameterError(f"row {rows[where] + 1}, column time_s: must be {bound}, got {time[where]:g}")
    points = np.stack([columns[axis] for axis in ("tensor_parallel", "busy", *AXES[part])])
    if not _repeated(points):
        return
    order = np.lexsort(points)
    twice = np.flatnonzero((points[:, order][:, 1:] == points[:, order][:, :-1]).all(axis=0))
    if twice.size:
        row = rows[order[twice + 1]].min()  # sorting keeps equal points in order: of each pair the later one
        raise ParameterError(f"row {row + 1}: part {part} has its point more than once; keep the median of its repeats")


def table_of(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A profile's table from rows; quartiles are the time itself, and tensor_parallel 1 and busy 0, where a row does not say
    them."""
    import polars as pl

    used = {"tensor_parallel", "busy"}.union(*rows)
    schema: dict[str, Any] = {"part": pl.String} | {name: pl.Int64 for name in COUNTED if name in used}
    schema |= dict.fromkeys(TIMES, pl.Float64) | {"repeats": pl.Int64}
    strange = sorted(used - {*schema})
    if strange:
        raise checks.unknown("column", strange[0], schema)
    usual = {"tensor_parallel": 1, "busy": 0, "repeats": 1}
    return pl.DataFrame([[row.get(name, usual.get(name)) for name in schema] for row in rows], schema, orient="row").with_columns(
        pl.coalesce(name, "time_s") for name in ("low_s", "high_s")
    )


def added(table: pl.DataFrame, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A profile's table with more rows behind its own; a column that none of them has is left out."""
    import polars as pl

    both = pl.concat([table, table_of(rows)], how="diagonal_relaxed")
    known = [name for name in ("part", *COUNTED, *TIMES, "repeats") if name in both.columns]
    return both.select(name for name in known if both[name].null_count() < both.height)
