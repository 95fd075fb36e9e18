"""A repeatable pass as decoding makes it, for timing: on this project's cache rows, with all work of the interpreter around it.

A profile of such passes gives the times of `calibrate decode` and `calibrate run`: bookkeeping and masks are in `step`. Other work
of decoding has separate times: `calibrate.timing.read_times`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from calibrate.interpreters.in_one_process import ProcessState, Real
from calibrate.untested_on_gpu.cuda_graphs import Graphs
from model.base.checks import ParameterError
from model.interpret.interpreter import Task
from model.steps import Batch, Commit, Forward, LayerSpan, Read, Steps

if TYPE_CHECKING:
    from calibrate.timing.library_pass import LibraryModel

CHUNK = 512
"""Cache rows that are filled in one pass, of all sequences together."""


class InterpretedPass:
    """One repeatable pass as a decoder's steps: run the pass, read its next token, commit it.

    A GPU begins with the head while the layers are still at work, so the read is part of the pass. Sequences of a batch are at
    unequal positions if the pass verifies their drafts (`width` above 1) or generates them (`model.unequal`).
    """

    def __init__(self, model: LibraryModel, width: int, context: int, batch: int) -> None:
        if batch > 1 and model.architecture.crossing:
            raise ParameterError(f"batch must be 1 with an encoder-decoder such as {model.architecture.name}, got {batch}")
        self.model, self.width, self.context, self.batch = model, width, context, batch
        model.read_source()
        self.real = Real({"target": model.decoder})
        self.real.wanted = 1  # runs until a token is committed
        self.sequences = tuple(range(batch)) if batch > 1 else ()
        self._input_tokens = self._tokens(width * batch)
        self.unequal = batch > 1 and context > 0 and (width > 1 or model.unequal)
        self.task = Task(self._steps())
        self.task.cache = self._filled()
        for _ in range(2):
            self.run()
        self.check()

    def _filled(self) -> ProcessState:
        held, decoder = self.real.new_cache(), self.model.decoder
        chunk = max(CHUNK // self.batch, 1)
        for start in range(0, self.context, chunk):
            tokens = self._tokens(min(chunk, self.context - start) * self.batch)
            step = Forward("target", tokens, start, LayerSpan(0, decoder.layers))
            self.real.forward(held, step._replace(batch=self._batch(start, len(tokens) // self.batch)))
        return held

    def _batch(self, positions: int | tuple[int, ...], width: int, heads: int = 0) -> Batch | None:
        return Batch.uniform(self.sequences, positions, width, heads) if self.sequences else None

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in self.model.tokens(1, count)[0].tolist())

    def _steps(self) -> Steps:
        layers = self.model.decoder.layers
        step = Forward("target", self._input_tokens, self.context, LayerSpan(0, layers), heads=self.width * self.batch)
        for turn in itertools.count():
            # Every other pass is one position further: consecutive passes of a sequence are never at the same position.
            at = self.context + turn % 2
            positions = tuple([at - index % 2 * self.unequal for index in range(self.batch)])
            out = yield step._replace(at=min(positions), batch=self._batch(positions, self.width, self.width))
            yield Read("next", out, -1)
            yield Commit("token", (0,))

    def run(self) -> None:
        """Run the next pass; its position rolls the cache rows back."""
        self.real._drive(self.task)  # the scheduler
        self.real.work.tokens.clear()
        self.real.work.committed.clear()
        self.real.work.commits.clear()

    def roll_back(self) -> None:
        """Do nothing: `run` rolls back."""

    def run_marked(self, mark: Callable[[str, int, int], None]) -> None:
        """Run the pass with the beginning and the end of each part marked.

        A layer is marked around its call, so that the library's work around each layer is included.
        """
        if self.short_layers:
            self._run_short(mark)
        with marked_parts(self.real, mark):
            self.run()

    @property
    def replayed(self) -> bool:
        """Whether the pass is a CUDA graph, whose inside cannot be marked."""
        decoder = self.model.decoder
        return isinstance(decoder, Graphs) and decoder.replays(self.width)

    @property
    def short_layers(self) -> int:
        """Layers of a second, shorter pass from which the time of a graph's layers is derived; 0 without graphs."""
        return self.model.decoder.layers // 2 if self.replayed else 0

    def _run_short(self, mark: Callable[[str, int, int], None]) -> None:
        decoder: Any = self.model.decoder

        def layers_alone(name: str, _: int, edge: int) -> None:
            if name == "layer":
                mark("short", self.short_layers, edge)

        mark("aside", 0, 0)
        decoder.forget()  # tokens and position are copied to the device again, as for the whole pass; likewise afterwards
        with marked_parts(self.real, layers_alone):
            at = self.context + 1
            step = Forward("target", self._input_tokens, at, LayerSpan(0, self.short_layers), batch=self._batch(at, self.width))
            self.real.forward(self.task.cache, step)
        decoder.settle()
        decoder.forget()
        mark("aside", 0, 1)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Parts that are marked. `call` is the whole pass without its read; the layers of a graph are one stretch."""
        layers = [("layer", index) for index in range(1 if self.replayed else self.model.decoder.layers)]
        short = [("short", self.short_layers), ("aside", 0)] if self.short_layers else []
        return [("embedding", 0), *layers, ("head", 0), ("call", 0), *short]

    def check(self) -> None:
        """Raise `RuntimeError` if the layers have another number of rows than requested."""
        held: ProcessState = self.task.cache
        rows = held.rows_of("target", self.sequences)
        lengths = {layer.length for layer in rows.layers}
        end = self.context + self.width
        if lengths not in ({end}, {end + 1}):
            raise RuntimeError(f"layers should hold {end} positions or one more, they hold {sorted(lengths)}")


@contextlib.contextmanager
def marked_parts(real: Real, mark: Callable[[str, int, int], None]) -> Iterator[None]:
    """Mark the beginning and the end of each part of the target's passes within the block; the norm belongs to the head.

    A graph is marked around its replay, as if all its layers were the first; its embedding is within that stretch.
    """
    decoder = real.decoders["target"]
    whole: dict[str, Callable[..., Any]]
    whole = {"forward": real.forward, "_layer": decoder._layer, "_embedded": decoder._embedded, "logits": decoder.logits}

    def layer(index: int, *arguments: Any) -> Any:
        mark("layer", index, 0)
        made = whole["_layer"](index, *arguments)
        mark("layer", index, 1)
        return made

    def part(name: str, method: str) -> Callable[..., Any]:
        def inner(*arguments: Any) -> Any:
            mark(name, 0, 0)
            made = whole[method](*arguments)
            mark(name, 0, 1)
            return made

        return inner

    def replay(graph: Any) -> Any:
        for edge in (0, 1):
            mark("embedding", 0, edge)
        mark("layer", 0, 0)
        made = whole["_replay"](graph)
        mark("layer", 0, 1)
        return made

    own: dict[str, Callable[..., Any]]
    own = {"_layer": layer, "_embedded": part("embedding", "_embedded"), "logits": part("head", "logits")}
    if isinstance(decoder, Graphs):
        whole["_replay"], own["_replay"] = decoder._replay, replay
    vars(decoder).update(own)
    vars(real)["forward"] = part("call", "forward")
    try:
        yield
    finally:
        del vars(real)["forward"]
        for name in own:
            del vars(decoder)[name]
