"""The theorems on speculative decoding of batches, 32: texts that draft and are verified together, and wait for each other.

An example has `texts`, for each how many drafted tokens survive if a draft starts at each position, `batch` and `draft_length`, and
what else a decoding of one text has (`draws`); or `lengths` and `rate`, in twentieths, for all luck.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from model import speculative as formulas
from model import work
from model.acceptance import Iid
from model.algorithms import speculative
from model.coins import BLOCK
from model.rounds import ReplayRounds
from model.world import Draft, World, together
from sim.cluster import Cluster
from sim.events import Run, simulate
from sim.paths import speculative as sampler
from sim.theorems import draws
from sim.theorems.drafts import digits, drafting
from sim.theorems.draws import CLOSE, survivors, whole
from sim.theorems.statement import Example, Theorem, at_most, equal

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_MOST = 3  # drafted tokens


def events_are_paths(x: Example) -> None:
    run, parameters = play(x), choice(x)
    coins = [iter([np.zeros((len(own), BLOCK))]) for own in x["texts"]]
    laws = [ReplayRounds([survivors({**x, "survive": own})]) for own in x["texts"]]
    outcomes = [law.drafts(tiles) for law, tiles in zip(laws, coins, strict=True)]
    given = outcomes if parameters.texts > 1 else outcomes[0]
    tally = sampler.walk(parameters, max(parameters.lengths or ()), draws.cost(x), given)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("rounds of texts", float(tally.rounds[0]), float(run.rounds.total()))
    equal("drafted tokens", float(tally.drafted[0]), float(sum(count * times for (_, count), times in run.rounds.items())))


def texts_are_what_they_are_alone(x: Example) -> None:
    found = _counted(x)
    for number, own in enumerate(x["texts"]):
        mine = [each._replace(text=None) for each in found.committed if each.text in (number, None)]
        equal(f"commits of text {number}", mine, _counted({**x, "texts": [own]}).committed)


def together_is_no_slower(x: Example) -> None:
    """Where a pass takes the same however wide."""
    behind = play({**x, "batch": 1}).latency
    at_most("latency of a batch", play({**x, "batch": len(x["texts"])}).latency, behind)


def no_faster_than_the_slowest(x: Example) -> None:
    batch = play({**x, "batch": len(x["texts"])}).latency
    at_most("latency of one text alone", max(_alone(x)), batch)


def as_fast_as_the_slowest(x: Example) -> None:
    equal("latency", play({**x, "batch": len(x["texts"])}).latency, max(_alone(x)))


def mean_over_all_luck(x: Example) -> None:
    rate, lengths = x["rate"] / 20, x["lengths"]
    mean = np.zeros(5)
    for luck in itertools.product(*(itertools.product((0, 1), repeat=length - 1) for length in lengths)):
        chance = math.prod(rate if right else 1 - rate for own in luck for right in own)
        if chance:
            run = play({**x, "texts": [survivors({**x, "accept": [*own, 0]}) for own in luck]})
            drafted = sum(count * times for (_, count), times in run.rounds.items())
            values = run.latency, run.busy, run.rounds.total(), drafted, run.account.heads
            mean += chance * np.array(values)
    parameters = choice({**x, "texts": [[0] * length for length in lengths]})
    found = formulas.predict(parameters, max(lengths), Iid(rate), draws.cost(x))
    closed = formulas.work(parameters, max(lengths), Iid(rate))
    heads = sum(each.heads for each in closed.of.values()) if closed is not None else math.nan
    names = "mean latency", "mean compute", "mean rounds", "mean drafted tokens", "mean heads"
    for name, got, want in zip(names, (found.latency, found.busy, found.rounds, found.drafted, heads), mean, strict=True):
        equal(name, float(got if got is not None else math.nan), float(want), CLOSE)


# --- Playing an example ---


def choice(x: Example) -> speculative.Parameters:
    """The parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "placement", "draft_layers")
    given = {"layers": 1} | {name: x[name] for name in names if name in x}
    return speculative.Parameters(**given, sequences=x["batch"], batching="static", lengths=tuple(map(len, x["texts"])))


def play(x: Example) -> Run:
    """Simulate all batches."""
    parameters = choice(x)
    n = max(map(len, x["texts"]))
    steps, cluster = speculative.decode(parameters, [0], n), Cluster(parameters.units)
    return simulate(steps, parameters.outputs_of(n), cluster, draws.cost(x), _world(x))


def _world(x: Example) -> World:
    each = [survivors({**x, "survive": own}) for own in x["texts"]]
    return together([World(1, x.get("layers", 1), drafts={"draft": Draft("target", own)}) for own in each])


def _counted(x: Example) -> work.Work:
    parameters, n = choice(x), max(map(len, x["texts"]))
    return work.count(speculative.decode(parameters, [0], n), _world(x), parameters.outputs_of(n))


def _alone(x: Example) -> Sequence[float]:
    return [play({**x, "texts": [own], "batch": 1}).latency for own in x["texts"]]


# --- What they are tried on ---


def _texts(costs: str = "whole", narrow: bool = False) -> SearchStrategy[Example]:
    """Batches of a few texts; `narrow`, a pass costs the same however wide."""
    from hypothesis import strategies as st

    @st.composite
    def texts(draw: DrawFn) -> Example:
        x = draw(drafting(tokens=1, most=_MOST, costs=costs))
        if "cost" in x and "verify_cost" in x["cost"]:
            del x["cost"]["verify_cost"]
        x["texts"] = [digits(draw, draw(st.integers(1, 5)), _MOST) for _ in range(draw(st.integers(1, 3)))]
        x["batch"] = draw(st.integers(1, 3))
        if not narrow and draw(st.booleans()):
            times = itertools.accumulate(digits(draw, 3 * (_MOST + 1) - 1, 4), initial=4)
            x["cost"] = x.get("cost", {}) | {"verify_cost": [[width, time] for width, time in enumerate(times, start=1)]}
        return {name: value for name, value in x.items() if name not in ("accept", "survive")}

    return texts()


def _luck() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    lengths = st.lists(whole(1, 3), min_size=2, max_size=3)
    return st.fixed_dictionaries({
        "draft_length": whole(0, 2), "batch": whole(1, 3), "lengths": lengths, "rate": whole(0, 20),
        "placement": st.sampled_from(speculative.PLACEMENTS), "cost": st.fixed_dictionaries({"link": whole(0, 2)}),
    })  # fmt: skip


_theorem = partial(Theorem, method="speculative")

THEOREMS = (
    _theorem(
        "32a", "Simulator and paths agree on every path, exactly, in batches of unequal texts.", source="one algorithm",
        given=_texts, holds=events_are_paths,
    ),
    _theorem(
        "32b", "A text of a batch has the rounds that it has alone.", source="luck is each text's own", given=_texts,
        holds=texts_are_what_they_are_alone,
    ),
    _theorem(
        "32c", "A batch is never faster than any of its texts alone.", source="a round drafts for the text that can use the most",
        given=_texts, holds=no_faster_than_the_slowest,
    ),
    _theorem(
        "32d", "Texts decoded together take no longer than one after the other, where a pass costs the same however wide.",
        source="a round takes at most those of its texts", given=lambda: _texts(narrow=True), holds=together_is_no_slower,
    ),
    _theorem(
        "32e", "Where width costs nothing a batch takes as long as the slowest of its texts.",
        source="false: each round drafts as much as any of its texts can use, not always the slowest one",
        given=lambda: _texts("plain", narrow=True), holds=as_fast_as_the_slowest, expect="fails",
    ),
    _theorem(
        "32f", "Means of the latency, compute, rounds, drafts and heads are those over all luck.",
        source="of independent texts so many are left after r rounds", given=_luck, holds=mean_over_all_luck,
    ),
)  # fmt: skip
