"""SSD: while the target verifies a draft, the draft model prepares the next drafts for the likely outcomes [Kumar2026].

An outcome of a verification is the number k of accepted tokens and the target's own token after them. While the target verifies K
drafted tokens, the draft model, on a separate unit,

* reads the last token of the sequence and all drafted tokens in one pass, which gives its distribution after each of them;
* takes the likeliest tokens of each as the target's own: F_k after k accepted tokens, without the drafted token, whose rejection
  ends the draft there, and F_K after the whole draft;
* drafts K tokens after each of these outcomes, in K passes over all of them together: B = F_0 + ... + F_K sequences.

If the outcome is among them (a hit), the next draft is there when the verification ends. Else (a miss) the backup is used:

* `draft`: the draft model drafts K tokens just in time, while the target waits;
* `none`: the next pass of the target reads no drafted token, and drafts are prepared for its only outcome.

As in the paper's engine, the next round begins when the prepared drafts are complete, after a hit and after a miss. They are sent
to the target's unit. A round therefore takes the longer of the target's pass and link + preparation + link; a draft just in time
adds link + drafts + link. Drafts are cut at the end of the sequence, as in speculative decoding; the first draft is that of a
miss.

Candidates are the draft model's likeliest tokens, also in sampling. Sampling that changes the draft's distribution for more hits
(Saguaro sampling) is left out.

[Kumar2026] T. Kumar, T. Dao, A. May. Speculative Speculative Decoding. arXiv:2603.03251.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.claim_bounds import ClaimRule
from model.methods.concurrent.concurrent_drafts import DRAFT_UNIT, TARGET_UNIT, check_separate
from model.methods.concurrent.unit_transfers import returned_to
from model.methods.draft_model import MAX_DRAFT, SEPARATE, BudgetedDraft, DraftModel
from model.methods.peak_demand import Demand
from model.methods.proposals import Known, Proposal, Proposals
from model.methods.speculative.algorithm import DraftedToken, Model, accept_or_reject, commit, draft, draft_model, verification_pass
from model.outcomes.position_ranks import MAX_RANK
from model.steps import GREEDY, SAMPLED, Batch, Fork, Forward, Join, LayerSpan, Read, Step, Steps, Stop

DRAFT, NONE = BACKUPS = ("draft", "none")
PROPOSED_FAN_OUTS = (2, 4, 8)
"""Fan-outs that advice evaluates besides 1."""


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of SSD.

    Parameters
    ----------
    draft_length
        Drafted tokens per round (K).
    fan_out
        Outcomes for which a draft is prepared after k = 0, ..., K accepted tokens: one number for all, or a list of K + 1
        numbers. A draft that is cut short, or empty, has the last number after all of its tokens.
    backup
        After a miss: `draft` just in time, or verify `none`.
    sampled
        Sampled instead of greedy decoding.
    context_budget
        Largest number of cached positions of each sequence, or branch of it, that a pass of the draft model reads; None: all.
    """

    layers: int
    draft_length: int
    fan_out: int | tuple[int, ...]
    backup: str = DRAFT
    sampled: bool = False
    placement: str = field(default=SEPARATE, kw_only=True)

    LABEL = "speculative speculative decoding"
    SHORT_LABEL = "SSD"
    OUTCOMES = ("position_rank",)
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    EXACT = True
    TESTS_WHOLE_DRAFTS = False
    ALIASES = MappingProxyType({"num_speculative_tokens": "draft_length"})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length", "cost_ratio"),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"), ("cost_ratio",)),
        source="walltime of Kumar et al., arXiv:2603.03251, with hits only, and rejections that each end a round",
        names={"saguaro": "", "speculative speculative decoding": ""},
    )

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Every draft length with each of `PROPOSED_FAN_OUTS`, as far as ranks are known, and each backup.

        Without rank rates there is a branch for each number of accepted tokens, and all outcomes after a rejection count as misses.
        """
        if known.units < 2:
            return Proposals(missing="a further device for the draft: --gpus")
        if not known.independent_draft:
            return Proposals(missing="a draft model; a head needs the target's states, so it cannot draft during the target's pass")
        ranks = (known.rates[0],) if known.rank_rates is None else known.rank_rates[0]
        assumed = (
            "the acceptance of the first drafted token holds at every position, and outcomes after a rejection count as misses"
            if known.rank_rates is None
            else "the rank rates of depth 1 hold at every position"
        )
        fan_outs = [1, *(count for count in PROPOSED_FAN_OUTS if count < len(ranks))]
        return Proposals(tuple(
            Proposal(
                {"layers": known.layers, "draft_length": length, "fan_out": count, "backup": backup},
                {"kind": "ranks", "rank_rates": [*ranks, 0.0]}, assumed,
                f"K = {length}, F = {count}" + (", no backup" if backup == NONE else ""),
            )
            for length in known.draft_lengths if length for count in fan_outs for backup in BACKUPS
        ))  # fmt: skip

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        check_separate(self.placement)
        checks.one_of("backup", self.backup, BACKUPS)
        given: Any = self.fan_out
        if isinstance(given, tuple):
            if len(given) != self.draft_length + 1:
                raise checks.ParameterError(
                    f"fan_out must have draft_length + 1 = {self.draft_length + 1} numbers, one for each number of accepted tokens,"
                    f" got {len(given)}"
                )
            for index, count in enumerate(given):
                checks.whole(f"fan_out[{index}]", count, 1, MAX_RANK - 1)
        else:
            checks.whole("fan_out", given, 1, MAX_RANK - 1)
        self.check_batching()

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Cost fields that apply: always with a link, as the models are on separate units."""
        return cls.COSTS

    def check_vocabulary(self, size: int) -> None:
        """Raise ParameterError for more outcomes than there are: all tokens, after a rejection but the drafted one."""
        for index, count in enumerate(self.fan_outs):
            most = size if index == self.draft_length else size - 1
            if count > most:
                raise checks.ParameterError(
                    f"fan_out after {index} accepted tokens must be at most {most} with a vocabulary of {size} tokens, got {count};"
                    " prepare fewer drafts"
                )

    @property
    def fan_outs(self) -> tuple[int, ...]:
        """Fan-out by the number of accepted tokens, shape (draft_length + 1,)."""
        given = self.fan_out
        return given if isinstance(given, tuple) else (given,) * (self.draft_length + 1)

    @property
    def branches(self) -> int:
        """Largest number of drafts that are prepared in a round (B)."""
        return sum(self.fan_outs)

    @property
    def largest_rank(self) -> int:
        """Largest rank of a token for which a draft is prepared: after a rejection the drafted token, of rank 1, is left out."""
        return max(*(count + 1 for count in self.fan_outs[:-1]), self.fan_outs[-1])

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens that a pass verifies."""
        return self.draft_length

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in one pass: of the target over a draft, or of the draft model over all branches."""
        return max(self.draft_length + 1, self.branches)

    @property
    def serial(self) -> bool:
        """False: both models work at the same time."""
        return False

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand for units and links: transfers follow one another."""
        return Demand(min(self.units, tokens))

    def branch_plan(self, drafted: int, left: int) -> list[tuple[int, int]]:
        """Number of branches and tokens of each, after 0, ..., `drafted` accepted tokens; `left` tokens are to be generated yet.

        >>> Parameters(4, 2, (3, 2, 1)).branch_plan(drafted=2, left=4)  # after two accepted tokens the target generates the last
        [(3, 2), (2, 1), (0, 0)]
        """
        counts = [*self.fan_outs[:drafted], self.fan_outs[-1]]
        lengths = [min(self.draft_length, left - accepted - 2) for accepted in range(drafted + 1)]
        return [(count, length) if length > 0 else (0, 0) for count, length in zip(counts, lengths, strict=True)]


Outcome = tuple[int, int]
"""Outcome of a verification: the number of accepted tokens, and the target's own token after them."""
Prepared = dict[Outcome, list[DraftedToken]]
"""Prepared drafts by outcome."""


class _Home(NamedTuple):
    """The draft model's cache: the process that holds it, and the number of rows that stay valid."""

    process: Any = None
    rows: int = 0


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Yield the steps that decode `tokens` tokens after a prompt of at least one, ending early at a token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    if prompt[:-1]:
        yield Forward("target", tuple(prompt[:-1]), 0, LayerSpan(0, parameters.layers))
    target = Model("target", parameters.layers, TARGET_UNIT)
    guesses, home = yield from _backup(parameters, _Home(), sequence, end - len(sequence) - 1)
    while True:
        plan = parameters.branch_plan(len(guesses), end - len(sequence))
        preparing: Sequence[Any] = ()
        if any(count for count, _ in plan):
            body = _preparing(draft_model(parameters, DRAFT_UNIT, home.rows), sequence[:], guesses, plan)
            preparing = yield Fork((body,), (DRAFT_UNIT,), (home.process,))
        out = yield verification_pass(target, sequence, guesses)
        kept, token = yield from accept_or_reject(out, guesses, parameters.sampled)
        yield from commit(sequence, guesses, kept, token, stop)
        if len(sequence) == end or sequence[-1] in stop:
            yield Stop(tuple(preparing))
            return
        prepared: Prepared = {}
        if preparing:
            ((prepared, process),) = yield Join(tuple(preparing))
            home = _Home(process, len(sequence) - 1)
        room = end - len(sequence) - 1
        if (kept, token) in prepared or not room:
            guesses = prepared.get((kept, token), [])
        else:
            guesses, home = yield from _backup(parameters, home, sequence, room)


def _backup(
    parameters: Parameters, home: _Home, sequence: Sequence[int], room: int
) -> Generator[Step, Any, tuple[list[DraftedToken], _Home]]:
    """Draft after a miss; return the drafted tokens and the draft model's cache."""
    length = min(parameters.draft_length, room)
    if parameters.backup == NONE or not length:
        return [], home
    model = draft_model(parameters, DRAFT_UNIT, home.rows)
    tasks = yield Fork((_just_in_time(model, sequence, length),), (DRAFT_UNIT,), (home.process,))
    ((guesses, process),) = yield Join(tuple(tasks))
    return guesses, _Home(process, len(sequence) - 1)


def _just_in_time(model: Model, sequence: Sequence[int], length: int) -> Generator[Step, Any, tuple[list[DraftedToken], Any]]:
    """Draft model's part after a miss."""
    drafted = yield from draft(model, sequence, length)
    return drafted, (yield from returned_to(TARGET_UNIT))


def _preparing(
    model: Model, sequence: Sequence[int], guesses: Sequence[DraftedToken], plan: Sequence[tuple[int, int]]
) -> Generator[Step, Any, tuple[Prepared, Any]]:
    """Draft model's part while the target verifies: prepare drafts for the likely outcomes."""
    words = (*sequence[model.rows :], *[guess.token for guess in guesses])
    own = model.rows, model.span, None, len(guesses) + 1, model.unit
    out = yield Forward(model.role, words, *own, context_budget=model.context_budget)
    branches: list[_Branch] = []
    for accepted, (count, length) in enumerate(plan):
        if count:
            rejected = [guess.token for guess in guesses[accepted : accepted + 1]]
            likeliest = yield Read("top", out, accepted - len(guesses) - 1, count + len(rejected))
            chosen = [token for token in likeliest if token not in rejected][:count]
            branches += [_Branch((accepted, token), len(sequence) + accepted, length, []) for token in chosen]
    tasks = yield Fork((_branching(model, branches),), (model.unit,))
    (prepared,) = yield Join(tuple(tasks))
    return prepared, (yield from returned_to(TARGET_UNIT))


class _Branch(NamedTuple):
    """A draft for one outcome: the position of the target's own token, and the tokens to draft after it."""

    outcome: Outcome
    at: int
    length: int
    guesses: list[DraftedToken]

    @property
    def last(self) -> int:
        """Its last token."""
        return self.guesses[-1].token if self.guesses else self.outcome[1]


def _branching(model: Model, branches: Sequence[_Branch]) -> Generator[Step, Any, Prepared]:
    """Draft the tokens of all branches, one per branch in each pass; every branch continues the rows of its prefix.

    A process of its own, so that the branches' rows end with it.
    """
    for depth in range(max(branch.length for branch in branches)):
        growing = [(number, branch) for number, branch in enumerate(branches) if depth < branch.length]
        positions = tuple([branch.at + depth for _, branch in growing])
        batch = Batch.uniform(tuple([number for number, _ in growing]), positions, 1, 1)
        words = tuple([branch.last for _, branch in growing])
        own = min(positions), model.span, None, len(growing), model.unit
        out = yield Forward(model.role, words, *own, batch=batch, context_budget=model.context_budget)
        for offset, (_, branch) in enumerate(growing, -len(growing)):
            token = yield Read(SAMPLED if model.sampled else GREEDY, out, offset)
            branch.guesses.append(DraftedToken(token, out, offset))
    return {branch.outcome: branch.guesses for branch in branches}
