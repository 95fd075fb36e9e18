"""PEARL: the draft model drafts while the target model verifies, on separate units.

Algorithm 2 of [Liu2024]. Both models work concurrently, round by round; a round ends when both have finished.

* pre-verify: no drafted token is waiting. The draft model drafts gamma tokens; meanwhile the target reads the last token of the
  sequence, and its prediction verifies the first of them.
* post-verify: the rest of the previous draft is waiting. The target reads it; meanwhile the draft model drafts gamma more tokens
  after it, and the prediction at the target's last position verifies the first of these.

The draft length is adaptive: a draft continues over several rounds while all of its tokens are accepted. A draft whose first token
is rejected is dropped before the target reads its other tokens. Tokens are accepted and rejected as in speculative decoding, greedy
and sampled. When all tokens are accepted there is no bonus token: the target has not yet read the token that follows.

`draft_stop` sets when a draft in progress stops if it continues a rejected token.

* `round`, as in the paper's engine: each round waits for its whole draft. A rejected draft is completed and then dropped.
* `rejection`: the round ends with the rejection. The target's pass alone decides on waiting tokens. The decision on the first
  drafted token also needs that token, which is sent as soon as it exists, ahead of the others; if it is accepted, the round waits
  for the rest of the draft, as with `round`. The next round begins by sending the accepted tokens to the draft model, which is also
  the order to stop: the draft model works on rejected tokens for the link time of this transfer, then restarts from its cache rows
  of accepted tokens. Tokens and rounds are those of `round`.

A server may allow fewer tokens in a round (`DraftLimit`): then fewer are drafted, and waiting tokens beyond them are dropped.

Drafts are cut at the end of the sequence, and the target generates the last token itself: nothing is drafted during that pass.
Accepted tokens go to the draft model's unit and drafted tokens come back. A round that drafts therefore takes the longer of the
target's pass and link + drafts + link. With `rejection`, a round that rejects the first drafted token takes the longer of the
target's pass and link + one draft pass + link; a round that rejects a waiting token takes the target's pass. The drafted tokens
of a round are those that the target's pass reads; the last token of a round counts as the target's own (`Commit`), even if it was
drafted during the round.

[Liu2024] T. Liu et al. PEARL: Parallel Speculative Decoding with Adaptive Draft Length. arXiv:2408.11850.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.claim_bounds import ClaimRule
from model.methods.concurrent.concurrent_drafts import DRAFT_UNIT, TARGET_UNIT, check_separate, verify
from model.methods.concurrent.unit_transfers import returned_to
from model.methods.draft_model import MAX_DRAFT, SEPARATE, BudgetedDraft, DraftModel
from model.methods.peak_demand import Demand
from model.methods.pearl.finite_pearl import stopped_drafts
from model.methods.proposals import Known, Proposal, Proposals
from model.methods.rounds.round_laws import MixedRounds, ReplayRounds, Rounds
from model.methods.speculative.algorithm import DraftedToken, Model, commit, draft, draft_model, verification_pass
from model.steps import DraftLimit, Fork, Forward, Join, LayerSpan, Step, Steps, Stop

ROUND, REJECTION = DRAFT_STOPS = ("round", "rejection")


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of PEARL: gamma = `draft_length` tokens drafted per round, `sampled` or greedy.

    `draft_stop` sets when a rejected draft in progress stops: at the end of its `round`, which waits for it (as in the paper's
    engine), or at the `rejection`, which ends the round.

    The paper sets gamma near 1 / cost_ratio, so that both models finish at the same time. `draft_layers` is the depth of the draft
    model, which always has a separate unit (`placement` separate); its passes read at most `context_budget` cached positions.
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
    TESTS_WHOLE_DRAFTS = False
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "draft_length", "cost_ratio"),
        needs=(("acceptance_rate",), ("cost_ratio",)),
        source="rounds of Algorithm 2 of Liu et al., arXiv:2408.11850",
    )

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Every draft length, at the acceptance of the first drafted token."""
        if known.units < 2:
            return Proposals(missing="a further device for the draft: --gpus")
        if not known.independent_draft:
            return Proposals(missing="a draft model; a head needs the target's states, so it cannot draft during the target's pass")
        outcomes = {"kind": "iid", "acceptance_rate": known.rates[0]}
        assumed = "the acceptance of the first drafted token holds at every position"
        return Proposals(tuple(
            Proposal({"layers": known.layers, "draft_length": length}, outcomes, assumed, f"K = {length}")
            for length in known.draft_lengths
        ))  # fmt: skip

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 1, (MAX_DRAFT + 1) // 2)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        check_separate(self.placement)
        checks.one_of("draft_stop", self.draft_stop, DRAFT_STOPS)
        self.check_batching()

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Cost fields that apply: always with a link, as the models are on separate units."""
        return cls.COSTS

    def check_law(self, outcome: str, law: Any) -> None:
        """Reject laws by position within a draft: a draft that continues after unverified tokens has no first position."""
        if isinstance(law, Rounds | MixedRounds | ReplayRounds):
            raise checks.ParameterError(
                f"outcomes of {outcome} must be by output position with method pearl, whose drafts continue after unverified"
                " tokens, got outcomes by position within the draft; choose kind 'iid', 'markov', 'by-position', 'replay',"
                " 'published', 'reported' or 'engine-log'"
            )

    @property
    def times_change_work(self) -> bool:
        """True if a rejection stops the draft."""
        return not self.lockstep

    @property
    def lockstep(self) -> bool:
        """True if every round waits for its whole draft."""
        return self.draft_stop == ROUND

    @property
    def longest_draft(self) -> int:
        """Largest number of unverified tokens: those that wait and those drafted in the same round."""
        return 2 * self.draft_length - 1

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in one pass of the target."""
        return self.draft_length

    @property
    def serial(self) -> bool:
        """False: both models work at the same time."""
        return False

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand for units and links: both models work concurrently, and transfers between them alternate in direction.

        If rejections stop drafts, the first drafted token is sent ahead of the others and the next order follows at once: transfers
        may then overlap, and a draft pass may be stopped midway.
        """
        units = min(self.units, tokens)
        if self.lockstep:
            return Demand(units)
        midway, overlapping = stopped_drafts(self.draft_length, tokens, self.draft_costs(cost))
        return Demand(units, 1 + overlapping, "anywhere" if midway else None)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Yield the steps that decode `tokens` tokens after a prompt of at least one, ending early at a token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    target, lockstep = Model("target", parameters.layers, TARGET_UNIT), parameters.lockstep
    waiting: list[DraftedToken] = []  # drafted, not yet verified: empty in pre-verify
    running, rows = _Draft(None), 0  # the last draft; rows of the draft model's cache that stay valid
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        last, running = running, _Draft(running.home)
        most = yield DraftLimit(parameters.draft_length)
        del waiting[most:]
        length = min(most, end - len(sequence) - 1 - len(waiting))
        if length:
            ahead = [*sequence, *(guess.token for guess in waiting)]
            model = draft_model(parameters, DRAFT_UNIT, min(rows, len(ahead) - 1))
            body = _drafting(model, ahead, length) if lockstep else _first_ahead(model, ahead, length, last, running)
            running.begun = yield Fork((body,), (DRAFT_UNIT,), (running.home,))
        out = yield verification_pass(target, sequence, waiting)
        if lockstep:
            yield from running.whole()
        kept, token, goes_on = yield from verify(out, waiting, running.first(), parameters.sampled)
        yield from commit(sequence, waiting, kept, token, stop)
        if goes_on and sequence[-1] not in stop:
            yield from running.whole()
        waiting = running.guesses[1:] if goes_on else []
        read = len(sequence) + len(waiting) - 1
        rows = read if length else min(rows, read)
    if not lockstep:
        yield running.stop()


class _Draft:
    """A draft in progress, as seen by the target's process: its processes, and the drafted tokens received so far."""

    def __init__(self, home: Any) -> None:
        self.begun: Sequence[Any] = ()
        """Process that drafts the first token, or the whole draft if rounds wait for it; empty if nothing is drafted."""
        self.going_on: Sequence[Any] = ()
        """Process that drafts the tokens after the first; empty before it starts."""
        self.guesses: list[DraftedToken] = []
        self.home = home
        """Process that returned last, of this draft or an earlier one; it holds the draft model's cache."""

    def first(self) -> Generator[Step, Any, list[DraftedToken]]:
        """Wait for the first token, if any is drafted; return the tokens received."""
        if self.begun and not self.guesses:
            ((self.guesses, self.home),) = yield Join(tuple(self.begun))
        return self.guesses

    def whole(self) -> Steps:
        """Wait for the whole draft."""
        yield from self.first()
        if self.going_on:
            ((more, self.home),) = yield Join(tuple(self.going_on))
            self.guesses += more

    def stop(self) -> Stop:
        """Stop all processes that still work on this draft."""
        return Stop((*self.begun, *self.going_on))


_Drafted = tuple[list[DraftedToken], Any]
"""Drafted tokens, and the process that returned them."""


def _drafting(model: Model, sequence: Sequence[int], length: int) -> Generator[Step, Any, _Drafted]:
    """Draft model's part of a round that waits for its whole draft."""
    drafted = yield from draft(model, sequence, length)
    return drafted, (yield from returned_to(TARGET_UNIT))


def _first_ahead(
    model: Model, sequence: Sequence[int], length: int, last: _Draft, running: _Draft
) -> Generator[Step, Any, _Drafted]:
    """Draft model's part of a round that a rejection may stop.

    Stop the last draft if it is still in progress; return the first token of the new one while another process drafts the rest.
    """
    yield last.stop()
    drafted = yield from draft(model, sequence, 1)
    if length > 1:
        running.going_on = yield Fork((_drafting(model, [*sequence, drafted[0].token], length - 1),), (DRAFT_UNIT,))
    return drafted, (yield from returned_to(TARGET_UNIT))
