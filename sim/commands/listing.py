"""Lists and descriptions for `sim ls`: one line per entry, or the full description of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from model import published
from model.architectures import draft_heads, published_shapes, transformer
from model.architectures.published_shapes import PRESETS
from model.architectures.transformer import Shape
from model.base import checks
from model.base.table_records import documented
from model.costs.layer_times import LayerTimeCosts
from model.costs.step_costs import RATIOS
from model.engines import law_report, step_law
from model.engines.step_law import SHARE, StepLaw
from model.hardware import devices, profile_files
from model.hardware.devices import DEVICES, Device
from model.hardware.profile import Profile
from model.methods import method_parameters, registry
from model.methods.method_parameters import MethodParameters
from model.outcomes.outcome_kinds import kind_of
from sim.scenarios import cases, cost_kinds, hardware_cost, outcomes_section, scenario_file
from sim.scenarios.hardware_cost import HardwareCost
from sim.scenarios.outcomes_section import LAWS
from sim.serving import load_scenario, served_files

LISTS = ("costs", "devices", "laws", "methods", "outcomes", "profiles", "published", "scenarios", "shapes")
COST_KINDS = (*cost_kinds.IN_LAYER_TIMES, *cost_kinds.ON_HARDWARE)
"""Kinds of [cost]."""


def lines(what: str) -> dict[str, str]:
    """Return one line per entry of a list, by name."""
    checks.one_of("list", what, LISTS)
    if what == "costs":
        # A few keys have different meanings in different kinds: kind `unit` comes first.
        about = documented(HardwareCost) | documented(LayerTimeCosts) | documented(cases.Cost)
        return {name: about[name] for name in dict.fromkeys((*_given(cases.Cost), *_given(HardwareCost)))}
    if what == "methods":
        modules = {name: registry.algorithm(name) for name in registry.names()}
        return {name: f"{_first(module)} ({', '.join(_given(module.Parameters))})" for name, module in modules.items()}
    if what == "scenarios":
        found = {name: scenario_file.load(name)["scenario"].get("description", "") for name in scenario_file.names()}
        served = {name: load_scenario.load(name)["scenario"]["description"] for name in served_files.names()}
        return dict(sorted({**found, **served}.items()))
    if what == "outcomes":
        return {name: f"{_first(law)} ({', '.join(_given(law))})" for name, law in laws().items()}
    if what == "shapes":
        return {name: _shape(each) for name, each in PRESETS.items()} | {
            f"{kind}:SHAPE": about for kind, about in draft_heads.ABOUT.items()
        }
    if what == "devices":
        return {name: _device(each) for name, each in DEVICES.items()}
    if what == "profiles":
        return {name: _profile(profile_files.load(name)) for name in profile_files.names()}
    if what == "laws":
        return {name: _law(step_law.load(name)) for name in step_law.names()}
    return {name: published.table(name).title for name in published.names()}


def _names(what: str) -> list[str]:
    """Names of the entries of `lines`, without their descriptions."""
    known: dict[str, Callable[[], Iterable[str]]] = {
        "costs": lambda: [*lines("costs"), *COST_KINDS],
        "laws": step_law.names,
        "methods": registry.names,
        "profiles": profile_files.names,
        "published": published.names,
        "scenarios": lambda: sorted([*scenario_file.names(), *served_files.names()]),
    }
    return [*known[what]()] if what in known else [*lines(what)]


def details(what: str, name: str) -> dict[str, str]:
    """Return the full description of an entry, by title; for a scenario, its file.

    Outcomes are named by their subject (`decision`), their kind (`thresholds`), or both (`decision: thresholds`). Profiles, laws,
    shapes and devices are named, or given by the path of a .json, a config.json or a .toml; draft heads by kind and target. Costs
    are named by a key of [cost], or by a kind, which has several.
    """
    checks.one_of("list", what, LISTS)
    if what == "outcomes":
        found = {key: law for key, law in laws().items() if name in (key, *key.split(": "))}
        if not found:
            raise checks.unknown("outcomes", name, {part for key in laws() for part in key.split(": ")})
        return {key: f"{key}: {inspect.getdoc(law)}\n\n{_fields(law)}" for key, law in found.items()}
    if what == "profiles" and name.endswith(".json"):
        return {name: _rows(_of_profile(profile_files.load(name)))}
    if what == "laws" and name.endswith(".json"):
        return {name: _rows(_of_law(step_law.load(name)))}
    if what == "shapes" and name in (rules := lines(what)) and name not in PRESETS:
        kind = name.partition(":")[0]
        return {name: f"{rules[name]}\n\nwith the name of a shape or the path of a config.json, such as {kind}:llama-3.1-8b"}
    if what == "shapes" and draft_heads.is_head(name):
        source = "as published heads of this kind; what it shares with the target is not counted"
        return {name: _rows(_of_shape(name, source))}
    if what == "shapes" and published_shapes.is_path(name):
        return {name: _rows(_of_shape(name, f"read from {name}; bfloat16 if it names no dtype"))}
    if what == "devices" and devices.is_path(name):
        return {name: devices.toml_text(devices.device(name))}
    if what == "costs" and name in COST_KINDS:
        keys = [*_of_cost(name).values()] if name in lines(what) else []  # a kind may have the name of one of its keys
        return {name: "\n\n".join([_of_cost_kind(name), *keys])}
    if name not in (there := _names(what)):
        raise checks.unknown(what.removesuffix("s"), name, there)
    if what == "methods":
        return {name: _method(name)}
    if what == "scenarios":
        return {name: (served_files if name in served_files.names() else scenario_file).text_of(name).rstrip()}
    if what == "shapes":
        return {name: _rows(_of_shape(name, "published: its checkpoint's configuration; assumed: dtype"))}
    if what == "devices":
        return {name: f"# {DEVICES[name].origin}\n{devices.toml_text(DEVICES[name])}"}
    if what == "profiles":
        return {name: _rows(_of_profile(profile_files.load(name)))}
    if what == "laws":
        return {name: _rows(_of_law(step_law.load(name)))}
    if what == "costs":
        return _of_cost(name)
    table = published.table(name)
    return {name: f"{table.title}\n\nkeys: {', '.join(table.keys)}; {len(table.rows)} rows"}


def _of_cost(name: str) -> dict[str, str]:
    """A key of [cost], by the kinds that have it."""
    kinds = {"unit, published": cases.Cost, "profile, roofline, engine": HardwareCost}
    having = {kind: of for kind, of in kinds.items() if name in _given(of)}
    return {name: _rows({kind: (documented(LayerTimeCosts) | documented(of))[name] for kind, of in having.items()})}


def _of_cost_kind(kind: str) -> str:
    """Table [cost] of a kind: its keys with what they are."""
    on_hardware = kind in cost_kinds.ON_HARDWARE
    about = documented(LayerTimeCosts) | documented(HardwareCost if on_hardware else cases.Cost)
    keys = hardware_cost.keys_of(kind) if on_hardware else _given(cases.Cost)
    return f'[cost]\nkind = "{kind}"\n\n' + _rows({key: about[key] for key in keys if key != "kind"})


def _profile(found: Profile) -> str:
    tensor_parallel = f", tensor_parallel {'/'.join(map(str, found.tensor_parallel))}" if found.kind == "model" else ""
    whom = ", ".join(dict.fromkeys(source.repository for source in found.sources))
    what = f"{found.model or found.kind} on {found.device}, {found.dtype}, {found.engine} {found.mode}"
    return f"{found.provenance}: {what}{tensor_parallel} ({whom})"


def _of_profile(found: Profile) -> dict[str, Any]:
    facts = {name: getattr(found, name) for name in ("kind", "device", "model", "dtype", "engine", "mode", "provenance", "date")}
    facts |= {"covers": found.coverage(), "peaks": f"{found.bandwidth / 1e9:,.0f} GB/s, {found.rate / 1e12:,.1f} TFLOP/s"}
    facts |= {f"error, {part}": f"{error:.1%} between measured points (leave one out)" for part, error in found.errors.items()}
    for index, source in enumerate(found.sources, 1):
        commit = f" at {source.commit}" if source.commit else ""
        gave = f" ({', '.join(source.parts)})" if source.parts else ""
        facts[f"source {index}"] = f"{source.repository}{commit}, {source.licence or 'own'}: {source.file}{gave}"
    facts |= {f"note {index}": note for index, note in enumerate(found.notes, 1)}
    return facts | {f"fact: {name}": value for name, value in found.facts.items()}


def _law(of: StepLaw) -> str:
    """One line: what was measured where, how many cells in which range, and how well each follows from the others."""
    told = [of.facts.get("engine", "engine not given"), of.facts.get("version", "")]
    whom = f"{' '.join(told).strip()}: {of.facts.get('model', 'model not given')} on {of.facts.get('gpu', 'a GPU not given')}"
    return f"{whom}; {law_report.extent(of)}"


def _of_law(of: StepLaw) -> dict[str, Any]:
    found = law_report.description(of)
    facts: dict[str, Any] = {"about": found["about"], "unit": of.unit, "cells": law_report.extent(of)}
    facts |= {
        row["term"]: f"{row['value']:.4g} {row['unit']} ({row['low']:.4g} to {row['high']:.4g}, {SHARE:.0%}; {row['from']}): "
        + row["meaning"]
        for row in found["coefficients"]
    }
    facts |= {f"note {index}": note for index, note in enumerate(law_report.sentences(of), 1)}
    return facts | {f"fact: {name}": value for name, value in of.facts.items()}


def _shape(shape: Shape) -> str:
    encoder = f"{shape.encoder_layers} + " if shape.encoder_layers else ""
    wide = f"{encoder}{shape.layers} layers of width {shape.hidden}, vocabulary {shape.vocabulary}"
    active = f" ({shape.active_parameters:,} active)" if shape.experts is not None else ""
    stored = ""
    if shape.weights is not None:
        stored = f", {'experts' if shape.weights.experts_only else 'layers'} in {shape.weights.name}"
    return f"{shape.parameters:,} parameters{active}, {wide}" + (f", with {shape.special}" if shape.special else "") + stored


def _device(of: Device) -> str:
    dtype = next(iter(of.rates))
    memory = f"{of.memory_bytes / 2**30:g} GiB at {of.bandwidth / 1e9:g} GB/s"
    return f"{memory}, {of.rates[dtype] / 1e12:g} TFLOP/s of {dtype}, ridge {of.ridge(dtype):.0f} FLOP/byte ({of.origin})"


def _of_shape(name_of_shape: str, source: str) -> dict[str, object]:
    shape = published_shapes.named_shape(name_of_shape)
    own: dict[str, object] = {}
    for name, value in transformer.described(shape).items():
        own |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    own["biases"] = ", ".join(shape.biases) or "none"
    own |= {"parameters": shape.parameters}
    own |= {"active parameters": shape.active_parameters} if shape.experts is not None else {}
    own |= {"stored as": published_shapes.stored_as(name_of_shape, shape)}
    own |= {"memory": f"{shape.weight_bytes / 1e9:,.2f} GB", "cache": f"{shape.cache_bytes():,} bytes per position"}
    return own | {"source": source}


def _rows(values: Mapping[str, object]) -> str:
    width = max(map(len, values))
    return "\n".join(f"{name:{width}}  {value}" for name, value in values.items())


def _method(name: str) -> str:
    module = registry.algorithm(name)
    kind = module.Parameters
    values = _fields(kind, {"batching": default_batching(kind)})
    parts = [inspect.getdoc(module) or "", f'[[method]]\nname = "{name}"\n\n{inspect.getdoc(kind)}\n\n{values}']
    kinds = {outcome: ", ".join(outcomes_section.kinds(kind, outcome)) for outcome in kind.OUTCOMES}
    laws = {outcome: f"{kind_of(outcome).rate}; kinds {each}" for outcome, each in kinds.items()}
    perhaps = ", with some of its parameters" if "outcomes_for" in vars(kind) else ""
    asked = [f"{outcome}: {about} (`sim ls outcomes {outcome}`){perhaps}" for outcome, about in laws.items()]
    parts.append("\n".join(["[outcomes]", *asked]) if asked else "[outcomes]: none")
    batchings = {batching: method_parameters.BATCHING_DESCRIPTIONS[batching] for batching in kind.BATCHINGS}
    parts.append("batching of several sequences\n" + _rows(batchings))
    required = [RATIOS[role] for role in kind.roles_for({})]
    looked_at, given = kind.all_costs_for({}), {*_given(cases.Cost), *_given(HardwareCost)}
    also = sorted({f"{key}_s" if key not in given else key for key in looked_at} - {*required})
    sometimes = sorted({*kind.COSTS} - looked_at)
    every = [key for key in _given(cases.Cost) if key not in cases.optional_costs()]
    unless = ", except with an exit_layer: the draft is then the large model's first layers" if "exit_layer" in _given(kind) else ""
    costs = [f"{key}  required{unless}" for key in required]
    its = [f"of this method: {', '.join(also)}"] if also else []
    its += [f"with some of its parameters: {', '.join(sometimes)}"] if sometimes else []
    parts.append("\n".join(["[cost] (`sim ls costs`)", *costs, *its, f"of every method: {', '.join(every)}"]))
    used = [
        each
        for each in scenario_file.names()
        if name in {table["name"] for table in scenario_file.method_tables(scenario_file.load(each))}
    ]
    parts.append(f"scenarios: {', '.join(used)} (`sim ls scenarios NAME` shows one)" if used else "no bundled scenario uses it")
    return "\n\n".join(parts)


def laws() -> dict[str, Any]:
    return {f"{name}: {kind}": law for name, kinds in LAWS.items() for kind, law in kinds.items()}


def default_batching(kind: type[MethodParameters]) -> str:
    """Value of `batching` where it is left out: its default, if the method can decode several sequences with it."""
    default = next(field.default for field in fields(kind) if field.name == "batching")
    choices = " or ".join(map(repr, kind.BATCHINGS))
    return _default(default) if default in kind.BATCHINGS else f"required with several sequences: {choices}"


def _fields(kind: type, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """One line per field: its default, or what `instead` says."""
    width = max(map(len, _given(kind)))
    return "\n".join(f"{field.name:{width}}  {instead.get(field.name) or _default(field.default)}" for field in fields(kind))


def _default(value: object) -> str:
    return "required" if value is MISSING else "none" if value is None else f"default {checks.shown(value)}"


def _given(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _first(documented: object) -> str:
    return next(iter((documented.__doc__ or "").splitlines()), "")
