"""Costs that a method does not use are refused: the declared costs are compared with those that change its results."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from model.methods import method_parameters, registry
from sim.scenarios.scenario_file import cost_source

LAYERS = 8
LAWS: dict[str, dict[str, Any]] = {
    "match": {"kind": "iid", "match_rate": 0.5}, "accept": {"kind": "iid", "acceptance_rate": 0.6},
    "medium_accept": {"kind": "iid", "acceptance_rate": 0.7},
    "decision": {"kind": "rates", "fallback_rate": 0.2, "rollback_rate": 0.1},
    "exit": {"kind": "hazards", "hazards": [0.2] * (LAYERS - 1) + [1.0]},
}  # fmt: skip
REQUIRED = {
    "draft": {"cost_ratio": 0.2, "operations_ratio": 0.1}, "medium": {"medium_cost_ratio": 0.5, "medium_operations_ratio": 0.3}
}  # fmt: skip
OTHER: dict[str, Any] = {
    "early_head": 0.5, "dispatch": 0.7, "dispatch_per_process": 0.3, "dispatch_law": "tree", "link": 0.9, "promotion": 0.4,
    "propagation": 0.2, "state_check": 0.3, "verify_cost": [[width, 1 + width / 10] for width in range(1, 30)],
}  # fmt: skip
"""A value other than the default for each cost in layer-times that not every method has."""
OF_ROLES = {
    "draft": {"cost_ratio": 0.3, "operations_ratio": 0.2}, "medium": {"medium_cost_ratio": 0.6, "medium_operations_ratio": 0.4}
}  # fmt: skip
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("autoregressive", {"sequences": 2}),
    ("ppd", {"exit_layer": 4, "candidates": 3}),
    ("ppd", {"exit_layer": 4, "candidates": 3, "form": "eager"}),
    ("ppd", {"exit_layer": 4, "candidates": 3, "batched": True}),
    ("speculative", {"draft_length": 3}),
    ("speculative", {"draft_length": 2, "sequences": 2, "batching": "static", "placement": "separate"}),
    ("adaptive", {"policy": "heuristic", "draft_length": 2}),
    ("adaptive", {"policy": "heuristic", "draft_length": 2, "placement": "separate"}),
    ("hierarchical", {"draft_length": 3}),
    ("hierarchical", {"draft_length": 3, "placement": "separate"}),
    ("beam", {"draft_length": 3, "beams": 3}),
    ("beam", {"draft_length": 3, "beams": 3, "rule": "per-beam", "arrangement": "parallel"}),
    ("beam", {"draft_length": 3, "beams": 3, "rule": "per-beam", "arrangement": "sequential"}),
    ("bild", {}),
    ("bild", {"placement": "separate"}),
    ("bild", {"exit_layer": 3}),
    ("skipdecode", {"min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 30}),
    ("skipdecode", {"min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 30, "sequences": 3, "batching": "static"}),
    ("early_exit", {}),
    ("early_exit", {"measure": "state"}),
    ("early_exit", {"sequences": 2, "batching": "static"}),
    ("early_exit", {"sequences": 2, "exit_layer": 4, "batching": "lockstep"}),
    ("early_exit", {"fill": "backfill"}),
    ("early_exit", {"exit_layer": 4}),
]


def scenario(name: str, own: dict[str, Any], **cost: Any) -> dict[str, Any]:
    """One method, with the laws and cost ratios that it needs."""
    table = {"name": name, "layers": LAYERS, **own}
    kind = registry.algorithm(name).Parameters
    asked = kind.outcomes_for(table)
    ratios = {key: value for role in kind.roles_for(table) for key, value in REQUIRED[role].items()}
    return {
        "scenario": {"name": "costs", "tokens": 8, "replications": 6, "views": ["formula", "events"]}, "method": [table],
        **({"outcomes": {key: LAWS[key] for key in asked}} if asked else {}), "cost": ratios | cost,
    }  # fmt: skip


ESTIMATES = ("latency_layers", "busy_layers", "operations_per_token")


def estimates(tables: dict[str, Any], *views: str) -> dict[tuple[str, str], float]:
    """Results of a run, by view and column."""
    rows = sim.run(tables, views=list(views)).to_dicts()
    return {(row["view"], name): row[name] for row in rows for name in ESTIMATES if row.get(name) is not None}


def differ(one: dict[tuple[str, str], float], other: dict[tuple[str, str], float]) -> bool:
    """Return whether any estimate that both have differs; `operations_per_token` is null where times do not determine it."""
    return any(abs(one[key] - other[key]) > 1e-12 for key in one.keys() & other.keys())


@pytest.mark.parametrize(("name", "own"), CHOICES, ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value)))
def test_declared_costs_are_those_that_change_results(
    name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cost separately: declared ones change an estimate; all others are refused and would change none."""
    kind = registry.algorithm(name).Parameters
    table = {"layers": LAYERS, **own}
    declared, roles = kind.all_costs_for(table), kind.roles_for(table)
    assert {key for role in roles for key in OF_ROLES[role]} <= declared
    for role in method_parameters.COSTS_OF.keys() - {*roles}:
        for key, value in OF_ROLES[role].items():
            with pytest.raises(ValueError, match=f"cost.{key} is used by no method"):
                sim.run(scenario(name, own, **{key: value}))
    for key in OTHER.keys() - declared:
        with pytest.raises(ValueError, match=f"cost.{key} is used by no method that it is given for; leave it out"):
            sim.run(scenario(name, own, **{key: OTHER[key]}))
    monkeypatch.setattr(kind, "costs_for", classmethod(lambda cls, table: method_parameters.COSTS))  # nothing is refused
    used = [*((key, OTHER[key]) for key in OTHER if key in declared), *(item for role in roles for item in OF_ROLES[role].items())]
    without, both = {**OTHER, **dict(used)}, ("formula", "events")
    assert not differ(estimates(scenario(name, own, **dict(used)), *both), estimates(scenario(name, own, **without), *both))
    found = estimates(scenario(name, own), "formula")
    given: dict[str, Any] = {}
    for key, value in used:  # one after the other: dispatch_per_process before its law
        before, given = found, {**given, key: value}
        found = estimates(scenario(name, own, **given), "formula")
        one = key == "dispatch_law" and own.get("batched")  # all candidates are one process: both laws are equal
        assert differ(before, found) != bool(one), key


def test_shared_cost_is_used_if_any_method_or_axis_value_uses_it() -> None:
    ppd, plain = scenario("ppd", {"exit_layer": 4, "candidates": 3}, dispatch=0.5), {"name": "autoregressive", "layers": LAYERS}
    both = {**ppd, "method": [plain, *ppd["method"]]}
    assert sim.run(both).height == 4
    with pytest.raises(ValueError, match=r"method\.cost\.dispatch is used by no method"):
        sim.run({**both, "method": [{**plain, "cost": {"dispatch": 0.5}}, *ppd["method"]]})
    drafts = scenario("speculative", {"draft_length": 2}, link=0.5)
    with pytest.raises(ValueError, match=r"cost\.link is used by no method .*, or choose parameters with which it has an effect"):
        sim.run(drafts)
    swept = sim.run(drafts, views=["formula"], sweep={"method.placement": ["colocated", "separate"]})
    alone = sim.run(scenario("speculative", {"draft_length": 2}), views=["formula"])["latency_layers"][0]
    assert swept["latency_layers"][0] == alone < swept["latency_layers"][1]
    with pytest.raises(ValueError, match=r"cost\.link is used by no method"):
        sim.run(drafts, sweep={"method.placement": ["colocated"]})


IN_SECONDS = (
    "dispatch_s", "dispatch_per_process_s", "link_s", "promotion_s", "state_check_s", "dispatch_law", "draft_step_s",
)  # fmt: skip


@pytest.mark.parametrize("key", IN_SECONDS)
def test_unused_costs_in_seconds_are_refused(key: str) -> None:
    cost = {"kind": "roofline", "device": "a100", "shape": "llama-2-7b", key: "tree" if key == "dispatch_law" else 1e-3}
    tables = {
        "scenario": {"name": "s", "tokens": 4, "replications": 2, "views": ["formula"]}, "cost": cost,
        "method": [{"name": "autoregressive", "layers": 32}],
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"cost.{key} is used by no method that it is given for; leave it out$"):
        sim.run(tables)
    if key not in ("state_check_s", "draft_step_s"):
        ppd = {"name": "ppd", "layers": 32, "exit_layer": 16, "candidates": 1}
        assert sim.run(tables | {"method": [ppd], "outcomes": {"kind": "iid", "match_rate": 0.5}}).height == 1


def test_source_of_times_names_only_keys_of_times() -> None:
    tables = scenario("hierarchical", {"draft_length": 3}, allow_slow_medium=True, shape="t5-large")
    assert "; cost_ratio, medium_cost_ratio as set in [cost]; " in cost_source(tables)
    slow = scenario("hierarchical", {"draft_length": 3}, medium_cost_ratio=1.5)
    with pytest.raises(ValueError, match="allow_slow_medium"):
        sim.run(slow)
    assert sim.run({**slow, "cost": slow["cost"] | {"allow_slow_medium": True}}).height == 2


def test_source_of_times_names_all_sources() -> None:
    """Assumed and published times by their keys, swept ones included; times on hardware by profile and operating points."""
    own, shared = {"name": "speculative", "draft_length": 3}, {"name": "autoregressive"}

    def said(cost: Any = None, sweep: Any = None, *methods: Any) -> str:
        given = {"cost": cost, "sweep": sweep}
        return cost_source({"method": [*methods] or [own], **{name: table for name, table in given.items() if table}})

    one = "assumed: every layer of the target takes one layer-time; nothing else takes time"

    def set_to(keys: str) -> str:
        return f"assumed: every layer of the target takes one layer-time; {keys} as set in [cost]; nothing else takes time"

    deck = "published: the cost ratio, Table 1 of the slides; "
    table_3 = "published: time of plain decoding, PPD Table 3; "
    fitted = "fitted to published times, PPD Table 3: a cost per process and token; "
    assert said() == said({}) == said({"kind": "unit", "operations_ratio": 0.1}) == one
    assert said({"link": 1.0, "shape": "t5-large"}, {"method.cost.early_head": [1], "cost.link": [2], "method.cost_": [1]}) == (
        set_to("link, early_head")
    )
    assert said({}, None, own | {"cost": {"dispatch": 1.0}}, shared | {"cost": {"link": 2.0}}) == (
        set_to("dispatch, link")
    )
    assert said({"kind": "published", "task": "x"}) == deck + one
    assert said({"kind": "published"}, {"cost.data_set": ["a"]}) == table_3 + one
    layers = "equal layers, and the exit layer of the fitted runs"
    assert said({"data_set": "a", "fitted_on": "both"}) == f"{table_3}{fitted}assumed: {layers}"
    assert said({"task": "x", "link": 1}) == deck + set_to("link")
    assert said({"layer_times": [1.0, 2.0]}) == "assumed: layer_times as set in [cost]; nothing else takes time"

    roofline = {"kind": "roofline", "device": "a100", "shape": "llama-2-13b", "draft_shape": "llama-68m"}

    def of(device: str, *names: str) -> str:
        return f"{', '.join(f'{name} on {device}' for name in names)}: assumed efficiencies of the published peaks of {device}; "

    both = ("llama-2-13b", "llama-68m")
    assert said(roofline) == f"{of('a100', *both)}prompt 512, tensor_parallel 1"
    axes = {"cost.device": ["h100", "no such device", "a100"], "method.cost.prompt": [100, 200], "cost.tensor_parallel": [1, 2],
            "cost.dtype": ["no such type"], "scenario.seed": [1, 2], "cost.busy": "no list"}  # fmt: skip
    assert said(roofline, axes) == f"{of('h100', *both)}{of('a100', *both)}prompt 100, 200, tensor_parallel 1, 2"
    assert said(roofline, {"cost.prompt": [*range(1002)]}).endswith("998, 999, tensor_parallel 1"), "the first thousand points"
    methods = (
        own | {"cost": {"device": "h100"}},
        shared,
        own | {"cost": roofline | {"kind": "roofline", "tensor_parallel": 2, "prompt": 0}},
    )
    assert said(roofline, None, *methods) == f"{of('h100', *both)}{of('a100', *both)}prompt 512, 0, tensor_parallel 1, 2"
    mixed = said(roofline, None, shared | {"cost": {"kind": "unit"}}, own)
    assert mixed == said(roofline), "of those that are on hardware"
