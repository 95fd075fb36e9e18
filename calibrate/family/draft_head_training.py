"""Training of draft heads for a frozen model (`calibrate.decoders.eagle_and_medusa`): one EAGLE layer, or several Medusa heads.

EAGLE heads are trained with *training-time test* [Li2025]: pass j of a draft reads the head's own states of pass j - 1, so the head
learns from what it will read, and each draft position gets its loss. All windows make `draft_length` passes; in pass j a token
attends to the rows that it would find in decoding: those of the target's states up to j tokens before it, and one row of each later
pass. The tokens are those of the text. Medusa's head j learns the token j + 1 positions after the state that it reads [Cai2024].

Labels are the target's own distributions, as in [Li2025], because a draft is accepted where it agrees with the target; or the text.
Losses of draft position j have the weight `decay`^j, 0.8 in both publications' code. [Li2025] joins states of three layers; here
the head reads the last state, as the first EAGLE does.

[Li2025] Y. Li et al. EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test. arXiv:2503.01840.
[Cai2024] T. Cai et al. Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. ICML 2024,
arXiv:2401.10774, Section 2.2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.decoders import eagle_and_medusa
from calibrate.decoders.eagle_and_medusa import DraftHead
from calibrate.decoders.transformers_adapter import Decoder, decoder_of
from calibrate.family import exit_heads, head_files, model_directory, training
from calibrate.family.corpus import Corpus
from calibrate.family.exit_heads import HeadTrainingSettings
from calibrate.family.model_directory import Loaded
from calibrate.family.training import Report
from model.base import checks, strict_json
from model.base.checks import ParameterError
from model.methods.draft_model import MAX_DRAFT
from model.outcomes.intervals import wilson

if TYPE_CHECKING:
    import torch

    from calibrate.family.training import Tokens

    Tensor = torch.Tensor

SCHEMA = "decodesim.draft-heads/1"
EAGLE, MEDUSA = KINDS = ("eagle", "medusa")
_WITHIN = {EAGLE: ".", MEDUSA: ".blocks."}
"""Names of the matrices that Muon trains: all of an EAGLE head, and Medusa's blocks but not its output matrices."""
AT_ONCE = 2**23
"""Logits of one draft position that are in memory at a time."""


@dataclass(frozen=True)
class DraftHeadSettings(HeadTrainingSettings):
    """Settings of the training of draft heads, for a small text: Muon for the matrices of blocks, as the family's models.

    `draft_length` is the number of draft positions: passes of an EAGLE head that are trained, or Medusa's heads.
    """

    epochs: float = 0.5
    rate: float = 1e-2
    batch: int = 4
    length: int = 256
    warm_up: float = 0.05
    labels: str = "model"
    draft_length: int = 4
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("draft_length", self.draft_length, 1, MAX_DRAFT)
        checks.number("decay", self.decay, 0, 1)


def file_name(kind: str) -> str:
    """Name of the file of heads in a model's folder.

    >>> file_name("eagle")
    'eagle.safetensors'
    """
    checks.one_of("kind of draft heads", kind, KINDS)
    return f"{kind}.safetensors"


def train(
    loaded: Loaded, corpus: Corpus, kind: str, settings: DraftHeadSettings, path: Path, *, command: str = "", resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train draft heads of one kind and write them to a file; return the file's description."""
    checks.one_of("kind of draft heads", kind, KINDS)
    kept = path.with_name(f"{path.name}.kept")
    settings = replace(settings, length=min(settings.length, loaded.positions))
    described = {"model": loaded.checksum, "text": corpus.checksum, "kind": kind, **asdict(settings)}
    if resume and path.exists():
        there = about(path)
        was = {"model": there["model"], "text": there["corpus"]["checksum"], "kind": there["kind"], **there["settings"]}
        model_directory.refuse_other(path, was, described)
        return there
    model_directory.refuse_existing(path)
    if kept.exists() and not resume:
        raise ParameterError(f"{kept} is from an interrupted training; --resume continues it, or remove it")
    if settings.length <= settings.draft_length:
        raise ParameterError(f"length must be above draft_length={settings.draft_length}, got {settings.length}")
    target = decoder_of(loaded.model, loaded.name)
    check(loaded, target, kind)
    tokens, held_out = loaded.tokens(corpus.training), loaded.tokens(corpus.held_out)
    recipe = settings.recipe(tokens.size)
    steps = recipe.steps(tokens.size)
    training.check_length("held-out text", held_out, settings.length)
    modules = new_modules(target, kind, settings)

    def seen() -> float:
        rows = evaluate(target, modules, kind, settings, held_out, training.HELD_OUT_WINDOWS)
        return float(np.mean([row["loss"] for row in rows]))

    work = training.TrainingJob(
        modules, training.optimizers_of(modules, recipe, _WITHIN[kind]),
        lambda step: learn(target, modules, kind, settings, recipe.windows(tokens, step)), seen,
        lambda step: recipe.rate_at(step, steps), steps, strict_json.dumps(described, sort_keys=True),
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    log = work.done(kept, resume=resume, report=report)
    saved = {name: value.detach().half() for name, value in modules.state_dict().items()}
    model_directory.finite("heads in half precision", iter(saved.items()))
    modules.load_state_dict({name: value.float() for name, value in saved.items()})
    whole = {
        "schema": SCHEMA, "source": "measured", "kind": kind, "model": loaded.checksum, "name": loaded.name,
        "hidden": loaded.hidden, "vocabulary": loaded.vocabulary, "settings": asdict(settings),
        "parameters": sum(value.numel() for value in saved.values()),
        "results": evaluate(target, modules, kind, settings, held_out),
        "corpus": corpus.about() | {"tokens": int(tokens.size), "held_out_tokens": int(held_out.size)},
        "seconds": log["seconds"], "versions": model_directory.versions(), "command": command,
    }  # fmt: skip
    head_files.write(path, saved, whole)
    return about(path)


def about(path: Path) -> dict[str, Any]:
    """Return the description in a file of draft heads."""
    described = head_files.about(path, SCHEMA, " --kind eagle")
    checks.one_of(f"kind of {path.name}", described.get("kind"), KINDS)
    return described


def load(path: Path, target: Decoder) -> DraftHead:
    """Return the draft heads of a file, if they belong to the target, which was loaded from files."""
    described = about(path)
    head_files.require_model(path, described, target.checksum)
    kind, settings = described["kind"], described.get("settings")
    count = settings.get("draft_length") if isinstance(settings, dict) else None
    checks.whole(f"draft_length of {path.name}", count, 1, MAX_DRAFT)
    modules = new_modules(target, kind, DraftHeadSettings(draft_length=int(count)))  # type: ignore[arg-type]
    shapes = {name: tuple(value.shape) for name, value in modules.state_dict().items()}
    names = ", ".join(sorted({name.partition(".")[0] for name in shapes}))
    found = head_files.tensors(path, shapes, f"of {names}")
    for name in shapes:
        if name not in found:
            raise ParameterError(f"{path.name} lacks {name} of {kind} heads; {head_files.AGAIN}")
    modules.load_state_dict(found)
    return eagle_and_medusa.HEADS[kind](target, modules)


def new_modules(target: Decoder, kind: str, settings: DraftHeadSettings) -> Any:
    """Return untrained heads in float32; the random weights of an EAGLE head depend on the seed."""
    import torch

    if kind == MEDUSA:
        return eagle_and_medusa.medusa_modules(target, settings.draft_length).to(target.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return eagle_and_medusa.eagle_modules(eagle_and_medusa.eagle_size(target)).to(target.device)


def check(loaded: Loaded, target: Decoder, kind: str) -> None:
    """Refuse a model whose head does not read its last state: draft heads read and predict that state."""
    import torch

    if kind == MEDUSA:
        exit_heads.check(loaded)
        return
    tokens = torch.arange(8, device=loaded.model.device)[None] % loaded.vocabulary
    with torch.no_grad():
        passed = loaded.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        last = passed.hidden_states[-1]
        fits = last.shape[-1] == loaded.hidden and torch.allclose(target._projected(last), passed.logits, rtol=1e-3, atol=1e-3)
    if not fits:
        raise ParameterError(f"the output of model {loaded.name} must be that of its head for its last state, to train draft heads")


# --- Losses --------------------------------------------------------------------------------------------------------------


def learn(target: Decoder, modules: Any, kind: str, settings: DraftHeadSettings, windows: Tokens) -> Tensor:
    """Add the gradients of windows, shape (windows, length + 1); return the loss, summed over positions [nats per token]."""
    import torch

    length = windows.shape[1] - 1
    total = torch.zeros((), device=target.device)
    weights = [settings.decay**index for index in range(settings.draft_length)]
    with _frozen(target.full):
        for group in _groups(windows, target.vocabulary):
            rows = torch.from_numpy(group).to(target.device)
            states, own = of_target(target, rows[:, :-1])
            loss = torch.zeros((), device=target.device)
            for index, logits in enumerate(positions(target, modules, kind, rows[:, :-1], states, settings.draft_length)):
                wanted = own[:, index:].softmax(-1) if settings.labels == "model" else rows[:, index + 1 :]
                wanted = wanted.flatten(0, 1)
                each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
                loss = loss + weights[index] * each / (len(windows) * (length - index))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / sum(weights)
    return total


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Compute no gradients of a model's weights within the block: only the heads' own are trained."""
    were = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in were:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in were:
            parameter.requires_grad_(True)


def positions(
    target: Decoder, modules: Any, kind: str, tokens: Tensor, states: Tensor, draft_length: int
) -> Iterator[Tensor]:
    """Yield the logits of each draft position j, of shape (windows, tokens - j, vocabulary): those after tokens j, j + 1, ...

    The draft begins after the token j positions before. `states` are the target's after its norm, shape (windows, tokens, hidden).
    """
    if kind == MEDUSA:
        yield from _medusa_positions(modules, _before(states), draft_length)
    else:
        yield from _eagle_positions(target, modules, tokens, _before(states), draft_length)


def _before(states: Tensor) -> Tensor:
    """Return the states before all tokens; that before the first is zero."""
    import torch

    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)


def _medusa_positions(modules: Any, before: Tensor, draft_length: int) -> Iterator[Tensor]:
    import torch

    for index, (block, head) in enumerate(zip(modules["blocks"], modules["heads"], strict=True)):
        if index == draft_length:
            return
        read = before[:, : before.shape[1] - index]
        yield head(read + torch.nn.functional.silu(block(read)))


def _eagle_positions(target: Decoder, modules: Any, tokens: Tensor, before: Tensor, draft_length: int) -> Iterator[Tensor]:
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    layer, width = modules["layer"], tokens.shape[1]
    words = target.embedding(tokens).detach()
    places = torch.arange(width, device=tokens.device)
    turned = LlamaRotaryEmbedding(eagle_and_medusa._layer_config(eagle_and_medusa.eagle_size(target))).to(tokens.device)
    extras = turned(words, position_ids=places[None])
    rows, distance = PassRows(), places[:, None] - places[None]
    for index in range(draft_length):
        # In pass j a token attends to rows of pass 0 up to j tokens before it, then to one row of each pass: its own is the last.
        sees = torch.cat([distance >= index, *[distance == index - each for each in range(1, index + 1)]], dim=1)
        joined = modules["fc"](torch.cat((words, before), dim=-1))
        state = layer(
            joined, attention_mask=sees[None, None], position_ids=places[None], position_embeddings=extras, past_key_values=rows
        )
        normed = target._normed(state)
        yield target._projected(normed)[:, index:]
        before = _before(normed)


class PassRows:
    """Keys and values of all passes of a training step, with their gradients; the library's layer takes it as its cache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the rows of a pass and return all, as the library's attention expects."""
        import torch

        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of rows; named by the library."""
        return sum(each.shape[2] for each in self.keys)


def of_target(target: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's last normed states and its logits."""
    import torch

    with torch.no_grad():
        passed = target.full(input_ids=tokens, output_hidden_states=True, use_cache=False)
    return passed.hidden_states[-1], passed.logits


def _groups(windows: Tokens, vocabulary: int) -> Iterator[Tokens]:
    at_once = max(AT_ONCE // (windows.shape[1] * vocabulary), 1)
    return (windows[start : start + at_once] for start in range(0, len(windows), at_once))


# --- Agreement -----------------------------------------------------------------------------------------------------------


def evaluate(
    target: Decoder, modules: Any, kind: str, settings: DraftHeadSettings, tokens: Tokens, windows: int | None = None
) -> list[dict[str, Any]]:
    """Evaluate heads along a text; return a row for each draft position, from 1.

    `loss` [nats per token] is that of the settings' labels. `rate` is how often the head's greedy token is the target's, where it
    was at all earlier positions of the same draft, with its 95 % interval; `tokens` is the number of trials. Both read the text.
    """
    import torch

    length = settings.length
    count = (tokens.size - 1) // length
    chosen = np.arange(count) if windows is None or windows >= count else np.linspace(0, count - 1, windows).astype(int)
    losses, hits, trials = (np.zeros(settings.draft_length) for _ in range(3))
    every = np.stack([tokens[window * length : (window + 1) * length + 1] for window in chosen])
    for group in _groups(every, target.vocabulary):
        rows = torch.from_numpy(group).to(target.device)
        with torch.no_grad():
            states, own = of_target(target, rows[:, :-1])
            greedy = own.argmax(-1)
            kept = torch.ones_like(greedy, dtype=torch.bool)
            for index, logits in enumerate(positions(target, modules, kind, rows[:, :-1], states, settings.draft_length)):
                wanted = own[:, index:].softmax(-1) if settings.labels == "model" else rows[:, index + 1 :]
                losses[index] += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))) * len(group)
                kept = kept[:, : length - index]
                trials[index] += int(kept.sum())
                kept = kept & (logits.argmax(-1) == greedy[:, index:])
                hits[index] += int(kept.sum())
    rates = hits / np.maximum(trials, 1)
    low, high = wilson(rates, np.maximum(trials, 1))
    return [
        {
            "position": index + 1, "loss": round(losses[index] / len(chosen), 5), "rate": round(rates[index], 5),
            "low": round(float(low[index]), 5), "high": round(float(high[index]), 5), "tokens": int(trials[index]),
        }
        for index in range(settings.draft_length)
    ]  # fmt: skip
