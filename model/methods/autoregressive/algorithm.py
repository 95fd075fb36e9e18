"""Plain decoding: one token per pass, through all layers. The baseline of all speed-ups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from model.base import checks
from model.methods.claim_bounds import ClaimRule
from model.methods.method_parameters import BATCHING, MethodParameters
from model.steps import GREEDY, SAMPLED, Commit, Forward, LayerSpan, NextTokens, Read, Steps


@dataclass(frozen=True)
class Parameters(MethodParameters):
    """Parameters of plain decoding.

    Parameters
    ----------
    layers
        Layers of the model.
    sampled
        Sample tokens instead of greedy decoding.
    sequences
        Sequences of a full batch.
    batching
        `continuous`, `static` or `lockstep`; the time is the same for all of them.
    """

    layers: int
    sampled: bool = False

    LABEL = "plain decoding"
    OUTCOMES = ()
    COSTS = ()
    EXACT = True
    CLAIMS = ClaimRule(terms=(), needs=(), source="it is the baseline of all speed-ups", names={"plain": ""})
    BATCHINGS = BATCHING

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.flag("sampled", self.sampled)
        self.check_batching()


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> Steps:
    """Decode `tokens` tokens after a prompt of at least one token, or up to the first token of `stop`."""
    layers = LayerSpan(0, parameters.layers)
    says: Literal["next", "sample"] = SAMPLED if parameters.sampled else GREEDY
    sequence = list(prompt)
    if sequence[:-1]:
        yield Forward("target", tuple(sequence[:-1]), 0, layers)
    if not stop:
        first = Forward("target", (sequence[-1],), len(sequence) - 1, layers, heads=1)
        if (yield NextTokens(first, (layers,) * tokens, "token", says)) is not None:
            return
    for at in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        out = yield Forward("target", (sequence[at],), at, layers, heads=1)
        sequence.append((yield Read(says, out)))
        yield Commit("token", (sequence[-1],))
        if sequence[-1] in stop:
            return
