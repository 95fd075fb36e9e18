"""Theorems on speculative decoding: expected verdicts, and faults that refute each theorem."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import BatchWorld, DraftOutcomes, World
from model.methods.rounds import round_laws, round_moments, rounds_of_batches
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import drafter_prices, static_batches
from model.methods.speculative import paths as sampler
from model.methods.speculative import theory as formulas
from model.outcomes import outcome_laws
from sim.engine import events, passes_alone
from sim.theorems import drafting_examples, replay, select
from sim.theorems.theorem import Theorem
from tests.sim.test_theorems import LAYERS_LONGER, PASSES_IN_HALF_THE_TIME
from tests.support import faulty_blocks, faulty_heads, faulty_speculation
from tests.support.theorem_checks import (
    Fault,
    assert_examples_survive_json,
    assert_fails_on_small_example,
    assert_fault_refuted,
    assert_fault_shows,
    fault_parameters,
    plain_decoding_on_one_device,
    plus_one,
    verdict_tests,
    with_fault,
)

OWN = select("speculative")
EVERY = [pytest.param(theorem, id=theorem.number) for theorem in OWN]
FALSE = [pytest.param(theorem, id=theorem.number) for theorem in OWN if theorem.expect == "fails"]


# --- Verdicts ---


test_theorem_has_expected_verdict, test_theorem_has_expected_verdict_on_many_examples = verdict_tests(OWN)


def one_token_read(right: Any, passes: Any, _: int, *rest: Any) -> Any:
    """Passes read a single token."""
    return right(passes, 1, *rest)


@pytest.mark.parametrize("theorem", FALSE)
def test_false_statement_fails_on_small_example(theorem: Theorem) -> None:
    assert_fails_on_small_example(theorem)


def test_worked_example_of_finite_speedup_above_its_limit() -> None:
    """l = 2, gamma = 2: the first round drafts one token. R = 2 - alpha and D = 1, so S(2) = 2 / (1.9 + 0.05) at alpha = 0.1."""
    example = {"tokens": 2, "draft_length": 2, "acceptance_rate": 0.1, "cost_ratio": 0.05}
    verdict = replay("2d", example, "speculative")
    got, bound = (float(number) for number in re.findall(r"\d\.\d+", verdict.error))
    assert (got, bound) == pytest.approx((2 / 1.95, 1.11 / 1.1), rel=1e-12)


def test_worked_example_of_longer_drafts_with_more_rounds() -> None:
    """Starts of rounds: 0 -> 3 -> 6 with drafts of two tokens, 0 -> 4 -> 5 -> 6 with three."""
    example = {"draft_length": 2, "more": 0, "survive": [3, 0, 0, 2, 0, 0, 0]}
    verdict = replay("29d", example, "speculative")
    assert verdict.error == "rounds of longer drafts: got 4, expected at most 3"


def test_worked_example_of_replacement_drawn_from_p() -> None:
    """p = (1/2, 1/2), q = (1, 0): accepted with probability 1/2, so the first word has probability 3/4 instead of 1/2."""
    example = {"draft_length": 1, "tokens": 2, "target": [[1, 1]], "draft": [[1, 0]]}
    verdict = replay("14d", example, "speculative")
    assert verdict.error == "probability of (0, 0): got 3/8, expected 1/4; total variation distance 1/4"


def test_worked_example_of_fewer_tokens_by_block_on_a_path() -> None:
    """p = (1/2, 1/2), q = (2/5, 3/5), draft (1, 1): r = 5/6 twice, so w_2 = 25/36, and the second random number, 3/4, is between.

    Token by token 0 and 3/4 are below 5/6. By block 3/4 is not below 25/36, and the first token passes (0 is below every bound).
    """
    example = {"draft_length": 2, "target": [[1, 1]], "draft": [[2, 3]], "words": [1, 1], "eighths": [0, 6]}
    verdict = replay("43g", example, "speculative")
    assert verdict.error == "tokens accepted token by token: got 2, expected at most 1"


def test_worked_example_of_a_draft_accepted_less_often_by_block() -> None:
    """p = (1/2, 1/2), q = (2/3, 1/3), draft (0, 0): r = 3/4 twice.

    Token by token the first is accepted with probability 3/4. By block both pass with 9/16; else the first passes with
    h = r / (r + 1/4), where r = max(0, 3/4 * 1/2 - 2/3) + max(0, 3/4 * 1/2 - 1/3) = 1/24, so 1/7: 9/16 + 7/16 * 1/7 = 5/8.
    """
    verdict = replay("43h", {"draft_length": 2, "target": [[1, 1]], "draft": [[2, 1]]}, "speculative")
    assert verdict.error == "probability that at least 1 of (0, 0) are accepted, by token: got 0.75, expected at most 0.625"


# --- Every theorem can fail ---


def draft_less(right: Any, *args: Any) -> Any:
    """Use the formula of a draft that is one token shorter: the bonus token or the last drafted one is lost."""
    *given, gamma = args
    return right(*given, np.maximum(np.asarray(gamma) - 1, 0))


def naive_rounds(right: Any, n: Any, alpha: Any, gamma: Any) -> Any:
    return np.asarray(n / formulas.expected_tokens(alpha, gamma))


def whole_drafts(right: Any, n: Any, alpha: Any, gamma: Any) -> Any:
    return gamma * formulas.target_runs(n, alpha, gamma)


def even_starts(right: Any, n: int, alpha: float, gamma: int) -> Any:
    return np.full(n, 1 / float(formulas.expected_tokens(alpha, gamma)))


def links_forgotten(right: Any, cost: UnitCost, *args: Any, **placement: bool) -> Any:
    return right(replace(cost, link=0.0), *args, **placement)


def rejections_swapped(right: Any, world: World, prompt: int, layers: int, matches: Any = (), drafts: Any = None) -> None:
    swapped = {role: DraftOutcomes(of, [9 * (not count) for count in counts]) for role, (of, counts) in (drafts or {}).items()}
    right(world, prompt, layers, matches, swapped)


def outcomes_swapped(right: Any, gamma: int, tokens: int, outcomes: Iterator[Any], *rest: Any, **how: Any) -> Any:
    return right(gamma, tokens, (lambda position, draw=draw: ~draw(position) for draw in outcomes), *rest, **how)


def busy_twice(right: Any, process: Any, fate: str) -> None:
    since = process.since
    right(process, fate)
    process.engine.busy += process.engine.env.now - since


def early_on_record(right: Any, unit: int, start: float, *rest: Any) -> Any:
    return right(unit, start - 100.0, *rest)


def heads_by_units(right: Any, engine: Any, cluster: Any, cost: UnitCost, *rest: Any) -> None:
    right(engine, cluster, replace(cost, final_head=cost.final_head + cluster.units), *rest)


def shorter_in_long_sequences(right: Any, parameters: Any, prompt: Any, tokens: int, *stop: Any) -> Any:
    return right(replace(parameters, draft_length=max(parameters.draft_length - tokens % 2, 0)), prompt, tokens, *stop)


def one_survives_less(right: Any, *args: Any) -> Any:
    return np.maximum(right(*args) - 1, 0)


def rate_of_all(right: Any, powers: Any) -> Any:
    return formulas.expected_tokens(powers[:1].sum(), powers.size)


def no_final_step(right: Any, alpha: Any, c: Any, **options: Any) -> Any:
    return np.maximum(right(alpha, c, **options), 1)


def draft_of_the_last_sequence(right: Any, gamma: int, tokens: int, outcomes: Any, count: Any, most: Any, drafted: Any) -> Any:
    """Cost a round by the draft of its last sequence instead of the longest draft."""
    most[:] = 0
    return right(gamma, tokens, outcomes, count, most, drafted)


def outcomes_of_the_first(right: Any, world: BatchWorld, step: Any) -> Any:
    world.worlds = [world.worlds[0]] * len(world.worlds)
    return right(world, step)


def drafts_cut(right: Any, longest: int, tokens: int, cut: bool, *rest: Any) -> Any:
    return right(longest, tokens, True, *rest)


def walks_cut(right: Any, *args: Any, cut: bool, **how: Any) -> Any:
    return right(*args, cut=True, **how)


def work_of_one_alone(right: Any, parameters: Any, *rest: Any) -> Any:
    return right(replace(parameters, sequences=1), *rest)


def shorter_in_lockstep(right: Any, parameters: Any, *rest: Any) -> Any:
    less = parameters.batching == "lockstep" and parameters.draft_length > 0
    return right(replace(parameters, draft_length=parameters.draft_length - less), *rest)


def whole_drafts_of_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(speculative.Parameters, "cut", property(lambda parameters: parameters.batching != "continuous"))


def _sequences_of(cost: UnitCost, step: Any) -> int:
    return int(step.batch_size)


def spoil(fault: Any, name: str = "verify") -> Fault:
    return with_fault(fault, speculative, name)


def formula(fault: Any, name: str) -> Fault:
    return with_fault(fault, formulas, name)


BONUS_DROPPED = spoil(faulty_speculation.bonus_dropped)
FROM_P = spoil(faulty_speculation.with_mistakes(correction="sample"))
LINKS_FORGOTTEN = with_fault(links_forgotten, drafter_prices, "prices_by_start")
REJECTIONS_SWAPPED = with_fault(rejections_swapped, World, "__init__")
EARLY_ON_RECORD = with_fault(early_on_record, events, "Span")

def one_survives_less_of_rounds(right: Any, world: World, step: Any) -> Any:
    """Of every round one token less is accepted; further rounds begin as before."""
    found = right(world, step)
    return found and [each._replace(accepted=max(each.accepted - 1, 0)) for each in found]


FAULTS: list[tuple[str, str, Fault]] = [
    ("1a", "cap gamma", formula(draft_less, "target_runs")),
    ("1a", "no bonus token", BONUS_DROPPED),
    ("1b", "drafts never cut", formula(whole_drafts, "draft_runs")),
    ("1c", "even starts", formula(even_starts, "renewal_density")),
    ("1d", "l / mu", formula(naive_rounds, "target_runs")),
    ("1d", "even starts", formula(even_starts, "renewal_density")),
    ("1d", "drafts never cut", formula(whole_drafts, "draft_runs")),
    ("1e", "links forgotten", LINKS_FORGOTTEN),
    ("1e", "no bonus token", BONUS_DROPPED),
    ("2a", "l / mu", formula(naive_rounds, "target_runs")),
    ("2b", "squared", formula(lambda right, *args: right(*args) ** 2, "target_runs")),
    ("2c", "rate of rejections", formula(lambda right, n, alpha, gamma: right(n, 1 - alpha, gamma), "target_runs")),
    ("3", "variance", formula(plus_one, "tokens_variance")),
    ("4a", "no bonus token", BONUS_DROPPED),
    ("4a", "paths", with_fault(outcomes_swapped, sampler, "fixed")),
    ("4b", "too many drafts", spoil(faulty_speculation.one_token_too_many, "draft")),
    ("5", "no bonus token", BONUS_DROPPED),
    ("6a", "reversed", formula(lambda right, *args: right(*args)[::-1], "tokens_pmf")),
    ("6a", "no bonus token", BONUS_DROPPED),
    ("6b", "cap gamma", formula(draft_less, "expected_tokens")),
    ("6b", "variance", formula(plus_one, "tokens_variance")),
    ("6c", "reversed", formula(lambda right, *args: right(*args)[::-1], "tokens_pmf")),
    ("7a", "one more", with_fault(plus_one, laws, "expected_tokens_random_length")),
    ("7a", "no bonus token", BONUS_DROPPED),
    ("7b", "one more", with_fault(plus_one, laws, "expected_tokens_by_draft_position")),
    ("7c", "one rate for all", with_fault(rate_of_all, laws, "expected_tokens_shared_rate")),
    ("7d", "independent", with_fault(lambda right, p, rho, *rest: right(p, 0.0, *rest), laws, "expected_tokens_markov")),
    ("7e", "no bonus token", BONUS_DROPPED),
    ("8a", "upside down", formula(lambda right, *args: 1 / right(*args), "speedup")),
    ("8b", "one more", formula(plus_one, "optimal_draft_length")),
    ("8c", "one less", formula(lambda right, *args, **how: np.maximum(right(*args, **how) - 1, 0), "optimal_draft_length")),
    ("9", "always a draft", formula(no_final_step, "optimal_draft_length")),
    ("9", "free drafts", formula(lambda right, alpha, gamma, c: right(alpha, gamma, 0 * c), "speedup")),
    ("10a", "free drafts", formula(lambda right, alpha, gamma, c: right(alpha, gamma, 0 * c), "speedup")),
    ("10a", "drafts twice as expensive", formula(lambda right, alpha, c: right(alpha, 2 * c), "oracle_speedup")),
    ("10b", "half the time", PASSES_IN_HALF_THE_TIME),
    ("11a", "no wasted operations", formula(lambda right, *args: 0 * right(*args) + 1, "operations_factor")),
    ("11b", "verified twice", spoil(faulty_speculation.verified_twice)),
    ("12a", "never certain", formula(lambda right, alpha, *rest: right(np.minimum(alpha, 0.9), *rest), "speedup")),
    ("12b", "endless", formula(lambda right, n, *rest: formulas.speedup(*rest), "finite_speedup")),
    ("12c", "width is free", formula(lambda right, *args, verify_cost: right(*args), "finite_speedup")),
    ("12d", "the longest for all", formula(lambda right, alpha, gamma: right(alpha, np.max(gamma)) + 0 * gamma, "tokens_variance")),
    ("13a", "same token", formula(lambda right, p, q: np.multiply(p, q).sum(), "acceptance_rate")),
    ("13a", "no lenience", formula(lambda right, p, q, lenience: right(p, q, 1.0), "lenient_acceptance_rate")),
    ("13b", "correction from p", FROM_P),
    ("14a", "correction from p", FROM_P),
    ("14a", "p and q swapped", spoil(faulty_speculation.with_mistakes(bound=faulty_speculation.inverted_ratio))),
    ("14a", "one random number", spoil(faulty_speculation.with_mistakes(one_number=True))),
    ("14a", "greedy draft", spoil(faulty_speculation.greedy_draft, "start")),
    ("14a", "stop overlooked", spoil(faulty_speculation.stop_token_ignored, "commit")),
    ("14a", "all kept", spoil(faulty_speculation.all_accepted)),
    ("14b", "accepted at random", spoil(faulty_speculation.greedy_tested_at_random)),
    ("14b", "all kept", spoil(faulty_speculation.all_accepted)),
    ("14c", "stop overlooked", spoil(faulty_speculation.stop_token_ignored, "commit")),
    ("14c", "too many drafts", spoil(faulty_speculation.one_token_too_many, "draft")),
    ("15a", "no bonus token", BONUS_DROPPED),
    ("15b", "alpha itself", formula(lambda right, alpha, gamma: np.asarray(alpha), "drafted_from_acceptance")),
    ("15c", "of short drafts", formula(lambda right, alpha, gamma: right(alpha, 10 - gamma), "drafted_from_acceptance")),
    ("15d", "no bonus token", formula(lambda right, n, *rest: right(np.maximum(n - 1, 1), *rest), "acceptance_from_length")),
    ("15d", "alpha itself", formula(lambda right, rate, gamma: np.asarray(rate), "acceptance_from_drafted")),
    ("28a", "busy twice", with_fault(busy_twice, events._Process, "release")),
    ("28b", "too early", EARLY_ON_RECORD),
    ("28c", "too early", EARLY_ON_RECORD),
    ("28d", "links forgotten", LINKS_FORGOTTEN),
    ("28e", "links forgotten", LINKS_FORGOTTEN),
    ("28f", "long layers", LAYERS_LONGER),
    ("28g", "half the time", PASSES_IN_HALF_THE_TIME),
    ("28h", "all kept", spoil(faulty_speculation.all_accepted)),
    ("28i", "heads by units", with_fault(heads_by_units, events._Engine, "__init__")),
    ("28n", "one token read", with_fault(one_token_read, passes_alone._AlikePasses, "begun_at")),
    ("28n", "one survives less", with_fault(one_survives_less_of_rounds, World, "draft_rounds")),
    ("28n", "heads read nothing again", with_fault(lambda right, *states: right(*states), passes_alone, "Features")),
    ("29a", "rejections swapped", REJECTIONS_SWAPPED),
    ("29b", "outcomes swapped", with_fault(outcomes_swapped, sampler, "fixed")),
    ("29c", "long drafts thrown away", spoil(faulty_speculation.long_drafts_discarded)),
    ("29e", "shorter in long sequences", spoil(shorter_in_long_sequences, "decode")),
    ("29f", "one survives less", with_fault(one_survives_less, outcome_laws.Law, "survivors")),
    ("29f", "one survives less of a round", with_fault(one_survives_less, round_laws.Rounds, "survivors")),
    ("29f", "one survives less of a record", with_fault(one_survives_less, round_laws.ReplayRounds, "survivors")),
    ("32a", "links forgotten", with_fault(links_forgotten, static_batches, "prices")),
    ("32a", "draft of the last sequence", with_fault(draft_of_the_last_sequence, static_batches, "_enter")),
    ("32b", "outcomes of the first sequence", with_fault(outcomes_of_the_first, BatchWorld, "read")),
    ("32c", "a share of a pass", with_fault(lambda right, *args: right(*args) / _sequences_of(*args), UnitCost, "forward")),
    ("32d", "sequence by sequence", with_fault(lambda right, *args: right(*args) * _sequences_of(*args) ** 2, UnitCost, "forward")),
    (
        "32f", "all as long as the first",
        with_fault(lambda right, parts: right(parts[:1] * len(parts)), rounds_of_batches, "remaining"),
    ),
    ("32g", "drafts cut", with_fault(walks_cut, sampler, "fixed")),
    ("32h", "drafts cut", with_fault(drafts_cut, round_moments, "moments_of_pairs")),
    ("32h", "as narrow at the end", with_fault(work_of_one_alone, formulas, "work")),
    ("32i", "cap gamma", formula(draft_less, "expected_tokens")),
    ("32i", "a batch of one", with_fault(lambda right, self, sequences, widest: self, UnitCost, "of_batch")),
    ("32j", "drafts are shorter in lockstep", spoil(shorter_in_lockstep, "decode")),
    ("32k", "passes of one sequence", with_fault(lambda right, *args: right(*args) / _sequences_of(*args), UnitCost, "forward")),
    ("32m", "continuous batch of one", whole_drafts_of_one),
    ("33a", "over one device", plain_decoding_on_one_device),
    *faulty_heads.FAULTS,
    *faulty_blocks.FAULTS,
]  # fmt: skip


def test_every_theorem_has_a_refuting_fault() -> None:
    faulted = list(dict.fromkeys(number for number, *_ in FAULTS))
    assert sorted(faulted) == sorted(theorem.number for theorem in OWN if theorem.expect == "holds")


@pytest.mark.parametrize(("number", "fault", "small"), fault_parameters(FAULTS))
def test_fault_refutes_theorem(number: str, fault: Fault, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (assert_fault_refuted if small else assert_fault_shows)("speculative", number, fault, monkeypatch)


# --- Examples ---


@pytest.mark.parametrize("theorem", EVERY)
def test_examples_survive_json(theorem: Theorem, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_examples_survive_json(theorem, monkeypatch)


def test_every_token_of_the_context_changes_the_state() -> None:
    """Otherwise a model that has read wrong tokens might give the same distribution."""
    model = drafting_examples.model([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    for before in ((), (0,), (1, 2)):
        assert len({model((*before, token)) for token in range(3)}) == 3
        assert len({model((token, *before)) for token in range(3)}) == 3


def test_probabilities_of_all_runs_sum_to_one() -> None:
    for law in ({"match_rate": 0.3}, {"survival": [0.8, 0.5, 0.5]}, {"match_rate": 0.5, "correlation": 0.4}):
        runs = list(drafting_examples.all_runs({"draft_length": 2, "law": law}, 3))
        assert sum(chance for chance, _ in runs) == pytest.approx(1, abs=1e-12)
        assert len(runs) == (9 if "survival" in law else 4)
