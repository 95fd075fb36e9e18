"""Comparison with prompt lookup of the transformers library on the same model: same tokens, same passes; sampled text, logs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibrate.interpreters.in_one_process import RandomDraws, Real, Sampling
from model.interpret import text_lookup
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.ngram import algorithm as ngram
from tests.calibrate.test_assisted import Rounds
from tests.calibrate.test_position_logging import PROMPTS, kin
from tests.support.real_models import DEPTHS

LAYERS, TOKENS = DEPTHS["target"], 40
REPEATING = {
    "loop": [3, 4, 5, 6, 3, 4, 5, 6, 3, 4], "one token": [7], "pair": [7, 7],
    **{str(key): value for key, value in PROMPTS.items()},
}  # fmt: skip


class Passes:
    """Numbers of new tokens in the passes of a library's model."""

    def __init__(self, full: Any) -> None:
        self.widths: list[int] = []
        self.hook = full.model.layers[0].register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        self.widths.append(inputs[0].shape[1])


def of_library(
    prompt: list[int], drafts: int, longest: int, stop: int | None = None
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the library's tokens, tokens by round, and widths of its passes."""
    import torch

    full, rounds, ids = kin()["target"].full, Rounds(), torch.tensor([prompt])
    passes = Passes(full)
    try:
        found = full.generate(
            ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=drafts, max_matching_ngram_size=longest,
            max_new_tokens=TOKENS, do_sample=False, streamer=rounds, eos_token_id=stop, pad_token_id=0,
        )  # fmt: skip
    finally:
        passes.hook.remove()
    return found[0, len(prompt) :].tolist(), rounds.chunks[1:], passes.widths


def decoded(prompt: list[int], drafts: int, longest: int, stop: int | None = None) -> tuple[Any, list[int]]:
    """Return our decoding, and the widths of its passes after the prompt's."""
    widths: list[int] = []

    class Seen(Real):
        def forward(self, cache: Any, step: Any) -> Any:
            widths.append(len(step.tokens))
            return super().forward(cache, step)

    parameters = ngram.Parameters(LAYERS, drafts, max_match=longest)
    stops = () if stop is None else (stop,)
    work = Seen({"target": kin()["target"]}).run(ngram.decode(parameters, prompt, TOKENS, stops), TOKENS)
    return work, widths[len(prompt) > 1 :]


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize(("drafts", "longest"), [(1, 1), (3, 2), (10, 2), (5, 4)])
def test_tokens_rounds_and_passes_equal_those_of_the_library(name: str, drafts: int, longest: int) -> None:
    prompt = REPEATING[name]
    tokens, rounds, library = of_library(prompt, drafts, longest)
    work, ours = decoded(prompt, drafts, longest)
    assert work.tokens == tokens
    assert [list(each.tokens) for each in work.committed] == rounds
    assert len(ours) == len(library)
    # The library's first pass reads the prompt too. It drafts beyond the end, where this project cuts the draft.
    library[0] -= len(prompt) - 1
    left = TOKENS
    for own, theirs, step in zip(ours, library, work.committed, strict=True):
        assert own == min(theirs, left)
        left -= len(step.tokens)


@pytest.mark.parametrize("name", REPEATING)
def test_sequences_that_end_equal_those_of_the_library(name: str) -> None:
    prompt = REPEATING[name]
    plain = decoded(prompt, 4, 3)[0].tokens
    for stop in {*plain[3:20]}:
        tokens, rounds, library = of_library(prompt, 4, 3, stop)
        work, ours = decoded(prompt, 4, 3, stop)
        assert work.tokens == tokens
        assert [list(each.tokens) for each in work.committed] == rounds
        assert [own - theirs for own, theirs in zip(ours, library, strict=True)][1:-1] == [0] * max(len(ours) - 2, 0)


def test_some_rounds_draft_and_some_do_not() -> None:
    """Otherwise the comparisons above would test nothing."""
    seen = {(accepted, drafted) for each in REPEATING.values() for accepted, drafted in decoded(each, 3, 2)[0].rounds}
    assert {(0, 0), (0, 3), (3, 3)} <= seen
    assert any(0 < accepted < 3 == drafted for accepted, drafted in seen)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", REPEATING)
def test_sampled_text_is_that_of_plain_sampling_with_the_same_random_numbers(name: str, seed: int) -> None:
    prompt, decoders, sampling = REPEATING[name], {"target": kin()["target"]}, Sampling(temperature=0.5)
    plain = Real(decoders, sampling=sampling, random_draws=RandomDraws(seed))
    expected = plain.run(autoregressive.decode(autoregressive.Parameters(LAYERS, sampled=True), prompt, TOKENS), TOKENS)
    real = Real(decoders, sampling=sampling, random_draws=RandomDraws(seed))
    found = real.run(ngram.decode(ngram.Parameters(LAYERS, 4, sampled=True), prompt, TOKENS), TOKENS)
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("name", REPEATING)
def test_lookups_along_a_text_give_the_rounds_of_the_decoding(name: str) -> None:
    prompt = REPEATING[name]
    work, _ = decoded(prompt, 5, 3)
    found = text_lookup.along(prompt, work.tokens, 1, 3, longest=5)
    at = 0
    for step in work.committed:
        left = TOKENS - 1 - at
        assert min(found.drafted[at], left) == step.drafted
        assert min(found.accepted[at], left) == len(step.tokens) - 1
        at += len(step.tokens)
    assert np.all(found.match <= 3)
