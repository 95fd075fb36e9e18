"""Loss by position in a text: how much easier later tokens are, after all layers and after earlier ones.

Figure 1 of [DelCorro2023], on which SkipDecode rests: the loss of the next token falls along the text, so later tokens may need
fewer layers. After an earlier layer the model's head predicts, or a trained head of that layer.

[DelCorro2023] L. Del Corro et al. SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference.
arXiv:2307.02628.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrate.decode.output_quality import Report
from calibrate.decoders.transformers_adapter import Decoder
from model.base import checks
from model.base.checks import ParameterError
from model.steps import LayerSpan

if TYPE_CHECKING:
    import polars as pl

SHARE = 0.95


def measure(
    target: Decoder, sequences: Sequence[Sequence[int]], layers: Sequence[int], *, report: Report | None = None
) -> pl.DataFrame:
    """Measure the loss of the next token; return one row for each layer and position.

    Columns: `layer`; `position`, the number of tokens before the predicted one, from 1; `loss`, its mean over sequences [nats],
    with its 95 % interval `low` and `high` (Student's t; null for a single sequence); `sequences` that are this long.

    Parameters
    ----------
    sequences
        Tokens of each sequence, at least two.
    layers
        Layers after which the next token is predicted, from 1 to the depth of the model.
    """
    import polars as pl
    from scipy import stats

    chosen = sorted({*layers})
    if not chosen:
        raise ParameterError("layers must hold at least one layer, got none")
    for layer in chosen:
        checks.whole("layers", layer, 1, target.layers, f"the layers of {target.name}")
    for number, each in enumerate(sequences, start=1):
        if len(each) < 2:
            raise ParameterError(f"sequence {number} must have at least 2 tokens to have a loss, got {len(each)}; give longer ones")
        if target.max_positions is not None and len(each) > target.max_positions:
            bound = f"at most {target.max_positions} tokens, the positions of {target.name}"
            raise ParameterError(f"sequence {number} must have {bound}, got {len(each)}; take fewer tokens")
    found = []
    for number, each in enumerate(sequences):
        if report is not None:
            report(number, len(sequences), f"sequence {number + 1}")
        found.append(losses(target, each, chosen))
    rows: list[dict[str, Any]] = []
    for index, layer in enumerate(chosen):
        for at in range(max(each.shape[1] for each in found)):
            values = np.array([each[index, at] for each in found if at < each.shape[1]])
            row: dict[str, Any] = {"layer": layer, "position": at + 1, "loss": float(values.mean()), "low": None, "high": None}
            if values.size > 1:
                half = float(stats.t.ppf((1 + SHARE) / 2, values.size - 1) * values.std(ddof=1) / np.sqrt(values.size))
                row |= {"low": row["loss"] - half, "high": row["loss"] + half}
            rows.append(row | {"sequences": values.size, "source": "measured"})
    return pl.DataFrame(rows, schema_overrides={"low": pl.Float64, "high": pl.Float64})


def losses(target: Decoder, tokens: Sequence[int], layers: Sequence[int]) -> NDArray[np.float64]:
    """Loss of each token but the first of a sequence after each of `layers`, shape (layers, tokens - 1) [nats]."""
    import torch

    with torch.inference_mode():
        seen: list[Any] = []
        last = target.run(tuple(tokens[:-1]), 0, LayerSpan(0, target.layers), target.rows(), seen=seen)
        wanted = torch.tensor([*tokens[1:]], device=last.device)[:, None]
        found = []
        for layer in layers:
            states = last if layer == target.layers else seen[layer].reshape(-1, seen[layer].shape[-1])
            chances = torch.log_softmax(target.logits(states, layer).double(), -1)
            found.append(-chances.gather(1, wanted)[:, 0].cpu().numpy())
    return np.array(found)
