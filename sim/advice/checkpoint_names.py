"""Names of checkpoints in lines to paste: those of the log's server, else those that the user gave, else placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from model.architectures import draft_heads, published_shapes
from sim.advice.engine_settings import DRAFT, MODEL
from sim.advice.situation import Situation

LOG, FILE, PROJECT, NOTHING = "log", "file", "project", "nothing"


class Checkpoint(NamedTuple):
    """A name, and where it is from: the `log`, a `file`, the names of this `project`, or `nothing` (a placeholder)."""

    text: str
    source: str


class Checkpoints(NamedTuple):
    """Names of the model's and of the draft's checkpoint."""

    model: Checkpoint
    draft: Checkpoint


def of(said: Situation, draft: str | None) -> Checkpoints:
    """Names for the model, and for the draft that the advice is about."""
    model, checkpoint = _given(said.name, MODEL), _given(draft, DRAFT)
    if said.served is not None and said.served.model is not None:
        model = Checkpoint(said.served.model, LOG)
    if said.served is not None and said.served.draft is not None:  # another draft than the log's is refused
        checkpoint = Checkpoint(said.served.draft, LOG)
    return Checkpoints(model, checkpoint)


def _given(name: str | None, placeholder: str) -> Checkpoint:
    """What the user gave: the folder of a configuration, or a model's name; a kind of draft head names no checkpoint."""
    if name is None or name in draft_heads.ABOUT or draft_heads.is_head(name):
        return Checkpoint(placeholder, NOTHING)
    if not published_shapes.is_path(name):
        return Checkpoint(name, PROJECT)
    path = Path(name)
    if path.suffix == ".json" and path.name != "config.json":
        return Checkpoint(placeholder, NOTHING)  # a configuration that is in no checkpoint's folder
    return Checkpoint(str(path.parent if path.suffix == ".json" else path), FILE)


def comments(names: Checkpoints, lines: Sequence[str]) -> Iterator[str]:
    """Comment lines on the names in these lines: which are placeholders, this project's own, or those of a log."""
    used = [each for each in names if any(each.text in line for line in lines if not line.startswith("#"))]
    unknown = [each.text for each in used if each.source == NOTHING]
    if len(unknown) == 1:
        yield f"# {unknown[0]} stands for the name of your checkpoint"
    elif unknown:
        yield f"# {' and '.join(unknown)} stand for the names of your checkpoints"
    for each in used:
        if each.source == PROJECT:
            yield f"# {each.text} is a name of `sim ls shapes`: write the name on the hub, or the folder, of your checkpoint"
    if any(each.source == LOG for each in used):
        yield "# names of checkpoints are those that the server of the log printed"
