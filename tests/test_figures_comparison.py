"""The figures of predicted against measured, by their artists: what stands where, and the numbers said."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

from figures import error_by_method, formula_limits, gantt_pair, predicted_measured, save, time_parts
from figures.style import MARKERS, METHODS
from model import comparison, runs
from model.checks import ParameterError
from model.measured import Measured
from model.pass_cost import PassCost
from sim import compare, limits
from sim.cli import app
from tests.comparisons import every
from tests.test_figures_real import dashes
from tests.test_figures_speculative import inside, xy
from tests.test_figures_tradeoff import lines, words


@lru_cache(maxsize=1)
def table() -> pl.DataFrame:
    return compare.compare(*every())


def rows(**more: Any) -> pl.DataFrame:
    """Rows by hand: errors of 1 %, -10 %, 4 % and 20 %."""
    measured, errors = np.array([0.1, 0.2, 0.4, 0.8]), np.array([0.01, -0.1, 0.04, 0.2])
    made = {
        "method": ["ppd", "ppd", "bild", "bild"], "settings": ["a", "b", "c", "c"], "prompt": "x", "measured_s": measured,
        "predicted_s": measured * (1 + errors), "error": errors, "noise": [0.01, 0.02, 0.08, 0.1], "disturbed": False,
        "mismatch": "",
    }  # fmt: skip
    return pl.DataFrame(made | more)


# --- Predicted over measured --------------------------------------------------------------------------------------------


def test_every_decoding_stands_at_its_times() -> None:
    found = table()
    figure = predicted_measured.draw(found)
    above, below = (lines(axes) for axes in figure.axes)
    for method in dict.fromkeys(found["method"]):
        own = found.filter(method=method)
        x, y = xy(above[method])
        assert x.tolist() == pytest.approx((1e3 * own["measured_s"]).to_list())
        assert y.tolist() == pytest.approx((1e3 * own["predicted_s"]).to_list())
        assert xy(below[method])[1].tolist() == pytest.approx((100 * own["error"]).to_list())
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert inside(figure)


def test_the_bands_are_five_percent_and_the_noise() -> None:
    figure = predicted_measured.draw(rows())
    axes = figure.axes[0]
    assert np.array_equal(*xy(lines(axes)["equal"]))
    (band,) = [each for each in axes.collections if each.get_label() == "band"]
    vertices = band.get_paths()[0].vertices
    ratios = {round(float(y / x), 9) for x, y in vertices}
    assert ratios == {0.95, 1.05}
    dotted = [line for line in axes.lines if line.get_label() == "noise"]
    assert sorted(round(float(y[0] / x[0]), 9) for x, y in map(xy, dotted)) == [0.925, 1.075]  # 1.5 times the median of .05
    assert {round(float(xy(line)[1][0]), 9) for line in figure.axes[1].lines if line.get_label() == "noise"} == {-7.5, 7.5}


def test_the_answer_is_that_of_the_rows() -> None:
    assert "median error 7.0 %; 50 % of 4 decodings (3 settings) are within 5 %" in words(predicted_measured.draw(rows()))
    assert "ANOTHER machine" not in words(predicted_measured.draw(rows()))
    assert "ANOTHER machine" in words(predicted_measured.draw(rows(mismatch=["", "", "cores differ", ""])))


def test_disturbed_runs_are_hollow() -> None:
    figure = predicted_measured.draw(rows(disturbed=[True, False, True, False]))
    drawn = lines(figure.axes[0])
    assert drawn["ppd disturbed"].get_markerfacecolor() == "none" != drawn["ppd"].get_markerfacecolor()
    for name, at in (("ppd disturbed", 100), ("ppd", 200), ("bild disturbed", 400), ("bild", 800)):
        assert xy(drawn[name])[0].tolist() == [at]
    assert "disturbed" in words(figure)
    assert "disturbed" not in words(predicted_measured.draw(rows()))


def test_ten_methods_are_told_apart_without_colour() -> None:
    names = [*METHODS]
    many = pl.concat([rows().head(1).with_columns(method=pl.lit(name)) for name in names])
    figure = predicted_measured.draw(many)
    drawn = lines(figure.axes[0])
    assert len({drawn[name].get_marker() for name in names}) == len(names) >= 10
    assert all(METHODS[name] in words(figure) for name in names)
    assert inside(figure)
    more = pl.concat([rows().head(1).with_columns(method=pl.lit(str(each))) for each in range(len(MARKERS) + 1)])
    with pytest.raises(ParameterError, match=f"room for at most {len(MARKERS)} methods, got {more.height}"):
        predicted_measured.draw(more)


# --- Errors by method ---------------------------------------------------------------------------------------------------


def test_errors_stand_in_the_row_of_their_method() -> None:
    figure = error_by_method.draw(rows())
    axes = figure.axes[0]
    drawn = lines(axes)
    for level, method in enumerate(("ppd", "bild")):
        own = rows().filter(method=method)
        x, y = xy(drawn[method])
        assert x.tolist() == pytest.approx((100 * own["error"]).to_list())
        assert np.all(np.abs(y - level) < 0.5)
        assert xy(drawn[f"median {method}"])[0].tolist() == pytest.approx([100 * own["error"].median()] * 2)  # type: ignore[operator]
    spans = {patch.get_label(): patch for patch in axes.patches if isinstance(patch, Rectangle)}
    # The larger of 5 % and 1.5 times the median noise: .015 and .09.
    for method, bound in (("ppd", 5.0), ("bild", 13.5)):
        span = spans[f"bound {method}"]
        assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((-bound, bound))
    assert inside(figure)


def test_who_keeps_its_bound_is_said() -> None:
    """The median of .01 and .10 is above 5 %; of .04 and .20 it is below 13.5 %, and nine of ten below twice that."""
    said = words(error_by_method.draw(rows()))
    assert "1 of 2 methods keep their bound; 4 measured decodings" in said
    assert said.count("MISSED") == 1
    assert [label.get_text() for label in error_by_method.draw(rows()).axes[0].get_yticklabels()] == ["PPD (2)", "BiLD (2)"]


def test_the_bound_is_the_larger_of_two_and_ninth_deciles_count() -> None:
    assert [each["bound"] for each in comparison.by_method(rows())] == pytest.approx([0.05, 0.135])
    ten = pl.DataFrame({"method": "ppd", "settings": "a", "error": [0.0] * 8 + [0.2] * 2, "noise": 0.0})
    assert not comparison.by_method(ten)[0]["held"]
    assert comparison.by_method(ten.with_columns(error=pl.lit(0.05)))[0]["held"]


# --- Where the time goes ------------------------------------------------------------------------------------------------


def parts(figure: Figure) -> dict[str, tuple[float, float]]:
    """From where to where a bar goes, from lower to upper."""
    found = {}
    for bar in figure.axes[0].containers:
        assert isinstance(bar, BarContainer)
        (patch,) = bar.patches
        found[str(bar.get_label())] = (patch.get_y(), patch.get_y() + patch.get_height())
    return found


def times(predicted: dict[str, float], measured: dict[str, float]) -> pl.DataFrame:
    made: dict[str, Any] = {"method": "bild", "settings": "x", "error": sum(predicted.values()) / sum(measured.values()) - 1}
    for whose, own in (("predicted", predicted), ("measured", measured)):
        made |= {f"{whose}_{part}_s": own.get(part, 0.0) for part in comparison.PARTS} | {f"{whose}_total_s": sum(own.values())}
    return pl.DataFrame([made])


def test_the_waterfall_leads_from_the_prediction_to_the_measurement() -> None:
    figure = time_parts.draw(times({"target": 0.2, "draft": 0.1, "rest": 0.05}, {"target": 0.45, "draft": 0.05, "rest": 0.05}))
    found = parts(figure)
    assert found["predicted"] == pytest.approx((0, 350))
    assert found["target"] == pytest.approx((350, 600))
    assert found["draft"] == pytest.approx((550, 600))
    assert found["rest"] == pytest.approx((550, 550))
    assert found["measured"] == pytest.approx((0, 550))
    assert set(found) == {"predicted", "target", "draft", "rest", "measured"}  # what a run has not is left out
    said = words(figure)
    assert "+250.0 (200.0 → 450.0)" in said
    assert "\N{MINUS SIGN}50.0 (100.0 → 50.0)" in said
    assert "off by \N{MINUS SIGN}36.4 %" in said
    assert inside(figure)


def test_small_differences_are_seen_on_an_axis_that_says_that_it_is_cut() -> None:
    figure = time_parts.draw(times({"target": 0.200}, {"target": 0.204}))
    low, high = figure.axes[0].get_ylim()
    assert high - low < 10
    assert f"(axis cut at {low:.0f})" in figure.axes[0].get_ylabel()
    assert time_parts.draw(times({"target": 0.1}, {"target": 0.3})).axes[0].get_ylim()[0] == 0
    assert time_parts.draw(times({"target": 0.1}, {"target": 0.1})).axes[0].get_ylim()[0] == 0


def test_the_worst_run_is_drawn_unless_another_is_asked_for() -> None:
    found = table()
    worst = found.row(int(found["error"].abs().arg_max() or 0), named=True)
    assert parts(time_parts.draw(found))["predicted"][1] == pytest.approx(1e3 * worst["predicted_total_s"])
    other = found.row(3, named=True)
    assert parts(time_parts.draw(found, 3))["measured"][1] == pytest.approx(1e3 * other["measured_total_s"])
    with pytest.raises(ParameterError, match="row must be"):
        time_parts.draw(found, found.height)


def test_of_several_processes_it_says_whose_time_it_is() -> None:
    found = table().with_row_index().filter(pl.col("units") > 1)
    drawn = time_parts.draw(table(), found["index"][0])
    assert "the main process of 2" in words(drawn)
    assert set(parts(drawn)) == {"predicted", "target", "rest", "measured"}
    assert "main process" not in words(time_parts.draw(table(), 0))
    assert inside(time_parts.draw(table(), found["index"][0]))


def test_the_steps_of_every_run_lead_to_what_was_measured() -> None:
    for row in table().iter_rows(named=True):
        more = sum(each.more for each in time_parts.steps(row))
        assert row["predicted_total_s"] + more == pytest.approx(row["measured_total_s"])


def test_a_prediction_is_its_parts_and_nothing_else() -> None:
    """Every pass and every read is entered once: what is left of the whole is nothing."""
    assert table().height > 20
    assert set(table()["units"]) == {1, 2}
    assert table()["predicted_rest_s"].abs().max() < 1e-12  # type: ignore[operator]


# --- Real and simulated Gantt -------------------------------------------------------------------------------------------


def intervals(stretch: float = 1.0, start: float = 0.0) -> pl.DataFrame:
    found, profiles = every()
    (number,) = [number for number, each in found.timed.items() if each.units == 2 and found.log.names[number] == "prompt 1"]
    cost = PassCost({role: Measured(each) for role, each in profiles.items()}, dispatch=2e-4, promotion=1e-4)
    run = compare.predict(found.timed[number].decoding, cost, 2, record=True).run
    made = pl.DataFrame([each._asdict() for each in run.intervals], infer_schema_length=None)
    return made.with_columns(*((start + stretch * pl.col(name)).alias(name) for name in ("start", "end")))


def spans(axes: Axes) -> list[tuple[str, float, float]]:
    """The kind of every bar of a panel, and from when to when it goes."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        boxes = [path.get_extents() for path in collection.get_paths()]
        found += [(str(collection.get_label()), float(box.x0), float(box.x1)) for box in boxes]
    return found


def test_both_runs_stand_on_one_axis_from_their_own_beginnings() -> None:
    simulated, real = intervals(), intervals(1.25, 7.0)
    figure = gantt_pair.draw(real, simulated)
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    for axes, frame in ((upper, real), (lower, simulated)):
        first = float(frame["start"].min())  # type: ignore[arg-type]
        own = {(round(1e3 * (low - first), 6), round(1e3 * (high - first), 6)) for low, high in frame.select("start", "end").rows()}
        assert {(round(low, 6), round(high, 6)) for _, low, high in spans(axes)} == own
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["measured", "simulated"]
    ends = [float(xy(lines(axes)[f"end {name}"])[0][0]) for axes, name in ((upper, "measured"), (lower, "simulated"))]
    assert ends[0] == pytest.approx(1.25 * ends[1])
    assert "\N{MINUS SIGN}20.0 %" in words(figure)
    assert [label.get_text() for label in lower.get_yticklabels()] == ["unit 0 (main)", "unit 1", "links"]
    assert inside(figure)


def test_a_stretch_of_both_is_shown_alone() -> None:
    figure = gantt_pair.draw(intervals(), intervals(), between=(20.0, 60.0))
    assert figure.axes[0].get_xlim() == (20.0, 60.0)
    assert all(20 <= low <= high <= 60 for axes in figure.axes for _, low, high in spans(axes))
    assert inside(figure)
    with pytest.raises(ParameterError, match="where the measured one has none"):
        gantt_pair.draw(intervals(), intervals(), between=(1e6, 2e6))
    with pytest.raises(ParameterError, match="a start and a later end"):
        gantt_pair.draw(intervals(), intervals(), between=(5.0, 5.0))


def test_what_real_processes_do_besides_has_bars_of_its_own() -> None:
    """`head` and `wait` of `model.spans`; a simulated head is a pass of no layers or a read."""
    base = {"unit": 0, "process": 0, "position": 3, "first": 0, "last": 12, "fate": "kept"}
    real = pl.DataFrame([
        base | {"start": 0.0, "end": 1.0, "what": "forward"}, base | {"start": 1.0, "end": 1.5, "what": "head"},
        base | {"start": 1.5, "end": 2.0, "what": "wait"},
    ])  # fmt: skip
    simulated = pl.DataFrame([
        base | {"start": 0.0, "end": 1.0, "what": "forward"}, base | {"start": 1.0, "end": 1.4, "what": "forward", "first": 12},
        base | {"start": 1.4, "end": 1.5, "what": "read"},
    ])  # fmt: skip
    upper, lower = gantt_pair.draw(real, simulated).axes
    assert spans(upper) == [("kept", 0, 1000), ("head", 1000, 1500), ("wait", 1500, 2000)]
    assert [kind for kind, *_ in spans(lower)] == ["kept", "head", "head"]


# --- Where formulas stop being true -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def claims() -> pl.DataFrame:
    found, profiles = every()
    return limits.limits(found, table(), profiles)


@pytest.mark.parametrize("claim", ["verify", "ppd", "skipdecode", "bild", "bus"])
def test_formula_simulation_and_measurement_stand_at_their_places(claim: str) -> None:
    own = claims().filter(claim=claim)
    figure = formula_limits.draw(own)
    axes = figure.axes[0]
    for (name,), part in own.group_by("series", maintain_order=True):
        part = part.sort("x")
        for quantity in formula_limits.QUANTITIES:
            x, y = xy(lines(axes)[f"{quantity} {name}".strip()])
            assert x.tolist() == part["x"].to_list()
            assert y.tolist() == part[quantity].to_list()
        (bar,) = [each for each in axes.collections if each.get_label() == f"noise {name}".strip()]
        assert isinstance(bar, LineCollection)
        ends = [(float(low[1]), float(high[1])) for low, high in bar.get_segments()]
        expected = [(each["measured"] * (1 - each["noise"]), each["measured"] * (1 + each["noise"])) for each in part.to_dicts()]
        assert ends == [pytest.approx(each) for each in expected]
    errors = [np.median(np.abs(own[name] / own["measured"] - 1)) for name in ("formula", "simulated")]
    assert f"median error: formula {100 * errors[0]:.1f} %, simulation {100 * errors[1]:.1f} %" in words(figure)
    assert formula_limits.TITLES[claim] in words(figure)
    assert inside(figure)


def test_the_three_are_told_apart_without_colour() -> None:
    drawn = lines(formula_limits.draw(claims().filter(claim="skipdecode")).axes[0])
    name = "max_layers=12"
    assert drawn[f"measured {name}"].get_linestyle() == "None"
    assert dashes(drawn[f"formula {name}"]) != dashes(drawn[f"simulated {name}"])


def test_claims_that_nobody_has_simulated_or_named_are_drawn_too() -> None:
    made = {"claim": "bus", "x": [1.0, 2.0], "formula": [1.0, 1.0], "measured": [1.0, 1.3], "noise": [0.01, None],
            "x_name": "processes", "y_name": "pass [ms]"}  # fmt: skip
    figure = formula_limits.draw(pl.DataFrame(made).with_columns(simulated=pl.lit(None, dtype=pl.Float64)))
    assert {"formula", "measured"} == set(lines(figure.axes[0]))
    assert "median error: formula 11.5 %" in words(figure)


def test_rows_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(ParameterError, match="rows of one claim, got verify, ppd, skipdecode, bild, bus"):
        formula_limits.draw(claims())
    many = pl.concat([claims().head(1).with_columns(series=pl.lit(str(each))) for each in range(9)])
    with pytest.raises(ParameterError, match="at most 6 series of a claim, got 9"):
        formula_limits.draw(many)
    assert "6 of 9 series drawn" in words(formula_limits.draw(formula_limits.few(many)))
    for draw in (predicted_measured.draw, error_by_method.draw, time_parts.draw, formula_limits.draw):
        with pytest.raises(ParameterError, match="at least one row"):
            draw(table().clear())
        with pytest.raises(ParameterError, match="needs the columns"):
            draw(table().select("prompt"))
    with pytest.raises(ParameterError, match="must be above 0"):
        predicted_measured.draw(rows(measured_s=0.0))


# --- All of them --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unrendered")
def test_a_comparison_is_drawn_by_the_command(tmp_path: Path) -> None:
    from model import profile

    found, profiles = every()
    runs.save(found, tmp_path / "one.json")
    options = []
    for role, each in profiles.items():
        options += ["--profile", f"{role}={profile.save(each, tmp_path)}"]
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "one.json"), *options, "--figures", str(tmp_path / "drawn")])
    assert done.exit_code == 0, done.output
    names = {"predicted_measured", "error_by_method", "time_parts", "gantt_pair"}
    names |= {f"limits_{claim}" for claim in set(claims()["claim"])}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert all(f"{name}.png" in done.output for name in names)


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    several = {
        "p": predicted_measured.draw(table()), "e": error_by_method.draw(table()), "t": time_parts.draw(table()),
        "g": gantt_pair.draw(intervals(1.1), intervals()), "l": formula_limits.draw(claims().filter(claim="verify")),
    }  # fmt: skip
    for name, figure in several.items():
        for one, other in zip(save(figure, tmp_path / f"{name}1"), save(figure, tmp_path / f"{name}2"), strict=True):
            assert one.read_bytes() == other.read_bytes()
