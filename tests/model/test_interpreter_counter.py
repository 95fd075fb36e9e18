"""The counter: work requested by algorithms, and errors of the cache that it shares with the simulator."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from model.costs.layer_times import UnitCost
from model.interpret.interpreter import Cache, Counting, Interpreter, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.pearl import algorithm as pearl
from model.methods.ppd import algorithm as ppd
from model.methods.ppd.algorithm import Parameters
from model.steps import Adopt, Batch, CacheError, Commit, Fork, Forward, Join, LayerSpan, Read, Steps, Stop, declining
from sim.engine.events import Cluster, simulate
from tests.support.adoption_defects import ADOPTION_DEFECTS, CACHE_DEFECTS

MATCHES = [True, True, False, True, False]


@pytest.mark.parametrize("form", ["literal", "flat"])
def test_barrier_forms_by_hand(form: str) -> None:
    """d = 6, d' = 4, k = 3: the main process runs 6 layers, or after a match the remaining 4; three sub-processes run 2 each."""
    work = count(ppd.decode(Parameters(6, 4, 3, form=form), [0], 5), World(1, 6, MATCHES), 5)
    assert work.commits == ["match", "match", "miss", "match", "miss"]
    assert work.tokens == [1, 2, 3, 4, 5]
    assert work.layer_passes == 2 * 6 + 3 * 4 + 5 * 3 * 2
    assert work.passes == 5 * (2 + 3)
    assert work.heads == 5 * 2
    assert work.forks == 15
    assert work.adoptions == 3


def test_flat_below_the_half_by_hand() -> None:
    """d = 5, d' = 2, k = 1: predictions at 2, then 3 (it gets 3 deep), then 2 again; a sub-process runs the remaining layers."""
    work = count(ppd.decode(Parameters(5, 2, 1, form="flat"), [0], 5), World(1, 5, MATCHES), 5)
    assert work.layer_passes == (5 + 3) + (2 + 2) + (3 + 3) + (5 + 3) + (2 + 2)
    assert work.adoptions == 3


def test_eager_counts_a_stopped_pass_in_full() -> None:
    work = count(ppd.decode(Parameters(6, 4, 3, form="eager"), [0], 5), World(1, 6, MATCHES), 5)
    assert work.tokens == [1, 2, 3, 4, 5]
    assert work.layer_passes == 2 * 6 + 3 * 2 + 5 * 3 * 4
    assert (work.heads, work.forks, work.adoptions) == (10, 15, 3)


def test_nested_generates_the_same_tokens() -> None:
    work = count(ppd.decode(Parameters(7, 2, 2, form="nested"), [0], 5), World(1, 7, MATCHES), 5)
    assert work.tokens == [1, 2, 3, 4, 5]
    assert work.commits == ["match", "match", "miss", "match", "miss"]
    assert work.adoptions == 0


@pytest.mark.parametrize("matches", list(itertools.product((False, True), repeat=4)))
@pytest.mark.parametrize(("form", "layers", "exit_layer", "candidates"), [
    *(("nested", *each) for each in ((7, 2, 2), (6, 3, 2), (5, 1, 2), (5, 5, 3), (9, 4, 3))),
    *(("eager", *each) for each in ((6, 3, 2), (5, 5, 3), (9, 5, 3))),  # which exits in the upper half
])  # fmt: skip
def test_counter_makes_the_same_passes_as_the_simulator(
    form: str, layers: int, exit_layer: int, candidates: int, matches: tuple[bool, ...]
) -> None:
    """If only layers take time, the counter and the simulator make the same passes, those of stopped processes included."""
    parameters = Parameters(layers, exit_layer, candidates, form=form)
    found = count(ppd.decode(parameters, [0, 1], 4), World(2, layers, matches), 4)
    world = World(2, layers, matches)
    run = simulate(ppd.decode(parameters, [0, 1], 4), 4, Cluster(parameters.units), UnitCost(layers), world)
    assert found.account == run.account
    assert found.commits == [kind for _, kind, _ in run.commits]


def test_plain_decoding_and_prompts() -> None:
    work = count(autoregressive.decode(autoregressive.Parameters(6), [0, 1, 2], 4), World(3, 6, []), 4)
    assert work.tokens == [3, 4, 5, 6]
    assert (work.passes, work.layer_passes, work.heads) == (5, 2 * 6 + 4 * 6, 4)
    for form in ppd.FORMS:
        prompted = count(ppd.decode(Parameters(6, 4, 2, form=form), [0, 1, 2], 4), World(3, 6, MATCHES), 4)
        alone = count(ppd.decode(Parameters(6, 4, 2, form=form), [0], 4), World(1, 6, MATCHES), 4)
        assert prompted.tokens == [token + 2 for token in alone.tokens] == [3, 4, 5, 6]
        assert prompted.layer_passes == alone.layer_passes + 2 * 6
        assert prompted.commits == alone.commits


def test_no_form_changes_the_output() -> None:
    for form, matches in itertools.product(ppd.FORMS, itertools.product((False, True), repeat=4)):
        choice = Parameters(4, 2, 2, form=form)
        assert count(ppd.decode(choice, [0], 4), World(1, 4, matches), 4).tokens == [1, 2, 3, 4]
        run = simulate(ppd.decode(choice, [0], 4), 4, Cluster(choice.units), UnitCost(4), World(1, 4, matches))
        assert run.tokens == [1, 2, 3, 4]
        assert [kind for _, kind, _ in run.commits] == ["match" if match else "miss" for match in matches]


def attended(steps: Steps) -> Steps:
    """The same algorithm with checks of its steps: a model with tensors would fail where these assertions fail."""
    answer, heads = None, 0
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        match step:
            case Forward(layers=LayerSpan(first=0)):
                assert step.state is None, "a pass from the first layer has no state to continue from"
            case Forward():
                before = step.state.tokens, step.state.at, step.state.layers.last
                assert before == (step.tokens, step.at, step.layers.first), "a pass continues where its state ended"
            case Read():
                assert step.kind in ("next", "top")
                assert step.output is not None
                assert heads == 1, "logits are computed for the position that is read, and for no other"
            case Fork():
                assert len({unit for unit in step.units if unit is not None}) in (0, len(step.bodies)), "distinct units, or any"
                assert 0 not in step.units, "unit 0 belongs to the main process"
                step = Fork(tuple(body if isinstance(body, Forward) else attended(body) for body in step.bodies), step.units)
        heads = step.heads if isinstance(step, Forward) else heads
        answer = yield step


@pytest.mark.parametrize("form", ppd.FORMS)
@pytest.mark.parametrize("prompt", [[0], [0, 1], [0, 1, 2]])
def test_every_process_ends_without_help_of_the_interpreter(form: str, prompt: list[int]) -> None:
    """Only the algorithm counts the tokens here: both interpreters would continue to 1000."""
    for tokens, matches in itertools.product((1, 3), itertools.product((False, True), repeat=3)):
        choice, world = Parameters(7, 2 if form in ("flat", "nested") else 4, 2, form=form), World(len(prompt), 7, matches)
        assert len(count(attended(ppd.decode(choice, prompt, tokens)), world, 1000).tokens) == tokens
        with pytest.raises(RuntimeError, match="came to a halt"):
            simulate(attended(ppd.decode(choice, prompt, tokens)), 1000, Cluster(15), UnitCost(7), world)
        done = simulate(attended(ppd.decode(choice, prompt, tokens)), tokens, Cluster(15), UnitCost(7), world)
        assert done.tokens == [len(prompt) + index for index in range(tokens)]


# --- Algorithms with a defect: the counter and the simulator both find it ----------------------------------------------


def skips_a_position() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    yield Forward("target", (2,), 2, LayerSpan(0, 4))


def starts_beyond_an_empty_cache() -> Steps:
    yield Forward("target", (1,), 1, LayerSpan(0, 4))


def skips_layers() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 2))
    yield Forward("target", (1,), 1, LayerSpan(0, 3))


def sub_follows_layers_that_were_not_run() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 2))
    yield Join((yield Fork((Forward("target", (1,), 1, LayerSpan(0, 4)),), (1,))))


def sub_is_a_position_too_far() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    yield Join((yield Fork((Forward("target", (2,), 2, LayerSpan(0, 2)),), (1,))))


def adopts_more_layers_than_were_run() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 2)),), (1,))
    yield Join(subs)
    yield Adopt(subs[0], 1, 3)


def adopts_at_a_position_that_was_not_run() -> Steps:
    yield Forward("target", (0, 1), 0, LayerSpan(0, 4))
    subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 2)),), (1,))
    yield Join(subs)
    yield Adopt(subs[0], 2, 2)


def adopts_beyond_its_own_rows() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    subs = yield Fork((Forward("target", (1, 2), 1, LayerSpan(0, 2)),), (1,))
    yield Join(subs)
    yield Adopt(subs[0], 2, 2)


def continues_from_layers_that_it_did_not_adopt() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 2)),), (1,))
    yield Join(subs)
    yield Forward("target", (1,), 1, LayerSpan(2, 4))
    yield Forward("target", (2,), 2, LayerSpan(0, 4))


DEFECTS: list[Callable[[], Steps]] = [
    skips_a_position, starts_beyond_an_empty_cache, skips_layers, sub_follows_layers_that_were_not_run, sub_is_a_position_too_far,
    adopts_more_layers_than_were_run, adopts_at_a_position_that_was_not_run, adopts_beyond_its_own_rows,
    continues_from_layers_that_it_did_not_adopt,
]  # fmt: skip


def finished(steps: Steps) -> Steps:
    """The algorithm followed by one token, so that only its defect can keep it from its end."""
    yield from steps
    yield Commit("token", (1,))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_gap_in_the_cache_is_an_error_in_both_interpreters(defect: Callable[[], Steps]) -> None:
    with pytest.raises(CacheError, match="target"):
        count(finished(defect()), World(1, 4, []), 1)
    for per_layer in (False, True):
        with pytest.raises(CacheError, match="target"):
            simulate(finished(defect()), 1, Cluster(3), UnitCost(4), World(1, 4, []), per_layer=per_layer)


@pytest.mark.parametrize(("defect", "message"), [*ADOPTION_DEFECTS, *CACHE_DEFECTS])
def test_only_finished_tasks_can_be_adopted_in_both_interpreters(defect: Callable[[], Steps], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        count(finished(defect()), World(1, 4, []), 1)
    for stop, per_layer in itertools.product(("now", "layer", "pass"), (False, True)):
        with pytest.raises(CacheError, match=message):
            simulate(finished(defect()), 1, Cluster(3, stop=stop), UnitCost(4), World(1, 4, []), per_layer=per_layer)


@pytest.mark.parametrize("stop", pearl.DRAFT_STOPS)
def test_caches_of_ended_tasks_are_freed(stop: str) -> None:
    """With real models every cache holds rows. PEARL starts tasks from the caches of ended tasks and stops some, in every round."""
    living: weakref.WeakSet[Held] = weakref.WeakSet()

    class Held(Cache):
        __slots__ = ("__weakref__",)

        def copy(self) -> Held:
            found = Held(super().copy().rows)
            living.add(found)
            return found

    class Counted(Counting):
        most = 0

        def new_cache(self) -> Held:
            return Held()

        def commit(self, step: Commit) -> None:
            super().commit(step)
            self.most = max(self.most, len(living))

    world = World(1, 4, drafts={"draft": DraftOutcomes("target", [at % 3 for at in range(100)])})
    counted = Counted(world)
    gc.disable()  # reference cycles are collected late, regardless of tensor memory
    try:
        counted.run(pearl.decode(pearl.Parameters(4, 4, draft_stop=stop), [0], 100), 100)
    finally:
        gc.enable()
    assert counted.work.rounds.total() > 40
    assert 0 < counted.most < 10


def test_passes_that_begin_together_take_their_times() -> None:
    """The shorter of two passes ends first, and its process goes on while the longer pass still runs."""
    def steps() -> Steps:
        long, short = yield Fork((passes(4, 4), passes(1, 1, 1)), (0, 1))
        yield Join((short,))
        yield Stop((long,))
        yield Commit("token", (1,))

    def passes(*depths: int) -> Steps:
        for depth in depths:
            yield Forward("target", (0,), 0, LayerSpan(0, depth))

    run, work = simulate(steps(), 1, Cluster(2), UnitCost(4), World(1, 4, [])), count(steps(), World(1, 4, []), 1)
    assert run.account.passes_by_kind == work.account.passes_by_kind
    assert work.passes == 4


def test_chain_of_sub_processes_may_be_longer_than_the_recursion_limit() -> None:
    depth = 2 * sys.getrecursionlimit()

    def chain(left: int) -> Steps:
        yield Forward("target", (0,), 0, LayerSpan(0, 1))
        if left:
            last.append((yield Fork((chain(left - 1),), (1,)))[0])
        else:
            yield Join(())

    def steps() -> Steps:
        last.append((yield Fork((chain(depth),), (1,)))[0])
        for number in range(depth):
            yield Join((last[number],))
        yield Fork((chain(0),), (0,))  # forgets tasks that have ended with all their sub-processes
        yield Commit("token", (1,))

    last: list[Any] = []
    assert count(steps(), World(1, 4, []), 1).forks == depth + 2


def test_task_stopped_after_its_end_can_be_adopted() -> None:
    def steps() -> Steps:
        yield Forward("target", (0,), 0, LayerSpan(0, 4))
        subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 4)),), (1,))
        yield Join(subs)
        yield Stop(subs)
        yield Adopt(subs[0], 1, 4)

    assert count(finished(steps()), World(1, 4, []), 1).adoptions == 1
    assert simulate(finished(steps()), 1, Cluster(2), UnitCost(4), World(1, 4, [])).account.adoptions == 1


def waits_for_the_first(steps: Steps) -> Steps:
    """The same algorithm, but every join waits for the first task of the latest fork."""
    answer, subs = None, ()
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield Join(subs[:1]) if isinstance(step, Join) else step
        subs = answer if isinstance(step, Fork) else subs


def test_eager_form_waits_for_the_candidate_that_it_adopts() -> None:
    """The second of two candidates is correct, and halfway through when the first is stopped."""
    choice, world = Parameters(5, 4, 2, form="eager"), World(1, 5, [2, 0])
    assert count(ppd.decode(choice, [0], 2), world, 2).tokens == [1, 2]
    with pytest.raises(CacheError, match="a running task cannot be adopted"):
        count(waits_for_the_first(declining(ppd.decode(choice, [0], 2))), world, 2)
    with pytest.raises(CacheError, match="a running task cannot be adopted"):
        simulate(waits_for_the_first(declining(ppd.decode(choice, [0], 2))), 2, Cluster(3), UnitCost(5), world)


def sound() -> Steps:
    """Near misses of the defects: each is allowed."""
    yield Forward("target", (0, 1), 0, LayerSpan(0, 4))
    yield Forward("target", (1,), 1, LayerSpan(0, 4))  # cuts
    bodies = (
        Forward("target", (2,), 2, LayerSpan(0, 2)),
        Forward("target", (1,), 1, LayerSpan(0, 4)),
        Forward("draft", (0,), 0, LayerSpan(0, 3)),
    )
    subs = yield Fork(bodies, (1, 2, 3))
    yield Join(subs)
    yield Adopt(subs[0], 2, 2)
    yield Forward("target", (2,), 2, LayerSpan(2, 4))
    yield Forward("target", (3,), 3, LayerSpan(0, 4))
    yield Forward("target", (2,), 2, LayerSpan(4, 4), heads=1)  # a head alone


def test_sound_algorithms_pass_in_both_interpreters() -> None:
    assert count(finished(sound()), World(1, 4, []), 1).tokens == [1]
    assert simulate(finished(sound()), 1, Cluster(4), UnitCost(4), World(1, 4, [])).tokens == [1]


def test_cache_rows_after_cuts_and_copies() -> None:
    def at(position: int, first: int, last: int, width: int = 1) -> Forward:
        return Forward("target", (7,) * width, position, LayerSpan(first, last))

    cache = Cache()
    cache.write(at(0, 0, 4, width=3))
    assert cache.rows == {"target": [3, 3, 3, 3]}
    cache.write(at(1, 0, 2))
    # Layers 2 and 3 still held later rows of the sequence that has just been cut.
    assert cache.rows == {"target": [2, 2, 1, 1]}
    other = cache.copy()
    other.write(at(2, 0, 1))
    assert other.rows == {"target": [3, 2, 1, 1]}
    assert cache.rows == {"target": [2, 2, 1, 1]}
    with pytest.raises(CacheError, match=r"target: layers \[0, 2\) at position 3, but the layers hold \[3, 2\]"):
        other.write(at(3, 0, 2))
    with pytest.raises(CacheError, match=r"target: layers \[2, 4\) at position 1, but the layers hold \[2, 2, 1, 1\]"):
        cache.require(at(1, 2, 4, width=2))  # the layers above have not seen the second token
    cache.write(at(1, 2, 4))
    assert cache.rows == {"target": [2, 2, 2, 2]}
    cache.write(at(99, 2, 2))  # a head alone holds nothing
    assert cache.rows == {"target": [2, 2, 2, 2]}


def test_rows_are_adopted_only_from_a_matching_pass() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1), 0, LayerSpan(0, 4)))
    for made, at, layers in (
        (Forward("target", (2,), 2, LayerSpan(0, 1)), 2, 2),  # too few layers
        (Forward("target", (2,), 2, LayerSpan(1, 2)), 2, 2),  # not from the first layer
        (Forward("target", (2,), 2, LayerSpan(0, 2)), 3, 2),  # another position
        (Forward("target", (3,), 3, LayerSpan(0, 2)), 3, 2),  # a position is missing before it
    ):
        with pytest.raises(CacheError, match=r"target: rows of layers \[0, 2\) at position \d cannot be adopted"):
            cache.adopt(made, at, layers)
    cache.adopt(Forward("target", (2,), 2, LayerSpan(0, 2)), 2, 2)
    assert cache.rows == {"target": [3, 3, 2, 2]}


def test_algorithm_that_ends_early_is_counted() -> None:
    work = count(finished(iter_once()), World(1, 4, []), 5)
    assert (work.tokens, work.layer_passes) == ([1], 4)


def iter_once() -> Steps:
    out = yield Forward("target", (0,), 0, LayerSpan(0, 4), heads=1)
    assert (yield Read("next", out)) == 1


def stops_twice() -> Steps:
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 2)),), (1,))
    yield Stop(subs)
    yield Stop(subs)


def test_stopping_an_ended_task_changes_nothing_in_the_simulator() -> None:
    assert simulate(finished(stops_twice()), 1, Cluster(2), UnitCost(4), World(1, 4, [])).tokens == [1]


def test_stopping_an_ended_task_changes_nothing_in_the_counter() -> None:
    assert count(finished(stops_twice()), World(1, 4, []), 1).tokens == [1]


# --- Layers skipped, rows alone, batches ---


def test_skipped_layer_lacks_its_row_and_all_later_rows() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1), 0, LayerSpan(0, 4)))
    cache.write(Forward("target", (2,), 2, LayerSpan(0, 4, gaps=((1, 3),))))
    assert cache.rows["target"] == [3, 2, 2, 3]
    with pytest.raises(CacheError, match=r"target: layers \[0, 4\) at position 3, but they hold \[3, 2, 2, 3\]"):
        cache.require(Forward("target", (3,), 3, LayerSpan(0, 4)))
    with pytest.raises(CacheError, match=r"layers \[2, 4\) at position 3, but they hold \[2, 3\]"):
        cache.require(Forward("target", (3,), 3, LayerSpan(0, 4, gaps=((1, 2),))))
    cache.write(Forward("target", (3,), 3, LayerSpan(0, 4, gaps=((1, 3),))))
    assert cache.rows["target"] == [4, 2, 2, 4]
    # Filling in continues from the layer before, and must cover all missing rows.
    with pytest.raises(CacheError, match="layer 2 continues from a layer that holds only 2 positions"):
        cache.require(Forward("target", (2, 3), 2, LayerSpan(2, 3, kv_only=True)))
    cache.write(Forward("target", (2, 3), 2, LayerSpan(1, 2, kv_only=True)))
    cache.write(Forward("target", (2, 3), 2, LayerSpan(2, 3, kv_only=True)))
    cache.write(Forward("target", (4,), 4, LayerSpan(0, 4)))
    assert cache.rows["target"] == [5, 5, 5, 5]


def test_pass_that_skips_layers_cuts_later_rows() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1, 2), 0, LayerSpan(0, 5)))
    cache.write(Forward("target", (1,), 1, LayerSpan(0, 4, gaps=((1, 2),))))
    assert cache.rows["target"] == [2, 1, 2, 2, 1]
    cache.write(Forward("target", (1,), 1, LayerSpan(0, 2, gaps=((0, 1),))))
    assert cache.rows["target"] == [1, 2, 1, 1, 1]
    early = Cache()
    early.write(Forward("target", (0,), 0, LayerSpan(0, 4, gaps=((1, 3),))))
    early.write(Forward("target", (0,), 0, LayerSpan(1, 3, gaps=((1, 2),))))
    assert early.rows["target"] == [1, 0, 1, 0]


@pytest.mark.parametrize("gaps", [((0, 4),), ((3, 2),), ((1, 5),), ((2, 3), (1, 2)), ((1, 3), (2, 4)), ((-1, 1),)])
def test_layers_that_cannot_be_skipped(gaps: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(CacheError, match="cannot be skipped in a pass through"):
        Cache().require(Forward("target", (0,), 0, LayerSpan(0, 4, gaps=gaps)))


def test_several_gaps_are_skipped_in_one_pass() -> None:
    cache, step = Cache(), Forward("target", (0,), 0, LayerSpan(0, 6, gaps=((0, 1), (2, 3), (3, 5))))
    cache.write(step)
    assert cache.rows["target"] == [0, 1, 0, 0, 0, 1]
    assert step.layers.ranges == [(1, 2), (5, 6)]


def test_sequences_of_a_batch_have_separate_caches() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1), 0, LayerSpan(0, 2)))  # shared by all sequences
    cache.write(Forward("target", (5, 6), 2, LayerSpan(0, 2), batch=Batch.uniform((0, 1), 2)))
    cache.write(Forward("target", (6,), 3, LayerSpan(0, 2), batch=Batch.uniform((1,), 3)))
    assert {number: each.rows["target"] for number, each in cache.sequences.items()} == {0: [3, 3], 1: [4, 4]}
    with pytest.raises(CacheError, match="at position 4"):
        cache.require(Forward("target", (5, 6), 4, LayerSpan(0, 2), batch=Batch.uniform((0, 1), 4)))
    cache.require(Forward("target", (7,), 2, LayerSpan(0, 2), batch=Batch.uniform((2,), 2)))  # joins where the batch began
    with pytest.raises(CacheError, match="at position 3"):
        cache.require(Forward("target", (7,), 3, LayerSpan(0, 2), batch=Batch.uniform((2,), 3)))
    cache.write(Forward("target", (8, 8, 8), 2, LayerSpan(0, 2), batch=Batch.uniform((2,), 2, 3)))
    assert cache.sequences[2].rows["target"] == [5, 5]
    twin = cache.copy()
    twin.write(Forward("target", (9,), 5, LayerSpan(0, 2), batch=Batch.uniform((2,), 5)))
    assert (cache.sequences[2].rows["target"], twin.sequences[2].rows["target"]) == ([5, 5], [6, 6])
    assert cache.rows["target"] == [2, 2]


@pytest.mark.parametrize(("batch", "more", "said"), [
    (Batch((0, 0), (0, 0), (1, 1), (0, 0)), {}, r"sequences must be distinct, at least one, got \(0, 0\)"),
    (Batch((), (), (), ()), {}, r"sequences must be distinct, at least one, got \(\)"),
    (Batch((0, 1), (0,), (1, 1), (0, 0)), {}, r"must have 2 entries, one per sequence, got \(0,\), "),
    (Batch((0, 1), (), (1, 1), (0, 0)), {}, r"must have 2 entries, one per sequence, got \(\), "),
    (Batch((0, 1), (0, 0), (1, 1, 0), (0, 0)), {}, r"must have 2 entries, one per sequence, got .*, \(1, 1, 0\), "),
    (Batch((0, 1), (0, 0), (1, 1), ()), {}, r"must have 2 entries, one per sequence, got .*, \(\)"),
    (Batch((0, 1), (0, 0), (1, 2), (0, 0)), {}, r"widths must be at least 1 and sum to 2, the tokens of the pass, got \(1, 2\)"),
    (Batch((0, 1), (0, 0), (2, 0), (0, 0)), {}, r"widths must be at least 1 and sum to 2, the tokens of the pass, got \(2, 0\)"),
    (Batch((0, 1), (0, 0), (1, 1), (2, 0)), {"heads": 2}, r"heads must be between 0 and widths=\(1, 1\), got \(2, 0\)"),
    (Batch((0, 1), (0, 0), (1, 1), (1, -1)), {}, r"heads must be between 0 and widths=\(1, 1\), got \(1, -1\)"),
    (Batch((0,), (0,), (2,), (1,)), {"heads": 2}, r"heads must sum to 2, the heads of the pass, got \(1,\)"),
    (Batch((0, 1), (1, 2), (1, 1), (0, 0)), {}, r"the smallest of positions must be 0, the position of the pass, got \(1, 2\)"),
    (Batch((0,), (0,), (2,), (0,)), {"compared": 1}, r"compared must be 0 or all 2 tokens, got 1"),
    (Batch((0, 1), (0, 0), (1, 1), (0, 0)), {"tree": (-1, -1)}, r"a tree of hypotheses must have one sequence, got \(0, 1\)"),
])  # fmt: skip
def test_batch_must_agree_with_its_pass(batch: Batch, more: dict[str, Any], said: str) -> None:
    step = Forward("target", (5, 6), 0, LayerSpan(0, 2), batch=batch, **more)
    for ask in (Cache().require, Cache().write):
        with pytest.raises(CacheError, match=f"batched pass of the target: .*{said}"):
            ask(step)


def test_cache_copy_keeps_skipped_layers() -> None:
    cache = Cache()
    cache.write(Forward("target", (0,), 0, LayerSpan(0, 4, gaps=((1, 3),))))
    with pytest.raises(CacheError, match=r"target: layers \[0, 4\) at position 1, but they hold \[1, 0, 0, 1\]"):
        cache.copy().require(Forward("target", (1,), 1, LayerSpan(0, 4)))
    cache.copy().write(Forward("target", (1,), 1, LayerSpan(0, 4, gaps=((1, 3),))))
    assert cache.rows["target"] == [1, 0, 0, 1]


def test_times_of_a_pass_that_skips_layers() -> None:
    cost = UnitCost(4, layer_times=(1.0, 2.0, 4.0, 8.0), early_head=0.25, final_head=0.5, propagation=0.125, state_check=0.75)
    skipping = Forward("target", (0,), 0, LayerSpan(0, 4, gaps=((1, 3),)), heads=1)
    assert (cost.forward(skipping), cost.layer_times_of(skipping)) == (9.5, [1.0, 0.0, 0.0, 8.5])
    rows = Forward("target", (0, 1), 0, LayerSpan(1, 4, gaps=((1, 2),), kv_only=True))
    assert (cost.forward(rows), cost.layer_times_of(rows)) == (0.25, [0.0, 0.125, 0.125])
    compared = Forward("target", (0,), 0, LayerSpan(0, 2), compared=1)
    assert (cost.forward(compared), cost.layer_times_of(compared)) == (3.75, [1.0, 2.75])
    assert cost.forward(Forward("target", (0,), 0, LayerSpan(2, 2), heads=1)) == 0.25
    assert not UnitCost(4, propagation=0.5).only_layers
    assert not UnitCost(4, state_check=0.5).only_layers
    assert UnitCost(4, propagation=0.5, state_check=0.5).plain  # free for methods that skip no layers


@pytest.mark.parametrize("form", ["literal", "eager", "flat"])
def test_ended_tasks_are_freed_with_their_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a sequence would keep the rows of all its past sub-processes."""
    held: list[int] = []
    bear = Interpreter._bear_all

    def watched(self: Interpreter) -> None:
        held.append(len(self.unborn[0].parent.started))  # type: ignore[union-attr]
        bear(self)

    monkeypatch.setattr(Interpreter, "_bear_all", watched)
    count(ppd.decode(Parameters(8, 5, 3, form), [0], 40), World(1, 8, [True, False] * 20), 40)
    assert len(held) == 40
    assert max(held) <= 6  # tasks of this round and of the previous one
