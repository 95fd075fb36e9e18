"""Decoding as a walk over stages: where a token's cost depends on the matches before it only through a few states.

A method that has stages gets its time and unit-time, under any law of matches and for many replications at once, from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.outcomes.outcome_laws import Chain, Law, Replay

Floats = NDArray[np.float64]


class Stage(NamedTuple):
    """What one token takes of the process that decodes it, from the verification before it to its own.

    The first token, and every one after a miss, is decoded in stage 0; after a match in a stage the next is in its `on_match`.
    `busy` is the unit-time spent meanwhile, the sub-processes' included.
    """

    time: float
    busy: float
    on_match: int


def moments(steps: tuple[Stage, ...], n: int, law: Law) -> tuple[float, float, float, float]:
    """Mean and variance of the time, mean of the unit-time and of their ratio, of decoding `n` tokens under a law of matches.

    The ratio is nan where the matches of a run do not add up to its time (three stages) and the law is not a record.
    """
    miss, match = steps[0], steps[1]
    if len(steps) == 2:
        mass, matches = law.pmf(n - 1), np.arange(n)
        time = n * miss.time + matches * (match.time - miss.time)
        busy = n * miss.busy + matches * (match.busy - miss.busy)
        mean = float(mass @ time)
        return mean, float(mass @ (time - mean) ** 2), float(mass @ busy), float(mass @ (busy / time))
    if isinstance(law, Replay):
        time, busy = sums(steps, [law.first(n - 1).T], n, len(law.records))
        return float(time.mean()), float(time.var()), float(busy.mean()), float((busy / time).mean())
    if not isinstance(law, Chain):
        raise checks.ParameterError("these stages need a law of single positions; ask for views = ['paths']")
    return *_chain_moments(steps, n, law), float("nan")


def _chain_moments(steps: tuple[Stage, ...], n: int, law: Chain) -> tuple[float, float, float]:
    """Mean and variance of the time and mean of the unit-time of `n` tokens, forward over (stage, last outcome)."""
    times, busies = (np.array([getattr(stage, field) for stage in steps]) for field in ("time", "busy"))
    # mass, first and second moment of the time so far, first of the unit-time: rows; stage; last outcome.
    state = np.zeros((4, len(steps), 2))
    state[0, 0, 0] = 1.0
    # The last token's match leads nowhere, so the law is not asked for it: as in the sampler.
    after_failure, after_success = (np.append(side, 0.0) for side in law.chances(n - 1))
    for low, high in zip(after_failure, after_success, strict=True):
        mass, first, second, busy = state
        spent = np.stack([mass, first + mass * times[:, None], second + 2 * first * times[:, None] + mass * times[:, None] ** 2,
                          busy + mass * busies[:, None]])  # fmt: skip
        hit = spent * np.array([low, high])
        state = np.zeros_like(state)
        state[:, 0, 0] = (spent - hit).sum(axis=(1, 2))
        for index, stage in enumerate(steps):
            state[:, stage.on_match, 1] += hit[:, index].sum(axis=1)
    _, mean, square, busy_mean = state.sum(axis=(1, 2))
    return float(mean), float(max(square - mean**2, 0.0)), float(busy_mean)


def sums(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], tokens: int, replications: int
) -> tuple[Floats, Floats]:
    """Time and unit-time of many decodings at once: each token's stage follows from the matches before it.

    `matches` are tiles of shape (positions, replications), of the first tokens - 1 positions together.

    >>> miss, match = Stage(time=40.0, busy=100.0, on_match=1), Stage(time=20.0, busy=80.0, on_match=1)
    >>> time, busy = sums((miss, match), [np.array([[True, False]])], tokens=2, replications=2)
    >>> time.tolist(), busy.tolist()
    ([60.0, 80.0], [180.0, 200.0])
    """
    if len(steps) == 2:
        count = np.zeros(replications)
        for tile in matches:
            # Bytes are added much faster than anything wider, and suffice for a tile of coins.
            count += np.add.reduce(tile.view(np.uint8), axis=0, dtype=np.uint8 if len(tile) < 256 else np.int64)
        miss, match = steps
        time, busy = tokens * miss.time + count * (match.time - miss.time), tokens * miss.busy + count * (match.busy - miss.busy)
        return time, busy
    on_match = np.array([stage.on_match for stage in steps], dtype=np.uint8)
    visits = np.zeros((len(steps), replications))
    stage = np.zeros(replications, dtype=np.uint8)
    for tile in matches:
        for row in tile:
            stage = on_match.take(stage, mode="clip") * row  # clipped, as checking every index takes longer than the look-up
            for index in range(1, len(steps)):
                visits[index] += stage == index
    visits[0] = tokens - visits[1:].sum(axis=0)
    return (
        np.asarray(np.array([stage.time for stage in steps]) @ visits),
        np.asarray(np.array([stage.busy for stage in steps]) @ visits),
    )
