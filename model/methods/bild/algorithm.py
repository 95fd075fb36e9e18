"""Big Little Decoder: a small model generates until it is unsure, then a large model rolls back unlikely tokens.

Algorithm 1 of [Kim2023]. The small model falls back to the large model if the largest probability of its next token is below
`fallback_threshold`; that pass emits no token. It also stops at `max_draft_length` tokens (Section 7.1.2). The large model reads
the drafted tokens in one pass, rolls back from the first token whose cross-entropy is above `rollback_threshold`, and emits a token
itself. The method is lossy: the large model may accept tokens that it would not have generated. The paper's ablations: a fallback
threshold of 0 is a window of fixed length, a rollback threshold of infinity never rolls back.

* variant `paper` is Algorithm 1. After a rollback the released `code` runs the large model once more, over the accepted tokens, the
  corrected one and the one before them, because its cache was not updated; it emits another token.
* with an `exit_layer` the small model consists of the large model's first layers (Section 4.4), whose states are reused.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from model.base import checks
from model.methods.claim_bounds import ClaimRule
from model.methods.draft_model import MAX_DRAFT, DraftModel
from model.methods.formula_check import FormulaCheck
from model.methods.proposals import Known, Proposals, needs_lossy
from model.methods.speculative.algorithm import DraftedToken, Model, draft_pass, start, verification_pass
from model.steps import Commit, DraftChain, DraftRounds, Forward, LayerSpan, Read, ReadEach, Step, Steps, ended

VARIANTS = ("paper", "code")
UNSURE, UNLIKELY = 0.5, 1.0
"""Default thresholds, for simulated confidences of 0 or 1 and distances of 0 or infinity."""


@dataclass(frozen=True)
class Parameters(DraftModel):
    """Parameters of Big Little Decoder.

    Parameters
    ----------
    layers
        Layers of the large model.
    max_draft_length
        Largest number of tokens that the small model drafts before the large model verifies them (G).
    fallback_threshold
        Probability below which the small model falls back. Left out if outcomes are rates.
    rollback_threshold
        Cross-entropy above which the large model rolls back [nats]. Left out if outcomes are rates.
    variant
        `paper` or `code`.
    exit_layer
        Layers of a small model that consists of the first layers of the large one. Left out: a separate small model.
    placement
        `colocated`: both models share a unit; `separate`: each has its own unit.
    draft_layers
        Layers of a separate small model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    sequences
        Sequences of a full batch.
    batching
        `lockstep` with several sequences.
    """

    layers: int
    max_draft_length: int = 10
    fallback_threshold: float | None = None
    rollback_threshold: float | None = None
    variant: str = "paper"
    exit_layer: int | None = None

    LABEL = "Big Little Decoder"
    SHORT_LABEL = "BiLD"
    OUTCOMES = ("decision",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link", "early_head")
    EXACT = False
    CLAIMS = ClaimRule(
        terms=("fallback_rate", "rollback_rate", "draft_length", "cost_ratio"),
        needs=(("fallback_rate",), ("rollback_rate",), ("cost_ratio",)),
        source="Algorithm 1 of Kim et al., NeurIPS 2023, arXiv:2302.07863",
    )
    REMOVED_KEYS = MappingProxyType({
        **DraftModel.REMOVED_KEYS,
        "context_budget": "tokens of the small model are part of the output, which would change with the budget; leave it out, or"
        " choose method 'speculative', whose output does not",
    })
    FORMULA_CHECK = FormulaCheck("bild", swept="fallback_threshold", rate="fallback_rate")

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Nothing: its fallback and rollback rates are unknown without a decision record of the two models."""
        return Proposals(
            missing=needs_lossy(known) or "fallback and rollback rates, which `calibrate log` measures and `sim run` takes"
        )

    def __post_init__(self) -> None:
        self.check_batching()
        checks.whole("max_draft_length", self.max_draft_length, 1, MAX_DRAFT)
        if self.fallback_threshold is not None:
            checks.number("fallback_threshold", self.fallback_threshold, 0, 1)
        if self.rollback_threshold is not None and self.rollback_threshold != float("inf"):
            checks.number("rollback_threshold", self.rollback_threshold, 0)
        checks.one_of("variant", self.variant, VARIANTS)
        self.check_models()
        if self.exit_layer is not None:
            self._check_exit()

    def _check_exit(self) -> None:
        checks.whole("exit_layer", self.exit_layer, 1, self.layers - 1, "layers-1")
        for name, plain in (("variant", "paper"), ("placement", "colocated"), ("draft_layers", 1)):
            if getattr(self, name) != plain:
                raise checks.ParameterError(
                    f"{name} must be {plain!r} with an exit_layer, where the small model is part of the large one,"
                    f" got {getattr(self, name)!r}; leave it out"
                )

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; `early_head` only with an exit layer."""
        early = table.get("exit_layer") is not None
        return tuple(name for name in super().costs_for(table) if early or name != "early_head")

    @classmethod
    def roles_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Roles of the models besides the target: none with an exit layer."""
        return cls.ROLES if table.get("exit_layer") is None else ()

    @property
    def handover_layer(self) -> int:
        """Layer that the early head reads: the last layer of a small model that is part of the large one; 0: none."""
        return self.exit_layer or 0

    @property
    def reads_early(self) -> bool:
        """True if tokens are predicted from layers below the last."""
        return self.exit_layer is not None

    def check_thresholds(self) -> None:
        """Raise ParameterError if a threshold that real models need for their decisions is missing."""
        for name, value in (("fallback_threshold", self.fallback_threshold), ("rollback_threshold", self.rollback_threshold)):
            if value is None:
                what = "is required: decisions of real models need thresholds; give it with --set or --sweep"
                raise checks.ParameterError(f"{name} {what}")

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a segment."""
        return self.max_draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the large model."""
        return self.longest_draft + 1


class Draft(NamedTuple):
    """Tokens drafted by the small model, whether it stopped because it was unsure, and the outputs of all its passes."""

    guesses: list[DraftedToken]
    unsure: bool
    outputs: list[Any]


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    large = Model("target", parameters.layers, 0)
    if parameters.exit_layer is None:
        small = yield from start(parameters, sequence)
    else:
        small = Model("target", parameters.exit_layer, 0, len(sequence) - 1)
        if small.rows:
            yield Forward("target", tuple(sequence[:-1]), 0, LayerSpan(0, parameters.layers))
    if parameters.exit_layer is None and parameters.variant == "paper" and not stop:
        first, verify_none = draft_pass(small, tuple(sequence[small.rows :])), verification_pass(large, sequence, ())
        kinds, thresholds = ("rollback", "fallback", "cap"), (_fallback_threshold(parameters), _rollback_threshold(parameters))
        if (yield DraftRounds(first, verify_none, parameters.max_draft_length, tokens, True, kinds, *thresholds)) is not None:
            return
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        written = yield from write(parameters, small, sequence, min(parameters.max_draft_length, end - len(sequence) - 1))
        if parameters.exit_layer is None:
            out = yield verification_pass(large, sequence, written.guesses)
        else:
            out = yield from _look_deeper(parameters, small, sequence, written)
        read = yield from _decide(parameters, large, sequence, written, out, stop)
        small.rows = min(small.rows, read)


def write(parameters: Parameters, model: Model, sequence: Sequence[int], length: int) -> Generator[Step, Any, Draft]:
    """Draft at most `length` tokens after the sequence with the small model, until it is unsure."""
    threshold = _fallback_threshold(parameters)
    guesses: list[DraftedToken] = []
    outputs: list[Any] = []
    if length and parameters.exit_layer is None:  # whose states of all passes are needed
        words = tuple(sequence[model.rows :])
        chain = yield DraftChain(draft_pass(model, words), length, threshold)
        if chain is not None:
            model.rows += len(words) + len(chain.tokens) + chain.unsure - 1
            return Draft([DraftedToken(token, None) for token in chain.tokens], chain.unsure, outputs)
    ahead = list(sequence)
    while len(guesses) < length:
        out = yield draft_pass(model, tuple(ahead[model.rows :]))
        model.rows = len(ahead)
        outputs.append(out)
        token = yield Read("next", out)
        if (yield Read("confidence", out, token=token)) < threshold:
            return Draft(guesses, True, outputs)
        guesses.append(DraftedToken(token, out))
        ahead.append(token)
    return Draft(guesses, False, outputs)


def _look_deeper(parameters: Parameters, model: Model, sequence: Sequence[int], written: Draft) -> Generator[Step, Any, Any]:
    """Run the large model's remaining layers on the small model's states; run the last token through the first layers before."""
    new = (sequence[-1], *[guess.token for guess in written.guesses])
    states = written.outputs
    if model.rows < len(sequence) + len(new) - 1:
        states = [*states, (yield Forward("target", new[-1:], model.rows, model.span))]
        model.rows = len(sequence) + len(new) - 1
    rest = LayerSpan(model.layers, parameters.layers)
    return (yield Forward("target", new, len(sequence) - 1, rest, tuple(states), len(new)))


def _decide(
    parameters: Parameters, large: Model, sequence: list[int], written: Draft, out: Any, stop: Collection[int]
) -> Generator[Step, Any, int]:
    """Commit the accepted tokens and the large model's own; in the variant `code` one more after a rollback.

    Return the number of positions that the small model may have read: all before the large model's token.
    """
    threshold = _rollback_threshold(parameters)
    guesses = written.guesses
    kept, count = 0, len(guesses)
    distances: Any = None
    if count:
        distances = yield ReadEach("distance", out, -count - 1, count, tuple([guess.token for guess in guesses]))
    while kept < count:
        if distances is None:
            distance = yield Read("distance", out, kept - count - 1, token=guesses[kept].token)
        else:
            distance = distances[kept]
        if distance > threshold and (parameters.variant == "paper" or (yield _own(out, kept, guesses)) != guesses[kept].token):
            break
        kept += 1
    back = kept < len(guesses)
    new = [*[guess.token for guess in guesses[:kept]], (yield _own(out, kept, guesses))]
    new = ended(new, stop)
    sequence += new
    read = len(sequence) - 1
    yield Commit("rollback" if back else "fallback" if written.unsure else "cap", tuple(new), len(guesses))
    # A rolled-back token leaves room for one more token of the large model.
    if back and parameters.variant == "code" and sequence[-1] not in stop:
        unread = kept + 2
        out = yield Forward("target", tuple(sequence[-unread:]), len(sequence) - unread, large.span, heads=1, unit=large.unit)
        sequence.append((yield Read("next", out)))
        yield Commit("again", (sequence[-1],), 0)
    return read


def _fallback_threshold(parameters: Parameters) -> float:
    return UNSURE if parameters.fallback_threshold is None else parameters.fallback_threshold


def _rollback_threshold(parameters: Parameters) -> float:
    return UNLIKELY if parameters.rollback_threshold is None else parameters.rollback_threshold


def _own(out: Any, kept: int, guesses: Sequence[DraftedToken]) -> Read:
    """Read of the large model's own token after `kept` drafted tokens."""
    return Read("next", out, kept - len(guesses) - 1)
