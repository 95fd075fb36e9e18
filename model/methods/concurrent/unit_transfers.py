"""Transfers between units as steps of an algorithm: a process without steps starts on another unit when its transfer ends."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from model.steps import Fork, Join, Step, Steps, Stop


def returned_to(unit: int) -> Generator[Step, Any, Any]:
    """Send a result to a unit; return the process that arrives there, with the cache of the process that sends it."""
    tasks = yield Fork((no_steps(),), (unit,))
    yield Join(tuple(tasks))
    return tasks[0]


def stop_order(task: Any) -> Steps:
    """Stop a task where this process arrives: the order to stop travels over a link."""
    yield Stop((task,))


def no_steps() -> Steps:
    """A process without steps: it arrives when its transfer over the link ends."""
    yield from ()
