"""The one place that knows transformers: models of random weights, their parts, and passes on a cache of known length.

Random weights are right for times and wrong for everything else: nothing here says what a model would write.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model import checks, transformer
from model.checks import ParameterError

if TYPE_CHECKING:
    import torch

    from calibrate.decoder import Decoder

    Tensor = torch.Tensor

Mark = Callable[[str, int, int], None]
"""Called with a part's name, its place, and 0 where it begins, 1 where it ends."""
DTYPES = ("bfloat16", "float16", "float32")
MODES = ("eager", "cuda-graph", "interpreter")
"""Kernels launched one by one by the library's own code, or as one graph, or as our interpreter makes passes."""
CHUNK = 512
"""Positions that a cache is filled with at once."""

LLAMA = {"vicuna": "llama", "codellama": "llama", "pythia": "gpt_neox", "qwen2.5": "qwen2"}
"""Architectures of presets that are not called after theirs."""
GATED_T5 = {True: "gated-gelu", False: "relu"}


@dataclass(frozen=True, eq=False)
class Architecture:
    """What is built: the library's configuration, and the shape that we know it by."""

    name: str
    config: Any
    shape: transformer.Shape

    @property
    def crossing(self) -> bool:
        """Whether its decoder attends to an encoder."""
        return bool(self.config.is_encoder_decoder)

    @property
    def positions(self) -> int | None:
        """The most positions that it has, where it has learned them."""
        if self.config.model_type not in ("opt", "gpt2"):
            return None
        return int(self.config.max_position_embeddings)

    def longest(self, width: int, context: int) -> None:
        """Refuse a pass beyond the positions that it has learned: on a GPU it would end the process, not only the pass."""
        if self.positions is not None and width + context > self.positions:
            bound = f"{self.name} has learned {self.positions} positions, and width + context"
            raise ParameterError(f"{bound} must be at most that, got {width} + {context}")


def architecture(model: str) -> Architecture:
    """A model by the name of a preset, of the family (`family:target`), the path of a `config.json`, or as OWNER/NAME on the hub.

    Only the last asks the network.
    """
    of_family, colon, role = model.partition(":")
    if colon and of_family == "family":
        from calibrate.family import store

        return _from_file(store.bundled(role) / "config.json", f"family-{role}")
    if model in transformer.PRESETS:
        shape = transformer.preset(model)
        return Architecture(model, _library_config(model, shape), shape)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.exists():
        return _from_file(path, path.parent.name if path.name == "config.json" else path.stem)
    if model.count("/") == 1 and all(model.split("/")):
        return _from_file(_from_hub(model), model.split("/")[1].lower())
    raise ParameterError(f"{checks.unknown('model', model, transformer.PRESETS)}; or a config.json, or OWNER/NAME of the hub")


def _from_file(path: Path, name: str) -> Architecture:
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ParameterError(f"model must be a preset, a config.json or OWNER/NAME, and there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(said, dict):
        raise ParameterError(f"{path.name} must be a table of keys, such as model_type, got {checks.shown(said)}")
    try:
        # The type is asked for apart: what a file says of it is the type that a checkpoint was saved in.
        shape = transformer.from_config(said, dtype="bfloat16")
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config = CONFIG_MAPPING[said["model_type"]].from_dict(said)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParameterError(f"{path.name}: transformers does not take it: {str(error).splitlines()[0]}") from None
    return Architecture(name, config, shape)


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # whatever a network can do
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ParameterError(f"model {model} could not be had from the hub: {said}; give its config.json instead") from None


def _library_config(name: str, shape: transformer.Shape) -> Any:
    """The library's configuration of a preset, from our shape of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = name.split("-")[0]
    family = LLAMA.get(family, family)
    common = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied_head}
    usual = {
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "max_position_embeddings": 8192,
    }  # fmt: skip
    grouped = usual | {"num_key_value_heads": shape.kv_heads}
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "llama": lambda: grouped | {"head_dim": shape.head_dim},
        "mistral": lambda: grouped | {"head_dim": shape.head_dim, "sliding_window": None},
        "qwen2": lambda: grouped,
        "phi": lambda: grouped,
        "gpt_neox": lambda: usual,
        "opt": lambda: {
            "hidden_size": shape.hidden, "ffn_dim": shape.ffn, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "max_position_embeddings": shape.positions - 2, "word_embed_proj_dim": shape.hidden,
        },
        "gpt2": lambda: {
            "n_embd": shape.hidden, "n_inner": shape.ffn, "n_layer": shape.layers, "n_head": shape.heads,
            "n_positions": shape.positions,
        },
        "t5": lambda: _t5(shape),
        "mt5": lambda: _t5(shape),
    }  # fmt: skip
    if family not in known:
        raise ParameterError(f"{checks.unknown('architecture of preset', name, known)}; give the model's config.json instead")
    library: Any = CONFIG_MAPPING[family]
    return library(**common, **known[family]())


def _t5(shape: transformer.Shape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden, "d_ff": shape.ffn, "d_kv": shape.head_dim, "num_heads": shape.heads,
        "num_layers": shape.encoder_layers, "num_decoder_layers": shape.layers, "feed_forward_proj": GATED_T5[shape.gated],
    }  # fmt: skip


class Model:
    """A model of random weights on a device, with its parts by name.

    Parameters
    ----------
    architecture, device, dtype
        What is built, on which device of torch, with what kind of weights.
    source
        Positions of the encoder that a decoder of an encoder-decoder attends to.
    """

    def __init__(self, architecture: Architecture, device: str, dtype: str, source: int = 512) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        checks.one_of("dtype", dtype, DTYPES)
        self.architecture, self.device, self.source = architecture, device, source
        self.dtype: torch.dtype = getattr(torch, dtype)
        kind: Any = AutoModelForSeq2SeqLM if architecture.crossing else AutoModelForCausalLM
        build = {"dtype": self.dtype, "attn_implementation": "sdpa"}
        with torch.device("meta"):
            self.bytes = sum(each.numel() for each in kind.from_config(architecture.config, **build).parameters())
        self.bytes *= self.dtype.itemsize
        there = _memory(device)
        if there is not None and self.bytes > there:
            needs = f"{architecture.name} in {dtype} needs {self.bytes / 1e9:.1f} GB for its weights"
            raise ParameterError(f"{needs}, and device {device} has {there / 1e9:.1f} GB; take a smaller model")
        with torch.device(device):
            self.full = kind.from_config(architecture.config, **build).eval()
        self.body = self.full.get_decoder()
        self.layers: list[Any] = list(_first(self.body, "layers", "h", "block"))
        self.norm = final_norm(self.body)
        self.embedding = self.body.get_input_embeddings()
        self.head = self.full.get_output_embeddings()
        if len(self.layers) != architecture.shape.layers:
            raise RuntimeError(f"{architecture.name} has {len(self.layers)} layers, {architecture.shape.layers} expected")

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The same model as the interpreter runs it."""
        from calibrate.decoder import decoder_of

        return decoder_of(self.full, self.architecture.name)

    def begin(self, width: int, context: int, batch: int, mode: str = "eager") -> Repeatable:
        """A pass of `width` tokens of `batch` texts behind `context` cached positions, ready to be run again and again."""
        self.architecture.longest(width, context)
        if mode == "interpreter":
            from calibrate.interpreted import InterpretedPass

            return InterpretedPass(self, width, context, batch)
        return (GraphPass if mode == "cuda-graph" else EagerPass)(self, width, context, batch)

    def tokens(self, batch: int, width: int) -> Tensor:
        """Random tokens of the whole vocabulary, shape (batch, width): an embedding is not read from a warm corner."""
        import torch

        return torch.randint(0, self.architecture.shape.vocabulary, (batch, width), device=self.device)

    def hidden(self, tokens: Tensor, cache: Any, **more: Tensor) -> Tensor:
        """The last hidden state after the final norm, shape (batch, width, hidden); `more` as the library's code takes it."""
        result: Tensor = self.body(input_ids=tokens, past_key_values=cache, use_cache=True, **more).last_hidden_state
        return result

    def encoded(self, batch: int) -> dict[str, Tensor]:
        """What stands for the encoder's output, shape (batch, source, hidden); nothing for decoders alone."""
        import torch

        if not self.architecture.crossing:
            return {}
        states = torch.randn(batch, self.source, self.architecture.shape.hidden, device=self.device, dtype=self.dtype)
        return {"encoder_hidden_states": states}

    @property
    def parts(self) -> dict[tuple[str, int], Any]:
        """The modules of which a pass is made, by name and place."""
        parts = {("embedding", 0): self.embedding, ("norm", 0): self.norm, ("head", 0): self.head}
        parts |= {("layer", index): layer for index, layer in enumerate(self.layers)}
        return {key: module for key, module in parts.items() if module is not None}

    @contextlib.contextmanager
    def watched(self, mark: Mark) -> Iterator[None]:
        """Mark the beginning and the end of each part of the passes meanwhile.

        The hooks are gone afterwards: a pass that nobody watches pays nothing for them.
        """
        handles = []

        def watch(name: str, index: int, module: Any) -> None:
            handles.append(module.register_forward_pre_hook(lambda *_: mark(name, index, 0)))
            handles.append(module.register_forward_hook(lambda *_: mark(name, index, 1)))

        try:
            for (name, index), module in self.parts.items():
                watch(name, index, module)
            yield
        finally:
            for handle in handles:
                handle.remove()


class Repeatable(Protocol):
    """One pass: `run` does it, `back` cuts the cache back to where it was."""

    def run(self) -> None:
        """The pass: body, and the projection of every position of it."""

    def back(self) -> None:
        """Cut the cache back by the pass, and make sure that it was."""

    def run_watched(self, mark: Mark) -> None:
        """The same, with the beginning and the end of each part marked."""

    @property
    def parts(self) -> Iterable[tuple[str, int]]:
        """The parts that are marked, by name and place."""

    def check(self) -> None:
        """Refuse to go on with a cache of another length than was asked for."""


class Pass:
    """A pass as the library's code makes it: see `Repeatable`."""

    def __init__(self, model: Model, width: int, context: int, batch: int) -> None:
        import torch

        self.model, self.width, self.context, self.batch = model, width, context, batch
        with torch.inference_mode():
            self.encoded = model.encoded(batch)
            self.cache = self.new_cache()
            for start in range(0, context, CHUNK):
                model.hidden(model.tokens(batch, min(CHUNK, context - start)), self.cache, **self.encoded)
            self.tokens = model.tokens(batch, width)
            self.more = self.encoded | self.told()
        self.check()

    def new_cache(self) -> Any:
        """An empty cache."""
        raise NotImplementedError

    def told(self) -> dict[str, Tensor]:
        """What the model's code is told that it would find out by itself."""
        return {}

    def run(self) -> None:
        """The pass: body, and the projection of every position of it."""
        raise NotImplementedError

    def back(self) -> None:
        """Cut the cache back by the pass, and make sure that it was."""
        raise NotImplementedError

    def run_watched(self, mark: Mark) -> None:
        """The same, with the beginning and the end of each part marked."""
        raise NotImplementedError

    @property
    def parts(self) -> Iterable[tuple[str, int]]:
        """See `Repeatable`."""
        return self.model.parts

    def length(self) -> int:
        """Positions that every layer of the cache holds."""
        lengths = {int(self.cache.get_seq_length(index)) for index in range(len(self.model.layers))}
        if len(lengths) != 1:
            raise RuntimeError(f"layers hold unequal lengths, {sorted(lengths)}")
        return lengths.pop()

    def check(self) -> None:
        """Refuse to go on with a cache of another length than was asked for."""
        if self.length() != self.context:
            raise RuntimeError(f"the cache should hold {self.context} positions, it holds {self.length()}")

    def logits(self) -> Tensor:
        """The whole pass, as the model's own code does it."""
        return self.model.head(self.model.hidden(self.tokens, self.cache, **self.more))  # type: ignore[no-any-return]


class EagerPass(Pass):
    """Kernels launched one by one, on a cache that grows by each pass and is cut back."""

    def new_cache(self) -> Any:
        """A cache that grows; one of a sliding window keeps what cutting back needs."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        cache: Any = DynamicCache(config=self.model.body.config)
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return EncoderDecoderCache(cache, DynamicCache()) if self.model.architecture.crossing else cache

    def run(self) -> None:
        """See `Pass`."""
        self.logits()

    def run_watched(self, mark: Mark) -> None:
        """See `Pass`."""
        with self.model.watched(mark):
            self.logits()

    def back(self) -> None:
        """See `Pass`."""
        # The sign is the portable spelling: until 5.13 positive numbers were kept, since 5.23 they are refused.
        self.cache.crop(-self.width)
        self.check()


class GraphPass(Pass):
    """The pass as one graph, on a cache of exactly the positions that it needs: a longer one would take longer, masked or not.

    Hooks run while a graph is captured and not when it is replayed, so a watched pass is a graph of its own, captured with the
    marks in it: they must be events that a graph records (`external`).
    """

    plain: Any = None
    marked: Any = None

    def new_cache(self) -> Any:
        """A cache of fixed size."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

        cache: Any = StaticCache(config=self.model.body.config, max_cache_len=self.context + self.width)
        for layer in cache.layers:
            if layer.max_cache_len < self.context + self.width:  # its rows move on, and no length set back moves them back
                window = f"cuda-graph goes up to the sliding window of {layer.max_cache_len} positions"
                raise ParameterError(f"{window}, got {self.context} + {self.width}; take mode eager")
        return EncoderDecoderCache(cache, DynamicCache()) if self.model.architecture.crossing else cache

    def told(self) -> dict[str, Tensor]:
        """OPT counts its positions on the processor, in the middle of the pass; told them, it does not."""
        import torch

        if self.model.architecture.config.model_type != "opt":
            return {}
        end, device = self.context + self.width, self.model.device
        positions = torch.arange(self.context, end, device=device).expand(self.batch, -1)
        return {"position_ids": positions, "attention_mask": torch.ones(self.batch, end, device=device, dtype=torch.long)}

    def run(self) -> None:
        """Replay the pass."""
        if self.plain is None:
            self.plain = self.capture(contextlib.nullcontext())
        self.plain.replay()

    def run_watched(self, mark: Mark) -> None:
        """Replay the pass with marks; they are made in the same places each time, whatever is handed over later."""
        if self.marked is None:
            self.marked = self.capture(self.model.watched(mark))
        self.marked.replay()

    def capture(self, watching: contextlib.AbstractContextManager[None]) -> Any:
        """Record the pass as a graph, after it ran thrice on a stream of its own: capturing wants everything allocated."""
        import torch

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.logits()
                self.back()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with watching, torch.cuda.graph(graph):
            self.logits()
        self.back()  # capturing runs nothing, but it counts in Python
        return graph

    def back(self) -> None:
        """Set the lengths back in place: the graph holds their addresses."""
        layers = self.cache.self_attention_cache.layers if self.model.architecture.crossing else self.cache.layers
        for layer in layers:
            if layer.is_initialized:
                layer.cumulative_length.fill_(self.context)
                if hasattr(layer, "cumulative_length_int"):
                    layer.cumulative_length_int = self.context


def final_norm(body: Any) -> Any:
    """What a decoder's last state goes through before the head; None where it has none."""
    return _first(body, "norm", "ln_f", "final_layer_norm", "final_layernorm")


def _first(module: Any, *names: str) -> Any:
    """The first of these that a module has: architectures call the same part differently."""
    for name in names:
        if getattr(module, name, None) is not None:
            return getattr(module, name)
    if "norm" in names:  # some have none, and then no time goes into it
        return None
    raise RuntimeError(f"{type(module).__name__} has none of {', '.join(names)}")


def _memory(device: str) -> int | None:
    """Bytes that the device has in all, where it says so."""
    import os

    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def versions() -> Mapping[str, str]:
    """Of the libraries that run the passes."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
