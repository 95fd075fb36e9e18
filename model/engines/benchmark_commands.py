"""Commands of vLLM and SGLang that measure cells of a step law, as text to paste.

One server per draft length; one benchmark per number of concurrent requests; then the commands that make cells and a law of the
results. Options are those of the engines' documentation:
`vllm serve --speculative-config` with `rejection_sample_method` and `synthetic_acceptance_length` (vllm/config/speculative.py),
`vllm bench serve` (docs.vllm.ai, CLI reference), `sglang.launch_server --speculative-*`, `sglang.bench_serving` and the variable
`SGLANG_SIMULATE_ACC_LEN` (docs.sglang.ai). Both count the bonus token in the acceptance length.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from model.base import checks, strict_json
from model.base.checks import ParameterError

REQUESTS_PER_SEQUENCE = 8
"""Benchmark requests per concurrent one, so that the start and the end, with fewer running, weigh little."""


def lines(
    engine: str, model: str, batch: Sequence[int], draft_lengths: Sequence[int], *, draft: str | None = None,
    method: str = "eagle3", acceptance_length: float | None = None, prompt: int = 1024, tokens: int = 256,
) -> Iterator[str]:  # fmt: skip
    """Lines of a shell script: servers and benchmarks for all cells, then the import of their results and the fit of a law.

    Parameters
    ----------
    engine
        `vllm` or `sglang`.
    batch, draft_lengths
        Concurrent requests, and drafted tokens per step (0: plain decoding).
    acceptance_length
        Pinned mean acceptance length; None: real acceptance, which needs real prompts.

    >>> script = list(lines("vllm", "meta-llama/Llama-3.1-8B-Instruct", [1, 8], [0]))
    >>> script[1]
    'vllm serve meta-llama/Llama-3.1-8B-Instruct'
    """
    checks.one_of("engine", engine, _SERVERS)
    if not model.strip():
        raise ParameterError(f"model must be a name as {engine} takes it, got {checks.shown(model)}")
    for name, numbers, low, high in (("batch", batch, 1, 100_000), ("draft_length", draft_lengths, 0, 64)):
        for each in numbers:
            checks.whole(name, each, low, high)
    checks.whole("prompt", prompt, 1, checks.MAX_TOKENS)
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    longest = max(draft_lengths)
    if longest and draft is None and method not in _WITHOUT_DRAFT:
        raise ParameterError(
            f"--draft is required for method {method!r} and draft length {longest}: the draft as {engine} names it"
        )
    if acceptance_length is not None:
        shortest = min([each for each in draft_lengths if each] or [0])
        checks.number("acceptance_length", acceptance_length, 1, shortest + 1)
    for name, numbers in (("batch", batch), ("draft_length", draft_lengths)):
        if len(set(numbers)) < len(numbers):
            raise ParameterError(f"{name} must be different numbers, got {checks.shown(list(numbers))}")
    results: list[tuple[str, int]] = []
    for length in draft_lengths:
        pinned = None if acceptance_length is None or not length else acceptance_length
        yield f"# draft length {length}" + ("" if pinned is None else f", acceptance length pinned to {pinned:g}")
        yield _SERVERS[engine](model, length, draft, method, pinned)
        for number in batch:
            results.append((f"{engine}-k{length}-b{number}.json", length))
            yield _BENCHMARKS[engine](model, number, prompt, tokens, results[-1][0])
    yield "# then the cells of all results, and a law; with --model and --gpu (see `calibrate engine fit --help`) kernels shape it"
    yield shlex.join([
        "calibrate", "import", "engine-log", *(file for file, _ in results), "--engine", engine, "--draft-length",
        ",".join(str(length) for _, length in results), "-o", f"{engine}-measured",
    ])  # fmt: skip
    yield shlex.join(["calibrate", "engine", "fit", f"{engine}-measured.cells.csv", "--engine", engine, "-o", f"{engine}-law"])


_WITHOUT_DRAFT = ("ngram", "mtp", "suffix")
"""Methods that need no separate draft."""


def _vllm(model: str, length: int, draft: str | None, method: str, pinned: float | None) -> str:
    words = ["vllm", "serve", model]
    if length:
        settings: dict[str, object] = {"method": method, "num_speculative_tokens": length}
        settings |= {} if draft is None else {"model": draft}
        settings |= {} if pinned is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": pinned}
        words += ["--speculative-config", strict_json.dumps(settings)]
    return shlex.join(words)


def _vllm_benchmark(model: str, number: int, prompt: int, tokens: int, name: str) -> str:
    return shlex.join([
        "vllm", "bench", "serve", "--model", model, "--dataset-name", "random", "--random-input-len", str(prompt),
        "--random-output-len", str(tokens), "--ignore-eos", "--max-concurrency", str(number),
        "--num-prompts", str(REQUESTS_PER_SEQUENCE * number), "--save-result", "--result-filename", name,
    ])  # fmt: skip


_ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "draft_model": "STANDALONE", "ngram": "NGRAM"}
"""SGLang's names of methods."""


def _sglang(model: str, length: int, draft: str | None, method: str, pinned: float | None) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    if length:
        checks.one_of("method", method, _ALGORITHMS)
        words += ["--speculative-algorithm", _ALGORITHMS[method]]
        words += [] if draft is None else ["--speculative-draft-model-path", draft]
        # A chain: one candidate per step, and as many tokens to verify as steps plus one.
        words += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(length + 1)]
    return ("" if pinned is None else f"SGLANG_SIMULATE_ACC_LEN={pinned:g} ") + shlex.join(words)


def _sglang_benchmark(model: str, number: int, prompt: int, tokens: int, name: str) -> str:
    return shlex.join([
        "python", "-m", "sglang.bench_serving", "--backend", "sglang", "--model", model, "--dataset-name", "random",
        "--random-input-len", str(prompt), "--random-output-len", str(tokens), "--random-range-ratio", "1",
        "--max-concurrency", str(number), "--num-prompts", str(REQUESTS_PER_SEQUENCE * number), "--output-file", name,
    ])  # fmt: skip


_SERVERS: dict[str, Callable[[str, int, str | None, str, float | None], str]] = {"vllm": _vllm, "sglang": _sglang}
_BENCHMARKS: dict[str, Callable[[str, int, int, int, str], str]] = {"vllm": _vllm_benchmark, "sglang": _sglang_benchmark}
