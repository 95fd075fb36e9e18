"""Claims of `calibrate report`: errors of predictions against all available measured times.

Each claim compares measured times with their predictions, case by case. Errors are relative: predicted over measured, minus 1.
Nothing is entered by hand: numbers in sentences are computed together with the table below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from calibrate.fits import cpu_step, engine_run, ppd_overheads, small_kernels
from calibrate.fits import roofline_fit as fits
from calibrate.importers import aiconfigurator, bundled_profiles, imported_tables, vidur
from model.architectures import published_shapes
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
"""Values of m that every dense grid has."""
NARROW = 32
"""Largest number of rows of a product when short drafts are verified."""
TARGET_90 = 0.17
"""Target of the 90th percentile of the leave-one-out errors of products [-]."""
MAX_HEADS_PER_KV_HEAD = 16
"""Largest number of heads per KV head in the models known here."""
MEDIAN_TARGETS = {"h100": 0.022, "a100": 0.03, "l40s": 0.03}
"""Targets of the median leave-one-out error of products, by GPU [-]."""


@dataclass(frozen=True)
class Target:
    """Target of another quantity than an error: its value, and the largest that is allowed [-]."""

    name: str
    value: float
    most: float

    @property
    def met(self) -> bool:
        """True if the target is met."""
        return self.value <= self.most


@dataclass(frozen=True, eq=False)
class PredictionErrors:
    """Relative errors of one case, shape (predictions,) [-], and the coordinate of the largest.

    `target`, `target_90` and `target_worst` are targets of median, 90th percentile and largest error; `targets` are those of other
    quantities, and `columns` further columns of the table of a claim, by heading.
    """

    name: str
    errors: Floats
    where: str = ""
    target: float | None = None
    target_90: float | None = None
    target_worst: float | None = None
    targets: tuple[Target, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.errors.size or not np.isfinite(self.errors).all():
            raise ParameterError(f"errors of {self.name!r} must be at least one finite number, got {self.errors.size} errors")

    @property
    def median(self) -> float:
        """Median absolute error [-]."""
        return float(np.median(np.abs(self.errors)))

    @property
    def percentile_90(self) -> float:
        """90th percentile of the absolute errors [-]."""
        return float(np.percentile(np.abs(self.errors), 90))

    @property
    def largest(self) -> float:
        """Largest absolute error [-]."""
        return float(np.abs(self.errors).max())

    @property
    def met(self) -> bool:
        """True if the targets are met."""
        found = ((self.median, self.target), (self.percentile_90, self.target_90), (self.largest, self.target_worst))
        return all(most is None or value <= most for value, most in found) and all(each.met for each in self.targets)


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim: what is predicted and how (`description`), its known weaknesses, its cases, and the sources of measured times."""

    title: str
    description: str
    weaknesses: str
    cases: tuple[PredictionErrors, ...]
    sources: str

    @property
    def by_error(self) -> list[PredictionErrors]:
        """Cases in descending order of the median."""
        return sorted(self.cases, key=lambda case: -case.median)

    def case(self, name: str) -> PredictionErrors:
        """Return the case of this name."""
        found = {case.name: case for case in self.cases}
        if name not in found:
            raise ParameterError(f"claim {self.title!r} has no case {name!r}; there are {', '.join(found)}")
        return found[name]


def percent(share: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.0312)
    '3.1 %'
    """
    return f"{100 * share:.1f} %"


def _case(
    name: str, found: LeaveOneOutErrors, axis: str, target: float | None = None, target_90: float | None = None
) -> PredictionErrors:
    where = found.at[np.argmax(np.abs(found.error))]
    return PredictionErrors(name, found.error, f"{axis} {where:,.0f}", target, target_90)


def _up_to(found: LeaveOneOutErrors, most: float) -> LeaveOneOutErrors:
    kept = found.at <= most
    return LeaveOneOutErrors(found.at[kept], found.error[kept])


def _together(found: Sequence[LeaveOneOutErrors]) -> LeaveOneOutErrors:
    return LeaveOneOutErrors(np.concatenate([each.at for each in found]), np.concatenate([each.error for each in found]))


def is_dense(table: Profile) -> bool:
    """Return True if a table of products has every m up to 17."""
    return {*DENSE} <= {*table.rows("gemm")["m"].to_list()}


# --- Products and attention, leave-one-out ---


def products(made: Mapping[str, Profile], sources: str = "") -> Claim:
    """Leave-one-out errors of products, predicted from neighbouring shapes (`composed_layers.gemm_left_out`)."""
    cases = []
    for name, table in made.items():
        found = composed_layers.gemm_left_out(table)
        cases.append(_case(f"{name}, all m", found, "m", MEDIAN_TARGETS.get(table.device), TARGET_90))
        cases.append(_case(f"{name}, m to {NARROW}", _up_to(found, NARROW), "m", 0.01 if is_dense(table) else None))
    over, count = [case for case in cases if not case.met], len(composed_layers.SHAPES_NEAR) * len(composed_layers.M_NEAR)
    return Claim(
        "Matrix products, leave-one-out",
        "A time is predicted from a neighbouring shape in n or k: its time at the same m, times the ratio of the two shapes at a "
        f"nearby m. The prediction is the median over {count} such pairs of neighbours, which were selected on tables of the H100 "
        "and the A100 only. This is the error of one missing time in a table that has all its neighbours; the next section has "
        f"the errors at an m that was not measured for any shape. Targets are medians of 2.2 % (H100) and 3 %, {TARGET_90:.0%} for "
        f"the 90th percentile, and a median of 1 % for m to {NARROW} if every m to {DENSE[-1]} was measured.",
        f"{_missed(over)} Errors of single products are far larger where the kernel changes: {_worst_by_device(cases)}.",
        tuple(cases), sources,
    )  # fmt: skip


def products_between(made: Mapping[str, Profile], sources: str = "") -> Claim:
    """Leave-one-out errors of products interpolated in m within their shape, as in a profile, and interpolated in n and k."""
    cases = []
    for name, table in made.items():
        found = composed_layers.gemm_left_out(table, ())
        cases.append(_case(f"{name}, interpolated m, all m", found, "m"))
        cases.append(_case(f"{name}, interpolated m, m to {NARROW}", _up_to(found, NARROW), "m"))
        cases.append(_case(f"{name}, interpolated shape", composed_layers.shapes_left_out(table), "m"))
    return Claim(
        "Matrix products at an m or a shape that was not measured",
        "The errors that users meet. A width between those of a profile is interpolated in logarithms, without further "
        "information; a model whose n or k lies between those of a table is interpolated by efficiency. Each time is left out and "
        "predicted from its two neighbours in m, or in n and then in k.",
        "Between coarse values of m, interpolation misses steps where kernels change. The neighbours of a point that is left out "
        "are twice as far apart as those of a point between measured ones, so the grids are better than these figures.",
        tuple(cases), sources,
    )  # fmt: skip


def attention(made: Mapping[str, Profile], refused: Sequence[str] = (), sources: str = "") -> Claim:
    """Leave-one-out errors of attention, with and without a correction by shapes that read equally many bytes."""
    cases = []
    for name, table in made.items():
        cases.append(_case(f"{name}, corrected", composed_layers.attention_left_out(table), "context", 0.03, TARGET_90))
        cases.append(_case(f"{name}, interpolated", composed_layers.attention_left_out(table, alike=False), "context"))
    interpolated = [case for case in cases if case.name.endswith("interpolated")]
    listed = ", ".join(refused)
    more = f" Refused, because they would exceed the memory bandwidth, as if half of the cache were read: {listed}."
    return Claim(
        "Attention of one new token per sequence, leave-one-out",
        "A time is interpolated between its neighbours in context (*interpolated*, as in a profile), or also corrected by the "
        "errors of shapes that read equally many bytes (*corrected*). The target is a median of 3 % for the latter.",
        f"Interpolated times have a median error of up to {percent(max(case.median for case in interpolated))}: contexts double "
        "from row to row, and kernels change in between." + (more if refused else ""),
        tuple(cases), sources,
    )  # fmt: skip


# --- Layers and steps ---


def composed(
    operations: Mapping[str, Profile],
    measured: Iterable[Profile],
    tensor_parallel: Sequence[int] = bundled_profiles.TENSOR_PARALLEL,
    sources: str = "",
) -> Claim:
    """Errors of composed layers against measured ones of the same GPU, by another engine."""
    cases, least = [], np.inf
    whole = [one for one in measured if one.device in operations]
    found = {(one.device, one.model, size): bundled_profiles.differences(operations[one.device], one, (size,),
        most=bundled_profiles.RANGES[-1])
             for one in whole for size in tensor_parallel}  # fmt: skip
    for one in whole:
        for size in tensor_parallel:
            few = _up_to(found[one.device, one.model, size], bundled_profiles.RANGES[0])
            cases.append(
                _case(f"{one.device} {one.model}{_split(size)}, to {bundled_profiles.RANGES[0]} tokens", few, "tokens", 0.06)
            )
            least = min(least, float(one.rows("dense", size)["time_s"].to_numpy().min()))
    within, biased = [], []
    for gpu in dict.fromkeys(one.device for one in whole):
        held = [one for one in whole if one.device == gpu and one.model in small_kernels.HELD_OUT]
        for size in tensor_parallel if held else ():
            together = _together([found[gpu, one.model, size] for one in held])
            for low, most in pairwise((bundled_profiles.RANGES[0], *bundled_profiles.RANGES[1:])):
                kept = (together.at > low) & (together.at <= most)
                large = LeaveOneOutErrors(together.at[kept], together.error[kept])
                cases.append(_case(f"{gpu}, held-out models{_split(size)}, {low + 1:,} to {most:,} tokens", large, "tokens", 0.21))
                biased.append((f"{gpu}{_split(size)}", float(np.median(large.error))))
        for one in held:
            others = [other for other in whole if other.device == gpu and other.model != one.model]
            stated = replace(
                operations[gpu],
                facts={composed_layers.LAYER_ERRORS: bundled_profiles.layer_errors(operations[gpu], others, tensor_parallel)},
            )
            for size in tensor_parallel:
                errors = found[gpu, one.model, size]
                within.append(np.abs(errors.error) / composed_layers.layer_error(stated, errors.at, size))
    fast = max(biased, key=lambda each: abs(each[1])) if biased else ("", 0.0)
    shares = [float(np.mean(np.concatenate(within) <= times)) for times in (1, 2)] if within else [0.0, 0.0]
    return Claim(
        "Layers composed of operations, against measured layers",
        "Products are from AIConfigurator's tables; norms, rotation and activation follow from two numbers fitted to other "
        f"models; rows beyond a tile of {composed_layers.TILE} are padded to whole tiles, which was selected on the A40. Measured "
        "layers are Vidur's, of the same GPU and model but of other engines and years. *Held-out models*, "
        f"{' and '.join(small_kernels.HELD_OUT)}, were used in no fit or selection. Targets are medians of 6 % "
        f"up to {bundled_profiles.RANGES[0]} tokens and of 21 % beyond.",
        f"Beyond {bundled_profiles.RANGES[0]} tokens composed layers are too fast nearly everywhere, most on the {fast[0]}: "
        f"{_sign(fast[1])} in the median. The cause is the products: kernels of 2025 against those of 2023, whose steps between "
        "256 and 1,024 tokens are larger; weights far larger than any cache differ as much. A profile states an error by "
        f"tensor_parallel and tokens: of the layers of models that it was not derived from, {shares[0]:.0%} are within this error "
        f"and {shares[1]:.0%} within twice this error. A layer takes as little as {least * 1e6:.0f} us at the largest "
        "tensor_parallel.",
        tuple(cases), sources,
    )  # fmt: skip


def _split(tensor_parallel: int) -> str:
    return f", tensor_parallel {tensor_parallel}" if tensor_parallel > 1 else ""


def elementwise_kernels(kernels: Sequence[small_kernels.ElementwiseKernels], sources: str = "") -> Claim:
    """Errors of the elementwise kernels of a layer, for held-out models."""
    cases = []
    for gpu in dict.fromkeys(each.profile.device for each in kernels):
        on_gpu = [each for each in kernels if each.profile.device == gpu]
        together = _together([LeaveOneOutErrors(each.tokens, each.predicted() / each.seconds - 1) for each in on_gpu])
        for low, most in pairwise((0, *bundled_profiles.RANGES)):
            kept = (together.at > low) & (together.at <= most)
            found = LeaveOneOutErrors(together.at[kept], together.error[kept])
            cases.append(_case(f"{gpu}, held-out models, {low + 1:,} to {most:,} tokens", found, "tokens"))
    return Claim(
        "Norms, rotation, activation and additions of a layer",
        f"Each kernel is a launch, plus hidden states read and written at {composed_layers.SMALL_SHARE:.0%} of the bandwidth, or "
        f"at {composed_layers.SMALL_LANE / 1e9:.1f} GB/s per block if few tokens keep few blocks busy. The two numbers were "
        f"fitted to {' and '.join(small_kernels.FITTED)} on three GPUs, and tested on {' and '.join(small_kernels.HELD_OUT)}.",
        "Such kernels reach a larger share of the bandwidth on the A40 than on the A100 and the H100: one share for all is too "
        "slow on the first and too fast on the others.",
        tuple(cases), sources,
    )  # fmt: skip


def extrapolated_layers(measured: Iterable[Profile], sources: str = "") -> Claim:
    """Errors of extrapolated layers: tables are cut, and the times beyond the cut are predicted."""
    whole, cases = [*measured], []
    for last in (64, 512):
        for low, most in ((1, 2), (2, 4), (4, 8)):
            found, stated = [], []
            for one in whole:
                cut = replace(one, table=one.table.filter((one.table["part"] != "dense") | (one.table["tokens"] <= last)))
                for tensor_parallel in one.tensor_parallel:
                    rows = one.rows("dense", tensor_parallel)
                    rows = rows.filter((rows["tokens"] > low * last) & (rows["tokens"] <= most * last))
                    at, seconds = (rows[name].to_numpy().astype(np.float64) for name in ("tokens", "time_s"))
                    guess = ProfileCosts(cut, tensor_parallel=tensor_parallel).part("dense", at)
                    assert guess is not None
                    found.append(LeaveOneOutErrors(at, guess.seconds / seconds - 1))
                    stated.append(guess.error)
            share = float(np.median(np.concatenate(stated)))
            name = f"cut at {last} tokens, {low} to {most} times as many (stated: {percent(share)})"
            cases.append(_case(name, _together(found), "tokens"))
    return Claim(
        "Layers over more tokens than their table",
        "Vidur's tables of three GPUs are cut. Beyond the cut, times follow from the efficiency of the last pass before it, with "
        f"a stated error that grows by {interpolation.EXTRAPOLATION_ERROR:.0%} per factor e, which was selected on these tables.",
        "All errors have one sign, too fast: memory-bound passes do not show how fast arithmetic is. Bundled tables of layers and "
        "of products reach 4,096 tokens.",
        tuple(cases), sources,
    )  # fmt: skip


def monotonic_layers(measured: Iterable[Profile], sources: str = "") -> Claim:
    """Changes of measured layers by isotonic regression (`model.hardware.isotonic`)."""
    cases = []
    for one in measured:
        after = isotonic.isotonic_profile(one)
        found = []
        for tensor_parallel in one.tensor_parallel:
            rows, moved = (each.rows("dense", tensor_parallel) for each in (one, after))
            at = rows["tokens"].to_numpy().astype(np.float64)
            found.append(LeaveOneOutErrors(at, moved["time_s"].to_numpy() / rows["time_s"].to_numpy() - 1))
        cases.append(_case(f"{one.device} {one.model}", _together(found), "tokens"))
    return Claim(
        "Monotonic times: no pass over more tokens takes less",
        "Bundled times never fall with tokens, sequences, context or bytes: where a table falls, neighbours take the median of "
        "their block (isotonic regression with absolute errors). Adjusted over measured times, for tensor_parallel 1 to 8.",
        "Where the kernel changes, real times do fall, and are smoothed by up to "
        f"{percent(max(case.largest for case in cases))}; low and high of an adjusted time include the measured values.",
        tuple(cases), sources,
    )  # fmt: skip


def step(run: engine_run.EngineRun, profile: Profile, sources: str = "") -> Claim:
    """Errors of decoding steps of an engine, predicted from a profile of the same GPU and model."""
    errors, second = run.errors(ProfileCosts(profile)), np.arange(1, run.tokens.size + 1)
    decoding, recomputing = run.decoding, run.recomputing
    kinds = (
        ("all seconds without prompts", decoding, 0.05),
        ("of these: with recomputation", decoding & recomputing, None),
        ("of these: without recomputation", decoding & ~recomputing, 0.05),
        ("of these: no sequence waited", decoding & (run.waiting == 0), None),
    )
    cases = [
        _case(name, LeaveOneOutErrors(second[kept].astype(np.float64), errors[kept]), "second", asked)
        for name, kept, asked in kinds if kept.any()
    ]  # fmt: skip
    slow = errors[decoding] < -0.1
    explained = int((slow & recomputing[decoding]).sum())
    final = float(np.median(errors[decoding & (run.waiting == 0)]))
    reading = run.prompts > 0
    adjacent = np.append(False, reading[:-1]) | np.append(reading[1:], False)
    near, far = (percent(float(np.median(np.abs(errors[decoding & each])))) for each in (adjacent, ~adjacent))
    return Claim(
        "Decoding steps of Llama-3.1-8B on an RTX 4090, against a real engine",
        f"The bundled profile {profile.name} (times of single kernels) against a run of vLLM with 300 requests that was logged "
        f"once a second. Compared are the {decoding.sum()} seconds without prompts in which at least {engine_run.MIN_RUNNING} "
        "sequences ran: their number over the tokens per second is the measured time of a step. The target is a median of 5 %.",
        f"In {slow.sum()} seconds the engine took over a tenth longer than predicted. In {explained} of them more sequences were "
        "resumed than preempted; the engine recomputed their prompts, which its log does not count again. A part of such a second "
        "is prefill, and steps are fewer, not slower. A neighbouring second with prompts does not explain it: the median error is "
        f"{near} next to such seconds and {far} elsewhere. At the end, when no sequence waits, the profile is {_sign(final)} in "
        "the median.",
        tuple(cases), sources,
    )  # fmt: skip


# --- The same quantity in two sources ---


def two_sources(data: Path, made: Mapping[str, Profile], sources: str = "") -> Claim:
    """Differences between two projects, or two engines, that measured the same operation on the same GPU."""
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
        "A lower bound of the error of any model: the same operation on the same GPU, measured by two projects, or by one project "
        "with the kernels of two engines. Reductions are NCCL's in Vidur, including the wait for other processes, and the "
        "geometric mean of three libraries, replayed as graphs, in AIConfigurator.",
        f"Two projects differ by {_range(cases, False)} in the median, at least as much as layers composed from one project "
        f"differ from measured layers of the other; the kernels of two engines in one project differ by {_range(cases, True)}. "
        f"Reductions differ by up to {most:.0f} times: AIConfigurator's are bundled, which exclude the wait for other processes.",
        tuple(cases), sources,
    )  # fmt: skip


def _outputs(root: Path, gpu: str, table: Profile) -> LeaveOneOutErrors:
    """Differences of attention's output products of three models: a table of operations over Vidur's."""
    found = []
    tabulated = composed_layers.Products(table)
    for model, folder in bundled_profiles.VIDUR.items():
        shape = published_shapes.preset(model)
        where = root / "vidur/compute" / gpu / folder
        column = "time_stats.attn_post_proj.median"
        read = imported_tables.read(where / "mlp.csv", [column, "num_tokens", "num_tensor_parallel_workers"], root=where)
        read = read.where((read.column("num_tensor_parallel_workers") == 1) & (read.column("num_tokens") <= 512))
        tokens = read.column("num_tokens", least=1)
        seconds = tabulated.cold(tokens, shape.hidden, shape.heads * shape.head_dim)
        found.append(LeaveOneOutErrors(tokens, seconds / read.seconds(column, "ms") - 1))
    return _together(found)


def _engines(made: Mapping[str, Profile]) -> list[PredictionErrors]:
    """Differences of products: a GPU's other engines over its first, at shapes that both measured."""
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


# --- Rooflines ---


def rooflines(measured: Sequence[fits.MeasuredLayers], sources: str = "") -> Claim:
    """Errors of rooflines on models, and on GPUs, that the fit of the efficiencies has not seen."""
    cases = []
    by_model, usual = fits.unseen_models(measured), Efficiency()
    few, many = f"to {fits.MEMORY_BOUND_TOKENS} tokens", f"beyond {fits.COMPUTE_BOUND_TOKENS} tokens"
    kinds: tuple[tuple[str, list[fits.UnseenModelErrors], float | None, float | None], ...] = (
        ("unseen model", by_model, 0.12, 0.12), ("unseen GPU", fits.unseen_gpus(measured), usual.error * 1.02, usual.compute_error),
        ("unseen GPU, one layer of 1 token measured", fits.errors_with_one_measured(measured, [1]),
         fits.ADAPTED_ERRORS["error"], None),
        ("unseen GPU, layers of 1 and 512 tokens measured", fits.errors_with_one_measured(measured, [1, 512]),
         fits.ADAPTED_ERRORS["error"], fits.ADAPTED_ERRORS["compute_error"]),
    )  # fmt: skip
    for kind, found, asked, asked_many in kinds:
        for gpu in dict.fromkeys(each.gpu for each in found):
            together = _together([LeaveOneOutErrors(each.tokens, each.error) for each in found if each.gpu == gpu])
            large = together.at > fits.COMPUTE_BOUND_TOKENS
            cases.append(_case(f"{kind}: {gpu}, {few}", _up_to(together, fits.MEMORY_BOUND_TOKENS), "tokens", asked))
            cases.append(
                _case(f"{kind}: {gpu}, {many}", LeaveOneOutErrors(together.at[large], together.error[large]), "tokens", asked_many)
            )
    for each in by_model:
        cases.append(_case(f"unseen model: {each.gpu} {each.model}", LeaveOneOutErrors(each.tokens, each.error), "tokens"))
    worst = max(by_model, key=lambda each: float(np.median(np.abs(each.error))))
    share = float(np.median(worst.error))
    return Claim(
        "Layers by roofline, for a model or a GPU that the fit has not seen",
        "Four efficiencies (memory, arithmetic, elementwise, launch) are fitted to measured layers without attention: of the "
        "other models on the same GPU, or of all models on the other GPUs. The latter are then adapted to one or two measured "
        "layers of another model on the GPU (`calibrate fit roofline --layer`), or of the same model on the RTX 4090, which has "
        "only one. Targets are medians of 12 % over a GPU's models; on an unseen GPU the errors that a roofline states "
        f"({percent(usual.error)} {few}, {percent(usual.compute_error)} {many}); and with measured layers "
        f"{percent(fits.ADAPTED_ERRORS['error'])} and {percent(fits.ADAPTED_ERRORS['compute_error'])}.",
        f"The worst of the unseen models is {worst.model}: on the {worst.gpu} it is predicted {_sign(share)} in the median. The "
        "time of real products grows in steps with the number of tokens, that of a roofline does not: errors at single widths "
        "reach a third. On an unseen GPU the errors of all layers have the same sign, because its kernels reach a larger or "
        "smaller share of its peaks than those of other GPUs: nearly 100 % on the RTX 4090, three quarters on the A100.",
        tuple(cases), sources,
    )  # fmt: skip


def roofline_attention(measured: Sequence[fits.MeasuredAttention], efficiency: Efficiency, sources: str = "") -> Claim:
    """Errors of the roofline of attention, table by table, with the default efficiencies."""
    cases = []
    for each in measured:
        shared, errors = each.shared, each.errors(efficiency)
        few = shared <= MAX_HEADS_PER_KV_HEAD
        most = f"{MAX_HEADS_PER_KV_HEAD} heads per KV head"
        for what, kept in ((f"up to {most}", few), (f"more than {most}", ~few)):
            if kept.any():
                cases.append(PredictionErrors(f"{each.gpu} {each.engine}, {what}", errors[kept]))
    longest = max(float(np.max(1 / (1 + case.errors))) for case in cases)
    return Claim(
        "Attention by roofline",
        "The two default efficiencies (the share of the bandwidth that reading the KV cache reaches, and a launch) are used for "
        "all tables, grouped by heads per KV head. Measured times are at least those of reading keys and values from memory.",
        "A rough estimate, and the weakest part of a roofline: two numbers cannot describe the differences between engines and "
        f"GPUs, and with many heads per KV head kernels take up to {longest:.0f} times as long as predicted. Use a profile where "
        "attention matters: long contexts, large batches.",
        tuple(cases), sources,
    )  # fmt: skip


# --- Other claims ---


def theorem(sources: str = "") -> Claim:
    """Errors of Theorem 4.1 on PPD's Table 3, without and with a fitted cost."""
    runs, linear = ppd_table_3_fit.runs(), ppd_overheads.OVERHEADS["linear"]
    alone = ppd_overheads.fit(ppd_overheads.OVERHEADS["none"], runs).errors(runs)
    across = [error for errors in ppd_overheads.held_out(linear).values() for error in errors]
    each = [ppd_overheads.fit(linear, [other for other in runs if other is not run]).errors([run])[0] for run in runs]
    return Claim(
        "Measured times of Predictive Pipelined Decoding (Table 3 of its paper)",
        "Theorem 4.1 alone, and with one cost per process and token, fitted on the other data set or on the three other rows.",
        "Four rows calibrate a cost but do not prove it, and all results assume exit layer 20, which the paper does not state.",
        (
            PredictionErrors("the theorem alone", np.array(alone)),
            PredictionErrors("one cost, fitted on the other data set", np.array(across)),
            PredictionErrors("one cost, fitted on the three other rows", np.array(each)),
        ),
        sources,
    )  # fmt: skip


def processor(files: Mapping[str, tuple[Mapping[str, object], list[dict[str, object]]]], sources: str = "") -> Claim:
    """Errors of the sum of the parts of a pass on a CPU, at held-out contexts and widths."""
    cases = []
    for name, (header, rows) in files.items():
        shape = header["shape"]
        assert isinstance(shape, dict)
        for what, widths, alone in cpu_step.HOLD_OUTS:
            for busy in (0, 1):
                every = cpu_step.held_out(rows, shape["layers"], widths, overhead_alone=alone)
                held = [each for each in every if each.busy == busy]
                if not held:
                    continue
                found = LeaveOneOutErrors(np.array([float(each.width) for each in held]), np.array([each.error for each in held]))
                loaded = ", next to another process" if busy else ""
                cases.append(_case(f"{name}: other {what}{loaded}", found, "width", 0.05 if widths is None or alone else None))
        # Points were timed again because of their errors, so the earlier result is shown, too.
        whole_rounds = cpu_step.unselected_rows(rows)
        if len(whole_rounds) < len(rows):
            held = [each for each in cpu_step.held_out(whole_rounds, shape["layers"]) if each.busy]
            found = LeaveOneOutErrors(np.array([float(each.width) for each in held]), np.array([each.error for each in held]))
            name_ = f"{name}: other contexts, next to another process, before points were timed again"
            cases.append(_case(name_, found, "width", 0.05))
    return Claim(
        "Whole passes on a CPU, against the sum of their parts",
        "Layers, head, embedding and overhead per step are timed at two contexts; their sum is compared with whole passes at "
        "other contexts, at the same or at other widths. *Overhead fitted*: the overhead comes from five widths, and layers, head "
        "and embedding were timed at the width itself. The target is a median of 5 % for these cases and for the same widths.",
        "At widths where no part was timed predictions are unreliable on a CPU, because its matrix products change their "
        "algorithm with the width. The machine was shared, and the shortest of several rounds is used. Two held-out passes next "
        "to another process had large errors in all three rounds, and were therefore timed again five times: the earlier result "
        "is also shown here, and the slowdown by another process is a lower bound.",
        tuple(cases), sources,
    )  # fmt: skip


# --- All claims ---


def _missed(over: Sequence[PredictionErrors]) -> str:
    if not over:
        return "All targets are met."
    return "Missed: " + "; ".join(f"{case.name} ({percent(case.median)})" for case in over) + "."


def _worst_by_device(cases: Sequence[PredictionErrors]) -> str:
    """Return a clause with the largest single error on each GPU."""
    worst: dict[str, PredictionErrors] = {}
    for case in cases:
        gpu = case.name.split()[0]
        if gpu not in worst or case.largest > worst[gpu].largest:
            worst[gpu] = case
    return "; ".join(f"{percent(case.largest)} at {case.where} on the {gpu}" for gpu, case in worst.items())


def _sign(share: float) -> str:
    """Format a signed error in words."""
    return f"{percent(abs(share))} too {'slow' if share > 0 else 'fast'}"


def _range(cases: Sequence[PredictionErrors], engines: bool) -> str:
    """Format the range of the medians over comparisons of engines, or of projects."""
    medians = [case.median for case in cases if case.name.startswith("products:") == engines]
    return f"{percent(min(medians))} to {percent(max(medians))}"


def engines(data: Path) -> tuple[dict[str, Profile], list[str]]:
    """Read every table of products, with its attention if that is physically possible; also return the names of the others."""
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
    """Return the repositories, commits and licences of the files in these folders, as listed in SOURCES.md."""
    found: dict[str, None] = {}
    for name, source in bundled_profiles.origins(data).items():
        if any(name.startswith(folder) for folder in folders):
            found[f"{source.repository} at {source.commit} ({source.licence})"] = None
    return "measured: " + "; ".join(found)


def claims(data: str | Path) -> tuple[Claim, ...]:
    """Compute every claim, from a folder that holds `gpu` and `SOURCES.md`."""
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
        elementwise_kernels(small_kernels.measured(root, small_kernels.HELD_OUT), origin(root, vid)),
        extrapolated_layers([*whole, *a40], origin(root, vid)),
        monotonic_layers([*whole, *a40], origin(root, vid)),
        step(engine_run.read(root / RUN), profile_files.load("rtx-4090-llama-3.1-8b"), origin(root, sim)),
        two_sources(root, made, origin(root, aic, vid, "gpu/frontier")),
        rooflines(of_layers, origin(root, vid, sim)),
        roofline_attention([fits.attention_of(made[f"{gpu} {engine}"]) for gpu, _, engine in fits.TABLES], Efficiency(),
                           origin(root, aic)),
        theorem(published),
        processor({name: cpu_step.rows_of(name) for name in cpu_step.names()}, "measured: `calibrate layers` on a CPU"),
    )  # fmt: skip
