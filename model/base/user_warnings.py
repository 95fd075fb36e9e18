"""Warnings of commands: one line each on stderr, without a source location, never repeated."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def print_warnings() -> Iterator[None]:
    """Print each warning as one line on stderr.

    Warnings of numeric overflow are printed at the end, and only if no error was raised, because the error explains them.
    """
    shown: set[str] = set()
    later: dict[str, None] = {}

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = (str(message).splitlines() or [category.__name__])[0]
        if issubclass(category, RuntimeWarning):
            later[text] = None
        elif text not in shown:
            shown.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
    for text in later:
        print(f"warning: {text}", file=sys.stderr)
