"""A profile against an engine that really ran: tokens a second of Llama-3.1-8B in vLLM on an RTX 4090, by LLMServingSim.

Once a second the engine said how many tokens of prompts it had read, how many it had written, how many texts ran and waited, and
how full the cache was. In a second without prompts every pass is a decoding step of all running texts; it took their number
over the tokens a second, and the profile is asked for a pass behind their mean context.

What the engine calls prompts leaves out texts that it reads for a second time. Where the cache is full it throws a text out, to
read it again, prompt and what was written, once there is room: the prompts that it counted sum up to those of all requests, each
once, although dozens of times a text left the cache. Such seconds are found by counting, without looking at any time: running
texts that neither were scheduled for the first time nor were there before must have come back.

How long the sequences are is how full the cache was, in tokens of the room that it has. Where the run does not say how much that
is, the requests' time stamps say it: a sequence has its prompt, and the tokens that are due between its first and its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibrate.importers import imported_tables
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.hardware.cost_models import Hardware, step_time
from model.hardware.interpolation import Floats

FEWEST = 10
"""Texts that must run: with fewer the run is ending within the second."""
LENGTHS = ("input_toks", "output_toks", "first_token_ts")
"""What requests must say where the room of the cache is not known."""
STEP = 0.02
"""How finely the clocks of the two files are put together [s]."""


@dataclass(frozen=True, eq=False)
class EngineRun:
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


def read(folder: str | Path) -> EngineRun:
    """A run from a folder with `timeseries.csv`, `requests.jsonl` and `meta.json`.

    What the last says of the cache, `kv_cache.num_kv_tokens`, may lack; then requests must say `input_toks`, `output_toks` and
    `first_token_ts`.
    """
    root = Path(folder)
    names = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
    table = imported_tables.read(root / "timeseries.csv", names, root=root)
    second, prompts, written, running, waiting, full = (table.column(name, least=0) for name in names)
    try:
        meta = bounded_files.json_of(bounded_files.read_bytes(root / "meta.json"))
        room = (meta.get("kv_cache") or {}).get("num_kv_tokens")
        requests = [bounded_files.json_of(line) for line in bounded_files.read_text(root / "requests.jsonl").splitlines()]
        stamps = ("queued_ts", "scheduled_ts", "last_token_ts", *(() if room is not None else LENGTHS))
        of = {key: checks.array(key, [each[key] for each in requests], 0) for key in stamps}
        if room is not None:
            checks.whole("kv_cache.num_kv_tokens", room, 1)
            room = float(room)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ParameterError(
            f"{root.name}: meta.json and requests.jsonl must be there and say queued_ts, scheduled_ts and last_token_ts, and"
            f" kv_cache.num_kv_tokens or {', '.join(LENGTHS)}: {error!r}; give the folder of a whole run"
        ) from None
    queued, scheduled, last = (of[key] for key in stamps[:3])
    if not queued.size:
        raise ParameterError(f"{root.name}: requests.jsonl must have at least one request, got none")
    ends = _clock(second, running + waiting, queued, last)
    began, done = (np.array([((times > end - 1) & (times <= end)).sum() for end in ends]) for times in (scheduled, last))
    returned = np.diff(running, prepend=0) + done - began
    if room is None:
        context = lengths(ends, of["input_toks"], of["output_toks"], of["first_token_ts"], last)
    else:
        context = full / 100 * room / np.maximum(running, 1)
    return EngineRun(prompts, written, running, waiting, context, returned)


def lengths(ends: Floats, prompts: Floats, outputs: Floats, first: Floats, last: Floats) -> Floats:
    """Mean length of the sequences that are being decoded at these times, shape (times,) [tokens]; 0 where there is none.

    Of each request its prompt and its output [tokens], and when it had its first and its last token [s], shape (requests,). Tokens
    come evenly between these two.

    >>> lengths(np.array([2.0, 5.0, 9.0]), np.array([10.0, 20.0]), np.array([5.0, 3.0]), np.array([1.0, 4.0]), np.array([5.0, 6.0]))
    array([12., 22.,  0.])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (ends[:, None] - first) / (last - first)
    there = (share >= 0) & (share < 1)
    each = np.where(there, prompts + 1 + np.nan_to_num(share) * (outputs - 1), 0.0)
    return np.asarray(each.sum(axis=1) / np.maximum(there.sum(axis=1), 1))


def _clock(second: Floats, texts: Floats, queued: Floats, last: Floats) -> Floats:
    """The ends of the seconds on the clock of the requests: where those queued and not yet done are most nearly the texts there."""
    shifts = queued.min() + np.arange(-3, 3, STEP)
    ends = shifts[:, None] + second
    there = np.searchsorted(np.sort(queued), ends, side="right") - np.searchsorted(np.sort(last), ends, side="right")
    missed = np.abs(there - texts).sum(axis=1)
    best = np.flatnonzero(missed == missed.min())
    return np.asarray(ends[best[best.size // 2]])
