"""Hardware at one operating point, as the engine's costs: layer-times, and how long one is.

Methods, their formulas and their simulation count in layer-times. This is where seconds become layer-times: at one context, in
the middle of the text that is decoded, and one batch. What a pass takes once (launching, sampling, what an engine adds) is `step`;
embedding is put before the first layer, since it is there once for every new token of every process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.base import checks
from model.costs.layer_times import UnitCost
from model.hardware.cost_models import Hardware, bytes_of_state, pass_time
from model.hardware.interpolation import Estimate

TOKEN_BYTES = 64
"""What telling another process which token to go on with takes."""


@dataclass(frozen=True)
class OperatingPoint:
    """Costs in layer-times, what one is, and how far off it may be.

    Parameters
    ----------
    cost
        As methods and the engine take them.
    seconds_per_layer
        The unit of the costs: a layer over one token of each of `batch` sequences; of a static batch over one token of one [s].
    error
        Relative error of a step of plain decoding [-].
    slow, fast
        The costs where everything but the target's single step takes as much longer, or shorter, as it may.
    drift
        By how much a step of the batch takes longer at the last token than at the first, over its time at mid-context: what one
        context leaves out; below zero where it takes less [-].
    """

    cost: UnitCost
    seconds_per_layer: float
    error: float
    slow: UnitCost
    fast: UnitCost
    drift: float


def operating_point(
    target: Hardware,
    *,
    prompt: int,
    tokens: int,
    batch: int = 1,
    draft: Hardware | None = None,
    medium: Hardware | None = None,
    widest: int = 1,
    texts: bool = False,
    together: int = 1,
    handed_over: int = 0,
    busy: int = 0,
    more: dict[str, Any] | None = None,
) -> OperatingPoint:
    """The costs of decoding `tokens` tokens behind a prompt.

    Parameters
    ----------
    target, draft, medium
        The models on their hardware.
    prompt, tokens, batch
        Cached positions at the start, new ones, and sequences over which every pass is priced: those of a full batch.
    widest, texts
        The widest pass of the method, and whether width means sequences of a static batch (one token of each) or tokens of one.
    together
        Sequences of a static batch whose passes may each be over several tokens, up to `widest` of each; `batch` is then 1.
    handed_over
        Layers whose keys and values a process hands over when it is taken over.
    busy
        Other units of the host that are at work meanwhile.
    more
        Further fields of `UnitCost`, in layer-times; those of links and dispatch add to what the hardware takes.

    >>> from model.hardware.cost_models import UniformLayers
    >>> from model.architectures.transformer import preset
    >>> found = operating_point(UniformLayers(preset("llama-2-13b"), 0.001), prompt=512, tokens=128)
    >>> found.cost.plain, found.seconds_per_layer, found.drift
    (True, 0.001, 0.0)
    """
    checks.whole("prompt", prompt, 0)
    checks.whole("tokens", tokens, 1)
    checks.whole("batch", batch, 1)
    shape = target.shape
    context = prompt + tokens // 2
    one = target.layer(1, context, batch, busy=busy)
    layer = float(one.seconds)
    if not layer > 0:
        raise checks.ParameterError(f"a layer must take time, got {layer:g} s at context {context} and batch {batch}")

    def layers(found: Estimate) -> float:
        return float(found.seconds) / layer

    before = layers(target.embedding(batch))
    head = layers(target.head(batch))
    making = 2 * shape.hidden * shape.kv_heads * shape.head_dim / shape.layer_weights
    given = dict(more or {})
    known: dict[str, Any] = {"step": layers(target.step(batch)), "early_head": head, "final_head": head}
    if before:
        known["layer_times"] = (1.0 + before, *[1.0] * (shape.layers - 1))
    known |= {
        "propagation": making,
        "link": layers(target.transfer(TOKEN_BYTES)) + given.pop("link", 0.0),
        "promotion": layers(target.transfer(bytes_of_state(shape, handed_over))) + given.pop("promotion", 0.0),
    }
    step = pass_time(target, 1, context, batch, busy=busy)
    wrong: list[tuple[str, float]] = []
    for role, name in ((draft, "cost_ratio"), (medium, "medium_cost_ratio")):
        if role is not None:
            found = pass_time(role, 1, context, batch, busy=busy)
            known[name] = float(found.seconds / step.seconds)
            counts = [each.shape.operations(1, context, heads=1) for each in (role, target)]
            known[name.replace("cost", "operations")] = counts[0] / counts[1]
            wrong.append((name, float(found.error + step.error)))
    cost = UnitCost(shape.layers, **known, **given)
    slow, fast = cost, cost
    if together > 1:
        models = {"target": target} | ({} if draft is None else {"draft": draft})
        rows = [_by_texts(role, each, context, together, widest if role == "target" else 1, busy) for role, each in models.items()]
        slow, cost, fast = (replace(cost, by_texts=tuple(row for each in rows for row in each[end])) for end in range(3))
    elif widest > 1:
        widths = _widths(widest)
        many = np.asarray(widths)
        found = pass_time(target, 1 if texts else many, context, many if texts else batch, busy=busy)
        # A part of the error is the same for all widths, and cancels; what is left is at most that of the wide pass itself.
        relative = found.seconds / found.seconds[0]
        spread = np.where(many > 1, found.error, 0.0)
        cost = replace(cost, verify_cost=_pairs(widths, relative))
        slow = replace(cost, verify_cost=_pairs(widths, relative * (1 + spread)))
        fast = replace(cost, verify_cost=_pairs(widths, np.maximum(relative * (1 - spread), 1e-9)))
    for name, error in wrong:
        ratio = known[name]
        slow, fast = replace(slow, **{name: ratio * (1 + error)}), replace(fast, **{name: ratio * max(1 - error, 0.0)})
    run = max(batch, together, widest if texts else 1)  # sequences of the batch
    first, middle, last = pass_time(target, 1, np.asarray([prompt, context, prompt + tokens]), run, busy=busy).seconds
    drift = float((last - first) / middle)
    return OperatingPoint(cost, layer, float(step.error), slow, fast, drift)


def _by_texts(
    role: str, of: Hardware, context: int, together: int, widest: int, busy: int
) -> list[list[tuple[str, int, int, float]]]:
    """Passes over so many tokens of each of so many texts (`UnitCost.by_texts`): as slow as they may be, as they are, as fast."""
    texts, widths = np.asarray(_widths(together)), np.asarray(_widths(widest))
    found = pass_time(of, widths[None, :], context, texts[:, None], busy=busy)
    relative = np.broadcast_to(found.seconds / found.seconds[0, 0], (texts.size, widths.size))
    spread = np.broadcast_to(found.error, relative.shape).copy()
    spread[0, 0] = 0.0
    ends = relative * (1 + spread), relative, np.maximum(relative * (1 - spread), 1e-9)
    places = [*np.ndindex(relative.shape)]
    return [[(role, int(texts[i]), int(widths[j]), float(times[i, j])) for i, j in places] for times in ends]


def _widths(widest: int) -> list[int]:
    """Every width up to 64, then ever fewer: curves are linear between them."""
    found = list(range(1, min(widest, 64) + 1))
    while found[-1] < widest:
        found.append(min(widest, int(found[-1] * 1.1) + 1))
    return found


def _pairs(widths: list[int], times: np.ndarray) -> tuple[tuple[int, float], ...]:
    return tuple((width, float(time)) for width, time in zip(widths, times, strict=True))
