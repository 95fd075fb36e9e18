"""Big Little Decoder as a process, vectorised and in expectation: compared with a plain reference and with enumeration."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.account import Totals
from model.interpret.interpreter import count
from model.interpret.simulated_answers import Lossy
from model.methods.bild import paths
from model.methods.bild import theory as formulas
from model.methods.bild.algorithm import Parameters, decode
from model.methods.bild.finite_bild import counts_of, segments
from model.methods.bild.segment_prices import prices
from model.methods.bild.theory import work
from model.methods.bild.threshold_decisions import Independent, RecordedDecisions
from model.steps import Commit, Forward, Read, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.exact import near

DECISIONS = st.lists(st.sampled_from((0, 0, 0, 1, 2)), min_size=1, max_size=24)
FORMS = ("paper", "code", "early")
COST = UnitCost(8, cost_ratio=0.25, operations_ratio=0.5, early_head=0.5, final_head=1.0)


def choice(form: str, max_draft_length: int, **more: Any) -> Parameters:
    if form == "early":
        return Parameters(8, max_draft_length, exit_layer=3, **more)
    return Parameters(8, max_draft_length, variant=form, draft_layers=2, **more)


class Segment(NamedTuple):
    """Start, drafted and kept tokens of a segment, whether it fell back or rolled back, and tokens of the additional pass."""

    start: int
    written: int
    kept: int
    unsure: bool
    back: bool
    again: int


def reference(decisions: list[int], max_draft_length: int, form: str) -> list[Segment]:
    """Algorithm 1 as a plain loop over decisions."""
    found, start, tokens = [], 0, len(decisions)
    while start < tokens:
        room = min(max_draft_length, tokens - start - 1)
        ahead = decisions[start : start + room]
        written = ahead.index(1) if 1 in ahead else room
        kept = next((index for index, each in enumerate(ahead[:written]) if each == 2), written)
        back = kept < written
        again = kept + 2 if back and form == "code" and start + kept + 1 < tokens else 0
        found.append(Segment(start, written, kept, written < room, back, again))
        start += kept + 1 + (again > 0)
    return found


def time_of(segment: Segment, form: str, cost: UnitCost = COST) -> float:
    """Time of a segment, by hand."""
    if form == "early":
        asked = segment.written + segment.unsure
        first = asked * (3 + cost.early_head) + (0 if segment.unsure else 3)
        return first + (5 + cost.final_head) * cost.slowdown(segment.written + 1)
    runs = segment.written + segment.unsure
    time = runs * float(cost.draft_times()) + cost.target_pass * cost.slowdown(segment.written + 1)
    return time + (cost.target_pass * cost.slowdown(segment.again) if segment.again else 0)


def tiles(decisions: list[int], rows: int = 3) -> Iterator[Any]:
    column = np.array(decisions[:-1], dtype=np.uint8)[:, None]
    return (column[start : start + rows] for start in range(0, len(column), rows))


# --- The process ---


def test_a_decoding_by_hand() -> None:
    """A pass of the large model takes 8, one of the small 2; at most three tokens are drafted."""
    decisions = [0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0]

    def commits(form: str) -> list[tuple[float, str, int]]:
        cost = UnitCost(8, cost_ratio=0.25)
        return simulate(decode(choice(form, 3), [0], 12), 12, Cluster(1), cost, Lossy(1, 8, decisions)).commits

    # Two drafted and a wasted pass; three drafted, the second rolled back; three; two, as the large model emits the last.
    assert commits("paper") == [(14, "fallback", 3), (28, "rollback", 2), (42, "cap", 4), (54, "cap", 3)]
    assert commits("code") == [(14, "fallback", 3), (28, "rollback", 2), (36, "again", 1), (50, "cap", 4), (60, "cap", 2)]
    # Three layers per drafted token and the one before, five for all together.
    assert commits("early") == [(14, "fallback", 3), (31, "rollback", 2), (48, "cap", 4), (62, "cap", 3)]


@given(DECISIONS, st.integers(1, 6), st.sampled_from(FORMS))
def test_the_process_equals_the_reference(decisions: list[int], max_draft_length: int, form: str) -> None:
    tokens, parameters = len(decisions), choice(form, max_draft_length)
    run = simulate(decode(parameters, [0], tokens), tokens, Cluster(1), COST, Lossy(1, 8, decisions), record=True)
    want = reference(decisions, max_draft_length, form)
    kinds: list[tuple[str, int]] = []
    for segment in want:
        kinds.append(("rollback" if segment.back else "fallback" if segment.unsure else "cap", segment.kept + 1))
        kinds += [("again", 1)] * (segment.again > 0)
    assert [(kind, size) for _, kind, size in run.commits] == kinds
    assert run.tokens == [*range(1, tokens + 1)]
    assert run.latency == run.busy == sum(time_of(segment, form) for segment in want)
    assert {row.unit for row in run.intervals if row.what == "forward"} == {0}
    widths = [row.width for row in run.intervals if row.last == 8]
    assert widths == [width for each in want for width in (each.written + 1, each.again) if width]
    runs = sum(each.written + each.unsure for each in want)
    if form != "early":
        assert run.passes_of["draft"] == runs
    read = sum(each.written + 1 + each.again for each in want)
    assert formulas.operations(parameters, COST, run.rounds, run.account) == read + 0.5 * runs * (form != "early")
    again = sum((each.again > 0) for each in want)
    assert sum(run.rounds.values()) == len(want) + again
    assert sum(drafted * times for (_, drafted), times in run.rounds.items()) == sum(each.written for each in want)


@example([0, 2, 0, 0, 1, 0, 0], 3, "code", 2)
@given(DECISIONS, st.integers(1, 6), st.sampled_from(("paper", "code")), st.integers(1, 3))
def test_separate_models_use_two_units_and_the_link(decisions: list[int], max_draft_length: int, form: str, prompt: int) -> None:
    """Drafted tokens go to the large model, and its answer back: two links whenever the small model ran."""
    tokens, cost = len(decisions), UnitCost(8, cost_ratio=0.25, link=0.5)
    parameters = choice(form, max_draft_length, placement="separate")
    steps, world = decode(parameters, [*range(prompt)], tokens), Lossy(prompt, 8, decisions)
    run = simulate(steps, tokens, Cluster(2), cost, world, record=True)
    want = reference(decisions, max_draft_length, form)
    sent = sum(segment.written + segment.unsure > 0 for segment in want)
    # The small model reads the prompt on its unit: the process returns only if the small model never runs again.
    prefill = (8 + 2 + (tokens == 1)) * (prompt > 1)
    assert run.latency == sum(time_of(segment, form, cost) for segment in want) + sent + prefill
    assert {(row.unit, row.last) for row in run.intervals if row.what == "forward"} <= {(0, 8), (1, 2)}


@given(DECISIONS, st.integers(1, 6), st.sampled_from(FORMS))
def test_simulation_layer_by_layer_gives_the_same_times(decisions: list[int], max_draft_length: int, form: str) -> None:
    tokens, parameters = len(decisions), choice(form, max_draft_length)
    one, many = (
        simulate(decode(parameters, [0], tokens), tokens, Cluster(1), COST, Lossy(1, 8, decisions), per_layer=per_layer)
        for per_layer in (False, True)
    )
    assert [kind for _, *kind in one.commits] == [kind for _, *kind in many.commits]
    assert many.latency == pytest.approx(one.latency, rel=1e-12)
    assert many.account == one.account


def read_by(steps: Steps, world: Lossy) -> Iterator[tuple[Forward, list[int]]]:
    """Yield the passes of the process, each with all tokens that its model has read: in the pass, and before in its cache."""
    known: dict[tuple[str, int], list[int]] = {}
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Forward):
            assert 0 <= step.layers.first < step.layers.last
            assert not step.unit  # there is a single unit
            for layer in range(step.layers.first, step.layers.last):
                held = known.setdefault((step.role, layer), [])
                assert 0 <= step.at <= len(held)
                held[step.at :] = step.tokens
            yield step, known[step.role, step.layers.last - 1]
            answer = step
        elif isinstance(step, Read):
            assert step.kind in ("next", "confidence", "distance")
            answer = world.read(step)
        elif isinstance(step, Commit):
            world.written = [*world.written, *step.tokens]


@given(DECISIONS, st.integers(1, 6), st.sampled_from(FORMS), st.integers(1, 3))
def test_models_read_exactly_the_sequence(decisions: list[int], max_draft_length: int, form: str, prompt: int) -> None:
    """Also after a rollback: no model continues from a rolled-back token."""
    tokens, world = len(decisions), Lossy(prompt, 8, decisions)
    before = [*range(prompt)]
    for step, read in read_by(decode(choice(form, max_draft_length), before, tokens), world):
        text = [*before, *world.written]
        if step.at + len(step.tokens) < prompt:
            assert read == before[:-1]
        elif len(read) <= len(text):
            assert read == text
        else:  # drafted, not yet committed: a wrong token is negative, and nothing after it is right
            assert read[: len(text)] == text
            right = list(itertools.takewhile(lambda pair: pair[0] == pair[1], enumerate(read)))
            assert all(token < 0 for token in read[len(right) :])
    assert world.written == [*range(prompt, prompt + tokens)]  # and then the process ends


def test_a_stop_token_ends_the_sequence() -> None:
    for form, stop in itertools.product(FORMS, (3, 5, 6)):
        work_ = count(decode(choice(form, 3), [0], 12, (stop, 99)), Lossy(1, 8, [0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0]), 12)
        assert work_.tokens == [*range(1, stop + 1)]


def test_thresholds_decide_on_confidences_and_distances() -> None:
    """Below one it falls back, above the other it rolls back; in the variant `code` only if the token differs."""

    class Told(Lossy):
        def read(self, step: Read) -> Any:
            if step.kind == "confidence":
                return 0.4
            return 2.0 if step.kind == "distance" else super().read(step)

    def kinds(**given_: Any) -> list[str]:
        return count(decode(Parameters(8, 2, **given_), [0], 3), Told(1, 8, [0, 0, 0]), 3).commits

    assert kinds(fallback_threshold=0.4, rollback_threshold=2.0) == ["cap"]
    assert kinds(fallback_threshold=0.41, rollback_threshold=2.0) == ["fallback", "fallback", "cap"]
    assert kinds(fallback_threshold=0.4, rollback_threshold=1.9) == ["rollback", "rollback", "cap"]
    assert kinds(fallback_threshold=0.4, rollback_threshold=1.9, variant="code") == ["cap"]  # the large model's own token too
    assert kinds(fallback_threshold=0.0, rollback_threshold=float("inf")) == ["cap"]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"layers": 0}, "^layers must be between 1 and"), ({"layers": 10_001}, "^layers must be between 1 and 10000, got 10001"),
        ({"max_draft_length": 0}, "max_draft_length must be between 1 and 250, got 0"),
        ({"max_draft_length": 251}, "max_draft_length must be between 1 and 250, got 251"),
        ({"fallback_threshold": 1.1}, "fallback_threshold must be between 0 and 1, got 1.1"),
        ({"rollback_threshold": -1}, "rollback_threshold must be at least 0, got -1"),
        ({"rollback_threshold": float("nan")}, "rollback_threshold"), ({"variant": "cod"}, "unknown variant 'cod'"),
        ({"placement": "away"}, "unknown placement 'away'"), ({"draft_layers": 0}, "draft_layers must be between 1 and"),
        ({"exit_layer": 8}, "exit_layer must be between 1 and layers-1=7, got 8"), ({"exit_layer": 0}, "exit_layer"),
        ({"exit_layer": 2, "variant": "code"}, "variant must be 'paper' with an exit_layer"),
        ({"exit_layer": 2, "placement": "separate"}, "placement must be 'colocated' with an exit_layer"),
        ({"exit_layer": 2, "draft_layers": 3}, "draft_layers must be 1 with an exit_layer"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message.replace("(", r"\(")):
        Parameters(**{"layers": 8} | given_)


def test_reserved_units() -> None:
    assert [Parameters(8, placement=name).units for name in ("colocated", "separate")] == [1, 2]
    assert (Parameters(8).max_draft_length, Parameters(8, 5).longest_draft, Parameters(8, 5).largest_pass) == (10, 5, 6)
    assert Parameters.roles_for({}) == ("draft",)
    assert Parameters.roles_for({"exit_layer": 2}) == ()
    assert not Parameters.EXACT
    assert (Parameters.OUTCOMES, Parameters.COSTS) == (("decision",), ("verify_cost", "link", "early_head"))


def test_one_token_needs_no_price_of_the_small_model() -> None:
    run = simulate(decode(choice("paper", 3), [0], 1), 1, Cluster(1), UnitCost(8, cost_ratio=0.25), Lossy(1, 8, [0]))
    assert formulas.operations(choice("paper", 3), UnitCost(8, cost_ratio=0.25), run.rounds, run.account) == 1


# --- Vectorised over replications ---


@example([[0, 2, 0, 0, 1, 0], [1, 0, 0, 2, 0, 0], [2, 2, 2, 2, 2, 0]], 3, "code")
@example([[0, 2, 0, 0, 1, 0], [1, 0, 0, 2, 0, 0], [2, 2, 2, 2, 2, 0]], 3, "paper")
@given(st.lists(DECISIONS, min_size=1, max_size=3), st.integers(1, 6), st.sampled_from(FORMS))
def test_paths_of_many_replications_equal_single_ones(each: list[list[int]], max_draft_length: int, form: str) -> None:
    tokens = min(map(len, each))
    table = np.array([row[:tokens] for row in each], dtype=np.uint8).T
    chunks = (table[start : start + 4] for start in range(0, tokens - 1, 4))
    cut = (chunk[: tokens - 1 - 4 * index] for index, chunk in enumerate(chunks))
    tally = segments(choice(form, max_draft_length), tokens, cut, prices(choice(form, max_draft_length), COST), len(each))
    lengths = np.zeros(max_draft_length + 1)
    for index, row in enumerate(each):
        want = reference(row[:tokens], max_draft_length, form)
        again = sum((segment.again > 0) for segment in want)
        assert tally.time[index] == tally.busy[index] == sum(time_of(segment, form) for segment in want)
        assert tally.rounds[index] == len(want) + again
        assert tally.drafted[index] == sum(segment.written for segment in want)
        read = sum(segment.written + 1 + segment.again for segment in want)
        little = 0 if form == "early" else sum(segment.written + segment.unsure for segment in want)
        assert tally.operations[index] == read + 0.5 * little
        for segment in want:
            lengths[segment.kept] += 1
        lengths[0] += again
    assert tally.accepted.tolist() == lengths.tolist()
    assert tally.accepted.dtype == np.int64  # integers, as they are counts


@pytest.mark.parametrize("max_draft_length", [1, 10, 250])
def test_paths_look_ahead_across_tiles(max_draft_length: int) -> None:
    tokens, rng = 1500, np.random.default_rng(7)
    decisions = rng.choice(3, size=tokens, p=[0.985, 0.01, 0.005]).tolist()
    tally = segments(
        choice("code", max_draft_length), tokens, tiles(decisions, 32), prices(choice("code", max_draft_length), COST), 1
    )
    want = reference(decisions, max_draft_length, "code")
    assert tally.time[0] == sum(time_of(segment, "code") for segment in want)
    assert tally.drafted[0] == sum(segment.written for segment in want)


def test_prices_by_width_and_with_links() -> None:
    cost = UnitCost(8, cost_ratio=0.25, operations_ratio=0.5, link=0.5, verify_cost=((1, 4.0), (2, 5.0), (3, 7.0)))
    apart, together = (prices(choice("code", 2, placement=name), cost) for name in ("separate", "colocated"))
    assert together.segment[0].tolist() == [[8, 10 + 2, 14 + 4], [8 + 2, 10 + 4, 14 + 6]]
    assert apart.segment[0].tolist() == [[8, 13, 19], [11, 15, 21]]  # nothing is sent without a draft
    assert apart.segment[1].tolist() == together.segment[1].tolist() == together.segment[0].tolist()
    assert apart.segment[2].tolist() == [[1, 2.5, 4], [1.5, 3, 4.5]]
    assert apart.rollback_pass[0].tolist()[:2] == [10, 14]
    assert apart.rollback_pass[2].tolist() == [2, 3, 4]
    uncounted = prices(choice("paper", 2), UnitCost(8, cost_ratio=0.25)).segment[2]
    assert uncounted[0, 0] == 1  # without the small model its unknown price does not matter
    assert np.isnan(uncounted.ravel()[1:]).all()
    early = prices(choice("early", 2), UnitCost(8, early_head=0.5, final_head=1.0))
    assert early.segment[0].tolist() == [[9, 12.5, 16], [9.5, 13, 16.5]]
    assert early.segment[2].tolist() == [[1, 2, 3], [1, 2, 3]]
    # Five of eight layers run at the width of the pass, 4, 5 or 7 quarters; the first three token by token.
    wide = prices(choice("early", 2), UnitCost(8, early_head=0.5, verify_cost=((1, 4.0), (2, 5.0), (3, 7.0))))
    assert wide.segment[0].tolist() == [[8, 3.5 + 3 + 6.25, 7 + 3 + 8.75], [3.5 + 5, 7 + 6.25, 10.5 + 8.75]]


# --- Expectations ---


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from(FORMS)
)
def test_means_equal_enumeration_of_all_outcomes(rates: list[tuple[int, int]], max_draft_length: int, form: str) -> None:
    tokens, parameters = len(rates) + 1, choice(form, max_draft_length)
    f, r = (np.array([pair[which] / 4 for pair in rates]) for which in (0, 1))
    price = prices(parameters, COST)
    found = formulas.predict(parameters, tokens, Independent(f, r), COST)
    want = np.zeros(5)
    for decisions in itertools.product(range(3), repeat=tokens - 1):
        mass = math.prod(((1 - f[j]) * (1 - r[j]), f[j], (1 - f[j]) * r[j])[each] for j, each in enumerate(decisions))
        tally = segments(parameters, tokens, tiles([*decisions, 0]), price, 1)
        each = tally.time, tally.busy, tally.operations, tally.rounds, tally.drafted
        want += mass * np.array([float(values[0]) for values in each])
    assert np.isnan(found.latency_variance)
    assert near([found.latency, found.busy, found.operations, found.rounds, found.drafted], want, 1e-12)


@example([[0, 2, 0, 0, 1], [0, 0, 0, 0, 2]], "code")
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3), st.sampled_from(FORMS))
def test_moments_of_records_replay_each_record_once(records: list[list[int]], form: str) -> None:
    """Only as many positions as asked for; a single token has no decision."""
    parameters = choice(form, 3)
    for tokens in range(1, 7):
        found = formulas.predict(parameters, tokens, RecordedDecisions(records), COST)
        every = [reference([*row[: tokens - 1], 0], 3, form) for row in records]
        times = [sum(time_of(segment, form) for segment in segments_) for segments_ in every]
        assert near(found.latency, np.mean(times))
        assert near(found.latency_variance, np.var(times), atol=1e-9)
        assert near(found.rounds, np.mean([sum(1 + (segment.again > 0) for segment in segments_) for segments_ in every]))
    with pytest.raises(ParameterError, match="records must cover 6 output positions, got 5"):
        formulas.predict(parameters, 7, RecordedDecisions(records), COST)


def test_a_prediction_has_all_fields() -> None:
    cost = UnitCost(8, cost_ratio=0.25, operations_ratio=0.5, link=1.0, final_head=1.0)
    apart = formulas.predict(choice("paper", 3, placement="separate"), 10, Independent(0.2, 0.1), cost)
    assert (float(apart.units), float(apart.plain_latency)) == (2, 90)
    assert {value.dtype for value in vars(apart).values()} == {np.dtype(np.float64)}
    assert np.isnan(apart.units_ratio)
    assert float(apart.latency) > float(apart.busy)
    together = formulas.predict(choice("paper", 3), 10, Independent(0.2, 0.1), cost)
    assert (float(together.units), float(together.units_ratio)) == (1, 1)
    assert float(together.latency) == float(together.busy) == float(apart.busy)
    with pytest.raises(ParameterError, match="tokens must be between 1 and"):
        formulas.predict(choice("paper", 3), 0, Independent(0.2, 0.1), cost)


def test_many_tokens_approach_the_closed_form() -> None:
    """The effect of the end falls with the length; compared by the increase over a long stretch."""
    for variant in ("paper", "code"):
        parameters, cost = Parameters(24, variant=variant), UnitCost(24, cost_ratio=0.3)
        short, long = (formulas.predict(parameters, n, Independent(0.11, 0.05), cost).latency for n in (1000, 2000))
        speed = 24 * 1000 / float(long - short)
        assert near(speed, formulas.speedup(0.11, 0.05, 10, 0.3, variant=variant), 1e-9)
    early = Parameters(24, exit_layer=6)
    short, long = (formulas.predict(early, n, Independent(0.11, 0.05), UnitCost(24)).latency for n in (1000, 2000))
    # Both models share the first 6 layers: E[n] + 1 tokens run through them one by one, and together through the rest.
    time = 18 / 24 + 6 / 24 * float(formulas.large_inputs(0.11, 10))
    assert near(24 * 1000 / float(long - short), float(formulas.expected_tokens(0.11, 0.05, 10)) / time, 1e-9)


# --- Decisions ---


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_draw_decides_with_the_probabilities_of_the_law(fallback: float, rollback: float) -> None:
    draws = (np.arange(1000) + 0.5)[None] / 1000
    (tile,) = Independent(fallback, rollback).sample(iter([draws]))
    shares = np.bincount(tile[0], minlength=3) / 1000
    assert near(shares, [(1 - fallback) * (1 - rollback), fallback, (1 - fallback) * rollback], rtol=0, atol=2e-3)
    assert tile.dtype == np.uint8


def test_rates_by_position_continue_from_tile_to_tile() -> None:
    law = Independent([0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
    first, second = law.sample(iter([np.full((2, 2), 0.5), np.full((1, 2), 0.5)]))
    assert (first.tolist(), second.tolist()) == ([[2, 2], [1, 1]], [[0, 0]])
    with pytest.raises(ParameterError, match="fallback_rate must have one rate for each of 4 output positions, got 3"):
        list(law.sample(iter([np.full((4, 2), 0.5)])))
    for bad in ([[0.5]], []):
        with pytest.raises(ParameterError, match="rollback_rate must be a number or a list of numbers"):
            Independent(0.5, bad)
    for name, value in (("fallback_rate", 1.5), ("rollback_rate", -0.5)):
        with pytest.raises(ParameterError, match=f"{name} must be between 0 and 1, got {value}"):
            Independent(**{"fallback_rate": 0.5, "rollback_rate": 0.5} | {name: value})


def test_a_record_is_chosen_by_the_first_draw() -> None:
    law = RecordedDecisions([[0, 1, 2], [2, 2, 2]])
    first, second = law.sample(iter([np.array([[0.49, 0.5], [0.9, 0.1]]), np.array([[0.9, 0.1]])]))
    assert (first.tolist(), second.tolist()) == ([[0, 2], [1, 2]], [[2, 2]])
    with pytest.raises(ParameterError, match=r"records\[0, 1\] must be between 0 and 2, got 3"):
        RecordedDecisions([[0, 3]])
    for bad in ([0, 1], []):
        with pytest.raises(ParameterError, match="records must be lists of decisions, all of one length"):
            RecordedDecisions(bad)


# --- Work ---


@given(DECISIONS, st.integers(1, 6), st.sampled_from(FORMS))
def test_work_equals_the_counter(decisions: list[int], max_draft_length: int, form: str) -> None:
    tokens, parameters, digits = len(decisions), choice(form, max_draft_length), np.array(decisions)
    found = count(decode(parameters, [0], tokens), Lossy(1, 8, decisions), tokens).account.totals()
    want = work(parameters, tokens, Independent(digits == 1, digits == 2))
    assert want is not None
    assert found.by_model.keys() == want.by_model.keys()
    assert (want.adoptions, want.adopted_rows) == (0, 0)
    for role, totals in found.by_model.items():
        assert near(totals, want.by_model[role]), role


def test_work_by_hand() -> None:
    """Two tokens of the large model alone: one position read at 0, two at 1; the second has no draft."""
    found = work(choice("paper", 1), 2, Independent(1.0, 0.0))
    assert found is not None
    assert found.by_model["target"] == Totals(2, 16, 16, 8 * (1 + 2), 8 * (1 + 2), 0, 0, 2, 2)
    assert found.by_model["draft"] == Totals(1, 2, 2, 2, 2, 0, 0, 1, 1)
    alone = work(choice("paper", 1), 1, Independent(1.0, 0.0))
    assert alone is not None
    assert list(alone.by_model) == ["target"]
    early = work(choice("early", 3), 2, Independent(0.0, 0.0))
    # Two tokens through three layers one by one, the second without a head, then both through five: 1 + 2 positions in each layer.
    assert early is not None
    assert early.by_model == {"target": Totals(3, 3 * 2 + 5, 8 * 2, 8 * 3, 3 * 3 + 5 * 2, 0, 0, 2, 3)}
    assert work(choice("paper", 3), 2, RecordedDecisions([[0, 1]])) is None


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from(FORMS), st.lists(st.integers(0, 8), min_size=22, max_size=22))
def test_each_position_is_emitted_once(tokens: int, max_draft_length: int, form: str, eighths: list[int]) -> None:
    """By the large model in a segment or after a rollback, or accepted before; with rates by position and with equal ones."""
    parameters = choice(form, max_draft_length)
    f, r = (np.array(eighths[which::2]) / 8 for which in (0, 1))
    laws = [Independent(f, r), Independent(f[0], r[0]), Independent(np.full(11, f[0]), np.full(11, r[0]))]
    by_position, summed = (counts_of(parameters, tokens, laws, by_position=each) for each in (True, False))
    starts = by_position.segment.sum(axis=(1, 2))
    assert near(starts[0], np.ones(3))
    assert np.all(starts <= 1 + 1e-12)
    assert np.all(by_position.reread <= starts + 1e-12)
    assert near(by_position.segment.sum(axis=0), summed.segment[0], 1e-12)
    assert near(by_position.rollback_pass.sum(axis=0), summed.rollback_pass[0], 1e-12, atol=1e-15)
    assert near(summed.segment[..., 1], summed.segment[..., 2], 1e-12)
    # Laws alone, and those of equal rates without others, whose segments are counted by their length.
    for index, law in enumerate(laws):
        alone = counts_of(parameters, tokens, [law])
        assert near(alone.segment[..., 0], summed.segment[..., index], 1e-12)
        assert near(alone.rollback_pass[..., 0], summed.rollback_pass[..., index], 1e-12, atol=1e-15)


def test_walk_needs_a_whole_block() -> None:
    tally = paths.walk(choice("paper", 3), 1, COST, iter(()))
    assert tally.time.shape == (4096,)
    assert set(tally.time) == {9.0}
