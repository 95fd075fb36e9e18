"""Worker processes that end with their parent process, even if the parent is killed and cannot notify them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

EVERY_S = 0.5
"""Interval between a worker's checks of its parent [s]."""
_watched: set[int] = set()


def end_with(parent: int, every: float = EVERY_S) -> None:
    """End this process soon after its parent, whose process number is `parent`, has ended. Repeated calls have no effect.

    The kernel assigns a new parent to a process whose parent ends; a thread checks for that. (The kernel's own signal is sent when
    the thread that started the process ends, not the parent process.)
    """
    if os.getppid() != parent:
        os._exit(1)
    if parent in _watched:
        return
    _watched.add(parent)
    threading.Thread(target=_watch, args=(parent, every), name="watches the parent", daemon=True).start()


def end_with_starter() -> None:
    """`end_with` the parent, in a process started by `multiprocessing`."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:
        end_with(starter.pid)


def _watch(parent: int, every: float) -> None:
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)
