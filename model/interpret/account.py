"""Work of a decoding, independent of time: layers run, weights and KV cache rows read, rows written, logits, rows moved.

One record for all methods: interpreters add passes as they are made, and closed forms predict the totals. With the shapes of
the models (`model.architectures.transformer`) the record gives operations [FLOP], bytes and their ratio, the arithmetic
intensity, which tells whether arithmetic or memory traffic limits a decoding. An interrupted pass is counted in full.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.architectures.transformer import Shape
from model.base import checks
from model.steps import Forward, LayerSpan


class Kind(NamedTuple):
    """Everything about a pass except its position; passes of the same kind differ only in the cache rows that they read."""

    role: str
    width: int
    """Number of tokens of all sequences together."""
    layers: LayerSpan
    heads: int
    compared: int

    def row(self) -> dict[str, Any]:
        """Columns of this kind in files."""
        layers = self.layers
        return {
            "role": self.role, "width": self.width, "first": layers.first, "last": layers.last, "heads": self.heads,
            "gaps": layers.gaps, "rows_only": layers.kv_only, "compared": self.compared,
        }  # fmt: skip

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Kind:
        """Kind from the columns of a file.

        >>> kind = Kind("target", 2, LayerSpan(0, 24, gaps=((1, 17),)), 1, 0)
        >>> Kind.of_row(kind.row()) == kind
        True
        """
        gaps = tuple([(first, last) for first, last in row["gaps"]])
        layers = LayerSpan(row["first"], row["last"], gaps, row["rows_only"])
        return cls(row["role"], row["width"], layers, row["heads"], row["compared"])


def kind_of(step: Forward) -> Kind:
    """The kind of a pass."""
    return Kind(step.role, len(step.tokens), step.layers, step.heads, step.compared)


def context_of(step: Forward) -> tuple[int, int]:
    """Return (attended, read): positions that the tokens of a pass attend to, summed over tokens, and positions that it reads.

    A token attends to itself too. A pass reads each position of a sequence once. In a ragged batch the rows are padded, so that as
    many are read of each sequence as of the longest.

    >>> from model.steps import Batch
    >>> context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), heads=3))  # 6 + 7 + 8
    (21, 8)
    >>> context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), batch=Batch((0, 1), (9, 5), (1, 2), (0, 0))))  # 10, 6 + 7
    (23, 20)
    >>> context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), heads=3, context_budget=2))  # 3 + 4 + 5
    (12, 5)
    """
    width = len(step.tokens)
    if step.context_budget is not None:
        return _context_within(step, step.context_budget)
    if step.tree or step.batch is not None:
        attended = sum(step.positions) + width
        return attended, step.batch_size * step.end if step.batch is not None else step.at + width
    return step.at * width + width * (width + 1) // 2, step.at + width


def _context_within(step: Forward, budget: int) -> tuple[int, int]:
    """`context_of` for a pass that reads at most `budget` cached positions of each sequence."""
    cached = (step.at,) if step.batch is None else step.batch.positions
    widths = (len(step.tokens),) if step.batch is None else step.batch.widths
    hidden = [max(at - budget, 0) for at in cached]
    attended = sum(step.positions) + len(step.tokens) - sum(map(operator.mul, hidden, widths))
    read = max([at + width - less for at, width, less in zip(cached, widths, hidden, strict=True)])
    return attended, step.batch_size * read


def attended_within(start: ArrayLike, passes: ArrayLike, context_budget: int | None) -> NDArray[np.float64]:
    """Positions attended to by passes over one token at `start`, start + 1, ..., with at most `context_budget` cached ones each.

    A pass at position x attends to min(x, budget) + 1 positions, and reads as many.

    >>> attended_within([1, 3, 5], 3, 4).tolist()  # 2 + 3 + 4, 4 + 5 + 5, 5 + 5 + 5
    [9.0, 14.0, 15.0]
    """
    first, count = np.asarray(start, dtype=np.float64), np.asarray(passes, dtype=np.float64)
    if context_budget is None:
        return np.asarray(count * first + count * (count + 1) / 2)
    below = np.clip(context_budget - first, 0, count)  # passes before which fewer positions are cached
    return np.asarray(below * first + below * (below - 1) / 2 + (count - below) * context_budget + count)


@dataclass
class Account:
    """Passes by kind, and transfers between processes.

    >>> account = Account()
    >>> account.add(Forward("target", (7, 8), 5, LayerSpan(0, 24, gaps=((1, 17),)), heads=1))
    >>> totals = account.totals().by_model["target"]
    >>> totals.layer_passes, totals.layer_runs, totals.attended, totals.heads  # 8 layers, 2 tokens that see 6 and 7 positions
    (16, 8, 104, 1)
    """

    passes_by_kind: dict[Kind, list[int]] = field(default_factory=dict)
    """By kind: [number of passes, positions attended to in one layer, positions read in one layer]."""
    adoptions: int = 0
    adopted_rows: int = 0
    """KV cache rows, each of one layer, that moved to another process together with a hidden state."""
    moves: int = 0
    """Number of times that a process continued on another unit."""

    def add(self, step: Forward) -> None:
        """Count a pass."""
        role, tokens, at, layers, _, heads, _, tree, batch, compared, _, budget = step
        width = len(tokens)
        if tree or batch is not None or budget is not None:
            attended, read = context_of(step)
        else:
            attended, read = at * width + width * (width + 1) // 2, at + width
        kind = Kind(role, width, layers, heads, compared)
        counts = self.passes_by_kind.get(kind)
        if counts is None:
            counts = self.passes_by_kind[kind] = [0, 0, 0]
        counts[0] += 1
        counts[1] += attended
        counts[2] += read

    def add_each(self, step: Forward, passes: int) -> None:
        """Count passes over one token of a sequence each, one after another, of which `step` is the first.

        >>> account = Account()
        >>> account.add_each(Forward("draft", (7,), 5, LayerSpan(0, 6)), 3)
        >>> account.totals().by_model["draft"].attended  # 6 + 7 + 8 positions in each of 6 layers
        126
        """
        seen = passes * step.at + passes * (passes + 1) // 2
        self.include_passes(kind_of(step), passes, seen, seen)

    def include(self, other: Account) -> None:
        """Add all counts of another account."""
        for kind, counts in other.passes_by_kind.items():
            self.include_passes(kind, *counts)
        self.adoptions += other.adoptions
        self.adopted_rows += other.adopted_rows
        self.moves += other.moves

    def include_passes(self, kind: Kind, passes: int, attended: int, read: int) -> None:
        """Count passes of one kind, with the positions that they attend to and read, summed."""
        counts = self.passes_by_kind.setdefault(kind, [0, 0, 0])
        counts[0] += passes
        counts[1] += attended
        counts[2] += read

    def of(self, role: str) -> Account:
        """Account of the passes of one model only."""
        return Account({kind: counts for kind, counts in self.passes_by_kind.items() if kind.role == role})

    @property
    def roles(self) -> list[str]:
        """Models that made passes."""
        return list(dict.fromkeys(kind.role for kind in self.passes_by_kind))

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        passes: Counter[str] = Counter()
        for kind, (count, _, _) in self.passes_by_kind.items():
            passes[kind.role] += count
        return passes

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return int(self._sum(lambda kind, counts: counts[0]))

    @property
    def layer_passes(self) -> int:
        """Layers run, counted once per token of a pass."""
        return int(self._sum(lambda kind, counts: counts[0] * _run(kind) * kind.width))

    @property
    def heads(self) -> int:
        """Positions whose logits were computed."""
        return int(self._sum(lambda kind, counts: counts[0] * kind.heads))

    def totals(self) -> Work:
        """Totals of each model, and transfers."""
        return Work({role: self.of(role)._totals() for role in self.roles}, self.adoptions, self.adopted_rows)

    def _totals(self) -> Totals:
        return Totals(
            self._sum(lambda kind, counts: counts[0]),
            self._sum(lambda kind, counts: counts[0] * _run(kind)),
            self._sum(lambda kind, counts: counts[0] * _run(kind) * kind.width),
            self._sum(lambda kind, counts: counts[1] * _run(kind)),
            self._sum(lambda kind, counts: counts[2] * _run(kind)),
            self._sum(lambda kind, counts: counts[0] * _filled(kind)),
            self._sum(lambda kind, counts: counts[0] * _filled(kind) * kind.width),
            self._sum(lambda kind, counts: counts[0] * (kind.heads > 0)),
            self._sum(lambda kind, counts: counts[0] * kind.heads),
        )

    def _sum(self, count: Callable[[Kind, list[int]], int]) -> float:
        return sum(count(kind, counts) for kind, counts in self.passes_by_kind.items())

    def flops_and_bytes(self, shapes: Mapping[str, Shape], *, bytes_each: int | None = None) -> FlopsAndBytes:
        """Operations and bytes; `shapes` holds the shape of each model by role.

        >>> from model.architectures.published_shapes import preset
        >>> account = Account()
        >>> account.add(Forward("target", (7,), 0, LayerSpan(0, 40), heads=1))
        >>> work = account.flops_and_bytes({"target": preset("llama-2-13b")})
        >>> round(work.flops / 1e9, 1), round(work.weight_bytes / 1e9, 1), round(work.intensity, 2)
        (25.7, 25.7, 1.0)
        """
        return flops_and_bytes(self.totals(), shapes, bytes_each=bytes_each)


class Totals(NamedTuple):
    """Totals of the passes of one model. Closed forms give expectations, and nan for totals that they do not predict."""

    passes: float = 0.0
    layer_runs: float = 0.0
    """Layers run, counted once per pass: a layer's weights are read once for all tokens of its pass."""
    layer_passes: float = 0.0
    """Layers run, counted once per token: arithmetic, and KV cache rows written."""
    attended: float = 0.0
    """Pairs of a token and a position that it attends to, summed over layers."""
    rows_read: float = 0.0
    """KV cache rows read, each of one layer; a pass reads a row once for all its tokens."""
    filled_runs: float = 0.0
    """Layers that computed only keys and values, counted once per pass."""
    filled: float = 0.0
    """KV cache rows written without running the layer."""
    head_runs: float = 0.0
    """Passes that computed logits: the head's weights are read once for all positions of the pass."""
    heads: float = 0.0
    """Positions whose logits were computed."""


def of_passes(layers: int, passes: Any, tokens: Any = math.nan, heads: Any = math.nan) -> Totals:
    """Totals of `passes` passes through `layers` layers and a head, with `tokens` tokens and `heads` logits in all.

    Attended and read rows are nan, because the positions of the passes are not given. Of several decodings all are arrays; those
    without a pass have totals of 0.

    >>> totals = of_passes(4, 3, 7)
    >>> totals.layer_runs, totals.layer_passes, totals.head_runs, totals.heads
    (12, 28, 3, nan)
    >>> of_passes(4, np.array([0, 3])).attended.tolist()
    [0.0, nan]
    """
    unknown: Any = math.nan
    if np.ndim(passes):
        tokens, heads, unknown = (np.where(passes > 0, each, 0.0) for each in (tokens, heads, unknown))
    return Totals(passes, layers * passes, layers * tokens, unknown, unknown, head_runs=passes, heads=heads)


class Work(NamedTuple):
    """Work of a decoding: totals by model, and moves of hidden states and KV cache rows between processes."""

    by_model: Mapping[str, Totals]
    adoptions: float = 0.0
    adopted_rows: float = 0.0

    def at(self, index: Any) -> Work:
        """The work of one of several decodings, whose totals are arrays, or of some of them."""

        def one(value: Any) -> Any:
            if not np.ndim(value):
                return value
            found = value[index]
            return found if np.ndim(found) else float(found)

        by_model = {role: Totals(*map(one, totals)) for role, totals in self.by_model.items()}
        return Work(by_model, one(self.adoptions), one(self.adopted_rows))


def plain_work(layers: int, positions: ArrayLike, sequences: ArrayLike = 1) -> Work:
    """Work of plain decoding, given the position of each step's tokens (from 0) and the number of sequences in each step.

    >>> plain_work(40, range(10)).by_model["target"].layer_passes, plain_work(40, range(10)).by_model["target"].rows_read
    (400.0, 2200.0)
    """
    seen, widths = np.broadcast_arrays(np.asarray(positions, dtype=np.float64) + 1, np.asarray(sequences, dtype=np.float64))
    steps, attended, heads = seen.size, layers * float(widths @ seen), float(widths.sum())
    return Work({"target": Totals(steps, layers * steps, layers * heads, attended, attended, head_runs=steps, heads=heads)})


def plain_work_of_tokens(layers: int, tokens: Any, sequences: int = 1) -> Work:
    """Work of plain decoding of `tokens` tokens, a number or an array of them, of one sequence or of equal ones together.

    >>> plain_work_of_tokens(40, 10) == plain_work(40, range(10)), plain_work_of_tokens(40, 10, 3) == plain_work(40, range(10), 3)
    (True, True)
    """
    steps: Any = np.asarray(tokens, dtype=np.float64) if np.ndim(tokens) else float(tokens)
    heads = sequences * steps
    attended = layers * heads * (steps + 1) / 2
    return Work({"target": Totals(steps, layers * steps, layers * heads, attended, attended, head_runs=steps, heads=heads)})


class FlopsAndBytes(NamedTuple):
    """Operations and bytes of a decoding, or arrays of several. Transferred bytes count KV cache rows and hidden states, not token
    ids."""

    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    head_passes: float
    transferred_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte of weights and KV cache read or written [FLOP/byte]."""
        moved = self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes
        return _ratio(self.flops, moved, math.nan)  # type: ignore[no-any-return]


def flops_and_bytes(work: Work, shapes: Mapping[str, Shape], *, bytes_each: int | None = None) -> FlopsAndBytes:
    """Operations and bytes of a decoding's work; `shapes` holds the shape of each model by role.

    A number takes the bytes of its model's `dtype`, or `bytes_each` if given; quantised weights and cached numbers have their own.
    Sparse experts are read as by passes of the mean number of independent tokens, and a sliding window is applied to the mean
    number of positions: both are at most a few percent above a sum over passes. Totals may be arrays of one shape, for several
    decodings; so are the results then.
    """
    if bytes_each is not None:
        checks.whole("bytes_each", bytes_each, 1)
    flops: Any = 0.0
    weights = read = written = heads = flops
    for role, totals in work.by_model.items():
        if role not in shapes:
            raise checks.ParameterError(f"shapes must have one for the {role} model, got those of {', '.join(shapes) or 'none'}")
        shape = shapes[role]
        each = shape.bytes_each if bytes_each is None else bytes_each
        row = shape.cache_bytes(1, bytes_each=bytes_each)
        kv_weights, active = shape.cache_weights, shape.active_layer_weights
        flops += 2 * (active * totals.layer_passes + shape.head_weights * totals.heads + kv_weights * totals.filled)
        attended, rows = totals.attended, totals.rows_read
        if shape.window is not None:
            attended *= _share_in_window(shape, attended, totals.layer_passes)
            rows *= _share_in_window(shape, rows, totals.layer_runs)
        flops += shape.attended_flops * attended
        layer_bytes: Any = float(each * shape.copies * shape.layer_weights)
        if shape.experts is not None or shape.weights is not None:
            layer_bytes = shape.expected_read_bytes(_ratio(totals.layer_passes, totals.layer_runs, 1.0), bytes_each=bytes_each)
        weights += layer_bytes * totals.layer_runs + each * (shape.copies * shape.head_weights * totals.head_runs)
        weights += each * kv_weights * totals.filled_runs
        read += row * rows
        written += row * (totals.layer_passes + totals.filled)
        heads += totals.heads
    moved = 0.0
    if np.any(work.adoptions):
        shape = shapes["target"]
        each = shape.bytes_each if bytes_each is None else bytes_each
        moved = shape.cache_bytes(1, bytes_each=bytes_each) * work.adopted_rows + each * shape.hidden * work.adoptions
    return FlopsAndBytes(flops, weights, read, written, heads, moved)


def _ratio(one: Any, other: Any, otherwise: float) -> Any:
    """Quotient, or `otherwise` where the divisor is 0."""
    found = np.where(other, one / np.where(other, other, 1), otherwise)
    return found if found.ndim else float(found)


def _share_in_window(shape: Shape, positions: Any, passes: Any) -> Any:
    """Share of the mean positions of a pass that layers with a sliding window see, in the mean over the layers."""
    mean = _ratio(positions, passes, 0.0)
    seen = sum(count * (mean if kind.window is None else np.minimum(mean, kind.window.size)) for count, kind in shape.kinds)
    return _ratio(seen / shape.layers, mean, 1.0)


def _run(kind: Kind) -> int:
    """Layers that are run in full."""
    return 0 if kind.layers.kv_only else kind.layers.size


def _filled(kind: Kind) -> int:
    """Layers that compute only keys and values."""
    return kind.layers.size if kind.layers.kv_only else 0


