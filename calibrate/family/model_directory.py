"""Models as directories: those of the family, made here, and any other that transformers reads. Only safetensors are loaded.

A directory of the family holds `config.json` and `model.safetensors` (half precision), its tokenizer, and `training.json`: its
training, corpus and losses. `AutoModelForCausalLM` and `AutoTokenizer` read it. Models are loaded in float32 and checked; code that
comes with a model is never run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.architectures import shape_configs
from model.base import checks, strict_json, whole_files
from model.base.bounded_files import MOST_BYTES, MOST_TOML, check_regular, json_of, read_bytes
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

MODELS = Path(__file__).parent / "models"
CONFIG, WEIGHTS, INDEX, LOG, HEADS = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "training.json", "heads.safetensors",
)  # fmt: skip
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pkl")
"""Suffixes of other formats of weights, which may run any code when they are read."""
SCHEMA = "decodesim.model/1"
DTYPES = ("float32", "float64", "bfloat16", "float16")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files to fetch from the hub: weights, settings and tokenizers, no code."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its tokenizer, in evaluation mode."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    checksum: str

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden(self) -> int:
        """Width of its states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """Rows of its output matrix."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def positions(self) -> int:
        """Longest sequence for which the model was made [tokens]."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or checks.MAX_TOKENS)

    def tokens(self, texts: dict[str, str]) -> Any:
        """Return the tokens of all modules, each followed by the tokenizer's end token if it has one, shape (tokens,)."""
        import numpy as np

        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        with quiet():  # it warns that a module is longer than the model's positions
            found = self.tokenizer([*texts.values()], add_special_tokens=False)["input_ids"]
        return np.concatenate([np.array([*each, *end], dtype=np.int64) for each in found])


def bundled(name: str) -> Path:
    """Return the directory of a bundled model of the family.

    >>> bundled("targt")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: unknown model of the family 'targt'; ...
    """
    checks.one_of("model of the family", name, names())
    return MODELS / name


def names() -> list[str]:
    """Return the names of the bundled models of the family."""
    return sorted(path.parent.name for path in MODELS.glob(f"*/{CONFIG}"))


def locate_model(model: str) -> Path:
    """Return the directory of a model: a directory, a name of the family (`family:target`, or `target`), or OWNER/NAME of the hub.

    Only the last accesses the network.
    """
    path = Path(model)
    of_family, colon, name = model.partition(":")
    if colon and of_family == "family":
        return bundled(name)
    if model and path.is_dir():  # Path("") is the current folder
        return path
    if model in names():
        return bundled(model)
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1 or not all(model.split("/")) or path.exists():
        known = f"a directory, one of the family ({', '.join(names()) or 'none is bundled'}) or OWNER/NAME of the hub"
        raise ParameterError(f"model must be {known}, and {checks.shown(model)} is none")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=[*HUB_FILES], ignore_patterns=["*/*"]))
    except Exception as error:  # any error of the network
        why = first_line(error)
        raise ParameterError(f"model {model} could not be fetched from the hub: {why}; give a directory instead") from None


def checksum(folder: Path) -> str:
    """Return the sha256 of a model's weights, by which heads and logs identify it; several files are hashed in sequence."""
    return sha256_of(weights(folder))


def sha256_of(paths: Sequence[Path]) -> str:
    """Return the sha256 of files, hashed in sequence."""
    digest = hashlib.sha256()
    for path in paths:
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def weights(folder: Path) -> list[Path]:
    """Return the files of a model's weights, sorted by name."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        mapping = table(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
            raise ParameterError(f"{INDEX} of {folder.name} must have a weight_map of files by tensor; fetch the model again")
        paths = [folder / name for name in sorted(set(mapping.values()))]
        for path in paths:
            if path.parent != folder or path.suffix != ".safetensors" or not path.is_file():
                raise ParameterError(f"{INDEX} of {folder.name} names {path.name}, which must be a safetensors file in its folder")
        return paths
    others = sorted(path.name for path in folder.glob("*") if path.suffix in UNSAFE_SUFFIXES)
    instead = f", and only {', '.join(others)}, which are not read" if others else ""
    raise ParameterError(f"{folder.name} has no {WEIGHTS}{instead}; only safetensors are loaded: convert it with save_pretrained")


def load(model: str | Path, device: str = "cpu", dtype: str = "float32", *, encoders: bool = False) -> Loaded:
    """Load a model and its tokenizer: a directory, the name of one of the family, or OWNER/NAME of the hub.

    Models with an encoder are refused unless `encoders` is set: they can decode, but not be trained here.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    checks.one_of("dtype", dtype, DTYPES)
    folder = locate_model(str(model))
    name = folder.resolve().name if Path(model).is_dir() else str(model)
    crossing = _crossing(folder, name)
    if crossing and not encoders:
        raise ParameterError(f"model {name} must be decoder-only, and it has an encoder")
    files = weights(folder)
    _check_files(folder, name, files)
    kind: Any = AutoModelForSeq2SeqLM if crossing else AutoModelForCausalLM
    ours: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    with quiet():
        try:
            built, loading = kind.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
                **ours,
            )  # fmt: skip
        except Exception as error:  # a truncated file, inconsistent sizes, or a model without output
            names_of = ", ".join(path.name for path in files)
            why = first_line(error)
            raise ParameterError(f"model {name} cannot be loaded from {names_of}: {why}; fetch or make it again") from None
        if loading["missing_keys"]:
            lacks = sorted(loading["missing_keys"])
            raise ParameterError(f"model {name} lacks {len(lacks)} tensors that its config.json requires, such as {lacks[0]}")
        layers = int(built.config.get_text_config().num_hidden_layers)
        numbered = ((key, re.findall(r"\.(\d+)\.", key)) for key in sorted(loading["unexpected_keys"]))
        beyond = [key for key, numbers in numbered if any(int(each) >= layers for each in numbers)]
        if beyond and layers:  # the library would ignore these weights, and load another model than was saved
            bound = f"num_hidden_layers of model {name} must match its weights, got {layers} and {beyond[0]}"
            raise ParameterError(f"{bound}; fetch or make it again")
        if loading["mismatched_keys"]:  # the library's own error does not name them
            tensor, there, asked = min(loading["mismatched_keys"])
            bound = f"{tensor} of model {name} must have shape {tuple(asked)}, as its config.json requires, got {tuple(there)}"
            raise ParameterError(f"{bound}; fetch or make it again")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **ours)
        except Exception as error:  # no tokenizer, or one that needs the model's code
            what = f"model {name} has no tokenizer that can be loaded: {first_line(error)}"
            raise ParameterError(f"{what}; add tokenizer.json to its folder") from None
    finite(name, built.named_parameters())
    result = Loaded(name, folder, built.to(device).eval(), tokenizer, checksum(folder))
    if len(tokenizer) > result.vocabulary:
        bound = f"tokens of model {name} must be at most its vocabulary={result.vocabulary}"
        raise ParameterError(f"{bound}, got a tokenizer of {len(tokenizer)}; it belongs to another model")
    return result


_SIZED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", "added_tokens.json", "chat_template.jinja", "tokenizer.model",
)  # fmt: skip
"""Files besides the weights that the library reads."""


def _check_files(folder: Path, name: str, files: Sequence[Path]) -> None:
    """Refuse files that would take very long, or more memory than the weights, before the library reads or builds anything."""
    for each in (*files, *(folder / other for other in _SIZED)):
        if each.exists():
            check_regular(each, None if each in files else MOST_BYTES)
    config = table(folder / CONFIG)
    try:
        shape_configs.check_config(config)
    except ParameterError as error:
        raise ParameterError(f"{CONFIG} of model {name}: {error}") from None
    held = [tensor for path in files for tensor in _header(path).items()]
    elements = sum(math.prod(shape) for _, shape in held)
    numbered = [int(each) for tensor, _ in held for each in re.findall(r"\.(\d+)\.", tensor)]
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        asked = text.get(key)
        if isinstance(asked, int) and held and asked > max(numbered, default=-1) + 1:
            bound = f"{key} of model {name} must match its weights, which have {max(numbered, default=-1) + 1} layers"
            raise ParameterError(f"{bound}, got {asked}; fetch or make it again")
    wide = [value for key in ("hidden_size", "n_embd", "d_model") if isinstance(value := text.get(key), int)]
    for key in ("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_size", "n_embd", "d_model"):
        size = text.get(key)
        if isinstance(size, int) and wide and held and size * wide[0] > 2 * elements:
            asks = f"{key}={size} of model {name} asks for more than its weights hold, {elements:,} numbers in all"
            raise ParameterError(f"{asks}; fetch or make it again")


def _header(path: Path) -> dict[str, list[int]]:
    """Return the tensors of a safetensors file with their shapes; none if its header is unreadable, for which the library's error
    is better.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json_of(file.read(size)) if 0 < size <= MOST_BYTES else {}
    except (OSError, ValueError):
        return {}
    found = {}
    for tensor, each in header.items() if isinstance(header, dict) else ():
        shape = each.get("shape") if isinstance(each, dict) else None
        if tensor != "__metadata__" and isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            found[tensor] = shape
    return found


def finite(name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Refuse tensors with infinities or NaN."""
    for tensor, value in tensors:
        bad = int((~value.isfinite()).sum())
        if bad:
            bound = f"{tensor} of {name} must be finite, and {bad} of its {value.numel()} numbers are not"
            raise ParameterError(f"{bound}; fetch or make it again")


def same_tokens(one: Loaded, other: Loaded) -> None:
    """Refuse two models with different tokenizers."""
    text = "def same(tokens):\n    return [each + 1 for each in tokens]  # näxt\n"
    if one.vocabulary != other.vocabulary:
        raise _different(one, other, f"vocabularies are of {one.vocabulary} and {other.vocabulary} tokens")
    words = one.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    for word in words[0].keys() | words[1].keys():
        if words[0].get(word) != words[1].get(word):
            numbers = f"{words[0].get(word, 'no token')} and {words[1].get(word, 'no token')}"
            raise _different(one, other, f"{checks.shown(word)} is {numbers}")
    if one.tokens({"": text}).tolist() != other.tokens({"": text}).tolist():
        raise _different(one, other, "they split a text into other tokens")


def _different(one: Loaded, other: Loaded, why: str) -> ParameterError:
    return ParameterError(f"models {one.name} and {other.name} must have the same tokenizer: {why}; take two of one family")


def save(model: Any, tokenizer: Any, log: dict[str, Any], folder: Path) -> None:
    """Write a model in half precision, with its tokenizer and log, to a new directory, completely or not at all.

    `tokenizer` is one of transformers, or of `tokenizers` as `vocabulary.train_tokenizer` returns it.
    """
    from calibrate.family import vocabulary

    refuse_existing(folder)
    half = copy.deepcopy(model).cpu().half()
    finite(f"{folder.name} in half precision", half.named_parameters())
    if not hasattr(tokenizer, "save_pretrained"):
        tokenizer = vocabulary.wrap_tokenizer(tokenizer, half.config.max_position_embeddings)
    with whole_files.atomic_path(folder) as part, quiet():
        part.mkdir()
        half.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / LOG).write_text(strict_json.dumps({"schema": SCHEMA, **log}, indent=1) + "\n", encoding="utf-8")


def round_to_half(model: Any) -> None:
    """Round the weights to half precision, in place, so that its losses are those of the saved weights."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().to(parameter.dtype))


def log_of(folder: Path) -> dict[str, Any]:
    """Return the log in a model's directory."""
    log = table(folder / LOG)
    if log.get("schema") != SCHEMA:
        raise ParameterError(f"{LOG} of {folder.name} must be of schema {SCHEMA}, got {checks.shown(log.get('schema'))}")
    return log


def refuse_existing(path: Path, option: str = "-o") -> None:
    """Refuse a path that exists, unless it is an empty folder, or that cannot be written."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ParameterError(f"{path} is there already; remove it, or choose another place with {option}")
    refuse_unwritable(path, option)


def refuse_unwritable(path: Path, option: str = "-o") -> None:
    """Refuse a path that cannot be written, before hours of work."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is no folder"
        raise ParameterError(f"{path} cannot be made, because {folder} {why}; choose another place with {option}")


def refuse_other(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse an existing result with other settings than those requested."""
    for key, value in now.items():
        if was.get(key) != value:
            change = f"{key} {checks.shown(was.get(key))}, now asked for {checks.shown(value)}"
            raise ParameterError(f"{path} is there already, made with {change}; give the same, or choose another place with -o")


def versions() -> dict[str, str]:
    """Versions of the libraries that make models."""
    import platform

    import tokenizers

    from calibrate.devices import machine

    return {"python": platform.python_version(), **machine.versions(), "tokenizers": tokenizers.__version__}


def _crossing(folder: Path, name: str) -> bool:
    """Whether a model has an encoder; refuse a type that needs the model's code, before anything large is read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = table(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            what = f"model {name} is of type {checks.shown(kind)} and would run its own code (auto_map), which is never done"
            raise ParameterError(f"{what}; take a type that transformers supports")
        raise ParameterError(f"{CONFIG} of model {name} must have a model_type of transformers, got {checks.shown(kind)}")
    return bool(config.get("is_encoder_decoder"))


def table(path: Path) -> dict[str, Any]:
    folder = path.parent.resolve().name
    try:
        content = json_of(read_bytes(path, MOST_BYTES if path.name == INDEX else MOST_TOML))
    except FileNotFoundError:
        raise ParameterError(f"{folder} has no {path.name}; give a model in the format of transformers") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} of {folder} cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ParameterError(f"{path.name} of {folder} must be a table of keys, got {checks.shown(content)}")
    return content


def first_line(error: Exception) -> str:
    """Return the first line of an error without its full stop, and the second line too if the first ends with a colon.

    >>> first_line(ValueError("Validation error for field 'layers':\\n    TypeError: got 'two'.\\nMore")), first_line(ValueError())
    ("Validation error for field 'layers': TypeError: got 'two'", 'ValueError')
    """
    lines = [each.strip() for each in str(error).splitlines() if each.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".,")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's progress bars and warnings within the block: important ones become errors here."""
    from transformers.utils import logging as library

    logging: Any = library
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
