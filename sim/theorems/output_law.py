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
from model.steps import (
    CacheError,
    Commit,
    Continuation,
    DraftLimit,
    Features,
    Forward,
    Lookup,
    Read,
    Steps,
    declining,
    visible_positions,
)

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
    """Output of a pass: for each of its tokens the text up to it, and the number of last tokens that have logits."""

    role: str
    texts: tuple[tuple[int, ...], ...]
    heads: int
    positions: tuple[int, ...] = ()


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
    its passes end at an earlier layer, skip layers, or have a context budget.
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


def without(q: Law, tokens: Sequence[int]) -> Law:
    """Distribution without these tokens, divided by its sum.

    >>> [str(part) for part in without((Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)), [0])]
    ['0', '1/2', '1/2']
    """
    left = [Fraction(0) if token in tokens else chance for token, chance in enumerate(q)]
    return tuple(chance / sum(left) for chance in left)


def after_rejections(p: Law, q: Law, rejected: Sequence[int]) -> tuple[Law, Law]:
    """Target's and draft's distributions after tokens were drawn from the draft's without replacement and rejected.

    >>> p, q = (Fraction(1, 4), Fraction(3, 4), Fraction(0)), (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
    >>> [[str(part) for part in law] for law in after_rejections(p, q, [0])]
    [['0', '1', '0'], ['0', '1/2', '1/2']]
    """
    for count in range(len(rejected)):
        p, q = residual(p, without(q, rejected[:count])), without(q, rejected[: count + 1])
    return p, q


# --- One sequence of choices ---


class _Reader:
    """Tokens that the models have read, and answers to reads."""

    def __init__(self, models: Mapping[str, Model], choices: _Choices, layers: int | None = None) -> None:
        self.models, self.choices, self.layers = models, choices, layers
        self.read: dict[str, list[list[tuple[int, ...]]]] = {}
        """By role and position, each sequence of tokens that a model has read up to there: several in a tree."""

    def forward(self, step: Forward, text: tuple[int, ...]) -> Output:
        """Run a pass, which drops rows of its model beyond it; the tokens that it reads must agree with the generated text."""
        held = self.read.setdefault(step.role, [])
        if step.at > len(held):
            raise CacheError(f"{step.role}: a pass at position {step.at} of a model that has read {len(held)}")
        del held[step.at :]
        before = held[-1] if held else [()]
        now: list[tuple[int, ...]] = []
        for token, follows, position in zip(step.tokens, step.tree or range(-1, len(step.tokens) - 1), step.positions, strict=True):
            now.append((*(before[-1 - follows] if follows < 0 else now[follows]), token))
            if position == len(held):
                held.append([])
            held[position].append(now[-1])
            if any(seen != true for seen, true in zip(now[-1], text, strict=False)):
                raise CacheError(f"{step.role} has read {now[-1]} where the text is {text}")
        if isinstance(step.state, Features):
            step.state.require(step)
        layers = step.layers
        budget = step.context_budget is not None
        drafts = self.layers is not None and step.role == "target" and (layers.last < self.layers or layers.gaps or budget)
        if budget:  # the model predicts from what the pass reads; its tokens follow one another, or the same cached text
            first, latest = visible_positions(step.at, step.context_budget)
            now = [(*text[: first.stop], *text[latest.start :]) for text in now]
        return Output(EARLY_LAYERS if drafts else step.role, tuple(now), step.heads, tuple(step.positions))

    def law(self, output: Output, offset: int = -1) -> Law:
        """Return the distribution of the token after a position of a pass."""
        if not -output.heads <= offset < 0:
            raise IndexError(f"{output.role}: offset {offset} of a pass with {output.heads} heads")
        return self.models[output.role](output.texts[offset])

    def answer(self, step: Read) -> Any:
        law = self.law(step.output, step.offset)
        match step.kind:
            case "next":
                return _top_tokens(law, 1)[0]
            case "top":
                return _top_tokens(law, step.width)
            case "sample":
                return self.choices.choose(law)
            case "distinct":
                return self._distinct(law, step.width)
            case "residual":
                p, q = after_rejections(law, self.law(step.against, step.against_offset), step.rejected)
                return self.choices.choose(residual(p, q, Fraction(step.weight)))
            case "residual_mass":
                return sum(_excess(law, self.law(step.against, step.against_offset), Fraction(step.weight)), Fraction(0))
            case "beams":
                return self._beams(step)
            case "confidence":
                assert step.token is not None
                return law[step.token]
            case "probability":
                assert step.token is not None
                if step.against is None:
                    return without(law, step.rejected)[step.token]
                return after_rejections(law, self.law(step.against, step.against_offset), step.rejected)[0][step.token]
            case "distance":
                assert step.token is not None
                return -math.log(law[step.token]) if law[step.token] else math.inf
            case "uniform":
                return Uniform(self.choices)

    def _distinct(self, law: Law, width: int) -> list[int]:
        """Tokens drawn one after another without replacement."""
        drawn: list[int] = []
        while len(drawn) < width and any(chance for token, chance in enumerate(law) if token not in drawn):
            drawn.append(self.choices.choose(without(law, drawn)))
        return drawn

    def _beams(self, step: Read) -> list[Continuation]:
        """The likeliest continuations of all hypotheses, best first."""
        found = [
            Continuation(token, index, score + (math.log(chance) if chance else -math.inf))
            for index, score in step.hypotheses
            for token, chance in enumerate(self.law(step.output, index))
        ]
        return sorted(found, key=lambda each: -each.score)[: step.width]


def _top_tokens(law: Law, count: int) -> list[int]:
    return sorted(range(len(law)), key=lambda token: -law[token])[:count]


def _run(steps: Steps, reader: _Reader, prompt: tuple[int, ...], tokens: int) -> list[Commit]:
    commits: list[Commit] = []
    answer: Any = None
    text, steps = prompt, declining(steps)
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
