"""`calibrate log` and `calibrate rates`: log model predictions along the target's output, and acceptance rates of such logs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.commands import common_options as options
from model.base import strict_json

if TYPE_CHECKING:
    from calibrate.decode.position_logging import LogSeconds
    from calibrate.loading.load_models import LoadedModel, TokenizedPrompt
    from calibrate.loading.prompts import Prompt

_GAMMAS = "1,2,3,5,7"
_CANDIDATES = "1,3,5"


@options.guarded
def log(
    target: Annotated[str, typer.Option(help="Target model: a directory, OWNER/NAME, family:target, or family.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="NAME.json of the log; its table goes to NAME.parquet.")],
    draft: Annotated[str | None, typer.Option(help="A draft model with the same tokenizer.")] = None,
    heads: Annotated[Path | None, typer.Option(help="Trained exit heads. Default: those in the target's folder.")] = None,
    prompts: options.HeldOut = None,
    template: options.Template = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.")] = 200,
    prompt_tokens: options.PromptTokens = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample tokens. Default: greedy.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Temperature, with --sample. Default: 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens, with --sample. Default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling probability, with --sample. Default: 1.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Log predictions at every position of the target's output: each layer's rank of the token, and accepted draft lengths.

    calibrate log --target family -o family.json

    calibrate log --target my-llama --draft my-small-llama --prompts squad.json --limit 100 -o squad.json
    """
    from calibrate.decode import position_logging as work
    from calibrate.interpreters.in_one_process import Sampling

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked and not sample:
        from model.base.checks import ParameterError

        raise ParameterError(f"{next(iter(asked))} is used only with --sample; add that, or leave it out")
    sampling = Sampling(**asked) if sample else None  # type: ignore[arg-type]
    opened, said = _opened(target, draft, heads, dtype, device, threads)
    found = tokenized_prompts(prompts, template, limit, prompt_tokens, seed, opened["target"])
    said |= {
        "prompts": [{"id": name, "tokens": ids} for name, ids in found], "max_tokens": tokens, "seed": seed,
        "sampling": None if sampling is None else vars(sampling),
    }  # fmt: skip
    decoders = {role: each.decoder for role, each in opened.items()}
    kept = f"logged sequences are kept next to {out.name}; resume with the same command and --resume"
    with options.progress(quiet, "sequences", kept) as bar:
        log, spent = work.write_log(
            out, said, decoders["target"], [ids for _, ids in found], tokens, draft=decoders.get("draft"), sampling=sampling,
            seed=seed, resume=resume, report=bar,
        )  # fmt: skip
    if as_json:
        print(
            strict_json.dumps(
                {"log": str(out), "rows": log.table.height, "sequences": len(found), "seconds": vars(spent)}, indent=2
            )
        )
        return
    print(f"{out}: {log.table.height} positions of {len(found)} sequences")
    print("\n".join(_shares(spent)))


def _shares(spent: LogSeconds) -> Iterator[str]:
    """Lines with the measured seconds of each part, and its share of the total."""
    for name, seconds in vars(spent).items():
        share = f"{seconds / spent.total:7.0%}" if spent.total else ""
        yield f"  {name.replace('_', ' '):14}{seconds:9.2f} s{share}   measured"


def _opened(
    target: str, draft: str | None, heads: Path | None, dtype: str, device: str | None, threads: int | None
) -> tuple[dict[str, LoadedModel], dict[str, Any]]:
    """Load the models, and return them with their entries in the log's header."""
    from calibrate.decoders.eagle_and_medusa import DraftHead
    from calibrate.devices import machine
    from calibrate.loading import load_models
    from model.base.checks import ParameterError

    roles = ("target",) if draft is None and target != load_models.FAMILY else ("target", "draft")
    named = load_models.named({"target": target, "draft": draft}, roles, "log")
    models = load_models.models(named, options.prepare_device(device, threads), dtype)
    first = models["target"]
    if isinstance(models.get("draft", first).decoder, DraftHead):
        what = f"draft must be a model, got {models['draft'].name}, which reads the target's states"
        raise ParameterError(f"{what}; log its decodings with calibrate decode --log")
    if first.has_encoder:
        raise ParameterError(f"target must be decoder-only, and {first.name} has an encoder; use calibrate decode --log instead")
    said: dict[str, Any] = {"dtype": dtype, "versions": machine.versions(), "heads": None, "draft": None}
    said["date"] = datetime.now(tz=UTC).date().isoformat()
    for role, each in models.items():
        decoder = each.decoder
        said[role] = {
            "name": each.name, "checksum": each.checksum, "layers": decoder.layers, "vocabulary": decoder.vocabulary,
        }  # fmt: skip
    path = load_models.heads_path(target) if heads is None else heads
    if heads is not None or path.is_file():
        said["heads"] = {"file": path.name, "layers": [*load_models.use_heads(first, path)]}
    return models, said


def tokenized_prompts(
    where: str | None, template: str | None, limit: int, length: int, seed: int, target: LoadedModel
) -> list[tuple[str, list[int]]]:
    """Return names and tokens of the prompts: the last `length` tokens of each, all tokens of a chat."""
    return [(each.id, [*ids.prompt]) for each, ids in chosen_prompts(where, template, limit, length, seed, target)]


def chosen_prompts(
    where: str | None, template: str | None, limit: int, length: int, seed: int, target: LoadedModel
) -> list[tuple[Prompt, TokenizedPrompt]]:
    """Return the prompts with their tokens: the last `length` ones of the text, which an encoder reads if there is one."""
    from calibrate.loading import load_models, prompts
    from calibrate.loading.load_models import TokenizedPrompt
    from model.base import checks
    from model.base.checks import ParameterError

    checks.whole("limit", limit, 1)
    checks.whole("prompt_tokens", length, 1)
    if where is None:
        if template is not None:
            raise ParameterError("--template is used only with --prompts; add that, or leave it out")
        found = prompts.held_out(length, limit, seed, tokenizer=target.tokenizer.backend_tokenizer)
    else:
        found = prompts.load(where, template=template, limit=limit, seed=seed)
    chat = template == prompts.CHAT
    begun = [(each, load_models.tokenize(target, each.text, each.id, chat=chat)) for each in found]
    if chat:
        return begun
    return [(each, TokenizedPrompt(ids.prompt[-length:], ids.source[-length:])) for each, ids in begun]


@options.guarded
def rates(
    where: Annotated[
        str, typer.Argument(metavar="LOG", help="A .json log or measured runs, a bundled log (family), or a public .jsonl.")
    ],
    candidates: Annotated[str, typer.Option(help="Numbers of early candidates k.")] = _CANDIDATES,
    lengths: Annotated[str, typer.Option(help="Draft lengths gamma.")] = _GAMMAS,
    cost_ratio: Annotated[float, typer.Option(help="Draft pass / target pass, to predict speed-ups.")] = 0.1,
    matches: Annotated[str | None, typer.Option(help="Last tokens looked up: smallest,largest. Default: 1,3.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter, required for a public log: eagle, ngram, ...")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
    by: Annotated[
        str | None, typer.Option(help="Setting, such as context_budget: a row for each of its values. Of decodings.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Match and acceptance rates of a log, with intervals, by layer and position, and tests of their independence.

    Of decodings (calibrate decode --log, calibrate run): acceptance by draft position, and tokens per round, seen and predicted.

    calibrate rates family

    calibrate rates decoded.json

    calibrate rates runs.json --by context_budget

    calibrate rates squad.json --candidates 1,3 --lengths 4,8 --figures pictures
    """
    from calibrate.decode import decoded_rounds, rate_tables

    if by is not None:
        for name, value in (("matches", matches), ("drafter", drafter), ("figures", figures)):
            if value is not None:
                from model.base.checks import ParameterError

                raise ParameterError(f"--{name} is not used with --by, got {value}; leave one of them out")
        table = decoded_rounds.by_setting(where, by)
        print(strict_json.dumps(table.document(), indent=2) if as_json else "\n".join(table.lines()))
        return
    asked = options.numbers("candidates", candidates), options.numbers("lengths", lengths)
    made = rate_tables.tables_of_file(where, *asked, cost_ratio, drafter, None if matches is None else _ends(matches))
    drawn = [] if figures is None else _drawn(where, *asked, drafter, figures)
    if as_json:
        print(strict_json.dumps([table.document() for table in made], indent=2))
        return
    print("\n\n".join("\n".join(table.lines()) for table in made))
    if drawn:
        print("\n" + "\n".join(str(path) for path in drawn))


def _ends(matches: str) -> tuple[int, int]:
    """The smallest and largest number of last tokens that are looked up."""
    from model.base.checks import ParameterError

    found = options.numbers("matches", matches)
    if len(found) != 2:
        raise ParameterError(f"matches must be two numbers, smallest and largest, such as 1,3, got {matches}")
    return found[0], found[1]


def _drawn(
    where: str, candidates: tuple[int, ...], lengths: tuple[int, ...], drafter: str | None, folder: Path
) -> list[Path]:
    """Draw the figures of a position log, or of a public log."""
    import figures
    from calibrate.decode import rate_tables
    from model.logs import position_log

    if drafter is None:
        return figures.of_log(position_log.load(where), folder, candidates, lengths)
    held, about = rate_tables.read_public_log(where, drafter)
    return figures.of_lengths(held, folder, lengths, f"{about} (measured)")
