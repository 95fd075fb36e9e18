"""Models as directories: those of the family, made here, and any other that transformers reads. Only safetensors are loaded.

A directory of the family holds `config.json` and `model.safetensors` (half precision), its tokenizer, and `training.json`: how it
was made, on which text, and what it is worth. `AutoModelForCausalLM` and `AutoTokenizer` read it. Whatever is loaded is in float32
and checked; code that comes with a model is never run.
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

from model.architectures import transformer
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
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pkl")
"""What weights come in too, and what may run anything when it is read."""
SCHEMA = "decodesim.model/1"
DTYPES = ("float32", "float64", "bfloat16", "float16")
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is fetched from the hub: weights, settings and tokenizers, no code."""


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
        """How many decoder layers it has."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden(self) -> int:
        """How wide its states are."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """Rows of its output matrix."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def positions(self) -> int:
        """The longest text that it was made for."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or checks.MAX_TOKENS)

    def tokens(self, texts: dict[str, str]) -> Any:
        """The tokens of all texts, one behind the other with the end of text between where there is one, shape (tokens,)."""
        import numpy as np

        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        with quiet():  # it warns that a whole module is longer than the model reads at once
            found = self.tokenizer([*texts.values()], add_special_tokens=False)["input_ids"]
        return np.concatenate([np.array([*each, *end], dtype=np.int64) for each in found])


def bundled(name: str) -> Path:
    """The directory of a model of the family that comes with the package.

    >>> bundled("targt")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: unknown model of the family 'targt'; ...
    """
    checks.one_of("model of the family", name, names())
    return MODELS / name


def names() -> list[str]:
    """The models of the family that come with the package."""
    return sorted(path.parent.name for path in MODELS.glob(f"*/{CONFIG}"))


def found(model: str) -> Path:
    """Where a model is: a directory, the name of one of the family (`family:target`, or `target`), or OWNER/NAME of the hub, which
    alone asks the network.
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
        known = f"a directory, one of the family ({', '.join(names()) or 'none is here'}) or OWNER/NAME of the hub"
        raise ParameterError(f"model must be {known}, and {checks.shown(model)} is none")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=[*WANTED], ignore_patterns=["*/*"]))
    except Exception as error:  # whatever a network can do
        raise ParameterError(f"model {model} could not be had from the hub: {line(error)}; give a directory instead") from None


def checksum(folder: Path) -> str:
    """Of a model's weights, sha256: heads and logs say by it whose they are. Of several files, one after the other."""
    digest = hashlib.sha256()
    for path in weights(folder):
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def weights(folder: Path) -> list[Path]:
    """The files that hold a model's weights, in the order of their names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        mapping = table(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
            raise ParameterError(f"{INDEX} of {folder.name} must have a weight_map of files by tensor; fetch the model again")
        paths = [folder / name for name in sorted(set(mapping.values()))]
        for path in paths:
            if path.parent != folder or path.suffix != ".safetensors" or not path.is_file():
                raise ParameterError(f"{INDEX} of {folder.name} names {path.name}, which must be a safetensors file beside it")
        return paths
    others = sorted(path.name for path in folder.glob("*") if path.suffix in OTHERS)
    instead = f", and only {', '.join(others)}, which are not read" if others else ""
    raise ParameterError(f"{folder.name} has no {WEIGHTS}{instead}; only safetensors are loaded: convert it with save_pretrained")


def load(model: str | Path, device: str = "cpu", dtype: str = "float32", *, encoders: bool = False) -> Loaded:
    """Load a model and its tokenizer: a directory, the name of one of the family, or OWNER/NAME of the hub.

    Models with an encoder are refused, unless they are asked for: they can decode, but nothing here is trained for them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    checks.one_of("dtype", dtype, DTYPES)
    folder = found(str(model))
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
            built, said = kind.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
                **ours,
            )  # fmt: skip
        except Exception as error:  # a truncated file, sizes that do not fit, a type of model that has no output
            names_of = ", ".join(path.name for path in files)
            raise ParameterError(f"model {name} cannot be loaded from {names_of}: {line(error)}; fetch or make it again") from None
        if said["missing_keys"]:
            lacks = sorted(said["missing_keys"])
            raise ParameterError(f"model {name} lacks {len(lacks)} tensors that its config.json asks for, such as {lacks[0]}")
        layers = int(built.config.get_text_config().num_hidden_layers)
        numbered = ((key, re.findall(r"\.(\d+)\.", key)) for key in sorted(said["unexpected_keys"]))
        beyond = [key for key, numbers in numbered if any(int(each) >= layers for each in numbers)]
        if beyond and layers:  # the library leaves them out, and loads another model than was saved
            bound = f"num_hidden_layers of model {name} must be that of its weights, got {layers} and {beyond[0]}"
            raise ParameterError(f"{bound}; fetch or make it again")
        if said["mismatched_keys"]:  # the library's own error says nothing but that there are some
            tensor, there, asked = min(said["mismatched_keys"])
            bound = f"{tensor} of model {name} must be of shape {tuple(asked)}, as its config.json asks for, got {tuple(there)}"
            raise ParameterError(f"{bound}; fetch or make it again")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **ours)
        except Exception as error:  # none there, or one that needs code of its own
            what = f"model {name} has no tokenizer that can be loaded: {line(error)}"
            raise ParameterError(f"{what}; put tokenizer.json beside it") from None
    finite(name, built.named_parameters())
    result = Loaded(name, folder, built.to(device).eval(), tokenizer, checksum(folder))
    if len(tokenizer) > result.vocabulary:
        bound = f"tokens of model {name} must be at most its vocabulary={result.vocabulary}"
        raise ParameterError(f"{bound}, got a tokenizer of {len(tokenizer)}; it is another model's")
    return result


_SIZED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", "added_tokens.json", "chat_template.jinja", "tokenizer.model",
)  # fmt: skip
"""Files beside the weights that the library reads by itself."""


def _check_files(folder: Path, name: str, files: Sequence[Path]) -> None:
    """Refuse what would take for ever, or more memory than its weights need, before the library builds or reads anything."""
    for each in (*files, *(folder / other for other in _SIZED)):
        if each.exists():
            check_regular(each, None if each in files else MOST_BYTES)
    said = table(folder / CONFIG)
    try:
        transformer.check_config(said)
    except ParameterError as error:
        raise ParameterError(f"{CONFIG} of model {name}: {error}") from None
    held = [tensor for path in files for tensor in _header(path).items()]
    elements = sum(math.prod(shape) for _, shape in held)
    numbered = [int(each) for tensor, _ in held for each in re.findall(r"\.(\d+)\.", tensor)]
    text = said["text_config"] if isinstance(said.get("text_config"), dict) else said
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        asked = text.get(key)
        if isinstance(asked, int) and held and asked > max(numbered, default=-1) + 1:
            bound = f"{key} of model {name} must be that of its weights, which have {max(numbered, default=-1) + 1} layers"
            raise ParameterError(f"{bound}, got {asked}; fetch or make it again")
    wide = [value for key in ("hidden_size", "n_embd", "d_model") if isinstance(value := text.get(key), int)]
    for key in ("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_size", "n_embd", "d_model"):
        size = text.get(key)
        if isinstance(size, int) and wide and held and size * wide[0] > 2 * elements:
            asks = f"{key}={size} of model {name} asks for more than its weights hold, {elements:,} numbers in all"
            raise ParameterError(f"{asks}; fetch or make it again")


def _header(path: Path) -> dict[str, list[int]]:
    """The tensors of a safetensors file with their shapes; none where its header cannot be read, which the library says better."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            said = json_of(file.read(size)) if 0 < size <= MOST_BYTES else {}
    except (OSError, ValueError):
        return {}
    found = {}
    for tensor, each in said.items() if isinstance(said, dict) else ():
        shape = each.get("shape") if isinstance(each, dict) else None
        if tensor != "__metadata__" and isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            found[tensor] = shape
    return found


def finite(name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Refuse tensors that are not all numbers."""
    for tensor, value in tensors:
        bad = int((~value.isfinite()).sum())
        if bad:
            bound = f"{tensor} of {name} must be finite, and {bad} of its {value.numel()} numbers are not"
            raise ParameterError(f"{bound}; fetch or make it again")


def same_tokens(one: Loaded, other: Loaded) -> None:
    """Refuse two models that do not mean the same by the same number."""
    text = "def same(tokens):\n    return [each + 1 for each in tokens]  # näxt\n"
    if one.vocabulary != other.vocabulary:
        raise _different(one, other, f"vocabularies are of {one.vocabulary} and {other.vocabulary} tokens")
    words = one.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    for word in words[0].keys() | words[1].keys():
        if words[0].get(word) != words[1].get(word):
            numbers = f"{words[0].get(word, 'no token')} and {words[1].get(word, 'no token')}"
            raise _different(one, other, f"{checks.shown(word)} is {numbers}")
    if one.tokens({"": text}).tolist() != other.tokens({"": text}).tolist():
        raise _different(one, other, "they cut a text into other tokens")


def _different(one: Loaded, other: Loaded, why: str) -> ParameterError:
    return ParameterError(f"models {one.name} and {other.name} must have the same tokenizer: {why}; take two of one family")


def save(model: Any, tokenizer: Any, log: dict[str, Any], folder: Path) -> None:
    """Write a model in half precision with its tokenizer and log to a new directory, whole or not at all.

    `tokenizer` is one of transformers, or of `tokenizers` as `vocabulary.learnt` gives it.
    """
    from calibrate.family import vocabulary

    refuse_existing(folder)
    half = copy.deepcopy(model).cpu().half()
    finite(f"{folder.name} in half precision", half.named_parameters())
    if not hasattr(tokenizer, "save_pretrained"):
        tokenizer = vocabulary.wrapped(tokenizer, half.config.max_position_embeddings)
    with whole_files.whole(folder) as part, quiet():
        part.mkdir()
        half.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / LOG).write_text(strict_json.dumps({"schema": SCHEMA, **log}, indent=1) + "\n", encoding="utf-8")


def halved(model: Any) -> None:
    """Round the weights to half precision, in place: what is said of a model is said of the weights that are saved."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().to(parameter.dtype))


def log_of(folder: Path) -> dict[str, Any]:
    """What a model's directory says of how it was made."""
    said = table(folder / LOG)
    if said.get("schema") != SCHEMA:
        raise ParameterError(f"{LOG} of {folder.name} must be of schema {SCHEMA}, got {checks.shown(said.get('schema'))}")
    return said


def refuse_existing(path: Path, option: str = "-o") -> None:
    """Nothing that is there is written over, and a place that cannot be written to is refused too."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ParameterError(f"{path} is there already; remove it, or choose another place with {option}")
    refuse_unwritable(path, option)


def refuse_unwritable(path: Path, option: str = "-o") -> None:
    """What could not be written in the end is known before hours of work."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is no folder"
        raise ParameterError(f"{path} cannot be made, because {folder} {why}; choose another place with {option}")


def refuse_other(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """What is there already is taken for what is asked for only where it was made so."""
    for key, value in now.items():
        if was.get(key) != value:
            change = f"{key} {checks.shown(was.get(key))}, now asked for {checks.shown(value)}"
            raise ParameterError(f"{path} is there already, made with {change}; give the same, or choose another place with -o")


def versions() -> dict[str, str]:
    """Of what models are made with."""
    import platform

    import tokenizers

    from calibrate.devices import machine

    return {"python": platform.python_version(), **machine.versions(), "tokenizers": tokenizers.__version__}


def _crossing(folder: Path, name: str) -> bool:
    """Whether a model has an encoder; one that is none without code of its own is refused before anything large is read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said = table(folder / CONFIG)
    kind = said.get("model_type")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in said:
            own = f"model {name} is of type {checks.shown(kind)} and would run code of its own (auto_map), which is never done"
            raise ParameterError(f"{own}; take a type that transformers has")
        raise ParameterError(f"{CONFIG} of model {name} must have a model_type of transformers, got {checks.shown(kind)}")
    return bool(said.get("is_encoder_decoder"))


def table(path: Path) -> dict[str, Any]:
    folder = path.parent.resolve().name
    try:
        said = json_of(read_bytes(path, MOST_BYTES if path.name == INDEX else MOST_TOML))
    except FileNotFoundError:
        raise ParameterError(f"{folder} has no {path.name}; give a model in the format of transformers") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} of {folder} cannot be read as JSON: {line(error)}") from None
    if not isinstance(said, dict):
        raise ParameterError(f"{path.name} of {folder} must be a table of keys, got {checks.shown(said)}")
    return said


def line(error: Exception) -> str:
    """The first line that an error says, without the full stop; the next one too where it ends with a colon.

    >>> line(ValueError("Validation error for field 'layers':\\n    TypeError: got 'two'.\\nMore")), line(ValueError())
    ("Validation error for field 'layers': TypeError: got 'two'", 'ValueError')
    """
    said = [each.strip() for each in str(error).splitlines() if each.strip()] or [type(error).__name__]
    return " ".join(said[: 2 if said[0].endswith(":") else 1]).rstrip(".,")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The library's bars and warnings go meanwhile: what matters of them is said as an error."""
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
