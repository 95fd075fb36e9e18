"""Bundled step laws: each is that of its table, says where its numbers come from, and knows how wrong it is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from model.base.checks import ParameterError
from model.engines import law_report, law_tables, step_law
from model.engines.cells import Cells
from tests.support.law_fits import fit_alone

NAMES = step_law.names()
REFITTED = ("tensorrt-llm-deepseek-r1-fp8-b200", "vllm-llama-3.1-8b-eagle3-h100")
"""One law with experts and one with kernels: refitting all takes half a minute."""


def test_every_table_has_its_law_and_every_law_its_table() -> None:
    assert law_tables.names() == NAMES
    folder = Path(law_tables.__file__).parent / "tables"
    assert {path.stem for path in folder.glob("*.csv")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_law_holds_the_cells_and_facts_of_its_table(name: str) -> None:
    law, table = step_law.load(name), law_tables.table(name)
    assert (law.name, law.engine, law.facts) == (name, None, table.facts)
    assert (law.experts, law.kernels, law.acceptance) == (table.experts, table.kernels, ())
    assert law.cells is not None
    for column in vars(law.cells):
        np.testing.assert_array_equal(getattr(law.cells, column), getattr(table.cells, column))


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_complete(name: str) -> None:
    facts = step_law.load(name).facts
    assert {*law_tables.FACTS, "licence", "table"} == {*facts}
    assert all(facts.values())
    assert facts["engine"] == next(each for each in ("vllm", "sglang", "tensorrt-llm") if name.startswith(each))
    address = facts["source"].split()[0].rstrip(",")
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(/(pull|issues)/\d+)?", address), address
    if not re.search(r"/\d+$", address):  # a file is named with its commit
        assert re.search(r" at [0-9a-f]{8}, \S+\.(json|jsx|mdx)\b", facts["source"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", facts["date"])


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in REFITTED)) for each in NAMES])
def test_law_is_the_fit_of_its_table(name: str) -> None:
    """Coefficients and errors to the tolerance of the search; draws in distribution.

    Processors round differently, so that the sampler's path, and with it every draw, may differ on another one.
    """
    law, again = step_law.load(name), law_tables.fitted(name)
    for term, value in law.coefficients.items():
        assert again.coefficients[term] == pytest.approx(value, rel=2e-2, abs=2e-2 if term == "acceptance_trend" else 0), term
    assert again.left_out == pytest.approx(law.left_out, abs=5e-3)
    assert law.cells is not None
    first, second = (np.log(each.draws_of(law.cells)) for each in (law, again))
    # 256 correlated draws each: a fourth of them count as independent, and 5 standard errors are never reached by chance.
    error = np.sqrt((first.var(axis=0) + second.var(axis=0)) / 64)
    assert np.all(np.abs(first.mean(axis=0) - second.mean(axis=0)) < 5 * error)


def test_fit_is_the_same_to_the_last_byte_every_time() -> None:
    name = REFITTED[0]
    assert step_law.text(law_tables.fitted(name)) == step_law.text(law_tables.fitted(name))


def test_bundle_writes_what_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: step_law.load(name) for name in NAMES}
    monkeypatch.setattr(law_tables, "fitted", made.__getitem__)
    assert [path.name for path in law_tables.write(tmp_path)] == [f"{name}.json" for name in NAMES]
    bundled = Path(step_law.__file__).parent / "laws"
    for name in NAMES:  # reading and writing lose nothing
        assert (tmp_path / f"{name}.json").read_bytes() == (bundled / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_law_predicts_its_cells_within_its_intervals(name: str) -> None:
    law = step_law.load(name)
    assert law.cells is not None
    values, low, high, beyond = law.predict(law.cells)
    assert np.all(beyond == 0)
    inside = int(np.sum((low <= law.cells.values) & (law.cells.values <= high)))
    # 80 % intervals of cells that were fitted: at least as many inside as 65 % would give but for a chance of a thousandth.
    assert inside >= stats.binom.ppf(1e-3, law.cells.size, 0.65)
    assert np.median(np.abs(values / law.cells.values - 1)) <= np.median(np.abs(law.left_out)) + 1e-3


def test_intervals_cover_cells_that_were_left_out() -> None:
    """Of the two large tables every third cell, predicted by a law of the others."""
    inside = total = 0
    for name in ("sglang-glm-4.7-fp8", "sglang-qwen3-235b-a22b"):
        table = law_tables.table(name)
        held = np.arange(table.cells.size) % 3 == 1
        law = fit_alone(table.cells[~held], name, experts=table.experts)
        _, low, high, _ = law.predict(table.cells[held])
        inside += int(np.sum((low <= table.cells[held].values) & (table.cells[held].values <= high)))
        total += int(held.sum())
    assert stats.binom.ppf(1e-3, total, 0.8) <= inside


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_stated_and_small_enough_to_be_of_use(name: str) -> None:
    law = step_law.load(name)
    assert law.cells is not None
    errors = np.abs(law.left_out)
    assert errors.size == law.cells.size >= 5
    assert np.median(errors) < 0.05
    assert errors.max() < 0.15
    found = law_report.extent(law)
    assert f"median error {np.median(errors):.1%}, worst {errors.max():.1%}" in found
    assert found.startswith(f"{law.cells.size} cells of {law.unit}, ")


def test_law_with_several_draft_lengths_says_what_drafting_costs() -> None:
    """A pass of a draft takes less than a step of its target, and a step with drafts no less than one without."""
    for name in NAMES:
        law = step_law.load(name)
        assert law.cells is not None
        number, zero = law.cells.sequences, np.zeros(law.cells.size)
        lengths = {"mean_acceptance_length": np.ones(law.cells.size)}
        plain = law.draws_of(Cells.of(law.unit, number, zero, **lengths)).mean(axis=0)
        drafted = law.draws_of(Cells.of(law.unit, number, zero + 2, **lengths)).mean(axis=0)
        slower = drafted < plain if law.unit == "output_tokens_per_s" else drafted > plain
        assert np.all(slower), name
        assert law.coefficients["draft_pass"] < law.pass_seconds(1, 1, 1000)[0], name


def test_unknown_table_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"unknown engine table 'sglang-glm'; did you mean sglang-glm-4\.7-fp8"):
        law_tables.table("sglang-glm")
