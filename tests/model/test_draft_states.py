"""Draft heads and parallel drafts: states that a pass reads, masks, work, and laws of easy and hard sequences."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Account
from model.interpret.interpreter import Cache, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.rounds import prices_of_rounds
from model.methods.rounds.round_laws import MixedRounds, Rounds
from model.methods.speculative import parallel_drafts, theory
from model.methods.speculative.algorithm import Parameters, decode
from model.outcomes.outcome_laws import Iid, Markov
from model.steps import MASK, Batch, CacheError, Features, Forward, LayerSpan, Read, Step

WHOLE, HEAD = LayerSpan(0, 4), LayerSpan(0, 1)


def target(tokens: int, at: int = 0) -> Forward:
    return Forward("target", tuple(range(at, at + tokens)), at, WHOLE)


def head(tokens: tuple[int, ...], at: int, states: Features) -> Forward:
    return Forward("draft", tokens, at, HEAD, states, 1)


def written(*steps: Forward) -> Cache:
    cache = Cache()
    for step in steps:
        cache.write(step)
    return cache


PREFILL = target(3)
READ = head((0, 1, 2), 0, Features(PREFILL, -1, 3))
VERIFIED = target(4, 3)


def test_states_before_each_token_are_read() -> None:
    """Prefill, a first draft from the prefill's last state, and the accepted tokens from the verification's states."""
    first = head((3,), 3, Features(PREFILL, 2, 1))
    second = head((4,), 4, Features(first, 0, 1))
    again = head((4, 5, 6, MASK, MASK), 4, Features(VERIFIED, 0, 3))
    assert written(PREFILL, READ, first, second, VERIFIED, again).rows["draft"] == [9]
    assert written(head((0,), 0, Features(None, -1, 1))).rows["draft"] == [1]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (head((4, 5, 6), 4, Features(VERIFIED, 2, 3)), "states 2 to 4 are read of a pass over 4 tokens"),
        (head((4, 5), 4, Features(VERIFIED, 0, 3)), "length must be 2, the tokens of the pass without masks, got 3"),
        (head((4, 5, MASK), 4, Features(VERIFIED, 0, 3)), "length must be 2"),
        (head((5,), 5, Features(VERIFIED, 0, 1)), "must be that of position 4, before the pass, got that of 3"),
        (head((3,), 3, Features(None, -1, 1)), "must be that of position 2, before the pass, got that of the start"),
        (head((0, 1), 0, Features(VERIFIED, -1, 2)), "must be of a pass at position 0, got 3"),
        (head((0,), 0, Features(PREFILL, -2, 1)), "states -2 to -2"),
        (head((MASK,), 4, Features(VERIFIED, 0, 1)), "length must be 0"),
        (head((4,), 4, Features(VERIFIED, 0, 1))._replace(batch=Batch.uniform((0,), 4)), "only a pass over one sequence"),
        (head((4,), 4, Features(VERIFIED, 0, 1))._replace(layers=LayerSpan(1, 2)), "from the first layer on"),
    ],
)
def test_wrong_states_are_refused(step: Forward, said: str) -> None:
    with pytest.raises(CacheError, match=said):
        written(PREFILL, READ, VERIFIED, head((3,), 3, Features(PREFILL, 2, 1)), step)


def test_masks_are_as_right_as_the_last_known_token() -> None:
    world = World(1, 4, drafts={"draft": DraftOutcomes("target", [2, 0, 0, 0])})
    right = Forward("draft", (0, MASK, MASK), 0, HEAD, Features(None, -1, 1), 3)
    wrong = right._replace(tokens=(-7, MASK, MASK))
    assert [world.read(Read("next", right, offset)) for offset in (-3, -2, -1)] == [1, 2, -4]
    assert all(world.read(Read("next", wrong, offset)) < 0 for offset in (-3, -2, -1))  # type: ignore[operator]


def steps_of(parameters: Parameters, survivors: list[int], prompt: int = 1) -> list[Step]:
    """Steps of a decoding, recorded by the counter."""
    seen: list[Step] = []
    world = World(prompt, parameters.layers, drafts={"draft": DraftOutcomes("target", survivors)})

    def recorded() -> Any:
        inner, answer = decode(parameters, range(prompt), len(survivors)), None
        while True:
            try:
                step = inner.send(answer)
            except StopIteration:
                return
            seen.append(step)
            answer = yield step

    count(recorded(), world, len(survivors))
    return seen


@pytest.mark.parametrize("prompt", [1, 4])
def test_first_pass_of_a_round_reads_what_was_accepted(prompt: int) -> None:
    """Rounds accept 2, 0 and 3 tokens; the last draft is cut to one token."""
    survivors = [2, 0, 0, 0, 3, 0, 0, 0, 0, 0]
    for drafter, widths in (("heads", [1, 1, 1, 3, 1, 1, 1, 1, 1, 4]), ("parallel", [3, 5, 3, 4])):
        steps = steps_of(Parameters(4, 3, drafter=drafter), survivors, prompt)
        drafts = [step for step in steps if isinstance(step, Forward) and step.role == "draft" and step.heads]
        assert [len(step.tokens) for step in drafts] == widths
        assert all(isinstance(step.state, Features) for step in drafts)


@given(
    st.sampled_from(("heads", "parallel")), st.integers(0, 4), st.integers(1, 5), st.booleans(),
    st.sampled_from(("iid", "markov", "rounds")),
)
def test_work_is_the_mean_of_counted_work(drafter: str, gamma: int, tokens: int, kept_full: bool, kind: str) -> None:
    parameters = Parameters(4, gamma, drafter=drafter, draft_layers=2, sequences=2 if kept_full else 1)
    law = {"iid": Iid(0.6), "markov": Markov(0.6, 0.3), "rounds": Rounds([0.9, 0.5, 0.5, 0.1])}[kind]
    total: dict[str, Any] = {}
    if isinstance(law, Rounds):
        mass = -np.diff(np.concatenate([[1.0], law.survival[:gamma], [0.0]]))
        every = [(float(np.prod(mass[list(each)])), [*each, 0]) for each in itertools.product(range(gamma + 1), repeat=tokens - 1)]
    else:
        low, high = (np.asarray(each) for each in law.probabilities(tokens))
        every = []
        for bits in itertools.product((False, True), repeat=tokens - 1):
            rates = [(high if place and bits[place - 1] else low)[place] for place in range(tokens - 1)]
            chance = float(np.prod([rate if hit else 1 - rate for rate, hit in zip(rates, bits, strict=True)]))
            every.append((chance, [next((n for n, hit in enumerate([*bits, False][at:]) if not hit), 0) for at in range(tokens)]))
    for chance, survivors in every:
        account = Account()
        for step in steps_of(parameters, survivors):
            if isinstance(step, Forward):
                account.add(step)
        for role, values in account.totals().by_model.items():
            total[role] = total.get(role, 0.0) + chance * np.array(values)
    found = theory.work(parameters, tokens, law)
    assert found is not None
    for role, values in found.by_model.items():
        np.testing.assert_allclose(values, total[role], rtol=1e-9, atol=1e-12)


def test_draft_that_reads_states_is_refused_where_it_cannot_run() -> None:
    for drafter in ("heads", "parallel"):
        with pytest.raises(ParameterError, match="placement must be 'colocated' with drafter="):
            Parameters(4, 3, drafter=drafter, placement="separate")
        with pytest.raises(ParameterError, match="batching must be 'continuous' or 'lockstep' with drafter="):
            Parameters(4, 3, drafter=drafter, sequences=4, batching="static")
        assert Parameters(4, 3, drafter=drafter, batching="static").reads_states  # one sequence is no batch
    with pytest.raises(ParameterError, match="unknown drafter 'head'"):
        Parameters(4, 3, drafter="head")


def test_prices_of_uniform_costs() -> None:
    """A chain takes one pass per token, a parallel draft one pass; a round without drafts takes none."""
    cost = UnitCost(10, cost_ratio=0.2, verify_cost=((1, 1.0), (4, 1.6)), draft_devices=0.5)
    chain, parallel = (prices_of_rounds.head_prices(cost, 3, parallel=each) for each in (False, True))
    assert chain[1] is parallel[1] is None
    np.testing.assert_allclose(chain[0].time, [10, 14, 18, 22])
    np.testing.assert_allclose(parallel[0].time, [10, 14, 16, 18])
    np.testing.assert_allclose(parallel[0].busy, [10, 13, 15, 17])


# --- Levels of difficulty ---


def test_levels_are_drawn_in_their_shares_and_kept() -> None:
    law = MixedRounds([Rounds([1.0, 1.0]), Rounds([0.0, 0.0]), Rounds([1.0, 0.0])], [2, 1, 1])
    draws = np.full((5, 8), 0.5)
    draws[0] = (np.arange(8) + 0.5) / 8
    assert law.survivors(iter([draws[:2], draws[2:]]), 2).tolist() == [[2, 2, 2, 2, 0, 0, 1, 1]] * 5


def test_first_draw_is_used_again_within_its_level() -> None:
    """The first draw, rescaled to its level, decides the first round: rates hold in each level."""
    law = MixedRounds([Rounds([0.5]), Rounds([0.25])], [0.2, 0.8])
    draws = ((np.arange(1000) + 0.5) / 1000)[None]
    found = law.survivors(iter([draws]), 1)[0]
    assert (found[:200].sum(), found[200:].sum()) == (100, 200)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0, 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ParameterError, match="weights"):
        MixedRounds([Rounds([0.5]), Rounds([0.25])], weights)


def test_levels_must_cover_the_same_positions() -> None:
    with pytest.raises(ParameterError, match=r"same positions in a draft, got \[1, 2\]"):
        MixedRounds([Rounds([0.5]), Rounds([0.25, 0.25])], [1, 1])


def test_one_level_is_its_law() -> None:
    cost, law = UnitCost(4, cost_ratio=0.1), Rounds([0.8, 0.5, 0.4])
    one = theory.predict(Parameters(4, 3), 30, law, cost)
    for mixture in (MixedRounds([law], [3]), MixedRounds([law, Rounds([0.1] * 3)], [1, 0]), MixedRounds([law, law], [1, 2])):
        found = theory.predict(Parameters(4, 3), 30, mixture, cost)
        assert float(found.latency) == pytest.approx(float(one.latency), rel=1e-12)
        assert float(found.latency_variance) == pytest.approx(float(one.latency_variance), rel=1e-9)


# --- One pass or a pass for each ---


def test_break_even_without_bound_on_the_draft() -> None:
    """With very long drafts the root is 1 - 1 / ((1 + c') S*)."""
    speed = float(parallel_drafts.best_chain(0.8, 0.1, 400)[1])
    found = parallel_drafts.break_even_acceptance(0.8, 0.1, 400, parallel_cost_ratio=[0.1, 0.3])
    np.testing.assert_allclose(found, 1 - 1 / (np.array([1.1, 1.3]) * speed), rtol=1e-9)


def test_no_acceptance_is_high_enough_if_the_pass_takes_too_long() -> None:
    assert np.isnan(parallel_drafts.break_even_acceptance(0.9, 0.0, 2, parallel_cost_ratio=0.2))
    assert float(parallel_drafts.break_even_acceptance(1.0, 0.0, 2)) == 1.0


def test_verification_costs_bound_the_parallel_draft() -> None:
    curve = [(1, 1.0), (3, 1.1), (8, 3.0)]
    assert int(parallel_drafts.best_parallel(0.7, 0.1, 7, verify_cost=curve)[0]) == 2
    assert float(parallel_drafts.parallel_speedup(0.7, 0, 5.0)) == 1.0
