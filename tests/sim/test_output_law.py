"""Speculative decoding has exactly the target's distribution, in fractions; known mistakes are detected with their size."""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.methods.autoregressive import algorithm as autoregressive
from model.methods.speculative import algorithm as speculative
from model.steps import CacheError, Commit, Fork, Forward, LayerSpan, Read, Steps
from sim.theorems.output_law import Law, TextLaw, distance, greedy_text, law_of_model, law_of_text, possible_decodings, residual
from tests.support import faulty_speculation
from tests.support.theorem_checks import with_fault

PROMPT = [1, 0]
HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


def laws(words: int = 2) -> st.SearchStrategy[Law]:
    weights = st.lists(st.integers(0, 4), min_size=words, max_size=words).filter(any)
    return weights.map(lambda row: tuple(Fraction(weight, sum(row)) for weight in row))


def decoding(p: Law, q: Law, gamma: int, tokens: int, *, sampled: bool = True, stop: int | None = None) -> TextLaw:
    """Return the distribution of the text if both models ignore their context."""
    parameters = speculative.Parameters(2, gamma, sampled)
    models = {"target": lambda text: p, "draft": lambda text: q}
    ends = () if stop is None else (stop,)
    return law_of_text(lambda: speculative.decode(parameters, PROMPT, tokens, ends), models, PROMPT, tokens)


def bias(p: Law, q: Law, gamma: int = 1, tokens: int = 2) -> Fraction:
    """Return the total variation distance of the text from the target's distribution."""
    return distance(decoding(p, q, gamma, tokens), law_of_model(lambda text: p, PROMPT, tokens))


def first_token(law: TextLaw, token: int) -> Fraction:
    return sum((chance for text, chance in law.items() if text[0] == token), Fraction(0))


# --- The interpreter ---


def test_plain_decoding_has_the_distribution_of_its_model() -> None:
    def says(text: tuple[int, ...]) -> Law:
        return (THIRD, 1 - THIRD) if sum(text) % 2 else (HALF, HALF)

    parameters = autoregressive.Parameters(2)
    found = law_of_text(lambda: autoregressive.decode(parameters, PROMPT, 3), {"target": says}, PROMPT, 3)
    assert found == {greedy_text(says, PROMPT, 3): Fraction(1)} == {(1, 0, 0): Fraction(1)}
    law = law_of_model(says, PROMPT, 2)
    # After [1, 0]: 1/3 and 2/3; after a 0 the sum stays odd, after a 1 it is even.
    assert law == {(0, 0): THIRD**2, (0, 1): THIRD * 2 / 3, (1, 0): Fraction(1, 3), (1, 1): Fraction(1, 3)}
    assert sum(law.values()) == 1


def test_possible_decodings_are_enumerated_once() -> None:
    parameters, q = speculative.Parameters(1, 2, sampled=True), (HALF, HALF)
    models = {"target": lambda text: (THIRD, 1 - THIRD), "draft": lambda text: q}
    decodings = list(possible_decodings(lambda: speculative.decode(parameters, PROMPT, 3), models, PROMPT, 3))
    assert sum(each.chance for each in decodings) == 1
    assert all(each.chance > 0 for each in decodings)
    assert {each.text for each in decodings} == set(product((0, 1), repeat=3))
    assert {commit.drafted for each in decodings for commit in each.commits} == {0, 1, 2}


def numbers(*bounds: Fraction, at_least: bool = False) -> Callable[[], Steps]:
    """Return an algorithm that compares one random number with these bounds in turn, and generates the results."""

    def steps() -> Steps:
        out = yield Forward("target", (0,), 0, LayerSpan(0, 1), heads=1)
        number = yield Read("uniform", out)
        yield Commit("token", tuple(int(number >= bound if at_least else number < bound) for bound in bounds))

    return steps


def test_uniform_number_remembers_its_comparisons() -> None:
    one = {"target": lambda text: (Fraction(1),)}

    def law(*bounds: Fraction, **how: bool) -> TextLaw:
        return law_of_text(numbers(*bounds, **how), one, [0], len(bounds))

    assert law(THIRD, HALF) == {(1, 1): THIRD, (0, 1): HALF - THIRD, (0, 0): HALF}
    assert law(HALF, THIRD) == {(1, 1): THIRD, (1, 0): HALF - THIRD, (0, 0): HALF}
    assert law(HALF, HALF) == {(1, 1): HALF, (0, 0): HALF}
    assert law(Fraction(0), Fraction(1), Fraction(2), Fraction(-1)) == {(0, 1, 1, 0): Fraction(1)}
    assert law(THIRD, at_least=True) == {(0,): THIRD, (1,): 1 - THIRD}


def test_top_tokens_are_sorted_and_ties_keep_order() -> None:
    def steps() -> Steps:
        out = yield Forward("target", (0,), 0, LayerSpan(0, 1), heads=1)
        best = yield Read("next", out)
        yield Commit("top", (best, *(yield Read("top", out, width=2))))

    law = (Fraction(1, 5), Fraction(2, 5), Fraction(2, 5))
    assert law_of_text(steps, {"target": lambda text: law}, [0], 3) == {(1, 1, 2): Fraction(1)}


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        pytest.param(Forward("target", (5,), 2, LayerSpan(0, 1), heads=1), CacheError,
                     "a pass at position 2 of a model that has read 1", id="a gap before the pass"),
        pytest.param(Forward("draft", (5,), 0, LayerSpan(0, 1), heads=1), CacheError, r"draft has read .* where the text is",
                     id="tokens other than the generated text"),
        pytest.param(Fork((), ()), TypeError, "Fork", id="sub-processes"),
    ],
)  # fmt: skip
def test_invalid_step_is_refused(step: Any, error: type[Exception], message: str) -> None:
    def steps() -> Steps:
        yield Forward("target", (0,), 0, LayerSpan(0, 1))
        yield step

    with pytest.raises(error, match=message):
        law_of_text(steps, {"target": lambda text: (HALF, HALF)}, [0], 1)


@pytest.mark.parametrize("offset", [-3, -2, 0])
def test_position_without_logits_cannot_be_read(offset: int) -> None:
    def steps() -> Steps:
        out = yield Forward("target", (0, 1), 0, LayerSpan(0, 1), heads=1)
        yield Read("next", out, offset)

    with pytest.raises(IndexError, match="offset"):
        law_of_text(steps, {"target": lambda text: (HALF, HALF)}, [0, 1], 1)


def test_pass_drops_later_rows_of_its_model() -> None:
    seen: list[tuple[int, ...]] = []

    def says(text: tuple[int, ...]) -> Law:
        seen.append(text)
        return (HALF, HALF)

    def steps() -> Steps:
        out = yield Forward("target", (0, 1, 1, 1), 0, LayerSpan(0, 1), heads=4)
        yield Read("next", out, -4)
        yield Read("next", out, -1)
        out = yield Forward("target", (0, 0), 2, LayerSpan(0, 1), heads=2)
        yield Read("next", out, -2)
        yield Read("next", out)

    law_of_text(steps, {"target": says}, [0, 1], 1)
    assert seen == [(0,), (0, 1, 1, 1), (0, 1, 0), (0, 1, 0, 0)]


def test_no_residual_where_nothing_can_be_rejected() -> None:
    assert residual((HALF, HALF), (THIRD, 1 - THIRD)) == (1, 0)
    with pytest.raises(ArithmeticError, match="zero everywhere"):
        residual((HALF, HALF), (HALF, HALF))


def test_weight_moves_the_residual() -> None:
    p, q = (HALF, HALF, Fraction(0)), (THIRD, Fraction(1, 6), HALF)
    assert residual(p, q) == (THIRD, 1 - THIRD, 0)
    assert residual(p, q, THIRD * 2) == (0, 1, 0)
    with pytest.raises(ArithmeticError, match="for w = 1/3, p"):
        residual(p, q, THIRD)


def test_distance_is_half_the_sum_of_differences() -> None:
    assert distance({(0,): HALF, (1,): HALF}, {(0,): THIRD, (2,): 1 - THIRD}) == Fraction(2, 3)
    assert distance({(0,): Fraction(1)}, {(0,): Fraction(1)}) == 0


# --- Speculative decoding is exact ---


@settings(max_examples=60)
@given(p=laws(), q=laws(), gamma=st.integers(0, 3), tokens=st.integers(1, 4), stop=st.sampled_from([None, 0, 1]))
def test_sampled_text_has_the_distribution_of_the_target(p: Law, q: Law, gamma: int, tokens: int, stop: int | None) -> None:
    assert decoding(p, q, gamma, tokens, stop=stop) == law_of_model(lambda text: p, PROMPT, tokens, stop)


@given(p=laws(3), q=laws(3), gamma=st.integers(0, 3), tokens=st.integers(1, 4), stop=st.sampled_from([None, 0, 1]))
def test_greedy_text_is_that_of_the_target(p: Law, q: Law, gamma: int, tokens: int, stop: int | None) -> None:
    want = greedy_text(lambda text: p, PROMPT, tokens, stop)
    assert decoding(p, q, gamma, tokens, sampled=False, stop=stop) == {want: Fraction(1)}


# --- Known mistakes are not exact ---


@settings(max_examples=60)
@given(p=laws(3), q=laws(3))
def test_distance_of_replacement_drawn_from_p(p: Law, q: Law) -> None:
    """The first token has min(p, q) + (1 - beta) p, which equals p only if min(p, q) = beta p."""
    with pytest.MonkeyPatch.context() as patch:
        with_fault(faulty_speculation.with_mistakes(correction="sample"), speculative, "verify")(patch)
        found = decoding(p, q, 1, 2)
    beta = sum(map(min, p, q))
    want = sum(abs(min(target, draft) - beta * target) for target, draft in zip(p, q, strict=True)) / 2
    law = [first_token(found, token) for token in range(3)]
    assert sum(abs(chance - target) for chance, target in zip(law, p, strict=True)) / 2 == want


def test_worked_example_of_replacement_drawn_from_p() -> None:
    """p = (1/2, 1/2), q = (4/5, 1/5): beta = 7/10, so the first word has probability 1/2 + 3/10 * 1/2 instead of 1/2."""
    with pytest.MonkeyPatch.context() as patch:
        with_fault(faulty_speculation.with_mistakes(correction="sample"), speculative, "verify")(patch)
        found = decoding((HALF, HALF), (Fraction(4, 5), Fraction(1, 5)), 1, 2)
    assert first_token(found, 0) == HALF + Fraction(3, 10) * HALF


def test_one_random_number_for_a_whole_draft_is_wrong() -> None:
    """p = (1/2, 1/2), q = (1, 0): both drafted tokens are accepted, or the first is rejected. (0, 1) has probability 0."""
    with pytest.MonkeyPatch.context() as patch:
        with_fault(faulty_speculation.with_mistakes(one_number=True), speculative, "verify")(patch)
        p, q = (HALF, HALF), (Fraction(1), Fraction(0))
        assert bias(p, q, gamma=2, tokens=3) == Fraction(1, 4)
        assert bias(p, q, gamma=1, tokens=3) == 0


def test_p_and_q_swapped_is_wrong() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): the first word is accepted with probability 2/3, else drawn again; the second always."""
    with pytest.MonkeyPatch.context() as patch:
        with_fault(faulty_speculation.with_mistakes(bound=faulty_speculation.inverted_ratio), speculative, "verify")(patch)
        assert bias((Fraction(3, 4), Fraction(1, 4)), (HALF, HALF)) == Fraction(1, 4)


@given(p=laws(3), q=laws(3))
def test_greedy_draft_must_be_tested_with_probability_one(p: Law, q: Law) -> None:
    """The likeliest word x of q has probability min(1, p / q) instead of p, equal only if q(x) = 1 or p(x) is 0 or 1."""
    x = q.index(max(q))
    with pytest.MonkeyPatch.context() as patch:
        with_fault(faulty_speculation.greedy_draft, speculative, "start")(patch)
        found = decoding(p, q, 1, 2)
        sure = tuple(Fraction(token == x) for token in range(3))
        assert decoding(p, sure, 1, 2) == law_of_model(lambda text: p, PROMPT, 2)
    assert first_token(found, x) == min(Fraction(1), p[x] / q[x])


def test_stale_rows_in_the_draft_cache_are_detected() -> None:
    """Rejected tokens in the draft model's cache lower acceptance, not exactness; the check of read tokens finds them."""

    def never_cut(right: Any, *args: Any) -> Steps:
        steps, answer, held = right(*args), None, 0
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Forward) and step.role == "draft":
                step = replace_at(step, max(held, step.at))
                held = step.at + len(step.tokens)
            answer = yield step

    def replace_at(step: Forward, at: int) -> Forward:
        return step._replace(at=at)

    with pytest.MonkeyPatch.context() as patch:
        with_fault(never_cut, speculative, "decode")(patch)
        with pytest.raises(CacheError, match="draft has read"):
            decoding((HALF, HALF), (THIRD, 1 - THIRD), 2, 6)
