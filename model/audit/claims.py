"""Claims of speed-ups: what a report says of a method, a model and a GPU, read from a CSV file or from mappings.

A number counts as rounded: it may be off by one unit of its last printed digit, where whole numbers count as printed to one decimal
and rates to two. Counts (draft length, batch, layers) are exact.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from model.architectures import draft_heads, published_shapes
from model.architectures.layer_parts import FORMATS, quantised
from model.architectures.transformer import BYTES, Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.hardware import devices
from model.hardware.devices import Device
from model.methods import registry
from model.methods.claim_bounds import NO_DRAFT, TERMS, WHOLE

EXAMPLES = Path(__file__).parent / "published_claims.csv"
"""Bundled claims of papers, with their sources."""
MOST_CLAIMS = 2000
MOST_TEXT = 500
WORDS = {
    "method": "a method of `sim ls methods`, or a name of the field such as EAGLE-3",
    "model": "the target: a published shape (`sim ls shapes`) or the path of a config.json",
    "gpu": "a device of `sim ls devices`, or the path of its .toml; 8xH100 if several share every pass",
    "draft": "the draft model: a published shape, a kind of head (eagle3), or none",
    "dtype": "type of weights and arithmetic: bfloat16, float8, int4, ...; by default that of the shape",
    "engine": "the engine; printed only",
    "source": "where the claim stands; printed only",
}
"""Columns of words."""
NUMBERS = {
    "speedup": ("over plain decoding of the same model, on the same GPUs, in the same batch", 1e-3, 1e5, 1),
    "batch": ("sequences that are decoded together; by default 1, the most favourable", 1, 1e6, 0),
    "context": ("cached tokens of a sequence; by default 0, the most favourable", 0, 1e7, 0),
    "tensor_parallel": ("GPUs that share every pass; by default those of `gpu`", 1, 1e4, 0),
    "plain_tpot_ms": ("time per output token of plain decoding, the baseline [ms]", 1e-6, 1e9, 1),
}
"""Columns of numbers that no method owns: meaning, least and largest value, and decimals that count as printed."""
COUNTS = ("batch", "context", "tensor_parallel", *WHOLE)
RATES = tuple(name for name, term in TERMS.items() if (term.low, term.high) == (0, 1))
COLUMNS = (*WORDS, *NUMBERS, *TERMS)
"""All columns of a file of claims."""
ALIASES = {
    "alpha": "acceptance_rate", "acceptance": "acceptance_rate", "al": "mean_acceptance_length", "tau": "mean_acceptance_length",
    "mal": "mean_acceptance_length", "acceptance_length": "mean_acceptance_length", "accept_length": "mean_acceptance_length",
    "accept_len": "mean_acceptance_length", "average_acceptance_length": "mean_acceptance_length", "gamma": "draft_length",
    "k": "draft_length", "num_speculative_tokens": "draft_length", "max_draft_length": "draft_length",
    "speculative_tokens": "draft_length", "c": "cost_ratio", "speed_up": "speedup", "target": "model", "target_model": "model",
    "draft_model": "draft", "drafter": "draft", "device": "gpu", "hardware": "gpu", "batch_size": "batch", "bs": "batch",
    "concurrency": "batch", "sequences": "batch", "tp": "tensor_parallel", "p_correct": "match_rate", "p": "match_rate",
    "d": "layers", "f": "fallback_rate", "r": "rollback_rate", "context_length": "context", "reference": "source",
    "paper": "source", "url": "source", "precision": "dtype", "baseline_tpot_ms": "plain_tpot_ms", "framework": "engine",
}  # fmt: skip
"""Other names of columns, in small letters."""
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8", "w4a16": "int4", "awq": "int4",
    "gptq": "int4", "w8a8": "int8", "fp4": "nvfp4",
}  # fmt: skip
_VENDORS = {"nvidia", "amd", "geforce", "instinct", "tesla", "sxm", "sxm4", "sxm5", "pcie", "gpu"}


class Stated(NamedTuple):
    """A number as it was printed, and one unit of its last digit; 0 for exact numbers."""

    value: float
    unit: float = 0.0

    def at(self, better: int) -> float:
        """The end of its rounding that is larger (`better` 1) or smaller (-1); the number itself for 0."""
        return self.value + better * self.unit


@dataclass(frozen=True)
class SpeedupClaim:
    """One claim; what it does not state is None.

    Parameters
    ----------
    row
        Row of the file, from 1; the header is not counted.
    method, draft
        Name of the method in the project; kind or name of its draft.
    words
        Values of the columns `WORDS`, as written.
    numbers
        Stated numbers of the columns `NUMBERS` and of the terms of bounds.
    """

    row: int
    method: str | None
    words: Mapping[str, str]
    numbers: Mapping[str, Stated]
    draft: str | None = None
    shape: Shape | None = field(default=None, repr=False)
    draft_shape: Shape | None = field(default=None, repr=False)
    device: Device | None = field(default=None, repr=False)

    def number(self, name: str, better: int = 0) -> float | None:
        """A stated number, at one end of its rounding; None if it is not stated."""
        stated = self.numbers.get(name)
        return None if stated is None else stated.at(better)

    def count(self, name: str, default: int) -> int:
        """A stated count, or the default."""
        return int(self.numbers[name].value) if name in self.numbers else default


def read_claims(path: Path) -> tuple[list[SpeedupClaim], tuple[str, ...]]:
    """Claims of a CSV file with a header, and its columns that are not used; errors name file, row and column."""
    try:
        header, rows = bounded_files.csv_rows(path, MOST_CLAIMS, _check_columns)
        names, unused = _columns(header)
        if not rows:
            raise ParameterError("at least one claim is needed, got a file without rows")
        found = [{name: cell for name, cell in zip(names, row, strict=True) if name} for row in rows]
        return [claim(row, number) for number, row in enumerate(found, 1)], unused
    except OSError as error:
        raise ParameterError(f"{path.name}: {error.strerror or error}") from None
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def of_rows(rows: Iterable[Mapping[str, Any]]) -> list[SpeedupClaim]:
    """Claims from mappings with the names of columns; None is an empty field.

    >>> of_rows([{"method": "EAGLE-3", "speedup": "2.5x", "AL": 3.1}])[0].numbers["speedup"]
    Stated(value=2.5, unit=0.1)
    """
    claims = []
    for number, row in enumerate(rows, 1):
        if number > MOST_CLAIMS:
            raise ParameterError(f"at most {MOST_CLAIMS:,} claims are allowed, got more")
        if not isinstance(row, Mapping):
            raise ParameterError(f"row {number}: a claim must be a table of columns, got {checks.shown(row)}")
        names, _ = _columns([str(name) for name in row])
        fields = {name: "" if each is None else str(each).strip() for name, each in zip(names, row.values(), strict=True) if name}
        claims.append(claim(fields, number))
    if not claims:
        raise ParameterError("claims must be at least one, got none")
    return claims


def _columns(header: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Name of each column, empty for those that are not used, and the unused ones."""
    names, unused = [], []
    for title in header:
        plain = re.sub(r"[\s\-]+", "_", title.strip().lower())
        name = ALIASES.get(plain, plain)
        if name not in COLUMNS:
            if not title or difflib.get_close_matches(plain, (*COLUMNS, *ALIASES), n=1, cutoff=0.75):
                raise ParameterError(f"unknown column {checks.shown(title)}; {checks.nearest(plain, COLUMNS)}")
            unused.append(title)
            name = ""
        if name and name in names:
            raise ParameterError(f"column {name} is there twice; keep one of them")
        names.append(name)
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        raise ParameterError(f"columns must be separated by commas, got the header {checks.shown(header[0])}")
    if not any(names):
        raise ParameterError(f"no column is known; the columns are {', '.join(COLUMNS)}")
    return names, tuple(unused)


def _check_columns(header: Sequence[str]) -> None:
    """Refuse a header with an unknown column that resembles a known one, or with one twice."""
    _columns(header)


def claim(fields: Mapping[str, str], row: int = 1) -> SpeedupClaim:
    """A claim from the fields of its columns; empty ones are not stated."""
    try:
        return _claim({name: text for name, text in fields.items() if text}, row)
    except ParameterError as error:
        raise ParameterError(f"row {row}: {error}") from None


def _claim(fields: Mapping[str, str], row: int) -> SpeedupClaim:
    for name, text in fields.items():
        if len(text) > MOST_TEXT or not text.isprintable():
            raise ParameterError(f"{name} must be a line of at most {MOST_TEXT} characters, got {checks.shown(text)}")
    numbers = {name: _number(name, text) for name, text in fields.items() if name not in WORDS}
    words = {name: fields[name] for name in WORDS if name in fields}
    method, kind = method_named(words["method"]) if "method" in words else (None, "")
    shape = model_named(words["model"], words.get("dtype")) if "model" in words else None
    if "dtype" in words and shape is None:
        got = checks.shown(words["dtype"])
        raise ParameterError(f"dtype is used with a model alone, got {got}; name the model, or leave it out")
    device = None
    if "gpu" in words:
        count, name = _gpus(words["gpu"])
        device = device_named(name)
        numbers.setdefault("tensor_parallel", Stated(float(count)))
    draft = draft_named(words["draft"], words.get("model")) if "draft" in words else kind or None
    found = SpeedupClaim(row, method, words, numbers, draft, shape, None, device)
    if method is not None:
        found = _with_terms_of(found)
    return replace(found, draft_shape=_draft_shape(found, words.get("model"), stated="draft" in words))


def _with_terms_of(claim: SpeedupClaim) -> SpeedupClaim:
    """Refuse terms that the method does not use; add the layers that its model has."""
    rule = registry.parameters(claim.method).CLAIMS
    known = () if rule is None else rule.terms
    for name in claim.numbers:
        if name in TERMS and name not in known:
            listed = ", ".join(known) if known else "no term"
            raise ParameterError(f"{name} is no term of method {claim.method}, which uses {listed}; leave the field empty")
    if "layers" not in known:
        return claim
    layers = claim.numbers.get("layers") if claim.shape is None else Stated(float(claim.shape.layers))
    if layers is None:
        return claim
    for name in ("exit_layer", "mean_layers"):
        if name in claim.numbers and claim.numbers[name].value > layers.value:
            got = f"{claim.numbers[name].value:g}"
            raise ParameterError(f"{name} must be at most layers={layers.value:g}, got {got}")
    if claim.numbers.get("layers", layers) != layers:
        got = f"{claim.numbers['layers'].value:g}"
        raise ParameterError(f"layers must be {layers.value:g}, as {claim.words['model']} has, got {got}; leave one of them empty")
    return replace(claim, numbers={**claim.numbers, "layers": layers})


def _draft_shape(claim: SpeedupClaim, model: str | None, *, stated: bool) -> Shape | None:
    name = claim.draft
    if name is None or name == NO_DRAFT:
        return None
    if name in draft_heads.ABOUT:
        if claim.shape is None:
            return None
        try:
            return draft_heads.head_of(name, claim.shape)
        except ParameterError:
            if stated:
                raise
            return None
    return published_shapes.named_shape(name, key="draft")


# --- Fields -----------------------------------------------------------------------------------------------------------


def _number(name: str, text: str) -> Stated:
    plain = text.replace("\N{MULTIPLICATION SIGN}", "x").strip()
    percent = name in RATES and plain.endswith("%")
    plain = plain.rstrip("%").strip() if percent else plain[:-1].strip() if name == "speedup" and plain[-1:] in "xX" else plain
    try:
        decimal = Decimal(plain)
    except InvalidOperation:
        raise ParameterError(f"{name} must be a number, or empty where unknown, got {checks.shown(text)}") from None
    if percent:
        decimal = decimal.scaleb(-2) if decimal.is_finite() else decimal
    low, high, decimals = _range(name)
    value = float(decimal) if decimal.is_finite() else math.nan
    if not low <= value <= high:
        also = "; write it as a fraction or with %" if name in RATES and 1 < value <= 100 else ""
        raise ParameterError(f"{name} must be between {low:g} and {high:g}, got {checks.shown(text)}{also}")
    if name in COUNTS:
        if value != math.floor(value):
            raise ParameterError(f"{name} must be a whole number, got {checks.shown(text)}")
        return Stated(value)
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    return Stated(value, float(Decimal(1).scaleb(-max(-exponent, decimals))))


def _range(name: str) -> tuple[float, float, int]:
    if name in TERMS:
        return TERMS[name].low, TERMS[name].high, TERMS[name].decimals
    _, low, high, decimals = NUMBERS[name]
    return low, high, decimals


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
    (('speculative', 'eagle3'), ('bild', ''), ('speculative', 'none'))
    """
    known = _methods() if not registry.allowed_modules() else {
        word: each for name in registry.names() for word, each in _names_of(name).items()
    }
    if _word(text) not in known:
        aliases = [each for name in registry.names() for each in getattr(registry.parameters(name).CLAIMS, "names", ())]
        raise checks.unknown("method", text, (*registry.names(), *aliases))
    return known[_word(text)]


def model_named(text: str, dtype: str | None = None) -> Shape:
    """Shape of a target by its name in the project, as a hub writes it, or by its file.

    >>> model_named("meta-llama/Llama-3.1-8B-Instruct").layers
    32
    """
    name = published_shapes.named_on_hub(text)
    if dtype is None:
        return published_shapes.named_shape(name, key="model")
    kind = _DTYPES.get(dtype.lower(), dtype.lower())
    if kind in BYTES:
        return published_shapes.named_shape(name, kind, key="model")
    if kind not in FORMATS and not kind.startswith("int"):
        raise checks.unknown("dtype", dtype, (*BYTES, *FORMATS))
    return replace(published_shapes.named_shape(name, key="model"), weights=quantised(kind, key="dtype"))


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
    name = published_shapes.named_on_hub(text)
    if name not in published_shapes.PRESETS and not published_shapes.is_path(name):
        known = (*published_shapes.PRESETS, *draft_heads.ABOUT, NO_DRAFT)
        raise ParameterError(f"{checks.unknown('draft', text, known)}; or give the path of a config.json, or leave it empty")
    return name


def _gpus(text: str) -> tuple[int, str]:
    """Number of GPUs in a text such as 8xH100, 1 without a number, and the name of one.

    >>> _gpus("8 x A100-80GB"), _gpus("rtx-4090")
    ((8, 'A100-80GB'), (1, 'rtx-4090'))
    """
    found = re.fullmatch(r"(\d{1,4})\s*[xX\u00d7]\s*(.+)", text)
    return (1, text) if found is None else (max(int(found[1]), 1), found[2])


def device_named(text: str) -> Device:
    """A device by its name in the project, as vendors write it, or by its file.

    >>> device_named("NVIDIA H100 80GB SXM5").name, device_named("A100-40GB").name, device_named("GeForce RTX 4090").name
    ('h100', 'a100-40gb', 'rtx-4090')
    """
    if text in devices.DEVICES or devices.is_path(text):
        return devices.device(text)
    words = [each for each in re.split(r"[-_ ]+", text.lower()) if each not in _VENDORS]
    for name in ("-".join(words), "-".join(each for each in words if not re.fullmatch(r"\d+gb", each))):
        if name in devices.DEVICES:
            return devices.DEVICES[name]
    return devices.device("-".join(words) or text)
