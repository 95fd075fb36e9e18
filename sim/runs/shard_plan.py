"""Division of a scenario's work into pieces (consecutive replications of one point) and of these into shards.

It depends only on the scenario, never on the number of workers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from model.base.checks import ParameterError
from model.methods import registry
from model.outcomes import random_streams
from sim.scenarios import cases
from sim.scenarios.grid import Grid

SHARD_SECONDS = 1.0
SECONDS_PER_PASS, SECONDS_PER_DRAW = 6e-6, 1e-8
"""Rough costs, used to size shards and to estimate the duration; results do not depend on them."""
FORMULA_POINTS, VECTORISED_POINTS = 2_000, 20_000
"""Points in a shard of the view formula: for a theory that is evaluated point by point, and for a vectorised one."""


@dataclass(frozen=True)
class Shard:
    """Pieces [first, last) of one view; see `ShardPlan`."""

    view: str
    first: int
    last: int


class ShardPlan:
    """Pieces and shards of a grid, by view."""

    def __init__(self, grid: Grid) -> None:
        settings = grid.base.get("scenario", {})
        self.grid = grid
        self.views = tuple(settings.get("views", cases.VIEWS))
        largest = self._largest(grid)
        paths, events = self._replications()
        self.replications = {"formula": 1, "paths": paths, "events": events}
        path_seconds = largest.settings.tokens * random_streams.BLOCK * SECONDS_PER_DRAW
        run_seconds = largest.settings.tokens * (1 + largest.parameters.units) * SECONDS_PER_PASS
        # A power of two, so that no piece of events crosses the border between two blocks of random draws.
        runs = 2 ** max(0, min(12, math.floor(math.log2(SHARD_SECONDS / run_seconds))))
        self.size = {"formula": 1, "paths": random_streams.BLOCK, "events": runs}
        self.together = registry.method(largest.method).predict_together is not None
        formula = 1e-4 if self.together else 1e-3
        self.seconds = {"formula": formula, "paths": path_seconds, "events": run_seconds * min(runs, events)}

    def _largest(self, grid: Grid) -> cases.Case:
        """The point that represents the cost of all: the last valid one, since most axes are ascending."""
        for point in (grid.points - 1, 0, *range(1, min(grid.points, 1000))):
            try:
                return grid.case(point)
            except ParameterError as error:
                last = error
        raise last

    def _replications(self) -> tuple[int, int]:
        settings = self._largest(self.grid).settings
        return settings.replications, settings.event_replications or settings.replications

    def pieces(self, view: str) -> int:
        """Number of pieces of a view."""
        return int(self.grid.points * -(-self.replications[view] // self.size[view]))

    def step(self, view: str) -> int:
        """Pieces in one shard of a view."""
        if view == "formula":
            return VECTORISED_POINTS if self.together else FORMULA_POINTS
        return max(1, int(SHARD_SECONDS / self.seconds[view]))

    def count(self) -> int:
        """Number of shards, computed without listing them."""
        return sum(-(-self.pieces(view) // self.step(view)) for view in self.views)

    def shards(self) -> list[Shard]:
        """All shards, view by view."""
        found = []
        for view in self.views:
            step, total = self.step(view), self.pieces(view)
            found += [Shard(view, first, min(first + step, total)) for first in range(0, total, step)]
        return found

    def work(self, shard: Shard) -> list[tuple[int, int, int]]:
        """Pieces of a shard: point, first replication, and the one after the last."""
        size, count = self.size[shard.view], self.replications[shard.view]
        stretches = math.ceil(count / size)
        where = (divmod(piece, stretches) for piece in range(shard.first, shard.last))
        return [(point, part * size, min((part + 1) * size, count)) for point, part in where]

    def points(self, shard: Shard) -> tuple[int, int]:
        """Points [first, last) of which a shard has pieces."""
        stretches = math.ceil(self.replications[shard.view] / self.size[shard.view])
        return shard.first // stretches, (shard.last - 1) // stretches + 1

    def estimate(self) -> float:
        """Rough time on one core [s]."""
        return float(sum(self.pieces(view) * self.seconds[view] for view in self.views))

    def file(self, shard: Shard, fingerprint: str) -> str:
        """File name of a shard: view, first piece, and a hash of the inputs; `write_hashed` adds a hash of the content."""
        key = hashlib.sha256(f"{fingerprint} {shard}".encode()).hexdigest()[:16]
        return f"{shard.view}-{shard.first:09d}-{key}.parquet"
