"""Priors by engine: seconds per step, per running sequence and per pass of a draft, from published measurements of the engine.

Estimates x of n sources (logarithms of seconds) give a normal prior of the logarithm with their mean, and the standard deviation

    sqrt((1 + 1/n) (NU S^2 + sum (x - mean)^2) / (NU + n - 1)),

the spread between sources, drawn towards S, the general prior's, which counts as `NU` sources (two sources that agree by chance
shall not look sure); 1 + 1/n is for a new engine's own value about an uncertain mean. Fewer than `FEWEST` sources: the general
prior, a share of a plain step, stays.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.engines import step_law
from model.engines.kernel_times import KernelSource
from model.engines.step_terms import PRIORS, Prior

ANY = "any"
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", ANY)
"""Engines with priors; `any` takes the estimates of all of them."""
TERMS = ("step", "sequence", "draft_pass")
FEWEST, NU = 2, 2


@dataclass(frozen=True)
class EngineEstimate:
    """Estimate of one term of one engine from one source [s]."""

    engine: str
    term: str
    seconds: float
    source: str


def priors(engine: str) -> Mapping[str, Prior]:
    """Priors in seconds of the terms for which there are enough sources; medians in seconds [s].

    >>> {term: f"{1e3 * prior.median:.2f} ms" for term, prior in priors("llama.cpp").items()}
    {'draft_pass': '5.30 ms'}
    """
    checks.one_of("engine", engine, ENGINES)
    found = {}
    for term in TERMS:
        of = estimates(engine, term)
        if len(of) >= FEWEST:
            logs, general = np.log([each.seconds for each in of]), PRIORS[term]
            spread = (NU * general.sd**2 + np.sum((logs - logs.mean()) ** 2)) / (NU + logs.size - 1)
            why = f"{len(of)} sources of {engine if engine != ANY else 'all engines'}"
            found[term] = Prior(math.exp(logs.mean()), math.sqrt(spread * (1 + 1 / logs.size)), "s", general.meaning, why)
    return found


def used(engine: str | None, kernels: KernelSource | None) -> Mapping[str, Prior]:
    """Priors of an engine that a law uses: none without kernels, which say what else a step takes.

    Where the draft's kernels are known, `draft_pass` is what a pass takes beyond them, which no measurement separates.
    """
    if engine is None or kernels is None:
        return {}
    return {name: prior for name, prior in priors(engine).items() if name != "draft_pass" or kernels.draft is None}


def estimates(engine: str, term: str) -> tuple[EngineEstimate, ...]:
    """Estimates of a term, one for each source; `any`: those of all engines."""
    checks.one_of("term", term, TERMS)
    return tuple(each for each in _read() if each.term == term and engine in (ANY, each.engine))


def named(text: str) -> str | None:
    """Engine that a text begins with, or None.

    >>> named("vLLM 0.10.1"), named("TensorRT-LLM"), named("vllm-ascend"), named("mine")
    ('vllm', 'tensorrt-llm', None, None)
    """
    first = re.split(r"[\s,:=@]", text.strip().lower(), maxsplit=1)[0]
    return first if first in ENGINES else None


@functools.cache
def _read() -> tuple[EngineEstimate, ...]:
    path = Path(str(resources.files("model"))) / "engines" / "engine_priors.toml"
    return tuple(_estimate(each) for each in tomllib.loads(bounded_files.read_text(path))["estimate"])


def _estimate(said: Mapping[str, Any]) -> EngineEstimate:
    """Check an entry; the geometric mean of the coefficients, where laws are named."""
    if {*said} not in ({"engine", "term", "seconds", "source"}, {"engine", "term", "laws"}):
        raise ParameterError(f"an estimate needs engine, term, and either seconds and source or laws; got {', '.join(said)}")
    checks.one_of("engine", said["engine"], ENGINES[:-1])
    checks.one_of("term", said["term"], TERMS)
    if "laws" in said:
        seconds = float(np.exp(np.mean([math.log(step_law.load(name).coefficients[said["term"]]) for name in said["laws"]])))
        return EngineEstimate(said["engine"], said["term"], seconds, f"bundled laws {', '.join(said['laws'])}")
    checks.number("seconds", said["seconds"], 1e-9, 10)
    return EngineEstimate(said["engine"], said["term"], said["seconds"], said["source"])
