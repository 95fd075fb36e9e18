"""Scenarios of a server under load: TOML with [scenario], [system], [load], [server] and [sweep], for `sim run`.

A scenario file with a table [load] is one of these. `[sweep]` has axes of any key, such as "server.max_num_seqs"; each combination
is a study of its own, with every policy at every load.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from model.base import bounded_files, checks, typed_values
from model.base.checks import ParameterError
from model.base.table_records import build
from model.serving.loads import RequestLengths
from sim.advice.option_values import milliseconds, single
from sim.advice.situation import Inputs
from sim.scenarios.grid import axis_values, parse_axis
from sim.serving import study
from sim.serving.draft_placement import DraftPlacement
from sim.serving.served_files import names, text_of
from sim.serving.study import ServingInputs

RESULTS_VERSION = 5
"""Increased when the same scenario would give other numbers or columns: kept runs of another version are not resumed."""
MOST_POINTS = 1000
"""Most combinations of the axes."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_NAMING = ("name", "description")

Tables = dict[str, Any]


@dataclass(frozen=True)
class ServedScenario:
    """Name of a scenario, and its draws.

    Parameters
    ----------
    name, description
        Name of the scenario, and one line on it.
    replications
        Further runs with other requests and drawn inputs, for the intervals.
    seed
        Seed of the draws.
    """

    name: str
    description: str = ""
    replications: int = study.REPLICATIONS
    seed: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ParameterError(
                f"name must be 1 to 64 letters, digits, '-', '_' or '.', which a directory is named after, got"
                f" {checks.shown(self.name)}"
            )


@dataclass(frozen=True)
class ServedSystem:
    """Model, devices, engine and draft, as options of `sim serve` and `sim advise`.

    Parameters
    ----------
    model, gpu
        Names of `sim ls shapes` and `sim ls devices`, or files.
    tensor_parallel
        Devices of a replica. Default: the law's, or 1.
    draft
        Draft: eagle3, eagle, mtp, medusa, p-eagle, or a model of `sim ls shapes`.
    engine
        Engine whose priors hold without a law or log.
    engine_law
        Step law of `calibrate engine fit`, or a name of `sim ls laws`.
    log
        Logs or benchmarks of the engine, or acceptance records.
    log_draft_length
        Draft length of logs that do not say it.
    acceptance, acceptance_by_position
        Acceptance rate ("0.6..0.8" is uncertain), or conditional rates by draft position.
    dtype, weights, kernels
        Type of the weights, format of quantised weights, and times of kernels.
    draft_context_budget
        Largest number of cached positions of each sequence that a draft pass reads. Default: all.
    placement
        `colocated`: the draft is on the target's devices. `separate`: it has a device of its own, for each replica.
    link
        Time of a transfer between both with its unit, such as "20us"; required with `separate`.
    draft_gpu
        Device of a separate draft. Default: `gpu`.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallel: int | None = None
    draft: str | None = None
    engine: str = "any"
    engine_law: str | None = None
    log: tuple[str, ...] = ()
    log_draft_length: tuple[int, ...] | None = None
    acceptance: float | str | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    dtype: str | None = None
    weights: str | None = None
    kernels: str | None = None
    draft_context_budget: int | None = None
    placement: str = "colocated"
    link: str | None = None
    draft_gpu: str | None = None


@dataclass(frozen=True)
class ServedLoad:
    """Requests: arrivals at a rate, clients, or a trace.

    Parameters
    ----------
    rate
        Requests per second, one or several; of a trace: its speed. Default, of a trace: its own.
    concurrency
        Clients that each send the next request when theirs is done, one or several.
    trace
        Requests of a trace: Azure's CSV, JSON lines with lengths and arrivals, or `azure-2023-conversation`.
    prompt, output
        Mean tokens of a prompt and of an output.
    prompt_cv, output_cv
        Coefficients of variation of the lengths.
    burstiness
        Coefficient of variation of the gaps between arrivals; 1: Poisson.
    requests
        Requests of a run. Default: 200 or more, 8 for each that runs; all of a trace.
    """

    rate: tuple[float, ...] | float = ()
    concurrency: tuple[int, ...] | int = ()
    trace: str | None = None
    prompt: float | None = None
    output: float | None = None
    prompt_cv: float = 0.0
    output_cv: float = 0.0
    burstiness: float = 1.0
    requests: int | None = None


@dataclass(frozen=True)
class ServedBy:
    """Settings of the servers, and policies of draft length.

    Parameters
    ----------
    policies
        Policies side by side: off, static:K, vllm:[[1,64,3],[65,512,0]], sglang, goodput, schedule, dspark, oracle, pearl:K;
        methods with their settings, such as 'early-exit:{"exit_layer":24}'.
    max_num_seqs, max_num_batched_tokens, block_size, num_blocks, chunked_prefill, max_model_len
        As the options of engines; `num_blocks` by default as the memory holds, `max_model_len` the model's context.
    reserve_prompts, async_scheduling
        Admit a request where the cache holds its whole prompt, not only the first chunk (vLLM's `scheduler_reserve_full_isl`); let
        the engine's own work overlap with passes (vLLM's setting of this name; only without a law or log).
    replicas, router
        Servers, and how requests are sent to them: least-loaded or round-robin.
    slo_ttft, slo_tpot
        Longest acceptable time to the first token and per output token: "500ms", "20ms".
    """

    policies: tuple[str, ...] = study.POLICIES
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_blocks: int | None = None
    chunked_prefill: bool = True
    max_model_len: int | None = None
    reserve_prompts: bool = True
    async_scheduling: bool = False
    replicas: int = 1
    router: str = "least-loaded"
    slo_ttft: str | None = None
    slo_tpot: str | None = None


SECTIONS: Mapping[str, type] = MappingProxyType(
    {"scenario": ServedScenario, "system": ServedSystem, "load": ServedLoad, "server": ServedBy}
)


def load(source: str | Path | Mapping[str, Any]) -> Tables:
    """Load the tables of a scenario from a path, the name of a bundled one, or a mapping; file names are found from the file."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    label = str(source)
    if label in names() and not Path(label).is_file():
        return bounded_files.toml_of(text_of(label))
    try:
        tables = bounded_files.toml_of(bounded_files.read_text(label, bounded_files.MOST_TOML))
    except (OSError, ValueError) as error:
        close = difflib.get_close_matches(label, names(), n=1)
        hint = f"; did you mean the bundled scenario {close[0]}?" if close else ""
        raise ParameterError(f"scenario {checks.shown(label)} cannot be read: {error}{hint}") from None
    for each in _files(tables):
        each.put(str(Path(label).parent / each.name))
    return tables


def _table(tables: Tables, name: str) -> Tables:
    """A section; an empty one where it is no table, which is refused later."""
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class FileName:
    """A place in the tables that has the name of a file: a list or a table, and the index or key in it."""

    table: Any
    key: Any

    @property
    def name(self) -> str:
        """The name that is there."""
        return str(self.table[self.key])

    def put(self, name: str) -> None:
        """Replace the name."""
        self.table[self.key] = name


_ENDINGS = {
    "system.engine_law": ".json", "system.model": ".json", "system.gpu": ".toml", "system.draft_gpu": ".toml", "load.trace": "",
    "system.log": "",
}  # fmt: skip
"""Keys whose values may name files, and the endings of those."""


def _files(tables: Tables) -> list[FileName]:
    """Names of files in the sections and on the axes."""
    found: list[FileName] = []

    def add(path: str, table: Any, key: Any) -> None:
        value = table[key]
        if isinstance(value, list):
            for index in range(len(value)):
                add(path, value, index)
        elif isinstance(value, str) and value.endswith(_ENDINGS[path]) and not study.is_bundled_trace(value):
            found.append(FileName(table, key))

    axes = _table(tables, "sweep")
    for path in _ENDINGS:
        section, _, key = path.partition(".")
        if key in _table(tables, section):
            add(path, tables[section], key)
        if isinstance(axes.get(path), list):
            add(path, axes, path)
    return found


def resolve(
    source: str | Path | Mapping[str, Any], *, set: Sequence[tuple[str, Any]] = (), sweep: Sequence[tuple[str, Any]] = (),
    replications: int | None = None, seed: int | None = None,
) -> Tables:  # fmt: skip
    """Return the tables of a scenario with overrides applied: values set, axes added, replications and seed replaced."""
    tables = load(source)
    for path, value in set:
        table, key = _place(tables, path)
        table[key] = value
        axes = tables.get("sweep")
        if isinstance(axes, dict):
            axes.pop(path, None)
    axes = tables.setdefault("sweep", {})
    if not isinstance(axes, dict):
        raise ParameterError(f"[sweep] must be a table of paths and lists, got {checks.shown(axes)}")
    for path, values in sweep:
        axes[path] = values
    own = tables.setdefault("scenario", {})
    if isinstance(own, dict):
        own |= {key: value for key, value in (("replications", replications), ("seed", seed)) if value is not None}
    points(tables)
    return tables


def _place(tables: Tables, path: str) -> tuple[Any, str]:
    section, _, key = str(path).partition(".")
    if section not in SECTIONS or not key:
        raise ParameterError(f"unknown path {path!r}; {checks.nearest(str(path), [f'{name}.KEY' for name in SECTIONS])}")
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ParameterError(f"[{section}] must be a table, got {checks.shown(table)}")
    return table, key


def points(tables: Tables) -> list[tuple[dict[str, Any], ServingInputs]]:
    """Values of the axes and checked inputs of every combination; a single one without axes."""
    unknown = [name for name in tables if name not in (*SECTIONS, "sweep")]
    if unknown:
        raise ParameterError(f"unknown section [{unknown[0]}]; {checks.nearest(unknown[0], [*SECTIONS, 'sweep'])}")
    axes = tables.get("sweep", {})
    values = {path: _values(path, given) for path, given in axes.items()}
    count = 1
    for each in values.values():
        count *= len(each)
    if count > MOST_POINTS:
        raise ParameterError(f"[sweep] must have at most {MOST_POINTS:,} combinations, got {count:,}; take fewer values")
    found = []
    for chosen in itertools.product(*values.values()):
        point = copy.deepcopy({name: tables.get(name, {}) for name in SECTIONS})
        at = dict(zip(values, chosen, strict=True))
        for path, value in at.items():
            table, key = _place(point, path)
            table[key] = value
        found.append((at, inputs_of(point)))
    return found


def _values(path: str, given: Any) -> list[Any]:
    if isinstance(given, str):
        given = parse_axis(given)
    if isinstance(given, Mapping):
        given = _spaced(path, given)
    if not isinstance(given, list) or not given:
        raise ParameterError(f"sweep.{path} must be a list of at least one value, got {checks.shown(given)}")
    return given


def _spaced(path: str, given: Mapping[str, Any]) -> list[Any]:
    """Evenly spaced numbers, as {from, to, count} gives them."""
    checks.whole(f"sweep.{path}.count", given.get("count"), 1, MOST_POINTS)
    return [*axis_values(path, dict(given))]


def sectioned(inputs: Mapping[str, Any]) -> Tables:
    """Tables of a scenario from keys without their sections.

    >>> sectioned({"rate": 3, "model": "llama-3.1-8b"})
    {'scenario': {'name': 'serve'}, 'system': {'model': 'llama-3.1-8b'}, 'load': {'rate': 3}, 'server': {}}
    """
    keys = {name: [each.name for each in fields(kind)] for name, kind in SECTIONS.items()}
    tables: Tables = {name: {} for name in SECTIONS}
    for key, value in inputs.items():
        section = next((name for name, known in keys.items() if key in known and key not in _NAMING), None)
        if section is None:
            every = [each for known in keys.values() for each in known if each not in _NAMING]
            raise ParameterError(f"unknown input {key!r}; {checks.nearest(key, every)}")
        tables[section][key] = list(value) if isinstance(value, tuple | range) else str(value) if isinstance(value, Path) else value
    tables["scenario"]["name"] = "serve"
    return tables


def inputs_of(tables: Tables) -> ServingInputs:
    """Inputs of a study from the tables of one combination."""
    own, system, of_load, server = (_section(kind, tables.get(name, {}), name) for name, kind in SECTIONS.items())
    lengths = None
    if of_load.prompt is not None or of_load.output is not None or of_load.prompt_cv or of_load.output_cv:
        usual = study.USUAL
        lengths = RequestLengths(
            usual.prompt if of_load.prompt is None else of_load.prompt, usual.output if of_load.output is None else of_load.output,
            of_load.prompt_cv, of_load.output_cv,
        )  # fmt: skip
    said = Inputs(
        model=system.model, gpu=system.gpu, tensor_parallel=system.tensor_parallel, draft=system.draft, engine=system.engine,
        engine_law=system.engine_law, log=tuple(system.log), log_draft_length=single(system.log_draft_length),
        acceptance=system.acceptance, acceptance_by_position=system.acceptance_by_position, dtype=system.dtype,
        weights=system.weights, kernels=system.kernels, seed=own.seed, draft_context_budget=system.draft_context_budget,
    )  # fmt: skip
    return ServingInputs(
        said, tuple(server.policies), _several(of_load.rate), _several(of_load.concurrency), of_load.trace, lengths,
        of_load.burstiness, of_load.requests, own.replications, own.seed, server.replicas, server.router, server.max_num_seqs,
        server.max_num_batched_tokens, server.block_size, server.num_blocks, server.chunked_prefill, server.max_model_len,
        milliseconds("slo_ttft", server.slo_ttft), milliseconds("slo_tpot", server.slo_tpot),
        DraftPlacement(system.placement, system.link, system.draft_gpu), server.reserve_prompts, server.async_scheduling,
    )  # fmt: skip


def _section(kind: type, table: Any, where: str) -> Any:
    """A section, with its keys and the types of their values checked."""
    if isinstance(table, dict):
        hints = get_type_hints(kind)
        for key in hints.keys() & table.keys():
            typed_values.check(table[key], _in_toml(hints[key]), f"{where}.{key}")
    return build(kind, table, where)


def _in_toml(hint: Any) -> Any:
    """Type of a key's value in TOML, which has lists in place of tuples."""
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    if isinstance(hint, UnionType):
        return Union[tuple(_in_toml(each) for each in get_args(hint))]  # noqa: UP007  made at run time
    return hint


def _several(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def named_files(tables: Tables) -> dict[str, str | None]:
    """Hash of each file that a scenario names, by its path; None for a missing file."""
    held = {}
    for each in _files(tables):
        path = Path(each.name)
        held[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return held


def fingerprint(tables: Tables) -> str:
    """Hash of everything that determines the results: the tables, the files that they name, and the version of results."""
    text = json.dumps([tables, named_files(tables), RESULTS_VERSION], sort_keys=True, default=str)  # noqa: TID251  hashed alone
    return hashlib.sha256(text.encode()).hexdigest()
