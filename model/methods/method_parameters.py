"""Base class of every method's parameters: the whole interface that the rest of the project uses, with defaults.

A method's `Parameters` derive from `MethodParameters` and override what differs. Code outside `model/methods` uses only this
interface; it never tests whether an attribute exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.table_records import TableRecord, key_names
from model.costs.step_costs import StepCosts
from model.interpret.account import Work, plain_work_of_tokens
from model.methods.claim_bounds import ClaimRule
from model.methods.formula_check import FormulaCheck
from model.methods.peak_demand import Demand
from model.methods.proposals import Known, Proposals

CONTINUOUS, STATIC, LOCKSTEP = BATCHING = ("continuous", "static", "lockstep")
BATCHING_DESCRIPTIONS = {
    CONTINUOUS: "the batch is kept full: a sequence that has ended is replaced at once",
    STATIC: "all sequences begin together, and the next batch begins when the slowest has ended",
    LOCKSTEP: "all sequences share one set of random outcomes: the effect of costs alone",
}
COSTS = (
    "early_head", "dispatch", "dispatch_per_process", "dispatch_law", "link", "promotion", "propagation", "state_check",
    "verify_cost", "fitted_on",
)  # fmt: skip
"""Costs that only some methods have, in layer-times or as NAME_s in seconds. A method lists its own in `COSTS`."""
COSTS_OF = {
    "draft": ("cost_ratio", "operations_ratio", "task", "draft_shape", "draft_profile", "draft_step"),
    "medium": (
        "medium_cost_ratio", "medium_operations_ratio", "allow_slow_medium", "medium_shape", "medium_profile", "draft_step",
    ),
}
"""Costs of methods with a further model, by its role."""


class ContextBudget(NamedTuple):
    """Largest number of cached positions of each sequence that draft passes of a model read."""

    name: str
    """Name of the parameter."""
    role: str
    """The model that makes the passes."""
    positions: int


@dataclass(frozen=True, kw_only=True)
class MethodParameters(TableRecord):
    """Parameters of a decoding method.

    Parameters
    ----------
    layers
        Decoder layers of the target model.
    sequences
        Sequences of a full batch.
    batching
        How several sequences are decoded together; no effect on a single sequence.

        `continuous`  The batch is kept full: a sequence that has ended is replaced at once, as serving engines do. One sequence is
        decoded; each of its passes costs as much as a pass over the same number of tokens of `sequences` sequences. Every step
        drafts for all sequences, so a last draft is not cut short: tokens after the end of the sequence are dropped.

        `static`  All sequences begin together and have separate random outcomes; the next batch begins when the slowest sequence
        has ended. Sequences that have ended leave their batch. All sequences are decoded.

        `lockstep`  All sequences share one set of random outcomes. One sequence is decoded as if alone, with its last draft cut
        short; each of its passes costs as much as a pass over the same number of tokens of `sequences` sequences.

    Results of `continuous` and `lockstep` describe one sequence of the batch, those of `static` all sequences. Speed-ups are
    relative to plain decoding of the same number of sequences.
    """

    sequences: int = 1
    batching: str = CONTINUOUS
    layers: int

    LABEL: ClassVar[str] = ""
    """Full name of the method in figures and reports; empty: the name of its folder or module."""
    SHORT_LABEL: ClassVar[str] = ""
    """Short name of the method where space is scarce; empty: LABEL."""
    OUTCOMES: ClassVar[tuple[str, ...]]
    """Random outcomes that the method may read; required."""
    EXACT: ClassVar[bool]
    """True if the output has the target's distribution, for all or nearly all parameters; required. See `exact`."""
    ROLES: ClassVar[tuple[str, ...]] = ()
    """Roles of the models that the method may use in addition to the target."""
    IMITATES: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    """For each of these roles, the model that it imitates and the outcome that says whether it succeeds."""
    COSTS: ClassVar[tuple[str, ...]] = COSTS
    """Subset of the optional costs (`COSTS` of this module) that the method may have."""
    BATCHINGS: ClassVar[tuple[str, ...]] = (LOCKSTEP,)
    """Values of `batching` with which several sequences can be decoded."""
    REFUSAL_REASON: ClassVar[str] = (
        "sequences with separate random outcomes need different passes of this method, and only passes of a batch in lockstep have"
        " a price"
    )
    """Reason given when another value is refused."""
    TESTS_WHOLE_DRAFTS: ClassVar[bool] = True
    """True if each round tests a draft from its first token on, so that outcome laws by position in a draft apply."""
    FORMULA_CHECK: ClassVar[FormulaCheck | None] = None
    """Comparison of real runs with the formula of the method's paper (`paper_formula` of its theory); None: not compared."""
    CLAIMS: ClassVar[ClaimRule | None] = None
    """Bounds of claimed speed-ups (`claim_bound` and `claim_formula` of its theory); None: no bound is known."""
    REMOVED_KEYS = MappingProxyType({
        "batch": "it is now sequences, with batching = 'continuous' (a batch that is kept full), 'static' (a batch that waits for"
        " its slowest sequence) or 'lockstep'"
    })

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the parameters."""
        return key_names(cls)

    def table(self) -> dict[str, Any]:
        """The parameters by name."""
        return {name: vars(self)[name] for name in self.names()}

    # --- Functions of a parameter table that has not been validated yet ---

    @classmethod
    def outcomes_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Outcomes that the method reads with these parameters."""
        return cls.OUTCOMES

    @classmethod
    def roles_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Roles of the models that the method uses with these parameters, besides the target."""
        return cls.ROLES

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters."""
        return cls.COSTS

    @classmethod
    def all_costs_for(cls, table: Mapping[str, Any]) -> frozenset[str]:
        """Costs that apply with these parameters, including those of other models and of passes over several sequences."""
        batch = () if table.get("sequences", 1) == 1 else ("verify_cost",)  # a pass is as wide as all sequences together
        return frozenset((*cls.costs_for(table), *batch)).union(*(COSTS_OF[role] for role in cls.roles_for(table)))

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Parameters worth trying in what is known, for advice; the default proposes nothing and misses nothing."""
        return Proposals()

    # --- Output and resources ---

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Outcomes that the method reads."""
        return self.outcomes_for(vars(self))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the models besides the target."""
        return self.roles_for(vars(self))

    @property
    def exact(self) -> bool:
        """True if the output has the target's distribution."""
        return self.EXACT

    @property
    def sampled(self) -> bool:
        """True if tokens are sampled from the target's distribution, False if decoding is greedy."""
        return False

    @property
    def units(self) -> int:
        """Compute units that are reserved."""
        return 1

    @property
    def separate_units(self) -> int:
        """Reserved units that are dedicated to models other than the target."""
        return 0

    def devices(self, units: int, tensor_parallel: int) -> int:
        """Number of devices in `units`: `tensor_parallel` per unit of the target, one per separate unit of a smaller model.

        >>> from model.methods.pearl.algorithm import Parameters
        >>> Parameters(32, 3).devices(2, 4)
        5
        """
        single = min(self.separate_units, max(units - 1, 0))
        return (units - single) * tensor_parallel + single

    @property
    def target_replicas(self) -> int:
        """Units that each hold the whole target, with separate caches, and make its passes."""
        return 1

    @property
    def serial(self) -> bool:
        """True if passes, transfers and engine steps follow one another, so that the time of a decoding is the sum of theirs."""
        return self.units == 1

    @property
    def reads_states(self) -> bool:
        """True if the draft reads the target's hidden states, as draft heads do."""
        return False

    @property
    def drafts_in_one_pass(self) -> bool:
        """True if one pass of the draft drafts all tokens of a round."""
        return False

    @property
    def context_budgets(self) -> tuple[ContextBudget, ...]:
        """Budgets of draft passes that read less of the context than is cached."""
        return ()

    @property
    def draft_budgets(self) -> Mapping[str, int]:
        """Largest number of cached positions that passes of a model read, by its role; not of a model that drafts for itself."""
        return {budget.role: budget.positions for budget in self.context_budgets if budget.role in self.roles}

    def draft_costs(self, cost: StepCosts) -> StepCosts:
        """Costs with the context budgets of the method's models: those that price what its formulas and paths sum."""
        return cost.within_budgets(self.draft_budgets)

    def check_context(self, context: int) -> None:
        """Raise ParameterError for a budget of draft passes beyond `context`, the positions of prompt and output together."""
        for name, _, positions in self.context_budgets:
            if positions > context:
                raise checks.ParameterError(
                    f"{name} must be at most {context}, the positions of prompt and tokens together, got {positions}; leave it out"
                    " for drafts that read the whole context, or take a longer prompt"
                )

    @property
    def joint_verification(self) -> bool:
        """True if drafted tokens are accepted jointly, so that the rate of single tokens does not determine how many are."""
        return False

    @property
    def bounded(self) -> bool:
        """True if the method never needs more than `units` units, at any costs."""
        return True

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand of the method's processes; the default is an upper bound: all units busy and all of them transferring.

        >>> from model.costs.layer_times import UnitCost
        >>> from model.methods.ppd.algorithm import Parameters
        >>> Parameters(40, 20, 3).demand(UnitCost(40, link=1.0), 128)
        Demand(units=4, transfers=3, stopped=None)
        """
        return Demand(1) if self.units == 1 else Demand(self.units, self.units, "anywhere")

    def demands(self, cost: StepCosts, tokens: int) -> Demand | None:
        """`demand` at each of several costs (`model.costs.many_costs`), with arrays in place of numbers; None: only at single ones.

        For methods whose demand depends on times of passes.
        """
        return None

    def depth(self, role: str) -> int | None:
        """Layers of the model with this role; None if the parameters do not define it."""
        depth: int | None = vars(self).get("layers" if role == "target" else f"{role}_layers")
        return depth

    # --- Passes ---

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens that one pass of the target verifies."""
        return 0

    @property
    def most_unverified(self) -> int:
        """Largest number of drafted tokens that no pass has verified yet: simulated outcomes reach that far."""
        return self.longest_draft

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target, over all sequences that are decoded together."""
        return 1

    def largest_pass_of(self, tokens: int) -> int:
        """Largest number of tokens in a pass of the target when `tokens` are decoded."""
        return self.largest_pass

    def prompt_layer_passes(self, tokens: int) -> int:
        """Layers that are run over the first `tokens` tokens of a prompt, counted once per token: all."""
        return self.layers * tokens

    @property
    def handover_layer(self) -> int:
        """Layer whose hidden state other passes start from or an early head reads; 0: none."""
        return 0

    @property
    def reads_early(self) -> bool:
        """True if tokens are predicted from layers below the last, by trained early heads."""
        return False

    @property
    def first_check(self) -> int:
        """First layer after which a token may exit, for methods whose outcomes are exit layers."""
        return 1

    @property
    def overrun(self) -> int:
        """Positions after the end of the longest sequence that a pass may reach, because drafts of a batch have equal length."""
        return 0

    @property
    def match_candidates(self) -> int:
        """Number of candidates; the random outcome says which of them matches."""
        return 1

    @property
    def ranks_by_depth(self) -> Sequence[int]:
        """Largest rank of a candidate at each depth of a draft with several candidates per position; empty for other drafts."""
        return ()

    @property
    def draft_confidences(self) -> Sequence[Any]:
        """Confidences of the draft in its candidates, for each class of the outcomes by depth and rank; empty if it needs none."""
        return ()

    @property
    def counts_layers(self) -> bool:
        """True if operations are counted by the layers that run (`work` of the theory) instead of by unit-time."""
        return False

    # --- Batches ---

    def check_batching(self) -> None:
        """Raise ParameterError for batches that the method cannot decode."""
        checks.whole("sequences", self.sequences, 1, checks.MAX_UNITS)
        checks.one_of("batching", self.batching, BATCHING)
        if self.sequences > 1 and self.batching not in self.BATCHINGS:
            known = " or ".join(repr(each) for each in self.BATCHINGS)
            raise checks.ParameterError(
                f"batching must be {known} with sequences={self.sequences}, got {self.batching!r}: {self.REFUSAL_REASON};"
                " set batching"
            )

    @property
    def full_batch(self) -> int:
        """Sequences that the price of every pass assumes; 1 if all sequences of a batch are decoded."""
        return self.sequences

    @property
    def decoded_sequences(self) -> int:
        """Sequences that are decoded; 1 if one sequence represents a full batch."""
        return 1

    @property
    def concurrent_sequences(self) -> int:
        """Largest number of sequences that are decoded at the same time."""
        return 1

    @property
    def static_batches(self) -> bool:
        """True if the method can decode static batches, with all their sequences."""
        return False

    @property
    def predicts_lengths_together(self) -> bool:
        """True if closed forms take several numbers of tokens together: those of a single sequence."""
        return self.decoded_sequences == 1

    def plain_time(self, tokens: int, cost: StepCosts) -> Any:
        """Time of plain decoding of the same sequences in the same batches; of several costs an array."""
        return cost.plain_time(tokens)

    def plain_step_times(self, positions: NDArray[np.int64], cost: StepCosts) -> Any:
        """Time of a step of plain decoding at each position, where `predicts_lengths_together`; of several costs an array."""
        return cost.plain_times(positions)

    def plain_work(self, tokens: Any) -> Work:
        """Work of plain decoding of the same sequences in the same batches; of equal sequences also for an array of tokens."""
        return plain_work_of_tokens(self.layers, tokens)

    # --- Checks and changes that need more than the parameters ---

    def check_tokens(self, tokens: int) -> None:
        """Raise ParameterError if this number of tokens contradicts the parameters."""

    @property
    def allows_any_tokens(self) -> bool:
        """True if no number of tokens contradicts the parameters, so that `check_tokens` need not be called for each."""
        return type(self).check_tokens is MethodParameters.check_tokens

    def check_vocabulary(self, size: int) -> None:
        """Raise ParameterError if the method needs more candidates than a vocabulary of this size has."""

    def check_law(self, outcome: str, law: Any) -> None:
        """Raise ParameterError for an outcome law that the method does not support, such as rates by position in a draft.

        `TESTS_WHOLE_DRAFTS` = False leaves laws by position in a draft out of the kinds that are listed for the method.
        """

    def check_thresholds(self) -> None:
        """Raise ParameterError if a threshold that real models need for their decisions is missing."""

    @property
    def decides_by_threshold(self) -> bool:
        """True if thresholds are set; outcomes then cannot be forced by rates."""
        return False

    def plain_steps(self, tokens: int) -> int:
        """Steps of plain decoding of the same sequences."""
        return tokens

    def total_tokens(self, tokens: int) -> int:
        """Total tokens of all decoded sequences."""
        return tokens

    def shortened(self, tokens: int) -> Self:
        """Copy in which no sequence is longer than `tokens`."""
        return self

    @property
    def times_change_work(self) -> bool:
        """True if which passes a decoding makes depends on how long they take; used of methods with `timed_work`."""
        return True

    @property
    def decides_by_costs(self) -> bool:
        """True if `with_costs` may set a parameter, so that cases with other costs have other parameters."""
        return False

    def with_costs(self, cost: StepCosts) -> Self:
        """Copy in which costs that the method decides by, and that are not set, are those of the scenario."""
        return self
