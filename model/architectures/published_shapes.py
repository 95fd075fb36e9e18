"""Shapes of published models by name, of configuration files, and of draft heads of any of them."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.architectures import draft_heads
from model.architectures.layer_parts import FORMATS, Experts, LatentAttention, SlidingWindow, names_weights
from model.architectures.shape_configs import check_config, from_config, read, says_dtype
from model.architectures.transformer import BIASED, BLOCK, BYTES, Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int = 32_000, **more: Any) -> Shape:
    return Shape(layers, hidden, heads, kv_heads, hidden // heads, ffn, True, vocabulary, False, **more)


def _opt(layers: int, hidden: int, heads: int) -> Shape:
    # Two position rows are padding.
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, 50_272, True, norm="layer", biases=BLOCK, positions=2048 + 2)


def _gpt2(layers: int, hidden: int, heads: int) -> Shape:
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, 50_257, True, norm="layer", biases=BLOCK, positions=1024)


def _pythia(layers: int, hidden: int, heads: int, vocabulary: int) -> Shape:
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, vocabulary, False, norm="layer", biases=BLOCK)


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int) -> Shape:
    return Shape(layers, hidden, heads, heads, head_dim, ffn, False, 32_128, True, layers, buckets=32)


def _mt5(layers: int, hidden: int, heads: int, ffn: int) -> Shape:
    return Shape(layers, hidden, heads, heads, 64, ffn, True, 250_112, False, layers, buckets=32)


def _qwen(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False, vocabulary: int = 152_064
) -> Shape:
    return replace(_llama(layers, hidden, heads, kv_heads, ffn, vocabulary, biases=("qkv",)), tied_head=tied)


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False, **more: Any) -> Shape:
    return Shape(layers, hidden, heads, kv_heads, 128, ffn, True, 151_936, tied, qk_norms=True, **more)


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, window: int, vocabulary: int = 262_208
) -> Shape:
    # The text part. Every sixth layer attends to all positions.
    windows = SlidingWindow(window, layers - layers // 6)
    return Shape(layers, hidden, heads, kv_heads, head_dim, ffn, True, vocabulary, True, norms=4, qk_norms=True, window=windows)


def _gpt_oss(layers: int, experts: int) -> Shape:
    return Shape(
        layers, 2880, 64, 8, 64, 2880, True, 201_088, False, biases=BLOCK, sinks=True,
        experts=Experts(experts, 4, biased_router=True), window=SlidingWindow(128, layers // 2),
        weights=replace(FORMATS["mxfp4"], experts_only=True),
    )  # fmt: skip


_DEEPSEEK_V3 = Shape(
    61, 7168, 128, 128, 128, 2048, True, 129_280, False, experts=Experts(256, 8, 2048, 3, 18_432),
    latent=LatentAttention(1536, 512, 64, 128), weights=FORMATS["float8"],
)  # fmt: skip


PRESETS = {
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16_384),
    "mt5-small": _mt5(8, 512, 6, 1024),
    "mt5-base": _mt5(12, 768, 12, 2048),
    "mt5-large": _mt5(24, 1024, 16, 2816),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "llama-68m": _llama(2, 768, 12, 12, 3072),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13_824),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28_672),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28_672, 128_256),
    "llama-3.1-405b": _llama(126, 16_384, 128, 8, 53_248, 128_256),
    "llama-3.2-1b": replace(_llama(16, 2048, 32, 8, 8192, 128_256), tied_head=True),
    "llama-3.2-3b": replace(_llama(28, 3072, 24, 8, 8192, 128_256), tied_head=True),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28_672, 128_256),
    "codellama-34b": _llama(48, 8192, 64, 8, 22_016),
    "vicuna-7b": _llama(32, 4096, 32, 32, 11_008),
    "vicuna-13b": _llama(40, 5120, 40, 40, 13_824),
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 8, 14_336), experts=Experts(8, 2)),
    "mixtral-8x22b": replace(_llama(56, 6144, 48, 8, 16_384, 32_768), experts=Experts(8, 2)),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 4864, tied=True, vocabulary=151_936),
    "qwen2.5-1.5b": _qwen(28, 1536, 12, 2, 8960, tied=True, vocabulary=151_936),
    "qwen2.5-3b": _qwen(36, 2048, 16, 2, 11_008, tied=True, vocabulary=151_936),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 13_824),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 27_648),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25_600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 768, experts=Experts(128, 8)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 1536, experts=Experts(128, 8)),
    "gemma-3-1b": _gemma3(26, 1152, 4, 1, 256, 6912, 512, 262_144),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 256, 10_240, 1024),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 256, 15_360, 1024),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 128, 21_504, 1024),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "pythia-160m": _pythia(12, 768, 12, 50_304),
    "pythia-1.4b": _pythia(24, 2048, 16, 50_304),
    "pythia-6.9b": _pythia(32, 4096, 32, 50_432),
    "phi-2": Shape(32, 2560, 32, 32, 80, 10_240, False, 51_200, False, norm="layer", norms=1, biases=BIASED),
    "phi-4": _llama(40, 5120, 40, 10, 17_920, 100_352),
    "phi-4-mini": replace(_llama(32, 3072, 24, 8, 8192, 200_064), tied_head=True),
}
"""Models that the papers use, and widely known ones, as published in the configuration of their checkpoint. `dtype` is that of
serving, 16 bits, also for models that were released in 32. Models that are released in one quantised type have it (`weights`): the
layers of DeepSeek in float8 with a scale for each block of 128 x 128, the experts of gpt-oss in mxfp4. Gemma 3 is its text part,
without the vision encoder; DeepSeek without its module for further tokens (`mtp:deepseek-v3`), of the same type."""


def preset(name: str) -> Shape:
    """Return the shape of a published model.

    >>> preset("opt-1.3b").layers
    24
    """
    checks.one_of("shape", name, PRESETS)
    return PRESETS[name]


def named_shape(name: Any, dtype: str | None = None, *, key: str = "shape") -> Shape:
    """Return the shape of a published model, of a `config.json` of the transformers library (its path or its folder), or of a draft
    head of one of these (`model.architectures.draft_heads`).

    Error messages call the name `key`. The type of the numbers is `dtype`, else that of the file, else bfloat16. Weights that are
    published in a type of their own keep it.

    >>> named_shape("llama-2-13b", "float16").bytes_each, named_shape("llama-2-13b") == preset("llama-2-13b")
    (2, True)
    """
    check_dtype(dtype)
    if isinstance(name, str) and draft_heads.is_head(name):
        head = draft_heads.head(name, functools.partial(named_shape, key="target shape"))
        return head if dtype is None else replace(head, dtype=dtype)
    if not isinstance(name, str) or (name not in PRESETS and not is_path(name)):
        raise ParameterError(f"{checks.unknown(key, name, PRESETS)}; or give the path of a config.json")
    made = PRESETS[name] if name in PRESETS else _of_file(name, bounded_files.stamp(config_at(name)))
    return made if dtype is None else replace(made, dtype=dtype)


def check_dtype(dtype: object) -> None:
    """Refuse a format of weights as the type of activations, and name the key that it belongs to.

    >>> check_dtype("int4")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: dtype is the type of activations and cannot be 'int4'; use weights = 'int4' for the weights
    """
    if names_weights(dtype):
        stored = "mxfp4" if dtype == "float4" else dtype
        raise ParameterError(
            f"dtype is the type of activations and cannot be {checks.shown(dtype)}; use weights = {checks.shown(stored)} for the"
            " weights"
        )
    if isinstance(dtype, str) and dtype in DTYPE_SYNONYMS:
        raise ParameterError(
            f"unknown dtype {checks.shown(dtype)}; did you mean {DTYPE_SYNONYMS[dtype]}? known: {', '.join(BYTES)}"
        )


DTYPE_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8"}
"""Other names of types, which are not accepted but understood."""


def whole_model(name: str, dtype: str | None = None, *, key: str = "shape") -> Shape:
    """Return the shape of a target (`named_shape`), which cannot be a draft head."""
    found = named_shape(name, dtype, key=key)
    if found.draft is not None:
        raise ParameterError(f"{key} must be a whole model, got {checks.shown(name)}, a draft head; it can be a draft")
    return found


def stored_as(name: str, shape: Shape) -> str:
    """Types of the weights of a named model, and where they come from, as printed text.

    >>> stored_as("llama-3.1-8b", preset("llama-3.1-8b"))
    'bfloat16 (assumed: 16 bits, as served)'
    """
    if shape.weights is None:
        whom = "of the file, else assumed" if is_path(name) else "assumed: 16 bits, as served"
        return f"{shape.dtype} ({whom})"
    rest = "all else" if shape.weights.experts_only else "embedding, head, routers and norms"
    whom = "quantization_config of the file" if is_path(name) else "published: quantization_config of its checkpoint"
    return f"{shape.weights.about}; {rest} in {shape.dtype}; {whom}"


def check_head(name: str, head: Shape, target: Shape, target_name: str, *, key: str = "draft_shape") -> None:
    """Refuse a draft head of another model than the target: it reads the target's hidden states, and was trained on them.

    Models of one shape, such as fine-tuned ones, can have each other's heads. A draft without such inputs passes. Error messages
    call the name `key`.

    >>> check_head("eagle3:llama-3.1-8b", named_shape("eagle3:llama-3.1-8b"), preset("llama-3.1-70b"), "llama-3.1-70b")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: draft_shape must be a head of llama-3.1-70b, got eagle3:llama-3.1-8b: layers are 32, not 80
    """
    if head.draft is None:
        return
    of_model, names = head, ["hidden", "vocabulary"]
    if draft_heads.is_head(name):
        of_model, names = named_shape(draft_heads.parts(name)[1]), ["layers", *names]
    elif not head.draft.shared_head and head.vocabulary <= target.vocabulary:
        names.remove("vocabulary")
    for each in names:
        if getattr(of_model, each) != getattr(target, each):
            verb = "are" if each == "layers" else "is"
            unlike = f"{each} {verb} {getattr(of_model, each)}, not {getattr(target, each)}"
            raise ParameterError(f"{key} must be a head of {target_name}, got {name}: {unlike}")


def is_path(name: str) -> bool:
    """Return True if a model's name is a path, which need not exist."""
    if draft_heads.is_head(name):
        return is_path(draft_heads.parts(name)[1])
    return name not in PRESETS and (name.endswith(".json") or "/" in name or os.sep in name)


def label(name: str) -> str:
    """Return a short name of a model given by name or by file; a `config.json` is named after its folder.

    >>> label("llama-2-13b"), label("models/mine/config.json"), label("mine.json"), label("eagle3:llama-3.1-8b")
    ('llama-2-13b', 'mine', 'mine', 'eagle3-llama-3.1-8b')
    """
    if draft_heads.is_head(name):
        kind, target, vocabulary = draft_heads.parts(name)
        return "-".join([kind, label(target), *([] if vocabulary is None else [str(vocabulary)])])
    path = config_at(name)
    if name in PRESETS or not is_path(name):
        return name
    return path.absolute().parent.name or "model" if path.name == "config.json" else path.stem


def config_at(name: str) -> Path:
    """Return the path of the configuration that a model's path names: the file itself, or `config.json` in the folder."""
    path = Path(name)
    return path if path.suffix == ".json" else path / "config.json"


@functools.lru_cache(maxsize=64)
def _of_file(name: str, _: object) -> Shape:
    path = config_at(name)
    config = read(path)
    try:
        check_config(config)
        return from_config(config, None if says_dtype(config) else "bfloat16")
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
