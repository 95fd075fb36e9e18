"""Position logs (`model.logs.position_log`): the target generates, and all layers, heads and the draft model predict each token.

Sequences with prompts of one length are generated as a batch, one token each at a time. The hidden states of all layers are kept,
so predictions of layers cost only heads. The draft model reads the finished sequences in one pass.
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
from calibrate.interpreters.in_one_process import RandomDraws, Sampling, token_at
from model.base import checks, json_and_parquet, strict_json
from model.base.checks import ParameterError
from model.logs.position_log import COLUMNS, DRAFT, PositionLog, save
from model.steps import Batch, LayerSpan, ended

if TYPE_CHECKING:
    import polars as pl
    import torch

    Tensor = torch.Tensor

GROUP = 50
"""Most sequences of a batch."""
PIECE = 256
"""Most positions whose logits are in memory at once: few enough to stay in the cache of a processor core."""
Report = Callable[[int, int, str], None]


@dataclass
class LogSeconds:
    """Seconds of the parts of a log."""

    writing: float = 0.0
    heads: float = 0.0
    trained_heads: float = 0.0
    draft: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts [s]."""
        return self.writing + self.heads + self.trained_heads + self.draft


_PART = 1


def write_log(
    out: Path, description: Mapping[str, Any], target: Decoder, prompts: Sequence[Sequence[int]], tokens: int, *,
    draft: Decoder | None = None, sampling: Sampling | None = None, seed: int = 0, group: int = GROUP, resume: bool = False,
    report: Report | None = None,
) -> tuple[PositionLog, LogSeconds]:
    """Log sequences for all prompts, and write the log to `out`.

    Finished batches are kept in a folder next to `out` until all are done. `description` goes into the log's header; kept
    parts with another description are refused.
    """
    import polars as pl

    if out.suffix != ".json":
        raise ParameterError(f"out must end in .json (the table goes to .parquet), got {out.name}")
    for each in (out, out.with_suffix(".parquet")):
        if each.exists():
            raise ParameterError(f"out must be a new file, and {each.name} is there; give another, or remove it")
    model_directory.refuse_unwritable(out)
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    if not prompts or not all(prompts):
        raise ParameterError("prompts must hold at least one prompt, and each at least one token")
    for prompt in prompts:  # check all before decoding the first
        real_decoding.check_prompt({"target": target, **({} if draft is None else {"draft": draft})}, prompt, tokens)
    folder = out.with_suffix(".parts")
    if folder.exists() and not resume:
        raise ParameterError(f"{folder.name} holds an interrupted log; resume with --resume, or remove it")
    spent, found = LogSeconds(), []
    numbered = groups(prompts, group)
    for index, numbers in enumerate(numbered):
        path = folder / f"{index:05}.json"
        if path.exists():
            table = _kept(path, description)
        else:
            batch = {number: prompts[number] for number in numbers}
            table = log_rows(target, batch, tokens, draft=draft, sampling=sampling, seed=seed, spent=spent)
            json_and_parquet.save(path, {"schema_version": _PART, "said": description}, table)
        found.append(table)
        if report is not None:
            report(sum(map(len, numbered[: index + 1])), len(prompts), "")
    log = PositionLog(pl.concat(found).sort("prompt", "position"), description)
    save(log, out)
    shutil.rmtree(folder)
    return log, spent


def _kept(path: Path, description: Mapping[str, Any]) -> pl.DataFrame:
    """Load a part that was logged before; refuse one of another log. The date may differ."""
    folder = path.parent.name
    try:
        before, table = json_and_parquet.load(path, ("said",), "part of a decision log", _PART, "log it again")
        if not isinstance(before["said"], dict):
            raise ParameterError(f"said must be a table of keys, got {checks.shown(before['said'])}")
    except ParameterError as error:
        raise ParameterError(f"{folder}/{path.name}: {error}; remove {folder}/{path.name}, and --resume logs it again") from None
    then, now = before["said"], json.loads(strict_json.dumps(description))
    for key in {**then, **now}:
        if key != "date" and then.get(key) != now.get(key):
            raise ParameterError(f"{folder} holds parts of another log: {key} differs; remove it, or use the same options")
    return table


def groups(prompts: Sequence[Sequence[int]], size: int = GROUP) -> list[list[int]]:
    """Batches of prompts of one length, as lists of their indices."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [numbers[start : start + size] for numbers in by_length.values() for start in range(0, len(numbers), size)]


def log_rows(
    target: Decoder, prompts: Mapping[int, Sequence[int]], tokens: int, *, draft: Decoder | None = None,
    sampling: Sampling | None = None, seed: int = 0, spent: LogSeconds | None = None,
) -> pl.DataFrame:
    """Return the log rows of sequences for prompts of one length, by prompt number. A sequence stops at an end token.

    Decoding is greedy, or sampled with `sampling`; the seed and the prompt's number decide the random draws.
    """
    import torch

    checks.whole("tokens", tokens, 1)
    spent = LogSeconds() if spent is None else spent
    if draft is not None and draft.vocabulary != target.vocabulary:
        sizes = f"target {target.vocabulary}, draft {draft.vocabulary}"
        raise ParameterError(f"models must have the same vocabulary, got {sizes} tokens; use a draft with the same tokenizer")
    with torch.inference_mode():
        begun = time.perf_counter()
        written, states = _written(target, prompts, tokens, sampling, seed)
        spent.writing += time.perf_counter() - begun
        # From here on, rows are positions, sequence by sequence, without those after an end token.
        lengths = [len(ended(text, target.ends)) for text in written]
        width = len(written[0])  # less than `tokens` if all sequences ended early
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
    """Generate sequences; return them and the states before the first and after every layer: shapes (sequences, tokens, hidden)."""
    import torch

    sequences = [list(prompt) for prompt in prompts.values()]
    layers, numbers = LayerSpan(0, target.layers), tuple(range(len(prompts)))
    (width,) = {len(sequence) for sequence in sequences}
    sequence_draws = [RandomDraws(seed, number) for number in prompts]
    rows = target.rows()
    if width > 1:
        tokens_before = tuple(token for sequence in sequences for token in sequence[:-1])
        target.run(tokens_before, 0, layers, rows, batch=Batch.uniform(numbers, 0, width - 1))
    columns: list[list[Tensor]] = []
    last = tuple(sequence[-1] for sequence in sequences)
    for at in range(width - 1, width - 1 + tokens):
        seen: list[Tensor] = []
        state = target.run(last, at, layers, rows, batch=Batch.uniform(numbers, at), seen=seen)
        columns.append([*seen, state])
        logits = target.final_head_logits(state)
        if sampling is None:
            last = tuple(logits.argmax(dim=-1).tolist())
        else:
            scores = logits.double().cpu().numpy()
            draws = [random_draws.draw("target: sample", at + 1) for random_draws in sequence_draws]
            last = tuple(token_at(sampling.probabilities(row), draw) for row, draw in zip(scores, draws, strict=True))
        for sequence, token in zip(sequences, last, strict=True):
            sequence.append(token)
        if target.ends and all(any(end in sequence[width:] for end in target.ends) for sequence in sequences):
            break
    whole = [torch.stack([column[layer] for column in columns], dim=1) for layer in range(target.layers + 1)]
    return [sequence[width:] for sequence in sequences], whole


def _by_layer(target: Decoder, states: list[Tensor], chosen: Tensor, spent: LogSeconds) -> dict[str, Any]:
    """Ranks, confidences and saturations of the tokens at every layer: arrays (rows, layers)."""
    import torch

    shape = len(chosen), target.layers
    found = {
        "rank_common": np.zeros(shape, np.int32), "rank_trained": np.zeros(shape, np.int32),
        "confidence": np.zeros(shape, np.float32), "saturation": np.zeros(shape, np.float32),
    }  # fmt: skip
    for layer in range(1, target.layers + 1):
        begun = time.perf_counter()
        before, after = states[layer - 1], states[layer]
        found["saturation"][:, layer - 1] = torch.cosine_similarity(before.float(), after.float(), dim=-1).cpu().numpy()
        for piece in _pieces(len(chosen)):
            logits = target.final_head_logits(after[piece]).float()
            found["rank_common"][piece, layer - 1] = ranks_of(logits, chosen[piece])
            found["confidence"][piece, layer - 1] = torch.exp(logits.amax(-1) - logits.logsumexp(-1)).cpu().numpy()
        now = time.perf_counter()
        spent.heads += now - begun
        if layer in target.heads:
            for piece in _pieces(len(chosen)):
                found["rank_trained"][piece, layer - 1] = ranks_of(target.logits(after[piece], layer).float(), chosen[piece])
            spent.trained_heads += time.perf_counter() - now
    # The last layer has only the model's head.
    if target.heads:
        found["rank_trained"][:, -1] = found["rank_common"][:, -1]
    return found


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE))


def ranks_of(logits: Tensor, tokens: Tensor) -> Any:
    """Ranks of tokens by their logits, from 1; ties are ordered by token id.

    >>> import torch
    >>> ranks_of(torch.tensor([[0.5, 2.0, 2.0, 1.0]] * 4), torch.arange(4)).tolist()
    [4, 1, 2, 3]
    """
    if logits.device.type != "cpu":
        return _ranks_on_device(logits, tokens)
    # numpy compares in half of torch's time, and counts bits instead of adding bytes.
    found, own = logits.numpy(), logits.gather(1, tokens[:, None]).numpy()
    above, tied = _true_per_row(found > own), found == own
    if np.count_nonzero(tied) > len(found):
        above = above + _true_per_row(tied & (np.arange(found.shape[1]) < tokens.numpy()[:, None]))
    return above + 1


def _ranks_on_device(logits: Tensor, tokens: Tensor) -> Any:
    """`ranks_of` for logits that are not in the host's memory: only ranks are copied."""
    import torch

    own = logits.gather(1, tokens[:, None])
    ranks, tied = (logits > own).sum(-1) + 1, logits == own
    if int(tied.count_nonzero()) > len(logits):
        ranks += (tied & (torch.arange(logits.shape[1], device=logits.device) < tokens[:, None])).sum(-1)
    return ranks.cpu().numpy()


def _true_per_row(mask: Any) -> Any:
    """Number of true entries in each row, shape (rows,).

    >>> _true_per_row(np.array([[True] * 9, [False] * 8 + [True]])).tolist()
    [9, 1]
    """
    return np.bitwise_count(np.packbits(mask, axis=1)).sum(1, dtype=np.int64)


def _of_draft(
    target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], written: list[list[int]], states: Tensor, rows: Tensor,
    chosen: Tensor, lengths: list[int], sampling: Sampling | None,
) -> dict[str, Any]:
    """Predictions of the draft along the sequences, and the target's probabilities of the draft's tokens: arrays (rows,)."""
    width, tokens = len(prompts[0]), len(written[0])
    whole = tuple(token for prompt, text in zip(prompts, written, strict=True) for token in [*prompt, *text[:-1]])
    batch = Batch.uniform(tuple(range(len(written))), 0, width + tokens - 1)
    made = draft.run(whole, 0, LayerSpan(0, draft.layers), draft.rows(), batch=batch)
    made = made.view(len(written), width + tokens - 1, -1)[:, width - 1 :].reshape(len(written) * tokens, -1)[rows]
    names = [name for name in DRAFT if name not in ("draft_token", "accepted")]
    found: dict[str, Any] = {name: np.zeros(len(chosen), np.float32) for name in names}
    found |= {name: np.zeros(len(chosen), np.int64) for name in ("draft_token", "draft_rank")}
    for piece in _pieces(len(chosen)):
        logits = target.final_head_logits(states[piece]), draft.final_head_logits(made[piece])
        for name, values in _compared(*logits, chosen[piece], sampling).items():
            found[name][piece] = values
        found["draft_rank"][piece] = ranks_of(logits[1].float(), chosen[piece])
    agrees = found["draft_token"] == chosen.cpu().numpy()
    found["accepted"] = np.concatenate([_survivors(part) for part in np.split(agrees, np.cumsum(lengths)[:-1])])
    return found


def _compared(target: Tensor, draft: Tensor, tokens: Tensor, sampling: Sampling | None) -> dict[str, Any]:
    """Probabilities of the target's and the draft's tokens under both models, from logits (rows, vocabulary)."""
    import torch

    best = draft.argmax(-1)
    raw_p, raw_q = torch.log_softmax(target.double(), -1), torch.log_softmax(draft.double(), -1)
    p, q = raw_p.exp(), raw_q.exp()
    if sampling is not None and sampling != Sampling():
        scores = (target.double().cpu().numpy(), draft.double().cpu().numpy())
        p, q = (torch.from_numpy(np.stack([sampling.probabilities(row) for row in each])).to(p.device) for each in scores)

    def at(chances: Tensor, where: Tensor) -> Any:
        return chances.gather(1, where[:, None])[:, 0].cpu().numpy()

    return {
        "draft_token": best.cpu().numpy(), "q_token": at(q, tokens), "p_token": at(p, tokens), "q_draft": at(q, best),
        "p_draft": at(p, best), "overlap": torch.minimum(p, q).sum(-1).cpu().numpy(),
        "draft_confidence": raw_q.amax(-1).exp().cpu().numpy(), "distance": -at(raw_p, best),
    }  # fmt: skip


def _survivors(agrees: Any) -> Any:
    """Number of consecutive agreements from each position on: the accepted length of a draft that starts there.

    >>> _survivors(np.array([True, True, False, True])).tolist()
    [2, 1, 0, 1]
    """
    found = np.zeros(agrees.size, np.int32)
    run = 0
    for position in range(agrees.size - 1, -1, -1):
        run = run + 1 if agrees[position] else 0
        found[position] = run
    return found


def _table(found: Mapping[str, Any]) -> pl.DataFrame:
    import polars as pl

    kinds = dict.fromkeys(("prompt", "position", "token", "draft_token", "draft_rank"), pl.Int32)
    order = [name for name in COLUMNS if name in found]
    return pl.DataFrame([
        pl.Series(name, found[name]) if name not in kinds else pl.Series(name, found[name]).cast(kinds[name]) for name in order
    ])  # fmt: skip
