"""Architectures by model name: the library's configuration and the project's shape, without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.architectures import draft_heads, published_shapes, shape_configs, transformer
from model.base import bounded_files, checks
from model.base.checks import ParameterError

LLAMA = {
    "vicuna": "llama", "codellama": "llama", "pythia": "gpt_neox", "qwen2.5": "qwen2", "gemma": "gemma3_text", "gpt": "gpt_oss",
    "deepseek": "deepseek_v3",
}  # fmt: skip
"""Architectures of presets whose names do not contain them."""
GATED_T5 = {True: "gated-gelu", False: "relu"}


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model's configuration of the transformers library, and its shape."""

    name: str
    config: Any
    shape: transformer.Shape

    @property
    def crossing(self) -> bool:
        """True if the decoder has cross-attention to an encoder."""
        return bool(self.config.is_encoder_decoder)

    @property
    def positions(self) -> int | None:
        """Number of learned positions; None if positions are not learned."""
        if self.config.model_type not in ("opt", "gpt2"):
            return None
        return int(self.config.max_position_embeddings)

    def check_positions(self, width: int, context: int) -> None:
        """Refuse a pass beyond the learned positions, which on a GPU would crash the process."""
        if self.positions is not None and width + context > self.positions:
            bound = f"{self.name} has learned {self.positions} positions, and width + context"
            raise ParameterError(f"{bound} must be at most that, got {width} + {context}")


def architecture(model: str) -> Architecture:
    """Return the architecture of a preset, a model of the family (`family:target`), a `config.json`, or OWNER/NAME of the hub.

    Only the last uses the network. `eagle:MODEL` is that of an EAGLE head of another model, with its target's configuration.
    """
    of_family, colon, role = model.partition(":")
    if colon and of_family == "eagle":
        target = architecture(role)
        return Architecture(f"eagle-{target.name}", target.config, draft_heads.head_of(of_family, target.shape))
    if colon and of_family == "family":
        from calibrate.family import model_directory

        return _from_file(model_directory.bundled(role) / "config.json", f"family-{role}")
    if model in published_shapes.PRESETS:
        shape = replace(published_shapes.preset(model), weights=None)  # random ones, in the dtype to run in
        return Architecture(model, _library_config(model, shape), shape)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.exists():
        return _from_file(path, path.parent.name if path.name == "config.json" else path.stem)
    if model.count("/") == 1 and all(model.split("/")):
        return _from_file(_from_hub(model), model.split("/")[1].lower())
    raise ParameterError(f"{checks.unknown('model', model, published_shapes.PRESETS)}; or a config.json, or OWNER/NAME of the hub")


def _from_file(path: Path, name: str) -> Architecture:
    try:
        said = bounded_files.json_of(bounded_files.read_bytes(path, bounded_files.MOST_TOML))
    except FileNotFoundError:
        raise ParameterError(f"model must be a preset, a config.json or OWNER/NAME, and there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(said, dict):
        raise ParameterError(f"{path.name} must be a table of keys, such as model_type, got {checks.shown(said)}")
    try:
        # The file's dtype is that of the saved checkpoint; the dtype to run in is chosen separately.
        shape = replace(shape_configs.from_config(said, dtype="bfloat16"), weights=None)
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = CONFIG_MAPPING[said["model_type"]].from_dict(said)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None
    except Exception as error:  # the library raises errors of many kinds
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ParameterError(f"{path.name}: transformers does not accept it: {said}") from None
    return Architecture(name, config, shape)


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # network errors are of many kinds
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ParameterError(f"model {model} could not be loaded from the hub: {said}; give its config.json instead") from None


def _library_config(name: str, shape: transformer.Shape) -> Any:
    """Return the library's configuration of a preset, from its shape."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = name.split("-")[0]
    family = "phi3" if name.startswith("phi-4") else LLAMA.get(family, family)
    experts, latent, window = shape.experts, shape.latent, shape.window
    if family == "qwen3" and experts is not None:
        family = "qwen3_moe"
    common = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied_head}
    usual = {
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "max_position_embeddings": 8192,
    }  # fmt: skip
    grouped = usual | {"num_key_value_heads": shape.kv_heads}
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "llama": lambda: grouped | {"head_dim": shape.head_dim},
        "mistral": lambda: grouped | {"head_dim": shape.head_dim, "sliding_window": None},
        "qwen2": lambda: grouped,
        "phi": lambda: grouped,
        "phi3": lambda: grouped,
        "qwen3": lambda: grouped | {"head_dim": shape.head_dim},
        "gpt_neox": lambda: usual,
        "opt": lambda: {
            "hidden_size": shape.hidden, "ffn_dim": shape.ffn, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "max_position_embeddings": shape.positions - 2, "word_embed_proj_dim": shape.hidden,
        },
        "gpt2": lambda: {
            "n_embd": shape.hidden, "n_inner": shape.ffn, "n_layer": shape.layers, "n_head": shape.heads,
            "n_positions": shape.positions,
        },
        "t5": lambda: _t5(shape),
        "mt5": lambda: _t5(shape),
    }  # fmt: skip
    if window is not None:
        known["gemma3_text"] = lambda: grouped | {"head_dim": shape.head_dim, "sliding_window": window.size}
    if experts is not None:
        some = grouped | {"num_experts_per_tok": experts.active}
        known |= {
            "mixtral": lambda: some | {"num_local_experts": experts.count},
            "gpt_oss": lambda: some | {"num_local_experts": experts.count, "head_dim": shape.head_dim},
            "qwen3_moe": lambda: some | {
                "num_experts": experts.count, "head_dim": shape.head_dim, "moe_intermediate_size": shape.ffn,
            },
        }  # fmt: skip
        if latent is not None:
            known["deepseek_v3"] = lambda: some | {
                "n_routed_experts": experts.count, "moe_intermediate_size": shape.ffn,
                "n_shared_experts": experts.shared // shape.ffn, "intermediate_size": experts.dense_ffn,
                "first_k_dense_replace": experts.dense_layers,
                "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope,
                "qk_nope_head_dim": latent.nope, "v_head_dim": shape.head_dim,
            }  # fmt: skip
    if family not in known:
        raise ParameterError(f"{checks.unknown('architecture of preset', name, known)}; give the model's config.json instead")
    library: Any = CONFIG_MAPPING[family]
    return library(**common, **known[family]())


def _t5(shape: transformer.Shape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden, "d_ff": shape.ffn, "d_kv": shape.head_dim, "num_heads": shape.heads,
        "num_layers": shape.encoder_layers, "num_decoder_layers": shape.layers, "feed_forward_proj": GATED_T5[shape.gated],
    }  # fmt: skip
