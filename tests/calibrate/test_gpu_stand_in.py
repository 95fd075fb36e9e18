"""From passes to predictions on a simulated GPU: work is launched, and runs later than its launch.

The CPU computes the passes; a simulated clock gives their times. Everything reads that clock, so measurements and predictions
depend only on the code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from calibrate.commands import run_command
from calibrate.decode import real_decoding
from calibrate.decoders import transformers_adapter
from calibrate.decoders.transformers_adapter import Decoder
from calibrate.devices import clocks, machine
from calibrate.interpreters import in_one_process
from calibrate.measured_runs import measure_runs, run_plan
from calibrate.timing import read_times, single_pass
from calibrate.untested_on_gpu import cuda_graphs
from sim.comparison import run_comparison
from tests.support import real_models
from tests.support.fake_clocks import few_parts
from tests.support.fake_cuda_graphs import CUDAGraph, install

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Gpu:
    """A device with one queue: work begins when it is launched and all earlier work has ended.

    Times [us] of a layer, of each token in it, of a head, of a clock reading, and of a launch.
    """

    layer: float
    launch: float
    token: float = 4.0
    head: float = 120.0
    tick: float = 0.2
    host: float = 0.0
    ended: float = 0.0
    within: float | None = None
    """Work of the graph that is being captured."""

    def perf_counter(self) -> float:
        """The host's clock [s]."""
        self.host += self.tick
        return self.host / 1e6

    def work(self, seconds: float) -> None:
        """Launch work, or add it to a graph."""
        if self.within is not None:
            self.within += seconds
            return
        self.host += self.launch
        self.ended = max(self.ended, self.host) + seconds

    def settle(self, *_: Any) -> None:
        """Wait for all work."""
        self.host = max(self.host, self.ended)


class Event:
    """A mark in the queue."""

    gpu: Gpu

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Record the end of all earlier work."""
        self.at = max(self.gpu.host, self.gpu.ended)

    def elapsed_time(self, other: Event) -> float:
        """Return the time to another event [ms]."""
        return (other.at - self.at) / 1e3


def on(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this device for all timing."""
    layer, logits, found = Decoder._layer, Decoder.logits, in_one_process.Real._evaluate

    def run_layer(self: Decoder, index: int, hidden: Any, *more: Any) -> Any:
        gpu.work(gpu.layer * (1 if self.layers > 2 else 0.5) + gpu.token * hidden.shape[0] * hidden.shape[1])
        return layer(self, index, hidden, *more)

    def run_head(self: Decoder, states: Any, *more: Any) -> Any:
        gpu.work(gpu.head + gpu.token * states.shape[0])
        return logits(self, states, *more)

    def look(self: in_one_process.Real, step: Any) -> Any:
        answer = found(self, step)
        gpu.settle()
        return answer

    monkeypatch.setattr(transformers_adapter.Decoder, "_layer", run_layer)
    monkeypatch.setattr(transformers_adapter.Decoder, "logits", run_head)
    monkeypatch.setattr(transformers_adapter.Decoder, "settle", gpu.settle)
    monkeypatch.setattr(in_one_process.Real, "_evaluate", look)
    clock = SimpleNamespace(perf_counter=gpu.perf_counter, thread_time=gpu.perf_counter)
    for module in (real_decoding, in_one_process, read_times, measure_runs):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Event, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.settle)
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: clocks.DeviceClock("cuda"))
    monkeypatch.setattr(machine, "QUICK_SIZES", {"cpu": (48, 2**20)})


def by_graphs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add graphs: a graph is launched at once, and takes the time of its work."""
    cuda = install(monkeypatch)
    capture, replay = cuda.graph, CUDAGraph.replay

    @contextlib.contextmanager
    def captured(graph: Any, pool: Any) -> Iterator[None]:
        gpu.within = 0.0
        with capture(graph, pool):
            yield
        graph.takes, gpu.within = gpu.within, None

    def launched(graph: Any) -> None:
        gpu.work(graph.takes)
        replay(graph)

    monkeypatch.setattr(cuda, "graph", captured)
    monkeypatch.setattr(CUDAGraph, "replay", launched)


STATIC: dict[str, Any] = {"batching": "static", "forced": {}}
METHODS: list[dict[str, Any]] = [
    {"name": "autoregressive", "forced": {}},
    {"name": "skipdecode", "min_layers": 6, "max_layers": 6, "sweep": {"sequences": [1, 2, 4, 16]}} | STATIC,
    {"name": "skipdecode", "min_layers": 3, "max_layers": 6, "sequences": 4} | STATIC,
    {"name": "ppd", "exit_layer": 3, "sweep": {"candidates": [1, 3]}, "forced": {"match_rate": 0.5}},
    {"name": "early_exit", "forced": {"exit_rate": 0.3}},
    {"name": "early_exit", "exit_layer": 3, "forced": {}},
    {"name": "speculative", "sweep": {"draft_length": [1, 4]}, "forced": {"acceptance_rate": [0.3, 0.9]}},
    {"name": "bild", "forced": {"fallback_rate": 0.2, "rollback_rate": 0.1}},
]
FEW: list[dict[str, Any]] = [
    METHODS[0], METHODS[1] | {"sweep": {"sequences": [1, 4]}}, METHODS[2], METHODS[3] | {"sweep": {"candidates": [3]}},
    *METHODS[4:6], METHODS[6] | {"sweep": {"draft_length": [4]}}, METHODS[7],
]
"""Each method, with fewer settings for those that batch or draft."""


@pytest.mark.parametrize(
    ("mode", "layer", "launch", "bound", "methods"),
    [
        pytest.param("eager", 400.0, 40.0, 0.02, FEW, id="device"), pytest.param("eager", 40.0, 400.0, 0.02, FEW, id="launches"),
        pytest.param("cuda-graph", 40.0, 10.0, 0.03, FEW, id="graphs of little"),
        *(pytest.param(*each, METHODS, id=f"{name}, all", marks=pytest.mark.slow) for name, each in {
            "device": ("eager", 400.0, 40.0, 0.02), "launches": ("eager", 40.0, 400.0, 0.02),
            "graphs": ("cuda-graph", 400.0, 40.0, 0.03), "graphs of little": ("cuda-graph", 40.0, 10.0, 0.03),
        }.items()),
    ],
)  # fmt: skip
def test_predictions_hold_if_device_or_launches_dominate(
    mode: str, layer: float, launch: float, bound: float, methods: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph is launched at once. Without a read before it, no process waits for the launch, but the prediction assumes a wait."""
    several = methods is METHODS
    methods = [each for each in methods if mode == "eager" or each["name"] != "ppd"]
    names = {}
    for role, layers in (("model", 6), ("draft", 2)):
        said = real_models.config("llama", layers).to_dict() | {"vocab_size": 128, "max_position_embeddings": 256}
        names[role] = str(tmp_path / role / "config.json")
        (tmp_path / role).mkdir()
        Path(names[role]).write_text(json.dumps(said))
    written = run_plan.from_tables({
        "run": {**names, "tokens": 16 if several else 12, "repeats": 1, "prompt_tokens": 16, "dtype": "float32", "mode": mode},
        "method": methods,
        "profile": {
            "widths": [1, 2, 5, 9, 15], "contexts": [0, 16, 32] if several else [0, 32],
            "batches": [1, 2, 4, 16] if several else [1, 4], "rounds": 1, "repeats": 2,
        },
    })  # fmt: skip
    gpu = Gpu(layer, launch)
    on(gpu, monkeypatch)
    few_parts(monkeypatch, read_times.CONTEXT)
    if mode != "eager":
        by_graphs(gpu, monkeypatch)
    out = tmp_path / "out" / "runs.json"
    run_command.measure_plan(written, out, "cpu")
    _, table, _ = run_comparison.of_file(out)
    found = {f"{row['method']} {row['settings']} {row['forced']}": row["error"] for row in table.iter_rows(named=True)}
    assert len(found) == (15 if several else 10) - (0 if mode == "eager" else 2 if several else 1)
    assert {name: error for name, error in found.items() if abs(error) > bound} == {}


def test_overhead_of_a_graph_is_not_part_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed call takes the launch of a graph and its layers; with few layers the launch would seem to be theirs."""
    gpu = Gpu(400.0, 40.0)
    on(gpu, monkeypatch)
    by_graphs(gpu, monkeypatch)
    config = LlamaConfig(**real_models.config("llama", 6).to_dict() | {"vocab_size": 128})
    decoder = cuda_graphs.Graphs(transformers_adapter.decoder_of(LlamaForCausalLM(config), "tiny"), 64)
    found = read_times.time_reads(decoder, 16, 3)
    assert found["resumed_step_us"][1] == pytest.approx(40.0, abs=2.0)
    assert found["tree_us"] == found["fork_us"] == found["beams_us"] == {}
    assert [*read_times.time_after_pauses(decoder, 16, 2)["short_us"]] == ["6"]
