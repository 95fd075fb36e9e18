"""Theorems on adaptive, hierarchical and beam drafts: expected verdicts, and faults that refute each theorem."""

import json
from dataclasses import replace
from typing import Any

import pytest

from model.costs.layer_times import UnitCost
from model.methods.adaptive import algorithm as adaptive_algorithm
from model.methods.adaptive import theory as adaptive
from model.methods.beam import theory as beam
from model.methods.hierarchical import algorithm as hierarchical_algorithm
from model.methods.hierarchical import theory as hierarchical
from sim.theorems import replay, select
from sim.theorems.theorem import Theorem
from tests.sim.test_theorems import PASSES_IN_HALF_THE_TIME
from tests.support import faulty_speculation
from tests.support.theorem_checks import (
    Fault,
    assert_fault_shows,
    plain_decoding_on_one_device,
    plus_one,
    verdict_on,
    verdict_tests,
    with_fault,
)

OWN = [theorem for method in ("adaptive", "hierarchical", "beam") for theorem in select(method)]
FALSE = [pytest.param(theorem, id=f"{theorem.method}-{theorem.number}") for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(
    OWN, lambda theorem: f"{theorem.method}-{theorem.number}"
)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_and_can_be_replayed(theorem: Theorem) -> None:
    for seed in range(3):
        verdict = verdict_on(theorem, examples=200, seed=seed)
        assert not verdict.holds
        assert verdict.counterexample is not None
        again = replay(theorem.number, json.loads(json.dumps(verdict.counterexample)), theorem.method)
        assert (again.holds, again.error) == (False, verdict.error)


def later(right: Any, *args: Any) -> Any:
    """Add one layer-time to the predicted latency."""
    prediction = right(*args)
    return replace(prediction, latency=prediction.latency + 1)


ALL_KEPT_BY_THE_LARGE = with_fault(faulty_speculation.all_accepted, hierarchical_algorithm, "verify")
ALL_KEPT = with_fault(faulty_speculation.all_accepted, adaptive_algorithm, "verify")
DISPATCH_TAKES_TIME = with_fault(plus_one, UnitCost, "dispatching")

FAULTS: list[tuple[str, str, str, Fault]] = [
    ("hierarchical", "16a", "half the time", PASSES_IN_HALF_THE_TIME),
    ("hierarchical", "16b", "all kept", ALL_KEPT_BY_THE_LARGE),
    ("hierarchical", "16c", "late", with_fault(later, hierarchical, "predict")),
    ("hierarchical", "16c", "half the time", PASSES_IN_HALF_THE_TIME),
    ("hierarchical", "16d", "a token more", with_fault(plus_one, hierarchical, "tokens_per_round")),
    ("hierarchical", "16d", "a pass more", with_fault(plus_one, hierarchical, "cost_per_round")),
    ("hierarchical", "16e", "a pass more", with_fault(plus_one, hierarchical, "cost_per_round")),
    ("hierarchical", "16f", "a token more", with_fault(plus_one, hierarchical, "breakeven_accepted")),
    ("hierarchical", "16g", "all kept", ALL_KEPT_BY_THE_LARGE),
    ("hierarchical", "16h", "all kept", ALL_KEPT_BY_THE_LARGE),
    ("hierarchical", "33", "over one device", plain_decoding_on_one_device),
    ("hierarchical", "17", "a token more", with_fault(plus_one, hierarchical, "cascade_speedup")),
    ("adaptive", "1", "half the time", PASSES_IN_HALF_THE_TIME),
    ("adaptive", "4", "all kept", ALL_KEPT),
    ("adaptive", "10a", "half the time", PASSES_IN_HALF_THE_TIME),
    ("adaptive", "10b", "late", with_fault(later, adaptive, "predict")),
    ("adaptive", "33", "over one device", plain_decoding_on_one_device),
    ("adaptive", "14", "correction from p",
     with_fault(faulty_speculation.with_mistakes(correction="sample"), adaptive_algorithm, "verify")),
    ("beam", "1", "half the time", PASSES_IN_HALF_THE_TIME),
    ("beam", "2", "late", with_fault(later, beam, "predict")),
    ("beam", "3", "dispatch takes time", DISPATCH_TAKES_TIME),
    ("beam", "4", "faster", with_fault(plus_one, beam, "speedup")),
]  # fmt: skip


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {(method, number) for method, number, *_ in FAULTS} == {
        (theorem.method, theorem.number) for theorem in OWN if theorem.expect == "holds"
    }


@pytest.mark.parametrize(("method", "number", "fault"), [pytest.param(m, n, f, id=f"{m}-{n}-{what}") for m, n, what, f in FAULTS])
def test_fault_refutes_theorem(method: str, number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows(method, number, fault, monkeypatch)
