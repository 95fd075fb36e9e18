"""Context budgets by method: bounds of times, the text that models of theorems see, and budgets of the right model."""

from fractions import Fraction
from typing import Any

import pytest

from model.methods import registry
from model.methods.speculative import algorithm as speculative
from model.methods.ssd import algorithm as ssd
from sim.theorems.of_methods import budgets_by_method
from sim.theorems.of_methods.budgets_by_method import DRAFTING, THREE_MODELS, cost, parameters_of
from sim.theorems.of_methods.ssd import in_turn
from sim.theorems.output_law import law_of_model, law_of_text


def example(name: str, small: int | None, medium: int | None = None) -> dict[str, Any]:
    return {
        "method": name, "accept": [True, False, True, True, False, True], "medium_accept": [False, True, True, True, False, True],
        "draft_length": 3, "slow": False, "deep": True, "prompt": 4000, "context_budget": small, "medium_context_budget": medium,
    }  # fmt: skip


@pytest.mark.parametrize("name", DRAFTING)
def test_bounds_of_times_are_those_of_limited_drafts(name: str) -> None:
    times = []
    for budget in (None, 64):
        x = example(name, budget, budget)
        method = registry.method(DRAFTING[name].method)
        assert method.slowest is not None
        bound, _ = method.slowest(parameters_of(x), len(x["accept"]), cost(x))
        assert budgets_by_method.play(x).latency <= bound * (1 + 1e-12)
        times.append(bound)
    assert times[1] < times[0]


@pytest.mark.parametrize("name", THREE_MODELS)
def test_each_smaller_model_has_its_own_budget(name: str) -> None:
    """Positions that both attend to: a budget of one of them changes nothing for the other."""
    longer = {"prompt": 0, "accept": [True, True, False, True] * 3, "medium_accept": [True, False, True, True] * 3}
    accounts = [
        budgets_by_method.play({**example(name, *each), **longer}).account.totals() for each in ((2, None), (None, 1), (2, 1))
    ]
    small, medium, both = ([each.by_model[role].attended for role in ("draft", "medium")] for each in accounts)
    assert both == [small[0], medium[1]]
    assert small[0] < medium[0]
    assert medium[1] < small[1]


@pytest.mark.parametrize("method", ["speculative", "ssd"])
def test_models_of_theorems_see_what_a_pass_with_a_budget_reads(method: str) -> None:
    seen: set[tuple[int, ...]] = set()

    def draft(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        seen.add(text)
        return Fraction(1, 2), Fraction(1, 2)

    def target(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        assert text[:3] == (0, 1, 0)
        return Fraction(1, 3), Fraction(2, 3)

    if method == "ssd":
        own = ssd.Parameters(1, 1, 1, sampled=True, context_budget=2)
        law_of_text(lambda: in_turn(ssd.decode(own, [0, 1, 0], 4)), {"target": target, "draft": draft}, [0, 1, 0], 4)
    else:
        given = speculative.Parameters(1, 2, sampled=True, context_budget=2)
        law_of_text(lambda: speculative.decode(given, [0, 1, 0], 3), {"target": target, "draft": draft}, [0, 1, 0], 3)
    # A sink, the latest position and the tokens of the pass: a preparation also reads the drafted token.
    assert {len(text) for text in seen} == ({3, 4} if method == "ssd" else {3})
    assert {text[0] for text in seen} == {0}


@pytest.mark.parametrize("budget", [1, 2, 3, None])
def test_theorems_limit_every_pass_of_ssd(budget: int | None) -> None:
    """The draft's distribution depends on how many positions its pass reads: the budgets have different drafts."""
    lengths: set[int] = set()

    def draft(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        lengths.add(len(text))
        return Fraction(len(text), len(text) + 2), Fraction(2, len(text) + 2)

    def target(text: tuple[int, ...]) -> tuple[Fraction, ...]:
        return Fraction(1 + len(text), 9), Fraction(8 - len(text), 9)

    own = ssd.Parameters(1, 2, 1, sampled=True, context_budget=budget)
    prompt = [0, 1, 0, 1]
    found = law_of_text(lambda: in_turn(ssd.decode(own, prompt, 2)), {"target": target, "draft": draft}, prompt, 2)
    assert found == law_of_model(target, prompt, 2)
    most = len(prompt) + 2 if budget is None else budget + 1 + own.draft_length
    assert max(lengths) <= most
