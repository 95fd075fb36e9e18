"""Law of the accepted length under block verification, against enumeration and sampled drafts; parameters and refused laws."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.interpret.simulated_answers import BatchWorld, DraftOutcomes, World
from model.methods.rounds.round_laws import MixedRounds, ReplayRounds, Rounds
from model.methods.speculative import block_verification as blocks
from model.methods.speculative.algorithm import DraftedToken, Parameters, accept_block
from model.outcomes.outcome_laws import Iid, Markov
from model.steps import Batch, Forward, LayerSpan, Read

RATIOS = st.lists(st.integers(0, 12).map(lambda quarters: quarters / 4), min_size=1, max_size=5)
ROW = st.lists(st.integers(1, 5), min_size=2, max_size=3).map(lambda row: [weight / sum(row) for weight in row])


# --- The law ---


@given(RATIOS)
def test_weight_is_the_least_product_of_last_ratios(ratios: list[float]) -> None:
    found, by_token = blocks.weights(ratios), blocks.weights(ratios, "token")
    for index in range(len(ratios)):
        products = [math.prod(ratios[first : index + 1]) for first in range(index + 1)]
        assert found[index] == pytest.approx(min(1.0, *products), rel=1e-12)
        assert by_token[index] == pytest.approx(math.prod(min(1.0, ratio) for ratio in ratios[: index + 1]), rel=1e-12)
    assert np.all(by_token <= found + 1e-12)


@given(st.integers(1, 4), st.data())
def test_law_is_the_mean_of_weights_over_all_drafts(gamma: int, data: Any) -> None:
    p = data.draw(ROW)
    q = data.draw(ROW.filter(lambda row: len(row) == len(p)))
    for verification in ("token", "block"):
        want = np.zeros(gamma)
        for words in itertools.product(range(len(p)), repeat=gamma):
            want += math.prod(q[word] for word in words) * blocks.weights([p[word] / q[word] for word in words], verification)
        found = blocks.survival(p, q, gamma, verification)
        assert found == pytest.approx(want, rel=1e-10)
        rows = [p] * len(p), [q] * len(q)  # one row for each last token, all equal
        assert blocks.survival(*rows, gamma, verification, start=p) == pytest.approx(found, rel=1e-10)


def test_long_drafts_of_two_words_are_enumerated() -> None:
    """Drafts of two words have few different weights: enumeration is fast, survival falls and stays above alpha^i."""
    p, q = [0.3, 0.7], [0.5, 0.5]
    found = blocks.survival(p, q, 60)
    assert np.all(np.diff(found) <= 0)
    low, high = blocks.survival_bounds(0.8, 60)
    assert np.all((low <= found + 1e-12) & (found <= high + 1e-12))
    assert found[-1] > 100 * low[-1]


def test_a_certain_draft_gains_nothing() -> None:
    """q proposes one token always: w_i = alpha^i, the lower bound."""
    assert blocks.survival([0.6, 0.4], [1.0, 0.0], 4) == pytest.approx(0.6 ** np.arange(1, 5))


def test_equal_models_accept_everything() -> None:
    assert blocks.survival([0.6, 0.4], [0.6, 0.4], 4).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([0.5, 0.5], [1.0], 2), "p and q must have one shape, (vocabulary,) or (vocabulary, vocabulary), got (2,) and (1,)"),
        (([[0.5, 0.5]], [[0.5, 0.5]], 2), "p and q must have one shape, (vocabulary,) or (vocabulary, vocabulary), got (1, 2)"),
        (([0.5, 0.4], [0.5, 0.5], 2), "p must sum to 1, got 0.9"),
        (([0.5, 0.5], [0.5, 0.5], -1), "draft_length must be between 0 and 250, got -1"),
        (([0.5, 0.5], [0.5, 0.5], 2, "blocks"), "unknown verification 'blocks'; did you mean block?"),
        (([[0.5, 0.5]] * 2, [[0.5, 0.5]] * 2, 2), "start must be given for distributions by last token"),
    ],
)
def test_bad_distributions_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        blocks.survival(*given)
    assert message in str(error.value)


def test_a_start_of_other_length_and_too_many_drafts_are_refused() -> None:
    half = [[0.5, 0.5]] * 2
    with pytest.raises(ParameterError, match="start must have 2 probabilities"):
        blocks.survival(half, half, 2, start=[1.0])
    with pytest.raises(ParameterError, match="start must be left out for distributions without a last token"):
        blocks.survival(half[0], half[0], 2, start=[0.5, 0.5])
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(200)) for _ in range(2))
    with pytest.raises(ParameterError, match=r"draft_length must be at most \d for distributions of 200 tokens"):
        blocks.survival(p, q, 8)
    with pytest.raises(ParameterError, match="ratios must be a list"):
        blocks.weights(0.5)


# --- The algorithm ---


def answered(steps: Any, ratios: list[float], masses: dict[int, float], uniforms: list[float]) -> tuple[list[Read], Any]:
    """Drive a block's verification; p is the ratio and q 1."""
    asked: list[Read] = []
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as stop:
            return asked, stop.value
        asked.append(step)
        index = step.offset + len(ratios) + 1
        match step.kind:
            case "probability":
                answer = ratios[index] if step.output == "out" else 1.0
            case "residual_mass":
                answer = masses[index]
            case "uniform":
                answer = uniforms[index]
            case _:
                answer = 9


def test_longest_block_is_tested_first_and_the_residual_has_its_weight() -> None:
    guesses = [DraftedToken(5, "first"), DraftedToken(6, "second"), DraftedToken(7, "third")]
    steps = accept_block("out", guesses, -4)
    # Weights 1/2, 1, 1/4. The whole block fails at 1/4; two tokens pass with r / (r + 0) = 1.
    asked, found = answered(steps, [0.5, 2.0, 0.25], {2: 0.3}, [0.0, 0.999, 0.25])
    assert found == (2, 9)
    assert asked[6:] == [
        Read("uniform", "out", -2),
        Read("residual_mass", "out", -2, against="third", weight=1.0), Read("uniform", "out", -3),
        Read("residual", "out", -2, against="third", weight=1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "kept"), [(0.28, 1), (0.29, 0)])
def test_a_block_passes_with_its_residual_mass(number: float, kept: int) -> None:
    """w_1 = 1/2 and r = 1/5, so h = .2 / (.2 + .5) = 2/7 = .2857."""
    guesses = [DraftedToken(5, "first"), DraftedToken(6, "second")]
    asked, found = answered(accept_block("out", guesses, -3), [0.5, 0.5], {1: 0.2}, [number, 0.9])
    assert found == (kept, 9)
    assert asked[-1] == Read("residual", "out", -3 + kept, against=("first", "second")[kept], weight=(1, 0.5)[kept])


def test_without_a_residual_a_block_does_not_pass() -> None:
    """Else the token after it could not be drawn; longer blocks then have its probability."""
    guesses = [DraftedToken(5, "first"), DraftedToken(6, "second")]
    _, found = answered(accept_block("out", guesses, -3), [1.0, 0.5], {1: 0.0}, [0.0, 0.5])
    assert found == (0, 9)


# --- Simulated answers ---


def test_simulated_residual_mass_is_the_weight_unless_both_are_certain_of_one_token() -> None:
    world = World(1, 4, drafts={"draft": DraftOutcomes("target", [1, 0, 0])})
    target, draft = (Forward(role, (0, 1), 0, LayerSpan(0, 4), heads=2) for role in ("target", "draft"))
    for weight in (0.0, 1.0):
        masses = [
            world.read(Read("residual_mass", target, offset, against=draft, against_offset=offset, weight=weight))
            for offset in (-2, -1)
        ]
        assert masses == [0.0, weight]  # the first drafted token survives, the second does not


def test_sequences_of_a_batch_have_their_own_residual_mass() -> None:
    drafts: list[dict[str, DraftOutcomes]] = [{"draft": DraftOutcomes("target", [kept])} for kept in (1, 0)]
    world = BatchWorld([World(1, 4, drafts=each) for each in drafts])
    target = Forward("target", (0, 1, 0, 1), 0, LayerSpan(0, 4), heads=4, batch=Batch.uniform((0, 1), 0, 2, 2))
    draft = Forward("draft", (0, 0), 0, LayerSpan(0, 1), heads=2, batch=Batch.uniform((0, 1), 0, heads=1))
    reads = [Read("residual_mass", target, offset, against=draft, against_offset=other) for offset, other in ((-4, -2), (-2, -1))]
    masses = [world.read(each) for each in reads]
    assert masses == [0.0, 1.0]


# --- Parameters ---


def test_block_verification_needs_sampling() -> None:
    assert not Parameters(4, 2, sampled=True).joint_verification
    assert Parameters(4, 2, sampled=True, verification="block").joint_verification
    with pytest.raises(ParameterError, match="verification must be 'token' with sampled=false, got 'block'"):
        Parameters(4, 2, verification="block")
    with pytest.raises(ParameterError, match=r"unknown verification 'blok'; did you mean block\?"):
        Parameters(4, 2, verification="blok")


def test_laws_of_single_tokens_are_refused() -> None:
    block, token = (Parameters(4, 2, sampled=True, verification=each) for each in ("block", "token"))
    for law in (Iid(0.5), Markov(0.5, 0.1)):
        token.check_law("accept", law)
        with pytest.raises(ParameterError, match="outcomes of accept must be by position within the draft"):
            block.check_law("accept", law)
    rounds = Rounds.by_draft_position([0.5, 0.5])
    for allowed in (rounds, MixedRounds([rounds, rounds], [1, 1]), ReplayRounds([[1, 0]])):
        block.check_law("accept", allowed)
