"""Faults of block verification, for the theorems 43 on speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from model.interpret.simulated_answers import World
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import block_verification as blocks
from model.methods.speculative.algorithm import DraftedToken
from model.steps import Read, Step
from tests.support.theorem_checks import Fault, with_fault

Accept = Callable[..., Generator[Step, Any, tuple[int, int]]]


def accept(
    output: Any, guesses: Sequence[DraftedToken], begin: int, *, capped: bool = True, joint: bool = True, weighted: bool = True,
    longest: bool = True,
) -> Generator[Step, Any, tuple[int, int]]:  # fmt: skip
    """Block verification with optional mistakes.

    Weights without a cap, tests by the weight alone, an unweighted residual, a stop at the first block that fails.
    """
    weights: list[Any] = [1]
    for offset, guess in enumerate(guesses, begin):
        p = yield Read("probability", output, offset, token=guess.token)
        q = yield Read("probability", guess.output, guess.offset, token=guess.token)
        weights.append(min(weights[-1] * p / q, 1) if capped else weights[-1] * p / q)
    count, kept = len(guesses), 0
    for length in range(1, count + 1):
        passing = weights[length]
        if length < count and joint:
            mass = yield _residual("residual_mass", output, begin + length, guesses[length], passing)
            passing = mass / (mass + 1 - passing) if mass and mass + 1 != passing else 0
        if (yield Read("uniform", output, begin + length - 1)) < passing:
            kept = length
        elif not longest:
            break
    if kept == count:
        return count, (yield Read("sample", output, begin + count))
    return kept, (yield _residual("residual", output, begin + kept, guesses[kept], weights[kept] if weighted else 1))


def _residual(kind: Any, output: Any, offset: int, guess: DraftedToken, weight: Any) -> Read:
    return Read(kind, output, offset, against=guess.output, against_offset=guess.offset, weight=weight)


def with_mistakes(**how: bool) -> Fault:
    return with_fault(lambda right, *args: accept(*args, **how), speculative, "accept_block")


def one_less(right: Accept, output: Any, guesses: Sequence[DraftedToken], begin: int) -> Any:
    """Never accept the last drafted token."""
    return (yield from right(output, guesses[:-1], begin))


def never_replaced(right: Any, world: World, step: Any) -> Any:
    """Find no residual in any simulation."""
    return 0.0 if step.kind == "residual_mass" else right(world, step)


def by_token(right: Any, *args: Any, **named: Any) -> Any:
    """Give the law of token-wise verification for both."""
    return right(*args[:3], "token", **named)


FAULTS: list[tuple[str, str, Fault]] = [
    ("43a", "unweighted residual", with_mistakes(weighted=False)),
    ("43a", "tested by weight", with_mistakes(joint=False)),
    ("43a", "weights without a cap", with_mistakes(capped=False)),
    ("43b", "tested by weight", with_mistakes(joint=False)),
    ("43b", "first block that fails", with_mistakes(longest=False)),
    ("43b", "one token less", with_fault(one_less, speculative, "accept_block")),
    ("43b", "no cap", with_fault(lambda right, ratios: np.cumprod(ratios), blocks, "weights")),
    ("43c", "first block that fails", with_mistakes(longest=False)),
    ("43c", "one token less", with_fault(one_less, speculative, "accept_block")),
    ("43d", "one token less", with_fault(one_less, speculative, "accept_block")),
    ("43e", "law of tokens", with_fault(by_token, blocks, "survival")),
    ("43e", "first block that fails", with_mistakes(longest=False)),
    ("43f", "squared", with_fault(lambda right, *args: right(*args) ** 2, blocks, "survival")),
    ("43f", "of the last token", with_fault(lambda right, *args: right(*args)[:1].repeat(args[2]), blocks, "survival")),
    ("43j", "no residual", with_fault(never_replaced, World, "read")),
]  # fmt: skip
