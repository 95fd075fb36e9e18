"""Runs over processes whose workers are in this very process: what they are told, what becomes of it and what is said of it.

Nothing is left to a clock: a worker makes its pass when the main process waits for somebody.
"""

from __future__ import annotations

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.interpreters.in_one_process import Luck, Real, RunTimes, Sampling
from calibrate.untested_on_gpu import gpu_ordering
from calibrate.workers import over_processes, worker_loop
from calibrate.workers.over_processes import GONE, Parallel, _UnitProcess
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
    return Forward("target", tokens, at, LayerSpan(0, LAYERS), **more)


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
        subs = yield Fork((Forward("target", (5,), 3, LayerSpan(0, 3)),), (1,))
        out = yield Forward("target", (9,), 2, LayerSpan(0, 4), heads=1)
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
    out = yield Forward("target", (3, 4), 0, LayerSpan(0, 3))
    yield Join((yield Fork((Forward("target", (3, 4), 0, LayerSpan(3, LAYERS), out),), (1,))))


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
    yield Read("next", (yield Forward("target", (7,), 2, LayerSpan(0, LAYERS), heads=1)))
    yield Forward("target", (8,), 1, LayerSpan(0, LAYERS))


def homeless() -> Steps:
    yield whole()
    yield Join((yield Fork(tuple(whole(2, (token,)) for token in (5, 6, 7)), (None,) * 3)))


@pytest.mark.parametrize(("steps", "error", "said"), [
    (forked(nested()), CacheError, "only the main process takes over what a sub-process has made"),
    (crossing(), CacheError, "target: unit 1 cannot go on from what unit 0 made"),
    (two_at_once(), CacheError, "unit 1 is to make a pass while it makes another one"),
    (nobody_ends(), CacheError, "came to a halt before it had put out all its tokens"),
    (spoiled(), CacheError, "rows at position 2 of unit 1 are no longer those of the process that is taken over"),
    (too_early(), CacheError, "a running task cannot be adopted; join it first"),
    (overwriting(), CacheError, "target: a pass at position 1 replaces rows that a sub-process is copying"),
    (homeless(), CacheError, "a single pass that may be anywhere found no unit that is free"),
    (forked(whole(2, (5,)), where=(3,)), ParameterError, "units must be at least 4, as .* on unit 3, got 3; start more"),
    (forked(whole(2, (5,)), where=(0,)), ParameterError, "units must be at least 1, as"),
    (forked(whole(15, (5, 6))), ParameterError, "must fit the capacity=16, got at least 17 positions; start the processes with"),
    (forked(Forward("target", (5,), 2, LayerSpan(0, LAYERS + 1))), ParameterError, "layers of the target must be 5, .* at least 6"),
    (forked(Forward("draft", (5,), 2, LayerSpan(0, 1))), ParameterError, "target alone, and .* asks for the draft model"),
    *((forked(whole(2, (5, 6))._replace(**more)), ParameterError, "makes plain passes of one sequence alone; .* for others")
      for more in ({"batch": Batch.uniform((0, 1), 2)}, {"layers": LayerSpan(0, LAYERS, ((1, 2),))},
                   {"layers": LayerSpan(0, LAYERS, kv_only=True)}, {"compared": 1}, {"unit": 1}, {"tree": (-1, 0)},
                   {"tree": (-1, -1), "heads": 2})),
    (forked(Forward("target", (5, 6), 2, LayerSpan(1, LAYERS), tree=(-1, -1))), ParameterError, "passes of one sequence alone"),
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
        yield Forward("target", (7,), 2, LayerSpan(0, LAYERS))
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
        yield Forward("target", (9,), 2, LayerSpan(0, LAYERS))
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
        subs = yield Fork((whole(2, (5, 6), tree=(-1, -1)),), (1,))
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
        out = yield Forward("target", (4,), 1, LayerSpan(0, LAYERS), heads=1)
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
        yield Forward("target", (7,), 2, LayerSpan(0, 0))
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
def test_rows_are_kept_for_who_has_yet_to_copy_them(
    three: Any, low: int, high: int, stop: int, source: int, refused: bool
) -> None:
    """A pass over position 1 and what follows, through layers 1 and 2: what is before it or in other layers is not replaced."""
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
