"""Errors that a user can cause as commands show them: one line on stderr and an exit code, no traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from model.base.checks import ParameterError


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Exit with 2 and a line where an argument or a file is wrong, and with 0 where nobody reads the output any more."""
    try:
        yield
    except ParameterError as error:
        refuse(error)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:  # a name that is too long, a folder that may not be read, a disk that is full
        where = f" ({str(error.filename)[:200]})" if error.filename is not None else ""
        refuse(f"{error.strerror or error}{where}")


def refuse(message: object) -> None:
    """Exit with 2 and this line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2) from None
