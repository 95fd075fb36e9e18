"""Decodings of several lengths that are predicted together: each is predicted as it is alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.architectures.published_shapes import preset
from model.base import checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.many_costs import VariedCosts
from model.costs.many_seconds import VariedSeconds
from model.costs.pass_seconds import PassSeconds
from model.hardware.devices import device
from model.hardware.roofline import Roofline
from model.methods import prediction, registry, stages
from model.methods.adaptive import adaptive_rounds, heuristic_rounds
from model.methods.bild import finite_bild
from model.methods.bild.threshold_decisions import Independent
from model.methods.early_exit import finite_early_exit
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.early_exit.theory import exit_pmf
from model.methods.ngram import lookup_rounds
from model.methods.prediction import ChoiceGroup, GroupedChoices, MethodChoice, Prediction, PredictionPoints
from model.methods.rounds import rounds_of_lengths
from model.methods.rounds.round_laws import MixedRounds, Rounds
from model.methods.tree import tree_lengths
from model.outcomes import round_counts
from model.outcomes.lookup_laws import Lookups, ReplayedLookups
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, RecordedProbabilities, Replay, TwoClass
from model.outcomes.rank_laws import RankRates
from tests.support.tiers import examples


class Decodings(NamedTuple):
    """A method's parameters, and the laws that its decodings have."""

    method: str
    parameters: dict[str, Any]
    laws: list[Any]


LONGEST = 40
RATES = [Iid(0.0), Iid(0.3), Iid(0.8), Iid(1.0)]
DECISIONS = [Independent(0.0, 0.0), Independent(0.2, 0.1), Independent(1.0, 0.0), Independent(0.3, 1.0)]
RANKS = [RankRates([[[rate, 0.1]] * 2]) for rate in (0.2, 0.7)]
DEEP_RANKS = [RankRates([[[rate, 0.1]] * 5]) for rate in (0.2, 0.7, 0.9)]
EXITS = Depths(exit_pmf([0.2, 0.0, 0.5, 0.1, 0.0, 0.0, 0.3, 1.0]))
EXITS_OF_THREE = Depths(exit_pmf([0.2, 0.0, 0.5, 0.1, 0.0, 0.0, 0.3, 1.0]), 3)
BY_POSITION = ByPosition(np.linspace(0.1, 0.9, LONGEST))
RECORDED = Replay(np.random.default_rng(1).random((3, LONGEST)) < 0.6)
CHANCES = RecordedProbabilities(np.random.default_rng(2).random((3, LONGEST)))
MATCHES = [*RATES, Markov(0.6, 0.3), Markov(0.5, -1.0), BY_POSITION, RECORDED, CHANCES]
DOUBTED = [
    {"accept": law, "confidence": doubt}
    for law in [*RATES, Markov(0.6, 0.3), BY_POSITION] for doubt in (TwoClass(0.1, 0.6), TwoClass(0.5, 0.0))
]  # fmt: skip
MIXTURES = [MixedRounds([Rounds([0.9, 0.5]), Rounds([0.3, 0.1])], weights) for weights in ((0.5, 0.5), (0.9, 0.1))]
CASES = {
    "no drafts": Decodings("speculative", {"draft_length": 0}, RATES),
    "speculative": Decodings("speculative", {"draft_length": 4}, [*RATES, Rounds([0.9, 0.5, 0.2, 0.1])]),
    "drafts longer than most decodings": Decodings("speculative", {"draft_length": 12, "placement": "separate"}, RATES),
    "a batch kept full": Decodings("speculative", {"draft_length": 3, "sequences": 4}, RATES),
    "draft head": Decodings("speculative", {"draft_length": 3, "drafter": "heads"}, RATES),
    "parallel draft": Decodings("speculative", {"draft_length": 4, "drafter": "parallel"}, RATES),
    "separate units": Decodings("speculative", {"draft_length": 3, "placement": "separate"}, RATES),
    "mixtures": Decodings("speculative", {"draft_length": 2}, [*MIXTURES, Iid(0.5), BY_POSITION]),
    "mixtures with a parallel draft": Decodings("speculative", {"draft_length": 2, "drafter": "parallel"}, MIXTURES),
    "rates by position": Decodings("speculative", {"draft_length": 3}, [Iid(0.5), BY_POSITION]),
    "drafts with a budget": Decodings("speculative", {"draft_length": 3, "context_budget": 20}, RATES),
    "draft heads, kept full": Decodings("speculative", {"draft_length": 2, "drafter": "heads", "sequences": 4}, RATES),
    "static batches": Decodings(
        "speculative", {"draft_length": 3, "sequences": 4, "batching": "static"},
        [*RATES, Markov(0.6, 0.3), Rounds([0.9, 0.5, 0.2]), BY_POSITION],
    ),
    "static batches, drafts longer than most decodings": Decodings(
        "speculative", {"draft_length": 9, "sequences": 2, "batching": "static", "placement": "separate"}, RATES,
    ),
    "static batches, drafts with a budget": Decodings(
        "speculative", {"draft_length": 1, "sequences": 5, "batching": "static", "context_budget": 20}, RATES,
    ),
    "static batches, no drafts": Decodings("speculative", {"draft_length": 0, "sequences": 3, "batching": "static"}, RATES),
    "self-speculative": Decodings("self_speculative", {"exit_layer": 4, "draft_length": 3}, RATES),
    "self-speculative, all layers again": Decodings(
        "self_speculative", {"exit_layer": 4, "draft_length": 5, "reuse": False}, [*RATES, BY_POSITION],
    ),
    "bild": Decodings("bild", {"max_draft_length": 3}, DECISIONS),
    "bild, code": Decodings("bild", {"max_draft_length": 7, "variant": "code"}, DECISIONS),
    "bild, first layers": Decodings("bild", {"exit_layer": 3, "max_draft_length": 4}, DECISIONS),
    "bild, separate units": Decodings("bild", {"max_draft_length": 1, "placement": "separate"}, DECISIONS),
    "bild by position": Decodings("bild", {"max_draft_length": 2}, [*DECISIONS, Independent([0.2] * LONGEST, [0.1] * LONGEST)]),
    "tree": Decodings("tree", {"shape": "full", "draft_depth": 2, "width": 2, "placement": "separate"}, RANKS),
    "tree of one level": Decodings("tree", {"shape": "full", "draft_depth": 1, "width": 2, "placement": "separate"}, RANKS),
    "tree, two kinds of sequences": Decodings(
        "tree", {"shape": "full", "draft_depth": 2, "width": 2},
        [*RANKS, RankRates([[[0.6, 0.2]] * 2, [[0.3, 0.1]] * 2], [0.5, 0.5], by_sequence=True)],
    ),
    "tree of many levels": Decodings("tree", {"shape": "full", "draft_depth": 5, "width": 2}, DEEP_RANKS),
    "tree, kept full": Decodings("tree", {"shape": "full", "draft_depth": 3, "width": 2, "sequences": 4}, DEEP_RANKS),
    "tree, heads": Decodings("tree", {"shape": "full", "draft_depth": 3, "width": 2, "drafter": "heads"}, DEEP_RANKS),
    "tree, parallel": Decodings(
        "tree", {"shape": "listed", "parents": (-1, -1, 0, 1, 2), "drafter": "parallel", "sequences": 2, "batching": "lockstep"},
        DEEP_RANKS,
    ),
    "tree by confidence": Decodings(
        "tree",
        {"shape": "eagle-2", "draft_depth": 4, "width": 2, "nodes": 4, "rank_rates": (((0.7, 0.2),) * 4, ((0.4, 0.3),) * 4)},
        [RankRates([[[rate, 0.2]] * 4, [[0.3, 0.1]] * 4], [0.3, 0.7]) for rate in (0.4, 0.7)],
    ),
    "tree, drafts and classes of drafts": Decodings(
        "tree", {"shape": "full", "draft_depth": 2, "width": 2},
        [*RANKS, RankRates([[[0.6, 0.2]] * 2, [[0.3, 0.1]] * 2], [0.5, 0.5])],
    ),
    "ngram": Decodings("ngram", {"draft_length": 3}, [Lookups.of_rates(0.4, rate, 3) for rate in (0.0, 0.6)]),
    "ngram, kept full": Decodings("ngram", {"draft_length": 5, "sequences": 3}, [Lookups.of_rates(0.4, 0.6, 5)]),
    "ngram, in stretches": Decodings(
        "ngram", {"draft_length": 4}, [Lookups.of_rates(rates, 0.6, 4) for rates in ((0.2, 0.7), (0.4, 0.4))],
    ),
    "ngram, two kinds of matches": Decodings(
        "ngram", {"draft_length": 6},
        [Lookups([0.3, 0.2], [1, 5], [[rate], [rate, 0.4, 0.3, 0.3, 0.1]]) for rate in (0.5, 0.9)]
        + [Lookups([0.5], [6], [[0.6] * 6]), ReplayedLookups([[2, 0, 3, 1] * 10], [[1, 0, 3, 0] * 10])],
    ),
    "ppd": Decodings("ppd", {"exit_layer": 5, "candidates": 2}, MATCHES),
    "ppd, eager": Decodings("ppd", {"exit_layer": 5, "candidates": 2, "form": "eager"}, MATCHES),
    "ppd, flat": Decodings("ppd", {"exit_layer": 3, "candidates": 2, "form": "flat"}, MATCHES),
    "skipdecode": Decodings("skipdecode", {"min_layers": 2, "max_layers": 6, "prompt": 3, "sequence_length": 50}, [None]),
    "skipdecode, decaying prompt": Decodings(
        "skipdecode",
        {"min_layers": 2, "max_layers": 8, "prompt": 9, "sequence_length": 60, "decay_prompt": True, "rounding": "half-up"}, [None],
    ),
    "early exit at a layer": Decodings("early_exit", {"exit_layer": 5}, [None]),
    "early exit": Decodings("early_exit", {}, [EXITS, Depths(exit_pmf([0.0] * 7 + [1.0]))]),
    "early exit by position": Decodings("early_exit", {}, [EXITS, Depths([[0.25] * 4 + [0.0] * 4, *[[0.125] * 8] * LONGEST])]),
    "early exit of static batches": Decodings("early_exit", {"sequences": 3, "batching": "static"}, [EXITS_OF_THREE]),
    "skipdecode of static batches": Decodings(
        "skipdecode",
        {"min_layers": 2, "max_layers": 6, "prompt": 3, "sequence_length": 50, "sequences": 3, "batching": "static"}, [None],
    ),
    "early exit, backfill": Decodings("early_exit", {"fill": "backfill"}, [EXITS]),
    "autoregressive": Decodings("autoregressive", {}, [None]),
    "adaptive": Decodings("adaptive", {"policy": "optimum"}, RATES),
    "adaptive, heuristic": Decodings("adaptive", {"policy": "heuristic", "draft_length": 2, "max_draft_length": 5}, MATCHES),
    "adaptive, heuristic, drafts longer than most decodings": Decodings(
        "adaptive", {"policy": "heuristic", "draft_length": 9, "max_draft_length": 12, "placement": "separate"},
        [*RATES, Rounds([0.9, 0.5, 0.2] + [0.1] * 9)],
    ),
    "adaptive, heuristic with a budget": Decodings(
        "adaptive", {"policy": "heuristic", "max_draft_length": 3, "context_budget": 20}, [*RATES, Markov(0.6, 0.3)],
    ),
    "adaptive, doubts": Decodings("adaptive", {"policy": "confidence", "max_draft_length": 4}, DOUBTED),
    "adaptive, doubts, separate units": Decodings(
        "adaptive", {"policy": "confidence", "max_draft_length": 9, "placement": "separate", "context_budget": 30}, DOUBTED[:4],
    ),
}  # fmt: skip
SHAPES = {"target": replace(preset("llama-3.2-1b"), layers=8), "draft": replace(preset("llama-3.2-1b"), layers=2)}
HARDWARE = PassSeconds({role: Roofline.on_device(shape, device("h100")) for role, shape in SHAPES.items()}, draft_devices=0.5)
COST = UnitCost(8, cost_ratio=0.1, draft_devices=0.5, propagation=0.1)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=examples(10, 150), deadline=None)
def test_each_length_is_predicted_as_alone(name: str, data: st.DataObject) -> None:
    """Also where costs vary at the same time, equal choices come twice, and not all are asked for."""
    case = CASES[name]
    parameters = registry.parameters(case.method)(layers=8, **case.parameters)
    lengths = np.array([1, *data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))], dtype=np.int64)
    heads = data.draw(st.none() | st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=lengths.size, max_size=lengths.size))
    costs: Any = [COST] * lengths.size if heads is None else VariedCosts(COST, {"final_head": np.array(heads)})
    places = st.tuples(st.integers(0, lengths.size - 1), st.integers(0, len(case.laws) - 1))
    pairs = np.array([(0, 0), (1, 0), *data.draw(st.lists(places, max_size=12))], dtype=np.intp)
    _require_alike(case, ChoiceGroup(parameters, lengths, costs), pairs, 1e-12)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=examples(5, 100), deadline=None)
def test_each_length_on_hardware_is_predicted_as_alone(name: str, data: st.DataObject) -> None:
    """Passes become slower with the context, and arithmetic is that half-way through each decoding."""
    case = CASES[name]
    parameters = registry.parameters(case.method)(layers=8, **case.parameters)
    lengths = np.array([1, *data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))], dtype=np.int64)

    def one_of_each(values: list[Any]) -> NDArray[Any]:
        return np.array(data.draw(st.lists(st.sampled_from(values), min_size=lengths.size, max_size=lengths.size)))

    numbers = {"prompt": one_of_each([0, 700, 9000])}
    if data.draw(st.booleans()):
        numbers["link"] = one_of_each([0.0, 1e-3])
    end = data.draw(st.sampled_from([0.0, 1.0, -1.0]))
    first = replace(HARDWARE, uncertainty_end=end)
    if data.draw(st.booleans()):  # the other sequences of a batch are half-way through
        first, numbers["others_position"] = replace(first, batch=4, others_position=1.5), lengths / 2
    costs = VariedSeconds(first, lengths.size, {**numbers, "middle": lengths // 2})
    places = st.tuples(st.integers(0, lengths.size - 1), st.integers(0, len(case.laws) - 1))
    pairs = np.array([(0, 0), (1, 0), *data.draw(st.lists(places, max_size=12))], dtype=np.intp)
    _require_alike(case, ChoiceGroup(parameters, lengths, costs), pairs, 1e-11)


@pytest.mark.parametrize("form", ["literal", "flat"])
@pytest.mark.parametrize("on_hardware", [False, True])
def test_a_law_need_not_reach_further_than_its_decodings(form: str, on_hardware: bool) -> None:
    """Rates of 5 positions suffice for 6 tokens, also where other decodings are longer."""
    exit_layer = 5 if form == "literal" else 3
    case = Decodings("ppd", {"exit_layer": exit_layer, "candidates": 2, "form": form}, [*MATCHES, ByPosition([0.5] * 5)])
    lengths = np.array([6, LONGEST, 2])
    costs: Any = VariedSeconds(HARDWARE, 3, {"prompt": np.array([0, 700, 700])}) if on_hardware else [replace(COST, link=1.0)] * 3
    group = ChoiceGroup(registry.parameters("ppd")(layers=8, **case.parameters), lengths, costs)
    short = len(MATCHES)
    _require_alike(case, group, np.array([(0, short), (2, short), *((1, law) for law in range(short))]), 1e-11)


def test_blocks_of_columns_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variance of stages that depend on one another is computed for some pairs of laws and costs at a time."""
    with monkeypatch.context() as patch:
        patch.setattr(stages, "_COLUMNS", 2)
        patch.setattr(stages, "_CHANCES", 30)  # two laws
        patch.setattr(prediction, "_CELLS", 150)
        parts = _of_some_lengths("ppd, flat")
    _require_close(parts, _of_some_lengths("ppd, flat"))


def test_blocks_of_early_exit_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of laws and costs are evaluated in parts."""
    with monkeypatch.context() as patch:
        patch.setattr(finite_early_exit, "_CELLS", 2 * 13 * 8)  # two pairs
        parts = _of_some_lengths("early exit")
    _require_close(parts, _of_some_lengths("early exit"))


def test_blocks_of_segments_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(finite_bild, "_COUNTS", 200)  # one law
        patch.setattr(finite_bild, "_CELLS", 2 * 13 * 8)  # two pairs
        parts = _of_some_lengths("bild, code")
    _require_close(parts, _of_some_lengths("bild, code"))


def _of_some_lengths(name: str) -> Prediction:
    """All laws of a case, at several lengths and prompts."""
    case, lengths = CASES[name], np.array([7, 1, 9, 4, 4, 13])
    group = ChoiceGroup(
        registry.parameters(case.method)(layers=8, **case.parameters), lengths,
        VariedSeconds(HARDWARE, lengths.size, {"prompt": np.array([0, 700, 700, 0, 9000, 700])}),
    )
    choice, law = (each.ravel() for each in np.meshgrid(np.arange(lengths.size), np.arange(len(case.laws))))
    few = (law < 5) | (lengths[choice] < 8)  # the last of many laws are of shorter decodings
    return registry.method(case.method).predict_points(PredictionPoints(GroupedChoices([group]), case.laws, choice[few], law[few]))


def _require_close(found: Prediction, expected: Prediction) -> None:
    for column, values in vars(expected).items():
        if values is not None:
            least = 1e-11 * float(np.max(expected.latency)) ** 2 if column == "latency_variance" else 0.0
            np.testing.assert_allclose(getattr(found, column), values, rtol=1e-12, atol=least, err_msg=column)


def _require_alike(case: Decodings, group: ChoiceGroup[Any], pairs: NDArray[np.intp], tolerance: float) -> None:
    """Predict pairs of choices and laws together, and each alone."""
    method, groups = registry.method(case.method), GroupedChoices([group])
    found = method.predict_points(PredictionPoints(groups, case.laws, *pairs.T))
    one, alone = np.zeros(1, dtype=np.intp), []
    for which, law in pairs.tolist():
        choice = MethodChoice(group.parameters, int(group.lengths[which]), group.costs[which])
        alone.append(method.predict_points(PredictionPoints([choice], [case.laws[law]], one, one)))
    expected = Prediction.joined(alone)
    time = np.asarray(expected.latency)
    for column, values in vars(expected).items():
        ours = getattr(found, column)
        assert (ours is None) == (values is None), column
        if values is not None:  # variances are differences of squares
            scale = time**2 if column == "latency_variance" else np.abs(values)
            assert (np.isnan(ours) == np.isnan(values)).all(), column
            assert (np.abs(ours - values)[~np.isnan(values)] <= (tolerance * scale)[~np.isnan(values)]).all(), column


IN_BLOCKS = (
    "tree of many levels", "tree, kept full", "ngram, two kinds of matches", "adaptive, heuristic with a budget",
    "adaptive, doubts", "static batches",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_lengths_in_small_blocks_are_predicted_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, lengths = CASES[name], np.repeat(np.arange(1, 13), 3)
    parameters = registry.parameters(case.method)(layers=8, **case.parameters)
    prompts = np.tile([0, 700, 9000], 12)
    group = ChoiceGroup(parameters, lengths, VariedSeconds(HARDWARE, 36, {"prompt": prompts, "middle": lengths // 2}))
    monkeypatch.setattr(tree_lengths, "_DECODINGS", 24)
    monkeypatch.setattr(adaptive_rounds, "DECODINGS", 7)
    monkeypatch.setattr(adaptive_rounds, "CELLS", 300)
    monkeypatch.setattr(heuristic_rounds, "CELLS", 60)
    monkeypatch.setattr(lookup_rounds, "_CELLS", 200)
    monkeypatch.setattr(lookup_rounds, "_PAIRS", 5)
    monkeypatch.setattr(rounds_of_lengths, "_TOGETHER", 2 * 5 * 28 * 3)  # three lengths
    monkeypatch.setattr(rounds_of_lengths, "_NEAR", 60)
    monkeypatch.setattr(rounds_of_lengths, "_KEPT", 0)
    pairs = np.stack(np.meshgrid(np.arange(36), np.arange(len(case.laws))), axis=-1).reshape(-1, 2)
    _require_alike(case, group, pairs, 1e-11)


def test_starts_of_rounds_are_shared_by_blocks_of_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length has a cost of its own, as in a continuous batch: 60 blocks, and starts for 4, 8, 16, 32 and 64 positions."""
    lengths, laws, right, made = np.arange(4, 64), [Iid(0.5), Iid(0.75)], round_counts.start_masses, list[int]()
    costs = VariedSeconds(replace(HARDWARE, batch=4, others_position=0.0), lengths.size, {"others_position": lengths / 2})
    parameters = registry.parameters("speculative")(layers=8, draft_length=3, sequences=4)
    choice, law = (each.ravel() for each in np.meshgrid(np.arange(lengths.size), np.arange(2)))
    points = PredictionPoints(GroupedChoices([ChoiceGroup(parameters, lengths, costs)]), laws, choice, law)
    expected = registry.method("speculative").predict_points(points)
    monkeypatch.setattr(round_counts, "start_masses", lambda ends: made.append(len(ends)) or right(ends))
    monkeypatch.setattr(prediction, "_CELLS", 1)
    found = registry.method("speculative").predict_points(points)
    assert made == [4, 8, 16, 32, 64]
    _require_close(found, expected)


@given(st.data())
@settings(max_examples=examples(60, 1000), deadline=None)
def test_rounds_of_several_lengths_are_counted_as_of_each(data: st.DataObject) -> None:
    """Lengths below, at and above that of a draft, and those of more laws than are counted in a block."""
    drafted = data.draw(st.integers(0, 6))
    lengths = np.array(sorted(data.draw(st.sets(st.integers(1, 15), min_size=1, max_size=5))), dtype=np.int64)
    laws = data.draw(st.sampled_from([1, 3, round_counts._FEW_LAWS + 2]))
    survival = np.random.default_rng(data.draw(st.integers(0, 99))).uniform(0, 1, (laws, drafted)).cumprod(axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_counts, "_TOGETHER", 60)
        found = round_counts.counts_of_lengths(lengths, round_counts.cut_ends(drafted, survival))
    for number, tokens in enumerate(lengths.tolist()):
        expected = round_counts.counts_of(drafted, tokens, survival)
        for ours, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours[number * laws : (number + 1) * laws], one, rtol=1e-12, atol=1e-14)


def test_pairs_beyond_a_block_are_priced_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, ends = np.arange(1, 9), round_counts.cut_ends(2, np.array([[0.5, 0.25], [0.75, 0.5]]))
    time = np.array([[1.0, 2.0, 4.0], [1.0, 1.5, 1.75]])
    prices = round_counts.PricesOfRounds(time, 2 * time, 3 * time, np.arange(3))
    law, length, price = (each.ravel() for each in np.meshgrid([0, 1], np.arange(8), [0, 1]))
    whole = round_counts.moments_of_pairs(lengths, ends, prices, law, length, price)
    monkeypatch.setattr(round_counts, "_MOST_COUNTS", 50)
    monkeypatch.setattr(round_counts, "_PAIRS", 3)
    np.testing.assert_allclose(round_counts.moments_of_pairs(lengths, ends, prices, law, length, price), whole, rtol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens_is_allowed_only_where_none_is_refused(name: str) -> None:
    """Then the check of each number is left out; a class that overrides the check must not inherit the answer."""
    case = CASES[name]
    kind = registry.parameters(case.method)

    class Refusing(kind):  # type: ignore[misc, valid-type]
        def check_tokens(self, tokens: int) -> None:
            raise ParameterError("tokens")

    parameters, refusing = (each(layers=8, **case.parameters) for each in (kind, Refusing))
    assert not refusing.allows_any_tokens
    for tokens in (1, 7, checks.MAX_TOKENS) if parameters.allows_any_tokens else ():
        parameters.check_tokens(tokens)
    assert parameters.allows_any_tokens == (case.method not in {"skipdecode", "early_exit", "dsi"})
