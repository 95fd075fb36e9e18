"""Alignment of a draft: further training on the target's own generations, so that it predicts the target rather than the text.

After "Model Prediction Alignment" of Big Little Decoder (section 3.5.1): prompts are cut from the family's training text, the
target continues them greedily, and the draft learns only those continuations, by cross-entropy.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.family import make_model, model_directory, training
from calibrate.family.corpus import Corpus
from calibrate.family.model_directory import Loaded
from calibrate.family.training import Recipe, Report
from model.base import checks, strict_json, whole_files
from model.base.bounded_files import check_regular
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    from calibrate.family.training import Tokens

    Tensor = torch.Tensor

AT_ONCE = 64
"""Sequences that are generated in one batch."""
IGNORED = -100
"""Label that the library's cross-entropy ignores."""


@dataclass(frozen=True)
class AlignmentSettings:
    """`prompts` prompts of `prompt` tokens, each continued by `tokens`; read `epochs` times, `batch` sequences per update."""

    prompts: int = 4096
    prompt: int = 64
    tokens: int = 128
    held_out: int = 256
    """Prompts from the held-out text, on which agreement is measured."""
    epochs: float = 2.0
    batch: int = 16
    rate: float = 2e-3
    warm_up: int = 20
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt", "tokens", "held_out"):
            checks.whole(name, getattr(self, name), 1, checks.MAX_TOKENS)
        checks.whole("batch", self.batch, 1, self.prompts, "prompts")
        self.recipe()

    @property
    def length(self) -> int:
        """Tokens of a prompt and its continuation."""
        return self.prompt + self.tokens

    @property
    def steps(self) -> int:
        """Number of updates of the weights.

        >>> AlignmentSettings(prompts=100, batch=8, epochs=2).steps
        25
        """
        return max(int(self.epochs * self.prompts / self.batch), 1)

    def recipe(self) -> Recipe:
        """Return the settings of the training."""
        return Recipe(self.epochs, self.batch, self.length, self.rate, self.warm_up, self.weight_decay, self.seed)


def align(
    target: Loaded,
    draft: Loaded,
    corpus: Corpus,
    settings: AlignmentSettings,
    folder: Path,
    *,
    command: str = "",
    resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train `draft` on generations of `target`, and save it to a new directory; return its log. The loaded draft changes."""
    written, kept = (folder.with_name(f"{folder.name}.{each}") for each in ("written", "kept"))
    sums = {"target": target.checksum, "draft": draft.checksum, "text": corpus.checksum}
    described = strict_json.dumps(sums | asdict(settings), sort_keys=True)
    if resume and (folder / model_directory.LOG).exists():
        log = model_directory.log_of(folder)
        was = {"target": log["target"]["checksum"], "draft": log["draft"]["checksum"], "text": log["corpus"]["checksum"]}
        model_directory.refuse_other(folder, was | log["settings"], sums | asdict(settings))
        return log
    model_directory.refuse_existing(folder)
    if not resume and (written.exists() or kept.exists()):
        there = written if written.exists() else kept
        raise ParameterError(f"{there} is from an interrupted alignment; --resume continues it, or remove it")
    model_directory.same_tokens(target, draft)
    for each in (target, draft):
        if settings.length > each.positions:
            bound = f"prompt + tokens must be at most the {each.positions} positions of model {each.name}"
            raise ParameterError(f"{bound}, got {settings.prompt} + {settings.tokens}")
    tokens, held_out = draft.tokens(corpus.training), draft.tokens(corpus.held_out)
    training.check_length("held-out text", held_out, settings.length)
    inputs = prompts(tokens, settings.prompts, settings.prompt, settings.seed)
    checked = prompts(held_out, min(settings.held_out, held_out.size // settings.prompt), settings.prompt, settings.seed)
    reference = outputs(target, checked, settings.tokens)
    before = agreement(draft, reference, settings.prompt) | make_model.held_out_losses(draft.model, held_out, settings.length)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sequences = _written(target, inputs, settings.tokens, written, described, report)
    log = _train(draft, sequences, held_out, settings, kept, described, resume, report)
    model_directory.round_to_half(draft.model)
    after = agreement(draft, reference, settings.prompt)
    whole = make_model.about(draft.model, "aligned", command) | {
        "target": {"name": target.name, "checksum": target.checksum}, "draft": {"name": draft.name, "checksum": draft.checksum},
        "settings": asdict(settings), "agreement": _compared(before, after),
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        **make_model.held_out_losses(draft.model, held_out, settings.length), "held_out_loss_before": before["held_out_loss"],
        "written_tokens": int((_labels(sequences, settings.prompt, draft) != IGNORED).sum()),
        "while_training": {"losses": log["losses"], "held_out": log["held_out"]}, "seconds": log["seconds"],
    }  # fmt: skip
    model_directory.save(draft.model, draft.tokenizer, whole, folder)
    written.unlink(missing_ok=True)  # the model is saved, so a missing file is no error
    return model_directory.log_of(folder)


def prompts(tokens: Tokens, count: int, length: int, seed: int) -> Tokens:
    """Return `count` random pieces of a text that do not overlap, shape (count, length)."""
    there = tokens.size // length
    if not 1 <= count <= there:
        raise ParameterError(f"prompts must be between 1 and the {there} pieces of {length} tokens that the text has, got {count}")
    order, _ = training.order_of(seed, 0, there, 0)
    return np.stack([tokens[index * length : (index + 1) * length] for index in order[:count]])


def outputs(loaded: Loaded, inputs: Tokens, tokens: int) -> Tokens:
    """Return prompts with a model's greedy continuations, shape (prompts, prompt + tokens)."""
    return np.concatenate([_output(loaded, inputs[start : start + AT_ONCE], tokens) for start in range(0, len(inputs), AT_ONCE)])


def agreement(draft: Loaded, sequences: Tokens, prompt: int) -> dict[str, Any]:
    """Return how often the draft's greedy token equals the target's, along the target's generations up to their end.

    `hits` and `positions` have shape (sequences,).
    """
    import torch

    hits, positions = [], []
    for start in range(0, len(sequences), AT_ONCE):
        group = sequences[start : start + AT_ONCE]
        labels = _labels(group, prompt, draft)
        with torch.inference_mode():
            rows = torch.from_numpy(group).to(draft.model.device)
            guesses = draft.model(input_ids=rows[:, :-1], use_cache=False).logits[:, prompt - 1 :].argmax(-1).cpu().numpy()
        hits += (guesses == labels).sum(axis=1).tolist()
        positions += (labels != IGNORED).sum(axis=1).tolist()
    return {"hits": np.array(hits), "positions": np.array(positions)}


def _compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the agreement before and after, and the gain, with standard errors over sequences: positions of one are not
    independent.
    """
    positions = before["positions"]
    gained = after["hits"] - before["hits"]
    row: dict[str, Any] = {"prompts": len(positions), "positions": int(positions.sum())}
    for name, hits in (("before", before["hits"]), ("after", after["hits"]), ("gain", gained)):
        share = hits.sum() / positions.sum()
        spread = float(np.sqrt(((hits - share * positions) ** 2).sum())) / positions.sum()
        row |= {name: round(float(share), 5), f"{name}_error": round(spread, 5) if len(positions) > 1 else math.nan}
    return row


def _output(loaded: Loaded, inputs: Tokens, tokens: int) -> Tokens:
    import torch

    rows = torch.from_numpy(inputs).to(loaded.model.device)
    found, cache, latest = [rows], None, rows
    with torch.inference_mode():
        for _ in range(tokens):
            passed = loaded.model(input_ids=latest, past_key_values=cache, use_cache=True)
            cache, latest = passed.past_key_values, passed.logits[:, -1:].argmax(-1)
            found.append(latest)
    whole: Tokens = torch.cat(found, dim=1).cpu().numpy()
    return whole


def _written(target: Loaded, inputs: Tokens, tokens: int, kept: Path, settings: str, report: Report | None) -> Tokens:
    """Return the target's generations for all prompts, saved to a file as they are made."""
    from safetensors.numpy import save_file

    done = np.empty((0, inputs.shape[1] + tokens), np.int64)
    if kept.exists():
        done = saved_sequences(kept, settings, count=len(inputs), length=done.shape[1], vocabulary=target.vocabulary)
    last = time.perf_counter()
    while len(done) < len(inputs):
        done = np.concatenate([done, _output(target, inputs[len(done) : len(done) + AT_ONCE], tokens)])
        if report is not None:
            report(len(done), len(inputs), f"{target.name} generates")
        if len(done) == len(inputs) or time.perf_counter() - last > training.SAVE_EVERY:
            with whole_files.atomic_path(kept) as part:
                save_file({"texts": done}, part, {"settings": settings})
            last = time.perf_counter()
    return done


def saved_sequences(kept: Path, settings: str, *, count: int, length: int, vocabulary: int) -> Tokens:
    """Return the sequences that an alignment with these settings has saved: at most `count`, shape (sequences, length)."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(kept)
        with safe_open(kept, framework="np") as file:
            there = (file.metadata() or {}).get("settings")
            held = file.get_slice("texts")
            shape, kind = tuple(held.get_shape()), held.get_dtype()
            fits = len(shape) == 2 and shape[0] <= count and shape[1] == length and kind == "I64"
            sequences = file.get_tensor("texts") if fits else np.empty((0, length), np.int64)
    except (SafetensorError, OSError) as error:
        raise ParameterError(f"{kept.name} cannot be read for --resume: {model_directory.first_line(error)}; remove it") from None
    if there != settings:
        raise ParameterError(f"{kept.name} is from another alignment; give the same settings, or remove it and start again")
    if not fits or (sequences < 0).any() or (sequences >= vocabulary).any():
        bound = f"at most {count} sequences of {length} whole numbers below the vocabulary={vocabulary}"
        raise ParameterError(f"{kept.name} must hold {bound}, got {kind} of shape {shape}; remove it and start again")
    return np.asarray(sequences)


def _train(
    draft: Loaded,
    sequences: Tokens,
    held_out: Tokens,
    settings: AlignmentSettings,
    kept: Path,
    described: str,
    resume: bool,
    report: Report | None,
) -> dict[str, Any]:
    import torch

    model, recipe, steps = draft.model, settings.recipe(), settings.steps
    labels = _labels(sequences, settings.prompt, draft)
    model.train()

    def learn(step: int) -> Tensor:
        rows = _rows(step, settings)
        passed = model(input_ids=torch.from_numpy(sequences[rows, :-1]).to(model.device), use_cache=False)
        wanted = torch.from_numpy(labels[rows]).to(model.device)
        logits = passed.logits[:, settings.prompt - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seen() -> float:
        loss = training.loss_of(model, held_out, settings.length, str(model.device), training.HELD_OUT_WINDOWS)
        model.train()
        return loss

    optimizers = training.optimizers_of(model, recipe)
    work = training.TrainingJob(model, optimizers, learn, seen, lambda step: recipe.rate_at(step, steps), steps, described)
    log = work.done(kept, resume=resume, report=report)
    model.eval()
    return log


def _rows(step: int, settings: AlignmentSettings) -> list[int]:
    """Return the sequences of an update; each epoch uses all of them, in another order."""
    rows = []
    for number in range(step * settings.batch, (step + 1) * settings.batch):
        epoch, index = divmod(number, settings.prompts)
        order, _ = training.order_of(settings.seed, epoch + 1, settings.prompts, 0)  # epoch 0 chose the prompts
        rows.append(int(order[index]))
    return rows


def _labels(sequences: Tokens, prompt: int, draft: Loaded) -> Tokens:
    """Return the generated tokens, shape (sequences, tokens), with `IGNORED` after the end of a sequence."""
    written = sequences[:, prompt:]
    end = draft.tokenizer.eos_token_id
    if end is None:
        return written
    ended = np.cumsum(written == end, axis=1) - (written == end)
    return np.where(ended > 0, IGNORED, written)
