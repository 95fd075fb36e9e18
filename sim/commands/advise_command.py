"""`sim advise`: would drafting pay on a model, device and engine, which draft length, and up to which load."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.base import strict_json

if TYPE_CHECKING:
    from sim.advice.situation import Inputs

QUIET_S = 2.0
"""Seconds after which a line on the standard error says that it is still working."""


def advise(
    model: Annotated[str | None, typer.Option(help="Model: a name of `sim ls shapes`, or its config.json.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device: a name of `sim ls devices`, or its .toml.")] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tensor-parallel", help="Devices of a replica. Default: the law's, or 1; with --gpus as few as fit."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices altogether: compares other uses of them. Default: one replica.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft: eagle3, eagle, mtp, medusa, or a model of `sim ls shapes`. Default: the law's, or a prior."),
    ] = None,
    draft_context_budget: Annotated[
        int | None,
        typer.Option("--draft-context-budget", help="Most cached positions of a sequence that a draft pass reads. Default: all."),
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
        str | None,
        typer.Option("--log-draft-length", help="Draft length of logs that do not say it: 3, or one for each log: 0,3."),
    ] = None,
    printed_rate: Annotated[
        float | None,
        typer.Option("--printed-rate", help="Draft acceptance rate that --engine printed at --log-draft-length: 0.62."),
    ] = None,
    printed_length: Annotated[
        float | None,
        typer.Option("--printed-length", help="Mean acceptance length that --engine printed at --log-draft-length: 4.1."),
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Acceptance rate: 0.7, an uncertain 0.6..0.8, or cases 0.6,0.7. Never assumed.")
    ] = None,
    acceptance_by_position: Annotated[
        str | None, typer.Option("--acceptance-by-position", help="Conditional rates by draft position: 0.8,0.7,0.6.")
    ] = None,
    rank_rates: Annotated[
        str | None,
        typer.Option("--rank-rates", help="Rates by rank of a tree's candidates: 0.6,0.2,0.1; / between depths. Also acceptance."),
    ] = None,
    rank_drafts: Annotated[
        int | None, typer.Option("--rank-drafts", help="Drafts that --rank-rates were counted in. Default: they are exact.")
    ] = None,
    block_acceptance: Annotated[
        str | None,
        typer.Option("--block-acceptance", help="Conditional rates by draft position under block verification: 0.8,0.8."),
    ] = None,
    match_rate: Annotated[
        str | None,
        typer.Option("--match-rate", help="Rate at which an early candidate is the final token, for PPD: 0.5, or 0.4..0.6."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Running sequences of one replica. Default: 1,2,4,8,16,32,64,128, as many as fit.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second: advises for arrivals, of which as many run as Little's law says.")
    ] = None,
    prompt: Annotated[float | None, typer.Option(help="Mean tokens of a prompt, with --rate. Default: 1024, assumed.")] = None,
    output: Annotated[float | None, typer.Option(help="Mean tokens of an output, with --rate. Default: 256, assumed.")] = None,
    draft_length: Annotated[str | None, typer.Option("--draft-length", help="Draft lengths. Default: 1,2,3,4,5,6,7,8.")] = None,
    context: Annotated[int | None, typer.Option(help="Positions in the cache of a sequence. Default: the log's, or 1000.")] = None,
    slo_tpot: Annotated[
        str | None, typer.Option("--slo-tpot", help="Longest acceptable time per output token: 20ms, 0.02s.")
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Include methods whose output differs from the target's.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights, such as float8. Default: the model's.")] = None,
    weights: Annotated[str | None, typer.Option(help="Format of quantised weights, such as int4.")] = None,
    kernels: Annotated[str | None, typer.Option(help="Times of kernels: profile, operations or roofline.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    settings: Annotated[
        str | None, typer.Option(help="Print the lines that set this engine: vllm, sglang or tensorrt-llm.")
    ] = None,
    map_: Annotated[
        bool, typer.Option("--map", help="Map instead: the fastest of all methods for each --batch and each of --contexts.")
    ] = False,
    contexts: Annotated[
        str | None, typer.Option(help="Contexts of a --map, k: 1024. Default: 1k,8k,64k, as far as the model was trained.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="NAME", help="Write NAME.json, for `sim report`, and the figure NAME.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Advise on drafting: whether it pays, with which draft length, up to which load, and how sure that is.

    Nothing is run. Times come from a fitted step law, from the log, or from kernels and the engine's priors; acceptance from the
    log or from you. The answer names what it rests on and what would overturn it.

    sim advise --model llama-3.1-8b --gpu h100 --draft eagle3 --log vllm.log

    sim advise --model llama-3.1-8b --gpu h100 --draft eagle3 --acceptance 0.6..0.8 --settings vllm

    sim advise --engine-law sglang-qwen3-235b-a22b --batch 1,8,32,128 --json

    sim advise --engine-law sglang-qwen3-235b-a22b --rate 12 --prompt 1000 --output 250

    sim advise --model llama-3.1-70b --gpu h100 --gpus 4 --acceptance 0.7 --match-rate 0.55 --slo-tpot 20ms

    sim advise --model llama-3.1-8b --gpu h100 --draft llama-3.2-1b --draft-context-budget 512 --context 32000 --acceptance 0.7

    sim advise --model llama-3.1-8b --gpu h100 --draft eagle3 --rank-rates 0.6,0.2,0.1 --map --batch 1,16 --contexts 1k,8k
    """
    from model.base.checks import ParameterError
    from sim.advice import engine_settings
    from sim.advice.advice import advise as advised
    from sim.advice.option_values import milliseconds, numbers, positions, rank_table, single
    from sim.advice.situation import Inputs
    from sim.runs.environment import versions

    if settings is not None:
        from model.base import checks

        checks.one_of("settings", settings, engine_settings.NAMES)
    start = time.monotonic()
    said = Inputs(
        model=model, gpu=gpu, tensor_parallel=tensor_parallel, gpus=gpus, draft=draft, engine=engine, engine_law=engine_law,
        log=tuple(log or ()), log_draft_length=single(numbers("log_draft_length", log_draft_length, int)),
        printed_rate=printed_rate, printed_length=printed_length, acceptance=acceptance,
        acceptance_by_position=numbers("acceptance_by_position", acceptance_by_position, float), match_rate=match_rate,
        batch=numbers("batch", batch, int), draft_length=numbers("draft_length", draft_length, int), context=context,
        slo_tpot_ms=milliseconds("slo_tpot", slo_tpot), lossy=lossy, dtype=dtype, weights=weights, kernels=kernels, seed=seed,
        rate=rate, prompt=prompt, output=output, rank_rates=rank_table("rank_rates", rank_rates), rank_drafts=rank_drafts,
        draft_context_budget=draft_context_budget, block_acceptance=numbers("block_acceptance", block_acceptance, float),
    )  # fmt: skip
    if contexts is not None and not map_:
        raise ParameterError("--contexts are those of a map; add --map, or give one --context")
    if map_:
        if settings is not None:
            raise ParameterError(f"--settings are of one method, got {settings} with --map; leave one out")
        _map(said, positions("contexts", contexts), start, out, as_json=as_json)
        return
    found = advised(said, progress=lambda what: _progress(start, what))
    document: dict[str, Any] = found.document() | {"command": ["sim", "advise", *sys.argv[2:]], "versions": versions()}
    written = [] if out is None else _write_files(document, found.figure(), out)
    if as_json:
        print(strict_json.dumps(document, indent=2))
    elif settings is not None:
        print("\n".join(found.settings(settings)))
    else:
        print(found, end="")
        print("".join(f"{path}\n" for path in written), end="")


def _map(said: Inputs, contexts: tuple[int, ...] | None, start: float, out: Path | None, *, as_json: bool) -> None:
    """Print a map over all methods."""
    from sim.maps.method_map import method_map
    from sim.runs.environment import versions

    found = method_map(said, contexts, progress=lambda what: _progress(start, what))
    document: dict[str, Any] = found.document() | {"command": ["sim", "advise", *sys.argv[2:]], "versions": versions()}
    written = []
    if out is not None:
        from figures.of_load import method_cells

        written = _write_files(document, method_cells.draw(method_cells.cells_of(found.rows), title=found.subject), out)
    print(strict_json.dumps(document, indent=2) if as_json else found, end="\n" if as_json else "")
    print("" if as_json else "".join(f"{path}\n" for path in written), end="")


def _progress(start: float, what: str) -> None:
    if time.monotonic() - start > QUIET_S:
        print(f"{what} ...", file=sys.stderr)


def _write_files(document: dict[str, Any], figure: Any, out: Path) -> list[Path]:
    """Write a document and its figure next to each other."""
    import figures
    from model.base import whole_files

    base = out.with_suffix("") if out.suffix in (".json", ".svg") else out
    paths = [base.with_name(f"{base.name}.{ending}") for ending in ("json", "svg")]
    for path, text in zip(paths, (strict_json.dumps(document, indent=2) + "\n", figures.svg(figure)), strict=True):
        whole_files.write_text(path, text)
    return paths
