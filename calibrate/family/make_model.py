"""Making models of the family: one directory with the corpus and a tokenizer, and in it a directory for each model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.family import model_directory, training, vocabulary
from calibrate.family.corpus import Corpus
from calibrate.family.training import Recipe, Report, Size
from model.base import strict_json, whole_files
from model.base.checks import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENIZER, CORPUS = "tokenizer.json", "corpus.json"
SAMPLE = 16
"""Evenly spaced windows whose loss is logged, so that anyone can verify it in a second."""


def tokenizer_of(folder: Path, corpus: Corpus, size: int = vocabulary.SIZE, recipe: Recipe | None = None) -> Any:
    """Return the tokenizer of a directory of models: learnt for the first model, and reused for later ones.

    A text that is too short for the recipe is refused before anything is written.
    """
    from tokenizers import Tokenizer

    now = corpus.about() | {"vocabulary": size}
    if (folder / TOKENIZER).exists():
        then = model_directory.table(folder / CORPUS) if (folder / CORPUS).exists() else {}
        for key in ("vocabulary", "checksum"):
            if then.get(key) != now[key]:
                change = f"{key} is {now[key]}, and was {then.get(key, 'not recorded')}"
                bound = f"{TOKENIZER} of {folder} must be of the same text: {change}"
                raise ParameterError(f"{bound}; take another directory, or remove both")
        try:
            return Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises plain exceptions
            why = model_directory.first_line(error)
            raise ParameterError(f"{TOKENIZER} of {folder} cannot be read: {why}; remove it, to learn it again") from None
    trained = vocabulary.train_tokenizer(corpus, size)
    if recipe is not None:
        recipe.steps(vocabulary.encode(trained, corpus.training).size)
        training.check_length("held-out text", vocabulary.encode(trained, corpus.held_out), recipe.length)
    whole_files.write_text(folder / CORPUS, strict_json.dumps(now, indent=1) + "\n")
    with whole_files.atomic_path(folder / TOKENIZER) as part:
        trained.save(str(part))
    return trained


def make(
    role: str, size: Size, recipe: Recipe, corpus: Corpus, tokenizer: Any, folder: Path, *, command: str = "", device: str = "cpu",
    resume: bool = False, report: Report | None = None,
) -> dict[str, Any]:
    """Train a model and write it to `folder`/`role`; return its log. With `resume`, an interrupted training continues."""
    place, kept = folder / role, folder / f"{role}.kept"
    if resume and (place / model_directory.LOG).exists():
        log = model_directory.log_of(place)
        was = {**log["size"], **log["recipe"], "text": log["corpus"]["checksum"]}
        model_directory.refuse_other(place, was, asdict(size) | asdict(recipe) | {"text": corpus.checksum})
        return log
    model_directory.refuse_existing(place)
    if kept.exists() and not resume:
        raise ParameterError(f"{kept} is from an interrupted training; --resume continues it, or remove it")
    tokens, held_out = vocabulary.encode(tokenizer, corpus.training), vocabulary.encode(tokenizer, corpus.held_out)
    model = untrained_model(size, tokenizer.get_vocab_size(), recipe)
    log = training.train(model, tokens, held_out, recipe, kept, device=device, resume=resume, report=report)
    return finish(model, log, role, size, recipe, corpus, tokenizer, tokens, held_out, place, command=command)


def untrained_model(size: Size, vocabulary: int, recipe: Recipe) -> Any:
    """Return an untrained model; its weights follow from the seed."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(size.config(vocabulary, recipe.length))


def finish(
    model: Any, log: dict[str, Any], role: str, size: Size, recipe: Recipe, corpus: Corpus, tokenizer: Any, tokens: NDArray[Any],
    held_out: NDArray[Any], folder: Path, *, command: str = "",
) -> dict[str, Any]:
    """Round a trained model to half precision, evaluate it on all of the held-out text, and write it; return the log."""
    model_directory.round_to_half(model)
    whole = about(model, role, command) | {
        "size": asdict(size), "recipe": asdict(recipe),
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        **held_out_losses(model, held_out, recipe.length),
        "while_training": {"losses": log["losses"], "held_out": log["held_out"]}, "seconds": log["seconds"],
    }  # fmt: skip
    model_directory.save(model, tokenizer, whole, folder)
    return model_directory.log_of(folder)


def held_out_losses(model: Any, held_out: NDArray[Any], length: int) -> dict[str, Any]:
    """Return the loss on all of the held-out text, and on a few windows, which is quick to verify."""
    device = str(model.device)
    sample = {"windows": SAMPLE, "length": length, "loss": round(training.loss_of(model, held_out, length, device, SAMPLE), 5)}
    return {"held_out_loss": round(training.loss_of(model, held_out, length, device), 5), "held_out_sample": sample}


def about(model: Any, role: str, command: str) -> dict[str, Any]:
    """Return the log entries of any model: its role, machine and command."""
    import torch

    where = {"device": "cpu", "threads": torch.get_num_threads()} if model.device.type == "cpu" else {"device": model.device.type}
    parameters = sum(each.numel() for each in model.parameters())
    said = {"source": "measured", "loss": "mean cross-entropy [nats per token], in the end of the weights as saved on all windows"}
    return {"role": role, "command": command, **said, "parameters": parameters, "versions": model_directory.versions(), **where}
