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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.architectures.layer_parts import (
    DraftInput,
    Experts,
    LatentAttention,
    MatrixProduct,
    QuantisedWeights,
    SlidingWindow,
    experts_read,
)
from model.base import checks, table_records
from model.base.checks import ParameterError

Floats = NDArray[np.float64]

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1, "int8": 1}
"""Bytes per number, by type."""
NORMS = {"rms": 1, "layer": 2}
"""Vectors per norm: a factor, or a factor and a shift."""
BIASED = ("qkv", "out", "ffn", "head")
"""Matrices that may have a bias: queries, keys and values; the output of attention; feed-forward; the head."""
BLOCK = ("qkv", "out", "ffn")
"""Matrices of a layer that have a bias in models with biases."""


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

        >>> from model.architectures.published_shapes import preset
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

        >>> from model.architectures.published_shapes import preset
        >>> preset("llama-2-13b").parameters, preset("t5-large").parameters
        (13015864320, 737668096)
        """
        last_norm = self._norm if self.draft is None or self.draft.last_norm else 0
        decoder = self._sum(_parameters_of_layer) + last_norm + self.buckets * self.heads
        return self.copies * (decoder + self.encoder_parameters + self.embedding_parameters + self.head_parameters)

    @property
    def active_parameters(self) -> int:
        """Parameters that a pass over one token uses: without the experts that it does not select, and an embedding of its own.

        >>> from model.architectures.published_shapes import preset
        >>> [round(preset(name).active_parameters / 1e9, 2) for name in ("gpt-oss-20b", "gpt-oss-120b")]  # as its model card says
        [3.61, 5.13]
        """
        unused = self._sum(_unused_of_layer)
        table = (self.vocabulary + self.positions) * self.hidden if self.draft is None else 0
        return self.parameters - unused - (table if not self.tied_head else 0)

    @property
    def weight_bytes(self) -> float:
        """Memory that the parameters take, quantised weights in their own type [bytes].

        >>> from model.architectures.layer_parts import FORMATS
        >>> from model.architectures.published_shapes import preset
        >>> made = replace(preset("llama-3.1-70b"), weights=FORMATS["int4"])
        >>> round(made.weight_bytes / 1e9, 2), round(preset("llama-3.1-70b").weight_bytes / 1e9, 2)
        (39.5, 141.11)
        """
        if self.weights is None:
            return self.parameters * self.bytes_each
        quantised = self._sum(lambda kind: sum(each.weights for each in kind.products if kind.quantises(each)))
        if not self.weights.experts_only:
            quantised += self._sum(lambda kind: kind._crossing_weights) + self.encoder_layers * self.encoder_layer_weights
        return self.parameters * self.bytes_each - self.copies * quantised * (self.bytes_each - self.weights.bytes_each)

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

        >>> from model.architectures.published_shapes import preset
        >>> preset("gpt2").head_parameters, preset("llama-2-7b").head_parameters, preset("phi-2").head_parameters - 2560 * 51200
        (0, 131072000, 51200)
        """
        shared = self.tied_head if self.draft is None else self.draft.shared_head
        return (0 if shared else self.head_weights) + (self.vocabulary if "head" in self.biases else 0)

    @property
    def layer_weights(self) -> float:
        """Weights of one decoder layer, those of all experts included.

        >>> from model.architectures.published_shapes import preset
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
    def copies(self) -> int:
        """Copies of the whole that a pass reads and that memory holds: Medusa's heads, each of which drafts one position."""
        return 1 if self.draft is None else self.draft.copies

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
        """Return True if the weights of this product are quantised.

        Routers are not, nor the product that joins token and state of an MTP module: checkpoints and engines keep both in 16 bits
        (vllm-project/vllm @03356f8c, vllm/model_executor/models/deepseek_mtp.py).
        """
        if self.weights is None or product.part in ("router", "joined"):
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

        >>> from model.architectures.published_shapes import preset
        >>> preset("llama-2-7b").matrices
        ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
        """
        if self.experts is not None or self.latent is not None:
            raise ParameterError(f"{self.special} has products of several matrices, which no table of products holds")
        return tuple((each.inputs, each.outputs) for each in self.products)

    @property
    def special(self) -> str:
        """Parts of the layers that a dense layer lacks, as text; empty for dense layers.

        >>> from model.architectures.published_shapes import preset
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

        >>> from model.architectures.published_shapes import preset
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

        >>> from model.architectures.published_shapes import preset
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

    def cache_bytes_at(self, context: Any) -> Any:
        """KV cache of a sequence of `context` positions in all layers; those with a sliding window keep no more than it [bytes].

        `context` is a whole number, or an array of whole numbers; the result is like it.

        >>> from model.architectures.published_shapes import preset
        >>> gemma = preset("gemma-3-27b")
        >>> round(gemma.cache_bytes_at(32_768) / (gemma.cache_bytes() * 32_768), 2)
        0.19
        """
        checks.whole("context", np.min(context, initial=0) if np.ndim(context) else context, 0)
        row = self.cache_bytes(1)

        def held(kind: Shape) -> Any:
            if kind.window is None:
                return context
            return np.minimum(context, kind.window.size) if np.ndim(context) else min(context, kind.window.size)

        return self._sum(lambda kind: row * held(kind))

    def operations(self, width: int, context: Any, layers: int | None = None, *, heads: int = 0) -> Any:
        """Operations of a pass over `width` positions after `context` cached ones, through `layers` layers (default: all).

        `context` is a whole number, or an array of whole numbers; the result is like it.

        2 per weight and position, plus 4 heads head_dim per position and position that it attends to, itself included. `heads`
        positions are projected onto the vocabulary. Attention over encoder positions is left out. The weights that compute the
        encoder's keys and values count at every position, although they are used once per sequence (`layer_flops` omits them).
        Each token uses its own experts. A part of layers of several kinds has each in proportion, rounded down.

        >>> from model.architectures.published_shapes import preset
        >>> preset("llama-2-13b").operations(1, 0) / (2 * 40 * preset("llama-2-13b").layer_weights) < 1.0001
        True
        """
        depth = self._depth(layers)
        checks.whole("width", width, 1)
        checks.whole("context", np.min(context, initial=0) if np.ndim(context) else context, 0)
        checks.whole("heads", heads, 0, width, "width")

        def through(kind: Shape) -> Any:
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

        >>> from model.architectures.published_shapes import preset
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

        >>> from model.architectures.published_shapes import preset
        >>> preset("llama-2-7b").layer_weight_bytes / 1e6
        404.75
        >>> preset("t5-large").layer_weight_bytes / (2 * preset("t5-large").layer_weights)
        0.875
        """
        if self.weights is None and self.experts is None:
            return self.copies * self._mean(lambda kind: kind._decoding_weights * kind.bytes_each)  # type: ignore[no-any-return]
        found: float = self._mean(lambda kind: sum(each.weights * kind.product_bytes_each(each) for each in kind.products))
        return self.copies * found

    def layer_read_bytes(self, width: ArrayLike, batch: ArrayLike = 1) -> Floats:
        """Weights of one decoder layer that a pass over `width` tokens of each of `batch` sequences reads, in expectation [bytes].

        Sparse experts that no token selects are not read. Arguments are numbers or arrays that broadcast.

        >>> from model.architectures.published_shapes import preset
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
            return kind.copies * total

        return np.asarray(self._mean(of))

    def layer_kv_bytes(self, width: ArrayLike, context: ArrayLike, batch: ArrayLike = 1, source: ArrayLike = 0) -> Floats:
        """Keys and values that one decoder layer reads and writes in such a pass [bytes].

        Each position of a sequence, cached or new, is read once for all its new tokens; the new ones are also written.

        >>> from model.architectures.published_shapes import preset
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
        size = float(self.copies * self.head_weights * self.bytes_each)
        return np.where(checks.whole_array("positions", positions, 0) > 0, size, 0.0)

    # --- Tensor parallelism ---

    def shard(self, tensor_parallel: int) -> Shape:
        """Shape of the part of the model on one of `tensor_parallel` devices: Section 3 of [Shoeybi2019].

        Heads, feed-forward and vocabulary (rounded up) are divided. Norms, learned positions and biases added after a reduction are
        on every device. With more devices than `kv_heads`, each device holds one KV head, so heads are replicated. Each device has
        a slice of every expert (tensor parallelism, not expert parallelism) and the whole router. Of latent attention it has its
        heads, and all of the projections to the cached vectors and of the cache.

        >>> from model.architectures.published_shapes import preset
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

    >>> from model.architectures.published_shapes import preset
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
    joined = "joined" if kind.draft is not None and kind.draft.kind == "mtp" else "layer"
    fused = (MatrixProduct(states * hidden, hidden, part=joined),) if states else ()
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


def _attended(kind: Shape, width: int, context: Any) -> Any:
    if kind.window is None:
        return width * context + width * (width + 1) // 2
    attended = windowed(kind, width, context)
    return np.asarray(attended).astype(np.int64) if np.ndim(context) else int(attended)
