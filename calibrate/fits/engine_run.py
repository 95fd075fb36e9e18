"""A profile against an engine that really ran: tokens a second of Llama-3.1-8B in vLLM on an RTX 4090, by LLMServingSim.

Once a second the engine said how many tokens of prompts it had read, how many it had written, how many texts ran and waited, and
how full the cache was. In a second without prompts every pass is a decoding step of all running texts; it took their number
over the tokens a second, and the profile is asked for a pass behind their mean context.

What the engine calls prompts leaves out texts that it reads for a second time. Where the cache is full it throws a text out, to
read it again, prompt and what was written, once there is room: the prompts that it counted sum up to those of all requests, each
once, although dozens of times a text left the cache. Such seconds are found by counting, without looking at any time: running
texts that neither were scheduled for the first time nor were there before must have come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrate.importers import tables
from model import checks, files
from model.checks import ParameterError
from model.hardware import Hardware, step_time
from model.surface import Floats

FEWEST = 10
"""Texts that must run: with fewer the run is ending within the second."""
STEP = 0.02
"""How finely the clocks of the two files are put together [s]."""


@dataclass(frozen=True, eq=False)
class Run:
    """An engine's run, second by second; arrays of shape (seconds,).

    Parameters
    ----------
    prompts, tokens
        Read and written in each second [tokens/s]; prompts for the first time alone.
    running, waiting
        Texts at its end.
    context
        Their mean length in the cache [tokens].
    returned
        Texts that came back into the cache less those that left it, in each second.
    """

    prompts: Floats
    tokens: Floats
    running: Floats
    waiting: Floats
    context: Floats
    returned: Floats

    def __post_init__(self) -> None:
        sizes = {name: values.size for name, values in vars(self).items()}
        if len({*sizes.values()}) > 1:
            raise ParameterError(f"columns of a run must have one value for each second, got {sizes}")
        for name in ("prompts", "tokens", "running", "waiting", "context"):
            checks.array(name, getattr(self, name), 0)

    @property
    def decoding(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """The seconds that are asked for: no prompts, and enough texts; shape (seconds,)."""
        return np.asarray((self.prompts == 0) & (self.running >= FEWEST) & (self.tokens > 0))

    @property
    def reading_again(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """The seconds in which more texts came back than left: they were read again; shape (seconds,)."""
        return np.asarray(self.returned > 0)

    def errors(self, hardware: Hardware) -> Floats:
        """The step's predicted over its measured time, less 1, for each second; nan where nothing was written [-]."""
        said = step_time(hardware, self.context, np.maximum(self.running, 1)).seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.tokens > 0, said * self.tokens / self.running - 1, np.nan)


def read(folder: str | Path) -> Run:
    """A run from a folder with `timeseries.csv`, `requests.jsonl` and `meta.json`."""
    root = Path(folder)
    names = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
    table = tables.read(root / "timeseries.csv", names, root=root)
    second, prompts, written, running, waiting, full = (table.column(name, least=0) for name in names)
    try:
        room = files.json_of(files.read_bytes(root / "meta.json"))["kv_cache"]["num_kv_tokens"]
        requests = [files.json_of(line) for line in files.read_text(root / "requests.jsonl").splitlines()]
        queued, scheduled, last = (
            np.array([float(each[key]) for each in requests]) for key in ("queued_ts", "scheduled_ts", "last_token_ts")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(
            f"{root.name}: meta.json and requests.jsonl must be there and say kv_cache.num_kv_tokens, queued_ts, scheduled_ts and"
            f" last_token_ts: {error!r}; give the folder of a whole run"
        ) from None
    ends = _clock(second, running + waiting, queued, last)
    began, done = (np.array([((times > end - 1) & (times <= end)).sum() for end in ends]) for times in (scheduled, last))
    returned = np.diff(running, prepend=0) + done - began
    return Run(prompts, written, running, waiting, full / 100 * room / np.maximum(running, 1), returned)


def _clock(second: Floats, texts: Floats, queued: Floats, last: Floats) -> Floats:
    """The ends of the seconds on the clock of the requests: where those queued and not yet done are most nearly the texts there."""
    shifts = queued.min() + np.arange(-3, 3, STEP)
    ends = shifts[:, None] + second
    there = np.searchsorted(np.sort(queued), ends, side="right") - np.searchsorted(np.sort(last), ends, side="right")
    missed = np.abs(there - texts).sum(axis=1)
    best = np.flatnonzero(missed == missed.min())
    return np.asarray(ends[best[best.size // 2]])
