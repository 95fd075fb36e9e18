"""Bounds of claimed speed-ups: no prediction exceeds them, they are attained, and more information never raises them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.methods import registry
from model.methods.bild.threshold_decisions import Independent
from model.methods.claim_bounds import NO_DRAFT, TERMS, ClaimTerms, Term, drafting_bound, selective_bound
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.early_exit.theory import exit_pmf
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, TwoClass
from model.outcomes.position_ranks import PositionRankRates, RecordedPositionRanks

ROUNDING = 1e-9
few = settings(max_examples=60, deadline=None)
rates = st.one_of(st.just(0.0), st.floats(1e-9, 1))
ratios = st.one_of(st.just(0.0), st.floats(0, 1.5))
lengths = st.integers(1, 8)
counts = st.integers(1, 60)


def speedup(found: Any) -> float:
    return float(found.plain_latency / found.latency)


def predicted(name: str, *arguments: Any) -> Any:
    return registry.method(name).predict(*arguments)


def parameters(name: str, *values: Any, **named: Any) -> Any:
    return registry.parameters(name)(*values, **named)


def most(name: str, **terms: float) -> float:
    method = registry.method(name)
    assert method.claim_bound is not None
    return method.claim_bound(ClaimTerms(terms)).value


@st.composite
def growing(draw: st.DrawFn, widest: int) -> list[tuple[int, float]]:
    """Times of passes that never fall with their width."""
    steps = draw(st.lists(st.floats(0, 0.5), min_size=widest - 1, max_size=widest - 1))
    return [(width, float(time)) for width, time in enumerate(1 + np.cumsum([0.0, *steps]), 1)]


# --- No prediction exceeds the bound of its method ---


@given(data=st.data(), rate=rates, length=lengths, cost=ratios, tokens=counts)
@few
def test_speculative_decoding_of_any_length_stays_below_its_bound(
    data: st.DataObject, rate: float, length: int, cost: float, tokens: int
) -> None:
    curve = data.draw(growing(length + 1))
    found = predicted(
        "speculative", parameters("speculative", 8, length), tokens, Iid(rate), UnitCost(8, cost_ratio=cost, verify_cost=curve)
    )
    stated = {"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost}
    assert speedup(found) <= most("speculative", **stated) * (1 + ROUNDING)


@given(data=st.data(), length=lengths, cost=ratios, tokens=counts)
@few
def test_no_law_of_acceptances_exceeds_the_bound_of_its_acceptance_length(
    data: st.DataObject, length: int, cost: float, tokens: int
) -> None:
    law = data.draw(st.one_of(
        st.builds(Markov, st.floats(0.05, 0.95), st.floats(0, 0.9)),
        st.lists(rates, min_size=tokens, max_size=tokens).map(ByPosition),
    ))  # fmt: skip
    found = predicted("speculative", parameters("speculative", 8, length), tokens, law, UnitCost(8, cost_ratio=cost))
    stated = {"mean_acceptance_length": tokens / float(found.rounds), "draft_length": length, "cost_ratio": cost}
    assert speedup(found) <= most("speculative", **stated) * (1 + ROUNDING)


@given(rate=rates, longest=lengths, cost=ratios, tokens=counts)
@few
def test_adaptive_drafts_stay_below_their_bound(rate: float, longest: int, cost: float, tokens: int) -> None:
    method = parameters("adaptive", 8, "heuristic", longest, draft_length=1)
    found = predicted("adaptive", method, tokens, Iid(rate), UnitCost(8, cost_ratio=cost))
    assert speedup(found) <= most("adaptive", acceptance_rate=rate, draft_length=longest, cost_ratio=cost) * (1 + ROUNDING)


@given(rate=rates, longest=lengths, cost=ratios, tokens=counts)
@few
def test_drafts_that_stop_before_every_rejection_stay_below_the_bound_of_adaptive_drafts(
    rate: float, longest: int, cost: float, tokens: int
) -> None:
    """Low confidence predicts each rejection; the rejected token itself is still verified."""
    method = parameters("adaptive", 8, "confidence", longest)
    laws = {"accept": Iid(rate), "confidence": TwoClass(0.0, 1.0)}
    found = predicted("adaptive", method, tokens, laws, UnitCost(8, cost_ratio=cost))
    assert speedup(found) <= most("adaptive", acceptance_rate=rate, draft_length=longest, cost_ratio=cost) * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("name", "terms", "expected"),
    [
        ("adaptive", {"acceptance_rate": 0.5, "cost_ratio": 0.5}, 1 / (0.5 + 0.25)),
        ("adaptive", {"acceptance_rate": 0.5, "draft_length": 2}, 2),
        ("adaptive", {"acceptance_rate": 0.9, "draft_length": 2}, 3),
        ("pearl", {"acceptance_rate": 0.75}, 4),
        ("pearl", {"acceptance_rate": 0.75, "draft_length": 3}, 3),
        ("pearl", {"acceptance_rate": 0.8, "cost_ratio": 0.5}, 2),
        ("pearl", {"cost_ratio": 2.0}, 1),
        ("ssd", {"acceptance_rate": 0.75}, 4),
        ("ssd", {"draft_length": 3}, 4),
        ("ssd", {"acceptance_rate": 1.0, "draft_length": 9, "cost_ratio": 0.5}, 2),
        ("ssd", {"acceptance_rate": 0.5, "draft_length": 9, "cost_ratio": 0.4}, 1.75),  # 1.5 tested tokens per round
        ("ssd", {"mean_acceptance_length": 2.5, "draft_length": 9}, 2.5),
        ("ssd", {"cost_ratio": 2.0}, 1),
        ("hierarchical", {"draft_length": 3}, 5),
        ("hierarchical", {"acceptance_rate": 0.5, "draft_length": 3}, 2),
        ("bild", {"fallback_rate": 0.25}, 1 + 0.75 * 4),
        ("bild", {"fallback_rate": 0.25, "rollback_rate": 0.5, "draft_length": 2, "cost_ratio": 0.25}, (1 + 0.375 * 2) / 1.5),
        ("ppd", {"match_rate": 0.5, "layers": 40, "exit_layer": 20}, 4 / 3),
        ("beam", {"draft_acceptance_rate": 0.5, "draft_length": 4}, 3),
    ],
)
def test_bounds_by_hand(name: str, terms: dict[str, float], expected: float) -> None:
    assert most(name, **terms) == pytest.approx(expected)


@given(rate=rates, length=lengths, cost=ratios, tokens=counts, stop=st.sampled_from(["round", "rejection"]))
@few
def test_pearl_stays_below_its_bound(rate: float, length: int, cost: float, tokens: int, stop: str) -> None:
    method = parameters("pearl", 8, length, draft_stop=stop)
    found = predicted("pearl", method, tokens, Iid(rate), UnitCost(8, cost_ratio=cost))
    assert speedup(found) <= most("pearl", acceptance_rate=rate, draft_length=length, cost_ratio=cost) * (1 + ROUNDING)


@given(data=st.data(), rate=rates, length=st.integers(1, 5), fan_out=st.integers(1, 4), cost=ratios, tokens=counts,
       backup=st.sampled_from(["draft", "none"]))  # fmt: skip
@few
def test_prepared_drafts_stay_below_their_bound(
    data: st.DataObject, rate: float, length: int, fan_out: int, cost: float, tokens: int, backup: str
) -> None:
    """With every outcome prepared and with few; rates by rank and recorded ranks, whose accepted length is stated."""
    method, exponent = parameters("ssd", 8, length, fan_out, backup), data.draw(st.floats(0, 50))
    costs = UnitCost(8, cost_ratio=cost, link=data.draw(st.sampled_from([0.0, 1.0])))
    found = predicted("ssd", method, tokens, PositionRankRates.power_law(rate, exponent, fan_out + 1), costs)
    stated = {"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost}
    assert speedup(found) <= most("ssd", **stated) * (1 + ROUNDING)
    records = data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))
    found = predicted("ssd", method, tokens, RecordedPositionRanks([records]), costs)
    stated = {"mean_acceptance_length": tokens / float(found.rounds), "draft_length": length, "cost_ratio": cost}
    assert speedup(found) <= most("ssd", **stated) * (1 + ROUNDING)


@given(rate=rates, length=lengths, cost=ratios)
@few
def test_the_formula_of_prepared_drafts_is_below_their_bound(rate: float, length: int, cost: float) -> None:
    method, terms = registry.method("ssd"), ClaimTerms({"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost})
    assert method.claim_formula is not None
    assert method.claim_formula(terms).value <= most("ssd", **terms.values) * (1 + 1e-7)


@given(rate=rates, inner=rates, length=lengths, cost=ratios, medium=st.floats(0.01, 1), tokens=counts,
       reading=st.sampled_from(["literal", "reuse", "bonus"]))  # fmt: skip
@few
def test_three_models_stay_below_their_bound(
    rate: float, inner: float, length: int, cost: float, medium: float, tokens: int, reading: str
) -> None:
    costs = UnitCost(8, cost_ratio=cost, medium_cost_ratio=max(medium, cost))
    laws = {"accept": Iid(rate), "medium_accept": Iid(inner)}
    found = predicted("hierarchical", parameters("hierarchical", 8, length, reading), tokens, laws, costs)
    assert speedup(found) <= most("hierarchical", acceptance_rate=rate, draft_length=length) * (1 + ROUNDING)


@given(rate=rates, length=st.integers(1, 4), beams=st.integers(1, 3), cost=ratios, tokens=st.integers(1, 20))
@few
def test_beams_stay_below_their_bound(rate: float, length: int, beams: int, cost: float, tokens: int) -> None:
    found = predicted("beam", parameters("beam", 8, length, beams), tokens, Iid(rate), UnitCost(8, cost_ratio=cost))
    assert speedup(found) <= most("beam", acceptance_rate=rate, draft_length=length, cost_ratio=cost) * (1 + ROUNDING)


@given(data=st.data(), rate=rates, tokens=counts, form=st.sampled_from(["literal", "eager", "flat", "nested"]))
@few
def test_ppd_stays_below_its_bound(data: st.DataObject, rate: float, tokens: int, form: str) -> None:
    exit_layer = data.draw(st.integers(4 if form in ("literal", "eager") else 2, 8))
    head = 0.0 if form == "nested" else data.draw(st.floats(0, 2))
    costs = UnitCost(8, early_head=head, final_head=head, dispatch=0.0 if form == "nested" else data.draw(st.floats(0, 2)))
    found = predicted("ppd", parameters("ppd", 8, exit_layer, 2, form), tokens, Iid(rate), costs)
    stated = {"match_rate": rate, "layers": 8, "exit_layer": exit_layer}
    assert speedup(found) <= most("ppd", **stated) * (1 + ROUNDING)
    assert most("ppd", **stated) <= most("ppd", match_rate=rate) * (1 + ROUNDING)


@given(fallback=rates, rollback=rates, length=lengths, cost=ratios, tokens=counts, variant=st.sampled_from(["paper", "code"]))
@few
def test_bild_stays_below_its_bound(
    fallback: float, rollback: float, length: int, cost: float, tokens: int, variant: str
) -> None:
    method, law = parameters("bild", 8, length, variant=variant), Independent(fallback, rollback)
    found = predicted("bild", method, tokens, law, UnitCost(8, cost_ratio=cost))
    stated = {"fallback_rate": fallback, "rollback_rate": rollback, "draft_length": length, "cost_ratio": cost}
    assert speedup(found) <= most("bild", **stated) * (1 + ROUNDING)


@given(data=st.data(), tokens=counts, head=st.floats(0, 3))
@few
def test_skipped_layers_stay_below_their_bound(data: st.DataObject, tokens: int, head: float) -> None:
    low = data.draw(st.integers(1, 8))
    method = parameters("skipdecode", 8, low, data.draw(st.integers(low, 8)), 5, 5 + tokens)
    found = predicted("skipdecode", method, tokens, None, UnitCost(8, final_head=head))
    work = registry.method("skipdecode").work
    assert work is not None
    mean = work(method, tokens, None).by_model["target"].layer_passes / tokens
    assert speedup(found) <= most("skipdecode", layers=8, mean_layers=mean) * (1 + ROUNDING)
    hazards = data.draw(st.lists(rates, min_size=8, max_size=8))
    law, costs = Depths(exit_pmf(hazards)), UnitCost(8, early_head=head, final_head=head)
    found = predicted("early_exit", parameters("early_exit", 8), tokens, law, costs)
    mean = float(exit_pmf(hazards) @ np.arange(1.0, 9.0))
    assert speedup(found) <= most("early_exit", layers=8, mean_layers=mean) * (1 + ROUNDING)


# --- The bounds are attained, and information never raises them ---


@given(length=lengths, tested=st.floats(0, 1), cost=st.floats(0, 0.9))
@few
def test_rejections_at_the_last_position_alone_attain_the_bound(length: int, tested: float, cost: float) -> None:
    """All drafts are tested whole: the first K - 1 tokens are always accepted, the last with probability `tested`."""
    rate = (length - 1 + tested) / length
    reached = (length + tested) / (1 + cost * length)
    assert drafting_bound(ClaimTerms({"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost})).value == pytest.approx(
        max(reached, 1.0) if rate <= cost else reached
    )


@given(rate=st.floats(0.01, 0.99), cost=st.floats(0, 1))
@few
def test_the_bound_of_selective_drafts_is_that_of_the_oracle(rate: float, cost: float) -> None:
    terms = ClaimTerms({"acceptance_rate": rate, "cost_ratio": cost})
    assert selective_bound(terms).value == pytest.approx(float(speculative.oracle_speedup(rate, cost)), rel=1e-5)


@given(rate=rates, length=lengths, cost=ratios)
@few
def test_the_formula_is_theorem_3_8_and_below_the_bound(rate: float, length: int, cost: float) -> None:
    terms = ClaimTerms({"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost})
    formula = speculative.claim_formula(terms).value
    assert formula == pytest.approx(float(speculative.speedup(rate, length, cost)))
    assert formula <= drafting_bound(terms).value * (1 + ROUNDING)


def random_terms(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, float]]:
    values = {name: st.integers(1, 9).map(float) if TERMS[name].high > 100 and name != "mean_layers" else
              st.floats(TERMS[name].low, min(TERMS[name].high, 8.0)) for name in names}  # fmt: skip
    return st.fixed_dictionaries({}, optional=values)


@given(data=st.data(), name=st.sampled_from([name for name in registry.names() if registry.parameters(name).CLAIMS]))
@few
def test_a_bound_never_rises_with_what_is_stated(data: st.DataObject, name: str) -> None:
    rule, method = registry.parameters(name).CLAIMS, registry.method(name)
    assert rule is not None
    assert method.claim_bound is not None
    terms = data.draw(random_terms(rule.terms))
    for bound in filter(None, (method.claim_bound, method.claim_formula)):
        everything = bound(ClaimTerms(terms)).value
        assert everything > 0
        for left_out in terms:
            if left_out in rule.required:
                continue
            fewer = bound(ClaimTerms({key: value for key, value in terms.items() if key != left_out})).value
            if bound is method.claim_bound and left_out != "draft_passes":
                assert everything <= fewer * (1 + 1e-6), left_out


@given(length=st.integers(1, 6), slope=st.floats(0, 2), cost=ratios, rate=rates)
@few
def test_the_best_of_all_numbers_of_tested_tokens_is_found(length: int, slope: float, cost: float, rate: float) -> None:
    def verify(width: float) -> float:
        return max(1.0, slope * width)

    terms = ClaimTerms({"acceptance_rate": rate, "draft_length": length, "cost_ratio": cost}, verify)
    most_tested = min(length, math.inf if rate == 1 else 1 / (1 - rate))
    tested = np.linspace(0, most_tested, 2001)
    speeds = (1 + rate * tested) / (np.array([verify(1 + each) for each in tested]) + cost * tested)
    assert speeds.max() <= drafting_bound(terms).value * (1 + 1e-7)
    assert drafting_bound(terms).value <= speeds.max() * (1 + 1e-2)


# --- What the methods say ---


def test_every_method_says_what_its_claims_state() -> None:
    for name in registry.names():
        rule = registry.parameters(name).CLAIMS
        assert rule is not None, name
        assert registry.method(name).claim_bound is not None
        assert {*rule.required, *rule.readings, *(each for group in rule.needs for each in group)} <= {*rule.terms}
        assert {*rule.terms, *rule.readings.values()} <= {*TERMS}
        assert {*rule.names.values()} <= {"", NO_DRAFT, "eagle", "eagle3", "p-eagle", "mtp", "medusa"}


def test_the_ends_of_a_term() -> None:
    assert (TERMS["acceptance_rate"].best, TERMS["acceptance_rate"].worst) == (1, 0)
    assert (TERMS["cost_ratio"].best, TERMS["cost_ratio"].worst) == (0, 100)
    assert Term("count", "", 0, 9, 0).best == math.inf
