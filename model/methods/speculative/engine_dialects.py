"""Acceptance figures that serving engines print, converted to accepted tokens per round.

Of D rounds with K drafted tokens each, a tokens are accepted: a / D per round, and a mean acceptance length of 1 + a / D with the
target's own (bonus) token. Engines print this length or a rate, and use one name for different figures;
`model.methods.speculative.theory.reported_acceptance` converts them to the acceptance rate. The definitions are those of the
engines' source code and pull requests; SGLang's changed in #11572 and #23530.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.base.checks import ParameterError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PrintedFigure:
    """A printed figure: its name in the log, its meaning, and the conversion from and to accepted tokens per round."""

    name: str
    meaning: str
    printed: Callable[[Floats, Floats], Floats] | None
    """Figure from accepted tokens per round and draft length; None if it cannot be converted."""
    accepted: Callable[[Floats, Floats], Floats] | None
    """Accepted tokens per round from the figure and the draft length."""
    over_drafted: bool = False
    """True if it is a share of the tokens that were actually drafted."""


@dataclass(frozen=True)
class Dialect:
    """Rates and lengths that an engine prints, by the names that `field` takes; the first is the default."""

    rates: Mapping[str, PrintedFigure]
    lengths: Mapping[str, PrintedFigure]
    ambiguous: tuple[str, ...] = ()
    """Values ("rate", "length") that have no default and need a `field`."""
    shorter_drafts: bool = False
    """True if drafts may be shorter than K and the rate is over the tokens actually drafted: it then only bounds the length."""


def _of_drafted(name: str, meaning: str = "accepted over drafted tokens, a / (D K)") -> PrintedFigure:
    return PrintedFigure(name, meaning, lambda accepted, length: accepted / length, lambda rate, length: rate * length, True)


def _with_bonus(name: str, meaning: str = "1 + a / D, the bonus token counted") -> PrintedFigure:
    return PrintedFigure(name, meaning, lambda accepted, _: accepted + 1, lambda printed, _: printed - 1)


def _of_emitted(name: str, meaning: str) -> PrintedFigure:
    return PrintedFigure(
        name, meaning, lambda accepted, length: (accepted + 1) / (length + 1), lambda rate, length: rate * (length + 1) - 1
    )


_SHARE = PrintedFigure(
    "share of tokens with from_draft", "a / (a + D)",
    lambda accepted, _: accepted / (accepted + 1), lambda share, _: share / (1 - share),
)  # fmt: skip
_FORCED = PrintedFigure(
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "a / D, the bonus token not counted",
    lambda accepted, _: accepted, lambda each, _: each,
)  # fmt: skip
_SINCE_2026 = "from 2026-04, and spec_accept_rate of a request: accepted over drafted tokens, a / (D K)"
DIALECTS: dict[str, Dialect] = {
    "vllm": Dialect(
        {
            "draft-acceptance-rate": _of_drafted("draft acceptance rate"),
            "system-efficiency": _of_emitted("System efficiency", "of V0: emitted tokens over D (K + 1)"),
        },
        {"mean-acceptance-length": _with_bonus("mean acceptance length")},
    ),
    "sglang": Dialect(
        {
            "drafts": _of_drafted("accept rate", _SINCE_2026),
            "with-bonus": _of_emitted("accept rate", "2025-10 to 2026-04: with bonus tokens, (a + D) / (D (K + 1))"),
            "before-2025-10": PrintedFigure("accept rate", "may be above 1 and cannot be converted", None, None),
        },
        {"accept-len": _with_bonus("accept len")},
        ambiguous=("rate",),
    ),
    "trtllm": Dialect(
        {"draft-acceptance-rate": _of_drafted("draft acceptance rate")},
        {"acceptance-length": _with_bonus("acceptance length"), "forced": _FORCED},
    ),
    "transformers": Dialect({"rate": _of_drafted("acceptance rate")}, {"length": _with_bonus("tokens of a streamed chunk")}),
    "llama.cpp": Dialect(
        {"draft-acceptance": _of_drafted("draft acceptance")}, {"mean-acceptance-length": _with_bonus("mean acceptance length")},
        shorter_drafts=True,
    ),
    "mlx-lm": Dialect({"from-draft": _SHARE}, {}),
}  # fmt: skip
ALIASES = {"mlx": "mlx-lm", "llama-cpp": "llama.cpp", "tensorrt-llm": "trtllm"}


@dataclass(frozen=True)
class Reading:
    """Accepted tokens per round from printed figures, and a description of the figures."""

    accepted: Floats
    description: str


def read(engine: str, draft_length: ArrayLike, *, rate: ArrayLike | None, length: ArrayLike | None, field: str | None) -> Reading:
    """Convert a printed rate, a printed length, or both, if they agree within rounding, to accepted tokens per round.

    With both, the length is used: it is also right if some drafts were shorter than `draft_length`.

    >>> read("sglang", 3, rate=0.49, length=1.95, field="with-bonus")  # as printed on 2025-10-22
    Reading(accepted=array(0.95), description='sglang accept rate 0.49 (with-bonus) and accept len 1.95')
    """
    dialect = DIALECTS[ALIASES.get(engine, engine)]
    gamma = checks.whole_array("draft_length", draft_length, 1)
    given = {name: value for name, value in (("rate", rate), ("length", length)) if value is not None}
    if not given:
        raise ParameterError("rate or length must be given, or both, got none")
    named = {name for each in (dialect.rates, dialect.lengths) for name in each}
    if field is not None and field not in named:
        raise checks.unknown(f"field of {engine}", field, named)
    figures = {name: _figure(engine, dialect, name, field, other=len(given) == 2) for name in given}
    if field is not None and field not in {key for key, _ in figures.values()}:
        of = "rate" if field in dialect.rates else "length"
        raise ParameterError(f"field {field!r} is a {of} of {engine}; give the {of}, or leave field out")
    values = {name: _within(name, value, figures[name][1], gamma) for name, value in given.items()}
    spans = {name: _span(name, each, figures[name][1], gamma) for name, each in values.items()}
    if len(given) == 2:
        _check_agreement(engine, dialect, figures, values, spans, gamma)
    said = (f"{figures[name][1].name} {checks.shown(given[name])}" + (f" ({key})" if key == field else "")
            for name, (key, _) in figures.items())  # fmt: skip
    return Reading(spans["length" if length is not None else "rate"][1], f"{engine} {' and '.join(said)}")


def _figure(engine: str, dialect: Dialect, name: str, field: str | None, *, other: bool) -> tuple[str, PrintedFigure]:
    """Key and definition of the printed rate or length."""
    known = dialect.rates if name == "rate" else dialect.lengths
    if not known:
        raise ParameterError(f"{name} must be left out for engine {engine!r}, which prints none; give its rate")
    if field not in known and name in dialect.ambiguous:
        means = "; ".join(f"{key!r}, {figure.meaning}" for key, figure in known.items())
        raise ParameterError(
            f"field is required with a {name} of {engine}, whose meaning changed; it is one of {means}; set field, or give the"
            f" length{' alone' if other else ''}"
        )
    key = field if field in known else next(iter(known))
    figure = known[str(key)]
    if figure.accepted is None:
        raise ParameterError(f"{name} of {engine} as of {key!r} {figure.meaning}; give the length{' alone' if other else ''}")
    return str(key), figure


def _within(name: str, value: ArrayLike, figure: PrintedFigure, gamma: Floats) -> Floats:
    """Clip the figure to its possible range; raise ParameterError if it is outside by more than its rounding."""
    assert figure.printed is not None
    given = checks.array(name, value)
    low, high = figure.printed(0 * gamma, gamma), figure.printed(gamma, gamma)
    slack = _rounding(name, given)
    wrong = (given < low - slack) | (given > high + slack)
    if np.any(wrong):
        first = tuple(np.argwhere(wrong)[0])
        least, most, got = (np.broadcast_to(each, wrong.shape)[first] for each in (low, high, given))
        raise ParameterError(f"{name} must be between {least:g} and {most:g}, got {got:g}: {figure.name} is {figure.meaning}")
    return np.asarray(np.clip(given, low, high))


def _span(name: str, value: Floats, figure: PrintedFigure, gamma: Floats) -> tuple[Floats, Floats, Floats]:
    """Accepted tokens per round at the lower end of the figure's rounding, at its value, and at the upper end."""
    assert figure.accepted is not None
    assert figure.printed is not None
    slack, least, most = _rounding(name, value), figure.printed(0 * gamma, gamma), figure.printed(gamma, gamma)
    low, high = (np.clip(end, least, most) for end in (value - slack, value + slack))
    return figure.accepted(low, gamma), np.asarray(figure.accepted(value, gamma)), figure.accepted(high, gamma)


def _rounding(name: str, values: Floats) -> Floats:
    """Half a unit of the last decimal; at least two decimals for a rate (printed in per cent) and one for a length."""
    fewest = 2 if name == "rate" else 1

    def half(value: float) -> float:
        exponent = Decimal(repr(float(value))).as_tuple().exponent
        return float(0.5 * 10.0 ** -max(-int(exponent), fewest))

    return np.asarray(np.vectorize(half, otypes=[np.float64])(values) + 1e-12)


def _check_agreement(
    engine: str, dialect: Dialect, figures: Mapping[str, tuple[str, PrintedFigure]], values: Mapping[str, Floats],
    spans: Mapping[str, tuple[Floats, Floats, Floats]], gamma: Floats,
) -> None:  # fmt: skip
    """Raise ParameterError if a rate and a length contradict each other at this draft length."""
    (least, by_rate, most), (low, by_length, high) = spans["rate"], spans["length"]
    # Drafts that end early lower the length at the same rate; by more than half a token on average, draft_length is wrong.
    floor = least * (gamma - 0.5) / gamma if dialect.shorter_drafts else least
    wrong = (high < floor) | (low > most)
    if not np.any(wrong):
        return
    first = tuple(np.argwhere(wrong)[0])

    def at(each: ArrayLike) -> float:
        return float(np.broadcast_to(np.asarray(each), wrong.shape)[first])

    rate, length = (figures[name][1] for name in ("rate", "length"))
    assert rate.printed is not None
    assert length.printed is not None
    implied = at(length.printed(by_rate, gamma)), at(rate.printed(by_length, gamma))
    slack = (at(most) - at(least) + at(high) - at(low)) / 2
    drafted = at(by_length) / at(values["rate"]) if at(values["rate"]) else float("nan")
    shorter = ""
    if rate.over_drafted and drafted < at(gamma):
        shorter = f"; drafts of {drafted:.3g} tokens on average would print both"
    raise ParameterError(
        f"rate={at(values['rate']):g} and length={at(values['length']):g} of {engine} do not agree at draft_length="
        f"{at(gamma):g}: that rate means a length of {implied[0]:.4g}, that length a rate of {implied[1]:.4g}, and rounding"
        f" explains {slack:.2g} of length at most{shorter}; check draft_length, or give the length alone"
    )
