"""The decision log: what models say along the target's own text, one row for each token that it puts out.

It is counterfactual, and complete for methods that keep to that text: at every position it knows the rank of the final token behind
every layer (so the match of Predictive Pipelined Decoding for every exit layer and every k), and whether a draft that starts there
is right, and for how long (so speculative decoding with any draft lengths).
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
from model.methods.bild.threshold_decisions import Decisions
from model.methods.early_exit.theory import MEASURES

if TYPE_CHECKING:
    import polars as pl

Whole = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

VERSION, PART = 2, "positions"
_SAID = ("target", "draft", "heads", "prompts", "max_tokens", "sampling", "seed", "dtype", "versions", "date")
_KEYS = ("part", *_SAID, "columns", "rows")


class _PositionLogHeader(TypedDict):
    """What the JSON file of a log says of it."""

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
"""The head that reads behind a layer: the model's own, or one that was trained for that layer (Table 2 of [Yang2024]: N and Y)."""
TARGET: Mapping[str, str] = {
    "prompt": "number of the prompt, from 0", "position": "output position, from 0", "token": "what the target put out",
    "rank_common": "rank of that token behind each layer, from 1, under the model's own head",
    "rank_trained": "the same under the head trained for the layer; 0 where there is none",
    "confidence": "largest probability behind each layer, under the model's own head",
    "saturation": "cosine between the states before and behind each layer",
}  # fmt: skip
DRAFT: Mapping[str, str] = {
    "draft_token": "the draft's likeliest", "q_token": "the draft's chance of the target's token",
    "p_token": "the target's chance of it", "q_draft": "the draft's chance of its likeliest",
    "p_draft": "the target's chance of that", "overlap": "sum of min(p, q): the chance that a drawn draft is accepted",
    "draft_confidence": "the draft's largest probability", "distance": "the target's cross-entropy of the draft's likeliest [nats]",
    "accepted": "tokens of a greedy draft that survive if it starts here",
}  # fmt: skip
BY_LAYER = ("rank_common", "rank_trained", "confidence", "saturation")
WHOLE = ("prompt", "position", "token", "rank_common", "rank_trained", "draft_token", "accepted")
OPEN = (*WHOLE, "distance")
"""Columns without an upper bound; all others are chances, or a cosine."""
ROUNDED = 1e-3
"""By how much a number may leave its bounds for rounding alone, in half precision."""


@dataclass(frozen=True, eq=False)
class PositionLog:
    """A decision log.

    `table` has the columns of `TARGET`, and of `DRAFT` where there was a draft; those by layer are arrays of `layers`. `said` is
    where it is from: models with checksums, prompts, tokens asked for, how tokens were chosen, versions.

    >>> log = bundled()
    >>> log.layers, log.ranks(6).shape == (log.table.height,)
    (12, True)
    """

    table: pl.DataFrame
    said: Mapping[str, Any]

    def __post_init__(self) -> None:
        missing = [name for name in TARGET if name not in self.table.columns]
        if missing:
            raise ParameterError(f"a decision log must have column {missing[0]}, got {', '.join(self.table.columns)}")
        present = [name for name in DRAFT if name in self.table.columns]
        if present and len(present) < len(DRAFT):
            lacking = next(name for name in DRAFT if name not in present)
            raise ParameterError(f"a decision log with a draft must have column {lacking} too")
        for name in self.table.columns:
            if name not in {**TARGET, **DRAFT}:
                raise ParameterError(f"unknown column {name} of a decision log; {checks.nearest(name, {**TARGET, **DRAFT})}")
        if not self.table.height:
            raise ParameterError("a decision log must have at least one row")
        if present and not self.said.get("draft"):
            raise ParameterError("a decision log with a draft must say its draft, got none; log it again")
        self._check_values()

    def _check_values(self) -> None:
        """Refuse columns of another type or shape than logs have, and values that no model can have said."""
        said = self.said.get("target")
        layers = said.get("layers") if isinstance(said, Mapping) else None
        for name in self.table.columns:
            column = self.table[name]
            values = column.to_numpy() if not column.null_count() else np.array(None)
            width = (layers or (values.shape[1:] or (0,))[0],) if name in BY_LAYER else ()
            layers = width[0] if width else layers  # of all columns the same
            kind = "iu" if name in WHOLE else "f"
            if values.dtype.kind not in kind or values.shape != (column.len(), *width) or 0 in values.shape:
                wanted = f"{'whole numbers' if name in WHOLE else 'numbers'}{', one for each layer' if width else ''}, none missing"
                raise ParameterError(f"column {name} must be {wanted}, got {column.dtype}; log it again")
            low, high = 1 if name == "rank_common" else -1 if name == "saturation" else 0, np.inf if name in OPEN else 1
            # Chances are sums of rounded numbers. A draft's chance of 0 is a distance without bounds.
            bad = np.isnan(values) | (values < low - ROUNDED) | (values > high + ROUNDED)
            if bad.any():
                bound = f"at least {low}" if name in OPEN else f"between {low} and {high}"
                raise ParameterError(f"column {name} must be {bound}, got {values[bad][0]}; log it again")
        text, position = self.table["prompt"].to_numpy(), self.table["position"].to_numpy()
        places = np.concatenate([np.arange(count) for count in np.diff(self.starts)])
        if (np.diff(text) < 0).any() or not np.array_equal(position, places):
            raise ParameterError("rows must be in the order of texts, and of positions from 0 within each; log it again")
        if self.drafted:
            left = np.repeat(np.diff(self.starts), np.diff(self.starts)) - places
            if (self.table["accepted"].to_numpy() > left).any():
                raise ParameterError("column accepted must be at most the tokens that are left of the text; log it again")

    @cached_property
    def layers(self) -> int:
        """Layers of the target."""
        return int(self.table["rank_common"].to_numpy().shape[1])

    @cached_property
    def starts(self) -> Whole:
        """The first row of each text, and behind the last the number of rows; shape (texts + 1,)."""
        text = self.table["prompt"].to_numpy()
        return np.concatenate([[0], np.flatnonzero(np.diff(text)) + 1, [text.size]])

    @property
    def drafted(self) -> bool:
        """Whether there was a draft."""
        return "accepted" in self.table.columns

    def by_text(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A column's values, one array for each text."""
        return np.split(values, self.starts[1:-1])

    def ranks(self, layer: int, head: str = "common") -> Whole:
        """The rank of the target's token behind a layer, shape (rows,)."""
        checks.whole("layer", layer, 1, self.layers)
        checks.one_of("head", head, HEADS)
        found: Whole = self.table[f"rank_{head}"].to_numpy()[:, layer - 1]
        if not found.all():
            there = [each + 1 for each in np.flatnonzero(self.table["rank_trained"].to_numpy()[0])]
            known = f"heads of this log are at layers {checks.shown(there)}" if there else "this log was made without heads"
            raise ParameterError(f"layer {layer} has no trained head: {known}; take head 'common'")
        return found

    def matches(self, layer: int, candidates: int, head: str = "common", *, form: str = "literal") -> list[Bools]:
        """Whether the target's token is among so many early candidates of a layer: for each text an array (positions,).

        The flat form of Predictive Pipelined Decoding predicts where it is: behind a match later than the exit layer, if that is
        below the middle.
        """
        checks.whole("candidates", candidates, 1)
        if form != "flat" or 2 * layer >= self.layers:
            return self.by_text(self.ranks(layer, head) <= candidates)
        later = max(layer, self.layers - layer)
        kept = {each: self.by_text(self.ranks(each, head) <= candidates) for each in (layer, later)}
        found = []
        for text in range(len(self.starts) - 1):
            gap, matches = layer, []
            for place in range(kept[layer][text].size):
                matches.append(bool(kept[gap][text][place]))
                gap = max(layer, self.layers - gap) if matches[-1] else layer
            found.append(np.array(matches, dtype=np.bool_))
        return found

    def column(self, name: str) -> list[NDArray[Any]]:
        """What is known of the draft: for each text an array (positions,)."""
        if not self.drafted:
            raise ParameterError("this log was made without a draft; make one with --draft")
        return self.by_text(self.table[name].to_numpy())

    def covering(self, texts: list[NDArray[Any]], tokens: int) -> NDArray[Any]:
        """The first `tokens` values of all texts that have so many, shape (texts, tokens); texts may have ended before."""
        long = [each[:tokens] for each in texts if len(each) >= tokens]
        if not long:
            longest = max(len(each) for each in texts)
            bound = f"tokens must be at most {longest}, as the longest text of this log has"
            raise ParameterError(f"{bound}, got {tokens}; decode fewer")
        return np.stack(long)

    def agreements(self) -> list[Bools]:
        """Whether a greedy draft's token is the target's, for each text an array (positions,)."""
        return [length > 0 for length in self.column("accepted")]

    def decisions(self) -> list[Decisions]:
        """What Big Little Decoder would decide by, text by text: the draft's confidence, how far the target is from its token.

        Along the target's text, which is not what that method writes: `model.methods.bild.threshold_decisions` says what follows.
        """
        columns = [self.column(name) for name in ("draft_confidence", "distance")]
        source = f"measured: {self.said['draft']['name']} along the text of {self.said['target']['name']}"
        texts = zip(*columns, self.agreements(), strict=True)
        return [
            Decisions(np.minimum(sure.astype(np.float64), 1.0), np.maximum(far.astype(np.float64), 0.0), agrees, source)
            for sure, far, agrees in texts
        ]

    def sureness(self, measure: str) -> Floats:
        """How sure each layer is of each token, shape (rows, layers): `softmax` or `state`, as in
        `model.methods.early_exit.theory`."""
        checks.one_of("measure", measure, MEASURES)
        found = self.table["confidence" if measure == "softmax" else "saturation"].to_numpy().astype(np.float64)
        return np.asarray(np.clip(found, 0.0, 1.0))

    def chances(self) -> list[Floats]:
        """The chance that a drawn draft is accepted where the target's token is known, min(1, q/p): for each text (positions,).

        Of a token x that is put out, the joint chance of drafting and accepting it is min(p, q), so given x it is min(1, q/p).
        """
        pairs = zip(self.column("q_token"), self.column("p_token"), strict=True)
        return [np.minimum(1.0, q / np.maximum(p, np.finfo(np.float64).tiny)) for q, p in pairs]


def load(where: str | Path) -> PositionLog:
    """A decision log by its JSON file, beside which its table is, or by the name of a bundled one."""
    path = Path(where)
    if str(where) in names():
        path = Path(str(_folder() / f"{where}.json"))
    elif path.suffix != ".json":
        raise ParameterError(f"{checks.unknown('log', str(where), names())}; or give the path of a log's .json")
    try:
        said, table = json_and_parquet.load(path, _KEYS, "a decision log", VERSION, "log it again", PART)
        typed_values.check(said, _PositionLogHeader, "")
        checks.whole("target.layers", said["target"]["layers"], 1, checks.MAX_LAYERS)
        return PositionLog(table, {name: said[name] for name in _SAID})
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def save(log: PositionLog, path: str | Path) -> Path:
    """Write a decision log as a JSON file and a table beside it."""
    return json_and_parquet.save(Path(path), document(log.said, log.table), log.table)


def document(said: Mapping[str, Any], table: pl.DataFrame) -> dict[str, Any]:
    """What a log's JSON says, but for its checksum."""
    lacking = [name for name in _SAID if name not in said]
    if lacking:
        raise ParameterError(f"a decision log must say its {lacking[0]}")
    about = {name: {**TARGET, **DRAFT}[name] for name in table.columns}
    return {"schema_version": VERSION, "part": PART, **{name: said[name] for name in _SAID}, "columns": about, "rows": table.height}


def bundled(name: str = "family") -> PositionLog:
    """A log that comes with the project."""
    return load(name)


def names() -> list[str]:
    """The bundled logs."""
    folder = _folder()
    found = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def _folder() -> Traversable:
    return resources.files("model") / "logs"
