"""Small synthetic tables of other projects: copies, readers, and ways to corrupt them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl

from calibrate.importers import aiconfigurator, llmservingsim, vidur
from model.hardware.profile import Profile

TABLES = Path(__file__).parents[1] / "data" / "importers"


def copy_tables(tmp_path: Path) -> Path:
    """Copy the tables, to be corrupted; tables that are Parquet in the original project are converted."""
    copy = tmp_path / "tables"
    shutil.copytree(TABLES, copy)
    for path in (copy / "aiconfigurator").rglob("*.csv"):
        pl.read_csv(path).write_parquet(path.with_suffix(".parquet"))
        path.unlink()
    return copy


def from_vidur(folder: Path, **more: str) -> Profile:
    return vidur.read(folder / "vidur", model="llama-2-7b", gpu="a100", network=folder / "vidur" / "network", **more)


def from_aiconfigurator(folder: Path, **more: str) -> Profile:
    return aiconfigurator.read(folder / "aiconfigurator", gpu="h100", **{"engine": "vllm/1.0", **more})


def from_llmservingsim(folder: Path) -> Profile:
    return llmservingsim.read(folder / "llmservingsim" / "tp1", model="llama-3.1-8b", gpu="rtx-4090")


READERS: dict[str, Callable[..., Profile]] = {
    "vidur": from_vidur,
    "aiconfigurator": from_aiconfigurator,
    "llmservingsim": from_llmservingsim,
}


def times(made: Profile, part: str, tensor_parallel: int = 1) -> dict[tuple[int, ...], float]:
    """The times of a part by its axes [us], rounded to ns."""
    rows = made.rows(part, tensor_parallel)
    return {tuple(row[:-3]): round(row[-3] * 1e6, 3) for row in rows.rows()}


# --- Corrupted tables ---


def swap(old: str, new: str, count: int = 1) -> Callable[[Path], None]:
    """Return a function that replaces one text by another in a file."""

    def spoil(path: Path) -> None:
        content = csv_of(path)
        assert old in content, "the test changes nothing"
        write(path, content.replace(old, new, count))

    return spoil


def csv_of(path: Path) -> str:
    return path.read_text() if path.suffix == ".csv" else pl.read_parquet(path).write_csv()


def write(path: Path, text: str) -> None:
    if path.suffix == ".csv":
        path.write_text(text)
    else:
        pl.read_csv(text.encode()).write_parquet(path)


def header_only(path: Path) -> None:
    write(path, csv_of(path).splitlines()[0] + "\n")


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


def invalid_file(path: Path) -> None:
    path.write_bytes(b"PAR1 this is no Parquet" if path.suffix == ".parquet" else b'a,b\n1,2,3,4\n"unclosed')


def remove_file(path: Path) -> None:
    path.unlink()


MLP, GEMM = "vidur/mlp.csv", "aiconfigurator/gemm/vllm/1.0/gemm_perf.parquet"
DECODE = "aiconfigurator/attention/vllm/1.0/generation_attention_perf.parquet"
DENSE, SEQUENCE, ATTENTION = (f"llmservingsim/tp1/{name}.csv" for name in ("dense", "per_sequence", "attention"))
FIRST = "0.0015,0.005,0.0015,0.060"
"""Norm and GEMMs of the first row: deviation, median."""


# --- Commands ---


def arguments(folder: Path) -> dict[str, list[str]]:
    """Arguments of each command."""
    return {
        "vidur": ["import", "vidur", str(folder / "vidur"), "--model", "llama-2-7b", "--gpu", "a100"],
        "aiconfigurator": ["import", "aiconfigurator", str(folder / "aiconfigurator"), "--gpu", "h100", "--engine", "vllm/1.0"],
        "llmservingsim": [
            "import",
            "llmservingsim",
            str(folder / "llmservingsim/tp1"),
            "--model",
            "llama-3.1-8b",
            "--gpu",
            "rtx-4090",
        ],
    }
