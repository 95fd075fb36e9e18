"""Hierarchical speculative decoding: a small model drafts for a medium model, which drafts for the large model.

"First, gamma tokens are generated sequentially using the small model. The medium model then processes the resulting gamma + 1
prefixes in parallel. If n tokens are accepted, the medium model sequentially generates the remaining gamma - n tokens. These
prefixes are then evaluated in parallel by the large model" [Deck]. This can be interpreted in several ways (`reading`):

* `literal`: as written. The medium's own prediction of token n + 1 from its parallel pass is discarded; the token is decoded again.
* `reuse`: that pass gives token n + 1, as in usual speculative decoding; only gamma - n - 1 tokens remain to be generated.
* `bonus`: as `reuse`, and for n = gamma the medium's bonus token is offered too, gamma + 1 tokens in all.
* `recursive`: the medium model decodes speculatively, with inner drafts, until there are `draft_length` tokens.

Greedy decoding is exact in all of them. Sampled decoding is exact if the large model tests a token against the distribution that it
was sampled from. An accepted token and the residual token that replaces a rejected one together have the medium's distribution q,
but neither alone. `literal` replaces a rejected token by a new sample from q, so its tokens have the distribution
min(q_S, q) + (1 - beta) q, where beta is the probability that the small model's token is accepted. The large model still tests them
against q, so the output is biased and `exact` is false.

[Deck] N. Tulsian, V. Goyal, R. Aggarwal. Speculative decoding (slides), "Hierarchical speculative decoding".
[Sun2024b] H. Sun et al. TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding. COLM
2024, arXiv:2404.11912.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.methods.claim_bounds import ClaimRule
from model.methods.draft_model import MAX_DRAFT, BudgetedDraft, DraftModel
from model.methods.method_parameters import ContextBudget
from model.methods.proposals import Known, Proposals
from model.methods.speculative.algorithm import (
    DraftedToken,
    Model,
    accept_or_reject,
    commit,
    draft,
    draft_model,
    start,
    verification_pass,
    verify,
)
from model.steps import Forward, Step, Steps

READINGS = ("literal", "reuse", "bonus", "recursive")


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of hierarchical decoding.

    Parameters
    ----------
    layers
        Layers of the large model.
    draft_length
        Tokens that the medium model offers to the large one per round (gamma); except for `recursive` also the draft length of the
        small model.
    reading
        `literal`, `reuse`, `bonus` or `recursive`.
    inner_draft_length
        Draft length of the small model, for `recursive` only.
    sampled
        Sample tokens instead of greedy decoding.
    placement
        `colocated`: all models share a unit; `separate`: each has its own unit.
    draft_layers, medium_layers
        Layers of the small and the medium model. Their times are set by the scenario's `cost_ratio` and `medium_cost_ratio`.
    sequences
        Sequences of a full batch.
    batching
        `lockstep` with several sequences.
    context_budget, medium_context_budget
        Largest number of cached positions of each sequence that a pass of the small or the medium model reads, also where it tests
        the small model's tokens; None: all. TriForce [Sun2024b] has both, the smaller one for the small model.
    """

    layers: int
    draft_length: int
    reading: str = "literal"
    inner_draft_length: int | None = None
    sampled: bool = False
    medium_layers: int = 1
    medium_context_budget: int | None = None

    LABEL = "three models"
    SHORT_LABEL = "hierarchical"
    OUTCOMES = ("accept", "medium_accept")
    ROLES = ("draft", "medium")
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"medium": ("target", "accept"), "draft": ("medium", "medium_accept")})
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length"),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"),),
        source="Theorem 3.8 of Leviathan et al., ICML 2023, arXiv:2211.17192, with free drafts",
        readings={"acceptance_rate": "draft_acceptance_rate"},
    )
    EXACT = True

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Nothing: the medium model and its acceptance are choices that only a scenario states."""
        return Proposals(missing="a medium model and its acceptance, which `sim run` takes")

    def __post_init__(self) -> None:
        self.check_batching()
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.one_of("reading", self.reading, READINGS)
        if self.reading == "recursive":
            if self.inner_draft_length is None:
                raise checks.ParameterError(
                    "inner_draft_length must be given for reading 'recursive', got none; it is the number of tokens that the small"
                    " model drafts for the medium one"
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
        self.check_budgets()

    @property
    def context_budgets(self) -> tuple[ContextBudget, ...]:
        """Budgets of both smaller models."""
        if self.medium_context_budget is None:
            return super().context_budgets
        return (*super().context_budgets, ContextBudget("medium_context_budget", "medium", self.medium_context_budget))

    @property
    def exact(self) -> bool:
        """True if the output has the large model's distribution: all but sampled `literal`."""
        return not (self.sampled and self.reading == "literal")

    @property
    def longest_draft(self) -> int:
        """Largest number of tokens that are offered to the large model in a round."""
        return self.draft_length + (self.reading == "bonus")

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the large model."""
        return self.longest_draft + 1


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    small = yield from start(parameters, sequence)
    medium = draft_model(parameters, min(1, parameters.units - 1), small.rows, "medium")
    if medium.rows:
        yield Forward("medium", tuple(sequence[:-1]), 0, medium.span, unit=medium.unit)
    target = Model("target", parameters.layers, 0)
    offer = _recursively if parameters.reading == "recursive" else _at_once
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room = end - len(sequence) - 1  # the large model emits the last token itself
        guesses = yield from offer(parameters, small, medium, sequence, room)
        kept, token = yield from verify(target, sequence, guesses, parameters.sampled)
        yield from commit(sequence, guesses, kept, token, stop)
        _forget(sequence, small, medium)


def _at_once(
    parameters: Parameters, small: Model, medium: Model, sequence: Sequence[int], room: int
) -> Generator[Step, Any, list[DraftedToken]]:
    """One draft of the small model, one pass of the medium model over it, and single-token passes for the missing tokens."""
    count = min(parameters.draft_length, room)
    if not count:
        return []
    guesses = yield from _corrected(small, medium, sequence, count)
    if parameters.reading == "literal":
        del guesses[-1]
    del guesses[min(parameters.longest_draft, room) :]
    ahead = [*sequence, *[guess.token for guess in guesses]]
    _forget(ahead, medium)
    return guesses + (yield from draft(medium, ahead, count - len(guesses)))


def _recursively(
    parameters: Parameters, small: Model, medium: Model, sequence: Sequence[int], room: int
) -> Generator[Step, Any, list[DraftedToken]]:
    """Speculative decoding with the medium model as target, until the number of tokens to offer is reached."""
    assert parameters.inner_draft_length is not None
    count = min(parameters.draft_length, room)
    guesses: list[DraftedToken] = []
    ahead = list(sequence)
    while len(guesses) < count:
        new = yield from _corrected(small, medium, ahead, min(parameters.inner_draft_length, count - len(guesses) - 1))
        guesses += new
        ahead += [guess.token for guess in new]
        _forget(ahead, small, medium)
    return guesses


def _corrected(small: Model, medium: Model, sequence: Sequence[int], length: int) -> Generator[Step, Any, list[DraftedToken]]:
    """The accepted tokens of a draft of the small model and the medium's own token; all have the medium's distribution."""
    drafted = yield from draft(small, sequence, length)
    out = yield verification_pass(medium, sequence, drafted, len(sequence) - medium.rows)
    medium.rows = len(sequence) + length
    kept, token = yield from accept_or_reject(out, drafted, medium.sampled)
    tokens = [*[guess.token for guess in drafted[:kept]], token]
    small.rows = min(small.rows, len(sequence) + kept)  # rows after these belong to rejected tokens
    return [DraftedToken(token, out, index - length - 1) for index, token in enumerate(tokens)]


def _forget(sequence: Sequence[int], *models: Model) -> None:
    """Roll back the caches to the positions before the last token."""
    for model in models:
        model.rows = min(model.rows, len(sequence) - 1)
