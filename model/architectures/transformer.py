"""Shapes of transformers: parameters, operations, weights and KV cache of a forward pass, all computed without a clock.

*Weights* are the entries of matrices; *parameters* are all numbers of a model, including norms, biases, learned positions,
relative-position tables, embedding and encoder. Operations and memory traffic count weights, keys and values, and embedding rows;
norms, biases and activations are left out (well below one percent). The projection onto the vocabulary (the head) is not a layer.
A multiplication and an addition are two operations. Every position is attended to: sliding windows are not modelled, so a shape
that has one is charged too much once the context exceeds the window.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863, Table 2.
[Shoeybi2019] M. Shoeybi et al. Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism.
arXiv:1909.08053.
[Touvron2023] H. Touvron et al. Llama 2: Open Foundation and Fine-Tuned Chat Models. arXiv:2307.09288.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import bounded_files, checks
from model.base.checks import ParameterError

Floats = NDArray[np.float64]

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1, "int8": 1}
"""Bytes per number, by type."""
NORMS = {"rms": 1, "layer": 2}
"""Vectors per norm: a factor, or a factor and a shift."""
BIASED = ("qkv", "out", "ffn", "head")
"""Matrices that may have a bias: queries, keys and values; the output of attention; feed-forward; the head."""


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder, or of an encoder and a decoder.

    Parameters
    ----------
    layers, hidden
        Number of decoder layers, and width of the hidden state.
    heads, kv_heads, head_dim
        Attention heads; groups of heads share the keys and values of one of `kv_heads`; width of a head.
    ffn, gated
        Inner width of the feed-forward layer; it has 3 matrices if gated, else 2.
    vocabulary, tied_head
        Rows of the embedding and of the head; True if both share the same numbers.
    encoder_layers
        Layers of an encoder of the same sizes. If there are any, each decoder layer also attends to the encoder (cross-attention),
        with as many heads.
    dtype
        Type of weights, keys and values: bfloat16, float16, float32, float8 or int8.
    norm, norms
        `rms` (a factor) or `layer` (a factor and a shift), and norms per layer, without that of cross-attention.
    biases
        Matrices with a bias: some of `qkv`, `out`, `ffn` and `head`.
    positions, buckets
        Rows of the table of learned positions; rows of the table of relative positions, one table in the decoder and one in the
        encoder.
    qk_norms
        True if queries and keys have a norm each, of the width of a head.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocabulary: int
    tied_head: bool
    encoder_layers: int = 0
    dtype: str = "bfloat16"
    norm: str = "rms"
    norms: int = 2
    biases: tuple[str, ...] = ()
    positions: int = 0
    buckets: int = 0
    qk_norms: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            checks.whole(name, getattr(self, name), 1)
        for name in ("encoder_layers", "norms", "positions", "buckets"):
            checks.whole(name, getattr(self, name), 0)
        for name in ("gated", "tied_head", "qk_norms"):
            checks.flag(name, getattr(self, name))
        checks.one_of("dtype", self.dtype, BYTES)
        checks.one_of("norm", self.norm, NORMS)
        if not isinstance(self.biases, tuple):
            raise ParameterError(f"biases must be a tuple of some of {', '.join(BIASED)}, got {checks.shown(self.biases)}")
        for name in self.biases:
            checks.one_of("bias", name, BIASED)
        if self.heads % self.kv_heads:
            raise ParameterError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")

    # --- Parameters and weights ---

    @property
    def bytes_each(self) -> int:
        """Bytes per number [bytes]."""
        return BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Parameters of the model.

        >>> preset("llama-2-13b").parameters, preset("t5-large").parameters
        (13015864320, 737668096)
        """
        decoder = self.layers * self.layer_parameters + self._norm + self.buckets * self.heads
        return decoder + self.encoder_parameters + self.embedding_parameters + self.head_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, without the table of relative positions."""
        across = self._attention_biases + self._norm if self.encoder_layers else 0
        return self.layer_weights + self._layer_vectors + across

    @property
    def encoder_parameters(self) -> int:
        """Parameters of the encoder without its embedding, which it shares with the decoder; 0 without an encoder."""
        if not self.encoder_layers:
            return 0
        return self.encoder_layers * (self.encoder_layer_weights + self._layer_vectors) + self._norm + self.buckets * self.heads

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens, and of learned positions."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not already in the embedding: a tied head adds at most its bias.

        >>> preset("gpt2").head_parameters, preset("llama-2-7b").head_parameters, preset("phi-2").head_parameters - 2560 * 51200
        (0, 131072000, 51200)
        """
        return (0 if self.tied_head else self.head_weights) + (self.vocabulary if "head" in self.biases else 0)

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer.

        >>> [preset(name).layers * preset(name).layer_weights for name in ("t5-large", "t5-small")]
        [402653184, 25165824]
        """
        return self.encoder_layer_weights + (self._attention_weights if self.encoder_layers else 0)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Matrix products of a decoder layer, fused as engines fuse them: (inputs, outputs) of each.

        Query, key and value in one product; attention output; queries and output of cross-attention; feed-forward, with gate and
        up projection in one product.

        >>> preset("llama-2-7b").matrices
        ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
        """
        inner, rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        across = ((self.hidden, inner), (inner, self.hidden)) if self.encoder_layers else ()
        own = ((self.hidden, inner + 2 * rows), (inner, self.hidden))
        return (*own, *across, (self.hidden, (2 if self.gated else 1) * self.ffn), (self.ffn, self.hidden))

    @property
    def head_weights(self) -> int:
        """Weights of the head, tied to the embedding or not."""
        return self.hidden * self.vocabulary

    # --- Exact whole numbers, for closed forms of whole decodings ---

    def cache_bytes(self, layers: int | None = None, *, bytes_each: int | None = None) -> int:
        """KV cache of one position in `layers` layers (default: all) [bytes]; a number has `bytes_each` bytes (default: by dtype).

        >>> preset("llama-2-13b").cache_bytes(20) / 1e6  # sent by a sub-process of PPD at half depth
        0.4096
        """
        depth = self._depth(layers)
        each = self.bytes_each if bytes_each is None else bytes_each
        checks.whole("bytes_each", each, 1)
        return 2 * depth * self.kv_heads * self.head_dim * each

    def operations(self, width: int, context: int, layers: int | None = None, *, heads: int = 0) -> int:
        """Operations of a pass over `width` positions after `context` cached ones, through `layers` layers (default: all).

        2 per weight and position, plus 4 heads head_dim per position and position that it attends to, itself included. `heads`
        positions are projected onto the vocabulary. Attention over encoder positions is left out. The weights that compute the
        encoder's keys and values count at every position, although they are used once per sequence (`layer_flops` omits them).

        >>> preset("llama-2-13b").operations(1, 0) / (2 * 40 * preset("llama-2-13b").layer_weights) < 1.0001
        True
        """
        depth = self._depth(layers)
        checks.whole("width", width, 1)
        checks.whole("context", context, 0)
        checks.whole("heads", heads, 0, width, "width")
        attended = width * context + width * (width + 1) // 2
        through = depth * (2 * width * self.layer_weights + 4 * self.heads * self.head_dim * attended)
        return through + 2 * heads * self.head_weights

    # --- One layer in a pass; arguments are numbers or arrays that broadcast ---

    def layer_flops(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, source: ArrayLike = 0) -> Floats:
        """Operations of one decoder layer in a pass over `width` new tokens per sequence, in a batch of `batch` sequences.

        A new token attends to `context` cached positions, to the new tokens before it and to itself, and to `source` encoder
        positions, whose keys and values are cached. Arguments are numbers or arrays that broadcast.

        >>> print(preset("llama-2-7b").layer_flops([1, 5], 1000) / 1e9)
        [0.42 2.11]
        """
        w, past, sequences, across = self._pass(width, context, batch, source)
        attended = w * past + w * (w + 1) / 2 + w * across
        return np.asarray(sequences * (2 * w * self._decoding_weights + 4 * self.heads * self.head_dim * attended))

    @property
    def layer_weight_bytes(self) -> int:
        """Weights of one decoder layer that a pass reads, once for the whole batch [bytes].

        The weights that compute the encoder's keys and values are not read again: 2 of 16 matrices in T5.

        >>> preset("llama-2-7b").layer_weight_bytes / 1e6
        404.75
        >>> preset("t5-large").layer_weight_bytes / (2 * preset("t5-large").layer_weights)
        0.875
        """
        return self._decoding_weights * self.bytes_each

    def layer_kv_bytes(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, source: ArrayLike = 0) -> Floats:
        """Keys and values that one decoder layer reads and writes in such a pass [bytes].

        Each position of a sequence, cached or new, is read once for all its new tokens; the new ones are also written.

        >>> float(preset("llama-2-7b").layer_kv_bytes(1, 1000)) / 1e6  # 1001 read and one written, 16 kB each
        16.42
        """
        w, past, sequences, across = self._pass(width, context, batch, source)
        return np.asarray(sequences * (past + 2 * w + across) * self.cache_bytes(1))

    def head_flops(self, positions: ArrayLike) -> Floats:
        """Operations that project `positions` positions onto the vocabulary."""
        return np.asarray(2 * self.head_weights * checks.whole_array("positions", positions, 0))

    def head_bytes(self, positions: ArrayLike) -> Floats:
        """Head weights read by such a projection: once for all positions, 0 for 0 positions [bytes]."""
        return np.where(checks.whole_array("positions", positions, 0) > 0, float(self.head_weights * self.bytes_each), 0.0)

    # --- Tensor parallelism ---

    def shard(self, tensor_parallel: int) -> Shape:
        """Shape of the part of the model on one of `tensor_parallel` devices: Section 3 of [Shoeybi2019].

        Heads, feed-forward and vocabulary (rounded up) are divided. Norms, learned positions and biases added after a reduction are
        on every device. With more devices than `kv_heads`, each device holds one KV head, so heads are replicated.

        >>> part = preset("llama-2-70b").shard(16)
        >>> part.heads, part.kv_heads, part.ffn, part.hidden
        (4, 1, 1792, 8192)
        """
        checks.whole("tensor_parallel", tensor_parallel, 1)
        for name in ("heads", "ffn"):
            if getattr(self, name) % tensor_parallel:
                raise ParameterError(f"tensor_parallel must divide {name}={getattr(self, name)}, got {tensor_parallel}")
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ParameterError(
                f"tensor_parallel must divide kv_heads={self.kv_heads} or be a multiple of it, got {tensor_parallel}"
            )
        heads, kv_heads = self.heads // tensor_parallel, max(1, self.kv_heads // tensor_parallel)
        return replace(
            self, heads=heads, kv_heads=kv_heads, ffn=self.ffn // tensor_parallel, vocabulary=-(-self.vocabulary // tensor_parallel)
        )

    # --- Parts ---

    @property
    def _norm(self) -> int:
        return NORMS[self.norm] * self.hidden

    @property
    def _attention_weights(self) -> int:
        return self.hidden * 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def _attention_biases(self) -> int:
        own = {"qkv": (self.heads + 2 * self.kv_heads) * self.head_dim, "out": self.hidden}
        return sum(each for name, each in own.items() if name in self.biases)

    @property
    def encoder_layer_weights(self) -> int:
        """Weights of one encoder layer, also where the model has none."""
        return self._attention_weights + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def _layer_vectors(self) -> int:
        """Norms and biases of a layer, without those of cross-attention."""
        ffn = (2 if self.gated else 1) * self.ffn + self.hidden if "ffn" in self.biases else 0
        between = 2 * NORMS[self.norm] * self.head_dim if self.qk_norms else 0
        return self.norms * self._norm + self._attention_biases + ffn + between

    @property
    def _crossing_weights(self) -> int:
        """Weights of a decoder layer that compute keys and values of encoder positions."""
        return 2 * self.hidden * self.kv_heads * self.head_dim if self.encoder_layers else 0

    @property
    def _decoding_weights(self) -> int:
        return self.layer_weights - self._crossing_weights

    def _pass(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike, source: ArrayLike) -> tuple[Floats, ...]:
        w, past = checks.whole_array("width", width, 1), checks.whole_array("context", context, 0)
        return w, past, checks.whole_array("batch", batch, 1), self._source(source)

    def _source(self, source: ArrayLike) -> Floats:
        found = checks.whole_array("source", source, 0)
        if not self.encoder_layers and np.any(found > 0):
            raise ParameterError(f"source must be 0 without an encoder, got {found.max():g}")
        return found

    def _depth(self, layers: int | None) -> int:
        if layers is None:
            return self.layers
        checks.whole("layers", layers, 0, self.layers)
        return layers


# --- Published models ---


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int = 32_000, **more: Any) -> Shape:
    return Shape(layers, hidden, heads, kv_heads, hidden // heads, ffn, True, vocabulary, False, **more)


_BLOCK = ("qkv", "out", "ffn")


def _opt(layers: int, hidden: int, heads: int) -> Shape:
    # Two position rows are padding.
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, 50_272, True, norm="layer", biases=_BLOCK, positions=2048 + 2)


def _gpt2(layers: int, hidden: int, heads: int) -> Shape:
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, 50_257, True, norm="layer", biases=_BLOCK, positions=1024)


def _pythia(layers: int, hidden: int, heads: int, vocabulary: int) -> Shape:
    wide = hidden // heads, 4 * hidden
    return Shape(layers, hidden, heads, heads, *wide, False, vocabulary, False, norm="layer", biases=_BLOCK)


def _t5(layers: int, hidden: int, heads: int, head_dim: int, ffn: int) -> Shape:
    return Shape(layers, hidden, heads, heads, head_dim, ffn, False, 32_128, True, layers, buckets=32)


def _mt5(layers: int, hidden: int, heads: int, ffn: int) -> Shape:
    return Shape(layers, hidden, heads, heads, 64, ffn, True, 250_112, False, layers, buckets=32)


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
    "llama-3.2-1b": replace(_llama(16, 2048, 32, 8, 8192, 128_256), tied_head=True),
    "codellama-34b": _llama(48, 8192, 64, 8, 22_016),
    "vicuna-7b": _llama(32, 4096, 32, 32, 11_008),
    "vicuna-13b": _llama(40, 5120, 40, 40, 13_824),
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18_944, 152_064, biases=("qkv",)),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "pythia-160m": _pythia(12, 768, 12, 50_304),
    "pythia-1.4b": _pythia(24, 2048, 16, 50_304),
    "pythia-6.9b": _pythia(32, 4096, 32, 50_432),
    "phi-2": Shape(32, 2560, 32, 32, 80, 10_240, False, 51_200, False, norm="layer", norms=1, biases=BIASED),
}
"""Models that the papers use, and widely known ones, as published in the configuration of their checkpoint. `dtype` is that of
serving, 16 bits, also for models that were released in 32."""


def preset(name: str) -> Shape:
    """Return the shape of a published model.

    >>> preset("opt-1.3b").layers
    24
    """
    checks.one_of("shape", name, PRESETS)
    return PRESETS[name]


def named_shape(name: Any, dtype: str | None = None, *, key: str = "shape") -> Shape:
    """Return the shape of a published model, or of a `config.json` of the transformers library (its path or its folder).

    Error messages call the name `key`. The type of the numbers is `dtype`, else that of the file, else bfloat16.

    >>> named_shape("llama-2-13b", "float16").bytes_each, named_shape("llama-2-13b") == preset("llama-2-13b")
    (2, True)
    """
    if not isinstance(name, str) or (name not in PRESETS and not is_path(name)):
        raise ParameterError(f"{checks.unknown(key, name, PRESETS)}; or give the path of a config.json")
    made = PRESETS[name] if name in PRESETS else _of_file(name, bounded_files.stamp(_config_at(name)))
    return made if dtype is None else replace(made, dtype=dtype)


def is_path(name: str) -> bool:
    """Return True if a model's name is a path, which need not exist."""
    return name not in PRESETS and (name.endswith(".json") or "/" in name or os.sep in name)


def label(name: str) -> str:
    """Return a short name of a model given by name or by file; a `config.json` is named after its folder.

    >>> label("llama-2-13b"), label("models/mine/config.json"), label("mine.json")
    ('llama-2-13b', 'mine', 'mine')
    """
    path = _config_at(name)
    if name in PRESETS or not is_path(name):
        return name
    return path.absolute().parent.name or "model" if path.name == "config.json" else path.stem


def _config_at(name: str) -> Path:
    path = Path(name)
    return path if path.suffix == ".json" else path / "config.json"


@functools.lru_cache(maxsize=64)
def _of_file(name: str, _: object) -> Shape:
    path = _config_at(name)
    config = _read(path)
    try:
        check_config(config)
        return from_config(config, None if _says_dtype(config) else "bfloat16")
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


# --- Configurations of the transformers library ---

_COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_SIZES = {
    "llama": _COMMON,
    "mistral": (*_COMMON, "num_key_value_heads"),
    "qwen2": (*_COMMON, "num_key_value_heads"),
    "qwen3": (*_COMMON, "num_key_value_heads", "head_dim"),
    "opt": ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim", "vocab_size", "max_position_embeddings"),
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions"),
    "gpt_neox": _COMMON,
    "phi": _COMMON,
    "t5": ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "d_kv", "relative_attention_num_buckets"),
    "mt5": ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "d_kv", "relative_attention_num_buckets"),
}
"""Required keys by model type: layers, width, heads, feed-forward width and vocabulary, then keys whose default differs between
versions of the library."""
# Defaults of the library. That of mT5 has changed, so its files must state it.
_TIED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi"), False) | dict.fromkeys(("opt", "gpt2", "t5"), True)
_FFN = {"t5": "relu", "mt5": "gated-gelu"}
_OWN_HEAD_DIM = ("llama", "mistral", "qwen2", "qwen3")
# The only variant supported. Quantised weights have several types, and a pass does not read all experts.
_ALWAYS: dict[str, object] = dict.fromkeys(("quantization_config", "num_experts", "num_local_experts", "n_routed_experts"))
_ONLY: dict[str, dict[str, object]] = {
    "opt": {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    "gpt2": {"add_cross_attention": False},
    "t5": {"is_encoder_decoder": True},
    "mt5": {"is_encoder_decoder": True},
}


def from_config(source: str | Path | Mapping[str, Any], dtype: str | None = None) -> Shape:
    """Return the shape described by a `config.json` of the transformers library, given as a path or as its content.

    `_SIZES` lists the model types. Another type, a missing key and an unsupported variant are errors. The type of the numbers is
    `dtype`, else that of the file.

    >>> sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    >>> from_config({"model_type": "gpt2", **sizes}, dtype="bfloat16") == preset("gpt2")
    True
    """
    config = source if isinstance(source, Mapping) else _read(Path(source))
    check_config(config)
    kind = config.get("model_type")
    checks.one_of("model_type", kind, _SIZES)
    assert isinstance(kind, str)
    for key, value in (_ALWAYS | _ONLY.get(kind, {})).items():
        setting = config.get(key, value)
        if setting != value:
            raise ParameterError(
                f"{key} must be {'absent' if value is None else str(value).lower()} in a config of model_type {kind}: other"
                f" variants are not supported, got {checks.shown(setting)}"
            )
    if kind == "gpt2" and config.get("n_inner") is None:
        config = {**config, "n_inner": 4 * _whole(config, "n_embd")}
    layers, hidden, heads, ffn, vocabulary = (_whole(config, key) for key in _SIZES[kind][:5])
    more: dict[str, Any] = {"dtype": _dtype(config) if dtype is None else dtype}
    kv_heads, gated = heads, False
    tied = _flag(config, "tie_word_embeddings", _TIED.get(kind))
    if kind in ("t5", "mt5"):
        head_dim, gated = _whole(config, "d_kv"), str(config.get("feed_forward_proj", _FFN[kind])).startswith("gated-")
        more |= {"encoder_layers": layers, "buckets": _whole(config, "relative_attention_num_buckets")}
        layers = _whole(config, "num_decoder_layers", layers)
        return Shape(layers, hidden, heads, kv_heads, head_dim, ffn, gated, vocabulary, tied, **more)
    if kind in ("opt", "gpt2", "gpt_neox", "phi"):
        more |= {"norm": "layer", "biases": _BLOCK}
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
        case _:
            gated, kv_heads = True, _whole(config, "num_key_value_heads", heads if kind == "llama" else None)
            more |= {"biases": _llama_biases(config, kind), "qk_norms": kind == "qwen3"}
    head_dim = _head_dim(config, kind, hidden, heads)
    return Shape(layers, hidden, heads, kv_heads, head_dim, ffn, gated, vocabulary, tied, **more)



def _head_dim(config: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    if kind in _OWN_HEAD_DIM and (kind == "qwen3" or config.get("head_dim") is not None):
        return _whole(config, "head_dim")
    if hidden % heads:
        key, width = _SIZES[kind][2], _SIZES[kind][1]
        raise ParameterError(f"{key} must divide {width}={hidden}, got {heads}")
    return hidden // heads


def _llama_biases(config: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    if kind == "qwen2":
        return ("qkv",)
    attention = ("qkv", "out") if kind != "mistral" and _flag(config, "attention_bias", False) else ()
    return (*attention, "ffn") if kind == "llama" and _flag(config, "mlp_bias", False) else attention


MOST_LAYERS, MOST_WIDE = 1_000, 2**24
"""Largest layers, and largest other size, of a configuration. The largest published models have 126 and about a million."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
_WIDE = {key for keys in _SIZES.values() for key in keys} - {*_LAYERS} | {"num_key_value_heads", "head_dim", "d_kv", "num_experts"}
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


def _read(path: Path) -> Mapping[str, Any]:
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


def _says_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def _dtype(config: Mapping[str, Any]) -> str:
    value = _says_dtype(config)
    if value is None:
        raise ParameterError(f"dtype is missing in the config; give one of {', '.join(BYTES)}: from_config(source, dtype=...)")
    name = str(value).removeprefix("torch.")
    checks.one_of("dtype", name, BYTES)
    return name
