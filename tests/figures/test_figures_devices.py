"""Figures of runs over several devices: marks and bars are those of the table, and labels state the provenance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import sim
from figures import of_run
from figures.common.speedup_baseline import over_one_device
from figures.of_runs import method_comparison, reserved_devices, speedup_by_device
from model.base.checks import ParameterError
from model.hardware.devices import DEVICES
from sim.scenarios.scenario_file import load
from tests.figures.test_figures_hardware import all_text
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import lines
from tests.support.album import Album
from tests.support.figure_checks import formula, odd_dashes, shown

FEW: dict[str, Any] = {"set": {"scenario.replications": 64, "scenario.event_replications": 4}}
DEVICE, PROFILE = "cost.device", "cost.profile"
ALONE = "speedup_over_one_device"


@pytest.fixture(scope="module")
def compared() -> pl.DataFrame:
    return sim.run("hardware-compare", views=["formula", "paths"], **FEW)


@pytest.fixture(scope="module")
def rivals() -> pl.DataFrame:
    return formula("ppd-against-tensor-parallel")


def bars(figure: Figure, panel: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Ends of the vertical bars, by label."""
    found = {}
    for each in figure.axes[panel].collections:
        if isinstance(each, LineCollection):
            found[str(each.get_label())] = [(float(line[0][1]), float(line[-1][1])) for line in each.get_segments()]
    return found


# --- By device ----------------------------------------------------------------------------------------------------------


def test_choices_are_drawn_at_their_devices(compared: pl.DataFrame) -> None:
    figure = speedup_by_device.draw(compared.sample(fraction=1, shuffle=True, seed=1).sort("point"))
    devices = load("hardware-compare")["sweep"][DEVICE]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == devices
    drawn, ends = lines(figure.axes[0]), bars(figure)
    exact = compared.filter(view="formula")
    wanted = {
        "Predictive Pipelined Decoding, k = 1, 2 devices": exact.filter(method="ppd", candidates=1),
        "Predictive Pipelined Decoding, k = 3, 4 devices": exact.filter(method="ppd", candidates=3),
        "speculative decoding, γ = 4, 1 device": exact.filter(method="speculative"),
        "tensor parallelism, 2 devices": exact.filter(method="autoregressive", tensor_parallel=2),
        "tensor parallelism, 4 devices": exact.filter(method="autoregressive", tensor_parallel=4),
    }
    for name, rows in wanted.items():
        at, speeds = xy(drawn[name])
        assert [devices[round(float(each))] for each in at] == rows[DEVICE].to_list()
        assert speeds == pytest.approx(rows[ALONE].to_numpy())
        bounds = rows.select(f"{ALONE}_input_low", f"{ALONE}_input_high").rows()
        assert np.array(ends[f"inputs {name}"]) == pytest.approx(np.array(bounds))
        assert name in all_text(figure)
    said = all_text(figure)
    rates = ("Predictive Pipelined Decoding published", "speculative decoding assumed")
    for word in ("assumed efficiencies of published peaks", *rates):
        assert word in said
    assert inside(figure)


def test_all_seven_devices_fit_the_model(compared: pl.DataFrame) -> None:
    devices = compared[DEVICE].unique().to_list()
    assert len(devices) == 7
    assert compared["memory_share"].max() < 1  # type: ignore[operator]
    smaller = [name for name, each in DEVICES.items() if "float16" in each.rates and name not in devices]
    assert all(DEVICES[name].memory_bytes < 27e9 for name in smaller)  # the others would be refused


def test_devices_are_drawn_only_if_swept_alone(compared: pl.DataFrame) -> None:
    assert speedup_by_device.fits(compared)
    assert speedup_by_device.device_column(compared) == DEVICE
    one = compared.filter(pl.col(DEVICE) == "a100")
    assert not speedup_by_device.fits(one)
    twice = pl.concat([compared, compared.with_columns(point=pl.col("point") + 1000)])
    assert not speedup_by_device.fits(twice)  # two points of one choice on one device: another axis was swept too
    assert not speedup_by_device.fits(compared.drop(DEVICE))
    assert not speedup_by_device.fits(compared.drop("tensor_parallel"))
    for rows in (one, twice):
        with pytest.raises(ParameterError, match="needs rows of several devices or profiles"):
            speedup_by_device.draw(rows)
    with pytest.raises(ParameterError, match="needs at least one row"):
        speedup_by_device.draw(compared.clear())
    with pytest.raises(ParameterError, match="none called speedup"):
        speedup_by_device.draw(compared.drop("speedup"))


def test_varying_parameters_are_named() -> None:
    tables = load("hardware-compare")
    tables["method"] = [table for table in tables["method"] if table["name"] == "speculative"]
    del tables["outcomes"]["match"]
    tables["sweep"] = {DEVICE: ["a100", "h100"], "method.draft_length": [2, 4]}
    swept = sim.run(tables, views=["formula"])
    figure = speedup_by_device.draw(swept)
    assert {"speculative decoding, γ = 2, 1 device", "speculative decoding, γ = 4, 1 device"} <= {*lines(figure.axes[0])}
    bare = speedup_by_device.draw(swept.drop("speedup_input_low", "speedup_input_high", "cost_source", "outcomes_source"))
    assert "times: of unknown source" in all_text(bare)
    assert not any(bars(bare).values())


# --- By reserved devices ----------------------------------------------------------------------------------------------------


def test_replicas_and_split_layers_are_drawn_at_their_reserved_devices(rivals: pl.DataFrame) -> None:
    figure = reserved_devices.draw(rivals)
    profiles = rivals[PROFILE].unique(maintain_order=True).to_list()
    assert [axes.get_title(loc="left") for axes in figure.axes] == profiles
    wanted = {
        "Predictive Pipelined Decoding (replicas)": ("ppd", pl.col("tensor_parallel") == 1, [2, 4]),
        "Predictive Pipelined Decoding, each layer split": ("ppd", pl.col("tensor_parallel") > 1, [4]),
        "tensor parallelism (each layer split)": ("autoregressive", pl.col("tensor_parallel") > 1, [2, 4]),
    }
    for panel, (axes, name) in enumerate(zip(figure.axes, profiles, strict=True)):
        drawn, ends = lines(axes), bars(figure, panel)
        for label, (method, which, held) in wanted.items():
            rows = rivals.filter(pl.col(PROFILE) == name, pl.col("method") == method, which).sort("reserved_units")
            at, speeds = xy(drawn[label])
            assert np.round(at).astype(int).tolist() == held == rows["reserved_units"].to_list()
            assert speeds == pytest.approx(rows[ALONE].to_numpy())
            bounds = rows.select(f"{ALONE}_input_low", f"{ALONE}_input_high").rows()
            assert np.array(ends[f"inputs {label}"]) == pytest.approx(np.array(bounds))
        across, even = xy(drawn["even"])
        assert across.tolist() == even.tolist()
    said = all_text(figure)
    assert "rates of Predictive Pipelined Decoding published" in said
    assert "times: composed (ai-dynamo/aiconfigurator" in said
    assert inside(figure)


def test_the_headline_is_computed(rivals: pl.DataFrame) -> None:
    at = rivals.filter(pl.col("reserved_units") == 4)
    split = at.filter(method="autoregressive").sort(PROFILE)[ALONE].to_numpy()
    replicas = at.filter(pl.col("method") == "ppd", pl.col("tensor_parallel") == 1).sort(PROFILE)[ALONE].to_numpy()
    low, high = (split / replicas).min(), (split / replicas).max()
    headline = f"On 4 devices, tensor parallelism is {low:.2f} to {high:.2f} times as fast as replicas"
    assert headline in all_text(reserved_devices.draw(rivals))
    one = rivals.filter(pl.col(PROFILE) == "h100-llama-2-13b").drop(PROFILE)
    figure = reserved_devices.draw(one)
    assert len(figure.axes) == 1
    # Split layers are compared with the best of the replicas.
    better = one.filter(pl.col("method") == "ppd", pl.col("tensor_parallel") == 1, pl.col("reserved_units") == 4)
    better = better.with_columns(pl.lit(2.0).alias(ALONE), method=pl.lit("mine"), point=pl.lit(999, dtype=pl.Int64))
    ratio = one.filter(method="autoregressive", tensor_parallel=4)[ALONE].item() / 2.0
    assert f"tensor parallelism is {ratio:.2f} times as fast" in all_text(reserved_devices.draw(pl.concat([one, better])))
    slower = one.with_columns(pl.when(method="autoregressive").then(0.5).otherwise(ALONE).alias(ALONE))
    assert f"tensor parallelism is {0.5 / replicas[1]:.2f} times as fast" in all_text(reserved_devices.draw(slower))


def test_reserved_devices_need_a_rival(rivals: pl.DataFrame, compared: pl.DataFrame) -> None:
    assert reserved_devices.fits(rivals)
    assert not reserved_devices.fits(compared)  # seven panels
    assert reserved_devices.fits(compared.filter(pl.col(DEVICE) == "a100"))
    alone = rivals.filter(pl.col("method") == "ppd")
    assert not reserved_devices.fits(alone)
    assert not reserved_devices.fits(rivals.filter(pl.col("method") == "autoregressive"))
    both = pl.col("method").eq("autoregressive") | pl.col("tensor_parallel").gt(1)
    assert not reserved_devices.fits(rivals.filter(both))  # no row runs on replicas alone
    assert not reserved_devices.fits(rivals.drop("tensor_parallel"))
    # For a model that fits no device there is no speed-up over one.
    assert not reserved_devices.fits(rivals.with_columns(pl.when(pl.col("tensor_parallel") == 1).then(ALONE).alias(ALONE)))
    assert not reserved_devices.fits(pl.concat([rivals, rivals.with_columns(point=pl.col("point") + 1000)]))
    with pytest.raises(ParameterError, match="take those of `sim run ppd-against-tensor-parallel`"):
        reserved_devices.draw(alone)


# --- Baseline -----------------------------------------------------------------------------------------------


TWO = ["a100", "h100"]


def few(compared: pl.DataFrame) -> pl.DataFrame:
    """Rows of two devices, which fit into the comparison of methods."""
    return compared.filter(pl.col("cost.device").is_in(TWO))


def test_axes_name_the_baseline(compared: pl.DataFrame, rivals: pl.DataFrame) -> None:
    """The baseline is one device; for a model that does not fit one, the same devices."""
    one, same = (f"speed-up over plain decoding on {devices}" for devices in ("one device", "the same devices"))
    assert speedup_by_device.draw(compared).axes[0].get_ylabel() == one
    assert speedup_by_device.draw(compared.filter(tensor_parallel=1).drop(ALONE)).axes[0].get_ylabel() == one
    assert reserved_devices.draw(rivals).axes[0].get_ylabel() == one
    assert method_comparison.draw(few(compared)).axes[0].get_ylabel() == one
    large = compared.with_columns(pl.when(pl.col("tensor_parallel") == 1).then(ALONE).alias(ALONE))
    figure = speedup_by_device.draw(large)
    assert figure.axes[0].get_ylabel() == same
    assert not [name for name in lines(figure.axes[0]) if "tensor parallelism" in name]  # compared with itself
    figure = method_comparison.draw(few(large))
    assert figure.axes[0].get_ylabel() == same
    assert not [name for name in lines(figure.axes[0]) if "tensor parallelism" in name]


def test_compute_and_speed_ups_share_a_baseline(compared: pl.DataFrame) -> None:
    figure = method_comparison.draw(few(compared))
    for tensor_parallel in (2, 4):
        cost, speeds = xy(lines(figure.axes[2])[f"tensor parallelism, TP {tensor_parallel}"])
        assert np.asarray(cost) * np.asarray(speeds) == pytest.approx(tensor_parallel)


# --- What a run draws ---------------------------------------------------------------------------------------------------


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


@pytest.mark.usefixtures("album")
def test_a_run_over_devices_draws_them(rivals: pl.DataFrame, tmp_path: Path) -> None:
    assert {"speedup_by_device", "devices_held", "tradeoff_mean_busy_units"} <= names(of_run(tmp_path, rivals))
    drawn = names(of_run(tmp_path, formula("hardware-compare")))
    assert "speedup_by_device" in drawn
    assert not {"devices_held", "methods"} & drawn  # seven devices are too many settings for the comparison
    assert "speedup_cost_ratio" not in drawn  # derived from the devices, not swept


def test_units_of_several_devices_are_not_in_the_tradeoff(rivals: pl.DataFrame, tmp_path: Path, album: Album) -> None:
    of_run(tmp_path, rivals)
    drawn = [rows for module, (rows, *_), _, _ in album.drawn.values() if module == "tradeoff"]
    assert drawn
    for rows in drawn:
        assert set(rows["tensor_parallel"]) == {1}
        assert set(rows["method"]) == {"ppd"}


@pytest.mark.usefixtures("album")
def test_other_runs_draw_no_devices(tmp_path: Path) -> None:
    assert not {"speedup_by_device", "devices_held"} & names(of_run(tmp_path, formula("ppd-overheads")))


def test_plain_decoding_on_several_devices_is_a_separate_choice(compared: pl.DataFrame) -> None:
    figure = method_comparison.draw(few(compared))
    for panel, device in enumerate(TWO):
        for tensor_parallel in (2, 4):
            rows = compared.filter(
                pl.col("cost.device") == device, view="paths", method="autoregressive", tensor_parallel=tensor_parallel
            )
            held, speeds = xy(lines(figure.axes[3 * panel])[f"tensor parallelism, TP {tensor_parallel}"])
            assert {*zip(held, speeds, strict=True)} == {*rows.select("reserved_units", ALONE).rows()}
        assert figure.axes[3 * panel].get_title(loc="left") == device


# --- By hand ---------------------------------------------------------------------------------------------------------------


def by_hand(**more: Any) -> pl.DataFrame:
    """Plain decoding on 1, 2 and 4 devices, replicas on 2 and 4, and split replicas on 4 [speed-ups over one device]."""
    made: dict[str, Any] = {
        "point": [0, 1, 2, 3, 4, 5, 6], "view": "formula",
        "method": ["autoregressive"] * 3 + ["ppd"] * 3 + ["mine"], "tensor_parallel": [1, 2, 4, 1, 1, 2, 1],
        "reserved_units": [1, 2, 4, 2, 4, 4, 3],
        "speedup": [1.0, 1.0, 1.0, 1.25, 1.5, 1.1, 0.9], ALONE: [1.0, 1.6, 2.4, 1.25, 1.5, 1.9, 0.9],
        f"{ALONE}_input_low": [1.0, 1.5, 2.2, 1.2, None, 1.8, None], f"{ALONE}_input_high": [1.0, 1.7, 2.6, 1.3, 1.6, 2.0, None],
        "candidates": [None, None, None, 1, 3, 1, None],
        "outcomes_source": [None, None, None, "published: a table", "published: a table", "assumed", "assumed: by me"],
        "cost_source": ["assumed efficiencies of the published peaks of it", "assumed efficiencies of the published peaks of it",
                        "measured", "measured", "measured", "measured", "a published table"],
    }  # fmt: skip
    return pl.DataFrame(made).with_columns(**{name: value if isinstance(value, pl.Series | pl.Expr) else pl.lit(value)
                                              for name, value in more.items()})  # fmt: skip


def test_reserved_devices_by_hand() -> None:
    moved = by_hand().with_columns(point=pl.col("point").replace({1: 2, 2: 1, 3: 4, 4: 3}))  # those with most devices come first
    figure = reserved_devices.draw(moved.sample(fraction=1, shuffle=True, seed=3))
    drawn = shown(figure)
    assert drawn.texts == [
        "On 4 devices, tensor parallelism is 1.60 times as fast as replicas",
        "bars: input uncertainty (rates and costs); rates of Predictive Pipelined Decoding published;"
        " rates of Predictive Pipelined Decoding, mine assumed",
        "times: measured; assumed efficiencies of published peaks; a published table",
    ]
    names = ["tensor parallelism (each layer split)", "Predictive Pipelined Decoding (replicas)",
             "Predictive Pipelined Decoding, each layer split", "mine (replicas)"]  # fmt: skip
    assert drawn.legends == [("", [*names, "speed-up = devices"])]
    [panel] = drawn.panels
    assert (panel.title, panel.x, panel.y) == ("", "reserved devices", "speed-up over plain decoding on one device")
    points = {names[0]: ([2, 4], [1.6, 2.4]), names[1]: ([2, 4], [1.25, 1.5]), names[2]: ([4], [1.9]), names[3]: ([3], [0.9])}
    paths = [each for label, each in panel.lines if label == "line"]
    for index, (name, (at, speeds)) in enumerate(points.items()):
        aside = 0.05 * (index - 1.5)  # shifted around their position
        placed = [*zip(np.add(at, aside).tolist(), speeds, strict=True)]
        assert np.array(panel.line(name)) == pytest.approx(np.array(placed))
        assert np.array(paths[index]) == pytest.approx(np.array([(1.0, 1.0), *placed]))  # from plain decoding on one
    assert panel.line("one device") == [(1.0, 1.0)]
    assert panel.line("even")[0] == (1, 1)
    top = 1.08 * 2.6
    assert panel.line("even")[1] == pytest.approx((top, top))  # up to the top of the axis
    bounds = [[(low[1], high[1]) for low, high in panel.ends(f"inputs {name}")] for name in names]
    assert bounds == [[(1.5, 1.7), (2.2, 2.6)], [(1.2, 1.3)], [(1.8, 2.0)], []]
    axes = figure.axes[0]
    assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((0.8, 4.25, 0.8, top))
    assert axes.get_xticks().tolist() == [1, 2, 3, 4]
    assert axes.yaxis.get_major_formatter()(1.5, 0) == "1.5×"
    assert not odd_dashes(figure)
    # With at most 2 reserved devices the diagonal ends at 2, below the top of the axis.
    pair = by_hand().filter(pl.col("reserved_units") < 3).with_columns(**{f"{ALONE}_input_high": pl.lit(3.0)})
    figure = reserved_devices.draw(pair.drop("cost_source", "outcomes_source"))
    assert shown(figure).panels[0].line("even") == [(1, 1), (2, 2)]
    assert shown(figure).texts == [
        "On 2 devices, tensor parallelism is 1.28 times as fast as replicas",
        "bars: input uncertainty (rates and costs); no rates", "times: of unknown source",
    ]  # fmt: skip
    nothing = by_hand(outcomes_source=pl.lit(None, dtype=pl.String))
    assert shown(reserved_devices.draw(nothing)).texts[1].endswith("; no rates")


def together(parts: Iterable[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([*parts], how="diagonal_relaxed")


def on_devices(rows: pl.DataFrame, names: list[str], column: str = DEVICE) -> pl.DataFrame:
    """Repeat rows for several devices."""
    return together([rows.with_columns(pl.lit(name).alias(column), point=pl.col("point") + 100 * index)
                      for index, name in enumerate(names)])  # fmt: skip


def test_reserved_devices_fit_up_to_their_bounds() -> None:
    rows = by_hand()
    for changed, fitting in (
        (rows, True), (on_devices(rows, [*"abcd"]), True), (on_devices(rows, [*"abcde"]), False),
        # the rivals reserve only 3, or are split
        (rows.filter(~((pl.col("method") == "ppd") & (pl.col("tensor_parallel") == 1))), False),
        (rows.filter(pl.col("method") != "ppd").with_columns(reserved_units=pl.col("reserved_units").replace(3, 4)), True),
        (rows.with_columns(reserved_units=pl.when(method="ppd").then(1).otherwise("reserved_units")), False),
        (rows.with_columns(tensor_parallel=pl.lit(None, dtype=pl.Int64)), False), (rows.with_columns(reserved_units=None), False),
        (together([rows, rows.tail(1).with_columns(point=9)]), False),
        (together([rows, rows.tail(1).with_columns(point=9, tensor_parallel=2)]), True),
        (rows.filter(pl.col("tensor_parallel") == 1), False), (rows.drop("reserved_units"), False),
        (rows.drop(f"{ALONE}_input_low", f"{ALONE}_input_high"), True),
    ):  # fmt: skip
        assert reserved_devices.fits(changed) == fitting, changed
    with pytest.raises(ParameterError, match="figure of reserved devices needs at least one row"):
        reserved_devices.draw(rows.clear())
    with pytest.raises(ParameterError, match=r"figure of reserved devices needs the columns .* none called tensor_parallel"):
        reserved_devices.draw(rows.drop("tensor_parallel"))
    bare = reserved_devices.draw(rows.drop(f"{ALONE}_input_low", f"{ALONE}_input_high"))
    assert not any(bars(bare).values())


def test_choices_on_devices_by_hand() -> None:
    """Names of profiles have two lines; marks of a single choice are above their names."""
    one = by_hand(speedup_input_low=1.1, speedup_input_high=1.4).filter(point=3)
    names = ["h100-llama-2-7b", "a-100"]
    figure = speedup_by_device.draw(on_devices(one, names, PROFILE))
    drawn = shown(figure)
    assert drawn.texts == [
        "Speed-up of each method on each device",
        "bars: input uncertainty (rates and costs); rates of Predictive Pipelined Decoding published", "times: measured",
    ]  # fmt: skip
    name = "Predictive Pipelined Decoding, k = 1, 2 devices"
    assert drawn.legends == [("", [name])]
    [panel] = drawn.panels
    assert (panel.x, panel.y) == ("", "speed-up over plain decoding on one device")
    assert panel.ticks[0] == ["h100\nllama-2-7b", "a-100"]
    assert panel.line(name) == [(0, 1.25), (1, 1.25)]
    assert panel.ends(f"inputs {name}") == [((0, 1.1), (0, 1.4)), ((1, 1.1), (1, 1.4))]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 2][-1:] == [0.5]  # between the two
    assert (*figure.axes[0].get_xlim(), figure.axes[0].get_ylim()[0]) == (-0.5, 1.5, 0)
    assert figure.get_figwidth() == 9.4
    # Seven choices on seven devices: a wider page, a line of the legend for every two, marks spread around their device.
    many = on_devices(by_hand(), [*"abcdefg"])
    figure = speedup_by_device.draw(many)
    assert figure.get_size_inches().tolist() == pytest.approx([1.6 + 1.25 * 7, 0.55 + 3.4 + 1.08 + 3 * 0.21])
    drawn = shown(figure)
    [(_, choices)] = drawn.legends
    assert choices == [
        "tensor parallelism, 2 devices", "tensor parallelism, 4 devices", name, "Predictive Pipelined Decoding, k = 3, 4 devices",
        "Predictive Pipelined Decoding, k = 1, TP 2, 4 devices", "mine, 3 devices",
    ]  # fmt: skip
    for index, choice in enumerate(choices):
        across = [x for x, _ in drawn.panels[0].line(choice)]
        assert across == pytest.approx(np.arange(7) - 0.32 + 0.64 * index / 5)
    lines_between = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_label().startswith("_")]
    assert lines_between == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


def test_choices_on_devices_fit_up_to_their_bounds() -> None:
    one = by_hand().filter(point=3)
    letters = [*"abcdefghijklm"]
    for rows, fitting in (
        (on_devices(one, letters[:12]), True), (on_devices(one, letters), False), (on_devices(one, letters[:1]), False),
        (on_devices(by_hand().filter(pl.col("tensor_parallel") == 1, method="autoregressive"), letters[:2]), False),  # itself alone
        (together([on_devices(one, letters[:2]), on_devices(one, letters[:2]).with_columns(view=pl.lit("paths"))]), True),
        *((together([on_devices(one, ["a", "b"]).with_columns(point=pl.col("point") + each, candidates=each)
                      for each in range(count)]), count == 8) for count in (8, 9)),
    ):  # fmt: skip
        known = speedup_by_device.chosen(rows)
        assert (known is not None) == fitting == speedup_by_device.fits(rows), rows
    # The most exact view of a point is chosen for any order of the rows; rows without a speed-up are left out.
    mixed = together([one.with_columns(view=pl.lit(view), speedup=value, point=point) for view, value, point in (
        ("events", 3.0, 3), ("paths", 2.0, 3), ("events", 5.0, 1), ("formula", None, 3), ("paths", None, 1))])  # fmt: skip
    assert speedup_by_device.most_exact(mixed).select("point", "speedup").rows() == [(1, 5.0), (3, 2.0)]
    assert speedup_by_device.device_column(on_devices(one, ["a", "b"], "method.cost.profile")) == "method.cost.profile"
    assert speedup_by_device.device_column(on_devices(one, ["a", "b"], "cost.shape")) is None
    plain = {"reserved_units": 1, "tensor_parallel": 1, "method": "autoregressive"}
    for row, varied, said in (
        (plain, set(), "plain decoding, 1 device"),
        (plain | {"reserved_units": 2.0, "tensor_parallel": 2}, set(), "tensor parallelism, 2 devices"),
        (plain | {"method": "ppd", "candidates": 3, "exit_layer": 5}, {"candidates"},
         "Predictive Pipelined Decoding, k = 3, 1 device"),
        (plain | {"method": "skipdecode", "max_layers": 20, "min_layers": 8, "sequences": 4, "batching": None},
         {"min_layers", "max_layers", "sequences", "batching"}, "SkipDecode, 20 layers at first, 8 at last, batch of 4, 1 device"),
        (plain | {"method": "x", "acceptance_rate": 0.5, "tensor_parallel": 2, "reserved_units": 6}, {"acceptance_rate"},
         "x, α = 0.5, TP 2, 6 devices"),
    ):  # fmt: skip
        assert speedup_by_device.choice(row, varied) == said  # type: ignore[arg-type]


def test_the_baseline_by_hand() -> None:
    """Speed-ups are over one device where all rows use one or the column is missing, else only where all have that value."""
    rows = by_hand(compute_per_token=2.0, compute_per_token_low=1.0, compute_per_token_input_low=7.0)
    found, said = over_one_device(rows)
    assert said == "plain decoding on one device"
    assert found["speedup"].to_list() == rows[ALONE].to_list()
    assert found["speedup_input_low"].to_list() == rows[f"{ALONE}_input_low"].to_list()
    factor = rows["speedup"] / rows[ALONE] * rows["tensor_parallel"]
    assert found["compute_per_token"].to_list() == pytest.approx((2 * factor).to_list())
    assert found["compute_per_token_low"].to_list() == pytest.approx(factor.to_list())
    assert set(found["compute_per_token_input_low"]) == {7.0}
    for alike in (
        rows.drop("tensor_parallel"),
        rows.with_columns(tensor_parallel=1),
        rows.with_columns(tensor_parallel=pl.lit(None, dtype=pl.Int64)),
    ):
        assert over_one_device(alike)[1] == said
        assert over_one_device(alike)[0].equals(alike)
    unknown = rows.with_columns(pl.when(point=4).then(None).otherwise(ALONE).alias(ALONE))
    for same in (rows.drop(ALONE), unknown):
        assert over_one_device(same)[1] == "plain decoding on the same devices"
        assert over_one_device(same)[0].equals(same)
    # Rows without a speed-up need none over one device.
    assert over_one_device(unknown.with_columns(speedup=pl.when(point=4).then(None).otherwise("speedup")))[1] == said
    some = rows.with_columns(tensor_parallel=pl.when(point=3).then(None).otherwise("tensor_parallel"))
    assert over_one_device(some)[0]["compute_per_token"][3] == pytest.approx(2.0)  # null means one device
