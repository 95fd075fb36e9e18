"""Shapes of transformers: parameters, operations, weights and KV cache of a forward pass, all computed without a clock.

*Weights* are the entries of matrices; *parameters* are all numbers of a model, including norms, biases, learned positions,
relative-position tables, embedding and encoder. Operations and memory traffic count weights, keys and values, and embedding rows;
norms, biases and activations are left out (well below one percent). The projection onto the vocabulary (the head) is not a layer.
A multiplication and an addition are two operations.

Layers may be of several kinds: sparse experts after some dense layers, sliding windows in some layers (`layer_kinds`). A quantity
of "a layer" is then the mean over the layers, and a part of the depth is assumed to have each kind in proportion.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863, Table 2.
[Shoeybi2019] M. Shoeybi et al. Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism.
arXiv:1909.08053.
[Touvron2023] H. Touvron et al. Llama 2: Open Foundation and Fine-Tuned Chat Models. arXiv:2307.09288.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.architectures.layer_parts import (
    BITS,
    FORMATS,
    DraftInput,
    Experts,
    LatentAttention,
    MatrixProduct,
    QuantisedWeights,
    SlidingWindow,
    experts_read,
)
from model.base import bounded_files, checks, table_records
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
        Type of activations, and of weights, keys and values unless these have their own: bfloat16, float16, float32, float8, int8.
    norm, norms
        `rms` (a factor) or `layer` (a factor and a shift), and norms per layer, without that of cross-attention.
    biases
        Matrices with a bias: some of `qkv`, `out`, `ffn` and `head`.
    positions, buckets
        Rows of the table of learned positions; rows of the table of relative positions, one table in the decoder and one in the
        encoder.
    qk_norms
        True if queries and keys have a norm each, of the width of a head.
    sinks
        True if each attention head has a learned sink.
    experts
        Sparse experts, whose inner width is `ffn`; None if all feed-forward layers are dense.
    latent
        Latent attention (MLA), with values of width `head_dim`; None if keys and values of `kv_heads` heads are cached.
    window
        Sliding window of some or all layers; None if all positions are attended to.
    weights
        Type of quantised weights; None if all weights are of type `dtype`.
    cache_dtype
        Type of the cached keys and values; None for `dtype`.
    draft
        Inputs and shared parts of a draft head (`model.architectures.draft_heads`); None for a whole model.
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
    sinks: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: SlidingWindow | None = None
    weights: QuantisedWeights | None = None
    cache_dtype: str | None = None
    draft: DraftInput | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            checks.whole(name, getattr(self, name), 1)
        for name in ("encoder_layers", "norms", "positions", "buckets"):
            checks.whole(name, getattr(self, name), 0)
        for name in ("gated", "tied_head", "qk_norms", "sinks"):
            checks.flag(name, getattr(self, name))
        checks.one_of("dtype", self.dtype, BYTES)
        checks.one_of("norm", self.norm, NORMS)
        if not isinstance(self.biases, tuple):
            raise ParameterError(f"biases must be a tuple of some of {', '.join(BIASED)}, got {checks.shown(self.biases)}")
        for name in self.biases:
            checks.one_of("bias", name, BIASED)
        if self.heads % self.kv_heads:
            raise ParameterError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        if self.cache_dtype is not None:
            checks.one_of("cache_dtype", self.cache_dtype, BYTES)
        self._check_parts()

    def _check_parts(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind | None):
                raise ParameterError(f"{name} must be none or {kind.__name__}(...), got {checks.shown(getattr(self, name))}")
        dense = 0 if self.experts is None else self.experts.dense_layers
        windowed = 0 if self.window is None else self.window.layers
        for name, count in (("experts.dense_layers", dense), ("window.layers", windowed)):
            if count > self.layers:
                raise ParameterError(f"{name} must be at most layers={self.layers}, got {count}")
        if dense and 0 < windowed < self.layers:
            raise ParameterError(f"window.layers must be layers={self.layers} after dense layers of experts, got {windowed}")
        if self.encoder_layers and any(getattr(self, name) is not None for name in ("experts", "latent", "window", "draft")):
            raise ParameterError(f"encoder_layers must be 0 with experts, latent attention or a window, got {self.encoder_layers}")

    # --- Kinds of layers ---

    @property
    def kinds(self) -> tuple[tuple[int, Shape], ...]:
        """Shapes whose layers are all alike, of which this one consists, with the number of layers of each.

        >>> [(count, kind.experts is None) for count, kind in preset("deepseek-v3").kinds]
        [(3, True), (58, False)]
        """
        return layer_kinds(self)

    def _sum(self, quantity: Callable[[Shape], int]) -> int:
        """Sum of a quantity of one layer over the layers."""
        return sum(count * quantity(kind) for count, kind in self.kinds)

    def _mean(self, quantity: Callable[[Shape], Any]) -> Any:
        """Mean of a quantity of one layer over the layers; exactly the quantity if they are alike."""
        if len(self.kinds) == 1:
            return quantity(self.kinds[0][1])
        total = sum(count * quantity(kind) for count, kind in self.kinds)
        return total // self.layers if isinstance(total, int) and total % self.layers == 0 else total / self.layers

    # --- Parameters and weights ---

    @property
    def bytes_each(self) -> int:
        """Bytes per number: of activations, and of weights that are not quantised [bytes]."""
        return BYTES[self.dtype]

    @property
    def cache_bytes_each(self) -> int:
        """Bytes per cached number [bytes]."""
        return BYTES[self.dtype if self.cache_dtype is None else self.cache_dtype]

    @property
    def parameters(self) -> int:
        """Parameters of the model.

        >>> preset("llama-2-13b").parameters, preset("t5-large").parameters
        (13015864320, 737668096)
        """
        last_norm = self._norm if self.draft is None or self.draft.last_norm else 0
        decoder = self._sum(_parameters_of_layer) + last_norm + self.buckets * self.heads
        copies = 1 if self.draft is None else self.draft.copies
        return copies * (decoder + self.encoder_parameters + self.embedding_parameters + self.head_parameters)

    @property
    def active_parameters(self) -> int:
        """Parameters that a pass over one token uses: without the experts that it does not select, and an embedding of its own.

        >>> [round(preset(name).active_parameters / 1e9, 2) for name in ("gpt-oss-20b", "gpt-oss-120b")]  # as its model card says
        [3.61, 5.13]
        """
        unused = self._sum(_unused_of_layer)
        table = (self.vocabulary + self.positions) * self.hidden if self.draft is None else 0
        return self.parameters - unused - (table if not self.tied_head else 0)

    @property
    def weight_bytes(self) -> float:
        """Memory that the parameters take, quantised weights in their own type [bytes].

        >>> made = replace(preset("llama-3.1-70b"), weights=FORMATS["int4"])
        >>> round(made.weight_bytes / 1e9, 2), round(preset("llama-3.1-70b").weight_bytes / 1e9, 2)
        (39.5, 141.11)
        """
        if self.weights is None:
            return self.parameters * self.bytes_each
        quantised = self._sum(lambda kind: sum(each.weights for each in kind.products if kind.quantises(each)))
        if not self.weights.experts_only:
            quantised += self._sum(lambda kind: kind._crossing_weights) + self.encoder_layers * self.encoder_layer_weights
        copies = 1 if self.draft is None else self.draft.copies
        return self.parameters * self.bytes_each - copies * quantised * (self.bytes_each - self.weights.bytes_each)

    @property
    def layer_parameters(self) -> float:
        """Parameters of one decoder layer, without the table of relative positions."""
        return self._mean(_parameters_of_layer)  # type: ignore[no-any-return]

    @property
    def encoder_parameters(self) -> int:
        """Parameters of the encoder without its embedding, which it shares with the decoder; 0 without an encoder."""
        if not self.encoder_layers:
            return 0
        return self.encoder_layers * (self.encoder_layer_weights + self._layer_vectors) + self._norm + self.buckets * self.heads

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens, and of learned positions; 0 in a draft head, which shares the target's."""
        return (self.vocabulary + self.positions) * self.hidden if self.draft is None else 0

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not already in the embedding: a tied head adds at most its bias.

        >>> preset("gpt2").head_parameters, preset("llama-2-7b").head_parameters, preset("phi-2").head_parameters - 2560 * 51200
        (0, 131072000, 51200)
        """
        shared = self.tied_head if self.draft is None else self.draft.shared_head
        return (0 if shared else self.head_weights) + (self.vocabulary if "head" in self.biases else 0)

    @property
    def layer_weights(self) -> float:
        """Weights of one decoder layer, those of all experts included.

        >>> [preset(name).layers * preset(name).layer_weights for name in ("t5-large", "t5-small")]
        [402653184, 25165824]
        """
        return self._mean(_weights_of_layer)  # type: ignore[no-any-return]

    @property
    def active_layer_weights(self) -> float:
        """Weights of one decoder layer that one token uses: without the experts that it does not select."""
        return self._mean(lambda kind: _weights_of_layer(kind, active=True))  # type: ignore[no-any-return]

    @property
    def cache_weights(self) -> int:
        """Weights of one layer that compute the cached keys and values of a position."""
        if self.latent is not None:
            return self.hidden * (self.latent.rank + self.latent.rope)
        wide = 1 if self.draft is None else self.draft.attention_states
        return wide * self.hidden * 2 * self.kv_heads * self.head_dim if self.attends else 0

    @property
    def attends(self) -> bool:
        """True if layers have attention; those of Medusa heads have none."""
        return self.draft is None or self.draft.kind != "medusa"

    @property
    def products(self) -> tuple[MatrixProduct, ...]:
        """Matrix products of a decoder layer in a pass, fused as engines fuse them; of shapes whose layers are all alike.

        Cached encoder positions need no product. With latent attention they are those of the absorbed form.
        """
        if len(self.kinds) > 1:
            raise ParameterError("layers are of several kinds: each of `kinds` has its own products")
        return _products_of_layer(self)

    def quantises(self, product: MatrixProduct) -> bool:
        """Return True if the weights of this product are quantised."""
        if self.weights is None or product.part == "router":
            return False
        return product.part == "experts" or not self.weights.experts_only

    def product_bytes_each(self, product: MatrixProduct) -> float:
        """Bytes per weight of this product [bytes]."""
        return self.weights.bytes_each if self.weights is not None and self.quantises(product) else self.bytes_each

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Matrix products of a decoder layer, fused as engines fuse them: (inputs, outputs) of each.

        Query, key and value in one product; attention output; queries and output of cross-attention; feed-forward, with gate and
        up projection in one product. Layers with sparse experts or latent attention have no such list (`products`).

        >>> preset("llama-2-7b").matrices
        ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
        """
        if self.experts is not None or self.latent is not None:
            raise ParameterError(f"{self.special} has products of several matrices, which no table of products holds")
        return tuple((each.inputs, each.outputs) for each in self.products)

    @property
    def special(self) -> str:
        """Parts of the layers that a dense layer lacks, as text; empty for dense layers.

        >>> preset("deepseek-v3").special, preset("gpt-oss-20b").special, preset("llama-3.1-8b").special
        ('sparse experts and latent attention', 'sparse experts and a sliding window', '')
        """
        parts = {"sparse experts": self.experts, "latent attention": self.latent, "a sliding window": self.window}
        return " and ".join(name for name, part in parts.items() if part is not None)

    @property
    def head_weights(self) -> int:
        """Weights of the head, tied to the embedding or not."""
        return self.hidden * self.vocabulary

    # --- Exact whole numbers, for closed forms of whole decodings ---

    def cache_bytes(self, layers: int | None = None, *, bytes_each: int | None = None) -> int:
        """KV cache of one position in `layers` layers (default: all) [bytes]; a number has `bytes_each` bytes (default: by dtype).

        A position outside a sliding window is not kept: `cache_bytes_at` counts those that are.

        >>> preset("llama-2-13b").cache_bytes(20) / 1e6  # sent by a sub-process of PPD at half depth
        0.4096
        """
        depth = self._depth(layers)
        each = self.cache_bytes_each if bytes_each is None else bytes_each
        checks.whole("bytes_each", each, 1)
        return depth * self.cached_numbers * each

    @property
    def cached_numbers(self) -> int:
        """Numbers that one layer caches per position: of keys and values, or of the two vectors of latent attention.

        >>> preset("deepseek-v3").cached_numbers, preset("llama-3.1-70b").cached_numbers
        (576, 2048)
        """
        if self.latent is not None:
            return self.latent.rank + self.latent.rope
        return 2 * self.kv_heads * self.head_dim if self.attends else 0

    @property
    def attended_flops(self) -> int:
        """Operations of the attention of one token over one position in one layer: scores and weighted sum of all heads."""
        if self.latent is not None:
            return 2 * self.heads * (2 * self.latent.rank + self.latent.rope)
        return 4 * self.heads * self.head_dim if self.attends else 0

    @property
    def prompt_attended_flops(self) -> int:
        """Operations of attention as `attended_flops`, where no position is cached: keys and values of all heads are computed.

        Only latent attention differs: 4 times fewer in DeepSeek-V3, but from the cache each position would be projected again.
        """
        if self.latent is not None:
            return 2 * self.heads * (self.latent.nope + self.latent.rope + self.head_dim)
        return self.attended_flops

    def cache_bytes_at(self, context: int) -> int:
        """KV cache of a sequence of `context` positions in all layers; those with a sliding window keep no more than it [bytes].

        >>> gemma = preset("gemma-3-27b")
        >>> round(gemma.cache_bytes_at(32_768) / (gemma.cache_bytes() * 32_768), 2)
        0.19
        """
        checks.whole("context", context, 0)
        row = self.cache_bytes(1)
        return self._sum(lambda kind: row * (context if kind.window is None else min(context, kind.window.size)))

    def operations(self, width: int, context: int, layers: int | None = None, *, heads: int = 0) -> int:
        """Operations of a pass over `width` positions after `context` cached ones, through `layers` layers (default: all).

        2 per weight and position, plus 4 heads head_dim per position and position that it attends to, itself included. `heads`
        positions are projected onto the vocabulary. Attention over encoder positions is left out. The weights that compute the
        encoder's keys and values count at every position, although they are used once per sequence (`layer_flops` omits them).
        Each token uses its own experts. A part of layers of several kinds has each in proportion, rounded down.

        >>> preset("llama-2-13b").operations(1, 0) / (2 * 40 * preset("llama-2-13b").layer_weights) < 1.0001
        True
        """
        depth = self._depth(layers)
        checks.whole("width", width, 1)
        checks.whole("context", context, 0)
        checks.whole("heads", heads, 0, width, "width")

        def through(kind: Shape) -> int:
            attended = _attended(kind, width, context)
            return 2 * width * int(kind.active_layer_weights) + self.attended_flops * attended

        if len(self.kinds) == 1:
            return depth * through(self) + 2 * heads * self.head_weights
        return depth * self._sum(through) // self.layers + 2 * heads * self.head_weights

    # --- One layer in a pass; arguments are numbers or arrays that broadcast ---

    def layer_flops(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, source: ArrayLike = 0) -> Floats:
        """Operations of one decoder layer in a pass over `width` new tokens per sequence, in a batch of `batch` sequences.

        A new token attends to `context` cached positions, to the new tokens before it and to itself, and to `source` encoder
        positions, whose keys and values are cached. Arguments are numbers or arrays that broadcast.

        >>> print(preset("llama-2-7b").layer_flops([1, 5], 1000) / 1e9)
        [0.42 2.11]
        """
        w, past, sequences, across = self._pass(width, context, batch, source)

        def of(kind: Shape) -> Floats:
            attended = windowed(kind, w, past) if kind.window is not None else w * past + w * (w + 1) / 2 + w * across
            return np.asarray(sequences * (2 * w * kind._decoding_weights + kind.attended_flops * attended))

        return np.asarray(self._mean(of))

    @property
    def layer_weight_bytes(self) -> float:
        """Weights of one decoder layer that a pass reads at most, once for the whole batch [bytes].

        The weights that compute the encoder's keys and values are not read again: 2 of 16 matrices in T5. All experts count;
        `layer_read_bytes` counts those that a pass is expected to read.

        >>> preset("llama-2-7b").layer_weight_bytes / 1e6
        404.75
        >>> preset("t5-large").layer_weight_bytes / (2 * preset("t5-large").layer_weights)
        0.875
        """
        if self.weights is None and self.experts is None:
            return self._mean(lambda kind: kind._decoding_weights * kind.bytes_each)  # type: ignore[no-any-return]
        found: float = self._mean(lambda kind: sum(each.weights * kind.product_bytes_each(each) for each in kind.products))
        return found

    def layer_read_bytes(self, width: ArrayLike, batch: ArrayLike = 1) -> Floats:
        """Weights of one decoder layer that a pass over `width` tokens of each of `batch` sequences reads, in expectation [bytes].

        Sparse experts that no token selects are not read. Arguments are numbers or arrays that broadcast.

        >>> made = preset("qwen3-235b-a22b")
        >>> print(made.layer_read_bytes(1, [1, 8, 64, 512]) / made.layer_weight_bytes)
        [0.09 0.43 0.98 1.  ]
        """
        w, sequences = checks.whole_array("width", width, 1), checks.whole_array("batch", batch, 1)
        experts = self.experts
        return self.expected_read_bytes(w * sequences if experts is None else experts.independent(w, sequences))

    def expected_read_bytes(self, independent: ArrayLike, *, bytes_each: float | None = None) -> Floats:
        """Weights of one decoder layer that a pass over `independent` independent tokens is expected to read [bytes].

        The number of tokens need not be whole. A weight has `bytes_each` bytes (default: its own type's).
        """
        apart = np.asarray(independent, dtype=np.float64)

        def of(kind: Shape) -> Floats:
            total = np.zeros(apart.shape)
            for each in kind.products:
                found = experts_read(each.blocks, each.used, apart) / each.blocks if each.sparse else 1.0
                total = total + each.weights * (kind.product_bytes_each(each) if bytes_each is None else bytes_each) * found
            return total

        return np.asarray(self._mean(of))

    def layer_kv_bytes(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, source: ArrayLike = 0) -> Floats:
        """Keys and values that one decoder layer reads and writes in such a pass [bytes].

        Each position of a sequence, cached or new, is read once for all its new tokens; the new ones are also written.

        >>> float(preset("llama-2-7b").layer_kv_bytes(1, 1000)) / 1e6  # 1001 read and one written, 16 kB each
        16.42
        """
        w, past, sequences, across = self._pass(width, context, batch, source)

        def of(kind: Shape) -> Floats:
            return np.asarray(sequences * (kept(kind, past) + 2 * w + across) * self.cache_bytes(1))

        return np.asarray(self._mean(of))

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
        on every device. With more devices than `kv_heads`, each device holds one KV head, so heads are replicated. Each device has
        a slice of every expert (tensor parallelism, not expert parallelism) and the whole router. Of latent attention it has its
        heads, and all of the projections to the cached vectors and of the cache.

        >>> part = preset("llama-2-70b").shard(16)
        >>> part.heads, part.kv_heads, part.ffn, part.hidden
        (4, 1, 1792, 8192)
        """
        checks.whole("tensor_parallel", tensor_parallel, 1)
        divided: dict[str, int] = {"heads": self.heads, "ffn": self.ffn}
        if self.experts is not None:
            divided |= {f"experts.{name}": getattr(self.experts, name) for name in ("shared", "dense_ffn")}
        for name, size in divided.items():
            if size % tensor_parallel:
                raise ParameterError(f"tensor_parallel must divide {name}={size}, got {tensor_parallel}")
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ParameterError(
                f"tensor_parallel must divide kv_heads={self.kv_heads} or be a multiple of it, got {tensor_parallel}"
            )
        heads, kv_heads = self.heads // tensor_parallel, max(1, self.kv_heads // tensor_parallel)
        experts = None if self.experts is None else replace(
            self.experts, shared=self.experts.shared // tensor_parallel, dense_ffn=self.experts.dense_ffn // tensor_parallel
        )
        words, ffn = -(-self.vocabulary // tensor_parallel), self.ffn // tensor_parallel
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=ffn, vocabulary=words, experts=experts)

    # --- Parts ---

    @property
    def _norm(self) -> int:
        return NORMS[self.norm] * self.hidden

    @property
    def _attention_weights(self) -> int:
        return self.hidden * 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def _attention_biases(self) -> int:
        own = {"qkv": (self.heads + 2 * self.kv_heads) * self.head_dim, "out": self.hidden} if self.attends else {}
        return sum(each for name, each in own.items() if name in self.biases)

    @property
    def encoder_layer_weights(self) -> int:
        """Weights of one encoder layer, also where the model has none."""
        return self._attention_weights + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_norms(self) -> int:
        """Norms of a layer, without that of cross-attention."""
        return self.norms if self.draft is None else self.norms + self.draft.norms

    @property
    def _layer_vectors(self) -> int:
        """Norms, biases and sinks of a layer, without those of cross-attention."""
        ffn = (2 if self.gated else 1) * self.ffn + self.hidden if "ffn" in self.biases else 0
        between = 2 * NORMS[self.norm] * self.head_dim if self.qk_norms else 0
        if self.latent is not None:
            between += NORMS[self.norm] * (self.latent.query_rank + self.latent.rank)
        router = 0
        if self.experts is not None:
            ffn, router = ffn * self.experts.count, self.experts.count if self.experts.biased_router else 0
        fused = self.hidden if self.draft is not None and self.draft.biased else 0
        sinks = self.heads if self.sinks else 0
        return self.layer_norms * self._norm + self._attention_biases + ffn + between + router + fused + sinks

    @property
    def _crossing_weights(self) -> int:
        """Weights of a decoder layer that compute keys and values of encoder positions."""
        return 2 * self.hidden * self.kv_heads * self.head_dim if self.encoder_layers else 0

    @property
    def _decoding_weights(self) -> int:
        return int(self.active_layer_weights) - self._crossing_weights

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


_PARTS: dict[str, type] = {
    "experts": Experts, "latent": LatentAttention, "window": SlidingWindow, "weights": QuantisedWeights, "draft": DraftInput,
}  # fmt: skip
"""Records of a shape's parts, by its field."""


def described(shape: Shape) -> dict[str, Any]:
    """Return the fields of a shape as a table for files; parts that it lacks are left out.

    >>> Shape(**restored(described(preset("deepseek-v3")))) == preset("deepseek-v3")
    True
    """
    table = asdict(shape)
    return {name: value for name, value in table.items() if value is not None and not (name == "sinks" and not value)}


def restored(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a shape from a table of a file: tables become records of its parts."""
    return {name: _part(name, value) if isinstance(value, Mapping) else value for name, value in table.items()}


def _part(name: str, table: Mapping[str, Any]) -> Any:
    if name not in _PARTS:
        raise ParameterError(f"{name} must be a number, a word or a list of words, got a table")
    return table_records.build(_PARTS[name], table, name)


# --- One layer ---


@functools.lru_cache(maxsize=256)
def layer_kinds(shape: Shape) -> tuple[tuple[int, Shape], ...]:
    """Return the shapes whose layers are all alike, of which a shape consists, with the number of layers of each."""
    experts, window, draft = shape.experts, shape.window, shape.draft
    if experts is not None and experts.dense_layers:
        dense, sparse = experts.dense_layers, shape.layers - experts.dense_layers
        bare = replace(experts, dense_layers=0, dense_ffn=0)

        def window_of(layers: int) -> SlidingWindow | None:
            return None if window is None else replace(window, layers=layers)

        first = replace(shape, layers=dense, experts=None, ffn=experts.dense_ffn, window=window_of(dense))
        rest = ((sparse, replace(shape, layers=sparse, experts=bare, window=window_of(sparse))),) if sparse else ()
        return ((dense, first), *rest)
    if window is not None and window.layers < shape.layers:
        full = shape.layers - window.layers
        return ((window.layers, replace(shape, layers=window.layers)), (full, replace(shape, layers=full, window=None)))
    if draft is not None and shape.layers > 1:
        # Only the first layer has further inputs.
        return ((1, replace(shape, layers=1)), (shape.layers - 1, replace(shape, layers=shape.layers - 1, draft=None)))
    return ((shape.layers, shape),)


def _parameters_of_layer(kind: Shape) -> int:
    across = kind._attention_biases + kind._norm if kind.encoder_layers else 0
    return _weights_of_layer(kind) + kind._layer_vectors + across


def _unused_of_layer(kind: Shape) -> int:
    """Parameters of the experts that a token does not select."""
    if kind.experts is None:
        return 0
    biases = (2 if kind.gated else 1) * kind.ffn + kind.hidden if "ffn" in kind.biases else 0
    each = ((2 if kind.gated else 1) + 1) * kind.hidden * kind.ffn + biases
    return (kind.experts.count - kind.experts.active) * each


def _weights_of_layer(kind: Shape, *, active: bool = False) -> int:
    if kind.experts is None and kind.latent is None and kind.draft is None:
        return kind.encoder_layer_weights + (kind._attention_weights if kind.encoder_layers else 0)
    return sum(each.used_weights if active else each.weights for each in kind.products)


def _products_of_layer(kind: Shape) -> tuple[MatrixProduct, ...]:
    hidden, inner, rows = kind.hidden, kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
    states, wide = (0, 1) if kind.draft is None else (kind.draft.states, kind.draft.attention_states)
    fused = (MatrixProduct(states * hidden, hidden),) if states else ()
    if not kind.attends:
        return (*fused, MatrixProduct(hidden, hidden))
    attention: tuple[MatrixProduct, ...]
    if kind.latent is None:
        attention = (MatrixProduct(wide * hidden, inner + 2 * rows), MatrixProduct(inner, hidden))
    else:
        attention = _latent_products(kind, kind.latent)
    across = (MatrixProduct(hidden, inner), MatrixProduct(inner, hidden)) if kind.encoder_layers else ()
    gates, experts = 2 if kind.gated else 1, kind.experts
    if experts is None:
        return (*fused, *attention, *across, MatrixProduct(hidden, gates * kind.ffn), MatrixProduct(kind.ffn, hidden))
    common = (MatrixProduct(hidden, gates * experts.shared), MatrixProduct(experts.shared, hidden)) if experts.shared else ()
    return (
        *fused, *attention, MatrixProduct(hidden, experts.count, part="router"), *common,
        MatrixProduct(hidden, gates * kind.ffn, experts.count, experts.active, "experts"),
        MatrixProduct(kind.ffn, hidden, experts.count, experts.active, "experts"),
    )  # fmt: skip


def _latent_products(kind: Shape, latent: LatentAttention) -> tuple[MatrixProduct, ...]:
    """Products of latent attention in the absorbed form: the keys' projection on queries, the values' on outputs, by head."""
    hidden, heads = kind.hidden, kind.heads
    queries, cached = heads * (latent.nope + latent.rope), latent.rank + latent.rope
    first: tuple[MatrixProduct, ...] = (MatrixProduct(hidden, queries + cached),)
    if latent.query_rank:
        first = MatrixProduct(hidden, latent.query_rank + cached), MatrixProduct(latent.query_rank, queries)
    by_head = MatrixProduct(latent.nope, latent.rank, heads, heads), MatrixProduct(latent.rank, kind.head_dim, heads, heads)
    return (*first, *by_head, MatrixProduct(heads * kind.head_dim, hidden))


def kept(kind: Shape, context: ArrayLike) -> Floats:
    """Cached positions that new tokens read in a layer: at most a window without the first new token."""
    past = np.asarray(context, dtype=np.float64)
    return past if kind.window is None else np.minimum(past, kind.window.size - 1)


def windowed(kind: Shape, width: ArrayLike, context: ArrayLike) -> Floats:
    """Positions that `width` new tokens after `context` cached ones attend to in a layer with a sliding window, in total."""
    assert kind.window is not None
    w, past, size = np.asarray(width, dtype=np.float64), np.asarray(context, dtype=np.float64), kind.window.size
    growing = np.clip(size - past, 0, w)  # tokens that still see every position
    return np.asarray(growing * past + growing * (growing + 1) / 2 + (w - growing) * size)


def _attended(kind: Shape, width: int, context: int) -> int:
    if kind.window is None:
        return width * context + width * (width + 1) // 2
    return int(windowed(kind, width, context))


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
        layers, 2880, 64, 8, 64, 2880, True, 201_088, False, biases=_BLOCK, sinks=True,
        experts=Experts(experts, 4, biased_router=True), window=SlidingWindow(128, layers // 2),
        weights=replace(FORMATS["mxfp4"], experts_only=True),
    )  # fmt: skip


_DEEPSEEK_V3 = Shape(
    61, 7168, 128, 128, 128, 2048, True, 129_280, False, experts=Experts(256, 8, 2048, 3, 18_432),
    latent=LatentAttention(1536, 512, 64, 128),
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
serving, 16 bits, also for models that were released in 32 or, DeepSeek, in 8; the experts of gpt-oss are in mxfp4, as released.
Gemma 3 is its text part, without the vision encoder; DeepSeek without its module for further tokens (`mtp:deepseek-v3`)."""


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

    Error messages call the name `key`. The type of the numbers is `dtype`, else that of the file, else bfloat16.

    >>> named_shape("llama-2-13b", "float16").bytes_each, named_shape("llama-2-13b") == preset("llama-2-13b")
    (2, True)
    """
    from model.architectures import draft_heads

    if isinstance(name, str) and draft_heads.is_head(name):
        head = draft_heads.head(name, functools.partial(named_shape, key="target shape"))
        return head if dtype is None else replace(head, dtype=dtype)
    if not isinstance(name, str) or (name not in PRESETS and not is_path(name)):
        raise ParameterError(f"{checks.unknown(key, name, PRESETS)}; or give the path of a config.json")
    made = PRESETS[name] if name in PRESETS else _of_file(name, bounded_files.stamp(_config_at(name)))
    return made if dtype is None else replace(made, dtype=dtype)


def is_path(name: str) -> bool:
    """Return True if a model's name is a path, which need not exist."""
    from model.architectures import draft_heads

    if draft_heads.is_head(name):
        return is_path(draft_heads.parts(name)[1])
    return name not in PRESETS and (name.endswith(".json") or "/" in name or os.sep in name)


def label(name: str) -> str:
    """Return a short name of a model given by name or by file; a `config.json` is named after its folder.

    >>> label("llama-2-13b"), label("models/mine/config.json"), label("mine.json"), label("eagle3:llama-3.1-8b")
    ('llama-2-13b', 'mine', 'mine', 'eagle3-llama-3.1-8b')
    """
    from model.architectures import draft_heads

    if draft_heads.is_head(name):
        kind, target, vocabulary = draft_heads.parts(name)
        return "-".join([kind, label(target), *([] if vocabulary is None else [str(vocabulary)])])
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
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config = _text_part(config)
    kind = config.get("model_type")
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
            more |= {"biases": _BLOCK, "sinks": True}
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
    """Configuration of the text part of Gemma 3; its keys in the whole's configuration hold where it leaves them out."""
    whole = {key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if config.get(key) is not None}
    return whole | {key: value for key, value in config["text_config"].items() if value is not None or key not in whole}


def _window(config: Mapping[str, Any], kind: str, layers: int) -> SlidingWindow | None:
    """Sliding window: of the layers that `layer_types` names, else of those that the type of model has by default."""
    if kind not in _WITH_WINDOW or config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        return None  # off by default
    size, types = _whole(config, "sliding_window"), config.get("layer_types")
    if isinstance(types, list):
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
            checks.whole("quantization_config.group_size", group, -1)
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
    checks.whole(f"{where}: group_size", 0 if size is None else size, -1)
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
    "num_key_value_heads", "head_dim", "d_kv", "num_experts", "q_lora_rank",
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
