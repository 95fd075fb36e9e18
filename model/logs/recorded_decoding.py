"""Record of a decoding: its output, its passes, and the answer to every read.

Decoders with real models produce it; replays and comparisons consume it. It contains no tensors, and no times except the total.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

from model.base import checks
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.steps import Commit, Forward, Read


class ModelIdentity(TypedDict):
    """The fields of a log's JSON file that identify a model."""

    name: str
    checksum: str
    layers: int


class Question(NamedTuple):
    """A read described without an output object: its pass, and the position that it reads."""

    kind: str
    role: str
    layer: int
    """Number of layers of the model that the output has passed."""
    position: int
    """Position of the predicted token; for reads of several hypotheses the position of the pass."""
    sequence: int
    """Number of the sequence in a batch; 0 without a batch."""
    token: int | None
    """The token whose probability, confidence or distance is read, if any."""
    at: int
    """Cache position of the pass."""
    tail: tuple[int, ...]
    """Tokens of the pass."""
    offset: int
    width: int
    hypotheses: tuple[tuple[int, float], ...]


class AnsweredRead(NamedTuple):
    """A read of a run and its answer."""

    question: Question
    answer: Any


def question(step: Read, output: Forward) -> Question:
    """Describe a read of the output of this pass.

    >>> from model.steps import LayerSpan
    >>> asked = question(Read("next", None, -2), Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), heads=3))
    >>> asked.position, asked.at, asked.tail
    (7, 5, (7, 8, 9))
    """
    kind, offset, at = step.kind, step.offset, output.at
    position = at if kind == "beams" else output.positions[offset] + 1
    return Question(
        kind, output.role, output.layers.last, position, output.sequence_of(offset), step.token, at, output.tokens, offset,
        step.width, step.hypotheses,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Decoding:
    """One decoding of one prompt.

    Parameters
    ----------
    method, settings
        Name of the method, or dotted path of its module (imported only if allowed), and its parameters by name.
    prompt
        Tokens of the prompt, at least one.
    max_tokens, stop
        Number of tokens requested, and tokens that end a sequence earlier.
    commits
        The emitted tokens, commit by commit.
    account
        The passes that were made.
    seconds
        Duration with warm models, including the passes over the prompt [s]; None if not measured.
    reads
        All reads and their answers in order; empty if not logged.
    """

    method: str
    settings: Mapping[str, Any]
    prompt: tuple[int, ...]
    max_tokens: int
    commits: tuple[Commit, ...]
    account: Account
    stop: tuple[int, ...] = ()
    seconds: float | None = None
    reads: tuple[AnsweredRead, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ParameterError("prompt must have at least one token, got none; begin with the model's start token")
        checks.whole("max_tokens", self.max_tokens, 1, checks.MAX_TOKENS)
        if self.seconds is not None:
            checks.number("seconds", self.seconds, 0)
        length = 0
        for number, commit in enumerate(self.commits):
            if not 0 <= commit.back <= length:
                raise ParameterError(f"commit {number} must replace at most the {length} tokens before it, got back={commit.back}")
            length += len(commit.tokens) - commit.back

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The generated tokens, after all replacements."""
        return tuple(token for token, _ in self._generated)

    @property
    def producers(self) -> tuple[str, ...]:
        """Source of each token: `draft` for accepted drafts, `target` for the last token of a round, else the commit's kind.

        In a commit with drafts all tokens but the last are accepted drafts (`model.steps.Commit`). The token that ends a sequence
        therefore counts as the target's, even if it was drafted.
        """
        return tuple(source for _, source in self._generated)

    @cached_property
    def _generated(self) -> list[tuple[int, str]]:
        """Tokens with their sources."""
        generated: list[tuple[int, str]] = []
        for commit in self.commits:
            last = "target" if commit.kind == "round" else commit.kind
            drafted = 0 if commit.drafted is None else max(len(commit.tokens) - 1, 0)
            sources = [*["draft"] * drafted, *[last] * (len(commit.tokens) - drafted)]
            generated[len(generated) - commit.back :] = zip(commit.tokens, sources, strict=True)
        return generated

    @property
    def rounds(self) -> Counter[tuple[int, int]]:
        """Number of rounds by (accepted tokens, drafted tokens)."""
        rounds = ((len(each.tokens) - each.back - 1, each.drafted) for each in self.commits if each.drafted is not None)
        return Counter((accepted, drafted) for accepted, drafted in rounds)


class Drafting(NamedTuple):
    """Totals of drafted tokens over all rounds; rates are nan if their denominator is 0."""

    rounds: int
    accepted: int
    drafted: int
    tested: int
    """Drafted tokens that were tested: tokens after the first rejected one are not."""

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens per round, including the target's token."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else math.nan

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens, the rate that engines such as vLLM print."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested tokens: alpha of [Leviathan2023]."""
        return self.accepted / self.tested if self.tested else math.nan


def drafting(rounds: Mapping[tuple[int, int], int]) -> Drafting:
    """Totals of rounds, from their numbers by (accepted, drafted).

    >>> totals = drafting({(2, 3): 4, (3, 3): 1})  # four rounds reject their third token
    >>> totals, totals.mean_acceptance_length, totals.acceptance_rate
    (Drafting(rounds=5, accepted=11, drafted=15, tested=15), 3.2, 0.7333)
    """
    sums = [0, 0, 0, 0]
    for (accepted, drafted), count in rounds.items():
        for index, each in enumerate((1, accepted, drafted, min(accepted + 1, drafted))):
            sums[index] += count * each
    return Drafting(*sums)


def rounds_and_passes(decodings: Iterable[Decoding]) -> tuple[Counter[tuple[int, int]], Account]:
    """Rounds and passes of several decodings together."""
    rounds: Counter[tuple[int, int]] = Counter()
    account = Account()
    for each in decodings:
        rounds += each.rounds
        account.include(each.account)
    return rounds, account


def plain_layer_passes(layers: int, prompt: int, tokens: int) -> int:
    """Layers that plain decoding runs, counted once per token: for all prompt tokens but the last, and all generated tokens.

    >>> plain_layer_passes(40, 5, 3)
    280
    """
    return layers * (prompt - 1 + tokens)
