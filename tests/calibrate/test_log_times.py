"""The seconds of a position log: its parts sum to at most the elapsed time."""

from __future__ import annotations

import itertools

import pytest

from calibrate.decode import position_logging as logging
from tests.support import real_models
from tests.support.fake_clocks import SteppedClock


def test_parts_of_a_log_sum_to_at_most_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second per call: each stretch of a part takes a second."""
    clock = SteppedClock(step=1.0)
    monkeypatch.setattr(logging, "time", clock)
    decoders = real_models.decoders("llama", "draft")
    spent = logging.LogSeconds()
    for groups in itertools.count(1):
        before = clock.now
        logging.log_rows(decoders["target"], {0: [3, 4, 5]}, 3, draft=decoders["draft"], spent=spent)
        passed = clock.now - 1000
        assert (spent.writing, spent.heads, spent.draft) == (groups, groups * real_models.DEPTHS["target"], groups)
        assert spent.trained_heads == 0
        assert spent.total == spent.writing + spent.heads + spent.draft <= passed
        assert clock.now > before
        if groups == 2:
            break
