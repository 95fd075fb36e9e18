"""A map over all methods: the fastest one by running sequences and context, with those that are within its interval.

Every method is evaluated in closed form, as advice does (`sim.advice.other_methods`), with the fastest of its settings. Draw i of
the acceptance and of the step law is the same for all methods, so that the interval of the ratio of two speeds holds what both
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from model.advice.draft_choice import DraftChoice, ratio_interval
from model.architectures import draft_heads
from model.base import checks, strict_json
from model.base.checks import ParameterError
from model.engines.cells import Floats
from sim.advice import situation as situations
from sim.advice.advice import METHOD, PLAIN, setting_of
from sim.advice.other_methods import DRAWS, MethodSpeed, evaluate_cells, gpu_ms_per_token, noise_of
from sim.advice.situation import Evidence, Inputs, Situation

if TYPE_CHECKING:
    import polars

KIND = "method-map"
SCHEMA_VERSION = 1
BATCHES = (1, 4, 16, 64)
CONTEXTS = (1024, 8192, 65536)
"""Positions of the contexts, where none are given; those that the model was not trained for are left out."""
MOST_CELLS = 400
NOT_USED = {
    "context": "--contexts has the contexts of a map", "rate": "a map has the numbers that run: --batch",
    "slo_tpot_ms": "a map is of the fastest methods, whose TPOT it lists",
}  # fmt: skip
"""Inputs of advice that a map does not use, with the reason."""


@dataclass(frozen=True, eq=False)
class MethodCell:
    """A number of running sequences and a context.

    Parameters
    ----------
    batch, context
        Running sequences of one replica, and cached positions of each.
    speeds
        All methods that could be evaluated, plain decoding among them; none where the memory does not hold the sequences.
    noise
        Relative error of a measurement in each draw; shape (draws,).
    """

    batch: int
    context: int
    speeds: tuple[MethodSpeed, ...]
    noise: Floats

    @property
    def fits(self) -> bool:
        """True if the memory holds the sequences."""
        return bool(self.speeds)

    @cached_property
    def fastest(self) -> MethodSpeed:
        """The method with the largest speed-up; of equal ones the first, so that plain decoding wins."""
        return max(self.speeds, key=lambda each: each.row["speedup"])

    @cached_property
    def cheapest(self) -> MethodSpeed:
        """The method with the least GPU-time per token; of equal ones the first."""
        return min(self.speeds, key=lambda each: gpu_ms_per_token(each.row))

    @cached_property
    def tied(self) -> tuple[MethodSpeed, ...]:
        """Methods other than the fastest whose interval of the ratio of their speed to it includes 1; the fastest first."""
        best = self.fastest
        found = [each for each in self.speeds if each is not best and ratio_to(each, best, self.noise)[1] >= 1]
        return tuple(sorted(found, key=lambda each: -each.row["speedup"]))

    def without(self, label: str) -> MethodCell:
        """The cell if this method were not known."""
        return replace(self, speeds=tuple(each for each in self.speeds if each.label != label))


def ratio_to(one: MethodSpeed, other: MethodSpeed, noise: Floats) -> tuple[float, float]:
    """Bounds of the ratio of two speeds, on the same draws, error of a measurement included [-]."""
    low, high = ratio_interval(one.draws / other.draws, noise, max(one.beyond, other.beyond))
    point = one.row["speedup"] / other.row["speedup"]
    return min(float(low), point), max(float(high), point)


@dataclass(frozen=True, eq=False)
class MethodMap:
    """A map over all methods; `print` shows it.

    Parameters
    ----------
    situation
        Everything that it is computed from.
    cells
        By context, and by running sequences in it.
    left_out
        Methods that could not be evaluated, with the reason.
    notes
        What was assumed.
    """

    situation: Situation
    cells: tuple[MethodCell, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def fitting(self) -> list[MethodCell]:
        """Cells whose sequences the memory holds."""
        return [each for each in self.cells if each.fits]

    @property
    def subject(self) -> str:
        """Model and devices, as printed text."""
        said = self.situation
        return f"{said.name or said.law.name} on {said.gpus} x {said.gpu or 'GPU'}"

    @property
    def verdict(self) -> str:
        """The map in a sentence."""
        cells = self.fitting
        counted = Counter(each.fastest.label for each in cells)
        parts: list[str] = []
        for label, count in counted.most_common():
            speeds = sorted(each.fastest.row["speedup"] for each in cells if each.fastest.label == label)
            span = " to ".join(dict.fromkeys(f"{each:.2f}x" for each in (speeds[0], speeds[-1])))
            parts.append(f"{label} in {count}{'' if parts else f' of {len(cells)} cells'} ({span})")
        tied = sum(bool(each.tied) for each in cells)
        more = f"; in {tied} cell{'s' if tied > 1 else ''} another method is within its interval" if tied else ""
        cheap = Counter(each.cheapest.label for each in cells).most_common()
        least = ", ".join(f"{label} in {count}" for label, count in cheap)
        text = f"Fastest: {', '.join(parts)}{more}; least GPU-time per token: {least}"
        return text + ("; kernels only: the engine's overhead is not included" if self.situation.kernels_only else "")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each method in each cell, and one without a method for each cell that does not fit, as JSON has them."""
        found: list[dict[str, Any]] = []
        for cell in self.cells:
            tied = {each.label for each in cell.tied} if cell.fits else set()
            for each in cell.speeds:
                row = each.row
                found.append({
                    "batch": cell.batch, "context": cell.context, "fits": True, "method": row["method"], "label": each.label,
                    "setting": row["setting"], "speedup": row["speedup"], "speedup_low": row["speedup_low"],
                    "speedup_high": row["speedup_high"], "tpot_ms": row["tpot_ms"], "gpus": row["gpus"],
                    "gpu_ms_per_token": gpu_ms_per_token(row), "exact": row["exact"], "fastest": each is cell.fastest,
                    "tied": each.label in tied, "least_gpu_time": each is cell.cheapest,
                })  # fmt: skip
            if not cell.fits:
                nothing = dict.fromkeys(COLUMNS)
                found.append({**nothing, "batch": cell.batch, "context": cell.context, "fits": False})
        return found

    @property
    def table(self) -> polars.DataFrame:
        """The rows as a table; `write_csv` writes it."""
        import polars

        return polars.DataFrame(self.rows, infer_schema_length=None)

    def document(self) -> dict[str, Any]:
        """The map as a JSON document (`sim schema map` describes it)."""
        said = self.situation
        found: dict[str, Any] = {
            "kind": KIND, "schema_version": SCHEMA_VERSION, "verdict": self.verdict, "model": said.name, "gpu": said.gpu,
            "tensor_parallel": said.tensor_parallel, "gpus": said.gpus, "draft": said.draft, "table": self.rows,
            "not_evaluated": [{"method": name, "because": why} for name, why in self.left_out],
            "rests_on": [asdict(each) for each in said.rests_on], "kernels_only": said.kernels_only,
            "notes": [*said.notes, *self.notes],
        }  # fmt: skip
        plain: dict[str, Any] = strict_json.plain(found)
        return plain

    def __str__(self) -> str:
        from sim.maps import map_text

        return map_text.text(self)


COLUMNS = (
    "batch", "context", "fits", "method", "label", "setting", "speedup", "speedup_low", "speedup_high", "tpot_ms", "gpus",
    "gpu_ms_per_token", "exact", "fastest", "tied", "least_gpu_time",
)  # fmt: skip
"""Columns of the table, in order."""


def method_map(
    said: Inputs, contexts: Sequence[int] | None = None, progress: Callable[[str], None] = lambda _: None
) -> MethodMap:
    """Compare all methods that can be proposed from what a user said, at each number of running sequences and each context.

    Raises ParameterError that names what is missing or wrong.
    """
    for name, why in NOT_USED.items():
        value = getattr(said, name)
        if value is not None:
            raise ParameterError(f"--{name.removesuffix('_ms').replace('_', '-')} is not used with --map, got {value}: {why}")
    wanted = _contexts(contexts)
    found = situations.situation(replace(said, context=min(wanted), batch=said.batch or BATCHES[:1]), progress)
    if len(found.cases) > 1:
        raise ParameterError("--acceptance must be one value or one range with --map, got several cases; ask one by one")
    batches = tuple(sorted({*(said.batch or BATCHES)}))
    wanted, notes = _known_contexts(found, wanted, contexts is not None)
    if len(batches) * len(wanted) > MOST_CELLS:
        got = f"{len(batches)} batches x {len(wanted)} contexts"
        raise ParameterError(f"a map must have at most {MOST_CELLS} cells, got {got}; give fewer")
    rests = [each for each in found.rests_on if each.input not in ("context", "memory")]
    if found.budget is not None:  # times of its passes differ between the contexts
        value = f"{found.budget.positions:,} positions of each sequence"
        rests = [replace(each, value=value) if each.input == "draft context budget" else each for each in rests]
    listed = ", ".join(f"{each:,}" for each in wanted)
    source = "--contexts" if contexts is not None else "not said; --contexts sets them"
    found = replace(
        found, rests_on=(*rests, Evidence("contexts", f"{listed} positions", source, "assumed")), notes=(*found.notes, *notes)
    )
    fitting: dict[int | None, list[int]] = {}
    for context in wanted:
        fitting[context] = [each for each in batches if _fits(found, each, context)]
    progress("evaluating all methods")
    others = evaluate_cells(found, {context: some for context, some in fitting.items() if some})
    by_cell: dict[tuple[int, int | None], list[MethodSpeed]] = {}
    for at, some in fitting.items():
        for batch, speeds in zip(some, _drafts_by_token(found.at(at), some), strict=True):
            by_cell[batch, at] = speeds
    for each in others.found:
        by_cell[each.row["batch"], each.context].append(each)
    noise = noise_of(found.law)
    cells = [MethodCell(batch, context, tuple(by_cell.get((batch, context), ())), noise) for context in wanted for batch in batches]
    return MethodMap(found, tuple(cells), others.left_out, others.notes)


def _contexts(contexts: Sequence[int] | None) -> tuple[int, ...]:
    given = CONTEXTS if contexts is None else contexts
    if not given:
        raise ParameterError("--contexts must have at least one context, got none")
    for each in given:
        checks.whole("contexts", each, 1, checks.MAX_TOKENS)
    return tuple(sorted({*given}))


def _known_contexts(said: Situation, contexts: tuple[int, ...], given: bool) -> tuple[tuple[int, ...], list[str]]:
    """The contexts, and notes: of those given, which the model was not trained for; the usual ones are left out there."""
    notes: list[str] = []
    kept = []
    for each in contexts:
        found: list[str] = []
        situations.check_longest(each, said.name, said.shape, said.draft, found, option="--contexts")
        if given or not found or each == contexts[0]:
            kept.append(each)
            notes += found if each == contexts[-1] else []
    if said.law.kernels is None and "kv_position" not in said.law.coefficients and len(kept) > 1:
        notes.append("all contexts have the same times, because the step law does not depend on them: the memory alone does")
    return tuple(kept), [each for each in notes if each not in said.notes]


def _fits(said: Situation, batch: int, context: int) -> bool:
    most = situations.capacity_at(said, context)
    return most is None or batch <= most


def _drafts_by_token(said: Situation, batches: Sequence[int]) -> list[list[MethodSpeed]]:
    """Plain decoding, and drafts of the best length, at each number of running sequences: the speeds of advice."""
    if not batches:
        return []
    passes = 1 if draft_heads.is_parallel(said.draft) else None
    lengths = (0, *said.draft_lengths)
    choice = DraftChoice(said.law, said.cases[0], tuple(map(float, batches)), lengths, said.context_of_law, passes)
    low, high = choice.interval
    drawn, tpot = choice.draws[np.arange(DRAWS) % len(choice.draws)], 1e3 * choice.tpot_seconds
    found = []
    for row, batch in enumerate(batches):
        speeds = []
        for column in (0, 1 + int(choice.speedups[row, 1:].argmax())):
            length, ends = lengths[column], (float(low[row, column]), float(high[row, column]))
            spread = column > 0 and ends[1] > ends[0] * (1 + 1e-9)
            speeds.append(MethodSpeed({
                "method": METHOD if length else PLAIN, "setting": setting_of(length), "acceptance": said.cases[0].text,
                "batch": batch, "draft_length": length, "speedup": float(choice.speedups[row, column]),
                "speedup_low": ends[0] if spread else None, "speedup_high": ends[1] if spread else None,
                "tpot_ms": float(tpot[row, column]),
                "tokens_per_s_per_gpu": batch * 1e3 / float(tpot[row, column]) / said.tensor_parallel, "gpus": said.tensor_parallel,
                "exact": True, "best": False, "tie": False, "advised": False,
            }, said.context, drawn[:, row, column], float(np.max(said.law.beyond(float(batch), [0, length])))))  # fmt: skip
        found.append(speeds)
    return found
