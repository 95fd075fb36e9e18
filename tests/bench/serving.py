"""Servers under load relative to round numbers: a million generated tokens per second, and 100,000 by generators in SimPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.engines import step_law
from model.outcomes.outcome_laws import Iid
from model.serving import fast_server
from model.serving.draft_policies import Static
from model.serving.loads import DrawnLoad, RequestLengths
from model.serving.scheduler import ServerSettings
from model.serving.step_prices import LawPrices
from sim.engine import serving
from tests.bench.measure import Benchmark, rate
from tests.support.serving import drawn, served, server

LENGTH = 3
PRICES = LawPrices(step_law.load("vllm-llama-3.1-8b-eagle3-h100"))


def serve(clients: int, requests: int, *, generators: bool = False, method: str = "heads") -> int:
    """Serve requests of 200 tokens in closed loop; return the tokens generated."""
    load = DrawnLoad(RequestLengths(200, 200, 0.5, 0.5), requests, concurrency=clients)
    outcomes = drawn(Iid(0.7), load, LENGTH)
    one = server(load, Static(LENGTH), PRICES, outcomes, ServerSettings(max_num_seqs=clients), method, generators=generators)
    return served(load, one, drive=serving.serve if generators else fast_server.serve).totals.emitted


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Three drafted tokens, an acceptance rate of 0.7."""

    def tokens_of(clients: int, requests: int, **how: Any) -> Callable[[], float]:
        number = 4 if tiny else requests
        return lambda: rate(serve(clients, number, **how), lambda: serve(clients, number, **how))

    return [
        Benchmark("serving-64", "tokens/s", tokens_of(64, 2000), lambda: 1e6, "a million tokens per second", 1),
        Benchmark("serving-1", "tokens/s", tokens_of(1, 30), lambda: 1e6, "a million tokens per second", 0.02),
        Benchmark("serving-events", "tokens/s", tokens_of(32, 200, generators=True), lambda: 1e5,
                  "100,000 tokens per second", 0.5),
    ]  # fmt: skip
