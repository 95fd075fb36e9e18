"""Dialects of mlx-lm: tokens marked with from_draft, or their share. Source: ml-explore/mlx-lm, mlx_lm/generate.py."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from model.base.checks import ParameterError
from model.logs.engine_logs.observations import Observation
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import Printed, json_number, printed, share
from model.methods.speculative.engine_dialects import DIALECTS as FIGURES

_SHARE = re.compile(r"from_draft[\w ]*['\"]?\s*[=:]\s*(?P<number>[-+]?\d[\d.e-]*|nan)\s*(?P<percent>%?)")


def _of_share(value: Printed) -> Observation:
    """Observation of a share of tokens with from_draft, a / (a + D): each draft also generates one token of the target."""
    share("share of tokens with from_draft", value)
    figure = FIGURES["mlx-lm"].rates["from-draft"]
    assert figure.accepted is not None
    if value.value + value.half >= 1:
        raise ParameterError(f"share of tokens with from_draft must be below 1, got {value.value:g}")
    ends = np.array([max(value.value - value.half, 0.0), value.value, value.value + value.half])
    low, mean, high = 1 + figure.accepted(ends, ends)  # it needs no draft length
    return Observation(length=Printed(float(mean), float(high - low) / 2))


def _line(text: str, draft_length: int | None) -> list[Observation]:
    found = _SHARE.search(text)
    if found is None:
        return []
    return [_of_share(printed("from_draft", found["number"] + found["percent"]))]


def _tokens(document: Any, draft_length: int | None) -> list[Observation]:
    """Observation of tokens with from_draft true or false: those from drafts are accepted, each other one ends a step."""
    marks = [value for each in objects(document) for key, value in each.items() if "from_draft" in key]
    flags = [each for each in marks if isinstance(each, bool)]
    found = [_of_share(json_number("from_draft", each)) for each in marks if not isinstance(each, bool)]
    if flags:
        accepted = sum(flags)
        found.append(Observation(
            drafts=len(flags) - accepted, accepted=accepted, draft_length=draft_length or None,
            notes=["drafts is the number of tokens that are not from a draft: each step ends with one"],
        ))  # fmt: skip
    return found


DIALECTS = (
    OutputForm("mlx-lm-share", "a share of tokens 'from_draft: ...'", ("from_draft",), separate(_line)),
    OutputForm("mlx-lm-tokens", "from_draft of tokens", documents=separate(_tokens)),
)
