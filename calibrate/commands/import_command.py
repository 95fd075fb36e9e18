"""`calibrate import` and `calibrate bundle`: profiles from other projects' measurements, acceptance from logs of engines."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.commands.common_options import Json, RenamedOptions, guarded, numbers
from model.base import strict_json
from model.base.command_help import SETTINGS, DocumentedGroup

if TYPE_CHECKING:
    from model.hardware.profile import Profile

importing = typer.Typer(
    cls=DocumentedGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=SETTINGS,
    help="Make a profile from another project's measurements, or an acceptance record from an engine's log.",
)  # fmt: skip

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the tables.")]
Model = Annotated[str, typer.Option("--model", help="The measured model: a name of `sim ls shapes`, or its config.json.")]
Gpu = Annotated[str, typer.Option("--gpu", help="The measured device: a name of `sim ls devices`, or its .toml.")]
Out = Annotated[Path, typer.Option("-o", "--out", help="Folder to write NAME.json and NAME.parquet to.")]
Name = Annotated[str, typer.Option("--name", help="Name of the profile. Default: GPU-MODEL.")]
Unit = Annotated[str, typer.Option("--unit", help="Unit of the times in the files: s, ms or us.")]
Commit = Annotated[str, typer.Option("--commit", help="Commit of the source repository.")]


@importing.command("vidur", cls=RenamedOptions)
@guarded
def vidur(
    folder: Folder,
    model: Model,
    gpu: Gpu,
    out: Out,
    attention: Annotated[Path | None, typer.Option("--attention", help="An attention.csv in another folder.")] = None,
    overheads: Annotated[Path | None, typer.Option("--overheads", help="A cpu_overheads.csv in another folder.")] = None,
    network: Annotated[Path | None, typer.Option("--network", help="The folder of all_reduce.csv and send_recv.csv.")] = None,
    name: Name = "",
    unit: Unit = "ms",
    commit: Commit = "",
) -> None:
    """Import a model's profile from a folder of Vidur or Frontier with mlp.csv.

    calibrate import vidur compute/a100/meta-llama/Llama-2-7b-hf --model llama-2-7b --gpu a100 --network network/a100_dgx -o
    profiles

    calibrate import vidur a100/Llama-2-7b-hf --model llama-2-7b --gpu a100 --attention frontier/attention.csv -o profiles
    --name mine
    """
    from calibrate.importers import vidur as source

    files = {"attention": attention, "overheads": overheads, "network": network}
    _save(source.read(folder, model=model, gpu=gpu, **files, name=name, unit=unit, commit=commit), out)


@importing.command("aiconfigurator", cls=RenamedOptions)
@guarded
def aiconfigurator(
    folder: Folder,
    gpu: Gpu,
    out: Out,
    engine: Annotated[str, typer.Option("--engine", help="ENGINE/VERSION of the GEMM tables, if there are several.")] = "",
    attention: Annotated[
        str, typer.Option("--attention", help="ENGINE/VERSION of the attention tables, if different; none leaves them out.")
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="Compose this model's layers: a name or a config.json. Default: keep single operations.")
    ] = "",
    tensor_parallel: Annotated[
        str, typer.Option("--tensor-parallel", help="Tensor parallel sizes, with --model, such as 1,2,4.")
    ] = "1",
    name: Annotated[str, typer.Option("--name", help="Name of the profile. Default: GPU-operations, or GPU-MODEL.")] = "",
    unit: Unit = "ms",
    commit: Commit = "",
) -> None:
    """Import a profile of operations, or of a model composed of them, from AIConfigurator's folder of a GPU.

    calibrate import aiconfigurator data/h100_sxm --gpu h100 --engine trtllm/1.3.0rc20 -o profiles

    calibrate import aiconfigurator data/a100_sxm --gpu a100 --engine trtllm/1.0.0 --attention vllm/0.14.0 --model opt-13b -o
    profiles
    """
    from calibrate.importers import aiconfigurator as source
    from calibrate.importers import imported_tables
    from model.architectures import published_shapes
    from model.hardware import composed_layers

    splits = numbers("tensor_parallel", tensor_parallel)
    shape = published_shapes.named_shape(model, imported_tables.DTYPE, key="model") if model else None
    made = source.read(folder, gpu=gpu, engine=engine, attention=attention, name="" if model else name, unit=unit, commit=commit)
    if shape is not None:
        made = composed_layers.layer(made, shape, splits, model=published_shapes.label(model), name=name)
    _save(made, out)


@importing.command("llmservingsim", cls=RenamedOptions)
@guarded
def llmservingsim(folder: Folder, model: Model, gpu: Gpu, out: Out, name: Name = "", commit: Commit = "") -> None:
    """Import a model's profile from a folder of LLMServingSim with dense.csv, attention.csv and per_sequence.csv.

    calibrate import llmservingsim perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1 --model llama-3.1-8b --gpu rtx-4090 -o profiles
    """
    from calibrate.importers import llmservingsim as source

    _save(source.read(folder, model=model, gpu=gpu, name=name, commit=commit), out)


@importing.command("engine-log", cls=RenamedOptions)
@guarded
def engine_log(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Logs, or outputs of benchmarks, of one engine.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="NAME", help="Write NAME.json, and NAME.cells.csv if there are speeds.")
    ],
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, sglang, trtllm, llama.cpp, lmdeploy, mlx-lm or eagle; auto: by content.")
    ] = "auto",
    draft_length: Annotated[
        str | None,
        typer.Option(
            "--draft-length", metavar="K,...",
            help="Draft length of output that does not say it, 0 for plain decoding: one number, or one for each FILE, as 0,3.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Import how many draft tokens an engine accepted, and how fast it was, from its logs and benchmarks.

    Read are log lines of vLLM, SGLang, llama.cpp and LMDeploy, results of vllm bench serve, bench_serving and trtllm-bench,
    counters of /metrics, statistics in JSON responses, and EAGLE's answers. Counts of several files are added. The record is an
    outcome of a scenario: [outcomes] kind = "engine-log", file = "NAME.json"; the speeds are cells of `calibrate engine fit`. Runs
    with and without drafts may be given together.

    calibrate import engine-log server.log -o mine

    calibrate import engine-log results/concurrency-*.json --engine vllm -o mine

    calibrate import engine-log plain.log eagle.log --draft-length 0,3 -o mine
    """
    from model.logs import acceptance_record
    from model.logs.engine_logs import engine_log as source

    source.targets(out, files)
    lengths = None if draft_length is None else numbers("draft_length", draft_length)
    record = source.read(files, engine, lengths[0] if lengths is not None and len(lengths) == 1 else lengths)
    written = source.save(record, out)
    if as_json:
        print(strict_json.dumps({**acceptance_record.document(record), "files": [str(path) for path in written]}, indent=2))
        return
    for line in source.report(record):
        print(line)
    for path in written:
        print(path)


@guarded
def bundle(
    folder: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="Folder of the public tables: SOURCES.md and gpu/.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Output folder. Default: the package's profiles.")] = None,
) -> None:
    """Regenerate the bundled profiles from their source files.

    calibrate bundle data -o /tmp/profiles
    """
    from importlib import resources

    from calibrate.importers import bundled_profiles as source

    where = Path(str(resources.files("model") / "profiles")) if out is None else out
    for path in source.write(folder, where):
        print(path)


def _save(made: Profile, out: Path) -> None:
    """Write a profile, and print its coverage, errors and notes."""
    from model.base.checks import ParameterError, shown
    from model.hardware import profile_files

    if not re.fullmatch(r"[\w.-]+", made.name):
        raise ParameterError(f"name must be of letters, digits, dots, dashes and underscores, got {shown(made.name)}")
    if not made.date:  # the source does not say when it was measured
        made = replace(made, date=datetime.date.today().isoformat())
    path = profile_files.save(made, out)
    print(f"{path}: {made.provenance}")
    print(f"covers {made.coverage()}")
    if made.errors:
        print("median errors " + ", ".join(f"{part} {error:.1%}" for part, error in made.errors.items()))
    for note in made.notes:
        print(f"note: {note}")
