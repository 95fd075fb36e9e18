"""Choice of the draft length: laws of speed-ups, ties, intervals, the switch-off batch and break-even values."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.advice import acceptance_draws
from model.advice.acceptance_draws import DRAWS, AcceptanceDraws
from model.advice.draft_choice import POINTS_PER_DOUBLING, DraftChoice, break_even, influences, switch_off
from model.base.checks import ParameterError
from model.engines import law_fit, step_law
from model.engines.cells import Cells
from model.engines.kernel_times import KernelSource
from model.engines.step_law import EXTRAPOLATION, StepLaw
from model.hardware import memory_limit
from model.logs.acceptance_record import AcceptanceRecord, with_intervals

LENGTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (1.0, 4.0, 16.0, 64.0, 256.0)


def law(spread: float = 0.0, noise: float = 1e-6, **changed: float) -> StepLaw:
    """Law without kernels with known coefficients; each is uncertain by the relative standard deviation `spread`."""
    point = {
        "weights": 0.01,
        "ridge_tokens": 200.0,
        "step": 1e-3,
        "sequence": 2e-5,
        "token": 1e-5,
        "draft_pass": 6e-4,
        "round": 2e-4,
    }
    point |= changed
    random = np.random.Generator(np.random.Philox(5))
    draws = {name: value * np.exp(spread * random.standard_normal(DRAWS)) for name, value in point.items()}
    return StepLaw("known", "step_ms", point, draws | {"noise": np.full(DRAWS, noise)})


def choice(acceptance: AcceptanceDraws | None = None, of: StepLaw | None = None, **changed: object) -> DraftChoice:
    made = DraftChoice(of or law(), acceptance or acceptance_draws.constant(0.7), BATCHES, LENGTHS)
    return dataclasses.replace(made, **changed)


costs = st.fixed_dictionaries({
    "weights": st.floats(1e-3, 0.1), "ridge_tokens": st.floats(50, 500), "step": st.floats(1e-5, 5e-3),
    "sequence": st.floats(1e-7, 1e-4), "token": st.floats(1e-7, 1e-4), "draft_pass": st.floats(1e-5, 5e-3),
    "round": st.floats(1e-6, 1e-3),
})  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(costs, st.floats(0.05, 0.98))
def test_speedup_is_length_over_relative_step_and_the_known_law_has_no_doubt(of: dict[str, float], rate: float) -> None:
    found = choice(acceptance_draws.constant(rate), law(**of))
    number, width = np.array(BATCHES)[:, None], np.array(LENGTHS) + 1
    tokens = number * width
    step = np.cbrt(of["weights"] ** 3 * (1 + (tokens / of["ridge_tokens"]) ** 3)) + of["step"] + of["sequence"] * number
    step = step + of["token"] * tokens + (width - 1) * of["draft_pass"] + of["round"] * (width > 1)
    length = (1 - rate**width) / (1 - rate)
    expected = length * step[:, :1] / step
    np.testing.assert_allclose(found.speedups, expected, rtol=1e-9)
    np.testing.assert_allclose(found.throughput, number * length / step, rtol=1e-9)
    assert (found.best == expected.argmax(axis=1)).all()
    for ends in found.interval:
        np.testing.assert_allclose(ends, expected, rtol=1e-4)
    assert np.allclose(found.probabilities.max(axis=1), 1)


@pytest.mark.parametrize("unit", ["tpot_ms", "output_tokens_per_s"])
def test_time_per_token_is_what_the_law_predicts_in_its_unit(unit: str) -> None:
    of = dataclasses.replace(law(spread=0.1, prompt=4e-5), unit=unit)
    made = choice(of=of)
    lengths = np.tile(made.lengths[0], len(BATCHES))
    cells = dataclasses.replace(made.cells, mean_acceptance_length=lengths)
    predicted = of.predict(cells).values.reshape(len(BATCHES), -1)
    expected = predicted / 1e3 if unit == "tpot_ms" else np.array(BATCHES)[:, None] / predicted
    np.testing.assert_allclose(made.tpot_seconds, expected, rtol=1e-9)
    drawn = of.draws_of(cells).reshape(DRAWS, len(BATCHES), -1)
    ratio = drawn[:, :, :1] / drawn if unit == "tpot_ms" else drawn / drawn[:, :, :1]
    np.testing.assert_allclose(made.draws, ratio, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(costs, st.floats(0.05, 0.95), st.sampled_from(BATCHES), st.sampled_from(["step_ms", "tpot_ms"]))
def test_break_even_values_make_the_best_draft_as_fast_as_plain_decoding(
    of: dict[str, float], rate: float, batch: float, unit: str
) -> None:
    of = of if unit == "step_ms" else of | {"prompt": of["sequence"]}
    found = break_even(choice(acceptance_draws.constant(rate), dataclasses.replace(law(**of), unit=unit)), batch)

    def best(acceptance: float, **changed: float) -> float:
        in_unit = dataclasses.replace(law(**(of | changed)), unit=unit)
        at = choice(acceptance_draws.constant(acceptance), in_unit, batches=(batch,))
        return float(at.speedups[0, 1:].max())

    if found.acceptance is None:
        assert best(1 - 1e-6) < 1
    else:
        assert best(found.acceptance) == pytest.approx(1, rel=1e-5)
    if found.draft_pass_seconds is None:
        assert best(rate, draft_pass=1e-12) < 1 + 1e-6
    else:
        assert best(rate, draft_pass=found.draft_pass_seconds) == pytest.approx(1, rel=1e-5)
        assert (found.draft_pass_seconds > of["draft_pass"]) == (best(rate) > 1)


@settings(max_examples=20, deadline=None)
@given(costs, st.floats(0.1, 0.9))
def test_switch_off_batch_is_the_last_crossing(of: dict[str, float], rate: float) -> None:
    made = choice(acceptance_draws.constant(rate), law(**of))
    found = switch_off(made, 2048)

    def best(batch: float) -> float:
        return float(dataclasses.replace(made, batches=(batch,)).speedups[0, 1:].max())

    if found.batch is None:
        assert best(2048) > 1
        assert found.high is None
    elif found.batch == 1:
        assert max(best(batch) for batch in (1, 8, 64, 512, 2048)) <= 1.02
    else:
        assert best(found.batch) == pytest.approx(1, abs=0.01)
        assert best(2048) <= 1
        # A known law leaves no doubt beyond its resolution.
        assert found.low == pytest.approx(found.batch)
        assert found.high == pytest.approx(found.batch)


def test_bounds_of_the_switch_off_batch_are_where_the_interval_leaves_one() -> None:
    made = choice(acceptance_draws.constant(0.6), law(spread=0.05, noise=0.02))
    found = switch_off(made, 2048)
    assert found.pays_until is not None
    assert found.costs_from is not None
    assert found.batch is not None
    assert found.pays_until < found.batch < found.costs_from
    step = 2 ** (1 / POINTS_PER_DOUBLING)

    def ends(batch: float) -> tuple[float, float]:
        at = dataclasses.replace(made, batches=(batch,))
        column = 1 + int(at.losses[0, 1:].argmin())
        low, high = at.interval
        return float(low[0, column]), float(high[0, column])

    assert ends(found.pays_until)[0] > 1 >= ends(found.pays_until * step)[0]
    assert ends(found.costs_from)[1] < 1 <= ends(found.costs_from / step)[1]


def test_speedup_over_plain_decoding_beyond_the_cells_is_less_sure() -> None:
    def width(shortest: float) -> float:
        cells = Cells.of("step_ms", [1, 8, 64, 256], [shortest, 8, 8, 8], [10.0, 12, 14, 16])
        low, high = choice(of=dataclasses.replace(law(), cells=cells)).interval
        return float(np.log(high[1, -1] / low[1, -1]))

    assert width(0) < 0.01
    assert width(3) == pytest.approx(2 * 2 * EXTRAPOLATION * 1.53, rel=0.1)  # two doublings; 1.53: Student's t at 90 %


def test_more_acceptance_never_slows_and_a_slower_draft_never_helps() -> None:
    slow, fast = (choice(acceptance_draws.constant(rate)).speedups for rate in (0.6, 0.7))
    assert (fast[:, 1:] > slow[:, 1:]).all()
    slower = choice(of=law(draft_pass=8e-4)).speedups
    assert (slower[:, 1:] < fast[:, 1:]).all()
    assert (slower[:, 0] == 1).all()


def test_what_is_unknown_widens_intervals_and_makes_ties() -> None:
    sure, unsure = choice(), choice(of=law(spread=0.2, noise=0.02))
    width = [np.log(each.interval[1] / each.interval[0])[:, 1:] for each in (sure, unsure)]
    assert (width[1] > width[0] + 0.02).all()
    assert unsure.ties.sum() > sure.ties.sum()
    ranged = choice(acceptance_draws.constant(0.6, 0.8))
    low, high = ranged.interval
    for end, side in ((0.62, low), (0.78, high)):
        np.testing.assert_allclose(side[:, 1:], choice(acceptance_draws.constant(end)).speedups[:, 1:], rtol=2e-3)
    rows = np.arange(len(BATCHES))
    for each in (sure, unsure, ranged):
        assert not each.ties[rows, each.best].any()
        assert (each.losses >= 0).all()


def test_interval_covers_engines_drawn_from_the_law() -> None:
    """The law's own draws are engines: 80 % of their speed-ups lie in the interval (with 256 draws within 3 standard errors)."""
    made = choice(of=law(spread=0.15, noise=1e-6))
    low, high = made.interval
    inside = ((made.draws >= low) & (made.draws <= high))[:, :, 1:].mean(axis=0)
    assert (np.abs(inside - 0.8) < 3 * np.sqrt(0.16 / DRAWS)).all()


def test_largest_influence_is_the_input_that_is_least_known() -> None:
    sure = law()
    draws = dict(sure.draws) | {"draft_pass": sure.draws["draft_pass"] * np.exp(np.linspace(-1, 1, DRAWS))}
    made = choice(of=dataclasses.replace(sure, draws=draws))
    found = influences(made, 4)
    assert found[0].name == "draft_pass"
    assert found[0].low > found[0].high  # a slower pass, a smaller speed-up
    wide = influences(choice(acceptance_draws.constant(0.4, 0.9)), 4)
    assert [each.name for each in wide] == ["acceptance"]
    assert wide[0].high > wide[0].low


def test_parallel_drafts_take_one_pass() -> None:
    chain, parallel = choice(), choice(draft_passes=1)
    assert np.allclose(chain.speedups[:, 1], parallel.speedups[:, 1])
    saved = chain.steps[0][:, 3] - parallel.steps[0][:, 3]
    np.testing.assert_allclose(saved, 2 * 6e-4, rtol=1e-9)


def test_choices_without_drafts_or_too_many_are_refused() -> None:
    for changed, message in (
        ({"draft_lengths": (0,)}, "one draft length above 0"), ({"batches": ()}, "one number of sequences"),
        ({"batches": tuple(range(1, 1000))}, "at most 4096 choices"), ({"batches": (0.5,)}, "batch must be"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            choice(**changed)


# --- Acceptance ---


@given(st.floats(0, 1), st.integers(1, 12))
def test_constant_rate_gives_the_geometric_sum(rate: float, length: int) -> None:
    point, draws = acceptance_draws.constant(rate).lengths([0, length])
    assert point[0] == 1
    assert point[1] == pytest.approx(sum(rate**power for power in range(length + 1)))
    np.testing.assert_allclose(draws, np.broadcast_to(point, draws.shape))


def record(drafts: int | None, survival: tuple[float, ...] | None, **more: object) -> AcceptanceRecord:
    made = AcceptanceRecord("vllm", ("v1",), (), drafts=drafts, survival=survival, **more)  # type: ignore[arg-type]
    return made if survival is None else with_intervals(made)


def test_record_gives_rates_by_position_with_the_error_of_its_counts() -> None:
    few, many = (acceptance_draws.of_record(record(count, (0.8, 0.6, 0.3)), "log") for count in (50, 5000))
    np.testing.assert_allclose(few.point, (0.8, 0.75, 0.5))
    assert few.limit == 3
    for found, count in ((few, 50), (many, 5000)):
        expected = np.sqrt(few.point * (1 - few.point) / (count * np.array([1, 0.8, 0.6])))
        np.testing.assert_allclose(found.draws.std(axis=0), expected, rtol=0.2)
    with pytest.raises(ParameterError, match="draft_length must be at most 3, for which log has acceptance, got 4"):
        few.lengths([0, 4])


def test_mean_length_alone_gives_the_constant_rate_that_has_it() -> None:
    found = acceptance_draws.of_record(record(1000, None, draft_length=3, mean_acceptance_length=2.5), "log")
    assert found.lengths([3])[0][0] == pytest.approx(2.5, abs=1e-6)
    assert found.limit is None
    assert 0.02 < found.lengths([3])[1].std() < 0.08
    with pytest.raises(ParameterError, match="neither acceptance by draft position"):
        acceptance_draws.of_record(record(1000, None, mean_acceptance_length=2.5), "log")


def test_law_says_its_acceptance_if_it_has_measured_any() -> None:
    found = acceptance_draws.of_law(step_law.load("vllm-llama-3.1-8b-eagle3-h100"))
    assert found is not None
    assert found.point[0] == pytest.approx(0.77, abs=0.01)
    assert acceptance_draws.of_law(prior()) is None
    given = acceptance_draws.of_law(dataclasses.replace(prior(), acceptance=(0.8, 0.5)))
    assert given is not None
    assert given.limit == 2


@functools.cache
def prior() -> StepLaw:
    return law_fit.fit(None, "prior", unit="tpot_ms", kernels=KernelSource("llama-3.1-8b", "h100"), engine="vllm")


def test_scaled_rates_keep_their_order() -> None:
    found = acceptance_draws.by_position((0.8, 0.7, 0.6)).scaled_to(0.5)
    assert found.point[0] == pytest.approx(0.5)
    assert (np.diff(found.point) < 0).all()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: acceptance_draws.constant(1.2), "acceptance must be"),
    (lambda: acceptance_draws.constant(0.8, 0.6), r"acceptance must be a range LOW\.\.HIGH, got 0\.8\.\.0\.6; write 0\.6\.\.0\.8"),
    (lambda: acceptance_draws.by_position(()), "1 to 64 rates"),
    (lambda: acceptance_draws.by_position((0.5, 2)), "between 0 and 1"),
])  # fmt: skip
def test_bad_acceptance_is_refused(call: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()  # type: ignore[operator]


# --- Kernels alone, and memory ---


def test_law_of_kernels_alone_adds_nothing() -> None:
    source = KernelSource("llama-3.1-8b", "h100", draft="llama-3.2-1b")
    found = law_fit.kernels_only(source)
    made = DraftChoice(found, acceptance_draws.constant(0.7), (1.0,), (0, 3), 512.0)
    target, draft = found.pass_seconds(1, 1, 512)[0], found.draft_seconds(1, 512)[0]
    wide = found.pass_seconds(1, 4, 512)[0]
    assert made.steps[0][0, 0] == pytest.approx(float(target))
    assert made.steps[0][0, 1] == pytest.approx(float(wide + 3 * draft))
    low, high = made.interval
    assert low[0, 1] < made.speedups[0, 1] < high[0, 1]


def test_largest_batch_fills_the_memory() -> None:
    shape, device = memory_limit.draft_shape("llama-3.1-8b"), memory_limit.devices.device("h100")
    assert shape is not None
    most = memory_limit.largest_batch(shape, device, context=2000, tensor_parallel=1)
    at = {"context": 2000, "tensor_parallel": 1}
    assert memory_limit.memory_of(shape, device, sequences=most, **at).share <= 1  # type: ignore[arg-type]
    assert memory_limit.memory_of(shape, device, sequences=most + 1, **at).share > 1  # type: ignore[arg-type]
    large = memory_limit.draft_shape("llama-3.1-405b")
    assert large is not None
    assert memory_limit.largest_batch(large, device, context=1, tensor_parallel=1) == 0
