"""Longest contexts of models: the positions that a checkpoint was trained for, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.architectures import draft_heads, published_shapes, shape_configs
from model.base import checks

LONGEST_CONTEXTS: Mapping[str, int] = {
    **dict.fromkeys(("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"), 2048),
    **dict.fromkeys(("gpt2", "gpt2-xl"), 1024), **dict.fromkeys(("pythia-160m", "pythia-1.4b", "pythia-6.9b"), 2048),
    "llama-68m": 2048, **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), 4096), "llama-3-8b": 8192,
    **dict.fromkeys(("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), 131_072),
    **dict.fromkeys(("llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b"), 131_072),
    "codellama-34b": 16_384, **dict.fromkeys(("mistral-7b", "mixtral-8x7b"), 32_768), "mixtral-8x22b": 65_536,
    **dict.fromkeys(("qwen2.5-0.5b", "qwen2.5-3b"), 32_768),
    **dict.fromkeys(("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"), 131_072),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b"), 40_960),
    **dict.fromkeys(("qwen3-4b", "qwen3-30b-a3b", "qwen3-235b-a22b"), 262_144), "gemma-3-1b": 32_768,
    **dict.fromkeys(("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), 131_072),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), 131_072), **dict.fromkeys(("deepseek-v3", "deepseek-r1"), 163_840),
    "phi-2": 2048, "phi-4": 16_384, "phi-4-mini": 131_072,
}  # fmt: skip
"""`max_position_embeddings` (`n_positions` of GPT-2) in the `config.json` of the checkpoints, the largest where checkpoints of one
shape differ: base models of Qwen2.5, Qwen3-2507. Models that are not here have none (T5), or other weights (Vicuna 1.3, 1.5)."""
KEYS = ("max_position_embeddings", "n_positions")
SCALINGS = ("rope_scaling", "rope_parameters")
STRETCHED = ("yarn", "linear", "dynamic")
"""Types of RoPE scaling that multiply the positions by `factor`; other types state the positions that they reach."""


def longest_context(name: str) -> int | None:
    """Positions that a model was trained for, by name or by the path of its `config.json`; None where it does not say.

    A draft head has the target's.

    >>> longest_context("llama-2-13b"), longest_context("eagle3:llama-3.1-8b"), longest_context("t5-base")
    (4096, 131072, None)
    """
    if draft_heads.is_head(name):
        return longest_context(draft_heads.parts(name)[1])
    if not published_shapes.is_path(name):
        return LONGEST_CONTEXTS.get(name)
    return of_config(shape_configs.read(published_shapes.config_at(name)))


def of_config(config: Mapping[str, Any]) -> int | None:
    """Positions that a configuration states, those of its RoPE scaling included; None where it does not say.

    >>> of_config({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    131072
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**text, **{key: config[key] for key in KEYS if key in config}}
    stated = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if stated is None:
        return None
    checks.whole("max_position_embeddings", stated, 1)
    scaling: Mapping[str, Any] = next((found for found in map(config.get, SCALINGS) if isinstance(found, Mapping)), {})
    factor, first = scaling.get("factor"), scaling.get("original_max_position_embeddings") or stated
    if scaling.get("rope_type", scaling.get("type")) not in STRETCHED or factor is None:
        return int(stated)
    checks.number("rope_scaling.factor", factor, 1)
    checks.whole("rope_scaling.original_max_position_embeddings", first, 1)
    return max(int(stated), int(first * factor))
