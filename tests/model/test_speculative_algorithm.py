"""Speculative decoding as a process: its steps by hand, its rounds for random outcomes, and its errors."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.speculative import algorithm as speculative
from model.methods.speculative.algorithm import MAX_DRAFT, DraftedToken, Model, Parameters
from model.steps import Commit, DraftLimit, Forward, LayerSpan, Read, declining

LAYERS = 5


def decoded(
    survivors: Sequence[int], prompt: int = 1, *, stop: int | None = None, **choice: Any
) -> tuple[list[Forward], list[Commit]]:
    """Passes and commits of a decoding of len(survivors) tokens."""
    parameters = Parameters(LAYERS, **choice)
    world = World(prompt, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    steps = declining(speculative.decode(parameters, range(prompt), len(survivors), () if stop is None else (stop,)))
    passes, commits, answer = [], [], None
    written: list[int] = []
    world.written = written
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return passes, commits
        match step:
            case Forward():
                passes.append(step)
                answer = step
            case Read():
                answer = world.read(step)
            case DraftLimit():
                answer = step.longest
            case Commit():
                commits.append(step)
                written += step.tokens
                answer = None


def driven(steps: Any, *answers: Any) -> tuple[list[Any], Any]:
    """Steps of a process that gets these answers, and its return value."""
    asked = [steps.send(None)]
    for answer in answers:
        try:
            asked.append(steps.send(answer))
        except StopIteration as end:
            return asked, end.value
    raise AssertionError(f"it goes on: {asked[-1]}")


# --- Step by step ---


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("placement", "unit"), [("colocated", 0), ("separate", 1)])
def test_all_passes_of_a_decoding_by_hand(sampled: bool, placement: str, unit: int) -> None:
    """All of the first draft is accepted, so the next pass reads two tokens; then one of two; then one token is left."""
    passes, commits = decoded(
        [2, 9, 9, 1, 9, 0], prompt=3, draft_length=2, sampled=sampled, placement=placement, draft_layers=4
    )
    assert [(step.role, step.tokens, step.at, step.heads) for step in passes] == [
        ("target", (0, 1), 0, 0), ("draft", (0, 1), 0, 0),
        ("draft", (2,), 2, 1), ("draft", (3,), 3, 1), ("target", (2, 3, 4), 2, 3),
        ("draft", (4, 5), 4, 1), ("draft", (6,), 6, 1), ("target", (5, 6, passes[7].tokens[2]), 5, 3),
        ("target", (7,), 7, 1),
    ]  # fmt: skip
    assert passes[7].tokens[2] < 0  # a wrong token
    assert passes[0].unit is None  # the target runs on its default unit
    assert {(step.role, step.unit, step.layers.first, step.layers.last, step.state) for step in passes[1:]} == {
        ("target", 0, 0, LAYERS, None), ("draft", unit, 0, 4, None),
    }  # fmt: skip
    assert commits == [Commit("round", (3, 4, 5), 2), Commit("round", (6, 7), 2), Commit("round", (8,), 0)]


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    passes, _ = decoded([0], draft_length=3)
    assert passes == [Forward("target", (0,), 0, LayerSpan(0, LAYERS), None, heads=1, unit=0)]
    passes, _ = decoded([0], prompt=2, draft_length=3)
    assert [step.tokens for step in passes] == [(0,), (0,), (1,)]


def test_rejected_tokens_are_removed_from_both_caches() -> None:
    """One of three drafted tokens is accepted: the next passes of both models start after the two emitted tokens."""
    passes, commits = decoded([1, 0, 3, 0, 0, 0], draft_length=3)
    assert commits[0].tokens == (1, 2)
    after = passes[4:]
    assert [(step.role, step.tokens, step.at) for step in after[:2]] == [("draft", (2,), 2), ("draft", (3,), 3)]


@pytest.mark.parametrize("sampled", [False, True])
def test_reads_of_a_verification(sampled: bool) -> None:
    """Greedy: the target's token; sampled: both probabilities; each at the drafted token's position."""
    drafted = [DraftedToken(7, "first"), DraftedToken(8, "second")]
    answers = [0.5, 1.0, 0.25, 0.25, 0.5, 0.9, 3] if sampled else [7, 3]
    verify = declining(speculative.verify(Model("target", LAYERS, 0, 4), [5, 6], drafted, sampled))
    asked, found = driven(verify, "out", *answers)
    assert found == (1, 3)
    assert asked[0] == Forward("target", (6, 7, 8), 1, LayerSpan(0, LAYERS), None, heads=3, unit=0)
    if sampled:
        assert asked[1:] == [
            Read("probability", "out", -3, token=7), Read("probability", "first", token=7), Read("uniform", "out", -3),
            Read("probability", "out", -2, token=8), Read("probability", "second", token=8), Read("uniform", "out", -2),
            Read("residual", "out", -2, against="second"),
        ]  # fmt: skip
    else:
        assert asked[1:] == [Read("next", "out", -3), Read("next", "out", -2)]


@pytest.mark.parametrize(("number", "kept"), [(0.49, 1), (0.5, 0), (0.51, 0)])
def test_a_token_is_accepted_if_the_uniform_draw_is_below_p_over_q(number: float, kept: int) -> None:
    steps = speculative.verify(Model("target", LAYERS, 0), [5], [DraftedToken(7, "draft")], True)
    asked, found = driven(steps, "out", 0.2, 0.4, number, 9)
    assert found == (kept, 9)
    assert asked[-1] == (Read("sample", "out") if kept else Read("residual", "out", -2, against="draft"))


def test_nothing_is_emitted_after_a_stop_token() -> None:
    for stop, want in ((1, (1,)), (2, (1, 2)), (3, (1, 2, 3))):
        _, commits = decoded([2, 0, 0, 0, 0, 0], draft_length=2, stop=stop)
        assert commits == [Commit("round", want, 2)]
    _, commits = decoded([2, 0, 0, 0, 0, 0], draft_length=2, stop=4)
    assert [commit.tokens for commit in commits] == [(1, 2, 3), (4,)]
    # A stop token at the end of the prompt does not end the sequence.
    _, commits = decoded([0, 0], prompt=3, draft_length=0, stop=2)
    assert [commit.tokens for commit in commits] == [(3,), (4,)]


def test_a_draft_is_greedy_or_sampled() -> None:
    for sampled, kind in ((False, "next"), (True, "sample")):
        asked, found = driven(speculative.draft(Model("draft", 2, 1, 1, sampled), [5, 6], 1), "out", 9)
        assert asked == [Forward("draft", (6,), 1, LayerSpan(0, 2), None, heads=1, unit=1), Read(kind, "out")]  # type: ignore[arg-type]
        assert found == [DraftedToken(9, "out")]


# --- Random outcomes ---


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 5), st.booleans(), st.integers(1, 3))
def test_rounds_follow_the_accepted_lengths(survivors: list[int], gamma: int, sampled: bool, prompt: int) -> None:
    n, at, want, drafted = len(survivors), 0, [], 0
    while at < n:
        length = min(gamma, n - at - 1)
        kept = min(survivors[at], length)
        want.append((kept, length))
        drafted += length
        at += kept + 1
    parameters = Parameters(LAYERS, gamma, sampled)
    steps = speculative.decode(parameters, range(prompt), n)
    found = interpreter.count(steps, World(prompt, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)}), n)
    assert sorted(found.rounds.elements()) == sorted(want)
    assert found.tokens == list(range(prompt, prompt + n))
    assert found.passes_of["target"] == len(want) + (prompt > 1)
    assert found.passes_of["draft"] == drafted + (prompt > 1)
    assert found.commits == ["round"] * len(want)


# --- Parameters ---


def test_properties_of_the_parameters() -> None:
    choice = Parameters(40, 3)
    assert (choice.sampled, choice.placement, choice.draft_layers) == (False, "colocated", 1)
    assert (choice.longest_draft, choice.units, Parameters(40, 3, placement="separate").units) == (3, 1, 2)
    assert (Parameters.OUTCOMES, Parameters.ROLES, Parameters.EXACT) == (("accept",), ("draft",), True)
    assert dict(Parameters.IMITATES) == {"draft": ("target", "accept")}
    assert dict(Parameters.ALIASES) == {"num_speculative_tokens": "draft_length"}
    assert Model("target", 4, 0) == Model("target", 4, 0, 0, False)
    assert MAX_DRAFT == 250  # positions in a draft, and the one after it, fit a byte
    assert Parameters(1, MAX_DRAFT).longest_draft == MAX_DRAFT
    assert Parameters(1, 0).longest_draft == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_length": -1}, "draft_length must be between 0 and 250, got -1"),
        ({"draft_length": 251}, "draft_length must be between 0 and 250, got 251"),
        ({"layers": 0}, "layers must be between 1 and 10000, got 0"),
        ({"layers": 10001}, "layers must be between 1 and 10000, got 10001"),
        ({"draft_layers": 0}, "draft_layers must be between 1 and 10000, got 0"),
        ({"draft_layers": 10001}, "draft_layers must be between 1 and 10000, got 10001"),
        ({"sampled": 1}, "sampled must be true or false, got 1"),
        ({"placement": "adjacent"}, "unknown placement 'adjacent'; known: colocated, separate"),
    ],
)
def test_invalid_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Parameters(**{"layers": 4, "draft_length": 2} | change)
    assert str(error.value) == message
    assert Parameters(layers=10000, draft_length=2, draft_layers=10000)
    assert Parameters(layers=1, draft_length=2, draft_layers=1)


def test_commits_hold_the_accepted_tokens_and_the_targets_own() -> None:
    text, guesses = [4], [DraftedToken(7, None), DraftedToken(8, None)]
    assert list(speculative.commit(text, guesses, 1, 9)) == [Commit("round", (7, 9), 2)]
    assert text == [4, 7, 9]
    assert list(speculative.commit(text, guesses, 2, 7, stop=(9, 8))) == [Commit("round", (7, 8), 2)]
    assert text == [4, 7, 9, 7, 8]
