"""Claim of `calibrate report` on drafts that read less of the context: MagicDec's printed speed-ups against a roofline's.

Nothing is fitted: peaks are published, efficiencies are those of `model.hardware.roofline`, and acceptance rates are printed by the
authors for another budget. A roofline knows no overhead of an engine's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy import optimize

from calibrate.validation.validated_claims import Claim, PredictionErrors, Target, percent
from model import published
from model.architectures.published_shapes import preset
from model.costs.pass_seconds import PassSeconds
from model.hardware import devices
from model.hardware.roofline import Roofline
from model.methods.self_speculative import theory
from model.methods.self_speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Iid
from model.published.magicdec_tables import DEVICES

TABLES = {"a100": "magicdec-table-2", "h100": "magicdec-h100"}
"""Printed speed-ups, by device."""
SHAPES = {"llama-3.1-8b": "llama-3.1-8b", "llama-2-7b-32k": "llama-2-7b"}
"""Shapes of the targets."""
TOKENS = 64
"""Generated tokens of a sequence: the default of the authors' commands (`--gen_len`)."""
BUDGET = 256
"""Budget of rows whose source does not print it: that of the others."""
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Assumed acceptance rates, the same in every row, for the order of rows without published rates."""

Row = Mapping[str, Any]


def speedup(device: str, row: Row, acceptance_rate: float) -> float:
    """Predicted speed-up of the self-drafts of a printed row, over plain decoding on the same devices [-]."""
    shape = preset(SHAPES[row["model"]])
    roofline = Roofline.on_device(shape, devices.device(device), tensor_parallel=DEVICES)
    # Each sequence of the batch is decoded from the same prompt, and all are on average half-way.
    cost = PassSeconds({"target": roofline}, prompt=row["prompt"], batch=row["sequences"], others_position=TOKENS / 2)
    given = Parameters(
        shape.layers, shape.layers, row["draft_length"], reuse=False, sequences=row["sequences"],
        context_budget=row.get("context_budget") or BUDGET,
    )  # fmt: skip
    found = theory.predict(given, TOKENS, Iid(acceptance_rate), cost)
    return float(found.plain_latency / found.latency)


def published_rate(row: Row) -> float:
    """Published acceptance rate at the context of a row, for Llama-3.1-8B with a budget of 512."""
    return float(published.table("magicdec-acceptance").lookup(prompt=row["prompt"])["acceptance_rate"])


def rows(device: str, model: str | None = None) -> list[Row]:
    """Printed rows of self-drafts, of one model or of all."""
    found = published.table(TABLES[device]).rows
    return [row for row in found if row["draft_model"] == "self" and model in (None, row["model"])]


def implied_rate(device: str, row: Row) -> float:
    """Acceptance rate at which the roofline has the printed speed-up [-]."""
    return float(optimize.brentq(lambda rate: speedup(device, row, rate) - row["speedup"], 0.01, 0.999))


def wrong_pairs(printed: Iterable[float], predicted: Iterable[float]) -> tuple[int, int]:
    """Pairs of rows in another order than printed, and all pairs of rows with different printed values.

    >>> wrong_pairs([1.2, 1.4, 1.5], [1.5, 1.9, 1.8])
    (1, 3)
    """
    pairs = [(a, b) for a, b in combinations(zip(printed, predicted, strict=True), 2) if a[0] != b[0]]
    return sum((a[0] - b[0]) * (a[1] - b[1]) <= 0 for a, b in pairs), len(pairs)


def _case(name: str, device: str, found: Sequence[Row]) -> PredictionErrors:
    """Errors of rows with published acceptance rates, and targets of their sign and order."""
    printed = np.array([row["speedup"] for row in found])
    predicted = np.array([speedup(device, row, published_rate(row)) for row in found])
    errors, (wrong, pairs) = predicted / printed - 1, wrong_pairs(printed, predicted)
    worst = found[int(np.abs(errors).argmax())]
    signs = int(((predicted > 1) != (printed > 1)).sum())
    columns = {
        "predicted": ", ".join(f"{value:.2f}" for value in predicted), "printed": ", ".join(f"{value:.2f}" for value in printed),
        "right order": f"{pairs - wrong} of {pairs} pairs",
    }  # fmt: skip
    targets = (Target("rows with the wrong sign", signs / len(found), 0.0), Target("pairs in the wrong order", wrong / pairs, 0.0))
    where = f"{worst['prompt']:,} tokens, batch {worst['sequences']}"
    return PredictionErrors(name, errors, where, targets=targets, columns=columns)


def _order_at_any_rate() -> tuple[int, int]:
    """Pairs of a larger and a smaller batch in the wrong order at one assumed rate, over `RATES`, and all such pairs."""
    wrong = total = 0
    for device in TABLES:
        groups: dict[tuple[str, int], list[Row]] = {}
        for row in rows(device):
            groups.setdefault((row["model"], row["prompt"]), []).append(row)
        for group in groups.values():
            for rate in RATES:
                off, pairs = wrong_pairs([row["speedup"] for row in group], [speedup(device, row, rate) for row in group])
                wrong, total = wrong + off, total + pairs
    return wrong, total


def claims() -> tuple[Claim, ...]:
    """Claims of this module; their tables are part of the package, so that no folder of data is read."""
    return (budgeted_drafts(),)


def budgeted_drafts() -> Claim:
    """Printed speed-ups of drafts with a context budget against those of a roofline."""
    cases = tuple(
        _case(f"Llama-3.1-8B, 8 x {device.upper()}", device, rows(device, "llama-3.1-8b")) for device in TABLES
    )
    implied = [implied_rate(device, row) for device in TABLES for row in rows(device, "llama-3.1-8b")]
    assumed = [published_rate(row) for device in TABLES for row in rows(device, "llama-3.1-8b")]
    wrong, pairs = _order_at_any_rate()
    signed = np.concatenate([case.errors for case in cases])
    return Claim(
        "Drafts that read less of the context: MagicDec's speed-ups",
        "Llama-3.1-8B drafts for itself with a budget of cached positions, split over 8 devices. Printed speed-ups are at the best "
        "draft length, which is taken from the table. Nothing is fitted: the roofline has published peaks and the efficiencies of "
        "this project, and the acceptance rates are those printed for a budget of 512 (the rows have 256, or do not say). Targets "
        "are the right sign of every row and the right order of all rows of a device.",
        f"Predictions are {percent(float(signed.min()))} to {percent(float(signed.max()))} above the printed speed-ups. Two "
        "things are missing in this direction: the rate at a smaller budget, and the engine's overhead of each pass, which is not "
        "published. With the printed speed-ups taken as given, the roofline implies acceptance rates of "
        f"{min(implied):.2f} to {max(implied):.2f} instead of {min(assumed):.2f} to {max(assumed):.2f}. For the other model and "
        "for drafts of TinyLlama no acceptance rate is published, so that their speed-ups are not predicted. But at any one rate "
        f"from {RATES[0]} to {RATES[-1]} a larger batch is predicted to be better in {pairs - wrong} of {pairs} pairs of rows of "
        "self-drafts with one context, as printed.",
        cases, "published: R. Sadhukhan et al., ICLR 2025, arXiv:2408.11049, Table 2; infini-ai-lab.github.io/MagicDec",
    )  # fmt: skip
