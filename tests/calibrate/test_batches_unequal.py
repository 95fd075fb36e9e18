"""Batches whose texts stand at unequal positions, on real models: every text is what it is alone, computed from scratch."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.decoders.kv_rows import KvRows, LayerRows, RowsMade, Spots, joined
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import Luck, PassOutput, Real
from model.base.checks import ParameterError
from model.methods.speculative import algorithm as speculative
from model.methods.speculative.algorithm import Parameters
from model.steps import Batch, CacheError, Commit, Forward, LayerSpan, Read
from tests.support import real_models
from tests.support.tiers import crossed, examples

KINDS = [kind for kind in real_models.KINDS if kind not in real_models.ENCODING]
LAYERS, DRAFT = real_models.DEPTHS["target"], real_models.DEPTHS["draft"]
PROMPTS = [[3, 4, 5], [6], [9, 9, 8, 7, 1, 2], [3, 4, 6], [11, 2]]
LENGTHS = (12, 5, 9, 12, 1)
DRAFTS = [(whose, batch) for whose in ("others", "its own") for batch in (1, 2, 5)]
"""The draft's first weights, which make it right or wrong, and the size of the batch."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_is_left_of_what_was_in_memory() -> Iterator[None]:
    """Memory that nobody has written is not a number, so that whoever reads it says none."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def written(decoders: Any, parameters: Parameters, prompts: Sequence[Sequence[int]] = PROMPTS, **more: Any) -> dict[int, list[int]]:
    real = Real(decoders, **more)
    steps = speculative.decode(parameters, prompts[0], max(LENGTHS), prompts=prompts)
    return real.run(steps, parameters.outputs_of(max(LENGTHS))).sequences


def choice(batch: int, gamma: int = 3, **more: Any) -> Parameters:
    return Parameters(LAYERS, gamma, draft_layers=DRAFT, sequences=batch, batching="static", lengths=LENGTHS, **more)


@pytest.mark.parametrize(("drafts", "kind"), crossed(DRAFTS, KINDS, (("others", 5), ("its own", 2))))
def test_greedy_texts_of_a_batch_are_the_targets_own(drafts: tuple[str, int], kind: str) -> None:
    same, batch = drafts[0] == "its own", drafts[1]
    found = written(real_models.decoders(kind, "draft", same=same), choice(batch))
    full = real_models.model(kind, LAYERS)
    for number, length in enumerate(LENGTHS):
        assert found[number] == real_models.oracle(full, PROMPTS[number], length), number


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
def test_whatever_the_draft_length(gamma: int) -> None:
    """The model drafts for itself, so that all is accepted and two tokens are read again and again."""
    target = real_models.decoders("llama")["target"]
    full = real_models.model("llama", LAYERS)
    want = {number: real_models.oracle(full, PROMPTS[number], length) for number, length in enumerate(LENGTHS)}
    parameters = Parameters(LAYERS, gamma, draft_layers=LAYERS, sequences=4, batching="static", lengths=LENGTHS)
    assert written({"target": target, "draft": target}, parameters) == want


def test_one_prompt_for_all_is_read_once() -> None:
    prompts = [PROMPTS[0]] * 5
    decoders = real_models.decoders("gpt2", "draft")
    real = Real(decoders)
    work = real.run(speculative.decode(choice(3), PROMPTS[0], 12), sum(LENGTHS))
    assert work.sequences == written(decoders, choice(3), prompts)
    wholes = [kind for kind in work.account.passes_by_kind if not kind.heads]  # that project nothing
    assert [(kind.role, kind.width, work.account.passes_by_kind[kind][0]) for kind in wholes] == [("target", 2, 1), ("draft", 2, 1)]


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_drawn_texts_have_the_luck_that_they_have_alone(kind: str) -> None:
    decoders = real_models.decoders(kind, "draft", same=True)
    alone, two, all_ = (written(decoders, choice(batch, sampled=True), luck=Luck(7)) for batch in (1, 2, 5))
    assert alone == two == all_
    assert alone != written(decoders, choice(1, sampled=True), luck=Luck(8))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_pass_says_is_what_each_text_says_from_scratch(kind: str) -> None:
    """Passes of one token and of three, of texts that are rewritten in between, and the last ones of each alone projected."""
    decoder, full = real_models.decoders(kind)["target"], real_models.model(kind, LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    texts = {0: [3, 4, 5, 6], 2: [7], 5: [1, 2]}
    for number, own in texts.items():
        real.forward(held, Forward("target", tuple(own), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))

    def made(words: dict[int, tuple[int, ...]], keep: dict[int, int], heads: int) -> None:
        width = len(next(iter(words.values())))
        for number, place in keep.items():
            texts[number] = [*texts[number][:place], *words[number]]
        tokens = tuple(word for own in words.values() for word in own)
        places = tuple(keep.values())
        batch = Batch.uniform(tuple(words), places, width, heads)
        step = Forward("target", tokens, min(places), LayerSpan(0, LAYERS), heads=heads * len(words), batch=batch)
        out = real.forward(held, step)
        for index, number in enumerate(words):
            for place in range(heads):
                offset = (index + 1) * width - heads + place
                own = texts[number][: len(texts[number]) - heads + place + 1]
                want = real_models.logits(full, own)
                for each in (offset, offset - len(tokens)):
                    assert torch.allclose(out.logits[out.row(each)], want, rtol=0, atol=1e-12)

    made({0: (8,), 2: (9,), 5: (1,)}, {0: 4, 2: 1, 5: 2}, 1)
    made({0: (1, 2, 3), 2: (4, 5, 6), 5: (7, 8, 9)}, {0: 3, 2: 2, 5: 3}, 3)
    made({0: (1, 2), 5: (7, 8)}, {0: 4, 5: 3}, 1)  # one has left, and both are cut
    made({0: (1, 2, 5, 4), 5: (7, 8, 6, 6)}, {0: 6, 5: 4}, 2)
    assert isinstance(
        real.forward(held, Forward("target", (3,), 8, LayerSpan(0, LAYERS), heads=1, batch=Batch.uniform((5,), 8, heads=1))),
        PassOutput,
    )


def read_apart(decoder: Decoder, texts: dict[int, list[int]]) -> tuple[Real, Any]:
    """A run in which each sequence was read by itself."""
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in texts.items():
        real.forward(held, Forward("target", tuple(own), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    return real, held


def ragged(words: dict[int, tuple[int, ...]], positions: Sequence[int], heads: Sequence[int], layers: LayerSpan) -> Forward:
    batch = Batch(tuple(words), tuple(positions), tuple(map(len, words.values())), tuple(heads))
    tokens = tuple(word for own in words.values() for word in own)
    return Forward("target", tokens, min(positions), layers, heads=sum(heads), batch=batch)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_unequal_widths_say_what_each_says_from_scratch(kind: str) -> None:
    """One, three and two tokens, behind one another and where rows are rewritten, and in two passes through the layers."""
    decoder, full = real_models.decoders(kind)["target"], real_models.model(kind, LAYERS)
    texts = {0: [3, 4, 5, 6], 2: [7], 5: [1, 2]}
    real, held = read_apart(decoder, texts)

    def made(words: dict[int, tuple[int, ...]], positions: Sequence[int], heads: Sequence[int], cut: int = LAYERS) -> None:
        for (number, own), position in zip(words.items(), positions, strict=True):
            texts[number] = [*texts[number][:position], *own]
        step = ragged(words, positions, heads, LayerSpan(0, LAYERS))
        if cut < LAYERS:
            first = ragged(words, positions, [0] * len(heads), LayerSpan(0, cut))
            out = real.forward(held, step._replace(layers=LayerSpan(cut, LAYERS), state=real.forward(held, first)))
        else:
            out = real.forward(held, step)
        offset = 0
        for (number, own), projected in zip(words.items(), heads, strict=True):
            for index in range(len(own)):
                text = texts[number][: len(texts[number]) - len(own) + index + 1]
                if index >= len(own) - projected:
                    for each in (offset, offset - len(step.tokens)):
                        assert torch.allclose(out.logits[out.row(each)], real_models.logits(full, text), rtol=0, atol=1e-12)
                else:
                    with pytest.raises(CacheError, match=f"sequence {number} is read, but only its last {projected} are projected"):
                        out.row(offset)
                offset += 1
        assert out.logits.shape[0] == sum(heads)

    made({0: (8,), 2: (9, 1, 2), 5: (1, 4)}, (4, 1, 2), (1, 3, 1))
    made({0: (1, 2, 3), 2: (4,), 5: (7, 8)}, (3, 2, 3), (0, 1, 2))  # two are rewritten
    made({5: (2, 2, 2, 2), 0: (9,)}, (5, 6), (2, 1), cut=2)  # one has left, the others in another order
    made({0: (1,), 5: (7,)}, (7, 9), (1, 1))
    made({0: (3, 3), 2: (5,), 5: (4, 4, 4)}, (3, 3, 3), (2, 1, 3))  # at one position, which cuts two of them
    assert [held.book.sequences[number].rows["target"] for number in texts] == [[len(own)] * LAYERS for own in texts.values()]


def test_states_of_unequal_widths_are_those_of_each_sequence_alone() -> None:
    """Also those before the last layer, which early exit compares; nothing of the padding is left."""
    decoder = real_models.decoders("llama")["target"]
    texts = {4: [3, 4, 5], 1: [7]}
    words, positions, span = {4: (8,), 1: (5, 6, 7)}, (3, 1), LayerSpan(0, 3)
    real, held = read_apart(decoder, texts)
    wrote: list[tuple[int, int]] = []
    whole = LayerRows.write_each

    def noted(self: LayerRows, keys: Any, values: Any, spots: Any) -> Any:
        wrote.extend(zip(spots.sequences.tolist(), spots.positions.tolist(), strict=True))
        return whole(self, keys, values, spots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRows, "write_each", noted)
        together = real.forward(held, ragged(words, positions, (0, 0), span)._replace(compared=4))
    assert wrote == [(0, 3), (1, 1), (1, 2), (1, 3)] * span.size  # each row once: what fills up writes none
    start = 0
    for (number, own), position in zip(words.items(), positions, strict=True):
        real, held = read_apart(decoder, {number: texts[number]})
        alone = real.forward(held, ragged({number: own}, (position,), (0,), span)._replace(compared=len(own)))
        for whole, part in ((together.states, alone.states), (together.before, alone.before)):
            assert torch.allclose(whole[start : start + len(own)], part, rtol=0, atol=1e-12)  # type: ignore[index,arg-type]
        start += len(own)
    assert together.states is not None
    assert together.states.shape[0] == start


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompts_of_unequal_lengths_are_read_in_one_pass(kind: str) -> None:
    """Then one sequence decodes while others still read, as a server's requests do: each is what it is alone."""
    prompts = {0: [3, 4, 5, 6, 7, 8, 9], 1: [6, 2], 2: [9]}
    layers = LayerSpan(0, LAYERS)

    def steps() -> Any:
        texts, read = {number: [*own] for number, own in prompts.items()}, dict.fromkeys(prompts, 0)
        while True:
            words = {number: tuple(own[read[number] :][:3]) for number, own in texts.items()}
            done = {number: read[number] + len(own) == len(texts[number]) for number, own in words.items()}
            step = ragged(words, [read[number] for number in words], [int(done[number]) for number in words], layers)
            out = yield step
            for index, (number, own) in enumerate(words.items()):
                read[number] += len(own)
                if done[number]:
                    assert step.batch is not None
                    texts[number].append((yield Read("next", out, step.batch.starts[index] + len(own) - 1)))
                    yield Commit("token", (texts[number][-1],), sequence=number)

    found = Real({"target": real_models.decoders(kind)["target"]}).run(steps(), 14).sequences
    full = real_models.model(kind, LAYERS)
    assert {number: len(own) for number, own in found.items()} == {0: 4, 1: 6, 2: 6} or sum(map(len, found.values())) == 14
    for number, own in found.items():
        assert own == real_models.oracle(full, prompts[number], len(own))


def test_texts_at_one_position_again_need_no_mask() -> None:
    """What was written of them at unequal ones stays."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    real.forward(held, Forward("target", (1, 2, 7, 8), 1, LayerSpan(0, LAYERS), batch=Batch.uniform((0, 1), (3, 1), 2)))
    out = real.forward(held, Forward("target", (5, 6), 3, LayerSpan(0, LAYERS), heads=2, batch=Batch.uniform((0, 1), 3, heads=1)))
    for row, own in enumerate(([3, 4, 5, 5], [6, 7, 8, 6])):
        assert torch.allclose(out.logits[row], real_models.logits(full, own), rtol=0, atol=1e-12)
    assert {layer.ends for layer in held.of("target", (0, 1)).layers} == {None}


def test_a_copy_shares_rows_until_one_of_the_two_writes() -> None:
    """Whoever forks a batch: what the copy writes the first does not see, nor the other way round."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, LayerSpan(0, LAYERS), batch=Batch.uniform((number,), 0, len(own))))
    step = Forward("target", (1, 2, 7, 8), 1, LayerSpan(0, LAYERS), heads=4, batch=Batch.uniform((0, 1), (3, 1), 2, heads=2))
    real.forward(held, step)
    twin = held.copy()
    assert {layer.ends for layer in twin.of("target", (0, 1)).layers} == {(5, 3)}
    other = real.forward(twin, step._replace(tokens=(9, 9, 9, 9)))
    more = real.forward(
        held, Forward("target", (5, 6), 3, LayerSpan(0, LAYERS), heads=2, batch=Batch.uniform((0, 1), (5, 3), heads=1))
    )
    assert torch.allclose(more.logits[1], real_models.logits(full, [6, 7, 8, 6]), rtol=0, atol=1e-12)
    assert torch.allclose(other.logits[3], real_models.logits(full, [6, 9, 9]), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_rows_of_texts_are_joined_and_parted(lengths: list[int], data: st.DataObject) -> None:
    """A text's rows are its own, whichever others lie with it."""
    decoder: Decoder = real_models.decoders("llama")["target"]
    parts = []
    for number, length in enumerate(lengths):
        rows = decoder.rows()
        if length:
            decoder.run(tuple((number + each) % 29 for each in range(length)), 0, LayerSpan(0, LAYERS), rows)
        parts.append(rows)
    whole = joined(parts)
    picked = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    some = whole.of(picked)
    for layer in range(LAYERS):
        own, all_ = some.layers[layer], whole.layers[layer]
        assert own.length == max((lengths[each] for each in picked), default=0) or own.keys is None
        assert (own.ends is None) == (len({lengths[each] for each in picked}) == 1 or own.keys is None)
        assert own.whole == (own.ends is not None)  # or the next pass over all would copy all again
        assert all_.whole == (all_.ends is not None)
        assert all_.length == max(lengths) or all_.keys is None
        for place, number in enumerate(picked):
            rows = parts[number].layers[layer]
            if rows.keys is not None and rows.values is not None:
                assert own.keys is not None
                assert own.values is not None
                for mine, theirs in ((own.keys, rows.keys), (own.values, rows.values)):
                    assert torch.equal(mine[place, :, : rows.length], theirs[0, :, : rows.length])


def test_a_wrong_number_of_rows_is_noticed() -> None:
    real = Real({"target": real_models.decoders("llama")["target"]})
    held = real.new_cache()
    step = Forward("target", (1, 2), 0, LayerSpan(0, LAYERS), batch=Batch.uniform((0, 1), 0))
    real.forward(held, step)
    real.forward(held, Forward("target", (1,), 1, LayerSpan(0, LAYERS), batch=Batch.uniform((0,), 1)))
    rows = held.of("target", (0, 1))
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


def test_texts_have_no_more_positions_than_the_model() -> None:
    decoder = real_models.decoders("llama")["target"]
    rows = joined([decoder.rows(), decoder.rows()])
    with pytest.raises(ParameterError, match="at most 96 positions"):
        decoder.run((1, 2), 0, LayerSpan(0, LAYERS), rows, batch=Batch.uniform((0, 1), (96, 0)))


def test_an_encoder_decoder_has_no_batches() -> None:
    with pytest.raises(ParameterError, match="batch must be 1 with an encoder-decoder"):
        written(real_models.decoders("t5", "draft"), choice(2))


# --- shared rows ---


def rows_of(values: Sequence[float]) -> LayerRows:
    """Rows of one sequence, one number each."""
    rows = LayerRows()
    kept = torch.tensor(values).reshape(1, 1, -1, 1)
    rows.write(kept, kept)
    return rows


def held(rows: LayerRows) -> list[float]:
    assert rows.keys is not None
    return rows.keys[0, 0, : rows.length, 0].tolist()


def test_a_cut_original_does_not_overwrite_what_its_copy_reads() -> None:
    """The original goes back one row and writes another: the copy, which shares the buffer, keeps what it had."""
    original = rows_of([1.0, 2.0, 3.0])
    copy = original.copy()
    original.length = 2
    original.write(torch.full((1, 1, 1, 1), 9.0), torch.full((1, 1, 1, 1), 9.0))
    assert (held(original), held(copy)) == ([1, 2, 9], [1, 2, 3])


def test_a_copy_never_writes_in_a_buffer_that_its_original_goes_on_in() -> None:
    """Original and copy both add a row: there is room in the shared buffer, and only the original may use it."""
    original = rows_of([1.0, 2.0])
    copy = original.copy()
    for rows, value in ((copy, 7.0), (original, 8.0)):
        rows.write(torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1, 1), value))
    assert (held(original), held(copy)) == ([1, 2, 8], [1, 2, 7])


def test_rows_move_to_a_larger_buffer_only_when_theirs_is_full() -> None:
    """The last row of a buffer is written where it is; the next takes a larger buffer, in which all before it are too."""
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
    """Refused: rows missing between those held and the one adopted, and a position that the other has no row of."""
    own, other = KvRows(1), KvRows(1)
    for rows, count in ((own, mine), (other, theirs)):
        kept = torch.arange(float(count)).reshape(1, 1, -1, 1)
        rows.layers[0].write(kept, kept)
    with pytest.raises(RuntimeError, match=f"the row at position {at} cannot be copied: {theirs} rows there, {mine} here"):
        own.adopt(other, at, 1)


def numbers(first: float, count: int, texts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that count on from `first` and values that are those and a thousand, a hundred more for each text."""
    keys = (first + torch.arange(float(count)) + 100 * torch.arange(float(texts))[:, None]).reshape(texts, 1, count, 1)
    return keys, keys + 1000


def both(rows: LayerRows, text: int = 0, length: int | None = None) -> list[float]:
    """The keys of a text, whose values were seen to belong to them."""
    if rows.keys is None or rows.values is None:
        return []
    keys, values = (each[text, 0, : rows.length if length is None else length, 0].tolist() for each in (rows.keys, rows.values))
    assert [key + 1000 for key in keys] == values
    return keys


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(["write", "write", "copy", "cut", "keep", "fix"]), st.integers(0, 9), st.integers(0, 90)),
                max_size=14))  # fmt: skip
def test_copies_hold_what_each_was_told_whoever_writes_first(steps: list[tuple[str, int, int]]) -> None:
    """Each beside a list of its own; a buffer has room for half of what it holds, and 64 rows at least."""
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
                assert rows.keys.shape[2] == len(known) + max(len(known) // 2, 64)
                assert (rows.fixed, rows.lent, rows.whole) == (False, 0, False)
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
            rows.fixed = rows.lent == 0 and sum(each.keys is rows.keys for each in mine) == 1
        else:
            places = [*range(0, len(known), which % 3 + 1)]
            rows.keep(places)
            lists[at] = [known[place] for place in places]
        for each, held_ in zip(mine, lists, strict=True):
            assert (each.length, both(each)) == (len(held_), held_)


def test_whoever_was_copied_goes_on_in_its_buffer_behind_what_the_copy_reads() -> None:
    rows = LayerRows()
    rows.write(*numbers(0.0, 3))
    buffer, copy = rows.keys, rows.copy()
    rows.write(*numbers(3.0, 1))
    assert rows.keys is buffer
    rows.length = 3
    rows.write(*numbers(7.0, 1))  # nobody reads the row behind the third
    assert rows.keys is buffer
    rows.length = 2
    rows.write(*numbers(9.0, 1))
    assert rows.keys is not buffer
    assert (both(rows), both(copy)) == ([0, 1, 9], [0, 1, 2])
    assert not rows.whole
    kept = rows.keys
    rows.keep([0, 1])  # the first ones stay where they are
    assert (rows.keys is kept, rows.length) == (True, 2)


def test_rows_of_several_texts_are_written_where_each_text_stands() -> None:
    """Three texts of 2, 1 and 3 rows in one buffer: in front of a text's end are its own numbers, behind all of them nothing."""
    parts = [KvRows(2) for _ in range(3)]
    for number, (part, length) in enumerate(zip(parts, (2, 1, 3), strict=True)):
        part.layers[0].write(*numbers(100.0 * number, length))
    whole = joined(parts)
    layer = whole.layers[0]
    assert (layer.ends, layer.length, layer.whole) == ((2, 1, 3), 3, True)
    assert whole.layers[1].keys is None
    assert layer.keys is not None
    assert layer.values is not None
    for each in (layer.keys, layer.values):
        assert [each[text, 0, length:, 0].abs().sum() for text, length in enumerate((2, 1, 3))] == [0, 0, 0]
    # One more row of each, where it stands: views up to the longest, and every text has its own behind its own.
    whole.spots = Spots(torch.tensor([[0], [1], [2]]), torch.tensor([[2], [1], [3]]), 1, 4, (3, 2, 4))
    keys, values = whole.update(*numbers(7.0, 1, 3), 0)
    assert (keys.shape[2], values.shape[2], layer.length, layer.ends) == (4, 4, 4, (3, 2, 4))
    assert [both(layer, text, length) for text, length in enumerate(layer.ends)] == [
        [0, 1, 7], [100, 107], [200, 201, 202, 207]
    ]  # fmt: skip
    some = whole.of([2, 0])
    assert (some.layers[0].ends, some.layers[0].length, some.layers[0].whole) == ((4, 3), 4, True)
    assert [both(some.layers[0], text, length) for text, length in enumerate((4, 3))] == [[200, 201, 202, 207], [0, 1, 7]]
    one = whole.of([1])
    assert (one.layers[0].ends, one.layers[0].length, one.layers[0].whole, both(one.layers[0])) == (None, 2, False, [100, 107])
    layer.hold((2, 2, 2))
    assert (layer.ends, layer.length) == (None, 2)
    layer.hold((1, 2, 2))
    assert (layer.ends, layer.length) == ((1, 2, 2), 2)


def test_a_buffer_that_others_read_or_that_is_full_or_half_known_is_left_for_another() -> None:
    """Each reason by itself to write in a buffer of one's own; without any the buffer stays."""

    def spots(first: int, end: int) -> Spots:
        return Spots(torch.tensor([[0], [1]]), torch.tensor([[first], [end - 1]]), first, end, (first + 1, end))

    def begun(whole: bool = True) -> LayerRows:
        rows = LayerRows()
        rows.write(*numbers(0.0, 3, 2), whole=whole)
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
    assert half.whole
    lent = begun()
    buffer, copy = lent.keys, lent.copy()
    lent.write_each(*numbers(5.0, 1, 2), spots(3, 4))  # behind what the copy reads
    assert lent.keys is buffer
    lent.write_each(*numbers(6.0, 1, 2), spots(2, 4))
    assert lent.keys is not buffer
    assert (both(copy), both(lent)) == ([0, 1, 2], [0, 1, 6, 5])


def test_rows_of_hypotheses_know_what_they_follow() -> None:
    """Positions 0 to 2 of one text; two hypotheses of position 3 behind the last, a third behind the first of those, as is the
    fourth; then position 4 behind the second hypothesis. What is cut takes along what follows it."""
    rows = KvRows(1)
    rows.layers[0].write(*numbers(0.0, 3))
    assert rows.follow(3, (-1, -1, 0, 0)) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 6]]
    rows.layers[0].write(*numbers(3.0, 4))
    assert rows.at == [0, 1, 2, 3, 3, 4, 4]
    assert [[*each] for each in rows.sees[:3]] == [[0], [0, 1], [0, 1, 2]]
    # Of the two that stand at position 3 the second: -2.
    assert rows.follow(4, (-2, 0)) == [[0, 1, 2, 4, 7], [0, 1, 2, 4, 7, 8]]
    rows.layers[0].write(*numbers(7.0, 2))
    assert rows.at == [0, 1, 2, 3, 3, 4, 4, 4, 5]
    twin = rows.copy()
    rows.cut(6)  # nothing stands there
    assert (rows.layers[0].length, rows.at) == (9, [0, 1, 2, 3, 3, 4, 4, 4, 5])
    rows.cut(4)
    assert (rows.at, both(rows.layers[0])) == ([0, 1, 2, 3, 3], [0, 1, 2, 3, 4])
    assert [[*each] for each in rows.sees] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]
    assert (twin.at, len(twin.sees), both(twin.layers[0])) == ([0, 1, 2, 3, 3, 4, 4, 4, 5], 9, [*range(9)])
    assert rows.follow(4, (-1,)) == [[0, 1, 2, 3, 5]]
    fresh = KvRows(2)
    assert fresh.follow(0, (-1, 0)) == [[0], [0, 1]]
    assert fresh.at == [0, 1]


def test_rows_that_do_not_lie_in_order_are_moved_together_when_some_are_cut() -> None:
    """A hypothesis of position 1 lies behind one of position 2: the row behind it moves up, and what saw it sees its new place."""
    rows = KvRows(1)
    rows.layers[0].write(*numbers(0.0, 1))
    rows.follow(1, (-1, 0, -1, 2))
    rows.layers[0].write(*numbers(1.0, 4))
    assert rows.at == [0, 1, 2, 1, 2]
    rows.follow(2, (-1, -2))
    rows.layers[0].write(*numbers(5.0, 2))
    assert (rows.at, [[*each] for each in rows.sees[5:]]) == ([0, 1, 2, 1, 2, 2, 2], [[0, 1, 5], [0, 3, 6]])
    rows.cut(2)
    assert (rows.at, both(rows.layers[0])) == ([0, 1, 1], [0, 1, 3])
    assert [[*each] for each in rows.sees] == [[0], [0, 1], [0, 2]]


def test_rows_are_adopted_of_some_layers_and_of_a_hypothesis() -> None:
    own, other = KvRows(3), KvRows(3)
    for mine, theirs in zip(own.layers, other.layers, strict=True):
        mine.write(*numbers(0.0, 3))
        theirs.write(*numbers(50.0, 5))
    own.adopt(other, 2, 2, 1)  # what was held at 2 goes; of the other's rows 2 and 3 the second comes
    assert [both(layer) for layer in own.layers] == [[0, 1, 53], [0, 1, 53], [0, 1]]
    own.adopt(other, 2, 1)
    assert [both(layer) for layer in own.layers] == [[0, 1, 52], [0, 1], [0, 1]]
    assert (own.get_seq_length(), own.get_seq_length(1), own.get_seq_length(layer=2)) == (3, 2, 2)


def test_where_only_rows_are_wanted_a_layer_ends_when_they_are_written() -> None:
    rows = KvRows(2)
    rows.kv_only = True
    with pytest.raises(RowsMade):
        rows.update(*numbers(4.0, 2), 1)
    assert [both(layer) for layer in rows.layers] == [[], [4, 5]]
    rows.crossed = "what an encoder said"
    assert (rows.copy().crossed, rows.copy().kv_only) == ("what an encoder said", False)
