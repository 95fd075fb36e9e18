"""Claims of `calibrate report` on tables of serving engines: step laws fitted to a few cells, and the other cells predicted.

Each case says the cells that a law was fitted to; its errors are those of all other cells of the table. Next to them are the
number of other cells within the 80 % intervals, the median half-width of these, and, where draft lengths were measured against each
other, the *loss* of the draft length that the law chooses: the share of the best measured throughput at that batch that it gives
away. Priors and terms are those of `model.engines`: nothing here sets a number of a law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from calibrate.importers import imported_tables
from calibrate.validation.validated_claims import Claim, PredictionErrors, Target, percent
from model.engines import acceptance_curves, law_fit, next_cell, step_terms
from model.engines.cells import Cells, Floats
from model.engines.next_cell import CellAdvice
from model.engines.step_law import Predictions
from model.engines.step_terms import PRIORS, RoutedExperts

Mask = NDArray[np.bool_]

QWEN = RoutedExperts(128, 8)
"""Experts of Qwen3-235B-A22B (its config.json)."""
DEEPSEEK = RoutedExperts(256, 8)
"""Routed experts of DeepSeek-R1 (its config.json); the shared expert is read by every step."""
GPT_OSS = RoutedExperts(32, 4)
"""Experts of gpt-oss-20b (its config.json)."""
MTP_LENGTHS = (1, 2, 3)
"""Draft lengths that are assumed for MTP, whose table does not say its own."""
P_EAGLE_LENGTH, EAGLE_3_LENGTH = 7, 3
"""Draft lengths of the two throughputs that the ratio is made of: each drafter's fastest (sgl-project/sglang#23171)."""
DATA_SETS = ("mt-bench", "humaneval", "speed-bench")
INTERVALS, WIDTH, LOSS, WORST_LOSS = "in 80 % intervals", "half-width", "loss, mean", "loss, worst"
"""Headings of the columns."""


@dataclass(frozen=True, eq=False)
class PredictedTable:
    """Cells of a table, which of them a law was fitted to, and what it predicts for all of them."""

    cells: Cells
    fitted: Mask
    predictions: Predictions

    @property
    def errors(self) -> Floats:
        """Relative errors of the cells that the law was not fitted to [-]."""
        return np.asarray(self.predictions.values / self.cells.values - 1)[~self.fitted]

    @property
    def worst(self) -> str:
        """The cell with the largest error, in words."""
        other = self.cells[~self.fitted]
        row = int(np.abs(self.errors).argmax())
        drafted = f"K = {other.draft_length[row]:g}, " if np.ptp(self.cells.draft_length) else ""
        return f"{drafted}batch {other.sequences[row]:g}"

    def losses(self) -> dict[float, float]:
        """Loss of throughput by the chosen draft length against the best measured one, by batch; throughputs alone [-]."""
        found = {}
        for batch in np.unique(self.cells.sequences):
            row = self.cells.sequences == batch
            chosen = self.cells.values[row][self.predictions.values[row].argmax()]
            found[float(batch)] = float(1 - chosen / self.cells.values[row].max())
        return found


def predicted(
    cells: Cells, fitted: Mask, *, experts: RoutedExperts | None = None, over: Cells | None = None, name: str = "table"
) -> PredictedTable:
    """Fit a law to some cells of a table, and predict all; with `over`, values are ratios of `cells` over these."""
    law = law_fit.fit(cells[fitted], name, experts=experts, over=None if over is None else over[fitted])
    return PredictedTable(cells, fitted, law.predict(cells, over=over))


def together(tables: Sequence[PredictedTable]) -> PredictedTable:
    """Several tables as one, for their errors."""
    arrays = {
        name: np.concatenate([getattr(each.cells, name) for each in tables]) for name in vars(tables[0].cells) if name != "unit"
    }
    values = (np.concatenate(each) for each in zip(*(table.predictions for table in tables), strict=True))
    fitted = np.concatenate([each.fitted for each in tables])
    return PredictedTable(Cells(tables[0].cells.unit, **arrays), fitted, Predictions(*values))


def case(
    name: str, table: PredictedTable, target: float | None = None, target_worst: float | None = None, *,
    losses: Callable[[Mapping[float, float]], tuple[Target, ...]] | None = None, targets: tuple[Target, ...] = (),
) -> PredictionErrors:  # fmt: skip
    """Errors of a table with its intervals; `losses` gives the targets of the losses by batch, and shows these."""
    values, low, high, _ = table.predictions
    inside = ((table.cells.values >= low) & (table.cells.values <= high))[~table.fitted]
    width = np.median(((high - low) / (2 * values))[~table.fitted])
    columns = {INTERVALS: f"≈ {inside.sum()} of {inside.size}", WIDTH: f"≈ {percent(float(width))}"}
    if losses is not None:
        lost = table.losses()
        targets += losses(lost)
        worst = max(lost, key=lambda batch: lost[batch])
        columns[LOSS] = f"{np.mean([*lost.values()]):.2%}".replace("%", " %")
        columns[WORST_LOSS] = f"{percent(lost[worst])} (batch {worst:g})" if lost[worst] > 0 else percent(0)
    return PredictionErrors(name, table.errors, table.worst, target, None, target_worst, targets, columns)


# --- Throughput by batch and draft length ---


def qwen_cells(root: Path) -> Cells:
    """Read the throughputs of Qwen3-235B by draft length and batch; the adaptive policy, which has no one length, is left out."""
    import polars as pl

    read = imported_tables.read(
        root / "engine/sglang_22246_qwen3_235b.csv", ["steps", "batch", "output_tokens_per_s"], root=root
    )
    read = read.where(read.frame["steps"].cast(pl.String) != "auto")
    batch, drafted = read.column("batch", least=1), read.whole("steps", least=0)
    return Cells.of("output_tokens_per_s", batch, drafted, read.column("output_tokens_per_s", least=1e-9))


def chosen(cells: Cells, draft_lengths: Sequence[float], sequences: Sequence[float]) -> Mask:
    """Mask of the cells with these draft lengths and batches."""
    return np.isin(cells.draft_length, draft_lengths) & np.isin(cells.sequences, sequences)


def throughput(cells: Cells) -> Claim:
    """Throughputs by draft length and batch, from four or six cells of them."""

    def target(lost: Mapping[float, float]) -> tuple[Target, ...]:
        return Target("mean loss", float(np.mean([*lost.values()])), 0.005), Target("worst loss", max(lost.values()), 0.021)

    def no_target(_: Mapping[float, float]) -> tuple[Target, ...]:
        return ()

    def split(longer: int, third: int) -> PredictedTable:
        return predicted(cells, chosen(cells, (1, longer), (1, third, 64)), experts=QWEN)

    main = split(4, 8)
    cases = [case("K = 1, 4 at batch 1, 8, 64", main, 0.025, 0.08, losses=target)]
    for longer in (3, 4, 5):
        for third in (4, 8, 16):
            name = f"K = 1, {longer} at batch 1, {third}, 64"
            if name != cases[0].name:
                cases.append(case(name, split(longer, third), 0.04, 0.12, losses=no_target))
    without = predicted(cells, main.fitted)
    cases.append(case("K = 1, 4 at batch 1, 8, 64, without the experts' term", without, losses=no_target))
    relative, absolute = (least_squares(cells, main.fitted, QWEN, squares).losses() for squares in ("relative", "absolute"))
    four = chosen(cells, (1, 4), (1, 64))
    law = law_fit.fit(cells[four], "four cells", experts=QWEN)
    advice = next_cell.advise(law, tuple(np.unique(cells.sequences)), tuple(np.unique(cells.draft_length).astype(int)))
    main_loss, lost = main.losses(), without.losses()
    return Claim(
        "Engine: throughput of Qwen3-235B in SGLang by draft length and batch",
        "42 cells: draft lengths (K) 1 to 6 at batch 1 to 64. A step law is fitted to the cells that a case names and predicts the "
        "others. The acceptance length is not in the source: one rate and its trend are fitted with the law. *Loss* is throughput "
        "given away by the chosen K against the best measured K, over the seven batches; intervals are of 80 %, and numbers after "
        "≈ "
        "come from random draws. Targets are 2.5 % in the median, 8 % at worst, and losses of 0.5 % (mean) and 2.1 % (worst) for "
        f"K = 1, 4 at batch 1, 8, 64; and 4 % and 12 % for the other sets of six. {_missed(cases)} "
        "suffix_arctic_tokens_per_s.csv is not predicted here: it has no two cells of one drafter that differ in batch or draft "
        "length only.",
        f"Without the experts' term the median is {percent(_median(without))} instead of {percent(_median(main))}, and the chosen "
        "K "
        f"loses {percent(_mean(lost))} in the mean and {percent(max(lost.values()))} at worst instead of "
        f"{percent(_mean(main_loss))} and {percent(max(main_loss.values()))}: what a step reads grows with the union of its "
        "tokens' experts, which no line in the tokens follows. Which errors are minimised matters too. A plain least-squares fit "
        "of "
        "five numbers (a constant, per token, per draft pass, all experts, one acceptance rate) to the same six cells loses "
        f"{percent(_mean(relative))} in the mean and {percent(max(relative.values()))} at worst if it minimises relative errors, "
        "and "
        f"{percent(_mean(absolute))} and {percent(max(absolute.values()))} if absolute errors of throughput. "
        f"{_next_sentence(advice)}",
        tuple(cases), "published: sgl-project/sglang#22246",
    )  # fmt: skip


def least_squares(cells: Cells, fitted: Mask, experts: RoutedExperts, squares: str) -> PredictedTable:
    """Predict by a plain fit without priors: seconds linear in tokens, draft passes and experts read, and one acceptance rate.

    `squares` says what is minimised: `relative` or `absolute` errors of throughput. For comparison with the step law only.
    """
    few = cells[fitted]

    def values(point: Floats, of: Cells) -> Floats:
        constant, token, passed, reading = np.exp(point[:4])
        tokens = of.sequences * (of.draft_length + 1)
        read = step_terms.expert_share_read(experts, of.sequences, of.draft_length, 0.0, 0.0)
        length = step_terms.acceptance_length(1 / (1 + np.exp(-point[4])), 0.0, of.draft_length)
        return np.asarray(of.sequences * length / (constant + token * tokens + passed * of.draft_passes + reading * read))

    def errors(point: Floats) -> Floats:
        error = values(point, few) - few.values
        return np.asarray(error / few.values if squares == "relative" else error / np.mean(few.values))

    step = float(np.median(few.sequences / few.values))  # a sequence gets at least one token per step
    starts = [np.array([*np.log([step, step / 100, step / 30, 2 * step]), rate]) for rate in (-0.5, 0.5, 1.5)]
    best = min((optimize.least_squares(errors, start, max_nfev=2000) for start in starts), key=lambda found: float(found.cost))
    found = values(best.x, cells)
    return PredictedTable(cells, fitted, Predictions(found, found, found, np.zeros(cells.size)))


def third_batches(advice: CellAdvice) -> dict[float, tuple[float, float]]:
    """By batch, the smallest expected loss and uncertainty that measuring one of its cells would leave [-]."""
    return {
        batch: (
            min(each.loss for each in advice.candidates if each.sequences == batch),
            min(each.spread for each in advice.candidates if each.sequences == batch),
        )
        for batch in sorted({each.sequences for each in advice.candidates})
    }


def _next_sentence(advice: CellAdvice) -> str:
    left, first = third_batches(advice), advice.candidates[0]
    listed = "; ".join(f"batch {batch:g}: ≈ {100 * after:.2f} %, ≈ {percent(wide)}" for batch, (after, wide) in left.items())
    # The second most told differs with the draws, which differ between processors.
    told = f"{first.tells[0][0]} ({PRIORS[first.tells[0][0]].meaning})"
    return (
        f"With K = 1, 4 at batch 1 and 64 alone, `calibrate engine next` expects a loss of ≈ {100 * advice.loss:.2f} % and an "
        f"uncertainty of ≈ {percent(advice.spread)} of all cells, and asks for batch {first.sequences:g}, which tells most about "
        f"{told}. What one further cell would leave of both (the best K at each batch): {listed}."
    )


# --- Time per token, plain and drafted ---


def deepseek_cells(root: Path) -> tuple[Cells, Callable[[int], Cells]]:
    """Read times per token of DeepSeek-R1: those of plain decoding, and those of MTP for a draft length that is assumed."""
    read = imported_tables.read(
        root / "engine/b300_r1_fp8_sglang_1k1k.csv", ["concurrency", "tpot_ms_plain", "tpot_ms_mtp"], root=root
    )
    plain = read.where(read.frame["tpot_ms_plain"].is_not_null())
    drafted = read.where(read.frame["tpot_ms_mtp"].is_not_null())

    def with_length(draft_length: int) -> Cells:
        number, times = drafted.column("concurrency", least=1), drafted.column("tpot_ms_mtp", least=1e-9)
        return Cells.of("tpot_ms", number, np.full(drafted.height, draft_length), times)

    number = plain.column("concurrency", least=1)
    return Cells.of("tpot_ms", number, np.zeros(plain.height), plain.column("tpot_ms_plain", least=1e-9)), with_length


def time_per_token(plain: Cells, drafted: Callable[[int], Cells]) -> Claim:
    """Times per token of plain decoding and of MTP by concurrency, each from three cells."""
    alone = predicted(plain, chosen(plain, (0,), (4, 16, 64)), experts=DEEPSEEK)
    by_length = {}
    for length in MTP_LENGTHS:
        cells = drafted(length)
        by_length[length] = predicted(cells, chosen(cells, (length,), (4, 32, 512)), experts=DEEPSEEK)
    cases = [case("plain, from 4, 16, 64", alone)]
    for length, table in by_length.items():
        cases.append(case(f"MTP, from 4, 32, 512, assumed K = {length}", table))
        cases.append(case(f"plain and MTP, assumed K = {length}", together([alone, table]), 0.03, 0.06))
    first = drafted(MTP_LENGTHS[0])
    cases.append(
        case("MTP, without the experts' term, assumed K = 1", predicted(first, chosen(first, (MTP_LENGTHS[0],), (4, 32, 512))))
    )
    signs = "; ".join(
        f"K = {length}: {', '.join(f'{100 * error:+.1f} %'.replace('-0.0', '0.0') for error in table.errors)}"
        for length, table in by_length.items()
    )
    names = ", ".join(f"{each:g}" for each in by_length[1].cells[~by_length[1].fitted].sequences)
    return Claim(
        "Engine: time per token of DeepSeek-R1 in SGLang, plain and with MTP",
        "Mean time per output token by concurrency, 8 x B300, FP8, prompts and outputs of 1,024 tokens. Plain decoding and MTP are "
        "two "
        "laws, each fitted to three cells. **The draft length of MTP is not in the source**, and neither is its acceptance: 1, 2 "
        "and 3 "
        f"are assumed in turn. Targets are 3 % in the median and 6 % at worst for the cells of both. {_missed(cases)}",
        f"How much the assumed draft length matters: signed errors of MTP at concurrency {names} are {signs}. They are of one sign "
        "from "
        "64 on: between two fitted cells far apart (32 and 512) the time bends more than the law does. The time contains prompts "
        "of other requests (the law's term `prompt`), whose share grows with the concurrency and is not in the source.",
        tuple(cases), "published: InferenceX-app at 3a600f1d, fixture of benchmarks",
    )  # fmt: skip


# --- Ratio of two drafters ---


@dataclass(frozen=True, eq=False)
class DrafterRatio:
    """Cells of P-EAGLE with the ratio as their value, the cells of EAGLE-3 that they are relative to, and the data set of each."""

    cells: Cells
    over: Cells
    data_sets: NDArray[np.str_]

    def of(self, mask: Mask) -> DrafterRatio:
        """Return some of the cells."""
        return DrafterRatio(self.cells[mask], self.over[mask], self.data_sets[mask])


def drafter_ratio(root: Path) -> DrafterRatio:
    """Read the throughput of P-EAGLE over that of EAGLE-3, with the acceptance lengths of both."""
    read = imported_tables.read(
        root / "engine/p_eagle_speedup_over_eagle3.csv", ["data_set", "concurrency", "p_eagle_over_eagle3"], root=root
    )
    lengths = imported_tables.read(
        root / "engine/p_eagle_b200_gpt_oss_20b.csv", ["data_set", "drafter", "draft_length", "mean_acceptance_length"], root=root
    )
    sets = read.words("data_set", DATA_SETS)
    keys = zip(lengths.words("data_set", DATA_SETS), lengths.words("drafter", ("p-eagle", "eagle-3")),
               lengths.whole("draft_length", least=1), strict=True)  # fmt: skip
    known = dict(zip(keys, lengths.column("mean_acceptance_length", least=1), strict=True))
    number = read.column("concurrency", least=1)
    found = {}
    for drafter, length in (("p-eagle", P_EAGLE_LENGTH), ("eagle-3", EAGLE_3_LENGTH)):
        own = [known.get((each, drafter, float(length)), np.nan) for each in sets]
        values = read.column("p_eagle_over_eagle3", least=1e-9) if drafter == "p-eagle" else None
        passes = 1 if drafter == "p-eagle" else length
        found[drafter] = Cells.of(
            "output_tokens_per_s", number, np.full(number.size, length), values, mean_acceptance_length=own, draft_passes=passes
        )
    return DrafterRatio(found["p-eagle"], found["eagle-3"], sets)


def ratio(table: DrafterRatio) -> Claim:
    """The throughput of P-EAGLE over EAGLE-3, from three concurrencies."""

    def few(cells: Cells) -> Mask:
        return np.isin(cells.sequences, (1, 8, 64))

    def signs(found: PredictedTable) -> Target:
        wrong = np.sign(found.predictions.values - 1) != np.sign(found.cells.values - 1)
        return Target("cells with the wrong sign", float(wrong.mean()), 0.0)

    one = predicted(table.cells, few(table.cells), experts=GPT_OSS, over=table.over)
    parts = {name: table.of(table.data_sets == name) for name in DATA_SETS}
    each = {
        name: predicted(part.cells, few(part.cells), experts=GPT_OSS, over=part.over, name=name) for name, part in parts.items()
    }
    all_ = together([*each.values()])
    lines = together([_straight(part.cells, few(part.cells)) for part in parts.values()])
    cases = [
        case("a law for each data set", all_, 0.05, 0.1, targets=(signs(all_),)),
        case("one law for all data sets", one, 0.05, 0.1, targets=(signs(one),)),
        *(case(f"the law of {name}", found) for name, found in each.items()),
        PredictionErrors("a straight line in log2(concurrency), no law", lines.errors, lines.worst),
    ]
    rises = sum(int(np.sum(np.diff(part.cells.values[np.argsort(part.cells.sequences)]) > 0)) for part in parts.values())
    return Claim(
        "Engine: P-EAGLE over EAGLE-3 on gpt-oss-20b in vLLM",
        f"Ratio of throughputs by concurrency on one B200. A law is fitted to the ratios at concurrency 1, 8 and 64, with the "
        f"acceptance lengths of each data set: P-EAGLE drafts K = {P_EAGLE_LENGTH} in one pass, EAGLE-3 K = {EAGLE_3_LENGTH} in "
        f"{EAGLE_3_LENGTH} (each drafter's fastest; the ratio's table does not say them). Targets are the right sign everywhere, 5 "
        "% in the "
        f"median and 10 % at worst. {_missed(cases)}",
        f"A ratio says nothing of the time of a step itself. The measured ratios fall with the concurrency but for {rises} of "
        "their "
        f"{sum(part.cells.size - 1 for part in parts.values())} steps, by up to {percent(_largest_rise(parts))}: no law that is "
        "smooth follows "
        f"them. A straight line between the fitted ratios is {percent(_median(lines))} off in the median and "
        f"{percent(float(np.abs(lines.errors).max()))} at worst.",
        tuple(cases), "published: P-EAGLE in vLLM, vLLM blog; draft lengths: sgl-project/sglang#23171",
    )  # fmt: skip


def _straight(cells: Cells, fitted: Mask) -> PredictedTable:
    known = cells[fitted]
    order = np.argsort(known.sequences)
    values = np.interp(np.log2(cells.sequences), np.log2(known.sequences[order]), known.values[order])
    return PredictedTable(cells, fitted, Predictions(values, values, values, np.zeros(cells.size)))


def _largest_rise(parts: Mapping[str, DrafterRatio]) -> float:
    rises = [part.cells.values[np.argsort(part.cells.sequences)] for part in parts.values()]
    return max(float(np.max(values[1:] / values[:-1] - 1)) for values in rises)


# --- Acceptance by draft position ---


def curves(root: Path) -> dict[str, tuple[Floats, Floats]]:
    """Read draft lengths and mean acceptance lengths by drafter."""
    read = imported_tables.read(
        root / "engine/golden_acceptance.csv", ["drafter", "draft_length", "mean_acceptance_length"], root=root
    )
    names = read.frame["drafter"].to_numpy()
    length, measured = read.whole("draft_length", least=1), read.column("mean_acceptance_length", least=1)
    return {str(name): (length[names == name], measured[names == name]) for name in dict.fromkeys(names)}


def acceptance(measured: Mapping[str, tuple[Floats, Floats]]) -> Claim:
    """Mean acceptance lengths by the best law by draft position, and by a constant rate."""
    cases, falling = [], []
    errors: dict[int, dict[str, Floats]] = {1: {}, 3: {}}
    for name, (lengths, values) in measured.items():
        law = acceptance_curves.fit(lengths, values)
        worst = int(np.abs(law.errors).argmax())
        cases.append(PredictionErrors(f"{name}: best law by position", law.errors, f"K = {lengths[worst]:g}", None, None, 0.027))
        pairs = acceptance_curves.falls(lengths, values)
        known = dict(zip(lengths, values, strict=True))
        falling += [f"{name} from K = {low} to {high} ({known[low]:g} to {known[high]:g})" for low, high in pairs]
        for base in errors:
            rate = acceptance_curves.constant_rate(base, float(known[base]))
            errors[base][name] = acceptance_curves.constant_lengths(rate, lengths) / values - 1
    for base, found in errors.items():
        for name, error in found.items():
            lengths = measured[name][0]
            cases.append(
                PredictionErrors(
                    f"{name}: constant rate from K = {base}", error, f"K = {lengths[int(np.abs(error).argmax())]:g}"
                )
            )
    worst_of = {base: [float(np.abs(each).max()) for each in found.values()] for base, found in errors.items()}
    return Claim(
        "Engine: acceptance lengths by draft length, from one law by draft position",
        "Mean acceptance lengths of five drafters at K = 1 to 8 (SPEED-Bench, coding, vLLM on B300). The best law by draft "
        "position "
        "has the smallest largest error of all laws whose share of accepted tokens never rises with the position "
        "(`model.engines.acceptance_curves`); it is fitted to the whole curve, so its error is what such a law cannot say. A "
        "constant "
        "rate has the measured length at K = 1, or at K = 3. The target is 2.7 % at every K for the best law by position. "
        f"{_missed(cases)}",
        f"Curves fall at {len(falling)} places, which no law by position can follow: {'; '.join(falling)}. A constant rate is up "
        "to "
        f"{percent(max(worst_of[1]))} off from K = 1 and up to {percent(max(worst_of[3]))} from K = 3, and at least "
        f"{percent(min(worst_of[3]))} on every curve.",
        tuple(cases), "published: SemiAnalysisAI/InferenceX at 843c6254, golden_al_distribution",
    )  # fmt: skip


# --- All claims ---


def claims(data: str | Path) -> tuple[Claim, ...]:
    """Compute the claims on tables of engines, from a folder that holds `engine`."""
    root = Path(data)
    return throughput(qwen_cells(root)), time_per_token(*deepseek_cells(root)), ratio(drafter_ratio(root)), acceptance(curves(root))


def _missed(cases: Sequence[PredictionErrors]) -> str:
    over = [each.name for each in cases if not each.met]
    return f"Missed: {'; '.join(over)}." if over else "All targets are met."


def _median(table: PredictedTable) -> float:
    return float(np.median(np.abs(table.errors)))


def _mean(lost: Mapping[float, float]) -> float:
    return float(np.mean([*lost.values()]))
