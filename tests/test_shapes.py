"""Shapes of decoders: the papers' counts, arithmetic matrix by matrix, and errors."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import published
from model.checks import ParameterError
from model.shapes import SHAPES, Shape, shape

TINY = Shape(3, 8, 4, 2, 2, 12, 3, 100)


def test_sizes_of_big_and_little_decoders() -> None:
    """Table 2 of the paper, and Section 1.9 of what is known of it: 402.7M and 25.2M."""
    for row in published.table("bild-table-2").rows:
        made = shape(row["model"])
        assert (made.layers, made.dim, made.ffn_dim) == (row["layers"], row["dim"], row["ffn_dim"])
        assert abs(made.layers * made.layer_weights / 1e6 - row["parameters_m"]) < 1
    whole = {name: shape(name).layers * shape(name).layer_weights / 1e6 for name in ("t5-large", "t5-small")}
    assert {name: round(value, 1) for name, value in whole.items()} == {"t5-large": 402.7, "t5-small": 25.2}
    # With their heads mT5's two are 1:4.3, not 1:20.
    large, small = (made.layers * made.layer_weights + made.head_weights for made in map(shape, ("mt5-large", "mt5-small")))
    assert round(large / small, 1) == 4.3


def test_layers_of_opt_are_those_of_skipdecode() -> None:
    for row in published.table("skipdecode-table-2").rows:
        assert shape(row["model"]).layers == row["layers"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama-2-13b", 0.517), ("llama-3-8b", 2.41), ("t5-large", 1.96), ("opt-1.3b", 2.05), ("gpt2", 5.45), ("mt5-small", 40.7)],
)
def test_heads_in_layers(name: str, layers: float) -> None:
    assert shape(name).head_layers == pytest.approx(layers, rel=3e-3)


@pytest.mark.parametrize(("name", "billions"), [("llama-2-13b", 13.0), ("opt-1.3b", 1.3), ("opt-6.7b", 6.7), ("llama-3-8b", 8.0)])
def test_names_say_the_size(name: str, billions: float) -> None:
    """Layers, the embedding, and the head where it is not the embedding."""
    made = shape(name)
    tied = name.startswith("opt")
    total = made.layers * made.layer_weights + (1 if tied else 2) * made.head_weights
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


CHECKPOINTS = {
    "t5-small": 60_506_624, "t5-large": 737_668_096, "mt5-small": 300_176_768, "mt5-large": 1_229_581_312,
    "opt-1.3b": 1_315_758_080, "opt-6.7b": 6_658_473_984, "llama-2-13b": 13_015_864_320, "vicuna-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248, "gpt2": 124_439_808,
}  # fmt: skip
"""Parameters of the checkpoints that were released."""


def with_what_is_left_out(name: str) -> int:
    """A shape's weights, and norms, biases, positions and encoder besides: all parameters of the checkpoint."""
    made = shape(name)
    tied = name.startswith(("t5", "opt", "gpt2"))
    weights = made.layers * made.layer_weights + (1 if tied else 2) * made.head_weights
    if made.cross:  # T5: norms of a factor alone, no biases, one table of 32 buckets for each stack
        encoder = made.layers * (made.layer_weights - 4 * made.dim * made.heads * made.head_dim)
        norms = (3 * made.layers + 1) * made.dim + (2 * made.layers + 1) * made.dim
        return weights + encoder + norms + 2 * 32 * made.heads
    if name.startswith(("opt", "gpt2")):  # norms of two vectors, a bias for each output, learnt positions
        biases = 4 * made.dim + made.ffn_dim + made.dim
        positions = 1024 if name == "gpt2" else 2048 + 2
        return weights + made.layers * (biases + 4 * made.dim) + 2 * made.dim + positions * made.dim
    return weights + (2 * made.layers + 1) * made.dim


def test_parameters_of_checkpoints_to_the_last_one() -> None:
    assert {name: with_what_is_left_out(name) for name in SHAPES} == CHECKPOINTS


@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 3))
def test_arithmetic_matrix_by_matrix(width: int, context: int, layers: int) -> None:
    """A product of (m, k) and (k, n) takes 2 m k n operations."""

    def product(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    each = product(width, 8, 8) + 2 * product(width, 8, 4) + product(width, 8, 8) + 3 * product(width, 8, 12)
    for position in range(width):
        seen = context + position + 1
        each += 4 * (product(1, 2, seen) + product(1, seen, 2))  # scores and their sum, of four heads
    assert TINY.operations(width, context, layers) == layers * each
    assert TINY.operations(width, context, layers, heads=width) == layers * each + product(width, 8, 100)
    assert TINY.operations(width, context) == 3 * each
    crossing = replace(TINY, cross=True)
    assert crossing.operations(width, context, layers) == layers * (each + 4 * product(width, 8, 8))


def test_a_wide_pass_is_as_many_narrow_ones() -> None:
    assert TINY.operations(5, 2, heads=5) == sum(TINY.operations(1, 2 + position, heads=1) for position in range(5))


def test_cache_rows() -> None:
    """Keys and values are of two heads of two here; 0.41 MB for 20 layers of 13B in two bytes each."""
    assert TINY.cache_bytes() == 3 * 2 * 2 * 2 * 2
    assert TINY.cache_bytes(1, bytes_each=1) == 8
    assert TINY.cache_bytes(0) == 0
    assert round(shape("llama-2-13b").cache_bytes(20) / 1e6, 2) == 0.41


def test_weights_are_the_products_of_a_pass() -> None:
    for made in SHAPES.values():
        bare = made.operations(1, 0) - 4 * made.layers * made.heads * made.head_dim
        assert bare == 2 * made.layers * made.layer_weights


# What the library that runs these models calls them; nothing where its own defaults are the model.
LIBRARY: dict[str, tuple[str, str, dict[str, int]]] = {
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {}),
    "t5-large": (
        "T5Config", "T5ForConditionalGeneration", {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16}
    ),
    "mt5-small": ("MT5Config", "MT5ForConditionalGeneration", {}),
    "mt5-large": (
        "MT5Config", "MT5ForConditionalGeneration", {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 24, "num_heads": 16}
    ),
    "opt-1.3b": (
        "OPTConfig", "OPTForCausalLM",
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "word_embed_proj_dim": 2048},
    ),
    "opt-6.7b": (
        "OPTConfig", "OPTForCausalLM",
        {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32, "word_embed_proj_dim": 4096},
    ),
    "llama-2-13b": (
        "LlamaConfig", "LlamaForCausalLM",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    ),
    "llama-3-8b": (
        "LlamaConfig", "LlamaForCausalLM",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
}  # fmt: skip
LIBRARY["vicuna-13b"] = LIBRARY["llama-2-13b"]  # fine-tuned from it
# Where a model keeps its decoder's layers.
LAYERS_OF = {
    "T5": "decoder.block", "MT5": "decoder.block", "OPT": "model.decoder.layers", "Llama": "model.layers", "GPT2": "transformer.h"
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_that_the_library_makes(name: str) -> None:
    """Built from its sizes alone, on a device that holds no numbers: nothing is downloaded."""
    torch = pytest.importorskip("torch", reason="the library's own models need torch")
    transformers = pytest.importorskip("transformers", reason="the library's own models need transformers")
    config, model, sizes = LIBRARY[name]
    with torch.device("meta"):
        built = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    made = shape(name)
    layers = built.get_submodule(LAYERS_OF[config.removesuffix("Config")])
    assert len(layers) == made.layers
    for layer in layers:
        # A table of relative positions is a matrix too, but looked up, not multiplied.
        matrices = {key: weight.numel() for key, weight in layer.named_parameters() if weight.dim() == 2 and "relative" not in key}
        assert sum(matrices.values()) == made.layer_weights, matrices
        rest = sum(weight.numel() for weight in layer.parameters()) - made.layer_weights
        assert 0 < rest < 0.01 * made.layer_weights
    assert built.get_output_embeddings().weight.numel() == made.head_weights


BAD: list[tuple[Callable[[], object], str]] = [
    *[(lambda name=name: replace(TINY, **{name: 0}), f"{name} must be at least 1, got 0")  # type: ignore[misc]
      for name in ("layers", "dim", "heads", "head_dim", "kv_heads", "ffn_dim", "vocabulary")],
    (lambda: replace(TINY, ffn_matrices=1), "ffn_matrices must be between 2 and 3, got 1"),
    (lambda: replace(TINY, ffn_matrices=4), "ffn_matrices must be between 2 and 3, got 4"),
    (lambda: replace(TINY, kv_heads=3), "kv_heads must divide heads=4, got 3"),
    (lambda: replace(TINY, cross=1), "cross must be true or false, got 1"),  # type: ignore[arg-type]
    (lambda: shape("t5-larg"), "unknown shape 't5-larg'; did you mean t5-large"),
    (lambda: TINY.cache_bytes(4), "layers must be between 0 and 3, got 4"),
    (lambda: TINY.cache_bytes(-1), "layers must be between 0 and 3, got -1"),
    (lambda: TINY.cache_bytes(bytes_each=0), "bytes_each must be at least 1, got 0"),
    (lambda: TINY.operations(0, 0), "width must be at least 1, got 0"),
    (lambda: TINY.operations(1, -1), "context must be at least 0, got -1"),
    (lambda: TINY.operations(2, 0, heads=3), "heads must be between 0 and width=2, got 3"),
    (lambda: TINY.operations(2, 0, heads=-1), "heads must be between 0 and width=2, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
