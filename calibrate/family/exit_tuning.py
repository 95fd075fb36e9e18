"""Fine-tuning of a whole model for early exits: the average of the losses of its exits and of its last layer.

Early exits of the papers read an inner layer with the model's own output matrix, and the model is trained for it. Big Little
Decoder inside one model takes 1/2 (L_e + L_last) for its one exit [Kim2023, Section 4.4]; CALM takes the average over all layers
with weights w_i = i / sum_j j [Schuster2022]. `calibrate.family.exit_heads` leaves the model as it is and trains a matrix for each
layer instead.

[Kim2023] S. Kim, K. Mangalam, S. Moon, J. Malik, M. W. Mahoney, A. Gholami, K. Keutzer. Speculative Decoding with Big Little
Decoder. NeurIPS 2023, arXiv:2302.07863.
[Schuster2022] T. Schuster, A. Fisch, J. Gupta, M. Dehghani, D. Bahri, V. Q. Tran, Y. Tay, D. Metzler. Confident Adaptive Language
Modeling. NeurIPS 2022, arXiv:2207.07061.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.family import exit_heads, make_model, model_directory, training
from calibrate.family.corpus import Corpus
from calibrate.family.exit_heads import HeadTrainingSettings
from calibrate.family.model_directory import Loaded
from calibrate.family.training import Report
from model.base import checks, strict_json
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    from calibrate.family.training import Tokens

    Tensor = torch.Tensor

LOSSES = ("averaged", "by-depth")


def exit_weights(loss: str, layers: Collection[int]) -> dict[int, float]:
    """Return the weight of the loss of each layer, the last one included; they sum to 1.

    `averaged`: equal weights, which is 1/2 (L_e + L_last) for one exit. `by-depth`: w_i = i / sum_j j.

    >>> exit_weights("averaged", (1, 8))
    {1: 0.5, 8: 0.5}
    >>> exit_weights("by-depth", (1, 2, 3, 4))
    {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    """
    checks.one_of("loss", loss, LOSSES)
    return {layer: layer / sum(layers) if loss == "by-depth" else 1 / len(layers) for layer in sorted(layers)}


def tune(
    loaded: Loaded, corpus: Corpus, settings: HeadTrainingSettings, loss: str, folder: Path, *, layers: Iterable[int] | None = None,
    command: str = "", resume: bool = False, report: Report | None = None,
) -> dict[str, Any]:
    """Fine-tune a model on a text by the averaged loss of its exits and its last layer, and save it to a new directory.

    Returns its log. `layers` are the exits; by default all but the last. The loaded model changes.
    """
    import torch

    if settings.labels != "text":
        raise ParameterError(f"labels must be text with loss={loss}, because the model itself is trained, got {settings.labels}")
    exits = exit_heads.exit_layers(loaded, layers)
    weights = exit_weights(loss, (*exits, loaded.layers))
    settings = replace(settings, length=min(settings.length, loaded.positions))
    kept = folder.with_name(f"{folder.name}.kept")
    described = {"model": loaded.checksum, "text": corpus.checksum, "loss": loss, "exits": list(exits), **asdict(settings)}
    if resume and (folder / model_directory.LOG).exists():
        log = model_directory.log_of(folder)
        model_directory.refuse_other(folder, log["asked"], described)
        return log
    model_directory.refuse_existing(folder)
    if kept.exists() and not resume:
        raise ParameterError(f"{kept} is from an interrupted training; --resume continues it, or remove it")
    exit_heads.check(loaded)
    tokens, held_out = loaded.tokens(corpus.training), loaded.tokens(corpus.held_out)
    recipe = settings.recipe(tokens.size)
    steps = recipe.steps(tokens.size)
    training.check_length("held-out text", held_out, settings.length)
    before = _evaluated(loaded, exits, held_out, settings.length, "before")

    def seen() -> float:
        loaded.model.eval()
        return training.loss_of(loaded.model, held_out, settings.length, str(loaded.model.device), training.HELD_OUT_WINDOWS)

    job = training.TrainingJob(
        loaded.model, [torch.optim.AdamW(loaded.model.parameters(), lr=0.0, weight_decay=settings.weight_decay)],
        lambda step: learn(loaded, weights, recipe.windows(tokens, step)), seen,
        lambda step: recipe.rate_at(step, steps), steps, strict_json.dumps(described, sort_keys=True),
    )  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = job.done(kept, resume=resume, report=report)
    loaded.model.eval()
    model_directory.round_to_half(loaded.model)
    after = _evaluated(loaded, exits, held_out, settings.length, "after")
    whole = make_model.about(loaded.model, "exits", command) | {
        "tuned": {"name": loaded.name, "checksum": loaded.checksum}, "asked": described,
        "loss_weights": {str(layer): weight for layer, weight in weights.items()}, "results": [*before, *after],
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        **make_model.held_out_losses(loaded.model, held_out, settings.length),
        "while_training": {"losses": log["losses"], "held_out": log["held_out"]}, "seconds": log["seconds"],
    }  # fmt: skip
    model_directory.save(loaded.model, loaded.tokenizer, whole, folder)
    return model_directory.log_of(folder)


def learn(loaded: Loaded, weights: Mapping[int, float], windows: Tokens) -> Tensor:
    """Add the gradients of the weighted losses of windows, shape (windows, length + 1); return the loss [nats per token].

    Every layer is read with the model's own final norm and output matrix.
    """
    import torch

    head, norm = loaded.model.get_output_embeddings().weight, exit_heads.final_norm(loaded)
    count = windows.shape[0] * (windows.shape[1] - 1)
    total = torch.zeros((), device=loaded.model.device)
    loaded.model.train()
    for window in windows:  # one at a time: the logits of all exits are in memory together
        row = torch.from_numpy(window)[None].to(loaded.model.device)
        passed = loaded.model(input_ids=row[:, :-1], output_hidden_states=True, use_cache=False)
        loss = torch.zeros((), device=loaded.model.device)
        for layer, weight in weights.items():
            # The library's list begins with the embedding; only its last entry is normed.
            logits = passed.logits if layer == loaded.layers else norm(passed.hidden_states[layer]) @ head.T
            loss = loss + weight * torch.nn.functional.cross_entropy(logits[0], row[0, 1:], reduction="sum") / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _evaluated(loaded: Loaded, exits: Collection[int], held_out: Tokens, length: int, when: str) -> list[dict[str, Any]]:
    """Rows of `exit_heads.evaluate_heads` for the model's own output matrix after each exit, and the loss of the last layer."""
    own = exit_heads.initial_heads(loaded, exits)
    rows = exit_heads.evaluate_heads(loaded, {when: own}, held_out, length)
    last = training.loss_of(loaded.model, held_out, length, str(loaded.model.device))
    return [*rows, {"head": when, "layer": loaded.layers, "loss": round(last, 5)} | {f"top_{top}": 1.0 for top in exit_heads.TOP}]
