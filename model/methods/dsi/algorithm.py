"""Distributed speculative inference (DSI): the draft model never waits, and several replicas of the target verify concurrently.

Algorithm 1 of [Timor2024] with two models. After each rejection, and at the start, the draft model drafts until the sequence ends,
and a first pass of the target reads the last token of the sequence: its prediction verifies the first drafted token. Every
`lookahead` drafted tokens start a further pass of the target, on the next replica in turn, before the tokens that precede them are
verified: pass i reads up to the drafted token i L, and its last prediction verifies the token after it. Results are processed in
order. A rejection stops all drafting and all passes of the target; drafting restarts after the corrected token. Tokens are
accepted and rejected as in speculative decoding, greedy and sampled. With lookahead 1 each drafted token has a pass, as in
Algorithm 1.

The paper assumes as many replicas as are ever busy, ceil(t_target / (L t_draft)), and no communication. Here both are finite:

* Units. The draft model and the process that decides are on unit 0, `verifiers` replicas of the target on the units after it. A
  pass whose replica has not yet returned its last result waits; the draft model does not, and its tokens wait.
* Links. The tokens of a pass, its result and the order to stop each take a link time. A replica works on rejected tokens until the
  order to stop arrives. Drafting restarts at once.
* Cache rows. At a restart all replicas have the rows of verified tokens: they travel with the tokens of a pass, over the same link
  (the paper leaves open how they arrive). Rows of tokens that are not verified yet are still being computed by other replicas, so a
  replica reads these tokens itself: one of V replicas reads up to V L tokens per pass, those that it has missed since its own last
  pass. Passes over more tokens may take longer (`verify_cost`, profiles).

The replica that found the rejection verifies first after it. A decision on a drafted token needs that token: if the draft model is
slower than the target, the decision waits for it. The last token is the target's own: nothing is drafted for its position.

[Timor2024] N. Timor et al. Distributed Speculative Inference (DSI): Speculation Parallelism for Provably Faster Lossless Language
Model Inference. ICLR 2025, arXiv:2405.14105.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.claim_bounds import ClaimRule
from model.methods.concurrent.concurrent_drafts import check_separate, verify
from model.methods.concurrent.unit_transfers import kept_on, returned_to, stop_order
from model.methods.draft_model import MAX_DRAFT, SEPARATE, BudgetedDraft, DraftModel
from model.methods.peak_demand import Demand
from model.methods.proposals import Known, Proposal, Proposals
from model.methods.rounds.round_laws import MixedRounds, ReplayRounds, Rounds
from model.methods.speculative.algorithm import DraftedToken, Model, commit, draft, draft_model
from model.steps import Fork, Forward, Join, LayerSpan, Step, Steps, Stop

DRAFT_UNIT = 0
"""Unit of the draft model and of the process that decides; the replicas of the target are on the units after it."""
MAX_OUTPUT = 2048
"""Most tokens of a decoding: closed form and paths have a table with a row for each position and a column for each pass."""


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of distributed speculative inference: every `lookahead` drafted tokens are verified on the next replica.

    `verifiers` is the number of replicas of the target, each a unit with the whole target. The paper needs
    ceil(t_target / (lookahead t_draft)) of them; with fewer, passes wait. `draft_layers` is the depth of the draft model, which
    always has a separate unit (`placement` separate); its passes read at most `context_budget` cached positions.
    """

    layers: int
    lookahead: int
    verifiers: int
    sampled: bool = False
    placement: str = field(default=SEPARATE, kw_only=True)

    LABEL = "distributed speculative inference"
    SHORT_LABEL = "DSI"
    OUTCOMES = ("accept",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    EXACT = True
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "cost_ratio"), needs=(("acceptance_rate",), ("cost_ratio",)),
        source="Algorithm 1 of Timor et al., ICLR 2025, arXiv:2405.14105",
    )
    TESTS_WHOLE_DRAFTS = False

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Every draft length as lookahead, on all units but the draft model's, at the acceptance of the first drafted token."""
        if known.units < 3:
            return Proposals(missing="two replicas of the target and a further device for the draft: --gpus")
        if not known.independent_draft:
            return Proposals(missing="a draft model; a head needs the target's states, so it cannot draft during the target's pass")
        outcomes = {"kind": "iid", "acceptance_rate": known.rates[0]}
        verifiers = known.units - 1
        tables = [{"layers": known.layers, "lookahead": length, "verifiers": verifiers} for length in known.draft_lengths]
        assumed = f"the acceptance of the first drafted token holds at every position; {verifiers} replicas of the target"
        return Proposals(tuple(Proposal(table, outcomes, assumed, f"lookahead {table['lookahead']}") for table in tables))

    def __post_init__(self) -> None:
        checks.whole("lookahead", self.lookahead, 1, MAX_DRAFT)
        checks.whole("verifiers", self.verifiers, 1, checks.MAX_UNITS - 1)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        check_separate(self.placement)
        self.check_batching()

    @classmethod
    def costs_for(cls, table: Any) -> tuple[str, ...]:
        """Cost fields that apply: always with a link, as the models are on separate units."""
        return cls.COSTS

    def check_law(self, outcome: str, law: Any) -> None:
        """Reject laws by position within a draft: a draft that never stops has no positions."""
        if isinstance(law, Rounds | MixedRounds | ReplayRounds):
            raise checks.ParameterError(
                f"outcomes of {outcome} must be by output position with method dsi, whose drafts continue after unverified"
                " tokens, got outcomes by position within the draft; choose kind 'iid', 'markov', 'by-position', 'replay',"
                " 'published', 'reported' or 'engine-log'"
            )

    def check_tokens(self, tokens: int) -> None:
        """Raise ParameterError for more tokens than the tables of rounds cover."""
        checks.whole("tokens with method dsi", tokens, 1, MAX_OUTPUT)

    @property
    def units(self) -> int:
        """Compute units that are reserved: one for the draft model, and one for each replica of the target."""
        return 1 + self.verifiers

    @property
    def target_replicas(self) -> int:
        """Units that each hold the whole target."""
        return self.verifiers

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens that one pass verifies."""
        return self.lookahead

    @property
    def most_unverified(self) -> int:
        """Largest number of drafted tokens that no pass has verified yet: drafting never waits."""
        return MAX_OUTPUT

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in one pass of the target: those since the last pass of the same replica."""
        return min(self.verifiers * self.lookahead, MAX_OUTPUT)

    def largest_pass_of(self, tokens: int) -> int:
        """Largest number of tokens in a pass of the target when `tokens` are decoded."""
        return min(self.largest_pass, tokens)

    @property
    def serial(self) -> bool:
        """False: all units work at the same time."""
        return False

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand for units and links, as upper bounds: a token to verify is on its way to, or from, every replica."""
        units = min(self.units, tokens)
        return Demand(units, 2 * units if cost.link else 1, "anywhere" if units > 1 else None)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Yield the steps that decode `tokens` tokens after a prompt of at least one, ending early at a token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    target = Model("target", parameters.layers, DRAFT_UNIT + 1)
    home = yield from _prefilled(target, prompt) if prompt[:-1] else returned_to(DRAFT_UNIT)
    drafter, draft_home, replica = draft_model(parameters, DRAFT_UNIT), None, 0
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        begun = len(sequence)
        going = Speculation(parameters, target, drafter, sequence, end, home, replica)
        yield from going.start(draft_home)
        while (yield from going.accepts_next(sequence, stop)):
            pass
        done = len(sequence) == end or sequence[-1] in stop
        yield from going.stop(at_once=done)
        home, replica = going.homes[-1], going.replica(len(going.homes) - 1)
        if not done:
            draft_home = going.drafting[len(sequence) - begun - 1]  # it has read all accepted tokens
            drafter.rows = len(sequence) - 1


class Speculation:
    """Drafting and verifying from a restart to the next rejection, as seen by the process that decides.

    Drafted token n is `guesses[n - 1]`. Each token is drafted by a separate process, which starts the next one. Pass i of the
    target reads up to drafted token min(i L, limit), where the last of `limit` drafted tokens precedes the last token of the
    sequence.
    """

    def __init__(
        self, parameters: Parameters, target: Model, drafter: Model, sequence: Sequence[int], end: int, home: Any, replica: int
    ) -> None:
        self.parameters, self.target, self.drafter = parameters, target, drafter
        self.ahead = list(sequence)
        """The sequence with all drafted tokens."""
        self.at = len(sequence) - 1
        """Position of the first token that the target has not read."""
        self.limit = end - len(sequence) - 1
        self.home = home
        """Process with the target's cache rows of all verified tokens."""
        self.first_replica = replica
        self.guesses: list[DraftedToken] = []
        self.drafting: list[Any] = []
        """Process that drafts each token."""
        self.passes: dict[int, Any] = {}
        """Process of each pass of the target that has been started."""
        self.homes: list[Any] = []
        """Process that returned the result of each pass that has been processed, with the cache rows of its replica."""

    def replica(self, number: int) -> int:
        """Replica that makes a pass: they take turns."""
        return (self.first_replica + number) % self.parameters.verifiers

    def last_read(self, number: int) -> int:
        """Last drafted token that a pass reads."""
        return min(number * self.parameters.lookahead, self.limit)

    def start(self, draft_home: Any) -> Steps:
        """Start drafting, with the draft model's cache of the process `draft_home`, and the first pass of the target."""
        yield from self._verify_if_ready(0)
        if self.limit:
            self.drafting += yield Fork((self._drafting(),), (DRAFT_UNIT,), (draft_home,))

    def _drafting(self) -> Steps:
        """Draft a token; start to draft the next one, and the pass of the target for which this token is the last."""
        drafted = yield from draft(self.drafter, self.ahead, 1)
        self.guesses += drafted
        self.ahead.append(drafted[0].token)
        number = -(-len(self.guesses) // self.parameters.lookahead)
        yield from self._verify_if_ready(number)
        if len(self.guesses) < self.limit:
            self.drafting += yield Fork((self._drafting(),), (DRAFT_UNIT,))

    def _verify_if_ready(self, number: int) -> Steps:
        """Start a pass of the target if all its tokens are drafted and the last result of its replica has been processed."""
        last, before = self.last_read(number), number - self.parameters.verifiers
        read_before = self.last_read(number - 1) if number else -1
        if last == read_before or len(self.guesses) < last or before >= len(self.homes):
            return
        unit = DRAFT_UNIT + 1 + self.replica(number)
        first = 0 if before < 0 else self.last_read(before) + 1  # tokens that the replica has not read; 0 is the sequence's last
        words = tuple(self.ahead[self.at + first : self.at + last + 1])
        step = Forward("target", words, self.at + first, self.target.span, None, last - read_before, unit)
        (self.passes[number],) = yield Fork((_verification(step),), (unit,), (self.home if before < 0 else self.homes[before],))

    def accepts_next(self, sequence: list[int], stop: Collection[int]) -> Generator[Step, Any, bool]:
        """Process the next result: commit its tokens, and return whether all were drafted, so that the speculation goes on."""
        number = len(self.homes)
        before = self.last_read(number - 1) if number else -1  # last token that the pass before has read
        last = self.last_read(number)
        for token in range(before + 1, last):
            yield Join((self.drafting[token],))
        ((out, home),) = yield Join((self.passes[number],))
        waiting = self.guesses[before + 1 : last]
        kept, token, goes_on = yield from verify(out, waiting, self._after(last), self.parameters.sampled)
        self.homes.append(home)
        accepted = before + 1 + kept + goes_on
        yield from kept_on(DRAFT_UNIT, home, *self.drafting[accepted - 1 : accepted])
        yield from commit(sequence, waiting, kept, token, stop)
        if not goes_on or sequence[-1] in stop:
            return False
        yield from self._verify_if_ready(number + self.parameters.verifiers)
        return True

    def _after(self, number: int) -> Generator[Step, Any, list[DraftedToken]]:
        """Wait for the drafted token after this one, if there is one."""
        if number < self.limit:
            yield Join((self.drafting[number],))
        return self.guesses[number : number + 1]

    def stop(self, *, at_once: bool) -> Steps:
        """Stop drafting, and the passes whose results are not needed; the replicas when the order arrives, or all at once."""
        running = [number for number in self.passes if number >= len(self.homes)]
        if len(self.guesses) < self.limit:
            yield Stop((self.drafting[-1],))
        if at_once:
            yield Stop(tuple(self.passes[number] for number in running))
            return
        if running:
            orders = tuple(stop_order(self.passes[number]) for number in running)
            yield Fork(orders, tuple(DRAFT_UNIT + 1 + self.replica(number) for number in running))


def _verification(step: Forward) -> Generator[Step, Any, tuple[Any, Any]]:
    """Make a pass of the target on its replica, and return its output and the process that arrives with it."""
    out = yield step
    return out, (yield from returned_to(DRAFT_UNIT))


def _prefilled(target: Model, prompt: Sequence[int]) -> Generator[Step, Any, Any]:
    """Read the prompt without its last token on the first replica; return the process that has the rows."""
    step = Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, target.layers), unit=target.unit)
    ((_, home),) = yield Join(tuple((yield Fork((_verification(step),), (target.unit,)))))
    return home
