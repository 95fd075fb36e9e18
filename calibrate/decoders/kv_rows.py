"""KV cache rows of a model's layers, with a separate length per layer.

Buffers have spare capacity, so a pass copies only its new rows, and a cut changes only a length. A copy shares the buffers until
either writes where the other reads. The library's layers receive `KvRows` as their cache, and call only `update`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

ROOM = 64
"""Least spare rows of a new buffer."""
LARGE, FEW = 1 << 20, 2
"""A buffer of more bytes on a CPU has few spare rows. Gaps between the rows of one head and those of the next make attention over
rows that are not in a core's cache up to 1.8 times as slow, which costs more than to copy the rows every third token."""


class RowsWritten(Exception):  # noqa: N818  it is no error: it ends a layer of which only keys and values are wanted
    """Raised to end a layer after its keys and values are written."""


class WritePositions(NamedTuple):
    """Write positions of a pass over sequences at unequal positions."""

    sequences: Tensor
    """Index of each in the batch, shape (sequences, 1), or (tokens,) if widths are unequal."""
    positions: Tensor
    """Shape (sequences, width), or (tokens,) if widths are unequal."""
    first: int
    """First position."""
    end: int
    """End after the last position."""
    ends: tuple[int, ...]
    """End of each sequence."""
    written: Tensor | None = None
    """With unequal widths: True for tokens that write rows, False for padding, shape (sequences, widest)."""


class LayerRows:
    """Keys and values of one layer, shape (sequences, heads, capacity, head_dim), of which the first `length` rows are valid.

    If sequences hold unequal numbers of rows, `ends` has the number of each, and `length` is the largest.
    """

    __slots__ = ("ends", "fixed", "initialized", "keys", "length", "shared_rows", "values")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0
        self.shared_rows = 0
        """Rows of the buffer that a copy may read: writing there needs a new buffer."""
        self.fixed = False
        """True for the buffer of a CUDA graph (`calibrate.untested_on_gpu.cuda_graphs`), which no copy shares."""
        self.ends: tuple[int, ...] | None = None
        self.initialized = False
        """True if the whole buffer is initialised: masked attention reads the rows after the end of a shorter sequence."""

    def copy(self) -> LayerRows:
        """Return a copy that shares the buffer unless that is fixed. Only the original may append in place, never the copy."""
        other = LayerRows()
        if self.fixed:
            if self.keys is not None and self.values is not None and self.length:
                other.write(self.keys[:, :, : self.length], self.values[:, :, : self.length])
            return other
        other.keys, other.values, other.length = self.keys, self.values, self.length
        other.ends, other.initialized = self.ends, self.initialized
        other.shared_rows = self.keys.shape[2] if self.keys is not None else 0
        self.shared_rows = max(self.shared_rows, self.length)
        return other

    def write(self, keys: Tensor, values: Tensor, initialized: bool = False) -> tuple[Tensor, Tensor]:
        """Append rows, and return views of all valid rows."""
        start, end = self.length, self.length + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2] or start < self.shared_rows:
            self._move(keys, end, initialized)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def write_each(self, keys: Tensor, values: Tensor, at: WritePositions) -> tuple[Tensor, Tensor]:
        """Write rows of sequences at unequal positions, and return views up to the end of the longest sequence."""
        if self.keys is None or at.end > self.keys.shape[2] or at.first < self.shared_rows or not self.initialized:
            self._move(keys, at.end, True)
        assert self.keys is not None
        assert self.values is not None
        for buffer, made in ((self.keys, keys.transpose(1, 2)), (self.values, values.transpose(1, 2))):
            buffer[at.sequences, :, at.positions] = made if at.written is None else made[at.written]
        self.length, self.ends = at.end, at.ends
        return self.keys[:, :, : at.end], self.values[:, :, : at.end]

    def set_ends(self, ends: tuple[int, ...]) -> None:
        """Set the number of valid rows of each sequence."""
        self.length, self.ends = max(ends), ends if len({*ends}) > 1 else None

    def _move(self, like: Tensor, end: int, initialized: bool = False) -> None:
        """Move the rows to a new buffer, with spare capacity of a half, or of few rows (`LARGE`)."""
        sequences, heads, _, size = like.shape
        room = max(end // 2, ROOM)
        if like.device.type == "cpu" and not initialized and sequences * heads * (end + room) * size * like.itemsize > LARGE:
            room = FEW
        shape = (sequences, heads, end + room, size)
        old_keys, old_values, self.initialized = self.keys, self.values, initialized
        self.keys, self.values = (like.new_zeros(shape) if initialized else like.new_empty(shape) for _ in range(2))
        if old_keys is not None and old_values is not None and self.length:
            self.keys[:, :, : self.length] = old_keys[:, :, : self.length]
            self.values[:, :, : self.length] = old_values[:, :, : self.length]
        self.shared_rows, self.fixed = 0, False

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        stay = next((index for index, row in enumerate(rows) if index != row), len(rows))
        if stay == len(rows):
            self.length = stay
        elif self.keys is not None and self.values is not None:
            keys, values = self.keys[:, :, rows[stay:]], self.values[:, :, rows[stay:]]
            self.length = stay
            self.write(keys, values)

    def select(self, chosen: list[int]) -> LayerRows:
        """Return the rows of some of the sequences."""
        other = LayerRows()
        if self.keys is not None and self.values is not None:
            ends = (self.length,) if self.ends is None else tuple([self.ends[index] for index in chosen])
            rows = slice(0, max(ends))
            other.write(self.keys[chosen, :, rows], self.values[chosen, :, rows], initialized=len({*ends}) > 1)
            other.set_ends(ends)
        return other


class KvRows:
    """Rows of all layers, of one or several sequences.

    The rows of a sequence are in order of position. After passes over several hypotheses they are in order of arrival: `at` has the
    position of each row, and `attended` the rows that it attends to, in order.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerRows() for _ in range(layers)]
        self.at: list[int] | None = None
        self.attended: list[Sequence[int]] = []
        self.cross_attention: Any = None
        """Encoder output and its keys and values, for cross-attention; the same for all positions."""
        self.kv_only = False
        self.write_positions: WritePositions | None = None
        """Write positions of the current pass, if its sequences are at unequal positions."""
        self.hidden: tuple[int, int] | None = None
        """Rows that the current pass does not read, as the first one and the end; None: it reads all."""

    def copy(self) -> KvRows:
        """Return the rows that a sub-process starts with."""
        other = KvRows(0)
        other.layers = [layer.copy() for layer in self.layers]
        other.at = None if self.at is None else self.at[:]
        other.attended = self.attended[:]
        other.cross_attention = self.cross_attention
        return other

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new rows and return all rows, as the library's attention expects."""
        held, at = self.layers[layer], self.write_positions
        found = held.write(keys, values) if at is None else held.write_each(keys, values, at)
        if self.kv_only:
            raise RowsWritten
        return found if self.hidden is None else self._visible(*found, *self.hidden)

    @staticmethod
    def _visible(keys: Tensor, values: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values without the rows from `first` on, up to `end`."""
        import torch

        kept = [torch.cat((each[:, :, :first], each[:, :, end:]), dim=2) for each in (keys, values)]
        return kept[0], kept[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of rows of a layer; named by the library."""
        return self.layers[layer].length

    def cut(self, at: int) -> None:
        """Drop all rows from position `at` on."""
        if self.at is None:
            for layer in self.layers:
                layer.length = min(layer.length, at)
            return
        first = min(at, len(self.at))  # a row follows one at each earlier position: the first `at` rows are at positions before it
        later = [row for row in range(first, len(self.at)) if self.at[row] < at]
        if first + len(later) == len(self.at):
            return
        while later and later[0] == first:  # rows before the first that is dropped do not move
            first += 1
            del later[0]
        if later:
            new = {old: row for row, old in enumerate(later, first)}
            kept = [*range(first), *later]
            for layer in self.layers:
                layer.keep(kept)
            moved = list[Sequence[int]]()
            for row in later:
                attended = self.attended[row]
                stay = bisect_left(attended, first)
                moved.append([*attended[:stay], *[new[each] for each in attended[stay:]]])
            self.at = self.at[:first] + [self.at[row] for row in later]
            self.attended = self.attended[:first] + moved
            return
        for layer in self.layers:
            layer.length = first
        del self.at[first:]
        del self.attended[first:]

    def add_hypotheses(self, at: int, tree: tuple[int, ...]) -> list[Sequence[int]]:
        """Add rows for a pass over several hypotheses (`Forward.tree`); return the rows that each token sees, itself the last."""
        if self.at is None:
            length = max(layer.length for layer in self.layers)
            self.at, self.attended = [*range(length)], [range(row + 1) for row in range(length)]
        first = len(self.at)
        before = [row for row in range(max(at - 1, 0), first) if self.at[row] == at - 1]  # no row is at a position after its index
        for index, follows in enumerate(tree):
            parent = before[-1 - follows] if follows < 0 and at else first + follows if follows >= 0 else None
            self.at.append(at if parent is None else self.at[parent] + 1)
            self.attended.append([*([] if parent is None else self.attended[parent]), first + index])
        return self.attended[first:]

    def adopt(self, other: KvRows, at: int, layers: int, hypothesis: int | None = None) -> None:
        """Copy the row of `other` at a position, or of a hypothesis there, for layers [0, layers)."""
        self.cut(at)
        row = at + (hypothesis or 0)
        for mine, theirs in zip(self.layers[:layers], other.layers, strict=False):
            if mine.length != at or theirs.length <= row or theirs.keys is None or theirs.values is None:
                raise RuntimeError(f"the row at position {at} cannot be copied: {theirs.length} rows there, {mine.length} here")
            mine.write(theirs.keys[:, :, row : row + 1], theirs.values[:, :, row : row + 1])

    def select(self, chosen: list[int]) -> KvRows:
        """Return the rows of some of the sequences."""
        other = KvRows(0)
        other.layers = [layer.select(chosen) for layer in self.layers]
        return other


def join_rows(parts: list[KvRows]) -> KvRows:
    """Join the rows of several single sequences to those of a batch."""
    import torch

    result = KvRows(len(parts[0].layers))
    for number, layer in enumerate(result.layers):
        singles = [part.layers[number] for part in parts]
        held = [(each.keys, each.values) for each in singles if each.keys is not None and each.values is not None]
        if not held:
            continue
        ends = tuple([each.length for each in singles])
        keys, values = (torch.cat([_padded(each, kind, held[0][kind], max(ends)) for each in singles]) for kind in (0, 1))
        layer.write(keys, values, initialized=len({*ends}) > 1)
        layer.set_ends(ends)
    return result


def _padded(rows: LayerRows, kind: int, like: Tensor, length: int) -> Tensor:
    """Return the keys (0) or values (1) of a sequence, padded with zeros to `length` rows."""
    held = rows.values if kind else rows.keys
    if held is not None and rows.length == length:
        return held[:, :, :length]
    found = like.new_zeros((1, like.shape[1], length, like.shape[3]))
    if held is not None:
        found[:, :, : rows.length] = held[:, :, : rows.length]
    return found
