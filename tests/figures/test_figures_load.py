"""Figures of servers under load show the rows that they are drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import figures
from figures.of_load import server_over_time, switch_off_map, throughput_frontier
from model.base.checks import ParameterError


def row(policy: str, rate: float | None, tpot: float | None, speed: float, *, stable: bool = True, **more: Any) -> dict[str, Any]:
    clients = more.pop("concurrency", None)
    return {
        "rate": rate, "concurrency": clients, "policy": policy, "stable": stable, "mean_tpot_ms": tpot,
        "mean_tpot_ms_low": None if tpot is None else 0.9 * tpot, "mean_tpot_ms_high": None if tpot is None else 1.2 * tpot,
        "output_tokens_per_s": speed, "output_tokens_per_s_low": 0.8 * speed, "output_tokens_per_s_high": 1.1 * speed,
    }  # fmt: skip


TABLE = [
    row("off", 2.0, 8.0, 250.0), row("static:3", 2.0, 4.5, 255.0), row("off", 20.0, 30.0, 2400.0, stable=False),
    row("static:3", 20.0, 14.0, 2500.0), row("vllm:[[1,64,3],[65,128,2],[129,512,0]]", 20.0, None, 2500.0),
]  # fmt: skip
MAP = [
    {"context": context, "running": running, "draft_length": None if context * running > 40_000 else length,
     "gain_over_off": None if context * running > 40_000 else gain}
    for context, running, length, gain in ((512, 1, 4, 1.7), (512, 8, 2, 1.25), (512, 64, 0, 1.0), (8192, 1, 3, 1.3),
                                           (8192, 8, 3, 1.1), (8192, 64, 1, 1.0))
]  # fmt: skip


def series(policy: str, rate: float = 20.0, blocks: float = 3.0) -> dict[str, Any]:
    return {"rate": rate, "concurrency": None, "policy": policy, "time_s": [1.0, 2.5, 3.0], "running": [1.0, 4.0, 2.0],
            "waiting": [0.0, 0.0, 0.0], "draft_length": [0.0, 3.0, 2.5], "blocks": [blocks, 2 * blocks, blocks]}  # fmt: skip


SERIES = [series("off"), series("static:3"), series("off", 2.0)]
CONTENT = {
    "model": "llama-3.1-8b", "gpu": "h100", "tensor_parallel": 2, "replicas": 1, "table": TABLE, "by_context": MAP,
    "series": SERIES,
}  # fmt: skip


def frontier() -> Any:
    return throughput_frontier.draw(throughput_frontier.curves_of(TABLE), title="llama on h100")


def off_map() -> Any:
    return switch_off_map.draw(switch_off_map.cells_of(MAP), title="llama on h100")


def over_time() -> Any:
    return server_over_time.draw(server_over_time.series_of(SERIES, 20.0, None), title="llama on h100, 20/s")


def test_a_curve_goes_through_the_loads_of_its_policy() -> None:
    axes = frontier().axes[0]
    lines = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert [*lines] == ["off", "static:3"]  # without a time per token there is no point
    assert lines["off"].get_xydata().tolist() == [[8.0, 250.0], [30.0, 2400.0]]
    assert lines["static:3"].get_xydata().tolist() == [[4.5, 255.0], [14.0, 2500.0]]
    opened = [line.get_xydata().tolist() for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert opened == [[[30.0, 2400.0]]]
    bounds = {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}
    assert {((7.2, 250.0), (9.6, 250.0)), ((8.0, 200.0), (8.0, 275.0))} <= {
        tuple((round(x, 6), round(y, 6)) for x, y in each) for each in bounds
    }
    assert {text.get_text() for text in axes.texts} == {"2/s", "20/s"}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_map_names_each_best_length_and_its_gain() -> None:
    axes = off_map().axes[0]
    words = {(text.get_position()[0], text.get_text()) for text in axes.texts}
    assert words == {(0, "4"), (0, "1.70×"), (1, "2"), (1, "1.25×"), (2, "off"), (0, "3"), (0, "1.30×")}
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == 2
    shades = {text.get_text(): axes.patches[index].get_facecolor()[0] for index, text in ((0, axes.texts[0]), (1, axes.texts[2]))}
    assert shades["4"] < shades["2"]  # a longer draft is darker


def test_each_slice_of_a_series_ends_where_it_says() -> None:
    panels = over_time().axes
    assert [each.get_ylabel().replace("\n", " ") for each in panels] == ["running requests", "draft length", "blocks of the cache"]
    line = panels[0].lines[0]
    assert line.get_drawstyle() == "steps-pre"  # a value holds up to its time
    assert line.get_xydata().tolist() == [[0, 1], [1, 1], [2.5, 4], [3, 2]]
    assert panels[1].lines[0].get_ydata().tolist() == [0, 0, 3, 2.5]


def test_all_figures_of_a_document_are_drawn(tmp_path: Any) -> None:
    drawn = dict(figures.served_figures(CONTENT))
    assert [*drawn] == ["frontier", "switch_off", "over_time"]
    titles = {each.texts[0].get_text() for each in drawn.values()}
    assert "A server over time: llama-3.1-8b on 2 x h100, 20 requests/s" in titles  # the highest load that a policy keeps up with
    paths = figures.of_served(CONTENT, tmp_path / "load", ("svg",))
    assert [path.name for path in paths] == ["load_frontier.svg", "load_switch_off.svg", "load_over_time.svg"]
    few = CONTENT | {"by_context": [], "series": []}
    assert [name for name, _ in figures.served_figures(few)] == ["frontier"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"by_context": [MAP[0] | {"running": 0}]}, "by_context.running"), ({"table": [row("off", 1.0, float("inf"), 1.0)]}, "tpot"),
     ({"series": [series("off") | {"blocks": [1.0]}]}, "values of series.blocks")],
)  # fmt: skip
def test_documents_changed_by_hand_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        [*figures.served_figures(CONTENT | change)]


def test_more_policies_than_styles_are_not_drawn() -> None:
    many = [row(f"static:{each}", 2.0, 4.0 + each, 100.0) for each in range(1, 15)]
    assert "frontier" not in dict(figures.served_figures(CONTENT | {"table": many}))
    assert np.all([each["stable"] for each in many])
