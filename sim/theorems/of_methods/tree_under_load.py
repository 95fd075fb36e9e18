"""Theorems on tree drafts under load, 47: generators, arrays and clocks agree; what a pass and the cache hold.

Examples are those of `served_examples` with `parents`, a `drafter`, and `endings` instead of `outcomes`: the draft that starts at
output position j of request i ends at node `endings[i + j]`, counted cyclically (0: the root).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import Ranked
from model.methods.draft_model import COLOCATED, SEPARATE
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm
from model.serving import decodings, fast_server
from model.serving.decodings import Drafter, Generators
from model.serving.scheduler import CACHED, DONE, HELD, LEFT, REQUEST
from model.serving.server import Server, ServerRequest
from model.serving.tree_drafts import ServedTree, TreeArrays
from model.steps import Steps
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from sim.theorems import served_examples
from sim.theorems.served_examples import LAYERS, ObservedPrices, ObservedRun, ObservedScheduler
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st
from sim.theorems.tree_examples import draw_parents

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

Integers = NDArray[np.int64]
theorem = TheoremCollection("tree")
DRAFTERS: dict[str, Drafter] = {
    speculative.MODEL: decodings.MODEL, speculative.HEADS: decodings.HEADS, speculative.PARALLEL: decodings.PARALLEL,
    "separate": decodings.SEPARATE_MODEL,
}  # fmt: skip
"""How the drafters of the examples make their passes; `separate` is a draft model on a device of its own."""


@drawn
def loads(draw: DrawFn, /, **more: Any) -> Example:
    """Draw loads of requests with tree drafts."""
    drafters = more.pop("drafters", (*DRAFTERS,))
    parents = draw_parents(draw, 6)
    example: Example = draw(served_examples.loads(("autoregressive",), **more))
    example |= {"parents": parents, "drafter": draw(st.sampled_from(drafters)), "draft_length": len(parents)}
    return example | {"endings": draw(st.lists(st.integers(0, len(parents)), min_size=1, max_size=4))}


def _parameters(x: Example, *, cut: bool = False) -> algorithm.Parameters:
    separate = x["drafter"] == "separate"
    return algorithm.Parameters(
        LAYERS, "listed", parents=tuple(x["parents"]), drafter=speculative.MODEL if separate else x["drafter"],
        placement=SEPARATE if separate else COLOCATED, sequences=1 if cut else 2,
    )  # fmt: skip


class _Endings:
    """Outcomes of the requests of an example."""

    outcome = "accept"

    def __init__(self, x: Example) -> None:
        self.outputs = [output for *_, output in x["requests"]]
        self.values = x["endings"]

    def of(self, number: int) -> Integers:
        """Nodes where drafts from each output position end."""
        at = np.arange(number, number + self.outputs[number])
        return np.asarray(np.array(self.values, dtype=np.int64)[at % len(self.values)])


def _starter(x: Example, *, cut: bool = False) -> Callable[[ServerRequest, Any], tuple[Steps, Any]]:
    own = _parameters(x, cut=cut)
    tree = ServedTree(own)

    def decode(request: ServerRequest, row: Any) -> tuple[Steps, Any]:
        ranks = [tree.ranks(ending) for ending in row.tolist()]
        by_depth = [[0] * request.output, *[[each[depth] for each in ranks] for depth in range(tree.tree.depth)]]
        return algorithm.decode(own, [*range(request.prompt)], request.output), Ranked(request.prompt, LAYERS, by_depth)

    return decode


def _play(x: Example, *, events: bool = False, generators: bool = False) -> ObservedRun:
    """Serve the requests of an example: in a loop or by events, with arrays of outcomes or with the algorithm's generators."""
    from sim.engine import serving  # loads simpy

    load, settings = served_examples.requests_of(x), served_examples.settings_of(x)
    outcomes: Any = _Endings(x)
    outputs: dict[int, list[int]] = {}
    made: Any
    if generators:
        made = Generators(_starter(x), outcomes, outputs.__setitem__)
    else:
        made = TreeArrays(outcomes, settings.max_num_seqs, ServedTree(_parameters(x)), DRAFTERS[x["drafter"]])
    prices = ObservedPrices(served_examples.prices_of(x))
    server = Server(settings, served_examples.policy_of(x), prices, made, load.request)
    server.scheduler = ObservedScheduler(settings)
    run = ObservedRun(load, [server])
    run.prices, run.outputs = [prices], outputs
    (serving if events else fast_server).serve(load, [server], run)
    return run


def _same(one: ObservedRun, other: ObservedRun) -> None:
    for name in ("arrival", "admitted", "first", "end"):
        equal(f"times of {name}", getattr(other, name).tolist(), getattr(one, name).tolist())
    equal("steps", other.steps, one.steps)
    equal("tokens of every step", other.scheduler.emitted, one.scheduler.emitted)
    equal("passes", other.passes, one.passes)


@theorem("47a", "Under load, events and the loop over step ends, and the algorithm's generators and arrays of endings, give the"
         " same steps and times to the last bit.",
         source="an array holds where the generator's drafts end",
         given=lambda: st.sampled_from((4, 10)).flatmap(lambda per: loads(per=per, falling=st.booleans())))
def generators_are_arrays(x: Example) -> None:
    arrays = _play(x)
    _same(arrays, _play(x, generators=True))
    _same(arrays, _play(x, events=True))


@theorem("47b", "Each request's tokens are those that its algorithm generates alone; at the end nothing runs, waits or holds a"
         " block.",
         source="exactness does not depend on the batch", given=loads)
def tokens_are_those_alone(x: Example) -> None:
    run, outcomes = _play(x, generators=True), _Endings(x)
    for number in range(len(x["requests"])):
        request = run.load.request(number)
        steps, world = _starter(x, cut=True)(request, outcomes.of(number))
        equal(f"tokens of request {number}", run.outputs[number], interpreter.count(steps, world, request.output).tokens)
    scheduler = run.scheduler
    equal("running, waiting, blocks in use", (scheduler.running, len(scheduler.waiting), scheduler.held), (0, 0, 0))


@theorem("47c", "A pass verifies whole levels of the tree, within the tokens of a pass. Between passes the cache holds a request's"
         " text but for its last token, and blocks for every node that was verified: rejected ones give their positions back.",
         source="conservation", given=lambda: loads(falling=st.booleans()))
def accepted_nodes_stay(x: Example) -> None:
    run, settings, tree = _play(x), served_examples.settings_of(x), ServedTree(_parameters(x))
    for over in run.passes:
        at_most("tokens of a pass", over.tokens + over.prompt_tokens, x["batched"])
    steps = [planned for planned in run.scheduler.plans if planned.plan.decoding.size or planned.plan.chunks]
    for planned, record in zip(steps, run.steps, strict=True):
        nodes = [int(tree.sizes[tree.levels(np.array([limit]))[0]]) for limit in planned.plan.limits.tolist()]
        equal("drafted tokens of a step", record.drafted, sum(nodes))
        after = planned.after
        for number, left, cached, done in zip(*after[[REQUEST, LEFT, CACHED, DONE]].tolist(), strict=True):
            equal(f"positions of request {number}", left + cached + (not left), x["requests"][number][1] + done)
        for column, drafted in zip(planned.plan.decoding.tolist(), nodes, strict=True):
            needed = int(after[CACHED, column]) + 1 + (1 + settings.lookahead) * drafted
            at_most("positions of a verification, against its blocks", needed, int(after[HELD, column]) * settings.block_size)


@theorem("47d", "Under load a chain is speculative decoding, step by step and to the last bit.", source="a chain has one candidate",
         given=lambda: loads(falling=st.booleans()))
def chain_is_speculative(x: Example) -> None:
    length = len(x["parents"])
    chain = {**x, "parents": [*range(-1, length - 1)]}
    other = {**x, "method": x["drafter"], "outcomes": x["endings"]}
    _same(_play(chain), served_examples.play(other))


@theorem("47e", "A request that is alone in the server takes the time that its decoding takes on a cluster, to the last bit.",
         source="the server adds nothing",
         given=lambda: loads(
             most_requests=1, most_seqs=1, most_prompt=1, most_output=8, clients=False, tight=False, batched=st.just(16),
             verify=st.integers(0, 2), link=st.integers(0, 2),
         ))  # fmt: skip
def alone_as_on_a_cluster(x: Example) -> None:
    verify = x["verify"] / 4
    given = {"step": LAYERS * (1 - verify), "token": LAYERS * verify, "drafting": LAYERS * 0.25, "link": x["link"] / 4}
    x = {**x, "requests": [[0, *x["requests"][0][1:]]], "prices": {name: 4 * each for name, each in given.items()}}
    run = _play(x, events=True, generators=True)
    request = run.load.request(0)
    steps, world = _starter(x)(request, _Endings(x).of(0))
    curve = tuple((width, 1 - verify + verify * width) for width in range(1, len(x["parents"]) + 2))
    cost = UnitCost(LAYERS, cost_ratio=0.25, verify_cost=curve, link=x["link"] / 4)
    alone = simulate(steps, request.output, Cluster(2), cost, world)
    equal("end of the request", float(run.end[0]), alone.latency)
    equal("steps", run.totals.steps, len(alone.commits))


THEOREMS = theorem.all()
