"""Timing on a device that runs asynchronously: its clock stands still until the host waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.decoders.transformers_adapter import Decoder
from calibrate.devices import machine
from calibrate.interpreters import in_one_process
from calibrate.loading.replicas import Replica
from calibrate.measured_runs import measure_runs
from calibrate.timing import read_times
from tests.support import real_models

LAYER, TREE, HEAD, TICK = 1000.0, 100.0, 300.0, 0.5
"""Times [us] of the device for a layer, for a layer over several hypotheses in addition, and for a head; and of the host between
two clock readings.
"""


class Device:
    """Work is noted at its launch, and done when the host waits."""

    def __init__(self) -> None:
        self.now = self.owed = 0.0

    def perf_counter(self) -> float:
        """The host's clock [s]."""
        self.now += TICK
        return self.now / 1e6

    def settle(self) -> None:
        """Wait for all launched work."""
        self.now, self.owed = self.now + self.owed, 0.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Layers and heads take time on the device; reading a value waits for it."""
    found = Device()
    layer, logits, read = Decoder._layer, Decoder.logits, in_one_process.Real._evaluate

    def launched(self: Decoder, *given: Any) -> Any:
        found.owed += LAYER + (TREE if given[-1].at is not None else 0.0)
        return layer(self, *given)

    def projected(self: Decoder, *given: Any) -> Any:
        found.owed += HEAD
        return logits(self, *given)

    def seen(self: in_one_process.Real, step: Any) -> Any:
        answer = read(self, step)
        found.settle()
        return answer

    monkeypatch.setattr(Decoder, "_layer", launched)
    monkeypatch.setattr(Decoder, "logits", projected)
    monkeypatch.setattr(Decoder, "settle", lambda _: found.settle())
    monkeypatch.setattr(in_one_process.Real, "_evaluate", seen)
    for module in (read_times, in_one_process):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=found.perf_counter))
    return found


def tiny(layers: int = 4) -> Decoder:
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrate.decoders.transformers_adapter import decoder_of

    said = real_models.config("llama", layers).to_dict() | {"vocab_size": 64}
    return decoder_of(LlamaForCausalLM(LlamaConfig(**said)), "tiny")


@pytest.mark.usefixtures("one_thread")
def test_parts_take_the_device_time_without_earlier_work(device: Device) -> None:
    decoder = tiny()
    assert device.owed == 0
    found = read_times.time_reads(decoder, 12, 3)
    few = 40 * TICK  # clock readings only
    for kind, times in found["reads_us"].items():
        assert times[1] == pytest.approx(HEAD if kind == "early_head" else 0, abs=few), kind
    for times in found["kv_rows_us"].values():  # a layer makes its key and value rows
        assert times[1] == pytest.approx(LAYER, abs=few)
    assert all(times[1] == pytest.approx(4 * TREE, abs=few) for times in found["tree_us"].values())
    assert all(times[1] == pytest.approx(0, abs=few) for times in found["beams_us"].values())
    assert all(times[1] < LAYER / 2 for times in found["fork_us"].values())
    assert found["resumed_step_us"][1] == pytest.approx(0, abs=few)


@pytest.mark.usefixtures("one_thread")
def test_passes_after_pauses_take_the_device_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_times, "GAPS", (0, 500))
    found = read_times.time_after_pauses(tiny(), 12, 4)
    assert device.owed == 0
    for name in ("after_gap_us", "wide_us"):
        for times in found[name].values():
            assert times[1] == pytest.approx(4 * LAYER, abs=40 * TICK), name
    for times in found["short_us"].values():
        assert times[1] == pytest.approx(LAYER, abs=40 * TICK)


def test_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to make it current."""
    with pytest.raises(ValueError, match="index"):
        torch.cuda.set_device("cuda")
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    for name in ("cuda", "cuda:1"):
        machine.make_current(name)
    assert made == ["cuda:1"]


def test_model_must_fit_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model may be loaded already; memory that torch keeps for reuse counts as free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 26)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert machine.free("cuda") == 36
    assert machine.memory("cuda") == 80
    assert machine.free("cpu") == machine.memory("cpu")


def test_changed_clocks_are_still_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted runs can be resumed at any clock rate of the GPU."""
    whole, clock = machine.facts, iter((345, 1980))
    monkeypatch.setattr(machine, "facts", lambda name: whole(name) | {"sm_mhz": next(clock), "driver": "580"})
    models = real_models.decoders("llama")
    first, second = (measure_runs._facts(models) for _ in range(2))
    assert first == second
    assert first["driver"] == "580"


def test_random_weights_are_drawn_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    told: list[Any] = []

    class Reached(Exception):  # noqa: N818
        """The point where the model would be built."""

    def build(_: Any, **more: Any) -> Any:
        told.append((torch.get_default_device().type, more))
        raise Reached

    kept: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda name: name)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: kept.append(given))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", build)
    for device, dtype in (("cuda:0", "bfloat16"), ("cpu", "bfloat16")):
        with pytest.raises(Reached):
            Replica("llama-68m", device, dtype, random=1).load()
    assert told == [("cuda", {"dtype": torch.bfloat16}), ("cpu", {})]
    assert len(kept) == 1  # later random draws on the host do not change
