"""Inputs of an explanation: times, acceptance, step law and claim, from options, records and files, each with its source."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import engine_priors, step_law
from model.engines.step_law import StepLaw
from model.logs.acceptance_record import AcceptanceRecord
from model.speedups import claim_shares, explanation
from model.speedups.claim_shares import Setting
from model.speedups.explanation import MeasuredSpeedup

CLOSE = 0.02
"""Relative difference of acceptance lengths below which rates by position are those of a mean acceptance length."""
SAME_BATCH = 1.1
"""Factor within which the batch of a measured cell counts as the one asked for."""
CLAIM_KEYS = (
    "speedup", "acceptance", "acceptance_length", "draft_length", "model", "gpu", "tensor_parallel", "dtype", "draft",
    "draft_passes", "engine", "batch", "context",
)  # fmt: skip
NO_ACCEPTANCE = (
    "acceptance is never assumed: give a record of `calibrate import engine-log`, or --mean-acceptance-length, or --acceptance-rate"
)


@dataclass(frozen=True)
class Input:
    """An input, its value as text, its source, and its kind (measured, published, assumed or prior)."""

    input: str
    value: str
    source: str
    kind: str


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number between bounds."""
    checks.number(name, value, low, high)
    return float(value)


def draft_length_of(record: AcceptanceRecord | None, asked: int | None) -> int:
    known = None if record is None else record.draft_length
    if asked is not None:
        checks.whole("draft_length", asked, 1, cell_tables.MOST_DRAFT)
    if known is not None and asked is not None and known != asked:
        raise ParameterError(f"--draft-length must be {known}, that of the log, got {asked}; leave it out, or give that run's log")
    if known == 0:
        raise ParameterError("the log is of plain decoding (draft_length 0); give the log of the run with drafts")
    found = asked if known is None else known
    if found is None:
        raise ParameterError("the draft length is not known: give --draft-length, the drafted tokens per step")
    return found


def acceptance_of(
    record: AcceptanceRecord | None, length: int, mean: float | None, rate: float | None
) -> tuple[float, tuple[float, ...], Input]:
    """Acceptance length, conditional rates by draft position, and the input that gives them."""
    given = [value for value in (record, mean, rate) if value is not None]
    if not given:
        raise ParameterError(NO_ACCEPTANCE)
    if len(given) > 1:
        raise ParameterError(
            "acceptance must be given once: a record, --mean-acceptance-length or --acceptance-rate; leave others out"
        )
    if rate is not None:
        checks.number("acceptance_rate", rate, 0, 1)
        value = explanation.acceptance_length((rate,), length)
        return value, (rate,), Input("acceptance rate", f"{rate:g}", "given", "measured")
    if mean is not None:
        explanation.check_length(mean, length)
        value = min(float(mean), length + 1.0)
        alpha = explanation.constant_rate(value, length)
        return value, (alpha,), Input("acceptance length", f"{value:.4g}", "given", "measured")
    assert record is not None
    if record.mean_acceptance_length is None:
        raise ParameterError("the record has no acceptance length; give --mean-acceptance-length instead")
    explanation.check_length(record.mean_acceptance_length, length)
    value = min(record.mean_acceptance_length, length + 1.0)
    named = ", ".join(source.file for source in record.sources[:3]) or "record"
    rates = record.known_rates[:length]
    if not rates or abs(explanation.acceptance_length(rates, length) / value - 1) > CLOSE:
        rates = (explanation.constant_rate(value, length),)
    return value, rates, Input("acceptance length", f"{value:.4g}", f"{record.engine} log {named}", "measured")


def rates_of_length(rates: tuple[float, ...], mean: float, length: int) -> tuple[float, ...]:
    """Rates by position, or the constant rate of exactly this length where they give a little more or less."""
    same = math.isclose(explanation.acceptance_length(rates, length), mean, rel_tol=1e-6)
    return rates if same else (explanation.constant_rate(mean, length),)


def waiting_of(length: int, rates: tuple[float, ...], sequences: float, tokens: int) -> float:
    checks.whole("static_tokens", tokens, 1, checks.MAX_TOKENS)
    if sequences != int(sequences) or sequences < 2:
        raise ParameterError(f"--batch must be a whole number of at least 2 with --static-tokens, got {sequences:g}; set it")
    rate = explanation.constant_rate(explanation.acceptance_length(rates, length), length)
    return explanation.waiting_share(length, rate, int(sequences), tokens)


def seconds_of(option: str, value: float | str | None, record: AcceptanceRecord | None, length: int, batch: float) -> float:
    """Seconds per output token: as given, or of the record's cells of this draft length and batch."""
    if value is not None:
        return milliseconds(option, value) / 1e3
    found = []
    for cell in () if record is None else record.cells:
        near = SAME_BATCH ** -1 <= cell.sequences / batch <= SAME_BATCH
        accepted = 1.0 if not length else cell.mean_acceptance_length
        if cell.draft_length == length and near and accepted is not None:
            unit = next(name for name in cell_tables.UNITS if getattr(cell, name) is not None)
            seconds = cell_tables.from_unit(unit, getattr(cell, unit), cell.sequences, accepted)
            found.append(float(seconds) / accepted)
    if not found:
        which = "plain decoding" if not length else f"draft length {length}"
        also = "" if record is None or not record.cells else f"; the record has no cell of {which} at batch {batch:g}"
        raise ParameterError(f"the time per output token of {which} is not known: give --{option}, such as --{option} 7.5ms{also}")
    return float(np.median(found))


def milliseconds(option: str, value: float | str) -> float:
    """Milliseconds of a number [ms], or of a text with a unit.

    >>> milliseconds("tpot", "7.5ms"), milliseconds("tpot", "0.0075 s"), milliseconds("tpot", 7.5)
    (7.5, 7.5, 7.5)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(us|ms|s)?\s*", value)
        try:
            number = float(match[1]) if match else math.nan
        except ValueError:
            number = math.nan
        if not match or not math.isfinite(number):
            raise ParameterError(f"--{option} must be a time, such as 7.5ms, got {checks.shown(value)}")
        value = number * {"us": 1e-3, "ms": 1.0, "s": 1e3, None: 1.0}[match[2]]
    checks.number(option, value, 1e-6, 1e9)
    return float(value)


def law_of(
    name: str | Path | None, setting: Setting | None, measured: MeasuredSpeedup, given: Mapping[str, Any], seed: int
) -> tuple[StepLaw, bool]:
    """Step law, and whether it is fitted to the measured runs: the law named, or kernels and priors with these runs.

    `given` has the options that describe model, GPU and engine, with None for those that were not given. A law without cells gives
    kernels and priors.
    """
    if name is None:
        if setting is None:
            missing = " and ".join(f"--{option}" for option in ("model", "gpu") if given[option] is None)
            raise ParameterError(f"what a step takes follows from the model and its GPU: give {missing}, or --engine-law")
        return explanation.fitted(measured, setting.kernels, setting.engine, seed), True
    law = step_law.load(name)
    for option, value in given.items():
        own = law.engine if option == "engine" else None if law.kernels is None else getattr(law.kernels, option)
        if value is not None and own is not None and own != value:
            raise ParameterError(
                f"--{option.replace('_', '-')} must be {own}, that of law {law.name}, got {value}; leave it out or take another law"
            )
    if law.cells is None and law.kernels is not None:
        return explanation.fitted(measured, law.kernels, law.engine or engine_priors.ANY, seed), True
    return law, False


def claimed(claim: str | Mapping[str, Any], mine: Setting) -> tuple[Setting, float, list[str]]:
    """Setting and speed-up of a claim, and the keys that it does not have."""
    said = _parsed(claim) if isinstance(claim, str) else dict(claim)
    for key in said:
        if key not in CLAIM_KEYS:
            raise ParameterError(f"unknown key {checks.shown(key)} of --claim; {checks.nearest(key, CLAIM_KEYS)}")
    if "speedup" not in said:
        raise ParameterError("--claim must have speedup, such as --claim speedup=4.4,acceptance=0.85,draft_length=7")
    given = [name for name in ("acceptance", "acceptance_length") if name in said]
    if len(given) != 1:
        got = "neither" if not given else "both"
        raise ParameterError(f"--claim must have acceptance (a rate) or acceptance_length, got {got}: acceptance is never assumed")
    speedup, length = said["speedup"], said.get("draft_length", mine.draft_length)
    checks.whole("claim draft_length", length, 1, cell_tables.MOST_DRAFT)
    explanation.check_speedup(speedup, length, "claim speedup")
    if given[0] == "acceptance":
        checks.number("claim acceptance", said["acceptance"], 0, 1)
        rate = float(said["acceptance"])
    else:
        rate = explanation.constant_rate(said["acceptance_length"], length)
    names = {name: said[name] for name in claim_shares.setting_names() if name in said and name != "acceptance"}
    for name in ("model", "gpu", "dtype", "draft", "engine"):
        if name in names and names[name] is not None and not isinstance(names[name], str):
            raise ParameterError(f"claim {name} must be a name, got {checks.shown(names[name])}")
    if "engine" in names:
        names["engine"] = engine_priors.named(names["engine"]) or names["engine"]
    numbers = {name: float(names[name]) for name in ("batch", "context") if isinstance(names.get(name), int | float)}
    whole = replace(mine, **{**names, **numbers, "draft_length": length, "acceptance": (rate,)})
    missing = [name for name in claim_shares.setting_names() if name not in said and name != "acceptance" and _matters(name, mine)]
    return whole, float(speedup), missing


def _matters(name: str, mine: Setting) -> bool:
    return name not in ("dtype", "draft_passes", "draft", "tensor_parallel") or getattr(mine, name) not in (None, 1)


def _parsed(claim: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in claim.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if not sign or not key or not value:
            raise ParameterError(f"--claim must be KEY=VALUE,KEY=VALUE, got {checks.shown(part)}; keys: {', '.join(CLAIM_KEYS)}")
        if key in found:
            raise ParameterError(f"--claim has {key} twice; give it once")
        found[key] = _value(value)
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
