"""Outcomes that are forced on a decoding: a world by rates, for real passes whose weights say nothing.

A model of random weights takes as long as a trained one. What it says is answered by a `model.interpret.world.World` in its place,
whose luck comes of the seed and the replication, by position and purpose (`model.outcomes.random_streams`): the simulator meets the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.interpret.world import STAYS, UNLIKELY, UNSURE, DraftModel, Lossy, World, together
from model.methods import registry
from model.methods.early_exit.theory import exit_pmf
from model.outcomes import random_streams

RATES = {
    "match": ("match_rate",), "accept": ("acceptance_rate",), "medium_accept": ("medium_acceptance_rate",), "confidence": (),
    "decision": ("fallback_rate", "rollback_rate"), "exit": ("exit_rate",),
}  # fmt: skip
"""What says the law of each kind of outcome: each position succeeds with its chance, independently (assumed).

`exit_rate` is the chance that a token leaves behind a layer that it has come to, from the first that is checked on.
"""


def needed(parameters: Any) -> tuple[str, ...]:
    """The rates that a choice of a method must be given.

    >>> from model.methods.bild import algorithm as bild
    >>> needed(bild.Parameters(24, 8))
    ('fallback_rate', 'rollback_rate')
    """
    return tuple(rate for kind in _asked(parameters) for rate in RATES[kind])


def _asked(parameters: Any) -> tuple[str, ...]:
    kind = type(parameters)
    found: tuple[str, ...] = kind.asked(vars(parameters)) if hasattr(kind, "asked") else kind.OUTCOMES
    for each in found:
        if each == "confidence" or each not in RATES:
            raise ParameterError(f"outcomes of kind {each} cannot be forced by rates; run this method on models that say something")
    return found


def check(method: str, parameters: Any, rates: Mapping[str, float]) -> None:
    """Refuse rates that the method cannot have, and missing ones."""
    wanted = needed(parameters)
    for name, value in rates.items():
        if name not in wanted:
            has = f"it has {', '.join(wanted)}" if wanted else "nothing of it is left to chance"
            raise ParameterError(f"{name} is not an outcome of method {method} with these parameters: {has}; leave it out")
        checks.number(name, value, 0, 1)
    for name in wanted:
        if name not in rates:
            raise ParameterError(f"{name} is required: outcomes of method {method} are forced; there is no default")
    if "exit_rate" in wanted and getattr(parameters, "threshold", None) is not None:
        raise ParameterError("threshold must be left out where exit_rate says who leaves, got both")


def world(parameters: Any, prompt: int, tokens: int, rates: Mapping[str, float], *, seed: int = 0, replication: int = 0) -> World:
    """A world for one decoding of `tokens` tokens behind a prompt of positions 0 to prompt - 1.

    >>> from model.methods.ppd import algorithm as ppd
    >>> from model.interpret.interpreter import count
    >>> choice = ppd.Parameters(layers=8, exit_layer=4, candidates=1)
    >>> count(ppd.decode(choice, [0, 1], 4), world(choice, 2, 4, {"match_rate": 1.0}), 4).commits
    ['match', 'match', 'match', 'match']
    """
    checks.whole("seed", seed, 0)
    checks.whole("replication", replication, 0)
    layers, kinds = parameters.layers, _asked(parameters)

    def drawn(purpose: str, positions: int) -> NDArray[np.float64]:
        block, column = divmod(replication, random_streams.BLOCK)
        tiles = [tile[:, column].copy() for tile in random_streams.tiles(seed, purpose, block, positions)]
        return np.concatenate(tiles) if tiles else np.empty(0)

    if "decision" in kinds:
        luck = drawn("decision", tokens), drawn("rollback", tokens)
        taken_back = np.where(luck[1] < rates["rollback_rate"], UNLIKELY, STAYS)
        decisions = np.where(luck[0] < rates["fallback_rate"], UNSURE, taken_back)
        return Lossy(prompt, layers, decisions.tolist())
    if "exit" in kinds or not (kinds or parameters.EXACT):
        texts = getattr(parameters, "texts", 1)
        depths = np.full((texts, tokens), layers)
        if "exit" in kinds:
            first = parameters.first_check
            hazards = np.where(np.arange(1, layers + 1) >= first, rates["exit_rate"], 0.0)
            reached = np.cumsum(exit_pmf(hazards))
            luck_of = drawn("exit", tokens * texts).reshape(tokens, texts).T
            depths = 1 + np.searchsorted(reached, luck_of, side="right").clip(0, layers - 1)
        return Lossy(prompt, layers, depths=depths.tolist())
    if not registry.roles_of(parameters):
        matches = drawn("match", tokens) < rates["match_rate"] if "match" in kinds else np.zeros(tokens, dtype=bool)
        which = 1 + (drawn("rank", tokens) * getattr(parameters, "candidates", 1)).astype(int)
        return World(prompt, layers, (matches * which).tolist())
    drafts = [
        {
            role: DraftModel(of, _survivors(drawn(random_streams.of_text(kind, text), tokens) < rates[RATES[kind][0]]))
            for role, (of, kind) in parameters.IMITATES.items()
        }
        for text in range(getattr(parameters, "texts", 1))
    ]
    return together([World(prompt, layers, drafts=each) for each in drafts])


def _survivors(right: NDArray[np.bool_]) -> list[int]:
    """How many tokens survive of a draft that starts at each position: the run of right ones from there.

    >>> _survivors(np.array([True, True, False, True]))
    [2, 1, 0, 1]
    """
    found = [0] * (right.size + 1)
    for place in reversed(range(right.size)):
        found[place] = found[place + 1] + 1 if right[place] else 0
    return found[:-1]
