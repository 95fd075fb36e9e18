"""Passes of real models within a context budget: what they attend to, in a batch too, and acceptance by budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calibrate.decode.real_decoding import decode
from calibrate.decoders.kv_rows import join_rows
from calibrate.interpreters.in_one_process import Real
from model.base.checks import ParameterError
from model.methods import registry
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.speculative import algorithm as speculative
from model.steps import Batch, LayerSpan, visible_positions
from tests.support import real_models
from tests.support.real_models import DEPTHS, KINDS

LAYERS = DEPTHS["target"]
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "speculative": ("speculative", {"draft_length": 3}),
    "adaptive": ("adaptive", {"policy": "heuristic", "max_draft_length": 4}),
    "literal": ("hierarchical", {"draft_length": 3}),
    "recursive": ("hierarchical", {"draft_length": 4, "reading": "recursive", "inner_draft_length": 2}),
    "pearl": ("pearl", {"draft_length": 3}), "pearl, stopped": ("pearl", {"draft_length": 3, "draft_stop": "rejection"}),
    "amusd": ("amusd", {"draft_length": 4}), "dsi": ("dsi", {"lookahead": 2, "verifiers": 2}),
    "ssd": ("ssd", {"draft_length": 3, "fan_out": 2}), "chain": ("tree", {"shape": "chain", "draft_depth": 3}),
    "full": ("tree", {"shape": "full", "draft_depth": 3, "width": 2}),
    "eagle-2": ("tree", {"shape": "eagle-2", "draft_depth": 3, "width": 2, "nodes": 6}),
}  # fmt: skip
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


@pytest.mark.parametrize("budget", [1, 3, 6, 8, 9, 10, 30])
def test_each_hypothesis_of_a_tree_attends_as_it_would_alone(budget: int) -> None:
    """Two passes over a tree: a root with two children, and two nodes below the second; each as a chain of its own."""
    decoder, at = real_models.decoders("llama")["target"], len(TEXT)
    rows = started(decoder)
    first = decoder.run((7, 8, 1), at, SPAN, rows, tree=(-1, 0, 0), context_budget=budget)
    second = decoder.run((4, 2), at + 2, SPAN, rows, tree=(-2, -2), context_budget=budget)
    for index, words in enumerate(((7, 8), (7, 1))):
        alone = decoder.run(words, at, SPAN, started(decoder), context_budget=budget)
        torch.testing.assert_close(first[[0, 1 + index]], alone, rtol=1e-9, atol=1e-9)
    for index, word in enumerate((4, 2)):
        own = started(decoder)
        decoder.run((7, 1), at, SPAN, own, context_budget=budget)
        alone = decoder.run((word,), at + 2, SPAN, own, context_budget=budget)
        torch.testing.assert_close(second[[index]], alone, rtol=1e-9, atol=1e-9)
    later = decoder.run((5,), at + 1, SPAN, rows, tree=(-1,))  # a pass without a budget sees all rows that it follows
    held = started(decoder)
    decoder.run((7,), at, SPAN, held, context_budget=budget)
    torch.testing.assert_close(later, decoder.run((5,), at + 1, SPAN, held), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_with_a_budget_is_that_of_plain_decoding(name: str) -> None:
    """The draft is the target itself: all its tokens are accepted without a budget, fewer with a budget of one position."""
    method, settings = METHODS[name]
    target = real_models.decoders("llama")["target"]
    models = dict.fromkeys(("target", *registry.parameters(method).ROLES), target)
    plain = decode("autoregressive", {"target": target}, TEXT, 24).tokens
    rounds = {}
    for budget in (None, len(TEXT) + 24, 8, 1):
        budgets = {key: budget for key in ("context_budget", "medium_context_budget") if key in registry.parameters(method).names()}
        found = decode(method, models, TEXT, 24, {**settings, **({} if budget is None else budgets)})
        assert found.tokens == plain
        rounds[budget] = found.commits, found.account.totals()
    assert rounds[len(TEXT) + 24] == rounds[None]
    assert len(rounds[1][0]) > len(rounds[None][0])


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
