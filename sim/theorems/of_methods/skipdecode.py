"""Theorems on SkipDecode, 30 and 28: layers by position, limits set by the KV cache, batches that wait.

An example has `layers`, `min_layers`, `max_layers`, `warm_up`, `rounding`, `power`, the number of positions of the schedule
(`room`), and the `lengths` of all sequences, of which `batch` are decoded together. Costs are in quarters.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import Lossy, World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.skipdecode import paths as sampler
from model.methods.skipdecode import theory as formulas
from model.steps import CacheError, Forward, LayerSpan, declining
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import digits
from sim.theorems.pipelined_examples import CLOSE, in_quarters, integers, quarters, same_run
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_PROMPT = 3  # position at which the schedule begins


theorem = TheoremCollection("skipdecode")


# --- Examples ---


@drawn
def _skips(draw: DrawFn, /, sequences: int = 4, **more: Any) -> Example:
    layers, room = draw(integers(1, 8)), draw(integers(1, 6))
    most = draw(integers(1, layers))
    least = draw(integers(1, most))
    lengths = [1 + length for length in digits(draw, draw(integers(1, sequences)), room - 1)]
    example = {
        "layers": layers, "min_layers": least, "max_layers": most, "warm_up": draw(integers(0, least)), "room": room,
        "rounding": draw(st.sampled_from([*formulas.ROUNDINGS])), "power": draw(st.sampled_from((1.0, 0.5, 2.0))),
        "batch": draw(integers(1, 3)), "lengths": lengths, "cost": draw(quarters()), "decay_prompt": draw(st.booleans()),
    }  # fmt: skip
    return example | {name: draw(strategy) for name, strategy in more.items()}


@drawn
def _rising(draw: DrawFn) -> Example:

    layers = draw(integers(2, 8))
    budgets = [draw(integers(1, layers)), draw(integers(1, layers))]
    return {"layers": layers, "budgets": budgets, "warm_up": draw(integers(0, 2)), "room": 3}


def _uneven() -> SearchStrategy[Example]:
    """Draw layers of unequal times, and the time that each further sequence adds to a pass."""
    return _skips(layer_times=_several(8, 1, 6), wider=_several(2, 0, 3))


def _several(count: int, least: int, most: int) -> SearchStrategy[list[int]]:
    return st.lists(integers(least, most), min_size=count, max_size=count)


# --- 30: the schedule and the skipped layers ---


@theorem("30a", "The schedule never rises and stays within its bounds; the layers of a token are a subset of those of every"
         " earlier token.", source="[DelCorro2023], Sections 2.3 and 2.4", given=_skips)
def schedule_falls(x: Example) -> None:
    parameters = parameters_of(x)
    layers = formulas.exit_layers(x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["room"], power=x["power"])
    for sooner, later in pairwise(layers.tolist()):
        at_most("layers of a later token", later, sooner, CLOSE)
    at_most("largest number of layers", float(layers.max()), x["max_layers"], CLOSE)
    at_most("least number of layers", x["min_layers"], float(layers.min()), CLOSE)
    sets = [_run_by(skipdecode.skipped(parameters, budget), x["layers"]) for budget in skipdecode.schedule(parameters, x["room"])]
    for sooner, later in pairwise(sets):
        equal("layers of a later token that an earlier one skips", sorted(later - sooner), [])


@theorem("30b", "The mean of the linear schedule is max - (max - min)(n - 1) / (2 (sequence - prompt)).",
         source="[DelCorro2023], Section 2.3", given=_skips)
def mean_of_the_schedule(x: Example) -> None:
    given = x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"]
    for count in range(1, x["room"] + 1):
        equal("mean layers", formulas.mean_layers(*given, count), float(formulas.exit_layers(*given, count).mean()), 1e-11)


@theorem("30c", "No layer that runs lacks a cache row: nothing is recomputed or filled in.",
         source="[DelCorro2023], Section 2.4", given=_skips)
def no_row_is_missing(x: Example) -> None:
    """The cache rejects a pass through a layer that lacks a row, so rows are only made by running the layer."""
    account = count_work(x).account.totals().by_model["target"]
    equal("rows filled in without running the layer", account.filled, 0)
    play(x)


@theorem("30d", "A rising schedule reaches a layer that lacks a cache row, and is rejected.", source="the cache", given=_rising)
def rising_schedule_is_rejected(x: Example) -> None:
    """A token with more layers than an earlier one reaches a layer that lacks the earlier row."""
    layers, (fewer, more) = x["layers"], sorted(x["budgets"])
    if fewer == more:
        return
    cache, parameters = Cache(), parameters_of({**x, "min_layers": fewer, "max_layers": more, "warm_up": min(x["warm_up"], fewer)})
    passes = [Forward("target", (0,), at, LayerSpan(0, layers, gaps=skipdecode.skipped(parameters, budget)))
              for at, budget in enumerate((more, fewer, more))]  # fmt: skip
    cache.write(passes[0])
    cache.write(passes[1])
    try:
        cache.write(passes[2])
    except CacheError:
        return
    raise AssertionError(f"{more} layers after {fewer} of {layers} were not rejected")


@theorem("30e", "With min_layers = max_layers = layers, tokens and times are those of plain decoding.",
         source="nothing is skipped", given=_skips)
def all_layers_are_the_plain_model(x: Example) -> None:
    everything = {"min_layers": x["layers"], "max_layers": x["layers"], "batch": 1, "lengths": [x["lengths"][0]]}
    run = play({**x, **everything})
    _equal_to_plain(run, {**x, **everything})


@theorem("30f", "The last token of the longest sequence runs min_layers layers.",
         source="false: t < 1 there; only rounding may reach min_layers", given=_skips, expect="fails")
def last_token_has_the_least(x: Example) -> None:
    layers = formulas.exit_layers(x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["room"])
    equal("layers of the last token", float(layers[-1]), float(x["min_layers"]))


@theorem("30g", "The speed-up equals the ratio of layers to mean layers run.",
         source="false: the projection onto the vocabulary is not skipped",
         given=_skips, expect="fails")
def layers_are_time(x: Example) -> None:
    widths = parameters_of(x).columns(_longest(x))[1].tolist()
    plain, mean = len(widths) * in_quarters(x).target_pass, count_work(x).account.layer_passes / sum(widths)
    equal("speed", plain / play(x).latency, x["layers"] / mean, CLOSE)


@theorem("30h", "A schedule that begins with the prompt lacks no cache row, gives no token more layers than one that begins after"
         " it, and none more than an earlier token, of prompt or output.", source="the schedule falls from the first token on",
         given=lambda: _skips(given=integers(1, _PROMPT + 1)))
def decay_in_the_prompt(x: Example) -> None:
    decayed, usual = (replace(parameters_of(x), decay_prompt=flag, lengths=None, sequences=1) for flag in (True, False))
    n, length = _longest(x), x["given"]
    for later, sooner in zip(skipdecode.schedule(decayed, n), skipdecode.schedule(usual, n), strict=True):
        at_most("layers of a generated token", later, sooner)
    steps = skipdecode.decode(decayed, [0] * length, n)
    kinds = interpreter.count(steps, Lossy(length, x["layers"]), n).account.passes_by_kind  # refuses a missing row
    equal("tokens read", sum(count * kind.width for kind, (count, *_) in kinds.items()), length - 1 + n)
    sizes = [kind.layers.size for kind in kinds]  # in the order of their first pass
    for sooner, later in pairwise(sizes):
        at_most("layers of a later pass", later, sooner)
    budgets = [part.size for first, last, part in skipdecode.prompt_parts(decayed, length - 1) for _ in range(first, last)]
    want = skipdecode.exit_layers(
        x["min_layers"], x["max_layers"], 0, _PROMPT + x["room"], _PROMPT + x["room"], rounding=x["rounding"], power=x["power"]
    )
    equal("layers of the tokens", [*budgets, *skipdecode.schedule(decayed, n)], want[_PROMPT - length + 1 : _PROMPT + n].tolist())


# --- 28: agreement of the views, conservation of work, batches ---


@theorem("28a", "Events, paths and formula agree exactly.", source="same algorithm", given=_uneven)
def events_are_paths(x: Example) -> None:
    run = play(x)
    time, busy = sampler.walk(parameters_of(x), _longest(x), cost(x), iter(()))
    predicted = formulas.predict(parameters_of(x), _longest(x), None, cost(x))
    equal("latency of the paths", time.tolist(), [run.latency] * len(time))
    equal("compute of the paths", busy.tolist(), [run.busy] * len(busy))
    equal("latency of the formula", float(predicted.latency), run.latency)
    equal("compute of the formula", float(predicted.busy), run.busy)


@theorem("28b", "Counter, events and formula agree on passes, layers, rows and heads.", source="conservation of work",
         given=_skips)
def work_is_the_closed_form(x: Example) -> None:
    got = count_work(x).account.totals().by_model["target"]
    want = formulas.work(parameters_of(x), _longest(x), None).by_model["target"]
    for name, value, expected in zip(got._fields, got, want, strict=True):
        equal(name, float(value), expected, CLOSE)
    equal("passes of the simulator", play(x).account.totals().by_model["target"], got)


@theorem("28c", "A batch takes as long as its longest sequence alone, and the next batch begins when it ends.",
         source="all sequences of a batch are at the same position", given=_skips)
def batch_takes_as_long_as_its_longest_sequence(x: Example) -> None:
    run, lengths = play(x), x["lengths"]
    batches = [lengths[start : start + x["batch"]] for start in range(0, len(lengths), x["batch"])]
    want = sum(play({**x, "lengths": [max(batch)], "batch": 1}).latency for batch in batches)
    equal("latency", run.latency, want)
    equal("tokens", len(run.tokens), sum(lengths))


@theorem("28n", "Steps that are answered together give the same run as each by itself.", source="they stand for the other steps",
         given=lambda: _skips(sequences=1, layer_times=_several(8, 1, 6), wider=_several(2, 0, 3)))
def offers_change_nothing(x: Example) -> None:
    same_run(play(x, offers=True), play(x))


# --- Playing an example ---


def parameters_of(x: Example) -> skipdecode.Parameters:
    """Return the parameters of an example's decoding."""
    lengths = x.get("lengths")
    return skipdecode.Parameters(
        x["layers"], x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["warm_up"], x.get("rounding", "half-up"),
        x.get("power", 1.0), x.get("decay_prompt", False), sequences=x.get("batch", 1), batching="static",
        lengths=None if lengths is None else tuple(lengths),
    )  # fmt: skip


def play(x: Example, *, offers: bool = False) -> Run:
    """Simulate an example's decoding, each step by itself; with `offers`, several may be answered together (28n)."""
    n, parameters = _longest(x), parameters_of(x)
    steps = skipdecode.decode(parameters, [0], n)
    own = steps if offers else declining(steps)
    return simulate(own, parameters.total_tokens(n), Cluster(1), cost(x), Lossy(1, x["layers"]))


def cost(x: Example) -> UnitCost:
    """Return costs in quarters, so that sums are exact; layers may be unequal, and passes over several sequences take longer."""
    if "layer_times" not in x:
        return in_quarters(x)
    times, curve = x["layer_times"][: x["layers"]], itertools.accumulate(x["wider"], initial=4)
    return replace(in_quarters(x), layer_times=tuple(time / 4 for time in times), verify_cost=tuple(enumerate(curve, 1)))


def count_work(x: Example) -> interpreter.CountedWork:
    """Count the work of an example's decoding."""
    n, parameters = _longest(x), parameters_of(x)
    return interpreter.count(skipdecode.decode(parameters, [0], n), Lossy(1, x["layers"]), parameters.total_tokens(n))


def _longest(x: Example) -> int:
    return int(max(x["lengths"]))


def _run_by(gaps: tuple[tuple[int, int], ...], layers: int) -> set[int]:
    return {*range(layers)}.difference(*(range(*gap) for gap in gaps))


def _equal_to_plain(run: Run, x: Example) -> None:
    n = _longest(x)
    plain = autoregressive.decode(autoregressive.Parameters(x["layers"]), [0], n)
    want = simulate(plain, n, Cluster(1), in_quarters(x), World(1, x["layers"]))
    equal("times", [time for time, *_ in run.commits], [time for time, *_ in want.commits])
    equal("text", run.tokens, want.tokens)


THEOREMS = theorem.all()
