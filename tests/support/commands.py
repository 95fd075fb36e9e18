"""Commands of `calibrate`, run in the process of the test."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app


def call(*arguments: str, code: int = 0) -> Any:
    """What a command has said, which ended with this code."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == code, (done.output, done.stderr, done.exception)
    return done
