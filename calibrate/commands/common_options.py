"""What all commands of `calibrate` share: errors in one line, lists of numbers, progress on a terminal."""

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
    str | None, typer.Option(help="How a data set is asked: squad, cnn-dm, wmt or none; or chat: by the model's own template.")
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the method.")]
Sweep = Annotated[list[str] | None, typer.Option("--sweep", metavar="KEY=VALUES", help="One that takes several values.")]
HeldOut = Annotated[str | None, typer.Option(help="A file or a data set. Default: the family's held-out code.")]
PromptTokens = Annotated[int, typer.Option(help="Length of held-out prompts; others are cut to it, but chats.")]
Text = Annotated[Path | None, typer.Option(help="A text file, or a folder. Default, for the family: what it read.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu. Default: a GPU where there is one.")]
Threads = Annotated[int | None, typer.Option(help="Of torch, on cpu.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what was broken off.")]
ResumeFolder = Annotated[bool, typer.Option("--resume", help="Go on with what the directory holds.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]


class RenamedOptions(DocumentedCommand):
    """A command that refuses an option of an earlier version by the name that it has now."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, once no option of it is an old one."""
        from model.base import renamed_keys, user_errors

        known = {name for parameter in self.params for name in parameter.opts}
        for word in args[: args.index("--")] if "--" in args else args:
            option = word.partition("=")[0]
            if (new := renamed_keys.OPTIONS.get(option)) in known:
                user_errors.refuse(f"no such option {option}; it is now {new}")
        return super().parse_args(ctx, args)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's mistake into one line and exit code 2.

    Methods from outside hold while the command runs where the command line names them: as its METHOD, or by `--methods`.
    """

    @functools.wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        from model.base import user_errors, user_warnings
        from model.methods.registry import allowing

        own = kwargs.get("method")
        named = [*(kwargs.get("methods") or ()), *([own] if isinstance(own, str) and "." in own else [])]
        try:
            with user_errors.in_one_line(), user_warnings.in_words(), allowing(named):
                command(*args, **kwargs)
        except ImportError as error:
            library = (error.name or "").partition(".")[0]
            if library not in LIBRARIES:
                raise
            user_errors.refuse(_lacking(library, error))

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


def assignments(option: str, texts: Sequence[str] | None) -> Iterator[tuple[str, list[Any]]]:
    """Parameters from KEY=VALUE, or to be swept from KEY=VALUES with commas between."""
    from model.base.checks import ParameterError, shown
    from model.base.table_records import parse_value

    one, seen = option == "set", set[str]()
    examples = {"sweep": "KEY=VALUES, such as fallback_threshold=0.1,0.3", "forced": "RATE=VALUES, such as match_rate=0.3,0.7"}
    for text in texts or ():
        key, _, values = (part.strip() for part in text.partition("="))
        if not key or not values:
            form = "KEY=VALUE, such as max_draft_length=8" if one else examples[option]
            raise ParameterError(f"--{option} must be {form}, got {shown(text)}")
        if key in seen:
            raise ParameterError(f"--{option} {key} is given twice; give it once")
        seen.add(key)
        yield key, [parse_value(each.strip()) for each in ([values] if one else values.split(","))]


@contextlib.contextmanager
def progress(quiet: bool, what: str, kept: str = "") -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr, where that is a terminal; where it is interrupted, exit with 130 and say what is `kept`, if anything."""
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
