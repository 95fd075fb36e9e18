"""Hierarchical speculative decoding: a small model drafts for a medium one, and what the medium makes of it the large one checks.

"First, gamma tokens are generated sequentially using the small model. The medium model then processes the resulting gamma + 1
prefixes in parallel. If n tokens are accepted, the medium model sequentially generates the remaining gamma - n tokens. These
prefixes are then evaluated in parallel by the large model" [Deck]. The sentence can be read in more than one way:

* `literal`: as it stands. What the medium's parallel pass says of token n + 1 is thrown away, and the token decoded again.
* `reuse`: that pass gives token n + 1, as in any speculative decoding; only gamma - n - 1 are left to be generated.
* `bonus`: as `reuse`, and where n = gamma the medium's own token behind the draft is offered too, gamma + 1 in all.
* `recursive`: the medium decodes speculatively, with inner drafts of its own, until there are `draft_length` tokens.

Greedy decoding is exact in all of them. Sampled decoding is exact if the large model tests a token against the law that it was
drawn from. A kept token and the residual one that replaces a rejected one have the medium's law q together, not each by itself.
`literal` replaces a rejected token by a fresh one from q, so its tokens have the law min(q_S, q) + (1 - beta) q, beta being the
chance that the small model's token is kept, and the large model still tests them against q: the output is biased, and `EXACT` is
false.

[Deck] N. Tulsian, V. Goyal, R. Aggarwal. Speculative decoding (slides), "Hierarchical speculative decoding".
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.methods.draft_model import MAX_DRAFT, DraftModel
from model.methods.speculative.algorithm import Guess, Model, commit, draft, judge, look, start, verify
from model.steps import Forward, Step, Steps

READINGS = ("literal", "reuse", "bonus", "recursive")


@dataclass(frozen=True)
class Parameters(DraftModel):
    """A choice of hierarchical decoding: gamma = `draft_length` at both levels, and how the deck is read (`reading`).

    With `recursive`, `draft_length` is how many tokens the medium model offers to the large one, and `inner_draft_length` how many
    the small one drafts for the medium. `placement` separate puts each model on a unit of its own. `draft_layers` and
    `medium_layers` are depths; times are the scenario's `cost_ratio` and `medium_cost_ratio`.
    """

    layers: int
    draft_length: int
    reading: str = "literal"
    inner_draft_length: int | None = None
    sampled: bool = False
    medium_layers: int = 1

    LABEL = "three models"
    SHORT_LABEL = "hierarchical"
    OUTCOMES = ("accept", "medium_accept")
    ROLES = ("draft", "medium")
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"medium": ("target", "accept"), "draft": ("medium", "medium_accept")})
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})
    EXACT = True

    def __post_init__(self) -> None:
        self.check_batching()
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.one_of("reading", self.reading, READINGS)
        if self.reading == "recursive":
            if self.inner_draft_length is None:
                raise checks.ParameterError(
                    "inner_draft_length must be given for reading 'recursive', got none; it is how many tokens the small model"
                    " drafts for the medium one"
                )
            checks.whole("inner_draft_length", self.inner_draft_length, 0, MAX_DRAFT)
        elif self.inner_draft_length is not None:
            given = checks.shown(self.inner_draft_length)
            raise checks.ParameterError(
                f"inner_draft_length must be left out for reading {self.reading!r}, got {given}; only 'recursive' has inner drafts"
            )
        checks.flag("sampled", self.sampled)
        self.check_models()
        checks.whole("medium_layers", self.medium_layers, 1, checks.MAX_LAYERS)

    @property
    def exact(self) -> bool:
        """Whether the output is the large model's own; see above for the one that is not."""
        return not (self.sampled and self.reading == "literal")

    @property
    def longest_draft(self) -> int:
        """The most tokens that are offered to the large model in a round."""
        return self.draft_length + (self.reading == "bonus")

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the large model."""
        return self.longest_draft + 1


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    small = yield from start(parameters, text, parameters.sampled)
    medium = Model("medium", parameters.medium_layers, min(1, parameters.units - 1), small.rows, parameters.sampled)
    if medium.rows:
        yield Forward("medium", tuple(text[:-1]), 0, medium.span, unit=medium.unit)
    target = Model("target", parameters.layers, 0)
    offer = _recursively if parameters.reading == "recursive" else _at_once
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        room = end - len(text) - 1  # the large model gives the last token itself
        guesses = yield from offer(parameters, small, medium, text, room)
        kept, token = yield from verify(target, text, guesses, parameters.sampled)
        yield from commit(text, guesses, kept, token, stop)
        _forget(text, small, medium)


def _at_once(
    parameters: Parameters, small: Model, medium: Model, text: Sequence[int], room: int
) -> Generator[Step, Any, list[Guess]]:
    """One draft of the small model, one pass of the medium over it, and token by token what is missing."""
    count = min(parameters.draft_length, room)
    if not count:
        return []
    guesses = yield from _corrected(small, medium, text, count)
    if parameters.reading == "literal":
        del guesses[-1]
    del guesses[min(parameters.longest_draft, room) :]
    ahead = [*text, *[guess.token for guess in guesses]]
    _forget(ahead, medium)
    return guesses + (yield from draft(medium, ahead, count - len(guesses)))


def _recursively(
    parameters: Parameters, small: Model, medium: Model, text: Sequence[int], room: int
) -> Generator[Step, Any, list[Guess]]:
    """Speculative decoding of the medium model by the small one, until exactly as many tokens as are to be offered are there."""
    assert parameters.inner_draft_length is not None
    count = min(parameters.draft_length, room)
    guesses: list[Guess] = []
    ahead = list(text)
    while len(guesses) < count:
        new = yield from _corrected(small, medium, ahead, min(parameters.inner_draft_length, count - len(guesses) - 1))
        guesses += new
        ahead += [guess.token for guess in new]
        _forget(ahead, small, medium)
    return guesses


def _corrected(small: Model, medium: Model, text: Sequence[int], length: int) -> Generator[Step, Any, list[Guess]]:
    """A draft of the small model, as far as the medium keeps it, and the medium's own token: all of them of the medium's law."""
    drafted = yield from draft(small, text, length)
    out = yield look(medium, text, drafted, len(text) - medium.rows)
    medium.rows = len(text) + length
    kept, token = yield from judge(out, drafted, medium.sampled)
    tokens = [*[guess.token for guess in drafted[:kept]], token]
    small.rows = min(small.rows, len(text) + kept)  # what it read behind these is not what the text will be
    return [Guess(token, out, index - length - 1) for index, token in enumerate(tokens)]


def _forget(text: Sequence[int], *models: Model) -> None:
    """The last token is still to be read, and nothing behind it counts."""
    for model in models:
        model.rows = min(model.rows, len(text) - 1)
