"""What a user says of model, devices, engine and draft, completed from shapes, profiles, laws and records.

What is unknown is refused with the option that gives it; what is assumed is listed with its source (`Evidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.advice import acceptance_draws, draft_budget, rank_draws
from model.advice.acceptance_draws import AcceptanceDraws
from model.advice.draft_budget import BudgetEffect
from model.advice.rank_draws import RankDraws
from model.architectures import draft_heads, layer_parts, published_shapes
from model.architectures.longest_contexts import longest_context
from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.engines import engine_priors, kernel_times, law_fit, law_report, step_law
from model.engines.cells import Cells, Floats
from model.engines.kernel_times import USUAL_CONTEXT, KernelSource
from model.engines.step_law import StepLaw
from model.hardware import devices, memory_limit
from model.hardware.cost_models import DeviceMemory
from model.logs import acceptance_record
from model.logs.acceptance_record import AcceptanceRecord, ServedSettings
from model.logs.engine_logs import engine_log
from model.methods.speculative import engine_dialects
from model.methods.speculative.theory import reported_acceptance
from sim.advice import engine_settings, option_values, server_settings

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
NO_ENGINE = "none"
"""`engine` without any overhead: kernels only."""
ENGINES = (*engine_priors.ENGINES, NO_ENGINE)
MOST_GPUS = 1024


@dataclass(frozen=True)
class Evidence:
    """An input of the advice: its value, where it comes from, and whether it is measured, published, assumed or a prior."""

    input: str
    value: str
    source: str
    kind: str


@dataclass(frozen=True)
class Inputs:
    """What the user said; see `sim.advise`."""

    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    gpus: int | None = None
    draft: str | None = None
    engine: str = engine_priors.ANY
    engine_law: str | Path | None = None
    log: tuple[str | Path, ...] = ()
    log_draft_length: int | tuple[int, ...] | None = None
    printed_rate: float | None = None
    printed_length: float | None = None
    acceptance: Any = None
    acceptance_by_position: tuple[float, ...] | None = None
    match_rate: Any = None
    batch: tuple[int, ...] | None = None
    draft_length: tuple[int, ...] | None = None
    context: int | None = None
    slo_tpot_ms: float | None = None
    lossy: bool = False
    dtype: str | None = None
    weights: str | None = None
    kernels: str | None = None
    seed: int = 0
    rate: float | None = None
    """Requests per second of all replicas; None: the numbers of running sequences are given."""
    prompt: float | None = None
    output: float | None = None
    """Mean tokens of prompts and outputs, with `rate`."""
    rank_rates: tuple[tuple[float, ...], ...] | None = None
    """Rates by depth and rank of a draft's candidates; a single row holds at every depth."""
    rank_drafts: int | None = None
    """Drafts that `rank_rates` were counted in; None: they are taken as exact."""
    draft_context_budget: int | None = None
    """Largest number of cached positions of each sequence that a pass of the draft reads; None: all."""
    block_acceptance: tuple[float, ...] | None = None
    """Conditional acceptance rates by draft position under block verification."""


@dataclass(frozen=True, eq=False)
class Situation:
    """Everything that the advice is computed from.

    Parameters
    ----------
    said
        The user's inputs.
    name, gpu, draft
        Model, device and draft, by name; None: unknown.
    law
        Step law of one replica.
    cases
        Acceptance of each case; usually one.
    batches, draft_lengths
        Running sequences of one replica; draft lengths above 0.
    tensor_parallel, gpus
        Devices of one replica, and devices altogether.
    capacity
        Largest number of sequences that fit the memory; None: unknown.
    kernels_only
        True if the engine adds nothing to its kernels: neither a law nor a prior was used.
    shape
        Shape of the model; None: unknown.
    match_rates
        Draws of the rate at which an early candidate is the final token; None: unknown.
    served
        What the log says of its server; None: unknown.
    ranks
        Rates by depth and rank of a draft's candidates; None: unknown.
    block_rates
        Conditional acceptance rates by draft position under block verification; None: unknown.
    budget
        Effect of the context budget of drafts; None: they read the whole context.
    rests_on, notes
        Sources of all inputs; remarks.
    """

    said: Inputs
    name: str | None
    gpu: str | None
    draft: str | None
    law: StepLaw
    cases: tuple[AcceptanceDraws, ...]
    batches: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    context: int | None
    tensor_parallel: int
    gpus: int
    capacity: int | None
    kernels_only: bool
    shape: Shape | None = None
    match_rates: Floats | None = None
    served: ServedSettings | None = None
    rests_on: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = field(default=())
    ranks: RankDraws | None = None
    block_rates: tuple[float, ...] | None = None
    budget: BudgetEffect | None = None

    def at(self, context: int | None) -> Situation:
        """The same situation with another context."""
        return replace(self, context=context)

    @property
    def slo(self) -> float | None:
        """Largest time per output token that is wanted [ms]; None: any."""
        return self.said.slo_tpot_ms

    @property
    def context_of_law(self) -> float | None:
        """Context that the law is asked for; None if it does not depend on it."""
        depends = self.law.kernels is not None or "kv_position" in self.law.coefficients
        return float(self.context) if depends and self.context is not None else None


def situation(said: Inputs, progress: Callable[[str], None] = lambda _: None) -> Situation:
    """Complete the user's inputs; `progress` is called with what comes next.

    Raises ParameterError that names the option that is missing or wrong.
    """
    checks.one_of("engine", said.engine, ENGINES)
    checks.whole("seed", said.seed, 0, 2**63 - 1)
    if said.kernels is not None:
        checks.one_of("kernels", said.kernels, kernel_times.SOURCES)
        if said.engine_law is not None:
            raise ParameterError(f"--kernels are those of the --engine-law, got {said.kernels}; leave one out")
    if said.log_draft_length is not None and not said.log and said.printed_rate is None and said.printed_length is None:
        raise ParameterError("--log-draft-length is of a --log, and none is given; leave it out, or give the log")
    record = record_of(said.log, said.log_draft_length)
    given = None if said.engine_law is None else step_law.load(said.engine_law)
    rests: list[Evidence] = []
    notes: list[str] = []
    served = None if record is None else record.served
    server_settings.check_model(said.model, served)
    server_settings.check_draft(said.draft, served)
    if given is not None:
        priced = None if given.kernels is None else given.kernels.draft
        fitted = priced or engine_settings.draft_of(given.facts.get("draft", ""))
        server_settings.check_law(given.shape_name, fitted, served)
    of_log = server_settings.model_of(served) if said.model is None and given is None else None
    name = _agreed("model", said.model or of_log, None if given is None else given.shape_name)
    gpu = _agreed("gpu", said.gpu, None if given is None or given.kernels is None else given.kernels.gpu)
    if name is None and given is None:
        raise ParameterError("--model is required: a name of `sim ls shapes`, or the path of a config.json")
    if gpu is None and given is None:
        raise ParameterError("--gpu is required: a name of `sim ls devices`, or its .toml; or give a fitted --engine-law")
    draft = draft_of(said.draft, given, name)
    if draft is None and given is None:
        draft = server_settings.draft_of(served, name)
    check_budget(said.draft_context_budget, name, draft, given)
    _of_server(served, record, of_log, draft if said.draft is None and given is None else None, rests, notes)
    dtype = said.dtype if given is None or given.kernels is None else given.kernels.dtype
    shape = None if name is None else _shape(name, dtype, said.weights)
    device = None if gpu is None else devices.device(gpu)
    context = _context(said, record, rests)
    check_longest(context, name, shape, draft, notes)
    parallel = _tensor_parallel(said, given, shape, device, context, draft, dtype, notes)
    gpus = parallel if said.gpus is None else said.gpus
    if gpus < parallel:
        raise ParameterError(f"--gpus must be at least {parallel}, the devices of one replica, got {gpus}")
    if gpus % parallel:
        notes.append(f"{gpus % parallel} of {gpus} GPUs are idle: a replica takes {parallel}")
    law, only = given, False
    if law is None:
        assert name is not None
        assert gpu is not None
        source = KernelSource(name, gpu, parallel, said.dtype, draft, said.kernels, said.weights)
        progress("fitting the step law")
        law, only = _law(said, source, record, notes)
    law = with_budget(law, said.draft_context_budget)
    _of_law(law, name, gpu, parallel, said, rests, only, notes)
    if draft is not None and (given is None or given.kernels is not None):
        rests.append(Evidence("draft", draft, f"its shape; kernels as the model's{_drafter(draft)}", "assumed"))
    elif draft is None and given is None:
        notes.append("no draft is named: a pass of it takes the time of a prior, which is wide; --draft narrows the answer")
    ranks = _ranks(said, rests)
    cases = _cases(said, record, law, ranks, rests, notes)
    block = _block_rates(said, cases, rests, notes)
    capacity, whole, kept = None, None, ""
    if shape is not None and device is not None:
        capacity = sequences_that_fit(shape, device, context, parallel, draft, dtype, said.draft_context_budget)
        whole = sequences_that_fit(shape, device, context, parallel, draft, dtype, None)
        if said.draft_context_budget is not None:
            kept = f", {whole:,} if the draft keeps all of them"
        rests.append(Evidence(
            "memory", f"{capacity:,} sequences of {context or USUAL_CONTEXT:,} positions fit{kept}",
            f"{device.name}: {device.source}", "published" if device.published else "assumed",
        ))  # fmt: skip
    batches = _batches(said, capacity, notes)
    budget = draft_budget.effect(law, context or USUAL_CONTEXT, batches, capacity, whole)
    if budget is not None:
        value = f"{budget.positions:,} positions of each sequence; {budget.passes_text}"
        rests.append(Evidence("draft context budget", value, "--draft-context-budget", "assumed"))
        notes.append(
            f"acceptance is taken for drafts that read at most {budget.positions:,} positions: it falls with the budget, so measure"
            " it with one"
        )
    matches = None
    if said.match_rate is not None:
        low, high = option_values.range_of("match_rate", said.match_rate)
        matches = acceptance_draws.match_rates(low, high, seed=said.seed)
        text = f"{low:g}" if high is None else f"{low:g} to {high:g}"
        rests.append(Evidence("match_rate", text, "--match-rate", "assumed"))
    return Situation(
        said, name, gpu, draft, law, cases, batches, _draft_lengths(said, draft, cases, notes), context,
        parallel, gpus, capacity, only, shape, matches, served, tuple(rests), tuple(notes), ranks, block,
        budget,
    )  # fmt: skip


def capacity_at(said: Situation, context: int | None) -> int | None:
    """Largest number of sequences of this context that fit the memory; None: unknown."""
    if said.shape is None or said.gpu is None:
        return None
    dtype = said.said.dtype if said.law.kernels is None else said.law.kernels.dtype
    of = said.shape, devices.device(said.gpu), context, said.tensor_parallel, said.draft, dtype
    return sequences_that_fit(*of, said.said.draft_context_budget)


def sequences_that_fit(
    shape: Shape, device: devices.Device, context: int | None, parallel: int, draft: str | None, dtype: str | None,
    budget: int | None,
) -> int:  # fmt: skip
    """Largest number of sequences whose cache fits the memory, with a draft that keeps at most `budget` positions of each."""
    return memory_limit.largest_batch(
        shape, device, context=context or USUAL_CONTEXT, tensor_parallel=parallel, draft=memory_limit.draft_shape(draft, dtype),
        draft_budget=budget,
    )  # fmt: skip


def check_budget(budget: int | None, name: str | None, draft: str | None, law: StepLaw | None) -> None:
    """Raise ParameterError for a budget of a draft without passes over a context, and for one beyond what the models can read."""
    if budget is None:
        return
    option = "draft_context_budget"
    checks.whole(option, budget, 1, checks.MAX_TOKENS)
    if law is not None and (law.kernels is None or law.kernels.draft is None):
        raise ParameterError(
            f"{option} must be left out with step law {law.name}, whose draft passes take the same time at any context, got"
            f" {budget}; leave it out, or give --model, --gpu and --draft without the law"
        )
    if draft is None:
        raise ParameterError(f"--draft is required with {option}={budget}: a model of `sim ls shapes`, whose passes read less")
    if draft_heads.is_head(draft):
        raise ParameterError(
            f"{option} must be left out with draft {draft}, got {budget}: only passes of a draft model with a cache of its own have"
            " a budget; leave it out, or take a model of `sim ls shapes`"
        )
    for each in (name, draft):
        most = None if each is None else longest_context(each)
        if most is not None and budget > most:
            raise ParameterError(
                f"{option} must be at most {most}, the context of {published_shapes.label(str(each))}, got {budget}; leave it out"
                " for drafts that read the whole context"
            )


def with_budget(law: StepLaw, budget: int | None) -> StepLaw:
    """The law with draft passes that read at most `budget` positions, None: all; its coefficients are those of whole contexts."""
    if budget is None or law.kernels is None:
        return law
    return replace(law, kernels=replace(law.kernels, draft_context_budget=budget))


def _agreed(option: str, said: str | None, of_law: str | None) -> str | None:
    """What the user and the law say, which must not differ."""
    if said is not None and of_law is not None and published_shapes.label(said).lower() != published_shapes.label(of_law).lower():
        raise ParameterError(f"--{option} must be {of_law}, that of the engine law, got {said}; leave it out, or use another law")
    return of_law or said


def _shape(name: str, dtype: str | None, weights: str | None) -> Shape:
    found = published_shapes.whole_model(name, dtype, key="model")
    return found if weights is None else replace(found, weights=None if weights == "none" else layer_parts.quantised(weights))


def record_of(log: Sequence[str | Path], draft_length: int | Sequence[int] | None = None) -> AcceptanceRecord | None:
    """Acceptance record of the logs: of its JSON file, or of the logs themselves; None without logs.

    `draft_length` is that of logs that do not say it: one number, or one for each of them.
    """
    if not log:
        return None
    first = Path(log[0])
    if len(log) == 1 and first.suffix == ".json" and _is_record(first):
        record = acceptance_record.load(first)
        if record.draft_length is not None and draft_length not in (None, record.draft_length):
            raise ParameterError(
                f"--log-draft-length must be {record.draft_length}, that of {first.name}, got {checks.shown(draft_length)};"
                " leave it out"
            )
        if record.draft_length is None and isinstance(draft_length, int):
            checks.whole("log_draft_length", draft_length, 1, acceptance_draws.MOST_POSITIONS)
            return replace(record, draft_length=draft_length)
        return record
    return engine_log.read(log, draft_length=draft_length)


def _of_server(
    served: ServedSettings | None, record: AcceptanceRecord | None, model: str | None, draft: str | None, rests: list[Evidence],
    notes: list[str],
) -> None:  # fmt: skip
    """List what is taken from the settings of a log's server: a model and a draft that the user did not name, the draft length."""
    if served is None or record is None:
        return
    if model is not None:
        rests.append(Evidence("model", f"{model} ({served.model})", server_settings.SOURCE, "measured"))
    names = " ".join(filter(None, (served.method, served.draft)))
    if draft is not None:
        rests.append(Evidence("draft", f"{draft} ({names})", server_settings.SOURCE, "measured"))
    elif names and server_settings.draft_of(served, "") is None:
        notes.append(f"the draft of --log ({names}) is none of `sim ls shapes`: the time of its passes is not known from its size")
    if served.draft_length is not None and record.draft_length == served.draft_length:
        rests.append(Evidence("draft length of the log", f"{served.draft_length}", server_settings.SOURCE, "measured"))


def _is_record(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return acceptance_record.KIND in file.read(2000)
    except OSError:
        return False


def draft_of(asked: str | None, law: StepLaw | None, model: str | None) -> str | None:
    """Draft by name: the one asked for, which must not contradict the law's, or that of the law's kernels; None: not named."""
    of_law = None if law is None or law.kernels is None else law.kernels.draft
    if asked is None:
        return of_law
    if law is not None and of_law is None:
        fitted, kind = engine_settings.draft_of(law.facts.get("draft", "")), asked.partition(":")[0].lower().replace("-", "")
        if fitted is not None and kind != fitted:
            raise ParameterError(
                f"--draft must be that of the engine law ({law.facts['draft']}), whose times it has, got {asked}; leave"
                " it out, or fit a law with that draft"
            )
    if model is None:
        return asked
    found = memory_limit.of_target(asked, model)
    if found == asked and not published_shapes.is_path(found) and ":" not in found and found not in published_shapes.PRESETS:
        heads = ", ".join(draft_heads.ABOUT)
        known = checks.nearest(found, [*draft_heads.ABOUT, *published_shapes.PRESETS])
        raise ParameterError(f"--draft must be a head ({heads}) or a model of `sim ls shapes`, got {checks.shown(found)}; {known}")
    published_shapes.named_shape(found)
    return _agreed("draft", found, of_law)


def engine_of(record: AcceptanceRecord | None) -> str:
    """Engine of a log whose priors are used; those of all engines without a log, or without priors of its engine."""
    if record is None:
        return engine_priors.ANY
    name = {"trtllm": "tensorrt-llm"}.get(record.engine, record.engine)
    return name if name in engine_priors.ENGINES else engine_priors.ANY


def _context(said: Inputs, record: AcceptanceRecord | None, rests: list[Evidence]) -> int | None:
    if said.context is not None:
        checks.whole("context", said.context, 0, checks.MAX_TOKENS)
        rests.append(Evidence("context", f"{said.context:,} positions", "--context", "assumed"))
        return said.context
    known = [cell.context for cell in (record.cells if record is not None else ()) if cell.context is not None]
    if known:
        found = int(np.median(known))
        rests.append(Evidence("context", f"{found:,} positions", "--log", "measured"))
        return found
    rests.append(Evidence("context", f"{USUAL_CONTEXT:,} positions", "not said; --context sets it", "assumed"))
    return USUAL_CONTEXT


def _drafter(draft: str) -> str:
    """How a scenario says that a draft head drafts: a chain of passes, or one pass; empty for other drafts.

    >>> _drafter("eagle3:llama-3.1-8b"), _drafter("llama-3.2-1b")
    ('; drafter = "heads": a pass for each drafted token', '')
    """
    if draft_heads.is_parallel(draft):
        return '; drafter = "parallel": one pass for all drafted tokens'
    return '; drafter = "heads": a pass for each drafted token' if draft_heads.is_head(draft) else ""


def check_longest(
    context: int | None, name: str | None, shape: Shape | None, draft: str | None, notes: list[str], option: str = "--context"
) -> None:
    """Note a context beyond the positions that the model or a draft model was trained for; refuse one beyond a table of positions.

    Rotary positions can be stretched, and checkpoints of one shape differ, so that a larger context may be meant.
    """
    if context is None:
        return
    for role, each in (("", name), ("the draft ", draft)):
        most = None if each is None else longest_context(each)
        if most is not None and most < context and not role and shape is not None and shape.positions:
            raise ParameterError(f"{option} must be at most {most:,}, those of the table of positions of {each}, got {context:,}")
        if most is not None and context > most and not (role and draft_heads.is_head(str(each))):
            notes.append(
                f"a context of {context:,} positions is beyond the {most:,} that {role}{published_shapes.label(str(each))} was"
                " trained for (max_position_embeddings): engines refuse it unless its RoPE scaling is changed, and acceptance may"
                " fall"
            )


def _tensor_parallel(
    said: Inputs, law: StepLaw | None, shape: Shape | None, device: devices.Device | None, context: int | None, draft: str | None,
    dtype: str | None, notes: list[str],
) -> int:  # fmt: skip
    """Devices of a replica: as said, as the law's, or the smallest power of two that the model fits."""
    of_law = None if law is None else law.devices
    if said.tensor_parallel is not None:
        checks.whole("tensor_parallel", said.tensor_parallel, 1, MOST_GPUS)
        if of_law is not None and of_law != said.tensor_parallel:
            raise ParameterError(
                f"--tensor-parallel must be {of_law}, that of the engine law, got {said.tensor_parallel}; leave it out"
            )
    if said.gpus is not None:
        checks.whole("gpus", said.gpus, 1, MOST_GPUS)
    fixed = of_law or said.tensor_parallel
    if shape is None or device is None:
        return fixed or said.gpus or 1
    drafted = memory_limit.draft_shape(draft, dtype)
    number = fixed or 1

    def memory(split: int) -> DeviceMemory:
        return memory_limit.memory_of(
            shape, device, context=context or USUAL_CONTEXT, sequences=1, tensor_parallel=split, draft=drafted,
            draft_budget=said.draft_context_budget,
        )  # fmt: skip

    room = memory(number)
    while fixed is None and room.share > 1 and 2 * number <= (said.gpus or number):
        number *= 2
        room = memory(number)
    if room.share > 1:
        raise ParameterError(
            f"weights and the cache of one sequence must fit {number} x {device.name}: {room.required / 1e9:.1f} GB on each, which"
            f" has {room.available / 1e9:.1f} GB; give more --gpus or --tensor-parallel, --weights in fewer bits, or another --gpu"
        )
    if fixed is None and number > 1:
        notes.append(f"tensor_parallel {number}, the smallest that the model fits, is assumed; --tensor-parallel sets it")
    return number


def _law(said: Inputs, source: KernelSource, record: AcceptanceRecord | None, notes: list[str]) -> tuple[StepLaw, bool]:
    """Step law of the kernels, with the cells of the log or the engine's priors; True if the engine adds nothing."""
    kernel_times.hardware(source)  # refused here, with the reason
    if said.engine == NO_ENGINE:
        if source.draft is None:
            raise ParameterError(
                "--draft is required with --engine none: without an engine's prior, its kernels are the draft's time"
            )
        return law_fit.kernels_only(source), True
    engine = engine_of(record) if said.engine == engine_priors.ANY else said.engine
    cells = None if record is None else _cells(record)
    if cells is None:
        return law_fit.fit(None, f"prior of {engine}", unit="step_ms", kernels=source, engine=engine, seed=said.seed), False
    acceptance = record.known_rates if record is not None else ()
    longest = int(cells.draft_length.max())
    known = acceptance if len(acceptance) >= longest else ()
    law = law_fit.fit(cells, "of the log", kernels=source, engine=engine, seed=said.seed, acceptance=known)
    notes.append(f"the step law is fitted to {cells.size} cells of the log; `calibrate engine fit` shows its terms")
    return law, False


def _cells(record: AcceptanceRecord) -> Cells | None:
    """Cells of a record in its most frequent unit, merged by running sequences and draft length; None: none is complete."""
    found: dict[str, list[Any]] = {}
    for cell in record.cells:
        if cell.draft_length is None or cell.sequences < 0.5:
            continue
        for unit in acceptance_record.TIMES:
            if getattr(cell, unit) is not None:
                found.setdefault(unit, []).append(cell)
    if not found:
        return None
    unit = max(found, key=lambda name: len(found[name]))
    kept = found[unit][:MOST_CELLS]
    return Cells.of(
        unit, [each.sequences for each in kept], [each.draft_length for each in kept], [getattr(each, unit) for each in kept],
        mean_acceptance_length=[np.nan if each.mean_acceptance_length is None else each.mean_acceptance_length for each in kept],
        context=[np.nan if each.context is None else each.context for each in kept],
        weight=[np.nan if each.weight is None else each.weight for each in kept],
    )  # fmt: skip


MOST_CELLS = 500
"""Cells of a log that a law is fitted to; the first of them."""


def _of_law(
    law: StepLaw, name: str | None, gpu: str | None, parallel: int, said: Inputs, rests: list[Evidence], only: bool,
    notes: list[str],
) -> None:  # fmt: skip
    """List what the times of a step rest on."""
    if name is not None:
        rests.append(Evidence("model", name, "its configuration", "published"))
    if gpu is not None:
        rests.append(Evidence("devices", f"{parallel} x {gpu}", "peaks of the vendor's documents", "published"))
    if law.devices is None and said.tensor_parallel is None:
        notes.append(
            "the number of GPUs of the law is not known: tokens per second and GPU are of one replica; see --tensor-parallel"
        )
    if law.kernels is None and "kv_position" not in law.coefficients:
        notes.append("the times of the law do not depend on the context: --context is used for the memory alone")
    if law.cells is not None:
        last = float(law.cells.sequences.max())
        if max(said.batch or BATCHES) > last:
            notes.append(f"the law's cells end at {last:g} running sequences: beyond them its times are extrapolated")
    if said.gpu is not None and law.kernels is None:
        of = law.facts.get("gpu") or "a GPU that is not stated"
        notes.append(f"times are those of step law {law.name}, on {of}; --gpu is used for the memory alone")
    if law.kernels is not None:
        source = kernel_times.provenance(law.kernels)
        kind = source.partition(" ")[0].rstrip(":;")
        rests.append(
            Evidence("kernels", "seconds of passes", source, "measured" if kind in ("measured", "composed") else "assumed")
        )
    if only:
        rests.append(Evidence("engine", "adds nothing to its kernels", "--engine none: kernels only", "assumed"))
        return
    if law.cells is not None:
        about = ", ".join(law.facts[key] for key in ("engine", "version", "model", "gpu", "source") if law.facts.get(key))
        rests.append(Evidence(f"step law {law.name}", law_report.extent(law), about or "fitted here", "measured"))
    described = law_report.description(law)
    for row in described["coefficients"]:
        if row["term"] in ("noise", "kernels", "acceptance_rate", "acceptance_trend"):
            continue
        scale, unit = (1e3, "ms") if row["unit"] == "s" else (1.0, row["unit"].replace("-", ""))
        value = f"{scale * row['value']:.3g} {unit} ({scale * row['low']:.3g} to {scale * row['high']:.3g})".replace("  ", " ")
        prior = row["from"] == "prior"
        own = law.engine if row["term"] in engine_priors.used(law.engine, law.kernels) and law.engine != engine_priors.ANY else None
        source = f"prior of {own or 'all engines'}" if prior else f"step law {law.name}"
        rests.append(Evidence(row["term"], value, source, "prior" if prior else "measured"))
    if law.cells is not None and not np.any(law.cells.draft_length > 0):
        notes.append("no cell of the law has a draft: the times of drafts and verification are those of priors")
    if law.cells is not None and np.all(law.cells.draft_length > 0):
        notes.append("no cell of the law is of plain decoding, which speed-ups are over: its time is extrapolated")
    if law.unit == "output_tokens_per_s":
        notes.append("the law is of throughput: TPOT and speed-up contain prompts that are processed in between")


def _ranks(said: Inputs, rests: list[Evidence]) -> RankDraws | None:
    """Rates by depth and rank, as said; None: not said."""
    if said.rank_rates is None:
        if said.rank_drafts is not None:
            raise ParameterError(f"--rank-drafts is the number of drafts of --rank-rates, got {said.rank_drafts} alone; give both")
        return None
    found = rank_draws.of_rates(said.rank_rates, said.rank_drafts, seed=said.seed)
    counted = "" if said.rank_drafts is None else f", counted in {said.rank_drafts:,} drafts"
    rests.append(Evidence("acceptance by rank", found.text + counted, "--rank-rates", "assumed"))
    return found


def _block_rates(
    said: Inputs, cases: Sequence[AcceptanceDraws], rests: list[Evidence], notes: list[str]
) -> tuple[float, ...] | None:
    """Acceptance under block verification, as said; None: not said."""
    if said.block_acceptance is None:
        return None
    found = checks.array("block_acceptance", said.block_acceptance, 0, 1)
    if not 1 <= found.size <= acceptance_draws.MOST_POSITIONS:
        raise ParameterError(f"block_acceptance must have 1 to {acceptance_draws.MOST_POSITIONS} rates, got {found.size}")
    text = ", ".join(f"{each:.3g}" for each in found) + " by draft position"
    rests.append(Evidence("acceptance by block", text, "--block-acceptance", "assumed"))
    by_token = np.cumprod(cases[0].draws, axis=1).min(axis=0)[: found.size]
    below = np.cumprod(found[: by_token.size]) < by_token * (1 - 1e-9)
    if np.any(below):
        notes.append(
            f"acceptance by block is below that by token at draft position {int(below.argmax()) + 1}, which no draft has on the"
            " same inputs (Sun et al., arXiv:2403.10444): --block-acceptance and the acceptance by token may be of different inputs"
        )
    return tuple(found.tolist())


def _cases(
    said: Inputs, record: AcceptanceRecord | None, law: StepLaw, ranks: RankDraws | None, rests: list[Evidence], notes: list[str]
) -> tuple[AcceptanceDraws, ...]:
    """Acceptance of each case: as said, of the log, or of the law.

    What the user says is used also with a log or a law that has its own acceptance, however different: the log then gives the
    times of steps, and asking what another text or a better draft would change is a usual question. It is never silent: a note says
    by how much the tokens per step differ, and both are listed.
    """
    printed = said.printed_rate is not None or said.printed_length is not None
    given = {
        "--acceptance": said.acceptance is not None, "--acceptance-by-position": said.acceptance_by_position is not None,
        "--printed-rate or --printed-length": printed,
    }  # fmt: skip
    if sum(given.values()) > 1:
        named = " and ".join(option for option, here in given.items() if here)
        raise ParameterError(f"one acceptance is needed, got {named}; leave one out")
    if said.acceptance is not None:
        found = tuple(option_values.acceptance_of(said.acceptance, said.seed))
    elif said.acceptance_by_position is not None:
        found = (acceptance_draws.by_position(said.acceptance_by_position),)
    elif printed:
        found = (_printed(said),)
    elif record is not None:
        if record.drafted and not (record.known_rates or record.mean_acceptance_length):
            lacking = next((note for note in record.notes if "number of drafts" in note), "the number of drafts is missing")
            raise ParameterError(f"--log has no tokens per step, so no acceptance: {lacking}; give such output, or --acceptance")
        if record.draft_length == 0 or not (record.known_rates or record.mean_acceptance_length):
            raise ParameterError("--log has no drafts, so no acceptance: give --acceptance, or a log with speculation on")
        if not record.known_rates and not record.draft_length:
            raise ParameterError(
                f"--log says {record.mean_acceptance_length:.3g} tokens per step, but no draft length: give --log-draft-length,"
                " the K that the engine ran with, or --acceptance"
            )
        found = (acceptance_draws.of_record(record, "--log", seed=said.seed),)
    elif ranks is not None:
        found = (ranks.of_first("--rank-rates"),)
    else:
        of_law = acceptance_draws.of_law(law)
        if of_law is None:
            raise ParameterError(
                "acceptance is required and has no default: give --log with an engine's log, --acceptance 0.7 (or 0.6..0.8 where it"
                " is uncertain, 0.6,0.7 for two cases), --printed-rate, --acceptance-by-position, or an --engine-law that has it"
            )
        found = (of_law,)
    rests += [Evidence("acceptance", each.text, each.source, each.kind) for each in found]
    if any(given.values()):
        _replaced(found, record, None if said.engine_law is None else law, rests, notes)
    return found


def _replaced(
    used: tuple[AcceptanceDraws, ...], record: AcceptanceRecord | None, law: StepLaw | None, rests: list[Evidence], notes: list[str]
) -> None:
    """List the acceptance of the log, or of the law that was given, in whose place the user's is used."""
    own = None if law is None else acceptance_draws.of_law(law)
    known = record is not None and bool(record.known_rates or (record.draft_length and record.mean_acceptance_length))
    if record is not None and known:
        own = acceptance_draws.of_record(record, "--log")
    if own is None:
        return
    rests.append(Evidence("acceptance (not used)", own.text, own.source, own.kind))
    longest = 3 if record is None or not record.draft_length else record.draft_length
    length = min([longest, *(each.limit for each in (*used, own) if each.limit is not None)])
    instead = float(own.lengths([length])[0][0])
    for each in used:
        tokens = float(each.lengths([length])[0][0])
        notes.append(
            f"acceptance {each.text} ({each.source}) is used, not that of {own.source} ({own.text}): {tokens:.2f} tokens per step"
            f" at K = {length} in place of {instead:.2f}"
        )




def _printed(said: Inputs) -> AcceptanceDraws:
    """Acceptance that an engine printed as one rate or one mean length, at one draft length."""
    engine = {"tensorrt-llm": "trtllm"}.get(said.engine, said.engine)
    if engine not in engine_dialects.DIALECTS:
        raise ParameterError(
            "--engine is required with --printed-rate and --printed-length: engines mean different figures by them"
        )
    if not isinstance(said.log_draft_length, int):
        raise ParameterError(
            "--log-draft-length is required with --printed-rate and --printed-length: the K that the engine ran with"
        )
    for name in ("printed_rate", "printed_length"):
        if getattr(said, name) is not None:
            checks.number(name, getattr(said, name), 0, 1 if name == "printed_rate" else said.log_draft_length + 1)
    checks.whole("log_draft_length", said.log_draft_length, 1, acceptance_draws.MOST_POSITIONS)
    rate = float(reported_acceptance(engine, said.log_draft_length, rate=said.printed_rate, length=said.printed_length))
    found = acceptance_draws.constant(rate)
    text = f"{rate:.3g} at every position, from what {said.engine} printed at draft length {said.log_draft_length}"
    return replace(found, kind="measured", source="--printed-rate, --printed-length", text=text)


def _batches(said: Inputs, capacity: int | None, notes: list[str]) -> tuple[int, ...]:
    if said.batch is not None:
        if not said.batch:
            raise ParameterError("batch must have at least one number of running sequences, got none")
        for each in said.batch:
            checks.whole("batch", each, 1, 100_000)
            if capacity is not None and each > capacity:
                raise ParameterError(
                    f"batch must be at most {capacity}, the sequences whose cache fits the memory besides the weights, got {each};"
                    " give fewer, a shorter --context, or more --tensor-parallel"
                )
        return tuple(sorted({*said.batch}))
    kept = tuple(each for each in BATCHES if capacity is None or each <= capacity)
    if len(kept) < len(BATCHES):
        notes.append(f"at most {capacity} sequences fit the memory: larger batches are left out")
    return kept


def _draft_lengths(said: Inputs, draft: str | None, cases: Sequence[AcceptanceDraws], notes: list[str]) -> tuple[int, ...]:
    limits = [each.limit for each in cases if each.limit is not None]
    most = min(limits, default=acceptance_draws.MOST_POSITIONS)
    source = next((each.source for each in cases if each.limit == most), "")
    heads = None if draft is None else draft_heads.most_drafted(draft)
    if said.draft_length is not None:
        if not said.draft_length:
            raise ParameterError("draft_length must have at least one draft length, got none")
        for each in said.draft_length:
            checks.whole("draft_length", each, 1, acceptance_draws.MOST_POSITIONS)
            if heads is not None and each > heads:
                raise ParameterError(
                    f"draft_length must be at most {heads} with {draft}, a head for each drafted token, got {each}"
                )
            if each > most:
                raise ParameterError(
                    f"draft_length must be at most {most}, up to which {source} has acceptance by draft position, got {each};"
                    " leave it out, or take a log with a longer draft"
                )
        return tuple(sorted({*said.draft_length}))
    able = tuple(each for each in DRAFT_LENGTHS if heads is None or each <= heads)
    kept = tuple(each for each in able if each <= most)
    if len(kept) < len(able):
        notes.append(
            f"acceptance is known up to draft length {most} ({source}): longer drafts are left out; a run with them tells more"
        )
    return kept
