"""The deck's tables and their check against theory, compared with formulas written here and with exact enumeration."""

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import published
from model.base.checks import ParameterError
from model.published import deck_analysis, deck_tables

GAMMA = 3  # assumed by the notes if the deck states none


def speedup(rate: float, length: int, ratio: float) -> float:
    return sum(rate**i for i in range(length + 1)) / (length * ratio + 1)


def oracle(rate: float, ratio: float) -> float:
    return 1 / (1 - rate + ratio * rate)


def accepted_over_drafted(rate: float, length: int) -> float:
    return sum(rate**i for i in range(1, length + 1)) / length


def root(function: Callable[[Any], Any], target: float) -> float:
    """Solve an increasing function on [0, 1] for the target, from a fine table of its values."""
    grid = np.linspace(0, 1, 200_001)
    return float(np.interp(target, function(grid), grid))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return deck_analysis.rows()


RATIO = {"ende": 0.75 / 6.39, "cnndm": 12.02 / 216.62}
FIXED = [dict(row) for row in published.table("deck-table-2").rows]
ADAPTIVE = [dict(row) for row in published.table("deck-adaptive").rows]
BEAMS = [dict(row) for row in published.table("deck-beam").rows]


def notes(name: str) -> str:
    return " ".join(published.table(name).notes)


def listed(values: list[float], form: str) -> str:
    parts = [form.format(value) for value in values]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


# --- The data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("deck-table-1", {"time_s": "235.78", "bleu": "2.001"}),
        ("deck-table-2", {"bleu": "2.14", "draft_length": "20", "acceptance_rate": "2.15", "speedup": "9.52"}),
        ("deck-beam", {"bleu": "1.45", "beams": "8", "acceptance_rate": "1.54", "speedup": "1.24"}),
        ("deck-adaptive", {"bleu": "1.06", "acceptance_rate": "1.15", "speedup": "4.94"}),
        ("deck-hierarchy", {"bleu": "2.181", "speedup": "5.27"}),
    ],
)
def test_digits_equal_those_of_the_deck(name: str, sums: dict[str, str]) -> None:
    """Sums taken from the deck's text, not from our files."""
    table = published.table(name)
    numbers = {key for key, value in table.rows[0].items() if not isinstance(value, str)}
    assert numbers == set(sums)
    assert {key: sum(Decimal(str(row[key])) for row in table.rows) for key in sums} == {k: Decimal(v) for k, v in sums.items()}


@pytest.mark.parametrize("name", deck_tables.TABLES)
def test_keys_are_unique_and_rows_are_cited(name: str) -> None:
    table = published.table(name)
    assert name in published.names()
    assert table.source.startswith(f"{deck_tables.PAPER}, {deck_tables.TABLES[name].label}: ")
    for row in table.rows:
        assert table.lookup(**{key: row[key] for key in table.keys}) == dict(row)
    assert len({table.cite(row) for row in table.rows}) == len(table.rows)


@pytest.mark.parametrize(
    ("name", "keys", "clause"),
    [
        ("deck-table-1", {"task": "cnndm", "model": "t5-small"}, "Deck Table 1, CNNDM, T5-Small"),
        ("deck-table-2", {"task": "ende", "draft_length": 3}, "Deck Table 2, EnDe, gamma 3"),
        ("deck-beam", {"beams": 5}, "Deck beam table, EnDe, 5 beams"),
        ("deck-adaptive", {"task": "cnndm"}, "Deck adaptive table, CNNDM"),
        ("deck-hierarchy", {"combination": "large+base"}, "Deck hierarchy table, EnDe, T5-Large + T5-Base"),
        ("ppd-table-3", {"data_set": "squad", "method": "greedy"}, "PPD Table 3, squad, greedy"),
    ],
)
def test_row_is_cited_as_printed(name: str, keys: dict[str, Any], clause: str) -> None:
    table = published.table(name)
    assert table.cite(table.lookup(**keys)) == clause


def test_bad_lookup_in_the_deck_names_the_closest_value() -> None:
    table = published.table("deck-table-2")
    for keys, message in (
        ({"task": "endo"}, r"unknown task of deck-table-2 'endo'; did you mean ende\?"),
        ({"gamma": 3}, r"unknown key of deck-table-2 'gamma'; known: draft_length, task"),
        ({"task": "ende", "draft_length": 5}, "unknown draft_length of deck-table-2 5; known: 3, 7"),
        ({"task": "ende"}, "draft_length must be given: 2 rows"),
    ):
        with pytest.raises(ParameterError, match=message):
            table.lookup(**keys)
    with pytest.raises(ParameterError, match=r"unknown table 'deck-table-3'; did you mean deck-table-\d"):
        published.table("deck-table-3")


@pytest.mark.parametrize("name", deck_tables.TABLES)
def test_the_deck_has_no_match_rates(name: str) -> None:
    with pytest.raises(ParameterError, match=f"table must have match rates, as do ppd-table-2.*got '{name}'"):
        published.match_rate(name, task="ende")


# --- Notes ---------------------------------------------------------------------------------------------------


def test_cost_ratio_follows_from_the_times() -> None:
    assert f"give {RATIO['ende']:.3f} for EnDe and {RATIO['cnndm']:.4f} for CNNDM" in notes("deck-table-1")
    for task, ratio in RATIO.items():
        assert deck_analysis.cost_ratio(task) == pytest.approx(ratio, rel=1e-12)


def test_note_on_too_fast_rows_of_table_2() -> None:
    said = notes("deck-table-2")
    settings = [(row["acceptance_rate"], row["draft_length"], RATIO[row["task"]]) for row in FIXED]
    printed = [row["speedup"] for row in FIXED]
    literal = [speedup(*setting) for setting in settings]
    free = [speedup(rate, length, 0.0) for rate, length, _ in settings]
    assert f"gives {listed(literal, '{:.3f}')} at the stated alpha" in said
    excess = [100 * (one / other - 1) for one, other in zip(printed, literal, strict=True)]
    assert f"exceed that by {listed(excess, '{:.0f} %')}" in said
    assert f"(c = 0) it gives {listed(free, '{:.3f}')}" in said
    assert [one > bound for one, bound in zip(printed, free, strict=True)] == [False, True, True, True]
    assert "every row but the first is impossible" in said
    assert f"need c of at most {(free[0] / printed[0] - 1) / settings[0][1]:.3f}" in said
    any_law = [1 / (1 - rate) for rate, _, _ in settings[1:]]
    assert all(one > bound for one, bound in zip(printed[1:], any_law, strict=True))
    assert f"1/(1 - alpha) = {listed(any_law, '{:.3f}')} too" in said
    needed = [root(lambda x, at=at: speedup(x, *at[1:]), one) for one, at in zip(printed, settings, strict=True)]  # type: ignore[misc]
    assert f"need alpha = {listed(needed, '{:.3f}')}" in said


def test_note_on_table_2_read_as_accepted_over_drafted() -> None:
    reread, found, off = [], [], []
    for row in FIXED:
        length = row["draft_length"]
        rate = root(lambda x, length=length: accepted_over_drafted(x, length), row["acceptance_rate"])  # type: ignore[misc]
        reread.append(rate)
        found.append(speedup(rate, length, RATIO[row["task"]]))
        off.append(100 * (row["speedup"] / found[-1] - 1))
    said = notes("deck-table-2")
    assert f"rates are {listed(reread, '{:.3f}')}, and Theorem 3.8 gives {listed(found, '{:.3f}')}" in said
    assert f"off by {listed(off, '{:+.1f} %')}" in said


def test_note_on_alpha_that_falls_with_the_draft_length() -> None:
    for rate in (0.3, 0.675, 0.95):
        shares = [accepted_over_drafted(rate, length) for length in range(1, 12)]
        assert all(later < earlier for earlier, later in itertools.pairwise(shares))
    ende, cnndm = ([row["acceptance_rate"] for row in FIXED if row["task"] == task] for task in RATIO)
    assert f"from {ende[0]} to {ende[1]} and from {cnndm[0]} to {cnndm[1]}" in notes("deck-table-2")


def test_note_on_bleu_of_outputs_that_are_not_identical() -> None:
    alone = {task: published.table("deck-table-1").lookup(task=task, model="t5-large")["bleu"] for task in RATIO}
    bleu = [row["bleu"] for row in FIXED]
    assert f"{bleu[0]} and {bleu[1]} with gamma 3 and 7 against {alone['ende']}" in notes("deck-table-2")
    assert f"{bleu[2]} and {bleu[3]} against {alone['cnndm']}" in notes("deck-table-2")
    pair = published.table("deck-hierarchy").lookup(combination="large+small")
    assert pair["speedup"] == FIXED[0]["speedup"]
    note = f"{bleu[0]} in Table 2 and {pair['bleu']} in the hierarchy table, both with {pair['speedup']}"
    assert note in notes("deck-hierarchy")


@pytest.mark.parametrize("letter", ["p'", "q'"])
def test_algorithm_1_as_printed_changes_the_output_distribution(letter: str) -> None:
    """After a rejection line 18 draws from p' = p instead of the residual distribution, which line 15 calls q'."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    kept = np.minimum(p, q)
    redrawn = p if letter == "p'" else (p - kept) / (p - kept).sum()
    law = kept + (1 - kept.sum()) * redrawn
    assert law.sum() == pytest.approx(1)
    assert bool(np.allclose(law, p)) == (letter == "q'")


def test_note_on_the_range_of_speed_ups() -> None:
    plain = [row["speedup"] for row in FIXED]
    hierarchy = published.table("deck-hierarchy").lookup(combination="hierarchy")["speedup"]
    more = [row["speedup"] for row in (*BEAMS, *ADAPTIVE)] + [hierarchy]
    said = f"from {min(plain)} to {max(plain)}, those of its three extensions from {min(more)} to {max(more)}"
    assert said in notes("deck-table-2")


def test_note_on_adaptive_rows_above_the_bounds() -> None:
    said = notes("deck-adaptive")
    bounds = [oracle(row["acceptance_rate"], RATIO[row["task"]]) for row in ADAPTIVE]
    printed = [row["speedup"] for row in ADAPTIVE]
    assert all(one > bound for one, bound in zip(printed, bounds, strict=True))
    assert f"{listed(bounds, '{:.2f}')} at the stated alpha" in said
    free = [oracle(row["acceptance_rate"], 0.0) for row in ADAPTIVE]
    assert [one > bound for one, bound in zip(printed, free, strict=True)] == [False, True]
    assert f"the second even above 1/(1 - alpha) = {free[1]:.3f}" in said
    again = [oracle(root(lambda x: accepted_over_drafted(x, GAMMA), r["acceptance_rate"]), RATIO[r["task"]]) for r in ADAPTIVE]
    assert all(one < bound for one, bound in zip(printed, again, strict=True))
    assert f"bounds are {listed(again, '{:.2f}')}, and both rows are possible" in said
    static = {task: max(row["speedup"] for row in FIXED if row["task"] == task) for task in RATIO}
    ende, cnndm = ADAPTIVE
    assert ende["speedup"] < static["ende"]
    assert cnndm["speedup"] > static["cnndm"]
    assert f"({cnndm['speedup']} against {static['cnndm']})" in said
    assert f"({ende['speedup']} against {static['ende']})" in said


def test_note_on_beams_that_run_one_after_another() -> None:
    said = notes("deck-beam")
    assert all(row["speedup"] < 1 for row in BEAMS)
    assert f"gains of {listed([row['speedup'] * row['beams'] for row in BEAMS], '{:.2f}')}" in said
    literal = [speedup(row["acceptance_rate"], GAMMA, RATIO["ende"]) / row["beams"] for row in BEAMS]
    rates = [root(lambda x: accepted_over_drafted(x, GAMMA), row["acceptance_rate"]) for row in BEAMS]
    again = [speedup(rate, GAMMA, RATIO["ende"]) / row["beams"] for rate, row in zip(rates, BEAMS, strict=True)]
    assert f"{listed(literal, '{:.3f}')} at the stated alpha, and {listed(again, '{:.3f}')} if" in said
    found = deck_analysis.beam_rows()
    assert [row["theorem"] for row in found] == pytest.approx(literal)
    assert [row["reread_speedup"] for row in found] == pytest.approx(again, rel=1e-6)


# --- The report -----------------------------------------------------------------------------------------------------------


def test_report_has_every_row_of_both_tables(rows: list[dict[str, Any]]) -> None:
    for row, printed in zip(rows, [*FIXED, *ADAPTIVE], strict=True):
        assert {key: row[key] for key in ("task", "speedup", "acceptance_rate")} == {
            key: printed[key] for key in ("task", "speedup", "acceptance_rate")
        }
        assert row["draft_length"] == printed.get("draft_length")
        assert row["cost_ratio"] == pytest.approx(RATIO[row["task"]])


def test_report_contains_theorem_3_8_and_the_oracle_bound(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rate, c, length = row["acceptance_rate"], row["cost_ratio"], row["draft_length"]
        best = max(speedup(rate, each, c) for each in range(100))
        assert row["theorem"] == pytest.approx(best if length is None else speedup(rate, length, c))
        assert row["excess"] == pytest.approx(row["speedup"] / row["theorem"] - 1)
        assert row["free_bound"] == pytest.approx(1 / (1 - rate) if length is None else speedup(rate, length, 0.0))
        assert row["oracle_bound"] == pytest.approx(oracle(rate, c))


def test_needed_and_reread_rates_reproduce_the_printed_values(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        c, length, needed = row["cost_ratio"], row["draft_length"], row["needed_rate"]
        reached = oracle(needed, c) if length is None else speedup(needed, length, c)
        assert reached == pytest.approx(row["speedup"], rel=1e-9)
        used = GAMMA if length is None else length
        assert row["reread_length"] == used
        assert accepted_over_drafted(row["reread_rate"], used) == pytest.approx(row["acceptance_rate"], rel=1e-6)
        assert row["reread_speedup"] == pytest.approx(speedup(row["reread_rate"], used, c))
        assert row["reread_excess"] == pytest.approx(row["speedup"] / row["reread_speedup"] - 1)
        assert row["reread_oracle"] == pytest.approx(oracle(row["reread_rate"], c))


def test_conclusions_do_not_depend_on_printed_rounding(rows: list[dict[str, Any]]) -> None:
    """Rate, speed-up and times varied by half of the last digit, up and down."""
    spread = (-0.005, 0.005)
    for row in rows:
        times = (0.75, 6.39) if row["task"] == "ende" else (12.02, 216.62)
        length = row["draft_length"]
        for rate_off, speed_off, small_off, large_off in itertools.product(spread, repeat=4):
            rate, printed = row["acceptance_rate"] + rate_off, row["speedup"] + speed_off
            c = (times[0] + small_off) / (times[1] + large_off)
            free = 1 / (1 - rate) if length is None else speedup(rate, length, 0.0)
            assert (printed > free) == row["impossible_if_free"]
            assert (printed > oracle(rate, c)) == row["above_oracle"]
    assert {row["impossible_if_free"] for row in rows} == {row["above_oracle"] for row in rows} == {True, False}


@st.composite
def decodings(draw: st.DrawFn) -> tuple[list[tuple[int, int]], float]:
    """Arbitrary rounds (drafted, accepted), and a cost of drafting."""
    lengths = draw(st.lists(st.integers(0, 8), min_size=1, max_size=20))
    return [(length, draw(st.integers(0, length))) for length in lengths], draw(st.floats(0, 1))


@given(decodings())
def test_no_decoding_exceeds_the_oracle_bound(decoding: tuple[list[tuple[int, int]], float]) -> None:
    rounds, c = decoding
    accepted = sum(kept for _, kept in rounds)
    tested = accepted + sum(kept < length for length, kept in rounds)
    # Without a rejection the rate is 1 or undefined, and the bound is set by the cost of a drafted token.
    bound = oracle(accepted / tested, c) if accepted < tested else 1 / c if c else math.inf
    tokens, time = accepted + len(rounds), len(rounds) + c * sum(length for length, _ in rounds)
    assert tokens / time <= bound * (1 + 1e-12)


# --- Three models ---------------------------------------------------------------------------------------------------------


def three_models(small_rate: float, large_rate: float, medium_cost: float, reading: str) -> float:
    """The deck's hierarchical round, by enumeration of all patterns of acceptance."""
    tokens = passes = 0.0
    for verdicts in itertools.product((True, False), repeat=2 * GAMMA + 1):
        first, second = verdicts[:GAMMA], verdicts[GAMMA:]
        chance = math.prod(small_rate if good else 1 - small_rate for good in first)
        chance *= math.prod(large_rate if good else 1 - large_rate for good in second)
        kept = len(list(itertools.takewhile(bool, first)))
        generated = GAMMA - kept
        if reading != "literal" and generated:
            generated -= 1
        drafts = GAMMA + (reading == "bonus" and kept == GAMMA)
        tokens += chance * (1 + len(list(itertools.takewhile(bool, second[:drafts]))))
        passes += chance * (1 + generated)
    return tokens / (1 + GAMMA * RATIO["ende"] + medium_cost * passes)


@pytest.mark.parametrize("reading", deck_analysis.READINGS)
def test_rates_of_three_models_give_both_printed_speed_ups(reading: str) -> None:
    low, top = deck_analysis.medium_cost_window(reading)
    for share in (0.02, 0.3, 0.7, 0.98):
        cost = low + share * (top - low)
        large, small = deck_analysis.hierarchy_rates(cost, reading)
        assert speedup(large, GAMMA, cost) == pytest.approx(1.13)
        assert three_models(small, large, cost, reading) == pytest.approx(1.46)


@pytest.mark.parametrize("reading", deck_analysis.READINGS)
def test_outside_the_cost_range_no_rates_exist(reading: str) -> None:
    """At the upper end of the range all drafts of T5-Base are accepted, at the lower end all drafts of T5-Small."""
    low, top = deck_analysis.medium_cost_window(reading)
    assert speedup(1.0, GAMMA, 1.001 * top) < 1.13 < speedup(1.0, GAMMA, 0.999 * top)
    for cost, possible in ((0.999 * low, False), (1.001 * low, True)):
        large = root(lambda x, cost=cost: speedup(x, GAMMA, cost), 1.13)  # type: ignore[misc]
        best = max(three_models(small, large, cost, reading) for small in (0.0, 0.25, 0.5, 0.75, 1.0))
        assert (best > 1.46) == possible
        if not possible:
            with pytest.raises(ParameterError, match=rf"medium_cost must be between {low:g} and {top:g}, got"):
                deck_analysis.hierarchy_rates(cost, reading)


def test_note_on_the_cost_range() -> None:
    low, top = deck_analysis.medium_cost_window("literal")
    assert deck_analysis.medium_cost_window("reuse") == pytest.approx((low, top))
    said = notes("deck-hierarchy")
    assert f"between {low:.3f} and {top:.3f} of T5-Large's time" in said
    assert f"(from {deck_analysis.medium_cost_window('bonus')[0]:.3f} if" in said
    with pytest.raises(ParameterError, match="unknown reading 'B'"):
        deck_analysis.medium_cost_window("B")
    speeds = {row["combination"]: row["speedup"] for row in published.table("deck-hierarchy").rows}
    assert f"{speeds['hierarchy']} against {speeds['large+base']}" in said
    assert speeds["large+base"] < speeds["hierarchy"] < speeds["large+small"]


# --- Sentences -------------------------------------------------------------------------------------------------------------


def test_sentences_count_the_rows(rows: list[dict[str, Any]]) -> None:
    text = " ".join(deck_analysis.sentences(rows))
    assert "3 of 4 rows of Table 2 are impossible at their stated acceptance rate even if drafting were free" in text
    assert "all 4 rows agree with Theorem 3.8 within 9 %" in text
    assert "2 of 2 adaptive rows lie above" in text
    assert "2.61 against 2.50 and 2.33 against 1.80" in text
    assert "3.61 and 2.71, and none of the rows" in text
    fewer = " ".join(deck_analysis.sentences(rows[:2]))
    assert "1 of 2 rows of Table 2" in fewer
    assert "agree with Theorem 3.8 within 8 %" in fewer
    assert "adaptive" not in fewer


def test_sentences_end_with_beams_and_three_models(rows: list[dict[str, Any]]) -> None:
    beams, three = deck_analysis.sentences(rows)[-2:]
    assert "0.79 with 3 beams and 0.45 with 5 beams" in beams
    assert "0.717 and 0.404, and 0.831 and 0.481" in beams
    low, top = deck_analysis.medium_cost_window()
    assert f"between {low:.3f} and {top:.3f}" in three
