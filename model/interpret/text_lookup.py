"""Lookups in a text: where its last tokens occurred before, and what followed them (prompt lookup, n-gram drafts).

The rule is that of transformers' `prompt_lookup_num_tokens` with `max_matching_ngram_size`, and of vLLM's n-gram proposer with
`prompt_lookup_min` and `prompt_lookup_max`: the longest match of at most `max_match` last tokens, and of several the first in the
text. A match may overlap with the last tokens themselves. What followed ends with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.steps import Lookup


class Match(NamedTuple):
    """The longest match of the last tokens of a text: its length (0: none), and the position of the token that followed."""

    length: int
    after: int


def longest_match(tokens: Sequence[int] | NDArray[np.int64], min_match: int, max_match: int) -> Match:
    """First place at which as many of the last tokens as possible, at most `max_match`, occurred before.

    >>> longest_match([7, 1, 2, 5, 1, 2, 6, 1, 2], 1, 3)  # the last two, first at position 1
    Match(length=2, after=3)
    >>> longest_match([7, 1, 2, 5, 3], 1, 3), longest_match([7, 1, 2, 5, 1], 2, 3)
    (Match(length=0, after=5), Match(length=0, after=5))
    """
    text = np.asarray(tokens)
    size = len(text)
    ends, length = np.flatnonzero(text[:-1] == text[-1]) + 1, 1
    while length < max_match and len(ends):
        longer = ends[ends > length]
        longer = longer[text[longer - length - 1] == text[size - length - 1]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return Match(length, int(ends[0])) if len(ends) and length >= min_match else Match(0, size)


def answer(step: Lookup) -> tuple[int, ...]:
    """Tokens that followed the match of a lookup.

    >>> answer(Lookup([7, 1, 2, 5, 1, 2], 1, 3, longest=2))
    (5, 1)
    """
    found = longest_match(step.tokens, step.min_match, step.max_match)
    return tuple(step.tokens[found.after : found.after + step.most(found.length)])


class TextLookups(NamedTuple):
    """Lookups before each generated token of a text; integer arrays of shape (generated tokens,)."""

    match: NDArray[np.int64]
    """Length of the match; 0: none."""
    drafted: NDArray[np.int64]
    """Tokens that followed the match, up to the largest number."""
    accepted: NDArray[np.int64]
    """How many of them, from the first on, the text repeats."""


def along(
    prompt: Sequence[int], text: Sequence[int], min_match: int, max_match: int, longest: int, per_match: float | None = None
) -> TextLookups:
    """Look up before each token of a generated text, whose own tokens say which drafted tokens are accepted.

    This holds for greedy and for sampled decoding: a drafted token is accepted exactly where the target's own token equals it.

    >>> [each.tolist() for each in along([1, 2, 3], [1, 2, 4], 1, 2, longest=2)]
    [[0, 1, 2], [0, 2, 2], [0, 1, 0]]
    """
    if not prompt:
        raise checks.ParameterError("prompt must have at least one token, got none; a lookup needs a text")
    whole = np.asarray([*prompt, *text], dtype=np.int64)
    found, rule = np.zeros((3, len(text)), dtype=np.int64), Lookup((), min_match, max_match, longest, per_match)
    for place in range(len(text)):
        until = len(prompt) + place
        length, after = longest_match(whole[:until], min_match, max_match)
        drafted = min(rule.most(length), until - after)
        tested = min(drafted, len(whole) - until)
        same = whole[after : after + tested] == whole[until : until + tested]
        found[:, place] = length, drafted, tested if same.all() else int(same.argmin())
    return TextLookups(*found)
