"""Formulas, simulations and measurements: they agree where costs satisfy the formula's assumptions, and differ elsewhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pytest

from model.hardware.profile import Profile
from model.logs.measured_runs import MeasuredRuns
from model.methods import registry
from model.methods.autoregressive import theory as autoregressive_theory
from model.methods.bild import theory as bild
from model.methods.formula_check import ComparedRuns, FormulaCheck, FormulaPoint
from model.methods.ppd import theory as ppd
from model.methods.speculative import theory as speculative
from sim.comparison import formula_validity, run_comparison
from tests.support.comparisons import LAYERS, PROMPT, example_runs, profiles, record_decoding, synthetic_runs

FLAT = profiles()
"""Assumptions of the papers: a pass takes one time per layer, for any number of tokens, and nothing else takes time."""
WIDE = profiles(wider=0.2)
SLOW = profiles(head=2e-3, step=3e-3)

Choice = tuple[str, dict[str, Any], dict[str, float]]
PLAIN: Choice = ("autoregressive", {}, {})


def rows(
    choices: Sequence[Choice], known: Mapping[str, Profile], clock: Mapping[str, Profile] = WIDE, tokens: int = 25, **more: Any
) -> pl.DataFrame:
    """Claims from runs of plain decoding and these settings, timed with profiles `clock` and predicted with profiles `known`."""
    made = [record_decoding(name, tokens, rates, seed=3, **table) for name, table, rates in (PLAIN, *choices)]
    units = [2 if each.method == "ppd" else 1 for each in made]
    runs = synthetic_runs(made, clock, **{"units": units, **more})
    return formula_validity.limits(runs, run_comparison.compare(runs, known), known)


def drafting(length: int, rate: float) -> Choice:
    return "speculative", {"draft_length": length}, {"acceptance_rate": rate}


def test_claims_name_their_measured_numbers() -> None:
    choices = [
        drafting(3, 0.7), ("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.6}), skipping(6),
        ("bild", {"max_draft_length": 5}, {"fallback_rate": 1.0, "rollback_rate": 0.0}),
    ]  # fmt: skip
    speed = "speed-up over plain decoding"
    assert {row["claim"]: (row["x_name"], row["y_name"], row["about"]) for row in rows(choices, FLAT).to_dicts()} == {
        "verify": (
            "draft length γ", speed, "Theorem 3.8, with the accepted share of tested tokens counted at each length (measured)"
            " and c = 0.25, single passes over one token (measured, of the profiles)",
        ),
        "ppd": ("match rate p of the decoding (measured)", speed, "Theorem 4.1, with the matches of each decoding (measured)"),
        "skipdecode": (
            "least layers of a token", "time over plain decoding", "the formula: layers of a token over all layers (counted)",
        ),
        "bild": (
            "fallback rate (measured)", speed,
            "the formula: rates counted at each choice (measured), c = 3/12, the ratio of layers",
        ),
        "bus": (
            "share of the main process's passes concurrent with another process (measured)",
            "time of its passes relative to passes alone",
            "2 processes, each on its own core; passes alone from the profile (measured)",
        ),
    }  # fmt: skip


# --- Theorem 3.8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_theorem_3_8_holds_where_multi_token_passes_take_no_longer(length: int) -> None:
    """All drafts accepted, full rounds of length + 1 tokens, and every pass takes the time of a single-token pass."""
    tokens = 6 * (length + 1)
    found = rows([drafting(length, 1.0)], FLAT, FLAT, tokens).row(0, named=True)
    ratio = LAYERS["draft"] / LAYERS["target"]
    assert found["claim"] == "verify"
    assert found["x"] == length
    assert found["formula"] == pytest.approx(float(speculative.speedup(1.0, length, ratio)))
    # Except in the last round, whose last token is not drafted.
    assert found["simulated"] == pytest.approx(found["formula"], rel=0.1)
    assert found["measured"] == pytest.approx(found["simulated"])


def test_theorem_3_8_is_too_fast_where_multi_token_passes_take_longer() -> None:
    found = rows([drafting(length, 0.7) for length in (1, 3, 6)], WIDE).sort("x")
    off = (found["formula"] / found["measured"]).to_list()
    assert 1 < off[0] < off[1] < off[2]  # more for passes of more tokens
    assert found["simulated"].to_list() == pytest.approx(found["measured"].to_list())
    assert found["x"].to_list() == [1, 3, 6]


def test_simulation_uses_the_profile_and_not_the_measured_times() -> None:
    known, other = rows([drafting(4, 0.7)], FLAT, WIDE), rows([drafting(4, 0.7)], FLAT, FLAT)
    assert known["simulated"].to_list() == other["simulated"].to_list()
    assert known["formula"].to_list() == other["formula"].to_list()
    assert known["measured"][0] < other["measured"][0]


def test_cost_ratio_is_of_single_passes_and_alpha_is_counted() -> None:
    made = record_decoding("speculative", 25, {"acceptance_rate": 0.6}, seed=3, draft_length=3)
    found = rows([drafting(3, 0.6)], SLOW).row(0, named=True)
    ratio = (3 + 5) / (12 + 5)  # milliseconds: layers, head and call of each model
    alpha = sum(accepted * count for (accepted, _), count in made.rounds.items())
    alpha /= sum(min(accepted + 1, drafted) * count for (accepted, drafted), count in made.rounds.items())
    assert found["formula"] == pytest.approx(float(speculative.speedup(alpha, 3, ratio)))
    assert f"c = {ratio:.2f}" in found["about"]


# --- Theorem 4.1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("early", "rate"), [(6, 0.0), (6, 0.5), (8, 0.7), (10, 1.0)])
def test_theorem_4_1_is_exact_where_only_layers_take_time(early: int, rate: float) -> None:
    choice = "ppd", {"exit_layer": early, "candidates": 1}, {"match_rate": rate}
    found = rows([choice], FLAT, FLAT).row(0, named=True)
    assert found["claim"] == "ppd"
    assert found["simulated"] == pytest.approx(found["formula"])
    assert found["measured"] == pytest.approx(found["formula"])
    p = found["x"]
    by_hand = 12 * 24 / float(ppd.expected_latency(12, early, 25, p) - ppd.expected_latency(12, early, 1, p))
    assert found["formula"] == pytest.approx(by_hand)
    assert abs(p - rate) < 0.35


def test_theorem_4_1_is_too_fast_with_heads_and_calls() -> None:
    found = rows([("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.8})], SLOW, SLOW).row(0, named=True)
    assert found["formula"] > 1.05 * found["measured"]
    assert found["simulated"] == pytest.approx(found["measured"])


def test_theorem_4_1_needs_several_processes_and_its_form() -> None:
    early: Choice = ("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.8})
    assert not rows([early], FLAT, units=[1, 1]).height
    flat = rows([("ppd", {"exit_layer": 4, "candidates": 1, "form": "flat"}, {"match_rate": 0.8})], FLAT)
    assert [*flat["claim"]] == ["bus"]


# --- SkipDecode and Big Little Decoder ----------------------------------------------------------------------------------


def skipping(least: int) -> Choice:
    return "skipdecode", {"min_layers": least, "max_layers": 12, "prompt": len(PROMPT), "sequence_length": 30}, {}


def test_time_is_proportional_to_layers_without_other_costs() -> None:
    found = rows([skipping(each) for each in (3, 6, 9)], FLAT, FLAT).sort("x")
    assert set(found["claim"]) == {"skipdecode"}
    for name in ("simulated", "measured"):
        assert found[name].to_list() == pytest.approx(found["formula"].to_list())
    assert found["formula"].is_sorted()
    assert found["formula"].max() < 1  # type: ignore[operator]


def test_time_saved_is_less_than_layers_with_call_overhead() -> None:
    found = rows([skipping(each) for each in (3, 6, 9)], SLOW, SLOW)
    assert (found["measured"] > 1.03 * found["formula"]).all()


def test_formula_of_bild_holds_without_confident_drafts() -> None:
    """Each token takes a pass of both models, 1 / (1 + c); only the last token is generated without a draft."""
    choice: Choice = ("bild", {"max_draft_length": 5}, {"fallback_rate": 1.0, "rollback_rate": 0.0})
    found = rows([choice], FLAT, FLAT, tokens=41).row(0, named=True)
    assert found["claim"] == "bild"
    assert found["x"] == 1.0
    assert found["formula"] == pytest.approx(1 / (1 + 3 / 12))
    assert found["simulated"] == pytest.approx(found["formula"], rel=1 / 40)


def test_rates_are_counted_from_reads() -> None:
    never = record_decoding("bild", 40, {"fallback_rate": 0.0, "rollback_rate": 0.0})
    assert bild.counted_rates([never]) == (0.0, 0.0)
    some = record_decoding("bild", 400, {"fallback_rate": 0.3, "rollback_rate": 0.1})
    fallback, rollback = bild.counted_rates([some])
    # Five standard errors of the reads (a false alarm in 1.7 million seeds), and at most .1 and .06, which this seed keeps.
    asked = Counter(each.question.kind for each in some.reads)
    assert fallback == pytest.approx(0.3, abs=min(0.1, 5 * (0.3 * 0.7 / asked["confidence"]) ** 0.5))
    assert rollback == pytest.approx(0.1, abs=min(0.06, 5 * (0.1 * 0.9 / asked["distance"]) ** 0.5))
    assert bild.counted_rates([some, some]) == (fallback, rollback)


# --- What methods declare -----------------------------------------------------------------------------------------------


def test_method_declares_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any method that declares a check is compared, with its own labels."""
    theory, kind = autoregressive_theory, registry.parameters("autoregressive")
    monkeypatch.setattr(kind, "FORMULA_CHECK", FormulaCheck("mine", of_time=True))
    assert rows([], FLAT).rows() == []  # a declaration without a formula
    counted: list[ComparedRuns] = []

    def formula(runs: ComparedRuns) -> FormulaPoint:
        counted.append(runs)
        return FormulaPoint(7, 0.5, "an axis", "given nothing")

    monkeypatch.setattr(theory, "paper_formula", formula, raising=False)
    found = rows([skipping(6)], FLAT, FLAT).filter(claim="mine").drop("noise").to_dicts()
    assert found == [{
        "claim": "mine", "series": "", "x": 7.0, "formula": 0.5, "simulated": 1.0, "measured": 1.0, "x_name": "an axis",
        "y_name": "time over plain decoding", "about": "given nothing",
    }]  # fmt: skip
    assert [runs.layers_per_token() for runs in counted] == [LAYERS["target"]]
    assert counted[0].pass_ratio("draft") == pytest.approx(LAYERS["draft"] / LAYERS["target"])
    assert counted[0].drafting.tested == 0


def test_methods_have_a_formula_if_and_only_if_they_declare_a_check() -> None:
    for name in registry.names():
        assert (registry.parameters(name).FORMULA_CHECK is None) == (registry.method(name).paper_formula is None)


def test_formulas_need_several_processes_or_one_sequence() -> None:
    """No formula covers PPD on one unit, or a batch."""
    together = ("speculative", {"draft_length": 3, "sequences": 2, "batching": "lockstep"}, {"acceptance_rate": 0.7})
    found = rows([PPD, together], FLAT, units=[1, 1, 1])
    assert found.rows() == []


# --- What they are compared with ----------------------------------------------------------------------------------------


def test_prompts_without_plain_decoding_are_left_out() -> None:
    drafted = [record_decoding("speculative", 24, {"acceptance_rate": 0.7}, seed, draft_length=3) for seed in (1, 2)]
    made = [record_decoding("autoregressive", 24, {}), *drafted]
    both = synthetic_runs(made, WIDE, ["one", "one", "two"])
    alone = synthetic_runs(made[:2], WIDE, ["one", "one"])
    found, fewer = (formula_validity.limits(each, run_comparison.compare(each, WIDE), WIDE) for each in (both, alone))
    assert found.equals(fewer)
    none = synthetic_runs(made, WIDE, ["three", "one", "two"])
    assert formula_validity.limits(none, run_comparison.compare(none, WIDE), WIDE).rows() == []
    assert formula_validity.limits(none, run_comparison.compare(none, WIDE), WIDE).columns == [*formula_validity.COLUMNS]


def test_speed_up_is_over_all_prompts_together() -> None:
    """The ratio of the mean times per token, not the mean of speed-ups."""
    found, known = example_runs()
    table = run_comparison.compare(found, known)
    row = formula_validity.limits(found, table, known).filter(claim="verify", x=3).row(0, named=True)
    paces = []
    for method in ("autoregressive", "speculative"):
        own = table.filter(pl.col("method") == method, pl.col("settings").is_in(["", "draft_length=3"])).to_dicts()
        first = [len(found.log.decodings[each["decoding"]].commits[0].tokens) for each in own]
        paces.append(sum(each["measured_s"] for each in own) / sum(24 - each for each in first))
    assert row["measured"] == pytest.approx(paces[0] / paces[1])
    assert row["noise"] == pytest.approx(0.01 * 2**0.5)


def test_forced_rates_name_lines_unless_they_are_the_axis() -> None:
    made = [PLAIN, *[drafting(2, rate) for rate in (0.3, 0.9)]]
    made += [("bild", {}, {"fallback_rate": rate, "rollback_rate": 0.1}) for rate in (0.2, 0.6)]
    decodings = [record_decoding(name, 24, rates, **table) for name, table, rates in made]
    runs = synthetic_runs(decodings, WIDE, rates=[rates for *_, rates in made])
    found = formula_validity.limits(runs, run_comparison.compare(runs, WIDE), WIDE)
    assert found.filter(claim="verify")["series"].to_list() == ["acceptance_rate=0.3", "acceptance_rate=0.9"]
    assert found.filter(claim="bild")["series"].to_list() == ["rollback_rate=0.1"] * 2
    assert found.filter(claim="bild")["x"].n_unique() == 2


def test_several_files_keep_their_names() -> None:
    one = rows([drafting(3, 0.7), skipping(6)], WIDE)
    assert formula_validity.concatenate(["a"], [one]).equals(one)
    two = formula_validity.concatenate(["a", "b"], [one, one])
    assert two["series"].to_list() == ["a", "a max_layers=12", "b", "b max_layers=12"]


def test_profile_of_another_machine_is_reported() -> None:

    other = {role: dataclasses.replace(each, facts=dict(each.facts) | {"name": "another"}) for role, each in WIDE.items()}
    made = [record_decoding("autoregressive", 24, {}), record_decoding("speculative", 24, {"acceptance_rate": 0.7}, draft_length=3)]
    runs = synthetic_runs(made, WIDE)
    table = run_comparison.compare(runs, other, allow_mismatch=True)
    assert "ANOTHER machine" in formula_validity.limits(runs, table, other)["about"][0]


# --- One memory bus -----------------------------------------------------------------------------------------------------


def contended(slower: float, known: float) -> dict[str, Any]:
    """Claim from a run on two units that slow each other down by `slower`, predicted with a slowdown of `known`."""
    clock = profiles()
    found = rows([PPD], profiles(main_alone=1e-3, main_concurrent=known * 1e-3), clock, slower=slower)
    return found.filter(claim="bus").row(0, named=True)


PPD: Choice = ("ppd", {"exit_layer": 6, "candidates": 1}, {"match_rate": 0.6})


def test_units_with_separate_memory_do_not_slow_each_other() -> None:
    found = contended(1.0, 1.0)
    assert 0.2 < found["x"] < 1
    assert found["formula"] == 1
    assert [found["simulated"], found["measured"]] == pytest.approx([1, 1])


def test_passes_alone_are_at_the_same_position() -> None:
    further = profiles(further=3.0)
    found = rows([PPD], further, further).filter(claim="bus").row(0, named=True)
    assert found["measured"] == pytest.approx(1)


def test_slowdown_by_other_units_shows_in_passes() -> None:
    """In a pass that overlaps another for a share x of its time, part of the work is done concurrently and the rest alone."""
    found = contended(1.5, 1.5)
    assert found["measured"] == pytest.approx(1 / (found["x"] / 1.5 + 1 - found["x"]))
    assert found["simulated"] == pytest.approx(found["measured"])
    other = contended(1.5, 1.2)
    assert other["measured"] == pytest.approx(found["measured"])
    assert 1 < other["simulated"] < other["measured"]


def test_cancelled_passes_are_left_out_of_the_bus_claim() -> None:
    """A cancelled pass of the main process took only part of its time: neither it nor concurrent passes count."""
    known = profiles(main_alone=1e-3, main_concurrent=1.5e-3)
    made = [record_decoding(name, 25, rates, seed=3, **table) for name, table, rates in (PLAIN, PPD)]
    runs = synthetic_runs(made, profiles(), units=[1, 2], slower=1.5)
    held = runs.table["spans"].to_list()
    stopped = [
        [*each, {**each[0], "unit": 0, "what": "forward", "start": each[-1]["end"], "end": each[-1]["end"], "fate": "cancelled",
                 "role": "target", "first": 0, "last": 12, "width": 1, "position": 30}] if each else each
        for each in held
    ]  # fmt: skip
    other = MeasuredRuns(
        runs.log, runs.table.with_columns(pl.Series("spans", stopped, dtype=runs.table["spans"].dtype)), runs.about
    )
    found, again = (
        formula_validity.limits(each, run_comparison.compare(each, known), known).filter(claim="bus") for each in (runs, other)
    )
    assert found.rows() == again.rows() != []
