"""Plain decoding: one token after another, each through all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model import checks
from model.steps import Commit, Forward, Read, Steps


@dataclass(frozen=True)
class Parameters:
    """What the plain decoder needs to know: the depth of the model."""

    layers: int

    OUTCOMES = ()
    EXACT = True

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)

    @property
    def units(self) -> int:
        """Compute units that it reserves."""
        return 1


def decode(parameters: Parameters, prompt: Sequence[int], tokens: int) -> Steps:
    """The process: decode `tokens` tokens after a prompt of at least one."""
    layers = parameters.layers
    text = list(prompt)
    if text[:-1]:
        yield Forward("target", tuple(text[:-1]), 0, 0, layers)
    for at in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        out = yield Forward("target", (text[at],), at, 0, layers, heads=1)
        text.append((yield Read("next", out)))
        yield Commit("token", (text[-1],))
