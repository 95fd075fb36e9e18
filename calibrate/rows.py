"""The keys and values that a model's layers hold, each layer with a length of its own.

Layers write into buffers that are longer than what they hold, so a pass copies no rows but its own; cutting is a number. A copy
shares the buffers until one of the two writes where the other reads. The library's layers are handed this in the place of their
cache: they call `update` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

ROOM = 64
"""Rows that a buffer has at least behind those that it is made for."""


class RowsMade(Exception):  # noqa: N818  it is no error: it ends a layer of which only keys and values are wanted
    """Keys and values are written, and nothing else of this layer is asked for."""


class LayerRows:
    """One layer's keys and values, of shape (texts, heads, capacity, head_dim), of which `length` rows count."""

    __slots__ = ("fixed", "keys", "length", "lent", "values")

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0
        self.lent = 0
        """Rows that somebody else may be reading in the same buffer: to write there takes a buffer of one's own."""
        self.fixed = False
        """Whether the buffer is one that graphs write in (`calibrate.graphs`): nobody else can be reading there."""

    def copy(self) -> LayerRows:
        """The same rows, in the same buffer unless that is fixed. Whoever writes first behind them may; the copy never does."""
        other = LayerRows()
        if self.fixed:
            if self.keys is not None and self.values is not None and self.length:
                other.write(self.keys[:, :, : self.length], self.values[:, :, : self.length])
            return other
        other.keys, other.values, other.length = self.keys, self.values, self.length
        other.lent = self.keys.shape[2] if self.keys is not None else 0
        self.lent = max(self.lent, self.length)
        return other

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows behind those that count; all that count then, as views."""
        start, end = self.length, self.length + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2] or start < self.lent:
            self._move(keys, end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _move(self, like: Tensor, end: int) -> None:
        """Into a buffer of one's own, with room to grow by half."""
        shape = (*like.shape[:2], end + max(end // 2, ROOM), like.shape[3])
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
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

    def of(self, texts: list[int]) -> LayerRows:
        """The rows of some of the texts."""
        other = LayerRows()
        if self.keys is not None and self.values is not None:
            other.write(self.keys[texts, :, : self.length], self.values[texts, :, : self.length])
        return other


class Rows:
    """All layers' rows of one text, or of several that stand at the same position.

    Rows of one text lie by position; where several hypotheses were read they lie in the order they came, and `at` says the
    position of each, `sees` which rows it follows.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerRows() for _ in range(layers)]
        self.at: list[int] | None = None
        self.sees: list[Sequence[int]] = []
        self.crossed: Any = None
        """What a decoder of an encoder-decoder attends to, with its keys and values: the same for all positions."""
        self.rows_only = False

    def copy(self) -> Rows:
        """What a sub-process starts with."""
        other = Rows(0)
        other.layers = [layer.copy() for layer in self.layers]
        other.at = None if self.at is None else self.at[:]
        other.sees = self.sees[:]
        other.crossed = self.crossed
        return other

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the library's attention calls: write, and hand back all rows."""
        found = self.layers[layer].write(keys, values)
        if self.rows_only:
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

    def follow(self, at: int, after: tuple[int, ...]) -> list[Sequence[int]]:
        """Place the tokens of a pass over several hypotheses, as `Forward.after` says; which rows each sees, itself the last."""
        if self.at is None:
            length = max(layer.length for layer in self.layers)
            self.at, self.sees = [*range(length)], [range(place + 1) for place in range(length)]
        before = [place for place, position in enumerate(self.at) if position == at - 1]
        first = len(self.at)
        for index, follows in enumerate(after):
            place = before[-1 - follows] if follows < 0 and at else first + follows if follows >= 0 else None
            self.at.append(at if place is None else self.at[place] + 1)
            self.sees.append([*([] if place is None else self.sees[place]), first + index])
        return self.sees[first:]

    def adopt(self, other: Rows, at: int, layers: int, hypothesis: int | None = None) -> None:
        """Take over another's rows at one position, of layers [0, layers): there the only one, or that of a hypothesis."""
        self.cut(at)
        place = at + (hypothesis or 0)
        for mine, theirs in zip(self.layers[:layers], other.layers, strict=False):
            if mine.length != at or theirs.length <= place or theirs.keys is None or theirs.values is None:
                raise RuntimeError(f"rows at position {at} cannot be taken over: {theirs.length} there, {mine.length} here")
            mine.write(theirs.keys[:, :, place : place + 1], theirs.values[:, :, place : place + 1])

    def of(self, texts: list[int]) -> Rows:
        """The rows of some of the texts."""
        other = Rows(0)
        other.layers = [layer.of(texts) for layer in self.layers]
        return other


def joined(parts: list[Rows]) -> Rows:
    """The rows of several texts as those of one batch. Each layer must hold as many of all of them."""
    import torch

    result = Rows(len(parts[0].layers))
    for number, layer in enumerate(result.layers):
        own = [part.layers[number] for part in parts]
        if len({each.length for each in own}) > 1:
            raise RuntimeError(f"texts of a batch hold unequal rows in layer {number}: {[each.length for each in own]}")
        keys = [each.keys[:, :, : each.length] for each in own if each.keys is not None]
        values = [each.values[:, :, : each.length] for each in own if each.values is not None]
        if keys:
            layer.write(torch.cat(keys), torch.cat(values))
    return result
