"""Theorems on methods that change the text: expected verdicts, and faults that refute each theorem."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import Lossy
from model.methods import batching
from model.methods.bild import algorithm as bild
from model.methods.bild import finite_bild
from model.methods.bild import paths as bild_paths
from model.methods.bild import theory as bild_formulas
from model.methods.bild.threshold_decisions import Decisions
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import finite_early_exit
from model.methods.early_exit import paths as exit_paths
from model.methods.early_exit import theory as leaving
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.skipdecode import paths as skip_paths
from model.methods.skipdecode import theory as skipping
from model.methods.speculative import theory as speculative
from model.steps import Forward, LayerSpan, Steps
from sim.engine import known_passes
from sim.theorems import select
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import (
    Fault,
    assert_examples_survive_json,
    assert_fails_on_small_example,
    assert_fault_refuted,
    assert_fault_shows,
    fault_parameters,
    plus_one,
    verdict_tests,
    with_fault,
)

METHODS = ("bild", "skipdecode", "early_exit")
OWN = [theorem for method in METHODS for theorem in select(method)]


def named(theorem: Theorem) -> str:
    return f"{theorem.method} {theorem.number}"


EVERY = [pytest.param(theorem, id=named(theorem)) for theorem in OWN]
FALSE = [pytest.param(theorem, id=named(theorem)) for theorem in OWN if theorem.expect == "fails"]


# --- Verdicts ---


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN, named)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


def test_worked_example_of_a_rising_schedule() -> None:
    """Layers 0 and 3, then only 0: layer 3 of the third token lacks the row of the second."""
    cache = Cache()
    cache.write(Forward("target", (0,), 0, LayerSpan(0, 4, gaps=((1, 3),))))
    cache.write(Forward("target", (0,), 1, LayerSpan(0, 4, gaps=((1, 4),))))
    with pytest.raises(RuntimeError, match=r"layers \[3, 4\) at position 2, but they hold \[1\]"):
        cache.write(Forward("target", (0,), 2, LayerSpan(0, 4, gaps=((1, 3),))))


# --- Every theorem can fail ---


def free_when_unsure(right: Any, *args: Any) -> Any:
    """Omit the run in which the small model is unsure."""
    price = right(*args)
    segment = price.segment.copy()
    segment[..., 1, :] = segment[..., 0, :]  # the axis before that of drafted tokens
    return price._replace(segment=segment)


def wasted_runs_forgotten(right: Any, parameters: Any, counts: Any) -> Any:
    """Count segments in which the small model was unsure as those in which it was not."""
    full, stopped = counts.segment[:, 0], counts.segment[:, 1]
    return right(parameters, counts._replace(segment=np.stack([full + stopped, np.zeros_like(stopped)], axis=1)))


def shorter_drafts(right: Any, parameters: Any, model: Any, text: Any, length: int) -> Steps:
    return (yield from right(parameters, model, text, max(length - 1, 0)))


def infinity_is_three(right: Any, record: Any, low: float, high: float, **how: Any) -> Any:
    return right(record, low, min(high, 3.0), **how)


def no_rollbacks(right: Any, fallback: Any, rollback: Any, *rest: Any, **how: Any) -> Any:
    return right(fallback, 0 * np.asarray(rollback), *rest, **how)


def unsure_is_unlikely(right: Any, parameters: Any, tokens: int, decisions: Iterator[Any], *rest: Any) -> Any:
    return right(parameters, tokens, (np.where(tile == 1, np.uint8(2), tile) for tile in decisions), *rest)


def read_once_more(right: Any, *args: Any) -> Steps:
    """Let the small model read the last accepted token a second time."""
    read = yield from right(*args)
    return max(read - 1, 0)


def keeps_the_first(right: Any, parameters: Any, *args: Any) -> Steps:
    """Use a rollback threshold of 1 instead of the given one."""
    return (yield from right(replace(parameters, rollback_threshold=1.0), *args))


def rolls_back_at_the_threshold(right: Any, parameters: Any, *args: Any) -> Steps:
    lower = replace(parameters, rollback_threshold=max(parameters.rollback_threshold or 1.0, 1e-9) * (1 - 1e-12))
    return (yield from right(lower, *args))


def falls_back_at_the_threshold(right: Any, parameters: Any, *args: Any) -> Steps:
    higher = replace(parameters, fallback_threshold=min((parameters.fallback_threshold or 0.0) + 1e-12, 1.0))
    return (yield from right(higher, *args))


def read_too_much(steps: Steps) -> Steps:
    """Let the small model continue from tokens that were rolled back."""
    read = yield from steps
    return read + 1


def decisions_swapped(right: Any, world: Any, prompt: int, layers: int, decisions: Any = (), depths: Any = ()) -> None:
    right(world, prompt, layers, [(2 - decision) % 3 for decision in decisions], depths)


def thresholds_swapped(right: Any, record: Any, low: float, high: float, **how: Any) -> Any:
    return right(record, 1 - low, 7.0 - high if high < 8 else high, **how)


def last_column_forgotten(right: Any, *args: Any) -> Any:
    return tuple(each[:-1] for each in right(*args))


def one_layer_less(right: Any, parameters: Any, budget: int) -> Any:
    return right(parameters, max(budget - 1, parameters.warm_up, 1))


def now_first_now_last(right: Any, parameters: Any, budget: int) -> Any:
    return ((0, parameters.layers - budget),) if budget % 2 else ((budget, parameters.layers),)


def head_forgotten(right: Any, parameters: Any, tokens: Any, law: Any, cost: Any) -> Any:
    return right(parameters, tokens, law, replace(cost, final_head=0.0))


def without_warm_up(right: Any, parameters: Any, budget: int) -> Any:
    return right(replace(parameters, warm_up=0), budget)


def each_sequence_alone(right: Any, parameters: Any, tokens: int) -> Any:
    return right(replace(parameters, sequences=1), tokens)


def code_a_little_lower(right: Any, *args: Any, form: str) -> Any:
    return right(*args, form=form) * (0.99 if form == "code" else 1)


def always_sure(right: Any, *args: Any) -> Steps:
    yield from right(*args)
    return True


def never_when_sure(right: Any, *args: Any) -> Steps:
    return not (yield from right(*args))


def last_sequence_alone(right: Any, out: Any, measure: str, width: int, threshold: float) -> Steps:
    return (yield from right(out, measure, 1, threshold))


def filled_for_nothing(right: Any, owed: Any, at: int, first: int, last: int) -> Steps:
    yield from right(owed, at, first, last)
    for layer in range(first, last):
        for _ in range(9):
            yield Forward("target", (0,), at, LayerSpan(layer, layer + 1, kv_only=True))


def depths_upside_down(right: Any, parameters: Any, tokens: int, depths: Iterator[Any], *rest: Any) -> Any:
    return right(parameters, tokens, (parameters.layers + 1 - tile for tile in depths), *rest)


def always_sure_in_rounds(right: Any, world: Lossy, step: Any) -> Any:
    """No draft of the rounds that are answered together ends with an unsure pass."""
    found = right(world, step)
    return found and [each._replace(unsure=False) for each in found]


FAULTS: list[tuple[str, str, Fault]] = [
    ("bild 18a", "one more", with_fault(plus_one, speculative, "target_runs")),
    ("bild 18b", "wasted runs are free", with_fault(wasted_runs_forgotten, finite_bild.PassCounts, "of")),
    ("bild 18c", "one more", with_fault(plus_one, bild_formulas, "small_runs")),
    ("bild 18c", "no token of the large model", with_fault(lambda right, *args: right(*args) - 1, bild_formulas, "large_inputs")),
    ("bild 18d", "shorter drafts", with_fault(shorter_drafts, bild, "write")),
    ("bild 18e", "shorter drafts", with_fault(shorter_drafts, bild, "write")),
    ("bild 18f", "infinity is three", with_fault(infinity_is_three, Decisions, "decided")),
    ("bild 18g", "threshold of 1", with_fault(keeps_the_first, bild, "_decide")),
    ("bild 18g", "read too much", with_fault(lambda right, *args: read_too_much(right(*args)), bild, "_decide")),
    ("bild 18i", "shorter drafts", with_fault(shorter_drafts, bild, "write")),
    ("bild 18j", "rolls back at the threshold", with_fault(rolls_back_at_the_threshold, bild, "_decide")),
    ("bild 18j", "falls back at the threshold", with_fault(falls_back_at_the_threshold, bild, "write")),
    ("bild 19a", "one more", with_fault(plus_one, bild_formulas, "rollback_probability")),
    ("bild 19b", "memory knows no rollbacks", with_fault(no_rollbacks, bild_formulas, "memory_factor")),
    ("bild 28a", "unsure is unlikely", with_fault(unsure_is_unlikely, bild_paths, "segments")),
    ("bild 28a", "wasted runs are free", with_fault(free_when_unsure, bild_paths, "prices")),
    ("bild 28b", "read once more", with_fault(read_once_more, bild, "_decide")),
    ("bild 28c", "own token of the first", with_fault(lambda right, out, kept, guesses: right(out, 0, guesses), bild, "_own")),
    ("bild 28n", "always sure", with_fault(always_sure_in_rounds, Lossy, "draft_rounds")),
    ("bild 29a", "decisions swapped", with_fault(decisions_swapped, Lossy, "__init__")),
    ("bild 29b", "thresholds swapped", with_fault(thresholds_swapped, Decisions, "decided")),
    ("bild 29c", "thresholds swapped", with_fault(thresholds_swapped, Decisions, "decided")),
    ("skipdecode 28a", "no head in the formula", with_fault(head_forgotten, skipping, "predict")),
    ("skipdecode 28a", "paths without warm-up", with_fault(without_warm_up, skip_paths, "_run")),
    ("skipdecode 28a", "last column forgotten", with_fault(last_column_forgotten, batching.StaticBatching, "columns")),
    ("skipdecode 28b", "last column forgotten", with_fault(last_column_forgotten, batching.StaticBatching, "columns")),
    ("skipdecode 28c", "each sequence alone", with_fault(each_sequence_alone, batching.StaticBatching, "batches")),
    ("skipdecode 28n", "counted once", with_fault(
        lambda right, passes, width, _, positions: right(passes, width, 1, positions), known_passes.KnownPass, "count_several",
    )),
    ("skipdecode 30a", "rising", with_fault(lambda right, *args, **how: right(*args, **how)[::-1], skipping, "exit_layers")),
    ("skipdecode 30a", "now first, now last layers", with_fault(now_first_now_last, skipdecode, "skipped")),
    ("skipdecode 30b", "one more", with_fault(plus_one, skipping, "mean_layers")),
    ("skipdecode 30c", "rising", with_fault(lambda right, *args: right(*args)[::-1], skipdecode, "schedule")),
    ("skipdecode 30d", "nothing is required", with_fault(lambda right, cache, step: None, Cache, "_require_spans")),
    ("skipdecode 30e", "one layer less", with_fault(one_layer_less, skipdecode, "skipped")),
    ("skipdecode 30h", "begins after the prompt", with_fault(
        lambda right, given, count: right(replace(given, decay_prompt=False), count), skipdecode, "schedule",
    )),
    ("skipdecode 30h", "prompt rises", with_fault(lambda right, *args: right(*args)[::-1], skipdecode, "_whole_sequence")),
    ("early_exit 28a", "upside down", with_fault(depths_upside_down, exit_paths, "decodings")),
    ("early_exit 28b", "last column forgotten", with_fault(last_column_forgotten, batching.StaticBatching, "columns")),
    ("early_exit 30h", "rising", with_fault(lambda right, *args, **how: 1 - right(*args, **how), leaving, "decayed_threshold")),
    ("early_exit 30i", "one form lower", with_fault(code_a_little_lower, leaving, "decayed_threshold")),
    ("early_exit 30k", "upside down", with_fault(lambda right, seen, level: right(seen, 1 - level), leaving, "exits")),
    ("early_exit 30l", "always sure", with_fault(always_sure, early_exit, "_sure")),
    ("early_exit 30m", "never when sure", with_fault(never_when_sure, early_exit, "_sure")),
    ("early_exit 30n", "last sequence alone", with_fault(last_sequence_alone, early_exit, "_sure")),
    ("early_exit 30o", "filled for nothing", with_fault(filled_for_nothing, early_exit, "_backfill")),
    ("early_exit 30p", "one more", with_fault(plus_one, finite_early_exit, "times_by_depth")),
]  # fmt: skip


def test_every_theorem_has_a_refuting_fault() -> None:
    assert list(dict.fromkeys(name for name, *_ in FAULTS)) == [named(theorem) for theorem in OWN if theorem.expect == "holds"]


@pytest.mark.parametrize(("name", "fault", "small"), fault_parameters(FAULTS))
def test_fault_refutes_theorem(name: str, fault: Fault, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method, number = name.split()
    (assert_fault_refuted if small else assert_fault_shows)(method, number, fault, monkeypatch)


# --- Examples ---


@pytest.mark.parametrize("theorem", EVERY)
def test_examples_survive_json(theorem: Theorem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_examples_survive_json(theorem, monkeypatch)
