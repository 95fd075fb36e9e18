"""Work for processes that tests start; light to import, because each process imports it."""

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
"""Time after which a test is considered to hang [s], far longer than the slowest machine needs."""


def tiny_replica(kind: str, seed: int = 0) -> Replica:
    """The model of `real_models`, in a form that any process can build."""
    return Replica(real_models.config(kind, LAYERS).to_json_string(), dtype="float64", random=seed, spread=3.0)


def one_pass_forever(token: int = 5) -> Steps:
    """Start a sub-process with one pass, and wait for it."""
    while True:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        subs = yield Fork((Forward("target", (token,), 2, LayerSpan(0, LAYERS)),), (1,))
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))


def parent_process(end: Any, busy: bool) -> None:
    """Start workers, send their ids, and keep them at work or idle until this process is killed.

    The workers belong to the fork server of this process's parent, which survives: its end is not the signal that they see.
    """
    server: Any = forkserver
    # Otherwise a second server would start: a process started by a server does not know that it runs.
    server.ensure_running = server._forkserver.ensure_running = lambda: None
    with started(tiny_replica("llama"), 3, 16) as pool:
        end.send(pool.pids)
        if busy:
            Parallel(pool).run(one_pass_forever(), 1_000_000)
        time.sleep(PATIENCE)


def parent_with_fork_server(end: Any) -> None:
    """Start idle workers from a fork server of this process, and send their ids."""
    pool_of.LIBRARIES = "torch", "calibrate.workers.worker_loop"  # no model is built; importing more would take most of the time
    pool = pool_of.Pool(["cpu"] * 3, [], pool_of.SPIN, PATIENCE, True)
    for post in pool.posts.values():
        pool._answer(post, "up")
    end.send(pool.pids)
    time.sleep(PATIENCE)
