"""Seconds of the passes and reads of a replayed run, from the profiles of its models.

A pass takes the time of `model.costs.pass_seconds.PassSeconds` plus a part that depends on the run so far. The overhead of a call
is paid once per call: a pass that is cut in two pays it twice; an engine's step has it once. Weights that have not been used for a
while load more slowly: if the profile contains this effect, a pass pays for the time since its layers last ran, beyond the gap
between two consecutive passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from model.costs.pass_seconds import PassSeconds, spread_over
from model.costs.step_costs import PassShape, position_of
from model.hardware.cost_models import Hardware
from model.hardware.interpolation import Estimate
from model.hardware.profile import EARLY_EXIT_READS
from model.hardware.profile_costs import ProfileCosts
from model.steps import Forward, Read


class PartSeconds(NamedTuple):
    """Time of a pass of a run, by part [s]."""

    layers: float = 0.0
    head: float = 0.0
    embedding: float = 0.0
    step: float = 0.0
    cooling: float = 0.0
    """Extra time of layers whose weights have not been used for a while and have left the processor's caches."""

    @property
    def total(self) -> float:
        """Time of the whole pass."""
        return self.layers + self.head + self.embedding + self.step + self.cooling


@dataclass(eq=False)
class ReplayedSeconds(PassSeconds):
    """Costs in seconds of a replayed run, in which the time of a pass also depends on earlier passes.

    Parameters
    ----------
    slowdowns
        Slowdown factors of all times while 0, 1, ... other units of this run are busy [-]; the last factor holds for more units.
    single_process
        True if one operating system process makes all passes. Passes then pay for the time since their layers last ran, and
        starting sub-processes takes the time of `fork` in the profile. With several processes each unit has separate caches, and
        timings taken on them already include these pauses.
    subprocess_step
        Overhead of the pass of a sub-process when no other unit is busy [s]; None: that of any pass.
    scheduling
        Scheduling overhead of the main process after each read [s].
    overhead_per_call
        True if passes that continue from another pass pay the overhead too, as calls of a library do; False if it belongs to a step
        (`model.costs.pass_seconds.PassSeconds`), as in an engine.

    >>> from model.hardware.cost_models import UniformLayers
    >>> from model.steps import LayerSpan
    >>> from model.architectures.published_shapes import preset
    >>> cost = ReplayedSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)})
    >>> cost.forward(Forward("target", (7,), 5, LayerSpan(10, 40), heads=1))
    0.03
    """

    slowdowns: Sequence[float] = (1.0,)
    single_process: bool = True
    subprocess_step: float | None = None
    scheduling: float = 0.0
    overhead_per_call: bool = True

    reads_take_time = True
    units_share = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: dict[tuple[PassShape, int], PartSeconds] = {}
        self._reads: dict[tuple[str, str, int], float] = {}
        self._cooling: dict[str, dict[int, _Cooling]] = {}
        self._nearest_cooling: dict[tuple[str, int], dict[int, _Cooling]] = {}
        self.begin()

    def begin(self) -> None:
        """Start a new run: forget all passes and reads."""
        self._last_read: Forward | None = None
        self.elapsed = 0.0
        """Time of all passes and reads of the run, without `cooling` [s]."""
        self.spent: dict[str, float] = {}
        """Time of the run by role and part [s]."""
        self.scheduled = 0.0
        """Scheduling overhead of the run after reads [s]."""
        self._run_at: dict[str, list[float]] = {}
        """By role: end of the last run of each layer [s]."""
        self._last_pass: dict[str, tuple[object, ...]] = {}
        """By role: tokens and positions of the last pass."""
        self._row_positions: dict[str, list[int]] = {}
        """By role, once hypotheses were read: position of every KV cache row, rows of discarded hypotheses included."""
        self._forked = False

    def in_run(self, step: Forward, rows: int | None = None) -> PartSeconds:
        """Time of a pass by part, independent of earlier passes.

        `rows` is the number of KV cache rows before it, if that differs from its position.
        """
        shape, at = PassShape.of(step), position_of(step) if rows is None else rows
        stored = self._parts.get((shape, at))
        if stored is not None:
            return stored
        parts = PartSeconds(*(float(each.seconds) for each in self.parts(shape, at)))
        # Passes of sub-processes start at layer 0 without logits. Passes over prompts do too, but have many tokens.
        narrow = not step.layers.first and not step.heads and (step.width == 1 or bool(step.tree))
        if self.subprocess_step is not None and narrow:
            parts = parts._replace(embedding=0.0, step=self.subprocess_step + self._tree(shape, at))
        self._parts[shape, at] = parts
        return parts

    def _step(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """Overhead per call; passes that continue from another pass pay it too, unless it belongs to an engine's step."""
        if not self.overhead_per_call:
            return super()._step(shape, sequences, at)
        step = self.hardware(shape.role).step(sequences)
        tree = self._tree(shape, at)
        return step + Estimate(np.asarray(tree), np.asarray(0.0)) if tree else step

    def _tree(self, shape: PassShape, at: ArrayLike) -> float:
        """Extra time to follow several hypotheses [s]; 0 if the profile lacks it."""
        return self._timed(shape.role, "tree", shape.width, at) if shape.tree else 0.0

    def _timed(self, role: str, part: str, *point: ArrayLike, otherwise: float = 0.0) -> float:
        """Time of a part of a model's profile [s]; `otherwise` if the profile lacks it."""
        measured = self.part(role, part, *point)
        return otherwise if measured is None else float(measured.seconds)

    def forward(self, step: Forward) -> float:
        """Time of a whole pass [s]."""
        return self.record_pass(step).total

    def record_pass(self, step: Forward) -> PartSeconds:
        """Time by part of a pass made now, after all passes since `begin`; records it as made."""
        before = self._before(step)
        parts = self.in_run(step, before)
        batch = step.batch
        tokens = len(step.tokens), step.at, step.tree, batch and (batch.sequences, batch.positions, batch.widths)
        if step.layers.first and tokens == self._last_pass.get(step.role):  # positions and masks have been prepared already
            parts = parts._replace(step=min(parts.step, self._timed(step.role, "resumed_step", 1, otherwise=parts.step)))
        self._last_pass[step.role] = tokens
        if parts.layers and self.single_process:
            parts = parts._replace(cooling=self._cooled(step, parts if before is None else None))
        self.elapsed += parts.total - parts.cooling
        for name, seconds in parts._asdict().items():
            self._enter(step.role, name, seconds)
        return parts

    def _before(self, step: Forward) -> int | None:
        """Number of KV cache rows before a pass if hypotheses were read, else None.

        A rollback to a position keeps all rows before it, those of discarded hypotheses included. Rows of sub-processes, which have
        separate caches, are not tracked.
        """
        if self._forked or not ((step.tree and step.heads) or step.role in self._row_positions):
            return None
        rows = self._row_positions.setdefault(step.role, [*range(step.at)])
        rows[:] = [position for position in rows if position < step.at]
        before = len(rows)
        rows += step.positions
        return before

    def _enter(self, role: str, part: str, seconds: float) -> None:
        self.spent[f"{role} {part}"] = self.spent.get(f"{role} {part}", 0.0) + seconds

    def _cooled(self, step: Forward, parts: PartSeconds | None) -> float:
        """Extra time of the layers of a pass because of the time since they last ran [s].

        Their weights have to be loaded from a slower memory, for any number of tokens. `parts` is the time of the pass at its
        position, if already computed.
        """
        role, width = step.role, len(step.tokens)
        if role not in self._cooling:
            self._cooling[role] = _cooling(self.hardware_models[role])
        if not self._cooling[role]:
            return 0.0
        if (role, width) not in self._nearest_cooling:
            self._nearest_cooling[role, width] = _nearest(self._cooling[role], width)
        curves = self._nearest_cooling[role, width]
        others = float(np.interp(width, [*curves], [curve.others for curve in curves.values()]))
        layers = [layer for low, high in step.layers.ranges for layer in range(low, high)]
        time, start = (parts or self.in_run(step)).layers / len(layers), self.elapsed
        depth = self.hardware_models[role].shape.layers
        ended = self._run_at.setdefault(role, [start + layer * time - others for layer in range(depth)])
        idle = 0.0
        for index, layer in enumerate(layers):
            idle += start + index * time - ended[layer]
            ended[layer] = start + (index + 1) * time
        gap = idle / len(layers) - others
        extra = [np.interp(gap, curve.gaps, curve.extra) for curve in curves.values()]
        return len(layers) * float(np.interp(width, [*curves], extra))

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass [s]; the first one includes the embedding and the overhead, the last one the head."""
        parts = self.in_run(step)
        return spread_over(step.layers, parts.layers, parts.head, parts.embedding, parts.step)

    def reading(self, step: Read) -> float:
        """Time of a read, including the scheduling overhead after it [s]; 0 for reads that the profile lacks."""
        output = step.output
        first = step.kind == "next" and output is not self._last_read
        if first:
            self._last_read = output
        early = EARLY_EXIT_READS.get(step.kind) if output.layers.last - output.layers.first == 1 else None
        point = output.batch_size if first else max(len(step.hypotheses), 1)  # a first read covers all sequences of a batch
        key = output.role, "first_read" if first else early or step.kind, point
        if key not in self._reads:
            self.hardware(output.role)
            usual = self._timed(output.role, step.kind, 1) if early else 0.0
            self._reads[key] = self._timed(*key, otherwise=usual)
        self.elapsed += self._reads[key] + self.scheduling
        self._enter(output.role, "reads", self._reads[key])
        self.scheduled += self.scheduling
        return self._reads[key] + self.scheduling

    def slowdown_among(self, others: int) -> float:
        """Slowdown factor of all times while `others` other units are busy [-]."""
        return self.slowdowns[min(max(others, 0), len(self.slowdowns) - 1)]

    def dispatching(self, processes: int) -> float:
        """Time that starting `processes` sub-processes occupies the starter's unit [s]."""
        self._forked = self._forked or processes > 0
        forking = self._timed("target", "fork", processes) if self.single_process and processes else 0.0
        return super().dispatching(processes) + forking


class _Cooling(NamedTuple):
    """Extra time of a layer as a function of its idle time, for passes of one width."""

    gaps: list[float]
    """Idle time of the layer beyond that between two consecutive passes [s]."""
    extra: list[float]
    """Extra time of the layer [s]."""
    others: float
    """Idle time of the layer between two consecutive passes, which is the time of the other layers [s]."""


def _nearest(curves: Mapping[int, _Cooling], width: int) -> dict[int, _Cooling]:
    """Curves of the nearest measured widths below and above (`curves` is sorted by width), or of `width` itself."""
    if width in curves:
        return {width: curves[width]}
    near = [*[each for each in curves if each < width][-1:], *[each for each in curves if each > width][:1]]
    return {each: curves[each] for each in near}


def _cooling(hardware: Hardware) -> dict[int, _Cooling]:
    """Measured curves by width, in increasing order; empty if the profile has none."""
    if not isinstance(hardware, ProfileCosts) or "after_gap" not in hardware.profile.parts:
        return {}
    single = hardware.profile.rows("after_gap").sort("gap")
    tables = {1: (single["gap"].to_numpy(), single["time_s"].to_numpy())}
    if "wide_after_gap" in hardware.profile.parts:
        for (width,), rows in hardware.profile.rows("wide_after_gap").sort("width", "gap").group_by("width", maintain_order=True):
            tables[int(str(width))] = rows["gap"].to_numpy(), rows["time_s"].to_numpy()
    layers, curves = hardware.shape.layers, {}
    for width, (gaps, times) in tables.items():
        usual = float(times[np.abs(gaps).argmin()])  # consecutive passes
        extra = (times - usual) / layers
        extra = np.maximum.accumulate(np.where(gaps < 0, np.minimum(extra, 0), np.maximum(extra, 0)))
        curves[width] = _Cooling((gaps / 1e6).tolist(), extra.tolist(), usual * (1 - 1 / layers))
    return curves
