"""Prices of ragged engine steps: passes over different numbers of tokens of many sequences, with chunks of prompts in between.

An engine's step is one pass of the target over the tokens that every running sequence wants verified and over a chunk of prompts,
after the passes of the draft. Its time follows from a step law (`model.engines.step_law`): a ragged pass takes as long as one whose
sequences have the mean number of tokens and the mean context, which is exact for every term of a law that is linear in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.engines import kernel_times, step_terms
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.engines.step_terms import StepShape

NODE = 256
"""Distance of the contexts at which a law is evaluated; between them times are interpolated linearly [positions]."""


class LayerShare(NamedTuple):
    """A part of the layers that only some sequences run: its share of all layers, those sequences, and their tokens."""

    share: float
    sequences: int
    tokens: int


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
    shares
        Parts of the layers that not all sequences run; prompts run all layers.
    """

    sequences: int
    tokens: int
    positions: int
    drafted: bool = False
    prompts: int = 0
    prompt_tokens: int = 0
    prompt_positions: int = 0
    shares: tuple[LayerShare, ...] = ()


class StepPrices(Protocol):
    """Seconds of the passes of an engine's step."""

    @property
    def link(self) -> float:
        """Seconds of a transfer between the target's devices and a draft's own; 0 for a draft that is on the target's devices."""

    def target(self, over: RaggedPass) -> float:
        """Seconds of a pass of the target with everything else of a step but the draft passes [s]."""

    def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
        """Seconds of a pass of the draft for `sequences` sequences with `positions` cached positions altogether [s].

        It reads `read` of them; None: all, or what a context budget of the draft leaves of sequences of equal length.
        """

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        """Seconds of a pass of a share of the target's layers over one token of each sequence, within a step [s]."""


def drafting_seconds(prices: StepPrices, passes: int, sequences: int, positions: int) -> float:
    """Seconds by which draft passes lengthen a step: accepted tokens go to a draft on a device of its own, drafted ones back [s].

    Parameters
    ----------
    prices
        Prices of passes, and of a transfer.
    passes
        Draft passes of the step, each for all sequences.
    sequences, positions
        Sequences that draft, and their cached positions altogether.
    """
    return passes * prices.draft(sequences, positions) + 2 * prices.link if passes else 0.0


@dataclass(frozen=True)
class OwnLayerPrices:
    """Prices for a policy whose draft passes run a part of the target's layers (`StepPrices`).

    Parameters
    ----------
    prices
        Prices of passes.
    share
        Share of the target's layers that a draft pass runs.
    context_budget
        Largest number of cached positions of each sequence that it reads; None: all.
    """

    prices: StepPrices
    share: float
    context_budget: int | None = None
    link = 0.0

    def target(self, over: RaggedPass) -> float:
        """See `StepPrices`."""
        return self.prices.target(over)

    def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
        """See `StepPrices`."""
        if read is None:
            read = positions if self.context_budget is None else min(positions, sequences * self.context_budget)
        return self.prices.own_layers(self.share, sequences, read)

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        """See `StepPrices`."""
        return self.prices.own_layers(share, sequences, positions)


@dataclass(frozen=True)
class DraftDevice:
    """A device that the draft has to itself.

    Parameters
    ----------
    link
        Seconds of a transfer between it and the target's devices, which a step that drafts has two of [s].
    kernels
        Kernels of the draft on this device, as those of a model; None: its passes take there what they take on the target's.
    """

    link: float
    kernels: KernelSource | None = None


@dataclass(eq=False)
class LawPrices:
    """Prices by a step law.

    The time of prompts that a law has per generated token (`prompt`) is left out: here prompts are passes, which take what their
    arithmetic takes.

    Parameters
    ----------
    law
        The law.
    draws
        Indices of draws of its coefficients, whose prices `drawn` gives; they are computed together.
    logits
        Share of the logits in what a pass takes without overheads: every pass computes them, also one of few layers.
    own_device
        Device that the draft has to itself; None: it is on the target's.
    async_scheduling
        True: what the engine does for a step and for its sequences (`step`, `sequence`) runs while the pass before is on the
        device, as vLLM's setting of this name has it, so that a step takes as long as the longer of both. Only for laws whose
        terms are priors: those of a fitted law are what an engine's steps took in addition, however it schedules.

    >>> from model.engines import step_law
    >>> law = step_law.load("sglang-qwen3-235b-a22b")
    >>> prices = LawPrices(law, range(2))
    >>> round(1e3 * prices.target(RaggedPass(8, 32, 8000, True)), 2), round(1e3 * prices.draft(8, 8000), 2)
    (17.48, 0.41)
    >>> other = LawPrices(law.drawn(1)).target(RaggedPass(8, 32, 8000, True))
    >>> bool(abs(prices.drawn(1).target(RaggedPass(8, 32, 8000, True)) / other - 1) < 1e-12)
    True
    """

    law: StepLaw
    draws: Sequence[int] = ()
    logits: float = 0.0
    own_device: DraftDevice | None = None
    async_scheduling: bool = False
    _which: int = 0
    """Index of the coefficients that are used: 0 for the point, then those of the draws."""
    _tables: tuple[dict[Any, list[float]], dict[Any, list[float]]] = field(default_factory=lambda: ({}, {}), repr=False)

    def __post_init__(self) -> None:
        if self.async_scheduling and self.law.cells is not None:
            raise ParameterError(
                f"async_scheduling must be left out with {checks.shown(self.law.name)}: a law fitted to measured steps holds what"
                " an engine adds to its passes, however it schedules; without measured steps its priors are used"
            )
        kept = {
            name: np.array([value, *(self.law.draws[name][each % self.law.draws[name].size] for each in self.draws)])
            for name, value in self.law.coefficients.items()
        }
        self._coefficients = {name: values[:, None] for name, values in kept.items()}
        self._rounds = kept.get("round", np.zeros(1 + len(self.draws)))
        self._by_context = self.law.kernels is not None or "kv_position" in self.law.coefficients
        kernels = self.law.kernels
        self._budget = None if kernels is None else kernels.draft_context_budget
        # Passes are priced by the positions that they read, so that no budget is applied to nodes beyond it.
        self._kernels = kernels if self._budget is None or kernels is None else replace(kernels, draft_context_budget=None)

    def drawn(self, index: int) -> LawPrices:
        """Prices with the coefficients of a draw, an index of `draws`."""
        return replace(self, _which=1 + index)

    @property
    def link(self) -> float:
        """See `StepPrices`."""
        return 0.0 if self.own_device is None else self.own_device.link

    def target(self, over: RaggedPass) -> float:
        """See `StepPrices`."""
        found = self._in_turn(over)
        if not self.async_scheduling:
            return found
        own = self._own(over)
        return max(found - own, own)

    def _in_turn(self, over: RaggedPass) -> float:
        """Seconds of a pass and of what the engine adds to it, one after the other [s].

        Where not all sequences run all layers, the step's overhead is paid once, and each layer takes its share of what a pass over
        the sequences that run it takes.
        """
        sequences, tokens, positions, drafted, prompts, prompt_tokens, prompt_positions, shares = over
        if shares:
            whole = over._replace(shares=())
            body, saved = self._body(whole), 0.0
            for share, fewer, fewer_tokens in shares:
                held = positions * fewer // sequences if sequences else 0
                running = over._replace(
                    sequences=fewer, tokens=fewer_tokens, positions=held, drafted=fewer_tokens > fewer, shares=()
                )
                saved += share * (body - self._body(running))
            return self._in_turn(whole) - (1 - self.logits) * saved
        chunk = prompts, prompt_tokens, round(prompt_positions / NODE) * NODE if prompt_tokens else 0
        if not sequences:
            return self._node(0, 1, 0, False, chunk)
        width, part = divmod(tokens, sequences)
        found = self._at_width(sequences, width, positions / sequences, drafted, chunk)
        if part:
            above = self._at_width(sequences, width + 1, positions / sequences, drafted, chunk)
            found += (above - found) * (part / sequences)
        return found

    def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
        """See `StepPrices`.

        Where less is read than is cached, times are interpolated between nodes: a budget is often shorter than their distance. The
        node next to all positions may be below them, so that the pass over them limits what a pass over fewer takes.
        """
        whole = self._drafting(sequences, round(positions / (sequences * NODE)) * NODE if self._by_context else 0)
        if read is None:
            read = positions if self._budget is None else min(positions, sequences * self._budget)
        if read >= positions or not self._by_context:
            return whole
        node = read // (sequences * NODE) * NODE
        below, above = (self._drafting(sequences, each) for each in (node, node + NODE))
        return min(below + (read / sequences - node) / NODE * (above - below), whole)

    def _drafting(self, sequences: int, context: int) -> float:
        """Seconds of a pass of the draft that reads `context` positions of each sequence [s]."""
        key = sequences, context
        found = self._tables[1].get(key)
        if found is None:
            shape = kernel_times.step_shape(self._kernels, *(np.array([float(each)]) for each in (sequences, 0, 0, key[1])))
            if self.own_device is not None and self.own_device.kernels is not None:
                seconds, _ = kernel_times.mixed_seconds(self.own_device.kernels, sequences, 1, key[1])
                shape = replace(shape, draft_kernels=np.array([seconds]))
            found = self._tables[1][key] = _listed(step_terms.draft_seconds(self._coefficients, shape), 1 + len(self.draws))
        return found[self._which]

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        """See `StepPrices`; where kernels have times of their own, what the engine adds to a draft's pass is added here too."""
        added = self._coefficient("draft_pass") if self.law.kernels is not None else 0.0
        body = self._body(RaggedPass(sequences, sequences, positions))
        return added + (self.logits + (1 - self.logits) * share) * body

    def _body(self, over: RaggedPass) -> float:
        """Seconds of a pass without what the engine adds to each step; 0 without any token [s]."""
        if not over.sequences and not over.prompt_tokens:
            return 0.0
        return self._in_turn(over) - self._own(over) - self._coefficient("round") * over.drafted

    def _own(self, over: RaggedPass) -> float:
        """Seconds of what the engine does for a step and for each of its sequences [s]."""
        return self._coefficient("step") + self._coefficient("sequence") * (over.sequences + over.prompts)

    def _coefficient(self, name: str) -> float:
        values = self._coefficients.get(name)
        return 0.0 if values is None else float(values[self._which if values.shape[0] > 1 else 0, 0])

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
        found = self._tables[0].get(key)
        if found is None:
            found = self._tables[0][key] = self._seconds(*key)
        return found[self._which]

    def _seconds(self, sequences: int, width: int, context: int, drafted: bool, chunk: tuple[int, int, int]) -> list[float]:
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
        found = step_terms.target_seconds(self._coefficients, shape, self.law.experts)
        # The term of rounds belongs to passes with drafted tokens, which the mean width alone does not tell.
        return _listed(found + self._rounds[:, None] * (drafted - (width > 1 and sequences > 0)), 1 + len(self.draws))


def _listed(values: Any, count: int) -> list[float]:
    """Values of one shape for each set of coefficients."""
    found: list[float] = np.broadcast_to(values, (count, 1))[:, 0].tolist()
    return found
