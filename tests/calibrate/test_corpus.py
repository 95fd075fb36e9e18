"""The corpus: held-out files, checksums, cuts, and text of the user."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import pytest

from calibrate.family import corpus
from model.base.checks import ParameterError

pytestmark = pytest.mark.usefixtures("one_thread")


# Text


def test_held_out_modules_are_not_in_the_training_text() -> None:
    found = corpus.standard_library()
    assert not set(found.training) & set(found.held_out)
    assert {Path(path).parts[0] for path in found.held_out} == set(corpus.HELD_OUT)
    for path in found.training:
        assert Path(path).parts[0] not in corpus.HELD_OUT
    part = sum(map(len, found.held_out.values())) / found.characters
    assert part == pytest.approx(1 / 14, rel=0.2), "said to be one part in fourteen"


def test_every_change_of_the_library_changes_its_checksum(tmp_path: Path) -> None:
    for name, text in (("csv.py", "rows\n"), ("random.py", "dice\n")):
        (tmp_path / name).write_text(text)
    first = corpus.standard_library(tmp_path)
    assert corpus.standard_library(tmp_path).checksum == first.checksum
    for name, text in (("csv.py", "row\n"), ("random.py", "Dice\n")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        assert corpus.standard_library(tmp_path).checksum != first.checksum
        (tmp_path / name).write_text(before)
    for name, text in (("csv.py", "rows\nd"), ("random.py", "ice\n")):  # the same characters in another module
        (tmp_path / name).write_text(text)
    assert corpus.standard_library(tmp_path).checksum != first.checksum
    for name, text in (("csv.py", "rows\n"), ("random.py", "dice\n")):
        (tmp_path / name).write_text(text)
    for path in ("test/left_out.py", "site-packages/a/b.py", "json/tests/c.py", "config-3/d.py", "_sysconfigdata_x.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("not read\n")
    assert corpus.standard_library(tmp_path) == first
    (tmp_path / "email" / "mime").mkdir(parents=True)
    (tmp_path / "email" / "mime" / "text.py").write_text("read\n")
    assert [*corpus.standard_library(tmp_path).training] == ["email/mime/text.py", "random.py"]


def test_file_is_split_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"line {number}\n" for number in range(140)))
    found = corpus.corpus_of_files(path)
    (begin,), (end,) = found.training.values(), found.held_out.values()
    assert begin + end == path.read_text()
    assert end.count("\n") == 10


def test_folder_holds_out_whole_files_stably(tmp_path: Path) -> None:
    for number in range(42):
        (tmp_path / f"{number}.md").write_text(f"text {number}\n")
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden.md").write_text("not read\n")
    found = corpus.corpus_of_files(tmp_path)
    assert (len(found.training), len(found.held_out)) == (39, 3)
    assert not set(found.training) & set(found.held_out)
    (tmp_path / "more.md").write_text("more\n")
    assert len(set(corpus.corpus_of_files(tmp_path).held_out) & set(found.held_out)) >= 2


def by_hand(texts: dict[str, str]) -> str:
    """Return the checksum of files: path, length and text of each, sorted by path."""
    return hashlib.sha256("".join(f"{path}\0{len(text)}\0{text}" for path, text in sorted(texts.items())).encode()).hexdigest()


def test_cut_is_exact_and_named() -> None:
    training, held_out = {"a": "12345", "b": "67890"}, {"c": "xyz", "d": "w"}
    whole = corpus.Corpus(training, held_out, "3.99", by_hand(training | held_out), "mine")
    assert whole.about() == {"name": "mine", "python": "3.99", "checksum": whole.checksum, "characters": 10}
    for most, first, second in ((7, {"a": "12345", "b": "67"}, {"c": ""}), (5, {"a": "12345"}, {"c": ""}),
                                (29, training, {"c": "xy"}), (40, training, held_out), (99, training, held_out)):  # fmt: skip
        found = whole.cut(most)
        assert found == corpus.Corpus(first, second, "3.99", by_hand(first | second), "mine, its beginning")
        assert found.about()["characters"] == sum(map(len, first.values()))


def test_own_files_are_held_out_by_name(tmp_path: Path) -> None:
    """At least the last line of a file; of a folder the names with the smallest sha256, without hidden paths."""
    folder = tmp_path / "mine"
    texts = {f"deep/{number}.rst": f"text {number}\n" for number in range(27)} | {"a.md": "a", "b.py": "ü", "c.txt": "c"}
    for name, text in (texts | dict.fromkeys((".git/a.md", "deep/.b.md", "__pycache__/c.py", "d.csv"), "not read")).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "e.md").mkdir()
    aside = sorted(sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:2])  # 2/14 of 30 files
    found = corpus.corpus_of_files(folder)
    assert [*found.held_out.items()] == [(name, texts[name]) for name in aside]
    assert found.training == {name: text for name, text in texts.items() if name not in aside}
    assert (found.name, found.python, found.checksum) == ("mine", platform.python_version(), by_hand(texts))
    path = tmp_path / "two.txt"
    path.write_text("one\ntwo\n")
    found = corpus.corpus_of_files(path)
    assert (found.training, found.held_out) == ({"two.txt": "one\n"}, {"two.txt, its end": "two\n"})
    assert (found.name, found.checksum) == ("two.txt", by_hand(found.training | found.held_out))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/random.py").write_text("dice\n")
    (tmp_path / "lib/old.py").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ParameterError, match=r"^no standard library is at .*lib, or not its source; give the folder that has"):
        corpus.standard_library(tmp_path / "lib")
    (tmp_path / "lib/csv.py").write_text("rows\n")
    assert corpus.standard_library(tmp_path / "lib").training == {"random.py": "dice\n"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nothing", "text must be a file or a folder"),
        (lambda path: path, "text must have a part to train on and one to hold out"),
        (lambda path: _written(path / "one.txt", b"a single line"), "text must have a part"),
        (lambda path: _written(path / "latin.txt", b"caf\xe9\n" * 20), "text must be in UTF-8"),
    ],
)
def test_paths_without_text_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        corpus.corpus_of_files(make(tmp_path))


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
