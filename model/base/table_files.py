"""Files of measured rows, .csv or .parquet: a new file, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from model.base import whole_files
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl

FORMATS = (".csv", ".parquet")


def check_new(out: Path) -> None:
    """Refuse a path with another ending, and one where a file is.

    >>> check_new(Path("rows.txt"))
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: out must end in .csv or .parquet, got rows.txt
    """
    if out.suffix not in FORMATS:
        raise ParameterError(f"out must end in {' or '.join(FORMATS)}, got {out.name}")
    if out.exists():
        raise ParameterError(f"out must be a new file, and {out.name} is there; give another, or remove it")


def write(table: pl.DataFrame, out: Path) -> None:
    """Write the table, completely or not at all; columns of lists go only into .parquet."""
    with whole_files.atomic_path(out) as part:
        if out.suffix == ".csv":
            import polars as pl

            table.drop([name for name, kind in table.schema.items() if isinstance(kind, pl.List)]).write_csv(part)
        else:
            table.write_parquet(part, statistics=False)
