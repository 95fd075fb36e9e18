"""The theorems on PEARL, 20: the law of its rounds, which are not simulated."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING

from model.methods.pearl import theory as pearl
from model.methods.speculative import theory as speculative
from sim.theorems.pipelined_examples import CLOSE, rates, whole
from sim.theorems.theorem import Example, Theorem, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def rounds_of_pearl(x: Example) -> None:
    """The chain of its two kinds of rounds, with every outcome of a whole draft tried."""
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    tokens = stay = 0.0
    for outcome in itertools.product((True, False), repeat=gamma):
        chance = math.prod(alpha if kept else 1 - alpha for kept in outcome)
        kept = len(list(itertools.takewhile(bool, outcome)))
        tokens += chance * min(kept + 1, gamma)
        stay += chance * (kept == gamma)
    # Rounds of the two kinds in the long run: to whole drafts with alpha, back from them with 1 - stay.
    share = alpha / (alpha + 1 - stay) if alpha else 0.0
    equal("tokens of a round", float(pearl.expected_tokens(alpha, gamma)), 1 - share + share * tokens, 1e-11)


def pearl_at_its_best(x: Example) -> None:
    gamma, c = x["draft_length"], x["cost_ratio"]
    best = gamma / max(gamma * c, 1)
    equal("speed where all is accepted", float(pearl.speedup(1, gamma, c)), best, CLOSE)
    at_most("speed", float(pearl.speedup(x["acceptance_rate"], gamma, c)), best, CLOSE)


def pearl_beats_drafting(x: Example) -> None:
    given = x["acceptance_rate"], x["draft_length"], x["cost_ratio"]
    at_most("speed of drafting first", float(speculative.speedup(*given)), float(pearl.speedup(*given)), CLOSE)


# --- What they are tried on ---


def _pearls() -> SearchStrategy[Example]:
    quarters = whole(0, 8).map(lambda number: number / 4)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "draft_length": whole(1, 8), "cost_ratio": quarters})


_theorem = partial(Theorem, method="pearl", source="[Liu2024], Section 3", given=_pearls)

THEOREMS = (
    _theorem("20a", "A round gives the mean tokens that the chain of its two kinds of rounds has.", holds=rounds_of_pearl),
    _theorem("20b", "Where all is accepted the speed is gamma / max(gamma c, 1), and never higher.", holds=pearl_at_its_best),
    Theorem(
        "20c", "It is never slower than drafting first and verifying then.", method="pearl",
        source="false: the first token of a draft is verified alone", given=_pearls, holds=pearl_beats_drafting, expect="fails",
    ),
)  # fmt: skip
