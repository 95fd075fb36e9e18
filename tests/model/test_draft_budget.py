"""Drafts that read a part of the context: times by a step law, memory, and the effect that advice shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.advice import draft_budget
from model.advice.acceptance_draws import constant
from model.advice.draft_choice import DraftChoice
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.engines import kernel_times, law_costs, law_fit, step_law
from model.engines.kernel_times import KernelSource
from model.engines.step_law import StepLaw
from model.hardware import devices, memory_limit
from model.serving.closed_form import ClosedForm, Workload, bound
from model.serving.scheduler import UNITS, ServerSettings
from model.serving.step_prices import NODE, LawPrices

SOURCE = KernelSource("llama-3.1-8b", "h100", draft="llama-3.2-1b", source="roofline")
LAW = law_fit.fit(None, "prior", unit="step_ms", kernels=SOURCE, engine="any")
WHOLE = LawPrices(LAW)
CONTEXTS, BUDGETS, RUNNING = st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 64)


def within(budget: int | None) -> StepLaw:
    """The law with drafts that read at most `budget` positions."""
    return replace(LAW, kernels=replace(SOURCE, draft_context_budget=budget))


# --- A budget of all positions ---


@given(running=RUNNING, context=CONTEXTS, more=st.integers(0, 3000))
@example(running=3, context=900, more=0)  # the nearest node is beyond the budget
def test_budget_of_the_whole_context_changes_no_bit_of_a_pass(running: int, context: int, more: int) -> None:
    positions = running * context
    limited = LawPrices(within(context + more))
    assert limited.draft(running, positions) == WHOLE.draft(running, positions)
    assert limited.draft(running, positions, positions) == WHOLE.draft(running, positions)
    assert within(context + more).draft_seconds(running, context)[0] == LAW.draft_seconds(running, context)[0]


@pytest.mark.parametrize("context", [200, 1000, 8000])
def test_budget_of_the_whole_context_changes_no_bit_of_advice(context: int) -> None:
    choices = [DraftChoice(law, constant(0.7), (1.0, 8.0), (0, 1, 4), context) for law in (LAW, within(context))]
    assert np.array_equal(choices[0].draws, choices[1].draws)
    steady = [law_costs.steady_prices(law, [1, 8], [context] * 2, draws=3).branched(2) for law in (LAW, within(context))]
    assert np.array_equal(*steady)


# --- Smaller budgets ---


@given(running=RUNNING, context=CONTEXTS, budgets=st.tuples(BUDGETS, BUDGETS))
@example(running=1, context=890, budgets=(880, 890))  # the nearest node is below the smaller budget
def test_smaller_budgets_never_make_a_pass_slower(running: int, context: int, budgets: tuple[int, int]) -> None:
    small, large = sorted(budgets)
    positions = running * context
    times = [LawPrices(within(each)).draft(running, positions) for each in (small, large)] + [WHOLE.draft(running, positions)]
    assert times == sorted(times)
    law = [float(within(each).draft_seconds(running, context)[0]) for each in (small, large, None)]
    assert law == sorted(law)


@given(running=st.integers(1, 16), budgets=st.tuples(BUDGETS, BUDGETS), length=st.integers(1, 5))
def test_smaller_budgets_never_lower_throughput_in_closed_form(running: int, budgets: tuple[int, int], length: int) -> None:
    work = Workload(2000.0, 100.0)
    found, most = [], []
    for each in (None, *sorted(budgets, reverse=True)):
        prices = LawPrices(within(each))
        found.append(ClosedForm(prices, 1 + length / 2, length, length, work).at_concurrency(running).output_tokens_per_s)
        most.append(bound(prices, [0.7] * length, running, work, lambda tokens: tokens))
    assert found == sorted(found)
    assert most == sorted(most)


@given(running=RUNNING, context=st.integers(1, 5000), budget=st.integers(1, 5000))
def test_a_limited_pass_takes_the_time_of_that_context(running: int, context: int, budget: int) -> None:
    """Within the interpolation between nodes, which a roofline makes small, and the rounding of contexts to the nearest node."""
    limited = LawPrices(within(budget)).draft(running, running * context)
    exact = float(LAW.draft_seconds(running, min(context, budget))[0])
    node = float(LAW.draft_seconds(running, NODE)[0] - LAW.draft_seconds(running, 0)[0])
    assert abs(limited - exact) <= 0.51 * node + 1e-3 * exact


def test_sequences_are_limited_one_by_one() -> None:
    """A short and a long sequence: the long one gives up more than the mean context does."""
    prices = LawPrices(within(1000))
    assert prices.draft(2, 200 + 4000, 200 + 1000) < prices.draft(2, 200 + 4000)


def test_a_target_pass_does_not_know_the_budget() -> None:
    mine, whole = within(64), LAW
    assert mine.pass_seconds(8, 4, 5000)[0] == whole.pass_seconds(8, 4, 5000)[0]
    assert mine.draft_seconds(8, 5000)[0] < whole.draft_seconds(8, 5000)[0]
    assert mine.kernels is not None
    assert kernel_times.mixed_seconds(mine.kernels, 8, 1, 5000)[1] == kernel_times.mixed_seconds(SOURCE, 8, 1, 64)[1]


def test_laws_with_a_budget_are_kept_in_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = step_law.load(step_law.write(within(512), tmp_path / "law.json"))
    assert found.kernels == replace(SOURCE, draft_context_budget=512)
    assert "draft_context_budget" not in step_law.text(LAW)  # files of drafts without one stay as they were


@pytest.mark.parametrize(("budget", "draft"), [
    (0, "llama-3.2-1b"), (-3, "llama-3.2-1b"), (2.5, "llama-3.2-1b"), (True, "llama-3.2-1b"), (512, None),
])  # fmt: skip
def test_impossible_budgets_of_kernels(budget: object, draft: str | None) -> None:
    with pytest.raises(ParameterError, match="draft_context_budget"):
        KernelSource("llama-3.1-8b", "h100", draft=draft, draft_context_budget=budget)  # type: ignore[arg-type]


# --- Memory ---


@given(context=st.integers(1, 40_000), budgets=st.tuples(st.integers(1, 40_000), st.integers(1, 40_000)))
def test_smaller_budgets_never_fit_fewer_sequences(context: int, budgets: tuple[int, int]) -> None:
    shape, draft, device = preset("llama-3.1-8b"), preset("llama-3.2-1b"), devices.device("h100")

    def most(budget: int | None) -> int:
        return memory_limit.largest_batch(
            shape, device, context=context, tensor_parallel=1, draft=draft, draft_budget=budget
        )

    small, large = sorted(budgets)
    assert most(small) >= most(large) >= most(None)
    assert most(max(large, context)) == most(None)


@given(blocks=st.integers(0, 500), budget=st.integers(1, 4000), share=st.floats(0, 1), block=st.integers(1, 64))
def test_units_of_blocks(blocks: int, budget: int, share: float, block: int) -> None:
    """All blocks without the draft's share of those beyond its budget, to the rounding of a block's units."""
    own = ServerSettings(block_size=block, draft_context_budget=budget, draft_cache_share=share)
    kept = min(blocks, -(-budget // block))
    units = own.units_for(blocks * block)
    assert units / UNITS == pytest.approx(blocks - (blocks - kept) * share, abs=0.5 * blocks / UNITS)
    assert own.units_of(np.array([blocks, blocks])).tolist() == [units] * 2
    assert own.memory_of(block * blocks) <= block * blocks
    alone = ServerSettings(block_size=block)
    assert alone.units_for(blocks * block) == blocks * alone.block_units


# --- Effect ---


def test_effect_is_that_of_the_law() -> None:
    found = draft_budget.effect(within(512), 8000, [1, 32], 40, 30)
    assert found is not None
    assert found.pass_seconds == tuple(LAW.draft_seconds([1, 32], 512)[0].tolist())
    assert found.whole_pass_seconds == tuple(LAW.draft_seconds([1, 32], 8000)[0].tolist())
    row = found.document()["by_batch"][1]
    limited, whole = (1e3 * each[1] for each in (found.pass_seconds, found.whole_pass_seconds))
    assert row == {"batch": 32, "draft_pass_ms": limited, "draft_pass_ms_without": whole}
    assert draft_budget.effect(LAW, 8000, [1], 40, 40) is None
    assert draft_budget.effect(step_law.load("sglang-qwen3-235b-a22b"), 8000, [1], None, None) is None
