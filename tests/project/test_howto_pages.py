"""Pages that answer questions: each command is executed and prints what the page shows, and the pages are short and can be found.

`make notebooks ARGS=notebooks/howto/PAGE.md` writes outputs anew. A page whose commands ran with the same sources
before is not executed again (`--cache-clear` forgets).
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import pytest

from tests.project.test_notebooks import digest
from tests.support import console_pages
from tests.support.console_pages import Shown

ROOT = Path(__file__).parents[2]
PAGES = console_pages.pages()
MOST_LINES = 60
PAGE = """# A question?

```console
$ cat greeting greeting \\
    greeting
hello
hello
...

$ sim ls shapes gpt2
hidden 1
```
"""


@functools.cache
def sources() -> str:
    """Digest of all that pages share: the packages, the files of the pages, and what executes them."""
    files = b"".join(each.read_bytes() for each in sorted(console_pages.FILES.iterdir()))
    return digest(Path(console_pages.__file__)) + hashlib.sha256(files).hexdigest()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_print_what_the_page_shows(path: Path, request: pytest.FixtureRequest) -> None:
    config = request.config
    cache = config.cache if config.pluginmanager.hasplugin("cacheprovider") else None
    key, now = f"howto/{path.stem}", sources() + hashlib.sha256(path.read_bytes()).hexdigest()
    if cache is not None and cache.get(key, None) == now:
        return
    found = list(console_pages.differences(path))
    assert not found, "\n\n".join([f"{path.name} is out of date; `make notebooks ARGS={path.relative_to(ROOT)}` renews it", *found])
    if cache is not None:
        cache.set(key, now)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_is_short_and_has_a_title_and_commands(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page.startswith("# ")
    assert len(console_pages.prose(page)) < MOST_LINES
    assert any(console_pages.commands(block) for block in console_pages.blocks(page))
    assert page.count("```") == 2 * len(console_pages.blocks(page)), "a block that is not executed"


def test_pages_are_linked_from_the_readme_and_the_index() -> None:
    howto = {path.name for path in console_pages.FOLDER.iterdir() if path.suffix in (".md", ".ipynb")}
    linked = set(re.findall(r"\(notebooks/howto/([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    index = (ROOT / "notebooks" / "index.md").read_text(encoding="utf-8")
    assert linked == howto
    assert {f"howto/{Path(name).stem}" for name in howto} <= set(index.splitlines())


def test_links_between_pages_lead_to_files() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8")):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_made_logs_say_that_they_are_made() -> None:
    for path in (each for each in console_pages.FILES.iterdir() if each.suffix in (".log", ".txt")):
        assert "the numbers are made" in path.read_text(encoding="utf-8").splitlines()[0]


# --- The reader and the writer of pages ---


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "greeting").write_text("hello\n")
    monkeypatch.setattr(console_pages, "FILES", tmp_path / "files")
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_differences_are_found_and_stored(page: Path) -> None:
    [found] = console_pages.differences(page)
    assert "$ sim ls shapes gpt2" in found
    assert "-hidden 1" in found
    assert console_pages.store(page)
    text = page.read_text()
    assert text.startswith(PAGE[: PAGE.index("hidden 1")])  # what was right stays, with its `...`
    assert "layers          12\nhidden          768\n" in text
    assert not list(console_pages.differences(page))
    assert not console_pages.store(page)
    page.write_text(text.replace("...\n", ""))
    assert len(list(console_pages.differences(page))) == 1


def test_refused_command_shows_its_error(page: Path) -> None:
    page.write_text("```console\n$ sim ls shapes gpt22\n```\n")
    console_pages.store(page)
    assert "error: unknown shape 'gpt22'" in page.read_text()


def test_lines_after_a_backslash_or_a_second_prompt_belong_to_the_command() -> None:
    [one, two] = console_pages.commands('$ python -c "a = 1\n> print(a)"\n1\n> 2\n$ cat \\\n  b\n')
    assert one == Shown(('$ python -c "a = 1', '> print(a)"'), ("1", "> 2"))
    assert (one.arguments, two.arguments) == (["python", "-c", "a = 1\nprint(a)"], ["cat", "b"])
    with pytest.raises(ValueError, match="must open with"):
        console_pages.commands("output\n$ cat b\n")


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("a|...|d", "a|b|c|d", True), ("a|...", "a", True), ("...|a", "b|a", True), ("a|...|d", "a|d |e", False),
        ("a.c", "abc", False), ("...", "", True), ("a", "", False), ("a|b", "a  |b", True), ("a|...|b|...|c", "a|c|b", False),
    ],
)  # fmt: skip
def test_three_dots_stand_for_any_lines(shown: str, printed: str, agree: bool) -> None:
    lines = printed.split("|") if printed else []
    assert console_pages.agrees(shown.split("|"), lines) is agree


def test_places_that_are_shown_are_found_in_a_new_output() -> None:
    shown = ["best 1.2", "...", " 3  0.5", "...", "rests on", "  a"]
    printed = ["best 1.3", " 1  0.4", " 2  0.5", " 3  0.7", "x", "rests on", "  a", "  b"]
    assert console_pages.shortened(shown, printed) == ["best 1.3", "...", " 3  0.7", "...", "rests on", "  a", "  b"]
    assert console_pages.shortened(["best", "...", "not there", "...", "  b"], printed) == printed
    assert console_pages.shortened(["...", "row a", "..."], ["row of another table"]) == ["row of another table"]
    verdict = ["best 1.2", "or 2", "", "rests on"]
    assert console_pages.shortened(["best 1.2, or", "not there", "..."], verdict) == [*verdict[:2], "..."]
    assert console_pages.shortened(["...", " 32  1.1", "..."], ["  1  1.1", " 32  1.2", "128  1.1"]) == ["...", " 32  1.2", "..."]
