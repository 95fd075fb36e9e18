"""Theorems on SSD: expected verdicts, and faults that refute each theorem."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.methods.ssd import algorithm, fan_out, finite_ssd, paths
from model.methods.ssd import theory as ssd
from model.outcomes.position_ranks import PositionRankRates
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

OWN = select("ssd")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def all_kept(right: Any, out: Any, guesses: Any, sampled: bool, first: Any = None) -> Any:
    """Accept all drafted tokens."""
    _, token = yield from right(out, guesses, sampled, first)
    return len(guesses), token


def one_less(right: Any, out: Any, guesses: Any, sampled: bool, first: Any = None) -> Any:
    """Verify all but the last drafted token."""
    return (yield from right(out, guesses[:-1], sampled, -len(guesses) - 1))


def corrected_from_p(right: Any, out: Any, guesses: Any, sampled: bool, first: Any = None) -> Generator[Any, Any, Any]:
    """Draw the token after a rejection from p instead of the residual."""
    kept, token = yield from right(out, guesses, sampled, first)
    return kept, ((yield Read("sample", out, kept - len(guesses) - 1)) if sampled and kept < len(guesses) else token)


def likeliest_in_branches(right: Any, model: Any, branches: Any) -> Any:
    """Take the draft's likeliest tokens in branches, although they count as sampled."""
    yield from right(replace(model, sampled=False) if model.sampled else model, branches)


def of_another_branch(right: Any, model: Any, branches: Any) -> Any:
    """Give the first and the last branch each other's tokens."""
    yield from right(model, branches)
    if len(branches) > 1:
        first, last = branches[0].guesses, branches[-1].guesses
        first[:], last[:] = last[:], first[:]


def short_branches(right: Any, model: Any, branches: Any) -> Any:
    """Leave out the last token of every branch."""
    yield from right(model, branches)
    for branch in branches:
        del branch.guesses[-1:]


def drafted_as_candidate(right: Any, model: Any, sequence: Any, guesses: Any, plan: Any) -> Any:
    """Prepare one branch less after every rejection: the rejected token stays a candidate."""
    fewer = [(max(count - (accepted < len(guesses)), 1) if count else 0, length) for accepted, (count, length) in enumerate(plan)]
    return (yield from right(model, sequence, guesses, fewer))


def nothing_prepared(right: Any, model: Any, sequence: Any, guesses: Any, plan: Any) -> Any:
    """Forget all prepared drafts."""
    _, process = yield from right(model, sequence, guesses, plan)
    return {}, process


def later(right: Any, *args: Any) -> Any:
    found = right(*args)
    return replace(found, latency=found.latency + 1)


def more_spread(right: Any, *args: Any) -> Any:
    found = right(*args)
    return replace(found, latency_variance=2 * found.latency_variance)


def tables(**changes: Any) -> Any:
    """Return a fault of the tables: a function of them for each field."""

    def changed(right: Any, parameters: Any, tokens: int, cost: Any) -> Any:
        found = right(parameters, tokens, cost)
        return found._replace(**{name: change(found) for name, change in changes.items()})

    return changed


def a_link_once(right: Any, parameters: Any, tokens: int, cost: UnitCost) -> Any:
    return right(parameters, tokens, replace(cost, link=cost.link / 2))


def waits_at_the_end(found: Any) -> Any:
    """The last round waits for its preparation."""
    return np.stack([found.time[0], found.time[0]])


def completes_at_the_end(found: Any) -> Any:
    """The end of the sequence does not stop the preparation."""
    return np.stack([found.busy[0], found.busy[0]])


def rejected_token_counts(right: Any, parameters: Any, rates: Any, drafted: Any) -> Any:
    """Count ranks from 1 after a rejection too."""
    found = right(parameters, rates, drafted).copy()
    for start, longest in enumerate(drafted.tolist()):
        for accepted in range(longest):
            if start + accepted < len(drafted) - 2:
                end = found[start, accepted].sum(axis=0)
                reach = np.array([np.prod(table[start : start + accepted, 0]) for table in rates])
                hit = reach * [table[start + accepted, 1 : parameters.fan_outs[accepted]].sum() for table in rates]
                found[start, accepted] = hit, end - hit
    return found


def on_the_target_s_unit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(algorithm, "DRAFT_UNIT", 0)


def scaled(right: Any, *args: Any, **more: Any) -> Any:
    return 1.01 * right(*args, **more)


def one_more_first(right: Any, law: Any, longest: int, budget: int) -> Any:
    """Move a branch from the position with most to the last."""
    found = [*right(law, longest, budget)]
    most = found.index(max(found))
    if found[most] > 1 and most < longest:
        found[most], found[-1] = found[most] - 1, found[-1] + 1
    return tuple(found)


def all_equal(right: Any, a: float, r: float, longest: int, budget: float) -> Any:
    return np.full(longest + 1, budget / (longest + 1))


def without_last(right: Any, a: float, r: float, longest: int, budget: float) -> Any:
    """Give the whole draft the weight of a rejection."""
    shares = a ** (np.arange(longest + 1) / (1 + r))
    return budget * shares / shares.sum()


def ranks_from_one(right: Any, law: PositionRankRates, fan_outs: Any) -> float:
    alpha = float(law.rates[0])
    return sum(alpha**accepted * float(law.rates[:count].sum()) for accepted, count in enumerate(fan_outs))


ACCEPT, TABLES, PATHS = (algorithm, "accept_or_reject"), (finite_ssd, "round_tables"), (paths, "round_tables")
PREPARE, BRANCH = (algorithm, "_preparing"), (algorithm, "_branching")
def always_begun(right: Any, began: Any, stop: Any) -> Any:
    """Count passes that would begin after the end of the sequence."""
    return np.ones_like(right(began, stop))


FAULTS: list[tuple[str, str, Fault]] = [
    ("60a", "all kept", with_fault(all_kept, *ACCEPT)),
    ("60a", "correction from p", with_fault(corrected_from_p, *ACCEPT)),
    ("60a", "likeliest in branches", with_fault(likeliest_in_branches, *BRANCH)),
    ("60b", "all kept", with_fault(all_kept, *ACCEPT)),
    ("61a", "a link once", with_fault(a_link_once, *PATHS)),
    ("61a", "waits at the end", with_fault(tables(time=waits_at_the_end), *PATHS)),
    ("61a", "completes at the end", with_fault(tables(busy=completes_at_the_end), *PATHS)),
    ("61a", "drafted token as candidate", with_fault(drafted_as_candidate, *PREPARE)),
    ("61a", "nothing prepared", with_fault(nothing_prepared, *PREPARE)),
    ("61a", "free misses", with_fault(tables(missed_time=lambda found: 0 * found.missed_time), *PATHS)),
    ("61b", "a link once", with_fault(a_link_once, *PATHS)),
    ("61b", "nothing prepared", with_fault(nothing_prepared, *PREPARE)),
    ("61c", "late", with_fault(later, ssd, "predict")),
    ("61c", "more spread", with_fault(more_spread, ssd, "predict")),
    ("61c", "waits at the end", with_fault(tables(time=waits_at_the_end), *TABLES)),
    ("61c", "completes at the end", with_fault(tables(busy=completes_at_the_end), *TABLES)),
    ("61c", "rank of the rejected token", with_fault(rejected_token_counts, finite_ssd, "round_ends")),
    ("61c", "nothing prepared", with_fault(nothing_prepared, *PREPARE)),
    ("61f", "the last preparation completed", with_fault(always_begun, finite_ssd, "_has_begun")),
    ("61f", "rank of the rejected token", with_fault(rejected_token_counts, finite_ssd, "round_ends")),
    ("61f", "short branches", with_fault(short_branches, *BRANCH)),
    ("61d", "all kept", with_fault(all_kept, *ACCEPT)),
    ("61e", "one unit", on_the_target_s_unit),
    ("62a", "short branches", with_fault(short_branches, *BRANCH)),
    ("62a", "tokens of another branch", with_fault(of_another_branch, *BRANCH)),
    ("62a", "one token less", with_fault(one_less, *ACCEPT)),
    ("62c", "nothing prepared", with_fault(nothing_prepared, *PREPARE)),
    ("62c", "drafted token as candidate", with_fault(drafted_as_candidate, *PREPARE)),
    ("62d", "one token less", with_fault(one_less, *ACCEPT)),
    ("62f", "short branches", with_fault(short_branches, *BRANCH)),
    ("62h", "short branches", with_fault(short_branches, *BRANCH)),
    ("63a", "too fast", with_fault(scaled, ssd, "speedup")),
    ("63a", "rank of the rejected token", with_fault(ranks_from_one, ssd, "hit_probability")),
    ("63a", "one more", with_fault(plus_one, ssd, "expected_tokens")),
    ("63b", "slow rounds", with_fault(scaled, ssd, "round_time")),
    ("63d", "slow rounds", with_fault(scaled, ssd, "round_time")),
    ("63d", "too low", with_fault(lambda right, *args: right(*args) / 2, ssd, "break_even_hit_rate")),
    ("63e", "slow rounds", with_fault(scaled, ssd, "round_time")),
    ("64a", "a branch moved", with_fault(one_more_first, fan_out, "optimal")),
    ("64b", "equal fan-outs", with_fault(all_equal, fan_out, "geometric")),
    ("64b", "weight of the whole draft", with_fault(without_last, fan_out, "geometric")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("ssd", number, fault, monkeypatch)
