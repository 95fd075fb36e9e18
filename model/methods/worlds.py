"""The world of one decoding, from the outcomes that were drawn for it, whoever drew them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.interpret.world import DraftOutcomes, Lossy, World, together
from model.methods.method_parameters import MethodParameters
from model.outcomes.outcome_kinds import any_lossy


def world_of(parameters: MethodParameters, prompt: int, outcomes: Mapping[str, Any]) -> World:
    """What models would answer in a decoding behind a prompt of positions 0 to prompt - 1.

    `outcomes` has what was drawn of each kind (`model.outcomes.outcome_kinds`) that the method asks for, by output position: of
    `match` which of the early candidates is right, 0 for none; of kinds that are drafted how many tokens survive if a draft starts
    there, a list for each sequence; of `confidence` the doubts of `World`; of `decision` what becomes of the small model's token;
    of `exit` how many layers a token needs, a list for each sequence.

    >>> from model.methods.ppd.algorithm import Parameters
    >>> world_of(Parameters(layers=8, exit_layer=4, candidates=2), 1, {"match": [2, 0]}).matches
    [2, 0]
    """
    layers, roles = parameters.layers, parameters.roles
    if any_lossy(outcomes) or not (roles or parameters.exact):
        return Lossy(prompt, layers, outcomes.get("decision", ()), outcomes.get("exit", ()))
    if not roles:
        return World(prompt, layers, outcomes.get("match", ()))
    worlds = []
    for sequence in range(parameters.decoded_sequences):
        drafts = {role: DraftOutcomes(of, outcomes[kind][sequence]) for role, (of, kind) in parameters.IMITATES.items()}
        worlds.append(World(prompt, layers, drafts=drafts, doubts=outcomes.get("confidence", ())))
    return together(worlds)
