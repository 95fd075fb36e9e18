"""Speculative decoding with adaptive draft lengths: a policy sets the draft length of each round while decoding.

`gradient` is the method of [Strawberries]: gradient ascent on Theorem 3.8 of [Leviathan2023] with a running estimate of the
acceptance rate. `optimum` uses the best whole length for that estimate. `heuristic` and `confidence` are the schedules of
[transformers]: two tokens more after a completely accepted draft, otherwise one less; or drafting up to a maximum, with an early
stop after the first token of which the draft model is unsure (that token is still verified).

[Strawberries] Team 28. Fast Inference from Transformers via Speculative Decoding. Project slides ("with adaptive gamma").
[transformers] huggingface/transformers, src/transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from model.base import checks
from model.costs.step_costs import StepCosts
from model.costs.width_curve import as_curve
from model.methods.adaptive import draft_length_policies
from model.methods.claim_bounds import ClaimRule
from model.methods.draft_model import MAX_DRAFT, BudgetedDraft, DraftModel
from model.methods.proposals import Known, Proposals
from model.methods.speculative.algorithm import DraftedToken, Model, commit, draft, start, verify
from model.steps import Read, Step, Steps

_RUNNING: Mapping[str, Any] = MappingProxyType(
    {"draft_length": 5, "min_draft_length": 1, "estimator": "tested", "prior_accepted": 1.0, "prior_tested": 2.0,
     "believed_cost_ratio": None}
)  # fmt: skip
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gradient": {**_RUNNING, "step": 10.0},
        "optimum": {**_RUNNING, "believed_verify_cost": None},
        "heuristic": {"draft_length": 5},
        "confidence": {"confidence_threshold": 0.4},
    }
)
"""Options of each policy with their defaults.

The prior is one accepted token of two: an initial estimate of 1/2. 0.4 is the default of transformers; 5 was its initial length
before it stopped drafts by confidence."""
ONLY = np.zeros(1, dtype=np.intp)
_BELIEVED: Mapping[str, Callable[[Parameters, StepCosts], Any]] = MappingProxyType(
    {
        "believed_cost_ratio": lambda parameters, cost: parameters.draft_costs(cost).ratio("draft"),
        "believed_verify_cost": lambda parameters, cost: cost.verify_curve(parameters.largest_pass),
    }
)
"""Options whose values, if they are not set, are the true costs."""


@dataclass(frozen=True)
class Parameters(BudgetedDraft, DraftModel):
    """Parameters of speculative decoding with adaptive draft lengths.

    Parameters
    ----------
    layers
        Layers of the target model.
    policy
        `gradient`, `optimum`, `heuristic` or `confidence`.
    max_draft_length
        Longest draft.
    draft_length, min_draft_length
        Initial and smallest draft length. With a minimum of 0 drafting may stop for good, because the estimate no longer changes.
    estimator, prior_accepted, prior_tested
        Estimate of alpha for `gradient` and `optimum`: (prior_accepted + accepted) / (prior_tested + n), where n counts the tokens
        that were `tested`, or all that were `drafted`.
    step
        Change of gamma per unit slope of the speed-up, for `gradient`.
    believed_cost_ratio, believed_verify_cost
        Cost ratio assumed by `gradient` and `optimum`, and cost of a verification by its width assumed by `optimum` (Theorem 3.8,
        which `gradient` uses, has no width). Left out: the scenario's values.
    confidence_threshold
        For `confidence`: a draft ends with the first token whose probability in the draft model is below this.
    sampled
        Sample tokens instead of greedy decoding.
    placement
        `colocated`: draft and target share a unit; `separate`: each has its own unit.
    draft_layers
        Layers of the draft model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    sequences
        Sequences of a full batch.
    batching
        `lockstep` with several sequences.
    context_budget
        Largest number of cached positions of each sequence that a pass of the draft model reads; None: all.
    """

    layers: int
    policy: str
    max_draft_length: int = 20
    draft_length: int | None = None
    min_draft_length: int | None = None
    estimator: str | None = None
    prior_accepted: float | None = None
    prior_tested: float | None = None
    step: float | None = None
    believed_cost_ratio: float | None = None
    believed_verify_cost: tuple[tuple[int, float], ...] | None = None
    confidence_threshold: float | None = None
    sampled: bool = False

    LABEL = "adaptive drafts"
    OUTCOMES = ("accept", "confidence")
    ROLES = ("draft",)
    COSTS = ("verify_cost", "link")
    IMITATES = MappingProxyType({"draft": ("target", "accept")})
    CLAIMS = ClaimRule(
        terms=("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length", "cost_ratio"),
        needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"), ("cost_ratio",)),
        source="Section 3.5 of Leviathan et al., ICML 2023, arXiv:2211.17192, with drafts that have a cost",
        names={"dynamic speculation": "", "adaptive speculative": ""},
        readings={"acceptance_rate": "draft_acceptance_rate"},
    )
    # Exact: the decision to draft another token is made before that token is sampled, from earlier tokens and rounds only. So the
    # token at every position has the target's distribution: by acceptance test and residual if drafted, directly if not. (Dropping
    # the token of which the draft model is unsure would make the decision depend on the token itself.)
    EXACT = True

    @classmethod
    def proposals(cls, known: Known) -> Proposals:
        """Nothing: with one acceptance the best draft length does not change while decoding."""
        return Proposals(missing="acceptance that varies between sequences; with one rate there is nothing to adapt to")

    def __post_init__(self) -> None:
        self.check_batching()
        checks.one_of("policy", self.policy, OPTIONS)
        checks.whole("max_draft_length", self.max_draft_length, 1, MAX_DRAFT)
        checks.flag("sampled", self.sampled)
        self.check_models()
        self.check_budgets()
        for name in dict.fromkeys(name for options in OPTIONS.values() for name in options):
            if name not in OPTIONS[self.policy] and getattr(self, name) is not None:
                users = ", ".join(policy for policy, options in OPTIONS.items() if name in options)
                raise checks.ParameterError(f"{name} is not used by policy {self.policy!r}; leave it out, or choose one of {users}")
        self._check_lengths()
        if self.estimator is not None:
            checks.one_of("estimator", self.estimator, draft_length_policies.ESTIMATORS)
        self._check_prior()
        for name in ("step", "believed_cost_ratio"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0)
        if self.believed_verify_cost is not None:
            reaches = as_curve(self.believed_verify_cost).last
            if reaches < self.largest_pass:
                raise checks.ParameterError(
                    f"believed_verify_cost must reach width {self.largest_pass}, that of max_draft_length={self.longest_draft},"
                    f" got {reaches}"
                )
        if self.confidence_threshold is not None:
            checks.number("confidence_threshold", self.confidence_threshold, 0, 1)
            if self.confidence_threshold == 0:
                raise checks.ParameterError(
                    "confidence_threshold must be above 0 and at most 1, got 0; drafts that never stop are method 'speculative'"
                )

    def _check_lengths(self) -> None:
        longest = self.max_draft_length
        if self.min_draft_length is not None:
            checks.whole("min_draft_length", self.min_draft_length, 0, longest, "max_draft_length")
        if self.draft_length is not None:
            least = 1 if self.policy == "heuristic" else self.option("min_draft_length")
            checks.whole("draft_length", self.draft_length, least, longest, "max_draft_length")

    def _check_prior(self) -> None:
        for name in ("prior_accepted", "prior_tested"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0)
        if "prior_tested" in OPTIONS[self.policy]:
            accepted, tested = self.option("prior_accepted"), self.option("prior_tested")
            if not tested > 0 or accepted > tested:
                raise checks.ParameterError(
                    f"prior_tested must be above 0 and at least prior_accepted={accepted:g}, got {tested:g}; they count tokens"
                )

    @classmethod
    def outcomes_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Outcomes that the method reads with these parameters: confidence only for the policy `confidence`."""
        return cls.OUTCOMES if table.get("policy") == "confidence" else cls.OUTCOMES[:1]

    def option(self, name: str) -> Any:
        """Value of an option of the policy, or its default."""
        given = getattr(self, name)
        return OPTIONS[self.policy][name] if given is None else given

    @property
    def first(self) -> int:
        """Initial draft length."""
        if self.policy == "confidence":
            return self.max_draft_length
        least = self.min_draft_length or 0
        return max(min(int(self.option("draft_length")), self.max_draft_length), least)

    @property
    def longest_draft(self) -> int:
        """Largest number of drafted tokens in a round."""
        return self.max_draft_length

    @property
    def may_skip(self) -> bool:
        """True if a round may draft nothing although tokens remain."""
        return "min_draft_length" in OPTIONS[self.policy] and not self.option("min_draft_length")

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass of the target."""
        return self.longest_draft + 1

    @property
    def decides_by_costs(self) -> bool:
        """True for the policies that estimate the best draft length from costs."""
        return not {*OPTIONS[self.policy]}.isdisjoint(_BELIEVED)

    def with_costs(self, cost: StepCosts) -> Parameters:
        """Copy in which costs that the policy uses, and that are not set, are the true ones.

        If times depend on the position, those at mid-context.
        """
        used = (name for name in _BELIEVED if name in OPTIONS[self.policy] and getattr(self, name) is None)
        missing = {name: _BELIEVED[name](self, cost) for name in used}
        return replace(self, **missing) if missing else self

    def initial_policy(self, count: int) -> draft_length_policies.Policy:
        """Initial state of the policy for `count` decodings."""
        if self.policy == "confidence":
            return draft_length_policies.Constant(self.first, count)
        if self.policy == "heuristic":
            return draft_length_policies.Heuristic(self.first, self.longest_draft, count)
        ratio = self.option("believed_cost_ratio")
        if ratio is None:
            raise checks.ParameterError(
                f"believed_cost_ratio is required by policy {self.policy!r} outside of a scenario with a cost_ratio"
            )
        bounds, estimator = (self.option("min_draft_length"), self.longest_draft), self.option("estimator")
        prior = self.option("prior_accepted"), self.option("prior_tested")
        if self.believed_verify_cost is not None:
            widths = as_curve(self.believed_verify_cost).relative(np.arange(1, self.largest_pass + 1))
            return draft_length_policies.MeasuredOptimum(self.first, bounds, ratio, estimator, prior, widths, count)
        if self.policy == "optimum":
            return draft_length_policies.Optimum(self.first, bounds, ratio, estimator, prior, count)
        return draft_length_policies.Gradient(self.first, bounds, ratio, estimator, prior, self.option("step"), count)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    sequence, end = list(prompt), len(prompt) + tokens
    policy = parameters.initial_policy(1)
    threshold = parameters.option("confidence_threshold") if parameters.policy == "confidence" else None
    drafter, target = (yield from start(parameters, sequence)), Model("target", parameters.layers, 0)
    while len(sequence) < end and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        guesses = yield from offer(drafter, sequence, min(int(policy.length[0]), end - len(sequence) - 1), threshold)
        kept, token = yield from verify(target, sequence, guesses, parameters.sampled)
        yield from commit(sequence, guesses, kept, token, stop)
        policy.learn(ONLY, np.array([kept]), np.array([len(guesses)]))
        drafter.rows = min(drafter.rows, len(sequence) - 1)


def offer(model: Model, sequence: Sequence[int], length: int, threshold: float | None) -> Generator[Step, Any, list[DraftedToken]]:
    """Draft at most `length` tokens after the sequence; stop after a token with confidence below `threshold`."""
    guesses: list[DraftedToken] = []
    ahead = list(sequence)
    while len(guesses) < length:
        guess = (yield from draft(model, ahead, 1))[0]
        guesses.append(guess)
        ahead.append(guess.token)
        if threshold is not None and (yield Read("confidence", guess.output, token=guess.token)) < threshold:
            break
    return guesses
