"""Published tables with every printed number, looked up by name.

The sources are the papers on Predictive Pipelined Decoding, Big Little Decoder, SkipDecode, AMUSD and MagicDec, and slides ("the
deck") on speculative decoding; each has a separate module.

>>> match_rate("ppd-table-2", data_set="squad", layer=20, candidates=3, head="trained").rate
0.6837
>>> table("ppd-table-3").lookup(data_set="squad", method="ppd", candidates=1)["latency_s"]
13.711
>>> table("deck-table-2").lookup(task="ende", draft_length=3)["speedup"]
2.68
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.published import amusd_tables, bild_tables, deck_tables, magicdec_tables, ppd_tables, skipdecode_tables
from model.published.table_notes import TableNotes

# A column name has the same meaning in every table; columns in neither list are floats.
_WHOLE = (
    "layer", "candidates", "first", "last", "draft_length", "beams", "layers", "dim", "ffn_dim", "warm_up", "min_layers",
    "max_layers", "target_speedup", "prompt", "sequences", "context_budget",
)  # fmt: skip
_TEXT = ("data_set", "head", "method", "sampling", "task", "model", "draft_model", "combination", "alignment", "loss")
_BY_POSITION = {"squad": "ppd-table-6", "wmt": "ppd-table-7", "cnn_dm": "ppd-table-8"}
_PHRASES = {
    "layer": "layer {}", "candidates": "k={}", "head": "{} head", "draft_length": "gamma {}", "beams": "{} beams",
    "target_speedup": "{}x", "prompt": "{} tokens", "sequences": "batch {}",
}  # fmt: skip
_SPELLED = {
    "ende": "EnDe", "cnndm": "CNNDM", "t5-large": "T5-Large", "t5-small": "T5-Small",
    "opt-1.3b": "OPT-1.3B", "opt-6.7b": "OPT-6.7B", "llama-3.1-8b": "Llama-3.1-8B", "llama-2-7b-32k": "Llama-2-7B-32K",
    "tinyllama": "TinyLlama", "self": "self-drafts",
    "large+small": "T5-Large + T5-Small", "large+base": "T5-Large + T5-Base",
}  # fmt: skip
_TABLES: dict[str, tuple[str, str, TableNotes]] = {
    name: (short, module.PAPER, about)
    for short, module in (
        ("PPD", ppd_tables), ("Deck", deck_tables), ("BiLD", bild_tables), ("SkipDecode", skipdecode_tables),
        ("AMUSD", amusd_tables), ("MagicDec", magicdec_tables),
    )
    for name, about in module.TABLES.items()
}
"""By name of the table: short name of the source, source, and notes."""


@dataclass(frozen=True, eq=False)
class PublishedTable:
    """One printed table: its source, the columns that identify a row, its rows, and notes on its inconsistencies."""

    name: str
    title: str
    source: str
    keys: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    def lookup(self, **keys: str | int | None) -> dict[str, Any]:
        """Return the single row with these keys; keys that follow from the others may be left out.

        >>> table("ppd-table-5").lookup(data_set="cnn_dm", sampling="top-p")
        {'data_set': 'cnn_dm', 'sampling': 'top-p', 'match_percent': 40.16}
        >>> table("ppd-table-6").lookup(layer=10, candidates=1, head="final", first=1, last=2)["match_percent"]
        0.8
        >>> table("ppd-table-2").lookup(data_set="squad", layer=20, candidates=3, head="train")
        Traceback (most recent call last):
            ...
        model.base.checks.ParameterError: unknown head of ppd-table-2 'train'; did you mean trained? known: final, trained
        """
        for key in keys:
            if key not in self.keys:
                raise checks.unknown(f"key of {self.name}", key, self.keys)
        rows = self.rows
        for key in (key for key in self.keys if key in keys):
            # The message lists only values that occur together with the previous keys.
            known = {str(row[key]) for row in rows}
            rows = tuple(row for row in rows if row[key] == keys[key])
            if not rows:
                raise checks.unknown(f"{key} of {self.name}", keys[key], known)
        if len(rows) > 1:
            key = next(key for key in self.keys if len({row[key] for row in rows}) > 1)
            values = ", ".join(dict.fromkeys(str(row[key]) for row in rows))
            raise checks.ParameterError(f"{key} must be given: {len(rows)} rows of {self.name} fit; known: {values}")
        return dict(rows[0])

    def cite(self, row: Mapping[str, Any]) -> str:
        """Short reference to a row, or to the given part of its keys.

        >>> deck = table("deck-table-2")
        >>> deck.cite(deck.rows[0])
        'Deck Table 2, EnDe, gamma 3'
        """
        short, _, about = _TABLES[self.name]
        plain = [key for key in self.keys if key not in ("first", "last") and row.get(key) is not None]
        parts = [_PHRASES.get(key, "{}").format(_SPELLED.get(row[key], row[key])) for key in plain]
        if "last" in row:
            parts.append(f"positions {row['first']}-{row['last']}")
        return ", ".join([f"{short} {about.label}", *parts])


@dataclass(frozen=True)
class Rate:
    """Fraction of early predictions that matched.

    Attributes:
        rate: matches over comparisons, in [0, 1].
        trials: number of comparisons; None if the paper does not give it.
        source: reference to the printed number.
        kind: always "published", to distinguish these rates from measured ones.
    """

    rate: float
    trials: int | None
    source: str
    kind: str = "published"


def names() -> tuple[str, ...]:
    """Names of all tables.

    >>> [name for name in names() if name.startswith("ppd")]
    ['ppd-table-2', 'ppd-table-3', 'ppd-table-5', 'ppd-table-6', 'ppd-table-7', 'ppd-table-8']
    >>> [name for name in names() if name.startswith("deck")]
    ['deck-table-1', 'deck-table-2', 'deck-beam', 'deck-adaptive', 'deck-hierarchy']
    """
    return tuple(_TABLES)


def table(name: str) -> PublishedTable:
    """Return the table with this name.

    >>> table("ppd-table-8").title
    'Match rate by output position, CNN/DM'
    """
    checks.one_of("table", name, names())
    return _read(name)


def match_rate(table_name: str, /, **keys: str | int | None) -> Rate:
    """Return a printed match rate, by the keys of its table: data_set, layer, candidates, head, method, sampling, first, last.

    In Tables 6 to 8 this is the row total, unless `first` and `last` give a bin of output positions.

    Trials are pairs times tokens compared (section 4.3, which writes 10,570 x 16 for SQuAD; the other two data sets
    follow the same rule). They are None for Tables 3 and 5, because the paper does not give the number of comparisons:
    Table 3 uses "several examples", Table 5 uses 100 examples of unstated length. Comparisons within one output are not
    independent, so an error bar from `trials` alone is too narrow.

    >>> match_rate("ppd-table-2", data_set="wmt", layer=37, candidates=5, head="final")
    Rate(rate=0.9641, trials=192000, source='PPD Table 2, wmt, layer 37, k=5, final head', kind='published')
    >>> early = match_rate("ppd-table-6", data_set="squad", layer=20, candidates=3, head="trained", first=1, last=2)
    >>> early.rate, early.trials, early.source
    (0.511, 21140, 'PPD Table 6, squad, layer 20, k=3, trained head, positions 1-2')
    >>> match_rate("ppd-table-3", data_set="cnn_dm", candidates=3)
    Rate(rate=0.4199, trials=None, source='PPD Table 3, cnn_dm, ppd, k=3', kind='published')
    """
    found = table(table_name)
    if "match_percent" not in found.rows[0]:
        having = ", ".join(name for name in names() if "match_percent" in table(name).rows[0])
        raise checks.ParameterError(f"table must have match rates, as do {having}; got {table_name!r}, whose rows table() gives")
    by_position = "first" in found.keys
    if by_position and not keys.keys() & {"first", "last"}:
        keys |= {"first": 1, "last": max(row["last"] for row in found.rows)}
    row = found.lookup(**keys)
    source = found.cite(row)
    if row["match_percent"] is None:
        raise checks.ParameterError(f"{source} has no match rate: nothing is predicted early; ask for method='ppd'")
    trials = None
    if "layer" in found.keys:
        data_set = row["data_set"]
        tokens = row["last"] - row["first"] + 1 if by_position else ppd_tables.TOKENS[data_set]
        trials = ppd_tables.PAIRS[data_set] * tokens
    return Rate(_fraction(row["match_percent"]), trials, source)


def match_rates_by_position(
    *, data_set: str, layer: int, candidates: int, head: str, tokens: int
) -> tuple[NDArray[np.float64], str]:
    """Return the match rates of the first `tokens` output positions, shape (tokens,), and their source.

    Tables 6 to 8 print one rate for each of eight bins of positions; every position gets the rate of its bin.

    >>> rates, source = match_rates_by_position(data_set="squad", layer=20, candidates=3, head="trained", tokens=5)
    >>> rates
    array([0.511 , 0.511 , 0.7295, 0.7295, 0.7239])
    >>> source
    'PPD Table 6, squad, layer 20, k=3, trained head, by position'
    """
    checks.one_of("data_set", data_set, _BY_POSITION)
    found = table(_BY_POSITION[data_set])
    keys: dict[str, str | int | None] = {"layer": layer, "candidates": candidates, "head": head}
    last = ppd_tables.TOKENS[data_set]
    total = found.lookup(**keys, first=1, last=last)
    checks.whole("tokens", tokens, 1)
    if tokens > last:
        raise checks.ParameterError(
            f"tokens must be between 1 and {last}, the last position that {found.name} prints for {data_set}, "
            f"got {tokens}; ask for at most {last} tokens, or use the total, match_rate({found.name!r}, ...)"
        )
    rates = np.empty(last)
    for row in found.rows:
        is_bin = (row["first"], row["last"]) != (1, last)
        if is_bin and all(row[key] == value for key, value in keys.items()):
            rates[row["first"] - 1 : row["last"]] = _fraction(row["match_percent"])
    source = found.cite({key: total[key] for key in ("data_set", *keys)})
    return rates[:tokens], f"{source}, by position"


def trials_of_a_bin(data_set: str) -> int:
    """Number of comparisons in each rate of Tables 6 to 8, which print eight bins of positions for each data set.

    >>> trials_of_a_bin("squad")
    21140
    """
    checks.one_of("data_set", data_set, _BY_POSITION)
    return ppd_tables.PAIRS[data_set] * ppd_tables.TOKENS[data_set] // 8


@functools.cache
def _read(name: str) -> PublishedTable:
    _, paper, about = _TABLES[name]
    text = resources.files(__name__).joinpath(f"{name.replace('-', '_')}.csv").read_text(encoding="utf-8")
    # Read-only rows, because all callers share the cached table.
    rows = tuple(
        MappingProxyType({column: _typed(column, cell) for column, cell in row.items()})
        for row in csv.DictReader(text.splitlines())
    )
    source = f"{paper}, {about.label}: {about.setting}"
    return PublishedTable(name, about.title, source, about.keys, rows, about.notes)


def _typed(column: str, cell: str) -> str | int | float | None:
    if not cell:
        return None
    if column in _TEXT:
        return cell
    return int(cell) if column in _WHOLE else float(cell)


def _fraction(percent: float) -> float:
    """Convert percent to a fraction, as the float nearest to the printed digits.

    >>> 5.66 / 100, _fraction(5.66)
    (0.056600000000000004, 0.0566)
    """
    return float(Decimal(str(percent)) / 100)
