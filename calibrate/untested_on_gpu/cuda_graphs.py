"""A decoder whose passes are replays of CUDA graphs: each shape of pass is captured once, and then launched as a whole.

    decoder = Graphs(decoder, room=128)
    work = Real({"target": decoder}).run(autoregressive.decode(parameters, prompt, 64), 64)

A graph runs again what was launched when it was captured, on the same memory: every number of Python's is baked in. So all that
differs between passes of one shape lies in tensors that stay where they are, and is written there before a replay: tokens and
their position (`_Desk`), states of the layers before, and rows (`_Home`). What differs otherwise is another graph: how many texts
and tokens, which layers, and what is made of them (`_Shape`).

Rows lie in buffers of a fixed length, which a pass reads whole under a mask. What a pass takes therefore does not grow with its
context: it is what the longest text takes.

Whatever a graph has made lies in memory that the next replay of any graph may overwrite, as all share one pool. So it leaves this
file as a copy, made right behind the replay; and what one graph reads of another (`_Desk`) is written to memory outside the pool.

Passes over more than `WIDEST` tokens of a text, which are prompts, are launched one by one on the same rows, and so is what cannot
be captured: passes over several hypotheses, and those that somebody looks into (`Graphs.apart` counts them). Sub-processes within
one process take turns in the buffers: right, and slow. `calibrate.decode.real_decoding` takes neither.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.decoders.kv_rows import KvRows, RowsMade
from calibrate.decoders.transformers_adapter import Decoder, Place, run_layers
from calibrate.devices import machine
from model.base import checks
from model.base.checks import ParameterError
from model.steps import Batch, LayerSpan

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

__all__ = ["WIDEST", "Graphs"]
WIDEST = 32
"""Tokens of a text in a pass that is captured, at most."""
BLOCK = 64
"""Buffers are so many rows long, or a multiple: attention works on blocks."""
WARM_UPS = 3
"""Times that a pass is run before it is captured: whatever is made once must be there."""
GROWING = ("dynamic", "longrope")
"""Kinds of rotary positions that look, on the processor, how long the text is."""


class Graphs(Decoder):
    """A decoder that replays its passes, in the place of another whose layers and weights it uses.

    Parameters
    ----------
    inner
        The decoder.
    room
        Rows of each text that the buffers hold: prompt and tokens.
    texts
        Texts of a batch, at most.
    cuda
        What makes graphs and streams: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, inner: Decoder, room: int, texts: int = 1, cuda: Any = None) -> None:
        checks.whole("room", room, 1)
        checks.whole("texts", texts, 1)
        import torch

        check(inner)
        vars(self).update(vars(inner))
        machine.make_current(str(self.device))  # graphs are captured on a stream of the current device
        self.inner, self.room, self.texts = inner, room, texts
        self.cuda = cuda_of(inner.device) if cuda is None else cuda
        self.side = self.cuda.Stream(device=self.device)
        self.pool = self.cuda.graph_pool_handle()
        self.apart: Counter[str] = Counter()
        """Passes that were launched one by one though they are no wider than graphs are, by why: what the method does."""
        self.captured = 0
        """Graphs."""
        self._passes: dict[_Shape, _Graph] = {}
        self._desks: dict[tuple[int, int], _Desk] = {}
        self._heads: dict[tuple[int, int | None], tuple[Tensor, _Graph]] = {}
        with torch.inference_mode():
            self._home = _Home(self, room, texts)

    def rows(self) -> KvRows:
        """No rows yet, of a new text; they will lie in the buffers from its first token on."""
        import torch

        found = self.inner.rows()
        with torch.inference_mode():
            self._home.take(found, 1)
        return found

    def replays(self, width: int) -> bool:
        """Whether plain passes over so many tokens of a text are replayed."""
        return width <= WIDEST

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Tensor:
        """See `Decoder.run`; what is answered is the caller's to keep. Sequences must be as wide, and stand at one position."""
        import torch

        if batch is not None and not batch.aligned:
            what = f"mode must be eager where sequences of a batch stand at unequal positions, as {len(batch.sequences)} of them do"
            raise ParameterError(f"{what}; take batch = 1, or mode eager")
        count = 1 if batch is None else len(batch.sequences)
        width = len(tokens) // count
        why = "follows several hypotheses" if tree or rows.at is not None else "is looked into" if between is not None else ""
        if why or not self.replays(width):
            if self.replays(width):
                self.apart[why] += 1
            return super().run(tokens, at, layers, rows, state, batch=batch, tree=tree, seen=seen, between=between)
        end, numbers = at + width, run_layers(layers)
        self._check(end, count)
        with torch.inference_mode():
            self._cut(rows, at, layers)
            for layer in numbers:
                if rows.layers[layer].length != at:
                    raise RuntimeError(f"layer {layer} holds {rows.layers[layer].length} rows, and a pass is at position {at}")
            self._home.take(rows, count)
            desk = self._desk(count, width)
            desk.told(tokens, at)
            if state is not None:
                desk.goes_on_from(state)
            shape = _Shape(count, width, (*numbers,), state is None, layers.kv_only, seen is not None)
            if shape not in self._passes:
                self._passes[shape] = self._capture(lambda: self._whole(shape, desk))
            states, before = self._replay(self._passes[shape])
            for layer in numbers:
                rows.layers[layer].length = end
            if seen is not None:
                seen += before.clone().unbind()
            own: Tensor = states.clone()
            return own

    def forget(self) -> None:
        """Have the next pass be told its tokens and place as if they were new."""
        for desk in self._desks.values():
            desk.said, desk.stands = (), None

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """See `Decoder.logits`."""
        import torch

        if len(states) > max(WIDEST, self.texts):
            return self.inner.logits(states, layer)
        own = self.heads.get(layer) if layer < self.layers else None
        key = len(states), None if own is None else id(own)  # the graph holds it, so no other comes to have its number
        with torch.inference_mode():
            if key not in self._heads:
                given = states.clone()
                self._heads[key] = given, self._capture(lambda: (self.inner.logits(given, layer), own))
            given, graph = self._heads[key]
            given.copy_(states)
            graph.graph.replay()
            found: Tensor = graph.made[0].clone()
            return found

    # --- what is captured ---

    def _whole(self, shape: _Shape, desk: _Desk) -> tuple[Tensor, Tensor | None]:
        """A pass, from what lies on the desk: states behind its layers, and those before each of them if somebody compares."""
        import torch

        rows: Any = _Written(self._home, desk, shape.kv_only)
        before: list[Tensor] | None = [] if shape.seen else None
        hidden = self.inner._embedded(desk.tokens, desk.place) if shape.begins else desk.states
        hidden = self.inner._through(shape.layers, hidden, desk.place, rows, before)
        flat = -1, hidden.shape[-1]
        return hidden.reshape(flat), torch.stack([each.reshape(flat) for each in before]) if before else None

    def _capture(self, body: Callable[[], Any]) -> _Graph:
        """A graph of what this launches; not run yet. Before, it is run on a stream of its own, as torch asks."""
        cuda = self.cuda
        self.side.wait_stream(cuda.current_stream())
        with cuda.stream(self.side):
            for _ in range(WARM_UPS):
                body()
        cuda.current_stream().wait_stream(self.side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self.pool):
            made = body()
        self.captured += 1
        return _Graph(graph, made)

    def _replay(self, graph: _Graph) -> Any:
        """Run a pass: what it makes, until the next replay. Whoever times passes marks its ends."""
        graph.graph.replay()
        return graph.made

    def _desk(self, batch: int, width: int) -> _Desk:
        if (batch, width) not in self._desks:
            self._desks[batch, width] = _Desk(self, batch, width)
        return self._desks[batch, width]

    def _check(self, end: int, batch: int) -> None:
        if self.longest is not None and end > self.longest:
            self._too_long(end)
        if end > self.room:
            what = f"prompt and tokens must be at most {self.room} positions together, for which graphs of {self.name} are made"
            raise ParameterError(f"{what}, got {end}; make room for more, or take mode eager")
        if batch > self.texts:
            what = f"batch must be at most {self.texts}, for which graphs of {self.name} are made"
            raise ParameterError(f"{what}, got {batch}; make them for more texts, or take mode eager")

    # --- of passes that are launched one by one ---

    def _embedded(self, tokens: Tensor, place: Place) -> Tensor:
        return self.inner._embedded(tokens, place)

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return self.inner._extras(positions, rows)

    def _layer(self, layer: int, hidden: Tensor, place: Place, rows: KvRows) -> Tensor:
        return self.inner._layer(layer, hidden, place, rows)

    def _normed(self, states: Tensor) -> Tensor:
        return self.inner._normed(states)

    def _projected(self, states: Tensor) -> Tensor:
        return self.inner._projected(states)


class _Shape(NamedTuple):
    """What graphs of passes differ by."""

    batch: int
    width: int
    layers: tuple[int, ...]
    begins: bool
    """With the tokens, and not with states of the layers before."""
    kv_only: bool
    seen: bool


class _Graph(NamedTuple):
    """A captured graph, and what it makes: to be copied before the next replay."""

    graph: Any
    made: Any


class _Desk:
    """What passes over so many tokens of so many texts find: the tokens, where they stand, and states. It stays where it is.

    Positions, masks and what an architecture makes of positions are made by a graph of their own, once for all passes at a place.
    """

    def __init__(self, graphs: Graphs, batch: int, width: int) -> None:
        import torch

        device = graphs.device
        self.graphs, self.batch, self.width = graphs, batch, width
        self.said: tuple[int, ...] = ()
        """The tokens and the position that lie there."""
        self.stands: int | None = None
        """The position that the place is of."""
        self.numbers = torch.zeros(batch * width + 1, dtype=torch.long, device=device)
        self.tokens = self.numbers[:-1].view(batch, width)
        self.steps = torch.arange(width, device=device)
        self.rows = torch.arange(graphs.room, device=device)
        self.states: Any = None
        self.place = _cloned(self._placed())
        self.graph = graphs._capture(lambda: _written(self.place, self._placed()))

    def _placed(self) -> Place:
        positions = (self.numbers[-1:] + self.steps)[None]
        mask = (self.rows[None, :] <= positions[0][:, None])[None, None]
        return Place(positions, mask, self.graphs.inner._extras(positions, self.graphs.room))

    def told(self, tokens: tuple[int, ...], at: int) -> None:
        """Have these tokens at this position there."""
        import torch

        said = (*tokens, at)
        if said != self.said:
            # Pinned memory is not used again before it was copied: nobody has to wait.
            numbers = torch.tensor(said, pin_memory=self.graphs.device.type == "cuda")
            self.numbers.copy_(numbers, non_blocking=True)
            self.said = said
        if at != self.stands:
            self.graph.graph.replay()
            self.stands = at

    def goes_on_from(self, states: Tensor) -> None:
        """Have these states there, shape (batch * width, hidden)."""
        states = states.view(self.batch, self.width, -1)
        if self.states is None:
            self.states = states.clone()
        self.states.copy_(states)


class _Home:
    """Buffers of all layers' rows, shape (texts, heads, room, head_dim): whose rows a replay writes, they must lie here.

    One text's, or one batch's, lie here at a time. Whose lay here before have them in buffers of their own then.
    """

    def __init__(self, graphs: Graphs, room: int, texts: int) -> None:
        rows = graphs.inner.rows()
        graphs.inner.run((0,), 0, LayerSpan(0, graphs.layers), rows)  # what a row is like, nobody else says
        self.keys, self.values = list[Any](), list[Any]()
        for layer in rows.layers:
            for found, like in ((self.keys, layer.keys), (self.values, layer.values)):
                assert like is not None
                found.append(like.new_zeros((texts, like.shape[1], room, like.shape[3])))  # what is masked must be a number
        self.owner: Callable[[], KvRows | None] = lambda: None

    def take(self, rows: KvRows, batch: int) -> None:
        """Have these rows lie here."""
        owner = self.owner()
        if owner is not rows:
            for layer in () if owner is None else owner.layers:
                _leave(layer)
            self.owner = weakref.ref(rows)
        for number, layer in enumerate(rows.layers):
            if layer.fixed:
                continue
            keys, values = self.keys[number][:batch], self.values[number][:batch]
            if layer.keys is not None and layer.values is not None and layer.length:
                keys[:, :, : layer.length] = layer.keys[:, :, : layer.length]
                values[:, :, : layer.length] = layer.values[:, :, : layer.length]
            layer.keys, layer.values, layer.fixed, layer.lent = keys, values, True, 0


def _leave(layer: Any) -> None:
    """Take a layer's rows into buffers of its own."""
    if layer.fixed and layer.length:
        layer._move(layer.keys, layer.length)
    elif layer.fixed:
        layer.keys, layer.values, layer.fixed = None, None, False


class _Written:
    """What layers are handed in a capture in the place of their rows: where these go is told by a tensor."""

    def __init__(self, home: _Home, desk: _Desk, kv_only: bool) -> None:
        self.home, self.batch, self.at, self.kv_only = home, desk.batch, desk.place.positions[0], kv_only

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the library's attention calls: write, and hand back all that there is room for."""
        found = []
        for buffers, made in ((self.home.keys, keys), (self.home.values, values)):
            own = buffers[layer][: self.batch]
            own.index_copy_(2, self.at, made)
            found.append(own)
        if self.kv_only:
            raise RowsMade
        return found[0], found[1]


def _tensors(place: Place) -> list[Tensor]:
    extras = place.extras if isinstance(place.extras, tuple) else () if place.extras is None else (place.extras,)
    return [place.positions, *(() if place.mask is None else (place.mask,)), *extras]


def _cloned(place: Place) -> Place:
    """The same place in memory of its own."""
    assert place.mask is not None
    extras = place.extras
    if extras is not None:
        extras = tuple(each.clone() for each in extras) if isinstance(extras, tuple) else extras.clone()
    return Place(place.positions.clone(), place.mask.clone(), extras)


def _written(to: Place, place: Place) -> None:
    for old, new in zip(_tensors(to), _tensors(place), strict=True):
        old.copy_(new)


# --- what can be captured at all ---


def cuda_of(device: torch.device | str) -> Any:
    """What makes graphs on a device; one without them is refused."""
    import torch

    kind = str(device).partition(":")[0]
    if kind != "cuda":
        raise ParameterError(f"mode cuda-graph needs a GPU, and the device is {kind}; take --mode eager")
    return torch.cuda


def check(decoder: Decoder) -> None:
    """Refuse a model whose passes cannot be captured."""
    if decoder.config.is_encoder_decoder:
        raise ParameterError(f"mode must be eager with an encoder-decoder such as {decoder.name}, got cuda-graph")
    kinds = getattr(getattr(decoder.body, "rotary_emb", None), "rope_type", "")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if any(each in kind for each in GROWING):
            what = f"whose positions are of kind {kind}: they look how long the text is"
            raise ParameterError(f"mode must be eager with {decoder.name}, {what}, got cuda-graph")


def captured(models: Iterable[Decoder]) -> int:
    """Graphs of these models by now."""
    return sum(each.captured for each in models if isinstance(each, Graphs))


def apart(models: Iterable[Decoder]) -> Counter[str]:
    """Passes of these models by now that were launched one by one though they are no wider than graphs are, by why."""
    found: Counter[str] = Counter()
    for each in models:
        if isinstance(each, Graphs):
            found.update(each.apart)
    return found


def mode_of(decoder: Decoder) -> str:
    """How a decoder makes its passes: a name of `model.logs.measured_runs.MODES`."""
    return "cuda-graph" if isinstance(decoder, Graphs) else "eager"


def rounded(room: int) -> int:
    """Rows of buffers that so many are to lie in.

    >>> rounded(1), rounded(64), rounded(65)
    (64, 64, 128)
    """
    return -(-room // BLOCK) * BLOCK
