"""Real models: plain decoding relative to the library's, and decision logs relative to the least work that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np

from tests.bench.measure import Benchmark

PROMPT, VOCABULARY = 32, 1024


@lru_cache(maxsize=1)
def _models() -> dict[str, Any]:
    """Models of the family's sizes, with random weights, which do not affect times."""
    import torch
    from transformers import LlamaForCausalLM

    from calibrate.decoders.transformers_adapter import decoder_of
    from calibrate.family.training import FAMILY

    torch.set_num_threads(1)  # more threads do not help such small models
    torch.manual_seed(0)
    found = {role: decoder_of(LlamaForCausalLM(FAMILY[role].config(VOCABULARY, 512)), role) for role in ("target", "draft")}
    for decoder in found.values():
        decoder.full.generation_config.eos_token_id = None
    target = found["target"]
    target.heads = {layer: target.head.weight.detach().clone() for layer in range(1, target.layers)}
    return found


def _prompts(count: int) -> dict[int, list[int]]:
    return {number: np.random.default_rng(number).integers(1, VOCABULARY, PROMPT).tolist() for number in range(count)}


def _timed(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def plain(tokens: int) -> list[int]:
    """Generate tokens with our plain decoder."""
    from calibrate.interpreters.in_one_process import Real
    from model.methods.autoregressive import algorithm as autoregressive

    steps = autoregressive.decode(autoregressive.Parameters(12), _prompts(1)[0], tokens)
    return Real({"target": _models()["target"]}).run(steps, tokens).tokens


def library(tokens: int, sequences: int = 1) -> Any:
    """Generate with the library after `sequences` prompts; the result includes the prompts."""
    import torch

    ids = torch.tensor([*_prompts(sequences).values()])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return _models()["target"].full.generate(ids, **options)


def log(tokens: int, sequences: int) -> Any:
    """Record a decision log, with a head for every layer."""
    from calibrate.decode.position_logging import log_rows

    models = _models()
    return log_rows(models["target"], _prompts(sequences), tokens, draft=models["draft"])


def _least(tokens: int, sequences: int) -> float:
    """Time of plain generation of the same sequences, batched, and 2.5 passes of both models over them [ms]."""
    import torch

    written: list[Any] = []
    writing = _timed(lambda: written.append(library(tokens, sequences)))
    with torch.inference_mode():
        start = perf_counter()
        for decoder in _models().values():
            decoder.full(written[0], use_cache=False)
        return 1e3 * (writing + 2.5 * (perf_counter() - start))


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Plain decoding of one sequence, and a log of several."""
    tokens, sequences = (4, 2) if tiny else (64, 40)
    missing = "" if importlib.util.find_spec("transformers") else "torch and transformers are not installed"
    return [
        Benchmark(
            "real-plain", "tok/s", lambda: tokens / _timed(lambda: plain(tokens)), lambda: tokens / _timed(lambda: library(tokens)),
            "model.generate", 0.5, missing=missing,
        ),
        Benchmark(
            "real-log", "ms", lambda: 1e3 * _timed(lambda: log(tokens, sequences)), lambda: _least(tokens, sequences),
            "generation + 2.5 passes of the models", 1.0, at_most=True, missing=missing,
        ),
    ]  # fmt: skip
