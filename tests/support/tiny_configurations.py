"""Configurations of tiny models of every architecture, and the models that the library builds from them."""

from __future__ import annotations

from typing import Any

import torch

from calibrate.loading.architectures import architecture
from calibrate.timing.library_pass import LibraryModel

_USUAL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = _USUAL | {"num_key_value_heads": 2}
_T5 = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 101,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "tie_word_embeddings": False,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"} | _GROUPED,
    "mistral": {"model_type": "mistral", "sliding_window": 6} | _GROUPED,
    "qwen2": {"model_type": "qwen2"} | _GROUPED,
    "gpt_neox": {"model_type": "gpt_neox"} | _USUAL,
    "phi": {"model_type": "phi"} | _USUAL,
    "opt": {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 64,
        "tie_word_embeddings": True,
    },
    "t5": {"model_type": "t5", "feed_forward_proj": "relu"} | _T5,
    "mt5": {"model_type": "mt5", "feed_forward_proj": "gated-gelu"} | _T5,
}  # fmt: skip


def build_library_model(path: str) -> LibraryModel:
    torch.manual_seed(5)
    return LibraryModel(architecture(path), "cpu", "float32", source=7)
