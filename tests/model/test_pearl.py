"""PEARL's rounds: against the chain of their two kinds in fractions, outcome by outcome, and where the law is plain to see."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.methods.pearl import theory as pearl
from tests.support.exact import RATES, close, near

DRAFTS = st.integers(1, 12)


def round_of(alpha: Fraction, gamma: int) -> Fraction:
    """Mean tokens of a round in the long run.

    A round verifies a first token, and gives one whether that stays or not; if it stays, the next round verifies a whole draft.
    Such a round gives what is kept and, unless all is, the target's own token; if all is kept, the next is of its kind again.
    """
    whole = [(alpha**kept * (1 - alpha), kept + 1, False) for kept in range(gamma)] + [(alpha**gamma, gamma, True)]
    assert sum(chance for chance, *_ in whole) == 1
    # Where the second kind never ends all rounds are of it; else what comes to a kind is what leaves it.
    ends = sum(chance for chance, _, again in whole if not again)
    share = alpha / (alpha + ends) if ends else Fraction(1)
    return 1 - share + share * sum((chance * tokens for chance, tokens, _ in whole), Fraction(0))


@given(RATES, DRAFTS)
def test_tokens_are_those_of_the_chain_of_rounds(alpha: float, gamma: int) -> None:
    assert close(pearl.expected_tokens(alpha, gamma), round_of(Fraction(alpha), gamma))


@given(RATES, DRAFTS, st.floats(0.01, 4))
def test_a_round_takes_the_longer_of_draft_and_pass(alpha: float, gamma: int, ratio: float) -> None:
    want = round_of(Fraction(alpha), gamma) / max(gamma * Fraction(ratio), Fraction(1))
    assert close(pearl.speedup(alpha, gamma, ratio), want)


def test_a_law_by_hand() -> None:
    """Half of all tokens stay, drafts of two: a whole draft gives 1.5; of such rounds there are 2 to every 3 of the other kind."""
    assert near(pearl.expected_tokens(0.5, 2), 0.6 + 0.4 * 1.5)
    assert near(pearl.speedup(0.5, 2, [0.0, 0.5, 1.0]), [1.2, 1.2, 0.6])
    assert near(pearl.expected_tokens(np.linspace(0, 1, 9), 1), np.ones(9))  # of one token there is nothing to draft ahead
