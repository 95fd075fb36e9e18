"""`calibrate fit`: fit the free parameters of a time model to measured times, with its errors on unseen data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrate.commands.common_options import guarded
from model.base.command_help import SETTINGS, DocumentedCommand, DocumentedGroup

fitting = typer.Typer(
    cls=DocumentedGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=SETTINGS,
    help="Fit the free parameters of a time model to measured times.",
)  # fmt: skip


@fitting.callback()
def _group() -> None:
    """Make typer keep the command's name, although there is only one."""


@fitting.command("roofline", cls=DocumentedCommand)
@guarded
def roofline(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DATA_DIR]", envvar="DECODESIM_DATA", help="Folder of the public tables (gpu/, SOURCES.md)."),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU,MODEL,TOKENS,SECONDS", help="A measured layer without its attention; repeatable."),
    ] = None,
    product: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU,M,N,K,SECONDS", help="A measured GEMM, M x K by K x N; repeatable."),
    ] = None,
) -> None:
    """Fit roofline efficiencies to measured layers and attention, and compare them with the bundled ones and with unseen data.

    For a new GPU, give --layer or --product: a few measured times adapt the bundled efficiencies, printed as keys of [cost].

    calibrate fit roofline data

    calibrate fit roofline --layer h100,llama-2-7b,1,177e-6
    """
    if layer or product:
        _adapted(layer or [], product or [])
    elif folder is None:
        from model.base.checks import ParameterError

        raise ParameterError("DATA_DIR is required without --layer and --product; name the folder, or set DECODESIM_DATA to it")
    else:
        _fitted(folder)


def _adapted(layers: list[str], products: list[str]) -> None:
    """Print the keys of [cost] fitted to these measured times."""
    from calibrate.fits import roofline_fit as fits
    from model.base.checks import ParameterError
    from model.hardware.roofline import Efficiency

    cells = [fits.layer_cell(each) for each in layers] + [fits.product_cell(each) for each in products]
    gpus = dict.fromkeys(gpu for gpu, _ in cells)
    if len(gpus) > 1:
        raise ParameterError(f"all times must be of one GPU, got {', '.join(gpus)}; fit them one at a time")
    usual = Efficiency()
    found = fits.adapt_efficiency([cell for _, cell in cells])
    print(f"# {len(cells)} measured on {gpus.popitem()[0]}; in brackets the bundled values, fitted to other GPUs")
    for key, name in fits.KEYS.items():
        print(f"{key} = {getattr(found, name):.4g}  # [{getattr(usual, name):.4g}]")
    for _, cell in cells:
        was, now = (cell.predicted(each) / cell.seconds - 1 for each in (usual, found))
        print(f"# error at {cell.tokens:g} tokens: {was:+.1%} with the bundled values, {now:+.1%} now")
    for name, limit in (("error", "reading the weights"), ("compute_error", "arithmetic")):
        if getattr(found, name) == getattr(usual, name):
            print(f"# no time given is limited by {limit}: measure a layer at {'1 token' if name == 'error' else '512 tokens'}")


def _fitted(folder: Path) -> None:
    """Print the fit to all measured layers, and its errors on data that it was not fitted to."""
    import numpy as np

    from calibrate.fits import roofline_fit as fits
    from calibrate.validation.validated_claims import percent
    from model.hardware.roofline import Efficiency

    layers, tables = fits.layers(folder), fits.attention(folder)
    found, usual = fits.fit(layers, tables), Efficiency()
    print(f"fitted to {sum(each.tokens.size for each in layers)} layers and {sum(each.seconds.size for each in tables)} attentions")
    for name in (*fits.OF_LAYERS, *fits.OF_ATTENTION, "error", "compute_error"):
        unit, scale = (" us", 1e6) if name.endswith("launch") else ("", 1)
        fitted, default = (scale * getattr(each, name) for each in (found, usual))
        print(f"  {name:16} {fitted:7.3f}{unit:3}  bundled: {default:.3f}{unit}")
    left_out = (
        ("model on the same GPU", fits.unseen_models(layers)), ("GPU", fits.unseen_gpus(layers)),
        ("GPU with one measured layer of 1 token", fits.errors_with_one_measured(layers, [1])),
    )  # fmt: skip
    for kind, left in left_out:
        for least, most in ((1, fits.MEMORY_BOUND_TOKENS), (fits.COMPUTE_BOUND_TOKENS + 1, np.inf)):
            where = f"to {most} tokens" if least == 1 else f"beyond {least - 1} tokens"
            listed = ", ".join(f"{gpu} {percent(error)}" for gpu, error in fits.pooled(left, most, least).items())
            print(f"median errors on an unseen {kind}, {where}: {listed}")
