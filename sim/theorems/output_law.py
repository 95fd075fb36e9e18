"""The law of what an algorithm puts out, exactly: every choice is followed, with its probability as a fraction.

Models are tables: a function from the tokens before to the law of the next one. A process cannot be copied in the middle, so for
each way that luck may go it is run again from the start, on the choices made so far. Random numbers stay symbols: comparing one
with a number is a choice too, and leaves the part of [0, 1) that fits. A number that is used twice is found out by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from model.steps import CacheError, Commit, Forward, Read, Steps

Law = tuple[Fraction, ...]
"""The chance of each token to be the next."""
Model = Callable[[tuple[int, ...]], Law]
"""What a model says after these tokens."""
Texts = dict[tuple[int, ...], Fraction]
"""A law of texts."""


@dataclass
class PossibleDecoding:
    """One way that a decoding may go."""

    chance: Fraction
    commits: list[Commit] = field(default_factory=list)

    @property
    def text(self) -> tuple[int, ...]:
        """What was put out."""
        return tuple(token for commit in self.commits for token in commit.tokens)


class Output(NamedTuple):
    """What a pass leaves: the tokens that its model has read, and after how many of the last it was asked what follows."""

    role: str
    text: tuple[int, ...]
    heads: int


class Uniform:
    """A random number in [0, 1), of which no more is known than what it has been compared with."""

    def __init__(self, luck: _Luck) -> None:
        self._luck, self._low, self._high = luck, Fraction(0), Fraction(1)

    def __lt__(self, bound: Fraction) -> bool:
        inside = min(max(Fraction(bound), self._low), self._high)
        below = (inside - self._low) / (self._high - self._low)
        if self._luck.choose((below, 1 - below)) == 0:
            self._high = inside
            return True
        self._low = inside
        return False

    def __ge__(self, bound: Fraction) -> bool:
        return not self < bound


class _Luck:
    """Choices: those of `script`, and from there on always the first that is possible."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.made: list[int] = []
        self.chance = Fraction(1)
        self.others: list[tuple[int, ...]] = []
        self._script = script

    def choose(self, chances: Sequence[Fraction]) -> int:
        possible = [index for index, chance in enumerate(chances) if chance > 0]
        if len(self.made) < len(self._script):
            chosen = self._script[len(self.made)]
        else:
            chosen, *rest = possible
            self.others += [(*self.made, other) for other in rest]
        self.made.append(chosen)
        self.chance *= chances[chosen]
        return chosen


def endings(
    steps: Callable[[], Steps], models: Mapping[str, Model], prompt: Sequence[int], tokens: int
) -> Iterator[PossibleDecoding]:
    """Every way that a decoding may go. It is over where the process ends, or has put out `tokens` tokens.

    Processes without sub-processes only.
    """
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        luck = _Luck(waiting.pop())
        commits = _run(steps(), _Reader(models, luck), tuple(prompt), tokens)
        waiting += luck.others
        yield PossibleDecoding(luck.chance, commits)


def law_of_text(steps: Callable[[], Steps], models: Mapping[str, Model], prompt: Sequence[int], tokens: int) -> Texts:
    """The law of the text that a process puts out.

    >>> from model.methods.speculative import algorithm as speculative
    >>> parameters = speculative.Parameters(layers=1, draft_length=1, sampled=True)
    >>> p, q = (Fraction(3, 4), Fraction(1, 4)), (Fraction(1, 3), Fraction(2, 3))
    >>> law = law_of_text(lambda: speculative.decode(parameters, [0], 2), {"target": lambda _: p, "draft": lambda _: q}, [0], 2)
    >>> {text: str(chance) for text, chance in sorted(law.items())}
    {(0, 0): '9/16', (0, 1): '3/16', (1, 0): '3/16', (1, 1): '1/16'}
    """
    law: Texts = {}
    for ending in endings(steps, models, prompt, tokens):
        law[ending.text] = law.get(ending.text, Fraction(0)) + ending.chance
    return law


def own_law(model: Model, prompt: Sequence[int], tokens: int, stop: int | None = None) -> Texts:
    """The law of a model's own text: one token after another, up to `tokens` of them or the token `stop`.

    >>> {text: str(chance) for text, chance in own_law(lambda _: (Fraction(3, 4), Fraction(1, 4)), [0], 2, stop=1).items()}
    {(0, 0): '9/16', (0, 1): '3/16', (1,): '1/4'}
    """
    law: Texts = {}

    def follow(text: tuple[int, ...], chance: Fraction) -> None:
        if len(text) == tokens or stop in text:
            law[text] = chance
            return
        for token, share in enumerate(model((*prompt, *text))):
            if share:
                follow((*text, token), chance * share)

    follow((), Fraction(1))
    return law


def likeliest_text(model: Model, prompt: Sequence[int], tokens: int, stop: int | None = None) -> tuple[int, ...]:
    """A model's own greedy text; of tokens that are equally likely the first.

    >>> likeliest_text(lambda text: (Fraction(1, 2), Fraction(1, 2)) if len(text) < 2 else (Fraction(0), Fraction(1)), [0], 3)
    (0, 1, 1)
    """
    text: tuple[int, ...] = ()
    while len(text) < tokens and stop not in text:
        text = (*text, _likeliest(model((*prompt, *text)), 1)[0])
    return text


def distance(one: Texts, other: Texts) -> Fraction:
    """Total variation distance of two laws of texts: half the sum of the differences."""
    return sum((abs(one.get(text, Fraction(0)) - other.get(text, Fraction(0))) for text in {*one, *other}), Fraction(0)) / 2


def residual(p: Law, q: Law) -> Law:
    """norm(max(0, p - q)); refused where p is nowhere above q, since then nothing can have been rejected."""
    above = [max(Fraction(0), own - drafted) for own, drafted in zip(p, q, strict=True)]
    if not any(above):
        raise ArithmeticError(f"a token was drawn from max(0, p - q), which is zero everywhere for p = q = {[*map(str, p)]}")
    return tuple(part / sum(above) for part in above)


# --- One way through ---


class _Reader:
    """What the models have read, and answers to reads."""

    def __init__(self, models: Mapping[str, Model], luck: _Luck) -> None:
        self.models, self.luck = models, luck
        self.read: dict[str, tuple[int, ...]] = {}

    def forward(self, step: Forward, text: tuple[int, ...]) -> Output:
        """Place a pass, which cuts what its model had read beyond; what it reads must be what has been put out."""
        held = self.read.get(step.role, ())
        if step.at > len(held):
            raise CacheError(f"{step.role}: a pass at position {step.at} of a model that has read {len(held)}")
        now = self.read[step.role] = (*held[: step.at], *step.tokens)
        if any(seen != true for seen, true in zip(now, text, strict=False)):
            raise CacheError(f"{step.role} has read {now} where the text is {text}")
        return Output(step.role, now, step.heads)

    def law(self, output: Output, offset: int = -1) -> Law:
        """What a model says after a position of its pass."""
        if not -output.heads <= offset < 0:
            raise IndexError(f"{output.role}: offset {offset} of a pass with {output.heads} heads")
        return self.models[output.role](output.text[: len(output.text) + offset + 1])

    def answer(self, step: Read) -> Any:
        law = self.law(step.output, step.offset)
        match step.kind:
            case "next":
                return _likeliest(law, 1)[0]
            case "top":
                return _likeliest(law, step.width)
            case "sample":
                return self.luck.choose(law)
            case "residual":
                return self.luck.choose(residual(law, self.law(step.against, step.against_offset)))
            case "confidence":
                assert step.token is not None
                return law[step.token]
            case "probability":
                assert step.token is not None
                return law[step.token]
            case "distance":
                assert step.token is not None
                return -math.log(law[step.token]) if law[step.token] else math.inf
            case "uniform":
                return Uniform(self.luck)


def _likeliest(law: Law, count: int) -> list[int]:
    return sorted(range(len(law)), key=lambda token: -law[token])[:count]


def _run(steps: Steps, reader: _Reader, prompt: tuple[int, ...], tokens: int) -> list[Commit]:
    commits: list[Commit] = []
    text, answer = prompt, None
    while len(text) < len(prompt) + tokens:
        try:
            step = steps.send(answer)
        except StopIteration:
            break
        answer = None
        match step:
            case Forward():
                answer = reader.forward(step, text)
            case Read():
                answer = reader.answer(step)
            case Commit():
                commits.append(step)
                text += step.tokens
            case _:
                raise TypeError(f"{type(step).__name__} starts or minds sub-processes, which are not followed here")
    return commits
