"""The contract of a method's parameters: all that the rest of the project may ask of a choice, with defaults.

A method's `Parameters` derive from `MethodParameters` and override what differs. Nothing outside `model/methods` asks whether an
attribute exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

from model.base import checks
from model.base.table_records import TableRecord
from model.costs.step_costs import StepCosts
from model.interpret.account import Work, plain_work
from model.methods.formula_check import FormulaCheck
from model.methods.peak_demand import Demand

CONTINUOUS, STATIC, LOCKSTEP = BATCHING = ("continuous", "static", "lockstep")
SAID = {
    CONTINUOUS: "the batch is kept full: a sequence that has ended is replaced at once",
    STATIC: "all sequences begin together, and the next batch begins when the slowest has ended",
    LOCKSTEP: "all sequences share one set of random outcomes: what prices alone say of a batch",
}
COSTS = (
    "early_head", "dispatch", "dispatch_per_process", "dispatch_law", "link", "promotion", "propagation", "state_check",
    "verify_cost", "fitted_on",
)  # fmt: skip
"""Costs that only some methods have, in layer-times or as NAME_s in seconds; the COSTS of a method are those that it has."""
COSTS_OF = {
    "draft": ("cost_ratio", "operations_ratio", "task", "draft_shape", "draft_profile", "draft_step"),
    "medium": (
        "medium_cost_ratio", "medium_operations_ratio", "allow_slow_medium", "medium_shape", "medium_profile", "draft_step",
    ),
}
"""Costs of methods that have a model of a role beside the target."""


@dataclass(frozen=True, kw_only=True)
class MethodParameters(TableRecord):
    """A choice of a method's parameters.

    Parameters
    ----------
    layers
        Decoder layers of the target model.
    sequences
        Sequences of a full batch.
    batching
        How several sequences are decoded together; of one sequence it makes no difference.

        `continuous`  The batch is kept full: a sequence that has ended is replaced at once, as serving engines do. One sequence of
        it is decoded, and every pass is priced as one over as many tokens of each of `sequences` sequences. Every step drafts for
        all, so a sequence's last draft is not cut short: tokens after its end are dropped.

        `static`  All sequences begin together, each with random outcomes of its own, and the next batch begins when the slowest
        has ended. Sequences that have ended leave their batch. All sequences are decoded.

        `lockstep`  All sequences share one set of random outcomes: one is decoded as if it were alone, its last draft cut short,
        and every pass is priced as over as many tokens of each.

    Results of `continuous` and `lockstep` are of one sequence of the batch, of `static` of all; speed-ups are over plain decoding
    of the same number of sequences.
    """

    sequences: int = 1
    batching: str = CONTINUOUS
    layers: int

    LABEL: ClassVar[str] = ""
    """The method's name in figures and reports, spelled out; empty: the name of its folder or module."""
    SHORT_LABEL: ClassVar[str] = ""
    """The same where there is little room; empty: LABEL."""
    OUTCOMES: ClassVar[tuple[str, ...]]
    """Outcomes that the method may ask for; every method says them."""
    EXACT: ClassVar[bool]
    """Whether the output has the target's own law, for all or nearly all parameters; every method says it. See `exact`."""
    ROLES: ClassVar[tuple[str, ...]] = ()
    """Models that the method may have beside the target."""
    IMITATES: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    """Which model each of them imitates, and by which outcome."""
    COSTS: ClassVar[tuple[str, ...]] = COSTS
    """Costs, of those that only some methods have, that the method may have."""
    BATCHINGS: ClassVar[tuple[str, ...]] = (LOCKSTEP,)
    """Values of `batching` with which several sequences can be decoded."""
    WHY_NOT: ClassVar[str] = (
        "of sequences with random outcomes of their own this method's passes differ, and only those of a batch in lockstep have a"
        " price"
    )
    """Why the others are refused."""
    FORMULA_CHECK: ClassVar[FormulaCheck | None] = None
    """How real runs are compared with the formula of the method's paper, `paper_formula` of its theory; None: they are not."""
    GONE = MappingProxyType({
        "batch": "it is now sequences, with batching = 'continuous' (a batch that is kept full), 'static' (one that waits for its"
        " slowest sequence) or 'lockstep'"
    })

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(field.name for field in fields(cls))

    def table(self) -> dict[str, Any]:
        """The parameters by name."""
        return {name: vars(self)[name] for name in self.names()}

    # --- Asked of a table, before it is known to be valid ---

    @classmethod
    def outcomes_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Outcomes that a choice with these parameters asks for."""
        return cls.OUTCOMES

    @classmethod
    def roles_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Models that a choice with these parameters has beside the target."""
        return cls.ROLES

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of COSTS that a choice with these parameters has."""
        return cls.COSTS

    @classmethod
    def all_costs_for(cls, table: Mapping[str, Any]) -> frozenset[str]:
        """The same with the costs of its other models, and of passes over several sequences."""
        batch = () if table.get("sequences", 1) == 1 else ("verify_cost",)  # a pass is as wide as all sequences together
        return frozenset((*cls.costs_for(table), *batch)).union(*(COSTS_OF[role] for role in cls.roles_for(table)))

    # --- What it is, and what it needs ---

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Outcomes that it asks for."""
        return self.outcomes_for(vars(self))

    @property
    def roles(self) -> tuple[str, ...]:
        """Models that it has beside the target."""
        return self.roles_for(vars(self))

    @property
    def exact(self) -> bool:
        """Whether its output has the target's own law."""
        return self.EXACT

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn from the target's law; else the likeliest are taken."""
        return False

    @property
    def units(self) -> int:
        """Compute units that it reserves."""
        return 1

    @property
    def separate_units(self) -> int:
        """Those of them that models other than the target have to themselves."""
        return 0

    @property
    def bounded(self) -> bool:
        """Whether it never wants more units than `units`, whatever anything costs."""
        return True

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """The most that its processes may want at once; for a method that does not say, the most that its units could want.

        >>> from model.costs.layer_times import UnitCost
        >>> from model.methods.ppd.algorithm import Parameters
        >>> Parameters(40, 20, 3).demand(UnitCost(40, link=1.0), 128)
        Demand(units=4, transfers=3, stopped=None)
        """
        return Demand(1) if self.units == 1 else Demand(self.units, self.units, "anywhere")

    def depth(self, role: str) -> int | None:
        """Layers of the model of a role; None where the parameters do not say them."""
        depth: int | None = vars(self).get("layers" if role == "target" else f"{role}_layers")
        return depth

    # --- Its passes ---

    @property
    def longest_draft(self) -> int:
        """Most drafted tokens that wait at once for a pass of the target to verify them."""
        return 0

    @property
    def widest(self) -> int:
        """Most tokens of a pass of the target, over all sequences that are decoded together."""
        return 1

    def widest_of(self, tokens: int) -> int:
        """The same where `tokens` are decoded."""
        return self.widest

    @property
    def handover_layer(self) -> int:
        """Layer whose state other passes start from, or an early head reads; 0: there is none."""
        return 0

    @property
    def reads_early(self) -> bool:
        """Whether tokens are read from layers below the last, where trained heads can read."""
        return False

    @property
    def first_check(self) -> int:
        """First layer after which a token may leave, where outcomes say where it does."""
        return 1

    @property
    def overrun(self) -> int:
        """Positions after the end of the longest sequence that a pass may reach, where sequences draft along with others."""
        return 0

    @property
    def match_candidates(self) -> int:
        """Candidates of which one may match; the random outcome says which."""
        return 1

    @property
    def counts_layers(self) -> bool:
        """Whether its operations are those of the layers that it runs, as its theory's `work` says, and not its unit-time."""
        return False

    # --- Batches ---

    def check_batching(self) -> None:
        """Refuse batches that the method cannot decode."""
        checks.whole("sequences", self.sequences, 1, checks.MAX_UNITS)
        checks.one_of("batching", self.batching, BATCHING)
        if self.sequences > 1 and self.batching not in self.BATCHINGS:
            known = " or ".join(repr(each) for each in self.BATCHINGS)
            raise checks.ParameterError(
                f"batching must be {known} with sequences={self.sequences}, got {self.batching!r}: {self.WHY_NOT}; set batching"
            )

    @property
    def full_batch(self) -> int:
        """Sequences over which every pass is priced; 1 where all sequences of a batch are decoded."""
        return self.sequences

    @property
    def decoded_sequences(self) -> int:
        """Sequences that are decoded; 1 where one stands for a full batch."""
        return 1

    @property
    def concurrent_sequences(self) -> int:
        """Most of them that are decoded at the same time."""
        return 1

    @property
    def static_batches(self) -> bool:
        """Whether it can decode real batches: static ones, all of whose sequences are decoded."""
        return False

    def plain_time(self, tokens: int, cost: StepCosts) -> float:
        """Time of plain decoding of the same sequences in the same batches."""
        return cost.plain_time(tokens)

    def plain_work(self, tokens: int) -> Work:
        """Work of plain decoding of the same sequences in the same batches."""
        return plain_work(self.layers, range(tokens))

    # --- Checks and changes that need more than the parameters ---

    def check_tokens(self, tokens: int) -> None:
        """Refuse a number of tokens to decode that does not go with the parameters."""

    def check_law(self, outcome: str, law: Any) -> None:
        """Refuse a law of an outcome that the method cannot follow, such as one by the place in a draft."""

    def check_thresholds(self) -> None:
        """Refuse parameters that lack the thresholds by which real models decide."""

    @property
    def decides_by_threshold(self) -> bool:
        """Whether thresholds were given, so that outcomes cannot be forced by rates."""
        return False

    def steps_of(self, tokens: int) -> int:
        """Steps of plain decoding of the same sequences."""
        return tokens

    def outputs_of(self, tokens: int) -> int:
        """Tokens that all decoded sequences have together."""
        return tokens

    def shortened(self, tokens: int) -> Self:
        """The same choice with no sequence longer than `tokens`."""
        return self

    def with_costs(self, cost: StepCosts) -> Self:
        """The same choice, where it decides by costs: those that it was not given are the scenario's."""
        return self
