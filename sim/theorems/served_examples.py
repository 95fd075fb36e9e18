"""Examples for theorems on servers: requests, settings and outcomes as plain values, played with everything that a step did.

An example has `requests`: [gap after the arrival before, prompt tokens, output tokens] of each; `per`: the parts of a second in
which gaps and `prices` (those that are not 0) are counted, where sums of quarters are exact; the settings `seqs`, `batched`,
`block`, `spare` (blocks beyond those of the largest request; None: as many as are needed), `lookahead`; `clients` (None: requests
arrive at their own times); `method` and `draft_length`; and `outcomes`: the draft that starts at output position j of request i has
`outcomes[i + j]` accepted tokens, counted cyclically. `falling` halves the draft length where more than one sequence decodes.
Methods with a context budget have that of the example, `budget`, if it has one. `share` are quarters of the cache that are the
draft's, of which it keeps the positions of its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.interpret.simulated_answers import EARLY_LAYERS, DraftOutcomes, World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.draft_model import COLOCATED, SEPARATE
from model.methods.early_exit import algorithm as early_exit
from model.methods.ngram import algorithm as ngram
from model.methods.pearl import algorithm as pearl
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.speculative import algorithm as speculative
from model.outcomes.lookup_laws import LookupDraft, LookupOutcome
from model.serving import decodings, fast_server
from model.serving.decodings import Arrays, Drafter, Generators
from model.serving.draft_policies import BatchSchedule, DraftPolicy, Static
from model.serving.loads import Load, TracedLoad, TracedRequests
from model.serving.records.recorder import Recorder
from model.serving.scheduler import DONE, REQUEST, WANTED, Plan, Scheduler, ServerSettings, Waiting
from model.serving.server import Server, ServerRequest, StepRecord
from model.serving.step_prices import RaggedPass
from model.steps import Steps
from sim.theorems.theorem import Example, drawn, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

Integers = NDArray[np.int64]

LAYERS = 4
"""Layers of the target of all examples."""
VISIBLE = 3
"""Context budget of drafts, of examples without their own."""
EXIT, SHORTEST, LONGEST_OUTPUT = 1, 2, 12
"""Layers that draft or that all tokens run; fewest layers of a schedule, and the tokens over which it falls."""

METHODS: dict[str, tuple[str, Drafter]] = {
    "autoregressive": ("accept", decodings.NONE), "model": ("accept", decodings.MODEL),
    "separate": ("accept", decodings.SEPARATE_MODEL), "pearl": ("accept", decodings.CONCURRENT_MODEL),
    "heads": ("accept", decodings.HEADS), "parallel": ("accept", decodings.PARALLEL),
    "ngram": ("lookup", decodings.NONE),
    "self-speculative": ("accept", decodings.own_layers(EXIT, LAYERS, continues=True)),
    "self-speculative, no reuse": ("accept", decodings.own_layers(EXIT, LAYERS, continues=False)),
    "early exit": ("accept", decodings.NONE), "SkipDecode": ("accept", decodings.NONE),
    "model, budget": ("accept", replace(decodings.MODEL, context_budget=VISIBLE)),
    "self-speculative, budget": (
        "accept", decodings.own_layers(LAYERS, LAYERS, continues=False, context_budget=VISIBLE),
    ),
}  # fmt: skip
"""Outcome and draft passes of the methods that are served."""
BUDGETS: dict[str, tuple[Integers, int]] = {
    "early exit": (np.full(LONGEST_OUTPUT, EXIT), LAYERS),
    "SkipDecode": (
        np.array(skipdecode.schedule(skipdecode.Parameters(LAYERS, SHORTEST, LAYERS, 0, LONGEST_OUTPUT), LONGEST_OUTPUT)), LAYERS
    ),
}  # fmt: skip
"""Layers of the token after each number of generated ones, and all layers."""
UNDRAFTED = ("autoregressive", *BUDGETS)
"""Methods that draft nothing."""
DRAFTED_BY_A_MODEL = ("model", "separate", "heads", "parallel", "model, budget")
WITH_BUDGET = ("model, budget", "self-speculative, budget")
IN_TURN = tuple(method for method, (_, drafter) in METHODS.items() if not drafter.concurrent)
"""Methods that draft and verify in turn."""


# --- Prices ---


@dataclass(frozen=True)
class LinearPrices:
    """Times that grow linearly with everything [s]."""

    step: float = 1.0
    token: float = 0.25
    position: float = 0.0
    prompt_token: float = 0.0
    drafting: float = 0.25
    """A pass of the draft, for any number of sequences."""
    drafting_each: float = 0.0
    drafting_position: float = 0.0
    """Reading of a cached position by a draft pass."""
    rounds: float = 0.0
    """What a pass over drafted tokens takes more."""
    link: float = 0.0
    """A transfer to a draft on a device of its own, and back."""

    def target(self, over: RaggedPass) -> float:
        """Seconds of a pass of the target [s]."""
        found = self.step + self.token * over.tokens + self.position * over.positions + self.prompt_token * over.prompt_tokens
        left_out = sum(each.share * (over.tokens - each.tokens) for each in over.shares)
        return found + self.rounds * over.drafted - self.token * left_out

    def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
        """Seconds of a pass of the draft [s]."""
        reading = self.drafting_position * (positions if read is None else read)
        return self.drafting + self.drafting_each * sequences + reading

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        """Seconds of a pass of a share of the target's layers, within a step [s]."""
        return self.token * share * sequences + self.drafting_position * positions


@dataclass
class ObservedPrices:
    """Prices that note every pass."""

    prices: LinearPrices
    passes: list[RaggedPass] = field(default_factory=list)
    seconds: float = 0.0
    verifying: float = 0.0
    """Seconds of the target's passes."""

    @property
    def link(self) -> float:
        """Seconds of a transfer [s]."""
        return self.prices.link

    def target(self, over: RaggedPass) -> float:
        """Seconds of a pass of the target [s]."""
        self.passes.append(over)
        found = self.prices.target(over)
        self.verifying += found
        return self._noted(found)

    def draft(self, sequences: int, positions: int, read: int | None = None) -> float:
        """Seconds of a pass of the draft [s]."""
        return self._noted(self.prices.draft(sequences, positions, read))

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        """Seconds of a pass of a share of the target's layers, within a step [s]."""
        return self._noted(self.prices.own_layers(share, sequences, positions))

    def _noted(self, seconds: float) -> float:
        self.seconds += seconds
        return seconds


# --- A server that is watched ---


class ObservedPlan(NamedTuple):
    """A plan of the scheduler, with what it had before and after."""

    waiting: list[Waiting]
    before: Integers
    """The table of the running sequences before the plan."""
    plan: Plan
    after: Integers
    free: int
    """Free blocks after it."""


class ObservedScheduler(Scheduler):
    """A scheduler that notes its plans and the tokens of every step."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.plans: list[ObservedPlan] = []
        self.emitted: list[dict[int, int]] = []
        """Tokens of the requests that decoded, by step."""

    def plan(self, limit: int | Integers) -> Plan:
        """See `Scheduler`."""
        waiting, before = [*self.waiting], self.table[:, : self.running].copy()
        found = super().plan(limit)
        self.plans.append(ObservedPlan(waiting, before, found, self.table[:, : self.running].copy(), self.free))
        return found

    def complete(self, plan: Plan, emitted: Integers) -> Integers:
        """See `Scheduler`."""
        self.emitted.append(dict(zip(self.table[REQUEST, plan.decoding].tolist(), emitted.tolist(), strict=True)))
        return super().complete(plan, emitted)


class ObservedRun(Recorder):
    """A run with what its servers had between any two events."""

    def __init__(self, load: Load, servers: Sequence[Server]) -> None:
        super().__init__(load)
        self.servers, self._seen = servers, 0.0
        self.in_system = 0.0
        """Requests in the servers' queues and batches, integrated over time."""
        self.tokens_left = 0.0
        """Tokens that these requests still want before the step that runs ends, integrated over time [tokens x s]."""
        self.step_age = 0.0
        """Time since the beginning of the step that runs, integrated over time; of one server [s^2]."""
        self._begun = 0.0
        self.steps: list[StepRecord] = []
        self.places: list[int] = []
        """Server of each step."""
        self.prices: list[ObservedPrices] = []
        self.outputs: dict[int, list[int]] = {}
        """Tokens of each request; empty if the decodings are arrays."""

    def arrived(self, number: int, now: float) -> None:
        """See `Recorder`."""
        self._until(now, 0, 0)
        super().arrived(number, now)

    def began(self, admitted: list[int], now: float) -> None:
        """See `Recorder`."""
        self._begun = now
        super().began(admitted, now)

    def step(
        self, record: StepRecord, first: list[int], continued: Integers, finished: list[int], now: float, replica: int = 0
    ) -> None:
        """See `Recorder`."""
        self._until(now, len(finished), record.emitted)  # which the server has dropped already
        self.steps.append(record)
        self.places.append(replica)
        super().step(record, first, continued, finished, now, replica)

    def _until(self, now: float, dropped: int, emitted: int) -> None:
        requests, tokens = dropped, emitted
        for server in self.servers:
            scheduler = server.scheduler
            table = scheduler.table[:, : scheduler.running]
            requests += server.load
            tokens += int((table[WANTED] - table[DONE]).sum()) + sum(each.wanted - each.done for each in scheduler.waiting)
        self.in_system += (now - self._seen) * requests
        self.tokens_left += (now - self._seen) * tokens
        if requests:
            self.step_age += ((now - self._begun) ** 2 - (self._seen - self._begun) ** 2) / 2
        self._seen = now

    @property
    def scheduler(self) -> ObservedScheduler:
        """The scheduler of the first server."""
        found = self.servers[0].scheduler
        assert isinstance(found, ObservedScheduler)
        return found

    @property
    def passes(self) -> list[RaggedPass]:
        """Passes of the target of all servers."""
        return [over for each in self.prices for over in each.passes]


# --- Playing an example ---


class GivenOutcomes:
    """Outcomes of the requests of an example."""

    def __init__(self, x: Example) -> None:
        self.outcome, drafter = METHODS[x["method"]]
        self._by_position = drafter.concurrent
        """True if a token is right or wrong wherever its draft starts: drafts continue after tokens that are not verified."""
        self._outputs = [output for *_, output in x["requests"]]
        self._values: list[int] = x["outcomes"]
        self._longest: int = x["draft_length"]

    def of(self, number: int) -> Integers:
        """Outcomes of one request by output position."""
        at = range(number, number + self._outputs[number])
        if self._by_position:
            return np.array([self._right_from(each) for each in at], dtype=np.int64)
        return np.array([self._lookup(each) if self.outcome == "lookup" else self._accepted(each) for each in at], dtype=np.int64)

    def _accepted(self, at: int) -> int:
        return min(self._values[at % len(self._values)], self._longest)

    def _right_from(self, at: int) -> int:
        most = 2 * self._longest
        return next((count for count in range(most) if not self._accepted(at + count)), most)

    def _lookup(self, at: int) -> int:
        pairs = [sorted((self._accepted(first), self._accepted(first + 1)), reverse=True) for first in (at, at + 2)]
        usual, repeating = (LookupDraft(*pair) for pair in pairs)
        return LookupOutcome(usual, repeating).packed


def starter(
    method: str, longest: int, *, cut: bool = False, budget: int = VISIBLE
) -> Callable[[ServerRequest, Any], tuple[Steps, World]]:
    """Start a request's algorithm with its outcomes; `cut`: drafts end with the output, as where nothing else runs. `budget` is
    that of methods that have one."""
    limit = budget if method in WITH_BUDGET else None
    sequences = 1 if cut else 2

    def decode(request: ServerRequest, row: Any) -> tuple[Steps, World]:
        prompt, outcomes = [*range(request.prompt)], row.tolist()
        if method == "autoregressive":
            own = autoregressive.Parameters(layers=LAYERS)
            return autoregressive.decode(own, prompt, request.output), World(request.prompt, LAYERS)
        if method == "early exit":
            exits = early_exit.Parameters(LAYERS, exit_layer=EXIT)
            return early_exit.decode(exits, prompt, request.output), World(request.prompt, LAYERS)
        if method == "SkipDecode":  # its schedule begins after the prompt
            skips = skipdecode.Parameters(LAYERS, SHORTEST, LAYERS, len(prompt), len(prompt) + LONGEST_OUTPUT)
            return skipdecode.decode(skips, prompt, request.output), World(request.prompt, LAYERS)
        if method.startswith("self-speculative"):
            early = self_speculative.Parameters(
                LAYERS, LAYERS if limit else EXIT, longest, reuse=method == "self-speculative", sequences=sequences,
                context_budget=limit,
            )  # fmt: skip
            world = World(request.prompt, LAYERS, drafts={EARLY_LAYERS: DraftOutcomes("target", outcomes)})
            return self_speculative.decode(early, prompt, request.output), world
        if method == "ngram":
            looks_up = ngram.Parameters(LAYERS, max(longest, 1), sequences=sequences)
            return ngram.decode(looks_up, prompt, request.output), World(request.prompt, LAYERS, lookups=outcomes)
        if method == "pearl":
            concurrent = pearl.Parameters(LAYERS, max(longest, 1))
            world = World(request.prompt, LAYERS, drafts={"draft": DraftOutcomes("target", outcomes)})
            return pearl.decode(concurrent, prompt, request.output), world
        drafter = method if method in speculative.DRAFTERS else speculative.MODEL
        placement = SEPARATE if method == "separate" else COLOCATED
        drafts = speculative.Parameters(
            LAYERS, longest, drafter=drafter, placement=placement, sequences=sequences, context_budget=limit
        )
        world = World(request.prompt, LAYERS, drafts={"draft": DraftOutcomes("target", outcomes)})
        return speculative.decode(drafts, prompt, request.output), world

    return decode


def requests_of(x: Example) -> TracedLoad:
    """The load of an example."""
    gaps, prompts, outputs = np.array(x["requests"]).T
    return TracedLoad(TracedRequests(np.cumsum(gaps) / x["per"], prompts, outputs), concurrency=x["clients"])


def settings_of(x: Example) -> ServerSettings:
    """The settings of an example."""
    blocks = None
    if x["spare"] is not None:
        largest = max(prompt + output for _, prompt, output in x["requests"])
        blocks = -(-(largest + (1 + x["lookahead"]) * x["draft_length"]) // x["block"]) + x["spare"]
    kept = None if x.get("share") is None else x.get("budget", VISIBLE)
    return ServerSettings(
        x["seqs"], x["batched"], x["block"], blocks, x.get("chunked", True), lookahead=x["lookahead"],
        scheduler_reserve_full_isl=x.get("reserve", True),
        draft_context_budget=kept, draft_cache_share=(x.get("share") or 0) / 4,
    )  # fmt: skip


def prices_of(x: Example) -> LinearPrices:
    """The prices of an example; those that it leaves out are 0."""
    return LinearPrices(**{each.name: x["prices"].get(each.name, 0) / x["per"] for each in fields(LinearPrices)})


def policy_of(x: Example) -> DraftPolicy:
    """The draft lengths of an example."""
    longest = x["draft_length"]
    return BatchSchedule([(1, 1, longest), (2, 2, longest // 2)]) if x.get("falling") else Static(longest)


def play(
    x: Example, *, events: bool = False, generators: bool = False, replicas: int = 1, router: str = "least-loaded"
) -> ObservedRun:
    """Serve the requests of an example: in a loop or by events, with arrays of outcomes or with the algorithms' generators."""
    from sim.engine import serving  # loads simpy

    load, settings, outcomes = requests_of(x), settings_of(x), GivenOutcomes(x)
    outputs: dict[int, list[int]] = {}
    servers, observed = [], []
    for _ in range(replicas):
        made: Any
        if generators:
            start = starter(x["method"], x["draft_length"], budget=x.get("budget", VISIBLE))
            made = Generators(start, outcomes, outputs.__setitem__)  # type: ignore[arg-type]
        else:
            drafter = METHODS[x["method"]][1] if x["draft_length"] else decodings.NONE
            if x["method"] in WITH_BUDGET:
                drafter = replace(drafter, context_budget=x.get("budget", VISIBLE))
            made = Arrays(outcomes, settings.max_num_seqs, drafter, BUDGETS.get(x["method"]))  # type: ignore[arg-type]
        observed.append(ObservedPrices(prices_of(x)))
        server = Server(settings, policy_of(x), observed[-1], made, load.request)
        server.scheduler = ObservedScheduler(settings)
        servers.append(server)
    run = ObservedRun(load, servers)
    run.prices, run.outputs = observed, outputs
    (serving if events else fast_server).serve(load, servers, run, router=fast_server.ROUTERS[router])
    return run


# --- Examples ---


@drawn
def loads(
    draw: DrawFn, /, methods: Sequence[str] = (*METHODS,), per: int = 4, least_requests: int = 1, most_requests: int = 5,
    most_seqs: int = 4, least_prompt: int = 1, most_prompt: int = 6, most_output: int = 5, longest: int = 3, *,
    clients: bool = True, tight: bool = True, **more: Any,
) -> Example:  # fmt: skip
    """Draw loads and settings; tight caches preempt sequences."""
    count = draw(st.integers(least_requests, most_requests))
    rows = st.tuples(st.integers(0, 6), st.integers(least_prompt, most_prompt), st.integers(1, most_output)).map(list)
    method = draw(st.sampled_from(methods))
    length = 0 if method in UNDRAFTED else draw(st.integers(1, longest))
    example = {
        "requests": draw(st.lists(rows, min_size=count, max_size=count)), "per": per,
        "seqs": draw(st.integers(1, most_seqs)), "batched": draw(st.integers(2, 16)), "block": draw(st.integers(1, 3)),
        "spare": draw(st.sampled_from((None, 0, 1, 3))) if tight else None, "lookahead": draw(st.integers(0, 1)) if tight else 0,
        "reserve": draw(st.booleans()) if tight else True, "clients": draw(st.sampled_from((None, 1, 3))) if clients else None,
        "method": method, "draft_length": length,
        "outcomes": draw(st.lists(st.integers(0, length), min_size=1, max_size=4)) if length else [0],
        "prices": draw(prices()),
    }  # fmt: skip
    return example | {name: draw(strategy) for name, strategy in more.items()}


def prices(**more: SearchStrategy[int]) -> SearchStrategy[Example]:
    """Draw linear prices in parts of a second; they print short without those that are 0."""
    given = {each.name: st.integers(0, 2) for each in fields(LinearPrices)} | {"step": st.integers(1, 6)}
    return _non_zero(given | more)


def constant_prices(**more: SearchStrategy[int]) -> SearchStrategy[Example]:
    """Draw the time of a step, which does not depend on its sequences, and `more` prices."""
    return _non_zero({"step": st.integers(1, 6), **more})


def _non_zero(strategies: dict[str, SearchStrategy[int]]) -> SearchStrategy[Example]:
    return st.fixed_dictionaries(strategies).map(lambda drawn: {name: value for name, value in drawn.items() if value})
