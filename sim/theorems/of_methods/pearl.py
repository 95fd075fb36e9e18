"""Theorems on PEARL: tokens and time of its rounds, agreement of all views, and exactness of the text.

An example of the formulas has an acceptance rate, a draft length and a cost ratio; one of a decoding has the fields of
`drafting_examples`, and perhaps `draft_stop`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.pearl import algorithm
from model.methods.pearl import paths as sampler
from model.methods.pearl import theory as pearl
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from model.steps import Fork, Forward, Join, Step, Steps, Stop
from sim.engine.cluster import STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import (
    PROMPT,
    all_decodings,
    drafted,
    drafting,
    equal_work,
    models,
    pairs,
    repeated_outcomes,
    rounds,
    short_decodings,
    stop_tokens,
    target_law,
    untied,
)
from sim.theorems.output_law import distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, cost, integers, law, rates, rounding, size, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("pearl")


# --- Examples ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    quarters = integers(0, 8).map(lambda number: number / 4)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "draft_length": integers(1, 8), "cost_ratio": quarters, **fields})


def _lengths() -> SearchStrategy[Example]:
    return _laws(tokens=integers(1, 60))


def _decodings(costs: str = "plain", *, cluster: bool = False, **fields: Any) -> SearchStrategy[Example]:
    return drafting(9, 4, costs=costs, cluster=cluster, **({"draft_stop": _stops()} | fields)).map(_drafting_some)


def _stops() -> SearchStrategy[str]:
    return st.sampled_from(algorithm.DRAFT_STOPS)


def _stopped() -> SearchStrategy[Example]:
    """Draw decodings whose drafts stop at rejections, with costs in quarters."""
    return _decodings("whole", draft_stop=st.just(algorithm.REJECTION))


def _stopped_on(links: str) -> SearchStrategy[Example]:
    """Draw them with this kind of links, and with either rule for the unit of a stopped process."""
    clusters = st.sampled_from(STOPS).map(lambda stop: {"units": 2, "links": links, "stop": stop})
    return st.builds(lambda x, cluster: {**x, "cluster": cluster}, _stopped(), clusters)


def _wide() -> SearchStrategy[Example]:
    """Draw decodings with free drafts, whose passes take longer for more tokens."""
    slow = integers(1, 4).map(lambda slower: {"cost_ratio": 0.0, "verify_cost": [[1, 1], [5, 1 + slower]]})
    return _decodings(at=integers(0, 39), cost=slow)


def _all_outcomes() -> SearchStrategy[Example]:
    known = short_decodings(6, 3, costs="tenths", law="any").filter(lambda x: "survival" not in x["law"]).map(_drafting_some)
    return st.builds(lambda x, stop: {**x, "draft_stop": stop}, known, _stops())


def _models(sampled: bool) -> SearchStrategy[Example]:
    return pairs(4, 3, draft_stop=_stops()).map(lambda x: _drafting_some({**x, "sampled": sampled}))


def _drafting_some(x: Example) -> Example:
    """Make the draft length at least 1 and leave out the placement, which is always separate."""
    return {name: value for name, value in x.items() if name != "placement"} | {"draft_length": max(x["draft_length"], 1)}


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution.", source="[Liu2024]: tokens are tested as in speculative"
         " decoding", given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want = target_law(x)
    law = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("14b", "The greedy text is that of the target.", source="[Liu2024]", given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    law = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    equal("generated text", [*law], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


# --- 20: rounds ---


@theorem("20a", "The mean tokens per round are those of the Markov chain of pre-verify and post-verify rounds.",
         source="[Liu2024], Section 3",
         given=_laws)
def rounds_of_pearl(x: Example) -> None:
    """Enumerate the outcomes of a whole draft for the chain of both phases."""
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    tokens = stay = 0.0
    for outcome in itertools.product((True, False), repeat=gamma):
        chance = math.prod(alpha if kept else 1 - alpha for kept in outcome)
        kept = len(list(itertools.takewhile(bool, outcome)))
        tokens += chance * min(kept + 1, gamma)
        stay += chance * (kept == gamma)
    # Stationary share of post-verify: entered with probability alpha, left with probability 1 - stay.
    share = alpha / (alpha + 1 - stay) if alpha else 0.0
    equal("tokens of a round", float(pearl.expected_tokens(alpha, gamma)), 1 - share + share * tokens, 1e-11)


@theorem("20b", "The speed-up is gamma / max(gamma c, 1) if all tokens are accepted, and never higher.",
         source="[Liu2024], Section 3",
         given=_laws)
def pearl_at_its_best(x: Example) -> None:
    gamma, c = x["draft_length"], x["cost_ratio"]
    best = gamma / max(gamma * c, 1)
    equal("speed if all tokens are accepted", float(pearl.speedup(1, gamma, c)), best, CLOSE)
    at_most("speed", float(pearl.speedup(x["acceptance_rate"], gamma, c)), best, CLOSE)


@theorem("20c", "PEARL is never slower than speculative decoding.",
         source="false: the first token of a draft is verified alone", given=_laws, expect="fails")
def pearl_beats_speculative(x: Example) -> None:
    given = x["acceptance_rate"], x["draft_length"], x["cost_ratio"]
    at_most("speed of speculative decoding", float(speculative.speedup(*given)), float(pearl.speedup(*given)), CLOSE)


@theorem("20d", "The formula gives the mean and variance of the time, and mean GPU-time, rounds and drafted tokens.",
         source="a chain over positions and both phases", given=_all_outcomes)
def moments_over_all_outcomes(x: Example) -> None:
    mass, runs = all_decodings(x, play)
    prediction = pearl.predict(parameters_of(x), x["tokens"], law(x["law"]), cost(x))

    def mean(values: list[float]) -> float:
        return math.fsum(chance * value for chance, value in zip(mass, values, strict=True))

    time = mean([run.latency for run in runs])
    equal("latency", float(prediction.latency), time, CLOSE)
    square = float(prediction.latency_variance) + time**2
    equal("mean square of the latency", square, mean([run.latency**2 for run in runs]), CLOSE)
    equal("compute", float(prediction.busy), mean([run.busy for run in runs]), CLOSE)
    for what, value, of in (("rounds", prediction.rounds, rounds), ("drafted tokens", prediction.drafted, drafted)):
        assert value is not None
        equal(what, float(value), mean([of(run) for run in runs]), CLOSE)


@theorem("20k", "The formula gives the mean work of both models: passes, tokens, and positions attended to and read, with what is"
         " made in vain.", source="a chain over positions and both phases", given=lambda: _all_outcomes().map(untied))
def work_over_all_outcomes(x: Example) -> None:
    work = pearl.timed_work(parameters_of(x), x["tokens"], [law(x["law"])], cost(x))
    assert work is not None
    equal_work(work.at(0), *all_decodings(x, play), CLOSE)


@theorem("20e", "With E mean tokens per round in the long run, the mean rounds of l tokens times E are between l and"
         " l + gamma - 1 + (E - 1) / alpha.", source="martingale: tokens - E per round, plus (E - 1) / alpha in post-verify",
         given=_lengths)
def many_tokens(x: Example) -> None:
    alpha, gamma, n = x["acceptance_rate"], x["draft_length"], x["tokens"]
    per_round = float(pearl.expected_tokens(alpha, gamma))
    mean_rounds = pearl.predict(algorithm.Parameters(1, gamma), n, Iid(alpha), UnitCost(1, cost_ratio=x["cost_ratio"])).rounds
    assert mean_rounds is not None
    product = float(mean_rounds) * per_round
    at_most("tokens", n, product, 1e-9)
    at_most("tokens of all rounds", product, n + gamma - 1 + ((per_round - 1) / alpha if alpha else 0.0), 1e-9)


@theorem("20f", "If drafts take no longer than a pass, the speed-up of l tokens is at most its limit for many tokens.",
         source="20e",
         given=lambda: _lengths().filter(lambda x: x["draft_length"] * x["cost_ratio"] <= 1))
@theorem("20g", "The speed-up of l tokens is at most its limit for many tokens.",
         source="false: if drafts are slower than a pass, the cut drafts at the end save time", given=_lengths, expect="fails")
def slower_than_the_limit(x: Example) -> None:
    alpha, gamma, n = x["acceptance_rate"], x["draft_length"], x["tokens"]
    prediction = pearl.predict(algorithm.Parameters(1, gamma), n, Iid(alpha), UnitCost(1, cost_ratio=x["cost_ratio"]))
    limit = float(pearl.speedup(alpha, gamma, x["cost_ratio"]))
    at_most("speed-up", float(prediction.plain_latency / prediction.latency), limit, 1e-9)


@theorem("20h", "The rounds are between 1 + ceil((l - 1) / gamma), if all tokens are accepted, and l, if none is.",
         source="the first round verifies one token, each later one gamma", given=_decodings)
def most_and_fewest_rounds(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    fewest = 1 + math.ceil((n - 1) / gamma)
    equal("rounds if all tokens are accepted", rounds(play(x, accept=[True] * n)), fewest)
    equal("rounds if no token is accepted", rounds(play(x, accept=[False] * n)), n)
    at_most("fewest rounds", fewest, rounds(play(x)))
    at_most("rounds", rounds(play(x)), n)


@theorem("20i", "If drafts with their links take no longer than a pass, PEARL is never slower than plain decoding.",
         source="a round takes one pass and gives at least one token", given=lambda: _decodings("whole").filter(_hidden))
@theorem("20j", "PEARL is never slower than plain decoding.", source="false: a round waits for its draft even if that is dropped",
         given=lambda: _decodings("whole"), expect="fails")
def never_slower_than_plain(x: Example) -> None:
    at_most("latency", play(x).latency, size(x) * cost(x).target_pass, rounding(x))


# --- 21: drafts that stop at rejections ---


@theorem("21a", "On two units with point-to-point links, stopping drafts at rejections takes no more time and GPU-time than"
         " completing them.", source="induction over rounds: each ends no later, and its transfers arrive no later",
         given=lambda: _stopped_on("point-to-point"))
@theorem("21b", "On a shared link, stopping drafts at rejections takes no longer than completing them.",
         source="false: the transfer of the first token delays the others", given=lambda: _stopped_on("shared"), expect="fails")
def stopping_takes_no_longer(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    at_most("latency", stopped.latency, lockstep.latency, rounding(x))
    at_most("GPU-time", stopped.busy, lockstep.busy, rounding(x))


@theorem("21c", "If drafts with their links take no longer than a pass, stopping them at rejections changes no token time,"
         " GPU-time or pass.", source="every draft ends before the rejection",
         given=lambda: _stopped().filter(_hidden))
@theorem("21d", "Stopping drafts at rejections changes no time, for any draft time.",
         source="false: a round that rejects does not wait for its draft", given=_stopped, expect="fails")
def nothing_to_stop(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    equal("times of commits", stopped.commits, lockstep.commits)
    equal("GPU-time", stopped.busy, lockstep.busy, rounding(x))
    equal("passes", stopped.account.totals(), lockstep.account.totals())


@theorem("21e", "Stopping drafts at rejections changes no token and no round, on any cluster.",
         source="the accepted tokens of a round do not depend on later drafted tokens",
         given=lambda: _decodings("tenths", cluster=True, draft_stop=st.just(algorithm.REJECTION)))
def stopping_changes_no_round(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    equal("tokens", stopped.tokens, lockstep.tokens)
    equal("rounds", stopped.rounds, lockstep.rounds)
    equal("tokens of each round", [count for *_, count in stopped.commits], [count for *_, count in lockstep.commits])


@theorem("21f", "If no token is accepted, a round with stopped drafts takes the longer of one draft pass with its links and the"
         " target's pass, for any draft length.", source="the first drafted token is rejected", given=_stopped)
def nothing_accepted(x: Example) -> None:
    prices, n = cost(x), size(x)
    round_time = max(prices.target_pass, float(prices.draft_times()) + 2 * prices.link)
    equal("latency", play(x, accept=[False] * n).latency, (n - 1) * round_time + prices.target_pass, rounding(x))


# --- 28: agreement of the views ---


@theorem("28a", "Busy time is the sum of the intervals on units; on two units nothing ever waits.", source="conservation",
         given=lambda: _decodings("tenths"))
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, rounding(x) * len(run.intervals))
    at_most("busy time", run.busy, 2 * run.latency, rounding(x))
    equal("waited", run.waiting_time, 0.0)
    equal("passes of the draft model not on the second unit",
          sum(row.role == "draft" and row.unit != 1 for row in run.intervals if row.unit >= 0), 0)  # fmt: skip


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a pass of the target.",
         source="no contention", given=lambda: _decodings("whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][: n - 1]))
    equal("latency", float(tally.time[0]), run.latency, rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, rounding(x))
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))


@theorem("28h", "Events and counter generate the text of plain decoding, on any cluster, with equal passes if drafts are"
         " completed.", source="exactness", given=lambda: _decodings("tenths", cluster=True))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)
    if parameters_of(x).lockstep:  # the progress of a stopped draft depends on times
        equal("passes", run.account.totals(), work.account.totals())
    equal("rounds", run.rounds, work.rounds)


# --- 29: outcomes by position ---


@theorem("29a", "An acceptance in place of a rejection never increases the rounds.",
         source="the start of the next round is monotone in every outcome",
         given=lambda: _decodings(at=integers(0, 39)))
def acceptance_in_place_of_a_rejection(x: Example) -> None:
    at = x["at"] % size(x)
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("rounds with one more acceptance", rounds(play(x, accept=better)), rounds(play(x)))


@theorem("29b", "An acceptance in place of a rejection never takes longer.",
         source="false: later drafted tokens make the pass longer and may be rejected", given=_wide,
         expect="fails")
def acceptance_takes_no_longer(x: Example) -> None:
    at = x["at"] % size(x)
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("latency with one more acceptance", play(x, accept=better).latency, play(x).latency)


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "draft_layers", "draft_stop")
    return algorithm.Parameters(**{"layers": 1} | {name: x[name] for name in names if name in x})


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return algorithm.decode(parameters_of(x), PROMPT, size(x) if "accept" in x else x["tokens"], stop_tokens(x))


def world(x: Example) -> World:
    """Return the simulated answers of the models in an example's decoding."""
    known = survivors({"draft_length": parameters_of(x).longest_draft, "accept": x["accept"]})
    return World(1, parameters_of(x).layers, drafts={"draft": DraftOutcomes("target", known)})


def play(x: Example, *, record: bool = False, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    cluster = Cluster(**x["cluster"]) if "cluster" in x else Cluster(parameters_of(x).units)
    return simulate(steps(x), size(x), cluster, cost(x), world(x), record=record)


def in_turn(steps: Steps) -> Generator[Step, Any, Any]:
    """Run each sub-process to its end where it is forked: the text does not depend on concurrency."""
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        match step:
            case Fork():
                answer = []
                for body in step.bodies:
                    assert not isinstance(body, Forward)
                    answer.append((yield from in_turn(body)))
            case Join():
                answer = step.tasks  # their return values
            case Stop():
                answer = None  # they have already ended
            case _:
                answer = yield step


def _hidden(x: Example) -> bool:
    """True if drafts with their links take no longer than a pass, and passes take the same for any number of tokens."""
    prices = cost(x)
    drafting_time = x["draft_length"] * float(prices.draft_times()) + 2 * prices.link
    return "verify_cost" not in x["cost"] and drafting_time <= prices.target_pass


THEOREMS = theorem.all()
