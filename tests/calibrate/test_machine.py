"""Facts and ceilings of made-up devices."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from calibrate.devices import clocks, machine
from model.base.checks import ParameterError
from model.hardware.devices import DEVICES, device
from tests.support.fake_clocks import FakeTime

GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", L2_cache_size=50, total_memory=80, multi_processor_count=132, uuid="4-5")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make system files come from this folder."""
    monkeypatch.setattr(machine, "Path", lambda name: tmp_path / name.lstrip("/"))
    return tmp_path


def test_facts_of_a_cpu(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda name: {"cpu": 77}[name])
    monkeypatch.setattr(machine, "time", SimpleNamespace(strftime=lambda form, at: (form, at), gmtime=lambda: "now"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    facts = {
        "date": ("%Y-%m-%d", "now"), "python": machine.platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "name": "x86_64", "cache_bytes": 0, "threads": 3, "cores": os.cpu_count(),
        "memory_bytes": 77,
    }  # fmt: skip
    assert machine.facts("cpu") == facts  # a system without these files
    monkeypatch.setattr(machine.platform, "processor", lambda: "i686")
    assert machine.facts("cpu")["name"] == "i686"
    (system / "proc").mkdir()
    (system / "proc" / "cpuinfo").write_text("vendor: x\nmodel name\t: Zen: 4 \nmodel name\t: other\n")
    for number, size in enumerate(("512", "48K", "3M", "2048K")):
        folder = system / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
        if not number:
            assert machine.facts("cpu")["cache_bytes"] == 512
    assert machine.facts("cpu") == facts | {"name": "Zen: 4", "cache_bytes": 3 * 2**20}
    (folder / "size").write_text("1G")
    assert machine.facts("cpu")["cache_bytes"] == 2**30


def test_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Current and highest clocks, driver and power limit of the GPU with this identity; unreadable facts are marked."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", {"cuda:1": GPU}.get)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    begun: list[int] = []
    vendor: Any = SimpleNamespace(
        NVML_CLOCK_SM="sm", NVML_CLOCK_MEM="memory", nvmlInit=lambda: begun.append(1),
        nvmlDeviceGetHandleByUUID=lambda name: (name, *begun), nvmlSystemGetDriverVersion=lambda: "580",
        nvmlDeviceGetClockInfo=lambda handle, which: (handle, which, "now"),
        nvmlDeviceGetMaxClockInfo=lambda handle, which: (handle, which, "most"),
        nvmlDeviceGetPowerManagementLimit=lambda handle: {("GPU-4-5", 1): 700_000}[handle],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", vendor)
    own = ("GPU-4-5", 1)
    found = machine.facts("cuda:1")
    found.pop("date")
    assert found == {
        "python": machine.platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "name": GPU.name, "cache_bytes": 50, "memory_bytes": 80, "multiprocessors": 132, "cuda": "13.0",
        "sm_mhz": (own, "sm", "now"), "memory_mhz": (own, "memory", "now"), "sm_mhz_highest": (own, "sm", "most"),
        "memory_mhz_highest": (own, "memory", "most"), "driver": "580", "power_limit_w": 700.0,
    }  # fmt: skip
    vendor.nvmlDeviceGetPowerManagementLimit = None
    found = machine.facts("cuda:1")
    assert (found["nvml"], found["cuda"], "driver" in found) == ("not read: TypeError", "13.0", False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.facts("cuda:1")["nvml"] == "not read: ModuleNotFoundError"


def test_device_is_the_requested_one_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = (None, "cuda", "cuda:0", "cuda:1", "cpu")
    assert [machine.choose_device(name) for name in asked] == ["cuda", *asked[1:]]
    for wrong, said in (
        ("cuda:2", "device must be one of 2 GPUs that torch sees, got cuda:2; take --device cpu"),
        ("cpu:0", "device must be cpu, cuda or cuda:NUMBER, got 'cpu:0'"), ("cuda:x", "cuda:NUMBER, got 'cuda:x'"),
        ("cud", "unknown device 'cud'"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            machine.choose_device(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.choose_device(None) == machine.choose_device("cpu") == "cpu"
    with pytest.raises(ParameterError, match="one of 0 GPUs that torch sees, got cuda; take"):
        machine.choose_device("cuda")
    for name in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ModuleNotFoundError, match=name):
                machine.import_libraries()


def test_memory_of_a_host_follows_from_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine.memory("cpu") == machine.free("cpu") == 7 * 4096
    monkeypatch.setattr(os, "sysconf", {}.__getitem__)
    for error in (ValueError, OSError, AttributeError):
        monkeypatch.setattr(os, "sysconf", lambda _, error=error: (_ for _ in ()).throw(error))
        assert machine.memory("cpu") == 0


@pytest.mark.parametrize("name", DEVICES)
def test_device_is_recognized_by_name_and_memory(name: str) -> None:
    """By the driver's name and 10 % of its memory; slower variants of the same name are not recognized."""
    memory, called = device(name).memory_bytes, f"NVIDIA {name.upper().replace('-', ' ')}"
    assert getattr(machine.published_device(called, memory), "name", None) == name
    for share in (0.91, 1.09):
        assert getattr(machine.published_device(called, share * memory), "name", None) == name
    for share in (0.89, 1.11):
        assert getattr(machine.published_device(called, share * memory), "name", None) != name
    for slower in ("PCIe", "NVL", "Laptop GPU", "MIG"):
        assert machine.published_device(f"{called} {slower}", memory) is None


# --- ceilings ---


class Kernels:
    """Kernels without work, whose rates depend on kind, type, shape and amount of data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[tuple[Any, ...]] = []
        self.rates: dict[tuple[Any, ...], float] = {}
        monkeypatch.setattr(machine, "_product", lambda *what: ("product", *what))
        monkeypatch.setattr(machine, "_read", lambda *what: ("read", *what))
        monkeypatch.setattr(machine, "_copy", lambda *what: ("copy", *what))
        monkeypatch.setattr(machine, "_fastest", self.fastest)

    def fastest(self, kernel: Any, name: str, tries: int = 7) -> float:
        self.tried.append((*kernel, tries, name))
        return self.rates.get(kernel, 1.0)


def test_fastest_kernels_on_small_data_are_tried_on_large_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products and two reads; a rate on cached data counts for products, but not for bandwidth."""
    kernels, tall, layers = Kernels(monkeypatch), (1, 4, 1, 0.25), (False, True)
    monkeypatch.setattr(machine, "QUICK_SIZES", {"cpu": (512, 4096)})
    best = [("bfloat16", (1, 1, 1, 1), layers), ("float32", tall, (True, True)), ("float32", tall, layers)]
    for rate, (dtype, shape, layout) in zip((5.0, 4.0, 3.0), best, strict=True):
        kernels.rates["product", "cpu", dtype, shape, layout, 128] = rate
    kernels.rates |= {("read", "cpu", "float32", 1, 2**20): 9.0, ("read", "cpu", "bfloat16", 2, 2**20): 8.0}
    kernels.rates |= {("read", "cpu", "bfloat16", 2, 4096): 2.0, ("copy", "cpu", "bfloat16", 4096): 6.0}
    found = machine.Ceilings("cpu", "bfloat16", quick=True)
    assert found.best == {"flop_per_s": 5.0, "read_bytes_per_s": 2.0, "copy_bytes_per_s": 6.0}
    kinds = [("cpu", dtype) for dtype in ("bfloat16", "float32")]
    much = [("product", "cpu", *each, 512, 7, "cpu") for each in best]
    much += [("read", "cpu", "float32", 1, 4096, 7, "cpu"), ("read", "cpu", "bfloat16", 2, 4096, 7, "cpu")]
    much += [("copy", "cpu", "bfloat16", 4096, 7, "cpu")]
    little = [("product", *kind, shape, layout, 128, 2, "cpu") for kind in kinds for shape in machine._SHAPES
              for layout in machine._LAYOUTS]  # fmt: skip
    little += [("read", *kind, layout, 2**20, 2, "cpu") for kind in kinds for layout in range(3)]
    assert kernels.tried == little + much
    kernels.rates["product", "cpu", *best[1], 512] = 7.0
    kernels.rates["copy", "cpu", "bfloat16", 4096] = 3.0
    found.measure()  # the higher rate counts
    assert found.best == {"flop_per_s": 7.0, "read_bytes_per_s": 2.0, "copy_bytes_per_s": 6.0}
    assert kernels.tried == little + much * 2
    kernels.tried.clear()
    assert machine.Ceilings("cpu", "float32").dtypes == ("float32",)  # each type once
    sides = {each[-3] for each in kernels.tried if each[0] == "product"}
    assert sides == {128, 2048}  # full sizes, unless quick


def test_products_of_all_shapes_have_similar_work() -> None:
    """Square, tall, wide, with a vector, and batched as in attention; the best of seven tries."""
    work = []
    for shape in machine._SHAPES:
        work.append(machine._product("cpu", "float32", shape, (False, True), 8).amount / (2 * 8**3))
    assert work == [1, 1, 1, 32 * 32 / 8**3, 4 / 8]
    columns = [machine._product("cpu", "float32", shape, (True, True), 8).work().shape for shape in machine._SHAPES]
    assert [tuple(each) for each in columns] == [(8, 8), (32, 2), (2, 32), (1, 32), (4, 4, 4)]
    done: list[int] = []
    machine._fastest(machine._Kernel(lambda: done.append(1), 1.0), "cpu")
    assert len(done) == 1 + 7
    for took, amount, rate in ((4.0, 2.0, 0.5), (0.0, 2.0, 2e9)):  # short work may take no time on the clock
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "clock_of", lambda _, took=took: SimpleNamespace(start=lambda: None, stop=lambda: took))
            assert machine._fastest(machine._Kernel(lambda: None, amount), "cpu") == pytest.approx(rate)


def test_ceilings_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/50; without memory for a try, the measurement continues without it."""
    clock, kernels = FakeTime(0.0), Kernels(monkeypatch)
    clock.spend(1e3)  # not the first measurement
    monkeypatch.setattr(machine, "time", clock)
    made = kernels.fastest

    def takes(kernel: Any, name: str, tries: int = 7) -> float:
        clock.spend(0.5)
        return made(kernel, name, tries)

    found = machine.Ceilings("cpu", "float32", quick=True)
    kernels.tried.clear()
    monkeypatch.setattr(machine, "_fastest", takes)
    found.measure()  # six kernels
    assert (len(kernels.tried), found.measured_seconds) == (6, 3.0)
    clock.spend(147.0)  # 150 s by now
    found.measure_if_due()
    assert len(kernels.tried) == 6
    clock.spend(1e-3)
    found.measure_if_due()
    assert (len(kernels.tried), found.measured_seconds) == (12, 6.0)
    for error in (RuntimeError, MemoryError, KeyError):
        clock.spend(1e6)
        monkeypatch.setattr(machine, "_fastest", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(KeyError) if error is KeyError else contextlib.nullcontext():
            found.measure_if_due()


def test_sizes_of_a_gpu_and_quick_ones() -> None:
    assert machine._sizes("cuda:1", quick=False) == (8192, 2 * 2**30)
    assert machine._sizes("cuda:1", quick=True) == (2048, 128 * 2**20)
    assert machine._sizes("cpu", quick=True) == (512, 128 * 2**20)


def test_operands_have_the_requested_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous columns or not; the same random numbers each time, from a separate generator."""
    made: list[Any] = []
    whole = machine._random
    monkeypatch.setattr(machine, "_random", lambda *what: made.append(whole(*what)) or made[-1])
    state = torch.random.get_rng_state()
    for layout in machine._LAYOUTS:
        made.clear()
        kernel = machine._product("cpu", "float32", (2, 1, 0.5, 2), layout, 4)
        shapes = [(2, 4, 2) if not layout[0] else (2, 2, 4), (2, 2, 8) if not layout[1] else (2, 8, 2)]
        assert [tuple(each.shape) for each in made] == shapes
        left, right = (each.mT if turned else each for each, turned in zip(made, layout, strict=True))
        assert kernel.work().equal(left @ right)
        assert kernel.amount == 2 * 2 * 4 * 2 * 8
    assert torch.random.get_rng_state().equal(state)
    assert whole("cpu", "float32", 3).equal(whole("cpu", "float32", 3))
    matrix = machine._matrix("cpu", "float64", 3 * 64 * 4096 * 8)
    assert matrix.shape == (192, 4096)
    assert matrix[:64].equal(matrix[128:])
    assert matrix.dtype == torch.float64
    column, row = whole("cpu", "float64", 4096), whole("cpu", "float64", 192)
    for layout, expected in enumerate((matrix @ column, matrix @ column, row @ matrix)):
        assert torch.allclose(machine._read("cpu", "float64", layout, matrix.nbytes).work().flatten(), expected)
    assert machine._copy("cpu", "float64", matrix.nbytes).work().equal(matrix)


# --- clocks ---


def test_thread_with_98_percent_cpu_time_was_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, single, disturbed in ((0.02, True, False), (0.021, True, True), (0.5, False, False)):
        now = iter((1.0, 2.0, 3.5, 7.0))
        worked = iter((5.0, 5.0 + 1 - share))
        clock = clocks.HostClock(single)
        monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=now.__next__, thread_time=worked.__next__))
        clock.start()
        assert clock.stop() == 1.0
        assert clock.waiting_share == pytest.approx(share)
        clock.waiting_share = share
        assert clock.disturbed() is disturbed
        clock.mark("layer", 3, 0)
        clock.mark("layer", 3, 1)
        assert clock.span("layer", 3) == 3.5
    assert clocks.HostClock().disturbed() is False


def test_gpu_clock_uses_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded during the work, and read after one synchronisation at each end; within graphs events are external."""
    now, done, made = [0.0], list[Any](), list[Any]()

    class Event:
        def __init__(self, **how: bool) -> None:
            made.append(how)
            self.at = 0.0

        def record(self) -> None:
            now[0] += 5.0
            self.at = now[0]
            done.append("record")

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    for mode, external in (("eager", {}), ("cuda-graph", {"external": True})):
        made.clear(), done.clear()
        clock = clocks.clock_of("cuda:1", mode)
        clock.start()
        for _ in range(2):  # events are reused
            clock.mark("head", 2, 0)
            clock.mark("head", 2, 1)
        assert clock.stop() == 25e-3
        assert clock.span("head", 2) == 5e-3
        assert done == ["cuda:1", *["record"] * 6, "cuda:1"]
        assert made == [{"enable_timing": True}] * 2 + [{"enable_timing": True} | external] * 2
        assert clock.disturbed() is False

    def old(*, enable_timing: bool) -> Event:
        return Event()

    monkeypatch.setattr(torch.cuda, "Event", old)
    with pytest.raises(RuntimeError, match="cannot time inside graphs; take a newer one, or mode eager"):
        clocks.clock_of("cuda", "cuda-graph").mark("head", 0, 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one: Any = clocks.clock_of("cpu", "cuda-graph")
    assert (type(one), one.single) == (clocks.HostClock, True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clocks.clock_of("cpu").single is False  # type: ignore[attr-defined]


# --- sizes and kernels ---


@pytest.mark.parametrize(
    ("cache", "memory", "size"),
    [(2**20, 2**40, 2**28), (2**28, 2**40, 2**29), (2**28, 12 * 2**27, 2**27), (2**28, 2**20, 2**26), (0, 0, 2**26)],
)
def test_copies_exceed_the_cache_and_leave_memory_free(
    cache: int, memory: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the last cache, at least 256 MiB; at most a twelfth of the memory, but at least 64 MiB."""
    monkeypatch.setattr(machine, "_last_cache", lambda: cache)
    monkeypatch.setattr(machine, "memory", lambda _: memory)
    monkeypatch.setattr(machine, "_SHAPES", machine._SHAPES[:1])
    monkeypatch.setattr(machine, "_LAYOUTS", machine._LAYOUTS[:1])
    sizes: list[int] = []
    monkeypatch.setattr(machine, "_copy", lambda name, dtype, size: sizes.append(size))
    monkeypatch.setattr(machine, "_product", lambda *_: None)
    monkeypatch.setattr(machine, "_read", lambda *_: None)
    monkeypatch.setattr(machine, "_fastest", lambda *_, **__: 1.0)
    machine.Ceilings("cpu", "float32")
    assert sizes == [size]
    assert machine.Ceilings("cpu", "float32", quick=True).best.keys() == {"flop_per_s", "read_bytes_per_s", "copy_bytes_per_s"}
    assert sizes[1] < 2**28


def test_products_are_tried_in_every_layout() -> None:
    assert machine._LAYOUTS[0] == (False, True)
    assert sorted(machine._LAYOUTS) == sorted(itertools.product((False, True), repeat=2))


def test_work_and_bytes_of_a_ceiling_follow_from_its_matrices() -> None:
    side = 8
    for shape in machine._SHAPES:
        batch, m, k, n = shape[0], *(max(round(each * side), 1) for each in shape[1:])
        for layout in machine._LAYOUTS:
            made = machine._product("cpu", "float32", shape, layout, side)
            assert made.amount == 2 * batch * m * k * n
            result: Any = made.work()
            assert result.shape[-2:] == (m, n)
            assert result.numel() == batch * m * n
    for size in (1, 2**22):
        matrix = machine._matrix("cpu", "float32", size)
        whole = matrix.numel() * 4
        assert whole == max(size, 2**20)
        assert machine._copy("cpu", "float32", size).amount == 2 * whole  # read and write
        for layout in range(3):
            made = machine._read("cpu", "float32", layout, size)
            assert made.amount == whole
            result = made.work()
            assert result.numel() == matrix.shape[1 if layout == 2 else 0]


def test_best_try_counts_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times, worked = iter([4.0, 2.0, 8.0]), []
    monkeypatch.setattr(machine, "clock_of", lambda _: SimpleNamespace(start=lambda: None, stop=lambda: next(times)))
    assert machine._fastest(machine._Kernel(lambda: worked.append(1), 8.0), "cpu", tries=3) == 4.0
    assert len(worked) == 4
