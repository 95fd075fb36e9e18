"""Kinds of passes: what passes have in common that differ in nothing but their position, and counts of them."""

from __future__ import annotations

from model.costs.step_costs import StepCosts
from model.interpret.account import context_of
from model.steps import Forward, LayerSpan

PassKey = tuple[str, int, LayerSpan, int, int, tuple[int, ...] | None, bool]
"""Everything but the position that the time of a pass and its overhead depend on: fields of its `Kind`, tokens per sequence of its
batch, and whether it is part of another pass's engine step. A plain tuple for speed, since one is made per pass."""


def key_of(step: Forward) -> PassKey:
    """Key of the kind of a pass."""
    role, tokens, _, layers, _, heads, _, _, batch, compared, within_step, _ = step
    return role, len(tokens), layers, heads, compared, None if batch is None else batch.widths, within_step


class KnownPass:
    """What passes of one kind have in common, and counts of them as in an account: passes, positions attended to and read."""

    __slots__ = ("attended", "is_target", "layer_times", "overhead", "passes", "read", "seconds")

    def __init__(self, cost: StepCosts, step: Forward, key: PassKey) -> None:
        self.is_target = step.role == "target"
        self.seconds = 0.0
        """Time of a pass; where it depends on the position, that of the latest one."""
        if cost.uniform:
            found = cost.times_by_kind.get(key)
            if found is None:
                found = cost.times_by_kind[key] = cost.forward(step)
            self.seconds = found
        self.overhead = cost.overhead_of(step) if cost.steps_take_time else 0.0
        """Overhead of the engine's step in the time of a pass."""
        self.layer_times: list[float] | None = None
        self.passes = self.attended = self.read = 0

    def count(self, step: Forward, passes: int = 1) -> None:
        """Count passes that are alike, as `Account.add` does."""
        self.passes += passes
        _, tokens, at, _, _, _, _, tree, batch, _, _, budget = step
        if tree or batch is not None or budget is not None:
            attended, read = context_of(step)
            self.attended += passes * attended
            self.read += passes * read
        else:  # as `context_of`, inlined for speed
            width = len(tokens)
            self.attended += passes * (at * width + width * (width + 1) // 2)
            self.read += passes * (at + width)

    def count_several(self, width: int, passes: int, positions: int, *, tree: bool = False) -> None:
        """Count passes over `width` tokens of one sequence each, given the sum of the positions at which they begin.

        The tokens follow one another, or with `tree` all follow the same one.
        """
        self.passes += passes
        self.attended += positions * width + passes * (width if tree else width * (width + 1) // 2)
        self.read += positions + passes * width
