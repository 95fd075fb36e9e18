"""The discrete-event simulator against logs computed by hand."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.logs.spans import Span
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.ppd import algorithm as ppd
from model.methods.ppd.algorithm import Parameters
from model.steps import CacheError, Commit, Fork, Forward, Join, LayerSpan, Steps, Stop
from sim.engine.cluster import LINKS, STOPS
from sim.engine.events import Cluster, Run, simulate
from sim.engine.simulated_clock import SimulatedClock

Log = list[tuple[int, float, float, str, int, int, int, str]]


def decode(
    choice: Parameters, matches: Sequence[bool], units: int | None = None, cost: dict[str, Any] | None = None, **options: Any
) -> Run:
    """Decode one token more than there are matches, the last a miss, after a prompt of one token."""
    tokens = len(matches) + 1
    per_layer = options.pop("per_layer", False)
    cluster = Cluster(units or choice.units, **options)
    world = World(1, choice.layers, [*matches, False])
    steps = ppd.decode(choice, [0], tokens)
    return simulate(steps, tokens, cluster, UnitCost(choice.layers, **(cost or {})), world, per_layer=per_layer, record=True)


def play(steps: Steps, units: int, cost: UnitCost, tokens: int = 1, **options: Any) -> Run:
    """Run a hand-written algorithm."""
    per_layer = options.pop("per_layer", False)
    world = World(1, cost.layers, [])
    return simulate(steps, tokens, Cluster(units, **options), cost, world, per_layer=per_layer, record=True)


def log(run: Run, what: str = "", unit: int | None = None) -> Log:
    """Spans with unit, pass, start, end and fate, ordered by time and unit, without the process numbers."""
    rows = [(row.unit, row.start, row.end, row.what, row.position, row.first, row.last, row.fate) for row in run.intervals]
    rows.sort(key=lambda row: (row[1], row[2], row[0]))
    return [row for row in rows if row[3].startswith(what) and (unit is None or row[0] == unit)]


# --- The paper's figure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_layer", [False, True])
def test_algorithm_2_matches_the_figure_of_the_paper(per_layer: bool) -> None:
    """Four layers, prediction at the second, two candidates, three tokens: a match, a miss, and the last."""
    run = decode(Parameters(4, 2, 2), [True, False], per_layer=per_layer)
    assert log(run) == [
        (0, 0, 2, "forward", 0, 0, 2, "kept"),
        (0, 2, 4, "forward", 0, 2, 4, "kept"),
        (1, 2, 4, "forward", 1, 0, 2, "kept"),  # the right candidate: the main process goes on from here
        (2, 2, 4, "forward", 1, 0, 2, "discarded"),
        (0, 4, 4, "forward", 1, 2, 2, "kept"),  # it is at the exit layer already: only a head
        (0, 4, 6, "forward", 1, 2, 4, "kept"),
        (1, 4, 6, "forward", 2, 0, 2, "discarded"),
        (2, 4, 6, "forward", 2, 0, 2, "discarded"),
        (0, 6, 8, "forward", 2, 0, 2, "kept"),
        (0, 8, 10, "forward", 2, 2, 4, "kept"),
        (1, 8, 10, "forward", 3, 0, 2, "discarded"),
        (2, 8, 10, "forward", 3, 0, 2, "discarded"),
    ]
    assert run.commits == [(4, "match", 1), (6, "miss", 1), (10, "miss", 1)]
    assert run.tokens == [1, 2, 3]
    assert (run.latency, run.busy, run.peak_units, run.passes) == (10, 22, 3, 12)


def test_processes_have_distinct_numbers() -> None:
    run = decode(Parameters(4, 2, 2), [True, False])
    mains = {row.process for row in run.intervals if row.unit == 0}
    subs = [row.process for row in run.intervals if row.unit > 0]
    assert len(mains) == 1
    assert sorted({*mains, *subs}) == list(range(7))
    assert len(set(subs)) == len(subs) == 6


def test_eager_form_stops_wrong_candidates_and_waits_for_the_right_one() -> None:
    """d = 5, d' = 4, k = 2: sub-processes have run one layer of four when the token is known."""
    run = decode(Parameters(5, 4, 2, form="eager"), [True])
    assert log(run) == [
        (0, 0, 4, "forward", 0, 0, 4, "kept"),
        (0, 4, 5, "forward", 0, 4, 5, "kept"),
        (2, 4, 5, "forward", 1, 0, 4, "cancelled"),
        (1, 4, 8, "forward", 1, 0, 4, "kept"),
        (0, 8, 8, "forward", 1, 4, 4, "kept"),
        (0, 8, 9, "forward", 1, 4, 5, "kept"),
        (1, 8, 9, "forward", 2, 0, 4, "cancelled"),
        (2, 8, 9, "forward", 2, 0, 4, "cancelled"),
    ]
    assert (run.latency, run.busy, run.peak_units) == (9, 9 + 3 + 1, 3)


def test_nested_form_continues_with_the_right_process() -> None:
    """d = 3, d' = 1, k = 1, a match: at time 1 the next token's process starts, at 2 its own; it verifies at 4."""
    run = decode(Parameters(3, 1, 1, form="nested"), [True])
    assert log(run, "forward", unit=0)[:2] == [(0, 0, 1, "forward", 0, 0, 1, "kept"), (0, 1, 3, "forward", 0, 1, 3, "kept")]
    assert [row[1:3] for row in log(run) if row[4] == 1] == [(1, 2), (2, 4)]
    assert [row[1:3] for row in log(run) if row[4] == 2] == [(2, 3), (3, 4)]
    assert [row[1:3] for row in log(run) if row[4] == 3] == [(3, 4)]
    assert {row[-1] for row in log(run) if row[4] <= 1} == {"kept"}
    assert {row[-1] for row in log(run) if row[4] == 3} == {"cancelled"}
    assert run.commits == [(3, "match", 1), (4, "miss", 1)]
    assert (run.latency, run.busy) == (4, 3 + 3 + 2 + 1)


def test_plain_decoding() -> None:
    steps = autoregressive.decode(autoregressive.Parameters(3), [0, 1], 2)
    run = simulate(steps, 2, Cluster(1), UnitCost(3, final_head=0.5), World(2, 3, []), record=True)
    assert log(run) == [(0, 0, 3, "forward", 0, 0, 3, "kept"), (0, 3, 6.5, "forward", 1, 0, 3, "kept"),
                        (0, 6.5, 10, "forward", 2, 0, 3, "kept")]  # fmt: skip
    assert (run.latency, run.busy, run.peak_units) == (10, 10, 1)


# --- Finite units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "commits"),
    [
        (1, [10, 18, 28]),  # main 4, then three subs of 2 in turn: 10; after a match main 2 and subs 6; then 10 more
        (2, [6, 10, 16]),  # the second and third sub-process run after the first and the main process
        (3, [6, 10, 16]),  # two sub-processes concurrent with the main process, the third afterwards
        (4, [4, 6, 10]),
        (9, [4, 6, 10]),
    ],
)
def test_three_candidates_on_fewer_units(units: int, commits: list[float]) -> None:
    run = decode(Parameters(4, 2, 3), [True, False], units)
    assert [time for time, *_ in run.commits] == commits
    assert run.latency == commits[-1]
    assert run.busy == 10 + 3 * 3 * 2  # the busy time does not change
    assert run.peak_units == min(units, 4)


def test_main_process_runs_first_on_one_unit() -> None:
    run = decode(Parameters(4, 2, 2), [], 1)
    assert [row[1:3] + row[5:7] for row in log(run)] == [(0, 2, 0, 2), (2, 4, 2, 4), (4, 6, 0, 2), (6, 8, 0, 2)]


@pytest.mark.parametrize(("form", "units"), [*itertools.product(ppd.FORMS, [1, 2, 3])])
def test_units_run_one_process_at_a_time_and_peak_matches_the_log(form: str, units: int) -> None:
    cost = {"link": 0.5, "early_head": 0.25, "dispatch": 0.125, "promotion": 0.5}
    run = decode(Parameters(6, 3, 3, form=form), [True, True, False, True], units, cost)
    held = [row for row in run.intervals if row.unit >= 0]
    for unit in range(units):
        mine = sorted((row.start, row.end) for row in held if row.unit == unit)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    assert run.busy == pytest.approx(sum(row.end - row.start for row in held))
    at_once = [sum(other.start <= row.start < other.end for other in held) for row in held if row.end > row.start]
    assert run.peak_units == max(at_once) == units


def test_verify_and_stop_precede_start_at_equal_times() -> None:
    """d = 12, d' = 4, k = 2: 1 + 2 + 4 processes, not 15; all matches: busy time 184, with processes started past the end."""
    for matches in itertools.product((False, True), repeat=3):
        assert decode(Parameters(12, 4, 2, form="nested"), matches, 20).peak_units == 7
    world = World(1, 12, [True] * 6)
    run = simulate(ppd.decode(Parameters(12, 4, 2, form="nested"), [0], 6), 6, Cluster(7), UnitCost(12), world)
    assert (run.latency, run.busy, run.peak_units) == (12 + 5 * 4, 184, 7)


# --- Links, dispatch, promotion -----------------------------------------------------------------------------------------


def test_separate_links_transfer_concurrently() -> None:
    run = decode(Parameters(4, 2, 2), [True], cost={"link": 1.0})
    assert log(run, "link") == [(-1, 2, 3, "link", -1, 0, 0, "kept")] * 2 + [(-1, 5, 6, "link", -1, 0, 0, "kept")] * 2
    assert [row[1:3] for row in log(run, unit=1)] == [row[1:3] for row in log(run, unit=2)] == [(3, 5), (6, 8)]
    assert [time for time, *_ in run.commits] == [5, 8]
    assert run.busy == 4 + 2 + 4 * 2  # a transfer occupies no unit


def test_shared_link_carries_one_transfer_at_a_time() -> None:
    run = decode(Parameters(4, 2, 2), [True], cost={"link": 1.0}, links="shared")
    assert [row[1:3] for row in log(run, "link")] == [(2, 3), (3, 4), (6, 7), (7, 8)]
    assert [row[1:3] for row in log(run, unit=1)] == [(3, 5), (7, 9)]
    assert [row[1:3] for row in log(run, unit=2)] == [(4, 6), (8, 10)]
    assert [time for time, *_ in run.commits] == [6, 10]


def test_promotion_occupies_the_link_and_the_main_process() -> None:
    run = decode(Parameters(4, 2, 2), [True, False], cost={"link": 1.0, "promotion": 0.5}, links="shared")
    assert log(run, "promotion") == [(-1, 6, 6.5, "promotion", -1, 0, 0, "kept")]
    assert [time for time, *_ in run.commits] == [6, 10.5, 16.5]
    run = decode(Parameters(4, 2, 2), [True, False], cost={"promotion": 0.5})
    assert [time for time, *_ in run.commits] == [4, 6.5, 10.5]
    assert not log(run, "link")


def test_transfers_on_a_shared_link_queue() -> None:
    """Two processes send at the same time: a promotion waits for a busy link."""

    def inner() -> Steps:
        yield Forward("target", (0,), 0, LayerSpan(0, 1))
        yield Fork((Forward("target", (1,), 1, LayerSpan(0, 1)),) * 2, (None, None))  # at 4: links 4-6, 6-8
        yield Forward("target", (1,), 1, LayerSpan(0, 1))

    def outer() -> Steps:
        subs = yield Fork((inner(), Forward("other", (0,), 0, LayerSpan(0, 1))), (1, 2))  # links 0-2, 2-4; run 2-3, 4-5
        yield Join((subs[1],))
        yield Commit("token", (1,))

    run = play(outer(), 5, UnitCost(1, link=2.0), links="shared")
    assert [row[1:3] for row in log(run, "link")] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert run.latency == 5


@pytest.mark.parametrize(("law", "seconds"), [("linear", 0.5 + 3 * 0.25), ("tree", 0.5 + 2 * 0.25)])
def test_dispatch_occupies_the_unit_of_the_main_process(law: str, seconds: float) -> None:
    """Dispatch time by the number of sub-processes, or by the depth of the tree of four processes; they start after it."""
    run = decode(Parameters(4, 2, 3), [], cost={"dispatch": 0.5, "dispatch_per_process": 0.25, "dispatch_law": law})
    assert log(run, "dispatch") == [(0, 2, 2 + seconds, "dispatch", -1, -1, -1, "kept")]
    assert [row[1] for row in log(run, "forward") if row[0] > 0] == [2 + seconds] * 3
    assert run.latency == 4 + seconds
    assert run.busy == 4 + seconds + 3 * 2
    assert run.peak_units == 4


def test_heads_belong_to_their_pass() -> None:
    for per_layer in (False, True):
        run = decode(Parameters(4, 2, 1), [True], cost={"early_head": 0.5, "final_head": 0.25}, per_layer=per_layer)
        assert [row[1:3] for row in log(run, unit=0)] == [(0, 2.5), (2.5, 4.75), (4.75, 5.25), (5.25, 7.5)]
        assert [row[1:3] for row in log(run, unit=1)] == [(2.5, 4.5), (5.25, 7.25)]  # they have no head


def test_uneven_layers() -> None:
    for per_layer in (False, True):
        run = decode(Parameters(3, 2, 1), [True], cost={"layer_times": (1.0, 4.0, 2.0)}, per_layer=per_layer)
        assert [row[1:3] for row in log(run, unit=0)] == [(0, 5), (5, 7), (7, 11), (11, 13)]
        assert [row[1:3] for row in log(run, unit=1)] == [(5, 6), (11, 12)]


# --- Stopping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "end"), [("now", 4), ("layer", 4.5), ("pass", 6.5)])
@pytest.mark.parametrize("per_layer", [False, True])
def test_wrong_candidate_stopped_in_the_middle_of_a_layer(stop: str, end: float, per_layer: bool) -> None:
    """d = 4, d' = 3: it starts at 3.5, half a layer late, and is stopped at 4; the last one ends with the decoding."""
    choice = Parameters(4, 3, 1, form="eager")
    run = decode(choice, [False], cost={"link": 0.5}, stop=stop, per_layer=per_layer)
    assert log(run, unit=1) == [(1, 3.5, end, "forward", 1, 0, 3, "cancelled"), (1, 7.5, 8, "forward", 2, 0, 3, "cancelled")]
    assert (run.latency, run.busy) == (8, 8 + (end - 3.5) + 0.5)
    assert run.commits == [(4, "miss", 1), (8, "miss", 1)]


def stopped_after(pass_: Forward, seconds: int, more: int = 9) -> Steps:
    """Start a pass on unit 1, run `seconds` layers of another model, stop the pass, and run `more` layers."""
    subs = yield Fork((pass_,), (1,))
    yield Forward("other", (0,), 0, LayerSpan(0, seconds))
    yield Stop(subs)
    yield Forward("rest", (0,), 0, LayerSpan(0, more))
    yield Commit("token", (1,))


COST = UnitCost(9, layer_times=(1.0,) * 9, early_head=1.5)


@pytest.mark.parametrize(
    ("stop", "seconds", "end"),
    [
        ("now", 1, 1), ("now", 3, 3), ("layer", 1, 1), ("layer", 2, 2), ("layer", 3, 3.5),  # 3: in the head, whose end is 3.5
        ("pass", 1, 3.5), ("pass", 3, 3.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("per_layer", [False, True])
def test_stop_at_boundaries_between_layers_and_the_head(stop: str, seconds: int, end: float, per_layer: bool) -> None:
    """Two layers and a head of 1.5 layer-times; a pass stopped on a boundary ends there."""
    steps = stopped_after(Forward("target", (0,), 0, LayerSpan(0, 2), heads=1), seconds)
    run = play(steps, 2, COST, stop=stop, per_layer=per_layer)
    assert [row[1:3] + row[-1:] for row in log(run, unit=1)] == [(0, end, "cancelled")]
    assert run.busy == seconds + 9 + end


def test_stop_at_boundaries_of_uneven_layers() -> None:
    """Layers 1 and 2 of 4 and 3: stopped after 2 the pass, which began with layer 1, ends its layer at 4; after 5 at 7."""
    cost = UnitCost(4, layer_times=(1.0, 4.0, 3.0, 0.0))
    for seconds, end in ((1, 4), (2, 7)):
        steps = stopped_after_prompt(Forward("target", (1,), 1, LayerSpan(1, 3)), seconds)
        run = play(steps, 2, cost, stop="layer")
        assert [row[1:3] for row in log(run, unit=1)] == [(9, 9 + end)]


def stopped_after_prompt(pass_: Forward, layers: int) -> Steps:
    """As before, after a prompt of 8 and layer 0 of the next token, with own passes of 1 or 5."""
    yield Forward("target", (0,), 0, LayerSpan(0, 4))
    yield Forward("target", (1,), 1, LayerSpan(0, 1))
    yield from stopped_after(pass_, layers, 4)


@pytest.mark.parametrize("layer", [0.1, 0.3, 0.7])
def test_stop_on_layer_boundary_ends_there(layer: float) -> None:
    """All processes run equal layers: a stop at the end of a layer is the same with one event per pass and per layer."""
    for d in range(4, 12):
        for exit_at in range(-(-d // 2), d):
            choice, cost = Parameters(d, exit_at, 1, form="eager"), {"layer_times": (layer,) * d}
            now, later = (decode(choice, [False, False], cost=cost, stop=stop) for stop in ("now", "layer"))
            assert later.busy == pytest.approx(now.busy)


def test_process_waits_for_a_unit_in_use() -> None:
    """The next sub-process on unit 1 starts when the stopped one releases it: `now` at 1, `layer` at 1, `pass` at 5."""
    for stop, start in (("now", 1), ("layer", 1), ("pass", 5)):

        def steps() -> Steps:
            subs = yield Fork((Forward("target", (0,), 0, LayerSpan(0, 5)),), (1,))
            yield Forward("other", (0,), 0, LayerSpan(0, 1))
            yield Stop(subs)
            subs = yield Fork((Forward("target", (0,), 0, LayerSpan(0, 2)),), (1,))
            yield Join(subs)
            yield Commit("token", (1,))

        run = play(steps(), 2, UnitCost(9), stop=stop)
        assert log(run, unit=1)[1][1:3] == (start, start + 2)
        assert run.latency == start + 2


def test_stop_ends_children_and_processes_not_yet_started() -> None:
    def tree(depth: int, closed: list[int]) -> Steps:
        try:
            yield Fork(tuple(tree(depth - 1, closed) for _ in range(2)) if depth else (), (None,) * (2 if depth else 0))
            yield Forward("target", (0,), 0, LayerSpan(0, 9))
        finally:
            closed.append(depth)

    def steps(closed: list[int]) -> Steps:
        subs = yield Fork((tree(2, closed),), (1,))
        yield Forward("other", (0,), 0, LayerSpan(0, 1))
        yield Stop(subs)
        yield Forward("rest", (0,), 0, LayerSpan(0, 9))
        yield Commit("token", (1,))

    for units in (8, 4):  # on four units, four of the seven never get one
        closed: list[int] = []
        run = play(steps(closed), units, UnitCost(9))
        assert sorted(closed) == [0] * 4 + [1] * 2 + [2]
        assert run.busy == 10 + (min(units, 8) - 1)
        assert {row[1:3] for row in log(run) if row[0] > 0} == {(0, 1)}


def test_process_stopped_in_transfer_never_runs() -> None:
    run = decode(Parameters(4, 2, 2, form="eager"), [False], cost={"link": 5.0})
    assert [row[0] for row in log(run, "forward")] == [0] * 4
    assert (run.latency, run.busy) == (8, 8)


# --- Moves ----------------------------------------------------------------------------------------------------------------


def test_moves_to_another_unit_are_counted() -> None:
    """Moves from unit 0 to 1, not again to 1, to 2, and not to 9, which does not exist; a sub-process starts on its first unit."""

    def steps() -> Steps:
        for at, unit in enumerate((1, 1, 2, 9)):
            yield Forward("target", (at,), at, LayerSpan(0, 2), unit=unit)
        yield Join((yield Fork((sub(),), (None,))))
        yield Commit("token", (1,))

    def sub() -> Steps:
        yield Forward("target", (4,), 4, LayerSpan(0, 2), unit=0)

    run = play(steps(), 3, UnitCost(2, link=5.0))
    assert run.account.moves == 2
    made = [(row.unit, row.start) for row in run.intervals if row.what == "forward"]
    assert made == [(1, 5), (1, 7), (2, 14), (2, 16), (0, 23)]  # the sub-process has arrived over a link, and does not move again
    assert [(row.start, row.end) for row in run.intervals if row.what == "link"] == [(0, 5), (9, 14), (18, 23)]


# --- What the simulator refuses -------------------------------------------------------------------------------------------


def test_algorithm_that_ends_early_is_an_error() -> None:
    def one_token() -> Steps:
        yield Forward("target", (0,), 0, LayerSpan(0, 4))
        yield Commit("token", (1,))

    assert play(one_token(), 1, UnitCost(4)).latency == 4
    with pytest.raises(RuntimeError, match="came to a halt before it had generated all its tokens"):
        play(one_token(), 1, UnitCost(4), tokens=2)


def follower(occupied: int, by: str = "other") -> Steps:
    """A process waits for its unit, while the sub-process that follows it has a unit immediately."""

    def parent() -> Steps:
        subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 4)),), (2,))
        yield Forward("target", (0,), 0, LayerSpan(0, 4))
        yield Join(subs)
        yield Commit("token", (1,))

    yield Join((yield Fork((Forward(by, (0,), 0, LayerSpan(0, occupied)), parent()), (1, 1))))


def test_child_ahead_of_its_parent_is_an_error() -> None:
    """The sub-process starts too early: at 1 it has finished layer 0, when its parent starts."""
    with pytest.raises(CacheError, match="layer 0 of position 0 was followed before it had run"):
        play(follower(1), 3, UnitCost(4), per_layer=True)


def test_child_done_before_its_parent_starts_is_an_error() -> None:
    with pytest.raises(CacheError, match="was followed before it had run"):
        play(follower(6), 3, UnitCost(6), per_layer=True)


def test_child_half_a_layer_ahead_is_an_error() -> None:
    """At 1 the sub-process has finished layer 0, which its parent started at 0.5 and has not finished."""
    with pytest.raises(CacheError, match="layer 0 of position 0 was followed before it had run"):
        play(follower(1, "draft"), 3, UnitCost(4, cost_ratio=1 / 8), per_layer=True)


def test_child_in_step_with_its_parent_is_valid() -> None:
    """Both start at 0: at the end of every layer of the sub-process, the parent's row of that layer exists."""

    def steps() -> Steps:
        subs = yield Fork((Forward("target", (1,), 1, LayerSpan(0, 4)),), (1,))
        yield Forward("target", (0,), 0, LayerSpan(0, 4))
        yield Join(subs)
        yield Commit("token", (1,))

    assert play(steps(), 2, UnitCost(4), per_layer=True).latency == 4


@pytest.mark.parametrize("form", ppd.FORMS)
def test_no_form_starts_children_too_early(form: str) -> None:
    cost = {"link": 0.25, "early_head": 0.5, "final_head": 2.0, "promotion": 0.125, "layer_times": (0.5, 2.0, 1.0, 1.0, 3.0, 0.25)}
    for matches in itertools.product((False, True), repeat=4):
        coarse = decode(Parameters(6, 3, 2, form=form), matches, cost=cost)
        fine = decode(Parameters(6, 3, 2, form=form), matches, cost=cost, per_layer=True)
        assert (fine.latency, fine.busy, fine.peak_units) == (coarse.latency, coarse.busy, coarse.peak_units)
        assert log(fine) == log(coarse)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "units must be between 1 and 100000, got 0"),
        ({"units": 100_001}, "units must be between 1 and 100000, got 100001"),
        ({"units": 2, "links": "share"}, r"unknown links 'share'; did you mean shared\?"),
        ({"units": 2, "stop": "never"}, "unknown stop 'never'; .*known: layer, now, pass"),
    ],
)
def test_invalid_clusters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Cluster(**arguments)


def test_without_a_record_there_are_no_intervals() -> None:
    choice = Parameters(4, 2, 2)
    run = simulate(ppd.decode(choice, [0], 2), 2, Cluster(3), UnitCost(4, link=0.5, promotion=1.0), World(1, 4, [True]))
    assert run.intervals == []
    recorded = decode(choice, [True], cost={"link": 0.5, "promotion": 1.0})
    assert (run.latency, run.busy) == (recorded.latency, recorded.busy)
    assert all(isinstance(row, Span) for row in recorded.intervals)


# --- Units that slow each other down ------------------------------------------------------------------------------------


class Shared(UnitCost):
    """Units of one host: each pass takes longer if more of them are busy."""

    units_share = True

    def slowdown_among(self, others: int) -> float:
        return 1.0 + 0.5 * others


def test_concurrent_passes_slow_each_other_down() -> None:
    """By hand: alone for 2, concurrent with another pass until the shorter one ends, then alone again."""

    def side() -> Steps:
        yield Forward("target", (5,), 1, LayerSpan(0, 2))

    def main() -> Steps:
        yield Forward("target", (7,), 0, LayerSpan(0, 2))
        subs = yield Fork((side(),), (1,))
        yield Forward("target", (7,), 0, LayerSpan(2, 6))
        yield Join(subs)
        yield Commit("token", (1,))

    run = play(main(), 2, Shared(6))
    # From 2 on both run at two thirds of their speed: 2 layers take 3; then the main process has 2 of 4 left, and runs alone.
    assert log(run) == [
        (0, 0, 2, "forward", 0, 0, 2, "kept"),
        (1, 2, 5, "forward", 1, 0, 2, "discarded"),
        (0, 2, 7, "forward", 0, 2, 6, "kept"),
    ]
    assert run.latency == 7


def test_stopped_pass_no_longer_slows_others() -> None:
    def side() -> Steps:
        yield Forward("target", (5,), 1, LayerSpan(0, 4))

    def main() -> Steps:
        yield Forward("target", (7,), 0, LayerSpan(0, 4))
        subs = yield Fork((side(),), (1,))
        yield Forward("target", (7,), 0, LayerSpan(4, 6))  # takes 3 while the other runs
        yield Stop(subs)
        yield Forward("target", (7,), 1, LayerSpan(0, 6))
        yield Commit("token", (1,))

    run = play(main(), 2, Shared(6))
    assert [row[1:3] for row in log(run, unit=0)] == [(0, 4), (4, 7), (7, 13)]
    assert [row[1:3] + row[7:] for row in log(run, unit=1)] == [(4, 7, "cancelled")]


@pytest.mark.parametrize("matches", list(itertools.product([False, True], repeat=4)))
def test_independent_units_take_unchanged_times(matches: tuple[bool, ...]) -> None:
    class Alone(UnitCost):
        units_share = True

        def slowdown_among(self, others: int) -> float:
            return 1.0

    choice = Parameters(6, 4, 2, "eager")
    alone, before = (
        simulate(ppd.decode(choice, [0], 5), 5, Cluster(3), cost, World(1, 6, [*matches, False]), record=True)
        for cost in (Alone(6), UnitCost(6))
    )
    assert alone.latency == before.latency
    assert alone.busy == before.busy
    assert log(alone) == log(before)


# --- Shared events --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_passes_that_share_an_event_end_as_with_one_event_each(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(ppd.FORMS))
    layers = data.draw(st.integers(2, 6))
    exit_layer = data.draw(st.integers((layers + 1) // 2, layers))
    choice = Parameters(layers, exit_layer, data.draw(st.integers(1, 3)), form=form)
    matches = data.draw(st.lists(st.integers(0, choice.candidates), min_size=1, max_size=6))
    cost = UnitCost(layers, link=data.draw(st.sampled_from([0.0, 0.5, 1.0])), early_head=data.draw(st.sampled_from([0.0, 1.0])))
    cluster = Cluster(
        data.draw(st.integers(1, choice.units + 1)), data.draw(st.sampled_from(LINKS)), data.draw(st.sampled_from(STOPS))
    )

    def played() -> Run:
        tokens = len(matches)
        return simulate(ppd.decode(choice, [0], tokens), tokens, cluster, cost, World(1, layers, matches))

    shared = played()
    with mock.patch.object(SimulatedClock, "call_together", SimulatedClock.call_later):
        assert played() == shared


def test_the_last_token_comes_before_other_ends_of_its_event() -> None:
    """Passes end together with the one that gives the last token: they are not followed by further steps."""
    span = LayerSpan(0, 2)

    def follower() -> Steps:
        yield Forward("target", (1,), 1, span)
        raise AssertionError("continued after the last token")

    def steps() -> Steps:
        yield Forward("target", (0,), 0, span)
        yield Fork((follower(),), (1,))
        yield Forward("target", (1,), 1, span)
        yield Commit("token", (1,))

    run = simulate(steps(), 1, Cluster(2), UnitCost(2), World(1, 2))
    assert (run.latency, run.busy, run.passes) == (4.0, 6.0, 3)


def test_a_pass_is_not_made_alone_before_others_end_with_its_event() -> None:
    """The first of two passes of one event ends, and its process continues while the other still holds its unit."""
    span = LayerSpan(0, 2)

    def steps() -> Steps:
        yield Forward("target", (0,), 0, span)
        tasks = yield Fork((Forward("target", (1,), 1, span),), (1,))
        yield Forward("target", (1,), 1, span)
        yield Forward("target", (2,), 2, span)
        yield Join(tasks)
        yield Commit("token", (1,))

    run = simulate(steps(), 1, Cluster(2), UnitCost(2), World(1, 2))
    assert (run.latency, run.busy, run.peak_units) == (6.0, 8.0, 2)
