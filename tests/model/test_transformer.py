"""Shapes of transformers: parameters as in papers and the library, operations by matrix and by pass, and errors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import published
from model.architectures import longest_contexts
from model.architectures.layer_parts import FORMATS, QuantisedWeights
from model.architectures.published_shapes import PRESETS, preset
from model.architectures.shape_configs import from_config
from model.architectures.transformer import BIASED, Shape
from model.base.checks import ParameterError

TINY = Shape(3, 8, 4, 2, 2, 12, True, 100, False)


def test_sizes_of_big_and_little_decoders() -> None:
    """Table 2 of the paper, and Section 1.9 of its analysis: 402.7M and 25.2M."""
    for row in published.table("bild-table-2").rows:
        made = preset(row["model"])
        assert (made.layers, made.hidden, made.ffn) == (row["layers"], row["dim"], row["ffn_dim"])
        assert abs(made.layers * made.layer_weights / 1e6 - row["parameters_m"]) < 1
    whole = {name: preset(name).layers * preset(name).layer_weights / 1e6 for name in ("t5-large", "t5-small")}
    assert {name: round(value, 1) for name, value in whole.items()} == {"t5-large": 402.7, "t5-small": 25.2}
    # With their heads, the two mT5 models have a ratio of 1:4.3, not 1:20.
    large, small = (made.layers * made.layer_weights + made.head_weights for made in map(preset, ("mt5-large", "mt5-small")))
    assert round(large / small, 1) == 4.3


def test_layers_of_opt_are_those_of_skipdecode() -> None:
    for row in published.table("skipdecode-table-2").rows:
        assert preset(row["model"]).layers == row["layers"]


@pytest.mark.parametrize(("name", "billions"), [("llama-2-13b", 13.0), ("opt-1.3b", 1.3), ("opt-6.7b", 6.7), ("llama-3-8b", 8.0)])
def test_names_agree_with_the_number_of_parameters(name: str, billions: float) -> None:
    """Layers, the embedding, and the head unless it is tied."""
    made = preset(name)
    tied = name.startswith("opt")
    total = made.layers * made.layer_weights + (1 if tied else 2) * made.head_weights
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


CHECKPOINTS = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096, "t5-3b": 2_851_598_336, "mt5-small": 300_176_768,
    "mt5-base": 582_401_280, "mt5-large": 1_229_581_312, "opt-125m": 125_239_296, "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800, "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "llama-68m": 68_030_208,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "codellama-34b": 33_743_970_304, "vicuna-7b": 6_738_415_616,
    "vicuna-13b": 13_015_864_320,
    "mistral-7b": 7_241_732_096, "qwen2.5-7b": 7_615_616_512, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496, "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168, "gemma-3-12b": 11_766_034_176, "gemma-3-27b": 27_009_346_304, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672, "deepseek-v3": 671_026_404_352, "deepseek-r1": 671_026_404_352, "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200,
    "pythia-160m": 162_322_944, "pythia-1.4b": 1_414_647_808, "pythia-6.9b": 6_857_302_016, "phi-2": 2_779_683_840,
}  # fmt: skip
"""Parameters of released checkpoints.

Some hold more: those of Qwen3 with tied heads a copy of the embedding; those of Gemma 3 the vision encoder and its projector;
those of DeepSeek a number per expert that corrects its score (58 x 256), which the library holds as a buffer, scales of float8,
and the module for further tokens.
"""


def test_parameters_of_checkpoints_exactly() -> None:
    assert {name: made.parameters for name, made in PRESETS.items()} == CHECKPOINTS


@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 3))
def test_operations_by_matrix(width: int, context: int, layers: int) -> None:
    """A product of (m, k) and (k, n) takes 2 m k n operations."""

    def product(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    each = product(width, 8, 8) + 2 * product(width, 8, 4) + product(width, 8, 8) + 3 * product(width, 8, 12)
    for position in range(width):
        seen = context + position + 1
        each += 4 * (product(1, 2, seen) + product(1, seen, 2))  # scores and their sum, of four heads
    assert TINY.operations(width, context, layers) == layers * each
    assert TINY.operations(width, context, layers, heads=width) == layers * each + product(width, 8, 100)
    assert TINY.operations(width, context) == 3 * each
    crossing = replace(TINY, encoder_layers=1)
    assert crossing.operations(width, context, layers) == layers * (each + 2 * product(width, 8, 8) + 2 * product(width, 8, 4))


def test_operations_of_a_multi_token_pass_equal_single_token_passes() -> None:
    assert TINY.operations(5, 2, heads=5) == sum(TINY.operations(1, 2 + position, heads=1) for position in range(5))


def test_cache_rows() -> None:
    """Two KV heads of width two; 0.41 MB for 20 layers of 13B in two bytes each."""
    assert TINY.cache_bytes() == 3 * 2 * 2 * 2 * 2
    assert TINY.cache_bytes(1, bytes_each=1) == 8
    assert TINY.cache_bytes(0) == 0
    assert round(preset("llama-2-13b").cache_bytes(20) / 1e6, 2) == 0.41


def test_weights_are_the_products_of_a_pass() -> None:
    for made in PRESETS.values():
        bare = made.operations(1, 0) - made.layers * made.attended_flops
        assert bare == 2 * made.layers * made.active_layer_weights
        assert (made.active_layer_weights < made.layer_weights) == (made.experts is not None)


# --- Against the transformers library; models are built from sizes, nothing is downloaded ---

COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def common(kind: str, *sizes: int) -> tuple[str, dict[str, Any]]:
    return kind, dict(zip(COMMON, sizes, strict=True))


def opt(layers: int, hidden: int, heads: int) -> tuple[str, dict[str, Any]]:
    return "opt", {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden,
                   "word_embed_proj_dim": hidden, "vocab_size": 50_272, "max_position_embeddings": 2048}  # fmt: skip


def neox(layers: int, hidden: int, heads: int, vocabulary: int) -> tuple[str, dict[str, Any]]:
    return "gpt_neox", {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                        "intermediate_size": 4 * hidden, "vocab_size": vocabulary}  # fmt: skip


def deepseek() -> tuple[str, dict[str, Any]]:
    return "deepseek_v3", {}  # the library's defaults are this model


def experts(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, **more: int) -> tuple[str, dict[str, Any]]:
    return kind, {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                  "num_key_value_heads": kv_heads} | more  # fmt: skip


def gemma3(*sizes: int, head_dim: int, window: int) -> tuple[str, dict[str, Any]]:
    return "gemma3_text", common("", *sizes)[1] | {"head_dim": head_dim, "sliding_window": window}


def tied(pair: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return pair[0], pair[1] | {"tie_word_embeddings": True}


def qwen3(*sizes: int) -> tuple[str, dict[str, Any]]:
    return "qwen3", common("", *sizes, 151_936)[1] | {"head_dim": 128}


def t5(kind: str, layers: int, hidden: int, heads: int, head_dim: int, ffn: int) -> tuple[str, dict[str, Any]]:
    return kind, {"num_layers": layers, "d_model": hidden, "num_heads": heads, "d_kv": head_dim, "d_ff": ffn}


LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-small": ("t5", {}),
    "t5-base": t5("t5", 12, 768, 12, 64, 3072),
    "t5-large": t5("t5", 24, 1024, 16, 64, 4096),
    "t5-3b": t5("t5", 24, 1024, 32, 128, 16_384),
    "mt5-small": ("mt5", {}),
    "mt5-base": t5("mt5", 12, 768, 12, 64, 2048),
    "mt5-large": t5("mt5", 24, 1024, 16, 64, 2816),
    "opt-125m": opt(12, 768, 12),
    "opt-1.3b": opt(24, 2048, 32),
    "opt-2.7b": opt(32, 2560, 32),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "llama-68m": common("llama", 2, 768, 12, 12, 3072, 32_000),
    "llama-2-7b": ("llama", {}),
    "llama-2-13b": common("llama", 40, 5120, 40, 40, 13_824, 32_000),
    "llama-2-70b": common("llama", 80, 8192, 64, 8, 28_672, 32_000),
    "llama-3-8b": common("llama", 32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.1-8b": common("llama", 32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.2-1b": ("llama", common("llama", 16, 2048, 32, 8, 8192, 128_256)[1] | {"tie_word_embeddings": True}),
    "codellama-34b": common("llama", 48, 8192, 64, 8, 22_016, 32_000),
    "vicuna-7b": common("llama", 32, 4096, 32, 32, 11_008, 32_000),
    "vicuna-13b": common("llama", 40, 5120, 40, 40, 13_824, 32_000),
    "llama-3.1-70b": common("llama", 80, 8192, 64, 8, 28_672, 128_256),
    "llama-3.1-405b": common("llama", 126, 16_384, 128, 8, 53_248, 128_256),
    "llama-3.2-3b": tied(common("llama", 28, 3072, 24, 8, 8192, 128_256)),
    "llama-3.3-70b": common("llama", 80, 8192, 64, 8, 28_672, 128_256),
    "mixtral-8x7b": ("mixtral", {}),
    "mixtral-8x22b": experts("mixtral", 56, 6144, 48, 8, intermediate_size=16_384, vocab_size=32_768),
    "qwen2.5-0.5b": tied(common("qwen2", 24, 896, 14, 2, 4864, 151_936)),
    "qwen2.5-1.5b": tied(common("qwen2", 28, 1536, 12, 2, 8960, 151_936)),
    "qwen2.5-3b": tied(common("qwen2", 36, 2048, 16, 2, 11_008, 151_936)),
    "qwen2.5-14b": common("qwen2", 48, 5120, 40, 8, 13_824, 152_064),
    "qwen2.5-32b": common("qwen2", 64, 5120, 40, 8, 27_648, 152_064),
    "qwen2.5-72b": common("qwen2", 80, 8192, 64, 8, 29_568, 152_064),
    "qwen3-0.6b": tied(qwen3(28, 1024, 16, 8, 3072)),
    "qwen3-1.7b": tied(qwen3(28, 2048, 16, 8, 6144)),
    "qwen3-4b": tied(qwen3(36, 2560, 32, 8, 9728)),
    "qwen3-8b": qwen3(36, 4096, 32, 8, 12_288),
    "qwen3-14b": qwen3(40, 5120, 40, 8, 17_408),
    "qwen3-32b": qwen3(64, 5120, 64, 8, 25_600),
    "qwen3-30b-a3b": experts("qwen3_moe", 48, 2048, 32, 4, head_dim=128, moe_intermediate_size=768),
    "qwen3-235b-a22b": experts("qwen3_moe", 94, 4096, 64, 4, head_dim=128, moe_intermediate_size=1536),
    "gemma-3-1b": gemma3(26, 1152, 4, 1, 6912, 262_144, head_dim=256, window=512),
    "gemma-3-4b": gemma3(34, 2560, 8, 4, 10_240, 262_208, head_dim=256, window=1024),
    "gemma-3-12b": gemma3(48, 3840, 16, 8, 15_360, 262_208, head_dim=256, window=1024),
    "gemma-3-27b": gemma3(62, 5376, 32, 16, 21_504, 262_208, head_dim=128, window=1024),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "deepseek-v3": deepseek(),
    "deepseek-r1": deepseek(),
    "phi-4": common("phi3", 40, 5120, 40, 10, 17_920, 100_352),
    "phi-4-mini": tied(common("phi3", 32, 3072, 24, 8, 8192, 200_064)),
    "mistral-7b": ("mistral", {"sliding_window": None}),  # as released since version 0.2
    "qwen2.5-7b": common("qwen2", 28, 3584, 28, 4, 18_944, 152_064),
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "pythia-160m": neox(12, 768, 12, 50_304),
    "pythia-1.4b": neox(24, 2048, 16, 50_304),
    "pythia-6.9b": neox(32, 4096, 32, 50_432),
    "phi-2": common("phi", 32, 2560, 32, 32, 10_240, 51_200),
}
"""Configuration of these models in the library; empty if its defaults describe the model."""
CLASSES = {
    "llama": ("Llama", "model.layers"), "mistral": ("Mistral", "model.layers"), "qwen2": ("Qwen2", "model.layers"),
    "qwen3": ("Qwen3", "model.layers"), "opt": ("OPT", "model.decoder.layers"), "gpt2": ("GPT2", "transformer.h"),
    "gpt_neox": ("GPTNeoX", "gpt_neox.layers"), "phi": ("Phi", "model.layers"), "t5": ("T5", "decoder.block"),
    "mt5": ("MT5", "decoder.block"), "qwen3_moe": ("Qwen3Moe", "model.layers"), "mixtral": ("Mixtral", "model.layers"),
    "gpt_oss": ("GptOss", "model.layers"), "deepseek_v3": ("DeepseekV3", "model.layers"),
    "gemma3_text": ("Gemma3", "model.layers"), "phi3": ("Phi3", "model.layers"),
}  # fmt: skip
"""Classes of the library by model type, and the attribute of their decoder layers."""
HEADS = {"t5": "ForConditionalGeneration", "mt5": "ForConditionalGeneration", "gpt2": "LMHeadModel"}
CONFIGS = {"gemma3_text": "Gemma3Text"}
SAYS_QUANTISED = {
    "gpt_oss": {"quantization_config": {"quant_method": "mxfp4"}},
    "deepseek_v3": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
}
"""Keys of published files that the library's own configurations lack."""


def library_config(kind: str, sizes: Mapping[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, f"{CONFIGS.get(kind, CLASSES[kind][0])}Config")(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def built(kind: str, sizes: Mapping[str, Any], device: str = "meta") -> Any:
    import torch
    import transformers

    with torch.device(device):
        kind_of_model = getattr(transformers, CLASSES[kind][0] + HEADS.get(kind, "ForCausalLM"))
        return kind_of_model(library_config(kind, sizes)).eval()


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_equal_those_of_the_library(name: str) -> None:
    kind, sizes = LIBRARY[name]
    model, made = built(kind, sizes), preset(name)
    total = sum(each.numel() for each in model.parameters())
    # The library ties mT5's two tables in spite of its configuration; the checkpoint has both.
    assert made.parameters == total + (made.head_weights if kind == "mt5" else 0)
    assert made.head_weights == model.get_output_embeddings().weight.numel()
    if kind in ("t5", "mt5"):
        own = {id(each): each.numel() for each in model.encoder.parameters()}
        assert made.encoder_parameters == sum(own.values()) - made.embedding_parameters
    layers = model.get_submodule(CLASSES[kind][1])
    assert len(layers) == made.layers
    dense = made.experts.dense_layers if made.experts is not None else 0
    for number, layer in enumerate(layers):
        alike = made.kinds[1 if dense and number >= dense else 0][1]
        # The table of relative positions is looked up, not multiplied, and only the first layer has one.
        sizes_of = {key: each.numel() for key, each in layer.named_parameters() if "relative" not in key}
        matrices = [
            each.numel() for key, each in layer.named_parameters() if each.dim() >= 2 and key in sizes_of and "bias" not in key
        ]
        assert sum(sizes_of.values()) == alike.layer_parameters
        assert sum(matrices) == alike.layer_weights
        assert 0 < alike.layer_parameters - alike.layer_weights < 0.01 * alike.layer_weights


# Few heads and layers, with different numbers for every size; keys that a type lacks are left out.
SMALL = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 101}
SMALL_T5 = {"num_layers": 2, "num_decoder_layers": 3, "d_model": 48, "num_heads": 4, "d_kv": 10, "d_ff": 80, "vocab_size": 101}
GROUPED = SMALL | {"num_key_value_heads": 2}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 14, "q_lora_rank": 22, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
    "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", GROUPED | {"head_dim": 10, "tie_word_embeddings": True}),
    ("llama", GROUPED | {"attention_bias": True}),
    ("llama", GROUPED | {"mlp_bias": True}),
    ("mistral", GROUPED | {"sliding_window": None}),
    ("mistral", GROUPED | {"head_dim": 10, "sliding_window": None}),
    ("qwen2", GROUPED),
    ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    ("qwen3", GROUPED | {"head_dim": 10}),
    ("qwen3", GROUPED | {"head_dim": 10, "attention_bias": True}),
    ("opt", {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48, "max_position_embeddings": 64}),
    ("opt", {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48, "enable_bias": False}),
    ("gpt2", {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 64, "vocab_size": 101}),
    ("gpt2", {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 64, "vocab_size": 101, "n_inner": 80}),
    ("gpt_neox", SMALL),
    ("gpt_neox", SMALL | {"attention_bias": False, "tie_word_embeddings": True}),
    ("phi", SMALL),
    ("phi", GROUPED | {"qk_layernorm": True}),
    ("t5", SMALL_T5),
    ("t5", SMALL_T5 | {"feed_forward_proj": "gated-gelu"}),
    ("mt5", SMALL_T5),
    ("mt5", SMALL_T5 | {"feed_forward_proj": "relu"}),
    ("mistral", GROUPED | {"sliding_window": 6}),
    ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("phi3", GROUPED | {"pad_token_id": 0}),
    ("phi3", GROUPED | {"sliding_window": 7, "tie_word_embeddings": True, "pad_token_id": 0}),
    ("mixtral", GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    ("qwen3_moe", GROUPED | {"head_dim": 10, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}),
    ("qwen3_moe", GROUPED | {"head_dim": 10, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
                             "attention_bias": True, "tie_word_embeddings": True}),
    ("gpt_oss", GROUPED | {"head_dim": 10, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    ("gemma3_text", GROUPED | {"head_dim": 10, "sliding_window": 5, "pad_token_id": 0}),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 0}),
]


def file_of(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that the library writes."""
    return json.loads(library_config(kind, sizes).to_json_string(use_diff=False))  # type: ignore[no-any-return]


def test_every_type_has_a_variant() -> None:
    assert {kind for kind, _ in VARIANTS} == {*CLASSES}


@pytest.mark.parametrize(("kind", "sizes"), VARIANTS)
def test_parameters_of_a_config_equal_those_of_the_library(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model, config = built(kind, sizes), file_of(kind, sizes)
    made = from_config(config, dtype="float32")
    assert made.parameters == sum(each.numel() for each in model.parameters())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"torch_dtype": "float16"}))
    assert from_config(path) == replace(made, dtype="float16")
    assert from_config(str(path), dtype="int8") == replace(made, dtype="int8")
    untied = from_config({**config, "tie_word_embeddings": False}, dtype="float32")
    assert untied.parameters == made.parameters + (made.head_weights if made.tied_head else 0)


@pytest.mark.parametrize(("kind", "sizes"), VARIANTS)
def test_defaults_of_a_config_are_those_of_the_library(kind: str, sizes: dict[str, Any]) -> None:
    needed = {"opt": ("max_position_embeddings",), "t5": ("relative_attention_num_buckets",)}
    needed["mt5"] = (*needed["t5"], "tie_word_embeddings")
    whole = file_of(kind, sizes)
    bare = {"model_type": kind, **{key: whole[key] for key in needed.get(kind, ())}, **sizes}
    assert from_config(bare, dtype="float32") == from_config(whole, dtype="float32")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_agree_with_their_configs(name: str) -> None:
    kind, sizes = LIBRARY[name]
    more: dict[str, Any] = {"tie_word_embeddings": False} if kind == "mt5" else SAYS_QUANTISED.get(kind, {})
    assert from_config(file_of(kind, sizes) | more, dtype="bfloat16") == preset(name)


@cache
def model_of(index: int) -> tuple[Any, Shape]:
    kind, sizes = VARIANTS[index]
    return built(kind, sizes, "cpu"), from_config(file_of(kind, sizes), dtype="float32")


def counted(call: Callable[[], Any]) -> tuple[int, Any]:
    """Operations of matrix products, and the result of the call; the angles of rotary embeddings do not count."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as mode, torch.no_grad():
        result = call()
    by_module = mode.get_flop_counts()
    angles = {name: each for name, each in by_module.items() if name.endswith("rotary_emb")}
    return mode.get_total_flops() - sum(sum(each.values()) for each in angles.values()), result


DECODERS = [index for index, (kind, _) in enumerate(VARIANTS) if kind not in ("t5", "mt5")]
ENCODERS = [index for index, (kind, _) in enumerate(VARIANTS) if kind in ("t5", "mt5")]


def masked(made: Shape, width: int, batch: int, context: int = 0) -> int:
    """Operations that the library masks: scores of new tokens with later ones, and with positions outside a sliding window.

    It caches no more positions than a window's. Instead of the absorbed form of latent attention it computes keys and values of all
    heads and cached positions again, and scores and values of whole heads, not of the cached vectors.
    """
    total = 0
    for count, kind in made.kinds:
        positions = context if kind.window is None else min(context, kind.window.size - 1)
        seen = [min(context + place + 1, kind.window.size if kind.window else 10**9) for place in range(width)]
        per_score = 4 * made.heads * made.head_dim
        if kind.latent is not None:
            per_score = 2 * made.heads * (kind.latent.nope + kind.latent.rope + kind.head_dim)
            total += count * context * 2 * kind.latent.rank * made.heads * (kind.latent.nope + kind.head_dim)
        total += count * (width * (positions + width) * per_score - sum(seen) * kind.attended_flops)
    return batch * total


def pass_flops(made: Shape, width: int, context: int, batch: int, source: int = 0, heads: int | None = None) -> float:
    """Operations of a pass through all decoder layers, with `heads` projected positions per sequence (default: all)."""
    layers = sum(count * float(kind.layer_flops(width, context, batch, source)) for count, kind in made.kinds)
    return layers + float(made.head_flops(batch * (heads or width)))


@pytest.mark.parametrize("index", DECODERS)
@pytest.mark.parametrize(("context", "width", "batch"), [(7, 1, 1), (5, 4, 2)])
def test_operations_of_a_decoder_equal_those_of_the_library(index: int, context: int, width: int, batch: int) -> None:
    import torch

    model, made = model_of(index)
    tokens = torch.zeros((batch, context + width), dtype=torch.long)
    first, result = counted(lambda: model(tokens[:, :context], use_cache=True, logits_to_keep=1))
    assert first == pass_flops(made, context, 0, batch, heads=1) + masked(made, context, batch)
    again, _ = counted(lambda: model(tokens[:, context:], past_key_values=result.past_key_values, use_cache=True))
    assert again == pass_flops(made, width, context, batch) + masked(made, width, batch, context)


@pytest.mark.parametrize("index", ENCODERS)
@pytest.mark.parametrize(("source", "width", "batch"), [(7, 1, 1), (5, 4, 2)])
def test_operations_after_an_encoder_equal_those_of_the_library(index: int, source: int, width: int, batch: int) -> None:
    import torch

    model, made = model_of(index)
    read, tokens = torch.zeros((batch, source), dtype=torch.long), torch.zeros((batch, width), dtype=torch.long)
    result = model(input_ids=read, decoder_input_ids=tokens[:, :1], use_cache=True)
    cached = {"encoder_outputs": (result.encoder_last_hidden_state,), "past_key_values": result.past_key_values}
    again, _ = counted(lambda: model(**cached, decoder_input_ids=tokens, use_cache=True))
    assert again == pass_flops(made, width, 1, batch, source) + masked(made, width, batch)


# --- Laws of passes ---

SIZES = st.builds(
    lambda layers, hidden, kv, group, head, ffn, gated, words, tied, encoder: Shape(
        layers, hidden, kv * group, kv, head, ffn, gated, words, tied, encoder
    ),
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 50),
    st.booleans(), st.integers(1, 60), st.booleans(), st.integers(0, 3),
)  # fmt: skip
WIDTHS, CONTEXTS, BATCHES, SOURCES = st.integers(1, 6), st.integers(0, 30), st.integers(1, 5), st.integers(1, 9)


def of(made: Shape, source: int) -> int:
    return source if made.encoder_layers else 0


@given(SIZES, WIDTHS, CONTEXTS)
def test_matrix_products_of_a_layer_are_its_operations_without_attention(made: Shape, width: int, context: int) -> None:
    attended = width * context + width * (width + 1) // 2
    products = sum(2 * width * inputs * outputs for inputs, outputs in made.matrices)
    assert made.layer_flops(width, context) == products + 4 * made.heads * made.head_dim * attended
    queries, *_, inner, out = made.matrices
    assert queries == (made.hidden, (made.heads + 2 * made.kv_heads) * made.head_dim)
    assert (inner, out) == ((made.hidden, made.ffn * (2 if made.gated else 1)), (made.ffn, made.hidden))


@pytest.mark.parametrize("made", [TINY, preset("t5-small"), preset("opt-125m")])
def test_defaults_are_one_sequence_without_a_source(made: Shape) -> None:
    for ask in (made.layer_flops, made.layer_kv_bytes):
        assert ask(3, 5) == ask(3, 5, 1) == ask(3, 5, 1, 0)


@given(SIZES, WIDTHS, CONTEXTS, BATCHES, SOURCES)
def test_operations_and_cache_are_proportional_to_the_batch(
    made: Shape, width: int, context: int, batch: int, source: int
) -> None:
    at, behind = (width, context), of(made, source)
    assert made.layer_flops(*at, batch, behind) == batch * made.layer_flops(*at, 1, behind)
    assert made.layer_kv_bytes(*at, batch, behind) == batch * made.layer_kv_bytes(*at, 1, behind)


@given(SIZES, WIDTHS, CONTEXTS, SOURCES)
def test_more_tokens_never_cost_less(made: Shape, width: int, context: int, source: int) -> None:
    behind = of(made, source)
    for quantity in (made.layer_flops, made.layer_kv_bytes):
        grid = quantity(np.arange(width, width + 4)[:, None], np.arange(context, context + 3), 2, behind)
        assert grid.shape == (4, 3)
        assert np.all(np.diff(grid, axis=0) > 0)
        assert np.all(np.diff(grid, axis=1) > 0)
        assert grid[2, 1] == quantity(width + 2, context + 1, 2, behind)  # arrays equal single numbers


@given(SIZES, WIDTHS, CONTEXTS)
def test_pass_operations_equal_those_of_layers_and_head(made: Shape, width: int, context: int) -> None:
    """Both agree, except that `operations` counts the weights of the encoder's keys and values at each token."""
    crossing = 2 * width * made.layers * 2 * made.hidden * made.kv_heads * made.head_dim if made.encoder_layers else 0
    assert pass_flops(made, width, context, 1) == made.operations(width, context, heads=width) - crossing


@given(SIZES, WIDTHS, CONTEXTS)
def test_a_multi_token_pass_reads_less_at_equal_operations(made: Shape, width: int, context: int) -> None:
    apart = [made.layer_flops(1, context + place) for place in range(width)]
    assert made.layer_flops(width, context) == sum(apart)
    rows = sum(float(made.layer_kv_bytes(1, context + place)) for place in range(width))
    assert (float(made.layer_kv_bytes(width, context)) < rows) == (width > 1)


def test_an_encoder_by_hand() -> None:
    """Two encoder and three decoder layers of width 8, four heads of 2, inner width 12, ungated, 4 bytes each."""
    made = Shape(3, 8, 4, 4, 2, 12, False, 100, True, 2, "float32", buckets=32)
    attention, ffn = 4 * 8 * 8, 2 * 8 * 12
    assert made.layer_weight_bytes == 4 * (attention + 2 * 64 + ffn)
    assert made.layer_kv_bytes(2, 7, 3, 5) == 3 * (9 + 2 + 5) * 2 * 8 * 4
    assert made.parameters == made.layers * made.layer_parameters + 8 + 128 + made.encoder_parameters + 800


def test_a_decoder_without_encoder_has_no_encoder_parameters() -> None:
    assert TINY.encoder_parameters == 0


def test_bytes_are_proportional_to_the_dtype() -> None:
    for dtype, factor in (("float32", 2), ("float16", 1), ("int8", 0.5), ("float8", 0.5)):
        other = replace(TINY, dtype=dtype)
        assert other.cache_bytes() == factor * TINY.cache_bytes()
        assert other.layer_flops(3, 2) == TINY.layer_flops(3, 2)
    assert TINY.head_bytes([0, 1, 7]).tolist() == [0, 1600, 1600]


@given(SIZES, st.integers(1, 4), WIDTHS, CONTEXTS, BATCHES)
def test_shards_sum_to_the_model(made: Shape, tensor_parallel: int, width: int, context: int, batch: int) -> None:
    """Exactly if KV heads are divided; otherwise the sum also has their replicas."""
    kv = made.kv_heads * tensor_parallel  # divides into `tensor_parallel`
    whole = replace(
        made,
        heads=made.heads * tensor_parallel,
        kv_heads=kv,
        ffn=made.ffn * tensor_parallel,
        vocabulary=made.vocabulary * tensor_parallel,
    )
    part = whole.shard(tensor_parallel)
    assert part == made
    assert tensor_parallel * part.layer_flops(width, context, batch) == whole.layer_flops(width, context, batch)
    assert tensor_parallel * part.layer_weight_bytes == whole.layer_weight_bytes
    assert tensor_parallel * part.layer_kv_bytes(width, context, batch) == whole.layer_kv_bytes(width, context, batch)
    assert tensor_parallel * part.head_flops(width) == whole.head_flops(width)


def test_shards_with_replicated_kv_heads() -> None:
    whole = preset("llama-3-8b")
    assert whole.shard(1) == whole
    for tensor_parallel in (2, 4, 8, 16, 32):
        part, copies = whole.shard(tensor_parallel), max(1, tensor_parallel // 8)
        kv_weights = 2 * 4096 * 8 * 128
        assert tensor_parallel * part.layer_weights == whole.layer_weights + (copies - 1) * kv_weights
        assert tensor_parallel * part.layer_weight_bytes == 2 * (whole.layer_weights + (copies - 1) * kv_weights)
        assert tensor_parallel * part.cache_bytes() == copies * whole.cache_bytes()
        more = 2 * (copies - 1) * kv_weights * 3
        assert tensor_parallel * part.layer_flops(3, 100) == whole.layer_flops(3, 100) + more
        # Every device has the norms.
        assert (
            tensor_parallel * part.parameters
            == whole.parameters + (tensor_parallel - 1) * 65 * 4096 + 32 * (copies - 1) * kv_weights
        )
    # A vocabulary that is not divisible is rounded up.
    assert preset("gpt2").shard(2).vocabulary == 25_129


BAD: list[tuple[Callable[[], object], str]] = [
    *[(lambda name=name: replace(TINY, **{name: 0}), f"{name} must be at least 1, got 0")  # type: ignore[misc]
      for name in ("layers", "hidden", "heads", "head_dim", "kv_heads", "ffn", "vocabulary")],
    *[(lambda name=name: replace(TINY, **{name: -1}), f"{name} must be at least 0, got -1")  # type: ignore[misc]
      for name in ("encoder_layers", "norms", "positions", "buckets")],
    *[(lambda name=name: replace(TINY, **{name: 1}), f"{name} must be true or false, got 1")  # type: ignore[misc]
      for name in ("gated", "tied_head", "qk_norms")],
    (lambda: replace(TINY, dtype="float61"), "unknown dtype 'float61'; did you mean float16"),
    (lambda: replace(TINY, norm="batch"), "unknown norm 'batch'; known: layer, rms"),
    (lambda: replace(TINY, biases="head"), "biases must be a tuple of some of qkv, out, ffn, head, got 'head'"),  # type: ignore[arg-type]
    (lambda: replace(TINY, biases=("heads",)), "unknown bias 'heads'; did you mean head"),
    (lambda: replace(TINY, kv_heads=3), "kv_heads must divide heads=4, got 3"),
    (lambda: preset("t5-larg"), "unknown shape 't5-larg'; did you mean t5-large"),
    (lambda: TINY.cache_bytes(4), "layers must be between 0 and 3, got 4"),
    (lambda: TINY.cache_bytes(-1), "layers must be between 0 and 3, got -1"),
    (lambda: TINY.cache_bytes(bytes_each=0), "bytes_each must be at least 1, got 0"),
    (lambda: TINY.operations(0, 0), "width must be at least 1, got 0"),
    (lambda: TINY.operations(1, -1), "context must be at least 0, got -1"),
    (lambda: TINY.operations(2, 0, heads=3), "heads must be between 0 and width=2, got 3"),
    (lambda: TINY.operations(2, 0, heads=-1), "heads must be between 0 and width=2, got -1"),
    (lambda: TINY.layer_flops(0, 1), "width must be at least 1, got 0"),
    (lambda: TINY.layer_flops([1, 1.5], 1), r"width\[1\] must be a whole number, got 1.5"),
    (lambda: TINY.layer_kv_bytes(1, -1), "context must be at least 0, got -1"),
    *[(lambda call=call: getattr(preset("t5-small"), call[0])(*call[1:], 0), "batch must be at least 1, got 0")  # type: ignore[misc]
      for call in (("layer_flops", 1, 1), ("layer_kv_bytes", 1, 1))],
    (lambda: TINY.layer_flops(1, 1, 1, 5), "source must be 0 without an encoder, got 5"),
    (lambda: preset("t5-small").layer_flops(1, 1, 1, -1), "source must be at least 0, got -1"),
    (lambda: TINY.head_flops(-1), "positions must be at least 0, got -1"),
    (lambda: TINY.head_bytes(-1), "positions must be at least 0, got -1"),
    (lambda: TINY.shard(0), "tensor_parallel must be at least 1, got 0"),
    (lambda: TINY.shard(3), "tensor_parallel must divide heads=4, got 3"),
    (lambda: replace(TINY, ffn=6).shard(4), "tensor_parallel must divide ffn=6, got 4"),
    (lambda: replace(TINY, heads=12, kv_heads=6).shard(4), "tensor_parallel must divide kv_heads=6 or be a multiple of it, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()


def test_published_files_of_gemma_3_leave_out_defaults() -> None:
    """google/gemma-3-4b-it, config.json: the keys of its text part."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    whole = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}}
    assert from_config(whole) == preset("gemma-3-4b")
    own = from_config(whole | {"text_config": text | {"num_attention_heads": 16, "vocab_size": 262_144}})
    assert (own.heads, own.vocabulary) == (16, 262_144)


def test_kimi_k2_has_layers_of_deepseek() -> None:
    """Model card of moonshotai/Kimi-K2-Instruct: one trillion parameters, 32 billion of them active."""
    keys = {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64,
        "intermediate_size": 18_432, "vocab_size": 163_840, "moe_intermediate_size": 2048, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    made = from_config(keys)
    assert made.parameters == pytest.approx(1.03e12, rel=5e-3)
    assert made.active_parameters == pytest.approx(32e9, rel=0.02)
    assert made.weights == preset("deepseek-v3").weights


LLAMA = {"model_type": "llama", **SMALL, "dtype": "bfloat16"}
OPT = {"model_type": "opt", **VARIANTS[10][1], "dtype": "bfloat16"}
T5 = {"model_type": "t5", **SMALL_T5, "relative_attention_num_buckets": 32, "dtype": "bfloat16"}
GPT2 = {"model_type": "gpt2", **VARIANTS[12][1], "dtype": "bfloat16"}
MIXTRAL = {"model_type": "mixtral", **GROUPED, "num_local_experts": 5, "num_experts_per_tok": 3, "dtype": "bfloat16"}
LATENT = {"model_type": "deepseek_v3", **DEEPSEEK, "dtype": "bfloat16"}
GEMMA = {"model_type": "gemma3_text", **GROUPED, "head_dim": 12, "sliding_window": 5, "dtype": "bfloat16"}
BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (LLAMA | {"model_type": "mixtra"}, "unknown model_type 'mixtra'; did you mean mixtral[?] known: deepseek_v3, gemma3_text"),
    ({}, "unknown model_type None"),
    *[({key: value for key, value in LLAMA.items() if key != name},
       f"{name} is missing in a config of model_type llama, which needs num_hidden_layers, hidden_size") for name in SMALL],
    (LLAMA | {"model_type": "mistral"}, "num_key_value_heads is missing in a config of model_type mistral"),
    (LLAMA | {"model_type": "qwen2"}, "num_key_value_heads is missing"),
    (LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2}, "head_dim is missing in a config of model_type qwen3"),
    (T5 | {"relative_attention_num_buckets": None}, "relative_attention_num_buckets is missing"),
    (T5 | {"model_type": "mt5"},
     "tie_word_embeddings is missing in a config of model_type mt5, which needs .*, tie_word_embeddings$"),
    (LLAMA | {"dtype": None}, "dtype is missing in the config; give one of bfloat16"),
    (LLAMA | {"dtype": "float61"}, "unknown dtype 'float61'; did you mean float16"),
    (LLAMA | {"hidden_size": "48"}, "hidden_size must be a whole number, got '48'"),
    (LLAMA | {"hidden_size": 47}, "num_attention_heads must divide hidden_size=47, got 4"),
    (GPT2 | {"n_embd": 47}, "n_head must divide n_embd=47, got 4"),
    (LLAMA | {"num_key_value_heads": 3}, "kv_heads must divide heads=4, got 3"),
    (LLAMA | {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
    (LLAMA | {"quantization_config": {"bits": 4}},
     "quantization_config.quant_method must be one of awq, compressed-tensors, fp8, gptq, mxfp4"),
    (LLAMA | {"quantization_config": 4}, "quantization_config must be a table, got 4"),
    (LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 3}}, "unknown quantization_config.bits '3'"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": "x"}},
     "quantization_config.group_size must be a whole number, got 'x'"),
    (LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
     "quantization_config.weight_block_size must be two numbers"),
    (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config.config_groups must be a table"),
    (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}}},
     "unknown quantization_config.config_groups: type and num_bits of weights 'int3'"),
    (MIXTRAL | {"num_experts_per_tok": 9}, "experts.active must be between 1 and experts.count=5, got 9"),
    (MIXTRAL | {"num_local_experts": None}, "num_local_experts is missing in a config of model_type mixtral"),
    (LATENT | {"moe_layer_freq": 2}, "moe_layer_freq must be 1 in a config of model_type deepseek_v3"),
    (LATENT | {"first_k_dense_replace": 4}, "experts.dense_layers must be at most layers=3, got 4"),
    (LATENT | {"kv_lora_rank": None}, "kv_lora_rank is missing in a config of model_type deepseek_v3"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 10**9}},
     "quantization_config.group_size must be between -1 and 16777216, got 1000000000"),
    (LLAMA | {"quantization_config": {"quant_method": "compressed-tensors",
                                      "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 10**9}}}}},
     "quantization_config.config_groups: group_size must be between -1 and 16777216, got 1000000000"),
    (LLAMA | {"draft_vocab_size": 10**9}, "draft_vocab_size must be between 1 and 16777216"),
    (GEMMA | {"layer_types": "x"}, "layer_types must be a list with a word for each layer, got 'x'"),
    (GEMMA | {"layer_types": ["full_attention"]}, "layer_types must have num_hidden_layers=3 entries, got 1"),
    (GEMMA | {"sliding_window": 0}, "sliding_window must be between 1"),
    (LLAMA | {"num_experts": 8}, "num_experts must be absent .* llama: other variants are not supported, got 8"),
    (LLAMA | {"num_local_experts": 8}, "num_local_experts must be absent"),
    (LLAMA | {"n_routed_experts": 8}, "n_routed_experts must be absent"),
    (OPT | {"word_embed_proj_dim": 24}, "word_embed_proj_dim must be hidden_size=48, got 24"),
    (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before must be true in a config of model_type opt"),
    (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine must be true"),
    (OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm must be false"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention must be false in a config of model_type gpt2"),
    (T5 | {"is_encoder_decoder": False}, "is_encoder_decoder must be true in a config of model_type t5"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_an_unknown_config_is_refused_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        from_config(config)


@pytest.mark.parametrize(("said", "wanted"), [
    (None, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, FORMATS["float8"]),
    ({"quant_method": "fp8"}, replace(FORMATS["float8"], group=0)),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, FORMATS["int4"]),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, FORMATS["int8"]),
    ({"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}, "input_activations": None},
    }}, QuantisedWeights("int4", 64)),
    ({"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}, "input_activations": {"num_bits": 8}},
    }}, QuantisedWeights("float8", arithmetic="float8")),
])  # fmt: skip
def test_quantised_checkpoints_by_their_method(said: dict[str, Any] | None, wanted: QuantisedWeights | None) -> None:
    assert from_config(LLAMA | {"quantization_config": said}).weights == wanted


def test_only_experts_are_in_mxfp4() -> None:
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    assert from_config(MIXTRAL | said).weights == replace(FORMATS["mxfp4"], experts_only=True)
    with pytest.raises(
        ParameterError, match=r"^quantization_config.quant_method mxfp4 is of experts, which only these types have: "
    ):
        from_config(LLAMA | said)


@pytest.mark.parametrize("config", [LLAMA, OPT, T5, GPT2, MIXTRAL, LATENT, GEMMA])
def test_the_base_of_bad_configs_is_accepted(config: dict[str, Any]) -> None:
    made = from_config(config)
    assert (made.layers, made.hidden, made.heads) == (3, 48, 4)
    assert made.head_dim == config.get("d_kv", 12)
    assert {*made.biases} <= {*BIASED}


def test_dtype_is_read_from_both_keys_and_with_torch_prefix() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "dtype"}
    for key in ("dtype", "torch_dtype"):
        for name in ("float16", "torch.float16"):
            assert from_config(without | {key: name}).dtype == "float16"


def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"^cannot read the config .*none.json: No such file"):
        from_config(tmp_path / "none.json")
    for text, message in (("{", "must be JSON"), ("[1]", "must be a table of keys")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ParameterError, match=message):
            from_config(tmp_path / "config.json")


# --- Longest contexts ---


def test_longest_contexts_are_of_known_models_and_agree_with_tables_of_positions() -> None:
    assert {*longest_contexts.LONGEST_CONTEXTS} <= {*PRESETS}
    learned = {name: shape.positions for name, shape in PRESETS.items() if shape.positions}
    assert {*learned} == {"opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "gpt2", "gpt2-xl"}
    for name, rows in learned.items():
        assert longest_contexts.longest_context(name) == rows - 2 * name.startswith("opt")  # two rows of OPT are padding
    assert all(longest_contexts.longest_context(name) is None for name, shape in PRESETS.items() if shape.buckets)


def yarn(factor: float, first: int) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": first}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 1024}, 1024), ({}, None), ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_scaling": yarn(4, 32_768)}, 131_072),
        ({"max_position_embeddings": 163_840, "rope_scaling": yarn(40, 4096)}, 163_840),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
    ],
)  # fmt: skip
def test_longest_context_of_a_configuration_counts_its_scaling(config: dict[str, Any], expected: int | None) -> None:
    assert longest_contexts.of_config(config) == expected


@pytest.mark.parametrize("config", [{"n_positions": 0}, {"max_position_embeddings": "long"}, {"max_position_embeddings": True},
                                    {"n_positions": 8, "rope_scaling": {"type": "yarn", "factor": "4"}}])  # fmt: skip
def test_bad_positions_of_a_configuration_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"max_position_embeddings|factor"):
        longest_contexts.of_config(config)
