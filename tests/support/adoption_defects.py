"""Algorithms with a defect that every interpreter must refuse: the adopted process has not ended by itself."""

from __future__ import annotations

from collections.abc import Callable

from model.steps import Adopt, Fork, Forward, Join, LayerSpan, Steps, Stop

EXIT = 2
"""Layer at which a sub-process is started, and at which its pass ends."""


def _started() -> Steps:
    """Begin the pass of a token, and start the next token's; return output and tasks."""
    out = yield Forward("target", (3,), 0, LayerSpan(0, EXIT))
    subs = yield Fork((Forward("target", (4,), 1, LayerSpan(0, EXIT)),), (1,))
    return out, subs


def adopts_running_task() -> Steps:
    out, subs = yield from _started()
    yield Forward("target", (3,), 0, LayerSpan(EXIT, EXIT + 1), out)  # at its end the other pass is half done
    yield Adopt(subs[0], 1, EXIT)


def adopts_waiting_task() -> Steps:
    _, subs = yield from _started()
    yield Adopt(subs[0], 1, EXIT)


def adopts_stopped_task() -> Steps:
    out, subs = yield from _started()
    yield Forward("target", (3,), 0, LayerSpan(EXIT, EXIT + 1), out)
    yield Stop(subs)
    yield Adopt(subs[0], 1, EXIT)


def adopts_task_stopped_before_start() -> Steps:
    _, subs = yield from _started()
    yield Stop(subs)
    yield Join(subs)
    yield Adopt(subs[0], 1, EXIT)


def _one_pass() -> Steps:
    yield Forward("target", (4,), 1, LayerSpan(0, EXIT))


def starts_with_cache_of_stopped_task() -> Steps:
    yield Forward("target", (3,), 0, LayerSpan(0, EXIT))
    subs = yield Fork((_one_pass(),), (1,))
    yield Stop(subs)
    yield Join((yield Fork((_one_pass(),), (2,), subs)))


TIME_INDEPENDENT_DEFECTS: list[tuple[Callable[[], Steps], str]] = [
    (adopts_waiting_task, "running task cannot be adopted; join it first"),
    (adopts_task_stopped_before_start, "stopped task cannot be adopted"),
]
"""Algorithms whose defect does not depend on the times of passes."""
ADOPTION_DEFECTS: list[tuple[Callable[[], Steps], str]] = [
    *TIME_INDEPENDENT_DEFECTS,
    (adopts_running_task, "running task cannot be adopted"),
    (adopts_stopped_task, "stopped task cannot be adopted"),
]
CACHE_DEFECTS: list[tuple[Callable[[], Steps], str]] = [(starts_with_cache_of_stopped_task, "stopped task cannot be adopted")]
"""Algorithms for interpreters that start processes with the caches of ended ones."""
