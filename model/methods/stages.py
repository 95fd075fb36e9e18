"""Decoding as a Markov walk over stages: a token's cost depends on the matches before it only through a small state.

Gives a method with stages its time and unit-time, in expectation under any law of matches and for many replications at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.outcomes.outcome_laws import Chain, Law, RecordedProbabilities, Replay

Floats = NDArray[np.float64]


class Stage(NamedTuple):
    """Cost of one token, from the verification of the token before to its own verification.

    The first token and every token after a miss are decoded in stage 0; after a match in a stage the next token is in its
    `on_match`. `time` is that of the main process, `busy` the unit-time of all processes. If times depend on the position, both are
    arrays of shape (tokens,).
    """

    time: float | Floats
    busy: float | Floats
    on_match: int


class StagePoint(NamedTuple):
    """Stages, number of tokens and law of matches of a decoding."""

    steps: tuple[Stage, ...]
    tokens: int
    law: Law


def by_position(steps: tuple[Stage, ...]) -> bool:
    """Return True if times depend on the position."""
    return any(np.ndim(value) for stage in steps for value in stage[:2])


def moments(steps: tuple[Stage, ...], n: int, law: Law) -> tuple[float, float, float, float]:
    """Mean and variance of the time, mean unit-time, and mean ratio unit-time / time, of decoding `n` tokens.

    The ratio is nan if the number of matches does not determine the time (three stages, or times by position), unless the law is a
    record: the sum would have a term for each possible sequence of matches.
    """
    mean, variance, busy, ratio = moments_of_points([StagePoint(steps, n, law)])[:, 0].tolist()
    return mean, variance, busy, ratio


def moments_of_points(points: Sequence[StagePoint]) -> Floats:
    """`moments` of many decodings, shape (4, points); those with equal tokens and stage transitions are computed together."""
    found = np.empty((4, len(points)))
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    counted: dict[int, list[int]] = {}
    for index, (steps, n, law) in enumerate(points):
        if len(steps) == 2 and not by_position(steps):
            counted.setdefault(n, []).append(index)
        elif isinstance(law, Replay):
            time, busy = sums(steps, [law.first(n - 1).T], n, len(law.records))
            found[:, index] = time.mean(), time.var(), busy.mean(), (busy / time).mean()
        else:
            together.setdefault((n, tuple(stage.on_match for stage in steps)), []).append(index)
    for n, where in counted.items():
        laws = {id(points[index].law): points[index].law for index in where}
        place = {name: number for number, name in enumerate(laws)}
        which = np.array([place[id(points[index].law)] for index in where])
        miss, match = (np.array([points[index].steps[stage][:2] for index in where], dtype=np.float64).T for stage in (0, 1))
        found[:, where] = moments_of_counts(miss, match, n, [*laws.values()], which)
    for (n, on_match), where in together.items():
        found[:3, where] = _forward_moments([points[index] for index in where], n, on_match)
        found[3, where] = np.nan
    return found


_CELLS = 60_000
"""Numbers of matches x points of a block that stays in the cache of a processor."""


def moments_of_counts(miss: Floats, match: Floats, tokens: int, laws: Sequence[Law], law: NDArray[np.intp]) -> Floats:
    """`moments` of many decodings with two stages at uniform costs, from the distribution of the number of matches.

    Parameters
    ----------
    miss, match
        Time and unit-time of a token in stage 0, and after a match; shape (2, points).
    tokens
        Tokens of each decoding.
    laws, law
        Distinct laws, and the index of each point's law.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = moments_of_counts(np.array([[4.0], [4.0]]), np.array([[2.0], [4.0]]), 2, [Iid(0.5)], np.zeros(1, dtype=np.intp))
    >>> found.T.round(6).tolist()  # one match or none: a time of 6 or 8, and a unit-time of 8
    [[7.0, 1.0, 8.0, 1.166667]]
    """
    mass, count = np.stack([each.pmf(tokens - 1) for each in laws]), np.arange(tokens)
    matches = mass @ count
    spread = (mass * (count - matches[:, None]) ** 2).sum(axis=1)
    start, saved = tokens * miss, match - miss
    time, busy = start + saved * matches[law]
    ratio = np.empty(law.size)
    size = max(_CELLS // tokens, 1)
    for at in range(0, law.size, size):
        part = slice(at, at + size)
        each_time, each_busy = start[:, part, None] + saved[:, part, None] * count
        ratio[part] = np.einsum("pc,pc->p", mass[law[part]], np.divide(each_busy, each_time, out=each_busy))
    return np.stack([time, spread[law] * saved[0] ** 2, busy, ratio])


def _forward_moments(points: Sequence[StagePoint], n: int, on_match: tuple[int, ...]) -> Floats:
    """Mean and variance of the time and mean unit-time of `n` tokens, shape (3, points).

    Forward recursion over (stage, last outcome), for each chain of a mixture. It sums deviations from each token's mean time, which
    avoids the cancellation of large squares.
    """
    laws = {id(point.law): point.law for point in points}
    chains = {name: _chains(law) for name, law in laws.items()}
    first = dict(zip(chains, np.cumsum([0, *map(len, chains.values())]), strict=False))
    # The last token's match has no effect, so its chance stays 0, as in the sampler. Shape (token, last outcome, chain).
    chances = np.zeros((n, 2, sum(map(len, chains.values()))))
    for name, each in chains.items():
        for number, chain in enumerate(each):
            chances[:-1, :, first[name] + number] = np.transpose(chain.probabilities(n - 1))
    walks = {id(point.steps): point.steps for point in points}
    walk = {name: index for index, name in enumerate(walks)}
    times, busies = (
        np.stack([[np.broadcast_to(stage[field], n) for stage in steps] for steps in walks.values()], axis=-1) for field in (0, 1)
    )  # shape (stage, token, walk)
    # A column is a point with one of its chains.
    sizes = [len(chains[id(point.law)]) for point in points]
    of = np.repeat(np.arange(len(points)), sizes)
    own_walk = np.repeat([walk[id(point.steps)] for point in points], sizes)
    own_chain = np.concatenate([first[id(point.law)] + np.arange(size) for point, size in zip(points, sizes, strict=True)])
    # Shape (moment, stage, last outcome, column): probability, first and second central moment of the time so far.
    state = np.zeros((3, len(on_match), 2, of.size))
    state[0, 0, 0] = 1.0
    mean, busy = np.zeros(of.size), np.zeros(of.size)
    for token in range(n):
        mass = state[0].sum(axis=1)
        time = times[:, token][:, own_walk]
        expected = (mass * time).sum(axis=0)
        mean += expected
        busy += (mass * busies[:, token][:, own_walk]).sum(axis=0)
        above = (time - expected)[:, None]
        state[2] += above * (2 * state[1] + above * state[0])
        state[1] += above * state[0]
        hit = state * chances[token][:, own_chain]
        missed = (state - hit).sum(axis=(1, 2))
        state = np.zeros_like(state)
        state[:, 0, 0] = missed
        for stage, following in enumerate(on_match):
            state[:, following, 1] += hit[:, stage].sum(axis=1)
    variance = np.maximum(state[2].sum(axis=(0, 1)), 0.0)
    weight = 1 / np.array(sizes)
    means = weight * np.bincount(of, mean)
    spread = weight * np.bincount(of, variance + (mean - means[of]) ** 2)
    return np.stack([means, spread, weight * np.bincount(of, busy)])


def _chains(law: Law) -> Sequence[Chain]:
    """Equally likely chains that form the law."""
    if isinstance(law, Chain):
        return (law,)
    if isinstance(law, RecordedProbabilities):
        return law.chains
    raise checks.ParameterError("these stages need a law of single positions; ask for views = ['paths']")


def sums(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], tokens: int, replications: int
) -> tuple[Floats, Floats]:
    """Time and unit-time of many decodings at once, from their matches.

    `matches` yields tiles of shape (positions, replications) that cover the first tokens - 1 positions.

    >>> miss, match = Stage(time=40.0, busy=100.0, on_match=1), Stage(time=20.0, busy=80.0, on_match=1)
    >>> time, busy = sums((miss, match), [np.array([[True, False]])], tokens=2, replications=2)
    >>> time.tolist(), busy.tolist()
    ([60.0, 80.0], [180.0, 200.0])
    """
    if by_position(steps):
        return _sums_by_position(steps, matches, tokens, replications)
    if len(steps) == 2:
        count = np.zeros(replications)
        for tile in matches:
            # Adding bytes is much faster than adding wider integers, and a byte can count the rows of a tile.
            count += np.add.reduce(tile.view(np.uint8), axis=0, dtype=np.uint8 if len(tile) < 256 else np.int64)
        miss, match = steps
        time, busy = tokens * miss.time + count * (match.time - miss.time), tokens * miss.busy + count * (match.busy - miss.busy)
        return np.asarray(time), np.asarray(busy)
    visits = np.zeros((len(steps), replications))
    for stage in _walked(steps, matches, replications):
        for index in range(1, len(steps)):
            visits[index] += stage == index
    visits[0] = tokens - visits[1:].sum(axis=0)
    return (
        np.asarray(np.array([stage.time for stage in steps]) @ visits),
        np.asarray(np.array([stage.busy for stage in steps]) @ visits),
    )


def _sums_by_position(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], tokens: int, replications: int
) -> tuple[Floats, Floats]:
    # Shape (time and unit-time, stage, token).
    spent = np.array([[np.broadcast_to(stage[field], tokens) for stage in steps] for field in (0, 1)])
    found, at = np.zeros((2, replications)), 0
    if len(steps) == 2:
        saved = spent[:, 1] - spent[:, 0]
        for tile in matches:
            found += saved[:, at + 1 : at + 1 + len(tile)] @ tile.astype(np.float64)
            at += len(tile)
        found += spent[:, 0].sum(axis=1, keepdims=True)
    else:
        found += spent[:, 0, :1]
        for at, stage in enumerate(_walked(steps, matches, replications), start=1):
            found += spent[:, :, at].take(stage, axis=1, mode="clip")
    time, busy = found
    return time, busy


def _walked(
    steps: tuple[Stage, ...], matches: Iterable[NDArray[np.bool_]], replications: int
) -> Iterable[NDArray[np.uint8]]:
    """Stage of each token after the first, shape (replications,) each."""
    on_match = np.array([stage.on_match for stage in steps], dtype=np.uint8)
    stage = np.zeros(replications, dtype=np.uint8)
    for tile in matches:
        for row in tile:
            stage = on_match.take(stage, mode="clip") * row  # "clip" skips the index check
            yield stage
