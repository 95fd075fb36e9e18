"""Formula and paths have no values exactly where passes may wait, compared with the waiting times of the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods import registry
from model.methods.peak_demand import Demand
from sim.engine.cluster import LINKS, STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.scenarios import cases
from sim.scenarios.cases import Case, contention
from sim.views import evaluation
from tests.support.position_costs import RandomCosts, growing

Tables = dict[str, Any]
QUARTERS = st.integers(0, 12).map(lambda number: number / 4)
OVERHEADS = ("early_head", "final_head", "dispatch", "dispatch_per_process", "link", "promotion")


def case_of(method: Tables, cost: Tables, cluster: Tables, tokens: int = 4) -> Case:
    """A point of a scenario; all outcomes have probability 1/2."""
    rates = {"match": "match_rate", "accept": "acceptance_rate", "medium_accept": "acceptance_rate"}
    asked = registry.algorithm(method["name"]).Parameters.OUTCOMES
    laws = {name: {"kind": "iid", rates[name]: 0.5} for name in asked if name in rates}
    laws |= {"decision": {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.3}} if "decision" in asked else {}
    tables = {"scenario": {"name": "wait", "tokens": tokens}, "method": [method], "cost": cost, "cluster": cluster}
    return cases.resolve(tables | ({"outcomes": laws} if laws else {}))


def played(case: Case, cluster: Cluster, matches: Sequence[int]) -> Run:
    """One decoding of PPD, by the rank of the right candidate at each position (0: none)."""
    steps = registry.algorithm(case.method).decode(case.parameters, [0], case.settings.tokens)
    return simulate(steps, case.outputs, cluster, case.cost, World(1, case.parameters.layers, [*matches]))


def runs(case: Case) -> Iterator[tuple[Run, Run]]:
    """All patterns of matches, each on the cluster of the case and on one with all units and links that the method needs."""
    ample = Cluster(max(2000, case.cluster.units))
    candidates = case.parameters.candidates
    for matches in itertools.product(sorted({0, 1, candidates}), repeat=case.settings.tokens - 1):
        yield played(case, case.cluster, [*matches, 0]), played(case, ample, [*matches, 0])


def differs(here: Run, ample: Run) -> bool:
    """True if something waited, or the decoding differs from the one that formula and paths assume."""
    scale = 1e-9 * (1 + ample.latency)
    same = abs(here.latency - ample.latency) <= scale and abs(here.busy - ample.busy) <= scale * 100
    return here.waiting_time > scale or not same


@st.composite
def pipelined(draw: Any) -> Case:
    form = draw(st.sampled_from(("literal", "eager", "flat", "nested")))
    layers = draw(st.integers(1, 6))
    least = 1 if form in ("flat", "nested") else -(-layers // 2)
    exit_layer = draw(st.integers(least, layers))
    candidates = draw(st.integers(1, 3))
    method: Tables = {"name": "ppd", "form": form, "layers": layers, "exit_layer": exit_layer, "candidates": candidates}
    if form == "nested":
        assume(method["candidates"] ** (layers / exit_layer) < 40)
    else:
        method["batched"] = draw(st.booleans())
    names = draw(st.sets(st.sampled_from(OVERHEADS), max_size=3))
    cost = {name: draw(QUARTERS) for name in sorted(names)}
    if draw(st.booleans()) and "link" in cost:
        cost["link"] *= 4
    cluster: Tables = {"links": draw(st.sampled_from(LINKS)), "stop": draw(st.sampled_from(STOPS))}
    if draw(st.booleans()):
        cluster["units"] = draw(st.integers(1, 4))
    return case_of(method, cost, cluster, tokens=draw(st.integers(1, 4)))


@given(pipelined())
@settings(max_examples=150, deadline=None)
def test_contended_points_are_those_that_may_wait(case: Case) -> None:
    found = [differs(*pair) for pair in runs(case)]
    event(f"{case.parameters.form}: {case.contention and case.contention.partition(':')[0]}")
    told = f"{case.parameters} {case.cost} {case.cluster} {case.settings.tokens} {case.contention} {case.peak_demand}"
    assert any(found) == case.contended, told


@given(pipelined(), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_contended_points_with_times_by_position(case: Case, seed: int) -> None:
    """Random times for each pass; increasing times for nested trees, where no process may overtake its parent."""
    layers, more = case.parameters.layers, {name: getattr(case.cost, name) for name in ("link", "dispatch", "promotion")}
    nested = case.parameters.form == "nested"
    cost: Any = growing(layers, prompt=seed, **more) if nested else RandomCosts(layers, seed, **more)
    case = replace(case, cost=cost)
    found = [differs(*pair) for pair in runs(case)]
    told = f"{case.parameters} {case.cost} {case.cluster} {case.settings.tokens} {case.contention} {case.peak_demand}"
    assert any(found) == case.contended, told


def test_reason_for_contention_is_named() -> None:
    wanted = Demand(3, 2, "anywhere")
    assert contention(wanted, Cluster(2, links="shared")) == "units: 2 of the 3 that the method may need at once"
    assert contention(wanted, Cluster(3, links="shared")) == "links: several transfers may need the shared link at once"
    assert contention(wanted, Cluster(3, stop="layer")) == "stop: a stopped process keeps its unit until the end of its layer"
    assert contention(wanted._replace(stopped="layers"), Cluster(3, stop="pass")).endswith("end of its pass")  # type: ignore[union-attr]
    for free in (wanted._replace(stopped="layers"), wanted._replace(stopped=None)):
        assert contention(free, Cluster(3, stop="layer")) is None
    assert contention(wanted._replace(transfers=1), Cluster(3, links="shared", stop="now")) is None


OTHERS: dict[str, Tables] = {
    "autoregressive": {"name": "autoregressive"},
    "speculative": {"name": "speculative", "draft_length": 2},
    "adaptive": {"name": "adaptive", "policy": "heuristic"},
    "hierarchical": {"name": "hierarchical", "draft_length": 2},
    "bild": {"name": "bild"},
    "beam": {"name": "beam", "draft_length": 2, "beams": 3, "rule": "per-beam"},
}


@pytest.mark.parametrize("method", OTHERS)
def test_contended_points_of_drafting_methods(method: str) -> None:
    """A single process never waits; with fewer units it moves less and saves link times, which is also a different decoding."""
    places: dict[str, list[Tables]] = {"autoregressive": [{}], "beam": [{"arrangement": each} for each in ("batched", "parallel")]}
    ratios = {"hierarchical": ["cost_ratio", "medium_cost_ratio"], "autoregressive": []}
    seen = set()
    for place in places.get(method, [{"placement": "colocated"}, {"placement": "separate"}]):
        for link, units, links in itertools.product((0.0, 0.5), (1, 3), LINKS):
            apart = place.get("placement") == "separate" or place.get("arrangement") == "parallel"
            cost = dict.fromkeys(ratios.get(method, ["cost_ratio"]), 0.25) | ({"link": link} if apart else {})
            cluster = {"units": units, "links": links, "stop": "pass"}
            case = case_of({"layers": 2, **OTHERS[method], **place}, cost, cluster, tokens=8)
            ample = replace(case, cluster=Cluster(5))
            pairs = [[evaluation.simulate(each, world) for world in evaluation.worlds_of(each, 0, 16)] for each in (case, ample)]
            found = any(differs(*pair) for pair in zip(*pairs, strict=True))
            assert found == case.contended, (place, link, units, links, case.contention)
            seen.add(case.contended)
            if not case.contended:
                assert evaluation.events_row(case, 0, 16)["paths_difference"] <= 1e-9
    assert seen == ({False} if method == "autoregressive" else {False, True})


@pytest.mark.parametrize(
    ("link", "head", "units"), [(0.0, 0.0, 3), (0.0, 1.0, 3), (1.5, 0.0, 3), (2.5, 0.0, 2), (2.5, 1.0, 3), (3.0, 1.0, 2)]
)
def test_sub_processes_of_ppd_that_start_after_the_main_one_has_ended_take_its_unit(link: float, head: float, units: int) -> None:
    """The main process runs two layers and a head while the states are sent."""
    cost = UnitCost(4, link=link, final_head=head)
    assert registry.parameters("ppd")(layers=4, exit_layer=2, candidates=2).demand(cost, 9).units == units
