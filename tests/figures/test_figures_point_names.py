"""Names of points, shared by all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
import pytest
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb

from figures.common import point_names, style, subject
from model.base.checks import ParameterError
from model.methods import registry

SAID: list[tuple[str, Any, str]] = [
    ("policy", "heuristic", "heuristic"), ("estimator", "drafted", "by drafted tokens"), ("reading", "recursive", "recursive"),
    ("rule", "per-beam", "per-beam"), ("arrangement", "nested", "nested"), ("form", "eager", "eager form"),
    ("variant", "paper", "variant paper"), ("measure", "state", "state"), ("fill", "copy", "copy"),
    ("placement", "separate", "draft separate"), ("sampled", True, "sampled"), ("beams", 4, "4 beams"), ("candidates", 3, "k = 3"),
    ("batched", True, "candidates batched"), ("draft_length", 5, "γ = 5"), ("max_draft_length", 10, "drafts up to 10"),
    ("fan_out", "[2, 1]", "fan-out [2, 1]"), ("backup", "none", "backup none"),
    ("draft_stop", "rejection", "stop at rejection"), ("max_layers", 32, "32 layers at first"), ("min_layers", 8, "8 at last"),
    ("warm_up", 2, "2 to warm up"), ("power", 0.5, "power 0.5"), ("rounding", "down", "rounded down"),
    ("exit_layer", 20, "exit layer 20"), ("layers", 40, "40 layers"), ("draft_layers", 6, "draft of 6 layers"),
    ("tensor_parallel", 4, "TP 4"),
    ("tensor_parallel", 2, "TP 2"), ("units", 3, "3 units"), ("sequences", 8, "batch of 8"), ("batch", 16, "batch of 16"),
    ("cost.device", "h100", "h100"), ("cost.profile", "mine", "mine"), ("cost.law", "own", "own"),
    ("cost.shape", "llama-68m", "llama-68m"),
    ("data_set", "xsum", "xsum"), ("head", "trained", "trained head"), ("tokens", 128, "128 tokens"),
    ("match_rate", 0.66666, "p = 0.667"), ("acceptance_rate", 0.8, "α = 0.8"), ("medium_acceptance_rate", 0.9, "medium α = 0.9"),
    ("fallback_threshold", 0.55, "fallback below 0.55"), ("rollback_threshold", 3.0, "rollback above 3"),
    ("fallback_rate", 0.12345, "f = 0.123"), ("rollback_rate", 0.01, "r = 0.01"),
    ("mean_exit_layer", 12.5, "12.5 layers on average"), ("cost_ratio", 0.05, "c = 0.05"),
    ("medium_cost_ratio", 0.25, "medium c = 0.25"), ("fitted_on", "table 3", "fitted on table 3"),
    ("batching", "static", "static"), ("outcomes.file", "mine.json", "file = mine.json"),
]  # fmt: skip


def test_every_column_with_wording_is_tested() -> None:
    assert {name for name, *_ in SAID} == {*point_names.WORDS, "outcomes.file"}


@pytest.mark.parametrize(("name", "value", "said"), SAID, ids=[name for name, *_ in SAID])
def test_wording_of_each_column(name: str, value: Any, said: str) -> None:
    assert point_names.words({name: value}, [name]) == [said]
    assert point_names.words({name: None}, [name]) == []


@pytest.mark.parametrize(("row", "said"), [
    ({"sequences": 1}, []), ({"batch": 1}, []), ({"tensor_parallel": 1}, []), ({"units": 1}, []),
    ({"placement": "colocated"}, []), ({"power": 1.0}, []), ({"estimator": "unbiased"}, []), ({"sampled": False}, []),
    ({"draft_stop": "round"}, []), ({"backup": "draft"}, []),
    ({"sequences": 1, "batching": "static"}, []), ({"sequences": 2, "batching": "static"}, ["batch of 2", "static"]),
])  # fmt: skip
def test_default_values_are_not_named(row: dict[str, Any], said: list[str]) -> None:
    assert point_names.words(row, [*row]) == said


@pytest.mark.parametrize(("row", "said"), [
    ({"method": "autoregressive"}, "plain decoding"), ({"method": "autoregressive", "tensor_parallel": 1}, "plain decoding"),
    ({"method": "autoregressive", "tensor_parallel": 2}, "tensor parallelism"),
    ({"method": "autoregressive", "tensor_parallel": 4}, "tensor parallelism"),
    ({"method": "ppd", "tensor_parallel": 2}, "Predictive Pipelined Decoding"), ({"method": "speculative"}, "speculative decoding"),
    ({"method": "adaptive"}, "adaptive drafts"),
    ({"method": "hierarchical"}, "three models"), ({"method": "beam"}, "beam search"), ({"method": "bild"}, "Big Little Decoder"),
    ({"method": "skipdecode"}, "SkipDecode"), ({"method": "early_exit"}, "early exit"), ({"method": "pearl"}, "PEARL"),
    ({"method": "mine"}, "mine"),
])  # fmt: skip
def test_methods_have_their_names(row: dict[str, Any], said: str) -> None:
    assert point_names.method(row) == said


def test_names_use_the_fewest_columns_that_distinguish_points() -> None:
    rows = pl.DataFrame({
        "point": [0, 1, 2, 3], "method": ["ppd", "ppd", "speculative", "speculative"], "candidates": [1, 3, None, None],
        "draft_length": [None, None, 4, 4], "tokens": [64, 64, 64, 64], "cost.device": ["a", "a", "a", "b"],
    })  # fmt: skip
    assert point_names.distinguishing(rows) == ["candidates", "cost.device"]
    assert point_names.distinguishing(rows, ["draft_length"]) == []
    assert point_names.distinguishing(rows, ["cost.device"]) == ["cost.device"]
    assert point_names.distinguishing(rows.drop("method"), ["draft_length"]) == ["draft_length"]
    assert point_names.names(rows) == {
        0: "Predictive Pipelined Decoding, k = 1, a", 1: "Predictive Pipelined Decoding, k = 3, a", 2: "speculative decoding, a",
        3: "speculative decoding, b",
    }  # fmt: skip
    assert point_names.names(rows.head(2)) == {0: "k = 1", 1: "k = 3"}
    assert point_names.names(rows.head(1)) == {0: "Predictive Pipelined Decoding"}
    assert point_names.names(rows.head(1).drop("method")) == {0: "point 0"}
    assert point_names.common(rows) == ["64 tokens"]
    assert point_names.common(rows.head(2)) == ["Predictive Pipelined Decoding", "64 tokens"]
    assert point_names.common(rows.head(2), ["tokens", "cost.device"]) == ["Predictive Pipelined Decoding", "a", "64 tokens"]


def test_once_keeps_the_last_row_of_each_point() -> None:
    rows = pl.DataFrame({"point": [0, 0, 1], "view": ["formula", "paths", "formula"]})
    assert point_names.one_row_per_point(rows)["view"].to_list() == ["paths", "formula"]


def test_columns_are_added_only_until_points_are_distinct() -> None:
    """Parameters come first, then swept axes, then the conditions of a run; other columns are not used."""
    rows = pl.DataFrame({
        "point": [0, 1], "method": "ppd", "note": ["x", "y"], "outcomes.file": ["a", "b"], "tokens": [8, 9],
        "match_rate": [0.1, 0.2],
    })  # fmt: skip
    assert point_names.distinguishing(rows) == ["outcomes.file"]
    assert point_names.distinguishing(rows.drop("outcomes.file")) == ["tokens"]
    assert point_names.distinguishing(rows.with_columns(units=pl.col("tokens"))) == ["units"]
    assert point_names.distinguishing(rows, ["match_rate", "tokens"]) == ["tokens"]
    assert point_names.distinguishing(rows.select("point", "method", "note")) == []
    assert point_names.distinguishing(rows.with_columns(method=pl.Series(["ppd", "beam"]))) == []
    assert point_names.names(rows.with_columns(method=pl.Series(["ppd", "beam"]))) == {
        0: "Predictive Pipelined Decoding", 1: "beam search",
    }  # fmt: skip
    assert point_names.names(rows.drop("method", "outcomes.file")) == {0: "8 tokens", 1: "9 tokens"}
    assert point_names.common(rows.drop("point")) == ["Predictive Pipelined Decoding"]
    # Values shared by all points: parameters in a choice's name, batch, tokens and costs.
    alike = pl.DataFrame([{"point": 0, "policy": "p", "candidates": 2, "match_rate": 0.5, "draft_length": 4, "acceptance_rate": 0.5,
                           "fallback_rate": 0.1, "rollback_rate": 0.2, "max_layers": 6, "min_layers": 5, "exit_layer": 4,
                           "variant": "v", "sequences": 8, "batching": "static", "tokens": 64, "cost_ratio": 0.1, "head": "own",
                           "layers": 9, "units": 3, "data_set": "d"}])  # fmt: skip
    assert point_names.common(alike) == [
        "p", "variant v", "k = 2", "γ = 4", "6 layers at first", "5 at last", "exit layer 4", "batch of 8", "static", "64 tokens",
        "p = 0.5", "α = 0.5", "f = 0.1", "r = 0.2", "c = 0.1",
    ]  # fmt: skip
    assert point_names.common(alike.clear(), []) == []
    assert point_names.words({"sequences": 1, "batching": "static", "units": 2}, ["units", "batching", "sequences"]) == ["2 units"]
    assert point_names.words({"a.b.c": 5, "sampled": False}, ["a.b.c", "sampled", "missing"]) == ["c = 5"]
    assert (
        point_names.method({"method": "autoregressive", "tensor_parallel": 2})
        == point_names.SPLIT
        == "tensor parallelism"
    )


# --- Shared style ------------------------------------------------------------------------------------------------


def test_looks_are_distinct_for_any_number() -> None:
    few = style.series_styles(6)
    assert [style.colour for style in few] == [*style.COLOURS]
    assert [style.marker for style in few] == [*style.MARKERS[:6]]
    assert [style.line for style in few] == [*style.LINES]
    # Solid, dashed, dash-dotted, dotted, long dashes, and dash with two dots: each begins with its first stroke.
    dashes = [(), (4, 1.6), (6, 2, 1, 2), (1, 1.6), (10, 2), (5, 1, 1, 1, 1, 1)]
    assert [*style.LINES] == [(0, each) for each in dashes]
    many = style.series_styles(14)
    shades = [sum(to_rgb(style.colour)) for style in many]
    assert shades == sorted(shades)  # from dark to light
    assert len({*shades}) == 14
    assert [to_hex(colormaps["cividis"](share)) for share in (0.0, 0.85)] == [many[0].colour, many[-1].colour]
    assert [style.marker for style in many] == [*style.MARKERS, *style.MARKERS[:2]]
    assert [style.line for style in many] == [style.LINES[index % 6] for index in range(14)]
    kinds = style.category_styles(12)
    assert [(style.colour, style.marker, style.line) for style in kinds] == [
        (style.COLOURS[index % 6], style.MARKERS[index], style.LINES[index % 6]) for index in range(12)
    ]
    assert style.points("#123456") == {
        "formula": (9.5, "none", "#123456"), "paths": (6.0, "#123456", "#123456"), "events": (3.0, "#000000", "#000000"),
    }  # fmt: skip
    assert [*style.COLOURS] == ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]


def test_figures_use_these_settings_only() -> None:
    """Text of 10 points, titles of 12 at the left, legends of 9 without a frame; thin grids below the artists."""
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9}):
        with style.styled():
            found = dict(matplotlib.rcParams)
        assert matplotlib.rcParams["font.size"] == 20
    assert dict(matplotlib.rcParams) == before
    wanted: dict[str, Any] = {
        "font.size": 10, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 9,
        "legend.title_fontsize": 9, "hatch.linewidth": 0.6, "svg.hashsalt": "decodesim", "svg.fonttype": "path",
        "text.hinting": "none",
    }  # fmt: skip
    backend = {"backend", "backend_fallback"}
    assert {name: found[name] for name in wanted} == wanted
    others = {name for name in found if found[name] != matplotlib.rcParamsDefault[name]} - {*wanted} - backend
    assert not others
    for figure in (style.canvas(1, 1, (0, 0, 1, 1))[0], style.panels_in_row(1, 1, 0, 1, 0)[0]):
        assert isinstance(figure.canvas, FigureCanvasAgg)  # text is measured by this canvas only


@pytest.mark.parametrize(("count", "wide"), [(1, 5.6), (2, 4.2), (3, 3.2), (4, 3.2)])
def test_layout_of_panels_in_a_row(count: int, wide: float) -> None:
    figure, panels = style.panels_in_row(count, 4.0, 0.125, 0.75, 0.5)
    width, height = figure.get_size_inches()
    assert (width, height) == pytest.approx((0.8 + count * (wide + 0.5), 4.0))
    for index, axes in enumerate(panels):
        box = axes.get_position()
        assert (box.x0 * width, box.width * width) == pytest.approx((0.8 + index * (wide + 0.5), wide))
        assert (box.y0, box.y1) == pytest.approx((0.125, 0.75))


def test_a_page_grows_with_its_labels_and_has_its_subject_at_the_top() -> None:
    figure, axes = style.canvas(6.0, 4.0, (0.1, 0.2, 0.5, 0.25))
    assert axes.get_position().bounds == pytest.approx((0.1, 0.2, 0.5, 0.25))
    assert style.page(figure).bounds == pytest.approx((0, 0, 6, 4))
    figure.text(1.1, 0.5, "beyond")
    assert style.page(figure).x1 > 6.6
    assert style.page(figure).y1 == pytest.approx(4)
    assert style.with_subject_line(figure, "") is figure
    assert len(figure.texts) == 1
    style.with_subject_line(figure, "mine")
    assert figure.texts[1].get_position() == pytest.approx((0.1 / 6, 1 - 0.09 / 4))  # without a title, near the edge
    assert (figure.texts[1].get_text(), figure.texts[1].get_fontsize(), figure.texts[1].get_gid()) == ("mine", 8, "subject")
    titled, _ = style.canvas(5.0, 4.0, (0.1, 0.2, 0.5, 0.25))
    titled.text(0.3, 0.9, "small", fontsize=11.9)
    titled.text(0.2, 0.9, "title", fontsize=12)
    said = "long words " * 20
    line = style.with_subject_line(titled, said).texts[-1]
    assert line.get_position()[0] == 0.2
    assert line.get_fontsize() == pytest.approx(8 * 0.8 * 5 / (0.065 * len(said)))  # small enough to fit


def test_names_of_methods_are_unique() -> None:
    for short in (False, True):
        labels = [registry.label(name, short=short) for name in registry.names()]
        assert len({*labels}) == len(labels)
        assert all(labels)
    assert all(registry.parameters(name).LABEL for name in registry.names())
    assert registry.label("ppd-processes", short=True) == "PPD, processes"
    assert registry.label("from_outside.mine") == "from_outside.mine"
    assert [style.NAMES[view] for view in style.VIEWS] == ["formula", "simulated: paths", "simulated: events"]


def test_demand_adds_optional_columns_and_refuses_missing_ones() -> None:
    rows = pl.DataFrame({"a": [1], "b": [2]})
    found = style.require_columns(rows, "it", ("a", "b"), ("b", "c", "c", "d"))
    assert found.to_dicts() == [{"a": 1, "b": 2, "c": None, "d": None}]
    assert style.require_columns(rows, "it", ("a",)).equals(rows)
    with pytest.raises(ParameterError, match=r"^it needs at least one row, got none; take rows of a finished run$"):
        style.require_columns(rows.clear(), "it", ("a",))
    with pytest.raises(ParameterError, match=r"^it needs the columns a, x, y, got none called x, y$"):
        style.require_columns(rows, "it", ("a", "x", "y"))


@pytest.mark.parametrize(("tables", "said"), [
    ({}, ""), ({"scenario": {"name": "mine"}}, "mine"), ({"cost": {"device": "h100"}}, "h100"),
    ({"scenario": {"name": "mine"}, "cost": {
        "cost_ratio": 0.12345, "context": 512, "prompt": 8, "tensor_parallel": 2, "dtype": "float16", "profile": "p",
        "device": "d", "medium_shape": "m", "draft_shape": "s", "shape": "l", "kind": "roofline"}},
     "mine: l, draft s, medium m, d, profile p, float16, TP 2, prompt of 8 tokens, context of 512 tokens, c = 0.123"),
    ({"cost": {"device": "d", "shape": "l"}, "sweep": {"cost.device": ["d", "e"], "method.sequences": [1, 2]},
      "method": {"name": "x", "sequences": 4, "batching": "static", "batch": 3}}, "l, batch of 3, static batching"),
    # Several methods: the values they share, from the run's costs or their separate ones.
    ({"cost": {"device": "d", "shape": "l"}, "method": [
        {"sequences": 4, "cost": {"device": "e"}}, {"sequences": 8, "cost": {"shape": "l", "tensor_parallel": 2}}]}, "l, TP 2"),
    ({"method": [{"sequences": 4, "cost": {"device": "e"}}, {"sequences": 4, "cost": {"device": "e"}}]}, "e, batch of 4"),
    ({"method": [{"sequences": 4}, {}]}, ""), ({"method": [{}, {"sequences": 4}]}, ""), ({"cost": {"device": None}}, ""),
])  # fmt: skip
def test_subject_of_the_figures_of_a_run(tables: dict[str, Any], said: str) -> None:
    assert subject.of_scenario(tables) == said


def test_subject_is_read_from_the_metadata_of_a_run(tmp_path: Path) -> None:
    assert subject.of_run(tmp_path) == ""
    for text, said in (('{"scenario": {"scenario": {"name": "mine"}}}', "mine"), ("{}", ""), ("nothing", ""), ("[]", ""),
                       ('{"scenario": []}', ""), ('{"scenario": {"cost": []}}', "")):  # fmt: skip
        (tmp_path / "metadata.json").write_text(text, encoding="utf-8")
        assert subject.of_run(tmp_path) == said
