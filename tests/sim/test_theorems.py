"""Theorems have the expected verdicts, and a fault in the code that a theorem is about refutes it.

Theorems on Predictive Pipelined Decoding, and the machinery of theorems of all methods.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.database import InMemoryExampleDatabase
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods.ppd import algorithm as ppd
from model.methods.ppd import paths as sampler
from model.methods.ppd import theory as formulas
from model.outcomes import outcome_laws, random_streams
from model.steps import Join, Steps, Stop
from sim.commands.sim_app import app
from sim.engine import events, passes_alone
from sim.theorems import THEOREMS, check, replay, select
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

ROOT = Path(__file__).parents[2]
OWN = select("ppd")
EVERY = [pytest.param(theorem, id=theorem.number) for theorem in OWN]
FALSE = [theorem for theorem in OWN if theorem.expect == "fails"]


# --- Verdicts ---


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


@pytest.mark.parametrize("theorem", [pytest.param(theorem, id=theorem.number) for theorem in FALSE])
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert assert_fails_on_small_example(theorem)["layers"] <= 3


def test_example_of_the_paper_refutes_its_compute_below_half() -> None:
    """d = 12, d' = 4, k = 2: W = 8 + 2 * 4 = 16, not 8."""
    example = {"form": "nested", "layers": 12, "exit_layer": 4, "candidates": 2, "matches": [True] * 6}
    verdict = replay("22f", example, "ppd")
    assert verdict.error == f"compute minus latency: got {16.0 * (12 - 5) + 72 - 32:.1f}, expected {2 * 8 * 6}"
    assert replay("22b", example, "ppd").holds
    assert replay("22d", example, "ppd").holds


# --- Every theorem can fail ---


def match_of_the_last_token(right: Any, d: Any, exit_at: Any, n: Any, p: Any) -> Any:
    return right(d, exit_at, n, p) - (np.asarray(d) - exit_at) * p


def rate_ignored(right: Any, d: Any, exit_at: Any, n: Any, p: Any) -> Any:
    return right(d, exit_at, n, np.zeros_like(p))


def first_one_more(right: Any, *args: Any, **kwargs: Any) -> Any:
    first, *rest = right(*args, **kwargs)
    return first + 1, *rest


def no_barrier(right: Any, *args: Any) -> Steps:
    """Algorithm 2 without its barrier: drop every wait."""
    steps, answer = right(*args), None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None if isinstance(step, Join) else (yield step)


def stopped_work_awaited(right: Any, *args: Any) -> Steps:
    """The eager form with a wait in place of every stop."""
    steps, answer = right(*args), None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = yield Join(step.tasks) if isinstance(step, Stop) else step


def born_at_once(right: Any, engine: Any, subs: Any) -> None:
    for sub in subs:
        sub.begin()


def stopped_work_forgotten(right: Any, process: Any, fate: str) -> None:
    busy = process.engine.busy
    right(process, fate)
    if fate == "cancelled":
        process.engine.busy = busy


def link_never_taken(right: Any, engine: Any, *args: Any) -> None:
    engine.link_free = 0.0
    right(engine, *args)


def matches_swapped(right: Any, world: Any, prompt: int, layers: int, matches: Any) -> None:
    right(world, prompt, layers, [not match for match in matches])


def wrong_from_the_second_on(right: Any, world: Any, step: Any) -> Any:
    answer = right(world, step)
    return answer if step.kind == "top" or answer < 2 else answer + 1


def slower_with_more_units(right: Any, engine: Any, cluster: Any, cost: Any, *rest: Any) -> None:
    right(engine, cluster, replace(cost, early_head=cost.early_head + cluster.units), *rest)


def slower_with_more_tokens(right: Any, engine: Any, cluster: Any, cost: Any, world: Any, tokens: int, *rest: Any) -> None:
    right(engine, cluster, replace(cost, early_head=cost.early_head + tokens), world, tokens, *rest)


def layers_longer_than_passes(right: Any, engine: Any, *args: Any) -> None:
    right(engine, *args)
    engine.layer_times = [time + 1 for time in engine.layer_times]


def last_come_first_served(right: Any, engine: Any) -> None:
    engine.waiting.reverse()
    right(engine)


def draws_seeded_by_length(right: Any, seed: int, purpose: str, block: int, positions: int) -> Iterator[Any]:
    return right(seed + positions, purpose, block, positions)


def a_match_costs_more(right: Any, *args: Any) -> Any:
    miss, *rest = right(*args)
    return miss, *[stage._replace(time=2 * miss.time) for stage in rest]


def promotion_free(right: Any, *args: Any, promoted: bool, **kwargs: Any) -> Any:
    return right(*args, promoted=False, **kwargs)


def quotient(right: Any, d: Any, exit_at: Any, n: Any, p: Any, k: Any) -> Any:
    return formulas.expected_compute(d, exit_at, n, p, k) / formulas.expected_latency(d, exit_at, n, p)


def reversed_chances(right: Any, *args: Any) -> Any:
    values, chances = right(*args)
    return values, chances[::-1]


def second_twice(right: Any, *args: Any) -> Any:
    first, second, *rest = right(*args)
    return first, 2 * second, *rest


def early_head_saves(right: Any, *args: Any, early_head: float, **kwargs: Any) -> Any:
    miss, match = right(*args, early_head=0.0, **kwargs)
    return miss - early_head, match - early_head


NOTHING_STOPPED = with_fault(lambda right, process: None, events._Process, "stop")
DISPATCH_OF_ONE_LAYER = with_fault(lambda right, cost, processes: 1.0, UnitCost, "dispatching")
PASSES_IN_HALF_THE_TIME = with_fault(lambda right, cost, step: right(cost, step) / 2, UnitCost, "forward")
TOKENS_ONE_BY_ONE = with_fault(lambda right, cost, step: right(cost, step) * len(step.tokens), UnitCost, "forward")
NO_BARRIER = with_fault(no_barrier, ppd, "_barrier")
MATCHES_SWAPPED = with_fault(matches_swapped, World, "__init__")
LAST_TOKEN_COUNTED = with_fault(match_of_the_last_token, formulas, "expected_latency")
PROMOTION_FREE = with_fault(promotion_free, formulas, "_barrier_stage")
LAYERS_LONGER = with_fault(layers_longer_than_passes, events._Engine, "__init__")
SLOWER_WITH_UNITS = with_fault(slower_with_more_units, events._Engine, "__init__")

FAULTS: dict[str, Fault] = {
    "21a": DISPATCH_OF_ONE_LAYER,
    "21b": NOTHING_STOPPED,
    "21c": LAST_TOKEN_COUNTED,
    "21d": with_fault(reversed_chances, formulas, "latency_pmf"),
    "21e": with_fault(plus_one, formulas, "expected_runs"),
    "21f": TOKENS_ONE_BY_ONE,
    "22a": DISPATCH_OF_ONE_LAYER,
    "22b": with_fault(plus_one, formulas, "nested_waste"),
    "22c": with_fault(plus_one, formulas, "nested_compute"),
    "22d": with_fault(born_at_once, events._Engine, "launch"),
    "22e": NOTHING_STOPPED,
    "23a": PASSES_IN_HALF_THE_TIME,
    "23b": PASSES_IN_HALF_THE_TIME,
    "23c": with_fault(lambda right, *args: formulas.expected_latency(*args), formulas, "flat_latency"),
    "23d": MATCHES_SWAPPED,
    "24a": with_fault(plus_one, formulas, "latency_variance"),
    "24b": with_fault(second_twice, formulas, "position_latency"),
    "24c": with_fault(lambda right, law, n: n * law.rate * (1 - law.rate), outcome_laws.Markov, "variance"),
    "24d": with_fault(lambda right, law, n: right(law, n)[::-1], outcome_laws.Chain, "pmf"),
    "24e": with_fault(second_twice, formulas, "moments_of_pairs"),
    "25a": with_fault(quotient, formulas, "expected_units_ratio"),
    "25b": with_fault(quotient, formulas, "expected_units_ratio"),
    "25c": with_fault(plus_one, formulas, "mean_busy_units"),
    "26a": NO_BARRIER,
    "26b": NO_BARRIER,
    "26c": with_fault(plus_one, formulas, "latency_of_gaps"),
    "26d": with_fault(first_one_more, formulas, "eager_gaps"),
    "26e": with_fault(early_head_saves, formulas, "literal_gaps"),
    "26g": with_fault(stopped_work_awaited, ppd, "_eager"),
    "27a": LAST_TOKEN_COUNTED,
    "27b": LAST_TOKEN_COUNTED,
    "27c": with_fault(rate_ignored, formulas, "expected_latency"),
    "28a": with_fault(stopped_work_forgotten, events._Process, "release"),
    "28b": with_fault(lambda right, engine, process: 0, events._Engine, "free_unit"),
    "28c": with_fault(link_never_taken, events._Engine, "transfer"),
    "28d": PROMOTION_FREE,
    "28e": PROMOTION_FREE,
    "28f": LAYERS_LONGER,
    "28g": LAYERS_LONGER,
    "28h": PASSES_IN_HALF_THE_TIME,
    "28i": with_fault(wrong_from_the_second_on, World, "read"),
    "28j": SLOWER_WITH_UNITS,
    "28k": PASSES_IN_HALF_THE_TIME,
    "28l": SLOWER_WITH_UNITS,
    "28m": with_fault(last_come_first_served, events._Engine, "flush"),
    "28n": with_fault(lambda right, stage, units: right(stage, 1), passes_alone._RoundsAhead, "count"),
    "29a": with_fault(slower_with_more_tokens, events._Engine, "__init__"),
    "29b": with_fault(draws_seeded_by_length, random_streams, "tiles"),
    "29c": with_fault(a_match_costs_more, sampler, "stages"),
    "29d": MATCHES_SWAPPED,
}


def test_every_theorem_has_a_refuting_fault() -> None:
    assert list(FAULTS) == [theorem.number for theorem in OWN if theorem.expect == "holds"]


@pytest.mark.parametrize(("number", "fault", "small"), fault_parameters([(number, "", fault) for number, fault in FAULTS.items()]))
def test_fault_refutes_theorem(number: str, fault: Fault, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (assert_fault_refuted if small else assert_fault_shows)("ppd", number, fault, monkeypatch)


def test_counterexample_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    NOTHING_STOPPED(monkeypatch)
    (verdict,) = check("ppd", only=["21b"])
    # One token would not do: the end of the run cuts all passes short.
    assert verdict.counterexample == {"form": "eager", "layers": 1, "exit_layer": 1, "candidates": 1, "matches": [False, False]}


def test_exception_in_checked_code_is_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(events._Process, "stop")
    (verdict,) = check("ppd", only=["22a"], examples=100)
    assert not verdict.holds
    assert verdict.error.startswith("AttributeError: ")
    assert replay("22a", verdict.counterexample or {}, "ppd").error == verdict.error


# --- Examples and verdicts ---


@pytest.mark.parametrize("theorem", EVERY)
def test_examples_survive_json(theorem: Theorem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_examples_survive_json(theorem, monkeypatch)


def test_statements_are_sentences_and_cite_known_references() -> None:
    """A key in brackets must be a reference that some docstring gives in full: a line with the key and the authors."""
    files = [path for package in ("model", "sim") for path in (ROOT / package).rglob("*.py")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    references = {found[1] for line in lines if (found := re.match(r"\s*\[([A-Z][A-Za-z]+[0-9]*[a-z]?)\] [A-Z]", line))}
    for theorem in THEOREMS:
        assert theorem.statement.endswith(".")
        assert {*re.findall(r"\[([^\]]+)\]", theorem.source)} <= references, theorem.number
        for text in (theorem.statement, theorem.source):
            capitals = {word for word in re.findall(r"[A-Za-z]{5,}", text) if word.isupper()}
            assert capitals <= {"PEARL", "AMUSD"}, text


def test_reproduce_is_a_command_with_the_example() -> None:
    (verdict,) = check(only=["23e"])
    program, verb, *options = shlex.split(verdict.reproduce)
    assert (program, verb) == ("sim", "check")
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert sorted(given) == ["--example", "--method", "--theorem"]
    assert not replay(given["--theorem"], json.loads(given["--example"]), given["--method"]).holds
    (right,) = check("ppd", only=["21a"], examples=5)
    assert (right.reproduce, right.error, right.counterexample) == ("", "", None)


def test_seed_decides_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    chosen = select("ppd", only=["21a", "28a"])
    probes = [replace(theorem, holds=lambda example: seen.append(json.dumps(example))) for theorem in chosen]
    monkeypatch.setattr("sim.theorems.THEOREMS", tuple(probes))

    def tried(**options: Any) -> list[str]:
        seen.clear()
        list(check(examples=30, **options))
        return seen[:]

    assert tried() == tried(seed=0)
    assert tried() != tried(seed=1)
    assert tried()[30:] == tried(only=["28a"])


def test_database_stores_counterexample() -> None:
    database = InMemoryExampleDatabase()
    (first,) = check("ppd", only=["29e"], examples=1000, database=database)
    (second,) = check("ppd", only=["29e"], examples=1000, seed=5, database=database)
    assert first.tried > 1
    assert (second.tried, second.counterexample, second.error) == (1, first.counterexample, first.error)


def test_stored_example_that_holds_now_does_not_end_the_search() -> None:
    database = InMemoryExampleDatabase()
    mended = {"form": "literal", "layers": 4, "exit_layer": 2, "candidates": 1, "matches": [True, True]}
    database.save(b"ppd 21a", json.dumps(mended).encode())
    (verdict,) = check("ppd", only=["21a"], examples=20, database=database)
    assert (verdict.holds, verdict.tried) == (True, 21)


def test_numbers_select_theorems_and_their_parts() -> None:
    names = [(theorem.method, theorem.number) for theorem in THEOREMS]
    assert len(set(names)) == len(names)
    assert {theorem.number[:2] for theorem in OWN} == {str(number) for number in range(21, 30)}
    assert [theorem.number for theorem in select("ppd", only=["27", "21b"])] == ["21b", "27a", "27b", "27c"]
    assert [theorem.number for theorem in select("speculative", only=["1"])] == ["1a", "1b", "1c", "1d", "1e"]
    assert {theorem.method for theorem in select(only=["28a"])} >= {"ppd", "speculative"}
    assert select() == THEOREMS


def test_number_shared_by_methods_needs_the_method() -> None:
    example = {"draft_length": 1, "survive": [0], "cluster": {"units": 1}}
    with pytest.raises(ParameterError, match=r"^theorem 28a exists for .*ppd and .*speculative.*; name the method$"):
        replay("28a", example)
    assert replay("28a", example, "speculative").holds


# --- The summary line ---


def settled(monkeypatch: pytest.MonkeyPatch, *numbers: str) -> None:
    """Leave only these statements to check: 1a holds, 1b must fail and does not, 1c must hold and fails."""
    true = replace(OWN[0], number="1a", holds=lambda example: None)
    monkeypatch.setattr("sim.theorems.THEOREMS", (true, replace(true, number="1b", expect="fails"), replace(OWN[0], number="1c",
                        holds=lambda example: False))[: len(numbers) or 3])  # fmt: skip


def test_undecided_statement_is_named_in_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, "1a", "1b")
    found = CliRunner().invoke(app, ["check", "--examples", "12"])
    *_, last = found.stdout.splitlines()
    assert "1b" in last
    assert "ppd 1b (12 tried)" in last
    assert "no counterexample found" in last
    assert "1a" not in last
    assert found.exit_code == 0  # open is not wrong
    documents = json.loads(CliRunner().invoke(app, ["check", "--examples", "12", "--json"]).stdout)
    assert [each["as_expected"] for each in documents] == [True, None]


def test_unrefuted_false_statement_is_wrong_after_enough_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, "1a", "1b")
    found = CliRunner().invoke(app, ["check", "--examples", "200"])
    assert found.stdout.splitlines()[-1] == "1 statement came out wrong: ppd 1b (no counterexample found)"
    assert found.exit_code == 1


def test_wrong_statement_is_named_in_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    found = CliRunner().invoke(app, ["check", "--examples", "7"])
    *_, last = found.stdout.splitlines()
    assert last.startswith("1 statement came out wrong: ppd 1c; open (expected to fail")
    assert "ppd 1b (7 tried)" in last
    assert found.exit_code == 1
    assert re.search(r"^ppd 1c +fails +<-- WRONG +1 example  ", found.stdout, re.MULTILINE)
    right = CliRunner().invoke(app, ["check", "--theorem", "1a", "--examples", "3"])
    assert (right.exit_code, right.stdout.splitlines()[-1]) == (0, "every statement came out as expected")


# --- User errors ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: check("pdp"), "unknown method 'pdp'; did you mean ppd? known: ", id="method"),
        pytest.param(lambda: check("ppd", only=["21z"]), "unknown theorem '21z'; did you mean 21", id="theorem"),
        pytest.param(lambda: check("ppd", only=["2"]), "unknown theorem '2'; ", id="half a number"),
        pytest.param(lambda: check(examples=0), "examples must be at least 1, got 0", id="examples"),
        pytest.param(lambda: check(seed=-1), "seed must be at least 0, got -1", id="seed"),
        pytest.param(lambda: replay("21", {}), "unknown theorem '21'; ", id="a number without its letter"),
        pytest.param(lambda: replay("21a", {}, "ppd"), "example of theorem 21a lacks the field 'matches'", id="empty example"),
        pytest.param(lambda: replay("21a", [], "ppd"), "example must be an object of fields and values, got []", id="no object"),  # type: ignore[arg-type]
        pytest.param(
            lambda: replay("21a", {"form": "literal", "layers": 4, "exit_layer": 5, "candidates": 1, "matches": [True]}, "ppd"),
            "exit_layer must be between 1 and layers=4, got 5",
            id="impossible example",
        ),
    ],
)
def test_bad_arguments_are_refused_before_the_search(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        call()
    assert str(error.value).startswith(message)


def test_missing_hypothesis_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ParameterError, match="install hypothesis"):
        check()
    # Replaying an example needs no hypothesis.
    assert replay("21a", {"form": "eager", "layers": 4, "exit_layer": 2, "candidates": 1, "matches": [True, False]}, "ppd").holds
