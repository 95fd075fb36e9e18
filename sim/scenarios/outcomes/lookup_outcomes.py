"""[outcomes] of lookups in a text: how often they match, how many tokens a match drafts, and how many of them are accepted.

A rate of acceptance here is accepted over tested tokens of a draft, as for other drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks
from model.interpret import text_lookup
from model.logs import text_lookups
from model.methods.method_parameters import MethodParameters
from model.outcomes.intervals import wilson
from model.outcomes.lookup_laws import Lookups, ReplayedLookups
from sim.scenarios.outcomes.outcome_files import json_of
from sim.scenarios.outcomes.outcome_records import (
    LawRecord,
    Outcome,
    VariedOutcomes,
    check_file,
    check_one_source,
    check_provenance,
    check_rates,
    checked_parameters,
    log_of,
)


@runtime_checkable
class LooksUp(Protocol):
    """Parameters of a method that drafts by lookups."""

    draft_length: int
    min_match: int
    max_match: int
    length_factor: float | None

    def drafted_after(self, match: int) -> int:
        """Drafted tokens after a match of this length."""


@dataclass(frozen=True)
class IndependentLookups(LawRecord):
    """A lookup matches with probability `hit_rate`, and drafts `draft_length` tokens of the method.

    Each is accepted with probability `acceptance_rate` if those before it were. `trials` is the number of lookups.
    """

    USES = ("parameters",)
    RATES = ("hit_rate", "acceptance_rate")

    hit_rate: float
    acceptance_rate: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("hit_rate", self.hit_rate, 0, 1)
        checks.number("acceptance_rate", self.acceptance_rate, 0, 1)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of matches."""
        length = _one_length(parameters, "iid")

        def law(hit_rate: float) -> Lookups:
            return Lookups.of_rates(hit_rate, self.acceptance_rate, length)

        found = Outcome(law(self.hit_rate), self.hit_rate, self.source, further_values=_further(self.acceptance_rate))
        if self.trials is None:
            return found
        low, high = (float(bound) for bound in wilson(self.hit_rate, self.trials))
        return Outcome(
            found.law, self.hit_rate, self.source, law(low), law(high), low, high, self.trials, further_values=found.further_values
        )

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes at several pairs of rates."""
        size, length = len(next(iter(rates.values()))), first.law.drafted[0]
        hits, accepted = (np.broadcast_to(rates.get(name, getattr(self, name)), size).astype(np.float64) for name in self.RATES)
        laws, further = Lookups.each(hits, accepted, length), {"acceptance_rate": accepted}
        if self.trials is None:
            return VariedOutcomes(first, laws, None, None, {"rate": hits}, further)
        low, high = wilson(hits, self.trials)
        ends = Lookups.each(low, accepted, length), Lookups.each(high, accepted, length)
        return VariedOutcomes(first, laws, *ends, {"rate": hits, "rate_low": low, "rate_high": high}, further)


@dataclass(frozen=True)
class LookupsInStretches(LawRecord):
    """As `iid`, with another probability of a match after a round that accepted drafted tokens: text repeats in stretches."""

    USES = ("parameters",)
    RATES = ("hit_rate", "hit_rate_after_acceptance", "acceptance_rate")

    hit_rate: float
    hit_rate_after_acceptance: float
    acceptance_rate: float
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in self.RATES:
            checks.number(name, getattr(self, name), 0, 1)
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of matches after a round without accepted tokens."""
        rates = [self.hit_rate, self.hit_rate_after_acceptance]
        law = Lookups.of_rates(rates, self.acceptance_rate, _one_length(parameters, "markov"))
        return Outcome(law, self.hit_rate, self.source, further_values=_further(self.acceptance_rate))


@dataclass(frozen=True)
class LookupsByMatch(LawRecord):
    """The longest match has length `match_lengths[i]` with probability `match_rates[i]`; with the rest there is none.

    `acceptance_rates` has a rate for each of these lengths, or a list of rates by position in a draft. Optional
    `match_rates_after_acceptance` hold after a round that accepted drafted tokens. A match drafts as many tokens as the method's
    `draft_length` and `length_factor` allow; one shorter than its `min_match` counts as none.
    """

    USES = ("parameters",)
    RATES = ("match_rates", "acceptance_rates", "match_rates_after_acceptance")

    match_lengths: tuple[int, ...]
    match_rates: tuple[float, ...]
    acceptance_rates: tuple[Any, ...]
    match_rates_after_acceptance: tuple[float, ...] | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        lengths: Any = self.match_lengths
        if not isinstance(lengths, tuple) or not lengths:
            raise checks.ParameterError(f"match_lengths must be a list of lengths of matches, got {checks.shown(lengths)}")
        for index, length in enumerate(lengths):
            checks.whole(f"match_lengths[{index}]", length, 1)
        if any(one >= other for one, other in pairwise(lengths)):
            raise checks.ParameterError(f"match_lengths must increase, got {checks.shown(lengths)}")
        for name in ("match_rates", "match_rates_after_acceptance"):
            rates = getattr(self, name)
            if rates is None:
                continue
            check_rates(name, rates, "a list with a rate for each of match_lengths")
            self._check_count(name, rates)
            if sum(rates) > 1 + 1e-9:
                raise checks.ParameterError(f"{name} must sum to at most 1, got {sum(rates):g}; the rest is no match")
        given: Any = self.acceptance_rates
        if not isinstance(given, tuple) or not given:
            raise checks.ParameterError(
                f"acceptance_rates must be a list with a rate for each of match_lengths, got {checks.shown(given)}"
            )
        self._check_count("acceptance_rates", given)
        for index, rate in enumerate(given):
            if isinstance(rate, tuple):
                check_rates(f"acceptance_rates[{index}]", rate, "a rate, or a list of rates by position in a draft")
            else:
                checks.number(f"acceptance_rates[{index}]", rate, 0, 1)
        check_provenance(None, self.source)

    def _check_count(self, name: str, given: tuple[Any, ...]) -> None:
        if len(given) != len(self.match_lengths):
            raise checks.ParameterError(
                f"{name} must have one entry for each of {len(self.match_lengths)} match_lengths, got {len(given)}"
            )

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of matches that draft."""
        method: LooksUp = checked_parameters(parameters, LooksUp, "by-match")
        if self.match_lengths[-1] > method.max_match:
            raise checks.ParameterError(
                f"match_lengths must be at most max_match={method.max_match}, got {self.match_lengths[-1]}; with a smaller"
                " max_match other places of the text are found: count again, or set max_match"
            )
        drafted = [method.drafted_after(length) for length in self.match_lengths]
        used = [index for index, count in enumerate(drafted) if count]
        chances = np.array([self.match_rates, self.match_rates_after_acceptance or self.match_rates])[:, used]
        survival: list[NDArray[np.float64]] = [np.asarray(np.cumprod(self._rates(index, drafted[index]))) for index in used]
        law = Lookups(chances, [drafted[index] for index in used], survival)
        return Outcome(law, float(chances[0].sum()), self.source, further_values=_further(_tested_rate(chances[0], survival)))

    def _rates(self, index: int, drafted: int) -> NDArray[np.float64]:
        """Rates of acceptance by position in a draft."""
        given = self.acceptance_rates[index]
        if not isinstance(given, tuple):
            return np.full(drafted, float(given))
        if len(given) < drafted:
            raise checks.ParameterError(
                f"acceptance_rates[{index}] must have a rate for each of {drafted} drafted tokens, got {len(given)}; give more"
                " rates or draft fewer tokens"
            )
        return np.array(given[:drafted], dtype=np.float64)


@dataclass(frozen=True)
class RecordedLookups(LawRecord):
    """Recorded lookups by output position, from a decision `log` or a JSON `file`.

    A `log` (a file, or the name of a bundled log) holds prompts and outputs, in which the method's own lookups are made: every
    `min_match`, `max_match`, `draft_length` and `length_factor` is replayed exactly. A file has a list for each sequence of
    [match length, drafted tokens, accepted tokens] at each position, made with the method's settings.
    """

    log: str | None = None
    file: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        check_one_source(self.file, self.log)
        check_file(self.file)
        check_provenance(None, self.source)
        if self.log is not None:
            text_lookups.check(log_of(self.log))
        else:
            _of_file(str(self.file))

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point, from the records that cover all tokens; rates are over all their positions."""
        method: LooksUp = checked_parameters(parameters, LooksUp, "replay")
        name = str(self.log if self.log is not None else self.file)
        records = _of_file(name) if self.log is None else _of_log(
            name, method.min_match, method.max_match, method.draft_length, method.length_factor, bounded_files.stamp(name)
        )  # fmt: skip
        kept = [each for each in records if len(each.drafted) >= tokens]
        if not kept:
            longest = max(len(each.drafted) for each in records)
            bound = f"tokens must be at most {longest}, the longest record of {name!r}"
            raise checks.ParameterError(f"{bound}, got {tokens}; decode fewer")
        drafted, accepted = (np.stack([getattr(each, column)[:tokens] for each in kept]) for column in ("drafted", "accepted"))
        if drafted.max() > method.draft_length:
            raise checks.ParameterError(
                f"draft_length must be at least {drafted.max()}, as drafted in {name!r}, got {method.draft_length}"
            )
        tested = np.minimum(accepted + 1, drafted).sum()
        rate = float(accepted.sum() / tested) if tested else float("nan")
        source = f"{self.source}: {len(kept)} of {len(records)} sequences of {Path(name).name}"
        law, hits = ReplayedLookups(drafted, accepted), float((drafted > 0).mean())
        return Outcome(law, hits, source, trials=drafted.size, further_values=_further(rate))


@lru_cache(maxsize=64)
def _of_log(
    name: str, min_match: int, max_match: int, longest: int, factor: float | None, stamp: object
) -> list[text_lookup.TextLookups]:
    return text_lookups.of_log(log_of(name), min_match, max_match, longest, factor)


def _of_file(file: str) -> list[text_lookup.TextLookups]:
    form = "a list for each sequence of [match length, drafted tokens, accepted tokens] at each position"
    records: Any = json_of(file, "lookups")
    if not isinstance(records, list) or not records:
        raise checks.ParameterError(f"file {file!r} must hold {form}, got {checks.shown(records)}")
    found = []
    for index, record in enumerate(records):
        try:
            rows = np.array(record)
        except ValueError:
            rows = np.empty(0)
        if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iu" or (rows < 0).any():
            raise checks.ParameterError(f"file {file!r} must hold {form}; sequence {index} is {checks.shown(record)}")
        match, drafted, accepted = rows.T
        wrong = np.flatnonzero((accepted > drafted) | ((drafted > 0) & (match == 0)))
        if wrong.size:
            row = checks.shown(rows[wrong[0]].tolist())
            raise checks.ParameterError(
                f"file {file!r}, sequence {index}, position {wrong[0]}: accepted tokens must be at most the drafted ones, which"
                f" need a match, got {row}"
            )
        found.append(text_lookup.TextLookups(match, drafted, accepted))
    return found


def _one_length(parameters: MethodParameters, kind: str) -> int:
    """Drafted tokens of every match; refused where they depend on the length of the match."""
    method: LooksUp = checked_parameters(parameters, LooksUp, kind)
    if method.length_factor is not None:
        raise checks.ParameterError(
            f"length_factor needs match lengths, which outcomes.kind {kind!r} does not have; take 'by-match' or 'replay'"
        )
    return method.draft_length


def _tested_rate(chances: NDArray[np.float64], survival: list[NDArray[np.float64]]) -> float:
    """Accepted over tested tokens: the j-th token of a draft is tested if those before it were accepted."""
    accepted = sum(chance * each.sum() for chance, each in zip(chances, survival, strict=True))
    tested = sum(chance * (1 + each[:-1].sum()) for chance, each in zip(chances, survival, strict=True))
    return float(accepted / tested) if tested else float("nan")


def _further(acceptance_rate: float) -> dict[str, float]:
    return {"acceptance_rate": acceptance_rate}


KINDS: dict[str, type[LawRecord]] = {
    "iid": IndependentLookups, "markov": LookupsInStretches, "by-match": LookupsByMatch, "replay": RecordedLookups,
}  # fmt: skip
