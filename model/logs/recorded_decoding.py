"""A decoding that has happened: what was put out, which passes were made, and what every read was answered.

Whoever decodes with real models hands this over; whoever replays or judges it takes this. No tensor, no clock but the seconds.
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
    """What a read asks, in words that need no output: of which pass, and about which of its positions."""

    kind: str
    role: str
    layer: int
    """Behind which it reads."""
    position: int
    """Of the token that it is about; of several hypotheses the pass's own."""
    sequence: int
    """The sequence of a batch, by its number."""
    token: int | None
    """The token that is asked about, where one is."""
    at: int
    """The cache position of the pass."""
    tail: tuple[int, ...]
    """The pass's tokens."""
    offset: int
    width: int
    hypotheses: tuple[tuple[int, float], ...]


class Answered(NamedTuple):
    """A read and its answer, as it was asked for during a run."""

    question: Question
    answer: Any


def question(step: Read, output: Forward) -> Question:
    """The question of a read of what this pass has made.

    >>> from model.steps import LayerSpan
    >>> found = question(Read("next", None, -2), Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), heads=3))
    >>> found.position, found.at, found.tail
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
        The method's name, or the dotted path of its module (imported where that is allowed), and its parameters by their names.
    prompt
        The tokens that were given, at least one.
    max_tokens, stop
        How many tokens were asked for, and the tokens that would have ended the text before.
    commits
        What was put out, in order.
    account
        The passes that were made.
    seconds
        How long it took [s], measured with warm models, the prompt's passes included; None where nobody looked.
    reads
        Every read and its answer in the order that they were asked; empty where no log was kept.
    """

    method: str
    settings: Mapping[str, Any]
    prompt: tuple[int, ...]
    max_tokens: int
    commits: tuple[Commit, ...]
    account: Account
    stop: tuple[int, ...] = ()
    seconds: float | None = None
    reads: tuple[Answered, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ParameterError("prompt must have at least one token, got none; begin with the model's start token")
        checks.whole("max_tokens", self.max_tokens, 1, checks.MAX_TOKENS)
        if self.seconds is not None:
            checks.number("seconds", self.seconds, 0)
        there = 0
        for number, commit in enumerate(self.commits):
            if not 0 <= commit.back <= there:
                raise ParameterError(f"commit {number} must replace at most the {there} tokens before it, got back={commit.back}")
            there += len(commit.tokens) - commit.back

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """What was put out in the end."""
        return tuple(token for token, _ in self._written)

    @property
    def producers(self) -> tuple[str, ...]:
        """Who gave each token: `draft` where a draft was accepted, `target` behind one, else what the commit was called.

        Of a commit with drafted tokens all but the last are the draft's: so is it written (`model.steps.Commit`). The token that
        ends a text counts as the target's, whoever wrote it first.
        """
        return tuple(who for _, who in self._written)

    @cached_property
    def _written(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for commit in self.commits:
            own = "target" if commit.kind == "round" else commit.kind
            drafted = 0 if commit.drafted is None else len(commit.tokens) - 1
            whose = [*["draft"] * drafted, *[own] * (len(commit.tokens) - drafted)]
            found[len(found) - commit.back :] = zip(commit.tokens, whose, strict=True)
        return found

    @property
    def rounds(self) -> Counter[tuple[int, int]]:
        """How many rounds had so many tokens (accepted, drafted)."""
        rounds = ((len(each.tokens) - each.back - 1, each.drafted) for each in self.commits if each.drafted is not None)
        return Counter((accepted, drafted) for accepted, drafted in rounds)


class Drafting(NamedTuple):
    """What became of drafted tokens, over all rounds; nan where there was nothing to count."""

    rounds: int
    accepted: int
    drafted: int
    tested: int
    """Those that were judged: behind a rejected one nothing is."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a round gives, the target's own included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else math.nan

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens over drafted ones: what engines print."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over tested ones: alpha of [Leviathan2023]."""
        return self.accepted / self.tested if self.tested else math.nan


def drafting(rounds: Mapping[tuple[int, int], int]) -> Drafting:
    """Totals of rounds that are counted by (accepted, drafted).

    >>> found = drafting({(2, 3): 4, (3, 3): 1})  # four rounds reject their third token
    >>> found, found.mean_acceptance_length, found.acceptance_rate
    (Drafting(rounds=5, accepted=11, drafted=15, tested=15), 3.2, 0.7333)
    """
    sums = [0, 0, 0, 0]
    for (accepted, drafted), count in rounds.items():
        for index, each in enumerate((1, accepted, drafted, min(accepted + 1, drafted))):
            sums[index] += count * each
    return Drafting(*sums)


def together(decodings: Iterable[Decoding]) -> tuple[Counter[tuple[int, int]], Account]:
    """The rounds and the passes of several decodings."""
    rounds: Counter[tuple[int, int]] = Counter()
    account = Account()
    for each in decodings:
        rounds += each.rounds
        account.include(each.account)
    return rounds, account


def plain_layer_passes(layers: int, prompt: int, tokens: int) -> int:
    """Layers that plain decoding runs, once for each token: all of them for each of the prompt but its last, and for each written.

    >>> plain_layer_passes(40, 5, 3)
    280
    """
    return layers * (prompt - 1 + tokens)
