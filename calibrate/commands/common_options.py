"""What all commands of `calibrate` share: errors in one line, lists of numbers, progress on a terminal."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer

TEMPLATE = "How a data set is asked: squad, cnn-dm, wmt or none; or chat: by the model's own template."
"""Help of the options of this name."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's mistake into one line and exit code 2.

    Methods from outside hold while the command runs where the command line names them: as its METHOD, or by `--methods`.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        from model.base import user_warnings
        from model.base.checks import ParameterError
        from model.methods.registry import allowing

        own = kwargs.get("method")
        named = [*(kwargs.get("methods") or ()), *([own] if isinstance(own, str) and "." in own else [])]
        try:
            with user_warnings.in_words(), allowing(named):
                command(*args, **kwargs)
        except ParameterError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except BrokenPipeError:
            # Whoever read our output has had enough of it.
            sys.stderr.close()
            raise typer.Exit(0) from None
        except OSError as error:
            where = f" ({error.filename})" if error.filename is not None else ""
            print(f"error: {error.strerror or error}{where}", file=sys.stderr)
            raise typer.Exit(2) from None
        except ImportError as error:
            library = (error.name or "").partition(".")[0]
            if library not in LIBRARIES:
                raise
            print(f"error: {_lacking(library, error)}", file=sys.stderr)
            raise typer.Exit(2) from None

    return inner


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate")
"""What the extra `torch` brings; only commands on real models and real hardware import it, when they run."""


def _lacking(library: str, error: ImportError) -> str:
    remedy = "pip install 'decodesim[torch]'"
    if isinstance(error, ModuleNotFoundError):
        return f"this command works with real models and needs {library}, which is not installed: {remedy}"
    first = (str(error).splitlines() or ["it cannot be imported"])[0]
    return f"this command works with real models and needs {library}, which cannot be used: {first}; {remedy}"


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers from a comma list.

    >>> numbers("widths", "1,2, 8")
    (1, 2, 8)
    """
    from model.base.checks import ParameterError, shown

    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ParameterError(f"{name} must be whole numbers with commas between, such as 1,4,9, got {shown(text)}") from None


@contextlib.contextmanager
def progress(quiet: bool, what: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[at]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, at="")
        yield lambda done, total, at: bar.update(task, completed=done, total=total, at=at)


def placed(device: str | None, threads: int | None) -> str:
    """The device to work on, with so many threads of torch."""
    from calibrate.devices import machine
    from model.base import checks

    machine.needed()
    if threads is not None:
        checks.whole("threads", threads, 1, 4096)
    where = machine.chosen(device)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    return where
