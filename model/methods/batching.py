"""Static batches: parameters of methods that decode all sequences of a batch, and the steps of such batches.

All sequences of a batch begin together. A sequence that has ended leaves; the next batch begins when the slowest has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import Work, plain_work, plain_work_of_tokens
from model.methods.method_parameters import LOCKSTEP, STATIC, MethodParameters
from model.steps import Batch, Forward, LayerSpan, Steps

MAX_STATIC = 4096
"""Largest static batch; all its sequences are simulated."""
MOST_ALIKE = 500
"""Largest group of equal sequences with binomial laws; larger ones overflow binomial coefficients."""


@dataclass(frozen=True, kw_only=True)
class StaticBatching(MethodParameters):
    """Parameters of a method that can decode static batches.

    Parameters
    ----------
    lengths
        Tokens of each sequence of static batches, if they differ; the largest equals the scenario's `tokens`.
    """

    lengths: tuple[int, ...] | None = None

    BATCHINGS: ClassVar[tuple[str, ...]] = (STATIC, LOCKSTEP)
    REFUSAL_REASON: ClassVar[str] = "all sequences of its batches are at the same position, so an ended sequence cannot be replaced"

    def check_batching(self) -> None:
        """Raise ParameterError for impossible batches or lengths of sequences."""
        super().check_batching()
        if self.batching == STATIC:
            checks.whole("sequences", self.sequences, 1, MAX_STATIC)
        lengths: Any = self.lengths  # as a file gives them
        if lengths is None:
            return
        if not isinstance(lengths, tuple | list) or not lengths:
            raise checks.ParameterError(f"lengths must be a list of at least one length of a sequence, got {checks.shown(lengths)}")
        for index, length in enumerate(lengths):
            checks.whole(f"lengths[{index}]", length, 1, checks.MAX_TOKENS)
        if self.batching != STATIC:
            raise checks.ParameterError(
                f"lengths must be left out with batching={self.batching!r}, got {checks.shown(lengths)}; sequences of unequal"
                " lengths need batching = 'static'"
            )

    @property
    def full_batch(self) -> int:
        """Sequences that the price of every pass assumes; 1 if all sequences of a batch are simulated."""
        return 1 if self.batching == STATIC else self.sequences

    @property
    def decoded_sequences(self) -> int:
        """Sequences that are decoded; 1 if one sequence represents a full batch."""
        if self.batching != STATIC:
            return 1
        return self.sequences if self.lengths is None else len(self.lengths)

    @property
    def concurrent_sequences(self) -> int:
        """Largest number of sequences that are decoded at the same time."""
        return min(self.sequences, self.decoded_sequences)

    @property
    def static_batches(self) -> bool:
        """True: the method can decode static batches."""
        return True

    def check_tokens(self, tokens: int) -> None:
        """Raise ParameterError unless the longest of `lengths` equals `tokens`."""
        if self.lengths is not None and max(self.lengths) != tokens:
            raise checks.ParameterError(
                f"the largest of lengths must equal tokens={tokens}, got {max(self.lengths)}; set tokens to that"
            )

    @property
    def allows_any_tokens(self) -> bool:
        """True if no number of tokens contradicts the parameters."""
        return self.lengths is None and type(self).check_tokens is StaticBatching.check_tokens

    def batches(self, tokens: int) -> list[dict[int, int]]:
        """Lengths of the sequences of each batch, by sequence number."""
        lengths = (tokens,) * self.decoded_sequences if self.lengths is None else self.lengths
        numbered = [*enumerate(lengths)]
        return [dict(numbered[start : start + self.sequences]) for start in range(0, len(numbered), self.sequences)]

    def columns(self, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Position, from 0, and number of sequences of each step of each batch; arrays of shape (steps,)."""
        return columns_of(tuple([tuple(batch.values()) for batch in self.batches(tokens)]))

    def plain_steps(self, tokens: int) -> int:
        """Steps of plain decoding of the same batches."""
        if self.lengths is None:
            return tokens
        return sum(max(batch.values()) for batch in self.batches(tokens))

    def total_tokens(self, tokens: int) -> int:
        """Total tokens of all decoded sequences."""
        if self.lengths is None:
            return tokens * self.decoded_sequences
        return sum(sum(batch.values()) for batch in self.batches(tokens))

    def shortened(self, tokens: int) -> Self:
        """Copy in which no sequence is longer than `tokens`."""
        return self if self.lengths is None else replace(self, lengths=tuple(min(length, tokens) for length in self.lengths))

    def plain_time(self, tokens: int, cost: StepCosts) -> Any:
        """Time of plain decoding of the same sequences in the same batches; of several costs an array."""
        if self.roles and self.decoded_sequences == 1:
            return super().plain_time(tokens, cost)
        position, sequences = self.columns(tokens)
        known, counts = np.unique(sequences, return_counts=True)
        if cost.uniform:
            time = sum(count * cost.plain_times(0, each) for each, count in zip(known.tolist(), counts.tolist(), strict=True))
        else:
            time = sum(cost.plain_times(position[sequences == each], each).sum(axis=-1) for each in known.tolist())
        return time if np.ndim(time) else float(time)

    def plain_step_times(self, positions: NDArray[np.int64], cost: StepCosts) -> Any:
        """Time of a step of plain decoding of sequences of equal length at each position; of several costs an array."""
        if self.decoded_sequences == 1:
            return super().plain_step_times(positions, cost)
        return cost.plain_times(positions, self.sequences)

    def plain_work(self, tokens: Any) -> Work:
        """Work of plain decoding of the same sequences in the same batches; of equal sequences also for an array of tokens."""
        if self.lengths is None:
            return plain_work_of_tokens(self.layers, tokens, self.decoded_sequences)
        return plain_work(self.layers, *self.columns(tokens))


@lru_cache(maxsize=8)
def columns_of(batches: tuple[tuple[int, ...], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position, from 0, and number of sequences of each step of batches with these lengths; arrays of shape (steps,).

    >>> [each.tolist() for each in columns_of(((3, 1), (2,)))]
    [[0, 1, 2, 0, 1], [2, 1, 1, 1, 1]]
    """
    positions, widths = [], []
    for batch in batches:
        lengths = np.array(batch)
        positions.append(np.arange(lengths.max()))
        widths.append((lengths[:, None] > positions[-1]).sum(axis=0))
    found = np.concatenate(positions), np.concatenate(widths)
    for each in found:
        each.flags.writeable = False
    return found


def read_prompts(
    layers: int, prompt: Sequence[int], prompts: Sequence[Sequence[int]], sequences: Sequence[int],
    parts: Sequence[tuple[int, int, LayerSpan]] = (),
) -> Steps:  # fmt: skip
    """Prefill the target with each sequence's prompt, without its last token; no step if all sequences share one prompt.

    `parts` are the passes over a prompt: (first token, token after the last, layers); by default one pass through all layers.
    """
    whole = ((0, len(prompt) - 1, LayerSpan(0, layers)),) if len(prompt) > 1 else ()
    for number in sequences if prompts else ():
        if len(prompts[number]) != len(prompt):
            raise checks.ParameterError(
                f"all prompts must have the same length, {len(prompt)} tokens, because sequences of a batch are at one position;"
                f" prompt {number} has {len(prompts[number])}"
            )
        for first, last, span in parts or whole:
            words = tuple(prompts[number][first:last])
            yield Forward("target", words, first, span, batch=Batch.uniform((number,), first, last - first))


def last_words(prompt: Sequence[int], prompts: Sequence[Sequence[int]], sequences: Sequence[int]) -> tuple[int, ...]:
    """Last token of each sequence's prompt."""
    return tuple([prompts[number][-1] if prompts else prompt[-1] for number in sequences])
