"""Bounds of claimed speed-ups: the terms that a claim may state, and what a method says about its claims.

A method with `CLAIMS` in its parameters has up to two functions of `ClaimTerms` in its theory:

* `claim_bound`: no speed-up is larger, for any dependence between outcomes and any rule of draft lengths.
* `claim_formula`: the formula of the method's paper, which may assume independent outcomes; at most the bound. Without it the bound
  serves as the formula.

A term that a claim does not state has its most favourable value, so that more information never raises a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from model.base.checks import MAX_LAYERS, MAX_TOKENS


class Term(NamedTuple):
    """A number of a claim that a bound uses.

    `better` is 1 if a larger value allows a larger speed-up, -1 if a smaller one does, and 0 for numbers that are exact.
    """

    label: str
    about: str
    low: float
    high: float
    better: int
    decimals: int = 1
    """Decimals to which the number counts as printed even if it has fewer."""

    @property
    def best(self) -> float:
        """Most favourable value; infinite for counts without a limit."""
        return self.low if self.better < 0 else self.high if self.better > 0 else math.inf

    @property
    def worst(self) -> float:
        """Least favourable value."""
        return self.high if self.better < 0 else self.low


TERMS: Mapping[str, Term] = MappingProxyType({
    "acceptance_rate": Term("acceptance", "accepted over tested draft tokens (alpha)", 0, 1, 1, 2),
    "draft_acceptance_rate": Term("draft acceptance rate", "accepted over drafted tokens", 0, 1, 1, 2),
    "mean_acceptance_length": Term("mean acceptance length", "tokens per round, bonus token included", 1, 1025, 1),
    "draft_length": Term("draft length", "drafted tokens per round (gamma, K); of a tree its depth", 0, 1024, 0),
    "draft_passes": Term("draft passes", "sequential draft passes per round: 1 if one pass drafts all tokens", 0, 1024, 0),
    "cost_ratio": Term("cost ratio", "time of a draft pass over that of a plain pass of the target (c)", 0, 100, -1, 2),
    "match_rate": Term("match rate", "final token is among the early candidates (p_correct)", 0, 1, 1, 2),
    "layers": Term("layers", "decoder layers of the target", 1, MAX_LAYERS, 0),
    "exit_layer": Term("exit layer", "layer of the early prediction, or of the exit", 1, MAX_LAYERS, -1, 0),
    "mean_layers": Term("mean layers", "mean layers that a generated token runs", 1, MAX_LAYERS, -1),
    "fallback_rate": Term("fallback rate", "fallbacks per token of the small model (f)", 0, 1, -1, 2),
    "rollback_rate": Term("rollback rate", "rollbacks per token of the small model (r)", 0, 1, -1, 2),
})
"""Numbers that a claim may state, by name; a method lists those that it uses."""
WHOLE = ("draft_length", "draft_passes", "layers", "exit_layer")
"""Terms that are whole numbers."""
NO_DRAFT = "none"
"""Draft of a claim whose method drafts without a model, such as n-grams of the prompt."""


@dataclass(frozen=True)
class ClaimRule:
    """What a method says about claims of its speed-up.

    Parameters
    ----------
    terms
        Names of the terms that its bound uses (`TERMS`).
    needs
        Groups of terms that a claim may need better: the terms of a group replace each other.
    required
        Terms without which there is no bound.
    names
        Other names of the method, with the kind of its draft: a kind of draft head, `none`, or empty if the name does not say.
    fixed_drafts
        True if every round drafts `draft_length` tokens, so that a rate means a least acceptance length too.
    readings
        Terms that reports confuse, with the term that the number may be in fact.
    source
        The source of the bound.
    """

    terms: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]
    source: str
    required: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    fixed_drafts: bool = False
    readings: Mapping[str, str] = field(default_factory=dict)


class Limit(NamedTuple):
    """A largest speed-up, and the inequality with its numbers."""

    value: float
    inequality: str


def _same(width: float) -> float:
    """Time of a multi-token pass, in plain passes, if it takes no longer than a plain one."""
    return 1.0


@dataclass(frozen=True)
class ClaimTerms:
    """Numbers of a claim, and least times of passes [plain passes of the target].

    Parameters
    ----------
    values
        Stated terms by name.
    verify
        Least time of a pass over this number of tokens of each sequence, at least 1 and convex.
    draft
        Least time of a draft pass; a stated `cost_ratio` replaces it.
    """

    values: Mapping[str, float]
    verify: Callable[[float], float] = _same
    draft: float = 0.0

    def stated(self, name: str) -> float | None:
        """The stated value; None if the claim does not state it."""
        return self.values.get(name)

    def best(self, name: str) -> float:
        """The stated value, else the most favourable one."""
        return self.values.get(name, TERMS[name].best)

    def having(self, **values: float) -> ClaimTerms:
        """Copy with these terms stated."""
        return replace(self, values={**self.values, **values})

    def free(self) -> ClaimTerms:
        """Copy in which drafting takes no time and every pass takes as long as a plain one."""
        return ClaimTerms({name: value for name, value in self.values.items() if name != "cost_ratio"})

    @property
    def cost_ratio(self) -> float:
        """Least time of a draft pass: as stated, else by its bytes [plain passes]."""
        return self.values.get("cost_ratio", self.draft)

    @property
    def flat(self) -> bool:
        """True if every pass takes as long as a plain one."""
        return self.verify is _same


MOST_TESTED = float(MAX_TOKENS)
"""Tested tokens per round at which a bound without a limit of its own is evaluated."""


def accepted_length(terms: ClaimTerms, longest: float) -> float | None:
    """Mean acceptance length that a claim states directly or by accepted over drafted tokens; None if it states neither."""
    stated = [] if (length := terms.stated("mean_acceptance_length")) is None else [length]
    share = terms.stated("draft_acceptance_rate")
    if share is not None and math.isfinite(longest):
        stated.append(1 + longest * share)
    return min(stated) if stated else None


def passes_per_draft_token(terms: ClaimTerms, longest: float) -> float:
    """Draft passes per drafted token: 1 for a draft model that drafts one token after another, 1/K if one pass drafts all K."""
    passes = terms.stated("draft_passes")
    return 1.0 if passes is None else passes / longest if longest else 0.0


def drafting_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up of drafting and verifying in turn: (1 + a t) / (v(1 + t) + c t), at the best t <= min(K, 1/(1 - a)).

    A round tests t of its at most K drafted tokens on average and accepts a t of them, so at most one in each round is rejected:
    (1 - a) t <= 1. Neither independence nor a rule of draft lengths is assumed. The round takes a pass of the target over at least
    1 + t tokens and c for each token drafted in sequence. A stated acceptance length limits a t.

    >>> round(drafting_bound(ClaimTerms({"acceptance_rate": 0.55, "draft_length": 7})).value, 3)  # 1/(1 - a)
    2.222
    >>> drafting_bound(ClaimTerms({"draft_length": 3})).value, drafting_bound(ClaimTerms({"mean_acceptance_length": 2.5})).value
    (4.0, 2.5)
    """
    rate, longest = terms.best("acceptance_rate"), terms.best("draft_length")
    return _of_rounds(terms, rate, min(longest, math.inf if rate == 1 else 1 / (1 - rate)))


def selective_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up if a rule may stop a draft before a token that would be rejected: `drafting_bound` with t accepted tokens.

    Of the tokens that the target would test, a share a is accepted; t <= min(K, a/(1 - a)) of a round. Section 3.5 of Leviathan et
    al. (ICML 2023) calls such a rule an oracle; here its drafts cost c: 1 / (1 - a + c a).

    >>> round(selective_bound(ClaimTerms({"acceptance_rate": 0.79, "cost_ratio": 0.75 / 6.39})).value, 3)
    3.303
    """
    rate, longest = terms.best("acceptance_rate"), terms.best("draft_length")
    return _of_rounds(terms, 1.0, min(longest, math.inf if rate == 1 else rate / (1 - rate)))


def _of_rounds(terms: ClaimTerms, rate: float, most: float) -> Limit:
    """Largest speed-up of rounds that test at most `most` tokens on average, of which they accept a share `rate`."""
    longest = terms.best("draft_length")
    length = accepted_length(terms, longest)
    if length is not None:
        most = min(most, (length - 1) / rate if rate else 0.0)
    cost = terms.cost_ratio * passes_per_draft_token(terms, longest) if terms.cost_ratio else 0.0
    if math.isinf(most) and terms.flat and not cost:
        return Limit(math.inf, "speed-up <= 1 + t without a limit: neither acceptance nor draft length is stated")
    most = min(most, MOST_TESTED)

    def speed(tested: float) -> float:
        return (1 + rate * tested) / (terms.verify(1 + tested) + cost * tested)

    tested = _largest(speed, most) if not terms.flat else most if rate > cost else 0.0
    value, verify = speed(tested), terms.verify(1 + tested)
    numbers = f"(1 + {rate:.4g} x {tested:.4g}) / ({verify:.4g} + {cost:.4g} x {tested:.4g})"
    return Limit(value, f"speed-up <= (1 + a t) / (v + c t) = {numbers} = {value:.4g}, t <= {most:.4g} tested tokens per round")


def _largest(speed: Callable[[float], float], most: float) -> float:
    """Place of the largest value in [0, most] of a linear function over a convex one, which rises and then falls."""
    low, high = 0.0, most
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if speed(left) < speed(right) else (low, right)
    return max((0.0, (low + high) / 2, most), key=speed)


def layers_bound(terms: ClaimTerms, depth: str) -> Limit:
    """Largest speed-up of a method that runs fewer layers: all layers over those that a token runs on average.

    Layers take equal times, and everything but the layers takes none. Where a layer's time grows with the position and later tokens
    run fewer layers, the ratio of times can be slightly larger.

    >>> round(layers_bound(ClaimTerms({"layers": 24, "mean_layers": 14.7}), "mean_layers").value, 2)
    1.63
    """
    layers, run = terms.best("layers"), terms.best(depth)
    value = max(layers / run, 1.0) if math.isfinite(layers) else math.inf
    return Limit(value, f"speed-up <= layers / layers of a token = {layers:.4g} / {run:.4g} = {value:.4g}")


DRAFTING = ("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate", "draft_length")
"""Terms that only methods have whose drafted tokens a pass of the target verifies."""
ANY_DRAFTING = ClaimRule(
    terms=DRAFTING, needs=(("acceptance_rate", "mean_acceptance_length", "draft_acceptance_rate"),),
    source="tokens per pass of the target: every token is drafted and verified by such a pass, or comes from one",
)
"""What holds for claims of a method that is not named, or not known here: drafts cost nothing, as they may overlap with passes."""
