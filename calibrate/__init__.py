"""Real models on real hardware: decode, time, log decisions, fit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _refuse_hidden_packages() -> None:
    """As of `sim`, which is never imported from here."""
    spec, own = importlib.util.find_spec("model"), Path(__file__).resolve().parents[1] / "model" / "__init__.py"
    if spec is None or not spec.origin or Path(spec.origin).resolve() != own:
        message = (
            f"decodesim needs its own package 'model', but Python finds {spec.origin if spec else 'nothing'} instead; rename that,"
            " work in another folder, or start Python with -P (PYTHONSAFEPATH=1), which does not look into the working folder"
        )
        if sys.argv[:1] == ["-m"]:  # python -m calibrate
            print(f"error: {message}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


_refuse_hidden_packages()
