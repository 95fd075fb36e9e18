"""Exact distribution of the text that an algorithm generates: all random choices are enumerated, with fractions as probabilities.

A model is a function from the preceding tokens to the distribution of the next one. A generator cannot be copied midway, so each
sequence of random choices is run again from the start. Uniform random numbers are symbolic: comparing one with a bound is a choice,
which narrows its interval in [0, 1). So a number that is used twice leads to a wrong distribution, and is detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from model.interpret import text_lookup
from model.interpret.simulated_answers import EARLY_LAYERS
from model.steps import CacheError, Commit, DraftLimit, Forward, Lookup, Read, Steps

Law = tuple[Fraction, ...]
"""Probability of each token to be the next."""
Model = Callable[[tuple[int, ...]], Law]
"""Distribution of the next token, as a function of the preceding tokens."""
TextLaw = dict[tuple[int, ...], Fraction]
"""Probability of each text."""


@dataclass
class PossibleDecoding:
    """One sequence of random choices of a decoding."""

    chance: Fraction
    commits: list[Commit] = field(default_factory=list)

    @property
    def text(self) -> tuple[int, ...]:
        """Generated text."""
        return tuple(token for commit in self.commits for token in commit.tokens)


class Output(NamedTuple):
    """Output of a pass: all tokens that its model has read, and the number of last positions that have logits."""

    role: str
    text: tuple[int, ...]
    heads: int


class Uniform:
    """Symbolic random number in [0, 1), known only by the comparisons made so far."""

    def __init__(self, choices: _Choices) -> None:
        self._choices, self._low, self._high = choices, Fraction(0), Fraction(1)

    def __lt__(self, bound: Fraction) -> bool:
        inside = min(max(Fraction(bound), self._low), self._high)
        below = (inside - self._low) / (self._high - self._low)
        if self._choices.choose((below, 1 - below)) == 0:
            self._high = inside
            return True
        self._low = inside
        return False

    def __ge__(self, bound: Fraction) -> bool:
        return not self < bound


class _Choices:
    """Random choices: those of `script`, then always the first possible one."""

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


def possible_decodings(
    steps: Callable[[], Steps], models: Mapping[str, Model], prompt: Sequence[int], tokens: int, layers: int | None = None
) -> Iterator[PossibleDecoding]:
    """Yield all sequences of random choices of a decoding, until its steps end or `tokens` tokens are generated.

    Only for algorithms without sub-processes. With the number of `layers` of the target, the model `EARLY_LAYERS` predicts where
    its passes end at an earlier layer or skip layers.
    """
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        choices = _Choices(waiting.pop())
        commits = _run(steps(), _Reader(models, choices, layers), tuple(prompt), tokens)
        waiting += choices.others
        yield PossibleDecoding(choices.chance, commits)


def law_of_text(
    steps: Callable[[], Steps], models: Mapping[str, Model], prompt: Sequence[int], tokens: int, layers: int | None = None
) -> TextLaw:
    """Return the distribution of the text that an algorithm generates; see `possible_decodings`.

    >>> from model.methods.speculative import algorithm as speculative
    >>> parameters = speculative.Parameters(layers=1, draft_length=1, sampled=True)
    >>> p, q = (Fraction(3, 4), Fraction(1, 4)), (Fraction(1, 3), Fraction(2, 3))
    >>> law = law_of_text(lambda: speculative.decode(parameters, [0], 2), {"target": lambda _: p, "draft": lambda _: q}, [0], 2)
    >>> {text: str(chance) for text, chance in sorted(law.items())}
    {(0, 0): '9/16', (0, 1): '3/16', (1, 0): '3/16', (1, 1): '1/16'}
    """
    law: TextLaw = {}
    for decoding in possible_decodings(steps, models, prompt, tokens, layers):
        law[decoding.text] = law.get(decoding.text, Fraction(0)) + decoding.chance
    return law


def law_of_model(model: Model, prompt: Sequence[int], tokens: int, stop: int | None = None) -> TextLaw:
    """Return the distribution of a model's text under plain decoding, up to `tokens` tokens or the token `stop`.

    >>> {text: str(chance) for text, chance in law_of_model(lambda _: (Fraction(3, 4), Fraction(1, 4)), [0], 2, stop=1).items()}
    {(0, 0): '9/16', (0, 1): '3/16', (1,): '1/4'}
    """
    law: TextLaw = {}

    def follow(text: tuple[int, ...], chance: Fraction) -> None:
        if len(text) == tokens or stop in text:
            law[text] = chance
            return
        for token, share in enumerate(model((*prompt, *text))):
            if share:
                follow((*text, token), chance * share)

    follow((), Fraction(1))
    return law


def greedy_text(model: Model, prompt: Sequence[int], tokens: int, stop: int | None = None) -> tuple[int, ...]:
    """Return a model's greedy text; of equally likely tokens the first.

    >>> greedy_text(lambda text: (Fraction(1, 2), Fraction(1, 2)) if len(text) < 2 else (Fraction(0), Fraction(1)), [0], 3)
    (0, 1, 1)
    """
    text: tuple[int, ...] = ()
    while len(text) < tokens and stop not in text:
        text = (*text, _top_tokens(model((*prompt, *text)), 1)[0])
    return text


def distance(one: TextLaw, other: TextLaw) -> Fraction:
    """Total variation distance of two distributions: half the sum of the absolute differences."""
    return sum((abs(one.get(text, Fraction(0)) - other.get(text, Fraction(0))) for text in {*one, *other}), Fraction(0)) / 2


def residual(p: Law, q: Law, weight: Fraction = Fraction(1)) -> Law:
    """Return norm(max(0, w p - q)); an error if w p is nowhere above q, because then no token can have been rejected."""
    above = _excess(p, q, weight)
    if not any(above):
        laws = f"w = {weight}, p = {[*map(str, p)]}, q = {[*map(str, q)]}"
        raise ArithmeticError(f"a token was drawn from max(0, w p - q), which is zero everywhere for {laws}")
    return tuple(part / sum(above) for part in above)


def _excess(p: Law, q: Law, weight: Fraction) -> list[Fraction]:
    return [max(Fraction(0), weight * target - draft) for target, draft in zip(p, q, strict=True)]


# --- One sequence of choices ---


class _Reader:
    """Tokens that the models have read, and answers to reads."""

    def __init__(self, models: Mapping[str, Model], choices: _Choices, layers: int | None = None) -> None:
        self.models, self.choices, self.layers = models, choices, layers
        self.read: dict[str, tuple[int, ...]] = {}

    def forward(self, step: Forward, text: tuple[int, ...]) -> Output:
        """Run a pass, which drops rows of its model beyond it; the tokens that it reads must agree with the generated text."""
        held = self.read.get(step.role, ())
        if step.at > len(held):
            raise CacheError(f"{step.role}: a pass at position {step.at} of a model that has read {len(held)}")
        now = self.read[step.role] = (*held[: step.at], *step.tokens)
        if any(seen != true for seen, true in zip(now, text, strict=False)):
            raise CacheError(f"{step.role} has read {now} where the text is {text}")
        layers = step.layers
        drafts = self.layers is not None and step.role == "target" and (layers.last < self.layers or layers.gaps)
        return Output(EARLY_LAYERS if drafts else step.role, now, step.heads)

    def law(self, output: Output, offset: int = -1) -> Law:
        """Return the distribution of the token after a position of a pass."""
        if not -output.heads <= offset < 0:
            raise IndexError(f"{output.role}: offset {offset} of a pass with {output.heads} heads")
        return self.models[output.role](output.text[: len(output.text) + offset + 1])

    def answer(self, step: Read) -> Any:
        law = self.law(step.output, step.offset)
        match step.kind:
            case "next":
                return _top_tokens(law, 1)[0]
            case "top":
                return _top_tokens(law, step.width)
            case "sample":
                return self.choices.choose(law)
            case "residual":
                return self.choices.choose(residual(law, self.law(step.against, step.against_offset), Fraction(step.weight)))
            case "residual_mass":
                return sum(_excess(law, self.law(step.against, step.against_offset), Fraction(step.weight)), Fraction(0))
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
                return Uniform(self.choices)


def _top_tokens(law: Law, count: int) -> list[int]:
    return sorted(range(len(law)), key=lambda token: -law[token])[:count]


def _run(steps: Steps, reader: _Reader, prompt: tuple[int, ...], tokens: int) -> list[Commit]:
    commits: list[Commit] = []
    answer: Any = None
    text = prompt
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
            case DraftLimit():
                answer = step.longest
            case Lookup():
                answer = text_lookup.answer(step)
            case Commit():
                commits.append(step)
                text += step.tokens
            case _:
                raise TypeError(f"{type(step).__name__} is a step of sub-processes, which are not supported here")
    return commits
