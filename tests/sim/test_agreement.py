"""Disagreements of views are found, listed and an error; views that agree are not reported, even with skewed distributions."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

import sim
from model.methods import registry
from model.methods.ppd import theory as ppd
from model.methods.speculative import theory as speculative
from sim.commands import sim_app
from sim.runs import sweep
from sim.scenarios.grid import Grid
from sim.views import agreement, evaluation
from sim.views.metrics import Sums

Tables = dict[str, Any]
OVERHEADS = {"final_head": 1.0, "early_head": 1.0, "dispatch": 0.5, "link": 30.0}


def tables(method: Tables | None = None, cost: Tables | None = None, outcomes: Tables | None = None, **settings: Any) -> Tables:
    default: Tables = {"name": "ppd", "layers": 40, "exit_layer": 24, "candidates": 2}
    law = outcomes or ({"kind": "iid", "match_rate": 0.5} if method is None else {"kind": "iid", "acceptance_rate": 0.7})
    return {
        "scenario": {"name": "agree", "tokens": 32, "replications": 4096, "event_replications": 8, **settings},
        "method": [method or default], "cost": cost or {}, "outcomes": law,
    }  # fmt: skip


def invoked(given: Tables, folder: Path, *more: str) -> tuple[int, Tables, str]:
    """Exit code, JSON document and printed output of a run."""
    path = folder / "run.json"
    path.write_text(json.dumps(given))
    lines = []
    for section, own in given.items():
        for table in own if isinstance(own, list) else [own]:
            lines.append(f"[[{section}]]" if isinstance(own, list) else f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (folder / "run.toml").write_text("\n".join(lines))
    arguments = ["run", str(folder / "run.toml"), "-o", str(folder / "out"), "--no-figures", "-j", "1", *more]
    out = CliRunner().invoke(sim_app.app, [*arguments, "--json"])
    shown = (folder / "out" / "summary.txt").read_text()
    return out.exit_code, json.loads(out.stdout), shown


# --- Faults are seen --------------------------------------------------------------------------------------------------------


def without_link(right: Callable[..., Any]) -> Callable[..., Any]:
    """Algorithm 2 with a link time of 0."""

    def wrong(passes: Any, *args: Any, **kwargs: Any) -> Any:
        cost = copy.copy(passes.cost)  # of one cost, or of several
        vars(cost)["link"] = 0 * cost.link
        return right(passes._replace(cost=cost), *args, **kwargs)

    return wrong


def test_paths_without_the_link_time_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formula and paths share their stages, so only the view events differs; everything else is written as usual."""
    given = tables(cost=OVERHEADS, replications=512)
    code, document, shown = invoked(given, tmp_path)
    assert (code, document["disagreements"]) == (0, [])
    assert "disagree" not in shown
    monkeypatch.setattr(ppd, "_barrier_stage", without_link(ppd._barrier_stage))
    code, document, shown = invoked(given, tmp_path)
    assert code == 1
    (found,) = document["disagreements"]
    assert found["views"] == ["paths", "events"]
    assert found["difference"] == abs(found["values"][0] - found["values"][1])
    assert found["difference"] > found["bound"]
    assert f"point 0, decoding {found['replication']}: {found['quantity']} is" in shown
    rows = pl.read_parquet(tmp_path / "out" / "results.parquet")
    assert rows["view"].to_list() == ["formula", "paths", "events"]
    assert rows.height == len(document["results"])
    assert json.loads((tmp_path / "out" / "disagreements.json").read_text()) == document["disagreements"]
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["disagreements"] == 1
    # A resumed run checks agreement again, although it computes no shard.
    code, document, _ = invoked(given, tmp_path, "--resume")
    assert (code, document["shards"]["computed"], len(document["disagreements"])) == (1, 0, 1)


def scaled(factor: float, *names: str) -> Callable[[Any], Any]:
    """A prediction with wrong means."""

    def fault(right: Callable[..., Any]) -> Callable[..., Any]:
        def predict(*args: Any) -> Any:
            found = right(*args)
            return replace(found, **{name: getattr(found, name) * factor for name in names})

        return predict

    return fault


DRAFTING = {"name": "speculative", "layers": 24, "draft_length": 3}
RATIO = {"cost_ratio": 0.1}


@pytest.mark.parametrize(
    ("fault", "quantity"),
    [
        (scaled(1.02, "latency"), "latency_layers"), (scaled(0.98, "latency"), "latency_layers"),
        (scaled(1.2, "busy"), "busy_layers"), (scaled(0.5, "units_ratio"), "mean_busy_units_per_run"),
        (scaled(1.3, "rounds"), "rounds"),
        (scaled(1.3, "drafted"), "drafted"),
    ],
)  # fmt: skip
def test_wrong_formula_is_an_error(
    fault: Any, quantity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tables(DRAFTING, RATIO, replications=16384)
    assert sim.run(given, views=["formula", "paths"]).height == 2
    monkeypatch.setattr(speculative, "predict_points", fault(speculative.predict_points))
    report = sweep.run(given, out=tmp_path / "run", views=["formula", "paths"], jobs=1)
    assert quantity in {found["quantity"] for found in report.disagreements}
    assert all(found["views"] == ["formula", "paths"] for found in report.disagreements)
    # Without paths the formula is compared with the events, which are fewer, so only larger differences show.
    report = sweep.run(given, out=tmp_path / "events", views=["formula", "events"], jobs=1, set={"scenario.event_replications": 8})
    assert all(found["views"] == ["formula", "events"] for found in report.disagreements)


def test_formula_is_compared_with_events_without_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "predict_points", scaled(1.5, "latency")(speculative.predict_points))
    given = tables(DRAFTING, RATIO, event_replications=512)
    report = sweep.run(given, out=tmp_path / "run", views=["formula", "events"], jobs=1)
    assert ("latency_layers", ["formula", "events"]) in [(found["quantity"], found["views"]) for found in report.disagreements]
    with pytest.warns(UserWarning, match="views disagree"):
        sim.run(given, views=["formula", "events"])
    one = {"point": 3, "quantity": "rounds", "views": ["formula", "paths"], "values": [2.5, 1234567.0], "difference": 0.126,
           "bound": 0.0514}  # fmt: skip
    first = "point 3: rounds is 2.5 by formula and 1.23457e+06 by paths; they differ by 0.13, more than 0.051"
    other = one | {"replication": 7, "point": 4}
    told = "views disagree, which is a bug in the program: "
    for found, said in (
        ([], []), ([one], [told + first]), ([one, other], [f"{told}{first}; and 1 more"]),
        ([other, one, one], [f"{told}{first.replace('point 3', 'point 4, decoding 7')}; and 2 more"]),
    ):  # fmt: skip
        for out in (None, tmp_path / "kept"):
            report_of = replace(report, disagreements=found)
            asked: list[Tables] = []
            monkeypatch.setattr(sweep, "run", lambda *_, report_of=report_of, asked=asked, **more: asked.append(more) or report_of)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                sim.run(given, out=out, jobs=3, resume=True, yes=True, seed=5, views=["paths"])
            (own,) = asked
            assert (own["jobs"], own["yes"], own["seed"], own["views"]) == (3, True, 5, ["paths"])
            assert own.get("resume", False) == (out is not None), "what is not kept is not gone on with"
            assert out is None or own["out"] == out
            assert [(str(each.message), each.category, each.filename) for each in seen] == [
                (words, UserWarning, __file__) for words in said
            ]


def test_disagreement_beyond_the_bound_for_many_points_is_reported() -> None:
    """Each quantity has its own largest value, expectation and variance; only those that differ are reported, with both values."""
    case = Grid(tables(DRAFTING, RATIO)).case(0)
    tokens, gamma, count = case.settings.tokens, case.parameters.draft_length, 50
    time, busy = registry.method("speculative").slowest(case.parameters, tokens, case.cost)
    formula = {"latency_layers": 100.0, "latency_sd_layers": 20.0, "busy_layers": 90.0, "mean_busy_units_per_run": 0.9,
               "tokens_per_round": 2.0, "draft_acceptance_rate": 0.5}  # fmt: skip
    expected = {"latency_layers": 100.0, "busy_layers": 90.0, "mean_busy_units_per_run": 0.9, "rounds": case.outputs / 2,
                "drafted": case.outputs}  # fmt: skip
    busiest = max(case.parameters.units, case.peak_demand.units)
    most = {"latency_layers": time, "busy_layers": busy, "mean_busy_units_per_run": busiest, "rounds": case.outputs,
            "drafted": case.outputs * (gamma + 1)}  # fmt: skip
    spread = {name: 0.01 * want for name, want in expected.items()}

    def told(off: dict[str, float], points: int = 7, **changes: Any) -> list[dict[str, Any]]:
        """Disagreements of samples with these means."""
        means = {name: want + off.get(name, 0.0) for name, want in expected.items()}
        total = {name: count * mean for name, mean in means.items()}
        square = {name: count * mean**2 + (count - 1) * spread[name] ** 2 for name, mean in means.items()}
        latency, used, ratio = ("latency_layers", "busy_layers", "mean_busy_units_per_run")
        sums = Sums(count, total[latency], total[used], square[latency], square[used], 0.0, total[ratio], square[ratio])
        more = {f"{name}{end}": of[name] for name in ("rounds", "drafted") for end, of in (("", total), ("_square", square))}
        return [*agreement.simulated_against_formula(3, case, {**formula, **changes}, sums, more, "paths", points)]

    assert told({}) == []
    for points in (1, 7):
        limits = {
            name: 1e-9 * want + agreement.bound(
                1e-6 / (5 * points), count, most[name], want, 400.0 if name == "latency_layers" else None, spread[name] ** 2)
            for name, want in expected.items()
        }  # fmt: skip
        for sign in (1, -1):
            assert told({name: 0.999999 * sign * limit for name, limit in limits.items()}, points) == []
            found = told({name: 1.00001 * sign * limit for name, limit in limits.items()}, points)
            assert [each["quantity"] for each in found] == [*expected] == [*agreement.QUANTITIES]
            for each in found:
                name = each["quantity"]
                mean = expected[name] + 1.00001 * sign * limits[name]
                assert {key: each[key] for key in ("point", "views")} == {"point": 3, "views": ["formula", "paths"]}
                assert each["values"] == pytest.approx([expected[name], mean])
                assert (each["difference"], each["bound"]) == pytest.approx((1.00001 * limits[name], limits[name]))
    far = dict.fromkeys(expected, 1e6)
    assert [each["quantity"] for each in told(far)] == [*expected]
    for nothing in (None, float("nan"), float("inf")):
        assert [each["quantity"] for each in told(far, latency_layers=nothing, tokens_per_round=nothing)] == [
            "busy_layers", "mean_busy_units_per_run"
        ]  # fmt: skip
        assert [each["quantity"] for each in told(far, draft_acceptance_rate=nothing)] == [*expected][:-1]
    assert [each["quantity"] for each in told(far, tokens_per_round=0.0)] == [*expected][:3]
    sure = {"latency_layers": 2e-7}
    assert [each["bound"] for each in told(sure, latency_sd_layers=0.0)] == pytest.approx([1e-7])
    assert told({"latency_layers": 0.5e-7}, latency_sd_layers=0.0) == []


def test_contended_points_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppd, "_barrier_stage", without_link(ppd._barrier_stage))
    given = tables(cost={**OVERHEADS, "link": 2.0}, replications=512)
    report = sweep.run(given, out=tmp_path / "run", set={"cluster.units": 2}, jobs=1)
    assert not report.disagreements
    assert report.frame()["speedup"].null_count() == 2


# --- No false alarms --------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 400), st.floats(1e-4, 1 - 1e-4), st.floats(1e-9, 0.1), st.sampled_from([1.0, 37.5])
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_bound_holds_for_skewed_laws_and_few_replications(count: int, rate: float, chance: float, most: float) -> None:
    """Exact probability for a quantity that is `most` with some probability and else 0, summed over all counts in a sample."""
    hits = np.arange(count + 1)
    means, mass = most * hits / count, stats.binom.pmf(hits, count, rate)
    for known in (most**2 * rate * (1 - rate), None):
        false = 0.0
        for mean, own in zip(means, mass, strict=True):
            sampled = mean * (most - mean) * count / max(count - 1, 1)
            false += own * (abs(mean - most * rate) > agreement.bound(chance, count, most, most * rate, known, sampled))
        assert false <= chance * (1 + 1e-9)


def test_bound_falls_with_sample_size_like_a_standard_error() -> None:
    """With many replications and a known variance the bound is at most a tenth above sqrt(2 v ln(2 / chance) / n), the optimum."""
    chance, variance = 1e-8, 0.01
    for count in (10**5, 10**6):
        least = math.sqrt(2 * variance * math.log(2 / chance) / count)
        assert least < agreement.bound(chance, count, 1.0, 0.3, variance, 0.0) < 1.1 * least
        assert least < agreement.bound(chance, count, 1.0, 0.3, None, variance) < 1.3 * least


SLOWEST: list[tuple[str, Tables, Tables, Tables]] = [
    ("ppd", {"exit_layer": 6, "candidates": 2, "form": "flat"}, {"link": 1.0, "promotion": 2.0}, {"match": {"match_rate": 0.1}}),
    ("speculative", {"draft_length": 3}, RATIO, {"accept": {"acceptance_rate": 0.05}}),
    ("speculative", {"draft_length": 3, "sequences": 3, "batching": "static"}, RATIO, {"accept": {"acceptance_rate": 0.05}}),
    ("speculative", {"draft_length": 3, "sequences": 3}, RATIO, {"accept": {"acceptance_rate": 0.05}}),
    ("adaptive", {"policy": "heuristic"}, RATIO, {"accept": {"acceptance_rate": 0.3}}),
    ("hierarchical", {"draft_length": 2, "reading": "literal", "placement": "separate"},
     {"cost_ratio": 0.1, "medium_cost_ratio": 0.5, "link": 1.0},
     {"accept": {"acceptance_rate": 0.1}, "medium_accept": {"acceptance_rate": 0.1}}),
    ("hierarchical", {"draft_length": 3, "reading": "recursive", "inner_draft_length": 2},
     {"cost_ratio": 0.1, "medium_cost_ratio": 0.5},
     {"accept": {"acceptance_rate": 0.1}, "medium_accept": {"acceptance_rate": 0.1}}),
    ("beam", {"draft_length": 2, "beams": 2}, RATIO, {"accept": {"acceptance_rate": 0.1}}),
    ("bild", {"variant": "code"}, {"cost_ratio": 0.5}, {"decision": {"kind": "rates", "fallback_rate": 0.5, "rollback_rate": 0.9}}),
    ("early_exit", {"fill": "backfill"}, {"propagation": 0.5, "early_head": 1.0},
     {"exit": {"kind": "hazards", "hazards": [0.2] * 7 + [1.0]}}),
    ("skipdecode", {"min_layers": 3, "max_layers": 6, "warm_up": 1, "prompt": 0, "sequence_length": 12}, {}, {}),
    ("autoregressive", {}, {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "cost", "laws"), SLOWEST, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(SLOWEST)])
def test_no_decoding_exceeds_the_upper_bound_on_time(name: str, parameters: Tables, cost: Tables, laws: Tables) -> None:
    given = {"scenario": {"name": "slowest", "tokens": 12}, "method": [{"name": name, "layers": 8, **parameters}], "cost": cost}
    given |= {"outcomes": {key: {"kind": "iid", **law} for key, law in laws.items()}} if laws else {}
    case = Grid(given).case(0)
    time, busy = registry.method(name).slowest(case.parameters, 12, case.cost)
    found = evaluation.walk(case, 0)
    assert found[0].max() <= time * (1 + 1e-12)
    assert found[1].max() <= busy * (1 + 1e-12)
    assert time <= 8 * found[0].max()  # and the bound is close enough to detect errors


def test_paths_and_events_agree_on_a_static_batch_of_two(tmp_path: Path) -> None:
    method = {"name": "speculative", "layers": 4, "draft_length": 2, "sequences": 2, "batching": "static"}
    report = sweep.run(tables(method, RATIO, tokens=6, replications=8), out=tmp_path / "run", views=["paths", "events"], jobs=1)
    rows = {row["view"]: row for row in report.frame().to_dicts()}
    assert rows["events"]["paths_difference"] == pytest.approx(0.0, abs=1e-9)
    assert rows["paths"]["latency_layers"] == pytest.approx(rows["events"]["latency_layers"])
    assert report.disagreements == []


def test_sums_of_a_piece_cover_its_replications_only() -> None:
    """Also for the second block, which has separate random draws."""
    case = Grid(tables({"name": "speculative", "layers": 4, "draft_length": 2}, RATIO, tokens=6)).case(0)
    for block in (0, 1):
        found = evaluation.walk(case, block)
        row = evaluation.paths_row(case, block * 4096 + 5, block * 4096 + 9)
        assert (row["count"], row["latency"]) == (4, pytest.approx(found[0][5:9].sum(), rel=1e-12))
        assert row["rounds"] == found.rounds[5:9].sum()
        assert "accepted_lengths" not in row


QUICK = ("ppd-forms", "ppd-overheads", "speculative-deck", "skipdecode")
SLOW = ("ppd-figures-3-and-4", "ppd-batched", "early-exit", "bild", "compare", "speculative-adaptive", "speculative-hierarchy")


def agrees(name: str, seed: int, folder: Path, **more: Any) -> None:
    report = sweep.run(name, out=folder / f"{name}-{seed}", seed=seed, jobs=1, **more)
    assert [agreement.describe(found) for found in report.disagreements] == []


@pytest.mark.parametrize("name", QUICK)
def test_bundled_scenarios_agree(name: str, tmp_path: Path) -> None:
    agrees(name, 1, tmp_path, set={"scenario.event_replications": 2, "scenario.replications": 1024})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bundled_scenarios_agree_at_every_seed(name: str, seed: int, tmp_path: Path) -> None:
    agrees(name, seed, tmp_path, set={"scenario.event_replications": 16})
