"""A map over all methods as printed text."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from model.methods import registry
from sim.advice import advice_text
from sim.advice.other_methods import gpu_ms_per_token

if TYPE_CHECKING:
    from sim.maps.method_map import MethodMap

WIDTH = advice_text.WIDTH


def text(found: MethodMap, width: int = WIDTH) -> str:
    """The map: verdict, a line for each cell, methods without a value, and what it rests on."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False, markup=False)
    for paragraph in textwrap.wrap(found.verdict, width):
        console.print(paragraph, soft_wrap=True)
    console.print()
    console.print(_cells(found))
    if found.left_out:
        console.print("\nnot evaluated")
    for name, why in found.left_out:
        advice_text.bullet(console, f"{registry.label(name, short=True)}: {why}", width)
    console.print("\nrests on")
    for line in advice_text.rests_on(found.situation.rests_on):
        advice_text.bullet(console, line, width)
    for note in (*found.situation.notes, *found.notes):
        advice_text.bullet(console, f"note: {note}", width)
    out: Any = console.file
    return str(out.getvalue()).rstrip() + "\n"


def _cells(found: MethodMap) -> Table:
    replica = found.situation.tensor_parallel
    table = Table(
        title=f"fastest of all methods; speed-up over plain decoding on {replica} GPU{'s' if replica > 1 else ''}",
        title_justify="left", box=box.SIMPLE_HEAD, title_style="", pad_edge=False, padding=(0, 0, 0, 1),
    )  # fmt: skip
    names = (
        "\ncontext", "running\nseqs", "\nfastest", "\nspeed-up", "80 %\ninterval", "TPOT\n[ms]", "\nGPUs", "GPU-ms\nper token",
        "within its\ninterval", "least GPU-ms\nper token",
    )  # fmt: skip
    texts = names[2], *names[8:]
    for name in names:
        table.add_column(name, justify="left" if name in texts else "right", no_wrap=name not in texts[1:])
    before = None
    for cell in found.cells:
        context = "" if cell.context == before else f"{cell.context:,}"
        before = cell.context
        if not cell.fits:
            table.add_row(context, f"{cell.batch:,}", "does not fit", *[""] * 7)
            continue
        row, cheap = cell.fastest.row, cell.cheapest
        low, high = row["speedup_low"], row["speedup_high"]
        least = "" if cheap is cell.fastest else f"{cheap.label} {advice_text.number(gpu_ms_per_token(cheap.row))}"
        table.add_row(
            context, f"{cell.batch:,}", ", ".join(filter(None, (cell.fastest.label, row["setting"]))), f"{row['speedup']:.2f}x",
            "-" if low is None else f"{low:.2f}-{high:.2f}", advice_text.number(row["tpot_ms"]), f"{row['gpus']}",
            advice_text.number(gpu_ms_per_token(row)), ", ".join(each.label for each in cell.tied) or "-", least or "the fastest",
        )  # fmt: skip
    return table
