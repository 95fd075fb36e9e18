"""Parts of transformer layers beyond the dense layer: sparse experts, latent attention, sliding windows, quantised weights.

[DeepSeek2024] DeepSeek-AI. DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model. arXiv:2405.04434,
Section 2.1: multi-head latent attention and its absorbed form.
[Beltagy2020] I. Beltagy, M. E. Peters, A. Cohan. Longformer: The Long-Document Transformer. arXiv:2004.05150: sliding windows.
[Lin2024] J. Lin et al. AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration. MLSys 2024,
arXiv:2306.00978: scales by group.
[OCP2023] OCP Microscaling Formats (MX) Specification, version 1.0, Section 5: blocks of 32 numbers with a scale of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.base.checks import ParameterError

Floats = NDArray[np.float64]


def experts_read(count: int, active: int, tokens: ArrayLike) -> Floats:
    """Expected number of experts of a layer that a pass over `tokens` tokens reads [-].

    Each token selects `active` of `count` experts, uniformly and independently of the other tokens, so that an expert is missed
    with probability (1 - active / count)^tokens. `tokens` need not be whole (`Experts.independent`).

    >>> print(experts_read(128, 8, [1, 2, 64]))  # Qwen3-235B-A22B
    [  8.    15.5  125.94]
    """
    each = np.asarray(tokens, dtype=np.float64)
    if active == count:
        return np.full(each.shape, float(count))
    # At one token exactly `active`, in spite of rounding.
    return np.where(each == 1, float(active), -count * np.expm1(each * np.log1p(-active / count)))


@dataclass(frozen=True)
class Experts:
    """Sparse experts of feed-forward layers: each token uses some of them.

    Parameters
    ----------
    count, active
        Experts of a layer, and experts that each token selects.
    shared
        Inner width of the shared experts, which every token uses; 0 without them.
    dense_layers, dense_ffn
        First layers of the model that have a dense feed-forward layer instead, and its inner width; 0 and 0 without them.
    biased_router
        True if the router has a bias; it always has a weight per expert and width.
    correlation
        Correlation of the experts of successive tokens of one sequence: `width` of them read as many experts as
        1 + (width - 1)(1 - correlation) independent tokens. 0: independent, which is assumed where nothing was measured; towards 1,
        all of them select the same experts.
    """

    count: int
    active: int
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    biased_router: bool = False
    correlation: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("experts.count", self.count, 1)
        checks.whole("experts.active", self.active, 1, self.count, "experts.count")
        for name in ("shared", "dense_layers", "dense_ffn"):
            checks.whole(f"experts.{name}", getattr(self, name), 0)
        if (self.dense_layers == 0) != (self.dense_ffn == 0):
            raise ParameterError(
                "experts.dense_layers and experts.dense_ffn must both be 0 or both above 0,"
                f" got {self.dense_layers} and {self.dense_ffn}"
            )
        checks.flag("experts.biased_router", self.biased_router)
        checks.number("experts.correlation", self.correlation, 0, 1)

    def independent(self, width: ArrayLike, batch: ArrayLike = 1) -> Floats:
        """Number of independent tokens that read as many experts as `width` successive tokens of each of `batch` sequences [-].

        >>> print(Experts(128, 8, correlation=0.5).independent(5, [1, 4]))
        [ 3. 12.]
        """
        more = np.asarray(width, dtype=np.float64) - 1
        return np.asarray(np.asarray(batch) * (1 + more * (1 - self.correlation)))

    def read(self, width: ArrayLike, batch: ArrayLike = 1) -> Floats:
        """Expected number of a layer's experts that a pass over `width` tokens of each of `batch` sequences reads [-]."""
        return experts_read(self.count, self.active, self.independent(width, batch))


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA) of [DeepSeek2024]: keys and values of all heads come from one cached vector per position.

    In the absorbed form, which engines use to decode, the projections of keys and values are applied to queries and outputs, and
    attention reads the cached vectors themselves. The width of a head's values is the shape's `head_dim`.

    Parameters
    ----------
    query_rank
        Width of the vector that queries are computed from; 0 if they are computed from the hidden state.
    rank, rope
        Widths of the two cached vectors of a position: of keys and values, and of the rotated part of all heads' keys.
    nope
        Width of the part of a head's keys that is not rotated.
    """

    query_rank: int
    rank: int
    rope: int
    nope: int

    def __post_init__(self) -> None:
        checks.whole("latent.query_rank", self.query_rank, 0)
        for name in ("rank", "nope"):
            checks.whole(f"latent.{name}", getattr(self, name), 1)
        checks.whole("latent.rope", self.rope, 0)


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention [Beltagy2020]: in `layers` layers a token attends to the last `size` positions, itself included."""

    size: int
    layers: int

    def __post_init__(self) -> None:
        checks.whole("window.size", self.size, 1)
        checks.whole("window.layers", self.layers, 1)


BITS = {"int4": 4, "float4": 4, "int8": 8, "float8": 8}
"""Bits per quantised weight, by type, without its scale."""


@dataclass(frozen=True)
class QuantisedWeights:
    """Types of the weights of layers that are stored in fewer bits than activations. Embedding, head, router and norms are not.

    Parameters
    ----------
    dtype
        int4, float4, int8 or float8.
    group, scale_bits
        Number of weights that share a scale, 0 without scales, and the bits of a scale.
    experts_only
        True if only the experts are stored in this type.
    arithmetic
        Type that products are computed in on devices with a rate for it. None: that of activations (only weights are quantised).

    >>> [FORMATS[name].bits for name in ("int4", "mxfp4", "nvfp4", "int8")]
    [4.125, 4.25, 4.5, 8.0]
    """

    dtype: str
    group: int = 0
    scale_bits: int = 16
    experts_only: bool = False
    arithmetic: str | None = None

    def __post_init__(self) -> None:
        checks.one_of("weights.dtype", self.dtype, BITS)
        checks.whole("weights.group", self.group, 0)
        checks.whole("weights.scale_bits", self.scale_bits, 1, 64)
        checks.flag("weights.experts_only", self.experts_only)

    @property
    def bits(self) -> float:
        """Bits per weight, with its part of a scale [bits]."""
        return BITS[self.dtype] + (self.scale_bits / self.group if self.group else 0.0)

    @property
    def bytes_each(self) -> float:
        """Bytes per weight, with its part of a scale [bytes]."""
        return self.bits / 8

    @property
    def name(self) -> str:
        """Name of the format (`FORMATS`), or its type and group.

        >>> FORMATS["mxfp4"].name, quantised("int4-g64").name
        ('mxfp4', 'int4-g64')
        """
        of_layers = replace(self, experts_only=False)
        known = [name for name, each in FORMATS.items() if each == of_layers]
        return known[0] if known else f"{self.dtype}-g{self.group}" if self.group else self.dtype

    @property
    def about(self) -> str:
        """Name of the format, bits per weight and what is stored in it, as printed text.

        >>> replace(FORMATS["mxfp4"], experts_only=True).about
        'experts in mxfp4 (4.25 bits per weight)'
        """
        return f"{'experts' if self.experts_only else 'layers'} in {self.name} ({self.bits:.5g} bits per weight)"


def quantised(name: str, *, key: str = "weights") -> QuantisedWeights:
    """Return a format of quantised weights by name (`FORMATS`); int4-gN and int8-gN have a 16-bit scale for each N weights.

    N is a power of two: kernels read whole groups, and no published checkpoint has another. Error messages call the name `key`.

    >>> quantised("int4-g32").bits, quantised("int4-g128") == FORMATS["int4"]
    (4.5, True)
    """
    base, mark, group = name.partition("-g")
    if mark and base in ("int4", "int8") and group.isascii() and group.isdigit() and len(group) < 6:
        size = int(group)
        if size & (size - 1) or not GROUPS[0] <= size <= GROUPS[1]:
            bound = f"a power of two from {GROUPS[0]} to {GROUPS[1]}"
            raise ParameterError(f"{key} must have groups of {bound}, such as {base}-g64, got {name}")
        return QuantisedWeights(base, size)
    if name not in FORMATS:
        known = (*FORMATS, "none")
        said = f"did you mean {SYNONYMS[name]}? known: {', '.join(known)}" if name in SYNONYMS else checks.nearest(name, known)
        raise ParameterError(f"unknown {key} {checks.shown(name)}; {said}; or int4-gN, int8-gN with a scale for each N weights")
    return FORMATS[name]


def names_weights(name: object) -> bool:
    """Return True for the name of a format of weights that is no type of activations.

    >>> names_weights("int4"), names_weights("int4-g64"), names_weights("float8")
    (True, True, False)
    """
    return isinstance(name, str) and name.partition("-g")[0] in (*FORMATS, "float4") and name not in ("int8", "float8")


SYNONYMS = {
    "fp8": "float8", "fp4": "nvfp4", "awq": "int4", "gptq": "int4", "bfloat16": "none", "float16": "none", "float32": "none",
}  # fmt: skip
"""Other names of formats of weights, which are not accepted but understood."""
GROUPS = 8, 16_384
"""Smallest and largest group of weights with one scale that a format's name may have."""
FORMATS = {
    "int4": QuantisedWeights("int4", 128),
    "int8": QuantisedWeights("int8"),
    "float8": QuantisedWeights("float8", 128 * 128, 32, arithmetic="float8"),
    "mxfp4": QuantisedWeights("float4", 32, 8),
    "nvfp4": QuantisedWeights("float4", 16, 8, arithmetic="float4"),
}
"""Formats of quantised weights by name: int4 with a 16-bit scale for each 128 weights [Lin2024]; int8 with a scale per row, which
is left out; float8 in blocks of 128 x 128 with scales of 32 bits and products in float8, as DeepSeek-V3 publishes it; mxfp4 with a
scale of 8 bits for each 32 [OCP2023], computed in 16 bits as on GPUs without its arithmetic; nvfp4, 8 bits for each 16. int4 is
int4-g128."""


DRAFT_KINDS = ("eagle", "eagle3", "medusa", "mtp", "p-eagle")
"""Kinds of draft heads (`model.architectures.draft_heads`)."""


@dataclass(frozen=True)
class DraftInput:
    """What a draft head adds to its first layer: it reads hidden states of the target as well as the token.

    Parameters
    ----------
    kind
        `eagle`, `eagle3`, `mtp`, `p-eagle` or `medusa`.
    states
        Hidden states that one product (`fc`) projects to one before the layer; 0 without such a product.
    attention_states
        Width of the input of queries, keys and values, in hidden states.
    shared_head
        True if the head is the target's: it takes no memory of its own, but a pass reads it. The embedding always is.
    biased
        True if the product has a bias.
    norms, last_norm
        Norms that the first layer has more than another; False if there is none before the head.
    copies
        Copies of the whole, one for each position that is drafted (Medusa). A pass reads all; each position uses one.
    """

    kind: str
    states: int = 0
    attention_states: int = 1
    shared_head: bool = False
    biased: bool = False
    norms: int = 0
    last_norm: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        checks.one_of("draft.kind", self.kind, DRAFT_KINDS)
        checks.whole("draft.states", self.states, 0)
        checks.whole("draft.norms", self.norms, -1)
        for name in ("attention_states", "copies"):
            checks.whole(f"draft.{name}", getattr(self, name), 1)
        for name in ("shared_head", "biased", "last_norm"):
            checks.flag(f"draft.{name}", getattr(self, name))


class MatrixProduct(NamedTuple):
    """Products of activations and weight matrices in one kernel: `blocks` matrices, of which each token uses `used`."""

    inputs: int
    outputs: int
    blocks: int = 1
    used: int = 1
    part: str = "layer"
    """`experts`, `router` and `joined` (token and state of an MTP module) for those, else `layer`: what formats leave out."""

    @property
    def weights(self) -> int:
        """Weights of all matrices."""
        return self.blocks * self.inputs * self.outputs

    @property
    def used_weights(self) -> int:
        """Weights that one token uses."""
        return self.used * self.inputs * self.outputs

    @property
    def sparse(self) -> bool:
        """True if a token uses only some of the matrices, so that a pass may not read all of them."""
        return self.used < self.blocks
