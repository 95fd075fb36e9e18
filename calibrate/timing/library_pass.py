"""Passes as the library's own code makes them, on caches of known length: what is timed.

Models have random weights, or they are those that decode. Random weights are right for times and wrong for everything else:
nothing here says what a model would write.
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
"""Called with a part's name, its place, and 0 where it begins, 1 where it ends."""
DTYPES = ("bfloat16", "float16", "float32")
CHUNK = 512
"""Positions that a cache is filled with at once."""


class LibraryModel:
    """A model on a device, with its parts by name.

    Parameters
    ----------
    architecture, device, dtype
        What is built, on which device of torch, with what kind of weights.
    source
        Positions of the encoder that a decoder of an encoder-decoder attends to.
    decoder
        One that is there already, so that what is timed is what decodes; left out, one is built with random weights.
    """

    def __init__(
        self, architecture: Architecture, device: str, dtype: str, source: int = 512, decoder: Decoder | None = None
    ) -> None:
        import torch

        checks.one_of("dtype", dtype, DTYPES)
        self.architecture, self.device, self.source = architecture, device, source
        self.unequal = False
        """Whether sequences of a batch stand at unequal positions in passes over one token of each too (`InterpretedPass`)."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        if decoder is None:
            decoder = self._built()
        self.full, self.decoder = decoder.full, decoder
        if self.decoder.layers != architecture.shape.layers:
            raise RuntimeError(f"{architecture.name} has {self.decoder.layers} layers, {architecture.shape.layers} expected")

    def _built(self) -> Decoder:
        """A decoder of random weights, where they fit the device."""
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        architecture, device = self.architecture, self.device
        kind: Any = AutoModelForSeq2SeqLM if architecture.crossing else AutoModelForCausalLM
        build = {"dtype": self.dtype, "attn_implementation": "sdpa"}
        there = machine.free(device)
        size = architecture.shape.parameters * self.dtype.itemsize  # before anything is built, also without memory
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
        """Let the encoder read a text of `source` random tokens, unless it has read one; nothing of decoders alone."""
        decoder: Any = self.decoder
        if self.architecture.crossing and decoder.source is None:
            decoder.read_source(tuple(int(token) for token in self.tokens(1, self.source)[0].tolist()))

    def tokens(self, batch: int, width: int) -> Tensor:
        """Random tokens of the whole vocabulary, shape (batch, width): an embedding is not read from a warm corner."""
        import torch

        return torch.randint(0, self.architecture.shape.vocabulary, (batch, width), device=self.device)

    def hidden(self, tokens: Tensor, cache: Any, **more: Tensor) -> Tensor:
        """The last hidden state after the final norm, shape (batch, width, hidden); `more` as the library's code takes it."""
        result: Tensor = self.decoder.body(input_ids=tokens, past_key_values=cache, use_cache=True, **more).last_hidden_state
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
        decoder = self.decoder
        parts = {("embedding", 0): decoder.embedding, ("norm", 0): decoder.norm, ("head", 0): decoder.head}
        parts |= {("layer", index): layer for index, layer in enumerate(decoder.modules)}
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

    def __init__(self, model: LibraryModel, width: int, context: int, batch: int) -> None:
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
        lengths = {int(self.cache.get_seq_length(index)) for index in range(self.model.decoder.layers)}
        if len(lengths) != 1:
            raise RuntimeError(f"layers hold unequal lengths, {sorted(lengths)}")
        return lengths.pop()

    def check(self) -> None:
        """Refuse to go on with a cache of another length than was asked for."""
        if self.length() != self.context:
            raise RuntimeError(f"the cache should hold {self.context} positions, it holds {self.length()}")

    def logits(self) -> Tensor:
        """The whole pass, as the model's own code does it."""
        return self.model.decoder.head(self.model.hidden(self.tokens, self.cache, **self.more))  # type: ignore[no-any-return]


class EagerPass(Pass):
    """Kernels launched one by one, on a cache that grows by each pass and is cut back."""

    def new_cache(self) -> Any:
        """A cache that grows; one of a sliding window keeps what cutting back needs."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        cache: Any = DynamicCache(config=self.model.decoder.body.config)
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

        cache: Any = StaticCache(config=self.model.decoder.body.config, max_cache_len=self.context + self.width)
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
