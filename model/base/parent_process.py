"""Worker processes that end with the process that started them, however that ends: also where it is killed, and can tell nobody."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

EVERY_S = 0.5
"""How often a worker looks whether its parent is still there [s]."""
_watched: set[int] = set()


def end_with(parent: int, every: float = EVERY_S) -> None:
    """End this process soon after its parent of this process number is gone; asking again changes nothing.

    A process whose parent ends is given to another one, so that is what shows. (A signal of the kernel's own would come when the
    thread ends that started the process, and not the process that it is of.)
    """
    if os.getppid() != parent:
        os._exit(1)
    if parent in _watched:
        return
    _watched.add(parent)
    threading.Thread(target=_watch, args=(parent, every), name="watches the parent", daemon=True).start()


def end_with_starter() -> None:
    """The same in a process that `multiprocessing` has started afresh, which knows who did."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:
        end_with(starter.pid)


def _watch(parent: int, every: float) -> None:
    while os.getppid() == parent:
        time.sleep(every)
    os._exit(1)
