"""[outcomes] of ranks: which of the draft's candidates is the target's token, by depth of the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.base import checks
from model.logs import position_log
from model.methods.method_parameters import MethodParameters
from model.methods.tree.draft_trees import MAX_DEPTH, by_depth, require_rates
from model.methods.tree.ranks_from_logs import windows
from model.outcomes.intervals import wilson
from model.outcomes.rank_laws import RankRates, ReplayedRanks
from sim.scenarios.outcomes.outcome_files import json_of, read_once
from sim.scenarios.outcomes.outcome_records import LawRecord, Outcome, check_file, check_provenance


def _used(rates: Any, parameters: MethodParameters, where: str) -> tuple[tuple[float, ...], ...]:
    """The part of rank rates that a method's tree uses: its depths, and the ranks that it has there."""
    widths = parameters.ranks_by_depth
    rates = by_depth(rates, len(widths))
    require_rates(where, rates, len(widths), widths)
    return tuple(tuple(row[:width]) for row, width in zip(rates, widths, strict=False))


@dataclass(frozen=True)
class RanksByDepth(LawRecord):
    """Independent drafts: the target's token at depth i + 1 is candidate r + 1 with probability `rank_rates[i][r]`.

    The probability is given that the tokens before are right; with the rest it is none of the candidates. A single list of rates
    holds at every depth. `trials` is the number of drafts.
    """

    USES = ("parameters",)
    RATES = ("rank_rates",)

    rank_rates: tuple[Any, ...]
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        require_rates("rank_rates", by_depth(self.rank_rates, 1))
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of rank 1 at the first depth, which has an interval if `trials` are given.

        At an end of the interval all rates are scaled by the same factor, so far as their sum allows.
        """
        rates = _used(self.rank_rates, parameters, "rank_rates")
        rate = float(rates[0][0])
        found = Outcome(RankRates([rates]), rate, self.source, trials=self.trials)
        if self.trials is None or not rate:
            return found
        low, high = (float(bound) for bound in wilson(rate, self.trials))
        ends = [RankRates([_scaled(rates, bound / rate)]) for bound in (low, high)]
        return Outcome(found.law, rate, self.source, ends[0], ends[1], low, high, self.trials)


def _scaled(rates: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    return [[rate * min(factor, 1 / max(sum(row), 1e-300)) for rate in row] for row in rates]


@dataclass(frozen=True)
class RanksByClass(LawRecord):
    """Classes of difficulty: table number c of `rank_rates` holds with probability `weights[c]`.

    A table is a list of rates by rank for each depth, or one for all depths. Each draft belongs to a class, or with `by_sequence`
    all drafts of a sequence. A tree that grows by confidence (shape `eagle-2`)
    knows the class of its draft.
    """

    USES = ("parameters",)
    RATES = ("rank_rates", "weights")

    rank_rates: tuple[Any, ...]
    weights: tuple[float, ...]
    by_sequence: bool = False
    source: str = "assumed"

    def __post_init__(self) -> None:
        tables: Any = self.rank_rates
        if not isinstance(tables, tuple) or not tables:
            raise checks.ParameterError(f"rank_rates must be a list with a table for each class, got {checks.shown(tables)}")
        for index, table in enumerate(tables):
            require_rates(f"rank_rates[{index}]", by_depth(table, 1))
        given: Any = self.weights
        if not isinstance(given, tuple) or len(given) != len(tables):
            raise checks.ParameterError(
                f"weights must be a list of {len(tables)} shares, one for each class, got {checks.shown(given)}"
            )
        for index, weight in enumerate(given):
            checks.number(f"weights[{index}]", weight, 0)
        if not sum(given) > 0:
            raise checks.ParameterError(f"weights must not all be 0, got {checks.shown(given)}")
        checks.flag("by_sequence", self.by_sequence)
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is the mean over the classes."""
        tables = [_used(table, parameters, f"rank_rates[{index}]") for index, table in enumerate(self.rank_rates)]
        law = RankRates(tables, self.weights, by_sequence=self.by_sequence)
        return Outcome(law, float(np.dot(law.weights, [table[0][0] for table in tables])), self.source)


@dataclass(frozen=True)
class RecordedRanks(LawRecord):
    """Recorded ranks by output position, from a JSON `file`.

    The file has an object with `ranks`: for each sequence, for each output position, the ranks at depth 1, 2, ... of a draft that
    starts there (0: none of the candidates), along the target's own tokens. A position log (`calibrate log --draft`) is such a
    file too.
    """

    file: str
    source: str = "measured"

    def __post_init__(self) -> None:
        check_file(self.file)
        check_provenance(None, self.source)
        recorded_ranks(self.file)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point, from the sequences that cover all tokens; the rate is that of rank 1 at the first depth."""
        depth = len(parameters.ranks_by_depth)
        sequences = recorded_ranks(self.file, tokens)
        known = min(each.shape[1] for each in sequences)
        if known < depth:
            raise checks.ParameterError(
                f"ranks of {self.file!r} must be known for each of {depth} depths of the tree, got {known}; draft less deep"
            )
        records = np.stack([each[:tokens, :depth].T for each in sequences])
        return Outcome(ReplayedRanks(records), float((records[:, 0] == 1).mean()), f"{self.source}: {self.file}")


def recorded_ranks(file: str, tokens: int = 1) -> list[Any]:
    """Ranks of each sequence of a file that has at least `tokens` positions; arrays of shape (positions, depth)."""
    sequences: list[Any] = read_once(_record_of, file, "")
    found = [each for each in sequences if len(each) >= tokens]
    if not found:
        longest = max(len(each) for each in sequences)
        raise checks.ParameterError(
            f"tokens must be at most {longest}, the longest sequence of {file!r}, got {tokens}; decode fewer"
        )
    return found


def _record_of(file: str, _: str) -> list[Any]:
    content = json_of(file, "ranks")
    if isinstance(content, dict) and content.get("part") == position_log.PART:
        return _of_log(file)
    if not isinstance(content, dict) or "ranks" not in content:
        form = "a record of ranks has the ranks of each sequence"
        raise checks.ParameterError(f"key ranks is missing in {file!r}: {form}; name one, or a log of calibrate log --draft")
    form = "a list of sequences, each a list of the ranks by depth at each output position, of at least one depth"
    sequences = content["ranks"]
    if not isinstance(sequences, list) or not sequences:
        raise checks.ParameterError(f"ranks of {file!r} must be {form}, got {checks.shown(sequences)}")
    found = []
    for index, rows in enumerate(sequences):
        where = f"ranks[{index}] of {file!r}"
        if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
            raise checks.ParameterError(
                f"{where} must be a list of the ranks by depth at each output position, got {checks.shown(rows)}"
            )
        depths = {len(row) for row in rows}
        if len(depths) > 1 or max(depths) > MAX_DEPTH:
            raise checks.ParameterError(
                f"{where} must have the same depths at each position, at most {MAX_DEPTH}, got {sorted(depths)}"
            )
        for place, row in enumerate(rows):
            for depth, rank in enumerate(row):
                checks.whole(f"ranks[{index}][{place}][{depth}] of {file!r}", rank, 0, 65535)
        found.append(np.array(rows, dtype=np.int64))
    return found


def _of_log(file: str) -> list[Any]:
    """Ranks of drafts that start at each position of a position log: the draft reads the target's own tokens at every depth."""
    log = position_log.load(file)
    try:
        ranks = log.draft_ranks()
    except checks.ParameterError as error:
        raise checks.ParameterError(f"file {file!r}: {error}") from None
    return [windows(np.minimum(each, 65535), MAX_DEPTH) for each in ranks]


KINDS: dict[str, type[LawRecord]] = {"by-depth": RanksByDepth, "classes": RanksByClass, "replay": RecordedRanks}
"""Records by kind."""
