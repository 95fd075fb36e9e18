"""Output of EAGLE's evaluation scripts, and of Spec-Bench, which has their format: JSON lines of answers.

Source: SafeAILab/EAGLE, eagle/evaluation/gen_ea_answer_llama3chat.py: for each turn `idxs` is the index of the last step, counted
from 0, `new_tokens` its tokens and `wall_time` its seconds, the prompt's included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.base import checks
from model.base.checks import ParameterError, shown
from model.logs.acceptance_record import MOST_COUNT
from model.logs.engine_logs.observations import Observation
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import optional
from model.logs.engine_logs.vllm import MOST_STEPS, histogram_of

PLAIN = "answers with one token per step are of plain decoding, and are left out; --draft-length 0 makes them a cell"


def _numbers(name: str, values: Any) -> list[Any]:
    """Numbers by turn."""
    if not isinstance(values, list) or len(values) > MOST_STEPS:
        raise ParameterError(f"{name} must be a list of numbers by turn, got {shown(values)}")
    return values


def _choice(found: Mapping[str, Any], given: int | None) -> Observation:
    """Observation of one answer."""
    name = "idxs" if "idxs" in found else "decoding_steps"
    tokens, steps = _numbers("new_tokens", found["new_tokens"]), _numbers(name, found[name])
    for key, values in (("new_tokens", tokens), (name, steps)):
        for value in values:
            checks.whole(key, value, 0, MOST_COUNT)
    if len(tokens) != len(steps):
        raise ParameterError(f"new_tokens must have one number for each of {name}, got {len(tokens)} and {len(steps)}")
    drafts, total = sum(steps) + (len(steps) if name == "idxs" else 0), sum(tokens)
    if total < drafts:
        raise ParameterError(f"new_tokens must be at least the steps={drafts}, one per step, got {total}")
    if total == drafts and given != 0:
        return Observation(notes=[PLAIN])
    times = optional(found, "wall_time")
    made = Observation()
    if total != drafts:
        made = Observation(drafts=drafts, accepted=total - drafts, draft_length=given or None, request=True)
        _accepted_by_step(made, found, drafts, total)
    if times is not None and total:
        seconds = 0.0
        for value in _numbers("wall_time", times):
            checks.number("wall_time", value, 0, 1e9)
            seconds += value
        made.timed = seconds, total
        made.notes.append("wall_time of EAGLE's answers includes the prompt: so does tpot_ms, of one sequence at a time")
    return made


def _accepted_by_step(made: Observation, found: Mapping[str, Any], drafts: int, total: int) -> None:
    """Add the histogram, if the answer lists the tokens of each step; the list may or may not count bonus tokens."""
    listed = optional(found, "accept_length_list", "accept_lengths", "acceptance_lengths")
    if listed is None:
        return
    lengths = _numbers("accept_length_list", listed)
    if lengths and isinstance(lengths[0], list):
        lengths = [each for turn in lengths for each in _numbers("accept_length_list", turn)]
    histogram = histogram_of("accept_length_list", lengths)
    emitted = sum(index * number for index, number in enumerate(histogram))
    if len(lengths) != drafts or emitted not in (total, total - drafts):
        made.notes.append("accept_length_list does not add up to new_tokens, with or without bonus tokens, and is ignored")
        return
    made.histogram = histogram if emitted == total - drafts else histogram[1:]


def _answers(document: Any, draft_length: int | None) -> list[Observation]:
    found = [each for each in objects(document) if "new_tokens" in each and ("idxs" in each or "decoding_steps" in each)]
    return [_choice(each, draft_length) for each in found]


DIALECTS = (OutputForm("eagle-answers", "choices with idxs and new_tokens", documents=separate(_answers)),)
