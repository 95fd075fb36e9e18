"""Draft heads on real models: a layer that drafts one token per pass (EAGLE), and heads that draft all in one pass (Medusa).

Both read the target's states after its final norm, and take the place of a draft model (`model.methods.speculative`, drafters
`heads` and `parallel`). The pass over a token reads the state at the position before it (`model.steps.Features`); before the first
token of a sequence that state is zero.

* `EagleHead` [Li2024]: a product of the token's embedding and the state, then one layer of the Llama architecture for targets of
  any architecture, with a KV cache of its own. Its output is a state as the target's: it is read by the target's own norm and
  output matrix, and by the head's next pass.
* `MedusaHeads` [Cai2024]: K heads, each a residual block and an output matrix. Head j predicts the token j + 1 positions after the
  one whose state all of them read. They know neither the token in between nor each other's, and need no cache.

The numbers of weights are those of the shapes `eagle:TARGET` and `medusa:TARGET` (`model.architectures.draft_heads`).

[Li2024] Y. Li et al. EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty. ICML 2024, arXiv:2401.15077;
SafeAILab/EAGLE @c9292914, eagle/model/cnets1.py: its layer has no norm before the attention, and none after it.
[Cai2024] T. Cai et al. Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. ICML 2024,
arXiv:2401.10774, Section 2.1.1: p_t^(k) = softmax(W_2^(k) (SiLU(W_1^(k) h_t) + h_t)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from calibrate.decoders.kv_rows import KvRows
from calibrate.decoders.transformers_adapter import Decoder, PassPositions
from model.architectures import draft_heads
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.steps import MASK, Batch, LayerSpan

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class EagleSize:
    """Sizes of an EAGLE head's layer, those of the target's layers: numbers of heads, and widths."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int


def eagle_size(target: Decoder) -> EagleSize:
    """Return the sizes of a target's head. Refuses architectures without a shape, such as those that project their embedding."""
    try:
        shape = target.shape("float32")
    except ParameterError as error:
        raise ParameterError(f"no EAGLE head fits {target.name}: {error}") from None
    return EagleSize(shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn)


def eagle_modules(size: EagleSize) -> Any:
    """Return the trainable modules of an EAGLE head, with random weights: `fc`, which joins token and state, and `layer`."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layer = LlamaDecoderLayer(_layer_config(size), 0)
    layer.input_layernorm = torch.nn.Identity()
    return torch.nn.ModuleDict({"fc": torch.nn.Linear(2 * size.hidden, size.hidden), "layer": layer})


def _layer_config(size: EagleSize) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=1, hidden_size=size.hidden, intermediate_size=size.ffn, num_hidden_layers=1, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head_dim, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def medusa_modules(target: Decoder, count: int) -> Any:
    """Return the trainable modules of `count` Medusa heads, which start as the target's own head: `blocks` are 0 [Cai2024]."""
    import torch

    common = target.head.weight.detach().float()
    vocabulary, hidden = common.shape
    blocks = [torch.nn.Linear(hidden, hidden) for _ in range(count)]
    heads = [torch.nn.Linear(hidden, vocabulary, bias=False) for _ in range(count)]
    with torch.no_grad():
        for block, head in zip(blocks, heads, strict=True):
            block.weight.zero_()
            block.bias.zero_()
            head.weight.copy_(common)
    return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks), "heads": torch.nn.ModuleList(heads)})


class DraftHead(Decoder):
    """Draft heads of a target, in the place of a draft model. Norm, embedding, output matrix and vocabulary are the target's.

    Parameters
    ----------
    target
        The model whose states the heads read.
    modules
        The heads' own weights, as `eagle_modules` or `medusa_modules` returns them.
    hidden
        Width of the states.
    """

    kind: ClassVar[str]
    drafts_in_one_pass: ClassVar[bool]

    def __init__(self, target: Decoder, modules: Any, hidden: int) -> None:
        vars(self).update(vars(target))
        self.target, self.hidden = target, hidden
        modules.to(target.device, target.dtype).eval().requires_grad_(False)
        self.name, self.layers, self.heads = f"{self.kind} head of {target.name}", 1, {}
        self._last_positions = self._encoded = None

    @property
    def longest_draft(self) -> int | None:
        """Largest number of tokens of a draft; None if unlimited."""
        return None

    def shape(self, dtype: str) -> Shape:
        """See `Decoder`."""
        return draft_heads.head_of(self.kind, self.target.shape(dtype))

    def states_before(self, tokens: tuple[int, ...], state: Tensor | None) -> Tensor:
        """Return the normed states before all tokens of a pass but the masks, shape (tokens, hidden).

        `state` holds the states after the layers that made them; at the start of a sequence the first one is missing.
        """
        import torch

        known = len(tokens) - tokens.count(MASK)
        found = torch.zeros(0, self.hidden, device=self.device, dtype=self.dtype) if state is None else self._normed(state)
        if len(found) == known:
            return found
        return torch.cat((found.new_zeros(known - len(found), found.shape[1]), found))


class EagleHead(DraftHead):
    """An EAGLE head: one layer, one drafted token per pass."""

    kind = "eagle"
    drafts_in_one_pass = False

    def __init__(self, target: Decoder, modules: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__(target, modules, modules["fc"].out_features)
        self.config = _layer_config(eagle_size(target))
        self.join, self.modules = modules["fc"], [modules["layer"]]
        self._before: Tensor
        """States before the tokens of the current pass."""
        self._rotary = LlamaRotaryEmbedding(self.config).to(target.device)

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None, context_budget: int | None = None,
    ) -> Tensor:
        """See `Decoder.run`; `state` holds the states before the tokens."""
        import torch

        if MASK in tokens:
            raise ParameterError(f"{self.name} drafts one token per pass, and reads no mask; set drafter = 'heads'")
        with torch.inference_mode():
            self._before = self.states_before(tokens, state)
        more: Any = {"seen": seen, "between": between, "context_budget": context_budget}
        return super().run(tokens, at, layers, rows, batch=batch, tree=tree, **more)

    def final_head_logits(self, states: Tensor) -> Tensor:
        """Return the logits of the target's head."""
        return self.target.final_head_logits(states)

    def _embedded(self, tokens: Tensor, place: PassPositions) -> Tensor:
        import torch

        words = self.embedding(tokens)
        joined: Tensor = self.join(torch.cat((words, self._before.view(words.shape)), dim=-1))
        return joined

    def _extras(self, positions: Tensor, rows: int | Tensor) -> Any:
        return self._rotary(self.join.weight, position_ids=positions)


class MedusaHeads(DraftHead):
    """Medusa heads: all of them in one pass, each with the same state."""

    kind = "medusa"
    drafts_in_one_pass = True

    def __init__(self, target: Decoder, modules: Any) -> None:
        import torch

        super().__init__(target, modules, modules["blocks"][0].out_features)
        self._blocks = torch.stack([block.weight for block in modules["blocks"]])
        self._biases = torch.stack([block.bias for block in modules["blocks"]])
        self._matrices = torch.stack([head.weight for head in modules["heads"]])

    @property
    def longest_draft(self) -> int | None:
        """Number of heads."""
        return len(self._blocks)

    def shape(self, dtype: str) -> Shape:
        """See `Decoder`; with as many heads as there are."""
        found = super().shape(dtype)
        assert found.draft is not None
        return replace(found, draft=replace(found.draft, copies=len(self._blocks)))

    def run(
        self, tokens: tuple[int, ...], at: int, layers: LayerSpan, rows: KvRows, state: Tensor | None = None, *,
        batch: Batch | None = None, tree: tuple[int, ...] = (), seen: list[Tensor] | None = None,
        between: Callable[[int], None] | None = None, context_budget: int | None = None,
    ) -> Tensor:
        """Return the states before the tokens, and that of the last one again for each mask: shape (tokens, hidden).

        No keys and values are written: rows only count the tokens that were read.
        """
        import torch

        with torch.inference_mode():
            found = self.states_before(tokens, state)
            masks = len(tokens) - len(found)
            rows.layers[0].length = at + len(tokens)
            return torch.cat((found, found[-1:].expand(masks, -1))) if masks else found

    def logits(self, states: Tensor, layer: int) -> Tensor:
        """Return the logits of the first heads, one for each state, shape (heads, vocabulary)."""
        import torch

        with torch.inference_mode():
            count = len(states)
            if count > len(self._blocks):
                raise ParameterError(f"{self.name}: draft_length must be at most {len(self._blocks)}, its heads, got {count}")
            products = torch.einsum("kij,kj->ki", self._blocks[:count], states) + self._biases[:count]
            return torch.einsum("kvi,ki->kv", self._matrices[:count], states + torch.nn.functional.silu(products))


HEADS: dict[str, Callable[[Decoder, Any], DraftHead]] = {"eagle": EagleHead, "medusa": MedusaHeads}
"""Draft heads by kind."""
