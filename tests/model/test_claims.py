"""Claims are read from CSV files and mappings: names of the field, rounding, and errors that name file, row and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures import published_shapes
from model.audit import claims
from model.audit.claims import ALIASES, COLUMNS, EXAMPLES, NUMBERS, WORDS, Stated, of_rows, read_claims
from model.audit.reported_names import method_named
from model.base.checks import ParameterError
from model.methods import registry
from model.methods.claim_bounds import TERMS


def read(folder: Path, text: str) -> list[claims.SpeedupClaim]:
    path = folder / "claims.csv"
    path.write_text(text)
    return read_claims(path)[0]


def test_names_of_the_field_are_understood(tmp_path: Path) -> None:
    text = (
        "# a comment\nMethod,Target Model,GPU,Tau,gamma,Speed-up,batch size,TP,notes\n\n"
        "EAGLE-3,meta-llama/Llama-3.1-8B-Instruct,NVIDIA H100 80GB,2.8,3,1.7x,4,2,fast\n"
    )
    path = tmp_path / "claims.csv"
    path.write_text(text)
    [claim], unused = read_claims(path)
    assert unused == ("notes",)
    assert (claim.method, claim.draft, claim.row) == ("speculative", "eagle3", 1)
    assert claim.shape is not None
    assert claim.draft_shape is not None
    assert claim.device is not None
    assert (claim.shape.layers, claim.draft_shape.layers, claim.device.name) == (32, 1, "h100")
    assert {name: each.value for name, each in claim.numbers.items()} == {
        "mean_acceptance_length": 2.8, "draft_length": 3, "speedup": 1.7, "batch": 4, "tensor_parallel": 2,
    }  # fmt: skip


@given(digits=st.integers(0, 6), whole=st.integers(1, 9), data=st.data())
def test_rounding_is_one_unit_of_the_last_digit(digits: int, whole: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(0, 10**digits - 1))
    text = f"{whole}.{last:0{digits}d}" if digits else str(whole)
    [claim] = of_rows([{"speedup": text}])
    stated = claim.numbers["speedup"]
    assert stated == Stated(float(text), pytest.approx(10.0 ** -max(digits, 1)))
    assert (stated.at(1), stated.at(-1), stated.at(0)) == (stated.value + stated.unit, stated.value - stated.unit, stated.value)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("0.8", 0.8, 0.01), ("0.815", 0.815, 0.001), ("80%", 0.8, 0.01), ("81.53 %", 0.8153, 0.0001), ("1", 1.0, 0.01),
        ("8e-1", 0.8, 0.01),
    ],
)
def test_rates_may_be_per_cent(text: str, value: float, unit: float) -> None:
    stated = of_rows([{"method": "speculative", "alpha": text}])[0].numbers["acceptance_rate"]
    assert stated.value == pytest.approx(value)
    assert stated.unit == pytest.approx(unit)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("method,speedup,accept_rat", "ppd,2,0.5", "claims.csv: unknown column 'accept_rat'; did you mean acceptance_rate?"),
        ("method,speedup,alpha,acceptance_rate", "sd,2,.5,.5", "claims.csv: column acceptance_rate is there twice"),
        ("foo,bar", "1,2", "claims.csv: no column is known; the columns are method, model"),
        ("method,speedup", "sd,~2-3x", "must be a number, or empty where unknown, got '~2-3x'; of a range, write the one end"),
        ("method,speedup", "sd,up to 3x", "of a range, write the one end to check"),
        ("method,speedup", 'sd,"2,5x"', "write a decimal point, and no separator of thousands"),
        ("method,speedup", "sd,25%", "write a factor such as 1.25"),
        ("gpu,speedup", "0xH100,2", "gpu must have at least one device, got '0xH100'"),
        ("method,batch,speedup", "sd,0,2", "batch must be between 1 and 1e+06, got '0'"),
        ("model,dtype,speedup", "llama-3.1-8b,fp9,2", "claims.csv: row 1: unknown dtype 'fp9'"),
        ("dtype,speedup", "fp8,2", "claims.csv: row 1: dtype is used with a model alone, got 'fp8'"),
        ("method,speedup", "sd,fast", "claims.csv: row 1: speedup must be a number, or empty where unknown, got 'fast'"),
        ("method,speedup", "sd,nan", "claims.csv: row 1: speedup must be between 0.001 and 100000, got 'nan'"),
        ("method,speedup", "sd,1e999999999", "claims.csv: row 1: speedup must be between"),
        ("method,speedup", "sd,-1", "claims.csv: row 1: speedup must be between"),
        ("method,speedup,alpha", "sd,2,79", "acceptance_rate must be between 0 and 1, got '79'; write it as a fraction or with %"),
        ("method,speedup,K", "sd,2,2.5", "claims.csv: row 1: draft_length must be a whole number, got '2.5'"),
        ("method,speedup,match_rate", "sd,2,0.5", "match_rate is no term of method speculative, which uses acceptance_rate, "),
        ("method,model,layers,speedup", "ppd,llama-3.1-8b,40,2", "layers must be 32, as llama-3.1-8b has, got 40"),
        ("method,layers,exit_layer,speedup", "ppd,40,41,2", "claims.csv: row 1: exit_layer must be at most layers=40, got 41"),
        ("method,model,mean_layers,speedup", "skipdecode,opt-1.3b,25,2", "row 1: mean_layers must be at most layers=24, got 25"),
        ("method;speedup", "sd;2", "claims.csv: columns must be separated by commas, got the header 'method;speedup'"),
        ("method,speedup", "sd,2,3", "claims.csv: row 1 must have 2 fields, as the header has, got 3"),
        ("method,speedup", "", "claims.csv: at least one claim is needed, got a file without rows"),
        ("method,speedup", f"{'x' * 600},2", "claims.csv: row 1: method must be a line of at most 500 characters"),
    ],
)
def test_errors_name_file_row_and_column(tmp_path: Path, header: str, row: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        read(tmp_path, f"{header}\n{row}\n")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_row_of_an_error_does_not_count_header_comments_and_blank_lines(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="row 2: speedup must be a number"):
        read(tmp_path, "# from a table\nmethod,speedup\n\nppd,1.2\n# another\nppd,quick\n")


def test_files_that_are_not_tables(tmp_path: Path) -> None:
    for content, message in ((b"", "is empty"), (b"\x1f\x8b\x08", "compressed"), (b"method\xff,speedup\n", "UTF-8")):
        path = tmp_path / "claims.csv"
        path.write_bytes(content)
        with pytest.raises(ParameterError, match=f"claims.csv: .*{message}"):
            read_claims(path)
    for path, message in ((tmp_path, "folder"), (tmp_path / "none.csv", "No such file")):
        with pytest.raises(ParameterError, match=message):
            read_claims(path)


@pytest.mark.parametrize(
    ("rows", "message"), [([], "at least one"), ([3], "row 1: a claim must be a table"), ([{"spedup": 2}], "did you")]
)
def test_bad_mappings(rows: list[Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        of_rows(rows)


def test_several_gpus_share_every_pass() -> None:
    for gpu, tp, expected in (("8xH100", "", 8), ("H100", "", 1), ("8 x h100", 4, 4), ("H100 x2", "", 2), ("2 H100", "", 2)):
        [claim] = of_rows([{"gpu": gpu, "tp": tp}])
        assert claim.device is not None
        assert (claim.device.name, claim.numbers["tensor_parallel"].value) == ("h100", expected)


@pytest.mark.parametrize("blank", [None, "", " ", "-", "N/A", "?", "\N{EN DASH}", "unknown", "none", float("nan")])
def test_blank_fields_are_not_stated(blank: object) -> None:
    [claim] = of_rows([dict.fromkeys(("method", "speedup", "alpha", "model", "gpu"), blank)])
    assert (claim.method, claim.numbers, claim.words, claim.unknown) == (None, {}, {}, ())


@pytest.mark.parametrize(
    ("columns", "shape", "weights"),
    [
        ({"model": "meta-llama/Meta-Llama-3.1-8B-Instruct"}, "llama-3.1-8b", None),
        ({"model": "Llama3.1 8B"}, "llama-3.1-8b", None),
        ({"model": "lmsys/vicuna-13b-v1.3"}, "vicuna-13b", None),
        ({"model": "mistralai/Mistral-7B-Instruct-v0.2"}, "mistral-7b", None),
        ({"model": "Qwen/Qwen2.5-7B-Instruct-AWQ"}, "qwen2.5-7b", "int4"),
        ({"model": "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"}, "qwen2.5-7b", "int4"),
        ({"model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "dtype": "bf16"}, "qwen2.5-7b", None),
        ({"model": "Qwen/Qwen3-235B-A22B-Instruct-2507"}, "qwen3-235b-a22b", None),
    ],
)
def test_names_of_hubs_lead_to_shapes(columns: dict[str, str], shape: str, weights: str | None) -> None:
    [claim] = of_rows([columns])
    expected = published_shapes.named_shape(shape)
    assert claim.shape is not None
    assert (claim.shape.layers, claim.shape.layer_weights) == (expected.layers, expected.layer_weights)
    assert not claim.unknown
    assert (None if claim.shape.weights is None else claim.shape.weights.dtype) == weights


def test_a_head_of_a_hub_is_known_by_the_kind_that_its_name_begins_with() -> None:
    [claim] = of_rows([{"method": "sd", "model": "llama-3.1-8b", "draft": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "speedup": 2}])
    assert (claim.draft, claim.unknown) == ("eagle3", ())


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"method": "speculativ"}, "method 'speculativ' is not known here and not used (did you mean speculative?)"),
        ({"method": "TriForce"}, "method 'TriForce' is not known here and not used"),
        ({"model": "llama-3.1-9b"}, "model 'llama-3.1-9b' is not known here and not used (did you mean llama-3.1-8b?)"),
        ({"model": "01-ai/Yi-34B"}, "model '01-ai/Yi-34B' is not known here and not used"),
        ({"gpu": "h101"}, "gpu 'h101' is not known here and not used (did you mean h100?)"),
        ({"gpu": "8x TPU v5e"}, "gpu '8x TPU v5e' is not known here and not used"),
        ({"draft": "eagel3"}, "draft 'eagel3' is not known here and not used (did you mean eagle3?)"),
    ],
)
def test_names_that_are_not_known_are_said_and_not_used(columns: dict[str, str], note: str) -> None:
    [claim] = of_rows([columns | {"speedup": "2.5"}])
    assert claim.unknown == (note,)
    assert (claim.method, claim.shape, claim.device, claim.draft) == (None, None, None, None)


def test_units_of_headings_and_fields_are_understood(tmp_path: Path) -> None:
    [claim, other, blank] = read(
        tmp_path, "Method,Acceptance rate (%),\N{GREEK SMALL LETTER GAMMA},Speedup (x),batch size [seqs],TPS,plain_tpot_ms\n"
        "EAGLE-3,80,3 tokens,2.5\N{MULTIPLICATION SIGN},4 seqs,120,7.07 ms\nEAGLE-3,79.5 %,-,~2.5x faster,1,,\n"
        "EAGLE-3,-,,2,,,\n",
    )  # fmt: skip
    assert {name: each.value for name, each in claim.numbers.items()} == pytest.approx({
        "acceptance_rate": 0.8, "draft_length": 3, "speedup": 2.5, "batch": 4, "plain_tpot_ms": 7.07,
    })  # fmt: skip
    assert {name: each.value for name, each in other.numbers.items()} == pytest.approx({
        "acceptance_rate": 0.795, "speedup": 2.5, "batch": 1,
    })  # fmt: skip
    assert {*blank.numbers} == {"speedup"}


def test_a_head_without_its_target_or_without_a_rule_has_no_bytes() -> None:
    assert of_rows([{"method": "eagle-3", "speedup": 2}])[0].draft_shape is None
    assert of_rows([{"method": "eagle-3", "model": "deepseek-v3", "speedup": 2}])[0].draft_shape is None
    with pytest.raises(ParameterError, match="latent attention"):
        of_rows([{"method": "speculative", "draft": "eagle", "model": "deepseek-v3", "speedup": 2}])
    mtp = of_rows([{"method": "MTP", "model": "deepseek-v3", "speedup": 2}])[0].draft_shape
    assert mtp is not None
    assert mtp.layers == 1


def test_names_are_those_of_the_methods_alone() -> None:
    """Every name of the field leads to the method that says it, and two methods never say the same."""
    seen: dict[str, str] = {}
    for name in registry.names():
        rule = registry.parameters(name).CLAIMS
        assert rule is not None
        for text in (name, registry.parameters(name).LABEL, *rule.names):
            if text:
                assert method_named(text.upper())[0] == name
                assert seen.setdefault("".join(filter(str.isalnum, text.lower())), name) == name


def test_columns_and_aliases_agree() -> None:
    assert {*ALIASES.values()} <= {*COLUMNS}
    assert not {*ALIASES} & {*COLUMNS}
    assert {*COLUMNS} == {*WORDS, *NUMBERS, *TERMS}


def test_bundled_claims_name_their_sources() -> None:
    found, unused = read_claims(EXAMPLES)
    assert unused == ()
    assert len(found) >= 8
    assert all(claim.words.get("source") for claim in found)
    assert len({claim.method for claim in found}) >= 4
