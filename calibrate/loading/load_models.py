"""Load models with their tokenizers, by directory, name in the family or name on the hub, and tokenize prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.decoders import transformers_adapter
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.family import draft_head_training, model_directory
from calibrate.family import exit_heads as family_heads
from model.base import checks
from model.base.checks import ParameterError

FAMILY = "family"
"""`family` names the bundled models for all roles; `family:NAME` names a single model."""
CONTEXT = 8
"""Prompt tokens decoded before the output: some tokenizers drop the space at the start of a text."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A decoder with its tokenizer, and the checksum of its weights."""

    name: str
    decoder: Decoder
    tokenizer: Any
    checksum: str

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads the prompt."""
        return bool(self.decoder.config.is_encoder_decoder)


def named(models: Mapping[str, str | None], roles: Sequence[str], method: str) -> dict[str, str]:
    """Return the model to load for each role of the method; `family` stands for the bundled model of every role.

    >>> named({"target": "family", "draft": None, "medium": None}, ("target", "draft"), "speculative")
    {'target': 'family:target', 'draft': 'family:draft'}
    """
    found = {}
    whole = models.get("target") == FAMILY
    for role in ("target", "draft", "medium"):
        given = models.get(role)
        if given is not None and role not in roles:
            raise ParameterError(f"--{role} is not used by method {method}, which has no {role} model; leave it out")
        if given is None and role in roles and not whole:
            option = "model" if role == "target" else role
            raise ParameterError(f"method {method} needs a {role} model and has none; give one with --{option}")
        if role in roles:
            found[role] = f"{FAMILY}:{role}" if given is None or given == FAMILY else given
    return found


def load(where: str, *, device: str = "cpu", dtype: str = "float32") -> Decoder:
    """Load a decoder by directory, name in the family, or OWNER/NAME of the hub: see `calibrate.family.model_directory.load`."""
    loaded = model_directory.load(where, device, dtype, encoders=True)
    decoder = transformers_adapter.decoder_of(loaded.model, loaded.name)
    decoder.tokenizer, decoder.checksum = loaded.tokenizer, loaded.checksum
    checks.whole(f"num_hidden_layers of model {decoder.name}", decoder.layers, 1, checks.MAX_LAYERS)
    for end in decoder.ends:  # an impossible end token would silently never end a sequence
        checks.whole(f"eos_token_id of model {decoder.name}", end, 0, decoder.vocabulary - 1, "vocabulary-1")
    return decoder


def model(where: str, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """Load a model and its tokenizer. Only OWNER/NAME of the hub uses the network."""
    of_family, _, name = where.partition(":")
    folder = model_directory.bundled(name) if of_family == FAMILY and name else model_directory.locate_model(where)
    shown = where if folder != Path(where) else folder.resolve().name
    try:
        with model_directory.quiet():
            decoder = load(str(folder), device=device, dtype=dtype)
    except RuntimeError as error:
        raise ParameterError(
            f"model {shown} cannot be moved to {device}: {model_directory.first_line(error)}; take another --device"
        ) from None
    decoder.name = shown
    return LoadedModel(shown, decoder, decoder.tokenizer, decoder.checksum)


def models(named: Mapping[str, str], device: str = "cpu", dtype: str = "float32") -> dict[str, LoadedModel]:
    """Load all models of a decoding, by role, and refuse incompatible ones. Draft heads are a file: see `draft_heads_path`."""
    found: dict[str, LoadedModel] = {}
    for role, where in named.items():
        if role != "target" and (path := draft_heads_path(where)) is not None:
            found[role] = draft_heads(found["target"], path)
            continue
        same = next((other for other, each in named.items() if each == where and other in found), None)
        found[role] = found[same] if same is not None else model(where, device, dtype)
    check(found)
    return found


def draft_heads_path(where: str) -> Path | None:
    """Return the file of draft heads that a name stands for: a file, or a bundled one such as `family:eagle`; None for models.

    >>> draft_heads_path("mine/eagle.safetensors").name, draft_heads_path("family:eagle").name, draft_heads_path("family:draft")
    ('eagle.safetensors', 'eagle.safetensors', None)
    """
    of_family, _, kind = where.partition(":")
    if of_family == FAMILY and kind in draft_head_training.KINDS:
        return model_directory.bundled("target") / draft_head_training.file_name(kind)
    return Path(where) if where.endswith(".safetensors") else None


def draft_heads(target: LoadedModel, path: Path) -> LoadedModel:
    """Load the draft heads of a file in the place of a draft model, if they are the target's."""
    decoder = draft_head_training.load(path, target.decoder)
    decoder.name, decoder.checksum = f"{path.name} of {target.name}", model_directory.sha256_of([path])
    return LoadedModel(decoder.name, decoder, target.tokenizer, decoder.checksum)


def check(models: Mapping[str, LoadedModel]) -> None:
    """Refuse models with different vocabularies or tokenizers, and mixtures of models with and without an encoder."""
    target = models["target"]
    for role, other in models.items():
        if other.decoder.vocabulary != target.decoder.vocabulary:
            sizes = f"{target.name} has {target.decoder.vocabulary} tokens and the {role} {other.name} {other.decoder.vocabulary}"
            raise ParameterError(f"models must have the same vocabulary, and {sizes}; use a draft with the same tokenizer")
        ours, theirs = target.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        if ours != theirs:
            token = min((key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)), key=lambda key: (len(key), key))
            both = f"{checks.shown(token)} is {_number(ours, token)} to {target.name} and {_number(theirs, token)} to the {role}"
            remedy = "use a draft with the same tokenizer"
            raise ParameterError(f"models must have the same tokenizer, and {both} {other.name}; {remedy}")
        if other.has_encoder != target.has_encoder:
            kinds = [f"{each.name} has {'an' if each.has_encoder else 'no'} encoder" for each in (target, other)]
            raise ParameterError(f"models must be of the same kind, and {kinds[0]} and {kinds[1]}; use a draft of the same kind")


def _number(vocabulary: Mapping[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "unknown"


def heads_path(where: str) -> Path:
    """Return the path of a model's trained heads, which need not exist."""
    of_family, _, name = where.partition(":")
    folder = model_directory.bundled(name or "target") if of_family == FAMILY else model_directory.locate_model(where)
    return folder / model_directory.HEADS


def use_heads(found: LoadedModel, path: Path) -> tuple[int, ...]:
    """Attach the trained heads of a file to the decoder, and return their layers."""
    decoder = found.decoder
    hidden = int(decoder.head.weight.shape[1])
    sizes = {"layers": decoder.layers, "hidden": hidden, "vocabulary": decoder.vocabulary}
    heads = family_heads.load(path, checksum=found.checksum, **sizes)
    decoder.heads = {layer: head.to(decoder.device, decoder.dtype) for layer, head in heads.items()}
    return tuple(heads)


NO_HEADS = "none"


def use_heads_of(found: LoadedModel, where: str, heads: str | None) -> str:
    """Attach the given heads, none, or by default those in the model's folder; return their description for result rows."""
    path = heads_path(where) if heads is None else Path(heads)
    if heads == NO_HEADS or (heads is None and not path.is_file()):
        return "common"
    use_heads(found, path)
    return f"trained: {path.name}"


class TokenizedPrompt(NamedTuple):
    """Initial tokens of a decoding."""

    prompt: tuple[int, ...]
    """First tokens of the decoder."""
    source: tuple[int, ...]
    """Tokens of the encoder, if the model has one."""


def tokenize(target: LoadedModel, text: str, name: str = "prompt", *, chat: bool = False) -> TokenizedPrompt:
    """Tokenize a prompt.

    With an encoder, the encoder reads the text and the decoder begins with its start token, as does a decoder with an empty
    prompt. `chat` inserts the text as the user's message in the model's chat template.
    """
    with model_directory.quiet():  # prompts that are too long are refused as an error later, not by the library's warning
        ids = _chat(target, text) if chat else target.tokenizer(text)["input_ids"]
    found = tuple(int(token) for token in ids)
    start = target.decoder.start
    if found and not target.has_encoder:
        return TokenizedPrompt(found, ())
    if start is None:
        said = "is empty" if not found else "cannot be decoded"
        remedy = "give a text" if not found else "take another model"
        raise ParameterError(f"{name} {said}, and model {target.name} has no start token; {remedy}")
    if target.has_encoder and not found:
        raise ParameterError(f"{name} is empty, and the encoder of model {target.name} has nothing to read; give a text")
    return TokenizedPrompt((start,), found)


def _chat(target: LoadedModel, text: str) -> list[int]:
    """Tokens of a user's message and of the start of the answer, by the model's chat template."""
    if target.tokenizer.chat_template is None:
        raise ParameterError(f"template chat needs a chat template, and model {target.name} has none; leave it out")
    said = [{"role": "user", "content": text}]
    try:
        found: list[int] = target.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # the template is code of the model, and can raise anything
        raise ParameterError(f"the chat template of model {target.name} fails: {error}; leave template chat out") from None
    return found


def read_source(models: Mapping[str, LoadedModel], source: tuple[int, ...]) -> None:
    """Run the encoders, of models that have one."""
    for each in {id(each): each for each in models.values()}.values():
        decoder: Any = each.decoder
        if each.has_encoder:
            decoder.read_source(source)


def pieces(tokenizer: Any, prompt: Sequence[int], written: Sequence[int]) -> list[str]:
    """Return the text that each token adds, without special tokens.

    If several tokens form a character, the last one adds it.
    """
    before = [*prompt[-CONTEXT:]]
    shown = _decoded(tokenizer, before)
    found = []
    for count in range(1, len(written) + 1):
        text = _decoded(tokenizer, [*before, *written[:count]])
        if text.endswith("\ufffd") and count < len(written):
            found.append("")
            continue
        found.append(text[len(shown) :])
        shown = text
    return found


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode([*tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
