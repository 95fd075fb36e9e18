"""PEARL: mean rounds against a Markov chain of both phases in fractions; views against each other on all paths; worked examples."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.interpreter import CountedWork, count
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.peak_demand import Demand
from model.methods.pearl import paths
from model.methods.pearl import theory as pearl
from model.methods.pearl.algorithm import DRAFT_STOPS, REJECTION, Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints, predict_separately
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, RecordedProbabilities, Replay
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import LINKS, STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.scenarios.cases import contention
from tests.support.exact import RATES, close, near

DRAFTS = st.integers(1, 12)
COST = UnitCost(4, cost_ratio=0.25, link=0.25, operations_ratio=0.5, draft_devices=0.5, verify_cost=((1, 1.0), (2, 1.5), (3, 2.0)))


def counted(gamma: int, accept: list[bool]) -> CountedWork:
    tokens, parameters = len(accept), Parameters(4, gamma, draft_layers=2)
    known = ByPosition(np.array(accept, float)).survivors(iter([np.full((tokens, 1), 0.5)]), parameters.longest_draft)
    world = World(1, 4, drafts={"draft": DraftOutcomes("target", known[:, 0].tolist())})
    return count(decode(parameters, [0], tokens), world, tokens)


def round_of(alpha: Fraction, gamma: int) -> Fraction:
    """Mean tokens per round in the long run.

    A pre-verify round verifies a first token and gives one token; if it is accepted, a post-verify round follows. That verifies a
    whole draft and gives the accepted tokens, and the target's token after a rejection; without rejection another one follows.
    """
    whole = [(alpha**kept * (1 - alpha), kept + 1, False) for kept in range(gamma)] + [(alpha**gamma, gamma, True)]
    assert sum(chance for chance, *_ in whole) == 1
    # If post-verify never ends, all rounds are of that kind; else the chain is balanced.
    ends = sum(chance for chance, _, again in whole if not again)
    share = alpha / (alpha + ends) if ends else Fraction(1)
    return 1 - share + share * sum((chance * tokens for chance, tokens, _ in whole), Fraction(0))


@given(RATES, DRAFTS)
def test_tokens_per_round_match_markov_chain_of_phases(alpha: float, gamma: int) -> None:
    assert close(pearl.expected_tokens(alpha, gamma), round_of(Fraction(alpha), gamma))


@given(RATES, DRAFTS, st.floats(0.01, 4))
def test_round_takes_longer_of_draft_and_pass(alpha: float, gamma: int, ratio: float) -> None:
    want = round_of(Fraction(alpha), gamma) / max(gamma * Fraction(ratio), Fraction(1))
    assert close(pearl.speedup(alpha, gamma, ratio), want)


def test_worked_example_of_tokens_per_round() -> None:
    """Acceptance rate 0.5, drafts of two: a post-verify round gives 1.5 tokens, two for every three pre-verify rounds."""
    assert near(pearl.expected_tokens(0.5, 2), 0.6 + 0.4 * 1.5)
    assert near(pearl.speedup(0.5, 2, [0.0, 0.5, 1.0]), [1.2, 1.2, 0.6])
    assert near(pearl.expected_tokens(np.linspace(0, 1, 9), 1), np.ones(9))  # with drafts of one token nothing waits


@given(RATES, DRAFTS, st.floats(0.01, 4))
def test_rejecting_round_does_not_wait_for_its_draft(alpha: float, gamma: int, ratio: float) -> None:
    """The same chain with times of rounds: a pass of the target, one draft pass, or the whole draft."""
    rate, one, whole = Fraction(alpha), max(Fraction(ratio), Fraction(1)), max(gamma * Fraction(ratio), Fraction(1))
    # Post-verify: gamma - 1 tokens wait, and the first of the next draft is verified too; pre-verify: only that one.
    ends = [(rate**kept * (1 - rate), Fraction(1) if kept < gamma - 1 else one) for kept in range(gamma)]
    post = sum((chance * time for chance, time in ends), Fraction(0)) + rate**gamma * whole
    pre = (1 - rate) * one + rate * whole
    share = rate / (rate + 1 - rate**gamma)
    want = round_of(rate, gamma) / (share * post + (1 - share) * pre)
    assert close(pearl.speedup(alpha, gamma, ratio, REJECTION), want)
    assert pearl.speedup(alpha, gamma, ratio, REJECTION) >= pearl.speedup(alpha, gamma, ratio) * (1 - 1e-12)


# --- Finite number of tokens ---


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_counter_formula_and_paths_agree(gamma: int) -> None:
    parameters = Parameters(4, gamma, draft_layers=2)
    for tokens in range(1, 7):
        for outcomes in itertools.product([True, False], repeat=tokens - 1):
            accept = [*outcomes, False]
            work, law = counted(gamma, accept), ByPosition(np.array(accept, float))
            assert work.tokens == [*range(1, tokens + 1)]
            found, known = pearl.predict(parameters, tokens, law, COST), pearl.work(parameters, tokens, law)
            assert known is not None
            assert known.by_model == work.account.totals().by_model
            assert found.rounds is not None
            assert found.drafted is not None
            assert found.operations is not None
            assert (float(found.rounds), float(found.drafted)) == (
                work.rounds.total(), sum(drafted * times for (_, drafted), times in work.rounds.items()),
            )  # fmt: skip
            assert float(found.operations) == pearl.operations(parameters, COST, work.rounds, work.account)
    # The vectorised paths, one path per replication.
    rows = np.array([*itertools.product([True, False], repeat=5)]).T
    each = np.concatenate([rows, np.zeros((5, BLOCK - rows.shape[1]), bool)], axis=1)
    tally = paths.walk(parameters, 6, COST, iter([lambda _, row=row: row for row in each]))
    for index, row in enumerate(rows.T):
        found = pearl.predict(parameters, 6, ByPosition(np.append(row, 0.0)), COST)
        mine = (tally.time, tally.busy, tally.operations, tally.rounds, tally.drafted)
        theirs = (found.latency, found.busy, found.operations, found.rounds, found.drafted)
        assert [float(values[index]) for values in mine] == [float(value) for value in theirs if value is not None]
    assert tally.accepted.sum() == tally.rounds.sum()
    assert tally.accepted @ np.arange(gamma) == (6 - tally.rounds).sum()


def test_worked_decoding() -> None:
    """Six tokens, drafts of two, the fourth rejected.

    The target reads x0; then x1 and x2, accepts x2 and x3; then reads x3, rejects x4 and drops x5; then reads its own x4.
    Nothing is drafted during the last pass.
    """
    work = counted(2, [True, True, True, False, True, False])
    assert [commit.tokens for commit in work.committed] == [(1,), (2, 3), (4,), (5,), (6,)]
    assert work.rounds == {(0, 0): 3, (1, 1): 1, (0, 1): 1}
    cost = UnitCost(4, cost_ratio=0.75, link=1.0, draft_devices=0.5)
    found = pearl.predict(Parameters(4, 2), 6, ByPosition([1, 1, 1, 0, 1, 0]), cost)
    # A pass takes 4, two drafts and their links 8, one draft 5.
    drafted = [2, 2, 1, 1, 0]
    assert float(found.latency) == sum(max(4, 3 * count + 2 * (count > 0)) for count in drafted)
    assert float(found.busy) == 5 * 4 + 0.5 * 3 * sum(drafted)  # the draft model's unit is half of one of the target's
    assert work.passes_of == {"target": 5, "draft": sum(drafted)}


def test_worked_decoding_with_stopped_drafts() -> None:
    """The same decoding with drafts of three; a pass takes 4, a draft pass 3, the link 1 each way.

    Round 1 verifies x1 and waits for x3, which arrives after 11. Round 2 accepts x2 and x3; x4, the first token drafted in it,
    arrives after 5 and is rejected, so the round does not wait for x5. Round 3 accepts x5, which arrives after 5; the last round is
    a pass.
    """
    cost = UnitCost(4, cost_ratio=0.75, link=1.0, draft_devices=0.5, operations_ratio=0.5)
    law = ByPosition([1, 1, 1, 0, 1, 0])
    found, waited = (pearl.predict(Parameters(4, 3, draft_stop=stop), 6, law, cost) for stop in (REJECTION, "round"))
    # Drafted tokens by round: 3; 2, as the target generates the last token; 1; none.
    assert float(waited.latency) == (3 * 3 + 2) + (2 * 3 + 2) + (3 + 2) + 4
    assert float(found.latency) == (3 * 3 + 2) + (3 + 2) + (3 + 2) + 4
    # The second draft runs 5 of its 6: it begins a link time after its round, and is stopped a link time after the round's end.
    assert float(waited.busy) == 4 * 4 + 0.5 * (9 + 6 + 3)
    assert float(found.busy) == 4 * 4 + 0.5 * (9 + 5 + 3)
    assert found.operations is not None
    assert float(found.operations) == 4 + 2 + 0.5 * (3 + 2 + 1)  # two tokens waited in one round; the stopped pass counts in full
    rejected = pearl.predict(Parameters(4, 3, draft_stop=REJECTION), 6, ByPosition([1, 0, 1, 1, 1, 0]), cost)
    # The second token waits and is rejected: its round ends with the pass, after 4, and its draft after 4 of 6.
    assert float(rejected.latency) == 11 + 4 + (3 * 3 + 2) + 4
    assert float(rejected.busy) == 4 * 4 + 0.5 * (9 + 4 + 9)


@given(
    st.integers(1, 4), st.sampled_from((0.0, 0.125, 0.25, 0.3, 0.5, 0.75, 1.0, 1.5)), st.sampled_from((0.0, 0.25, 0.5, 1.0, 5.0)),
    st.sampled_from(LINKS), st.sampled_from(STOPS), st.sampled_from(DRAFT_STOPS),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_formula_declines_where_the_cluster_causes_waiting(
    gamma: int, ratio: float, link: float, links: str, end: str, stop: str
) -> None:
    """All paths of five tokens; nothing waits for units if drafts are whole, and drafts no longer than a pass are never stopped."""
    cost, parameters = UnitCost(4, cost_ratio=ratio, link=link), Parameters(4, gamma, draft_stop=stop)
    wanted, differs = parameters.demand(cost, 5), False
    for outcomes in itertools.product([True, False], repeat=4):
        here, ample = (simulated(parameters, [*outcomes, False], cost, on) for on in (Cluster(2, links, end), Cluster(2)))
        assert ample.waiting_time == 0
        differs |= here.waiting_time > 1e-9 or abs(here.latency - ample.latency) > 1e-9 or abs(here.busy - ample.busy) > 1e-9
    assert not differs or contention(wanted, Cluster(2, links, end)) is not None
    assert stop == REJECTION or wanted == Demand(2)
    if gamma * ratio + link / 2 <= 1:  # link in layer-times, four per pass: a draft with its links is no longer than a pass
        assert wanted.stopped is None


def simulated(parameters: Parameters, accept: list[bool], cost: UnitCost, cluster: Cluster) -> Run:
    known = ByPosition(np.array(accept, float)).survivors(iter([np.full((len(accept), 1), 0.5)]), parameters.longest_draft)
    world = World(1, 4, drafts={"draft": DraftOutcomes("target", known[:, 0].tolist())})
    return simulate(decode(parameters, [0], len(accept)), len(accept), cluster, cost, world)


@pytest.mark.parametrize("link", [0.0, 0.25, 1.0])
def test_draft_pass_that_begins_at_the_stop_is_counted(link: float) -> None:
    """It takes no time. Six tokens are drafted, and a pass of the target takes as long as two or four draft passes."""
    parameters = Parameters(4, 6, draft_stop=REJECTION)
    for ratio, outcomes in itertools.product((0.25, 0.5), itertools.product([True, False], repeat=2)):
        accept, cost = [True, *outcomes, *[True] * 8, False], UnitCost(4, cost_ratio=ratio, link=link, operations_ratio=0.5)
        run = simulated(parameters, accept, cost, Cluster(2))
        found = pearl.predict(parameters, len(accept), ByPosition(np.array(accept, float)), cost)
        assert (run.latency, run.busy) == (float(found.latency), float(found.busy))
        assert found.operations is not None
        assert pearl.operations(parameters, cost, run.rounds, run.account) == float(found.operations)


def test_waiting_token_rejected_before_first_draft_pass() -> None:
    """The round does not wait, and the draft model continues from the rows returned in the round before."""
    parameters, cost = Parameters(4, 4, draft_stop=REJECTION), UnitCost(4, cost_ratio=0.5, link=3.0)
    run = simulated(parameters, [True, False, True, True, True, True, True, True, False], cost, Cluster(2))
    found = pearl.predict(parameters, 9, ByPosition([1, 0, 1, 1, 1, 1, 1, 1, 0]), cost)
    assert (run.latency, run.busy) == (float(found.latency), float(found.busy))
    # Four drafted tokens return after 3 + 8 + 3; the pass of 4 ends before the first of the next draft exists, at 3 + 2.
    assert float(found.latency) - 14 - 4 == pearl.predict(parameters, 7, ByPosition([1] * 6 + [0]), cost).latency


@pytest.mark.parametrize("stop", DRAFT_STOPS)
@pytest.mark.parametrize("law", [Markov(0.7, 0.4), Replay([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]])])
def test_markov_and_replay_laws_have_the_moments_of_all_paths(law: Markov | Replay, stop: str) -> None:
    tokens, parameters = 6, Parameters(4, 3, draft_stop=stop)
    records = [*itertools.product([0, 1], repeat=tokens - 1)] if isinstance(law, Markov) else law.records[:, : tokens - 1].tolist()
    chance, times = [], []
    for record in records:
        low, high = law.probabilities(tokens - 1) if isinstance(law, Markov) else (np.array(record), np.array(record))
        before = (0, *record[:-1])
        rates = [high[j] if before[j] else low[j] for j in range(tokens - 1)]
        share = np.prod([rate if kept else 1 - rate for rate, kept in zip(rates, record, strict=True)])
        chance.append(share if isinstance(law, Markov) else 1 / len(records))
        times.append(float(pearl.predict(parameters, tokens, ByPosition([*map(float, record), 0.0]), COST).latency))
    found = pearl.predict(parameters, tokens, law, COST)
    mean = float(np.dot(chance, times))
    assert len({*times}) > 1
    assert float(found.latency) == pytest.approx(mean, rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(np.dot(chance, (np.array(times) - mean) ** 2)), rel=1e-9)


def test_records_of_probabilities_are_mixed_with_equal_weights() -> None:
    chances = np.array([[0.2, 0.9, 0.5], [0.7, 0.1, 1.0]])
    each = [pearl.predict(Parameters(4, 2), 3, ByPosition(row), COST) for row in chances]
    found = pearl.predict(Parameters(4, 2), 3, RecordedProbabilities(chances), COST)
    assert float(found.latency) == pytest.approx(np.mean([float(one.latency) for one in each]), rel=1e-12)
    assert pearl.work(Parameters(4, 2), 3, RecordedProbabilities(chances)) is None
    assert pearl.work(Parameters(4, 2, draft_stop=REJECTION), 3, Iid(0.5)) is None  # it depends on times


@given(RATES, st.integers(1, 6), st.integers(1, 80), st.floats(0, 1))
@settings(max_examples=40)
def test_draft_no_longer_than_a_pass_costs_no_time(alpha: float, gamma: int, tokens: int, ratio: float) -> None:
    """The latency is the number of rounds times a pass of the target."""
    found = pearl.predict(Parameters(4, gamma), tokens, Iid(alpha), UnitCost(4, cost_ratio=ratio / gamma))
    assert found.rounds is not None
    assert float(found.latency) == pytest.approx(4 * float(found.rounds), rel=1e-12)
    time, busy = pearl.slowest(Parameters(4, gamma), tokens, UnitCost(4, cost_ratio=ratio / gamma))
    assert time >= float(found.latency) * (1 - 1e-12)
    assert busy >= float(found.busy) * (1 - 1e-12)


def test_predict_points_equals_single_predictions() -> None:
    """Points of different lengths, drafts, laws and costs; shorter decodings are padded."""
    laws = [Iid(0.7), Markov(0.6, 0.3), Replay([[1, 0, 1] * 3, [1] * 9]), ByPosition([0.9, 0.1] * 5)]
    choices = [
        MethodChoice(Parameters(4, gamma), tokens, cost)
        for gamma in (1, 2, 3) for tokens in (1, 2, 8, 9) for cost in (COST, UnitCost(4, cost_ratio=0.0))
    ]  # fmt: skip
    choice, law = (each.reshape(-1) for each in np.indices((len(choices), len(laws))))
    together = pearl.predict_points(PredictionPoints(choices, laws, choice, law))
    alone = predict_separately(pearl.predict, PredictionPoints(choices, laws, choice, law))
    for name in ("latency", "latency_variance", "busy", "units_ratio", "units", "plain_latency", "rounds", "drafted", "operations"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-12, abs=1e-9, nan_ok=True), name


def test_units_ratio_is_known_only_without_drafting() -> None:
    assert float(pearl.predict(Parameters(4, 2), 1, Iid(0.5), COST).units_ratio) == 1.0  # the target alone
    assert np.isnan(pearl.predict(Parameters(4, 2), 2, Iid(0.5), COST).units_ratio)
    assert [Parameters(4, 2).demand(COST, tokens) for tokens in (1, 2)] == [Demand(1), Demand(2)]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"draft_length": 0}, "draft_length must be between 1 and 125, got 0"),
        ({"draft_length": 126}, "draft_length must be between 1 and 125, got 126"),
        (
            {"draft_length": 2, "placement": "colocated"},
            "placement must be 'separate', got 'colocated': .* choose method 'speculative'",
        ),
        ({"draft_length": 2, "draft_stop": "now"}, "unknown draft_stop 'now'; known: rejection, round"),
        ({"draft_length": 2, "sampled": 1}, "sampled must be true or false, got 1"),
        ({"draft_length": 2, "draft_layers": 0}, "draft_layers must be"),
        ({"draft_length": 2, "sequences": 2}, "batching must be 'lockstep' with sequences=2"),
    ],
)
def test_bad_parameters_are_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Parameters(4, **table)  # type: ignore[arg-type]


def test_missing_cost_is_named() -> None:
    with pytest.raises(ParameterError, match="cost_ratio is required"):
        pearl.predict(Parameters(4, 2), 5, Iid(0.5), UnitCost(4))
