"""What a decoding works, whatever the clock says: layers run, weights and cache rows read, rows written, heads, rows moved.

One record for every method. Interpreters add passes to it as they are made; closed forms say what it must come to. With the shapes
of the models (`model.architectures.transformer`) it becomes operations and bytes, and their ratio, the arithmetic intensity:
whether arithmetic or memory is what a decoding waits for. A pass that is cut off is counted whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.base import checks
from model.steps import Forward, LayerSpan


class Kind(NamedTuple):
    """All of a pass but its position: passes of one kind take the same work but for the rows that they read."""

    role: str
    width: int
    """Number of tokens, of all sequences together."""
    layers: LayerSpan
    heads: int
    compared: int

    def row(self) -> dict[str, Any]:
        """The columns that files have for it."""
        layers = self.layers
        return {
            "role": self.role, "width": self.width, "first": layers.first, "last": layers.last, "heads": self.heads,
            "gaps": layers.gaps, "rows_only": layers.kv_only, "compared": self.compared,
        }  # fmt: skip

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Kind:
        """From the columns of a file.

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
    """Number of positions that the tokens of a pass attend to, themselves included, and number that the pass reads: each once for
    a sequence.

    Of sequences that end at unequal positions as many are read of each as of the longest: their rows are padded.

    >>> from model.steps import Batch
    >>> context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), heads=3))  # 6 + 7 + 8
    (21, 8)
    >>> context_of(Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), batch=Batch((0, 1), (9, 5), (1, 2), (0, 0))))  # 10, 6 + 7
    (23, 20)
    """
    width = len(step.tokens)
    if step.tree or step.batch is not None:
        attended = sum(step.positions) + width
        return attended, step.batch_size * step.end if step.batch is not None else step.at + width
    return step.at * width + width * (width + 1) // 2, step.at + width


@dataclass
class Account:
    """Passes by their kind, and what was moved between processes.

    >>> account = Account()
    >>> account.add(Forward("target", (7, 8), 5, LayerSpan(0, 24, gaps=((1, 17),)), heads=1))
    >>> found = account.totals().of["target"]
    >>> found.layer_passes, found.layer_runs, found.attended, found.heads  # 8 layers, 2 tokens that see 6 and 7 positions
    (16, 8, 104, 1)
    """

    passes_by_kind: dict[Kind, list[int]] = field(default_factory=dict)
    """How many passes of a kind there were, the positions that they attended to, and those that they read, each in one layer."""
    adoptions: int = 0
    adopted_rows: int = 0
    """Cache rows, each of one layer, that went to another process with its state."""
    moves: int = 0
    """How often a process went on, on another unit."""

    def add(self, step: Forward) -> None:
        """Count a pass."""
        attended, read = context_of(step)
        found = self.passes_by_kind.setdefault(kind_of(step), [0, 0, 0])
        for index, more in enumerate((1, attended, read)):
            found[index] += more

    def include(self, other: Account) -> None:
        """Count all that is in another account."""
        for kind, counts in other.passes_by_kind.items():
            found = self.passes_by_kind.setdefault(kind, [0, 0, 0])
            for index, more in enumerate(counts):
                found[index] += more
        self.adoptions += other.adoptions
        self.adopted_rows += other.adopted_rows
        self.moves += other.moves

    def of(self, role: str) -> Account:
        """The passes of one model alone."""
        return Account({kind: counts for kind, counts in self.passes_by_kind.items() if kind.role == role})

    @property
    def roles(self) -> list[str]:
        """The models that made passes."""
        return list(dict.fromkeys(kind.role for kind in self.passes_by_kind))

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        found: Counter[str] = Counter()
        for kind, (count, _, _) in self.passes_by_kind.items():
            found[kind.role] += count
        return found

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return int(self._sum(lambda kind, counts: counts[0]))

    @property
    def layer_passes(self) -> int:
        """Layers run, once for each token of a pass."""
        return int(self._sum(lambda kind, counts: counts[0] * _run(kind) * kind.width))

    @property
    def heads(self) -> int:
        """Positions projected onto the vocabulary."""
        return int(self._sum(lambda kind, counts: counts[0] * kind.heads))

    def totals(self) -> Work:
        """What the passes of each model come to, and what was moved."""
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

    def bill(self, shapes: Mapping[str, Shape], *, bytes_each: int | None = None) -> Bill:
        """Operations and bytes, with the shape of each model by its role.

        >>> from model.architectures.transformer import preset
        >>> account = Account()
        >>> account.add(Forward("target", (7,), 0, LayerSpan(0, 40), heads=1))
        >>> bill = account.bill({"target": preset("llama-2-13b")})
        >>> round(bill.flops / 1e9, 1), round(bill.weight_bytes / 1e9, 1), round(bill.intensity, 2)
        (25.7, 25.7, 1.0)
        """
        return bill(self.totals(), shapes, bytes_each=bytes_each)


class Totals(NamedTuple):
    """What the passes of one model come to; of a closed form expectations, nan where it says nothing."""

    passes: float = 0.0
    layer_runs: float = 0.0
    """Layers run: the weights of each are read once for all tokens of its pass."""
    layer_passes: float = 0.0
    """Layers run, once for each token: what is computed, and the rows of keys and values that are written."""
    attended: float = 0.0
    """Pairs of a token and a position that it attends to, in each layer."""
    rows_read: float = 0.0
    """Rows of keys and values read, each of one layer; a pass reads a row once for all its tokens."""
    filled_runs: float = 0.0
    """Layers of which only keys and values were made, once for each pass."""
    filled: float = 0.0
    """Rows of keys and values that were made without running the layer."""
    head_runs: float = 0.0
    """Passes that projected any position onto the vocabulary: the projection is read once for all of them."""
    heads: float = 0.0
    """Positions projected onto the vocabulary."""


def of_passes(layers: int, passes: float, tokens: float = math.nan, heads: float = math.nan) -> Totals:
    """Passes through so many layers, each with a head, over so many tokens and projecting so many; where they stand is not said.

    >>> found = of_passes(4, 3, 7)
    >>> found.layer_runs, found.layer_passes, found.head_runs, found.heads
    (12, 28, 3, nan)
    """
    return Totals(passes, layers * passes, layers * tokens, math.nan, math.nan, head_runs=passes, heads=heads)


class Work(NamedTuple):
    """What a decoding works: of each model, and in moving states and cache rows from process to process."""

    of: Mapping[str, Totals]
    adoptions: float = 0.0
    adopted_rows: float = 0.0


def plain_work(layers: int, positions: ArrayLike, sequences: ArrayLike = 1) -> Work:
    """Work of plain decoding, from the position of each step's tokens (the first is 0) and how many sequences the step is of.

    >>> plain_work(40, range(10)).of["target"].layer_passes, plain_work(40, range(10)).of["target"].rows_read
    (400.0, 2200.0)
    """
    seen, widths = np.broadcast_arrays(np.asarray(positions, dtype=np.float64) + 1, np.asarray(sequences, dtype=np.float64))
    steps, attended, heads = seen.size, layers * float(widths @ seen), float(widths.sum())
    return Work({"target": Totals(steps, layers * steps, layers * heads, attended, attended, head_runs=steps, heads=heads)})


class Bill(NamedTuple):
    """Operations and bytes of a decoding. Transferred bytes are cache rows and states; tokens themselves are not counted."""

    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    head_passes: float
    transferred_bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte of weights and cache that is read or written [1/byte]."""
        moved = self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes
        return self.flops / moved if moved else float("nan")


def bill(work: Work, shapes: Mapping[str, Shape], *, bytes_each: int | None = None) -> Bill:
    """Operations and bytes of what models and moves come to, with the shape of each model by its role.

    A number takes what the `dtype` of its model says, or `bytes_each` in all of them.
    """
    if bytes_each is not None:
        checks.whole("bytes_each", bytes_each, 1)
    flops = weights = read = written = heads = 0.0
    for role, own in work.of.items():
        if role not in shapes:
            raise checks.ParameterError(f"shapes must have one for the {role} model, got those of {', '.join(shapes) or 'none'}")
        shape = shapes[role]
        each = shape.bytes_each if bytes_each is None else bytes_each
        row = shape.cache_bytes(1, bytes_each=each)
        making = shape.hidden * 2 * shape.kv_heads * shape.head_dim  # weights of keys and values
        flops += 2 * (shape.layer_weights * own.layer_passes + shape.head_weights * own.heads + making * own.filled)
        flops += 4 * shape.heads * shape.head_dim * own.attended
        weights += each * (shape.layer_weights * own.layer_runs + shape.head_weights * own.head_runs)
        weights += each * making * own.filled_runs
        read += row * own.rows_read
        written += row * (own.layer_passes + own.filled)
        heads += own.heads
    moved = 0.0
    if work.adoptions:
        shape = shapes["target"]
        each = shape.bytes_each if bytes_each is None else bytes_each
        moved = shape.cache_bytes(1, bytes_each=each) * work.adopted_rows + each * shape.hidden * work.adoptions
    return Bill(flops, weights, read, written, heads, moved)


def _run(kind: Kind) -> int:
    """Layers that are run as a whole."""
    return 0 if kind.layers.kv_only else kind.layers.size


def _filled(kind: Kind) -> int:
    """Layers of which only keys and values are made."""
    return kind.layers.size if kind.layers.kv_only else 0


