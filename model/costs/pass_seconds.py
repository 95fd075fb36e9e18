"""Seconds of passes on hardware, each at its own width, context and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.costs.step_costs import DISPATCH_LAWS, Floats, PassShape, StepCosts, position_of
from model.hardware.cost_models import Hardware
from model.hardware.interpolation import NONE, Estimate
from model.hardware.profile_costs import ProfileCosts
from model.steps import Forward, LayerSpan

TOKEN_BYTES = 64
"""What telling another process which token to go on with takes."""
_GROWTH = 64
"""Positions of which times are looked up together, at least."""


class Parts(NamedTuple):
    """What a pass takes, part by part [s]."""

    layers: Estimate = NONE
    head: Estimate = NONE
    embedding: Estimate = NONE
    step: Estimate = NONE

    @property
    def total(self) -> Estimate:
        """All of it."""
        return self.layers + self.head + self.embedding + self.step


@dataclass(eq=False)
class PassSeconds(StepCosts):
    """Costs in seconds: passes of models on hardware, priced at the positions at which they stand.

    Parameters
    ----------
    of
        The hardware model of each role. What a profile lacks takes no time: `model.hardware.profile_costs.ProfileCosts.missing`
        says what.
    prompt
        Cached positions at position 0 of the decoded text.
    batch
        Sequences of each pass, of which the decoded one stands for all.
    others_at
        Mean position of the other sequences of that batch, where each is at its own (continuous batching): attention then reads
        the mean context. Left out: all are at the same position.
    middle
        Position at which `ratio` and `operations` are stated.
    busy
        Other units of the host that are at work meanwhile, all the time.
    dispatch, dispatch_per_process, dispatch_law, link, promotion, state_check
        As of `model.costs.layer_times.UnitCost` [s].
    draft_devices
        As there.
    sway
        1: passes take as much longer as they may by the error of their times, but for steps of plain decoding at the full batch,
        which speed-ups are over; -1: as much shorter.

    >>> from model.hardware.cost_models import UniformLayers
    >>> from model.architectures.transformer import preset
    >>> cost = PassSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)}, prompt=512)
    >>> cost.plain_time(100), cost.times(PassShape(LayerSpan(10, 40)), [0, 1]).tolist()
    (4.0, [0.03, 0.03])
    """

    of: Mapping[str, Hardware]
    prompt: int = 0
    batch: int = 1
    others_at: float | None = None
    middle: int = 0
    busy: int = 0
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    promotion: float = 0.0
    state_check: float = 0.0
    draft_devices: float = 1.0
    sway: float = 0.0
    _known: dict[PassShape, Floats] = field(default_factory=dict, init=False, repr=False)
    """Times of passes by position."""
    _layers: dict[tuple[str, int, int], Estimate] = field(default_factory=dict, init=False, repr=False)
    """Times of a layer by position, of a role, tokens of each sequence, and sequences of a pass."""
    _totals: dict[PassShape, Estimate] = field(default_factory=dict, init=False, repr=False)
    """Passes by position, with their errors."""

    uniform = False

    def __post_init__(self) -> None:
        checks.whole("prompt", self.prompt, 0)
        checks.whole("batch", self.batch, 1)
        checks.one_of("dispatch_law", self.dispatch_law, DISPATCH_LAWS)

    @property
    def layers(self) -> int:  # type: ignore[override]
        """Depth of the target model."""
        return self.hardware("target").shape.layers

    def with_ends(self) -> tuple[PassSeconds, PassSeconds]:
        """The same where passes take as long as they may, and as short."""
        ends = replace(self, sway=1.0), replace(self, sway=-1.0)
        for each in ends:
            each._layers, each._totals = self._layers, self._totals
        return ends

    def hardware(self, role: str) -> Hardware:
        """The hardware model of a role."""
        if role not in self.of:
            raise ParameterError(f"profiles must be of every model that makes passes, and there is none of the {role}")
        return self.of[role]

    def context(self, at: ArrayLike) -> Floats:
        """Cached positions that a sequence of a pass attends to, in the mean over the batch."""
        own = np.asarray(at, dtype=np.float64)
        if self.others_at is not None and self.batch > 1:
            own = (own + (self.batch - 1) * self.others_at) / self.batch
        return self.prompt + own

    # --- A pass ---

    def parts(self, shape: PassShape, at: ArrayLike = 0) -> Parts:
        """What a pass takes, part by part: its layers one by one, its head where it projects, its step where it begins."""
        hardware, layers = self.hardware(shape.role), shape.layers
        if layers.last < 0:
            layers = LayerSpan(0, hardware.shape.layers)
        if layers.last > hardware.shape.layers:
            bound = f"{hardware.shape.layers}, as its profile has"
            raise ParameterError(f"layers of the {shape.role} must be {bound}, got at least {layers.last}")
        sequences = np.asarray(shape.sequences) * self.batch
        tokens = np.asarray(shape.width) * sequences
        head = self._head(shape, layers, sequences) if np.any(shape.heads) else NONE
        if layers.first == layers.last:  # a head alone
            return Parts(head=head)
        each = self._layer(shape, sequences, at)
        if layers.kv_only:
            each = self._filling(shape.role, tokens, each)
        return Parts(
            each.repeated(layers.size), head, NONE if layers.first or layers.kv_only else hardware.embedding(tokens),
            self._step(shape, sequences, at),
        )  # fmt: skip

    def _layer(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """One layer; of a single width at whole positions, from a table that grows as needed."""
        role, width, where = shape.role, shape.width, np.asarray(at)
        hardware = self.hardware(role)
        if not isinstance(width, int) or not isinstance(shape.sequences, int) or where.dtype.kind not in "iu":
            return hardware.layer(width, self.context(at), sequences, busy=self.busy)
        known, most = self._layers.get((role, width, shape.sequences)), int(where.max(initial=0))
        if known is None or known.seconds.size <= most:
            places = np.arange(max(most + 1, _GROWTH, 0 if known is None else 2 * known.seconds.size))
            found = hardware.layer(width, self.context(places), sequences, busy=self.busy)
            known = Estimate(*(np.broadcast_to(each, places.shape) for each in found))
            self._layers[role, width, shape.sequences] = known
        return Estimate(known.seconds[where], known.error[where])

    def _head(self, shape: PassShape, layers: LayerSpan, sequences: ArrayLike) -> Estimate:
        """Early exit asks layer by layer, and the head's weights have just been used: a profile may say what that saves."""
        found = self.part(shape.role, "early_head", 1) if layers.last - layers.first == 1 else None
        return self.hardware(shape.role).head(np.asarray(shape.heads) * sequences) if found is None else found

    def _filling(self, role: str, tokens: ArrayLike, layer: Estimate) -> Estimate:
        """Keys and values of one layer alone: as measured, or in proportion to their share of the layer's weights."""
        found = self.part(role, "kv_rows", tokens)
        return layer.repeated(share_of_rows(self.of[role].shape)) if found is None else found

    def _step(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """What the pass takes once."""
        found = self.hardware(shape.role).step(sequences) if shape.begins or shape.layers.last < 0 else NONE
        tree = self.part(shape.role, "tree", shape.width, self.context(at)) if shape.tree else None
        return found if tree is None else found + tree

    def part(self, role: str, part: str, *point: ArrayLike) -> Estimate | None:
        """A part of a model's profile [s]; None where the profile has none of it, or there is no profile."""
        hardware = self.of.get(role)
        return hardware.part(part, *point) if isinstance(hardware, ProfileCosts) else None

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape behind `at` positions of the decoded text [s]."""
        where = np.asarray(at)
        single = isinstance(shape.width, int) and isinstance(shape.sequences, int) and isinstance(shape.heads, int)
        if not single or where.dtype.kind not in "iu":
            return self._swayed(shape, self._total(shape, where), where)
        known, most = self._known.get(shape), int(where.max(initial=0))
        if known is None or known.size <= most:
            places, total = np.arange(max(most + 1, _GROWTH, 0 if known is None else 2 * known.size)), self._totals.get(shape)
            if total is None or total.seconds.size < places.size:
                total = self._totals[shape] = self._total(shape, places)
            known = self._known[shape] = self._swayed(shape, Estimate(*(each[: places.size] for each in total)), places)
        return np.asarray(known[where])

    def _total(self, shape: PassShape, at: ArrayLike) -> Estimate:
        """A pass as a whole, for each position, width and number of sequences."""
        found = self.parts(shape, at).total
        extent = np.broadcast_shapes(*map(np.shape, (found.seconds, shape.width, shape.sequences, at)))
        seconds = found.seconds + (self.state_check if shape.compared else 0.0)
        return Estimate(np.broadcast_to(seconds, extent), np.broadcast_to(found.error, extent))

    def _swayed(self, shape: PassShape, found: Estimate, at: ArrayLike) -> Floats:
        """Times at this end of what is known of them."""
        return np.maximum(found.seconds * (1 + self.sway * self._error(shape, found, at)), 0.0) if self.sway else found.seconds

    def _error(self, shape: PassShape, found: Estimate, at: ArrayLike) -> Floats:
        """How far the time of a pass may be off from that of a step of plain decoding: a part of both errors may be the same, which
        then cancels.
        """
        if shape.role != "target":
            return np.asarray(found.error + self.plain_error(at))
        wide = (np.asarray(shape.width) > 1) | (np.asarray(shape.sequences) > 1)
        return np.where(wide, found.error, 0.0)

    def plain_error(self, at: ArrayLike = 0) -> Floats:
        """Relative error of the time of a step of plain decoding [-]."""
        return np.asarray(self.parts(PassShape(LayerSpan(0, self.layers), heads=1), at).total.error)

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass, one by one [s]; what comes before them belongs to the first, a head to the last."""
        parts = self.parts(PassShape.of(step), position_of(step))
        return spread_over(step.layers, *(float(each.seconds) for each in parts), end=self.state_check if step.compared else 0.0)

    # --- Everything else ---

    def runs(self, role: str) -> bool:
        """Whether there is hardware of a model."""
        return role in self.of

    def ratio(self, role: str) -> float | None:
        """Time of a whole pass of a model other than the target, over one of the target, at the `middle` position."""
        return float(self.draft_times(self.middle, role=role) / self.plain_times(self.middle)) if self.runs(role) else None

    def verify_curve(self, widest: int) -> tuple[tuple[int, float], ...] | None:
        """Time of a pass of the target by its width, relative to width 1, at the `middle` position; None where it is the same.

        >>> from model.hardware.cost_models import UniformLayers
        >>> from model.architectures.transformer import preset
        >>> PassSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)}).verify_curve(3)
        """
        times = [float(self.verify_times(width, self.middle)) for width in range(1, widest + 1)]
        if min(times) == max(times):
            return None
        return tuple((width, time / times[0]) for width, time in enumerate(times, 1))

    def operations(self, role: str) -> float:
        """Arithmetic of a token in a pass of a model, in that of a token in the target's."""
        counts = [self.hardware(each).shape.operations(1, self.prompt + self.middle, heads=1) for each in (role, "target")]
        return counts[0] / counts[1]


def share_of_rows(shape: Shape) -> float:
    """Share of a layer's weights that make its keys and values."""
    return 2 * shape.hidden * shape.kv_heads * shape.head_dim / shape.layer_weights


def spread_over(layers: LayerSpan, run: float, head: float, embedding: float, step: float, *, end: float = 0.0) -> list[float]:
    """The parts of a pass as times of its layers."""
    times = [run / max(layers.size, 1)] * (layers.last - layers.first)
    for start, stop in layers.gaps:
        times[start - layers.first : stop - layers.first] = [0.0] * (stop - start)
    times[0] += embedding + step
    times[-1] += head + end
    return times
