"""Worker processes that end with their parent process, even if the parent is killed and cannot notify them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

CHECK_INTERVAL_S = 0.5
"""Interval between a worker's checks of its parent [s]."""
_watched: set[int] = set()


def exit_with_parent(parent: int, interval_s: float = CHECK_INTERVAL_S) -> None:
    """End this process soon after its parent, whose process number is `parent`, has ended. Repeated calls have no effect.

    The kernel assigns a new parent to a process whose parent ends; a thread checks for that. (The kernel's own signal is sent when
    the thread that started the process ends, not the parent process.)
    """
    if os.getppid() != parent:
        os._exit(1)
    if parent in _watched:
        return
    _watched.add(parent)
    threading.Thread(target=_watch, args=(parent, interval_s), name="watches the parent", daemon=True).start()


def exit_with_starter() -> None:
    """`exit_with_parent` the parent, in a process started by `multiprocessing`."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:
        exit_with_parent(starter.pid)


def _watch(parent: int, every: float) -> None:
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)
