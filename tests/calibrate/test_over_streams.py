"""Decoding over streams generates the plain decoder's tokens; dependent work is ordered, and independent work is not.

No GPU: `tests.support.happens_before` stands in for it, and records every operation of torch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.decoders import kv_rows as rows_of
from calibrate.interpreters.in_one_process import RandomDraws, Real, RunTimes, Sampling
from calibrate.measured_runs import measure_runs
from calibrate.measured_runs.measure_runs import MeasurementPlan, PlannedDecoding
from calibrate.timing import process_times
from calibrate.untested_on_gpu import over_streams
from calibrate.untested_on_gpu.over_streams import Lanes, Streams
from model.base.checks import ParameterError
from model.logs import measured_runs
from model.logs.recorded_decoding import AnsweredRead
from model.logs.spans import main_process_seconds, overlap_with_other_units
from model.methods.beam import algorithm as beam
from model.methods.ppd import algorithm as ppd
from model.methods.speculative import algorithm as speculative
from model.steps import Adopt, Batch, CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop
from sim.comparison import run_comparison
from tests.support import real_models
from tests.support.adoption_defects import ADOPTION_DEFECTS
from tests.support.happens_before import Device, Event, Stream
from tests.support.real_models import DEPTHS
from tests.support.tiers import cross_rows, examples

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = DEPTHS["target"]
CHOICES = [
    ppd.Parameters(LAYERS, layer, k, form)
    for form, layers in (("literal", (3, 4, 5)), ("eager", (3, 5)), ("flat", (1, 2, 3)), ("nested", (2, 3))) for layer in layers
    for k in ((1, 2) if form == "nested" else (1, 3))
] + [
    ppd.Parameters(LAYERS, layer, k, form, batched=True)
    for form, layer, k in (("literal", 3, 3), ("literal", 5, 2), ("eager", 3, 3), ("flat", 1, 3), ("flat", 2, 2))
]  # fmt: skip


def named(each: Any) -> str:
    """Return the name of a choice."""
    return f"{each.form} {each.exit_layer} {each.candidates}{' batched' if each.batched else ''}"


class Pass(NamedTuple):
    """A pass on the stand-in: its stream, and the progress of every stream at its beginning and at its end."""

    stream: int
    first: int
    last: int
    at: int
    begun: Any
    ended: Any

    def is_after(self, other: Pass, *, begins: bool = False) -> bool:
        """Whether it ends after the end of the other, or after its beginning."""
        return bool(self.ended[other.stream] >= (other.begun if begins else other.ended)[other.stream] + begins)


def decoder_of(kind: str, seed: int = 0) -> Any:
    return real_models.decoders(kind, seed=seed)["target"]


@contextlib.contextmanager
def crowded() -> Iterator[None]:
    """Move rows to larger buffers at every pass, so that memory is released while other streams still read it."""
    before, rows_of.ROOM = rows_of.ROOM, 1
    try:
        yield
    finally:
        rows_of.ROOM = before


def watched(decoder: Any, device: Device, steps: Steps, units: int, tokens: int, **more: Any) -> tuple[Streams, list[Pass]]:
    """Run on the stand-in and return the passes; wrong order is an error."""
    passes: list[Pass] = []
    whole = decoder.run

    def run(tokens: Any, at: int, layers: LayerSpan, *given_: Any, **others: Any) -> Any:
        first, last = layers.first, layers.last
        stream = device.current
        begun = stream.clock.copy()
        device.operation = f"layers [{first}, {last}) at {at}"
        made = whole(tokens, at, layers, *given_, **others)
        passes.append(Pass(stream.number, first, last, at, begun, stream.clock.copy()))
        return made

    vars(decoder)["run"] = run
    try:
        with device:
            found = Streams(Lanes(decoder, units, device), **more)
            found.run(steps, tokens)
            device.operation = "the end"
            device.check_freed(device.streams[0])
    finally:
        del vars(decoder)["run"]
    return found, passes


def run(parameters: Any, kind: str = "llama", prompt: Any = (3, 4, 5), tokens: int = 12, seed: int = 0) -> Any:
    device = Device()
    found, passes = watched(decoder_of(kind, seed), device, ppd.decode(parameters, prompt, tokens), parameters.units, tokens)
    assert device.races == []
    return found, passes, device


def rounds(passes: list[Pass]) -> Iterator[tuple[Pass, list[Pass]]]:
    """Return the main process's pass after each early prediction, and the passes of the sub-processes that it started."""
    for number, each in enumerate(passes):
        subs = [*itertools.takewhile(lambda other: other.stream, passes[number + 1 :])]
        if each.stream == 0 and subs:
            yield each, subs


@pytest.mark.parametrize(
    ("parameters", "kind"), cross_rows(CHOICES, ["llama", "gpt2", "opt", "gpt_neox", "t5"], [CHOICES[0], CHOICES[-3], CHOICES[-1]]),
    ids=lambda each: each if isinstance(each, str) else named(each),
)  # fmt: skip
def test_tokens_are_those_of_the_plain_decoder(parameters: Any, kind: str) -> None:
    prompt = [0] if kind == "t5" else [3, 4, 5, 6, 17]
    alone = Real({"target": decoder_of(kind)})
    expected = alone.run(ppd.decode(parameters, prompt, 10), 10)
    made = Streams(Lanes(decoder_of(kind), parameters.units, Device())).run(ppd.decode(parameters, prompt, 10), 10)
    assert made.tokens == expected.tokens == real_models.reference_tokens(real_models.model(kind, LAYERS), prompt, 10)
    assert made.commits == expected.commits
    assert made.account == expected.account
    assert made.forks == expected.forks


@given(
    parameters=st.sampled_from(CHOICES), kind=st.sampled_from(["llama", "gpt2", "t5"]), seed=st.integers(0, 3),
    prompt=st.lists(st.integers(0, real_models.VOCABULARY - 1), min_size=1, max_size=6), tokens=st.integers(2, 7),
    random_draws=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(12))
def test_reads_writes_and_releases_are_ordered(
    parameters: Any, kind: str, seed: int, prompt: list[int], tokens: int, random_draws: int
) -> None:
    random = np.random.default_rng(random_draws)
    share = random.choice([0.0, 0.5, 1.0])
    device = Device(lambda: bool(random.random() < share))  # the progress of the device is unknown
    decoder = decoder_of(kind, seed)
    with crowded():
        found, _ = watched(decoder, device, ppd.decode(parameters, prompt, tokens), parameters.units, tokens)
    assert device.races == []
    assert found.work.tokens == real_models.reference_tokens(real_models.model(kind, LAYERS, seed), prompt, tokens)


APART = [each for each in CHOICES if each.form != "nested" and each.exit_layer < LAYERS]
FEW = {"literal 3 3", "literal 4 1", "eager 3 3", "flat 1 3", "flat 2 1", "flat 3 3", "literal 3 3 batched", "flat 2 2 batched"}
"""One choice of each form and exit layer."""


@pytest.mark.parametrize(
    "parameters", [pytest.param(each, marks=() if named(each) in FEW else pytest.mark.slow) for each in APART], ids=named
)
def test_sub_processes_run_concurrently_with_the_main_process(parameters: Any) -> None:
    """A pass waits only for the layers whose rows it reads, not for the pass before it or for other sub-processes."""
    _, passes, _ = run(parameters)
    pairs = [*rounds(passes)]
    assert len(pairs) == 12
    for own, subs in pairs:
        assert [each.stream for each in subs] == [*range(1, parameters.units)]
        for each in subs:
            assert own.last > own.first or own.at == each.at - 1
            if each.last <= own.first:
                assert not each.is_after(own, begins=True)
            elif each.last < LAYERS:
                assert not each.is_after(own)
            assert not own.is_after(each, begins=True)
            assert not any(each.is_after(other, begins=True) for other in subs if other is not each)


def test_join_is_a_barrier_on_the_device() -> None:
    """Literal: after a join the main process's passes follow all sub-processes; eager: only the right one."""
    for form in ("literal", "eager"):
        found, passes, _ = run(ppd.Parameters(LAYERS, 3, 3, form))
        pairs = [*rounds(passes)]
        waited = []
        for (_, subs), (following, _) in itertools.pairwise(pairs):
            waited.append(sum(following.is_after(each) for each in subs))
        matches = [kind == "match" for kind in found.work.commits[: len(waited)]]
        assert {True, False} <= {*matches}
        if form == "literal":
            assert waited == [3] * len(waited)
        else:
            assert [each >= match for each, match in zip(waited, matches, strict=True)] == [True] * len(waited)
            assert min(waited[place] for place, match in enumerate(matches) if not match) == 0


def test_streams_and_tokens_stay_on_the_device() -> None:
    decoder, device = decoder_of("llama"), Device()
    lanes = Lanes(decoder, 3, device)
    texts = [Streams(lanes).run(ppd.decode(CHOICES[0], [3, 4], 8), 8).tokens for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert len(device.streams) == 3
    assert decoder._last_positions is None  # it belonged to one stream


def test_tokens_are_not_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for all work of the stream, and could not launch meanwhile."""
    made: list[Any] = []
    whole = torch.tensor
    lanes = Lanes(decoder_of("llama"), 2, Device())
    monkeypatch.setattr(torch, "tensor", lambda *given_, **more: made.append(given_) or whole(*given_, **more))
    Streams(lanes).run(ppd.decode(CHOICES[0], [3, 4, 5], 8), 8)
    assert [each[0] for each in made] == [(3, 4)]  # of the prompt


def test_sampling_and_reads_equal_those_of_one_process() -> None:
    parameters = ppd.Parameters(LAYERS, 3, 2, "eager", sampled=True)
    logs: list[list[AnsweredRead]] = [[], []]
    texts = []
    for log in logs:
        more: dict[str, Any] = {"sampling": Sampling(1.5), "random_draws": RandomDraws(3), "log": log}
        decoder = decoder_of("llama")
        each: Any = Streams(Lanes(decoder, 3, Device()), **more) if log is logs[0] else Real({"target": decoder}, **more)
        texts.append(each.run(ppd.decode(parameters, [3, 4], 14), 14).tokens)
    assert texts[0] == texts[1]
    assert logs[0] == logs[1]


def test_sequence_ends_at_the_end_token() -> None:
    whole = real_models.reference_tokens(real_models.model("llama", LAYERS), [3, 4, 5], 16)
    stop = next(token for place, token in enumerate(whole) if place > 3 and token not in whole[:place])
    for parameters in CHOICES:
        steps = ppd.decode(parameters, [3, 4, 5], 16, (stop,))
        work = Streams(Lanes(decoder_of("llama"), parameters.units, Device())).run(steps, 16)
        assert work.tokens == whole[: whole.index(stop) + 1]


def test_ended_sub_processes_release_their_rows() -> None:
    """Each has a copy of the rows: else the memory of a sequence would grow with the square of its length."""
    decoder, device = decoder_of("llama"), Device()
    counts: list[int] = []

    def counting(steps: Steps) -> Steps:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Commit):
                counts.append(len({block for block in device.blocks.values() if block.ref() is not None}))
            answer = yield step

    watched(decoder, device, counting(ppd.decode(CHOICES[1], [3, 4, 5], 16)), 4, 16)
    assert max(counts[8:]) <= max(counts[2:5])


def test_spans_are_complete_and_in_order() -> None:
    """On the device's clock, here of operations: passes of a stream in turn, with unused ones discarded."""
    for form in ("literal", "eager"):
        parameters, device = ppd.Parameters(LAYERS, 3, 3, form), Device()
        found, passes = watched(decoder_of("llama"), device, ppd.decode(parameters, [3, 4, 5], 12), 4, 12, record=True)
        spans, commits = found.spans, found.work.commits
        forward = [span for span in spans if span.what == "forward"]
        assert [(span.unit, span.first, span.last) for span in forward] == [(each.stream, each.first, each.last) for each in passes]
        for unit in range(4):
            of = sorted(span for span in spans if span.unit == unit)
            assert all(one.end <= other.start for one, other in itertools.pairwise(of))
        kept = [span for span in forward if span.unit and span.fate == "kept"]
        assert len(kept) == commits[:-1].count("match") == sum(span.what == "promotion" for span in spans)
        assert {"forward", "head", "wait", "promotion"} == {*main_process_seconds(spans)}
        assert all(overlap_with_other_units(spans, span) >= 0 for span in forward)
        assert found.seconds > 0
    assert Streams(Lanes(decoder_of("llama"), 2, Device())).spans == []


def test_the_device_must_be_a_gpu() -> None:
    with pytest.raises(ParameterError, match="device must be cuda for a run over streams, got 'cpu'; take --device cuda, or proc"):
        Lanes(decoder_of("llama"), 2)
    with pytest.raises(ParameterError, match=f"units must be between 1 and {over_streams.MOST + 1}, got 34"):
        Lanes(decoder_of("llama"), 34)


def joining(steps: Any = None) -> Steps:
    yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
    yield Join((yield Fork((steps,), (None,))))


def child() -> Steps:
    yield Join((yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (None,))))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (ppd.decode(ppd.Parameters(LAYERS, 3, 2), [3, 4], 8), "units must be at least 3, as the algorithm starts .*, got 2 str"),
        (joining(Forward("target", (5, 6), 2, LayerSpan(0, LAYERS), tree=(-1, 0))), "only plain passes of one sequence"),
        (joining(child()), "units must be more, as the algorithm has more processes at once, got 2 streams; make more of them"),
        (ppd.decode(ppd.Parameters(6, 3, 1), [3], 8), "layers of the target must be 5, as llama target has, got at least 6"),
        (speculative.decode(speculative.Parameters(LAYERS, 2, draft_layers=2), [3], 8), "only the target, .* uses the draft"),
        (beam.decode(beam.Parameters(LAYERS, 0, 2, draft_layers=2), [3], 8), "supports only plain passes of one sequence"),
    ],
)  # fmt: skip
def test_unsupported_runs_are_refused(steps: Any, said: str) -> None:
    lanes = Lanes(decoder_of("llama"), 2, Device())
    with pytest.raises(ParameterError, match=said):
        Streams(lanes).run(steps, 8)
    assert lanes.decoder._last_positions is None


# --- timed runs ---


def test_timed_run_records_streams_and_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, device = decoder_of("llama"), Device()
    # An operation of the stand-in takes a nanosecond, so all end within the real seconds of the run.
    monkeypatch.setattr(device, "now", lambda: Device.now(device) * 1e-6)
    settings_ = {"exit_layer": 3, "candidates": 2}
    wanted = [PlannedDecoding("ppd", settings_, (3, 4, 5), "one", units=units, unit_kind="streams") for units in (1, 3)]
    models, lanes = {"target": decoder}, Lanes(decoder, 3, device)
    with device:
        found = measure_runs.measure(tmp_path / "runs.json", MeasurementPlan(wanted, 6, 1, 0), models, lanes=lanes)
    alone, apart = measured_runs.load(tmp_path / "runs.json").timed.values()
    assert [each.units for each in (alone, apart)] == [1, 3]
    assert alone.decoding.tokens == apart.decoding.tokens
    assert apart.unit_kind == "streams"
    assert alone.spans(0) == []
    assert {each.unit for each in apart.spans(0) if each.what == "forward"} == {0, 1, 2}
    assert {"wait", "forward", "head"} <= {*apart.main_process_seconds()}
    assert found.about["unit_kind"] == ["streams", "streams"]
    few = PlannedDecoding("ppd", settings_, (3, 4, 5), "one", units=2, unit_kind="streams")
    with pytest.raises(ParameterError, match="units must be 3, which ppd reserves with these parameters, got 2 streams"):
        measure_runs.check(MeasurementPlan([few]), models)
    with pytest.raises(ParameterError, match="units must be at least 3, which the method reserves, got 2 streams"):
        measure_runs.decode(wanted[1], models, 8, 0, lanes=Lanes(decoder, 2, Device()))


def test_stream_times_are_measured_by_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_times, "PROCESS_PROMPT", 6)
    device = Device()
    with device:
        raw = process_times.raw_row([process_times.over_streams(Lanes(decoder_of("llama"), 3, device), 0)], LAYERS)
    assert raw["exit_layer"] == 3
    for part in ("promotion", "scheduling"):
        assert [*raw[f"{part}_us"]] == ["1", "2"]
    assert raw["dispatch_us"] == raw["wake_us"] == {}
    found = {row["part"] for row in process_times.process_rows([raw], {"main_alone": 0.0, "main_concurrent": 0.0}, LAYERS)}
    assert {"promotion", "scheduling", "main_alone"} <= found <= {*run_comparison.OVER_STREAMS}


# --- the stand-in itself ---


def test_stand_in_finds_wrong_order() -> None:
    def found(*, waits: bool = False, frees: bool = False, writes: bool = False, done: bool = False) -> list[str]:
        device = Device(lambda: done)
        beside_, made = device.Stream(), device.Event()
        with device:
            one = torch.zeros(4)
            made.record(device.current)
            with device.stream(beside_):
                if waits:
                    beside_.wait_event(made)
                made.query()
                other = one[:2] + 1
            if writes:
                one[1:] = 2
            else:
                one[2:] = 2
            if frees:
                del one
            torch.zeros(1)
        assert other.shape == (2,)
        return device.races

    assert found(waits=True) == found(done=True) == []
    assert any("may have yet to write" in each for each in found())
    assert ["replaces what {1}" in each for each in found(waits=True, writes=True)] == [True]
    assert ["uses memory again that [1]" in each for each in found(waits=True, frees=True)] == [True]
    stream, event = Stream(1), Event(Device())
    stream.wait_event(event)
    assert not stream.clock.any()


def test_late_adoption_is_refused() -> None:
    def steps() -> Steps:
        yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        [sub] = yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (1,))
        yield Join((sub,))
        yield Join((yield Fork((Forward("target", (6,), 2, LayerSpan(0, LAYERS)),), (1,))))
        yield Adopt(sub, 2, LAYERS)

    with pytest.raises(CacheError, match="only a single pass can be adopted, before its parent forks others"):
        Streams(Lanes(decoder_of("llama"), 2, Device())).run(steps(), 8)


@pytest.mark.parametrize(("defect", "message"), ADOPTION_DEFECTS)
def test_running_sub_process_is_not_adopted(defect: Callable[[], Steps], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        Streams(Lanes(decoder_of("llama"), 2, Device())).run(defect(), 8)


def test_fork_before_any_pass_still_follows_its_parent() -> None:
    """It reads no rows, but earlier work: here the tokens that were just copied to the device."""
    def steps() -> Steps:
        [sub] = yield Fork((Forward("target", (5,), 0, LayerSpan(0, LAYERS)),), (1,))
        yield Join((sub,))
        yield Commit("token", (5,))

    device = Device()
    _, passes = watched(decoder_of("llama"), device, steps(), 2, 1)
    assert device.races == []
    assert [each.stream for each in passes] == [1]


def test_adoption_without_a_join_waits() -> None:
    def steps() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, 3))
        [sub] = yield Fork((Forward("target", (5,), 2, LayerSpan(0, 1)),), (1,))
        yield Forward("target", (3, 4), 0, LayerSpan(3, LAYERS), out)  # longer than the other, which has therefore ended too
        out = yield Adopt(sub, 2, 1)
        out = yield Forward("target", (5,), 2, LayerSpan(1, LAYERS), out, heads=1)
        yield Commit("token", ((yield Read("next", out)),))

    device = Device()
    found, passes = watched(decoder_of("llama"), device, steps(), 2, 1)
    assert device.races == []
    assert found.work.tokens == real_models.reference_tokens(real_models.model("llama", LAYERS), [3, 4, 5], 1)
    assert passes[-1].is_after(passes[-2])


@pytest.mark.parametrize("how", ["taken over", "taken over and read later", "joined and read later"])
def test_memory_is_not_reused_while_another_stream_reads_it(how: str) -> None:
    """Even if another process starts the next sub-process there, without knowing the readers."""
    def other() -> Steps:
        yield Forward("target", (7,), 2, LayerSpan(0, LAYERS))
        yield Join((yield Fork((Forward("target", (9,), 3, LayerSpan(0, 2)),), (2,))))

    def steps() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, 3))
        _, sub = yield Fork((other(), Forward("target", (5,), 2, LayerSpan(0, 1))), (1, 2))
        yield Forward("target", (3, 4), 0, LayerSpan(3, LAYERS), out)
        taken = [(yield Adopt(sub, 2, 1))] if how.startswith("taken") else [*(yield Join((sub,)))]
        yield Fork((Forward("target", (8,), 2, LayerSpan(0, 1)),), (3,))  # releases rows of the first
        yield Forward("target", (5,), 2, LayerSpan(0, 1))
        if how.endswith("later"):
            yield Forward("target", (5,), 2, LayerSpan(1, 2), taken.pop())
            yield Forward("target", (8,), 2, LayerSpan(0, 1))
            yield Forward("target", (5,), 2, LayerSpan(0, 1))  # releases its states
        yield Forward("target", (5,), 2, LayerSpan(0, LAYERS))
        yield Commit("token", (1,))

    device = Device()
    _, passes = watched(decoder_of("llama"), device, steps(), 4, 1)
    assert device.races == []
    assert passes[-1].stream == 2 or passes[-2].stream == 2


def test_one_read_may_use_two_streams() -> None:
    def steps() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, 3))
        subs = yield Fork((Forward("target", (5,), 2, LayerSpan(0, 3), None, heads=1),), (1,))
        out = yield Forward("target", (3, 4), 0, LayerSpan(3, LAYERS), out, heads=1)
        [other] = yield Join(subs)
        yield Commit("token", ((yield Read("residual", other, against=out)),))

    device = Device()
    watched(decoder_of("llama"), device, steps(), 2, 1)
    assert device.races == []


def test_stopped_processes_keep_the_memory_that_they_read() -> None:
    """The main process moves its rows while a stopped sub-process may still read the old ones."""
    def steps() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), None, heads=1)
        for place in range(2, 10):
            subs = yield Fork((Forward("target", (5,), place, LayerSpan(0, LAYERS)),), (1,))
            out = yield Forward("target", (6,), place, LayerSpan(0, LAYERS), None, heads=1)
            yield Stop(subs)
            yield Commit("token", ((yield Read("next", out)),))

    device = Device()
    with crowded():
        _, passes = watched(decoder_of("llama"), device, steps(), 2, 8)
    assert device.races == []
    assert sum(each.stream for each in passes) == 8


def test_spans_name_their_unit_and_fate() -> None:
    """One candidate is adopted, one over two hypotheses is unused, and a pass without layers has no span."""
    lanes = Lanes(decoder_of("llama"), 3, Device())

    def steps() -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), heads=1)
        token = yield Read("next", out)
        wide = Forward("target", (6, 7), 2, LayerSpan(0, LAYERS), tree=(-1, -1))
        one, other = yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS), heads=1), wide), (2, None))
        made, _ = yield Join((one, other))
        yield Adopt(one, 2, LAYERS)
        second = yield Read("next", made)
        out = yield Forward("target", (8,), 3, LayerSpan(0, 2))
        out = yield Forward("target", (8,), 3, LayerSpan(2, 2), out, heads=1)
        third = yield Read("next", out)
        yield Commit("token", (token, second, third))

    run = Streams(lanes, record=True)
    work = run.run(steps(), 3)
    nothing = (-1, 0, 0, "kept", "target", 1, 0)
    assert [(each.unit, *each[3:12]) for each in run.spans] == [
        (0, "forward", 0, 1, 0, 5, "kept", "target", 2, 0), (0, "head", 0, *nothing),
        (2, "forward", 1, 2, 0, 5, "kept", "target", 1, 0), (1, "forward", 2, 2, 0, 5, "discarded", "target", 2, 1),
        (0, "wait", 0, *nothing), (0, "wait", 0, *nothing), (-1, "promotion", 1, *nothing), (0, "head", 0, *nothing),
        (0, "forward", 0, 3, 0, 2, "kept", "target", 1, 0), (0, "head", 0, *nothing),
    ]  # fmt: skip
    assert run.run_start == 0.0 < run.seconds
    later: Any = SimpleNamespace(event="later")
    run.origin = SimpleNamespace(event=SimpleNamespace(elapsed_time={"later": 2500.0}.__getitem__))  # type: ignore[assignment]
    assert run._at(later) == 2.5  # event times are in milliseconds
    alone = Real({"target": decoder_of("llama")}).run(steps(), 3)
    assert work.tokens == alone.tokens
    assert (work.account, work.forks) == (alone.account, 2)
    assert run.processes == 3
    assert [lane.owner for lane in run.lanes[1:]] == [None, None]
    assert all(not lane.kept for lane in run.lanes)


@pytest.mark.parametrize(("step", "said"), [
    *((Forward("target", (5, 6), 2, LayerSpan(0, LAYERS))._replace(**more), "over streams supports only plain passes")
      for more in ({"batch": Batch.uniform((0, 1), 2)}, {"layers": LayerSpan(0, LAYERS, ((1, 2),))},
                   {"layers": LayerSpan(0, LAYERS, kv_only=True)}, {"compared": 1}, {"unit": 1}, {"tree": (-1, 0)},
                   {"tree": (-1, -1), "heads": 2})),
    (Forward("target", (5, 6), 2, LayerSpan(1, LAYERS), tree=(-1, -1)), "supports only plain passes of one sequence"),
    (Forward("draft", (5,), 2, LayerSpan(0, 1)), "over streams supports only the target, and the algorithm uses the draft model"),
])  # fmt: skip
def test_unsupported_passes_are_refused(step: Forward, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Streams(Lanes(decoder_of("llama"), 2, Device())).run(joining(step), 8)


@pytest.mark.parametrize("unit", [0, 2, 1])
def test_process_on_a_missing_unit_is_refused(unit: int) -> None:
    def steps(heirs: bool = False) -> Steps:
        out = yield Forward("target", (3, 4), 0, LayerSpan(0, LAYERS), heads=1)
        subs = yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (unit,))
        yield Join(subs)
        if heirs:
            yield Fork((Forward("target", (5,), 2, LayerSpan(0, LAYERS)),), (unit,), subs)
        yield Commit("token", ((yield Read("next", out)),))

    run = Streams(Lanes(decoder_of("llama"), 2, Device()))
    if unit == 1:
        assert len(run.run(steps(), 1).tokens) == 1
        with pytest.raises(ParameterError, match="over streams has no sub-processes with the cache of an ended one"):
            Streams(Lanes(decoder_of("llama"), 2, Device())).run(steps(heirs=True), 1)
        return
    with pytest.raises(ParameterError, match=f"units must be at least {unit + 1}, as .* on unit {unit}, got 2 streams; make more"):
        run.run(steps(), 1)


def test_options_of_a_run_work_as_on_one_stream() -> None:
    sampling, random_draws, log, times = Sampling(0.5), RandomDraws(3, 4), list[Any](), RunTimes()
    run = Streams(Lanes(decoder_of("llama"), 1, Device()), sampling=sampling, random_draws=random_draws, log=log, times=times)
    got = run.sampling, run.random_draws, run.log, run.times, run.answers, run.recording
    assert got == (sampling, random_draws, log, times, None, False)
    assert [*run.decoders] == ["target"]
