"""Tables of the rounds of real decodings: acceptance by draft position, and tokens per round as the closed form predicts them.

They read the commits in a log of `calibrate decode --log` or in the runs of `calibrate run`. Draft heads, a parallel draft, a draft
model or a lookup may have drafted. Rates are conditional: of the j-th drafted token, where all before it were accepted. They
are what a scenario takes as outcomes of kind `by-draft-position`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from calibrate.decode.titled_table import NONE, RateTable
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.logs import measured_runs, read_log
from model.logs.recorded_decoding import Decoding
from model.logs.replay import changed_settings, parameters_of
from model.methods.draft_model import MAX_DRAFT
from model.methods.rounds import RoundPrices, Rounds, moments
from model.methods.speculative import rates_from_logs
from model.methods.speculative.rates_from_logs import ReplayedRounds
from model.outcomes.intervals import LEVEL


def decodings_of_file(where: str) -> tuple[Decoding, ...] | None:
    """Return the decodings of a log of `calibrate decode` or of measured runs; None for other files, and for names of logs."""
    path = Path(where)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        header = bounded_files.json_of(bounded_files.read_bytes(path))
    except (OSError, ValueError):
        return None  # refused by the reader of position logs
    keys = {*header} if isinstance(header, dict) else set()
    if "reads_sha256" in keys:
        return measured_runs.load(path).log.decodings
    if isinstance(header, dict) and header.get("part") in read_log.PARTS:
        return read_log.load(path).decodings
    return None


def tables(decodings: Sequence[Decoding]) -> Iterator[RateTable]:
    """Yield the tables of each method and its settings that drafted."""
    groups: dict[str, list[Decoding]] = {}
    for each in decodings:
        if any(drafted for _, drafted in each.rounds):
            groups.setdefault(f"{each.method} {changed_settings(each)}".strip(), []).append(each)
    if not groups:
        raise ParameterError("decodings must have drafted tokens for rates by draft position, got none that drafts")
    for name, group in groups.items():
        about, depth = f"{name}; {len(group)} sequences", len(parameters_of(group[0]).ranks_by_depth)
        yield by_position(rounds_of(group, depth), about, depth > 0)
        yield predicted(group, about, depth)


def rounds_of(decodings: Sequence[Decoding], depth: int = 0) -> ReplayedRounds:
    """Return the rounds of decodings, one after another.

    With trees of several candidates per position, of this `depth`, the drafted tokens of a round are positions, not nodes.

    In a round that a stop token ended, whether the draft went on to be accepted is not known: only its accepted tokens count.

    >>> from model.interpret.account import Account
    >>> from model.steps import Commit
    >>> commits = Commit("round", (5, 6, 7), 3), Commit("round", (8, 2), 3)
    >>> played = rounds_of([Decoding("speculative", {}, (1,), 9, commits, Account(), stop=(2,))])
    >>> played.accepted.tolist(), played.tested.tolist()
    ([2, 1], [3, 1])
    """
    rows: list[tuple[int, int, int, int]] = []
    for number, each in enumerate(decodings):
        at = 0
        for commit in each.commits:
            if commit.drafted is not None and commit.tokens:
                drafted = min(depth, each.max_tokens - at - 1) if depth and commit.drafted else commit.drafted
                checks.whole("drafted tokens of a round", drafted, 0, MAX_DRAFT)
                accepted = max(len(commit.tokens) - commit.back - 1, 0)
                ended = commit.tokens[-1] in each.stop
                rows.append((number, at, accepted if ended else drafted, accepted))
            at += len(commit.tokens) - commit.back
    longest = depth or max((commit.drafted or 0 for each in decodings for commit in each.commits), default=0)
    return ReplayedRounds(longest, *np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def by_position(played: ReplayedRounds, about: str, several: bool = False) -> RateTable:
    """Table of conditional acceptance rates by draft position, with the line that a scenario takes."""
    found = rates_from_logs.by_draft_position(played)
    rows = tuple(
        (index + 1, *[float(part[index]) for part in found[:3]], int(found.trials[index])) for index in range(played.draft_length)
    )
    notes = [f"rate: of the tokens whose predecessors in the draft were all accepted; low, high: {LEVEL:.0%} interval (Wilson)"]
    if several:
        notes.append("a position is accepted if any of its candidates is; a scenario takes rates by rank: see calibrate ranks")
    elif found.trials.min() > 0:
        rates = found.rate.round(4).tolist()
        notes.append(f'as [outcomes]: kind = "by-draft-position"; acceptance_rates = {rates}; source = "measured"')
    return RateTable(
        f"Acceptance by draft position (measured; {about})", ("position", "rate", "low", "high", "trials"), rows, tuple(notes)
    )


def predicted(decodings: Sequence[Decoding], about: str, depth: int = 0) -> RateTable:
    """Table of tokens per round, seen and predicted: by the closed form for sequences of these lengths, from measured rates.

    The rates of every second sequence predict the rounds of the others, so that no sequence predicts itself; in the first row all
    predict all.
    """
    rows = []
    halves = {"all": (decodings, decodings), "odd": (decodings[1::2], decodings[::2]), "even": (decodings[::2], decodings[1::2])}
    for name, (by, of) in halves.items():
        if by and of:
            rows.append((name, len(of), *_seen_and_predicted(rounds_of(by, depth), of, depth)))
    notes = (
        f"low, high: {LEVEL:.0%} interval of tokens per round over sequences; of: the sequences predicted, from the others",
        "predicted: exact mean for rounds that are independent with the rates by draft position, drafts cut at the end",
    )
    columns = ("of", "sequences", "rounds", "tokens_per_round", "low", "high", "predicted", "error")
    return RateTable(f"Tokens per round (measured; {about}), and by the closed form", columns, tuple(rows), notes)


def _seen_and_predicted(by: ReplayedRounds, of: Sequence[Decoding], depth: int) -> tuple[int, float, float, float, float, float]:
    seen = rates_from_logs.means(rounds_of(of, depth))
    rates = rates_from_logs.by_draft_position(by)
    ends = seen.rounds, seen.over_rounds, seen.rounds_low, seen.rounds_high
    if rates.trials.min() == 0:
        return (*ends, NONE, NONE)
    lengths, counts = np.unique([len(each.tokens) for each in of], return_counts=True)
    flat, law = np.ones(by.draft_length + 1), Rounds.by_draft_position(rates.rate)
    rounds = [moments(by.draft_length, length, law, RoundPrices(flat, flat, flat)).rounds for length in lengths.tolist()]
    found = float(lengths @ counts / (counts @ np.array(rounds)))
    return (*ends, found, found / seen.over_rounds - 1)
