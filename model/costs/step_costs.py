"""What steps of an algorithm take: one interface for closed forms, vectorised paths, the simulator and predictions of real runs.

Times are in one unit throughout: layer-times (`model.costs.layer_times.UnitCost`) or seconds
(`model.costs.pass_seconds.PassSeconds`). Where the time of a pass depends on the cached positions before it, each pass is priced at
its own position, and expectations are sums over the positions at which passes start.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base.checks import ParameterError
from model.steps import Forward, LayerSpan, Read

Floats = NDArray[np.float64]

RATIOS = {"draft": "cost_ratio", "medium": "medium_cost_ratio"}
"""Time of a pass of a role other than the target, over that of one of the target, by its name in scenarios."""
OPERATIONS = {"draft": "operations_ratio", "medium": "medium_operations_ratio"}
"""Arithmetic of a token in such a pass, over that in a pass of the target."""
DISPATCH_LAWS = ("linear", "tree")


class PassShape(NamedTuple):
    """All that the time of a pass depends on but its position.

    Parameters
    ----------
    layers
        The layers that it runs.
    role
        The model.
    width, sequences
        Tokens of each sequence, and sequences; integers, or arrays of them.
    heads
        Positions of each sequence that are projected onto the vocabulary.
    compared
        Whether the state is compared with that of the layer before.
    joins
        Whether it goes on from the outputs of several passes.
    tree
        Whether it follows several hypotheses.
    """

    layers: LayerSpan
    role: str = "target"
    width: ArrayLike = 1
    sequences: ArrayLike = 1
    heads: ArrayLike = 0
    compared: bool = False
    joins: bool = False
    tree: bool = False

    @staticmethod
    def of(step: Forward) -> PassShape:
        """The shape of a pass; of a ragged batch every sequence is padded to the widest.

        >>> PassShape.of(Forward("target", (7, 8), 5, LayerSpan(0, 4), heads=1))[1:5]
        ('target', 2, 1, 1)
        """
        heads = step.heads if step.batch is None else max(step.batch.heads)
        compared, tree = bool(step.compared), bool(step.tree)
        return PassShape(step.layers, step.role, step.width, step.batch_size, heads, compared, step.joins, tree)

    @property
    def begins(self) -> bool:
        """Whether it begins at the first layer, or takes up what several passes left: an engine then takes a step."""
        return (not self.layers.first or self.joins) and self.layers.first < self.layers.last and not self.layers.kv_only


def position_of(step: Forward) -> int:
    """The cached positions before a pass: those of the longest sequence of a batch, to which the others are padded."""
    return step.at if step.batch is None else max(step.batch.positions)


class StepCosts:
    """The base of all costs, with defaults for what only some of them know."""

    layers: int
    """Depth of the target model."""
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    """From the end of a dispatch to the start of a sub-process, and from one unit to another."""
    promotion: float = 0.0
    """Taking over a sub-process's hidden state and cache rows."""
    draft_devices: float = 1.0
    """Devices of a unit on which a smaller model runs by itself, over those of a unit of the target: what its unit-time counts."""

    uniform: bool = True
    """Whether a pass takes the same time at every position."""
    reads_take_time: bool = False
    """Whether reads take time too: the engine then asks for `reading`."""
    units_share: bool = False
    """Whether units slow each other down: the engine then asks for `among`."""

    @property
    def only_layers(self) -> bool:
        """Whether units are busy with layers alone, each for one time: unit-time is then arithmetic too."""
        return False

    @property
    def plain(self) -> bool:
        """Whether every layer takes one unit of time and nothing else takes any, as the papers assume."""
        return False

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape behind `at` positions of the decoded text; broadcasts over `at`, widths and sequences.

        Positions count from the last token of the prompt, which is at 0.
        """
        raise NotImplementedError

    def forward(self, step: Forward) -> float:
        """Time of a whole pass where it stands."""
        return float(self.times(PassShape.of(step), position_of(step)))

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass, one by one; a head belongs to the last."""
        raise NotImplementedError

    def dispatching(self, processes: int) -> float:
        """Time for which starting this many sub-processes holds the starter's unit: linear in them, or in their logarithm."""
        count = processes if self.dispatch_law == "linear" else math.log2(processes + 1)
        return self.dispatch + self.dispatch_per_process * count

    def reading(self, step: Read) -> float:
        """Time of a read."""
        return 0.0

    def among(self, others: int) -> float:
        """How many times as long everything takes while so many other units are at work."""
        return 1.0

    def runs(self, role: str) -> bool:
        """Whether the time of passes of a model is known."""
        raise NotImplementedError

    def require(self, role: str) -> None:
        """Refuse costs without the time of passes of a model."""
        if not self.runs(role):
            raise ParameterError(f"{RATIOS[role]} is required: the time of a pass of the {role} model over one of the target")

    def ratio(self, role: str) -> float | None:
        """Time of a whole pass of a model other than the target, over one of the target; None where its time is not known."""
        raise NotImplementedError

    def operations(self, role: str) -> float:
        """Arithmetic of a token in a pass of a model, in that of a token in the target's; nan where nothing says it."""
        raise NotImplementedError

    # --- What most methods ask for ---

    def plain_times(self, at: ArrayLike = 0, sequences: ArrayLike = 1) -> Floats:
        """Time of a step of plain decoding: a pass of the target over one token of each sequence, with its head."""
        return self.times(PassShape(LayerSpan(0, self.layers), sequences=sequences, heads=1), at)

    def verify_times(self, width: ArrayLike, at: ArrayLike = 0, sequences: ArrayLike = 1) -> Floats:
        """Time of a pass of the target over `width` tokens of each sequence, all of them projected."""
        return self.times(PassShape(LayerSpan(0, self.layers), width=width, sequences=sequences, heads=width), at)

    def draft_times(self, at: ArrayLike = 0, *, role: str = "draft", width: ArrayLike = 1, sequences: ArrayLike = 1) -> Floats:
        """Time of a whole pass of a smaller model over `width` tokens of each sequence, the last of them projected."""
        self.require(role)
        return self.times(PassShape(WHOLE, role, width, sequences, heads=1), at)

    def verify_curve(self, widest: int) -> tuple[tuple[int, float], ...] | None:
        """Time of a pass of the target by its width, relative to width 1, up to the widest; None where it is the same for all.

        Of policies that decide by it: a curve of its own, at one position, whatever is decoded.
        """
        raise NotImplementedError

    def plain_time(self, tokens: int) -> float:
        """Time of plain decoding of so many tokens of one sequence."""
        return float(tokens * self.plain_times() if self.uniform else self.plain_times(np.arange(tokens)).sum())


WHOLE = LayerSpan(0, -1)
"""All layers of a smaller model, whatever their number: costs know it."""
