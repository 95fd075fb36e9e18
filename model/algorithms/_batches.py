"""Batches of texts that are decoded together, column by column: what the methods that leave layers out have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from model import checks
from model.latency import UnitCost
from model.steps import Forward, Steps

MAX_BATCH = 4096


def check(parameters: Any) -> None:
    """Refuse a batch, or lengths of texts, that are none."""
    checks.whole("batch", parameters.batch, 1, MAX_BATCH)
    lengths = parameters.lengths
    if lengths is None:
        return
    if not isinstance(lengths, tuple | list) or not lengths:
        raise checks.ParameterError(f"lengths must be a list of at least one length of a text, got {checks.shown(lengths)}")
    for index, length in enumerate(lengths):
        checks.whole(f"lengths[{index}]", length, 1, checks.MAX_TOKENS)


def check_longest(parameters: Any, tokens: int) -> None:
    """Refuse lengths of which none is the number of tokens that is asked for."""
    if parameters.lengths is not None and max(parameters.lengths) != tokens:
        raise checks.ParameterError(
            f"lengths must be at most tokens={tokens}, and one of them that, got {max(parameters.lengths)} as the longest;"
            " set tokens to that"
        )


def texts(parameters: Any, tokens: int) -> list[dict[int, int]]:
    """The texts of each batch and their lengths; the next may begin when all texts of the one before have ended.

    All texts of a batch stand at the same position, so none can take the place of one that has ended.
    """
    lengths = (tokens,) * parameters.batch if parameters.lengths is None else parameters.lengths
    numbered = [*enumerate(lengths)]
    return [dict(numbered[start : start + parameters.batch]) for start in range(0, len(numbered), parameters.batch)]


def read_prompts(layers: int, prompt: Sequence[int], prompts: Sequence[Sequence[int]], batch: Sequence[int]) -> Steps:
    """Let the target read the prompts of a batch but for their last tokens, where each text has its own."""
    for text in batch if prompts else ():
        if len(prompts[text]) != len(prompt):
            raise checks.ParameterError(
                f"prompts must be of one length, {len(prompt)} tokens, as texts of a batch stand at one position; prompt {text} has"
                f" {len(prompts[text])}"
            )
        if prompt[:-1]:
            yield Forward("target", tuple(prompts[text][:-1]), 0, 0, layers, texts=(text,))


def last_words(prompt: Sequence[int], prompts: Sequence[Sequence[int]], batch: Sequence[int]) -> tuple[int, ...]:
    """The last token of each text's prompt."""
    return tuple([prompts[text][-1] if prompts else prompt[-1] for text in batch])


def columns(parameters: Any, tokens: int) -> Iterator[tuple[int, int]]:
    """For each step of each batch its place, from 0, and how many texts come to it."""
    for batch in texts(parameters, tokens):
        for column in range(max(batch.values())):
            yield column, sum(length > column for length in batch.values())


def steps_of(parameters: Any, tokens: int) -> int:
    """How many steps all batches take together."""
    return sum(max(batch.values()) for batch in texts(parameters, tokens))


def outputs_of(parameters: Any, tokens: int) -> int:
    """How many tokens all texts have together."""
    return sum(sum(batch.values()) for batch in texts(parameters, tokens))


def plain_time(parameters: Any, tokens: int, cost: UnitCost) -> float:
    """Time of plain decoding of the same batches."""
    return sum(cost.target_pass * cost.slowdown(width, width) for _, width in columns(parameters, tokens))
