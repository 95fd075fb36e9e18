"""Commands of `calibrate`, run in the process of the test."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app


def call(*arguments: str, code: int = 0) -> Any:
    """Run a command, check its exit code, and return its result."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == code, (done.output, done.stderr, done.exception)
    return done
