"""Forced outcomes: simulated answers with given rates, for real passes of models with random weights.

A model with random weights takes as long as a trained one. Its reads are answered by a `model.interpret.simulated_answers.World`
whose outcomes are drawn from the random streams of a seed and a replication (`model.outcomes.random_streams`), the same as in the
simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.interpret.simulated_answers import World
from model.methods.bild.threshold_decisions import Independent
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.early_exit.theory import exit_pmf
from model.methods.method_parameters import MethodParameters
from model.methods.worlds import worlds
from model.outcomes.lookup_laws import Lookups
from model.outcomes.outcome_kinds import KINDS, OutcomeKind
from model.outcomes.outcome_laws import Iid


def required_rates(parameters: MethodParameters) -> tuple[str, ...]:
    """Names of the rates required to force the outcomes of a method with these parameters.

    >>> from model.methods.bild import algorithm as bild
    >>> required_rates(bild.Parameters(24, 8))
    ('fallback_rate', 'rollback_rate')
    """
    return tuple(rate for kind in _asked(parameters) for rate in KINDS[kind].forced or ())


def _asked(parameters: MethodParameters) -> tuple[str, ...]:
    for each in parameters.outcomes:
        if each not in KINDS or KINDS[each].forced is None:
            raise ParameterError(f"outcomes of kind {each} cannot be forced by rates; run this method on trained models")
    return parameters.outcomes


def check(method: str, parameters: MethodParameters, rates: Mapping[str, float]) -> None:
    """Raise `ParameterError` for rates that the method does not have, and for missing ones."""
    wanted = required_rates(parameters)
    for name, value in rates.items():
        if name not in wanted:
            has = f"it has {', '.join(wanted)}" if wanted else "it has no random outcomes"
            raise ParameterError(f"{name} is not an outcome of method {method} with these parameters: {has}; leave it out")
        checks.number(name, value, 0, 1)
    for name in wanted:
        if name not in rates:
            raise ParameterError(f"{name} is required: outcomes of method {method} are forced; there is no default")
    if "exit_rate" in wanted and parameters.decides_by_threshold:
        raise ParameterError("threshold must be left out if exit_rate forces the exits, got both")


def world(
    parameters: MethodParameters, prompt: int, tokens: int, rates: Mapping[str, float], *, seed: int = 0, replication: int = 0
) -> World:
    """World for one decoding of `tokens` tokens after a prompt at positions 0 to prompt - 1.

    >>> from model.methods.ppd import algorithm as ppd
    >>> from model.interpret.interpreter import count
    >>> choice = ppd.Parameters(layers=8, exit_layer=4, candidates=1)
    >>> count(ppd.decode(choice, [0, 1], 4), world(choice, 2, 4, {"match_rate": 1.0}), 4).commits
    ['match', 'match', 'match', 'match']
    """
    checks.whole("seed", seed, 0)
    checks.whole("replication", replication, 0)
    laws = {name: _law(KINDS[name], parameters, rates) for name in _asked(parameters)}
    return next(worlds(parameters, prompt, tokens, laws, seed, range(replication, replication + 1)))


def _law(kind: OutcomeKind, parameters: MethodParameters, rates: Mapping[str, float]) -> Any:
    """Law with independent outcomes and the same rate at every position."""
    if kind.name == "decision":
        return Independent(rates["fallback_rate"], rates["rollback_rate"])
    if kind.name == "exit":
        hazards = np.where(np.arange(1, parameters.layers + 1) >= parameters.first_check, rates["exit_rate"], 0.0)
        return Depths(exit_pmf(hazards), parameters.decoded_sequences)
    if kind.name == "lookup":
        return Lookups.of_rates(rates["hit_rate"], rates["acceptance_rate"], parameters.longest_draft)
    return Iid(rates[kind.rate], name=kind.rate)
