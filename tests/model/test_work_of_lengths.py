"""Work of decodings of several lengths together: that of each alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.interpret.account import Totals
from model.methods import registry
from model.methods.bild.threshold_decisions import Independent
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.ngram import theory as ngram_theory
from model.methods.ppd import theory
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import theory as speculative
from model.methods.tree import theory as tree_theory
from model.outcomes.lookup_laws import Lookups, ReplayedLookups
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay, TwoClass
from model.outcomes.rank_laws import RankRates
from tests.support.tiers import examples

LAYERS = 12
NOTHING = Totals(*[0.0] * len(Totals._fields))
RECORDED = Replay(np.array([[1, 0, 1, 1] * 10, [0, 1, 1, 0] * 10]))
MATCHES = [Iid(0.0), Iid(0.3), Iid(1.0), Markov(0.5, 0.4), ByPosition([0.1, 0.9] * 20), RECORDED]
DEPTHS = [None, *(Depths(np.roll([0.5, 0.2, 0.2, 0.1, *[0.0] * (LAYERS - 4)], by)) for by in (0, 3, LAYERS - 1))]
RANKS = [RankRates([[[rate, 0.2]] * 3]) for rate in (0.0, 0.3, 0.8)]
CLASSES = [RankRates([[[rate, 0.2]] * 3, [[0.2, 0.1], [0.1, 0.0], [0.9, 0.1]]], [0.3, 0.7]) for rate in (0.4, 0.7)]
BY_SEQUENCE = [RankRates(law.rates, weights, by_sequence=True) for law, weights in zip(CLASSES, ([1, 0], [0.2, 0.8]), strict=True)]
GROWING = {"shape": "eagle-2", "draft_depth": 3, "width": 2, "nodes": 4, "rank_rates": (((0.5, 0.3),) * 3, ((0.3, 0.2),) * 3)}
LOOKUPS = [Lookups.of_rates(hits, 0.6, 4) for hits in (0.0, 0.4, (0.2, 0.7), 1.0)]
DECISIONS = [Independent(0.0, 0.0), Independent(0.2, 0.1), Independent(1.0, 0.0), Independent(0.3, 1.0)]
ACCEPTANCE = [Iid(0.0), Iid(0.6), Iid(1.0), Markov(0.5, 0.4), ByPosition([0.1, 0.9] * 20), Rounds([0.9, 0.5, 0.5, 0.1, 0.0])]
DOUBTED = [{"accept": law, "confidence": TwoClass(0.2, 0.7)} for law in ACCEPTANCE[:5]]
INDEPENDENT = [Iid(0.0), Iid(0.3), Rounds([0.9, 0.5, 0.5, 0.1, 0.0]), Iid(1.0)]
EXAMPLES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("autoregressive", {}, [None, None]),
    ("bild", {"draft_layers": 3, "max_draft_length": 3}, DECISIONS),
    ("bild", {"draft_layers": 3, "max_draft_length": 5, "variant": "code", "placement": "separate"}, DECISIONS),
    ("bild", {"exit_layer": 4, "max_draft_length": 2}, DECISIONS),
    ("ppd", {"exit_layer": 6, "candidates": 3}, MATCHES),
    ("ppd", {"exit_layer": 12, "candidates": 2, "batched": True}, MATCHES),
    ("ppd", {"exit_layer": 8, "candidates": 1, "form": "flat"}, MATCHES),
    ("early_exit", {}, DEPTHS),
    ("early_exit", {"measure": "state", "first_check": 2}, DEPTHS),
    ("early_exit", {"exit_layer": 5}, [None]),
    ("skipdecode", {"prompt": 4, "sequence_length": 50, "min_layers": 2, "max_layers": 12}, [None, None]),
    ("adaptive", {"policy": "heuristic", "draft_length": 2, "max_draft_length": 4, "draft_layers": 3}, [*ACCEPTANCE[:5], RECORDED]),
    ("adaptive", {"policy": "confidence", "max_draft_length": 5}, DOUBTED),
    ("speculative", {"draft_length": 0}, ACCEPTANCE),
    ("speculative", {"draft_length": 3, "draft_layers": 2}, ACCEPTANCE),
    ("speculative", {"draft_length": 5, "context_budget": 4}, INDEPENDENT),
    ("speculative", {"draft_length": 4, "sequences": 4}, ACCEPTANCE),
    ("speculative", {"draft_length": 3, "draft_layers": 2, "sequences": 4, "batching": "static"}, ACCEPTANCE),
    ("speculative", {"draft_length": 5, "sequences": 2, "batching": "static"}, INDEPENDENT),
    ("speculative", {"draft_length": 0, "sequences": 3, "batching": "static"}, [Iid(0.5)]),
    ("speculative", {"draft_length": 3, "drafter": "heads"}, ACCEPTANCE),
    ("speculative", {"draft_length": 2, "drafter": "heads", "sequences": 2}, INDEPENDENT),
    ("speculative", {"draft_length": 5, "drafter": "parallel"}, INDEPENDENT),
    ("self_speculative", {"exit_layer": 4, "draft_length": 3}, ACCEPTANCE),
    ("self_speculative", {"exit_layer": 4, "draft_length": 5, "reuse": False}, INDEPENDENT),
    ("skipdecode", {"prompt": 1, "sequence_length": 41, "min_layers": 5, "max_layers": 5, "warm_up": 2}, [None]),
    ("tree", {"shape": "full", "draft_depth": 2, "width": 2}, RANKS),
    ("tree", {"shape": "full", "draft_depth": 3, "width": 2, "context_budget": 5}, [*RANKS, RANKS[0]]),
    ("tree", {"shape": "full", "draft_depth": 3, "width": 2, "sequences": 4}, RANKS),
    ("tree", {"shape": "listed", "parents": (-1, -1, 0, 1, 2), "drafter": "parallel"}, RANKS),
    ("tree", {**GROWING, "drafter": "heads"}, CLASSES),
    ("tree", GROWING, BY_SEQUENCE),
    ("ngram", {"draft_length": 4}, LOOKUPS),
    ("ngram", {"draft_length": 4, "sequences": 3}, LOOKUPS),
    ("ngram", {"draft_length": 6}, [Lookups([0.3, 0.2], [1, 5], [[0.5], [0.9, 0.8, 0.3, 0.3, 0.1]])]),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True))
@example([1, 9])
@settings(max_examples=examples(10, 100), deadline=None)
def test_lengths_together_are_lengths_alone(example: tuple[str, dict[str, Any], list[Any]], lengths: list[int]) -> None:
    name, table, laws = example
    method, rising = registry.method(name), np.array(sorted(lengths))
    parameters = method.kind(layers=LAYERS, **table)
    assert method.work_of_lengths is not None
    together = method.work_of_lengths(parameters, rising, laws)
    for place, law in enumerate(laws):
        for number, tokens in enumerate(rising.tolist()):
            found, alone = together.at((place, number)), method.expected_work(parameters, tokens, _listed(law), UnitCost(LAYERS))
            assert alone is not None
            assert found.adoptions == pytest.approx(alone.adoptions, rel=1e-12, abs=1e-12)
            assert found.adopted_rows == pytest.approx(alone.adopted_rows, rel=1e-12, abs=1e-12)
            assert ([*found.by_model], [*alone.by_model]) == (_roles(parameters, int(rising[-1])), _roles(parameters, tokens))
            for role, totals in found.by_model.items():
                assert [*totals] == pytest.approx(
                    [*alone.by_model.get(role, NOTHING)], rel=1e-12, abs=1e-12, nan_ok=True
                )


def _roles(parameters: Any, tokens: int) -> list[str]:
    """Models that make passes: a single token needs no draft, unless drafts are not cut."""
    drafts = parameters.roles and parameters.longest_draft and (tokens > 1 or not getattr(parameters, "cut", True))
    return ["target", "draft"] if drafts else ["target"]


def test_work_of_sequences_of_several_classes_is_the_mean_of_their_work() -> None:
    """Classes have trees of other depths and other numbers of rounds, so a mean of products is not a product of means."""
    tree = registry.method("tree")
    parameters = tree.kind(layers=LAYERS, **{**GROWING, "rank_rates": (((0.9, 0.05),) * 3, ((0.3, 0.28),) * 3)})
    rates, weights = [[[0.8, 0.1]] * 3, [[0.2, 0.1]] * 3], [0.25, 0.75]
    found = tree.expected_work(parameters, 40, RankRates(rates, weights, by_sequence=True), UnitCost(LAYERS))
    each = [tree.expected_work(parameters, 40, RankRates(rates, one), UnitCost(LAYERS)) for one in ([1, 0], [0, 1])]
    assert found is not None
    for role, totals in found.by_model.items():
        own = np.array([work.by_model[role] for work in each if work is not None])
        assert [*totals] == pytest.approx((np.array(weights) @ own).tolist(), rel=1e-12)


def test_a_single_token_has_no_draft() -> None:
    bild = registry.method("bild")
    assert bild.work_of_lengths is not None
    assert bild.work is not None
    for parameters in (bild.kind(layers=LAYERS, draft_layers=3), bild.kind(layers=LAYERS, exit_layer=4)):
        for work in (bild.work_of_lengths(parameters, np.array([1]), DECISIONS), bild.work(parameters, 1, DECISIONS[1])):
            assert work is not None
            assert [*work.by_model] == ["target"]


def _listed(law: Any) -> Any:
    """Decisions with rates by position, of which each number of tokens is counted position by position; other laws as they are."""
    return Independent([law.fallback_rate] * 40, [law.rollback_rate] * 40) if isinstance(law, Independent) else law


def test_positions_that_differ_have_no_lengths_together() -> None:
    method = registry.method("early_exit")
    by_position = Depths(np.full((40, LAYERS), 1 / LAYERS))
    assert method.work_of_lengths is not None
    assert method.work_of_lengths(method.kind(layers=LAYERS), np.array([2, 5]), [*DEPTHS, by_position]) is None
    assert method.work_of_lengths(method.kind(layers=LAYERS, fill="backfill"), np.array([2, 5]), DEPTHS) is None
    bild = registry.method("bild")
    assert bild.work_of_lengths is not None
    changing = Independent([0.2] * 40, [0.1] * 40)
    assert bild.work_of_lengths(bild.kind(layers=LAYERS), np.array([2, 5]), [*DECISIONS, changing]) is None
    nested = registry.method("ppd").kind(layers=LAYERS, exit_layer=3, candidates=2, form="nested")
    assert theory.work_of_lengths(nested, np.array([2, 5]), MATCHES) is None


def test_work_of_laws_beyond_a_block_is_that_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, table, laws in (("tree", GROWING, CLASSES), ("ngram", {"draft_length": 4}, LOOKUPS)):
        method, lengths = registry.method(name), np.array([2, 7, 19])
        parameters = method.kind(layers=LAYERS, **table)
        assert method.work_of_lengths is not None
        whole = method.work_of_lengths(parameters, lengths, laws)
        with monkeypatch.context() as patch:
            patch.setattr(tree_theory, "_DECODINGS", 3)
            patch.setattr(ngram_theory, "_CELLS", 1)
            parts = method.work_of_lengths(parameters, lengths, laws)
        for model, totals in whole.by_model.items():
            for ours, expected in zip(parts.by_model[model], totals, strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-13)


def test_records_of_lookups_have_no_work() -> None:
    method, records = registry.method("ngram"), ReplayedLookups([[2, 0]], [[1, 0]])
    parameters = method.kind(layers=LAYERS, draft_length=4)
    assert method.work_of_lengths is not None
    assert method.work_of_lengths(parameters, np.array([1, 2]), [*LOOKUPS, records]) is None
    assert method.work_of_lengths(parameters, np.array([1, 2]), [LOOKUPS[0], Lookups.of_rates(0.5, 0.5, 3)]) is None
def test_records_have_no_lengths_together() -> None:
    for name, table in (("speculative", {}), ("self_speculative", {"exit_layer": 4})):
        method = registry.method(name)
        assert method.work_of_lengths is not None
        parameters = method.kind(layers=LAYERS, draft_length=2, **table)
        assert method.work_of_lengths(parameters, np.array([2, 5]), [*ACCEPTANCE, RECORDED]) is None


def test_rounds_of_several_lengths_are_counted_by_their_passes() -> None:
    """Drafts of two tokens, cut to one and to none at the end, are all accepted: rounds start at 0, 3, 6."""
    parameters = registry.method("speculative").kind(layers=LAYERS, draft_length=2, draft_layers=3)
    totals = speculative.work_of_lengths(parameters, np.array([1, 2, 3, 5, 7]), [Iid(1.0)])
    assert totals is not None
    assert np.asarray(totals.by_model["target"].heads).tolist() == [[1, 2, 3, 5, 7]]
    assert np.asarray(totals.by_model["target"].passes).tolist() == [[1, 1, 1, 2, 3]]
    # The round at 3 also reads the last drafted token of the one before.
    assert (np.asarray(totals.by_model["draft"].layer_passes) / 3).tolist() == [[0, 1, 2, 2 + 1 + 1, 2 + 2 + 1]]


def test_a_sequence_of_several_lengths_is_counted_by_its_passes() -> None:
    """One token runs 12 layers, or after a match the 6 from the exit on; 3 candidates run 6 layers ahead for each token."""
    parameters = registry.method("ppd").kind(layers=LAYERS, exit_layer=6, candidates=3)
    totals = theory.work_of_lengths(parameters, np.array([1, 2, 5]), [Iid(0.0), Iid(1.0)])
    assert totals is not None
    assert np.asarray(totals.by_model["target"].layer_passes).tolist() == [[30, 60, 150], [30, 54, 126]]
