"""Check of the deck's printed speed-ups against the theorem that the deck quotes, at its printed acceptance rates.

By Theorem 3.8 of [Leviathan2023] a round generates 1 + a + ... + a^gamma tokens on average in the time of one target pass and
gamma draft passes, if acceptances are independent. The oracle bound 1/(1 - a + c a), c <= 1, holds for every rule of draft lengths,
and also for dependent acceptances if a is accepted over tested drafts: n rounds reject r <= n drafts, so they accept r a/(1 - a)
drafts and generate n tokens more, at most 1/(1 - a) tokens per round; and each accepted draft costs c.

Rates and cost ratios are in [-]; a speed-up is the time of plain decoding over that of the method. All numbers are computed from
the tables. Bounds, needed rates and which rows are impossible are those of `sim audit` (`model.audit`), with the cost ratio of the
deck's own times, which its tables of speed-ups do not repeat. Special to the deck are the second reading of its acceptance rates at
an assumed draft length, beams that run one after another, and the unknown time of T5-Base.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from model import published
from model.audit.claims import of_rows
from model.audit.verdicts import IMPOSSIBLE, audit
from model.base import checks
from model.published.deck_tables import DRAFT_LENGTH

READINGS = {
    "literal": "the medium model generates every token that was not accepted with a separate pass, as the deck's text says",
    "reuse": "the medium model's verifying pass already yields the token after the accepted drafts",
    "bonus": "as reuse, and the bonus token after fully accepted drafts is kept",
}
"""Three readings of the deck's hierarchical scheme, as in `model.methods.hierarchical.algorithm`."""

_HALVINGS = 60


def cost_ratio(task: str) -> float:
    """Cost ratio c: time of T5-Small over that of T5-Large, from the deck's Table 1 [-].

    >>> round(cost_ratio("ende"), 3), round(cost_ratio("cnndm"), 4)
    (0.117, 0.0555)
    """
    times = published.table("deck-table-1")
    small, large = (times.lookup(task=task, model=model)["time_s"] for model in ("t5-small", "t5-large"))
    return float(small / large)


def rows() -> list[dict[str, Any]]:
    """Rows of Table 2 and of the adaptive table with the predictions of the theory.

    source, task, draft_length: origin of the row; draft_length is None for adaptive draft lengths.
    acceptance_rate, cost_ratio, speedup: as printed; the cost ratio is from Table 1.
    theorem, excess: Theorem 3.8 at the stated rate, and printed speed-up / theorem - 1. For adaptive draft lengths the theorem is
    evaluated at the best fixed length.
    free_bound: the theorem with free drafting; for adaptive draft lengths 1/(1 - a).
    oracle_bound: 1/(1 - a + c a).
    impossible_if_free, above_oracle: true if the audit of the claim (`model.audit`) calls it impossible, without a cost ratio, or
    with it and for any rule of draft lengths; rounding of the printed numbers is granted.
    needed_rate: rate at which Theorem 3.8 (for adaptive draft lengths the oracle bound) equals the printed speed-up.
    reread_length, reread_rate, reread_speedup, reread_excess, reread_oracle: acceptance rate if the stated rate is accepted over
    drafted tokens, and the theory at that rate. The draft length is the row's or else the assumed `deck.DRAFT_LENGTH`.

    >>> row = rows()[1]
    >>> row["source"], row["speedup"], round(row["theorem"], 2), round(row["free_bound"], 3), row["impossible_if_free"]
    ('Deck Table 2, EnDe, gamma 7', 2.56, 1.21, 2.204, True)
    >>> round(row["reread_rate"], 2), round(row["reread_speedup"], 3), round(row["reread_excess"], 3)
    (0.85, 2.662, -0.038)
    """
    tables = [published.table(name) for name in ("deck-table-2", "deck-adaptive")]
    return [_row(table, row) for table in tables for row in table.rows]


def _row(table: published.PublishedTable, printed: Mapping[str, Any]) -> dict[str, Any]:
    rate, length, speedup = printed["acceptance_rate"], printed.get("draft_length"), printed["speedup"]
    c = cost_ratio(printed["task"])
    rule = "adaptive" if length is None else "speculative"
    reread_length = DRAFT_LENGTH if length is None else length
    free, fixed, any_rule = (
        _claim(method, speedup, acceptance_rate=rate, draft_length=own, cost_ratio=ratio)
        for method, own, ratio in ((rule, length, None), ("speculative", length, c), ("adaptive", None, c))
    )
    reread_rate = _reread_rate(rate, reread_length)
    reread = _claim("speculative", speedup, draft_acceptance_rate=rate, draft_length=reread_length, cost_ratio=c)
    return {
        "source": table.cite(printed),
        "task": printed["task"],
        "draft_length": length,
        "acceptance_rate": rate,
        "cost_ratio": c,
        "speedup": speedup,
        "theorem": fixed.bound_draft,
        "excess": speedup / fixed.bound_draft - 1,
        "free_bound": free.bound_free,
        "oracle_bound": any_rule.bound_draft,
        "impossible_if_free": free.kind == IMPOSSIBLE,
        "above_oracle": any_rule.kind == IMPOSSIBLE,
        "needed_rate": (any_rule if length is None else fixed).needed_acceptance,
        "reread_length": reread_length,
        "reread_rate": reread_rate,
        "reread_speedup": reread.bound_draft,
        "reread_excess": speedup / reread.bound_draft - 1,
        "reread_oracle": _claim("adaptive", speedup, acceptance_rate=reread_rate, cost_ratio=c).bound_draft,
    }


def _claim(method: str, speedup: float, **terms: float | None) -> Any:
    """Verdict on a printed speed-up with these terms, without those that are None."""
    stated = {name: value for name, value in terms.items() if value is not None}
    [found] = audit(of_rows([{"method": method, "speedup": speedup, **stated}]))
    return found


def _reread_rate(rate: float, length: int) -> float:
    """Rate of accepted over tested tokens, if the printed one is over drafted tokens [-]."""
    from model.methods.speculative import theory as speculative

    return float(speculative.acceptance_from_drafted(rate, length))


def beam_rows() -> list[dict[str, Any]]:
    """Rows of the beam table with predictions for beams that run one after another: Theorem 3.8 over the number of beams.

    The draft length is assumed to be `deck.DRAFT_LENGTH`. `gain` is the printed speed-up relative to 1/beams, the speed-up of as
    many greedy decodings.

    >>> for row in beam_rows():
    ...     print(row["beams"], row["speedup"], *(round(row[name], 3) for name in ("theorem", "reread_speedup", "gain")))
    3 0.79 0.717 0.831 2.37
    5 0.45 0.404 0.481 2.25
    """
    return [_beam_row(row) for row in published.table("deck-beam").rows]


def _beam_row(printed: Mapping[str, Any]) -> dict[str, Any]:
    rate, beams, speedup = (printed[name] for name in ("acceptance_rate", "beams", "speedup"))
    by_reading = (
        _claim("speculative", speedup, **{name: rate}, draft_length=DRAFT_LENGTH, cost_ratio=cost_ratio(printed["task"]))
        for name in ("acceptance_rate", "draft_acceptance_rate")
    )
    theorem, reread = (found.bound_draft / beams for found in by_reading)
    return {"beams": beams, "speedup": speedup, "theorem": theorem, "reread_speedup": reread, "gain": speedup * beams}


@cache
def medium_cost_window(reading: str = "literal") -> tuple[float, float]:
    """Range of times of T5-Base, relative to T5-Large, for which both speed-ups of the hierarchy table with T5-Base are possible.

    Above this range T5-Large would have to accept more than all drafts; below, T5-Base would. The draft length is assumed to be
    `deck.DRAFT_LENGTH`.

    >>> for reading in READINGS:
    ...     print(reading, *(round(end, 3) for end in medium_cost_window(reading)))
    literal 0.437 0.847
    reuse 0.437 0.847
    bonus 0.35 0.847
    """
    checks.one_of("reading", reading, READINGS)
    pair, hierarchy = _hierarchy()
    top = ((DRAFT_LENGTH + 1) / pair - 1) / DRAFT_LENGTH
    return _solve(lambda cost: _hierarchical(1.0, _large_rate(cost), cost, reading), hierarchy, 0.0, top), top


def hierarchy_rates(medium_cost: float, reading: str = "literal") -> tuple[float, float]:
    """Acceptance rates (T5-Base by T5-Large, T5-Small by T5-Base) that give the speed-ups of the hierarchy table.

    `medium_cost` is the time of T5-Base relative to T5-Large, within `medium_cost_window`.

    >>> large, small = hierarchy_rates(0.5)
    >>> round(large, 3), round(small, 3)
    (0.771, 0.972)
    """
    low, top = medium_cost_window(reading)
    checks.number("medium_cost", medium_cost, low, top)
    large = _large_rate(medium_cost)
    return large, _solve(lambda small: _hierarchical(small, large, medium_cost, reading), _hierarchy()[1])


def _hierarchy() -> tuple[float, float]:
    table = published.table("deck-hierarchy")
    pair, hierarchy = (table.lookup(combination=name)["speedup"] for name in ("large+base", "hierarchy"))
    return pair, hierarchy


def _large_rate(medium_cost: float) -> float:
    from model.methods.speculative import theory as speculative

    return _solve(lambda rate: float(speculative.speedup(rate, DRAFT_LENGTH, medium_cost)), _hierarchy()[0])


def _hierarchical(small_rate: float, large_rate: float, medium_cost: float, reading: str) -> float:
    """Speed-up with three models; `small_rate` is the acceptance of T5-Small by T5-Base, `large_rate` of T5-Base by T5-Large."""
    from model.methods.hierarchical import theory

    return float(theory.speedup(large_rate, small_rate, DRAFT_LENGTH, cost_ratio("ende"), medium_cost, reading=reading))


def run_sentences(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report in sentences if the values `published_speedup` of these points include all of Table 2, else none."""
    found = rows()
    printed = {row["speedup"] for row in found if row["draft_length"] is not None}
    return sentences(found) if printed <= {point["published_speedup"] for point in points} else []


def sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report in sentences about these rows (from `rows`) and the beam and hierarchy tables.

    >>> print(sentences(rows())[0])
    3 of 4 rows of Table 2 are impossible at their stated acceptance rate even if drafting were free.
    """
    fixed = [row for row in rows if row["draft_length"] is not None]
    adaptive = [row for row in rows if row["draft_length"] is None]
    return [*(_fixed_sentences(fixed) if fixed else ()), *(_adaptive_sentences(adaptive) if adaptive else ()),
            _beam_sentence(beam_rows()), _hierarchy_sentence()]  # fmt: skip


def _fixed_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    impossible = sum(row["impossible_if_free"] for row in rows)
    least, most = (end(row["excess"] for row in rows) for end in (min, max))
    off = max(abs(row["reread_excess"]) for row in rows)
    return [
        f"{impossible} of {len(rows)} rows of Table 2 are impossible at their stated acceptance rate even if drafting were free.",
        f"With the deck's own times the printed speed-ups exceed Theorem 3.8 by {100 * least:.0f} % to {100 * most:.0f} %"
        f" ({_list('{speedup} against {theorem:.2f}', rows)}); they need acceptance rates of {_list('{needed_rate:.3f}', rows)}.",
        f"Read as accepted over drafted tokens the stated {_list('{acceptance_rate}', rows)} mean acceptance rates of"
        f" {_list('{reread_rate:.3f}', rows)}, and all {len(rows)} rows agree with Theorem 3.8 within {math.ceil(100 * off)} %.",
    ]


def _adaptive_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    above = sum(row["above_oracle"] for row in rows)
    still = sum(row["speedup"] > row["reread_oracle"] for row in rows)
    return [
        f"{above} of {len(rows)} adaptive rows lie above what any rule of draft lengths can reach at the stated rate"
        f" ({_list('{speedup} against {oracle_bound:.2f}', rows)}), and {sum(row['impossible_if_free'] for row in rows)} even if"
        " drafting were free.",
        f"Read as accepted over drafted tokens, with drafts of {rows[0]['reread_length']} assumed, the bounds are"
        f" {_list('{reread_oracle:.2f}', rows)}, and {still or 'none'} of the rows lie above.",
    ]


def _beam_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    return (
        f"Beam search is slower than plain decoding, {_list('{speedup} with {beams} beams', rows)}; beams one after another with"
        f" drafts of {DRAFT_LENGTH}, assumed, give {_list('{theorem:.3f}', rows)}, and {_list('{reread_speedup:.3f}', rows)} with"
        f" the rate read as accepted over drafted. Relative to as many greedy decodings the gain is {_list('{gain:.2f}', rows)}."
    )


def _hierarchy_sentence() -> str:
    pair, hierarchy = _hierarchy()
    simple = published.table("deck-hierarchy").lookup(combination="large+small")["speedup"]
    low, top = medium_cost_window()
    return (
        f"Three models give {hierarchy}, less than the {simple} of two; {pair} and {hierarchy} are both possible only if T5-Base"
        f" takes between {low:.3f} and {top:.3f} of T5-Large's time (drafts of {DRAFT_LENGTH}, assumed)."
    )


def _list(form: str, rows: Sequence[Mapping[str, Any]]) -> str:
    parts = [form.format(**row) for row in rows]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _solve(function: Callable[[float], float], target: float, low: float = 0.0, high: float = 1.0) -> float:
    """Solve function(x) = target for an increasing function by bisection of [low, high]."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2

