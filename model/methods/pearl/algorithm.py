"""PEARL: the draft model drafts while the target verifies, each on a unit of its own.

Algorithm 2 of [Liu2024]. Both models work at the same time, round by round; a round is over when both have done their part.

* pre-verify: nothing that was drafted waits to be verified. The draft model drafts gamma tokens; meanwhile the target reads the
  last token of the text, and what it says verifies the first of them.
* post-verify: the rest of the last draft waits. The target reads it; meanwhile the draft model goes on behind it with gamma tokens
  more, of which the target's last position verifies the first.

So the draft length adapts itself: a draft goes on for as long as all of it is kept, round after round, and one whose first token
is rejected is dropped before any other token of it is read by the target. Rejections, greedy and sampled, are those of speculative
decoding. Where all is kept, the target gives no token beyond the draft: it has read none of what comes next.

`draft_stop` says when a draft in progress is stopped that continues a rejected token.

* `round`, as in the paper's engine: rounds go in lock-step. Its draft is made as a whole and dropped then.
* `rejection`: a round is over with the rejection. That of a token that waited is known with the target's pass. That of the first
  drafted one needs that token, too: it is sent as soon as it is there, ahead of the others. Where that is kept the round waits for
  the rest, as in lock-step. The order to stop is the order to draft after what was kept, with which the next round begins: so the
  draft model works on what was rejected for the link that this takes, then begins anew at once, from its rows of what was kept.
  Tokens and rounds are those of lock-step.

Drafts are cut to what remains to be decoded, and the last token is the target's own: nothing is drafted beside the pass that gives
it. What was kept goes to the draft model's unit, what was drafted comes back: a round that drafts takes the link there, the drafts
and the link back, or the target's pass where that takes longer (a round that rejects, of `rejection`: the link there, one draft
pass and the link back, or the target's pass; or that alone). On offer in a round is what the target's pass reads of the draft;
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
from model.methods.pearl.finite_pearl import stopped_drafts
from model.methods.rounds import ReplayRounds, Rounds
from model.methods.speculative.algorithm import Guess, Model, commit, draft, look
from model.steps import GREEDY, SAMPLED, Fork, Forward, Join, LayerSpan, Read, Step, Steps, Stop

TARGET_UNIT, DRAFT_UNIT = 0, 1
ROUND, REJECTION = DRAFT_STOPS = ("round", "rejection")


@dataclass(frozen=True)
class Parameters(DraftModel):
    """A choice of PEARL: gamma = `draft_length` tokens are drafted in a round, and whether tokens are `sampled`.

    `draft_stop` says when a rejected draft in progress is stopped: at the end of its `round`, which waits for it (as in the
    paper's engine), or at the `rejection`, with which the round ends.

    The paper takes gamma near 1 / cost_ratio, so that both models are done at the same time. `draft_layers` is the depth of the
    draft model, which is always on a unit of its own (`placement` separate).
    """

    layers: int
    draft_length: int
    sampled: bool = False
    placement: str = field(default=SEPARATE, kw_only=True)
    draft_stop: str = field(default=ROUND, kw_only=True)

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
        checks.one_of("draft_stop", self.draft_stop, DRAFT_STOPS)
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
    def lockstep(self) -> bool:
        """Whether a round waits for its draft in any case."""
        return self.draft_stop == ROUND

    @property
    def longest_draft(self) -> int:
        """The most tokens that are drafted behind what is verified: those that wait, and those that are drafted meanwhile."""
        return 2 * self.draft_length - 1

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the target."""
        return self.draft_length

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """The most that it may want at once: both models work, and what goes between them goes there and back in turn.

        Where rejections stop drafts, the first token goes back ahead of the others and the next order goes out at once: these may
        meet, and what is stopped may be in the middle of a pass.
        """
        units = min(self.units, tokens)
        if self.lockstep:
            return Demand(units)
        inside, meeting = stopped_drafts(self.draft_length, tokens, cost)
        return Demand(units, 1 + meeting, "anywhere" if inside else None)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    target, lockstep = Model("target", parameters.layers, TARGET_UNIT), parameters.lockstep
    waiting: list[Guess] = []  # drafted, and not verified: none in pre-verify
    running, rows = _Draft(None), 0  # the last draft, and how many rows of what the draft model has read stay
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        last, running = running, _Draft(running.home)
        length = min(parameters.draft_length, end - len(text) - 1 - len(waiting))
        if length:
            ahead = [*text, *(guess.token for guess in waiting)]
            model = Model("draft", parameters.draft_layers, DRAFT_UNIT, rows, parameters.sampled)
            body = _drafting(model, ahead, length) if lockstep else _first_ahead(model, ahead, length, last, running)
            running.begun = yield Fork((body,), (DRAFT_UNIT,), (running.home,))
        out = yield look(target, text, waiting)
        if lockstep:
            yield from running.whole()
        kept, token, goes_on = yield from verify(out, waiting, running.first(), parameters.sampled)
        yield from commit(text, waiting, kept, token, stop)
        if goes_on and text[-1] not in stop:
            yield from running.whole()
        waiting = running.guesses[1:] if goes_on else []
        rows = len(text) + len(waiting) - 1
    if not lockstep:
        yield running.stop()


class _Draft:
    """A draft in progress, as the target's process knows it: who makes it, and what has come back of it."""

    def __init__(self, home: Any) -> None:
        self.begun: Sequence[Any] = ()
        """The process that begins it, if anything is drafted."""
        self.going_on: Sequence[Any] = ()
        """The one that drafts on after the first token, once there is one."""
        self.guesses: list[Guess] = []
        self.home = home
        """The process that came back last, of this draft or one before: with the draft model's cache."""

    def first(self) -> Generator[Step, Any, list[Guess]]:
        """Wait for the first token, if any is drafted; what has come back."""
        if self.begun and not self.guesses:
            ((self.guesses, self.home),) = yield Join(tuple(self.begun))
        return self.guesses

    def whole(self) -> Steps:
        """Wait for all of it."""
        yield from self.first()
        if self.going_on:
            ((more, self.home),) = yield Join(tuple(self.going_on))
            self.guesses += more

    def stop(self) -> Stop:
        """End all processes that still work on it."""
        return Stop((*self.begun, *self.going_on))


_Made = tuple[list[Guess], Any]
"""What was drafted, and the process that brought it back."""


def _drafting(model: Model, text: Sequence[int], length: int) -> Generator[Step, Any, _Made]:
    """The draft model's part of a round in lock-step: a draft that comes back as a whole."""
    drafted = yield from draft(model, text, length)
    return drafted, (yield from _brought_back())


def _first_ahead(model: Model, text: Sequence[int], length: int, last: _Draft, running: _Draft) -> Generator[Step, Any, _Made]:
    """Its part where rejections stop it: the last draft is stopped, if it is still in progress; the first token of the running one
    comes back by itself, while another process drafts on.
    """
    yield last.stop()
    drafted = yield from draft(model, text, 1)
    if length > 1:
        running.going_on = yield Fork((_drafting(model, [*text, drafted[0].token], length - 1),), (DRAFT_UNIT,))
    return drafted, (yield from _brought_back())


def _brought_back() -> Generator[Step, Any, Any]:
    """Bring what was drafted to the target's unit; the process that is there then, with the draft model's cache."""
    tasks = yield Fork((_back(),), (TARGET_UNIT,))
    yield Join(tuple(tasks))
    return tasks[0]


def _back() -> Steps:
    """A process that does nothing: it is there as soon as the link has been taken."""
    yield from ()


def verify(
    out: Any, waiting: Sequence[Guess], arriving: Generator[Step, Any, Sequence[Guess]], sampled: bool
) -> Generator[Step, Any, tuple[int, int, bool]]:
    """What a pass over the text's last token and the waiting ones says of these and of the one that follows them, if there is one.

    That one is the first of what is `arriving`, which is waited for where all that waited are kept. How many of those that waited
    are kept; the token after them; whether that is the drafted one, and drafting goes on after it.
    """
    for kept, guess in enumerate(waiting):
        own = yield from _in_place_of(guess, out, kept - len(waiting) - 1, sampled)
        if own is not None:
            return kept, own, False
    following = yield from arriving
    if not following:
        return len(waiting), (yield Read(SAMPLED if sampled else GREEDY, out)), False
    own = yield from _in_place_of(following[0], out, -1, sampled)
    return len(waiting), following[0].token if own is None else own, own is None


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
