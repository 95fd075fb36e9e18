"""Prices of ragged engine steps: passes over different numbers of tokens of many sequences, with chunks of prompts in between.

An engine's step is one pass of the target over the tokens that every running sequence wants verified and over a chunk of prompts,
after the passes of the draft. Its time follows from a step law (`model.engines.step_law`): a ragged pass takes as long as one whose
sequences have the mean number of tokens and the mean context, which is exact for every term of a law that is linear in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from model.engines import kernel_times, step_terms
from model.engines.step_law import StepLaw
from model.engines.step_terms import StepShape

NODE = 256
"""Distance of the contexts at which a law is evaluated; between them times are interpolated linearly [positions]."""


class RaggedPass(NamedTuple):
    """What a pass of the target is over.

    Parameters
    ----------
    sequences, tokens, positions
        Sequences that decode, their tokens in the pass, and their cached positions altogether.
    drafted
        True if drafted tokens are among them.
    prompts, prompt_tokens, prompt_positions
        Prompts in the pass, their tokens, and the mean of their positions that are cached already.
    """

    sequences: int
    tokens: int
    positions: int
    drafted: bool = False
    prompts: int = 0
    prompt_tokens: int = 0
    prompt_positions: int = 0


class StepPrices(Protocol):
    """Seconds of the passes of an engine's step."""

    def target(self, over: RaggedPass) -> float:
        """Seconds of a pass of the target with everything else of a step but the draft passes [s]."""

    def draft(self, sequences: int, positions: int) -> float:
        """Seconds of a pass of the draft for `sequences` sequences with `positions` cached positions altogether [s]."""


@dataclass(eq=False)
class LawPrices:
    """Prices by a step law.

    The time of prompts that a law has per generated token (`prompt`) is left out: here prompts are passes, which take what their
    arithmetic takes.

    >>> from model.engines import step_law
    >>> law = step_law.load("sglang-qwen3-235b-a22b")
    >>> prices = LawPrices(law)
    >>> round(1e3 * prices.target(RaggedPass(8, 32, 8000, True)), 2), round(1e3 * prices.draft(8, 8000), 2)
    (17.48, 0.41)
    """

    law: StepLaw
    _targets: dict[Any, float] = field(default_factory=dict, init=False, repr=False)
    _drafts: dict[Any, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._coefficients = {name: np.array([value]) for name, value in self.law.coefficients.items()}
        kernels = self.law.kernels
        self._by_context = kernels is not None or "kv_position" in self.law.coefficients

    def target(self, over: RaggedPass) -> float:
        """See `StepPrices`."""
        sequences, tokens, positions, drafted, prompts, prompt_tokens, prompt_positions = over
        chunk = prompts, prompt_tokens, round(prompt_positions / NODE) * NODE if prompt_tokens else 0
        if not sequences:
            return self._node(0, 1, 0, False, chunk)
        width, part = divmod(tokens, sequences)
        found = self._at_width(sequences, width, positions / sequences, drafted, chunk)
        if part:
            above = self._at_width(sequences, width + 1, positions / sequences, drafted, chunk)
            found += (above - found) * (part / sequences)
        return found

    def draft(self, sequences: int, positions: int) -> float:
        """See `StepPrices`."""
        node = round(positions / (sequences * NODE)) * NODE if self._by_context else 0
        key = sequences, node
        found = self._drafts.get(key)
        if found is None:
            seconds, _ = self.law.draft_seconds([sequences], [node])
            found = self._drafts[key] = float(seconds[0])
        return found

    def _at_width(self, sequences: int, width: int, context: float, drafted: bool, chunk: tuple[int, int, int]) -> float:
        """Seconds with `width` tokens of each sequence, between the nodes around their mean context [s]."""
        if not self._by_context:
            return self._node(sequences, width, 0, drafted, chunk)
        node = int(context // NODE) * NODE
        found = self._node(sequences, width, node, drafted, chunk)
        part = (context - node) / NODE
        return found if not part else found + part * (self._node(sequences, width, node + NODE, drafted, chunk) - found)

    def _node(self, sequences: int, width: int, context: int, drafted: bool, chunk: tuple[int, int, int]) -> float:
        key = sequences, width, context, drafted, chunk
        found = self._targets.get(key)
        if found is None:
            found = self._targets[key] = self._seconds(*key)
        return found

    def _seconds(self, sequences: int, width: int, context: int, drafted: bool, chunk: tuple[int, int, int]) -> float:
        prompts, prompt_tokens, prompt_positions = chunk
        kernels = bound = None
        if self.law.kernels is not None:
            source = self.law.kernels
            seconds, _ = kernel_times.mixed_seconds(source, sequences, width, context, prompt_tokens, prompt_positions)
            kernels = np.array([seconds])
            bound = np.array([kernel_times.least_seconds(source, max(sequences * width + prompt_tokens, 1))])
        none = np.zeros(1)
        shape = StepShape(
            none + sequences, none + (width - 1 if sequences else 0), none, none + context, kernels, None, bound,
            none + prompt_tokens, none + prompts,
        )  # fmt: skip
        found = float(step_terms.target_seconds(self._coefficients, shape, self.law.experts)[0])
        # The term of rounds belongs to passes with drafted tokens, which the mean width alone does not tell.
        rounds = self.law.coefficients.get("round", 0.0)
        return found + rounds * (drafted - (width > 1 and sequences > 0))
