"""What processes that tests start are given to do; light to import, as each of them imports it."""

from __future__ import annotations

import time
from multiprocessing import forkserver
from typing import Any

from calibrate.loading.replicas import Replica
from calibrate.workers import worker_pool as pool_of
from calibrate.workers.over_processes import Parallel, started
from model.steps import Commit, Fork, Forward, Join, LayerSpan, Read, Steps
from tests.support import real_models
from tests.support.real_models import DEPTHS

LAYERS = DEPTHS["target"]
PATIENCE = 300
"""Seconds after which something is taken to hang: a net under tests that wait, far beyond what the slowest machine takes."""


def tiny(kind: str, seed: int = 0) -> Replica:
    """The model of `real_models`, as any process can make it."""
    return Replica(real_models.config(kind, LAYERS).to_json_string(), dtype="float64", random=seed, spread=3.0)


def asking(token: int = 5) -> Steps:
    """A sub-process makes a pass, and the main process waits for it."""
    while True:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        subs = yield Fork((Forward("target", (token,), 2, LayerSpan(0, LAYERS)),), (1,))
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))


def parent(end: Any, busy: bool) -> None:
    """Start workers, say which, and keep them at work or idle until somebody ends this process.

    They are of the server that this process is of, which lives on: that is not what they see the end of.
    """
    server: Any = forkserver
    # Else there were another: a process that a server has started does not know that it runs.
    server.ensure_running = server._forkserver.ensure_running = lambda: None
    with started(tiny("llama"), 3, 16) as pool:
        end.send(pool.pids)
        if busy:
            Parallel(pool).run(asking(), 1_000_000)
        time.sleep(PATIENCE)


def parent_with_a_server(end: Any) -> None:
    """Start workers of a server of this process, which have nothing to do, and say which."""
    pool_of.LIBRARIES = "torch", "calibrate.workers.worker_loop"  # no model is made: loading others would take the most time
    pool = pool_of.Pool(["cpu"] * 3, [], pool_of.SPIN, PATIENCE, True)
    for post in pool.posts.values():
        pool._answer(post, "up")
    end.send(pool.pids)
    time.sleep(PATIENCE)
