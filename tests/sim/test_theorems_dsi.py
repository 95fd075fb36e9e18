"""Theorems on DSI: expected verdicts, and faults that refute each theorem."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.interpret.interpreter import Interpreter
from model.methods.concurrent import concurrent_drafts, unit_transfers
from model.methods.dsi import algorithm, finite_dsi, paths
from model.methods.dsi import theory as dsi
from model.steps import Fork, Join, Stop
from sim.theorems import select
from sim.theorems.theorem import Theorem
from tests.sim.test_theorems_pearl import all_kept, corrected_from_p, later, of_the_first_wrong_law
from tests.support.theorem_checks import (
    Fault,
    assert_fails_on_small_example,
    assert_fault_shows,
    plus_one,
    verdict_tests,
    with_fault,
)

OWN = select("dsi")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def one_fewer(right: Any, *args: Any) -> Any:
    """Reserve two replicas fewer than are enough."""
    return np.maximum(right(*args) - 2, 1)


def tenth_slower(right: Any, *args: Any) -> Any:
    return right(*args) * 0.9


def links_once(right: Any, rate: Any, ahead: Any, count: Any, ratio: Any, link: Any = 0.0) -> Any:
    """Charge the link once per result instead of twice."""
    return right(rate, ahead, count, ratio, np.asarray(link) / 2)


def unlimited(right: Any, rate: Any, ahead: Any, count: Any, *more: Any) -> Any:
    """Let no pass wait for a replica."""
    return right(rate, ahead, 1000, *more)


def replicas_unlimited(right: Any, ahead: int, verifiers: int, tokens: int, cost: UnitCost) -> Any:
    return right(ahead, tokens, tokens, cost)


def a_link_once(right: Any, ahead: int, verifiers: int, tokens: int, cost: UnitCost) -> Any:
    return right(ahead, verifiers, tokens, replace(cost, link=cost.link / 2))


def narrow(right: Any, ahead: int, verifiers: int, tokens: int, cost: UnitCost) -> Any:
    """Price every pass as one over a single token."""
    return right(ahead, verifiers, tokens, replace(cost, verify_cost=None))


def stopped_unpaid(right: Any, ahead: int, verifiers: int, tokens: int, cost: UnitCost) -> Any:
    """Charge no unit-time for passes that a rejection stops."""
    return right(ahead, verifiers, tokens, cost)._replace(busy=right(ahead, 1, tokens, cost).busy)


def never_stopped(right: Any, speculation: Any, *, at_once: bool) -> Any:
    """Stop drafting alone."""
    if len(speculation.guesses) < speculation.limit:
        yield Stop((speculation.drafting[-1],))


def no_further_births(patch: pytest.MonkeyPatch) -> None:
    """Let the counter finish a pass at once although another process begins at the same moment."""
    patch.setattr(Interpreter, "born_next", property(lambda _: 0, lambda *_: None), raising=False)


def always_stopped_at_once(right: Any, speculation: Any, *, at_once: bool) -> Any:
    """Stop the replicas without a link time."""
    return (yield from right(speculation, at_once=True))


def one_by_one(right: Any, speculation: Any, number: int) -> Any:
    """Send a pass only when the one before has been processed."""
    if number <= len(speculation.homes):
        yield from right(speculation, number)


def one_by_one_after(right: Any, speculation: Any, sequence: Any, stop: Any) -> Generator[Any, Any, bool]:
    """Send the next pass after each result, as if there were a single replica."""
    on = yield from right(speculation, sequence, stop)
    number = len(speculation.homes)
    if on and number not in speculation.passes:
        yield from speculation._verify_if_ready(number)
    return bool(on)


def serial(patch: pytest.MonkeyPatch) -> None:
    """Make passes one by one, on any number of replicas."""
    with_fault(one_by_one, algorithm.Speculation, "_verify_if_ready")(patch)
    with_fault(one_by_one_after, algorithm.Speculation, "accepts_next")(patch)


def at_the_end(right: Any, speculation: Any, number: int) -> Generator[Any, Any, Any]:
    """Decide on a drafted token when all others are drafted."""
    for token in range(number, speculation.limit):
        yield Join((speculation.drafting[token],))
    return speculation.guesses[number : number + 1]


def waiting_if_accepted(right: Any, speculation: Any, sequence: Any, stop: Any) -> Generator[Any, Any, bool]:
    """Go on after an accepted pass when all tokens are drafted."""
    on = yield from right(speculation, sequence, stop)
    if on:
        yield from at_the_end(None, speculation, len(speculation.guesses))
    return bool(on)


def without_link(right: Any, unit: int) -> Generator[Any, Any, Any]:
    """Return a result on the unit of its replica."""
    tasks = yield Fork((unit_transfers.no_steps(),), (1,))
    yield Join(tuple(tasks))
    return tasks[0]


def longer_with_replicas(right: Any, speculation: Any, number: int) -> int:
    """Verify one token more per pass for each replica."""
    own = speculation.parameters
    return int(min(number * (own.lookahead + own.verifiers - 1), speculation.limit))


def beyond(right: Any, speculation: Any, number: int) -> int:
    """Use replicas that are not reserved."""
    return int(speculation.first_replica + number)


def on_a_replica(patch: pytest.MonkeyPatch) -> None:
    """Draft on the unit of the first replica."""
    patch.setattr(algorithm, "DRAFT_UNIT", 1)


SPECULATION = algorithm.Speculation
VERIFY, REPLACEMENT, TABLES = (algorithm, "verify"), (concurrent_drafts, "replacement"), (paths, "speculation_tables")
def none_in_flight(right: Any, passes: Any, verifiers: int) -> Any:
    """Count no pass that a rejection stops."""
    return iter(())


def drafted_to_the_end(right: Any, passes: Any) -> Any:
    """Count all draft passes of a speculation that nothing ends."""
    tokens = passes.exists.shape[1]
    return np.broadcast_to((tokens - 1 - np.arange(tokens))[None, :, None], passes.time.shape)


FAULTS: list[tuple[str, str, Fault]] = [
    ("14a", "correction from p", lambda patch: patch.setattr(concurrent_drafts, "replacement", corrected_from_p)),
    ("14a", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "a position on", with_fault(of_the_first_wrong_law, *REPLACEMENT)),
    ("20a", "late", with_fault(later, dsi, "predict")),
    ("20a", "one more", with_fault(plus_one, dsi, "expected_latency")),
    ("20a", "replicas waited for", with_fault(one_fewer, dsi, "needed_verifiers")),
    ("20b", "links once", with_fault(links_once, dsi, "speedup")),
    ("20b", "no pass waits", with_fault(unlimited, dsi, "speedup")),
    ("20c", "late", with_fault(later, dsi, "predict")),
    ("20c", "never stopped", with_fault(never_stopped, SPECULATION, "stop")),
    ("20c", "stopped at once", with_fault(always_stopped_at_once, SPECULATION, "stop")),
    ("20c", "one by one", serial),
    ("20c", "links once", with_fault(a_link_once, finite_dsi, "speculation_tables")),
    ("20c", "narrow", with_fault(narrow, finite_dsi, "speculation_tables")),
    ("20c", "replicas unlimited", with_fault(replicas_unlimited, finite_dsi, "speculation_tables")),
    ("20d", "one by one", serial),
    ("20e", "stopped passes not counted", with_fault(none_in_flight, finite_dsi._SpeculationPasses, "in_flight")),
    ("20e", "drafts counted to the end", with_fault(drafted_to_the_end, finite_dsi._SpeculationPasses, "begun_drafts")),
    ("20e", "never stopped", with_fault(never_stopped, SPECULATION, "stop")),
    ("21a", "longer passes", with_fault(longer_with_replicas, SPECULATION, "last_read")),
    ("21c", "longer passes", with_fault(longer_with_replicas, SPECULATION, "last_read")),
    ("21e", "no way back", with_fault(without_link, algorithm, "returned_to")),
    ("21e", "one by one", serial),
    ("21f", "beyond", with_fault(beyond, SPECULATION, "replica")),
    ("22a", "slow passes", with_fault(plus_one, UnitCost, "forward")),
    ("22a", "decided at the end", with_fault(at_the_end, SPECULATION, "_after")),
    ("22e", "one by one", serial),
    ("22i", "slower", with_fault(tenth_slower, dsi, "speedup")),
    ("28a", "draft on a replica", on_a_replica),
    ("28d", "links once", with_fault(a_link_once, *TABLES)),
    ("28d", "stopped passes unpaid", with_fault(stopped_unpaid, *TABLES)),
    ("28d", "narrow", with_fault(narrow, *TABLES)),
    ("28d", "replicas unlimited", with_fault(replicas_unlimited, *TABLES)),
    ("28d", "stopped at once", with_fault(always_stopped_at_once, SPECULATION, "stop")),
    ("28e", "links once", with_fault(a_link_once, *TABLES)),
    ("28h", "all kept", with_fault(all_kept, *VERIFY)),
    ("28i", "births forgotten", no_further_births),
    ("29a", "waiting if accepted", with_fault(waiting_if_accepted, SPECULATION, "accepts_next")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("dsi", number, fault, monkeypatch)
