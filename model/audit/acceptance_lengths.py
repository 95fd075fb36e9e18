"""Tokens per round that stated rates allow, and what a rate may mean in reports: to find numbers that contradict each other.

Of rounds with K drafted tokens, a token is tested if all before it in its round were accepted; each round emits its accepted tokens
and one more. Acceptance as the project uses the word is accepted over tested tokens. No independence is assumed: a rate allows an
interval of lengths, and only a length outside of it contradicts the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

Interval = tuple[float, float]


class RateReading(NamedTuple):
    """What a printed rate may mean.

    Parameters
    ----------
    about
        The meaning in words.
    lengths
        Shortest and longest mean acceptance length [tokens] at a rate [-] and a draft length K [tokens].
    """

    about: str
    lengths: Callable[[float, float], Interval]


def of_tested(rate: float, drafted: float) -> Interval:
    """Shortest and longest mean acceptance length at accepted over tested tokens `rate`, of rounds with `drafted` tokens each.

    With A accepted tokens per round, a share A (1 - a) / a of rounds ends with a rejection, and at most A / K end without: one of
    the two happens in every round, so A >= 1 / ((1 - a) / a + 1 / K). At most one token per round is rejected, and K are tested:
    A <= a min(K, 1 / (1 - a)). `drafted` is infinite if it is not known; then a round may also draft nothing.

    >>> [round(end, 3) for end in of_tested(0.8, 3)], of_tested(0.5, math.inf)
    ([2.714, 3.4], (1.0, 2.0))
    """
    if rate == 0 or drafted == 0:
        return 1.0, 1.0
    least = 0.0 if math.isinf(drafted) else 1 / ((1 - rate) / rate + 1 / drafted)
    return 1 + least, 1 + rate * min(drafted, math.inf if rate == 1 else 1 / (1 - rate))


def of_drafted(rate: float, drafted: float) -> Interval:
    """The mean acceptance length at accepted over drafted tokens `rate`: 1 + K r.

    >>> of_drafted(0.5, 4)
    (3.0, 3.0)
    """
    length = 1 + rate * drafted if rate else 1.0
    return length, length


def if_independent(rate: float, drafted: float) -> float:
    """The mean acceptance length of independent acceptances: (1 - a^(K+1)) / (1 - a) (Eq. 1 of [Leviathan2023]).

    [Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
    arXiv:2211.17192.

    >>> round(if_independent(0.8, 3), 3)
    2.952
    """
    return drafted + 1 if rate == 1 else (1 - rate ** (drafted + 1)) / (1 - rate)


def _of_emitted(rate: float, drafted: float) -> Interval:
    return rate * (drafted + 1), rate * (drafted + 1)


def _of_generated(rate: float, drafted: float) -> Interval:
    length = math.inf if rate == 1 else 1 / (1 - rate)
    return length, length


def _of_first(rate: float, drafted: float) -> Interval:
    return 1 + rate, 1 + rate * drafted


READINGS = {
    "acceptance_rate": RateReading("the acceptance, accepted over tested tokens", of_tested),
    "draft_acceptance_rate": RateReading("the draft acceptance rate, accepted over drafted tokens", of_drafted),
    "of_generated": RateReading("the share of generated tokens that were drafted", _of_generated),
    "of_emitted": RateReading("generated tokens over K + 1 per round, the bonus token counted", _of_emitted),
    "of_first": RateReading("the acceptance of the first drafted token alone", _of_first),
}
"""Meanings of rates in reports; the first two are terms of a claim. `of_first`: no later token is accepted without the first."""


def agreeing(name: str, rate: Interval, length: Interval, drafted: float) -> list[str]:
    """Meanings, other than the stated one, under which a rate and a mean acceptance length agree, in words.

    Parameters
    ----------
    name
        The term that the claim states.
    rate, length
        Ends of the rounding of rate [-] and mean acceptance length [tokens].
    drafted
        The draft length [tokens]; infinite if it is not stated.

    >>> agreeing("acceptance_rate", (0.54, 0.56), (4.7, 4.9), 7)[0]
    '0.55 is the draft acceptance rate, accepted over drafted tokens'
    """
    said = f"{(rate[0] + rate[1]) / 2:.4g}"
    found = []
    for other, reading in READINGS.items():
        if other == name or (math.isinf(drafted) and other in ("of_emitted", "of_first")):
            continue  # without K these say nothing of the length
        if math.isinf(drafted) and other == "draft_acceptance_rate":
            tokens = (length[0] + length[1] - 2) / (rate[0] + rate[1])
            found.append(f"{said} is {reading.about}, and drafts had {tokens:.3g} tokens on average")
            continue
        if _meet((reading.lengths(rate[0], drafted)[0], reading.lengths(rate[1], drafted)[1]), length):
            found.append(f"{said} is {reading.about}")
    stated = READINGS[name]
    without_bonus = length[0] + 1, length[1] + 1
    if _meet((stated.lengths(rate[0], drafted)[0], stated.lengths(rate[1], drafted)[1]), without_bonus):
        found.append(f"{(length[0] + length[1]) / 2:.4g} leaves out the bonus token")
    return found


def _meet(one: Interval, other: Interval) -> bool:
    return max(one[0], other[0]) <= min(one[1], other[1]) * (1 + 1e-9)
