"""Profiles of the models of a measurement session, timed in small pieces between its runs, on the same decoders.

The speed of a machine drifts by some percent. A profile that is timed at once has this error; a profile that is spread over all
runs drifts with them.
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
from calibrate.timing.timing_grid import TimingGrid, release, time_grid
from calibrate.untested_on_gpu.cuda_graphs import WIDEST, Graphs
from calibrate.workers.model_processes import ModelProcesses
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.profile_files import load

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.untested_on_gpu.over_streams import Lanes
    from calibrate.workers.worker_pool import Pool

MODE = "interpreter"
LONGEST = 60.0
"""Time limit of a point in a round [s]."""
REST = ("reads", "after")
"""Parts that are timed in each round besides whole passes."""
PROCESSES = "processes"
"""A piece that decodes a sequence whose sub-processes have separate units."""


@dataclass(frozen=True)
class Passes:
    """Passes that are timed between runs.

    Parameters
    ----------
    widths, contexts, batches
        Grid of each model: all widths for one sequence, and `batched_widths` for several sequences.
    batched_widths
        Tokens per sequence in batches: more than 1 for the verification of drafts in a batch.
    busy
        Numbers of other processes with the same load, for passes of the target at width 1: the slowdown between units of a host.
    rounds, repeats
        Rounds over the grid per repeat of the runs, and passes per point and round.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    busy: tuple[int, ...] = ()
    rounds: int = 3
    repeats: int = 8
    batched_widths: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name in ("rounds", "repeats"):
            checks.whole(name, getattr(self, name), 1, 1000)
        for grid in self.grids:
            grid.points()
        if 1 not in self.batches or (len(self.batches) > 1 and 1 not in self.widths):
            raise ParameterError("widths and batches must include 1: most passes of a batch have one token per sequence")
        if not {*self.batched_widths} <= {*self.widths}:
            raise ParameterError(
                f"batched_widths must be some of widths={checks.shown(self.widths)}, got {checks.shown(self.batched_widths)}"
            )
        if self.batched_widths != (1,) and len(self.batches) == 1:
            widths = checks.shown(self.batched_widths)
            raise ParameterError(f"batched_widths must be left out without batches, got {widths}; or give batches")
        if 1 not in self.batched_widths:
            raise ParameterError(
                f"batched_widths must include 1, the width of drafting, got {checks.shown(self.batched_widths)}"
            )

    @property
    def points(self) -> list[Point]:
        """Points of passes without other busy processes, except widths that no method uses in a batch."""
        return [each for each in self.grids[0].points() if each.batch == 1 or each.width in self.batched_widths]

    @property
    def room(self) -> int:
        """KV cache rows per sequence that replayed passes need: those of the grid, and those of all other timings."""
        widths = [each for each in self.widths if each <= WIDEST]
        return max(max(self.contexts) + max(widths, default=0) + 1, read_times.ROOM)

    @property
    def grids(self) -> tuple[TimingGrid, ...]:
        """Grid of passes alone, followed by the grid next to busy processes, if any."""
        alone = TimingGrid(self.widths, self.contexts, self.batches, modes=(MODE,))
        others = tuple(each for each in self.busy if each)
        return (alone, TimingGrid((1,), self.contexts, busy=others, modes=(MODE,))) if others else (alone,)


class RoundPart(NamedTuple):
    """A piece of a round: a point of the grid, or one of the other timings."""

    role: str
    round: int
    what: Point | str


class MeasurementSession:
    """Times the models between the runs; implements `calibrate.measured_runs.measure_runs.Interleaved`.

    Parameters
    ----------
    decoders, names
        Models by role, and their names: a preset, a directory or a model of the family.
    passes
        Passes that are timed.
    folder
        Folder of raw rows and profiles. Existing rows are continued.
    processes
        True to also time processes with replicas of the target, those of the runs (an argument of `between`).
    lanes
        Streams of the target's GPU, to also time concurrent passes on them.
    """

    def __init__(
        self, decoders: Mapping[str, Decoder], names: Mapping[str, str], passes: Passes, folder: Path, *, device: str, dtype: str,
        seed: int = 0, processes: bool = False, lanes: Lanes | None = None,
    ) -> None:
        self.passes, self.folder, self.seed, self.processes, self.lanes = passes, folder, seed, processes, lanes
        self.effort = Effort(target=0.0, least=passes.repeats, most=passes.repeats, warmups=3)
        grid, *busy_grids = passes.grids
        target_grid = busy_grids[0] if busy_grids else grid
        self.timed_models = {
            role: profile_from_timings.open_model(
                name, target_grid if role == "target" else grid, folder, device=device, dtype=dtype, quick=True, resume=True,
                decoder=decoders[role],
            )
            for role, name in names.items()
        }  # fmt: skip
        for role, timed in self.timed_models.items():
            # Only methods whose sequences reach different positions draft in batches; graphs do not support these.
            timed.built.unequal = role != "target" and not isinstance(decoders[role], Graphs)
        self.pieces: list[RoundPart] = []
        self.pieces_done = self.turn = 0
        self.decoding_times: list[process_times.DecodingTimes] = []
        """Timed sequences over processes or streams, in this repeat of the runs."""
        self.refused: dict[str, str] = {}
        """Roles whose profile was refused at the last attempt, with the reason."""
        self.warnings: dict[str, list[str]] = {}
        """Times of a role's profile that beat the measured peaks."""

    def begin(self, turn: int) -> None:
        """Time passes next to busy processes, before the processes of the runs are started."""
        target = self.timed_models["target"]
        for grid in self.passes.grids[1:]:
            busy_grid = TimingGrid(grid.widths, grid.contexts, busy=grid.busy, modes=grid.modes, rounds=turn + 1)
            minutes = LONGEST / 60 * len(busy_grid.points())
            found = time_grid(target.built, busy_grid, target.rows, target.spec, effort=self.effort, minutes=minutes)
            for point, why in found.failed:
                raise ParameterError(f"{point} of the target could not be timed: {why}")
        self.pieces, self.pieces_done, self.turn, self.decoding_times = [*self._pieces(turn)], 0, turn, []
        key = np.random.SeedSequence(self.seed, spawn_key=(turn, 1))
        order = np.random.Generator(np.random.Philox(key)).permutation(len(self.pieces))
        self.pieces = [self.pieces[number] for number in order]

    def _pieces(self, turn: int) -> Iterator[RoundPart]:
        for number in range(turn * self.passes.rounds, (turn + 1) * self.passes.rounds):
            for role in self.timed_models:
                for point in self.passes.points:
                    yield RoundPart(role, number, Point(**{**vars(point), "round": number}))
                for what in REST:
                    yield RoundPart(role, number, what)
        rows = self.timed_models["target"].rows.rows
        timed = any(row["kind"] == "processes" and row["round"] == turn for row in rows)
        if (self.processes or self.lanes is not None) and not timed:
            for number in range(process_times.DECODINGS):
                yield RoundPart("target", turn * process_times.DECODINGS + number, PROCESSES)

    def between(self, share: float, pool: Pool | ModelProcesses | None = None) -> None:
        """Time all pieces that belong before this share of a repeat, over the processes of the runs if there are any."""
        while self.pieces_done < min(round(share * len(self.pieces)), len(self.pieces)):
            self._time(self.pieces[self.pieces_done], pool)
            self.pieces_done += 1

    def _time(self, piece: RoundPart, pool: Pool | ModelProcesses | None) -> None:
        timed = self.timed_models[piece.role]
        if piece.what == PROCESSES:
            if self.lanes is not None:
                self.decoding_times.append(process_times.over_streams(self.lanes, piece.round))
            elif pool is not None and not isinstance(pool, ModelProcesses):
                self.decoding_times.append(process_times.over_processes(pool, piece.round))
        elif isinstance(piece.what, str):
            profile_from_timings.time_besides_passes(timed, piece.round, (piece.what,))
        elif piece.what not in timed.rows.done():
            timed.rows.add(self._point(timed, piece.what))
            timed.ceilings.measure_if_due()

    def _point(self, timed: profile_from_timings.TimedModel, point: Point) -> dict[str, Any]:
        """Return the raw row of a point. A point that does not fit into memory fails; runs and other points continue."""
        try:
            return measure(timed.built, point, self.effort, time.monotonic() + LONGEST)
        except (RuntimeError, MemoryError) as error:
            failure = failure_of(error)
            if not failure.memory:
                raise
        release(timed.built.device)
        return {"kind": "failed", **asdict(point), "error": failure.line}

    def end(self) -> None:
        """Write the profiles of all rows so far. A refused profile does not stop the runs, which may be costly to repeat."""
        self.refused, self.warnings = {}, {}
        if self.decoding_times:
            target = self.timed_models["target"]
            target.rows.add(
                {"kind": "processes", "round": self.turn} | process_times.raw_row(self.decoding_times, target.built.decoder.layers)
            )
        for role, timed in self.timed_models.items():
            written, refused = profile_from_timings.write(timed, (MODE,), self.folder)
            self.warnings[role] = [line for path in written.values() for line in load(path).facts.get("warnings", [])]
            self.refused |= dict.fromkeys([role] * len(refused), "; ".join(refused.values()))
