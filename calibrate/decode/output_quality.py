"""Measured quality and cost of lossy methods: agreement with the target, log-likelihood under the target, passes and seconds.

The Python interface of `calibrate quality`. Each setting decodes the same prompts. One target pass over prompt and output then
gives the target's token and the log-likelihood at every position. Seconds are measured on this machine and include the passes over
the prompt; plain decoding is measured in the same run.
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
from calibrate.decode.reference_scores import ReferenceScores
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.family import model_directory
from model.architectures import shape_configs
from model.base import bounded_files, checks, strict_json, table_files, typed_values, whole_files
from model.base.checks import ParameterError
from model.interpret.account import Account
from model.logs.read_log import plain
from model.logs.recorded_decoding import Decoding, rounds_and_passes
from model.methods import registry
from model.methods.speculative import rates_from_logs
from model.steps import LayerSpan

if TYPE_CHECKING:
    import polars as pl

Report = Callable[[int, int, str], None]
Begin = Callable[[int], None]
"""Prepares the models for a prompt, given by its index: encoders read its source. Called before each decoding and evaluation."""
ENDINGS = ("fallback", "rollback", "cap", "again")
"""Ends of a segment of Big Little Decoder; `again` is the token that its released code writes after a rollback."""


@dataclass(frozen=True, eq=False)
class EvaluatedOutput:
    """An output with the target's predictions along it: arrays (tokens,)."""

    tokens: tuple[int, ...]
    greedy: NDArray[np.int64]
    """The target's greedy token at each position, given the output before it."""
    log_likelihood: NDArray[np.float64]
    """Log-likelihood of each token under the target, given the output before it [nats]."""

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """True at positions where the output is the target's token."""
        return np.asarray(self.greedy == np.array(self.tokens))


def evaluate(target: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> EvaluatedOutput:
    """Judge an output after its prompt: one target pass over both, without the caches of the decoding.

    A pass over many tokens rounds differently from one pass per token. If two tokens tie within rounding, it may prefer the other.
    """
    import torch

    with torch.inference_mode():
        whole = (*prompt, *tokens[:-1])
        states = target.run(whole, 0, LayerSpan(0, target.layers), target.rows())[-len(tokens) :]
        logits = target.logits(states, target.layers)
        chances = torch.log_softmax(logits.double(), -1)
        written = torch.tensor([*tokens], device=logits.device)[:, None]
        found = chances.gather(1, written)[:, 0]
        return EvaluatedOutput(tuple(tokens), logits.argmax(-1).cpu().numpy(), found.cpu().numpy())


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two sequences [tokens].

    >>> common_prefix([5, 6, 7], [5, 6, 8, 7])
    2
    """
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


# --- Settings -----------------------------------------------------------------------------------------------------------


def settings_of(fixed: Mapping[str, Any], swept: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the swept values with the fixed ones; the last name varies fastest.

    >>> settings_of({"max_draft_length": 8}, {"fallback_threshold": [0.1, 0.5]})
    [{'max_draft_length': 8, 'fallback_threshold': 0.1}, {'max_draft_length': 8, 'fallback_threshold': 0.5}]
    """
    for name, values in swept.items():
        if name in fixed:
            raise ParameterError(f"{name} is both fixed and swept; leave one out")
        if not values:
            raise ParameterError(f"{name} must be swept over at least one value, got none")
    return [{**fixed, **dict(zip(swept, values, strict=True))} for values in itertools.product(*swept.values())]


def check_lossy(method: str) -> None:
    """Refuse an exact method, whose output is the target's."""
    if registry.parameters(method).EXACT:
        lossy = [name for name in registry.names() if not registry.parameters(name).EXACT]
        what = f"method must be lossy, one of {', '.join(lossy)}, got {method}, whose output is the target's"
        raise ParameterError(f"{what}; calibrate decode --plain compares them")


def check(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse exact methods, invalid settings and prompts that are too long, before anything is decoded."""
    check_lossy(method)
    for prompt in prompts:
        real_decoding.check_prompt(models, prompt, tokens)
    longest = max(map(len, prompts))
    for each in settings:
        parameters = real_decoding.parameters_of(method, models, real_decoding.scheduled(method, each, longest, tokens))
        parameters.check_thresholds()
        parameters.check_tokens(tokens)


# --- Rows ---------------------------------------------------------------------------------------------------------------


def measure(
    out: Path, description: Mapping[str, Any], method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]],
    tokens: int, settings: Sequence[Mapping[str, Any]], *, scores: ReferenceScores | None = None,
    sources: Sequence[Sequence[int]] | None = None, resume: bool = False, report: Report | None = None,
) -> pl.DataFrame:
    """Measure all settings, and write one row for each to `out` (.csv or .parquet).

    Finished settings are kept in a folder next to `out` until all are done.

    Parameters
    ----------
    said
        Description of the run, columns of every row. Kept settings with another description are refused.
    models
        Decoders by role: the target and the other models of the method.
    prompts
        Tokens of each prompt, at least one.
    tokens
        Tokens to generate per prompt, fewer if the target's end token comes.
    scores
        Scores of the outputs, and of those of plain decoding, against the prompts' references.
    sources
        Tokens that the encoders read, for each prompt, for models with an encoder; their time is not counted.
    """
    table_files.check_new(out)
    model_directory.refuse_unwritable(out)
    if not prompts or not all(prompts):
        raise ParameterError("prompts must hold at least one prompt, and each at least one token")
    check(method, models, prompts, tokens, settings)
    folder = out.with_suffix(".parts")
    if folder.exists() and not resume:
        raise ParameterError(f"{folder.name} holds settings of an interrupted run; resume with --resume, or remove it")
    asked = {"said": dict(description), "prompts": [[*map(int, prompt)] for prompt in prompts], "tokens": tokens}
    asked |= {} if scores is None else scores.described
    asked |= {} if sources is None else {"sources": [[*map(int, source)] for source in sources]}
    begin = reader_of(models, sources)
    plain_runs = _kept(folder / "plain.json", asked, lambda: _plain_runs(models["target"], prompts, tokens, begin), list[_PlainRun])
    _check_plain_runs(plain_runs, folder / "plain.json", prompts, tokens, models["target"].vocabulary)
    plain_decodings, rows = [], []
    for index, (prompt, made) in enumerate(zip(prompts, plain_runs, strict=True)):
        begin(index)
        plain_decodings.append(PlainDecoding.of(models, prompt, **made))
    for number, each in enumerate(settings):
        if report is not None:
            report(number, len(settings), ", ".join(f"{key}={value}" for key, value in each.items()))
        key = {**asked, "method": method, "settings": plain(each)}
        make = partial(row, method, models, prompts, tokens, each, plain_decodings, scores, begin)
        rows.append(_kept(folder / f"{number:05}.json", key, make, dict[str, _Cell]))
    table = _table([{**row_of, **description} for row_of in rows])
    table_files.write(table, out)
    shutil.rmtree(folder)
    return table


@dataclass(frozen=True, eq=False)
class PlainDecoding:
    """Plain decoding of a prompt: the evaluated output, its account and its seconds."""

    output: EvaluatedOutput
    account: Account
    seconds: float

    @classmethod
    def of(cls, models: Mapping[str, Decoder], prompt: Sequence[int], tokens: Sequence[int], seconds: float) -> PlainDecoding:
        """Judge an output of plain decoding, and count its passes."""
        from model.interpret.interpreter import count
        from model.interpret.simulated_answers import World
        from model.methods.autoregressive import algorithm as autoregressive

        layers = models["target"].layers
        steps = autoregressive.decode(autoregressive.Parameters(layers), [*range(len(prompt))], len(tokens))
        account = count(steps, World(len(prompt), layers), len(tokens)).account
        return cls(evaluate(models["target"], prompt, tokens), account, seconds)


class _PlainRun(TypedDict):
    """Tokens of plain decoding after a prompt, and its seconds."""

    tokens: list[int]
    seconds: float


_Cell = str | int | float | bool | list[Any] | None
"""A value of a row."""


def _check_plain_runs(runs: Sequence[_PlainRun], path: Path, prompts: Sequence[Any], tokens: int, vocabulary: int) -> None:
    """Refuse kept outputs that are impossible for these prompts and this vocabulary."""
    whole = len(runs) == len(prompts)
    if not whole or not all(
        1 <= len(each["tokens"]) <= tokens and min(each["tokens"]) >= 0 and max(each["tokens"]) < vocabulary and each["seconds"] > 0
        for each in runs
    ):
        bound = f"up to {tokens} tokens below the vocabulary={vocabulary} and a time above 0 for each of {len(prompts)} prompts"
        raise ParameterError(f"{path.parent.name}/{path.name} must hold {bound}; remove it and resume")


def reader_of(models: Mapping[str, Decoder], sources: Sequence[Sequence[int]] | None) -> Begin:
    """Return what has the encoders read the source of a prompt; without sources it does nothing."""
    encoders: list[Any] = [*{id(each): each for each in models.values() if each.config.is_encoder_decoder}.values()]

    def begin(index: int) -> None:
        if sources is not None:
            for each in encoders:
                each.read_source(tuple(sources[index]))

    return begin


def _plain_runs(target: Decoder, prompts: Sequence[Sequence[int]], tokens: int, begin: Begin) -> list[dict[str, Any]]:
    """Tokens and seconds of plain decoding, for each prompt."""
    found = _decoded(registry.PLAIN, {"target": target}, prompts, tokens, {}, begin)
    return [{"tokens": [*each.tokens], "seconds": each.seconds} for each in found]


def _decoded(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Mapping[str, Any],
    begin: Begin,
) -> list[Decoding]:  # fmt: skip
    """Decode every prompt with one setting, on warm models."""
    stop, found = models["target"].ends, []
    real_decoding.warm(models)
    for index, prompt in enumerate(prompts):
        begin(index)
        found.append(real_decoding.decode(method, models, prompt, tokens, settings, stop=stop, log=True))
    return found


def row(
    method: str, models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, settings: Mapping[str, Any],
    plain_decodings: Sequence[PlainDecoding], scores: ReferenceScores | None = None, begin: Begin = lambda index: None,
) -> dict[str, Any]:
    """Return the row of one setting, over all prompts."""
    found, outputs = _decoded(method, models, prompts, tokens, settings, begin), []
    for index, each in enumerate(found):
        begin(index)
        outputs.append(evaluate(models["target"], each.prompt, each.tokens))
    agrees, written = [int(each.agrees.sum()) for each in outputs], [len(each.tokens) for each in outputs]
    total, before = sum(written), sum(len(each.output.tokens) for each in plain_decodings)
    low, high = rates_from_logs.ratio_interval(agrees, written)
    prefixes = [common_prefix(each.tokens, plainly.output.tokens) for each, plainly in zip(outputs, plain_decodings, strict=True)]
    equal = [each.tokens == plainly.output.tokens for each, plainly in zip(outputs, plain_decodings, strict=True)]
    _, account = rounds_and_passes(found)
    bare = Account()
    for plainly in plain_decodings:
        bare.include(plainly.account)
    seconds, plain_seconds = (sum(each.seconds or 0.0 for each in many) for many in (found, plain_decodings))

    def over(work: float, other: float) -> float:
        return work / total / (other / before)

    scored: dict[str, float] = {}
    if scores is not None:
        scored = scores.columns(prompts, [each.tokens for each in found])
        scored |= scores.columns(prompts, [each.output.tokens for each in plain_decodings], "plain_")

    return {
        "method": method, **plain(_shared(found)), "sequences": len(outputs), "tokens": total, "agreement": sum(agrees) / total,
        "agreement_low": low, "agreement_high": high, "common_prefix": float(np.mean(prefixes)),
        "plain_texts": sum(equal) / len(outputs),
        "log_likelihood": float(np.concatenate([each.log_likelihood for each in outputs]).mean()),
        "plain_log_likelihood": float(np.concatenate([each.output.log_likelihood for each in plain_decodings]).mean()),
        **scored, **{f"{role}_passes_per_token": count / total for role, count in account.passes_of.items()},
        # Layers of all models count equally here; the next two columns weigh them by their size.
        "layer_passes_over_plain": over(account.layer_passes, bare.layer_passes), **_billed(models, account, bare, over),
        "seconds": seconds, "plain_seconds": plain_seconds, "seconds_over_plain": over(seconds, plain_seconds),
        **_decided(method, found), "date": datetime.now(tz=UTC).date().isoformat(),
    }  # fmt: skip


def _shared(found: Sequence[Decoding]) -> dict[str, Any]:
    """Return the parameters that all sequences share; None for those that depend on the prompt's length."""
    first = found[0].settings
    return {key: value if all(each.settings[key] == value for each in found) else None for key, value in first.items()}


def _billed(
    models: Mapping[str, Decoder], account: Account, bare: Account, over: Callable[[float, float], float]
) -> dict[str, float | None]:
    """Ratios of operations and of weight bytes to plain decoding; None if the shape of a model is not supported."""
    try:
        shapes = {role: shape_configs.from_config(each.config.to_dict(), "float32") for role, each in models.items()}
    except ParameterError:
        return {"flops_over_plain": None, "weight_bytes_over_plain": None}
    work, other = account.flops_and_bytes(shapes), bare.flops_and_bytes(shapes)
    return {name + "_over_plain": over(getattr(work, name), getattr(other, name)) for name in ("flops", "weight_bytes")}


def _decided(method: str, found: Sequence[Decoding]) -> dict[str, Any]:
    """Decisions of the method: fallback and rollback rates (see `model.methods.bild.threshold_decisions`), or mean layers."""
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
    # Layer-passes after the prompt, divided by all generated tokens.
    layers = sum(_depth(each) for each in found) / sum(len(each.tokens) for each in found)
    others = dict.fromkeys((*[f"commits_{kind}" for kind in ENDINGS], "fallback_rate", "rollback_rate"))
    return {**others, "mean_layers": layers}


def _depth(each: Decoding) -> int:
    """Layers run for generated tokens, without those of the prompt and rows that are only filled."""
    parameters = registry.parameters(each.method)(**each.settings)
    return each.account.layer_passes - parameters.prompt_layer_passes(len(each.prompt) - 1)


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
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:  # kept rows may disagree
        line = str(error).partition("\n")[0]
        raise ParameterError(f"kept rows do not form a table: {line}; remove them, and start again") from None


def _kept(path: Path, asked: Mapping[str, Any], make: Callable[[], Any], kind: Any) -> Any:
    """Return the kept result of the same request, checked against `kind` (`model.base.typed_values`), or make and keep it."""
    request = json.loads(strict_json.dumps(asked))
    if path.exists():
        try:
            before = bounded_files.json_of(bounded_files.read_bytes(path))
            was, found = before["asked"], before["found"]
            typed_values.check(was, dict[str, Any], "asked")
            typed_values.check(found, kind, "found")
        except (ValueError, KeyError, TypeError):
            raise ParameterError(f"{path.parent.name} holds {path.name}, which cannot be read; remove it and resume") from None
        if was != request:
            what = f"{path.parent.name} holds settings of another run"
            raise ParameterError(f"{what}: {checks.differing_key(request, was)} differs; remove it, or use the same options")
        return found
    found = json.loads(strict_json.dumps(make()))
    whole_files.write_text(path, strict_json.dumps({"asked": request, "found": found}) + "\n")
    return found
