"""Shapes of decoders, and the arithmetic, weights and cache that a pass takes: what follows from them without any clock.

Weights are those of matrices: norms, biases, positions and relative-position tables, well below a percent, are left out, and so is
an encoder. A projection onto the vocabulary is not a layer. Arithmetic counts a multiplication and an addition as two.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863, Table 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from model import checks


@dataclass(frozen=True)
class Shape:
    """One decoder.

    Parameters
    ----------
    layers, dim
        Decoder layers, and the width of the hidden state.
    heads, head_dim, kv_heads
        Of self-attention; keys and values of `kv_heads` are shared by groups of heads.
    ffn_dim, ffn_matrices
        Inner width of the feed-forward layer; 2 matrices, or 3 where it is gated.
    vocabulary
        Rows of the embedding, and of the projection onto the vocabulary.
    cross
        Whether each layer attends to an encoder besides, with as many heads.
    """

    layers: int
    dim: int
    heads: int
    head_dim: int
    kv_heads: int
    ffn_dim: int
    ffn_matrices: int
    vocabulary: int
    cross: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "head_dim", "kv_heads", "ffn_dim", "vocabulary"):
            checks.whole(name, getattr(self, name), 1)
        checks.whole("ffn_matrices", self.ffn_matrices, 2, 3)
        checks.flag("cross", self.cross)
        if self.heads % self.kv_heads:
            raise checks.ParameterError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")

    @property
    def layer_weights(self) -> int:
        """Weights of one layer.

        >>> shape("t5-large").layers * shape("t5-large").layer_weights, shape("t5-small").layers * shape("t5-small").layer_weights
        (402653184, 25165824)
        """
        inner = self.heads * self.head_dim
        attention = self.dim * (2 * inner + 2 * self.kv_heads * self.head_dim)
        crossing = 4 * self.dim * inner if self.cross else 0
        return attention + crossing + self.ffn_matrices * self.dim * self.ffn_dim

    @property
    def head_weights(self) -> int:
        """Weights of the projection onto the vocabulary."""
        return self.dim * self.vocabulary

    @property
    def head_layers(self) -> float:
        """That projection in layers: its weights over those of one layer; what `final_head` is if reading takes the time.

        >>> {name: round(shape(name).head_layers, 3) for name in ("llama-2-13b", "opt-1.3b", "mt5-small")}
        {'llama-2-13b': 0.517, 'opt-1.3b': 2.045, 'mt5-small': 40.708}
        """
        return self.head_weights / self.layer_weights

    def cache_bytes(self, layers: int | None = None, *, bytes_each: int = 2) -> int:
        """Keys and values of one position in so many layers, or in all [bytes].

        >>> shape("llama-2-13b").cache_bytes(20) / 1e6  # what a sub-process of PPD hands over, at half depth
        0.4096
        """
        depth = self._depth(layers)
        checks.whole("bytes_each", bytes_each, 1)
        return 2 * depth * self.kv_heads * self.head_dim * bytes_each

    def operations(self, width: int, context: int, layers: int | None = None, *, heads: int = 0) -> int:
        """Arithmetic of a pass over `width` positions behind `context` others, through so many layers, or all [operations].

        2 for each weight and position, and 4 heads head_dim for each position and each that it attends to, itself included.
        `heads` positions are projected onto the vocabulary. What it attends to of an encoder is left out.

        >>> shape("llama-2-13b").operations(1, 0) / (2 * 40 * shape("llama-2-13b").layer_weights) < 1.0001
        True
        """
        depth = self._depth(layers)
        checks.whole("width", width, 1)
        checks.whole("context", context, 0)
        checks.whole("heads", heads, 0, width, "width")
        attended = width * context + width * (width + 1) // 2
        through = depth * (2 * width * self.layer_weights + 4 * self.heads * self.head_dim * attended)
        return through + 2 * heads * self.head_weights

    def _depth(self, layers: int | None) -> int:
        if layers is None:
            return self.layers
        checks.whole("layers", layers, 0, self.layers)
        return layers


SHAPES = {
    "t5-small": Shape(6, 512, 8, 64, 8, 2048, 2, 32_128, cross=True),
    "t5-large": Shape(24, 1024, 16, 64, 16, 4096, 2, 32_128, cross=True),
    "mt5-small": Shape(8, 512, 6, 64, 6, 1024, 3, 250_112, cross=True),
    "mt5-large": Shape(24, 1024, 16, 64, 16, 2816, 3, 250_112, cross=True),
    "opt-1.3b": Shape(24, 2048, 32, 64, 32, 8192, 2, 50_272),
    "opt-6.7b": Shape(32, 4096, 32, 128, 32, 16_384, 2, 50_272),
    "llama-2-13b": Shape(40, 5120, 40, 128, 40, 13_824, 3, 32_000),
    "vicuna-13b": Shape(40, 5120, 40, 128, 40, 13_824, 3, 32_000),
    "llama-3-8b": Shape(32, 4096, 32, 128, 8, 14_336, 3, 128_256),
    "gpt2": Shape(12, 768, 12, 64, 12, 3072, 2, 50_257),
}
"""The models that the papers decode with, and two that are widely known."""


def shape(name: str) -> Shape:
    """The decoder of this name.

    >>> shape("opt-1.3b").layers
    24
    """
    checks.one_of("shape", name, SHAPES)
    return SHAPES[name]
