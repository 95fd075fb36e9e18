"""Shared fixtures of the tests of `calibrate`: configurations of tiny models as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes the configuration of a tiny model and returns its path."""
    from tests.support.tiny_configurations import TINY

    def write(kind: str = "llama", **more: Any) -> str:
        path = tmp_path / f"tiny-{kind}.json"
        path.write_text(json.dumps(TINY.get(kind, {"model_type": kind}) | more))
        return str(path)

    return write
