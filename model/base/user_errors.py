"""User errors of commands: one line on stderr and an exit code, without a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from model.base.checks import ParameterError


@contextlib.contextmanager
def exit_on_user_errors() -> Iterator[None]:
    """Turn a wrong argument or file into a line on stderr and exit code 2, and a closed output pipe into exit code 0."""
    try:
        yield
    except ParameterError as error:
        refuse(error)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:  # such as a name too long, missing permission, a full disk
        where = f" ({str(error.filename)[:200]})" if error.filename is not None else ""
        refuse(f"{error.strerror or error}{where}")


def refuse(message: object) -> None:
    """Print this error and exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2) from None
