"""Hardware profiles: measured times of the parts of a pass on a device, with sources (`model.hardware.profile_files`: files).

The table is in long format: a row is one measured time of one part of a pass.

===============  ==========================  ==================================================================
part             axes                        operation that is timed
===============  ==========================  ==================================================================
layer            width, context, batch       a whole decoder layer
dense            tokens                      a decoder layer without its attention
attention        width, context, batch       attention of one layer over the KV cache
head             positions                   projection onto the vocabulary, with the norm before it
embedding        tokens                      embedding
step             batch                       overhead per pass: launching, preparing, sampling
resumed_step     batch                       overhead of a pass that continues at the position of the last one
first_read       batch                       first read of the results of a pass, after its head, and emitting the token
kv_rows          tokens                      keys and values only, of a skipped layer
next             positions                   a further read of the most likely token, after the first read
top              positions                   a read of the most likely tokens
sample           positions                   a sampled token
probability      positions                   the probability of a token
uniform          positions                   a random number
residual         positions                   a token sampled from the residual distribution of target and draft
residual_mass    positions                   the mass of that distribution before it is normalised
confidence       positions                   the confidence of a pass
saturation       positions                   the change of the hidden state between layers
distance         positions                   the distance of the distribution from a token
distinct         positions                   tokens drawn without replacement
beams            positions                   continuations of hypotheses
early_head       positions                   the head between two layers of a token; its weights have just been used
early_softmax    positions                   the confidence after one layer, read after the early head
early_state      positions                   the change of the hidden state after one layer
fork             processes                   starting and ending `processes` sub-processes within one operating-system process
after_gap        gap                         a pass over one token `gap` microseconds after the last one of its model; if negative,
                                             its layers run again that much sooner than in consecutive passes
wide_after_gap   width, gap                  the same for a pass over several tokens
tree             width, context              extra time of a pass over several hypotheses, over one with as many tokens
dispatch         processes                   starting `processes` sub-processes on other units
wake             processes                   from the dispatch until the sub-processes have the inputs to begin
promotion        processes                   adopting the state and the KV rows of one of `processes` sub-processes
scheduling       processes                   overhead of the main process between a read and the next action
main_alone       processes                   a layer of the main process over one token, while the sub-processes wait
main_concurrent  processes                   the same while the sub-processes work
subprocess_step  processes                   overhead per pass of a sub-process, while the others work
all_reduce       size                        reduction over tensor-parallel devices, by bytes
send             size                        sending bytes from one device or process to another
gemm             m, n, k                     a product of m by k and k by n (profiles of operations)
decode           heads, kv_heads, head_dim,  attention of one new token per sequence (profiles of operations)
                 context, batch
===============  ==========================  ==================================================================

`tensor_parallel` is the number of devices that a layer is split over, `busy` the number of other busy units of the host.
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

PROCESS_PROMPT = 24
"""Prompt tokens of the sequences that time parts by `processes`. Twice as many tokens are generated, for `fork` equally many."""
READS: tuple[str, ...] = get_args(get_type_hints(Read)["kind"])
EARLY_EXIT_READS = {"confidence": "early_softmax", "saturation": "early_state"}
"""Parts of the reads that decide about an early exit after a single layer."""
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
    **dict.fromkeys((*READS, "early_head", *EARLY_EXIT_READS.values()), ("positions",)),
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
"""Axes of each part."""
COUNTED = ("tensor_parallel", "busy", *dict.fromkeys(axis for axes in AXES.values() for axis in axes))
TIMES = ("time_s", "low_s", "high_s")
"""Median, and lower and upper quartile, or the nearest statistics that the source has."""
UNITS = dict.fromkeys(COUNTED, "1") | {"size": "bytes", "gap": "us"} | dict.fromkeys(TIMES, "s") | {"repeats": "1", "part": "name"}
KINDS = {"model": ("layer", "dense"), "operations": ("gemm",), "links": ("send", "all_reduce")}
"""Kinds of profiles; each needs at least one of its parts."""
NONZERO_TIMES = ("layer", "dense", "gemm")
"""Parts whose times must be above 0. Other operations may be short enough to be rounded to 0."""
MODES = ("eager", "cuda-graph", "kernel-only")
PROVENANCE = ("measured", "composed")


@dataclass(frozen=True)
class Source:
    """Source of rows: a file of a repository, or a timing run of this project."""

    repository: str
    file: str
    commit: str = ""
    licence: str = ""
    sha256: str = ""
    parts: tuple[str, ...] = ()
    """Parts that come from it."""


@dataclass(frozen=True, eq=False)
class Profile:
    """A table of measured times, with metadata.

    Parameters
    ----------
    name, device, model, dtype
        Name of the profile; a device of `model.hardware.devices` or any other name; a model of
        `model.architectures.published_shapes` or any other name (empty in profiles of operations and links); type of the numbers.
    engine, mode
        Software that ran it; `eager` (kernels launched one by one), `cuda-graph` (replayed) or `kernel-only` (sum of kernel times
        without the gaps between them).
    provenance
        `measured`, or `composed` from measured times of operations.
    date
        Date of the measurement, or of the import if the source does not give it.
    bandwidth, rate, cache_bytes
        Peaks of the device [bytes/s], [operations/s] and its last-level cache [bytes]: physical limits of the times.
    shape
        Fields of the model's shape.
    errors
        Relative error between measured points, by part [-].
    facts
        Recorded facts of device and software: driver, clocks, versions.
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
                raise ParameterError(f"{name} must be a string, got {checks.shown(getattr(self, name))}")
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
        """Parts with times in the table."""
        present = set(self.table["part"].unique())
        return tuple(part for part in AXES if part in present)

    @cached_property
    def tensor_parallel(self) -> tuple[int, ...]:
        """Tensor parallel sizes of the measured layers."""
        needed = self.table.filter(self.table["part"].is_in(list(KINDS[self.kind])))
        return tuple(sorted(int(each) for each in needed["tensor_parallel"].unique()))

    def rows(self, part: str, tensor_parallel: int = 1, busy: int = 0) -> pl.DataFrame:
        """Rows of a part with its axes and times only; empty if the profile lacks the part."""
        import polars as pl

        table = self.table
        if not {*AXES[part]} <= {*table.columns}:
            return pl.DataFrame(schema=dict.fromkeys(AXES[part], pl.Int64) | dict.fromkeys(TIMES, pl.Float64))
        chosen = table.filter((table["part"] == part) & (table["tensor_parallel"] == tensor_parallel) & (table["busy"] == busy))
        return chosen.select(*(axis for axis in AXES[part] if axis in table.columns), *TIMES)

    def coverage(self) -> str:
        """Return a line with the ranges of each part's axes."""
        covered = []
        for part in self.parts:
            rows = self.table.filter(self.table["part"] == part)
            ranges = ", ".join(f"{axis} {_range(rows[axis].to_numpy())}" for axis in AXES[part])
            more = "".join(
                f", {axis} {_listed(rows[axis].to_numpy())}" for axis in ("tensor_parallel", "busy") if rows[axis].n_unique() > 1
            )
            covered.append(f"{part} ({ranges}{more})")
        return "; ".join(covered)


def _range(values: NDArray[Any]) -> str:
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _listed(values: NDArray[Any]) -> str:
    return "/".join(f"{each:g}" for each in np.unique(values))


def check_table(table: pl.DataFrame, kind: str) -> None:
    """Refuse a table with a missing or unknown column or an impossible value; the error names the row, counted from 1."""
    import polars as pl

    for name in ("part", "tensor_parallel", "busy", *TIMES, "repeats"):
        if name not in table.columns:
            raise ParameterError(
                f"column {name} is missing; a profile has part, tensor_parallel, busy, axes and {', '.join(TIMES)}"
            )
    for name, dtype in table.schema.items():
        if name not in UNITS:
            raise checks.unknown("column", name, UNITS)
        if (name == "part") != (dtype == pl.String) or (name != "part" and not dtype.is_numeric()):
            raise ParameterError(f"column {name} must hold {'names' if name == 'part' else 'numbers'}, got {dtype}")
    if not table.height:
        raise ParameterError("the table is empty; a profile has at least one row")
    present = rows_by_part(table)
    for part, rows in present.items():
        if part not in AXES:
            raise ParameterError(f"row {rows[0] + 1}: {checks.unknown('part', part, AXES)}")
    if not {*present} & {*KINDS[kind]}:
        needed = " or ".join(KINDS[kind])
        raise ParameterError(f"a profile of kind {kind} must have rows of {needed}, got {', '.join(sorted(present))}")
    columns = {name: table[name].cast(pl.Float64).to_numpy() for name in table.columns if name != "part"}  # null becomes nan
    for part, rows in present.items():
        names = [name for name in ("tensor_parallel", "busy", *AXES[part], *TIMES) if name in columns]
        _check_part(part, rows, {name: columns[name][rows] for name in names})


def rows_by_part(table: pl.DataFrame) -> dict[str, NDArray[np.int64]]:
    """Indices of the rows of each part, in the order of the table; a part without a name is None."""
    stretches = table["part"].rle().struct.unnest()  # rows of a part mostly follow each other
    lengths = stretches["len"].to_numpy()
    found: dict[str, list[NDArray[np.int64]]] = {}
    for part, length, stop in zip(stretches["value"].to_list(), lengths.tolist(), np.cumsum(lengths).tolist(), strict=True):
        found.setdefault(part, []).append(np.arange(stop - length, stop))
    return {part: each[0] if len(each) == 1 else np.concatenate(each) for part, each in found.items()}


def _repeated(points: NDArray[np.float64]) -> bool:
    """Return False if all points (columns) are certainly distinct: each is encoded as one whole number, and these are sorted.

    That is much faster than sorting points of many axes. If the encoding would not be exact, the answer is True.
    """
    low = points.min(axis=1)
    spans = points.max(axis=1) - low + 1
    if np.prod(spans) > 2**53 or (points != np.floor(points)).any():
        return True
    keys = np.sort(np.append(np.cumprod(spans[:0:-1])[::-1], 1.0) @ (points - low[:, None]))
    return bool((keys[1:] == keys[:-1]).any())


def _check_part(part: str, rows: NDArray[np.int64], columns: Mapping[str, NDArray[np.float64]]) -> None:
    """Refuse impossible values among the rows of one part, and points that occur twice."""
    for axis in ("tensor_parallel", "busy", *AXES[part], *TIMES):
        if axis not in columns:
            raise ParameterError(f"column {axis} is missing; part {part} has the axes {', '.join(AXES[part])}")
        values = columns[axis]
        least = -(10**9) if axis == "gap" else 0 if axis in ("busy", "context") or axis in TIMES else 1
        bad = ~(np.isfinite(values) & (values >= least))
        bound = f"a number of at least {least}"
        if axis == "time_s" and part in NONZERO_TIMES and not bad.any():
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
        row = rows[order[twice + 1]].min()  # the sort is stable: the later row of each pair
        raise ParameterError(f"row {row + 1}: part {part} has this point more than once; keep the median of its repeats")


def table_of(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Return a profile's table from rows. Defaults: quartiles equal to the time, tensor_parallel 1, busy 0, repeats 1."""
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
    """Return a profile's table with more rows appended; columns that are empty in all rows are left out."""
    import polars as pl

    both = pl.concat([table, table_of(rows)], how="diagonal_relaxed")
    known = [name for name in ("part", *COUNTED, *TIMES, "repeats") if name in both.columns]
    return both.select(name for name in known if both[name].null_count() < both.height)
