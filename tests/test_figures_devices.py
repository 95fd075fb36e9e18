"""The figures of runs over several devices: marks and bars are the table's, and labels say where times and rates are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import sim
from figures import devices_held, methods, of_run, speedup_by_device, tradeoff
from figures.tradeoff import draw
from model.checks import ParameterError
from model.device import DEVICES
from sim.scenario import load
from tests.figure_checks import formula
from tests.test_figures_hardware import texts
from tests.test_figures_speculative import inside, xy
from tests.test_figures_tradeoff import lines

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
    """Ends of the vertical bars, by what they are of."""
    found = {}
    for each in figure.axes[panel].collections:
        if isinstance(each, LineCollection):
            found[str(each.get_label())] = [(float(line[0][1]), float(line[-1][1])) for line in each.get_segments()]
    return found


# --- By device ----------------------------------------------------------------------------------------------------------


def test_every_choice_stands_at_its_device(compared: pl.DataFrame) -> None:
    figure = speedup_by_device.draw(compared.sample(fraction=1, shuffle=True, seed=1).sort("point"))
    devices = load("hardware-compare")["sweep"][DEVICE]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == devices
    drawn, ends = lines(figure.axes[0]), bars(figure)
    exact = compared.filter(view="formula")
    wanted = {
        "pipelined decoding (PPD), k = 1, 2 devices": exact.filter(method="ppd", candidates=1),
        "pipelined decoding (PPD), k = 3, 4 devices": exact.filter(method="ppd", candidates=3),
        "speculative decoding, γ = 4, 1 device": exact.filter(method="speculative"),
        "tensor parallelism, 2 devices": exact.filter(method="autoregressive", ways=2),
        "tensor parallelism, 4 devices": exact.filter(method="autoregressive", ways=4),
    }
    for name, rows in wanted.items():
        at, speeds = xy(drawn[name])
        assert [devices[round(float(each))] for each in at] == rows[DEVICE].to_list()
        assert speeds == pytest.approx(rows[ALONE].to_numpy())
        bounds = rows.select(f"{ALONE}_input_low", f"{ALONE}_input_high").rows()
        assert np.array(ends[f"inputs {name}"]) == pytest.approx(np.array(bounds))
        assert name in texts(figure)
    said = texts(figure)
    for word in ("assumed efficiencies of published peaks", "pipelined decoding (PPD) published", "speculative decoding assumed"):
        assert word in said
    assert inside(figure)


def test_all_seven_hold_the_model(compared: pl.DataFrame) -> None:
    devices = compared[DEVICE].unique().to_list()
    assert len(devices) == 7
    assert compared["memory_share"].max() < 1  # type: ignore[operator]
    smaller = [name for name, each in DEVICES.items() if "float16" in each.rates and name not in devices]
    assert all(DEVICES[name].memory_bytes < 27e9 for name in smaller)  # the others would be refused


def test_devices_are_drawn_where_they_were_swept_alone(compared: pl.DataFrame) -> None:
    assert speedup_by_device.fits(compared)
    assert speedup_by_device.device_column(compared) == DEVICE
    one = compared.filter(pl.col(DEVICE) == "a100")
    assert not speedup_by_device.fits(one)
    twice = pl.concat([compared, compared.with_columns(point=pl.col("point") + 1000)])
    assert not speedup_by_device.fits(twice)  # two points of one choice on one device: something else was swept too
    assert not speedup_by_device.fits(compared.drop(DEVICE))
    assert not speedup_by_device.fits(compared.drop("ways"))
    for rows in (one, twice):
        with pytest.raises(ParameterError, match="needs rows of several devices or profiles"):
            speedup_by_device.draw(rows)
    with pytest.raises(ParameterError, match="needs at least one row"):
        speedup_by_device.draw(compared.clear())
    with pytest.raises(ParameterError, match="none called speedup"):
        speedup_by_device.draw(compared.drop("speedup"))


def test_parameters_that_vary_are_told() -> None:
    tables = load("hardware-compare")
    tables["method"] = [table for table in tables["method"] if table["name"] == "speculative"]
    del tables["outcomes"]["match"]
    tables["sweep"] = {DEVICE: ["a100", "h100"], "method.draft_length": [2, 4]}
    swept = sim.run(tables, views=["formula"])
    figure = speedup_by_device.draw(swept)
    assert {"speculative decoding, γ = 2, 1 device", "speculative decoding, γ = 4, 1 device"} <= {*lines(figure.axes[0])}
    bare = speedup_by_device.draw(swept.drop("speedup_input_low", "speedup_input_high", "cost_source", "outcomes_source"))
    assert "times: of unknown source" in texts(bare)
    assert not any(bars(bare).values())


# --- By devices held ----------------------------------------------------------------------------------------------------


def test_replicas_and_shares_stand_at_the_devices_they_hold(rivals: pl.DataFrame) -> None:
    figure = devices_held.draw(rivals)
    profiles = rivals[PROFILE].unique(maintain_order=True).to_list()
    assert [axes.get_title(loc="left") for axes in figure.axes] == profiles
    wanted = {
        "pipelined decoding (PPD): replicas": ("ppd", pl.col("ways") == 1, [2, 4]),
        "pipelined decoding (PPD), each layer split too": ("ppd", pl.col("ways") > 1, [4]),
        "tensor parallelism: each layer split": ("autoregressive", pl.col("ways") > 1, [2, 4]),
    }
    for panel, (axes, name) in enumerate(zip(figure.axes, profiles, strict=True)):
        drawn, ends = lines(axes), bars(figure, panel)
        for label, (method, which, held) in wanted.items():
            rows = rivals.filter(pl.col(PROFILE) == name, pl.col("method") == method, which).sort("held_units")
            at, speeds = xy(drawn[label])
            assert np.round(at).astype(int).tolist() == held == rows["held_units"].to_list()
            assert speeds == pytest.approx(rows[ALONE].to_numpy())
            bounds = rows.select(f"{ALONE}_input_low", f"{ALONE}_input_high").rows()
            assert np.array(ends[f"inputs {label}"]) == pytest.approx(np.array(bounds))
        across, even = xy(drawn["even"])
        assert across.tolist() == even.tolist()
    said = texts(figure)
    assert "rates of pipelined decoding (PPD) published" in said
    assert "times: composed (ai-dynamo/aiconfigurator" in said
    assert inside(figure)


def test_the_headline_is_computed(rivals: pl.DataFrame) -> None:
    at = rivals.filter(pl.col("held_units") == 4)
    shares = at.filter(method="autoregressive").sort(PROFILE)[ALONE].to_numpy()
    replicas = at.filter(pl.col("method") == "ppd", pl.col("ways") == 1).sort(PROFILE)[ALONE].to_numpy()
    low, high = (shares / replicas).min(), (shares / replicas).max()
    assert f"On 4 devices, split layers are {low:.2f} to {high:.2f} times as fast as replicas" in texts(devices_held.draw(rivals))
    one = rivals.filter(pl.col(PROFILE) == "h100-llama-2-13b").drop(PROFILE)
    figure = devices_held.draw(one)
    assert len(figure.axes) == 1
    # The best of the rivals is what shares are compared with.
    better = one.filter(pl.col("method") == "ppd", pl.col("ways") == 1, pl.col("held_units") == 4)
    better = better.with_columns(pl.lit(2.0).alias(ALONE), method=pl.lit("mine"), point=pl.lit(999, dtype=pl.Int64))
    own = one.filter(method="autoregressive", ways=4)[ALONE].item() / 2.0
    assert f"split layers are {own:.2f} times as fast" in texts(devices_held.draw(pl.concat([one, better])))
    slower = one.with_columns(pl.when(method="autoregressive").then(0.5).otherwise(ALONE).alias(ALONE))
    assert f"split layers are {0.5 / replicas[1]:.2f} times as fast" in texts(devices_held.draw(slower))


def test_devices_held_need_a_rival(rivals: pl.DataFrame, compared: pl.DataFrame) -> None:
    assert devices_held.fits(rivals)
    assert not devices_held.fits(compared)  # seven panels
    assert devices_held.fits(compared.filter(pl.col(DEVICE) == "a100"))
    alone = rivals.filter(pl.col("method") == "ppd")
    assert not devices_held.fits(alone)
    assert not devices_held.fits(rivals.filter(pl.col("method") == "autoregressive"))
    both = pl.col("method").eq("autoregressive") | pl.col("ways").gt(1)
    assert not devices_held.fits(rivals.filter(both))  # nothing there runs on replicas alone
    assert not devices_held.fits(rivals.drop("ways"))
    # Of a model that no device holds, nothing is known over one.
    assert not devices_held.fits(rivals.with_columns(pl.when(pl.col("ways") == 1).then(ALONE).alias(ALONE)))
    assert not devices_held.fits(pl.concat([rivals, rivals.with_columns(point=pl.col("point") + 1000)]))
    with pytest.raises(ParameterError, match="take those of `sim run ppd-against-tensor-parallel`"):
        devices_held.draw(alone)


# --- What speed-ups are over -----------------------------------------------------------------------------------------------


TWO = ["a100", "h100"]


def few(compared: pl.DataFrame) -> pl.DataFrame:
    """The rows of two devices, that there be room for the comparison of methods."""
    return compared.filter(pl.col("cost.device").is_in(TWO))


def test_axes_name_the_baseline(compared: pl.DataFrame, rivals: pl.DataFrame) -> None:
    """Different numbers of devices are compared over one; where the model does not fit one, each over as many as it has."""
    one, same = (f"speed-up over plain decoding on {devices}" for devices in ("one device", "the same devices"))
    assert speedup_by_device.draw(compared).axes[0].get_ylabel() == one
    assert speedup_by_device.draw(compared.filter(ways=1).drop(ALONE)).axes[0].get_ylabel() == one
    assert devices_held.draw(rivals).axes[0].get_ylabel() == one
    assert methods.draw(few(compared)).axes[0].get_ylabel() == one
    large = compared.with_columns(pl.when(pl.col("ways") == 1).then(ALONE).alias(ALONE))
    figure = speedup_by_device.draw(large)
    assert figure.axes[0].get_ylabel() == same
    assert not [name for name in lines(figure.axes[0]) if "tensor parallelism" in name]  # compared with itself
    figure = methods.draw(few(large))
    assert figure.axes[0].get_ylabel() == same
    assert not [name for name in lines(figure.axes[0]) if "tensor parallelism" in name]


def test_compute_is_over_one_device_where_speed_ups_are(compared: pl.DataFrame) -> None:
    figure = methods.draw(few(compared))
    for ways in (2, 4):
        cost, speeds = xy(lines(figure.axes[2])[f"tensor parallelism, TP {ways}"])
        assert np.asarray(cost) * np.asarray(speeds) == pytest.approx(ways)


# --- What a run draws ---------------------------------------------------------------------------------------------------


def names(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


@pytest.mark.usefixtures("unrendered")
def test_a_run_over_devices_draws_them(rivals: pl.DataFrame, tmp_path: Path) -> None:
    assert {"speedup_by_device", "devices_held", "tradeoff_mean_units"} <= names(of_run(tmp_path, rivals))
    drawn = names(of_run(tmp_path, formula("hardware-compare")))
    assert "speedup_by_device" in drawn
    assert not {"devices_held", "methods"} & drawn  # seven devices are too many settings to compare methods on
    assert "speedup_cost_ratio" not in drawn  # it was given by the devices, not swept


@pytest.mark.usefixtures("unrendered")
def test_units_of_several_devices_have_no_place_among_the_curves(
    rivals: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(tradeoff, "draw", lambda rows, x: given.append(rows) or draw(rows, x=x))
    of_run(tmp_path, rivals)
    assert given
    for rows in given:
        assert set(rows["ways"]) == {1}
        assert set(rows["method"]) == {"ppd"}


@pytest.mark.usefixtures("unrendered")
def test_other_runs_draw_no_devices(tmp_path: Path) -> None:
    assert not {"speedup_by_device", "devices_held"} & names(of_run(tmp_path, formula("ppd-overheads")))


def test_plain_decoding_on_several_devices_is_a_choice_of_its_own(compared: pl.DataFrame) -> None:
    figure = methods.draw(few(compared))
    for panel, device in enumerate(TWO):
        for ways in (2, 4):
            rows = compared.filter(pl.col("cost.device") == device, view="paths", method="autoregressive", ways=ways)
            held, speeds = xy(lines(figure.axes[3 * panel])[f"tensor parallelism, TP {ways}"])
            assert {*zip(held, speeds, strict=True)} == {*rows.select("held_units", ALONE).rows()}
        assert figure.axes[3 * panel].get_title(loc="left") == device
