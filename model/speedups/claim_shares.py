"""Shares of settings in the difference between two speed-ups, such as one that a paper claims and one that was measured.

A difference between two speed-ups is divided among the settings in which the two sides differ by Shapley values [Shapley1953] of
the logarithm of the predicted speed-up: the effect of changing one setting, averaged over all orders in which the settings can be
changed. Shares therefore add up, no setting is first, and exchanging the sides changes the sign of every share. What the settings
do not explain is the share `rest`.

[Shapley1953] L. S. Shapley. A value for n-person games. Contributions to the Theory of Games II, 1953.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.engines import engine_priors, law_fit
from model.engines.cells import MOST_DRAFT, MOST_SEQUENCES, Floats
from model.engines.kernel_times import USUAL_CONTEXT, KernelSource
from model.engines.step_law import StepLaw
from model.speedups.explanation import acceptance_length, check_speedup, interval, step_parts


@dataclass(frozen=True)
class Setting:
    """Everything that a predicted speed-up depends on.

    Parameters
    ----------
    model, gpu, tensor_parallel, dtype, weights, draft
        Names of the kernels' source; see `model.engines.kernel_times.KernelSource`.
    engine
        Engine whose priors are used (`model.engines.engine_priors.ENGINES`).
    batch, context
        Running sequences, and cached positions of each.
    draft_length, draft_passes
        Drafted tokens per step (K), and passes of the draft, of which at most K count; None: one per drafted token.
    draft_context_budget
        Largest number of cached positions of each sequence that a pass of the draft reads; None: all.
    acceptance
        Conditional acceptance rates by draft position; the last one also holds for later positions.
    """

    model: str
    gpu: str
    draft_length: int
    acceptance: tuple[float, ...]
    tensor_parallel: int = 1
    dtype: str | None = None
    weights: str | None = None
    draft: str | None = None
    engine: str = engine_priors.ANY
    batch: float = 1.0
    context: float = float(USUAL_CONTEXT)
    draft_passes: int | None = None
    draft_context_budget: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("engine", self.engine, engine_priors.ENGINES)
        checks.number("batch", self.batch, 1e-3, MOST_SEQUENCES)
        checks.number("context", self.context, 0, checks.MAX_TOKENS)
        checks.whole("draft_length", self.draft_length, 1, MOST_DRAFT)
        if self.draft_passes is not None:
            checks.whole("draft_passes", self.draft_passes, 0, MOST_DRAFT)
        if not self.acceptance:
            raise ParameterError("acceptance is never assumed: give rates by draft position, a rate, or an acceptance length")
        for index, rate in enumerate(self.acceptance):
            checks.number(f"acceptance[{index}]", rate, 0, 1)
        self.kernels  # noqa: B018  building the source checks its names

    @property
    def kernels(self) -> KernelSource:
        """Source of the kernels' seconds."""
        return KernelSource(
            model=self.model, gpu=self.gpu, tensor_parallel=self.tensor_parallel, dtype=self.dtype, draft=self.draft,
            weights=self.weights, draft_context_budget=self.draft_context_budget,
        )

    @property
    def passes(self) -> int:
        """Passes of the draft per step; a mixture of two sides may have fewer drafted tokens than the passes of one of them."""
        return self.draft_length if self.draft_passes is None else min(self.draft_passes, self.draft_length)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step and sequence, bonus token counted [-]."""
        return acceptance_length(self.acceptance, self.draft_length)


GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "dtype", "weights"), "GPU": ("gpu",), "tensor parallel": ("tensor_parallel",),
    "draft": ("draft", "draft_passes", "draft_context_budget"), "draft length": ("draft_length",), "acceptance": ("acceptance",),
    "batch": ("batch",), "context": ("context",), "engine": ("engine",),
}  # fmt: skip
"""Settings whose difference has a share, by name, and the fields that they consist of."""
REST = "rest"
_HARDWARE = ("model", "GPU", "tensor parallel", "draft")
_JOINED = ", ".join(_HARDWARE)


@dataclass(frozen=True)
class Share:
    """Share of a setting in the logarithm of the ratio of two speed-ups: mean, and 80 % interval.

    `mine` and `claimed` are the values of the two sides, as text; exp(share) is the factor by which the setting changes the
    speed-up from the claimed to mine.
    """

    setting: str
    mine: str
    claimed: str
    share: float
    low: float
    high: float


def shapley(names: Sequence[str], value: Callable[[frozenset[str]], Floats]) -> dict[str, Floats]:
    """Shapley values: the increase of `value` when a name is added to a set, averaged over all orders.

    They add up to value(all names) - value(no name).

    >>> game = {"": 0.0, "a": 1.0, "b": 2.0, "ab": 5.0}
    >>> {name: float(each) for name, each in shapley("ab", lambda found: np.array(game["".join(sorted(found))])).items()}
    {'a': 2.0, 'b': 3.0}
    """
    size = len(names)
    known = {frozenset(some): value(frozenset(some)) for count in range(size + 1) for some in itertools.combinations(names, count)}
    found = {}
    for name in names:
        total: Floats = np.zeros(())
        for without, before in known.items():
            if name not in without:
                weight = 1 / (size * math.comb(size - 1, len(without)))
                total = total + weight * (known[without | {name}] - before)
        found[name] = total
    return found


def log_speedup(setting: Setting) -> Floats:
    """Logarithm of the predicted speed-up, for draws from the priors that all settings share; shape (draws,)."""
    steps = _log_steps(setting.kernels, setting.engine, setting.batch, setting.context, setting.draft_length, setting.passes)
    return np.asarray(math.log(setting.acceptance_length) - steps)


@lru_cache(maxsize=1024)
def _log_steps(kernels: KernelSource, engine: str, batch: float, context: float, draft_length: int, passes: int) -> Floats:
    """Logarithm of the time of a step with drafts in plain steps, for draws from the priors; shape (draws,)."""
    law = _priors(kernels, engine)
    plain, drafting = (step_parts(law, batch, length, number, context) for length, number in ((0, 0), (draft_length, passes)))
    return np.asarray(np.log(drafting.total / plain.total))


@lru_cache(maxsize=128)
def _priors(kernels: KernelSource, engine: str) -> StepLaw:
    return law_fit.fit(None, "priors", unit="step_ms", kernels=kernels, engine=engine)


def differences(mine: Setting, claimed: Setting) -> list[str]:
    """Names of the settings in which two sides differ."""
    return [name for name, of in GROUPS.items() if any(getattr(mine, each) != getattr(claimed, each) for each in of)]


def shares(mine: Setting, my_speedup: float, claimed: Setting, claimed_speedup: float) -> tuple[Share, ...]:
    """Share of each setting in log(my speed-up / claimed speed-up), and of what they do not explain (`rest`), largest first.

    Where mixtures of the two sides cannot exist (a model that is not divisible by the other's devices), model, GPU, tensor parallel
    size and draft have one share.
    """
    check_speedup(my_speedup, mine.draft_length)
    check_speedup(claimed_speedup, claimed.draft_length, "claimed speedup")
    names = differences(mine, claimed)
    fields_of = dict(GROUPS)
    try:
        found = shapley(names, lambda chosen: log_speedup(_mixed(mine, claimed, chosen, fields_of)))
    except ParameterError:
        log_speedup(mine), log_speedup(claimed)  # an error of one side alone is the user's
        joined = [name for name in names if name in _HARDWARE]
        if len(joined) < 2:
            raise
        fields_of |= {_JOINED: tuple(each for name in _HARDWARE for each in GROUPS[name])}
        names = [_JOINED, *(name for name in names if name not in _HARDWARE)]
        found = shapley(names, lambda chosen: log_speedup(_mixed(mine, claimed, chosen, fields_of)))
    whole = math.log(my_speedup / claimed_speedup)
    # The draws are shared while settings change one by one. Two engines, models or GPUs have separate errors, so that what is left
    # of the ratio of both sides is less certain; its mean stays the same, so that shares add up.
    apart = len(log_speedup(mine)) // 2 if {*names} & {*_HARDWARE, _JOINED, "engine"} else 0
    rest = whole - (np.roll(log_speedup(mine), apart) - log_speedup(claimed))
    rows = []
    for name, each in (*found.items(), (REST, rest)):
        low, high = interval(np.atleast_1d(each))
        own, other = ("", "") if name == REST else (_said(side, fields_of[name]) for side in (mine, claimed))
        rows.append(Share(name, own, other, float(np.mean(each)), low, high))
    return tuple(sorted(rows, key=lambda row: (row.setting == REST, -abs(row.share))))


def _mixed(mine: Setting, claimed: Setting, chosen: Iterable[str], fields_of: Mapping[str, tuple[str, ...]]) -> Setting:
    """The claimed setting with the chosen parts of mine."""
    return replace(claimed, **{each: getattr(mine, each) for name in chosen for each in fields_of[name]})


def _said(side: Setting, of: Sequence[str]) -> str:
    values = {each: getattr(side, each) for each in of}
    if "acceptance" in values:
        rates = side.acceptance
        same = len({*rates}) == 1
        return f"{rates[0]:.3g}" if same else "/".join(f"{rate:.2f}" for rate in rates[: side.draft_length])
    if "draft_passes" in values:
        passes = values["draft_passes"]
        values["draft"] = values["draft"] or ("not named" if passes is not None else "not named, a pass per token")
        values["draft_passes"] = None if passes is None else f"{passes} pass{'' if passes == 1 else 'es'} a step"
    if values.get("draft_context_budget") is not None:
        values["draft_context_budget"] = f"{values['draft_context_budget']:,} positions read"
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values.values() if value is not None]
    return ", ".join(shown) or "-"


def setting_names() -> tuple[str, ...]:
    """Fields of a setting."""
    return tuple(field.name for field in fields(Setting))
