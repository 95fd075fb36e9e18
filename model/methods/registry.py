"""Methods by name: the modules of each method and the functions that it offers.

A name with a dot is the dotted path of a module outside the project. Importing it runs its code, so a name in a file is not enough:
the module must be allowed explicitly, on the command line or as an argument (`allow_modules`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

from model.base import checks
from model.base.checks import ParameterError
from model.costs.step_costs import StepCosts
from model.interpret.account import Work
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.method_parameters import MethodParameters
from model.methods.prediction import Prediction, PredictionPoints, predict_separately
from model.steps import Steps

PLAIN = "autoregressive"
"""Plain decoding, the baseline of all speed-ups."""
OPTION = "--methods"
"""Command line option that allows outside methods; in Python `methods=(...)`."""
_PARTS = ("OUTCOMES", "EXACT")
_allowed: ContextVar[tuple[str, ...]] = ContextVar("methods from outside that may be imported", default=())


def names() -> list[str]:
    """Names of the methods: the folders of `model/methods`, then the outside methods that are currently allowed."""
    return [*_own(), *allowed_modules()]


@cache
def _own() -> tuple[str, ...]:
    """Methods of the project; cached, because each point of a sweep asks for them."""
    return tuple(sorted(each.name for each in resources.files("model.methods").iterdir() if (each / "algorithm.py").is_file()))


def allowed_modules() -> tuple[str, ...]:
    """Outside methods that may currently be imported."""
    return _allowed.get()


@contextlib.contextmanager
def allow_modules(modules: Sequence[Any]) -> Iterator[None]:
    """Allow the methods of these modules (dotted paths), in addition to those already allowed; each is imported and checked.

    >>> with allow_modules(["os.path"]):
    ...     pass
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: method 'os.path' is a module without Parameters, so it is not a method; known: adaptive, ...
    """
    wanted: list[Any] = [modules] if isinstance(modules, str) else [*modules]  # items of any type, checked below
    for name in wanted:
        if not isinstance(name, str) or "." not in name:
            bound = "the dotted path of a module, such as my_package.mine; the project's own methods need not be named"
            raise ParameterError(f"{OPTION} must be {bound}, got {checks.shown(name)}")
        _imported(name)
    token = _allowed.set((*dict.fromkeys((*allowed_modules(), *wanted)),))
    try:
        yield
    finally:
        _allowed.reset(token)


def algorithm(name: Any) -> ModuleType:
    """Module with a method's parameters and process: `model.methods.NAME.algorithm`, or an allowed outside module."""
    known = names()
    if isinstance(name, str) and name in known:
        return _imported(name) if "." in name else _module(name, "algorithm")
    if isinstance(name, str) and "." in name:
        what = f"method {checks.shown(name)} is not one of the project's, and outside modules are imported only if allowed"
        raise ParameterError(f"{what}; to run that module, add {OPTION} {checks.shown(name)[1:-1]}; known: {', '.join(known)}")
    raise checks.unknown("method", name, known)


@cache
def _module(name: str, part: str) -> ModuleType:
    """A module of one of the project's methods."""
    return importlib.import_module(f"model.methods.{name}.{part}")


def _imported(name: str) -> ModuleType:
    """Import an outside module and check that it has the required parts of a method."""
    known = ", ".join(names())
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # outside code may raise anything, including SystemExit
        first = (str(error).splitlines() or [""])[0][:200]
        why = first if isinstance(error, ImportError) else f"{type(error).__name__}{f': {first}' if first else ''}"
        raise ParameterError(f"method {checks.shown(name)} cannot be imported: {why}; known: {known}") from None
    kind = getattr(module, "Parameters", None)
    if kind is None:
        raise ParameterError(f"method {name!r} is a module without Parameters, so it is not a method; known: {known}")
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or not issubclass(kind, MethodParameters):
        base = f"{MethodParameters.__module__}.{MethodParameters.__name__}"
        raise ParameterError(f"method {name!r} must have a dataclass Parameters derived from {base}, got {checks.shown(kind)}")
    for part in _PARTS:
        if not hasattr(kind, part):
            raise ParameterError(f"method {name!r} must define {part} in its Parameters; see CONTRIBUTING.md")
    require_function(module, "decode")
    return module


def require_function(module: ModuleType, part: str) -> None:
    """Raise ParameterError if the module lacks the function `part`."""
    if not callable(getattr(module, part, None)):
        raise ParameterError(f"method {module.__name__!r} must have a function {part}, and has none; see CONTRIBUTING.md")


# --- Functions of a method ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """Parameters, process, closed forms and vectorised paths of a method; None: not offered."""

    name: str
    kind: type[MethodParameters]
    decode: Callable[..., Steps]
    """The process: (parameters, prompt, tokens, ...)."""
    predict: Callable[..., Prediction]
    """Expectations: (parameters, tokens, law or laws by outcome, cost)."""
    walk: Callable[..., Any]
    """Time and unit-time of a block of replications: (parameters, tokens, cost, outcomes)."""
    predict_together: Callable[[PredictionPoints[Any]], Prediction] | None = None
    """Expectations at many points at once."""
    last_matters: bool = True
    """True if the outcome of the last token can change the time of a decoding."""
    work: Callable[..., Work | None] | None = None
    """Expected work of the passes: (parameters, tokens, law); None: not known for these parameters."""
    work_of_laws: Callable[..., Work | None] | None = None
    """`work` under several laws at once, as arrays: (parameters, tokens, laws)."""
    work_of_lengths: Callable[..., Work | None] | None = None
    """`work` of a single sequence of several numbers of tokens, which rise: (parameters, lengths, laws), shape (laws, lengths)."""
    timed_work: Callable[..., Work | None] | None = None
    """Expected work under several laws, as arrays, where it depends on times: (parameters, tokens, laws, cost)."""
    timed_work_of_costs: Callable[..., Work | None] | None = None
    """`timed_work` at several costs at once: (parameters, tokens, laws, joined costs), shape (costs, laws)."""
    operations: Callable[..., float] | None = None
    """Arithmetic of a run, in units of one token in the target: (parameters, cost, rounds, account)."""
    slowest: Callable[..., tuple[float, float]] | None = None
    """Upper bounds of time and unit-time: (parameters, tokens, cost)."""
    distribution: Callable[..., tuple[Any, Any] | None] | None = None
    """Latencies and their probabilities: (parameters, tokens, law, cost)."""
    straggler_loss: Callable[..., float | None] | None = None
    """Loss of static batches by waiting for their slowest sequence: (parameters, cost, rounds, latency, tokens), with the index of
    each batch's cost after them for several numbers of tokens (`predicts_lengths_together`)."""
    paper_formula: Callable[[ComparedRuns], FormulaPoint | None] | None = None
    """Value of the paper's formula for real runs with one set of parameters; None: not defined. See `FORMULA_CHECK`."""
    claim_bound: Callable[[ClaimTerms], Limit] | None = None
    """Largest speed-up that is possible with the terms of a claim. See `CLAIMS`."""
    claim_formula: Callable[[ClaimTerms], Limit] | None = None
    """Speed-up of the paper's formula with the terms of a claim, if that is smaller than the bound."""

    steady_state: Callable[..., Any] | None = None
    """Time per token in the long run: (parameters, laws, `SteadyPrices`), shape (laws, cells) [s]."""

    @property
    def has_work(self) -> bool:
        """True if the expected work is known for some parameters."""
        return self.work is not None or self.timed_work is not None

    def expected_work(self, parameters: Any, tokens: int, law: Any, cost: StepCosts) -> Work | None:
        """Expected work of the passes under a law, at these costs if it depends on times; None: not known."""
        found = None if self.work is None else self.work(parameters, tokens, law)
        if found is None and self.timed_work is not None:
            found = self.timed_work(parameters, tokens, [law], cost)
            found = None if found is None else found.at(0)
        return found

    def work_of_all(self, parameters: Any, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work | None:
        """`expected_work` under several laws, as arrays; None: not known, or not for all of them at once."""
        found = None if self.work_of_laws is None else self.work_of_laws(parameters, tokens, laws)
        if found is None and self.timed_work is not None:
            found = self.timed_work(parameters, tokens, laws, cost)
        return found

    def predict_points(self, points: PredictionPoints[Any]) -> Prediction:
        """Expectations at many points; arrays with one value per point."""
        return predict_separately(self.predict, points) if self.predict_together is None else self.predict_together(points)


OPTIONAL = (
    "work", "work_of_laws", "work_of_lengths", "timed_work", "timed_work_of_costs", "operations", "slowest", "distribution",
    "straggler_loss", "paper_formula", "claim_bound", "claim_formula", "steady_state",
)  # fmt: skip


def method(name: str) -> Method:
    """All functions of a method; an outside method has them all in a single module."""
    process = algorithm(name)
    if "." in name:
        return _offered(name, process, process, process)
    return _offered(name, process, _module(name, "theory"), _module(name, "paths"))


def _offered(name: str, process: ModuleType, theory: ModuleType, paths: ModuleType) -> Method:
    more = {part: getattr(theory, part, None) for part in OPTIONAL}
    together, last = getattr(theory, "predict_points", None), getattr(paths, "LAST_MATTERS", True)
    return Method(name, process.Parameters, process.decode, theory.predict, paths.walk, together, last, **more)


def parameters(name: Any) -> type[MethodParameters]:
    """Class of a method's parameters; imports nothing else of the method."""
    kind: type[MethodParameters] = algorithm(name).Parameters
    return kind


def label(name: str, *, short: bool = False) -> str:
    """Name of a method in figures and reports, full or short; unknown names are returned unchanged.

    >>> label("ppd"), label("ppd", short=True), label("ppd-streams", short=True), label("mine.own")
    ('Predictive Pipelined Decoding', 'PPD', 'PPD, streams', 'mine.own')
    """
    own, _, how = name.partition("-")  # runs over processes and over streams have separate rows
    if own not in names():
        return name
    kind = parameters(own)
    said = (kind.SHORT_LABEL if short else "") or kind.LABEL or own
    return f"{said}, {how}" if how else said


def check_complete(name: str) -> None:
    """Raise ParameterError if an outside method lacks the function of a view, because views are compared with one another, or says
    only half of how its parameters depend on costs, because points of a grid would share parameters that differ."""
    for part in ("predict", "walk") if "." in name else ():
        require_function(algorithm(name), part)
    kind, base = parameters(name), MethodParameters
    if (kind.with_costs is base.with_costs) != (kind.decides_by_costs is base.decides_by_costs):
        raise ParameterError(f"method {name} must override with_costs and decides_by_costs together, got one alone")
