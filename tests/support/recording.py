"""CUDA's graphs without a GPU: operations of torch are recorded with the tensors that they work on, and done again on the same.

As on a GPU, nothing is run while it is recorded: what it would have written is as it was, and what it would have made is no number
yet. A replay writes into the very tensors of the recording. All graphs of a pool share its memory: a replay of one spoils whatever
others have made there. Whoever asks for a value meanwhile, or brings one from the processor, is told that a GPU would refuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.untested_on_gpu import cuda_graphs

REFUSED = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::lift_fresh", "aten::lift_fresh_copy",
}  # fmt: skip
"""What waits for the device, or brings numbers of the processor's."""
CHOOSES = ("aten::index", "aten::index_put", "aten::index_put_")
LOOKS = ("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
BRINGS = ("tensor", "from_numpy", "as_tensor")


class Refused(RuntimeError):  # noqa: N818
    """What a GPU says of such an operation."""

    def __init__(self, name: str) -> None:
        super().__init__(f"operation not permitted when stream is capturing: {name}")


class Pool:
    """Memory that graphs share, one after another: what the last one has made is there."""

    def __init__(self) -> None:
        self.last: CUDAGraph | None = None


class CUDAGraph:
    """Operations in their order, each with its very tensors."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Any]]]] = []
        self.held: list[Any] = []
        """Views of memory that is written elsewhere: it is not used again that they are of."""
        self.made: list[Any] = []
        """Tensors whose memory was had meanwhile."""
        self.pool: Pool | None = None
        self.replays = 0

    def replay(self) -> None:
        assert self.pool is not None, "a graph is captured first"
        self.replays += 1
        for func, args, kwargs, fresh in self.operations:
            made = func(*args, **kwargs)
            if fresh:
                again = [made] if isinstance(made, torch.Tensor) else _tensors([made])
                for place, old in fresh:
                    old.copy_(again[place])
        if self.pool.last is not self and self.pool.last is not None:
            spoil(self.pool.last.made)
        self.pool.last = self


def spoil(tensors: list[Any]) -> None:
    """No numbers any more."""
    numbers = [each for each in tensors if each.dtype.is_floating_point]
    if numbers:
        torch._foreach_add_(numbers, float("nan"))  # type: ignore[attr-defined]
    for each in tensors:
        if not each.dtype.is_floating_point and each.dtype != torch.bool:
            each.fill_(torch.iinfo(each.dtype).max // 4)


class _Kind(NamedTuple):
    """What an operation does with its operands."""

    refused: bool
    chooses: bool
    writes: tuple[int, ...]
    """Which of them."""
    changes: bool
    """Whether it writes any."""


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    writes = tuple(
        index for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )  # fmt: skip
    return _Kind(schema.name in REFUSED, schema.name in CHOOSES, writes, schema.is_mutable)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self.graph = graph
        self.own: set[int] = set()
        self.was: dict[int, tuple[Any, Any]] = {}
        """Of memory that was there before: as it was."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch need not guard each operation against that."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        if kind.refused:
            raise Refused(func._schema.name)
        given = [*args, *kwargs.values()]
        if kind.chooses and any(each.dtype == torch.bool for each in _tensors(given[1:2])):
            raise Refused(func._schema.name)  # how many there are, the processor wants to know
        for index in kind.writes:
            for each in _tensors([*args[index : index + 1]]):
                key = _memory(each)
                if key not in self.own and key not in self.was:
                    whole = each.as_strided((each.untyped_storage().nbytes() // each.element_size(),), (1,), 0)
                    self.was[key] = whole, whole.clone()
        made = func(*args, **kwargs)
        before = {_memory(each) for each in _tensors(given)}
        fresh = [(place, each) for place, each in enumerate(_tensors([made])) if _memory(each) not in before]
        for _, each in fresh:
            self.own.add(_memory(each))
            self.graph.made.append(each)
        if fresh or kind.changes:
            self.graph.operations.append((func, args, kwargs, fresh))
        else:
            self.graph.held.append(made)
        return made


class Cuda:
    """In the place of `torch.cuda`."""

    CUDAGraph = CUDAGraph
    graph_pool_handle = Pool

    def __init__(self) -> None:
        self.waits: list[tuple[Any, Any]] = []
        """Which stream has waited for which."""
        self.current = self.Stream()
        self.graphs: list[CUDAGraph] = []

    def Stream(self, device: Any = None) -> Any:  # noqa: N802
        """Work in order, as all is here."""
        stream = SimpleNamespace(device=device)
        stream.wait_stream = lambda other: self.waits.append((stream, other))
        return stream

    def current_stream(self) -> Any:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: CUDAGraph, pool: Pool) -> Iterator[None]:
        """Record what is done meanwhile."""
        recorder = _Recorder(graph)
        with contextlib.ExitStack() as stack:
            for owner, names in ((torch.Tensor, LOOKS), (torch, BRINGS)):
                for name in names:
                    stack.enter_context(mock.patch.object(owner, name, _refusing(name)))
            stack.enter_context(recorder)
            yield
        for whole, was in recorder.was.values():
            whole.copy_(was)
        spoil(graph.made)
        graph.pool = pool
        self.graphs.append(graph)


def installed(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Have it in the place of torch's own; the processor then counts as a GPU."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_graphs, "cuda_of", lambda _: cuda)
    return cuda


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Refused(name)

    return refuse


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Any]:
    found: list[Any] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(each)
    return found
