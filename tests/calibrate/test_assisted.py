"""Comparison with assisted generation of the transformers library, on the same pair of models: same tokens, same rounds."""

from __future__ import annotations

from typing import Any

import pytest

from calibrate.interpreters.in_one_process import Real
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.speculative import algorithm as speculative
from tests.calibrate.test_position_logging import PROMPTS, kin
from tests.support.real_models import DEPTHS

LAYERS, TOKENS = DEPTHS["target"], 24


class Rounds:
    """A streamer for the library, which receives the prompt and then the tokens of each round."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def put(self, value: Any) -> None:
        """Tokens, of shape (tokens,) or (1, tokens)."""
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing to do at the end."""


@pytest.mark.parametrize("number", PROMPTS)
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_rounds_equal_those_of_the_library(number: int, gamma: int) -> None:
    import torch

    decoders = kin()
    full, small = decoders["target"].full, decoders["draft"].full
    pinned = small.generation_config
    pinned.num_assistant_tokens, pinned.num_assistant_tokens_schedule = gamma, "constant"
    pinned.assistant_confidence_threshold = 0.0
    prompt, rounds = PROMPTS[number], Rounds()
    ids = torch.tensor([prompt])
    found = full.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=small, max_new_tokens=TOKENS, do_sample=False, streamer=rounds,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    work = Real(decoders).run(speculative.decode(speculative.Parameters(LAYERS, gamma, draft_layers=2), prompt, TOKENS), TOKENS)
    assert found[0, len(prompt) :].tolist() == work.tokens
    given, *library = rounds.chunks
    assert given == prompt
    ours = [list(step.tokens) for step in work.committed]
    # In the last round the library may draft beyond the wanted tokens, and cuts its output.
    assert library[:-1] == ours[: len(library) - 1]
    assert sum(map(len, ours)) == sum(map(len, library)) == TOKENS


@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("exit_layer", [1, 3, LAYERS - 1])
def test_early_exit_of_the_library_has_the_same_rounds_and_runs_the_first_layers_again(exit_layer: int, gamma: int) -> None:
    """`assistant_early_exit` drafts with the model's own norm and output matrix, and keeps separate keys and values."""
    import torch

    decoder, prompt, rounds = kin()["target"], PROMPTS[0], Rounds()
    full, ids, runs = decoder.full, torch.tensor([PROMPTS[0]]), [0]
    hooks = [layer.register_forward_hook(lambda _, inputs, out: _count(runs, inputs)) for layer in full.model.layers]
    asked = full.generation_config
    asked.num_assistant_tokens, asked.num_assistant_tokens_schedule, asked.assistant_confidence_threshold = gamma, "constant", 0.0
    try:
        found = full.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_early_exit=exit_layer, max_new_tokens=TOKENS, do_sample=False,
            streamer=rounds, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    finally:
        for hook in hooks:
            hook.remove()
    parameters = self_speculative.Parameters(LAYERS, exit_layer, gamma)
    work = Real({"target": decoder}).run(self_speculative.decode(parameters, prompt, TOKENS), TOKENS)
    assert found[0, len(prompt) :].tolist() == work.tokens
    _, *library = rounds.chunks
    ours = [list(step.tokens) for step in work.committed]
    assert library[:-1] == ours[: len(library) - 1]
    # Layers run by tokens, the prompt's apart: gamma + 1 per round through all layers here. The library runs the drafted ones twice
    # through the first layers, and at most one token more per round; in its last round it may draft more.
    own = work.account.of("target").layer_passes - LAYERS * (len(prompt) - 1)
    drafted = sum(number * count for (_, number), count in work.rounds.items())
    assert own == sum(count * (number + 1) for (_, number), count in work.rounds.items()) * LAYERS
    more = runs[0] - (LAYERS + exit_layer) * (len(prompt) - 1) - own
    assert exit_layer * drafted <= more <= exit_layer * (drafted + work.rounds.total()) + (LAYERS + exit_layer) * gamma


def _count(runs: list[int], inputs: Any) -> None:
    runs[0] += inputs[0].shape[1]


def test_some_rounds_accept_and_some_do_not() -> None:
    """Otherwise the comparison above would test nothing."""
    parameters = speculative.Parameters(LAYERS, 3, draft_layers=2)
    lengths = {
        len(step.tokens)
        for prompt in PROMPTS.values()
        for step in Real(kin()).run(speculative.decode(parameters, prompt, TOKENS), TOKENS).committed
    }
    assert {1, 2} <= lengths
    assert max(lengths) == 4


def test_mt5_generates_the_tokens_of_the_library() -> None:
    """Its decoder is that of T5. Encoder and decoder have equal depths, as the library cannot generate with a deeper decoder."""
    import torch
    import transformers

    from calibrate.decode import real_decoding
    from calibrate.decoders.transformers_adapter import decoder_of

    torch.manual_seed(2)
    config = transformers.MT5Config(
        vocab_size=29, d_model=16, d_ff=24, d_kv=4, num_layers=4, num_decoder_layers=4, num_heads=4, decoder_start_token_id=0
    )
    full = transformers.AutoModelForSeq2SeqLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in full.parameters():
            if parameter.ndim > 1:
                parameter *= 5
    decoder = decoder_of(full, "mt5")
    decoder.read_source((5, 6, 7))
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = tuple(full.generate(torch.tensor([[5, 6, 7]]), decoder_start_token_id=0, **asked)[0, 1:].tolist())
    assert len({*expected}) > 2
    exact = {"autoregressive": {}, "ppd": {"exit_layer": 2, "candidates": 3}, "early_exit": {"exit_layer": 4}}
    for method, settings in exact.items():
        assert real_decoding.decode(method, {"target": decoder}, [0], 12, settings).tokens == expected
