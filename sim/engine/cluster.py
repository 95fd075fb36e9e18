"""Compute units and links of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from model.base import checks

LINKS = ("point-to-point", "shared")
STOPS = ("now", "layer", "pass")


@dataclass(frozen=True)
class Cluster:
    """Compute units and the links between them.

    `links`: a link from the main process to each sub-process (`point-to-point`), or a `shared` link for one transfer at a time.
    `stop`: time at which a stopped process releases its unit: `now`, or at the end of its current `layer` or `pass`.
    """

    units: int
    links: str = "point-to-point"
    stop: str = "now"

    def __post_init__(self) -> None:
        checks.whole("units", self.units, 1, checks.MAX_UNITS)
        checks.one_of("links", self.links, LINKS)
        checks.one_of("stop", self.stop, STOPS)
