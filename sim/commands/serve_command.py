"""`sim serve`: a server under load, with policies of draft length side by side."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from model.base import strict_json

QUIET_S = 2.0
"""Seconds between lines on the standard error that say what is running."""


def serve(
    model: Annotated[str | None, typer.Option(help="Model: a name of `sim ls shapes`, or its config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device: a name of `sim ls devices`, or its .toml.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", help="Devices of a replica. Default: the law's, or 1.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft: eagle3, eagle, mtp, medusa, p-eagle, or a model of `sim ls shapes`.")
    ] = None,
    draft_context_budget: Annotated[
        int | None,
        typer.Option("--draft-context-budget", help="Most cached positions of a sequence that a draft pass reads. Default: all."),
    ] = None,
    placement: Annotated[
        str, typer.Option(help="Where the draft runs: colocated, on the target's devices, or separate, on one of its own.")
    ] = "colocated",
    link: Annotated[
        str | None, typer.Option(help="Time of a transfer between target and separate draft, such as 20us. Never free by default.")
    ] = None,
    draft_gpu: Annotated[
        str | None, typer.Option("--draft-gpu", help="Device of a separate draft. Default: that of the model.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Engine whose priors hold without a law or log: vllm, sglang, tensorrt-llm, llama.cpp, any, none.")
    ] = "any",
    engine_law: Annotated[
        str | None, typer.Option("--engine-law", help="Step law of `calibrate engine fit` (.json), or a name of `sim ls laws`.")
    ] = None,
    log: Annotated[
        list[Path] | None, typer.Option(help="Log or benchmark of the engine, or its acceptance record: acceptance and step times.")
    ] = None,
    log_draft_length: Annotated[
        str | None, typer.Option("--log-draft-length", help="Draft length of logs that do not say it: 3, or one for each log: 0,3.")
    ] = None,
    acceptance: Annotated[str | None, typer.Option(help="Acceptance rate: 0.7, or an uncertain 0.6..0.8. Never assumed.")] = None,
    acceptance_by_position: Annotated[
        str | None, typer.Option("--acceptance-by-position", help="Conditional rates by draft position: 0.8,0.7,0.6.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second, with random arrivals: 1,2,5. Of a trace: its speed.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Clients that each send the next request when theirs is done: 1,8,64.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests of a trace: Azure's CSV, or JSON lines with lengths and arrivals.")
    ] = None,
    prompt: Annotated[float | None, typer.Option(help="Mean tokens of a prompt. Default: 1024, assumed.")] = None,
    output: Annotated[float | None, typer.Option(help="Mean tokens of an output. Default: 256, assumed.")] = None,
    prompt_cv: Annotated[float, typer.Option("--prompt-cv", help="Coefficient of variation of the prompts' lengths.")] = 0.0,
    output_cv: Annotated[float, typer.Option("--output-cv", help="Coefficient of variation of the outputs' lengths.")] = 0.0,
    burstiness: Annotated[float, typer.Option(help="Coefficient of variation of the gaps between arrivals; 1: Poisson.")] = 1.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="off, static:K, vllm:[[1,64,3],[65,512,0]], sglang, goodput, schedule, dspark, oracle, pearl:K; may be repeated."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of a run. Default: 200 or more, 8 for each that runs; all of a trace.")
    ] = None,
    replications: Annotated[int, typer.Option(help="Further runs with other requests and drawn inputs, for the intervals.")] = 4,
    replicas: Annotated[int, typer.Option(help="Servers.")] = 1,
    router: Annotated[str, typer.Option(help="How requests are sent to them: least-loaded or round-robin.")] = "least-loaded",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Largest number of running sequences of a server.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Largest number of tokens in a pass of the target.")
    ] = 8192,
    block_size: Annotated[int, typer.Option("--block-size", help="Positions of a block of the cache.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option("--num-blocks", help="Blocks of the cache. Default: as the memory holds.")
    ] = None,
    chunked_prefill: Annotated[bool, typer.Option("--chunked-prefill/--whole-prompts", help="Read prompts in chunks.")] = True,
    reserve_prompts: Annotated[
        bool,
        typer.Option(
            "--reserve-prompts/--reserve-chunks",
            help="Admit a request when the cache has room for its whole prompt, as vLLM does, or for its first chunk.",
        ),
    ] = True,
    async_scheduling: Annotated[
        bool,
        typer.Option(
            "--async-scheduling",
            help="Let the engine's own work overlap with passes, as vLLM's option of this name. Not with a law or log.",
        ),
    ] = False,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", help="Most tokens of a request, with its output. Default: the model's context, if known."),
    ] = None,
    slo_ttft: Annotated[
        str | None, typer.Option("--slo-ttft", help="Longest acceptable time to the first token: 500ms, 1s.")
    ] = None,
    slo_tpot: Annotated[str | None, typer.Option("--slo-tpot", help="Longest acceptable time per output token: 20ms.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights, such as float8. Default: the model's.")] = None,
    weights: Annotated[str | None, typer.Option(help="Format of quantised weights, such as int4.")] = None,
    kernels: Annotated[str | None, typer.Option(help="Times of kernels: profile, operations or roofline.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    settings: Annotated[
        str | None, typer.Option(help="Print the lines that set this engine to the best schedule: vllm, sglang or tensorrt-llm.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="NAME", help="Write NAME.json, for `sim report`, and figures NAME_*.svg."),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the steps at the first load to FILE.json or .json.gz, for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Simulate a server under load: throughput, times of requests, and which policy of draft length suits it.

    Requests are batched continuously: each step is one ragged pass over what all running sequences need, and over chunks of
    prompts. Times come from a step law, a log, or kernels and the engine's priors, as in `sim advise`.

    sim serve --model llama-3.1-8b --gpu h100 --draft eagle3 --acceptance 0.6..0.8 --rate 1,5,20

    sim serve --engine-law sglang-qwen3-235b-a22b --concurrency 1,8,64 --policy off --policy static:3 --policy goodput --json

    sim serve --engine-law sglang-qwen3-235b-a22b --rate 2,4,8,12 --policy off --policy static:3 --policy schedule -o load

    sim serve --model llama-3.1-70b --gpu h100 --tensor-parallel 4 --draft llama-3.2-1b --placement separate --link 20us
    --acceptance 0.7 --concurrency 8,64 --policy off --policy static:4 --policy pearl:4

    sim serve --engine-law vllm-llama-3.1-8b-eagle3-h100 --trace AzureLLMInferenceTrace_conv.csv --policy off --policy sglang
    """
    from model.base import checks
    from model.base.checks import ParameterError
    from model.serving.loads import RequestLengths
    from sim.advice import engine_settings
    from sim.advice.option_values import milliseconds, numbers, single
    from sim.advice.situation import Inputs
    from sim.runs.environment import versions
    from sim.serving import policies, study, study_results
    from sim.serving.draft_placement import DraftPlacement

    if settings is not None:
        checks.one_of("settings", settings, engine_settings.NAMES)
    if perfetto is not None:
        from sim.runs import trace as trace_files

        trace_files.check_name(perfetto, trace_files.OF_TRACES)
        _check_target("--perfetto", perfetto)
    if out is not None:
        if not out.name:
            raise ParameterError(f"--out must be the name of files to write, such as runs/load, got {str(out)!r}")
        _check_target("--out", _document_path(out))
    progress = _Progress()
    said = Inputs(
        model=model, gpu=gpu, tensor_parallel=tensor_parallel, draft=draft, engine=engine, engine_law=engine_law,
        log=tuple(log or ()), log_draft_length=single(numbers("log_draft_length", log_draft_length, int)), acceptance=acceptance,
        acceptance_by_position=numbers("acceptance_by_position", acceptance_by_position, float), dtype=dtype, weights=weights,
        kernels=kernels, seed=seed, draft_context_budget=draft_context_budget,
    )  # fmt: skip
    usual, given = study.USUAL, prompt is not None or output is not None or bool(prompt_cv or output_cv)
    lengths = RequestLengths(
        usual.prompt if prompt is None else prompt, usual.output if output is None else output, prompt_cv, output_cv
    )
    inputs = study.ServingInputs(
        said, tuple(policy or study.POLICIES), numbers("rate", rate, float) or (), numbers("concurrency", concurrency, int) or (),
        trace, lengths if given else None, burstiness, requests, replications, seed, replicas, router, max_num_seqs,
        max_num_batched_tokens, block_size, num_blocks, chunked_prefill, max_model_len, milliseconds("slo_ttft", slo_ttft),
        milliseconds("slo_tpot", slo_tpot), DraftPlacement(placement, link, draft_gpu), reserve_prompts, async_scheduling,
    )  # fmt: skip
    if settings is not None and policies.OWN not in inputs.policies and any(map(policies.uses_acceptance, inputs.policies)):
        inputs = replace(inputs, policies=(*inputs.policies, policies.OWN))  # what it gains is printed with it
    try:
        found = study.serve(inputs, progress, by_context=out is not None)
    except KeyboardInterrupt:
        kept = "`sim run` of a scenario with [load] keeps finished runs, and resumes them"
        print(f"interrupted; nothing was written: {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    document: dict[str, Any] = found.document() | {"command": ["sim", "serve", *sys.argv[2:]], "versions": versions()}
    written = [] if out is None else _write(document, out)
    if perfetto is not None:
        written.append(trace_files.write_trace(perfetto, study.plan(inputs).traced))
    if as_json:
        print(strict_json.dumps(document, indent=2))
    elif settings is not None:
        print("\n".join(found.lines(settings)))
    else:
        print(study_results.text(found), end="")
        print("".join(f"{path}\n" for path in written), end="")


def _write(document: dict[str, Any], out: Path) -> list[Path]:
    import figures
    from model.base import whole_files

    path = _document_path(out)
    try:
        whole_files.write_text(path, strict_json.dumps(document, indent=2) + "\n")
        return [path, *figures.of_served(document, path.with_suffix(""), ("svg",))]
    except OSError as error:
        from model.base.checks import ParameterError

        raise ParameterError(f"--out {path} cannot be written: {error.strerror}; name other files") from None


def _document_path(out: Path) -> Path:
    """File of the document; figures are named after it."""
    base = out.with_suffix("") if out.suffix in (".json", ".svg") else out
    return base.with_name(f"{base.name}.json")


def _check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is simulated."""
    from model.base.checks import ParameterError

    if path.is_dir():
        raise ParameterError(f"{option} must be the name of a file, got {str(path)!r}, which is a folder; take another name")
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not folder.is_dir():
        raise ParameterError(f"{option} must be in a folder, got {str(path)!r}, and {folder.name} is a file; take another name")
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"{option} must be in a folder that can be written, got {str(path)!r}; take another folder")


def run_scenario(
    source: Any, overrides: Mapping[str, Any], out: Path | None, jobs: int | str | None, scheduler: str | None, *, resume: bool,
    dry_run: bool, as_json: bool, draw: bool, progress: Callable[[float, int, str], None] | None,
) -> None:  # fmt: skip
    """`sim run` of a scenario with [load]: write its tables, and print a study for each combination of its axes."""
    from sim.serving import load_scenario, serving_run, study, study_results

    tables = _tables(source, overrides)
    if dry_run:
        runs = [len(study.plan(inputs).runs) for _, inputs in load_scenario.points(tables)]
        facts = {"points": len(runs), "runs": sum(runs)}
        print(strict_json.dumps(facts, indent=2) if as_json else "\n".join(f"{name:20} {value}" for name, value in facts.items()))
        if not as_json:
            print("nothing was run, nothing was written")
        return
    made = serving_run.run(
        tables, out=out, jobs=jobs, scheduler=scheduler, resume=resume, progress=progress, by_context=draw
    )  # fmt: skip
    drawn = []
    if draw:
        import figures

        drawn = figures.of_served_run(made.out)
    if as_json:
        print(strict_json.dumps(made.document(), indent=2))
        return
    for at, each in zip(made.axes, made.studies, strict=True):
        if at:
            print(", ".join(f"{path} = {value}" for path, value in at.items()))
        print(study_results.text(each))
    kept = f"; {made.resumed} of {made.resumed + made.computed} runs were kept from before" if made.resumed else ""
    print(f"results: {made.out / 'results.parquet'}, .csv{kept}")
    if drawn:
        print(f"figures: {len(drawn)} in {made.out / 'figures'}; `sim report {made.out}` makes one file of all")


def trace_scenario(source: Any, overrides: Mapping[str, Any], out: Path, point: int) -> Path:
    """`sim trace` of a scenario with [load]: the policies at the first load of one combination of its axes."""
    from model.base import checks
    from model.base.checks import ParameterError
    from sim.runs import trace as trace_files
    from sim.serving import load_scenario, study

    if out.suffix in (".png", ".svg"):
        raise ParameterError(
            f"the trace of a server is written to a file that ends in .json or .json.gz, got {out.name!r}; `sim run` draws pictures"
        )
    points = load_scenario.points(_tables(source, overrides))
    checks.whole("point", point, 0, len(points) - 1)
    return trace_files.write_trace(out, study.plan(points[point][1]).traced)


def _tables(source: Any, overrides: Mapping[str, Any]) -> Any:
    from model.base.table_records import parse_value
    from sim.runs.sweep import pairs
    from sim.scenarios.grid import parse_axis
    from sim.serving import load_scenario

    return load_scenario.resolve(
        source, set=[*pairs(overrides["set"], parse_value, "--set")], sweep=[*pairs(overrides["sweep"], parse_axis, "--sweep")],
        replications=overrides["replications"], seed=overrides["seed"],
    )  # fmt: skip


class _Progress:
    """Says on the standard error what is done, at most a line in each `QUIET_S`."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self.last > QUIET_S:
            self.last = now
            print(f"{what} ...", file=sys.stderr)
