"""Rank log: at every position of the target's output, the rank of its tokens among a draft's candidates, by depth of the draft.

It decides every draft tree of at most its depth and width: which node is accepted, in any round. For a draft model the rank at a
depth is that at the position; draft heads read their own states instead of the target's, so that their ranks fall with the depth.

The file is JSON, and a scenario reads it as it is: [outcomes] kind = "replay", file = "ranks.json".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks, strict_json, typed_values, whole_files
from model.base.checks import ParameterError
from model.logs.recorded_decoding import ModelIdentity
from model.methods.tree.draft_trees import MAX_DEPTH, MAX_WIDTH

Integers = NDArray[np.int64]

VERSION, PART = 1, "ranks"
AGAIN = "record it with calibrate ranks -o FILE.json"
"""Remedy for files without ranks."""


class _RankLogHeader(TypedDict):
    """Description of a log."""

    target: ModelIdentity
    draft: ModelIdentity
    prompts: list[str]
    max_tokens: int
    seed: int
    dtype: str
    versions: dict[str, str]
    date: str


_HEADER = tuple(_RankLogHeader.__annotations__)
_KEYS = ("schema_version", "part", *_HEADER, "top", "ranks")


@dataclass(frozen=True, eq=False)
class RankLog:
    """Rank log.

    Parameters
    ----------
    ranks
        For each sequence the ranks, shape (positions, depth): `ranks[s][j, i]` is the rank, from 1, of the target's token at
        position j + i among the candidates at depth i + 1 of a draft that starts at position j and has read the tokens before; 0 if
        it is none of the first `top` candidates, or after the end.
    top
        Largest rank.
    header
        Origin: models with checksums, names of the prompts, number of tokens, seed, versions.

    >>> log = RankLog((np.array([[1, 2], [2, 0]]),), 2, {})
    >>> log.depth, log.sequences
    (2, 1)
    """

    ranks: tuple[Integers, ...]
    top: int
    header: Mapping[str, Any]

    def __post_init__(self) -> None:
        checks.whole("top", self.top, 1, MAX_WIDTH)
        if not self.ranks:
            raise ParameterError(f"ranks must have at least one sequence, got none; {AGAIN}")
        for index, each in enumerate(self.ranks):
            if each.ndim != 2 or not each.size or each.shape[1] != self.ranks[0].shape[1] or each.shape[1] > MAX_DEPTH:
                raise ParameterError(
                    f"ranks[{index}] must have a list of ranks at each position, all of one depth from 1 to {MAX_DEPTH}, got shape"
                    f" {each.shape}; {AGAIN}"
                )
            if each.min() < 0 or each.max() > self.top:
                wrong = each.min() if each.min() < 0 else each.max()
                raise ParameterError(f"ranks[{index}] must be between 0 and top={self.top}, got {wrong}; {AGAIN}")
            beyond = [depth for depth in range(1, each.shape[1]) if each[max(len(each) - depth, 0) :, depth].any()]
            if beyond:
                raise ParameterError(f"ranks[{index}] must be 0 after the end, got others at depth {beyond[0] + 1}; {AGAIN}")

    @property
    def depth(self) -> int:
        """Largest depth of a draft."""
        return int(self.ranks[0].shape[1])

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.ranks)


class RankCounts(NamedTuple):
    """Drafts that reached each depth with right tokens, and how often the target's token had each rank there."""

    hits: Integers
    """Shape (depth, candidates)."""
    trials: Integers
    """Shape (depth,)."""

    def rates(self) -> list[list[float]]:
        """Rank rates by depth, down to the first depth that no draft has reached.

        >>> counted([np.array([[1, 2], [2, 0], [0, 0]])], 2).rates()
        [[0.3333, 0.3333], [0.0, 0.5]]
        """
        rows = [(hits / trials).tolist() for hits, trials in zip(self.hits, self.trials, strict=True) if trials]
        return [[round(rate, 4) for rate in row] for row in rows]


def counted(sequences: Iterable[Integers], candidates: int) -> RankCounts:
    """Count ranks in drafts that start at every position of these sequences, with this number of candidates per node.

    A draft goes on where the target's token is among the candidates. Depths after the end of a sequence are no trials.

    >>> counts = counted([np.array([[1, 2], [2, 0], [0, 0]])], 2)
    >>> counts.hits.tolist(), counts.trials.tolist()  # from position 1 the second depth is missed, from 2 it is after the end
    ([[1, 1], [0, 1]], [3, 2])
    """
    checks.whole("candidates", candidates, 1)
    hits: list[Any] = []
    trials: list[int] = []
    for ranks in sequences:
        length, depth = ranks.shape
        while len(trials) < depth:
            hits.append(np.zeros(candidates, dtype=np.int64))
            trials.append(0)
        right = np.where(ranks <= candidates, ranks, 0)
        reached = np.ones(length, dtype=np.bool_)
        for level in range(depth):
            reached[max(length - level, 0) :] = False
            trials[level] += int(reached.sum())
            hits[level] += np.bincount(right[reached, level], minlength=candidates + 1)[1:]
            reached &= right[:, level] > 0
    return RankCounts(np.array(hits).reshape(-1, candidates), np.array(trials, dtype=np.int64))


# --- Files ---


def save(log: RankLog, path: Path) -> Path:
    """Write a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ranks = [each.tolist() for each in log.ranks]
    content = {"schema_version": VERSION, "part": PART, **{name: log.header[name] for name in _HEADER}, "top": log.top}
    with whole_files.atomic_path(path) as file:
        file.write_text(strict_json.dumps({**content, "ranks": ranks}) + "\n", encoding="utf-8")
    return path


def is_rank_log(path: Path) -> bool:
    """True for a file that says that it is a rank log."""
    try:
        found = bounded_files.json_of(bounded_files.read_bytes(path))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("part") == PART


def load(path: Path) -> RankLog:
    """Read a log. Raises `ParameterError` for a file without ranks, and for impossible ones."""
    try:
        return _read(path)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def _read(path: Path) -> RankLog:
    try:
        found = bounded_files.json_of(bounded_files.read_bytes(path))
    except FileNotFoundError:
        raise ParameterError("there is no such file") from None
    except OSError as error:
        raise ParameterError(f"it cannot be read: {error.strerror or error}") from None
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(f"it cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or found.get("part") != PART or "ranks" not in found:
        raise ParameterError(f"it must be a rank log, and has no ranks of the target's tokens among a draft's candidates; {AGAIN}")
    if found.get("schema_version") != VERSION:
        raise ParameterError(f"schema_version must be {VERSION}, got {checks.shown(found.get('schema_version'))}; {AGAIN}")
    for key in sorted({*_KEYS} ^ {*found}):
        raise ParameterError(f"{key} is missing" if key in _KEYS else f"unknown key {key}; {checks.nearest(key, _KEYS)}")
    typed_values.check(found, _RankLogHeader, "")
    typed_values.check(found["ranks"], list[list[list[int]]], "ranks")
    if len(found["prompts"]) != len(found["ranks"]):
        raise ParameterError(f"prompts must have a name for each of {len(found['ranks'])} sequences, got {len(found['prompts'])}")
    checks.whole("top", found["top"], 1, MAX_WIDTH)
    return RankLog(
        tuple(_array(f"ranks[{index}]", rows) for index, rows in enumerate(found["ranks"])), found["top"],
        {name: found[name] for name in _HEADER},
    )  # fmt: skip


def _array(name: str, rows: Sequence[Sequence[int]]) -> Integers:
    """Ranks of a sequence, of one depth at all positions."""
    depths = {len(row) for row in rows}
    if len(depths) != 1:
        given = checks.shown(sorted(depths))
        raise ParameterError(f"{name} must have ranks of the same depths at each position, got {given}; {AGAIN}")
    for place, row in enumerate(rows):
        for depth, rank in enumerate(row):
            checks.whole(f"{name}[{place}][{depth}]", rank, 0, MAX_WIDTH)
    return np.array(rows, dtype=np.int64)
