"""Servers for tests: prices in quarters of a second, so that sums of times are exact, and any method's generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.interpret.simulated_answers import EARLY_LAYERS, DraftOutcomes, World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.early_exit import algorithm as early_exit
from model.methods.ngram import algorithm as ngram
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.speculative import algorithm as speculative
from model.serving import decodings, fast_server
from model.serving.decodings import Arrays, Drafter, Generators
from model.serving.draft_policies import DraftPolicy
from model.serving.loads import TracedLoad, TracedRequests
from model.serving.recorder import Recorder
from model.serving.request_outcomes import RequestOutcomes
from model.serving.scheduler import ServerSettings
from model.serving.server import Server, ServerRequest
from model.serving.step_prices import RaggedPass
from model.steps import Steps

LAYERS = 6
EXIT = 2
SHORTEST, LONGEST_OUTPUT = 3, 12


@dataclass(frozen=True)
class Linear:
    """Times that grow linearly with everything [s]."""

    step: float = 1.0
    token: float = 0.25
    position: float = 0.0
    prompt_token: float = 0.0
    drafting: float = 0.25
    drafting_each: float = 0.0
    rounds: float = 0.0

    def target(self, over: RaggedPass) -> float:
        left_out = sum(each.share * (over.tokens - each.tokens) for each in over.shares)
        found = -self.token * left_out
        found += self.step + self.token * over.tokens + self.position * over.positions + self.prompt_token * over.prompt_tokens
        return found + self.rounds * over.drafted

    def draft(self, sequences: int, positions: int) -> float:
        return self.drafting + self.drafting_each * sequences

    def own_layers(self, share: float, sequences: int, positions: int) -> float:
        return self.token * share * sequences


class Recorded:
    """Outcomes that are given: accepted tokens, or packed lookups, by request and output position."""

    def __init__(self, rows: list[list[int]], outcome: str = "accept") -> None:
        self.rows, self.outcome = rows, outcome

    def of(self, number: int) -> Any:
        return np.array(self.rows[number], dtype=np.int64)


METHODS: dict[str, tuple[str, Drafter]] = {
    "autoregressive": ("accept", decodings.NONE), "model": ("accept", decodings.MODEL),
    "heads": ("accept", decodings.HEADS), "parallel": ("accept", decodings.PARALLEL),
    "ngram": ("lookup", decodings.NONE),
    "self": ("accept", decodings.own_layers(EXIT, LAYERS, continues=True)),
    "self-again": ("accept", decodings.own_layers(EXIT, LAYERS, continues=False)),
    "early-exit": ("accept", decodings.NONE), "skipdecode": ("accept", decodings.NONE),
}  # fmt: skip
"""Outcome and draft passes of the methods that are served."""


SKIPPING = skipdecode.Parameters(LAYERS, SHORTEST, LAYERS, 0, LONGEST_OUTPUT)
BUDGETS = {
    "early-exit": (np.full(LONGEST_OUTPUT, EXIT), LAYERS),
    "skipdecode": (np.array(skipdecode.schedule(SKIPPING, LONGEST_OUTPUT)), LAYERS),
}  # fmt: skip
"""Layers of the token after each number of generated ones."""
LOSSY = ("autoregressive", *BUDGETS)
"""Methods that draft nothing."""


def started(method: str, longest: int, *, cut: bool = False) -> Callable[[ServerRequest, Any], tuple[Steps, World]]:
    """Start a request's algorithm with its outcomes."""
    together = {"sequences": 1 if cut else 2}

    def decode(request: ServerRequest, row: Any) -> tuple[Steps, World]:
        prompt, outcomes = [*range(request.prompt)], row.tolist()
        if method == "autoregressive":
            return autoregressive.decode(autoregressive.Parameters(layers=LAYERS), prompt, request.output), World(
                request.prompt, LAYERS
            )
        if method == "early-exit":
            return early_exit.decode(early_exit.Parameters(LAYERS, exit_layer=EXIT), prompt, request.output), World(
                request.prompt, LAYERS
            )
        if method == "skipdecode":
            # The schedule begins after the prompt, which is then as long as this one.
            bounds = len(prompt), len(prompt) + LONGEST_OUTPUT
            own = skipdecode.Parameters(LAYERS, SHORTEST, LAYERS, *bounds)
            return skipdecode.decode(own, prompt, request.output), World(request.prompt, LAYERS)
        if method in ("self", "self-again"):
            early = self_speculative.Parameters(LAYERS, EXIT, longest, reuse=method == "self", **together)
            world = World(request.prompt, LAYERS, drafts={EARLY_LAYERS: DraftOutcomes("target", outcomes)})
            return self_speculative.decode(early, prompt, request.output), world
        if method == "ngram":
            own = ngram.Parameters(LAYERS, max(longest, 1), **together)
            return ngram.decode(own, prompt, request.output), World(request.prompt, LAYERS, lookups=outcomes)
        of = speculative.Parameters(LAYERS, longest, drafter=method, **together)
        world = World(request.prompt, LAYERS, drafts={"draft": DraftOutcomes("target", outcomes)})
        return speculative.decode(of, prompt, request.output), world

    return decode


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
        made = Generators(started(method, policy.longest), outcomes, finished)
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
