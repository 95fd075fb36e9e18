"""Training of small models of the Llama architecture, on tokens in memory: minutes on a GPU, an hour on a CPU core.

Matrices are trained with Muon, the rest with AdamW, both of torch. The learning rate rises, and then decreases linearly to 0.
Windows of the text are read in a random order from the seed, which differs between epochs. The state is saved regularly: `train`
with `resume` continues from it and ends with the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from model.base import bounded_files, checks, strict_json, typed_values
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Tensor = torch.Tensor
    Tokens = NDArray[np.int64]

HEAD_DIM = 32
MOST_EPOCHS = 1000.0
SAVE_EVERY = 120.0
"""Time between two saved states [s]."""
HELD_OUT_WINDOWS = 64
"""Windows of the held-out text for the loss during training; the final loss uses all windows."""


@dataclass(frozen=True)
class Size:
    """Size of a decoder: `layers` layers of widths `hidden` and `ffn`, with heads of 32."""

    layers: int
    hidden: int
    ffn: int

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("hidden", self.hidden, HEAD_DIM)
        checks.whole("ffn", self.ffn, 1)
        if self.hidden % HEAD_DIM:
            raise ParameterError(f"hidden must be a multiple of {HEAD_DIM}, the size of a head, got {self.hidden}")

    def config(self, vocabulary: int, positions: int) -> Any:
        """Return the configuration of transformers."""
        from transformers import LlamaConfig

        heads = self.hidden // HEAD_DIM
        return LlamaConfig(
            vocab_size=vocabulary, hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=self.layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip


FAMILY = {"target": Size(12, 160, 432), "medium": Size(5, 128, 344), "draft": Size(2, 96, 256)}


@dataclass(frozen=True)
class Recipe:
    """Settings of a training: windows of `length` tokens, `batch` at a time, the whole text `epochs` times."""

    epochs: float = 3.0
    batch: int = 8
    length: int = 512
    rate: float = 6e-3
    warm_up: int = 100
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        checks.number("epochs", self.epochs, 0, MOST_EPOCHS)
        for name in ("batch", "length"):
            checks.whole(name, getattr(self, name), 1)
        checks.number("rate", self.rate, 0)
        checks.whole("warm_up", self.warm_up, 0)
        checks.number("weight_decay", self.weight_decay, 0)
        checks.whole("seed", self.seed, 0, 2**63 - 1)  # the range of torch's and numpy's generators

    def steps(self, tokens: int) -> int:
        """Return the number of updates for a text of `tokens` tokens."""
        windows = (tokens - 1) // self.length
        if windows < self.batch:
            raise ParameterError(f"a text must have at least batch*length+1={self.batch * self.length + 1} tokens, got {tokens}")
        return max(int(self.epochs * windows / self.batch), 1)

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of an update, counted from 0.

        >>> recipe = Recipe(rate=1.0, warm_up=10)
        >>> [recipe.rate_at(step, 110) for step in (0, 9, 10, 60, 109)]
        [0.1, 1.0, 1.0, 0.5, 0.01]
        """
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        return self.rate * (steps - step) / max(steps - self.warm_up, 1)

    def windows(self, tokens: Tokens, step: int) -> Tokens:
        """Return the windows of an update, shape (batch, length + 1): the last token of each is only predicted."""
        count = (tokens.size - 1) // self.length
        starts = []
        for number in range(step * self.batch, (step + 1) * self.batch):
            epoch, index = divmod(number, count)
            order, start = order_of(self.seed, epoch, count, (tokens.size - 1) % self.length)
            starts.append(start + order[index] * self.length)
        return np.stack([tokens[start : start + self.length + 1] for start in starts])


def order_of(seed: int, epoch: int, count: int, room: int) -> tuple[Tokens, int]:
    """Return the random order of an epoch's windows, and the token at which the first of them begins."""
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return random.permutation(count), int(random.integers(room + 1))


Report = Callable[[int, int, str], None]


def train(
    model: Any, tokens: Tokens, held_out: Tokens, recipe: Recipe, kept: Path, *, device: str = "cpu", resume: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Train a model of transformers in place; return the log. The state is in the file `kept` until the end.

    `tokens` and `held_out` have shape (tokens,).
    """
    import torch

    steps = recipe.steps(tokens.size)
    check_length("held-out text", held_out, recipe.length)
    model.to(device).train()

    def learn(step: int) -> Tensor:
        loss = _loss(model, torch.from_numpy(recipe.windows(tokens, step)).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def seen() -> float:
        loss = loss_of(model, held_out, recipe.length, device, HELD_OUT_WINDOWS)
        model.train()
        return loss

    settings = strict_json.dumps({**asdict(recipe), "tokens": int(tokens.size)}, sort_keys=True)
    work = TrainingJob(model, optimizers_of(model, recipe), learn, seen, lambda step: recipe.rate_at(step, steps), steps, settings)
    log = work.done(kept, resume=resume, report=report)
    model.eval()
    return log


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """A resumable loop of `steps` updates.

    Parameters
    ----------
    module, optimizers
        The trained module and its optimizers.
    learn
        Adds the gradients of a step, counted from 0, to the weights; returns the detached loss.
    seen
        Returns the current loss on held-out text.
    rate
        Returns the learning rate of a step.
    settings
        Everything that determines the result, as a string: a saved state resumes only with the same settings.
    clip
        Largest norm of all gradients together; None for no bound.
    """

    module: Any
    optimizers: list[Any]
    learn: Callable[[int], Tensor]
    seen: Callable[[], float]
    rate: Callable[[int], float]
    steps: int
    settings: str
    clip: float | None = 1.0

    def done(self, kept: Path, *, resume: bool = False, report: Report | None = None) -> dict[str, Any]:
        """Run the loop; return the log of losses and seconds. The state is in the file `kept`, which is removed at the end."""
        import torch

        log: dict[str, Any] = {"losses": [], "held_out": []}
        first, before = 0, 0.0
        if resume and kept.exists():
            first, before, log = _restore(kept, self.module, self.optimizers, self.settings)
        begun = time.perf_counter()
        last_kept, recent = begun, []
        for step in range(first, self.steps):
            loss = self.learn(step)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.rate(step)
                optimizer.step()
                optimizer.zero_grad()
            recent.append(loss)
            if len(recent) == 50 or step + 1 == self.steps:
                log["losses"].append([step + 1, round(float(torch.stack(recent).mean()), 4)])
                _finite(log["losses"][-1][1], step)
                recent = []
            if report is not None:
                report(step + 1, self.steps, f"loss {log['losses'][-1][1]:.3f}" if log["losses"] else "")
            if time.perf_counter() - last_kept > SAVE_EVERY:
                log["held_out"].append([step + 1, round(self.seen(), 4)])
                _finite(log["held_out"][-1][1], step)  # never save such a state
                seconds = before + time.perf_counter() - begun
                _keep(kept, self.module, self.optimizers, self.settings, step + 1, seconds, log)
                last_kept = time.perf_counter()
        log["seconds"] = round(before + time.perf_counter() - begun, 1)
        kept.unlink(missing_ok=True)
        return log


def _finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise ParameterError(f"the loss must be a number, and is {loss} after step {step + 1}: take a lower rate")


def check_length(what: str, tokens: Tokens, length: int) -> None:
    """Refuse a text without one whole window."""
    if tokens.size <= length:
        raise ParameterError(f"{what} must have at least length+1={length + 1} tokens, got {tokens.size}; give a longer one")


def loss_of(model: Any, tokens: Tokens, length: int, device: str = "cpu", windows: int | None = None) -> float:
    """Return the mean cross-entropy [nats per token] over all windows of a text, or over `windows` evenly spaced ones."""
    import torch

    count = (tokens.size - 1) // length
    places = np.arange(count) if windows is None or windows >= count else np.linspace(0, count - 1, windows).astype(int)
    total = 0.0
    model.eval()
    with torch.inference_mode():
        for group in np.array_split(places, max(len(places) // 16, 1)):
            chosen = np.stack([tokens[place * length : (place + 1) * length + 1] for place in group])
            total += float(_loss(model, torch.from_numpy(chosen).to(device))) * len(group)
    return total / len(places)


def _loss(model: Any, windows: Tensor) -> Tensor:
    import torch

    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def optimizers_of(model: Any, recipe: Recipe, within: str = ".layers.") -> list[Any]:
    """Return Muon for the matrices whose names have the part `within`, by default those within layers, and AdamW for the rest."""
    import torch

    inner: list[Any] = []
    outer: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (inner if parameter.ndim == 2 and within in f".{name}" else outer).append(parameter)
    adam = torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    if not inner:  # an architecture with other names of layers
        return [adam]
    muon: Any = torch.optim.Muon(inner, lr=0.0, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adam]


def _state(model: Any, optimizers: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the state of a training, by name."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{number}.{index}.{key}", value


def _keep(kept: Path, model: Any, optimizers: list[Any], settings: str, step: int, seconds: float, log: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.detach().cpu().contiguous() for name, value in _state(model, optimizers)}
    about = {"settings": settings, "step": str(step), "seconds": str(seconds), "log": strict_json.dumps(log)}
    part = kept.with_name(f"{kept.name}.part")
    save_file(tensors, part, about)
    part.replace(kept)


class _Log(TypedDict):
    """Log of a training: steps, and losses at them [nats per token]."""

    losses: list[list[float]]
    held_out: list[list[float]]


_STATES = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}
"""State of an optimizer for each parameter: a number, or a tensor of the parameter's shape."""


def _check_state(kept: Path, tensors: Mapping[str, Tensor], optimizers: list[Any]) -> None:
    """Refuse an incomplete state, or one of other parameters."""
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            for name in _STATES[type(optimizer).__name__]:
                found = tensors.get(f"optimizer.{number}.{index}.{name}")
                shape = () if name == "step" else tuple(parameter.shape)
                if found is None or not found.is_floating_point() or tuple(found.shape) != shape:
                    bound = f"optimizer.{number}.{index}.{name} must be numbers of shape {shape}"
                    got = "none" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
                    raise ParameterError(f"{kept.name}: {bound}, got {got}; remove it and start again")


def _restore(kept: Path, model: Any, optimizers: list[Any], settings: str) -> tuple[int, float, dict[str, Any]]:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        bounded_files.check_regular(kept)
        with safe_open(kept, framework="pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise ParameterError(f"{kept.name} cannot be read for --resume: {why}; remove it and start again") from None
    if not about or not {"settings", "step", "seconds", "log"} <= about.keys():
        raise ParameterError(f"{kept.name} is no saved state of a training; remove it and start again")
    if about["settings"] != settings:
        raise ParameterError(
            f"{kept.name} is from a training with other settings: {about['settings']}, now asked for {settings}; give the same"
            " settings, or remove it and start again"
        )
    try:
        step, seconds, log = int(about["step"]), float(about["seconds"]), bounded_files.json_of(about["log"])
        checks.whole("step", step, 1)
        checks.number("seconds", seconds, 0)
        typed_values.check(log, _Log, "log")
    except ValueError as error:
        raise ParameterError(f"{kept.name} cannot be read for --resume: {error}; remove it and start again") from None
    for name, parameter in model.named_parameters():
        shape = tuple(tensors[f"model.{name}"].shape) if f"model.{name}" in tensors else None
        if shape != tuple(parameter.shape):
            raise ParameterError(f"{kept.name} is from another model: {name} must have shape {tuple(parameter.shape)}, got {shape}")
    _check_state(kept, tensors, optimizers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            prefix = f"optimizer.{number}.{index}."
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            # Step counters stay on the CPU; tensors of the weights' shape move to their device.
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if value.ndim else value for key, value in state.items()
            }
    return step, seconds, log
