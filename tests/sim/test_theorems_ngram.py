"""Theorems on n-gram drafts: expected verdicts, and faults that refute each theorem."""

from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.interpret import simulated_answers, text_lookup
from model.interpret.simulated_answers import World
from model.methods.ngram import algorithm, lookup_rounds, paths
from model.methods.ngram import theory as ngram
from model.methods.speculative.algorithm import DraftedToken
from model.outcomes import lookup_laws
from model.steps import Lookup
from sim.engine import passes_alone
from sim.theorems import select
from sim.theorems.of_methods import ngram as statements
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import (
    Fault,
    assert_fails_on_small_example,
    assert_fault_shows,
    verdict_tests,
    with_fault,
)

OWN = select("ngram")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


def one_token_read(right: Any, passes: Any, _: int, *rest: Any) -> Any:
    """Passes read a single token."""
    return right(passes, 1, *rest)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def a_token_unread(right: Any, model: Any, sequence: Any, guesses: Any, sampled: bool, room: int) -> Any:
    """Accept the first drafted token unread."""
    kept, token = yield from right(model, sequence, guesses, sampled, room)
    return (1, token) if guesses and not kept else (kept, token)


def one_less(right: Any, model: Any, sequence: Any, guesses: Any, sampled: bool, room: int) -> Any:
    """Drop the last accepted token for the target's own."""
    kept, token = yield from right(model, sequence, guesses, sampled, room)
    return (kept - 1, guesses[kept - 1].token) if kept else (kept, token)


def always_one(right: Any, parameters: Any, sequence: Any, room: int, stop: Any) -> Any:
    """Draft the last token again where there is no match."""
    found = yield from right(parameters, sequence, room, stop)
    return found or [DraftedToken(sequence[-1], None)] * (room > 0)


def never_cut(right: Any, parameters: Any, sequence: Any, room: int, stop: Any) -> Any:
    return (yield from right(parameters, sequence, parameters.draft_length, stop))


def never_drafts(right: Any, parameters: Any, sequence: Any, room: int, stop: Any) -> Any:
    return (yield from right(parameters, sequence, 0 if parameters.cut else room, stop))[:0]


def shortest(right: Any, tokens: Any, min_match: int, max_match: int) -> Any:
    return right(tokens, min_match, min_match)


def last_place(right: Any, tokens: Any, min_match: int, max_match: int) -> Any:
    """Take the last of several places."""
    found = right(tokens, min_match, max_match)
    text, length = [*tokens], found.length
    ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
    return found._replace(after=ends[-1]) if length else found


def any_length(right: Any, own: Lookup, match: int) -> int:
    return own.longest


def without_the_last(right: Any, *args: Any) -> Any:
    return right(*args)[:-1]


def wide_of_drafts(right: Any, parameters: Any, cost: Any, *, tokens: int = 1) -> Any:
    """Forget that the pass also covers the token before the draft."""
    found = right(parameters, cost, tokens=tokens)
    time = np.concatenate([found.time[..., :1], found.time[..., :-1]], axis=-1)
    return found._replace(time=time, busy=time)


def costs_more(right: Any, parameters: Any, cost: Any, *, tokens: int = 1) -> Any:
    """Charge a round without a match for a draft."""
    found = right(parameters, cost, tokens=tokens)
    time = found.time + 0.25 * (np.arange(found.time.shape[-1]) == 0)
    return found._replace(time=time, busy=time)


def state_forgotten(right: Any, accepted: Any, numbers: Any) -> Any:
    return right(np.zeros_like(accepted), numbers)


def usual_only(right: Any, number: int, accepted: bool) -> Any:
    return right(number, False)


def never_after_acceptance(right: Any, rounds: Any, laws: Any) -> Any:
    alike = [lookup_laws.Lookups(law.chances[0], law.drafted, law.survival) for law in laws]
    return right(rounds, alike)


def always_cut(right: Any, tokens: int, *rest: Any, cut: bool = True) -> Any:
    return right(tokens, *rest, cut=True)


def without_hits(right: Any, hit_rate: Any, *args: Any, **named: Any) -> Any:
    return right(np.asarray(hit_rate) ** 2, *args, **named)


def no_wider(right: Any, draft_length: Any, verify_cost: Any) -> Any:
    return right(np.maximum(np.asarray(draft_length) - 1, 0), verify_cost)


def slow(right: Any, draft_length: Any, verify_cost: Any) -> Any:
    return right(draft_length, verify_cost) + 0.5


def one_more(right: Any, *args: Any, **named: Any) -> Any:
    return right(*args, **named) + 0.5


def half_share(right: Any, law: Any, **named: Any) -> Any:
    found = right(law, **named)
    return found._replace(tokens=1 + 0.9 * (found.tokens - 1))


def removes_nothing(right: Any, p: Any, q: Any) -> Any:
    return p


def one_survives_less_of_rounds(right: Any, world: World, step: Any) -> Any:
    """Of every round one token less is accepted; further rounds begin as before."""
    return [each._replace(accepted=max(each.accepted - 1, 0)) for each in right(world, step)]


ALGORITHM, THEORY = algorithm, ngram
FAULTS: list[tuple[str, str, Fault]] = [
    ("14a", "a token unread", with_fault(a_token_unread, ALGORITHM, "verify")),
    ("14b", "a token unread", with_fault(a_token_unread, ALGORITHM, "verify")),
    ("14d", "removes nothing", with_fault(removes_nothing, statements, "residual")),
    ("24a", "slow passes", with_fault(slow, THEORY, "_time_of_pass")),
    ("24b", "slow passes", with_fault(slow, THEORY, "_time_of_pass")),
    ("24d", "no wider", with_fault(no_wider, THEORY, "_time_of_pass")),
    ("24e", "wide as the draft", with_fault(wide_of_drafts, THEORY, "round_prices")),
    ("24e", "state forgotten", with_fault(never_after_acceptance, lookup_rounds._Starts, "of")),
    ("24e", "always cut", with_fault(always_cut, lookup_rounds, "moments_of_pairs")),
    ("24e", "one less", with_fault(one_less, ALGORITHM, "verify")),
    ("24e", "never drafts", with_fault(never_drafts, ALGORITHM, "draft")),
    ("24f", "drafts without a match", with_fault(always_one, ALGORITHM, "draft")),
    ("24f", "costs more", with_fault(costs_more, THEORY, "round_prices")),
    ("24h", "one more", with_fault(one_more, THEORY, "accepted_tokens")),
    ("24i", "wide as the draft", with_fault(wide_of_drafts, THEORY, "round_prices")),
    ("24j", "hits squared", with_fault(without_hits, THEORY, "speedup")),
    ("24k", "fewer tokens", with_fault(half_share, THEORY, "round_means")),
    ("28d", "wide as the draft", with_fault(wide_of_drafts, paths, "round_prices")),
    ("28d", "state forgotten in paths", with_fault(state_forgotten, lookup_rounds, "outcomes_after")),
    ("28d", "state forgotten in events", with_fault(usual_only, simulated_answers, "draft_of")),
    ("28d", "never cut", with_fault(never_cut, ALGORITHM, "draft")),
    ("28e", "wide as the draft", with_fault(wide_of_drafts, paths, "round_prices")),
    ("28h", "a token unread", with_fault(a_token_unread, ALGORITHM, "verify")),
    ("28k", "a pass of 2 tokens takes none", with_fault(lambda right, *args: right(*args) / 2, UnitCost, "forward")),
    ("28l", "slow layers", with_fault(lambda right, *args: [2 * each for each in right(*args)], UnitCost, "layer_times_of")),
    ("28n", "one survives less", with_fault(one_survives_less_of_rounds, World, "draft_rounds")),
    ("28n", "one token read", with_fault(one_token_read, passes_alone._AlikePasses, "begun_at")),
    ("29a", "shortest", with_fault(shortest, text_lookup, "longest_match")),
    ("29a", "last place", with_fault(last_place, text_lookup, "longest_match")),
    ("29b", "without the last", with_fault(without_the_last, text_lookup, "answer")),
    ("29b", "never cut", with_fault(never_cut, ALGORITHM, "draft")),
    ("29d", "any length", with_fault(any_length, Lookup, "most")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("ngram", number, fault, monkeypatch)
