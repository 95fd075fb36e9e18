"""`calibrate fit`: what a model leaves open, fitted to measured times, and how well it foretells what it was not fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrate.command import guarded

fitting = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    help="Fit what a model leaves open to measured times.",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(fitting, name="fit")


@fitting.callback()
def _group() -> None:
    """Keeps the name of the one command there is."""


@fitting.command("roofline")
@guarded
def roofline(
    folder: Annotated[
        Path, typer.Argument(metavar="DATA_DIR", envvar="DECODESIM_DATA", help="The folder that holds gpu and SOURCES.md.")
    ],
) -> None:
    """The efficiencies of a roofline, fitted to measured layers and attention, beside those that come along; and their errors.

    calibrate fit roofline data
    """
    import numpy as np

    from calibrate.fits import roofline as fits
    from calibrate.validation import percent
    from model.roofline import Efficiency

    layers, tables = fits.layers(folder), fits.attention(folder)
    found, usual = fits.fit(layers, tables), Efficiency()
    print(f"fitted to {sum(each.tokens.size for each in layers)} layers and {sum(each.seconds.size for each in tables)} attentions")
    for name in (*fits.OF_LAYERS, *fits.OF_ATTENTION, "error"):
        unit, scale = (" us", 1e6) if name.endswith("launch") else ("", 1)
        fitted, default = (scale * getattr(each, name) for each in (found, usual))
        print(f"  {name:16} {fitted:7.3f}{unit:3}  comes along: {default:.3f}{unit}")
    for kind, left in (("model on the same GPU", fits.unseen_models(layers)), ("GPU", fits.unseen_gpus(layers))):
        print(f"median errors on an unseen {kind}:")
        for gpu, error in fits.pooled(left).items():
            each = ", ".join(f"{one.model} {percent(float(np.median(np.abs(one.error))))}" for one in left if one.gpu == gpu)
            print(f"  {gpu:5} {percent(error)} ({each})")
