"""Figures of adaptive draft lengths and of hierarchies: drawn values are the theory's, and the runs that have these figures."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from figures import of_run, save
from figures.of_theory import adaptive_draft_lengths, hierarchical_regions
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.theory import biased_lengths, heuristic_moments
from model.methods.hierarchical import theory
from model.methods.rounds.prices_of_rounds import round_prices
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from model.published import deck_analysis
from tests.figures.test_figures_speculative import apart, inside, xy
from tests.figures.test_figures_tradeoff import coordinates, lines, words
from tests.support.figure_checks import formula

C = 0.1
CHANGING = np.where(np.arange(119) < 60, 0.85, 0.4)


@pytest.fixture(scope="module")
def steady() -> pl.DataFrame:
    return adaptive_draft_lengths.trajectories([0.85] * 399, C, text="steady", replications=300)


@pytest.fixture(scope="module")
def changing() -> pl.DataFrame:
    return adaptive_draft_lengths.trajectories(CHANGING, C, text="changing", replications=300)


def speeds(rows: pl.DataFrame) -> dict[str, float]:
    return dict(rows.select("policy", "speedup").unique().rows())


def fixed_speed(rates: Any, length: int) -> float:
    """Speed-up of one draft length, from the probability that a round starts at each position."""
    tokens = len(rates) + 1
    starts, time = np.zeros(tokens + 1), 0.0
    starts[0] = 1.0
    for start in range(tokens):
        drafted = min(length, tokens - 1 - start)
        time += starts[start] * (1 + C * drafted)
        reached = starts[start]
        for at in range(start, start + drafted):
            starts[at + 1] += reached * (1 - rates[at])
            reached *= rates[at]
        starts[start + drafted + 1] += reached
    return tokens / time


# --- Adaptive draft lengths -------------------------------------------------------------------------------------------


def test_fixed_length_is_the_best_one_and_has_its_exact_speed(steady: pl.DataFrame, changing: pl.DataFrame) -> None:
    for rows, rates in ((steady, [0.85] * 399), (changing, CHANGING)):
        length = int(rows.filter(policy=adaptive_draft_lengths.FIXED)["median"][0])
        exact = [fixed_speed(rates, each) for each in range(21)]
        assert exact[length] == pytest.approx(max(exact), rel=0.005)
        assert speeds(rows)[adaptive_draft_lengths.FIXED] == pytest.approx(exact[length], rel=0.02)
    assert fixed_speed([0.85] * 399, 5) == pytest.approx(float(speculative.finite_speedup(400, 0.85, 5, C)))


def test_heuristic_has_the_mean_time_of_its_theory() -> None:
    rows = adaptive_draft_lengths.trajectories([0.7] * 127, C, replications=4000)
    exact = heuristic_moments(5, 20, 128, Iid(0.7), round_prices(UnitCost(40, cost_ratio=C), 20))
    error = 5 * exact.variance**0.5 / exact.time / 4000**0.5
    assert speeds(rows)["heuristic"] == pytest.approx(128 * 40 / exact.time, rel=error)


def test_policies_settle_at_the_optimum_of_their_estimators(steady: pl.DataFrame) -> None:
    last = {row["policy"]: row["median"] for row in steady.filter(position=398).to_dicts()}
    best = float(speculative.optimal_draft_length(0.85, C))
    biased = int(biased_lengths(0.85, C, 20).argmax())
    assert biased < best - 1
    assert last["optimum"] == last["gradient"] == best
    assert last["optimum, biased"] == last["gradient, biased"] == biased
    found = speeds(steady)
    assert found["optimum, biased"] < 0.95 * found["optimum"]


def test_no_policy_exceeds_the_bound(steady: pl.DataFrame, changing: pl.DataFrame) -> None:
    for rows in (steady, changing):
        found = speeds(rows)
        assert (
            max(value for name, value in found.items() if name != adaptive_draft_lengths.BOUND)
            < found[adaptive_draft_lengths.BOUND]
        )
    many = adaptive_draft_lengths.trajectories([0.85] * 3999, C, longest=1, replications=1)
    assert speeds(many)[adaptive_draft_lengths.BOUND] == pytest.approx(float(speculative.oracle_speedup(0.85, C)), rel=2e-3)
    sure = speeds(adaptive_draft_lengths.trajectories([1.0] * 20, C, replications=3))  # one round of 20 drafts is the bound
    assert sure[adaptive_draft_lengths.FIXED] == pytest.approx(sure[adaptive_draft_lengths.BOUND])


def test_one_decoding_follows_the_algorithm() -> None:
    """Compare round by round, for decodings that accept all, no, or every other token; rounds cut by the end are skipped."""
    for rates in ([1.0] * 60, [0.0] * 60, [1.0, 0.0] * 30):
        rows = adaptive_draft_lengths.trajectories(rates, C, replications=1)
        for name, options in adaptive_draft_lengths.CHOICES.items():
            lengths = rows.filter(policy=name)["median"].to_list()
            starts = dict(rounds(Parameters(4, believed_cost_ratio=None if name == "heuristic" else C, **options), rates))
            whole = {at: length for at, length in starts.items() if at + length < 60}
            assert len(whole) >= 3
            assert {at: lengths[at] for at in whole} == whole


def rounds(parameters: Parameters, rates: list[float]) -> list[tuple[int, int]]:
    """Start and draft length of each round, where every acceptance is certain or impossible."""
    policy, at, found = parameters.initial_policy(1), 0, []
    while at <= len(rates):
        length = min(int(policy.length[0]), len(rates) - at)
        kept = sum(1 for _ in itertools.takewhile(lambda rate: rate == 1, rates[at : at + length]))
        found.append((at, length))
        policy.learn(np.zeros(1, dtype=np.intp), np.array([kept]), np.array([length]))
        at += kept + 1
    return found


def test_drawn_values_are_those_of_the_rows(steady: pl.DataFrame, changing: pl.DataFrame) -> None:
    figure = adaptive_draft_lengths.draw(pl.concat([steady, changing]))
    assert len(figure.axes) == 8
    for rows, panels in ((steady, figure.axes[:4]), (changing, figure.axes[4:])):
        drawn = {label: line for axes in panels[:3] for label, line in lines(axes).items()}
        for name in adaptive_draft_lengths.CHOICES:
            own = rows.filter(policy=name)
            at, lengths = xy(drawn[name])
            assert at.tolist() == own["position"].to_list()
            assert lengths.tolist() == own["median"].to_list()
            (x,), _ = xy(lines(panels[3])[name])
            assert x == own["speedup"][0]
        at, best = xy(drawn["best for the rate"])
        rates = rows.filter(policy="heuristic")["acceptance_rate"].to_numpy()
        for at_position in (0, 59, 60, 118):
            tried = speculative.speedup(rates[at_position], np.arange(60), C)
            assert tried[int(best[at_position])] == tried.max()
        assert xy(lines(panels[3])[adaptive_draft_lengths.BOUND])[0][0] == speeds(rows)[adaptive_draft_lengths.BOUND]
        assert xy(drawn[adaptive_draft_lengths.FIXED])[1][0] == rows.filter(policy=adaptive_draft_lengths.FIXED)["median"][0]
    assert "changing: α = 0.85, then 0.4" in words(figure)


def test_bands_are_quartiles(changing: pl.DataFrame) -> None:
    axes = adaptive_draft_lengths.draw(changing).axes[0]
    (band,) = axes.collections
    corners = np.vstack([path.vertices for path in band.get_paths()])
    own = changing.filter(policy="heuristic")
    assert set(corners[:, 1].tolist()) >= set(own["low"].to_list()) | set(own["high"].to_list())
    assert (own["low"] <= own["median"]).all()
    assert (own["median"] <= own["high"]).all()
    assert (own["low"] < own["high"]).any()


def legible(figure: Figure) -> bool:
    return inside(figure) and all(apart(axes) for axes in figure.axes)


def test_the_figures_are_legible(steady: pl.DataFrame, changing: pl.DataFrame) -> None:
    assert legible(adaptive_draft_lengths.draw(pl.concat([steady, changing])))
    assert legible(adaptive_draft_lengths.draw(steady))
    assert legible(hierarchical_regions.draw(hierarchical_regions.example()))


# --- Hierarchies ------------------------------------------------------------------------------------------------------

CHEAP = {"cost_ratio": 0.02, "medium_cost_ratio": 0.2, "draft_length": 3}
EXPENSIVE = {"cost_ratio": 0.3, "medium_cost_ratio": 0.6, "draft_length": 4}


def regions(figure: Figure, index: int) -> tuple[Any, Any]:
    (mesh,) = (each for each in figure.axes[index].collections if isinstance(each, QuadMesh))
    corners = np.asarray(mesh.get_coordinates())
    return np.asarray(mesh.get_array()), (corners[0, :-1, 0] + corners[0, 1:, 0]) / 2


@pytest.mark.parametrize("costs", [CHEAP, EXPENSIVE])
def test_regions_end_at_the_break_even(costs: dict[str, Any]) -> None:
    """Regions are drawn from speed-ups; their ends are compared with the theory's break-even formula."""
    figure = hierarchical_regions.draw(pl.DataFrame([costs]))
    gamma, small, medium = costs["draft_length"], costs["cost_ratio"], costs["medium_cost_ratio"]
    names = list(hierarchical_regions.REGIONS)
    for index, reading in enumerate(hierarchical_regions.READINGS):
        drawn, rates = regions(figure, index)
        pays = drawn != names.index("nothing")
        assert pays.any()
        over_medium = (drawn == names.index("medium")) | (drawn == names.index("both"))
        if reading != "bonus":
            kept = sum(rates**power for power in range(1, gamma + 1)) + (0 if reading == "literal" else 1 - rates**gamma)
            above = np.broadcast_to(kept > theory.breakeven_accepted(gamma, small, medium), drawn.shape)
            assert np.array_equal(over_medium[pays], above[pays])


def test_in_the_plain_region_no_scheme_is_faster_than_plain_decoding() -> None:
    figure = hierarchical_regions.draw(pl.DataFrame([CHEAP]))
    for index, reading in enumerate(hierarchical_regions.READINGS):
        drawn, rates = regions(figure, index)
        for row, column in itertools.product(range(3, 300, 27), repeat=2):
            large, middle = rates[row], rates[column]
            found = [
                float(theory.speedup(large, middle, 3, 0.02, 0.2, reading=reading)),
                float(speculative.speedup(large, 3, 0.2)), float(speculative.speedup(large * middle, 3, 0.02)),
            ]  # fmt: skip
            assert (drawn[row, column] == 0) == (max(found) <= 1)
            assert (drawn[row, column] == len(hierarchical_regions.REGIONS) - 1) == (found[0] > max(1, *found[1:]))


def test_slides_are_drawn_at_the_rates_of_their_speed_ups() -> None:
    figure = hierarchical_regions.draw(hierarchical_regions.example())
    for axes, reading in zip(figure.axes, hierarchical_regions.READINGS, strict=False):
        ((middle, large),) = coordinates([lines(axes)["points"]])
        c = deck_analysis.cost_ratio("ende")
        assert float(speculative.speedup(large, 3, 0.5)) == pytest.approx(1.13)
        assert float(theory.speedup(large, middle, 3, c, 0.5, reading=reading)) == pytest.approx(1.46)
        assert "slides" in {text.get_text() for text in axes.texts}
    assert all("points" not in lines(axes) for axes in figure.axes[3:])


def test_a_point_without_a_reading_is_in_every_map() -> None:
    rows = pl.DataFrame([CHEAP | {"acceptance_rate": 0.9, "medium_acceptance_rate": 0.4}])
    assert [coordinates([lines(axes)["points"]]) for axes in hierarchical_regions.draw(rows).axes] == [{(0.4, 0.9)}] * 3


# --- Both -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(changing: pl.DataFrame, tmp_path: Path) -> None:
    again = adaptive_draft_lengths.trajectories(CHANGING, C, text="changing", replications=300)
    assert again.equals(changing)
    for draw, first, second in (
        (adaptive_draft_lengths.draw, changing, again),
        (hierarchical_regions.draw, hierarchical_regions.example(), hierarchical_regions.example()),
    ):
        pairs = zip(save(draw(first), tmp_path / "one"), save(draw(second), tmp_path / "two"), strict=True)
        assert all(one.read_bytes() == two.read_bytes() for one, two in pairs)


def test_a_seed_determines_the_draws() -> None:
    one, again, other = (adaptive_draft_lengths.trajectories(CHANGING, C, seed=seed, replications=1) for seed in (0, 0, 1))
    assert one.equals(again)
    assert not one.equals(other)


def test_rows_and_values_that_cannot_be_drawn_are_refused(changing: pl.DataFrame) -> None:
    renamed = [changing.with_columns(text=pl.lit(name)) for name in "abcd"]
    costs = pl.DataFrame([CHEAP | {"draft_length": length} for length in (1, 2, 3, 4)])
    cases: list[tuple[Any, str]] = [
        (lambda: adaptive_draft_lengths.draw(changing.clear()), "needs at least one row, got none"),
        (lambda: adaptive_draft_lengths.draw(changing.drop("low")), "got none called low"),
        (lambda: adaptive_draft_lengths.draw(changing.with_columns(policy=pl.lit("mine"))), "unknown policy 'mine'"),
        (lambda: adaptive_draft_lengths.draw(pl.concat(renamed)), "rows must be of at most 3 sequences, got 4"),
        (lambda: adaptive_draft_lengths.trajectories([0.5, 1.5], C), r"acceptance_rates\[1\] must be between 0 and 1, got 1.5"),
        (lambda: adaptive_draft_lengths.trajectories([], C), "acceptance_rates must be a list of one rate or more"),
        (lambda: adaptive_draft_lengths.trajectories([0.5], -1.0), "cost_ratio must be at least 0, got -1.0"),
        (
            lambda: adaptive_draft_lengths.trajectories([0.5], C, replications=5000),
            "replications must be between 1 and 4096, got 5000",
        ),
        (lambda: adaptive_draft_lengths.trajectories([0.5], C, longest=0), "longest must be at least 1, got 0"),
        (lambda: hierarchical_regions.draw(costs.clear()), "needs at least one row, got none"),
        (lambda: hierarchical_regions.draw(costs.drop("cost_ratio")), "got none called cost_ratio"),
        (lambda: hierarchical_regions.draw(costs), "rows must be of at most 3 choices of costs, got 4"),
        (lambda: hierarchical_regions.draw(costs[:1].with_columns(reading=pl.lit("B"))), "unknown reading 'B'"),
        (
            lambda: hierarchical_regions.draw(costs.with_columns(cost_ratio=pl.lit(None, pl.Float64))),
            "needs at least one row, got none",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ParameterError, match=message):
            call()


# --- Runs -------------------------------------------------------------------------------------------------------------


def drawn(scenario: str, folder: Path) -> set[str]:
    folder.mkdir()
    return {path.stem for path in of_run(folder, formula(scenario))}


@pytest.mark.usefixtures("album")
def test_runs_draw_the_figures_of_their_methods(tmp_path: Path) -> None:
    hierarchy = drawn("speculative-hierarchy", tmp_path / "hierarchy")
    assert {"hierarchical", "deck"} <= hierarchy  # its pair has the rates of the slides
    deck = drawn("speculative-deck", tmp_path / "deck")
    assert "deck" in deck
    assert "hierarchical" not in deck
    assert not {"deck", "hierarchical"} & drawn("speculative-adaptive", tmp_path / "adaptive")
