"""What a server says of itself in its log: the names of its model and draft, how it drafts, and its draft length.

Sources: vllm-project/vllm, vllm/v1/engine/core.py ("Initializing a V1 LLM engine ... with config:"), vllm/config/speculative.py
(`SpeculativeConfig.__repr__`), vllm/entrypoints/utils.py ("non-default args:"); sgl-project/sglang,
python/sglang/srt/entrypoints/engine.py ("server_args=").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from model.logs.acceptance_record import MOST_POSITIONS, ServedSettings

MARKS = ("speculative_config", "server_args=")
"""Words of which a line of settings has one."""
METHODS = {"nextn": "mtp", "standalone": "draft_model", "p-eagle": "eagle3"}
"""Names of methods that another engine gives to the same thing."""


def of_line(text: str) -> ServedSettings | None:
    """Settings in a line with one of `MARKS`; None if it has none. Names with characters of a shell are left out.

    >>> of_line("config: model='a/M', speculative_config=SpeculativeConfig(method='eagle3', model='b/E', num_spec_tokens=3)")
    ServedSettings(model='a/M', method='eagle3', draft='b/E', draft_length=3)
    >>> of_line("server_args=ServerArgs(model_path='a/M', speculative_algorithm='NEXTN', speculative_num_steps=2)")
    ServedSettings(model='a/M', method='mtp', draft=None, draft_length=2)
    >>> of_line("config: model='a/M', speculative_config=None")
    ServedSettings(model='a/M', method=None, draft=None, draft_length=None)
    """
    if "server_args=" in text:
        found = ServedSettings(
            _name(text, "model_path"), _method(_name(text, "speculative_algorithm")), _name(text, "speculative_draft_model_path"),
            _count(text, "speculative_num_steps"),
        )  # fmt: skip
    else:
        before, _, after = text.partition("speculative_config")
        inner, rest = _bracketed(after)
        method, draft = _method(_name(inner, "method")), _name(inner, "model")
        found = ServedSettings(
            _name(before, "model") or _name(rest, "model"), method, None if draft == method else draft,
            _count(inner, "num_spec(?:ulative)?_tokens"),
        )  # fmt: skip
    return None if found == ServedSettings() else found


def together(several: Iterable[ServedSettings]) -> tuple[ServedSettings | None, tuple[str, ...]]:
    """Settings that all of several lines agree on, and the names of those that differ; plain servers say nothing of drafts."""
    values: dict[str, set[object]] = {each.name: set() for each in fields(ServedSettings)}
    for found in several:
        for name, held in values.items():
            held |= {getattr(found, name)} - {None}
    agreed = ServedSettings(**{name: next(iter(held)) for name, held in values.items() if len(held) == 1})  # type: ignore[arg-type]
    return None if agreed == ServedSettings() else agreed, tuple(name for name, held in values.items() if len(held) > 1)


def _bracketed(text: str) -> tuple[str, str]:
    """What the first brackets hold, and what follows them; nothing if the value is None."""
    start = re.match(r"""['"]?\s*[=:]\s*\w*([({])""", text)
    if start is None:
        return "", text
    depth, opened = 0, start.end() - 1
    for at in range(opened, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if not depth:
            return text[opened + 1 : at], text[at + 1 :]
    return text[opened + 1 :], ""


def _name(text: str, key: str) -> str | None:
    """Name in quotes under a key."""
    found = re.search(rf"""(?<![\w-]){key}['"]?\s*[=:]\s*(['"])([\w./:@+~-]{{1,200}})\1""", text)
    return None if found is None else found[2]


def _method(name: str | None) -> str | None:
    """Method under one name for all engines; modules for further tokens of several models are all `mtp`."""
    if name is None:
        return None
    lower = name.lower()
    return "mtp" if lower.endswith("_mtp") else METHODS.get(lower, lower)


def _count(text: str, key: str) -> int | None:
    found = re.search(rf"""(?<![\w-]){key}['"]?\s*[=:]\s*(\d{{1,4}})(?!\d)""", text)
    return int(found[1]) if found is not None and 1 <= int(found[1]) <= MOST_POSITIONS else None
