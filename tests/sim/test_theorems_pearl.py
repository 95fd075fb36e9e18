"""Theorems on PEARL: expected verdicts, and faults that refute each theorem."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.methods.concurrent import concurrent_drafts
from model.methods.pearl import algorithm, paths
from model.methods.pearl import theory as pearl
from model.methods.pearl.finite_pearl import KEPT
from model.steps import Fork, Join, Read
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

OWN = select("pearl")
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


def never_on(right: Any, out: Any, waiting: Any, arriving: Any, sampled: bool) -> Any:
    """Drop the draft in progress in every round, so that only pre-verify occurs."""
    kept, token, _ = yield from right(out, waiting, arriving, sampled)
    return kept, token, False


def first_alone(right: Any, out: Any, waiting: Any, arriving: Any, sampled: bool) -> Any:
    """Emit only the first token of a draft that is accepted in full."""
    kept, token, goes_on = yield from right(out, waiting, arriving, sampled)
    return (0, waiting[0].token, False) if goes_on and waiting else (kept, token, goes_on)


def corrected_from_p(guess: Any, out: Any, offset: int, sampled: bool) -> Generator[Any, Any, int | None]:
    """Draw the replacement of a rejected token from p instead of the residual."""
    p = yield Read("probability", out, offset, token=guess.token)
    q = yield Read("probability", guess.output, guess.offset, token=guess.token)
    return None if (yield Read("uniform", out, offset)) < p / q else (yield Read("sample", out, offset))


def of_the_first_wrong_law(right: Any, guess: Any, out: Any, offset: int, sampled: bool) -> Any:
    """Test a token against the distribution one position later, if the pass gives one."""
    return (yield from right(guess, out, min(offset + 1, -1), sampled))


def later(right: Any, *args: Any) -> Any:
    found = right(*args)
    return replace(found, latency=found.latency + 1)


def sooner(right: Any, *args: Any) -> Any:
    found = right(*args)
    return replace(found, latency=found.latency / 2)


def a_link_once(right: Any, length: int, tokens: int, cost: UnitCost, *, lockstep: bool) -> Any:
    """Charge the link once per round instead of twice."""
    return right(length, tokens, replace(cost, link=cost.link / 2), lockstep=lockstep)


def longest_instead(right: Any, length: int, tokens: int, cost: UnitCost, *, lockstep: bool) -> Any:
    """Charge the draft and the pass in sequence."""
    found = right(length, tokens, cost, lockstep=lockstep)
    return found._replace(time=found.busy)


def as_in_lockstep(right: Any, length: int, tokens: int, cost: UnitCost, *, lockstep: bool) -> Any:
    """Let every round wait for its draft."""
    return right(length, tokens, cost)


def stopped_at_once(right: Any, length: int, tokens: int, cost: UnitCost, *, lockstep: bool) -> Any:
    """Stop rejected drafts one link time too early."""
    found = right(length, tokens, cost, lockstep=lockstep)
    rejected = np.maximum(found.busy[:KEPT] - (0 if lockstep else cost.link), 0)
    return found._replace(busy=np.concatenate([rejected, found.busy[KEPT:]]))


def first_at_last(
    right: Any, model: Any, text: Any, length: int, last: Any, running: Any
) -> Generator[Any, Any, tuple[list[Any], Any]]:
    """Send the first token only when the others are drafted."""
    yield last.stop()
    drafted = yield from algorithm.draft(model, text, 1)
    if length > 1:
        rest = algorithm._drafting(model, [*text, drafted[0].token], length - 1)
        running.going_on = yield Fork((rest,), (algorithm.DRAFT_UNIT,))
        yield Join(tuple(running.going_on))
    return drafted, (yield from algorithm.returned_to(algorithm.TARGET_UNIT))


def never_stopped(right: Any, model: Any, text: Any, length: int, last: Any, running: Any) -> Any:
    """Never stop the last draft."""
    return (yield from right(model, text, length, algorithm._Draft(None), running))


def rest_forgotten(right: Any, model: Any, text: Any, length: int, last: Any, running: Any) -> Any:
    """Draft nothing after the first token."""
    return (yield from right(model, text, 1, last, running))


def on_the_target_s_unit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(algorithm, "DRAFT_UNIT", 0)


VERIFY, AHEAD = (algorithm, "verify"), (algorithm, "_first_ahead")
def drafts_completed(right: Any, tables: Any, law: Any) -> Any:
    """Count every round as one whose tokens are all accepted."""
    rounds = right(tables, law)
    return np.stack([0 * rounds[0], 0 * rounds[0], rounds.sum(axis=0)])


FAULTS: list[tuple[str, str, Fault]] = [
    ("14a", "correction from p", lambda patch: patch.setattr(concurrent_drafts, "replacement", corrected_from_p)),
    ("14a", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "all kept", with_fault(all_kept, *VERIFY)),
    ("14b", "a position on", with_fault(of_the_first_wrong_law, concurrent_drafts, "replacement")),
    ("20a", "one more", with_fault(plus_one, pearl, "expected_tokens")),
    ("20b", "one more", with_fault(plus_one, pearl, "expected_tokens")),
    ("20d", "late", with_fault(later, pearl, "predict")),
    ("20d", "never stopped", with_fault(never_stopped, *AHEAD)),
    ("20d", "pre-verify alone", with_fault(never_on, *VERIFY)),
    ("20e", "one more", with_fault(plus_one, pearl, "expected_tokens")),
    ("20f", "soon", with_fault(sooner, pearl, "predict")),
    ("20h", "pre-verify alone", with_fault(never_on, *VERIFY)),
    ("20i", "slow passes", with_fault(plus_one, UnitCost, "forward")),
    ("20k", "drafts completed", with_fault(drafts_completed, pearl, "rounds_by_end")),
    ("20k", "never stopped", with_fault(never_stopped, *AHEAD)),
    ("20k", "pre-verify alone", with_fault(never_on, *VERIFY)),
    ("21a", "first token sent at last", with_fault(first_at_last, *AHEAD)),
    ("21c", "first token sent at last", with_fault(first_at_last, *AHEAD)),
    ("21c", "one token alone", with_fault(rest_forgotten, *AHEAD)),
    ("21e", "one token alone", with_fault(rest_forgotten, *AHEAD)),
    ("21f", "first token sent at last", with_fault(first_at_last, *AHEAD)),
    ("21f", "never stopped", with_fault(never_stopped, *AHEAD)),
    ("28a", "one unit", on_the_target_s_unit),
    ("28d", "a link once", with_fault(a_link_once, paths, "round_tables")),
    ("28d", "lock-step", with_fault(as_in_lockstep, paths, "round_tables")),
    ("28d", "stopped a link early", with_fault(stopped_at_once, paths, "round_tables")),
    ("28d", "never stopped", with_fault(never_stopped, *AHEAD)),
    ("28d", "one after the other", with_fault(longest_instead, paths, "round_tables")),
    ("28e", "a link once", with_fault(a_link_once, paths, "round_tables")),
    ("28h", "all kept", with_fault(all_kept, *VERIFY)),
    ("29a", "the first alone", with_fault(first_alone, *VERIFY)),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("pearl", number, fault, monkeypatch)
