"""Tokens of a small model that a large one replaces: the two ends of the curve, and each token against the library's models."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from calibrate.decode import replaced_tokens
from calibrate.decode.reference_scores import ReferenceScores
from calibrate.decode.replaced_tokens import KEPT, REPLACED, SAME
from model.base.checks import ParameterError
from tests.support import real_models
from tests.support.real_models import VOCABULARY

TOKENS = 10
PROMPTS = [[int(token) for token in np.random.default_rng(number).integers(0, VOCABULARY, 3 + number)] for number in range(4)]


@pytest.fixture(scope="module")
def models() -> Any:
    return real_models.decoders("llama", "draft", seed=2)


def by_hand(models: Any, prompt: list[int], threshold: float) -> tuple[list[int], list[str]]:
    """Both of the library's models from scratch at every position."""
    text: list[int] = []
    origins: list[str] = []
    for _ in range(TOKENS):
        small, large = (real_models.logits(models[role].full, [*prompt, *text]) for role in ("draft", "target"))
        token, own = int(small.argmax()), int(large.argmax())
        likely = float(torch.softmax(large, -1)[token])
        origins.append(KEPT if likely >= threshold else SAME if own == token else REPLACED)
        text.append(token if likely >= threshold else own)
    return text, origins


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.03, 0.04, 0.06, 1.1])
def test_tokens_are_those_of_the_two_models_from_scratch(models: Any, threshold: float) -> None:
    layers = {role: models[role].layers for role in ("draft", "target")}
    for prompt in PROMPTS:
        text, origins = replaced_tokens._decoded(models, layers, prompt, TOKENS, threshold)
        assert ([*text], origins) == by_hand(models, prompt, threshold)


def test_the_ends_of_the_curve_are_the_two_models_alone(models: Any) -> None:
    table = replaced_tokens.measure(models, PROMPTS, TOKENS, [0.0, 0.02, 0.04, 1.1])
    small, *_, large = table.to_dicts()
    assert small["replaced_share"] == small["engaged_share"] == 0
    assert large["engaged_share"] == large["agreement"] == 1
    assert large["log_likelihood"] == pytest.approx(large["plain_log_likelihood"])
    assert table["engaged_share"].is_sorted()
    hands = [by_hand(models, prompt, 0.04)[1] for prompt in PROMPTS]
    assert table["replaced_share"][2] == pytest.approx(np.mean([origin == REPLACED for each in hands for origin in each]))
    assert 0 < table["replaced_share"][2] < 1
    # A token that is kept agrees only if it is the large model's own, and a replaced one always.
    for row in table.to_dicts():
        assert row["agreement"] >= row["engaged_share"]
        assert row["replaced_share"] <= row["engaged_share"]
        assert row["replaced_low"] <= row["replaced_share"] <= row["replaced_high"]


def test_a_text_ends_at_the_end_token(models: Any) -> None:
    from calibrate.interpreters.in_one_process import Real

    layers = {role: models[role].layers for role in ("draft", "target")}
    for prompt in PROMPTS:
        text, _ = by_hand(models, prompt, 0.03)
        for stop in text:  # also the first token
            work = Real(models).run(replaced_tokens.steps(layers, prompt, TOKENS, 0.03, (stop,)), TOKENS)
            assert work.tokens == text[: text.index(stop) + 1]


def test_an_encoder_reads_the_source_of_each_prompt() -> None:
    models: Any = real_models.decoders("t5", "draft", seed=2)
    sources = [(1, 2, 3), (5, 4), (6, 7, 8, 9)]
    together = replaced_tokens.measure(models, [[0]] * 3, TOKENS, [0.0, 0.03, 1.1], sources=sources)
    alone = [replaced_tokens.measure(models, [[0]], TOKENS, [0.0, 0.03, 1.1], sources=[each]) for each in sources]
    for name in ("replaced_share", "agreement", "plain_log_likelihood"):
        assert together[name].to_list() == pytest.approx(np.mean([each[name].to_list() for each in alone], axis=0))
    assert together["agreement"][2] == 1


def test_scores_against_references(models: Any) -> None:
    pytest.importorskip("sacrebleu")
    whole = [" ".join(map(str, real_models.reference_tokens(models["target"].full, prompt, TOKENS))) for prompt in PROMPTS]
    scores = ReferenceScores(("bleu",), tuple((text,) for text in whole), lambda _, output: " ".join(map(str, output)))
    table = replaced_tokens.measure(models, PROMPTS, TOKENS, [0.0, 1.1], scores=scores)
    assert table["bleu"][1] == pytest.approx(100)
    assert table["bleu"][0] < 100
    assert table["plain_bleu"].to_list() == pytest.approx([100, 100])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"thresholds": []}, "at least one each"), ({"thresholds": [-0.1]}, "threshold must be"), ({"tokens": 0}, "tokens must be"),
        ({"models": {}}, "models must be a target and a draft, got none"), ({"prompts": [[]]}, "at least one token"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(models: Any, change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"models": models, "prompts": PROMPTS, "tokens": 4, "thresholds": [0.5]} | change
    with pytest.raises(ParameterError, match=said):
        replaced_tokens.measure(**given)


def test_figure_shows_the_curve_and_the_large_model(models: Any) -> None:
    from figures.of_logs import quality_over_replacement

    table = replaced_tokens.measure(models, PROMPTS, TOKENS, [1.1, 0.0, 0.03])
    drawn = quality_over_replacement.draw(table, "log_likelihood", "small for large")
    (axes,) = drawn.axes
    curve = next(line for line in axes.lines if line.get_label() == "measured")
    ordered = table.sort("replaced_share")
    assert [*curve.get_xdata()] == ordered["replaced_share"].to_list()
    assert [*curve.get_ydata()] == ordered["log_likelihood"].to_list()
    level = next(line for line in axes.lines if line.get_label() == "the large model alone")
    assert level.get_ydata()[0] == pytest.approx(table["plain_log_likelihood"][0])
    with pytest.raises(ParameterError, match="unknown quality 'blue'"):
        quality_over_replacement.draw(table, "blue", "")
    with pytest.raises(ParameterError, match="needs the columns"):
        quality_over_replacement.draw(pl.DataFrame({"agreement": [1.0]}), "agreement", "")
