"""Published acceptance logs: reading by drafter, and errors that name the row."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.commands.common_options import guarded
from calibrate.decode.public_acceptance_logs import AcceptanceLog, Request, drafters, read
from model.base.checks import ParameterError
from model.methods.speculative import rates_from_logs
from sim.scenarios.outcomes.acceptance_outcomes import RecordedRounds

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "acceptance"
FILES = sorted(DATA.glob("*.jsonl"))


def row(name: str = "a", lengths: list[Any] | None = None, **others: Any) -> dict[str, Any]:
    held = {"id": name, "prompt_token_ids": [5, 6, 7], "generated_token_ids": [8, 9], "acc_eagle": {"acc_len": lengths or [2, 1]}}
    return held | others


def written(folder: Path, rows: list[Any] | str | bytes) -> Path:
    path = folder / "log.jsonl"
    if isinstance(rows, list):
        rows = "".join(f"{json.dumps(each)}\n" for each in rows)
    path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1))
def test_logs_are_read_by_drafter(tmp_path: Path, requests: list[tuple[int, int, list[int]]]) -> None:
    rows = [
        row(f"r{index}", lengths, prompt_token_ids=[1] * prompt, generated_token_ids=[1] * output, acc_other={"acc_len": [1]})
        for index, (prompt, output, lengths) in enumerate(requests)
    ]
    path = written(tmp_path, rows)
    log = read(path, "eagle")
    assert drafters(path) == ("eagle", "other")
    assert log.source == "measured: log.jsonl, drafter eagle"
    assert [(each.prompt_tokens, each.output_tokens, [*each.lengths]) for each in log.requests] == requests
    assert log.lengths == [lengths for *_, lengths in requests]
    assert log.of_other_outputs == tuple(f"r{i}" for i, (_, output, lengths) in enumerate(requests) if output != len(lengths))
    assert read(path, "other").lengths == [[1]] * len(requests)
    # `sim run` replays the same lengths.
    assert RecordedRounds(file=str(path), drafter="eagle")._lengths() == log.lengths


def test_blank_lines_are_skipped_and_ids_are_optional(tmp_path: Path) -> None:
    without = {key: value for key, value in row().items() if key != "id"}
    last = json.dumps(without | {"text": "\u2028"}, ensure_ascii=False)
    path = written(tmp_path, f"\ufeff{json.dumps(without)}\r\n\n{last}")
    assert [request.id for request in read(path, "eagle").requests] == ["1", "3"]


def test_requests_of_other_outputs_are_listed(tmp_path: Path) -> None:
    log = read(written(tmp_path, [row("a"), row("b", [3, 2, 1])]), "eagle")
    assert log.of_other_outputs == ("b",)


BAD: list[tuple[list[Any] | str | bytes, str]] = [
    ("", "it is empty; it must be JSON lines with prompt_token_ids"),
    ("\n \n", "it is empty"),
    ("{", "row 1: it is not JSON: .*; the file must be JSON lines"),
    ([row(), 3], "row 2: it must be an object, got 3; the file must be"),
    (b"\xff", r"it is not text in UTF-8 \(byte 1\)"),
    ([{"id": "a"}], r"row 1 names no drafter, got \['id'\]; it must be JSON lines"),
    ([row(acc_eagle=None, acc_ngram={})], "row 1 has no acc_eagle.acc_len, a list of whole numbers"),
    ([row(), {"acc_ngram": {"acc_len": [1]}}], "row 2 has no acc_eagle.acc_len"),
    ([row(prompt_token_ids=None)], "row 1 has no prompt_token_ids, a list of token ids"),
    ([row(generated_token_ids=3)], "row 1 has no generated_token_ids"),
    ([row(generated_token_ids=[])], "row 1: output_tokens must be at least 1, got 0"),
    ([row(acc_eagle={"acc_len": []})], r"row 1: lengths must have a number for each output position, got \[\]"),
    ([row(lengths=[2, 0])], r"row 1: lengths\[1\] must be between 1 and 1000000, got 0"),
    ([row(lengths=[2, 1.0])], r"row 1: lengths\[1\] must be a whole number, got 1\.0"),
    ([row(lengths=[True])], r"row 1: lengths\[0\] must be a whole number, got True"),
    ([row(lengths=[10**9])], r"row 1: lengths\[0\] must be between 1 and 1000000, got 1000000000"),
    ([row(name="")], "row 1: id must be a non-empty string"),
    ([row(), row("b"), row()], "ids of requests must differ, got 'a' in rows 1 and 3; remove one of them"),
]


@pytest.mark.parametrize(("rows", "message"), BAD)
def test_a_wrong_log_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any] | str | bytes, message: str
) -> None:
    path = written(tmp_path, rows)
    with pytest.raises(ParameterError, match=message) as caught:
        read(path, "eagle")
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(SystemExit) as left:
        guarded(lambda: print(read(path, "eagle")))()
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: read(path, "eagel"), "log.jsonl: unknown drafter 'eagel'; did you mean eagle[?] known: eagle"),
        (lambda path: read(path.with_name("no"), "eagle"), "no: there is no such file; give one of JSON lines"),
        (lambda path: drafters(path.parent), "there is no such file"),
        (lambda path: AcceptanceLog("eagle", (), "measured"), "^requests must hold at least one request, got none"),
        (lambda path: AcceptanceLog("eagle", (Request("a", 0, 1, (1,)),) * 2, "measured"), "^ids of requests must differ, got 'a'"),
        (lambda path: Request("a", -1, 1, (1,)), "^prompt_tokens must be at least 0, got -1"),
    ],
)
def test_wrong_arguments(tmp_path: Path, call: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call(written(tmp_path, [row()]))


@pytest.mark.skipif(not FILES, reason="no acceptance logs: DECODESIM_DATA names the folder that holds acceptance/*.jsonl")
def test_the_public_log() -> None:
    """300 requests of two drafters. The n-gram drafter was logged on the outputs of the file, the EAGLE head often on others."""
    (path,) = FILES
    assert drafters(path) == ("eagle", "ngram")
    eagle, ngram = (read(path, drafter) for drafter in ("eagle", "ngram"))
    assert len(eagle.requests) == len(ngram.requests) == 300
    assert not ngram.of_other_outputs
    assert 0 < len(eagle.of_other_outputs) < 150
    assert all(request.prompt_tokens > 1 for request in eagle.requests)
    # On GSM8K, a head on the target's features is accepted more often than copied n-grams.
    assert float(rates_from_logs.accepted_of_positions(eagle.lengths).low) > float(
        rates_from_logs.accepted_of_positions(ngram.lengths).high
    )
