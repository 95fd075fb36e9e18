"""Servers under load: policies on two clocks, budgets, and laws in the mean; laws of every path are theorems of `serving`."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from model.base.checks import ParameterError
from model.outcomes.lookup_laws import Lookups
from model.outcomes.outcome_laws import Iid
from model.serving import closed_form, decodings, draft_policies, fast_server, loads, request_outcomes
from model.serving.closed_form import ClosedForm, Workload
from model.serving.draft_policies import Adaptive, AdmittedBySurvival, BatchSchedule, DraftPolicy, Goodput, Oracle, Static
from model.serving.loads import DrawnLoad, RequestLengths, TracedLoad, TracedRequests
from model.serving.records import measures, request_batches
from model.serving.records import recorder as records
from model.serving.records.recorder import Recorder
from model.serving.records.request_batches import SummaryRecorder
from model.serving.request_outcomes import RequestOutcomes
from model.serving.scheduler import DONE, Scheduler, ServerSettings
from sim.engine import serving
from sim.theorems.served_examples import METHODS, UNDRAFTED, LinearPrices
from tests.support.serving import Recorded, drawn, served, server, trace
from tests.support.tiers import examples

LONGEST = 3
PRICES = LinearPrices(position=0.0625, prompt_token=0.125, drafting_each=0.125, rounds=0.5)
POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "off": lambda: Static(0), "static": lambda: Static(LONGEST), "vllm": lambda: BatchSchedule([(1, 2, 3), (3, 8, 1)]),
    "sglang": lambda: Adaptive({1: [0, 1, 3], 3: [0, 2]}), "goodput": lambda: Goodput(LONGEST, PRICES, decodings.MODEL),
    "dspark": lambda: AdmittedBySurvival([0.8, 0.7, 0.6], PRICES, decodings.MODEL, 8),
    "oracle": lambda: Oracle(LONGEST, PRICES, decodings.MODEL),
}  # fmt: skip

requests = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=9)
limits = st.builds(
    ServerSettings, max_num_seqs=st.integers(1, 6), max_num_batched_tokens=st.integers(8, 40), block_size=st.integers(1, 5),
    num_blocks=st.none() | st.integers(36, 80), lookahead=st.integers(0, 1),
)  # fmt: skip

tight = st.builds(
    lambda seqs, batched, block, more, ahead: ServerSettings(seqs, batched, block, -(-35 // block) + more, lookahead=ahead),
    st.integers(3, 6), st.integers(24, 64), st.integers(1, 4), st.integers(0, 4), st.integers(0, 1),
)  # fmt: skip
"""Settings whose cache holds the longest request (20 + 9 tokens, and 6 for its draft) and little more."""
crowds = st.lists(st.tuples(st.just(0), st.integers(5, 20), st.integers(4, 9)), min_size=4, max_size=9)
"""Requests that all arrive at once."""


def load_of(rows: list[tuple[int, int, int]], concurrency: int | None = None) -> TracedLoad:
    gaps, prompts, outputs = np.array(rows).T
    return trace(np.cumsum(gaps) / 4, prompts, outputs, concurrency)


def equal(one: Recorder, other: Recorder) -> None:
    for name in ("arrival", "admitted", "first", "end"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert one.totals == other.totals
    # Steps of replicas that end together may be recorded in either order.
    gaps = [each.series.gaps_between(0.0, each.now) for each in (one, other)]
    assert np.array_equal(gaps[0], gaps[1])


# --- Two clocks and two kinds of decodings ---


@pytest.mark.parametrize("method", METHODS)
@given(
    rows=requests | crowds, limits=limits | tight, name=st.sampled_from([*POLICIES]), clients=st.none() | st.integers(1, 5),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=examples(40, 300), deadline=None)
def test_events_of_generators_equal_arrays_step_by_step(
    method: str, rows: list[tuple[int, int, int]], limits: ServerSettings, name: str, clients: int | None, seed: int
) -> None:
    load = load_of(rows, clients)
    name = "off" if method in UNDRAFTED else "static" if (method, name) == ("ngram", "oracle") else name
    law: Any = Lookups.of_rates([0.4, 0.8], 0.6, LONGEST) if method == "ngram" else Iid(0.6)
    outcome, drafter = METHODS[method]
    outcomes = drawn(law, load, LONGEST * (1 + drafter.concurrent), seed, outcome)  # with tokens that wait
    outputs: dict[int, list[int]] = {}
    fast = server(load, POLICIES[name](), PRICES, outcomes, limits, method)
    slow = server(
        load,
        POLICIES[name](),
        PRICES,
        outcomes,
        limits,
        method,
        generators=True,
        finished=lambda n, tokens: outputs.update({n: tokens}),
    )
    equal(served(load, fast), served(load, slow, drive=serving.serve))
    assert fast.scheduler.preemptions == slow.scheduler.preemptions
    # Every request has all of its own output, with any others in its steps.
    for number, (_, prompt, output) in enumerate(rows):
        # (What a few layers predict has a minus in a simulation.)
        assert [*map(abs, outputs[number])] == [*range(prompt, prompt + output)]


# --- Budgets and blocks ---


def test_a_sequence_that_an_earlier_prompt_preempts_does_not_decode_in_that_step() -> None:
    scheduler = Scheduler(ServerSettings(max_num_seqs=2, max_num_batched_tokens=40, num_blocks=7))
    scheduler.enqueue(0, prompt=100, output=2)
    scheduler.enqueue(1, prompt=1, output=30)
    for chunk, decoding in ((40, []), (39, [1]), (21, [])):  # the third chunk needs the blocks of the second sequence
        plan = scheduler.plan(0)
        assert [each.tokens for each in plan.chunks] == [chunk]
        assert plan.decoding.tolist() == decoding
        assert plan.preempted == ([] if chunk > 21 else [1])
        scheduler.complete(plan, np.ones(len(decoding), dtype=np.int64))
    assert (scheduler.running, scheduler.preemptions, scheduler.waiting[0].done) == (1, 1, 1)
    assert scheduler.table[DONE, 0] == 1  # the first token, of the prompt that is read


def test_a_full_cache_preempts_the_last_sequence_which_reads_its_tokens_again() -> None:
    """Two sequences of 4 + 6 tokens and 14 blocks of one position. By hand: both run until their 14 + 2 positions do not fit."""
    load, limits = trace([0.0, 0.0], [4, 4], [6, 6]), ServerSettings(max_num_seqs=2, block_size=1, num_blocks=14)
    one = server(load, Static(0), LinearPrices(), drawn(Iid(0.5), load, 0), limits, "autoregressive")
    found = served(load, one)
    # A step of 8 prompt tokens, then of 2, 2, 2 with 4 + 1, 4 + 2, 4 + 3 positions each; the fourth needs 16 blocks: the second
    # request, which has 8 tokens, waits for the first one's last 2 steps and reads its 8 again.
    assert one.scheduler.preemptions == 1
    assert found.totals.prompt_tokens == 4 + 4 + 8
    assert found.end.tolist() == [1 + 3 * 1.5 + 2 * 1.25, 1 + 3 * 1.5 + 2 * 1.25 + 1 + 1.25]


class _Outputs(Recorder):
    """Keeps the time of each output of each request."""

    def __init__(self, load: Any) -> None:
        super().__init__(load)
        self.outputs: dict[int, list[float]] = {number: [] for number in range(load.count)}

    def step(self, record: Any, first: list[int], continued: Any, finished: list[int], now: float, replica: int = 0) -> None:
        for number in [*first, *continued.tolist()]:
            self.outputs[number].append(now)
        super().step(record, first, continued, finished, now, replica)


@given(rows=requests | crowds, limits=limits | tight, clients=st.none() | st.integers(1, 5), replicas=st.integers(1, 2))
@settings(max_examples=examples(80, 400), deadline=None)
def test_gaps_between_outputs_fill_the_time_from_the_first_to_the_last(
    rows: list[tuple[int, int, int]], limits: ServerSettings, clients: int | None, replicas: int
) -> None:
    load = load_of(rows, clients)
    outcomes, own = drawn(Iid(0.6), load, LONGEST), _Outputs(load)
    fast_server.serve(load, [server(load, Static(LONGEST), PRICES, outcomes, limits) for _ in range(replicas)], own)
    for number, times in own.outputs.items():
        assert (times[0], times[-1]) == (own.first[number], own.end[number])
        assert all(earlier < later for earlier, later in pairwise(times))
        assert len(times) <= rows[number][2]  # at least a token each
    gaps = np.array([gap for times in own.outputs.values() for gap in np.diff(times)])
    assert own.totals.gaps == gaps.size
    assert own.totals.gap_time == pytest.approx((own.end - own.first).sum(), abs=1e-9)
    centres, counts = own.series.gaps_between(0.0, own.now)
    # Bins are .2 % wide: in order, each gap is within .1 % of the centre of its own.
    assert np.repeat(centres, counts) == pytest.approx(np.sort(gaps), rel=0.001001)


def test_a_preemption_is_a_gap() -> None:
    """The sequence that is preempted has its next output only after its tokens have been read again."""
    load = trace([0.0, 0.0], [4, 4], [6, 6])
    own = _Outputs(load)
    limits = ServerSettings(2, 32, block_size=1, num_blocks=14)
    one = server(load, Static(0), LinearPrices(), drawn(Iid(0.6), load, 0), limits, "autoregressive")
    fast_server.serve(load, [one], own)
    assert one.scheduler.preemptions
    assert max(np.diff(own.outputs[1])) > 2 * max(np.diff(own.outputs[0]))


def test_requests_that_could_never_be_served_are_refused() -> None:
    load = trace([0.0], [100], [10])
    few = ServerSettings(num_blocks=6, block_size=16)
    with pytest.raises(ParameterError, match=r"num_blocks must be at least 8 of 16 positions, .* got 6"):
        served(load, server(load, Static(LONGEST), PRICES, Recorded([[0] * 10]), few))
    whole = ServerSettings(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ParameterError, match="max_num_batched_tokens must be at least 110"):
        served(load, server(load, Static(LONGEST), PRICES, Recorded([[0] * 10]), whole))


def test_each_draft_pass_costs_the_sequences_that_draft_in_it() -> None:
    """Drafts of 3 and 1 tokens: a first pass for two sequences, two more for one; 2 + 3 + 1 tokens are verified. By hand."""

    class Uneven(Static):
        BLIND = False

        def limits(self, view: Any) -> Any:
            return np.array([3, 1][: view.sequences])

    load, prices = trace([0.0, 0.0], [1, 1], [9, 9]), LinearPrices(step=1.0, token=0.0625, drafting=0.0, drafting_each=0.25)
    one = server(load, Uneven(3), prices, Recorded([[0] * 9] * 2), ServerSettings())
    one.submit(0)
    one.submit(1)
    assert one.begin() == 1 + 6 * 0.0625 + 0.25 * (2 + 1 + 1)


@pytest.mark.parametrize("generators", [False, True])
def test_policies_are_told_the_accepted_tokens_of_each_sequence(generators: bool) -> None:
    """Two of three drafted tokens are accepted in each round: 3 tokens of 9, then 3, then 3; of 5 tokens 3, then the 2 left."""
    told: list[tuple[list[int], list[int], list[int]]] = []

    class Noting(Static):
        BLIND = False

        def learn(self, rows: Any, drafted: Any, accepted: Any) -> None:
            told.append((rows.tolist(), drafted.tolist(), accepted.tolist()))

        def forget(self, row: int) -> None:
            told.append(([row], [], []))

    load = trace([0.0, 0.0], [1, 1], [9, 5])
    one = server(load, Noting(LONGEST), PRICES, Recorded([[2] * 9] * 2), ServerSettings(), generators=generators)
    served(load, one)
    assert told[:2] == [([0], [], []), ([1], [], [])]
    assert [(rows, accepted) for rows, _, accepted in told[2:]] == [([0, 1], [2, 2]), ([0, 1], [2, 1]), ([0], [2])]
    assert all(each <= LONGEST for _, drafted, _ in told for each in drafted)


# --- Outcomes and arrivals ---


def test_outcomes_of_a_request_are_its_own() -> None:
    """They do not depend on which requests were asked for before, nor on how many there are."""

    def made(count: int) -> RequestOutcomes:
        return RequestOutcomes(Iid(0.6), "accept", 3, lambda number: 40 + number % 7, count, seed=3)

    straight, back, more = made(6000), made(6000), made(9000)
    found = [straight.of(number).tolist() for number in range(6000)]
    for number in reversed(range(0, 6000, 97)):
        assert back.of(number).tolist() == more.of(number).tolist() == found[number]
    first = np.array([row[:40] for row in found])
    # Accepted with .6: 4.5 standard errors of 6000 x 40 draws. Requests are uncorrelated: 4.5 standard errors of 5999 pairs.
    assert abs((first > 0).mean() - 0.6) < 4.5 * np.sqrt(0.24 / first.size)
    assert abs(np.corrcoef(first[:-1, 0] > 0, first[1:, 0] > 0)[0, 1]) < 4.5 / np.sqrt(5999)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 2.0])
def test_gaps_have_their_mean_and_variation(burstiness: float) -> None:
    load = DrawnLoad(RequestLengths(1, 1), 20_000, rate=5.0, burstiness=burstiness)
    gaps = np.diff([load.request(number).arrival for number in range(load.count)])
    assert gaps.mean() == pytest.approx(0.2, abs=1e-12 + 4.5 * burstiness * 0.2 / np.sqrt(gaps.size))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, abs=0.12 * burstiness + 1e-9)


def test_lengths_have_their_mean_and_variation() -> None:
    load = DrawnLoad(RequestLengths(500, 80, 0.5, 0.0), 20_000, rate=5.0)
    prompts = np.array([load.request(number).prompt for number in range(load.count)])
    assert prompts.mean() == pytest.approx(500, abs=4.5 * 250 / np.sqrt(prompts.size))
    assert prompts.std() / prompts.mean() == pytest.approx(0.5, rel=0.05)
    assert {load.request(number).output for number in range(100)} == {80}


# --- Queues whose laws are known ---


def waits(rate: float, outputs: np.ndarray[Any, Any], step: float, seed: int) -> tuple[float, float]:
    """Mean waiting time of a server for one request at a time whose steps are constant, and its standard error."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, outputs.size))
    load = TracedLoad(TracedRequests(arrivals, np.ones(outputs.size, dtype=int), outputs))
    one = ServerSettings(max_num_seqs=1)
    prices = LinearPrices(step=step, token=0.0)
    found = served(load, server(load, Static(0), prices, drawn(Iid(0.5), load, 0), one, "autoregressive"))
    each = (found.admitted - found.arrival)[outputs.size // 10 :]
    batches = each[: each.size // 30 * 30].reshape(30, -1).mean(axis=1)
    return float(each.mean()), float(batches.std(ddof=1) / np.sqrt(30))


@pytest.mark.parametrize("busy", [0.3, 0.7])
@pytest.mark.parametrize("kind", ["M/D/1", "M/G/1"])
def test_waiting_is_that_of_queueing_theory(kind: str, busy: float) -> None:
    """Pollaczek and Khinchine: W = rate E[S^2] / (2 (1 - rate E[S])). Its part that holds on every path is theorem 56b.

    Means of 30 batches of 180 requests, which the queue forgets within about 40: Student's law with 29 degrees of freedom. One seed
    in 100,000 would give a false alarm.
    """
    random = np.random.default_rng(3)
    outputs = np.full(6000, 4) if kind == "M/D/1" else random.integers(1, 8, 6000)
    rate = busy / (outputs.mean() * 0.25)
    service = outputs * 0.25
    expected = rate * float((service**2).mean()) / (2 * (1 - busy))
    found, error = waits(rate, outputs, 0.25, 7)
    assert abs(found - expected) < student.ppf(1 - 0.5e-5, 29) * error


def test_even_arrivals_below_capacity_never_wait() -> None:
    load = DrawnLoad(RequestLengths(1, 4), 50, rate=0.5, burstiness=0.0)
    found = served(
        load, server(load, Static(0), LinearPrices(step=0.25, token=0.0), drawn(Iid(0.5), load, 0), ServerSettings(max_num_seqs=1))
    )
    assert np.allclose(found.admitted, found.arrival)


# --- Closed form ---


@pytest.mark.parametrize("running", [1, 5])
def test_without_random_outcomes_the_closed_form_is_exact(running: int) -> None:
    """Plain decoding of equal requests: every step is the same."""
    load = DrawnLoad(RequestLengths(1, 8), 8 * running, concurrency=running)
    prices = LinearPrices()
    found = served(load, server(load, Static(0), prices, drawn(Iid(0.5), load, 0), ServerSettings()))
    # All requests begin together; a prompt of one token has no pass of its own, so that all 8 tokens are decoded in rounds.
    steady = ClosedForm(prices, 1.0, 0, 0, Workload(1, 8)).at_concurrency(running)
    assert (found.end - found.arrival).tolist() == pytest.approx([steady.e2e_s] * load.count)


@pytest.mark.parametrize(("running", "prompt"), [(1, 1), (8, 1), (32, 64)])
def test_simulations_tend_to_the_closed_form(running: int, prompt: int) -> None:
    load = DrawnLoad(RequestLengths(prompt, 400, 0, 0.4), 30 * running + 60, concurrency=running)
    prices, rate = LinearPrices(step=1.0, token=0.01, drafting=0.05, prompt_token=0.02), 0.7
    found = served(load, server(load, Static(3), prices, drawn(Iid(rate), load, 3), ServerSettings(max_num_batched_tokens=2**16)))
    length = sum(rate**each for each in range(4))
    measured = range(load.count // 5, 4 * load.count // 5)
    took = (found.end - found.arrival)[measured].mean()
    # Of the requests that are measured: drawn outputs alone would move a mean of 54 by 5 %.
    outputs = float(np.mean([load.request(number).output for number in measured]))
    steady = ClosedForm(prices, length, 3, 3, Workload(prompt, outputs)).at_concurrency(running)
    # A round's last tokens may not be wanted (at most 3 of 400), and 2 % of noise: 4 standard errors of about 0.5 %.
    assert took == pytest.approx(steady.e2e_s, rel=0.02)


@given(load=st.floats(0.05, 20))
def test_where_requests_do_not_slow_each_other_their_number_has_a_poisson_law(load: float) -> None:
    form = ClosedForm(LinearPrices(step=1.0, token=0.0), 1.0, 0, 0, Workload(1, 11))  # a step of any number takes the same time
    alone = form.at_concurrency(1).e2e_s
    found = form.under_arrivals(load / alone, 200)
    assert found is not None
    assert found.running == pytest.approx(load, rel=1e-9)
    assert found.e2e_s == pytest.approx(alone, rel=1e-9)


@given(share=st.floats(0.05, 0.98), most=st.integers(1, 40))
def test_where_others_wait_the_running_are_those_of_littles_law(share: float, most: int) -> None:
    """M/G/m: of `most` places, that each take a request for the same time, the share of the offered load is occupied."""
    form = ClosedForm(LinearPrices(step=1.0, token=0.0), 1.0, 0, 0, Workload(1, 11))
    alone = form.at_concurrency(1).e2e_s
    found = form.under_arrivals(share * most / alone, most)
    assert found is not None
    assert found.running == pytest.approx(share * most, rel=1e-9)
    assert found.e2e_s == pytest.approx(alone, rel=1e-9)


@given(share=st.floats(0.05, 0.9))
def test_where_they_share_the_server_their_number_has_a_geometric_law(share: float) -> None:
    form = ClosedForm(LinearPrices(step=0.0, token=1.0), 1.0, 0, 0, Workload(1, 11))  # M/G/1 processor sharing
    alone = form.at_concurrency(1).e2e_s
    found = form.under_arrivals(share / alone, 4000)
    assert found is not None
    assert found.running == pytest.approx(share / (1 - share), rel=1e-3)
    assert form.under_arrivals(1.01 / alone, 4000) is None


@given(rate=st.floats(0.01, 3), most=st.integers(1, 64))
def test_littles_fixed_point_is_one(rate: float, most: int) -> None:
    form = ClosedForm(LinearPrices(), 2.0, 3, 3, Workload(10, 50))
    found = form.under_arrivals(rate, most)
    if found is None:
        assert form.at_concurrency(most).requests_per_s <= rate
    else:
        assert found.running == pytest.approx(rate * found.e2e_s, rel=1e-6)
        assert found.running <= most * (1 + 1e-9)


@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=4), running=st.integers(1, 20), length=st.integers(0, 4))
def test_no_static_draft_is_above_the_bound(rates: list[float], running: int, length: int) -> None:
    work = Workload(1, 100)
    kept = rates[: min(length, len(rates))]
    tokens = 1 + sum(float(np.prod(kept[: each + 1])) for each in range(len(kept)))
    prices = LinearPrices(token=0.1, drafting_each=0.05, rounds=0.3)
    speed = running * tokens / draft_policies.step_seconds(prices, running, 0, len(kept), decodings.MODEL)
    assert speed <= closed_form.bound(prices, rates, running, work, decodings.MODEL) * (1 + 1e-9)


@pytest.mark.parametrize("name", [each for each in POLICIES if each != "oracle"])
def test_no_policy_passes_the_bound(name: str) -> None:
    """With independent outcomes of one rate; noise of tokens per second is below 2 % here."""
    load = DrawnLoad(RequestLengths(1, 300), 120, concurrency=4)
    prices = LinearPrices(step=1.0, token=0.05, drafting=0.2, rounds=0.1)
    policy = {
        "goodput": lambda: Goodput(3, prices, decodings.MODEL),
        "dspark": lambda: AdmittedBySurvival([0.6] * 3, prices, decodings.MODEL, 8),
    }.get(name, POLICIES[name])()
    found = served(load, server(load, policy, prices, drawn(Iid(0.6), load, 3), ServerSettings(max_num_seqs=8)))
    most = closed_form.bound(prices, [0.6] * 3, 4, Workload(1, 300), decodings.MODEL)
    assert found.totals.emitted / found.totals.busy <= 1.02 * most


def test_knowing_the_future_is_never_worse() -> None:
    """At a fixed number of sequences, with the same outcomes; a policy that knows them loses to none that does not."""
    load = DrawnLoad(RequestLengths(1, 200), 60, concurrency=4)
    prices = LinearPrices(step=1.0, token=0.05, drafting=0.05)

    def speed(policy: DraftPolicy) -> float:
        found = served(load, server(load, policy, prices, drawn(Iid(0.6), load, 3), ServerSettings(max_num_seqs=8)))
        return found.totals.emitted / found.totals.busy

    best = max(speed(Static(length)) for length in range(4))
    assert speed(Oracle(3, prices, decodings.MODEL)) > 1.05 * best


def test_switch_off_is_where_the_curves_cross() -> None:
    work, passes = Workload(1, 200), 3
    prices = LinearPrices(step=1.0, token=0.05, drafting=0.1)
    drafting, plain = ClosedForm(prices, 2.0, 3, passes, work), ClosedForm(prices, 1.0, 0, 0, work)
    off = closed_form.switch_off_concurrency(drafting, plain, 64)
    assert off is not None
    speeds = [(drafting.at_concurrency(r).output_tokens_per_s, plain.at_concurrency(r).output_tokens_per_s) for r in (off - 1, off)]
    assert speeds[0][0] > speeds[0][1]
    assert speeds[1][0] <= speeds[1][1]
    # 2 R / (1.3 + .2 R) = R / (1 + .05 R) at R = 7: by hand.
    assert off == 7


# --- Context ---


def test_a_longer_context_may_raise_the_best_draft_length() -> None:
    """Where reading the cache takes the time of a step, more tokens of a sequence share one reading."""
    prices, rate = LinearPrices(step=1.0, token=0.05, position=0.01, drafting=0.3), 0.7

    def best(context: int) -> int:
        speeds = []
        for length in range(5):
            tokens = sum(rate**each for each in range(length + 1))
            speeds.append(ClosedForm(prices, tokens, length, length, Workload(context, 2)).round_seconds(16) / tokens)
        return int(np.argmin(speeds))

    assert best(1000) > best(1)


# --- Memory ---


def _summary(load: Any, rates: tuple[float, ...] = (0.7,)) -> tuple[Recorder, SummaryRecorder]:
    """The same run by a recorder that keeps all times, and by one that keeps batches."""
    made = []
    for recorder in (Recorder(load), SummaryRecorder(load, 20_000.0, 1_500.0)):
        one = server(load, Static(LONGEST), PRICES, drawn(Iid(rates[0]), load, LONGEST), ServerSettings(max_num_seqs=16))
        fast_server.serve(load, [one], recorder)
        made.append(recorder)
    return made[0], made[1]  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [0.02, 0.06, 0.5])
def test_batches_of_requests_have_the_figures_of_all_requests(rate: float) -> None:
    load = DrawnLoad(RequestLengths(30, 12, 0.3, 0.7), 1200, rate)
    kept, summed = _summary(load)
    one, other = measures.measured(kept), measures.measured(summed)
    assert [*one] == [*other]
    # Means are the same; quantiles are those of bins, and not between two requests; the measured time ends with a batch.
    means = [name for name in one if name.startswith("mean_") and name.endswith("ms") and "itl" not in name]
    first, last = measures.window(kept)
    times = {"ttft": kept.first - kept.arrival, "e2e": kept.end - kept.arrival}
    for time, share in itertools.product(times, (50, 90, 99)):
        exact = 1e3 * np.percentile(times[time][first:last], share, method="inverted_cdf")
        assert other.pop(f"p{share}_{time}_ms") == pytest.approx(exact, rel=0.0011)
    for name, value in other.items():
        assert value == pytest.approx(one[name], rel=1e-9 if name in means else 0.03), name
    assert measures.stable(kept) == measures.stable(summed)
    assert measures.within(summed, 20_000.0, 1_500.0) == pytest.approx(measures.within(kept, 20_000.0, 1_500.0), rel=0.01)
    assert kept.totals == summed.totals


def test_memory_does_not_grow_with_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few slices, batches and blocks, so that they are soon full."""
    for module, name in ((records, "SLICES"), (request_batches, "MOST_BATCHES"), (loads, "_KEPT"), (request_outcomes, "_KEPT")):
        monkeypatch.setattr(module, name, 8)
    for module in (records, request_batches):
        monkeypatch.setattr(module, "BIN", 0.1)
    monkeypatch.setattr(loads, "BLOCK", 128)

    def most(count: int) -> int:
        load = DrawnLoad(RequestLengths(8, 2, 0.0, 0.5), count, 0.1)
        one = server(load, Static(0), PRICES, drawn(Iid(0.7), load, 0), ServerSettings(max_num_seqs=16), "autoregressive")
        tracemalloc.start()
        fast_server.serve(load, [one], SummaryRecorder(load))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many = most(3_000), most(12_000)
    assert many < 1.1 * few + 50_000, (few, many)  # positions of blocks of requests: 8 bytes for 128 of them


def test_requests_of_a_load_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    load = DrawnLoad(RequestLengths(100, 20, 0.3, 0.7), 30_000, 2.0)
    numbers = [29_999, 3, 4095, 4096, 12_288, 4097, 0, 29_998]
    asked = {number: load.request(number) for number in numbers}
    again = DrawnLoad(RequestLengths(100, 20, 0.3, 0.7), 30_000, 2.0)
    in_order = {number: again.request(number) for number in range(30_000)}
    assert all(in_order[number] == request for number, request in asked.items())
    arrivals = [each.arrival for each in in_order.values()]
    assert all(earlier <= later for earlier, later in pairwise(arrivals))
    assert sum(load.longest) == max(each.prompt + each.output for each in in_order.values())
