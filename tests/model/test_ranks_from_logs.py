"""Rates by rank and depth: counted from commits and from position logs, with censored candidates, and as a scenario takes them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.interpret import interpreter
from model.interpret.simulated_answers import Ranked
from model.methods.tree import algorithm, ranks_from_logs
from model.methods.tree.draft_trees import by_depth, require_rates
from model.outcomes.rank_laws import RankRates
from model.steps import Commit

DRAFTS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4), min_size=1, max_size=30)


def commits_of(drafts: list[list[tuple[int, int]]]) -> list[Commit]:
    """Commits of drafts given by (rank, candidates) at each depth; a rank above the candidates is none of them."""
    found = []
    for draft in drafts:
        own: list[tuple[int, int]] = []
        for rank, candidates in draft:
            own.append((rank if rank <= candidates else 0, candidates))
            if not own[-1][0]:
                break
        ranks, candidates = zip(*own, strict=True)
        found.append(Commit("round", (1,) * len(own), 9, ranks=ranks, candidates=candidates))
    return found


@given(DRAFTS)
def test_counts_are_those_of_a_loop(drafts: list[list[tuple[int, int]]]) -> None:
    commits = commits_of(drafts)
    if not any(any(each.candidates) for each in commits):
        with pytest.raises(ParameterError, match="records must have at least one draft with candidates, got none"):
            ranks_from_logs.of_commits(commits)
        return
    found = ranks_from_logs.of_commits(commits)
    for depth in range(len(found.offered)):
        here = [(each.ranks[depth], each.candidates[depth]) for each in commits if len(each.ranks) > depth]
        for rank in range(1, found.offered.shape[1] + 1):
            had = [own for own, candidates in here if candidates >= rank]
            assert found.offered[depth, rank - 1] == len(had)
            assert found.tested[depth, rank - 1] == sum(not 0 < own < rank for own in had)
            assert found.right[depth, rank - 1] == sum(own == rank for own in had)


@given(DRAFTS)
def test_rates_of_a_depth_are_a_distribution_that_scenarios_take(drafts: list[list[tuple[int, int]]]) -> None:
    commits = [each for each in commits_of(drafts) if each.candidates[0]]
    if not commits:
        return
    counts = ranks_from_logs.of_commits(commits)
    rates = counts.rates
    for depth in range(len(counts.offered)):
        known = counts.offered[depth] > 0
        assert np.isnan(rates.rate[depth]).tolist() == (~known).tolist()
        assert (np.diff(known.astype(int)) <= 0).all()  # who had a candidate had those before it
        assert 0 <= np.nansum(rates.rate[depth]) <= 1 + 1e-12
        assert (rates.low[depth][known] <= rates.rate[depth][known]).all()
        assert (rates.rate[depth][known] <= rates.high[depth][known]).all()
    require_rates("rank_rates", by_depth(tuple(tuple(row) for row in counts.rank_rates), 1))
    for row, own in zip(counts.rank_rates, rates.rate, strict=True):
        assert row == pytest.approx(own[: len(row)].tolist(), abs=1.001e-4)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=30))
def test_equal_numbers_of_candidates_give_shares(drafts: list[list[int]]) -> None:
    counts = ranks_from_logs.of_commits(commits_of([[(rank, 3) for rank in draft] for draft in drafts]))
    assert counts.rates.rate == pytest.approx(counts.right / counts.offered)


def test_rates_of_decodings_are_those_of_their_law() -> None:
    """A tree with fewer candidates below its second ones: shares of the accepted tokens alone would be biased.

    Each rate is within 5 standard deviations of the law's (false alarms: below 1 in 10^5 for the nine rates).
    """
    rates = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.1), (0.6, 0.1, 0.05))
    parents = (-1, -1, -1, 0, 0, 0, 1, 2, 3, 3, 3, 4)
    choice = algorithm.Parameters(1, "listed", parents=parents)
    tokens, count = 400, 25
    draws = np.random.default_rng(7).random((tokens, count))
    ranks = np.concatenate([*RankRates([rates]).sample(iter([draws]))])
    commits: list[Commit] = []
    for number in range(count):
        world = Ranked(1, 1, ranks[:, :, number].T.tolist())
        commits += interpreter.count(algorithm.decode(choice, [0], tokens), world, tokens).committed
    found = ranks_from_logs.of_commits(commits)
    expected = np.array(rates)
    assert found.complete
    # A candidate is tested where those before it are wrong, so that the tested drafts are the trials of an estimate.
    error = np.sqrt(expected * (1 - expected) / found.offered)
    assert (np.abs(found.rates.rate - expected) < 5 * error).all()
    naive = found.right / found.offered.max(axis=1, keepdims=True)
    assert (np.abs(naive - expected) > 5 * error).any(), "the tree does not tell the estimates apart"


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_positions_are_drafts_that_start_there(records: list[list[int]], depth: int, width: int) -> None:
    drafts = []
    for record in records:
        for start in range(len(record)):
            own = []
            for rank in record[start : start + depth]:
                own.append((rank if rank <= width else 0, width))
                if rank > width:
                    break
            ranks, candidates = zip(*own, strict=True)
            drafts.append(Commit("round", (1,) * len(own), 9, ranks=ranks, candidates=candidates))
    expected, found = ranks_from_logs.of_commits(drafts), ranks_from_logs.of_positions(records, depth, width)
    for got, want in zip(found, expected, strict=True):
        assert got[: len(want)].tolist() == want.tolist()
        assert not got[len(want) :].any()


@pytest.mark.parametrize("ranks", [[3, 1, 2], [1]])
def test_windows_follow_the_sequence(ranks: list[int]) -> None:
    found = ranks_from_logs.windows(ranks, 3)
    assert found[:, 0].tolist() == ranks
    for here, after in pairwise(found.tolist()):
        assert here[1:] == after[:-1]


@pytest.mark.parametrize(("call", "error"), [
    (lambda: ranks_from_logs.windows([1], 0), "depth must be"), (lambda: ranks_from_logs.windows([-1], 1), "ranks"),
    (lambda: ranks_from_logs.of_positions([[1]], 1, 0), "width must be"),
    (lambda: ranks_from_logs.of_commits([]), "at least one draft"),
    (lambda: ranks_from_logs.of_commits([Commit("round", (1,), 3)]), "this record has none"),
])  # fmt: skip
def test_impossible_records_are_refused(call: Any, error: str) -> None:
    with pytest.raises(ParameterError, match=error):
        call()
