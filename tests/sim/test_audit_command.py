"""The command `sim audit`, its document and its data frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.audit.claims import COLUMNS, EXAMPLES, read_claims
from model.audit.verdicts import KINDS, ClaimVerdict, audit
from model.base.checks import ParameterError
from sim.commands import audit_command
from sim.commands.sim_app import app
from sim.commands.sim_report import document as report_of
from sim.reporting.report_document import DataTable

CLAIMS = """method,alpha,K,c,batch,model,gpu,speedup,source
speculative,0.55,7,,,,,2.56,slides
speculative,0.8,3,0.1,,,,2.0,a report
EAGLE-3,,5,,256,llama-3.1-8b,h100,3.0,
ppd,,,,,,,,
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "claims.csv").write_text(CLAIMS)
    return tmp_path / "claims.csv"


def call(*arguments: Any, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, (done.output, done.stderr, done.exception)
    return done


def test_verdicts_are_printed_with_bounds_and_sentences(path: Path) -> None:
    text = call("audit", path).output
    assert text.startswith("4 claims: 1 impossible, 1 conditional, 1 plausible, 1 not decidable\n")
    assert "which bound" in text
    assert "row 1 (slides): a speed-up of 2.56 (at least 2.55 before rounding) is more than 2.273, the largest possible" in text
    assert "not decidable: speedup missing" in text
    assert [line.partition(" ")[0] for line in text.splitlines() if line.startswith("row ") and ": " in line] == ["row"] * 4
    assert "one unit of their last digit" in text
    assert "from: peaks of h100: NVIDIA H100 datasheet" in text
    assert all(len(line) <= audit_command.WIDE for line in text.split("row 1 (slides)")[0].splitlines())


def test_columns_that_are_asked_for_are_printed(path: Path) -> None:
    named = call("audit", path, "--columns", "row,needed_acceptance,verdict").output
    assert ["needed", "acceptance"][1] in named
    assert "which bound" not in named.split("row 1")[0]
    everything = call("audit", path, "--columns", "all").output
    assert all(word in everything for word in ("needed cost", "TPOT [ms]", "draft length"))
    assert all(len(line) <= audit_command.WIDE for line in everything.split("row 1 (slides)")[0].splitlines())
    done = call("audit", path, "--columns", "row,boud", code=2)
    assert "--columns must name columns of an audit, got 'boud'; did you mean bound" in done.stderr


def test_the_bound_of_a_row_is_the_number_of_its_sentence(path: Path, tmp_path: Path) -> None:
    """In the printed table and in the report; claims whose deciding bound is not the largest possible are among them."""
    (tmp_path / "audit.json").write_text(call("audit", path, "--json").output)
    claims = json.loads((tmp_path / "audit.json").read_text())["claims"]
    assert any(each["deciding_bound"] not in (None, each["bound"]) for each in claims)
    table = {line.split()[0]: line for line in call("audit", path).output.splitlines() if line[:4].strip().isdigit()}
    [reported] = [part for part in report_of(tmp_path / "audit.json").sections[0].parts if isinstance(part, DataTable)]
    for each, row in zip(claims, reported.rows, strict=True):
        if each["deciding_bound"] is not None:
            number = f"{each['deciding_bound']:.4g}"
            assert f"{number}, the {each['decided_by']}" in each["sentence"]
            assert number in table[str(each["row"])].split()
            assert (row[reported.columns.index("bound")], row[-1]) == (each["deciding_bound"], each["decided_by"])


def test_help_names_every_column() -> None:
    words = {word.strip("│ .,()") for word in call("audit", "--help").output.split()}
    assert {*COLUMNS} <= words


def test_document_fits_its_schema_and_is_strict_json(path: Path) -> None:
    schema = json.loads(call("schema", "audit").output)
    jsonschema.Draft202012Validator.check_schema(schema)
    for arguments in ((), (path,)):
        found = json.loads(call("audit", *arguments, "--json").output, parse_constant=pytest.fail)
        jsonschema.validate(found, schema)
        assert sum(found["counts"].values()) == len(found["claims"])
        assert {each["kind"] for each in found["claims"]} <= {*KINDS}
    properties = schema["$defs"]["ClaimVerdict"]["properties"]
    assert {*properties} == {*found["claims"][0]} == {*ClaimVerdict.__dataclass_fields__}
    spoiled = json.loads(json.dumps(found))
    spoiled["claims"][0]["kind"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoiled, schema)
    assert "unknown schema 'audits'; did you mean audit?" in call("schema", "audits", code=2).stderr


def test_data_frame_has_the_fields_and_terms_of_every_claim(path: Path) -> None:
    frame = sim.audit(path)
    [first, *_] = audit(read_claims(path)[0])
    assert frame.height == 4
    assert {*frame.columns} >= {*ClaimVerdict.__dataclass_fields__} - {"terms"} | {"acceptance_rate", "plain_tpot_ms"}
    assert frame["bound_free"][0] == first.bound_free
    assert frame["acceptance_rate"].to_list() == [0.55, 0.8, None, None]
    assert frame["batch"].dtype == pl.Int64
    rows = [{"method": "speculative", "alpha": 0.55, "K": 7, "speedup": 2.56}]
    assert sim.audit(rows)["verdict"].to_list() == ["impossible"]
    assert sim.audit().height == sim.audit(EXAMPLES).height == len(read_claims(EXAMPLES)[0])


def test_bad_files_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for name, text in (("claims.csv", "method,speedup\nppd,fast\n"), ("claims.csv", ""), ("none.csv", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        done = call("audit", tmp_path / name, code=2)
        [line] = done.stderr.splitlines()
        assert line.startswith(f"error: {name}: ")
    assert "folder" in call("audit", tmp_path, code=2).stderr


def test_methods_from_outside_have_no_bound_until_they_say_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from dataclasses import dataclass\n"
        "from model.methods.claim_bounds import ClaimRule, Limit\n"
        "from model.methods.method_parameters import MethodParameters\n\n"
        "@dataclass(frozen=True)\n"
        "class Parameters(MethodParameters):\n"
        "    layers: int\n"
        "    OUTCOMES = ()\n"
        "    EXACT = True\n"
        "    {rule}\n\n"
        "def decode(parameters, prompt, tokens):\n"
        "    yield\n\n"
        "def predict(parameters, tokens, law, cost):\n"
        "    return None\n\n"
        "def walk(parameters, tokens, cost, outcomes):\n"
        "    return None\n\n"
        "def claim_bound(terms):\n"
        "    return Limit(1.5, 'speed-up <= 1.5')\n"
    )
    package = tmp_path / "audited_methods"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "silent.py").write_text(source.format(rule="pass"))
    (package / "bounded.py").write_text(source.format(rule="CLAIMS = ClaimRule(terms=(), needs=(), source='its author')"))
    monkeypatch.syspath_prepend(str(tmp_path))
    claims = tmp_path / "claims.csv"
    claims.write_text("method,speedup\naudited_methods.bounded,1.7\n")
    assert "impossible" in call("audit", claims, "--methods", "audited_methods.bounded").output
    assert "method 'audited_methods.bounded' is not known here" in call("audit", claims).output
    claims.write_text("method,speedup\naudited_methods.silent,1.7\n")
    found = sim.audit(claims, methods=["audited_methods.silent"])
    assert found["verdict"].to_list() == ["not decidable: a bound of method audited_methods.silent missing"]


def test_long_audits_report_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("audit", path).stderr == ""
    seen: list[tuple[int, int]] = []
    assert audit_command.of_file(path, lambda done, total: seen.append((done, total))).counts["impossible"] == 1
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    monkeypatch.setattr("sim.commands.sim_app.time.monotonic", iter(range(0, 100, 3)).__next__)
    assert call("audit", path).stderr.startswith("1 of 4 claims, about 9 s left\n")


def test_long_lists_are_cut_in_print_alone(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("method,speedup\n" + "ppd,0.9\n" * (audit_command.MOST_ROWS + 5))
    text = call("audit", path).output
    assert "... and 5 more claims; --json has all" in text
    assert f"... and {audit_command.MOST_ROWS + 5 - audit_command.MOST_SENTENCES} more; --json has all" in text
    assert len(json.loads(call("audit", path, "--json").output)["claims"]) == audit_command.MOST_ROWS + 5


def test_audit_has_a_report(path: Path, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(call("audit", path, "--json").output)
    found = report_of(tmp_path / "audit.json")
    assert "claims" in found.verdict
    text = " ".join(item for part in found.sections[1].parts for item in part.items)  # type: ignore[union-attr]
    assert "speed-up" in text
    (tmp_path / "broken.json").write_text('{"kind": "audit", "claims": 3}')
    with pytest.raises(ParameterError, match="is not an audit as the program writes it"):
        report_of(tmp_path / "broken.json")
