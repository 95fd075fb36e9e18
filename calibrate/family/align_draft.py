"""Alignment of a draft: it is trained further on what the target itself writes, to foretell the target and not the text.

After "Model Prediction Alignment" of Big Little Decoder (section 3.5.1): inputs are cut from the text that the family was trained
on, the target writes on behind them, greedily, and the draft learns those tokens by cross-entropy, and only those.
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
"""Texts that are written together."""
IGNORED = -100
"""What the library's cross-entropy leaves out."""


@dataclass(frozen=True)
class AlignmentSettings:
    """`prompts` inputs of `prompt` tokens, `tokens` written behind each; all read `epochs` times, `batch` texts an update."""

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
        """Tokens of a prompt and what is written behind it."""
        return self.prompt + self.tokens

    @property
    def steps(self) -> int:
        """Updates of the weights.

        >>> AlignmentSettings(prompts=100, batch=8, epochs=2).steps
        25
        """
        return max(int(self.epochs * self.prompts / self.batch), 1)

    def recipe(self) -> Recipe:
        """How the draft's weights are changed, as when it was first trained."""
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
    """Train `draft` on what `target` writes and save it to a new directory; its log. The loaded draft is changed."""
    written, kept = (folder.with_name(f"{folder.name}.{each}") for each in ("written", "kept"))
    sums = {"target": target.checksum, "draft": draft.checksum, "text": corpus.checksum}
    said = strict_json.dumps(sums | asdict(settings), sort_keys=True)
    if resume and (folder / model_directory.LOG).exists():
        log = model_directory.log_of(folder)
        was = {"target": log["target"]["checksum"], "draft": log["draft"]["checksum"], "text": log["corpus"]["checksum"]}
        model_directory.refuse_other(folder, was | log["settings"], sums | asdict(settings))
        return log
    model_directory.refuse_existing(folder)
    if not resume and (written.exists() or kept.exists()):
        there = written if written.exists() else kept
        raise ParameterError(f"{there} is of an alignment that was broken off; --resume goes on with it, or remove it")
    model_directory.same_tokens(target, draft)
    for each in (target, draft):
        if settings.length > each.positions:
            bound = f"prompt + tokens must be at most the {each.positions} positions of model {each.name}"
            raise ParameterError(f"{bound}, got {settings.prompt} + {settings.tokens}")
    tokens, held_out = draft.tokens(corpus.training), draft.tokens(corpus.held_out)
    training.enough("held-out text", held_out, settings.length)
    inputs = prompts(tokens, settings.prompts, settings.prompt, settings.seed)
    checked = prompts(held_out, min(settings.held_out, held_out.size // settings.prompt), settings.prompt, settings.seed)
    theirs = outputs(target, checked, settings.tokens)
    before = agreement(draft, theirs, settings.prompt) | make_model.worth(draft.model, held_out, settings.length)
    folder.parent.mkdir(parents=True, exist_ok=True)
    texts = _written(target, inputs, settings.tokens, written, said, report)
    log = _train(draft, texts, held_out, settings, kept, said, resume, report)
    model_directory.halved(draft.model)
    after = agreement(draft, theirs, settings.prompt)
    whole = make_model.about(draft.model, "aligned", command) | {
        "target": {"name": target.name, "checksum": target.checksum}, "draft": {"name": draft.name, "checksum": draft.checksum},
        "settings": asdict(settings), "agreement": _compared(before, after),
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        **make_model.worth(draft.model, held_out, settings.length), "held_out_loss_before": before["held_out_loss"],
        "written_tokens": int((_labels(texts, settings.prompt, draft) != IGNORED).sum()),
        "while_training": {"losses": log["losses"], "held_out": log["held_out"]}, "seconds": log["seconds"],
    }  # fmt: skip
    model_directory.save(draft.model, draft.tokenizer, whole, folder)
    written.unlink(missing_ok=True)  # somebody may have tidied up meanwhile: the model is saved
    return model_directory.log_of(folder)


def prompts(tokens: Tokens, count: int, length: int, seed: int) -> Tokens:
    """Pieces of a text from anywhere in it that do not overlap, shape (count, length)."""
    there = tokens.size // length
    if not 1 <= count <= there:
        raise ParameterError(f"prompts must be between 1 and the {there} pieces of {length} tokens that the text has, got {count}")
    order, _ = training.order_of(seed, 0, there, 0)
    return np.stack([tokens[place * length : (place + 1) * length] for place in order[:count]])


def outputs(loaded: Loaded, inputs: Tokens, tokens: int) -> Tokens:
    """What a model writes greedily behind each prompt, together with it, shape (prompts, prompt + tokens)."""
    return np.concatenate([_output(loaded, inputs[start : start + AT_ONCE], tokens) for start in range(0, len(inputs), AT_ONCE)])


def agreement(draft: Loaded, texts: Tokens, prompt: int) -> dict[str, Any]:
    """How often a draft's greedy token is the one that the target wrote, along the target's own texts up to their end.

    `hits` and `positions` are by text, shape (texts,).
    """
    import torch

    hits, positions = [], []
    for start in range(0, len(texts), AT_ONCE):
        group = texts[start : start + AT_ONCE]
        labels = _labels(group, prompt, draft)
        with torch.inference_mode():
            rows = torch.from_numpy(group).to(draft.model.device)
            guesses = draft.model(input_ids=rows[:, :-1], use_cache=False).logits[:, prompt - 1 :].argmax(-1).cpu().numpy()
        hits += (guesses == labels).sum(axis=1).tolist()
        positions += (labels != IGNORED).sum(axis=1).tolist()
    return {"hits": np.array(hits), "positions": np.array(positions)}


def _compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Both shares, and what was gained, with standard errors over texts: positions of one text are not independent."""
    positions = before["positions"]
    gained = after["hits"] - before["hits"]
    said: dict[str, Any] = {"prompts": len(positions), "positions": int(positions.sum())}
    for name, hits in (("before", before["hits"]), ("after", after["hits"]), ("gain", gained)):
        share = hits.sum() / positions.sum()
        spread = float(np.sqrt(((hits - share * positions) ** 2).sum())) / positions.sum()
        said |= {name: round(float(share), 5), f"{name}_error": round(spread, 5) if len(positions) > 1 else math.nan}
    return said


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
    """The target's texts behind all prompts, kept in a file as they are written."""
    from safetensors.numpy import save_file

    texts = np.empty((0, inputs.shape[1] + tokens), np.int64)
    if kept.exists():
        texts = kept_texts(kept, settings, count=len(inputs), length=texts.shape[1], vocabulary=target.vocabulary)
    last = time.perf_counter()
    while len(texts) < len(inputs):
        texts = np.concatenate([texts, _output(target, inputs[len(texts) : len(texts) + AT_ONCE], tokens)])
        if report is not None:
            report(len(texts), len(inputs), f"{target.name} writes")
        if len(texts) == len(inputs) or time.perf_counter() - last > training.KEEP_EVERY:
            with whole_files.whole(kept) as part:
                save_file({"texts": texts}, part, {"settings": settings})
            last = time.perf_counter()
    return texts


def kept_texts(kept: Path, settings: str, *, count: int, length: int, vocabulary: int) -> Tokens:
    """The texts that an alignment with these settings has kept: at most `count`, shape (texts, length)."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(kept)
        with safe_open(kept, framework="np") as file:
            there = (file.metadata() or {}).get("settings")
            held = file.get_slice("texts")
            shape, kind = tuple(held.get_shape()), held.get_dtype()
            fits = len(shape) == 2 and shape[0] <= count and shape[1] == length and kind == "I64"
            texts = file.get_tensor("texts") if fits else np.empty((0, length), np.int64)
    except (SafetensorError, OSError) as error:
        raise ParameterError(f"{kept.name} cannot be read, to go on from it: {model_directory.line(error)}; remove it") from None
    if there != settings:
        raise ParameterError(f"{kept.name} is of another alignment; give the same settings, or remove it and begin anew")
    if not fits or (texts < 0).any() or (texts >= vocabulary).any():
        bound = f"at most {count} texts of {length} whole numbers below the vocabulary={vocabulary}"
        raise ParameterError(f"{kept.name} must hold {bound}, got {kind} of shape {shape}; remove it and begin anew")
    return np.asarray(texts)


def _train(
    draft: Loaded,
    texts: Tokens,
    held_out: Tokens,
    settings: AlignmentSettings,
    kept: Path,
    said: str,
    resume: bool,
    report: Report | None,
) -> dict[str, Any]:
    import torch

    model, recipe, steps = draft.model, settings.recipe(), settings.steps
    labels = _labels(texts, settings.prompt, draft)
    model.train()

    def learn(step: int) -> Tensor:
        rows = _rows(step, settings)
        passed = model(input_ids=torch.from_numpy(texts[rows, :-1]).to(model.device), use_cache=False)
        wanted = torch.from_numpy(labels[rows]).to(model.device)
        logits = passed.logits[:, settings.prompt - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seen() -> float:
        loss = training.loss_of(model, held_out, settings.length, str(model.device), training.SEEN)
        model.train()
        return loss

    optimizers = training.optimizers_of(model, recipe)
    work = training.TrainingJob(model, optimizers, learn, seen, lambda step: recipe.rate_at(step, steps), steps, said)
    log = work.done(kept, resume=resume, report=report)
    model.eval()
    return log


def _rows(step: int, settings: AlignmentSettings) -> list[int]:
    """The texts of an update: all of them in each epoch, in another order."""
    rows = []
    for number in range(step * settings.batch, (step + 1) * settings.batch):
        epoch, place = divmod(number, settings.prompts)
        order, _ = training.order_of(settings.seed, epoch + 1, settings.prompts, 0)  # the order 0 chose the prompts
        rows.append(int(order[place]))
    return rows


def _labels(texts: Tokens, prompt: int, draft: Loaded) -> Tokens:
    """The tokens that were written, shape (texts, tokens); what stands behind the end of a text is left out."""
    written = texts[:, prompt:]
    end = draft.tokenizer.eos_token_id
    if end is None:
        return written
    ended = np.cumsum(written == end, axis=1) - (written == end)
    return np.where(ended > 0, IGNORED, written)
