"""The pages of the reference, made from the program: commands, scenario keys, columns of results, Python interface, benchmarks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import typer

from calibrate.commands import calibrate_app
from model.base.table_records import documented
from model.methods import registry
from model.methods.method_parameters import MethodParameters
from sim.commands import listing, sim_app
from sim.scenarios import cases
from sim.scenarios.hardware_cost import HardwareCost
from sim.views import metrics
from tests.bench import history

PYTHON = {
    "Run scenarios": ["sim.run", "sim.report"],
    "Scenarios and grids": [
        "sim.scenarios.grid.Grid", "sim.scenarios.json_schema.of_scenarios", "sim.scenarios.scenario_file.names"
    ],
    "Traces and theorems": ["sim.runs.trace.record", "sim.runs.trace.write", "sim.theorems.check"],
    "Measured runs": [
        "sim.comparison.run_comparison.of_file", "sim.comparison.run_comparison.compare", "model.logs.replay.Replayed"
    ],
    "Figures": ["figures.of_run"],
    "Closed forms": [
        "model.methods.speculative.theory", "model.methods.ppd.theory", "model.methods.hierarchical.theory",
        "model.methods.pearl.theory", "model.methods.amusd.theory", "model.methods.dsi.theory", "model.methods.ssd.theory",
        "model.methods.bild.theory", "model.methods.skipdecode.theory",
        "model.methods.early_exit.theory", "model.methods.self_speculative.theory",
    ],
    "Costs and hardware": [
        "model.costs.layer_times.UnitCost", "model.costs.pass_seconds.PassSeconds", "model.hardware.profile_files.load",
        "model.hardware.composed_layers.layer", "model.architectures.transformer.Shape",
    ],
    "Write a method": ["model.steps", "model.methods.method_parameters.MethodParameters"],
}  # fmt: skip
"""Objects and modules that users import, by what they are for."""


def write(folder: Path) -> None:
    """Write all pages; those whose text is the same are left alone, so that a build reads nothing anew."""
    folder.mkdir(exist_ok=True)
    pages = {"commands": commands(), "scenarios": scenarios(), "columns": columns(), "python": python()}
    pages["benchmarks"] = history.page()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- Commands ---


def commands() -> str:
    """Every command with its examples and options."""
    parts = ["# Commands", "Made from `--help`."]
    for name, app in {"sim": sim_app.app, "calibrate": calibrate_app.app}.items():
        parts += [f"## {name}", *_of_group(typer.main.get_command(app), name)]
    return "\n\n".join(parts) + "\n"


def _of_group(group: Any, path: str) -> Iterable[str]:
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from _of_group(command, f"{path} {name}")
            continue
        yield f"### {path} {name}"
        yield from _paragraphs(inspect.cleandoc(command.help or ""), path.split()[0])
        context = command.context_class(command, info_name=name)
        yield _table(["option", "meaning"], [_option(each, context) for each in command.params if not each.hidden])


def _paragraphs(text: str, program: str) -> Iterable[str]:
    """Paragraphs of a help text; those that are a command become a block that can be copied."""
    for paragraph in text.replace("\b", "").split("\n\n"):
        lines = paragraph.strip()
        if lines.startswith((f"{program} ", "pip ", "make ")):
            yield f"```\n{' '.join(lines.split()) if chr(10) not in lines else lines}\n```"
        elif lines:
            yield lines


def _option(parameter: Any, context: Any) -> tuple[str, str]:
    """Name and meaning, as `--help` has them."""
    if parameter.param_type_name == "argument":
        return f"`{(parameter.name or '').upper()}`", parameter.help or ""
    names, meaning = parameter.get_help_record(context)
    return f"`{names}`", meaning


# --- Scenarios ---


def scenarios() -> str:
    """Every section of a scenario file and its keys."""
    parts = [
        "# Scenario keys",
        "A scenario is a TOML file with the sections below; `sim ls scenarios NAME` prints a bundled one to start from,"
        " `sim lint FILE` checks one, and `sim schema` prints the JSON schema for editors.",
        "## [scenario]", _keys(cases.Settings), "## [[method]]",
    ]  # fmt: skip
    for name in registry.names():
        kind = registry.parameters(name)
        parts += [f"### {name}", *_documentation(registry.algorithm(name)), _keys(kind, {"batching": _batching(kind)})]
    parts += ["## [outcomes]", "Which drafts are accepted, matches found, decisions taken; one kind for each section."]
    for key, law in listing.laws().items():
        parts += [f"### {key}", *_documentation(law), _keys(law)]
    parts += ["## [cost] in layer-times (kinds `unit` and `published`)", _keys(cases.Cost)]
    parts += ["## [cost] in seconds (kinds `profile`, `roofline` and `engine`)", _keys(HardwareCost)]
    parts += ["## [cluster]", _keys(cases.Machine)]
    return "\n\n".join(parts) + "\n"


def _documentation(of: type | ModuleType) -> list[str]:
    text = inspect.getdoc(of) or ""
    return [text.partition("\n\nParameters\n")[0].partition("\n\n>>>")[0]]


def _keys(kind: type, instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """Table of the keys of a record with their defaults, or what `instead` says of a default."""
    said = documented(kind)
    rows = []
    for field in fields(kind):
        default = "required" if field.default is MISSING and field.default_factory is MISSING else _default(field.default)
        rows.append((f"`{field.name}`", said.get(field.name, ""), instead.get(field.name, default)))
    return _table(["key", "meaning", "default"], rows)


def _batching(kind: type[MethodParameters]) -> str:
    return listing.default_batching(kind).removeprefix("default ").replace("'", "`")


def _default(value: Any) -> str:
    return "" if value is None or value is MISSING else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- Columns ---


def columns() -> str:
    """Columns of results, from the table that documents them."""
    before, _, rest = (inspect.getdoc(metrics) or "").partition("=====")
    body = rest.partition("\n")[2].rpartition("\n====")[0]
    rows: list[list[str]] = []
    for line in body.splitlines():
        begins = re.match(r"(`[^`]+`)\s+(.*)", line)
        if begins:
            rows.append([begins[1], begins[2].strip()])
        elif rows and line.strip():
            rows[-1][1] += f" {line.strip()}"
    return "\n\n".join(["# Columns of results", before.strip(), _table(["column", "meaning"], rows)]) + "\n"


# --- Python ---


def python() -> str:
    """The Python interface, by what it is for."""
    parts = ["# Python", "Every command has a twin in Python. Start with `import sim`."]
    for title, names in PYTHON.items():
        parts.append(f"## {title}")
        parts += [f"```{{eval-rst}}\n{_directive(name)}\n```" for name in names]
    return "\n\n".join(parts) + "\n"


def _directive(name: str) -> str:
    """The directive of a class, a function or a whole module."""
    last = name.rpartition(".")[2]
    if last[0].isupper():
        return f".. autoclass:: {name}\n   :members:"
    try:
        __import__(name)
    except ImportError:
        return f".. autofunction:: {name}"
    return f".. automodule:: {name}\n   :members:"
