"""The vocabulary of the family: byte pairs learnt from the training corpus, with one tokenizer for all models of a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibrate.family.corpus import Corpus
from model.base import checks

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = "<|end|>"
"""Ends a module, and a text that a model generates; token 0."""
SIZE = 1024
LEAST, MOST = 257, 65536
"""Smallest and largest vocabulary: all bytes and END, and more than small models can use."""


def train_tokenizer(corpus: Corpus, size: int = SIZE) -> Any:
    """Learn a tokenizer of the `tokenizers` library with `size` tokens; its alphabet is bytes, so that it encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    checks.whole("vocabulary", size, LEAST, MOST)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus.training.values(), trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Any, positions: int) -> Any:
    """Return the tokenizer for transformers, for a model of `positions` positions; decoding restores a text exactly."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=positions)


def encode(tokenizer: Any, texts: dict[str, str]) -> NDArray[Any]:
    """Return the tokens of all modules, each followed by END, shape (tokens,)."""
    import numpy as np

    end = tokenizer.token_to_id(END)
    found = tokenizer.encode_batch([*texts.values()], add_special_tokens=False)
    return np.concatenate([np.array([*each.ids, end], dtype=np.int64) for each in found])
