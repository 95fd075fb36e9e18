"""Sequences that are decoded together: the keys `sequences` and `batching` of every method, and static batches.

Three ways of batching, of which each is another question:

`continuous`  the batch is kept full: a sequence that has ended is replaced at once, as serving engines do. One sequence of it is
              played, and every pass is priced as one over as many tokens of each of `sequences` sequences. Every step drafts for
              all, so a sequence's last draft is not cut short: what is beyond its end is dropped.
`static`      all sequences begin together, each with random outcomes of its own, and the next batch begins when the slowest has
              ended. Sequences that have ended leave their batch.
`lockstep`    all sequences share one set of random outcomes: one is played as if it were alone, its last draft cut short, and
              every pass is priced as over as many tokens of each. It is what prices alone say of a batch.

One sequence is the same in all three. What is reported of `continuous` and `lockstep` is of one sequence of the batch, of `static`
of all of them; speed-ups are over plain decoding of the same number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from model.base import checks
from model.costs.layer_times import UnitCost
from model.steps import Forward, Steps

CONTINUOUS, STATIC, LOCKSTEP = BATCHING = ("continuous", "static", "lockstep")
SAID = {
    CONTINUOUS: "the batch is kept full: a sequence that has ended is replaced at once",
    STATIC: "all sequences begin together, and the next batch begins when the slowest has ended",
    LOCKSTEP: "all sequences share one set of random outcomes: what prices alone say of a batch",
}
MAX_STATIC = 4096
"""The most sequences of a static batch, all of which are played."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How many sequences are decoded together, and in which way; what the parameters of every method begin with.

    Parameters
    ----------
    sequences
        How many sequences a full batch has.
    batching
        continuous, static or lockstep: see above. Of one sequence it makes no difference.
    """

    sequences: int = 1
    batching: str = CONTINUOUS

    BATCHINGS: ClassVar[tuple[str, ...]] = (LOCKSTEP,)
    """The ways in which several sequences of this method can be decoded."""
    WHY_NOT: ClassVar[str] = (
        "of sequences with random outcomes of their own this method's passes differ, and only those of a batch in lockstep have a"
        " price"
    )
    """Why there are no others."""
    GONE: ClassVar[Mapping[str, str]] = MappingProxyType({
        "batch": "it is now sequences, with batching = 'continuous' (a batch that is kept full), 'static' (one that waits for its"
        " slowest sequence) or 'lockstep'"
    })
    """Keys that there were, and what to say instead."""

    def check_batching(self) -> None:
        """Refuse batches that there are none of."""
        checks.whole("sequences", self.sequences, 1, checks.MAX_UNITS)
        checks.one_of("batching", self.batching, BATCHING)
        if self.sequences > 1 and self.batching not in self.BATCHINGS:
            known = " or ".join(repr(each) for each in self.BATCHINGS)
            raise checks.ParameterError(
                f"batching must be {known} with sequences={self.sequences}, got {self.batching!r}: {self.WHY_NOT}; set batching"
            )

    @property
    def full_batch(self) -> int:
        """Sequences over which every pass of the decoding that is played is priced; 1 where all sequences of a batch are played."""
        return self.sequences


@dataclass(frozen=True, kw_only=True)
class StaticBatching(Batching):
    """The same of methods of which whole static batches are played.

    Parameters
    ----------
    lengths
        Tokens of all sequences of static batches, if not all of one length: the longest of as many as the scenario says.
    """

    lengths: tuple[int, ...] | None = None

    BATCHINGS: ClassVar[tuple[str, ...]] = (STATIC, LOCKSTEP)
    WHY_NOT: ClassVar[str] = "its batches go column by column, so that no sequence can take the place of one that has ended"

    def check_batching(self) -> None:
        """Refuse batches, or lengths of sequences, that there are none of."""
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
                " lengths are those of batching = 'static'"
            )

    @property
    def full_batch(self) -> int:
        """Sequences over which every pass of the decoding that is played is priced; 1 where all sequences of a batch are played."""
        return 1 if self.batching == STATIC else self.sequences

    @property
    def texts(self) -> int:
        """How many sequences are played."""
        if self.batching != STATIC:
            return 1
        return self.sequences if self.lengths is None else len(self.lengths)

    @property
    def together(self) -> int:
        """How many of these are decoded at the same time, at most."""
        return min(self.sequences, self.texts)

    def check_tokens(self, tokens: int) -> None:
        """Refuse lengths of which none is the number of tokens that is asked for."""
        if self.lengths is not None and max(self.lengths) != tokens:
            raise checks.ParameterError(
                f"lengths must be at most tokens={tokens}, and one of them that, got {max(self.lengths)} as the longest;"
                " set tokens to that"
            )

    def steps_of(self, tokens: int) -> int:
        """How many steps plain decoding of all batches takes."""
        return sum(max(batch.values()) for batch in texts(self, tokens))

    def outputs_of(self, tokens: int) -> int:
        """How many tokens all sequences that are played have."""
        return sum(sum(batch.values()) for batch in texts(self, tokens))


def texts(parameters: StaticBatching, tokens: int) -> list[dict[int, int]]:
    """The sequences of each batch and their lengths; the next may begin when all of the one before have ended.

    All sequences of a batch begin together, so none can take the place of one that has ended.
    """
    lengths = (tokens,) * parameters.texts if parameters.lengths is None else parameters.lengths
    numbered = [*enumerate(lengths)]
    return [dict(numbered[start : start + parameters.sequences]) for start in range(0, len(numbered), parameters.sequences)]


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


def plain_time(parameters: Any, tokens: int, cost: UnitCost) -> float:
    """Time of plain decoding of the same batches."""
    return sum(cost.target_pass * cost.slowdown(width, width) for _, width in columns(parameters, tokens))
