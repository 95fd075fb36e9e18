"""`calibrate links`: time transfers between processes, host and GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from calibrate.commands.common_options import Json, Quiet, guarded, numbers, progress
from model.base import strict_json

_QUICK = (1024, 65_536, 1_048_576)


@guarded
def links(
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the profiles and of the raw rows.")] = Path("profiles"),
    link: Annotated[
        str | None,
        typer.Option(help="shared-memory, gloo, host-to-device, device-to-host, device-to-device, nccl. Default: all available."),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Message sizes [bytes]. Default: 1 KiB to 64 MiB, in factors of 4.")] = None,
    repeats: Annotated[int, typer.Option(help="Repeats of each size.")] = 50,
    quick: Annotated[bool, typer.Option("--quick", help="Short trial: three sizes, few repeats.")] = False,
    name: Annotated[str, typer.Option(help="Profiles are named NAME-LINK.")] = "links",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time copies between host and GPUs, and messages between processes, by size.

    calibrate links -o profiles

    calibrate links --link gloo,shared-memory --sizes 1024,1048576 -o profiles
    """
    from calibrate.timing import transfers as timed
    from model.hardware.profile_files import load

    chosen = tuple(each.strip() for each in link.split(",")) if link is not None else None
    asked = numbers("sizes", sizes) if sizes is not None else _QUICK if quick else timed.SIZES
    with progress(quiet, "links", "finished links are written; run the others with --link") as bar:
        result = timed.time_links(
            out, links=chosen, sizes=asked, repeats=min(repeats, 5) if quick else repeats, name=name, progress=bar
        )
    if as_json:
        written = {each: str(path) for each, path in result.profiles.items()}
        print(strict_json.dumps({"profiles": written, "failed": result.failed}, indent=2))
    else:
        for path in result.profiles.values():
            profile = load(path)
            print(f"{profile.engine}, best {profile.bandwidth / 1e9:.2f} GB/s")
            for row in profile.rows("send").iter_rows(named=True):
                print(f"{row['size']:>12} bytes{row['time_s'] * 1e6:12.1f} us{row['size'] / row['time_s'] / 1e9:10.2f} GB/s")
            print(path)
    for each, reason in result.failed.items():
        print(f"failed: {each}: {reason}", file=sys.stderr)
    if result.failed:
        raise typer.Exit(1)
