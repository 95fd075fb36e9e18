"""Faults of draft heads, parallel drafts and levels of difficulty, for the theorems 40 to 42 on speculative decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.methods.rounds import round_laws, round_moments
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import drafter_prices, parallel_drafts
from model.methods.speculative import theory as formulas
from model.steps import MASK, Features, Forward
from sim.theorems.of_methods import speculative_heads
from tests.support.theorem_checks import Fault, with_fault


def a_pass_for_each(right: Any, *args: Any, parallel: bool = False, **named: Any) -> Any:
    """Price a parallel draft as a chain."""
    return right(*args, **named)


def one_pass_for_all(right: Any, *args: Any, parallel: bool = False, **named: Any) -> Any:
    """Price a chain as a parallel draft."""
    return right(*args, parallel=True, **named)


def unpaid(right: Any, *args: Any, **named: Any) -> Any:
    """Forget the time of drafts in a round's unit-time."""
    prices, reading = right(*args, **named)
    return prices._replace(busy=prices.busy - (prices.time - prices.time[..., :1])), reading


def longer_by_one(right: Any, head: Any, sequence: Any, states: Any, length: int) -> Any:
    """Draft a token more than can be used."""
    return (yield from right(head, sequence, states, length + 1))


def shorter_by_one(right: Any, head: Any, sequence: Any, states: Any, length: int) -> Any:
    """Draft a token less."""
    return (yield from right(head, sequence, states, max(length - 1, 0)))


def unread_rest(right: Any, head: Any, sequence: Any, states: Any, length: int) -> Any:
    """Read only the last of the new tokens of a round: the head lacks rows."""
    head.rows = len(sequence) - 1
    return (yield from right(head, sequence, Features(states.output, states.first + states.length - 1, 1), length))


def first_again(right: Any, output: Any, guesses: Any, sampled: bool, first: Any = None, *how: Any) -> Any:
    """Accept the first drafted token unread."""
    kept, token = yield from right(output, guesses, sampled, first, *how)
    return (1, token) if guesses and not kept else (kept, token)


def dropped(right: Any, output: Any, guesses: Any, sampled: bool, first: Any = None, *how: Any) -> Any:
    """Replace the last accepted token by the target's next choice."""
    kept, token = yield from right(output, guesses, sampled, first, *how)
    return (kept - 1, token) if kept else (kept, token)


def one_mask_more(right: Any, head: Any, sequence: Any, states: Any, length: int) -> Any:
    """Read one mask more than drafted tokens."""
    if not length:
        return []
    words = (*sequence[head.rows :], *[MASK] * length)
    out = yield Forward(head.role, words, head.rows, head.span, states, length + 1, head.unit)
    found = []
    for offset in range(-length - 1, -1):
        found.append(speculative.DraftedToken((yield speculative.Read("next", out, offset)), out, offset))
    return found


def without_rereading(right: Any, *args: Any, **named: Any) -> Any:
    return np.zeros_like(right(*args, **named))


def equal_shares(right: Any, self: Any, levels: Any, weights: Any) -> None:
    right(self, levels, [1 + 3 * index for index in range(len(levels))])


def mixed_without_spread(right: Any, parts: Any, weights: Any = None) -> Any:
    """Leave out the variance between levels."""
    found = right(parts, weights)
    return found._replace(variance=np.dot(weights, [each.variance for each in parts]))


def averaged_survivors(right: Any, self: Any) -> Any:
    """Take the mean of the levels' rates instead of that over survivors, in reverse."""
    return right(self)[::-1]


def as_a_chain(right: Any, x: Any, parallel: bool) -> Any:
    return right(x, False) if parallel else right(x, False) + 1


def more_needed(right: Any, *args: Any, **named: Any) -> Any:
    return 0.97 * right(*args, **named)


def chain_speed(right: Any, rate: Any, length: Any, ratio: Any, **named: Any) -> Any:
    return formulas.speedup(rate, length, ratio, **named)


HEAD_PRICES = with_fault(a_pass_for_each, drafter_prices, "head_prices")


def _both(fault: Any) -> Fault:
    def spoil(patch: pytest.MonkeyPatch) -> None:
        for name in ("draft_by_head", "draft_in_one_pass"):
            with_fault(fault, speculative, name)(patch)

    return spoil


FAULTS: list[tuple[str, str, Fault]] = [
    ("40a", "a pass for each", HEAD_PRICES),
    ("40a", "one pass for all", with_fault(one_pass_for_all, drafter_prices, "head_prices")),
    ("40b", "a pass for each", HEAD_PRICES),
    ("40b", "shorter drafts", _both(shorter_by_one)),
    ("40c", "a pass for each", HEAD_PRICES),
    ("40c", "drafts unpaid", with_fault(unpaid, drafter_prices, "head_prices")),
    ("40d", "shorter drafts", _both(shorter_by_one)),
    ("40e", "first unread", with_fault(first_again, speculative, "accept_or_reject")),
    ("40e", "last dropped", with_fault(dropped, speculative, "accept_or_reject")),
    ("40f", "first unread", with_fault(first_again, speculative, "accept_or_reject")),
    ("40g", "nothing read again", with_fault(without_rereading, formulas, "starts_by_accepted")),
    ("40g", "one mask more", with_fault(one_mask_more, speculative, "draft_in_one_pass")),
    ("40g", "longer drafts", _both(longer_by_one)),
    ("40g", "rows not read", _both(unread_rest)),
    ("40h", "shorter drafts", with_fault(shorter_by_one, speculative, "draft_by_head")),
    ("41a", "in reverse", with_fault(averaged_survivors, round_laws.MixedRounds, "conditional_rates")),
    ("41c", "no spread", with_fault(mixed_without_spread, round_moments, "mixed")),
    ("41c", "other shares", with_fault(equal_shares, round_laws.MixedRounds, "__init__")),
    ("41d", "first level", with_fault(lambda right, self, draws: ((0 * level, tile) for level, tile in right(self, draws)),
                                      round_laws.MixedRounds, "_levels")),
    ("42a", "a pass more", with_fault(longer_by_one, speculative, "draft_in_one_pass")),
    ("42b", "a longer chain", with_fault(as_a_chain, speculative_heads, "_best")),
    ("42c", "lower root", with_fault(more_needed, parallel_drafts, "break_even_acceptance")),
    ("42c", "a chain's speed", with_fault(chain_speed, parallel_drafts, "parallel_speedup")),
    ("42f", "a chain's speed", with_fault(chain_speed, parallel_drafts, "parallel_speedup")),
    ("42f", "a pass for each", HEAD_PRICES),
]  # fmt: skip
