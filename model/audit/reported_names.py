"""Names of methods, models, drafts and GPUs as reports and hubs write them, and what they are called here."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from model.architectures import draft_heads, published_shapes
from model.architectures.layer_parts import FORMATS, quantised
from model.architectures.transformer import BYTES, Shape
from model.base import checks
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.devices import Device
from model.methods import registry
from model.methods.claim_bounds import NO_DRAFT

_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8", "w4a16": "int4", "awq": "int4",
    "gptq": "int4", "w8a8": "int8", "fp4": "nvfp4",
}  # fmt: skip
_VENDORS = {
    "nvidia", "amd", "geforce", "instinct", "tesla", "dgx", "hgx", "sxm", "sxm2", "sxm4", "sxm5", "pcie", "nvl", "hbm3", "gpu",
    "gpus",
}  # fmt: skip
_TUNED = re.compile(r"instruct|chat|it|hf|base|v\d+(\.\d+)*|\d{4}")
"""Words of a model's name that do not change its shape: tuning, version and date."""


class UnknownNameError(ParameterError):
    """A method, model, draft or GPU that is not known here."""

    @classmethod
    def of(cls, kind: str, text: str, known: Iterable[str]) -> UnknownNameError:
        """Note on a name; with the nearest known one, if there is one."""
        close = difflib.get_close_matches(text.rpartition("/")[2].lower(), [*known], n=1, cutoff=0.75)
        also = f" (did you mean {close[0]}?)" if close else ""
        return cls(f"{kind} {checks.shown(text)} is not known here and not used{also}")


def _word(text: str) -> str:
    """Letters and digits of a name alone, small."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())


@functools.cache
def _methods() -> dict[str, tuple[str, str]]:
    """Method and kind of draft by every name of a method of the project."""
    found: dict[str, tuple[str, str]] = {}
    for name in registry.names():
        found |= _names_of(name)
    return found


def _names_of(name: str) -> dict[str, tuple[str, str]]:
    kind = registry.parameters(name)
    own = {_word(each): (name, "") for each in (name, kind.LABEL, kind.SHORT_LABEL) if each}
    rule = kind.CLAIMS
    return own if rule is None else {_word(each): (name, draft) for each, draft in rule.names.items()} | own


def method_named(text: str) -> tuple[str, str]:
    """Name of a method in the project, and the kind of draft that the text implies (empty: none).

    >>> method_named("EAGLE-3"), method_named("Big Little Decoder"), method_named("n-gram")
    (('speculative', 'eagle3'), ('bild', ''), ('ngram', ''))
    """
    known = _methods() if not registry.allowed_modules() else {
        word: each for name in registry.names() for word, each in _names_of(name).items()
    }
    if _word(text) not in known:
        aliases = [each for name in registry.names() for each in getattr(registry.parameters(name).CLAIMS, "names", ())]
        raise UnknownNameError.of("method", text, (*registry.names(), *aliases))
    return known[_word(text)]


def model_named(text: str, dtype: str | None = None) -> Shape:
    """Shape of a target by its name in the project, as a hub writes it, or by its file.

    >>> model_named("meta-llama/Llama-3.1-8B-Instruct").layers
    32
    """
    name, kind = shape_name(text)
    kind = kind if dtype is None else _DTYPES.get(dtype.lower(), dtype.lower())
    if kind and kind not in BYTES and kind not in FORMATS and not kind.startswith("int"):
        raise checks.unknown("dtype", dtype, (*BYTES, *FORMATS))
    if name not in published_shapes.PRESETS and not _is_file(name):
        raise UnknownNameError.of("model", text, published_shapes.PRESETS)
    if not kind or kind in BYTES:
        return published_shapes.named_shape(name, kind or None, key="model")
    return replace(published_shapes.named_shape(name, key="model"), weights=quantised(kind, key="dtype"))


def _is_file(text: str) -> bool:
    return text.endswith(".json") or Path(text).is_dir()


def shape_name(text: str) -> tuple[str, str]:
    """Name of a shape, and the type of the weights if the name ends with it (empty: not).

    >>> shape_name("Qwen/Qwen2.5-7B-Instruct-AWQ"), shape_name("lmsys/vicuna-13b-v1.3"), shape_name("Llama3.1 8B")
    (('qwen2.5-7b', 'int4'), ('vicuna-13b', ''), ('llama-3.1-8b', ''))
    """
    if text in published_shapes.PRESETS or _is_file(text):
        return text, ""
    shapes = {_word(name): name for name in published_shapes.PRESETS}
    words = [each for each in re.split(r"[-_ ]+", text.rpartition("/")[2].lower()) if each]
    known = {*_DTYPES, *BYTES, *FORMATS, "int4", "int8"}
    kinds = [_DTYPES.get(each, each) for each in words if each in known]
    words = [each for each in words if _DTYPES.get(each, each) not in kinds]
    for keep in (words, [each for each in words if not _TUNED.fullmatch(each)]):
        for more in (keep, keep[1:] if keep[:1] == ["meta"] else keep):
            if "".join(map(_word, more)) in shapes:
                return shapes["".join(map(_word, more))], kinds[0] if kinds else ""
    return text, ""


def draft_named(text: str, model: str | None = None) -> str:
    """Name of a draft: a shape, a kind of draft head, or `none`.

    >>> draft_named("EAGLE-3"), draft_named("Llama-3.2-1B"), draft_named("none")
    ('eagle3', 'llama-3.2-1b', 'none')
    """
    kinds = {_word(kind): kind for kind in draft_heads.ABOUT} | {"eagle2": "eagle", _word(NO_DRAFT): NO_DRAFT, "ngram": NO_DRAFT}
    if _word(text) in kinds:
        return kinds[_word(text)]
    if draft_heads.is_head(text):
        return text
    first = _word(re.split(r"[-_ ]", text.rpartition("/")[2])[0])  # such as yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    if first in kinds:
        return kinds[first]
    name, _ = shape_name(text)
    if name not in published_shapes.PRESETS and not _is_file(name):
        raise UnknownNameError.of("draft", text, (*published_shapes.PRESETS, *draft_heads.ABOUT, NO_DRAFT))
    return name


def gpus_named(text: str) -> tuple[int, Device]:
    """Number of GPUs in a text such as 8xH100, 1 without a number, and the device.

    >>> [(count, device.name) for count, device in map(gpus_named, ("8 x A100-80GB", "rtx-4090", "H100 x 2", "4 H200 GPUs"))]
    [(8, 'a100'), (1, 'rtx-4090'), (2, 'h100'), (4, 'h200')]
    """
    before = re.fullmatch(r"(\d{1,4})\s*(?:[xX*\u00d7]\s*|\s)(.+)", text)
    after = re.fullmatch(r"(.+?)\s*[xX*\u00d7]\s*(\d{1,4})", text)
    if before and int(before[1]) == 0:
        raise ParameterError(f"gpu must have at least one device, got {checks.shown(text)}")
    readings = [(1, text), *([(int(before[1]), before[2])] if before else []), *([(int(after[2]), after[1])] if after else [])]
    for count, name in readings:
        try:
            return max(count, 1), device_named(name)
        except UnknownNameError:
            continue
    return 1, device_named(text)


def device_named(text: str) -> Device:
    """A device by its name in the project, as vendors write it, or by its file.

    >>> device_named("NVIDIA H100 80GB SXM5").name, device_named("A100-40GB").name, device_named("GeForce RTX 4090").name
    ('h100', 'a100-40gb', 'rtx-4090')
    """
    if text in devices.DEVICES or text.endswith(".toml"):
        return devices.device(text)
    known = {_word(name): name for name in devices.DEVICES}
    words = [each for each in re.split(r"[-_ ()]+", text.lower()) if each and each not in _VENDORS]
    for keep in (words, [each for each in words if not re.fullmatch(r"\d+gb", each)]):
        if "".join(map(_word, keep)) in known:
            return devices.DEVICES[known["".join(map(_word, keep))]]
    raise UnknownNameError.of("gpu", text, devices.DEVICES)
