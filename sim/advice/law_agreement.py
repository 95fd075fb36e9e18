"""Whether a step law is of the runs that a user describes: what both name must agree, and what the law does not name is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from model.architectures import published_shapes
from model.base.checks import ParameterError
from model.engines import engine_priors
from model.engines.step_law import StepLaw
from sim.advice.situation import Evidence

_TITLES = {"model": "model", "gpu": "GPU", "tensor_parallel": "tensor parallel size", "engine": "engine"}


def check(law: StepLaw, given: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Raise ParameterError for an option that contradicts the law; return what the law does not name, as assumed inputs.

    `given` has the options `model`, `gpu`, `tensor_parallel`, `engine`, `dtype` and `weights`, with None for those not given.
    """
    named = _named(law)
    for option, value in given.items():
        own = named.get(option)
        if value is not None and own is not None and not _same(option, value, own):
            raise ParameterError(
                f"--{option.replace('_', '-')} must be {own}, that of law {law.name}, got {value}; leave it out or take another law"
            )
    _check_family(law, given.get("model"), named["model"])
    found = []
    for option, title in _TITLES.items():
        if named[option] is None:
            words, value = law.facts.get(option), given.get(option)
            said = f"named in words only ({words})" if words else "not named by the law"
            taken = "" if value is None else f"; taken to be {value}"
            found.append(Evidence(f"{title} of the law", f"{said}{taken}", f"step law {law.name}", "assumed"))
    return tuple(found)


def note(law: StepLaw, unnamed: tuple[Evidence, ...]) -> str:
    """One sentence on what the law does not name, or in words only."""
    titles = [each.input.removesuffix(" of the law") for each in unnamed]
    listed = titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"
    only = ", or in words only" if any(law.facts.get(option) for option, title in _TITLES.items() if title in titles) else ""
    return f"the law does not name its {listed}{only} ({law.name}): that its times are of the measured run's is assumed"


def _check_family(law: StepLaw, model: str | None, named: str | None) -> None:
    """Raise ParameterError if the family of a published shape is not in the words that the law has for its model."""
    words = law.facts.get("model")
    if words is None or named is not None or model not in published_shapes.PRESETS:
        return
    family = re.split(r"[^a-z]", model.lower(), maxsplit=1)[0]
    if family not in words.lower():
        raise ParameterError(
            f"--model must be that of law {law.name} ({words}), got {model}; leave it out or take another law"
        )


def _named(law: StepLaw) -> dict[str, Any]:
    """What a law names, by option; None: not named, or only in words that cannot be compared."""
    prior = None if law.engine == engine_priors.ANY else law.engine
    return {
        "model": law.shape_name, "gpu": _gpu(law), "tensor_parallel": law.devices,
        "engine": engine_priors.named(law.facts.get("engine", "")) or prior,
        "dtype": None if law.kernels is None else law.kernels.dtype,
        "weights": None if law.kernels is None else law.kernels.weights,
    }  # fmt: skip


def _gpu(law: StepLaw) -> str | None:
    """Device of the kernels, or the only word of the law on its GPU that looks like a device: letters and digits, as in GB300."""
    if law.kernels is not None:
        return law.kernels.gpu
    found = {*re.findall(r"\b[a-z]{1,3}[0-9]{2,4}[a-z]?\b", law.facts.get("gpu", "").lower())}
    return found.pop() if len(found) == 1 else None


def _same(option: str, value: Any, own: Any) -> bool:
    if option not in ("model", "gpu"):
        return bool(value == own)
    return published_shapes.label(str(value)).lower() == published_shapes.label(str(own)).lower()
