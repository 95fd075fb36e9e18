"""Speculative decoding whose draft length is chosen while it runs.

`gradient` is the method of [Strawberries]: a running mean of acceptances, and gradient ascent on Theorem 3.8 of [Leviathan2023].
`optimum` takes the best whole length for that mean at once. `heuristic` and `confidence` are what [transformers] does: two more
after a round that was accepted as a whole, otherwise one less; or drafting up to a bound and stopping behind the first token of
which the draft model is unsure, which is still offered.

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
from model.methods.draft_model import MAX_DRAFT, DraftModel
from model.methods.speculative.algorithm import Guess, Model, commit, draft, start, verify
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
"""What each policy takes, and what it is where it is left out. The prior is one token accepted of two: alpha is taken for 1/2 until
something is known. 0.4 is the default of transformers, and 5 was its first length before it stopped drafts by confidence."""
ONLY = np.zeros(1, dtype=np.intp)


@dataclass(frozen=True)
class Parameters(DraftModel):
    """A choice of speculative decoding with a `policy` for its draft length, of at most `max_draft_length` tokens.

    Parameters
    ----------
    draft_length, min_draft_length
        The first length, and the least one (0: drafting may cease for good, as without drafts nothing more is learnt).
    estimator, prior_accepted, prior_tested
        What gradient and optimum take for alpha: (prior_accepted + accepted) / (prior_tested + n), where n counts the tokens that
        were `tested`, or all that were `drafted`.
    step
        How far gamma moves for a slope of one.
    believed_cost_ratio, believed_verify_cost
        The cost ratio that gradient and optimum go by, and what a verification costs by its width, which optimum does (the deck's
        gradient is that of Theorem 3.8, which knows of no width); the scenario's own where they are left out.
    confidence_threshold
        A draft ends with the first token of which the draft model is less sure than this.
    sampled, placement, draft_layers
        As in speculative decoding.
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
    # Whether a further token is drafted is decided before it is drawn, by tokens that are on offer and by rounds that are over, so
    # whatever stands before a position, its own token is still drawn from the target's law: by a test and its residual if it was
    # drafted, directly if not. (To take back the token of which the draft is unsure would be a choice by the token itself.)
    EXACT = True

    def __post_init__(self) -> None:
        self.check_batching()
        checks.one_of("policy", self.policy, OPTIONS)
        checks.whole("max_draft_length", self.max_draft_length, 1, MAX_DRAFT)
        checks.flag("sampled", self.sampled)
        self.check_models()
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
            if reaches < self.widest:
                raise checks.ParameterError(
                    f"believed_verify_cost must reach width {self.widest}, that of max_draft_length={self.longest_draft},"
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
        """The outcomes that a choice asks for: those of confidence only if its policy looks at it."""
        return cls.OUTCOMES if table.get("policy") == "confidence" else cls.OUTCOMES[:1]

    def option(self, name: str) -> Any:
        """What was given for a parameter of the policy's, or what it is otherwise."""
        given = getattr(self, name)
        return OPTIONS[self.policy][name] if given is None else given

    @property
    def first(self) -> int:
        """The length of the first draft."""
        if self.policy == "confidence":
            return self.max_draft_length
        least = self.min_draft_length or 0
        return max(min(int(self.option("draft_length")), self.max_draft_length), least)

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round drafts."""
        return self.max_draft_length

    @property
    def may_skip(self) -> bool:
        """Whether a round may draft nothing although tokens remain."""
        return "min_draft_length" in OPTIONS[self.policy] and not self.option("min_draft_length")

    @property
    def widest(self) -> int:
        """The most tokens of one pass of the target."""
        return self.longest_draft + 1

    def with_costs(self, cost: StepCosts) -> Parameters:
        """The same where the cost is known: a policy that goes by a cost ratio goes by the true one, unless it was told another.

        Where passes take other times at other positions, by those in the middle.
        """
        known: dict[str, Callable[[], Any]] = {
            "believed_cost_ratio": lambda: cost.ratio("draft"),
            "believed_verify_cost": lambda: cost.verify_curve(self.widest),
        }
        missing = {name: find() for name, find in known.items() if name in OPTIONS[self.policy] and getattr(self, name) is None}
        return replace(self, **missing) if missing else self

    def started(self, count: int) -> draft_length_policies.Policy:
        """The policy at the beginning of so many decodings."""
        if self.policy == "confidence":
            return draft_length_policies.Constant(self.first, count)
        if self.policy == "heuristic":
            return draft_length_policies.Heuristic(self.first, self.longest_draft, count)
        ratio = self.option("believed_cost_ratio")
        if ratio is None:
            raise checks.ParameterError(
                f"believed_cost_ratio is required by policy {self.policy!r} where no scenario tells it its cost_ratio"
            )
        bounds, estimator = (self.option("min_draft_length"), self.longest_draft), self.option("estimator")
        prior = self.option("prior_accepted"), self.option("prior_tested")
        if self.believed_verify_cost is not None:
            widths = as_curve(self.believed_verify_cost).relative(np.arange(1, self.widest + 1))
            return draft_length_policies.Measured(self.first, bounds, ratio, estimator, prior, widths, count)
        if self.policy == "optimum":
            return draft_length_policies.Optimum(self.first, bounds, ratio, estimator, prior, count)
        return draft_length_policies.Gradient(self.first, bounds, ratio, estimator, prior, self.option("step"), count)


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one, or until one that ends texts, of `stop`."""
    text, end = list(prompt), len(prompt) + tokens
    policy = parameters.started(1)
    threshold = parameters.option("confidence_threshold") if parameters.policy == "confidence" else None
    drafter, target = (yield from start(parameters, text, parameters.sampled)), Model("target", parameters.layers, 0)
    while len(text) < end and (len(text) == len(prompt) or text[-1] not in stop):
        guesses = yield from offer(drafter, text, min(int(policy.length[0]), end - len(text) - 1), threshold)
        kept, token = yield from verify(target, text, guesses, parameters.sampled)
        yield from commit(text, guesses, kept, token, stop)
        policy.learn(ONLY, np.array([kept]), np.array([len(guesses)]))
        drafter.rows = min(drafter.rows, len(text) - 1)


def offer(model: Model, text: Sequence[int], length: int, threshold: float | None) -> Generator[Step, Any, list[Guess]]:
    """Have so many tokens drafted behind the text; if the model is less sure of one than `threshold`, that is the last."""
    guesses: list[Guess] = []
    ahead = list(text)
    while len(guesses) < length:
        guess = (yield from draft(model, ahead, 1))[0]
        guesses.append(guess)
        ahead.append(guess.token)
        if threshold is not None and (yield Read("confidence", guess.output, token=guess.token)) < threshold:
            break
    return guesses
