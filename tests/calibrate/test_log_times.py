"""The seconds of a log: its parts are within the time that passed."""

from __future__ import annotations

import itertools

import pytest

from calibrate.decode import position_logging as logging
from tests.support import real_models
from tests.support.clockwork import Clock

# --- the time of a log ---


def test_the_parts_of_a_logs_time_are_within_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is asked: a part takes a second for each stretch of it."""
    clock = Clock(step=1.0)
    monkeypatch.setattr(logging, "time", clock)
    decoders = real_models.decoders("llama", "draft")
    spent = logging.Spent()
    for groups in itertools.count(1):
        before = clock.now
        logging.logged(decoders["target"], {0: [3, 4, 5]}, 3, draft=decoders["draft"], spent=spent)
        passed = clock.now - 1000
        assert (spent.writing, spent.heads, spent.draft) == (groups, groups * real_models.DEPTHS["target"], groups)
        assert spent.trained_heads == 0
        assert spent.total == spent.writing + spent.heads + spent.draft <= passed
        assert clock.now > before
        if groups == 2:
            break
