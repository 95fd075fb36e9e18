"""Runs over processes whose workers are in this process: their commands, their progress and their records.

No result depends on the clock: a worker makes its pass when the main process waits.
"""

from __future__ import annotations

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.interpreters.in_one_process import RandomDraws, Real, RunTimes, Sampling
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import over_processes, worker_loop
from calibrate.workers.over_processes import UNKNOWN_ROWS, Parallel, _UnitProcess
from calibrate.workers.worker_loop import (
    DONE,
    MADE,
    SLOTS,
    STATUS,
    STOPPED,
    Board,
    Command,
    MissingRows,
    SharedState,
    Unit,
)
from calibrate.workers.worker_pool import Flight, Post, ProcessError
from model.base.checks import ParameterError
from model.methods.ppd import algorithm as ppd
from model.steps import Adopt, Batch, CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop
from tests.support import real_models

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = real_models.DEPTHS["target"]


class AtOnce:
    """A pool whose workers are units of this process."""

    def __init__(self, count: int, capacity: int = 16) -> None:
        self.decoder = real_models.decoders("llama")["target"]
        self.units, self.capacity, self.patience = count, capacity, 60.0
        self.board, self.memory = Board(count), SharedState.allocate(self.decoder, count, capacity)
        self.workers = [Unit(number, self.decoder, self.memory) for number in range(count)]
        self.unit = self.workers[0]
        self.tags, self.since = np.zeros_like(self.memory.tags), np.zeros_like(self.memory.tags)
        self.posts = {number: Post(None, None) for number in range(1, count)}  # type: ignore[arg-type]
        self.serial, self.broken = 0, False
        self.told: list[tuple[int, Command]] = []
        self.left: deque[tuple[int, int, Command]] = deque()

    def refuse_closed(self) -> None:
        if self.broken:
            raise ProcessError("they are broken")

    def check_workers(self, _: Any) -> None:
        """No worker has failed."""

    def post(self, number: int, command: Command) -> int:
        post = self.posts[number]
        place = post.count % SLOTS
        slot = self.board.slots[number][place]
        slot[STOPPED] = slot[STATUS] = 0
        post.count += 1
        self.told.append((number, command))
        self.left.append((number, place, command))
        return place

    def wait(self, _: float) -> None:
        number, place, command = self.left.popleft()
        slot, worker = self.board.slots[number][place], self.workers[number]
        if not slot[STOPPED]:
            states = worker.make(command)
            self.memory.states[number, : len(states)] = states
            if command.heads:
                self.memory.logits[number] = self.decoder.logits(states[-1:], command.last)[0]
            slot[STATUS] = MADE
        self.board.words[number][DONE] += 1


@pytest.fixture
def three() -> Any:
    return AtOnce(3)


def ran(pool: Any, steps: Steps, tokens: int = 1, record: bool = True, **more: Any) -> Parallel:
    run = Parallel(pool, record=record, **more)
    run.run(steps, tokens)
    return run


def whole(at: int = 0, tokens: tuple[int, ...] = (3, 4), **more: Any) -> Forward:
    return Forward("target", tokens, at, LayerSpan(0, LAYERS), **more)


def test_spans_name_their_unit_and_fate(three: Any) -> None:
    """One candidate is adopted, another is unused, and a third is stopped."""

    def steps() -> Steps:
        out = yield whole(heads=1)
        token = yield Read("next", out)
        one, other = yield Fork((whole(2, (5,), heads=1), whole(2, (6,))), (1, 2))
        made, _ = yield Join((one, other))
        yield Adopt(one, 2, LAYERS)
        second = yield Read("next", made)
        [late] = yield Fork((whole(3, (7,)),), (2,))
        yield whole(3, (8,))
        yield Stop((late,))
        yield Commit("token", (token, second))

    before = over_processes.time.perf_counter()
    run = ran(three, steps(), 2)
    took = over_processes.time.perf_counter() - before
    assert before <= run.run_start <= before + took
    assert 0 < run.seconds <= took
    assert all(run.run_start <= each.start for each in run.spans if each.unit == 0)
    found = [(each.unit, *each[3:12]) for each in run.spans]
    nothing = (-1, 0, 0, "kept", "target", 1, 0)
    link = (-1, "link")
    assert found == [
        (0, "forward", 0, 1, 0, 5, "kept", "target", 2, 0), (0, "head", 0, *nothing), (0, "dispatch", 0, *nothing),
        (0, "wait", 0, *nothing), (*link, 1, *nothing), (1, "forward", 1, 2, 0, 5, "kept", "target", 1, 0),
        (0, "wait", 0, *nothing), (*link, 2, *nothing), (2, "forward", 2, 2, 0, 5, "discarded", "target", 1, 0),
        (-1, "promotion", 1, *nothing), (0, "head", 0, *nothing), (0, "dispatch", 0, *nothing),
        (0, "forward", 0, 3, 0, 5, "kept", "target", 1, 0), (*link, 3, -1, 0, 0, "cancelled", "target", 1, 0),
        (2, "forward", 3, 3, 0, 5, "cancelled", "target", 1, 0),
    ]  # fmt: skip
    assert all(one.start <= one.end for one in run.spans if one.what not in ("link", "forward"))
    # A worker that lacks rows gets their unit, their span and their passes.
    (unit, first), (_, second), (_, third) = three.told
    span = first.first, first.last
    assert (unit, first.tokens, first.at, span, first.heads, first.announces_layers) == (1, (5,), 2, (0, 5), 1, False)
    assert first.pieces == (MissingRows(0, 0, 5, 0, 2),)
    assert second.pieces == first.pieces
    assert third.pieces == (MissingRows(0, 0, 5, 2, 3),)  # the adopted pass, not its own
    assert run.work.account.adoptions == 1
    assert run.work.account.adopted_rows == LAYERS
    assert run.work.forks == 3
    assert ran(three, steps(), 2, record=False).spans == []


def test_unfinished_rows_are_awaited_layer_by_layer(three: Any) -> None:
    """Unfinished rows are listed with the passes that make them; finished rows are not."""

    def steps() -> Steps:
        yield whole()
        subs = yield Fork((Forward("target", (5,), 3, LayerSpan(0, 3)),), (1,))
        out = yield Forward("target", (9,), 2, LayerSpan(0, 4), heads=1)
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))

    run = Parallel(three)
    run.run(steps(), 1)
    [(_, command)] = three.told
    assert command.pieces == (MissingRows(0, 0, 3, 0, 3, (2, 2, 2)),)
    assert command.serial == 3
    assert command.tags_checksum == worker_loop.tags_checksum(np.array([[1, 1, 2]] * 3).tobytes())


def test_missing_rows_are_copied_from_any_unit(three: Any) -> None:
    """From the parent if it has all of them; else each from a unit that has it, the parent first."""
    run = Parallel(three)
    main = _UnitProcess(iter(()), None, 0)  # type: ignore[arg-type]
    sub = _UnitProcess(whole(4), main, 2)
    three.tags[:] = 0
    three.tags[0, :2, 1:4] = three.tags[1, :2, 1:4] = want = np.array([[4, 5, 6], [4, 5, 6]])
    asked = (sub, 2, (0, 2), (1, 4), want)
    assert run._pieces(*asked) == (MissingRows(0, 0, 2, 1, 4),)
    three.tags[0, 1, 2] = 9  # no other unit lacks it
    assert run._pieces(*asked) == (MissingRows(1, 0, 2, 1, 4),)
    three.tags[1, 0, 1], three.tags[2, 0, 3] = 9, 6
    assert run._pieces(*asked) == (
        MissingRows(0, 0, 1, 1, 2), MissingRows(0, 0, 1, 2, 3), MissingRows(0, 1, 2, 1, 2), MissingRows(1, 1, 2, 2, 3),
        MissingRows(0, 1, 2, 3, 4),
    )  # fmt: skip
    three.tags[1, 1, 2] = 9
    with pytest.raises(CacheError, match="rows of layer 1 at position 2, missing on unit 2, are on no unit"):
        run._pieces(*asked)
    three.since[0, 0, 1:3], three.memory.stamps[0] = (3, 7), 7
    assert run._piece(0, 0, 2, 1, 3).since == ()
    three.memory.stamps[0, 0] = 6
    assert run._piece(0, 0, 2, 1, 3).since == (7, 0)


def forked(*bodies: Any, where: tuple[int | None, ...] = (1,)) -> Steps:
    yield whole()
    subs = yield Fork(bodies, where)
    yield Join(subs)


def nested() -> Steps:
    """A sub-process adopts a pass of its own sub-process."""
    subs = yield Fork((whole(2, (5,)),), (2,))
    yield Join(subs)
    yield Adopt(subs[0], 2, LAYERS)


def crossing() -> Steps:
    """A pass continues on another unit than the one that began it."""
    out = yield Forward("target", (3, 4), 0, LayerSpan(0, 3))
    yield Join((yield Fork((Forward("target", (3, 4), 0, LayerSpan(3, LAYERS), out),), (1,))))


def two_at_once() -> Steps:
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    other = yield Fork((whole(2, (6,)),), (1,))
    yield Join((*one, *other))


def deadlocked() -> Steps:
    """Processes wait for each other."""
    known: list[Any] = []

    def waits() -> Steps:
        yield whole(2, (5,))
        yield Join((known[1],))

    def also() -> Steps:
        yield whole(2, (5,))
        yield Join((known[0],))

    yield whole()
    known += yield Fork((waits(), also()), (1, 2))
    yield Join(tuple(known))


def spoiled() -> Steps:
    """Its unit makes another pass at the same position before the adoption."""
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    yield Join(one)
    yield Join((yield Fork((whole(2, (6,)),), (1,))))
    yield Adopt(one[0], 2, LAYERS)


def too_early() -> Steps:
    """A pass is adopted before it ends."""
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    yield Adopt(one[0], 2, LAYERS)


def overwriting() -> Steps:
    """Rows are replaced that a worker has yet to copy."""
    yield whole()
    yield Fork((whole(2, (5,)),), (1,))
    yield Read("next", (yield Forward("target", (7,), 2, LayerSpan(0, LAYERS), heads=1)))
    yield Forward("target", (8,), 1, LayerSpan(0, LAYERS))


def without_a_unit() -> Steps:
    yield whole()
    yield Join((yield Fork(tuple(whole(2, (token,)) for token in (5, 6, 7)), (None,) * 3)))


@pytest.mark.parametrize(("steps", "error", "said"), [
    (forked(nested()), CacheError, "only the main process can adopt the pass of a sub-process"),
    (crossing(), CacheError, "target: unit 1 cannot continue the pass of unit 0"),
    (two_at_once(), CacheError, "unit 1 is to make a pass while it makes another one"),
    (deadlocked(), CacheError, "came to a halt before it had generated all its tokens"),
    (spoiled(), CacheError, "rows at position 2 of unit 1 are no longer those of the adopted process"),
    (too_early(), CacheError, "a running task cannot be adopted; join it first"),
    (overwriting(), CacheError, "target: a pass at position 1 replaces rows that a sub-process is copying"),
    (without_a_unit(), CacheError, "a single pass without a requested unit found no free unit"),
    (forked(whole(2, (5,)), where=(3,)), ParameterError, "units must be at least 4, as .* on unit 3, got 3; start more"),
    (forked(whole(2, (5,)), where=(0,)), ParameterError, "units must be at least 1, as"),
    (forked(whole(15, (5, 6))), ParameterError, "must fit the capacity=16, got at least 17 positions; start the processes with"),
    (forked(Forward("target", (5,), 2, LayerSpan(0, LAYERS + 1))), ParameterError, "layers of the target must be 5, .* at least 6"),
    (forked(Forward("draft", (5,), 2, LayerSpan(0, 1))), ParameterError, "only the target, and .* uses the draft model"),
    *((forked(whole(2, (5, 6))._replace(**more)), ParameterError, "supports only plain passes of one sequence; .* uses others")
      for more in ({"batch": Batch.uniform((0, 1), 2)}, {"layers": LayerSpan(0, LAYERS, ((1, 2),))},
                   {"layers": LayerSpan(0, LAYERS, kv_only=True)}, {"compared": 1}, {"unit": 1}, {"tree": (-1, 0)},
                   {"tree": (-1, -1), "heads": 2})),
    (forked(Forward("target", (5, 6), 2, LayerSpan(1, LAYERS), tree=(-1, -1))), ParameterError, "passes of one sequence"),
])  # fmt: skip
def test_wrong_steps_of_an_algorithm_are_refused(three: Any, steps: Steps, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ran(three, steps)
    assert three.broken
    with pytest.raises(ProcessError, match="they are broken"):
        ran(three, forked())


def test_last_position_and_last_unit_are_usable(three: Any) -> None:
    def steps() -> Steps:
        out = yield whole(heads=1)
        yield Join((yield Fork((whole(2, (5,) * 14), whole(2, (5, 6), tree=(-1, -1))), (2, 1))))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps())
    assert len(run.work.tokens) == 1
    wide = [each for each in run.spans if each.what == "forward" and each.unit == 1]
    assert [(each.width, each.position, each.depth) for each in wide] == [(2, 2, 1)]  # hypotheses of one position

    def heirs() -> Steps:
        subs = yield Fork((whole(0, (5,)),), (1,))
        yield Join(subs)
        yield Fork((whole(1, (6,)),), (1,), (subs[0],))

    with pytest.raises(ParameterError, match="no sub-processes with the cache of an ended one, as beam search needs"):
        ran(three, heirs())


def test_process_without_a_unit_takes_the_first_free_one(three: Any) -> None:
    """Three processes on two units, in the order of their forks; a process that is stopped while it waits never begins."""
    at: list[tuple[str, int]] = []

    def body(name: str) -> Steps:
        yield whole(2, (5,))
        at.append((name, 0))

    def steps() -> Steps:
        out = yield whole(heads=1)
        subs = yield Fork(tuple(map(body, "abcd")), (None,) * 4)
        yield Forward("target", (7,), 2, LayerSpan(0, LAYERS))
        yield Stop((subs[2],))
        yield Join((subs[0], subs[1], subs[3]))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps())
    assert [name for name, _ in at] == ["a", "b", "d"]
    assert [number for number, _ in three.told] == [1, 2, 1]
    assert run.free == [False, True, True]


def test_sub_process_emits_after_its_ancestors_end(three: Any) -> None:
    """Its earlier commits wait and come afterwards; its passes then count as used."""

    def rest() -> Steps:
        out = yield whole(2, (5,), heads=1)
        yield Commit("token", ((yield Read("next", out)),))
        yield Commit("token", (9,))

    def steps() -> Steps:
        out = yield whole(heads=1)
        _, other = yield Fork((rest(), whole(2, (6,))), (1, 2))
        yield Join((other,))  # the first process has asked by then
        yield Commit("token", (8,))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps(), 4)
    assert len(run.work.tokens) == 4
    assert (run.work.tokens[0], run.work.tokens[3]) == (8, 9)
    assert {each.fate for each in run.spans if each.unit < 2} == {"kept"}


def test_options_of_a_run_work_as_in_one_process(three: Any) -> None:
    sampling, random_draws, log, times = Sampling(0.5), RandomDraws(3, 4), list[Any](), RunTimes()
    run = Parallel(three, sampling=sampling, random_draws=random_draws, log=log, times=times, record=True)
    assert (run.sampling, run.random_draws, run.log, run.times, run.answers) == (sampling, random_draws, log, times, None)
    run.run(forked(whole(2, (5,))), 1)
    assert [*run.decoders] == ["target"]
    assert Parallel(three).recording is False


def test_stop_ends_a_process_with_its_sub_processes() -> None:
    """The rows that it was to write become unknown, its unit is free, and passes that had not begun are not made."""
    tasks: dict[str, Any] = {}
    four: Any = AtOnce(4)

    def inner() -> Steps:
        yield whole(2, (6,))
        yield whole(3, (6,))

    def outer() -> Steps:
        yield whole(2, (5,))
        [tasks["inner"]] = yield Fork((inner(),), (2,))
        yield whole(3, (5,))

    def steps() -> Steps:
        out = yield whole(heads=1)
        tasks["outer"], tasks["other"] = yield Fork((outer(), whole(2, (7,))), (1, 3))
        yield Join((tasks["other"],))
        yield Stop((tasks["outer"], tasks["other"]))
        yield Stop((tasks["outer"],))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(four, steps())
    outer_, inner_, other = (tasks[name] for name in ("outer", "inner", "other"))
    assert (outer_.ended, outer_.stopped, inner_.ended, inner_.stopped) == (True,) * 4
    assert (other.ended, other.stopped) == (True, False)
    assert run.free == [False, True, True, True]
    assert (four.tags[1, :, 3] == UNKNOWN_ROWS).all()
    assert four.board.slots[1][1][STOPPED] == 1
    assert not any(post.flights for post in four.posts.values())
    passes = [each for each in run.spans if each.process == outer_.number and each.what == "forward"]
    assert [each.fate for each in passes] == ["discarded", "cancelled"]
    with pytest.raises(StopIteration):
        outer_.body.send(None)


def test_sub_process_kept_after_a_stop_ends_with_its_parent() -> None:
    """A process stops one of its two sub-processes; the other ends when the process is stopped."""
    tasks: list[Any] = []
    five: Any = AtOnce(5)

    def outer() -> Steps:
        yield whole(2, (5,))
        tasks.extend((yield Fork((whole(3, (6,)), whole(3, (7,))), (2, 3))))
        yield Stop((tasks[0],))
        yield whole(3, (5,))

    def steps() -> Steps:
        out = yield whole(heads=1)
        [tasks_outer] = yield Fork((outer(),), (1,))
        yield Forward("target", (9,), 2, LayerSpan(0, LAYERS))
        yield Join((yield Fork((whole(3, (8,)),), (4,))))
        assert [each.stopped for each in tasks] == [True, False]
        assert tasks_outer.started == [tasks[1]]
        yield Stop((tasks_outer,))
        assert [each.stopped for each in tasks] == [True, True]
        yield Commit("token", ((yield Read("next", out)),))

    ran(five, steps())


def test_sub_process_has_separate_rows(three: Any) -> None:
    """Rows that it writes after its parent's are not its parent's."""

    def process() -> Steps:
        yield whole(2, (5,))
        yield whole(3, (6,))

    def steps() -> Steps:
        yield whole()
        subs = yield Fork((process(),), (1,))
        yield whole(2, (9,))
        yield Join(subs)
        out = yield whole(3, (7,), heads=1)
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps())
    assert run.work.tokens == Real({"target": three.decoder}).run(steps(), 1).tokens
    assert three.tags[0, 0, :5].tolist() == [1, 1, 2, 5, 0]
    assert three.tags[1, 0, :5].tolist() == [1, 1, 3, 4, 0]


def test_pass_on_unit_0_that_awaits_rows_drives_other_processes(three: Any) -> None:
    """The rows come from a worker."""
    make, looked = three.unit.make, list[bool]()

    def made(command: Command, stopped: Any = None, meanwhile: Any = None) -> Any:
        looked.append(meanwhile is not None)
        return make(command, stopped, meanwhile)

    def other() -> Steps:
        yield whole(3, (6,))

    def rest() -> Steps:
        yield whole(2, (5,))
        yield Join((yield Fork((other(),), (None,))))
        yield Commit("token", (8,))

    def steps() -> Steps:
        yield whole()
        yield Fork((rest(),), (1,))

    three.unit.make = made
    assert ran(three, steps()).work.tokens == [8]
    assert looked == [False, True]


def test_logits_of_workers_are_not_recomputed(three: Any) -> None:
    """Reads use the worker's logits."""
    wait = three.wait

    def waited(start: float) -> None:
        wait(start)
        three.memory.logits[1] = torch.arange(29.0) == 11

    def steps() -> Steps:
        yield whole()
        [made] = yield Join((yield Fork((whole(2, (5,), heads=1),), (1,))))
        yield Commit("token", ((yield Read("next", made)),))

    three.wait = waited
    assert ran(three, steps()).work.tokens == [11]


def test_one_of_several_hypotheses_is_adopted(three: Any) -> None:
    """Its rows move to the position of the first hypothesis; the rows on the unit that made them become unknown."""
    calls: list[Any] = []
    finish = three.unit.finish
    three.unit.finish = lambda *how: (calls.append("finished"), finish(*how))

    def steps() -> Steps:
        yield whole()
        subs = yield Fork((whole(2, (5, 6), tree=(-1, -1)),), (1,))
        yield Join(subs)
        calls.clear()
        taken = three.memory.rows[1][..., 3, :].clone()
        yield Adopt(subs[0], 2, LAYERS, 1)
        assert calls == ["finished"]  # before they may be overwritten
        assert three.memory.rows[0][..., 2, :].equal(taken)
        assert (three.tags[1, :, 2:4] == UNKNOWN_ROWS).all()
        assert (three.tags[1, :, :2] == 1).all()
        assert three.tags[0, 0, :4].tolist() == [1, 1, 2, 0]
        assert (three.since[0, :, 2] == 0).all()
        yield Commit("token", (3,))

    assert ran(three, steps()).work.account.adopted_rows == LAYERS


@pytest.mark.parametrize("middle", [False, True])
def test_sub_process_on_unit_0_may_be_stopped(three: Any, middle: bool) -> None:
    """Before its pass or in the middle of it: the rows that it was to copy or to make become unknown."""
    subs: list[Any] = []
    make, finish, finished = three.unit.make, three.unit.finish, list[Any]()
    three.unit.finish = lambda *how: (finished.append(how), finish(*how))

    def made(command: Command, *more: Any) -> Any:
        if command.tokens == (6,):
            assert middle, "what was stopped before is not made"
            three.wait(0.0)  # by now the other process has made its pass
        return make(command, *more)

    def other() -> Steps:
        yield whole(3, (6,))

    def rest() -> Steps:
        yield whole(2, (5,))
        subs.extend((yield Fork((other(),), (None,))))
        if middle:
            yield whole(3, (7,))
        yield Stop(tuple(subs))
        if not middle:
            yield whole(3, (7,))
        yield Commit("token", (8,))

    def steps() -> Steps:
        yield whole()
        yield Fork((rest(),), (1,))

    three.unit.make = made
    run = ran(three, steps())
    assert (run.work.tokens, subs[0].unit, subs[0].stopped) == ([8], 0, True)
    assert (three.tags[0, :, 2:4] == UNKNOWN_ROWS).all()
    assert (three.tags[0, :, :2] != UNKNOWN_ROWS).all()
    passes = [each.fate for each in run.spans if (each.unit, each.what, each.process) == (0, "forward", subs[0].number)]
    assert passes == ["cancelled"] * middle
    assert finished == [()] * (1 + middle)  # launched work is awaited in any case
    assert all(run.free)


def test_missing_rows_and_abandoned_passes_end_the_run(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Parallel(three)
    three.patience = 0.0
    with pytest.raises(ProcessError, match="rows did not arrive within 0 s; the run is over"):
        run._meanwhile(over_processes.time.perf_counter() - 1)
    three.patience = 60.0
    with monkeypatch.context() as patch:
        patch.setattr(over_processes, "time", SimpleNamespace(perf_counter=lambda: 100.0))
        run._meanwhile(40.0)
        with pytest.raises(ProcessError, match="rows did not arrive within 60 s"):
            run._meanwhile(39.999)
    monkeypatch.setattr(three, "wait", lambda _: three.board.words[1].__setitem__(DONE, 1))
    with pytest.raises(ProcessError, match="the process of unit 1 gave up a pass that was not stopped; the run is over"):
        ran(three, forked(whole(2, (5,))))


def test_forms_of_the_paper_generate_the_same_tokens(three: Any) -> None:
    expected = real_models.reference_tokens(real_models.model("llama", LAYERS), [3, 4], 8)
    for form, layer in (("literal", 3), ("eager", 3)):
        parameters = ppd.Parameters(LAYERS, layer, 2, form)
        pool: Any = AtOnce(3)
        run = ran(pool, ppd.decode(parameters, [3, 4], 8), 8)
        alone = Real({"target": pool.decoder}).run(ppd.decode(parameters, [3, 4], 8), 8)
        assert run.work.tokens == alone.tokens == expected
        assert (run.work.account, run.work.forks) == (alone.account, alone.forks)

def test_no_pass_is_posted_after_the_last_token(three: Any) -> None:
    """Running passes of workers are then stopped, and their output is not used."""

    def steps() -> Steps:
        out = yield whole(heads=1)
        yield Fork((whole(2, (5,)), whole(2, (6,))), (1, 2))
        out = yield Forward("target", (4,), 1, LayerSpan(0, LAYERS), heads=1)
        yield Commit("token", ((yield Read("next", out)),))
        raise AssertionError("it is over")

    for record in (True, False):
        run = ran(three, steps(), record=record)
        assert len(run.work.tokens) == 1
        assert [slot[STOPPED] for slot in (three.board.slots[1][0], three.board.slots[2][0])] == [1, 1]
        assert not any(post.flights for post in three.posts.values())
        assert (three.tags[1, :, 2] == UNKNOWN_ROWS).all()
        assert (three.tags[1, :, :2] == UNKNOWN_ROWS).all()  # they may or may not have been copied
        three = AtOnce(3)


def test_forked_process_starts_before_the_next_join_stop_or_adopt(three: Any) -> None:
    """So it starts from its parent's rows at the fork."""

    def stopping() -> Steps:
        yield whole()
        yield Stop((yield Fork((whole(2, (5,)),), (1,))))

    run = ran(three, stopping())
    assert [number for number, _ in three.told] == [1]
    assert [each.fate for each in run.spans if each.unit == 1] == ["cancelled"]

    def adopting() -> Steps:
        yield whole()
        one = yield Fork((whole(2, (5,)),), (1,))
        yield Join(one)
        yield Fork((whole(3, (6,)),), (2,))  # after a position that does not exist yet
        yield Adopt(one[0], 2, LAYERS)
        yield whole(3, (7,))

    def without_layers() -> Steps:
        yield whole()
        yield Fork((whole(3, (6,)),), (1,))
        yield Forward("target", (7,), 2, LayerSpan(0, 0))
        yield whole(2, (7,))

    for early in (adopting, without_layers):
        with pytest.raises(CacheError, match="position 3"):
            ran(AtOnce(3), early())


def test_forced_tokens_are_translated_to_the_vocabulary(three: Any) -> None:
    """Positions of a sequence, or negative if wrong, become one of 29 tokens."""
    world: Any = SimpleNamespace(read=lambda _: -4)

    def steps() -> Steps:
        out = yield whole(0, (30, -2), heads=1)
        token = yield Read("next", out)
        yield Join((yield Fork((whole(2, (token,)),), (1,))))
        yield Commit("token", (token,))

    assert ran(three, steps(), answers=world).work.tokens == [-4]
    assert [command.tokens for _, command in three.told] == [(25,)]


def test_single_passes_are_read_and_free_their_unit(three: Any) -> None:
    """Three single passes run in turn on the first unit; their reads equal those of one process."""
    taken: list[torch.Tensor] = []

    def steps() -> Steps:
        out = yield whole(heads=1)
        written = [(yield Read("next", out))]
        for at in (2, 3, 4):
            subs = yield Fork((whole(at, (written[-1],), heads=1), whole(at, (9,), heads=1)), (None, None))
            made = yield Join(subs)
            yield Adopt(subs[at % 2], at, LAYERS)
            taken.append(three.memory.rows[0].clone())
            written.append((yield Read("next", made[at % 2])))
        yield Commit("token", tuple(written))

    run = ran(three, steps(), 4)
    alone = Real({"target": three.decoder}).run(steps(), 4)
    assert run.work.tokens == alone.tokens
    assert len({*alone.tokens}) > 2
    for at, rows in zip((2, 3, 4), taken, strict=False):
        assert rows[..., at, :].all()
        assert not rows[..., at + 1 :, :].any()  # one position, and none after it
    assert run.work.account == alone.account
    assert [number for number, _ in three.told] == [1, 2] * 3
    assert run.free == [False, True, True]


def test_main_process_polls_in_its_pass_only_if_others_may_need_it(three: Any) -> None:
    """It does while a process runs that may fork; for a process that only follows its rows it publishes each layer."""
    make, finish, said = three.unit.make, three.unit.finish, list[Any]()
    given: list[Any] = []

    def made(command: Command, stopped: Any = None, meanwhile: Any = None) -> Any:
        assert (stopped is None) == (meanwhile is None)
        given[:] = stopped, meanwhile
        said.append((command.at, command.announces_layers, meanwhile is not None))
        if meanwhile is not None:
            assert not stopped()
        return make(command, stopped, meanwhile)

    def over(stopped: Any = None, meanwhile: Any = None) -> None:
        said.append(meanwhile is not None)
        assert [stopped, meanwhile] == given
        finish(stopped, meanwhile)

    three.unit.make, three.unit.finish = made, over

    def process() -> Steps:
        yield whole(4, (6,))

    def steps() -> Steps:
        out = yield whole(heads=1)
        yield whole(2, (5,))
        subs = yield Fork((whole(3, (5,)),), (1,))  # it reads existing rows
        yield whole(3, (5,))
        yield Join(subs)
        subs = yield Fork((Forward("target", (5,), 5, LayerSpan(0, 3)),), (1,))  # it reads rows of this pass
        yield whole(4, (5,))
        yield Join(subs)
        subs = yield Fork((process(),), (1,))
        yield whole(5, (5,))
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))

    ran(three, steps())
    assert said == [
        (0, False, False), False, (2, False, False), False, (3, False, False), False, (4, True, False), False,
        (5, True, True), True,
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high", "stop", "source", "refused"), [
    (0, 3, 2, 0, True), (0, 3, 1, 0, False), (0, 3, 2, 1, False), (3, 5, 2, 0, False), (2, 5, 2, 0, True), (0, 1, 2, 0, False),
    (0, 2, 2, 0, True),
])  # fmt: skip
def test_rows_are_kept_until_they_are_copied(
    three: Any, low: int, high: int, stop: int, source: int, refused: bool
) -> None:
    """A pass from position 1 on, through layers 1 and 2, does not replace earlier positions or other layers."""
    run, task = Parallel(three), _UnitProcess(whole(2), None, 2)
    command = Command(1, (5,), 2, low, high, 0, None, (MissingRows(source, low, high, 0, stop),), 0)
    flight = Flight(task, whole(2), command, 0, 0.0)
    three.posts[2].flights.append(flight)
    step = Forward("target", (7,), 1, LayerSpan(1, 3))
    if refused:
        with pytest.raises(CacheError, match="target: a pass at position 1 replaces rows that a sub-process is copying"):
            run._protect(0, step)
        flight.stopped = True
    run._protect(0, step)


# --- units ---


def test_unit_refuses_other_passes_and_rows(three: Any) -> None:
    unit: Unit = three.unit
    nothing = worker_loop.tags_checksum(b"")
    unit.make(Command(1, (3, 4), 0, 0, 3, 0, None, (), nothing))
    with pytest.raises(CacheError, match="unit 0 is to go on from pass 7, but made 1 last"):
        unit.make(Command(2, (3, 4), 0, 3, LAYERS, 0, 7, (), nothing))
    unit.make(Command(2, (3, 4), 0, 3, LAYERS, 0, 1, (), nothing))
    believed = worker_loop.tags_checksum(np.array([[1, 1]] * 3).tobytes())
    with pytest.raises(CacheError, match="unit 0: pass 3 at position 2 saw other rows than it should have"):
        unit.make(Command(3, (5,), 2, 0, 4, 0, None, (), believed))
    unit.make(Command(4, (5,), 2, 0, 3, 0, None, (), believed))
    assert unit.tags[:3, :3].tolist() == [[1, 1, 4]] * 3
    assert unit.tags[3:, :2].tolist() == [[2, 2]] * 2
    assert unit.stamps.tolist() == [4, 4, 4, 3, 2]
    unit.rows.layers[1].length = 4
    with pytest.raises(CacheError, match="unit 0: layer 1 should hold 3 positions, it holds 4"):
        unit._check(Command(4, (5,), 2, 0, 3, 0, None, (), believed), believed)
    with pytest.raises(CacheError, match="rows up to position 17 do not fit the shared buffer"):
        unit.make(Command(5, (5,) * 17, 0, 0, LAYERS, 0, None, (), nothing))
    fresh = Unit(1, three.decoder, three.memory)
    with pytest.raises(CacheError, match="unit 1 is to go on from pass None"):
        fresh.make(Command(1, (3,), 0, 3, LAYERS, 0, None, (), nothing))
    calls: list[str] = []

    def stopped() -> bool:
        calls.append("asked")
        return len(calls) > 4

    with pytest.raises(gpu_ordering.PassStopped):
        fresh.make(Command(1, (3,), 0, 0, LAYERS, 0, None, (), nothing), stopped, lambda: calls.append("meanwhile"),
                   lambda: calls.append("ready"))  # fmt: skip
    assert calls == ["ready", "asked", "meanwhile", "asked", "meanwhile", "asked"]
    assert (fresh.tags[:, 0] == [1, 0, 0, 0, 0]).all()  # layer by layer; later layers have no pass yet
    assert fresh.stamps.tolist() == [1, 0, 0, 0, 0]


def test_follower_copies_each_layer_once_it_exists(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = three.workers[:2]
    seen = worker_loop.tags_checksum(np.full((LAYERS, 2), 7).tobytes())
    looks: list[int] = []

    def meanwhile() -> None:
        looks.append(1)
        if len(looks) == 4:
            one.make(Command(7, (3, 4), 0, 0, LAYERS, 0, None, (), worker_loop.tags_checksum(b"")))

    other.make(Command(8, (9,), 2, 0, LAYERS, 0, None, (MissingRows(0, 0, LAYERS, 0, 2, (7,) * LAYERS),), seen), None, meanwhile)
    assert three.memory.rows[0][..., :2, :].equal(three.memory.rows[1][..., :2, :])
    assert (other.tags[:, :3] == [7, 7, 8]).all()
    later = Command(9, (9,), 2, 0, LAYERS, 0, None, (MissingRows(0, 0, LAYERS, 0, 2, (99,) * LAYERS),), seen)
    asked = iter([False] * 3)
    with pytest.raises(gpu_ordering.PassStopped):
        other.make(later, lambda: next(asked, True))
    monkeypatch.setattr(os, "getppid", lambda: -1)  # the process that writes them is gone
    with pytest.raises(gpu_ordering.PassStopped):
        other.make(later)
