"""`sim explain`: why a measured speed-up is what it is, and why it differs from a claim."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from model.base import strict_json

QUIET_S = 2.0
"""Seconds after which a line on the standard error says that it is still working."""
Log = Annotated[
    list[Path] | None,
    typer.Option(help="Log or benchmark of the engine, or its acceptance record: acceptance, and times if it has them."),
]
PlainTpot = Annotated[
    str | None,
    typer.Option("--plain-tpot", metavar="TIME", help="Time per output token without drafts: 7.5ms. Default: the log's."),
]
Tpot = Annotated[
    str | None, typer.Option("--tpot", metavar="TIME", help="Time per output token with drafts: 4.1ms. Default: the log's.")
]
Model = Annotated[str | None, typer.Option(help="Model: a name of `sim ls shapes`, or its config.json.")]
Gpu = Annotated[str | None, typer.Option(help="Device: a name of `sim ls devices`, or its .toml.")]
Parallel = Annotated[int | None, typer.Option("--tensor-parallel", help="Devices that the model is split over.")]
Dtype = Annotated[str | None, typer.Option(help="Type of the weights, such as float8. Default: the profile's, or bfloat16.")]
Weights = Annotated[str | None, typer.Option("--weights", help="Format of quantised weights, such as int4.")]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft: a name of `sim ls shapes`, or eagle3, eagle, mtp, medusa. Default: a prior time."),
]
DraftLength = Annotated[int | None, typer.Option("--draft-length", help="Drafted tokens per step. Default: the log's.")]
DraftPasses = Annotated[
    int | None,
    typer.Option("--draft-passes", help="Passes of the draft per step, 0 (n-grams) to K. Default: one per drafted token."),
]
DraftContextBudget = Annotated[
    int | None,
    typer.Option("--draft-context-budget", help="Most cached positions of a sequence that a draft pass read. Default: all."),
]
AcceptanceLength = Annotated[
    float | None, typer.Option("--mean-acceptance-length", help="Instead of a log: tokens per step, bonus token counted.")
]
Acceptance = Annotated[
    float | None, typer.Option("--acceptance", help="Instead of a log: probability that a tested draft token is accepted.")
]
Batch = Annotated[float | None, typer.Option("--batch", help="Running sequences. Default: the log's, or 1, assumed.")]
Context = Annotated[float | None, typer.Option("--context", help="Cached positions per sequence. Default: 1000, assumed.")]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="Engine of the prior: vllm, sglang, tensorrt-llm, llama.cpp. Default: the log's, or all."),
]
EngineLaw = Annotated[
    str | None, typer.Option("--engine-law", metavar="LAW", help="Step law instead of priors: a name (`sim ls laws`) or a .json.")
]
StaticTokens = Annotated[
    int | None, typer.Option("--static-tokens", help="Output tokens of each sequence of a static batch. Default: continuous.")
]
Claim = Annotated[
    str | None,
    typer.Option(metavar="KEY=VALUE,...", help="Claim to compare with: speedup=4.4,acceptance=0.85,draft_length=7,gpu=a100,..."),
]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="NAME", help="Write NAME.json, for `sim report`, and the waterfall NAME.svg.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def explain(
    log: Log = None,
    plain_tpot: PlainTpot = None,
    tpot: Tpot = None,
    model: Model = None,
    gpu: Gpu = None,
    tensor_parallel: Parallel = None,
    dtype: Dtype = None,
    weights: Weights = None,
    draft: Draft = None,
    draft_length: DraftLength = None,
    draft_passes: DraftPasses = None,
    draft_context_budget: DraftContextBudget = None,
    mean_acceptance_length: AcceptanceLength = None,
    acceptance: Acceptance = None,
    batch: Batch = None,
    context: Context = None,
    engine: Engine = None,
    engine_law: EngineLaw = None,
    static_tokens: StaticTokens = None,
    claim: Claim = None,
    out: Out = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Explain a measured speed-up, term by term, and why it differs from a claim.

    sim explain --log vllm.log --plain-tpot 8.0ms --tpot 6.2ms --model llama-3.1-8b --gpu h100 --draft eagle3 --batch 8

    sim explain --mean-acceptance-length 2.4 --draft-length 3 --plain-tpot 8.0ms --tpot 6.2ms --model llama-3.1-8b --gpu h100

    The time of a step, in units of a plain step, is divided into verification, drafting, the engine's overhead, stragglers of a
    static batch and a rest, each with its 80 % interval and source; the largest extra is named, with what to change. Where a log
    times drafting (llama.cpp), drafting is as measured. With --claim, the ratio of both speed-ups is divided among the settings in
    which the two sides differ (Shapley values of its logarithm). With --draft-context-budget, notes say what the budget changes in
    the time of drafting and in memory.
    """
    from sim.advice import explained_speedup
    from sim.runs.environment import versions

    start = time.monotonic()
    found = explained_speedup.explain(
        log or (), plain_tpot=plain_tpot, tpot=tpot, model=model, gpu=gpu, tensor_parallel=tensor_parallel, dtype=dtype,
        weights=weights, draft=draft, draft_length=draft_length, draft_passes=draft_passes,
        draft_context_budget=draft_context_budget, mean_acceptance_length=mean_acceptance_length, acceptance=acceptance,
        batch=batch, context=context, engine=engine, engine_law=engine_law, static_tokens=static_tokens, claim=claim, seed=seed,
        progress=lambda what: _progress(start, what),
    )  # fmt: skip
    document = found.document() | {"command": ["sim", "explain", *sys.argv[2:]], "versions": versions()}
    written: list[Path] = []
    if out is not None:
        import figures
        from model.base import whole_files

        base = out.with_suffix("") if out.suffix in (".json", ".svg") else out
        path = whole_files.write_text(base.with_name(f"{base.name}.json"), strict_json.dumps(document, indent=2) + "\n")
        written = [path, *figures.save(found.figure(), base, formats=("svg",))]
    print(strict_json.dumps(document, indent=2) if as_json else "\n".join([str(found), *map(str, written)]))


def _progress(start: float, what: str) -> None:
    if time.monotonic() - start > QUIET_S:
        print(f"{what} ...", file=sys.stderr)
