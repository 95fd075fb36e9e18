"""Serving in closed form: throughput and time per token at a fixed number of running sequences, and under arrivals.

With R running sequences, each step verifies R (K + 1) tokens after the draft's passes, and emits R AL tokens (AL: mean tokens of
a round). A request of P prompt and N output tokens takes one pass of its prompt, which gives its first token, and (N - 1) / AL
rounds; with a prompt of one token, N / AL rounds. Prompts of other requests lengthen rounds: each finished request brings the next
one's prompt.

It holds where sequences make progress independently of each other, the cache suffices, prompts fit a pass, and N is much larger
than AL. With plain decoding and steps that cost a constant and tokens its error is bounded on every path (theorems 55a and 55b of
`sim check --method serving`); other simulations tend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.serving.step_prices import RaggedPass, StepPrices, drafting_seconds

_POINTS = 40
"""Numbers of running sequences at which times are computed; between them they are interpolated."""


class Workload(NamedTuple):
    """Mean tokens of prompts and outputs."""

    prompt: float
    output: float


class Steady(NamedTuple):
    """A steady state of one server."""

    running: float
    """Running sequences."""
    requests_per_s: float
    output_tokens_per_s: float
    tpot_s: float
    """Time per output token after the first, of a sequence [s]."""
    e2e_s: float
    """Time of a request, without waiting [s]."""


@dataclass(frozen=True)
class ClosedForm:
    """Closed form of a server that drafts `draft_length` tokens a step.

    Parameters
    ----------
    prices
        Prices of passes.
    acceptance_length
        Mean tokens of a round with this draft, the target's own included.
    draft_length, draft_passes
        Drafted tokens of a sequence, and passes of the draft, in a step.
    workload
        RequestLengths of requests.
    """

    prices: StepPrices
    acceptance_length: float
    draft_length: int
    draft_passes: int
    workload: Workload

    def __post_init__(self) -> None:
        checks.whole("draft_length", self.draft_length, 0)
        checks.number("acceptance_length", self.acceptance_length, 1, self.draft_length + 1)

    @property
    def rounds(self) -> float:
        """Rounds of a request, after the first token if the pass of a prompt gives it; at least one for any further token."""
        left = max(self.workload.output - self._first, 0.0)
        return max(left / self.acceptance_length, min(left, 1.0))

    @property
    def _first(self) -> float:
        """Tokens that the pass of a prompt gives: none if the prompt is a single token, which a round reads."""
        return 1.0 if self.workload.prompt > 1 else 0.0

    def round_seconds(self, running: float) -> float:
        """Seconds of a step of `running` sequences without prompts [s]."""
        return _between(running, self._round)

    def _round(self, running: int) -> float:
        positions = int(running * (self.workload.prompt + self.workload.output / 2))
        tokens = running * (self.draft_length + 1)
        drafting = drafting_seconds(self.prices, self.draft_passes, running, positions)
        return drafting + self.prices.target(RaggedPass(running, tokens, positions, self.draft_length > 0))

    def prompt_seconds(self, running: float) -> float:
        """Seconds by which the prompt of a request lengthens a step of `running` sequences [s]."""
        prompt = round(self.workload.prompt)
        if prompt <= 1:
            return 0.0

        def added(running: int) -> float:
            positions = int(running * (prompt + self.workload.output / 2))
            over = RaggedPass(running, running * (self.draft_length + 1), positions, self.draft_length > 0)
            with_prompt = over._replace(prompts=1, prompt_tokens=prompt)
            return self.prices.target(with_prompt) - self.prices.target(over)

        return _between(running, added)

    def at_concurrency(self, running: float) -> Steady:
        """Steady state with this many running sequences.

        A request takes its rounds and one pass with its prompt, and meets the prompts of the `running` - 1 other requests that end
        meanwhile: each of them once in its own time.
        """
        checks.number("running", running, 1)
        rounds = self.rounds
        base = (rounds + self._first) * self.round_seconds(running)
        e2e = base + running * self.prompt_seconds(running)
        rate = running / e2e
        decoded = max(self.workload.output - 1, 1.0)
        return Steady(running, rate, rate * self.workload.output, (e2e - self.first_seconds(running)) / decoded, e2e)

    def under_arrivals(self, rate: float, most: int) -> Steady | None:
        """Steady state under `rate` requests per second with at most `most` running; None if the server cannot keep up.

        With n running, requests end at the rate n / e2e(n). Poisson arrivals then find n running with the probabilities of a
        birth-death process, for any law of lengths, as in processor sharing [Kelly1979]; up to `most` run, the others
        wait. `running` is their mean, and by Little's law running = rate x time of a request without waiting.

        [Kelly1979] F. P. Kelly. Reversibility and Stochastic Networks. Wiley, 1979, Section 3.3.
        """
        checks.number("rate", rate, 1e-9)
        checks.whole("most", most, 1)
        chosen = np.unique(np.round([*range(1, min(most, 16) + 1), *np.geomspace(1, most, _POINTS)]).astype(int))
        times = [self.at_concurrency(int(each)).e2e_s for each in chosen]
        number = np.arange(1, most + 1)
        ends = number / np.interp(number, chosen, times)
        if ends[-1] <= rate:
            return None
        chances = np.concatenate([[0.0], np.cumsum(np.log(rate) - np.log(ends))])
        chances = np.exp(chances - chances.max())
        chances[-1] /= 1 - rate / ends[-1]  # all states in which `most` run and any number wait
        running = float(np.arange(most + 1) @ chances / chances.sum())
        e2e = running / rate
        own = self.first_seconds(max(running, 1.0))
        tpot = (e2e - own) / max(self.workload.output - 1, 1.0)
        return Steady(running, rate, rate * self.workload.output, tpot, e2e)

    def first_seconds(self, running: float) -> float:
        """Time of the pass that gives a request's first token, and reads its prompt [s]."""
        return self.round_seconds(running) + self.prompt_seconds(running)


def bound(
    prices: StepPrices, rates: Sequence[float], running: int, workload: Workload, draft_passes: Callable[[int], int]
) -> float:
    """Most tokens per second that any policy of draft length reaches at a fixed number of running sequences [tokens/s].

    It holds for policies that do not know which drafted tokens will be accepted, if each is accepted independently with the rate of
    its draft position. Then a step over given draft lengths emits, on average, one token per sequence and the survival of each
    drafted token, and no choice of steps is faster than the step with the most expected tokens per second. Of all choices with the
    same number of drafted tokens and the same longest draft the one that takes the likeliest tokens is the best. Prompts and the
    growth of contexts are left out: all sequences are at the middle of their outputs.
    """
    positions = int(running * (workload.prompt + workload.output / 2))
    best = running / prices.target(RaggedPass(running, running, positions))
    survival, tokens = 1.0, float(running)
    for place, rate in enumerate(rates, 1):
        survival *= rate
        drafting = drafting_seconds(prices, draft_passes(place), running, positions)
        # With fewer sequences in the last pass of the draft it may take less: a pass for one sequence bounds it from below.
        least = drafting - (prices.draft(running, positions) - prices.draft(1, positions // running) if drafting else 0.0)
        for more in range(1, running + 1):
            count = running * place + more
            best = max(best, (tokens + more * survival) / (least + prices.target(RaggedPass(running, count, positions, True))))
        tokens += running * survival
    return best


def _between(running: float, at: Callable[[int], float]) -> float:
    """A quantity between whole numbers of sequences, interpolated linearly."""
    low = int(running)
    part = running - low
    return at(low) if not part else (1 - part) * at(low) + part * at(low + 1)


def switch_off_concurrency(drafting: ClosedForm, plain: ClosedForm, most: int) -> int | None:
    """Least number of running sequences from which on drafting never gives more tokens per second; None: it does up to `most`."""
    if drafting.workload != plain.workload:
        raise ParameterError("both closed forms must be of the same workload")
    last = None
    for running in range(most, 0, -1):
        if drafting.at_concurrency(running).output_tokens_per_s > plain.at_concurrency(running).output_tokens_per_s:
            break
        last = running
    return last
