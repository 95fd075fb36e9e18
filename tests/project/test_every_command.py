"""What holds of every command of `sim` and of `calibrate` alike, those of their groups included."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import calibrate.commands.calibrate_app
import sim.commands.sim_app
from model.base import command_help

APPS = {"sim": sim.commands.sim_app.app, "calibrate": calibrate.commands.calibrate_app.app}


def commands(name: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its verbs, groups first."""

    def below(verbs: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield verbs, command
        for verb, sub in getattr(command, "commands", {}).items():
            yield from below((*verbs, verb), sub)

    return below((), typer.main.get_command(APPS[name]))


@pytest.mark.parametrize("name", APPS)
def test_a_group_without_a_command_prints_its_help(name: str) -> None:
    found = [verbs for verbs, command in commands(name) if hasattr(command, "commands")]
    assert () in found
    for verbs in found:
        alone, asked = (CliRunner().invoke(APPS[name], [*verbs, *more]) for more in ([], ["--help"]))
        assert asked.exit_code == 0
        assert alone.output.strip() == asked.output.strip(), verbs
        assert "Missing command" not in alone.output


@pytest.mark.parametrize("name", APPS)
def test_help_is_plain_and_is_asked_for_in_two_ways(name: str) -> None:
    """No frames; `-h` where `--help` is; a shell's completion and the version are options of the program alone."""
    for verbs, command in commands(name):
        short, long = (CliRunner().invoke(APPS[name], [*verbs, flag]) for flag in ("-h", "--help"))
        assert short.exit_code == long.exit_code == 0, verbs
        assert short.output == long.output
        assert long.output.lstrip().startswith("Usage: ")
        assert not {"╭", "│", "[bold]"} & {*long.output.split()}
        assert ("--install-completion" in long.output) == ("--version" in long.output) == (not verbs)
        assert (command.help or "").split("\n")[0].split(" ")[0] in long.output


@pytest.mark.parametrize("name", APPS)
def test_a_command_alone_is_that_of_the_whole_program(name: str) -> None:
    """Only the command that is run is built; its help is the same, and any other word leads to the whole program."""
    app = APPS[name]
    words = [verbs[0] for verbs, _ in commands(name) if len(verbs) == 1]
    for word in words:
        alone = command_help.with_only(app, word)
        built = typer.main.get_command(alone)
        assert word in built.commands  # type: ignore[attr-defined]
        said, whole = (CliRunner().invoke(each, [word, "--help"]).output for each in (alone, app))
        assert said == whole
    built = typer.main.get_command(command_help.with_only(app, "report"))
    assert len(built.commands) < len(words) / 2  # type: ignore[attr-defined]
    assert all(command_help.with_only(app, word) is app for word in ("", "rum", "--help"))


@pytest.mark.parametrize("name", APPS)
def test_no_flag_is_on_by_itself(name: str) -> None:
    """Quick, quiet, resumed and JSON are off by default."""
    flags = 0
    for verbs, command in commands(name):
        for option in command.params:
            if getattr(option, "is_flag", False) and not option.secondary_opts:
                assert not option.default, (verbs, option.name)
                flags += option.name != "help"
    assert flags > 5


@pytest.mark.parametrize("name", APPS)
def test_defaults_are_those_that_the_help_names(name: str) -> None:
    """Where an option's help ends in `Default: N.` and the command line holds a number, it is that number."""
    for verbs, command in commands(name):
        for option in command.params:
            said = (getattr(option, "help", None) or "").rpartition("Default: ")
            if said[1] and isinstance(option.default, int | float) and not isinstance(option.default, bool):
                assert said[2].split()[0].rstrip(".,;") == f"{option.default:g}", (verbs, option.name)


@pytest.mark.parametrize("name", APPS)
def test_a_program_ends_without_a_search_for_garbage(name: str) -> None:
    """All objects are frozen before the interpreter ends, and few searches are made; what is registered first runs last."""
    report = "print(gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()[0])"
    code = f"import atexit, gc, sys; atexit.register(lambda: {report})"
    code += f"; sys.argv = ['{name}', '-h']; from {name}.commands.{name}_app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, searched, between = map(int, done.stdout.split()[-3:])
    assert frozen > 100 * searched
    assert between == 500_000
