"""Theorems on self-speculative decoding: expected verdicts, and faults that refute each theorem."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.methods.amusd import algorithm as amusd
from model.methods.dsi import algorithm as dsi
from model.methods.hierarchical import algorithm as hierarchical
from model.methods.long_context import LongContextRounds
from model.methods.pearl import algorithm as pearl
from model.methods.self_speculative import algorithm, paths
from model.methods.self_speculative import theory as self_speculative
from model.methods.speculative import algorithm as speculative
from model.methods.ssd import algorithm as ssd
from model.steps import LayerSpan
from sim.theorems import select
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import (
    Fault,
    assert_fails_on_small_example,
    assert_fault_shows,
    verdict_tests,
    with_fault,
)

OWN = select("self_speculative")
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


# --- Faults ---


def all_kept(right: Any, out: Any, guesses: Any, sampled: bool, first: Any) -> Any:
    """Accept all drafted tokens unread."""
    kept, token = yield from right(out, guesses, sampled, first)
    return (len(guesses), guesses[-1].token) if guesses else (kept, token)


def one_less(right: Any, out: Any, guesses: Any, sampled: bool, first: Any) -> Any:
    """Drop the last accepted token for the target's own."""
    kept, token = yield from right(out, guesses, sampled, first)
    return (kept - 1, guesses[kept - 1].token) if kept else (kept, token)


def two_are_none(right: Any, out: Any, guesses: Any, sampled: bool, first: Any) -> Any:
    """Keep nothing but the first token where exactly two are accepted."""
    kept, token = yield from right(out, guesses, sampled, first)
    return (0, guesses[0].token) if kept == 2 else (kept, token)


def a_position_on(right: Any, out: Any, guesses: Any, sampled: bool, first: int) -> Any:
    """Test every token against the distribution one position later."""
    return (yield from right(out, guesses, sampled, min(first + 1, -1)))


def through_all_layers(patch: pytest.MonkeyPatch) -> None:
    """Draft with all layers but the last."""
    patch.setattr(algorithm.Parameters, "early", property(lambda own: LayerSpan(0, own.layers - 1)))
    patch.setattr(algorithm.Parameters, "late", property(lambda own: LayerSpan(own.layers - 1, own.layers)))


def middle_run(patch: pytest.MonkeyPatch) -> None:
    """Skip no layers where the skipped ones begin with the first."""
    right = algorithm.Parameters.early.fget
    patch.setattr(algorithm.Parameters, "early", property(
        lambda own: LayerSpan(0, own.exit_layer) if own.first_skipped == 0 else right(own)
    ))  # fmt: skip


def always_again(right: Any, parameters: Any, sequence: Any, guesses: Any) -> Any:
    """Run all layers again over all tokens."""
    again = algorithm.Parameters(parameters.layers, parameters.exit_layer, parameters.draft_length, False)
    return (yield from right(again, sequence, guesses))


def never_drafts(right: Any, parameters: Any, sequence: Any, length: int) -> Any:
    return (yield from right(parameters, sequence, 0))


def without_the_last(right: Any, parameters: Any, cost: Any, *, tokens: int = 1) -> Any:
    """Forget that the last drafted token passes the first layers too."""
    found = right(parameters, cost, tokens=tokens)
    return found._replace(time=found.time - 0.25, busy=found.busy - 0.25)


def always_reused(right: Any, draft_length: Any, exit_share: Any, *, reuse: bool = True, verify_cost: Any = None) -> Any:
    return right(draft_length, exit_share, verify_cost=verify_cost)


def late_verification(right: Any, draft_length: Any, exit_share: Any, *, reuse: bool = True, verify_cost: Any = None) -> Any:
    """Forget the pass of the last token through the first layers."""
    return right(draft_length, exit_share, reuse=reuse, verify_cost=verify_cost) - (exit_share if reuse else 0)


def more_often(right: Any, acceptance_rate: Any, exit_share: Any) -> Any:
    return right(acceptance_rate, 0.9 * exit_share)


def first_exit(right: Any, *args: Any, **named: Any) -> Any:
    return right(*args, **named)._replace(exit_layer=1)


def half(right: Any, *args: Any, **named: Any) -> Any:
    return right(*args, **named) / 2


def whole_context(right: Any, parameters: Any, cost: Any, *tokens: int, **more: int) -> Any:
    """Price drafts as if they read the whole context."""
    return right(replace(parameters, context_budget=1_000_000), cost, *tokens, **more)


def a_hundredth_more(right: Any, own: Any, at: Any, budget: Any = None) -> Any:
    """Read a hundredth more of a context that is limited."""
    return right(own, at, budget) * (1.0 if budget is None else 1.01)


def unpriced(patch: pytest.MonkeyPatch) -> None:
    """Price drafts of formulas and paths as if they read the whole context."""
    patch.setattr(PassSeconds, "within_budgets", lambda own, budgets: own)


def unlimited(right: Any, *args: Any, **named: Any) -> Any:
    """Draft with passes that read the whole context."""
    return replace(right(*args, **named), context_budget=None)


def verified_in_one_position(right: Any, *args: Any) -> Any:
    """Verify with one cached position."""
    return right(*args)._replace(context_budget=1)


def longer_with_a_budget(right: Any, own: Any, at: Any, budget: Any = None) -> Any:
    return right(own, at, None) + (budget is not None)


def instead(name: str, wrong: Callable[[LongContextRounds], Any]) -> Fault:
    """Replace a property of the closed form."""
    return lambda patch: patch.setattr(LongContextRounds, name, property(wrong))


LIMIT = LongContextRounds.limit.fget  # type: ignore[attr-defined]
THEORY = self_speculative
FAULTS: list[tuple[str, str, Fault]] = [
    ("14a", "a position on", with_fault(a_position_on, algorithm, "accept_or_reject")),
    ("14b", "all kept", with_fault(all_kept, algorithm, "accept_or_reject")),
    ("20a", "last forgotten", with_fault(late_verification, THEORY, "round_time")),
    ("20b", "more often", with_fault(more_often, THEORY, "ever_pays")),
    ("20d", "always reused", with_fault(always_reused, THEORY, "round_time")),
    ("20f", "the first exit", with_fault(first_exit, THEORY, "best_exit")),
    ("20g", "last forgotten", with_fault(without_the_last, THEORY, "round_prices")),
    ("20g", "one less", with_fault(one_less, algorithm, "accept_or_reject")),
    ("20g", "never drafts", with_fault(never_drafts, algorithm, "draft")),
    ("20h", "half", with_fault(half, THEORY, "speedup")),
    ("20i", "half", with_fault(half, UnitCost, "forward")),
    ("20j", "skipped from the first layer on", middle_run),
    ("28d", "last forgotten", with_fault(without_the_last, paths, "round_prices")),
    ("28d", "all layers again", with_fault(always_again, algorithm, "verification")),
    ("28e", "last forgotten", with_fault(without_the_last, paths, "round_prices")),
    ("28h", "all kept", with_fault(all_kept, algorithm, "accept_or_reject")),
    ("28k", "all layers again", with_fault(always_again, algorithm, "verification")),
    ("28k", "another exit", through_all_layers),
    ("28l", "slow layers", with_fault(lambda right, *args: [2 * each for each in right(*args)], UnitCost, "layer_times_of")),
    ("29a", "two are none", with_fault(two_are_none, algorithm, "accept_or_reject")),
    ("58a", "a position on", with_fault(a_position_on, algorithm, "accept_or_reject")),
    ("58b", "all kept", with_fault(all_kept, algorithm, "accept_or_reject")),
    ("58d", "the whole context", with_fault(whole_context, paths, "round_prices")),
    ("58e", "the whole context", with_fault(whole_context, THEORY, "_prices_by_start")),
    ("58f", "a hundredth more", with_fault(a_hundredth_more, PassSeconds, "context")),
    ("58g", "cheaper tokens", instead("rises_with_batch", lambda own: own.draft.fixed > own.target.fixed)),
    ("58h", "drafts of the whole context", instead("read_by_draft", lambda own: own.context)),
    ("58j", "drafts of no context", instead("read_by_draft", lambda own: 0)),
    ("58k", "half", instead("limit", lambda own: LIMIT(own) / 2)),
    ("58l", "drafts of the whole context", instead("read_by_draft", lambda own: own.context)),
    ("58n", "priced as the whole context", unpriced),
    ("58n", "speculative passes over the whole context", with_fault(unlimited, speculative, "draft_model")),
    ("58n", "passes of a medium model over it", with_fault(unlimited, hierarchical, "draft_model")),
    ("58n", "passes of PEARL over it", with_fault(unlimited, pearl, "draft_model")),
    ("58n", "passes of AMUSD over it", with_fault(unlimited, amusd, "draft_model")),
    ("58n", "passes of DSI over it", with_fault(unlimited, dsi, "draft_model")),
    ("58n", "passes of SSD over it", with_fault(unlimited, ssd, "draft_model")),
    ("58o", "a hundredth more", with_fault(a_hundredth_more, PassSeconds, "context")),
    ("58p", "longer with a budget", with_fault(longer_with_a_budget, PassSeconds, "context")),
    ("58r", "verified in one position", with_fault(verified_in_one_position, speculative, "verification_pass")),
    ("58r", "SSD verified in one position", with_fault(verified_in_one_position, ssd, "verification_pass")),
    ("58s", "SSD verified in one position", with_fault(verified_in_one_position, ssd, "verification_pass")),
    ("58s", "verified in one position", with_fault(verified_in_one_position, speculative, "verification_pass")),
]


def test_every_theorem_has_a_refuting_fault() -> None:
    assert {number for number, *_ in FAULTS} == {theorem.number for theorem in OWN if theorem.expect == "holds"}


@pytest.mark.parametrize(("number", "fault"), [pytest.param(n, fault, id=f"{n}-{what}") for n, what, fault in FAULTS])
def test_fault_refutes_theorem(number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault_shows("self_speculative", number, fault, monkeypatch)
