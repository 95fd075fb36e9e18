"""Measured runs: wall times of real decoding, repeat by repeat, with all that was read in it: what a prediction is held against.

Four files: NAME.json says what ran on what, NAME.parquet holds a row for each timed run, and NAME.reads.json with
NAME.reads.parquet is the decision log of the decodings (`model.decision_log`), from which any of them can be played again.

==========  ===========================================================================================================
column      what it holds
==========  ===========================================================================================================
decoding    which decoding of the log, from 0: a method, its settings and a prompt
repeat      how often it had been timed before
turn        the place of the run among all: repeats are interleaved, so that whatever drifts drifts for all
units       units that made its passes: processes of the system, or streams of one GPU, as `apart` of the JSON says
seconds     from the first step to the last token [s]
commit_s    when each commit was made, from the start [s]; the first comes behind the prompt
pass_s      of that in passes, by role in `roles` of the JSON [s]
read_s      in looking at what passes have made, heads included [s]
waited      share of the time for which the process was not running: others were [-]
load        processes that wanted to run in the last minute
spans       what happened when, of runs over several units (`model.spans`), in seconds from the start
==========  ===========================================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model import checks, decision_log, pairs, spans
from model.checks import ParameterError
from model.decision_log import DecisionLog
from model.decoding import Decoding
from model.spans import Span

if TYPE_CHECKING:
    import polars as pl

VERSION = 2
ROLES = ("target", "draft", "medium")
UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("decoding", "repeat", "turn", "units"), "1"),
        **dict.fromkeys(("seconds", "commit_s", "pass_s", "read_s"), "s"), "waited": "-", "load": "1", "spans": "s",
    }
)  # fmt: skip
ABOUT = (
    "device", "dtype", "threads", "machine", "shapes", "prompts", "warm_ups", "forced", "roles", "profiles", "date", "versions",
)  # fmt: skip
APART = ("processes", "streams")
"""What units are: processes of the system with replicas of the model, or streams of the GPU that has the model."""
MODES = ("eager", "cuda-graph")
"""How passes were made: kernels launched one by one, or as one graph. Runs that do not say so are of the first."""
_KEYS = ("about", "columns", "rows", "reads_sha256")
FEWEST = 3
"""Repeats below which nobody can say how far off a median is."""
BUSY = 0.1
"""Share of its time that a run may have waited for others before it counts as disturbed [-]: assumed."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Timed decodings.

    Parameters
    ----------
    log
        Each decoding once: a method, its settings, a prompt, what was put out and what was read.
    table
        A row for each timed run (columns above).
    about
        The device, its facts and libraries, the shapes of the models by role, how warm they were, and whether outcomes were forced;
        and what units were of each decoding (`apart`), which are processes where nothing is said; how passes were made (`mode`).
    """

    log: DecisionLog
    table: pl.DataFrame
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key in ABOUT:
            if key not in self.about:
                raise ParameterError(f"measured runs must say their {key}")
        for name in UNITS:
            if name not in self.table.columns:
                raise ParameterError(f"measured runs must have column {name}, got {', '.join(self.table.columns)}")
        if not self.table.height:
            raise ParameterError("measured runs must have at least one row, got none")
        which = self.table["decoding"].to_numpy()
        if which.min() < 0 or which.max() >= len(self.log.decodings):
            raise ParameterError(f"decoding must be between 0 and {len(self.log.decodings) - 1}, got {which.max()}")
        seconds = self.table["seconds"].to_numpy()
        if not (np.isfinite(seconds).all() and (seconds > 0).all()):
            raise ParameterError(f"seconds must be above 0, got {seconds[~(seconds > 0)][:1]}")
        if len(self._apart) != len(self.log.decodings):
            raise ParameterError(f"apart must name one for each of {len(self.log.decodings)} decodings, got {len(self._apart)}")
        for each in self._apart:
            checks.one_of("apart", each, APART)
        checks.one_of("mode", self.mode, MODES)

    @property
    def mode(self) -> str:
        """How passes were made, one of `MODES`."""
        return str(self.about.get("mode", MODES[0]))

    @property
    def _apart(self) -> list[str]:
        found: list[str] = self.about.get("apart", [APART[0]] * len(self.log.decodings))
        return found

    @cached_property
    def timed(self) -> dict[int, Timed]:
        """What was measured of each decoding that was timed."""
        found = {}
        for number in sorted(set(self.table["decoding"])):
            rows = self.table.filter(self.table["decoding"] == number).sort("repeat")
            found[int(number)] = Timed(self.log.decodings[number], rows, self._apart[number])
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes all of these times doubtful."""
        found = []
        if not self.about["warm_ups"]:
            found.append("no warm-up: first runs take longer")
        if (fewest := min(each.repeats for each in self.timed.values())) < FEWEST:
            found.append(f"{fewest} repeats, fewer than {FEWEST}: nobody knows the noise")
        disturbed = float((self.table["waited"].to_numpy() > BUSY).mean())
        if disturbed > 0.5:
            found.append(f"heavy load: {disturbed:.0%} of the runs waited for more than {BUSY:.0%} of their time")
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Timed:
    """All repeats of one decoding."""

    decoding: Decoding
    rows: pl.DataFrame
    apart: str = APART[0]
    """What units were, where there were several."""

    @property
    def repeats(self) -> int:
        """How often it was timed."""
        return self.rows.height

    @property
    def units(self) -> int:
        """Units that made its passes."""
        return int(self.rows["units"][0])

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Repeats that count, shape (repeats,): those that nothing disturbed, if there are enough, or else all."""
        calm = np.asarray(self.rows["waited"].to_numpy() <= BUSY)
        return calm if calm.sum() >= FEWEST else np.ones_like(calm)

    @property
    def disturbed(self) -> bool:
        """Whether too few repeats went undisturbed, so that all count."""
        return bool((self.rows["waited"].to_numpy()[self.kept] > BUSY).any())

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """From the first step to the last token, of the repeats that count [s]."""
        return np.asarray(self.rows["seconds"].to_numpy()[self.kept], dtype=np.float64)

    @cached_property
    def after_first(self) -> NDArray[np.float64]:
        """From the first commit to the last token, of the repeats that count [s]: what comes before has read the prompt."""
        first = np.array([each[0] for each in self.rows["commit_s"].to_list()])[self.kept]
        return np.asarray(self.totals - first)

    def median(self, *, prompt: bool = False) -> float:
        """The middle repeat, with the time until the first commit or without [s]."""
        return float(np.median(self.totals if prompt else self.after_first))

    def noise(self, *, prompt: bool = False) -> float:
        """How far a repeat is from the middle one, in the median, relative to it [-].

        Behind the first commit as `median` is, or from the start on.
        """
        times = self.totals if prompt else self.after_first
        middle = np.median(times)
        return float(np.median(np.abs(times - middle)) / middle) if middle > 0 else 0.0

    @cached_property
    def middle(self) -> int:
        """The row of the repeat in the middle, of those that count; of two middle ones the shorter."""
        order = np.argsort(self.after_first, kind="stable")
        return int(np.flatnonzero(self.kept)[order[(len(order) - 1) // 2]])

    def spans(self, row: int) -> list[Span]:
        """What happened when in a repeat, from its start [s]; nothing of runs on one unit."""
        return [Span(**each) for each in self.rows["spans"][row].to_list()]

    def of_main(self) -> dict[str, float]:
        """What the main process of several did, and how long [s]: the middle of the repeats that count (`model.spans.of_main`)."""
        repeats = [spans.of_main(self.spans(row)) for row in np.flatnonzero(self.kept).tolist()]
        names = dict.fromkeys(name for each in repeats for name in each)
        return {name: float(np.median([each.get(name, 0.0) for each in repeats])) for name in names}

    def part(self, name: str, index: int | None = None) -> float:
        """The middle of `pass_s`, of one role by its index, or of `read_s` [s]."""
        values = [each if index is None else each[index] for each in self.rows[name].to_list()]
        return float(np.median(np.array(values)[self.kept]))


def save(runs: Runs, where: str | Path) -> Path:
    """Write the four files; the path of NAME.json, which is written last."""
    path = json_of(where)
    reads = decision_log.save(runs.log, _reads_of(path))
    digest = hashlib.sha256(reads.read_bytes()).hexdigest()
    said = {
        "schema_version": VERSION, "about": dict(runs.about), "columns": dict(UNITS), "rows": runs.table.height,
        "reads_sha256": digest,
    }  # fmt: skip
    return pairs.save(path, said, runs.table.select(*UNITS))


def load(where: str | Path) -> Runs:
    """Measured runs by their NAME.json. Nothing of them is run: methods are only named."""
    path = json_of(where)
    try:
        said, table = pairs.load(path, _KEYS, "a file of measured runs", VERSION, "measure them again with `calibrate run`")
        if said["columns"] != dict(UNITS) or [*table.columns] != [*UNITS] or table.height != said["rows"]:
            raise ParameterError(f"columns must be {', '.join(UNITS)}, with {said['rows']} rows; measure them again")
        reads = _reads_of(path)
        if not reads.is_file():
            raise ParameterError(f"its log of decisions {reads.name} is not beside it")
        if hashlib.sha256(reads.read_bytes()).hexdigest() != said["reads_sha256"]:
            raise ParameterError(f"its log of decisions {reads.name} is not the one that it was written with; restore both")
        return Runs(decision_log.load(reads), table, said["about"])
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:  # whatever somebody has made of the JSON
        raise ParameterError(f"{path.name}: it is not as it was written ({type(error).__name__}: {error}); restore it") from None


def json_of(where: str | Path) -> Path:
    """The path of NAME.json, checked."""
    path = Path(where)
    if path.suffix != ".json" or not path.stem or path.name.endswith(".reads.json"):
        raise ParameterError(f"measured runs must be named NAME.json, got {checks.shown(path.name)}; tables are put beside it")
    return path


def _reads_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.reads.json")
