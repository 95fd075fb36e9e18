"""Theorems on the simulator: events, paths and counter describe the same decoding, on any cluster.

[Kiefer1955] J. Kiefer and J. Wolfowitz. On the Theory of Queues with Many Servers. Trans. Amer. Math. Soc. 78 (1955) 1-18.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.logs.spans import Span
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.ppd import algorithm as ppd
from model.methods.ppd import paths as sampler
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid
from model.steps import Commit, Fork, Forward, Join, LayerSpan, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.pipelined_examples import (
    cost,
    count_work,
    decodings,
    integers,
    law,
    laws,
    overheads,
    parameters_of,
    play,
    rates,
    rounding,
    same_run,
    size,
)
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_ROWS = 32  # positions per tile, as in `random_streams`


theorem = TheoremCollection("ppd")


# --- Examples ---


def _clusters(forms: tuple[str, ...] = ppd.FORMS, costs: str = "tenths", **more: Any) -> SearchStrategy[Example]:
    return decodings(forms, costs=costs, cluster=True, tokens=6, many=24, **more)


@drawn
def _queues(draw: DrawFn) -> Example:
    """Sub-processes that start one after another, and the number of units besides that of the main process."""

    count = draw(integers(1, 6))
    return {
        "gaps": [draw(integers(0, 4)) for _ in range(count)], "services": [draw(integers(1, 6)) for _ in range(count)],
        "others": draw(integers(1, 3)),
    }  # fmt: skip


def _random_draws() -> SearchStrategy[Example]:
    tokens = st.integers(1, 40)
    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**32), "block": st.integers(0, 3), "tokens": tokens, "more_tokens": tokens, "law": laws(40)}
    )


# --- 28: conservation, agreement of the views ---


@theorem("28a", "Busy time is the sum of the intervals on units, including those cut short, and at most units x latency.",
         source="conservation", given=_clusters)
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, rounding(x) * len(run.intervals))
    at_most("busy time", run.busy, _units(x) * run.latency, rounding(x))
    equal("passes", run.passes, sum(row.what == "forward" for row in run.intervals))


@theorem("28b", "Each unit runs one pass at a time; only units of the cluster are used, and none after the last token.",
         source="conservation", given=_clusters)
def one_at_a_time(x: Example) -> None:
    run = play(x, record=True)
    for unit in range(_units(x)):
        rows = sorted((row.start, row.end) for row in run.intervals if row.unit == unit)
        for (_, end), (start, _) in pairwise(rows):
            at_most(f"end of a pass on unit {unit}", end, start)
    at_most("most units in use", run.peak_units, _units(x))
    at_most("largest index of a unit", max(row.unit for row in run.intervals), _units(x) - 1)
    at_most("units in use at a time, from the intervals", _most_at_once(run.intervals), run.peak_units)
    at_most("last end of a pass", max(row.end for row in run.intervals if row.unit >= 0), run.latency)


@theorem("28c", "A shared link carries one transfer at a time.", source="conservation",
         given=lambda: _clusters(("literal", "eager", "flat")))
def one_transfer_at_a_time(x: Example) -> None:
    x = {**x, "cluster": {**x["cluster"], "links": "shared"}}
    rows = sorted((row.start, row.end) for row in play(x, record=True).intervals if row.unit < 0)
    for (_, end), (start, _) in pairwise(rows):
        at_most("end of a transfer on the shared link", end, start)


@theorem("28d", "Events and paths agree exactly on every path, with costs and unequal layers in whole layer-times.",
         source="no contention", given=lambda: decodings(costs="whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs and unequal layers in tenths of layer-times.",
         source="no contention", given=lambda: decodings(costs="tenths"))
def events_are_paths(x: Example) -> None:
    run = play(x)
    time, busy = sampler.walk(parameters_of(x), size(x), cost(x), _tiles(x["matches"][:-1]))
    equal("latency", run.latency, float(time[0]), rounding(x))
    equal("compute", run.busy, float(busy[0]), rounding(x))


@theorem("28f", "One event per pass and one event per layer give the same run, exactly in whole layer-times.",
         source="the layers of a pass run in sequence", given=lambda: _clusters(costs="whole"))
@theorem("28g", "One event per pass and one event per layer give the same run, to rounding in tenths of layer-times.",
         source="the layers of a pass run in sequence", given=lambda: decodings(costs="tenths"))
def layer_by_layer(x: Example) -> None:
    one, many = play(x, record=True), play(x, record=True, per_layer=True)
    within = rounding(x)
    for (time, *kind), (other, *other_kind) in zip(one.commits, many.commits, strict=True):
        equal("kind and number of tokens", other_kind, kind)
        equal("time of a token", other, time, within)
    equal("latency", many.latency, one.latency, within)
    equal("compute", many.busy, one.busy, within)
    if not within:  # if rounding breaks a tie, a process may start and be stopped at once
        equal("passes and most units in use", (many.passes, many.peak_units), (one.passes, one.peak_units))


@theorem("28h", "In the literal and the flat form the busy time equals the layers that the counter counts.",
         source="nothing is stopped", given=lambda: decodings(("literal", "flat")))
def counter_is_busy_time(x: Example) -> None:
    run, work = play(x), count_work(x)
    equal("layers run", work.layer_passes, run.busy)
    equal("passes", work.passes, run.passes)


@theorem("28i", "Events and counter generate the text of plain decoding, on any cluster and for any matches.",
         source="exactness: [Yang2024], section 3", given=_clusters)
def right_text(x: Example) -> None:
    kinds = ["match" if match else "miss" for match in x["matches"]]
    plain_text(x)
    for per_layer in (False, True):
        equal("kinds", [kind for _, kind, _ in play(x, per_layer=per_layer).commits], kinds)
    equal("kinds of the counter", count_work(x).commits, kinds)


def plain_text(x: Example) -> None:
    n, layers = size(x), parameters_of(x).layers
    plain = autoregressive.decode(autoregressive.Parameters(layers), [0], n)
    want = simulate(plain, n, Cluster(1), cost(x), World(1, layers, []))
    equal("text of plain decoding", want.tokens, list(range(1, n + 1)))
    for per_layer in (False, True):
        run = play(x, per_layer=per_layer)
        equal("text", run.tokens, want.tokens)
        at_most("0, against the shortest time between tokens", 0.0, min(later[0] - sooner[0] for sooner, later in _pairs(run)))
    equal("text of the counter", count_work(x).tokens, want.tokens)


@theorem("28j", "With the barrier, one more unit never makes a run longer, from one unit to one more than reserved.",
         source="sub-processes of equal length, first come, first served", given=lambda: _clusters(("literal", "flat")))
def fewer_units(x: Example) -> None:
    clusters = [{**x["cluster"], "units": units} for units in range(1, parameters_of(x).units + 2)]
    latencies = [play(x, cluster=cluster).latency for cluster in clusters]
    for units, (fewer, more) in enumerate(pairwise(latencies), start=1):
        at_most(f"latency on {units + 1} units, against {units}", more, fewer, rounding(x))


@theorem("28k", "On one unit no form is faster than plain decoding.",
         source="conservation: every token runs all layers and a head", given=_clusters)
def one_unit(x: Example) -> None:
    given = cost(x)
    plain = size(x) * given.target_pass
    at_most("latency of plain decoding", plain, play(x, cluster={**x["cluster"], "units": 1}).latency, rounding(x))


@theorem("28l", "Units beyond those that a form reserves change nothing.", source="no more processes are alive at once",
         given=lambda: decodings(costs="tenths", spare=integers(1, 3)))
def spare_units(x: Example) -> None:
    units = parameters_of(x).units
    enough, more = play(x, cluster={"units": units}), play(x, cluster={"units": units + x["spare"]})
    equal("latency", more.latency, enough.latency)
    equal("compute and most units in use", (more.busy, more.peak_units), (enough.busy, enough.peak_units))


@theorem("28m", "Waiting sub-processes get units in order of request: start times are those of a first-come, first-served queue.",
         source="first come, first served: [Kiefer1955]", given=_queues)
def first_come_first_served(x: Example) -> None:
    """Each sub-process in order of request starts when a unit is free: the recursion of Kiefer and Wolfowitz."""
    arrivals = list(itertools.accumulate(x["gaps"]))
    last = arrivals[-1] + sum(x["services"])

    def main() -> Steps:
        now, subs = 0, list[Any]()
        for arrival, service in zip(arrivals, x["services"], strict=True):
            if arrival > now:
                yield Forward("main", (0,), 0, LayerSpan(0, arrival - now))
            now = arrival
            subs += yield Fork((Forward(f"sub {len(subs)}", (0,), 0, LayerSpan(0, service)),), (None,))
        yield Forward("main", (0,), 0, LayerSpan(0, last - now + 1))
        yield Join(tuple(subs))
        yield Commit("token", (1,))

    run = simulate(main(), 1, Cluster(1 + x["others"]), UnitCost(last + 1), World(1, last + 1, []), record=True)
    free, want = [0] * x["others"], []
    for arrival, service in zip(arrivals, x["services"], strict=True):
        start = max(arrival, min(free))
        free[free.index(min(free))] = start + service
        want.append((start, start + service))
    measured = {row.role: (row.start, row.end) for row in run.intervals if row.what == "forward"}
    equal("starts and ends of sub-processes", [measured[f"sub {index}"] for index in range(len(want))], want)


@theorem("28n", "Steps that are answered together give the same run as each by itself.", source="they stand for the other steps",
         given=lambda: decodings(costs="tenths", cluster=True))
def offers_change_nothing(x: Example) -> None:
    same_run(play(x, offers=True), play(x))


# --- 29: random draws are indexed by position ---


@theorem("29a", "On the same matches a longer run begins with the tokens and times of the shorter run.",
         source="nothing looks ahead", given=lambda: decodings(costs="tenths", at=integers(0, 39)))
def longer_runs_extend_shorter(x: Example) -> None:
    long, short = play(x), play(x, matches=x["matches"][: 1 + x["at"] % size(x)])
    equal("commits of the shorter run", short.commits, long.commits[: len(short.commits)])


@theorem("29b", "The outcomes of a longer run begin with those of a shorter one, under any law.",
         source="random draws are indexed by position", given=_random_draws)
def draws_extend(x: Example) -> None:
    shorter, longer = (_outcomes(x, tokens) for tokens in sorted((x["tokens"], x["more_tokens"])))
    equal("outcomes that differ", int((longer[: len(shorter)] != shorter).sum()), 0)
    equal("outcomes requested", len(longer), max(x["tokens"], x["more_tokens"]))


@theorem("29c", "With the same random draws a higher match rate never makes a run longer.", source="coupling: it only adds matches",
         given=lambda: decodings(seed=integers(0, 2**32), match_rate=rates(), other_rate=rates()))
def higher_rate_is_no_slower(x: Example) -> None:
    n, low, high = size(x), *sorted((x["match_rate"], x["other_rate"]))
    times = []
    for rate in (low, high):
        matches = Iid(rate).sample(random_streams.tiles(x["seed"], "match", 0, n - 1))
        times.append(sampler.walk(parameters_of(x), n, cost(x), matches)[0])
    slower = int((times[1] > times[0]).sum())
    equal(f"replications that a match rate of {high} makes longer than one of {low}", slower, 0)


@theorem("29d", "A match in place of a miss never makes a run longer.", source="21a, 22a and 23d",
         given=lambda: decodings(at=integers(0, 39)))
@theorem("29e", "A match in place of a miss never makes a run longer, for any overheads.",
         source="false: a promotion may cost more than it saves",
         given=lambda: decodings(("literal", "eager", "flat"), cost=overheads("whole"), at=integers(0, 39)), expect="fails")
def match_in_place_of_a_miss(x: Example) -> None:
    at = x["at"] % size(x)
    hit = [*x["matches"][:at], True, *x["matches"][at + 1 :]]
    at_most("latency with one more match", play(x, matches=hit).latency, play(x).latency)


# --- Helpers ---


def _units(x: Example) -> int:
    return int(x["cluster"]["units"])


def _most_at_once(rows: list[Span]) -> int:
    """Largest number of units in use at a time; an interval that starts as another ends does not overlap it."""
    changes = sorted((time, step) for row in rows if row.unit >= 0 and row.start < row.end
                     for time, step in ((row.start, 1), (row.end, -1)))  # fmt: skip
    now = most = 0
    for _, step in changes:
        now += step
        most = max(most, now)
    return most


def _pairs(run: Run) -> Iterator[tuple[tuple[float, str, int], tuple[float, str, int]]]:
    return pairwise([(0.0, "start", 0), *run.commits])


def _tiles(matches: list[bool]) -> Iterator[NDArray[np.bool_]]:
    """Yield the same matches for every replication, in tiles like those of a law."""
    for start in range(0, len(matches), _ROWS):
        yield np.repeat(np.array(matches[start : start + _ROWS])[:, None], random_streams.BLOCK, axis=1)


def _outcomes(x: Example, positions: int) -> NDArray[np.bool_]:
    """Outcomes of one block of replications. A law may reuse its buffer, so every tile is copied."""
    tiles = law(x["law"]).sample(random_streams.tiles(x["seed"], "match", x["block"], positions))
    return np.concatenate([tile.copy() for tile in tiles])


THEOREMS = theorem.all()
