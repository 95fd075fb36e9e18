"""Tables of the rates in a log, in the form of the papers: match rates as in Tables 2 and 6 to 8 of PPD, acceptance of drafts.

Every rate is measured from counted trials, with Wilson's interval for independent trials. Separate tables test the independence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.decode import decoded_rounds
from calibrate.decode.titled_table import NONE, RateTable
from model.base import checks
from model.base.checks import ParameterError
from model.logs import position_log, text_lookups
from model.logs.position_log import PositionLog
from model.methods.ngram.algorithm import Parameters
from model.methods.ngram.lookup_rounds import moments
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.speculative import rates_from_logs
from model.methods.tree import ranks_from_logs
from model.outcomes.intervals import LEVEL
from model.outcomes.lookup_laws import Lookups

if TYPE_CHECKING:
    from calibrate.decode.public_acceptance_logs import AcceptanceLog

BINS = 4
"""Ranges of output positions, as in Tables 6 to 8 of [Yang2024]."""
FEW = 5
"""Printed rows of a list of requests."""
MATCHES = (1, 3)
"""Smallest and largest number of last tokens that are looked up in the sequences of a log."""
DRAWS = 400
"""Bootstrap draws of requests, for the interval of an error."""


def tables_of_file(
    where: str, candidates: Sequence[int], draft_lengths: Sequence[int], cost_ratio: float, drafter: str | None = None,
    matches: tuple[int, int] | None = None,
) -> list[RateTable]:  # fmt: skip
    """Return all tables of a log: a position log, decodings, or a public log of accepted lengths (JSON lines) with its `drafter`.

    `matches` are the smallest and largest number of last tokens that are looked up in the sequences of a position log; without them
    `MATCHES`, in logs that hold the tokens of their prompts.
    """
    for name, values in (("candidates", candidates), ("draft_lengths", draft_lengths)):
        for value in values:
            checks.whole(name, value, 1)
    if where.endswith((".jsonl", ".ndjson")):
        from calibrate.decode import public_acceptance_logs

        if drafter is None:
            raise ParameterError(f"drafter is required: one of {', '.join(public_acceptance_logs.drafters(where))}")
        log = public_acceptance_logs.read(where, drafter)
        if matches is not None:
            raise ParameterError("matches is used only with logs of this program (.json); leave it out")
        return [other_outputs(log), *acceptance(log.lengths, draft_lengths, cost_ratio, _about(log))]
    if drafter is not None:
        raise ParameterError("drafter is used only with public logs (.jsonl); leave it out")
    decodings = decoded_rounds.decodings_of_file(where)
    if decodings is not None:
        if matches is not None:
            raise ParameterError("matches is used only with logs of calibrate log; leave it out")
        return [*decoded_rounds.tables(decodings)]
    positions = position_log.load(where)
    known = matches is not None or text_lookups.possible(positions)
    found = lookups(positions, MATCHES if matches is None else matches, draft_lengths) if known else ()
    return [*tables(positions, candidates, draft_lengths, cost_ratio), *found]


def read_public_log(where: str, drafter: str) -> tuple[Sequence[Any], str]:
    """Return the accepted lengths of a public log, and their description."""
    from calibrate.decode import public_acceptance_logs

    log = public_acceptance_logs.read(where, drafter)
    return log.lengths, _about(log)


def _about(log: AcceptanceLog) -> str:
    return f"{log.drafter}, {len(log.requests)} requests"


def other_outputs(log: AcceptanceLog) -> RateTable:
    """Table of requests whose lengths belong to another output than the logged one."""
    other = {*log.of_other_outputs}
    rows = tuple((each.id, len(each.lengths), each.output_tokens) for each in log.requests if each.id in other)
    columns, count = ("id", "lengths", "output_tokens"), len(log.requests)
    if not rows:
        return RateTable(f"Requests with lengths of another output: none of {count}", columns, ())
    title = f"Requests with lengths of another output: {len(rows)} of {count} ({len(rows) / count:.0%})"
    note = "their numbers of lengths and output tokens differ; the rates below include them"
    return RateTable(title, columns, rows, (note,), most=FEW)


def tables(log: PositionLog, candidates: Sequence[int], draft_lengths: Sequence[int], cost_ratio: float) -> Iterator[RateTable]:
    """Yield all tables of a position log."""
    heads = [head for head in position_log.HEADS if head == "common" or log.header.get("heads")]
    yield matches(log, candidates, heads)
    for count in candidates:
        yield by_position(log, count, heads[-1])
    yield match_independence(log, candidates, heads[-1])
    if log.drafted:
        about = f"{log.header['draft']['name']}, {len(log.starts) - 1} sequences"
        if log.header.get("sampling") is None:
            yield from acceptance([each + 1 for each in log.column("accepted")], draft_lengths, cost_ratio, about)
        else:
            yield overlap_table(log, about)
        if log.ranked:
            counts = ranks_from_logs.of_positions(log.draft_ranks(), max(draft_lengths), max(candidates))
            yield decoded_rounds.by_rank(counts, f"{about}; drafts from every position")


def matches(log: PositionLog, candidates: Sequence[int], heads: Sequence[str]) -> RateTable:
    """Table of match rates by layer and k, as in Table 2 of [Yang2024]: head N is the model's, Y is trained for the layer."""
    rows = []
    for layer in range(1, log.layers):
        for head in heads:
            if head == "trained" and not log.table["rank_trained"].to_numpy()[0, layer - 1]:
                continue
            for count in candidates:
                found = rates_from_logs.rates(int((log.ranks(layer, head) <= count).sum()), log.table.height)
                rows.append((layer, "NY"[head == "trained"], count, *map(float, found[:3]), int(found.trials)))
    columns = ("layer", "head", "k", "match_rate", "low", "high", "trials")
    title = "Match rates (measured): the target's token is among the k early candidates"
    notes = (
        "head: N, the model's own (common) head after the layer; Y, a head trained for the layer",
        f"low, high: {LEVEL:.0%} confidence interval",
    )
    return RateTable(title, columns, tuple(rows), notes)


def by_position(log: PositionLog, count: int, head: str) -> RateTable:
    """Table of match rates by layer and range of output positions, as in Tables 6 to 8 of [Yang2024]."""
    position = log.table["position"].to_numpy()
    edges = np.unique(np.linspace(0, position.max() + 1, BINS + 1).astype(int))
    rows = []
    for layer in _with_head(log, head):
        kept = log.ranks(layer, head) <= count
        found = [rates_from_logs.rates(int(kept[part].sum()), int(part.sum())) for part in _ranges(position, edges)]
        rows.append((layer, *[float(each.rate) for each in found]))
    columns = ("layer", *[f"{low + 1}-{high}" for low, high in pairwise(edges)])
    return RateTable(f"Match rates at k={count} by output position (measured; {head} head)", columns, tuple(rows))


def _ranges(position: Any, edges: Any) -> list[Any]:
    return [(position >= low) & (position < high) for low, high in pairwise(edges)]


def _with_head(log: PositionLog, head: str) -> list[int]:
    held = log.table[f"rank_{head}"].to_numpy()[0]
    return [layer for layer in range(1, log.layers) if held[layer - 1]]


def match_independence(log: PositionLog, candidates: Sequence[int], head: str) -> RateTable:
    """Table of tests of the independence of matches.

    The mean decoding time does not depend on it (Theorem 4.1 is linear in matches), its spread does: `spread` is the standard
    deviation of a sequence's number of matches, relative to independent matches.
    """
    rows = []
    for layer in _with_head(log, head):
        for count in candidates:
            matched = log.matches(layer, count, head)
            correlation, runs = rates_from_logs.lag_correlation(matched), rates_from_logs.runs_test(matched)
            sizes, sums = np.array([each.size for each in matched]), np.array([each.sum() for each in matched])
            rate = sums.sum() / sizes.sum()
            expected = np.sqrt((sizes * rate * (1 - rate)).mean())
            spread = float(np.sqrt(np.square(sums - sizes * rate).mean()) / expected) if expected else float("nan")
            rows.append((layer, count, float(rate), correlation.correlation, correlation.p_value, runs.z, runs.p_value, spread))
    columns = ("layer", "k", "match_rate", "lag_1", "p_value", "runs_z", "p_value_", "spread")
    notes = (
        "lag_1: correlation of neighbouring positions, with its p_value; runs_z: runs test, with its p_value_",
        "spread: standard deviation of a sequence's number of matches, relative to independent matches",
    )
    return RateTable(f"Are matches independent? (measured; {head} head)", columns, tuple(rows), notes)


def acceptance(lengths: Sequence[Any], draft_lengths: Sequence[int], cost_ratio: float, about: str) -> Iterator[RateTable]:
    """Yield tables of the acceptance of greedy drafts, from the tokens of a round that starts at each position."""
    rows: list[tuple[Any, ...]] = []
    position = rates_from_logs.accepted_of_positions(lengths)
    rows.append(("positions", "-", *map(float, position[:3]), int(position.trials), NONE, NONE))
    for gamma in draft_lengths:
        played = rates_from_logs.replay(lengths, gamma)
        mean = float((played.accepted + 1).mean())
        low, high = rates_from_logs.ratio_interval(*played.of_requests())
        for name, found in (
            ("tested", rates_from_logs.accepted_of_tested(played)),
            ("drafted", rates_from_logs.accepted_of_drafted(played)),
        ):
            ends = (low, high) if name == "tested" else (NONE, NONE)
            rows.append((name, gamma, *map(float, found[:3]), int(found.trials), *ends))
        rows.append(("mean_acceptance_length", gamma, mean, *[NONE] * 2, int(played.accepted.size), *[NONE] * 2))
    columns = ("accepted over", "gamma", "rate", "low", "high", "trials", "text_low", "text_high")
    title = f"Acceptance (measured; {about}): alpha is accepted / tested; text_low and text_high: interval over sequences"
    notes = (
        "positions: where the first token of a draft that starts there is accepted, over all positions",
        "tested: over drafted tokens that the target tested; drafted: over all drafted tokens",
        "mean_acceptance_length: tokens per round, the target's token included",
    )
    yield RateTable(title, columns, tuple(rows), notes)
    yield _means(lengths, draft_lengths)
    played = rates_from_logs.replay(lengths, max(draft_lengths))
    found = rates_from_logs.by_draft_position(played)
    positions = tuple(
        (index + 1, *[float(part[index]) for part in found[:3]], int(found.trials[index])) for index in range(len(found.rate))
    )
    title = f"Acceptance by position in a draft of {played.draft_length} (measured)"
    yield RateTable(title, ("place", "rate", "low", "high", "trials"), positions)
    yield _acceptance_by_position(lengths, played)
    yield _independence(lengths, draft_lengths)
    yield _dependence(lengths, draft_lengths, cost_ratio)


def _means(lengths: Sequence[Any], draft_lengths: Sequence[int]) -> RateTable:
    found = [rates_from_logs.means(rates_from_logs.replay(lengths, gamma)) for gamma in draft_lengths]
    columns = (
        "gamma", "over_rounds", "low", "high", "over_sequences", "sequences_low", "sequences_high", "rounds", "half_of_rounds_from",
    )  # fmt: skip
    rows = tuple((*each[:8], each.sequences_with_half) for each in found)
    notes = [
        f"gamma={each.draft_length}: half of the rounds belong to {each.sequences_with_half} of {each.sequences} sequences"
        + (": a few long ones dominate the mean over rounds" if each.few_dominate else "")
        for each in (min(found, key=lambda each: each.sequences_with_half),)
    ]
    title = "Tokens per round (measured, with the target's token): mean over rounds, and mean over sequences"
    return RateTable(title, columns, rows, tuple(notes))


def _acceptance_by_position(lengths: Sequence[Any], played: rates_from_logs.ReplayedRounds) -> RateTable:
    edges = np.unique(np.linspace(0, max(len(each) for each in lengths), BINS + 1).astype(int)).tolist()
    found = rates_from_logs.by_output_position(played, edges)
    rows = tuple(
        (f"{low + 1}-{high}", *[float(part[index]) for part in found[:3]], int(found.trials[index]))
        for index, (low, high) in enumerate(pairwise(edges))
    )
    title = f"Acceptance by output position, drafts of {played.draft_length} (measured)"
    return RateTable(title, ("positions", "rate", "low", "high", "trials"), rows)


def _independence(lengths: Sequence[Any], draft_lengths: Sequence[int]) -> RateTable:
    accepted = rates_from_logs.first_token_outcomes(lengths)
    correlation, runs = rates_from_logs.lag_correlation(accepted), rates_from_logs.runs_test(accepted)
    rows: list[tuple[Any, ...]] = [
        ("correlation of neighbours", "-", correlation.correlation, correlation.p_value),
        ("runs test, z", "-", runs.z, runs.p_value),
    ]
    for gamma in draft_lengths:
        geometric = rates_from_logs.geometric_test(rates_from_logs.replay(lengths, gamma))
        rows.append(("accepted lengths, chi-square", gamma, geometric.statistic, geometric.p_value))
    return RateTable("Are acceptances independent (measured)?", ("test", "gamma", "statistic", "p_value"), tuple(rows))


def _dependence(lengths: Sequence[Any], draft_lengths: Sequence[int], cost_ratio: float) -> RateTable:
    found = rates_from_logs.dependence(lengths, draft_lengths, cost_ratio, DRAWS, np.random.default_rng(0))
    title = f"Error of the i.i.d. prediction from alpha over positions, at cost_ratio={cost_ratio:g} (assumed)"
    columns = ("gamma", "alpha", "tokens predicted", "tokens seen", "error", "low", "high", "speed-up predicted", "speed-up seen")
    return RateTable(title, columns, tuple(tuple(row) for row in found))


def overlap_table(log: PositionLog, about: str) -> RateTable:
    """Table of the acceptance of sampled drafts: mean of sum min(p, q), and its estimate min(1, q/p) of generated tokens."""
    overlap = np.concatenate(log.column("overlap"))
    chance = np.concatenate(log.acceptance_probabilities())
    rows = tuple(
        (name, float(each.mean()), float(each.std(ddof=1) / np.sqrt(each.size)), int(each.size))
        for name, each in (("sum min(p, q)", overlap), ("min(1, q/p) of the generated token", chance))
    )
    return RateTable(f"Acceptance of sampled drafts (measured; {about})", ("estimate", "rate", "standard_error", "positions"), rows)


# --- Lookups in the sequences ---


def lookups(log: PositionLog, matches: tuple[int, int], draft_lengths: Sequence[int]) -> Iterator[RateTable]:
    """Yield tables of n-gram drafts: matches and their acceptance in the log's sequences, and what laws of them predict."""
    for length in draft_lengths:
        method = Parameters(log.layers, length, *matches)
        found = text_lookups.played(text_lookups.of_log(log, *matches, length))
        yield _lookup_table(found, method)
    yield _lookup_laws(log, matches, draft_lengths)


def _lookup_table(found: text_lookups.PlayedLookups, method: Parameters) -> RateTable:
    counts = text_lookups.counted(found, method.draft_length)
    rows: list[tuple[Any, ...]] = []
    shares, by_state = counts.shares, counts.rates
    for index, length in enumerate(counts.lengths):
        own = (found.match == length) & (found.drafted > 0)
        rate = rates_from_logs.rates(counts.accepted[index].sum(), counts.tested[index].sum())
        means = float(found.drafted[own].mean()), float(found.accepted[own].mean())
        states = [float(each) for each in by_state[:, index]]
        rows.append((length, int(own.sum()), float(shares[index]), *states, *means, *map(float, rate[:3])))
    none = counts.rounds[0]
    total = counts.rounds.sum(axis=0)
    rest = [float(each) for each in none / np.maximum(total, 1)]
    rows.append(("none", int(none.sum()), float(none.sum() / total.sum()), *rest, *[NONE] * 5))
    columns = ("match", "rounds", "share", "after_none", "after_some", "drafted", "accepted", "acceptance", "low", "high")
    lists = {
        "match_lengths": counts.lengths, "match_rates": by_state[0].round(4).tolist(),
        "match_rates_after_acceptance": by_state[1].round(4).tolist(),
        "acceptance_rates": [counts.acceptance(index).round(4).tolist() for index in range(len(counts.lengths))],
    }  # fmt: skip
    law = "; ".join(f"{name} = {value}" for name, value in lists.items())
    notes = (
        "after_none, after_some: share after a round that accepted no drafted token, and after one that accepted some",
        "acceptance: accepted over tested tokens, with its 95 % interval for independent tokens",
        f"as [outcomes]: kind = \"by-match\"; {law}; source = \"measured\"",
    )  # fmt: skip
    title = (
        f"Lookups in prompt and output (measured): matches of {method.min_match} to {method.max_match} tokens, drafts of at most"
        f" {method.draft_length}"
    )
    return RateTable(title, columns, tuple(rows), notes)


def _lookup_laws(log: PositionLog, matches: tuple[int, int], draft_lengths: Sequence[int]) -> RateTable:
    rows = []
    for length in draft_lengths:
        found = text_lookups.played(text_lookups.of_log(log, *matches, length))
        counts = text_lookups.counted(found, length)
        drafted = [Parameters(log.layers, length, *matches).drafted_after(each) for each in counts.lengths]
        laws = (
            text_lookups.law_of_means(found, length), text_lookups.law_by_match(counts, drafted, stretches=False),
            text_lookups.law_by_match(counts, drafted),
        )  # fmt: skip
        rows.append((length, found.tokens_per_round, *[_tokens_per_round(law, log, length) for law in laws]))
    columns = ("gamma", "seen", "one rate", "by match", "by match, in stretches")
    notes = ("laws: exact means over sequences of the log's lengths; one rate: of matches, and of acceptance over tested tokens",)
    return RateTable("Tokens per round of n-gram drafts (measured), and by laws with these rates", columns, tuple(rows), notes)


def _tokens_per_round(law: Lookups, log: PositionLog, draft_length: int) -> float:
    """Mean tokens of a round in sequences as long as those of the log."""
    lengths, counts = np.unique(np.diff(log.starts), return_counts=True)
    flat = np.ones(draft_length + 1)
    rounds = [moments(length, law, RoundPrices(flat, flat, flat)).rounds for length in lengths.tolist()]
    return float(lengths @ counts / (counts @ np.array(rounds)))
