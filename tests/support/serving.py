"""Servers for tests of any policy, load and law, with the prices and methods of the theorems' examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from model.serving import decodings, fast_server
from model.serving.decodings import Arrays, Generators
from model.serving.draft_policies import DraftPolicy
from model.serving.loads import TracedLoad, TracedRequests
from model.serving.records.recorder import Recorder
from model.serving.request_outcomes import RequestOutcomes
from model.serving.scheduler import ServerSettings
from model.serving.server import Server
from sim.theorems.served_examples import BUDGETS, METHODS, starter


class Recorded:
    """Outcomes that are given: accepted tokens, or packed lookups, by request and output position."""

    def __init__(self, rows: list[list[int]], outcome: str = "accept") -> None:
        self.rows, self.outcome = rows, outcome

    def of(self, number: int) -> Any:
        return np.array(self.rows[number], dtype=np.int64)


def trace(arrivals: Any, prompts: Any, outputs: Any, concurrency: int | None = None) -> TracedLoad:
    found = TracedRequests(np.array(arrivals, dtype=float), np.array(prompts), np.array(outputs))
    return TracedLoad(found, concurrency=concurrency)


def server(
    load: Any, policy: DraftPolicy, prices: Any, outcomes: Any, settings: ServerSettings, method: str = "model", *,
    generators: bool = False, finished: Callable[[int, list[int]], None] = lambda *_: None,
) -> Server:  # fmt: skip
    """A server of one method, by its generators or as arrays."""
    made: Any
    if generators:
        made = Generators(starter(method, policy.longest), outcomes, finished)
    else:
        drafter = METHODS[method][1] if policy.longest else decodings.NONE
        made = Arrays(outcomes, settings.max_num_seqs, drafter, BUDGETS.get(method))
    return Server(settings, policy, prices, made, load.request)


def served(load: Any, *servers: Server, drive: Callable[..., None] = fast_server.serve, **how: Any) -> Recorder:
    """Times of a load's requests, and totals."""
    recorder = Recorder(load)
    drive(load, servers, recorder, **how)
    return recorder


def drawn(law: Any, load: Any, longest: int, seed: int = 0, outcome: str = "accept") -> RequestOutcomes:
    return RequestOutcomes(law, outcome, longest, lambda number: load.request(number).output, load.count, seed=seed)
