"""Baseline of the speed-ups in a figure: plain decoding on the same devices, or on one where numbers of devices are compared."""

from __future__ import annotations

import polars as pl

ONE, SAME = "plain decoding on one device", "plain decoding on the same devices"
_NAME = "speedup_over_one_device"


def over_one_device(rows: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Return the rows with speed-ups, bounds and compute per token relative to plain decoding on one device; and the baseline.

    Where layers are split and a model may not fit one device, the rows are unchanged: relative to the same devices.

    >>> rows = pl.DataFrame({"tensor_parallel": [1, 4], "speedup": [1.5, 2.0], "compute_per_token": [1.0, 1.2]})
    >>> over_one_device(rows)[1]
    'plain decoding on the same devices'
    >>> table, baseline = over_one_device(rows.with_columns(speedup_over_one_device=pl.Series([1.5, 6.0])))
    >>> baseline, table["speedup"].to_list(), table["compute_per_token"].round(3).to_list()
    ('plain decoding on one device', [1.5, 6.0], [1.0, 1.6])
    """
    if "tensor_parallel" not in rows.columns or rows["tensor_parallel"].fill_null(1).max() == 1:
        return rows, ONE
    valued = pl.col("speedup").is_not_null()
    if _NAME not in rows.columns or rows.select((valued & pl.col(_NAME).is_null()).any()).item():
        return rows, SAME
    # Plain decoding keeps `tensor_parallel` devices busy: its compute there relative to its compute on one device.
    factor = pl.col("speedup") / pl.col(_NAME) * pl.col("tensor_parallel").fill_null(1)
    ends = ("", "_low", "_high", "_input_low", "_input_high")
    compute = [pl.col(f"compute_per_token{end}") * factor for end in ends[:3] if f"compute_per_token{end}" in rows.columns]
    speeds = [pl.col(f"{_NAME}{end}").alias(f"speedup{end}") for end in ends if f"{_NAME}{end}" in rows.columns]
    return rows.with_columns(*compute, *speeds), ONE
