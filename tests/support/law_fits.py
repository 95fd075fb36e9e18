"""Fits of step laws in tests."""

from __future__ import annotations

from typing import Any

import pytest

from model.engines import law_fit
from model.engines.step_law import StepLaw


def fit_alone(*cells_and_name: Any, **more: Any) -> StepLaw:
    """`law_fit.fit` without the errors of cells left out in turn: a fit for each cell, which no prediction uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(law_fit._Posterior, "left_out", lambda *_: ())
        return law_fit.fit(*cells_and_name, **more)
