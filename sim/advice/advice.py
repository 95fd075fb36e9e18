"""The advice itself: the verdict in a sentence, the table, what it rests on, what would overturn it, and lines to paste."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from model.advice.acceptance_draws import AcceptanceDraws
from model.advice.draft_choice import BreakEven, DraftChoice, Influence, SwitchOff, break_even, influences, switch_off
from model.architectures import draft_heads
from model.base import checks, strict_json
from model.base.checks import ParameterError
from model.engines import next_cell
from model.serving import arrivals
from model.serving.arrivals import Arrivals
from model.serving.closed_form import Workload
from sim.advice import checkpoint_names, engine_settings, other_methods
from sim.advice.engine_settings import Range
from sim.advice.other_methods import Alternative, Evaluated
from sim.advice.situation import Evidence, Inputs, Situation, situation

if TYPE_CHECKING:
    import polars

FURTHEST = 4
"""Factor beyond the largest batch of the table up to which the switch-off batch is sought, and at least `LEAST_LIMIT`."""
LEAST_LIMIT = 512
USUAL = Workload(1024, 256)
"""Mean lengths of requests, where a rate is given without them: assumed."""
METHOD, PLAIN = "speculative", "autoregressive"
KIND = "advice"
SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class AcceptanceCase:
    """The advice for one acceptance.

    Parameters
    ----------
    acceptance
        The acceptance.
    choice
        Speed-ups of the draft lengths.
    off
        From which number of running sequences drafting does not pay.
    situation
        What all cases share.
    """

    acceptance: AcceptanceDraws
    choice: DraftChoice
    off: SwitchOff
    situation: Situation

    @property
    def best(self) -> dict[int, int]:
        """Best draft length by number of running sequences; 0: plain decoding."""
        lengths = self.choice.draft_lengths
        return {int(batch): lengths[index] for batch, index in zip(self.choice.batches, self.choice.best, strict=True)}

    @cached_property
    def runs(self) -> list[tuple[int, list[int]]]:
        """Draft lengths that are best, or tied with the best, over successive batches; each with the indices of its batches."""
        good = self.choice.ties.copy()
        # Where plain decoding is best, no draft is called so, and the reverse.
        good[self.choice.best == 0] = False
        good[self.choice.best > 0, 0] = False
        good[np.arange(len(good)), self.choice.best] = True
        found, start = [], 0
        while start < len(good):
            common, end = good[start], start + 1
            while end < len(good) and np.any(common & good[end]):
                common, end = common & good[end], end + 1
            kept = np.flatnonzero(common)
            chosen = int(kept[np.argmin(self.choice.losses[start:end, kept].sum(axis=0))])
            found.append((self.choice.draft_lengths[chosen], [*range(start, end)]))
            start = end
        return found

    @cached_property
    def break_evens(self) -> list[BreakEven]:
        """What would make drafting and plain decoding equally fast, by number of running sequences."""
        return [break_even(self.choice, batch) for batch in self.choice.batches]

    @cached_property
    def influences(self) -> list[Influence]:
        """Inputs by how far they move the speed-up at the middle batch."""
        return influences(self.choice, self.middle)

    @property
    def middle(self) -> float:
        """The middle one of the numbers of running sequences."""
        return self.choice.batches[len(self.choice.batches) // 2]

    @cached_property
    def schedule(self) -> list[Range]:
        """Draft lengths by ranges of running sequences, for the engines' settings."""
        lengths = [0] * len(self.choice.batches)
        for length, rows in self.runs:
            for row in rows:
                lengths[row] = length
        off = None if self.off.batch is None else max(1, round(self.off.batch))
        return engine_settings.schedule([int(each) for each in self.choice.batches], lengths, off_from=off)

    # --- Sentences ---

    @cached_property
    def verdict(self) -> str:
        """The advice in a sentence."""
        said = self.situation
        parts = [self._of_run(*run, first=index == 0) for index, run in enumerate(self.runs)]
        parts += filter(None, [self._of_end()])
        text = "; ".join(parts)
        if said.slo is not None:
            text += f"; {self.of_slo}"
        if said.kernels_only:
            text += "; kernels only: the engine's overhead is not included"
        elif said.law.cells is None:
            text += "; no step of this engine is measured: the intervals are those of priors"
        elif bool(np.all(said.law.cells.draft_length > 0)):
            text += "; no plain step is measured: the time that speed-ups are over is extrapolated"
        return text[0].upper() + text[1:]

    def _of_run(self, length: int, rows: list[int], *, first: bool) -> str:
        choice = self.choice
        column = choice.draft_lengths.index(length)
        ends = [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]
        last = rows[-1] == len(choice.batches) - 1
        numbers = [f"{choice.batches[row]:g}" for row in ends]
        where = (
            f"at {numbers[0]}"
            if len(ends) == 1
            else f"from {numbers[0]} to {numbers[1]}"
            if last or not first
            else f"up to {numbers[1]}"
        )
        where += (" running sequence" if numbers == ["1"] else " running sequences") if first else ""
        if length == 0:
            best = 1 + int(choice.losses[rows[-1], 1:].argmin())
            tied = bool(np.all(choice.ties[rows].any(axis=1)))
            what = "it makes no known difference" if tied else "plain decoding is fastest"
            return f"{where} {what} (best draft, K = {choice.draft_lengths[best]}: {self._speedup(rows[-1], best)})"
        speeds = [f"{choice.speedups[row, column]:.2f}x at {number}" for row, number in zip(ends[:-1], numbers[:-1], strict=True)]
        speeds.append(f"{self._speedup(rows[-1], column)}" + (f" at {numbers[-1]}" if len(ends) > 1 else ""))
        unsure = choice.interval[0][rows[-1], column] < 1
        alone = all(choice.best[row] == column for row in rows)
        what = "is fastest" if alone else "is fastest or tied"
        return f"K = {length} {what} {where}: {', '.join(speeds)}" + (", so perhaps no gain" if unsure else "")

    def _speedup(self, row: int, column: int) -> str:
        low, high = (each[row, column] for each in self.choice.interval)
        return f"{self.choice.speedups[row, column]:.2f}x (80 % interval {low:.2f} to {high:.2f})"

    def _of_end(self) -> str:
        """Where drafting stops paying, in words."""
        off, last = self.off, self.choice.batches[-1]
        if off.batch is None:
            sure = f", surely up to {_about(off.pays_until)}" if off.pays_until is not None else ", but nowhere surely"
            certain = off.pays_until is not None and off.pays_until >= off.limit
            full = self.situation.capacity is not None and off.limit >= self.situation.capacity
            most = "the most that fit the memory" if full else "the most that was looked at"
            limit = f"{off.limit:g}" if full else _about(off.limit)
            if off.limit <= last:
                return ""
            if self.choice.speedups[0, 1:].max() <= 1:
                return f"at {limit}, {most}, it most likely pays"
            return f"it {'pays' if certain else 'most likely pays'} up to {limit}, {most}{'' if certain else sure}"
        if off.batch <= 1:
            return "switch it off"
        since = "from the smallest batch" if off.pays_until is None else f"from {_about(off.pays_until)}"
        until = "on" if off.costs_from is None else f"to {_about(off.costs_from)}"
        above = off.batch if off.costs_from is None else off.costs_from
        even = f"it makes no known difference (break-even at {_about(off.batch)})"
        return f"{since} {until} {even}; above {_about(above)}, switch it off"

    @cached_property
    def of_slo(self) -> str:
        """Batches that keep the time per token within the service level objective, in words."""
        slo = self.situation.slo
        assert slo is not None
        kept = []
        tpot = 1e3 * self.choice.tpot_seconds
        for column, length in enumerate(self.choice.draft_lengths):
            rows = np.flatnonzero(tpot[:, column] <= slo)
            kept.append((float(self.choice.batches[int(rows[-1])]) if rows.size else 0.0, -length))
        most = max(kept)
        plain = kept[0][0]
        if not most[0]:
            row, column = divmod(int(tpot.argmin()), tpot.shape[1])
            choice = f"K = {self.choice.draft_lengths[column]}" if column else "plain decoding"
            shortest = f"{tpot[row, column]:.3g} ms, of {choice} with {self.choice.batches[row]:g} running"
            return f"no choice keeps TPOT at or below {slo:g} ms: the shortest is {shortest}"
        with_ = f"K = {-most[1]} keeps TPOT at or below {slo:g} ms up to {most[0]:g} running sequences"
        if most[0] <= plain:
            return f"TPOT is at or below {slo:g} ms up to {plain:g} running sequences without drafts"
        return f"{with_}, plain decoding " + (f"up to {plain:g}" if plain else "at none")


@dataclass(frozen=True, eq=False)
class Advice:
    """Advice on one model, device and engine; `print` shows it, a notebook draws it.

    Parameters
    ----------
    situation
        Everything that it is computed from.
    cases
        One for each acceptance.
    others
        Other methods, evaluated in closed form on the same costs.
    alternatives
        Other uses of the same devices.
    arrivals
        Steady states at the rate of requests that was given; None: none was.
    """

    situation: Situation
    cases: tuple[AcceptanceCase, ...]
    others: Evaluated
    alternatives: tuple[Alternative, ...]
    arrivals: Arrivals | None = None

    @property
    def verdict(self) -> str:
        """The advice in a sentence; with several cases one for each."""
        if self.arrivals is not None:
            said = self.arrivals.verdict
            return f"{said[0].upper()}{said[1:]}. With these numbers running: {self.cases[0].verdict}"
        if len(self.cases) == 1:
            return self.cases[0].verdict
        return ". ".join(f"Acceptance {each.acceptance.text}: {each.verdict}" for each in self.cases)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table, as JSON has them."""
        found = [row for case in self.cases for row in self._of_case(case)]
        return found + [{**row, "meets_slo": self._meets(row)} for row in self.others.rows]

    def _of_case(self, case: AcceptanceCase) -> list[dict[str, Any]]:
        choice, parallel = case.choice, self.situation.tensor_parallel
        low, high = choice.interval
        tpot, rate = 1e3 * choice.tpot_seconds, choice.throughput / parallel
        rows = []
        advised = {row: length for length, of_run in case.runs for row in of_run}
        for row, column in itertools.product(range(len(choice.batches)), range(len(choice.draft_lengths))):
            found = {
                "method": METHOD if choice.draft_lengths[column] else PLAIN, "acceptance": case.acceptance.text,
                "setting": setting_of(choice.draft_lengths[column]), "batch": int(choice.batches[row]),
                "draft_length": choice.draft_lengths[column],
                "speedup": float(choice.speedups[row, column]), "speedup_low": float(low[row, column]),
                "speedup_high": float(high[row, column]), "tpot_ms": float(tpot[row, column]),
                "tokens_per_s_per_gpu": float(rate[row, column]), "gpus": parallel, "exact": True,
                "best": bool(choice.best[row] == column), "tie": bool(choice.ties[row, column]),
                "advised": advised[row] == choice.draft_lengths[column],
            }  # fmt: skip
            rows.append({**found, "meets_slo": self._meets(found)})
        return rows

    def _meets(self, row: Mapping[str, Any]) -> bool | None:
        slo = self.situation.slo
        return None if slo is None else bool(row["tpot_ms"] <= slo)

    @property
    def table(self) -> polars.DataFrame:
        """The table: a row for each method, batch and draft length (columns as in the JSON)."""
        import polars

        return polars.DataFrame(self.rows, infer_schema_length=None)

    @cached_property
    def measure_next(self) -> str | None:
        """The measurement that would help most, as a sentence; None: the choice is sure."""
        case = self.cases[0]
        law = self.situation.law
        rates = case.acceptance.point[: max(case.choice.draft_lengths)]
        known = replace(law, acceptance=tuple(float(each) for each in rates))
        lengths = case.choice.draft_lengths
        advice = next_cell.advise(known, case.choice.batches, lengths)
        measured = (
            set() if law.cells is None else {*zip(law.cells.sequences.tolist(), law.cells.draft_length.tolist(), strict=True)}
        )
        found = next((each for each in advice.candidates if (each.sequences, each.draft_length) not in measured), None)
        if found is None or (advice.loss < next_cell.RESOLVED and found.spread > 0.9 * advice.spread):
            return None
        what = "plain decoding" if not found.draft_length else f"K = {found.draft_length}"
        tells = " and ".join(name for name, _ in found.tells[:2])
        of = f"; it determines {tells} best" if tells else ""
        narrows = f"the uncertainty of a predicted value falls from {advice.spread:.0%} to {found.spread:.0%}"
        if advice.loss - found.loss < next_cell.RESOLVED:
            sure = f"the choice of K is as sure as one cell can make it (expected loss {advice.loss:.1%})"
            return f"{sure}; measure {what} with {found.sequences:g} running, and {narrows}{of}"
        return (
            f"measure {what} with {found.sequences:g} running: the expected loss of these choices falls from {advice.loss:.1%} to"
            f" {found.loss:.1%}, and {narrows}{of}"
        )

    @cached_property
    def break_even(self) -> dict[str, Any]:
        """Values at which drafting just pays, at the smallest batch and by batch, as JSON has them."""
        rows = [{"acceptance_case": case.acceptance.text, **asdict(each)} for case in self.cases for each in case.break_evens]
        for row in rows:
            for name in ("draft_pass_seconds", "now_draft_pass_seconds"):
                value = row.pop(name)
                row[name.replace("_seconds", "_ms")] = None if value is None else 1e3 * value
        first = rows[len(self.cases[0].choice.batches) // 2]
        return {**{name: value for name, value in first.items() if name != "acceptance_case"}, "by_batch": rows}

    def document(self) -> dict[str, Any]:
        """The advice as a JSON document (`sim schema advise` describes it)."""
        case, said = self.cases[0], self.situation
        several = len(self.cases) > 1
        found: dict[str, Any] = {
            "kind": KIND, "schema_version": SCHEMA_VERSION, "verdict": self.verdict,
            "model": said.name, "gpu": said.gpu, "tensor_parallel": said.tensor_parallel, "gpus": said.gpus, "draft": said.draft,
            "best": {str(batch): length for batch, length in case.best.items()}, "switch_off_batch": case.off.batch,
            "switch_off": asdict(case.off),
            "cases": [
                {"acceptance": each.acceptance.text, "verdict": each.verdict, "best": {str(b): k for b, k in each.best.items()},
                 "switch_off_batch": each.off.batch, "switch_off": asdict(each.off)}
                for each in self.cases
            ] if several else [],
            "table": self.rows, "rests_on": [asdict(each) for each in said.rests_on], "break_even": self.break_even,
            "moves_most": [
                {"input": each.name, "speedup_low": each.low, "speedup_high": each.high} for each in case.influences[:5]
            ],
            "measure_next": self.measure_next, "alternatives": [asdict(each) for each in self.alternatives],
            "not_evaluated": [{"method": name, "because": why} for name, why in self.others.left_out],
            "settings": {engine: self.settings(engine) for engine in engine_settings.NAMES},
            "arrivals": None if self.arrivals is None else self.arrivals.document(),
            "draft_context_budget": None if said.budget is None else said.budget.document(),
            "kernels_only": said.kernels_only, "notes": [*said.notes, *self.others.notes],
        }  # fmt: skip
        plain: dict[str, Any] = strict_json.plain(found)
        return plain

    def settings(self, engine: str) -> list[str]:
        """Lines that set an engine to the schedule of the first case, after comments on the names of checkpoints in them.

        Names are those that the log's server printed, else those that the user gave; what neither says is MODEL or DRAFT.
        """
        checks.one_of("engine", engine, engine_settings.NAMES)
        said = self.situation
        draft = said.draft or engine_settings.draft_of(said.law.facts.get("draft", ""))
        names = checkpoint_names.of(said, draft)
        found = engine_settings.lines(
            engine, names.model.text, draft, self.cases[0].schedule, checkpoint=names.draft.text,
            tensor_parallel=said.tensor_parallel,
        )  # fmt: skip
        return [*checkpoint_names.comments(names, found), *found]

    def figure(self) -> Any:
        """Speed-up by the number of running sequences, with its interval, for each draft length of the verdict, with matplotlib."""
        from figures.of_runs import advised_drafts

        said = self.situation
        title = f"{said.name or said.law.name} on {said.tensor_parallel} x {said.gpu or 'GPU'}"
        rows = [row for case in self.cases for row in self._of_case(case)]
        return advised_drafts.of_table(rows, title=title, switch_off=self.cases[0].off.batch)

    def __str__(self) -> str:
        from sim.advice import advice_text

        return advice_text.text(self)

    def __repr__(self) -> str:
        return f"<Advice: {self.verdict}>"

    def _repr_html_(self) -> str:
        from sim.advice import advice_text

        return advice_text.html(self)


def advise(said: Inputs, progress: Callable[[str], None] = lambda _: None) -> Advice:
    """Advise on what a user said; `progress` is called with what comes next. Raises ParameterError that names what is missing."""
    found, arriving = situation(_with_context(said), progress), None
    if said.rate is not None:
        if len(found.cases) > 1:
            raise ParameterError("--acceptance must be one value or one range with --rate, got several cases; ask one by one")
        progress("finding the number that runs")
        fits = found.capacity or arrivals.MOST_RUNNING
        arriving = arrivals.evaluate(
            found.law, found.cases[0], found.draft_lengths, said.rate, _workload(said), passes=arrivals.drafter_of(found.draft),
            replicas=max(found.gpus // found.tensor_parallel, 1), most=min(fits, arrivals.MOST_RUNNING),
        )  # fmt: skip
        both = said.prompt is not None and said.output is not None
        given = "--prompt, --output" if both else "not said; --prompt and --output set it"
        about = f"prompts of {arriving.workload.prompt:,.0f}, outputs of {arriving.workload.output:,.0f} tokens on average"
        rests = (*found.rests_on, Evidence("requests", about, given, "assumed"))
        found = replace(found, batches=said.batch or arriving.running, rests_on=rests)
    limit = max(FURTHEST * max(found.batches), LEAST_LIMIT)
    limit = limit if found.capacity is None else min(limit, found.capacity)
    lengths = (0, *found.draft_lengths)
    cases = []
    for acceptance in found.cases:
        passes = 1 if draft_heads.is_parallel(found.draft) else None
        choice = DraftChoice(found.law, acceptance, tuple(map(float, found.batches)), lengths, found.context_of_law, passes)
        cases.append(AcceptanceCase(acceptance, choice, switch_off(choice, limit), found))
    _refuse_impossible_slo(found, cases)
    progress("evaluating other methods")
    others = other_methods.evaluate(found)
    return Advice(found, tuple(cases), others, tuple(other_methods.alternatives(found, cases[0].choice, others)), arriving)


def _workload(said: Inputs) -> Workload:
    """Mean lengths of requests; those that were not given are `USUAL`."""
    prompt, output = (usual if given is None else given for given, usual in zip((said.prompt, said.output), USUAL, strict=True))
    checks.number("prompt", prompt, 1, checks.MAX_TOKENS)
    checks.number("output", output, 1, checks.MAX_TOKENS)
    return Workload(prompt, output)


def _with_context(said: Inputs) -> Inputs:
    """Inputs with the context of the requests, where a rate is given and no context."""
    if said.rate is None:
        for name in ("prompt", "output"):
            if getattr(said, name) is not None:
                raise ParameterError(f"--{name} is used only with --rate; add that, or give the --context")
        return said
    of = _workload(said)
    checks.number("output", of.output, 2, checks.MAX_TOKENS)
    if said.context is not None:
        raise ParameterError(
            f"--context is not used with --rate, where it follows from --prompt and --output, got {said.context}; leave it out"
        )
    if said.log:
        return said
    return replace(said, context=round(of.prompt + of.output / 2))


def _refuse_impossible_slo(said: Situation, cases: Sequence[AcceptanceCase]) -> None:
    """Raise ParameterError if no choice keeps the service level objective."""
    if said.slo is None:
        return
    checks.number("slo_tpot_ms", said.slo, 1e-6, 1e9)
    best = [(float(np.min(case.choice.tpot_interval()[0])), float(np.min(case.choice.tpot_seconds))) for case in cases]
    low, point = min(best)
    if 1e3 * low > said.slo:
        raise ParameterError(
            f"slo_tpot must be at least {1e3 * low:.3g} ms, the lower end of the interval of the shortest TPOT here"
            f" ({1e3 * point:.3g} ms, {min(said.batches)} running), got {said.slo:g} ms; take a smaller batch, a faster device or"
            " more --tensor-parallel"
        )


def setting_of(draft_length: int) -> str:
    """Draft length as printed text; empty for plain decoding."""
    return f"K = {draft_length}" if draft_length else ""


def _about(value: float) -> str:
    """A number of sequences, rounded to two digits.

    >>> _about(304.4), _about(7.2)
    ('300', '7')
    """
    digits = 0 if value < 100 else -int(np.floor(np.log10(value))) + 1
    return f"{round(value, digits):g}"


__all__ = ["AcceptanceCase", "Advice", "Evidence", "advise"]
