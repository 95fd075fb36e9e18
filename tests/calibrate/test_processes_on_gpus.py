"""Decoding over processes with one GPU each generates the plain decoder's tokens, and its GPU work is ordered.

No GPU: `tests.support.threads` stands in for processes and GPUs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.loading.replicas import Replica
from calibrate.measured_runs import measure_runs
from calibrate.measured_runs.measure_runs import MeasurementPlan, PlannedDecoding
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.untested_on_gpu.gpu_ordering import PassStopped
from calibrate.workers import worker_loop
from calibrate.workers.over_processes import Parallel, ProcessError, started
from model.base.checks import ParameterError
from model.logs import measured_runs
from model.logs.spans import main_process_seconds
from model.methods.ppd import algorithm as ppd
from model.steps import CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop
from tests.calibrate.test_over_processes import BATCHED, CHOICES, LAYERS, NESTED, as_believed
from tests.support import real_models
from tests.support.adoption_defects import TIME_INDEPENDENT_DEFECTS
from tests.support.real_models import SOURCE
from tests.support.threads import Cuda, DeviceOnlyState, Stream, workers_as_threads
from tests.support.workers import tiny_replica

pytestmark = pytest.mark.usefixtures("one_thread")
TWO = ["cuda:0", "cuda:1"]
FLAT = ppd.Parameters(LAYERS, 1, 1, "flat")
"""Its sub-processes read rows that are still being made, as nested ones do."""


def on_gpus(kind: str = "llama", seed: int = 0) -> Replica:
    return dataclasses.replace(tiny_replica(kind, seed), device="cuda:0")


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    random_draws = random.Random(0)  # the progress of the GPUs is unknown
    with pytest.MonkeyPatch.context() as patch, workers_as_threads(patch, lambda: random_draws.random() < 0.5) as found:
        yield found


MORE = [CHOICES[1], FLAT, CHOICES[5], CHOICES[9], *NESTED[::2], BATCHED[0], BATCHED[3]]


@pytest.mark.parametrize(("kind", "some"), [
    pytest.param("llama", [CHOICES[9], FLAT, NESTED[0], BATCHED[0]], id="llama"), pytest.param("t5", [CHOICES[1]], id="t5"),
    pytest.param("llama", MORE, id="llama more", marks=pytest.mark.slow),
    pytest.param("t5", [CHOICES[1], FLAT], id="t5 more", marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_are_those_of_the_plain_decoder(cuda: Cuda, kind: str, some: list[ppd.Parameters]) -> None:
    prompt = [0] if kind == "t5" else [3, 4, 5, 6, 17]
    source = SOURCE if kind == "t5" else ()
    expected = real_models.reference_tokens(real_models.model(kind, LAYERS), prompt, 10)
    with started(on_gpus(kind), 4, 64, source=source, pin=False, devices=[*TWO, *TWO[::-1]]) as pool:
        for parameters in some:
            cuda.operation = str(parameters)
            run = Parallel(pool)
            assert run.run(ppd.decode(parameters, prompt, 10), 10).tokens == expected, parameters
            as_believed(pool)
        assert cuda.races == []
        assert pool.memory.bits == []  # else the CPU would have copied
        if kind == "llama":
            pool.load(on_gpus("opt"), 64)  # the same processes and events, with new rows
            expected = real_models.reference_tokens(real_models.model("opt", LAYERS), [3, 4], 8)
            assert Parallel(pool).run(ppd.decode(CHOICES[0], [3, 4], 8), 8).tokens == expected
    assert cuda.races == []


@pytest.mark.parametrize(("defect", "message"), TIME_INDEPENDENT_DEFECTS)
@pytest.mark.usefixtures("cuda")
def test_running_sub_process_is_not_adopted(defect: Callable[[], Steps], message: str) -> None:
    with started(on_gpus(), 2, 16, pin=False, devices=TWO) as pool, pytest.raises(CacheError, match=message):
        Parallel(pool).run(defect(), 8)


def test_events_are_reused(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ordering, "RING", gpu_ordering.AHEAD + 1)
    with started(on_gpus(), 3, 64, pin=False, devices=[*TWO, "cuda:1"]) as pool:
        for parameters in (CHOICES[1], NESTED[0]):
            Parallel(pool).run(ppd.decode(parameters, [3, 4, 5], 10), 10)
            as_believed(pool)
    assert cuda.races == []


def pair(cuda: Cuda) -> tuple[worker_loop.Unit, worker_loop.Unit]:
    """Return two units of one thread, each with a separate stream."""
    decoder = on_gpus().load()
    memory, rings = DeviceOnlyState.allocate(decoder, 2, 16, TWO), gpu_ordering.make_events(TWO)
    cuda.synchronize("cuda:0")
    found = []
    for number, device in enumerate(TWO):
        cuda.local.stream = Stream(len(cuda.streams), cuda)
        cuda.streams.append(cuda.local.stream)
        found.append(worker_loop.Unit(number, decoder, memory, gpu_ordering.Events(number, device, rings, memory.marks)))
    return found[0], found[1]


def made_on(cuda: Cuda, unit: worker_loop.Unit, command: worker_loop.Command, meanwhile: Any = None) -> None:
    """Launch a pass on the stream of its unit."""
    order: Any = unit.order
    before, cuda.local.stream = cuda.local.stream, order.stream
    unit.make(command, None, meanwhile)
    cuda.local.stream = before


def making(followed: bool = True) -> worker_loop.Command:
    """Return a command over two tokens."""
    return worker_loop.Command(7, (3, 4), 0, 0, LAYERS, 0, None, (), worker_loop.tags_checksum(b""), followed)


def copying(layers: int) -> worker_loop.Command:
    """Return a command that lacks the rows of those tokens."""
    believed = worker_loop.tags_checksum(np.full((layers, 2), 7).tobytes())
    return worker_loop.Command(8, (9,), 2, 0, layers, 0, None, (worker_loop.MissingRows(0, 0, layers, 0, 2),), believed)


@pytest.mark.parametrize("followed", [True, False])
def test_rows_are_copied_after_the_work_that_makes_them(cuda: Cuda, followed: bool) -> None:
    """Even if the progress of the GPUs is unknown."""
    cuda.done = lambda: False
    one, other = pair(cuda)
    made_on(cuda, one, making(followed))
    made_on(cuda, other, copying(LAYERS))
    assert cuda.races == []
    orders: Any = one.order, other.order
    assert orders[1].waited_marks == [orders[0].count, 0]  # it waited once, for this event only


def test_rows_of_a_running_pass_are_copied_after_their_last_layer(cuda: Cuda) -> None:
    cuda.done = lambda: True
    one, other = pair(cuda)
    turns: list[int] = []

    def meanwhile() -> None:
        if one.stamps[2] == 7 and not turns:
            turns.append(2)
            made_on(cuda, other, copying(3))

    made_on(cuda, one, making(), meanwhile)
    assert turns
    assert cuda.races == []


def test_stopped_pass_ends_at_the_progress_of_its_gpu(cuda: Cuda) -> None:
    cuda.done = lambda: False
    one, turns = pair(cuda)[0], list[int]()

    def stopped() -> bool:
        turns.append(0)
        return len(turns) > 50

    with pytest.raises(PassStopped):
        one.make(making(), stopped)
    order: Any = one.order
    assert order.count == gpu_ordering.AHEAD + 1 < LAYERS  # layers with a recorded end; no others were launched


def test_rows_are_copied_between_devices(cuda: Cuda) -> None:
    for kind in (DeviceOnlyState, DeviceOnlyState.__base__):
        memory = kind.allocate(tiny_replica("llama").load(), 2, 16)
        memory.rows[1].normal_()
        memory.copy(0, 1, slice(0, 3), slice(2, 4), slice(5, 7))
        assert memory.rows[0][:3, ..., 2:4, :].equal(memory.rows[1][:3, ..., 5:7, :])
        assert memory.rows[0].count_nonzero() == memory.rows[0][:3, ..., 2:4, :].numel()


def test_main_process_drives_others_while_it_waits_for_its_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []
    finish = gpu_ordering.Events.finish

    def noted(self: gpu_ordering.Events, stopped: Any = None, meanwhile: Any = None) -> None:
        if self.number == 0:
            calls.append((stopped is not None, meanwhile is not None))
        finish(self, stopped, meanwhile)

    monkeypatch.setattr(gpu_ordering.Events, "finish", noted)
    with started(on_gpus(), 4, 64, pin=False, devices=TWO + TWO) as pool:
        Parallel(pool).run(ppd.decode(NESTED[0], [3, 4, 5], 6), 6)
        assert {*calls} == {(True, True), (False, False)}
        calls.clear()
        run = Parallel(pool, record=True)
        run.run(ppd.decode(CHOICES[1], [3, 4, 5], 6), 6)
        passes = sum(span.unit == 0 and span.what == "forward" for span in run.spans)
        assert len(calls) >= passes  # each pass ends when the GPU has done it
        assert {*calls} == {(False, False)}


def nothing(*_: Any, **__: Any) -> Any:
    """Replaces a function that orders work, or that stops a pass."""


def early(self: gpu_ordering.Events, low: int, high: int) -> None:
    """Record events before the work that they should follow."""
    if low:
        return
    self.count += 1
    self.rings[self.number][self.count % gpu_ordering.RING].record(self.stream)
    self.marks[self.number] = self.count


@pytest.mark.parametrize(
    ("name", "instead"), [("wait_for", nothing), ("finish", nothing), ("mark", early), ("settle", nothing)]
)
def test_all_ordering_is_necessary(
    cuda: Cuda, name: str, instead: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.done = lambda: random.random() < 0.1
    monkeypatch.setattr(gpu_ordering if name == "settle" else gpu_ordering.Events, name, instead)
    with started(on_gpus(), 4, 64, pin=False, devices=TWO + TWO) as pool:
        for parameters in (CHOICES[0], FLAT, NESTED[0]):
            Parallel(pool).run(ppd.decode(parameters, [3, 4, 5, 6, 17], 10), 10)
            if cuda.races:  # one violation is enough
                break
    assert cuda.races


def test_stoppable_pass_is_launched_few_layers_ahead(cuda: Cuda) -> None:
    """Launched work cannot be cancelled, so an idle GPU gets no more than a few layers."""
    cuda.done = lambda: False
    order = gpu_ordering.Events(0, "cuda:0", gpu_ordering.make_events(["cuda:0"]), np.zeros((1, 9), np.int64))
    asked, turns = [], []

    def stopped() -> bool:
        turns.append(0)
        return len(turns) > 5

    for layer in range(9):
        order.mark(layer, layer + 1)
        try:
            order.limit_ahead(stopped, None)
        except PassStopped:
            break
        asked.append(layer)
    assert len(asked) == gpu_ordering.AHEAD
    with pytest.raises(PassStopped):
        order.finish(stopped)
    order.limit_ahead(None, None)  # it cannot be stopped: no limit
    seen: list[int] = []
    cuda.done = lambda: len(seen) > 3
    order.finish(None, lambda: seen.append(0))  # other processes advance in between
    assert len(seen) == 4


def stopping() -> Steps:
    """A sub-process is stopped at once in every round, while the main process continues."""
    at = 2
    out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
    while True:
        subs = yield Fork((Forward("target", (5,), at, LayerSpan(0, LAYERS)),), (1,))
        out = yield Forward("target", (7,), at, LayerSpan(0, LAYERS), None, heads=1)
        yield Stop(subs)
        yield Commit("token", ((yield Read("next", out)),))
        at += 1


def test_stopped_passes_finish_before_later_work_on_their_gpu(cuda: Cuda) -> None:
    with started(on_gpus(), 2, 64, pin=False, devices=TWO) as pool:
        run = Parallel(pool, record=True)
        run.run(stopping(), 20)
        assert len(run.work.tokens) == 20
        assert not any(post.flights for post in pool.posts.values())
        stream = cuda.stream_of_thread["unit 1"]
        assert cuda.finished[stream.number] == stream.clock[stream.number]  # none of its work is left
        fates = {span.fate for span in run.spans if span.unit == 1}
        assert fates & {"cancelled", "discarded"}
        assert sum(main_process_seconds(run.spans).values()) > 0
    assert cuda.races == []


def test_units_of_one_gpu_share_weights(cuda: Cuda) -> None:
    sent = []
    with started(on_gpus(), 3, 64, pin=False, devices=["cuda:0", "cuda:1", "cuda:0"]) as pool:
        for post in pool.posts.values():
            send = post.end.send
            post.end.send = lambda what, send=send: (sent.append(what), send(what))  # type: ignore[method-assign, misc]
        pool.load(on_gpus("gpt2"), 64)
    loads = [what for what in sent if what[0] == "load"]
    assert [what[1].device for what in loads] == ["cuda:1", "cuda:0"]
    assert [what[4] is not None for what in loads] == [False, True]
    assert cuda.device_of_thread == {"unit 1": "cuda:1", "unit 2": "cuda:0"}


def test_failed_process_is_reported(cuda: Cuda) -> None:
    def asking() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        yield Join((yield Fork((Forward("target", (10**6,), 2, LayerSpan(0, LAYERS)),), (1,))))
        yield Commit("token", ((yield Read("next", out)),))

    with started(on_gpus(), 2, 16, pin=False, devices=TWO) as pool:  # noqa: SIM117
        with pytest.raises(ProcessError, match="the process of unit 1 failed: "):
            Parallel(pool).run(asking(), 1)


def test_timed_run_records_the_gpus_of_its_units(cuda: Cuda, tmp_path: Path) -> None:
    plan = MeasurementPlan(
        [PlannedDecoding("ppd", {"exit_layer": 3, "candidates": 1}, (3, 4, 5), "one", units=2)], 6, 1, 0, facts={"devices": TWO}
    )
    made = on_gpus()
    found = measure_runs.measure(
        tmp_path / "runs.json", plan, {"target": made.load()}, pool=lambda: started(made, 2, 64, pin=False, devices=TWO)
    )
    assert found.about["devices"] == TWO
    assert measured_runs.load(tmp_path / "runs.json").about["devices"] == TWO
    assert cuda.races == []


@pytest.mark.parametrize(
    ("device", "units", "named", "said"),
    [
        ("cpu", 2, ["cuda:0", "cuda:1"], "gpus must begin with the device of the run, cpu, got cuda:0; leave them out"),
        ("cuda:1", 2, TWO, "gpus must begin with the device of the run, cuda:1, got cuda:0; leave them out, or name the same"),
        ("cuda", 3, TWO, "gpus must name one for each of 3 units, got cuda:0,cuda:1; a GPU may be named more than once"),
        ("cuda", 2, ["cuda", "cuda:1"], "gpus must be named as cuda:0,cuda:1, got cuda,cuda:1"),
        ("cuda", 2, ["cuda:0", "cpu"], "gpus must be named as cuda:0,cuda:1, got cuda:0,cpu"),
    ],
)
def test_wrong_gpu_names_are_refused(device: str, units: int, named: list[str], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        gpu_ordering.unit_devices(device, units, named)


def test_each_unit_has_a_separate_gpu_by_default() -> None:
    assert gpu_ordering.unit_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert gpu_ordering.unit_devices("cuda:2", 2) == ["cuda:2", "cuda:3"]
    assert gpu_ordering.unit_devices("cuda", 2, ["cuda:0", "cuda:0"]) == ["cuda:0", "cuda:0"]


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ordering, "cuda", lambda: type("One", (), {"device_count": staticmethod(lambda: 1)}))
    said = "gpus must exist, one for each of 2 units, and cuda:1 is not among 1; name others, or let units share one: --gpus"
    with pytest.raises(ParameterError, match=f"{said} cuda:0,cuda:0; or take streams of one GPU"):
        gpu_ordering.check(TWO)
    with pytest.raises(ParameterError, match="cuda:1 is not among 1"):  # noqa: SIM117
        with started(on_gpus(), 2):
            pass
    gpu_ordering.check(["cuda:0", "cuda:0"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "cuda:0,cuda:1", "--unit-kind", "processes"], "gpus must begin with the device of the run, cpu, got cuda:0"),
        (["--gpus", "cuda:0,cuda:1"], "gpus are for methods that run over processes, and none does; leave them out"),
    ],
)
def test_gpus_of_a_cpu_run_are_refused(more: list[str], said: str, tmp_path: Path) -> None:
    own = ["--model", "family", "--device", "cpu", "--set", "exit_layer=6", "--set", "candidates=1", "-o", str(tmp_path / "a.json")]
    found = CliRunner().invoke(app, ["run", "ppd", *own, *more])
    assert found.exit_code == 2
    assert said in found.stderr
    assert not [*tmp_path.iterdir()]
