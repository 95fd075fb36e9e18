"""[outcomes] of early candidates: laws of their matches, with sources and intervals of the rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model import published
from model.base import checks
from model.base.checks import ParameterError, TableError
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.methods.method_parameters import MethodParameters
from model.outcomes import outcome_laws
from model.outcomes.intervals import wilson
from sim.scenarios.outcomes.outcome_records import (
    CorrelatedRate,
    LawRecord,
    OneRate,
    Outcome,
    RateByPosition,
    RecordedOutcomes,
    check_depth,
    independent,
    of_method,
)


@dataclass(frozen=True)
class IndependentMatches(OneRate):
    """Every position matches with probability `match_rate`; `trials` is the number of comparisons."""

    RATES = ("match_rate",)

    match_rate: float
    trials: int | None = None
    source: str = "assumed"


@dataclass(frozen=True)
class CorrelatedMatches(CorrelatedRate):
    """As `iid`, with correlation between neighbouring positions."""

    RATES = ("match_rate",)

    match_rate: float
    correlation: float
    trials: int | None = None
    source: str = "assumed"


@dataclass(frozen=True)
class MatchesByPosition(RateByPosition):
    """Output position j matches with probability `match_rates[j]`."""

    RATES = ("match_rates",)

    match_rates: tuple[float, ...]
    source: str = "assumed"


@dataclass(frozen=True)
class RecordedMatches(RecordedOutcomes):
    """Recorded sequences of matches: `records`, a JSON `file` of them (lists of true and false), or a decision `log`.

    A `log` is a file, or the name of a bundled log; its matches are those at the method's exit layer and candidates, with the named
    `head`: `common` (the model's own), or `trained` for the layer.
    """

    records: tuple[tuple[bool, ...], ...] | None = None
    file: str | None = None
    log: str | None = None
    head: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log is None and self.head is not None:
            raise ParameterError("head is used only with a decision log; leave it out")

    def check_log(self, log: PositionLog) -> None:
        """Raise an error if no head is named for the log."""
        if self.head is None:
            raise ParameterError(f"head is required with a log: one of {', '.join(position_log.HEADS)}")
        checks.one_of("head", self.head, position_log.HEADS)

    def law_of_log(self, log: PositionLog, parameters: MethodParameters, tokens: int) -> outcome_laws.Replay:
        """Matches: true where the generated token is among the candidates at the exit layer; at the last layer it always is."""
        layer, candidates = of_method(parameters, "replay of a log", ("exit_layer", "candidates"))
        if layer == log.layers:
            matches = [np.ones(len(text), dtype=np.bool_) for text in log.by_sequence(log.table["token"].to_numpy())]
        else:
            check_depth(log, parameters)
            form = parameters.table().get("form", "literal")
            matches = log.matches(layer, candidates, self.head or "common", form=form)
        return outcome_laws.Replay(log.first_tokens(matches, tokens))


@dataclass(frozen=True)
class PublishedMatches(LawRecord):
    """A rate from a published table, by the table's keys: `data_set`, `head` or `sampling`.

    Layer and candidates are those of the method. `by_position` uses the rates by bin of output positions, which Tables 6 to 8
    print, instead of the total; it is required if the `table` is named.
    """

    data_set: str
    head: str | None = None
    sampling: str | None = None
    table: str = "ppd-table-2"
    by_position: bool | None = None

    def __post_init__(self) -> None:
        table = published.table(self.table)
        for key in ("data_set", "head", "sampling"):
            value = getattr(self, key)
            if value is None and key in table.keys:
                known = ", ".join(sorted({str(row[key]) for row in table.rows}))
                raise TableError("outcomes", f".{key} is required by {self.table}: one of {known}")
            if value is not None and key not in table.keys:
                raise TableError("outcomes", f".{key} is not a key of {self.table}; its keys: {', '.join(table.keys)}")
            if value is not None:
                checks.one_of(key, value, sorted({str(row[key]) for row in table.rows}))
        if not isinstance(self.by_position, bool | None):
            raise ParameterError(f"by_position must be true or false, got {self.by_position!r}")
        binned = "first" in table.keys
        if binned and self.by_position is None:
            raise TableError(
                "outcomes",
                f".by_position is required by {self.table}, which has bins of output positions: true gives each position"
                " the rate of its bin, false all of them the printed total",
            )
        if self.by_position and not binned and self.table != "ppd-table-2":
            raise TableError("outcomes", ".by_position picks its table by data_set; leave outcomes.table out")

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point."""
        known: dict[str, Any] = {"data_set": self.data_set, "head": self.head, "sampling": self.sampling, "method": "ppd"}
        known["layer"], known["candidates"] = of_method(parameters, "published", ("exit_layer", "candidates"))
        if self.by_position:
            keys = {key: known[key] for key in ("data_set", "layer", "candidates", "head")}
            rates, source = published.match_rates_by_position(**keys, tokens=tokens)
            law = outcome_laws.ByPosition(rates)
            trials = published.trials_of_a_bin(self.data_set)
            # All bins at their low ends, and all at their high ends: wider than necessary.
            low, high = wilson(rates, trials)
            ends = outcome_laws.ByPosition(low), outcome_laws.ByPosition(high)
            bounds = float(low.mean()), float(high.mean())
            return Outcome(law, float(rates.mean()), f"published: {source}", *ends, *bounds, trials)
        table = published.table(self.table)
        keys = {key: known[key] for key in table.keys if key in known}
        found = published.match_rate(self.table, **keys)
        outcome = independent(found.rate, found.trials, f"published: {found.source}")
        if "latency_s" not in table.rows[0]:
            return outcome
        plain = table.lookup(**keys | {"method": "greedy", "candidates": None})["latency_s"]
        return replace(outcome, published_speedup=plain / table.lookup(**keys)["latency_s"])


KINDS: dict[str, type[LawRecord]] = {
    "iid": IndependentMatches, "markov": CorrelatedMatches, "by-position": MatchesByPosition, "replay": RecordedMatches,
    "published": PublishedMatches,
}  # fmt: skip
