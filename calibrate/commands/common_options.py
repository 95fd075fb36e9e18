"""Shared parts of the commands of `calibrate`: options, one-line errors, lists of numbers, progress bars."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from model.base.command_help import DocumentedCommand

Template = Annotated[
    str | None, typer.Option(help="Prompt template: squad, cnn-dm, wmt, none, or chat (the model's chat template).")
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a parameter of the method.")]
Sweep = Annotated[list[str] | None, typer.Option("--sweep", metavar="KEY=VALUES", help="Run a parameter at several values.")]
HeldOut = Annotated[str | None, typer.Option(help="Prompts: a file or a data set. Default: the family's held-out code.")]
PromptTokens = Annotated[int, typer.Option(help="Prompt length [tokens]; longer prompts keep their last tokens, chats all.")]
Text = Annotated[Path | None, typer.Option(help="Text to train on: a file or folder. Default, for the family: its training text.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu. Default: a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="PyTorch threads, on cpu.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
ResumeFolder = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run from the files in its directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress bar.")]


class RenamedOptions(DocumentedCommand):
    """A command that refuses an option name of an earlier version and gives the current name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, after a check for renamed options."""
        from model.base import renamed_keys

        known = {name for parameter in self.params for name in parameter.opts}
        for word in args[: args.index("--")] if "--" in args else args:
            option = word.partition("=")[0]
            if (new := renamed_keys.OPTIONS.get(option)) in known:
                from model.base import user_errors  # imports numpy, which help does not need

                user_errors.refuse(f"no such option {option}; it is now {new}")
        return super().parse_args(ctx, args)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command to report user errors in one line with exit code 2.

    Outside methods that the command line names, as METHOD or by `--methods`, are allowed while the command runs.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        from model.base import user_errors, user_warnings
        from model.methods.registry import allow_modules

        method = kwargs.get("method")
        named = [*(kwargs.get("methods") or ()), *([method] if isinstance(method, str) and "." in method else [])]
        try:
            with user_errors.exit_on_user_errors(), user_warnings.print_warnings(), allow_modules(named):
                command(*args, **kwargs)
        except ImportError as error:
            library = (error.name or "").partition(".")[0]
            if library not in LIBRARIES:
                raise
            user_errors.refuse(_missing_library(library, error))

    return inner


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate")
"""Libraries of the extra `torch`. Only commands on real models or real hardware import them, when they run."""


def _missing_library(library: str, error: ImportError) -> str:
    remedy = "pip install 'decodesim[torch]'"
    if isinstance(error, ModuleNotFoundError):
        return f"this command works with real models and needs {library}, which is not installed: {remedy}"
    first = (str(error).splitlines() or ["it cannot be imported"])[0]
    return f"this command works with real models and needs {library}, which cannot be used: {first}; {remedy}"


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers.

    >>> numbers("widths", "1,2, 8")
    (1, 2, 8)
    """
    from model.base.checks import ParameterError, shown

    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ParameterError(f"{name} must be comma-separated whole numbers, such as 1,4,9, got {shown(text)}") from None


def decimals(name: str, text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers.

    >>> decimals("thresholds", "0,0.5")
    (0.0, 0.5)
    """
    from model.base.checks import ParameterError, shown

    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ParameterError(f"{name} must be comma-separated numbers, such as 0,0.1,0.5, got {shown(text)}") from None


def assignments(option: str, pairs: Sequence[str] | None) -> Iterator[tuple[str, list[Any]]]:
    """Parse parameters: KEY=VALUE for option `set`, KEY=VALUES with comma-separated values for the others."""
    from model.base.checks import ParameterError, shown
    from model.base.table_records import parse_value

    single, seen = option == "set", set[str]()
    examples = {"sweep": "KEY=VALUES, such as fallback_threshold=0.1,0.3", "forced": "RATE=VALUES, such as match_rate=0.3,0.7"}
    for text in pairs or ():
        key, _, values = (part.strip() for part in text.partition("="))
        if not key or not values:
            form = "KEY=VALUE, such as max_draft_length=8" if single else examples[option]
            raise ParameterError(f"--{option} must be {form}, got {shown(text)}")
        if key in seen:
            raise ParameterError(f"--{option} {key} is given twice; give it once")
        seen.add(key)
        yield key, [parse_value(value.strip()) for value in ([values] if single else values.split(","))]


@contextlib.contextmanager
def progress(quiet: bool, what: str, kept: str = "") -> Iterator[Callable[[int, int, str], None] | None]:
    """Show a progress bar on stderr, if that is a terminal.

    With `kept`, a note on the files that an interrupted run leaves, an interrupt prints it and exits with 130.
    """
    try:
        with _bar(quiet, what) as bar:
            yield bar
    except KeyboardInterrupt:
        if not kept:
            raise
        print(f"interrupted; {kept}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _bar(quiet: bool, what: str) -> Iterator[Callable[[int, int, str], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[at]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, at="")
        yield lambda done, total, at: bar.update(task, completed=done, total=total, at=at)


def prepare_device(device: str | None, threads: int | None) -> str:
    """Set the number of PyTorch threads, and return the device to use."""
    from calibrate.devices import machine
    from model.base import checks

    machine.import_libraries()
    if threads is not None:
        checks.whole("threads", threads, 1, 4096)
    where = machine.choose_device(device)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    return where
