"""Simulated models of each replication, whose answers are drawn from outcome laws; forced runs on real models draw the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from model.interpret.simulated_answers import DraftOutcomes, Lossy, Ranked, RankedPositions, World, batch_world
from model.methods.method_parameters import MethodParameters
from model.outcomes import random_streams
from model.outcomes.outcome_kinds import KINDS, any_lossy


def worlds(
    parameters: MethodParameters, prompt: int, tokens: int, laws: Mapping[str, Any], seed: int, replications: range, *,
    ranked: bool = True,
) -> Iterator[World]:
    """Yield the simulated model of each replication.

    Parameters
    ----------
    parameters, prompt, tokens
        The method, and the numbers of prompt tokens and of generated tokens.
    laws
        A law for each kind of outcome (`model.outcomes.outcome_kinds`) that the method uses.
    seed, replications
        Key of the random draws. All replications must belong to one block of `random_streams.BLOCK`.
    ranked
        Draw which of the early candidates matches, uniformly and from a separate random stream; else it is the first.
    """
    drawn = {name: _drawn(parameters, tokens, name, law, seed, replications, ranked) for name, law in laws.items()}
    for index in range(len(replications)):
        yield world_of(parameters, prompt, {name: outcomes[index] for name, outcomes in drawn.items()})


def _drawn(
    parameters: MethodParameters, tokens: int, name: str, law: Any, seed: int, replications: range, ranked: bool
) -> list[Any]:
    """Outcomes of one kind in each replication, in the form that `world_of` takes."""
    block = replications.start // random_streams.BLOCK
    own = slice(replications.start - block * random_streams.BLOCK, replications.stop - block * random_streams.BLOCK)

    def draws(purpose: str, positions: int) -> Iterator[Any]:
        return (tile[:, own] for tile in random_streams.recent_tiles(seed, purpose, block, positions))

    kind, sequences = KINDS[name], parameters.decoded_sequences
    if kind.drafted:
        purposes = [random_streams.sequence_purpose(name, sequence) for sequence in range(sequences)]
        survivors = [law.survivors(draws(purpose, tokens), parameters.most_unverified).T.tolist() for purpose in purposes]
        return [*zip(*survivors, strict=True)]
    positions = kind.positions(tokens, sequences)
    rows = [tile.copy() for tile in law.sample(draws(name, positions))] if positions else []
    found = np.concatenate(rows).T if rows else np.empty((len(replications), 0), dtype=np.int64)
    if kind.ranked and ranked:
        which = np.concatenate([tile.copy() for tile in draws("rank", positions)]).T
        found = found * (1 + (which * parameters.match_candidates).astype(np.int64))
    return [each.reshape(-1, sequences).T.tolist() if kind.per_sequence else each.tolist() for each in found]


def world_of(parameters: MethodParameters, prompt: int, outcomes: Mapping[str, Any]) -> World:
    """Return the simulated model of one decoding with these outcomes.

    `outcomes` holds a list for each kind, with one value per output position:

    * `match`: rank of the early candidate that matches, 0 for none;
    * `accept` and `medium_accept`: number of accepted tokens of a draft that starts there; one list per sequence;
    * `rank`: the class of confidence and the rank at each depth of a draft that starts there: a list of positions for each;
    * `position_rank`: rank of the target's token among the draft's likeliest tokens, 0 for none;
    * `lookup`: drafted and accepted tokens, packed as in `model.outcomes.lookup_laws`;
    * `confidence`: the `doubts` of `World`;
    * `decision`: fate of the small model's token (`STAYS`, `UNSURE` or `UNLIKELY`);
    * `exit`: number of layers that the token needs; one list per sequence.

    >>> from model.methods.ppd.algorithm import Parameters
    >>> world_of(Parameters(layers=8, exit_layer=4, candidates=2), 1, {"match": [2, 0]}).matches
    [2, 0]
    """
    layers, imitated = parameters.layers, parameters.IMITATES
    if "rank" in outcomes:
        return Ranked(prompt, layers, outcomes["rank"], parameters.draft_confidences)
    if "position_rank" in outcomes:
        return RankedPositions(prompt, layers, outcomes["position_rank"])
    if any_lossy(outcomes) or not (imitated or parameters.exact):
        return Lossy(prompt, layers, outcomes.get("decision", ()), outcomes.get("exit", ()))
    if not imitated:
        return World(prompt, layers, outcomes.get("match", ()), lookups=outcomes.get("lookup", ()))
    answers = []
    for sequence in range(parameters.decoded_sequences):
        drafts = {role: DraftOutcomes(of, outcomes[kind][sequence]) for role, (of, kind) in imitated.items()}
        answers.append(World(prompt, layers, drafts=drafts, doubts=outcomes.get("confidence", ())))
    return batch_world(answers)
