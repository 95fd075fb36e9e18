"""Read logs: the models' answers during decodings, read by read, as a table and a JSON file (`model.base.json_and_parquet`).

Part `own` contains the decisions of the method itself: one row per read, in order.

===========  ==========================================================================================================
column       content
===========  ==========================================================================================================
decoding     number of the decoding, from 0: an entry of `decodings` in the JSON file
order        number of the read within its decoding, from 0
kind         kind of the read (`model.steps.Read`)
role, layer  model, and number of its layers that the output has passed
at, tail     the pass: cache position of its first token, and its tokens
position     position of the predicted token; for reads of several hypotheses that of the pass
sequence     number of the sequence in a batch
offset       index of the token that was read, from the end of the pass
width        number of answers requested
token        token whose probability, confidence or distance was read, if any
hypotheses   for reads of several hypotheses: index of their last tokens in the pass, and their scores
number       the answer if it is a number: probability, residual mass, confidence [-] or distance [nats]
tokens       the answer if it is one or several tokens, best first
follows      for continuations of hypotheses: index of the hypothesis' last token
scores       for continuations of hypotheses: log-probability of hypothesis and token [nats]
===========  ==========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, get_args, get_type_hints

from model.base import checks, json_and_parquet, strict_json, typed_values
from model.base.checks import ParameterError
from model.interpret.account import Account, Kind
from model.logs.recorded_decoding import AnsweredRead, Decoding, ModelIdentity, Question
from model.steps import DISTINCT, LIKELIEST, Commit, Continuation, Read

if TYPE_CHECKING:
    import polars as pl

SCHEMA_VERSION = 2
PARTS = ("own",)
KINDS: tuple[str, ...] = get_args(get_type_hints(Read)["kind"])
NUMBERS = ("probability", "uniform", "residual_mass", "confidence", "saturation", "distance")
"""Kinds of reads whose answer is a number."""
SEVERAL = (LIKELIEST, DISTINCT)
"""Kinds of reads whose answer is a list of tokens."""
UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("decoding", "order"), "1"), "kind": "name", "role": "name",
        **dict.fromkeys(("layer", "at", "position", "sequence", "offset", "width"), "1"), "token": "token", "number": "as asked",
        "tokens": "tokens", "follows": "1", "scores": "nats", "tail": "tokens", "hypotheses": "1, nats",
    }
)  # fmt: skip
class _Commit(TypedDict):
    kind: str
    tokens: list[int]
    drafted: int | None
    back: int
    sequence: NotRequired[int | None]
    ranks: NotRequired[list[int]]
    candidates: NotRequired[list[int]]


class _Passes(TypedDict):
    role: str
    width: int
    first: int
    last: int
    heads: int
    gaps: list[list[int]]
    rows_only: bool
    compared: int
    passes: int
    attended: int
    read: int


class _Decoding(TypedDict):
    name: str
    method: str
    settings: dict[str, Any]
    prompt: list[int]
    max_tokens: int
    stop: list[int] | int | None
    seconds: float | None
    commits: list[_Commit]
    passes: list[_Passes]
    adoptions: int
    adopted_rows: int


class _ReadLogHeader(TypedDict):
    """Content of the JSON file of a log."""

    part: str
    source: str
    models: dict[str, ModelIdentity]
    sampling: dict[str, Any] | None
    seed: int
    date: str
    versions: dict[str, str]
    decodings: list[_Decoding]
    columns: dict[str, str]
    rows: int


_COLUMNS: dict[str, Any] = {
    **{name: int for name, unit in UNITS.items() if unit in ("1", "token")}, "kind": str, "role": str, "number": float,
    **dict.fromkeys(("tokens", "follows", "tail"), list[int]), "scores": list[float], "hypotheses": list[dict[str, Any]],
}  # fmt: skip
_NOT_ALWAYS = frozenset(("token", "number", "tokens", "follows", "scores", "hypotheses"))
"""Columns that are null for some kinds of reads."""
_KEYS = ("part", "source", "models", "sampling", "seed", "date", "versions", "decodings", "columns", "rows")


@dataclass(frozen=True, eq=False)
class ReadLog:
    """Read log: decodings with all their reads, and the models and settings that produced them.

    Parameters
    ----------
    names
        Name of each decoding's prompt.
    models
        By role: name, checksum of the weights and number of layers of each model.
    sampling, seed
        Sampling parameters (None for greedy decoding), and random seed.
    """

    decodings: tuple[Decoding, ...]
    names: tuple[str, ...]
    models: Mapping[str, Mapping[str, Any]]
    sampling: Mapping[str, Any] | None = None
    seed: int = 0
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str = "measured: what the models said"

    def __post_init__(self) -> None:
        if len(self.names) != len(self.decodings):
            raise ParameterError(f"names must have one for each of {len(self.decodings)} decodings, got {len(self.names)}")
        if not self.decodings:
            raise ParameterError("a log must have at least one decoding, got none")
        checks.whole("seed", self.seed, 0)

    def table(self) -> pl.DataFrame:
        """Table with one row per read."""
        import polars as pl

        integers = pl.List(pl.Int64)
        schema: dict[str, Any] = dict.fromkeys(UNITS, pl.Int64) | {"kind": pl.String, "role": pl.String, "number": pl.Float64}
        schema |= {"tokens": integers, "follows": integers, "scores": pl.List(pl.Float64), "tail": integers}
        schema |= {"hypotheses": pl.List(pl.Struct({"token": pl.Int64, "score": pl.Float64}))}
        columns: dict[str, list[Any]] = {name: [] for name in UNITS}
        for number, decoding in enumerate(self.decodings):
            for order, each in enumerate(decoding.reads):
                row = {"decoding": number, "order": order, **_row(each)}
                for name, values in columns.items():
                    values.append(row.get(name))
        return pl.DataFrame(columns, schema=schema)


def _row(each: AnsweredRead) -> dict[str, Any]:
    asked = each.question
    row = {name: getattr(asked, name) for name in ("kind", "role", "layer", "at", "position", "offset", "width", "token")}
    row |= {"sequence": asked.sequence, "tail": [*asked.tail]}
    if asked.hypotheses:
        row["hypotheses"] = [{"token": token, "score": score} for token, score in asked.hypotheses]
    if asked.kind in NUMBERS:
        return row | {"number": float(each.answer)}
    if asked.kind == "beams":
        return row | {name: [getattr(one, key) for one in each.answer] for name, key in _CONTINUATION}
    return row | {"tokens": each.answer if isinstance(each.answer, list) else [each.answer]}


_CONTINUATION = (("tokens", "token"), ("follows", "follows"), ("scores", "score"))


def _answered(row: Mapping[str, Any]) -> AnsweredRead:
    kind = row["kind"]
    if kind in NUMBERS:
        answer: Any = row["number"]
    elif kind == "beams":
        answer = [Continuation(*each) for each in zip(row["tokens"], row["follows"], row["scores"], strict=True)]
    else:
        answer = row["tokens"] if kind in SEVERAL else row["tokens"][0]
    hypotheses = tuple((each["token"], each["score"]) for each in row["hypotheses"] or ())
    asked = Question(
        kind, row["role"], row["layer"], row["position"], row["sequence"], row["token"], row["at"], tuple(row["tail"]),
        row["offset"],
        row["width"], hypotheses,
    )  # fmt: skip
    return AnsweredRead(asked, answer)


# --- Files ---


def save(log: ReadLog, where: str | Path) -> Path:
    """Write FILE.parquet and FILE.json, given the name of either, both or neither; return the path of the JSON file."""
    table = log.table()
    content = {
        "schema_version": SCHEMA_VERSION, "part": "own", "source": log.source, "models": log.models, "sampling": log.sampling,
        "seed": log.seed, "date": log.date, "versions": dict(log.versions),
        "decodings": [_decoding_row(name, each) for name, each in zip(log.names, log.decodings, strict=True)],
        "columns": dict(UNITS), "rows": table.height,
    }  # fmt: skip
    return json_and_parquet.save(json_of(where), content, table)


def json_of(where: str | Path) -> Path:
    """Path of a log's JSON file, given the name of either of its two files.

    >>> json_of("runs/own.parquet").name
    'own.json'
    """
    path = Path(where)
    if path.suffix not in (".parquet", ".json") or not path.stem:
        name = checks.shown(path.name)
        raise ParameterError(f"a log must be named FILE.parquet, got {name}; FILE.json is written to the same folder")
    return path.with_suffix(".json")


def _stops(stop: Any) -> tuple[int, ...]:
    """Tokens that end a sequence; files contain a list, a single token or null."""
    return () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)


def _decoding_row(name: str, decoding: Decoding) -> dict[str, Any]:
    passes = [
        kind.row() | dict(zip(("passes", "attended", "read"), counts, strict=True))
        for kind, counts in decoding.account.passes_by_kind.items()
    ]
    same = ("method", "max_tokens", "seconds")
    return {
        "name": name, **{key: getattr(decoding, key) for key in same}, "settings": plain(decoding.settings),
        "prompt": [*decoding.prompt], "stop": [*decoding.stop],
        "commits": [_commit_row(commit) for commit in decoding.commits], "passes": passes,
        "adoptions": decoding.account.adoptions, "adopted_rows": decoding.account.adopted_rows,
    }  # fmt: skip


def _commit_row(commit: Commit) -> dict[str, Any]:
    """Fields of a commit; `sequence` only if the sequences of a batch commit separately, ranks only if there are some."""
    row = commit._asdict()
    return {key: value for key, value in row.items() if key not in _OPTIONAL or value not in (None, ())}


_OPTIONAL = ("sequence", "ranks", "candidates")


def _commit(row: Mapping[str, Any]) -> Commit:
    tokens, ranks, candidates = (tuple(row.get(name, ())) for name in ("tokens", "ranks", "candidates"))
    if ranks or candidates:
        for name, values in (("ranks", ranks), ("candidates", candidates)):
            if len(values) != len(tokens):
                raise ParameterError(f"{name} of a commit must be one for each of {len(tokens)} tokens, got {len(values)}")
            for value in values:
                checks.whole(f"{name} of a commit", value, 0)
        for rank, most in zip(ranks, candidates, strict=True):
            if rank > most:
                raise ParameterError(f"ranks of a commit must be at most {most}, the candidates, got {rank}")
    return Commit(row["kind"], tokens, row["drafted"], row["back"], row.get("sequence"), ranks, candidates)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings converted for JSON, which has no infinity.

    >>> plain({"rollback_threshold": float("inf"), "lengths": (3, 4)})
    {'rollback_threshold': 'inf', 'lengths': [3, 4]}
    """
    return {key: strict_json.plain(value) for key, value in settings.items()}


def _full(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_full(each) for each in value)
    return math.inf if value == "inf" else value


def load(where: str | Path) -> ReadLog:
    """Load a log, given the name of either of its files. Nothing is executed: methods are only named."""
    path = json_of(where)
    try:
        header, table = json_and_parquet.load(path, _KEYS, "a read log", SCHEMA_VERSION, "decode it again")
        typed_values.check(header, _ReadLogHeader, "")
        checks.one_of("part", header["part"], PARTS)
        if header["columns"] != dict(UNITS) or [*table.columns] != [*UNITS] or table.height != header["rows"]:
            raise ParameterError(f"columns must be {', '.join(UNITS)}, with {header['rows']} rows; decode it again")
        if header["decodings"]:
            _check_table(table, len(header["decodings"]))
        decodings = tuple(_decodings(header["decodings"], table))
        names = tuple(each["name"] for each in header["decodings"])
        more = {key: header[key] for key in ("models", "sampling", "seed", "date", "versions", "source")}
        return ReadLog(decodings, names, **more)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def _check_table(table: pl.DataFrame, decodings: int) -> None:
    """Raise `ParameterError` for a row of an unknown decoding, or whose answer does not fit its kind; rows count from 1."""
    import polars as pl

    typed_values.check_columns(table, _COLUMNS, _NOT_ALWAYS)
    held = table["hypotheses"].explode().drop_nulls()
    if held.len():
        typed_values.check_columns(held.struct.unnest(), {"token": int, "score": float})
    col = pl.col
    untyped = [name for name in ("tokens", "follows", "scores") if table[name].dtype == pl.Null]  # columns without any value
    table = table.with_columns(col(name).cast(pl.List(pl.Float64)) for name in untyped)
    answer = pl.when(col("kind").is_in([*NUMBERS])).then(col("number").is_not_null()).otherwise(col("tokens").list.len() > 0)
    same = (col("tokens").list.len() == col("follows").list.len()) & (col("tokens").list.len() == col("scores").list.len())
    whole = table.select(
        decoding=(col("decoding") >= 0) & (col("decoding") < decodings),
        kind=col("kind").is_in([*KINDS]),
        number=answer.fill_null(False),
        follows=((col("kind") != "beams") | same).fill_null(False),
    )
    bounds = {
        "decoding": f"between 0 and {decodings - 1}", "kind": f"one of {', '.join(KINDS)}",
        "number": "an answer, here or in tokens",
        "follows": "as many as tokens and scores",
    }  # fmt: skip
    for name, bound in bounds.items():
        good = whole[name].to_numpy()
        if not good.all():
            row = int((~good).argmax())
            raise ParameterError(f"row {row + 1}, column {name}: must be {bound}, got {checks.shown(table[name].to_list()[row])}")


def _decodings(listed: list[dict[str, Any]], table: pl.DataFrame) -> Iterator[Decoding]:
    if not listed:
        return
    reads: list[list[AnsweredRead]] = [[] for _ in listed]
    for row in table.sort("decoding", "order").iter_rows(named=True):
        reads[row["decoding"]].append(_answered(row))
    for each, answered in zip(listed, reads, strict=True):
        for key in sorted({*each} - {*_Decoding.__annotations__}):
            raise ParameterError(f"unknown key {key} of a decoding; {checks.nearest(key, _Decoding.__annotations__)}")
        commits = tuple(_commit(one) for one in each["commits"])
        account = Account(adoptions=each["adoptions"], adopted_rows=each["adopted_rows"])
        for name in ("adoptions", "adopted_rows"):
            checks.whole(name, each[name], 0)
        for one in each["passes"]:
            for name in ("width", "passes", "attended", "read", "first", "last", "heads", "compared"):
                checks.whole(f"{name} of passes", one[name], 0)
            if any(len(gap) != 2 for gap in one["gaps"]):
                raise ParameterError(f"gaps of passes must be pairs of layers, got {checks.shown(one['gaps'])}")
            account.passes_by_kind[Kind.of_row(one)] = [one["passes"], one["attended"], one["read"]]
        settings = {key: _full(value) for key, value in each["settings"].items()}
        yield Decoding(
            each["method"], settings, tuple(each["prompt"]), each["max_tokens"], commits, account, _stops(each["stop"]),
            each["seconds"],
            tuple(answered),
        )  # fmt: skip
