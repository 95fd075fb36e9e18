"""Advice for arrivals: how many requests run at a rate, by draft length, in closed form.

With arrivals the number of running sequences is not given: requests that take longer pile up. By Little's law a server with `rate`
requests per second runs rate x time of a request, and that time grows with the number that run (`model.serving.closed_form`).
Drafts so shorten requests twice: each runs for fewer steps, and fewer run. Arrivals are Poisson; `sim serve` simulates others, and
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.advice.acceptance_draws import AcceptanceDraws
from model.architectures import draft_heads
from model.base import checks
from model.engines.step_law import StepLaw
from model.serving import decodings
from model.serving.closed_form import ClosedForm, Workload
from model.serving.decodings import Drafter
from model.serving.step_prices import LawPrices

MOST_RUNNING = 256
"""Most running sequences of a server, as engines' `max_num_seqs`, unless fewer fit the memory."""
DRAWS = 20
"""Draws of the law and of acceptance for the intervals."""
SHARE = 0.8


@dataclass(frozen=True)
class ArrivalRow:
    """Steady state of one replica with one draft length.

    Parameters
    ----------
    draft_length
        Drafted tokens of a round; 0: plain decoding.
    running, tpot_ms, e2e_ms
        Running sequences, time per output token and time of a request; None if the server does not keep up.
    running_low, running_high, tpot_ms_low, tpot_ms_high, e2e_ms_low, e2e_ms_high
        80 % intervals over the draws that keep up; None if fewer than half do.
    keeps_up
        Share of the draws in which the server keeps up with the rate.
    most_requests_per_s
        Largest rate that one replica keeps up with.
    """

    draft_length: int
    running: float | None
    running_low: float | None
    running_high: float | None
    tpot_ms: float | None
    tpot_ms_low: float | None
    tpot_ms_high: float | None
    e2e_ms: float | None
    e2e_ms_low: float | None
    e2e_ms_high: float | None
    keeps_up: float
    most_requests_per_s: float


@dataclass(frozen=True)
class Arrivals:
    """Steady states at a rate of requests, by draft length, plain decoding first.

    Parameters
    ----------
    rate, replicas
        Requests per second altogether, and servers that share them evenly.
    workload
        Mean tokens of prompts and outputs.
    most_running
        Most running sequences of a replica.
    rows
        One for each draft length.
    """

    rate: float
    replicas: int
    workload: Workload
    most_running: int
    rows: tuple[ArrivalRow, ...]

    @cached_property
    def best(self) -> ArrivalRow | None:
        """The draft length with the shortest requests; None if none keeps up."""
        able = [row for row in self.rows if row.e2e_ms is not None]
        return min(able, key=lambda row: row.e2e_ms or 0.0, default=None)

    @property
    def running(self) -> tuple[int, ...]:
        """Whole numbers of running sequences with plain decoding and with the best draft."""
        found = {round(row.running) for row in (self.rows[0], self.best) if row is not None and row.running is not None}
        return tuple(sorted({max(1, each) for each in found})) or (self.most_running,)

    @property
    def verdict(self) -> str:
        """The advice for this rate in a sentence."""
        plain, best = self.rows[0], self.best
        on = "" if self.replicas == 1 else f" on {self.replicas} replicas"
        lengths = f"prompts of {self.workload.prompt:,.0f}, outputs of {self.workload.output:,.0f} tokens"
        where = f"at {self.rate:g} requests/s{on} ({lengths})"
        if best is None:
            most = max(self.rows, key=lambda row: row.most_requests_per_s)
            how = f"K = {most.draft_length}" if most.draft_length else "plain decoding"
            most_of_all = self.replicas * most.most_requests_per_s
            return f"{where} no draft length keeps up: at most {most_of_all:.3g} requests/s, with {how}"
        what = f"{f'K = {best.draft_length}' if best.draft_length else 'plain decoding'} has the shortest requests"
        times = f"TPOT {_timed(best, 'tpot_ms')} ms, {best.running:.0f} run"
        unsure = "" if best.keeps_up >= 1 else f"; in {1 - best.keeps_up:.0%} of the draws it does not keep up"
        if not best.draft_length:
            other = min(self.rows[1:], key=lambda row: row.e2e_ms or np.inf)
            drafts = (f"with K = {other.draft_length} they take {other.e2e_ms / (best.e2e_ms or 1):.2f} of the time"
                      if other.e2e_ms is not None else "with drafts the server does not keep up")  # fmt: skip
            return f"{where} {what}: {times}; {drafts}{unsure}"
        if plain.e2e_ms is None:
            against = f"without drafts the server keeps up with at most {self.replicas * plain.most_requests_per_s:.3g} requests/s"
        else:
            share = (best.e2e_ms or 0.0) / plain.e2e_ms
            against = f"a request takes {share:.2f} of the time without drafts, where {plain.running:.0f} run"
        return f"{where} {what}: {times}; {against}{unsure}"

    def document(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "rate": self.rate, "replicas": self.replicas, "prompt": self.workload.prompt, "output": self.workload.output,
            "most_running": self.most_running, "verdict": self.verdict,
            "best": None if self.best is None else self.best.draft_length, "table": [asdict(row) for row in self.rows],
        }  # fmt: skip


def _timed(row: ArrivalRow, name: str) -> str:
    value, low, high = (getattr(row, f"{name}{end}") for end in ("", "_low", "_high"))
    return f"{value:.3g}" if low is None else f"{value:.3g} (80 % interval {low:.3g} to {high:.3g})"


def drafter_of(draft: str | None) -> Drafter:
    """How a draft makes its passes; without a name it is taken for a head, as in most engines."""
    if draft_heads.is_parallel(draft):
        return decodings.PARALLEL
    return decodings.HEADS if draft is None or draft_heads.is_head(draft) else decodings.MODEL


def evaluate(
    law: StepLaw, acceptance: AcceptanceDraws, draft_lengths: Sequence[int], rate: float, workload: Workload, *,
    passes: Drafter, replicas: int = 1, most: int = MOST_RUNNING,
) -> Arrivals:  # fmt: skip
    """Steady states of plain decoding and of each draft length at `rate` requests per second.

    Parameters
    ----------
    passes
        How the draft makes its passes (`drafter_of`).
    replicas
        Servers that share the requests evenly.
    most
        Most running sequences of a server.
    """
    checks.number("rate", rate, 1e-6, 1e6)
    lengths = (0, *draft_lengths)
    point, draws = acceptance.lengths(lengths)
    prices = LawPrices(law, range(DRAWS))
    rows = []
    for column, length in enumerate(lengths):
        def form(of: LawPrices, accepted: float, length: int = length) -> ClosedForm:
            bounded = min(max(accepted, 1.0), length + 1.0)
            return ClosedForm(of, bounded, length, passes(length) if length else 0, workload)

        own = form(prices, float(point[column]))
        drawn = [form(prices.drawn(index), float(draws[index % len(draws), column])) for index in range(DRAWS)]
        rows.append(_row(length, own, drawn, rate / replicas, most))
    return Arrivals(rate, replicas, workload, most, tuple(rows))


def _row(length: int, own: ClosedForm, drawn: Sequence[ClosedForm], rate: float, most: int) -> ArrivalRow:
    state = own.under_arrivals(rate, most)
    states = [found for each in drawn if (found := each.under_arrivals(rate, most)) is not None]
    values: dict[str, float | None] = {}
    for name, of, unit in (("running", "running", 1.0), ("tpot_ms", "tpot_s", 1e3), ("e2e_ms", "e2e_s", 1e3)):
        value = None if state is None else unit * float(getattr(state, of))
        low = high = None
        if value is not None and 2 * len(states) >= len(drawn):
            ends = np.quantile([unit * getattr(each, of) for each in states], [(1 - SHARE) / 2, (1 + SHARE) / 2])
            low, high = min(float(ends[0]), value), max(float(ends[1]), value)
        values |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return ArrivalRow(
        length, **values, keeps_up=len(states) / len(drawn), most_requests_per_s=own.at_concurrency(most).requests_per_s
    )
