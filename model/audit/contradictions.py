"""Stated numbers of a claim that contradict each other: what acceptance length, acceptance and draft length say of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from model.architectures import draft_heads
from model.audit import acceptance_lengths
from model.audit.acceptance_lengths import Interval
from model.audit.claims import SpeedupClaim
from model.methods.claim_bounds import NO_DRAFT, TERMS, ClaimRule, ClaimTerms, Limit

LENGTH, RATES, DRAFTED = "mean_acceptance_length", ("acceptance_rate", "draft_acceptance_rate"), "draft_length"
ROUNDING = 1e-9
"""Relative excess over an end of an interval that is numerical [-]."""


SHORTER = 0.5
"""Tokens by which drafts are granted to be shorter than the draft length on average: the last round of an output drafts fewer."""


class Contradiction(NamedTuple):
    """A number that other numbers of the claim do not allow.

    Parameters
    ----------
    limit_name, limit
        What the others allow, in words, and its value [tokens per round].
    inequality
        Both numbers and the limit, and the meanings of the numbers under which they agree.
    """

    limit_name: str
    limit: float
    inequality: str


class _Said(NamedTuple):
    """Tokens per round that some terms of a claim allow: the terms in words, and least and most tokens."""

    names: tuple[str, ...]
    words: str
    least: float
    most: float


def of_lengths(claim: SpeedupClaim, rule: ClaimRule, bound: Callable[[ClaimTerms], Limit]) -> Contradiction | None:
    """The first contradiction among acceptance length, acceptance, draft acceptance rate and draft length; None if they agree.

    >>> from model.audit.claims import of_rows
    >>> from model.methods.claim_bounds import ANY_DRAFTING, drafting_bound
    >>> [claim] = of_rows([{"AL": "4.2", "K": 3}])
    >>> of_lengths(claim, ANY_DRAFTING, drafting_bound).inequality
    'mean acceptance length 4.2 is more than 4, the most tokens per round by draft length 3'
    """
    if LENGTH not in rule.terms:
        return None
    said = list(_said(claim, rule, bound))
    if LENGTH in claim.numbers:
        length = claim.numbers[LENGTH].at(-1), claim.numbers[LENGTH].at(1)
        for each in said:
            if length[0] > each.most * (1 + ROUNDING):
                return _contradiction(claim, each, length, each.most, more=True)
            if length[1] < each.least * (1 - ROUNDING):
                return _contradiction(claim, each, length, each.least, more=False)
    for less in said:
        for more in said:
            if less.most * (1 + ROUNDING) < more.least:
                return _of_rates(claim, less, more)
    return None


def _of_rates(claim: SpeedupClaim, less: _Said, more: _Said) -> Contradiction:
    """Two rates that contradict each other; the acceptance may have another meaning."""
    name = f"most tokens per round by {less.words}"
    text = f"{more.words} means at least {more.least:.4g} tokens per round, more than {less.most:.4g}, the {name}"
    by_drafted = less if less.names[0] == RATES[1] else more
    rate, drafted = claim.numbers[RATES[0]], claim.numbers[DRAFTED].value
    lengths = by_drafted.least, by_drafted.most
    found = acceptance_lengths.agreeing(RATES[0], (max(rate.at(-1), 0.0), min(rate.at(1), 1.0)), lengths, drafted)
    return Contradiction(name, less.most, text + _if_any([each for each in found if "bonus" not in each]))


def of_dependence(claim: SpeedupClaim, rule: ClaimRule) -> str:
    """Note on an acceptance length that the stated acceptance gives only if acceptances depend on each other, or nothing."""
    numbers = claim.numbers
    if not _fixed(claim, rule) or not {LENGTH, RATES[0], DRAFTED} <= {*numbers}:
        return ""
    ends = [acceptance_lengths.if_independent(min(max(numbers[RATES[0]].at(sign), 0.0), 1.0), numbers[DRAFTED].value)
            for sign in (-1, 0, 1)]  # fmt: skip
    if numbers[LENGTH].at(1) >= ends[0] * (1 - ROUNDING) and numbers[LENGTH].at(-1) <= ends[2] * (1 + ROUNDING):
        return ""
    stated = f"acceptance {numbers[RATES[0]].value:g} at draft length {numbers[DRAFTED].value:g}"
    return f"; {stated} means {ends[1]:.3g} tokens per round if acceptances are independent, not {numbers[LENGTH].value:g}"


def _fixed(claim: SpeedupClaim, rule: ClaimRule) -> bool:
    """True if every round drafts the stated tokens; a search for n-grams may find fewer, or none."""
    return rule.fixed_drafts and claim.draft != NO_DRAFT


def _said(claim: SpeedupClaim, rule: ClaimRule, bound: Callable[[ClaimTerms], Limit]) -> Iterable[_Said]:
    """What the draft length, each rate, and each rate at the draft length say; the most tokens are those of the method's bound."""
    lengths: dict[str, Callable[[float, float], Interval]] = {
        RATES[0]: acceptance_lengths.of_tested, RATES[1]: acceptance_lengths.of_drafted,
    }  # fmt: skip
    for names in ((DRAFTED,), (RATES[0],), (RATES[0], DRAFTED), (RATES[1], DRAFTED)):
        if not {*names} <= {*claim.numbers} & {*rule.terms}:
            continue
        ends = {name: [min(max(claim.numbers[name].at(sign), TERMS[name].low), TERMS[name].high) for sign in (-1, 1)]
                for name in names}  # fmt: skip
        least = 1.0
        if len(names) == 2 and _fixed(claim, rule):
            least = lengths[names[0]](ends[names[0]][0], max(ends[DRAFTED][0] - SHORTER, 0.0))[0]
        most = bound(ClaimTerms({name: high for name, (_, high) in ends.items()}).free()).value
        words = " at ".join(f"{TERMS[name].label} {claim.numbers[name].value:g}" for name in names)
        yield _Said(names, words, least, most)


def _contradiction(claim: SpeedupClaim, said: _Said, length: Interval, limit: float, *, more: bool) -> Contradiction:
    limit_name = f"{'most' if more else 'least'} tokens per round by {said.words}"
    stated = f"{TERMS[LENGTH].label} {claim.numbers[LENGTH].value:g}"
    text = f"{stated} is {'more' if more else 'less'} than {limit:.4g}, the {limit_name}"
    drafted = claim.numbers[DRAFTED].value if DRAFTED in claim.numbers else math.inf
    name = said.names[0]
    if name in RATES:
        if name == RATES[0] and len(said.names) == 2:
            independent = acceptance_lengths.if_independent(claim.numbers[name].value, drafted)
            text += f" ({independent:.4g} if acceptances are independent)"
        rate = claim.numbers[name].at(-1), claim.numbers[name].at(1)
        readings = acceptance_lengths.agreeing(name, (max(rate[0], 0.0), min(rate[1], 1.0)), length, drafted)
        if more and claim.draft in draft_heads.ABOUT:
            readings.append("the length is of a tree of drafts and the rate of single drafts")
        if not more:
            mean = (claim.numbers[LENGTH].value - 1) / claim.numbers[name].value
            readings += [f"drafts had {mean:.3g} tokens on average"] if name == RATES[1] else []
            readings.append("outputs have few rounds, of which the last is cut short")
        text += _if_any(readings)
    return Contradiction(limit_name, limit, text)


def _if_any(readings: list[str]) -> str:
    """End of a sentence on the meanings under which numbers agree."""
    if not readings:
        return "; no other meaning of the rate known here makes them agree"
    return f"; they agree if {', or if '.join(readings)}"
