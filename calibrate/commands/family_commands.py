"""`calibrate train`, `heads` and `align`: train the small models of the family, exit heads and aligned drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    from calibrate.family.corpus import Corpus
    from calibrate.family.model_directory import Loaded
    from calibrate.family.training import Recipe, Size

_QUICK_TEXT = 40_000
EXITS, DRAFT_HEADS = "exits", ("eagle", "medusa")
"""Kinds of heads that `calibrate heads` trains."""
_KEPT = "progress until two minutes ago is kept; resume with the same command and --resume"


@options.guarded
def train(
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the tokenizer, with a subdirectory per model.")],
    role: Annotated[str, typer.Option(help="Models to train, comma-separated.")] = "target,medium,draft",
    layers: Annotated[int | None, typer.Option(help="Layers of a custom model, with --hidden, --ffn and one --role.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size, a multiple of 32.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Feed-forward (intermediate) size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Training epochs. Default: 3.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size [windows]. Default: 8.")] = None,
    length: Annotated[int | None, typer.Option(help="Window length [tokens] and number of positions. Default: 512.")] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate. Default: 0.006.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data order. Default: 0.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Vocabulary size of the directory's tokenizer. Default: 1024.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file or a folder of them. Default: the standard library.")] = None,
    device: options.Device = None,
    threads: Annotated[int | None, typer.Option(help="PyTorch threads, on cpu. The same number gives the same weights.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trial: one epoch over a small part of the text.")] = False,
    resume: options.ResumeFolder = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train small decoder-only models that share a tokenizer, on the source of the Python standard library; weights are float16.

    calibrate train -o family --threads 1

    calibrate train -o family --role target --epochs 3 --threads 1 --resume

    calibrate train -o mine --role tiny --layers 2 --hidden 64 --ffn 172 --text notes --vocabulary 512
    """
    from calibrate.family import corpus, make_model, training
    from calibrate.family.vocabulary import SIZE

    sizes = _sizes(role, layers, hidden, ffn)
    given = {"epochs": epochs, "batch": batch, "length": length, "rate": rate, "seed": seed}
    small: dict[str, Any] = {"epochs": 1.0, "batch": 4, "length": 64, "warm_up": 10} if quick else {}
    recipe = training.Recipe(**small | {key: value for key, value in given.items() if value is not None})
    where = options.prepare_device(device, threads)
    read = corpus.standard_library() if text is None else corpus.corpus_of_files(text)
    read = read.cut(_QUICK_TEXT) if quick else read
    note = _note(read) if text is None and not quick else ""
    tokenizer = make_model.tokenizer_of(out, read, SIZE if vocabulary is None else vocabulary, recipe)
    logs = {}
    said = {"vocabulary": vocabulary, "text": None if text is None else read.name, "threads": threads}
    for name, size in sizes.items():
        command = _command(name, None if layers is None else size, recipe, said) + (" --quick" if quick else "")
        with options.progress(quiet, name, _KEPT) as bar:
            logs[name] = make_model.make(
                name, size, recipe, read, tokenizer, out, command=command, device=where, resume=resume, report=bar,
            )  # fmt: skip
        if not as_json:
            print(_trained(name, logs[name], out / name))
    if as_json:
        models = {name: log | {"folder": str(out / name)} for name, log in logs.items()}
        print(strict_json.dumps({"note": note, "models": models}, indent=2))
    elif note:
        print(note, file=sys.stderr)


@options.guarded
def heads(
    model: Annotated[str, typer.Option(help="A directory, a model of the family (target), or OWNER/NAME of the hub.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out",
            help="File. Default: heads.safetensors, or KIND.safetensors, in the model's folder. With --loss: a new directory.",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="exits (one for each layer), or draft heads: eagle or medusa.")
    ] = EXITS,
    draft_length: Annotated[
        int | None, typer.Option(help="Draft positions: trained passes of an eagle head, or medusa's heads. Default: 4.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Train the model itself for its exits, by losses averaged (1/2 (L_e + L_last)) or by-depth (i / sum j)."),
    ] = None,
    settings: Annotated[str, typer.Option(help="Training settings: own, or paper (Table 4 of the PPD paper).")] = "own",
    layers: Annotated[str | None, typer.Option(help="Layers, comma-separated. Default: all but the last.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Training epochs. Default: 1; paper: 3; draft heads: 0.5.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size [windows]. Default: 16; paper: 128; draft heads: 4.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Longest window [tokens]. Default: 512; paper: 2048; draft heads: 256.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Peak learning rate. Default: 0.001; paper: 2e-05; draft heads: 0.01.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Labels: text, or model (its own predictions). Default: text; draft heads: model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the data order. Default: 0.")] = None,
    text: options.Text = None,
    device: options.Device = None,
    threads: options.Threads = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trial: one epoch over a small part of the text.")] = False,
    resume: options.Resume = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train heads of a frozen model, and report how often they predict its token: an exit head for every layer, or draft heads.

    calibrate heads --model target -o heads.safetensors

    calibrate heads --model target --kind eagle -o eagle.safetensors

    calibrate heads --model my-llama --settings paper --text articles --layers 10,16,20

    calibrate heads --model draft --loss averaged --layers 1 -o draft-exits

    With --loss the model is fine-tuned so that its own output matrix can be read after the chosen layers and after the last: with
    equal weights, as Big Little Decoder does with one exit, or weights that rise with depth, as CALM does. Without it the model is
    frozen and every layer gets a matrix of its own.

    Draft heads read the model's last state and take the place of a draft model in speculative decoding: an EAGLE head is one layer
    that drafts token by token, Medusa's heads draft one token each in one pass. `calibrate decode speculative --draft FILE` runs
    them, with `--set drafter=heads` or `--set drafter=parallel`.
    """
    from dataclasses import replace

    from calibrate.family import exit_heads as work
    from calibrate.family import exit_tuning, model_directory
    from model.base import checks
    from model.base.checks import ParameterError

    checks.one_of("kind", kind, (EXITS, *DRAFT_HEADS))
    if kind in DRAFT_HEADS:
        for name, value in (("loss", loss), ("settings", None if settings == "own" else settings), ("layers", layers)):
            if value is not None:
                raise ParameterError(f"--{name} is used only with exit heads, got --kind {kind}; leave it out")
        given = {"epochs": epochs, "batch": batch, "length": length, "rate": rate, "seed": seed, "labels": labels}
        _draft_heads(
            model, kind, given | {"draft_length": draft_length}, out, text, options.prepare_device(device, threads), quick, resume,
            as_json, quiet,
        )
        return
    if draft_length is not None:
        raise ParameterError(f"--draft-length is used only with --kind eagle or medusa, got --kind {kind}; leave it out")
    if loss is not None:
        checks.one_of("loss", loss, exit_tuning.LOSSES)
        if out is None:
            raise ParameterError(f"-o must name a new directory with --loss {loss}, which trains the model itself, got none")
    checks.one_of("settings", settings, work.SETTINGS)
    given = {"epochs": epochs, "batch": batch, "length": length, "rate": rate, "seed": seed, "labels": labels}
    small: dict[str, Any] = {"epochs": 1.0, "batch": 4, "length": 64} if quick else {}
    wanted = replace(work.SETTINGS[settings], **small | {key: value for key, value in given.items() if value is not None})
    chosen = None if layers is None else options.numbers("layers", layers)
    where = options.prepare_device(device, threads)
    path = out or model_directory.locate_model(model) / model_directory.HEADS
    loaded = model_directory.load(model, where)
    read = _text(loaded, text, quick)
    said = {"loss": loss, "settings": settings, **given, "layers": layers, "text": None if text is None else read.name}
    words = [f"--{key} {value}" for key, value in said.items() if value is not None] + ["--quick"] * quick
    command = " ".join(["calibrate heads --model", loaded.name, *words])
    more: dict[str, Any] = {"layers": chosen, "command": command, "resume": resume}
    with options.progress(quiet, "heads", _KEPT) as bar:
        if loss is None:
            about = work.train(loaded, read, wanted, path, report=bar, **more)
        else:
            about = exit_tuning.tune(loaded, read, wanted, loss, path, report=bar, **more)
    if as_json:
        print(strict_json.dumps(about | {"file": str(path)}, indent=2))
        return
    if loss is None:
        print("\n".join(_match_table(about, about["name"], {"common": "model's own head", "trained": "trained head"})))
        print(f"loss of the whole model: {about['held_out_loss']:.3f}")
    else:
        print("\n".join(_match_table(about, about["tuned"]["name"], {"before": "before", "after": f"after, loss {loss}"})))
    print(path)


def _draft_heads(
    model: str, kind: str, given: dict[str, Any], out: Path | None, text: Path | None, device: str, quick: bool, resume: bool,
    as_json: bool, quiet: bool,
) -> None:
    """Train draft heads with the settings that are given, and print how often they agree with the model by draft position."""
    from calibrate.family import draft_head_training as work
    from calibrate.family import model_directory

    chosen = {key: value for key, value in given.items() if value is not None}
    small: dict[str, Any] = {"epochs": 1.0, "length": 64} if quick else {}
    settings = work.DraftHeadSettings(**small | chosen)
    path = out or model_directory.locate_model(model) / work.file_name(kind)
    loaded = model_directory.load(model, device)
    read = _text(loaded, text, quick)
    said = chosen | ({} if text is None else {"text": text.resolve().name})
    words = [f"--{key.replace('_', '-')} {value}" for key, value in said.items()] + ["--quick"] * quick
    command = " ".join(["calibrate heads --model", loaded.name, "--kind", kind, *words])
    with options.progress(quiet, f"{kind} heads", _KEPT) as bar:
        about = work.train(loaded, read, kind, settings, path, command=command, resume=resume, report=bar)
    if as_json:
        print(strict_json.dumps(about | {"file": str(path)}, indent=2))
        return
    print("\n".join(_draft_table(about)))
    print(path)


def _draft_table(about: dict[str, Any]) -> Iterator[str]:
    """Lines of a table: agreement of draft heads with their model, by draft position."""
    tokens = about["corpus"]["held_out_tokens"]
    yield f"{about['kind']} heads of {about['name']}, {about['parameters']} parameters; measured along {tokens} held-out tokens"
    yield "rate: how often their token is the model's, where all earlier ones of the draft were; loss [nats per token]"
    yield f"{'position':>8}{'rate':>8}{'low':>8}{'high':>8}{'trials':>9}{'loss':>8}"
    for row in about["results"]:
        yield f"{row['position']:>8}{row['rate']:>8.4f}{row['low']:>8.4f}{row['high']:>8.4f}{row['tokens']:>9}{row['loss']:>8.3f}"


@options.guarded
def align(
    target: Annotated[str, typer.Option(help="Target model: a directory, a model of the family, or OWNER/NAME.")],
    draft: Annotated[str, typer.Option(help="Draft model to train on the target's output, with the same tokenizer.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the aligned draft.")],
    prompts: Annotated[int | None, typer.Option(help="Prompts that the target continues. Default: 4096.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Prompt length [tokens]. Default: 64.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens the target generates per prompt, greedily. Default: 128.")] = None,
    held_out: Annotated[int | None, typer.Option(help="Held-out prompts to measure agreement on. Default: 256.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Training epochs. Default: 2.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size [sequences]. Default: 16.")] = None,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate. Default: 0.002.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and data order. Default: 0.")] = None,
    text: options.Text = None,
    device: options.Device = None,
    threads: options.Threads = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short trial on a few sequences.")] = False,
    resume: options.Resume = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune a draft model on the target's output for prompts of the training text (model alignment of Big Little Decoder).

    calibrate align --target target --draft draft -o aligned

    calibrate align --target my-llama --draft my-small-llama --text articles --prompts 20000 -o aligned
    """
    from calibrate.family import align_draft as work
    from calibrate.family import model_directory

    given = {
        "prompts": prompts, "prompt": prompt, "tokens": tokens, "held_out": held_out, "epochs": epochs, "batch": batch,
        "rate": rate, "seed": seed,
    }  # fmt: skip
    small: dict[str, Any] = {"prompts": 16, "prompt": 16, "tokens": 16, "held_out": 8, "batch": 4} if quick else {}
    settings = work.AlignmentSettings(**small | {key: value for key, value in given.items() if value is not None})
    where = options.prepare_device(device, threads)
    large, little = model_directory.load(target, where), model_directory.load(draft, where)
    read = _text(little, text, quick)
    said = given | {"text": None if text is None else read.name, "threads": threads}
    words = [f"--{key.replace('_', '-')} {value}" for key, value in said.items() if value is not None] + ["--quick"] * quick
    command = " ".join([f"calibrate align --target {large.name} --draft {little.name} -o {out.name}", *words])
    with options.progress(quiet, "align", _KEPT) as bar:
        log = work.align(large, little, read, settings, out, command=command, resume=resume, report=bar)
    if as_json:
        print(strict_json.dumps(log | {"folder": str(out)}, indent=2))
        return
    found = log["agreement"]
    where = f"measured on {found['positions']} tokens after {found['prompts']} held-out prompts"
    print(
        f"agreement with the greedy output of {log['target']['name']}: {found['before']:.4f} before, {found['after']:.4f} after,"
        f" gained {found['gain']:.4f} +- {found['gain_error']:.4f} ({where})"
    )
    before, after = log["held_out_loss_before"], log["held_out_loss"]
    print(f"loss on held-out text: {before:.4f} before, {after:.4f} nats per token after (measured); {out}")


def _match_table(about: dict[str, Any], model: str, heads: dict[str, str]) -> Iterator[str]:
    """Lines of a table: loss and top-k match of two heads, by layer; `heads` names them in the table."""
    kind = f"measured on {about['corpus']['held_out_tokens']} held-out tokens"
    yield f"{model}: loss [nats per token], and share of the model's tokens in the top 1, 3 and 5; {kind}"
    names = f"{'loss':>10}" + "".join(f"{name:>8}" for name in ("top 1", "top 3", "top 5"))
    yield " " * 5 + "".join(f"{head:>{len(names)}}" for head in heads.values())
    yield f"{'layer':>5}" + 2 * names
    rows = {(row["head"], row["layer"]): row for row in about["results"]}
    for layer in sorted({layer for _, layer in rows}):
        cells = [rows[head, layer] for head in heads]
        yield f"{layer:>5}" + "".join(
            f"{row['loss']:>10.3f}{row['top_1']:>8.3f}{row['top_3']:>8.3f}{row['top_5']:>8.3f}" for row in cells
        )


def _text(loaded: Loaded, text: Path | None, quick: bool) -> Corpus:
    """Return the text of the option, or the training text of a model of the family; with `quick`, a small part of it."""
    from calibrate.family import corpus, model_directory
    from model.base.checks import ParameterError

    if text is not None:
        return corpus.corpus_of_files(text).cut(_QUICK_TEXT) if quick else corpus.corpus_of_files(text)
    read = model_directory.log_of(loaded.folder)["corpus"] if (loaded.folder / model_directory.LOG).exists() else {"name": ""}
    if not read["name"].startswith(corpus.STANDARD):
        raise ParameterError(f"text must be given for model {loaded.name}, not trained on the standard library: --text FILE")
    found = corpus.standard_library()
    little = found.cut(_QUICK_TEXT)
    if read["checksum"] not in (found.checksum, little.checksum):
        print(f"note: model {loaded.name} was not trained on the library of Python {found.python}", file=sys.stderr)
    elif read["checksum"] == little.checksum and not quick:
        print(f"note: model {loaded.name} was trained with --quick, on a small part of the text", file=sys.stderr)
    return little if quick else found


def _sizes(role: str, layers: int | None, hidden: int | None, ffn: int | None) -> dict[str, Any]:
    from calibrate.family.training import FAMILY, Size
    from model.base import checks
    from model.base.checks import ParameterError

    roles = [each.strip() for each in role.split(",")]
    if (layers, hidden, ffn) == (None, None, None):
        for each in roles:
            checks.one_of("role", each, FAMILY)
        return {each: FAMILY[each] for each in roles}
    if layers is None or hidden is None or ffn is None:
        raise ParameterError("layers, hidden and ffn must be given together, or left out for the sizes of the family")
    if len(roles) != 1 or not roles[0].replace("-", "").replace("_", "").isalnum():
        raise ParameterError(f"role must be one name of letters, digits, - and _ for a custom model, got {checks.shown(role)}")
    return {roles[0]: Size(layers, hidden, ffn)}


def _command(role: str, size: Size | None, recipe: Recipe, said: dict[str, Any]) -> str:
    """Return the command that reproduces these weights, with all settings and without local paths."""
    parts = [f"calibrate train -o family --role {role}"]
    parts += [f"--layers {size.layers} --hidden {size.hidden} --ffn {size.ffn}"] if size is not None else []
    parts += [f"--{name} {getattr(recipe, name):g}" for name in ("epochs", "batch", "length", "rate", "seed")]
    parts += [f"--{name} {value}" for name, value in said.items() if value is not None]
    return " ".join(parts)


def _note(read: Corpus) -> str:
    """Return a note on the text: whether it is that of the bundled models, which depends on the version of Python."""
    from calibrate.family import model_directory

    if "target" not in model_directory.names():
        return ""
    pinned = model_directory.log_of(model_directory.bundled("target"))["corpus"]
    if pinned["checksum"] == read.checksum:
        return "note: the text is that of the bundled family"
    return (
        f"note: the text is the library of Python {read.python}, {read.characters} characters; the bundled family was trained on"
        f" that of Python {pinned['python']}, {pinned['characters']} characters: weights and losses will differ"
    )


def _trained(name: str, log: dict[str, Any], folder: Path) -> str:
    size = log["size"]
    return (
        f"{name}: {size['layers']} layers of {size['hidden']}, {log['parameters']} parameters;"
        f" held-out loss {log['held_out_loss']:.4f} nats per token (measured, {log['corpus']['held_out_tokens']} tokens),"
        f" {log['seconds']:.0f} s; {folder}"
    )
