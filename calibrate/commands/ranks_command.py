"""`calibrate ranks`: rank log of a draft, for trees of drafts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from calibrate.commands import common_options as options
from calibrate.commands.log_command import tokenized_prompts
from model.base import strict_json


@options.guarded
def ranks(
    target: Annotated[str, typer.Option(help="Target model: a directory, OWNER/NAME, family:target, or family.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="NAME.json of the log.")],
    draft: Annotated[str | None, typer.Option(help="A draft model with the same tokenizer, or a file of draft heads.")] = None,
    depth: Annotated[int, typer.Option(help="Largest depth of a draft.")] = 4,
    top: Annotated[int, typer.Option(help="Candidates per position: larger ranks are logged as 0.")] = 8,
    prompts: options.HeldOut = None,
    template: options.Template = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.")] = 200,
    prompt_tokens: options.PromptTokens = 64,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt, greedily.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts.")] = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Log the rank of each of the target's tokens among the candidates of a draft, by depth of the draft.

    calibrate ranks --target family -o ranks.json

    calibrate ranks --target family:target --draft family:eagle --depth 4 --top 8 -o eagle.json

    `calibrate rates` turns the log into rank rates, and a scenario replays it: [outcomes] kind = "replay", file = "ranks.json".
    """
    from calibrate.decode import rank_logging
    from calibrate.devices import machine
    from calibrate.family import model_directory
    from calibrate.loading import load_models
    from model.base.checks import ParameterError
    from model.logs import rank_log

    if out.suffix != ".json":
        raise ParameterError(f"out must end in .json, got {out.name}")
    model_directory.refuse_existing(out, "--out")
    model_directory.refuse_unwritable(out)
    names = load_models.named({"target": target, "draft": draft}, ("target", "draft"), "ranks")
    models = load_models.models(names, options.prepare_device(device, threads), dtype)
    first = models["target"]
    if first.has_encoder:
        raise ParameterError(f"target must be decoder-only, and {first.name} has an encoder; use another model")
    rank_logging.check_draft(first.decoder, models["draft"].decoder, depth)
    found = tokenized_prompts(prompts, template, limit, prompt_tokens, seed, first)
    header: dict[str, Any] = {
        role: {"name": each.name, "checksum": each.checksum, "layers": each.decoder.layers} for role, each in models.items()
    }
    header |= {
        "prompts": [name for name, _ in found], "max_tokens": tokens, "seed": seed, "dtype": dtype,
        "versions": machine.versions(), "date": datetime.now(tz=UTC).date().isoformat(),
    }  # fmt: skip
    with options.progress(quiet, "sequences") as bar:
        log = rank_logging.log_ranks(
            first.decoder, models["draft"].decoder, [ids for _, ids in found], tokens, depth, top, header, seed=seed, report=bar
        )
    rank_log.save(log, out)
    positions = sum(map(len, log.ranks))
    if as_json:
        print(strict_json.dumps({"log": str(out), "sequences": log.sequences, "positions": positions}, indent=2))
        return
    print(f"{out}: ranks at {positions} positions of {log.sequences} sequences, to depth {log.depth} (calibrate rates {out})")
