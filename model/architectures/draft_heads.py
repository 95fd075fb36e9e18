"""Draft heads as models: shapes of EAGLE, EAGLE-3, MTP, Medusa and P-EAGLE heads for any target.

A name is KIND:TARGET or KIND:TARGET:VOCABULARY, such as `eagle3:llama-3.1-8b`. Each drafts one token in one pass, but Medusa and
P-EAGLE draft all tokens. The embedding is the target's, so it takes no memory of its own; a shared head takes none either, but each
pass reads it. With tensor parallelism engines split a head over the target's devices: that is the default of [vLLM], and the only
way of [SGLang].

* `eagle` (also EAGLE-2, whose head is the same): one Llama layer after a product that joins the token's embedding and the hidden
  state before it; the head is the target's [Li2024].
* `eagle3`: queries, keys and values of its layer read embedding and state side by side; a product joins hidden states of three
  layers of the target; a head of its own over a smaller vocabulary. The product is needed once per round, but counts at each pass:
  at most an eighth too much [Li2025].
* `mtp`: a whole layer of the target, with experts and latent attention, and with its type of weights, after a product of embedding
  and state; the head is the target's [DeepSeek2024].
* `medusa`: a residual block and a head for each drafted position, without attention or cache: `MEDUSA_HEADS` of them in memory,
  and a pass reads them all, however many tokens are drafted [Cai2024].
* `p-eagle`: the head of EAGLE-3 with `P_EAGLE_LAYERS` layers. It drafts all tokens in one pass over as many positions; methods
  that make a pass for each refuse it. Its learned states for unknown positions are left out [Hui2026].

[Li2024] Y. Li et al. EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty. ICML 2024, arXiv:2401.15077;
SafeAILab/EAGLE @c9292914, eagle/model/cnets1.py.
[Li2025] Y. Li et al. EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test. arXiv:2503.01840;
SafeAILab/EAGLE @bfeb532e, eagle/model/cnets.py.
[DeepSeek2024] DeepSeek-AI. DeepSeek-V3 Technical Report. arXiv:2412.19437, Section 2.2; deepseek-ai/DeepSeek-V3, README_WEIGHTS.md.
[Cai2024] T. Cai et al. Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. ICML 2024,
arXiv:2401.10774, Section 2.1.
[vLLM] vllm-project/vllm @002e77c1, vllm/config/speculative.py, `_verify_and_get_draft_tp`: the target's size, or 1 if it is asked.
[SGLang] sgl-project/sglang @00559eac, python/sglang/srt/speculative/eagle_worker.py: a worker at the target's rank, which shares
its embedding, and its head but for EAGLE-3. [Hui2026] vLLM blog, 2026-03-13: P-EAGLE, parallel drafting of GPT-OSS 20B with four
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from model.architectures.layer_parts import DraftInput
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError

DRAFT_VOCABULARY = 32_000
"""Default vocabulary of an EAGLE-3 head, at most the target's: that of the heads that its authors published."""
MEDUSA_HEADS = 5
"""Medusa heads, one for each drafted position: those of the published heads."""
PARALLEL = ("medusa", "p-eagle")
"""Kinds that draft all their tokens in one pass."""
P_EAGLE_LAYERS = 4
"""Layers of a P-EAGLE head: those of its published head of gpt-oss-20b."""
FFN_WIDTHS = 6
"""Inner width of an EAGLE head of a target without dense layers, over its hidden width: published for heads of gpt-oss-120b and
Qwen3-235B-A22B."""

ABOUT = {
    "eagle": "EAGLE or EAGLE-2 head of a shape: one layer, the head is the target's",
    "eagle3": "EAGLE-3 head of a shape: one layer, a head of its own; :VOCABULARY sets its size",
    "medusa": "Medusa head of a shape: a residual block and a head for each drafted position",
    "mtp": "module for a further token (MTP) of a shape: a layer of the target, the head is the target's",
    "p-eagle": "P-EAGLE head of a shape: an EAGLE-3 head of four layers",
}
"""Kinds of draft heads, with one line on each."""


def is_head(name: str) -> bool:
    """Return True if a shape's name is that of a draft head.

    >>> is_head("eagle3:llama-3.1-8b"), is_head("llama-3.1-8b")
    (True, False)
    """
    return name.partition(":")[0] in ABOUT and ":" in name


def is_parallel(name: str | None) -> bool:
    """Return True if a shape's name is that of a head which drafts all its tokens in one pass.

    >>> [is_parallel(name) for name in ("p-eagle:gpt-oss-20b", "medusa:vicuna-7b", "eagle3:gpt-oss-20b", None)]
    [True, True, False, False]
    """
    return name is not None and is_head(name) and name.partition(":")[0] in PARALLEL


def most_drafted(name: str) -> int | None:
    """Return the most tokens that a head drafts; None if there is no such number.

    >>> most_drafted("medusa:vicuna-7b"), most_drafted("p-eagle:gpt-oss-20b")
    (5, None)
    """
    return MEDUSA_HEADS if name.startswith("medusa:") else None


def parts(name: str) -> tuple[str, str, int | None]:
    """Return kind, target and vocabulary (None for the default) of a draft head's name.

    >>> parts("eagle3:models/mine/config.json:64000")
    ('eagle3', 'models/mine/config.json', 64000)
    """
    kind, _, rest = name.partition(":")
    last = rest.rpartition(":")[2]
    target, _, words = rest.rpartition(":") if last.isascii() and last.isdigit() else (rest, "", "")
    return kind, target, int(words) if words else None


def head(name: str, shape_of: Callable[[str], Shape]) -> Shape:
    """Return the shape of a draft head by name; `shape_of` returns the shape of its target."""
    kind, target, vocabulary = parts(name)
    try:
        return head_of(kind, shape_of(target), vocabulary)
    except ParameterError as error:
        raise ParameterError(f"{name}: {error}") from None


def head_of(kind: str, target: Shape, vocabulary: int | None = None) -> Shape:
    """Return the shape of a draft head of a target.

    Parameters
    ----------
    kind
        A kind of draft head (`ABOUT`).
    target
        Shape of the target.
    vocabulary
        Rows of the head, at most those of the target. Only heads of EAGLE-3 and P-EAGLE have their own vocabulary.

    >>> from model.architectures.published_shapes import preset
    >>> made = head_of("eagle3", preset("llama-3.1-8b"))
    >>> round(made.parameters * made.bytes_each / 1e6)  # the published checkpoint has 850 MB
    849
    >>> round(head_of("mtp", preset("deepseek-v3")).parameters / 1e9, 1)  # "11.5B unique parameters"
    11.6
    """
    checks.one_of("draft head", kind, ABOUT)
    if target.encoder_layers:
        raise ParameterError(f"the target must be a decoder without encoder, got encoder_layers={target.encoder_layers}")
    if target.draft is not None:
        raise ParameterError(f"the target must be a whole model, got a draft head of kind {target.draft.kind}")
    own = kind in ("eagle3", "p-eagle")
    if vocabulary is not None and not own:
        raise ParameterError(f"a vocabulary is not used by draft head {kind}, whose head has that of the target; leave it out")
    words = target.vocabulary
    if own:
        words = min(DRAFT_VOCABULARY, words) if vocabulary is None else vocabulary
        checks.whole("vocabulary", words, 1, target.vocabulary, "that of the target")
    if kind == "mtp":
        # The last layer of a target whose layers differ: a sparse one, which attends to all positions.
        layer = target.kinds[-1][1]
        return replace(layer, layers=1, tied_head=False, draft=DraftInput(kind, 2, shared_head=True, norms=2))
    if kind == "medusa":
        block = DraftInput(kind, biased=True, last_norm=False, copies=MEDUSA_HEADS)
        return replace(
            target, layers=1, tied_head=False, norms=0, biases=(), positions=0, qk_norms=False, sinks=False, ffn=target.hidden,
            draft=block, experts=None, latent=None, window=None, weights=None,
        )  # fmt: skip
    if target.latent is not None:
        raise ParameterError("an EAGLE head of a target with latent attention has no rule; name its config.json, or mtp:TARGET")
    ffn = target.ffn
    if target.experts is not None:
        ffn = target.experts.dense_ffn or FFN_WIDTHS * target.hidden
    draft = DraftInput(kind, 2, shared_head=True, biased=True, norms=-1, last_norm=False)
    if own:
        draft = DraftInput(kind, 3, attention_states=2, norms=1)
    layers = P_EAGLE_LAYERS if kind == "p-eagle" else 1
    return Shape(
        layers, target.hidden, target.heads, target.kv_heads, target.head_dim, ffn, True, words, False, dtype=target.dtype,
        cache_dtype=target.cache_dtype, draft=draft,
    )  # fmt: skip
