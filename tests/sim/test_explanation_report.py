"""Report of an explanation: its verdict, terms and factors are those of the document; damaged documents are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import figures
import sim
from model.base import strict_json
from model.base.checks import ParameterError
from sim.reporting.report_document import DataTable, SvgFigure

MINE: dict[str, Any] = {
    "plain_tpot": "8ms", "tpot": "6.2ms", "mean_acceptance_length": 2.4, "draft_length": 3, "batch": 8, "model": "llama-3.1-8b",
    "gpu": "h100",
}  # fmt: skip


@pytest.fixture(scope="module", params=[None, "speedup=4.4,acceptance=0.85,draft_length=7,batch=1"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = sim.explain(**MINE, claim=request.param)
    path = tmp_path_factory.mktemp("explained") / "why.json"
    path.write_text(strict_json.dumps(found.document() | {"command": ["sim", "explain", "--batch", "8"]}), encoding="utf-8")
    figures.save(found.figure(), path.with_suffix(""), formats=("svg",))
    return path


def test_report_has_the_documents_verdict_terms_and_sources(written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text())
    found = sim.report(written, tmp_path / "why.html")
    assert found.verdict == content["verdict"]
    parts = [part for section in found.sections for part in section.parts]
    terms = next(part for part in parts if isinstance(part, DataTable))
    assert [row[0].text for row in terms.shown] == ["verification", "drafting", "engine overhead", "stragglers", "rest", "step"]
    assert [row[0].text for row in terms.shown if row[4].mark] == ["drafting"]
    assert len([part for part in parts if isinstance(part, SvgFigure)]) == 1
    assert [row.name for row in found.provenance] == [row["input"] for row in content["rests_on"]]
    titles = [section.title for section in found.sections]
    assert ("Differences to the claim" in titles) == (content["claimed_speedup"] is not None)
    page = (tmp_path / "why.html").read_text()
    assert "sim explain --batch 8" in page


def test_damaged_documents_are_refused_in_one_line(written: Path, tmp_path: Path) -> None:
    content = json.loads(written.read_text())
    for name in ("terms", "rests_on", "speedup", "shares" if content["claimed_speedup"] else "advice"):
        for value in (None, "x", 7, [{"x": 1}]):
            path = tmp_path / "damaged.json"
            path.write_text(json.dumps(content | {name: value}), encoding="utf-8")
            try:
                sim.report(path)
            except ParameterError as error:
                message = str(error)
            else:
                message = "read"
            assert len(message.splitlines()) == 1
    path.write_text(json.dumps({"kind": "explanation"}), encoding="utf-8")
    with pytest.raises(ParameterError, match="run `sim explain` again"):
        sim.report(path)
