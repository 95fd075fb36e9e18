"""N-gram drafts: formulas against fractions, prices of passes, laws of lookups, lookups in logs, claims, refusals."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures import published_shapes
from model.audit import reported_names
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import PassShape, StepCosts
from model.engines import law_costs, step_law
from model.hardware import devices
from model.hardware.roofline import Roofline
from model.interpret.text_lookup import along
from model.logs import position_log, text_lookups
from model.methods.claim_bounds import ClaimTerms
from model.methods.ngram import lookup_rounds, theory
from model.methods.ngram.algorithm import Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.proposals import Known
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.worlds import world_of, worlds
from model.outcomes import lookup_laws
from model.outcomes.lookup_laws import LookupDraft, LookupOutcome, Lookups, ReplayedLookups, draft_of
from model.outcomes.random_streams import BLOCK, tiles
from model.steps import LayerSpan
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.exact import RATES, assert_work_of_each, close
from tests.support.tiers import examples

CURVE = ((1, 1.0), (4, 1.75), (9, 3.0))
OUTCOMES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: LookupDraft(max(pair), min(pair)))


# --- Formulas ---


@given(RATES, RATES, st.integers(1, 8))
def test_speedup_is_tokens_over_the_time_of_a_round(hits: float, rate: float, length: int) -> None:
    h, alpha = Fraction(hits), Fraction(rate)
    wide = Fraction(str(float(np.interp(length + 1, *zip(*CURVE, strict=True)))))
    tokens = 1 + h * sum((alpha**count for count in range(1, length + 1)), Fraction(0))
    assert close(theory.speedup(hits, rate, length, verify_cost=CURVE), tokens / (1 - h + h * wide))


@given(RATES, RATES, RATES, st.integers(1, 5))
def test_stationary_share_of_rounds_after_acceptance(low: float, high: float, rate: float, length: int) -> None:
    """The distribution of the round before is that of the round itself."""
    law = Lookups.of_rates([low, high], rate, length)
    share = theory.round_means(law).after_acceptance
    accepted = np.array([low, high]) * (rate if length else 0)
    assert (1 - share) * accepted[0] + share * accepted[1] == pytest.approx(share, abs=1e-9)


def test_pays_at_every_rate_of_matches_or_at_none() -> None:
    for rate, length in itertools.product((0.1, 0.3, 0.6, 0.9), (1, 3, 8)):
        faster = {float(theory.speedup(hits, rate, length, verify_cost=CURVE)) > 1 for hits in (0.01, 0.3, 1.0)}
        assert faster == {bool(theory.pays(rate, length, verify_cost=CURVE))}


# --- Prices ---


def roofline() -> PassSeconds:
    shape = published_shapes.named_shape("llama-2-7b")
    return PassSeconds({"target": Roofline.on_device(shape, devices.device("a100"))}, prompt=100)


def by_law() -> PassSeconds:
    return law_costs.with_law(roofline(), step_law.load("vllm-llama-3.1-8b-eagle3-h100"))


@pytest.mark.parametrize("cost", [roofline(), by_law()], ids=["roofline", "engine law"])
def test_a_round_costs_the_pass_over_its_own_draft(cost: StepCosts) -> None:
    """At every drafted length, and a plain pass without a match: a law of an engine's steps is asked at each."""
    found = theory.round_prices(Parameters(32, 3), cost, tokens=6).time[0]
    for start, drafted in itertools.product(range(6), range(4)):
        shape = PassShape(LayerSpan(0, 32), width=drafted + 1, heads=drafted + 1)
        assert found[start, drafted] == pytest.approx(float(cost.times(shape, start)), rel=1e-12)
    assert found[:, 0] == pytest.approx([float(cost.plain_times(start)) for start in range(6)])
    assert (np.diff(found, axis=1) > 0).all()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(OUTCOMES, OUTCOMES), min_size=1, max_size=9), st.sampled_from(["roofline", "law"]))
def test_views_agree_on_hardware(outcomes: list[tuple[LookupDraft, LookupDraft]], kind: str) -> None:
    cost, method, tokens = roofline() if kind == "roofline" else by_law(), Parameters(32, 9), len(outcomes)
    words = [LookupOutcome(*each).packed for each in outcomes]
    run = simulate(decode(method, [0], tokens), tokens, Cluster(1), cost, world_of(method, 1, {"lookup": words}))
    prices = theory.round_prices(method, cost, tokens=tokens)
    tally = lookup_rounds.walk(tokens, iter([np.array(words)[:, None]]), prices, 1)
    assert run.latency == pytest.approx(float(tally.time[0]), rel=1e-12)
    start, before, total = 0, False, 0.0
    while start < tokens:
        drafted, accepted = (min(each, tokens - 1 - start) for each in outcomes[start][before])
        total += prices.time[0, start, drafted]
        start, before = start + 1 + accepted, accepted > 0
    assert run.latency == pytest.approx(total, rel=1e-12)


# --- Laws ---


@given(OUTCOMES, OUTCOMES, st.booleans())
def test_an_outcome_is_held_in_one_number(usual: LookupDraft, repeating: LookupDraft, accepted: bool) -> None:
    number = LookupOutcome(usual, repeating).packed
    assert draft_of(number, accepted) == (repeating if accepted else usual)
    found = lookup_laws.outcomes_after(np.array([accepted]), np.array([number]))
    assert (int(found[0][0]), int(found[1][0])) == draft_of(number, accepted)


def test_the_longest_draft_fits_into_a_number() -> None:
    assert Parameters(1, 250).draft_length <= lookup_laws.MOST
    most = LookupDraft(lookup_laws.MOST, lookup_laws.MOST)
    assert draft_of(LookupOutcome(most, LookupDraft(0, 0)).packed, False) == most
    assert draft_of(LookupOutcome(LookupDraft(0, 0), most).packed, True) == most


LAW = Lookups([[0.2, 0.1], [0.3, 0.5]], [2, 4], [[0.5, 0.4], [0.9, 0.8, 0.7, 0.6]])


def test_draws_have_the_probabilities_of_the_law() -> None:
    rows = np.concatenate([tile.copy() for tile in LAW.sample(tiles(0, "lookup", 0, 100))])
    for state in (0, 1):
        drafted, accepted = lookup_laws.outcomes_after(np.full(rows.shape, bool(state)), rows)
        for number, kept, chance in zip(LAW.cells.drafted, LAW.cells.accepted, LAW.cells.chance[state], strict=True):
            seen = float(((drafted == number) & (accepted == kept)).mean())
            assert seen == pytest.approx(chance, abs=5 * np.sqrt(chance * (1 - chance) / rows.size) + 1e-12)
    assert LAW.cells.chance.sum(axis=1) == pytest.approx([1, 1])


@given(RATES, RATES, RATES, st.integers(1, 6))
def test_a_higher_acceptance_never_accepts_less(hits: float, one: float, other: float, length: int) -> None:
    draws = np.random.default_rng(0).random((4, 50))
    low, high = (Lookups.of_rates(hits, rate, length) for rate in sorted((one, other)))
    kept = [lookup_laws.outcomes_after(np.zeros((4, 50), bool), next(law.sample(iter([draws]))))[1] for law in (low, high)]
    assert (kept[0] <= kept[1]).all()


def test_records_are_replayed_and_longer_decodings_refused() -> None:
    law = ReplayedLookups([[2, 0, 1], [0, 3, 0]], [[1, 0, 1], [0, 2, 0]])
    draws = np.array([[0.2, 0.7]] * 3)
    drafted, accepted = lookup_laws.outcomes_after(np.zeros((3, 2), bool), next(law.sample(iter([draws]))))
    assert drafted.T.tolist() == [[2, 0, 1], [0, 3, 0]]
    assert accepted.T.tolist() == [[1, 0, 1], [0, 2, 0]]
    with pytest.raises(ParameterError, match="records must cover 4 output positions, got 3; give longer records or fewer tokens"):
        next(law.sample(iter([np.zeros((4, 2))])))


def test_the_formula_of_records_is_their_mean() -> None:
    law, cost, method = ReplayedLookups([[2, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0]]), UnitCost(2), Parameters(2, 2)
    found = theory.predict(method, 3, law, cost)
    assert (float(found.latency), float(found.latency_variance), float(found.rounds)) == (5.0, 1.0, 2.5)  # type: ignore[arg-type]
    assert theory.work(method, 3, law) is None


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (([0.5, 0.6], [1, 1], [[0.5], [0.5]]), r"chances must sum to at most 1, got 1\.1"),
        (([0.5], [1, 1], [[0.5], [0.5]]), "one entry for each kind of match, got 1, 2 and 2"),
        (([0.5], [0], [[]]), r"drafted\[0\] must be between 1 and 1023, got 0"),
        (([0.5], [2], [[0.5]]), r"survival\[0\] must be 2 non-increasing probabilities"),
        (([0.5], [2], [[0.5, 0.6]]), r"survival\[0\] must be 2 non-increasing probabilities"),
        (([1.5], [1], [[0.5]]), r"chances\[0\] must be between 0 and 1, got 1\.5"),
    ],
)
def test_impossible_laws_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Lookups(*given_)


def test_simulated_lookups_of_paths_and_worlds_are_the_same_draws() -> None:
    method = Parameters(2, 4)
    rows = np.concatenate([tile.copy() for tile in LAW.sample(tiles(3, "lookup", 0, 9))])
    for index, world in enumerate(worlds(method, 1, 9, {"lookup": LAW}, 3, range(5))):
        assert [*world.lookups] == rows[:, index].tolist()
    assert rows.shape[1] == BLOCK


# --- Lookups in logs ---


def test_played_rounds_of_a_log_are_those_of_its_replay() -> None:
    log = position_log.bundled()
    found = text_lookups.of_log(log, 1, 3, 5)
    rounds = text_lookups.played(found)
    law = ReplayedLookups([each.drafted for each in found], [each.accepted for each in found])
    replayed = theory.predict(Parameters(12, 5, max_match=3), 64, law, UnitCost(12))
    assert len(rounds.match) == pytest.approx(float(replayed.rounds) * len(found))  # type: ignore[arg-type]
    assert rounds.drafted.sum() == pytest.approx(float(replayed.drafted) * len(found))  # type: ignore[arg-type]
    assert rounds.tokens_per_round == pytest.approx(64 / float(replayed.rounds))  # type: ignore[arg-type]


def test_counted_rates_are_those_of_the_rounds() -> None:
    rounds = text_lookups.played(text_lookups.of_log(position_log.bundled(), 1, 3, 4))
    counts = text_lookups.counted(rounds, 4)
    assert counts.lengths == [1, 2, 3]
    left_out = (rounds.drafted == 0) & ~rounds.whole  # cut to nothing at the end of a text
    assert counts.rounds.sum() == (~left_out).sum()
    for index, length in enumerate(counts.lengths):
        own = (rounds.match == length) & (rounds.drafted > 0)
        assert counts.rounds[index + 1].tolist() == [int((own & (rounds.after_acceptance == state)).sum()) for state in (0, 1)]
        for place in range(4):
            tested = own & (rounds.drafted > place) & (rounds.accepted >= place)
            assert counts.tested[index][place] == tested.sum()
            assert counts.accepted[index][place] == (tested & (rounds.accepted > place)).sum()
    law = text_lookups.law_by_match(counts, [4, 4, 4])
    assert law.chances == pytest.approx(counts.rates)
    assert law.survival[2] == pytest.approx(np.cumprod(counts.acceptance(2)))


def test_longer_matches_survive_longer_in_the_bundled_log() -> None:
    """The law by match length is closer to the log than one rate, because rare short matches fail early."""
    found = text_lookups.of_log(position_log.bundled(), 1, 3, 4)
    rounds = text_lookups.played(found)
    counts = text_lookups.counted(rounds, 4)
    assert np.all(np.diff([counts.acceptance(index)[0] for index in range(3)]) > 0)
    flat = UnitCost(12)
    laws = text_lookups.law_of_means(rounds, 4), text_lookups.law_by_match(counts, [4, 4, 4])
    one, by_match = (64 / float(theory.predict(Parameters(12, 4), 64, law, flat).rounds) for law in laws)  # type: ignore[arg-type]
    assert abs(by_match - rounds.tokens_per_round) < abs(one - rounds.tokens_per_round) / 2


def test_logs_without_prompts_have_no_match_lengths() -> None:
    log = position_log.bundled()
    prompts = [{"id": each["id"]} for each in log.header["prompts"]]
    bare = position_log.PositionLog(log.table, {**log.header, "prompts": prompts})
    assert not text_lookups.possible(bare)
    with pytest.raises(ParameterError, match="this log has no match lengths: it lacks the tokens of its prompts; log it again"):
        text_lookups.of_log(bare, 1, 2, 3)
    with pytest.raises(ParameterError, match="prompt must have at least one token"):
        along([], [1, 2], 1, 2, 3)


# --- Claims, proposals, refusals ---


@pytest.mark.parametrize("name", ["n-gram", "ngram", "prompt lookup", "suffix decoding", "PLD", "N-gram speculation"])
def test_names_of_reports_are_of_this_method(name: str) -> None:
    assert reported_names.method_named(name)[0] == "ngram"


def test_bounds_of_claims() -> None:
    assert theory.claim_bound(ClaimTerms({"mean_acceptance_length": 1.6}, draft=0.5)).value == pytest.approx(1.6)
    assert theory.claim_bound(ClaimTerms({"draft_acceptance_rate": 0.4, "draft_length": 5})).value == pytest.approx(3.0)
    assert Parameters.CLAIMS is not None
    assert not Parameters.CLAIMS.fixed_drafts
    wide = ClaimTerms({"mean_acceptance_length": 2.0}, verify=lambda width: 1 + (width - 1) / 4)
    assert theory.claim_bound(wide).value == pytest.approx(2 / 1.25)


@given(RATES, RATES, st.integers(1, 8))
def test_no_speedup_is_above_its_bound(hits: float, rate: float, length: int) -> None:
    means = theory.round_means(Lookups.of_rates(hits, rate, length), verify_cost=CURVE)
    stated = ClaimTerms({"mean_acceptance_length": means.tokens, "draft_length": length})
    assert means.speedup <= theory.claim_bound(stated).value * (1 + 1e-9)


def test_advice_says_what_is_not_known() -> None:
    assert "repeat earlier text" in Parameters.proposals(Known(32, 1, (3,), (0.5,))).missing


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"draft_length": 0}, "draft_length must be between 1 and 250, got 0"),
        ({"min_match": 3}, "min_match must be at most max_match=2, got 3; the longest match is taken"),
        ({"min_match": 0}, "min_match must be between 1 and 1000, got 0"),
        ({"max_match": 0}, "max_match must be between 1 and 1000, got 0"),
        ({"length_factor": -1}, "length_factor must be between 0 and 250, got -1"),
        ({"length_factor": 0.4}, r"length_factor must be at least 1/max_match=0\.5, got 0\.4; else no match drafts a token"),
        ({"layers": 0}, "layers must be between 1 and"),
        ({"sampled": "yes"}, "sampled must be true or false"),
        ({"sequences": 4, "batching": "static"}, "batching must be 'continuous' or 'lockstep' with sequences=4, got 'static'"),
    ],
)
def test_impossible_parameters_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Parameters(**({"layers": 4, "draft_length": 3} | settings_))


# --- Points together ---


def test_points_together_are_those_of_each() -> None:
    """Laws with other outcomes, laws by the round before, records and costs of both kinds, cut and not."""
    laws = [
        Lookups.of_rates(0.5, 0.25, 3), LAW, Lookups.of_rates([0.1, 1.0], 1.0, 3), Lookups.of_rates(0.0, 0.0, 3),
        ReplayedLookups([[3, 0, 1, 0, 2, 2, 0]], [[1, 0, 1, 0, 0, 2, 0]]),
    ]  # fmt: skip
    costs: list[StepCosts] = [UnitCost(32), UnitCost(32, verify_cost=((1, 1.0), (40, 3.0)), final_head=1.0), roofline()]
    methods = [Parameters(32, 4), Parameters(32, 4, sequences=2), Parameters(32, 6)]
    choices = [MethodChoice(each, tokens, cost) for each in methods for tokens in (1, 7) for cost in costs]
    choice, law = (each.reshape(-1) for each in np.meshgrid(range(len(choices)), range(len(laws)), indexing="ij"))
    found = theory.predict_points(PredictionPoints(choices, laws, choice, law))
    for at, (which, of) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        parameters, tokens, cost = choices[which]
        alone = vars(theory.predict(parameters, tokens, laws[of], cost))
        for name, values in vars(found).items():
            assert float(values[at]) == pytest.approx(float(alone[name]), rel=1e-12, abs=1e-12), name


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4), st.integers(1, 5))
def test_lookups_of_many_rates_are_those_of_each(rates: list[tuple[float, float]], drafted: int) -> None:
    hits, accepted = np.array(rates).T
    for law, (hit, rate) in zip(Lookups.each(hits, accepted, drafted), rates, strict=True):
        one = Lookups.of_rates(hit, rate, drafted)
        assert law.drafted == one.drafted
        for ours, theirs in zip((law.chances, *law.survival, *law.cells), (one.chances, *one.survival, *one.cells), strict=True):
            np.testing.assert_array_equal(ours, theirs)


ONE_TABLE = Lookups.each(np.array([0.5, 0.2, 0.9, 0.0]), np.array([0.25, 0.9, 0.1, 0.5]), 3)
OTHER_TABLE = Lookups.each(np.array([0.7, 0.4]), np.array([0.6, 0.3]), 3)


@pytest.mark.parametrize("laws", [
    ONE_TABLE, ONE_TABLE[::-1], ONE_TABLE[1:3], [*ONE_TABLE[:2], *OTHER_TABLE], [*ONE_TABLE, Lookups.of_rates(0.5, 0.25, 3)],
    [*OTHER_TABLE, Lookups.of_rates([0.1, 0.9], 0.25, 3)], [*ONE_TABLE[2:], *Lookups.each(np.array([0.3]), np.array([0.8]), 2)],
])  # fmt: skip
def test_laws_of_many_rates_are_predicted_as_each(laws: list[Lookups]) -> None:
    """Of one table, in part and in another order, of two, and with laws that are of none."""
    choice, law = MethodChoice(Parameters(32, 3), 17, UnitCost(32, verify_cost=((1, 1.0), (4, 2.0)))), np.arange(len(laws))
    found = theory.predict_points(PredictionPoints([choice], laws, np.zeros_like(law), law))
    for at, each in enumerate(laws):
        one = Lookups(each.chances, each.drafted, each.survival)
        alone = vars(theory.predict(choice.parameters, choice.tokens, one, choice.cost))
        for name, values in vars(found).items():
            assert float(values[at]) == pytest.approx(float(alone[name]), rel=1e-12, abs=1e-12), name


ALIKE = Lookups.of_rates(0.6, 0.5, 1)
"""A law under which rounds do not depend on the one before."""


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("law", "tokens", "placed"), [
    (LAW, 1, True), (LAW, 2, True), (LAW, 5, True), (LAW, 5, False), (ALIKE, 1, False), (ALIKE, 4, False), (ALIKE, 6, False),
    (ALIKE, 9, False), (ALIKE, 9, True),
])  # fmt: skip
def test_moments_are_those_of_all_outcomes(law: Lookups, tokens: int, placed: bool, cut: bool) -> None:
    """By enumeration of the outcome of every lookup, with times by position or at any."""
    times = np.random.default_rng(0).uniform(0.5, 2, (2, tokens, 5))
    times[:] = times[0] if placed else times[0, 0]
    prices = RoundPrices(*(times, times) if placed else (times[0, 0], times[0, 0]), np.arange(1.0, 6.0))
    drafted, accepted, chances = law.cells
    ends: list[tuple[float, float, float]] = []

    def visit(at: int, before: int, chance: float, time: float, rounds: int) -> None:
        if at >= tokens:
            ends.append((chance, time, rounds))
            return
        of = chances[before % len(chances)]
        for count, kept, share in zip(drafted.tolist(), accepted.tolist(), of.tolist(), strict=True):
            paid, kept = min(count, tokens - 1 - at) if cut else count, min(kept, tokens - 1 - at)
            visit(at + 1 + kept, int(kept > 0), chance * share, time + times[0, at, paid], rounds + 1)

    visit(0, 0, 1.0, 0.0, 0)
    chance, time, rounds = np.array(ends).T
    found = lookup_rounds.moments(tokens, law, prices, cut=cut)
    mean = chance @ time
    assert (found.time, found.rounds) == pytest.approx((mean, chance @ rounds), rel=1e-12)
    assert found.variance == pytest.approx(chance @ (time - mean) ** 2, rel=1e-9, abs=1e-12)


@given(
    st.lists(st.tuples(RATES, RATES), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 40), st.booleans(),
    st.lists(st.lists(st.floats(0.1, 3), min_size=5, max_size=5), min_size=1, max_size=3), st.sampled_from([1, 3, 4000]),
)  # fmt: skip
@settings(max_examples=examples(60, 600), deadline=None)
def test_mean_squares_by_pairs_of_starts_are_those_by_position(
    rates: list[tuple[float, float]], drafted: int, tokens: int, cut: bool, times: list[list[float]], together: int
) -> None:
    """Of several laws and prices, and also where few of them are evaluated together."""
    laws, prices = [Lookups.of_rates(hit, rate, drafted) for hit, rate in rates], RoundPrices(*(np.array(times),) * 3)
    law, price = (each.ravel() for each in np.indices((len(laws), len(times))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_rounds, "_PAIRS", together)
        patch.setattr(lookup_rounds, "_NEAR", together)
        found = lookup_rounds.moments_of_pairs(tokens, laws, prices, law, price, cut=cut)
        patch.setattr(lookup_rounds._Starts, "pairs", lambda self: None)
        expected = lookup_rounds.moments_of_pairs(tokens, laws, prices, law, price, cut=cut)
    np.testing.assert_allclose(found.time, expected.time, rtol=1e-13)
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-10, atol=1e-13 * float(found.time.max()) ** 2)


@pytest.mark.parametrize("rates", [[0.0, 0.4, 1.0], [(0.2, 0.7), (0.5, 0.5)]])
def test_work_under_many_laws_is_that_of_each(rates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fewer laws than these are counted together; laws of other outcomes are counted one by one."""
    parameters, laws = Parameters(32, 3), [Lookups.of_rates(rate, 0.6, 3) for rate in rates]
    monkeypatch.setattr(theory, "_CELLS", 1)
    assert_work_of_each(theory, (parameters, 17), laws, rtol=1e-13)
    assert theory.work_of_laws(parameters, 17, [*laws, Lookups.of_rates(0.5, 0.6, 2)]) is None
