"""What lossy methods do to the text, measured: how far it is the target's, how likely the target finds it, what it was made with.

The Python twin of `calibrate quality`. Each setting decodes the same prompts; one pass of the target over prompt and text then says
what the target itself would have written at every place, given the text so far. Seconds are measured on this machine, the prompt's
passes included, and those of plain decoding are measured beside them.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from calibrate.decode import real_decoding
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.family import model_directory
from model.architectures import transformer
from model.base import bounded_files, strict_json, typed_values, whole_files
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.logs.read_log import plain
from model.logs.recorded_decoding import Decoding, together
from model.methods import registry
from model.methods.speculative import rates_from_logs
from model.steps import LayerSpan

if TYPE_CHECKING:
    import polars as pl

Report = Callable[[int, int, str], None]
FORMATS = (".csv", ".parquet")
ENDINGS = ("fallback", "rollback", "cap", "again")
"""How a segment of Big Little Decoder can end; `again` is what its released code writes behind a rollback."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A text with what the target says of it: arrays (tokens,)."""

    tokens: tuple[int, ...]
    own: NDArray[np.int64]
    """What the target would have written at each place, given the text before it."""
    log_likelihood: NDArray[np.float64]
    """Of each token under the target, given the text before it [nats]."""

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Where the text is what the target would have written."""
        return np.asarray(self.own == np.array(self.tokens))


def judged(target: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> Judged:
    """What the target says of a text behind a prompt: one pass over both, without any cache of the decoding that is judged.

    A pass over many tokens rounds otherwise than one over each: where two tokens are likeliest to within rounding, it may take the
    other one.
    """
    import torch

    with torch.inference_mode():
        whole = (*prompt, *tokens[:-1])
        states = target.run(whole, 0, LayerSpan(0, target.layers), target.rows())[-len(tokens) :]
        logits = target.logits(states, target.layers)
        chances = torch.log_softmax(logits.double(), -1)
        written = torch.tensor([*tokens], device=logits.device)[:, None]
        found = chances.gather(1, written)[:, 0]
        return Judged(tuple(tokens), logits.argmax(-1).cpu().numpy(), found.cpu().numpy())


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike.

    >>> common_prefix([5, 6, 7], [5, 6, 8, 7])
    2
    """
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# --- Settings -----------------------------------------------------------------------------------------------------------


def settings_of(fixed: Mapping[str, Any], swept: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of swept values, the last name fastest, each with the fixed ones.

    >>> settings_of({"max_draft_length": 8}, {"fallback_threshold": [0.1, 0.5]})
    [{'max_draft_length': 8, 'fallback_threshold': 0.1}, {'max_draft_length': 8, 'fallback_threshold': 0.5}]
    """
    for name, values in swept.items():
        if name in fixed:
            raise ParameterError(f"{name} is fixed and swept; leave one of them out")
        if not values:
            raise ParameterError(f"{name} must be swept over at least one value, got none")
    return [{**fixed, **dict(zip(swept, values, strict=True))} for values in itertools.product(*swept.values())]


def check_lossy(method: str) -> None:
    """Refuse a method whose text is the target's own."""
    if registry.parameters(method).EXACT:
        lossy = [name for name in registry.names() if not registry.parameters(name).EXACT]
        what = f"method must be lossy, one of {', '.join(lossy)}, got {method}, whose text is the target's own"
        raise ParameterError(f"{what}: nothing is lost; calibrate decode --plain shows it")


def check(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a method that loses nothing, settings that are wrong and prompts that are too long, before anything is decoded."""
    check_lossy(method)
    for prompt in prompts:
        real_decoding.check_text(models, prompt, tokens)
    longest = max(map(len, prompts))
    for each in settings:
        parameters = real_decoding.parameters_of(method, models, real_decoding.scheduled(method, each, longest, tokens))
        parameters.check_thresholds()
        parameters.check_tokens(tokens)


# --- Rows ---------------------------------------------------------------------------------------------------------------


def measure(
    out: Path, said: Mapping[str, Any], method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]],
    tokens: int, settings: Sequence[Mapping[str, Any]], *, resume: bool = False, report: Report | None = None,
) -> pl.DataFrame:
    """A row for each setting, written to `out` (.csv or .parquet). Finished settings are kept beside it until all are.

    Parameters
    ----------
    said
        What the rows are of: columns of every row. Kept settings that say anything else are not gone on from.
    models
        Decoders by role, the target and those that the method has beside it.
    prompts
        Tokens of each, at least one.
    tokens
        How many are written behind each prompt, or fewer where the target's end of text comes.
    """
    if out.suffix not in FORMATS:
        raise ParameterError(f"out must end in {' or '.join(FORMATS)}, got {out.name}")
    if out.exists():
        raise ParameterError(f"out must be a new file, and {out.name} is there; give another, or remove it")
    model_directory.refuse_unwritable(out)
    if not prompts or not all(prompts):
        raise ParameterError("prompts must be at least one, and each of at least one token")
    check(method, models, prompts, tokens, settings)
    folder = out.with_suffix(".parts")
    if folder.exists() and not resume:
        raise ParameterError(f"{folder.name} holds settings of a run that was broken off; go on with --resume, or remove it")
    asked = {"said": dict(said), "prompts": [[*map(int, prompt)] for prompt in prompts], "tokens": tokens}
    own = _kept(folder / "plain.json", asked, lambda: _own_texts(models["target"], prompts, tokens), list[_Own])
    _check_texts(own, folder / "plain.json", prompts, tokens, models["target"].vocabulary)
    begun, rows = [Plain.of(models, prompt, **each) for prompt, each in zip(prompts, own, strict=True)], []
    for number, each in enumerate(settings):
        if report is not None:
            report(number, len(settings), ", ".join(f"{key}={value}" for key, value in each.items()))
        key = {**asked, "method": method, "settings": plain(each)}
        make = partial(row, method, models, prompts, tokens, each, begun)
        rows.append(_kept(folder / f"{number:05}.json", key, make, dict[str, _Cell]))
    table = _table([{**row_of, **said} for row_of in rows])
    _write(table, out)
    shutil.rmtree(folder)
    return table


@dataclass(frozen=True, eq=False)
class Plain:
    """The target's own text behind a prompt, what it says of it, and what that took."""

    judged: Judged
    account: Account
    seconds: float

    @classmethod
    def of(cls, models: Mapping[str, Decoder], prompt: Sequence[int], tokens: Sequence[int], seconds: float) -> Plain:
        """Of a text that plain decoding wrote."""
        from model.interpret.interpreter import count
        from model.interpret.simulated_answers import World
        from model.methods.autoregressive import algorithm as autoregressive

        layers = models["target"].layers
        steps = autoregressive.decode(autoregressive.Parameters(layers), [*range(len(prompt))], len(tokens))
        account = count(steps, World(len(prompt), layers), len(tokens)).account
        return cls(judged(models["target"], prompt, tokens), account, seconds)


class _Own(TypedDict):
    """What plain decoding wrote behind a prompt, and how long it took [s]."""

    tokens: list[int]
    seconds: float


_Cell = str | int | float | bool | list[Any] | None
"""What a row holds in one column."""


def _check_texts(own: Sequence[_Own], path: Path, prompts: Sequence[Any], tokens: int, vocabulary: int) -> None:
    """Refuse kept texts that no model can have written behind these prompts."""
    whole = len(own) == len(prompts)
    if not whole or not all(
        1 <= len(each["tokens"]) <= tokens and min(each["tokens"]) >= 0 and max(each["tokens"]) < vocabulary and each["seconds"] > 0
        for each in own
    ):
        bound = f"up to {tokens} tokens below the vocabulary={vocabulary} and a time above 0 for each of {len(prompts)} prompts"
        raise ParameterError(f"{path.parent.name}/{path.name} must hold {bound}; remove it and go on")


def _own_texts(target: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """What the target writes behind each prompt, and how long it takes [s]."""
    found = _decoded(registry.PLAIN, {"target": target}, prompts, tokens, {})
    return [{"tokens": [*each.tokens], "seconds": each.seconds} for each in found]


def _decoded(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Mapping[str, Any]
) -> list[Decoding]:
    """Every prompt decoded with one choice, on models that are warm."""
    stop = models["target"].ends
    real_decoding.warm(models)
    return [real_decoding.decode(method, models, prompt, tokens, settings, stop=stop, log=True) for prompt in prompts]


def row(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Mapping[str, Any],
    begun: Sequence[Plain],
) -> dict[str, Any]:
    """What one setting comes to over all prompts."""
    found = _decoded(method, models, prompts, tokens, settings)
    texts = [judged(models["target"], each.prompt, each.tokens) for each in found]
    agrees, written = [int(each.agrees.sum()) for each in texts], [len(each.tokens) for each in texts]
    total, before = sum(written), sum(len(each.judged.tokens) for each in begun)
    low, high = rates_from_logs.ratio_interval(agrees, written)
    prefixes = [common_prefix(each.tokens, one.judged.tokens) for each, one in zip(texts, begun, strict=True)]
    _, account = together(found)
    bare = Account()
    for one in begun:
        bare.include(one.account)
    seconds, plain_seconds = (sum(each.seconds or 0.0 for each in many) for many in (found, begun))

    def over(work: float, other: float) -> float:
        return work / total / (other / before)

    return {
        "method": method, **plain(_shared(found)), "sequences": len(texts), "tokens": total, "agreement": sum(agrees) / total,
        "agreement_low": low, "agreement_high": high, "common_prefix": float(np.mean(prefixes)),
        "plain_texts": sum(each.tokens == one.judged.tokens for each, one in zip(texts, begun, strict=True)) / len(texts),
        "log_likelihood": float(np.concatenate([each.log_likelihood for each in texts]).mean()),
        "plain_log_likelihood": float(np.concatenate([each.judged.log_likelihood for each in begun]).mean()),
        **{f"{role}_passes_per_token": count / total for role, count in account.passes_of.items()},
        # A small model's layers count as much as a large one's here; what they weigh is in the next two.
        "layer_passes_over_plain": over(account.layer_passes, bare.layer_passes), **_billed(models, account, bare, over),
        "seconds": seconds, "plain_seconds": plain_seconds, "seconds_over_plain": over(seconds, plain_seconds),
        **_decided(method, found), "date": datetime.now(tz=UTC).date().isoformat(),
    }  # fmt: skip


def _shared(found: Sequence[Decoding]) -> dict[str, Any]:
    """The parameters that all texts had; what went by the length of a prompt is none."""
    first = found[0].settings
    return {key: value if all(each.settings[key] == value for each in found) else None for key, value in first.items()}


def _billed(
    models: Mapping[str, Decoder], account: Account, bare: Account, over: Callable[[float, float], float]
) -> dict[str, float | None]:
    """Operations and weights read over those of plain decoding; nothing where a model's shape cannot be counted."""
    try:
        shapes = {role: transformer.from_config(each.config.to_dict(), "float32") for role, each in models.items()}
    except ParameterError:
        return {"flops_over_plain": None, "weight_bytes_over_plain": None}
    own, other = account.bill(shapes), bare.bill(shapes)
    return {name + "_over_plain": over(getattr(own, name), getattr(other, name)) for name in ("flops", "weight_bytes")}


def _decided(method: str, found: Sequence[Decoding]) -> dict[str, Any]:
    """What the method decided: rates of falling back and rolling back, counted as `model.methods.bild.threshold_decisions` does, or
    layers of a token.
    """
    if "decision" in registry.parameters(method).OUTCOMES:
        ended = Counter(commit.kind for each in found for commit in each.commits)
        asked = Counter(read.question.kind for each in found for read in each.reads)
        low = _shared(found)["fallback_threshold"]
        unsure = sum(read.answer < low for each in found for read in each.reads if read.question.kind == "confidence")
        return {
            **{f"commits_{kind}": ended[kind] for kind in ENDINGS}, "mean_layers": None,
            "fallback_rate": unsure / asked["confidence"] if asked["confidence"] else None,
            "rollback_rate": ended["rollback"] / asked["distance"] if asked["distance"] else None,
        }  # fmt: skip
    # A token that is written has its layers in passes that end in a read: those run for one token, whatever was asked between.
    layers = sum(_depth(each) for each in found) / sum(len(each.tokens) for each in found)
    others = dict.fromkeys((*[f"commits_{kind}" for kind in ENDINGS], "fallback_rate", "rollback_rate"))
    return {**others, "mean_layers": layers}


def _depth(each: Decoding) -> int:
    """Layers run for the tokens written, those of the prompt and rows that are only filled left out."""
    prompt: int = each.settings["layers"] * (len(each.prompt) - 1)
    return each.account.layer_passes - prompt


def _table(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    import polars as pl

    names = dict.fromkeys(name for each in rows for name in each)
    clean = [{name: float("inf") if each.get(name) == "inf" else each.get(name) for name in names} for each in rows]
    columns = {name: [each[name] for each in clean] for name in names}
    try:
        found = pl.DataFrame({name: pl.Series(values, strict=False) for name, values in columns.items()})
        mixed = [name for name, kind in found.schema.items() if kind == pl.Object]
        if mixed:
            raise ParameterError(f"column {mixed[0]} has values of several kinds")
        return found
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:  # rows that were kept
        line = str(error).partition("\n")[0]
        raise ParameterError(f"kept rows cannot be put into one table: {line}; remove what is kept, and begin anew") from None


def _write(table: pl.DataFrame, out: Path) -> None:
    """Whole or not at all."""
    with whole_files.whole(out) as part:
        if out.suffix == ".csv":
            import polars as pl

            lists = [name for name, kind in table.schema.items() if isinstance(kind, pl.List)]
            table.drop(lists).write_csv(part)
        else:
            table.write_parquet(part, statistics=False)


def _kept(path: Path, asked: Mapping[str, Any], make: Callable[[], Any], kind: Any) -> Any:
    """What was found for just this before, of a kind as `model.base.typed_values` has them, or what is found now, and kept."""
    told = json.loads(strict_json.dumps(asked))
    if path.exists():
        try:
            before = bounded_files.json_of(bounded_files.read_bytes(path))
            was, found = before["asked"], before["found"]
            typed_values.check(was, dict[str, Any], "asked")
            typed_values.check(found, kind, "found")
        except (ValueError, KeyError, TypeError):
            raise ParameterError(f"{path.parent.name} holds {path.name}, which cannot be read; remove it and go on") from None
        if was != told:
            differing = next(key for key in {**was, **told} if was.get(key) != told.get(key))
            what = f"{path.parent.name} holds settings of another run"
            raise ParameterError(f"{what}: {differing} differs; remove it, or ask for the same")
        return found
    found = json.loads(strict_json.dumps(make()))
    whole_files.write_text(path, strict_json.dumps({"asked": told, "found": found}) + "\n")
    return found
