"""The guide is built without a warning, and every page of it is reached from its index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "notebooks"


def test_guide_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees"), str(FOLDER)]
    done = subprocess.run([*command, str(tmp_path / "html")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "html").with_suffix("") for path in (tmp_path / "html").rglob("*.html")}
    sources = [path for kind in ("*.md", "*.ipynb") for path in FOLDER.rglob(kind) if "_build" not in path.parts]
    assert {path.relative_to(FOLDER).with_suffix("") for path in sources} <= pages
    assert "Quickstart" in (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
