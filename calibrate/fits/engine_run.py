"""Comparison of a profile with a real engine: tokens per second of Llama-3.1-8B in vLLM on an RTX 4090, recorded by LLMServingSim.

Once a second the engine reported the prompt tokens read, the tokens generated, the running and waiting sequences, and the usage
of the KV cache. In a second without prompts, every pass is a decoding step of all running sequences. Its measured time is their
number divided by the tokens per second; its predicted time is that of a pass at their mean context.

The engine's prompt counter excludes recomputation. When the cache is full the engine preempts a sequence and later reads its
prompt and output again; yet the counter sums to the prompts of all requests, each counted once, despite dozens of preemptions.
Seconds with recomputation are identified by counts only, not by times: running sequences that were neither scheduled for the
first time nor running before must have been resumed.

The lengths of the sequences follow from the usage of the cache times its capacity in tokens. If the run lacks the capacity,
lengths follow from the requests' time stamps: the prompt, plus the tokens expected between the first and the last token.
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

MIN_RUNNING = 10
"""Smallest number of running sequences: with fewer, the run may be ending within the second."""
LENGTHS = ("input_toks", "output_toks", "first_token_ts")
"""Keys that requests need if the capacity of the cache is unknown."""
STEP = 0.02
"""Resolution of the alignment of the two files' clocks [s]."""


@dataclass(frozen=True, eq=False)
class EngineRun:
    """An engine's run, second by second; arrays of shape (seconds,).

    Parameters
    ----------
    prompts, tokens
        Prompt tokens read (recomputation excluded) and tokens generated in each second [tokens/s].
    running, waiting
        Numbers of sequences at the end of the second.
    context
        Mean length of the running sequences in the cache [tokens].
    returned
        Sequences resumed minus sequences preempted in each second.
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
        """Mask of the seconds to compare: no prompts, and enough running sequences; shape (seconds,)."""
        return np.asarray((self.prompts == 0) & (self.running >= MIN_RUNNING) & (self.tokens > 0))

    @property
    def recomputing(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of the seconds with recomputation: more sequences were resumed than preempted; shape (seconds,)."""
        return np.asarray(self.returned > 0)

    def errors(self, hardware: Hardware) -> Floats:
        """Relative error of the predicted step time in each second; nan if no token was generated [-]."""
        predicted = step_time(hardware, self.context, np.maximum(self.running, 1)).seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.tokens > 0, predicted * self.tokens / self.running - 1, np.nan)


def read(folder: str | Path) -> EngineRun:
    """Read a run from a folder with `timeseries.csv`, `requests.jsonl` and `meta.json`.

    The key `kv_cache.num_kv_tokens` of the last file is optional; without it, requests need `input_toks`, `output_toks` and
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
            f"{root.name}: meta.json and requests.jsonl must exist and have queued_ts, scheduled_ts and last_token_ts, and"
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
    """Mean length of the sequences that are decoded at the times `ends`, shape (times,) [tokens]; 0 without any.

    Prompt and output lengths [tokens] and the times of the first and the last token [s] have shape (requests,). Tokens are assumed
    to be evenly spaced between these two times.

    >>> lengths(np.array([2.0, 5.0, 9.0]), np.array([10.0, 20.0]), np.array([5.0, 3.0]), np.array([1.0, 4.0]), np.array([5.0, 6.0]))
    array([12., 22.,  0.])
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (ends[:, None] - first) / (last - first)
    decoding = (share >= 0) & (share < 1)
    each = np.where(decoding, prompts + 1 + np.nan_to_num(share) * (outputs - 1), 0.0)
    return np.asarray(each.sum(axis=1) / np.maximum(decoding.sum(axis=1), 1))


def _clock(second: Floats, sequences: Floats, queued: Floats, last: Floats) -> Floats:
    """Ends of the seconds on the clock of the requests: the shift at which the numbers of unfinished requests agree best."""
    shifts = queued.min() + np.arange(-3, 3, STEP)
    ends = shifts[:, None] + second
    unfinished = np.searchsorted(np.sort(queued), ends, side="right") - np.searchsorted(np.sort(last), ends, side="right")
    missed = np.abs(unfinished - sequences).sum(axis=1)
    best = np.flatnonzero(missed == missed.min())
    return np.asarray(ends[best[best.size // 2]])
