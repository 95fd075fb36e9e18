"""The figures on lossy methods, by their artists: what is drawn is the theory."""

from typing import Any

import numpy as np
import pytest

from figures.exit_schedule import Schedule, draw
from model import published, skipdecode
from model.checks import ParameterError

LAYERS, PROMPT, SEQUENCE = 24, 60, 160
SCHEDULES = [
    Schedule(f"{row['target_speedup']}x", row["min_layers"], row["max_layers"])
    for row in published.table("skipdecode-table-2").rows
    if row["model"] == "opt-1.3b"
]


def drawn(schedules: list[Schedule], **more: Any) -> Any:
    bounds: dict[str, Any] = {"layers": LAYERS, "prompt": PROMPT, "sequence": SEQUENCE, "source": "published"}
    return draw(schedules, **{**bounds, **more})


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
