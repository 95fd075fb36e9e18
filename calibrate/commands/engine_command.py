"""`calibrate engine`: step laws of serving engines, fitted to a few measured cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands.common_options import Json, RenamedOptions, guarded, numbers
from model.base.command_help import SETTINGS, DocumentedGroup

if TYPE_CHECKING:
    from model.engines.cells import Cells
    from model.engines.kernel_times import KernelSource
    from model.engines.next_cell import CellAdvice
    from model.engines.step_law import StepLaw
    from model.engines.step_terms import RoutedExperts

engine = typer.Typer(
    cls=DocumentedGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=SETTINGS,
    help="Learn what a serving engine's steps take from a few measured cells, and predict the others.",
    epilog="Start with: calibrate engine commands --model meta-llama/Llama-3.1-8B-Instruct --batch 1,8,64 --draft-length 0,3",
)  # fmt: skip

MOST_LISTED = 60
"""Most cells of a law that are printed one by one; JSON has all."""
CellsFile = Annotated[
    Path,
    typer.Argument(
        metavar="CELLS.csv",
        help="Measured cells: columns sequences, draft_length, mean_acceptance_length (empty: fitted), and one of tpot_ms, step_ms"
        " and output_tokens_per_s; optional context, weight, draft_passes.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model: a name of `sim ls shapes`, or its config.json. With --gpu, its kernels give the law's shape; else its experts."
    ),
]
Gpu = Annotated[str | None, typer.Option(help="Device: a name of `sim ls devices`, or its .toml.")]
Parallel = Annotated[int, typer.Option("--tensor-parallel", help="Devices that the model is split over.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Type of activations, cache, and weights that are not quantised. Default: the profile's, or bfloat16."),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Format of the model's quantised weights: int4 (the same as int4-g128), int8, float8, mxfp4, nvfp4, int4-gN,"
                 " int8-gN, or none; only rooflines have it. Default: as the model is published."),
]  # fmt: skip
Draft = Annotated[
    str | None,
    typer.Option(help="Draft model: a name of `sim ls shapes`, or its config.json. Default: one fitted time per draft pass."),
]
Kernels = Annotated[
    str | None,
    typer.Option(help="Times of the kernels: profile, operations or roofline. Default: the first that covers the model."),
]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Without --gpu: routed experts per layer of the model.")]
ActiveExperts = Annotated[int | None, typer.Option("--active-experts", help="Routed experts that a token uses.")]
Acceptance = Annotated[
    str | None,
    typer.Option(help="Acceptance where mean_acceptance_length is empty: conditional rates by draft position, or a record of"
                 " `calibrate import engine-log`. Default: one rate is fitted."),
]  # fmt: skip
Seed = Annotated[int, typer.Option(help="Seed of the posterior draws.")]
Batch = Annotated[str, typer.Option("--batch", help="Numbers of running sequences of interest.")]
DraftLength = Annotated[str, typer.Option("--draft-length", help="Draft lengths to choose from; 0 is plain decoding.")]


@engine.command("fit", cls=RenamedOptions)
@guarded
def fit(
    file: CellsFile,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="NAME", help="File to write the law to: NAME.json.")],
    model: Model = None,
    gpu: Gpu = None,
    tensor_parallel: Parallel = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    draft: Draft = None,
    kernels: Kernels = None,
    experts: ExpertsOption = None,
    active_experts: ActiveExperts = None,
    acceptance: Acceptance = None,
    engine_name: Annotated[
        str,
        typer.Option(
            "--engine", help="Engine and version, kept with the law; with --gpu, priors of vllm, sglang, tensorrt-llm or llama.cpp."
        ),
    ] = "",
    seed: Seed = 0,
    json_: Json = False,
) -> None:
    """Fit a step law to measured cells: a few are enough.

    The law is a sum of terms: the target's pass (from its kernels, or its weights and experts), a fixed time, times per running
    sequence, token and draft pass. It predicts in the unit of the cells. Printed are the coefficients with 80 % intervals, what the
    cells do not determine, and the error of each cell predicted from the others.

    calibrate engine fit cells.csv --model llama-3.1-8b --gpu h100 -o mine

    calibrate engine fit cells.csv --experts 128 --active-experts 8 -o qwen3
    """
    from model.base import checks
    from model.engines import engine_priors, law_fit, step_law

    checks.whole("seed", seed, 0)
    cells, unused = _read(file)
    path = _json_path(out)
    source, of = _model(model, gpu, tensor_parallel, dtype, weights, draft, kernels, experts, active_experts)
    facts = {"engine": engine_name} if engine_name else {}
    law = law_fit.fit(
        cells, path.stem, experts=of, kernels=source, acceptance=_acceptance(acceptance), facts=facts, seed=seed,
        engine=None if source is None else engine_priors.named(engine_name), model=model,
        tensor_parallel=tensor_parallel if model is not None or tensor_parallel > 1 else None,
    )  # fmt: skip
    step_law.write(law, path)
    if json_:
        _print_json(_description(law) | {"file": str(path), "unused_columns": list(unused)})
        return
    _print_law(law)
    for name in unused:
        print(f"note: column {name} is not used")
    print(f"{path}")


@engine.command("prior", cls=RenamedOptions)
@guarded
def prior(
    model: Annotated[str, typer.Option(help="Model: a name of `sim ls shapes`, or its config.json.")],
    gpu: Annotated[str, typer.Option(help="Device: a name of `sim ls devices`, or its .toml.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="NAME", help="File to write the law to: NAME.json.")],
    engine_name: Annotated[str, typer.Option("--engine", help="vllm, sglang, tensorrt-llm, llama.cpp or any.")] = "any",
    unit: Annotated[str, typer.Option(help="What the law predicts: tpot_ms, step_ms or output_tokens_per_s.")] = "tpot_ms",
    tensor_parallel: Parallel = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    draft: Draft = None,
    kernels: Kernels = None,
    acceptance: Acceptance = None,
    seed: Seed = 0,
    json_: Json = False,
) -> None:
    """Write a step law without cells: kernels, and what published measurements say of an engine.

    For an engine of which nothing was measured yet. Its intervals are wide: they are those of the priors. `calibrate engine
    commands` prints how to measure the few cells that narrow them.

    calibrate engine prior --engine vllm --model llama-3.1-8b --gpu h100 -o guess

    calibrate engine prior --engine sglang --model llama-2-70b --gpu a100 --tensor-parallel 4 --unit step_ms -o guess
    """
    from model.base import checks
    from model.engines import cells, engine_priors, law_fit, step_law

    checks.one_of("engine", engine_name, engine_priors.ENGINES)
    checks.one_of("unit", unit, cells.UNITS)
    checks.whole("seed", seed, 0)
    path = _json_path(out)
    source, _ = _model(model, gpu, tensor_parallel, dtype, weights, draft, kernels, None, None)
    facts = {"engine": engine_name, "model": model, "gpu": gpu, "note": "no cells: kernels and priors only"}
    law = law_fit.fit(
        None, path.stem, unit=unit, kernels=source, acceptance=_acceptance(acceptance), facts=facts, seed=seed, engine=engine_name
    )
    step_law.write(law, path)
    if json_:
        _print_json(_description(law) | {"file": str(path)})
        return
    _print_law(law)
    print(f"{path}")


@engine.command("bundle", cls=RenamedOptions)
@guarded
def bundle(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Output folder. Default: the package's laws.")] = None,
) -> None:
    """Fit the bundled laws anew from the published tables in the package.

    calibrate engine bundle -o /tmp/laws
    """
    from model.engines import law_tables

    for path in law_tables.write(out):
        print(path)


@engine.command("predict", cls=RenamedOptions)
@guarded
def predict(
    law: Annotated[str, typer.Argument(metavar="LAW", help="A fitted law (.json), or a bundled one (`sim ls laws`).")],
    file: CellsFile,
    prefill_share: Annotated[
        float | None,
        typer.Option(help="Share of the time that goes to prompts, for cells in another unit than the law's. Default: 0, assumed."),
    ] = None,
    json_: Json = False,
) -> None:
    """Predict cells by a step law, with 80 % intervals, and compare them with measured values where the file has them.

    calibrate engine predict mine.json cells.csv

    calibrate engine predict qwen3.json others.csv --json
    """
    from model.engines import step_law
    from model.engines.conversion import predict_in_unit

    found = step_law.load(law)
    cells, unused = _read(file, unit=found.unit)
    converted = predict_in_unit(found, cells, prefill_share)
    rows = converted.rows
    if json_:
        _print_json(
            {"law": found.name, "unit": cells.unit, "rows": rows, "notes": list(converted.notes), "unused_columns": list(unused)}
        )
        return
    columns = ("sequences", "draft_length", "measured", "predicted", "low", "high", "error")
    print(f"{found.name}: {cells.unit}, with 80 % intervals")
    _print_table(
        columns,
        [[row["sequences"], row["draft_length"], row[cells.unit], *(row[name] for name in columns[3:])] for row in rows],
        percent={"error"},
    )
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    if errors:
        cells_ = "cell" if len(errors) == 1 else "cells"
        print(f"{len(errors)} {cells_} with a measured value: median error {_median(errors):.1%}, worst {max(errors):.1%}")
    for note in (*converted.notes, *(f"column {name} is not used" for name in unused)):
        print(f"note: {note}")


@engine.command("next", cls=RenamedOptions)
@guarded
def next_(
    file: Annotated[Path, typer.Argument(metavar="CELLS.csv|LAW.json", help="Measured cells, or a law that was fitted to some.")],
    batch: Batch = "1,2,4,8,16,32,64",
    draft_length: DraftLength = "0,1,2,3,4,5,6",
    model: Model = None,
    gpu: Gpu = None,
    tensor_parallel: Parallel = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    draft: Draft = None,
    kernels: Kernels = None,
    experts: ExpertsOption = None,
    active_experts: ActiveExperts = None,
    acceptance: Acceptance = None,
    seed: Seed = 0,
    json_: Json = False,
) -> None:
    """Say which draft length is best by batch and how sure that is, and which cell to measure next.

    The loss is the share of throughput given away against the best draft length, expected over what the cells leave open.

    calibrate engine next cells.csv --experts 128 --active-experts 8 --batch 1,4,16,64

    calibrate engine next mine.json --draft-length 0,1,3,5
    """
    from model.base import checks
    from model.base.checks import ParameterError
    from model.engines import cells as cell_tables
    from model.engines import law_fit, next_cell, step_law

    batches, lengths = numbers("batch", batch), numbers("draft_length", draft_length)
    for each in batches:
        checks.whole("batch", each, 1, int(cell_tables.MOST_SEQUENCES))
    for each in lengths:
        checks.whole("draft_length", each, 0, cell_tables.MOST_DRAFT)
    checks.whole("seed", seed, 0)
    if file.suffix == ".json":
        given = {"model": model, "gpu": gpu, "dtype": dtype, "weights": weights, "draft": draft, "kernels": kernels,
                 "experts": experts, "active-experts": active_experts, "acceptance": acceptance}  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise ParameterError(f"--{name} is for cells, and {file.name} is a law that was fitted already; leave it out")
        law = step_law.load(str(file))
    else:
        cells, _ = _read(file)
        source, of = _model(model, gpu, tensor_parallel, dtype, weights, draft, kernels, experts, active_experts)
        law = law_fit.fit(cells, file.stem, experts=of, kernels=source, acceptance=_acceptance(acceptance), seed=seed)
    advice = next_cell.advise(law, tuple(map(float, batches)), lengths)
    if json_:
        _print_json(_advice(advice))
        return
    _print_advice(advice)
    far = [each.sequences for each in advice.choices if law.beyond(each.sequences, 0) > 0]
    if far:
        print(f"note: {', '.join(f'{number:g}' for number in far)} sequences are beyond the cells: less sure there than it says")


@engine.command("commands", cls=RenamedOptions)
@guarded
def commands(
    model: Annotated[str, typer.Option(help="Model as the engine names it, such as meta-llama/Llama-3.1-8B-Instruct.")],
    batch: Batch = "1,8,64",
    draft_length: DraftLength = "0,3",
    engine_name: Annotated[str, typer.Option("--engine", help="vllm or sglang.")] = "vllm",
    draft: Annotated[str | None, typer.Option(help="Draft as the engine names it; required if anything is drafted.")] = None,
    method: Annotated[
        str, typer.Option(help="Drafting method as the engine names it: eagle3, eagle, mtp, draft_model, ...")
    ] = "eagle3",
    acceptance_length: Annotated[
        float | None, typer.Option(help="Pin the mean acceptance length, so that any prompts will do. Default: real acceptance.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Prompt length [tokens].")] = 1024,
    tokens: Annotated[int, typer.Option(help="Output length [tokens].")] = 256,
) -> None:
    """Print the commands of vLLM or SGLang that measure cells, to paste.

    calibrate engine commands --model meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B

    calibrate engine commands --engine sglang --model Qwen/Qwen3-8B --draft Tengyunw/qwen3_8b_eagle3 --batch 1,4,16,64
    """
    from model.engines import benchmark_commands

    for line in benchmark_commands.lines(
        engine_name, model, numbers("batch", batch), numbers("draft_length", draft_length), draft=draft, method=method,
        acceptance_length=acceptance_length, prompt=prompt, tokens=tokens,
    ):  # fmt: skip
        print(line)


# --- Options ---


def _read(file: Path, unit: str | None = None) -> tuple[Cells, tuple[str, ...]]:
    from model.engines import cells

    found = cells.read_csv(file, unit=unit)
    return found.cells, found.unused


def _json_path(out: Path) -> Path:
    from model.base import bounded_files
    from model.base.checks import ParameterError, shown

    if out.suffix == ".json":
        out = out.with_suffix("")
    if not out.name or out.name == "..":
        raise ParameterError(f"out must name a file, got {shown(str(out))}")
    path = out.with_name(f"{out.name}.json")
    bounded_files.check_replaceable(path, "step-law")
    return path


def _model(
    model: str | None, gpu: str | None, tensor_parallel: int, dtype: str | None, weights: str | None, draft: str | None,
    kernels: str | None, experts: int | None, active: int | None,
) -> tuple[KernelSource | None, RoutedExperts | None]:  # fmt: skip
    from model.architectures import published_shapes
    from model.base.checks import ParameterError
    from model.engines.kernel_times import KernelSource, hardware, refuse_too_large
    from model.engines.step_terms import RoutedExperts
    from model.hardware import memory_limit

    if (experts is None) != (active is None):
        given, other = ("experts", "active-experts") if active is None else ("active-experts", "experts")
        raise ParameterError(f"--{given} needs --{other} too; both are in the model's config.json")
    if experts is not None and active is not None:
        if gpu is not None:
            raise ParameterError("--experts is for laws without --gpu; with it, the model says its experts")
        return None, RoutedExperts(experts, active)
    if gpu is None:
        for name, value in (("draft", draft), ("kernels", kernels), ("dtype", dtype), ("weights", weights)):
            if value is not None:
                raise ParameterError(f"--{name} needs --model and --gpu, whose kernels it is about")
        found = None if model is None else published_shapes.named_shape(model).experts
        return None, None if found is None else RoutedExperts(found.count, found.active)
    if model is None:
        raise ParameterError("--gpu needs --model, so that its kernels give the law's shape; `sim ls shapes` lists models")
    drafting = None if draft is None else memory_limit.of_target(draft, model)
    source = KernelSource(model, gpu, tensor_parallel, dtype, drafting, kernels, weights)
    hardware(source)  # refused here, before the cells are fitted
    refuse_too_large(source)
    return source, None


def _acceptance(text: str | None) -> tuple[float, ...]:
    """Conditional acceptance rates by draft position: as typed, or of an acceptance record."""
    from model.base import checks
    from model.base.checks import ParameterError

    if text is None:
        return ()
    if text.endswith(".json"):
        return _recorded_acceptance(text)
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ParameterError(
            f"--acceptance must be conditional rates by draft position, such as 0.8,0.7,0.6, or the .json of an acceptance record,"
            f" got {checks.shown(text)}"
        ) from None
    checks.array("acceptance", rates, 0, 1)
    return rates


def _recorded_acceptance(file: str) -> tuple[float, ...]:
    """Rates of a record by draft position; where it has only a mean length, the constant rate that gives it."""
    from model.base.checks import ParameterError
    from model.logs import acceptance_record
    from model.methods.speculative.theory import reported_acceptance

    record = acceptance_record.load(file)
    if record.known_rates:
        return record.known_rates
    if not record.draft_length or record.mean_acceptance_length is None:
        raise ParameterError(f"{Path(file).name} has neither acceptance by draft position nor a mean length at one draft length")
    rate = float(reported_acceptance("vllm", record.draft_length, length=record.mean_acceptance_length))
    return (rate,) * record.draft_length


# --- Output ---


def _print_json(document: Any) -> None:
    from model.base import strict_json

    print(strict_json.dumps(strict_json.plain(document), indent=2))


def _description(law: StepLaw) -> dict[str, Any]:
    """The law as a document: coefficients with intervals, what is not determined, errors, and the range of its cells."""
    from model.engines import law_report

    return law_report.description(law)


def _print_law(law: StepLaw) -> None:
    from model.engines import law_report

    found = law_report.description(law)
    print(f"{law.name}: {found['about']}")
    columns = ("term", "value", "low", "high", "unit", "from", "meaning")
    _print_table(columns, [[row[name] for name in columns] for row in map(_in_milliseconds, found["coefficients"])])
    cells_ = found.get("cells", [])
    if 1 < len(cells_) <= MOST_LISTED:
        print("each cell, and its error if it is predicted from the others:")
        rows = [[row["sequences"], row["draft_length"], row[law.unit], row["left_out_error"]] for row in cells_]
        _print_table(("sequences", "draft_length", law.unit, "error"), rows, percent={"error"})
    for line in (*law_report.sentences(law), *law_report.doubts(law)):
        print(line)


def _in_milliseconds(row: dict[str, Any]) -> dict[str, Any]:
    if row["unit"] != "s":
        return row
    return row | {"unit": "ms"} | {name: 1e3 * row[name] for name in ("value", "low", "high")}


def _advice(advice: CellAdvice) -> dict[str, Any]:
    return {
        "expected_loss": advice.loss, "spread": advice.spread,
        "choices": [
            {"sequences": each.sequences, "draft_length": each.draft_length, "probability": each.probability, "loss": each.loss,
             "ties": list(each.ties)}
            for each in advice.choices
        ],
        "candidates": [
            {"sequences": each.sequences, "draft_length": each.draft_length, "loss": each.loss, "spread": each.spread,
             "tells": [{"coefficient": name, "share": share} for name, share in each.tells]}
            for each in advice.candidates
        ],
    }  # fmt: skip


def _print_advice(advice: CellAdvice) -> None:
    from model.engines.step_terms import PRIORS

    print("best draft length now, by running sequences:")
    rows = [
        [each.sequences, each.draft_length, each.probability, each.loss, " ".join(map(str, each.ties))] for each in advice.choices
    ]
    _print_table(("sequences", "draft_length", "probability", "loss", "within 1 %"), rows, percent={"probability", "loss"})
    first = advice.candidates[0]
    print(f"measure next: {first.sequences:g} sequences with draft length {first.draft_length}")
    print(f"  it lowers the expected loss from {advice.loss:.2%} to {first.loss:.2%}, and the uncertainty of all cells from"
          f" {advice.spread:.1%} to {first.spread:.1%}")  # fmt: skip
    for name, share in first.tells:
        print(f"  it removes {share:.0%} of the uncertainty of {name}: {PRIORS[name].meaning}")
    others = [[each.sequences, each.draft_length, each.loss, each.spread, ", ".join(name for name, _ in each.tells)]
              for each in advice.candidates[1:6]]  # fmt: skip
    if others:
        print("or:")
        _print_table(
            ("sequences", "draft_length", "loss after", "spread after", "tells about"),
            others,
            percent={"loss after", "spread after"},
        )


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], percent: frozenset[str] | set[str] = frozenset()) -> None:
    """Print rows below headings: numbers to the right, words to the left."""
    cells = [list(columns)]
    cells += [[_shown(value, column in percent) for column, value in zip(columns, row, strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [any(isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    for row in cells:
        aligned = [each.ljust(width) if word else each.rjust(width) for each, width, word in zip(row, widths, words, strict=True)]
        print("  " + "  ".join(aligned).rstrip())


def _shown(value: Any, percent: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{100 * value:.2f} %" if percent else f"{value:.4g}"


def _median(values: Sequence[float]) -> float:
    import statistics

    return statistics.median(values)


