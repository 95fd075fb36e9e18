"""The theorems on methods that leave layers out, 30 and 28: SkipDecode by position, early exit by confidence.

An example of SkipDecode has `layers`, `min_layers`, `max_layers`, `warm_up`, `rounding`, `power`, how many positions the schedule
has (`room`), and the `lengths` of all texts, of which `batch` are decoded together. One of early exit has `depths` instead, the
layer that each token needs at each place, for every text; or `hazards`, in twentieths, for all luck. Costs are in quarters.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from model import early_exit as leaving
from model import skipdecode as formulas
from model import work
from model.algorithms import autoregressive, early_exit, skipdecode
from model.coins import BLOCK
from model.early_exit_lengths import Depths
from model.latency import UnitCost
from model.steps import CacheError, Forward
from model.work import Cache
from model.world import Lossy, World
from sim.cluster import Cluster
from sim.events import Run, simulate
from sim.paths import early_exit as exit_sampler
from sim.paths import skipdecode as skip_sampler
from sim.theorems.drafts import digits
from sim.theorems.draws import CLOSE, whole
from sim.theorems.statement import Example, Theorem, at_most, equal

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_PROMPT = 3  # where the schedule begins


# --- 30: SkipDecode ---


def schedule_falls(x: Example) -> None:
    parameters = _skip(x)
    layers = formulas.exit_layers(x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["room"], power=x["power"])
    for sooner, later in pairwise(layers.tolist()):
        at_most("layers of a later token", later, sooner, CLOSE)
    at_most("most layers", float(layers.max()), x["max_layers"], CLOSE)
    at_most("least layers", x["min_layers"], float(layers.min()), CLOSE)
    sets = [_run_by(skipdecode.skipped(parameters, budget), x["layers"]) for budget in skipdecode.schedule(parameters, x["room"])]
    for sooner, later in pairwise(sets):
        equal("layers of a later token that one before it has not", sorted(later - sooner), [])


def mean_of_the_schedule(x: Example) -> None:
    given = x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"]
    for count in range(1, x["room"] + 1):
        equal("mean layers", formulas.mean_layers(*given, count), float(formulas.exit_layers(*given, count).mean()), 1e-11)


def nothing_is_lacking(x: Example) -> None:
    """The cache refuses a pass through a layer that lacks a row: no row is ever made but by running the layer."""
    account = _counted(x).account.totals().of["target"]
    equal("rows made without running the layer", account.filled, 0)
    play(x)


def what_rises_is_refused(x: Example) -> None:
    """A token with more layers than one before it comes to a layer that lacks that row."""
    layers, (fewer, more) = x["layers"], sorted(x["budgets"])
    if fewer == more:
        return
    cache, parameters = Cache(), _skip({**x, "min_layers": fewer, "max_layers": more, "warm_up": min(x["warm_up"], fewer)})
    passes = [Forward("target", (0,), at, 0, layers, gaps=skipdecode.skipped(parameters, budget))
              for at, budget in enumerate((more, fewer, more))]  # fmt: skip
    cache.write(passes[0])
    cache.write(passes[1])
    try:
        cache.write(passes[2])
    except CacheError:
        return
    raise AssertionError(f"{more} layers behind {fewer} of {layers} were let through")


def all_layers_are_the_plain_model(x: Example) -> None:
    everything = {"min_layers": x["layers"], "max_layers": x["layers"], "batch": 1, "lengths": [x["lengths"][0]]}
    run = play({**x, **everything})
    _equal_to_plain(run, {**x, **everything})


def last_token_has_the_least(x: Example) -> None:
    layers = formulas.exit_layers(x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["room"])
    equal("layers of the last token", float(layers[-1]), float(x["min_layers"]))


def layers_are_time(x: Example) -> None:
    run, n = play(x), sum(width for _, width in _columns(x))
    mean = _counted(x).account.layer_passes / n
    equal("speed", _plain_time(x) / run.latency, x["layers"] / mean, CLOSE)


# --- 30: early exit ---


def thresholds_fall(x: Example) -> None:
    level, longest = x["threshold"] / 20, x["longest"]
    given = np.arange(longest + 1), longest, x["temperature"] / 4
    falling = leaving.decayed_threshold(level, *given, form=x["form"])
    for sooner, later in pairwise(falling.tolist()):
        at_most("threshold of a later token", later, sooner, CLOSE)
    low, high = (0.9 * level, level) if x["form"] == "code" else (0.9 * level, min(0.9 * level + 0.1, 1.0))
    at_most("least threshold", low, float(falling.min()), CLOSE)
    at_most("greatest threshold", float(falling.max()), high, CLOSE)


def forms_meet_at_one(x: Example) -> None:
    given = np.arange(x["longest"] + 1), x["longest"], x["temperature"] / 4
    paper, code = (leaving.decayed_threshold(1.0, *given, form=form) for form in leaving.FORMS)
    equal("greatest difference of the forms at lambda = 1", float(np.abs(paper - code).max()) < 1e-15, True)


def forms_are_the_same(x: Example) -> None:
    given = np.arange(x["longest"] + 1), x["longest"], x["temperature"] / 4
    paper, code = (leaving.decayed_threshold(x["threshold"] / 20, *given, form=form) for form in leaving.FORMS)
    equal("greatest difference of the forms", float(np.abs(paper - code).max()), 0.0)


def higher_threshold_is_no_earlier(x: Example) -> None:
    seen = np.array(x["confidences"]) / 8
    low, high = (leaving.exits(seen, np.full(len(seen), level / 8)) for level in sorted(x["thresholds"]))
    equal("tokens that leave earlier at the higher threshold", int((high < low).sum()), 0)


def never_sure_is_the_plain_model(x: Example) -> None:
    """With nothing to pay for the checks."""
    depths = [[x["layers"]] * len(row) for row in x["depths"]]
    x = {**x, "depths": depths, "cost": {**x["cost"], "early_head": 0, "state_check": 0}, "batch": 1, "lengths": None}
    one = {**x, "depths": depths[:1]}
    run = play(one)
    equal("latency", run.latency, _plain_time(one))
    equal("text", run.tokens, [*range(1, len(run.tokens) + 1)])


def deeper_is_slower(x: Example) -> None:
    text, place = x["text"] % len(x["depths"]), x["place"] % len(x["depths"][0])
    deeper = [list(row) for row in x["depths"]]
    deeper[text][place] = min(deeper[text][place] + 1, x["layers"])
    at_most("latency of the one that leaves earlier", play(x).latency, play({**x, "depths": deeper}).latency)


def batches_wait(x: Example) -> None:
    together = play({**x, "batch": len(x["depths"]), "lengths": None}).latency
    for row in x["depths"]:
        alone = play({**x, "depths": [row], "batch": 1, "lengths": None}).latency
        at_most("latency of one text alone", alone, together)


def later_is_cheaper(x: Example) -> None:
    """Where a pass that fills in rows costs the same however many they are."""
    alone = {**x, "batch": 1, "lengths": None, "depths": x["depths"][:1]}
    at_once, later = (play({**alone, "fill": fill}).latency for fill in ("propagate", "backfill"))
    at_most("latency of filling in when needed", later, at_once)


def mean_over_all_luck(x: Example) -> None:
    law = Depths(leaving.exit_pmf(np.array([*x["hazards"], 20]) / 20))
    layers, n, texts = x["layers"], x["tokens"], x["batch"]
    given = {**x, "lengths": None}
    prediction = leaving.predict(_leave({**given, "depths": [[1] * n] * texts}), n, law, cost(x))
    pmf = law.pmf.tolist()
    mean = square = 0.0
    for luck in itertools.product(range(1, layers + 1), repeat=n * texts):
        chance = math.prod(pmf[depth - 1] for depth in luck)
        if chance:
            run = play({**given, "depths": [list(luck[text::texts]) for text in range(texts)]})
            mean, square = mean + chance * run.latency, square + chance * run.latency**2
    equal("mean latency", float(prediction.latency), mean, CLOSE)
    if x["fill"] == "propagate":
        equal("variance and the square of the mean", float(prediction.latency_variance) + mean**2, square, 1e-11)


# --- 28: agreement of the views, conservation of work, waiting ---


def events_are_paths(x: Example) -> None:
    run = play(x)
    if "depths" in x:
        rows = np.array(_all_depths(x), dtype=np.uint16).T.reshape(-1, 1)
        tiles = (np.repeat(rows[start : start + 3], BLOCK, axis=1) for start in range(0, len(rows), 3))
        time, busy = exit_sampler.walk(_leave(x), _longest(x), cost(x), tiles)
    else:
        time, busy = skip_sampler.walk(_skip(x), _longest(x), cost(x), iter(()))
    equal("latency", float(time[0]), run.latency)
    equal("compute", float(busy[0]), run.busy)


def work_is_the_closed_form(x: Example) -> None:
    found = _counted(x).account.totals().of["target"]
    if "depths" in x:
        every = np.eye(x["layers"])[[depth - 1 for depth in x["depths"][0]]]
        want = leaving.work(_leave(x), _longest(x), Depths(every)).of["target"]
    else:
        want = formulas.work(_skip(x), _longest(x), None).of["target"]
    for name, got, expected in zip(found._fields, found, want, strict=True):
        equal(name, float(got), expected, CLOSE)
    equal("passes by the clock", play(x).account.totals().of["target"], found)


def a_batch_takes_as_long_as_its_longest_text(x: Example) -> None:
    run, lengths = play(x), x["lengths"]
    batches = [lengths[start : start + x["batch"]] for start in range(0, len(lengths), x["batch"])]
    want = sum(play({**x, "lengths": [max(batch)], "batch": 1}).latency for batch in batches)
    equal("latency", run.latency, want)
    equal("tokens", len(run.tokens), sum(lengths))


# --- Playing an example ---


def cost(x: Example) -> UnitCost:
    """Times in quarters, so that they add up exactly; a pass costs the same however wide it is."""
    given = {name: quarters / 4 for name, quarters in x["cost"].items()}
    return UnitCost(x["layers"], **given)


def play(x: Example) -> Run:
    """Simulate an example's decoding."""
    parameters = _leave(x) if "depths" in x else _skip(x)
    module = early_exit if "depths" in x else skipdecode
    n = _longest(x)
    return simulate(module.decode(parameters, [0], n), parameters.outputs_of(n), Cluster(1), cost(x), _world(x))


def _counted(x: Example) -> work.Work:
    parameters = _leave(x) if "depths" in x else _skip(x)
    module = early_exit if "depths" in x else skipdecode
    n = _longest(x)
    return work.count(module.decode(parameters, [0], n), _world(x), parameters.outputs_of(n))


def _world(x: Example) -> Lossy:
    return Lossy(1, x["layers"], depths=_all_depths(x) if "depths" in x else ())


def _all_depths(x: Example) -> list[list[int]]:
    rows: list[list[int]] = x["depths"]
    texts = len(x["lengths"]) if x.get("lengths") else x["batch"]
    return [rows[text % len(rows)] for text in range(texts)]


def _longest(x: Example) -> int:
    return max(x["lengths"]) if x.get("lengths") else len(x["depths"][0])


def _skip(x: Example) -> skipdecode.Parameters:
    lengths = x.get("lengths")
    return skipdecode.Parameters(
        x["layers"], x["min_layers"], x["max_layers"], _PROMPT, _PROMPT + x["room"], x["warm_up"], x.get("rounding", "half-up"),
        x.get("power", 1.0), x.get("batch", 1), None if lengths is None else tuple(lengths),
    )  # fmt: skip


def _leave(x: Example) -> early_exit.Parameters:
    lengths = x.get("lengths")
    return early_exit.Parameters(
        x["layers"], x["measure"], min(x["first_check"], x["layers"]), fill=x["fill"], batch=x["batch"],
        lengths=None if lengths is None else tuple(lengths),
    )  # fmt: skip


def _run_by(gaps: tuple[tuple[int, int], ...], layers: int) -> set[int]:
    return {*range(layers)}.difference(*(range(*gap) for gap in gaps))


def _columns(x: Example) -> list[tuple[int, int]]:
    from model.algorithms import _batches

    return [*_batches.columns(_skip(x), _longest(x))]


def _plain_time(x: Example) -> float:
    n = len(_columns(x)) if "depths" not in x else _longest(x)
    return n * cost(x).target_pass


def _equal_to_plain(run: Run, x: Example) -> None:
    n = _longest(x)
    plain = autoregressive.decode(autoregressive.Parameters(x["layers"]), [0], n)
    want = simulate(plain, n, Cluster(1), cost(x), World(1, x["layers"]))
    equal("times", [time for time, *_ in run.commits], [time for time, *_ in want.commits])
    equal("text", run.tokens, want.tokens)


# --- What they are tried on ---


def _skips(texts: int = 4, **more: Any) -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    @st.composite
    def skips(draw: DrawFn) -> Example:
        layers, room = draw(whole(1, 8)), draw(whole(1, 6))
        most = draw(whole(1, layers))
        least = draw(whole(1, most))
        lengths = [1 + place for place in digits(draw, draw(whole(1, texts)), room - 1)]
        example = {
            "layers": layers, "min_layers": least, "max_layers": most, "warm_up": draw(whole(0, least)), "room": room,
            "rounding": draw(st.sampled_from([*formulas.ROUNDINGS])), "power": draw(st.sampled_from((1.0, 0.5, 2.0))),
            "batch": draw(whole(1, 3)), "lengths": lengths, "cost": draw(_costs()),
        }  # fmt: skip
        return example | {name: draw(strategy) for name, strategy in more.items()}

    return skips()


def _rising() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    @st.composite
    def rising(draw: DrawFn) -> Example:
        layers = draw(whole(2, 8))
        budgets = [draw(whole(1, layers)), draw(whole(1, layers))]
        return {"layers": layers, "budgets": budgets, "warm_up": draw(whole(0, 2)), "room": 3}

    return rising()


def _costs() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    head = whole(0, 6)
    return st.fixed_dictionaries(
        {"early_head": head, "final_head": head, "propagation": whole(0, 4), "state_check": whole(0, 2)}
    )


def _exits(texts: int = 3, *, ragged: bool = False, alike: bool = False, **more: Any) -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    @st.composite
    def exits(draw: DrawFn) -> Example:
        layers, tokens, count = draw(whole(1, 5)), draw(whole(1, 5)), draw(whole(1, texts))
        rows = [[1 + deep for deep in digits(draw, tokens, layers - 1)] for _ in range(1 if alike else count)]
        fill = draw(st.sampled_from(early_exit.FILLS))
        batch = 1 if fill == "backfill" else draw(whole(1, 3)) if ragged else count
        lengths = [tokens, *(1 + place for place in digits(draw, draw(whole(0, 3)), tokens - 1))]
        example = {
            "layers": layers, "depths": rows, "measure": draw(st.sampled_from(leaving.MEASURES)), "first_check": draw(whole(1, 3)),
            "fill": fill, "batch": batch, "lengths": lengths if ragged or fill == "backfill" else None, "cost": draw(_costs()),
        }  # fmt: skip
        return example | {name: draw(strategy) for name, strategy in more.items()}

    return exits()


def _one_batch(**more: Any) -> SearchStrategy[Example]:

    return _exits(**more).map(lambda x: {**x, "fill": "propagate", "batch": len(x["depths"]), "lengths": None})


def _hazards() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    @st.composite
    def hazards(draw: DrawFn) -> Example:
        layers = draw(whole(1, 3))
        fill, first = draw(st.sampled_from(early_exit.FILLS)), draw(whole(1, layers))
        chances = [0 if layer + 1 < first else draw(whole(0, 20)) for layer in range(layers - 1)]
        return {
            "layers": layers, "hazards": chances, "tokens": draw(whole(1, 3)), "measure": draw(st.sampled_from(leaving.MEASURES)),
            "first_check": first, "fill": fill, "batch": 1 if fill == "backfill" else draw(whole(1, 2)), "cost": draw(_costs()),
        }  # fmt: skip

    return hazards()


def _thresholds() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    return st.fixed_dictionaries({
        "threshold": whole(0, 20), "longest": whole(1, 12), "temperature": whole(0, 40), "form": st.sampled_from(leaving.FORMS),
    })  # fmt: skip


def _confidences() -> SearchStrategy[Example]:
    from hypothesis import strategies as st

    rows = st.lists(st.lists(whole(0, 8), min_size=4, max_size=4), min_size=1, max_size=4)
    return st.fixed_dictionaries({"confidences": rows, "thresholds": st.lists(whole(0, 8), min_size=2, max_size=2)})


_of_skipdecode = partial(Theorem, method="skipdecode")
_of_exits = partial(Theorem, method="early_exit")

THEOREMS = (
    _of_skipdecode(
        "30a", "The schedule never rises and stays within its bounds; the layers of a token are among those of every token before.",
        source="[DelCorro2023], Sections 2.3 and 2.4", given=_skips, holds=schedule_falls,
    ),
    _of_skipdecode(
        "30b", "The mean of the linear schedule is max - (max - min)(n - 1) / (2 (sequence - prompt)).",
        source="[DelCorro2023], Section 2.3", given=_skips, holds=mean_of_the_schedule,
    ),
    _of_skipdecode(
        "30c", "No layer that is run lacks a row: nothing is ever computed again or filled in.",
        source="[DelCorro2023], Section 2.4", given=_skips, holds=nothing_is_lacking,
    ),
    _of_skipdecode(
        "30d", "A schedule that rises comes to a layer that lacks a row, and is refused.", source="the cache", given=_rising,
        holds=what_rises_is_refused,
    ),
    _of_skipdecode(
        "30e", "With min_layers = max_layers = layers it is plain decoding, token for token and time for time.",
        source="nothing is skipped", given=_skips, holds=all_layers_are_the_plain_model,
    ),
    _of_skipdecode(
        "30f", "The last token of the longest text goes through min_layers layers.",
        source="false: there t < 1; only rounding may bring it down", given=_skips, holds=last_token_has_the_least, expect="fails",
    ),
    _of_skipdecode(
        "30g", "It is as much faster as its layers are fewer.", source="false: the projection onto the vocabulary is not skipped",
        given=_skips, holds=layers_are_time, expect="fails",
    ),
    _of_skipdecode(
        "28a", "Simulator, paths and formula agree exactly.", source="one algorithm", given=_skips, holds=events_are_paths,
    ),
    _of_skipdecode(
        "28b", "Passes, layers, rows and heads are the closed form's, by counter and by clock.", source="conservation of work",
        given=_skips, holds=work_is_the_closed_form,
    ),
    _of_skipdecode(
        "28c", "A batch takes as long as its longest text alone, and the next begins when it ends.",
        source="texts of a batch stand at one position", given=_skips, holds=a_batch_takes_as_long_as_its_longest_text,
    ),
    _of_exits(
        "30h", "Both thresholds fall with the position; the released one from lambda, not below .9 lambda.",
        source="[Schuster2022]; t5x", given=_thresholds, holds=thresholds_fall,
    ),
    _of_exits(
        "30i", "The two forms of the threshold are the same at lambda = 1.", source="algebra", given=_thresholds,
        holds=forms_meet_at_one,
    ),
    _of_exits(
        "30j", "They are the same.", source="false: the paper adds .1 exp(-tau t / N), the code lambda times that",
        given=_thresholds, holds=forms_are_the_same, expect="fails",
    ),
    _of_exits(
        "30k", "On replayed confidences no token leaves earlier at a higher threshold.", source="fewer layers pass it",
        given=_confidences, holds=higher_threshold_is_no_earlier,
    ),
    _of_exits(
        "30l", "A model that is never sure before its end takes the plain model's time, where checks are free.",
        source="all layers, one head", given=_exits, holds=never_sure_is_the_plain_model,
    ),
    _of_exits(
        "30m", "A token that leaves a layer later makes no decoding faster, where a row costs no more than running its layer.",
        source="a layer more, and a row less", given=lambda: _exits(text=whole(0, 2), place=whole(0, 4)).map(_one_head),
        holds=deeper_is_slower,
    ),
    _of_exits(
        "30n", "A batch is never faster than any of its texts alone.", source="the deepest token decides",
        given=lambda: _one_batch().map(_one_head), holds=batches_wait,
    ),
    _of_exits(
        "30o", "Filling rows in when they are needed is never slower than at once, where a pass costs the same however wide.",
        source="rows that nobody needs are never made", given=_exits, holds=later_is_cheaper,
    ),
    _of_exits(
        "30p", "Mean and variance of the latency are those over all luck; of backfill the mean.",
        source="columns are independent", given=_hazards, holds=mean_over_all_luck,
    ),
    _of_exits(
        "28a", "Simulator and paths agree on every path, exactly, alone and in batches of unequal texts.", source="one algorithm",
        given=lambda: _exits(ragged=True), holds=events_are_paths,
    ),
    _of_exits(
        "28b", "Passes, layers, rows made and filled in, and heads are the closed form's, by counter and by clock.",
        source="conservation of work", given=lambda: _exits(ragged=True, alike=True), holds=work_is_the_closed_form,
    ),
)  # fmt: skip


def _one_head(x: Example) -> Example:
    """All heads cost the same, as they do where there is one projection."""
    return {**x, "cost": {**x["cost"], "early_head": x["cost"]["final_head"]}}
