"""Theorems on SSD: exactness of the text, agreement of all views, its limits, its walltime, and the best fan-outs.

An example of a decoding has the fields of `drafting_examples`, and `fan_out`, `backup` and `ranks` (one per token; the last has no
effect). An example of the formulas has a law of ranks, a draft length, a fan-out and a cost ratio.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from model.interpret import interpreter
from model.interpret.simulated_answers import RankedPositions
from model.methods.ssd import algorithm, fan_out
from model.methods.ssd import paths as sampler
from model.methods.ssd import theory as ssd
from model.outcomes.position_ranks import PositionRankRates
from model.outcomes.random_streams import BLOCK
from model.steps import CacheError, Fork, Forward, Join, Read, Step, Steps, Stop, visible_positions
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems import pipelined_examples
from sim.theorems.drafting_examples import PROMPT, drafted, drafting, equal_work, models, pairs, rounds, stop_tokens, target_law
from sim.theorems.output_law import Output, distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, cost, integers, rounding, size
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("ssd")
WIDEST = 24
"""Width that the costs of all examples reach."""


# --- Examples ---


def _decodings(costs: str = "plain", *, tokens: int = 8, cluster: bool = False, **fields: Any) -> SearchStrategy[Example]:
    more = {"fans": integers(0, 3**5 - 1), "wrong": integers(0, 4**tokens - 1), "backup": _backups()} | fields
    return drafting(tokens, 4, costs=costs, cluster=cluster, **more).map(_prepared)


def _backups() -> SearchStrategy[str]:
    return st.sampled_from(algorithm.BACKUPS)


def _just_in_time(costs: str = "whole", **fields: Any) -> SearchStrategy[Example]:
    """Draw decodings with drafts just in time."""
    return _decodings(costs, backup=st.just(algorithm.DRAFT), **fields)


def _short(costs: str = "tenths") -> SearchStrategy[Example]:
    """Draw decodings short enough to enumerate all ranks, with a law of ranks."""
    return _decodings(costs, tokens=4, law=_rank_rates())


def _wide() -> SearchStrategy[Example]:
    """Draw decodings whose passes take longer for more tokens."""
    slow = integers(1, 4).map(lambda slower: {"cost_ratio": 0.5, "verify_cost": [[1, 1], [WIDEST, 1 + slower]]})
    return _just_in_time("plain", at=integers(0, 4), cost=slow)


def _fitting() -> SearchStrategy[Example]:
    return _just_in_time().filter(_hidden)


def _prepared(x: Example) -> Example:
    """Turn codes into fan-outs and ranks; drafts have at least one token, and are always on a separate unit."""
    x = dict(x)
    longest = x["draft_length"] = max(x["draft_length"], 1)
    x.pop("placement", None)
    fans, wrong = x.pop("fans"), x.pop("wrong")
    x["fan_out"] = [1 + fans // 3**index % 3 for index in range(longest + 1)]
    x["ranks"] = [1 if kept else (0, 2, 3, 4)[wrong // 4**index % 4] for index, kept in enumerate(x["accept"])]
    return _wide_enough(x)


def _wide_enough(x: Example) -> Example:
    """Continue the prices of passes up to the width of all branches."""
    curve = x.get("cost", {}).get("verify_cost")
    if curve is None:
        return x
    (width, time), more = curve[-1], WIDEST - curve[-1][0]
    longer = [[width + step, time + step] for step in range(1, more + 1)]
    return {**x, "cost": {**x["cost"], "verify_cost": [*curve, *longer]}}


def _rank_rates() -> SearchStrategy[list[float]]:
    """Draw probabilities of ranks 1 to 4 in twentieths, which sum to at most 1."""
    cuts = st.lists(integers(0, 20), min_size=4, max_size=4)
    return cuts.map(lambda values: [each / 20 for each in np.diff([0, *sorted(values)]).tolist()])


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    quarters = integers(0, 8).map(lambda number: number / 8)
    length = integers(1, 4)
    return st.fixed_dictionaries({
        "rates": _rank_rates(), "draft_length": length, "fans": integers(0, 3**5 - 1), "cost_ratio": quarters, **fields,
    }).map(lambda x: {**x, "fan_out": [1 + x["fans"] // 3**index % 3 for index in range(x["draft_length"] + 1)]})  # fmt: skip


def _models(sampled: bool) -> SearchStrategy[Example]:
    """Draw pairs of small models; few branches, as every sampled token of every branch is enumerated."""
    return pairs(3, 2, 2 if sampled else 3, backup=_backups(), fan=integers(1, 2)).map(
        lambda x: {**x, "draft_length": max(x["draft_length"], 1), "sampled": sampled, "fan_out": 1 if sampled else x["fan"]}
    )


def _budgets() -> SearchStrategy[Example]:
    """Draw falling laws of ranks, a draft length and a budget."""
    falling = _rank_rates().map(lambda values: sorted(values, reverse=True))
    return st.fixed_dictionaries({"rates": falling, "draft_length": integers(1, 3), "more": integers(0, 5)})


def _power_laws() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({
        "acceptance_rate": integers(1, 19).map(lambda number: number / 20),
        "exponent": integers(1, 12).map(lambda number: number / 4), "draft_length": integers(1, 6), "budget": integers(4, 40),
        "from": integers(0, 6), "to": integers(0, 6),
    })  # fmt: skip


# --- 60: exactness of the text ---


@theorem("60a", "The sampled text has exactly the target's distribution.", source="[Kumar2026]: drafts are verified as in"
         " speculative decoding, and a prepared draft is drawn from the draft model's distribution",
         given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want = target_law(x)
    law = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("60b", "The greedy text is that of the target.", source="[Kumar2026]", given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    law = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    equal("generated text", [*law], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


# --- 61: agreement of the views ---


@theorem("61a", "Events and paths agree exactly on every path, with costs in quarters of a pass of the target.",
         source="no contention", given=lambda: _decodings("whole"))
@theorem("61b", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(parameters_of(x), n, cost(x), iter([np.tile(np.array(x["ranks"])[:, None], BLOCK)]))
    equal("latency", float(tally.time[0]), run.latency, 2 * rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, 2 * rounding(x))
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))


@theorem("61c", "The formula gives the mean and variance of the time, and mean GPU-time, rounds and drafted tokens.",
         source="a chain over positions and states", given=_short)
def moments_over_all_outcomes(x: Example) -> None:
    law, n, runs = PositionRankRates(x["law"]), size(x), _all_decodings(x)
    prediction = ssd.predict(parameters_of(x), n, law, cost(x))

    def mean(of: Any) -> float:
        return math.fsum(share * of(run) for share, run in runs)

    time = mean(lambda run: run.latency)
    equal("latency", float(prediction.latency), time, CLOSE)
    equal("mean square of the latency", float(prediction.latency_variance) + time**2, mean(lambda run: run.latency**2), CLOSE)
    equal("compute", float(prediction.busy), mean(lambda run: run.busy), CLOSE)
    for what, value, of in (("rounds", prediction.rounds, rounds), ("drafted tokens", prediction.drafted, drafted)):
        assert value is not None
        equal(what, float(value), mean(of), CLOSE)


@theorem("61f", "The formula gives the mean work of both models: passes, tokens, and positions attended to and read, with what is"
         " made in vain.", source="a chain over positions and states", given=lambda: _short("whole"))
def work_over_all_outcomes(x: Example) -> None:
    work = ssd.timed_work(parameters_of(x), size(x), [PositionRankRates(x["law"])], cost(x))
    shares, runs = zip(*_all_decodings(x), strict=True)
    equal_work(work.at(0), shares, runs, CLOSE)


def _all_decodings(x: Example) -> list[tuple[float, Run]]:
    """Return all decodings with the probabilities of their ranks."""
    law = PositionRankRates(x["law"])
    chance = [1 - float(law.rates.sum()), *law.rates.tolist()]
    possible = [rank for rank in range(5) if chance[rank] > 0]
    return [
        (math.prod(chance[rank] for rank in ranks), play({**x, "ranks": [*ranks, 0]}))
        for ranks in itertools.product(possible, repeat=size(x) - 1)
    ]


@theorem("61d", "Events and counter generate the text of plain decoding, on any cluster, in equal rounds.", source="exactness",
         given=lambda: _decodings("tenths", cluster=True))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)
    equal("rounds", run.rounds, work.rounds)


@theorem("61e", "Busy time is the sum of the intervals on units; on two units nothing ever waits.", source="conservation",
         given=lambda: _decodings("tenths"))
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, rounding(x) * len(run.intervals))
    equal("waited", run.waiting_time, 0.0)
    equal("passes of the draft model not on the second unit",
          sum(row.role == "draft" and row.unit != 1 for row in run.intervals if row.unit >= 0), 0)  # fmt: skip


# --- 62: against drafting in turn on the same two units ---


@theorem("62a", "With drafts just in time, the tokens of all rounds are those of speculative decoding with the same outcomes.",
         source="a hit and a miss draft as many tokens", given=_just_in_time)
@theorem("62b", "Without drafts just in time, the tokens of all rounds are those of speculative decoding.",
         source="false: after a miss nothing is verified", given=lambda: _decodings("whole", backup=st.just(algorithm.NONE)),
         expect="fails")
def rounds_of_speculative(x: Example) -> None:
    one, other = play(x), in_order(x)
    equal("tokens of each round", [count for *_, count in one.commits], [count for *_, count in other.commits])
    equal("rounds", one.rounds, other.rounds)


@theorem("62c", "If the preparation with its links takes no longer than a pass, and every outcome is prepared, every round takes a"
         " pass of the target after the first draft.", source="limit: hit rate 1", given=lambda: _fitting().map(_all_hit))
def everything_prepared(x: Example) -> None:
    run, prices, n = play(x), cost(x), size(x)
    first = min(x["draft_length"], n - 1)
    begin = first * float(prices.draft_times()) + 2 * prices.link if first else 0.0
    equal("latency", run.latency, begin + rounds(run) * prices.target_pass, 2 * rounding(x))


@theorem("62d", "If the preparation with its links takes no longer than a pass, and no outcome is prepared, the time is that of"
         " speculative decoding on the same units.", source="limit: hit rate 0", given=lambda: _fitting().map(_none_hit))
@theorem("62e", "If no outcome is prepared, the time is that of speculative decoding on the same units.",
         source="false: a miss waits for the preparation", given=lambda: _just_in_time().map(_none_hit), expect="fails")
def nothing_prepared(x: Example) -> None:
    equal("latency", play(x).latency, in_order(x).latency, 2 * rounding(x))


@theorem("62f", "If the preparation with its links takes no longer than a pass, SSD with drafts just in time is never slower than"
         " speculative decoding on the same units.", source="the rounds are equal (62a), and a hit saves the drafts",
         given=_fitting)
@theorem("62g", "SSD with drafts just in time is never slower than speculative decoding on the same units.",
         source="false: a preparation takes one draft pass more than a draft", given=_just_in_time, expect="fails")
def never_slower_than_in_order(x: Example) -> None:
    at_most("latency", play(x).latency, in_order(x).latency, 2 * rounding(x))


@theorem("62h", "If passes take the same for any width, a larger fan-out never takes longer with drafts just in time.",
         source="the rounds are equal, and a hit stays a hit",
         given=lambda: _just_in_time(at=integers(0, 4)).filter(lambda x: "verify_cost" not in x["cost"]))
@theorem("62i", "A larger fan-out never takes longer with drafts just in time.", source="false: passes over more branches take"
         " longer", given=_wide, expect="fails")
def more_branches(x: Example) -> None:
    at = x["at"] % len(x["fan_out"])
    wider = [count + (index == at) for index, count in enumerate(x["fan_out"])]
    at_most("latency with one more branch", play(x, fan_out=wider).latency, play(x).latency, 2 * rounding(x))


@theorem("62j", "Drafts just in time never take longer than verifying no draft after a miss.",
         source="false: a draft may take longer than the passes that it saves", given=lambda: _decodings("whole"), expect="fails")
def backup_pays(x: Example) -> None:
    at_most("latency", play(x, backup=algorithm.DRAFT).latency, play(x, backup=algorithm.NONE).latency, 2 * rounding(x))


# --- 63: many tokens ---


@theorem("63a", "The speed-up for many tokens is that of the Markov chain of rounds with and without a draft.",
         source="stationary distribution over all outcomes of a round", given=lambda: _laws(backup=_backups()))
def stationary(x: Example) -> None:
    law, parameters = PositionRankRates(x["rates"]), _parameters(x)
    hits, tokens = zip(*(_round(law, parameters, count) for count in (x["draft_length"], 0)), strict=True)
    c, jit = x["cost_ratio"], x["backup"] == algorithm.DRAFT
    whole = max(1.0, (x["draft_length"] + 1) * c)
    if jit:
        want = tokens[0] / (whole + (1 - hits[0]) * x["draft_length"] * c)
    else:  # left with probability 1 - hits[0], entered with hits[1]
        share = hits[1] / (1 - hits[0] + hits[1]) if hits[1] else 0.0
        want = (share * tokens[0] + (1 - share) * tokens[1]) / whole
    equal("speed-up", ssd.speedup(parameters, law, c), want, 1e-11)


@theorem("63b", "If a preparation takes no longer than a pass, the speed-up with drafts just in time is the paper's walltime.",
         source="[Kumar2026]: walltime", given=lambda: _laws(backup=st.just(algorithm.DRAFT)).filter(_fits))
@theorem("63c", "The speed-up with drafts just in time is the paper's walltime.",
         source="false: in the paper a miss does not wait for the preparation",
         given=lambda: _laws(backup=st.just(algorithm.DRAFT)), expect="fails")
def walltime_of_the_paper(x: Example) -> None:
    law, parameters, c = PositionRankRates(x["rates"]), _parameters(x), x["cost_ratio"]
    hit = fan_out.hit_probability(law, parameters.fan_outs)
    tokens = float(ssd.expected_tokens(float(law.rates[0]), x["draft_length"]))
    paper = ssd.paper_speedup(hit, tokens, tokens, (x["draft_length"] + 1) * c, x["draft_length"] * c)
    equal("speed-up", ssd.speedup(parameters, law, c), paper, 1e-11)


@theorem("63d", "At the break-even hit rate a round takes as long as drafting in turn, and above it less.",
         source="both yield the same tokens per round", given=lambda: _laws(link=integers(0, 4).map(lambda number: number / 8)))
def break_even(x: Example) -> None:
    length, c, link = x["draft_length"], x["cost_ratio"], x["link"]
    turn, rate = 1 + length * c + 2 * link, ssd.break_even_hit_rate(length, c, link)
    at_most("break-even hit rate", rate, 1.0, CLOSE)
    found = float(ssd.round_time(min(rate, 1.0), length, c, link))
    if rate:
        equal("time of a round", found, turn, 1e-11)
    else:
        at_most("time of a round", found, turn, 1e-11)
    at_most("time of a round with more hits", float(ssd.round_time((1 + min(rate, 1.0)) / 2, length, c, link)), turn, 1e-11)


@theorem("63e", "Without transfers, SSD with drafts just in time is at most 1 + K/(K + 1) times as fast as drafting in turn, which"
         " is reached with hits only where a preparation takes as long as a pass.", source="hits cannot hide the further draft"
         " pass", given=lambda: _laws(hit=integers(0, 20).map(lambda number: number / 20)))  # fmt: skip
def largest_gain(x: Example) -> None:
    length, c = x["draft_length"], x["cost_ratio"]
    best = ssd.largest_gain(length)
    at_most("gain", (1 + length * c) / float(ssd.round_time(x["hit"], length, c)), best, CLOSE)
    c = 1 / (length + 1)
    equal("gain with hits only", (1 + length * c) / float(ssd.round_time(1.0, length, c)), best, CLOSE)


# --- 64: fan-outs ---


@theorem("64a", "No other fan-outs of the same sum have a larger hit probability than the optimal ones.",
         source="exchange: gains fall with the rank", given=_budgets)
def best_fan_outs(x: Example) -> None:
    law, longest = PositionRankRates(x["rates"]), x["draft_length"]
    budget = longest + 1 + x["more"]
    found = fan_out.optimal(law, longest, budget)
    equal("branches", sum(found), budget)
    best = max(fan_out.hit_probability(law, each) for each in _splits(budget, longest + 1))
    equal("hit probability", fan_out.hit_probability(law, found), best, 1e-12)


@theorem("64b", "Under the paper's law, moving branches between two positions never lowers the miss probability of its fan-outs.",
         source="[Kumar2026]: Lagrange; the miss probability is convex", given=_power_laws)
def geometric_is_optimal(x: Example) -> None:
    a, r, longest = x["acceptance_rate"], x["exponent"], x["draft_length"]
    found = fan_out.geometric(a, r, longest, x["budget"])
    equal("branches", float(found.sum()), float(x["budget"]), CLOSE)
    least = _missed(a, r, found)
    for share in (0.01, 0.5):
        moved = found.copy()
        amount = share * moved[x["from"] % (longest + 1)]
        moved[x["from"] % (longest + 1)] -= amount
        moved[x["to"] % (longest + 1)] += amount
        at_most("miss probability", least, _missed(a, r, moved), 1e-12)


@theorem("64c", "The paper's fan-outs, rounded, are optimal for the draft's one law of ranks.",
         source="false: after a rejection the drafted token is no candidate, and fan-outs are whole numbers",
         given=lambda: _power_laws().filter(lambda x: x["acceptance_rate"] >= 0.5), expect="fails")
def rounded_geometric(x: Example) -> None:
    a, r, longest = x["acceptance_rate"], x["exponent"], x["draft_length"]
    rounded = tuple(max(round(each), 1) for each in fan_out.geometric(a, r, longest, x["budget"]).tolist())
    law = PositionRankRates.power_law(a, r, sum(rounded) + 1)
    best = fan_out.optimal(law, longest, sum(rounded))
    equal("hit probability", fan_out.hit_probability(law, rounded), fan_out.hit_probability(law, best), 1e-12)


def _missed(a: float, r: float, counts: Any) -> float:
    """Miss probability of the paper's law."""
    chance = a ** np.arange(len(counts)) * (1 - a)
    chance[-1] /= 1 - a
    return float((chance * counts**-r).sum())


def _splits(budget: int, parts: int) -> list[tuple[int, ...]]:
    """All lists of this many numbers of at least 1 that sum to the budget."""
    bars = itertools.combinations(range(1, budget), parts - 1)
    return [tuple(np.diff([0, *cuts, budget]).tolist()) for cuts in bars]


def _round(law: PositionRankRates, parameters: algorithm.Parameters, count: int) -> tuple[float, float]:
    """Hit probability and mean tokens of a round that verifies `count` drafted tokens, over all ranks of its positions."""
    chance = [1 - float(law.rates.sum()), *law.rates.tolist()]
    hit = tokens = 0.0
    for ranks in itertools.product(range(len(chance)), repeat=count + 1):
        share = math.prod(chance[rank] for rank in ranks)
        kept = len(list(itertools.takewhile(lambda rank: rank == 1, ranks[:count])))
        candidates = range(1, parameters.fan_outs[-1] + 1) if kept == count else range(2, parameters.fan_outs[kept] + 2)
        hit += share * (ranks[kept] in candidates)
        tokens += share * (kept + 1)
    return hit, tokens


def _fits(x: Example) -> bool:
    return bool((x["draft_length"] + 1) * x["cost_ratio"] <= 1)


def _parameters(x: Example) -> algorithm.Parameters:
    return algorithm.Parameters(1, x["draft_length"], tuple(x["fan_out"]), x["backup"])


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "draft_layers", "backup")
    given = x["fan_out"]
    fans = tuple(given) if isinstance(given, list) else given
    return algorithm.Parameters(**{"layers": 1} | {name: x[name] for name in names if name in x}, fan_out=fans)


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return algorithm.decode(parameters_of(x), PROMPT, size(x) if "accept" in x else x["tokens"], stop_tokens(x))


def world(x: Example) -> RankedPositions:
    """Return the simulated answers of the models in an example's decoding."""
    return RankedPositions(1, parameters_of(x).layers, x["ranks"])


def play(x: Example, *, record: bool = False, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    cluster = Cluster(**x["cluster"]) if "cluster" in x else Cluster(parameters_of(x).units)
    return simulate(steps(x), size(x), cluster, cost(x), world(x), record=record)


def in_order(x: Example) -> Run:
    """Simulate speculative decoding on the same two units, with the same accepted tokens."""
    names = ("layers", "draft_length", "sampled", "draft_layers", "cost")
    accept = [rank == 1 for rank in x["ranks"]]
    return pipelined_examples.play({name: x[name] for name in names if name in x} | {"accept": accept, "placement": "separate"})


def _all_hit(x: Example) -> Example:
    """Let every outcome be prepared: the target's token has a rank of 1 to 4, and so has every candidate."""
    return {**x, "ranks": [max(rank, 1) for rank in x["ranks"]], "fan_out": [*[3] * x["draft_length"], 4]}


def _none_hit(x: Example) -> Example:
    """Let no outcome be prepared: rejected tokens have no rank, and no draft is accepted in full, nor is a token after it."""
    longest, ranks, run = x["draft_length"], [], 0
    for rank in x["ranks"]:
        run = run + 1 if rank == 1 and run < longest else 0
        ranks.append(1 if run else 0)
    return {**x, "ranks": ranks}


def _hidden(x: Example) -> bool:
    """True if preparations with their links take no longer than a pass, and passes take the same for any number of tokens."""
    prices = cost(x)
    preparing = (x["draft_length"] + 1) * float(prices.draft_times()) + 2 * prices.link
    return "verify_cost" not in x["cost"] and preparing <= prices.target_pass


class _ReadTokens(NamedTuple):
    """Tokens that each model has read, in one process; those of numbered sequences under (role, number)."""

    read: dict[Any, tuple[int, ...]]

    def after(self, key: Any, shared: Any, step: Forward) -> tuple[int, ...]:
        """Tokens read after a pass, which drops those from its position on."""
        held = self.read.get(key, self.read.get(shared, ()))
        if step.at > len(held):
            raise CacheError(f"{step.role}: a pass at position {step.at} of a model that has read {len(held)}")
        self.read[key] = (*held[: step.at], *step.tokens)
        return self.read[key]


class _Ended(NamedTuple):
    value: Any
    rows: _ReadTokens


def in_turn(steps: Steps, rows: _ReadTokens | None = None) -> Generator[Step, Any, Any]:
    """Run each sub-process to its end where it is forked, with the cache rows that it starts with.

    Passes read all tokens from the start, and the sequences of a batch are read one by one, so that the text does not depend on
    concurrency. What a model predicts from is what its pass reads within its context budget.
    """
    rows = _ReadTokens({}) if rows is None else rows
    answer: Any = None
    while True:
        try:
            step: Any = steps.send(answer)
        except StopIteration as end:
            return end.value
        match step:
            case Fork():
                heirs, answer = step.heirs_of or (None,) * len(step.bodies), []
                for body, heir in zip(step.bodies, heirs, strict=True):
                    own = _ReadTokens(dict((heir.rows if heir is not None else rows).read))
                    answer.append(_Ended((yield from in_turn(body, own)), own))  # type: ignore[arg-type]
            case Join():
                answer = [task.value for task in step.tasks]
            case Stop():
                answer = None  # they have already ended
            case Forward() if step.batch is not None:
                answer = []
                for index, number in enumerate(step.batch.sequences):
                    part = step.part(index)
                    text = rows.after((step.role, number), step.role, part)
                    answer.append(_within(part, (yield part._replace(tokens=text, at=0, context_budget=None))))
            case Forward():
                text = rows.after(step.role, step.role, step)
                answer = _within(step, (yield step._replace(tokens=text, at=0, context_budget=None)))
            case Read():
                answer = yield _of_sequence(step)
            case _:
                answer = yield step


def _within(step: Forward, out: Output) -> Output:
    """Output of a pass over all tokens from the start, as of one that reads only the positions of its budget before its tokens."""
    first, latest = visible_positions(step.at, step.context_budget)
    return out._replace(texts=tuple([(*text[: first.stop], *text[latest.start :]) for text in out.texts]))


def _of_sequence(step: Read) -> Read:
    """Read of one sequence of a batch: of its only token."""
    if isinstance(step.output, list):
        step = step._replace(output=step.output[step.offset], offset=-1)
    if isinstance(step.against, list):
        step = step._replace(against=step.against[step.against_offset], against_offset=-1)
    return step


THEOREMS = theorem.all()
