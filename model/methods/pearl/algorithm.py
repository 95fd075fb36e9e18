"""PEARL: the draft model drafts while the target verifies, each on a unit of its own.

Algorithm 2 of [Liu2024]. Both models work at the same time, round by round; a round is over when both have done their part.

* pre-verify: nothing that was drafted waits to be verified. The draft model drafts gamma tokens; meanwhile the target reads the
  last token of the text, and what it says verifies the first of them.
* post-verify: the rest of the last draft waits. The target reads it; meanwhile the draft model goes on behind it with gamma tokens
  more, of which the target's last position verifies the first.

So the draft length adapts itself: a draft goes on for as long as all of it is kept, round after round, and one whose first token
is rejected is dropped before any other token of it is read by the target. Rejections, greedy and sampled, are those of speculative
decoding. Where all is kept, the target gives no token beyond the draft: it has read none of what comes next.

Drafts are cut to what remains to be decoded, and the last token is the target's own: nothing is drafted beside the pass that gives
it. What was kept goes to the draft model's unit, what was drafted comes back: a round that drafts takes the link there, the drafts
and the link back, or the target's pass where that takes longer. On offer in a round is what the target's pass reads of the draft;
the last token of a round counts as the target's own (`Commit`), whether that was drafted meanwhile or not.

[Liu2024] T. Liu et al. PEARL: Parallel Speculative Decoding with Adaptive Draft Length. arXiv:2408.11850.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.draft_model import MAX_DRAFT, SEPARATE, DraftModel
from model.methods.peak_demand import Demand
from model.methods.rounds import ReplayRounds, Rounds
from model.methods.speculative.algorithm import Guess, Model, commit, draft, look
from model.steps import GREEDY, SAMPLED, Fork, Forward, Join, LayerSpan, Read, Step, Steps

TARGET_UNIT, DRAFT_UNIT = 0, 1


@dataclass(frozen=True)
class Parameters(DraftModel):
    """A choice of PEARL: gamma = `draft_length` tokens are drafted in a round, and whether tokens are `sampled`.

    The paper takes gamma near 1 / cost_ratio, so that both models are done at the same time. `draft_layers` is the depth of the
    draft model, which is always on a unit of its own (`placement` separate).
    """

    layers: int
    draft_length: int
    sampled: bool = False
    placement: str = field(default=SEPARATE, kw_only=True)

    LABEL = "PEARL"
    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    EXACT = True
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 1, (MAX_DRAFT + 1) // 2)
        checks.flag("sampled", self.sampled)
        self.check_models()
        if self.placement != SEPARATE:
            raise checks.ParameterError(
                f"placement must be {SEPARATE!r}, got {self.placement!r}: the draft model drafts while the target verifies; leave"
                " it out, or choose method 'speculative', which does one after the other"
            )
        self.check_batching()

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Costs that a choice with these parameters has: always a link, as the models are on units of their own."""
        return cls.COSTS

    def check_law(self, outcome: str, law: Any) -> None:
        """Refuse laws by the place in a draft: a draft that goes on behind what is verified has no first place."""
        if isinstance(law, Rounds | ReplayRounds):
            raise checks.ParameterError(
                f"outcomes of {outcome} must be by output position with method pearl, whose drafts go on behind what waits to be"
                " verified, got some by the place in a draft; choose kind 'iid', 'markov', 'by-position' or 'replay'"
            )

    @property
    def longest_draft(self) -> int:
        """The most tokens that are drafted behind what is verified: those that wait, and those that are drafted meanwhile."""
        return 2 * self.draft_length - 1

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the target."""
        return self.draft_length

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """The most that it may want at once: both models work, and what goes between them goes there and back in turn."""
        return Demand(min(self.units, tokens))


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    target = Model("target", parameters.layers, TARGET_UNIT)
    drafter = Model("draft", parameters.draft_layers, DRAFT_UNIT, 0, parameters.sampled)
    waiting: list[Guess] = []  # drafted, and not verified: none in pre-verify
    home: Any = None  # the process that came back with the last draft
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        drafted: list[Guess] = []
        length = min(parameters.draft_length, end - len(text) - 1 - len(waiting))
        if length:
            ahead = [*text, *(guess.token for guess in waiting)]
            drafting = yield Fork((_drafting(drafter, ahead, length),), (DRAFT_UNIT,), (home,))
        out = yield look(target, text, waiting)
        if length:
            ((drafted, home),) = yield Join(tuple(drafting))
        kept, token, goes_on = yield from verify(out, waiting, drafted[:1], parameters.sampled)
        yield from commit(text, waiting, kept, token, stop)
        waiting = drafted[1:] if goes_on else []
        drafter.rows = min(drafter.rows, len(text) + len(waiting) - 1)


def _drafting(model: Model, text: Sequence[int], length: int) -> Steps:
    """The draft model's part of a round: what it drafted, and the process that brought it back, with the draft model's cache."""
    drafted = yield from draft(model, text, length)
    tasks = yield Fork((_back(),), (TARGET_UNIT,))
    yield Join(tuple(tasks))
    return drafted, tasks[0]


def _back() -> Steps:
    """A process that does nothing: it is there as soon as the link has been taken."""
    yield from ()


def verify(
    out: Any, waiting: Sequence[Guess], following: Sequence[Guess], sampled: bool
) -> Generator[Step, Any, tuple[int, int, bool]]:
    """What a pass over the text's last token and the waiting ones says of these and of the one that follows them, if there is one.

    How many of those that waited are kept; the token behind them; whether that is the drafted one, and drafting goes on behind it.
    """
    for kept, guess in enumerate((*waiting, *following)):
        own = yield from _in_place_of(guess, out, kept - len(waiting) - 1, sampled)
        if own is not None:
            return kept, own, False
    if following:
        return len(waiting), following[0].token, True
    return len(waiting), (yield Read(SAMPLED if sampled else GREEDY, out)), False


def _in_place_of(guess: Guess, out: Any, offset: int, sampled: bool) -> Generator[Step, Any, int | None]:
    """The target's token where it rejects the drafted one; None where it keeps it."""
    if not sampled:
        own: int = yield Read(GREEDY, out, offset)
        return None if own == guess.token else own
    p = yield Read("probability", out, offset, token=guess.token)
    q = yield Read("probability", guess.output, guess.offset, token=guess.token)
    if (yield Read("uniform", out, offset)) < p / q:
        return None
    rejected: int = yield Read("residual", out, offset, against=guess.output, against_offset=guess.offset)
    return rejected
