"""Passes of real models within a context budget: what they attend to, in a batch too, and acceptance by budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calibrate.decode.real_decoding import decode
from calibrate.decoders.kv_rows import join_rows
from calibrate.interpreters.in_one_process import Real
from model.base.checks import ParameterError
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.speculative import algorithm as speculative
from model.steps import Batch, LayerSpan, visible_positions
from tests.support import real_models
from tests.support.real_models import DEPTHS, KINDS

LAYERS = DEPTHS["target"]
SPAN = LayerSpan(0, LAYERS)
TEXT = (3, 4, 5, 6, 17, 2, 9, 11, 8)


def started(decoder: Any, text: tuple[int, ...] = TEXT) -> Any:
    """Rows of a text that has been read."""
    rows = decoder.rows()
    decoder.run(text, 0, SPAN, rows)
    return rows


def by_mask(decoder: Any, words: tuple[int, ...], budget: int) -> torch.Tensor:
    """States of a pass over all rows whose mask hides the rows beyond the budget: the library's attention does the rest."""
    rows, at, right = started(decoder), len(TEXT), decoder._pass_positions

    def masked(*given: Any) -> Any:
        place = right(*given[:4])
        mask = torch.ones(len(words), at + len(words), dtype=torch.bool).tril_(at)
        first, latest = visible_positions(at, budget)
        for position in {*range(at)} - {*first, *latest}:
            mask[:, position] = False
        return place._replace(mask=mask[None, None])

    decoder._pass_positions = masked
    try:
        return decoder.run(words, at, SPAN, rows)
    finally:
        del decoder._pass_positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 3, 5, 7, 8, 9, 30])
def test_a_pass_attends_to_the_visible_rows_and_to_itself(kind: str, budget: int) -> None:
    decoder = real_models.decoders(kind)["target"]
    for words in ((7,), (7, 8, 1)):
        rows = started(decoder)
        found = decoder.run(words, len(TEXT), SPAN, rows, context_budget=budget)
        torch.testing.assert_close(found, by_mask(decoder, words, budget), rtol=1e-9, atol=1e-9)
        whole = decoder.run(words, len(TEXT), SPAN, started(decoder))
        assert torch.allclose(found, whole, rtol=1e-9, atol=1e-9) == (budget >= len(TEXT))
        assert {layer.length for layer in rows.layers} == {len(TEXT) + len(words)}  # all rows are kept
        again = decoder.run(words, len(TEXT), SPAN, rows)  # a later pass without a budget sees them
        torch.testing.assert_close(again, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("widths", [(2, 2), (1, 3)])
def test_each_sequence_of_a_batch_at_unequal_positions_has_its_own_budget(widths: tuple[int, int]) -> None:
    decoder, texts, budget = real_models.decoders("llama")["target"], (TEXT, TEXT[:6]), 5
    words = [(7, 8, 1)[:width] for width in widths]
    rows = join_rows([started(decoder, text) for text in texts])
    batch = Batch((0, 1), (9, 6), widths, widths)
    found = decoder.run((*words[0], *words[1]), 6, SPAN, rows, batch=batch, context_budget=budget)
    alone = [
        decoder.run(own, len(text), SPAN, started(decoder, text), context_budget=budget)
        for own, text in zip(words, texts, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-9, atol=1e-9)


def test_a_batch_within_a_budget_generates_the_tokens_of_plain_decoding() -> None:
    decoders = real_models.decoders("llama", "draft")
    plain = Real({"target": decoders["target"]}).run(autoregressive.decode(autoregressive.Parameters(LAYERS), [*TEXT], 12), 12)
    parameters = speculative.Parameters(LAYERS, 3, sequences=3, context_budget=4, draft_layers=DEPTHS["draft"], batching="static")
    work = Real(decoders).run(speculative.decode(parameters, [*TEXT], 12), 36)
    assert {number: tokens[:12] for number, tokens in work.sequences.items()} == dict.fromkeys(range(3), plain.tokens[:12])


def test_draft_tokens_are_accepted_more_often_with_a_larger_budget_up_to_all() -> None:
    """A budget of the whole text makes the draft of a model by itself the model: all its tokens are accepted."""
    decoders, tokens = real_models.decoders("llama"), 24
    accepted = []
    for budget in (1, 1000):
        given = self_speculative.Parameters(LAYERS, LAYERS, 3, False, context_budget=budget)
        work = Real(decoders).run(self_speculative.decode(given, [*TEXT], tokens), tokens)
        accepted.append(sum(kept * count for (kept, _), count in work.rounds.items()))
    assert accepted[0] < accepted[1] == tokens - tokens // 4


def test_impossible_budgets_are_refused() -> None:
    decoders = real_models.decoders("llama")
    given = {"exit_layer": LAYERS, "draft_length": 3, "reuse": False}
    with pytest.raises(ParameterError, match=r"context_budget must be at most 21, .* got 22; leave it out"):
        decode("self_speculative", decoders, TEXT, 12, settings={**given, "context_budget": 22})
    found = decode("self_speculative", decoders, TEXT, 12, settings={**given, "context_budget": 21})
    plain = decode("autoregressive", decoders, TEXT, 12)
    assert found.tokens == plain.tokens
    with pytest.raises(ParameterError, match="context_budget must be between 1 and 1000000, got 0"):
        decode("self_speculative", decoders, TEXT, 12, settings={**given, "context_budget": 0})
