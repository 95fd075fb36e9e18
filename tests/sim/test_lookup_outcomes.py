"""[outcomes] of lookups: kinds of laws that agree where they must, replay of logs and files, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim
from model.base.checks import ParameterError
from model.logs import position_log, text_lookups
from model.methods.ngram.algorithm import Parameters
from sim.runs import sweep
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes import lookup_outcomes

METHOD = Parameters(12, 3, max_match=3)
BY_MATCH: dict[str, Any] = {
    "match_lengths": (1, 2, 3), "match_rates": (0.2, 0.1, 0.3), "acceptance_rates": (0.4, 0.5, (0.7, 0.8, 0.9)),
}  # fmt: skip


def cells(record: Any, method: Parameters = METHOD) -> list[Any]:
    return [each.tolist() for each in record.outcome(method, 10).law.cells]


def test_equal_laws_of_several_kinds_are_equal() -> None:
    iid = lookup_outcomes.IndependentLookups(0.4, 0.6)
    assert cells(iid) == cells(lookup_outcomes.LookupsInStretches(0.4, 0.4, 0.6))
    one = lookup_outcomes.LookupsByMatch((2,), (0.4,), (0.6,))
    for mine, theirs in zip(cells(iid), cells(one), strict=True):
        assert np.allclose(mine, theirs)
    two = lookup_outcomes.LookupsByMatch((1, 2), (0.1, 0.3), (0.6, (0.6, 0.6, 0.6)))
    for mine, theirs in zip(cells(iid), cells(two), strict=True):
        assert np.allclose(mine, theirs)


def test_parameters_decide_which_matches_draft_how_much() -> None:
    record = lookup_outcomes.LookupsByMatch(**BY_MATCH)
    law = record.outcome(METHOD, 10).law
    assert (law.drafted, law.chances[0].tolist()) == ([3, 3, 3], [0.2, 0.1, 0.3])
    assert law.survival[2].tolist() == pytest.approx([0.7, 0.56, 0.504])
    law = record.outcome(Parameters(12, 3, min_match=2, max_match=3, length_factor=0.7), 10).law
    assert (law.drafted, law.chances[0].tolist()) == ([1, 2], [0.1, 0.3])
    found = record.outcome(Parameters(12, 3, min_match=3, max_match=3), 10)
    assert found.rate == pytest.approx(0.3)
    assert found.further_values["acceptance_rate"] == pytest.approx((0.7 + 0.56 + 0.504) / (1 + 0.7 + 0.56))


def test_intervals_come_from_trials() -> None:
    found = lookup_outcomes.IndependentLookups(0.4, 0.6, trials=100, source="measured").outcome(METHOD, 10)
    assert found.rate_low < 0.4 < found.rate_high
    assert found.low.chances[0, 0] == pytest.approx(found.rate_low)
    assert found.high.chances[0, 0] == pytest.approx(found.rate_high)


@pytest.mark.parametrize(("min_match", "max_match", "length", "factor"), [(1, 3, 4, None), (2, 2, 7, None), (1, 4, 6, 1.5)])
def test_a_log_is_replayed_with_the_lookups_of_the_method(
    min_match: int, max_match: int, length: int, factor: float | None
) -> None:
    method = Parameters(12, length, min_match, max_match, factor)
    found = lookup_outcomes.RecordedLookups("family").outcome(method, 64)
    expected = text_lookups.of_log(position_log.bundled(), min_match, max_match, length, factor)
    assert found.law.drafted.tolist() == [each.drafted.tolist() for each in expected]
    assert found.law.accepted.tolist() == [each.accepted.tolist() for each in expected]
    assert found.rate == pytest.approx(np.mean([each.drafted > 0 for each in expected]))


def test_all_views_of_a_replayed_log_agree(tmp_path: Path) -> None:
    tables = {
        "scenario": {"name": "replay", "tokens": 64, "replications": 300, "event_replications": 20},
        "method": [{"name": "ngram", "layers": 12, "draft_length": 4, "max_match": 3}],
        "outcomes": {"kind": "replay", "log": "family"},
        "cost": {"verify_cost": [[1, 1.0], [5, 1.2]]},
    }  # fmt: skip
    rows = {row["view"]: row for row in sim.run(tables).rows(named=True)}
    assert {*rows} == {"formula", "paths", "events"}
    assert rows["paths"]["speedup"] == pytest.approx(rows["formula"]["speedup"], rel=0.05)
    assert rows["events"]["paths_difference"] < 1e-9
    assert rows["formula"]["tokens_per_round"] == pytest.approx(2.1997, abs=1e-4)  # as `calibrate rates family` counts
    # The same lookups from a file.
    expected = text_lookups.of_log(position_log.bundled(), 1, 3, 4)
    file = tmp_path / "lookups.json"
    file.write_text(json.dumps([np.stack(each, axis=1).tolist() for each in expected]))
    again = sim.run({**tables, "outcomes": {"kind": "replay", "file": str(file)}}).rows(named=True)
    assert [row["speedup"] for row in again] == [row["speedup"] for row in rows.values()]


def test_keys_of_engines_are_understood() -> None:
    tables = {
        "scenario": {"name": "names", "tokens": 8},
        "method": [{"name": "ngram", "layers": 12, "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}],
        "outcomes": {"kind": "iid", "hit_rate": 0.4, "acceptance_rate": 0.5},
    }  # fmt: skip
    method: Any = Grid(sweep.resolve(tables)).case(0).parameters
    assert (method.draft_length, method.min_match, method.max_match) == (4, 2, 5)


@pytest.mark.parametrize(
    ("record", "given_", "message"),
    [
        ("IndependentLookups", {"hit_rate": 1.5, "acceptance_rate": 0.5}, "hit_rate must be between 0 and 1, got 1.5"),
        ("LookupsByMatch", {**BY_MATCH, "match_rates": (0.5, 0.5, 0.5)}, "match_rates must sum to at most 1, got 1.5; the rest is"),
        ("LookupsByMatch", {**BY_MATCH, "match_rates": (0.5,)}, "match_rates must have one entry for each of 3 match_lengths, got"),
        ("LookupsByMatch", {**BY_MATCH, "match_lengths": (1, 3, 2)}, "match_lengths must increase, got [1, 3, 2]"),
        ("LookupsByMatch", {**BY_MATCH, "match_lengths": (0, 1, 2)}, "match_lengths[0] must be at least 1, got 0"),
        ("LookupsByMatch", {**BY_MATCH, "match_lengths": ()}, "match_lengths must be a list of lengths of matches, got []"),
        ("LookupsByMatch", {**BY_MATCH, "acceptance_rates": (0.4, 0.5)}, "acceptance_rates must have one entry for each of 3"),
        ("LookupsByMatch", {**BY_MATCH, "acceptance_rates": (0.4, 0.5, (0.5, 2.0))}, "acceptance_rates[2][1] must be between 0"),
        ("LookupsByMatch", {**BY_MATCH, "acceptance_rates": (0.4, 0.5, "x")}, "acceptance_rates[2] must be a number, got 'x'"),
        ("LookupsByMatch", {**BY_MATCH, "match_rates_after_acceptance": (0.9, 0.9, 0.9)}, "match_rates_after_acceptance must sum"),
        ("RecordedLookups", {}, "must come from a file or from a log, one of the two"),
        ("RecordedLookups", {"log": "family", "file": "x.json"}, "must come from a file or from a log, one of the two"),
        ("RecordedLookups", {"log": "famly"}, "unknown log 'famly'; did you mean family?"),
        ("RecordedLookups", {"file": "missing.json"}, "missing.json"),
    ],
)
def test_impossible_tables_are_refused(record: str, given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        getattr(lookup_outcomes, record)(**given_)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "method", "message"),
    [
        (lookup_outcomes.LookupsByMatch(**BY_MATCH), {"max_match": 2}, "match_lengths must be at most max_match=2, got 3"),
        (lookup_outcomes.LookupsByMatch(**BY_MATCH), {"draft_length": 4}, r"acceptance_rates\[2\] must have a rate for each of 4"),
        (lookup_outcomes.IndependentLookups(0.5, 0.5), {"length_factor": 1.0}, "length_factor needs match lengths, which"),
        (lookup_outcomes.LookupsInStretches(0.5, 0.6, 0.5), {"length_factor": 1.0}, "kind 'markov' does not have"),
        (lookup_outcomes.RecordedLookups("family"), {}, "tokens must be at most 64, the longest record of 'family', got 100;"),
    ],
)
def test_laws_that_the_method_cannot_have_are_refused(record: Any, method: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        record.outcome(Parameters(**({"layers": 12, "draft_length": 3, "max_match": 3} | method)), 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must hold a list for each sequence"),
        ([[[1, 2]]], "sequence 0 is"),
        ([[[1, 2, 1], [1, 2]]], "sequence 0 is"),
        ([[[1, 2, 0.5]]], "sequence 0 is"),
        ([[[1, 2, 3]]], "sequence 0, position 0: accepted tokens must be at most the drafted ones, which need a match, got [1, 2,"),
        ([[[0, 0, 0], [0, 2, 1]]], "sequence 0, position 1: accepted tokens must be at most the drafted ones, which need a match"),
        ([[[1, -2, -3]]], "sequence 0 is"),
        ({"a": 1}, "must hold a list for each sequence"),
    ],
)
def test_files_that_hold_something_else_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lookups.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ParameterError) as caught:
        lookup_outcomes.RecordedLookups(file=str(file))
    assert message in str(caught.value)


def test_longer_drafts_than_recorded_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "lookups.json"
    file.write_text(json.dumps([[[1, 5, 2]] * 4]))
    with pytest.raises(ParameterError, match=r"draft_length must be at least 5, as drafted in .*lookups\.json', got 3"):
        lookup_outcomes.RecordedLookups(file=str(file)).outcome(METHOD, 4)


def test_methods_without_lookups_are_told_so() -> None:
    from model.methods.speculative.algorithm import Parameters as Speculative

    with pytest.raises(ParameterError, match="needs a method with draft_length, min_match, max_match, length_factor"):
        lookup_outcomes.IndependentLookups(0.5, 0.5).outcome(Speculative(12, 3), 10)
