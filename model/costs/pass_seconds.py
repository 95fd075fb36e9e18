"""Seconds of every single pass and read of real models by their profiles: each at its own width, context and batch.

Scenarios price a method at one operating point (`model.costs.operating_point`), in the middle of a text. Where a run that has
happened is predicted, every pass stands where it stood, and what a call takes besides its layers counts as often as there were
calls: a pass cut in two pays it twice. Weights that nobody has used for a while take longer to come: where a profile knows how
much, a pass pays for the time since its layers were last run, beyond what one pass after the other leaves between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from model.base.checks import ParameterError
from model.hardware.cost_models import Hardware
from model.hardware.profile import EARLY
from model.hardware.profile_costs import ProfileCosts
from model.steps import Forward, Read


class Parts(NamedTuple):
    """What a pass takes, part by part [s]."""

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


class PassCost:
    """The engine's costs in seconds, pass by pass.

    Parameters
    ----------
    of
        The hardware model of each role. What a profile lacks takes no time: `model.hardware.profile_costs.ProfileCosts.missing`
        says what.
    busy
        Other units of the host that are at work meanwhile, all the time.
    slower
        How many times as long everything takes while so many other units of this run are at work, beginning with none; beyond the
        last as the last.
    dispatch, dispatch_per_process, link, promotion
        Starting sub-processes, from there until they begin, and taking over the state and the rows of one [s].
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
    >>> cost = PassCost({"target": UniformLayers(preset("llama-2-13b"), 0.001)})
    >>> cost.forward(Forward("target", (7,), 5, LayerSpan(10, 40), heads=1))
    0.03
    """

    by_position = True
    """A pass takes another time at another place: the engine asks for each."""

    def __init__(
        self, of: Mapping[str, Hardware], *, busy: int = 0, slower: Sequence[float] = (1.0,), dispatch: float = 0.0,
        dispatch_per_process: float = 0.0, link: float = 0.0, promotion: float = 0.0,
        scheduling: float = 0.0, single: bool = True, subprocess_step: float | None = None,
    ) -> None:
        self.of, self.busy, self.slower = dict(of), busy, tuple(slower)
        self.dispatch, self.dispatch_per_process, self.promotion = dispatch, dispatch_per_process, promotion
        self.link, self.scheduling, self.single, self.subprocess_step = link, scheduling, single, subprocess_step
        self._known: dict[tuple[str, int, int, int, int], Parts] = {}
        self._rows: dict[tuple[str, int], float] = {}
        self._trees: dict[tuple[str, int, int], float] = {}
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

    def hardware(self, role: str) -> Hardware:
        """The hardware model of a role."""
        if role not in self.of:
            raise ParameterError(f"profiles must be of every model that makes passes, and there is none of the {role}")
        return self.of[role]

    def parts(self, step: Forward, rows: int | None = None) -> Parts:
        """What a pass takes, part by part: its layers one by one, its head where it projects, its call.

        `rows` is how many lie before it, if not as many as its place says.
        """
        role, heads, layers, batch, width = step.role, step.heads, step.layers, step.batch_size, step.width
        hardware = self.hardware(role)
        # The rows of a batch are padded to those of its longest sequence, and its tokens to those of its widest.
        longest = step.at if step.batch is None else max(step.batch.positions)
        at = longest if rows is None else rows
        each = self._each(role, width, at, batch, heads)
        long = self._filling(role, width * batch, each.layers) if layers.kv_only else each.layers
        # A sub-process begins at the first layer and projects nothing; so does a prompt, which is as wide as it is long.
        sub = self.subprocess_step is not None and not layers.first and not heads and (width == 1 or bool(step.tree))
        embedding = 0.0 if layers.first or sub else each.embedding
        # Early exit asks layer by layer, and the head's weights have just been used.
        head = self._timed(role, "early_head", 1, otherwise=each.head) if heads and layers.last - layers.first == 1 else each.head
        once = self.subprocess_step if sub and self.subprocess_step is not None else each.step
        call = once + (self._tree(role, width, at) if step.tree else 0.0)
        if layers.first == layers.last:  # a head alone
            return Parts(head=each.head)
        if layers.last > hardware.shape.layers:
            bound = f"{hardware.shape.layers}, as its profile has"
            raise ParameterError(f"layers of the {role} must be {bound}, got at least {layers.last}")
        return Parts(layers.size * long, head if heads else 0.0, embedding, call)

    def _each(self, role: str, width: int, context: int, batch: int, heads: int) -> Parts:
        """One layer, and everything else of a pass."""
        key = role, width, context, batch, heads
        if key not in self._known:
            of = self.of[role]
            times = (
                of.layer(width, context, batch, busy=self.busy), of.head(max(heads, 1)), of.embedding(width * batch),
                of.step(batch),
            )  # fmt: skip
            self._known[key] = Parts(*(float(each.seconds) for each in times))
        return self._known[key]

    def _timed(self, role: str, part: str, *point: int, otherwise: float = 0.0) -> float:
        """A part of a model's profile [s], or something else where it has none of it."""
        hardware = self.of.get(role)
        found = hardware.part(part, *point) if isinstance(hardware, ProfileCosts) else None
        return otherwise if found is None else float(found.seconds)

    def _tree(self, role: str, width: int, context: int) -> float:
        """What following several hypotheses takes besides, where the profile says it."""
        if (role, width, context) not in self._trees:
            self._trees[role, width, context] = self._timed(role, "tree", width, context)
        return self._trees[role, width, context]

    def _filling(self, role: str, tokens: int, layer: float) -> float:
        """Keys and values of one layer alone: as measured, or in proportion to their share of the layer's weights."""
        if (role, tokens) not in self._rows:
            shape = self.of[role].shape
            share = 2 * shape.hidden * shape.kv_heads * shape.head_dim / shape.layer_weights
            self._rows[role, tokens] = self._timed(role, "kv_rows", tokens, otherwise=layer * share)
        return self._rows[role, tokens]

    def forward(self, step: Forward) -> float:
        """Time of a whole pass [s]."""
        return self.made(step).total

    def made(self, step: Forward) -> Parts:
        """What a pass takes that is made now, behind all that were asked for since `begin`."""
        before = self._before(step)
        parts = self.parts(step, before)
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

    def _cooled(self, step: Forward, parts: Parts | None) -> float:
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
        each, start = (parts or self.parts(step)).layers / len(own), self.elapsed
        ended = self._run_at.setdefault(role, [start + layer * each - others for layer in range(self.of[role].shape.layers)])
        idle = 0.0
        for place, layer in enumerate(own):
            idle += start + place * each - ended[layer]
            ended[layer] = start + (place + 1) * each
        gap = idle / len(own) - others
        return len(own) * float(np.interp(width, [*known], [np.interp(gap, each.gaps, each.later) for each in known.values()]))

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass, one by one [s]; what comes before them belongs to the first, a head to the last."""
        parts = self.parts(step)
        layers = step.layers
        times = [parts.layers / max(layers.size, 1)] * (layers.last - layers.first)
        for start, stop in layers.gaps:
            times[start - layers.first : stop - layers.first] = [0.0] * (stop - start)
        times[0] += parts.embedding + parts.step
        times[-1] += parts.head
        return times

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
        return self.dispatch + self.dispatch_per_process * processes + forking


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
