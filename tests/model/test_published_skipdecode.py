"""Analysis of SkipDecode's tables, recomputed in fractions, and its report."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest

from model import published
from model.base.checks import ParameterError
from model.published import skipdecode_analysis
from model.published.skipdecode_tables import LENGTHS, MEDIAN_PROMPTS

SCHEDULES = published.table("skipdecode-table-2")
RESULTS = published.table("skipdecode-table-4")
ROUND = {"half-up": lambda value: math.floor(value + Fraction(1, 2)), "half-even": round}  # Python rounds halves to even
FAMILIES = list(itertools.product(LENGTHS, ("opt-1.3b", "opt-6.7b")))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return skipdecode_analysis.rows()


def fitting(row: dict[str, Any], rounding: str, prompt: int) -> list[int]:
    """Response lengths whose mean layers round to the printed value, computed by position in fractions."""
    bounds = SCHEDULES.lookup(model=row["model"], target_speedup=row["target_speedup"])
    budget = LENGTHS[row["data_set"]][1] - prompt
    printed, total, found = Fraction(str(row["mean_layers"])), 0, []
    for generated in range(1, budget + 1):
        t = Fraction(generated - 1, budget)
        total += ROUND[rounding]((1 - t) * bounds["max_layers"] + t * bounds["min_layers"])
        if abs(Fraction(total, generated) - printed) <= Fraction(1, 20):
            found.append(generated)
    return found


def test_rows_are_complete_and_in_order(rows: list[dict[str, Any]]) -> None:
    keys = [(row["data_set"], row["model"], row["target_speedup"]) for row in rows]
    assert keys == [(*family, label) for family in FAMILIES for label in (2, 3, 4, 5)]
    assert [row["source"] for row in skipdecode_analysis.schedule_rows()] == [SCHEDULES.cite(row) for row in SCHEDULES.rows]


@pytest.mark.parametrize("rounding", skipdecode_analysis.COMPARED)
def test_lengths_equal_those_computed_in_fractions(rows: list[dict[str, Any]], rounding: str) -> None:
    for row in rows:
        data_set = row["data_set"]
        found = fitting(row, rounding, LENGTHS[data_set][0])
        assert row["lengths"][rounding] == (found[0], found[-1])
        # all lengths in between fit too
        assert found == list(range(found[0], found[-1] + 1))
        assert row["at_limit"] is (row["most"] in fitting(row, "half-up", LENGTHS[data_set][0]))


@pytest.mark.parametrize(("data_set", "model"), FAMILIES)
def test_common_lengths_fit_every_row(rows: list[dict[str, Any]], data_set: str, model: str) -> None:
    own = [row for row in rows if (row["data_set"], row["model"]) == (data_set, model)]
    for rounding, prompt in itertools.product(skipdecode_analysis.COMPARED, (LENGTHS[data_set][0], MEDIAN_PROMPTS[data_set])):
        expected = set.intersection(*(set(fitting(row, rounding, prompt)) for row in own))
        assert set(skipdecode_analysis.common_lengths(data_set, model, rounding, prompt)) == expected
    assert skipdecode_analysis.common_lengths(data_set, model) == skipdecode_analysis.common_lengths(
        data_set, model, "half-up", LENGTHS[data_set][0]
    )


def test_rounding_is_distinguishable_only_after_the_longest_prompt() -> None:
    """After the longest prompt only 34 tokens fit; after the median prompt 40 or 41, rounded either way."""
    found = {
        (rounding, prompt): skipdecode_analysis.common_lengths("e2e", "opt-1.3b", rounding, prompt)
        for rounding, prompt in itertools.product(("half-up", "half-even"), (60, 38))
    }
    assert found == {("half-up", 60): (34,), ("half-even", 60): (), ("half-up", 38): (40, 41), ("half-even", 38): (40, 41)}
    for rounding, prompt in itertools.product(("floor", "ceil"), (60, 38)):
        assert not skipdecode_analysis.common_lengths("e2e", "opt-1.3b", rounding, prompt)


def test_labels_and_ratios_of_layers(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        base = RESULTS.lookup(data_set=row["data_set"], model=row["model"], target_speedup=1)
        assert row["ratio"] == base["mean_layers"] / row["target_layers"]
        assert row["realised"] == pytest.approx(base["mean_layers"] / row["mean_layers"])
        # Layers decrease with the position, so the mean over part of the budget exceeds the mean over all of it, the target.
        assert row["realised"] <= row["ratio"] <= row["target_speedup"]
        assert row["lost"] == pytest.approx(base["rouge_l"] - row["rouge_l"])
        assert (row["base_layers"] != row["layers"]) is (row["model"] == "opt-6.7b")
    for row in skipdecode_analysis.schedule_rows():
        assert row["middle"] == (row["min_layers"] + row["max_layers"]) / 2
        assert row["labelled"] is (row["ratio"] == row["target_speedup"])
        assert row["centred"] is (row["middle"] == row["target_layers"])
        assert (row["counted"] != row["layers"]) is (row["model"] == "opt-6.7b")


def test_sentences_contain_the_values_of_the_rows(rows: list[dict[str, Any]]) -> None:
    text = " ".join(skipdecode_analysis.sentences(rows))
    for label in (2, 3, 4, 5):
        values = [row["realised"] for row in rows if row["target_speedup"] == label]
        assert f"{min(values):.2f} to {max(values):.2f} at {label}x" in text
    for row in rows:
        if row["data_set"] != "e2e":
            first, last = row["lengths"]["half-up"]
            assert f"{first} to {last} at {row['target_speedup']}x" in text
    for data_set, name in (("e2e", "E2E"), ("reddit", "Reddit"), ("cnn_dm", "CNN/DailyMail")):
        own = [row for row in rows if row["data_set"] == data_set]
        assert f"ROUGE-L on {name} falls by up to {max(row['lost'] for row in own):.1f}" in text
    assert "of OPT-1.3B on E2E: after a prompt of 60, 34 with halves rounded up and none with halves rounded to even;" in text
    assert "after a prompt of 38, 40 or 41, halves rounded either way." in text
    assert "5x of OPT-1.3B on Reddit and 5x of OPT-6.7B on Reddit" in text
    assert "68.2 where Table 4 has 68.1 (E2E, 3x) and 19.3 where Table 4 has 19.6 (Reddit, 5x)" in text


def test_fewer_rows_give_fewer_sentences(rows: list[dict[str, Any]]) -> None:
    text = " ".join(skipdecode_analysis.sentences([row for row in rows if row["data_set"] == "e2e"]))
    assert "on Reddit imply" not in text
    assert "ran to the longest" not in text
    assert "ROUGE-L on E2E" in text
    assert "ROUGE-L on Reddit" not in text
    # On CNN/DailyMail some lengths fit both 4x and 5x; none fits 2x and another.
    late = [row for row in rows if (row["data_set"], row["model"]) == ("cnn_dm", "opt-6.7b")]
    assert "no length fits all" not in " ".join(skipdecode_analysis.sentences(late[1:]))
    assert "no length fits all" in " ".join(skipdecode_analysis.sentences(late))


def test_settings_are_replayed_if_all_of_a_model_are_present() -> None:
    table = [row for row in skipdecode_analysis.schedule_rows() if row["model"] == "opt-6.7b"]
    settings = [row | {"prompt": prompt, "sequence_length": sequence, "power": 1.0} for row in table
                for prompt, sequence in (LENGTHS["reddit"], LENGTHS["cnn_dm"])]  # fmt: skip
    other = settings[0] | {"min_layers": 3}
    assert skipdecode_analysis.replayed([*settings, other]) == [("reddit", "opt-6.7b"), ("cnn_dm", "opt-6.7b")]
    assert skipdecode_analysis.replayed(settings[1:]) == [("cnn_dm", "opt-6.7b")]
    for key, value in (
        ("power", 2.0),
        ("warm_up", 2),
        ("prompt", 61),
        ("sequence_length", 161),
        ("layers", 33),
        ("max_layers", 23),
    ):
        assert skipdecode_analysis.replayed([row | {key: value} for row in settings]) == []
    assert skipdecode_analysis.replayed([]) == []


def test_sentences_on_one_model_and_data_set_use_its_rows_only(rows: list[dict[str, Any]]) -> None:
    text = " ".join(skipdecode_analysis.sentences_on("e2e", "opt-1.3b"))
    for row in rows:
        if (row["data_set"], row["model"]) == ("e2e", "opt-1.3b"):
            assert f"{row['realised']:.2f} at {row['target_speedup']}x" in text
    assert "Table 2 for OPT-1.3B, with the lengths of E2E" in text
    assert "5x of OPT-1.3B is 4.80." in text
    assert "34 with halves rounded up" in text
    assert not any(name in text for name in ("OPT-6.7B", "Reddit", "CNN"))
    limit = " ".join(skipdecode_analysis.sentences_on("reddit", "opt-6.7b"))
    assert "Responses ran to the longest length, or close to it, at 5x of OPT-6.7B on Reddit" in limit
    assert "counts OPT-6.7B from 30 layers" in limit
    with pytest.raises(ParameterError, match="unknown model 'opt-13b'"):
        skipdecode_analysis.sentences_on("e2e", "opt-13b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xsum", "opt-1.3b"), "unknown data_set 'xsum'"),
        (("e2e", "opt-13b"), "unknown model 'opt-13b'; did you mean opt-1.3b"),
        (("e2e", "opt-1.3b", "up"), "unknown rounding 'up'"),
        (("e2e", "opt-1.3b", "floor", 160), "prompt must be between 0 and sequence_length-1=159, got 160"),
    ],
)
def test_bad_input_names_the_value_and_its_bound(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        skipdecode_analysis.common_lengths(*arguments)
