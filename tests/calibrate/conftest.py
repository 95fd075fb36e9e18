"""What tests of `calibrate` share: configurations of tiny models as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes the configuration of a tiny model; its path."""
    from tests.support.tiny_configurations import TINY

    def write(kind: str = "llama", **more: Any) -> str:
        path = tmp_path / f"tiny-{kind}.json"
        path.write_text(json.dumps(TINY.get(kind, {"model_type": kind}) | more))
        return str(path)

    return write
