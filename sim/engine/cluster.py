"""Compute units and links: what a simulation runs on."""

from __future__ import annotations

from dataclasses import dataclass

from model.base import checks

LINKS = ("point-to-point", "shared")
STOPS = ("now", "layer", "pass")


@dataclass(frozen=True)
class Cluster:
    """Compute units and the links between them.

    `links`: one from the main process to each sub-process (`point-to-point`), or one for all that carries one transfer at a time
    (`shared`). `stop`: when a stopped process lets go of its unit: `now`, at the end of the `layer` or of the `pass` it is in.
    """

    units: int
    links: str = "point-to-point"
    stop: str = "now"

    def __post_init__(self) -> None:
        checks.whole("units", self.units, 1, checks.MAX_UNITS)
        checks.one_of("links", self.links, LINKS)
        checks.one_of("stop", self.stop, STOPS)
