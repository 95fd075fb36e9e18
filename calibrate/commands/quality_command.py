"""`calibrate quality`, `replace` and `loss`: output quality of lossy methods on real models, and what limits it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    import polars as pl

    from calibrate.decode.reference_scores import ReferenceScores
    from calibrate.loading.load_models import LoadedModel
    from calibrate.loading.prompts import Prompt

_SHOWN = (
    "bleu", "plain_bleu", "rouge_l", "plain_rouge_l", "agreement", "common_prefix", "log_likelihood", "plain_log_likelihood",
    "weight_bytes_over_plain", "seconds_over_plain", "fallback_rate", "rollback_rate", "mean_layers",
)  # fmt: skip
"""Columns of the printed table, after the swept parameters; columns that a method lacks are left out."""
_MEANINGS = {
    "agreement": "share of tokens equal to the target's", "common_prefix": "tokens before the first that differs",
    "plain_log_likelihood": "that of the target's own output", "bleu": "percent, by sacrebleu; plain: the target's own output",
    "rouge_l": "percent, F1 by rouge-score; plain: the target's own output",
    "_over_plain": "per token, divided by that of plain decoding",
}  # fmt: skip
"""Notes below the table, by the end of the name of a column."""

_REPLACED = (
    "threshold", "replaced_share", "engaged_share", "bleu", "plain_bleu", "rouge_l", "plain_rouge_l", "agreement",
    "log_likelihood", "plain_log_likelihood",
)  # fmt: skip
"""Columns of the printed table of `replace`; those that the rows lack are left out."""
_GROUPS = 8
"""Groups of positions in the printed table of `loss`."""


@options.guarded
def quality(
    method: Annotated[str, typer.Argument(help="bild, skipdecode or early_exit.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the rows, ending in .csv or .parquet.")],
    model: Annotated[
        str,
        typer.Option(help="Target model: a directory, OWNER/NAME, or family:target. `family`: the bundled models for all roles."),
    ] = "family",
    draft: Annotated[str | None, typer.Option(help="The small model of bild, with the same tokenizer.")] = None,
    heads: Annotated[str | None, typer.Option(help="Trained exit heads, or none. Default: those in the target's folder.")] = None,
    set_: options.Set = None,
    sweep: options.Sweep = None,
    prompts: options.HeldOut = None,
    template: options.Template = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.")] = 20,
    prompt_tokens: options.PromptTokens = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 48,
    score: Annotated[
        str | None, typer.Option(help="Score outputs against the prompts' references: bleu, rouge-l or both, comma-separated.")
    ] = None,
    cut_at: Annotated[str | None, typer.Option(help="Score only the output before this text, with --score.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts.")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures of agreement into.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run; finished settings are kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Decode with a lossy method, and measure its quality, and its cost per token relative to plain decoding.

    Quality is the share of tokens that are the target's own, and the log-likelihood that the target gives to the output [nats per
    token]. Costs are the weights read [bytes], operations, layer passes and time, all per token and divided by those of plain
    decoding.

    calibrate quality bild --sweep fallback_threshold=0.1,0.3,0.5 --sweep rollback_threshold=1,2,4 -o bild.csv --figures bild

    calibrate quality bild --set exit_layer=4 --set rollback_threshold=2 --sweep fallback_threshold=0.3,0.6 -o inside.csv

    calibrate quality early_exit --model my-llama --sweep threshold=0.5,0.7,0.9 -o early.csv

    calibrate quality skipdecode --set max_layers=12 --sweep min_layers=4,6,8 -o skip.csv

    calibrate quality skipdecode --model my-opt --prompts cnn.jsonl --score rouge-l --sweep min_layers=8,12 -o rouge.csv

    --score needs a data set with references (article and highlights, translation, or a column reference) and the packages of
    pip install 'decodesim[quality]'. BLEU is that of sacrebleu over all outputs; ROUGE-L is the mean F1 by rouge-score.
    """
    from calibrate.commands import log_command
    from calibrate.decode import output_quality as work
    from calibrate.decode import real_decoding
    from calibrate.loading import load_models
    from model.base import table_records
    from model.methods import registry

    work.check_lossy(method)
    kind = registry.parameters(method)
    fixed, swept = {key: value[0] for key, value in options.assignments("set", set_)}, dict(options.assignments("sweep", sweep))
    names = score_names(score, cut_at, prompts)
    settings = work.settings_of(table_records.renamed(kind, fixed), table_records.renamed(kind, swept))
    table_records.refuse_unknown(kind, settings[0], "method")
    named = load_models.named({"target": model, "draft": draft}, real_decoding.roles(method, settings[0]), method)
    opened = load_models.models(named, options.prepare_device(device, threads), dtype)
    decoders = {role: each.decoder for role, each in opened.items()}
    read_by = load_models.use_heads_of(opened["target"], model, heads)
    found = log_command.chosen_prompts(prompts, template, limit, prompt_tokens, seed, opened["target"])
    sources = [each.source for _, each in found] if opened["target"].has_encoder else None
    scores = scores_of(names, cut_at, [each for each, _ in found], opened["target"])
    said = {f"{role}_{key}": getattr(each, key) for role, each in opened.items() for key in ("name", "checksum")} | {
        "heads": read_by, "dtype": dtype, "prompts": "held-out standard library" if prompts is None else Path(prompts).name,
        "seed": seed, "source": "measured",
    }  # fmt: skip
    kept = f"finished settings are kept next to {out.name}; resume with the same command and --resume"
    with options.progress(quiet, "settings", kept) as bar:
        ids = [each.prompt for _, each in found]
        table = work.measure(
            out, said, method, decoders, ids, tokens, settings, scores=scores, sources=sources, resume=resume, report=bar
        )
    drawn = []
    if figures is not None:
        import figures as drawing

        drawn = drawing.of_quality(table, figures)
        if not drawn:
            print("note: these rows give more lines than fit in a figure; none was drawn", file=sys.stderr)
    if as_json:
        print(strict_json.dumps({"rows": table.to_dicts(), "file": str(out), "figures": [str(path) for path in drawn]}, indent=2))
        return
    print("\n".join(_lines(table, [*swept])))
    print("\n".join(str(path) for path in (out, *drawn)))


def score_names(score: str | None, cut_at: str | None, prompts: str | None) -> tuple[str, ...]:
    """Return the names of the scores. Refuse unknown ones and missing packages before any model is loaded."""
    from calibrate.decode import reference_scores
    from model.base import checks
    from model.base.checks import ParameterError

    if score is None:
        if cut_at is not None:
            raise ParameterError("--cut-at is used only with --score; add that, or leave it out")
        return ()
    if prompts is None:
        raise ParameterError("--score needs prompts with references, and the held-out code has none; add --prompts FILE")
    if cut_at == "":
        raise ParameterError("--cut-at must be a text, got an empty one; leave it out")
    names = tuple(each.strip() for each in score.split(","))
    for name in names:
        checks.one_of("score", name, reference_scores.SCORES)
        reference_scores.library(name)
    return names


def scores_of(
    names: tuple[str, ...], cut_at: str | None, prompts: Sequence[Prompt], target: LoadedModel
) -> ReferenceScores | None:
    """Return the scores against the prompts' references; None without scores. Refuse prompts without a reference."""
    from calibrate.decode.reference_scores import ReferenceScores
    from calibrate.loading import load_models
    from model.base.checks import ParameterError

    if not names:
        return None
    for each in prompts:
        if not each.references:
            columns = "a column reference, highlights, or translation with one other language"
            raise ParameterError(f"prompt {each.id} ({each.source}) must have a reference for --score; give {columns}")

    def text(prompt: Sequence[int], written: Sequence[int]) -> str:
        return "".join(load_models.pieces(target.tokenizer, prompt, written))

    return ReferenceScores(names, tuple(each.references for each in prompts), text, cut_at or "")


def _lines(table: pl.DataFrame, swept: Sequence[str]) -> Iterator[str]:
    from calibrate.decode.titled_table import RateTable

    first = table.row(0, named=True)
    models = f"{first['method']} on {first['target_name']}"
    title = f"{models}: {first['sequences']} sequences (measured; log-likelihoods in nats per token)"
    known = [name for name in (*swept, *_SHOWN) if name in table.columns and table[name].count()]
    words = {None: "-", float("inf"): "inf"}
    rows = tuple(tuple(words.get(value, value) for value in row) for row in table.select(known).iter_rows())
    notes = tuple(f"{name}: {words}" for name, words in _MEANINGS.items() if any(each.endswith(name) for each in known))
    yield from RateTable(title, tuple(known), rows, notes).lines()


@options.guarded
def replace(
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the rows, ending in .csv or .parquet.")],
    model: Annotated[str, typer.Option(help="Large model: a directory, OWNER/NAME, or family for the bundled pair.")] = "family",
    draft: Annotated[str | None, typer.Option(help="Small model, with the same tokenizer.")] = None,
    thresholds: Annotated[
        str, typer.Option(help="Likelihoods under the large model below which a token is replaced.")
    ] = "0,0.01,0.03,0.1,0.3,1.1",
    prompts: options.HeldOut = None,
    template: options.Template = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.")] = 20,
    prompt_tokens: options.PromptTokens = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 48,
    score: Annotated[
        str | None, typer.Option(help="Score outputs against the prompts' references: bleu, rouge-l or both, comma-separated.")
    ] = None,
    cut_at: Annotated[str | None, typer.Option(help="Score only the output before this text, with --score.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts.")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Let a large model replace a small model's unlikely tokens, and measure the quality of the output: Figure 2 of BiLD.

    Both models read every token, so nothing is saved: the curve shows how few replacements give the large model's quality, and with
    that what Big Little Decoder can reach. Threshold 0 is the small model alone, one above 1 the large model alone.

    calibrate replace -o replaced.csv --figures pictures

    calibrate replace --model my-t5 --draft my-small-t5 --prompts wmt.jsonl --score bleu -o wmt.csv --figures pictures
    """
    from calibrate.commands import log_command
    from calibrate.decode import replaced_tokens
    from calibrate.decode.titled_table import RateTable
    from calibrate.family import model_directory
    from calibrate.loading import load_models
    from model.base import table_files

    table_files.check_new(out)
    model_directory.refuse_unwritable(out)
    likelihoods = options.decimals("thresholds", thresholds)
    names = score_names(score, cut_at, prompts)
    named = load_models.named({"target": model, "draft": draft}, ("target", "draft"), "replace")
    opened = load_models.models(named, options.prepare_device(device, threads), dtype)
    found = log_command.chosen_prompts(prompts, template, limit, prompt_tokens, seed, opened["target"])
    scores = scores_of(names, cut_at, [each for each, _ in found], opened["target"])
    sources = [each.source for _, each in found] if opened["target"].has_encoder else None
    decoders = {role: each.decoder for role, each in opened.items()}
    with options.progress(quiet, "thresholds") as bar:
        table = replaced_tokens.measure(
            decoders, [each.prompt for _, each in found], tokens, likelihoods, scores=scores, sources=sources, report=bar
        )
    table_files.write(table, out)
    about = f"{opened['draft'].name} for {opened['target'].name}"
    drawn: list[Path] = []
    if figures is not None:
        import figures as drawing

        drawn = drawing.of_replacement(table, about, figures)
    if as_json:
        said = {"rows": table.to_dicts(), "file": str(out), "figures": [str(path) for path in drawn]}
        print(strict_json.dumps(said, indent=2))
        return
    columns = tuple(name for name in _REPLACED if name in table.columns)
    title = f"{about}: {len(found)} sequences (measured; log-likelihoods in nats per token)"
    notes = (
        "replaced_share: tokens that the large model changes; engaged_share: tokens below the threshold",
        "agreement: share of tokens equal to the large model's; plain_: the large model's own output",
    )
    shown = RateTable(title, columns, tuple(table.select(columns).iter_rows()), notes)
    print("\n".join([*shown.lines(), *map(str, (out, *drawn))]))


@options.guarded
def loss(
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the rows, ending in .csv or .parquet.")],
    model: Annotated[str, typer.Option(help="Model: a directory, OWNER/NAME, or family for the bundled target.")] = "family",
    heads: Annotated[str | None, typer.Option(help="Trained exit heads, or none. Default: those in the model's folder.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers after which tokens are predicted. Default: the last.")] = None,
    prompts: options.HeldOut = None,
    limit: Annotated[int, typer.Option(help="Maximum number of sequences.")] = 100,
    tokens: Annotated[int, typer.Option(help="Length of a sequence [tokens]; longer ones keep their last tokens.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the choice of sequences.")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw the figure into.")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the loss of the next token by its position in a text: Figure 1 of SkipDecode, on your model and data.

    Later tokens have more context and are easier, so a schedule may give them fewer layers. With --layers the loss after earlier
    layers can be compared with that of all: where their curves meet, the layers between do not help.

    calibrate loss -o loss.csv --layers 6,9,12 --figures pictures

    calibrate loss --model my-opt --prompts cnn.jsonl --tokens 512 --limit 500 -o cnn.parquet
    """
    from calibrate.commands import log_command
    from calibrate.decode import loss_by_position as work
    from calibrate.family import model_directory
    from calibrate.loading import load_models
    from model.base import table_files
    from model.base.checks import ParameterError

    table_files.check_new(out)
    model_directory.refuse_unwritable(out)
    chosen = None if layers is None else options.numbers("layers", layers)
    named = load_models.named({"target": model}, ("target",), "loss")
    opened = load_models.models(named, options.prepare_device(device, threads), dtype)["target"]
    if opened.has_encoder:
        raise ParameterError(f"model must be decoder-only, and {opened.name} has an encoder; take another model")
    read_by = load_models.use_heads_of(opened, model, heads)
    found = log_command.tokenized_prompts(prompts, None, limit, tokens, seed, opened)
    with options.progress(quiet, "sequences") as bar:
        table = work.measure(opened.decoder, [ids for _, ids in found], chosen or (opened.decoder.layers,), report=bar)
    table_files.write(table, out)
    about = f"{opened.name}, heads {read_by}; {'held-out code' if prompts is None else Path(prompts).name}"
    drawn: list[Path] = []
    if figures is not None:
        import figures as drawing

        drawn = drawing.of_loss(table, about, figures)
    if as_json:
        said = {"rows": table.to_dicts(), "file": str(out), "figures": [str(path) for path in drawn]}
        print(strict_json.dumps(said, indent=2))
        return
    print("\n".join([*_losses(table, about), *map(str, (out, *drawn))]))


def _losses(table: pl.DataFrame, about: str) -> list[str]:
    import polars as pl

    from calibrate.decode.titled_table import RateTable

    last = max(table["position"].to_list())
    size = -(-last // _GROUPS)
    grouped = table.group_by("layer", first=(pl.col("position") - 1) // size * size + 1, maintain_order=True)
    wide = grouped.agg(pl.col("loss").mean()).pivot("layer", index="first", values="loss")
    rows = tuple((f"{first} to {min(first + size - 1, last)}", *values) for first, *values in wide.iter_rows())
    layers = tuple(f"layer {name}" for name in wide.columns[1:])
    title = f"{about}: mean loss of {max(table['sequences'].to_list())} sequences by number of tokens before (measured, nats)"
    return [*RateTable(title, ("tokens before", *layers), rows, ()).lines()]
