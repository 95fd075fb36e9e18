"""Draft lengths by the number of running sequences, in closed form: the best schedule, and where drafts stop paying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.advice.acceptance_draws import AcceptanceDraws
from model.engines.step_law import StepLaw
from model.serving import closed_form
from model.serving.closed_form import ClosedForm, Workload
from model.serving.decodings import Drafter
from model.serving.scheduler import ServerSettings
from model.serving.step_prices import LawPrices
from sim.advice import engine_settings
from sim.advice.engine_settings import Range

Floats = NDArray[np.float64]

SHARE = 0.8
"""Share of the draws that is within an interval."""
DRAWS = 20
"""Draws of the law and of acceptance for where drafts stop paying."""
MARGIN = 1.02
"""A longer or shorter draft must be this much faster to replace the schedule's last one: a switch costs more than a tie wins."""
CONTEXTS = (512, 2048, 8192, 32768, 131072)
"""Contexts of the map, if the memory holds one sequence of them [positions]."""


class ScheduleRow(NamedTuple):
    """Closed form at a number of running sequences."""

    running: int
    draft_length: int
    output_tokens_per_s: float
    plain_tokens_per_s: float


class ContextRow(NamedTuple):
    """Best draft length at a context and a number of running sequences, with its gain over plain decoding; None: does not fit."""

    context: int
    running: int
    draft_length: int | None
    gain_over_off: float | None


class SwitchOffLoad(NamedTuple):
    """From how many running sequences on drafts do not pay, in closed form, with its 80 % interval; None: not within the server."""

    running: float | None
    running_low: float | None
    running_high: float | None
    rate: float | None
    """Requests per second that plain decoding keeps up with at this number, with its 80 % interval."""
    rate_low: float | None
    rate_high: float | None


NOWHERE = SwitchOffLoad(*[None] * 6)


@dataclass(frozen=True, eq=False)
class Schedules:
    """Schedules of one model, draft and workload.

    Parameters
    ----------
    law, prices, acceptance
        The step law, its prices, and the acceptance of drafts.
    passes
        How the draft makes its tokens.
    longest
        Largest draft length; 0 without a draft.
    settings
        Settings of the server.
    """

    law: StepLaw
    prices: LawPrices
    acceptance: AcceptanceDraws
    passes: Drafter
    longest: int
    settings: ServerSettings

    @property
    def positions(self) -> int | None:
        """Positions that the cache holds altogether; None: any number."""
        return None if self.settings.num_blocks is None else self.settings.num_blocks * self.settings.block_size

    def rows(self, workload: Workload) -> tuple[ScheduleRow, ...]:
        """Best draft length by running sequences; one that replaces the last must win more than a tie."""
        found = []
        plain, forms = ClosedForm(self.prices, 1.0, 0, 0, workload), self._forms(workload)
        last: int | None = None
        for running in numbers(self.fitting(workload)):
            speeds = [form.at_concurrency(running).output_tokens_per_s for form in forms]
            best = int(np.argmax(speeds))
            if last is not None and speeds[best] < MARGIN * speeds[last]:
                best = last
            last = best
            found.append(ScheduleRow(running, best, speeds[best], plain.at_concurrency(running).output_tokens_per_s))
        return tuple(found)

    def fitting(self, workload: Workload) -> int:
        """Most sequences that run: those of the setting, or as many as the cache holds with all of their output."""
        most = self.settings.max_num_seqs
        if self.positions is None:
            return most
        return max(1, min(most, int(self.positions // self.settings.memory_of(workload.prompt + workload.output))))

    def by_context(self, output: float, progress: Callable[[str], None] = lambda _: None) -> tuple[ContextRow, ...]:
        """Best draft length over running sequences and context, which is that of a prompt and half its output.

        Plain decoding is that of a server that loads no draft.
        """
        found: list[ContextRow] = []
        for context in CONTEXTS:
            held = self.settings.memory_of(context)
            if self.positions is not None and held > self.positions:
                break
            progress(f"best draft lengths at a context of {context:,}")
            workload = Workload(max(context - output / 2, 1.0), output)
            plain, drafting = ClosedForm(self.prices, 1.0, 0, 0, workload), self._forms(workload)[1:]
            for running in numbers(self.settings.max_num_seqs):
                if self.positions is not None and running * held > self.positions:
                    found.append(ContextRow(context, running, None, None))
                    continue
                alone = plain.at_concurrency(running).output_tokens_per_s
                gains = [1.0, *(form.at_concurrency(running).output_tokens_per_s / alone for form in drafting)]
                best = int(np.argmax(gains))
                found.append(ContextRow(context, running, best, gains[best]))
        return tuple(found)

    def _forms(self, workload: Workload) -> list[ClosedForm]:
        """The closed form of each draft length; a draft that is loaded may make passes also where nothing is drafted."""
        lengths = self.acceptance.lengths([*range(self.longest + 1)])[0]
        return [
            ClosedForm(self.prices, float(lengths[each]), each, self.passes(each), workload) for each in range(self.longest + 1)
        ]

    def switch_off(self, workload: Workload) -> SwitchOffLoad:
        """Where drafts stop paying, for the estimates and for draws of the law and of acceptance."""
        if not self.longest:
            return NOWHERE
        lengths = [*range(self.longest + 1)]
        point, drawn = self.acceptance.lengths(lengths)
        prices = LawPrices(
            self.law, range(DRAWS), own_device=self.prices.own_device, async_scheduling=self.prices.async_scheduling
        )
        own, rate = self._off_from(workload, prices, point)
        others = [self._off_from(workload, prices.drawn(index), drawn[index % len(drawn)]) for index in range(DRAWS)]
        ends = [(1 - SHARE) / 2, (1 + SHARE) / 2]
        found = []
        for middle, drawn_values in ((own, [each for each, _ in others]), (rate, [each for _, each in others])):
            low, high = np.quantile([*drawn_values, middle], ends, method="nearest")
            found += [middle, min(float(low), middle), max(float(high), middle)]
        return SwitchOffLoad(*(each if math.isfinite(each) else None for each in found))

    def bound(self, workload: Workload, running: int) -> float:
        """Most tokens per second that any policy of draft length reaches with this many running sequences [tokens/s]."""
        rates = self.acceptance.point[: self.longest].tolist()
        return closed_form.bound(self.prices, rates, running, workload, lambda length: self.passes(length) if length else 0)

    def _off_from(self, workload: Workload, prices: LawPrices, accepted: Floats) -> tuple[float, float]:
        """Least number of running sequences from which on no draft gives more tokens per second, and the requests per second that
        plain decoding then keeps up with; inf: there is none.

        The last number at which one does is sought among powers of two and their thirds, and the root between it and the next.
        """
        forms = [ClosedForm(prices, min(float(mean), each + 1.0), each, self.passes(each) if each else 0, workload)
                 for each, mean in enumerate(accepted)]  # fmt: skip

        def pays(running: int) -> bool:
            plain, *drafts = (form.at_concurrency(running).output_tokens_per_s for form in forms)
            return max(drafts) > plain

        most = self.fitting(workload)
        off, low = None, 0
        for running in sorted({*numbers(most), most}, reverse=True):
            if pays(running):
                low = running
                break
            off = running
        if off is None:
            return math.inf, math.inf
        while off - low > 1:
            middle = (low + off) // 2
            low, off = (middle, off) if pays(middle) else (low, middle)
        return off, forms[0].at_concurrency(off).requests_per_s


def as_ranges(rows: Sequence[ScheduleRow]) -> list[Range]:
    """A schedule as ranges of running sequences.

    >>> as_ranges([ScheduleRow(1, 4, 2.0, 1.0), ScheduleRow(2, 4, 2.0, 1.0), ScheduleRow(3, 0, 2.0, 2.0)])
    [Range(first=1, last=2, draft_length=4), Range(first=3, last=4096, draft_length=0)]
    """
    return engine_settings.schedule([row.running for row in rows], [row.draft_length for row in rows])


def numbers(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to the largest number.

    >>> [*numbers(20)]
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    power = 1
    while power <= most:
        yield power
        if power > 1 and 3 * power // 2 <= most:
            yield 3 * power // 2
        power *= 2
