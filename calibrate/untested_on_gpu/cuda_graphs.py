"""A decoder whose passes are replays of CUDA graphs: each shape of pass is captured once, and then launched as a whole.

    decoder = Graphs(decoder, room=128)
    work = Real({"target": decoder}).run(autoregressive.decode(parameters, prompt, 64), 64)

A graph repeats the kernels that were launched while it was captured, on the same memory, with constant arguments. Everything that
differs between passes of one shape is therefore in tensors with a fixed address, which are written before a replay: tokens and
their position (`_Inputs`), states of the layers before, and cache rows (`_Buffers`). Everything else needs another graph: the
number of sequences and tokens, the layers, and the outputs (`_Shape`).

Rows are in buffers of fixed length. A pass reads a whole buffer under a mask, so its time does not grow with the context: it is
that of the longest sequence.

All graphs share one memory pool, so the next replay of any graph may overwrite the output of the previous one. Outputs are
therefore copied directly after the replay; tensors that one graph writes and another reads (`_Inputs`) are outside the pool.

Passes over more than `WIDEST` tokens of a sequence, which are prompts, are launched kernel by kernel on the same rows. So are
passes that cannot be captured: those over several hypotheses, and those with a callback between layers (`Graphs.separate_launches`
counts them). Sub-processes within one process take turns in the buffers, which is correct but slow;
`calibrate.decode.real_decoding` uses neither.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.decoders.kv_rows import KvRows, RowsWritten
from calibrate.decoders.transformers_adapter import Decoder, PassPositions, run_layers
from calibrate.devices import machine
from model.base import checks
from model.base.checks import ParameterError
from model.steps import Batch, LayerSpan

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

__all__ = ["WIDEST", "Graphs"]
WIDEST = 32
"""Largest number of tokens per sequence in a captured pass."""
BLOCK = 64
"""Buffer lengths are multiples of this: attention works on blocks of rows."""
WARM_UPS = 3
"""Runs of a pass before it is captured, which allocate everything that is allocated once."""
GROWING = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the sequence's length, read on the CPU."""


class Graphs(Decoder):
    """A decoder that replays its passes, with the layers and weights of another decoder.

    Parameters
    ----------
    inner
        The other decoder.
    room
        Rows per sequence in the buffers: prompt and tokens.
    sequences
        Largest batch size.
    cuda
        Module that makes graphs and streams: `torch.cuda`, or a stand-in.
    """

    def __init__(self, inner: Decoder, room: int, sequences: int = 1, cuda: Any = None) -> None:
        checks.whole("room", room, 1)
        checks.whole("sequences", sequences, 1)
        import torch

        check(inner)
        vars(self).update(vars(inner))
        machine.make_current(str(self.device))  # graphs are captured on a stream of the current device
        self.inner, self.room, self.sequences = inner, room, sequences
        self.cuda = cuda_of(inner.device) if cuda is None else cuda
        self.side = self.cuda.Stream(device=self.device)
        self.pool = self.cuda.graph_pool_handle()
        self.separate_launches: Counter[str] = Counter()
        """Passes that were launched kernel by kernel although they are no wider than graphs, by reason."""
        self.captured = 0
        """Number of graphs."""
        self._passes: dict[_Shape, _Graph] = {}
        self._all_inputs: dict[tuple[int, int], _Inputs] = {}
        self._heads: dict[tuple[int, int | None], tuple[Tensor, _Graph]] = {}
        with torch.inference_mode():
            self._buffers = _Buffers(self, room, sequences)

    def rows(self) -> KvRows:
        """Return empty rows of a new sequence, in the buffers from its first token on."""
        import torch

        found = self.inner.rows()
        with torch.inference_mode():
            self._buffers.take(found, 1)
        return found

    def replays(self, width: int) -> bool:
        """Whether plain passes over `width` tokens per sequence are replayed."""
        return width <= WIDEST

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None, context_budget: int | None = None,
    ) -> Tensor:
        """See `Decoder.run`; the result is a copy. All sequences must have equal widths and positions."""
        import torch

        if batch is not None and not batch.aligned:
            what = f"mode must be eager if sequences of a batch are at unequal positions, as {len(batch.sequences)} of them are"
            raise ParameterError(f"{what}; take batch = 1, or mode eager")
        count = 1 if batch is None else len(batch.sequences)
        width = len(tokens) // count
        why = "follows several hypotheses" if tree or rows.at is not None else "has a callback" if between is not None else ""
        why = "has a context budget" if context_budget is not None else why
        if why or not self.replays(width):
            if self.replays(width):
                self.separate_launches[why] += 1
            more: Any = {"seen": seen, "between": between, "context_budget": context_budget}
            return super().run(tokens, at, layers, rows, state, batch=batch, tree=tree, **more)
        end, numbers = at + width, run_layers(layers)
        self._check(end, count)
        with torch.inference_mode():
            self._cut(rows, at, layers)
            for layer in numbers:
                if rows.layers[layer].length != at:
                    raise RuntimeError(f"layer {layer} holds {rows.layers[layer].length} rows, and a pass is at position {at}")
            self._buffers.take(rows, count)
            inputs = self._inputs(count, width)
            inputs.set_tokens(tokens, at)
            if state is not None:
                inputs.set_states(state)
            shape = _Shape(count, width, (*numbers,), state is None, layers.kv_only, seen is not None)
            if shape not in self._passes:
                self._passes[shape] = self._capture(lambda: self._whole(shape, inputs))
            states, before = self._replay(self._passes[shape])
            for layer in numbers:
                rows.layers[layer].length = end
            if seen is not None:
                seen += before.clone().unbind()
            copy: Tensor = states.clone()
            return copy

    def forget(self) -> None:
        """Make the next pass copy its tokens and compute its position again."""
        for inputs in self._all_inputs.values():
            inputs.current, inputs.placed_at = (), None

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """See `Decoder.logits`."""
        import torch

        if len(states) > max(WIDEST, self.sequences):
            return self.inner.logits(states, layer)
        own = self.heads.get(layer) if layer < self.layers else None
        key = len(states), None if own is None else id(own)  # the graph keeps the head alive, so its id stays unique
        with torch.inference_mode():
            if key not in self._heads:
                given = states.clone()
                self._heads[key] = given, self._capture(lambda: (self.inner.logits(given, layer), own))
            given, graph = self._heads[key]
            given.copy_(states)
            graph.graph.replay()
            found: Tensor = graph.made[0].clone()
            return found

    # --- captured functions ---

    def _whole(self, shape: _Shape, inputs: _Inputs) -> tuple[Tensor, Tensor | None]:
        """Run a pass on the inputs; return the states after its layers, and if `shape.seen` those before each layer."""
        import torch

        rows: Any = _BufferRows(self._buffers, inputs, shape.kv_only)
        before: list[Tensor] | None = [] if shape.seen else None
        hidden = self.inner._embedded(inputs.tokens, inputs.place) if shape.begins else inputs.states
        hidden = self.inner._through(shape.layers, hidden, inputs.place, rows, before)
        flat = -1, hidden.shape[-1]
        return hidden.reshape(flat), torch.stack([each.reshape(flat) for each in before]) if before else None

    def _capture(self, body: Callable[[], Any]) -> _Graph:
        """Return a graph of the kernels that `body` launches. It is first run on a separate stream, as torch requires."""
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
        """Run a pass; its output is valid until the next replay. Timing wraps this method."""
        graph.graph.replay()
        return graph.made

    def _inputs(self, batch: int, width: int) -> _Inputs:
        if (batch, width) not in self._all_inputs:
            self._all_inputs[batch, width] = _Inputs(self, batch, width)
        return self._all_inputs[batch, width]

    def _check(self, end: int, batch: int) -> None:
        if self.max_positions is not None and end > self.max_positions:
            self._too_long(end)
        if end > self.room:
            what = f"prompt and tokens must be at most {self.room} positions together, for which graphs of {self.name} are made"
            raise ParameterError(f"{what}, got {end}; make room for more, or take mode eager")
        if batch > self.sequences:
            what = f"batch must be at most {self.sequences}, for which graphs of {self.name} are made"
            raise ParameterError(f"{what}, got {batch}; make them for larger batches, or take mode eager")

    # --- passes that are launched kernel by kernel ---

    def _embedded(self, tokens: Tensor, place: PassPositions) -> Tensor:
        return self.inner._embedded(tokens, place)

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return self.inner._extras(positions, rows)

    def _layer(self, layer: int, hidden: Tensor, place: PassPositions, rows: KvRows) -> Tensor:
        return self.inner._layer(layer, hidden, place, rows)

    def _normed(self, states: Tensor) -> Tensor:
        return self.inner._normed(states)

    def _projected(self, states: Tensor) -> Tensor:
        return self.inner._projected(states)


class _Shape(NamedTuple):
    """Properties by which graphs of passes differ."""

    batch: int
    width: int
    layers: tuple[int, ...]
    begins: bool
    """Whether it starts with tokens, not with states of the layers before."""
    kv_only: bool
    seen: bool


class _Graph(NamedTuple):
    """A captured graph, and its output, which the next replay overwrites."""

    graph: Any
    made: Any


class _Inputs:
    """Inputs of passes over `width` tokens of `batch` sequences, at a fixed address: tokens, their position, and states.

    Positions, masks and the architecture's encoding of positions are computed by a separate graph, once per position.
    """

    def __init__(self, graphs: Graphs, batch: int, width: int) -> None:
        import torch

        device = graphs.device
        self.graphs, self.batch, self.width = graphs, batch, width
        self.current: tuple[int, ...] = ()
        """The current tokens and position."""
        self.placed_at: int | None = None
        """Position for which `place` was computed."""
        self.numbers = torch.zeros(batch * width + 1, dtype=torch.long, device=device)
        self.tokens = self.numbers[:-1].view(batch, width)
        self.steps = torch.arange(width, device=device)
        self.rows = torch.arange(graphs.room, device=device)
        self.states: Any = None
        self.place = _cloned(self._placed())
        self.graph = graphs._capture(lambda: _written(self.place, self._placed()))

    def _placed(self) -> PassPositions:
        positions = (self.numbers[-1:] + self.steps)[None]
        mask = (self.rows[None, :] <= positions[0][:, None])[None, None]
        return PassPositions(positions, mask, self.graphs.inner._extras(positions, self.graphs.room))

    def set_tokens(self, tokens: tuple[int, ...], at: int) -> None:
        """Copy these tokens and their position to the device, if they have changed."""
        import torch

        wanted = (*tokens, at)
        if wanted != self.current:
            # Pinned memory is not reused before it is copied: no wait is needed.
            numbers = torch.tensor(wanted, pin_memory=self.graphs.device.type == "cuda")
            self.numbers.copy_(numbers, non_blocking=True)
            self.current = wanted
        if at != self.placed_at:
            self.graph.graph.replay()
            self.placed_at = at

    def set_states(self, states: Tensor) -> None:
        """Copy these states to the inputs, shape (batch * width, hidden)."""
        states = states.view(self.batch, self.width, -1)
        if self.states is None:
            self.states = states.clone()
        self.states.copy_(states)


class _Buffers:
    """Buffers of all layers' rows, shape (sequences, heads, room, head_dim): a replay writes only the rows in them.

    They hold the rows of one sequence or batch at a time. The previous owner's rows move to separate buffers.
    """

    def __init__(self, graphs: Graphs, room: int, sequences: int) -> None:
        rows = graphs.inner.rows()
        graphs.inner.run((0,), 0, LayerSpan(0, graphs.layers), rows)  # a trial pass tells the shape of a row
        self.keys, self.values = list[Any](), list[Any]()
        for layer in rows.layers:
            for found, like in ((self.keys, layer.keys), (self.values, layer.values)):
                assert like is not None
                found.append(like.new_zeros((sequences, like.shape[1], room, like.shape[3])))  # masked rows must not be NaN
        self.owner: Callable[[], KvRows | None] = lambda: None

    def take(self, rows: KvRows, batch: int) -> None:
        """Move these rows to the buffers."""
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
            layer.keys, layer.values, layer.fixed, layer.shared_rows = keys, values, True, 0


def _leave(layer: Any) -> None:
    """Move a layer's rows to a separate buffer."""
    if layer.fixed and layer.length:
        layer._move(layer.keys, layer.length)
    elif layer.fixed:
        layer.keys, layer.values, layer.fixed = None, None, False


class _BufferRows:
    """Rows that layers get during a capture: a tensor holds the positions that they write."""

    def __init__(self, buffers: _Buffers, inputs: _Inputs, kv_only: bool) -> None:
        self.buffers, self.batch, self.at, self.kv_only = buffers, inputs.batch, inputs.place.positions[0], kv_only

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write rows, and return the whole buffers; the library's attention calls this."""
        found = []
        for buffers, made in ((self.buffers.keys, keys), (self.buffers.values, values)):
            own = buffers[layer][: self.batch]
            own.index_copy_(2, self.at, made)
            found.append(own)
        if self.kv_only:
            raise RowsWritten
        return found[0], found[1]


def _tensors(place: PassPositions) -> list[Tensor]:
    extras = place.extras if isinstance(place.extras, tuple) else () if place.extras is None else (place.extras,)
    return [place.positions, *(() if place.mask is None else (place.mask,)), *extras]


def _cloned(place: PassPositions) -> PassPositions:
    """Return a copy of the place."""
    assert place.mask is not None
    extras = place.extras
    if extras is not None:
        extras = tuple(each.clone() for each in extras) if isinstance(extras, tuple) else extras.clone()
    return PassPositions(place.positions.clone(), place.mask.clone(), extras)


def _written(to: PassPositions, place: PassPositions) -> None:
    for old, new in zip(_tensors(to), _tensors(place), strict=True):
        old.copy_(new)


# --- models and devices that support graphs ---


def cuda_of(device: torch.device | str) -> Any:
    """Return the module that makes graphs on a device; refuse a device without them."""
    import torch

    kind = str(device).partition(":")[0]
    if kind != "cuda":
        raise ParameterError(f"mode cuda-graph needs a GPU, and the device is {kind}; take --mode eager")
    return torch.cuda


def check(decoder: Decoder) -> None:
    """Refuse a model whose passes cannot be captured."""
    if isinstance(decoder, DraftHead):
        raise ParameterError(f"mode must be eager with draft heads such as {decoder.name}, got cuda-graph")
    if decoder.config.is_encoder_decoder:
        raise ParameterError(f"mode must be eager with an encoder-decoder such as {decoder.name}, got cuda-graph")
    kinds = getattr(getattr(decoder.body, "rotary_emb", None), "rope_type", "")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if any(each in kind for each in GROWING):
            what = f"whose positions are of kind {kind}: they depend on the sequence's length"
            raise ParameterError(f"mode must be eager with {decoder.name}, {what}, got cuda-graph")


def captured(models: Iterable[Decoder]) -> int:
    """Return the number of graphs that these models have captured."""
    return sum(each.captured for each in models if isinstance(each, Graphs))


def launched_separately(models: Iterable[Decoder]) -> Counter[str]:
    """Return the passes of these models that were launched kernel by kernel although no wider than graphs, by reason."""
    found: Counter[str] = Counter()
    for each in models:
        if isinstance(each, Graphs):
            found.update(each.separate_launches)
    return found


def mode_of(decoder: Decoder) -> str:
    """Return the way in which a decoder makes its passes: a name of `model.logs.measured_runs.MODES`."""
    return "cuda-graph" if isinstance(decoder, Graphs) else "eager"


def rounded(room: int) -> int:
    """Return the buffer length for `room` rows.

    >>> rounded(1), rounded(64), rounded(65)
    (64, 64, 128)
    """
    return -(-room // BLOCK) * BLOCK
