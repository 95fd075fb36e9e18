"""What a decoding works, whatever the clock says: layers run, weights and cache rows read, rows written, heads, rows moved.

One record for every method. Interpreters add passes to it as they are made; closed forms say what it must come to. With the shapes
of the models (`model.shapes`) it becomes operations and bytes, and their ratio, the arithmetic intensity: whether arithmetic or
memory is what a decoding waits for. A pass that is cut off is counted whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from model import checks
from model.shapes import Shape
from model.steps import Forward

Kind = tuple[str, int, int, int, int, tuple[tuple[int, int], ...], bool, int]
"""What a pass is but for its position: role, width, first, last, heads, gaps, rows_only, compared."""


def kind_of(step: Forward) -> Kind:
    """The kind of a pass."""
    role, tokens, _, first, last, _, heads, _, _, _, gaps, rows_only, compared = step
    return role, len(tokens), first, last, heads, gaps, rows_only, compared


def context_of(step: Forward) -> tuple[int, int]:
    """How many positions the tokens of a pass attend to, themselves included, and how many the pass reads: each once for a text.

    >>> context_of(Forward("target", (7, 8, 9), 5, 0, 4, heads=3))  # 6 + 7 + 8
    (21, 8)
    """
    width = len(step.tokens)
    if step.after or step.texts:
        attended = sum(position + 1 for position in step.positions)
        return attended, attended if step.texts else step.at + width
    return step.at * width + width * (width + 1) // 2, step.at + width


@dataclass
class Account:
    """Passes by their kind, and what was moved between processes.

    >>> account = Account()
    >>> account.add(Forward("target", (7, 8), 5, 0, 24, gaps=((1, 17),), heads=1))
    >>> account.layer_passes, account.layer_runs, account.attended, account.heads  # 8 layers, 2 tokens that see 6 and 7 positions
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
        return Account({kind: counts for kind, counts in self.passes_by_kind.items() if kind[0] == role})

    @property
    def roles(self) -> list[str]:
        """The models that made passes."""
        return list(dict.fromkeys(kind[0] for kind in self.passes_by_kind))

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        found: Counter[str] = Counter()
        for kind, (count, _, _) in self.passes_by_kind.items():
            found[kind[0]] += count
        return found

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return self._sum(lambda kind, counts: counts[0])

    @property
    def layer_runs(self) -> int:
        """Layers run: each is read once for all tokens of its pass."""
        return self._sum(lambda kind, counts: counts[0] * _run(kind))

    @property
    def layer_passes(self) -> int:
        """Layers run, once for each token: what they compute."""
        return self._sum(lambda kind, counts: counts[0] * _run(kind) * kind[1])

    @property
    def filled_runs(self) -> int:
        """Layers of which only keys and values were made, once for each pass."""
        return self._sum(lambda kind, counts: counts[0] * (_layers(kind) - _run(kind)))

    @property
    def filled(self) -> int:
        """Rows of keys and values that were made without running the layer."""
        return self._sum(lambda kind, counts: counts[0] * (_layers(kind) - _run(kind)) * kind[1])

    @property
    def rows(self) -> int:
        """Rows of keys and values written, each of one layer."""
        return self.layer_passes + self.filled

    @property
    def rows_read(self) -> int:
        """Rows of keys and values read, each of one layer; a pass reads a row once for all its tokens."""
        return self._sum(lambda kind, counts: counts[2] * _run(kind))

    @property
    def attended(self) -> int:
        """Pairs of a token and a position that it attends to, in each layer."""
        return self._sum(lambda kind, counts: counts[1] * _run(kind))

    @property
    def heads(self) -> int:
        """Positions projected onto the vocabulary."""
        return self._sum(lambda kind, counts: counts[0] * kind[4])

    @property
    def head_runs(self) -> int:
        """Passes that projected any: the projection is read once for all of them."""
        return self._sum(lambda kind, counts: counts[0] * (kind[4] > 0))

    def _sum(self, count: Callable[[Kind, list[int]], int]) -> int:
        return sum(count(kind, counts) for kind, counts in self.passes_by_kind.items())

    def bill(self, shapes: Mapping[str, Shape], *, bytes_each: int = 2) -> Bill:
        """Operations and bytes, with the shape of each model by its role.

        >>> from model.shapes import shape
        >>> account = Account()
        >>> account.add(Forward("target", (7,), 0, 0, 40, heads=1))
        >>> bill = account.bill({"target": shape("llama-2-13b")})
        >>> round(bill.operations / 1e9, 1), round(bill.weight_bytes / 1e9, 1), round(bill.intensity, 2)
        (25.7, 25.7, 1.0)
        """
        checks.whole("bytes_each", bytes_each, 1)
        total = [0] * 6
        for role in self.roles:
            if role not in shapes:
                raise checks.ParameterError(f"shapes must have one for the {role} model, got those of {', '.join(shapes)}")
            own, shape = self.of(role), shapes[role]
            deepest = max(kind[3] for kind in own.passes_by_kind)
            if deepest > shape.layers:
                raise checks.ParameterError(f"the {role} model runs {deepest} layers, and its shape has {shape.layers}")
            row = shape.cache_bytes(1, bytes_each=bytes_each)
            making = shape.dim * 2 * shape.kv_heads * shape.head_dim  # weights of keys and values
            total[0] += 2 * (shape.layer_weights * own.layer_passes + shape.head_weights * own.heads + making * own.filled)
            total[0] += 4 * shape.heads * shape.head_dim * own.attended
            total[1] += bytes_each * (shape.layer_weights * own.layer_runs + shape.head_weights * own.head_runs)
            total[1] += bytes_each * making * own.filled_runs
            total[2] += row * own.rows_read
            total[3] += row * own.rows
            total[4] += own.heads
        if self.adoptions and "target" in shapes:
            shape = shapes["target"]
            total[5] = shape.cache_bytes(1, bytes_each=bytes_each) * self.adopted_rows + bytes_each * shape.dim * self.adoptions
        return Bill(*total)


class Bill(NamedTuple):
    """Operations and bytes of a decoding. Transferred bytes are cache rows and states; tokens themselves are not counted."""

    operations: int
    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int
    head_passes: int
    transferred_bytes: int

    @property
    def intensity(self) -> float:
        """Operations for each byte of weights and cache that is read or written [1/byte]."""
        moved = self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes
        return self.operations / moved if moved else float("nan")


def _layers(kind: Kind) -> int:
    return kind[3] - kind[2] - sum(last - first for first, last in kind[5])


def _run(kind: Kind) -> int:
    """Layers that are run as a whole."""
    return 0 if kind[6] else _layers(kind)


