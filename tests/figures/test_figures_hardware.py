"""Figures of profiles: drawn values are those of the table and the cost model, and labels state the provenance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from typer.testing import CliRunner

import figures
import sim
from figures.common import provenance
from figures.of_hardware import layer_time, pass_cost, reached_peaks
from figures.of_theory import largest_batch
from model.architectures.transformer import preset
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.hardware import profile_files
from model.hardware.cost_models import Estimate, UniformLayers, memory, pass_time
from model.hardware.devices import DEVICES
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_costs import ProfileCosts, shape_of
from model.hardware.roofline import Efficiency, Roofline
from model.methods.speculative import theory as speculative
from sim.commands.sim_app import app
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import lines
from tests.support.figure_checks import odd_dashes, shown

MODELS = tuple(name for name in profile_files.names() if profile_files.load(name).kind == "model")
MEASURED, COMPOSED, TAKEN_OVER = "h100-llama-2-7b", "h100-llama-2-13b", "a40-llama-2-7b"
CONTEXTS = (128, 512, 2048)
PEAKS = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
DRAFT = UniformLayers(preset("llama-68m"), 5e-4)
"""A draft model with passes of 1 ms at every batch."""


def all_text(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def hollow(line: Line2D) -> bool:
    return to_hex(line.get_markerfacecolor()) == "#ffffff"  # type: ignore[arg-type]


def taken_s(width: int, context: int, batch: int) -> float:
    return 1e-5 * (1 + width * batch / 8 + context / 999)


@pytest.fixture
def whole(tmp_path: Path) -> Profile:
    """A measured profile of layers that were timed as wholes."""
    shape = preset("llama-68m")
    rows = [
        {"part": "layer", "width": width, "context": context, "batch": batch, "time_s": taken_s(width, context, batch)}
        for width in (1, 4)
        for context in (128, 1024)
        for batch in (1, 8)
    ]
    return Profile(
        "mine", "mine", "llama-68m", "bfloat16", "torch", "eager", "model", "measured", "2026-01-01", 1e12, 1e14, 0.0,
        table_of(rows), (Source("mine", "mine.csv", parts=("layer",)),), shape=vars(shape),
    )  # fmt: skip


# --- Provenance of times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_part_is_measured_where_the_notes_do_not_say_composed(name: str) -> None:
    found = profile_files.load(name)
    said = " ".join(found.notes)
    for tensor_parallel in found.tensor_parallel:
        assert provenance.is_measured(found, "dense", tensor_parallel) == (
            found.provenance == "measured" or "dense: measured" in said
        )
        if found.provenance == "composed" and provenance.is_measured(found, "attention", tensor_parallel):
            listed = [note for note in found.notes if note.startswith("attention split") and "composed" in note]
            assert any("attention" in source.parts for source in found.sources)
            assert all(
                str(tensor_parallel) not in note.partition(" split ")[2].partition(" ways")[0].split(", ") for note in listed
            )


def test_an_efficiency_of_another_device_is_called_assumed() -> None:
    assert "assumed" in provenance.of_part(profile_files.load(TAKEN_OVER), "attention")
    assert "assumed" not in provenance.of_part(profile_files.load(TAKEN_OVER), "dense")
    roof = Roofline(preset("llama-2-7b"), 1e12, 1e14)
    assert provenance.of_hardware(roof) == roof.provenance


def test_extrapolation_beyond_the_table_is_noted(whole: Profile) -> None:
    assert provenance.extrapolated_parts(whole, width=4, context=1024, batch=8) == ""
    assert provenance.extrapolated_parts(whole, width=5, context=1024, batch=9) == "beyond the table: layers from width 4, batch 8"
    figure = layer_time.draw([whole], batches=(1, 32), longest=1024)
    assert "measured\nbeyond the table: layers from batch 8" in all_text(figure)
    costs = {"mine": ProfileCosts(whole)}
    assert "layers from width 4" in all_text(pass_cost.draw(costs, batches=(1,), widest=8, context=512))
    options: dict[str, Any] = {"acceptance_rate": 0.5, "draft_length": 4, "source": "assumed", "most": 8}
    assert "beyond the table:\nlayers from width 4, context 1024" in all_text(largest_batch.draw(costs, {"mine": DRAFT}, **options))
    assert provenance.extrapolated_parts_of(UniformLayers(preset("llama-68m"), 1.0), width=99, context=9, batch=9) == ""


# --- Roofline -----------------------------------------------------------------------------------------------------------


def test_points_are_the_rows_and_roofs_the_peaks() -> None:
    found = [profile_files.load(MEASURED), profile_files.load(COMPOSED)]
    figure = reached_peaks.draw(found)
    drawn = lines(figure.axes[0])
    for each in found:
        rows = dict(each.rows("dense").select("tokens", "time_s").rows())
        shape = shape_of(each)
        weights = sum(inputs * outputs for inputs, outputs in shape.matrices)
        states = sum(inputs + outputs for inputs, outputs in shape.matrices)
        intensity, rate = xy(drawn[f"points {each.name}"])
        widths = [width for width in sorted(rows) if width & (width - 1) == 0]
        assert rate == pytest.approx([2 * weights * width / rows[width] for width in widths])
        assert intensity == pytest.approx([weights * width / (weights + width * states) for width in widths])
        at, roof = xy(drawn[f"roof {each.device}"])
        assert roof == pytest.approx(np.minimum(each.rate, each.bandwidth * at))
        assert at[1] == pytest.approx(each.rate / each.bandwidth)
        model = Roofline(shape, each.bandwidth, each.rate)
        assert xy(drawn[f"model {each.name}"])[1] == pytest.approx([2 * weights * w / model.gemms(w) for w in widths])
    assert [hollow(drawn[f"points {each.name}"]) for each in found] == [False, True]
    said = all_text(figure)
    for word in (f"{MEASURED}:\nmeasured", f"{COMPOSED}:\ncomposed of operations", "assumed efficiencies", ";\npeaks published"):
        assert word in said
    assert inside(figure)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_exceeds_its_devices_roof(name: str) -> None:
    found = profile_files.load(name)
    for tensor_parallel in found.tensor_parallel:
        stored = reached_peaks.points(found, tensor_parallel)
        assert (stored.rate <= np.minimum(found.rate, found.bandwidth * stored.intensity) * 1.0001).all()


def test_work_of_whole_layers_includes_attention(whole: Profile) -> None:
    stored = reached_peaks.points(whole)
    shape = preset("llama-68m")
    assert stored.width.tolist() == [1, 4]
    moved = shape.layer_weight_bytes + shape.layer_kv_bytes(4, 128, 1)
    assert stored.intensity[1] == pytest.approx(float(shape.layer_flops(4, 128, 1) / moved))
    assert stored.rate[1] == pytest.approx(float(shape.layer_flops(4, 128, 1)) / taken_s(4, 128, 1))
    assert not hollow(lines(reached_peaks.draw([whole]).axes[0])["points mine"])


def test_measured_peaks_are_called_measured(whole: Profile) -> None:
    assert "peaks published" in all_text(reached_peaks.draw([whole]))
    figure = reached_peaks.draw([replace(whole, facts={"peaks": "measured"}, rate=5e11)])
    assert "mine: 1,000 GB/s, 500 GFLOP/s;\npeaks measured" in all_text(figure)


def test_profiles_without_a_roofline_are_refused() -> None:
    for wrong, words in (
        ([], "profiles must be 1 to 4, got 0"),
        ([profile_files.load(MEASURED)] * 5, "got 5"),
        ([profile_files.load("h100-operations")], "is of kind operations"),
    ):
        with pytest.raises(ParameterError, match=words):
            reached_peaks.draw(wrong)
    with pytest.raises(ParameterError, match=r"tensor_parallel must be one of 1, what profile rtx-4090-llama-3\.1-8b has, got 2"):
        reached_peaks.draw([profile_files.load("rtx-4090-llama-3.1-8b")], tensor_parallel=2)


# --- Multi-token passes --------------------------------------------------------------------------------------------------------


def test_curves_of_pass_cost_equal_the_costs_charged_to_methods() -> None:
    """The curve and its error bounds equal the simulator's costs at that context."""
    hardware = ProfileCosts(profile_files.load(COMPOSED))
    cost = PassSeconds({"target": hardware}, prompt=1024, batch=32)
    slow, fast = cost.uncertainty_ends()
    widths, plain = np.arange(1, 13), float(cost.plain_times())
    figure = pass_cost.draw({"H100": hardware}, batches=(1, 32), widest=12, context=1024)
    [axes] = figure.axes
    at, drawn = xy(lines(axes)["batch 32"])
    assert drawn == pytest.approx(cost.verify_times(widths) / plain)
    assert at.tolist() == widths.tolist()
    found = pass_cost.curve(hardware, range(1, 13), 32, 1024)
    for ends, theirs in ((found.low, fast), (found.high, slow)):
        assert ends == pytest.approx(theirs.verify_times(widths) / plain)
    assert "composed of operations" in all_text(figure)
    assert inside(figure)


def test_width_is_free_if_memory_bound_and_proportional_if_compute_bound() -> None:
    shape = preset("llama-2-7b")
    wide = np.array([1, 2, 4, 16])
    by_memory = pass_cost.curve(Roofline(shape, 1e12, 1e30, PEAKS), wide.tolist(), 1, 0)
    by_arithmetic = pass_cost.curve(Roofline(shape, 1e30, 1e14, PEAKS), wide.tolist(), 1, 0)
    assert by_memory.relative == pytest.approx(np.ones(4), rel=0.02)
    assert by_arithmetic.relative == pytest.approx(wide, rel=0.01)
    flat = pass_cost.curve(UniformLayers(shape, 1e-3), wide.tolist(), 8, 512)
    assert flat.relative.tolist() == [1, 1, 1, 1]


def test_every_device_has_its_panel_and_every_batch_its_curve() -> None:
    costs = {name: ProfileCosts(profile_files.load(name)) for name in ("a100-llama-2-13b", COMPOSED, TAKEN_OVER)}
    figure = pass_cost.draw(costs, batches=(1, 8, 64), widest=8)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(costs)
    for axes, hardware in zip(figure.axes, costs.values(), strict=True):
        for batch in (1, 8, 64):
            at, drawn = xy(lines(axes)[f"batch {batch}"])
            seconds = [float(pass_time(hardware, int(width), 1024, batch).seconds) for width in at]
            assert drawn == pytest.approx(np.array(seconds) / seconds[0])
        across, diagonal = xy(lines(axes)["one after another"])
        assert across.tolist() == diagonal.tolist()
    assert "attention composed at the efficiency of a100: assumed" in all_text(figure)
    assert inside(figure)
    with pytest.raises(ParameterError, match="costs must be 1 to 4, got 0"):
        pass_cost.draw({})
    with pytest.raises(ParameterError, match="batches must be 1 to 5, got 0"):
        pass_cost.draw(costs, batches=())
    with pytest.raises(ParameterError, match="widest must be"):
        pass_cost.draw(costs, widest=1)


# --- The largest batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_largest_batch_is_the_last_that_pays_by_theorem_3_8(rate: float) -> None:
    hardware, contexts, most = ProfileCosts(profile_files.load(COMPOSED)), (128, 1024), 300
    draft = Roofline(preset("llama-68m"), 2e12, 5e14)
    found = largest_batch.limits(hardware, draft, acceptance_rate=rate, draft_length=7, contexts=contexts, most=most)
    for context, largest in zip(contexts, found.pays, strict=True):
        expected = 0
        for batch in range(1, most + 1):
            times = [float(pass_time(hardware, width, context, batch).seconds) for width in (1, 8)]
            ratio = float(pass_time(draft, 1, context, batch).seconds) / times[0]
            if not speculative.speedup(rate, 7, ratio, verify_cost=[(1, 1.0), (8, times[1] / times[0])]) > 1:
                break
            expected = batch
        assert largest == expected
    assert found.fits is None


def test_limits_grow_with_the_acceptance_rate() -> None:
    hardware = ProfileCosts(profile_files.load(COMPOSED))
    options: dict[str, Any] = {"draft_length": 4, "contexts": (128, 512, 2048), "most": 256}
    found = [largest_batch.limits(hardware, DRAFT, acceptance_rate=rate, **options).pays for rate in (0.0, 0.3, 0.6, 1.0)]
    assert (found[0] == 0).all()
    assert all((more >= less).all() for less, more in itertools.pairwise(found))
    # With free width and free drafts every acceptance rate pays at every batch.
    flat, free = UniformLayers(preset("llama-2-13b"), 1e-3), UniformLayers(preset("llama-68m"), 0.0)
    assert (largest_batch.limits(flat, free, acceptance_rate=0.1, **options).pays == 256).all()


def test_memory_fits_exactly_that_many_sequences() -> None:
    hardware, room = ProfileCosts(profile_files.load(COMPOSED), tensor_parallel=2), DEVICES["h100"].memory_bytes
    options: dict[str, Any] = {"acceptance_rate": 0.7, "draft_length": 4, "most": 16}
    found = largest_batch.limits(hardware, DRAFT, **options, contexts=(1024, 8192), available=room)
    assert found.fits is not None
    for context, fits in zip((1024, 8192), found.fits.tolist(), strict=True):
        both: dict[str, Any] = {"context": context, "tensor_parallel": 2, "also": (DRAFT.shape,)}
        needed = [memory(hardware.shape, room, batch=batch, **both).required for batch in (fits, fits + 1)]
        assert needed[0] <= room < needed[1]
    small = largest_batch.limits(hardware, DRAFT, **options, contexts=(1024,), available=1e9)
    assert small.fits is not None
    assert small.fits.tolist() == [0]


def test_largest_batch_draws_the_limits_and_states_the_inputs() -> None:
    costs = {name: ProfileCosts(profile_files.load(name)) for name in (COMPOSED, "l40s-llama-2-13b")}
    options: dict[str, Any] = {"acceptance_rate": 0.55, "draft_length": 6, "contexts": CONTEXTS, "most": 256}
    drafts = {COMPOSED: DRAFT, "l40s-llama-2-13b": UniformLayers(preset("llama-68m"), 4e-4)}
    rooms = {"l40s-llama-2-13b": DEVICES["l40s"].memory_bytes}
    figure = largest_batch.draw(costs, drafts, **options, source="assumed", memories=rooms)
    drawn = lines(figure.axes[0])
    for name, hardware in costs.items():
        found = largest_batch.limits(hardware, drafts[name], **options, available=rooms.get(name))
        assert xy(drawn[f"pays {name}"])[1] == pytest.approx(np.where(found.pays == 0, 0.5, found.pays))
        beyond = xy(drawn[f"beyond {name}"])[0].tolist()
        full = [] if found.fits is None else [c for c, p, f in zip(CONTEXTS, found.pays, found.fits, strict=True) if p > f]
        assert beyond == full
    assert f"fits {COMPOSED}" not in drawn
    said = all_text(figure)
    assert "batch kept full, acceptance rate α = 0.55, draft length γ = 6: assumed" in said
    assert f"{COMPOSED}:\ncomposed of operations" in said
    assert inside(figure)
    slow = {"u": UniformLayers(preset("llama-2-7b"), 1.0)}
    never = largest_batch.draw(slow, {"u": DRAFT}, **options | {"acceptance_rate": 0.0}, source="assumed")
    assert set(xy(lines(never.axes[0])["pays u"])[1]) == {0.5}
    assert "never" in [label.get_text() for label in never.axes[0].get_yticklabels()]


def test_acceptance_rate_has_no_default() -> None:
    with pytest.raises(TypeError, match="acceptance_rate"):
        largest_batch.draw({}, {}, draft_length=4, source="assumed")  # type: ignore[call-arg]
    costs, drafts = {"u": UniformLayers(preset("llama-2-7b"), 1.0)}, {"u": DRAFT}
    options: dict[str, Any] = {"acceptance_rate": 0.5, "draft_length": 4, "source": "assumed"}
    for wrong, words in (
        ({"acceptance_rate": 1.5}, "acceptance_rate"), ({"draft_length": 0}, "draft_length"),
        ({"contexts": ()}, "contexts"), ({"contexts": (512, 128)}, "contexts"), ({"most": 1}, "most"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            largest_batch.draw(costs, drafts, **options | wrong)
    with pytest.raises(ParameterError, match="costs must be 1 to 6, got 0"):
        largest_batch.draw({}, {}, **options)
    with pytest.raises(ParameterError, match="drafts must have the names of costs, u, got v"):
        largest_batch.draw(costs, {"v": DRAFT}, **options)


# --- One layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtx-4090-llama-3.1-8b", MEASURED, COMPOSED])
def test_marks_are_the_sums_of_rows(name: str) -> None:
    found = profile_files.load(name)
    dense = dict(found.rows("dense").select("tokens", "time_s").rows())
    attention = {(row["context"], row["batch"]): row["time_s"] for row in found.rows("attention").to_dicts() if row["width"] == 1}
    figure = layer_time.draw([found], batches=(1, 32))
    [axes] = figure.axes
    for batch in (1, 32):
        marks = lines(axes)[f"rows {batch}"]
        at, drawn = xy(marks)
        assert len(at) > 3
        assert drawn == pytest.approx([1e6 * (dense[batch] + attention[int(context), batch]) for context in at])
        assert hollow(marks) == (name != "rtx-4090-llama-3.1-8b")  # only the GEMMs of MEASURED were measured
        stored = layer_time.stored(ProfileCosts(found), batch)
        assert stored.context.tolist() == sorted(context for context, many in attention if many == batch)
    assert inside(figure)


def test_a_layer_is_its_gemms_and_its_attention() -> None:
    hardware = ProfileCosts(profile_files.load(COMPOSED), tensor_parallel=4)
    found = layer_time.times(hardware, [256, 1000, 4096], 8)
    assert (found.context.dtype, found.context.tolist()) == (np.float64, [256, 1000, 4096])
    assert found.whole == pytest.approx(hardware.layer(1, [256, 1000, 4096], 8).seconds)
    assert found.gemms is not None
    assert np.ptp(found.gemms) < 1e-12
    assert (found.whole - found.gemms) == pytest.approx(hardware.attention(1, [256, 1000, 4096], 8).seconds)
    figure = layer_time.draw([hardware.profile], tensor_parallel=4)
    at, drawn = xy(lines(figure.axes[0])["whole 8"])
    assert drawn == pytest.approx(1e6 * hardware.layer(1, at, 8).seconds)
    assert "TP 4 (GEMMs include" in all_text(figure)


def test_layers_timed_as_wholes_have_no_parts(whole: Profile) -> None:
    figure = layer_time.draw([whole], batches=(1, 8), longest=1024)
    drawn = lines(figure.axes[0])
    assert "products 1" not in drawn
    assert xy(drawn["rows 8"])[1] == pytest.approx([1e6 * taken_s(1, context, 8) for context in (128, 1024)])
    assert "measured" in all_text(figure)
    for wrong, words in (({"batches": ()}, "batches must be 1 to 4"), ({"longest": 100}, "longest"), ({"batches": (0,)}, "batch")):
        with pytest.raises(ParameterError, match=words):
            layer_time.draw([whole], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="profiles must be 1 to 3, got 0"):
        layer_time.draw([])


# --- All of them, and the command ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_profiles_give_the_same_bytes(tmp_path: Path) -> None:
    names = [MEASURED, COMPOSED]
    first, second = (figures.of_profiles(names, tmp_path / each) for each in "ab")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def plot(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plot", *arguments])


def test_a_command_draws_profiles(tmp_path: Path) -> None:
    done = plot("--profile", MEASURED, "-o", str(tmp_path / "deep" / "pictures"))
    assert (done.exit_code, done.stderr) == (0, "")
    written = [Path(line) for line in done.stdout.splitlines()]
    assert {path.name for path in written} == {path.name for path in (tmp_path / "deep" / "pictures").iterdir()}
    assert [path.name for path in written] == [
        f"{name}.{ending}" for name in ("roofline", "verify_cost", "layer_time") for ending in ("png", "svg")
    ]
    assert len({path.read_bytes() for path in written}) == 6
    own = profile_files.save(profile_files.load("rtx-4090-llama-3.1-8b"), tmp_path)
    assert plot("--profile", str(own), "-o", str(tmp_path / "own"), "--json").exit_code == 0
    shown = plot("--help").stdout
    assert "--profile" in shown
    assert "sim ls profiles" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plot takes the directory of a run or --profile NAME, got neither"),
        (["runs/some", "--profile", MEASURED], "got both"),
        (["runs/some", "-o", "there"], "--out is used with --profile alone"),
        (["--profile", "h100-llama-2-7"], "did you mean h100-llama-2-7b"),
        (["--profile", "missing.json"], "missing.json: there is no such file"),
        (["--profile", "h100-operations"], "choose a model's profile"),
        (["--profile", MEASURED, "--profile", MEASURED], "got h100-llama-2-7b twice"),
        ([part for name in MODELS[:4] for part in ("--profile", name)], "profiles must be 1 to 3, got 4"),
    ],
)
def test_wrong_plot_arguments_give_a_one_line_error(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = plot(*arguments, *(["-o", str(tmp_path / "x")] if arguments[:1] == ["--profile"] else []))
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = plot("--profile", MEASURED, "-o", str(tmp_path / "file" / "x"))
    assert done.exit_code == 2
    assert "cannot write" in done.stderr


# --- By hand ---------------------------------------------------------------------------------------------------------------


class Busy(UniformLayers):
    """Layers whose time grows with the tokens of a pass divided by eight, at least 1."""

    def layer(self, width: Any, context: Any, batch: Any = 1, *, busy: int = 0) -> Estimate:
        tokens = np.asarray(width) * np.asarray(batch) * np.ones(np.shape(context))
        seconds = self.seconds_per_layer * np.maximum(tokens / 8, 1)
        return Estimate(seconds, np.full_like(seconds, 0.1))


BUSY, FREE = Busy(preset("llama-68m"), 1e-3), UniformLayers(preset("llama-68m"), 0.0)


def test_the_largest_batch_by_hand() -> None:
    """All drafts of 3 are accepted: 4 tokens in T(4 R) / T(R), which is 4 from R = 8 on, and 1 while 4 R is at most 8."""
    batches = np.array([1, 2, 4, 7, 8, 9])
    found = largest_batch.speedups(BUSY, FREE, 1.0, 3, [128, 512], batches)
    assert found.T.tolist() == [pytest.approx([4, 4, 2, 4 / 3.5, 1, 1])] * 2
    options: dict[str, Any] = {"acceptance_rate": 1.0, "draft_length": 3}
    whole = largest_batch.limits(BUSY, FREE, **options)
    assert whole.pays.tolist() == [7] * len(largest_batch.CONTEXTS) == [7] * 7
    assert largest_batch.CONTEXTS == (128, 256, 512, 1024, 2048, 4096, 8192)
    flat = UniformLayers(preset("llama-68m"), 1e-3)
    assert largest_batch.limits(flat, FREE, **options, contexts=[9]).pays.tolist() == [512]
    costs, drafts = {"a": BUSY, "b": flat}, {"a": FREE, "b": FREE}
    one = memory(BUSY.shape, 1e9, context=128, also=(FREE.shape,))
    room = one.weights + 5.5 * one.cache  # at four times the context one sequence fits
    figure = largest_batch.draw(costs, drafts, **options, source="mine", contexts=(128, 512), most=16, memories={"a": room})
    drawn = shown(figure)
    said = "batch kept full, acceptance rate α = 1, draft length γ = 3: mine"
    assert drawn.texts == ["Up to which batch size does drafting pay?", said]
    kept = ["sequences that fit memory", "hollow: exceeds the memory"]
    assert drawn.legends == [("", ["a:\nassumed", "b:\nassumed", *kept])]
    [panel] = drawn.panels
    assert dict(panel.lines) == {
        "pays a": [(128, 7), (512, 7)], "within a": [], "beyond a": [(128, 7), (512, 7)], "fits a": [(128, 5), (512, 1)],
        "pays b": [(128, 16), (512, 16)], "within b": [(128, 16), (512, 16)], "beyond b": [],
    }  # fmt: skip
    axes = figure.axes[0]
    assert panel.scales == ("log", "log")
    assert (panel.x, panel.y) == ("context [cached positions per sequence]", "largest batch that pays [sequences]")
    assert panel.ticks == (["128", "512"], ["never", "1", "2", "4", "8", "16\nor more"])
    assert axes.get_yticks().tolist() == [0.5, 1, 2, 4, 8, 16]
    assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((128 / 1.15, 512 * 1.15, 0.4, 22.4))
    assert not axes.xaxis.get_minorticklocs().size + axes.yaxis.get_minorticklocs().size
    assert not odd_dashes(figure)
    # Memory for exactly the batch that pays is enough; limits of 0 or many sequences stay within the axes.
    for sequences, within, at in ((7.0, 1, 7.0), (6.9, 0, 6.0), (0.0, 0, 0.5), (99.0, 1, 32.0)):
        just = {"a": one.weights + sequences * one.cache}
        panel = shown(largest_batch.draw({"a": BUSY}, drafts={"a": FREE}, **options, source="", contexts=(128,), most=16,
                                         memories=just)).panels[0]  # fmt: skip
        assert (len(panel.line("within a")), panel.line("fits a")) == (within, [(128, at)])
    many = {str(each): BUSY for each in range(7)}
    with pytest.raises(ParameterError, match="costs must be 1 to 6, got 7"):
        largest_batch.draw(many, many, **options, source="")
    six = dict([*many.items()][:6])
    assert len(shown(largest_batch.draw(six, six, **options, source="", contexts=(8,), most=2)).legends[0][1]) == 6
    for contexts in ((8, 8), (9, 8), ()):
        with pytest.raises(ParameterError, match="contexts must be one or more, in increasing order"):
            largest_batch.draw(six, six, **options, source="", contexts=contexts)
    with pytest.raises(ParameterError, match="drafts must have the names of costs, a, got none"):
        largest_batch.draw({"a": BUSY}, {}, **options, source="")
    # Without a KV cache all sequences fit.
    assert largest_batch.limits(BUSY, FREE, **options, contexts=(0,), most=16, available=1e12).fits == [16]  # type: ignore[comparison-overlap]


def test_ends_of_tables_are_noted_for_the_longest_context(whole: Profile) -> None:
    costs, options = {"mine": ProfileCosts(whole)}, {"acceptance_rate": 0.5, "draft_length": 3, "source": "", "most": 8}
    for contexts, said in (((512, 1024), "measured"), ((512, 2048), "measured\nbeyond the table:\nlayers from context 1024")):
        assert shown(largest_batch.draw(costs, {"mine": DRAFT}, **options, contexts=contexts)).legends[0][1] == [f"mine:\n{said}"]  # type: ignore[arg-type]
    past = shown(pass_cost.draw(costs, batches=(8, 9, 1), widest=4, context=1024)).panels[0]
    assert past.texts[-1:] == ["measured\nbeyond the table: layers from batch 8"]
    assert shown(pass_cost.draw(costs, batches=(8,), widest=4, context=1025)).panels[0].texts[-1:] == ["measured"]
    assert "context 1024" in shown(pass_cost.draw(costs, batches=(8,), widest=4, context=1026)).panels[0].texts[-1]


def test_multi_token_passes_by_hand() -> None:
    """A pass of n tokens takes max(n / 8, 1) of the time of one token, with an error of 10 % where n is above 1."""
    figure = pass_cost.draw({"a": BUSY, "b": FREE_OF_WIDTH})
    drawn = shown(figure)
    assert drawn.texts == ["Cost of a forward pass over several tokens", "context 1,024; shaded: median error of the estimate"]
    assert drawn.legends == [("", ["tokens one at a time, in as many passes"])]
    one, other = drawn.panels
    assert (one.y, other.y) == ("pass time, relative to a pass over one token", "")
    assert one.x == other.x == "tokens per sequence in the pass"
    assert [label for label, _ in one.lines] == ["one after another", *(f"batch {each}" for each in (1, 8, 32, 128))]
    assert one.line("batch 1") == [(n, max(n / 8, 1)) for n in range(1, 17)]
    assert one.line("batch 8") == one.line("batch 128") == [(n, n) for n in range(1, 17)]
    ends = {text for text in one.texts if text.startswith("batch")}
    assert ends == {"batch 1: 2.00×", "batch 8: 16.00×", "batch 32: 16.00×", "batch 128: 16.00×"}
    assert {text for text in other.texts if text.startswith("batch")} == {f"batch {each}: 1.00×" for each in (1, 8, 32, 128)}
    assert one.texts[-1] == other.texts[-1] == "assumed"
    top = 1.15 * 1.1 * 16
    for axes in figure.axes:
        assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((1, 16, 0.85, top))
        assert axes.get_xticks().tolist() == [1, 2, 4, 8, 16]
        assert axes.get_yticks().tolist() == [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]
        assert not axes.xaxis.get_minorticklocs().size + axes.yaxis.get_minorticklocs().size
    assert one.ticks[0] == ["1", "2", "4", "8", "16"]
    assert one.ticks[1] == [f"{each}×" for each in ("1", "1.5", "2", "3", "4", "6", "8", "12", "16", "24")]
    assert one.line("one after another") == [(1, 1), (16, 16)]
    corners = dict(one.bands)["off 1"]
    assert {corner[1] for corner in corners if corner[0] == 16} == {2 * 0.9, 2 * 1.1}
    assert {corner[1] for corner in corners if corner[0] == 1} == {1.0}
    assert not odd_dashes(figure)
    # Where cost does not grow the axis ends at 2.2, like the diagonal; large widths are thinned.
    flat = pass_cost.draw({"b": FREE_OF_WIDTH}, batches=(1,), widest=200, context=7)
    panel = shown(flat).panels[0]
    assert flat.axes[0].get_ylim() == (0.85, 2.2)
    assert panel.line("one after another") == [(1, 1), (2.2, 2.2)]
    across = [x for x, _ in panel.line("batch 1")]
    assert across[:64] == [*range(1, 65)]
    assert across[-1] == 200
    assert 64 < len(across) < 100
    assert shown(flat).texts[1].startswith("context 7;")
    costs = {str(each): BUSY for each in range(5)}
    assert len(pass_cost.draw(dict([*costs.items()][:4]), batches=(1, 2, 3, 4, 5), widest=2).axes) == 4
    with pytest.raises(ParameterError, match="costs must be 1 to 4, got 5"):
        pass_cost.draw(costs)
    with pytest.raises(ParameterError, match="batches must be 1 to 5, got 6"):
        pass_cost.draw({"a": BUSY}, batches=(1, 2, 3, 4, 5, 6))


FREE_OF_WIDTH = UniformLayers(preset("llama-68m"), 1e-3)


def test_layers_by_hand(whole: Profile) -> None:
    hardware = ProfileCosts(whole)
    found = layer_time.times(hardware, [128, 1024], 8)
    assert (found.context.tolist(), found.gemms) == ([128, 1024], None)
    assert found.whole.tolist() == pytest.approx([taken_s(1, context, 8) for context in (128, 1024)])
    several = [whole, replace(whole, name="yours"), replace(whole, name="theirs")]
    figure = layer_time.draw(several, batches=(1,), longest=4096)
    drawn = shown(figure)
    assert drawn.texts == ["Time of one decoder layer, and attention's part of it", "one new token of each sequence"]
    rows_said = [f"table row: {each}" for each in ("measured", "composed of operations")]
    assert drawn.legends == [("", ["whole layer", "GEMMs", "attention", *rows_said])]
    assert [panel.title for panel in drawn.panels] == ["mine", "yours", "theirs"]
    assert [panel.y for panel in drawn.panels] == ["time of one layer [µs]", "", ""]
    assert {panel.x for panel in drawn.panels} == {"context [cached positions per sequence]"}
    last = float(hardware.layer(1, 4096, 1).seconds)
    for axes, panel in zip(figure.axes, drawn.panels, strict=True):
        assert panel.texts == ["measured\nbeyond the table: layers from context 1024", f"batch 1: {1e6 * last:,.0f}"]
        assert [label for label, _ in panel.lines] == ["whole 1", "rows 1"]
        assert panel.line("rows 1") == [(at, pytest.approx(1e6 * taken_s(1, at, 1))) for at in (128, 1024)]
        across = [x for x, _ in panel.line("whole 1")]
        assert (across[0], across[-1], len(across)) == (128, 4096, len({*across}))
        assert 100 < len(across) <= 120
        assert axes.get_xlim() == pytest.approx((128 / 1.08, 4096 * 1.08))
        assert axes.get_ylim()[0] == 0
        assert axes.get_xticks().tolist() == [128, 512, 2048]  # every other one of six powers
    assert layer_time.draw([whole], batches=(1, 2, 3, 4), longest=2048).axes[0].get_xticks().tolist() == [128, 256, 512, 1024, 2048]
    assert not odd_dashes(figure)
    assert layer_time.BATCHES == (1, 8, 32)
    assert layer_time.draw([whole], batches=(1,)).axes[0].get_xlim()[1] == pytest.approx(8192 * 1.08)
    for profiles, batches, words in (([whole] * 4, (1,), "profiles must be 1 to 3, got 4"),
                                     ([whole], (1, 2, 3, 4, 5), "batches must be 1 to 4, got 5")):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            layer_time.draw(profiles, batches=batches)
    # Crowded rows are marked if they are at least 1.5 times the one before, within the panel.
    rows = [{"part": "layer", "width": 1, "context": each, "batch": 1, "time_s": taken_s(1, each, 1)}
            for each in (100, 128, 191, 192, 287, 288, 1024, 1100)]  # fmt: skip
    rows += [{"part": "layer", "width": 4, "context": 128, "batch": 1, "time_s": 1.0}]
    crowd = replace(whole, table=table_of(rows))
    marks = shown(layer_time.draw([crowd], batches=(1,), longest=1024)).panels[0].line("rows 1")
    assert [x for x, _ in marks] == [128, 192, 288, 1024]


def test_rooflines_by_hand(whole: Profile) -> None:
    """Widths that are not powers of two are left out, unless there are no others; some widths are labelled."""
    shape = preset("llama-68m")
    rows = [{"part": "layer", "width": width, "context": context, "batch": batch, "time_s": taken_s(width, context, batch)}
            for width in (8, 2, 3, 1) for context in (512, 64) for batch in (4, 2)]  # fmt: skip
    odd = replace(whole, name="odd", device="other", table=table_of([row for row in rows if row["width"] in (3,)]))
    crowd = replace(whole, table=table_of(rows))
    found = reached_peaks.points(crowd)
    assert found.width.tolist() == [1, 2, 8]
    work = [float(shape.layer_flops(width, 64, 2)) for width in (1, 2, 8)]
    assert found.rate == pytest.approx([each / taken_s(width, 64, 2) for each, width in zip(work, (1, 2, 8), strict=True)])
    assert reached_peaks.points(odd).width.tolist() == [3]
    figure = reached_peaks.draw([crowd, odd])
    drawn = shown(figure)
    assert drawn.texts == [
        "Throughput that a decoder layer reaches on its device",
        "a decoder layer (numbers: tokens in the pass), attention left out where timed separately",
    ]  # fmt: skip
    peaks = "1,000 GB/s, 100 TFLOP/s;\npeaks published"
    assert drawn.legends == [("", [f"mine: {peaks}", f"other: {peaks}", "mine:\nmeasured", "odd:\nmeasured"])]
    [panel] = drawn.panels
    assert panel.texts == ["1", "8"]
    assert (panel.x, panel.y) == ("operations per byte [FLOP/byte]", "operations per second of a device [FLOP/s]")
    both = [found, reached_peaks.points(odd)]
    low, high = 0.6 * min(each.intensity.min() for each in both), 2.5 * 1e14 / 1e12
    limits = (low, high, 0.5 * min(each.rate.min() for each in both), 1.8e14)
    assert (*figure.axes[0].get_xlim(), *figure.axes[0].get_ylim()) == pytest.approx(limits)
    assert panel.line("roof mine") == [(pytest.approx(low), pytest.approx(1e12 * low)), (100, 1e14), (pytest.approx(high), 1e14)]
    assert not odd_dashes(figure)
    assert len(shown(reached_peaks.draw([crowd] * 4)).legends[0][1]) == 5  # one roof per device
    # The axis extends to points beyond the ridge.
    weak = replace(crowd, rate=1e12 * float(found.intensity.max()) / 2)
    assert reached_peaks.draw([weak]).axes[0].get_xlim()[1] == pytest.approx(2.5 * float(found.intensity.max()))
    split = profile_files.load(COMPOSED)
    halves = shown(reached_peaks.draw([split], tensor_parallel=2))
    assert halves.texts[1] == "a decoder layer at TP 2 (numbers: tokens in the pass), attention left out"
    # Operations of the part of a layer that one of two devices holds.
    part, tokens = shape_of(split).shard(2), 8
    row = split.rows("dense", 2).row(by_predicate=pl.col("tokens") == tokens, named=True)
    weights = sum(inputs * outputs for inputs, outputs in part.matrices)
    [rate] = reached_peaks.points(split, 2).rate[reached_peaks.points(split, 2).width == tokens]
    assert rate == pytest.approx(2 * weights * tokens / row["time_s"])
    model = Roofline(shape_of(split), split.bandwidth, split.rate, tensor_parallel=2)
    modelled = halves.panels[0].line(f"model {split.name}")
    assert 2 * weights * tokens / float(model.gemms(tokens)) == pytest.approx(
        next(y for (_, y), width in zip(modelled, reached_peaks.points(split, 2).width, strict=True) if width == tokens)
    )


def test_provenance_of_parts_by_hand(whole: Profile) -> None:
    note = "attention split 2, 4 ways: composed of eager kernels (by me)"
    rows: list[dict[str, Any]] = [{"part": "dense", "tokens": each, "time_s": 1e-5 * each} for each in (1, 8)]
    attention = {"part": "attention", "context": 128, "time_s": 1e-5}
    rows += [attention | {"width": width, "batch": batch} for width in (1, 4) for batch in (1, 8)]
    sources = (Source("mine", "mine.csv", parts=("dense",)),)
    two = replace(whole, provenance="composed", table=table_of(rows), notes=("nothing", note), sources=sources)
    assert [provenance.of_part(two, part) for part in ("dense", "attention")] == ["measured", "composed of operations"]
    assert provenance.parts_provenance(two) == "GEMMs measured, attention composed of operations"
    both = replace(two, sources=(Source("mine", "mine.csv", parts=("dense", "attention")),))
    assert [provenance.of_part(both, "attention", tensor_parallel) for tensor_parallel in (1, 2, 4, 3)] == [
        "measured", "composed of eager kernels", "composed of eager kernels", "measured",
    ]  # fmt: skip
    assert [provenance.is_measured(both, "attention", tensor_parallel) for tensor_parallel in (1, 2)] == [True, False]
    assert provenance.parts_provenance(both) == "measured"
    assert provenance.parts_provenance(both, 2) == "GEMMs measured, attention composed of eager kernels"
    assert provenance.extrapolated_parts(both, width=4, context=129, batch=8) == "beyond the table: GEMMs from tokens 8"
    assert provenance.extrapolated_parts(both, width=1, context=130, batch=8) == "beyond the table: attention from context 128"
    assert provenance.extrapolated_parts(both, width=2, context=130, batch=8) == (
        "beyond the table: GEMMs from tokens 8; attention from context 128"
    )
    assert provenance.extrapolated_parts(both, 2, width=9, context=999, batch=99) == ""  # no rows for this number of devices
    assert provenance.of_hardware(ProfileCosts(both)) == "measured"
    largest = {"width": 1, "context": 1, "batch": 9}
    assert provenance.extrapolated_parts_of(ProfileCosts(both), **largest) == provenance.extrapolated_parts(both, **largest)
    axes = Figure().add_subplot()
    provenance.under_title(axes, "name", "one, two, three", "also")
    assert (axes.get_title(loc="left") or axes.get_title(), axes.texts[0].get_text()) == ("name", "one,\ntwo, three\nalso")
    provenance.under_title(axes, "name", "one")
    assert axes.texts[1].get_text() == "one"
    assert axes.texts[1].get_position() == (0, 1.025)


def test_runs_in_seconds_are_drawn_with_their_distribution(tmp_path: Path) -> None:
    given = {
        "scenario": {"name": "seconds", "tokens": 8, "replications": 64, "views": ["formula", "paths"]},
        "method": [{"name": "speculative", "draft_length": 2}], "outcomes": {"kind": "iid", "acceptance_rate": 0.5},
        "cost": {"kind": "roofline", "device": "a100", "shape": "opt-1.3b", "draft_shape": "opt-125m"},
    }  # fmt: skip
    sim.run(given, out=tmp_path)
    drawn = {path.stem for path in figures.of_run(tmp_path)}
    assert "distribution_point_0" in drawn
