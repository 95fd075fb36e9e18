"""Tables of the rounds of real decodings: acceptance by draft position, and tokens per round as the closed form predicts them.

They read the commits in a log of `calibrate decode --log` or in the runs of `calibrate run`. Draft heads, a parallel draft, a draft
model or a lookup may have drafted. Rates are conditional: of the j-th drafted token, where all before it were accepted. They
are what a scenario takes as outcomes of kind `by-draft-position`. Of trees, rates are by rank and depth
(`model.methods.tree.ranks_from_logs`), as a scenario's `by-depth`. Where all probabilities of sampled drafts were read,
token-wise and block verification are compared on them (`verification_rates`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.decode.titled_table import NONE, RateTable
from calibrate.decode.verification_rates import by_verification
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.logs import measured_runs, read_log
from model.logs.measured_runs import MeasuredRuns
from model.logs.read_log import ReadLog
from model.logs.recorded_decoding import Decoding
from model.logs.replay import changed_settings, changed_values, parameters_of, settings_text
from model.methods.draft_model import MAX_DRAFT
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.rounds.round_laws import Rounds
from model.methods.rounds.round_moments import moments
from model.methods.speculative import rates_from_logs
from model.methods.speculative.rates_from_logs import ReplayedRounds
from model.methods.tree import ranks_from_logs, tree_rounds
from model.methods.tree.draft_trees import MAX_NODES
from model.methods.tree.ranks_from_logs import RankCounts
from model.outcomes.intervals import LEVEL
from model.outcomes.rank_laws import RankRates


def decodings_of_file(where: str) -> tuple[Decoding, ...] | None:
    """Return the decodings of a log of `calibrate decode` or of measured runs; None for other files, and for names of logs."""
    found = record_of(where)
    log = found.log if isinstance(found, MeasuredRuns) else found
    return None if log is None else log.decodings


def record_of(where: str) -> MeasuredRuns | ReadLog | None:
    """Return measured runs, or a log of `calibrate decode`; None for other files, and for names of logs."""
    path = Path(where)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        header = bounded_files.json_of(bounded_files.read_bytes(path))
    except (OSError, ValueError):
        return None  # refused by the reader of position logs
    keys = {*header} if isinstance(header, dict) else set()
    if "reads_sha256" in keys:
        return measured_runs.load(path)
    if isinstance(header, dict) and header.get("part") in read_log.PARTS:
        return read_log.load(path)
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
        about = f"{name}; {len(group)} sequences"
        if any(commit.ranks for each in group for commit in each.commits):
            yield by_rank(ranks_from_logs.of_commits(commit for each in group for commit in each.commits), about)
            found = predicted_by_rank(group, about)
            if found is not None:
                yield found
            continue
        if parameters_of(group[0]).ranks_by_depth:
            raise ParameterError(
                f"commits of {name} must hold the ranks of their tokens among the draft's candidates, and this record has none;"
                " decode it again with --log"
            )
        yield by_position(rounds_of(group), about)
        yield predicted(group, about)
        both = by_verification(group, about)
        if both is not None:
            yield both


def by_setting(where: str, setting: str) -> RateTable:
    """Table of acceptance by the values of one setting, with all other settings equal in each group of rows.

    Parameters
    ----------
    where
        A log of `calibrate decode --log`, or measured runs.
    setting
        Name of a parameter that some methods of the log have, such as `context_budget`.
    """
    record = record_of(where)
    if record is None:
        raise ParameterError(f"--by is for decodings (calibrate decode --log, calibrate run), got {where}; leave it out")
    decodings = record.log.decodings if isinstance(record, MeasuredRuns) else record.decodings
    groups: dict[tuple[str, str, Any], list[Decoding]] = {}
    names: set[str] = set()
    for each in decodings:
        names |= {*each.settings}
        if setting in each.settings and any(drafted for _, drafted in each.rounds):
            others = {name: value for name, value in changed_values(each).items() if name != setting}
            groups.setdefault((each.method, settings_text(others), each.settings[setting]), []).append(each)
    if not groups:
        raise ParameterError(f"--by must be a setting of decodings that draft, got {setting}; {checks.nearest(setting, names)}")
    rows = []
    for (method, kept, value), group in groups.items():
        played = rounds_of(group)
        seen, accepted = rates_from_logs.means(played), rates_from_logs.accepted_of_tested(played)
        # Tokens of a tree are not tested one after another.
        chain = not parameters_of(group[0]).ranks_by_depth
        rate = (float(accepted.rate), *rates_from_logs.ratio_interval(*played.of_requests())) if chain else (NONE, NONE, NONE)
        rows.append((
            method, kept, NONE if value is None else value, len(group), seen.rounds, seen.over_rounds, seen.rounds_low,
            seen.rounds_high, *rate, int(accepted.trials) if chain else 0,
        ))  # fmt: skip
    columns = (
        "method", "settings", setting, "sequences", "rounds", "tokens_per_round", "tokens_low", "tokens_high", "rate", "low",
        "high", "trials",
    )  # fmt: skip
    notes = (
        f"rate: accepted over tested tokens; low, high: {LEVEL:.0%} interval, of independent sequences",
        f"{setting} -: not set", *([_facts(record)] if isinstance(record, MeasuredRuns) else []),
    )
    return RateTable(f"Acceptance by {setting} (measured)", columns, tuple(rows), notes)


def _facts(runs: MeasuredRuns) -> str:
    """Device, versions, models and prompts of measured runs, as a note."""
    about, log = runs.about, runs.log
    machine = f"{about['machine']['name']} ({about['device']}, {about['dtype']}, {about['threads']} threads)"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    models = "; ".join(f"{role} {each['name']} ({each['checksum'][:12]})" for role, each in log.models.items())
    pairs = zip(*((len(each.prompt), len(each.tokens)) for each in log.decodings), strict=True)
    lengths = [sorted({*each}) for each in pairs]
    prompts, tokens = (f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in lengths)
    return (
        f"measured on {machine}, {about['date']}, {versions}; {models}; prompts: {about['prompts']}; {prompts} prompt and {tokens}"
        " generated tokens"
    )


def rounds_of(decodings: Sequence[Decoding]) -> ReplayedRounds:
    """Return the rounds of decodings, one after another.

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
                checks.whole("drafted tokens of a round", commit.drafted, 0, MAX_NODES if commit.ranks else MAX_DRAFT)
                accepted = max(len(commit.tokens) - commit.back - 1, 0)
                ended = commit.tokens[-1] in each.stop
                rows.append((number, at, accepted if ended else commit.drafted, accepted))
            at += len(commit.tokens) - commit.back
    longest = max((commit.drafted or 0 for each in decodings for commit in each.commits), default=0)
    return ReplayedRounds(longest, *np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def by_position(played: ReplayedRounds, about: str) -> RateTable:
    """Table of conditional acceptance rates by draft position, with the line that a scenario takes."""
    found = rates_from_logs.by_draft_position(played)
    rows = tuple(
        (index + 1, *[float(part[index]) for part in found[:3]], int(found.trials[index])) for index in range(played.draft_length)
    )
    notes = [f"rate: of the tokens whose predecessors in the draft were all accepted; low, high: {LEVEL:.0%} interval (Wilson)"]
    if found.trials.min() > 0:
        rates = found.rate.round(4).tolist()
        notes.append(f'as [outcomes]: kind = "by-draft-position"; acceptance_rates = {rates}; source = "measured"')
    return RateTable(
        f"Acceptance by draft position (measured; {about})", ("position", "rate", "low", "high", "trials"), rows, tuple(notes)
    )


def by_rank(counts: RankCounts, about: str) -> RateTable:
    """Table of rates by rank and depth, with the line that a scenario takes."""
    found = counts.rates
    rows = tuple(
        (depth + 1, rank + 1, *[float(part[depth, rank]) for part in found[:3]], int(found.trials[depth, rank]))
        for depth, rank in np.argwhere(counts.offered > 0).tolist()
    )
    notes = [
        "rate: the target's token is the draft's candidate of this rank, of the drafts that came to this depth and had one; low,"
        f" high: {LEVEL:.0%} interval (Wilson)"
    ]
    if counts.complete:
        notes.append(
            f'as [outcomes]: kind = "by-depth"; rank_rates = {counts.rank_rates}; trials = {int(found.trials[0, 0])};'
            ' source = "measured"'
        )
    columns = ("depth", "rank", "rate", "low", "high", "trials")
    return RateTable(f"Ranks of the target's token by depth (measured; {about})", columns, rows, tuple(notes))


def predicted_by_rank(decodings: Sequence[Decoding], about: str) -> RateTable | None:
    """Table of tokens per round of trees, seen and predicted from rates by rank and depth; None if trees grow by confidence."""
    parameters = parameters_of(decodings[0])
    if not parameters.trees:
        return None
    rows = []
    for name, (by, of) in _halves(decodings).items():
        counts = ranks_from_logs.of_commits(commit for each in by for commit in each.commits)
        seen = rates_from_logs.means(rounds_of(of))
        ends = seen.rounds, seen.over_rounds, seen.rounds_low, seen.rounds_high
        rates, widths = counts.rank_rates, parameters.ranks_by_depth
        found = NONE
        if len(rates) >= parameters.levels and all(len(row) >= most for row, most in zip(rates, widths, strict=False)):
            lengths, count = np.unique([len(each.tokens) for each in of], return_counts=True)
            rounds = [_rounds_of_tree(parameters, length, rates) for length in lengths.tolist()]
            found = float(lengths @ count / (count @ np.array(rounds)))
        rows.append((name, len(of), *ends, found, found / seen.over_rounds - 1 if found is not NONE else NONE))
    notes = (
        f"low, high: {LEVEL:.0%} interval of tokens per round over sequences; of: the sequences predicted, from the others",
        "predicted: exact mean for independent rounds with the rates by rank and depth, drafts cut at the end",
    )
    return RateTable(f"Tokens per round (measured; {about}), and by the closed form", _PREDICTED, tuple(rows), notes)


def _rounds_of_tree(parameters: Any, tokens: int, rates: Sequence[Sequence[float]]) -> float:
    """Mean rounds of a tree of fixed shape."""
    law, cost = RankRates([rates[: parameters.levels]]), UnitCost(parameters.layers, cost_ratio=0.0)
    return float(tree_rounds.moments(parameters, tokens, law, tree_rounds.prices(parameters, cost, tokens)).rounds)


def _halves(decodings: Sequence[Decoding]) -> dict[str, tuple[Sequence[Decoding], Sequence[Decoding]]]:
    """Sequences that predict, and those that are predicted: all by all, and every second one by the others."""
    halves = {"all": (decodings, decodings), "odd": (decodings[1::2], decodings[::2]), "even": (decodings[::2], decodings[1::2])}
    return {name: both for name, both in halves.items() if all(both)}


_PREDICTED = ("of", "sequences", "rounds", "tokens_per_round", "low", "high", "predicted", "error")


def predicted(decodings: Sequence[Decoding], about: str) -> RateTable:
    """Table of tokens per round, seen and predicted: by the closed form for sequences of these lengths, from measured rates.

    The rates of every second sequence predict the rounds of the others, so that no sequence predicts itself; in the first row all
    predict all.
    """
    rows = []
    for name, (by, of) in _halves(decodings).items():
        rows.append((name, len(of), *_seen_and_predicted(rounds_of(by), of)))
    notes = (
        f"low, high: {LEVEL:.0%} interval of tokens per round over sequences; of: the sequences predicted, from the others",
        "predicted: exact mean for rounds that are independent with the rates by draft position, drafts cut at the end",
    )
    return RateTable(f"Tokens per round (measured; {about}), and by the closed form", _PREDICTED, tuple(rows), notes)


def _seen_and_predicted(by: ReplayedRounds, of: Sequence[Decoding]) -> tuple[int, float, float, float, float, float]:
    seen = rates_from_logs.means(rounds_of(of))
    rates = rates_from_logs.by_draft_position(by)
    ends = seen.rounds, seen.over_rounds, seen.rounds_low, seen.rounds_high
    if rates.trials.min() == 0:
        return (*ends, NONE, NONE)
    lengths, counts = np.unique([len(each.tokens) for each in of], return_counts=True)
    flat, law = np.ones(by.draft_length + 1), Rounds.by_draft_position(rates.rate)
    rounds = [moments(by.draft_length, length, law, RoundPrices(flat, flat, flat)).rounds for length in lengths.tolist()]
    found = float(lengths @ counts / (counts @ np.array(rounds)))
    return (*ends, found, found / seen.over_rounds - 1)
