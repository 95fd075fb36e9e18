"""Verification by methods that draft and verify concurrently, on separate units.

The draft model continues after tokens that the target has not verified. So a pass of the target decides on the drafted tokens that
it reads, and its prediction after the last of them decides on the next drafted token, which need not have arrived yet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from model.base.checks import ParameterError
from model.methods.draft_model import SEPARATE
from model.methods.speculative.algorithm import DraftedToken
from model.steps import GREEDY, SAMPLED, Read, Step

TARGET_UNIT, DRAFT_UNIT = 0, 1


def check_separate(placement: str) -> None:
    """Raise ParameterError unless each model has its own unit."""
    if placement != SEPARATE:
        raise ParameterError(
            f"placement must be {SEPARATE!r}, got {placement!r}: the draft model drafts while the target verifies; leave"
            " placement out, or choose method 'speculative', which drafts and verifies in turn"
        )


def verify(
    out: Any, waiting: Sequence[DraftedToken], arriving: Generator[Step, Any, Sequence[DraftedToken]], sampled: bool
) -> Generator[Step, Any, tuple[int, int, bool]]:
    """Verify the waiting tokens and the drafted token after them against one pass of the target.

    `out` is the output of the target's pass over the last token and the waiting ones. `arriving` waits for the drafted tokens after
    them, and is used only if all waiting tokens are accepted. Return the number of accepted waiting tokens, the token after them,
    and whether that token is the drafted one, so that drafting continues after it.
    """
    for kept, guess in enumerate(waiting):
        replacing = yield from replacement(guess, out, kept - len(waiting) - 1, sampled)
        if replacing is not None:
            return kept, replacing, False
    following = yield from arriving
    if not following:
        return len(waiting), (yield Read(SAMPLED if sampled else GREEDY, out)), False
    replacing = yield from replacement(following[0], out, -1, sampled)
    accepted = replacing is None
    return len(waiting), following[0].token if replacing is None else replacing, accepted


def replacement(guess: DraftedToken, out: Any, offset: int, sampled: bool) -> Generator[Step, Any, int | None]:
    """Return the target's token if it rejects the drafted one, None if it accepts it."""
    if not sampled:
        likeliest: int = yield Read(GREEDY, out, offset)
        return None if likeliest == guess.token else likeliest
    p = yield Read("probability", out, offset, token=guess.token)
    q = yield Read("probability", guess.output, guess.offset, token=guess.token)
    if (yield Read("uniform", out, offset)) < p / q:
        return None
    residual: int = yield Read("residual", out, offset, against=guess.output, against_offset=guess.offset)
    return residual
