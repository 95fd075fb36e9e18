"""Theorems on AMUSD: expected verdicts, and faults that refute each theorem."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.methods.amusd import algorithm, draft_clock, paths
from model.methods.amusd import theory as amusd
from model.methods.concurrent import concurrent_drafts
from model.steps import Read
from sim.theorems import select
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import (
    Fault,
    assert_fails_on_small_example,
    assert_fault_shows,
    plus_one,
    verdict_tests,
    with_fault,
)

OWN = select("amusd")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def all_kept(right: Any, out: Any, waiting: Any, arriving: Any, sampled: bool) -> Any:
    """Accept all drafted tokens unread."""
    following = yield from arriving
    if following:
        return len(waiting), following[0].token, True
    return (yield from right(out, waiting, arriving, sampled))


def corrected_from_p(guess: Any, out: Any, offset: int, sampled: bool) -> Any:
    """Draw the replacement of a rejected token from p instead of the residual."""
    p = yield Read("probability", out, offset, token=guess.token)
    q = yield Read("probability", guess.output, guess.offset, token=guess.token)
    return None if (yield Read("uniform", out, offset)) < p / q else (yield Read("sample", out, offset))


def a_position_later(right: Any, guess: Any, out: Any, offset: int, sampled: bool) -> Any:
    """Test a token against the distribution one position later, if the pass gives one."""
    return (yield from right(guess, out, min(offset + 1, -1), sampled))


def started_again(right: Any, out: Any, waiting: Any, arriving: Any, sampled: bool) -> Any:
    """Drop the draft after each pass."""
    kept, token, _ = yield from right(out, waiting, arriving, sampled)
    return kept, token, False


def changed(name: str, by: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change one result of a function that returns a record."""

    def change(right: Any, *args: Any, **more: Any) -> Any:
        found = right(*args, **more)
        return replace(found, **{name: by(getattr(found, name))})

    return change


def twice(right: Any, *args: Any, **more: Any) -> Any:
    return 2 * right(*args, **more)


def half(right: Any, *args: Any, **more: Any) -> Any:
    return right(*args, **more) / 2


def not_sent(right: Any, prices: Any, which: Any, time: Any) -> Any:
    """Let messages and tokens arrive at once."""
    return time


def all_arrived(right: Any, clock: Any, which: Any) -> Any:
    """Read one token more than has arrived."""
    found = right(clock, which)
    most = np.minimum(clock.parameters.draft_length - 1, clock.tokens - 1 - found.start)
    return found._replace(waiting=np.minimum(found.waiting + 1, most))


def undelayed(right: Any, clock: Any, which: Any, start: Any, until: Any, arrives: Any) -> Any:
    """Forget the passes that continue rejected tokens."""
    count, work, _ = right(clock, which, start, until, arrives)
    return 0 * count, 0 * work, arrives


def stops_as_passes_end(right: Any, dropped: Any, next_: Any, model: Any, text: Any, stops_passes: bool) -> Any:
    """Stop passes where they should end, and the reverse."""
    return right(dropped, next_, model, text, not stops_passes)


def drafted_twice(right: Any, draft_: Any, model: Any, text: Any) -> Any:
    """Make each draft pass twice."""
    rows = model.rows
    yield from algorithm.draft(model, text, 1)
    model.rows = rows
    return (yield from right(draft_, model, text))


def on_the_target_s_unit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(algorithm, "DRAFT_UNIT", 0)


def never_waits(right: Any, draft_: Any, count: int) -> Any:
    """Wait for one token more."""
    return right(draft_, min(count + 1, draft_.allowed))


VERIFY, CLOCK = (algorithm, "verify"), draft_clock.DraftClock
FAULTS: list[tuple[str, str, Fault]] = [
    ("14a", "correction from p", lambda patch: patch.setattr(concurrent_drafts, "replacement", corrected_from_p)),
    ("14a", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "a position on", with_fault(a_position_later, concurrent_drafts, "replacement")),
    ("22a", "late", with_fault(changed("latency", lambda time: time + 1), amusd, "predict")),
    ("22a", "variance", with_fault(changed("latency_variance", lambda value: value + 1), amusd, "predict")),
    ("22a", "rejected tokens forgotten", with_fault(undelayed, CLOCK, "after")),
    ("22a", "draft started again", with_fault(started_again, *VERIFY)),
    ("22b", "twice", with_fault(twice, amusd, "speedup")),
    ("22c", "one more", with_fault(plus_one, amusd, "speedup")),
    ("22d", "half", with_fault(half, amusd, "free_drafts")),
    ("22f", "no transfers", on_the_target_s_unit),
    ("22g", "stops exchanged", with_fault(stops_as_passes_end, algorithm, "_roll_back")),
    ("22h", "waits for more", with_fault(never_waits, algorithm.UnverifiedDraft, "wait")),
    ("22h", "slow passes", with_fault(plus_one, UnitCost, "forward")),
    ("22o", "rejected tokens forgotten", with_fault(undelayed, CLOCK, "after")),
    ("22o", "no link", with_fault(not_sent, draft_clock.ConcurrentTimes, "sent")),
    ("22o", "draft started again", with_fault(started_again, *VERIFY)),
    ("28a", "one unit", on_the_target_s_unit),
    ("28b", "drafted twice", with_fault(drafted_twice, algorithm, "_drafting")),
    ("28d", "no link", with_fault(not_sent, draft_clock.ConcurrentTimes, "sent")),
    ("28d", "one more token", with_fault(all_arrived, CLOCK, "next_round")),
    ("28d", "rejected tokens forgotten", with_fault(undelayed, CLOCK, "after")),
    ("28d", "stops exchanged", with_fault(stops_as_passes_end, algorithm, "_roll_back")),
    ("28e", "no link", with_fault(not_sent, draft_clock.ConcurrentTimes, "sent")),
    ("28h", "all kept", with_fault(all_kept, *VERIFY)),
    ("28i", "stops exchanged", with_fault(stops_as_passes_end, algorithm, "_roll_back")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}
    assert paths.DraftClock is CLOCK


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("amusd", number, fault, monkeypatch)
