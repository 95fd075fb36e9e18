"""Settings of vLLM, SGLang and TensorRT-LLM for a schedule of draft lengths, as lines to paste.

A schedule is a list of (first, last, draft length) by the number of running sequences; draft length 0 switches drafting off.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from model.base import strict_json

MOST_SEQUENCES = 4096
"""Last number of running sequences of a schedule without an end."""


MODEL, DRAFT = "MODEL", "DRAFT"
"""Placeholders for names of checkpoints that are not known."""


class Names(NamedTuple):
    """Names of the checkpoints of the model and of its draft, as the engine takes them."""

    model: str
    draft: str


class Range(NamedTuple):
    """Draft length for the numbers of running sequences from `first` to `last`, both included."""

    first: int
    last: int
    draft_length: int


def schedule(batches: Sequence[int], draft_lengths: Sequence[int], *, off_from: int | None = None) -> list[Range]:
    """Ranges of a best draft length by number of running sequences: each holds up to just below the next number.

    From `off_from` on nothing is drafted.

    >>> schedule([1, 8, 32], [4, 4, 2], off_from=60)
    [Range(first=1, last=31, draft_length=4), Range(first=32, last=59, draft_length=2), Range(first=60, last=4096, draft_length=0)]
    """
    starts = {1: draft_lengths[0]} | dict(zip(batches[1:], draft_lengths[1:], strict=True))
    if off_from is not None:
        starts = {first: length for first, length in starts.items() if first < off_from} | {max(1, off_from): 0}
    found: list[Range] = []
    for first, length in sorted(starts.items()):
        if found and found[-1].draft_length == length:
            continue
        if found:
            found[-1] = found[-1]._replace(last=first - 1)
        found.append(Range(first, MOST_SEQUENCES, length))
    return found


def lines(
    engine: str, model: str, draft: str | None, ranges: Sequence[Range], *, checkpoint: str = DRAFT, tensor_parallel: int = 1
) -> list[str]:
    """Lines for one engine, with the names of the model and of the draft's checkpoint; nothing is drafted: one line that says so.

    >>> print(*lines("vllm", "MODEL", "eagle3", [Range(1, 4096, 3)]), sep="\\n")
    vllm serve MODEL --speculative-config '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}'
    """
    most = max(each.draft_length for each in ranges)
    if not most:
        return [f"# {NAMES[engine]}: start it without speculative decoding"]
    return _ENGINES[engine](Names(model, checkpoint), draft, list(ranges), most, tensor_parallel)


# vllm/config/speculative.py: num_speculative_tokens is the largest draft, num_speculative_tokens_per_batch_size (merged by
# vllm-project/vllm#32374, May 2026) the inclusive ranges [first, last, K]; draft_tensor_parallel_size is left at its default.
_VLLM_METHODS = {"eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp", "medusa": "medusa", "p-eagle": "eagle3"}


def _vllm(names: Names, draft: str | None, ranges: list[Range], most: int, parallel: int) -> list[str]:
    kind = _kind(draft)
    settings: dict[str, object] = {"method": _VLLM_METHODS.get(kind, "draft_model")}
    settings |= {} if kind == "mtp" else {"model": names.draft}
    settings["num_speculative_tokens"] = most
    # P-EAGLE heads draft in parallel (vllm/config/speculative.py, parallel_drafting).
    settings |= {"parallel_drafting": True} if kind == "p-eagle" else {}
    found = []
    if len(ranges) > 1:
        settings["num_speculative_tokens_per_batch_size"] = [[*each] for each in ranges]
        found.append("# vLLM from May 2026 has schedules by batch; before, leave out num_speculative_tokens_per_batch_size")
    words = ["vllm", "serve", names.model, *(["--tensor-parallel-size", str(parallel)] if parallel > 1 else [])]
    return [*found, shlex.join([*words, "--speculative-config", strict_json.dumps(settings)])]


# sglang/srt/server_args.py: --speculative-num-steps K with topk 1 is a chain, of K + 1 tokens to verify; --speculative-adaptive
# with --speculative-adaptive-config FILE (sglang/srt/speculative/adaptive_spec_params.py): a key is the least batch of a slot, and
# candidate_steps its draft lengths, of which 0 is none. Only algorithms EAGLE, EAGLE3 and NEXTN.
_SGLANG_METHODS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN"}


def _sglang(names: Names, draft: str | None, ranges: list[Range], most: int, parallel: int) -> list[str]:
    kind = _kind(draft)
    words = ["python", "-m", "sglang.launch_server", "--model-path", names.model]
    words += ["--tp-size", str(parallel)] if parallel > 1 else []
    words += ["--speculative-algorithm", _SGLANG_METHODS.get(kind, "STANDALONE")]
    words += [] if kind == "mtp" else ["--speculative-draft-model-path", names.draft]
    words += ["--speculative-num-steps", str(most), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(most + 1)]
    if len(ranges) == 1 or kind not in _SGLANG_METHODS:
        return [shlex.join(words)]
    slots = {str(each.first): {"candidate_steps": [each.draft_length]} for each in ranges}
    table = f"echo {shlex.quote(strict_json.dumps(slots))} > adaptive.json"
    return [table, shlex.join([*words, "--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"])]


# tensorrt_llm/llmapi/llm_args.py: decoding_type Eagle, MTP, DraftTarget or Medusa; max_concurrency: no drafts above that batch.
# draft_len_schedule is a developer interface whose keys changed from least to largest batches (NVIDIA/TensorRT-LLM#10860), and it
# excludes max_concurrency: it is not written here.
_TENSORRT_METHODS = {"eagle3": "Eagle", "p-eagle": "Eagle", "eagle": "Eagle", "mtp": "MTP", "medusa": "Medusa"}


def _tensorrt_llm(names: Names, draft: str | None, ranges: list[Range], most: int, parallel: int) -> list[str]:
    kind = _kind(draft)
    name = _TENSORRT_METHODS.get(kind, "DraftTarget")
    found = ["cat > speculative.yaml <<'END'", "speculative_config:", f"  decoding_type: {name}"]
    # MTP's length is num_nextn_predict_layers; the others take max_draft_len and a model.
    if kind == "mtp":
        found += [f"  num_nextn_predict_layers: {most}"]
    else:
        found += [f"  max_draft_len: {most}", f"  speculative_model: {_yaml(names.draft)}"]
    if not ranges[-1].draft_length:
        found += [f"  max_concurrency: {ranges[-1].first - 1}"]
    serve = ["trtllm-serve", names.model, *(["--tp_size", str(parallel)] if parallel > 1 else []), "--extra_llm_api_options"]
    return [*found, "END", shlex.join([*serve, "speculative.yaml"])]


def _yaml(name: str) -> str:
    """A name as YAML reads it back: in quotes where it has other characters than those of names."""
    return name if re.fullmatch(r"[A-Za-z][\w./-]*", name) else strict_json.dumps(name)


def draft_of(text: str) -> str | None:
    """Kind of draft head that a law's facts name, or None.

    >>> draft_of("EAGLE-3 (a checkpoint)"), draft_of("the model's own layer (MTP)"), draft_of("none")
    ('eagle3', 'mtp', None)
    """
    for word, kind in (("EAGLE-3", "eagle3"), ("EAGLE", "eagle"), ("MTP", "mtp")):
        if word in text:
            return kind
    return None


def _kind(draft: str | None) -> str:
    """Kind of a draft head, or an empty text: a draft model."""
    return "" if draft is None else draft.partition(":")[0]


NAMES: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
_ENGINES: Mapping[str, Callable[[Names, str | None, list[Range], int, int], list[str]]] = {
    "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt_llm,
}  # fmt: skip
