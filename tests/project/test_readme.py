"""The README's example prints what the README shows, its links lead somewhere, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from sim.commands.sim_app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_prints_what_is_shown() -> None:
    [command, shown] = re.findall(r"```\n\$ sim (.*?[^\\])\n(.*?)```", README, flags=re.DOTALL)[0]
    done = CliRunner().invoke(app, command.replace("\\\n", " ").split())
    assert done.exit_code == 0
    printed = [line.rstrip() for line in done.output.splitlines()]
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) > 12
    assert [line for line in lines if line not in printed] == []


def test_links_lead_to_files() -> None:
    for page in (ROOT / "README.md", *(ROOT / "notebooks").glob("*.md"), *(ROOT / "notebooks" / "methods").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            generated = target.startswith("reference/")
            assert generated or target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
