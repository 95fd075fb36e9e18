"""Profiles of the models of a sitting, timed between its runs: on the very decoders that decode, a little at a time.

A machine is some percent faster at one moment than at another. What is timed all at once is off by that; what is spread over the
whole of the runs drifts with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrate.devices.device_failures import failure_of
from calibrate.timing import process_times, profile_from_timings, read_times
from calibrate.timing.single_pass import Effort, Point, measure
from calibrate.timing.timing_grid import TimingGrid, go_over, release
from calibrate.untested_on_gpu.cuda_graphs import WIDEST, Graphs
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.profile_files import load

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.untested_on_gpu.over_streams import Lanes
    from calibrate.workers.worker_pool import Pool

MODE = "interpreter"
LONGEST = 60.0
"""Seconds that a point may take in a round, whatever its repeats."""
REST = ("reads", "after")
"""What is timed in each round besides whole passes."""
APART = "apart"
"""A text of which sub-processes have units of their own."""


@dataclass(frozen=True)
class Passes:
    """The passes that are timed between runs.

    Parameters
    ----------
    widths, contexts, batches
        The grid of each model: all widths of one text, and of several those of `together`.
    together
        How many tokens of each of several texts: more than one where drafts of a batch are verified.
    busy
        Other processes at the same work, at width 1 of the target: what units of one host cost each other.
    rounds, repeats
        How often the grid is gone over in each repeat of the runs, and how often a pass is made each time.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    busy: tuple[int, ...] = ()
    rounds: int = 3
    repeats: int = 8
    together: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name in ("rounds", "repeats"):
            checks.whole(name, getattr(self, name), 1, 1000)
        for grid in self.grids:
            grid.points()
        if 1 not in self.batches or (len(self.batches) > 1 and 1 not in self.widths):
            raise ParameterError("widths and batches must have 1 among them: most passes over a batch are of a token of each text")
        if not {*self.together} <= {*self.widths}:
            raise ParameterError(f"together must be some of widths={checks.shown(self.widths)}, got {checks.shown(self.together)}")
        if self.together != (1,) and len(self.batches) == 1:
            given = checks.shown(self.together)
            raise ParameterError(f"together must be left out without batches, of whose passes it is, got {given}; or give batches")
        if 1 not in self.together:
            raise ParameterError(f"together must have 1 among them, as drafts are made, got {checks.shown(self.together)}")

    @property
    def points(self) -> list[Point]:
        """The passes alone, but for widths that no method has in a batch."""
        return [each for each in self.grids[0].points() if each.batch == 1 or each.width in self.together]

    @property
    def room(self) -> int:
        """Rows of a text that replayed passes need: those of the grid, and those that everything else is timed on."""
        widths = [each for each in self.widths if each <= WIDEST]
        return max(max(self.contexts) + max(widths, default=0) + 1, read_times.ROOM)

    @property
    def grids(self) -> tuple[TimingGrid, ...]:
        """That of passes alone, and that beside others where there are any."""
        alone = TimingGrid(self.widths, self.contexts, self.batches, modes=(MODE,))
        others = tuple(each for each in self.busy if each)
        return (alone, TimingGrid((1,), self.contexts, busy=others, modes=(MODE,))) if others else (alone,)


class RoundPart(NamedTuple):
    """A little of a round: a point of the grid, or what is timed besides."""

    role: str
    round: int
    what: Point | str


class Sitting:
    """Times the models of runs between these; see `calibrate.measured_runs.measure_runs.Beside`.

    Parameters
    ----------
    decoders, names
        The models by role, and what they are called: a preset, a directory or a model of the family.
    passes
        What is timed.
    folder
        Where raw rows and profiles are kept. What is there is gone on with.
    processes
        Whether what processes with replicas of the target take is timed too: those of the runs, that `between` is handed.
    lanes
        Streams of the target's GPU, where what passes take side by side on them is timed too.
    """

    def __init__(
        self, decoders: Mapping[str, Decoder], names: Mapping[str, str], passes: Passes, folder: Path, *, device: str, dtype: str,
        seed: int = 0, processes: bool = False, lanes: Lanes | None = None,
    ) -> None:
        self.passes, self.folder, self.seed, self.processes, self.lanes = passes, folder, seed, processes, lanes
        self.effort = Effort(target=0.0, least=passes.repeats, most=passes.repeats, warmups=3)
        grid, *beside = passes.grids
        asked = beside[0] if beside else grid
        self.of = {
            role: profile_from_timings.open_model(
                name, asked if role == "target" else grid, folder, device=device, dtype=dtype, quick=True, resume=True,
                decoder=decoders[role],
            )
            for role, name in names.items()
        }  # fmt: skip
        for role, begun in self.of.items():
            # Of a batch, drafts are made by methods alone whose texts come apart, which graphs are not made for.
            begun.built.unequal = role != "target" and not isinstance(decoders[role], Graphs)
        self.pieces: list[RoundPart] = []
        self.made = self.turn = 0
        self.texts: list[process_times.Apart] = []
        """Over processes or streams, of this repeat of the runs."""
        self.refused: dict[str, str] = {}
        """Roles whose profile could not be made when it was last tried, and why."""
        self.warnings: dict[str, list[str]] = {}
        """What of a role's profile beats the ceilings that were measured."""

    def begin(self, turn: int) -> None:
        """Time what needs processes of its own, before those of the runs are there."""
        target = self.of["target"]
        for grid in self.passes.grids[1:]:
            own = TimingGrid(grid.widths, grid.contexts, busy=grid.busy, modes=grid.modes, rounds=turn + 1)
            minutes = LONGEST / 60 * len(own.points())
            found = go_over(target.built, own, target.rows, target.spec, effort=self.effort, minutes=minutes)
            for point, why in found.failed:
                raise ParameterError(f"{point} of the target could not be timed: {why}")
        self.pieces, self.made, self.turn, self.texts = [*self._pieces(turn)], 0, turn, []
        key = np.random.SeedSequence(self.seed, spawn_key=(turn, 1))
        order = np.random.Generator(np.random.Philox(key)).permutation(len(self.pieces))
        self.pieces = [self.pieces[number] for number in order]

    def _pieces(self, turn: int) -> Iterator[RoundPart]:
        for number in range(turn * self.passes.rounds, (turn + 1) * self.passes.rounds):
            for role in self.of:
                for point in self.passes.points:
                    yield RoundPart(role, number, Point(**{**vars(point), "round": number}))
                for what in REST:
                    yield RoundPart(role, number, what)
        rows = self.of["target"].rows.rows
        timed = any(row["kind"] == "processes" and row["round"] == turn for row in rows)
        if (self.processes or self.lanes is not None) and not timed:
            for number in range(process_times.TEXTS):
                yield RoundPart("target", turn * process_times.TEXTS + number, APART)

    def between(self, share: float, pool: Pool | None = None) -> None:
        """Time as much as belongs before this share of a repeat of the runs, over their processes where they have some."""
        while self.made < min(round(share * len(self.pieces)), len(self.pieces)):
            self._time(self.pieces[self.made], pool)
            self.made += 1

    def _time(self, piece: RoundPart, pool: Pool | None) -> None:
        begun = self.of[piece.role]
        if piece.what == APART:
            if self.lanes is not None:
                self.texts.append(process_times.over_streams(self.lanes, piece.round))
            elif pool is not None:
                self.texts.append(process_times.over_processes(pool, piece.round))
        elif isinstance(piece.what, str):
            profile_from_timings.time_rest(begun, piece.round, (piece.what,))
        elif piece.what not in begun.rows.done():
            begun.rows.add(self._point(begun, piece.what))
            begun.ceilings.between()

    def _point(self, begun: profile_from_timings.Open, point: Point) -> dict[str, Any]:
        """The raw row of a point. One that does not fit the memory is left out: the runs, and all other points, go on."""
        try:
            return measure(begun.built, point, self.effort, time.monotonic() + LONGEST)
        except (RuntimeError, MemoryError) as error:
            failure = failure_of(error)
            if not failure.memory:
                raise
        release(begun.built.device)
        return {"kind": "failed", **asdict(point), "error": failure.line}

    def end(self) -> None:
        """Write the profiles of what there is. One that is refused does not end the runs, which may not be had again."""
        self.refused, self.warnings = {}, {}
        if self.texts:
            target = self.of["target"]
            target.rows.add(
                {"kind": "processes", "round": self.turn} | process_times.apart(self.texts, target.built.decoder.layers)
            )
        for role, begun in self.of.items():
            written, refused = profile_from_timings.write(begun, (MODE,), self.folder)
            self.warnings[role] = [line for path in written.values() for line in load(path).facts.get("warnings", [])]
            self.refused |= dict.fromkeys([role] * len(refused), "; ".join(refused.values()))
