"""Decision logs (`model.logs.position_log`): the target writes, and all layers, heads and the draft are asked what they would have
said.

Texts of one prompt length are written together, a column at a time; the states of all layers are kept as they are made, so what
they say costs heads and no pass. The draft reads the finished texts in one pass.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.decode import real_decoding
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.family import model_directory
from calibrate.interpreters.in_one_process import Luck, Sampling, drawn
from model.base import checks, json_and_parquet, strict_json
from model.base.checks import ParameterError
from model.logs.position_log import DRAFT, TARGET, PositionLog, save
from model.steps import Batch, LayerSpan, ended

if TYPE_CHECKING:
    import polars as pl
    import torch

    Tensor = torch.Tensor

GROUP = 50
"""Texts that are written together."""
PIECE = 1024
"""Positions whose logits are held at once."""
Report = Callable[[int, int, str], None]


@dataclass
class Spent:
    """Where the time of a log went [s]."""

    writing: float = 0.0
    heads: float = 0.0
    trained_heads: float = 0.0
    draft: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.writing + self.heads + self.trained_heads + self.draft


_PART = 1


def make(
    out: Path, said: Mapping[str, Any], target: Decoder, prompts: Sequence[Sequence[int]], tokens: int, *,
    draft: Decoder | None = None, sampling: Sampling | None = None, seed: int = 0, group: int = GROUP, resume: bool = False,
    report: Report | None = None,
) -> tuple[PositionLog, Spent]:
    """Log the texts behind all prompts, and write the log to `out`. What is done is kept in parts beside it until all is.

    `said` is where the log is from; parts of a log that says anything else are not gone on from.
    """
    import polars as pl

    if out.suffix != ".json":
        raise ParameterError(f"out must end in .json, beside which the table comes to lie, got {out.name}")
    for each in (out, out.with_suffix(".parquet")):
        if each.exists():
            raise ParameterError(f"out must be a new file, and {each.name} is there; give another, or remove it")
    model_directory.refuse_unwritable(out)
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    if not prompts or not all(prompts):
        raise ParameterError("prompts must be at least one, and each of at least one token")
    for prompt in prompts:  # all of them before the first is decoded
        real_decoding.check_text({"target": target, **({} if draft is None else {"draft": draft})}, prompt, tokens)
    folder = out.with_suffix(".parts")
    if folder.exists() and not resume:
        raise ParameterError(f"{folder.name} holds a log that was broken off; go on with --resume, or remove it")
    spent, found = Spent(), []
    numbered = groups(prompts, group)
    for index, numbers in enumerate(numbered):
        path = folder / f"{index:05}.json"
        if path.exists():
            table = _kept(path, said)
        else:
            own = {number: prompts[number] for number in numbers}
            table = logged(target, own, tokens, draft=draft, sampling=sampling, seed=seed, spent=spent)
            json_and_parquet.save(path, {"schema_version": _PART, "said": said}, table)
        found.append(table)
        if report is not None:
            report(sum(map(len, numbered[: index + 1])), len(prompts), "")
    log = PositionLog(pl.concat(found).sort("prompt", "position"), said)
    save(log, out)
    shutil.rmtree(folder)
    return log, spent


def _kept(path: Path, said: Mapping[str, Any]) -> pl.DataFrame:
    """The rows of a part that was logged before, on whatever day, if it is of the same log."""
    folder = path.parent.name
    try:
        before, table = json_and_parquet.load(path, ("said",), "part of a decision log", _PART, "log it again")
        if not isinstance(before["said"], dict):
            raise ParameterError(f"said must be a table of keys, got {checks.shown(before['said'])}")
    except ParameterError as error:
        raise ParameterError(f"{folder}/{path.name}: {error}; remove {folder}/{path.name}, and --resume logs it again") from None
    then, told = before["said"], json.loads(strict_json.dumps(said))
    for key in {**then, **told}:
        if key != "date" and then.get(key) != told.get(key):
            raise ParameterError(f"{folder} holds parts of another log: {key} differs; remove it, or ask for the same")
    return table


def groups(prompts: Sequence[Sequence[int]], size: int = GROUP) -> list[list[int]]:
    """Numbers of prompts that are written together: of one length, in their order."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [numbers[start : start + size] for numbers in by_length.values() for start in range(0, len(numbers), size)]


def logged(
    target: Decoder, prompts: Mapping[int, Sequence[int]], tokens: int, *, draft: Decoder | None = None,
    sampling: Sampling | None = None, seed: int = 0, spent: Spent | None = None,
) -> pl.DataFrame:
    """The rows of texts behind prompts of one length, by their numbers; each ends with the token that ends texts, if it comes.

    Greedy, or with `sampling` drawn, by luck that the seed and the text's number decide.
    """
    import torch

    checks.whole("tokens", tokens, 1)
    spent = Spent() if spent is None else spent
    if draft is not None and draft.vocabulary != target.vocabulary:
        sizes = f"target {target.vocabulary}, draft {draft.vocabulary}"
        raise ParameterError(f"models must have one vocabulary, got {sizes} tokens; draft with a model of the same tokenizer")
    with torch.inference_mode():
        begun = time.perf_counter()
        written, states = _written(target, prompts, tokens, sampling, seed)
        spent.writing += time.perf_counter() - begun
        # From here on rows are positions, text by text; what follows the end of a text is left out.
        lengths = [len(ended(text, target.ends)) for text in written]
        width = len(written[0])  # fewer than asked for where all texts have ended before
        rows = torch.cat([torch.arange(length) + number * width for number, length in enumerate(lengths)]).to(target.device)
        chosen = torch.tensor(written, device=target.device).flatten()[rows]
        states = [each.reshape(-1, each.shape[-1])[rows] for each in states]
        found: dict[str, Any] = {
            "prompt": np.repeat([*prompts], lengths), "position": np.concatenate([np.arange(length) for length in lengths]),
            "token": chosen.cpu().numpy(),
        }  # fmt: skip
        found |= _by_layer(target, states, chosen, spent)
        if draft is not None:
            begun = time.perf_counter()
            found |= _of_draft(target, draft, [*prompts.values()], written, states[-1], rows, chosen, lengths, sampling)
            spent.draft += time.perf_counter() - begun
    return _table(found)


def _written(
    target: Decoder, prompts: Mapping[int, Sequence[int]], tokens: int, sampling: Sampling | None, seed: int
) -> tuple[list[list[int]], list[Tensor]]:
    """The texts, each of so many tokens, and the states before the first layer and behind each: shapes (texts, tokens, hidden)."""
    import torch

    texts = [list(prompt) for prompt in prompts.values()]
    layers, numbers = LayerSpan(0, target.layers), tuple(range(len(prompts)))
    (width,) = {len(text) for text in texts}
    lucks = [Luck(seed, number) for number in prompts]
    rows = target.rows()
    if width > 1:
        tokens_before = tuple(token for text in texts for token in text[:-1])
        target.run(tokens_before, 0, layers, rows, batch=Batch.uniform(numbers, 0, width - 1))
    columns: list[list[Tensor]] = []
    last = tuple(text[-1] for text in texts)
    for at in range(width - 1, width - 1 + tokens):
        seen: list[Tensor] = []
        state = target.run(last, at, layers, rows, batch=Batch.uniform(numbers, at), seen=seen)
        columns.append([*seen, state])
        logits = target.common(state)
        if sampling is None:
            last = tuple(logits.argmax(dim=-1).tolist())
        else:
            scores = logits.double().cpu().numpy()
            coins = [luck.draw("target: sample", at + 1) for luck in lucks]
            last = tuple(drawn(sampling.law(row), coin) for row, coin in zip(scores, coins, strict=True))
        for text, token in zip(texts, last, strict=True):
            text.append(token)
        if target.ends and all(any(end in text[width:] for end in target.ends) for text in texts):
            break
    whole = [torch.stack([column[layer] for column in columns], dim=1) for layer in range(target.layers + 1)]
    return [text[width:] for text in texts], whole


def _by_layer(target: Decoder, states: list[Tensor], chosen: Tensor, spent: Spent) -> dict[str, Any]:
    """What layers say of the tokens: arrays (rows, layers)."""
    import torch

    shape = len(chosen), target.layers
    found = {
        "rank_common": np.zeros(shape, np.int32), "rank_trained": np.zeros(shape, np.int32),
        "confidence": np.zeros(shape, np.float32), "saturation": np.zeros(shape, np.float32),
    }  # fmt: skip
    for layer in range(1, target.layers + 1):
        begun = time.perf_counter()
        before, behind = states[layer - 1], states[layer]
        found["saturation"][:, layer - 1] = torch.cosine_similarity(before.float(), behind.float(), dim=-1).cpu().numpy()
        for piece in _pieces(len(chosen)):
            logits = target.common(behind[piece]).float()
            found["rank_common"][piece, layer - 1] = _ranks(logits, chosen[piece])
            found["confidence"][piece, layer - 1] = torch.exp(logits.amax(-1) - logits.logsumexp(-1)).cpu().numpy()
        now = time.perf_counter()
        spent.heads += now - begun
        if layer in target.heads:
            for piece in _pieces(len(chosen)):
                found["rank_trained"][piece, layer - 1] = _ranks(target.logits(behind[piece], layer).float(), chosen[piece])
            spent.trained_heads += time.perf_counter() - now
    # Behind the last layer there is but one head.
    if target.heads:
        found["rank_trained"][:, -1] = found["rank_common"][:, -1]
    return found


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE))


def _ranks(logits: Tensor, tokens: Tensor) -> Any:
    """The place of tokens among all, from 1: of equals the first comes first."""
    import torch

    own = logits.gather(1, tokens[:, None])
    above = (logits > own).sum(-1)
    ties = (logits == own).sum(-1)
    if bool((ties > 1).any()):
        places = torch.arange(logits.shape[1], device=logits.device)
        above = above + ((logits == own) & (places < tokens[:, None])).sum(-1)
    return (above + 1).cpu().numpy()


def _of_draft(
    target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], written: list[list[int]], states: Tensor, rows: Tensor,
    chosen: Tensor, lengths: list[int], sampling: Sampling | None,
) -> dict[str, Any]:
    """What the draft says along the texts, and the target of the draft's tokens: arrays (rows,)."""
    width, tokens = len(prompts[0]), len(written[0])
    whole = tuple(token for prompt, text in zip(prompts, written, strict=True) for token in [*prompt, *text[:-1]])
    batch = Batch.uniform(tuple(range(len(written))), 0, width + tokens - 1)
    made = draft.run(whole, 0, LayerSpan(0, draft.layers), draft.rows(), batch=batch)
    made = made.view(len(written), width + tokens - 1, -1)[:, width - 1 :].reshape(len(written) * tokens, -1)[rows]
    names = [name for name in DRAFT if name not in ("draft_token", "accepted")]
    found: dict[str, Any] = {name: np.zeros(len(chosen), np.float32) for name in names}
    found["draft_token"] = np.zeros(len(chosen), np.int64)
    for piece in _pieces(len(chosen)):
        for name, values in _compared(target.common(states[piece]), draft.common(made[piece]), chosen[piece], sampling).items():
            found[name][piece] = values
    agrees = found["draft_token"] == chosen.cpu().numpy()
    found["accepted"] = np.concatenate([_survivors(part) for part in np.split(agrees, np.cumsum(lengths)[:-1])])
    return found


def _compared(target: Tensor, draft: Tensor, tokens: Tensor, sampling: Sampling | None) -> dict[str, Any]:
    """Chances of the target's and of the draft's tokens under both, from logits of shape (rows, vocabulary)."""
    import torch

    best = draft.argmax(-1)
    raw_p, raw_q = torch.log_softmax(target.double(), -1), torch.log_softmax(draft.double(), -1)
    p, q = raw_p.exp(), raw_q.exp()
    if sampling is not None and sampling != Sampling():
        scores = (target.double().cpu().numpy(), draft.double().cpu().numpy())
        p, q = (torch.from_numpy(np.stack([sampling.law(row) for row in each])).to(p.device) for each in scores)

    def at(chances: Tensor, where: Tensor) -> Any:
        return chances.gather(1, where[:, None])[:, 0].cpu().numpy()

    return {
        "draft_token": best.cpu().numpy(), "q_token": at(q, tokens), "p_token": at(p, tokens), "q_draft": at(q, best),
        "p_draft": at(p, best), "overlap": torch.minimum(p, q).sum(-1).cpu().numpy(),
        "draft_confidence": raw_q.amax(-1).exp().cpu().numpy(), "distance": -at(raw_p, best),
    }  # fmt: skip


def _survivors(agrees: Any) -> Any:
    """How many agree from each position on, one behind the other.

    >>> _survivors(np.array([True, True, False, True])).tolist()
    [2, 1, 0, 1]
    """
    found = np.zeros(agrees.size, np.int32)
    run = 0
    for place in range(agrees.size - 1, -1, -1):
        run = run + 1 if agrees[place] else 0
        found[place] = run
    return found


def _table(found: Mapping[str, Any]) -> pl.DataFrame:
    import polars as pl

    kinds = {"prompt": pl.Int32, "position": pl.Int32, "token": pl.Int32, "draft_token": pl.Int32}
    order = [name for name in (*TARGET, *DRAFT) if name in found]
    return pl.DataFrame([
        pl.Series(name, found[name]) if name not in kinds else pl.Series(name, found[name]).cast(kinds[name]) for name in order
    ])  # fmt: skip
