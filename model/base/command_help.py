"""What the commands `sim` and `calibrate` have in common: their start, help with examples that can be copied, and `--version`."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 160
"""Columns of help at most, in a terminal that has as many."""
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
PROGRAMS = ("sim ", "calibrate ")


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What is raised for words of a command line that fit no option, argument or command."""
_TYPES = {"integer": "a whole number", "number": "a number", "float": "a number"}
"""Words of messages about values of a wrong type, and the type."""


@contextlib.contextmanager
def refused_in_a_line(context: Any, words: Sequence[str]) -> Iterator[None]:
    """Turn an error in these words of a command line into one line on stderr and exit code 2; help that is asked for passes."""
    try:
        yield
    except UsageError as error:
        from model.base import user_errors

        message = error.format_message()  # type: ignore[attr-defined]
        if "\n" in message:  # the help of a program without a command
            raise
        wrong = _wrong_value(error, words) if isinstance(error, typer.BadParameter) else None
        user_errors.refuse(wrong or f"{message.rstrip('.')}; `{context.command_path} -h` prints what there is")


def _wrong_value(error: typer.BadParameter, words: Sequence[str]) -> str | None:
    """Message about a value of the wrong type, with its option and the value; None for other errors."""
    from model.base import checks

    wanted = next((what for word, what in _TYPES.items() if word in error.message), None)
    if error.param is None or wanted is None:
        return None
    shown = max(error.param.opts, key=len)
    for option in error.param.opts:
        values = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
        values += [value for name, value in pairwise(words) if name == option]
        if values:
            return f"{shown} must be {wanted}, got {checks.shown(values[-1])}"
    return None


class _LazyValidator:
    """Reads the values of a parameter as typer does, but makes a validator of pydantic only for a value that is to be converted.

    typer makes one for each parameter, also for those left out, and to import pydantic takes a tenth of a second.
    """

    def __init__(self, with_validator: Callable[[], Any]) -> None:
        self._with_validator = with_validator

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return an absent value, a default, or words where words are wanted, as they are; convert any other."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        wanted = param.type_descriptor.annotation
        if type(value) is wanted:
            return value
        if wanted == list[str] and isinstance(value, list | tuple):
            return [str(word) for word in value]
        return self._with_validator().coerce(value, param=param, ctx=ctx)


def _delay_validators(parameters: Iterable[Any]) -> None:
    """Do so for each parameter, once: a process may run a command many times."""
    for parameter in parameters:
        # Earlier versions of typer have no such validators.
        if hasattr(parameter, "get_runtime_param") and "get_runtime_param" not in vars(parameter):
            parameter.get_runtime_param = functools.partial(_LazyValidator, parameter.get_runtime_param)


class DocumentedGroup(TyperGroup):
    """A program with commands; what it cannot read of a command line is refused in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command."""
        _delay_validators(self.get_params(ctx))
        with refused_in_a_line(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command."""
        with refused_in_a_line(ctx, args):
            return super().resolve_command(ctx, args)


class DocumentedCommand(TyperCommand):
    """A command whose help prints example commands as they are written; other paragraphs are wrapped.

    What it cannot read of a command line is refused in one line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options and arguments."""
        _delay_validators(self.get_params(ctx))
        with refused_in_a_line(ctx, [*args]):
            return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the help text paragraph by paragraph."""
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                if paragraph.startswith(PROGRAMS):
                    formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in paragraph.splitlines()))
                else:
                    formatter.write_text(paragraph)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"decodesim {version('decodesim')}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of a program before its command."""


_GARBAGE = 500_000
"""New objects after which a program searches for cyclic garbage: 700 by default, most of them while modules are imported."""


def run_program(app: typer.Typer) -> None:
    """Run a program on its command line, in a process that ends with it.

    The search for cyclic garbage at the end of a process would take a fifth of a second, for memory that is released anyway.
    """
    gc.set_threshold(_GARBAGE)
    atexit.register(gc.freeze)
    with_only(app, sys.argv[1] if len(sys.argv) > 1 else "")()


def with_only(app: typer.Typer, word: str) -> typer.Typer:
    """Return the program with the command of this name alone, if it has one: typer reads the types of the options of all."""
    named = [each for each in app.registered_commands if word == (each.name or getattr(each.callback, "__name__", None))]
    if not named:
        return app
    chosen = copy.copy(app)
    chosen.registered_commands = named
    return chosen
