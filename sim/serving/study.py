"""A study of a server under load: each policy of draft length at each load, with intervals, closed forms and a verdict.

Each figure is that of one run with the point estimates; its interval (80 %) is from independent replications, each with its own
requests, its own outcomes, and its own draw of what is uncertain: the coefficients of the step law, and acceptance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from model.advice.acceptance_draws import AcceptanceDraws
from model.architectures.longest_contexts import longest_context
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import devices, memory_limit
from model.methods.rounds import round_laws
from model.outcomes.outcome_laws import Iid
from model.serving import decodings, fast_server
from model.serving.arrivals import drafter_of
from model.serving.closed_form import ClosedForm, Workload
from model.serving.decodings import Drafter
from model.serving.loads import LEAST_SPEED, MOST_SPEED, DrawnLoad, Load, RequestLengths, TracedLoad
from model.serving.records import measures, request_batches
from model.serving.records.recorder import Recorder, TimeSeries
from model.serving.request_outcomes import RequestOutcomes
from model.serving.scheduler import ServerSettings
from model.serving.server import Server
from model.serving.step_prices import LawPrices, OwnLayerPrices
from sim.advice import engine_settings
from sim.advice.engine_settings import Range
from sim.advice.situation import Evidence, Inputs, Situation, situation
from sim.serving import policies, served_methods, server_trace, traces
from sim.serving.draft_placement import ON_THE_TARGET, DraftPlacement
from sim.serving.draft_schedules import ContextRow, ScheduleRow, Schedules, as_ranges
from sim.serving.policies import PolicyName
from sim.serving.served_methods import ServedMethod
from sim.serving.study_results import SPREAD, LoadPoint, ServedPoint, Study, interval, interval_from_zero, speed

RequestProgress = Callable[[int, int, float], None]
"""Called with the requests that are done, their number, and the simulated seconds."""
Recording = TypeVar("Recording", bound=Recorder)
USUAL = RequestLengths(1024, 256)
REQUESTS, LEAST_REQUESTS, PER_CLIENT = 200, 40, 8
"""Requests of a run by default: at least at a rate and with clients, and for each that runs."""
REPLICATIONS = 4
MEMORY_SHARE = 0.9
"""Share of a device's memory that a server uses: `gpu_memory_utilization` of vLLM."""
LONG = 4096
"""Positions over which the cache's bytes are averaged, for models whose layers keep different windows."""
POLICIES = ("off", "static:3", "goodput")
UNLIKE = 0.9
"""Share of the closed form's throughput below which a note says that it leaves something out."""
KEPT = 100_000
"""Most requests of a run whose times are kept one by one; of more, batches are."""
TOLD = 100
"""Requests after which progress is told again."""
@dataclass(frozen=True)
class ServingInputs:
    """What the user said of the load and the server.

    Parameters
    ----------
    said
        Model, devices, engine, draft and acceptance, as for `sim advise`.
    policies
        Names of policies (`sim.serving.policies`).
    rates, concurrencies, trace
        Requests per second; or clients; or a trace, at multiples `rates` of its own speed if they are given.
    lengths
        RequestLengths of requests that are drawn; None: `USUAL`, which is assumed.
    burstiness
        Coefficient of variation of the gaps between arrivals.
    requests, replications, seed
        Requests of a run, further runs for the intervals, and the seed.
    replicas, router
        Servers, and how requests are sent to them.
    max_num_seqs, max_num_batched_tokens, block_size, num_blocks, enable_chunked_prefill, max_model_len
        See `model.serving.scheduler.ServerSettings`; `num_blocks` None: as many as the device's memory holds; `max_model_len`
        None: the context that the model was trained for, where it is known.
    slo_ttft_ms, slo_tpot_ms
        Objectives of a request; None: any.
    placement
        Where the draft runs.
    reserve_prompts
        `scheduler_reserve_full_isl` of `model.serving.scheduler.ServerSettings`.
    async_scheduling
        See `model.serving.step_prices.LawPrices`.
    """

    said: Inputs
    policies: tuple[str, ...] = POLICIES
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    trace: str | Path | None = None
    lengths: RequestLengths | None = None
    burstiness: float = 1.0
    requests: int | None = None
    replications: int = REPLICATIONS
    seed: int = 0
    replicas: int = 1
    router: str = "least-loaded"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_blocks: int | None = None
    enable_chunked_prefill: bool = True
    max_model_len: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    placement: DraftPlacement = ON_THE_TARGET
    reserve_prompts: bool = True
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        if self.rates and self.concurrencies:
            raise ParameterError("a load is a --rate in requests per second or a --concurrency in clients, got both; leave one out")
        if not (self.rates or self.concurrencies or self.trace):
            raise ParameterError(
                "a load is needed, one of: --rate in requests per second, --concurrency in clients, --trace"
            )
        if self.burstiness != 1 and (self.trace or self.concurrencies):
            raise ParameterError(
                f"burstiness is of arrivals at a --rate, got {self.burstiness:g} with a {'trace' if self.trace else 'concurrency'};"
                " leave it out"
            )
        checks.whole("replicas", self.replicas, 1, 1024)
        checks.whole("replications", self.replications, 0, 1000)
        checks.whole("seed", self.seed, 0, 2**63 - 1)
        checks.one_of("router", self.router, fast_server.ROUTERS)
        if not self.policies:
            raise ParameterError("policy must be given at least once")
        if self.requests is not None:
            checks.whole("requests", self.requests, 20, 10_000_000)


class RunOf(NamedTuple):
    """One run of the server: which load, which policy, and replication 0 (the estimates) or a further one (drawn inputs)."""

    load: int
    policy: int
    replication: int


@dataclass(frozen=True, eq=False)
class ServedRun:
    """What a run gave; `series` is kept of replication 0 only."""

    figures: dict[str, float]
    stable: bool
    within_slo: float | None
    series: TimeSeries | None


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """A study that is ready to run: checked inputs, the loads and policies, and what all runs share.

    Its runs (`runs`) are independent of one another, so that any process may do any of them, in any order.
    """

    inputs: ServingInputs
    situation: Situation
    acceptance: AcceptanceDraws
    prices: LawPrices
    settings: ServerSettings
    loads: tuple[LoadPoint, ...]
    policies: tuple[PolicyName, ...]
    lengths: RequestLengths
    workload: Workload
    trace: traces.Trace | None
    passes: Drafter
    """Draft passes of chains; none if no policy drafts any."""
    drafter: Drafter
    """Draft passes of the server's draft."""
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[RunOf]:
        """All runs, in the order of the results."""
        count = 1 + self.inputs.replications
        return [RunOf(*each) for each in itertools.product(range(len(self.loads)), range(len(self.policies)), range(count))]

    def check_requests(self) -> None:
        """Refuse loads with a request that could never be served."""
        for load, replication in itertools.product(self.loads, range(1 + self.inputs.replications)):
            requests = _load(self.inputs, load, self.count(load), self.lengths, self.trace, replication)
            for each in sorted(self.policies, key=lambda policy: -policy.longest):  # which need the most
                try:
                    self.settings_of(each).check_request(*requests.longest, each.longest)
                except ParameterError as error:
                    raise ParameterError(f"{error}{self._where_longest()}") from None

    def _where_longest(self) -> str:
        """The place of the longest request in the trace, in words; nothing without a trace."""
        if self.trace is None:
            return ""
        lengths = self.trace.requests.prompts + self.trace.requests.outputs
        return f" (request {int(lengths.argmax()) + 1} of {self.trace.name})"

    def settings_of(self, policy: PolicyName) -> ServerSettings:
        """Settings of the scheduler: a draft that runs ahead of the verification needs cache for all that it drafts meanwhile."""
        return replace(self.settings, lookahead=1) if policy.concurrent else self.settings

    def requests(self, of: RunOf) -> int:
        """Requests of a run."""
        return self.count(self.loads[of.load]) if self.trace is None else int(self.trace.requests.arrivals.size)

    def named(self, of: RunOf) -> str:
        """Load and policy of a run, as printed text."""
        return f"{self.loads[of.load].text}, {self.policies[of.policy].text}"

    def run(self, of: RunOf, progress: RequestProgress = lambda *_: None) -> ServedRun:
        """Simulate one run; `progress` is called with the requests that are done, their number, and the simulated seconds."""
        inputs, drawn = self.inputs, of.replication > 0

        def recorder_of(load: Load) -> Recorder:
            few = load.count <= KEPT
            return Recorder(load) if few else request_batches.SummaryRecorder(load, inputs.slo_ttft_ms, inputs.slo_tpot_ms)

        recorder = self.recorded(of, recorder_of, progress)
        asked = inputs.slo_ttft_ms is not None or inputs.slo_tpot_ms is not None
        within = measures.within(recorder, inputs.slo_ttft_ms, inputs.slo_tpot_ms) if asked else None
        figures, series = measures.measured(recorder, inputs.replicas), None if drawn else recorder.series
        return ServedRun(figures, measures.stable(recorder), within, series)

    def recorded(
        self, of: RunOf, recorder: Callable[[Load], Recording], progress: RequestProgress = lambda *_: None
    ) -> Recording:
        """Simulate one run, and return its recorder."""
        inputs, policy, drawn = self.inputs, self.policies[of.policy], of.replication > 0
        chosen = (of.replication - 1) % len(self.acceptance.draws)
        rates = self.acceptance.draws[chosen] if drawn else self.acceptance.point
        load = self.loads[of.load]
        requests = _load(inputs, load, self.count(load), self.lengths, self.trace, of.replication)
        servers = servers_of(
            self.settings_of(policy), policy, self.prices.drawn(of.replication - 1) if drawn else self.prices, requests, rates,
            self.drafter, inputs.replicas, inputs.seed, of.replication, self.ranges if policy.text == policies.OWN else (),
            None if self.situation.shape is None else self.situation.shape.layers,
        )  # fmt: skip
        found = recorder(requests)
        said = 0

        def tell(finished: int, now: float) -> None:
            nonlocal said
            if finished >= said + TOLD:
                said = finished
                progress(finished, requests.count, now)

        fast_server.serve(requests, servers, found, router=fast_server.ROUTERS[inputs.router], progress=tell)
        found.totals.preemptions = sum(each.scheduler.preemptions for each in servers)
        return found

    def traced(self) -> dict[str, Any]:
        """A Chrome trace of the run of each policy with the estimates, at the first load."""
        runs = [each for each in self.runs if not each.load and not each.replication]
        return server_trace.chrome_trace({self.named(each): self.recorded(each, server_trace.StepLog) for each in runs})

    @cached_property
    def schedules(self) -> Schedules:
        """Draft lengths by running sequences, in closed form."""
        longest = min(self.acceptance.limit or policies.MOST, policies.MOST) if self.passes is not decodings.NONE else 0
        return Schedules(self.situation.law, self.prices, self.acceptance, self.passes, longest, self.settings)

    def count(self, load: LoadPoint) -> int:
        """Requests of a run: those that were asked for, or enough for a steady state."""
        return self.inputs.requests or self.enough(load)

    def enough(self, load: LoadPoint) -> int:
        """Requests that show a steady state, by the number that would run undrafted."""
        if load.concurrency is not None:
            return max(LEAST_REQUESTS, PER_CLIENT * load.concurrency)
        assert load.rate is not None
        most, servers = self.settings.max_num_seqs, self.inputs.replicas
        steady = self.plain.under_arrivals(load.rate / servers, most)
        return max(REQUESTS, math.ceil(PER_CLIENT * servers * (most if steady is None else steady.running)))

    @cached_property
    def plain(self) -> ClosedForm:
        """Plain decoding in closed form."""
        return ClosedForm(self.prices, 1.0, 0, 0, self.workload)

    @cached_property
    def rows(self) -> tuple[ScheduleRow, ...]:
        """Best draft lengths by running sequences."""
        return self.schedules.rows(self.workload)

    @property
    def ranges(self) -> list[Range]:
        """The same as ranges."""
        return as_ranges(self.rows)

    def by_context(self, progress: Callable[[str], None] = lambda _: None) -> tuple[ContextRow, ...]:
        """Best draft lengths over running sequences and context."""
        return self.schedules.by_context(self.workload.output, progress) if self.schedules.longest else ()

    def study(self, done: Mapping[RunOf, ServedRun], by_context: tuple[ContextRow, ...] = ()) -> Study:
        """The study of all runs."""
        points = []
        for (load, policy), group in itertools.groupby(self.runs, key=lambda each: (each.load, each.policy)):
            first, *others = (done[each] for each in group)
            spread = {}
            if len(others) > 1:
                spread = {name: interval(first.figures[name], [each.figures[name] for each in others]) for name in SPREAD}
            points.append(ServedPoint(
                self.loads[load], self.policies[policy].text, first.figures, spread, first.stable, first.series or TimeSeries(),
                first.within_slo, tuple(speed(self.loads[load], each.figures) for each in (first, *others)),
                interval_from_zero(first.within_slo, [each.within_slo for each in others]),
            ))  # fmt: skip
        unused = "context" if self.schedules.longest else ("context", "acceptance")
        rests = [each for each in self.situation.rests_on if not each.input.startswith(unused)]
        if self.inputs.placement.separate:
            rests = [each for each in rests if each.input != "memory"]  # which has the draft besides the model
            rests += self.inputs.placement.evidence(self.situation)
        rests += _evidence(self.inputs, self.settings, self.workload, self.trace)
        rests += [
            Evidence("rank rates", each.method.about, each.text, "assumed")
            for each in self.policies if isinstance(each.method, served_methods.DraftTrees)
        ]  # fmt: skip
        notes = [*self.notes, *_remarks(self.situation, points, self.inputs.replicas)]
        notes += [*self._per_device(points), *self._short_runs(), *self._unlike_the_closed_form(points)]
        return Study(
            self.inputs.replicas, self.inputs.placement, self.situation, self.settings, tuple(points), self.rows, self.workload,
            tuple(rests), tuple(notes), self.schedules.switch_off(self.workload), by_context, self._bounds(),
        )  # fmt: skip


    def _bounds(self) -> dict[LoadPoint, float]:
        """The bound of each number of clients, over all replicas."""
        found, servers = {}, self.inputs.replicas
        for load in self.loads:
            if load.concurrency is not None and self.schedules.longest:
                running = min(-(-load.concurrency // servers), self.settings.max_num_seqs)
                found[load] = servers * self.schedules.bound(self.workload, running)
        return found

    def _per_device(self, points: Sequence[ServedPoint]) -> Iterator[str]:
        """Tokens per second of each device, where policies take different numbers of them."""
        of, replicas = self.situation, self.inputs.replicas
        for load, group in itertools.groupby(points, key=lambda each: each.load) if self.inputs.placement.separate else ():
            parts = []
            for each in group:
                own = policies.uses_draft(each.policy)
                count = replicas * (of.tensor_parallel + own)
                busy = f", the draft's {each.figures['draft_utilization']:.0%} busy" if own else ""
                parts.append(f"{each.policy} {each.figures['output_tokens_per_s'] / count:,.4g} ({count} GPUs{busy})")
            yield f"tokens/s per GPU at {load.text}: {'; '.join(parts)}"

    def _short_runs(self) -> Iterator[str]:
        """Loads whose requests are too few for a steady state."""
        given = self.inputs.requests
        for load in self.loads if self.trace is None and given is not None else ():
            if (given or 0) < self.enough(load) // 2:
                yield (
                    f"{given} requests at {load.text} are too few for a steady state, in which about"
                    f" {self.enough(load) // PER_CLIENT} run: a queue that grows may not show; leave --requests out"
                )
                return

    def _unlike_the_closed_form(self, points: Sequence[ServedPoint]) -> Iterator[str]:
        """Loads at which requests slow each other down in a way that the closed form leaves out, and so does the schedule."""
        for each in points:
            clients, servers = each.load.concurrency, self.inputs.replicas
            if each.policy != "off" or clients is None or clients < servers:
                continue
            running = min(clients / servers, self.settings.max_num_seqs)
            share = each.figures["output_tokens_per_s"] / (servers * self.plain.at_concurrency(running).output_tokens_per_s)
            if share < UNLIKE:
                yield (
                    f"with {each.load.text} plain decoding is simulated at {share:.2f} of the closed form's tokens per second:"
                    " requests end together, and their prompts wait for each other; outputs of different lengths have less of it"
                )


def plan(inputs: ServingInputs, progress: Callable[[str], None] = lambda _: None) -> StudyPlan:
    """Check the inputs and find what all runs share. Raises ParameterError."""
    notes: list[str] = []
    trace = None if inputs.trace is None else traces.read(inputs.trace, limit=inputs.requests)
    lengths, workload = _lengths(inputs, trace)
    drafting = any(map(policies.uses_acceptance, inputs.policies))
    said = inputs.said
    if not drafting:
        if said.log or said.acceptance is not None or said.acceptance_by_position is not None:
            notes.append("no policy drafts: acceptance has no effect")
        said = replace(said, acceptance=0.0, acceptance_by_position=None)
    _check_budget(inputs)
    context = round(workload.prompt + workload.output)
    if context > checks.MAX_TOKENS:
        raise ParameterError(f"prompt and output must have at most {checks.MAX_TOKENS} tokens together, got {context}")
    of = situation(replace(said, context=context), progress)
    if len(of.cases) > 1:
        raise ParameterError("--acceptance must be one value or one range under load, got several cases; serve them one by one")
    acceptance = of.cases[0]
    chosen = [policies.named(text, acceptance.limit) for text in inputs.policies]
    if len({each.text for each in chosen}) < len(chosen):
        raise ParameterError(f"each policy must be given once, got {', '.join(inputs.policies)}")
    for each in chosen:
        if inputs.max_num_batched_tokens <= each.longest:
            raise ParameterError(
                f"max_num_batched_tokens must be at least {each.longest + 1}, one verification of policy {each.text}, got"
                f" {inputs.max_num_batched_tokens}; raise it, or draft fewer tokens"
            )
        if each.concurrent and not inputs.placement.separate:
            raise ParameterError(
                f"--placement must be separate with policy {each.text}, which drafts during the target's passes, got"
                f" {inputs.placement.placement}; add --placement separate --link TIME"
            )
    if any(each.concurrent for each in chosen) and np.ptp(acceptance.point) > 0:
        notes.append(
            f"{policies.CONCURRENT}: the acceptance of the first drafted token ({acceptance.point[0]:.2g}) is assumed at every"
            " position, as its drafts continue after tokens that are not verified"
        )
    own_device = inputs.placement.device(of)
    drafter = decodings.SEPARATE_MODEL if inputs.placement.separate else drafter_of(of.draft)
    drafter = replace(drafter, context_budget=said.draft_context_budget)
    settings, loads = _settings(inputs, of, notes), _loads(inputs, trace)
    for each in chosen:
        if each.method is not None:  # refused before anything runs
            budget = getattr(each.method, "context_budget", None)
            if budget is not None and settings.max_model_len is not None:
                checks.whole(f"{each.kind}.context_budget", budget, 1, settings.max_model_len, "max_model_len")
            served_methods.served(each.kind, each.method, None if of.shape is None else of.shape.layers, 1, inputs.seed)
    prices = LawPrices(of.law, range(inputs.replications), _logits(of.shape), own_device, inputs.async_scheduling)
    lossy = [each.text for each in chosen if each.kind in served_methods.LOSSY]
    if lossy:
        notes.append(f"lossy: the output of {', '.join(lossy)} differs from the model's; the best policy is one of the others")
    notes += [*of.notes, *(trace.notes if trace is not None else ())]
    made = StudyPlan(
        inputs, of, acceptance, prices, settings, tuple(loads),
        tuple(chosen), lengths, workload, trace, drafter if drafting else decodings.NONE, drafter, tuple(notes),
    )  # fmt: skip
    made.check_requests()
    return made


def _check_budget(inputs: ServingInputs) -> None:
    """Refuse a context budget of the draft's passes where no policy has any, and one beyond the longest requests."""
    budget = inputs.said.draft_context_budget
    if budget is None:
        return
    most = checks.MAX_TOKENS if inputs.max_model_len is None else inputs.max_model_len
    checks.whole("draft_context_budget", budget, 1, most, "" if inputs.max_model_len is None else "max_model_len")
    if not any(map(policies.uses_draft, inputs.policies)):
        raise ParameterError(
            f"draft_context_budget is of passes of the draft, which policies {', '.join(inputs.policies)} do not make, got"
            f" {budget}; leave it out, or add a policy such as static:3"
        )


def serve(inputs: ServingInputs, progress: Callable[[str], None] = lambda _: None, *, by_context: bool = False) -> Study:
    """Simulate each policy at each load; `progress` is called with what is done. Raises ParameterError.

    With `by_context`, best draft lengths are also found over contexts.
    """
    made, done = plan(inputs, progress), {}
    for number, each in enumerate(made.runs, 1):
        name = f"{made.named(each)} (run {number} of {len(made.runs)})"
        progress(name)
        done[each] = made.run(each, _telling(progress, name))
    return made.study(done, made.by_context(progress) if by_context else ())


def _telling(progress: Callable[[str], None], name: str) -> RequestProgress:
    """Tell the progress of a run in words."""
    return lambda finished, count, now: progress(f"{name}: {finished:,} of {count:,} requests, {now:,.0f} s simulated")


def is_bundled_trace(name: str) -> bool:
    """True if a trace is named that comes with the program."""
    return name in traces.BUNDLED


def check_output(output: float) -> None:
    """Refuse outputs of fewer than two tokens on average: the first is that of the prompt's pass, and nothing is drafted."""
    checks.number("output", output, 2, checks.MAX_TOKENS)


def _lengths(inputs: ServingInputs, trace: traces.Trace | None) -> tuple[RequestLengths, Workload]:
    if trace is not None:
        if inputs.lengths is not None:
            raise ParameterError("--prompt and --output are those of the trace; leave them out")
        return USUAL, Workload(float(trace.requests.prompts.mean()), float(trace.requests.outputs.mean()))
    lengths = inputs.lengths or USUAL
    check_output(lengths.output)
    return lengths, Workload(lengths.prompt, lengths.output)


def _loads(inputs: ServingInputs, trace: traces.Trace | None) -> list[LoadPoint]:
    if inputs.concurrencies:
        for number in inputs.concurrencies:
            checks.whole("concurrency", number, 1, 65_536)
        return [LoadPoint(None, number) for number in dict.fromkeys(inputs.concurrencies)]
    for rate in inputs.rates:
        checks.number("rate", rate, 1e-6, 1e6)
    if trace is None:
        return [LoadPoint(rate, None) for rate in dict.fromkeys(inputs.rates)]
    arrivals = trace.requests.arrivals
    if np.isnan(arrivals).any():
        raise ParameterError(f"{trace.name} has no arrivals; give --concurrency, or --rate with --prompt and --output")
    own = (arrivals.size - 1) / float(arrivals[-1]) if arrivals[-1] > 0 else math.nan
    if not inputs.rates:
        if not own > 0:
            raise ParameterError(
                f"{trace.name} has all arrivals at one time, which is no rate; give --concurrency, or --rate with --prompt and"
                " --output"
            )
        return [LoadPoint(own, None)]
    if not own > 0:
        raise ParameterError(f"{trace.name} must have arrivals at more than one time, to be played at another rate")
    for rate in inputs.rates:
        if not LEAST_SPEED <= rate / own <= MOST_SPEED:
            raise ParameterError(
                f"rate must be between {LEAST_SPEED * own:.3g} and {MOST_SPEED * own:.3g} requests per second with {trace.name},"
                f" whose own is {own:.3g}, got {rate:g}"
            )
    return [LoadPoint(rate, None) for rate in dict.fromkeys(inputs.rates)]


def _settings(inputs: ServingInputs, of: Situation, notes: list[str]) -> ServerSettings:
    """Settings of the scheduler, with the blocks that the memory holds, less the weights and the draft if a policy uses it."""
    blocks, draft_share = inputs.num_blocks, 0.0
    draft = of.draft
    if draft is None and of.name is not None and any(map(policies.uses_draft, inputs.policies)):  # a law may name its draft
        head = engine_settings.draft_of(of.law.facts.get("draft", ""))
        draft = None if head is None else memory_limit.of_target(head, of.name)
    if of.shape is not None and of.gpu is not None:
        device = devices.device(of.gpu)
        drafting = None if inputs.placement.separate else memory_limit.draft_shape(draft, of.said.dtype)
        alone, room = (
            memory_limit.memory_of(of.shape, device, context=LONG, sequences=1, tensor_parallel=of.tensor_parallel, draft=each)
            for each in (None, drafting)
        )
        draft_share = 1 - alone.cache / room.cache
    if blocks is None and of.shape is not None and of.gpu is not None:
        free = MEMORY_SHARE * room.available - room.weights
        blocks = int(free / (room.cache / LONG * inputs.block_size))
        if blocks < 1:
            raise ParameterError(
                f"weights ({room.weights / 1e9:.1f} GB) must leave room for a cache in {MEMORY_SHARE:g} of the"
                f" {room.available / 1e9:.1f} GB of {device.name}; take more --tensor-parallel, or weights in fewer bits"
            )
    elif blocks is None:
        notes.append("the size of the cache is not known (no --model, or no --gpu): it is taken as large enough; see --num-blocks")
    own = inputs.placement.blocks(of, MEMORY_SHARE, LONG, inputs.block_size) if inputs.placement.separate else None
    budget = of.said.draft_context_budget
    every = None if budget is None else inputs.max_num_seqs * -(-budget // inputs.block_size)  # of all that run
    if own is not None and blocks is not None and own < (blocks if every is None else min(blocks, every)):
        notes.append(f"the draft's device holds {own:,} blocks of its cache, and the target's {blocks:,}: the fewer limit both")
        blocks = own
    return ServerSettings(
        inputs.max_num_seqs, inputs.max_num_batched_tokens, inputs.block_size, blocks, inputs.enable_chunked_prefill,
        lookahead=0 if inputs.placement.separate else 1,  # a draft's own rows are on its own device
        max_model_len=longest_context(of.name) if inputs.max_model_len is None and of.name else inputs.max_model_len,
        scheduler_reserve_full_isl=inputs.reserve_prompts,
        draft_context_budget=budget, draft_cache_share=0.0 if budget is None else draft_share,
    )


def _load(
    inputs: ServingInputs, load: LoadPoint, count: int, lengths: RequestLengths, trace: traces.Trace | None, replication: int
) -> Load:
    if trace is not None:
        arrivals = trace.requests.arrivals
        if load.concurrency is not None:
            return TracedLoad(trace.requests, concurrency=load.concurrency)
        assert load.rate is not None
        own = (arrivals.size - 1) / float(arrivals[-1]) if arrivals[-1] > 0 else load.rate
        return TracedLoad(trace.requests, load.rate / own if inputs.rates else 1.0)
    return DrawnLoad(lengths, count, load.rate, inputs.burstiness, load.concurrency, inputs.seed, replication)


def _logits(shape: Shape | None) -> float:
    """Share of the logits in the weights that a token uses; 0 for an unknown model."""
    if shape is None:
        return 0.0
    logits = shape.vocabulary * shape.hidden
    return logits / (logits + shape.layers * shape.active_layer_weights)


def servers_of(
    settings: ServerSettings, policy: PolicyName, prices: LawPrices, load: Load, rates: Any, passes: Drafter,
    replicas: int, seed: int, replication: int, ranges: Sequence[Range] = (), depth: int | None = None,
) -> list[Server]:  # fmt: skip
    """Servers of one run, all with the same outcomes of a request."""
    unverified = policy.longest
    if policy.method is not None:
        longest = max(load.request(number).output for number in range(load.count))
        served = served_methods.served(policy.kind, policy.method, depth, longest, seed)
        if served.tree is None:
            passes = served.drafter
    elif policy.concurrent:  # drafts continue after tokens that are not verified, so that they have no positions
        passes, unverified = replace(decodings.CONCURRENT_MODEL, context_budget=passes.context_budget), 2 * policy.longest - 1
        served = ServedMethod(served_methods.ACCEPT, lambda _: Iid(float(rates[0])), passes)
    else:
        law = round_laws.Rounds.by_draft_position(rates[: max(policy.longest, 1)])
        served = ServedMethod(served_methods.ACCEPT, lambda _: law, passes)
    outcomes = RequestOutcomes(
        served.law(replication), served.outcome, unverified, lambda number: load.request(number).output, load.count, seed=seed,
        replication=replication,
    )  # fmt: skip
    passes = passes if policy.longest else decodings.NONE
    drafting = OwnLayerPrices(prices, passes.run / passes.depth, passes.context_budget) if passes.run else prices
    around = policies.Surroundings(drafting, passes, settings.max_num_seqs, rates, ranges)
    return [
        Server(settings, policy.make(around), prices, served.decodings(outcomes, settings.max_num_seqs, passes), load.request)
        for _ in range(replicas)
    ]


def _evidence(
    inputs: ServingInputs, settings: ServerSettings, workload: Workload, trace: traces.Trace | None
) -> Iterator[Evidence]:  # fmt: skip
    about = f"prompts of {workload.prompt:,.0f}, outputs of {workload.output:,.0f} tokens on average"
    if trace is not None:
        yield Evidence("requests", f"{trace.requests.prompts.size:,}; {about}", trace.name, "measured")
    else:
        said = inputs.lengths is not None
        yield Evidence("requests", about, "--prompt, --output" if said else "not said; --prompt and --output set it", "assumed")
    cache = "any number of" if settings.num_blocks is None else f"{settings.num_blocks:,}"
    yield Evidence(
        "server", f"max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens {settings.max_num_batched_tokens},"
        f" {cache} blocks of {settings.block_size}", "vLLM's defaults, unless they were given", "assumed",
    )  # fmt: skip
    yield Evidence("prompts", "take what the arithmetic of their tokens takes", "terms of kernels and weights", "assumed")


def _remarks(of: Situation, points: Sequence[ServedPoint], replicas: int) -> Iterator[str]:
    if any(not each.stable for each in points):
        yield "where the queue grows, times are those of this number of requests, and longer with more of them"
    if of.law.cells is not None:
        longest = float(of.law.cells.draft_length.max())
        beyond = [each.policy for each in points if each.figures["mean_draft_length"] > longest]
        if longest and beyond:
            yield (
                f"{', '.join(dict.fromkeys(beyond))}: drafts are longer than the {longest:g} tokens of the law's cells: times and"
                " acceptance are extrapolated there"
            )
        last = float(of.law.cells.sequences.max())
        if max(each.figures["mean_running"] for each in points) / replicas > last:
            yield f"more sequences run than the {last:g} of the law's cells: its times are extrapolated there"
