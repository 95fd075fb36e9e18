"""[outcomes] of drafted tokens: laws of their acceptance. A rate here is alpha, accepted over tested tokens.

The figures that serving engines print are not alpha: kind `reported` takes a printed figure with the engine's name and converts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model import published
from model.base import bounded_files, checks
from model.engines import acceptance_curves
from model.logs.position_log import PositionLog
from model.methods.method_parameters import MethodParameters
from model.methods.rounds import round_laws
from model.methods.speculative import block_verification, engine_dialects, rates_from_logs
from model.methods.speculative.algorithm import BLOCK, TOKEN
from model.outcomes import outcome_laws
from sim.scenarios.outcomes.outcome_files import read_once, text_of
from sim.scenarios.outcomes.outcome_records import (
    CorrelatedRate,
    LawRecord,
    OneRate,
    Outcome,
    RateByPosition,
    RecordedOutcomes,
    VariedOutcomes,
    check_depth,
    check_provenance,
    check_rates,
    independent,
)

if TYPE_CHECKING:
    from model.logs.acceptance_record import AcceptanceRecord


@dataclass(frozen=True)
class IndependentAcceptance(OneRate):
    """Each drafted token is accepted with probability `acceptance_rate` if those before it were; `trials` is the number tested."""

    RATES = ("acceptance_rate",)

    acceptance_rate: float
    trials: int | None = None
    source: str = "assumed"


@dataclass(frozen=True)
class CorrelatedAcceptance(CorrelatedRate):
    """As `iid`, with correlation between neighbouring output positions. Positive correlation lowers the tokens per round."""

    RATES = ("acceptance_rate",)

    acceptance_rate: float
    correlation: float
    trials: int | None = None
    source: str = "assumed"


@dataclass(frozen=True)
class AcceptanceByPosition(RateByPosition):
    """The token at output position j is accepted with probability `acceptance_rates[j]`, wherever its draft starts."""

    RATES = ("acceptance_rates",)

    acceptance_rates: tuple[float, ...]
    source: str = "assumed"


@dataclass(frozen=True)
class RecordedAcceptance(RecordedOutcomes):
    """Recorded outcomes by output position: `records`, a JSON `file` of them (lists of true and false), or a decision `log`.

    A `log` is a file, or the name of a bundled log. From a greedy log the outcomes are the positions at which the draft's token is
    the target's; from a sampled log, for sampled methods, the probabilities of acceptance.
    """

    records: tuple[tuple[bool, ...], ...] | None = None
    file: str | None = None
    log: str | None = None
    source: str = "measured"

    def check_log(self, log: PositionLog) -> None:
        """Raise an error for a log without a draft."""
        log.column("accepted")

    def law_of_log(
        self, log: PositionLog, parameters: MethodParameters, tokens: int
    ) -> outcome_laws.Replay | outcome_laws.RecordedProbabilities:
        """Law of agreements (greedy log) or acceptance probabilities (sampled log); the method must be sampled if the log is."""
        check_depth(log, parameters)
        drawn, sampled = log.header.get("sampling") is not None, bool(parameters.sampled)
        if drawn != sampled:
            kind, remedy = ("sampled", "set it to true") if drawn else ("greedy", "set it to false, or log with --sample")
            raise checks.ParameterError(f"sampled must be {str(drawn).lower()} with a log of {kind} decodings; {remedy}")
        if not drawn:
            return outcome_laws.Replay(log.first_tokens(log.agreements(), tokens))
        return outcome_laws.RecordedProbabilities(log.first_tokens(log.acceptance_probabilities(), tokens))


@dataclass(frozen=True)
class AcceptanceByDraftPosition(LawRecord):
    """The j-th token of a draft is accepted with probability `acceptance_rates[j]` if those before it were."""

    USES = ("parameters",)
    RATES = LISTED = ("acceptance_rates",)
    BY_DRAFT_POSITION = True

    acceptance_rates: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_rates("acceptance_rates", self.acceptance_rates, "a list of rates, one for each drafted token")
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of the first position in a draft."""
        if parameters.longest_draft > len(self.acceptance_rates) and parameters.TESTS_WHOLE_DRAFTS:  # else the law is refused
            raise checks.ParameterError(
                f"acceptance_rates must have one rate for each of {parameters.longest_draft} drafted tokens, got"
                f" {len(self.acceptance_rates)}; give more rates or draft fewer tokens"
            )
        return Outcome(round_laws.Rounds.by_draft_position(self.acceptance_rates), self.acceptance_rates[0], self.source)

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes with several lists of rates."""
        (each,) = rates.values()
        return VariedOutcomes(first, round_laws.Rounds.each(each), None, None, {"rate": each[:, 0]})


@dataclass(frozen=True)
class LevelsOfDifficulty(LawRecord):
    """Easy and hard sequences: rates by position in the draft, `acceptance_rates[i]`, in the share `weights[i]` of sequences.

    A sequence keeps its level in all its rounds. Survivors of long drafts are easier ones, so the rates over all sequences rise
    with the position in the draft relative to those of one level.
    """

    USES = ("parameters",)
    RATES = ("acceptance_rates",)
    BY_DRAFT_POSITION = True

    acceptance_rates: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        rows = self.acceptance_rates
        if len(rows) < 2:
            raise checks.ParameterError(
                f"acceptance_rates must be a list of rates for each of at least two levels, got {checks.shown(rows)};"
                " for one level use kind 'by-draft-position'"
            )
        for index, rates in enumerate(rows):
            check_rates(f"acceptance_rates[{index}]", rates, "a list of rates, one for each drafted token")
        checks.array("weights", self.weights, 0)
        check_provenance(None, self.source)
        self._law()

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of the first position in a draft, over all sequences."""
        _check_positions(parameters, len(self.acceptance_rates[0]))
        law = self._law()
        shown = ", ".join(f"{rate:.3f}" for rate in law.conditional_rates()[: max(parameters.longest_draft, 1)])
        note = f"levels: a first draft's tokens are accepted, if those before them were, at rates {shown} over all sequences"
        return Outcome(law, float(law.survival[0]), self.source, note=note)

    def _law(self) -> round_laws.MixedRounds:
        return round_laws.MixedRounds([round_laws.Rounds.by_draft_position(rates) for rates in self.acceptance_rates], self.weights)


@dataclass(frozen=True)
class AcceptanceCurve(LawRecord):
    """Acceptance by draft position, fitted to mean acceptance lengths (bonus token included) at several draft lengths.

    `draft_lengths` is 1, 2, ... if left out. The largest residual of the fit is said with the results
    (`model.engines.acceptance_curves`).
    """

    USES = ("parameters",)
    RATES = ("mean_acceptance_lengths",)
    BY_DRAFT_POSITION = True

    mean_acceptance_lengths: tuple[float, ...]
    draft_lengths: tuple[int, ...] | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_provenance(None, self.source)
        given: Any
        for name, given in (("mean_acceptance_lengths", self.mean_acceptance_lengths), ("draft_lengths", self.draft_lengths)):
            if given is not None and not (isinstance(given, Sequence) and given):
                raise checks.ParameterError(f"{name} must be a list of at least one number, got {checks.shown(given)}")
        self._fit()

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of the first position in a draft."""
        found = self._fit()
        _check_positions(parameters, len(found.survival))
        worst = int(np.argmax(abs(found.errors)))
        note = (
            "curve: rates by draft position " + ", ".join(f"{rate:.3f}" for rate in found.conditional_rates)
            + f", fitted to {found.lengths.size} mean acceptance lengths with residuals of at most"
            f" {abs(found.errors[worst]):.2%} (draft length {found.draft_lengths[worst]:g})"
        )  # fmt: skip
        law, residual = round_laws.Rounds(found.survival), {"curve_residual": float(abs(found.errors[worst]))}
        return Outcome(law, float(found.survival[0]), self.source, note=note, further_values=residual)

    def _fit(self) -> acceptance_curves.AcceptanceCurveFit:
        given = self.mean_acceptance_lengths
        lengths = tuple(range(1, len(given) + 1)) if self.draft_lengths is None else self.draft_lengths
        return _curve_fit(tuple(lengths), tuple(given))


@lru_cache(maxsize=64)
def _curve_fit(draft_lengths: tuple[int, ...], lengths: tuple[float, ...]) -> acceptance_curves.AcceptanceCurveFit:
    return acceptance_curves.fit(draft_lengths, lengths)


def _check_positions(parameters: MethodParameters, known: int) -> None:
    """Raise an error if drafts are longer than the positions whose acceptance is known."""
    if parameters.longest_draft > known and parameters.TESTS_WHOLE_DRAFTS:  # else the law is refused
        raise checks.ParameterError(
            f"draft_length must be at most {known}, the positions whose acceptance is given, got {parameters.longest_draft};"
            " give more or draft fewer tokens"
        )


@dataclass(frozen=True)
class SharedRate(LawRecord):
    """Each round has one rate for all its tokens, drawn from a Beta distribution with this mean and a + b = `concentration`.

    It raises the tokens per round; the smaller the concentration, the more.
    """

    USES = ("parameters",)
    RATES = ("acceptance_rate",)
    BY_DRAFT_POSITION = True

    acceptance_rate: float
    concentration: float
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("acceptance_rate", self.acceptance_rate, 0, 1)
        checks.number("concentration", self.concentration, 0)
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point."""
        law = round_laws.Rounds.shared_rate(self.acceptance_rate, self.concentration, parameters.longest_draft)
        return Outcome(law, self.acceptance_rate, self.source)


@dataclass(frozen=True)
class AcceptanceOfDistributions(LawRecord):
    """Each next token has the distribution `p` in the target and `q` in the draft model, independent of the tokens before it.

    The accepted length of a sampled draft follows from them, for token-wise and for block verification. A greedy draft is accepted
    if both have the same likeliest token. As each model has one distribution, this is for examples, and not for language models.
    """

    USES = ("parameters",)
    BY_DRAFT_POSITION = True

    p: tuple[float, ...]
    q: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_provenance(None, self.source)
        block_verification.survival(self.p, self.q, 0)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of the first position in a draft."""
        how = BLOCK if parameters.joint_verification else TOKEN
        longest = max(parameters.longest_draft, 1)
        if parameters.sampled:
            survival = block_verification.survival(self.p, self.q, longest, how)
        else:
            survival = np.full(longest, float(np.argmax(self.p) == np.argmax(self.q)))
        return Outcome(round_laws.Rounds(survival), float(survival[0]), self.source)


@dataclass(frozen=True)
class RecordedRounds(LawRecord):
    """Recorded rounds: for each output position, the tokens of a round whose draft starts there, with the target's token.

    They come from `lengths`, or from a `file`: a JSON list of such lists, or JSON lines with a list in `acc_DRAFTER`.`acc_len`.
    With `play` "sequences" each decoding is the beginning of a sequence, drawn with equal probability from those that are long
    enough. With `play` "log" the sequences follow one another, each to its end, where a draft is cut off; if `tokens` is the total
    of the log, the mean tokens per round are those of the log.
    """

    BY_DRAFT_POSITION = True

    lengths: tuple[tuple[int, ...], ...] | None = None
    file: str | None = None
    drafter: str | None = None
    play: str = "sequences"
    source: str = "measured"

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.file is None):
            raise checks.TableError("outcomes", ".kind 'rounds' takes either lengths or file, one of the two")
        for name in ("file", "drafter"):
            if not isinstance(getattr(self, name), str | None):
                raise checks.ParameterError(f"{name} must be a string in quotes, got {checks.shown(getattr(self, name))}")
        if self.drafter is not None and self.file is None:
            raise checks.TableError("outcomes", ".drafter names a column of a file of JSON lines; leave it out without a file")
        checks.one_of("play", self.play, PLAY_MODES)
        check_provenance(None, self.source)
        self._lengths()

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point. Its rate is accepted over tested tokens of all rounds, in drafts of the method's length."""
        records = self._lengths()
        if self.play == "log":
            return self._log(records, parameters.longest_draft, tokens)
        survivors = [[length - 1 for length in record[:tokens]] for record in records if len(record) >= tokens]
        if not survivors:
            longest = max(len(record) for record in records)
            raise checks.ParameterError(
                f"no record covers {tokens} output positions, the longest has {longest}; take fewer tokens, or play = 'log'"
            )
        rate, low, high = _rate(_frozen(records, tokens, tokens), parameters.longest_draft)
        source = f"{self.source}: {len(survivors)} of {len(records)} records"
        note = _note(records, parameters.longest_draft, tokens)
        # The rate has an interval but the law has no ends: a record has no rate parameter that could be varied.
        return Outcome(round_laws.ReplayRounds(survivors), rate, source, rate_low=low, rate_high=high, note=note)

    def _log(self, records: Sequence[Sequence[int]], longest: int, tokens: int) -> Outcome:
        """Law that plays the sequences one after another."""
        total = sum(map(len, records))
        if tokens > total:
            raise checks.ParameterError(f"tokens must be at most {total} with play = 'log', those of the log, got {tokens}")
        law = round_laws.ReplayLog([np.asarray(record) - 1 for record in records])
        note = f"rounds: {len(records)} recorded sequences, replayed one after another, each to its end"
        if longest:
            own = _played(_frozen(records), longest)[0].over_rounds
            rest = "all replayed" if tokens == total else f"of which {tokens} are replayed; set tokens = {total} to replay all"
            note += f"; mean of the log: {own:.4f} tokens per round in drafts of {longest}, over {total} tokens, {rest}"
        rate, low, high = _rate(_frozen(records), longest)
        return Outcome(law, rate, f"{self.source}: a log of {len(records)} records", rate_low=low, rate_high=high, note=note)

    def _lengths(self) -> list[list[int]]:
        records = self.lengths if self.file is None else _lengths_of(self.file, self.drafter)
        form = "lists of whole numbers of at least 1: the tokens of a round that starts at each position, with the target's token"
        if not isinstance(records, list | tuple) or not records:
            raise checks.ParameterError(f"lengths must be {form}, got {checks.shown(records)}")
        for index, record in enumerate(records):
            if not isinstance(record, list | tuple) or not record or {*map(type, record)} != {int} or min(record) < 1:
                raise checks.ParameterError(f"lengths must be {form}; lengths[{index}] is {checks.shown(record)}")
        # No decoding has more positions, so all longer rounds are equivalent.
        return [[min(length, checks.MAX_TOKENS + 1) for length in record] for record in records]


PLAY_MODES = ("sequences", "log")
Lengths = tuple[tuple[int, ...], ...]


def _frozen(records: Sequence[Sequence[int]], least: int = 1, cut: int | None = None) -> Lengths:
    """The first `cut` lengths of each record that has at least `least`."""
    return tuple(tuple(record[:cut]) for record in records if len(record) >= least)


@lru_cache(maxsize=32)
def _played(records: Lengths, longest: int) -> tuple[rates_from_logs.Means, rates_from_logs.ReplayedRounds]:
    played = rates_from_logs.replay(records, longest)
    return rates_from_logs.means(played), played


def _rate(records: Lengths, longest: int) -> tuple[float, float | None, float | None]:
    """Accepted over tested tokens of all rounds, and the bounds of its interval between sequences (None without one)."""
    accepted, tested = (np.zeros(1, dtype=np.int64),) * 2 if not longest else _played(records, longest)[1].of_requests()
    if not tested.sum():  # no tested tokens
        return float("nan"), None, None
    low, high = rates_from_logs.ratio_interval(accepted, tested)
    ends = (low, high) if low < high else (None, None)
    return float(accepted.sum() / tested.sum()), *ends


def _note(records: Sequence[Sequence[int]], longest: int, tokens: int) -> str:
    """Note on the mean tokens per round of decodings of `tokens` tokens, and why it differs from the log's mean."""
    kept = _frozen(records, tokens)
    note = f"rounds: the first {tokens} tokens of {len(kept)} of {len(records)} recorded sequences, with equal weights"
    if not longest:
        return note
    parts = _frozen(records), kept, _frozen(records, tokens, tokens)
    whole, left, first = (_played(each, longest)[0] for each in parts)
    return (
        f"{note}: {first.over_rounds:.4f} tokens per round in drafts of {longest}; the log's mean is {whole.over_rounds:.4f} over"
        f" rounds and {whole.over_sequences:.4f} over sequences; {left.over_rounds / whole.over_rounds - 1:+.1%} because shorter"
        f" sequences are left out, {first.over_rounds / left.over_rounds - 1:+.1%} because the others end after {tokens} tokens;"
        f" play = 'log' with tokens = {sum(map(len, records))} gives the log's mean"
    )


def _lengths_of(file: str, drafter: str | None) -> Any:
    text = text_of(file, "accepted lengths")
    try:
        if drafter is None:
            return bounded_files.json_of(text, strict=False)
        rows = [bounded_files.json_of(line, strict=False) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        kind = "JSON" if drafter is None else "JSON lines"
        raise checks.ParameterError(f"file {file!r} cannot be read: it is not {kind}: {error}") from None
    key = f"acc_{drafter}"
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get(key), dict) or "acc_len" not in row[key]:
            known = sorted(name.removeprefix("acc_") for name in row if name.startswith("acc_")) if isinstance(row, dict) else []
            raise checks.ParameterError(f"line {index + 1} of {file!r} has no {key}.acc_len; drafters there: {', '.join(known)}")
    return [row[key]["acc_len"] for row in rows]


@dataclass(frozen=True)
class ReportedByEngine(LawRecord):
    """Figures printed by a serving `engine` with drafts of `draft_length` tokens: a `rate`, a `length`, or both.

    They are converted to alpha, in the column acceptance_rate. A length is tokens per round, with the target's token. A rate is
    accepted over drafted tokens (`vllm`, `trtllm`, `transformers`, `llama.cpp`), for `mlx-lm` the share of tokens with from_draft,
    for `alpha` the acceptance rate itself. If both are given they must agree within the rounding of their digits, and the length is
    used. `field` names the figure if an engine has several: a rate of `sglang` is of "drafts" (from 2026-04) or "with-bonus"
    (2025-10 to 2026-04), and "before-2025-10" cannot be converted; a rate of `vllm` may be the "system-efficiency" of V0; a length
    of `trtllm` may be the "forced" one, without the target's token. `trials` is the number of tested tokens.
    """

    USES = ("parameters",)
    RATES = ("rate", "length")

    engine: str
    draft_length: int
    rate: float | None = None
    length: float | None = None
    field: str | None = None
    trials: int | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        check_provenance(self.trials, self.source)
        self._alpha()

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point: independent, with the rate for which the engine would print these figures."""
        alpha = self._alpha()
        found = independent(alpha, self.trials, f"{self.source}: converted from the output of {self.engine}")
        return replace(found, note=f"{self._words()}, drafts of {self.draft_length} -> acceptance_rate {alpha:.4f}")

    def _words(self) -> str:
        if self.engine == "alpha":
            return f"acceptance rate {self.rate}"
        reading = engine_dialects.read(self.engine, self.draft_length, rate=self.rate, length=self.length, field=self.field)
        return reading.description

    def _alpha(self) -> float:
        from model.methods.speculative.theory import reported_acceptance

        for name in ("rate", "length"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name))
        checks.whole("draft_length", self.draft_length, 1, checks.MAX_TOKENS)
        found = reported_acceptance(self.engine, self.draft_length, rate=self.rate, length=self.length, field=self.field)
        return float(found)


@dataclass(frozen=True)
class EngineLog(LawRecord):
    """The acceptance that an engine printed: `file` is the JSON of `calibrate import engine-log`.

    By draft position if the record has all positions, and the method tests whole drafts; else independent, with the rate that gives
    the record's mean acceptance length at its draft length. Drafts may not be longer than those of the record.
    """

    USES = ("parameters",)

    file: str
    source: str = "measured"

    def __post_init__(self) -> None:
        if not isinstance(self.file, str):
            raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(self.file)}")
        check_provenance(None, self.source)
        self._record()

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point, with the interval of its rate if the record has the number of drafts."""
        record, longest = self._record(), parameters.longest_draft
        name, rates = Path(self.file).name, record.known_rates
        source = f"{self.source}: {record.engine}, {name}"
        if rates and longest <= len(rates) and parameters.TESTS_WHOLE_DRAFTS:
            return self._by_position(record, rates, source)
        bound = len(rates) if record.draft_length is None else record.draft_length
        if longest > bound > 0:
            raise checks.ParameterError(f"draft_length must be at most {bound}, that of the drafts in {name}, got {longest}")
        if not record.draft_length or record.mean_acceptance_length is None:
            what = "acceptance length" if record.draft_length else "draft length, or drafts of several lengths"
            raise checks.ParameterError(
                f"file {self.file!r} has no {what}; import its log again, with --draft-length if the log does not say it"
            )
        return self._constant(record, record.draft_length, record.mean_acceptance_length, source)

    def _by_position(self, record: AcceptanceRecord, rates: tuple[float, ...], source: str) -> Outcome:
        law = round_laws.Rounds.by_draft_position(rates)
        note = f"engine-log: {_drafts_words(record)}, acceptance by draft position"
        if record.survival_low is None or record.survival_high is None:
            return Outcome(law, rates[0], source, note=note)
        ends = record.survival_low[: len(rates)], record.survival_high[: len(rates)]
        low, high = (round_laws.Rounds(each) for each in ends)
        return Outcome(law, rates[0], source, low, high, ends[0][0], ends[1][0], record.drafts, note=note)

    def _constant(self, record: AcceptanceRecord, draft_length: int, length: float, source: str) -> Outcome:
        from model.methods.speculative.theory import reported_acceptance

        # Every engine's length is 1 + a / D when it is in a record.
        alpha = float(reported_acceptance("vllm", draft_length, length=length))
        tested = None if not record.drafts or not alpha else round((length - 1) * record.drafts / alpha)
        note = f"engine-log: {_drafts_words(record)}, mean acceptance length {length:.4g} -> acceptance_rate {alpha:.4f}"
        return replace(independent(alpha, tested or None, source), note=note)

    def _record(self) -> AcceptanceRecord:
        found: AcceptanceRecord = read_once(_acceptance_record, self.file, "")
        return found


def _acceptance_record(file: str, source: str) -> AcceptanceRecord:
    from model.logs import acceptance_record

    return acceptance_record.load(file)


def _drafts_words(record: AcceptanceRecord) -> str:
    of = "drafts" if record.draft_length is None else f"drafts of {record.draft_length}"
    return f"{of} in {record.engine}" if record.drafts is None else f"{record.drafts} {of} in {record.engine}"


@dataclass(frozen=True)
class PublishedAcceptance(LawRecord):
    """A rate from the speculative-decoding slides, by `task` and by the method's parameters that are keys of the table.

    `reading` takes the printed rate as `stated`, or as accepted over `drafted` tokens, with which Table 2 agrees with the theorem
    that it quotes.
    """

    USES = ("parameters",)

    task: str
    table: str = "deck-table-2"
    reading: str = "stated"

    def __post_init__(self) -> None:
        checks.one_of("table", self.table, DECK_TABLES)
        checks.one_of("task", self.task, {str(row["task"]) for row in published.table(self.table).rows})
        checks.one_of("reading", self.reading, READINGS)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point: independent, with the speed-up that the slides print next to the rate."""
        from model.methods.speculative.theory import acceptance_from_drafted

        table = published.table(self.table)
        known = parameters.table()
        keys = {key: known[key] for key in table.keys if key in known and key not in ("task", "draft_model")}
        row = table.lookup(task=self.task, **keys)
        rate, source = row["acceptance_rate"], f"published: {table.cite(row)}"
        if self.reading == "drafted":
            rate = float(acceptance_from_drafted(rate, parameters.longest_draft))
            source += ", read as accepted over drafted"
        return Outcome(outcome_laws.Iid(rate), rate, source, published_speedup=row["speedup"])


DECK_TABLES = ("deck-table-2", "deck-adaptive", "deck-beam")
READINGS = ("stated", "drafted")


@dataclass(frozen=True)
class TwoClassConfidence(LawRecord):
    """Low confidence of a draft model: its probability for drafted tokens that are accepted, and for all others."""

    USES = ("parameters",)
    RATES = ("low_if_accepted", "low_if_rejected")

    low_if_accepted: float
    low_if_rejected: float
    source: str = "assumed"

    def __post_init__(self) -> None:
        outcome_laws.TwoClass(self.low_if_accepted, self.low_if_rejected)
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point."""
        law = outcome_laws.TwoClass(self.low_if_accepted, self.low_if_rejected)
        return Outcome(law, self.low_if_accepted, self.source, further_values={"low_if_rejected": self.low_if_rejected})


BY_POSITION: dict[str, type[LawRecord]] = {
    "iid": IndependentAcceptance, "markov": CorrelatedAcceptance, "by-position": AcceptanceByPosition, "replay": RecordedAcceptance,
}  # fmt: skip
"""Laws with one random draw per output position."""
KINDS: dict[str, type[LawRecord]] = {
    **BY_POSITION, "by-draft-position": AcceptanceByDraftPosition, "levels": LevelsOfDifficulty, "curve": AcceptanceCurve,
    "shared-rate": SharedRate, "rounds": RecordedRounds, "distributions": AcceptanceOfDistributions,
    "reported": ReportedByEngine, "engine-log": EngineLog, "published": PublishedAcceptance,
}  # fmt: skip
CONFIDENCE: dict[str, type[LawRecord]] = {"two-class": TwoClassConfidence}
"""Laws of a draft model's confidence."""
