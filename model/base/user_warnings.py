"""Warnings as commands show them: one line each, without a place in our sources, and said once."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Print each warning as one line on stderr.

    Those of arithmetic that ran over come at the end, where nothing else was wrong: an error says what they would.
    """
    said: dict[str, None] = {}
    later: dict[str, None] = {}

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = (str(message).splitlines() or [category.__name__])[0]
        if issubclass(category, RuntimeWarning):
            later[text] = None
        elif text not in said:
            said[text] = None
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
    for text in later:
        print(f"warning: {text}", file=sys.stderr)
