"""Check of SkipDecode's Tables 2, 4 and 5 against its schedule (Section 2.3), row by row.

The schedule determines the layers of the token at each position, so that the mean layers of Table 4 imply the number of generated
tokens. Responses of the same model to the same prompts should be about equally long at each target. The schedule has fractional
values and layers are whole numbers, but the paper does not say how it rounds, nor after which prompt the decay starts: on E2E 60
tokens (the longest) or 38 (the median). Responses of several lengths are treated as one of their mean length, which is exact for
the mean over responses of a schedule that is not rounded.

Layers are means over generated tokens; a speed-up is a ratio of layers, as in the paper, which gives no times. All numbers are
computed from the tables. That labels such as 2x exceed the layers that were saved is found by `sim audit` from the rows of Table 4
(`model.published.table_claims`); here is what no claim of a speed-up contains: the response lengths that the layers imply, and the
tables' differences from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model import published
from model.base import checks
from model.methods.skipdecode import theory as skipdecode
from model.published.skipdecode_tables import LENGTHS, MEDIAN_PROMPTS

COMPARED = ("half-up", "half-even")
"""The two usual ways to round halves; always rounding down or always up explains no family of rows."""
SETTING = ("layers", "min_layers", "max_layers", "warm_up", "prompt", "sequence_length", "power")
"""Settings of a run that Table 2 and the lengths of a data set determine."""
_NAMES = {"opt-1.3b": "OPT-1.3B", "opt-6.7b": "OPT-6.7B", "e2e": "E2E", "reddit": "Reddit", "cnn_dm": "CNN/DailyMail"}


def schedule_rows() -> list[dict[str, Any]]:
    """Rows of Table 2 with derived values.

    middle: (min + max) / 2, the mean layers over a whole budget of tokens; centred: true if it equals the target.
    ratio: layers of the model over the target; labelled: true if it equals the row's label.
    counted, counted_target: number of layers and target that Table 4 uses for this label.

    >>> for row in schedule_rows()[:2]:
    ...     print(row["middle"], row["target_layers"], round(row["ratio"], 2), row["counted"], row["counted_target"])
    16.5 16.0 2.0 30.0 15.0
    11.0 11.0 2.91 30.0 11.0
    """
    return [_schedule_row(row) for row in published.table("skipdecode-table-2").rows]


def _schedule_row(printed: Mapping[str, Any]) -> dict[str, Any]:
    middle = (printed["min_layers"] + printed["max_layers"]) / 2
    ratio = printed["layers"] / printed["target_layers"]
    label, target = printed["target_speedup"], printed["target_layers"]
    base = _printed("e2e", printed["model"], 1)["mean_layers"]
    counted = _printed("e2e", printed["model"], label)["target_layers"]
    return {
        **printed, "source": published.table("skipdecode-table-2").cite(printed), "middle": middle, "centred": middle == target,
        "ratio": ratio, "labelled": ratio == label, "counted": base, "counted_target": counted,
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Rows of Table 4 that skip layers, with derived values.

    base_layers: number of layers that the table counts from; layers: those of the model.
    ratio: base over target layers, the meaning of the label; realised: base over mean layers, the actual reduction.
    lengths: by kind of rounding, the shortest and the longest response whose mean layers are the printed ones, if the decay starts
    after the longest prompt. Lengths in between fit too.
    most: the longest possible response; at_limit: true if it fits, with halves rounded up.
    rouge_l, lost: ROUGE-L as printed, and its loss.

    >>> row = rows()[0]
    >>> row["source"], row["mean_layers"], row["ratio"], round(row["realised"], 2), row["lengths"]["half-up"]
    ('SkipDecode Table 4, e2e, OPT-1.3B, 2x', 14.7, 2.0, 1.63, (34, 35))
    >>> [row["source"] for row in rows() if row["at_limit"]]
    ['SkipDecode Table 4, reddit, OPT-1.3B, 5x', 'SkipDecode Table 4, reddit, OPT-6.7B, 5x']
    """
    return [_row(row) for row in published.table("skipdecode-table-4").rows if row["target_speedup"] != 1]


def _row(printed: Mapping[str, Any]) -> dict[str, Any]:
    data_set, model, label = (printed[name] for name in ("data_set", "model", "target_speedup"))
    bounds = published.table("skipdecode-table-2").lookup(model=model, target_speedup=label)
    base = _printed(data_set, model, 1)
    prompt, sequence_length = LENGTHS[data_set]
    fitting = {rounding: _lengths(printed, rounding, prompt) for rounding in COMPARED}
    most = sequence_length - prompt
    at_limit = most in fitting["half-up"]
    return {
        **printed, "source": published.table("skipdecode-table-4").cite(printed), "layers": bounds["layers"],
        "base_layers": base["mean_layers"], "ratio": base["mean_layers"] / printed["target_layers"],
        "realised": base["mean_layers"] / printed["mean_layers"],
        "lengths": {rounding: _ends(lengths) for rounding, lengths in fitting.items()},
        "most": most, "at_limit": at_limit, "lost": base["rouge_l"] - printed["rouge_l"],
    }  # fmt: skip


def common_lengths(data_set: str, model: str, rounding: str = "half-up", prompt: int | None = None) -> tuple[int, ...]:
    """Response lengths that explain all four rows of a model on a data set; empty if no common length does.

    The decay starts after `prompt` tokens, by default after the longest prompt.

    >>> [common_lengths("e2e", "opt-1.3b", rounding) for rounding in COMPARED], common_lengths("e2e", "opt-6.7b")
    ([(34,), ()], ())
    >>> [common_lengths("e2e", "opt-1.3b", rounding, prompt=38) for rounding in COMPARED]
    [(40, 41), (40, 41)]
    """
    checks.one_of("data_set", data_set, LENGTHS)
    checks.one_of("rounding", rounding, skipdecode.ROUNDINGS)
    table = published.table("skipdecode-table-4")
    checks.one_of("model", model, dict.fromkeys(row["model"] for row in table.rows))
    start = LENGTHS[data_set][0] if prompt is None else prompt
    family = [row for row in table.rows if (row["data_set"], row["model"]) == (data_set, model) and row["target_speedup"] != 1]
    return tuple(sorted(set.intersection(*(set(_lengths(row, rounding, start)) for row in family))))


def _lengths(printed: Mapping[str, Any], rounding: str, prompt: int) -> tuple[int, ...]:
    bounds = published.table("skipdecode-table-2").lookup(model=printed["model"], target_speedup=printed["target_speedup"])
    sequence_length = LENGTHS[printed["data_set"]][1]
    return skipdecode.generated_of_mean(
        printed["mean_layers"], bounds["min_layers"], bounds["max_layers"], prompt, sequence_length, rounding=rounding
    )


def _printed(data_set: str, model: str, label: int) -> dict[str, Any]:
    return published.table("skipdecode-table-4").lookup(data_set=data_set, model=model, target_speedup=label)


def _ends(lengths: Sequence[int]) -> tuple[int, int] | None:
    return (lengths[0], lengths[-1]) if lengths else None


def run_sentences(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short report on each model and data set whose settings are all among a run's points."""
    settings = [point for point in points if point["method"] == "skipdecode"]
    return [sentence for pair in replayed(settings) for sentence in sentences_on(*pair)]


def replayed(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs (data set, model) of which these settings include all rows of Table 2; additional settings do not matter.

    A setting has layers, min_layers, max_layers, prompt, sequence_length, warm_up and power.

    >>> table = [row for row in schedule_rows() if row["model"] == "opt-1.3b"]
    >>> replayed([row | {"prompt": 60, "sequence_length": 160, "power": 1.0} for row in table])
    [('e2e', 'opt-1.3b')]
    """
    available = {tuple(each[key] for key in SETTING) for each in settings}
    pairs = []
    for model, table in _by_model().items():
        for data_set, (prompt, sequence_length) in LENGTHS.items():
            wanted = {(*(row[key] for key in SETTING[:4]), prompt, sequence_length, 1.0) for row in table}
            if wanted <= available:
                pairs.append((data_set, model))
    return pairs


def _by_model() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = {}
    for row in schedule_rows():
        table.setdefault(row["model"], []).append(row)
    return table


# --- Sentences ---------------------------------------------------------------------------------------------------------


def sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Report in sentences about these rows (from `rows`) and Tables 2 and 5.

    >>> for sentence in sentences(rows())[:2]:
    ...     print(sentence)
    (min + max) / 2 is the target in 7 of 8 rows of Table 2; for OPT-6.7B at 2x it is 16.5, the target 16.
    Layers over target layers equal the label in 5 of 8 rows; 3x of OPT-6.7B is 2.91, 5x of OPT-6.7B is 4.92, 5x of OPT-1.3B ...
    """
    families = dict.fromkeys((row["data_set"], row["model"]) for row in rows)
    parts = [*_schedule_sentences(schedule_rows()), _realised_sentence(rows), *_common_sentences(families)]
    return [*parts, *_growth_sentences(rows, families), *_quality_sentences(rows), _other_values_sentence()]


def sentences_on(data_set: str, model: str) -> list[str]:
    """Short report on one model's rows of Table 2, and on its rows of Table 4 for one data set.

    >>> for sentence in sentences_on("e2e", "opt-1.3b")[:2]:
    ...     print(sentence)
    The settings are those of SkipDecode's Table 2 for OPT-1.3B, with the lengths of E2E; its tables imply:
    (min + max) / 2 is the target in 4 of 4 rows of Table 2.
    """
    checks.one_of("data_set", data_set, LENGTHS)
    checks.one_of("model", model, _by_model())
    found = [row for row in rows() if (row["data_set"], row["model"]) == (data_set, model)]
    where = f"for {_NAMES[model]}, with the lengths of {_NAMES[data_set]}"
    lead = f"The settings are those of SkipDecode's Table 2 {where};"
    family = {(data_set, model): None}
    parts = [f"{lead} its tables imply:", *_schedule_sentences(_by_model()[model]), _realised_sentence(found)]
    return [*parts, *_common_sentences(family), *_growth_sentences(found, family), *_quality_sentences(found)]


def _schedule_sentences(table: Sequence[Mapping[str, Any]]) -> list[str]:
    off = [row for row in table if not row["centred"]]
    named = "".join(f"; for {_named(row)} it is {row['middle']:g}, the target {row['target_layers']:g}" for row in off)
    wrong = [f"{row['target_speedup']:g}x of {_NAMES[row['model']]} is {row['ratio']:.2f}" for row in table if not row["labelled"]]
    moved = [row for row in table if row["counted"] != row["layers"]]
    other = [row for row in moved if row["counted_target"] != row["target_layers"]]
    lines = [
        f"(min + max) / 2 is the target in {len(table) - len(off)} of {len(table)} rows of Table 2{named}.",
        f"Layers over target layers equal the label in {len(table) - len(wrong)} of {len(table)} rows"
        f"{'; ' if wrong else ''}{', '.join(wrong)}.",
    ]
    if moved:
        targets = "".join(f", with a target of {row['counted_target']:g} at {row['target_speedup']:g}x"
                       f" where it has {row['target_layers']:g}" for row in other)  # fmt: skip
        counted, layers = moved[0]["counted"], moved[0]["layers"]
        lines.append(f"Table 4 counts {_NAMES[moved[0]['model']]} from {counted:g} layers, Table 2 from {layers}{targets}.")
    return lines


def _realised_sentence(found: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for label in dict.fromkeys(row["target_speedup"] for row in found):
        values = [row["realised"] for row in found if row["target_speedup"] == label]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(values), max(values)))
        parts.append(f"{' to '.join(ends)} at {label:g}x")
    return f"Generated tokens passed fewer layers by factors of {', '.join(parts)}; the paper gives no times."


def _common_sentences(families: Mapping[tuple[str, str], None]) -> list[str]:
    lines = []
    for data_set, model in families:
        if data_set != "e2e":
            continue
        starts = (LENGTHS[data_set][0], MEDIAN_PROMPTS[data_set])
        parts = []
        for start in starts:
            fitting = {rounding: _listed(common_lengths(data_set, model, rounding, start)) for rounding in COMPARED}
            separate = [f"{lengths} with halves rounded {_ROUNDED[rounding]}" for rounding, lengths in fitting.items()]
            both = len(set(fitting.values())) == 1
            lengths = f"{fitting['half-up']}, halves rounded either way" if both else " and ".join(separate)
            parts.append(f"after a prompt of {start}, {lengths}")
        lines.append(f"Response lengths that explain all rows of {_NAMES[model]} on {_NAMES[data_set]}: {'; '.join(parts)}.")
    return lines


_ROUNDED = {"half-up": "up", "half-even": "to even"}


def _growth_sentences(found: Sequence[Mapping[str, Any]], families: Mapping[tuple[str, str], None]) -> list[str]:
    lines = []
    for data_set, model in families:
        own = [row for row in found if (row["data_set"], row["model"]) == (data_set, model)]
        if data_set == "e2e" or len(own) < 2:
            continue
        spans = ", ".join(f"{_span(row['lengths']['half-up'])} at {row['target_speedup']:g}x" for row in own)
        ends = [row["lengths"]["half-up"] for row in own]
        some = all(ends) and max(first for first, _ in ends) <= min(last for _, last in ends)
        none = "" if some else "; no length fits all"
        where, most = f"{_NAMES[model]} on {_NAMES[data_set]}", own[0]["most"]
        lines.append(f"The layers of {where} imply responses of {spans} tokens (the limit is {most}){none}.")
    limit = [f"{row['target_speedup']:g}x of {_on(row)}" for row in found if row["at_limit"]]
    if limit:
        lines.append(f"Responses ran to the longest length, or close to it, at {' and '.join(limit)}: no sign of quality.")
    return lines


def _quality_sentences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for data_set in dict.fromkeys(row["data_set"] for row in found):
        own = [row for row in found if row["data_set"] == data_set]
        worst = max(own, key=lambda row: row["lost"])
        lines.append(
            f"ROUGE-L on {_NAMES[data_set]} falls by up to {worst['lost']:.1f}, from {worst['rouge_l'] + worst['lost']:.1f} to"
            f" {worst['rouge_l']:.1f} ({_named(worst)}); the paper calls regression from 2x to 5x negligible."
        )
    return lines


def _other_values_sentence() -> str:
    """Sentence about rows of Table 4 that Table 5 (for OPT-1.3B) repeats with another number."""
    differing = []
    for row in published.table("skipdecode-table-5").rows:
        if row["method"] == "skipdecode":
            again = _printed(row["data_set"], "opt-1.3b", row["speedup"])["rouge_l"]
            if again != row["rouge_l"]:
                where = f"{_NAMES[row['data_set']]}, {row['speedup']:g}x"
                differing.append(f"{row['rouge_l']:.1f} where Table 4 has {again:.1f} ({where})")
    return f"Table 5 repeats rows of Table 4, but prints {' and '.join(differing)}."


def _named(row: Mapping[str, Any]) -> str:
    return f"{_NAMES[row['model']]} at {row['target_speedup']:g}x"


def _on(row: Mapping[str, Any]) -> str:
    return f"{_NAMES[row['model']]} on {_NAMES[row['data_set']]}"


def _listed(lengths: Sequence[int]) -> str:
    return " or ".join(map(str, lengths)) if lengths else "none"


def _span(ends: tuple[int, int] | None) -> str:
    return "no length" if ends is None else f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
