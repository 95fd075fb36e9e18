"""Batches at unequal positions on real models: every sequence equals the one decoded alone, without a cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.decoders import kv_rows
from calibrate.decoders.kv_rows import KvRows, LayerRows, RowsWritten, WritePositions, join_rows
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import PassOutput, RandomDraws, Real
from model.base.checks import ParameterError
from model.methods.speculative import algorithm as speculative
from model.methods.speculative.algorithm import Parameters
from model.steps import Batch, CacheError, Commit, Forward, LayerSpan, Read
from tests.support import real_models
from tests.support.tiers import cross_rows, examples

KINDS = [kind for kind in real_models.KINDS if kind not in real_models.ENCODER_DECODERS]
LAYERS, DRAFT = real_models.DEPTHS["target"], real_models.DEPTHS["draft"]
PROMPTS = [[3, 4, 5], [6], [9, 9, 8, 7, 1, 2], [3, 4, 6], [11, 2]]
LENGTHS = (12, 5, 9, 12, 1)
DRAFTS = [(weights, batch) for weights in ("others", "its own") for batch in (1, 2, 5)]
"""Weights of the draft, which make it mostly right or wrong, and the batch size."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def written(decoders: Any, parameters: Parameters, prompts: Sequence[Sequence[int]] = PROMPTS, **more: Any) -> dict[int, list[int]]:
    real = Real(decoders, **more)
    steps = speculative.decode(parameters, prompts[0], max(LENGTHS), prompts=prompts)
    return real.run(steps, parameters.total_tokens(max(LENGTHS))).sequences


def choice(batch: int, gamma: int = 3, **more: Any) -> Parameters:
    return Parameters(LAYERS, gamma, draft_layers=DRAFT, sequences=batch, batching="static", lengths=LENGTHS, **more)


@pytest.mark.parametrize(("drafts", "kind"), cross_rows(DRAFTS, KINDS, (("others", 5), ("its own", 2))))
def test_greedy_batches_equal_the_target_alone(drafts: tuple[str, int], kind: str) -> None:
    same, batch = drafts[0] == "its own", drafts[1]
    found = written(real_models.decoders(kind, "draft", same=same), choice(batch))
    full = real_models.model(kind, LAYERS)
    for number, length in enumerate(LENGTHS):
        assert found[number] == real_models.reference_tokens(full, PROMPTS[number], length), number


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_greedy_batches_for_any_draft_length(gamma: int) -> None:
    """The target is its own draft, so all drafts are accepted, and two tokens are read in every round."""
    target = real_models.decoders("llama")["target"]
    full = real_models.model("llama", LAYERS)
    want = {number: real_models.reference_tokens(full, PROMPTS[number], length) for number, length in enumerate(LENGTHS)}
    parameters = Parameters(LAYERS, gamma, draft_layers=LAYERS, sequences=4, batching="static", lengths=LENGTHS)
    assert written({"target": target, "draft": target}, parameters) == want


def test_a_shared_prompt_is_read_once() -> None:
    prompts = [PROMPTS[0]] * 5
    decoders = real_models.decoders("gpt2", "draft")
    real = Real(decoders)
    work = real.run(speculative.decode(choice(3), PROMPTS[0], 12), sum(LENGTHS))
    assert work.sequences == written(decoders, choice(3), prompts)
    wholes = [kind for kind in work.account.passes_by_kind if not kind.heads]  # without projection
    assert [(kind.role, kind.width, work.account.passes_by_kind[kind][0]) for kind in wholes] == [("target", 2, 1), ("draft", 2, 1)]


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_sampled_sequences_use_the_same_draws_in_any_batch(kind: str) -> None:
    decoders = real_models.decoders(kind, "draft", same=True)
    alone, two, all_ = (written(decoders, choice(batch, sampled=True), random_draws=RandomDraws(7)) for batch in (1, 2, 5))
    assert alone == two == all_
    assert alone != written(decoders, choice(1, sampled=True), random_draws=RandomDraws(8))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_pass_equal_those_from_scratch(kind: str) -> None:
    """Passes of one and three tokens, of sequences that are rolled back in between, with only the last tokens projected."""
    decoder, full = real_models.decoders(kind)["target"], real_models.model(kind, LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    sequences = {0: [3, 4, 5, 6], 2: [7], 5: [1, 2]}
    for number, own in sequences.items():
        real.forward(held, Forward("target", tuple(own), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))

    def made(words: dict[int, tuple[int, ...]], keep: dict[int, int], heads: int) -> None:
        width = len(next(iter(words.values())))
        for number, position in keep.items():
            sequences[number] = [*sequences[number][:position], *words[number]]
        tokens = tuple(word for own in words.values() for word in own)
        positions = tuple(keep.values())
        batch = Batch.uniform(tuple(words), positions, width, heads)
        step = Forward("target", tokens, min(positions), LayerSpan(0, LAYERS), heads=heads * len(words), batch=batch)
        out = real.forward(held, step)
        for index, number in enumerate(words):
            for row in range(heads):
                offset = (index + 1) * width - heads + row
                own = sequences[number][: len(sequences[number]) - heads + row + 1]
                want = real_models.logits(full, own)
                for each in (offset, offset - len(tokens)):
                    assert torch.allclose(out.logits[out.row(each)], want, rtol=0, atol=1e-12)

    made({0: (8,), 2: (9,), 5: (1,)}, {0: 4, 2: 1, 5: 2}, 1)
    made({0: (1, 2, 3), 2: (4, 5, 6), 5: (7, 8, 9)}, {0: 3, 2: 2, 5: 3}, 3)
    made({0: (1, 2), 5: (7, 8)}, {0: 4, 5: 3}, 1)  # sequence 2 has left, and both others are cut
    made({0: (1, 2, 5, 4), 5: (7, 8, 6, 6)}, {0: 6, 5: 4}, 2)
    assert isinstance(
        real.forward(held, Forward("target", (3,), 8, LayerSpan(0, LAYERS), heads=1, batch=Batch.uniform((5,), 8, heads=1))),
        PassOutput,
    )


def read_apart(decoder: Decoder, sequences: dict[int, list[int]]) -> tuple[Real, Any]:
    """An interpreter and its state after each sequence was read separately."""
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in sequences.items():
        real.forward(held, Forward("target", tuple(own), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    return real, held


def ragged(words: dict[int, tuple[int, ...]], positions: Sequence[int], heads: Sequence[int], layers: LayerSpan) -> Forward:
    batch = Batch(tuple(words), tuple(positions), tuple(map(len, words.values())), tuple(heads))
    tokens = tuple(word for own in words.values() for word in own)
    return Forward("target", tokens, min(positions), layers, heads=sum(heads), batch=batch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_unequal_widths_equal_those_from_scratch(kind: str) -> None:
    """One, three and two tokens; appended, after a rollback, and in two passes through the layers."""
    decoder, full = real_models.decoders(kind)["target"], real_models.model(kind, LAYERS)
    sequences = {0: [3, 4, 5, 6], 2: [7], 5: [1, 2]}
    real, held = read_apart(decoder, sequences)

    def made(words: dict[int, tuple[int, ...]], positions: Sequence[int], heads: Sequence[int], cut: int = LAYERS) -> None:
        for (number, own), position in zip(words.items(), positions, strict=True):
            sequences[number] = [*sequences[number][:position], *own]
        step = ragged(words, positions, heads, LayerSpan(0, LAYERS))
        if cut < LAYERS:
            first = ragged(words, positions, [0] * len(heads), LayerSpan(0, cut))
            out = real.forward(held, step._replace(layers=LayerSpan(cut, LAYERS), state=real.forward(held, first)))
        else:
            out = real.forward(held, step)
        offset = 0
        for (number, own), projected in zip(words.items(), heads, strict=True):
            for index in range(len(own)):
                before = sequences[number][: len(sequences[number]) - len(own) + index + 1]
                if index >= len(own) - projected:
                    for each in (offset, offset - len(step.tokens)):
                        assert torch.allclose(out.logits[out.row(each)], real_models.logits(full, before), rtol=0, atol=1e-12)
                else:
                    with pytest.raises(CacheError, match=f"sequence {number} is read, but only its last {projected} are projected"):
                        out.row(offset)
                offset += 1
        assert out.logits.shape[0] == sum(heads)

    made({0: (8,), 2: (9, 1, 2), 5: (1, 4)}, (4, 1, 2), (1, 3, 1))
    made({0: (1, 2, 3), 2: (4,), 5: (7, 8)}, (3, 2, 3), (0, 1, 2))  # two are rolled back
    made({5: (2, 2, 2, 2), 0: (9,)}, (5, 6), (2, 1), cut=2)  # sequence 2 has left, the others are in another order
    made({0: (1,), 5: (7,)}, (7, 9), (1, 1))
    made({0: (3, 3), 2: (5,), 5: (4, 4, 4)}, (3, 3, 3), (2, 1, 3))  # at equal positions, which cuts two of them
    lengths = [[len(own)] * LAYERS for own in sequences.values()]
    assert [held.expected_rows.sequences[number].rows["target"] for number in sequences] == lengths


def test_states_of_unequal_widths_are_those_of_each_sequence_alone() -> None:
    """Also the states before the last layer, which early exit compares; padding is removed."""
    decoder = real_models.decoders("llama")["target"]
    sequences = {4: [3, 4, 5], 1: [7]}
    words, positions, span = {4: (8,), 1: (5, 6, 7)}, (3, 1), LayerSpan(0, 3)
    real, held = read_apart(decoder, sequences)
    wrote: list[tuple[int, int]] = []
    whole = LayerRows.write_each

    def noted(self: LayerRows, keys: Any, values: Any, spots: Any) -> Any:
        wrote.extend(zip(spots.sequences.tolist(), spots.positions.tolist(), strict=True))
        return whole(self, keys, values, spots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRows, "write_each", noted)
        together = real.forward(held, ragged(words, positions, (0, 0), span)._replace(compared=4))
    assert wrote == [(0, 3), (1, 1), (1, 2), (1, 3)] * span.size  # each row once: padding writes none
    start = 0
    for (number, own), position in zip(words.items(), positions, strict=True):
        real, held = read_apart(decoder, {number: sequences[number]})
        alone = real.forward(held, ragged({number: own}, (position,), (0,), span)._replace(compared=len(own)))
        for whole, part in ((together.states, alone.states), (together.before, alone.before)):
            assert torch.allclose(whole[start : start + len(own)], part, rtol=0, atol=1e-12)  # type: ignore[index,arg-type]
        start += len(own)
    assert together.states is not None
    assert together.states.shape[0] == start


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompts_of_unequal_lengths_are_read_in_one_pass(kind: str) -> None:
    """A sequence decodes while others still read their prompts, as requests of a server do; each equals the one alone."""
    prompts = {0: [3, 4, 5, 6, 7, 8, 9], 1: [6, 2], 2: [9]}
    layers = LayerSpan(0, LAYERS)

    def steps() -> Any:
        sequences, read = {number: [*own] for number, own in prompts.items()}, dict.fromkeys(prompts, 0)
        while True:
            words = {number: tuple(own[read[number] :][:3]) for number, own in sequences.items()}
            done = {number: read[number] + len(own) == len(sequences[number]) for number, own in words.items()}
            step = ragged(words, [read[number] for number in words], [int(done[number]) for number in words], layers)
            out = yield step
            for index, (number, own) in enumerate(words.items()):
                read[number] += len(own)
                if done[number]:
                    assert step.batch is not None
                    sequences[number].append((yield Read("next", out, step.batch.starts[index] + len(own) - 1)))
                    yield Commit("token", (sequences[number][-1],), sequence=number)

    found = Real({"target": real_models.decoders(kind)["target"]}).run(steps(), 14).sequences
    full = real_models.model(kind, LAYERS)
    assert {number: len(own) for number, own in found.items()} == {0: 4, 1: 6, 2: 6} or sum(map(len, found.values())) == 14
    for number, own in found.items():
        assert own == real_models.reference_tokens(full, prompts[number], len(own))


def test_sequences_at_equal_positions_again_need_no_mask() -> None:
    """Rows written at unequal positions before stay."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    real.forward(held, Forward("target", (1, 2, 7, 8), 1, LayerSpan(0, LAYERS), batch=Batch.uniform((0, 1), (3, 1), 2)))
    out = real.forward(held, Forward("target", (5, 6), 3, LayerSpan(0, LAYERS), heads=2, batch=Batch.uniform((0, 1), 3, heads=1)))
    for row, own in enumerate(([3, 4, 5, 5], [6, 7, 8, 6])):
        assert torch.allclose(out.logits[row], real_models.logits(full, own), rtol=0, atol=1e-12)
    assert {layer.ends for layer in held.rows_of("target", (0, 1)).layers} == {None}


def test_writes_of_a_copied_batch_and_its_original_are_separate() -> None:
    """After a fork, neither sees the rows that the other writes."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    step = Forward("target", (1, 2, 7, 8), 1, LayerSpan(0, LAYERS), heads=4, batch=Batch.uniform((0, 1), (3, 1), 2, heads=2))
    real.forward(held, step)
    twin = held.copy()
    assert {layer.ends for layer in twin.rows_of("target", (0, 1)).layers} == {(5, 3)}
    other = real.forward(twin, step._replace(tokens=(9, 9, 9, 9)))
    more = real.forward(
        held, Forward("target", (5, 6), 3, LayerSpan(0, LAYERS), heads=2, batch=Batch.uniform((0, 1), (5, 3), heads=1))
    )
    assert torch.allclose(more.logits[1], real_models.logits(full, [6, 7, 8, 6]), rtol=0, atol=1e-12)
    assert torch.allclose(other.logits[3], real_models.logits(full, [6, 9, 9]), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_rows_of_sequences_are_joined_and_selected(lengths: list[int], data: st.DataObject) -> None:
    """The rows of a sequence do not depend on those stored with it."""
    decoder: Decoder = real_models.decoders("llama")["target"]
    parts = []
    for number, length in enumerate(lengths):
        rows = decoder.rows()
        if length:
            decoder.run(tuple((number + each) % 29 for each in range(length)), 0, LayerSpan(0, LAYERS), rows)
        parts.append(rows)
    whole = join_rows(parts)
    picked = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    some = whole.select(picked)
    for layer in range(LAYERS):
        own, all_ = some.layers[layer], whole.layers[layer]
        assert own.length == max((lengths[each] for each in picked), default=0) or own.keys is None
        assert (own.ends is None) == (len({lengths[each] for each in picked}) == 1 or own.keys is None)
        assert own.initialized == (own.ends is not None)  # otherwise the next pass would copy all rows again
        assert all_.initialized == (all_.ends is not None)
        assert all_.length == max(lengths) or all_.keys is None
        for index, number in enumerate(picked):
            rows = parts[number].layers[layer]
            if rows.keys is not None and rows.values is not None:
                assert own.keys is not None
                assert own.values is not None
                for mine, theirs in ((own.keys, rows.keys), (own.values, rows.values)):
                    assert torch.equal(mine[index, :, : rows.length], theirs[0, :, : rows.length])


def test_a_wrong_number_of_rows_is_an_error() -> None:
    real = Real({"target": real_models.decoders("llama")["target"]})
    held = real.new_cache()
    step = Forward("target", (1, 2), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((0, 1), 0))
    real.forward(held, step)
    real.forward(held, Forward("target", (1,), 1, LayerSpan(0, LAYERS), batch=Batch.uniform((0,), 1)))
    rows = held.rows_of("target", (0, 1))
    whole = LayerRows.write_each

    def short(self: LayerRows, keys: Any, values: Any, spots: Any) -> Any:
        found = whole(self, keys, values, spots)
        if self is rows.layers[3]:
            self.ends = (2, 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRows, "write_each", short)
        with pytest.raises(CacheError, match=r"layer 3 should hold \(3, 2\) positions, it holds \(2, 1\)"):
            real.forward(held, step._replace(at=1, batch=Batch.uniform((0, 1), (2, 1))))


def test_a_batch_beyond_the_models_positions_is_refused() -> None:
    decoder = real_models.decoders("llama")["target"]
    rows = join_rows([decoder.rows(), decoder.rows()])
    with pytest.raises(ParameterError, match="at most 96 positions"):
        decoder.run((1, 2), 0, LayerSpan(0, LAYERS), rows, batch=Batch.uniform((0, 1), (96, 0)))


def test_an_encoder_decoder_has_no_batches() -> None:
    with pytest.raises(ParameterError, match="batch must be 1 with an encoder-decoder"):
        written(real_models.decoders("t5", "draft"), choice(2))


# --- shared rows ---


def rows_of(values: Sequence[float]) -> LayerRows:
    """Rows of a sequence, a single number each."""
    rows = LayerRows()
    kept = torch.tensor(values).reshape(1, 1, -1, 1)
    rows.write(kept, kept)
    return rows


def held(rows: LayerRows) -> list[float]:
    assert rows.keys is not None
    return rows.keys[0, 0, : rows.length, 0].tolist()


def test_a_cut_original_does_not_overwrite_what_its_copy_reads() -> None:
    """The original drops a row and writes another; the copy, which shares the buffer, keeps its rows."""
    original = rows_of([1.0, 2.0, 3.0])
    copy = original.copy()
    original.length = 2
    original.write(torch.full((1, 1, 1, 1), 9.0), torch.full((1, 1, 1, 1), 9.0))
    assert (held(original), held(copy)) == ([1, 2, 9], [1, 2, 3])


def test_a_copy_never_writes_in_the_buffer_of_its_original() -> None:
    """Original and copy both add a row; only the original uses the spare capacity of the shared buffer."""
    original = rows_of([1.0, 2.0])
    copy = original.copy()
    for rows, value in ((copy, 7.0), (original, 8.0)):
        rows.write(torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1, 1), value))
    assert (held(original), held(copy)) == ([1, 2, 8], [1, 2, 7])


def test_rows_move_to_a_larger_buffer_only_if_theirs_is_full() -> None:
    """The last free row is written in place; the next row moves all rows to a larger buffer."""
    rows = rows_of([1.0, 2.0])
    assert rows.keys is not None
    first, room = rows.keys, rows.keys.shape[2] - rows.length
    rows.write(*[torch.full((1, 1, room, 1), 3.0)] * 2)
    assert rows.keys is first
    rows.write(*[torch.full((1, 1, 1, 1), 4.0)] * 2)
    assert rows.keys.shape[2] > first.shape[2]
    assert held(rows) == [1, 2, *[3] * room, 4]


@pytest.mark.parametrize(("mine", "theirs", "at"), [(2, 4, 3), (3, 3, 3)])
def test_rows_are_adopted_only_right_after_those_held(mine: int, theirs: int, at: int) -> None:
    """Refused: a gap between the held rows and the adopted one, and a position without a row in the other."""
    own, other = KvRows(1), KvRows(1)
    for rows, count in ((own, mine), (other, theirs)):
        kept = torch.arange(float(count)).reshape(1, 1, -1, 1)
        rows.layers[0].write(kept, kept)
    with pytest.raises(RuntimeError, match=f"the row at position {at} cannot be copied: {theirs} rows there, {mine} here"):
        own.adopt(other, at, 1)


def numbers(first: float, count: int, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that count up from `first`, plus 100 for each further sequence, and values that are 1000 larger."""
    keys = first + torch.arange(float(count)) + 100 * torch.arange(float(sequences))[:, None]
    keys = keys.reshape(sequences, 1, count, 1)
    return keys, keys + 1000


def both(rows: LayerRows, sequence: int = 0, length: int | None = None) -> list[float]:
    """Keys of a sequence, after a check of their values."""
    if rows.keys is None or rows.values is None:
        return []
    count = rows.length if length is None else length
    keys, values = (each[sequence, 0, :count, 0].tolist() for each in (rows.keys, rows.values))
    assert [key + 1000 for key in keys] == values
    return keys


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["write", "write", "copy", "cut", "keep", "fix"]), st.integers(0, 9), st.integers(0, 90)),
                max_size=14), st.sampled_from([kv_rows.LARGE, 600, 0]))  # fmt: skip
def test_copies_stay_separate_for_any_order_of_writes(steps: list[tuple[str, int, int]], large: int) -> None:
    """Each copy is compared with a list. A new buffer has room for half of its rows more, and at least 64; a large one for two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_rows, "LARGE", large)
        _require_separate_copies(steps, large)


def _require_separate_copies(steps: list[tuple[str, int, int]], large: int) -> None:
    mine: list[LayerRows] = [LayerRows()]
    lists: list[list[float]] = [[]]
    for number, (what, which, size) in enumerate(steps):
        at = which % len(mine)
        rows, known = mine[at], lists[at]
        if what == "write":
            before = rows.keys
            found = rows.write(*numbers(10.0 * number, size))
            known += [10.0 * number + each for each in range(size)]
            assert [each.shape[2] for each in found] == [len(known)] * 2
            assert found[0][0, 0, :, 0].tolist() == known
            assert rows.keys is not None
            if rows.keys is not before:
                room = max(len(known) // 2, 64)
                assert rows.keys.shape[2] == len(known) + (room if 4 * (len(known) + room) <= large else 2)
                assert (rows.fixed, rows.shared_rows, rows.initialized) == (False, 0, False)
        elif what == "copy":
            mine.append(rows.copy())
            lists.append([*known])
            if rows.fixed and known:
                assert mine[-1].keys is not rows.keys
            elif not rows.fixed:
                assert mine[-1].keys is rows.keys
            assert not mine[-1].fixed
        elif what == "cut":
            rows.length = min(rows.length, size)
            del known[size:]
        elif what == "fix":
            rows.fixed = rows.shared_rows == 0 and sum(each.keys is rows.keys for each in mine) == 1
        else:
            chosen = [*range(0, len(known), which % 3 + 1)]
            rows.keep(chosen)
            lists[at] = [known[row] for row in chosen]
        for each, held_ in zip(mine, lists, strict=True):
            assert (each.length, both(each)) == (len(held_), held_)


def test_an_original_appends_in_its_buffer_after_the_rows_of_the_copy() -> None:
    rows = LayerRows()
    rows.write(*numbers(0.0, 3))
    buffer, copy = rows.keys, rows.copy()
    rows.write(*numbers(3.0, 1))
    assert rows.keys is buffer
    rows.length = 3
    rows.write(*numbers(7.0, 1))  # the copy does not read the row after the third
    assert rows.keys is buffer
    rows.length = 2
    rows.write(*numbers(9.0, 1))
    assert rows.keys is not buffer
    assert (both(rows), both(copy)) == ([0, 1, 9], [0, 1, 2])
    assert not rows.initialized
    kept = rows.keys
    rows.keep([0, 1])  # the first rows stay in place
    assert (rows.keys is kept, rows.length) == (True, 2)


def test_rows_of_several_sequences_are_written_at_their_positions() -> None:
    """Three sequences of 2, 1 and 3 rows in one buffer; rows after the end of a sequence are 0."""
    parts = [KvRows(2) for _ in range(3)]
    for number, (part, length) in enumerate(zip(parts, (2, 1, 3), strict=True)):
        part.layers[0].write(*numbers(100.0 * number, length))
    whole = join_rows(parts)
    layer = whole.layers[0]
    assert (layer.ends, layer.length, layer.initialized) == ((2, 1, 3), 3, True)
    assert whole.layers[1].keys is None
    assert layer.keys is not None
    assert layer.values is not None
    for each in (layer.keys, layer.values):
        assert [each[number, 0, length:, 0].abs().sum() for number, length in enumerate((2, 1, 3))] == [0, 0, 0]
    # Another row of each sequence, at its position; the views end with the longest.
    whole.write_positions = WritePositions(torch.tensor([[0], [1], [2]]), torch.tensor([[2], [1], [3]]), 1, 4, (3, 2, 4))
    keys, values = whole.update(*numbers(7.0, 1, 3), 0)
    assert (keys.shape[2], values.shape[2], layer.length, layer.ends) == (4, 4, 4, (3, 2, 4))
    assert [both(layer, number, length) for number, length in enumerate(layer.ends)] == [
        [0, 1, 7], [100, 107], [200, 201, 202, 207]
    ]  # fmt: skip
    some = whole.select([2, 0])
    assert (some.layers[0].ends, some.layers[0].length, some.layers[0].initialized) == ((4, 3), 4, True)
    assert [both(some.layers[0], number, length) for number, length in enumerate((4, 3))] == [[200, 201, 202, 207], [0, 1, 7]]
    one = whole.select([1])
    first = one.layers[0]
    assert (first.ends, first.length, first.initialized, both(first)) == (None, 2, False, [100, 107])
    layer.set_ends((2, 2, 2))
    assert (layer.ends, layer.length) == (None, 2)
    layer.set_ends((1, 2, 2))
    assert (layer.ends, layer.length) == ((1, 2, 2), 2)


def test_writes_move_from_shared_full_or_uninitialized_buffers() -> None:
    """Each reason alone moves the rows to a new buffer; without any, the buffer stays."""

    def spots(first: int, end: int) -> WritePositions:
        return WritePositions(torch.tensor([[0], [1]]), torch.tensor([[first], [end - 1]]), first, end, (first + 1, end))

    def begun(whole: bool = True) -> LayerRows:
        rows = LayerRows()
        rows.write(*numbers(0.0, 3, 2), initialized=whole)
        return rows

    rows = begun()
    buffer = rows.keys
    assert buffer is not None
    room = buffer.shape[2]
    assert room == 3 + 64
    for end in (4, room):
        rows.write_each(*numbers(5.0, 1, 2), spots(2, end))
        assert rows.keys is buffer
    rows.write_each(*numbers(5.0, 1, 2), spots(2, room + 1))
    assert rows.keys is not buffer
    half = begun(whole=False)
    buffer = half.keys
    half.write_each(*numbers(5.0, 1, 2), spots(3, 4))
    assert half.keys is not buffer
    assert half.initialized
    lent = begun()
    buffer, copy = lent.keys, lent.copy()
    lent.write_each(*numbers(5.0, 1, 2), spots(3, 4))  # after the rows of the copy
    assert lent.keys is buffer
    lent.write_each(*numbers(6.0, 1, 2), spots(2, 4))
    assert lent.keys is not buffer
    assert (both(copy), both(lent)) == ([0, 1, 2], [0, 1, 6, 5])


def test_rows_of_hypotheses_attend_to_their_ancestors() -> None:
    """Positions 0 to 2 of a sequence, two hypotheses at position 3, two children of the first of them at position 4, then a child
    and a grandchild of the second. A cut also removes the descendants."""
    rows = KvRows(1)
    rows.layers[0].write(*numbers(0.0, 3))
    assert rows.add_hypotheses(3, (-1, -1, 0, 0)) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 6]]
    rows.layers[0].write(*numbers(3.0, 4))
    assert rows.at == [0, 1, 2, 3, 3, 4, 4]
    assert [[*each] for each in rows.attended[:3]] == [[0], [0, 1], [0, 1, 2]]
    # -2 is the second of the two hypotheses at position 3.
    assert rows.add_hypotheses(4, (-2, 0)) == [[0, 1, 2, 4, 7], [0, 1, 2, 4, 7, 8]]
    rows.layers[0].write(*numbers(7.0, 2))
    assert rows.at == [0, 1, 2, 3, 3, 4, 4, 4, 5]
    twin = rows.copy()
    rows.cut(6)  # no row has this position
    assert (rows.layers[0].length, rows.at) == (9, [0, 1, 2, 3, 3, 4, 4, 4, 5])
    rows.cut(4)
    assert (rows.at, both(rows.layers[0])) == ([0, 1, 2, 3, 3], [0, 1, 2, 3, 4])
    assert [[*each] for each in rows.attended] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]
    assert (twin.at, len(twin.attended), both(twin.layers[0])) == ([0, 1, 2, 3, 3, 4, 4, 4, 5], 9, [*range(9)])
    assert rows.add_hypotheses(4, (-1,)) == [[0, 1, 2, 3, 5]]
    fresh = KvRows(2)
    assert fresh.add_hypotheses(0, (-1, 0)) == [[0], [0, 1]]
    assert fresh.at == [0, 1]


def test_a_cut_moves_rows_that_are_not_in_order_of_position() -> None:
    """A row of position 1 is stored after a row of position 2: the cut moves it up, and updates the rows that attend to it."""
    rows = KvRows(1)
    rows.layers[0].write(*numbers(0.0, 1))
    rows.add_hypotheses(1, (-1, 0, -1, 2))
    rows.layers[0].write(*numbers(1.0, 4))
    assert rows.at == [0, 1, 2, 1, 2]
    rows.add_hypotheses(2, (-1, -2))
    rows.layers[0].write(*numbers(5.0, 2))
    assert (rows.at, [[*each] for each in rows.attended[5:]]) == ([0, 1, 2, 1, 2, 2, 2], [[0, 1, 5], [0, 3, 6]])
    rows.cut(2)
    assert (rows.at, both(rows.layers[0])) == ([0, 1, 1], [0, 1, 3])
    assert [[*each] for each in rows.attended] == [[0], [0, 1], [0, 2]]


@given(data=st.data(), prompt=st.integers(1, 4))
def test_rows_after_passes_and_cuts_are_the_tokens_before_the_cut_in_order_of_arrival(data: st.DataObject, prompt: int) -> None:
    """Passes over random trees at random positions, against a list of tokens with their ancestors."""
    rows, tokens = KvRows(2), list[tuple[int, ...]]()  # a token is the list of its ancestors, itself the last
    for layer in rows.layers:
        layer.write(*numbers(0.0, prompt))
    tokens += [tuple(range(token + 1)) for token in range(prompt)]
    made = prompt
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(1, max(map(len, tokens))))
        rows.cut(at)
        tokens = [token for token in tokens if len(token) <= at]
        before = [token for token in tokens if len(token) == at]
        tree, new = list[int](), list[tuple[int, ...]]()
        for index in range(data.draw(st.integers(1, 4))):
            tree.append(data.draw(st.integers(-len(before), index - 1)))
            parent = new[tree[-1]] if tree[-1] >= 0 else before[-1 - tree[-1]]
            new.append((*parent, made + index))
        tokens += new
        place = {token[-1]: row for row, token in enumerate(tokens)}
        assert [[*seen] for seen in rows.add_hypotheses(at, tuple(tree))] == [[place[each] for each in token] for token in new]
        for layer in rows.layers:
            layer.write(*numbers(float(made), len(new)))
        made += len(new)
        assert rows.at == [len(token) - 1 for token in tokens]
        assert [[*seen] for seen in rows.attended] == [[place[each] for each in token] for token in tokens]
        assert {tuple(both(layer)) for layer in rows.layers} == {tuple(token[-1] for token in tokens)}


def test_adopt_copies_rows_of_some_layers_and_of_a_hypothesis() -> None:
    own, other = KvRows(3), KvRows(3)
    for mine, theirs in zip(own.layers, other.layers, strict=True):
        mine.write(*numbers(0.0, 3))
        theirs.write(*numbers(50.0, 5))
    own.adopt(other, 2, 2, 1)  # replaces the row at 2 by the second of the other's rows 2 and 3
    assert [both(layer) for layer in own.layers] == [[0, 1, 53], [0, 1, 53], [0, 1]]
    own.adopt(other, 2, 1)
    assert [both(layer) for layer in own.layers] == [[0, 1, 52], [0, 1], [0, 1]]
    assert (own.get_seq_length(), own.get_seq_length(1), own.get_seq_length(layer=2)) == (3, 2, 2)


def test_a_kv_only_layer_ends_after_its_rows_are_written() -> None:
    rows = KvRows(2)
    rows.kv_only = True
    with pytest.raises(RowsWritten):
        rows.update(*numbers(4.0, 2), 1)
    assert [both(layer) for layer in rows.layers] == [[], [4, 5]]
    rows.cross_attention = "an encoder's output"
    assert (rows.copy().cross_attention, rows.copy().kv_only) == ("an encoder's output", False)
