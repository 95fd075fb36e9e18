"""The figures of profiles, by their artists: what is drawn is what the table and the cost model say, and labels say where from."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from typer.testing import CliRunner

import figures
from figures import largest_batch, layer_time, provenance, roofline, verify_cost_hardware
from model import profile, speculative
from model.checks import ParameterError
from model.device import DEVICES
from model.hardware import Uniform, memory, pass_time
from model.measured import Measured, shape_of
from model.operating_point import operating_point
from model.profile import Profile, Source, table_of
from model.roofline import Efficiency, Roofline
from model.transformer import preset
from sim.cli import app
from tests.test_figures_speculative import inside, xy
from tests.test_figures_tradeoff import lines

MODELS = tuple(name for name in profile.names() if profile.load(name).kind == "model")
MEASURED, COMPOSED, TAKEN_OVER = "h100-llama-2-7b", "h100-llama-2-13b", "a40-llama-2-7b"
CONTEXTS = (128, 512, 2048)
PEAKS = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
DRAFT = Uniform(preset("llama-68m"), 5e-4)
"""A draft pass of 1 ms at every batch."""


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def hollow(line: Line2D) -> bool:
    return to_hex(line.get_markerfacecolor()) == "#ffffff"  # type: ignore[arg-type]


def taken_s(width: int, context: int, batch: int) -> float:
    return 1e-5 * (1 + width * batch / 8 + context / 999)


@pytest.fixture
def whole(tmp_path: Path) -> Profile:
    """A profile of layers as wholes, as a timing of them gives it, that says that it was measured."""
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


# --- Where times are from -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_part_is_measured_where_the_notes_do_not_say_composed(name: str) -> None:
    found = profile.load(name)
    said = " ".join(found.notes)
    for ways in found.ways:
        assert provenance.is_measured(found, "dense", ways) == (found.provenance == "measured" or "dense: measured" in said)
        if found.provenance == "composed" and provenance.is_measured(found, "attention", ways):
            listed = [note for note in found.notes if note.startswith("attention split") and "composed" in note]
            assert any("attention" in source.parts for source in found.sources)
            assert all(str(ways) not in note.partition(" split ")[2].partition(" ways")[0].split(", ") for note in listed)


def test_an_efficiency_of_another_device_is_called_assumed() -> None:
    assert "assumed" in provenance.of_part(profile.load(TAKEN_OVER), "attention")
    assert "assumed" not in provenance.of_part(profile.load(TAKEN_OVER), "dense")
    roof = Roofline(preset("llama-2-7b"), 1e12, 1e14)
    assert provenance.of_hardware(roof) == roof.provenance


def test_what_lies_beyond_the_table_is_said(whole: Profile) -> None:
    assert provenance.beyond(whole, width=4, context=1024, batch=8) == ""
    assert provenance.beyond(whole, width=5, context=1024, batch=9) == "beyond the table: layers from width 4, batch 8"
    figure = layer_time.draw([whole], batches=(1, 32), longest=1024)
    assert "measured\nbeyond the table: layers from batch 8" in texts(figure)
    costs = {"mine": Measured(whole)}
    assert "layers from width 4" in texts(verify_cost_hardware.draw(costs, batches=(1,), widest=8, context=512))
    given: dict[str, Any] = {"acceptance_rate": 0.5, "draft_length": 4, "source": "assumed", "most": 8}
    assert "beyond the table:\nlayers from width 4, context 1024" in texts(largest_batch.draw(costs, {"mine": DRAFT}, **given))
    assert provenance.of_hardware_beyond(Uniform(preset("llama-68m"), 1.0), width=99, context=9, batch=9) == ""


# --- Roofline -----------------------------------------------------------------------------------------------------------


def test_points_are_the_rows_and_roofs_the_peaks() -> None:
    found = [profile.load(MEASURED), profile.load(COMPOSED)]
    figure = roofline.draw(found)
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
        assert xy(drawn[f"model {each.name}"])[1] == pytest.approx([2 * weights * w / model.products(w) for w in widths])
    assert [hollow(drawn[f"points {each.name}"]) for each in found] == [False, True]
    said = texts(figure)
    for word in (f"{MEASURED}:\nmeasured", f"{COMPOSED}:\ncomposed of operations", "assumed efficiencies", ";\npeaks published"):
        assert word in said
    assert inside(figure)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_passes_its_devices_roof(name: str) -> None:
    found = profile.load(name)
    for ways in found.ways:
        stored = roofline.points(found, ways)
        assert (stored.rate <= np.minimum(found.rate, found.bandwidth * stored.intensity) * 1.0001).all()


def test_whole_layers_have_their_attention_too(whole: Profile) -> None:
    stored = roofline.points(whole)
    shape = preset("llama-68m")
    assert stored.width.tolist() == [1, 4]
    moved = shape.layer_weight_bytes + shape.layer_kv_bytes(4, 128, 1)
    assert stored.intensity[1] == pytest.approx(float(shape.layer_flops(4, 128, 1) / moved))
    assert stored.rate[1] == pytest.approx(float(shape.layer_flops(4, 128, 1)) / taken_s(4, 128, 1))
    assert not hollow(lines(roofline.draw([whole]).axes[0])["points mine"])


def test_peaks_are_called_measured_where_they_were(whole: Profile) -> None:
    assert "peaks published" in texts(roofline.draw([whole]))
    figure = roofline.draw([replace(whole, facts={"peaks": "measured"}, rate=5e11)])
    assert "mine: 1,000 GB/s, 500 GFLOP/s;\npeaks measured" in texts(figure)


def test_what_has_no_roofline_is_refused() -> None:
    for wrong, words in (
        ([], "profiles must be 1 to 4, got 0"),
        ([profile.load(MEASURED)] * 5, "got 5"),
        ([profile.load("h100-operations")], "is one of operations"),
    ):
        with pytest.raises(ParameterError, match=words):
            roofline.draw(wrong)
    with pytest.raises(ParameterError, match=r"ways must be one of 1, what profile rtx-4090-llama-3\.1-8b has, got 2"):
        roofline.draw([profile.load("rtx-4090-llama-3.1-8b")], ways=2)


# --- Wide passes --------------------------------------------------------------------------------------------------------


def test_a_wide_pass_costs_what_methods_are_charged() -> None:
    """The same curve, with the same ends, as the engine's at that operating point."""
    hardware = Measured(profile.load(COMPOSED))
    cost = operating_point(hardware, prompt=960, tokens=128, batch=32, widest=12)
    figure = verify_cost_hardware.draw({"H100": hardware}, batches=(1, 32), widest=12, context=1024)
    [axes] = figure.axes
    at, drawn = xy(lines(axes)["batch 32"])
    assert cost.cost.verify_cost is not None
    assert drawn == pytest.approx([time for _, time in cost.cost.verify_cost])
    assert at.tolist() == [width for width, _ in cost.cost.verify_cost]
    found = verify_cost_hardware.curve(hardware, range(1, 13), 32, 1024)
    for ends, theirs in ((found.low, cost.fast.verify_cost), (found.high, cost.slow.verify_cost)):
        assert theirs is not None
        assert ends == pytest.approx([time for _, time in theirs])
    assert "composed of operations" in texts(figure)
    assert inside(figure)


def test_width_is_free_where_memory_decides_and_proportional_where_arithmetic_does() -> None:
    shape = preset("llama-2-7b")
    wide = np.array([1, 2, 4, 16])
    by_memory = verify_cost_hardware.curve(Roofline(shape, 1e12, 1e30, PEAKS), wide.tolist(), 1, 0)
    by_arithmetic = verify_cost_hardware.curve(Roofline(shape, 1e30, 1e14, PEAKS), wide.tolist(), 1, 0)
    assert by_memory.relative == pytest.approx(np.ones(4), rel=0.02)
    assert by_arithmetic.relative == pytest.approx(wide, rel=0.01)
    flat = verify_cost_hardware.curve(Uniform(shape, 1e-3), wide.tolist(), 8, 512)
    assert flat.relative.tolist() == [1, 1, 1, 1]


def test_every_device_has_its_panel_and_every_batch_its_curve() -> None:
    costs = {name: Measured(profile.load(name)) for name in ("a100-llama-2-13b", COMPOSED, TAKEN_OVER)}
    figure = verify_cost_hardware.draw(costs, batches=(1, 8, 64), widest=8)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(costs)
    for axes, hardware in zip(figure.axes, costs.values(), strict=True):
        for batch in (1, 8, 64):
            at, drawn = xy(lines(axes)[f"batch {batch}"])
            seconds = [float(pass_time(hardware, int(width), 1024, batch).seconds) for width in at]
            assert drawn == pytest.approx(np.array(seconds) / seconds[0])
        across, diagonal = xy(lines(axes)["one after another"])
        assert across.tolist() == diagonal.tolist()
    assert "attention composed at the efficiency of a100: assumed" in texts(figure)
    assert inside(figure)
    with pytest.raises(ParameterError, match="costs must be 1 to 4, got 0"):
        verify_cost_hardware.draw({})
    with pytest.raises(ParameterError, match="batches must be 1 to 5, got 0"):
        verify_cost_hardware.draw(costs, batches=())
    with pytest.raises(ParameterError, match="widest must be"):
        verify_cost_hardware.draw(costs, widest=1)


# --- The largest batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_the_largest_batch_is_the_last_that_theorem_3_8_lets_gain(rate: float) -> None:
    hardware, contexts, most = Measured(profile.load(COMPOSED)), (128, 1024), 300
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


def test_limits_move_as_they_must() -> None:
    hardware = Measured(profile.load(COMPOSED))
    given: dict[str, Any] = {"draft_length": 4, "contexts": (128, 512, 2048), "most": 256}
    found = [largest_batch.limits(hardware, DRAFT, acceptance_rate=rate, **given).pays for rate in (0.0, 0.3, 0.6, 1.0)]
    assert (found[0] == 0).all()
    assert all((more >= less).all() for less, more in itertools.pairwise(found))
    # Without a price of width or draft every acceptance gains at every batch.
    flat, free = Uniform(preset("llama-2-13b"), 1e-3), Uniform(preset("llama-68m"), 0.0)
    assert (largest_batch.limits(flat, free, acceptance_rate=0.1, **given).pays == 256).all()


def test_memory_holds_so_many_texts_and_not_one_more() -> None:
    hardware, room = Measured(profile.load(COMPOSED), ways=2), DEVICES["h100"].memory_bytes
    given: dict[str, Any] = {"acceptance_rate": 0.7, "draft_length": 4, "most": 16}
    found = largest_batch.limits(hardware, DRAFT, **given, contexts=(1024, 8192), available=room)
    assert found.fits is not None
    for context, fits in zip((1024, 8192), found.fits.tolist(), strict=True):
        both: dict[str, Any] = {"context": context, "ways": 2, "also": (DRAFT.shape,)}
        needed = [memory(hardware.shape, room, batch=batch, **both).needed for batch in (fits, fits + 1)]
        assert needed[0] <= room < needed[1]
    small = largest_batch.limits(hardware, DRAFT, **given, contexts=(1024,), available=1e9)
    assert small.fits is not None
    assert small.fits.tolist() == [0]


def test_the_figure_draws_the_limits_and_says_what_is_given() -> None:
    costs = {name: Measured(profile.load(name)) for name in (COMPOSED, "l40s-llama-2-13b")}
    given: dict[str, Any] = {"acceptance_rate": 0.55, "draft_length": 6, "contexts": CONTEXTS, "most": 256}
    drafts = {COMPOSED: DRAFT, "l40s-llama-2-13b": Uniform(preset("llama-68m"), 4e-4)}
    rooms = {"l40s-llama-2-13b": DEVICES["l40s"].memory_bytes}
    figure = largest_batch.draw(costs, drafts, **given, source="assumed", memories=rooms)
    drawn = lines(figure.axes[0])
    for name, hardware in costs.items():
        found = largest_batch.limits(hardware, drafts[name], **given, available=rooms.get(name))
        assert xy(drawn[f"pays {name}"])[1] == pytest.approx(np.where(found.pays == 0, 0.5, found.pays))
        beyond = xy(drawn[f"beyond {name}"])[0].tolist()
        full = [] if found.fits is None else [c for c, p, f in zip(CONTEXTS, found.pays, found.fits, strict=True) if p > f]
        assert beyond == full
    assert f"fits {COMPOSED}" not in drawn
    said = texts(figure)
    assert "batch kept full, acceptance rate 0.55, 6 drafted tokens: assumed" in said
    assert f"{COMPOSED}:\ncomposed of operations" in said
    assert inside(figure)
    slow = {"u": Uniform(preset("llama-2-7b"), 1.0)}
    never = largest_batch.draw(slow, {"u": DRAFT}, **given | {"acceptance_rate": 0.0}, source="assumed")
    assert set(xy(lines(never.axes[0])["pays u"])[1]) == {0.5}
    assert "never" in [label.get_text() for label in never.axes[0].get_yticklabels()]


def test_acceptance_is_never_defaulted() -> None:
    with pytest.raises(TypeError, match="acceptance_rate"):
        largest_batch.draw({}, {}, draft_length=4, source="assumed")  # type: ignore[call-arg]
    costs, drafts = {"u": Uniform(preset("llama-2-7b"), 1.0)}, {"u": DRAFT}
    given: dict[str, Any] = {"acceptance_rate": 0.5, "draft_length": 4, "source": "assumed"}
    for wrong, words in (
        ({"acceptance_rate": 1.5}, "acceptance_rate"), ({"draft_length": 0}, "draft_length"),
        ({"contexts": ()}, "contexts"), ({"contexts": (512, 128)}, "contexts"), ({"most": 1}, "most"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            largest_batch.draw(costs, drafts, **given | wrong)
    with pytest.raises(ParameterError, match="costs must be 1 to 6, got 0"):
        largest_batch.draw({}, {}, **given)
    with pytest.raises(ParameterError, match="drafts must have the names of costs, u, got v"):
        largest_batch.draw(costs, {"v": DRAFT}, **given)


# --- One layer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtx-4090-llama-3.1-8b", MEASURED, COMPOSED])
def test_marks_are_the_sums_of_rows(name: str) -> None:
    found = profile.load(name)
    dense = dict(found.rows("dense").select("tokens", "time_s").rows())
    attention = {(row["context"], row["batch"]): row["time_s"] for row in found.rows("attention").to_dicts() if row["width"] == 1}
    figure = layer_time.draw([found], batches=(1, 32))
    [axes] = figure.axes
    for batch in (1, 32):
        marks = lines(axes)[f"rows {batch}"]
        at, drawn = xy(marks)
        assert len(at) > 3
        assert drawn == pytest.approx([1e6 * (dense[batch] + attention[int(context), batch]) for context in at])
        assert hollow(marks) == (name != "rtx-4090-llama-3.1-8b")  # of the second only the products were measured
        stored = layer_time.stored(Measured(found), batch)
        assert stored.context.tolist() == sorted(context for context, many in attention if many == batch)
    assert inside(figure)


def test_a_layer_is_its_products_and_its_attention() -> None:
    hardware = Measured(profile.load(COMPOSED), ways=4)
    found = layer_time.times(hardware, [256, 1000, 4096], 8)
    assert found.whole == pytest.approx(hardware.layer(1, [256, 1000, 4096], 8).seconds)
    assert found.products is not None
    assert np.ptp(found.products) < 1e-12
    assert (found.whole - found.products) == pytest.approx(hardware.attention(1, [256, 1000, 4096], 8).seconds)
    figure = layer_time.draw([hardware.profile], ways=4)
    at, drawn = xy(lines(figure.axes[0])["whole 8"])
    assert drawn == pytest.approx(1e6 * hardware.layer(1, at, 8).seconds)
    assert "split 4 ways" in texts(figure)


def test_layers_as_wholes_have_no_parts(whole: Profile) -> None:
    figure = layer_time.draw([whole], batches=(1, 8), longest=1024)
    drawn = lines(figure.axes[0])
    assert "products 1" not in drawn
    assert xy(drawn["rows 8"])[1] == pytest.approx([1e6 * taken_s(1, context, 8) for context in (128, 1024)])
    assert "measured" in texts(figure)
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
    own = profile.save(profile.load("rtx-4090-llama-3.1-8b"), tmp_path)
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
        (["--profile", "h100-operations"], "take a model's"),
        (["--profile", MEASURED, "--profile", MEASURED], "got h100-llama-2-7b twice"),
        ([part for name in MODELS[:4] for part in ("--profile", name)], "profiles must be 1 to 3, got 4"),
    ],
)
def test_what_cannot_be_drawn_is_a_mistake_in_a_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = plot(*arguments, *(["-o", str(tmp_path / "x")] if arguments[:1] == ["--profile"] else []))
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = plot("--profile", MEASURED, "-o", str(tmp_path / "file" / "x"))
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
