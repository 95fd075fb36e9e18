"""The keys and values that a model's layers hold, each layer with a length of its own.

Layers write into buffers that are longer than what they hold, so a pass copies no rows but its own; cutting is a number. A copy
shares the buffers until one of the two writes where the other reads. The library's layers are handed this in the place of their
cache: they call `update` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

ROOM = 64
"""Rows that a buffer has at least behind those that it is made for."""


class RowsMade(Exception):  # noqa: N818  it is no error: it ends a layer of which only keys and values are wanted
    """Keys and values are written, and nothing else of this layer is asked for."""


class Spots(NamedTuple):
    """Where a pass over sequences at unequal positions writes its rows."""

    sequences: Tensor
    """Index of each in the batch, shape (sequences, 1), or (tokens,) where widths are unequal."""
    positions: Tensor
    """Shape (sequences, width), or (tokens,) where widths are unequal."""
    first: int
    """The least of them."""
    end: int
    """Behind the last of them."""
    ends: tuple[int, ...]
    """Behind the last of each sequence."""
    kept: Tensor | None = None
    """Where widths are unequal: which of the tokens, padded to the widest, write rows, shape (sequences, widest)."""


class LayerRows:
    """One layer's keys and values, of shape (sequences, heads, capacity, head_dim), of which `length` rows count.

    Of sequences that hold unequally many, `ends` says how many of each do, and `length` is the most.
    """

    __slots__ = ("ends", "fixed", "keys", "length", "lent", "values", "whole")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0
        self.lent = 0
        """Rows that somebody else may be reading in the same buffer: to write there takes a buffer of one's own."""
        self.fixed = False
        """Whether the buffer is one that graphs write in (`calibrate.untested_on_gpu.cuda_graphs`): nobody else can be reading
        there."""
        self.ends: tuple[int, ...] | None = None
        self.whole = False
        """Whether there are numbers in all of the buffer: after the end of a sequence they are read, and count for nothing."""

    def copy(self) -> LayerRows:
        """The same rows, in the same buffer unless that is fixed. Whoever writes first behind them may; the copy never does."""
        other = LayerRows()
        if self.fixed:
            if self.keys is not None and self.values is not None and self.length:
                other.write(self.keys[:, :, : self.length], self.values[:, :, : self.length])
            return other
        other.keys, other.values, other.length = self.keys, self.values, self.length
        other.ends, other.whole = self.ends, self.whole
        other.lent = self.keys.shape[2] if self.keys is not None else 0
        self.lent = max(self.lent, self.length)
        return other

    def write(self, keys: Tensor, values: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Add rows behind those that count; all that count then, as views."""
        start, end = self.length, self.length + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2] or start < self.lent:
            self._move(keys, end, whole)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def write_each(self, keys: Tensor, values: Tensor, spots: Spots) -> tuple[Tensor, Tensor]:
        """Write rows of sequences at positions of their own; all up to the longest sequence then, as views."""
        if self.keys is None or spots.end > self.keys.shape[2] or spots.first < self.lent or not self.whole:
            self._move(keys, spots.end, True)
        assert self.keys is not None
        assert self.values is not None
        for buffer, made in ((self.keys, keys.transpose(1, 2)), (self.values, values.transpose(1, 2))):
            buffer[spots.sequences, :, spots.positions] = made if spots.kept is None else made[spots.kept]
        self.length, self.ends = spots.end, spots.ends
        return self.keys[:, :, : spots.end], self.values[:, :, : spots.end]

    def hold(self, ends: tuple[int, ...]) -> None:
        """Count so many rows of each sequence."""
        self.length, self.ends = max(ends), ends if len({*ends}) > 1 else None

    def _move(self, like: Tensor, end: int, whole: bool = False) -> None:
        """Into a buffer of one's own, with room to grow by half."""
        shape = (*like.shape[:2], end + max(end // 2, ROOM), like.shape[3])
        old_keys, old_values, self.whole = self.keys, self.values, whole
        self.keys, self.values = (like.new_zeros(shape) if whole else like.new_empty(shape) for _ in range(2))
        if old_keys is not None and old_values is not None and self.length:
            self.keys[:, :, : self.length] = old_keys[:, :, : self.length]
            self.values[:, :, : self.length] = old_values[:, :, : self.length]
        self.lent, self.fixed = 0, False

    def keep(self, places: list[int]) -> None:
        """Keep these of the rows, in their order."""
        if places == [*range(len(places))]:
            self.length = len(places)
        elif self.keys is not None and self.values is not None:
            keys, values = self.keys[:, :, places], self.values[:, :, places]
            self.length, self.keys, self.values = 0, None, None
            self.write(keys, values)

    def of(self, chosen: list[int]) -> LayerRows:
        """The rows of some of the sequences."""
        other = LayerRows()
        if self.keys is not None and self.values is not None:
            ends = (self.length,) if self.ends is None else tuple([self.ends[index] for index in chosen])
            rows = slice(0, max(ends))
            other.write(self.keys[chosen, :, rows], self.values[chosen, :, rows], whole=len({*ends}) > 1)
            other.hold(ends)
        return other


class KvRows:
    """All layers' rows of one sequence, or of several.

    Rows of one sequence lie by position; where several hypotheses were read they lie in the order they came, and `at` says the
    position of each, `sees` which rows it follows.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerRows() for _ in range(layers)]
        self.at: list[int] | None = None
        self.sees: list[Sequence[int]] = []
        self.crossed: Any = None
        """What a decoder of an encoder-decoder attends to, with its keys and values: the same for all positions."""
        self.kv_only = False
        self.spots: Spots | None = None
        """Where the pass that is made writes, if its sequences stand at unequal positions."""

    def copy(self) -> KvRows:
        """What a sub-process starts with."""
        other = KvRows(0)
        other.layers = [layer.copy() for layer in self.layers]
        other.at = None if self.at is None else self.at[:]
        other.sees = self.sees[:]
        other.crossed = self.crossed
        return other

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the library's attention calls: write, and hand back all rows."""
        own, spots = self.layers[layer], self.spots
        found = own.write(keys, values) if spots is None else own.write_each(keys, values, spots)
        if self.kv_only:
            raise RowsMade
        return found

    def get_seq_length(self, layer: int = 0) -> int:
        """Rows that a layer holds: the library's name."""
        return self.layers[layer].length

    def cut(self, at: int) -> None:
        """Let go of all rows at position `at` and behind it."""
        if self.at is None:
            for layer in self.layers:
                layer.length = min(layer.length, at)
            return
        places = [place for place, position in enumerate(self.at) if position < at]
        if len(places) == len(self.at):
            return
        first = next((place for place, old in enumerate(places) if place != old), len(places))  # before it nothing moves
        new = {old: place for place, old in enumerate(places)}
        for layer in self.layers:
            layer.keep(places)
        self.at = [self.at[place] for place in places]
        self.sees = self.sees[:first] + [[new[each] for each in self.sees[place]] for place in places[first:]]

    def follow(self, at: int, tree: tuple[int, ...]) -> list[Sequence[int]]:
        """Place the tokens of a pass over several hypotheses, as `Forward.tree` says; which rows each sees, itself the last."""
        if self.at is None:
            length = max(layer.length for layer in self.layers)
            self.at, self.sees = [*range(length)], [range(place + 1) for place in range(length)]
        before = [place for place, position in enumerate(self.at) if position == at - 1]
        first = len(self.at)
        for index, follows in enumerate(tree):
            place = before[-1 - follows] if follows < 0 and at else first + follows if follows >= 0 else None
            self.at.append(at if place is None else self.at[place] + 1)
            self.sees.append([*([] if place is None else self.sees[place]), first + index])
        return self.sees[first:]

    def adopt(self, other: KvRows, at: int, layers: int, hypothesis: int | None = None) -> None:
        """Take over another's rows at one position, of layers [0, layers): there the only one, or that of a hypothesis."""
        self.cut(at)
        place = at + (hypothesis or 0)
        for mine, theirs in zip(self.layers[:layers], other.layers, strict=False):
            if mine.length != at or theirs.length <= place or theirs.keys is None or theirs.values is None:
                raise RuntimeError(f"rows at position {at} cannot be taken over: {theirs.length} there, {mine.length} here")
            mine.write(theirs.keys[:, :, place : place + 1], theirs.values[:, :, place : place + 1])

    def of(self, chosen: list[int]) -> KvRows:
        """The rows of some of the sequences."""
        other = KvRows(0)
        other.layers = [layer.of(chosen) for layer in self.layers]
        return other


def joined(parts: list[KvRows]) -> KvRows:
    """The rows of several sequences, each by itself, as those of one batch."""
    import torch

    result = KvRows(len(parts[0].layers))
    for number, layer in enumerate(result.layers):
        own = [part.layers[number] for part in parts]
        held = [(each.keys, each.values) for each in own if each.keys is not None and each.values is not None]
        if not held:
            continue
        ends = tuple([each.length for each in own])
        keys, values = (torch.cat([_padded(each, kind, held[0][kind], max(ends)) for each in own]) for kind in (0, 1))
        layer.write(keys, values, whole=len({*ends}) > 1)
        layer.hold(ends)
    return result


def _padded(rows: LayerRows, kind: int, like: Tensor, length: int) -> Tensor:
    """The keys (0) or values (1) of a sequence, padded to so many rows."""
    whose = rows.values if kind else rows.keys
    if whose is not None and rows.length == length:
        return whose[:, :, :length]
    found = like.new_zeros((1, like.shape[1], length, like.shape[3]))
    if whose is not None:
        found[:, :, : rows.length] = whose[:, :, : rows.length]
    return found
