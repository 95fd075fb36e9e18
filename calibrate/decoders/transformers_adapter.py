"""The adapter of transformers models: any span of their layers, one pass at a time, on rows of our own
(`calibrate.decoders.kv_rows`).

The library's layers are called as they are; what its bodies do around them (positions, masks, norms, scales) is done here, once for
each family of architectures. Nothing else of this project calls a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from calibrate.decoders.kv_rows import KvRows, RowsMade, Spots
from model.base.checks import ParameterError
from model.steps import Batch, LayerSpan

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


class Place(NamedTuple):
    """Where the tokens of a pass stand, and what they see."""

    positions: Tensor
    """Shape (1, width), or (sequences, width) for a batch whose sequences stand at unequal positions."""
    mask: Tensor | None
    """True where a token sees a row, shape (1 or sequences, 1, width, rows); None: each sees all before it and itself."""
    extras: Any
    """What an architecture makes of the positions, for all layers."""
    spots: Spots | None = None
    """Where rows are written, if sequences stand at unequal positions."""


def run_layers(layers: LayerSpan) -> list[int]:
    """The layers of a pass, but for its gaps.

    >>> run_layers(LayerSpan(0, 6, ((1, 4),)))
    [0, 4, 5]
    """
    return [layer for low, high in layers.ranges for layer in range(low, high)]


class Padding(NamedTuple):
    """Tokens of a batch of unequal widths as a rectangle: each row ends with copies of the last token of its sequence."""

    taken: Tensor
    """Of each place of the rectangle the index of its token among those of the pass, shape (sequences, widest)."""
    kept: Tensor
    """Whether it is a token of the pass, and no copy; same shape."""


class Decoder:
    """A decoder's layers, embedding and head, of a model of the transformers library.

    Parameters
    ----------
    full
        The library's model, with its head; it is set to `eval`.
    name
        What messages call it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> tiny = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> decoder = decoder_of(LlamaForCausalLM(tiny), "tiny")
    >>> rows = KvRows(decoder.layers)
    >>> state = decoder.run((5, 7, 3), 0, LayerSpan(0, 2), rows)
    >>> decoder.logits(state, 2).shape, rows.get_seq_length(1)
    (torch.Size([3, 11]), 3)
    """

    body_layers: ClassVar[str] = "layers"
    body_norm: ClassVar[str] = "norm"
    cache_name: ClassVar[str] = "past_key_values"

    def __init__(self, full: Any, name: str) -> None:
        self.full, self.name = full.eval(), name
        self.config = full.config
        self.body = full.get_decoder()
        self.modules: list[Any] = list(getattr(self.body, self.body_layers))
        self.layers = len(self.modules)
        self.norm: Any = getattr(self.body, self.body_norm)
        self.head: Any = full.get_output_embeddings()
        self.embedding: Any = self.body.get_input_embeddings()
        self.vocabulary = int(self.head.weight.shape[0])
        self.device: torch.device = self.head.weight.device
        self.dtype: torch.dtype = self.head.weight.dtype
        self.heads: dict[int, Tensor] = {}
        """Trained heads by the layer behind which they read, shape (vocabulary, hidden) each; elsewhere the model's own reads."""
        self.tokenizer: Any = None
        self.checksum = ""
        """Of its weights, where they were read from files."""
        self.source: Any = None
        """What the encoder of an encoder-decoder made of its text."""
        self.longest = self._longest()
        self._placed: tuple[int, int, Place] | None = None
        """Where the tokens of the last pass stood: the next one through later layers has them there too."""
        self.numbers: Tensor | None = None
        """All tokens, on the device: one of them is then a part of it, and no copy that the processor waits for."""

    def _longest(self) -> int | None:
        """The most positions that the model knows."""
        found = getattr(self.config, "max_position_embeddings", None)
        window = getattr(self.config, "sliding_window", None)
        if window is not None and getattr(self.config, "use_sliding_window", True):
            found = min(found or window, window)  # beyond it rows would have to be let go of
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text, if any do."""
        found = getattr(self.full.generation_config, "eos_token_id", None)
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    @property
    def start(self) -> int | None:
        """The token that a text begins with where nothing is given."""
        config = self.config
        found = getattr(config, "decoder_start_token_id", None) if config.is_encoder_decoder else config.bos_token_id
        return found if found is not None else next(iter(self.ends), None)

    def rows(self) -> KvRows:
        """No rows yet, of a new text."""
        return KvRows(self.layers)

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run layers on tokens from position `at` on, shape (tokens, hidden): `model.steps.Forward`.

        `state` is what the layers before have made of them. Rows from `at` on are let go of first. The sequences of a batch are
        padded to the widest of them: what fills them up is computed, but writes no rows. `seen` gets the state before each layer,
        and `between` is called with its number; what that raises ends the pass.
        """
        import torch

        with torch.inference_mode():
            count = 1 if batch is None else len(batch.sequences)
            padding = None
            if batch is None or batch.aligned:
                self._cut(rows, at, layers)
                place = self._place(at, len(tokens) // count, tree, rows)
            else:
                padding = None if len({*batch.widths}) == 1 else self._padding(batch)
                place = self._place_each(batch, padding)
            rows.spots = place.spots
            if state is None:
                hidden = self._begin(tokens, count, place, padding)
            else:
                hidden = state.view(count, -1, state.shape[-1]) if padding is None else state[padding.taken]
            before: list[Tensor] | None = None if seen is None else []
            rows.kv_only = layers.kv_only
            hidden = self._through(run_layers(layers), hidden, place, rows, before, between)
            rows.kv_only = False
            for each in before or ():
                assert seen is not None
                seen.append(_flat(each, padding))
            return _flat(hidden, padding)

    def _padding(self, batch: Batch) -> Padding:
        import torch

        widths, starts = (torch.tensor(each, device=self.device)[:, None] for each in (batch.widths, batch.starts))
        index = torch.arange(max(batch.widths), device=self.device)[None]
        return Padding(starts + torch.minimum(index, widths - 1), index < widths)

    def _through(
        self, layers: Iterable[int], hidden: Tensor, place: Place, rows: KvRows, seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The state behind these layers, shape (batch, width, hidden), and in `seen` that before each of them."""
        for layer in layers:
            if between is not None:
                between(layer)
            if seen is not None:
                seen.append(hidden)
            try:
                made = self._layer(layer, hidden, place, rows)
            except RowsMade:
                continue  # the state goes past it
            hidden = made
        return hidden

    def _cut(self, rows: KvRows, at: int, layers: LayerSpan) -> None:
        """Let go of what this pass replaces: rows from `at` on, of its layers and of those behind them."""
        if rows.at is not None:
            rows.cut(at)
            return
        for layer in rows.layers[layers.first : layers.last if layers.kv_only else None]:
            layer.length = min(layer.length, at)
            layer.ends = None

    def _place(self, at: int, width: int, tree: tuple[int, ...], rows: KvRows) -> Place:
        import torch

        if not tree and rows.at is None:
            if self._placed is not None and self._placed[:2] == (at, width):
                return self._placed[2]
            if self.longest is not None and at + width > self.longest:
                self._too_long(at + width)
            positions = torch.arange(at, at + width, device=self.device)[None]
            mask = None
            if width > 1 and at:
                mask = torch.ones(width, at + width, dtype=torch.bool, device=self.device).tril_(at)[None, None]
            place = Place(positions, mask, self._extras(positions, at + width))
            self._placed = at, width, place
            return place
        seen = rows.follow(at, tree or (-1, *range(width - 1)))
        assert rows.at is not None
        stands = rows.at[-width:]
        if self.longest is not None and max(stands) >= self.longest:
            self._too_long(max(stands) + 1)
        sees = np.zeros((width, len(rows.at)), dtype=np.bool_)  # torch takes ten times as long to be told places
        for index, places in enumerate(seen):
            sees[index, places] = True
        mask = None if sees.all() else torch.from_numpy(sees).to(self.device)[None, None]
        positions = torch.tensor(stands, device=self.device)[None]
        return Place(positions, mask, self._extras(positions, torch.tensor(rows.at, device=self.device)))

    def _place_each(self, batch: Batch, padding: Padding | None) -> Place:
        """Of sequences at positions of their own: their rows lie by position, and each sees its own up to itself."""
        import torch

        end, count = batch.end, len(batch.sequences)
        if self.longest is not None and end > self.longest:
            self._too_long(end)
        positions = torch.tensor(batch.positions, device=self.device)[:, None]
        numbers, kept = torch.arange(count, device=self.device)[:, None], None
        if padding is None:
            places = positions = positions + torch.arange(batch.widths[0], device=self.device)
        else:  # a copy stands where its token does
            positions = positions + padding.taken - padding.taken[:, :1]
            kept = padding.kept
            places, numbers = positions[kept], numbers.expand_as(kept)[kept]
        mask = torch.arange(end, device=self.device) <= positions[:, None, :, None]
        ends = tuple([at + width for at, width in zip(batch.positions, batch.widths, strict=True)])
        spots = Spots(numbers, places, min(batch.positions), end, ends, kept)
        return Place(positions, mask, self._extras(positions, end), spots)

    def _too_long(self, length: int) -> None:
        raise ParameterError(
            f"prompt and tokens must be at most {self.longest} positions together, which {self.name} knows, got {length}; take a"
            " shorter prompt or fewer tokens"
        )

    def _begin(self, tokens: tuple[int, ...], count: int, place: Place, padding: Padding | None = None) -> Tensor:
        import torch

        if self.numbers is not None and len(tokens) == 1:
            numbers = self.numbers[tokens[0] : tokens[0] + 1]
        else:
            numbers = torch.tensor(tokens, device=self.device)
        return self._embedded(numbers.view(count, -1) if padding is None else numbers[padding.taken], place)

    def _embedded(self, tokens: Tensor, place: Place) -> Tensor:
        result: Tensor = self.embedding(tokens)
        return result

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        """What the layers are told of the positions; `rows` is how many rows there are, or the position of each."""
        return self.body.rotary_emb(self.embedding.weight, position_ids=positions)

    def _layer(self, layer: int, hidden: Tensor, place: Place, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](
            hidden, attention_mask=place.mask, position_ids=place.positions, position_embeddings=place.extras,
            **{self.cache_name: rows},
        )  # fmt: skip
        return result

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """What states behind so many layers say of the next token, shape (width, vocabulary), in the model's dtype."""
        import torch

        with torch.inference_mode():
            if layer < self.layers and layer in self.heads:
                return torch.nn.functional.linear(self._normed(states), self.heads[layer])
            return self.common(states)

    def common(self, states: Tensor) -> Tensor:
        """What the model's own head says of states behind any layer, as if that were the last."""
        import torch

        with torch.inference_mode():
            return self._projected(self._normed(states))

    def warm(self) -> None:
        """Run a token through it: what a library does once, it does then."""
        self.logits(self.run((0,), 0, LayerSpan(0, self.layers), self.rows()), self.layers).argmax()
        self.settle()

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _normed(self, states: Tensor) -> Tensor:
        return states if self.norm is None else self.norm(states)

    def _projected(self, states: Tensor) -> Tensor:
        result: Tensor = self.head(states)
        return result


class NeoX(Decoder):
    """Pythia and its kin: the cache has another name."""

    body_norm = "final_layer_norm"
    cache_name = "layer_past"


class Phi(Decoder):
    """Phi: the norm has another name."""

    body_norm = "final_layernorm"


class GPT2(Decoder):
    """GPT-2: learned positions, added to what is embedded."""

    body_layers = "h"
    body_norm = "ln_f"

    def _embedded(self, tokens: Tensor, place: Place) -> Tensor:
        result: Tensor = self.embedding(tokens) + self.body.wpe(place.positions)
        return result

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return None

    def _layer(self, layer: int, hidden: Tensor, place: Place, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](hidden, past_key_values=rows, attention_mask=place.mask)
        return result


class OPT(Decoder):
    """OPT: learned positions behind an offset; some sizes project in and out, some have no last norm."""

    body_norm = "final_layer_norm"

    def _embedded(self, tokens: Tensor, place: Place) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        if self.body.project_in is not None:
            hidden = self.body.project_in(hidden)
        return hidden + self.body.embed_positions(None, position_ids=place.positions)  # type: ignore[no-any-return]

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return None

    def _layer(self, layer: int, hidden: Tensor, place: Place, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](
            hidden, attention_mask=place.mask, position_ids=place.positions, past_key_values=rows
        )
        return result

    def _projected(self, states: Tensor) -> Tensor:
        if self.body.project_out is not None:
            states = self.body.project_out(states)
        return super()._projected(states)


class T5(Decoder):
    """T5 and mT5: positions are told to the attention alone, as a bias; layers attend to what the encoder made too."""

    body_layers = "block"
    body_norm = "final_layer_norm"

    def _longest(self) -> int | None:
        return None  # distances beyond the last bucket are all one

    def read_source(self, tokens: tuple[int, ...]) -> None:
        """Let the encoder read a text; all rows made from now on are of decodings of it."""
        import torch

        with torch.inference_mode():
            self.source = self.full.get_encoder()(input_ids=torch.tensor([tokens], device=self.device)).last_hidden_state

    def warm(self) -> None:
        source = self.source
        if source is None:
            self.read_source((0,))
        super().warm()
        self.source = source

    def rows(self) -> KvRows:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        if self.source is None:
            raise RuntimeError(f"{self.name} has an encoder, which has read nothing yet")
        found = KvRows(self.layers)
        found.crossed = self.source, EncoderDecoderCache(DynamicCache(), DynamicCache())
        return found

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        import torch

        attention = self.modules[0].layer[0].SelfAttention
        stands = torch.arange(rows, device=self.device) if isinstance(rows, int) else rows
        buckets = attention._relative_position_bucket(
            stands[None, :] - positions[0][:, None], bidirectional=False, num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )  # fmt: skip
        return attention.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def _layer(self, layer: int, hidden: Tensor, place: Place, rows: KvRows) -> Tensor:
        own, across, forward = self.modules[layer].layer
        source, crossed = rows.crossed
        hidden = own(hidden, attention_mask=place.mask, position_bias=place.extras, past_key_values=rows)[0]
        hidden = across(hidden, key_value_states=source, past_key_values=crossed)[0]
        result: Tensor = forward(hidden)
        return result

    def _projected(self, states: Tensor) -> Tensor:
        if getattr(self.config, "scale_decoder_outputs", False):
            states = states * self.config.d_model**-0.5
        return super()._projected(states)


KINDS: dict[str, type[Decoder]] = {
    "llama": Decoder, "mistral": Decoder, "qwen2": Decoder, "qwen3": Decoder, "phi": Phi, "gpt_neox": NeoX, "gpt2": GPT2,
    "opt": OPT, "t5": T5, "mt5": T5,
}  # fmt: skip
"""By the library's name of the architecture."""


def decoder_of(full: Any, name: str) -> Decoder:
    """The decoder of a model of the library."""
    kind = full.config.model_type
    if kind not in KINDS:
        raise _unknown(name, kind)
    return KINDS[kind](full, name)


def _flat(hidden: Tensor, padding: Padding | None) -> Tensor:
    """States of the tokens of a pass, in their order, shape (tokens, hidden)."""
    return hidden.reshape(-1, hidden.shape[-1]) if padding is None else hidden[padding.kept]


def _unknown(name: str, kind: str) -> ParameterError:
    return ParameterError(f"{name} is of architecture {kind}, whose layers are not known here; known: {', '.join(sorted(KINDS))}")
