"""Times of one pass: rows from clock readings, and the number of repeats."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.devices import clocks
from calibrate.timing import library_pass, profile_from_timings, single_pass
from calibrate.timing.single_pass import Effort, Point
from model.base.checks import ParameterError
from model.steps import Batch, LayerSpan
from tests.support import real_models
from tests.support.fake_clocks import PassClock
from tests.support.tiny_configurations import build_library_model

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


def test_row_holds_the_clock_readings(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: PassClock())
    row = single_pass.measure(build_library_model(config()), Point("eager", 2, 4, 1, 0), Effort(least=4), 0.0)
    assert row["layers_us"] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert row["head_us"] == [3.5] * 3
    assert row["embedding_us"] == [0.25] * 3
    assert row["whole_us"] == [11.75] * 3
    assert (row["repeats"], row["spread"]) == (4, 0.0)


def test_point_is_repeated_until_its_spread_is_small(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Swinging(PassClock):
        turn = 0

        def stop(self) -> float:
            self.turn += 1
            return (1.0, 1.0, 1.1, 1.1)[(self.turn // 2) % 4] * 1e-3

    monkeypatch.setattr(single_pass, "clock_of", lambda *_: Swinging())
    model, point = build_library_model(config()), Point("eager", 1, 0, 1, 0)
    forever = float("inf")
    for target in (0.02, 0.01):
        found = single_pass.measure(model, point, Effort(target, least=4), forever)
        n = found["repeats"]
        # The first n with 0.1 / 1.05 / sqrt(n) below the target.
        assert found["spread"] < target
        assert n == pytest.approx((0.1 / 1.05 / target) ** 2, abs=4)
    assert single_pass.measure(model, point, Effort(0.0, least=4, most=9), forever)["repeats"] == 9
    assert single_pass.measure(model, point, Effort(0.0, least=4), 0.0)["repeats"] == 4


def test_interrupted_repeats_are_left_out_if_there_are_others(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(PassClock):
        turn = 0
        every = 3

        def stop(self) -> float:
            self.turn += 1
            return 1.0 if self.disturbed() else 1e-3

        def disturbed(self) -> bool:
            return self.turn % self.every == 0

    monkeypatch.setattr(single_pass, "clock_of", lambda *_: Interrupted())
    model, point = build_library_model(config()), Point("eager", 1, 0, 1, 0)
    row = single_pass.measure(model, point, Effort(0.5, least=4, most=100), float("inf"))
    assert row["whole_us"] == [1000.0] * 3
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (4, 6, 0)
    monkeypatch.setattr(Interrupted, "every", 1)
    row = single_pass.measure(model, point, Effort(0.5, least=4, most=9), float("inf"))
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (4, 5, 4)
    _, notes = profile_from_timings.part_rows([row], "eager", layers=3)
    assert any("at 1 of 1 points too few repeats were uninterrupted" in note for note in notes)


@pytest.mark.parametrize(("ran", "single", "disturbed"), [(0.97, True, True), (0.97, False, False), (0.99, True, False)])
def test_thread_without_cpu_time_was_interrupted(
    ran: float, single: bool, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, worked = iter((10.0, 11.0)), iter((5.0, 5.0 + ran))
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: next(passed), thread_time=lambda: next(worked)))
    clock = clocks.HostClock(single)
    clock.start()
    assert clock.stop() == 1.0
    assert clock.disturbed() is disturbed


def test_quartiles_and_means() -> None:
    seconds = [1e-6, 2e-6, 3e-6, 10e-6]
    assert single_pass.quartiles(seconds) == [1.75, 2.5, 4.75]
    assert single_pass.means(seconds) == [1.75, 4.0, 4.75]


# --- one point ---


class Stub:
    """A pass without work, whose parts a fake clock times."""

    def __init__(self, spans: dict[tuple[str, int], float]) -> None:
        self.spans, self.parts, self.done = spans, [*spans], list[str]()

    def run(self) -> None:
        self.done.append("run")

    def run_marked(self, mark: Any) -> None:
        self.done.append("watched")

    def roll_back(self) -> None:
        self.done.append("back")

    def check(self) -> None:
        self.done.append("check")


def pointed(
    monkeypatch: pytest.MonkeyPatch,
    spans: dict[tuple[str, int], float],
    mode: str,
    wholes: list[float],
    marked: float,
    disturbed: list[bool] | None = None,
    layers: int = 4,
    **effort: Any,
) -> tuple[dict[str, Any], Stub]:
    work, stops = Stub(spans), iter([each for whole in wholes for each in (whole * 1e-6, marked * 1e-6)])
    unquiet = iter([each for was in disturbed or [False] * len(wholes) for each in (was, False)])
    clock = SimpleNamespace(
        start=lambda: None, stop=lambda: next(stops), disturbed=lambda: next(unquiet), mark=None,
        span=lambda name, index: 1e-6 * spans[name, index],
    )  # fmt: skip
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: clock)
    monkeypatch.setattr(single_pass, "prepare", lambda *_: work)
    model: Any = SimpleNamespace(device="cpu", decoder=SimpleNamespace(layers=layers))
    row = single_pass.measure(model, Point(mode, 2, 8, 1, 0, 3), Effort(**{"target": 0.0, "warmups": 2} | effort), float("inf"))
    return row, work


LAYERS_US = {("layer", 0): 10.0, ("layer", 1): 12.0, ("layer", 2): 14.0, ("layer", 3): 16.0}


def test_row_of_a_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("norm", 0): 2.0, ("head", 0): 30.0}
    row, work = pointed(monkeypatch, spans, "eager", [100, 104, 112, 180], 130, least=4, most=4)
    assert work.done == ["run", "back"] * 2 + ["watched", "back"] + ["run", "back", "watched", "back"] * 4 + ["check"]
    assert (row["kind"], row["mode"], row["width"], row["context"], row["round"]) == ("point", "eager", 2, 8, 3)
    assert row["whole_us"] == [103.0, 108.0, 129.0]  # quartiles and median
    assert row["marked_us"] == [130.0] * 3
    assert row["layers_us"] == [[each] * 3 for each in LAYERS_US.values()]
    assert (row["head_us"], row["embedding_us"]) == ([32.0] * 3, [5.0] * 3)  # the head includes the norm
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (4, 0, 0)
    assert row["spread"] == round(26 / 108 / 2, 5)
    assert "sum_us" not in row


def test_row_of_the_interpreter_separates_call_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 70 us with 52 us of layers and 5 us of embedding has 13 us of overhead; the read is the time after call and head.
    """
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0, ("call", 0): 70.0}
    row, _ = pointed(monkeypatch, spans, "interpreter", [100, 104, 112, 180], 130, least=4, most=4)
    assert row["whole_us"] == [103.0, 124.0, 129.0]  # quartiles and mean
    assert (row["sum_us"], row["rest_us"], row["first_read_us"]) == ([52.0] * 3, [13.0] * 3, [30.0] * 3)
    # A graph has one stretch: 60 us for all four layers and 48 us for the first one, each with the overhead of a replay.
    spans = {("embedding", 0): 0.0, ("layer", 0): 60.0, ("head", 0): 30.0, ("call", 0): 70.0, ("short", 1): 48.0}
    spans |= {("aside", 0): 20.0}
    row, _ = pointed(monkeypatch, spans, "interpreter", [100] * 4, 130, least=4, most=4)
    assert (row["sum_us"], row["rest_us"], row["first_read_us"]) == ([16.0] * 3, [54.0] * 3, [10.0] * 3)


def test_disturbed_repeats_count_only_if_there_are_too_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    row, _ = pointed(monkeypatch, spans, "eager", [100, 500, 104, 400, 300], 130, [False, True, False, True, True], least=3, most=5)
    assert (row["repeats"], row["disturbed"], row["taken_anyway"]) == (3, 2, 1)
    assert row["whole_us"] == [102.0, 104.0, 202.0]  # quartiles of 100, 104 and 300 us, the shortest disturbed repeat


# --- garbage collection, end and preparation of a point ---


def test_garbage_collector_is_off_during_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it is on or off as before."""
    seen: list[bool] = []
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    begin = Stub.run
    monkeypatch.setattr(Stub, "run", lambda self: (seen.append(gc.isenabled()), begin(self))[1])
    for was in (True, False):
        (gc.enable if was else gc.disable)()
        try:
            pointed(monkeypatch, spans, "eager", [100] * 2, 130, least=2, most=2)
            assert gc.isenabled() is was
        finally:
            gc.enable()
    assert seen == [False] * 8


@pytest.mark.parametrize(("now", "least", "most", "target", "spread_of", "repeats"), [
    (0.0, 2, 9, 0.0, 0.0, 9),  # a spread must be below the target
    (0.0, 2, 9, 1e-9, 0.0, 2), (0.0, 3, 9, 1e-9, 0.0, 3), (0.0, 4, 4, 0.0, 1.0, 4), (5.0, 3, 9, 0.0, 1.0, 3),
    (4.9, 3, 9, 0.0, 1.0, 9),
])  # fmt: skip
def test_point_ends_at_small_spread_or_at_its_time_limit(
    now: float, least: int, most: int, target: float, spread_of: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time limit is 5 s."""
    monkeypatch.setattr(single_pass, "time", SimpleNamespace(monotonic=lambda: now))
    spans = {("embedding", 0): 5.0, **LAYERS_US, ("head", 0): 30.0}
    work, wholes = Stub(spans), itertools.cycle([1.0, 1.0, 1 + spread_of, 1 + spread_of])
    clock = SimpleNamespace(start=lambda: None, stop=lambda: next(wholes), disturbed=lambda: False, mark=None, span=lambda *_: 1.0)
    monkeypatch.setattr(single_pass, "clock_of", lambda *_: clock)
    monkeypatch.setattr(single_pass, "prepare", lambda *_: work)
    model: Any = SimpleNamespace(device="cpu", decoder=SimpleNamespace(layers=4))
    row = single_pass.measure(model, Point("eager", 1, 0, 1, 0), Effort(target, least, most, warmups=0), 5.0)
    assert row["repeats"] == repeats
    assert work.done == ["watched", "back"] + ["run", "back", "watched", "back"] * repeats + ["check"]


def test_mode_selects_the_kind_of_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many positions are refused first; the load average is recorded where the system has one."""
    from calibrate.timing import interpreter_pass

    asked: list[Any] = []
    for module, name in ((library_pass, "EagerPass"), (library_pass, "GraphPass"), (interpreter_pass, "InterpretedPass")):
        monkeypatch.setattr(module, name, lambda *given, name=name: (name, *given))
    model: Any = SimpleNamespace(architecture=SimpleNamespace(check_positions=lambda *given: asked.append(given)))
    modes = {"eager": "EagerPass", "cuda-graph": "GraphPass", "interpreter": "InterpretedPass"}
    assert [*modes] == [*single_pass.MODES]
    for mode, name in modes.items():
        assert single_pass.prepare(model, 3, 8, 2, mode) == (name, model, 3, 8, 2)  # type: ignore[comparison-overlap]
        assert asked.pop() == (3, 8)
    assert single_pass.prepare(model, 3, 8, 2)[0] == "EagerPass"  # type: ignore[index]
    monkeypatch.setattr(single_pass.os, "getloadavg", lambda: (0.126, 9.0, 9.0))
    assert single_pass._load() == 0.13
    for error in (OSError, AttributeError):
        monkeypatch.setattr(single_pass.os, "getloadavg", lambda error=error: (_ for _ in ()).throw(error))
        assert single_pass._load() is None
    assert [str(Point("eager", 1, 2, 3, busy)) for busy in (0, 4)] == [
        "eager width 1 context 2 batch 3", "eager width 1 context 2 batch 3 busy 4",
    ]  # fmt: skip
    assert (Effort().target, Effort().least, Effort().most, Effort().warmups) == (0.005, 10, 1000, 5)
    for wrong, said in (({"target": -1.0}, "target must be at least 0"), ({"least": 0}, "least must be at least 1"),
                        ({"least": 5, "most": 4}, "most must be at least 5"), ({"warmups": -1}, "warmups must be")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            Effort(**wrong)
    Effort(0.0, 1, 1, 0)


# --- a pass as decoding makes it ---


def interpreted(width: int, context: int, batch: int, unequal: bool = False, kind: str = "llama") -> tuple[Any, list[Any]]:
    """Return a pass of a tiny model with random tokens 3, 4, 5, ..., and the list of its requests."""

    from calibrate.timing import interpreter_pass

    decoder = real_models.decoders(kind)["target"]
    asked: list[Any] = []
    run = decoder.run

    def noted(tokens: tuple[int, ...], at: int, layers: LayerSpan, *more: Any, batch: Batch | None, **how: Any) -> Any:
        positions = () if batch is None or batch.aligned else batch.positions
        asked.append((tokens, at, layers.first, layers.last, 1 if batch is None else len(batch.sequences), positions))
        return run(tokens, at, layers, *more, batch=batch, **how)

    decoder.run = noted
    model: Any = SimpleNamespace(
        architecture=SimpleNamespace(crossing=kind == "t5", name=kind), decoder=decoder, unequal=unequal,
        read_source=lambda: asked.append("source"),
        tokens=lambda batch, count: torch.arange(3, 3 + batch * count).view(batch, count),
    )  # fmt: skip
    return interpreter_pass.InterpretedPass(model, width, context, batch), asked


def test_interpreter_pass_alternates_between_two_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before it are made in chunks; every layer, the embedding, the head and the call are marked, and nothing after
    `roll_back`.
    """
    from calibrate.timing import interpreter_pass

    monkeypatch.setattr(interpreter_pass, "CHUNK", 4)
    work, asked = interpreted(2, 6, 1)
    depth = real_models.DEPTHS["target"]
    filling = [((3, 4, 5, 6), 0, 0, depth, 1, ()), ((3, 4), 4, 0, depth, 1, ())]
    passes = [((3, 4), at, 0, depth, 1, ()) for at in (6, 7)]
    assert asked == ["source", *filling, *passes]
    marks: list[Any] = []
    work.run_marked(lambda *mark: marks.append(mark))
    work.run()
    work.roll_back()
    assert asked[5:] == passes
    layers = [("layer", index) for index in range(depth)]
    assert work.parts == [("embedding", 0), *layers, ("head", 0), ("call", 0)]
    inner = [(*part, edge) for part in [("embedding", 0), *layers] for edge in (0, 1)]
    assert marks == [("call", 0, 0), *inner, ("call", 0, 1), ("head", 0, 0), ("head", 0, 1)]
    assert (work.replayed, work.short_layers) == (False, 0)
    assert work.real.work.tokens == work.real.work.committed == work.real.work.commits == []
    work.check()
    for length in (7, 10):
        work.task.cache.rows["target"].layers[0].length = length
        with pytest.raises(RuntimeError, match="layers should hold 8 positions or one more, they hold"):
            work.check()


def test_batched_draft_passes_are_at_unequal_positions() -> None:
    depth = real_models.DEPTHS["target"]
    for width, context, unequal, places in ((1, 6, False, ()), (2, 6, False, (6, 5, 6)), (1, 6, True, (6, 5, 6)), (2, 0, True, ())):
        work, asked = interpreted(width, context, 3, unequal)
        tokens = tuple(range(3, 3 + 3 * width))
        first, second = asked[-2:]
        assert first == (tokens, min(places, default=context), 0, depth, 3, places)
        assert second == (tokens, min(places, default=context) + 1, 0, depth, 3, tuple(each + 1 for each in places))
        assert work.sequences == (0, 1, 2)
        if context:
            assert asked[1] == (tuple(range(3, 3 + 18)), 0, 0, depth, 3, ())
    with pytest.raises(ParameterError, match="batch must be 1 with an encoder-decoder such as t5, got 2"):
        interpreted(1, 0, 2, kind="t5")
    assert interpreted(1, 0, 1, unequal=True)[0].unequal is False
