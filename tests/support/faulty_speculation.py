"""Known mistakes in speculative decoding: each was made by some implementation or text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any

from model.methods.speculative.algorithm import DraftedToken, Model
from model.steps import Forward, LayerSpan, Read, Step

Verify = Callable[..., Generator[Step, Any, tuple[int, int]]]


def verify(
    model: Model,
    text: Sequence[int],
    guesses: Sequence[DraftedToken],
    sampled: bool,
    room: int | None = None,
    *,
    bound: Callable[[Fraction, Fraction], Fraction] = lambda p, q: p / q,
    correction: str = "residual",
    one_number: bool = False,
) -> Generator[Step, Any, tuple[int, int]]:
    """Sampled verification with optional mistakes: the bound, the distribution of corrections, the number of random numbers."""
    tokens = (text[-1], *[guess.token for guess in guesses])
    out = yield Forward("target", tokens, len(text) - 1, LayerSpan(0, model.layers), None, heads=len(tokens), unit=model.unit)
    number: Any = None
    used = guesses[:room]
    for index, guess in enumerate(used):
        offset = index - len(tokens)
        p = yield Read("probability", out, offset, token=guess.token)
        q = yield Read("probability", guess.output, token=guess.token)
        if number is None or not one_number:
            number = yield Read("uniform", out, offset)
        if not number < bound(p, q):
            against = guess.output if correction == "residual" else None
            return index, (yield Read(correction, out, offset, against=against))  # type: ignore[arg-type]
    return len(used), (yield Read("sample", out, len(used) - len(tokens)))


def with_mistakes(**how: Any) -> Verify:
    """Replace the right verification by `verify` with these mistakes."""
    return lambda right, *args: verify(*args[:5], **how)


def inverted_ratio(p: Fraction, q: Fraction) -> Fraction:
    """q / p: the ratio with swapped letters."""
    return q / p if p else Fraction(1)


def greedy_tested_at_random(right: Verify, model: Model, text: Any, guesses: Any, *how: Any) -> Any:
    """Test greedy drafts by p / q too."""
    return right(model, text, guesses, True, *how[1:])


def bonus_dropped(right: Verify, model: Model, text: Any, guesses: Any, *how: Any) -> Any:
    """Accept at most gamma - 1 of gamma tokens, and emit the last one as the target's: the bonus token is lost."""
    kept, token = yield from right(model, text, guesses, *how)
    return (kept - 1, guesses[-1].token) if guesses and kept == len(guesses) else (kept, token)


def all_accepted(right: Verify, model: Model, text: Any, guesses: Any, *how: Any) -> Any:
    """Accept all drafted tokens without a test."""
    _, token = yield from right(model, text, guesses, *how)
    return len(guesses), token


def long_drafts_discarded(right: Verify, model: Model, text: Any, guesses: Any, *how: Any) -> Any:
    """Discard drafts of more than one token."""
    return (yield from right(model, text, guesses if len(guesses) < 2 else (), *how))


def verified_twice(right: Verify, model: Model, text: Any, guesses: Any, *how: Any) -> Any:
    """Run the target on the last token first, and again with the draft."""
    yield Forward("target", (text[-1],), len(text) - 1, LayerSpan(0, model.layers), None, heads=1, unit=model.unit)
    return (yield from right(model, text, guesses, *how))


def greedy_draft(right: Callable[..., Any], *args: Any) -> Any:
    """Draft the most likely tokens, but test them as sampled ones."""
    drafter = yield from right(*args)
    drafter.sampled = False
    return drafter


def one_token_too_many(right: Callable[..., Any], model: Any, text: Any, length: int) -> Any:
    """Draft more tokens than are left to decode."""
    return right(model, text, length + 1)


def stop_token_ignored(right: Callable[..., Any], text: Any, guesses: Any, kept: int, token: int, stop: int | None = None) -> Any:
    """Emit tokens accepted after the token that ends the sequence."""
    return right(text, guesses, kept, token)
