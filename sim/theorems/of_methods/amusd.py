"""Theorems on AMUSD: agreement of all views, exactness of the text, time between rejections, and comparisons with other methods.

An example of the formulas has an acceptance rate, a cost ratio, a link time and the parameters; one of a decoding has the fields of
`drafting_examples`, `min_waiting`, and `draft_stop`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.amusd import algorithm
from model.methods.amusd import paths as sampler
from model.methods.amusd import theory as amusd
from model.methods.pearl import theory as pearl
from model.methods.speculative import algorithm as speculative_algorithm
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
)
from sim.theorems.output_law import distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, cost, integers, law, rounding, size, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("amusd")
MOST = 5
"""Largest `draft_length` of small decodings."""


# --- Examples ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    """Draw acceptance rates of at most 3/4, whose drafts are short, and parameters with a closed form."""
    some = {
        "acceptance_rate": integers(0, 12).map(lambda number: number / 16), "draft_length": integers(3, 8),
        "cost_ratio": integers(0, 8).map(lambda number: number / 8), "min_waiting": integers(0, 2),
        "link": integers(0, 4).map(lambda number: number / 4),
    }  # fmt: skip
    return st.fixed_dictionaries(some | {"draft_stop": _stops()} | fields).filter(_has_formula)


def _stops() -> SearchStrategy[str]:
    return st.sampled_from(algorithm.DRAFT_STOPS)


def _has_formula(x: Example) -> bool:
    return bool(x["min_waiting"] or x["draft_stop"] == algorithm.REJECTION)


def _decodings(costs: str = "plain", *, cluster: bool = False, **fields: Any) -> SearchStrategy[Example]:
    some = drafting(9, MOST, costs=costs, cluster=cluster, **({"draft_stop": _stops(), "min_waiting": integers(0, 3)} | fields))
    return some.map(_possible)


def _waiting(costs: str = "whole", **fields: Any) -> SearchStrategy[Example]:
    """Draw decodings whose target waits for drafted tokens before each pass."""
    some = _decodings(costs, min_waiting=integers(1, 3), draft_length=integers(2, MOST), **fields)
    return some.filter(lambda x: "verify_cost" not in x["cost"])


def _possible(x: Example) -> Example:
    """Make `draft_length` at least 1 and `min_waiting` smaller, and leave out the placement, which is always separate."""
    length = max(x["draft_length"], 1)
    kept = {name: value for name, value in x.items() if name != "placement"}
    return kept | {"draft_length": length, "min_waiting": min(x["min_waiting"], length - 1)}


def _all_outcomes() -> SearchStrategy[Example]:
    known = short_decodings(6, 4, costs="whole", law="any").filter(lambda x: "survival" not in x["law"])
    more = st.fixed_dictionaries({"draft_stop": _stops(), "min_waiting": integers(0, 2)})
    return st.builds(lambda x, given: _possible({**x, **given}), known, more).filter(_has_formula)


def _models(sampled: bool) -> SearchStrategy[Example]:
    some = pairs(4, 3, min_waiting=integers(0, 2), draft_stop=_stops(), arrivals=st.lists(st.booleans(), min_size=1, max_size=6))
    return some.map(lambda x: _possible({**x, "sampled": sampled}))


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution, whichever drafted tokens have arrived before a pass.",
         source="tokens are tested as in speculative decoding, on a condition that does not depend on them",
         given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want = target_law(x)
    law = law_of_text(lambda: by_arrivals(steps(x), itertools.cycle(x["arrivals"])), models(x), PROMPT, x["tokens"])
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("14b", "The greedy text is that of the target, whichever drafted tokens have arrived before a pass.",
         source="[McDanel2024]", given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    law = law_of_text(lambda: by_arrivals(steps(x), itertools.cycle(x["arrivals"])), models(x), PROMPT, x["tokens"])
    equal("generated text", [*law], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


# --- 22: time between rejections ---


@theorem("22a", "The formula gives the mean and variance of the time, and mean GPU-time, rounds and drafted tokens.",
         source="renewal at rejections", given=_all_outcomes)
def moments_over_all_outcomes(x: Example) -> None:
    mass, runs = all_decodings(x, play)
    prediction = amusd.predict(parameters_of(x), x["tokens"], law(x["law"]), cost(x))

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


@theorem("22o", "The formula gives the mean work of both models: passes, tokens, and positions attended to and read, with what is"
         " made in vain.", source="renewal at rejections", given=_all_outcomes)
def work_over_all_outcomes(x: Example) -> None:
    work = amusd.timed_work(parameters_of(x), x["tokens"], [law(x["law"])], cost(x))
    assert work is not None
    equal_work(work.at(0), *all_decodings(x, play), CLOSE)


@theorem("22b", "In the long run each token takes 1 / `speedup` passes of the target.",
         source="each position is a rejection with probability 1 - alpha, independent of all before",
         given=_laws)
def many_tokens(x: Example) -> None:
    """The rejections have no memory: l more tokens add l / `speedup`, but for drafts without rejection over all of these tokens."""
    n, rate = 90, Iid(x["acceptance_rate"])
    fewer, more = (float(amusd.predict(parameters_of(x), tokens, rate, _of(x)).latency) for tokens in (n, 2 * n))
    equal("passes of n tokens", (more - fewer) / n, 1 / _speedup(x), 1e-8)


@theorem("22c", "The speed-up is at most 1 / max(c, 1 / gamma, (1 - alpha) R), with R = 1 + 2 L + m c if m > 0 and"
         " max(1, 2 L + c) if m = 0.",
         source="drafts are made in sequence; a message, m draft passes and a transfer precede the pass after a rejection",
         given=_laws)
def bounded_by_the_rate(x: Example) -> None:
    known = x["acceptance_rate"], x["draft_length"], x["cost_ratio"], x["link"], x["min_waiting"]
    at_most("speed-up", _speedup(x), float(amusd.rate_bound(*known)), CLOSE)


@theorem("22d", "With instant drafts of any length the speed-up is 1 / ((1 - alpha) (1 + alpha^(m + 1))).",
         source="a pass over the first m tokens, then one over all others", given=_laws)
def instant_drafts(x: Example) -> None:
    alpha, m = x["acceptance_rate"], x["min_waiting"]
    found = amusd.speedup(alpha, 150, 1e-9, min_waiting=m, draft_stop=x["draft_stop"])
    equal("speed-up", found, float(amusd.free_drafts(alpha, m)), 1e-6)


@theorem("22e", "With instant drafts of any length the speed-up is 1 / (1 - alpha): one pass per rejection.",
         source="false: the first pass after a rejection reads only the tokens that the target has waited for", given=_laws,
         expect="fails")
def oracle(x: Example) -> None:
    alpha = x["acceptance_rate"]
    found = amusd.speedup(alpha, 150, 1e-9, min_waiting=x["min_waiting"], draft_stop=x["draft_stop"])
    equal("speed-up", found, 1 / (1 - alpha), 1e-6)


@theorem("22f", "A decoding takes no less than all its drafts in sequence with two transfers and a pass: 2 L + (l - 1) c + 1.",
         source="the token before the last is drafted after all others, and a pass follows its arrival",
         given=lambda: _decodings("whole"))
def no_faster_than_the_draft_model(x: Example) -> None:
    prices, n = cost(x), size(x)
    least = prices.target_pass + (2 * prices.link + (n - 1) * float(prices.draft_times()) if n > 1 else 0.0)
    at_most("drafts, transfers and a pass", least, play(x).latency, rounding(x))


@theorem("22g", "If the target waits for m > 0 drafted tokens, stopping the draft pass in progress at a rollback message saves from"
         " nothing to one draft pass per rejection.",
         source="the new draft begins later, and all that follows it is shifted", given=_waiting)
def rollback_waits_for_a_pass(x: Example) -> None:
    ended, stopped = (play(x, draft_stop=stop) for stop in algorithm.DRAFT_STOPS)
    wrong = x["accept"][: max(size(x) - 2, 0)].count(False)  # nothing is drafted after the position before the last
    at_most("latency", stopped.latency, ended.latency, rounding(x))
    at_most("latency with passes that end", ended.latency, stopped.latency + wrong * float(cost(x).draft_times()), rounding(x))


@theorem("22h", "Without a wait before passes, drafts that stop at rejections are never slower than plain decoding, if a draft pass"
         " with its messages takes no longer than a pass of the target.",
         source="the token after those that have arrived arrives during the pass",
         given=lambda: _decodings("whole", min_waiting=st.just(0), draft_stop=st.just(algorithm.REJECTION)).filter(_hidden))
@theorem("22i", "AMUSD is never slower than plain decoding.", source="false: the target waits for drafted tokens",
         given=lambda: _decodings("whole"), expect="fails")
def never_slower_than_plain(x: Example) -> None:
    at_most("latency", play(x).latency, size(x) * cost(x).target_pass, rounding(x))


@theorem("22j", "AMUSD is never slower than PEARL, with the same drafts.",
         source="false: after a rejection its target waits, while PEARL's makes a pass", given=_laws, expect="fails")
def never_slower_than_pearl(x: Example) -> None:
    best = max(float(pearl.speedup(x["acceptance_rate"], length, x["cost_ratio"])) for length in range(1, x["draft_length"] + 1))
    at_most("speed-up of PEARL", best, _speedup({**x, "link": 0.0}), CLOSE)


@theorem("22k", "AMUSD is never slower than speculative decoding on the same two units.",
         source="false: with fast drafts the first pass after a rejection reads too few of them", given=_laws, expect="fails")
def never_slower_than_speculative(x: Example) -> None:
    best = max(_speculative(x, length) for length in range(1, x["draft_length"]))
    at_most("speed-up of speculative decoding", best, _speedup(x), CLOSE)


@theorem("22l", "Speculative decoding on the same two units is never slower than AMUSD.",
         source="false: AMUSD drafts while the target verifies", given=_laws, expect="fails")
def never_faster_than_speculative(x: Example) -> None:
    best = max(_speculative(x, length) for length in range(1, x["draft_length"]))
    at_most("speed-up of AMUSD", _speedup(x), best, CLOSE)


@theorem("22m", "A faster draft model never lowers the speed-up.",
         source="false: a draft pass is in progress at another time when a rollback message arrives", given=_laws, expect="fails")
def faster_drafts(x: Example) -> None:
    slower = {**x, "cost_ratio": x["cost_ratio"] + 0.125}
    at_most("speed-up with slower drafts", _speedup(slower), _speedup(x), CLOSE)


@theorem("22n", "A longer `draft_length` never makes a decoding slower.",
         source="false: a draft that has not paused is in a pass when a rollback message arrives",
         given=lambda: _decodings("whole"), expect="fails")
def longer_drafts(x: Example) -> None:
    at_most("latency with longer drafts", play(x, draft_length=x["draft_length"] + 1).latency, play(x).latency, rounding(x))


# --- 28: agreement of the views ---


@theorem("28a", "Busy time is the sum of the intervals on units; on two units nothing ever waits for a unit or link.",
         source="conservation", given=lambda: _decodings("tenths"))
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, rounding(x) * len(run.intervals))
    at_most("busy time", run.busy, 2 * run.latency, rounding(x))
    equal("waited", run.waiting_time, 0.0)
    equal("passes of a model on the other's unit",
          sum((row.role == "draft") != (row.unit == 1) for row in run.intervals if row.unit >= 0), 0)  # fmt: skip


@theorem("28b", "Every token but the last is drafted after the tokens before it, once; the target reads each drafted token at most"
         " once, and every token but the last.",
         source="conservation", given=lambda: _decodings("tenths"))
def every_token_is_drafted(x: Example) -> None:
    run, n = play(x), size(x)
    at_most("right contexts", n - 1, run.passes_of["draft"])
    if all(x["accept"][: n - 1]):
        equal("draft passes without rejections", run.passes_of["draft"], n - 1)
    equal("tokens that the target reads", run.account.of("target").heads, rounds(run) + drafted(run))
    at_most("tokens of all rounds", n, rounds(run) + drafted(run))


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a pass of the target.",
         source="the same clock", given=lambda: _decodings("whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="the same clock",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][: n - 1]))
    equal("latency", float(tally.time[0]), run.latency, rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, rounding(x))
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))
    tokens_read = amusd.operations(parameters_of(x), UnitCost(1, cost_ratio=0.5, operations_ratio=0.5), run.rounds, run.account)
    counted = replace(cost(x), operations_ratio=0.5)
    again = sampler.walk(parameters_of(x), n, counted, repeated_outcomes(x["accept"][: n - 1]))
    equal("operations", float(again.operations[0]), tokens_read, CLOSE)


@theorem("28h", "Events and counter generate the text of plain decoding, on any cluster.", source="exactness",
         given=lambda: _decodings("tenths", cluster=True))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)


@theorem("28i", "What a stopped draft pass does to its unit matters only with draft passes that rollback messages stop.",
         source="with `draft_stop` pass nothing is stopped before the end",
         given=lambda: _decodings("tenths", draft_stop=st.just(algorithm.PASS)))
def nothing_to_stop(x: Example) -> None:
    times = [play(x, cluster={"units": 2, "stop": stop}).commits for stop in STOPS]
    equal("times of commits", times, [times[0]] * len(times))


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "draft_layers", "min_waiting", "draft_stop")
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


class _Drafting:
    """A process that is run when it is joined, if it is said to have ended or not: its transfer may take any time."""

    def __init__(self, body: Steps, arrivals: Iterator[bool]) -> None:
        self.body, self.arrivals = body, arrivals
        self.done, self.value = False, None

    @property
    def ended(self) -> bool:
        """True if it has ended, or ends now."""
        return self.done or next(self.arrivals)


def by_arrivals(steps: Steps, arrivals: Iterator[bool], *, message: bool = False) -> Generator[Step, Any, Any]:
    """Run messages where they are sent, and drafts where the target joins them.

    `arrivals` says, whenever the target looks, whether the next drafted token has arrived.
    """
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        match step:
            case Fork():
                answer = [_Drafting(body, arrivals) for body in step.bodies if not isinstance(body, Forward)]
                for task in [] if message else answer:  # sent by the target
                    yield from _ended(task)
            case Join():
                for task in step.tasks:
                    yield from _ended(task)
                answer = [task.value for task in step.tasks]
            case Stop():
                answer = None
            case _:
                answer = yield step


def _ended(task: _Drafting) -> Generator[Step, Any, None]:
    if not task.done:
        task.value = yield from by_arrivals(task.body, task.arrivals, message=True)
        task.done = True


def _of(x: Example) -> UnitCost:
    return UnitCost(1, cost_ratio=x["cost_ratio"], link=x["link"])


def _speedup(x: Example) -> float:
    how = {name: x[name] for name in ("link", "min_waiting", "draft_stop")}
    return float(amusd.speedup(x["acceptance_rate"], x["draft_length"], x["cost_ratio"], **how))


def _speculative(x: Example, length: int) -> float:
    """Speed-up of speculative decoding with a separate draft model for many tokens: each round takes two transfers more."""
    per_round = float(speculative.expected_tokens(x["acceptance_rate"], length))
    parameters = speculative_algorithm.Parameters(1, length, placement="separate")
    assert parameters.units == 2
    return float(per_round / (length * x["cost_ratio"] + 1 + 2 * x["link"]))


def _hidden(x: Example) -> bool:
    """True if a draft pass with its messages takes no longer than a pass, which takes the same for any number of tokens."""
    prices = cost(x)
    return "verify_cost" not in x["cost"] and float(prices.draft_times()) + 2 * prices.link <= prices.target_pass


THEOREMS = theorem.all()
