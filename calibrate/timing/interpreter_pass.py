"""A pass as decoding makes it, repeatable, for timing: on rows of our own, with all that the interpreter does around it.

What a profile of these says is what `calibrate decode` and `calibrate run` take: bookkeeping, masks and the look at the result are
in `step`. What else decoding does has times of its own: `calibrate.timing.read_times`.
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
"""Positions that the rows are filled with at once, of all texts together."""


class InterpretedPass:
    """One pass, repeatable, as a decoder's steps: run, look at what that has made, put it out.

    A GPU begins with the head while the layers are still at work: the look belongs to the pass that it is of. Sequences of a batch
    stand at unequal positions where it verifies drafts of theirs (`width` above 1) or makes them (`model.unequal`).
    """

    def __init__(self, model: LibraryModel, width: int, context: int, batch: int) -> None:
        if batch > 1 and model.architecture.crossing:
            raise ParameterError(f"batch must be 1 with an encoder-decoder such as {model.architecture.name}, got {batch}")
        self.model, self.width, self.context, self.batch = model, width, context, batch
        model.read_source()
        self.real = Real({"target": model.decoder})
        self.real.wanted = 1  # until a token is put out
        self.sequences = tuple(range(batch)) if batch > 1 else ()
        self._told = self._tokens(width * batch)
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
        step = Forward("target", self._told, self.context, LayerSpan(0, layers), heads=self.width * self.batch)
        for turn in itertools.count():
            # One position further every other time: no two passes of a text stand at the same place.
            at = self.context + turn % 2
            positions = tuple([at - index % 2 * self.unequal for index in range(self.batch)])
            out = yield step._replace(at=min(positions), batch=self._batch(positions, self.width, self.width))
            yield Read("next", out, -1)
            yield Commit("token", (0,))

    def run(self) -> None:
        """The next pass; what it is placed at cuts the rows back."""
        self.real._drive(self.task)  # the scheduler
        self.real.work.tokens.clear()
        self.real.work.committed.clear()
        self.real.work.commits.clear()

    def back(self) -> None:
        """Nothing: see `run`."""

    def run_watched(self, mark: Callable[[str, int, int], None]) -> None:
        """The same, with the beginning and the end of each part marked.

        A layer is marked where it is called and not within: what the library does around it is there for every layer.
        """
        if self.short:
            self._run_short(mark)
        with watched(self.real, mark):
            self.run()

    @property
    def replayed(self) -> bool:
        """Whether the pass is a graph: nobody sees into that."""
        decoder = self.model.decoder
        return isinstance(decoder, Graphs) and decoder.replays(self.width)

    @property
    def short(self) -> int:
        """Layers of another pass that is marked, whose difference says what layers of a graph take; 0 of others."""
        return self.model.decoder.layers // 2 if self.replayed else 0

    def _run_short(self, mark: Callable[[str, int, int], None]) -> None:
        decoder: Any = self.model.decoder

        def layers_alone(name: str, _: int, edge: int) -> None:
            if name == "layer":
                mark("short", self.short, edge)

        mark("aside", 0, 0)
        decoder.forget()  # its place is as new as that of the whole pass, before and behind it
        with watched(self.real, layers_alone):
            at = self.context + 1
            step = Forward("target", self._told, at, LayerSpan(0, self.short), batch=self._batch(at, self.width))
            self.real.forward(self.task.cache, step)
        decoder.settle()
        decoder.forget()
        mark("aside", 0, 1)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """What is marked: `call` is all that happens in a pass, so but for the look at it. Layers of a graph are one stretch."""
        layers = [("layer", index) for index in range(1 if self.replayed else self.model.decoder.layers)]
        short = [("short", self.short), ("aside", 0)] if self.short else []
        return [("embedding", 0), *layers, ("head", 0), ("call", 0), *short]

    def check(self) -> None:
        """Refuse to go on with rows of another length than was asked for."""
        held: ProcessState = self.task.cache
        rows = held.of("target", self.sequences)
        lengths = {layer.length for layer in rows.layers}
        end = self.context + self.width
        if lengths not in ({end}, {end + 1}):
            raise RuntimeError(f"layers should hold {end} positions or one more, they hold {sorted(lengths)}")


@contextlib.contextmanager
def watched(real: Real, mark: Callable[[str, int, int], None]) -> Iterator[None]:
    """Mark the beginning and the end of each part of the target's passes meanwhile; the norm belongs to the head.

    A graph is marked where it is replayed, as if all its layers were the first; its embedding is within.
    """
    decoder = real.decoders["target"]
    whole: dict[str, Callable[..., Any]]
    whole = {"forward": real.forward, "_layer": decoder._layer, "_embedded": decoder._embedded, "logits": decoder.logits}

    def layer(index: int, *given: Any) -> Any:
        mark("layer", index, 0)
        made = whole["_layer"](index, *given)
        mark("layer", index, 1)
        return made

    def part(name: str, method: str) -> Callable[..., Any]:
        def inner(*given: Any) -> Any:
            mark(name, 0, 0)
            made = whole[method](*given)
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
