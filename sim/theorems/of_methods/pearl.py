"""The theorems on PEARL: the law of its rounds, and that all views tell of one decoding, whose text is the target's.

An example of a law has an acceptance rate, a draft length and a cost ratio; one of a decoding those of `drafting_examples`, and
perhaps what stops a draft.
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
from sim.theorems.drafting_examples import PROMPT, always, drafted, drafting, ends, few, models, pairs, rounds, target_law
from sim.theorems.output_law import distance, law_of_text, likeliest_text
from sim.theorems.pipelined_examples import CLOSE, chances, cost, law, paths, rates, rounding, size, survivors, whole
from sim.theorems.theorem import Collected, Example, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = Collected("pearl")


# --- What they are tried on ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    quarters = whole(0, 8).map(lambda number: number / 4)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "draft_length": whole(1, 8), "cost_ratio": quarters, **fields})


def _lengths() -> SearchStrategy[Example]:
    return _laws(tokens=whole(1, 60))


def _decodings(costs: str = "plain", *, cluster: bool = False, **fields: Any) -> SearchStrategy[Example]:
    return drafting(9, 4, costs=costs, cluster=cluster, **({"draft_stop": _stops()} | fields)).map(_drafting_some)


def _stops() -> SearchStrategy[str]:
    return st.sampled_from(algorithm.DRAFT_STOPS)


def _stopped() -> SearchStrategy[Example]:
    """Decodings whose drafts a rejection stops, with costs in quarters."""
    return _decodings("whole", draft_stop=st.just(algorithm.REJECTION))


def _stopped_on(links: str) -> SearchStrategy[Example]:
    """The same with links of this kind, and units given back at once or later where a process is stopped."""
    clusters = st.sampled_from(STOPS).map(lambda stop: {"units": 2, "links": links, "stop": stop})
    return st.builds(lambda x, cluster: {**x, "cluster": cluster}, _stopped(), clusters)


def _wide() -> SearchStrategy[Example]:
    """Passes that take longer the wider they are, behind drafts that take no time."""
    slow = whole(1, 4).map(lambda slower: {"cost_ratio": 0.0, "verify_cost": [[1, 1], [5, 1 + slower]]})
    return _decodings(at=whole(0, 39), cost=slow)


def _all_luck() -> SearchStrategy[Example]:
    known = few(6, 3, costs="tenths", law="any").filter(lambda x: "survival" not in x["law"]).map(_drafting_some)
    return st.builds(lambda x, stop: {**x, "draft_stop": stop}, known, _stops())


def _models(sampled: bool) -> SearchStrategy[Example]:
    return pairs(4, 3, draft_stop=_stops()).map(lambda x: _drafting_some({**x, "sampled": sampled}))


def _drafting_some(x: Example) -> Example:
    """It drafts at least one token, and its draft model is always on a unit of its own."""
    return {name: value for name, value in x.items() if name != "placement"} | {"draft_length": max(x["draft_length"], 1)}


# --- 14: the text ---


@theorem("14a", "Sampled, the text has the target's own law, exactly.", source="[Liu2024]: each token is tested as in speculative"
         " decoding", given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    own = target_law(x)
    found = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    if found != own:
        raise AssertionError(f"the laws of the text are apart by {distance(found, own)}")


@theorem("14b", "Greedy, the text is the target's own.", source="[Liu2024]", given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    found = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    equal("texts", [*found], [likeliest_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


# --- 20: rounds ---


@theorem("20a", "A round gives the mean tokens that the chain of its two kinds of rounds has.", source="[Liu2024], Section 3",
         given=_laws)
def rounds_of_pearl(x: Example) -> None:
    """The chain of its two kinds of rounds, with every outcome of a whole draft tried."""
    alpha, gamma = x["acceptance_rate"], x["draft_length"]
    tokens = stay = 0.0
    for outcome in itertools.product((True, False), repeat=gamma):
        chance = math.prod(alpha if kept else 1 - alpha for kept in outcome)
        kept = len(list(itertools.takewhile(bool, outcome)))
        tokens += chance * min(kept + 1, gamma)
        stay += chance * (kept == gamma)
    # Rounds of the two kinds in the long run: to whole drafts with alpha, back from them with 1 - stay.
    share = alpha / (alpha + 1 - stay) if alpha else 0.0
    equal("tokens of a round", float(pearl.expected_tokens(alpha, gamma)), 1 - share + share * tokens, 1e-11)


@theorem("20b", "Where all is accepted the speed is gamma / max(gamma c, 1), and never higher.", source="[Liu2024], Section 3",
         given=_laws)
def pearl_at_its_best(x: Example) -> None:
    gamma, c = x["draft_length"], x["cost_ratio"]
    best = gamma / max(gamma * c, 1)
    equal("speed where all is accepted", float(pearl.speedup(1, gamma, c)), best, CLOSE)
    at_most("speed", float(pearl.speedup(x["acceptance_rate"], gamma, c)), best, CLOSE)


@theorem("20c", "It is never slower than drafting first and verifying then.",
         source="false: the first token of a draft is verified alone", given=_laws, expect="fails")
def pearl_beats_drafting(x: Example) -> None:
    given = x["acceptance_rate"], x["draft_length"], x["cost_ratio"]
    at_most("speed of drafting first", float(speculative.speedup(*given)), float(pearl.speedup(*given)), CLOSE)


@theorem("20d", "Mean and variance of the time, and the means of unit-time, rounds and tokens on offer, are those over all luck.",
         source="a chain over positions and the two kinds of rounds", given=_all_luck)
def moments_over_all_luck(x: Example) -> None:
    outcomes = paths(x["tokens"] - 1)
    mass = chances(law(x["law"]), outcomes).tolist()
    runs = [play({**x, "accept": [*row, False]}) for row in outcomes.T.tolist()]
    found = pearl.predict(choice(x), x["tokens"], law(x["law"]), cost(x))

    def mean(values: list[float]) -> float:
        return math.fsum(chance * value for chance, value in zip(mass, values, strict=True))

    time = mean([run.latency for run in runs])
    equal("latency", float(found.latency), time, CLOSE)
    square = float(found.latency_variance) + time**2
    equal("its square", square, mean([run.latency**2 for run in runs]), CLOSE)
    equal("compute", float(found.busy), mean([run.busy for run in runs]), CLOSE)
    for what, value, of in (("rounds", found.rounds, rounds), ("tokens on offer", found.drafted, drafted)):
        assert value is not None
        equal(what, float(value), mean([of(run) for run in runs]), CLOSE)


@theorem("20e", "The rounds of l tokens, times the tokens of a round in the long run E, are between l and"
         " l + gamma - 1 + (E - 1) / alpha: so E is the limit.", source="a martingale: tokens less E for each round, and"
         " (E - 1) / alpha in post-verify", given=_lengths)
def many_tokens(x: Example) -> None:
    alpha, gamma, n = x["acceptance_rate"], x["draft_length"], x["tokens"]
    each = float(pearl.expected_tokens(alpha, gamma))
    found = pearl.predict(algorithm.Parameters(1, gamma), n, Iid(alpha), UnitCost(1, cost_ratio=x["cost_ratio"])).rounds
    assert found is not None
    at_most("tokens", n, float(found) * each, 1e-9)
    at_most("tokens of all rounds", float(found) * each, n + gamma - 1 + ((each - 1) / alpha if alpha else 0.0), 1e-9)


@theorem("20f", "If drafts take no longer than a pass, no number of tokens is faster than the law says of many.", source="20e",
         given=lambda: _lengths().filter(lambda x: x["draft_length"] * x["cost_ratio"] <= 1))
@theorem("20g", "No number of tokens is faster than the law says of many.",
         source="false: at the end drafts are cut, where they are what takes time", given=_lengths, expect="fails")
def slower_than_the_law(x: Example) -> None:
    alpha, gamma, n = x["acceptance_rate"], x["draft_length"], x["tokens"]
    found = pearl.predict(algorithm.Parameters(1, gamma), n, Iid(alpha), UnitCost(1, cost_ratio=x["cost_ratio"]))
    law_of_many = float(pearl.speedup(alpha, gamma, x["cost_ratio"]))
    at_most("speed-up", float(found.plain_latency / found.latency), law_of_many, 1e-9)


@theorem("20h", "Where all is accepted there are 1 + ceil((l - 1) / gamma) rounds, where nothing is, l; never more, never fewer.",
         source="the first round verifies one token, each that follows gamma", given=_decodings)
def most_and_fewest_rounds(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    fewest = 1 + math.ceil((n - 1) / gamma)
    equal("rounds where all is accepted", rounds(play(x, accept=[True] * n)), fewest)
    equal("rounds where nothing is", rounds(play(x, accept=[False] * n)), n)
    at_most("fewest rounds", fewest, rounds(play(x)))
    at_most("rounds", rounds(play(x)), n)


@theorem("20i", "Where drafts with their links take no longer than a pass, it is never slower than plain decoding.",
         source="a round takes a pass and gives a token at least", given=lambda: _decodings("whole").filter(_hidden))
@theorem("20j", "It is never slower than plain decoding.", source="false: a round waits for its draft, whatever becomes of it",
         given=lambda: _decodings("whole"), expect="fails")
def never_slower_than_plain(x: Example) -> None:
    at_most("latency", play(x).latency, size(x) * cost(x).target_pass, rounding(x))


# --- 21: drafts that a rejection stops ---


@theorem("21a", "On two units with a link from each to the other, stopping drafts at rejections takes no longer than lock-step, and"
         " no more unit-time.", source="by induction over rounds: each ends no later, and its orders arrive no later",
         given=lambda: _stopped_on("point-to-point"))
@theorem("21b", "Where both ways share one link, too, stopping drafts at rejections takes no longer than lock-step.",
         source="false: the first token, sent ahead, holds up the others", given=lambda: _stopped_on("shared"), expect="fails")
def stopping_takes_no_longer(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    at_most("latency", stopped.latency, lockstep.latency, rounding(x))
    at_most("unit-time", stopped.busy, lockstep.busy, rounding(x))


@theorem("21c", "Where drafts with their links take no longer than a pass, stopping them at rejections changes nothing: tokens come"
         " at the same times, and unit-time and passes are the same.", source="nothing is left to be stopped",
         given=lambda: _stopped().filter(_hidden))
@theorem("21d", "Stopping drafts at rejections changes nothing, however long they take.",
         source="false: a round that rejects does not wait for its draft", given=_stopped, expect="fails")
def nothing_to_stop(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    equal("times of commits", stopped.commits, lockstep.commits)
    equal("unit-time", stopped.busy, lockstep.busy, rounding(x))
    equal("passes", stopped.account.totals(), lockstep.account.totals())


@theorem("21e", "Stopping drafts changes no token and no round, on any cluster.",
         source="a round keeps what the target keeps, however much is drafted after it",
         given=lambda: _decodings("tenths", cluster=True, draft_stop=st.just(algorithm.REJECTION)))
def stopping_changes_no_round(x: Example) -> None:
    stopped, lockstep = play(x), play(x, draft_stop=algorithm.ROUND)
    equal("tokens", stopped.tokens, lockstep.tokens)
    equal("rounds", stopped.rounds, lockstep.rounds)
    equal("tokens of each round", [count for *_, count in stopped.commits], [count for *_, count in lockstep.commits])


@theorem("21f", "Where nothing is accepted a round whose draft is stopped takes one draft pass with its links, or the target's pass"
         " if that takes longer, for any draft length.", source="the first token that is drafted is rejected", given=_stopped)
def nothing_accepted(x: Example) -> None:
    prices, n = cost(x), size(x)
    each = max(prices.target_pass, float(prices.draft_times()) + 2 * prices.link)
    equal("latency", play(x, accept=[False] * n).latency, (n - 1) * each + prices.target_pass, rounding(x))


# --- 28: agreement of the views ---


@theorem("28a", "Busy time is the sum of the intervals on units; on two units nothing ever waits.", source="conservation",
         given=lambda: _decodings("tenths"))
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, rounding(x) * len(run.intervals))
    at_most("busy time", run.busy, 2 * run.latency, rounding(x))
    equal("waited", run.waited, 0.0)
    equal("passes of the draft model on another unit than the second",
          sum(row.role == "draft" and row.unit != 1 for row in run.intervals if row.unit >= 0), 0)  # fmt: skip


@theorem("28d", "Simulator and paths agree on every path, exactly, with costs in quarters of a pass of the target.",
         source="nothing contends", given=lambda: _decodings("whole"))
@theorem("28e", "Simulator and paths agree on every path, to rounding, with costs in tenths.", source="nothing contends",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(choice(x), n, cost(x), always(x["accept"][: n - 1]))
    equal("latency", float(tally.time[0]), run.latency, rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, rounding(x))
    equal("rounds and tokens on offer", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))


@theorem("28h", "The text is the plain decoder's, on any cluster and whatever is accepted; the counter counts the same passes.",
         source="exactness", given=lambda: _decodings("tenths", cluster=True))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("the counter's text", work.tokens, run.tokens)
    if choice(x).lockstep:  # what is stopped has come as far as its passes are fast
        equal("passes", run.account.totals(), work.account.totals())
    equal("rounds", run.rounds, work.rounds)


# --- 29: luck by position ---


@theorem("29a", "An acceptance in place of a rejection takes no more rounds.",
         source="the start of the next round rises with every outcome, and a rejection stops whoever comes to it",
         given=lambda: _decodings(at=whole(0, 39)))
def acceptance_in_place_of_a_rejection(x: Example) -> None:
    at = x["at"] % size(x)
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("rounds with one acceptance more", rounds(play(x, accept=better)), rounds(play(x)))


@theorem("29b", "An acceptance in place of a rejection never takes longer.",
         source="false: what was drafted behind it is verified in a wider pass, and may be rejected", given=_wide,
         expect="fails")
def acceptance_takes_no_longer(x: Example) -> None:
    at = x["at"] % size(x)
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("latency with one acceptance more", play(x, accept=better).latency, play(x).latency)


# --- Playing an example ---


def choice(x: Example) -> algorithm.Parameters:
    """The parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "draft_layers", "draft_stop")
    return algorithm.Parameters(**{"layers": 1} | {name: x[name] for name in names if name in x})


def steps(x: Example) -> Steps:
    """The process of an example's decoding."""
    return algorithm.decode(choice(x), PROMPT, size(x) if "accept" in x else x["tokens"], ends(x))


def world(x: Example) -> World:
    """What models would say in an example's decoding."""
    known = survivors({"draft_length": choice(x).longest_draft, "accept": x["accept"]})
    return World(1, choice(x).layers, drafts={"draft": DraftOutcomes("target", known)})


def play(x: Example, *, record: bool = False, **changes: Any) -> Run:
    """Simulate an example's decoding, with some of its fields changed."""
    x = {**x, **changes}
    cluster = Cluster(**x["cluster"]) if "cluster" in x else Cluster(choice(x).units)
    return simulate(steps(x), size(x), cluster, cost(x), world(x), record=record)


def in_turn(steps: Steps) -> Generator[Step, Any, Any]:
    """The same with each sub-process run to its end where it is started: nothing depends on what happens at the same time."""
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
                answer = step.tasks  # what they returned
            case Stop():
                answer = None  # they have ended
            case _:
                answer = yield step


def _hidden(x: Example) -> bool:
    """Whether drafts with their links take no longer than a pass, however wide, and that no longer than a narrow one."""
    prices = cost(x)
    drafting_time = x["draft_length"] * float(prices.draft_times()) + 2 * prices.link
    return "verify_cost" not in x["cost"] and drafting_time <= prices.target_pass


THEOREMS = theorem.all()
