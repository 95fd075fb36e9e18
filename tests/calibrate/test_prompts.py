"""Prompts: forms of files, the papers' templates, limits and seeds, and errors of files."""

import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.commands.common_options import guarded
from calibrate.family import corpus, vocabulary
from calibrate.loading import prompts
from calibrate.loading.prompts import Prompt, held_out, load
from model.base.checks import ParameterError

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "text"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no public text files: DECODESIM_DATA names their folder")

SQUAD = {"id": "q7", "context": "A heap is a tree.", "question": "What is a heap?"}
NESTED = {
    "version": "1.1",
    "data": [
        {
            "title": "Heaps",
            "paragraphs": [
                {"context": SQUAD["context"], "qas": [{"id": "q7", "question": SQUAD["question"], "answers": []}]},
                {"context": "A queue is a line.", "qas": [{"id": "q8", "question": "Which?"}, {"id": "q9", "question": "And?"}]},
            ],
        },
        {"title": "Nothing", "paragraphs": []},
    ],
}  # fmt: skip
# Copied from the paper a second time, so that an error of the module shows.
SQUAD_PROMPT = """We have provided context information below.
———————
A heap is a tree.
———————
### Given this information, please answer the question: What is a heap?
### Assistant:"""
WMT_PROMPT = """### Instruction: Translate English sentence into French.
English: Sounds like a typical rugby club to me.
French: Ça m’a l’air d’être un club de rugby typique. #
English: At an English university, perhaps…
French: Dans une université anglaise, peut-être… #
English: It rains {again}.
French:"""
CNN_PROMPT = "# Article\nMud {was} found.\n# Summarize the article\n### Assistant:"
ROWS = [
    ({**SQUAD, "answers": {}}, "squad", SQUAD_PROMPT, "A heap is a tree.\nWhat is a heap?"),
    ({"article": "Mud {was} found.", "highlights": "Mud."}, "cnn-dm", CNN_PROMPT, "Mud {was} found."),
    ({"translation": {"en": "It rains {again}.", "fr": "Il pleut."}}, "wmt", WMT_PROMPT, "It rains {again}."),
    ({"en": "It rains {again}."}, "wmt", WMT_PROMPT, "It rains {again}."),
]  # fmt: skip


def written(folder: Path, name: str, held: object) -> Path:
    """Write a file: strings and bytes unchanged, lists as JSON lines for `.jsonl`, all else as JSON."""
    path = folder / name
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif isinstance(held, str):
        path.write_bytes(held.encode())
    elif isinstance(held, list) and name.endswith("l"):
        path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in held).encode())
    else:
        path.write_bytes(json.dumps(held, ensure_ascii=False).encode())
    return path


def contents(found: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in found]


# --- Forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "jsonl", "ndjson"])
@pytest.mark.parametrize(("row", "name", "prompt", "bare"), ROWS)
def test_rows_of_a_data_set_use_its_template(
    tmp_path: Path, suffix: str, row: dict[str, Any], name: str, prompt: str, bare: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text(json.dumps([row]) if suffix == "json" else json.dumps(row), encoding="utf-8")
    (found,) = load(path)
    assert found.text == prompt
    assert f"template {name}" in found.source
    assert load(path, template=name) == [found]
    assert contents(load(path, template="none")) == [bare]


def test_squads_nested_form_gives_the_prompts_of_its_rows(tmp_path: Path) -> None:
    nested = load(written(tmp_path, "squad.json", NESTED))
    assert [prompt.id for prompt in nested] == ["q7", "q8", "q9"]
    assert nested[0].text == SQUAD_PROMPT == load(written(tmp_path, "rows.json", [SQUAD]))[0].text
    assert nested[1].source.startswith("squad.json, data[0].paragraphs[1].qas[0]; template squad")
    assert "A queue is a line." in nested[1].text
    assert "A queue is a line." in nested[2].text


@pytest.mark.parametrize(
    ("name", "held", "expected"),
    [
        ("p.json", ["One", "Two\n2"], ["One", "Two\n2"]),
        ("p.jsonl", ["One", "Two\n2"], ["One", "Two\n2"]),
        ("p.jsonl", '\n{"prompt": "One"}\r\n\n{"prompt": "Two"}', ["One", "Two"]),
        ("p.jsonl", b'\xef\xbb\xbf{"prompt": "One"}\n', ["One"]),
        ("p.jsonl", [{"text": "One"}, {"text": " Two"}], ["One", " Two"]),
        ("p.jsonl", [{"question_id": 81, "turns": ["One", "And then?"]}], ["One"]),
        ("p.txt", "One\r\n\n  \nTwo\\n2\n\\\\n and C:\\dir", ["One", "Two\n2", "\\n and C:\\dir"]),
        ("p.txt", "One\n1\\n\n<|endoftext|>\n\nTwo\n\n2\n\n<|endoftext|>\n \n\n", ["One\n1\\n", "Two\n\n2"]),
        ("p.md", "# One\n1\n \n\n\nTwo", ["# One\n1", "Two"]),
        ("p.raw", " \n = Heaps = \n \n A heap = a tree . \n Another . \n = = Queues = = \n", ["A heap = a tree .", "Another ."]),
    ],
)  # fmt: skip
def test_complete_prompts_stay_unchanged(tmp_path: Path, name: str, held: object, expected: list[str]) -> None:
    path = written(tmp_path, name, held)
    found = load(path)
    assert contents(found) == expected == contents(load(str(path), template="none"))
    assert all("template" not in prompt.source for prompt in found)
    # A complete prompt fits a template with a single field.
    assert contents(load(path, template="cnn-dm"))[0] == CNN_PROMPT.replace("Mud {was} found.", expected[0])


@pytest.mark.parametrize(
    ("name", "held", "rows"),
    [
        ("p.json", ["One", {"id": 7, "text": "Two"}], [("1", 1), ("7", 2)]),
        ("p.jsonl", '\n"One"\n\n{"question_id": "b", "text": "Two"}\n"Three"', [("1", 2), ("b", 4), ("3", 5)]),
        ("p.txt", "One\n\n  \nTwo\r\n", [("1", 1), ("2", 4)]),
        ("p.txt", "\n <|endoftext|> \nOne\n1\n<|endoftext|>\r\nTwo\n<|endoftext|>\n\n<|endoftext|>\nThree",
         [("1", 3), ("2", 6), ("3", 10)]),
        ("p.rst", "One\n1\n\n \nTwo", [("1", 1), ("2", 5)]),
        ("p.tokens", " = A = \n One \n \n = = B = = \n Two ", [("1", 2), ("2", 5)]),
    ],
)  # fmt: skip
def test_prompts_have_ids_or_numbers_and_their_first_row(
    tmp_path: Path, name: str, held: object, rows: list[tuple[str, int]]
) -> None:
    found = load(written(tmp_path, name, held))
    assert [(each.id, each.source) for each in found] == [(number, f"{name}, row {row}") for number, row in rows]
    assert [each.text.partition("\n")[0] for each in found] == ["One", "Two", "Three"][: len(rows)]


@pytest.mark.parametrize("wrong", [True, 1.5, None, ["a"]])
@pytest.mark.parametrize("column", ["id", "question_id"])
def test_ids_are_strings_or_whole_numbers(tmp_path: Path, column: str, wrong: object) -> None:
    path = written(tmp_path, "p.json", [{column: wrong, "prompt": "x"}])
    with pytest.raises(ParameterError, match=f"row 1: {column} must be a string or a whole number, got "):
        load(path)


def test_held_out_prompts_have_module_and_line_and_long_lists_are_cut(tmp_path: Path) -> None:
    """Lines count from 1; an error lists at most twelve columns."""
    library = corpus.Corpus({"kept.py": "x"}, {"a.py": "def a():\n\n    async def b():\n\tclass C:"}, "3.x", "none")
    found = held_out(8, 3, 0, corpus=library)
    assert {each.id: each.text for each in found} == {"a.py:1": "def a():", "a.py:3": "    asyn", "a.py:4": "\tclass C"}
    assert {each.source for each in found} == {"held-out modules of the standard library of Python 3.x, characters: 8"}
    for count, more in ((12, ""), (13, ", ...")):
        row = {f"c{number}": 1 for number in range(count)}
        listed = ", ".join(repr(f"c{number}") for number in range(12))
        with pytest.raises(ParameterError, match=rf"no column holds a prompt, got {listed}{re.escape(more)}; known forms"):
            load(written(tmp_path, "p.jsonl", [row]))


def test_a_complete_prompt_is_preferred_unless_a_template_needs_a_column(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", [{"article": "Mud {was} found.", "prompt": "Ready"}])
    assert contents(load(path)) == ["Ready"] == contents(load(path, template="none"))
    assert contents(load(path, template="cnn-dm")) == [CNN_PROMPT]


LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff")
MANY = st.lists(st.text(LETTERS, min_size=1).filter(lambda text: text.strip()), min_size=1, max_size=8)
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@one_folder
@given(MANY, st.sampled_from(["json", "jsonl", "objects", "txt"]))
def test_prompts_are_read_in_order(tmp_path: Path, held: list[str], form: str) -> None:
    if form == "txt":
        held = [text.replace("<|endoftext|>", "end") for text in held]
        lines = (
            text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") for text in held
        )
        path = written(tmp_path, "p.txt", "\n".join(lines))
    else:
        rows = [{"prompt": text} for text in held] if form == "objects" else held
        path = written(tmp_path, "p.json" if form == "json" else "p.jsonl", rows)
    assert contents(load(path)) == held


@one_folder
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_limits_and_seeds(tmp_path: Path, count: int, limit: int, seed: int, chance: Any) -> None:
    rows = [{"id": f"r{index}", "prompt": f"Prompt {index}"} for index in range(count)]
    path = written(tmp_path, "p.jsonl", rows)
    everything, drawn = load(path), load(path, seed=seed)
    assert load(path, limit=limit) == everything[:limit]
    assert load(path, limit=limit, seed=seed) == drawn[:limit]
    assert sorted(contents(drawn)) == sorted(contents(everything))
    assert load(path, seed=seed) == drawn
    chance.shuffle(rows)
    assert contents(load(written(tmp_path, "q.jsonl", rows), seed=seed)) == contents(drawn)  # the order of the rows does not matter


def test_seeds_differ(tmp_path: Path) -> None:
    """Over 200 seeds, each of four prompts comes first at least 30 times; a correct program fails with probability 2e-4."""
    path = written(tmp_path, "p.json", ["a", "b", "c", "d"])
    first = [load(path, limit=1, seed=seed)[0].text for seed in range(200)]
    assert min(first.count(text) for text in "abcd") >= 30


# --- Data sets by name ----------------------------------------------------------------------------------------------


def library(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("name", "row"), [("squad", ROWS[0]), ("cnn_dailymail", ROWS[1]), ("wmt14-en-fr", ROWS[2]), ("wmt15-en-fr", ROWS[2])]
)
def test_a_data_set_by_name_is_loaded_by_the_library(monkeypatch: pytest.MonkeyPatch, name: str, row: tuple[Any, ...]) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*arguments: Any, split: str) -> list[Any]:
        asked.append((*arguments, split))
        return [row[0]]

    library(monkeypatch, load_dataset)
    (found,) = load(name)
    assert found.text == row[2]
    assert found.source.startswith(f"{name}, row 1; template {row[1]}")
    assert asked == [tuple(prompts.DATA_SETS[name])]


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), RuntimeError(), FileNotFoundError("no such data set")])
def test_errors_without_a_network_name_the_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*arguments: Any, split: str) -> Any:
        raise error

    library(monkeypatch, load_dataset)
    reason = str(error).split("\n")[0] or type(error).__name__
    with pytest.raises(ParameterError, match=rf"^data set squad cannot be loaded: {reason}; give a local file instead: a \.json"):
        load("squad")


def test_errors_without_the_library_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ParameterError, match=r"^data set squad needs the datasets library, not installed; install it, or"):
        load("squad")


def test_a_file_is_preferred_to_a_data_set_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("squad").write_text("x")
    with pytest.raises(ParameterError, match=r"^squad: unknown suffix ''; known: \.json, \.jsonl,"):
        load("squad")


# --- Errors ---------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, object, dict[str, Any], str]] = [
    ("p.json", "", {}, "it is empty; give a file with at least one prompt"),
    ("p.txt", "\n \r\n", {}, "it is empty; give a file with at least one prompt"),
    ("p.jsonl", b"\xef\xbb\xbf", {}, "it is empty; give a file with at least one prompt"),
    ("p.json", [], {}, "it holds no prompt"),
    ("p.json", {"data": []}, {}, "it holds no prompt"),
    ("p.txt", "<|endoftext|>\n\n<|endoftext|>", {}, "it holds no prompt"),
    ("p.raw", " = Heaps = \n", {}, "it holds no prompt"),
    ("p.json", "[1, 2", {}, "it is not JSON: .*; known forms: a .json list"),
    ("p.json", "[" * 100_000, {}, "it is not JSON: brackets are nested too deeply"),
    ("p.json", '["' + "9" * 5 + '", ' + "9" * 5000 + "]", {}, "it is not JSON: Exceeds the limit"),
    ("p.json", "3", {}, "the form of the JSON is unknown, 3; known forms: a .json list"),
    ("p.json", {"rows": [], "n": 1}, {}, "the form of the JSON is unknown, an object with 'rows', 'n'; known forms"),
    ("p.json", {}, {}, "the form of the JSON is unknown, an object with no columns; known forms"),
    ("p.json", {"data": [{"title": "x"}]}, {}, r"data\[0\] has no paragraphs; in SQuAD's form data holds articles"),
    ("p.json", {"data": [3]}, {}, r"data\[0\] has no paragraphs"),
    ("p.json", {"data": [{"paragraphs": [{"context": 3}]}]}, {}, r"data\[0\].paragraphs\[0\] has no context"),
    ("p.json", {"data": [{"paragraphs": [{"context": "x"}]}]}, {}, r"data\[0\].paragraphs\[0\] has no qas"),
    ("p.json", {"data": [{"paragraphs": [{"context": "x", "qas": [{}]}]}]}, {}, r"paragraphs\[0\].qas\[0\] has no question"),
    ("p.json", {"data": [{"paragraphs": [{"context": " ", "qas": [{"question": "?"}]}]}]}, {}, r"qas\[0\]: context is empty"),
    ("p.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"', {}, "row 3: it is not JSON: "),
    ("p.jsonl", ["x", 3], {}, "row 2: it must be a string or an object, got 3"),
    ("p.json", ["x", None], {}, "row 2: it must be a string or an object, got None"),
    ("p.json", ["x", " \n"], {}, "row 2: text is empty; fill it, or remove the row"),
    ("p.jsonl", [{"prompt": "x"}, {"prompt": ""}], {}, "row 2: prompt is empty"),
    ("p.jsonl", [{"prompt": "x"}, {"text": "y"}], {}, "row 2: column prompt is missing, got 'text'; all rows must have"),
    ("p.jsonl", [{"prompt": 5}], {}, "row 1: prompt must be a string, got 5"),
    ("p.jsonl", [{"title": "x"}], {}, "row 1: no column holds a prompt, got 'title'; known forms"),
    ("p.jsonl", [{}], {}, "row 1: no column holds a prompt, got no columns; known forms"),
    ("p.jsonl", [{"question": "x"}], {}, r"row 1: no column holds a prompt, got 'question' \(question alone is not SQuAD's\)"),
    ("p.jsonl", [SQUAD, {"id": 2, "context": "y"}], {}, "row 2: column question is missing, got 'id', 'context'"),
    ("p.jsonl", [{"turns": []}], {}, r"row 1: turns must be a non-empty list of strings, got \[\]"),
    ("p.jsonl", [{"turns": [" "]}], {}, r"row 1: turns\[0\] is empty"),
    ("p.jsonl", [{"turns": ["x"]}, {"prompt": "x"}], {}, "row 2: column turns is missing"),
    ("p.jsonl", [{"translation": "x"}], {}, "row 1: translation must be an object with en, got 'x'"),
    ("p.jsonl", [{"translation": {"fr": "x"}}], {}, "row 1: translation: column en is missing, got 'fr'"),
    ("p.jsonl", [{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}], {}, "ids must differ, got '1' in p.jsonl, row 1 and in p"),
    ("p.jsonl", [{"id": True, "prompt": "x"}], {}, "row 1: id must be a string or a whole number, got True"),
    ("p.jsonl", [{"id": "", "prompt": "x"}], {}, "row 1: id of a prompt must be a non-blank string, got ''"),
    ("p.json", '["\\ud83d"]', {}, "row 1: text of a prompt must not hold surrogates"),
    ("p.txt", "Käse".encode("latin-1"), {}, r"it is not text in UTF-8 \(byte 2\); convert it to UTF-8"),
    ("p.parquet", b"PAR1", {}, "unknown suffix '.parquet'; known: .json, .jsonl, .ndjson, .txt,"),
    ("p.jsonl", ["x"], {"template": "squad"}, "row 1: template squad needs context and question, got 'text'; take template none"),
    ("p.jsonl", [{"en": "x"}], {"template": "cnn-dm"}, "row 1: template cnn-dm needs article or prompt or turns or text, got 'en'"),
    ("p.jsonl", [SQUAD], {"template": "wmt"}, "row 1: template wmt needs translation or en or prompt or turns or text, got 'id'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "held", "options", "message"), BAD)
def test_a_wrong_file_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, held: object, options: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, name, held)
    with pytest.raises(ParameterError, match=message) as caught:
        load(path, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1
    with pytest.raises(SystemExit) as left:
        guarded(lambda: print(load(path, **options)))()
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("error: ")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("nowhere.jsonl"), r"^nowhere\.jsonl: there is no such file; give one: a .json list"),
        (lambda: load("no/where"), "^no/where: there is no such file"),
        (lambda: load("cnn-dailymail"), "^there is no file 'cnn-dailymail' and no data set of this name; did you mean cnn_d"),
        (lambda: load(Path(__file__).parent), "it is a folder; give a file"),
        (lambda: load(""), r"^\.: it is a folder; give a file"),
        (lambda: load(__file__, template="cnn"), "unknown template 'cnn'; did you mean cnn-dm[?] known: chat, cnn-dm, none, squad"),
        (lambda: load(__file__, limit=0), "^limit must be at least 1, got 0"),
        (lambda: load(__file__, limit=True), "^limit must be a whole number, got True"),
        (lambda: load(__file__, seed=-1), "^seed must be at least 0, got -1"),
        (lambda: Prompt("1", " ", "here"), "^text of a prompt must be a non-blank string, got ' '"),
        (lambda: Prompt(1, "x", "here"), "^id of a prompt must be a non-blank string, got 1"),  # type: ignore[arg-type]
        (lambda: held_out(0, 1, 1), "^length must be at least 1, got 0"),
        (lambda: held_out(1, 0, 1), "^count must be at least 1, got 0"),
        (lambda: held_out(1, 1, -1), "^seed must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()


# --- Held-out code of the family ------------------------------------------------------------------------------------


def module(name: str, functions: int) -> str:
    return f'"""The module {name}."""\n\n' + "\n\n".join(
        f"def {name}_{index}(first, second):\n    return first + second * {index}" for index in range(functions)
    )


@pytest.fixture(scope="module")
def small() -> corpus.Corpus:
    return corpus.Corpus({"kept.py": module("kept", 4)}, {"csv.py": module("csv", 12), "json/x.py": module("é", 12)}, "3.x", "none")


@given(st.integers(1, 90), st.integers(1, 8), st.integers(0, 99))
def test_held_out_prompts_are_starts_of_one_length_that_do_not_overlap(
    small: corpus.Corpus, length: int, count: int, seed: int
) -> None:
    found = held_out(length, count, seed, corpus=small)
    assert len(found) == count == len({prompt.id for prompt in found})
    spans: list[tuple[str, int]] = []
    for prompt in found:
        name, line = prompt.id.rsplit(":", 1)
        text = small.held_out[name]
        at = sum(len(row) + 1 for row in text.split("\n")[: int(line) - 1])
        assert len(prompt.text) == length
        assert text[at:].startswith(prompt.text)
        assert text[at:].startswith("def ")
        assert all(name != other or abs(at - there) >= length for other, there in spans)
        spans.append((name, at))
    assert found == held_out(length, 8, seed, corpus=small)[:count]


@pytest.mark.parametrize("seed", range(4))
def test_prompts_may_end_where_others_begin(seed: int) -> None:
    """Functions of seven characters: all of them are prompts of length 7, but prompts of length 8 would overlap."""
    held = corpus.Corpus({"kept.py": "x"}, {"a.py": "def a\n\ndef b\n\ndef c\n\n"}, "3.x", "none")
    assert {*contents(held_out(7, 3, seed, corpus=held))} == {"def a\n\n", "def b\n\n", "def c\n\n"}
    with pytest.raises(ParameterError, match=r"^count must be at most 1, got 3"):
        held_out(8, 3, seed, corpus=held)


def test_held_out_prompts_of_tokens(small: corpus.Corpus) -> None:
    tokenizer = vocabulary.train_tokenizer(small, 300)
    for seed in range(3):
        found = held_out(20, 4, seed, tokenizer=tokenizer, corpus=small)
        assert [len(tokenizer.encode(prompt.text, add_special_tokens=False).ids) for prompt in found] == [20] * 4
        assert all(len(prompt.text) > 20 for prompt in found)  # tokens, not characters
        assert all("tokens: 20" in prompt.source for prompt in found)


def test_a_prompt_never_ends_within_a_character() -> None:
    """The tokens are bytes, so that five tokens of 'def é' end within the last character."""
    held = corpus.Corpus({"kept.py": "x" * 9}, {"a.py": "def éééé", "b.py": "def eeeee"}, "3.x", "none")
    tokenizer = vocabulary.train_tokenizer(held, 257)
    assert contents(held_out(5, 1, 0, tokenizer=tokenizer, corpus=held)) == ["def e"]
    with pytest.raises(ParameterError, match=r"^count must be at most 1, got 2: .* no more prompts of 5 tokens"):
        held_out(5, 2, 0, tokenizer=tokenizer, corpus=held)


def test_a_cut_that_tokenizes_to_fewer_tokens_is_left_out() -> None:
    """A tokenizer that merges the last two letters: five letters cut from a text are four tokens by themselves."""

    class LastTwo:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            assert not add_special_tokens
            return types.SimpleNamespace(ids=[*map(ord, text[:-2]), *([1000 * ord(text[-2]) + ord(text[-1])] if text[1:] else [])])

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return "".join(map(chr, (part for number in ids for part in (divmod(number, 1000) if number > 1000 else (number,)))))

    # Only the whole text has nine tokens both as a part and by itself.
    held = corpus.Corpus({"kept.py": "x"}, {"a.py": "def eeeeee"}, "3.x", "none")
    assert contents(held_out(9, 1, 0, tokenizer=LastTwo(), corpus=held)) == ["def eeeeee"]
    with pytest.raises(ParameterError, match=r"^count must be at most 0, got 1"):
        held_out(5, 1, 0, tokenizer=LastTwo(), corpus=held)


def test_held_out_prompts_are_not_in_the_training_modules() -> None:
    library = corpus.standard_library()
    found = held_out(300, 20, 5, corpus=library)
    assert not any(prompt.text in text for prompt in found for text in library.training.values())
    assert found != held_out(300, 20, 6, corpus=library)


def test_too_many_held_out_prompts_are_refused(small: corpus.Corpus) -> None:
    most = sum(len(text) for text in small.held_out.values()) // 50
    with pytest.raises(ParameterError, match=r"^count must be at most") as caught:
        held_out(50, 1000, 0, corpus=small)
    assert 0 < int(str(caught.value).split()[5].rstrip(",")) <= most
    with pytest.raises(ParameterError, match=r"^count must be at most 0, got 1: .* no more prompts of 5000 characters"):
        held_out(5000, 1, 0, corpus=small)


# --- Files at hand --------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    ("name", "template", "count"),
    [
        ("xquad.en.json", "squad", 1190),  # questions of XQuAD, Artetxe et al. 2020, Section 3
        ("spec_bench_question.jsonl", None, 480),  # of Spec-Bench, Xia et al. 2024, Section 4: 80 of each of six tasks
        ("cnndm_test.jsonl", None, 100),
        ("tinystories_sample.txt", None, None),
        ("wiki.valid.raw", None, None),
    ],
)  # fmt: skip
def test_files_at_hand(name: str, template: str | None, count: int | None) -> None:
    found = load(DATA / name)
    assert count is None or len(found) == count
    assert all(("template squad" in prompt.source) == (template == "squad") for prompt in found)
    if template == "squad":
        assert all(prompt.text.endswith("\n### Assistant:") and prompt.text.count("———————") == 2 for prompt in found)
    if name.startswith("tiny"):
        assert not any("<|endoftext|>" in prompt.text for prompt in found)
        assert sum(prompt.text.count("\n") for prompt in found) > len(found)  # stories, not lines
    if name.startswith("wiki"):
        assert not any(prompt.text.startswith("=") and prompt.text.endswith("=") for prompt in found)
