"""Seconds of the passes and reads of a run that is played again, by the profiles of its models.

A pass takes what `model.costs.pass_seconds.PassSeconds` says, and besides what depends on the run so far. What a call takes besides
its layers counts as often as there were calls: a pass cut in two pays it twice. Weights that were not used for a while take longer
to come: where a profile knows how much, a pass pays for the time since its layers were last run, beyond what one pass after the
other leaves between.
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
from model.hardware.profile import EARLY
from model.hardware.profile_costs import ProfileCosts
from model.steps import Forward, Read


class PartSeconds(NamedTuple):
    """What a pass of a run takes, part by part [s]."""

    layers: float = 0.0
    head: float = 0.0
    embedding: float = 0.0
    step: float = 0.0
    cooling: float = 0.0
    """What the layers take longer because their weights have not been used for a while: others share the caches."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.layers + self.head + self.embedding + self.step + self.cooling


@dataclass(eq=False)
class ReplayedSeconds(PassSeconds):
    """Costs in seconds of a run that is played again, in which what a pass takes also depends on what ran before it.

    Parameters
    ----------
    slower
        How many times as long everything takes while so many other units of this run are at work, beginning with none; beyond the
        last as the last.
    single
        Whether one process of the system makes all passes. They then pay for the time since their layers were last run, and
        starting sub-processes takes what it takes within a process. Over several, each unit has caches of its own, and what was
        timed on them holds their pauses already.
    subprocess_step
        What the pass of a sub-process takes once besides its layers, as if alone [s]; left out: what any pass takes.
    scheduling
        Scheduling overhead of the main process after each read [s].

    >>> from model.hardware.cost_models import UniformLayers
    >>> from model.steps import LayerSpan
    >>> from model.architectures.transformer import preset
    >>> cost = ReplayedSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)})
    >>> cost.forward(Forward("target", (7,), 5, LayerSpan(10, 40), heads=1))
    0.03
    """

    slower: Sequence[float] = (1.0,)
    single: bool = True
    subprocess_step: float | None = None
    scheduling: float = 0.0

    reads_take_time = True
    units_share = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds_known: dict[tuple[PassShape, int], PartSeconds] = {}
        self._reads: dict[tuple[str, str, int], float] = {}
        self._after: dict[str, dict[int, _Cooling]] = {}
        self._beside: dict[tuple[str, int], dict[int, _Cooling]] = {}
        self.begin()

    def begin(self) -> None:
        """A new run: nothing has been looked at, and no layer has been run yet."""
        self._looked_at: Forward | None = None
        self.elapsed = 0.0
        self.spent: dict[str, float] = {}
        """What was asked for since, by role and part [s]."""
        self.scheduled = 0.0
        """And between looks and what followed them [s]."""
        self._run_at: dict[str, list[float]] = {}
        self._places: dict[str, tuple[object, ...]] = {}
        self._lying: dict[str, list[int]] = {}
        """By role, of texts of which hypotheses were read: the position of each row, those of hypotheses that were not kept too."""
        self._forked = False

    def in_run(self, step: Forward, rows: int | None = None) -> PartSeconds:
        """What a pass takes, part by part, whatever ran before it.

        `rows` is how many lie before it, if not as many as its position says.
        """
        shape, at = PassShape.of(step), position_of(step) if rows is None else rows
        found = self._seconds_known.get((shape, at))
        if found is None:
            parts = PartSeconds(*(float(each.seconds) for each in self.parts(shape, at)))
            # A sub-process begins at the first layer and projects nothing; so does a prompt, which is as wide as it is long.
            narrow = not step.layers.first and not step.heads and (step.width == 1 or bool(step.tree))
            if self.subprocess_step is not None and narrow:
                parts = parts._replace(embedding=0.0, step=self.subprocess_step + self._tree(shape, at))
            found = self._seconds_known[shape, at] = parts
        return found

    def _step(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """Every call takes it, of a pass that goes on from another, too."""
        found = self.hardware(shape.role).step(sequences)
        tree = self._tree(shape, at)
        return found + Estimate(np.asarray(tree), np.asarray(0.0)) if tree else found

    def _tree(self, shape: PassShape, at: ArrayLike) -> float:
        """What following several hypotheses takes besides, where the profile says it [s]."""
        return self._timed(shape.role, "tree", shape.width, at) if shape.tree else 0.0

    def _timed(self, role: str, part: str, *point: ArrayLike, otherwise: float = 0.0) -> float:
        """A part of a model's profile [s], or something else where it has none of it."""
        found = self.part(role, part, *point)
        return otherwise if found is None else float(found.seconds)

    def forward(self, step: Forward) -> float:
        """Time of a whole pass [s]."""
        return self.made(step).total

    def made(self, step: Forward) -> PartSeconds:
        """What a pass takes that is made now, behind all that were asked for since `begin`."""
        before = self._before(step)
        parts = self.in_run(step, before)
        batch = step.batch
        place = len(step.tokens), step.at, step.tree, batch and (batch.sequences, batch.positions, batch.widths)
        if step.layers.first and place == self._places.get(step.role):  # what is to be known of the place is known already
            parts = parts._replace(step=min(parts.step, self._timed(step.role, "resumed_step", 1, otherwise=parts.step)))
        self._places[step.role] = place
        if parts.layers and self.single:
            parts = parts._replace(cooling=self._cooled(step, parts if before is None else None))
        self.elapsed += parts.total - parts.cooling
        for name, seconds in parts._asdict().items():
            self._enter(step.role, name, seconds)
        return parts

    def _before(self, step: Forward) -> int | None:
        """How many rows a pass attends to before its own, where hypotheses were read: whoever cuts back to a place leaves those
        before it, whether their hypotheses were kept or not. Of sub-processes, which have rows of their own, nobody keeps account.
        """
        if self._forked or not ((step.tree and step.heads) or step.role in self._lying):
            return None
        lying = self._lying.setdefault(step.role, [*range(step.at)])
        lying[:] = [position for position in lying if position < step.at]
        before = len(lying)
        lying += step.positions
        return before

    def _enter(self, role: str, part: str, seconds: float) -> None:
        self.spent[f"{role} {part}"] = self.spent.get(f"{role} {part}", 0.0) + seconds

    def _cooled(self, step: Forward, parts: PartSeconds | None) -> float:
        """How much longer the layers of a pass take for the time since they were last run [s]: their weights must come from further
        away, however many tokens they are for. `parts` is what it takes at its place, where that is known.
        """
        role, width = step.role, len(step.tokens)
        if role not in self._after:
            self._after[role] = _after(self.of[role])
        if not self._after[role]:
            return 0.0
        if (role, width) not in self._beside:
            self._beside[role, width] = _beside(self._after[role], width)
        known = self._beside[role, width]
        others = float(np.interp(width, [*known], [each.others for each in known.values()]))
        own = [layer for low, high in step.layers.ranges for layer in range(low, high)]
        each, start = (parts or self.in_run(step)).layers / len(own), self.elapsed
        ended = self._run_at.setdefault(role, [start + layer * each - others for layer in range(self.of[role].shape.layers)])
        idle = 0.0
        for place, layer in enumerate(own):
            idle += start + place * each - ended[layer]
            ended[layer] = start + (place + 1) * each
        gap = idle / len(own) - others
        return len(own) * float(np.interp(width, [*known], [np.interp(gap, each.gaps, each.later) for each in known.values()]))

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass, one by one [s]; what comes before them belongs to the first, a head to the last."""
        parts = self.in_run(step)
        return spread_over(step.layers, parts.layers, parts.head, parts.embedding, parts.step)

    def reading(self, step: Read) -> float:
        """Time of looking at what a pass has made, behind its head [s]; none where the profile does not say."""
        output = step.output
        first = step.kind == "next" and output is not self._looked_at
        if first:
            self._looked_at = output
        early = EARLY.get(step.kind) if output.layers.last - output.layers.first == 1 else None
        point = output.batch_size if first else max(len(step.hypotheses), 1)  # a first look is at all sequences of a batch
        key = output.role, "first_read" if first else early or step.kind, point
        if key not in self._reads:
            self.hardware(output.role)
            usual = self._timed(output.role, step.kind, 1) if early else 0.0
            self._reads[key] = self._timed(*key, otherwise=usual)
        self.elapsed += self._reads[key] + self.scheduling
        self._enter(output.role, "reads", self._reads[key])
        self.scheduled += self.scheduling
        return self._reads[key] + self.scheduling

    def among(self, others: int) -> float:
        """How many times as long everything takes beside so many other units at work."""
        return self.slower[min(max(others, 0), len(self.slower) - 1)]

    def dispatching(self, processes: int) -> float:
        """Time for which starting this many sub-processes holds the starter's unit [s]."""
        self._forked = self._forked or processes > 0
        forking = self._timed("target", "fork", processes) if self.single and processes else 0.0
        return super().dispatching(processes) + forking


class _Cooling(NamedTuple):
    """Of passes of a width: how much longer a layer takes [s] the longer it has not been run [s], beyond what one pass after the
    other leaves it; and what that is, the time of the other layers [s]."""

    gaps: list[float]
    later: list[float]
    others: float


def _beside(known: Mapping[int, _Cooling], width: int) -> dict[int, _Cooling]:
    """Those of the nearest widths on either side, of widths in order: one where it is known itself, or lies beyond all."""
    if width in known:
        return {width: known[width]}
    near = [*[each for each in known if each < width][-1:], *[each for each in known if each > width][:1]]
    return {each: known[each] for each in near}


def _after(hardware: Hardware) -> dict[int, _Cooling]:
    """By width, in order; nothing where nobody has timed it."""
    if not isinstance(hardware, ProfileCosts) or "after_gap" not in hardware.profile.parts:
        return {}
    one = hardware.profile.rows("after_gap").sort("gap")
    tables = {1: (one["gap"].to_numpy(), one["time_s"].to_numpy())}
    if "wide_after_gap" in hardware.profile.parts:
        for (width,), rows in hardware.profile.rows("wide_after_gap").sort("width", "gap").group_by("width", maintain_order=True):
            tables[int(str(width))] = rows["gap"].to_numpy(), rows["time_s"].to_numpy()
    layers, found = hardware.shape.layers, {}
    for width, (gaps, times) in tables.items():
        usual = float(times[np.abs(gaps).argmin()])  # one right behind the other
        later = (times - usual) / layers
        later = np.maximum.accumulate(np.where(gaps < 0, np.minimum(later, 0), np.maximum(later, 0)))
        found[width] = _Cooling((gaps / 1e6).tolist(), later.tolist(), usual * (1 - 1 / layers))
    return found
