"""Static batches of several sizes that are evaluated together: each is predicted as it is alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.costs import many_costs
from model.costs.layer_times import UnitCost
from model.costs.many_seconds import VariedSeconds
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import LayerSpan, PassShape
from model.hardware.cost_models import WithEngineOverhead
from model.hardware.devices import device
from model.hardware.roofline import Roofline
from model.methods.batching import MOST_ALIKE
from model.methods.prediction import ChoiceGroup, GroupedChoices, MethodChoice, Prediction, PredictionPoints
from model.methods.rounds import rounds_of_batches, rounds_of_lengths
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import batch_sizes
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Iid, Markov
from tests.support.position_costs import growing
from tests.support.tiers import examples

LAYERS = 4
RATES = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
LAWS = (
    RATES.map(Iid) | st.tuples(st.floats(0.1, 0.9), st.floats(0, 0.8)).map(lambda each: Markov(*each))
    | st.lists(RATES, min_size=4, max_size=4).map(Rounds.by_draft_position)
)  # fmt: skip


def parameters_of(sequences: int, draft_length: int = 3, **more: Any) -> Any:
    return Parameters(layers=LAYERS, draft_length=draft_length, sequences=sequences, batching="static", **more)


@given(
    st.lists(LAWS, min_size=1, max_size=3), st.integers(0, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.integers(1, 30),
)  # fmt: skip
@settings(max_examples=examples(60, 600), deadline=None)
def test_rounds_of_several_sizes_are_those_of_each(laws: list[Any], draft_length: int, sizes: list[int], tokens: int) -> None:
    together = rounds_of_batches.by_place_of_sizes(laws, draft_length, tuple(sorted(sizes)), tokens)
    for size, found in zip(sorted(sizes), together, strict=True):
        alone = rounds_of_batches.by_place(laws, draft_length, (tokens,) * size)
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@given(
    st.lists(LAWS, min_size=1, max_size=4), st.integers(0, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True), st.integers(1, 3), st.sampled_from([1, 3000, 100_000]),
)  # fmt: skip
@settings(max_examples=examples(200, 1000), deadline=None)
def test_totals_of_prices_are_those_of_the_rounds(
    laws: list[Any], draft_length: int, sizes: list[int], tokens: list[int], costs: int, near: int
) -> None:
    """Every price is another: by position, drafted tokens, sequences left, kind of round and length."""
    sizes, lengths, rooms = sorted(sizes), np.sort(tokens), draft_length + 1
    draw = np.random.default_rng(0).random
    shape = costs, 2, sizes[-1] + 1
    whole, last = draw((*shape, lengths[-1])), draw((*shape, lengths.size, rooms, rooms))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_of_lengths, "_NEAR", near)
        prices = rounds_of_lengths.PricesByLength(whole.copy(), last.copy())
        found = rounds_of_lengths.totals_of_lengths(laws, draft_length, tuple(sizes), lengths, prices)
    np.testing.assert_array_equal(prices.last, last)
    for (place, size), (at, length) in itertools.product(enumerate(sizes), enumerate(lengths.tolist())):
        counts = rounds_of_batches.by_place(laws, draft_length, (length,) * size).counts
        position, drafted = rounds_of_batches.cells_of(draft_length, (length,))
        early = position < length - rooms
        price = np.where(early, whole[..., position], last[..., at, np.maximum(position - (length - rooms), 0), drafted])
        expected = np.einsum("lknp,cknp->lc", counts, price[:, :, : size + 1])
        np.testing.assert_allclose(found[place, :, at], expected, rtol=1e-11, atol=1e-12)


def test_of_large_batches_that_end_at_once_all_rounds_are_counted() -> None:
    """With a rate of 1 all sequences end in the same round: all are left in each, and none in the next."""
    sizes = (2, 40, MOST_ALIKE)
    for size, found in zip(sizes, rounds_of_batches.by_place_of_sizes([Iid(1.0)], 3, sizes, 12), strict=True):
        by_left = found.counts.sum(axis=(1, 3))[0]
        assert by_left[size] == by_left.sum() == 3
        assert found.sequences == 3 * size


COSTS = st.builds(
    lambda draft, prompt, devices: growing(LAYERS, draft=draft, prompt=prompt, draft_devices=devices), st.floats(0.1, 0.5),
    st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]),
) | st.builds(lambda ratio: UnitCost(LAYERS, cost_ratio=ratio), st.floats(0, 1))  # fmt: skip


def assert_alike(found: Prediction, index: int, one: Prediction) -> None:
    for name, value in vars(one).items():
        if value is not None and name != "latency_variance":
            np.testing.assert_allclose(getattr(found, name)[index], value[0], rtol=1e-11, atol=1e-13, err_msg=name)


HELD = {
    "all": {}, "few laws together": {"_TOGETHER": 1}, "few costs": {"_PRICED": 1}, "prices of one block": {"_MOST_KEPT": 1500},
    "nothing": {"_TOGETHER": 1, "_PRICED": 1, "_MOST_KEPT": 1},
}  # fmt: skip


@given(st.data(), st.sampled_from([*HELD]))
@settings(max_examples=examples(40, 400), deadline=None)
def test_points_of_several_sizes_equal_each_alone(data: st.DataObject, held: str) -> None:
    """Also if few costs, laws and prices are held: then what is common is computed again."""
    drawn = st.tuples(st.integers(1, 6), st.integers(0, 3), st.sampled_from([{}, {"placement": "separate"}, {"context_budget": 2}]))
    chosen = [parameters_of(size, longest, **more) for size, longest, more in data.draw(st.lists(drawn, min_size=2, max_size=5))]
    mixed = parameters_of(2, lengths=(3, 9, 4))
    tokens, costs = data.draw(st.integers(1, 12)), data.draw(st.lists(COSTS, min_size=1, max_size=3))
    choices = [MethodChoice(each, tokens, cost) for each in chosen for cost in costs] + [MethodChoice(mixed, 9, costs[0])]
    laws = data.draw(st.lists(LAWS, min_size=1, max_size=3))
    choice, law = (each.ravel() for each in np.indices((len(choices), len(laws))))
    points = PredictionPoints(choices, laws, choice, law)
    alone = [speculative.predict_points(points.at(np.array([index]))) for index in range(law.size)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HELD[held].items():
            patch.setattr(batch_sizes, name, value)
        together = speculative.predict_points(points)
    for index, one in enumerate(alone):
        assert_alike(together, index, one)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("prompts", [[0], [0, 3]])
def test_many_laws_and_placements_of_several_sizes_equal_each_alone(
    monkeypatch: pytest.MonkeyPatch, held: str, prompts: list[int]
) -> None:  # fmt: skip
    more, costs = [{}, {"placement": "separate"}], [growing(LAYERS, draft=0.3, prompt=each, link=0.7) for each in prompts]
    choices = [MethodChoice(parameters_of(size, **each), 9, cost) for size in (4, 2, 3) for each in more for cost in costs]
    laws = [Iid(rate) for rate in (0.2, 0.5, 0.8, 1.0)]
    choice, law = (each.ravel() for each in np.indices((len(choices), len(laws))))
    asked = np.flatnonzero((choice + law) % 3)  # not all sizes under the same laws
    points = PredictionPoints(choices, laws, choice, law).at(asked)
    alone = [speculative.predict_points(points.at(np.array([index]))) for index in range(asked.size)]
    for name, value in HELD[held].items():
        monkeypatch.setattr(batch_sizes, name, value)
    together = speculative.predict_points(points)
    for index, one in enumerate(alone):
        assert_alike(together, index, one)


@given(st.data(), st.sampled_from([*HELD]), st.sampled_from([8, 1000]))
@settings(max_examples=examples(20, 200), deadline=None)
def test_points_of_several_sizes_and_lengths_equal_each_alone(data: st.DataObject, held: str, prices: int) -> None:
    """Sizes with the same lengths, whose totals are found together, and with others; costs that count devices and links."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3, unique=True))
    same = data.draw(st.lists(st.integers(1, 14), min_size=2, max_size=4))
    lengths = dict.fromkeys(sizes, same)
    if data.draw(st.integers(0, 3)) == 0:
        lengths = {size: data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)) for size in sizes}
    placement = data.draw(st.sampled_from([{}, {"placement": "separate"}]))
    first = replace(hardware(), draft_devices=data.draw(st.sampled_from([0.5, 1.0])), link=data.draw(st.sampled_from([0.0, 0.01])))
    groups = [
        ChoiceGroup(
            replace(parameters_of(size, 2, **placement), layers=32), np.array(own),
            VariedSeconds(first, len(own), {"prompt": np.arange(len(own)) % 2 * 500, "middle": np.array(own) // 2}),
        )
        for size, own in lengths.items()
    ]  # fmt: skip
    choices, laws = GroupedChoices(groups), data.draw(st.lists(LAWS, min_size=1, max_size=3))
    choice, law = (each.ravel() for each in np.indices((len(choices), len(laws))))
    some = (choice + law) % data.draw(st.integers(2, 9)) > 0  # not all sizes under the same laws, nor with the same lengths
    choice, law = choice[some], law[some]
    points = PredictionPoints(choices, laws, choice, law)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (HELD[held] | {"_PRICES_OF_A_SIZE": prices}).items():
            patch.setattr(batch_sizes, name, value)
        together = speculative.predict_points(points)
    none = np.zeros(1, dtype=np.intp)
    for index, (which, of) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        assert_alike(together, index, speculative.predict_points(PredictionPoints([choices[which]], [laws[of]], none, none)))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("asked", ["the same", "laws", "lengths", "prompts"])
def test_totals_are_shared_only_by_what_is_alike(monkeypatch: pytest.MonkeyPatch, held: str, asked: str) -> None:
    """Sizes that are asked with other laws, lengths or prompts; in blocks of costs, which have other prompts and lengths."""
    first, lengths, prompts = replace(hardware(), draft_devices=0.5), np.array([9, 8, 12, 9]), np.array([0, 0, 700, 700])
    groups = []
    for place, size in enumerate((3, 5, 2)):
        own = lengths + (place if asked == "lengths" else 0)
        numbers = {"prompt": prompts + (90 * place if asked == "prompts" else 0), "middle": own // 2}
        groups.append(ChoiceGroup(replace(parameters_of(size, 2), layers=32), own, VariedSeconds(first, 4, numbers)))
    laws = [Iid(rate) for rate in (0.2, 0.5, 0.9)]
    choice, law = (each.ravel() for each in np.indices((12, 3)))
    some = np.flatnonzero((asked != "laws") | (choice // 4 != law))
    points = PredictionPoints(GroupedChoices(groups), laws, choice, law).at(some)
    alone = [speculative.predict_points(points.at(np.array([index]))) for index in range(some.size)]
    for name, value in (HELD[held] | {"_PRICES_OF_A_SIZE": 1000}).items():
        monkeypatch.setattr(batch_sizes, name, value)
    together = speculative.predict_points(points)
    for index, one in enumerate(alone):
        assert_alike(together, index, one)


def test_sizes_with_other_lengths_are_not_totalled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum for a size that is not asked for would be in vain."""
    made: list[tuple[int, ...]] = []
    right, cost = batch_sizes.totals_of_lengths, growing(LAYERS, draft=0.3)
    monkeypatch.setattr(batch_sizes, "totals_of_lengths", lambda *of: made.append(of[2]) or right(*of))

    def predict(lengths_of: dict[int, list[int]]) -> None:
        groups = [
            ChoiceGroup(parameters_of(size, 2), np.array(own), [cost] * len(own)) for size, own in lengths_of.items()
        ]
        choice = np.arange(sum(map(len, lengths_of.values())))
        speculative.predict_points(PredictionPoints(GroupedChoices(groups), [Iid(0.5)], choice, 0 * choice))

    predict({2: [3, 9], 3: [3, 8]})
    predict({2: [3, 9]})
    assert made == []
    predict({2: [3, 9], 3: [9, 3]})
    assert made == [(2, 3)]
    predict({2: [*range(1, 18)], 3: [*range(1, 18)]})  # many lengths of few sizes take less apart
    assert made == [(2, 3)]


def test_batches_of_more_sequences_than_powers_allow_are_in_no_family() -> None:
    choices = [MethodChoice(parameters_of(size, 1), 3, growing(LAYERS, draft=0.3)) for size in (2, 2 * MOST_ALIKE + 200)]
    both, first = np.arange(2), np.zeros(1, dtype=np.intp)
    together = speculative.predict_points(PredictionPoints(choices, [Iid(0.5)], both, 0 * both))
    for index, chosen in enumerate(choices):
        assert_alike(together, index, speculative.predict_points(PredictionPoints([chosen], [Iid(0.5)], first, first)))


def test_prices_at_other_cells_are_others() -> None:
    family, cost = batch_sizes.BatchFamily((2, 3)), many_costs.joined([growing(LAYERS, draft=0.3)])
    cells = np.array([[0, 1, 5], [2, 2, 0]])
    one, other = (family.prices(cost, 2, 3, each, separate=False)[0] for each in (cells, cells[:, ::-1].copy()))
    np.testing.assert_array_equal(one, other[..., ::-1])


DEVICE = device("h100")
SHAPES = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b"}


def hardware() -> PassSeconds:
    return PassSeconds({role: Roofline.on_device(preset(shape), DEVICE) for role, shape in SHAPES.items()})


@pytest.mark.parametrize("priced", [1, 30_000, 4_000_000])
def test_sizes_share_prices_of_costs_that_are_made_anew(monkeypatch: pytest.MonkeyPatch, priced: int) -> None:
    """Costs of a grid are made for each set of parameters: equal ones are priced once for each number of sequences left."""
    monkeypatch.setattr(batch_sizes, "_PRICED", priced)
    priced_left: list[int] = []
    price = batch_sizes.CellPrices._price

    def counted(self: Any, left: int) -> None:
        priced_left.append(left)
        price(self, left)

    monkeypatch.setattr(batch_sizes.CellPrices, "_price", counted)
    first, tokens, sizes = hardware(), 12, (2, 3, 5)
    prompts = np.array([0, 7, 100, 2000])

    def group(size: int) -> ChoiceGroup[Any]:
        own = replace(parameters_of(size, 2), layers=32)
        return ChoiceGroup(own, tokens, VariedSeconds(first, prompts.size, {"prompt": prompts.copy()}))

    groups = [group(size) for size in sizes]
    choice = np.arange(len(sizes) * prompts.size)
    points = PredictionPoints(GroupedChoices(groups), [Iid(0.7)], choice, 0 * choice)
    found = speculative.predict_points(points)
    blocks = {1: 4, 30_000: 1, 4_000_000: 1}[priced]
    assert sorted(priced_left) == sorted([*range(1, 6)] * blocks)
    for index, (size, prompt) in enumerate((size, prompt) for size in sizes for prompt in prompts.tolist()):
        alone = MethodChoice(groups[sizes.index(size)].parameters, tokens, replace(first, prompt=prompt))
        none = np.zeros(1, dtype=np.intp)
        assert_alike(found, index, speculative.predict_points(PredictionPoints([alone], [Iid(0.7)], none, none)))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1e-5]), st.sampled_from([0.0, 1e-4])), min_size=2, max_size=2),
    st.sampled_from([[], [0], [1]]),
)  # fmt: skip
def test_content_is_equal_only_for_equal_times(numbers: list[tuple[int, float, float]], others: list[int]) -> None:
    """Of costs that differ in their prompts, transfers or engine steps; alone, or joined with others."""
    first = hardware()
    of_steps = {role: WithEngineOverhead(model, 0.0) for role, model in first.hardware_models.items()}
    first = replace(first, hardware_models=of_steps)
    contents, times = [], []
    for prompt, link, step in numbers:
        each: list[Any] = [
            VariedSeconds(first, 1, {"prompt": np.array([prompt]), "link": np.array([link])}, {"target": np.array([step])})
        ]
        for place in others:
            each.insert(place, [first])
        cost = many_costs.joined_groups(each)
        contents.append(cost.content())
        times.append((cost.times(PassShape(LayerSpan(0, 32), sequences=3, heads=1), np.arange(3)).tolist(), [*cost.link]))
    assert (contents[0] == contents[1]) == (numbers[0] == numbers[1]) == (times[0] == times[1])


def test_other_hardware_is_other_content() -> None:
    first = [hardware(), hardware()]
    costs = [many_costs.joined([each]) for each in first]
    assert costs[0].content() != costs[1].content()
    assert costs[0].content() == many_costs.joined(first[:1]).content()
    assert many_costs.joined(first).content() != costs[0].content()
    varied = [many_costs.joined_groups([VariedSeconds(each, 1, {"prompt": np.array([5])})]) for each in first]
    assert varied[0].content() != varied[1].content()
