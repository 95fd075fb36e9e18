"""Tables of other projects: impossible times, repeats, and times that fall with more tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from calibrate.importers import imported_tables
from model.base.checks import ParameterError
from model.hardware import devices

GPU = devices.Device("made-up", 1e9, 1e12, {"bfloat16": 1e14}, 1e10, 1e10, 10e6, "a made-up sheet")


def judged(seconds: float, **more: Any) -> str:
    """Return the error about a time, which occurs three times."""
    table = imported_tables.ImportedTable(Path("t.csv"), "t.csv", pl.DataFrame({"t": [1.0, 1.0, 1.0]}), np.array([4, 6, 9]))
    more = {key: np.array([0.0, value, value]) if key in ("moved", "operations") else value for key, value in more.items()}
    try:
        imported_tables.check_reached(table, "t", np.array([1e-5, seconds, seconds]), GPU, **more)
    except ParameterError as error:
        return str(error)
    return ""


def test_times_are_checked_against_lower_and_upper_bounds() -> None:
    """A made-up device with 1 TB/s, a cache of 10 MB and 100 TFLOP/s, of which 110 are accepted."""
    ending = "; check the unit and the device, or leave this file out"
    also = " (2 rows like it)"
    # 30 MB, of which 20 come from memory: 20 us.
    assert judged(20.001e-6, moved=30e6) == judged(19e-6, moved=30e6, rounding=1.001e-6) == ""
    slow = f"t.csv: row 6, column t: 1.9e-05 s would be 1.58e+12 bytes/s, above the 1e+12 bytes/s of the memory of made-up{also}"
    assert judged(19e-6, moved=30e6) == slow + ending
    assert judged(19e-6, moved=30e6, rounding=0.999e-6) == slow + ending
    # 11 GFLOP at 110 TFLOP/s: 100 us.
    assert judged(100.001e-6, operations=11e9) == ""
    said = judged(99.99e-6, operations=11e9)
    assert said == (
        "t.csv: row 6, column t: 9.999e-05 s would be 1.1e+14 operations/s, above the 1.1e+14 operations/s of the arithmetic of "
        f"made-up{also}{ending}"
    )
    assert "0 s would be zero time, above" in judged(0.0, operations=11e9)
    # A hundredth of both peaks, added up: 3 ms and 11 ms, plus 0.1 ms per launch.
    for most, launches in ((3e-3 + 11e-3 + 1e-4, 1), (3e-3 + 11e-3 + 5e-4, 5)):
        more: dict[str, Any] = {"moved": 30e6, "operations": 11e9} | ({"launches": launches} if launches > 1 else {})
        assert judged(0.9999 * most, **more) == ""
        assert judged(1.0001 * most, **more) == (
            f"t.csv: row 6, column t: {1.0001 * most:.4g} s is too long{also}: made-up at a hundredth of its peaks takes at most "
            f"{most:.3g} s{ending}"
        )
    # Without bytes and operations only a launch; times at the bounds are accepted.
    assert judged(1e-4) == ""
    assert "0.0001 s is too long" in judged(1e-4 + 5e-13)
    assert judged(1e-6, moved=11e6) == judged(11e8 / (1e14 * 1.1), operations=11e8) == ""
    # Kernels that do more than necessary have a larger bound.
    assert judged(20e-3, moved=30e6, most=(np.array([1.0, 90e6, 90e6]), np.array([1.0, 11e9, 11e9]))) == ""
    assert "row 4" in judged(5e-3, moved=30e6, most=(np.array([-1e9, 90e6, 90e6]), np.array([0.0, 11e9, 11e9])))


def test_repeats_are_merged_to_medians_per_tensor_parallel() -> None:
    def of(*values: float) -> Any:
        return np.array(values, dtype=np.float64)

    times = {"time_s": of(3, 9, 5, 4), "low_s": of(1, 8, 0, 7)}
    found = imported_tables.rows("dense", {"tensor_parallel": 4, "tokens": of(2, 1, 2, 2)}, times)
    assert found == [
        {"part": "dense", "repeats": 1, "tensor_parallel": 4, "tokens": 1, "time_s": 9.0, "low_s": 8.0},
        {"part": "dense", "repeats": 3, "tensor_parallel": 4, "tokens": 2, "time_s": 4.0, "low_s": 1.0},
    ]
    # Per tensor parallel size, and for this part only: 1.0 to 0.94 falls by 6 %, and 1.0 to 0.96 by 4 %.
    falls = [(1, 1, 1.0), (1, 2, 0.94), (2, 1, 9.0), (2, 2, 9.5), (2, 4, 9.12)]
    rows = [
        {"part": "dense", "tensor_parallel": tensor_parallel, "tokens": tokens, "time_s": time}
        for tensor_parallel, tokens, time in falls
    ]
    other = [{"part": "head", "tensor_parallel": 1, "tokens": tokens, "time_s": 1 / tokens} for tokens in (1, 2)]
    [said] = imported_tables.dips([*rows, *other], "dense", "tokens")
    assert said == "dense: at 1 of 5 points the time falls by more than 5%, by 6% at tokens 2"
    assert imported_tables.dips(rows[2:], "dense", "tokens") == []


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 3, 4, 5, 1, 2)])
def test_the_note_names_the_largest_fall(order: tuple[int, ...]) -> None:
    found = [10.0, 20.0, 12.0, 30.0, 27.0, 40.0] if order[1] == 1 else [10.0, 30.0, 27.0, 40.0, 24.0, 50.0]
    rows = [{"part": "dense", "tokens": 2**place, "time_s": time} for place, time in enumerate(found)]
    (note,) = imported_tables.dips(rows, "dense", "tokens")
    at = 4 if order[1] == 1 else 16
    assert note == f"dense: at 2 of 6 points the time falls by more than 5%, by 40% at tokens {at}"
