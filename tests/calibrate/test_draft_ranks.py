"""Ranks of the target's tokens measured along the bundled log, and decodings of SSD that they predict round by round."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from calibrate.decode import draft_ranks
from calibrate.family import model_directory
from calibrate.interpreters.in_one_process import Real
from calibrate.loading import load_models
from model.base.checks import ParameterError
from model.interpret import interpreter
from model.interpret.simulated_answers import RankedPositions
from model.logs import position_log
from model.methods.ssd import algorithm as ssd

pytestmark = pytest.mark.skipif(not model_directory.names(), reason="no models are bundled")


@cache
def models() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    found = load_models.models({role: f"family:{role}" for role in ("target", "draft")})
    return {role: each.decoder for role, each in found.items()}


@cache
def records() -> list[list[int]]:
    return draft_ranks.of_log(position_log.bundled(), models()["draft"])


def test_rank_one_is_the_logged_draft_token() -> None:
    log = position_log.bundled()
    found = np.concatenate(records()) == 1
    assert found.tolist() == (log.table["token"] == log.table["draft_token"]).to_list()
    assert 0.1 < found.mean() < 0.9


@pytest.mark.parametrize("backup", ssd.BACKUPS)
@pytest.mark.parametrize("number", [0, 120])
def test_real_decoding_makes_the_rounds_and_passes_of_its_ranks(number: int, backup: str) -> None:
    """The target's tokens are those of the log, and each round ends, hits and misses as its ranks say."""
    log, tokens = position_log.bundled(), 24
    prompt, start = log.header["prompts"][number]["tokens"], int(log.starts[number])
    parameters = ssd.Parameters(log.layers, 3, (3, 2, 1, 2), backup, draft_layers=models()["draft"].layers)
    work = Real(models()).run(ssd.decode(parameters, prompt, tokens), tokens)
    assert work.tokens == log.table["token"].to_list()[start : start + tokens]
    world = RankedPositions(len(prompt), log.layers, records()[number][:tokens])
    want = interpreter.count(ssd.decode(parameters, [*range(len(prompt))], tokens), world, tokens)
    assert work.rounds == want.rounds
    assert work.account.totals() == want.account.totals()


def test_intervals_are_between_sequences() -> None:
    """Equal sequences differ by nothing; sequences of hits alone and of misses alone by as much as they can."""
    same = draft_ranks.after_acceptance([[1, 2]] * 4, [1])[0]
    assert (same.rate, same.half_width, same.trials) == (0.5, 0.0, 8)
    apart = draft_ranks.after_acceptance([[1, 1], [2, 2]] * 2, [1])[0]
    assert apart.rate == 0.5
    assert apart.half_width > 0.5


def test_exponent_of_an_exact_power_law() -> None:
    """Ranks whose counts above 1, 2, 4 and 8 halve."""
    counts = {1: 64, 2: 32, 4: 16, 8: 8}
    ranks = [2] * (counts[1] - counts[2]) + [4] * (counts[2] - counts[4]) + [8] * (counts[4] - counts[8]) + [99] * counts[8]
    assert draft_ranks.exponent([[1] * 10 + ranks], 2) == pytest.approx(1.0)


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ParameterError, match="at least one position to count"):
        draft_ranks.after_rejection([[1, 1]], [2])
    with pytest.raises(ParameterError, match="most must be below 3, the largest rank, got 3"):
        draft_ranks.exponent([[1, 2, 3]], 3)
