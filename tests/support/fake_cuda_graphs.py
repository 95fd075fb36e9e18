"""CUDA graphs without a GPU: operations of torch are recorded with their tensors, and replayed on the same tensors.

As on a GPU, recording runs nothing: written tensors keep their values, and new tensors have no values yet. A replay writes into
the tensors of the recording. All graphs of a pool share its memory: a replay of one destroys the results of the others. Reading a
value, or bringing one from the processor, during a recording raises the error that a GPU would raise.
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
"""Operations that wait for the device, or bring numbers from the processor."""
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
VALUE_READS = ("tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")
HOST_COPIES = ("tensor", "from_numpy", "as_tensor")


class CaptureError(RuntimeError):
    """The error of a GPU for such an operation."""

    def __init__(self, name: str) -> None:
        super().__init__(f"operation not permitted when stream is capturing: {name}")


class Pool:
    """Memory shared by graphs: it holds the results of the last replay."""

    def __init__(self) -> None:
        self.last: CUDAGraph | None = None


class CUDAGraph:
    """Recorded operations in order, with their tensors."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Any]]]] = []
        self.views: list[Any] = []
        """Views, kept so that their memory is not reused."""
        self.tensors: list[Any] = []
        """Tensors allocated during the recording."""
        self.pool: Pool | None = None
        self.replays = 0

    def replay(self) -> None:
        assert self.pool is not None, "a graph is captured first"
        self.replays += 1
        for func, args, kwargs, fresh in self.operations:
            result = func(*args, **kwargs)
            if fresh:
                again = [result] if isinstance(result, torch.Tensor) else _tensors([result])
                for index, old in fresh:
                    old.copy_(again[index])
        if self.pool.last is not self and self.pool.last is not None:
            overwrite(self.pool.last.tensors)
        self.pool.last = self


def overwrite(tensors: list[Any]) -> None:
    """Overwrite tensors with nan or large numbers."""
    numbers = [each for each in tensors if each.dtype.is_floating_point]
    if numbers:
        torch._foreach_add_(numbers, float("nan"))  # type: ignore[attr-defined]
    for each in tensors:
        if not each.dtype.is_floating_point and each.dtype != torch.bool:
            each.fill_(torch.iinfo(each.dtype).max // 4)


class _Kind(NamedTuple):
    """Effects of an operation on its operands."""

    refused: bool
    indexes: bool
    writes: tuple[int, ...]
    """Operands that it writes."""
    changes: bool
    """Whether it writes any operand."""


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    writes = tuple(
        index for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )  # fmt: skip
    return _Kind(schema.name in REFUSED, schema.name in INDEXING, writes, schema.is_mutable)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self.graph = graph
        self.graph_memory: set[int] = set()
        self.previous: dict[int, tuple[Any, Any]] = {}
        """Memory allocated before, with its values before the recording."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch needs no guard for each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, _kind(func)
        if kind.refused:
            raise CaptureError(func._schema.name)
        operands = [*args, *kwargs.values()]
        if kind.indexes and any(each.dtype == torch.bool for each in _tensors(operands[1:2])):
            raise CaptureError(func._schema.name)  # the processor needs the number of true elements
        for index in kind.writes:
            for each in _tensors([*args[index : index + 1]]):
                key = _memory(each)
                if key not in self.graph_memory and key not in self.previous:
                    whole = each.as_strided((each.untyped_storage().nbytes() // each.element_size(),), (1,), 0)
                    self.previous[key] = whole, whole.clone()
        result = func(*args, **kwargs)
        before = {_memory(each) for each in _tensors(operands)}
        fresh = [(index, each) for index, each in enumerate(_tensors([result])) if _memory(each) not in before]
        for _, each in fresh:
            self.graph_memory.add(_memory(each))
            self.graph.tensors.append(each)
        if fresh or kind.changes:
            self.graph.operations.append((func, args, kwargs, fresh))
        else:
            self.graph.views.append(result)
        return result


class Cuda:
    """Replacement of `torch.cuda`."""

    CUDAGraph = CUDAGraph
    graph_pool_handle = Pool

    def __init__(self) -> None:
        self.waits: list[tuple[Any, Any]] = []
        """Pairs of streams: the first has waited for the second."""
        self.current = self.Stream()
        self.graphs: list[CUDAGraph] = []

    def Stream(self, device: Any = None) -> Any:  # noqa: N802
        """Create a stream; all work here is in order."""
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
        """Record the operations inside the block."""
        recorder = _Recorder(graph)
        with contextlib.ExitStack() as stack:
            for owner, names in ((torch.Tensor, VALUE_READS), (torch, HOST_COPIES)):
                for name in names:
                    stack.enter_context(mock.patch.object(owner, name, _refusing(name)))
            stack.enter_context(recorder)
            yield
        for whole, before in recorder.previous.values():
            whole.copy_(before)
        overwrite(graph.tensors)
        graph.pool = pool
        self.graphs.append(graph)


def install(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Replace `torch.cuda`; the processor is then treated as a GPU."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_graphs, "cuda_of", lambda _: cuda)
    return cuda


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(name)

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
