"""How tests execute the notebooks: each figure is drawn once and small, since nobody sees it, and no history is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

CONFIG = """
c = get_config()
c.InlineBackend.print_figure_kwargs = {"bbox_inches": None, "dpi": 40}
c.HistoryManager.enabled = False
"""
_folder = tempfile.TemporaryDirectory(prefix="notebooks-")
"""Kept as long as the process that has imported this."""


def pytest_configure() -> None:
    """Kernels that are started from here find their settings there."""
    profile = Path(_folder.name) / "profile_default"
    profile.mkdir(exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text(CONFIG, encoding="utf-8")
    os.environ["IPYTHONDIR"] = _folder.name
