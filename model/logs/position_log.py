"""Position log (decision log): predictions of the models along the target's own output, one row per generated token.

It holds the predictions for every possible decision, and is therefore complete for all lossless methods. For every position it has
the rank of the final token after every layer (hence the matches of Predictive Pipelined Decoding for every exit layer and every k),
and the number of accepted tokens of a draft that starts there (hence speculative decoding with any draft length).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from model.base import checks, json_and_parquet, typed_values
from model.base.checks import ParameterError
from model.logs.recorded_decoding import ModelIdentity

if TYPE_CHECKING:
    import polars as pl

    from model.methods.bild.threshold_decisions import Decisions

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

VERSION, PART = 2, "positions"
_HEADER = ("target", "draft", "heads", "prompts", "max_tokens", "sampling", "seed", "dtype", "versions", "date")
_KEYS = ("part", *_HEADER, "columns", "rows")


class _PositionLogHeader(TypedDict):
    """Content of the JSON file of a log."""

    target: ModelIdentity
    draft: ModelIdentity | None
    heads: dict[str, Any] | None
    prompts: list[dict[str, Any]]
    max_tokens: Any
    sampling: dict[str, Any] | None
    seed: int | None
    dtype: str
    versions: dict[str, str]
    date: str
    columns: dict[str, str]
    rows: int


HEADS = ("common", "trained")
"""Heads after a layer: the model's own, or one trained for that layer (Table 2 of [Yang2024]: N and Y)."""
TARGET: Mapping[str, str] = {
    "prompt": "number of the prompt, from 0", "position": "output position, from 0", "token": "the target's token",
    "rank_common": "rank of that token after each layer, from 1, with the model's own head",
    "rank_trained": "rank with the head trained for the layer; 0 without such a head",
    "confidence": "largest probability after each layer, with the model's own head",
    "saturation": "cosine similarity of the hidden states before and after each layer",
}  # fmt: skip
DRAFT: Mapping[str, str] = {
    "draft_token": "the draft's likeliest token", "q_token": "the draft's probability of the target's token",
    "p_token": "the target's probability of its token", "q_draft": "the draft's probability of its likeliest token",
    "p_draft": "the target's probability of the draft's likeliest token",
    "overlap": "sum of min(p, q): probability that a sampled draft token is accepted",
    "draft_confidence": "the draft's largest probability",
    "distance": "the target's cross-entropy with respect to the draft's likeliest token [nats]",
    "accepted": "accepted tokens of a greedy draft that starts here",
}  # fmt: skip
RANK: Mapping[str, str] = {"draft_rank": "rank of the target's token among the draft's likeliest tokens, from 1"}
"""Column of logs with a draft; logs of earlier versions lack it."""
COLUMNS: Mapping[str, str] = {**TARGET, **DRAFT, **RANK}
COLUMNS_BY_LAYER = ("rank_common", "rank_trained", "confidence", "saturation")
INTEGER_COLUMNS = (
    "prompt", "position", "token", "rank_common", "rank_trained", "draft_token", "accepted", "draft_rank",
)  # fmt: skip
MOST_TOKEN = 2**31 - 1
"""Largest number of a token."""
UNBOUNDED_COLUMNS = (*(name for name in INTEGER_COLUMNS if "token" not in name), "distance")
"""Columns without an upper bound; all others are tokens, probabilities or cosines."""
ROUNDING_TOLERANCE = 1e-3
"""Tolerance for values outside their bounds because of rounding in half precision."""


@dataclass(frozen=True, eq=False)
class PositionLog:
    """Position log.

    `table` has the columns `TARGET` and, if a draft model was logged, `DRAFT` and `RANK`; columns by layer are arrays of length
    `layers`.
    `header` describes its origin: models with checksums, prompts, number of tokens, sampling, versions.

    >>> log = bundled()
    >>> log.layers, log.ranks(6).shape == (log.table.height,)
    (12, True)
    """

    table: pl.DataFrame
    header: Mapping[str, Any]

    def __post_init__(self) -> None:
        missing = [name for name in TARGET if name not in self.table.columns]
        if missing:
            raise ParameterError(f"a decision log must have column {missing[0]}, got {', '.join(self.table.columns)}")
        present = [name for name in (*DRAFT, *RANK) if name in self.table.columns]
        lacking = next((name for name in DRAFT if name not in present), None)
        if present and lacking is not None:
            raise ParameterError(f"a decision log with a draft must have column {lacking} too")
        for name in self.table.columns:
            if name not in COLUMNS:
                raise ParameterError(f"unknown column {name} of a decision log; {checks.nearest(name, COLUMNS)}")
        if not self.table.height:
            raise ParameterError("a decision log must have at least one row")
        if present and not self.header.get("draft"):
            raise ParameterError("a decision log with a draft must name its draft, got none; log it again")
        self._check_values()

    def _check_values(self) -> None:
        """Raise `ParameterError` for columns of a wrong type or shape, and for impossible values."""
        target = self.header.get("target")
        layers = target.get("layers") if isinstance(target, Mapping) else None
        for name in self.table.columns:
            column = self.table[name]
            values = column.to_numpy() if not column.null_count() else np.array(None)
            width = (layers or (values.shape[1:] or (0,))[0],) if name in COLUMNS_BY_LAYER else ()
            layers = width[0] if width else layers  # the same for all columns
            kind = "iu" if name in INTEGER_COLUMNS else "f"
            if values.dtype.kind not in kind or values.shape != (column.len(), *width) or 0 in values.shape:
                numbers = f"{'whole numbers' if name in INTEGER_COLUMNS else 'numbers'}{', one for each layer' if width else ''}"
                raise ParameterError(f"column {name} must be {numbers}, none missing, got {column.dtype}; log it again")
            low = 1 if name in ("rank_common", "draft_rank") else -1 if name == "saturation" else 0
            high = np.inf if name in UNBOUNDED_COLUMNS else MOST_TOKEN if name in INTEGER_COLUMNS else 1
            # Probabilities are sums of rounded numbers. A probability of 0 gives an infinite distance.
            bad = np.isnan(values) | (values < low - ROUNDING_TOLERANCE) | (values > high + ROUNDING_TOLERANCE)
            if bad.any():
                bound = f"at least {low}" if name in UNBOUNDED_COLUMNS else f"between {low} and {high}"
                raise ParameterError(f"column {name} must be {bound}, got {values[bad][0]}; log it again")
        prompt, position = self.table["prompt"].to_numpy(), self.table["position"].to_numpy()
        expected = np.concatenate([np.arange(count) for count in np.diff(self.starts)])
        if (np.diff(prompt) < 0).any() or not np.array_equal(position, expected):
            raise ParameterError("rows must be ordered by prompt, and by position from 0 within each prompt; log it again")
        if self.drafted:
            remaining = np.repeat(np.diff(self.starts), np.diff(self.starts)) - expected
            if (self.table["accepted"].to_numpy() > remaining).any():
                raise ParameterError("column accepted must be at most the remaining tokens of the sequence; log it again")

    @cached_property
    def layers(self) -> int:
        """Number of layers of the target."""
        return int(self.table["rank_common"].to_numpy().shape[1])

    @cached_property
    def starts(self) -> Integers:
        """First row of each sequence, followed by the number of rows; shape (sequences + 1,)."""
        prompt = self.table["prompt"].to_numpy()
        return np.concatenate([[0], np.flatnonzero(np.diff(prompt)) + 1, [prompt.size]])

    @property
    def drafted(self) -> bool:
        """True if a draft model was logged."""
        return "accepted" in self.table.columns

    def by_sequence(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Split the values of a column by sequence."""
        return np.split(values, self.starts[1:-1])

    def ranks(self, layer: int, head: str = "common") -> Integers:
        """Rank of the target's token after a layer, shape (rows,)."""
        checks.whole("layer", layer, 1, self.layers)
        checks.one_of("head", head, HEADS)
        ranks: Integers = self.table[f"rank_{head}"].to_numpy()[:, layer - 1]
        if not ranks.all():
            trained = [each + 1 for each in np.flatnonzero(self.table["rank_trained"].to_numpy()[0])]
            known = f"heads of this log are at layers {checks.shown(trained)}" if trained else "this log has no trained heads"
            raise ParameterError(f"layer {layer} has no trained head: {known}; take head 'common'")
        return ranks

    def matches(self, layer: int, candidates: int, head: str = "common", *, form: str = "literal") -> list[Bools]:
        """True where the target's token is among the first `candidates` after a layer; one array (positions,) per sequence.

        In the flat form of Predictive Pipelined Decoding with an exit layer below the middle, the layer of the prediction depends
        on the previous match.
        """
        checks.whole("candidates", candidates, 1)
        if form != "flat" or 2 * layer >= self.layers:
            return self.by_sequence(self.ranks(layer, head) <= candidates)
        later = max(layer, self.layers - layer)
        kept = {each: self.by_sequence(self.ranks(each, head) <= candidates) for each in (layer, later)}
        by_sequence = []
        for sequence in range(len(self.starts) - 1):
            gap, matches = layer, []
            for position in range(kept[layer][sequence].size):
                matches.append(bool(kept[gap][sequence][position]))
                gap = max(layer, self.layers - gap) if matches[-1] else layer
            by_sequence.append(np.array(matches, dtype=np.bool_))
        return by_sequence

    def column(self, name: str) -> list[NDArray[Any]]:
        """A column about the draft model; one array (positions,) per sequence."""
        if not self.drafted:
            raise ParameterError("this log was made without a draft; make one with --draft")
        return self.by_sequence(self.table[name].to_numpy())

    @property
    def ranked(self) -> bool:
        """True if the log holds the ranks of the target's tokens among the draft's likeliest."""
        return "draft_rank" in self.table.columns

    def draft_ranks(self) -> list[Integers]:
        """Ranks of the target's tokens among the draft's likeliest, from 1; one array (positions,) per sequence."""
        if self.drafted and not self.ranked:
            raise ParameterError("this log has no column draft_rank, the ranks among the draft's tokens; log it again")
        return self.column("draft_rank")

    def first_tokens(self, sequences: list[NDArray[Any]], tokens: int) -> NDArray[Any]:
        """First `tokens` values of all sequences that are long enough, shape (sequences, tokens)."""
        long = [each[:tokens] for each in sequences if len(each) >= tokens]
        if not long:
            longest = max(len(each) for each in sequences)
            bound = f"tokens must be at most {longest}, the longest sequence of this log"
            raise ParameterError(f"{bound}, got {tokens}; decode fewer")
        return np.stack(long)

    def agreements(self) -> list[Bools]:
        """True where the draft's greedy token equals the target's; one array (positions,) per sequence."""
        return [length > 0 for length in self.column("accepted")]

    def decisions(self) -> list[Decisions]:
        """Inputs of Big Little Decoder's decisions by sequence: the draft's confidence, and the target's distance from its token.

        They are measured along the target's output, which differs from that method's output;
        `model.methods.bild.threshold_decisions` discusses the consequences.
        """
        from model.methods.bild.threshold_decisions import Decisions

        columns = [self.column(name) for name in ("draft_confidence", "distance")]
        source = f"measured: {self.header['draft']['name']} along the text of {self.header['target']['name']}"
        sequences = zip(*columns, self.agreements(), strict=True)
        return [
            Decisions(np.minimum(confidence.astype(np.float64), 1.0), np.maximum(distance.astype(np.float64), 0.0), agrees, source)
            for confidence, distance, agrees in sequences
        ]

    def confidence_by_layer(self, measure: str) -> Floats:
        """Confidence in each token after each layer, shape (rows, layers).

        `measure` is `softmax` or `state`, as in `model.methods.early_exit.theory`.
        """
        from model.methods.early_exit.algorithm import MEASURES

        checks.one_of("measure", measure, MEASURES)
        confidence = self.table["confidence" if measure == "softmax" else "saturation"].to_numpy().astype(np.float64)
        return np.asarray(np.clip(confidence, 0.0, 1.0))

    def acceptance_probabilities(self) -> list[Floats]:
        """Probability that a sampled draft token is accepted, given the emitted token; one array (positions,) per sequence.

        The joint probability of drafting and accepting token x is min(p(x), q(x)); given that x is emitted it is min(1, q/p).
        """
        pairs = zip(self.column("q_token"), self.column("p_token"), strict=True)
        return [np.minimum(1.0, q / np.maximum(p, np.finfo(np.float64).tiny)) for q, p in pairs]


def load(where: str | Path) -> PositionLog:
    """Load a position log, given its JSON file (with its table in the same folder) or the name of a bundled log."""
    path = Path(where)
    if str(where) in names():
        path = Path(str(_folder() / f"{where}.json"))
    elif path.suffix != ".json":
        raise ParameterError(f"{checks.unknown('log', str(where), names())}; or give the path of a log's .json")
    try:
        header, table = json_and_parquet.load(path, _KEYS, "a decision log", VERSION, "log it again", PART)
        typed_values.check(header, _PositionLogHeader, "")
        checks.whole("target.layers", header["target"]["layers"], 1, checks.MAX_LAYERS)
        _check_prompts(header["prompts"])
        return PositionLog(table, {name: header[name] for name in _HEADER})
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def _check_prompts(prompts: list[dict[str, Any]]) -> None:
    """Raise ParameterError for a token of a prompt that no vocabulary has. Prompts may lack tokens."""
    for number, prompt in enumerate(prompts):
        tokens = prompt.get("tokens")
        if isinstance(tokens, list) and {*map(type, tokens)} == {int} and not 0 <= min(tokens) <= max(tokens) <= MOST_TOKEN:
            place = next(index for index, token in enumerate(tokens) if not 0 <= token <= MOST_TOKEN)
            checks.whole(f"prompts[{number}].tokens[{place}]", tokens[place], 0, MOST_TOKEN)


def save(log: PositionLog, path: str | Path) -> Path:
    """Write a position log as a JSON file and a table in the same folder."""
    return json_and_parquet.save(Path(path), document(log.header, log.table), log.table)


def document(header: Mapping[str, Any], table: pl.DataFrame) -> dict[str, Any]:
    """Content of a log's JSON file, without its checksum."""
    lacking = [name for name in _HEADER if name not in header]
    if lacking:
        raise ParameterError(f"the description of a decision log must have {lacking[0]}")
    kept = {name: header[name] for name in _HEADER}
    columns = {name: COLUMNS[name] for name in table.columns}
    return {"schema_version": VERSION, "part": PART, **kept, "columns": columns, "rows": table.height}


def bundled(name: str = "family") -> PositionLog:
    """Load a log that is bundled with the project."""
    return load(name)


def names() -> list[str]:
    """Names of the bundled logs."""
    folder = _folder()
    files = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def _folder() -> Traversable:
    return resources.files("model") / "logs"
