"""Shapes of models from the configurations (`config.json`) of the transformers library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.architectures.layer_parts import BITS, FORMATS, DraftInput, Experts, LatentAttention, QuantisedWeights, SlidingWindow
from model.architectures.transformer import BIASED, BLOCK, BYTES, Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError

_COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_SIZES = {
    "llama": _COMMON,
    "mistral": (*_COMMON, "num_key_value_heads"),
    "qwen2": (*_COMMON, "num_key_value_heads"),
    "qwen3": (*_COMMON, "num_key_value_heads", "head_dim"),
    "qwen3_moe": (*_COMMON, "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok"),
    "mixtral": (*_COMMON, "num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
    "gpt_oss": (*_COMMON, "num_key_value_heads", "head_dim", "num_local_experts", "sliding_window"),
    "deepseek_v3": (
        *_COMMON, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace",
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    ),
    "gemma3_text": (*_COMMON, "num_key_value_heads", "head_dim", "sliding_window"),
    "phi3": (*_COMMON, "num_key_value_heads"),
    "opt": ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim", "vocab_size", "max_position_embeddings"),
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions"),
    "gpt_neox": _COMMON,
    "phi": _COMMON,
    "t5": ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "d_kv", "relative_attention_num_buckets"),
    "mt5": ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "d_kv", "relative_attention_num_buckets"),
}
"""Required keys by model type: layers, width, heads, feed-forward width and vocabulary, then keys whose default differs between
versions of the library."""  # fmt: skip
# Defaults of the library. That of mT5 has changed, so its files must state it.
_UNTIED = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "phi3")
_TIED = dict.fromkeys(_UNTIED, False) | dict.fromkeys(("opt", "gpt2", "t5", "gemma3_text"), True)
_FFN = {"t5": "relu", "mt5": "gated-gelu"}
_OWN_HEAD_DIM = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gemma3_text")
_WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
_WITH_WINDOW = ("mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gemma3_text", "phi3")
# The only variant supported.
_NO_EXPERTS: dict[str, object] = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"))
_ONLY: dict[str, dict[str, object]] = {
    "opt": {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    "gpt2": {"add_cross_attention": False},
    "t5": {"is_encoder_decoder": True},
    "mt5": {"is_encoder_decoder": True},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {"moe_layer_freq": 1, "attention_bias": False},
}


_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
"""Defaults of the library that published configurations of Gemma 3 leave out."""


def from_config(source: str | Path | Mapping[str, Any], dtype: str | None = None) -> Shape:
    """Return the shape described by a `config.json` of the transformers library, given as a path or as its content.

    `_SIZES` lists the model types. Another type, a missing key and an unsupported variant are errors. The type of the numbers is
    `dtype`, else that of the file.

    >>> from model.architectures.published_shapes import preset
    >>> sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    >>> from_config({"model_type": "gpt2", **sizes}, dtype="bfloat16") == preset("gpt2")
    True
    """
    config = source if isinstance(source, Mapping) else read(Path(source))
    check_config(config)
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config = _text_part(config)
    kind = config.get("model_type")
    if kind == "kimi_k2":
        # Layers of DeepSeek-V3: "Kimi-K2 reuses the DeepSeekV3CausalLM architecture" (its deployment guide).
        kind, config = "deepseek_v3", {**config, "model_type": "deepseek_v3"}
    checks.one_of("model_type", kind, _SIZES)
    assert isinstance(kind, str)
    for key, value in (({} if kind in _WITH_EXPERTS else _NO_EXPERTS) | _ONLY.get(kind, {})).items():
        setting = config.get(key, value)
        if setting != value:
            raise ParameterError(
                f"{key} must be {'absent' if value is None else str(value).lower()} in a config of model_type {kind}: other"
                f" variants are not supported, got {checks.shown(setting)}"
            )
    if kind == "gpt2" and config.get("n_inner") is None:
        config = {**config, "n_inner": 4 * _whole(config, "n_embd")}
    layers, hidden, heads, ffn, vocabulary = (_whole(config, key) for key in _SIZES[kind][:5])
    more: dict[str, Any] = {"dtype": _dtype(config) if dtype is None else dtype, "weights": _quantised(config)}
    kv_heads, gated = heads, False
    tied = _flag(config, "tie_word_embeddings", _TIED.get(kind))
    if kind in ("t5", "mt5"):
        head_dim, gated = _whole(config, "d_kv"), str(config.get("feed_forward_proj", _FFN[kind])).startswith("gated-")
        more |= {"encoder_layers": layers, "buckets": _whole(config, "relative_attention_num_buckets")}
        layers = _whole(config, "num_decoder_layers", layers)
        return Shape(layers, hidden, heads, kv_heads, head_dim, ffn, gated, vocabulary, tied, **more)
    if kind in ("opt", "gpt2", "gpt_neox", "phi"):
        more |= {"norm": "layer", "biases": BLOCK}
    match kind:
        case "opt":
            if _whole(config, "word_embed_proj_dim", hidden) != hidden:
                raise ParameterError(
                    f"word_embed_proj_dim must be hidden_size={hidden}, got {config['word_embed_proj_dim']}: a projection after"
                    " the embedding is not supported"
                )
            # Two rows are padding.
            more |= {"positions": _whole(config, "max_position_embeddings") + 2}
            more |= {} if _flag(config, "enable_bias", True) else {"biases": ()}
        case "gpt2":
            more |= {"positions": _whole(config, "n_positions")}
        case "gpt_neox":
            more |= {} if _flag(config, "attention_bias", True) else {"biases": ("ffn",)}
        case "phi":
            kv_heads = _whole(config, "num_key_value_heads", heads)
            more |= {"norms": 1, "biases": BIASED, "qk_norms": _flag(config, "qk_layernorm", False)}
        case "deepseek_v3":
            gated, latent = True, {key: _whole(config, f"{key}_dim") for key in ("qk_rope_head", "qk_nope_head", "v_head")}
            query_rank = 0 if config.get("q_lora_rank", 1536) is None else _whole(config, "q_lora_rank", 1536)
            made = LatentAttention(query_rank, _whole(config, "kv_lora_rank"), latent["qk_rope_head"], latent["qk_nope_head"])
            wide = _whole(config, "moe_intermediate_size")
            dense = _count(config, "first_k_dense_replace")
            experts = Experts(
                _whole(config, "n_routed_experts"), _whole(config, "num_experts_per_tok"),
                _count(config, "n_shared_experts") * wide, dense, ffn if dense else 0,
            )  # fmt: skip
            more |= {"latent": made, "experts": experts}
            return Shape(layers, hidden, heads, heads, latent["v_head"], wide, gated, vocabulary, tied, **more)
        case _:
            gated, kv_heads = True, _whole(config, "num_key_value_heads", heads if kind == "llama" else None)
            more |= {"biases": _llama_biases(config, kind), "qk_norms": kind in ("qwen3", "qwen3_moe", "gemma3_text")}
            more |= {"window": _window(config, kind, layers)}
    match kind:
        case "gemma3_text":
            more |= {"norms": 4}
        case "qwen3_moe":
            ffn = _whole(config, "moe_intermediate_size")
            named_ = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
            more |= {"experts": Experts(_whole(config, named_), _whole(config, "num_experts_per_tok"))}
        case "mixtral":
            more |= {"experts": Experts(_whole(config, "num_local_experts"), _whole(config, "num_experts_per_tok"))}
        case "gpt_oss":
            active = _whole(config, "num_experts_per_tok", config.get("experts_per_token", 4))
            more |= {"biases": BLOCK, "sinks": True}
            more |= {"experts": Experts(_whole(config, "num_local_experts"), active, biased_router=True)}
    head_dim = _head_dim(config, kind, hidden, heads)
    if _is_eagle3(config):
        if _whole(config, "target_hidden_size", hidden) != hidden:
            raise ParameterError(f"target_hidden_size must be hidden_size={hidden}, got {config['target_hidden_size']}")
        vocabulary, tied = _whole(config, "draft_vocab_size", vocabulary), False
        more |= {"draft": DraftInput("eagle3", 3, attention_states=2, norms=1)}
    return Shape(layers, hidden, heads, kv_heads, head_dim, ffn, gated, vocabulary, tied, **more)


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return True for the configuration of an EAGLE-3 head, which calls itself a model of the type of its layer."""
    classes = config.get("architectures")
    return isinstance(classes, list) and any(isinstance(each, str) and "eagle3" in each.lower() for each in classes)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Configuration of the text part of Gemma 3.

    Where it leaves keys out, those in the whole's configuration hold, then the library's defaults, which its published files need.
    """
    whole = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if config.get(key) is not None}
    return _GEMMA3 | whole | {key: value for key, value in config["text_config"].items() if value is not None}


def _window(config: Mapping[str, Any], kind: str, layers: int) -> SlidingWindow | None:
    """Sliding window: of the layers that `layer_types` names, else of those that the type of model has by default."""
    if kind not in _WITH_WINDOW or config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        return None  # off by default
    size, types = _whole(config, "sliding_window"), config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise ParameterError(f"layer_types must be a list with a word for each layer, got {checks.shown(types)}")
    if types is not None:
        if len(types) != layers:
            raise ParameterError(f"layer_types must have num_hidden_layers={layers} entries, got {len(types)}")
        windowed_layers = sum(each == "sliding_attention" for each in types)
    elif kind == "gemma3_text":
        pattern = next((config[key] for key in ("sliding_window_pattern", "_sliding_window_pattern") if config.get(key)), 6)
        checks.whole("sliding_window_pattern", pattern, 1)
        windowed_layers = layers - layers // pattern
    elif kind == "gpt_oss":
        windowed_layers = (layers + 1) // 2
    elif kind in ("qwen2", "qwen3"):
        windowed_layers = max(layers - _whole(config, "max_window_layers", 28), 0)
    else:
        windowed_layers = layers
    return SlidingWindow(size, windowed_layers) if windowed_layers else None


def _quantised(config: Mapping[str, Any]) -> QuantisedWeights | None:
    """Format of the weights of a checkpoint, by the method that quantised it."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ParameterError(f"quantization_config must be a table, got {checks.shown(found)}")
    method = found.get("quant_method")
    match method:
        case "mxfp4":
            if config.get("model_type") not in _WITH_EXPERTS:
                known = ", ".join(_WITH_EXPERTS)
                raise ParameterError(f"quantization_config.quant_method mxfp4 is of experts, which only these types have: {known}")
            return replace(FORMATS["mxfp4"], experts_only=True)
        case "fp8":
            block = found.get("weight_block_size") or [0, 0]
            if not isinstance(block, list) or len(block) != 2:
                raise ParameterError(f"quantization_config.weight_block_size must be two numbers, got {checks.shown(block)}")
            for each in block:
                checks.whole("quantization_config.weight_block_size", each, 0, MOST_WIDE)
            return replace(FORMATS["float8"], group=block[0] * block[1])
        case "awq" | "gptq":
            bits, group = found.get("bits"), found.get("group_size", 128)
            checks.one_of("quantization_config.bits", f"{bits}", ("4", "8"))
            checks.whole("quantization_config.group_size", group, -1, MOST_WIDE)
            return QuantisedWeights(f"int{bits}", max(group, 0))
        case "compressed-tensors":
            return _compressed(found.get("config_groups"))
    known = "awq, compressed-tensors, fp8, gptq, mxfp4"
    raise ParameterError(f"quantization_config.quant_method must be one of {known}, got {checks.shown(method)}; leave the table out"
                         " and name a format of weights in the scenario")  # fmt: skip


def _compressed(groups: Any) -> QuantisedWeights:
    """Format of a checkpoint of compressed-tensors, whose groups of modules must have one; products are in the inputs' type."""
    made = {_format_of_group(each) for each in groups.values()} if isinstance(groups, Mapping) else set()
    if len(made) != 1:
        raise ParameterError(f"quantization_config.config_groups must be a table of groups of one format, got {len(made)} formats")
    return made.pop()


def _format_of_group(group: Any) -> QuantisedWeights:
    where = "quantization_config.config_groups"
    weights, inputs = (group.get(key) if isinstance(group, Mapping) else None for key in ("weights", "input_activations"))
    if not isinstance(weights, Mapping):
        raise ParameterError(f"{where}: weights must be a table, got {checks.shown(weights)}")
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    checks.one_of(f"{where}: type and num_bits of weights", f"{kind}{bits}", BITS)
    checks.whole(f"{where}: group_size", 0 if size is None else size, -1, MOST_WIDE)
    return QuantisedWeights(
        f"{kind}{bits}", max(size or 0, 0), 8 if (kind, bits) == ("float", 4) else 16,
        arithmetic=f"{kind}{bits}" if isinstance(inputs, Mapping) else None,
    )  # fmt: skip


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if value is None:
        raise _missing(config, key)
    checks.whole(key, value, 0, MOST_WIDE)
    return int(value)



def _head_dim(config: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    if kind in _OWN_HEAD_DIM and ("head_dim" in _SIZES[kind] or config.get("head_dim") is not None):
        return _whole(config, "head_dim")
    if hidden % heads:
        key, width = _SIZES[kind][2], _SIZES[kind][1]
        raise ParameterError(f"{key} must divide {width}={hidden}, got {heads}")
    return hidden // heads


def _llama_biases(config: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    if kind == "qwen2":
        return ("qkv",)
    without = ("mistral", "mixtral", "phi3")
    attention = ("qkv", "out") if kind not in without and _flag(config, "attention_bias", False) else ()
    return (*attention, "ffn") if kind == "llama" and _flag(config, "mlp_bias", False) else attention


MOST_LAYERS, MOST_WIDE = 1_000, 2**24
"""Largest layers, and largest other size, of a configuration. The largest published models have 126 and about a million."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
_MAY_BE_0 = ("n_shared_experts", "first_k_dense_replace")
_WIDE = {key for keys in _SIZES.values() for key in keys if key not in (*_LAYERS, *_MAY_BE_0)} | {
    "num_key_value_heads", "head_dim", "d_kv", "num_experts", "q_lora_rank", "draft_vocab_size", "target_hidden_size",
}  # fmt: skip
_SMALL = ("eps", "epsilon")
DEEP = ("text_config", "rope_parameters", "rope_scaling")


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration of the transformers library with sizes that no machine can build, or with invalid numbers.

    Any model type is accepted: all of them use the keys that are checked.

    >>> check_config({"num_hidden_layers": 10**9})
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: num_hidden_layers must be between 1 and 1000, got 1000000000
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and key in DEEP:
            check_config(value)
        if value is None or isinstance(value, str | list | Mapping):
            continue
        if key in _LAYERS:
            checks.whole(key, value, 1, MOST_LAYERS)
        elif key in _WIDE:
            checks.whole(key, value, 1, MOST_WIDE)
        elif key == "rope_theta" or key.endswith(_SMALL):
            checks.number(key, value, 0, 1e-1 if key.endswith(_SMALL) else 1e12)
            if not value and key == "rope_theta":
                raise ParameterError("rope_theta must be above 0, got 0")


def read(path: Path) -> Mapping[str, Any]:
    """Return the content of a configuration file; a file that holds none is an error."""
    try:
        found = bounded_files.json_of(bounded_files.read_bytes(path, bounded_files.MOST_TOML))
    except OSError as error:
        raise ParameterError(f"cannot read the config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ParameterError(f"the config {path} must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ParameterError(f"the config {path} must be a table of keys, got {checks.shown(found)}")
    return found


def _missing(config: Mapping[str, Any], key: str) -> ParameterError:
    kind = config["model_type"]
    needed = [each for each in _SIZES[kind] if each != "n_inner"] + ([] if kind in _TIED else ["tie_word_embeddings"])
    return ParameterError(f"{key} is missing in a config of model_type {kind}, which needs {', '.join(needed)}")


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value  # the library writes null for derived values
    if value is None:
        raise _missing(config, key)
    checks.whole(key, value, 1)
    return int(value)


def _flag(config: Mapping[str, Any], key: str, default: bool | None) -> bool:
    value = config.get(key, default)
    if value is None:
        raise _missing(config, key)
    checks.flag(key, value)
    return bool(value)


def says_dtype(config: Mapping[str, Any]) -> Any:
    """Return the type of the numbers that a configuration names, or None."""
    return config.get("dtype") or config.get("torch_dtype")


def _dtype(config: Mapping[str, Any]) -> str:
    value = says_dtype(config)
    if value is None:
        raise ParameterError(f"dtype is missing in the config; give one of {', '.join(BYTES)}: from_config(source, dtype=...)")
    name = str(value).removeprefix("torch.")
    checks.one_of("dtype", name, BYTES)
    return name
