"""Adaptive draft lengths: how they move and settle while decoding, and their speed-up against the best fixed length.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray

from figures.common.style import COLOURS, GREY, INK, LINES, MARKERS, SeriesStyle, canvas, require_columns, styled
from model.base import checks
from model.costs.layer_times import UnitCost
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.draft_length_policies import Constant, Policy
from model.methods.rounds.prices_of_rounds import round_prices
from model.methods.rounds.round_walks import varying
from model.methods.speculative import theory as speculative
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Outcomes

Floats = NDArray[np.float64]

_LAYERS = 40  # of the target; all results are relative to it
_MOST_SEQUENCES, _MOST_RUNS = 3, 4
CHOICES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "heuristic": {"policy": "heuristic"},
        "gradient": {"policy": "gradient", "estimator": "tested"},
        "gradient, biased": {"policy": "gradient", "estimator": "drafted"},
        "optimum": {"policy": "optimum", "estimator": "tested"},
        "optimum, biased": {"policy": "optimum", "estimator": "drafted"},
    }
)
"""Policies, as options of `model.methods.adaptive.algorithm.Parameters`; biased ones divide accepted by all drafted tokens."""
FIXED, BOUND = "best fixed", "bound"
_HEADS = {
    "heuristic": "heuristic: +2 if all accepted, else −1", "gradient": "gradient: one step uphill per round",
    "optimum": "optimum: best for the running mean",
}  # fmt: skip
_LOOKS = {
    "heuristic": SeriesStyle(COLOURS[2], MARKERS[0], LINES[0]), "gradient": SeriesStyle(COLOURS[0], MARKERS[1], LINES[0]),
    "gradient, biased": SeriesStyle(COLOURS[1], MARKERS[2], LINES[1]), "optimum": SeriesStyle(COLOURS[0], MARKERS[3], LINES[0]),
    "optimum, biased": SeriesStyle(COLOURS[1], MARKERS[4], LINES[1]),
}  # fmt: skip
_NEEDED = ("text", "policy", "position", "acceptance_rate", "cost_ratio", "low", "median", "high", "speedup")


# --- Simulation ----------------------------------------------------------------------------------------------------------


def trajectories(
    acceptance_rates: ArrayLike, cost_ratio: float, *, text: str = "", longest: int = 20, replications: int = 1000, seed: int = 0
) -> pl.DataFrame:
    """Simulate every policy of `CHOICES` with the same random draws: draft length at each output position, and speed-up.

    `acceptance_rates` has the rate of every position but the last, which is never drafted, so there is one more token. Acceptances
    are independent; a policy sees only the numbers of accepted and drafted tokens. One row per policy and position:
    low, median and high are quartiles over the decodings of the draft length in force there [tokens]; `speedup` is that of whole
    decodings, mean over mean. `FIXED` is the fastest fixed length for these draws, `BOUND` an upper bound for all policies (its
    lengths are null): of l tokens of rates alpha_t at most the sum of alpha_t is accepted on average; each of these costs c, each
    other token 1.

    >>> rows = trajectories([0.8] * 63, 0.1, replications=50)
    >>> rows.filter(policy="bound")["speedup"].round(4)[0]  # 64 / (64 - 0.9 * 0.8 * 63)
    3.4335
    """
    rates = checks.array("acceptance_rates", acceptance_rates, 0, 1)
    if rates.ndim != 1 or not rates.size:
        raise checks.ParameterError(f"acceptance_rates must be a list of one rate or more, got {checks.shown(acceptance_rates)}")
    checks.number("cost_ratio", cost_ratio, 0)
    checks.whole("longest", longest, 1)
    checks.whole("replications", replications, 1, random_streams.BLOCK)
    cost = UnitCost(_LAYERS, cost_ratio=cost_ratio)
    tokens = len(rates) + 1
    uniforms = np.concatenate([tile[:, :replications].copy() for tile in random_streams.tiles(seed, "accept", 0, len(rates))])
    accepted = uniforms < rates[:, None]
    results: dict[str, tuple[Floats, float]] = {}
    for name, options in CHOICES.items():
        parameters = Parameters(_LAYERS, max_draft_length=longest, **options).with_costs(cost)
        results[name] = _simulate(parameters.initial_policy(replications), accepted, cost, longest)
    fixed = [_simulate(Constant(length, replications), accepted, cost, longest) for length in range(longest + 1)]
    results[FIXED] = max(fixed, key=lambda result: result[1])
    bound = tokens / (tokens - (1 - min(cost_ratio, 1.0)) * rates.sum())
    results[BOUND] = np.full((tokens - 1, 3), np.nan), float(bound)
    parts = [_rows(name, quartiles, speed, rates) for name, (quartiles, speed) in results.items()]
    return pl.concat(parts).with_columns(pl.lit(text).alias("text"), pl.lit(float(cost_ratio)).alias("cost_ratio"))


def example(replications: int = 1000) -> pl.DataFrame:
    """Two sequences of 400 tokens with assumed rates: constant, and lower in the second half; drafts cost a tenth.

    >>> example()["text"].unique(maintain_order=True).to_list()
    ['steady text', 'text that becomes harder']
    """
    steady, harder = np.full(399, 0.85), np.where(np.arange(399) < 200, 0.85, 0.45)
    rates_of = {"steady text": steady, "text that becomes harder": harder}
    return pl.concat([trajectories(rates, 0.1, text=text, replications=replications) for text, rates in rates_of.items()])


class _Recorded:
    """A policy that records its draft lengths at each position."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.length = policy.length
        self.seen: list[NDArray[np.int64]] = []

    def learn(self, which: NDArray[np.intp], accepted: NDArray[np.int64], drafted: NDArray[np.int64]) -> None:
        # Called once per position, before the policy learns about it.
        self.seen.append(self._policy.length.copy())
        self._policy.learn(which, accepted, drafted)
        self.length = self._policy.length


def _simulate(policy: Policy, accepted: NDArray[np.bool_], cost: UnitCost, longest: int) -> tuple[Floats, float]:
    """Return quartiles of the draft length at each position, and the speed-up."""
    tokens, recorded = len(accepted) + 1, _Recorded(policy)
    tally = varying(recorded, tokens, _outcomes(accepted), round_prices(cost, longest))
    quartiles = np.quantile(np.array(recorded.seen[:-1]), (0.25, 0.5, 0.75), axis=1, method="inverted_cdf")
    return np.asarray(quartiles.T, dtype=np.float64), float(tokens * cost.target_pass / tally.time.mean())


def _outcomes(accepted: NDArray[np.bool_]) -> Iterator[Outcomes]:
    """Outcomes for `varying`; independent of the position in the draft."""
    return (partial(_given, row) for row in accepted)


def _given(row: NDArray[np.bool_], _position: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return row


def _rows(name: str, quartiles: Floats, speed: float, rates: Floats) -> pl.DataFrame:
    columns = dict(zip(("low", "median", "high"), quartiles.T, strict=True))
    frame = pl.DataFrame({"position": np.arange(len(rates)), "acceptance_rate": rates, **columns})
    return frame.with_columns(pl.lit(name).alias("policy"), pl.lit(speed).alias("speedup")).fill_nan(None)


# --- The picture ------------------------------------------------------------------------------------------------------


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a row of panels per sequence: the draft lengths of each policy and, at the right, the speed-up of each.

    `rows` are those of `trajectories`, of up to three sequences.
    """
    table = require_columns(rows, "the figure of adaptive draft lengths", _NEEDED)
    for name in table["policy"].unique(maintain_order=True):
        checks.one_of("policy", name, (*CHOICES, FIXED, BOUND))
    sequences = table.partition_by("text", maintain_order=True)
    if len(sequences) > _MOST_SEQUENCES:
        raise checks.ParameterError(f"rows must be of at most {_MOST_SEQUENCES} sequences, got {len(sequences)}")
    most: Any = table["high"].max()
    top = 1.12 * max(most or 1, *(float(_best(text)[1].max()) for text in sequences), 1)
    with styled():
        height = 1.05 + 3.25 * len(sequences)
        figure, only = canvas(14.0, height, (0, 0, 1, 1))
        only.remove()
        for index, text in enumerate(sequences):
            bottom = 0.6 + 3.25 * (len(sequences) - 1 - index)
            figure.text(0.045, (bottom + 2.56) / height, _name(text), fontsize=11, weight="bold", va="center")
            _text(figure, text, bottom / height, 2.15 / height, top)
        title = "Adaptive draft lengths, and their speed-up"
        figure.text(0.045, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
        figure.text(0.045, 1 - 0.54 / height, _subtitle(table), fontsize=9.5, color=GREY, va="center")
        _legend(figure, height)
    return figure


def _text(figure: Figure, text: pl.DataFrame, bottom: float, height: float, top: float) -> None:
    for column, (policy, head) in enumerate(_HEADS.items()):
        axes = figure.add_axes((0.045 + 0.205 * column, bottom, 0.19, height))
        _lengths(axes, text, policy)
        axes.set_ylim(0, top)
        axes.set_title(head, fontsize=10)
        axes.tick_params(labelleft=not column)
        if not column:
            axes.set_ylabel("draft length γ  [tokens]")
    _speeds(figure.add_axes((0.785, bottom, 0.165, height)), text)


def _name(text: pl.DataFrame) -> str:
    rates = text.filter(policy=text["policy"][0])["acceptance_rate"]
    runs = rates.filter(rates.ne_missing(rates.shift())).to_list()
    rates_text = f"α = {', then '.join(f'{rate:g}' for rate in runs)}" if len(runs) <= _MOST_RUNS else "α changes"
    return f"{text['text'][0]}:  {rates_text}" if text["text"][0] else rates_text


def _lengths(axes: Axes, text: pl.DataFrame, policy: str) -> None:
    at, best = _best(text)
    axes.grid(True)
    axes.step(at, best, where="mid", color=INK, linewidth=1.6, linestyle=(0, (1.2, 1.2)), zorder=2.2, label="best for the rate")
    fixed = text.filter(policy=FIXED)
    if fixed.height:
        axes.axhline(fixed["median"][0], color=GREY, linewidth=1.0, linestyle=(0, (5, 2)), zorder=1.9, label=FIXED)
    for name in (policy, f"{policy}, biased"):
        part = text.filter(policy=name)
        if not part.height:
            continue
        style = _LOOKS[name]
        axes.fill_between(
            part["position"], part["low"], part["high"], color=style.colour, alpha=0.22, linewidth=0, step="mid",
            label=f"band {name}",
        )  # fmt: skip
        axes.step(
            part["position"], part["median"], where="mid", color=style.colour, linestyle=style.line, linewidth=1.6, zorder=2.5,
            label=name,
        )  # fmt: skip
    axes.set_xlim(0, max(float(at[-1]), 1))
    axes.set_xlabel("output position  [tokens]")


def _best(text: pl.DataFrame) -> tuple[Floats, Floats]:
    """Positions, and the best length for the rate at each, if it held for many tokens."""
    own = text.filter(policy=text["policy"][0])
    best = speculative.optimal_draft_length(own["acceptance_rate"].to_numpy(), own["cost_ratio"].to_numpy())
    return own["position"].to_numpy().astype(np.float64), np.asarray(best, dtype=np.float64)


def _speeds(axes: Axes, text: pl.DataFrame) -> None:
    speeds = dict(text.select("policy", "speedup").unique(maintain_order=True).rows())
    names = [name for name in speeds if name in CHOICES]
    axes.grid(True, axis="x")
    high = max(speeds.values())
    start = speeds.get(FIXED, min(speeds.values()))
    for level, name in enumerate(names):
        style, speed = _LOOKS[name], speeds[name]
        axes.plot([start, speed], [level, level], color=style.colour, linewidth=2.5, zorder=2.4, label=f"from {FIXED} {name}")
        axes.plot(
            [speed], [level], linestyle="none", marker=style.marker, markersize=7.5, color=style.colour, markeredgecolor="white",
            zorder=3, label=name,
        )  # fmt: skip
        label = f"{speed:.2f}×" + (f"  ({100 * (speed / start - 1):+.1f} %)".replace("-", "−") if FIXED in speeds else "")
        right = max(speed, start)
        axes.annotate(label, (right, level), (8, 0), textcoords="offset points", va="center", fontsize=8.5, color=style.colour)
    for name, line, words in (
        (FIXED, (0, (5, 2)), f"best fixed, γ = {_fixed(text)}\n{{:.2f}}×"), (BOUND, (0, (1.2, 1.2)), "upper bound\n{:.2f}×"),
    ):  # fmt: skip
        if name in speeds:
            axes.axvline(speeds[name], color=GREY if name == FIXED else INK, linewidth=1.4, linestyle=line, label=name)
            axes.annotate(
                words.format(speeds[name]), (speeds[name], 1), (0, 3), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="bottom", fontsize=8.5, color=GREY if name == FIXED else INK,
                linespacing=1.1,
            )  # fmt: skip
    low = min(speeds.values())
    room = (high - low) or 0.1
    axes.set_xlim(low - 0.12 * room, high + 0.12 * room)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(_LOOKS[name].colour)
    axes.set_xlabel("speed-up over plain decoding")


def _fixed(text: pl.DataFrame) -> str:
    lengths = text.filter(policy=FIXED)["median"]
    return f"{lengths[0]:g}" if len(lengths) else ""


def _subtitle(table: pl.DataFrame) -> str:
    ratios = ", ".join(f"{ratio:g}" for ratio in table["cost_ratio"].unique(maintain_order=True))
    drawn = "lines: medians over decodings; all policies share the same random draws"
    return f"a draft costs c = {ratios} of a target pass; {drawn}"


def _legend(figure: Figure, height: float) -> None:
    tested, biased = _LOOKS["optimum"], _LOOKS["optimum, biased"]
    handles: list[Any] = [
        Line2D([], [], color=INK, linewidth=1.6, linestyle=(0, (1.2, 1.2)), label="best γ for the rate at this position"),
        Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (5, 2)), label="best fixed γ for the whole sequence"),
        Line2D([], [], color=tested.colour, linestyle=tested.line, linewidth=1.6, label="α estimated as accepted / tested"),
        Line2D([], [], color=biased.colour, linestyle=biased.line, linewidth=1.6, label="biased: estimated as accepted / drafted"),
        Patch(facecolor=GREY, alpha=0.22, label="quartiles over decodings"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.042, 1 - 0.7 / height), ncols=5, borderaxespad=0, borderpad=0,
        columnspacing=1.5,
    )  # fmt: skip
