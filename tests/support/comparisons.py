"""Runs for the tests of predicted against measured times: real algorithms on forced outcomes, with synthetic times; no tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import polars as pl

from model.architectures.published_shapes import preset
from model.architectures.transformer import Shape
from model.costs.layer_times import UnitCost
from model.costs.replayed_seconds import ReplayedSeconds
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_costs import ProfileCosts
from model.interpret.simulated_answers import Answers
from model.logs import forced_outcomes
from model.logs.measured_runs import ROLES, MeasuredRuns
from model.logs.read_log import ReadLog
from model.logs.recorded_decoding import AnsweredRead, Decoding, question
from model.logs.spans import MAIN_PROCESS_KINDS, Span, plain
from model.methods import registry
from model.steps import Commit, Read, Steps
from sim.comparison import run_comparison
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate

LAYERS = {"target": 12, "draft": 3, "medium": 5}
FACTS = {"name": "a processor", "threads": 1, "cores": 2, "python": "3", "torch": "2", "transformers": "5"}
PROMPT = (0, 1, 2, 3)
"""Simulated answers number tokens by their positions."""


def shape(role: str) -> Shape:
    return dataclasses.replace(preset("llama-68m"), layers=LAYERS[role])


def profile(role: str, wider: float = 0.0, layer: float = 1e-3, further: float = 0.0, **parts: float) -> Profile:
    """A synthetic profile: each further token of a pass adds `wider` of a layer's time, 128 tokens of context add `further`; other
    parts have times by name [s].
    """
    rows: list[dict[str, Any]] = [
        {"part": "layer", "width": width, "context": context, "batch": 1,
         "time_s": layer * (1 + wider * (width - 1)) * (1 + further * context / 128)}
        for width in (1, 2, 24) for context in (0, 128)
    ]  # fmt: skip
    axes = {"step": "batch", "first_read": "batch", "embedding": "tokens", "kv_rows": "tokens"}
    axes |= dict.fromkeys(run_comparison.OVER_PROCESSES, "processes")
    rows += [{"part": part, axes.get(part, "positions"): size, "time_s": time} for part, time in parts.items() for size in (1, 64)]
    table = table_of([{"busy": 0, "low_s": row["time_s"], "high_s": row["time_s"], "repeats": 9, **row} for row in rows])
    return Profile(
        name=f"made-{role}", device="cpu", model=role, dtype="float32", engine="made up", mode="eager", kind="model",
        provenance="measured", date="2026-01-01", bandwidth=1e12, rate=1e15, cache_bytes=1e9, table=table,
        sources=(Source("made up", "here"),), shape=dataclasses.asdict(shape(role)), facts=FACTS,
    )  # fmt: skip


def profiles(wider: float = 0.0, **parts: float) -> dict[str, Profile]:
    return {role: profile(role, wider, **parts) for role in ROLES}


class _RecordedWorld(Answers):
    """Simulated answers that are recorded."""

    def __init__(self, world: Any) -> None:
        self.world, self.reads = world, list[AnsweredRead]()
        self.written: Sequence[int] = ()

    def read(self, step: Read) -> Any:
        self.world.written = self.written
        answer = self.world.read(step)
        self.reads.append(AnsweredRead(question(step, step.output), answer))
        return answer


def observed(steps: Steps, see: Callable[[Any], None]) -> Steps:
    """Pass on the steps of a process, and call `see` with each."""
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        see(step)
        answer = yield step


def record_decoding(method: str, tokens: int, rates: Mapping[str, float], seed: int = 0, **settings: Any) -> Decoding:
    """Record a decoding with its reads, of models whose answers follow these rates."""
    kind = registry.algorithm(method).Parameters
    fields = {field.name for field in dataclasses.fields(kind)}
    depths = {f"{role}_layers": LAYERS[role] for role in ("draft", "medium") if f"{role}_layers" in fields}
    parameters = kind(layers=LAYERS["target"], **depths, **settings)
    world = _RecordedWorld(forced_outcomes.world(parameters, len(PROMPT), tokens, rates, seed=seed))
    commits: list[Commit] = []

    def see(step: Any) -> None:
        if isinstance(step, Commit):
            commits.append(step)

    steps = observed(registry.algorithm(method).decode(parameters, list(PROMPT), tokens), see)
    cost = UnitCost(LAYERS["target"], cost_ratio=0.25, medium_cost_ratio=0.4)
    run = simulate(steps, tokens, Cluster(parameters.units), cost, world)
    made = dataclasses.asdict(parameters)
    return Decoding(method, made, PROMPT, tokens, tuple(commits), run.account, seconds=1.0, reads=tuple(world.reads))


def synthetic_runs(
    decodings: Sequence[Decoding], clock: Mapping[str, Profile], names: Sequence[str] = (), units: Sequence[int] = (),
    rates: Sequence[Mapping[str, float]] | None = None, slower: float = 1.0,
) -> MeasuredRuns:
    """Synthetic runs of these decodings, three repeats each, 1 % apart, timed with these profiles; on two units a pass takes
    `slower` times as long.
    """
    of = {role: ProfileCosts(each) for role, each in clock.items()}
    between = {
        name: of["target"].part("wake" if name == "link" else name, 1) for name in ("dispatch", "link", "promotion", "scheduling")
    }
    seconds = {name: 0.0 if each is None else float(each.seconds) for name, each in between.items()}
    cost = ReplayedSeconds(of, slowdowns=(1.0, slower), **seconds)
    rows = []
    for number, each in enumerate(decodings):
        unit_count = units[number] if units else 1
        prediction = run_comparison.predict(each, cost, unit_count, record=unit_count > 1)
        for repeat, factor in enumerate((0.99, 1.0, 1.01)):
            rows.append({
                "decoding": number, "repeat": repeat, "run_order": 3 * number + repeat, "units": unit_count,
                "seconds": factor * prediction.total,
                "commit_s": [factor * time for time, *_ in prediction.run.commits],
                "pass_s": [factor * prediction.passes(role) for role in ROLES], "read_s": factor * prediction.reads,
                "waited": 0.0, "load": 1.0,
                "spans": plain(_spans(prediction.run, factor) if unit_count > 1 else [], 0.0),
            })  # fmt: skip
    models = {role: {"name": f"made-{role}", "checksum": "0", "layers": LAYERS[role]} for role in ROLES}
    versions = {name: FACTS[name] for name in ("python", "torch", "transformers")}
    log = ReadLog(
        tuple(decodings), tuple(names or ["one"] * len(decodings)), models, None, 0, "2026-01-01", versions, "assumed: forced"
    )
    about = {
        "device": "cpu", "dtype": "float32", "threads": 1, "machine": {key: FACTS[key] for key in ("name", "threads", "cores")},
        "shapes": {role: json.loads(json.dumps(dataclasses.asdict(shape(role)))) for role in ROLES}, "prompts": "made up",
        "warm_ups": 1, "forced": rates, "roles": [*ROLES], "profiles": {}, "date": "2026-01-01", "versions": versions,
    }  # fmt: skip
    return MeasuredRuns(log, pl.DataFrame(rows, infer_schema_length=None), about)


def _spans(run: Run, factor: float) -> list[Span]:
    """Spans that processes would have recorded in this run, including the waiting of the main one."""
    found, end = [], 0.0
    for each in run.intervals:
        what = "head" if each.what == "read" else each.what
        found.append(Span(*each._replace(start=factor * each.start, end=factor * each.end, what=what)))
    for each in sorted((span for span in found if span.unit == 0 or span.what in MAIN_PROCESS_KINDS), key=lambda span: span.start):
        if each.start > end:
            found.append(Span(0, end, each.start, "wait", 0, -1, 0, 0, "kept"))
        end = max(end, each.end)
    return found


EXAMPLES: tuple[tuple[str, dict[str, Any], dict[str, float]], ...] = (
    ("autoregressive", {}, {}),
    *[("speculative", {"draft_length": each}, {"acceptance_rate": 0.7}) for each in (1, 3, 5)],
    ("adaptive", {"policy": "heuristic"}, {"acceptance_rate": 0.7}),
    ("hierarchical", {"draft_length": 2}, {"acceptance_rate": 0.7, "medium_acceptance_rate": 0.5}),
    ("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.6}),
    *[("bild", {}, {"fallback_rate": each, "rollback_rate": 0.1}) for each in (0.2, 0.6)],
    *[("skipdecode", {"min_layers": each, "max_layers": 12, "prompt": 4, "sequence_length": 28}, {}) for each in (3, 6, 9)],
    ("early_exit", {"exit_layer": 6}, {}),
)
"""Examples of every kind: a method, its settings, and the rates of its forced outcomes."""


@lru_cache(maxsize=1)
def example_runs() -> tuple[MeasuredRuns, dict[str, Profile]]:
    """Runs of `EXAMPLES` on two prompts, and profiles slightly different from the times of the runs."""
    made = [
        (record_decoding(name, 24, rates, seed, **table), f"prompt {seed}", rates)
        for seed in (1, 2) for name, table, rates in EXAMPLES
    ]  # fmt: skip
    decodings, names, forced_by = ([each[index] for each in made] for index in range(3))
    units = [2 if each.method == "ppd" else 1 for each in decodings]
    clock = profiles(wider=0.2, head=2e-3, step=1e-3, next=1e-4, first_read=2e-4)
    return synthetic_runs(decodings, clock, names, units, forced_by), profiles(
        wider=0.18, head=2e-3, step=0.7e-3, next=1e-4, first_read=2e-4
    )
