"""Speculative decoding of batches as a process: each sequence equals its decoding alone; passes cover all remaining sequences."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.interpret import interpreter
from model.interpret.account import Account
from model.interpret.simulated_answers import DraftOutcomes, World, batch_world
from model.methods.draft_model import PLACEMENTS
from model.methods.speculative import algorithm as speculative
from model.methods.speculative.algorithm import Model, Parameters
from model.steps import Batch, CacheError, Commit, DraftLimit, Forward, LayerSpan, Read, Steps, declining

LAYERS = 5


def world(survivors: Sequence[int], prompt: int = 1) -> World:
    return World(prompt, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})


def steps_of(steps: Steps, answers: World, wanted: int = 10**6) -> list[Any]:
    """All steps of a process that declines offers; passes are their own answers."""
    steps = declining(steps)
    found: list[Any] = []
    out = interpreter.CountedWork()
    answers.written, answers.generated = out.tokens, out.sequences
    answer: Any = None
    while len(out.tokens) < wanted:
        try:
            step = steps.send(answer)
        except StopIteration:
            return found
        if isinstance(step, DraftLimit):  # of a single sequence
            answer = step.longest
            continue
        found.append(step)
        answer = step if isinstance(step, Forward) else answers.read(step) if isinstance(step, Read) else None
        if isinstance(step, Commit):
            out.tokens += step.tokens
            if step.sequence is not None:
                out.sequences.setdefault(step.sequence, []).extend(step.tokens)
    return found


def one_at_a_time(parameters: Parameters, prompt: Sequence[int], tokens: int) -> Steps:
    """Algorithm 1 of the paper for one sequence."""
    text, end = list(prompt), len(prompt) + tokens
    drafter = yield from speculative.start(parameters, text)
    while len(text) < end:
        guesses = yield from speculative.draft(drafter, text, min(parameters.draft_length, end - len(text) - 1))
        kept, token = yield from speculative.verify(Model("target", LAYERS, 0), text, guesses, parameters.sampled)
        yield from speculative.commit(text, guesses, kept, token)
        drafter.rows = min(drafter.rows, len(text) - 1)


LUCK = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=5)
CHOICES = st.fixed_dictionaries({
    "draft_length": st.integers(0, 4), "sampled": st.booleans(), "placement": st.sampled_from(PLACEMENTS),
})  # fmt: skip


def choice(random_draws: Sequence[Sequence[int]], batch: int, **more: Any) -> Parameters:
    lengths = tuple(map(len, random_draws))
    return Parameters(LAYERS, sequences=batch, batching="static", lengths=lengths, **{"draft_length": 2} | more)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), CHOICES, st.integers(1, 3))
def test_a_batch_of_one_sequence_is_that_sequence(survivors: list[int], more: dict[str, Any], prompt: int) -> None:
    n, single = len(survivors), Parameters(LAYERS, **more)
    want = steps_of(one_at_a_time(single, range(prompt), n), world(survivors, prompt))
    for one in (single, dataclasses.replace(single, sequences=1, batching="static", lengths=(n,))):
        assert steps_of(speculative.decode(one, range(prompt), n), world(survivors, prompt)) == want
        assert steps_of(speculative.decode(one, [9] * prompt, n, prompts=[range(prompt)]), world(survivors, prompt)) == want


@given(LUCK, CHOICES, st.integers(1, 5), st.data())
def test_a_sequence_is_independent_of_its_batch(
    random_draws: list[list[int]], more: dict[str, Any], batch: int, data: st.DataObject
) -> None:
    """Its tokens, its rounds and their accepted lengths; also with separate prompts of any length."""
    prompts = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=len(random_draws), max_size=len(random_draws)))
    lengths = [1] * len(random_draws) if prompts is None else prompts
    own = [] if prompts is None else [range(length) for length in prompts]
    answers = batch_world([world(survivors, length) for survivors, length in zip(random_draws, lengths, strict=True)])
    parameters = choice(random_draws, batch, **more)
    steps = speculative.decode(parameters, [0], max(map(len, random_draws)), prompts=own)
    found = interpreter.count(steps, answers, parameters.total_tokens(max(map(len, random_draws))))
    assert len(found.tokens) == sum(map(len, random_draws))
    for number, (survivors, length) in enumerate(zip(random_draws, lengths, strict=True)):
        steps = speculative.decode(Parameters(LAYERS, **more), range(length), len(survivors))
        alone = interpreter.count(steps, world(survivors, length), len(survivors))
        mine = [each for each in found.committed if each.sequence in (number, None)]
        assert [each._replace(sequence=None) for each in mine] == alone.committed
        if len(random_draws) > 1:
            assert found.sequences[number] == alone.tokens == [*range(length, length + len(survivors))]


def rounds_of(survivors: Sequence[int], gamma: int) -> list[tuple[int, int, int]]:
    """Start, drafted and accepted tokens of each round of a sequence."""
    found, at = [], 0
    while at < len(survivors):
        room = min(gamma, len(survivors) - at - 1)
        found.append((at, room, min(survivors[at], room)))
        at += found[-1][2] + 1
    return found


@given(LUCK, CHOICES, st.integers(1, 5))
def test_passes_cover_all_remaining_sequences(random_draws: list[list[int]], more: dict[str, Any], batch: int) -> None:
    """Compared with a plain loop over the rounds of the sequences, one batch after another."""
    gamma, want = more["draft_length"], []
    for start in range(0, len(random_draws), batch):
        group = {start + index: rounds_of(own, gamma) for index, own in enumerate(random_draws[start : start + batch])}
        drafts = 0
        for number in range(max(map(len, group.values()))):
            here = {text: rounds[number] for text, rounds in group.items() if number < len(rounds)}
            # After a completely accepted draft the draft model has not read its last token.
            behind = number > 0 and any(rounds[number - 1][2] == drafts for text, rounds in group.items() if text in here)
            drafts = max(room for _, room, _ in here.values())
            places = [at for at, _, _ in here.values()]
            for index in range(drafts):
                again = behind and not index
                want.append(("draft", 1 + again, [*here], [at + index - again for at in places], 1))
            want.append(("target", drafts + 1, [*here], places, drafts + 1))
    answers = batch_world([world(own) for own in random_draws])
    made = steps_of(speculative.decode(choice(random_draws, batch, **more), [0], max(map(len, random_draws))), answers)
    passes = [each for each in made if isinstance(each, Forward)]
    found = []
    for each in passes:
        sequences = [0] if each.batch is None else [*each.batch.sequences]
        stands = [*each.positions][:: each.width]
        found.append((each.role, each.width, sequences, stands, each.heads // each.batch_size))
        assert each.at == min(stands)
        assert each.unit == (1 if more["placement"] == "separate" and each.role == "draft" else 0)
        assert (each.layers.first, each.layers.last) == (0, LAYERS if each.role == "target" else 1)
    assert found == want


def test_two_sequences_by_hand() -> None:
    """Two sequences with different accepted lengths, step by step.

    The first accepts all three tokens of its first draft, the second one, so that both read two tokens at different positions. Then
    the second sequence ends, and the first continues alone.
    """
    random_draws = [[2, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0]]
    steps = speculative.decode(Parameters(LAYERS, 2, sequences=2, batching="static", lengths=(7, 4)), [0], 7)
    made = steps_of(steps, batch_world([world(own) for own in random_draws]))
    passes = [
        (each.role, each.tokens, each.at, each.batch.sequences, () if each.batch.aligned else each.batch.positions)
        for each in made if isinstance(each, Forward) and each.batch
    ]  # fmt: skip
    assert passes[:6] == [
        ("draft", (0, 0), 0, (0, 1), ()), ("draft", (1, 1), 1, (0, 1), ()), ("target", (0, 1, 2, 0, 1, -3), 0, (0, 1), ()),
        ("draft", (2, 3, 1, 2), 1, (0, 1), (2, 1)), ("draft", (4, -4), 3, (0, 1), (4, 3)),
        ("target", (3, 4, -6, 2, -4, -5), 2, (0, 1), (3, 2)),
    ]  # fmt: skip
    commits = [each for each in made if isinstance(each, Commit)]
    assert commits[:4] == [
        Commit("round", (1, 2, 3), 2, sequence=0), Commit("round", (1, 2), 2, sequence=1), Commit("round", (4, 5), 2, sequence=0),
        Commit("round", (3,), 1, sequence=1),
    ]  # fmt: skip
    # The second sequence can use no more tokens, and still drafts with the first.
    assert passes[6:9] == [
        ("draft", (5, 3), 3, (0, 1), (5, 3)), ("target", (5, -7, 3, -5), 3, (0, 1), (5, 3)), ("target", (6,), 6, (0,), ()),
    ]  # fmt: skip
    assert commits[4:] == [
        Commit("round", (6,), 1, sequence=0), Commit("round", (4,), 0, sequence=1), Commit("round", (7,), 0, sequence=0),
    ]  # fmt: skip


def test_sequences_leave_at_a_stop_token() -> None:
    random_draws = [[2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    steps = speculative.decode(Parameters(LAYERS, 2, sequences=2, batching="static"), [0], 6, stop=(2,))
    made = steps_of(steps, batch_world([world(own) for own in random_draws]))
    commits = [each for each in made if isinstance(each, Commit)]
    assert [(each.sequence, each.tokens) for each in commits] == [(0, (1, 2)), (1, (1,)), (1, (2,))]
    assert [each.batch.sequences for each in made if isinstance(each, Forward) and each.batch][-1] == (1,)


def test_invalid_passes_over_a_batch_are_refused() -> None:
    cache = interpreter.Cache()
    step = Forward("target", (0, 1, 0, 1), 3, LayerSpan(0, 2), batch=Batch.uniform((0, 1), (3, 4), 2))
    for wrong in ((3,), (4, 4), (2, 4)):
        with pytest.raises(CacheError, match="batch"):
            cache.write(step._replace(batch=Batch.uniform((0, 1), wrong, 2)))
    with pytest.raises(CacheError, match="batch"):
        cache.write(step._replace(tokens=(1,)))
    cache.write(Forward("target", (0, 1, 2), 0, LayerSpan(0, 2)))
    with pytest.raises(CacheError, match="at position 4"):  # the second sequence has three rows
        cache.write(step)
    cache.write(Forward("target", (3,), 3, LayerSpan(0, 2), batch=Batch.uniform((1,), 3)))
    cache.write(step)
    assert {number: each.rows for number, each in cache.sequences.items()} == {0: {"target": [5, 5]}, 1: {"target": [6, 6]}}
    assert cache.rows == {"target": [3, 3]}


def test_a_sequence_continues_from_the_rows_of_both_models() -> None:
    """Either model may make the first pass."""
    cache = interpreter.Cache()
    for role in ("target", "draft"):
        cache.write(Forward(role, (0, 1), 0, LayerSpan(0, 2)))
    cache.write(Forward("draft", (3,), 2, LayerSpan(0, 2), batch=Batch.uniform((1,), 2)))
    cache.write(Forward("target", (3,), 2, LayerSpan(0, 2), batch=Batch.uniform((1,), 2)))
    assert cache.sequences[1].rows == {"target": [3, 3], "draft": [3, 3]}


def test_attention_and_rows_of_passes_over_unequal_sequences() -> None:
    """Tokens attend to their own sequence; the rows read per sequence are those of the longest."""
    account = Account()
    account.add(Forward("target", (0,) * 6, 2, LayerSpan(0, 3), heads=6, batch=Batch.uniform((0, 1, 2), (2, 7, 4), 2, heads=2)))
    found = account.totals().by_model["target"]
    assert found.attended == 3 * (3 + 4 + 8 + 9 + 5 + 6)
    assert found.rows_read == 3 * 3 * 9
    assert (found.layer_passes, found.layer_runs, found.heads) == (18, 3, 6)


def test_properties_of_parameters_of_batches() -> None:
    choice = Parameters(LAYERS, 3, sequences=4, batching="static", lengths=(5, 2))
    assert (choice.decoded_sequences, choice.largest_pass, choice.total_tokens(5), choice.plain_steps(5)) == (2, 8, 7, 5)
    four = Parameters(LAYERS, 3, sequences=4, batching="static")
    assert (four.decoded_sequences, four.largest_pass) == (4, 16)
    one = Parameters(LAYERS, 3)
    assert (one.decoded_sequences, one.largest_pass, one.total_tokens(5), one.plain_steps(5)) == (1, 4, 5, 5)
    for wrong in ({"sequences": 0}, {"lengths": ()}, {"lengths": (0,)}):
        with pytest.raises(ParameterError, match=r"sequences|lengths"):
            Parameters(LAYERS, 3, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="the largest of lengths must equal tokens=4"):
        next(speculative.decode(choice, [0], 4))
