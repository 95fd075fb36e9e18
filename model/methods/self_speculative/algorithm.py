"""Self-speculative decoding: some layers of the model draft tokens, all layers verify them.

LayerSkip [Elhoushi2024]: a drafted token is the prediction of an exit head after `exit_layer` layers. The verification continues
all drafted tokens from there through the other layers in one pass: the keys and values of the first layers, and their hidden
states, are kept, not made again. Only the last drafted token has not been through the first layers yet. Tokens are accepted or
rejected as in speculative decoding, so the output has exactly the target's distribution.

With `reuse = false` the verification runs all layers over all tokens again, as where drafting and verifying do not share states:
transformers' `assistant_early_exit`, and Draft & Verify [Zhang2024], whose draft leaves out layers in the middle
(`skipped_layers`) and reads the model's own head after the last one. Hidden states after a gap are not those of the model, so
they cannot be reused.

With a `context_budget` a draft reads only some of the cached positions, the first few and the latest: MagicDec [Sadhukhan2025],
whose draft runs all layers (`exit_layer` = `layers`). It saves no weights, only reads of the cache, which take most of the time in
large batches at long context. Its states are not the model's own either, so the verification runs all layers.

[Elhoushi2024] M. Elhoushi et al. LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding. ACL 2024,
arXiv:2404.16710.
[Zhang2024] J. Zhang et al. Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding. ACL 2024,
arXiv:2309.08168.
[Sadhukhan2025] R. Sadhukhan et al. MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with
Speculative Decoding. ICLR 2025, arXiv:2408.11049.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.interpret.simulated_answers import EARLY_LAYERS
from model.methods.claim_bounds import NO_DRAFT, ClaimRule
from model.methods.draft_model import MAX_DRAFT, BudgetedDraft
from model.methods.method_parameters import CONTINUOUS, LOCKSTEP
from model.methods.proposals import Known, Proposals
from model.methods.speculative.algorithm import DraftedToken, accept_or_reject, commit
from model.steps import GREEDY, SAMPLED, DraftLimit, Forward, LayerSpan, Read, Step, Steps


@dataclass(frozen=True)
class Parameters(BudgetedDraft):
    """Parameters of self-speculative decoding.

    Parameters
    ----------
    layers
        Layers of the model.
    exit_layer
        Layer after which the draft is read: by an exit head; after the last layer, with `skipped_layers` or a `context_budget`, by
        the model's own head.
    draft_length
        Drafted tokens per round (gamma).
    reuse
        Verify from the hidden states of the first layers; False: run all layers again over all drafted tokens.
    skipped_layers, first_skipped
        Number of layers before `exit_layer` that a draft skips, and the first of them (from 0); None: those in the middle. Needs
        `reuse` False.
    sampled
        Sample tokens instead of greedy decoding.
    sequences
        Sequences of a full batch.
    batching
        `continuous` or `lockstep`.
    context_budget
        Largest number of cached positions of each sequence that a draft reads; None: all. Needs `reuse` False.
    """

    layers: int
    exit_layer: int
    draft_length: int
    reuse: bool = True
    skipped_layers: int = 0
    first_skipped: int | None = None
    sampled: bool = False

    LABEL = "self-speculative decoding"
    SHORT_LABEL = "self-speculative"
    OUTCOMES = ("accept",)
    COSTS = ("verify_cost", "early_head")
    IMITATES = MappingProxyType({EARLY_LAYERS: ("target", "accept")})
    EXACT = True
    BATCHINGS = (CONTINUOUS, LOCKSTEP)
    REFUSAL_REASON = "drafts of a static batch are not implemented for exit heads"
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})
    CLAIMS = ClaimRule(
        terms=(
            "acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length", "cost_ratio", "layers",
            "exit_layer",
        ),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"), ("cost_ratio", "exit_layer")),
        source="Elhoushi et al., ACL 2024, arXiv:2404.16710, with the bound of drafts that cost a share of the layers",
        names={
            "magicdec": NO_DRAFT, "layerskip": NO_DRAFT, "self-speculation": NO_DRAFT, "self-speculative": NO_DRAFT,
            "self speculative decoding": NO_DRAFT, "draft & verify": NO_DRAFT,
        },
        fixed_drafts=True, readings={"acceptance_rate": "draft_acceptance_rate"},
    )  # fmt: skip

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Nothing: acceptance rates of exit heads are not those of a draft."""
        return Proposals(missing="acceptance of the model's own exit heads: `sim run self-speculative` takes it")

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 2, checks.MAX_LAYERS)
        checks.whole("skipped_layers", self.skipped_layers, 0)
        self.check_budgets()
        cheaper = self.skipped_layers or self.context_budget is not None
        last, bound = (self.layers, "layers") if cheaper else (self.layers - 1, "layers - 1")
        checks.whole("exit_layer", self.exit_layer, 1, last, bound)
        checks.whole("skipped_layers", self.skipped_layers, 0, self.exit_layer - 1, "exit_layer - 1")
        if self.first_skipped is not None:
            if not self.skipped_layers:
                raise checks.ParameterError(
                    f"first_skipped needs skipped_layers, the number of layers to skip from layer {self.first_skipped} on"
                )
            checks.whole("first_skipped", self.first_skipped, 0, self.drafting_layers, "exit_layer - skipped_layers")
        checks.whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        checks.flag("reuse", self.reuse)
        if self.reuse and self.skipped_layers:
            raise checks.ParameterError(
                f"reuse must be false with skipped_layers={self.skipped_layers}, after which states are not the model's own"
            )
        if self.reuse and self.context_budget is not None:
            raise checks.ParameterError(
                f"reuse must be false with context_budget={self.context_budget}: states of a draft that reads less of the context"
                " are not the model's own; set reuse = false"
            )
        checks.flag("sampled", self.sampled)
        self.check_batching()

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a round."""
        return self.draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target."""
        return self.draft_length + 1

    @property
    def handover_layer(self) -> int:
        """Layer after which the draft is read; with `reuse` the verification starts from its hidden states."""
        return self.exit_layer

    @property
    def reads_early(self) -> bool:
        """True if an exit head drafts."""
        return self.draft_length > 0 and self.exit_layer < self.layers

    @property
    def overrun(self) -> int:
        """Positions after the end that a pass may reach."""
        return 0 if self.cut else self.draft_length

    @property
    def cut(self) -> bool:
        """True if the last drafts are cut to the remaining tokens; False in continuous batching, as in speculative decoding."""
        return self.sequences == 1 or self.batching != CONTINUOUS

    @property
    def drafting_layers(self) -> int:
        """Number of layers that a draft runs."""
        return self.exit_layer - self.skipped_layers

    @property
    def early(self) -> LayerSpan:
        """The layers that draft.

        >>> Parameters(32, 32, 4, reuse=False, skipped_layers=12).early  # the 12 in the middle
        LayerSpan(first=0, last=32, gaps=((10, 22),), kv_only=False)
        """
        if not self.skipped_layers:
            return LayerSpan(0, self.exit_layer)
        first = self.drafting_layers // 2 if self.first_skipped is None else self.first_skipped
        return LayerSpan(0, self.exit_layer, ((first, first + self.skipped_layers),))

    @property
    def late(self) -> LayerSpan:
        """The other layers."""
        return LayerSpan(self.exit_layer, self.layers)

    @property
    def whole(self) -> LayerSpan:
        """All layers."""
        return LayerSpan(0, self.layers)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    if len(sequence) > 1:
        yield Forward("target", tuple(sequence[:-1]), 0, parameters.whole)
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        room = end - len(sequence) - 1
        length = yield DraftLimit(min(parameters.draft_length, room) if parameters.cut else parameters.draft_length)
        guesses = yield from draft(parameters, sequence, length)
        out = yield from verification(parameters, sequence, guesses)
        kept, token = yield from accept_or_reject(out, guesses[:room], parameters.sampled, -len(guesses) - 1)
        yield from commit(sequence, guesses, kept, token, stop)


def draft(parameters: Parameters, sequence: Sequence[int], length: int) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft `length` tokens after the sequence, each by a pass of the drafting layers over one token."""
    guesses: list[DraftedToken] = []
    token, at = sequence[-1], len(sequence) - 1
    for place in range(length):
        out = yield Forward(
            "target", (token,), at + place, parameters.early, heads=1, within_step=True, context_budget=parameters.context_budget
        )
        token = yield Read(SAMPLED if parameters.sampled else GREEDY, out)
        guesses.append(DraftedToken(token, out))
    return guesses


def verification(parameters: Parameters, sequence: Sequence[int], guesses: Sequence[DraftedToken]) -> Generator[Step, Any, Any]:
    """Run the last token of the sequence and the drafted tokens through the layers that they have not passed; return the output."""
    words, at = (sequence[-1], *[guess.token for guess in guesses]), len(sequence) - 1
    if not guesses or not parameters.reuse:
        return (yield Forward("target", words, at, parameters.whole, heads=len(words)))
    last = yield Forward("target", words[-1:], at + len(guesses), parameters.early, within_step=True)
    states = (*[guess.output for guess in guesses], last)
    return (yield Forward("target", words, at, parameters.late, states, heads=len(words)))
