"""Batches whose texts stand at unequal positions, on real models: every text is what it is alone, computed from scratch."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.adapter import Decoder
from calibrate.interpreter import Luck, Output, Real
from calibrate.rows import LayerRows, Rows, joined
from model.algorithms import speculative
from model.algorithms.speculative import Parameters
from model.checks import ParameterError
from model.steps import CacheError, Forward
from tests import real_models
from tests.tiers import crossed, examples

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
    return real.run(steps, parameters.outputs_of(max(LENGTHS))).texts


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
    assert work.texts == written(decoders, choice(3), prompts)
    wholes = [kind for kind in work.account.passes_by_kind if not kind[4]]  # that project nothing
    assert [(kind[0], kind[1], work.account.passes_by_kind[kind][0]) for kind in wholes] == [("target", 2, 1), ("draft", 2, 1)]


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
        real.forward(held, Forward("target", tuple(own), 0, 0, LAYERS, texts=(number,)))

    def made(words: dict[int, tuple[int, ...]], keep: dict[int, int], heads: int) -> None:
        width = len(next(iter(words.values())))
        for number, place in keep.items():
            texts[number] = [*texts[number][:place], *words[number]]
        tokens = tuple(word for own in words.values() for word in own)
        places = tuple(keep.values())
        step = Forward(
            "target", tokens, min(places), 0, LAYERS, heads=heads * len(words), texts=tuple(words), places=places
        )  # fmt: skip
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
    assert isinstance(real.forward(held, Forward("target", (3,), 8, 0, LAYERS, heads=1, texts=(5,))), Output)


def test_texts_at_one_position_again_need_no_mask() -> None:
    """What was written of them at unequal ones stays."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, 0, LAYERS, texts=(number,)))
    real.forward(held, Forward("target", (1, 2, 7, 8), 1, 0, LAYERS, texts=(0, 1), places=(3, 1)))
    out = real.forward(held, Forward("target", (5, 6), 3, 0, LAYERS, heads=2, texts=(0, 1)))
    for row, own in enumerate(([3, 4, 5, 5], [6, 7, 8, 6])):
        assert torch.allclose(out.logits[row], real_models.logits(full, own), rtol=0, atol=1e-12)
    assert {layer.ends for layer in held.of("target", (0, 1)).layers} == {None}


def test_a_copy_shares_rows_until_one_of_the_two_writes() -> None:
    """Whoever forks a batch: what the copy writes the first does not see, nor the other way round."""
    decoder, full = real_models.decoders("llama")["target"], real_models.model("llama", LAYERS)
    real = Real({"target": decoder})
    held = real.new_cache()
    for number, own in ((0, (3, 4, 5)), (1, (6,))):
        real.forward(held, Forward("target", own, 0, 0, LAYERS, texts=(number,)))
    step = Forward("target", (1, 2, 7, 8), 1, 0, LAYERS, heads=4, texts=(0, 1), places=(3, 1))
    real.forward(held, step)
    twin = held.copy()
    assert {layer.ends for layer in twin.of("target", (0, 1)).layers} == {(5, 3)}
    other = real.forward(twin, step._replace(tokens=(9, 9, 9, 9)))
    more = real.forward(held, Forward("target", (5, 6), 3, 0, LAYERS, heads=2, texts=(0, 1), places=(5, 3)))
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
            decoder.run(tuple((number + each) % 29 for each in range(length)), 0, 0, LAYERS, rows)
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
    step = Forward("target", (1, 2), 0, 0, LAYERS, texts=(0, 1))
    real.forward(held, step)
    real.forward(held, Forward("target", (1,), 1, 0, LAYERS, texts=(0,)))
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
            real.forward(held, step._replace(at=1, places=(2, 1)))


def test_texts_have_no_more_positions_than_the_model() -> None:
    decoder = real_models.decoders("llama")["target"]
    rows = joined([decoder.rows(), decoder.rows()])
    with pytest.raises(ParameterError, match="at most 96 positions"):
        decoder.run((1, 2), 0, 0, LAYERS, rows, batch=2, places=(96, 0))


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
    own, other = Rows(1), Rows(1)
    for rows, count in ((own, mine), (other, theirs)):
        kept = torch.arange(float(count)).reshape(1, 1, -1, 1)
        rows.layers[0].write(kept, kept)
    with pytest.raises(RuntimeError, match=f"rows at position {at} cannot be taken over: {theirs} there, {mine} here"):
        own.adopt(other, at, 1)
