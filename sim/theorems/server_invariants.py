"""Theorems on every step of a server: nothing is lost, no limit is passed, order is kept, and all views of a server agree.

[Little1961] J. D. C. Little. A Proof for the Queuing Formula L = lambda W. Operations Research 9(3), 1961.
"""

from __future__ import annotations

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.serving.fast_server import ROUTERS
from model.serving.scheduler import CACHED, DONE, HELD, LEFT, REQUEST, WANTED
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from sim.theorems.served_examples import (
    DRAFTED_BY_A_MODEL,
    IN_TURN,
    LAYERS,
    UNDRAFTED,
    WITH_BUDGET,
    GivenOutcomes,
    ObservedPlan,
    ObservedRun,
    loads,
    play,
    prices,
    prices_of,
    requests_of,
    settings_of,
    starter,
)
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

theorem = TheoremCollection("serving")


# --- 50: conservation ---


@theorem("50a", "Every request gets exactly its output tokens, in steps that emit at least one token for each decoding sequence; at"
         " the end nothing runs, waits or holds a block.",
         source="conservation", given=loads)
def every_token_is_served(x: Example) -> None:
    run = play(x)
    wanted = {number: output for number, (*_, output) in enumerate(x["requests"])}
    emitted = dict.fromkeys(wanted, 0)
    for planned, step in _steps(run):
        for number, tokens in step.items():
            at_most(f"1, against the tokens of request {number} in a step", 1, tokens)
            emitted[number] += tokens
        for chunk in planned.plan.chunks:
            emitted[int(planned.after[REQUEST, chunk.column])] += chunk.last
    equal("tokens of the requests", emitted, wanted)
    equal("tokens of all steps", run.totals.emitted, sum(wanted.values()))
    scheduler = run.scheduler
    equal("running, waiting, blocks in use", (scheduler.running, len(scheduler.waiting), scheduler.held), (0, 0, 0))
    equal("free rows", sorted(scheduler.free_rows), [*range(x["seqs"])])


@theorem("50b", "Positions of a running sequence that are cached or left to read are those of its prompt and its tokens; it holds"
         " exactly the blocks of the most positions that its passes needed since it was admitted. Those and the free ones are all"
         " blocks. A block beyond the budget of a draft counts without the draft's share of it.",
         source="conservation", given=lambda: loads() | loads(WITH_BUDGET, budget=st.integers(1, 8), share=st.integers(0, 4)))
def blocks_are_those_of_positions(x: Example) -> None:
    run, settings = play(x), settings_of(x)
    held: dict[int, int] = {}
    for planned in run.scheduler.plans:
        plan, after = planned.plan, planned.after
        running = after[REQUEST].tolist()
        for number, left, cached, done in zip(*after[[REQUEST, LEFT, CACHED, DONE]].tolist(), strict=True):
            known = left + cached if left else cached + 1  # the last token is read by the next pass
            equal(f"known positions of request {number}", known, x["requests"][number][1] + done)
        held = {number: held.get(number, 0) for number in running}
        needed = dict.fromkeys(plan.admitted, 1)
        for column, limit in zip(plan.decoding.tolist(), plan.limits.tolist(), strict=True):
            # A verified token has one position, a drafted one `lookahead` more for the drafter.
            needed[running[column]] = int(after[CACHED, column]) + 1 + (1 + settings.lookahead) * limit
        for chunk in plan.chunks:
            needed[running[chunk.column]] = chunk.before + chunk.tokens
        for number, positions in needed.items():
            blocks = -(-positions // settings.block_size)
            # Memory is counted in parts of a block that are whole for every share of quarters.
            beyond = max(blocks - -(-x.get("budget", positions) // settings.block_size), 0)
            held[number] = max(held[number], (4 * blocks - beyond * x.get("share", 0)) * settings.block_units // 4)
        equal("blocks held by each request", dict(zip(running, after[HELD].tolist(), strict=True)), held)
        if settings.num_blocks is not None:
            equal("blocks in use and free", sum(held.values()) + planned.free, settings.num_blocks * settings.block_units)
            at_most("blocks in use", sum(held.values()), settings.num_blocks * settings.block_units)


@theorem("50c", "A server is busy for the sum of its steps, each the sum of its passes and transfers, and exactly while a request"
         " is in it.",
         source="work conservation", given=lambda: loads(IN_TURN))
def busy_while_requests_are_there(x: Example) -> None:
    run = play(x)
    spent = sum(each.seconds for each in run.prices) + _transfers(x, run)
    equal("busy time, against passes and transfers", run.totals.busy, spent)
    inside, covered, since = 0, 0.0, 0.0
    for time, change in sorted([(time, 1) for time in run.arrival.tolist()] + [(time, -1) for time in run.end.tolist()]):
        covered += (time - since) * (inside > 0)
        inside, since = inside + change, time
    equal("busy time, against the time in which requests are there", run.totals.busy, covered)


@theorem("50d", "Tokens of all passes of the target, and one for each prompt that ends, are the output tokens, the drafted tokens"
         " that are rejected or not wanted any more, the prompts, and what preempted sequences read again.",
         source="conservation", given=lambda: loads(("autoregressive", *DRAFTED_BY_A_MODEL), falling=st.booleans()))
def tokens_of_passes(x: Example) -> None:
    run, outcomes = play(x), GivenOutcomes(x)
    of = [outcomes.of(number) for number in range(len(x["requests"]))]
    lost = again = ends = 0
    for planned in run.scheduler.plans:
        table = dict(zip(planned.before[REQUEST].tolist(), planned.before.T.tolist(), strict=True))
        for number in planned.plan.preempted:
            left, cached = table[number][LEFT], table[number][CACHED]
            # Its last token has no row in the cache yet. A prompt of one token is never read as a prompt.
            again += cached if left else cached + 1 if cached else 0
    for planned, step in _steps(run):
        ends += sum(chunk.last for chunk in planned.plan.chunks)
        for column, limit in zip(planned.plan.decoding.tolist(), planned.plan.limits.tolist(), strict=True):
            number, done = int(planned.after[REQUEST, column]), int(planned.after[DONE, column])
            kept = min(int(of[number][done]), limit, x["requests"][number][2] - done - 1)
            lost += limit - kept
            equal(f"tokens of request {number} at {done}", step[number], 1 + kept)
    equal("preemptions", run.scheduler.preemptions, sum(len(each.plan.preempted) for each in run.scheduler.plans))
    prompts = sum(prompt for _, prompt, _ in x["requests"] if prompt > 1)
    outputs = sum(output for *_, output in x["requests"])
    tokens = sum(each.tokens + each.prompt_tokens for each in run.passes)
    equal("tokens of passes and ends of prompts", tokens + ends, outputs + lost + prompts + again)


@theorem("50e", "The target's devices compute for all passes that are theirs, a device of the draft's own for the draft's, never"
         " both at once; in the rest of the steps, accepted tokens go to the draft and drafted ones come back.",
         source="conservation", given=lambda: loads(DRAFTED_BY_A_MODEL, replicas=st.integers(1, 3)))
def each_device_computes_its_passes(x: Example) -> None:
    run, separate = play(x, replicas=x["replicas"]), x["method"] == "separate"
    passes, verifying = sum(each.seconds for each in run.prices), sum(each.verifying for each in run.prices)
    equal("seconds of the target's devices", run.totals.on_target, verifying if separate else passes)
    equal("seconds of the draft's own devices", run.totals.on_draft, passes - verifying if separate else 0.0)
    equal("steps, against both and the transfers", run.totals.busy, run.totals.on_target + run.totals.on_draft + _transfers(x, run))


@theorem("50f", "If drafts are made during the target's pass, a step takes the longer of that pass and of the drafts with two"
         " transfers, and each device computes its own passes.",
         source="Algorithm 2 of PEARL, in a batch",
         given=lambda: loads(("pearl",), falling=st.booleans(), replicas=st.integers(1, 3),
                             prices=prices(drafting=st.integers(1, 2))))  # fmt: skip
def drafts_are_made_meanwhile(x: Example) -> None:
    run, price = play(x, generators=True, replicas=x["replicas"]), prices_of(x)
    for record in run.steps:
        drafting = record.draft_seconds + 2 * price.link
        equal("time of a step that drafts", record.seconds, max(record.target_seconds, drafting if record.draft_seconds else 0.0))
    equal("seconds of the target's devices", run.totals.on_target, sum(each.verifying for each in run.prices))
    passes = sum(each.seconds for each in run.prices)
    equal("seconds of the draft's devices", run.totals.on_draft, passes - run.totals.on_target)


@theorem("50g", "A step that drafts during the target's pass is no longer than one that drafts before it, on the same devices.",
         source="max(a, b) is at most a + b", given=lambda: loads(("pearl",)))
def in_turn_takes_longer(x: Example) -> None:
    price = prices_of(x)
    for record in play(x).steps:
        in_turn = record.target_seconds + record.draft_seconds + 2 * price.link
        at_most("time of a step, against its passes in turn", record.seconds, in_turn)


@theorem("50h", "Requests end no later if drafts are made during the target's pass than if they are made before it.",
         source="false: a rejected draft is completed, and all tokens drafted meanwhile are dropped",
         given=lambda: loads(("separate",), most_requests=1, most_seqs=1, clients=False, tight=False, batched=st.just(16)),
         expect="fails")
def concurrent_is_faster(x: Example) -> None:
    kept = {**x, "outcomes": [int(each > 0) * x["draft_length"] for each in x["outcomes"]]}
    at_most("end with drafts during the passes", float(play({**kept, "method": "pearl"}).end[0]), float(play(kept).end[0]))


# --- 51: Little's law, first come first served ---


@theorem("51a", "Requests in the system, integrated over time, are the sum of the times that they spend there.",
         source="Little's law on every path: [Little1961]", given=lambda: loads(replicas=st.integers(1, 3)))
def littles_law(x: Example) -> None:
    run = play(x, replicas=x["replicas"])
    equal("integral of requests in the system", run.in_system, float((run.end - run.arrival).sum()))


@theorem("51b", "Running sequences, integrated over time, are the times from admission to the end, less those in which a preempted"
         " sequence waits.",
         source="Little's law of the batch: [Little1961]", given=loads)
def littles_law_of_the_batch(x: Example) -> None:
    run = play(x)
    own = float((run.end - run.admitted).sum())
    if run.scheduler.preemptions:
        at_most("integral of running sequences", run.totals.running_time, own)
    else:
        equal("integral of running sequences", run.totals.running_time, own)


@theorem("51c", "Requests are admitted in order of arrival, each before its first token; the queue is in that order in each step,"
         " preempted requests included.",
         source="first come, first served", given=loads)
def first_come_first_served(x: Example) -> None:
    run = play(x)
    first = dict.fromkeys(number for planned in run.scheduler.plans for number in planned.plan.admitted)
    equal("requests in order of their first admission", [*first], [*range(len(x["requests"]))])
    for planned in run.scheduler.plans:
        queue = [each.request for each in planned.waiting]
        equal("requests that wait", queue, sorted(queue))
    for number, times in enumerate(zip(*(each.tolist() for each in (run.arrival, run.admitted, run.first, run.end)), strict=True)):
        equal(f"arrival, admission, first token and end of request {number} in order", [*times], sorted(times))
        at_most(f"admission of request {number}, a step before its first token", times[1] + prices_of(x).step, times[2])
    for earlier, later in zip(run.admitted.tolist(), run.admitted.tolist()[1:], strict=False):
        at_most("admission of a request, against that of the next one", earlier, later)


# --- 52: limits ---


@theorem("52a", "No pass has more than max_num_batched_tokens tokens, no more than max_num_seqs sequences run, none drafts more"
         " than the draft length, and none is past its output.",
         source="settings of the server", given=lambda: loads(batched=st.integers(1, 8), most_requests=7, falling=st.booleans()))
def no_limit_is_passed(x: Example) -> None:
    run = play(x)
    for over in run.passes:
        at_most("tokens of a pass", over.tokens + over.prompt_tokens, x["batched"])
        at_most("drafted tokens of a pass", over.tokens - over.sequences, x["draft_length"] * over.sequences)
    for record in run.steps:
        at_most("running sequences", record.running, x["seqs"])
        at_most("sequences of a pass", record.sequences, record.running)
    for planned in run.scheduler.plans:
        for done, wanted in zip(*planned.after[[DONE, WANTED]].tolist(), strict=True):
            at_most("tokens of a running sequence", done, wanted - 1)


@theorem("52b", "Chunks of a prompt follow each other from its first position to its last; without chunked prefill there is one.",
         source="settings of the server",
         given=lambda: loads(chunked=st.just(True)) | loads(batched=st.integers(11, 16), chunked=st.just(False)))
def chunks_follow_each_other(x: Example) -> None:
    run = play(x)
    read: dict[int, int] = {}
    for planned, _ in _steps(run):
        read = {number: tokens for number, tokens in read.items() if number in planned.after[REQUEST]}
        for chunk in planned.plan.chunks:
            number = int(planned.after[REQUEST, chunk.column])
            left = int(planned.after[LEFT, chunk.column])
            equal(f"first position of a chunk of request {number}", chunk.before, read.get(number, 0))
            equal(f"the prompt of request {number} ends with it", chunk.last, chunk.tokens == left)
            if not x["chunked"]:
                equal(f"tokens of the chunk of request {number}", chunk.tokens, left)
            read[number] = chunk.before + chunk.tokens


@theorem("52c", "No pass leaves tokens of max_num_batched_tokens unused while a running sequence has unread prompt, or a request"
         " waits that max_num_seqs admits, in a cache that suffices.",
         source="work conservation", given=lambda: loads(tight=False, batched=st.integers(1, 12), falling=st.booleans()))
def no_budget_is_left(x: Example) -> None:
    for planned in play(x).scheduler.plans:
        plan, after = planned.plan, planned.after
        unused = x["batched"] - plan.decoding.size - int(plan.limits.sum()) - sum(chunk.tokens for chunk in plan.chunks)
        unread = int(after[LEFT].sum()) - sum(chunk.tokens for chunk in plan.chunks)
        waiting = len(planned.waiting) - len(plan.admitted)
        if unread or (waiting and after.shape[1] < x["seqs"]):
            equal("tokens of a pass that are not used", unused, 0)


@theorem("52d", "A request is admitted where the free blocks hold the first chunk of what it has to read; with"
         " scheduler_reserve_full_isl, where they hold all of it.",
         source="settings of the server", given=lambda: loads(methods=UNDRAFTED, least_requests=2, most_prompt=12))
def prompts_have_room(x: Example) -> None:
    run, block = play(x), x["block"]
    for planned in run.scheduler.plans:
        to_read, free = {each.request: each.prompt for each in planned.waiting}, planned.free
        chunks = {chunk.column: chunk.tokens for chunk in planned.plan.chunks}
        for column in reversed(range(planned.after.shape[1])):
            number, held = planned.after[[REQUEST, HELD], column].tolist()
            if number not in planned.plan.admitted:
                continue
            free += held
            tokens = to_read[number] if x["reserve"] else chunks.get(column, 1)
            at_most(f"blocks that request {number} needs to be admitted", -(-max(tokens, 1) // block), free)


# --- 53: decodings stay what they are alone ---


@theorem("53a", "Each request's tokens are those that its algorithm generates alone, with any others in its steps.",
         source="exactness does not depend on the batch", given=loads)
def tokens_are_those_alone(x: Example) -> None:
    run = play(x, generators=True)
    for number in range(len(x["requests"])):
        equal(f"tokens of request {number}", run.outputs[number], _alone(x, number)[0])


@theorem("53b", "Each round also emits the tokens that it emits alone, after a prompt of one token, where a pass holds all drafts.",
         source="outcomes are those of the request's own positions",
         given=lambda: loads(most_prompt=1, tight=False, batched=st.just(16)))
def rounds_are_those_alone(x: Example) -> None:
    run = play(x, generators=True)
    rounds: dict[int, list[int]] = {}
    for step in run.scheduler.emitted:
        for number, tokens in step.items():
            rounds.setdefault(number, []).append(tokens)
    for number in range(len(x["requests"])):
        equal(f"tokens of the rounds of request {number}", rounds[number], _alone(x, number)[1])


@theorem("53c", "A request that is alone in the server takes the time that its decoding takes on a cluster, to the last bit.",
         source="the server adds nothing",
         given=lambda: loads(
             (*DRAFTED_BY_A_MODEL, "pearl"), most_requests=1, most_seqs=1, most_prompt=1, most_output=8, clients=False, tight=False,
             batched=st.just(16), verify=st.integers(0, 2), link=st.integers(0, 2),
         ))  # fmt: skip
def alone_as_on_a_cluster(x: Example) -> None:
    verify, length = x["verify"] / 4, x["draft_length"]
    # In layer-times, of which a plain pass takes `LAYERS`.
    given = {"step": LAYERS * (1 - verify), "token": LAYERS * verify, "drafting": LAYERS * 0.25, "link": x["link"] / 4}
    run = play({**x, "requests": [[0, *x["requests"][0][1:]]], "prices": {name: 4 * each for name, each in given.items()}},
               events=True, generators=True)  # fmt: skip
    load = requests_of(x)
    steps, world = starter(x["method"], length)(load.request(0), GivenOutcomes(x).of(0))
    curve = tuple((width, 1 - verify + verify * width) for width in range(1, length + 2))
    cost = UnitCost(LAYERS, cost_ratio=0.25, verify_cost=curve, link=x["link"] / 4)
    alone = simulate(steps, load.request(0).output, Cluster(2), cost, world)
    equal("end of the request", float(run.end[0]), alone.latency)
    equal("steps", run.totals.steps, len(alone.commits))


# --- 54: two clocks, two kinds of decodings ---


@theorem("54a", "Events and the loop over step ends give the same times to the last bit, for any replicas and router.",
         source="both are the same sequence of arrivals and step ends",
         given=lambda: st.sampled_from((4, 10)).flatmap(lambda per: loads(
             per=per, most_requests=7, replicas=st.integers(1, 3), router=st.sampled_from([*ROUTERS]),
         )))  # fmt: skip
def events_are_the_loop(x: Example) -> None:
    how = {"replicas": x["replicas"], "router": x["router"]}
    loop, events = play(x, **how), play(x, events=True, **how)
    _same(loop, events)
    equal("servers of steps", events.places, loop.places)


@theorem("54b", "The algorithms' generators and arrays of their outcomes give the same steps and times to the last bit.",
         source="an array holds what the generator would read",
         given=lambda: st.sampled_from((4, 10)).flatmap(lambda per: loads(per=per, falling=st.booleans())))
def generators_are_arrays(x: Example) -> None:
    arrays, generators = play(x), play(x, generators=True)
    _same(arrays, generators)
    equal("tokens of every step", generators.scheduler.emitted, arrays.scheduler.emitted)
    equal("passes", generators.passes, arrays.passes)


@theorem("54c", "A draft budget of at least all positions of a request changes nothing, to the last bit: neither times nor the"
         " memory in use, for any share of the cache that is the draft's.",
         source="no position is beyond it", given=lambda: loads(WITH_BUDGET, share=st.integers(0, 4)))
def a_budget_of_all_positions_changes_nothing(x: Example) -> None:
    every = max(prompt + output + (1 + x["lookahead"]) * x["draft_length"] for _, prompt, output in x["requests"])
    limited, whole = {**x, "budget": every}, {**x, "budget": 1000, "share": None}
    for generators in (False, True):
        _same(play(whole), play(limited, generators=generators))
    if x["method"] == "model, budget":
        _same(play({**whole, "method": "model"}), play(limited))


# --- Helpers ---


def _steps(run: ObservedRun) -> list[tuple[ObservedPlan, dict[int, int]]]:
    """The plan of each step, with the tokens of the requests that decoded; plans that only admit are not steps."""
    acting = [planned for planned in run.scheduler.plans if planned.plan.decoding.size or planned.plan.chunks]
    return [*zip(acting, run.scheduler.emitted, strict=True)]


def _transfers(x: Example, run: ObservedRun) -> float:
    """Seconds of transfers: two in each step that drafts on a device of its own [s]."""
    return 2 * prices_of(x).link * sum(step.drafted > 0 for step in run.steps) if x["method"] == "separate" else 0.0


def _alone(x: Example, number: int) -> tuple[list[int], list[int]]:
    """Tokens of a request that is decoded alone, and of each of its rounds."""
    request = requests_of(x).request(number)
    steps, world = starter(x["method"], x["draft_length"])(request, GivenOutcomes(x).of(number))
    work = interpreter.count(steps, world, request.output)
    return work.tokens, [len(commit.tokens) for commit in work.committed]


def _same(one: ObservedRun, other: ObservedRun) -> None:
    for name in ("arrival", "admitted", "first", "end"):
        equal(f"times of {name}", getattr(other, name).tolist(), getattr(one, name).tolist())
    equal("steps", other.steps, one.steps)
    equal("totals", other.totals, one.totals)


THEOREMS = theorem.all()
