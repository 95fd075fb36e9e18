"""Arguments of closed forms: refused by their names outside of their bounds, accepted on them, and broadcast."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from model.base.checks import ParameterError
from model.methods.adaptive import theory as adaptive
from model.methods.beam import theory as beam
from model.methods.bild import theory as bild
from model.methods.dsi import theory as dsi
from model.methods.hierarchical import theory as hierarchical
from model.methods.pearl import theory as pearl
from model.methods.ppd import theory as ppd
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import theory as sd
from model.methods.ssd import theory as ssd


class Domain(NamedTuple):
    """Values that are good, bounds included, and values just outside."""

    good: tuple[float, ...]
    bad: tuple[Any, ...]


RATE = Domain((0, 0.3, 1), (-0.01, 1.01, math.nan, "x"))
BELOW_ONE = Domain((0, 0.3, 0.9), RATE.bad)
RATIO = Domain((0, 0.3, 4), (-0.01, math.nan, math.inf, "x"))
POSITIVE = Domain((0.01, 0.3, 4), (0, -0.01, math.nan, math.inf, "x"))
LENGTH = Domain((0, 2, 5), (-1, 2.5, math.nan, math.inf, "x"))
COUNT = Domain((1, 2, 5), (0, -1, 2.5, math.nan, math.inf, "x"))
MEAN_LENGTH = Domain((1, 1.5, 2), (0.99, math.nan, "x"))  # any draft of one token or more can give these
CORRELATION = Domain((0, 0.3, 1), (-1.01, 1.01, math.nan, "x"))

CURVE = {"verify_cost": [(1, 2.0), (9, 3.0)]}
DRAFT = {"acceptance_rate": RATE, "draft_length": LENGTH}
NESTED = {"medium_acceptance_rate": RATE, "draft_length": COUNT}
PRICED = {"cost_ratio": RATIO, "medium_cost_ratio": RATIO}
SEGMENT = {"fallback_rate": RATE, "rollback_rate": RATE, "max_draft_length": COUNT}
INNER = {"inner_draft_length": LENGTH}

ELEMENTWISE: list[tuple[Callable[..., Any], dict[str, Domain], dict[str, Any]]] = [
    (sd.expected_tokens, DRAFT, {}),
    (sd.tokens_variance, DRAFT, {}),
    (sd.speedup, {**DRAFT, "cost_ratio": RATIO}, {}),
    (sd.speedup, {**DRAFT, "cost_ratio": RATIO}, CURVE),
    (sd.operations_factor, {**DRAFT, "operations_ratio": RATIO}, {}),
    (sd.oracle_speedup, {"acceptance_rate": RATE, "cost_ratio": RATIO}, {}),
    (sd.optimal_draft_length, {"acceptance_rate": RATE, "cost_ratio": RATIO}, {"longest": 7}),
    (sd.optimal_draft_length, {"acceptance_rate": RATE, "cost_ratio": RATIO}, CURVE),
    (sd.target_runs, {"tokens": COUNT, **DRAFT}, {}),
    (sd.draft_runs, {"tokens": COUNT, **DRAFT}, {}),
    (sd.finite_speedup, {"tokens": COUNT, **DRAFT, "cost_ratio": RATIO}, {}),
    (sd.finite_speedup, {"tokens": COUNT, **DRAFT, "cost_ratio": RATIO}, CURVE),
    (sd.drafted_from_acceptance, {"acceptance_rate": RATE, "draft_length": COUNT}, {}),
    (sd.acceptance_from_drafted, {"rate": RATE, "draft_length": COUNT}, {}),
    (sd.acceptance_from_length, {"mean_acceptance_length": MEAN_LENGTH, "draft_length": COUNT}, {}),
    (laws.expected_tokens_markov, {**DRAFT, "correlation": CORRELATION}, {}),
    (laws.expected_tokens_markov, {**DRAFT, "correlation": CORRELATION}, {"chain": "tested"}),
    (adaptive.oracle_gain, {"acceptance_rate": BELOW_ONE, "cost_ratio": Domain((0.1, 0.3, 4), RATIO.bad)}, {}),
    (beam.expected_steps, DRAFT, {}),
    (beam.speedup, {**DRAFT, "cost_ratio": RATIO}, {"beams": 3}),
    (hierarchical.tokens_per_round, {"acceptance_rate": RATE, **NESTED}, {}),
    (hierarchical.tokens_per_round, {"acceptance_rate": RATE, **NESTED}, {"reading": "bonus"}),
    (hierarchical.medium_passes, NESTED, {}),
    (hierarchical.medium_passes, {**NESTED, **INNER}, {"reading": "recursive"}),
    (hierarchical.small_passes, NESTED, {}),
    (hierarchical.small_passes, {**NESTED, **INNER}, {"reading": "recursive"}),
    (hierarchical.cost_per_round, {**NESTED, **PRICED}, {}),
    (hierarchical.cost_per_round, {**NESTED, **PRICED, **INNER}, {"reading": "recursive"}),
    (hierarchical.speedup, {"acceptance_rate": RATE, **NESTED, **PRICED}, {}),
    (hierarchical.speedup, {"acceptance_rate": RATE, **NESTED, **PRICED}, {"reading": "reuse", **CURVE}),
    (hierarchical.breakeven_accepted, {"draft_length": COUNT, "cost_ratio": RATIO, "medium_cost_ratio": POSITIVE}, {}),
    (hierarchical.cascade_speedup,
     {"acceptance_rate": RATE, "medium_acceptance_rate": RATE, "inner_rounds": LENGTH, **INNER, **PRICED}, {}),
    (bild.expected_tokens, SEGMENT, {}),
    (bild.expected_tokens, SEGMENT, {"variant": "code"}),
    (bild.small_runs, {"fallback_rate": RATE, "max_draft_length": COUNT}, {}),
    (bild.large_inputs, {"fallback_rate": RATE, "max_draft_length": COUNT}, {}),
    (bild.extra_large_inputs, SEGMENT, {}),
    (bild.rollback_probability, SEGMENT, {}),
    (bild.speedup, {**SEGMENT, "cost_ratio": RATIO}, {}),
    (bild.speedup, {**SEGMENT, "cost_ratio": RATIO}, {"variant": "code", **CURVE}),
    (bild.operations_factor, {**SEGMENT, "operations_ratio": RATIO}, {"variant": "code"}),
    (bild.memory_factor, {**SEGMENT, "memory_ratio": RATIO}, {"variant": "code"}),
    (bild.intensity_factor, {**SEGMENT, "operations_ratio": RATIO, "memory_ratio": RATIO}, {}),
    (bild.effective_cost_ratio, {"speed": POSITIVE, **SEGMENT}, {}),
    (pearl.expected_tokens, {"acceptance_rate": RATE, "draft_length": COUNT}, {}),
    (pearl.speedup, {"acceptance_rate": RATE, "draft_length": COUNT, "cost_ratio": RATIO}, {}),
    (pearl.speedup, {"acceptance_rate": RATE, "draft_length": COUNT, "cost_ratio": RATIO}, {"draft_stop": "rejection"}),
    (ssd.expected_tokens, {"acceptance_rate": RATE, "draft_length": COUNT}, {}),
    (ssd.round_time, {"hit_rate": RATE}, {"draft_length": 3, "cost_ratio": 0.3, "link": 0.1}),
    (dsi.needed_verifiers, {"lookahead": COUNT, "cost_ratio": POSITIVE}, {"link": 0.5}),
    (dsi.expected_latency, {"acceptance_rate": RATE, "cost_ratio": RATE, "tokens": COUNT}, {}),
    (dsi.speedup, {"acceptance_rate": RATE, "lookahead": COUNT, "verifiers": COUNT, "cost_ratio": RATIO}, {"link": 2.0}),
    (ppd.expected_runs, {"tokens": COUNT, "match_rate": RATE}, {}),
    (ppd.relative_latency, {"match_rate": RATE}, {}),
    (ppd.mean_busy_units, {"match_rate": RATE, "candidates": COUNT}, {}),
    (ppd.compute_per_token, {"match_rate": RATE, "candidates": COUNT}, {}),
]  # fmt: skip
"""Functions of arrays, element by element; with the domains of their arguments, and what else they are told."""

ONE: list[tuple[Callable[..., Any], dict[str, Domain], dict[str, Any]]] = [
    (sd.tokens_pmf, DRAFT, {}),
    (sd.renewal_density, {"tokens": COUNT, **DRAFT}, {}),
    (laws.beta_moments, {"draft_length": LENGTH}, {"a": 1.0, "b": 2.0}),
    (adaptive.biased_lengths, {"acceptance_rate": RATE, "cost_ratio": RATIO, "longest": COUNT}, {}),
    (adaptive.heuristic_lengths, {"longest": COUNT}, {"acceptance_rate": 0.5}),
    (laws.tokens_of_rounds, {"draft_length": LENGTH}, {"lengths": [1, 2, 3]}),
    (laws.tokens_of_rounds, {"draft_length": LENGTH, "tokens": Domain((1, 2, 3), (0, 4, 2.5))}, {"lengths": [1, 2, 3]}),
    (sd.lenient_acceptance_rate, {"lenience": Domain((0.01, 0.5, 1), (0, -0.01, 1.01, math.nan))}, {"p": [1.0], "q": [1.0]}),
    (sd.optimal_draft_length, {"longest": LENGTH}, {"acceptance_rate": 0.5, "cost_ratio": 0.1}),
]  # fmt: skip
"""Arguments that are one number."""

ROWS: list[tuple[Callable[..., Any], str, list[list[float]], dict[str, Any], list[list[float]]]] = [
    (laws.expected_tokens_by_draft_position, "acceptance_rates", [[0.9, 0.5, 1], [0, 1, 0.3]], {}, [[0.5, -0.01], [0.5, 1.01]]),
    (laws.expected_tokens_shared_rate, "moments", [[0.9, 0.85, 0.8], [0.3, 0.09, 0.027], [1, 1, 1], [0, 0, 0]], {},
     [[0.5, -0.01], [1.01, 1.01], [0.5, 0.51], [0.5, 0.24], [0.5, 0.5, 0.4, 0.45]]),
    (laws.expected_tokens_random_length, "length_pmf", [[0.5, 0.25, 0.25], [0, 0, 1]], {"acceptance_rate": 0.4},
     [[0.5, 0.4], [1.5, -0.5]]),
    (adaptive.speedup_of_lengths, "length_pmf", [[0.5, 0.25, 0.25], [0, 0, 1]], {"acceptance_rate": 0.4, "cost_ratio": 0.2},
     [[0.5, 0.4], [1.5, -0.5]]),
]  # fmt: skip
"""Arguments whose last axis is a law: good rows, what else the function is told, bad rows."""


def named(each: Any) -> str:
    return each.__name__ if callable(each) else ""


@pytest.mark.parametrize(("function", "domains", "more"), [*ELEMENTWISE, *ONE], ids=named)
def test_each_argument_is_refused_by_its_name_just_outside_its_bounds(
    function: Callable[..., Any], domains: dict[str, Domain], more: dict[str, Any]
) -> None:
    middle = {name: domain.good[1] for name, domain in domains.items()}
    for name, domain in domains.items():
        for value in domain.bad:
            with pytest.raises(ParameterError, match=rf"^{name} must be .*\b") as refused:
                function(**{**middle, name: value}, **more)
            assert re.search(rf"got '?{re.escape(str(value))}", str(refused.value))
        for value in domain.good:
            function(**{**middle, name: value}, **more)


@pytest.mark.parametrize(("function", "domains", "more"), ONE, ids=named)
def test_what_is_one_number_is_no_list(function: Callable[..., Any], domains: dict[str, Domain], more: dict[str, Any]) -> None:
    middle = {name: domain.good[1] for name, domain in domains.items()}
    for name, domain in domains.items():
        with pytest.raises(ParameterError, match=rf"^{name} must be a (whole )?number, got \["):
            function(**{**middle, name: [domain.good[1], domain.good[2]]}, **more)


@pytest.mark.parametrize(("function", "domains", "more"), ELEMENTWISE, ids=named)
def test_the_first_bad_element_is_named(function: Callable[..., Any], domains: dict[str, Domain], more: dict[str, Any]) -> None:
    middle = {name: domain.good[1] for name, domain in domains.items()}
    for name, domain in domains.items():
        bad = domain.bad[0]
        with pytest.raises(ParameterError, match=rf"^{name}(\[1\])? must be "):
            function(**{**middle, name: [domain.good[1], bad, bad]}, **more)


@pytest.mark.parametrize(("function", "domains", "more"), ELEMENTWISE, ids=named)
def test_arrays_are_taken_element_by_element(
    function: Callable[..., Any], domains: dict[str, Domain], more: dict[str, Any]
) -> None:
    """Over the whole grid of good values, each argument on an axis of its own; and nothing that is passed in is changed."""
    grid = dict(zip(domains, np.meshgrid(*(domain.good for domain in domains.values()), indexing="ij", sparse=True), strict=True))
    before = {name: values.copy() for name, values in grid.items()}
    found = function(**grid, **more)
    assert all(np.array_equal(grid[name], before[name]) for name in grid)
    assert isinstance(found, np.ndarray)
    assert found.shape == (3,) * len(domains)
    for place, point in enumerate(itertools.product(*(domain.good for domain in domains.values()))):
        single = function(**dict(zip(domains, point, strict=True)), **more)
        assert isinstance(single, np.ndarray)
        assert single.shape == ()
        assert float(single) == pytest.approx(float(found.flat[place]), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("function", "name", "rows", "more", "bad"), ROWS, ids=named)
def test_laws_stand_along_the_last_axis(
    function: Callable[..., Any], name: str, rows: list[list[float]], more: dict[str, Any], bad: list[list[float]]
) -> None:
    single = [float(function(**{name: row}, **more)) for row in rows]
    found = function(**{name: [rows, rows[::-1]]}, **more)
    assert found.shape == (2, len(rows))
    assert found.tolist() == [pytest.approx(single, rel=1e-14), pytest.approx(single[::-1], rel=1e-14)]
    for row in bad:
        with pytest.raises(ParameterError, match=rf"^{name}[ \[]"):
            function(**{name: row}, **more)
