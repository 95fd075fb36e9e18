"""Times of measured runs by a step law: cost models of the runs' models, runs that a law cannot price, and parts that it lacks.

A step law (`model.engines.step_law`) knows the steps of an engine: passes of a target over one or more tokens per sequence, and
passes of a draft. It knows neither a third model, nor several units that make passes concurrently. It has no facts of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from model.architectures import published_shapes
from model.architectures.transformer import Shape, restored
from model.base.checks import ParameterError
from model.base.table_records import build
from model.engines.cells import Floats
from model.engines.law_costs import LawDraft, LawTarget
from model.engines.step_law import StepLaw
from model.hardware.cost_models import Hardware
from model.logs.measured_runs import MeasuredRuns, TimedDecoding
from model.methods import registry

_KNOWN = ("target", "draft")
"""Roles whose passes a step law prices."""


def mark(law: StepLaw) -> str:
    """Text of the column `mismatch`: a law names no machine that could be compared with that of the runs."""
    return f"times by step law {law.name}, which names no machine"


def hardware(runs: MeasuredRuns, law: StepLaw) -> dict[str, Hardware]:
    """Cost models of the target and the draft, by role.

    Shapes are those of the runs, else those that the law names; a draft of unknown shape has one layer.
    """
    target = _shape(runs, "target") or _of_law(law, "target")
    if target is None:
        raise ParameterError(
            f"shape of the target is required with law {law.name}, and neither the runs (about.shapes) nor the law have it;"
            " measure the runs again, or fit the law with --model"
        )
    found: dict[str, Hardware] = {"target": LawTarget(law, target)}
    if "draft" in runs.log.models:
        draft = _shape(runs, "draft") or _of_law(law, "draft") or replace(target, layers=runs.log.models["draft"]["layers"])
        found["draft"] = LawDraft(law, draft)
    return found


def _shape(runs: MeasuredRuns, role: str) -> Shape | None:
    table = runs.about["shapes"].get(role)
    return None if table is None else build(Shape, restored(table), f"about.shapes.{role}", "it is written with the runs")


def _of_law(law: StepLaw, role: str) -> Shape | None:
    """Shape of a model that the law names, or None."""
    of = law.kernels
    name = law.shape_name if role == "target" else None if of is None else of.draft
    return None if name is None else published_shapes.named_shape(name, None if of is None else of.dtype)


def mismatches(runs: MeasuredRuns, law: StepLaw) -> list[str]:
    """Differences in depth or width between the models of the runs and those that the law names; others have none."""
    found = []
    for role in _KNOWN:
        ours, theirs = _of_law(law, role), _shape(runs, role)
        for name in ("layers", "hidden", "vocabulary") if ours is not None and theirs is not None else ():
            if getattr(ours, name) != getattr(theirs, name):
                bound = f"{name} of the {role} must be {getattr(theirs, name)}, as in the runs"
                found.append(f"{bound}, got {getattr(ours, name)} in law {law.name}")
                break
    return found


def split(runs: MeasuredRuns, law: StepLaw) -> tuple[dict[int, TimedDecoding], list[str]]:
    """Timed decodings that a law can price, by number, and a sentence on each kind of those that it cannot."""
    kept: dict[int, TimedDecoding] = {}
    left: dict[str, dict[str, int]] = {}
    for number, timed in runs.timed.items():
        why = _unpriced(timed)
        if why is None:
            kept[number] = timed
        else:
            methods = left.setdefault(why, {})
            methods[timed.decoding.method] = methods.get(timed.decoding.method, 0) + 1
    said = [f"{_counted(methods)} left out: {why}" for why, methods in left.items()]
    if not kept:
        raise ParameterError(
            f"runs must include some on one unit and without a medium model, for step law {law.name}; got {'; '.join(said)}; leave"
            " out --law, so that profiles predict them"
        )
    return kept, said


def _unpriced(timed: TimedDecoding) -> str | None:
    """Reason why a law has no time for a decoding, or None."""
    if timed.units > 1:
        return "a step law has no times of several units"
    others = [kind.role for kind in timed.decoding.account.passes_by_kind if kind.role not in _KNOWN]
    return f"a step law has no times of a {others[0]} model" if others else None


def _counted(methods: dict[str, int]) -> str:
    number = sum(methods.values())
    return f"{number} decoding{'s' if number > 1 else ''} ({', '.join(registry.label(name, short=True) for name in methods)})"


def missing(timed: TimedDecoding, target: Hardware) -> list[str]:
    """Parts of a run that no step of an engine has, so that a law cannot know them; they are assumed to take 0.

    The reads of full passes are in the law; those after some of the layers, and the handling of several hypotheses, are not.
    """
    reads = [each.question for each in timed.decoding.reads if each.question.role == "target"]
    found = ["reads after some of the layers"] if any(each.layer < target.shape.layers for each in reads) else []
    return found + (["several hypotheses"] if any(each.kind == "beams" for each in reads) else [])


def notes(law: StepLaw, kept: dict[int, TimedDecoding]) -> Iterator[str]:
    """Sentences on decodings for which a law rests on less than its cells: on priors, or on extrapolation."""
    drafted = {number: max((length for _, length in each.decoding.rounds), default=0) for number, each in kept.items()}
    if any(drafted.values()) and (law.cells is None or not law.cells.draft_length.any()):
        yield "no cell of the law has a draft: the times of draft passes and verifications are those of its priors"
    sequences = [each.decoding.settings.get("sequences", 1) for each in kept.values()]
    beyond = law.beyond(sequences, [*drafted.values()])
    if beyond.any():
        assert law.cells is not None
        most = kept[[*kept][int(np.argmax(beyond))]].decoding
        cells = f"sequences {_range(law.cells.sequences)}, draft lengths {_range(law.cells.draft_length)}"
        yield (
            f"{int(np.count_nonzero(beyond))} of {len(kept)} decodings are beyond the law's cells ({cells}), by up to a factor of"
            f" {2 ** float(beyond.max()):.2g} in sequences or in tokens per pass ({registry.label(most.method, short=True)})"
        )


def _range(values: Floats) -> str:
    return f"{values.min():g}" if values.min() == values.max() else f"{values.min():g} to {values.max():g}"
