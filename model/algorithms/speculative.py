"""Speculative decoding: a small model drafts, the large one checks all drafted tokens in one pass.

Algorithm 1 of [Leviathan2023] (Algorithm 2 of [Chen2023] is the same with other letters). Greedy, a drafted token is kept if it is
the target's own; sampled, with chance min(1, p/q), and the first that is not is replaced by one from norm(max(0, p - q)), so that
the output has the target's law exactly. A round gives one token more than it accepts. Drafts are cut to what remains to be decoded.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Chen2023] C. Chen et al. Accelerating Large Language Model Decoding with Speculative Sampling. arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from model import checks
from model.steps import GREEDY, SAMPLED, Commit, Forward, Read, Step, Steps, ended

PLACEMENTS = ("together", "apart")
MAX_DRAFT = 250
"""Longer drafts than anybody makes; positions within one are kept in a byte."""


@dataclass(frozen=True)
class Parameters:
    """A choice of speculative decoding: gamma = `draft_length`, whether tokens are `sampled`, and whether the draft model is on a
    unit of its own (`placement` apart).

    `draft_layers` is the depth of the draft model; its time is the scenario's `cost_ratio`, whatever its depth.
    """

    layers: int
    draft_length: int
    sampled: bool = False
    placement: str = "together"
    draft_layers: int = 1

    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    EXACT = True
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        check_models(self)

    @property
    def longest(self) -> int:
        """The most tokens that a round drafts."""
        return self.draft_length

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the target."""
        return self.longest + 1

    @property
    def units(self) -> int:
        """Compute units that it reserves."""
        return 2 if self.placement == "apart" else 1


def check_models(parameters: Any) -> None:
    """Refuse what no choice of a draft and a target may be."""
    checks.whole("layers", parameters.layers, 1, checks.MAX_LAYERS)
    checks.whole("draft_layers", parameters.draft_layers, 1, checks.MAX_LAYERS)
    checks.flag("sampled", parameters.sampled)
    checks.one_of("placement", parameters.placement, PLACEMENTS)


class Guess(NamedTuple):
    """A drafted token, and the output, at a position of it, that it was read from: the law that it was drawn from, if it was."""

    token: int
    output: Any
    offset: int = -1


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    drafter = yield from start(parameters, text)
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        guesses = yield from draft(drafter, text, min(parameters.draft_length, end - len(text) - 1))
        kept, token = yield from verify(Model("target", parameters.layers, 0), text, guesses, parameters.sampled)
        yield from commit(text, guesses, kept, token, stop)
        drafter.rows = min(drafter.rows, len(text) - 1)


@dataclass
class Model:
    """A model of the decoder's, the unit it runs on, and how many positions of the text its cache holds."""

    role: str
    layers: int
    unit: int
    rows: int = 0
    sampled: bool = False


def start(parameters: Any, text: Sequence[int]) -> Generator[Step, Any, Model]:
    """Let both models read the prompt but for its last token; the draft model."""
    rows = len(text) - 1
    drafter = Model("draft", parameters.draft_layers, parameters.units - 1, rows, getattr(parameters, "sampled", False))
    if rows:
        yield Forward("target", tuple(text[:-1]), 0, 0, parameters.layers)
        yield Forward("draft", tuple(text[:-1]), 0, 0, drafter.layers, unit=drafter.unit)
    return drafter


def draft(model: Model, text: Sequence[int], length: int) -> Generator[Step, Any, list[Guess]]:
    """Have so many tokens drafted behind the text, one after another."""
    guesses: list[Guess] = []
    ahead = list(text)
    for _ in range(length):
        # After a round whose drafts were all kept it has two tokens to read: the last of them, and the target's own.
        out = yield Forward(model.role, tuple(ahead[model.rows :]), model.rows, 0, model.layers, None, 1, model.unit)
        model.rows = len(ahead)
        guesses.append(Guess((yield Read(SAMPLED if model.sampled else GREEDY, out)), out))
        ahead.append(guesses[-1].token)
    return guesses


def verify(
    model: Model, text: Sequence[int], guesses: Sequence[Guess], sampled: bool
) -> Generator[Step, Any, tuple[int, int]]:
    """Check the drafted tokens in one pass: how many are kept, and the model's own token that follows them."""
    out = yield look(model, text, guesses)
    return (yield from judge(out, guesses, sampled))


def look(model: Model, text: Sequence[int], guesses: Sequence[Guess], unread: int = 1) -> Forward:
    """The pass over the drafted tokens, and over so many of the text's last that the model has not read."""
    width = (*text[-unread:], *[guess.token for guess in guesses])
    return Forward(model.role, width, len(text) - unread, 0, model.layers, None, len(guesses) + 1, model.unit)


def judge(out: Any, guesses: Sequence[Guess], sampled: bool) -> Generator[Step, Any, tuple[int, int]]:
    """What a pass over drafted tokens says of them: how many are kept, and the model's own token that follows them."""
    count = len(guesses)
    for index, guess in enumerate(guesses):
        offset = index - count - 1
        if not sampled:
            own = yield Read("next", out, offset)
            if own != guess.token:
                return index, own
            continue
        p = yield Read("chance", out, offset, token=guess.token)
        q = yield Read("chance", guess.output, guess.offset, token=guess.token)
        if not (yield Read("uniform", out, offset)) < p / q:
            return index, (yield Read("residual", out, offset, against=guess.output, against_offset=guess.offset))
    return count, (yield Read(SAMPLED if sampled else GREEDY, out))


def commit(text: list[int], guesses: Sequence[Guess], kept: int, token: int, stop: Collection[int] = ()) -> Steps:
    """Put out what a round gave: the drafted tokens that were kept and one more; nothing behind one that ends texts, of `stop`."""
    new = [*[guess.token for guess in guesses[:kept]], token]
    new = ended(new, stop)
    text += new
    yield Commit("round", tuple(new), len(guesses))
