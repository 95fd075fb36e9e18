"""Real models: our decoding relative to the library's `generate` on the same models, and decision logs to the work they need.

The models are the bundled family: the target, and as its draft the small model that was aligned with it. Both sides draft
`DRAFT_LENGTH` tokens in every round, so that they make the same rounds. The library drafts no trees: its side of trees is that of
chains as deep.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

from model.steps import Steps
from tests.bench import measure
from tests.bench.measure import Benchmark

PROMPT, DRAFT_LENGTH = 32, 4
TREE = (-1, -1, -1, 0, 0, 1, 3, 3, 6)
"""Parents of a tree of nine nodes, as deep as the drafts of the library."""
SAMPLE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@lru_cache(maxsize=1)
def _models() -> dict[str, Any]:
    """Decoders of the bundled family, by role; the target has its trained heads, and no token ends a sequence."""
    import torch

    from calibrate.loading import load_models

    torch.set_num_threads(1)  # more threads do not help such small models
    loaded = load_models.models({"target": "family:target", "draft": "family:aligned"})
    load_models.use_heads(loaded["target"], load_models.heads_path("family:target"))
    found = {role: each.decoder for role, each in loaded.items()}
    for decoder in found.values():
        asked = decoder.full.generation_config
        asked.eos_token_id, asked.num_assistant_tokens_schedule = None, "constant"
        asked.num_assistant_tokens, asked.assistant_confidence_threshold = DRAFT_LENGTH, 0.0
    return found


@lru_cache(maxsize=1)
def _text() -> list[int]:
    """Tokens of a Python module, of the kind that the family was trained with."""
    found: list[int] = _models()["target"].tokenizer(Path(measure.__file__).read_text("utf-8"))["input_ids"]
    return found


def _prompts(count: int) -> dict[int, list[int]]:
    """Windows of a text, by number."""
    text = _text()
    starts = [number * 53 % (len(text) - PROMPT) for number in range(count)]
    return {number: text[start : start + PROMPT] for number, start in enumerate(starts)}


def _timed(call: Callable[[], object]) -> float:
    """CPU time of a call, which excludes other programs; all of it is one thread's [s]."""
    start = process_time()
    call()
    return process_time() - start


SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("autoregressive", {}),
    "plain-sampled": ("autoregressive", {"sampled": True}),
    "speculative": ("speculative", {"draft_length": DRAFT_LENGTH}),
    "speculative-sampled": ("speculative", {"draft_length": DRAFT_LENGTH, "sampled": True}),
    "tree": ("tree", {"shape": "listed", "parents": TREE}),
}
"""Method and settings of each benchmark."""


def ours(name: str, tokens: int, seed: int = 0, watch: Callable[[Steps], Steps] = lambda steps: steps) -> list[int]:
    """Decode with our interpreter; `watch` may stand between it and the algorithm."""
    from calibrate.interpreters.in_one_process import RandomDraws, Real
    from model.methods import registry

    method, settings = SETTINGS[name]
    models = _models()
    depths = {"layers": models["target"].layers}
    if method != "autoregressive":
        depths["draft_layers"] = models["draft"].layers
    used = {role: models[role] for role in ("target", "draft")[: len(depths)]}
    steps = registry.algorithm(method).decode(registry.parameters(method)(**settings, **depths), _prompts(1)[0], tokens)
    return Real(used, random_draws=RandomDraws(seed)).run(watch(steps), tokens).tokens


def library(tokens: int, sequences: int = 1, *, drafts: bool = False, sampled: bool = False, seed: int = 0) -> Any:
    """Generate with the library after `sequences` prompts, with or without the draft; the result includes the prompts."""
    import torch

    models = _models()
    ids = torch.tensor([*_prompts(sequences).values()])
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    if drafts:
        options["assistant_model"] = models["draft"].full
    if sampled:
        torch.manual_seed(seed)
        options |= SAMPLE
    return models["target"].full.generate(ids, **options)


def as_library(name: str, tokens: int, seed: int = 0) -> Any:
    """What the library does in place of our decoding of this name."""
    return library(tokens, drafts="plain" not in name, sampled="sampled" in name, seed=seed)


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
        passes = _timed(lambda: [decoder.full(written[0], use_cache=False) for decoder in _models().values()])
    return 1e3 * (writing + 2.5 * passes)


@contextmanager
def _models_timed() -> Iterator[list[float]]:
    """Collect the CPU times of passes and of reads while the context is open: what models and their outputs are computed in [s]."""
    from calibrate.decoders.transformers_adapter import Decoder
    from calibrate.interpreters.in_one_process import Real

    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            start = thread_time()
            found = call(*arguments, **more)
            spent.append(thread_time() - start)
            return found

        return run

    kept = Decoder.run, Real._evaluate, Real._read_each
    Decoder.run, Real._evaluate, Real._read_each = map(timed, kept)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Decoder.run, Real._evaluate, Real._read_each = kept  # type: ignore[method-assign]


class OwnTime:
    """CPU time of a decoding that is not the models', and its whole CPU time, both of one run [ms].

    That of the algorithm and the interpreter together is the time outside passes and the evaluation of reads; that of the
    `algorithm` alone is the time in which it makes its next step.
    """

    def __init__(self, name: str, tokens: int, *, algorithm: bool = False) -> None:
        self.name, self.tokens, self.algorithm = name, tokens, algorithm
        self.measured: dict[str, float] = {}

    def _of(self, part: str) -> float:
        if part not in self.measured:
            start = thread_time()
            if self.algorithm:
                own = [0.0]
                ours(self.name, self.tokens, watch=lambda steps: _watched(steps, own))
            else:
                with _models_timed() as spent:
                    ours(self.name, self.tokens)
            whole = thread_time() - start
            self.measured = {"own": 1e3 * (own[0] if self.algorithm else whole - sum(spent)), "whole": 1e3 * whole}
        return self.measured.pop(part)

    def own(self) -> float:
        """Time of the algorithm, and of the interpreter unless it is of the algorithm alone."""
        return self._of("own")

    def whole(self) -> float:
        """Time of the decoding."""
        return self._of("whole")


def _watched(steps: Steps, spent: list[float]) -> Steps:
    """The same steps; adds the wall time in which they are made, since reading a thread's clock takes as long as a step."""
    answer: Any = None
    while True:
        start = perf_counter()
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        finally:
            spent[0] += perf_counter() - start
        answer = yield step


def _speeds(name: str, tokens: int, against: str) -> Benchmark:
    """Speed of our decoding and of the library's; sampled ones take other random draws in each repeat."""
    runs = [0, 0]

    def speed(side: int, decode: Callable[[str, int, int], object]) -> float:
        runs[side] += 1
        return tokens / _timed(lambda: decode(name, tokens, runs[side]))

    return Benchmark(
        f"real-{name}", "tok/s", lambda: speed(0, ours), lambda: speed(1, as_library), against, 1.0, missing=_missing()
    )


def _missing() -> str:
    return "" if importlib.util.find_spec("transformers") else "torch and transformers are not installed"


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Decoding of one sequence, the share of time that is not the models', and a log of several sequences."""
    tokens, sequences = (6, 2) if tiny else (128, 40)
    logged = min(tokens, 64)
    found = [
        _speeds(name, tokens, "generate" + (" with an assistant" if "plain" not in name else "")) for name in SETTINGS
    ]  # fmt: skip
    for name in SETTINGS:
        share = OwnTime(name, tokens)
        found.append(
            Benchmark(f"real-python-{name}", "ms", share.own, share.whole, "the decoding", 0.01, at_most=True, missing=_missing())
        )
        if "plain" in name:  # offers: an algorithm makes two steps
            continue
        alone = OwnTime(name, tokens, algorithm=True)
        title, limit = f"real-algorithm-{name}", "the decoding"
        found.append(Benchmark(title, "ms", alone.own, alone.whole, limit, 0.01, at_most=True, missing=_missing()))
    return [
        *found,
        Benchmark(
            "real-log", "ms", lambda: 1e3 * _timed(lambda: log(logged, sequences)), lambda: _least(logged, sequences),
            "generation + 2.5 passes of the models", 0.6, at_most=True, missing=_missing(),
        ),
        Benchmark(
            "real-log-generate", "ms", lambda: 1e3 * _timed(lambda: log(logged, sequences)),
            lambda: 1e3 * _timed(lambda: library(logged, sequences)), "generate, batched", None, at_most=True, missing=_missing(),
        ),
    ]  # fmt: skip
