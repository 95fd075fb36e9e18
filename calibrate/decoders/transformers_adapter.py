"""Adapter of transformers models: passes through any span of layers, with separate KV cache rows (`calibrate.decoders.kv_rows`).

The library's layers are called unchanged. The work of the model around them (positions, masks, norms, scales) is done here, for
each family of architectures. All calls of layers in this project are in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from calibrate.decoders.kv_rows import KvRows, RowsWritten, WritePositions
from model.architectures import shape_configs
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.steps import Batch, LayerSpan, visible_positions

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


FIXED_ENCODINGS = ("default", "linear", "llama3", "yarn")
"""Rotary encodings, by the library's names, in which that of a position does not depend on the length of the sequence."""
ENCODED = 512
"""Least positions that are encoded at once."""


class PassPositions(NamedTuple):
    """Positions and attention mask of the tokens of a pass."""

    positions: Tensor
    """Shape (1, width), or (sequences, width) for a batch with sequences at unequal positions."""
    mask: Tensor | None
    """True if a token attends to a row, shape (1 or sequences, 1, width, rows); None: causal, to itself and all before it."""
    extras: Any
    """The architecture's encoding of the positions, for all layers."""
    write_positions: WritePositions | None = None
    """Write positions of the rows, if sequences are at unequal positions."""
    hidden: tuple[int, int] | None = None
    """Rows that a pass with a context budget leaves out, as the first one and the end; None: none."""


def run_layers(layers: LayerSpan) -> list[int]:
    """Return the layers of a pass, without its gaps.

    >>> run_layers(LayerSpan(0, 6, ((1, 4),)))
    [0, 4, 5]
    """
    return [layer for low, high in layers.ranges for layer in range(low, high)]


class Padding(NamedTuple):
    """Tokens of a batch with unequal widths, padded to a rectangle with copies of each sequence's last token."""

    token_indices: Tensor
    """Index among the tokens of the pass, shape (sequences, widest)."""
    is_token: Tensor
    """True for tokens of the pass, False for copies; same shape."""


class Decoder:
    """Layers, embedding and head of a decoder of the transformers library.

    Parameters
    ----------
    full
        The library's model, with its head; it is set to `eval`.
    name
        Name for messages.

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
        import torch

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
        """Trained heads by the layer after which they apply, shape (vocabulary, hidden) each. Other layers use the model's head."""
        self.tokenizer: Any = None
        self.checksum = ""
        """Checksum of the weights, if loaded from files."""
        self.source: Any = None
        """Output of the encoder, for an encoder-decoder."""
        self.max_positions = self._max_positions()
        self._last_positions: tuple[int, int, PassPositions] | None = None
        """Positions of the last pass, kept for the next pass, which may run later layers of the same tokens."""
        self._encoded: tuple[Tensor, ...] | None = None
        """Positions from 0 on, shape (1, positions), and their encodings, each (1, positions, size): see `_consecutive`."""
        self.numbers: Tensor | None = torch.arange(self.vocabulary) if self.device.type == "cpu" else None
        """All token ids, on the device: a view of it needs no tensor, and no synchronous copy from the host."""

    def _max_positions(self) -> int | None:
        """Return the most positions of the model, None if unlimited."""
        found = getattr(self.config, "max_position_embeddings", None)
        window = getattr(self.config, "sliding_window", None)
        if window is not None and getattr(self.config, "use_sliding_window", True):
            found = min(found or window, window)  # beyond the window, rows would have to be dropped
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """End tokens, if any."""
        found = getattr(self.full.generation_config, "eos_token_id", None)
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    @property
    def start(self) -> int | None:
        """Start token of a sequence without a prompt."""
        config = self.config
        found = getattr(config, "decoder_start_token_id", None) if config.is_encoder_decoder else config.bos_token_id
        return found if found is not None else next(iter(self.ends), None)

    def shape(self, dtype: str) -> Shape:
        """Return the shape of the model; refuses architectures whose operations are not modelled."""
        return shape_configs.from_config(self.config.to_dict(), dtype)

    def rows(self) -> KvRows:
        """Return empty rows, for a new sequence."""
        return KvRows(self.layers)

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None, context_budget: int | None = None,
    ) -> Tensor:
        """Run layers on tokens from position `at` on (`model.steps.Forward`); return their states, shape (tokens, hidden).

        `state` is the output of earlier layers. Rows from `at` on are dropped first. Sequences of a batch are padded to the widest;
        padding is computed, but writes no rows. `seen` receives the state before each layer. `between` is called with the index of
        each layer before it runs, and an exception from it ends the pass. With a `context_budget` each sequence's tokens attend to
        the rows of `model.steps.visible_positions` and to themselves, and the library's attention receives no others but those of
        further hypotheses, which are masked.
        """
        import torch

        with torch.inference_mode():
            count = 1 if batch is None else len(batch.sequences)
            padding = None
            if batch is None or batch.aligned:
                self._cut(rows, at, layers)
                place = self._pass_positions(at, len(tokens) // count, tree, rows, context_budget)
            else:
                padding = None if len({*batch.widths}) == 1 else self._padding(batch)
                place = self._unequal_positions(batch, padding, context_budget)
            rows.write_positions, rows.hidden = place.write_positions, place.hidden
            if state is None:
                hidden = self._begin(tokens, count, place, padding)
            else:
                hidden = state.view(count, -1, state.shape[-1]) if padding is None else state[padding.token_indices]
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
        self, layers: Iterable[int], hidden: Tensor, place: PassPositions, rows: KvRows, seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the state after these layers, shape (batch, width, hidden); append the state before each of them to `seen`."""
        for layer in layers:
            if between is not None:
                between(layer)
            if seen is not None:
                seen.append(hidden)
            try:
                made = self._layer(layer, hidden, place, rows)
            except RowsWritten:
                continue  # the state skips this layer
            hidden = made
        return hidden

    def _cut(self, rows: KvRows, at: int, layers: LayerSpan) -> None:
        """Drop the rows that this pass replaces: from `at` on, of its layers and of later ones."""
        if rows.at is not None:
            rows.cut(at)
            return
        for layer in rows.layers[layers.first : layers.last if layers.kv_only else None]:
            layer.length = min(layer.length, at)
            layer.ends = None

    def _pass_positions(
        self, at: int, width: int, tree: tuple[int, ...], rows: KvRows, context_budget: int | None = None
    ) -> PassPositions:
        import torch

        several = bool(tree) or rows.at is not None
        if context_budget is not None and context_budget < at and not several:
            return self._limited_positions(at, width, context_budget)
        if not several:
            if self._last_positions is not None and self._last_positions[:2] == (at, width):
                return self._last_positions[2]
            if self.max_positions is not None and at + width > self.max_positions:
                self._too_long(at + width)
            positions, extras = self._consecutive(at, at + width)
            mask = None
            if width > 1 and at:
                mask = torch.ones(width, at + width, dtype=torch.bool, device=self.device).tril_(at)[None, None]
            place = PassPositions(positions, mask, extras)
            self._last_positions = at, width, place
            return place
        follows = tree or (-1, *range(width - 1))
        seen = rows.add_hypotheses(at, follows)
        assert rows.at is not None
        held = rows.at[-width:]
        if self.max_positions is not None and max(held) >= self.max_positions:
            self._too_long(max(held) + 1)
        sees = np.zeros((width, len(rows.at)), dtype=np.bool_)  # index assignment in torch is ten times slower
        for index, (attended, parent) in enumerate(zip(seen, follows, strict=True)):
            if parent < 0:
                sees[index, attended] = True
            else:  # all that its parent sees, and itself
                sees[index] = sees[parent]
                sees[index, attended[-1]] = True
        first, latest = visible_positions(at, context_budget)
        if first.stop < latest.start:  # rows are in order of arrival, so those beyond the budget are masked, not left out
            places = np.array(rows.at)
            sees[:, (places >= first.stop) & (places < latest.start)] = False
        mask = None if sees.all() else torch.from_numpy(sees).to(self.device)[None, None]
        positions, extras = self._scattered(held, rows.at)
        return PassPositions(positions, mask, extras)

    def _limited_positions(self, at: int, width: int, context_budget: int) -> PassPositions:
        """Place tokens that attend to a part of the rows before them: these rows are left out of keys and values."""
        import torch

        if self.max_positions is not None and at + width > self.max_positions:
            self._too_long(at + width)
        first, latest = visible_positions(at, context_budget)
        positions = torch.arange(at, at + width, device=self.device)[None]
        held = torch.tensor([*first, *range(latest.start, at + width)], device=self.device)
        mask = None
        if width > 1:
            mask = torch.ones(width, len(held), dtype=torch.bool, device=self.device).tril_(context_budget)[None, None]
        return PassPositions(positions, mask, self._extras(positions, held), None, (first.stop, latest.start))

    def _unequal_positions(
        self, batch: Batch, padding: Padding | None, context_budget: int | None = None
    ) -> PassPositions:
        """Place sequences at unequal positions. Rows are in order of position; each token attends to its sequence up to itself."""
        import torch

        end, count = batch.end, len(batch.sequences)
        if self.max_positions is not None and end > self.max_positions:
            self._too_long(end)
        positions = torch.tensor(batch.positions, device=self.device)[:, None]
        numbers, kept = torch.arange(count, device=self.device)[:, None], None
        if padding is None:
            written = positions = positions + torch.arange(batch.widths[0], device=self.device)
        else:  # a copy has the position of its token
            positions = positions + padding.token_indices - padding.token_indices[:, :1]
            kept = padding.is_token
            written, numbers = positions[kept], numbers.expand_as(kept)[kept]
        mask = torch.arange(end, device=self.device) <= positions[:, None, :, None]
        for index, at in enumerate(batch.positions):
            first, latest = visible_positions(at, context_budget)
            mask[index, :, :, first.stop : latest.start] = False
        ends = tuple([at + width for at, width in zip(batch.positions, batch.widths, strict=True)])
        spots = WritePositions(numbers, written, min(batch.positions), end, ends, kept)
        return PassPositions(positions, mask, self._extras(positions, end), spots)

    def _too_long(self, length: int) -> None:
        raise ParameterError(
            f"prompt and tokens together must be at most {self.max_positions} positions, the limit of {self.name}, got {length};"
            " take a shorter prompt or fewer tokens"
        )

    def _begin(self, tokens: tuple[int, ...], count: int, place: PassPositions, padding: Padding | None = None) -> Tensor:
        import torch

        if self.numbers is not None and len(tokens) == 1 and 0 <= tokens[0] < self.vocabulary:
            numbers = self.numbers[tokens[0] : tokens[0] + 1]
        else:
            numbers = torch.tensor(tokens, device=self.device)
        return self._embedded(numbers.view(count, -1) if padding is None else numbers[padding.token_indices], place)

    def _embedded(self, tokens: Tensor, place: PassPositions) -> Tensor:
        result: Tensor = self.embedding(tokens)
        return result

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        """Return the encoding of positions for the layers; `rows` is the number of rows, or the position of each."""
        return self.body.rotary_emb(self.embedding.weight, position_ids=positions)

    def _consecutive(self, first: int, end: int) -> tuple[Tensor, Any]:
        """Return the positions [first, end), shape (1, width), and their encoding; all rows up to the end are read.

        On a CPU a rotary encoding that depends on nothing but the position is computed once for all positions: that of one token
        takes as long as a third of a small layer. On a GPU passes may run on several streams, which must not share it.
        """
        import torch

        encoded = self._encoded_to(end)
        if encoded is None:
            positions = torch.arange(first, end, device=self.device)[None]
            return positions, self._extras(positions, end)
        positions, *extras = [each[:, first:end] for each in encoded]
        return positions, (*extras,)

    def _scattered(self, held: list[int], at: list[int]) -> tuple[Tensor, Any]:
        """Return these positions, shape (1, width), and their encoding; `at` has the position of each row."""
        import torch

        positions, encoded = torch.tensor(held, device=self.device), self._encoded_to(max(held) + 1)
        if encoded is None:
            return positions[None], self._extras(positions[None], torch.tensor(at, device=self.device))
        return positions[None], tuple([each.index_select(1, positions) for each in encoded[1:]])

    def _encoded_to(self, end: int) -> tuple[Tensor, ...] | None:
        """Return all positions up to at least `end` and their encodings, if these are fixed."""
        import torch

        kind = getattr(getattr(self.body, "rotary_emb", None), "rope_type", None)
        if self.device.type != "cpu" or kind not in FIXED_ENCODINGS:
            return None
        if self._encoded is None or end > self._encoded[0].shape[1]:
            whole = torch.arange(max(2 * end, ENCODED))[None]
            self._encoded = whole, *self._extras(whole, whole.shape[1])
        return self._encoded

    def _layer(self, layer: int, hidden: Tensor, place: PassPositions, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](
            hidden, attention_mask=place.mask, position_ids=place.positions, position_embeddings=place.extras,
            **{self.cache_name: rows},
        )  # fmt: skip
        return result

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """Return the logits of the next token from states after `layer` layers, shape (width, vocabulary), in the model's dtype."""
        import torch

        with torch.inference_mode():
            if layer < self.layers and layer in self.heads:
                return torch.nn.functional.linear(self._normed(states), self.heads[layer])
            return self.final_head_logits(states)

    def final_head_logits(self, states: Tensor) -> Tensor:
        """Return the logits of the model's head, applied to states after any layer as if it were the last."""
        import torch

        with torch.inference_mode():
            return self._projected(self._normed(states))

    def warm(self) -> None:
        """Run a token through the model, so that one-time work of the library is done."""
        self.logits(self.run((0,), 0, LayerSpan(0, self.layers), self.rows()), self.layers).argmax()
        self.settle()

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _normed(self, states: Tensor) -> Tensor:
        return states if self.norm is None else self.norm(states)

    def _projected(self, states: Tensor) -> Tensor:
        result: Tensor = self.head(states)
        return result


class NeoX(Decoder):
    """Pythia and other GPT-NeoX models: the cache argument has another name."""

    body_norm = "final_layer_norm"
    cache_name = "layer_past"


class Phi(Decoder):
    """Phi: the norm has another name."""

    body_norm = "final_layernorm"


class GPT2(Decoder):
    """GPT-2: learned positions, added to the embedding."""

    body_layers = "h"
    body_norm = "ln_f"

    def _embedded(self, tokens: Tensor, place: PassPositions) -> Tensor:
        result: Tensor = self.embedding(tokens) + self.body.wpe(place.positions)
        return result

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return None

    def _layer(self, layer: int, hidden: Tensor, place: PassPositions, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](hidden, past_key_values=rows, attention_mask=place.mask)
        return result


class OPT(Decoder):
    """OPT: learned positions with an offset; some sizes project in and out, some have no final norm."""

    body_norm = "final_layer_norm"

    def _embedded(self, tokens: Tensor, place: PassPositions) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        if self.body.project_in is not None:
            hidden = self.body.project_in(hidden)
        return hidden + self.body.embed_positions(None, position_ids=place.positions)  # type: ignore[no-any-return]

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return None

    def _layer(self, layer: int, hidden: Tensor, place: PassPositions, rows: KvRows) -> Tensor:
        result: Tensor = self.modules[layer](
            hidden, attention_mask=place.mask, position_ids=place.positions, past_key_values=rows
        )
        return result

    def _projected(self, states: Tensor) -> Tensor:
        if self.body.project_out is not None:
            states = self.body.project_out(states)
        return super()._projected(states)


class T5(Decoder):
    """T5 and mT5: positions are a bias of the attention; layers also attend to the encoder's output."""

    body_layers = "block"
    body_norm = "final_layer_norm"

    def _max_positions(self) -> int | None:
        return None  # distances beyond the last bucket share its bias

    def read_source(self, tokens: tuple[int, ...]) -> None:
        """Run the encoder on a text; rows made from now on belong to it."""
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
            raise RuntimeError(f"{self.name} has an encoder, which has not read a text yet")
        found = KvRows(self.layers)
        found.cross_attention = self.source, EncoderDecoderCache(DynamicCache(), DynamicCache())
        return found

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        import torch

        attention = self.modules[0].layer[0].SelfAttention
        held = torch.arange(rows, device=self.device) if isinstance(rows, int) else rows
        buckets = attention._relative_position_bucket(
            held[None, :] - positions[0][:, None], bidirectional=False, num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )  # fmt: skip
        return attention.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def _layer(self, layer: int, hidden: Tensor, place: PassPositions, rows: KvRows) -> Tensor:
        own, across, forward = self.modules[layer].layer
        source, crossed = rows.cross_attention
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
"""Decoders by the library's name of the architecture."""


def decoder_of(full: Any, name: str) -> Decoder:
    """Return the decoder of a model of the library."""
    kind = full.config.model_type
    if kind not in KINDS:
        raise _unknown(name, kind)
    return KINDS[kind](full, name)


def _flat(hidden: Tensor, padding: Padding | None) -> Tensor:
    """Return the states of the tokens of a pass without padding, shape (tokens, hidden)."""
    return hidden.reshape(-1, hidden.shape[-1]) if padding is None else hidden[padding.is_token]


def _unknown(name: str, kind: str) -> ParameterError:
    return ParameterError(f"{name} has the unsupported architecture {kind}; supported: {', '.join(sorted(KINDS))}")
