"""Rank logs (`model.logs.rank_log`): the target generates, and a draft model or draft heads rank each of its tokens, by depth.

All drafts along a sequence are computed together: one pass of a draft model over the sequence ranks its tokens at every depth, and
draft heads make one pass per depth, as in their training (`calibrate.family.draft_head_training.positions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.decode import position_logging, real_decoding
from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.family import draft_head_training
from model.base import checks
from model.base.checks import ParameterError
from model.logs.rank_log import RankLog
from model.methods.tree.draft_trees import MAX_DEPTH, MAX_WIDTH
from model.steps import ended

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

GROUP = 8
"""Most sequences whose logits are in memory at once."""


def log_ranks(
    target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], tokens: int, depth: int, top: int,
    header: Mapping[str, Any], *, seed: int = 0, report: Callable[[int, int, str], None] | None = None,
) -> RankLog:  # fmt: skip
    """Generate greedily after each prompt, and log the ranks of all tokens in drafts of this depth with `top` candidates."""
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    checks.whole("depth", depth, 1, MAX_DEPTH)
    checks.whole("top", top, 1, min(MAX_WIDTH, target.vocabulary))
    check_draft(target, draft, depth)
    if not prompts or not all(prompts):
        raise ParameterError("prompts must hold at least one prompt, and each at least one token")
    for prompt in prompts:
        real_decoding.check_prompt({"target": target, "draft": draft}, prompt, tokens)
    found: dict[int, Any] = {}
    for numbers in position_logging.groups(prompts, GROUP):
        chosen = {number: prompts[number] for number in numbers}
        found |= zip(numbers, ranks_of(target, draft, chosen, tokens, depth, top, seed), strict=True)
        if report is not None:
            report(len(found), len(prompts), "")
    return RankLog(tuple(found[number] for number in range(len(prompts))), top, header)


def check_draft(target: Decoder, draft: Decoder, depth: int) -> None:
    """Refuse a draft with another vocabulary, or with fewer heads than the depth."""
    if draft.vocabulary != target.vocabulary:
        sizes = f"target {target.vocabulary}, draft {draft.vocabulary}"
        raise ParameterError(f"models must have the same vocabulary, got {sizes} tokens; use a draft with the same tokenizer")
    if isinstance(draft, DraftHead) and draft.longest_draft is not None and depth > draft.longest_draft:
        raise ParameterError(f"depth must be at most {draft.longest_draft}, the heads of {draft.name}, got {depth}")


def ranks_of(
    target: Decoder, draft: Decoder, prompts: Mapping[int, Sequence[int]], tokens: int, depth: int, top: int, seed: int = 0
) -> Iterator[Any]:
    """Yield the ranks of each sequence, shape (positions, depth), for prompts of one length, by prompt number."""
    import torch

    with torch.inference_mode():
        written, _ = position_logging.generated(target, prompts, tokens, None, seed)
        texts = [[*prompt, *text] for prompt, text in zip(prompts.values(), written, strict=True)]
        whole = torch.tensor(texts, device=target.device)
        width = whole.shape[1] - len(written[0])
        found = np.zeros((*np.shape(written), depth), dtype=np.int64)
        for level, logits in enumerate(_by_depth(target, draft, whole[:, :-1], depth)):
            # Row i is the prediction of token i + level + 1 by a draft whose first token is number i + 1.
            count = whole.shape[1] - width - level
            if count <= 0:
                break
            predicted, own = logits[:, width - 1 : width - 1 + count], whole[:, width + level :]
            ranks = position_logging.ranks_of_tokens(predicted.flatten(0, 1).float(), own.flatten())
            found[:, :count, level] = ranks.reshape(len(written), count)
    found[found > top] = 0
    for text, ranks in zip(written, found, strict=True):
        length = len(ended(text, target.ends))
        for level in range(depth):
            ranks[max(length - level, 0) :, level] = 0
        yield ranks[:length]


def _by_depth(target: Decoder, draft: Decoder, whole: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield for each depth the logits after tokens depth, depth + 1, ...: shape (sequences, tokens - depth, vocabulary)."""
    if isinstance(draft, DraftHead):
        states, _ = draft_head_training.of_target(target, whole)
        yield from draft_head_training.positions(target, draft.trained, draft.kind, whole, states, depth)
        return
    logits = draft.full(input_ids=whole, use_cache=False).logits
    for level in range(depth):
        yield logits[:, level:]
