"""Scores against references: by hand on small examples, from prompts' files to columns, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.decode import reference_scores
from calibrate.decode.reference_scores import ReferenceScores
from calibrate.loading import prompts
from model.base.checks import ParameterError
from tests.support import family as small

WORDS = ("the", "cat", "sat", "on", "a", "mat", "today", "rain")
TEXTS = st.lists(st.sampled_from(WORDS), min_size=4, max_size=9).map(" ".join)
"""Words that stemming leaves as they are."""


@pytest.fixture
def libraries() -> None:
    """The extra `quality`."""
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")


def subsequence(first: list[str], second: list[str]) -> int:
    """Length of the longest common subsequence, by definition."""
    if not first or not second:
        return 0
    if first[-1] == second[-1]:
        return subsequence(first[:-1], second[:-1]) + 1
    return max(subsequence(first[:-1], second), subsequence(first, second[:-1]))


@pytest.mark.usefixtures("libraries")
def test_bleu_by_hand() -> None:
    """Matched n-grams 6 of 7, 4 of 6, 2 of 5 and 1 of 4; a shorter output has the brevity penalty exp(1 - r/c)."""
    output, reference = "the cat sat on the mat today", "the cat sat on a mat today"
    expected = 100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25
    assert reference_scores.bleu([output], [[reference]]) == pytest.approx(expected, rel=1e-9)
    assert reference_scores.bleu([reference, output], [[reference], [output]]) == pytest.approx(100)
    assert reference_scores.bleu(["the cat sat on"], [[reference]]) == pytest.approx(100 * math.exp(1 - 7 / 4), rel=1e-9)
    # Counts are added over the corpus, not averaged over sequences; with several references any of them may match.
    both = 100 * (13 / 14 * 10 / 12 * 7 / 10 * 5 / 8) ** 0.25
    assert reference_scores.bleu([output, reference], [[reference], [reference]]) == pytest.approx(both, rel=1e-9)
    assert reference_scores.bleu([output, reference], [["a", output], [reference]]) == pytest.approx(100)


@pytest.mark.usefixtures("libraries")
@given(output=TEXTS, reference=TEXTS, other=TEXTS)
def test_rouge_l_is_f1_of_the_longest_common_subsequence(output: str, reference: str, other: str) -> None:
    def expected(text: str) -> float:
        common = subsequence(output.split(), text.split())
        return 200.0 * common / (len(output.split()) + len(text.split()))

    assert reference_scores.rouge_l([output], [[reference]]) == pytest.approx(expected(reference), rel=1e-9)
    best = max(expected(reference), expected(other))
    assert reference_scores.rouge_l([output], [[reference, other]]) == pytest.approx(best, rel=1e-9)
    mean = (expected(reference) + 100) / 2
    assert reference_scores.rouge_l([output, other], [[reference], [other]]) == pytest.approx(mean, rel=1e-9)


@pytest.mark.usefixtures("libraries")
def test_text_is_cut_and_scored() -> None:
    words: Any = {"text": lambda prompt, output: " ".join(WORDS[index] for index in output)}
    scores = ReferenceScores(("bleu", "rouge-l"), (("the cat sat on",),), cut_at="rain", **words)
    assert scores.columns([[0]], [[0, 1, 2, 3, 7, 5]], "plain_") == pytest.approx({"plain_bleu": 100, "plain_rouge_l": 100})
    whole = ReferenceScores(("rouge-l",), (("the cat sat on",),), **words).columns([[0]], [[0, 1, 2, 3, 7, 5]])
    assert whole == pytest.approx({"rouge_l": 80})
    for output in ([0, 1, 2, 3], [0, 1, 2, 3, 7, 5, 7]):  # without the text, and with the text twice
        assert scores.columns([[0]], [output])["bleu"] == pytest.approx(100)
    with pytest.raises(ParameterError, match="prompt 2 must have a reference"):
        ReferenceScores(("bleu",), (("a",), ()), **words)
    with pytest.raises(ParameterError, match="unknown score 'rouge'"):
        ReferenceScores(("rouge",), (("a",),), **words)


@pytest.mark.parametrize(
    ("row", "references"),
    [
        ({"prompt": "a", "reference": "b"}, ("b",)),
        ({"prompt": "a", "reference": ["b", "c"]}, ("b", "c")),
        ({"article": "a", "highlights": "b"}, ("b",)),
        ({"translation": {"en": "a", "fr": "b"}}, ("b",)),
        ({"translation": {"en": "a", "fr": "b", "de": "c"}}, ()),
        ({"text": "a"}, ()),
        ({"text": "a", "reference": None}, ()),
        ({"text": "a", "reference": ["", "b"]}, ("b",)),
        ({"text": "a", "reference": [["b", "c"]]}, ("b", "c")),
    ],
)
def test_references_of_rows(row: dict[str, Any], references: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (found,) = prompts.load(path)
    assert found.references == references


@pytest.mark.parametrize("held", [3, ["a", 3], {"text": "a"}])
def test_references_that_are_no_strings_are_refused(held: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "reference": held}))
    with pytest.raises(ParameterError, match="row 1: reference must be a string or a list of strings"):
        prompts.load(path)


def asked(rows: Path, *more: str) -> list[str]:
    return [
        "quality", "early_exit", "--model", "family:draft", "--sweep", "exit_layer=1,2", "--prompts", str(rows), "--tokens", "12",
        "--threads", "1", "-q", *more,
    ]  # fmt: skip


@pytest.mark.usefixtures("libraries", "unrendered")
def test_the_command_scores_outputs(tmp_path: Path) -> None:
    """With plain decoding's own output as the reference, the exact setting scores 100 and the shallow exit less."""
    rows = tmp_path / "rows.jsonl"
    starts = ["def main(args):", "import os", "class Reader(object):"]
    decoded = []
    for text in starts:
        done = CliRunner().invoke(
            app, ["decode", "autoregressive", "--model", "family:draft", "--prompt", text, "--tokens", "12", "--json"]
        )
        decoded.append(json.loads(done.stdout)["sequences"][0]["text"])
    rows.write_text("\n".join(json.dumps({"prompt": a, "reference": b}) for a, b in zip(starts, decoded, strict=True)))
    out = tmp_path / "out.csv"
    arguments = asked(rows, "--score", "rouge-l,bleu", "-o", str(out), "--figures", str(tmp_path / "pictures"))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    table = pl.read_csv(out)
    shallow, whole = table.to_dicts()
    for score in ("rouge_l", "bleu"):
        assert shallow[f"plain_{score}"] == whole[f"plain_{score}"]
        assert shallow[score] < whole[score] == pytest.approx(whole[f"plain_{score}"])
    assert whole["rouge_l"] > 90
    cut = asked(rows, "--score", "rouge-l", "--cut-at", decoded[0].strip()[0], "-o", str(tmp_path / "cut.csv"))
    assert CliRunner().invoke(app, cut).exit_code == 0
    assert pl.read_csv(tmp_path / "cut.csv")["rouge_l"][1] < whole["rouge_l"]
    pair = ["--model", "family:draft", "--draft", "family:draft", "--prompts", str(rows), "--limit", "3", "--tokens", "12", "-q"]
    both = ["replace", *pair, "--thresholds", "0", "--score", "rouge-l", "--json", "-o"]
    alike = json.loads(CliRunner().invoke(app, [*both, str(tmp_path / "alike.csv")]).stdout)["rows"][0]
    assert alike["rouge_l"] == alike["plain_rouge_l"] == pytest.approx(whole["rouge_l"])  # the small model is the large one
    less = json.loads(CliRunner().invoke(app, [*both, str(tmp_path / "less.csv"), "--cut-at", decoded[0].strip()[0]]).stdout)
    assert less["rows"][0]["rouge_l"] < whole["rouge_l"]
    assert "percent, by sacrebleu" in done.stdout
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} >= {"agreement", "bleu", "rouge_l"}


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "import os"}))
    out = ["-o", str(tmp_path / "out.csv")]
    assert "--cut-at is used only with --score" in small.error_of(*asked(rows, "--cut-at", "x", *out))
    assert "unknown score 'rouge'" in small.error_of(*asked(rows, "--score", "rouge", *out))
    held_out = ["quality", "early_exit", "--model", "family:draft", "--score", "bleu", *out]
    assert "--score needs prompts with references" in small.error_of(*held_out)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sacrebleu", None)
        patch.setitem(sys.modules, "rouge_score", None)
        patch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
        words = small.error_of(*asked(rows, "--score", "bleu", *out))
        assert words == (
            "error: score bleu needs the package sacrebleu, which is not installed; install it: pip install 'decodesim[quality]'\n"
        )
        assert "the package rouge-score" in small.error_of(*asked(rows, "--score", "rouge-l", *out))


@pytest.mark.usefixtures("libraries")
def test_prompts_without_references_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "import os"}))
    words = small.error_of(*asked(rows, "--score", "bleu", "-o", str(tmp_path / "out.csv")))
    assert "prompt 1 (rows.jsonl, row 1) must have a reference for --score" in words
