"""CPU profiles measured by this project: they follow from their rows, and predict held-out passes."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.fits import cpu_step
from calibrate.timing import profile_from_timings
from model.architectures import transformer
from model.hardware import profile_files

pytestmark = pytest.mark.usefixtures("one_thread", "fake_time")


# --- Bundled CPU profiles ---


@pytest.mark.parametrize("name", cpu_step.names())
def test_bundled_cpu_profiles_follow_from_their_rows(name: str) -> None:
    bundled = profile_files.load(name)
    header, _ = cpu_step.rows_of(name)
    again = cpu_step.profile_of(name)
    assert again.table.equals(bundled.table)
    assert again.sources == bundled.sources
    assert again.errors == bundled.errors
    assert profile_from_timings.shape_from_fields(header["shape"]) == transformer.preset(header["model"])
    profile_from_timings.check(bundled)


@pytest.mark.parametrize("name", cpu_step.names())
def test_parts_and_overhead_sum_to_held_out_passes(name: str) -> None:
    header, rows = cpu_step.rows_of(name)
    for busy in {row["busy"] for row in rows}:
        errors = [abs(each.error) for each in cpu_step.held_out(rows, header["shape"]["layers"]) if each.busy == busy]
        assert len(errors) >= 12
        assert np.median(errors) <= 0.05


@pytest.mark.parametrize("busy", [0, 1])
def test_a_fitted_overhead_holds_at_other_widths_and_contexts(busy: int) -> None:
    """The overhead is fitted at other widths and contexts; layers, head and embedding are timed at the width itself."""
    header, rows = cpu_step.rows_of("cpu-llama-68m")
    held = cpu_step.held_out(rows, header["shape"]["layers"], cpu_step.POWERS, overhead_alone=True)
    own = [each for each in held if each.busy == busy]
    assert {each.width for each in own} == {3, 6, 12}
    assert {each.context for each in own} == {128, 256}
    fitted = np.median([abs(each.error) for each in own])
    assert fitted <= 0.05
    # The check can fail: without the overhead predictions are too short.
    parts, _ = profile_from_timings.part_rows([row for row in rows if row["kind"] == "point" and row["busy"] == busy], "eager", 2)
    [step] = [row["time_s"] for row in parts if row["part"] == "step"]
    assert np.median([abs(each.error - step / each.measured) for each in own]) > fitted


def test_another_process_never_speeds_up_a_pass() -> None:
    """Measured beyond the error of the medians; the slowdown follows from shared caches and memory."""
    _, rows = cpu_step.rows_of("cpu-llama-68m")
    ratios = cpu_step.slowdowns(rows)
    assert len(ratios) == 32
    assert 1.0 < np.median([*ratios.values()]) < 2.0  # two cores: less than running in turn
    assert min(ratios.values()) > 0.97


def test_the_accuracy_check_notices_a_missing_part() -> None:
    [name, *_] = cpu_step.names()
    header, rows = cpu_step.rows_of(name)
    # The time of the head then goes into the overhead, which does not depend on the width.
    headless = [row | {"head_us": [0.0] * 3} for row in rows]
    errors = [abs(each.error) for each in cpu_step.held_out(headless, header["shape"]["layers"]) if each.busy == 0]
    assert np.median(errors) > 0.05
