"""Numbers of a claim that contradict each other: rounds that could have happened never do, and others always do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from model.audit import acceptance_lengths
from model.audit.acceptance_lengths import READINGS, if_independent, of_drafted, of_tested
from model.audit.claims import of_rows
from model.audit.verdicts import CONTRADICTORY, KINDS, NOT_DECIDABLE, ClaimVerdict, audit
from model.methods.speculative import theory

ROUNDING = 1e-9


def verdict(**columns: Any) -> ClaimVerdict:
    [found] = audit(of_rows([columns]))
    return found


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draft length, and accepted tokens of each round, some of which are accepted."""
    length = draw(st.integers(1, 7))
    accepted = draw(st.lists(st.integers(0, length), min_size=1, max_size=30))
    assume(sum(accepted))
    return length, accepted


def rates(length: int, accepted: list[int]) -> dict[str, float]:
    """The rate of each reading that these rounds print."""
    total, count = sum(accepted), len(accepted)
    return {
        "acceptance_rate": total / sum(min(each + 1, length) for each in accepted),
        "draft_acceptance_rate": total / (count * length),
        "of_generated": total / (total + count),
        "of_emitted": (total + count) / (count * (length + 1)),
        "of_first": sum(each > 0 for each in accepted) / count,
    }


# --- What rates allow ---


@given(rounds())
def test_every_reading_allows_the_length_of_rounds_that_happened(found: tuple[int, list[int]]) -> None:
    length, accepted = found
    mean = 1 + sum(accepted) / len(accepted)
    printed = rates(length, accepted)
    assert {*printed} == {*READINGS}
    for name, rate in printed.items():
        least, most = READINGS[name].lengths(rate, length)
        assert least * (1 - ROUNDING) <= mean <= most * (1 + ROUNDING), name
    least, most = of_tested(printed["acceptance_rate"], math.inf)
    assert least <= mean <= most * (1 + ROUNDING)


@given(length=st.integers(1, 9), whole=st.integers(0, 20), rejected=st.integers(1, 20))
def test_both_ends_of_an_acceptance_are_attained(length: int, whole: int, rejected: int) -> None:
    """Rounds of all or nothing are the shortest of an acceptance; those that fail at the last token alone are the longest."""
    assume(whole)
    all_or_nothing = [length] * whole + [0] * rejected
    at_the_end = [length] * whole + [length - 1] * rejected
    for accepted, end in ((all_or_nothing, 0), (at_the_end, 1)):
        rate = rates(length, accepted)["acceptance_rate"]
        assert of_tested(rate, length)[end] == pytest.approx(1 + sum(accepted) / len(accepted))


@given(rate=st.floats(0, 1), length=st.integers(0, 12))
def test_independent_acceptances_are_between_the_ends(rate: float, length: int) -> None:
    least, most = of_tested(rate, length)
    assert least * (1 - 1e-6) <= if_independent(rate, length) <= most * (1 + 1e-6)
    assert if_independent(rate, length) == pytest.approx(float(theory.expected_tokens(rate, length)))
    if length == 1:
        assert least == pytest.approx(most)


@given(low=st.floats(0, 1), high=st.floats(0, 1), length=st.integers(1, 12))
def test_a_larger_rate_never_means_fewer_tokens(low: float, high: float, length: int) -> None:
    low, high = sorted((low, high))
    for reading in READINGS.values():
        ends = zip(reading.lengths(low, length), reading.lengths(high, length), strict=True)
        assert all(less <= more * (1 + ROUNDING) for less, more in ends)


# --- Verdicts ---


@given(found=rounds(), digits=st.integers(1, 4), known=st.sets(st.sampled_from(["AL", "K", "alpha", "r"])))
def test_rounds_that_happened_never_contradict_themselves(found: tuple[int, list[int]], digits: int, known: set[str]) -> None:
    length, accepted = found
    printed = rates(length, accepted)
    claim = {
        "AL": f"{1 + sum(accepted) / len(accepted):.{digits}f}", "K": length,
        "alpha": f"{printed['acceptance_rate']:.{max(digits, 2)}f}", "r": f"{printed['draft_acceptance_rate']:.{max(digits, 2)}f}",
    }  # fmt: skip
    named = {"AL": "AL", "K": "K", "alpha": "alpha", "r": "draft_acceptance_rate"}
    for method in ("speculative", "adaptive", "EAGLE-3", "n-gram", None):
        stated = {named[name]: claim[name] for name in known}
        assert verdict(method=method, speedup=1, **stated).kind != CONTRADICTORY, verdict(method=method, speedup=1, **stated)


@given(found=rounds(), reading=st.sampled_from([name for name in READINGS if name != "acceptance_rate"]))
def test_the_reading_that_was_printed_is_among_those_that_agree(found: tuple[int, list[int]], reading: str) -> None:
    """A rate of another reading, reported as acceptance: either nothing contradicts, or the reading is named."""
    length, accepted = found
    rate = rates(length, accepted)[reading]
    mean = 1 + sum(accepted) / len(accepted)
    claim = verdict(method="speculative", alpha=f"{rate:.6f}", K=length, AL=f"{mean:.6f}", speedup=1)
    if claim.kind == CONTRADICTORY:
        assert READINGS[reading].about in claim.sentence


@given(rate=st.floats(0.05, 0.95), length=st.integers(1, 8), gap=st.floats(0.05, 2))
def test_lengths_outside_of_what_a_rate_allows_contradict_it(rate: float, length: int, gap: float) -> None:
    for term, allowed in (("acceptance_rate", of_tested), ("draft_acceptance_rate", of_drafted)):
        most = allowed(rate, length)[1]
        least = allowed(rate, length - 0.5)[0]
        for mean, limit in ((most + gap, most), (least - gap, least)):
            if mean < 1:
                continue
            claim = verdict(method="speculative", **{term: f"{rate:.12f}"}, K=length, AL=f"{mean:.12f}")
            assert claim.kind == claim.verdict == CONTRADICTORY, claim
            assert f"{mean:g}" in claim.sentence
            if mean <= length + 1:
                assert f"{rate:g}" in claim.sentence
                assert claim.deciding_bound == pytest.approx(limit) or claim.deciding_bound < mean


@pytest.mark.parametrize(
    ("columns", "number", "words"),
    [
        ({"AL": "4.3", "K": 3}, 4, "4.3 is more than 4, the most tokens per round by draft length 3"),
        ({"AL": "2.5", "alpha": "0.50"}, 1 / 0.49, "and drafts had 3 tokens on average"),
        ({"AL": "4.85", "alpha": "0.55", "K": 7}, 1 / 0.44, "0.55 is the draft acceptance rate, accepted over drafted tokens"),
        ({"AL": "2.10", "alpha": "0.90", "K": 3}, 1 + 1 / (0.11 / 0.89 + 1 / 2.5), "3.439 if acceptances are independent"),
        ({"AL": "2.30", "alpha": "0.90", "K": 3}, None, "2.3 leaves out the bonus token"),
        ({"AL": "2.00", "draft_acceptance_rate": "60%", "K": 3}, 1 + 2.5 * 0.59, "drafts had 1.67 tokens on average"),
        ({"draft_acceptance_rate": "0.70", "alpha": "0.50", "K": 4}, 1 / 0.49, "more than 2.041, the most tokens per round by acc"),
        ({"AL": "4.8", "alpha": "0.75", "draft": "eagle3"}, 1 / 0.24, "of a tree of drafts and the rate of single drafts"),
    ],
)
def test_contradictions_by_hand(columns: dict[str, Any], number: float | None, words: str) -> None:
    for more in ({}, {"speedup": 2}):
        claim = verdict(method="speculative", **columns, **more)
        assert claim.kind == CONTRADICTORY
        assert number is None or claim.deciding_bound == pytest.approx(number)
        assert words in claim.sentence
        assert str(claim.decided_by) in claim.sentence
        assert claim.needed_acceptance is None or more


@pytest.mark.parametrize(
    ("columns", "contradicts"),
    [
        ({"AL": "2.9", "alpha": "0.9", "K": 3}, False),  # 2.9 + 0.1 >= 2.910, the least of 0.89
        ({"AL": "2.8", "alpha": "0.9", "K": 3}, True),
        ({"AL": "2.1", "alpha": "0.5"}, False),  # 2.1 - 0.1 <= 1 / 0.49
        ({"AL": "2.2", "alpha": "0.5"}, True),
        ({"draft_acceptance_rate": "0.42", "alpha": "0.5", "K": 3}, False),  # 1 + 0.41 x 2.5 <= 1 / 0.49
        ({"draft_acceptance_rate": "0.43", "alpha": "0.5", "K": 3}, True),
    ],
)
def test_a_contradiction_is_one_before_rounding(columns: dict[str, Any], contradicts: bool) -> None:
    assert (verdict(method="speculative", **columns).kind == CONTRADICTORY) == contradicts


def test_a_length_that_only_dependence_explains_is_possible_and_named() -> None:
    claim = verdict(method="speculative", alpha="0.80", K=3, AL="3.2", speedup="2")
    assert claim.kind not in (CONTRADICTORY, NOT_DECIDABLE)
    assert "means 2.95 tokens per round if acceptances are independent, not 3.2" in claim.sentence
    assert "independent, not" not in verdict(method="speculative", alpha="0.80", K=3, AL="2.95", speedup="2").sentence


def test_drafts_that_may_be_shorter_bound_the_length_from_above_alone() -> None:
    """A search for n-grams finds nothing in some rounds, and an adaptive rule stops early."""
    few = {"alpha": "0.9", "K": 5, "AL": "1.5", "speedup": "1.2"}
    kinds = [verdict(method=method, **few).kind for method in ("speculative", "n-gram", "adaptive")]
    assert [kind == CONTRADICTORY for kind in kinds] == [True, False, False]
    assert verdict(method="n-gram", AL="6.5", K=5, speedup=2).kind == CONTRADICTORY


def test_no_reading_agrees_with_itself_alone() -> None:
    assert CONTRADICTORY in KINDS
    assert acceptance_lengths.agreeing("draft_acceptance_rate", (0.6, 0.6), (3.9, 3.9), 3) == []
