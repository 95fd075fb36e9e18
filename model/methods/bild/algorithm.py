"""Big Little Decoder: a small model writes until it is unsure, a large one takes back what it would never have written.

Algorithm 1 of [Kim2023]. The small model hands over where the largest probability of its next token is below `fallback_threshold`;
that run gives no token. At `max_draft_length` tokens (Section 7.1.2) it hands over in any case. The large model reads what was
written in one pass, drops the first token whose cross-entropy is above `rollback_threshold` and all behind it, and writes a token
itself. Lossy: what the large model lets stand it need not have written. A fallback threshold of 0 is a window of a fixed length, a
rollback threshold of infinity never takes anything back: the paper's ablations.

* variant `paper` is Algorithm 1. After a rollback the released `code` has the large model run once more, over the tokens kept, the
  corrected one and the one before them, since its cache was not brought forward; it writes another token.
* with an `exit_layer` the small model is the large one's first layers (Section 4.4): what they computed is not computed again.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.base import checks
from model.methods.draft_model import MAX_DRAFT, DraftModel
from model.methods.formula_check import FormulaCheck
from model.methods.speculative.algorithm import Guess, Model, look, start
from model.steps import Commit, Forward, LayerSpan, Read, Step, Steps, ended

VARIANTS = ("paper", "code")
UNSURE, UNLIKELY = 0.5, 1.0
"""Thresholds where none are given: for worlds that say 0 or 1, and 0 or infinity."""


@dataclass(frozen=True)
class Parameters(DraftModel):
    """A choice of Big Little Decoder: G = `max_draft_length`, the two thresholds, the variant, and where its small model is.

    `fallback_threshold` is a probability, `rollback_threshold` a cross-entropy [nats]; where outcomes are given as rates there are
    none. `placement` separate puts the small model on a unit of its own; `draft_layers` is its depth.
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
    FORMULA_CHECK = FormulaCheck("bild", swept="fallback_threshold", rate="fallback_rate")

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
        """Costs that a choice with these parameters has: an early head where the small model is part of the large one."""
        early = table.get("exit_layer") is not None
        return tuple(name for name in super().costs_for(table) if early or name != "early_head")

    @classmethod
    def roles_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """The models beside the target that a choice has."""
        return cls.ROLES if table.get("exit_layer") is None else ()

    @property
    def handover_layer(self) -> int:
        """Layer that an early head reads: the last of a small model that is part of the large one."""
        return self.exit_layer or 0

    @property
    def reads_early(self) -> bool:
        """Whether tokens are read from layers below the last."""
        return self.exit_layer is not None

    def check_thresholds(self) -> None:
        """Refuse parameters that lack a threshold, by which real models decide."""
        for name, value in (("fallback_threshold", self.fallback_threshold), ("rollback_threshold", self.rollback_threshold)):
            if value is None:
                what = "is required: real models are judged by thresholds; give it with --set or --sweep"
                raise checks.ParameterError(f"{name} {what}")

    @property
    def longest_draft(self) -> int:
        """The most tokens that a segment drafts."""
        return self.max_draft_length

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the large model: behind a rollback one more than are kept and corrected."""
        return self.longest_draft + 1


class Draft(NamedTuple):
    """What the small model wrote, whether it stopped because it was unsure, and the outputs of all its passes."""

    guesses: list[Guess]
    unsure: bool
    outputs: list[Any]


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    large = Model("target", parameters.layers, 0)
    if parameters.exit_layer is None:
        small = yield from start(parameters, text)
    else:
        small = Model("target", parameters.exit_layer, 0, len(text) - 1)
        if small.rows:
            yield Forward("target", tuple(text[:-1]), 0, LayerSpan(0, parameters.layers))
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        written = yield from write(parameters, small, text, min(parameters.max_draft_length, end - len(text) - 1))
        if parameters.exit_layer is None:
            out = yield look(large, text, written.guesses)
        else:
            out = yield from _look_deeper(parameters, small, text, written)
        read = yield from _decide(parameters, large, text, written, out, stop)
        small.rows = min(small.rows, read)


def write(parameters: Parameters, model: Model, text: Sequence[int], length: int) -> Generator[Step, Any, Draft]:
    """Have the small model write at most so many tokens behind the text, until it is unsure."""
    threshold = UNSURE if parameters.fallback_threshold is None else parameters.fallback_threshold
    guesses: list[Guess] = []
    outputs: list[Any] = []
    ahead = list(text)
    while len(guesses) < length:
        out = yield Forward(model.role, tuple(ahead[model.rows :]), model.rows, model.span, heads=1, unit=model.unit)
        model.rows = len(ahead)
        outputs.append(out)
        token = yield Read("next", out)
        if (yield Read("confidence", out, token=token)) < threshold:
            return Draft(guesses, True, outputs)
        guesses.append(Guess(token, out))
        ahead.append(token)
    return Draft(guesses, False, outputs)


def _look_deeper(parameters: Parameters, model: Model, text: Sequence[int], written: Draft) -> Generator[Step, Any, Any]:
    """The large model's layers behind the small one's, over what these have read; the last token first goes through them too."""
    new = (text[-1], *[guess.token for guess in written.guesses])
    states = written.outputs
    if model.rows < len(text) + len(new) - 1:
        states = [*states, (yield Forward("target", new[-1:], model.rows, model.span))]
        model.rows = len(text) + len(new) - 1
    rest = LayerSpan(model.layers, parameters.layers)
    return (yield Forward("target", new, len(text) - 1, rest, tuple(states), len(new)))


def _decide(
    parameters: Parameters, large: Model, text: list[int], written: Draft, out: Any, stop: Collection[int]
) -> Generator[Step, Any, int]:
    """What of the tokens written stays; the large model's own token behind it; in the released code one more after a rollback.

    Returns how much of the text may have been read by the small model: nothing from the large model's token on.
    """
    threshold = UNLIKELY if parameters.rollback_threshold is None else parameters.rollback_threshold
    guesses = written.guesses
    kept = 0
    while kept < len(guesses):
        distance = yield Read("distance", out, kept - len(guesses) - 1, token=guesses[kept].token)
        if distance > threshold and (parameters.variant == "paper" or (yield _own(out, kept, guesses)) != guesses[kept].token):
            break
        kept += 1
    back = kept < len(guesses)
    new = [*[guess.token for guess in guesses[:kept]], (yield _own(out, kept, guesses))]
    new = ended(new, stop)
    text += new
    read = len(text) - 1
    yield Commit("rollback" if back else "fallback" if written.unsure else "cap", tuple(new), len(guesses))
    # What was taken back had room behind it for the large model's token: so has one more.
    if back and parameters.variant == "code" and text[-1] not in stop:
        unread = kept + 2
        out = yield Forward("target", tuple(text[-unread:]), len(text) - unread, large.span, heads=1, unit=large.unit)
        text.append((yield Read("next", out)))
        yield Commit("again", (text[-1],), 0)
    return read


def _own(out: Any, kept: int, guesses: Sequence[Guess]) -> Read:
    """The large model's own token behind so many of those written."""
    return Read("next", out, kept - len(guesses) - 1)
