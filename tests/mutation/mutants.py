"""Apply every small change to the model, one at a time, and check that the quick tests fail: python -m tests.mutation.mutants

Every mutant runs in a separate process: a fork of a process that has imported the libraries, but none of our modules. So a mutant
costs only the tests up to the first failure.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import resource
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ACCOUNT = "model/test_account.py"
OFFERS = "sim/test_offers.py"
PPD = ("model/test_stages.py", "model/test_ppd.py", "model/test_interpreter_counter.py", "sim/test_events.py", ACCOUNT)
ARGUMENTS = "project/test_arguments.py"
HIERARCHICAL = ("model/test_hierarchical.py", "sim/test_hierarchical_exact.py")
ADAPTIVE = ("model/test_adaptive.py", "model/test_draft_length_policies.py")
ROUNDS = ("model/test_rounds.py", "model/test_speculative_algorithm.py", *ADAPTIVE, ACCOUNT)
BEAM = ("model/test_beam.py", "model/test_position_costs_beam.py")
HARDWARE = ("model/test_cost_models.py",)
TESTS = {
    "model.methods.ppd.theory": PPD,
    "model.methods.ppd.algorithm": (*PPD, OFFERS),
    "model.methods.stages": PPD,
    "model.methods.speculative.algorithm": ("model/test_speculative_algorithm.py", "sim/test_output_law.py", OFFERS),
    "model.methods.rounds.round_laws": ROUNDS,
    "model.methods.rounds.prices_of_rounds": ROUNDS,
    "model.methods.rounds.round_walks": ROUNDS,
    "model.methods.rounds.round_starts": ROUNDS,
    "model.methods.rounds.round_moments": ROUNDS,
    "model.methods.rounds.rounds_of_batches": ("model/test_batch_sizes.py", "model/test_rounds.py"),
    "model.methods.rounds.rounds_of_lengths": ("model/test_batch_sizes.py", "sim/test_speculative_batch_theory.py"),
    "model.methods.speculative.batch_sizes": ("model/test_batch_sizes.py", "sim/test_speculative_batch_theory.py"),
    "model.methods.speculative.theory": (ARGUMENTS, "model/test_speculative_theory.py", ACCOUNT),
    "model.methods.speculative.dependent_acceptance": (ARGUMENTS, "model/test_speculative_laws.py"),
    "model.methods.speculative.batch_break_even": ("model/test_speculative_batches.py",),
    "model.costs.width_curve": ("model/test_width_curve.py",),
    "model.methods.hierarchical.algorithm": HIERARCHICAL,
    "model.methods.hierarchical.theory": (ARGUMENTS, *HIERARCHICAL, ACCOUNT),
    "model.methods.hierarchical.finite_hierarchical": ("model/test_position_costs_hierarchical.py", *HIERARCHICAL),
    "model.methods.adaptive.algorithm": ADAPTIVE,
    "model.methods.adaptive.theory": (ARGUMENTS, *ADAPTIVE, ACCOUNT),
    **dict.fromkeys(
        [f"model.methods.adaptive.{name}" for name in (
            "adaptive_rounds", "common_positions", "confidence_rounds", "draft_acceptance", "heuristic_rounds",
        )],
        (*ADAPTIVE, "model/test_position_costs_adaptive.py", "model/test_lengths_together.py"),
    ),
    "model.methods.adaptive.draft_length_policies": ADAPTIVE,
    "model.methods.beam.algorithm": BEAM,
    "model.methods.beam.theory": (ARGUMENTS, *BEAM, ACCOUNT),
    "model.methods.bild.theory": (ARGUMENTS, "model/test_bild_theory.py", "model/test_bild_algorithm.py"),
    "model.methods.bild.finite_bild": ("model/test_bild_algorithm.py", "model/test_many_costs.py"),
    "model.methods.bild.segment_prices": ("model/test_bild_algorithm.py", "model/test_position_costs_bild.py"),
    "model.costs.many_costs": ("model/test_many_costs.py",),
    "model.methods.bild.algorithm": ("model/test_bild_algorithm.py", OFFERS),
    "model.methods.bild.threshold_decisions": ("model/test_threshold_decisions.py", "model/test_bild_algorithm.py"),
    "model.architectures.transformer": ("model/test_transformer.py", "model/test_layer_parts.py"),
    "model.architectures.layer_parts": ("model/test_layer_parts.py",),
    "model.architectures.draft_heads": ("model/test_draft_heads.py",),
    "model.architectures.shape_configs": ("model/test_transformer.py",),
    "model.methods.skipdecode.theory": (
        "model/test_skipdecode_theory.py", "sim/test_skipping.py", "model/test_position_costs_skipdecode.py",
    ),
    "model.methods.skipdecode.algorithm": ("sim/test_skipping.py", OFFERS),
    "model.methods.early_exit.theory": ("model/test_early_exit_theory.py", "sim/test_skipping.py"),
    "model.methods.early_exit.finite_early_exit": ("sim/test_skipping.py", "model/test_position_costs_early_exit.py"),
    "model.methods.early_exit.algorithm": ("sim/test_skipping.py",),
    "model.methods.batching": ("sim/test_skipping.py",),
    "model.methods.tree.tree_means": ("model/test_position_costs_tree.py",),
    "model.methods.ngram.theory": ("model/test_ngram.py", "sim/test_theorems_ngram.py"),
    "model.methods.ngram.algorithm": ("sim/test_theorems_ngram.py", "model/test_ngram.py"),
    "model.methods.ngram.lookup_rounds": ("model/test_ngram.py", "sim/test_theorems_ngram.py"),
    "model.outcomes.lookup_laws": ("model/test_ngram.py", "sim/test_theorems_ngram.py"),
    "model.interpret.account": ("model/test_account.py", "model/test_interpreter_counter.py"),
    "model.methods.pearl.theory": (ARGUMENTS, "model/test_pearl.py"),
    "model.methods.pearl.algorithm": ("model/test_pearl.py", "sim/test_theorems_pearl.py"),
    "model.methods.pearl.finite_pearl": ("model/test_pearl.py", "sim/test_theorems_pearl.py"),
    "model.methods.amusd.theory": ("model/test_amusd.py", "sim/test_theorems_amusd.py"),
    "model.methods.amusd.algorithm": ("model/test_amusd.py", "sim/test_theorems_amusd.py"),
    "model.methods.amusd.draft_clock": ("model/test_amusd.py", "sim/test_theorems_amusd.py"),
    "model.methods.amusd.finite_amusd": ("model/test_amusd.py", "sim/test_theorems_amusd.py"),
    "model.methods.dsi.theory": (ARGUMENTS, "model/test_dsi.py"),
    "model.methods.dsi.algorithm": ("model/test_dsi.py", "sim/test_theorems_dsi.py"),
    "model.methods.dsi.finite_dsi": ("model/test_dsi.py", "model/test_position_costs_dsi.py", "sim/test_theorems_dsi.py"),
    "model.methods.ssd.theory": ("model/test_ssd.py", "sim/test_theorems_ssd.py"),
    "model.methods.ssd.algorithm": ("model/test_ssd.py", "sim/test_theorems_ssd.py", "sim/test_ssd_scenario.py"),
    "model.methods.ssd.finite_ssd": ("model/test_ssd.py", "model/test_position_costs_ssd.py", "sim/test_theorems_ssd.py"),
    "model.methods.ssd.fan_out": ("model/test_ssd.py", "sim/test_theorems_ssd.py"),
    "model.methods.self_speculative.theory": ("model/test_self_speculative.py", "sim/test_theorems_self_speculative.py"),
    "model.methods.self_speculative.algorithm": ("sim/test_theorems_self_speculative.py", "model/test_self_speculative.py"),
    "model.hardware.interpolation": ("model/test_interpolation.py",),
    "model.hardware.roofline": HARDWARE,
    "model.hardware.cost_models": HARDWARE,
    "model.costs.pass_seconds": ("model/test_pass_seconds.py", *HARDWARE),
    "model.hardware.profile_costs": ("model/test_profile_costs.py", *HARDWARE),
    "model.hardware.profile": ("model/test_profile.py",),
    "model.hardware.profile_files": ("model/test_profile.py",),
    "model.base.json_and_parquet": ("model/test_profile.py",),
}
"""Modules that are changed, with the quick tests that must fail."""
WORKERS, SECONDS, BYTES, ENOUGH = 2, 30, 4 << 30, 0.95
LIBRARIES = (
    "numpy", "scipy.special", "scipy.stats", "simpy", "hypothesis", "pytest", "polars",
    "typer.testing", "asyncio", "torch", "transformers",
)  # fmt: skip

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
SWAPS = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "any": "all", "all": "any", "ceil": "floor"}
UNTOUCHED = ("annotation", "returns", "ctx", "decorator_list")


class Mutant(NamedTuple):
    """One change: the module, a description of the change, and the source of the changed module."""

    module: str
    change: str
    source: str


def variants(node: ast.AST) -> Iterator[ast.AST | None]:
    """Return the replacements of a node; None removes it."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS.get(type(op), ()):
                yield ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            changed = deepcopy(node)
            changed.op = OPERATORS[type(op)]()
            yield changed
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=str(value)):
            yield ast.Constant(value + "!")
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.BoolOp(values=values):
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), values)
        case ast.If() | ast.IfExp() | ast.While():
            changed = deepcopy(node)
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield changed
        case ast.Name(id=name) if name in SWAPS:
            yield ast.Name(SWAPS[name])
        case ast.Attribute(attr=name) if name in SWAPS:
            yield ast.Attribute(node.value, SWAPS[name])
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(None)
        case ast.keyword():
            yield None
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise) or (isinstance(node, ast.Return) and node.value is None):
        yield ast.Pass()


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module. Annotations, imports, docstrings and error messages are not changed."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    found: list[Mutant] = []
    seen: Counter[str] = Counter()

    def visit(parent: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(parent, ast.FunctionDef | ast.ClassDef):
            scope = (*scope, parent.name)
        for field, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children if field not in UNTOUCHED else ()):
                if not isinstance(child, ast.AST) or _left_alone(child):
                    continue
                for variant in variants(child):
                    whole = isinstance(child, ast.stmt)
                    before = _line(child if whole else parent)
                    replaced = [*children[:index], *([variant] if variant else []), *children[index + 1 :]]
                    setattr(parent, field, replaced if isinstance(value, list) else variant)
                    change = f"{'.'.join(scope)}: {before} -> {_line(variant if whole and variant else parent)}"
                    seen[change] += 1
                    change += f" #{seen[change]}" if seen[change] > 1 else ""
                    found.append(Mutant(module, change, ast.unparse(ast.fix_missing_locations(tree))))
                    setattr(parent, field, value)
                if not isinstance(child, ast.Raise):
                    visit(child, scope)

    visit(tree, ())
    return found


def _left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return True  # an assertion has no effect without a bug
    alias = isinstance(node, ast.Assign) and "NDArray" in ast.unparse(node)
    words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return alias or words or isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr)


def _line(node: ast.AST) -> str:
    return (ast.unparse(node).strip().splitlines() or [""])[0]


def _file(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def _test(mutant: Mutant) -> int:
    """Replace the module by the mutant in a forked process, and run the tests quietly; 0 means that it survived."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # CPU time: on a busy machine wall time would kill survivors
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    try:
        package, _, name = mutant.module.rpartition(".")
        spec = importlib.util.find_spec(mutant.module)
        module = sys.modules[mutant.module] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        exec(compile(mutant.source, str(_file(mutant.module)), "exec"), module.__dict__)
        setattr(sys.modules[package], name, module)
        files = [str(ROOT / "tests" / file) for file in TESTS[mutant.module]]
        return int(sys.modules["pytest"].main(["-xq", "-p", "no:cacheprovider", "-o", "addopts=", *files]))
    except BaseException:
        return 1


def survivors(jobs: list[Mutant]) -> set[tuple[str, str]]:
    """Return module and change of the mutants on which all tests pass."""
    waiting, running, found = [*reversed(jobs)], {}, set()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            mutant = waiting.pop()
            if not (child := os.fork()):
                os._exit(_test(mutant))
            running[child] = mutant
        child, status = os.wait()
        mutant = running.pop(child)
        if status == 0:
            found.add(mutant[:2])
            print(f"survived: {mutant.module}: {mutant.change}", flush=True)
    return found


def known() -> dict[tuple[str, str], bool]:
    """Return the listed survivors, and whether they are equivalent to the model."""
    listed = tomllib.loads(Path(__file__).with_name("mutants_survivors.toml").read_text(encoding="utf-8"))["survivor"]
    return {(row["module"], change): row["equivalent"] for row in listed for change in row["changes"]}


def main() -> int:
    """Run the mutants of the given modules, or of all; return 0 if enough are killed and every survivor is listed."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(tempfile.mkdtemp())
    for library in LIBRARIES:
        importlib.import_module(library)
    modules, start = sys.argv[1:] or list(TESTS), time.perf_counter()
    unchanged = [Mutant(module, "nothing", _file(module).read_text(encoding="utf-8")) for module in modules]
    if len(survivors(unchanged)) < len(modules):
        raise SystemExit("the tests fail on the unchanged model")
    jobs = [mutant for module in modules for mutant in mutants(module)]
    listed = {key: same for key, same in known().items() if key[0] in modules}
    found, same = survivors(jobs), {key for key, equivalent in listed.items() if equivalent}
    share = 1 - len(found - same) / (len(jobs) - len(same))
    for key in sorted(found - listed.keys()):
        print(f"survives and is not listed: {key}")
    for key in sorted(listed.keys() - found):
        print(f"listed, but killed or no mutant: {key}")
    print(f"{len(jobs)} mutants, {len(same)} equivalent, {share:.1%} of the others killed, {time.perf_counter() - start:.0f} s")
    return int(share < ENOUGH or found != listed.keys())


if __name__ == "__main__":
    sys.exit(main())
