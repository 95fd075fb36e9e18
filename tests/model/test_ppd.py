"""Theorem 4.1 and extensions: published numbers, exact enumeration of paths, shapes, and errors."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model import published
from model.base import checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods.ppd import theory as ppd
from model.methods.ppd.algorithm import Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.stages import moments, sums
from model.outcomes.outcome_laws import ByPosition, Iid, Law, Markov, Replay
from model.steps import Forward, Read, declining
from sim.engine.events import Cluster, simulate
from tests.support.exact import assert_work_of_each

Path = tuple[tuple[bool, ...], float]


def rate(data_set: str, candidates: int, head: str, layer: int = 20) -> float:
    """Match rate of Table 2."""
    return published.match_rate("ppd-table-2", data_set=data_set, layer=layer, candidates=candidates, head=head).rate


def paths(rates: NDArray[np.float64] | list[float]) -> Iterator[Path]:
    """All sequences of independent matches with their probabilities."""
    for matches in itertools.product((False, True), repeat=len(rates)):
        yield matches, float(np.prod([p if match else 1 - p for p, match in zip(rates, matches, strict=True)]))


def markov_paths(p: float, rho: float, positions: int) -> Iterator[Path]:
    """All sequences of a stationary Markov chain with their probabilities: correlation rho with the outcome before."""
    for matches in itertools.product((False, True), repeat=positions):
        chance = 1.0
        for index, match in enumerate(matches):
            hit = p if index == 0 else p + rho * (matches[index - 1] - p)
            chance *= hit if match else 1 - hit
        yield matches, chance


def by_runs(d: int, exit_at: int, k: int, matches: tuple[bool, ...]) -> tuple[float, float]:
    """Time and unit-time from the paper's runs: a run of X tokens takes d + (X - 1) d', plus k (d - d') unit-time per token."""
    runs = [1]
    for match in matches:
        if match:
            runs[-1] += 1
        else:
            runs.append(1)
    time = sum(d + (run - 1) * exit_at for run in runs)
    return time, time + k * (d - exit_at) * sum(runs)


def by_gaps(d: int, exit_at: int, k: int, matches: tuple[bool, ...]) -> tuple[float, float]:
    """Flat form: a promoted process is d - g layers deep and predicts there, or at d' if that comes later."""
    start, gap, subs = 0, exit_at, d - exit_at
    for match in matches:
        start += gap if match else d
        gap = max(exit_at, d - gap) if match else exit_at
        subs += d - gap
    return start + d, start + d + k * subs


def by_tree(d: int, exit_at: int, k: int, matches: tuple[bool, ...]) -> tuple[float, float]:
    """Nested form: a process starts k more after d'; a wrong one lives d - d' and ends together with its descendants."""

    def tree(life: int) -> int:
        return life + k * tree(life - exit_at) if life > 0 else 0

    start = sum(exit_at if match else d for match in matches)
    wrong = k * (len(matches) + 1) - sum(matches)
    return start + d, d * (len(matches) + 1) + wrong * tree(d - exit_at)


def expect(paths: Iterator[Path], of: Callable[[tuple[bool, ...]], tuple[float, float]]) -> tuple[float, ...]:
    """Mean and variance of the time, means of the unit-time and of their ratio, over all paths."""
    values = [(*of(matches), chance) for matches, chance in paths]
    time, busy, mass = (np.array(column) for column in zip(*values, strict=True))
    mean = float(mass @ time)
    return mean, float(mass @ (time - mean) ** 2), float(mass @ busy), float(mass @ (busy / time))


WALKS = {"literal": by_runs, "eager": by_runs, "flat": by_gaps, "nested": by_tree}
SMALL = [(4, 2, 2), (5, 3, 1), (7, 4, 3), (6, 6, 2), (3, 2, 1)]
"""(layers, exit layer, candidates), exit layer in the upper half."""
DEEP = [(7, 2, 2), (12, 4, 2), (10, 1, 1), (9, 4, 3)]
"""(layers, exit layer, candidates), exit layer in the lower half."""


# --- Published numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_set", "candidates", "head", "latency", "units"),
    [("squad", 5, "trained", 0.629, 4.973), ("wmt", 1, "final", 0.892, 1.561)],
)
def test_latency_and_units_quoted_in_the_paper(
    data_set: str, candidates: int, head: str, latency: float, units: float
) -> None:
    p = rate(data_set, candidates, head)
    assert round(float(ppd.relative_latency(p)), 3) == latency
    assert round(float(ppd.mean_busy_units(p, candidates)), 3) == units


def test_34_percent_and_3_2_times_the_units_are_from_different_formulas() -> None:
    """Figure 3 says 34 % at 3.2 times the compute: the first is Eq. 3, the second the compute of 16 tokens."""
    p = rate("squad", 3, "trained")
    assert p == 0.6837
    assert round(100 * (1 - float(ppd.relative_latency(p))), 1) == 34.2
    assert round(float(ppd.mean_busy_units(p, 3)), 3) == 3.279
    latency, compute = ppd.expected_latency(40, 20, 16, p), ppd.expected_compute(40, 20, 16, p, 3)
    assert round(100 * (1 - float(latency) / 640), 1) == 32.0
    assert round(float(compute / latency), 4) == 3.2075
    assert compute == latency + 3 * 20 * 16


def test_128_tokens_of_squad_with_three_candidates() -> None:
    p = rate("squad", 3, "trained")
    assert round(float(ppd.expected_latency(40, 20, 128, p)), 3) == 3383.402
    assert round(float(ppd.expected_compute(40, 20, 128, p, 3)), 3) == 11063.402


@pytest.mark.parametrize(
    ("tokens", "of_means", "mean"), [(1, 2.5, 2.5), (4, 3.017, 3.053), (16, 3.2075, 3.2226), (128, 3.270, 3.272)]
)
def test_mean_ratio_is_above_the_ratio_of_means_and_below_equation_5(
    tokens: int, of_means: float, mean: float
) -> None:
    p, digits = rate("squad", 3, "trained"), 4 if tokens == 16 else 3
    ratio = float(ppd.expected_compute(40, 20, tokens, p, 3) / ppd.expected_latency(40, 20, tokens, p))
    exact = float(ppd.expected_units_ratio(40, 20, tokens, p, 3))
    assert (round(ratio, digits), round(exact, digits)) == (of_means, mean)
    assert ratio <= exact + 1e-12
    assert exact < float(ppd.mean_busy_units(p, 3))
    assert (exact - ratio > 1e-6) == (tokens > 1)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.6837, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_equations_3_5_and_6_are_limits_of_theorem_4_1(p: float, k: int) -> None:
    """At a million tokens the exact expressions are within d/l of them."""
    n, d = 10**6, 40
    latency, compute = float(ppd.expected_latency(d, d // 2, n, p)), float(ppd.expected_compute(d, d // 2, n, p, k))
    assert latency / (n * d) == pytest.approx(float(ppd.relative_latency(p)), rel=2e-6)
    assert compute / latency == pytest.approx(float(ppd.mean_busy_units(p, k)), rel=2e-6)
    assert compute / (n * d) == pytest.approx(float(ppd.compute_per_token(p, k)), rel=2e-6)
    assert ppd.mean_busy_units(p, k) == pytest.approx(ppd.compute_per_token(p, k) / ppd.relative_latency(p))


def test_nested_compute_differs_from_theorem_4_1_below_the_half() -> None:
    p, d, exit_at, n, k = 0.23, 40, 10, 64, 3
    theorem = float(ppd.expected_latency(d, exit_at, n, p)) + k * (d - exit_at) * n
    assert round(theorem) == 7885
    assert round(float(ppd.nested_compute(d, exit_at, n, p, k))) == 34512
    assert ppd.nested_waste(d, exit_at, k) == 30 + 3 * 20 + 9 * 10


@pytest.mark.parametrize(("d", "exit_at", "k", "peak"), [(12, 4, 2, 7), (12, 5, 2, 7), (12, 6, 4, 5), (12, 12, 3, 1), (9, 2, 1, 5)])
def test_peak_of_the_nested_tree(d: int, exit_at: int, k: int, peak: int) -> None:
    assert ppd.nested_units(d, exit_at, k) == peak
    assert Parameters(d, exit_at, k, form="nested").units == peak


def test_flat_numbers_and_their_dependence_on_correlation() -> None:
    """A correlation of rho does not change Theorem 4.1's mean, but changes this one, which depends on the order of matches."""
    choice, cost = Parameters(40, 10, 3, form="flat"), UnitCost(40)
    latency = {rho: float(ppd.predict(choice, 128, Markov(0.5, rho), cost).latency) for rho in (-0.5, 0.0, 0.9)}
    assert {rho: round(value) for rho, value in latency.items()} == {-0.5: 3467, 0.0: 3636, 0.9: 3831}
    assert latency[0.0] == pytest.approx(float(ppd.flat_latency(40, 10, 128, 0.5)), rel=1e-12)
    assert ppd.expected_latency(40, 20, 128, 0.5) > latency[0.0]  # at equal rates an earlier exit is faster
    p = 0.5  # by p (1 - p) (d/2 - d') / (1 + p) per token
    gain = float(ppd.flat_latency(40, 20, 10**6, p) - ppd.flat_latency(40, 10, 10**6, p)) / 10**6
    assert gain == pytest.approx(p * (1 - p) * 10 / (1 + p), rel=1e-4)


# --- Exact enumeration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "exit_at", "k"), SMALL)
@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_theorem_4_1_by_enumeration(d: int, exit_at: int, k: int, n: int, p: float) -> None:
    mean, variance, busy, ratio = expect(paths([p] * (n - 1)), lambda m: by_runs(d, exit_at, k, m))
    assert float(ppd.expected_latency(d, exit_at, n, p)) == pytest.approx(mean)
    assert float(ppd.latency_variance(d, exit_at, n, p)) == pytest.approx(variance, abs=1e-9)
    assert float(ppd.expected_compute(d, exit_at, n, p, k)) == pytest.approx(busy)
    assert float(ppd.expected_units_ratio(d, exit_at, n, p, k)) == pytest.approx(ratio)
    runs = sum(chance * (1 + matches.count(False)) for matches, chance in paths([p] * (n - 1)))
    assert float(ppd.expected_runs(n, p)) == pytest.approx(runs)
    values, mass = ppd.latency_pmf(d, exit_at, n, p)
    assert (np.diff(values) > 0).all()
    assert len(values) == (1 if exit_at == d else n)
    for value, chance in zip(values, mass, strict=True):
        assert sum(c for m, c in paths([p] * (n - 1)) if by_runs(d, exit_at, k, m)[0] == value) == pytest.approx(chance)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.6837, 1.0])
@pytest.mark.parametrize(("d", "exit_at"), [(40, 20), (40, 37), (32, 32), (5, 3)])
def test_moments_of_the_pmf_are_mean_and_variance(d: int, exit_at: int, p: float) -> None:
    values, mass = ppd.latency_pmf(d, exit_at, 128, p)
    assert mass.sum() == pytest.approx(1)
    mean = float(mass @ values)
    assert mean == pytest.approx(float(ppd.expected_latency(d, exit_at, 128, p)))
    assert float(mass @ (values - mean) ** 2) == pytest.approx(float(ppd.latency_variance(d, exit_at, 128, p)), abs=1e-6)


@pytest.mark.parametrize(("d", "exit_at", "k"), SMALL + DEEP)
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_flat_and_nested_by_enumeration(d: int, exit_at: int, k: int, n: int, p: float) -> None:
    mean, _, busy, _ = expect(paths([p] * (n - 1)), lambda m: by_gaps(d, exit_at, k, m))
    assert float(ppd.flat_latency(d, exit_at, n, p)) == pytest.approx(mean)
    assert float(ppd.flat_compute(d, exit_at, n, p, k)) == pytest.approx(busy)
    mean, variance, busy, _ = expect(paths([p] * (n - 1)), lambda m: by_tree(d, exit_at, k, m))
    assert float(ppd.expected_latency(d, exit_at, n, p)) == pytest.approx(mean)
    assert float(ppd.latency_variance(d, exit_at, n, p)) == pytest.approx(variance, abs=1e-9)
    assert float(ppd.nested_compute(d, exit_at, n, p, k)) == pytest.approx(busy)


def test_rates_by_position_by_enumeration() -> None:
    rates = [0.1, 0.9, 0.4, 0.5, 0.77]
    for d, exit_at in ((7, 4), (7, 2), (7, 7)):
        mean, variance, *_ = expect(paths(rates[:-1]), lambda m, d=d, e=exit_at: by_runs(d, e, 1, m))
        for last in (0.77, 0.0):  # the last rate has no effect
            got = ppd.position_latency(d, exit_at, [*rates[:-1], last])
            assert (float(got[0]), float(got[1])) == pytest.approx((mean, variance))
    table, _ = published.match_rates_by_position(data_set="squad", layer=20, candidates=3, head="trained", tokens=16)
    assert float(ppd.position_latency(40, 20, table)[0]) == pytest.approx(640 - 20 * table[:-1].sum())


@pytest.mark.parametrize(("p", "rho"), [(0.5, -1.0), (0.5, -0.5), (0.3, 0.0), (0.3, 0.6), (0.3, 1.0), (0.0, 0.5), (1.0, 0.5)])
def test_correlated_matches_by_enumeration(p: float, rho: float) -> None:
    for n in (1, 2, 5, 6):
        mean, variance, *_ = expect(markov_paths(p, rho, n - 1), lambda m: by_runs(7, 4, 1, m))
        got = ppd.markov_latency(7, 4, n, p, rho)
        assert (float(got[0]), float(got[1])) == pytest.approx((mean, variance), abs=1e-9)


LAWS: dict[str, tuple[Law, Callable[[int], Iterator[Path]]]] = {
    "iid": (Iid(0.3), lambda n: paths([0.3] * n)),
    "by position": (ByPosition([0.9, 0.2, 0.5, 0.7, 0.1, 0.6]), lambda n: paths([0.9, 0.2, 0.5, 0.7, 0.1][:n])),
    "markov": (Markov(0.4, -0.3), lambda n: markov_paths(0.4, -0.3, n)),
    "sticky": (Markov(0.4, 1.0), lambda n: markov_paths(0.4, 1.0, n)),
    "replay": (
        Replay([[True, True, True, False, True], [True, False, True, True, False], [False] * 5]),
        lambda n: iter([((True, True, True, False, True)[:n], 1 / 3), ((True, False, True, True, False)[:n], 1 / 3),
                        ((False,) * n, 1 / 3)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", WALKS)
def test_predict_by_enumeration(form: str, law: str) -> None:
    """All laws, forms and depths; nan where the theory has no value."""
    sizes = SMALL + (DEEP if form in ("flat", "nested") else [])
    for (d, exit_at, k), n in itertools.product(sizes, (1, 2, 6)):
        choice = Parameters(d, exit_at, k, form=form)
        got = ppd.predict(choice, n, LAWS[law][0], UnitCost(d))
        mean, variance, busy, ratio = expect(LAWS[law][1](n - 1), lambda m, s=(d, exit_at, k): WALKS[form](*s, m))
        assert float(got.latency) == pytest.approx(mean)
        assert float(got.busy) == pytest.approx(busy)
        three_stages = form == "flat" and 2 * exit_at < d
        assert float(got.latency_variance) == pytest.approx(variance, abs=1e-9)
        if np.isnan(got.units_ratio):
            assert three_stages, "every other ratio is known"
            assert law != "replay"
        else:
            assert float(got.units_ratio) == pytest.approx(ratio)
        assert (float(got.units), float(got.plain_latency)) == (choice.units, d * n)


FIELDS = ("latency", "latency_variance", "busy", "units_ratio", "units", "plain_latency")


def together(choices: Sequence[Parameters], tokens: Sequence[int], laws: Sequence[Law], cost: UnitCost) -> PredictionPoints:
    """All choices at all numbers of tokens under all laws; the laws vary fastest."""
    each = [MethodChoice(choice, count, cost) for choice in choices for count in tokens]
    chosen, law = (index.reshape(-1) for index in np.indices((len(each), len(laws))))
    return PredictionPoints(each, laws, chosen, law)


@pytest.mark.parametrize("cost", [UnitCost(40), UnitCost(40, dispatch=0.5)])
def test_predictions_of_points_equal_single_predictions(cost: UnitCost) -> None:
    """Forms, laws and depths on both sides of the half, in mixed order."""
    grids: dict[str, list[int]] = {"literal": [20, 30, 40], "eager": [20, 40], "flat": [7, 13, 20, 33], "nested": [10, 20, 35]}
    choices = [Parameters(40, exit_at, k, form=form) for form, exits in grids.items() for exit_at in exits for k in (1, 3)]
    choices = [choice for choice in choices if cost.plain or choice.form != "nested"] + [Parameters(40, 20, 3, batched=True)]
    points = together(choices, (1, 2, 9), [Iid(0.0), Iid(0.35), Markov(0.5, 0.2), Iid(1.0)], cost)
    order = np.random.default_rng(1).permutation(points.choice.size)
    many = ppd.predict_points(points.at(order))
    for place, at in enumerate(order.tolist()):
        (choice, count, _), law = points.choices[points.choice[at]], points.laws[points.law[at]]
        one = ppd.predict(choice, count, law, cost)
        for field in FIELDS:
            got, want = getattr(many, field)[place], float(getattr(one, field))
            assert got == pytest.approx(want, nan_ok=True, rel=1e-12), (choice, count, law, field)


def test_closed_forms_equal_enumeration_from_the_half_on() -> None:
    """At the half and above every form except nested is Theorem 4.1, with its variance and mean ratio."""
    exits, p, n = [20, 29, 40], 0.35, 6
    for form in ("literal", "eager", "flat"):
        choices = [Parameters(40, exit_at, 3, form=form) for exit_at in exits]
        many = ppd.predict_points(together(choices, (n,), [Iid(p)], UnitCost(40)))
        for index, exit_at in enumerate(exits):
            mean, variance, busy, ratio = expect(paths([p] * (n - 1)), lambda m, e=exit_at: by_runs(40, e, 3, m))
            got = (many.latency[index], many.latency_variance[index], many.busy[index], many.units_ratio[index])
            assert got == pytest.approx((mean, variance, busy, ratio), abs=1e-9)


def test_values_without_a_closed_form_are_summed_for_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more points they are nan: of nested trees, and sums with more terms than 3 points of 40 tokens."""
    nested, literal = Parameters(12, 4, 2, form="nested"), Parameters(40, 20, 3)
    laws = [Iid(0.1), Iid(0.5), Iid(0.9)]
    monkeypatch.setattr(ppd, "_MOST_TERMS", 119)
    for choice in (nested, literal):
        whole = ppd.predict_points(together([choice], (40,), laws, UnitCost(choice.layers)))
        assert np.isfinite(whole.units_ratio).all()
        with monkeypatch.context() as few:
            few.setattr(ppd, "_MOST_SUMMED", 2)
            less = ppd.predict_points(together([choice], (40,), laws, UnitCost(choice.layers)))
        assert np.isnan(less.units_ratio).all()
        assert less.latency.tolist() == whole.latency.tolist()
    monkeypatch.setattr(ppd, "_MOST_TERMS", 120)
    closed = ppd.predict_points(together([literal], (40,), laws, UnitCost(40)))
    summed = [moments(ppd.stages(literal, UnitCost(40), 40), 40, law)[3] for law in laws]
    assert closed.units_ratio.tolist() == pytest.approx(summed, rel=1e-12)


# --- The distribution of the latency ----------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", WALKS)
def test_distribution_by_enumeration(form: str, law: str) -> None:
    sizes = SMALL + (DEEP if form == "nested" else [])
    for (d, exit_at, k), n in itertools.product(sizes, (1, 2, 6)):
        if exit_at == d:
            continue
        choice, cost = Parameters(d, exit_at, k, form=form), UnitCost(d)
        got = ppd.distribution(choice, n, LAWS[law][0], cost)
        assert got is not None
        outcomes = [(WALKS[form](d, exit_at, k, matches)[0], chance) for matches, chance in LAWS[law][1](n - 1)]
        _same_law(got, outcomes)
        _same_moments(got, choice, n, LAWS[law][0], cost)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("form", ["literal", "eager"])
@pytest.mark.parametrize("promotion", [1.0, 20.0])
def test_distribution_with_overheads_by_enumeration(form: str, law: str, promotion: float) -> None:
    """If a match takes longer than a miss, the values decrease in the number of matches; they are sorted."""
    d, exit_at, k, n = 12, 7, 2, 6
    gaps = {"literal": ppd.literal_gaps, "eager": ppd.eager_gaps}[form]
    given: dict[str, Any] = {"early_head": 0.5, "link": 1.5, "final_head": 0.25, "promotion": promotion}
    miss, match = (float(gap) for gap in gaps(d, exit_at, dispatch=0.125 * k, **given))
    assert (match > miss) == (promotion == 20)
    choice, cost = Parameters(d, exit_at, k, form=form), UnitCost(d, dispatch_per_process=0.125, **given)
    got = ppd.distribution(choice, n, LAWS[law][0], cost)
    assert got is not None
    outcomes = [(miss + sum(match if hit else miss for hit in matches), chance) for matches, chance in LAWS[law][1](n - 1)]
    _same_law(got, outcomes)
    _same_moments(got, choice, n, LAWS[law][0], cost)


def _same_law(got: tuple[NDArray[np.float64], NDArray[np.float64]], outcomes: list[tuple[float, float]]) -> None:
    values, mass = got
    assert values.dtype == mass.dtype == np.float64
    assert (np.diff(values) > 0).all()
    assert mass.sum() == pytest.approx(1)
    for value, chance in zip(values, mass, strict=True):
        assert chance == pytest.approx(sum(c for time, c in outcomes if time == pytest.approx(value)), abs=1e-12)


def _same_moments(
    got: tuple[NDArray[np.float64], NDArray[np.float64]], choice: Parameters, tokens: int, law: Law, cost: UnitCost
) -> None:
    values, mass = got
    said, mean = ppd.predict(choice, tokens, law, cost), float(mass @ values)
    assert mean == pytest.approx(float(said.latency))
    assert float(mass @ (values - mean) ** 2) == pytest.approx(float(said.latency_variance), abs=1e-9)


def test_distribution_is_latency_pmf_without_overheads() -> None:
    for (d, exit_at), form in itertools.product([(40, 20), (40, 37), (5, 3)], WALKS):
        got = ppd.distribution(Parameters(d, exit_at, 3, form=form), 128, Iid(0.6837), UnitCost(d))
        assert got is not None
        for ours, theirs in zip(got, ppd.latency_pmf(d, exit_at, 128, 0.6837), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-15)


def test_no_distribution_if_the_order_of_matches_matters() -> None:
    for law, _ in LAWS.values():
        assert ppd.distribution(Parameters(9, 4, 2, form="flat"), 5, law, UnitCost(9)) is None
    assert ppd.distribution(Parameters(8, 4, 2, form="flat"), 5, Iid(0.5), UnitCost(8)) is not None


# --- Shapes -----------------------------------------------------------------------------------------------------------


def test_everything_broadcasts() -> None:
    d, exit_at, n, p, k = 40, np.array([20, 30])[:, None, None], np.array([1, 16, 128])[:, None], np.array([0.0, 0.2, 0.9, 1.0]), 3
    full = (2, 3, 4)
    for value in (
        ppd.expected_latency(d, exit_at, n, p),
        ppd.expected_compute(d, exit_at, n, p, k),
        ppd.latency_variance(d, exit_at, n, p),
        ppd.expected_units_ratio(d, exit_at, n, p, k),
        ppd.nested_compute(d, exit_at, n, p, k),
        ppd.flat_latency(d, exit_at - 15, n, p),
        ppd.flat_compute(d, exit_at - 15, n, p, k),
        *ppd.markov_latency(d, exit_at, n, p, 0.1),
        *ppd.position_latency(d, exit_at, np.full((2, 3, 4, 7), 0.5)),
    ):
        assert value.shape == full
        assert value.dtype == np.float64
    mean, variance = ppd.position_latency(d, exit_at, np.full((2, 3, 4, 7), 0.5))
    assert (mean == ppd.expected_latency(d, exit_at, np.full((3, 4), 7), 0.5)).all()
    assert (variance == ppd.latency_variance(d, exit_at, np.full((3, 4), 7), 0.5)).all()
    assert ppd.expected_latency(40, 20, 16, 0.5).shape == ()
    assert isinstance(ppd.expected_latency(40, 20, 16, 0.5), np.ndarray)  # an array also for a single point, as annotated
    assert ppd.expected_latency([40, 32], 20, 16, 0.5).shape == (2,)
    assert ppd.expected_latency(40, 20, [1, 2, 3], 0.5).shape == (3,)
    assert ppd.expected_runs([[1], [2]], [0.1, 0.2]).shape == (2, 2)
    assert ppd.mean_busy_units([0.1, 0.2], [[1], [2], [3]]).shape == (3, 2)
    assert ppd.compute_per_token([0.1, 0.2], [[1], [2], [3]]).shape == (3, 2)
    assert ppd.nested_waste([40, 30], 10, [[1], [2]]).shape == (2, 2)
    assert ppd.nested_units([40, 30], 10, [[1], [2]]).tolist() == [[4, 3], [15, 7]]
    assert ppd.nested_waste([40, 30], [[10], [20]], 2).tolist() == [[30 + 2 * 20 + 4 * 10, 20 + 2 * 10], [20, 10]]


def test_arrays_give_the_values_of_their_elements() -> None:
    rng = np.random.default_rng(5)
    exit_at, n, p, k = rng.integers(20, 41, 50), rng.integers(1, 60, 50), rng.random(50), rng.integers(1, 5, 50)
    functions: list[tuple[Callable[..., Any], bool]] = [
        (ppd.expected_latency, False), (ppd.latency_variance, False), (ppd.flat_latency, False), (ppd.expected_compute, True),
        (ppd.expected_units_ratio, True), (ppd.nested_compute, True), (ppd.flat_compute, True)]  # fmt: skip
    for function, with_candidates in functions:
        more = (k,) if with_candidates else ()
        many = function(40, exit_at, n, p, *more)
        one = [float(function(40, *(values[i] for values in (exit_at, n, p, *more)))) for i in range(50)]
        assert many.tolist() == pytest.approx(one)


# --- Overheads ----------------------------------------------------------------------------------------------------------


def test_literal_and_eager_differ_if_heads_take_time() -> None:
    """d = 32, d' = 24, heads of 2.41 layers (Llama-3-8B): 128 tokens at p = .6065 take 4097 literally and 3911 eagerly."""
    heads = {"early_head": 2.41, "final_head": 2.41}
    literal, eager = ppd.literal_gaps(32, 24, **heads), ppd.eager_gaps(32, 24, **heads)
    assert [float(gap) for gap in literal] == pytest.approx([36.82, 28.82])  # x = d - d'
    assert [float(gap) for gap in eager] == pytest.approx([36.82, 26.41])  # x = d - d' + e_f
    assert round(float(ppd.latency_of_gaps(*literal, 128, 0.6065))) == 4097
    assert round(float(ppd.latency_of_gaps(*eager, 128, 0.6065))) == 3911


def test_gaps_contain_every_overhead() -> None:
    """Powers of two identify the summands: after a miss d + e + s + max(e_f, b), or without the barrier e_f alone."""
    names = {"early_head": 1 / 2, "dispatch": 1 / 4, "link": 1 / 8, "final_head": 1 / 16, "promotion": 1 / 32}
    miss, match = ppd.literal_gaps(8, 5, **names)
    assert (float(miss), float(match)) == (8 + 1 / 2 + 1 / 4 + 1 / 8, 5 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 32)
    miss, match = ppd.eager_gaps(8, 5, **names)
    assert (float(miss), float(match)) == (8 + 1 / 2 + 1 / 4 + 1 / 16, 8 + 3 / 4 + 1 / 16 - (3 + 1 / 16 - 1 / 8) + 1 / 32)
    assert float(ppd.eager_gaps(8, 4, final_head=3)[1]) == 11 - 4  # not beyond the exit layer
    assert float(ppd.eager_gaps(8, 4, link=6)[1]) == 8 + 2  # waits for a process that has not started
    for gaps in (ppd.literal_gaps(8, 5), ppd.eager_gaps(8, 5)):
        assert [float(gap) for gap in gaps] == [8, 5]
        assert float(ppd.latency_of_gaps(*gaps, 16, 0.3)) == pytest.approx(float(ppd.expected_latency(8, 5, 16, 0.3)))


@pytest.mark.parametrize("overhead", ["early_head", "dispatch", "link", "final_head", "promotion"])
def test_gaps_refuse_negative_overheads_by_name(overhead: str) -> None:
    for gaps in (ppd.literal_gaps, ppd.eager_gaps):
        with pytest.raises(ParameterError, match=rf"{overhead}\[1\] must be at least 0, got -1"):
            gaps(8, 5, **{overhead: [0.0, -1.0]})
        assert gaps(8, 5, **{overhead: [0.0, 1.0]})[0].shape in ((), (2,))


# --- Stages -------------------------------------------------------------------------------------------------------------

EXTRAS: list[dict[str, Any]] = [
    {},
    {"early_head": 0.5, "final_head": 0.25, "dispatch": 0.125, "dispatch_per_process": 1 / 16, "link": 1.5, "promotion": 0.75},
    {"early_head": 1.0, "final_head": 3.0, "dispatch_per_process": 0.5, "dispatch_law": "tree", "link": 0.25},
    {"final_head": 5.0, "link": 0.5, "promotion": 1.0},
    {"link": 9.0, "early_head": 0.5},
    {"layer_times": (1.0, 0.5, 2.0, 1.5, 0.25, 3.0, 1.0, 0.75), "link": 0.5, "final_head": 0.5},
]


@pytest.mark.parametrize(("form", "exit_at", "extra"), [
    (form, exit_at, extra)
    for form in ("literal", "eager", "flat", "nested", "literal batched", "eager batched", "flat batched")
    for exit_at in (1, 3, 4, 6, 8)
    for extra in range(len(EXTRAS))
    # Literal and eager processes exit in the upper half; a nested one after more than one layer and without overheads.
    if not (form.partition(" ")[0] in ("literal", "eager") and exit_at < 4) and not (form == "nested" and (extra or exit_at == 1))
])  # fmt: skip
def test_stages_take_the_simulated_time(form: str, exit_at: int, extra: int) -> None:
    """Two computations of the same quantity, for every sequence of matches of four tokens."""
    form, _, batched = form.partition(" ")
    choice = Parameters(8, exit_at, 3, form=form, batched=bool(batched))
    curve = ((1, 2.0), (3, 2.5)) if batched and extra % 2 else None
    cost = UnitCost(8, **EXTRAS[extra], verify_cost=curve)
    outcomes = np.array(list(itertools.product((False, True), repeat=4)))
    time, busy = sums(ppd.stages(choice, cost, 4), [outcomes[:, :2].T, outcomes[:, 2:3].T], 4, len(outcomes))
    for index, matches in enumerate(outcomes):
        run = simulate(decode(choice, [0], 4), 4, Cluster(choice.units), cost, World(1, 8, matches.tolist()))
        assert (run.latency, run.busy) == pytest.approx((time[index], busy[index])), matches
        assert run.peak_units <= choice.units


@pytest.mark.parametrize("form", ["literal", "eager"])
def test_stages_equal_the_gaps(form: str) -> None:
    """Gaps count layer-times as stages do; random overheads."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        d = int(rng.integers(1, 50))
        exit_at, k = int(rng.integers(-(-d // 2), d)) if d > 1 else 1, int(rng.integers(1, 6))
        e, s, b, f, m = rng.exponential(3, 5) * (rng.random(5) < 0.7)
        if exit_at == d:
            e = f  # at the last layer the early head is the final head
        steps = ppd.stages(
            Parameters(d, exit_at, k, form=form),
            UnitCost(d, early_head=e, dispatch_per_process=s / k, link=b, final_head=f, promotion=m),
            4,
        )
        gaps = {"literal": ppd.literal_gaps, "eager": ppd.eager_gaps}[form]
        miss, match = gaps(d, exit_at, early_head=e, dispatch=s, link=b, final_head=f, promotion=m)
        assert [step.time for step in steps] == pytest.approx([float(miss), float(match)])
        assert [step.on_match for step in steps] == [1, 1]


@pytest.mark.parametrize("form", ["literal", "eager", "flat"])
def test_batched_candidates_are_one_process_of_multi_token_passes(form: str) -> None:
    """At any price of a multi-token pass formula and enumeration agree; if it costs nothing more, (3 - p)/(2 - p) units."""
    curve = ((1, 1.0), (2, 1.5), (4, 1.75))
    for k, p, cost in itertools.product((1, 2, 4), (0.0, 0.3, 1.0), (UnitCost(8), UnitCost(8, verify_cost=curve))):
        choice, n = Parameters(8, 5, k, form=form, batched=True), 4
        found = ppd.predict(choice, n, Iid(p), cost)
        time = busy = 0.0
        for matches in itertools.product((False, True), repeat=n):
            chance = math.prod(p if match else 1 - p for match in matches)
            run = simulate(decode(choice, [0], n), n, Cluster(2), cost, World(1, 8, list(matches)))
            time, busy = time + chance * run.latency, busy + chance * run.busy
        assert (float(found.latency), float(found.busy), float(found.units)) == pytest.approx((time, busy, 2))
    many = ppd.predict(Parameters(40, 20, 7, form=form, batched=True), 10**6, Iid(0.6), UnitCost(40))
    assert float(many.busy / many.latency) == pytest.approx((3 - 0.6) / (2 - 0.6), rel=1e-5)


def test_predictions_of_points_with_batched_candidates() -> None:
    """There may be far more candidates than units."""
    many = ppd.predict_points(together([Parameters(8, 5, k, batched=True) for k in (1, 2, 7)], (6,), [Iid(0.4)], UnitCost(8)))
    one = ppd.predict(Parameters(8, 5, 1), 6, Iid(0.4), UnitCost(8))
    for field in ("latency", "latency_variance", "busy", "units_ratio", "units"):
        assert np.broadcast_to(getattr(many, field), 3) == pytest.approx(float(getattr(one, field))), field


def test_all_matches_lead_to_one_stage_if_two_suffice() -> None:
    """With two stages every match leads to the second: the time depends on the number of matches only."""
    for form, exit_at in (("literal", 5), ("eager", 5), ("nested", 2), ("nested", 5), ("flat", 5), ("flat", 4)):
        assert [stage.on_match for stage in ppd.stages(Parameters(8, exit_at, 3, form=form), UnitCost(8), 4)] == [1, 1]
    assert [stage.on_match for stage in ppd.stages(Parameters(8, 3, 3, form="flat"), UnitCost(8), 4)] == [1, 2, 1]


def test_plain_time_with_heads_and_uneven_layers() -> None:
    cost = UnitCost(4, layer_times=(1.0, 2.0, 0.5, 0.25), final_head=0.125, early_head=7.0)
    got = ppd.predict(Parameters(4, 2, 1), 3, Iid(0.5), cost)
    assert float(got.plain_latency) == 3 * 3.875
    assert float(got.units) == 2


# --- Errors -------------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"layers": 40, "exit_layer": 20, "tokens": 16, "match_rate": 0.5, "candidates": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be at least 1, got 0"),
        ({"exit_layer": 41}, "exit_layer must be between 1 and layers=40, got 41"),
        ({"exit_layer": 20.5}, "exit_layer must be a whole number, got 20.5"),
        ({"exit_layer": [20, 30, 0]}, r"exit_layer\[2\] must be at least 1, got 0"),
        ({"exit_layer": [[20], [45]], "layers": [40, 50]}, "exit_layer must be between 1 and layers=40, got 45"),
        ({"exit_layer": [40, 45, 47]}, "exit_layer must be between 1 and layers=40, got 45"),
        ({"exit_layer": [20, 19, 18]}, "at least layers/2=20 for Theorem 4.1's compute, got 19;"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"match_rate": 1.5}, "match_rate must be between 0 and 1, got 1.5"),
        ({"match_rate": -0.1}, "match_rate must be between 0 and 1, got -0.1"),
        ({"match_rate": float("nan")}, "match_rate must be between 0 and 1, got nan"),
        ({"match_rate": [[0.5, 0.5], [0.5, 7.0]]}, r"match_rate\[1, 1\] must be between 0 and 1, got 7.0"),
        ({"match_rate": "often"}, "match_rate must be numbers, got 'often'"),
        ({"candidates": 0}, "candidates must be at least 1, got 0"),
        ({"candidates": [1, 1, 0, -1]}, r"candidates\[2\] must be at least 1, got 0"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"tokens": [3, 0]}, r"tokens\[1\] must be at least 1, got 0"),
        ({"tokens": 2.5}, "tokens must be a whole number, got 2.5"),
        ({"tokens": [1, float("inf")]}, r"tokens\[1\] must be at least 1, got inf"),
        ({"exit_layer": 19}, r"at least layers/2=20 for Theorem 4.1's compute, got 19.*nested \(.*flat \("),
        ({"exit_layer": [20, 4], "layers": [40, 9]}, r"at least layers/2=4.5 for Theorem 4.1's compute, got 4;"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_bound(change: dict[str, Any], message: str) -> None:
    functions = [ppd.expected_compute, ppd.expected_units_ratio]
    if "layers/2" not in message:
        functions += [ppd.nested_compute, ppd.flat_compute]
    for function in functions:
        with pytest.raises(ParameterError, match=message):
            function(**(GOOD | change))
    wanted = GOOD | change
    if "candidates" in change or "layers/2" in message:
        return
    del wanted["candidates"]
    for latency in (ppd.expected_latency, ppd.latency_variance, ppd.flat_latency):
        with pytest.raises(ParameterError, match=message):
            latency(**wanted)
    if set(change) == {"match_rate"}:
        for of_rate in (lambda p: ppd.mean_busy_units(p, 1), lambda p: ppd.compute_per_token(p, 1), ppd.relative_latency,
                        lambda p: ppd.expected_runs(5, p), lambda p: ppd.latency_of_gaps(40, 20, 5, p)):  # fmt: skip
            with pytest.raises(ParameterError, match=message):
                of_rate(change["match_rate"])


@pytest.mark.parametrize("rates", [0.5, [], [[], []], np.empty((1, 3, 0))])
def test_rates_by_position_need_a_position(rates: Any) -> None:
    with pytest.raises(ParameterError, match="match_rates must be a list with a rate for each token, got"):
        ppd.position_latency(40, 20, rates)


@pytest.mark.parametrize("form", WALKS)
def test_cost_must_have_the_layers_of_the_parameters(form: str) -> None:
    for layers in (7, 9):
        for ask in (
            lambda choice, cost: ppd.stages(choice, cost, 4),
            lambda choice, cost: ppd.distribution(choice, 4, Iid(0.5), cost),
        ):
            with pytest.raises(ParameterError, match=f"cost must be that of a model of layers=8, got one of {layers}"):
                ask(Parameters(8, 5, 2, form=form), UnitCost(layers))


def test_candidates_and_tokens_are_checked_everywhere() -> None:
    for of_candidates in (lambda k: ppd.mean_busy_units(0.5, k), lambda k: ppd.compute_per_token(0.5, k),
                          lambda k: ppd.nested_units(4, 2, k), lambda k: ppd.nested_waste(4, 2, k)):  # fmt: skip
        with pytest.raises(ParameterError, match="candidates must be at least 1, got 0"):
            of_candidates(0)
    for of_tokens in (lambda n: ppd.expected_runs(n, 0.5), lambda n: ppd.latency_of_gaps(2, 1, n, 0.5)):
        with pytest.raises(ParameterError, match="tokens must be at least 1, got 0"):
            of_tokens(0)
    with pytest.raises(ParameterError, match=r"match_rates\[1\] must be between 0 and 1, got 2.0"):
        ppd.position_latency(40, 20, [0.5, 2.0])
    with pytest.raises(ParameterError, match=r"after_miss\[1\] must be a finite number, got nan"):
        ppd.latency_of_gaps([1, np.nan], 1, 5, 0.5)
    with pytest.raises(ParameterError, match="after_match must be a finite number, got nan"):
        ppd.latency_of_gaps(1, np.nan, 5, 0.5)
    # A slow link makes gaps negative; the caller checks their bounds.
    assert np.isfinite(ppd.latency_of_gaps(-1.0, -2.0, 5, 0.5))
    for law in (Iid(0.5), Markov(0.5, 0.1)):
        with pytest.raises(ParameterError, match="tokens must be at least 1, got 0"):
            ppd.predict(Parameters(4, 2, 1), 0, law, UnitCost(4))


def test_barrier_and_eager_gaps_refuse_the_lower_half() -> None:
    for gaps, what in ((ppd.literal_gaps, "the barrier of Algorithm 2"), (ppd.eager_gaps, "the eager timeline")):
        with pytest.raises(ParameterError, match=f"exit_layer must be at least layers/2=4.5 for {what}, got 4"):
            gaps(9, 4)
        assert float(gaps(9, 5)[0]) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "layers must be between 1 and 10000, got 0"),
        ((10_001, 10_001, 1), "layers must be between 1 and 10000, got 10001"),
        ((4, 0, 1), "exit_layer must be between 1 and layers=4, got 0"),
        ((4, 5, 1), "exit_layer must be between 1 and layers=4, got 5"),
        ((4, 2.0, 1), "exit_layer must be a whole number, got 2.0"),
        ((4, 2, 0), "candidates must be between 1 and 1000, got 0"),
        ((4, 2, 1001), "candidates must be between 1 and 1000, got 1001"),
        ((9, 4, 2, "nested", False, True), "batched must be false in the nested form, .*, got true; choose form='flat'"),
        ((4, 2, 1, "litteral"), "unknown form 'litteral'; did you mean literal"),
        ((9, 4, 1), "exit_layer must be at least layers/2=4.5 in the literal form, got 4;.*form='nested'.*form='flat'"),
        ((9, 4, 1, "eager"), "exit_layer must be at least layers/2=4.5 in the eager form, got 4"),
        ((17, 1, 2, "nested"), "nested needs 131071 units for candidates=2 and exit_layer=1 of layers=17, more than 100000"),
    ],
)  # fmt: skip
def test_parameters_check_themselves(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Parameters(*arguments)


def test_parameters_at_their_bounds() -> None:
    assert Parameters(10_000, 10_000, 1000).units == 1001
    assert Parameters(1, 1, 1).form == "literal"
    assert Parameters(4, 2, 1, "eager").units == 2
    assert Parameters(9, 1, 1, "flat").units == 2
    assert Parameters(16, 1, 2, "nested").units == 2**16 - 1
    assert Parameters.OUTCOMES == ("match",)
    assert Parameters.EXACT is True


@pytest.mark.parametrize("form", WALKS)
@pytest.mark.parametrize("prompt", [[7], [5, 6, 7]])
def test_candidates_are_read_after_the_last_position_of_a_pass(form: str, prompt: list[int]) -> None:
    """The early prediction comes from the exit layer's head at the last position of a pass, with k candidates."""
    process = declining(decode(Parameters(8, 5, 3, form=form), prompt, 2))
    step = next(process)
    while isinstance(step, Forward):
        step = process.send(step)
    assert isinstance(step, Read)
    assert (step.kind, step.offset, step.width) == ("top", -1, 3)
    assert isinstance(step.output, Forward)
    assert (step.output.tokens, step.output.at, step.output.layers.last) == ((7,), len(prompt) - 1, 5)


def test_largest_number_of_units_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (7, 6):
        monkeypatch.setattr(checks, "MAX_UNITS", most)
        if most == 7:
            assert Parameters(12, 4, 2, "nested").units == 7
    with pytest.raises(ParameterError, match=r"nested needs 7 units .* more than 6; take fewer candidates or a later exit_layer"):
        Parameters(12, 4, 2, "nested")


def test_far_too_many_units_are_refused() -> None:
    with pytest.raises(ParameterError, match="take fewer candidates or a later exit_layer"):
        Parameters(2000, 1, 1000, "nested")


def test_nested_form_with_overheads_has_no_stages() -> None:
    with pytest.raises(ParameterError, match=r"form 'nested' has no closed form with overheads .*\['events'\]"):
        ppd.predict(Parameters(8, 3, 2, form="nested"), 4, Iid(0.5), UnitCost(8, link=1.0))


def test_overflowing_trees_are_refused_without_a_warning() -> None:
    for function in (ppd.nested_units, ppd.nested_waste):
        for layers, exit_layer in ((10_000, 1), ([10_000, 8], [1, 4])):  # all points, and one of several
            with pytest.raises(ParameterError, match=r"nested needs up to .* units, more than 100000; take fewer candidates"):
                function(layers, exit_layer, 1000)


def test_nested_units_up_to_the_limit_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_UNITS", 7)
    assert ppd.nested_units(12, 4, 2) == 7


def test_deep_trees_and_wide_trees_in_one_array_do_not_overflow() -> None:
    """One sub-process per generation for 700 generations, and 300 for two: powers of both together would overflow."""
    together = ppd.nested_waste([700, 700], [1, 350], [1, 300])
    assert together.tolist() == [sum(range(1, 700)), 350.0]


def test_only_nested_trees_may_grow_beyond_their_units() -> None:
    assert [Parameters(8, 4, 2, form).bounded for form in ("literal", "eager", "flat", "nested")] == [True, True, True, False]


@pytest.mark.parametrize("batched", [False, True])
def test_work_under_many_laws_is_that_of_each(batched: bool) -> None:
    parameters = Parameters(8, 5, 2, batched=batched)
    laws = [Iid(0.0), Iid(0.7), ByPosition([0.1, 0.9, 0.4, 0.6, 0.2, 0.3, 0.8])]
    assert_work_of_each(ppd, (parameters, 7), laws, rtol=1e-13)
