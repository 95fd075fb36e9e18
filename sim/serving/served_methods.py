"""Methods other than chains from a draft, as policies of a server: their names with settings, and how they are served.

A name is KIND:{...} with the settings as JSON, such as `self-speculative:{"exit_layer": 8, "draft_length": 3, "acceptance": 0.7}`.
What depends on the task (acceptance, how often text repeats) has no default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.base.table_records import build
from model.methods.draft_model import MAX_DRAFT
from model.methods.early_exit import algorithm as early_exit
from model.methods.rounds import round_laws
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.tree import algorithm as tree
from model.methods.tree.draft_trees import by_depth, require_rates
from model.methods.tree.theory import expected_tokens
from model.outcomes.lookup_laws import Lookups
from model.outcomes.rank_laws import RankRates
from model.serving import decodings
from model.serving.decodings import Arrays, Drafter
from model.serving.request_outcomes import LOOKUP, RequestOutcomes
from model.serving.tree_drafts import ServedTree, TreeArrays, TreeOutcomes
from sim.advice.option_values import acceptance_of

Integers = NDArray[np.int64]
ACCEPT = "accept"


class ServedMethod(NamedTuple):
    """How a method is served; a tree is drafted by the draft of the server."""

    outcome: str
    """`accept` or `lookup`."""
    law: Callable[[int], Any]
    """Law of its outcomes in a replication; 0 has the estimates."""
    drafter: Drafter
    layers: tuple[Integers, int] | None = None
    """Layers of the token after each number of generated ones, and the depth; None: all."""
    tree: tree.Parameters | None = None
    """Tree that is drafted; None: a chain."""

    def decodings(self, outcomes: RequestOutcomes, most: int, drafter: Drafter) -> Arrays:
        """Decodings of the requests with these outcomes, at most `most` at once."""
        if self.tree is None:
            return Arrays(outcomes, most, drafter, self.layers)
        return TreeArrays(outcomes, most, ServedTree(self.tree), drafter)


@dataclass(frozen=True)
class SelfDrafts:
    """Self-speculation: the first layers of the model draft, or all of them within a context budget.

    Parameters
    ----------
    exit_layer, draft_length, reuse, skipped_layers, first_skipped, context_budget
        See `model.methods.self_speculative.algorithm.Parameters`.
    acceptance
        Acceptance rate: a number, or an uncertain "0.6..0.8".
    layers
        Layers of the model, if its shape is not known.
    policy
        Policy of the draft length, up to `draft_length`: vllm:[[1,64,3],[65,512,0]], sglang, goodput or oracle. Default: always
        `draft_length`.
    """

    exit_layer: int
    draft_length: int
    acceptance: float | str
    reuse: bool = True
    skipped_layers: int = 0
    first_skipped: int | None = None
    context_budget: int | None = None
    layers: int | None = None
    policy: str | None = None

    @property
    def longest(self) -> int:
        """Largest number of drafted tokens of a sequence in a step."""
        return self.draft_length

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served, by a model of this depth."""
        own = self_speculative.Parameters(
            layers, self.exit_layer, self.draft_length, self.reuse, self.skipped_layers, self.first_skipped,
            context_budget=self.context_budget,
        )  # fmt: skip
        drawn = _one(acceptance_of(self.acceptance, seed))

        def law(replication: int) -> Any:
            rates = drawn.point if not replication else drawn.draws[(replication - 1) % len(drawn.draws)]
            return round_laws.Rounds.by_draft_position(rates[: self.draft_length])

        drafter = decodings.own_layers(
            own.drafting_layers, layers, continues=self.reuse, context_budget=self.context_budget
        )
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
    policy
        See `SelfDrafts`.
    """

    draft_length: int
    hit_rate: float | tuple[float, ...]
    acceptance: float
    policy: str | None = None

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
        checks.whole("longest_output", length, 0)
        if length < output:
            raise ParameterError(
                f"longest_output must be at least {output}, the longest output of the load, got {length}; leave it out, or raise it"
            )
        most = layers if self.max_layers is None else self.max_layers
        own = skipdecode.Parameters(layers, self.min_layers, most, 0, length, self.warm_up, self.rounding, self.power)
        return ServedMethod(ACCEPT, _nothing, decodings.NONE, (np.array(skipdecode.schedule(own, output)), layers))


@dataclass(frozen=True)
class DraftTrees:
    """Tree drafts of the server's draft: each sequence drafts the same tree, of fixed shape.

    Parameters
    ----------
    rank_rates
        Probability of each rank at each depth, or a single list for all, as `calibrate rates` makes them of logs.
    shape, draft_depth, width, nodes, parents
        See `model.methods.tree.algorithm.Parameters`.
    """

    rank_rates: tuple[Any, ...]
    shape: str
    draft_depth: int | None = None
    width: int | None = None
    nodes: int | None = None
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.one_of("shape", self.shape, tree.SHAPES)
        if self.shape == tree.EAGLE_2:
            raise ParameterError(
                f"shape must be chain, full, listed or sequoia under load, got"
                f" '{tree.EAGLE_2}', whose trees differ with the confidence of each draft; take sequoia with as many nodes"
            )
        self._rates()

    @cached_property
    def parameters(self) -> tree.Parameters:
        """Parameters of the method; what does not depend on the draft."""
        rates = self.rank_rates if self.shape == tree.SEQUOIA else None
        # In a batch that is kept full, no tree is cut at the end of an output.
        return tree.Parameters(1, self.shape, self.draft_depth, self.width, self.nodes, self.parents, rates, sequences=2)

    def _rates(self) -> tuple[tuple[float, ...], ...]:
        widths = self.parameters.ranks_by_depth
        rates = by_depth(self.rank_rates, len(widths))
        require_rates("rank_rates", rates, len(widths), widths)
        return tuple(tuple(row[:width]) for row, width in zip(rates, widths, strict=False))

    @property
    def longest(self) -> int:
        """Largest number of drafted tokens of a sequence in a step."""
        return self.parameters.longest_draft

    @property
    def expected_tokens(self) -> float:
        """Mean tokens of a round that drafts the whole tree, the target's own included."""
        return expected_tokens(self.parameters.trees[0], self._rates())

    @property
    def about(self) -> str:
        """What the rank rates give, in words."""
        return f"{self.expected_tokens:.3g} tokens per draft of {self.longest} nodes"

    def served(self, layers: int, output: int, seed: int) -> ServedMethod:
        """How it is served."""
        found = TreeOutcomes(ServedTree(self.parameters), RankRates([self._rates()]))
        return ServedMethod(ACCEPT, lambda _: found, decodings.MODEL, tree=self.parameters)


MethodSettings = SelfDrafts | LookupDrafts | FixedExit | SkippedLayers | DraftTrees
KINDS: dict[str, type[MethodSettings]] = {
    "self-speculative": SelfDrafts, "ngram": LookupDrafts, "early-exit": FixedExit, "skipdecode": SkippedLayers,
    "tree": DraftTrees,
}  # fmt: skip
EXAMPLES = {
    "self-speculative": 'self-speculative:{"exit_layer":8,"draft_length":3,"acceptance":0.7}',
    "ngram": 'ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6}',
    "early-exit": 'early-exit:{"exit_layer":24}', "skipdecode": 'skipdecode:{"min_layers":16}',
    "tree": 'tree:{"shape":"sequoia","nodes":7,"draft_depth":3,"rank_rates":[0.6,0.2,0.1]}',
}  # fmt: skip
LOSSY = ("early-exit", "skipdecode")
"""Methods whose output differs from the model's."""
BY_THE_DRAFT = ("tree",)
"""Methods for which the server's draft drafts; the others have no other model."""


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
    name = "nodes" if kind in BY_THE_DRAFT else "draft_length"
    checks.whole(f"{kind}.{name}", made.longest, 0 if kind in LOSSY else 1, MAX_DRAFT)
    return made


def served(kind: str, settings: MethodSettings, layers: int | None, output: int, seed: int) -> ServedMethod:
    """How a method is served, by a model of this depth (None: unknown), with outputs of up to this many tokens."""
    own = getattr(settings, "layers", None)
    if own is not None:
        checks.whole(f"{kind}.layers", own, 1)
    depth = layers if own is None else own
    if depth is None and kind not in ("ngram", *BY_THE_DRAFT):
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
    return round_laws.Rounds.by_draft_position(np.zeros(1))
