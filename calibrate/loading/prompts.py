"""Prompts: from a file, from a data set of the papers, or from the family's held-out modules.

Files are in UTF-8.

* `.json`: a list of strings, a list of objects, or SQuAD's nested form.
* `.jsonl`, `.ndjson`: an object or a string per line.
* `.txt`: a prompt per line, with the escapes \\n, \\t, \\r and \\\\; or unescaped prompts separated by lines `<|endoftext|>`.
* `.md`, `.rst`, `.text`: paragraphs, separated by blank lines.
* `.raw`, `.tokens`: WikiText, a paragraph per line, without headings.

An object holds its prompt as `prompt`, `turns` (only the first turn is used) or `text`, or it is a row of a data set: `context` and
`question` of SQuAD, `article` of CNN/DM, `translation` of WMT (an object with `en`), or `en`. The first object decides for all.
Rows of a data set are inserted in the prompt template of Table 1 in [Yang2024]. References to score outputs against are in
`reference` (a string or a list of strings), `highlights` of CNN/DM, or the other language of a `translation`.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for Exact
LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.family.corpus import Corpus, standard_library
from model.base import bounded_files, checks
from model.base.checks import ParameterError

TEMPLATES = {
    "squad": (
        "We have provided context information below.\n———————\n{context}\n———————\n"
        "### Given this information, please answer the question: {question}\n### Assistant:"
    ),
    "wmt": (
        "### Instruction: Translate English sentence into French.\n"
        "English: Sounds like a typical rugby club to me.\nFrench: Ça m’a l’air d’être un club de rugby typique. #\n"
        "English: At an English university, perhaps…\nFrench: Dans une université anglaise, peut-être… #\n"
        "English: {source_sentence}\nFrench:"
    ),
    "cnn-dm": "# Article\n{context}\n# Summarize the article\n### Assistant:",
}
"""Prompt templates of Table 1 of [Yang2024], as printed; the first example is that of SQuAD."""
CHAT = "chat"
"""Name of the model's chat template, with the prompt as the user's message."""
CHOICES = (*TEMPLATES, CHAT, "none")
COLUMNS = {"squad": ("context", "question"), "cnn-dm": ("article",), "wmt": ("translation", "en")}
"""Columns that identify a row of a data set: both for SQuAD, either for WMT."""
READY = ("prompt", "turns", "text")
"""Columns that hold a complete prompt."""
OBJECTS, PARAGRAPHS, WIKITEXT = (".jsonl", ".ndjson"), (".md", ".rst", ".text"), (".raw", ".tokens")
"""File suffixes besides `.json` and `.txt`."""
END_OF_TEXT = "<|endoftext|>"
FORMS = (
    "a .json list of strings or objects or SQuAD's nested form, a .jsonl of objects, a .txt with a prompt per line, or paragraphs"
    f" in {', '.join((*PARAGRAPHS, *WIKITEXT))}; an object has {', '.join(READY)}, context and question, article, translation or en"
)


class Public(NamedTuple):
    """Name of a data set in the `datasets` library, with its configuration and test split."""

    path: str
    configuration: str | None
    part: str


DATA_SETS = {
    "squad": Public("rajpurkar/squad", None, "validation"),
    "cnn_dailymail": Public("abisee/cnn_dailymail", "3.0.0", "test"),
    "wmt14-en-fr": Public("wmt/wmt14", "fr-en", "test"),
    "wmt15-en-fr": Public("wmt/wmt15", "fr-en", "test"),
}
"""Data sets by name. [Yang2024] used 10,570 pairs of SQuAD 1.1, 11,487 of CNN/DM and 1,500 of WMT15 (Section 4.3)."""


@dataclass(frozen=True)
class Prompt:
    """A prompt text. `source` is its file or data set and row, and its template.

    `references` are strings to score outputs against, if the data set has them.
    """

    id: str
    text: str
    source: str
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("id", "text", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ParameterError(f"{name} of a prompt must be a non-blank string, got {checks.shown(value)}")
            try:
                value.encode()
            except UnicodeEncodeError:
                given = checks.shown(value)
                raise ParameterError(f"{name} of a prompt must not hold surrogates (half characters), got {given}") from None


def load(
    where: str | Path, *, template: str | None = None, limit: int | None = None, seed: int | None = None
) -> list[Prompt]:
    """Load the prompts of a file or data set, at most `limit`: the first ones, or with `seed` a random choice.

    `template` is one of `TEMPLATES`; `none` for the bare columns (SQuAD: context, newline, question); or `chat`, which
    `calibrate.loading.load_models.tokenize` applies later, with the model. By default, rows of a data set get its template and
    other prompts none. A seed orders prompts by a hash of their ids, so a smaller `limit` selects the first of a larger one, and
    the order of the file does not matter.

    >>> load("sqad")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: there is no file 'sqad' and no data set of this name; did you mean squad? ...
    """
    if template is not None:
        checks.one_of("template", template, CHOICES)
    if limit is not None:
        checks.whole("limit", limit, 1)
    if seed is not None:
        checks.whole("seed", seed, 0)
    found = [*_unique(_prompts(where, "none" if template == CHAT else template), str(where))]
    if not found:
        raise ParameterError(f"{where}: it holds no prompt; give a file with at least one")
    if seed is not None:
        found.sort(key=lambda prompt: _draw(seed, prompt.id))
    return found[:limit]


def _unique(prompts: Iterable[Prompt], where: str) -> Iterator[Prompt]:
    seen: dict[str, str] = {}
    for prompt in prompts:
        if prompt.id in seen:
            first = seen[prompt.id]
            both = f"{checks.shown(prompt.id)} in {first} and in {prompt.source}"
            raise ParameterError(f"{where}: ids must differ, got {both}; change them or leave them out")
        seen[prompt.id] = prompt.source
        yield prompt


def _draw(seed: int, key: str) -> bytes:
    """Sort key of a random order, independent of other items, machine and Python version."""
    return hashlib.sha256(f"{seed}\0{key}".encode()).digest()


def _prompts(where: str | Path, template: str | None) -> Iterator[Prompt]:
    path = Path(where)
    if path.is_file():
        return _of_file(path, str(where), template)
    if path.is_dir():
        raise ParameterError(f"{path}: it is a folder; give a file: {FORMS}")
    if str(where) in DATA_SETS:
        return _of_rows(_public(str(where)), str(where), template)
    if path.suffix or len(path.parts) > 1:
        raise ParameterError(f"{where}: there is no such file; give one: {FORMS}")
    word, known = checks.shown(str(where)), checks.nearest(str(where), DATA_SETS)
    raise ParameterError(f"there is no file {word} and no data set of this name; {known}; or give a file: {FORMS}")


def _public(name: str) -> Iterator[tuple[str, Any]]:
    """Rows of a data set from the `datasets` library, each with its name for messages."""
    public = DATA_SETS[name]
    remedy = f"give a local file instead: {FORMS}"
    try:
        import datasets
    except ImportError:
        raise ParameterError(f"data set {name} needs the datasets library, not installed; install it, or {remedy}") from None
    try:
        rows = datasets.load_dataset(public.path, public.configuration, split=public.part)
    except Exception as error:  # no network, no such revision, a full disk: several libraries, many kinds of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ParameterError(f"data set {name} cannot be loaded: {reason}; {remedy}") from None
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


# --- Files ----------------------------------------------------------------------------------------------------------


def _of_file(path: Path, shown: str, template: str | None) -> Iterator[Prompt]:
    suffix = path.suffix.lower()
    known = (".json", *OBJECTS, ".txt", *PARAGRAPHS, *WIKITEXT)
    if suffix not in known:
        raise ParameterError(f"{shown}: unknown suffix {suffix!r}; known: {', '.join(known)}")
    try:
        text = bounded_files.read_bytes(path).decode(
            "utf-8-sig"
        )  # read_text would turn a carriage return in a text into a line's end
    except UnicodeDecodeError as error:
        raise ParameterError(f"{shown}: it is not text in UTF-8 (byte {error.start + 1}); convert it to UTF-8") from None
    if not text.strip():
        raise ParameterError(f"{shown}: it is empty; give a file with at least one prompt")
    if suffix == ".json":
        return _of_rows(_of_json(text, shown), shown, template)
    if suffix in OBJECTS:
        return _of_rows(_of_lines(text, shown), shown, template)
    return _of_rows(_plain(text.split("\n"), suffix), shown, template)


def _parsed(text: str, what: str, kind: str) -> Any:
    try:
        return bounded_files.json_of(text)
    except ValueError as error:
        raise ParameterError(f"{what}: it is not {kind}: {error}; known forms: {FORMS}") from None


def _of_json(text: str, shown: str) -> Iterator[tuple[str, Any]]:
    held = _parsed(text, shown, "JSON")
    if isinstance(held, list):
        return ((f"row {number}", row) for number, row in enumerate(held, start=1))
    if isinstance(held, dict) and isinstance(held.get("data"), list):
        return _nested(held["data"], shown)
    found = f"an object with {_columns(held)}" if isinstance(held, dict) else checks.shown(held)
    raise ParameterError(f"{shown}: the form of the JSON is unknown, {found}; known forms: {FORMS}")


def _nested(articles: list[Any], shown: str) -> Iterator[tuple[str, Any]]:
    """Rows of SQuAD's nested form: articles have paragraphs, which have a context and questions."""

    def held(value: Any, key: str, at: str, kind: type) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get(key), kind):
            form = "data holds articles with paragraphs, which have a context and qas, each with a question"
            raise ParameterError(f"{shown}: {at} has no {key}; in SQuAD's form {form}")
        return value[key]

    for i, article in enumerate(articles):
        for j, paragraph in enumerate(held(article, "paragraphs", f"data[{i}]", list)):
            at = f"data[{i}].paragraphs[{j}]"
            context = held(paragraph, "context", at, str)
            for k, question in enumerate(held(paragraph, "qas", at, list)):
                row = {"context": context, "question": held(question, "question", f"{at}.qas[{k}]", str)}
                yield f"{at}.qas[{k}]", row | ({"id": question["id"]} if "id" in question else {})


def _of_lines(text: str, shown: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON strings may hold other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"row {number}", _parsed(line, f"{shown}: row {number}", "JSON")


def _plain(rows: list[str], suffix: str) -> Iterator[tuple[str, Any]]:
    """Prompts of a plain text file; blank lines only separate them."""
    if any(row.strip() == END_OF_TEXT for row in rows):
        yield from _blocks(rows, lambda row: row.strip() == END_OF_TEXT)
    elif suffix in PARAGRAPHS:
        yield from _blocks(rows, lambda row: not row.strip())
    else:
        for number, row in enumerate(rows, start=1):
            if suffix in WIKITEXT:
                row = "" if re.fullmatch(r" = .* = ?", row.rstrip("\r")) else row.strip()
            else:
                row = _unescaped(row.removesuffix("\r"))
            if row.strip():
                yield f"row {number}", row


def _blocks(rows: list[str], parts: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Text blocks between separator rows, each with the number of its first row."""
    block: list[str] = []
    first = 1
    for number, row in enumerate([*rows, None], start=1):
        if row is not None and not parts(row):
            block.append(row.removesuffix("\r"))
            continue
        if text := "\n".join(block).strip():
            yield f"row {first}", text
        block, first = [], number + 1


_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


def _unescaped(line: str) -> str:
    r"""Replace the escapes of a line; other backslashes stay.

    >>> _unescaped(r"C:\dir\\new\nEnd")
    'C:\\dir\\new\nEnd'
    """
    return re.sub(r"\\[ntr\\]", lambda found: _ESCAPES[found[0]], line)


# --- Rows and templates ---------------------------------------------------------------------------------------------


def _of_rows(rows: Iterator[tuple[str, Any]], shown: str, template: str | None) -> Iterator[Prompt]:
    form: str | None = None
    for index, (name, row) in enumerate(rows, start=1):
        at = f"{shown}: {name}"
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise ParameterError(f"{at}: it must be a string or an object, got {checks.shown(row)}")
        form = form or _form(row, at, template)
        put = (form if form in TEMPLATES else "none") if template is None else template
        inputs = _inputs(row, form, at)
        if put == "none":
            text = "\n".join(inputs.values())
        else:
            text = TEMPLATES[put].format(**(inputs if put == form else dict.fromkeys(_fields(put), *inputs.values())))
        source = f"{Path(shown).name}, {name}" + ("" if put == "none" else f"; template {put}, Table 1 of arXiv:2307.05908")
        key, references = _id(row, index, at), _references(row, at)
        try:
            yield Prompt(key, text, source, references)
        except ParameterError as error:
            raise ParameterError(f"{at}: {error}") from None


def _form(row: dict[str, Any], at: str, template: str | None) -> str:
    """Return the form of a row: a column of `READY`, or a data set. The columns of the template take precedence."""
    sets = [name for name, columns in COLUMNS.items() if (all if name == "squad" else any)(column in row for column in columns)]
    ready = [column for column in READY if column in row]
    if template in sets:
        return template
    if template in TEMPLATES and (not ready or len(_fields(template)) > 1):
        needed = " and ".join(COLUMNS["squad"]) if template == "squad" else " or ".join((*COLUMNS[template], *READY))
        raise ParameterError(f"{at}: template {template} needs {needed}, got {_columns(row)}; take template none, or another file")
    for form in (*ready, *sets):
        return form
    half = [column for column in COLUMNS["squad"] if column in row]
    lacking = f" ({half[0]} alone is not SQuAD's)" if half else ""
    raise ParameterError(f"{at}: no column holds a prompt, got {_columns(row)}{lacking}; known forms: {FORMS}")


def _fields(template: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", TEMPLATES[template])


def _inputs(row: dict[str, Any], form: str, at: str) -> dict[str, str]:
    """Values of the template's fields; for a complete prompt the single field `text`."""
    if form == "squad":
        return {column: _text(row, column, at) for column in COLUMNS["squad"]}
    if form == "cnn-dm":
        return {"context": _text(row, "article", at)}
    if form == "wmt":
        if "translation" not in row:
            return {"source_sentence": _text(row, "en", at)}
        pair = row["translation"]
        if not isinstance(pair, dict):
            raise ParameterError(f"{at}: translation must be an object with en, got {checks.shown(pair)}")
        return {"source_sentence": _text(pair, "en", f"{at}: translation")}
    if form == "turns" and "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ParameterError(f"{at}: turns must be a non-empty list of strings, got {checks.shown(turns)}")
        return {"text": _text({"turns[0]": turns[0]}, "turns[0]", at)}
    return {"text": _text(row, form, at)}


def _text(row: dict[str, Any], column: str, at: str) -> str:
    if column not in row:
        raise ParameterError(f"{at}: column {column} is missing, got {_columns(row)}; all rows must have the form of the first")
    if not isinstance(row[column], str):
        raise ParameterError(f"{at}: {column} must be a string, got {checks.shown(row[column])}")
    if not row[column].strip():
        raise ParameterError(f"{at}: {column} is empty; fill it, or remove the row")
    return str(row[column])


def _references(row: dict[str, Any], at: str) -> tuple[str, ...]:
    """References of a row, if it has any."""
    if "reference" in row:
        return tuple(_strings(row["reference"], at))
    if "highlights" in row:
        return (_text(row, "highlights", at),)
    pair = row.get("translation")
    others = [language for language in pair if language != "en"] if isinstance(pair, dict) else []
    return (_text(pair, others[0], f"{at}: translation"),) if isinstance(pair, dict) and len(others) == 1 else ()


def _strings(held: Any, at: str) -> Iterator[str]:
    """Strings of a column of references, which Spec-Bench nests in two ways and leaves empty where there is none."""
    if isinstance(held, list):
        for each in held:
            yield from _strings(each, at)
    elif isinstance(held, str):
        yield from [held] * bool(held.strip())
    elif held is not None:
        raise ParameterError(f"{at}: reference must be a string or a list of strings, got {checks.shown(held)}")


def _id(row: dict[str, Any], index: int, at: str) -> str:
    for column in ("id", "question_id"):
        if column in row:
            if isinstance(row[column], bool) or not isinstance(row[column], str | int):
                raise ParameterError(f"{at}: {column} must be a string or a whole number, got {checks.shown(row[column])}")
            return str(row[column])
    return str(index)


def _columns(row: dict[str, Any]) -> str:
    return ", ".join(checks.shown(key) for key in [*row][:12]) + (", ..." if len(row) > 12 else "") if row else "no columns"


# --- Held-out code of the family ------------------------------------------------------------------------------------

_STARTS = re.compile(r"^[ \t]*(?:async def|def|class) ", re.MULTILINE)


def held_out(length: int, count: int, seed: int, *, tokenizer: Any = None, corpus: Corpus | None = None) -> list[Prompt]:
    """Return `count` starts of functions and classes in modules that the family was not trained on, all of `length`.

    `length` is in characters, or with a tokenizer (of the `tokenizers` library) in tokens of the prompt by itself. Prompts do not
    overlap. The seed selects them; a smaller count gives the first of a larger one.

    >>> [len(prompt.text) for prompt in held_out(100, 3, seed=1)]
    [100, 100, 100]
    """
    checks.whole("length", length, 1)
    checks.whole("count", count, 1)
    checks.whole("seed", seed, 0)
    library = corpus if corpus is not None else standard_library()
    starts = [(module, found.start()) for module, text in library.held_out.items() for found in _STARTS.finditer(text)]
    starts.sort(key=lambda start: _draw(seed, f"{start[0]}:{start[1]}"))
    taken: dict[str, list[tuple[int, int]]] = {}
    prompts: list[Prompt] = []
    unit = "characters" if tokenizer is None else "tokens"
    for module, start in starts:
        text = _cut(library.held_out[module], start, length, tokenizer)
        span = start, start + len(text)
        if not text or any(span[0] < end and first < span[1] for first, end in taken.get(module, [])):
            continue
        taken.setdefault(module, []).append(span)
        line = library.held_out[module].count("\n", 0, start) + 1
        source = f"held-out modules of the standard library of Python {library.python}, {unit}: {length}"
        prompts.append(Prompt(f"{module}:{line}", text, source))
        if len(prompts) == count:
            return prompts
    raise ParameterError(
        f"count must be at most {len(prompts)}, got {checks.shown(count)}: the held-out modules have no more prompts of"
        f" {length} {unit} that do not overlap; take fewer or shorter ones"
    )


def _cut(text: str, start: int, length: int, tokenizer: Any) -> str:
    """Return the first `length` characters or tokens from `start`; empty if there are fewer."""
    if tokenizer is None:
        return text[start : start + length] if start + length <= len(text) else ""
    # The first tokens do not depend on text far after them; a token seldom has more than 16 characters.
    ids = tokenizer.encode(text[start : start + 16 * length + 64], add_special_tokens=False).ids[:length]
    cut = str(tokenizer.decode(ids, skip_special_tokens=False))
    # Reject a cut within a character, or one that the tokenizer would split differently as a complete text.
    good = len(ids) == length and text.startswith(cut, start) and tokenizer.encode(cut, add_special_tokens=False).ids == ids
    return cut if good else ""
