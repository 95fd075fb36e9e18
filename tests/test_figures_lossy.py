"""The figures on lossy methods, by their artists: what is drawn is the theory."""

from typing import Any

import numpy as np
import pytest

from figures import layer_map
from figures.exit_schedule import SKIPPED, TOP, WARM_UP, Schedule, draw, layers_of
from model import published, skipdecode
from model.checks import ParameterError
from tests.test_figures_speculative import inside

LAYERS, PROMPT, SEQUENCE = 24, 60, 160
SCHEDULES = [
    Schedule(f"{row['target_speedup']}x", row["min_layers"], row["max_layers"])
    for row in published.table("skipdecode-table-2").rows
    if row["model"] == "opt-1.3b"
]


BOUNDS: dict[str, Any] = {"layers": LAYERS, "prompt": PROMPT, "sequence": SEQUENCE}


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
    # What a token uses, all before it have used too: nothing is computed again.
    assert np.all(np.diff(used, axis=1) <= 0)
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["used", "skipped"]
    assert any("published" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("steep", 2, LAYERS, 2.0)])
def test_each_token_goes_through_the_first_layers_and_the_topmost(schedule: Schedule, warm_up: int) -> None:
    found = layers_of(schedule, **BOUNDS, warm_up=warm_up)
    budgets = skipdecode.exit_layers(
        schedule.min_layers, schedule.max_layers, PROMPT, SEQUENCE, SEQUENCE - PROMPT, rounding="half-up", power=schedule.power
    )
    assert (found != SKIPPED).sum(axis=0).tolist() == budgets.tolist()
    assert (found == WARM_UP).sum(axis=0).tolist() == np.minimum(warm_up, budgets).tolist()
    for column in found.T:
        # From the bottom up: layers to warm up, skipped ones, top ones, and nothing in another order.
        order = [kind for kind, before in zip(column, [None, *column[:-1]], strict=True) if kind != before]
        assert order == [kind for kind in (WARM_UP, SKIPPED, TOP) if kind in order]
    assert not np.any((found == WARM_UP).any(axis=1) & (found == TOP).any(axis=1))
    # What a token goes through, all before it went through: none of their keys and values is missing.
    assert np.all(np.diff((found != SKIPPED).astype(int), axis=1) <= 0)


def test_the_maps_and_the_shares_beside_them() -> None:
    figure = layer_map.draw(SCHEDULES, **BOUNDS, warm_up=2, source="published")
    assert len(figure.axes) == 2 * len(SCHEDULES)
    for schedule, field, beside in zip(SCHEDULES, figure.axes[::2], figure.axes[1::2], strict=True):
        (image,) = field.get_images()
        found = np.asarray(image.get_array())
        assert found.tolist() == layers_of(schedule, **BOUNDS, warm_up=2).tolist()
        assert image.get_extent() == [0.5, SEQUENCE - PROMPT + 0.5, 0.5, LAYERS + 0.5]
        ends = {(patch.get_y(), patch.get_x() + patch.get_width()) for patch in beside.patches}
        reached = [max(end for y, end in ends if y == layer + 0.5) for layer in range(LAYERS)]
        assert reached == pytest.approx((found != SKIPPED).mean(axis=1).tolist())
        # The shares of all layers together are the mean layers of a token, which the title says.
        assert f"{schedule.label}: {sum(reached):.2f} layers" in field.get_title(loc="left")
        assert f"{LAYERS - schedule.max_layers} of {LAYERS} never used" in field.get_title(loc="left")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["topmost layers", "first layers, to warm up", "skipped"]
    assert any("published" in text.get_text() for text in figure.texts)
    assert inside(figure)


def test_a_map_says_only_what_is_in_it() -> None:
    figure = layer_map.draw([Schedule("whole", LAYERS, LAYERS)], **BOUNDS, warm_up=0, source="assumed")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["topmost layers"]
    assert "never" not in figure.axes[0].get_title(loc="left")
    assert inside(figure)


@pytest.mark.parametrize(
    ("schedules", "more", "message"),
    [
        ([], {}, "schedules must be 1 to 6, got 0"),
        (SCHEDULES * 2, {}, "schedules must be 1 to 6, got 8"),
        (SCHEDULES, {"layers": 12}, "max_layers must be between 1 and layers=12, got 16"),
        (SCHEDULES, {"prompt": 160}, "prompt must be between 0 and sequence-1=159, got 160"),
    ],
)
def test_bad_input_names_the_value_and_its_bound(schedules: list[Schedule], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        drawn(schedules, **more)
    with pytest.raises(ParameterError, match=f"^{message}"):
        layer_map.draw(schedules, **{**BOUNDS, "source": "published", **more})
