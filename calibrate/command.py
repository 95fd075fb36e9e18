"""What all commands of `calibrate` share."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's mistake into one line and exit code 2."""

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        from model.checks import ParameterError

        try:
            command(*args, **kwargs)
        except ParameterError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except OSError as error:
            print(f"error: {error.strerror or error} ({error.filename})", file=sys.stderr)
            raise typer.Exit(2) from None
        except BrokenPipeError:
            # Whoever read our output has had enough of it.
            sys.stderr.close()
            raise typer.Exit(0) from None

    return inner
