"""Lookups in the texts of a decision log: match lengths, and drafted and accepted tokens, at every output position.

A log holds prompts and generated tokens, from which lookups of every kind follow; nothing else needs to be logged.
"""

from __future__ import annotations

from model.base.checks import ParameterError
from model.interpret.text_lookup import Lookups, along
from model.logs.position_log import PositionLog


def of_log(
    log: PositionLog, min_match: int, max_match: int, longest: int, per_match: float | None = None
) -> list[Lookups]:
    """Lookups along each sequence of a log; see `model.interpret.text_lookup.along`.

    >>> from model.logs.position_log import bundled
    >>> found = of_log(bundled(), 1, 2, 5)
    >>> len(found), len(found[0].match)
    (200, 64)
    """
    texts = log.by_sequence(log.table["token"].to_numpy())
    return [
        along(prompt, text.tolist(), min_match, max_match, longest, per_match)
        for prompt, text in zip(_prompts(log), texts, strict=True)
    ]


def check(log: PositionLog) -> None:
    """Raise ParameterError for a log without the tokens of its prompts, in which lookups find matches."""
    _prompts(log)


def _prompts(log: PositionLog) -> list[list[int]]:
    numbers = [int(log.table["prompt"][int(start)]) for start in log.starts[:-1]]
    listed = log.header["prompts"]
    found = [listed[number].get("tokens") if number < len(listed) else None for number in numbers]
    if not all(isinstance(each, list) and each and {*map(type, each)} == {int} for each in found):
        raise ParameterError("this log has no match lengths: it lacks the tokens of its prompts; log it again")
    return [each for each in found if each is not None]
