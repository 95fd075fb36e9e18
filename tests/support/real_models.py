"""Tiny models of the transformers library with random weights, and reference generation one token at a time without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

VOCABULARY = 29
DEPTHS = {"target": 5, "draft": 2, "medium": 3}
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox", "phi", "t5", "mt5")
ENCODER_DECODERS = ("t5", "mt5")
"""Kinds with an encoder."""
NEAR, FEWEST = 1e-4, 1000
"""Difference of logits that is a near tie, at which float32 may differ; and the tokens per near tie, at least."""
SOURCE = (5, 6, 7, 8)
"""Input of the encoder of an encoder-decoder."""


def config(kind: str, layers: int) -> Any:
    """A configuration of a tiny model."""
    import transformers

    wide = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 4}
    usual = wide | {"intermediate_size": 24, "max_position_embeddings": 96}
    match kind:
        case "llama":
            return transformers.LlamaConfig(**usual, num_key_value_heads=2)
        case "mistral":
            return transformers.MistralConfig(**usual, num_key_value_heads=2, sliding_window=None)
        case "qwen2":
            return transformers.Qwen2Config(**usual, num_key_value_heads=4)
        case "qwen3":
            return transformers.Qwen3Config(**usual, num_key_value_heads=2, head_dim=8)
        case "gpt_neox":
            return transformers.GPTNeoXConfig(**usual)
        case "phi":
            return transformers.PhiConfig(**usual)
        case "gpt2":
            return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=layers, n_head=4, n_positions=96)
        case "opt":
            return transformers.OPTConfig(**wide, ffn_dim=24, max_position_embeddings=96, word_embed_proj_dim=8)
        case "t5":
            return transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_decoder_layers=layers, num_heads=4,
                decoder_start_token_id=0,
            )  # fmt: skip
        case "mt5":  # gated, heads narrower than the model, a separate LM head
            return transformers.MT5Config(
                vocab_size=VOCABULARY, d_model=16, d_ff=24, d_kv=3, num_layers=2, num_decoder_layers=layers, num_heads=4,
                feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
            )  # fmt: skip
    raise AssertionError(kind)


@lru_cache(maxsize=64)
def model(kind: str, layers: int, seed: int = 0, dtype: str = "float64") -> Any:
    """A model that does not repeat one token: its weights are larger than initial weights of a training."""
    import torch
    import transformers

    torch.set_num_threads(1)  # several tests run at once, and more threads do not help tiny GEMMs
    torch.manual_seed(seed)
    of = transformers.AutoModelForSeq2SeqLM if kind in ENCODER_DECODERS else transformers.AutoModelForCausalLM
    found = of.from_config(config(kind, layers))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter *= 3
    found.generation_config.eos_token_id = None
    return found.to(getattr(torch, dtype)).eval()


def decoders(kind: str, *roles: str, seed: int = 0, dtype: str = "float64", same: bool = False) -> dict[str, Any]:
    """Decoders by role; with `same` all have the target's first layers, so that drafts are often accepted."""
    from calibrate.decoders.transformers_adapter import decoder_of

    found = {}
    for number, role in enumerate(("target", *roles)):
        full = model(kind, DEPTHS[role], seed if same else seed + 100 * number, dtype)
        found[role] = decoder_of(full, f"{kind} {role}")
        if kind in ENCODER_DECODERS:
            found[role].read_source(SOURCE)
    return found


def logits(full: Any, text: Sequence[int]) -> Any:
    """Logits of the token after a sequence, computed from scratch; shape (vocabulary,)."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([list(text)])
        inputs = {"input_ids": ids}
        if full.config.is_encoder_decoder:
            inputs = {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": ids}
        return full(**inputs, use_cache=False).logits[0, -1]


def reference_tokens(full: Any, prompt: Sequence[int], tokens: int, stop: int | None = None) -> list[int]:
    """Generate greedily, one token at a time, each from scratch; the result ends with `stop` if that occurs."""
    text = _oracle(full, tuple(prompt), tokens, SOURCE)
    return [*text[: text.index(stop) + 1]] if stop in text else [*text]


@lru_cache(maxsize=1024)
def _oracle(full: Any, prompt: tuple[int, ...], tokens: int, source: tuple[int, ...]) -> tuple[int, ...]:
    """Generate greedily, cached for the tests of several methods; an encoder-decoder reads `source`, which is SOURCE."""
    assert source == SOURCE
    text = list(prompt)
    for _ in range(tokens):
        text.append(int(logits(full, text).argmax()))
    return tuple(text[len(prompt) :])


def differs_from_reference(full: Any, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether a sequence differs from the reference, which is allowed only in float32 at a near tie."""
    import torch

    assert len(found) == len(expected)
    index = next((index for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs), None)
    if index is None:
        return False
    assert full.dtype == torch.float32, (index, found, expected)
    best, second = logits(full, [*prompt, *expected[:index]]).topk(2).values.tolist()
    assert best - second < NEAR, (index, found, expected)
    return True


def reference_beams(full: Any, prompt: Sequence[int], tokens: int, beams: int) -> list[tuple[float, list[int]]]:
    """Beam search from scratch; return the final sequences with their scores, best first."""
    import torch

    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(tokens):
        found = []
        for score, text in kept:
            log_probabilities = torch.log_softmax(logits(full, [*prompt, *text]), -1).tolist()
            found += [(score + log_probability, [*text, token]) for token, log_probability in enumerate(log_probabilities)]
        kept = sorted(found, key=lambda each: -each[0])[:beams]
    return kept
