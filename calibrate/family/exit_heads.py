"""Exit heads: for every layer but the last, a matrix that predicts the model's output from that layer's state alone.

As in the paper on Predictive Pipelined Decoding (section 4.1, Table 4), the model is frozen, and a head learns the next token of a
text by cross-entropy. The head of layer k is applied to the state after layer k and the model's own final norm. It starts as the
model's output matrix, the *common* head, so that the effect of training is visible. Heads are trained in the same passes, but
independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.family import head_files, model_directory, training
from calibrate.family.corpus import Corpus
from calibrate.family.model_directory import Loaded
from calibrate.family.training import Recipe, Report
from model.base import checks, strict_json
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    from calibrate.family.training import Tokens

    Tensor = torch.Tensor

SCHEMA = "decodesim.heads/1"
TOP = (1, 3, 5)
"""Numbers of candidates for which agreement is counted, as in the paper's Table 2."""
LABELS = ("text", "model")
CHUNK = 8192
"""Tokens whose states are in memory at a time."""


@dataclass(frozen=True)
class HeadTrainingSettings:
    """Settings of the training; the rate rises over a share `warm_up` of the updates, and then decreases linearly to 0."""

    epochs: float = 1.0
    rate: float = 1e-3
    batch: int = 16
    length: int = 512
    warm_up: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    labels: str = "text"
    """Label of a head: the next token of the text, or the model's own prediction."""

    def __post_init__(self) -> None:
        checks.one_of("labels", self.labels, LABELS)
        checks.number("warm_up", self.warm_up, 0, 1)
        self.recipe(self.batch * self.length + 1)

    def recipe(self, tokens: int) -> Recipe:
        """Return the recipe for a text of `tokens` tokens.

        >>> PAPER_SETTINGS.recipe(100 * 128 * 2048 + 1).warm_up  # .04 of 300 updates
        12
        """
        recipe = Recipe(self.epochs, self.batch, self.length, self.rate, 0, self.weight_decay, self.seed)
        return replace(recipe, warm_up=round(self.warm_up * recipe.steps(tokens)))


DEFAULT_SETTINGS = HeadTrainingSettings()
"""Settings for a small text. Tried from 3e-4 to 1e-2 on a model of six layers: with a higher rate heads agree more often with the
model at the first layers, and less often at the last, where the common head is hard to beat.
"""
PAPER_SETTINGS = HeadTrainingSettings(epochs=3, rate=2e-5, batch=128, length=2048, warm_up=0.04)
"""Settings of the paper's Table 4, published, for a model of 13 billion parameters. The linear decrease of the rate is assumed."""
SETTINGS = {"own": DEFAULT_SETTINGS, "paper": PAPER_SETTINGS}


def train(
    loaded: Loaded, corpus: Corpus, settings: HeadTrainingSettings, path: Path, *, layers: Iterable[int] | None = None,
    command: str = "", resume: bool = False, report: Report | None = None,
) -> dict[str, Any]:
    """Train a head for each layer but the last, or for some, and write them to one file; return the file's description."""
    import torch

    kept = path.with_name(f"{path.name}.kept")
    chosen = exit_layers(loaded, layers)
    settings = replace(settings, length=min(settings.length, loaded.positions))
    described = {"model": loaded.checksum, "text": corpus.checksum, "heads of layers": list(chosen), **asdict(settings)}
    if resume and path.exists():
        there = about(path)
        layers_there = sorted({row["layer"] for row in there["results"]})
        was = {"model": there["model"], "text": there["corpus"]["checksum"], "heads of layers": layers_there, **there["settings"]}
        model_directory.refuse_other(path, was, described)
        return there
    model_directory.refuse_existing(path)
    if kept.exists() and not resume:
        raise ParameterError(f"{kept} is from an interrupted training; --resume continues it, or remove it")
    check(loaded)
    tokens, held_out = loaded.tokens(corpus.training), loaded.tokens(corpus.held_out)
    recipe = settings.recipe(tokens.size)
    steps = recipe.steps(tokens.size)
    training.check_length("held-out text", held_out, settings.length)
    heads = initial_heads(loaded, chosen)

    def seen() -> float:
        rows = evaluate_heads(loaded, {"trained": heads}, held_out, settings.length, training.HELD_OUT_WINDOWS)
        return float(np.mean([row["loss"] for row in rows]))

    work = training.TrainingJob(
        _Module(heads), [torch.optim.AdamW(heads.values(), lr=0.0, weight_decay=settings.weight_decay)],
        lambda step: _learn(loaded, heads, recipe.windows(tokens, step), settings.labels), seen,
        lambda step: recipe.rate_at(step, steps), steps, strict_json.dumps(described, sort_keys=True), clip=None,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    log = work.done(kept, resume=resume, report=report)
    saved = {layer: head.detach().half() for layer, head in heads.items()}
    model_directory.finite("heads in half precision", ((f"layer.{layer}", head) for layer, head in saved.items()))
    both = {"common": initial_heads(loaded, chosen), "trained": {layer: head.float() for layer, head in saved.items()}}
    whole = {
        "schema": SCHEMA, "source": "measured", "model": loaded.checksum, "name": loaded.name,
        "layers": loaded.layers, "hidden": loaded.hidden, "vocabulary": loaded.vocabulary, "settings": asdict(settings),
        "results": evaluate_heads(loaded, both, held_out, settings.length),
        "held_out_loss": round(training.loss_of(loaded.model, held_out, settings.length, str(loaded.model.device)), 5),
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        "seconds": log["seconds"], "versions": model_directory.versions(), "command": command,
    }  # fmt: skip
    head_files.write(path, {f"layer.{layer}": head for layer, head in saved.items()}, whole)
    return about(path)


def load(path: Path, *, checksum: str, layers: int, hidden: int, vocabulary: int) -> dict[int, Tensor]:
    """Return heads by layer in float32, each of shape (vocabulary, hidden), if they belong to the model with this checksum.

    `layers` is the model's number of layers: heads belong to layers 1 to layers-1.
    """
    head_files.require_model(path, about(path), checksum)
    known = {f"layer.{layer}": layer for layer in range(1, layers)}
    shapes = dict.fromkeys(known, (vocabulary, hidden))
    found = head_files.tensors(path, shapes, f"layer.1 to layer.{layers - 1}")
    return dict(sorted((known[name], head) for name, head in found.items()))


def heads_of(loaded: Loaded, path: Path | None = None) -> dict[int, Tensor]:
    """Return the heads of a model, from the file in its directory or from another file."""
    where = loaded.folder / model_directory.HEADS if path is None else path
    return load(where, checksum=loaded.checksum, layers=loaded.layers, hidden=loaded.hidden, vocabulary=loaded.vocabulary)


def about(path: Path) -> dict[str, Any]:
    """Return the description in a file of heads."""
    return head_files.about(path, SCHEMA)


def initial_heads(loaded: Loaded, layers: Iterable[int]) -> dict[int, Any]:
    """Return untrained heads: the common head for each layer."""
    import torch

    common = loaded.model.get_output_embeddings().weight.detach()
    return {layer: torch.nn.Parameter(common.clone().float()) for layer in layers}


def states(loaded: Loaded, tokens: Tensor, layers: Iterable[int]) -> tuple[dict[int, Tensor], Tensor]:
    """Return the normed states after layers, each of shape (sequences, tokens, hidden), and the model's logits of all tokens."""
    import torch

    norm = final_norm(loaded)
    with torch.no_grad():
        passed = loaded.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        # The library's list begins with the embedding; only its last entry is normed.
        return {layer: norm(passed.hidden_states[layer]) for layer in layers}, passed.logits


def check(loaded: Loaded) -> None:
    """Refuse a model whose output is not its output matrix times its last normed state: heads could not start from it."""
    import torch

    tokens = torch.arange(8, device=loaded.model.device)[None] % loaded.vocabulary
    normed: list[Tensor] = []
    norm = final_norm(loaded)
    handle = norm.register_forward_hook(lambda _, __, output: normed.append(output))
    try:
        with torch.no_grad():
            passed = loaded.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    head, last = loaded.model.get_output_embeddings().weight, passed.hidden_states[-1]
    fits = len(passed.hidden_states) == loaded.layers + 1 and last.shape[-1] == head.shape[-1] == loaded.hidden
    fits = fits and (not normed or torch.equal(normed[-1], last))
    if not fits or not torch.allclose(last @ head.T, passed.logits, rtol=1e-3, atol=1e-3):
        raise ParameterError(
            f"the output of model {loaded.name} must be its output matrix times its last normed state, without bias, scale or"
            " projection; exit heads cannot be trained for it"
        )


def evaluate_heads(
    loaded: Loaded, heads: dict[str, dict[int, Tensor]], tokens: Tokens, length: int, windows: int | None = None
) -> list[dict[str, Any]]:
    """Evaluate heads along a text; return a row for each kind and layer.

    A row has the mean loss [nats per token] and, for 1, 3 and 5 candidates, how often they include the model's greedy token.
    """
    import torch

    count = (tokens.size - 1) // length
    chosen = np.arange(count) if windows is None or windows >= count else np.linspace(0, count - 1, windows).astype(int)
    layers = sorted({layer for each in heads.values() for layer in each})
    totals = {(kind, layer): np.zeros(1 + len(TOP)) for kind, each in heads.items() for layer in each}
    for group in _groups(chosen, length):
        rows = torch.from_numpy(np.stack([tokens[window * length : (window + 1) * length + 1] for window in group]))
        rows = rows.to(loaded.model.device)
        seen, logits = states(loaded, rows[:, :-1], layers)
        greedy = logits.argmax(-1, keepdim=True)
        with torch.no_grad():
            for kind, layer in totals:
                guesses = seen[layer] @ heads[kind][layer].T
                loss = torch.nn.functional.cross_entropy(guesses.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
                before = (guesses > guesses.gather(-1, greedy)).sum(-1)
                totals[kind, layer] += [float(loss), *(int((before < top).sum()) for top in TOP)]
    number = len(chosen) * length
    return [
        {"head": kind, "layer": layer, "loss": round(total[0] / number, 5)}
        | {f"top_{top}": round(total[1 + index] / number, 5) for index, top in enumerate(TOP)}
        for (kind, layer), total in totals.items()
    ]


def _learn(loaded: Loaded, heads: dict[int, Any], windows: Tokens, labels: str) -> Tensor:
    """Add the gradients of an update to all heads; return their mean loss. Layer by layer, because logits take the most memory."""
    import torch

    length = windows.shape[1] - 1
    total = torch.zeros((), device=loaded.model.device)
    for group in _groups(np.arange(len(windows)), length):
        rows = torch.from_numpy(windows[group]).to(loaded.model.device)
        seen, own = states(loaded, rows[:, :-1], heads)
        wanted = (own.argmax(-1) if labels == "model" else rows[:, 1:]).flatten()
        for layer, head in heads.items():
            logits = (seen.pop(layer) @ head.T).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / (len(windows) * length)
            loss.backward()
            total += loss.detach() / len(heads)
    return total


def _groups(windows: Tokens, length: int) -> Iterator[Tokens]:
    at_once = max(CHUNK // length, 1)
    return (windows[start : start + at_once] for start in range(0, len(windows), at_once))


def final_norm(loaded: Loaded) -> Any:
    """Return the model's norm before its output matrix; the identity if it has none."""
    import torch

    from calibrate.decoders.transformers_adapter import decoder_of

    return decoder_of(loaded.model, loaded.name).norm or torch.nn.Identity()


def exit_layers(loaded: Loaded, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Return the layers that get exits: those given, or all but the last. Refuse others."""
    if loaded.layers < 2:
        raise ParameterError(f"layers must be at least 2 for a head before the last, and model {loaded.name} has {loaded.layers}")
    chosen = tuple(range(1, loaded.layers)) if layers is None else tuple(sorted(set(layers)))
    for layer in chosen:
        checks.whole("layer", layer, 1, loaded.layers - 1, "layers-1")
    return chosen


class _Module:
    """Heads under the names with which they are saved, for `TrainingJob`."""

    def __init__(self, heads: dict[int, Any]) -> None:
        self.heads = heads

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return ((f"layer.{layer}", head) for layer, head in self.heads.items())
