"""Figures of SkipDecode: drawn values are the theory's."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from figures.of_theory import skipdecode_layers, skipdecode_schedule
from figures.of_theory.skipdecode_schedule import SKIPPED, TOP, WARM_UP, Schedule, draw, layers_of
from model import published
from model.base.checks import ParameterError
from model.methods.skipdecode import theory as skipdecode
from tests.figures.test_figures_speculative import inside
from tests.support.figure_checks import odd_dashes, shown

LAYERS, PROMPT, SEQUENCE = 24, 60, 160
SCHEDULES = [
    Schedule(f"{row['target_speedup']}x", row["min_layers"], row["max_layers"])
    for row in published.table("skipdecode-table-2").rows
    if row["model"] == "opt-1.3b"
]


BOUNDS: dict[str, Any] = {"layers": LAYERS, "prompt": PROMPT, "sequence_length": SEQUENCE}


def drawn(schedules: list[Schedule], **more: Any) -> Any:
    return draw(schedules, **{**BOUNDS, "source": "published", **more})


# --- SkipDecode ---------------------------------------------------------------------------------------------------------


def test_every_schedule_and_its_mean_are_drawn() -> None:
    left = drawn([*SCHEDULES, Schedule("steep", 8, 16, 2.0)]).axes[0]
    curves = {line.get_label(): line for line in left.get_lines()}
    for each in (*SCHEDULES, Schedule("steep", 8, 16, 2.0)):
        bounds = each.min_layers, each.max_layers, PROMPT, SEQUENCE, SEQUENCE - PROMPT
        expected = skipdecode.exit_layers(*bounds, rounding="half-up", power=each.power)
        assert curves[each.label].get_ydata().tolist() == expected.tolist()
        assert curves[each.label].get_xdata().tolist() == list(range(PROMPT, SEQUENCE))
        assert set(curves[f"mean {each.label}"].get_ydata()) == {float(expected.mean())}
    assert len({(curves[each.label].get_linestyle(), curves[each.label].get_color()) for each in SCHEDULES}) == len(SCHEDULES)
    texts = [text.get_text() for text in left.texts]
    assert f"2x: {24 / skipdecode.mean_layers(8, 16, PROMPT, SEQUENCE, 100, 'half-up'):.2f}× fewer" in texts


def test_the_map_has_the_layers_of_each_position() -> None:
    figure = drawn(SCHEDULES, warm_up=2)
    (image,) = figure.axes[1].get_images()
    used = np.asarray(image.get_array())
    assert used.shape == (LAYERS, SEQUENCE)
    budgets = skipdecode.exit_layers(8, 16, PROMPT, SEQUENCE, SEQUENCE - PROMPT, rounding="half-up")
    assert used.sum(axis=0).tolist() == [LAYERS] * PROMPT + budgets.tolist()
    assert used[:2].all()
    assert used[LAYERS - 6 :].all()
    # All earlier tokens have used the layers that a token uses: nothing is recomputed.
    assert np.all(np.diff(used, axis=1) <= 0)
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["used", "skipped"]
    assert any("published" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("steep", 2, LAYERS, 2.0)])
def test_each_token_uses_the_first_and_the_top_layers(schedule: Schedule, warm_up: int) -> None:
    found = layers_of(schedule, **BOUNDS, warm_up=warm_up)
    budgets = skipdecode.exit_layers(
        schedule.min_layers, schedule.max_layers, PROMPT, SEQUENCE, SEQUENCE - PROMPT, rounding="half-up", power=schedule.power
    )
    assert (found != SKIPPED).sum(axis=0).tolist() == budgets.tolist()
    assert (found == WARM_UP).sum(axis=0).tolist() == np.minimum(warm_up, budgets).tolist()
    for column in found.T:
        # From the bottom: warm-up layers, skipped layers, top layers, in this order.
        order = [kind for kind, before in zip(column, [None, *column[:-1]], strict=True) if kind != before]
        assert order == [kind for kind in (WARM_UP, SKIPPED, TOP) if kind in order]
    assert not np.any((found == WARM_UP).any(axis=1) & (found == TOP).any(axis=1))
    # All earlier tokens have used the layers that a token uses: their KV cache rows exist.
    assert np.all(np.diff((found != SKIPPED).astype(int), axis=1) <= 0)


def test_maps_and_the_shares_next_to_them() -> None:
    figure = skipdecode_layers.draw(SCHEDULES, **BOUNDS, warm_up=2, source="published")
    assert len(figure.axes) == 2 * len(SCHEDULES)
    for schedule, field, shares in zip(SCHEDULES, figure.axes[::2], figure.axes[1::2], strict=True):
        (image,) = field.get_images()
        found = np.asarray(image.get_array())
        assert found.tolist() == layers_of(schedule, **BOUNDS, warm_up=2).tolist()
        assert image.get_extent() == [0.5, SEQUENCE - PROMPT + 0.5, 0.5, LAYERS + 0.5]
        ends = {(patch.get_y(), patch.get_x() + patch.get_width()) for patch in shares.patches}
        reached = [max(end for y, end in ends if y == layer + 0.5) for layer in range(LAYERS)]
        assert reached == pytest.approx((found != SKIPPED).mean(axis=1).tolist())
        # The shares of all layers sum to the mean layers per token in the title.
        assert f"{schedule.label}: {sum(reached):.2f} layers" in field.get_title(loc="left")
        assert f"{LAYERS - schedule.max_layers} of {LAYERS} never used" in field.get_title(loc="left")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["top layers", "warm-up layers (first)", "skipped"]
    assert any("published" in text.get_text() for text in figure.texts)
    assert inside(figure)


def test_legend_and_title_of_a_map_name_only_what_is_in_it() -> None:
    figure = skipdecode_layers.draw([Schedule("whole", LAYERS, LAYERS)], **BOUNDS, warm_up=0, source="assumed")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["top layers"]
    assert "never" not in figure.axes[0].get_title(loc="left")
    assert inside(figure)


@pytest.mark.parametrize(
    ("schedules", "more", "message"),
    [
        ([], {}, "schedules must be 1 to 6, got 0"),
        (SCHEDULES * 2, {}, "schedules must be 1 to 6, got 8"),
        (SCHEDULES, {"layers": 12}, "max_layers must be between 1 and layers=12, got 16"),
        (SCHEDULES, {"prompt": 160}, "prompt must be between 0 and sequence_length-1=159, got 160"),
    ],
)
def test_bad_input_names_the_value_and_its_bound(schedules: list[Schedule], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        drawn(schedules, **more)
    with pytest.raises(ParameterError, match=f"^{message}"):
        skipdecode_layers.draw(schedules, **{**BOUNDS, "source": "published", **more})


# --- By hand ---------------------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"layers": 4, "prompt": 2, "sequence_length": 5, "source": "mine"}
"""Three generated tokens: the first uses three layers, the others two (2 1/3 and 1 2/3, rounded)."""


def test_schedules_by_hand() -> None:
    figure = draw([Schedule("a", 1, 3), Schedule("b", 2, 4, 2.0)], **SHORT)
    found = shown(figure)
    assert found.texts == [
        "Layers that a token uses", "SkipDecode, mine; prompt 2, sequence of at most 5 tokens, 4 layers",
    ]  # fmt: skip
    left, right = found.panels
    assert (left.title, left.x, left.y) == ("dashed: mean over generated tokens", "position  [tokens]", "layers per token")
    assert (right.title, right.x, right.y) == ("a: 1 warm-up, then the top layers", "position  [tokens]", "layer")
    power = skipdecode.exit_layers(2, 4, 2, 5, 3, rounding="half-up", power=2.0).tolist()
    assert left.lines == [
        ("prompt", [(0, 4), (2, 4)]), ("a", [(2, 3), (3, 2), (4, 2)]), ("mean a", [(2, 7 / 3), (5, 7 / 3)]),
        ("b", [*zip((2, 3, 4), power, strict=True)]), ("mean b", [(2, sum(power) / 3), (5, sum(power) / 3)]),
    ]  # fmt: skip
    assert left.texts == ["a: 1.71× fewer", f"b: {12 / sum(power):.2f}× fewer"]
    axes, map_axes = figure.axes
    assert (*axes.get_xlim(), *axes.get_ylim()) == (0, 5, 0, 4.5)
    assert [line.get_drawstyle() for line in axes.lines if line.get_label() in "ab"] == ["steps-post"] * 2
    assert (left.grid, right.grid) == ("xy", "")
    (image,) = map_axes.get_images()
    assert np.asarray(image.get_array()).tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert image.get_extent() == [0, 5, 0.5, 4.5]
    assert (image.origin, image.get_clim(), image.get_interpolation()) == ("lower", (0, 1), "nearest")
    assert map_axes.get_aspect() == "auto"
    assert set(np.asarray(map_axes.lines[0].get_xdata()).tolist()) == {2}
    for each in (axes, map_axes):
        assert all(at == round(at) for at in each.get_xticks())
    assert all(at == round(at) for at in map_axes.get_yticks())
    assert not odd_dashes(figure)
    assert [str(layer) for layer in layers_of(Schedule("", 2, 2), layers=3, prompt=1, sequence_length=2, warm_up=5).T] == [
        "[1 1 0]"
    ]
    assert layers_of(Schedule("", 1, 1), layers=3, prompt=0, sequence_length=1).T.tolist() == [[WARM_UP, SKIPPED, SKIPPED]]
    six = [Schedule(str(each), 1, 2) for each in range(7)]
    assert len(draw(six[:6], **SHORT).axes[0].lines) == 13
    for schedules, words in ((six, "schedules must be 1 to 6, got 7"), ([Schedule("", 1, 5)], "max_layers must be between 1 and")):
        with pytest.raises(ParameterError, match=words):
            draw(schedules, **SHORT)
    for layers in (0, 10**6):
        with pytest.raises(ParameterError, match="layers must be between 1 and"):
            draw([Schedule("", 1, 1)], **SHORT | {"layers": layers})


def test_schedules_of_a_run_by_hand() -> None:
    rows = pl.DataFrame([
        {"method": method, "rounding": rounding, "min_layers": low, "max_layers": high, "power": power, "layers": 24,
         "prompt": prompt, "sequence_length": 160, "warm_up": 1}
        for method, rounding, low, high, power, prompt in (
            ("skipdecode", "half-up", 4, 6, 1.0, 10), ("skipdecode", "half-up", 8, 16, 1.0, 60),
            ("skipdecode", "half-up", 8, 16, 2.0, 60), ("skipdecode", "half-up", 8, 16, 1.0, 60),
            ("skipdecode", "down", 1, 2, 1.0, 60), ("early_exit", "half-up", 1, 2, 1.0, 60),
        )
    ])  # fmt: skip
    found = skipdecode_schedule.of_run(rows)
    assert found is not None
    assert found[0] == [Schedule("16 to 8 layers", 8, 16, 1.0), Schedule("16 to 8 layers, power 2", 8, 16, 2.0)]
    assert found[1] == {"layers": 24, "prompt": 60, "sequence_length": 160, "warm_up": 1, "source": "settings assumed"}
    steady = skipdecode_schedule.of_run(rows.filter(pl.col("power") == 1.0))
    assert steady is not None
    # If two prompts have equally many schedules, the first is drawn.
    assert steady[0] == [Schedule("6 to 4 layers", 4, 6)]
    assert (steady[1]["prompt"], steady[1]["source"]) == (10, "settings published (Table 2)")
    many = pl.concat([rows.head(1).with_columns(min_layers=pl.lit(low, dtype=pl.Int64)) for low in (6, 5, 4, 3, 2, 1, 0)])
    several = skipdecode_schedule.of_run(many)
    assert several is not None
    assert [each.min_layers for each in several[0]] == [6, 5, 4, 3, 2, 1]
    for name in ("method", "min_layers", "max_layers", "power", "rounding", "layers", "prompt", "sequence_length", "warm_up"):
        assert skipdecode_schedule.of_run(rows.drop(name)) is None


def test_maps_of_layers_by_hand() -> None:
    three = [Schedule("a", 1, 3), Schedule("b", 3, 3), Schedule("c", 1, 1)]
    figure = skipdecode_layers.draw(three, **SHORT)
    found = shown(figure)
    assert found.texts == [
        "Layers that each generated token uses",
        "SkipDecode, mine; 4 layers, prompt 2, sequence of at most 5 tokens; halves rounded up",
    ]  # fmt: skip
    assert found.legends == [("", ["top layers", "warm-up layers (first)", "skipped"])]
    maps, shares = found.panels[::2], found.panels[1::2]
    assert [each.title for each in maps] == [
        "a: 2.33 layers on average; 1 of 4 never used", "b: 3.00 layers on average; 1 of 4 never used",
        "c: 1.00 layers on average; 3 of 4 never used",
    ]  # fmt: skip
    assert {(each.x, each.y) for each in maps} == {("generated token", "layer")}
    assert {(each.x, each.y) for each in shares} == {("share of tokens", "")}
    third = pytest.approx(1 / 3)
    wanted = {"warm-up layers (first)": [1, 0, 0, 0], "top layers": [0, 0, third, 1]}
    for label, boxes in shares[0].bars:
        assert [(y, wide, tall) for _, y, wide, tall in boxes] == [(at + 0.5, wanted[label][at], 1) for at in range(4)]
    assert shares[0].ticks == (["50%", "100%"], [])
    # Two maps in a row, and the third below; sizes [inches].
    width, height = figure.get_size_inches()
    assert (width, height) == pytest.approx((0.25 + 2 * 5.7, 0.85 + 2 * 3.0))
    for index, (field, share_axes) in enumerate(zip(figure.axes[::2], figure.axes[1::2], strict=True)):
        row, column = divmod(index, 2)
        inches = [(box.x0 * width, box.y0 * height, box.width * width, box.height * height)
                  for box in (field.get_position(), share_axes.get_position())]  # fmt: skip
        left, bottom = 0.25 + 5.7 * column + 0.45, 3.0 * (1 - row) + 0.55
        assert inches == [pytest.approx((left, bottom, 4.0, 2.1)), pytest.approx((left + 4.1, bottom, 0.8, 2.1))]
        assert (share_axes.get_xlim(), share_axes.get_ylim()) == ((0, 1), (0.5, 4.5))
        (image,) = field.get_images()
        assert (image.get_clim(), image.origin, field.get_aspect()) == ((-0.5, 2.5), "lower", "auto")
        assert all(at == round(at) for at in (*field.get_xticks(), *field.get_yticks()))
    alone = skipdecode_layers.draw(three[1:2], **SHORT, warm_up=0)
    assert alone.get_size_inches().tolist() == pytest.approx([0.25 + 5.7 * 1.3, 3.85])
    assert shown(alone).legends == [("", ["top layers", "skipped"])]
