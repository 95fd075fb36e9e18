"""AMUSD: the draft model never stops drafting; the target, whenever it is free, verifies the drafted tokens that have arrived.

Asynchronous multi-device speculative decoding [McDanel2024]. Draft and target have a unit each, and neither waits for rounds of the
other.

* The draft model drafts one token per pass and sends each to the target's unit as soon as it exists.
* The target reads its last token and the drafted tokens that have arrived, any number of them. Before a pass it waits until at
  least `min_waiting` have arrived (2 in the authors' code; 0: it never waits before a pass). A token that arrives at the very time
  of the decision is left for the next pass.
* The prediction after the last of them decides on the next drafted token, for which the target waits if it has not arrived. So an
  accepted draft continues without interruption, and there is no bonus token, as with PEARL.
* After a rejection the target commits the accepted tokens and its own, and sends a rollback message. The draft model goes on from
  wrong tokens until the message arrives, one link time later. `draft_stop` sets what then happens to the draft pass in progress:
  it ends first (`pass`, as in the authors' code, which looks for messages between passes), or it is stopped (`rejection`). Then the
  draft model continues from the corrected token, with its cache rows of the accepted tokens.

`draft_length` bounds the drafted tokens that are not verified, as the draft model's unit knows it: it pauses there until a message
of accepted tokens arrives. A pass of the target reads at most `draft_length` - 1 drafted tokens. The authors' code has no such
bound: with one that is never reached the draft model never pauses.

Deviations from the authors' code, which decodes greedily: the target's own token after a completely accepted pass is not emitted
before the drafted token at its position has arrived. This makes sampling exact, and without link time it delays no pass. And after
a mismatch at that position the code decodes one token without drafts; here the target waits as after any rejection.

Nothing is drafted for the last position: the target generates the last token itself. Drafted tokens that are still to be verified
when the sequence ends at a stop token are dropped. The drafted tokens of a round are those that the target's pass reads; the last
token of a round counts as the target's own (`Commit`), even if it was drafted.

[McDanel2024] B. McDanel. AMUSD: Asynchronous Multi-Device Speculative Decoding for LLM Acceleration. arXiv:2410.17375; code:
github.com/BradMcDanel/AMUSD, `amusd.py`.
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
from model.methods.concurrent.unit_transfers import no_steps, returned_to
from model.methods.draft_model import MAX_DRAFT, SEPARATE, BudgetedDraft, DraftModel
from model.methods.peak_demand import Demand
from model.methods.proposals import Known, Proposal, Proposals
from model.methods.rounds.round_laws import MixedRounds, ReplayRounds, Rounds
from model.methods.speculative.algorithm import DraftedToken, Model, commit, draft, draft_model, verification_pass
from model.steps import Fork, Forward, Join, LayerSpan, Step, Steps, Stop

PASS, REJECTION = DRAFT_STOPS = ("pass", "rejection")
WAITING = 2
"""Drafted tokens for which the target waits before a pass, in the authors' code."""


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of AMUSD.

    Parameters
    ----------
    layers
        Layers of the target model.
    draft_length
        Largest number of drafted tokens that are not verified.
    sampled
        Sample tokens instead of greedy decoding.
    min_waiting
        Drafted tokens for which the target waits before a pass, unless fewer can still be drafted; below `draft_length`.
    draft_stop
        End of the draft pass in progress when a rollback message arrives: after it (`pass`), or at once (`rejection`).
    context_budget
        Largest number of cached positions of each sequence that a pass of the draft model reads; None: all.
    """

    layers: int
    draft_length: int
    sampled: bool = False
    placement: str = field(default=SEPARATE, kw_only=True)
    min_waiting: int = field(default=WAITING, kw_only=True)
    draft_stop: str = field(default=PASS, kw_only=True)

    LABEL = "AMUSD"
    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    EXACT = True
    TESTS_WHOLE_DRAFTS = False
    ALIASES = MappingProxyType({"max_draft_length": "draft_length"})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "draft_length", "cost_ratio"),
        needs=(("acceptance_rate",), ("cost_ratio",)),
        source="renewal of drafts at rejections; McDanel, arXiv:2410.17375, has no formula",
    )

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.whole("min_waiting", self.min_waiting, 0, checks.MAX_TOKENS)
        if self.min_waiting >= self.draft_length:
            raise checks.ParameterError(
                f"min_waiting must be below draft_length={self.draft_length}, got {self.min_waiting}: a pass reads at most"
                " draft_length - 1 drafted tokens; set a longer draft_length, or a smaller min_waiting"
            )
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        check_separate(self.placement)
        checks.one_of("draft_stop", self.draft_stop, DRAFT_STOPS)
        self.check_batching()

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Every draft length, at the acceptance of the first drafted token."""
        if known.units < 2:
            return Proposals(missing="a further device for the draft: --gpus")
        if not known.independent_draft:
            return Proposals(missing="a draft model; a head needs the target's states, so it cannot draft during the target's pass")
        outcomes = {"kind": "iid", "acceptance_rate": known.rates[0]}
        tables = (
            {"layers": known.layers, "draft_length": length, "min_waiting": min(WAITING, length - 1)}
            for length in known.draft_lengths if length
        )
        assumed = "the acceptance of the first drafted token holds at every position"
        return Proposals(tuple(Proposal(table, outcomes, assumed, f"K = {table['draft_length']}") for table in tables))

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Cost fields that apply: always with a link, as the models are on separate units."""
        return cls.COSTS

    def check_law(self, outcome: str, law: Any) -> None:
        """Reject laws by position within a draft: a draft that continues after unverified tokens has no first position."""
        if isinstance(law, Rounds | MixedRounds | ReplayRounds):
            raise checks.ParameterError(
                f"outcomes of {outcome} must be by output position with method amusd, whose drafts continue after unverified"
                " tokens, got outcomes by position within the draft; choose kind 'iid', 'markov', 'by-position', 'replay',"
                " 'published', 'reported' or 'engine-log'"
            )

    @property
    def stops_passes(self) -> bool:
        """True if a rollback message stops the draft pass in progress."""
        return self.draft_stop == REJECTION

    @property
    def longest_draft(self) -> int:
        """Largest number of unverified tokens."""
        return self.draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in one pass of the target."""
        return self.draft_length

    @property
    def serial(self) -> bool:
        """False: both models work at the same time."""
        return False

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand for units and links: both models work concurrently, and transfers may overlap: tokens and messages."""
        units = min(self.units, tokens)
        if units == 1:
            return Demand(1)
        return Demand(units, self.draft_length + 1 if cost.link else 1, "anywhere" if self.stops_passes else None)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Yield the steps that decode `tokens` tokens after a prompt of at least one, ending early at a token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    target, most = Model("target", parameters.layers, TARGET_UNIT), parameters.draft_length
    last = running = UnverifiedDraft()
    verified, goes_on = 0, False  # verified tokens of the running draft; whether it continues the sequence
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        left = end - 1 - len(sequence)  # tokens to draft: the target generates the last one
        if not goes_on:
            last, running, verified = running, UnverifiedDraft(running.home), 0
        if verified + min(most, left) > running.allowed:
            running.allowed = verified + min(most, left)
            if goes_on:
                message = _allow(running, running.allowed)
            else:  # the draft model has read the sequence but its last token; at the start it reads the prompt
                rows = len(sequence) - 1 if len(sequence) > len(prompt) else 0
                model = draft_model(parameters, DRAFT_UNIT, rows)
                message = _roll_back(last, running, model, tuple(sequence), parameters.stops_passes)
            running.messages = yield Fork((message,), (DRAFT_UNIT,), (running.home,))
        yield from running.wait(verified + min(parameters.min_waiting, left))
        waiting = (yield from running.arrived())[verified : verified + most - 1]
        out = yield verification_pass(target, sequence, waiting)
        kept, token, goes_on = yield from verify(out, waiting, running.following(verified + len(waiting)), parameters.sampled)
        yield from commit(sequence, waiting, kept, token, stop)
        verified += kept + 1
    yield Stop((*running.messages, *last.tasks, *running.tasks))


class UnverifiedDraft:
    """A draft that continues the verified sequence without end, until a rollback message replaces it."""

    def __init__(self, home: Any = None) -> None:
        # As known to the target's unit.
        self.tokens: list[DraftedToken] = []
        """Tokens that have arrived."""
        self.home = home
        """Process that returned last, of this draft or an earlier one; it holds the draft model's cache."""
        self.allowed = 0
        """Tokens that may be drafted."""
        self.messages: Sequence[Any] = ()
        """Process of the last message to the draft model's unit."""
        # As known to the draft model's unit.
        self.tasks: list[Any] = []
        """Process of each drafted token; it ends when the token arrives at the target's unit."""
        self.limit = 0
        """Tokens that may be drafted, by the last message that has arrived."""
        self.drafting = self.dropped = False
        self.paused: tuple[Any, Model, tuple[int, ...]] | None = None
        """Process with the draft model's cache, model and text, if the limit is reached."""

    def wait(self, count: int) -> Steps:
        """Wait until `count` tokens have arrived."""
        while len(self.tokens) < count:
            if len(self.tokens) == len(self.tasks):
                yield Join(tuple(self.messages))  # drafting goes on when it arrives
                assert len(self.tokens) < len(self.tasks)
            yield from self._receive()

    def arrived(self) -> Generator[Step, Any, list[DraftedToken]]:
        """Return the tokens that have arrived, without waiting."""
        while len(self.tokens) < len(self.tasks) and self.tasks[len(self.tokens)].ended:
            yield from self._receive()
        return self.tokens

    def following(self, index: int) -> Generator[Step, Any, list[DraftedToken]]:
        """Return the tokens from one on, and wait for it, if it is ever drafted."""
        yield from self.wait(min(index + 1, self.allowed))
        return self.tokens[index:]

    def _receive(self) -> Steps:
        ((token, self.home),) = yield Join((self.tasks[len(self.tokens)],))
        self.tokens.append(token)


def _drafting(draft_: UnverifiedDraft, model: Model, text: tuple[int, ...]) -> Generator[Step, Any, tuple[DraftedToken, Any]]:
    """Draft one token, start the process that drafts the next one, and send the token to the target's unit.

    A dropped draft ends with the pass in progress, and its tokens are not sent.
    """
    draft_.drafting = True
    (guess,) = yield from draft(model, text, 1)
    draft_.drafting = False
    if draft_.dropped:
        return guess, None
    text = (*text, guess.token)
    if len(draft_.tasks) < draft_.limit:
        draft_.tasks += yield Fork((_drafting(draft_, model, text),), (DRAFT_UNIT,))
    else:
        (keeper,) = yield Fork((no_steps(),), (DRAFT_UNIT,))
        draft_.paused = keeper, model, text
    return guess, (yield from returned_to(TARGET_UNIT))


def _allow(draft_: UnverifiedDraft, limit: int) -> Steps:
    """Message of accepted tokens: raise the limit of a draft, and continue it if it has paused."""
    draft_.limit = limit
    if draft_.paused is not None:
        (keeper, model, text), draft_.paused = draft_.paused, None
        yield Join((keeper,))
        draft_.tasks += yield Fork((_drafting(draft_, model, text),), (DRAFT_UNIT,), (keeper,))


def _roll_back(
    dropped: UnverifiedDraft, next_: UnverifiedDraft, model: Model, text: tuple[int, ...], stops_passes: bool
) -> Steps:
    """Rollback message: drop a draft, and begin the next one after the corrected token.

    A pass that would begin when the message arrives begins first.
    """
    next_.limit = next_.allowed
    yield Join((yield Fork((no_steps(),), (DRAFT_UNIT,))))
    dropped.dropped = True
    if stops_passes:
        yield Stop(tuple(dropped.tasks))
    elif dropped.drafting:
        yield Join((dropped.tasks[-1],))
    next_.tasks += yield Fork((_drafting(next_, model, text),), (DRAFT_UNIT,))
