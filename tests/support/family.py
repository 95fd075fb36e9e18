"""Tiny models for tests of the model family: 300 tokens, one to three layers of width 32, 12,000 characters of text."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.family import corpus, make_model, vocabulary
from calibrate.family.training import Recipe, Size

TINY = Size(3, 32, 64)
RECIPE = Recipe(epochs=1, batch=4, length=32, warm_up=5)


@lru_cache(maxsize=1)
def text() -> corpus.Corpus:
    """The first part of the standard library, cached because many tests train on it."""
    return corpus.standard_library().cut(12_000)


def train_model(folder: Path, role: str = "tiny", size: Size = TINY, recipe: Recipe = RECIPE, **more: Any) -> Path:
    """Train a model into a separate directory, with the tokenizer of the folder."""
    read = text()
    make_model.make(role, size, recipe, read, make_model.tokenizer_of(folder, read, 300), folder, **more)
    return folder / role


def tokens(read: corpus.Corpus) -> tuple[Any, Any, Any]:
    """Train a tokenizer, and encode both parts of a corpus."""
    tokenizer = vocabulary.train_tokenizer(read, 300)
    return tokenizer, vocabulary.encode(tokenizer, read.training), vocabulary.encode(tokenizer, read.held_out)


def change_tensor(folder: Path, name: str, how: Any) -> None:
    """Change one tensor of a model's weights."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = how(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def error_of(*arguments: str) -> str:
    """Run a command that must fail, and return its error: one line, exit code 2, no traceback, nothing on stdout."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 2, (done.exit_code, done.stdout, done.stderr, done.exception)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


