"""AMUSD: worked examples, paths of a real law against events, published results, and refused parameters."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq

from model import published
from model.base.checks import ParameterError
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.amusd import finite_amusd, paths
from model.methods.amusd import theory as amusd
from model.methods.amusd.algorithm import DRAFT_STOPS, REJECTION, Parameters, decode
from model.methods.peak_demand import Demand
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay
from model.published import amusd_tables
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import growing


def simulated(parameters: Parameters, accept: list[bool], cost: UnitCost) -> Run:
    known = ByPosition(np.array(accept, float)).survivors(iter([np.full((len(accept), 1), 0.5)]), parameters.longest_draft)
    world = World(1, parameters.layers, drafts={"draft": DraftOutcomes("target", known[:, 0].tolist())})
    return simulate(decode(parameters, [0], len(accept)), len(accept), Cluster(2), cost, world)


@pytest.mark.parametrize("stop", DRAFT_STOPS)
def test_worked_decoding(stop: str) -> None:
    """Six tokens, the third wrong; a pass takes 4, a draft pass 1.25, the link 0.5.

    x1 and x2 arrive at 0.5 + 2.5 + 0.5 = 3.5; the pass over them ends at 7.5, and x3, which has arrived at 4.75, is rejected. The
    message arrives at 8; the draft of six had ended after the fifth token, at 6.75. x4 and x5 are drafted again until 10.5, arrive
    at 11, and their pass ends at 15 with the last token.
    """
    accept, cost = [True, True, False, True, True, False], UnitCost(4, cost_ratio=0.3125, link=0.5)
    run = simulated(Parameters(4, 6, draft_stop=stop), accept, cost)
    assert run.commits == [(7.5, "round", 3), (15.0, "round", 3)]
    assert run.busy == 2 * 4 + 7 * 1.25
    assert run.rounds == {(2, 2): 2}


def test_pass_in_progress_at_a_rollback_ends_or_is_stopped() -> None:
    """Seven tokens, the third wrong; a pass takes 4, a draft pass 2.5, the link 0.5.

    x1 and x2 arrive at 6, and their pass ends at 10; x3 has arrived at 8.5. The message arrives at 10.5, when the pass that drafts
    x5 would begin: it begins first.
    """
    cost, accept = UnitCost(4, cost_ratio=0.625, link=0.5), [True, True, False, True, True, True, False]
    runs = [simulated(Parameters(4, 6, draft_stop=stop), accept, cost) for stop in DRAFT_STOPS]
    assert [run.commits[0] for run in runs] == [(10.0, "round", 3)] * 2
    assert runs[0].latency - runs[1].latency == 2.5
    assert runs[0].busy - runs[1].busy == 2.5
    assert runs[0].passes_of == runs[1].passes_of


@pytest.mark.parametrize("parameters", [Parameters(8, 6), Parameters(8, 16, min_waiting=0, draft_stop=REJECTION)])
def test_paths_of_a_law_are_events(parameters: Parameters) -> None:
    """A law may hand out the same array for each position: paths keep their own."""
    tokens, cost, law = 30, UnitCost(8, cost_ratio=0.25, link=1.0), Iid(0.8)
    draws = np.random.default_rng(1).random((tokens - 1, paths.BLOCK))
    tally = paths.walk(parameters, tokens, cost, law.drafts(iter([draws])))
    for replication in range(5):
        run = simulated(parameters, [*(draws[:, replication] < 0.8).tolist(), False], cost)
        assert (run.latency, run.rounds.total()) == (tally.time[replication], tally.rounds[replication])


def test_no_closed_form_is_nan_and_refused() -> None:
    parameters = Parameters(4, 4, min_waiting=0)
    assert np.isnan(amusd.predict(parameters, 9, Iid(0.5), UnitCost(4, cost_ratio=0.2)).latency)
    with pytest.raises(ParameterError, match="min_waiting must be at least 1 with draft_stop='pass', got 0"):
        amusd.speedup(0.5, 4, 0.2, min_waiting=0)
    with pytest.raises(ParameterError, match="no closed form for AMUSD"):
        amusd.predict(Parameters(4, 4), 9, Rounds([0.5] * 9), UnitCost(4, cost_ratio=0.2))


def test_bounds_of_time_hold() -> None:
    cost = UnitCost(4, cost_ratio=0.75, link=3.0)
    for rate in (0.0, 0.5, 1.0):
        found, (time, busy) = amusd.predict(Parameters(4, 4), 40, Iid(rate), cost), amusd.slowest(Parameters(4, 4), 40, cost)
        assert float(found.latency) <= time
        assert float(found.busy) <= busy


def test_demand_counts_tokens_and_messages_on_their_way() -> None:
    assert Parameters(4, 4).demand(UnitCost(4, cost_ratio=0.2), 9) == Demand(2)
    assert Parameters(4, 4).demand(UnitCost(4, cost_ratio=0.2, link=1.0), 9) == Demand(2, 5)
    assert Parameters(4, 4, draft_stop=REJECTION).demand(UnitCost(4, cost_ratio=0.2), 9) == Demand(2, 1, "anywhere")
    assert Parameters(4, 4).demand(UnitCost(4, cost_ratio=0.2), 1) == Demand(1)


def test_published_speedups_are_those_of_the_times() -> None:
    table = published.table("amusd-results")
    for row in table.rows:
        plain = table.lookup(data_set=row["data_set"], method="autoregressive")["token_ms"]
        assert row["speedup"] == pytest.approx(plain / row["token_ms"], abs=0.006)


def test_published_results_against_one_acceptance_rate() -> None:
    """The acceptance rate that gives the printed speed-up of speculative decoding predicts AMUSD's, as the notes say."""
    table, ratios = published.table("amusd-results"), []
    for data_set in ("humaneval", "mt_bench", "refactorchat"):
        drafted, ours = (table.lookup(data_set=data_set, method=name)["speedup"] for name in ("speculative", "amusd"))
        length, ratio = amusd_tables.DRAFT_LENGTH, amusd_tables.COST_RATIO
        rate = brentq(lambda a: float(speculative.speedup(a, length, ratio)) - drafted, 0.01, 0.999)  # noqa: B023
        ratios.append(ours / amusd.speedup(rate, 64, ratio))
        assert ours <= 1 / 0.51
    assert ratios == pytest.approx([1.02, 0.95, 1.14], abs=0.006)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"draft_length": 0}, "draft_length must be between 1 and 250, got 0"),
        ({"draft_length": 251}, "draft_length must be between 1 and 250, got 251"),
        ({"draft_length": 2}, "min_waiting must be below draft_length=2, got 2: .* set a longer draft_length"),
        ({"draft_length": 4, "min_waiting": -1}, "min_waiting must be"),
        ({"draft_length": 4, "draft_stop": "now"}, "unknown draft_stop 'now'; known: pass, rejection"),
        ({"draft_length": 4, "placement": "colocated"}, "placement must be 'separate', got 'colocated'"),
        ({"draft_length": 4, "sampled": 1}, "sampled must be true or false, got 1"),
        ({"draft_length": 4, "sequences": 2}, "batching must be 'lockstep' with sequences=2"),
    ],
)
def test_bad_parameters_are_refused(table: dict[str, object], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Parameters(4, **table)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameters", [Parameters(4, 3), Parameters(4, 5, min_waiting=0, draft_stop=REJECTION)])
@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize("in_seconds", [False, True])
def test_costs_and_laws_together_are_those_of_each(
    parameters: Parameters, tokens: int, in_seconds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of records, which are mixtures, and with few starts of drafts at a time."""
    numbers = [(0.1, 0.0, 1.0), (0.4, 0.25, 0.5), (0.9, 1.0, 1.0), (0.0, 0.5, 0.25)]
    costs: list[StepCosts] = [
        growing(4, draft=draft, smaller_layers=2, link=link, prompt=int(9 * link), draft_devices=devices) if in_seconds
        else UnitCost(4, cost_ratio=draft, link=link, draft_devices=devices)
        for draft, link, devices in numbers
    ]  # fmt: skip
    records = Replay(np.random.default_rng(3).random((4, tokens)) < 0.7)
    laws = [Iid(0.3), records, Markov(0.6, 0.3), Iid(1.0), Replay(records.records[:2])]
    choice, law = (each.ravel() for each in np.meshgrid(np.arange(len(costs)), np.arange(len(laws))))
    choices = [MethodChoice(parameters, tokens, cost) for cost in costs]
    monkeypatch.setattr(finite_amusd, "_MOST_CELLS", 3 * len(costs) * tokens)
    together = amusd.predict_points(PredictionPoints(choices, laws, choice, law))
    work = amusd.timed_work_of_costs(parameters, tokens, laws, many_costs.joined(costs))
    assert work is not None
    monkeypatch.undo()
    for index, (cost, which) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        alone = amusd.predict(parameters, tokens, laws[which], costs[cost])
        for name, values in vars(alone).items():
            if values is not None:
                least = 1e-13 * float(alone.latency) ** 2 if name == "latency_variance" else 0.0
                np.testing.assert_allclose(getattr(together, name)[index], values, rtol=1e-12, atol=least, err_msg=name)
        one = amusd.timed_work(parameters, tokens, [laws[which]], costs[cost])
        assert one is not None
        for role, totals in work.at((cost, which)).by_model.items():
            np.testing.assert_allclose(totals, one.at(0).by_model.get(role, [0.0] * len(totals)), rtol=1e-12)


def test_records_are_mixed() -> None:
    """The variance of a mixture has that of the means of its parts."""
    parameters, cost = Parameters(4, 3), UnitCost(4, cost_ratio=0.4, link=0.25)
    records = np.array([[True] * 5, [False, True, False, False, True]])
    times = [float(amusd.predict(parameters, 5, Replay(record[None]), cost).latency) for record in records]
    found = amusd.predict(parameters, 5, Replay(records), cost)
    assert float(found.latency) == pytest.approx(np.mean(times), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(np.var(times), rel=1e-12)
