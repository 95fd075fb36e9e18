"""Observations in an engine's output, and their sums: counts are added, lengths are never averaged but weighted by their drafts.

Notation: D drafts of at most K tokens have d drafted and a accepted tokens; the mean acceptance length is 1 + a / D.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.logs.acceptance_record import (
    MOST_CELLS,
    MOST_NOTES,
    MOST_POSITIONS,
    MOST_REQUESTS,
    AcceptanceRecord,
    Identity,
    LogSource,
    MeasuredCell,
    with_intervals,
)
from model.logs.engine_logs.printed_figures import Printed

OF_COUNTS = "mean acceptance length = 1 + accepted / drafts"
OF_RATES = "mean acceptance length = 1 + sum of rates by position"
OF_RATIO = "draft acceptance rate = accepted / drafted"
AT_MOST = "mean acceptance length <= draft_length + 1"
NEVER_RISE = "rates by position never rise"
SUM = "sum of histogram = drafts"
MOMENT = "sum of j * histogram[j] = accepted"
SPACING = "TPOT = ITL / mean acceptance length"
REAL_TEXT = "rates by position are below .999"
FEW = 100
"""Number of drafts below which a position may by chance accept all its tokens."""


@dataclass
class Check:
    """One comparison: the absolute difference of two sides, and the tolerance of their rounding."""

    identity: str
    difference: float
    tolerance: float


@dataclass
class Observation:
    """Figures of one line, request or benchmark; None where it does not give them."""

    drafts: float | None = None
    exact: bool = True
    """False if `drafts` is an estimate within the rounding of printed figures."""
    drafted: int | None = None
    accepted: int | None = None
    length: Printed | None = None
    """Mean acceptance length, bonus token counted, as printed."""
    weight: float = 1.0
    """Drafts relative to other observations, for those that have a length but no counts."""
    draft_length: int | None = None
    positions: Sequence[float] | None = None
    """Drafts of which at least i + 1 tokens were accepted."""
    whole: bool = True
    """True if `positions` are exact counts."""
    rates: Sequence[Printed] | None = None
    """Survival by position where the number of drafts is unknown."""
    histogram: Sequence[int] | None = None
    request: bool = False
    """True if it is of one request."""
    requests: int | None = None
    timed: tuple[float, int] | None = None
    """Seconds of one sequence at a time, and the tokens that it generated in them."""
    drafting: tuple[float, int] | None = None
    """Milliseconds of drafting, and the number of tokens drafted in them."""
    length_first: bool = False
    """True if the length is not 1 + a / D of these counts, which the engine defines otherwise."""
    checks: list[Check] = field(default_factory=list)
    cells: list[MeasuredCell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def speaks(self) -> bool:
        """Return whether it gives any figure of acceptance."""
        return any(each is not None for each in (self.drafts, self.drafted, self.accepted, self.length, self.histogram))


# --- Number of drafts from figures that print it only by its ratios ---


def drafts_of(
    accepted: int, drafted: int, draft_length: int | None, length: Printed | None, rates: Sequence[Printed] | None
) -> tuple[float | None, bool]:
    """Number of drafts that the printed figures imply, and whether it is the only one; None if they imply none.

    With a > 0, D = a / (length - 1) and D = a / (sum of rates by position), within the rounding of their digits; and D >= d / K.

    >>> drafts_of(513, 620, 5, Printed(5.14, 0.005), None)
    (124.0, True)
    """
    least = math.ceil(drafted / draft_length) if draft_length else 1
    if not accepted:
        return (float(least), True) if draft_length and drafted == least * draft_length else (None, False)
    low, high = float(least), math.inf
    middle = None
    for total in _totals(length, rates):
        if total.value - total.half > 0:
            low, high = max(low, accepted / (total.value + total.half)), min(high, accepted / (total.value - total.half))
            middle = accepted / total.value
    if draft_length and drafted % draft_length == 0 and low - 1e-6 <= drafted / draft_length <= high + 1e-6:
        return drafted / draft_length, True  # drafts of one length
    first, last = math.ceil(low - 1e-6), math.floor(min(high, drafted) + 1e-6)
    if first == last:
        return float(first), True
    if first > last or middle is None:
        return (float(max(round(middle), 1)) if middle is not None else None), False
    fitting = [each for each in range(first, last + 1) if _fits(each, accepted, rates)] if last - first < 1000 else []
    if len(fitting) == 1:
        return float(fitting[0]), True
    return float(min(max(round(middle), first), last)), False


def _totals(length: Printed | None, rates: Sequence[Printed] | None) -> list[Printed]:
    """Printed values of a / D, the most exact one last."""
    found = [] if length is None else [Printed(length.value - 1, length.half)]
    if rates:
        found.append(Printed(sum(each.value for each in rates), sum(each.half for each in rates)))
    return sorted(found, key=lambda each: -each.half)


def _fits(drafts: int, accepted: int, rates: Sequence[Printed] | None) -> bool:
    """Return whether whole numbers of accepted tokens by position explain the printed rates and add up to `accepted`."""
    if not rates:
        return True
    counts = [round(each.value * drafts) for each in rates]
    near = all(abs(number / drafts - each.value) <= each.half + 1e-12 for number, each in zip(counts, rates, strict=True))
    return near and sum(counts) == accepted


def counts_of(rates: Sequence[Printed], drafts: float, accepted: int | None, exact: bool) -> tuple[list[float], bool]:
    """Accepted tokens by position from rates over `drafts`, and whether they are exact counts."""
    counts = [float(round(each.value * drafts)) for each in rates]
    sure = exact and all(each.half * drafts < 0.5 for each in rates) and (accepted is None or sum(counts) == accepted)
    return (counts, True) if sure else ([each.value * drafts for each in rates], False)


def checks_of(
    length: Printed | None, rates: Sequence[Printed] | None, ratio: Printed | None, accepted: int | None, drafted: int | None,
    drafts: float | None, draft_length: int | None,
) -> list[Check]:
    """Identities between the printed figures of one observation."""
    found = []
    if length is not None and drafts and accepted is not None:
        found.append(Check(OF_COUNTS, abs(length.value - 1 - accepted / drafts), length.half + 1e-9))
    if length is not None and rates and draft_length == len(rates):
        slack = length.half + sum(each.half for each in rates)
        found.append(Check(OF_RATES, abs(length.value - 1 - sum(each.value for each in rates)), slack + 1e-9))
    if ratio is not None and drafted and accepted is not None:
        found.append(Check(OF_RATIO, abs(ratio.value - accepted / drafted), ratio.half + 1e-9))
    if length is not None and draft_length:
        found.append(Check(AT_MOST, max(length.value - draft_length - 1, 0.0), length.half + 1e-9))
    if rates and len(rates) > 1:
        rises = max(later.value - first.value for first, later in pairwise(rates))
        found.append(Check(NEVER_RISE, max(rises, 0.0), 2 * max(each.half for each in rates) + 1e-9))
    return found


# --- Sums ---


class ObservationSums:
    """Sums of observations of one dialect, file or set of files; memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self.drafts: float | None = 0.0
        self.drafted: int | None = 0
        self.accepted: int | None = 0
        self.exact = True
        self.whole = True
        self.without_counts = 0
        self.length_sum = self.length_weight = self.length_slack = 0.0
        self.counted: list[float] = [0.0, 0.0]
        """Accepted tokens and drafts of observations that have both."""
        self.emitted = False
        self.positions: list[float] | None = []
        self.known: int | None = None
        """Number of positions that all observations give, if some give fewer than their draft length."""
        self.rates: Sequence[Printed] | None = None
        self.histogram: list[int] | None = []
        self.draft_lengths: set[int | None] = set()
        self.requests: int | None = 0
        self.per_request: dict[str, array[float]] = {name: array("d") for name in ("drafts", "drafted", "accepted")}
        self.drafting = [0.0, 0]
        self.timed = {True: [0.0, 0], False: [0.0, 0]}
        """Seconds and tokens of one sequence at a time, by whether anything was drafted."""
        self.checks: dict[str, list[float]] = {}
        self.cells: list[MeasuredCell] = []
        self.notes: dict[str, None] = {}

    def add(self, seen: Observation) -> None:
        """Add an observation; raise `ParameterError` for impossible counts."""
        if seen.accepted is not None and seen.drafted is not None and seen.accepted > seen.drafted:
            raise ParameterError(f"accepted tokens must be at most the drafted={seen.drafted}, got {seen.accepted}")
        self.cells += seen.cells
        if len(self.cells) > MOST_CELLS:
            raise ParameterError(f"a record must have at most {MOST_CELLS:,} cells, got more; import fewer files")
        for note in seen.notes:
            self.note(note)
        for each in seen.checks:
            self.check(each)
        if seen.drafting is not None:
            self.drafting = [self.drafting[0] + seen.drafting[0], self.drafting[1] + seen.drafting[1]]
        if seen.timed is not None:
            sums = self.timed[seen.speaks()]
            sums[:] = sums[0] + seen.timed[0], sums[1] + seen.timed[1]
        if not seen.speaks():
            return
        self.count += 1
        self.drafts, self.drafted = _sum(self.drafts, seen.drafts), _sum(self.drafted, seen.drafted)
        self.accepted = _sum(self.accepted, seen.accepted)
        self.exact, self.whole = self.exact and seen.exact, self.whole and seen.whole
        self._add_length(seen)
        self._add_positions(seen)
        self.draft_lengths.add(seen.draft_length)
        requests = 1 if seen.request else seen.requests
        self.requests = _sum(self.requests, requests)
        if seen.request and len(self.per_request["drafts"]) < MOST_REQUESTS:
            for name, values in self.per_request.items():
                value = getattr(seen, name)
                values.append(math.nan if value is None else float(value))

    def _add_length(self, seen: Observation) -> None:
        if not seen.length_first and seen.drafts is not None and seen.accepted is not None:
            self.counted = [self.counted[0] + seen.accepted, self.counted[1] + seen.drafts]
        elif seen.length is not None:
            weight = seen.weight if seen.drafts is None else seen.drafts
            self.without_counts += 1
            self.length_sum += weight * seen.length.value
            self.length_slack += weight * seen.length.half
            self.length_weight += weight

    def _add_positions(self, seen: Observation) -> None:
        if seen.histogram is not None:
            self.histogram = _sum_lists(self.histogram, seen.histogram)
            above = np.cumsum(np.asarray(seen.histogram, dtype=object)[::-1])[::-1][1:]
            width = max(len(above), seen.draft_length or 0)
            self.positions = _sum_lists(self.positions, [float(each) for each in above] + [0.0] * (width - len(above)))
        elif seen.positions is not None and seen.drafts is not None:
            self.positions = _sum_lists(self.positions, seen.positions)
            if seen.draft_length and len(seen.positions) < seen.draft_length:
                self.known = min(len(seen.positions), self.known or len(seen.positions))
            complete = seen.whole and seen.draft_length == len(seen.positions)
            counts = [seen.drafts, *seen.positions, 0.0]
            steps = [int(first - later) for first, later in pairwise(counts)]
            self.histogram = _sum_lists(self.histogram, steps if complete and min(steps) >= 0 else None)
        else:
            self.rates = seen.rates if self.count == 1 else None
            self.positions = self.histogram = None

    def check(self, each: Check) -> None:
        """Keep the largest excess of an identity over its tolerance, and how often it failed."""
        worst = self.checks.setdefault(each.identity, [-math.inf, 0.0, 0.0, 0, 0])
        failed = each.difference > each.tolerance
        if each.difference - each.tolerance > worst[0]:
            worst[:3] = [each.difference - each.tolerance, each.difference, each.tolerance]
        worst[3] += 1
        worst[4] += failed

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if len(self.notes) < MOST_NOTES - 50:
            self.notes[text] = None

    def merge(self, other: ObservationSums) -> None:
        """Add the sums of another file."""
        if other.count:
            self.rates = other.rates if not self.count else None
            self.known = min((each for each in (self.known, other.known) if each), default=None)
            self.drafts, self.drafted = _sum(self.drafts, other.drafts), _sum(self.drafted, other.drafted)
            self.accepted, self.requests = _sum(self.accepted, other.accepted), _sum(self.requests, other.requests)
            self.positions = _sum_lists(self.positions, other.positions)
            self.histogram = _sum_lists(self.histogram, other.histogram)
            self.exact, self.whole = self.exact and other.exact, self.whole and other.whole
        self.count += other.count
        self.without_counts += other.without_counts
        self.length_sum, self.length_weight = self.length_sum + other.length_sum, self.length_weight + other.length_weight
        self.length_slack += other.length_slack
        self.counted = [mine + theirs for mine, theirs in zip(self.counted, other.counted, strict=True)]
        self.draft_lengths |= other.draft_lengths
        for name, values in self.per_request.items():
            values.extend(other.per_request[name][: MOST_REQUESTS - len(values)])
        self.drafting = [mine + theirs for mine, theirs in zip(self.drafting, other.drafting, strict=True)]
        self.merge_checks(other)
        for drafted, sums in self.timed.items():
            sums[:] = (mine + theirs for mine, theirs in zip(sums, other.timed[drafted], strict=True))
        self.cells += other.cells
        for note in other.notes:
            self.note(note)

    def close(self) -> None:
        """Make the time of one sequence at a time a cell; files of different draft lengths have separate ones."""
        for drafted, (seconds, tokens) in self.timed.items():
            self.timed[drafted] = [0.0, 0]
            if seconds > 0:
                mean = self._length()[0] if drafted else 1.0
                self.cells.append(
                    MeasuredCell(
                        sequences=1, draft_length=self._one_length() if drafted else 0,
                        mean_acceptance_length=None if mean is None else round(mean, 4), tpot_ms=round(1000 * seconds / tokens, 5),
                    )
                )

    def _one_length(self) -> int | None:
        return next(iter(self.draft_lengths)) if len(self.draft_lengths) == 1 else None

    def merge_checks(self, other: ObservationSums) -> None:
        """Add the checked identities of others."""
        for name, (excess, difference, tolerance, count, failed) in other.checks.items():
            worst = self.checks.setdefault(name, [-math.inf, 0.0, 0.0, 0, 0])
            if excess > worst[0]:
                worst[:3] = [excess, difference, tolerance]
            worst[3], worst[4] = worst[3] + count, worst[4] + failed

    # --- The record ---

    def record(self, engine: str, dialects: Sequence[str], sources: Sequence[LogSource]) -> AcceptanceRecord:
        """Record of these sums."""
        lengths = self.draft_lengths
        if len(lengths) > 1:
            known = [str(each) for each in sorted(each for each in lengths if each is not None)]
            listed = ", ".join([*known, "unknown"][: len(lengths)])
            self.note(f"draft lengths are mixed ({listed}): draft_length is null, survival is over all drafts")
        draft_length = self._one_length()
        drafts = None if self.drafts is None or not self.count else round(self.drafts)
        if drafts is not None and not self.exact:
            self.note("drafts is computed from rounded figures; it is right within their rounding")
        if self.positions and not self.whole:
            self.note("survival is of rounded rates, without exact counts; it is right within their rounding")
        length, slack = self._length()
        self._check_sums(drafts, draft_length, length, slack)
        self.close()
        per_request = None
        if self.requests and len(self.per_request["drafts"]):
            per_request = {
                name: tuple(None if math.isnan(value) else value for value in values) for name, values in self.per_request.items()
            }
            if len(self.per_request["drafts"]) < self.requests:
                self.note(f"per_request has the first {len(self.per_request['drafts'])} of {self.requests} requests")
        ratio = self.accepted / self.drafted if self.count and self.accepted is not None and self.drafted else None
        reached = min((0 if each is None else each for each in lengths), default=0) if len(lengths) > 1 else MOST_POSITIONS
        made = AcceptanceRecord(
            engine=engine, dialects=tuple(dialects), sources=tuple(sources), draft_length=draft_length, drafts=drafts,
            drafted=self.drafted if self.count else None, accepted=self.accepted if self.count else None,
            mean_acceptance_length=length, mean_acceptance_length_rounding=slack, draft_acceptance_rate=ratio,
            histogram=tuple(self.histogram) if self.histogram and self.count else None, survival=self._survival(drafts),
            requests=self.requests or None, per_request=per_request,
            draft_ms_per_token=self.drafting[0] / self.drafting[1] if self.drafting[1] else None,
            identities=self._identities(), cells=tuple(self.cells), notes=tuple(self.notes),
        )  # fmt: skip
        return with_intervals(made, reached)

    def _length(self) -> tuple[float | None, float | None]:
        """Mean acceptance length, and its rounding if it is not of counts alone."""
        accepted, drafts = self.counted
        if not self.without_counts:
            return (1 + accepted / drafts, None) if drafts else (None, None)
        if drafts and self.drafts is None:  # weights of the two kinds are not comparable
            self.note("the mean acceptance length is of the observations with counts; those with a length alone are left out")
            return 1 + accepted / drafts, None
        weight = self.length_weight + drafts
        if not weight:
            return None, None
        return (self.length_sum + accepted + drafts) / weight, self.length_slack / weight or None

    def _survival(self, drafts: int | None) -> tuple[float, ...] | None:
        if self.rates is not None:
            return tuple(each.value for each in self.rates)
        if not self.positions or not self.drafts or not drafts:
            return None
        return tuple(min(number / self.drafts, 1.0) for number in self.positions[: self.known])

    def _check_sums(self, drafts: int | None, draft_length: int | None, length: float | None, slack: float | None) -> None:
        """Identities of the record."""
        if length is not None and draft_length:
            self.check(Check(AT_MOST, max(length - draft_length - 1, 0.0), (slack or 0.0) + 1e-9))
        survival = self._survival(drafts)
        if survival and drafts and drafts >= FEW:
            self.check(Check(REAL_TEXT, max(survival[0] - 0.999 + 1e-9, 0.0), 0.0))
            if survival[0] >= 0.999:
                self.note("the first draft position accepts .999 or more: no real text, but repetitions or forced acceptance")

    def _identities(self) -> tuple[Identity, ...]:
        found = []
        for name, (_, difference, tolerance, count, failed) in self.checks.items():
            note = f"{failed:g} of {count:g} fail" if failed and count > 1 else ""
            found.append(Identity(name, not failed, difference, tolerance, note))
        return tuple(found)


def _sum(total: Any, value: Any) -> Any:
    return None if total is None or value is None else total + value


def _sum_lists(total: list[Any] | None, values: Sequence[Any] | None) -> list[Any] | None:
    """Sum by position; shorter lists end with zeros."""
    if total is None or values is None:
        return None
    return [first + second for first, second in zip_longest(total, values, fillvalue=0)]


def whole_length(drafted: int | None, drafts: float | None) -> int | None:
    """Draft length d / D if it is a whole number: all drafts then have one length, or their mean happens to be whole."""
    if not drafted or not drafts or drafted % drafts:
        return None
    return int(drafted / drafts)


def checked_drafts(drafts: int | None, drafted: int | None) -> None:
    """Raise `ParameterError` for drafted tokens without drafts."""
    if drafts == 0 and drafted:
        raise ParameterError(f"drafts must be at least 1 with drafted={checks.shown(drafted)} tokens, got 0")
