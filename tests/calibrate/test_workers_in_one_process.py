"""Runs over processes whose workers are in this very process: what they are told, what becomes of it and what is said of it.

Nothing is left to a clock: a worker makes its pass when the main process waits for somebody.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
from collections import deque
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.interpreters.in_one_process import Luck, Real, RunTimes, Sampling
from calibrate.loading.replicas import Replica
from calibrate.timing import busy_neighbours, single_pass
from calibrate.timing.busy_neighbours import Companions, Spec
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import over_processes, worker_loop
from calibrate.workers import worker_pool as pool_of
from calibrate.workers.over_processes import GONE, Parallel, _UnitProcess
from calibrate.workers.worker_loop import (
    DONE,
    LENGTH,
    MADE,
    SLOTS,
    STATUS,
    STOPPED,
    Board,
    Command,
    MissingRows,
    Orders,
    SharedState,
    Unit,
)
from calibrate.workers.worker_pool import Flight, Post, ProcessError
from model.base.checks import ParameterError
from model.methods.ppd import algorithm as ppd
from model.steps import Adopt, CacheError, Commit, Fork, Forward, Join, Read, Steps, Stop
from tests.support import real_models
from tests.support.workers import PATIENCE, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = real_models.DEPTHS["target"]


class AtOnce:
    """In the place of a pool: its workers are units of this process."""

    def __init__(self, count: int, capacity: int = 16) -> None:
        self.decoder = real_models.decoders("llama")["target"]
        self.units, self.capacity, self.patience = count, capacity, 60.0
        self.board, self.memory = Board(count), SharedState.of(self.decoder, count, capacity)
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

    def look(self, _: Any) -> None:
        """Nobody has failed."""

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
    return Forward("target", tokens, at, 0, LAYERS, **more)


def test_each_stretch_of_time_says_whose_it_was(three: Any) -> None:
    """A candidate is taken over, another one is not used, a third is stopped."""

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
    assert before <= run.begun <= before + took
    assert 0 < run.seconds <= took
    assert all(run.begun <= each.start for each in run.spans if each.unit == 0)
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
    # Of a worker that lacks rows: from where they lie, and which passes of whom they are of.
    (unit, first), (_, second), (_, third) = three.told
    assert (unit, first.tokens, first.at, first.first, first.last, first.heads, first.followed) == (1, (5,), 2, 0, 5, 1, False)
    assert first.pieces == (MissingRows(0, 0, 5, 0, 2),)
    assert second.pieces == first.pieces
    assert third.pieces == (MissingRows(0, 0, 5, 2, 3),)  # the one that was taken over, not its own
    assert run.work.account.adoptions == 1
    assert run.work.account.adopted_rows == LAYERS
    assert run.work.forks == 3
    assert ran(three, steps(), 2, record=False).spans == []


def test_rows_that_are_still_being_made_are_waited_for_layer_by_layer(three: Any) -> None:
    """They are said with the passes that make them; those that are there are not."""

    def steps() -> Steps:
        yield whole()
        subs = yield Fork((Forward("target", (5,), 3, 0, 3),), (1,))
        out = yield Forward("target", (9,), 2, 0, 4, heads=1)
        yield Join(subs)
        yield Commit("token", ((yield Read("next", out)),))

    run = Parallel(three)
    run.run(steps(), 1)
    [(_, command)] = three.told
    assert command.pieces == (MissingRows(0, 0, 3, 0, 3, (2, 2, 2)),)
    assert command.serial == 3
    assert command.believed == worker_loop.believed_of(np.array([[1, 1, 2]] * 3).tobytes())


def test_rows_are_taken_from_wherever_they_lie(three: Any) -> None:
    """From the starter where that has them all; or each from whoever has it, the starter first."""
    run = Parallel(three)
    main = _UnitProcess(iter(()), None, 0)  # type: ignore[arg-type]
    sub = _UnitProcess(whole(4), main, 2)
    three.tags[:] = 0
    three.tags[0, :2, 1:4] = three.tags[1, :2, 1:4] = want = np.array([[4, 5, 6], [4, 5, 6]])
    asked = (sub, 2, (0, 2), (1, 4), want)
    assert run._pieces(*asked) == (MissingRows(0, 0, 2, 1, 4),)
    three.tags[0, 1, 2] = 9  # nobody else lacks it
    assert run._pieces(*asked) == (MissingRows(1, 0, 2, 1, 4),)
    three.tags[1, 0, 1], three.tags[2, 0, 3] = 9, 6
    assert run._pieces(*asked) == (
        MissingRows(0, 0, 1, 1, 2), MissingRows(0, 0, 1, 2, 3), MissingRows(0, 1, 2, 1, 2), MissingRows(1, 1, 2, 2, 3),
        MissingRows(0, 1, 2, 3, 4),
    )  # fmt: skip
    three.tags[1, 1, 2] = 9
    with pytest.raises(CacheError, match="rows of layer 1 at position 2, which unit 2 lacks, are nowhere any more"):
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
    """A sub-process that takes over what one of its own has made."""
    subs = yield Fork((whole(2, (5,)),), (2,))
    yield Join(subs)
    yield Adopt(subs[0], 2, LAYERS)


def crossing() -> Steps:
    """A pass goes on, on another unit than the one that made it."""
    out = yield Forward("target", (3, 4), 0, 0, 3)
    yield Join((yield Fork((Forward("target", (3, 4), 0, 3, LAYERS, out),), (1,))))


def two_at_once() -> Steps:
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    other = yield Fork((whole(2, (6,)),), (1,))
    yield Join((*one, *other))


def nobody_ends() -> Steps:
    """Each waits for a process that waits for it."""
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
    """Its unit makes another pass there before what it has made is taken over."""
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    yield Join(one)
    yield Join((yield Fork((whole(2, (6,)),), (1,))))
    yield Adopt(one[0], 2, LAYERS)


def too_early() -> Steps:
    """What a sub-process is still at is taken over."""
    yield whole()
    one = yield Fork((whole(2, (5,)),), (1,))
    yield Adopt(one[0], 2, LAYERS)


def overwriting() -> Steps:
    """What a worker has yet to copy is replaced."""
    yield whole()
    yield Fork((whole(2, (5,)),), (1,))
    yield Read("next", (yield Forward("target", (7,), 2, 0, LAYERS, heads=1)))
    yield Forward("target", (8,), 1, 0, LAYERS)


def homeless() -> Steps:
    yield whole()
    yield Join((yield Fork(tuple(whole(2, (token,)) for token in (5, 6, 7)), (None,) * 3)))


@pytest.mark.parametrize(("steps", "error", "said"), [
    (forked(nested()), CacheError, "only the main process takes over what a sub-process has made"),
    (crossing(), CacheError, "target: unit 1 cannot go on from what unit 0 made"),
    (two_at_once(), CacheError, "unit 1 is to make a pass while it makes another one"),
    (nobody_ends(), CacheError, "came to a halt before it had put out all its tokens"),
    (spoiled(), CacheError, "rows at position 2 of unit 1 are no longer those of the process that is taken over"),
    (too_early(), CacheError, "a task that has not ended cannot be taken over; join it first"),
    (overwriting(), CacheError, "target: a pass at position 1 replaces rows that a sub-process is copying"),
    (homeless(), CacheError, "a single pass that may be anywhere found no unit that is free"),
    (forked(whole(2, (5,)), where=(3,)), ParameterError, "units must be at least 4, as .* on unit 3, got 3; start more"),
    (forked(whole(2, (5,)), where=(0,)), ParameterError, "units must be at least 1, as"),
    (forked(whole(15, (5, 6))), ParameterError, "must fit the capacity=16, got at least 17 positions; start the processes with"),
    (forked(Forward("target", (5,), 2, 0, LAYERS + 1)), ParameterError, "layers of the target must be 5, as .* got at least 6"),
    (forked(Forward("draft", (5,), 2, 0, 1)), ParameterError, "has the target alone, and the algorithm asks for the draft model"),
    *((forked(whole(2, (5, 6), **more)), ParameterError, "makes plain passes of one text alone; the algorithm asks for others")
      for more in ({"texts": (0, 1)}, {"gaps": ((1, 2),)}, {"rows_only": True}, {"compared": 1}, {"unit": 1}, {"after": (-1, 0)},
                   {"after": (-1, -1), "heads": 2})),
    (forked(Forward("target", (5, 6), 2, 1, LAYERS, after=(-1, -1))), ParameterError, "makes plain passes of one text alone"),
])  # fmt: skip
def test_what_an_algorithm_must_not_ask_for_is_said(three: Any, steps: Steps, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ran(three, steps)
    assert three.broken
    with pytest.raises(ProcessError, match="they are broken"):
        ran(three, forked())


def test_the_last_position_and_the_last_unit_may_be_used(three: Any) -> None:
    def steps() -> Steps:
        out = yield whole(heads=1)
        yield Join((yield Fork((whole(2, (5,) * 14), whole(2, (5, 6), after=(-1, -1))), (2, 1))))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps())
    assert len(run.work.tokens) == 1
    wide = [each for each in run.spans if each.what == "forward" and each.unit == 1]
    assert [(each.width, each.position, each.depth) for each in wide] == [(2, 2, 1)]  # hypotheses of one position

    def heirs() -> Steps:
        subs = yield Fork((whole(0, (5,)),), (1,))
        yield Join(subs)
        yield Fork((whole(1, (6,)),), (1,), (subs[0],))

    with pytest.raises(ParameterError, match="no sub-process with the cache of an ended one, as beam search does"):
        ran(three, heirs())


def test_who_may_be_anywhere_waits_for_the_first_unit_that_is_free(three: Any) -> None:
    """Three processes on two units, in the order in which they were started; one that is stopped meanwhile never begins."""
    at: list[tuple[str, int]] = []

    def body(name: str) -> Steps:
        yield whole(2, (5,))
        at.append((name, 0))

    def steps() -> Steps:
        out = yield whole(heads=1)
        subs = yield Fork(tuple(map(body, "abcd")), (None,) * 4)
        yield Forward("target", (7,), 2, 0, LAYERS)
        yield Stop((subs[2],))
        yield Join((subs[0], subs[1], subs[3]))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps())
    assert [name for name, _ in at] == ["a", "b", "d"]
    assert [number for number, _ in three.told] == [1, 2, 1]
    assert run.free == [False, True, True]


def test_a_sub_process_writes_once_all_that_it_came_of_is_over(three: Any) -> None:
    """What it says earlier waits, and comes behind; then its own passes count as used."""

    def rest() -> Steps:
        out = yield whole(2, (5,), heads=1)
        yield Commit("token", ((yield Read("next", out)),))
        yield Commit("token", (9,))

    def steps() -> Steps:
        out = yield whole(heads=1)
        _, other = yield Fork((rest(), whole(2, (6,))), (1, 2))
        yield Join((other,))  # by then the first one has asked
        yield Commit("token", (8,))
        yield Commit("token", ((yield Read("next", out)),))

    run = ran(three, steps(), 4)
    assert len(run.work.tokens) == 4
    assert (run.work.tokens[0], run.work.tokens[3]) == (8, 9)
    assert {each.fate for each in run.spans if each.unit < 2} == {"kept"}


def test_what_a_run_is_given_is_that_of_one_process(three: Any) -> None:
    sampling, luck, log, times = Sampling(0.5), Luck(3, 4), list[Any](), RunTimes()
    run = Parallel(three, sampling=sampling, luck=luck, log=log, times=times, record=True)
    assert (run.sampling, run.luck, run.log, run.times, run.answers) == (sampling, luck, log, times, None)
    run.run(forked(whole(2, (5,))), 1)
    assert [*run.decoders] == ["target"]
    assert Parallel(three).recording is False


def test_who_is_stopped_ends_with_all_that_it_has_started() -> None:
    """Rows that it was to write are of nobody, and its unit is free; what was not begun is not made."""
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
    assert (four.tags[1, :, 3] == GONE).all()
    assert four.board.slots[1][1][STOPPED] == 1
    assert not any(post.flights for post in four.posts.values())
    passes = [each for each in run.spans if each.process == outer_.number and each.what == "forward"]
    assert [each.fate for each in passes] == ["discarded", "cancelled"]
    with pytest.raises(StopIteration):
        outer_.body.send(None)


def test_who_goes_on_behind_a_stop_takes_the_others_along_when_stopped() -> None:
    """Of two that a process has started it stops one; the other ends with it."""
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
        yield Forward("target", (9,), 2, 0, LAYERS)
        yield Join((yield Fork((whole(3, (8,)),), (4,))))
        assert [each.stopped for each in tasks] == [True, False]
        assert tasks_outer.started == [tasks[1]]
        yield Stop((tasks_outer,))
        assert [each.stopped for each in tasks] == [True, True]
        yield Commit("token", ((yield Read("next", out)),))

    ran(five, steps())


def test_who_is_started_has_rows_of_its_own(three: Any) -> None:
    """What it writes behind its starter's rows is not its starter's."""

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


def test_who_lacks_rows_where_the_main_process_was_looks_up_meanwhile(three: Any) -> None:
    """They come from a worker."""
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


def test_looks_of_workers_are_taken_as_they_came(three: Any) -> None:
    """What a worker says of its pass is not computed again."""
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


def test_one_of_several_hypotheses_is_taken_over(three: Any) -> None:
    """Its rows come to the position of the first; of those where they were made nothing is known from then on."""
    calls: list[Any] = []
    finish = three.unit.finish
    three.unit.finish = lambda *how: (calls.append("finished"), finish(*how))

    def steps() -> Steps:
        yield whole()
        subs = yield Fork((whole(2, (5, 6), after=(-1, -1)),), (1,))
        yield Join(subs)
        calls.clear()
        taken = three.memory.rows[1][..., 3, :].clone()
        yield Adopt(subs[0], 2, LAYERS, 1)
        assert calls == ["finished"]  # before anybody may write over them
        assert three.memory.rows[0][..., 2, :].equal(taken)
        assert (three.tags[1, :, 2:4] == GONE).all()
        assert (three.tags[1, :, :2] == 1).all()
        assert three.tags[0, 0, :4].tolist() == [1, 1, 2, 0]
        assert (three.since[0, :, 2] == 0).all()
        yield Commit("token", (3,))

    assert ran(three, steps()).work.account.adopted_rows == LAYERS


@pytest.mark.parametrize("middle", [False, True])
def test_who_is_where_the_main_process_was_may_be_stopped_too(three: Any, middle: bool) -> None:
    """Before its pass is made, or in the middle of it: of the rows that it was to copy or to make nothing is known then."""
    subs: list[Any] = []
    make, finish, finished = three.unit.make, three.unit.finish, list[Any]()
    three.unit.finish = lambda *how: (finished.append(how), finish(*how))

    def made(command: Command, *more: Any) -> Any:
        if command.tokens == (6,):
            assert middle, "what was stopped before is not made"
            three.wait(0.0)  # meanwhile the other one has made its pass
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
    assert (three.tags[0, :, 2:4] == GONE).all()
    assert (three.tags[0, :, :2] != GONE).all()
    passes = [each.fate for each in run.spans if (each.unit, each.what, each.process) == (0, "forward", subs[0].number)]
    assert passes == ["cancelled"] * middle
    assert finished == [()] * (1 + middle)  # what was launched is waited for, whoever stopped it
    assert all(run.free)


def test_rows_that_do_not_come_and_passes_that_nobody_stopped_end_the_run(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Parallel(three)
    three.patience = 0.0
    with pytest.raises(ProcessError, match="rows did not come within 0 s; the run is over"):
        run._meanwhile(over_processes.time.perf_counter() - 1)
    three.patience = 60.0
    with monkeypatch.context() as patch:
        patch.setattr(over_processes, "time", SimpleNamespace(perf_counter=lambda: 100.0))
        run._meanwhile(40.0)
        with pytest.raises(ProcessError, match="rows did not come within 60 s"):
            run._meanwhile(39.999)
    monkeypatch.setattr(three, "wait", lambda _: three.board.words[1].__setitem__(DONE, 1))
    with pytest.raises(ProcessError, match="the process of unit 1 gave up a pass that nobody stopped; the run is over"):
        ran(three, forked(whole(2, (5,))))


def test_forms_of_the_paper_write_the_same_over_units_of_one_process(three: Any) -> None:
    expected = real_models.oracle(real_models.model("llama", LAYERS), [3, 4], 8)
    for form, layer in (("literal", 3), ("eager", 3)):
        parameters = ppd.Parameters(LAYERS, layer, 2, form)
        pool: Any = AtOnce(3)
        run = ran(pool, ppd.decode(parameters, [3, 4], 8), 8)
        alone = Real({"target": pool.decoder}).run(ppd.decode(parameters, [3, 4], 8), 8)
        assert run.work.tokens == alone.tokens == expected
        assert (run.work.account, run.work.forks) == (alone.account, alone.forks)

def test_nothing_is_asked_behind_the_last_token(three: Any) -> None:
    """What workers still do then is stopped, and neither waited for nor missed."""

    def steps() -> Steps:
        out = yield whole(heads=1)
        yield Fork((whole(2, (5,)), whole(2, (6,))), (1, 2))
        out = yield Forward("target", (4,), 1, 0, LAYERS, heads=1)
        yield Commit("token", ((yield Read("next", out)),))
        raise AssertionError("it is over")

    for record in (True, False):
        run = ran(three, steps(), record=record)
        assert len(run.work.tokens) == 1
        assert [slot[STOPPED] for slot in (three.board.slots[1][0], three.board.slots[2][0])] == [1, 1]
        assert not any(post.flights for post in three.posts.values())
        assert (three.tags[1, :, 2] == GONE).all()
        assert (three.tags[1, :, :2] == GONE).all()  # nor is it known whether they were copied
        three = AtOnce(3)


def test_who_is_started_is_started_before_anything_is_waited_for_stopped_or_taken_over(three: Any) -> None:
    """So it has what its starter had then."""

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
        yield Fork((whole(3, (6,)),), (2,))  # behind a position that is not there yet
        yield Adopt(one[0], 2, LAYERS)
        yield whole(3, (7,))

    def without_layers() -> Steps:
        yield whole()
        yield Fork((whole(3, (6,)),), (1,))
        yield Forward("target", (7,), 2, 0, 0)
        yield whole(2, (7,))

    for early in (adopting, without_layers):
        with pytest.raises(CacheError, match="position 3"):
            ran(AtOnce(3), early())


def test_a_worlds_tokens_are_told_as_tokens_of_the_model(three: Any) -> None:
    """Places in a text, or negative where they are wrong: of 29 tokens."""
    world: Any = SimpleNamespace(read=lambda _: -4)

    def steps() -> Steps:
        out = yield whole(0, (30, -2), heads=1)
        token = yield Read("next", out)
        yield Join((yield Fork((whole(2, (token,)),), (1,))))
        yield Commit("token", (token,))

    assert ran(three, steps(), answers=world).work.tokens == [-4]
    assert [command.tokens for _, command in three.told] == [(25,)]


def test_what_was_made_elsewhere_is_read_as_it_is_and_its_unit_is_free_again(three: Any) -> None:
    """Each of three single passes, one after another, on the first unit; what they say is what one process reads."""
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
        assert not rows[..., at + 1 :, :].any()  # one position, and nothing behind it
    assert run.work.account == alone.account
    assert [number for number, _ in three.told] == [1, 2] * 3
    assert run.free == [False, True, True]


def test_the_main_process_looks_up_from_its_pass_only_where_others_may_want_it_to(three: Any) -> None:
    """Where a process that starts others is at work; who only follows its rows is told of them layer by layer."""
    make, finish, said = three.unit.make, three.unit.finish, list[Any]()
    given: list[Any] = []

    def made(command: Command, stopped: Any = None, meanwhile: Any = None) -> Any:
        assert (stopped is None) == (meanwhile is None)
        given[:] = stopped, meanwhile
        said.append((command.at, command.followed, meanwhile is not None))
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
        subs = yield Fork((whole(3, (5,)),), (1,))  # it reads rows that are there
        yield whole(3, (5,))
        yield Join(subs)
        subs = yield Fork((Forward("target", (5,), 5, 0, 3),), (1,))  # it reads rows of this pass
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
def test_rows_are_kept_for_who_has_yet_to_copy_them(
    three: Any, low: int, high: int, stop: int, source: int, refused: bool
) -> None:
    """A pass over position 1 and what follows, through layers 1 and 2: what is before it or in other layers is not replaced."""
    run, task = Parallel(three), _UnitProcess(whole(2), None, 2)
    command = Command(1, (5,), 2, low, high, 0, None, (MissingRows(source, low, high, 0, stop),), 0)
    flight = Flight(task, whole(2), command, 0, 0.0)
    three.posts[2].flights.append(flight)
    step = Forward("target", (7,), 1, 1, 3)
    if refused:
        with pytest.raises(CacheError, match="target: a pass at position 1 replaces rows that a sub-process is copying"):
            run._protect(0, step)
        flight.stopped = True
    run._protect(0, step)


# --- units ---


def test_a_unit_refuses_to_go_on_from_another_pass_or_behind_other_rows(three: Any) -> None:
    unit: Unit = three.unit
    nothing = worker_loop.believed_of(b"")
    unit.make(Command(1, (3, 4), 0, 0, 3, 0, None, (), nothing))
    with pytest.raises(CacheError, match="unit 0 is to go on from pass 7, but made 1 last"):
        unit.make(Command(2, (3, 4), 0, 3, LAYERS, 0, 7, (), nothing))
    unit.make(Command(2, (3, 4), 0, 3, LAYERS, 0, 1, (), nothing))
    believed = worker_loop.believed_of(np.array([[1, 1]] * 3).tobytes())
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

    with pytest.raises(gpu_ordering.GaveUp):
        fresh.make(Command(1, (3,), 0, 0, LAYERS, 0, None, (), nothing), stopped, lambda: calls.append("meanwhile"),
                   lambda: calls.append("ready"))  # fmt: skip
    assert calls == ["ready", "asked", "meanwhile", "asked", "meanwhile", "asked"]
    assert (fresh.tags[:, 0] == [1, 0, 0, 0, 0]).all()  # layer by layer; what follows is of no pass
    assert fresh.stamps.tolist() == [1, 0, 0, 0, 0]


def test_who_follows_takes_each_layer_as_soon_as_it_is_there(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = three.workers[:2]
    seen = worker_loop.believed_of(np.full((LAYERS, 2), 7).tobytes())
    looks: list[int] = []

    def meanwhile() -> None:
        looks.append(1)
        if len(looks) == 4:
            one.make(Command(7, (3, 4), 0, 0, LAYERS, 0, None, (), worker_loop.believed_of(b"")))

    other.make(Command(8, (9,), 2, 0, LAYERS, 0, None, (MissingRows(0, 0, LAYERS, 0, 2, (7,) * LAYERS),), seen), None, meanwhile)
    assert three.memory.rows[0][..., :2, :].equal(three.memory.rows[1][..., :2, :])
    assert (other.tags[:, :3] == [7, 7, 8]).all()
    later = Command(9, (9,), 2, 0, LAYERS, 0, None, (MissingRows(0, 0, LAYERS, 0, 2, (99,) * LAYERS),), seen)
    asked = iter([False] * 3)
    with pytest.raises(gpu_ordering.GaveUp):
        other.make(later, lambda: next(asked, True))
    monkeypatch.setattr(os, "getppid", lambda: -1)  # nobody is left to write them
    with pytest.raises(gpu_ordering.GaveUp):
        other.make(later)


def test_weights_begin_at_multiples_of_64_bytes_heads_included() -> None:
    decoder = tiny("llama").load()
    decoder.heads[2] = torch.arange(29 * 16, dtype=torch.float64).view(29, 16)
    decoder.heads[3] = torch.ones(29 * 8, 16, dtype=torch.float64)
    before = [where.data.clone() if name == "data" else where[name].clone() for where, name in worker_loop.weights_of(decoder)]
    flat = worker_loop.share_weights(decoder)
    now = [where.data if name == "data" else where[name] for where, name in worker_loop.weights_of(decoder)]
    start = flat.data_ptr()
    assert all(one.equal(other) for one, other in zip(before, now, strict=True))
    assert all((each.data_ptr() - start) % 64 == 0 for each in now)
    ends = list(itertools.accumulate(-(-each.numel() * 8 // 64) * 64 for each in now))
    assert [each.data_ptr() - start for each in now] == [0, *ends[:-1]]
    assert (len(flat), flat.dtype) == (ends[-1], torch.uint8)
    assert worker_loop.fingerprint(decoder)[:2] == (LAYERS, 29)
    assert worker_loop.fingerprint(decoder)[3] == [(2, [0.0, 29.0 * 16 - 1]), (3, [1.0, 1.0])]
    assert len(worker_loop.fingerprint(decoder)[2]) == len(now) - 2
    rows: Any = decoder.rows()
    decoder.run((0,), 0, 0, LAYERS, rows)
    rows.layers[0].keys = rows.layers[0].keys[..., :2]
    decoder.rows, decoder.run = lambda: rows, lambda *_: None  # type: ignore[method-assign,assignment]
    with pytest.raises(CacheError, match="layers hold keys and values of unequal shapes, which cannot lie in one buffer"):
        worker_loop.shape_of_rows(decoder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_every_kind_are_copied_as_they_are(dtype: torch.dtype) -> None:
    """In whole numbers of their size; sizes are those of the model, for as many units and positions."""
    shape = (2, 2, 1, 3, 8, 4)
    rows = [torch.randn(shape).to(dtype), torch.zeros(shape, dtype=dtype)]
    counts = [torch.zeros(2, 2, 8, dtype=torch.int64), *(torch.zeros(2, 2, dtype=torch.int64) for _ in range(2))]
    memory = SharedState(rows, [torch.zeros(1), torch.zeros(1), *counts])
    assert memory.capacity == 8
    memory.copy(1, 0, slice(1, 2), slice(2, 4), slice(5, 7))
    assert rows[1][1, ..., 2:4, :].equal(rows[0][1, ..., 5:7, :])
    assert rows[1].count_nonzero() == rows[1][1, ..., 2:4, :].count_nonzero() > 0
    decoder = real_models.decoders("llama", dtype="float32")["target"]
    found = SharedState.of(decoder, 3, 10)
    assert [tuple(each.shape) for each in found.rows] == [(LAYERS, 2, 1, 2, 10, 4)] * 3
    assert [tuple(each.shape) for each in found.tensors[1]] == [(3, 10, 16), (3, 29), (3, LAYERS, 10), (3, LAYERS), (3, LAYERS)]
    assert {each.dtype for each in (*found.rows, *found.tensors[1][:2])} == {torch.float32}
    assert all(each.is_shared() for each in (*found.rows, *found.tensors[1]))


class Left(BaseException):
    """In the place of the end of a process."""


@pytest.mark.parametrize(("happens", "code", "said"), [
    (None, 0, None), (EOFError(), 1, None), (BrokenPipeError(), 1, None), (ConnectionResetError(), 1, None),
    (ValueError("too\nmany"), 1, ("failed", "ValueError: too")), (KeyError(), 1, ("failed", "KeyError: ")),
])  # fmt: skip
def test_a_worker_says_why_it_ends(happens: BaseException | None, code: int, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Worker:
        def __init__(self, *given: Any) -> None:
            done.append(given)

        def serve(self) -> None:
            assert torch.is_inference_mode_enabled()
            if happens is not None:
                raise happens

    def leave(code: int) -> None:
        done.append(code)
        raise Left

    monkeypatch.setattr(worker_loop, "_Worker", Worker)
    monkeypatch.setattr(worker_loop.signal, "signal", lambda *what: done.append(what))
    monkeypatch.setattr(worker_loop.gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(worker_loop, "_end_with_parent", lambda: done.append("ends"))
    monkeypatch.setattr(worker_loop.os, "_exit", leave)
    end: Any = SimpleNamespace(send=done.append)
    orders = Orders(1, 2, None, 0.0)
    with pytest.raises(Left):
        worker_loop.work(end, orders)
    expected = [(worker_loop.signal.SIGINT, worker_loop.signal.SIG_IGN), "frozen", "ends", (end, orders)]
    assert done == [*expected, *([] if said is None else [said]), code]


def test_a_worker_ends_with_the_server_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ends it by SIGKILL when the server ends, which it does not keep alive itself."""
    import ctypes

    closed, asked = list[int](), list[Any]()
    monkeypatch.setattr(worker_loop.os, "close", closed.append)
    monkeypatch.setattr(forkserver, "_forkserver", server := SimpleNamespace(_forkserver_alive_fd=77))
    system = SimpleNamespace(prctl=lambda *what: asked.append(what))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: system)
    worker_loop._end_with_parent()
    assert (closed, server._forkserver_alive_fd) == ([77], None)
    worker_loop._end_with_parent()
    assert closed == [77]
    assert asked == [(1, 9, 0, 0, 0)] * 2

class Pipe:
    """The worker's end of a pipe: what it is told, one after another, and what it says."""

    def __init__(self, *told: Any) -> None:
        self.told = deque(each if isinstance(each, bytes) else pickle.dumps(each) for each in told)
        self.said: list[Any] = []
        self.send = self.send_bytes = self.said.append
        self.naps: list[float] = []

    def recv_bytes(self) -> bytes:
        return self.told.popleft()

    def poll(self, nap: float) -> bool:
        self.naps.append(nap)
        return bool(self.told)


def working(monkeypatch: pytest.MonkeyPatch, kind: str = "llama", **orders: Any) -> tuple[Any, Any, Any, SharedState]:
    """A worker that has a board and a model, its pipe, the board and the memory of the main process."""
    monkeypatch.setattr(Replica, "load", lambda self: real_models.decoders(self.model)["target"])
    monkeypatch.setattr(worker_loop.gc, "freeze", lambda: None)
    end: Any = Pipe()
    worker = worker_loop._Worker(end, Orders(1, 2, None, 0.0, **orders))
    assert end.said.pop() == ("up", os.getpid())
    board, memory = Board(2), SharedState.of(real_models.decoders(kind)["target"], 2, 16)
    whole_ = pickle.loads

    def found(said: bytes) -> Any:
        what = whole_(said)
        return HANDED[what] if isinstance(what, int) else what

    monkeypatch.setattr(pickle, "loads", found)
    source = (5, 6) if kind == "t5" else ()
    HANDED.update({0: ("board", board.tensors, []), 1: ("load", Replica(kind), memory.tensors, source, None)})
    end.told += [pickle.dumps(0), pickle.dumps(1)]
    assert worker._hear()
    assert end.said == []
    assert worker._hear()
    assert end.said.pop() == ("load", worker_loop.fingerprint(worker.unit.decoder))
    return worker, end, board, memory


HANDED: dict[int, Any] = {}
"""What goes through pipes of this process, as it is."""


def told(board: Board, place: int, count: int, command: Command, stopped: int = 0) -> None:
    """What the main process does to have a pass made."""
    said = pickle.dumps(command)
    slot = board.slots[1][place]
    board.boxes[1][place][: len(said)] = said
    slot[STOPPED], slot[STATUS], slot[LENGTH] = stopped, 0, len(said)
    board.words[1][worker_loop.POSTED] = count


def test_a_worker_makes_the_passes_that_it_is_told_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, end, board, memory = working(monkeypatch)
    decoder = real_models.decoders("llama")["target"]
    states = decoder.run((3, 4), 0, 0, LAYERS, decoder.rows())
    now = iter(range(10, 100))
    monkeypatch.setattr(worker_loop, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    believed = worker_loop.believed_of(b"")
    with torch.inference_mode():
        for heads, place in ((1, 0), (0, 1)):
            told(board, place, place + 1, Command(7 + place, (3, 4), 0, 0, LAYERS, heads, None, (), believed))
            worker._pass()
            assert (board.slots[1][place][STATUS], board.words[1][DONE], worker.taken) == (MADE, place + 1, place + 1)
        assert memory.states[1, :2].equal(states)
        assert memory.logits[1].equal(decoder.logits(states[-1:], LAYERS)[0])
        memory.logits[1] = 0
        # Taken up, ready to begin once rows are there, and over.
        assert [tuple(board.times[1][place])[:3] for place in (0, 1)] == [(10.0, 11.0, 12.0), (13.0, 14.0, 15.0)]
        assert end.said == []
        board.words[0][worker_loop.LISTENING] = 1
        finished: list[Any] = []
        monkeypatch.setattr(worker.unit, "finish", lambda *how: finished.append(how))
        told(board, 2, 3, Command(9, (3, 4), 0, 0, LAYERS, 0, None, (), believed), stopped=1)
        worker._pass()  # nobody wants it any more
        assert (board.slots[1][2][STATUS], board.words[1][DONE], finished) == (worker_loop.GAVE_UP, 3, [])
        assert end.said == [b"."]
        # Stopped in the middle, or behind rows that were written over meanwhile: what was launched is done.
        for happens in (gpu_ordering.GaveUp(), CacheError("rows are others")):

            def making(command: Command, stopped: Any, meanwhile: Any, ready: Any, happens: Any = happens) -> None:
                assert not stopped()
                assert meanwhile is None
                ready()
                board.slots[1][worker.taken % SLOTS][STOPPED] = 1
                assert stopped()
                raise happens

            monkeypatch.setattr(worker.unit, "make", making)
            told(board, worker.taken % SLOTS, worker.taken + 1, Command(9, (3,), 0, 0, LAYERS, 0, None, (), believed))
            worker._pass()
            assert finished.pop() == ()
            assert board.slots[1][(worker.taken - 1) % SLOTS][STATUS] == worker_loop.GAVE_UP
        assert worker.taken == board.words[1][DONE] == 5

        def defect(*_: Any) -> None:
            raise CacheError("of ours")

        monkeypatch.setattr(worker.unit, "make", defect)
        told(board, 5 % SLOTS, 6, Command(9, (3,), 0, 0, LAYERS, 0, None, (), believed))
        with pytest.raises(CacheError, match="of ours"):
            worker._pass()


def test_a_worker_sleeps_where_nothing_is_asked_of_it_and_ends_at_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, end, board, _ = working(monkeypatch)
    made: list[int] = []

    def pass_() -> None:
        made.append(worker.taken)
        worker.taken += 1

    monkeypatch.setattr(worker, "_pass", pass_)
    board.words[1][worker_loop.POSTED] = 2
    waited = end.poll

    def poll(nap: float) -> bool:
        assert board.words[1][worker_loop.ASLEEP] == 1
        if len(end.naps) == 1:
            end.told.append(b".")  # it is woken, as a pass was asked for
            board.words[1][worker_loop.POSTED] = 3
        if len(end.naps) == 2:
            end.told.append(pickle.dumps(("end",)))
        return bool(waited(nap))

    end.poll = poll
    worker.serve()
    assert made == [0, 1, 2]
    assert end.naps == [worker_loop.NAP] * 3
    assert (board.words[1][worker_loop.ASLEEP], end.said) == (0, [])
    fresh: Any = Pipe(("end",))
    again = worker_loop._Worker(fresh, Orders(2, 3, None, 0.0))
    again.serve()  # nobody has given it a board
    assert fresh.said == [("up", os.getpid())]


def test_a_worker_has_its_encoder_read_and_lies_on_its_core_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, other = worker_loop.share_weights(tiny("llama").load()), tiny("llama", 1).load()
    set_: list[Any] = []
    monkeypatch.setattr(worker_loop.os, "sched_setaffinity", lambda *what: set_.append(what))
    monkeypatch.setattr(gpu_ordering, "cuda", lambda: SimpleNamespace(set_device=set_.append))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: set_.append(f"{count} thread"))
    worker_loop._Worker(Pipe(), Orders(1, 2, 5, 0.0, "cuda:1"))  # type: ignore[arg-type]
    assert set_ == ["1 thread", (0, {5}), "cuda:1"]
    worker, end, _, _ = working(monkeypatch, "t5")
    before = worker.unit.decoder.source
    assert before.shape[1] == 2
    end.told.append(pickle.dumps(("source", (7, 8, 9))))
    rows = worker.unit.rows
    assert worker._hear()
    assert worker.unit.decoder.source.shape[1] == 3
    assert worker.unit.rows is not rows  # of a new text
    assert end.said.pop() == ("source", worker_loop.fingerprint(worker.unit.decoder))
    HANDED[2] = ("load", Replica("t5"), (), (), flat)
    monkeypatch.setattr(Replica, "load", lambda _: other)
    end.told.append(pickle.dumps(2))
    with pytest.raises(ValueError, match="the replica has other weights"):
        worker._hear()
    assert worker.unit is None


# --- the pool ---


class Ended:
    """A worker that is there no more, and the end of its pipe; what it has said before may still be read."""

    def __init__(self, code: int | None, *said: Any, alive: bool = False) -> None:
        self.exitcode, self.name, self.alive = code, "unit 1", alive
        self.said = deque(each if isinstance(each, bytes) else pickle.dumps(each) for each in said)
        self.waited: list[float] = []

    def poll(self, *_: Any) -> bool:
        return bool(self.said)

    def recv_bytes(self) -> bytes:
        if self.said[0] == b"!":
            raise EOFError
        return self.said.popleft()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, seconds: float) -> None:
        self.waited.append(seconds)

    def send_bytes(self, _: bytes) -> None:
        raise BrokenPipeError


def post_of(worker: Ended) -> Post:
    return Post(worker, worker)  # type: ignore[arg-type]


@pytest.mark.parametrize(("worker", "said"), [
    (Ended(None), "the process of unit 1 ended, perhaps for want of memory; the run is over"),
    (Ended(3), "the process of unit 1 ended with code 3, perhaps"), (Ended(0), "the process of unit 1 ended with code 0, perhaps"),
    (Ended(-9), "the process of unit 1 was killed by SIGKILL, perhaps"), (Ended(-15), "was killed by SIGTERM"),
    (Ended(1, b".", ("failed", "why")), "the process of unit 1 failed: why"),
    (Ended(1, b"!"), "the process of unit 1 ended with code 1"), (Ended(1, b".", b"!"), "ended with code 1"),
])  # fmt: skip
def test_what_became_of_a_worker_is_told(worker: Ended, said: str) -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    before = deque(worker.said)
    for look in (lambda: pool.look([post_of(worker)]), lambda: pool._answer(post_of(worker), "load")):
        worker.said = deque(before)
        with pytest.raises(ProcessError, match=said):
            look()
    assert {*worker.waited} <= {1}


def test_who_is_alive_is_believed_and_who_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    pool.look([post_of(Ended(None, b".", alive=True))])
    assert pool._answer(post_of(Ended(None, b".", ("load", 5))), "load") == 5
    with pytest.raises(AssertionError):
        pool._answer(post_of(Ended(None, ("up", 5))), "load")
    now = iter([0.0, *range(200, 400, 50)])
    monkeypatch.setattr(pool_of.time, "monotonic", lambda: float(next(now)))
    with pytest.raises(ProcessError, match="the process of unit 1 did not start within 300 s"):
        pool._answer(post_of(Ended(None, alive=True)), "load")


def test_commands_that_cannot_be_given_are_said() -> None:
    pool = pool_of.Pool(["cpu"], [], 0.0, 1.0, True)
    pool.board = Board(2)
    worker = Ended(-9, alive=True)
    pool.posts = {1: post_of(worker)}
    pool.unit = SimpleNamespace(fence=threading.Lock())  # type: ignore[assignment]
    with pytest.raises(CacheError, match="a pass of 40000 tokens is too wide for a worker process"):
        pool.post(1, Command(1, tuple(range(40000)), 0, 0, 1, 0, None, (), 0))
    assert pool.posts[1].count == 0
    pool.board.words[1][worker_loop.ASLEEP] = 1
    with pytest.raises(ProcessError, match="was killed by SIGKILL"):
        pool.post(1, Command(1, (3,), 0, 0, 1, 0, None, (), 0))
    with pool._guarded():
        assert not pool.broken
    with pytest.raises(KeyError), pool._guarded():
        raise KeyError
    assert pool.broken
    worker.alive = False
    for error in (BrokenPipeError, ConnectionResetError, EOFError):
        with pytest.raises(ProcessError, match="was killed by SIGKILL"), pool._guarded():
            raise error
    worker.alive = True
    with pytest.raises(ProcessError, match="a worker process is gone"), pool._guarded():
        raise EOFError
    assert Flight(None, whole(), Command(1, (3,), 0, 0, 1, 0, None, (), 0), 0, 0.0).stopped is False
    assert (LENGTH, GONE) == (2, -1)


def test_processes_come_of_a_server_with_one_thread_or_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says how many threads there are is as it was afterwards, and not there where it was not."""
    seen: list[Any] = []
    context = SimpleNamespace(set_forkserver_preload=seen.append)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: seen.append(kind) or context)
    names = pool_of.THREADS
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.append([os.environ[name] for name in names]))
    monkeypatch.setenv(names[0], "7")
    for name in names[1:]:
        monkeypatch.delenv(name, raising=False)
    assert pool_of.context_of_workers() is context
    assert seen == ["forkserver", [*pool_of.LIBRARIES], ["1"] * len(names)]
    assert [os.environ.get(name) for name in names] == ["7"] + [None] * (len(names) - 1)
    seen.clear()
    monkeypatch.setattr(pool_of.sys, "platform", "darwin")
    assert pool_of.context_of_workers() is context
    assert seen == ["spawn"]

def test_processes_are_started_pinned_and_ended_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one is pinned once the others are started, and let go of however it ends; with a single thread meanwhile."""
    done: list[Any] = []
    threads = [4]

    class Made:
        def __init__(self, *how: Any) -> None:
            done.append(("made", *how, threads[-1]))

        def load(self, *what: Any) -> None:
            done.append(("load", *what))
            if what[1] == 13:
                raise ParameterError("capacity")

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(pool_of, "Pool", Made)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    affinity = {0: {5, 3, 9}}
    monkeypatch.setattr(pool_of.os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(pool_of.os, "sched_setaffinity", lambda *what: done.append(what))
    monkeypatch.setattr(gpu_ordering, "check", lambda named: done.append(("there", named)))
    replica = tiny("llama")
    with pool_of.started(replica, 2, 12, source=(4,)):
        done.append("within")
    cores = [3, 5, 9]
    made = ("made", ["cpu", "cpu"], cores, 0.005, 60.0, True, 1)
    assert done == [made, ("load", replica, 12, (4,)), (0, {3}), "within", (0, cores), "closed"]
    assert threads == [4, 1, 4]
    done.clear()
    on = Replica("family:target", "cuda:1")
    with pool_of.started(on, 2, pin=False, spin=0.5, patience=2.0, share=False):
        pass
    two = ["cuda:1", "cuda:2"]
    assert done == [("there", two), ("made", two, [], 0.5, 2.0, False, 1), ("load", on, None, ()), "closed"]
    done.clear()
    with pytest.raises(ParameterError, match="capacity"), pool_of.started(replica, 1, 13):
        pass
    assert done[2:] == [(0, cores), "closed"]
    assert threads == [4, 1, 4, 1, 4, 1, 4]


class Told:
    """A worker that answers what it is asked, with this fingerprint."""

    def __init__(self, given: tuple[Any, Orders], name: str, answers: list[Any]) -> None:
        self.given, self.name, self.answers, self.pid, self.exitcode = given, name, answers, 1, 0
        self.said: list[Any] = []

    def send(self, what: Any) -> None:
        self.said.append(what)

    def poll(self, *_: Any) -> bool:
        return bool(self.answers)

    def recv_bytes(self) -> bytes:
        return pickle.dumps(self.answers.pop(0))

    def is_alive(self) -> bool:
        return True

    def start(self) -> None:
        self.said.append("started")

    def join(self, *_: Any) -> None:
        self.is_alive = lambda: False  # type: ignore[method-assign]

    close = start


def test_workers_are_told_what_to_load_and_must_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units take the cores in turn; the board is theirs once, weights and rows with each model."""
    workers: list[Told] = []
    replica = tiny("llama")
    same = worker_loop.fingerprint(replica.load())

    class Context:
        def Pipe(self) -> Any:  # noqa: N802
            ours: Any = SimpleNamespace(close=lambda: None)
            return ours, SimpleNamespace(close=lambda: workers[-1].said.append("closed there"))

        def Process(self, target: Any, args: Any, daemon: bool, name: str) -> Told:  # noqa: N802
            assert (target, daemon) == (worker_loop.work, True)
            workers.append(Told(args, name, [("up", 9), ("load", same)]))
            return workers[-1]

    monkeypatch.setattr(pool_of, "context_of_workers", Context)
    pool = pool_of.Pool(["cpu"] * 4, [7, 8], 0.25, 5.0, True)
    assert [each.given[1] for each in workers] == [
        Orders(1, 4, 8, 0.25), Orders(2, 4, 7, 0.25), Orders(3, 4, 8, 0.25),
    ]  # fmt: skip
    assert [each.name for each in workers] == ["unit 1", "unit 2", "unit 3"]
    assert {str(each.said) for each in workers} == {"['started', 'closed there']"}
    assert (pool.units, pool.broken, pool.closed, pool.serial) == (4, False, False, 0)
    assert pool.pids == [1, 1, 1]
    for number, each in enumerate(workers, 1):
        each.said.clear()
        pool.posts[number].end = each  # type: ignore[assignment]
    pool.load(replica)
    assert (pool.capacity, pool.tags.shape, pool.replica) == (96, (4, LAYERS, 96), replica)  # all that the model knows
    for each in workers:
        board, load = each.said
        assert board == ("board", pool.board.tensors, [])
        assert load[:2] == ("load", replica)
        assert load[2] == pool.memory.tensors
        assert load[3] == ()
        assert len(load[4]) > 0  # the weights of this process
    workers[1].answers.append(("load", same))
    workers[0].answers.append(("load", same))
    workers[2].answers.append(("load", "others"))
    pool.share = False
    with pytest.raises(ProcessError, match="the model of unit 3 is not that of unit 0, though both were asked for alike"):
        pool.load(replica, 20)
    assert pool.capacity == 20
    assert pool.broken
    [_, _, again] = workers[0].said
    assert again[4] is None
    pool.broken = False
    with pytest.raises(ParameterError, match="has no encoder, and source is given; leave it out"):
        pool.read_source((3,))
    encoding: Any = tiny("t5")
    same = worker_loop.fingerprint(encoding.load())
    for each in workers:
        each.answers += [("load", same), ("source", None)]
        each.said.clear()
    pool.load(encoding, 8, (5, 6))
    assert pool.decoder.source.shape[1] == 2
    rows = pool.unit.rows
    pool.read_source([7, 8, 9])
    assert pool.decoder.source.shape[1] == 3
    assert pool.unit.rows is not rows
    assert [each.said[0][3] for each in workers] == [(5, 6)] * 3
    assert [each.said[1] for each in workers] == [("source", (7, 8, 9))] * 3
    with pytest.raises(ParameterError, match="has an encoder, and source is empty; give what it reads"):
        pool.load(encoding, 8)


# --- companions ---


class Thread(threading.Thread):
    """In the place of a process."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        super().__init__(target=target, args=args, daemon=daemon)
        self.terminated = False

    def terminate(self) -> None:
        self.terminated = True


def kept_open(ends: Any) -> Any:
    """In one process the other side's end is closed by nobody."""
    ours, theirs = ends
    return ours, SimpleNamespace(send=theirs.send, recv=theirs.recv, poll=theirs.poll, close=lambda: None)


def test_companions_run_a_pass_until_they_are_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun = list[Any](), list[Any]()

    class Work:
        def __init__(self) -> None:
            self.done = [0, 0]

        def run(self) -> None:
            assert torch.is_inference_mode_enabled()
            self.done[0] += 1

        def back(self) -> None:
            self.done[1] += 1

    def prepared(model: Any, *what: Any) -> Work:
        if what[0] == 9:
            raise RuntimeError("no room\nfor it")
        asked.append((model, *what))
        begun.append(Work())
        return begun[-1]  # type: ignore[no-any-return]

    from calibrate.loading import architectures
    from calibrate.timing import library_pass

    monkeypatch.setattr(single_pass, "prepared", prepared)
    monkeypatch.setattr(architectures, "architecture", lambda name: f"built {name}")
    monkeypatch.setattr(library_pass, "LibraryModel", lambda *what: what)
    monkeypatch.setattr(busy_neighbours, "end_with_starter", lambda: asked.append("ends"))
    monkeypatch.setattr(busy_neighbours.signal, "signal", lambda *what: asked.append(what))
    context = SimpleNamespace(Pipe=lambda: kept_open(multiprocessing.Pipe()), Process=Thread)
    monkeypatch.setattr(busy_neighbours.multiprocessing, "get_context", {"spawn": context}.__getitem__)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = Companions(2, Spec("some", "cpu", "float32", 7, 3))
    model = ("built some", "cpu", "float32", 7)
    assert threads == [3, 3]
    with found.at(2, 8, 4, "eager") as passed:
        assert passed == []
    assert sorted(map(str, asked)) == sorted(map(str, [
        (busy_neighbours.signal.SIGINT, busy_neighbours.signal.SIG_IGN), "ends", (model, 2, 8, 4, "eager")] * 2))  # fmt: skip
    assert sorted(passed) == sorted(each.done[0] for each in begun)
    assert all(each.done[0] == each.done[1] >= 1 for each in begun)
    with pytest.raises(KeyError), found.at(1, 8, 1, "eager") as passed:
        raise KeyError  # what was to be timed has failed: they stop all the same
    assert len(passed) == 2
    with pytest.raises(RuntimeError, match=r"a companion process failed: RuntimeError: no room$"), found.at(9, 8, 1, "eager"):
        pass
    found.close()
    for process in found.processes:
        assert not process.is_alive()
        assert not process.terminated
    found = Companions(1, Spec("some", "cpu", "float32", 7, 3))
    monkeypatch.setattr(busy_neighbours, "_PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="a companion process did not answer within 0 s"):
        found._answer(found.ends[0])
    found.ends[0].send("stop")  # of a pass that could not begin
    found.ends[0].send(None)
    found.processes[0].join(PATIENCE)
    assert not found.processes[0].is_alive()
    found.processes = [SimpleNamespace(is_alive=lambda: True, join=asked.append, terminate=lambda: asked.append("end"))]  # type: ignore[list-item]
    found.close()
    assert asked[-2:] == [5, "end"]
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match="a companion process ended, perhaps for want of memory"):
        found._answer(ours)
