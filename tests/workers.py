"""What processes that tests start are given to do; light to import, as each of them imports it."""

from __future__ import annotations

import time
from typing import Any

from calibrate.processes import Parallel, started
from calibrate.replicas import Replica
from model.steps import Commit, Fork, Forward, Join, Read, Steps
from tests import real_models
from tests.real_models import DEPTHS

LAYERS = DEPTHS["target"]
PATIENCE = 300
"""Seconds after which something is taken to hang: a net under tests that wait, far beyond what the slowest machine takes."""


def tiny(kind: str, seed: int = 0) -> Replica:
    """The model of `real_models`, as any process can make it."""
    return Replica(real_models.config(kind, LAYERS).to_json_string(), dtype="float64", random=seed, spread=3.0)


def asking(token: int = 5) -> Steps:
    """A sub-process makes a pass, and the main process waits for it."""
    while True:
        out = yield Forward("target", (3, 4), 0, 0, LAYERS, None, 1)
        subs = yield Fork((Forward("target", (token,), 2, 0, LAYERS),), (1,))
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))


def parent(end: Any, busy: bool) -> None:
    """Start workers, say which, and keep them at work or idle until somebody ends this process."""
    with started(tiny("llama"), 3, 16) as pool:
        end.send(pool.pids)
        if busy:
            Parallel(pool).run(asking(), 1_000_000)
        time.sleep(PATIENCE)
