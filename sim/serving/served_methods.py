"""Methods other than chains from a draft, as policies of a server: their names with settings, and how they are served.

A name is KIND:{...} with the settings as JSON, such as `self-speculative:{"exit_layer": 8, "draft_length": 3, "acceptance": 0.7}`.
What depends on the task (acceptance, how often text repeats) has no default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.base.table_records import build
from model.methods import rounds
from model.methods.draft_model import MAX_DRAFT
from model.methods.early_exit import algorithm as early_exit
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.skipdecode import algorithm as skipdecode
from model.outcomes.lookup_laws import Lookups
from model.serving import decodings
from model.serving.decodings import Drafter
from model.serving.request_outcomes import LOOKUP
from sim.advice.option_values import acceptance_of

Integers = NDArray[np.int64]
ACCEPT = "accept"


class ServedMethod(NamedTuple):
    """How a method is served."""

    outcome: str
    """`accept` or `lookup`."""
    law: Callable[[int], Any]
    """Law of its outcomes in a replication; 0 has the estimates."""
    drafter: Drafter
    layers: tuple[Integers, int] | None = None
    """Layers of the token after each number of generated ones, and the depth; None: all."""


@dataclass(frozen=True)
class SelfDrafts:
    """Self-speculation: the first layers of the model draft.

    Parameters
    ----------
    exit_layer, draft_length, reuse, skipped_layers, first_skipped
        See `model.methods.self_speculative.algorithm.Parameters`.
    acceptance
        Acceptance rate: a number, or an uncertain "0.6..0.8".
    layers
        Layers of the model, if its shape is not known.
    """

    exit_layer: int
    draft_length: int
    acceptance: float | str
    reuse: bool = True
    skipped_layers: int = 0
    first_skipped: int | None = None
    layers: int | None = None

    @property
    def longest(self) -> int:
        """Largest number of drafted tokens of a sequence in a step."""
        return self.draft_length

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served, by a model of this depth."""
        own = self_speculative.Parameters(
            layers, self.exit_layer, self.draft_length, self.reuse, self.skipped_layers, self.first_skipped
        )
        drawn = _one(acceptance_of(self.acceptance, seed))

        def law(replication: int) -> Any:
            rates = drawn.point if not replication else drawn.draws[(replication - 1) % len(drawn.draws)]
            return rounds.Rounds.by_draft_position(rates[: self.draft_length])

        drafter = decodings.own_layers(own.drafting_layers, layers, continues=self.reuse)
        return ServedMethod(ACCEPT, law, drafter)


@dataclass(frozen=True)
class LookupDrafts:
    """N-gram drafts from the text itself.

    Parameters
    ----------
    draft_length
        Tokens that every match drafts.
    hit_rate
        Probability of a match; two of them: after a round without accepted tokens, and after one with some.
    acceptance
        Probability that a token of a match is accepted, if those before it were.
    """

    draft_length: int
    hit_rate: float | tuple[float, ...]
    acceptance: float

    @property
    def longest(self) -> int:
        """Largest number of drafted tokens of a sequence in a step."""
        return self.draft_length

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served."""
        if isinstance(self.hit_rate, tuple) and len(self.hit_rate) != 2:
            raise ParameterError(
                f"hit_rate must be a number, or two: after a round without accepted tokens and after others; got {[*self.hit_rate]}"
            )
        found = Lookups.of_rates(self.hit_rate, self.acceptance, self.draft_length)
        return ServedMethod(LOOKUP, lambda _: found, decodings.NONE)


@dataclass(frozen=True)
class FixedExit:
    """Early exit after the same layer for all tokens; its output differs from the model's.

    Parameters
    ----------
    exit_layer
        Layers that a generated token runs.
    layers
        Layers of the model, if its shape is not known.
    """

    exit_layer: int
    layers: int | None = None
    longest = 0

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served, by a model of this depth."""
        early_exit.Parameters(layers, exit_layer=self.exit_layer)
        return ServedMethod(ACCEPT, _nothing, decodings.NONE, (np.full(output, self.exit_layer), layers))


@dataclass(frozen=True)
class SkippedLayers:
    """SkipDecode: later tokens run fewer layers; its output differs from the model's.

    Parameters
    ----------
    min_layers, max_layers
        Layers at the end and at the start of the longest output; `max_layers` None: all.
    longest_output
        Tokens over which the layers fall. Default: the longest output of the load.
    warm_up, rounding, power
        See `model.methods.skipdecode.algorithm.Parameters`.
    layers
        Layers of the model, if its shape is not known.
    """

    min_layers: int
    max_layers: int | None = None
    longest_output: int | None = None
    warm_up: int = 1
    rounding: str = "half-up"
    power: float = 1.0
    layers: int | None = None
    longest = 0

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served, by a model of this depth, with outputs of up to this many tokens."""
        length = output if self.longest_output is None else self.longest_output
        if length < output:
            raise ParameterError(
                f"longest_output must be at least {output}, the longest output of the load, got {length}; leave it out, or raise it"
            )
        most = layers if self.max_layers is None else self.max_layers
        own = skipdecode.Parameters(layers, self.min_layers, most, 0, length, self.warm_up, self.rounding, self.power)
        return ServedMethod(ACCEPT, _nothing, decodings.NONE, (np.array(skipdecode.schedule(own, output)), layers))


MethodSettings = SelfDrafts | LookupDrafts | FixedExit | SkippedLayers
KINDS: dict[str, type[MethodSettings]] = {
    "self-speculative": SelfDrafts, "ngram": LookupDrafts, "early-exit": FixedExit, "skipdecode": SkippedLayers,
}  # fmt: skip
EXAMPLES = {
    "self-speculative": 'self-speculative:{"exit_layer":8,"draft_length":3,"acceptance":0.7}',
    "ngram": 'ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6}',
    "early-exit": 'early-exit:{"exit_layer":24}', "skipdecode": 'skipdecode:{"min_layers":16}',
}  # fmt: skip
LOSSY = ("early-exit", "skipdecode")
"""Methods whose output differs from the model's."""


def settings_of(kind: str, text: str, policy: str) -> MethodSettings:
    """Read the settings of a method.

    >>> settings_of("early-exit", '{"exit_layer": 24}', 'early-exit:{"exit_layer": 24}')
    FixedExit(exit_layer=24, layers=None)
    """
    try:
        found = bounded_files.json_of(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParameterError(f"policy {kind} must have its settings as JSON, such as {EXAMPLES[kind]}, got {checks.shown(policy)}")
    made = build(KINDS[kind], found, kind, f"give it, as in {EXAMPLES[kind]}")
    checks.whole(f"{kind}.draft_length", made.longest, 0 if kind in LOSSY else 1, MAX_DRAFT)
    return made


def served(kind: str, settings: MethodSettings, layers: int | None, output: int, seed: int) -> ServedMethod:
    """How a method is served, by a model of this depth (None: unknown), with outputs of up to this many tokens."""
    depth = getattr(settings, "layers", None) or layers
    if depth is None and kind != "ngram":
        raise ParameterError(f'policy {kind} needs the layers of the model: give --model, or "layers" among its settings')
    if layers is not None and depth != layers:
        raise ParameterError(f"{kind}.layers must be {layers}, the layers of the model, got {depth}; leave it out")
    try:
        return settings.served(depth or 1, output, seed)
    except ParameterError as error:
        raise ParameterError(f"policy {kind}: {error}") from None


def _one(cases: list[Any]) -> Any:
    if len(cases) > 1:
        raise ParameterError("acceptance must be one value or one range, got several cases")
    return cases[0]


def _nothing(_: int) -> Any:
    """Law of methods that draft nothing."""
    return rounds.Rounds.by_draft_position(np.zeros(1))
