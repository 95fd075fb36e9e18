"""Theorems on servers as queues: closed form and recursion of one queue, what may only fall and what may not, with the load.

[Lindley1952] D. V. Lindley. The theory of queues with a single server. Proc. Cambridge Philosophical Society 48(2), 1952.
[Brumelle1971] S. L. Brumelle. On the relation between customer and time averages in queues. J. Applied Probability 8(3), 1971.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from model.serving.closed_form import ClosedForm, Steady, Workload
from sim.theorems.served_examples import WITH_BUDGET, ObservedRun, constant_prices, loads, play, prices, prices_of
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

theorem = TheoremCollection("serving")
_CLOSE = 1e-12


# --- Examples ---


_queue = partial(loads, most_seqs=1, clients=False, tight=False)
"""One sequence at a time, with its own arrivals."""
_several = partial(
    loads, ("autoregressive",), least_prompt=2, clients=False, tight=False, seqs=st.just(3), batched=st.just(16),
)  # fmt: skip
"""Plain decoding of up to three sequences at a time, whose prompts fit one pass."""
_simple_queue = partial(_queue, ("autoregressive",), most_requests=7)


@drawn
def _closed(draw: DrawFn, /, least: int = 2, most: int = 6) -> Example:
    """Draw clients that send equal prompts with outputs of any lengths, whose prompts all fit one pass; plain decoding."""
    running, prompt = draw(st.integers(1, 4)), draw(st.integers(least, most))
    outputs = draw(st.lists(st.integers(1, 6), min_size=running, max_size=10))
    return {
        "requests": [[0, prompt, output] for output in outputs], "per": 4, "seqs": running,
        "batched": running * (prompt + 1), "block": 1, "spare": None, "lookahead": 0, "clients": running,
        "method": "autoregressive", "draft_length": 0, "outcomes": [0],
        "prices": draw(constant_prices(token=st.integers(0, 2), prompt_token=st.integers(0, 2))),
    }  # fmt: skip


@drawn
def _drafts(draw: DrawFn, kind: str) -> Example:
    """Draw prices, survivals of drafted tokens in sixteenths, and two numbers of running sequences.

    `kind` is what is left out: reading of the `cache`; the `shared` time of drafts, that of a pass and of transfers to a device of
    the draft's own; the time of `passes` alone; or nothing.
    """
    survival, longest = 16, draw(st.integers(1, 4))
    survivals = []
    for _ in range(longest):
        survival = draw(st.integers(0, survival))
        survivals.append(survival)
    left_out = draw(st.sampled_from(("cache", "shared"))) if kind == "one" else kind
    return {
        "survival": survivals, "running": sorted((draw(st.integers(1, 16)), draw(st.integers(1, 16)))), "per": 16,
        "context": draw(st.integers(1, 64)),
        "prices": {
            "step": draw(st.integers(1, 32)), "token": draw(st.integers(0, 8)),
            "position": 0 if left_out == "cache" else draw(st.integers(0, 4)),
            "drafting": 0 if left_out in ("shared", "passes") else draw(st.integers(0, 32)),
            "drafting_each": draw(st.integers(0, 4)), "link": 0 if left_out == "shared" else draw(st.integers(0, 16)),
        },
    }  # fmt: skip


# --- 55: the closed form at a fixed concurrency ---


def _closed_form(x: Example) -> tuple[ObservedRun, Steady]:
    outputs = [output for *_, output in x["requests"]]
    form = ClosedForm(prices_of(x), 1.0, 0, 0, Workload(x["requests"][0][1], sum(outputs) / len(outputs)))
    return play(x), form.at_concurrency(x["clients"])


@theorem("55a", "M requests of R clients take M / rate of the closed form, less the price of the M first tokens that are read with"
         " prompts, and at most (R - 1) / R steps per token of the longest output more, while the last ones end.",
         source="plain decoding, a step costs a constant and tokens: tokens are conserved", given=_closed)
def closed_form_of_all_requests(x: Example) -> None:
    run, steady = _closed_form(x)
    price, running, count = prices_of(x), x["clients"], len(x["requests"])
    predicted = count / steady.requests_per_s - price.token * count
    at_most("predicted time of all requests, against the simulated one", predicted, run.now, _CLOSE)
    # From the first step without a request for every client on, each of the others has at most the longest output left.
    longest = max(output for *_, output in x["requests"])
    at_most("time of all requests", run.now, predicted + price.step * (running - 1) * longest / running, _CLOSE)


@theorem("55b", "The mean time of a request is exactly that of the closed form if a step costs a constant. Prices t of a decoded"
         " and p of a prompt token lower it by R t, for first tokens that are read with prompts, and by at most"
         " R^2 (N t + P p) / (4 M) more.",
         source="Little's law: each step that the last requests add is one in which fewer run", given=_closed)
def closed_form_of_a_request(x: Example) -> None:
    run, steady = _closed_form(x)
    price, running, count = prices_of(x), x["clients"], len(x["requests"])
    mean, most = float((run.end - run.arrival).mean()), steady.e2e_s - running * price.token
    if not price.token and not price.prompt_token:
        equal("mean time of a request", mean, most, _CLOSE)
    at_most("mean time of a request", mean, most, _CLOSE)
    # In the last steps r < R run, which saves (R - r) r <= R^2 / 4 times the price of a token; the first of them may read prompts.
    longest, prompt = max(output for *_, output in x["requests"]), x["requests"][0][1]
    saved = running**2 / 4 * (price.token * longest + price.prompt_token * prompt) / count
    at_most("least mean time of a request", most - saved, mean, _CLOSE)


@theorem("55c", "The mean time of requests with prompts of one token is that of the closed form if a step costs a constant.",
         source="false: such a prompt has no pass, and a request that is admitted while others decode waits for the next step",
         given=lambda: _closed(1, 1), expect="fails")
def closed_form_without_prompts(x: Example) -> None:
    run, steady = _closed_form({**x, "prices": {**x["prices"], "token": 0}})
    equal("mean time of a request", float((run.end - run.arrival).mean()), steady.e2e_s, _CLOSE)


# --- 56: one queue ---


def _services(x: Example) -> list[float]:
    """Seconds of each request's passes, one request at a time at a constant step time: chunks of its prompt, then its tokens."""
    step = x["prices"]["step"] / x["per"]
    return [step * (output + (-(-prompt // x["batched"]) - 1 if prompt > 1 else 0)) for _, prompt, output in x["requests"]]


@theorem("56a", "One sequence at a time, with a constant step time, waits W[i+1] = max(0, W[i] + S[i] - gap), and ends S later.",
         source="[Lindley1952]", given=lambda: _simple_queue(prices=constant_prices()))
def waiting_is_lindleys(x: Example) -> None:
    run, waiting, before = play(x), 0.0, 0.0
    for number, ((gap, *_), service) in enumerate(zip(x["requests"], _services(x), strict=True)):
        waiting = max(0.0, waiting + before - gap / x["per"]) if number else 0.0
        equal(f"waiting time of request {number}", float(run.admitted[number] - run.arrival[number]), waiting)
        equal(f"time of request {number}", float(run.end[number] - run.arrival[number]), waiting + service)
        before = service


@theorem("56b", "Unfinished work, integrated over time, is the sum of S (W + S / 2): for Poisson arrivals, which see time averages,"
         " the mean wait is that of Pollaczek and Khinchine.",
         source="[Brumelle1971]", given=lambda: _simple_queue(prices=constant_prices(), most_prompt=1))
def work_in_the_queue(x: Example) -> None:
    run, services = play(x), _services(x)
    waits = (run.admitted - run.arrival).tolist()
    work = x["prices"]["step"] / x["per"] * run.tokens_left - run.step_age
    equal("work over time", work, sum(own * (wait + own / 2) for wait, own in zip(waits, services, strict=True)), _CLOSE)


# --- 57: monotone, and not ---


def _no_end(how: str, run: Any, other: Any) -> None:
    """Require that no request ends later in the first of two lists of times."""
    for number, (sooner, later) in enumerate(zip(run, other, strict=True)):
        at_most(f"end of request {number} {how}", sooner, later)


def _moved(x: Example, at: int, by: int) -> Example:
    """The same requests in the same order, with the arrival of one later or earlier by parts of a second."""
    rows = [[*row] for row in x["requests"]]
    rows[at][0] += by
    if at + 1 < len(rows):
        rows[at + 1][0] -= by
    return {**x, "requests": rows}


@theorem("57a", "One sequence at a time: if a request arrives earlier, but not before the one before it, no request ends later.",
         source="each ends at max(its arrival, the end before it) + its passes", given=lambda: _queue(at=st.integers(0, 4)))
def earlier_arrival(x: Example) -> None:
    at = x["at"] % len(x["requests"])
    _no_end("with an earlier arrival", play(_moved(x, at, -x["requests"][at][0])).end, play(x).end)


@theorem("57b", "One sequence at a time: if a request arrives later, no other request ends later.",
         source="false: what it would have used is lost, and it is served later",
         given=lambda: _queue(at=st.integers(0, 4), later=st.integers(1, 12)), expect="fails")
def later_arrival(x: Example) -> None:
    at, rows = x["at"] % len(x["requests"]), x["requests"]
    arrivals = [sum(gap for gap, *_ in rows[: each + 1]) for each in range(len(rows))]
    arrivals[at] += x["later"]
    order = sorted(range(len(rows)), key=lambda each: (arrivals[each], each))
    gaps = [arrivals[each] - before for each, before in zip(order, [0, *[arrivals[each] for each in order[:-1]]], strict=True)]
    moved = {**x, "requests": [[gap, *rows[each][1:]] for gap, each in zip(gaps, order, strict=True)], "outcomes": [0]}
    ends, moved_ends = play({**x, "outcomes": [0]}).end, play(moved).end
    others = [number for number in range(len(rows)) if number != at]
    for number in others:
        at_most(f"end of request {number} with a later arrival of request {at}", float(moved_ends[order.index(number)]),
                float(ends[number]))  # fmt: skip


def _slower(x: Example) -> Example:
    names = {*x["prices"], *x["slower"]}
    return {**x, "prices": {name: x["prices"].get(name, 0) + x["slower"].get(name, 0) for name in sorted(names)}}


@theorem("57c", "One sequence at a time: where passes take longer, no request ends earlier.",
         source="each ends at max(its arrival, the end before it) + its passes",
         given=lambda: _queue(slower=prices(step=st.integers(0, 2))))
@theorem("57d", "Where passes take longer, no request ends earlier, for several sequences at a time.",
         source="false: an arrival may just reach the beginning of a step",
         given=lambda: _several(slower=constant_prices(step=st.integers(1, 2))), expect="fails")
def slower_passes(x: Example) -> None:
    _no_end("with the faster passes", play(x).end, play(_slower(x)).end)


@theorem("57e", "If prices and gaps between arrivals are k times as long, so are all times: to the last bit where sums are exact.",
         source="a change of the unit of time",
         given=lambda: loads(times=st.sampled_from((2, 3, 8))) | loads(per=10, times=st.sampled_from((2, 8))))
def unit_of_time(x: Example) -> None:
    times = x["times"]
    rows = [[times * gap, *rest] for gap, *rest in x["requests"]]
    one, other = play(x), play({**x, "requests": rows, "prices": {name: times * each for name, each in x["prices"].items()}})
    for name in ("arrival", "admitted", "first", "end"):
        equal(f"times of {name}", getattr(other, name).tolist(), (times * getattr(one, name)).tolist())
    equal("busy time", other.totals.busy, times * one.totals.busy)


@theorem("57f", "One sequence at a time: an additional accepted token ends no request later.",
         source="coupling: a round that begins later never ends earlier",
         given=lambda: _queue(("model", "heads", "parallel"), most_output=8,
                              prices=prices(position=st.just(0), drafting_position=st.just(0)),
                              accepts=st.lists(st.booleans(), min_size=1, max_size=9), at=st.integers(0, 8)))  # fmt: skip
@theorem("57g", "An additional accepted token ends no request later, for several sequences at a time.",
         source="false: a request that ends earlier lets the next prompt into another's steps",
         given=lambda: loads(("model",), least_requests=4, least_prompt=2, longest=1, clients=False, tight=False, seqs=st.just(2),
                             batched=st.just(16), prices=constant_prices(prompt_token=st.integers(1, 6)), at=st.integers(0, 8),
                             accepts=st.lists(st.booleans(), min_size=1, max_size=9)), expect="fails")  # fmt: skip
def one_more_accepted(x: Example) -> None:
    accepts = x["accepts"]
    at = x["at"] % len(accepts)
    more = [*accepts[:at], True, *accepts[at + 1 :]]
    ends = [play({**x, "outcomes": _survivors(each, x["draft_length"])}).end for each in (more, accepts)]
    _no_end("with one more accepted token", *ends)


def _survivors(accepts: list[bool], longest: int) -> list[int]:
    """Accepted tokens of a draft that starts at each position, cyclically."""
    return [next((count for count in range(longest) if not accepts[(at + count) % len(accepts)]), longest)
            for at in range(len(accepts))]  # fmt: skip


@theorem("57h", "One sequence at a time: one more request ends no other request earlier.",
         source="each ends at max(its arrival, the end before it) + its passes",
         given=lambda: _queue(("autoregressive",), at=st.integers(0, 4)))
@theorem("57i", "One more request ends no other request earlier, for several sequences at a time.",
         source="false: it changes when steps begin, which an arrival waits for",
         given=lambda: _several(at=st.integers(0, 4)), expect="fails")
def one_more_request(x: Example) -> None:
    rows = x["requests"]
    at = x["at"] % len(rows)
    fewer = [[*row] for row in rows]
    if at + 1 < len(rows):
        fewer[at + 1][0] += fewer[at][0]
    del fewer[at]
    if not fewer:
        return
    ends = play(x).end.tolist()
    _no_end("without another request", play({**x, "requests": fewer}).end.tolist(), ends[:at] + ends[at + 1 :])


@theorem("57j", "More running sequences never raise the fastest draft length if steps read no cache, or if drafts share no time:"
         " neither that of their passes nor that of transfers.",
         source="single crossing: time per token is (a + b K) / A(K), where load lowers b too, or a alone",
         given=lambda: _drafts("one"))
@theorem("57k", "More running sequences never raise the fastest draft length, at any context.",
         source="false: all tokens of a sequence share the reading of its cache, and all sequences a pass of the draft",
         given=lambda: _drafts(""), expect="fails")
@theorem("57l", "More running sequences never raise the fastest draft length if draft passes share no time, and transfers any.",
         source="false: all sequences share the transfers, and with few of them plain decoding is fastest",
         given=lambda: _drafts("passes"), expect="fails")
def load_lowers_draft_length(x: Example) -> None:
    fewer, more = x["running"]
    at_most(f"fastest draft length of {more} running sequences, against {fewer}", _fastest(x, more), _fastest(x, fewer))


def _fastest(x: Example, running: int) -> int:
    """The shortest of the fastest draft lengths; quotients are compared exactly, in sixteenths."""
    best, best_seconds, best_tokens = 0, 1.0, 0.0
    for length in range(len(x["survival"]) + 1):
        tokens = 1 + sum(x["survival"][:length]) / 16
        seconds = ClosedForm(prices_of(x), tokens, length, length, Workload(x["context"], 2)).round_seconds(running)
        if seconds * best_tokens < best_seconds * tokens:
            best, best_seconds, best_tokens = length, seconds, tokens
    return best


@theorem("57m", "One sequence at a time: a smaller context budget of drafts with the same outcomes ends no request later.",
         source="no pass takes longer, and each request ends at max(its arrival, the end before it) + its passes",
         given=lambda: _queue(WITH_BUDGET, budget=st.integers(2, 8), smaller=st.integers(1, 8)))
def a_smaller_budget(x: Example) -> None:
    smaller = min(x["smaller"], x["budget"])
    _no_end(f"with a budget of {smaller}", play({**x, "budget": smaller}).end, play(x).end)


THEOREMS = theorem.all()
