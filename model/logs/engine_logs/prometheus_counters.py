"""Counters of speculative decoding in Prometheus text, which vLLM, LMDeploy and llama.cpp export with the same names.

Names and meaning: vllm-project/vllm, vllm/v1/spec_decode/metrics.py; InternLM/lmdeploy, lmdeploy/metrics/loggers.py. The client
library appends `_total` to counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

from model.base.checks import ParameterError, shown
from model.logs.acceptance_record import MOST_POSITIONS
from model.logs.engine_logs.observations import OF_RATES, Check, Observation, checked_drafts, whole_length
from model.logs.engine_logs.output_forms import OutputForm
from model.logs.engine_logs.printed_figures import count

_LINE = re.compile(
    r"\s*[a-z_]+:spec_decode_(?P<name>num_drafts|num_draft_tokens|num_accepted_tokens_per_pos|num_accepted_tokens)(?:_total)?"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)(?:\s+\S+)?\s*$"
)
_POSITION = re.compile(r'position="(\d{1,4})"')


class _Scrape:
    """Counters of one scrape, summed over their labels."""

    def __init__(self, draft_length: int | None) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.sums: dict[str, int] = {}
        self.positions: dict[int, int] = {}

    def take(self, text: str) -> Iterator[Observation]:
        """Add a counter."""
        found = _LINE.match(text)
        if found is None:
            return iter(())
        name, labels, value = found["name"], found["labels"] or "", count(found["name"], found["value"])
        if (name, labels) in self.seen:
            raise ParameterError(f"counter {name} is there twice with the labels {{{shown(labels)}}}; keep one scrape per file")
        self.seen.add((name, labels))
        if name != "num_accepted_tokens_per_pos":
            self.sums[name] = self.sums.get(name, 0) + value
            return iter(())
        position = _POSITION.search(labels)
        index = -1 if position is None else int(position[1])
        if not 0 <= index < MOST_POSITIONS:
            raise ParameterError(f"{name} must have a label position between 0 and {MOST_POSITIONS - 1}, got {shown(labels)}")
        self.positions[index] = self.positions.get(index, 0) + value
        return iter(())

    def end(self) -> Iterable[Observation]:
        """Observation of all counters."""
        if not self.sums:
            return ()
        drafts, drafted, accepted = (
            self.sums.get(name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        checked_drafts(drafts, drafted)
        if not drafts:
            return ()
        positions = [float(self.positions.get(index, 0)) for index in range(max(self.positions) + 1)] if self.positions else None
        found = Observation(
            drafts=drafts, drafted=drafted, accepted=accepted, positions=positions,
            draft_length=len(positions) if positions else whole_length(drafted, drafts),
        )  # fmt: skip
        if positions is not None and accepted is not None:
            found.checks.append(Check(OF_RATES, abs(accepted - sum(positions)) / drafts, 1e-9))
            if max(positions) > drafts:
                raise ParameterError(f"num_accepted_tokens_per_pos must be at most num_drafts={drafts}, got {max(positions):g}")
        sets = sum(name == "num_drafts" for name, _ in self.seen)
        if sets > 1:
            found.notes.append(f"counters are summed over {sets} sets of labels")
        found.notes.append(
            "counters count from the server's start; a second scrape of the same server contains the first, so give one"
        )
        return (found,)


def counters(prefix: str, name: str) -> OutputForm:
    """Form of counters with this prefix."""
    mark = f"{prefix}:spec_decode_num_"
    return OutputForm(name, f"counters {mark}drafts_total", (mark,), partial(_Scrape))
