"""Plant random small faults in all four packages, and report which the quick tests catch: python -m tests.mutation.mutation_sample

First the quick tier runs once and records the lines of every test (`tests.mutation.coverage_map`). Then `--faults` faults per
package are drawn with `--seed` from all possible ones. Each is planted in a scratch copy of the tree, and the tests of its line
run, fastest first, until one fails or `--seconds` of tests have passed. A fault that survives is planted again and gets the
remaining tests, up to `--again` seconds. A fault that no test runs survives.

After a change to some modules, with all quick tests or, in minutes, with the tests of these modules:

    python -m tests.mutation.mutation_sample --only 'sim/engine/*' --faults 40
    python -m tests.mutation.mutation_sample --only 'sim/engine/*' --faults 40 --tests tests/sim/test_events.py

A test counts as a catch only if it passes, alone and in the same way, on the unchanged copy.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.coverage_map import PACKAGES
from tests.mutation.mutants import COMPARISONS, LIBRARIES, OPERATORS, ROOT, SWAPS, UNTOUCHED, _left_alone

BYTES = 12 << 30
QUICK = ["tests", *PACKAGES]
"""Folders with the tests and doctests of the quick tier."""
WORDS = ("help", "epilog", "rich_help_panel", "description")
"""Keywords with documentation, in which faults are not planted."""
LOOK = (
    "alignment", "alpha", "bbox", "bbox_to_anchor", "borderaxespad", "capsize", "capthick", "columnspacing", "dashes",
    "elinewidth", "facecolor",
    "figsize", "fontsize", "framealpha", "frameon", "ha", "handlelength", "handletextpad", "height_ratios", "hspace", "indent",
    "labelpad",
    "labelspacing", "left", "length", "linewidth", "linewidths", "loc", "lw", "markeredgecolor", "markeredgewidth",
    "markerfacecolor", "markersize", "ncols", "pad", "path_effects", "rotation", "rounding_size", "top", "va",
    "weight", "width_ratios", "wspace", "xytext", "zorder",
)  # fmt: skip
"""Keywords that affect only the look of a figure or a JSON text, not its content."""
REFUSING = ("ParameterError", "demand", "warn", "Option", "Argument", "BadParameter")
"""Calls with messages of errors and help."""
DROPPABLE = {
    "abs", "clip", "copy", "drop_nulls", "fill_nan", "fill_null", "filter", "head", "lower", "max", "mean", "median", "min",
    "round", "sort", "strip", "sum", "tail", "unique", "cumsum", "expanduser", "resolve", "reverse",
}  # fmt: skip

SYMMETRIC = {"max", "min", "maximum", "minimum", "fmax", "fmin", "hypot", "gcd", "lcm", "isclose", "array_equal", "multiply", "add"}
"""Calls that are symmetric in their first two arguments."""


class Fault(NamedTuple):
    """One small change of one file."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    source: str


class Outcome(NamedTuple):
    """Result of one fault: `caught` by a test, `survived` all `tests`, `unreached` by any test, or `equivalent`: not caught, and
    listed in `EQUIVALENT` because it has no visible effect.
    """

    fault: Fault
    state: str
    by: str
    tests: int


EQUIVALENT = Path(__file__).parent / "equivalent_faults.toml"
"""Faults without effect: `[[fault]]` with `path`, `before`, `after`, the reason `why`, and `line`, a part of the source line,
where `before` occurs in other lines of the file as well."""


def equivalent() -> list[dict[str, str]]:
    """Rows of `EQUIVALENT`."""
    rows: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("fault", [])
    return rows


def is_listed(fault: Fault, rows: Iterable[Mapping[str, str]]) -> bool:
    """Return whether a fault is listed in `EQUIVALENT`."""
    same = [row for row in rows if (row["path"], row["before"], row["after"]) == (fault.path, fault.before, fault.after)]
    if not any("line" in row for row in same):
        return bool(same)
    line = (ROOT / fault.path).read_text(encoding="utf-8").splitlines()[fault.line - 1]
    return any(row.get("line", "") in line for row in same)


# --- Faults ------------------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Return the replacements of a node with their kinds; None removes it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(node.left, [COMPARISONS[type(op)][0]()], node.comparators)
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS and not _of_words(node):
            changed = deepcopy(node)
            changed.op = OPERATORS[type(op)]()
            yield "arithmetic", changed
        case ast.Constant(value=bool(value)):
            yield "flag", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "number", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "number", ast.Constant(value * 1.5 if value else 1.0)
        case ast.Constant(value=str(value)) if (" " in value or "[" in value) and value.upper() != value.lower():
            yield "words", ast.Constant(value.upper() if value != value.upper() else value.lower())
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "sign", node.operand
        case ast.BoolOp(values=values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), values)
            yield "and/or", values[0] if len(values) == 2 else ast.BoolOp(node.op, values[:-1])
        case ast.If() | ast.IfExp() | ast.While():
            changed = deepcopy(node)
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield "condition", changed
        case ast.Name(id=name) if name in SWAPS:
            yield "min/max", ast.Name(SWAPS[name])
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in DROPPABLE:
            yield "dropped call", inner
        case ast.Call(args=[first, second, *rest]) if not (
            _called(node) in SYMMETRIC or any(isinstance(each, ast.Starred) for each in (first, second))
            or ast.dump(first) == ast.dump(second)
        ):  # fmt: skip
            yield "swapped arguments", ast.Call(node.func, [second, first, *rest], node.keywords)
        case ast.keyword(arg=str(name)) if name not in WORDS:
            yield "dropped keyword", None
    if isinstance(node, ast.Expr | ast.AugAssign):
        yield "dropped statement", ast.Pass()


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _of_words(node: ast.AST) -> bool:
    return any(isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
               for each in ast.walk(node))  # fmt: skip


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str, ast.AST | None]]:
    """Return every possible fault: the parent, the field and index in it, the node, the kind of fault and the replacement."""

    def visit(parent: ast.AST) -> Iterator[Any]:
        for field, value in ast.iter_fields(parent):
            if field in UNTOUCHED:
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or _left_alone(child) or _aside(child):
                    continue
                for kind, changed in changes(child):
                    yield parent, field, index if isinstance(value, list) else None, child, kind, changed
                if not isinstance(child, ast.Raise):
                    yield from visit(child)

    yield from visit(tree)


def _aside(node: ast.AST) -> bool:
    typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        return _called(node) in REFUSING or ast.unparse(node.func).startswith("checks.")
    return typing or (isinstance(node, ast.keyword) and node.arg in (*WORDS, *LOOK))


def planted(path: str, number: int) -> Fault:
    """Return the fault with this number in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    fault = _put(path, *next(each for at, each in enumerate(places(tree)) if at == number))
    return fault._replace(source=ast.unparse(ast.fix_missing_locations(tree)) + "\n")


def _put(path: str, parent: Any, field: str, index: int | None, child: ast.AST, kind: str, changed: ast.AST | None) -> Fault:
    """Change a place of the tree, and return the fault without its source."""
    line = getattr(child, "lineno", getattr(getattr(child, "value", None), "lineno", 0))
    whole = isinstance(child, ast.stmt)
    before = _first_line(child if whole else parent)
    if index is None:
        setattr(parent, field, changed)
    else:
        getattr(parent, field)[index : index + 1] = [] if changed is None else [changed]
    after = _first_line(changed if whole and changed is not None else parent)
    return Fault(path, line, kind, before, after, "")


def named(path: str) -> list[Fault]:
    """All faults of a file, without their sources."""
    found = []
    for parent, field, index, *rest in places(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        held = getattr(parent, field)
        whole = [*held] if index is not None else held
        found.append(_put(path, parent, field, index, *rest))
        if index is None:
            setattr(parent, field, whole)
        else:
            held[:] = whole
    return found


def _first_line(node: ast.AST) -> str:
    return (ast.unparse(node).strip().splitlines() or [""])[0]


def drawn(package: str, count: int, seed: int, only: Sequence[str] = ()) -> list[Fault]:
    """Draw `count` faults of a package, or of its files that match a pattern of `only`; all faults are equally likely."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
    files = [path for path in files if not only or any(fnmatch.fnmatch(path, pattern) for pattern in only)]
    sizes = {path: sum(1 for _ in places(ast.parse((ROOT / path).read_text(encoding="utf-8")))) for path in files}
    every = [(path, number) for path in files for number in range(sizes[path])]
    chosen = random.Random(f"{seed} {package}").sample(every, min(count, len(every)))
    return [planted(path, number) for path, number in chosen]


# --- Tests by line -----------------------------------------------------------------------------------------


class Map:
    """Recorded lines and durations [s] of tests."""

    def __init__(self, folder: Path, also: Sequence[str] = ()) -> None:
        import coverage

        self.also = also
        """Test files without a record: they run for every fault, after the recorded tests."""
        self.seconds: dict[str, float] = dict.fromkeys(also, 0.0)
        for path in folder.glob("durations-*.json"):
            self.seconds |= json.loads(path.read_text(encoding="utf-8"))
        self.parts = []
        within = re.compile(rf".*/((?:{'|'.join(PACKAGES)})/.*)")  # a map of another clone works too
        for path in folder.glob("lines-*"):
            data = coverage.CoverageData(str(path))
            data.read()
            names = {within.search(name): name for name in data.measured_files()}
            self.parts.append((data, {found[1]: name for found, name in names.items() if found}))
        self.lines: dict[str, dict[int, set[str]]] = {}

    def of(self, path: str) -> dict[int, set[str]]:
        """Tests by line of a file."""
        if path not in self.lines:
            found: dict[int, set[str]] = {}
            for data, names in self.parts:
                if path in names:
                    for line, contexts in data.contexts_by_lineno(names[path]).items():
                        found.setdefault(line, set()).update(each for each in contexts if each in self.seconds)
            self.lines[path] = found
        return self.lines[path]

    def of_folder(self, path: str) -> set[str]:
        """Tests that run any file in the folder of this one."""
        neighbours = {name for _, names in self.parts for name in names if Path(name).parent == Path(path).parent}
        return {test for name in neighbours for tests in self.of(name).values() for test in tests}

    def tests(self, fault: Fault, most: float, but: Collection[str] = ()) -> list[str]:
        """Return tests that run the line of a fault, one case of each test in turn, except `but`; for a function's defaults, the
        tests that call it. For lines that only an import runs, the tests of the file, or else of the folder.
        """
        lines = self.of(fault.path)
        found = lines.get(fault.line) or set()
        if not found:
            tree = ast.parse((ROOT / fault.path).read_text(encoding="utf-8"))
            spans = [(node.lineno, _body_of(node), node.end_lineno or node.lineno) for node in ast.walk(tree)
                     if isinstance(node, ast.FunctionDef | ast.Lambda)]  # fmt: skip
            first, body, last = max([span for span in spans if span[0] <= fault.line <= span[2]], default=(0, 0, 0))
            ran = {line for line in lines if body <= line <= (last if fault.line < body else fault.line)}
            near = [line for line in ran if lines[line]]
            if first and near:  # a default, or a statement over several lines, of which coverage records the first
                found = lines[min(near) if fault.line < body else max(near)]
            elif not first or ran:
                found = set().union(*lines.values()) or self.of_folder(fault.path)
        # One case of each test, then a second one of each: cases of one test check similar things.
        count: Counter[str] = Counter()
        turn = {}
        for name in sorted(found, key=lambda name: (self.seconds[name], name)):
            test = name.partition("[")[0]
            turn[name] = count[test]
            count[test] += 1
        chosen, spent = [], 0.0
        for name in sorted(found - {*but}, key=lambda name: (turn[name], self.seconds[name], name)):
            spent += self.seconds[name] + 0.005
            if spent > most and chosen:
                break
            chosen.append(name)
        return [*chosen, *(name for name in self.also if name not in but)]


def _body_of(node: ast.FunctionDef | ast.Lambda) -> int:
    """Return the first line of a function's body."""
    return node.body[0].lineno if isinstance(node, ast.FunctionDef) else node.body.lineno


def recorded(folder: Path, tests: Sequence[str]) -> None:
    """Run quick tests once and record their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    plugins = ["-p", "tests.mutation.coverage_map", "-p", "no:cacheprovider"]
    shared = ["-n", "2", "--dist", "loadfile" if tests == QUICK else "load"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *shared, *tests]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "MAP_OF": str(folder)}, check=False)
    if not Map(folder).seconds:
        raise SystemExit(f"no test of {', '.join(tests)} passed while lines were recorded in {folder}")


# --- Runs of tests -----------------------------------------------------------------------------------------------------------


def copied(to: Path) -> Path:
    """Make a scratch copy of the current tree."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)  # some tests ask git for the files
    subprocess.run(["git", "add", "-A"], cwd=to, check=True)
    return to


class _First:
    """Stores the first failed test in a file, because its process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text("", encoding="utf-8")


def forked(copy: Path, tests: list[str], said: Path, limit: float) -> int:
    """Start the tests in a fork that has imported the libraries, but none of our modules; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.alarm(int(limit))
        os.chdir(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "tests")]:
            if name != "tests" and name != "__main__":
                del sys.modules[name]
        sys.modules.pop("tests", None)
        sys.path[:] = [str(copy), *(each for each in sys.path if each not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = False
        options = ["-xq", "-p", "no:cacheprovider", "-o", "addopts=", "--doctest-modules", "--rootdir", str(copy)]
        code = int(sys.modules["pytest"].main([*options, *tests], plugins=[_First(said)]))
        os._exit(min(code, 100))
    except BaseException:
        os._exit(101)


class Copies:
    """Scratch copies in which tests run, one process each; `ask` starts a process, `answer` waits for the next to end."""

    def __init__(self, folder: Path, count: int) -> None:
        self.idle = [copied(folder / f"copy-{index}") for index in range(count)]
        self.running: dict[int, tuple[Path, Path, Callable[[str], None]]] = {}
        self.folder, self.asked = folder, 0

    def ask(self, fault: Fault | None, tests: list[str], expected: float, then: Callable[[str], None]) -> None:
        """Run tests with a planted fault or without; call `then` with the first failed test, "timeout", or "" if all passed."""
        while not self.idle:
            self.answer()
        copy = self.idle.pop()
        if fault is not None:
            _write(copy / fault.path, fault.source)
        self.asked += 1
        said = self.folder / f"said-{self.asked}"
        pid = forked(copy, tests, said, 60 + 6 * expected)

        def ended(state: str) -> None:
            if fault is not None:
                _write(copy / fault.path, (ROOT / fault.path).read_text(encoding="utf-8"))
            then(state)

        self.running[pid] = copy, said, ended

    def answer(self) -> None:
        pid, status = os.wait()
        copy, said, then = self.running.pop(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # processes that a test has left running
        first = said.read_text(encoding="utf-8") if said.exists() else ""
        self.idle.append(copy)
        if os.waitstatus_to_exitcode(status) == 0:
            then("")
        else:
            then(first or ("collection" if said.exists() else "timeout"))

    def finish(self) -> None:
        while self.running:
            self.answer()


def _write(path: Path, source: str) -> None:
    """Write a module and remove its bytecode: two versions of the same second and size could not be distinguished."""
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    path.write_text(source, encoding="utf-8")


def hunted(faults: Iterable[Fault], known: Map, copies: Copies, most: float, again: float = 0.0) -> list[Outcome]:
    """Return the outcome of every fault: after `most` seconds of tests and, for survivors, `again` seconds of the remaining tests.
    A test that also fails on the unchanged tree is ignored, and the fault is tested again.
    """
    outcomes: list[Outcome] = []
    sound: dict[str, bool] = {"collection": True, "timeout": True}
    done: dict[Fault, list[str]] = {}
    alike = equivalent()
    waiting = [*faults]

    def add(outcome: Outcome) -> None:
        fault, first_look = outcome.fault, outcome.fault not in done
        if outcome.state == "survived" and first_look and again:
            done[fault] = known.tests(fault, most)
            if known.tests(fault, again, done[fault]):
                later.append(fault)
                return
        state = outcome.state
        if state != "caught" and is_listed(fault, alike):
            state = "equivalent"
        outcomes.append(outcome._replace(state=state, tests=outcome.tests + len(done.get(fault, ()))))
        if outcome.state != "caught":
            print(f"{state} ({outcomes[-1].tests} tests): {fault.path}:{fault.line} [{fault.kind}]\n"
                  f"    - {fault.before}\n    + {fault.after}", flush=True)  # fmt: skip

    while waiting:
        doubted: list[tuple[Fault, str]] = []
        later: list[Fault] = []
        for fault in waiting:
            tests = known.tests(fault, again if fault in done else most, done.get(fault, ()))
            tests = [name for name in tests if sound.get(name, True)]
            if not tests:
                add(Outcome(fault, "survived" if fault in done else "unreached", "", 0))
                continue

            def ended(
                first: str, fault: Fault = fault, tests: list[str] = tests, doubted: list[tuple[Fault, str]] = doubted
            ) -> None:
                if not first:
                    add(Outcome(fault, "survived", "", len(tests)))
                elif sound.get(first, False):
                    add(Outcome(fault, "caught", first, len(tests)))
                else:
                    doubted.append((fault, first))

            copies.ask(fault, tests, sum(known.seconds[name] for name in tests), ended)
        copies.finish()
        for name in sorted({name for _, name in doubted}):

            def judged(first: str, name: str = name) -> None:
                sound[name] = not first

            copies.ask(None, [name], known.seconds.get(name, 10.0), judged)
        copies.finish()
        for fault, name in doubted:
            if sound[name]:
                add(Outcome(fault, "caught", name, 0))
        waiting = [fault for fault, name in doubted if not sound[name]] + later
    unsound = sorted(name for name, passes in sound.items() if not passes)
    if unsound:
        print(f"ignored, because they also fail on the unchanged tree: {', '.join(unsound)}")
    return outcomes


def summary(outcomes: list[Outcome]) -> str:
    """Rates by package with their 95 % intervals, and the survivors by kind."""
    from model.outcomes.intervals import wilson

    lines = ["package     faults  caught  survived  unreached  equivalent  rate without these  95 % interval     rate of all"]
    for name in (*PACKAGES, "all"):
        own = [each for each in outcomes if name in ("all", each.fault.path.partition("/")[0])]
        if own:
            count = Counter(each.state for each in own)
            tried = max(len(own) - count["equivalent"], 1)
            low, high = (float(end) for end in wilson(count["caught"] / tried, tried))
            lines.append(f"{name:11} {len(own):6}  {count['caught']:6}  {count['survived']:8}  {count['unreached']:9}"
                         f"  {count['equivalent']:10}  {count['caught'] / tried:18.1%}  {f'{low:.1%} to {high:.1%}':16}"
                         f"  {count['caught'] / len(own):.1%}")  # fmt: skip
    left = Counter(each.fault.kind for each in outcomes if each.state in ("survived", "unreached"))
    return "\n".join([*lines, "not caught, by kind: " + ", ".join(f"{kind} {count}" for kind, count in left.most_common())])


def main() -> int:
    """Draw, plant, run, report; return 0 if at least `--least` of each package are caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--faults", type=int, default=60, help="faults per package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--seconds", type=float, default=25.0, help="duration of tests per fault [s]")
    parser.add_argument("--again", type=float, default=60.0, help="duration of further tests per survivor [s]")
    parser.add_argument("--only", nargs="*", default=[], help="files to plant in, as patterns: 'figures/t*.py'")
    parser.add_argument("--also", nargs="*", default=[], help="test files newer than the map, run for every fault")
    parser.add_argument("--tests", nargs="+", default=QUICK, help="test files and folders that are recorded; default: all")
    parser.add_argument("--least", type=float, default=0.9, help="share of faults that must be caught")
    parser.add_argument("--map", type=Path, help="folder of the recorded lines; created if missing")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="JSON of all faults and the tests that caught them")
    asked = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        where = asked.map or Path(scratch) / "map"
        if not any(where.glob("lines-*")):
            recorded(where, asked.tests)
        print(f"lines recorded after {time.perf_counter() - start:.0f} s", flush=True)
        faults = [fault for package in asked.packages.split(",") for fault in drawn(package, asked.faults, asked.seed, asked.only)]
        if not faults:
            raise SystemExit(f"no possible fault in {', '.join(asked.only)} of {asked.packages}")
        known = Map(where, asked.also)
        if not known.seconds:
            raise SystemExit(f"{where} has no lines of tests: remove the folder, to record them again")
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = "1"
        os.environ.setdefault("DECODESIM_DATA", str(ROOT.parent / "shared" / "data"))
        (Path(scratch) / "shared").symlink_to(ROOT.parent / "shared")  # data that tests expect next to the tree
        for library in LIBRARIES:
            importlib.import_module(library)
        outcomes = hunted(faults, known, Copies(Path(scratch), asked.workers), asked.seconds, asked.again)
        if asked.output:
            rows = [each.fault._asdict() | {"state": each.state, "by": each.by, "tests": each.tests} for each in outcomes]
            text = json.dumps([{key: value for key, value in row.items() if key != "source"} for row in rows], indent=1)
            asked.output.write_text(text, encoding="utf-8")
    print(summary(outcomes))
    digest = hashlib.sha256("".join(sorted(each.fault.source for each in outcomes)).encode()).hexdigest()[:12]
    print(f"seed {asked.seed}, drawn {digest}, {time.perf_counter() - start:.0f} s")
    tried = [each for each in outcomes if each.state != "equivalent"]
    shares = [[each.state == "caught" for each in tried if each.fault.path.startswith(f"{name}/")] for name in PACKAGES]
    return int(min((sum(caught) / len(caught) for caught in shares if caught), default=1.0) < asked.least)


if __name__ == "__main__":
    sys.exit(main())
