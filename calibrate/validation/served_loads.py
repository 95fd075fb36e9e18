"""Claims of `calibrate report` on servers under load: simulated servers against measured ones.

A cell of a table of concurrencies is simulated as that number of clients, each of which sends its next request when the one before
is finished; a recorded run as a trace, with the times at which its requests were queued. Steps are priced by step laws that are
fitted to other cells, or by the kernels of a bundled profile: no number is fitted to what is predicted. Errors that other projects
publish of their simulators are quoted, with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import special

from calibrate.importers import bundled_profiles
from calibrate.validation import engine_tables
from calibrate.validation.engine_tables import DEEPSEEK, LOSS, MTP_LENGTHS, QWEN, WORST_LOSS, Mask, PredictedTable
from calibrate.validation.validated_claims import RUN, Claim, PredictionErrors, Target, origin, percent
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import engine_priors, law_fit, step_terms
from model.engines.cells import Cells, Floats
from model.engines.kernel_times import KernelSource
from model.engines.step_law import Predictions, StepLaw
from model.methods.rounds.round_laws import Rounds
from model.serving import fast_server
from model.serving.decodings import HEADS, NONE, Arrays
from model.serving.draft_policies import Static
from model.serving.loads import DrawnLoad, Load, RequestLengths, TracedLoad, TracedRequests
from model.serving.records import measures
from model.serving.records.recorder import Recorder
from model.serving.request_outcomes import RequestOutcomes
from model.serving.scheduler import ServerSettings
from model.serving.server import Server
from model.serving.step_prices import LawPrices

MOST_FITTED = 64
"""Largest concurrency that the laws of the first claim are fitted to."""
PER_CLIENT, FEWEST = 8, 40
"""Simulated requests of a cell for each client, and at least."""
DEEPSEEK_LENGTHS = RequestLengths(1024, 1024)
"""Tokens of prompts and outputs in the table of DeepSeek-R1."""
QWEN_OUTPUT, QWEN_PROMPTS = 256, (1, 256, 1024)
"""Tokens of outputs and of prompts that are assumed in turn for Qwen3-235B, whose table does not say them; 1: none is read."""
OWN_SOURCE = "LLMServingSim"
"""Word in the sources of those estimates of vLLM's own times that are from the recorded run itself."""
FITTED = "fitted cells, worst"
TTFT, MEANS = "TTFT p50", ("TTFT mean", "TPOT mean", "latency mean")
"""Headings of the columns."""
PUBLISHED_OF_RUN = {"TTFT p50": 0.008, "TTFT mean": 0.006, "TPOT mean": 0.002, "latency mean": 0.005}
"""Signed errors of LLMServingSim on the recorded run [-]: its bench/examples/RTX4090/Llama-3.1-8B/validation/summary.txt at
5daddb21."""

# --- Simulated servers ---


def acceptance_rates(law: StepLaw, draft_length: int) -> Floats:
    """Conditional acceptance rates by draft position that were fitted with a law; shape (draft_length,) [-]."""
    if not draft_length:
        return np.zeros(0)
    rate, trend = law.coefficients["acceptance_rate"], law.coefficients["acceptance_trend"]
    return np.asarray(special.expit(special.logit(rate) + trend * np.arange(draft_length)))


def served(
    load: Load, settings: ServerSettings, prices: LawPrices, rates: Sequence[float] | Floats = (), *, seed: int = 0
) -> Recorder:
    """Serve a load with a draft of one token for each acceptance rate; without rates, by plain decoding."""
    length = len(rates)
    outcomes = RequestOutcomes(
        Rounds.by_draft_position(rates), "accept", length, lambda number: load.request(number).output, load.count, seed=seed
    )
    decodings = Arrays(outcomes, settings.max_num_seqs, HEADS if length else NONE)
    recorder = Recorder(load)
    fast_server.serve(load, [Server(settings, Static(length), prices, decodings, load.request)], recorder)
    return recorder


def simulated(cells: Cells, law: StepLaw, lengths: RequestLengths) -> Floats:
    """Values of cells, in their unit, of simulated servers whose clients send requests of these lengths; shape (cells,).

    Steps are priced by the law, without its term of prompts: prompts are read in passes, which the law prices.
    """
    name = {"tpot_ms": "mean_tpot_ms"}.get(cells.unit, cells.unit)
    prices, values = LawPrices(law), []
    for sequences, drafted in zip(cells.sequences, cells.draft_length, strict=True):
        clients = int(sequences)
        load = DrawnLoad(lengths, max(FEWEST, PER_CLIENT * clients), concurrency=clients)
        recorder = served(load, ServerSettings(max_num_seqs=clients), prices, acceptance_rates(law, int(drafted)))
        values.append(measures.measured(recorder)[name])
    return np.array(values)


def table_of(cells: Cells, fitted: Mask, values: Floats) -> PredictedTable:
    """A table with these predictions, without intervals."""
    return PredictedTable(cells, fitted, Predictions(values, values, values, np.zeros(cells.size)))


# --- Beyond the fitted concurrencies ---


def law_parts(law: StepLaw, cells: Cells) -> dict[str, Floats]:
    """Milliseconds per token of each term of a law with a fitted acceptance; `pass` is the pass over weights and experts [ms].

    Their sum is what the law predicts in `tpot_ms`.
    """
    of, sequences, drafted = law.coefficients, cells.sequences, cells.draft_length
    length = step_terms.acceptance_length(of["acceptance_rate"], of["acceptance_trend"], drafted)
    seconds = {
        "step": of["step"] * np.ones(cells.size), "sequence": of["sequence"] * sequences,
        "token": of["token"] * sequences * (drafted + 1), "draft_pass": of["draft_pass"] * cells.draft_passes,
        "round": of["round"] * (drafted > 0),
    }  # fmt: skip
    found = {name: 1e3 * each / length for name, each in seconds.items()}
    found["prompt"] = 1e3 * step_terms.prompt_seconds(of, cell_tables.served("tpot_ms", sequences))
    return found | {"pass": law.predict(cells).values - np.sum([*found.values()], axis=0)}


LINEAR = ("sequence", "token", "prompt")
"""Terms of a law that are proportional to the concurrency."""


@dataclass(frozen=True, eq=False)
class _Extrapolated:
    """A law fitted to the cells up to `MOST_FITTED`, and the same cells by a simulated server."""

    law: StepLaw
    by_law: PredictedTable
    by_server: PredictedTable

    @property
    def further(self) -> Cells:
        """The two cells of the largest concurrencies, which were not fitted."""
        cells = self.by_law.cells[~self.by_law.fitted]
        return cells[np.argsort(cells.sequences)[-2:]]

    def rise(self, values: Floats) -> float:
        """Rise of a quantity between these two cells, per client."""
        return float(np.diff(values)[0] / np.diff(self.further.sequences)[0])


def beyond_fitted(plain: Cells, drafted: Callable[[int], Cells]) -> Claim:
    """Times per token beyond the concurrencies that laws are fitted to, in closed form and by simulated servers."""
    cases: list[PredictionErrors] = []
    found: dict[int, _Extrapolated] = {}
    followed = []
    for length in MTP_LENGTHS:
        cells = _joined(plain, drafted(length))
        fitted = cells.sequences <= MOST_FITTED
        law = law_fit.fit(cells[fitted], "table", experts=DEEPSEEK)
        by_law = PredictedTable(cells, fitted, law.predict(cells))
        by_server = table_of(cells, fitted, simulated(cells, law, DEEPSEEK_LENGTHS))
        found[length] = _Extrapolated(law, by_law, by_server)
        for name, table in (("law", by_law), ("simulated server", by_server)):
            each = engine_tables.case(f"{name}, assumed K = {length}", table, 0.05, 0.1)
            columns = each.columns if table is by_law else {}
            cases.append(replace(each, columns={**columns, FITTED: percent(_worst_fitted(table))}))
        every = law_fit.fit(cells, "table", experts=DEEPSEEK).predict(cells).values / cells.values - 1
        followed.append(float(np.abs(every[~fitted]).max()))
    first = found[MTP_LENGTHS[0]]
    predicted = first.by_law.cells[~first.by_law.fitted]
    at = ", ".join(f"{each:g}" for each in predicted.sequences)
    of_law = "; ".join(f"K = {length}: {signed(each.by_law.errors)}" for length, each in found.items())
    of_server = "; ".join(f"K = {length}: {signed(each.by_server.errors)}" for length, each in found.items())
    return Claim(
        "Server: time per token of DeepSeek-R1 in SGLang beyond the concurrencies that a law is fitted to",
        "The table of the claim on the time per token of DeepSeek-R1. For each assumed draft length of MTP, which is not in the "
        f"source, one law is fitted to all cells of plain decoding and MTP up to concurrency {MOST_FITTED}. It predicts those "
        f"of MTP beyond ({at}): in closed form, and as prices of a simulated server with that many clients, prompts and outputs of "
        "1,024 tokens each. Targets are 5 % in the median and 10 % at worst for both. "
        f"{_missed(cases)}",
        f"Extrapolation fails, and the further the worse. Signed errors at {at}: law {of_law}; simulated "
        f"server {of_server}. {_bend(found)} With all cells fitted, which is no prediction, the law is at most "
        f"{percent(max(followed))} off there: its form can follow them, but the cells up to {MOST_FITTED}, where the share of "
        "experts that a step reads still grows, do not tell that growth from the linear one. The simulated server reads prompts "
        "in passes at the price of their arithmetic instead of the law's fitted term `prompt`. Where the fit gives that term "
        "much, the server misses already the cells that were fitted, so that its smaller errors beyond them cancel and are no "
        "merit. It reads prompts in chunks next to decoding, as vLLM does; SGLang reads them in passes of their own.",
        tuple(cases), "published: InferenceX-app at 3a600f1d, fixture of benchmarks",
    )  # fmt: skip


def _joined(*tables: Cells) -> Cells:
    names = [name for name in vars(tables[0]) if name != "unit"]
    return Cells(tables[0].unit, **{name: np.concatenate([getattr(each, name) for each in tables]) for name in names})


def _worst_fitted(table: PredictedTable) -> float:
    return float(np.abs(table.predictions.values / table.cells.values - 1)[table.fitted].max())


def _bend(found: Mapping[int, _Extrapolated]) -> str:
    """Which terms of the laws rise faster than the measured times."""
    first = found[MTP_LENGTHS[0]]
    low, high = first.further.sequences
    rises = []
    for length, each in found.items():
        parts = {name: each.rise(values) for name, values in law_parts(each.law, each.further).items()}
        largest, name = max((parts[name], name) for name in LINEAR)
        linear = sum(parts[name] for name in LINEAR)
        rises.append(f"K = {length}: {sum(parts.values()):.3f}, {linear:.3f}, {largest:.3f} (`{name}`)")
    return (
        f"From {low:g} to {high:g} clients the measured time rises by {first.rise(first.further.values):.3f} ms per client. The "
        "law's time, its terms in proportion to the clients together, and the largest of these rise by, in ms per client: "
        f"{'; '.join(rises)}. So the linear terms are too steep: they alone rise faster than the measured time."
    )


def signed(errors: Floats) -> str:
    """Format errors with their signs.

    >>> signed(np.array([0.05, -0.0001]))
    '+5.0 %, 0.0 %'
    """
    return ", ".join(f"{100 * each:+.1f} %".replace("-0.0", "0.0").replace("+0.0", "0.0") for each in errors)


# --- A table of batches as a closed loop ---


def closed_loop(cells: Cells) -> Claim:
    """Throughputs by draft length and batch as simulated servers with that many clients, next to the law in closed form."""
    fitted = engine_tables.chosen(cells, (1, 4), (1, 8, 64))
    law = law_fit.fit(cells[fitted], "table", experts=QWEN)
    by_law = PredictedTable(cells, fitted, law.predict(cells))
    tables = {"the law in closed form": by_law}
    for prompt in QWEN_PROMPTS:
        values = simulated(cells, law, RequestLengths(prompt, QWEN_OUTPUT))
        tables[f"simulated server, {_prompts(prompt)}"] = table_of(cells, fitted, values)
    cases = [_with_losses(name, table) for name, table in tables.items()]
    without = tables[f"simulated server, {_prompts(1)}"].predictions.values
    bare = replace(law, coefficients={**law.coefficients, "prompt": 0.0}).predict(cells).values
    most = cells.sequences == cells.sequences.max()
    share = float(np.mean(by_law.predictions.values[most] / bare[most]))
    apart = np.abs(without / bare - 1)
    return Claim(
        "Server: throughput of Qwen3-235B in SGLang as a closed loop of clients",
        "The table of the claim on the throughput of Qwen3-235B, and its law of six cells (K = 1, 4 at batch 1, 8, 64). Each cell "
        "is simulated as a server with that many clients, whose prices are the law's. Prompts and outputs are not in the table: "
        f"outputs of {QWEN_OUTPUT} tokens, with prompts of {', '.join(f'{each:,}' for each in QWEN_PROMPTS[1:])} tokens, or none, "
        "are assumed in turn. Targets are those of the law in closed form: 2.5 % in the median, 8 % at worst, and losses of 0.5 % "
        f"(mean) and 2.1 % (worst). {_missed(cases)}",
        "The simulated server is further off than the law, because the law has the time of prompts as a fitted term per generated "
        f"token, which is {percent(1 - share)} of the time at batch {cells.sequences.max():g}, and the server reads prompts whose "
        "lengths are a guess: too fast without prompts, too slow with long ones. Without prompts on both sides they differ by "
        f"{percent(float(np.median(apart)))} in the median and {percent(float(apart.max()))} at worst, by the random draws of the "
        "acceptance and by the ends of outputs.",
        tuple(cases), "published: sgl-project/sglang#22246",
    )  # fmt: skip


def _prompts(tokens: int) -> str:
    return f"prompts of {tokens:,} tokens" if tokens > 1 else "no prompts"


def _with_losses(name: str, table: PredictedTable) -> PredictionErrors:
    """Errors and losses of a table; without intervals, which simulated values do not have."""

    def targets(lost: Mapping[float, float]) -> tuple[Target, ...]:
        return Target("mean loss", float(np.mean([*lost.values()])), 0.005), Target("worst loss", max(lost.values()), 0.021)

    found = engine_tables.case(name, table, 0.025, 0.08, losses=targets)
    return replace(found, columns={heading: found.columns[heading] for heading in (LOSS, WORST_LOSS)})


# --- A recorded run ---


@dataclass(frozen=True, eq=False)
class RequestRun:
    """Requests of a recorded run of an engine, in the order of their arrival.

    Parameters
    ----------
    trace
        Times at which they were queued, from 0 on, and their tokens.
    first, last
        Times of their first and last tokens on the same clock, shape (requests,) [s].
    settings
        Settings of the engine.
    async_scheduling
        Whether the engine schedules a step during the pass before it.
    """

    trace: TracedRequests
    first: Floats
    last: Floats
    settings: ServerSettings
    async_scheduling: bool = False

    @property
    def ttft(self) -> Floats:
        """Time from the queue to the first token, shape (requests,) [s]."""
        return self.first - self.trace.arrivals

    @property
    def tpot(self) -> Floats:
        """Time per token after the first of each request with several, shape (such requests,) [s]."""
        several = self.trace.outputs > 1
        return np.asarray((self.last - self.first)[several] / (self.trace.outputs[several] - 1))

    @property
    def latency(self) -> Floats:
        """Time from the queue to the last token, shape (requests,) [s]."""
        return self.last - self.trace.arrivals

    def replayed(self, law: StepLaw, *, async_scheduling: bool = False) -> RequestRun:
        """The same requests in a simulated server with the same settings, without drafts, with the prices of a law."""
        recorder = served(TracedLoad(self.trace), self.settings, LawPrices(law, async_scheduling=async_scheduling))
        return RequestRun(self.trace, recorder.first, recorder.end, self.settings, async_scheduling)


ASYNC, RESERVE = "async_scheduling", "scheduler_reserve_full_isl"
IN_TURN = "one after the other"
KEYS = ("queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")


def read_run(folder: str | Path) -> RequestRun:
    """Read a run that LLMServingSim recorded, from a folder with `requests.jsonl` and `meta.json`."""
    root = Path(folder)
    try:
        meta = bounded_files.json_of(bounded_files.read_bytes(root / "meta.json"))
        requests = [bounded_files.json_of(line) for line in bounded_files.read_text(root / "requests.jsonl").splitlines()]
        queued, first, last, prompts, outputs = (checks.array(key, [each[key] for each in requests], 0) for key in KEYS)
        engine, cache = meta["engine_kwargs"], meta["kv_cache"]
        scheduler = meta.get("resolved_config", {}).get("scheduler_config", {})
        overlapped = scheduler.get(ASYNC, False)
        checks.flag(ASYNC, overlapped)
        settings = ServerSettings(
            engine["max_num_seqs"], engine["max_num_batched_tokens"], cache["block_size"], cache["num_gpu_blocks"],
            scheduler_reserve_full_isl=scheduler.get(RESERVE, True),
        )  # fmt: skip
        for key, tokens in zip(KEYS[3:], (prompts, outputs), strict=True):
            if np.any((tokens != np.floor(tokens)) | (tokens < 1) | (tokens > checks.MAX_TOKENS)):
                raise ParameterError(f"{key} must be whole numbers from 1 to {checks.MAX_TOKENS}")
        if np.any((first < queued) | (last < first)) or not np.any(outputs > 1):
            raise ParameterError("times of a request must not fall from queued_ts to last_token_ts, and one must have two tokens")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ParameterError(
            f"{root.name}: meta.json must have engine_kwargs and kv_cache, and requests.jsonl {', '.join(KEYS)}: {error!r}; give "
            "the folder of a whole run"
        ) from None
    order, start = np.argsort(queued, kind="stable"), queued.min()
    trace = TracedRequests((queued - start)[order], *(each[order].astype(np.int64) for each in (prompts, outputs)))
    return RequestRun(trace, (first - start)[order], (last - start)[order], settings, overlapped)


def engine_laws(kernels: KernelSource) -> dict[str, StepLaw]:
    """Laws of an engine of which no cell is measured, by name: its kernels alone, and with the prior of vLLM's own times.

    One estimate of that prior is from the recorded run itself; a third law is without it.
    """
    prior = law_fit.fit(None, "prior of vLLM", unit="step_ms", kernels=kernels, engine="vllm", seed=0)
    others = [each.seconds for each in engine_priors.estimates("vllm", "sequence") if OWN_SOURCE not in each.source]
    held_out = {**prior.coefficients, "sequence": math.exp(float(np.mean(np.log(others))))}
    return {
        "kernels alone": law_fit.kernels_only(kernels), "kernels and the prior of vLLM": prior,
        "kernels and the prior of vLLM without this run": replace(prior, coefficients=held_out),
    }  # fmt: skip


def recorded_run(run: RequestRun, laws: Mapping[str, StepLaw], sources: str = "") -> Claim:
    """Times of a recorded run, request by request, against those of simulated servers with the prices of each law."""
    cases, means = [], {}
    for name, law, overlapped in _priced(run, laws):
        other = run.replayed(law, async_scheduling=overlapped)
        means[name] = _overall(other, run)
        columns = {each: signed(np.array([error])) for each, error in means[name].items()}
        errors = other.tpot / run.tpot - 1
        cases.append(
            PredictionErrors(f"TPOT, {name}", errors, _request(run, errors, several=True), 0.1, None, None,
                             (Target(TTFT, abs(means[name][TTFT]), 0.1),), columns)
        )  # fmt: skip
        errors = other.ttft / run.ttft - 1
        cases.append(PredictionErrors(f"TTFT, {name}", errors, _request(run, errors)))
    settings, first = run.settings, next(iter(laws))
    blocks = "as many blocks as needed" if settings.num_blocks is None else f"{settings.num_blocks:,} blocks"
    return Claim(
        "Server: a recorded run of vLLM on an RTX 4090, request by request",
        f"{run.trace.arrivals.size} requests to Llama-3.1-8B in vLLM, recorded by LLMServingSim, the only such run in the data, "
        "are sent to a simulated server at the times at which they were queued. It has the engine's settings "
        f"({settings.max_num_seqs} sequences, {settings.max_num_batched_tokens:,} tokens a pass, {blocks} of "
        f"{settings.block_size} positions), decodes without drafts, and takes the kernels' times from the bundled profile: alone, "
        "and with what published measurements of vLLM say of its own times (`model.engines.engine_priors`). Errors are of each "
        "request's time per token (TPOT) and time to the first token (TTFT); columns are signed errors of the median and of means "
        f"over the requests. Targets are a median of 10 % for TPOT, and 10 % for the median of TTFT. {_missed(cases)} "
        f"{_published(first, means[first])}",
        "LLMServingSim is nearer to this run than the simulated server. The profile alone is already too slow where no sequence "
        "waits (the claim on decoding steps). "
        f"{_overlap(run, means)}"
        "One of the prior's estimates of the time per sequence is from this very run; the case without it shows what that changes. "
        f"The engine admits a request only where the cache has room for its whole prompt (`{RESERVE}`"
        f"{' in its configuration' if run.settings.scheduler_reserve_full_isl else ' is off'}), and so does the simulated server. "
        "All requests arrive within "
        f"{run.trace.arrivals.max():.0f} s and the last ends after {run.last.max():.0f} s: TTFT is mostly time in the queue, and "
        "its error follows that of throughput. One GPU, one model, no drafts: this says nothing of drafts under load.",
        tuple(cases), sources,
    )  # fmt: skip


def _priced(run: RequestRun, laws: Mapping[str, StepLaw]) -> list[tuple[str, StepLaw, bool]]:
    """Laws by name, and whether the engine's own work overlaps with passes: as the run has it, then one after the other."""
    found = []
    for name, law in laws.items():
        overlapped = run.async_scheduling and "step" in law.coefficients and law.cells is None
        found.append((name, law, overlapped))
        if overlapped:
            found.append((f"{name}, {IN_TURN}", law, False))
    return found


def _overlap(run: RequestRun, means: Mapping[str, Mapping[str, float]]) -> str:
    """What it matters that the engine's own work overlaps with passes."""
    apart = [f"{name} {signed(np.array([each[TTFT]]))}" for name, each in means.items() if name.endswith(IN_TURN)]
    if not apart:
        return ""
    return (
        f"The engine schedules asynchronously (`{ASYNC}` in its configuration): what it does for a step and its sequences overlaps "
        "with the pass before, so that a step is as long as the longer of both, here the pass. That it overlaps completely "
        f"is taken from the engine's documentation and not measured. {IN_TURN.capitalize()}, the errors of {TTFT} are: "
        f"{'; '.join(apart)}. "
    )


def _published(name: str, errors: Mapping[str, float]) -> str:
    """Errors that others publish of their simulators, next to those with the prices of this name."""
    ours, theirs = (
        ", ".join(f"{each} {signed(np.array([found[each]]))}" for each in (TTFT, *MEANS)) for found in (errors, PUBLISHED_OF_RUN)
    )
    return (
        f"Published by others: LLMServingSim on this run {theirs} (casys-kaist/LLMServingSim at 5daddb21, "
        f"bench/examples/RTX4090/Llama-3.1-8B/validation/summary.txt); here, {name}: {ours}. On other runs: BLIS 6.7 % for the "
        "mean latency, 17.6 % for the mean TTFT and 7.1 % for the mean time between tokens, medians over 36 runs of vLLM that it "
        "was not fitted to (inference-sim/inference-sim at 2968ed19, docs/blog/posts/how-blis-learns-latency.md); Vidur less than "
        "9 % for latency (arXiv:2405.05465, abstract). All of these are errors of statistics over the requests of a run, in which "
        "errors of single requests cancel."
    )


def _overall(other: RequestRun, run: RequestRun) -> dict[str, float]:
    """Signed errors of the median of TTFT, and of means, over requests [-]."""
    pairs = ((other.ttft, run.ttft), (other.tpot, run.tpot), (other.latency, run.latency))
    means = {name: float(one.mean() / two.mean() - 1) for name, (one, two) in zip(MEANS, pairs, strict=True)}
    return {TTFT: float(np.median(other.ttft) / np.median(run.ttft) - 1), **means}


def _request(run: RequestRun, errors: Floats, *, several: bool = False) -> str:
    """The request with the largest error, counted from 1 in the order of arrival."""
    numbers = np.flatnonzero(run.trace.outputs > 1) if several else np.arange(run.trace.outputs.size)
    return f"request {numbers[int(np.abs(errors).argmax())] + 1}"


# --- All claims ---


def claims(data: str | Path) -> tuple[Claim, ...]:
    """Compute the claims on servers, from a folder that holds `engine`, `gpu` and `SOURCES.md`."""
    root = bundled_profiles.folder_of(data)
    laws = engine_laws(KernelSource("llama-3.1-8b", "rtx-4090"))
    return (
        beyond_fitted(*engine_tables.deepseek_cells(root)), closed_loop(engine_tables.qwen_cells(root)),
        recorded_run(read_run(root / RUN), laws, origin(root, RUN)),
    )  # fmt: skip


def _missed(cases: Sequence[PredictionErrors]) -> str:
    over = [each.name for each in cases if not each.met]
    return f"Missed: {'; '.join(over)}." if over else "All targets are met."
