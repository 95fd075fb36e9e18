"""Recorded calls of the functions that do a command's work, which are replaced."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app as calibrate_app
from sim.commands.sim_app import app as sim_app

APPS = {"sim": sim_app, "calibrate": calibrate_app}


class ReachedError(Exception):
    """The work was reached; it is not done here."""


class Record:
    """Calls of functions by their dotted names, with the names of their arguments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.calls: dict[str, dict[str, Any]] = {}

    def replace(self, name: str, answer: Any = ReachedError) -> None:
        """Replace a function: record its arguments, and return `answer` (a function of them or a value) or raise `ReachedError`."""
        module, _, function = name.rpartition(".")
        owner = importlib.import_module(module)
        signature = inspect.signature(getattr(owner, function))

        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls[name] = dict(bound.arguments)
            if answer is ReachedError:
                raise ReachedError
            return answer(**bound.arguments) if callable(answer) else answer

        self.patch.setattr(owner, function, recorded)


def run_until_work(command: str, words: str = "") -> None:
    """Run a command until it reaches the work."""
    program, *verbs = command.split()
    done = CliRunner().invoke(APPS[program], [*verbs, *words.split()])
    assert isinstance(done.exception, ReachedError), (done.output, done.exception)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[str]:
    yield "a bar"
