"""Drafts with a context budget against MagicDec's published speed-ups: the tables, the scenario, and the claim of the page."""

from __future__ import annotations

from decimal import Decimal

import pytest

import sim
from calibrate.validation import long_context_drafts
from calibrate.validation import validation_page as page
from calibrate.validation.validated_claims import Claim
from model import published
from model.published import magicdec_tables


@pytest.fixture(scope="module")
def claim() -> Claim:
    return long_context_drafts.budgeted_drafts()


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("magicdec-table-2", {"prompt": "252000", "sequences": "512", "context_budget": "1024", "draft_length": "29",
                              "speedup": "12.34"}),
        ("magicdec-h100", {"prompt": "112000", "sequences": "544", "draft_length": "25", "speedup": "11.36"}),
        ("magicdec-acceptance", {"prompt": "224000", "context_budget": "3072", "acceptance_rate": "4.88"}),
    ],
)  # fmt: skip
def test_digits_equal_those_of_the_source(name: str, sums: dict[str, str]) -> None:
    """Sums taken from the source's text, not from our files."""
    table = published.table(name)
    numbers = {key for row in table.rows for key, value in row.items() if isinstance(value, int | float)}
    assert numbers == {*sums}
    assert {key: sum(Decimal(str(row[key] or 0)) for row in table.rows) for key in sums} == {k: Decimal(v) for k, v in sums.items()}
    for row in table.rows:
        assert table.lookup(**{key: row[key] for key in table.keys}) == dict(row)
    assert table.source.startswith(magicdec_tables.PAPER)


def test_printed_speedups_rise_with_batch_and_context() -> None:
    """As the notes say."""
    for name in long_context_drafts.TABLES.values():
        rows = published.table(name).rows
        pairs = [(a, b) for a in rows for b in rows if (a["model"], a["draft_model"]) == (b["model"], b["draft_model"])]
        larger = [
            (a, b) for a, b in pairs
            if (a["prompt"] == b["prompt"] and a["sequences"] < b["sequences"])
            or (a["sequences"] == b["sequences"] and a["prompt"] < b["prompt"])
        ]  # fmt: skip
        assert larger
        assert all(a["speedup"] < b["speedup"] for a, b in larger)


def test_sign_and_order_are_predicted_with_nothing_fitted(claim: Claim) -> None:
    assert all(case.met for case in claim.cases)
    for case in claim.cases:
        assert (case.errors > 0).all()  # too fast, as the description says: less is accepted, and an engine has overheads
        assert case.largest < 0.5


def test_page_has_the_claim(claim: Claim) -> None:
    assert page.stale_sections([claim], page.default_path()) == ""


def test_a_wrong_order_or_sign_misses_the_target() -> None:
    row = {"model": "llama-3.1-8b", "prompt": 32000, "draft_length": 3}
    rows = [{**row, "sequences": 32, "speedup": 1.4}, {**row, "sequences": 64, "speedup": 0.9}]
    case = long_context_drafts._case("turned", "a100", rows)
    assert [(target.name, target.value, target.met) for target in case.targets] == [
        ("rows with the wrong sign", 0.5, False), ("pairs in the wrong order", 1.0, False),
    ]  # fmt: skip


def test_scenario_has_the_published_rows_and_where_a_larger_batch_is_better() -> None:
    table = sim.run("magicdec", views=["formula"])
    found = {(row["prompt_tokens"], row["sequences"]): row for row in table.iter_rows(named=True)}
    rates = {row["prompt"]: row["acceptance_rate"] for row in published.table("magicdec-acceptance").rows}
    assert all(row["acceptance_rate"] == rates[prompt] for (prompt, _), row in found.items())
    for row in long_context_drafts.rows("a100", "llama-3.1-8b"):
        ours = found[row["prompt"], row["sequences"]]
        assert ours["draft_length"] == row["draft_length"]
        assert ours["speedup"] > 1
    by_batch = [found[32000, count]["speedup"] for count in (1, 32, 64, 128)]
    assert by_batch == sorted(by_batch)
    assert by_batch[0] < 1 < by_batch[1]
    assert all(found[4000, count]["speedup"] < 1 for count in (1, 32, 128))
