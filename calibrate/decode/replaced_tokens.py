"""Quality of a small model's output, part of whose tokens a large model replaces: Figure 2 of Big Little Decoder.

Both models read every position (Section 3.1 of [Kim2023]). If the large model gives the small model's token a likelihood below a
threshold, its own token replaces that token, and both go on from there. This is an ideal case, with the large model's prediction
always at hand: it shows what few replacements achieve, and saves no time.

[Kim2023] S. Kim, K. Mangalam, S. Moon, J. Malik, M. W. Mahoney, A. Gholami, K. Keutzer. Speculative Decoding with Big Little
Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.decode import output_quality, real_decoding
from calibrate.decode.output_quality import Begin, PlainDecoding, Report
from calibrate.decode.reference_scores import ReferenceScores
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.interpreters.in_one_process import Real
from model.base import checks
from model.base.checks import ParameterError
from model.methods.speculative import rates_from_logs
from model.steps import Commit, Forward, LayerSpan, Read, Steps

if TYPE_CHECKING:
    import polars as pl

KEPT, SAME, REPLACED = "kept", "same", "replaced"
"""Origins of a token: the small model's, likely enough; unlikely, but the large model's as well; the large model's in its place."""


def steps(
    layers: Mapping[str, int], prompt: Sequence[int], tokens: int, threshold: float, stop: Collection[int] = ()
) -> Steps:
    """Decode `tokens` tokens, or up to one of `stop`; a commit's kind is the token's origin.

    `layers` are those of the models by role, `draft` and `target`.
    """
    sequence = list(prompt)
    for role, depth in layers.items():
        if len(prompt) > 1:
            yield Forward(role, tuple(prompt[:-1]), 0, LayerSpan(0, depth))
    while len(sequence) < len(prompt) + tokens and (len(sequence) == len(prompt) or sequence[-1] not in stop):
        read = {}
        for role, depth in layers.items():
            read[role] = yield Forward(role, (sequence[-1],), len(sequence) - 1, LayerSpan(0, depth), heads=1)
        token = yield Read("next", read["draft"])
        origin = KEPT
        # The distance is the negative logarithm of the likelihood.
        if math.exp(-(yield Read("distance", read["target"], token=token))) < threshold:
            own = yield Read("next", read["target"])
            origin = SAME if own == token else REPLACED
            token = own
        sequence.append(token)
        yield Commit(origin, (token,))


def measure(
    models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, thresholds: Sequence[float], *,
    scores: ReferenceScores | None = None, sources: Sequence[Sequence[int]] | None = None, report: Report | None = None,
) -> pl.DataFrame:
    """Decode all prompts with each threshold; return one row for each.

    A row has `replaced_share`, the share of tokens that the large model replaced by others, with its 95 % interval over sequences,
    `engaged_share`, the share below the threshold, and the quality of the output as `calibrate quality` has it. With threshold 0
    the output is the small model's, with a threshold above 1 the large model's.

    Parameters
    ----------
    models
        Decoders `target` (large) and `draft` (small), with the same tokens.
    thresholds
        Likelihoods below which a token is replaced, each at least 0.
    scores
        Scores of the outputs against the prompts' references.
    sources
        Tokens that the encoders read, for each prompt, for models with an encoder.
    """
    import polars as pl

    if sorted(models) != ["draft", "target"]:
        raise ParameterError(f"models must be a target and a draft, got {', '.join(models) or 'none'}")
    if not thresholds or not prompts:
        raise ParameterError("prompts and thresholds must hold at least one each, got none")
    for each in thresholds:
        checks.number("threshold", each, 0)
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    for prompt in prompts:
        real_decoding.check_prompt(models, prompt, tokens)
    begin, plain, rows = output_quality.reader_of(models, sources), [], []
    for index, prompt in enumerate(prompts):
        begin(index)
        plain.append(_plain(models, prompt, tokens))
    for number, each in enumerate(thresholds):
        if report is not None:
            report(number, len(thresholds), f"threshold {each:g}")
        rows.append(_row(models, prompts, tokens, each, plain, scores, begin))
    return pl.DataFrame(rows)


def _plain(models: Mapping[str, Decoder], prompt: Sequence[int], tokens: int) -> PlainDecoding:
    found = real_decoding.decode("autoregressive", {"target": models["target"]}, prompt, tokens, stop=models["target"].ends)
    return PlainDecoding.of(models, prompt, found.tokens, found.seconds or 0.0)


def _row(
    models: Mapping[str, Decoder], prompts: Sequence[Sequence[int]], tokens: int, threshold: float, plain: Sequence[PlainDecoding],
    scores: ReferenceScores | None, begin: Begin,
) -> dict[str, Any]:
    layers = {role: models[role].layers for role in ("draft", "target")}
    found, outputs = [], []
    for index, prompt in enumerate(prompts):
        begin(index)
        found.append(_decoded(models, layers, prompt, tokens, threshold))
        outputs.append(output_quality.evaluate(models["target"], prompt, found[-1][0]))
    written = [len(text) for text, _ in found]
    changed = [origins.count(REPLACED) for _, origins in found]
    unlikely = [len(origins) - origins.count(KEPT) for _, origins in found]
    agrees = [int(each.agrees.sum()) for each in outputs]
    low, high = rates_from_logs.ratio_interval(changed, written)
    agrees_low, agrees_high = rates_from_logs.ratio_interval(agrees, written)
    scored: dict[str, float] = {}
    if scores is not None:
        scored = scores.columns(prompts, [text for text, _ in found])
        scored |= scores.columns(prompts, [each.output.tokens for each in plain], "plain_")
    return {
        "threshold": float(threshold), "sequences": len(found), "tokens": sum(written),
        "replaced_share": sum(changed) / sum(written), "replaced_low": low, "replaced_high": high,
        "engaged_share": sum(unlikely) / sum(written), "agreement": sum(agrees) / sum(written), "agreement_low": agrees_low,
        "agreement_high": agrees_high,
        "log_likelihood": float(np.concatenate([each.log_likelihood for each in outputs]).mean()),
        "plain_log_likelihood": float(np.concatenate([each.output.log_likelihood for each in plain]).mean()), **scored,
        "source": "measured",
    }  # fmt: skip


def _decoded(
    models: Mapping[str, Decoder], layers: Mapping[str, int], prompt: Sequence[int], tokens: int, threshold: float
) -> tuple[tuple[int, ...], list[str]]:
    """Return the output after a prompt, and the origin of each token."""
    work = Real(models).run(steps(layers, prompt, tokens, threshold, models["target"].ends), tokens)
    return tuple(work.tokens), [commit.kind for commit in work.committed]
