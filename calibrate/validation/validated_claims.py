"""How far off what is predicted was, wherever there is a measured time to hold it against: the claims of `calibrate report`.

Each claim takes what was measured and says its errors case by case, relative and in size: predicted over measured, less 1.
Nothing is typed in: where a sentence has a number, it was computed with the table below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from calibrate.fits import cpu_step, engine_run, ppd_overheads, small_kernels
from calibrate.fits import roofline_fit as fits
from calibrate.importers import aiconfigurator, bundled_profiles, imported_tables, vidur
from model.architectures import transformer
from model.base.checks import ParameterError
from model.hardware import composed_layers, interpolation, isotonic, profile_files
from model.hardware.composed_layers import LeaveOneOutErrors
from model.hardware.interpolation import Floats, Surface
from model.hardware.profile import Profile
from model.hardware.profile_costs import ProfileCosts
from model.hardware.roofline import Efficiency
from model.published import ppd_table_3_fit

RUN = "gpu/llmservingsim/bench/examples/RTX4090/Llama-3.1-8B/vllm"
DENSE = range(1, 18)
"""Values of m of a dense grid, and perhaps more."""
NARROW = 32
"""Most rows of a product when few drafts are verified."""
MOST_90 = 0.17
"""What nine of ten products that are left out may miss at most."""
SHARED = 16
"""How many heads share one of keys and values in models of the kinds that are known here, at most."""
ASKED = {"h100": 0.022, "a100": 0.03, "l40s": 0.03}
"""What the median product that is left out may miss at most."""


@dataclass(frozen=True, eq=False)
class PredictionErrors:
    """Errors of one kind: relative, of shape (predictions,), where the largest is, and what was asked of the median [-]."""

    name: str
    errors: Floats
    where: str = ""
    asked: float | None = None
    asked_90: float | None = None

    def __post_init__(self) -> None:
        if not self.errors.size or not np.isfinite(self.errors).all():
            raise ParameterError(f"errors of {self.name!r} must be at least one finite number, got {self.errors.size} errors")

    @property
    def median(self) -> float:
        """The size that half of the errors do not pass [-]."""
        return float(np.median(np.abs(self.errors)))

    @property
    def ninety(self) -> float:
        """The size that nine of ten errors do not pass [-]."""
        return float(np.percentile(np.abs(self.errors), 90))

    @property
    def largest(self) -> float:
        """The size of the largest [-]."""
        return float(np.abs(self.errors).max())

    @property
    def kept(self) -> bool:
        """Whether what was asked for holds."""
        median = self.asked is None or self.median <= self.asked
        return median and (self.asked_90 is None or self.ninety <= self.asked_90)


@dataclass(frozen=True, eq=False)
class Claim:
    """What was predicted and how, where it is bad and why, its cases, and where the measured times are from."""

    title: str
    says: str
    bad: str
    cases: tuple[PredictionErrors, ...]
    sources: str

    @property
    def ordered(self) -> list[PredictionErrors]:
        """The cases, the worst median first."""
        return sorted(self.cases, key=lambda case: -case.median)

    def case(self, name: str) -> PredictionErrors:
        """The case of this name."""
        found = {case.name: case for case in self.cases}
        if name not in found:
            raise ParameterError(f"claim {self.title!r} has no case {name!r}; there are {', '.join(found)}")
        return found[name]


def percent(share: float) -> str:
    """A share as text.

    >>> percent(0.0312)
    '3.1 %'
    """
    return f"{100 * share:.1f} %"


def _case(
    name: str, found: LeaveOneOutErrors, axis: str, asked: float | None = None, asked_90: float | None = None
) -> PredictionErrors:
    where = found.at[np.argmax(np.abs(found.error))]
    return PredictionErrors(name, found.error, f"{axis} {where:,.0f}", asked, asked_90)


def _up_to(found: LeaveOneOutErrors, most: float) -> LeaveOneOutErrors:
    kept = found.at <= most
    return LeaveOneOutErrors(found.at[kept], found.error[kept])


def _together(found: Sequence[LeaveOneOutErrors]) -> LeaveOneOutErrors:
    return LeaveOneOutErrors(np.concatenate([each.at for each in found]), np.concatenate([each.error for each in found]))


def is_dense(table: Profile) -> bool:
    """Whether a table of products has every m up to 17."""
    return {*DENSE} <= {*table.rows("gemm")["m"].to_list()}


# --- products and attention, each time left out of its own table ---


def products(made: Mapping[str, Profile], sources: str = "") -> Claim:
    """Each product left out, found again from shapes beside it at this m, and from how it compares with them at others."""
    cases = []
    for name, table in made.items():
        found = composed_layers.gemm_left_out(table)
        cases.append(_case(f"{name}, all m", found, "m", ASKED.get(table.device), MOST_90))
        cases.append(_case(f"{name}, m to {NARROW}", _up_to(found, NARROW), "m", 0.01 if is_dense(table) else None))
    over, many = [case for case in cases if not case.kept], len(composed_layers.SHAPES_NEAR) * len(composed_layers.M_NEAR)
    return Claim(
        "Products of matrices, one time missing",
        "A time is predicted from what shapes next to it in n and k take at this very m, times how its times compare with theirs "
        f"at the nearest other m: the median of {many} such predictions. Which neighbours are asked was chosen on tables of the "
        "H100 and the A100 alone. That is the error of one missing time in a table whose neighbours are all there. It is not that "
        f"of an m that no shape was measured at, which is below. Asked are medians of 2.2 % (H100) and 3 %, {MOST_90:.0%} for nine "
        f"of ten, and 1 % for m to {NARROW} where every m to {DENSE[-1]} was measured.",
        f"{_missed(over)} Single products are off by a multiple where another kernel begins: {_worst_by_device(cases)}.",
        tuple(cases), sources,
    )  # fmt: skip


def products_between(made: Mapping[str, Profile], sources: str = "") -> Claim:
    """The same from its own shape alone, as a profile of a model is interpolated; and shapes that were not measured."""
    cases = []
    for name, table in made.items():
        found = composed_layers.gemm_left_out(table, ())
        cases.append(_case(f"{name}, m between others, all m", found, "m"))
        cases.append(_case(f"{name}, m between others, m to {NARROW}", _up_to(found, NARROW), "m"))
        cases.append(_case(f"{name}, shape between others", composed_layers.shapes_left_out(table), "m"))
    return Claim(
        "Products of matrices, an m or a shape that was not measured",
        "What users meet: a width between those of a profile is interpolated in logarithms and nothing else is known of it; a "
        "model whose n or k lies between those of a table is interpolated by efficiency. Each time is left out and so predicted "
        "from its two neighbours in m, or in n and then in k.",
        "Between coarse m the steps of kernels are missed as a whole. Left out, a point's neighbours lie twice as far apart as "
        "those of a point between: the grids are better than these figures.",
        tuple(cases), sources,
    )  # fmt: skip


def attention(made: Mapping[str, Profile], refused: Sequence[str] = (), sources: str = "") -> Claim:
    """Each attention left out of its table, with and without what is known of those that read as many bytes."""
    cases = []
    for name, table in made.items():
        cases.append(_case(f"{name}, beside others", composed_layers.attention_left_out(table), "context", 0.03, MOST_90))
        cases.append(_case(f"{name}, alone", composed_layers.attention_left_out(table, alike=False), "context"))
    alone = [case for case in cases if case.name.endswith("alone")]
    listed = ", ".join(refused)
    more = f" Not here are {listed}: they would be faster than memory allows, as if half of the cache were read, and are refused."
    return Claim(
        "Attention of one new token for each text, one time missing",
        "A time is predicted from its neighbours in context, and from what that misses for shapes that read as many bytes (*beside "
        "others*); *alone* is the interpolation by itself, as in a profile. Asked is a median of 3 % beside others.",
        f"Alone the median is up to {percent(max(case.median for case in alone))}: contexts double from row to row, and kernels "
        "change on the way." + (more if refused else ""),
        tuple(cases), sources,
    )  # fmt: skip


# --- layers and steps ---


def composed(
    operations: Mapping[str, Profile],
    measured: Iterable[Profile],
    tensor_parallel: Sequence[int] = bundled_profiles.TENSOR_PARALLEL,
    sources: str = "",
) -> Claim:
    """Layers composed of products against measured ones of the same GPU, by another engine."""
    cases, least = [], np.inf
    whole = [one for one in measured if one.device in operations]
    found = {(one.device, one.model, many): bundled_profiles.differences(operations[one.device], one, (many,),
        most=bundled_profiles.RANGES[-1])
             for one in whole for many in tensor_parallel}  # fmt: skip
    for one in whole:
        for many in tensor_parallel:
            few = _up_to(found[one.device, one.model, many], bundled_profiles.RANGES[0])
            cases.append(
                _case(f"{one.device} {one.model}{_split(many)}, to {bundled_profiles.RANGES[0]} tokens", few, "tokens", 0.06)
            )
            least = min(least, float(one.rows("dense", many)["time_s"].to_numpy().min()))
    within, biased = [], []
    for gpu in dict.fromkeys(one.device for one in whole):
        held = [one for one in whole if one.device == gpu and one.model in small_kernels.HELD]
        for many in tensor_parallel if held else ():
            together = _together([found[gpu, one.model, many] for one in held])
            for low, most in pairwise((bundled_profiles.RANGES[0], *bundled_profiles.RANGES[1:])):
                kept = (together.at > low) & (together.at <= most)
                wide = LeaveOneOutErrors(together.at[kept], together.error[kept])
                cases.append(_case(f"{gpu}, models left out{_split(many)}, {low + 1:,} to {most:,} tokens", wide, "tokens", 0.21))
                biased.append((f"{gpu}{_split(many)}", float(np.median(wide.error))))
        for one in held:
            others = [other for other in whole if other.device == gpu and other.model != one.model]
            stated = replace(
                operations[gpu],
                facts={composed_layers.LAYER_ERRORS: bundled_profiles.layer_errors(operations[gpu], others, tensor_parallel)},
            )
            for many in tensor_parallel:
                own = found[gpu, one.model, many]
                within.append(np.abs(own.error) / composed_layers.layer_error(stated, own.at, many))
    fast = max(biased, key=lambda each: abs(each[1])) if biased else ("", 0.0)
    shares = [float(np.mean(np.concatenate(within) <= times)) for times in (1, 2)] if within else [0.0, 0.0]
    return Claim(
        "A layer composed of its operations, against the layer measured whole",
        "Products from AIConfigurator's table; norms, rotation and activation by two numbers fitted to other models; rows beyond "
        f"a tile of {composed_layers.TILE} fill whole tiles, which was chosen on the A40. Against Vidur's layers of the same GPU "
        f"and model: other engines, other years. *Models left out*, {' and '.join(small_kernels.HELD)}, had no say in anything. "
        f"Asked are medians of 6 % up to {bundled_profiles.RANGES[0]} tokens and of 21 % beyond.",
        f"Beyond {bundled_profiles.RANGES[0]} tokens composed layers are too fast nearly everywhere, most on the {fast[0]}: "
        f"{_sign(fast[1])} in the median. What is left are products: kernels of 2025 against those of 2023, whose steps between "
        "256 and 1,024 tokens are larger; weights far larger than any cache differ as much. What a profile states is by"
        " tensor_parallel and "
        f"tokens: of layers of a model that it was not taken from {shares[0]:.0%} are within it, {shares[1]:.0%} within twice as "
        f"much. A layer takes as little as {least * 1e6:.0f} us where it is split most.",
        tuple(cases), sources,
    )  # fmt: skip


def _split(tensor_parallel: int) -> str:
    return f", split {tensor_parallel} ways" if tensor_parallel > 1 else ""


def between(held: Sequence[small_kernels.Between], sources: str = "") -> Claim:
    """What a layer runs besides its products and its attention, of models that the fit has not seen."""
    cases = []
    for gpu in dict.fromkeys(each.of.device for each in held):
        own = [each for each in held if each.of.device == gpu]
        together = _together([LeaveOneOutErrors(each.tokens, each.predicted() / each.seconds - 1) for each in own])
        for low, most in pairwise((0, *bundled_profiles.RANGES)):
            kept = (together.at > low) & (together.at <= most)
            found = LeaveOneOutErrors(together.at[kept], together.error[kept])
            cases.append(_case(f"{gpu}, models left out, {low + 1:,} to {most:,} tokens", found, "tokens"))
    return Claim(
        "Norms, rotation, activation and sums of a layer",
        f"A launch each, and reading and writing states at {composed_layers.SMALL_SHARE:.0%} of the bandwidth, or at "
        f"{composed_layers.SMALL_LANE / 1e9:.1f} GB/s where few tokens keep few blocks busy: two numbers, fitted to "
        f"{' and '.join(small_kernels.FITTED)} on three GPUs, held against {' and '.join(small_kernels.HELD)}.",
        "The A40 gives more of its bandwidth to such kernels than the A100 and the H100 do: one share for all is too slow on one "
        "and too fast on the others.",
        tuple(cases), sources,
    )  # fmt: skip


def beyond(measured: Iterable[Profile], sources: str = "") -> Claim:
    """Layers of more tokens than a table has: tables cut, and what lies beyond the cut."""
    whole, cases = [*measured], []
    for last in (64, 512):
        for low, most in ((1, 2), (2, 4), (4, 8)):
            found, said = [], []
            for one in whole:
                cut = replace(one, table=one.table.filter((one.table["part"] != "dense") | (one.table["tokens"] <= last)))
                for tensor_parallel in one.tensor_parallel:
                    rows = one.rows("dense", tensor_parallel)
                    rows = rows.filter((rows["tokens"] > low * last) & (rows["tokens"] <= most * last))
                    at, seconds = (rows[name].to_numpy().astype(np.float64) for name in ("tokens", "time_s"))
                    guess = ProfileCosts(cut, tensor_parallel=tensor_parallel).part("dense", at)
                    assert guess is not None
                    found.append(LeaveOneOutErrors(at, guess.seconds / seconds - 1))
                    said.append(guess.error)
            share = float(np.median(np.concatenate(said)))
            name = f"cut at {last} tokens, {low} to {most} times as many (stated: {percent(share)})"
            cases.append(_case(name, _together(found), "tokens"))
    return Claim(
        "A layer of more tokens than its table has",
        "Vidur's tables of three GPUs, cut: what lies beyond the cut goes on at the efficiency of the last pass before it, and "
        f"states an error that grows by {interpolation.UNKNOWN:.0%} with each factor of e, which was chosen on these.",
        "All of one sign, too fast: of passes that read their weights the arithmetic is not known. Bundled tables of layers and of "
        "products reach 4,096 tokens.",
        tuple(cases), sources,
    )  # fmt: skip


def ordered(measured: Iterable[Profile], sources: str = "") -> Claim:
    """What measured layers are moved by so that none with more tokens takes less."""
    cases = []
    for one in measured:
        after = isotonic.profile(one)
        found = []
        for tensor_parallel in one.tensor_parallel:
            rows, moved = (each.rows("dense", tensor_parallel) for each in (one, after))
            at = rows["tokens"].to_numpy().astype(np.float64)
            found.append(LeaveOneOutErrors(at, moved["time_s"].to_numpy() / rows["time_s"].to_numpy() - 1))
        cases.append(_case(f"{one.device} {one.model}", _together(found), "tokens"))
    return Claim(
        "No pass over more tokens takes less",
        "Bundled times never fall with tokens, sequences, context or bytes: where a table falls, neighbours are given the "
        "median of a block of them (isotonic regression with absolute errors). Moved over measured, layers split 1 to 8 ways.",
        "Where another kernel takes over, times do fall, and are smoothed by up to "
        f"{percent(max(case.largest for case in cases))}: low and high of a time that was moved take in what was measured.",
        tuple(cases), sources,
    )  # fmt: skip


def step(run: engine_run.EngineRun, of: Profile, sources: str = "") -> Claim:
    """Decoding steps of an engine against what a profile of the same GPU and model says."""
    errors, second = run.errors(ProfileCosts(of)), np.arange(1, run.tokens.size + 1)
    decoding, again = run.decoding, run.reading_again
    kinds = (
        ("all seconds without prompts", decoding, 0.05),
        ("of these: texts came back and were read again", decoding & again, None),
        ("of these: none came back", decoding & ~again, 0.05),
        ("of these: nobody waited", decoding & (run.waiting == 0), None),
    )
    cases = [
        _case(name, LeaveOneOutErrors(second[kept].astype(np.float64), errors[kept]), "second", asked)
        for name, kept, asked in kinds if kept.any()
    ]  # fmt: skip
    bad = errors[decoding] < -0.1
    known = int((bad & again[decoding]).sum())
    alone = float(np.median(errors[decoding & (run.waiting == 0)]))
    reading = run.prompts > 0
    beside = np.append(False, reading[:-1]) | np.append(reading[1:], False)
    near, far = (percent(float(np.median(np.abs(errors[decoding & each])))) for each in (beside, ~beside))
    return Claim(
        "A decoding step of Llama-3.1-8B on an RTX 4090, against an engine that ran",
        f"The bundled profile {of.name} (kernels alone, each by itself) against a run of vLLM of 300 requests that was logged once "
        f"a second. Taken are the {decoding.sum()} seconds without prompts in which at least {engine_run.FEWEST} texts ran: their "
        "number over the tokens a second is the time of a step. Asked is a median of 5 %.",
        f"In {bad.sum()} seconds the engine took over a tenth longer than predicted. In {known} of them more texts came back into "
        "the cache than left it, and were read again, which the log does not count as prompts: it counts each request's prompt "
        "once. A part of such a second goes into reading, and steps are fewer, not slower. Lying beside a second with prompts is "
        f"no reason: the median is {near} for those that do and {far} for others. While nobody waits, at the end, the profile is "
        f"{_sign(alone)} in the median.",
        tuple(cases), sources,
    )  # fmt: skip


# --- the same in two sources ---


def two_sources(data: Path, made: Mapping[str, Profile], sources: str = "") -> Claim:
    """The same thing on the same GPU, measured by two projects or two engines."""
    cases = []
    root = data / "gpu"
    whole = {gpu: bundled_profiles.operations(data, gpu) for gpu in ("h100", "a100")}
    frontier, ours = (
        vidur.read(root / folder / "meta-llama/Llama-2-7b-hf", model="llama-2-7b", gpu="a100")
        for folder in ("frontier/compute/a800", "vidur/compute/a100")
    )
    a, b = (each.rows("dense") for each in (frontier, ours))
    both = a.join(b, on="tokens", suffix="_other")
    at, found = both["tokens"].to_numpy().astype(np.float64), both["time_s"].to_numpy() / both["time_s_other"].to_numpy() - 1
    cases.append(_case("Llama-2-7B's layer: Frontier's A800 over Vidur's A100", LeaveOneOutErrors(at, found), "tokens"))
    for gpu, table in whole.items():
        cases.append(_case(f"{gpu}, output products: AIConfigurator over Vidur", _outputs(root, gpu, table), "tokens"))
    rows = frontier.rows("attention")
    rows = rows.filter((rows["width"] == 1) & (rows["context"] >= 256))
    context, batch = (rows[name].to_numpy().astype(np.float64) for name in ("context", "batch"))
    found = composed_layers.AttentionTimes(whole["a100"], 32, 32, 128)(context, batch) / rows["time_s"].to_numpy() - 1
    cases.append(
        _case("a100, attention: AIConfigurator (vLLM) over Frontier (FlashInfer)", LeaveOneOutErrors(context, found), "context")
    )
    cases += _engines(made)
    reduced = [case for gpu, table in whole.items() for case in _reductions(root, gpu, table)]
    cases += reduced
    most = max(float(np.exp(np.abs(np.log1p(case.errors)).max())) for case in reduced)
    return Claim(
        "The same GPU in two sources",
        "What no model can be better than: the same operation on the same GPU, measured by two projects, or with the kernels of "
        "two engines by one. Reductions are NCCL's in Vidur, waiting for each other's processes included, and in AIConfigurator "
        "those of three libraries, their geometric mean, replayed as graphs.",
        f"Two projects differ by {_range(cases, False)} in the median, as much as a layer composed of one's operations is off from "
        f"the other's, or more; the kernels of two engines in one project by {_range(cases, True)}. Reductions differ by up to "
        f"{most:.0f} times: bundled are AIConfigurator's, and what an engine waits for besides is not in them.",
        tuple(cases), sources,
    )  # fmt: skip


def _outputs(root: Path, gpu: str, table: Profile) -> LeaveOneOutErrors:
    """Products of attention's output, of three models: from a table of operations over Vidur's."""
    found = []
    known = composed_layers.Products(table)
    for model, folder in bundled_profiles.VIDUR.items():
        shape = transformer.preset(model)
        where = root / "vidur/compute" / gpu / folder
        column = "time_stats.attn_post_proj.median"
        read = imported_tables.read(where / "mlp.csv", [column, "num_tokens", "num_tensor_parallel_workers"], root=where)
        read = read.where((read.column("num_tensor_parallel_workers") == 1) & (read.column("num_tokens") <= 512))
        tokens = read.column("num_tokens", least=1)
        said = known.cold(tokens, shape.hidden, shape.heads * shape.head_dim)
        found.append(LeaveOneOutErrors(tokens, said / read.seconds(column, "ms") - 1))
    return _together(found)


def _engines(made: Mapping[str, Profile]) -> list[PredictionErrors]:
    """The products of a GPU's other engines over those of its first, where both measured a shape."""
    first: dict[str, tuple[str, Profile]] = {}
    cases = []
    for name, table in made.items():
        if table.device not in first:
            first[table.device] = name, table
            continue
        other, base = first[table.device]
        both = table.rows("gemm").join(base.rows("gemm"), on=["m", "n", "k"], suffix="_other")
        error = both["time_s"].to_numpy() / both["time_s_other"].to_numpy() - 1
        cases.append(
            _case(f"products: {name} over {other}", LeaveOneOutErrors(both["m"].to_numpy().astype(np.float64), error), "m")
        )
    return cases


def _reductions(root: Path, gpu: str, table: Profile) -> list[PredictionErrors]:
    rows, _, _ = vidur.links(root / "vidur/network" / bundled_profiles.NETWORKS[gpu])
    found = []
    for tensor_parallel in sorted({row["tensor_parallel"] for row in rows if row["part"] == "all_reduce"}):
        own = table.rows("all_reduce", tensor_parallel)
        if not own.height:
            continue
        sizes = np.array(
            [row["size"] for row in rows if row["part"] == "all_reduce" and row["tensor_parallel"] == tensor_parallel],
            dtype=np.float64,
        )
        times = np.array(
            [row["time_s"] for row in rows if row["part"] == "all_reduce" and row["tensor_parallel"] == tensor_parallel]
        )
        kept = (sizes >= float(own["size"].to_numpy().min())) & (sizes <= float(own["size"].to_numpy().max()))
        known = Surface({"size": own["size"].to_numpy()}, own["time_s"].to_numpy())
        found.append(LeaveOneOutErrors(sizes[kept], known(sizes[kept]).seconds / times[kept] - 1))
    return [_case(f"{gpu}, reductions: AIConfigurator over Vidur", _together(found), "bytes")] if found else []


# --- rooflines ---


def rooflines(measured: Sequence[fits.MeasuredLayers], sources: str = "") -> Claim:
    """Layers of models, and of GPUs, that the fit of the efficiencies has not seen."""
    cases = []
    by_model, usual = fits.unseen_models(measured), Efficiency()
    few, many = f"to {fits.FEW} tokens", f"beyond {fits.MANY} tokens"
    kinds: tuple[tuple[str, list[fits.UnseenModelErrors], float | None, float | None], ...] = (
        ("unseen model", by_model, 0.12, 0.12), ("unseen GPU", fits.unseen_gpus(measured), usual.error * 1.02, usual.compute_error),
        ("unseen GPU, one layer of 1 token measured", fits.one_measured(measured, [1]), fits.ADAPTED["error"], None),
        ("unseen GPU, layers of 1 and 512 tokens measured", fits.one_measured(measured, [1, 512]), fits.ADAPTED["error"],
         fits.ADAPTED["compute_error"]),
    )  # fmt: skip
    for kind, found, asked, asked_many in kinds:
        for gpu in dict.fromkeys(each.gpu for each in found):
            together = _together([LeaveOneOutErrors(each.tokens, each.error) for each in found if each.gpu == gpu])
            wide = together.at > fits.MANY
            cases.append(_case(f"{kind}: {gpu}, {few}", _up_to(together, fits.FEW), "tokens", asked))
            cases.append(
                _case(f"{kind}: {gpu}, {many}", LeaveOneOutErrors(together.at[wide], together.error[wide]), "tokens", asked_many)
            )
    for each in by_model:
        cases.append(_case(f"unseen model: {each.gpu} {each.model}", LeaveOneOutErrors(each.tokens, each.error), "tokens"))
    worst = max(by_model, key=lambda each: float(np.median(np.abs(each.error))))
    share = float(np.median(worst.error))
    return Claim(
        "A layer by its roofline, of a model or a GPU that the fit has not seen",
        "Four efficiencies (memory, arithmetic, elementwise, launch) fitted to measured layers but for attention: of the other "
        "models on the same GPU, or of all models on the other GPUs; and these brought nearer by one or two measured layers of "
        "another model on the GPU (`calibrate fit roofline --layer`; of the RTX 4090, of which one model was measured, of its "
        f"own). Asked are medians of 12 % over a GPU's models, on a GPU that was not seen what a roofline states "
        f"({percent(usual.error)} {few}, "
        f"{percent(usual.compute_error)} {many}), and with measured layers {percent(fits.ADAPTED['error'])} and "
        f"{percent(fits.ADAPTED['compute_error'])}.",
        f"{worst.model} is the worst of unseen models: on the {worst.gpu} it is predicted {_sign(share)} in the median. Real "
        "products take steps with their width, and a roofline none: single widths are off by up to a third. Of a GPU that was not "
        "seen all layers are off the same way, as its kernels reach more or less of its peaks than others do: the RTX 4090 reaches "
        "nearly all of them, the A100 three quarters.",
        tuple(cases), sources,
    )  # fmt: skip


def roofline_attention(measured: Sequence[fits.MeasuredAttention], efficiency: Efficiency, sources: str = "") -> Claim:
    """Attention by its roofline, table by table, with the efficiencies that come along."""
    cases = []
    for each in measured:
        shared, errors = each.shared, each.errors(efficiency)
        few = shared <= SHARED
        for what, kept in ((f"up to {SHARED} heads share one", few), (f"more than {SHARED} heads share one", ~few)):
            if kept.any():
                cases.append(PredictionErrors(f"{each.gpu} {each.engine}, {what}", errors[kept]))
    longest = max(float(np.max(1 / (1 + case.errors))) for case in cases)
    return Claim(
        "Attention by its roofline",
        "Two efficiencies for all tables: what reading the cache reaches, and a launch, those that come along; by how many heads "
        "share one of keys and values. Times that found keys and values in the cache count as if they had read them from memory.",
        "A rough guess, and the weakest part of a roofline: engines and GPUs differ by more than two numbers can say, and where "
        f"many heads share one of keys and values kernels take up to {longest:.0f} times what is predicted. Use a profile where "
        "attention matters: long contexts, large batches.",
        tuple(cases), sources,
    )  # fmt: skip


# --- others ---


def theorem(sources: str = "") -> Claim:
    """PPD's Table 3 by Theorem 4.1, alone and with one fitted cost."""
    runs, linear = ppd_table_3_fit.runs(), ppd_overheads.OVERHEADS["linear"]
    alone = ppd_overheads.fit(ppd_overheads.OVERHEADS["none"], runs).errors(runs)
    across = [error for errors in ppd_overheads.held_out(linear).values() for error in errors]
    each = [ppd_overheads.fit(linear, [other for other in runs if other is not run]).errors([run])[0] for run in runs]
    return Claim(
        "Measured times of Predictive Pipelined Decoding (Table 3 of its paper)",
        "Theorem 4.1 alone, and with one cost of each process and token, fitted on the other data set or on the three other rows.",
        "Four rows calibrate a cost and do not prove it, and all of it assumes exit layer 20, which the paper does not state.",
        (
            PredictionErrors("the theorem alone", np.array(alone)),
            PredictionErrors("one cost, fitted on the other data set", np.array(across)),
            PredictionErrors("one cost, fitted on the three other rows", np.array(each)),
        ),
        sources,
    )  # fmt: skip


def processor(files: Mapping[str, tuple[Mapping[str, object], list[dict[str, object]]]], sources: str = "") -> Claim:
    """Whole passes on a processor against the sum of their parts, timed behind other contexts."""
    cases = []
    for name, (header, rows) in files.items():
        shape = header["shape"]
        assert isinstance(shape, dict)
        for what, widths, alone in cpu_step.HELD:
            for busy in (0, 1):
                every = cpu_step.held_out(rows, shape["layers"], widths, overhead_alone=alone)
                held = [each for each in every if each.busy == busy]
                if not held:
                    continue
                found = LeaveOneOutErrors(np.array([float(each.width) for each in held]), np.array([each.error for each in held]))
                beside = ", another process at the same work" if busy else ""
                cases.append(_case(f"{name}: other {what}{beside}", found, "width", 0.05 if widths is None or alone else None))
        # Points timed again were chosen after they were seen to be off: what was there before is shown too.
        before = cpu_step.unchosen(rows)
        if len(before) < len(rows):
            held = [each for each in cpu_step.held_out(before, shape["layers"]) if each.busy]
            found = LeaveOneOutErrors(np.array([float(each.width) for each in held]), np.array([each.error for each in held]))
            cases.append(_case(f"{name}: other contexts, another process, before points were timed again", found, "width", 0.05))
    return Claim(
        "A whole pass on a processor, against the sum of its parts",
        "Layers, head, embedding and what is left of a step, timed behind two contexts, against whole passes behind others; the "
        "same widths, or others. *The overhead fitted*: what is left of a step comes from five widths, and its layers, head and "
        "embedding were timed at the width itself. Asked is a median of 5 % for these and for the same widths.",
        "Widths at which no part was timed are not to be trusted on a processor: its products change their algorithm from width to "
        "width. The machine was shared, and of the rounds over the grid the shortest pass counts. Two passes held out beside "
        "another process were far off in all three rounds, and were timed again five times for that reason: what they showed "
        "before stands here as well, and how much another process slows a pass down is a lower bound.",
        tuple(cases), sources,
    )  # fmt: skip


# --- all of them ---


def _missed(over: Sequence[PredictionErrors]) -> str:
    if not over:
        return "All that was asked for holds."
    return "Missed: " + "; ".join(f"{case.name} ({percent(case.median)})" for case in over) + "."


def _worst_by_device(cases: Sequence[PredictionErrors]) -> str:
    """The largest single error on each GPU."""
    worst: dict[str, PredictionErrors] = {}
    for case in cases:
        gpu = case.name.split()[0]
        if gpu not in worst or case.largest > worst[gpu].largest:
            worst[gpu] = case
    return "; ".join(f"{percent(case.largest)} at {case.where} on the {gpu}" for gpu, case in worst.items())


def _sign(share: float) -> str:
    """A signed error in words."""
    return f"{percent(abs(share))} too {'slow' if share > 0 else 'fast'}"


def _range(cases: Sequence[PredictionErrors], engines: bool) -> str:
    """The medians of comparisons of engines, or of projects."""
    medians = [case.median for case in cases if case.name.startswith("products:") == engines]
    return f"{percent(min(medians))} to {percent(max(medians))}"


def engines(data: Path) -> tuple[dict[str, Profile], list[str]]:
    """Every table of products there is, with its attention where that is possible; and the names of those where it is not."""
    root = data / "gpu/aiconfigurator"
    folders = {folder: gpu for gpu, (folder, _, _) in bundled_profiles.ENGINES.items()}
    made, refused = {}, []
    for folder, gpu in folders.items():
        for path in sorted((root / folder / "gemm").glob("*/*")):
            engine = f"{path.parent.name}/{path.name}"
            name = f"{gpu} {engine}"
            try:
                made[name] = aiconfigurator.read(root / folder, gpu=gpu, engine=engine)
            except ParameterError:
                made[name] = aiconfigurator.read(root / folder, gpu=gpu, engine=engine, attention=aiconfigurator.NO_ATTENTION)
                refused.append(name)
    return made, refused


def origin(data: Path, *folders: str) -> str:
    """Repositories, commits and licences of the files in these folders, as SOURCES.md has them."""
    found: dict[str, None] = {}
    for name, source in bundled_profiles.origins(data).items():
        if any(name.startswith(folder) for folder in folders):
            found[f"{source.repository} at {source.commit} ({source.licence})"] = None
    return "measured: " + "; ".join(found)


def claims(data: str | Path) -> tuple[Claim, ...]:
    """Every claim, from a folder that holds `gpu` and `SOURCES.md`."""
    root = bundled_profiles.folder_of(data)
    bundled_profiles.origins(root)
    made, refused = engines(root)
    with_attention = {name: each for name, each in made.items() if "decode" in each.parts}
    of_layers = fits.layers(root)
    operations = {gpu: made[f"{gpu} {engine}"] for gpu, (_, engine, _) in bundled_profiles.ENGINES.items()}
    whole, a40 = (
        [vidur.read(root / "gpu/vidur/compute" / gpu / folder, model=model, gpu=gpu)
         for gpu in gpus for model, folder in bundled_profiles.VIDUR.items()]
        for gpus in (("h100", "a100"), ("a40",))
    )  # fmt: skip
    aic, vid, sim = "gpu/aiconfigurator", "gpu/vidur/", "gpu/llmservingsim"
    published = "published: S. Yang et al., TMLR 2024, arXiv:2307.05908, Table 3"
    return (
        products(made, origin(root, aic)),
        products_between(made, origin(root, aic)),
        attention(with_attention, refused, origin(root, aic)),
        composed(operations, whole, sources=origin(root, aic, vid)),
        between(small_kernels.measured(root, small_kernels.HELD), origin(root, vid)),
        beyond([*whole, *a40], origin(root, vid)),
        ordered([*whole, *a40], origin(root, vid)),
        step(engine_run.read(root / RUN), profile_files.load("rtx-4090-llama-3.1-8b"), origin(root, sim)),
        two_sources(root, made, origin(root, aic, vid, "gpu/frontier")),
        rooflines(of_layers, origin(root, vid, sim)),
        roofline_attention([fits.attention_of(made[f"{gpu} {engine}"]) for gpu, _, engine in fits.TABLES], Efficiency(),
                           origin(root, aic)),
        theorem(published),
        processor({name: cpu_step.rows_of(name) for name in cpu_step.names()}, "measured: `calibrate layers` on a processor"),
    )  # fmt: skip
