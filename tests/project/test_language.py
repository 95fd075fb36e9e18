"""Pages, help, errors, docstrings and names of tests use the field's words (`notebooks/glossary.md`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import plain_words

ROOT = Path(__file__).parents[2]
ALLOWED: dict[str, set[str]] = {
    "calibrate/family/align_draft.py": {"texts"},  # a key of saved files
    "calibrate/family/corpus.py": {"texts"},  # a variable within a string
    "model/base/renamed_keys.py": {"beside", "texts"},  # keys of earlier versions
    "tests/calibrate/test_align_draft.py": {"texts"},
    "tests/calibrate/test_layers_command.py": {"nobody"},
    "tests/project/test_fuzzed_models.py": {"texts"},
    "tests/project/test_renamed_keys.py": {"texts"},
}
"""Words that are quoted, by file."""


def test_words_of_a_private_language_are_not_used() -> None:
    folders = [ROOT / each for each in (*plain_words.PACKAGES, *plain_words.PAGES)]
    places = [place for place in plain_words.occurrences(folders) if place.path != Path(__file__)]
    found = [place for place in places if place.word not in ALLOWED.get(str(place.path.relative_to(ROOT)), ())]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# by luck, behind it", ["luck", "behind"]), ('x = "so many texts"', ["so many", "texts"]), ("behind = 3", []),
        ("def test_what_nobody_sees(): pass", ["nobody"]), ("# a text, a textbook, put in", []),
        ('f"{x} put out"', ["put out"]), ('"""Whoever\ntakes back."""', ["Whoever", "takes back"]),
    ],
)  # fmt: skip
def test_words_are_found_in_comments_strings_and_names(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_words, "ROOT", tmp_path)
    path = tmp_path / "test_made.py"
    path.write_text(text + "\n")
    assert [place.word for place in plain_words.occurrences([path])] == words
