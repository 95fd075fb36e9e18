"""Passes of the library's own code on caches of known length: what `calibrate layers` times.

Models have random weights unless a decoder is given. Random weights give the right times; the tokens they would generate mean
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from calibrate.decoders.transformers_adapter import Decoder, decoder_of
from calibrate.devices import machine
from calibrate.loading.architectures import Architecture
from model.base import checks
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

Mark = Callable[[str, int, int], None]
"""Callback with a part's name, its index, and 0 at its beginning or 1 at its end."""
DTYPES = ("bfloat16", "float16", "float32")
CHUNK = 512
"""Positions that are added to a cache in one pass."""


class LibraryModel:
    """A model on a device, with its parts by name.

    Parameters
    ----------
    architecture, device, dtype
        The model to build, its torch device, and the type of its weights.
    source
        Encoder positions that the decoder of an encoder-decoder attends to.
    decoder
        An existing decoder to time. Without one, a model with random weights is built.
    """

    def __init__(
        self, architecture: Architecture, device: str, dtype: str, source: int = 512, decoder: Decoder | None = None
    ) -> None:
        import torch

        checks.one_of("dtype", dtype, DTYPES)
        self.architecture, self.device, self.source = architecture, device, source
        self.unequal = False
        """Whether sequences of a batch are at unequal positions in passes over one token of each too (`InterpretedPass`)."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        if decoder is None:
            decoder = self._built()
        self.full, self.decoder = decoder.full, decoder
        if self.decoder.layers != architecture.shape.layers:
            raise RuntimeError(f"{architecture.name} has {self.decoder.layers} layers, {architecture.shape.layers} expected")

    def _built(self) -> Decoder:
        """Return a decoder with random weights.

        Raises
        ------
        ParameterError
            If the weights do not fit the free memory of the device.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        architecture, device = self.architecture, self.device
        kind: Any = AutoModelForSeq2SeqLM if architecture.crossing else AutoModelForCausalLM
        build = {"dtype": self.dtype, "attn_implementation": "sdpa"}
        there = machine.free(device)
        size = architecture.shape.parameters * self.dtype.itemsize  # estimated before anything is built
        if not there or size <= there:
            with torch.device("meta"):
                empty = kind.from_config(architecture.config, **build)
            size = sum(each.numel() for each in empty.parameters()) * self.dtype.itemsize
        if there and size > there:
            dtype = str(self.dtype).removeprefix("torch.")
            needs = f"{architecture.name} in {dtype} needs {size / 1e9:.1f} GB for its weights"
            raise ParameterError(f"{needs}, and device {device} has {there / 1e9:.1f} GB left; take a smaller model")
        with torch.device(device):
            return decoder_of(kind.from_config(architecture.config, **build).eval(), architecture.name)

    def read_source(self) -> None:
        """Run the encoder on `source` random tokens, unless it has read a source; do nothing for decoder-only models."""
        decoder: Any = self.decoder
        if self.architecture.crossing and decoder.source is None:
            decoder.read_source(tuple(int(token) for token in self.tokens(1, self.source)[0].tolist()))

    def tokens(self, batch: int, width: int) -> Tensor:
        """Return random tokens of the whole vocabulary, shape (batch, width): embeddings shall not all come from the cache."""
        import torch

        return torch.randint(0, self.architecture.shape.vocabulary, (batch, width), device=self.device)

    def hidden(self, tokens: Tensor, cache: Any, **more: Tensor) -> Tensor:
        """Return the last hidden state after the final norm, shape (batch, width, hidden); `more` goes to the library's code."""
        result: Tensor = self.decoder.body(input_ids=tokens, past_key_values=cache, use_cache=True, **more).last_hidden_state
        return result

    def encoded(self, batch: int) -> dict[str, Tensor]:
        """Return a random encoder output, shape (batch, source, hidden); nothing for decoder-only models."""
        import torch

        if not self.architecture.crossing:
            return {}
        states = torch.randn(batch, self.source, self.architecture.shape.hidden, device=self.device, dtype=self.dtype)
        return {"encoder_hidden_states": states}

    @property
    def parts(self) -> dict[tuple[str, int], Any]:
        """Modules of a pass, by name and index."""
        decoder = self.decoder
        parts = {("embedding", 0): decoder.embedding, ("norm", 0): decoder.norm, ("head", 0): decoder.head}
        parts |= {("layer", index): layer for index, layer in enumerate(decoder.modules)}
        return {key: module for key, module in parts.items() if module is not None}

    @contextlib.contextmanager
    def marked_parts(self, mark: Mark) -> Iterator[None]:
        """Mark the beginning and the end of each part of the passes within the block.

        The hooks are removed afterwards: unmarked passes pay nothing for them.
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
    """One pass that can be run again: `run` does it, `roll_back` restores the cache."""

    def run(self) -> None:
        """Run the pass: the body, and the projection of all its positions."""

    def roll_back(self) -> None:
        """Remove the pass from the cache, and check the cache's length."""

    def run_marked(self, mark: Mark) -> None:
        """Run the pass with the beginning and the end of each part marked."""

    @property
    def parts(self) -> Iterable[tuple[str, int]]:
        """Parts that are marked, by name and index."""

    def check(self) -> None:
        """Raise `RuntimeError` if the cache has another length than requested."""


class Pass:
    """A pass of the library's code: see `Repeatable`."""

    def __init__(self, model: LibraryModel, width: int, context: int, batch: int) -> None:
        import torch

        self.model, self.width, self.context, self.batch = model, width, context, batch
        with torch.inference_mode():
            self.encoded = model.encoded(batch)
            self.cache = self.new_cache()
            for start in range(0, context, CHUNK):
                model.hidden(model.tokens(batch, min(CHUNK, context - start)), self.cache, **self.encoded)
            self.tokens = model.tokens(batch, width)
            self.more = self.encoded | self.arguments()
        self.check()

    def new_cache(self) -> Any:
        """Return an empty cache."""
        raise NotImplementedError

    def arguments(self) -> dict[str, Tensor]:
        """Return arguments that the model's code would otherwise compute during the pass."""
        return {}

    def run(self) -> None:
        """Run the pass: the body, and the projection of all its positions."""
        raise NotImplementedError

    def roll_back(self) -> None:
        """Remove the pass from the cache, and check the cache's length."""
        raise NotImplementedError

    def run_marked(self, mark: Mark) -> None:
        """Run the pass with the beginning and the end of each part marked."""
        raise NotImplementedError

    @property
    def parts(self) -> Iterable[tuple[str, int]]:
        """See `Repeatable`."""
        return self.model.parts

    def length(self) -> int:
        """Return the number of positions in every layer of the cache."""
        lengths = {int(self.cache.get_seq_length(index)) for index in range(self.model.decoder.layers)}
        if len(lengths) != 1:
            raise RuntimeError(f"layers hold unequal lengths, {sorted(lengths)}")
        return lengths.pop()

    def check(self) -> None:
        """Raise `RuntimeError` if the cache has another length than requested."""
        if self.length() != self.context:
            raise RuntimeError(f"the cache should hold {self.context} positions, it holds {self.length()}")

    def logits(self) -> Tensor:
        """Run the whole pass by the model's own code; return the logits of all its positions."""
        return self.model.decoder.head(self.model.hidden(self.tokens, self.cache, **self.more))  # type: ignore[no-any-return]


class EagerPass(Pass):
    """Kernels launched one by one, on a cache that grows with each pass and is cropped afterwards."""

    def new_cache(self) -> Any:
        """Return a growing cache; with a sliding window it records the rows that cropping restores."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        cache: Any = DynamicCache(config=self.model.decoder.body.config)
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return EncoderDecoderCache(cache, DynamicCache()) if self.model.architecture.crossing else cache

    def run(self) -> None:
        """See `Pass`."""
        self.logits()

    def run_marked(self, mark: Mark) -> None:
        """See `Pass`."""
        with self.model.marked_parts(mark):
            self.logits()

    def roll_back(self) -> None:
        """See `Pass`."""
        # Negative: until 5.13 a positive number was the length to keep, since 5.23 it is refused.
        self.cache.crop(-self.width)
        self.check()


class GraphPass(Pass):
    """The pass as one CUDA graph, on a cache of exactly the positions that it needs: a longer cache takes longer, masked or not.

    Hooks run while a graph is captured and not when it is replayed. A marked pass is therefore a separate graph, captured with the
    marks in it; their events must be ones that a graph records (`external`).
    """

    plain: Any = None
    marked: Any = None

    def new_cache(self) -> Any:
        """Return a cache of fixed size."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

        cache: Any = StaticCache(config=self.model.decoder.body.config, max_cache_len=self.context + self.width)
        for layer in cache.layers:
            if layer.max_cache_len < self.context + self.width:  # a window's rows shift, which resetting the length cannot undo
                window = f"cuda-graph supports at most the sliding window of {layer.max_cache_len} positions"
                raise ParameterError(f"{window}, got {self.context} + {self.width}; take mode eager")
        return EncoderDecoderCache(cache, DynamicCache()) if self.model.architecture.crossing else cache

    def arguments(self) -> dict[str, Tensor]:
        """Return positions and mask for OPT, which otherwise computes them on the CPU in the middle of the pass."""
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

    def run_marked(self, mark: Mark) -> None:
        """Replay the pass with marks; later calls keep the `mark` of the first one."""
        if self.marked is None:
            self.marked = self.capture(self.model.marked_parts(mark))
        self.marked.replay()

    def capture(self, watching: contextlib.AbstractContextManager[None]) -> Any:
        """Record the pass as a graph, after three runs on a separate stream: capturing needs all memory allocated."""
        import torch

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.logits()
                self.roll_back()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with watching, torch.cuda.graph(graph):
            self.logits()
        self.roll_back()  # capturing runs no kernel, but Python's length counts advance
        return graph

    def roll_back(self) -> None:
        """Reset the lengths in place: the graph holds their addresses."""
        layers = self.cache.self_attention_cache.layers if self.model.architecture.crossing else self.cache.layers
        for layer in layers:
            if layer.is_initialized:
                layer.cumulative_length.fill_(self.context)
                if hasattr(layer, "cumulative_length_int"):
                    layer.cumulative_length_int = self.context
